"""Types of a field before its values are read: the types to parse its JSON with, and the type of its column."""

import pyarrow as pa
from pyspark.sql import types as T

from changelog.changes import WireType
from changelog.values import logical
from changelog.values.decimals import integer_of, scale_of
from changelog.values.nested import is_list

_ENCODED = pa.struct([("scale", pa.int64()), ("value", pa.string())])
_GEOMETRY = pa.struct([("wkb", pa.string())])

_PLAIN = {
    "int8": T.ByteType(),
    "int16": T.ShortType(),
    "int32": T.IntegerType(),
    "int64": T.LongType(),
    "float": T.FloatType(),
    "double": T.DoubleType(),
    "boolean": T.BooleanType(),
    "string": T.StringType(),
    "bytes": T.BinaryType(),
}


def json_candidates(wire: WireType, target: pa.DataType, is_uuid: bool = False) -> tuple[pa.DataType, ...]:
    """Arrow types that `pyarrow.json` may read a field as, the likeliest first. `convert` can convert each to `target`.

    No type may lose a part of a value. If a number doesn't fit a type, `pyarrow.json` raises an error, and the next
    type is tried. Decimals are read with 256 bits, because `pyarrow.json` checks only a number's own digits. With 128
    bits, the digits that the scale adds could wrap around.
    """
    text, integer = pa.string(), pa.int64()
    name = wire.name or ""
    if is_uuid:
        return (text,)
    if is_list(target):
        element = json_candidates(wire.children.get("element", WireType()), target.value_type)
        return (text,) if name == logical.ENUM_SET else (pa.list_(element[0]), text)
    if pa.types.is_struct(target):
        parts = [(f.name, json_candidates(wire.children.get(f.name, WireType()), f.type)[0]) for f in target]
        return (pa.struct(parts), text)
    if pa.types.is_map(target):
        return (text,)  # pyarrow.json reads no maps
    if name == logical.VARIABLE_SCALE_DECIMAL:
        return (_ENCODED, text)
    if name == logical.DECIMAL and not pa.types.is_temporal(target):
        # not a number type: pyarrow.json would read base64 that has only digits as a number
        return (text, _ENCODED)
    if pa.types.is_decimal(target):
        return (pa.decimal256(38, target.scale), text)
    if pa.types.is_integer(target):
        return (text, integer) if wire.kind == "string" else (integer, text)
    if pa.types.is_floating(target):
        # an integer may have more digits than a double
        return (integer, text) if wire.kind.startswith("int") else (pa.float64(), text)
    if pa.types.is_boolean(target):
        return (integer, text) if wire.kind.startswith("int") else (pa.bool_(), text)
    if pa.types.is_temporal(target):
        return (integer, text) if wire.kind.startswith("int") or _is_number(name) else (text, integer)
    if pa.types.is_binary(target):
        return (_GEOMETRY, text) if name in logical.GEOMETRIES else (text,)
    if pa.types.is_string(target) and (wire.kind.startswith("int") or _is_number(name)):
        return (integer, text)
    if pa.types.is_string(target) and wire.kind == "boolean":
        return (pa.bool_(), text)
    return (text,)


def _is_number(name: str) -> bool:
    return name in logical.DATES or name in logical.TIMES or name in logical.TIMESTAMPS or name in logical.DURATIONS


def spark_type(wire: WireType) -> T.DataType:
    """The column type that holds every value of a field, to create or evolve a table. It is `T.StringType` if the
    message tells no type.
    """
    name = wire.name or ""
    if name == logical.DECIMAL:
        return _decimal_type(wire)
    if name in logical.DATES:
        return T.DateType()
    if name in logical.TIMESTAMPS:
        # Iceberg's timestamps of format version 2 have no nanoseconds
        if logical.TIMESTAMPS[name] == 10**9:
            return T.LongType()
        return T.TimestampType() if name in logical.INSTANTS else T.TimestampNTZType()
    if name == logical.ISO_DATE:
        return T.DateType()
    if name == logical.ISO_TIMESTAMP:
        return T.TimestampNTZType()
    if name == logical.ZONED_TIMESTAMP:
        return T.TimestampType()
    if name in logical.GEOMETRIES:
        return T.BinaryType()
    if name == logical.VARIABLE_SCALE_DECIMAL:
        return T.StringType()
    if wire.kind == "array":
        return T.ArrayType(spark_type(wire.children.get("element", WireType())))
    if wire.kind == "map":
        key, value = (spark_type(wire.children.get(part, WireType())) for part in ("key", "value"))
        return T.MapType(key, value)
    if wire.kind == "struct" and wire.children:
        return T.StructType([T.StructField(part, spark_type(child)) for part, child in wire.children.items()])
    return _PLAIN.get(wire.kind, T.StringType())


def _decimal_type(wire: WireType) -> T.DataType:
    """The decimal type with the scale of the schema and, if the connector gives it, the precision. It is text if Spark
    has no such decimal.
    """
    scale, precision = scale_of(wire), integer_of(wire, "connect.decimal.precision") or 38
    if scale is None or not 0 <= scale <= precision <= 38:
        return T.StringType()
    return T.DecimalType(precision, scale)
