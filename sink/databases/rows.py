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
from sink.config import Config, DatabaseSection
from sink.databases.catalog_table import Batches, CatalogColumn
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
    """The rows of a table.

    :param section: the database.
    :param table: its table, as `schema.table` (`sink.databases.tables.database_table`).
    :param plan: how changes of the target are decoded.
    :param observe: is called with types that the target can't store (`changelog.observed_types.Observed`).
    :raises ConfigError: the database can't be read by this code, refuses the user, has no such table, or has a column
        of a type of which nothing is known here.
    :raises TemporaryError: the database doesn't answer.
    """

    name: str
    """For people, without secrets."""
    unknown: Mapping[str, str]
    """What the table lacks: columns of the database -> the Spark SQL types that they need, as in
    `changelog.observed_types.Observed`.
    """

    def __init__(
        self,
        spark: SparkSession,
        config: Config,
        section: DatabaseSection,
        table: str,
        plan: TablePlan,
        observe: Callable[[dict[str, str]], None] | None = None,
    ) -> None:
        self.name = f"{table} of {masked(section.url)}"
        self._plan, self._observe = plan, observe
        self._table = open_table(spark, section, table, PATH)
        try:
            found = self._table.columns()
            if not found:
                raise ConfigError(f"{PATH}: there is no table {self.name}. Correct verify.table or {PATH}.url.")
            self._reading = self._planned(found, Spelling.of(config.source.format, config.source.format_options))
        except BaseException:
            self.close()
            raise
        taken = {column.field for column in plan.changelog.columns} | plan.changelog.excluded
        types = self._reading.types
        self.unknown = {name: observed_type(wire) for name, wire in types.items() if name not in taken}

    def ranges(self, rows: int) -> Sequence[str]:
        """SQL conditions that part the table: each row fulfils one of them. They may be stored and used later.

        :param rows: about so many rows fulfil one of them.
        """
        return self._table.ranges(rows)

    def files(self) -> str:
        """Names what the parts depend on. If it doesn't begin so after a load, rows or values may be missing."""
        return self._table.files()

    def order(self) -> Mapping[str, Any]:
        """What rows that are read from now on have for names in `order_by` that are no columns of the table. No change
        that they lack may be late beside them.
        """
        return self._table.order()

    def estimated_rows(self) -> int:
        return self._table.estimated_rows()

    def changes(self, conditions: Sequence[str], order: Mapping[str, Any], tasks: int | None = None) -> DataFrame:
        """The rows that fulfil the conditions, as the target's changelog rows (+I of a snapshot).

        :param conditions: of `ranges`.
        :param order: name in `order_by` that is no column of the table -> its value in all rows: a number or a text.
        :param tasks: that read them, each by a connection. By default one for each condition.
        """
        rows = self.changes_into(None, spark_schema(self._plan.changelog), conditions, order, tasks)
        return compute(rows, self._plan)

    def changes_into(
        self,
        step: Step | None,
        schema: str | T.StructType,
        conditions: Sequence[str],
        order: Mapping[str, Any],
        tasks: int | None = None,
    ) -> DataFrame:
        """Run `step` on the changelog rows in the tasks that read them. Only if Python decodes them alone
        (`TablePlan.is_decoded_whole`).

        :param schema: schema of the result.
        :raises ConfigError: a field of `order_by` is neither in the table nor in `order`.
        """
        frame, parts = self._parts(conditions, order, step, tasks)
        return in_arrow(frame, parts, schema)

    def close(self) -> None:
        self._table.close()

    def _parts(
        self, conditions: Sequence[str], order: Mapping[str, Any], step: Step | None, tasks: int | None
    ) -> tuple[DataFrame, "_ReadParts"]:
        reading, spec = self._reading, self._reading.spec
        for name, _ in spec.order_by:
            is_metadata = name in METADATA and not spec.is_field(name)
            if not is_metadata and name not in order and column_of(name) not in reading.columns:
                raise ConfigError(
                    f"{self._plan.section.target}: order_by has {name}, which {self.name} doesn't have. Write columns "
                    f"of the table, or {self._table.order_names}."
                )
        decoder = ChangelogDecoder(NAME, replace(spec, options=described(reading.types, order)), self._observe)
        time = datetime.fromtimestamp(order["ts_ms"] / 1000, UTC) if "ts_ms" in order else datetime.now(UTC)
        expressions = [column.sql for column in reading.columns.values()]
        frame, batches = self._table.read(expressions, conditions, min(len(conditions), tasks or len(conditions)))
        return frame, _ReadParts(batches, reading, decoder, time, step)

    def _planned(self, found: Sequence[CatalogColumn], spelling: Spelling) -> "_Reading":
        spec = self._plan.changelog
        section = self._plan.section
        wanted = _targets(spec)
        columns, types = dict[str, ReadColumn](), dict[str, WireType]()
        for column in found:
            if not column.is_sent:
                continue
            read = column.read(wanted.get(column.name, ()), spelling)
            if read is not None:
                types[column.name] = read.wire
                if column.name in wanted:
                    columns[column.name] = read
            elif column.name in wanted:
                raise ConfigError(
                    f"{section.target}: column {column.name} of {self.name} is of the type {column.type}, which can't "
                    f"be loaded. Leave it out with exclude: [{column.name}], or load without rowdelta."
                )
        if not columns:
            raise ConfigError(f"{section.target}: {self.name} has none of its columns. Correct verify.table.")
        return _Reading(spec, columns, types, section.source, self.name)


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

    spec: ChangelogSpec
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
