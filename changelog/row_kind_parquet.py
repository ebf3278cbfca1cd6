"""Parquet files of rows that carry their kind, decoded by Arrow: the common case of `changelog.row_kind_columns`, at a
fraction of its cost.

Only files about which there is no doubt: of just the types that the table has, and all of whose rows can be applied.
Everything else is `NotPlainError`, and for Spark: other types, missing columns, dates of an old calendar, bad records.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql.pandas.types import to_arrow_type

from changelog.decoding import decoded_schema
from changelog.row_kind import Kinds
from changelog.rows import BAD, KIND, SNAPSHOT, RowKind, order_column
from changelog.spec import ChangelogSpec

MOST_BYTES = 32 * 1024 * 1024
"""Of a file: it is held in memory whole, by the JVM too."""

_OLD_CALENDAR = (b"org.apache.spark.legacyDateTime", b"org.apache.spark.legacyINT96")
_WRITTEN_BY_SPARK = b"org.apache.spark.version"


class NotPlainError(Exception):
    """The file needs Spark's reader and its checks. Nothing is wrong with it as yet."""


@dataclass(frozen=True)
class PlainRows:
    """Decodes such files, for Spark tasks. Pickles small.

    :param batch_rows: at most, of the batches that it makes.
    """

    spec: ChangelogSpec
    batch_rows: int

    @classmethod
    def of(cls, spec: ChangelogSpec, batch_rows: int) -> "PlainRows | None":
        """None if no file of the table's is plain: UUIDs are text in files, and who wants `_source` wants the path as
        Spark spells it.
        """
        has_plain = not spec.metadata and not any(column.is_uuid for column in spec.columns)
        return cls(spec, batch_rows) if has_plain else None

    def __call__(self, content: bytes) -> Iterator[pa.RecordBatch]:
        """The file's rows as changelog rows: `decoded_schema`, without the column for snapshots.

        :raises NotPlainError: also after some rows.
        """
        kinds = Kinds.of(self.spec.options)
        by_number = self.spec.options.get("column_type") == "integer"
        types = {kinds.column: pa.int64() if by_number else pa.string()}
        for name, dtype in (*((c.field, c.type) for c in self.spec.columns), *self.spec.order_by):
            if types.setdefault(name, to_arrow_type(dtype)) != to_arrow_type(dtype):
                raise NotPlainError(f"column {name} is read as two types")
        try:
            file = pq.ParquetFile(pa.BufferReader(content), coerce_int96_timestamp_unit="us")
            _check_calendar(file.metadata.metadata or {})
            instants = _instants(file.schema, types)
            for batch in file.iter_batches(self.batch_rows, columns=list(types), use_threads=False):
                rows = {name: _exactly(batch.column(name), dtype, name in instants) for name, dtype in types.items()}
                yield self._changes(rows, kinds)
        except NotPlainError:
            raise
        except Exception as error:
            raise NotPlainError(f"{type(error).__name__}: {error}") from error

    def _changes(self, rows: dict[str, pa.Array], kinds: Kinds) -> pa.RecordBatch:
        spec = self.spec
        kind = kinds.meant(rows[kinds.column].cast(pa.string()))
        if kind.null_count:
            raise NotPlainError(f"{kinds.column} has an unknown value")
        if spec.inserts_only and not pc.all(pc.equal(kind, int(RowKind.INSERT))).as_py():
            raise NotPlainError("a row is no insert")
        sets = pc.or_(pc.equal(kind, int(RowKind.INSERT)), pc.equal(kind, int(RowKind.UPDATE_AFTER)))
        schema = pa.schema([field for field in decoded_schema(spec) if field.name != SNAPSHOT])
        columns = {KIND: kind, BAD: pa.nulls(len(kind), schema.field(BAD).type)}
        for i, (name, _) in enumerate(spec.order_by):
            columns[order_column(i)] = rows[name]
        # in mode upsert few such rows come as far as the shuffle: an update's -U doesn't, and it takes longer to bare
        # them all
        is_bared = spec.trust_before and not pc.all(sets).as_py()
        for column in spec.columns:
            values = rows[column.field]
            if is_bared and column.name not in spec.kept_by_removals:
                values = pc.if_else(sets, values, pa.scalar(None, values.type))
            columns[column.name] = values
        needed = [order_column(i) for i in range(len(spec.order_by))] + list(spec.key)
        if any(columns[name].null_count for name in needed):
            raise NotPlainError("a key or an order column is null")
        for column in spec.columns:
            if column.required and pc.any(pc.and_(sets, columns[column.name].is_null())).as_py():
                raise NotPlainError(f"column {column.name} is null")
        return pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)


def _check_calendar(metadata: dict[bytes, bytes]) -> None:
    """Spark before 3.1 may have written days of the Julian calendar; its reader knows which."""
    version = metadata.get(_WRITTEN_BY_SPARK, b"4").split(b".")
    if any(name in metadata for name in _OLD_CALENDAR) or [int(part) for part in version[:2]] < [3, 1]:
        raise NotPlainError("dates and times may be of the Julian calendar")


def _instants(schema: pq.ParquetSchema, types: dict[str, pa.DataType]) -> set[str]:
    """Columns of times in 96 bits, which Arrow takes for local times. Checks that each column is there, once however
    Spark spells it.
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
    """Values of the type, or of one that differs in layout only."""
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
