"""Writes one Parquet file: Arrow tables in, the file and the facts about it out."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyiceberg.io import FileIO

from deltawriters.kept_columns import read_columns

_SAMPLE_ROWS = 4096
_DICTIONARY_PAYS_BELOW = 0.5  # distinct values per row of a row group
_DICTIONARY_BYTES = 2 * 1024 * 1024
"""A column chunk gives up its dictionary at this size. Iceberg's Java writer has the same limit."""
ROW_GROUP_BYTES = 64 * 1024 * 1024
"""What moves rows writes at most so many bytes of them at once, as a row group."""
_SLICE_ROWS, _SLICE_BYTES = 65_536, 16 * 1024 * 1024
"""At most this many rows, or about this many bytes, of a row group are decoded at a time."""
_LASTING_LEVEL, _QUICK_LEVEL = 3, 1
"""Levels of zstd. Spark's writer uses level 3. On changelog rows, files of level 3 are up to a fifth smaller than files
of level 1, and take up to 1.15x of the time to write.
"""


@dataclass(frozen=True)
class Compression:
    """:param level: None lets the writer choose: well for files that live long, fast for others."""

    codec: str
    level: int | None = None


Path = tuple[str, ...]
"""Names that lead to a column, from the top through structs."""


@dataclass(frozen=True)
class ParquetFacts:
    """What is known about a Parquet file that was written. The footer doesn't have the counts.

    :param nan_counts: number of NaNs in each column of floats or doubles.
    :param null_counts: number of nulls in each column of lists, maps or UUIDs.
    """

    rows: int
    size_in_bytes: int
    footer: pq.FileMetaData
    nan_counts: Mapping[Path, int]
    null_counts: Mapping[Path, int]


def rows_at(
    io: FileIO, path: str, positions: npt.NDArray[np.int64], choose: Callable[[pa.Schema], Sequence[str]]
) -> Iterator[tuple[npt.NDArray[np.int64], pa.Table]]:
    """Some rows of a Parquet file, a row group at a time. Only the row groups that have such rows are read, and only
    some of their columns.

    :param positions: of the rows in the file, ascending.
    :param choose: names the top-level columns to read, by the file's schema.
    :return: positions, and their rows. Without columns there is no row.
    """
    with io.new_input(path).open() as stream:
        file = pq.ParquetFile(stream, pre_buffer=True, coerce_int96_timestamp_unit="us")
        names = list(choose(file.schema_arrow))
        sizes = [file.metadata.row_group(number).num_rows for number in range(file.metadata.num_row_groups)]
        ends = np.cumsum(sizes)
        groups = np.searchsorted(ends, positions, side="right")
        for number in np.unique(groups).tolist():
            first, last = np.searchsorted(groups, [number, number + 1])
            part = slice(int(first), int(last))
            rows = read_columns(file, path, number, names) if names else pa.table({})
            places = positions[part] - (ends[number] - sizes[number])
            yield positions[part], rows.take(pa.array(places)) if names else rows


def rows_without(
    io: FileIO,
    path: str,
    left_out: npt.NDArray[np.int64],
    part: tuple[int, int],
    choose: Callable[[pa.Schema], Sequence[str]],
) -> Iterator[tuple[npt.NDArray[np.int64], pa.Table]]:
    """The rows of a part of a Parquet file, but for some, in slices of a row group. So memory has a row group as it is
    in the file, and a slice or two decoded.

    :param left_out: positions in the file, ascending.
    :param part: (i, n): the i-th of n parts of about the same size. Each row group belongs to one of them.
    :param choose: see `rows_at`.
    :return: positions, and their rows. Without columns there is no row.
    """
    number, count = part
    with io.new_input(path).open() as stream:
        file = pq.ParquetFile(stream, pre_buffer=True, coerce_int96_timestamp_unit="us")
        names = list(choose(file.schema_arrow))
        # a name with a dot would be looked for inside of structs
        wanted = None if names == file.schema_arrow.names else names
        groups = [file.metadata.row_group(group) for group in range(file.metadata.num_row_groups)]
        ends = np.cumsum([group.num_rows for group in groups])
        sizes = np.array([max(1, group.total_byte_size) for group in groups])
        for group, end in enumerate(ends.tolist()):
            middle = sizes[:group].sum() + sizes[group] / 2
            if int(middle * count / sizes.sum()) != number:
                continue
            every = np.arange(end - groups[group].num_rows, end)
            for places, rows in _slices(file, group, every, wanted) if names else [(every, pa.table({}))]:
                if not len(places):
                    continue
                first, last = np.searchsorted(left_out, [places[0], places[-1] + 1])
                if first < last:
                    kept = np.ones(len(places), np.bool_)
                    kept[left_out[first:last] - places[0]] = False
                    places, rows = places[kept], rows.filter(pa.array(kept)) if names else rows
                if len(places):
                    yield places, rows


def _slices(
    file: pq.ParquetFile, group: int, places: npt.NDArray[np.int64], names: Sequence[str] | None
) -> Iterator[tuple[npt.NDArray[np.int64], pa.Table]]:
    """The rows of a row group, some at a time, with their positions.

    :param names: the columns to read. None means all.
    """
    start, size = 0, file.metadata.row_group(group).total_byte_size
    length = min(_SLICE_ROWS, len(places) * _SLICE_BYTES // max(1, size))
    for batch in file.iter_batches(max(1, length), [group], names, use_threads=False):
        yield places[start : start + len(batch)], pa.Table.from_batches([batch])
        start += len(batch)
    if start != len(places):
        raise OSError(f"a row group at {places[0]} should have {len(places)} rows, and has {start}")


def joined(
    parts: Iterable[tuple[npt.NDArray[np.int64], pa.Table]], at_once: int
) -> Iterator[tuple[npt.NDArray[np.int64], pa.Table]]:
    """Rows of a file with their positions, together up to so many bytes. A larger part stays as it is."""
    waiting, size = list[tuple[npt.NDArray[np.int64], pa.Table]](), 0
    for part in parts:
        if waiting and size + part[1].nbytes > at_once:
            yield _as_one(waiting)
            size = 0
        waiting.append(part)
        size += part[1].nbytes
    if waiting:
        yield _as_one(waiting)


def _as_one(parts: list[tuple[npt.NDArray[np.int64], pa.Table]]) -> tuple[npt.NDArray[np.int64], pa.Table]:
    places, rows = zip(*parts, strict=True)
    parts.clear()
    return np.concatenate(places), pa.concat_tables(rows)


class ParquetFileWriter:
    """Writes the file `path`. Each `write` makes one row group, so callers buffer rows first.

    :param schema: the file's columns, with field ids.
    :param lasting: the file will probably live for long, so it is packed well. Other files are merged soon, so they are
        packed fast.
    :param notes: key-value metadata for the footer.
    """

    def __init__(
        self,
        io: FileIO,
        path: str,
        schema: pa.Schema,
        compression: Compression,
        *,
        lasting: bool = False,
        notes: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.path = path
        self._lasting = lasting
        self.rows = 0
        self._schema = schema
        self._compression = compression
        self._notes = notes
        columns = dict(_columns(schema))
        self._nans = dict.fromkeys((path for path, dtype in columns.items() if pa.types.is_floating(dtype)), 0)
        uncounted = (path for path, dtype in columns.items() if pa.types.is_nested(dtype) or _is_uuid(dtype))
        self._nulls = dict.fromkeys(uncounted, 0)
        self._stream = io.new_output(path).create(overwrite=True)
        self._writer: pq.ParquetWriter | None = None

    def write(self, rows: pa.Table) -> None:
        """Append `rows` as one row group."""
        if self._writer is None:
            self._writer = self._open(rows)
        self._writer.write_table(rows, row_group_size=max(1, rows.num_rows))
        self.rows += rows.num_rows
        for path in self._nans:
            self._nans[path] += pc.sum(pc.is_nan(_column(rows, path))).as_py() or 0
        for path in self._nulls:
            self._nulls[path] += _column(rows, path).null_count

    def size(self) -> int:
        """Bytes written so far. The file system may still buffer the last column chunk."""
        return int(self._stream.tell())

    def close(self) -> ParquetFacts:
        """Finish the file."""
        if self._writer is None:
            self._writer = self._open(self._schema.empty_table())
        if self._notes:
            self._writer.add_key_value_metadata(dict(self._notes))
        self._writer.close()
        size = self.size()
        self._stream.close()
        return ParquetFacts(self.rows, size, self._writer.writer.metadata, self._nans, self._nulls)

    def abort(self) -> None:
        """Close the file without finishing it. The caller deletes it."""
        if self._writer is not None:
            try:
                self._writer.close()
            except (OSError, pa.ArrowException):
                self._writer.is_open = False  # otherwise the writer's destructor would try to close again
        with contextlib.suppress(OSError, pa.ArrowException):
            self._stream.close()

    def _open(self, first: pa.Table) -> pq.ParquetWriter:
        codec, level = self._compression.codec, self._compression.level
        if codec == "zstd" and level is None:
            level = _LASTING_LEVEL if self._lasting else _QUICK_LEVEL
        return pq.ParquetWriter(
            self._stream,
            self._schema,
            compression="none" if codec == "uncompressed" else codec,
            compression_level=level,
            # We use no other encodings, because Iceberg's vectorized readers know DELTA_BINARY_PACKED only since 1.10.
            use_dictionary=_columns_with_repeats(first),
            dictionary_pagesize_limit=_DICTIONARY_BYTES,
            write_statistics=_columns_with_statistics(self._schema),
            store_decimal_as_integer=True,
            store_schema=False,
        )


def _columns(fields: Iterable[pa.Field], path: Path = ()) -> Iterator[tuple[Path, pa.DataType]]:
    """All columns that aren't structs, also those in structs."""
    for field in fields:
        if pa.types.is_struct(field.type):
            yield from _columns(field.type, (*path, field.name))
        else:
            yield (*path, field.name), field.type


def _column(rows: pa.Table, path: Path) -> pa.ChunkedArray:
    column = rows.column(path[0])
    return pc.struct_field(column, list(path[1:])) if len(path) > 1 else column


def _is_uuid(dtype: pa.DataType) -> bool:
    return isinstance(dtype, pa.UuidType)


def _columns_with_statistics(schema: pa.Schema) -> Sequence[str] | bool:
    """All columns but those of UUIDs. Parquet compares UUIDs as unsigned bytes, and Iceberg's Java library (up to 1.11)
    as signed longs: with bounds, a Java reader skips row groups that have the UUID that it looks for
    (https://github.com/apache/iceberg/issues/14216).
    """
    uuids = {field.name for field in schema if _is_uuid(field.type)}
    if not uuids:
        return True
    empty = pa.BufferOutputStream()
    pq.write_table(schema.empty_table(), empty, store_schema=False)
    columns = pq.read_metadata(pa.BufferReader(empty.getvalue())).schema
    return [path for n in range(len(columns)) if (path := columns.column(n).path) not in uuids]


def _columns_with_repeats(rows: pa.Table) -> Sequence[str] | bool:
    """Columns for which a dictionary pays in a row group like `rows`.

    If values hardly repeat, a dictionary costs time and bytes and saves nothing. The same is true of a dictionary that
    the writer gives up half-way. But a text that repeats every 20,000 rows takes a fifth of the bytes with one.

    A small sample decides. Let d be the largest number of distinct values with which a dictionary pays. If the row
    group had d values, all equally frequent, the sample would have a certain number of distinct values. A column is
    chosen if its sample has at most that many.
    """
    count = rows.num_rows
    sampled = min(count, _SAMPLE_ROWS)
    if not count:
        return False
    numbers = pa.array(np.linspace(0, count - 1, sampled).astype(np.int64))
    chosen = []
    for name, column in zip(rows.column_names, rows.columns, strict=True):
        if pa.types.is_nested(column.type) or isinstance(column.type, pa.BaseExtensionType):
            continue
        sample = column.take(numbers)
        bytes_per_value = max(1.0, sample.nbytes / sampled)
        paying = min(_DICTIONARY_PAYS_BELOW * count, _DICTIONARY_BYTES / bytes_per_value)
        if pc.count_distinct(sample, mode="all").as_py() <= -paying * np.expm1(-sampled / paying):
            chosen.append(name)
    return chosen or False
