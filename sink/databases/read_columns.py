"""How a column of a database is read, so that its values become those that Debezium's messages have.

`ReadColumn.sql` selects what the driver brings into Arrow without a loss. `made` turns this into an array with the
meaning of `wire`, the type in the messages' schema. From there on `changelog.values` converts it as it converts
messages. Where a column of the table takes a value by its spelling (a text, a number of another width), `made` has
the messages' spelling.

This module has what is the same in all databases; `postgres_values` and `mysql_values` know their types.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from changelog.changes import NUMERAL, WireType
from changelog.values import logical, readings
from changelog.values.arrays import binary, only, pieces, present
from changelog.values.decimals import each
from changelog.values.times import to_text

UUID = pa.binary(16)
"""In place of a column's type: the table has a UUID."""
Made = Callable[[pa.Array], pa.Array]

_TIMESTAMP, _MICRO_TIMESTAMP = "io.debezium.time.Timestamp", "io.debezium.time.MicroTimestamp"
_TIME, _MICRO_TIME = "io.debezium.time.Time", "io.debezium.time.MicroTime"
_ISO = {"date": logical.ISO_DATE, "time": "io.debezium.time.IsoTime", "timestamp": logical.ISO_TIMESTAMP}
_FIRST_MOMENT = -210_866_803_200_000_000
"""Of Postgres, in microseconds since 1970. The driver's arithmetic puts infinite ones far before it: infinity is an odd
number then, and -infinity an even one.
"""
_ENDLESS = np.array([9_223_372_036_832_400_000, 9_223_372_036_825_200_000]) * np.array([-1, 1])
"""What a connector sends for -infinity and infinity, in microseconds."""


def stored(values: pa.Array) -> pa.Array:
    """The values without the driver's own names for their types."""
    return values.storage if isinstance(values, pa.ExtensionArray) else values


def as_it_is(values: pa.Array) -> pa.Array:
    return values


@dataclass(frozen=True)
class ReadColumn:
    """:param sql: an expression over the table's columns.
    :param wire: what messages say of the column.
    :param made: `stored` values -> values of `wire`.
    """

    sql: str
    wire: WireType
    made: Made = as_it_is


@dataclass(frozen=True)
class Spelling:
    """Settings of the connector, as `format_options` repeats them.

    :param shortest_floats: messages have a float of single precision as the shortest number that means it.
    """

    decimals: str = "precise"
    times: str = "adaptive"
    binaries: str = "bytes"
    shortest_floats: bool = True

    @classmethod
    def of(cls, source_format: str, options: Mapping[str, object]) -> "Spelling":
        given = {
            "decimals": options.get(readings.DECIMALS, cls.decimals),
            "times": options.get(readings.TIME_UNITS, cls.times),
            "binaries": options.get(readings.BINARIES, cls.binaries),
        }
        return cls(**{name: str(value) for name, value in given.items()}, shortest_floats="avro" not in source_format)


def fixed_decimal(sql: str, precision: int, scale: int) -> ReadColumn:
    """:param sql: the number's text."""
    parameters = {"scale": str(scale), "connect.decimal.precision": str(precision)}
    wire = WireType("bytes", logical.DECIMAL, parameters)
    if 0 <= scale <= precision <= 38:
        return ReadColumn(sql, wire, partial(to_decimals, precision, scale))
    return ReadColumn(sql, wire, numerals)


NO_NUMBERS = {"NaN": "NAN", "Infinity": "POSITIVE_INFINITY", "-Infinity": "NEGATIVE_INFINITY"}
"""What Postgres has for them -> what messages have, if decimals are texts. Else they have null."""


def numerals(values: pa.Array) -> pa.Array:
    found = pc.is_in(values, value_set=pa.array(list(NO_NUMBERS)))
    return (only(values, pc.invert(found)) if pc.any(found).as_py() else values).cast(NUMERAL)


def to_decimals(precision: int, scale: int, values: pa.Array) -> pa.Array:
    try:
        return values.cast(pa.decimal128(precision, scale))
    except pa.ArrowInvalid:
        return numerals(values).cast(pa.string()).cast(pa.decimal128(precision, scale))


def floats(sql: str, kind: str, targets: Collection[pa.DataType], spelling: Spelling) -> ReadColumn:
    """:param kind: `float`, of single precision, or `double`."""
    dtype = pa.float32() if kind == "float" else pa.float64()
    own = (dtype,) if kind == "float" and spelling.shortest_floats else (pa.float32(), pa.float64())
    in_java = spelling.shortest_floats and not all(target in own for target in targets)
    return ReadColumn(sql, WireType(kind), partial(_floats, dtype, in_java=in_java))


def _floats(dtype: pa.DataType, values: pa.Array, *, in_java: bool) -> pa.Array:
    """:param in_java: texts as Java writes them, and so Kafka Connect's JSON."""
    values = values.cast(dtype)
    is_single = dtype == pa.float32()

    def text(value: float) -> str:
        if not np.isfinite(value):
            return "NaN" if np.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        number = np.float32(value) if is_single else np.float64(value)
        if value == 0 or 1e-3 <= abs(value) < 1e7:
            return np.format_float_positional(number, trim="0")
        mantissa, _, exponent = np.format_float_scientific(number, trim="0").partition("e")
        return f"{mantissa}E{int(exponent)}"

    return each(values, pa.string(), text) if in_java else values


def octets(
    column: str, in_hex: str, in_base64_url: str, targets: Collection[pa.DataType], spelling: Spelling
) -> ReadColumn:
    """Bytes.

    :param in_hex: an expression for their text in hexadecimal, in small letters. Likewise `in_base64_url`.
    """
    if spelling.binaries in ("bytes", "base64") or (targets and all(map(pa.types.is_binary, targets))):
        return ReadColumn(column, WireType("bytes"))
    is_hex = spelling.binaries == readings.HEX
    return ReadColumn(in_hex if is_hex else in_base64_url, WireType("string", spelling.binaries))


def instants(sql: str, digits: int, targets: Collection[pa.DataType]) -> ReadColumn:
    """Points in time: microseconds since 1970.

    :param digits: of the seconds.
    """
    is_moment = all(pa.types.is_timestamp(target) and target.tz is not None for target in targets)
    made = _instants if is_moment else partial(_zoned_texts, digits)
    return ReadColumn(sql, WireType("string", logical.ZONED_TIMESTAMP), made)


def local_times(
    sql: str, kind: str, digits: int, iso: tuple[str, Made], targets: Collection[pa.DataType], spelling: Spelling
) -> ReadColumn:
    """Days since 1970 (`date`), or microseconds since midnight (`time`) or since 1970 (`timestamp`) of a wall clock.

    :param digits: of the seconds.
    :param iso: expression and `Made` of their texts by `time.precision.mode: isostring`.
    """
    is_native = pa.types.is_date if kind == "date" else pa.types.is_timestamp
    if spelling.times == "isostring" and not (targets and all(map(is_native, targets))):
        return ReadColumn(iso[0], WireType("string", _ISO[kind]), iso[1])
    if kind == "date":
        return ReadColumn(sql, WireType("int32", "io.debezium.time.Date"), _days)
    if spelling.times == "connect":
        integer, name = ("int64", "Timestamp") if kind == "timestamp" else ("int32", "Time")
        return ReadColumn(sql, WireType(integer, f"org.apache.kafka.connect.data.{name}"), partial(_units, 1000))
    modes = ("adaptive", "adaptive_time_microseconds") if kind == "timestamp" else ("adaptive",)
    micros = 1000 if digits <= 3 and spelling.times in modes else 1
    names = (_TIMESTAMP, _MICRO_TIMESTAMP) if kind == "timestamp" else (_TIME, _MICRO_TIME)
    integer = "int32" if micros == 1000 and kind == "time" else "int64"
    return ReadColumn(sql, WireType(integer, names[micros == 1]), partial(_units, micros))


def _days(values: pa.Array) -> pa.Array:
    return values.cast(pa.int32())


def _units(micros: int, values: pa.Array) -> pa.Array:
    """Moments and times of day as integers. What is infinite is as a connector sends it.

    :param micros: how many are a unit. Smaller parts are cut off, as `time.precision.mode: connect` does.
    """
    numbers = values.view(pa.int64())
    units = numbers if micros == 1 else _floored(numbers, micros)
    lowest = pc.min(numbers).as_py()
    if lowest is None or lowest >= _FIRST_MOMENT:
        return units
    is_endless = pc.less(numbers, _FIRST_MOMENT)
    endless = pa.array(_ENDLESS[numbers.fill_null(0).to_numpy() & 1] // micros)
    return pc.if_else(is_endless, endless, units)


def _floored(numbers: pa.Array, divisor: int) -> pa.Array:
    quotient = pc.divide(numbers, divisor)
    return pc.if_else(pc.less(numbers, pc.multiply(quotient, divisor)), pc.subtract(quotient, 1), quotient)


def _instants(values: pa.Array) -> pa.Array:
    """What is infinite is far beyond all moments that a table has."""
    return _units(1, values).view(pa.timestamp("us", "UTC"))


def _zoned_texts(digits: int, values: pa.Array) -> pa.Array:
    """As messages have them.

    :param digits: of the seconds.
    """
    moments = _units(1, values)
    texts = to_text(moments, WireType("int64", _MICRO_TIMESTAMP))
    assert texts is not None
    cut = pc.utf8_slice_codeunits(texts, 0, -(7 - digits) if digits == 0 else -(6 - digits)) if digits < 6 else texts
    late = pc.match_substring_regex(cut, "^[0-9]{5}")
    written = pc.binary_join_element_wise(pc.if_else(late, "+", ""), cut, "Z", "")
    if moments.null_count == texts.null_count:
        return written
    for number, name in zip(_ENDLESS.tolist(), ("-infinity", "infinity"), strict=True):
        written = pc.if_else(pc.fill_null(pc.equal(moments, number), False), name, written)
    return written


def bits(sql: str, length: int, *, short: bool) -> ReadColumn:
    """:param sql: a text of 0 and 1, the highest bit first.
    :param short: messages lack the highest bytes if these are 0.
    """
    return ReadColumn(sql, WireType("bytes", logical.BITS, {"length": str(length)}), partial(_bits, short=short))


def _bits(values: pa.Array, *, short: bool) -> pa.Array:
    """Bytes, the lowest one first."""
    longest = pc.max(pc.binary_length(values)).as_py() or 0
    width = max(1, -(-longest // 8)) * 8
    characters, _ = pieces(pc.utf8_lpad(values.fill_null(""), width, "0"))
    packed = np.packbits(characters.reshape(-1, width)[:, ::-1] == ord("1"), axis=1, bitorder="little")
    last = (packed > 0) * np.arange(1, width // 8 + 1)
    counts = last.max(axis=1) if short else np.full(len(values), width // 8)
    return binary(packed[np.arange(width // 8) < counts[:, None]], counts, present(values))
