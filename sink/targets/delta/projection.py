"""Columns of data files that any writer wrote, as the table has them now."""

from collections.abc import Iterable, Mapping, Sequence

import pyarrow as pa

from deltawriters.arrow_types import with_elements
from deltawriters.collapse import Ints
from deltawriters.keyindex import IndexedFile
from deltawriters.table import Projection, UnreadableRowsError
from sink.targets.delta.partitions import is_clear, repeated
from sink.targets.delta.schema import FIELD_ID, Column

_VERSION = b"org.apache.spark.version"
_LEGACY = (b"org.apache.spark.legacyDateTime", b"org.apache.spark.legacyINT96")


class DeltaProjection(Projection):
    """See `Projection`. A column that is neither in the file nor in its partition is null.

    :param wanted: the columns to read.
    :param by_id: columns are found by their field ids, and not by their physical names (PROTOCOL.md, "Reader
        Requirements for Column Mapping").
    """

    def __init__(self, file: IndexedFile, wanted: Sequence[Column], *, by_id: bool) -> None:
        self.schema = pa.schema([column.logical_field for column in wanted])
        self._file = file
        self._wanted = wanted
        self._by_id = by_id
        self._stored: dict[str, str] = {}

    def choose(self, physical: pa.Schema) -> Sequence[str]:
        path, partition = self._file.path, self._file.partition
        if self._by_id and not any(FIELD_ID in (part.metadata or {}) for part in physical):
            raise UnreadableRowsError(f"{path} has no field ids, and the table finds its columns by them")
        for column in self._wanted:
            if column.physical_name in partition:  # the log decides, also if the file has the column
                if not is_clear([column], partition):
                    raise UnreadableRowsError(
                        f"{path} is in a partition whose time has no zone "
                        f"({column.name}), which each reader takes for its own"
                    )
                continue
            place = _place(physical, column.physical_field, by_id=self._by_id)
            if place is not None:
                self._stored[column.name] = physical.names[place]
        check_calendar(path, physical, (column.type for column in self._wanted if column.name in self._stored))
        return list(self._stored.values())

    def project(self, rows: pa.Table, positions: Ints) -> pa.Table:
        found: list[pa.Array | pa.ChunkedArray] = []
        for column in self._wanted:
            if column.name in self._stored:
                values = rows.column(self._stored[column.name])
                found.append(as_column(values, column, self._file.path, by_id=self._by_id))
            elif column.physical_name in self._file.partition:
                found.append(repeated(column, self._file.partition[column.physical_name], len(positions)))
            else:
                found.append(pa.nulls(len(positions), column.type))
        return pa.Table.from_arrays(found, self.schema.names)


def as_column(values: pa.ChunkedArray, column: Column, path: str, *, by_id: bool) -> pa.ChunkedArray:
    """A column of a data file with the table's names and types.

    :param path: of the file.
    :param by_id: see `DeltaProjection`; this is about the fields of structs.
    :raises UnreadableRowsError: the file's values don't fit these types.
    """
    try:
        chunks = [_converted(chunk, column.physical_type, column.type, by_id=by_id) for chunk in values.chunks]
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
        raise UnreadableRowsError(
            f"{path} has values of column {column.name} that can't be read as {column.type}: {error}"
        ) from None
    return pa.chunked_array(chunks, column.type)


def _converted(values: pa.Array, physical: pa.DataType, logical: pa.DataType, *, by_id: bool) -> pa.Array:
    """:param physical: the wanted type with physical names and field ids.
    :param logical: the same with the table's names.
    """
    if values.type == logical and (not pa.types.is_nested(logical) or (physical == logical and not by_id)):
        return values  # with other physical names or ids, fields of the same names may be others
    if pa.types.is_struct(logical) and pa.types.is_struct(values.type):
        return _struct(values, physical, logical, by_id=by_id)
    if pa.types.is_list(logical) and pa.types.is_list(values.type):
        inner = _converted(values.values, physical.value_type, logical.value_type, by_id=by_id)
    elif pa.types.is_map(logical) and pa.types.is_map(values.type):
        keys = _converted(values.keys, physical.key_type, logical.key_type, by_id=by_id)
        items = _converted(values.items, physical.item_type, logical.item_type, by_id=by_id)
        inner = pa.StructArray.from_arrays([keys, items], fields=[logical.key_field, logical.item_field])
    else:
        return values.cast(logical)
    return with_elements(values, logical, inner)


def _struct(values: pa.StructArray, physical: pa.StructType, logical: pa.StructType, *, by_id: bool) -> pa.StructArray:
    absent = values.is_null()
    parts: list[pa.Array] = []
    for field, target in zip(physical, logical, strict=True):
        place = _place(values.type, field, by_id=by_id)
        if place is None:
            parts.append(pa.nulls(len(values), target.type))
            continue
        part = _converted(values.field(place), field.type, target.type, by_id=by_id)
        if not target.nullable and part.null_count:
            part = _without_nulls(part, absent, target)
        parts.append(part)
    return pa.StructArray.from_arrays(parts, fields=list(logical), mask=absent)


def _without_nulls(part: pa.Array, absent: pa.BooleanArray, target: pa.Field) -> pa.Array:
    """A field that isn't nullable, of structs some of which are null: there it may have any value, but no null."""
    if part.null_count > part.filter(absent).null_count:
        raise pa.ArrowInvalid(f"field {target.name} is null, which the table doesn't allow")
    dtype, buffers, children = part.type, part.buffers(), None
    if pa.types.is_struct(dtype):
        return pa.StructArray.from_arrays([part.field(n) for n in range(dtype.num_fields)], fields=list(dtype))
    if pa.types.is_list(dtype):
        buffers, children = buffers[:2], [part.values]
    elif pa.types.is_map(dtype):
        fields = [dtype.key_field, dtype.item_field]
        buffers, children = buffers[:2], [pa.StructArray.from_arrays([part.keys, part.items], fields=fields)]
    return pa.Array.from_buffers(dtype, len(part), [None, *buffers[1:]], 0, part.offset, children=children)


def _place(fields: pa.Schema | pa.StructType, wanted: pa.Field, *, by_id: bool) -> int | None:
    """Number of a field in a file's schema, or in one of its structs. As in Spark, a name may differ in case.

    :raises UnreadableRowsError: several names differ in case only.
    """
    if by_id:
        same = [n for n, part in enumerate(fields) if (part.metadata or {}).get(FIELD_ID) == wanted.metadata[FIELD_ID]]
        return same[0] if same else None
    alike = {part.name: n for n, part in enumerate(fields) if part.name.lower() == wanted.name.lower()}
    if wanted.name in alike:
        return alike[wanted.name]
    if len(alike) > 1:
        raise UnreadableRowsError(f"a data file has both {' and '.join(alike)}, and the table has {wanted.name}")
    return next(iter(alike.values()), None)


def check_calendar(path: str, physical: pa.Schema, types: Iterable[pa.DataType]) -> None:
    """:raises UnreadableRowsError: the file has columns of these types, and their dates or times are of the Julian
    calendar.
    """
    if any(map(_has_time, types)) and _is_legacy(physical.metadata or {}):
        raise UnreadableRowsError(f"{path} has dates or times of the Julian calendar, written by an old Spark")


def _is_legacy(notes: Mapping[bytes, bytes]) -> bool:
    """Whether a Parquet file may have dates and times of the Julian calendar (`DataSourceUtils.datetimeRebaseSpec`)."""
    return any(name in notes for name in _LEGACY) or notes.get(_VERSION, b"3") < b"3"


def _has_time(dtype: pa.DataType) -> bool:
    """Whether there are dates or timestamps in a type."""
    if pa.types.is_nested(dtype):
        return any(_has_time(dtype.field(number).type) for number in range(dtype.num_fields))
    return bool(pa.types.is_date(dtype) or pa.types.is_timestamp(dtype))
