"""`rowdelta reconcile`: compares tables with the database, and corrects what differs, beside a run of the sink."""

from collections.abc import Iterator, Sequence
from contextlib import closing

from pyspark.sql import SparkSession

from sink.commands.beside_runs import open_beside_runs
from sink.config import Config, TableSection
from sink.databases.kinds import database_of
from sink.databases.rows import PATH, TableRows
from sink.databases.tables import source_table
from sink.errors import ConfigError, RowdeltaError, TableError, TemporaryError, summary
from sink.run.pipeline import open_source
from sink.sources.source import Source
from sink.spark.job_errors import JOB_ERRORS
from sink.table.microbatch import TableSink
from sink.table.patterns import ResolvedTable, chosen_tables, find_tables
from sink.targets.own_state import property_prefix
from sink.verify.healing import Healing
from sink.verify.rounds import Outcome, Patience, Rounds
from sink.verify.topic import Topic


def reconcile(
    spark: SparkSession, config: Config, names: Sequence[str], limit: int, timeout: float
) -> Iterator[Outcome]:
    """Compare tables with the database, one after the other, and correct keys that differ.

    :param names: targets, or ends of their names. Without any it is all tables.
    :param limit: differences that are shown of each table, at most.
    :param timeout: seconds that a round waits for the sink.
    :raises ConfigError: there is no such table, or the configuration names no database.
    """
    if config.source.database is None or not config.source.has_topics:
        raise ConfigError(
            "reconcile needs source.type: kafka or debezium, and source.database: {url: "
            "'jdbc:postgresql://host:5432/db', user: …, password: '${…}'} (see docs/reconcile.md)."
        )
    source = open_source(spark, config, {})
    for table in chosen_tables(find_tables(config, source), names):
        try:
            yield _Reconciling(spark, config, table, source).run(limit, timeout)
        except RowdeltaError as error:
            yield Outcome(table.section.target, "", error=error)
        except JOB_ERRORS as error:
            failed = TemporaryError(f"{table.section.target}: a Spark job failed: {summary(error)}. Run again.")
            yield Outcome(table.section.target, "", error=failed)


class _Reconciling:
    def __init__(self, spark: SparkSession, config: Config, resolved: ResolvedTable, source: Source) -> None:
        if resolved.error is not None:
            raise resolved.error
        self._spark = spark
        self._config = config
        self._resolved = resolved
        self._source = source
        self._refuse(resolved.section)

    def run(self, limit: int, timeout: float) -> Outcome:
        config, section, database = self._config, self._resolved.section, self._config.source.database
        assert database is not None
        sink = self._opened()
        if sink.position is None or not sink.has_committed:
            raise TableError(f"{section.target}: the sink hasn't committed anything to it yet.")
        verify = config.verify_of(section)
        name = source_table(config, self._resolved)
        topic = Topic(self._spark, config, sink.plan)
        with (
            closing(database_of(database.url)(self._spark, database, name, PATH)) as source,
            closing(TableRows(self._spark, config, database, name, section)) as rows,
        ):
            source.check_server()
            healing = Healing(self._opened, source, rows, topic, config.load.connections, config.load.part_rows)
            patience = Patience(5.0 if verify is None else verify.settle_seconds, timeout)
            prefix = property_prefix(config)
            outcome = Rounds(sink.plan, sink.table, source, topic, prefix, patience, limit, healing).run()
        if not config.sink.show_values:
            outcome.differences = [difference.without_values() for difference in outcome.differences]
        return outcome

    def _refuse(self, section: TableSection) -> None:
        """:raises ConfigError: the table's rows can't be corrected."""
        why = ""
        if not section.has_index:
            why = f"got mode {section.mode} with deletes {section.deletes}: only a key index finds the rows to correct"
        elif section.source_deletes == "ignore":
            why = "source_deletes: ignore: rows that the source doesn't have any more are to stay"
        elif section.history is not None:
            why = "history: nothing tells since when a row has been wrong"
        if why:
            raise ConfigError(f"{section.target}: reconcile can't correct it, {why}. rowdelta verify compares it.")

    def _opened(self) -> TableSink:
        """The table as it is now."""
        return open_beside_runs(self._spark, self._config, self._resolved, self._source)
