"""Arrow decodes Parquet files of rows that carry their kind. This module handles the common case of
`changelog.row_kind_columns`, at a fraction of its cost.

It decodes only plain files: all columns have exactly the table's types, and all rows can be applied. For other files
(other types, missing columns, dates of an old calendar, bad records) it raises `NotPlainError`, and Spark reads them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql.pandas.types import to_arrow_type

from changelog.decoding import decoded_schema
from changelog.moves import bared, with_moves
from changelog.row_kind import Kinds
from changelog.rows import BAD, KIND, MOVED, SNAPSHOT, RowKind, order_column, sets_row
from changelog.spec import ChangelogSpec

MOST_BYTES = 32 * 1024 * 1024
"""The largest file that is decoded here. Python and the JVM each hold the whole file in memory."""

_OLD_CALENDAR = (b"org.apache.spark.legacyDateTime", b"org.apache.spark.legacyINT96")
_WRITTEN_BY_SPARK = b"org.apache.spark.version"


class NotPlainError(Exception):
    """The file needs Spark's reader and its checks. The file may still be right."""


@dataclass(frozen=True)
class PlainRows:
    """Decodes plain files, for Spark tasks. The object pickles small.

    :param batch_rows: the most rows of a decoded batch.
    """

    spec: ChangelogSpec
    batch_rows: int

    @classmethod
    def of(cls, spec: ChangelogSpec, batch_rows: int) -> "PlainRows | None":
        """A decoder for the table, or None if no file of the table is plain. That is so if the table has a UUID column,
        since files have UUIDs as text, or metadata columns, since `_source` is the path as Spark spells it.
        """
        has_plain = not spec.metadata and not any(column.is_uuid or column.width for column in spec.columns)
        return cls(spec, batch_rows) if has_plain else None

    def __call__(self, content: bytes, file: int = 0) -> Iterator[pa.RecordBatch]:
        """The file's rows as changelog rows: `decoded_schema`, without the column for snapshots.

        :param content: the bytes of the whole file.
        :param file: its number in the order of files.
        :raises NotPlainError: the file isn't plain. The error may come after the first batches.
        """
        kinds = Kinds.of(self.spec.options)
        by_number = self.spec.options.get("column_type") == "integer"
        types = {kinds.column: pa.int64() if by_number else pa.string()}
        for name, dtype in (*((c.field, c.type) for c in self.spec.columns), *self.spec.order_by):
            if types.setdefault(name, to_arrow_type(dtype)) != to_arrow_type(dtype):
                raise NotPlainError(f"column {name} is read as two types")
        try:
            content_of = pq.ParquetFile(pa.BufferReader(content), coerce_int96_timestamp_unit="us")
            _check_calendar(content_of.metadata.metadata or {})
            instants = _instants(content_of.schema, types)
            first = 0
            for batch in content_of.iter_batches(self.batch_rows, columns=list(types), use_threads=False):
                rows = {name: _exactly(batch.column(name), dtype, name in instants) for name, dtype in types.items()}
                yield self._changes(rows, kinds, file, first)
                first += batch.num_rows
        except NotPlainError:
            raise
        except Exception as error:
            raise NotPlainError(f"{type(error).__name__}: {error}") from error

    def _changes(self, rows: dict[str, pa.Array], kinds: Kinds, file: int, first: int) -> pa.RecordBatch:
        spec = self.spec
        kind = kinds.meant(rows[kinds.column].cast(pa.string()))
        if kind.null_count:
            raise NotPlainError(f"{kinds.column} has an unknown value")
        if spec.inserts_only and not pc.all(pc.equal(kind, int(RowKind.INSERT))).as_py():
            raise NotPlainError("a row is not an insert")
        sets = pa.array(sets_row(kind.to_numpy(zero_copy_only=False)))
        schema = pa.schema([field for field in decoded_schema(spec) if field.name != SNAPSHOT])
        columns = {KIND: kind, MOVED: pa.nulls(len(kind), pa.string())}
        columns[BAD] = pa.nulls(len(kind), schema.field(BAD).type)
        for i, (name, _) in enumerate(spec.order_by):
            columns[order_column(i)] = rows[name]
        if spec.source_order:
            columns[order_column(len(spec.order_by))] = pa.repeat(pa.scalar(file, pa.int32()), len(kind))
            numbers = np.arange(first, first + len(kind), dtype=np.int64)
            columns[order_column(len(spec.order_by) + 1)] = pa.array(numbers)
        for column in spec.columns:
            columns[column.name] = rows[column.field]
        for name in spec.empty_is_null:
            if pc.any(pc.equal(pc.binary_length(columns[name]), 0)).as_py():
                raise NotPlainError(f"column {name} has an empty text")
        needed = [order_column(i) for i in range(len(spec.order_by))] + list(spec.key)
        if any(columns[name].null_count for name in needed):
            raise NotPlainError("a key or an order column is null")
        for column in spec.columns:
            if column.required and pc.any(pc.and_(sets, columns[column.name].is_null())).as_py():
                raise NotPlainError(f"column {column.name} is null")
        batch = pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)
        if not spec.key or pc.all(sets).as_py():
            return batch
        number, zeros = np.arange(len(kind)), np.zeros(len(kind), np.int64)
        marked = with_moves(pa.Table.from_batches([batch]), spec, number, zeros, zeros)
        # In mode upsert few -U and -D rows reach the shuffle, since the -U of an update is left out before it. Setting
        # the columns of all of them to null would take longer than it saves.
        marked = bared(marked, spec) if spec.trust_before else marked
        return marked.combine_chunks().to_batches()[0]


def _check_calendar(metadata: dict[bytes, bytes]) -> None:
    """:raises NotPlainError: Spark before 3.1 may have written dates of the Julian calendar. Spark's reader knows which
    dates to convert.
    """
    version = metadata.get(_WRITTEN_BY_SPARK, b"4").split(b".")
    if any(name in metadata for name in _OLD_CALENDAR) or [int(part) for part in version[:2]] < [3, 1]:
        raise NotPlainError("dates and times may be in the Julian calendar")


def _instants(schema: pq.ParquetSchema, types: dict[str, pa.DataType]) -> set[str]:
    """Names of the INT96 columns. They are instants, but Arrow reads them as local times.

    :raises NotPlainError: a column is missing or nested, or two columns differ only in case, which Spark ignores.
    """
    paths = [schema.column(i).path for i in range(len(schema))]
    folded = [path.lower() for path in paths]
    instants = set()
    for name, dtype in types.items():
        if name not in paths or folded.count(name.lower()) != 1:
            raise NotPlainError(f"column {name} is missing, nested, or there are several")
        if schema.column(paths.index(name)).physical_type == "INT96":
            if not (pa.types.is_timestamp(dtype) and dtype.tz):
                raise NotPlainError(f"column {name} is an instant")
            instants.add(name)
    return instants


def _exactly(values: pa.Array, dtype: pa.DataType, is_instant: bool) -> pa.Array:
    """The values as `dtype`. Their type must be `dtype`, or differ from it only in layout or in a time unit that can be
    converted exactly.

    :raises NotPlainError: they have another type.
    """
    if is_instant:
        return pc.assume_timezone(values, "UTC")
    have = values.type
    if have == dtype:
        return values
    is_text = pa.types.is_large_string(have) or pa.types.is_string_view(have)
    if is_text and pa.types.is_string(dtype):
        return values.cast(dtype)
    both_times = pa.types.is_timestamp(have) and pa.types.is_timestamp(dtype)
    if both_times and have.unit in ("ms", "us") and (have.tz is None) == (dtype.tz is None):
        return values.cast(dtype)
    raise NotPlainError(f"{have} is not {dtype}")
