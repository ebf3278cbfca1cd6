"""`rowdelta check` and `rowdelta status`. Both only read, and change nothing."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import TypeVar

from pyspark.sql import SparkSession

from changelog import formats
from changelog.amounts import amount, sized
from changelog.source_tables import takes
from sink.config import Config, TableSection
from sink.config.folders import check_folders
from sink.config.maintenance import ExpireSection, MaintenanceSection, age
from sink.config.options import cleaning_warning
from sink.databases.sample import DatabaseSample
from sink.databases.slots import has_slots, shown_slots, slots_of
from sink.databases.tables import source_table
from sink.deadletters.table import check_table
from sink.errors import ConfigError, NoMessagesError, NotChangesError, RowdeltaError, TableError
from sink.redaction import redacted
from sink.run.pipeline import open_source
from sink.sources.buffer import BufferSource
from sink.sources.source import Position, Source
from sink.spark.sample import SparkSample
from sink.spark.session import activate
from sink.table.inference import Sample
from sink.table.keys import TableKey, shown, table_key, with_key
from sink.table.load_state import load_of, stage_of
from sink.table.patterns import NO_TABLE, ResolvedTable, find_tables
from sink.table.plan import inferred_columns, plan_table
from sink.table.sink_state import SinkState, position_in
from sink.table.table_plan import TablePlan
from sink.targets.catalogs import Catalogs
from sink.targets.history import shown_time
from sink.targets.own_state import (
    cleaned_property,
    is_cleaning_due,
    maintenance_of,
    property_prefix,
    rewrite_credit,
)
from sink.targets.seam import Table
from sink.targets.upkeep_values import UpkeepFacts

T = TypeVar("T")
R = TypeVar("R")
_THREADS = 8
_Loaded = tuple[Table, Position | None] | RowdeltaError | None
_Planned = tuple[TablePlan, TableKey, Mapping[str, int]]


def check(spark: SparkSession, config: Config) -> Iterator[str]:
    """Check everything that a run needs, without writing anything. Yields lines that say what was found.

    :raises RowdeltaError: the first error on which a run would fail.
    """
    source, catalogs = open_source(spark, config, {}), Catalogs(spark, config)
    yield f"sink {config.sink.id}: {config.source.type} ({config.source.format}), trigger {config.sink.trigger}"
    cleaning = cleaning_warning(config.source.options) if config.source.type == "files" else None
    if cleaning is not None:
        yield f"WARNING: {cleaning}"
    for name, properties in config.catalogs.items():
        yield f"catalog {name}: {', '.join(f'{k}={v}' for k, v in redacted(properties).items())}"
    check_folders(spark, config)
    examined = _examined(spark, config, source, catalogs)
    errors = [*_check_dead_letters(catalogs, config), *source.check_patterns()]
    for table, state, made, reached in examined:
        section = table.section
        if isinstance(made, NoMessagesError):
            yield f"{section.origin} -> {made}"
            continue
        if isinstance(made, NotChangesError) and made.is_internal and table.from_pattern:
            yield made.left_out
            continue
        wrong = [problem for problem in (made, reached) if isinstance(problem, RowdeltaError)]
        if isinstance(made, RowdeltaError) or wrong:
            errors += wrong
            # the first of all errors is the last line
            shown_error = "see the error below" if wrong[0] is errors[0] else wrong[0]
            yield f"{section.id}: {shown_error}"
            continue
        assert made is not None
        plan, key, named = made
        yield f"{section.id}: {'exists' if plan.exists else 'will be created'}"
        yield f"  source: {reached}"
        if named:
            yield f"  messages of: {', '.join(f'{name} ({count:,})' for name, count in named.items())}"
        strange = [name for name in named if not takes(plan.changelog.source_tables or list(named)[:1], name)]
        if strange and section.other_tables != "ignore":
            own = next(name for name in named if name not in strange) if len(strange) < len(named) else "…"
            yield (
                f"  WARNING: {section.source} has messages of several tables of the source, and those of "
                f"{', '.join(strange)} become bad records. Write source_tables: [{own}], with all that belong "
                "together, and other_tables: ignore to leave the others out"
            )
        columns = ", ".join(
            f"{c.name} {c.type.simpleString()}{' (key)' if c.name in key.columns else ''}" for c in plan.columns
        )
        inferred = not plan.exists and section.columns is None
        yield f"  columns{' (inferred from messages; write them down to pin them)' if inferred else ''}: {columns}"
        if key.columns and not key.configured:
            yield f"  key: {shown(key.columns)}, as the messages say"
        warning = key.warning(plan.section)
        if warning is not None:
            yield f"  WARNING: {warning}"
        descending = plan.changelog.descending
        names = (f"{name} desc" if name in descending else name for name, _ in plan.changelog.order_by)
        order = ", ".join(names) or "topic, partition, offset"
        if section.late != "apply":
            order += "; late changes are left out" + (", as dead letters" if plan.changelog.keeps_late else "")
        how = "" if section.mode == "append" else f", deletes {section.deletes}, ordered by {order}"
        yield f"  mode {section.mode}{how}"
        if section.history is not None:
            start, end, current = section.history.columns
            yield f"  history: all versions, from {start} to {end}; current rows have {current}"
        if section.soft_delete is not None:
            marked, purge = section.soft_delete.column, section.soft_delete.purge
            yield f"  a delete marks the row in {marked}" + (f"; purged after {purge}" if purge is not None else "")
        elif section.source_deletes == "ignore":
            yield "  deletes of the source are left out"
        if plan.changelog.ignored_nulls:
            yield f"  NULL is ignored in {', '.join(sorted(plan.changelog.ignored_nulls))}"
        if section.where is not None:
            yield f"  only rows where {' '.join(section.where.split())}"
        maintenance = maintenance_of(config, section, state[0] if isinstance(state, tuple) else None)
        yield f"  maintenance: {maintenance.shown}"
        for warning in plan.warnings:
            yield f"  WARNING: {warning}"
    for entry in config.tables:
        if entry.may_find_more:
            yield f"pattern {entry.id}: looks for more every {config.source.discovery_interval}"
    if errors:
        raise errors[0]
    if config.sink.on_bad_record == "dead-letter":
        topic = f", and to topic {config.sink.dead_letter_topic}" if config.sink.dead_letter_topic else ""
        limit = config.sink.max_bad_records
        stop = f"; more than {limit:,} in a run and table stop the job" if limit is not None else ""
        yield f"bad records go to {config.dead_letter_table}{topic}{stop}"
    else:
        yield "a bad record stops the job"
    yield "ok"


def _examined(
    spark: SparkSession, config: Config, source: Source, catalogs: Catalogs
) -> list[tuple[ResolvedTable, _Loaded, _Planned | RowdeltaError | None, str | RowdeltaError]]:
    """What is found of each table: its state, its plan, and what the source says."""
    tables = find_tables(config, source)
    prefix = property_prefix(config)

    def load(table: ResolvedTable) -> _Loaded:
        try:
            return _load(catalogs, table, prefix)
        except (ConfigError, TableError) as error:
            return error

    loaded = _in_parallel(spark, load, tables)
    positions = [state[1] if isinstance(state, tuple) else None for state in loaded]
    known = any(positions)  # then a run takes a pattern's tables without a position for new ones
    from_start = {table.section.id for table in tables if known and table.from_pattern}
    sections = [table.section for table in tables]
    found = source.check(list(zip(sections, positions, strict=True)), from_start)

    def plan_of(
        part: tuple[ResolvedTable, _Loaded, str | RowdeltaError],
    ) -> _Planned | RowdeltaError:
        table, state, reached = part
        if isinstance(state, RowdeltaError):
            return state
        needs_messages = table.section.columns is None or not table.section.key
        if needs_messages and isinstance(reached, RowdeltaError):
            return reached
        sample: Sample = SparkSample(spark, config, table.section, source)
        database = config.source.database
        if state is None and config.load.auto and database is not None and table.section.mode == "upsert":
            sample = DatabaseSample(spark, config, database, partial(source_table, config, table), table.section)
        return _plan(catalogs, config, table, state[0] if state else None, sample)

    planned = _in_parallel(spark, plan_of, list(zip(tables, loaded, found, strict=True)))
    return list(zip(tables, loaded, planned, found, strict=True))


def status(spark: SparkSession, config: Config) -> Iterator[str]:
    """For each table, its last snapshot, the stored position and the lag. Then what is to be seen of the connector."""
    source, catalogs = open_source(spark, config, {}), Catalogs(spark, config)
    prefix = property_prefix(config)
    tables = find_tables(config, source)
    loaded = _in_parallel(spark, lambda table: _load(catalogs, table, prefix), tables)
    places = [
        (table.section, found[1]) for table, found in zip(tables, loaded, strict=True) if isinstance(found, tuple)
    ]
    lags = iter(source.lag(places))
    if not tables:
        yield NO_TABLE
    for resolved, found in zip(tables, loaded, strict=True):
        section = resolved.section
        if found is None:
            yield f"{section.target}: does not exist yet; rowdelta run creates it"
            continue
        if isinstance(found, RowdeltaError):
            yield f"{section.id}: {found}"
            continue
        table, position = found
        last = table.last_commit()
        if last is None:
            yield f"{section.target}: empty, no {table.snapshot_word}"
        else:
            at = datetime.fromtimestamp(last.timestamp_ms / 1000, UTC)
            state = f"{table.snapshot_word} {last.snapshot_id} of {at:%Y-%m-%d %H:%M:%S} UTC"
            yield f"{section.target}: {state}, {last.counts}"
        yield f"  position: {json.dumps(position) if position else 'none; nothing applied yet'}"
        yield f"  lag: {next(lags)}"
        if (found_load := load_of(table, prefix)) is not None:
            load, so_far = found_load
            stage = stage_of(load, so_far, position, source.is_ahead)
            yield f"  load: {stage}; {amount(so_far.rows, 'row')} loaded"
        if late := SinkState.read(table, prefix, section).late:
            yield f"  late: {amount(late, 'change')} left out so far"
        settings = maintenance_of(config, section, table)
        yield from _budget(config, section, table, settings)
        yield from _upkeep(section, table, settings, datetime.now(UTC))
    if isinstance(source, BufferSource):
        positions = [found[1] if isinstance(found, tuple) else None for found in loaded]
        yield from _engine(source, [(table.section, at) for table, at in zip(tables, positions, strict=True)])
    if has_slots(config):
        try:
            yield from shown_slots(config, slots_of(config))
        except RowdeltaError as error:
            yield f"slots: not known: {error}"


def _engine(source: BufferSource, tables: Sequence[tuple[TableSection, Position | None]]) -> Iterator[str]:
    held = source.held(tables)
    state = "runs" if source.is_written() else "doesn't run"
    last = "no event yet" if held.last_event is None else f"last event at {shown_time(held.last_event)}"
    yield f"engine: {state}; {last}; {amount(held.events, 'event')} to apply, {sized(held.bytes)} in the buffer"
    if error := source.last_error():
        yield f"  {error}"


def _upkeep(section: TableSection, table: Table, settings: MaintenanceSection, now: datetime) -> Iterator[str]:
    """What maintenance has done for a table and has still to do, as far as it is known without a look at each file."""
    found = table.upkeep().facts()
    if found is None or not found.data_files:
        return
    size = sized(found.size_in_bytes / found.data_files)
    yield f"  files: {size} on average, {_shown_deletes(found)}"
    if found.rewritten_at is not None:
        yield f"  rewritten last: {amount(found.rewritten_files, 'file')} at {shown_time(found.rewritten_at)}"
    if found.equality_deletes and section.has_index:  # without a key index they are how the table deletes
        yield f"  due: {amount(found.equality_deletes, 'equality delete')}; rowdelta maintain says them by position"
    if found.snapshots:
        yield f"  {_snapshots(found.snapshots, settings.expire, now)}"


def _shown_deletes(found: UpkeepFacts) -> str:
    deleted = found.count_deleted()
    if deleted > found.rows:
        return f"{deleted:,} deletes by position, some of rows that are gone"
    return f"at most {deleted / max(1, found.rows):.1%} of their rows are deleted"


def _budget(config: Config, section: TableSection, table: Table, settings: MaintenanceSection) -> Iterator[str]:
    """What the table's properties tell: how much may be rewritten, and when orphans were looked for."""
    if settings.budget:
        credit = max(0, rewrite_credit(table, property_prefix(config), settings.budget))
        yield f"  budget: {sized(credit)} may be rewritten now"
    cleaned = table.property(cleaned_property(config))
    if settings.orphans is not None and cleaned is not None:
        every = settings.orphans.every
        due = "due again" if is_cleaning_due(config, table, age(every)) else f"again after {every}"
        yield f"  orphans: looked for at {shown_time(int(cleaned))}, {due}"


def _snapshots(made: Sequence[int], expire: ExpireSection | None, now: datetime) -> str:
    """:param made: when, in milliseconds since 1970, the oldest first."""
    kept = f"{amount(len(made), 'snapshot')} since {shown_time(made[0])}"
    if expire is None:
        return f"{kept}; none expires, since maintenance.expire isn't configured"
    return f"{kept}; due to expire: {expire.due(made, now):,}"


def _plan(
    catalogs: Catalogs, config: Config, resolved: ResolvedTable, table: Table | None, sample: Sample
) -> _Planned | RowdeltaError:
    section = resolved.section
    try:
        key = table_key(config, resolved, table, sample)
        types = inferred_columns(config, section, table, sample)
        plan = plan_table(catalogs, config, with_key(resolved, key), table, types)
        if config.source.has_topics and key.configured and not key.messages:
            key = replace(key, messages=tuple(fields for fields in sample.message_keys() if fields))
        is_asked = config.source.has_topics and formats.find(config.source.format).NAMES_TABLE
        return plan, key, sample.source_tables() if is_asked else {}
    except (ConfigError, TableError, NoMessagesError) as error:
        return error


def _check_dead_letters(catalogs: Catalogs, config: Config) -> Sequence[RowdeltaError]:
    """Reasons why the dead-letter table can't be used. If it doesn't exist, a run creates it."""
    if config.sink.on_bad_record != "dead-letter":
        return ()
    try:
        table = catalogs.load(config.dead_letter_table)
        if table is not None:
            check_table(table)
    except (ConfigError, TableError) as error:
        return [error]
    return ()


def _load(catalogs: Catalogs, resolved: ResolvedTable, prefix: str) -> _Loaded:
    if resolved.error is not None:
        return resolved.error
    try:
        table = catalogs.load(resolved.section.target)
        if table is None:
            return None
        return table, position_in(table, prefix, resolved.section, table.position(prefix))
    except TableError as error:
        return error


def _in_parallel(spark: SparkSession, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Do several items at the same time, since each waits for the catalog."""
    with ThreadPoolExecutor(_THREADS, initializer=lambda: activate(spark)) as pool:
        return list(pool.map(work, items))
