"""`rowdelta verify`: compares tables with their sources. It changes nothing."""

import json
import logging
from collections.abc import Iterable, Iterator, Sequence

from pyspark.sql import SparkSession

from changelog.amounts import amount
from sink.config import Config, DatabaseSection, TableSection, VerifySection
from sink.databases.kinds import database_of
from sink.databases.tables import database_table, expanded
from sink.deadletters import table as dead_letters
from sink.deadletters.table import Selection
from sink.errors import ConfigError, RowdeltaError, TemporaryError, summary
from sink.printing import one_line
from sink.redaction import masked
from sink.run.pipeline import open_source
from sink.spark.job_errors import JOB_ERRORS
from sink.spark.sample import SparkSample
from sink.table.keys import table_key, with_key
from sink.table.patterns import ResolvedTable, chosen_tables, find_tables
from sink.table.plan import plan_table
from sink.targets.catalogs import Catalogs
from sink.targets.own_state import property_prefix
from sink.verify.comparison import Difference
from sink.verify.rounds import Outcome, Patience, Rounds, Verdict
from sink.verify.source import SparkTable, VerifySource
from sink.verify.topic import Topic

log = logging.getLogger("rowdelta")

_PACKAGES = "spark.jars.packages"
_TEXT_LENGTH = 60
_WAY_OUT = (
    "Say with what it is compared: verify: {url: 'jdbc:postgresql://host:5432/db', user: …, password: '${…}'} for all "
    "tables or in tables[], the same as source.database, or verify: {spark_table: catalog.namespace.table} (see "
    "docs/verify.md)."
)


def with_drivers(config: Config) -> Config:
    """The configuration with the JDBC drivers that its databases need among Spark's packages."""
    sections = [section for table in config.tables if (section := config.verify_of(table)) is not None]
    needed = {database_of(section.url).package for section in sections if section.url is not None}
    given = [name.strip() for name in config.spark.get(_PACKAGES, "").split(",") if name.strip()]
    mine = {name.rsplit(":", 1)[0] for name in given}
    added = [package for package in sorted(needed) if package.rsplit(":", 1)[0] not in mine]
    if not added:
        return config
    return config.model_copy(update={"spark": {**config.spark, _PACKAGES: ",".join([*given, *added])}})


def verify(spark: SparkSession, config: Config, names: Sequence[str], limit: int, timeout: float) -> Iterator[Outcome]:
    """Compare tables with their sources, one after the other. One that can't be compared doesn't stop the others: its
    outcome has the error.

    :param names: targets, or ends of their names. Without any it is all tables.
    :param limit: differences that are shown of each table, at most.
    :param timeout: seconds that a round waits for the sink.
    :raises ConfigError: there is no such table, or none at all, or one has no section `verify`.
    """
    source = open_source(spark, config, {})
    resolved = find_tables(config, source)
    chosen = chosen_tables(resolved, names)
    if not chosen:
        raise ConfigError(
            "No table was compared: no topic or directory fits the entries of tables. Is it the right Kafka cluster or "
            "file system, and may this user see the topics?"
        )
    for table in chosen:
        if config.verify_of(table.section) is None:
            raise ConfigError(f"{table.path}: {table.section.target} has no verify section. {_WAY_OUT}")
    for table in chosen:
        target = table.section.target
        try:
            yield _verify(spark, config, table, limit, timeout)
        except RowdeltaError as error:
            yield Outcome(target, "", error=error)
        except JOB_ERRORS as error:
            failed = TemporaryError(f"{target}: it could not be compared: {summary(error)}. Run again.")
            yield Outcome(target, "", error=failed)


def exit_code(outcomes: Iterable[Outcome]) -> int:
    """1 if a table differs. Else, if one couldn't be compared, the code of its error, and of several the one that asks
    for more than another run.
    """
    return min((code for outcome in outcomes if (code := outcome.exit_code)), default=0)


def lines(outcome: Outcome) -> Iterator[str]:
    """An outcome for people. No text of a table or a database can look like a line of ours."""
    return map(one_line, _lines(outcome))


def _lines(outcome: Outcome) -> Iterator[str]:
    if outcome.error is not None:
        yield f"{outcome.table}: NOT COMPARED: {outcome.error}"
        return
    yield f"{outcome.table} against {outcome.source}: {_verdict(outcome)}"
    at = f"source at {outcome.position}, table at" if outcome.position else "table at"
    rounds = amount(max(1, outcome.rounds), "round")
    yield f"  {at} {outcome.table_state}; {outcome.source_rows:,} and {outcome.table_rows:,} rows, {rounds}"
    for reason, columns in _by_reason(outcome).items():
        yield f"  not compared: {', '.join(columns)} ({reason})"
    if outcome.healed:
        yield f"  corrected: {amount(outcome.healed, 'key')}"
    if outcome.changing:
        yield f"  changed all the time: {amount(outcome.changing, 'key')} not compared"
    if outcome.unconfirmed:
        yield f"  differed in the last round, and may be equal by now: {amount(outcome.unconfirmed, 'key')}"
    for difference in outcome.differences:
        key = ", ".join(f"{name}={_shown(value)}" for name, value in difference.key.items())
        names = ", ".join(column.column for column in difference.columns)
        yield f"  {key}: {difference.kind}{f' in {names}' if names else ''}"
        for column in difference.columns:
            yield f"    {column.column}: source {_shown(column.source)}, table {_shown(column.table)}"
    hidden = outcome.different - len(outcome.differences)
    if hidden:
        yield f"  and {amount(hidden, 'more key')} (--limit shows more)"
    if outcome.dead_letters:
        why = ", which may be why" if outcome.different else ""
        yield f"  the table has {amount(outcome.dead_letters, 'dead letter')}{why}: rowdelta dead-letters list"


def as_json(outcome: Outcome) -> str:
    """An outcome for machines."""

    def difference(found: Difference) -> dict[str, object]:
        columns = {column.column: {"source": column.source, "table": column.table} for column in found.columns}
        return {
            "key": found.key,
            "kind": found.kind,
            "source_rows": found.source_rows,
            "table_rows": found.table_rows,
            "columns": columns,
        }

    return json.dumps(
        {
            "table": outcome.table,
            "source": outcome.source,
            "equal": outcome.is_equal,
            "verdict": outcome.verdict,
            "position": outcome.position,
            "state": outcome.table_state,
            "source_rows": outcome.source_rows,
            "table_rows": outcome.table_rows,
            "rounds": outcome.rounds,
            "not_compared": outcome.not_compared,
            "changing": outcome.changing,
            "unconfirmed": outcome.unconfirmed,
            "different": outcome.different,
            "healed": outcome.healed,
            "differences": [difference(found) for found in outcome.differences],
            "dead_letters": outcome.dead_letters,
            "error": None if outcome.error is None else masked(str(outcome.error)),
        }
    )


def _verify(spark: SparkSession, config: Config, resolved: ResolvedTable, limit: int, timeout: float) -> Outcome:
    if resolved.error is not None:
        raise resolved.error
    section = resolved.section
    catalogs = Catalogs(spark, config)
    target = catalogs.existing(section.target)
    wanted = config.verify_of(section)
    assert wanted is not None
    key = table_key(config, resolved, target, SparkSample(spark, config, section, open_source(spark, config, {})))
    plan = plan_table(catalogs, config, with_key(resolved, key), target)
    topic = Topic(spark, config, plan) if config.source.has_topics else None
    source = _source(spark, resolved, wanted, config.source.database)
    try:
        patience = Patience(wanted.settle_seconds, timeout)
        outcome = Rounds(plan, target, source, topic, property_prefix(config), patience, limit).run()
    finally:
        source.close()
    if not config.sink.show_values:
        outcome.differences = [difference.without_values() for difference in outcome.differences]
    try:
        outcome.dead_letters = _dead_letters(spark, config, section)
    except (RowdeltaError, *JOB_ERRORS) as error:  # what was found out stays true
        log.warning("%s: its dead letters could not be amount: %s", section.target, summary(error))
    return outcome


def _source(
    spark: SparkSession, resolved: ResolvedTable, section: VerifySection, of_source: DatabaseSection | None
) -> VerifySource:
    """:param of_source: `source.database`."""
    if section.spark_table is not None:
        return SparkTable(spark, expanded(resolved, section.spark_table))
    database = section.database
    if database is None:
        raise ConfigError(f"{resolved.path}: verify has neither url nor spark_table. {_WAY_OUT}")
    path = "verify" if of_source is None or of_source.url != database.url else "source.database"
    return database_of(database.url)(spark, database, database_table(resolved, section.table), path)


def _dead_letters(spark: SparkSession, config: Config, section: TableSection) -> int:
    """How many dead letters the table has."""
    if config.sink.on_bad_record != "dead-letter":
        return 0
    if Catalogs(spark, config).load(config.dead_letter_table) is None:
        return 0
    return dead_letters.find(spark, config, Selection(table=section.target)).count()


def _verdict(outcome: Outcome) -> str:
    if outcome.different:
        return f"DIFFERENT in {amount(outcome.different, 'key')}"
    again = "compare again when traffic is lower"
    return {
        Verdict.EQUAL: "EQUAL",
        Verdict.PARTLY_EQUAL: "EQUAL in what was compared",
        Verdict.UNCERTAIN: f"UNCERTAIN, {again}",
        Verdict.NOT_COMPARED: f"NOT COMPARED, all keys changed all the time; {again}",
    }[outcome.verdict]


def _by_reason(outcome: Outcome) -> dict[str, list[str]]:
    reasons: dict[str, list[str]] = {}
    for column, reason in outcome.not_compared.items():
        reasons.setdefault(reason, []).append(column)
    return reasons


def _shown(text: str | None) -> str:
    if text is None:
        return "NULL"
    printable = text if text.isprintable() else repr(text)[1:-1]
    return printable if len(printable) <= _TEXT_LENGTH else f"{printable[:_TEXT_LENGTH]}… ({len(text):,} characters)"
