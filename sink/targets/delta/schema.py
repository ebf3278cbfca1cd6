"""Columns of a Delta table: from the schema string of its metadata to Arrow (PROTOCOL.md, "Schema Serialization
Format", "Column Mapping", "Delta Data Type to Parquet Type Mappings").
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

_ID = "delta.columnMapping.id"
_PHYSICAL_NAME = "delta.columnMapping.physicalName"
FIELD_ID = b"PARQUET:field_id"
_TYPES: Mapping[str, pa.DataType] = {
    "string": pa.string(),
    "long": pa.int64(),
    "integer": pa.int32(),
    "short": pa.int16(),
    "byte": pa.int8(),
    "float": pa.float32(),
    "double": pa.float64(),
    "boolean": pa.bool_(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}
_DECIMAL = re.compile(r"decimal\((\d+),\s*(-?\d+)\)")


@dataclass(frozen=True)
class Column:
    """A column, or a field of a struct.

    :param physical_name: its name in data files, partition values and statistics.
    :param type: its type with the names of the table.
    :param physical_type: the same type with physical names and field ids.
    :param fields: fields of a struct, else empty.
    :param field_id: its Parquet field id. None without column mapping.
    """

    name: str
    physical_name: str
    type: pa.DataType
    physical_type: pa.DataType
    nullable: bool
    fields: tuple["Column", ...] = ()
    field_id: int | None = None

    @property
    def logical_field(self) -> pa.Field:
        return pa.field(self.name, self.type, self.nullable)

    @property
    def physical_field(self) -> pa.Field:
        ids = None if self.field_id is None else {FIELD_ID: str(self.field_id)}
        return pa.field(self.physical_name, self.physical_type, self.nullable, ids)


def columns_of(schema: str, mapping: str) -> tuple[Column, ...]:
    """The columns that a schema string describes. Columns of type void are left out, since no data file has them.

    :param mapping: the column mapping mode: `none`, `name` or `id`.
    :raises ValueError: a column has a type that data files can't be written with here.
    """
    return tuple(_columns(json.loads(schema)["fields"], mapping != "none", ()))


def leaves(columns: Sequence[Column], path: tuple[Column, ...] = ()) -> Iterator[tuple[Column, ...]]:
    """Paths to the columns that aren't structs, in order. What is inside of arrays and maps has no path."""
    for column in columns:
        if column.fields:
            yield from leaves(column.fields, (*path, column))
        elif not pa.types.is_struct(column.type):
            yield (*path, column)


def _columns(fields: Sequence[Mapping[str, Any]], mapped: bool, path: tuple[str, ...]) -> Iterator[Column]:
    for field in fields:
        if field["type"] == "void":
            continue
        name, here = field["name"], (*path, field["name"])
        logical, physical = _types(field["type"], mapped, here)
        inner = field["type"]["fields"] if _is(field["type"], "struct") else ()
        metadata = field.get("metadata", {})
        yield Column(
            name,
            metadata[_PHYSICAL_NAME] if mapped else name,
            logical,
            physical,
            field["nullable"],
            tuple(_columns(inner, mapped, here)),
            int(metadata[_ID]) if mapped else None,
        )


def _types(dtype: Any, mapped: bool, path: tuple[str, ...]) -> tuple[pa.DataType, pa.DataType]:
    """A type with the table's names, and with physical names and field ids."""
    if _is(dtype, "struct"):
        columns = list(_columns(dtype["fields"], mapped, path))
        logical, physical = ([getattr(c, f"{kind}_field") for c in columns] for kind in ("logical", "physical"))
        return pa.struct(logical), pa.struct(physical)
    if _is(dtype, "array"):
        element = _types(dtype["elementType"], mapped, (*path, "element"))
        nullable = dtype["containsNull"]
        logical, physical = (pa.list_(pa.field("element", part, nullable)) for part in element)
        return logical, physical
    if _is(dtype, "map"):
        key = _types(dtype["keyType"], mapped, (*path, "key"))
        value = _types(dtype["valueType"], mapped, (*path, "value"))
        nullable = dtype["valueContainsNull"]
        logical, physical = (
            pa.map_(pa.field("key", k, nullable=False), pa.field("value", v, nullable))
            for k, v in zip(key, value, strict=True)
        )
        return logical, physical
    known = _TYPES.get(dtype) if isinstance(dtype, str) else None
    if known is None and isinstance(dtype, str) and (decimal := _DECIMAL.fullmatch(dtype)):
        known = pa.decimal128(int(decimal[1]), int(decimal[2]))
    if known is None:
        raise ValueError(
            f"column {'.'.join(path)} is {dtype if isinstance(dtype, str) else json.dumps(dtype)}, a type that data "
            "files can't be written with. Leave the table's column out of the sink, or change its type."
        )
    return known, known


def _is(dtype: Any, kind: str) -> bool:
    return isinstance(dtype, Mapping) and dtype["type"] == kind
