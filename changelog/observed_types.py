"""The types that columns need for what messages have: told by tasks, united, and compared with the table's."""

import re
from collections.abc import Mapping

from pyspark.sql import types as T

from changelog.changes import WireType
from changelog.values import logical, spark_type
from changelog.values.defaults import with_default, without_default
from changelog.values.encoded import MAYBE_BASE64

Observed = Mapping[str, str]
"""What messages have and the table can't store: name of a field or column -> the Spark SQL type that it needs. An empty
type means that the column must become optional. `int default 11` says what earlier rows have in the source, as JSON
(`changelog.values.defaults`). `MAYBE_BASE64` is a `string` whose texts look like base64. With
`schema_changes: fail` the type `MISSING` means that the messages lack the field.
"""

MISSING = "missing"


def observed_type(wire: WireType) -> str:
    """The type that a field's column needs, as in `Observed`."""
    return MAYBE_BASE64 if wire.name == MAYBE_BASE64 else with_default(spark_type(wire).simpleString(), wire)


def wider_type(dtype: T.DataType, wire: WireType) -> T.DataType | None:
    """The type that Iceberg can promote a column to (spec, Schema Evolution), or None. A decimal gets the precision
    that the message's schema states, or 38.
    """
    if wire.name in logical.FINER_THAN_MILLIS:
        return None
    if isinstance(dtype, T.ByteType | T.ShortType | T.IntegerType):
        return T.LongType()
    if isinstance(dtype, T.FloatType):
        return T.DoubleType()
    if isinstance(dtype, T.DecimalType) and dtype.precision < 38:
        declared = spark_type(wire)
        if isinstance(declared, T.DecimalType) and is_wider(declared, dtype) and "scale" in wire.parameters:
            return declared
        return T.DecimalType(38, dtype.scale)
    return None


def is_wider(dtype: T.DataType, other: T.DataType) -> bool:
    """Whether a column may be promoted from `other` to `dtype`, as Iceberg allows."""
    if isinstance(dtype, T.DecimalType) and isinstance(other, T.DecimalType):
        return bool(dtype.scale == other.scale and dtype.precision > other.precision)
    return (isinstance(other, T.IntegerType) and isinstance(dtype, T.LongType)) or (
        isinstance(other, T.FloatType) and isinstance(dtype, T.DoubleType)
    )


def merged_types(first: Observed, second: Observed) -> dict[str, str]:
    """For each name a type that holds the values of both. If two types differ, it is the wider number, or else text."""
    result = dict(first)
    for name, dtype in second.items():
        known = result.get(name, dtype)
        result[name] = dtype if known == dtype else _common_type(known, dtype)
    return result


def _common_type(first: str, second: str) -> str:
    for some in ("", MISSING):  # neither contradicts a type, so the type wins
        if some in (first, second):
            return second if first == some else first
    # nothing says which of two defaults earlier rows have
    first, second = without_default(first), without_default(second)
    if first == second:
        return first
    if {first, second} <= _INTEGERS.keys():
        return max(first, second, key=lambda name: _INTEGERS[name])
    if {first, second} <= {*_INTEGERS, "float", "double"}:
        return "double"
    one, other = _decimal(first), _decimal(second)
    if one is None or other is None:
        return "string"
    scale, whole = max(one[1], other[1]), max(one[0] - one[1], other[0] - other[1])
    return f"decimal({whole + scale},{scale})" if whole + scale <= 38 else "string"


def _decimal(name: str) -> tuple[int, int] | None:
    """Precision and scale of the narrowest decimal that holds every value of the type. None if the type is neither an
    integer nor a decimal.
    """
    if name in _INTEGERS:
        return _INTEGERS[name], 0
    found = _DECIMAL.fullmatch(name)
    return (int(found[1]), int(found[2])) if found else None


_DECIMAL = re.compile(r"decimal\((\d+),(\d+)\)")
_INTEGERS = {"tinyint": 3, "smallint": 5, "int": 10, "bigint": 19}
"""The most decimal digits of a value of each integer type."""
