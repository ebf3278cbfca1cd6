"""Reads Parquet files of rows that carry their kind into raw records with typed columns, which
`changelog.formats.row_kind` decodes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_type

from changelog.changes import COLUMNS, RAW_SCHEMA, Wire
from changelog.formats.row_kind import Kinds
from changelog.rows import FILE, PREFIX, ROW
from changelog.spec import ChangelogSpec
from changelog.values import convert
from changelog.values.nested import has_times, is_list, is_nested

MOST_BYTES = 32 * 1024 * 1024
"""The largest file that is read whole. Python and the JVM each hold the whole file in memory."""
SOURCE = f"{PREFIX}source"
"""The column with the file's path, where Spark reads the files."""

_OLD_CALENDAR = (b"org.apache.spark.legacyDateTime", b"org.apache.spark.legacyINT96")
_WRITTEN_BY_SPARK = b"org.apache.spark.version"


class UnreadableFileError(Exception):
    """A change file can't be read for its table. The message is for people."""


def columns_to_read(spec: ChangelogSpec) -> T.StructType:
    """Columns that change files have: the kind, the table's columns, the order columns."""
    kind = Kinds.of(spec.options).column
    kind_type = T.LongType() if spec.options.get("column_type") == "integer" else T.StringType()
    fields = {kind: T.StructField(kind, kind_type)}
    for column in spec.of_messages.columns:
        dtype = T.StringType() if column.is_uuid else column.type
        fields.setdefault(column.field, T.StructField(column.field, dtype))
    for name, order_type in spec.order_fields:
        fields.setdefault(name, T.StructField(name, order_type))
    return T.StructType(list(fields.values()))


def typed_records(columns: Mapping[str, pa.Array], source: pa.Array, file: pa.Array, row: pa.Array) -> pa.RecordBatch:
    """Raw records (`RAW_SCHEMA`) whose rows are in `COLUMNS`.

    :param columns: by the names of the files' columns; n rows.
    :param source: the path of each row's file.
    :param file: the file's number in the order of files (int32), and `row` the row's number in the file (int64).
    """
    values = pa.StructArray.from_arrays(list(columns.values()), names=list(columns))
    raw = [source if name == "source" else pa.nulls(len(source), dtype) for name, dtype in _RAW]
    return pa.RecordBatch.from_arrays([*raw, file, row, values], [*RAW_SCHEMA.names, FILE, ROW, COLUMNS])


_RAW = [(field.name, field.type) for field in RAW_SCHEMA]


@dataclass(frozen=True)
class FileReader:
    """Reads whole files, for Spark tasks. The object pickles small.

    :param batch_rows: the most rows of a batch.
    """

    spec: ChangelogSpec
    batch_rows: int

    def __call__(self, content: bytes, source: str, file: int = 0) -> Iterator[pa.RecordBatch]:
        """A file's rows as raw records: what Spark reads of the file too, so that a bad record is the same one in a
        run that comes after a crash. Columns that the file lacks are null.

        :param content: the bytes of the whole file.
        :param source: its path, for people and for the column `_source`.
        :param file: its number in the order of files.
        :raises UnreadableFileError: it isn't a Parquet file, is of the Julian calendar, or a column has another type.
        """
        try:
            yield from self._records(content, source, file)
        except (pa.ArrowException, OSError) as error:  # all bytes are here, so no store is to blame
            raise UnreadableFileError(f"change file {source} can't be read as Parquet: {error}") from error

    def _records(self, content: bytes, source: str, file: int) -> Iterator[pa.RecordBatch]:
        types = {field.name: to_arrow_type(field.dataType) for field in columns_to_read(self.spec)}
        parquet = pq.ParquetFile(pa.BufferReader(content), coerce_int96_timestamp_unit="us")
        have = parquet.schema_arrow.names
        names = {name: found for name in types if (found := _named(name, have, source)) is not None}
        if any(has_times(types[name]) for name in names):
            _check_calendar(parquet.metadata.metadata or {}, source)
        leaves = [parquet.schema.column(number) for number in range(len(parquet.schema))]
        instants = {leaf.path for leaf in leaves if leaf.physical_type == "INT96"}
        first = 0
        for batch in parquet.iter_batches(self.batch_rows, columns=list(names.values()), use_threads=False):
            columns, count = {}, len(batch)
            for name, dtype in types.items():
                if name not in names:
                    columns[name] = pa.nulls(count, dtype)
                    continue
                values = batch.column(names[name])
                if names[name] in instants:  # Arrow reads them as local times
                    values = pc.assume_timezone(values, "UTC")
                columns[name] = _read(values, dtype, f"{name} in {source}")
            numbers = pa.array(np.arange(first, first + count, dtype=np.int64))
            numbered = pa.repeat(pa.scalar(file, pa.int32()), count)
            yield typed_records(columns, pa.repeat(source, count), numbered, numbers)
            first += count


def _named(name: str, have: Sequence[str], source: str) -> str | None:
    """The file's column of that name. Spark, too, ignores upper and lower case."""
    found = [other for other in have if other.lower() == name.lower()]
    if len(found) > 1:
        raise UnreadableFileError(
            f"change file {source} has several columns {name}, which differ in upper and lower case at most. Write it "
            "again with one of them"
        )
    return found[0] if found else None


def _check_calendar(metadata: Mapping[bytes, bytes], source: str) -> None:
    """:raises UnreadableFileError: Spark before 3.1 may have written dates of the Julian calendar."""
    version = metadata.get(_WRITTEN_BY_SPARK)
    numbers = [int(part) if part.isdigit() else 0 for part in (version or b"4.0").split(b".")[:2]]
    if numbers < [3, 1] or any(name in metadata for name in _OLD_CALENDAR):
        raise UnreadableFileError(
            f"change file {source} may have dates and times of the Julian calendar, since Spark "
            f"{(version or b'').decode(errors='replace')} wrote it (or a later one in its legacy mode). Read it with "
            "Spark and write it again, with spark.sql.parquet.datetimeRebaseModeInWrite and "
            "spark.sql.parquet.int96RebaseModeInWrite set to CORRECTED"
        )


def _read(values: pa.Array, want: pa.DataType, where: str) -> pa.Array:
    """The values as `want`, if each value of their type is one of it too. Those that no table has stay as they are.

    :param where: names the column and the file.
    :raises UnreadableFileError: they have another type.
    """
    if isinstance(values, pa.ExtensionArray):  # such as JSON
        values = values.storage
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    have = values.type
    if have == want:
        return values
    if _is_text(have) and _is_text(want):
        return values.cast(want)
    if is_nested(have) and is_nested(want):
        values = values.view(_spelled(have, want, where))
        values.validate(full=True)  # bytes may be no text
    elif not pa.types.is_null(have) and not _is_wider(want, have):
        raise UnreadableFileError(
            f"a change file has a column of another type: {where} is {have}, and the table needs {want}. Write the "
            "file again with this type, or correct tables[].columns"
        )
    converted, misfit = convert(Wire(values), want)
    return converted if misfit is None else values


def _spelled(have: pa.DataType, want: pa.DataType, where: str) -> pa.DataType:
    """The type `have` with the names that `want` has for the fields of structs: Spark ignores upper and lower case here
    too. Text is bytes, and bytes are text, as `want` has them.

    :raises UnreadableFileError: two fields would have one name.
    """
    if pa.types.is_struct(have) and pa.types.is_struct(want):
        names = {field.name.lower(): field.name for field in want}
        fields = [field.with_name(names.get(field.name.lower(), field.name)) for field in have]
        if len({field.name for field in fields}) < len(fields):
            raise UnreadableFileError(
                f"a struct has fields that differ in upper and lower case at most: {where} is {have}. Write the file "
                "again with one of them"
            )
        known = {field.name: field.type for field in want}
        return pa.struct(
            [f.with_type(_spelled(f.type, known[f.name], where)) if f.name in known else f for f in fields]
        )
    if is_list(have) and is_list(want):
        element = have.value_field.with_type(_spelled(have.value_type, want.value_type, where))
        return pa.large_list(element) if pa.types.is_large_list(have) else pa.list_(element)
    if pa.types.is_map(have) and pa.types.is_map(want):
        item = have.item_field.with_type(_spelled(have.item_type, want.item_type, where))
        return pa.map_(have.key_field, item)
    for types in _TEXT_OR_BYTES:
        if have in types:
            return types[pa.types.is_binary(want)] if pa.types.is_string(want) or pa.types.is_binary(want) else have
    return have


_TEXT_OR_BYTES = ((pa.string(), pa.binary()), (pa.large_string(), pa.large_binary()))


def _is_text(dtype: pa.DataType) -> bool:
    """Text or bytes, which Spark reads as one another."""
    return any(
        is_a(dtype)
        for is_a in (
            pa.types.is_string,
            pa.types.is_large_string,
            pa.types.is_string_view,
            pa.types.is_binary,
            pa.types.is_large_binary,
            pa.types.is_binary_view,
            pa.types.is_fixed_size_binary,
        )
    )


def _is_wider(want: pa.DataType, have: pa.DataType) -> bool:
    """Whether a column of type `want` holds all values of `have` exactly."""
    if pa.types.is_timestamp(want) and pa.types.is_timestamp(have):
        return have.unit in ("s", "ms", "us") and (want.tz is not None or have.tz is None)
    if pa.types.is_decimal(want) and pa.types.is_decimal(have):
        return bool(want.scale >= have.scale and want.precision - want.scale >= have.precision - have.scale)
    if pa.types.is_integer(have):
        bits = have.bit_width + pa.types.is_unsigned_integer(have)
        if pa.types.is_integer(want):
            return bool(want.bit_width >= bits)
        if pa.types.is_decimal(want):
            return bool(want.precision - want.scale >= len(str(2 ** (bits - 1) - 1)))
        return bool(pa.types.is_float64(want) and bits <= 32)
    return bool(pa.types.is_float64(want) and pa.types.is_floating(have))
