"""Rows of a table of the source's database as changelog rows: what a load writes.

The database is read in Spark's tasks, a part of the table each by a connection of its own, and decoded while the server
sends it (`CatalogTable.read`). Rows are decoded as those of the stream are (`changelog.formats.database_rows`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_type

from changelog.changes import WireType
from changelog.decoding import ChangelogDecoder, spark_schema
from changelog.formats.database_rows import NAME, column_of, described, read_records
from changelog.observed_types import observed_type
from changelog.spec import METADATA, ChangelogSpec, ColumnSpec
from sink.config import Config, DatabaseSection, TableSection
from sink.databases.catalog_table import Batches
from sink.databases.kinds import open_table
from sink.databases.read_columns import UUID, ReadColumn, Spelling, stored
from sink.errors import ConfigError, TemporaryError
from sink.redaction import masked
from sink.spark.computed import compute
from sink.spark.exchange import Step, in_arrow
from sink.table.table_plan import TablePlan

PATH = "source.database"
"""The section's place in the configuration, for messages."""


class TableRows:
    """A table whose rows can be read.

    :param section: the database.
    :param table: its table, as `schema.table` (`sink.databases.tables.database_table`).
    :param target: the entry of the configuration.
    :param replica: from which rows are read. They have at least what the database has at the first reading.
    :raises ConfigError: the database can't be read by this code, refuses the user, or has no such table.
    :raises TemporaryError: the database doesn't answer.
    """

    name: str
    """For people, without secrets."""

    def __init__(
        self,
        spark: SparkSession,
        config: Config,
        section: DatabaseSection,
        table: str,
        target: TableSection,
        replica: DatabaseSection | None = None,
    ) -> None:
        self.name = f"{table} of {masked(section.url)}"
        self._target = target
        self._spelling = Spelling.of(config.source.format, config.source.format_options)
        self._table = open_table(spark, section, table, PATH, replica)
        try:
            self._columns = self._table.columns()
            if not self._columns:
                raise ConfigError(f"{PATH}: there is no table {self.name}. Correct verify.table or {PATH}.url.")
        except BaseException:
            self.close()
            raise

    def unknown(self, spec: ChangelogSpec) -> dict[str, str]:
        """What the target lacks: columns of the database -> the Spark SQL types that they need, as in
        `changelog.observed_types.Observed`.
        """
        taken = {column.field for column in spec.columns} | spec.excluded
        types = self._planned(spec).types
        return {name: observed_type(wire) for name, wire in types.items() if name not in taken}

    def ranges(self, rows: int) -> Sequence[str]:
        """SQL conditions that part the table: each row fulfils one of them. They may be stored and used later.

        :param rows: about so many rows fulfil one of them.
        """
        return self._table.ranges(rows)

    def files(self) -> str:
        """Names what the parts depend on. If it doesn't begin so after a load, rows or values may be missing.

        :raises ConfigError: the log has no changes of such a table.
        """
        return self._table.files()

    def writers(self) -> Mapping[str, str]:
        """See `sink.table.loading.SourceTable`."""
        return self._table.writers()

    def is_as_opened(self) -> bool:
        """Whether it has the columns that it had then."""
        return [(c.name, c.type) for c in self._table.columns()] == [(c.name, c.type) for c in self._columns]

    def order(self) -> Mapping[str, Any]:
        """What rows that are read from now on have for names in `order_by` that are no columns of the table. No change
        that they lack may be late beside them.
        """
        return self._table.order()

    def estimated_rows(self) -> int:
        return self._table.estimated_rows()

    def of(self, conditions: Sequence[str], order: Mapping[str, Any], tasks: int | None = None) -> "SomeRows":
        """The rows that fulfil conditions.

        :param conditions: of `ranges`.
        :param order: name in `order_by` that is no column of the table -> its value in all rows: a number or a text.
        :param tasks: that read them, each by a connection. By default one for each condition.
        """
        return SomeRows(self, conditions, order, min(len(conditions), tasks or len(conditions)))

    def close(self) -> None:
        self._table.close()

    def reading(
        self,
        spec: ChangelogSpec,
        some: "SomeRows",
        observe: Callable[[dict[str, str]], None] | None = None,
        step: Step | None = None,
    ) -> tuple[DataFrame, "_ReadParts"]:
        """What reads rows in tasks, and the frame on which it runs.

        :raises ConfigError: a field of `order_by` is neither in the table nor in `order`, or a column is of a type of
            which nothing is known here.
        """
        reading, order = self._planned(spec), some.order
        for name, _ in spec.order_by:
            is_metadata = name in METADATA and not spec.is_field(name)
            if not is_metadata and name not in order and column_of(name) not in reading.columns:
                raise ConfigError(
                    f"{self._target.target}: order_by has {name}, which {self.name} doesn't have. Write columns "
                    f"of the table, or {self._table.order_names}."
                )
        decoder = ChangelogDecoder(NAME, replace(spec, options=described(reading.types, order)), observe)
        time = datetime.fromtimestamp(order["ts_ms"] / 1000, UTC) if "ts_ms" in order else datetime.now(UTC)
        expressions = [column.sql for column in reading.columns.values()]
        frame, batches = self._table.read(expressions, some.conditions, some.tasks)
        return frame, _ReadParts(batches, reading, decoder, time, step)

    def _planned(self, spec: ChangelogSpec) -> "_Reading":
        target, wanted = self._target.target, _targets(spec)
        columns, types = dict[str, ReadColumn](), dict[str, WireType]()
        for column in self._columns:
            if not column.is_sent:
                continue
            read = column.read(wanted.get(column.name, ()), self._spelling)
            if read is not None:
                types[column.name] = read.wire
                if column.name in wanted:
                    columns[column.name] = read
            elif column.name in wanted:
                raise ConfigError(
                    f"{target}: column {column.name} of {self.name} is of the type {column.type}, which can't "
                    f"be loaded. Leave it out with exclude: [{column.name}], or load without rowdelta."
                )
        if not columns:
            raise ConfigError(f"{target}: {self.name} has none of its columns. Correct verify.table.")
        return _Reading(columns, types, self._target.source, self.name)


@dataclass(frozen=True)
class SomeRows:
    """Some rows of a table (`sink.sources.source.DatabaseRows`). See `TableRows.of`."""

    table: TableRows
    conditions: Sequence[str]
    order: Mapping[str, Any]
    tasks: int

    def changes(self, plan: TablePlan, observe: Callable[[dict[str, str]], None] | None = None) -> DataFrame:
        """As the target's changelog rows (+I of a snapshot)."""
        return compute(self.changes_into(plan, observe, None, spark_schema(plan.changelog)), plan)

    def changes_into(
        self,
        plan: TablePlan,
        observe: Callable[[dict[str, str]], None] | None,
        step: Step | None,
        schema: str | T.StructType,
    ) -> DataFrame:
        frame, parts = self.table.reading(plan.changelog, self, observe, step)
        return in_arrow(frame, parts, schema)


def _targets(spec: ChangelogSpec) -> dict[str, list[pa.DataType]]:
    """Column of the database -> the types that take its values."""

    def target(column: ColumnSpec) -> pa.DataType:
        return UUID if column.is_uuid else to_arrow_type(column.type)

    found: dict[str, list[pa.DataType]] = {}
    for column in spec.of_messages.columns:
        found.setdefault(column.field, []).append(target(column))
    for name, dtype in spec.order_fields:
        found.setdefault(column_of(name), []).append(to_arrow_type(dtype))
    return found


@dataclass(frozen=True)
class _Reading:
    """What tasks read, and how they decode it.

    :param columns: those that are read.
    :param types: what messages say of all columns.
    :param topic: what the rows have in `_source`.
    :param name: of the table, for messages.
    """

    columns: Mapping[str, ReadColumn]
    types: Mapping[str, WireType]
    topic: str
    name: str


@dataclass(frozen=True)
class _ReadParts:
    """What a task runs.

    :param batches: batches of the frame -> the rows, as `reading.columns` select them.
    :param time: of the rows.
    """

    batches: Batches
    reading: _Reading
    decoder: ChangelogDecoder
    time: datetime
    step: Step | None

    def __call__(self, frame: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """:raises ConfigError: the database refuses the reading.
        :raises TemporaryError: it doesn't answer, or the table has changed.
        """
        changes = self.decoder(self.records(frame))
        yield from changes if self.step is None else self.step(changes)

    def records(self, frame: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The rows as raw records."""
        return map(self._record_batch, self.batches(frame))

    def _record_batch(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        reading = self.reading
        parts = zip(reading.columns.items(), batch.columns, strict=True)
        try:
            made = {name: column.made(stored(values)) for (name, column), values in parts}
        except pa.ArrowException:
            raise TemporaryError(f"{PATH}: columns of {reading.name} have other types now than before.") from None
        rows = pa.StructArray.from_arrays(list(made.values()), list(made))
        return read_records(rows, reading.topic, self.time)
