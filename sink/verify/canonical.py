"""The form in which rows of the source and of the table are compared, and hashes of it.

Both sides are brought into the types of the table's columns, or into another type that both can have. The source's side
is in `sink.databases.conversion`. Here is what is done to both: parts of arrays, maps and structs become JSON text,
since Spark compares no maps, and its hashes skip nulls.

A *canonical frame* has a column `v0`, `v1`, … for each compared column. For each of them whose value may not fit there
is also a text `m0`, …: the value as the other side has it if it doesn't fit, else null.
"""

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

_JSON = {
    "ignoreNullFields": "false",
    # by default milliseconds
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}
_FLAGS = 60
"""How many of them are packed into one bigint."""


def value(number: int) -> str:
    return f"v{number}"


def misfit(number: int) -> str:
    return f"m{number}"


def comparable(column: Column, dtype: T.DataType) -> tuple[Column, T.DataType]:
    """A column that Spark can compare, sort, group by and hash, and its type. Equal values stay equal."""
    if isinstance(dtype, T.MapType | T.ArrayType | T.StructType):
        column = _sorted_maps(column, dtype)
        text = F.to_json(F.struct(column.alias("v")), _JSON)
        return F.when(column.isNotNull(), F.regexp_replace(text, r"^\{\"v\":|\}$", "")), T.StringType()
    return column, dtype


def _sorted_maps(column: Column, dtype: T.DataType) -> Column:
    """Maps as arrays of entries in the order of their keys, wherever they are in the value."""
    if not _has_map(dtype):
        return column
    if isinstance(dtype, T.MapType):
        value_type = dtype.valueType

        def entry(found: Column) -> Column:
            inner = _sorted_maps(found["value"], value_type)
            return F.struct(found["key"].alias("key"), inner.alias("value"))

        return F.array_sort(F.transform(F.map_entries(column), entry))
    if isinstance(dtype, T.ArrayType):
        element_type = dtype.elementType
        return F.transform(column, lambda element: _sorted_maps(element, element_type))
    assert isinstance(dtype, T.StructType)
    fields = [_sorted_maps(column.getField(f.name), f.dataType).alias(f.name) for f in dtype]
    return F.when(column.isNotNull(), F.struct(*fields))


def _has_map(dtype: T.DataType) -> bool:
    if isinstance(dtype, T.StructType):
        return any(_has_map(field.dataType) for field in dtype)
    return isinstance(dtype, T.MapType) or (isinstance(dtype, T.ArrayType) and _has_map(dtype.elementType))


def row_hash(frame: DataFrame, columns: int) -> Column:
    """A 64-bit hash of a canonical row. Nulls and values that don't fit count: Spark's own hash skips nulls.

    :param columns: number of the compared columns.
    """
    parts: list[Column] = []
    for first in range(0, columns, _FLAGS):
        numbers = range(first, min(columns, first + _FLAGS))
        parts.append(_flags([F.col(value(n)).isNull() for n in numbers]))
        parts.append(_flags([_is_misfit(frame, n) for n in numbers]))
    return F.xxhash64(*parts, *(F.col(value(n)) for n in range(columns)))


def key_hash(key: Sequence[int]) -> Column:
    """Likewise, of the key's columns.

    :param key: their numbers.
    """
    values = [F.col(value(number)) for number in key]
    nulls = [
        _flags([column.isNull() for column in values[first : first + _FLAGS]]) for first in range(0, len(key), _FLAGS)
    ]
    return F.xxhash64(*nulls, *values)


def shown(column: Column, dtype: T.DataType) -> Column:
    """A canonical value as text for people. Null stays null."""
    return F.hex(column) if isinstance(dtype, T.BinaryType) else column.cast("string")


def _is_misfit(frame: DataFrame, number: int) -> Column:
    return F.col(misfit(number)).isNotNull() if misfit(number) in frame.columns else F.lit(False)


def _flags(conditions: Sequence[Column]) -> Column:
    nothing = packed = F.lit(0).cast("bigint")
    for place, condition in enumerate(conditions):
        packed = packed.bitwiseOR(F.when(condition, F.lit(1 << place).cast("bigint")).otherwise(nothing))
    return packed
