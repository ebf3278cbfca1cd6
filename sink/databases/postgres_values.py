"""How a column of Postgres is read, so that its values become those that Debezium's messages have.

`ReadColumn.sql` selects what the binary protocol brings into Arrow without a loss. `made` turns this into an array with
the meaning of `wire`, the type in the messages' schema. From there on `changelog.values` converts it as it converts
messages. Where a column of the table takes a value by its spelling (a text, a number of another width), `made` has
the messages' spelling.
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
from changelog.values.nested import is_list
from changelog.values.times import to_text
from sink.databases.postgres_catalog import PostgresColumn, quoted

UUID = pa.binary(16)
"""In place of a column's type: the table has a UUID."""
Made = Callable[[pa.Array], pa.Array]

_TIMESTAMP, _MICRO_TIMESTAMP = "io.debezium.time.Timestamp", "io.debezium.time.MicroTimestamp"
_TIME, _MICRO_TIME = "io.debezium.time.Time", "io.debezium.time.MicroTime"
_POINT = "io.debezium.data.geometry.Point"
_FIRST_MOMENT = -210_866_803_200_000_000
"""Of Postgres, in microseconds since 1970. The driver's arithmetic puts infinite ones far before it: infinity is an odd
number then, and -infinity an even one.
"""
_ENDLESS = np.array([9_223_372_036_832_400_000, 9_223_372_036_825_200_000]) * np.array([-1, 1])
"""What a connector sends for -infinity and infinity, in microseconds."""
_NAMED = {
    "json": "io.debezium.data.Json",
    "jsonb": "io.debezium.data.Json",
    "xml": "io.debezium.data.Xml",
    "ltree": "io.debezium.data.Ltree",
    "uuid": "io.debezium.data.Uuid",
    "tsvector": "io.debezium.data.Tsvector",
}
_AS_TEXT = frozenset(["name", "citext", "tsquery", "macaddr", "macaddr8", "char", *_NAMED])
"""Types whose cast to text is what the server sends to a connector."""
_INTEGERS = {"int2": "int16", "int4": "int32", "int8": "int64"}
_DAYS_A_MONTH = 365.25 / 12


def stored(values: pa.Array) -> pa.Array:
    """The values without the driver's own names for their types."""
    return values.storage if isinstance(values, pa.ExtensionArray) else values


def _as_it_is(values: pa.Array) -> pa.Array:
    return values


@dataclass(frozen=True)
class ReadColumn:
    """:param sql: an expression over the table's columns.
    :param wire: what messages say of the column.
    :param made: `stored` values -> values of `wire`.
    """

    sql: str
    wire: WireType
    made: Made = _as_it_is


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


def read_column(column: PostgresColumn, targets: Collection[pa.DataType], spelling: Spelling) -> ReadColumn | None:
    """How a column is read. None if messages don't have it, or nothing is known of its type.

    :param targets: Arrow types of the table's columns that take its values, or `UUID`.
    """
    if column.is_generated:  # the log doesn't have them
        return None
    name = quoted(column.name)
    if column.element is None:
        return _scalar(name, column.type, column.kind, column.modifier, targets, spelling)
    inner = [target.value_type for target in targets if is_list(target)]
    if len(inner) < len(targets) and column.element.type not in ("float4", "float8"):  # JSON has numbers as they are
        inner.append(pa.string())
    element = _scalar("x", column.element.type, column.element.kind, column.modifier, inner, spelling)
    if element is None or element.wire.name in _IN_NO_ARRAY:
        return None
    elements = f"ARRAY(SELECT {element.sql} FROM unnest({name}) WITH ORDINALITY AS each(x, n) ORDER BY n)"
    sql = {"x": name, "x::text": f"{name}::text[]"}.get(
        element.sql, f"CASE WHEN {name} IS NOT NULL THEN {elements} END"
    )
    wire = WireType("array", children={"element": element.wire})
    return ReadColumn(sql, wire, partial(_made_in_lists, element.made))


def _scalar(
    column: str, type_name: str, kind: str, modifier: int, targets: Collection[pa.DataType], spelling: Spelling
) -> ReadColumn | None:
    """:param kind: `pg_type.typtype`.
    :param modifier: `pg_attribute.atttypmod`.
    """
    if type_name in _INTEGERS:
        return ReadColumn(column, WireType(_INTEGERS[type_name]))
    if type_name in ("text", "varchar", "bpchar"):
        return ReadColumn(column, WireType("string"))
    if type_name in ("numeric", "money"):
        return _decimal(column, type_name, modifier, targets, spelling)
    if type_name == "uuid" and all(target == UUID for target in targets):
        return ReadColumn(column, WireType("string", _NAMED["uuid"]))
    if type_name in _AS_TEXT or kind in ("e", "r"):
        name = "io.debezium.data.Enum" if kind == "e" else _NAMED.get(type_name)
        return ReadColumn(f"{column}::text", WireType("string", name))
    if type_name in ("inet", "cidr"):  # a cast adds a mask
        return ReadColumn(f"CASE WHEN {column} IS NOT NULL THEN format('%s', {column}) END", WireType("string"))
    if type_name in ("float4", "float8"):
        return _float(column, type_name, targets, spelling)
    if type_name == "bytea":
        return _bytes(column, targets, spelling)
    if type_name in ("date", "time", "timetz", "timestamp", "timestamptz"):
        return _time(column, type_name, modifier, targets, spelling)
    digits = modifier if modifier > 0 else 2**31 - 1
    return {
        "bool": ReadColumn(column, WireType("boolean")),
        "oid": ReadColumn(f"{column}::int8", WireType("int64")),
        "hstore": ReadColumn(_pairs(column), WireType("string", _NAMED["json"])),
        "interval": _interval(column, targets),
        "bit": ReadColumn(f"({column}::text = '1')", WireType("boolean"))
        if modifier == 1
        else ReadColumn(f"{column}::text", _bits_type(digits), _bits),
        "varbit": ReadColumn(f"{column}::text", _bits_type(digits), _bits),
        "point": ReadColumn(
            f"CASE WHEN {column} IS NOT NULL THEN ARRAY[({column})[0], ({column})[1]] END", _POINTS, _points
        ),
    }.get(type_name)


def _decimal(
    column: str, type_name: str, modifier: int, targets: Collection[pa.DataType], spelling: Spelling
) -> ReadColumn:
    number = f"{column}::numeric" if type_name == "money" else column
    if spelling.decimals == "double":
        return _float(f"{number}::float8", "float8", targets, spelling)
    number += "::text"  # the driver takes three times as long for a numeric
    if spelling.decimals == "string":
        return ReadColumn(number, WireType("string"), _numeric_texts)
    if type_name == "money":
        return ReadColumn(number, WireType("bytes", logical.DECIMAL, {"scale": "2"}), partial(_decimals, 19, 2))
    if modifier < 4:
        return ReadColumn(number, WireType("struct", logical.VARIABLE_SCALE_DECIMAL), _shortest_numerals)
    precision, scale = (modifier - 4) >> 16, ((modifier - 4 & 0x7FF) ^ 1024) - 1024
    parameters = {"scale": str(scale), "connect.decimal.precision": str(precision)}
    wire = WireType("bytes", logical.DECIMAL, parameters)
    if 0 <= scale <= precision <= 38:
        return ReadColumn(number, wire, partial(_decimals, precision, scale))
    return ReadColumn(number, wire, _numerals)


_NO_NUMBERS = {"NaN": "NAN", "Infinity": "POSITIVE_INFINITY", "-Infinity": "NEGATIVE_INFINITY"}
"""What the server has for them -> what messages have, if decimals are texts. Else they have null."""


def _numeric_texts(values: pa.Array) -> pa.Array:
    for own, name in _NO_NUMBERS.items():
        values = pc.if_else(pc.equal(values, own), name, values)
    return values


def _numerals(values: pa.Array) -> pa.Array:
    found = pc.is_in(values, value_set=pa.array(list(_NO_NUMBERS)))
    return (only(values, pc.invert(found)) if pc.any(found).as_py() else values).cast(NUMERAL)


def _shortest_numerals(values: pa.Array) -> pa.Array:
    """Without zeros at the end, as messages have numbers without a scale of their own."""
    shorter = pc.utf8_rtrim(pc.utf8_rtrim(values, "0"), ".")
    return _numerals(pc.if_else(pc.match_substring(values, "."), shorter, values))


def _decimals(precision: int, scale: int, values: pa.Array) -> pa.Array:
    try:
        return values.cast(pa.decimal128(precision, scale))
    except pa.ArrowInvalid:
        return _numerals(values).cast(pa.string()).cast(pa.decimal128(precision, scale))


def _float(column: str, type_name: str, targets: Collection[pa.DataType], spelling: Spelling) -> ReadColumn:
    wire = WireType("float" if type_name == "float4" else "double")
    own = (pa.float32(),) if type_name == "float4" and spelling.shortest_floats else (pa.float32(), pa.float64())
    if all(target in own for target in targets):
        return ReadColumn(column, wire)
    return ReadColumn(column, wire, _java_texts if spelling.shortest_floats else _as_it_is)


def _java_texts(values: pa.Array) -> pa.Array:
    """Floating numbers as Java writes them, and so Kafka Connect's JSON."""
    is_single = pa.types.is_float32(values.type)

    def text(value: float) -> str:
        if not np.isfinite(value):
            return "NaN" if np.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        number = np.float32(value) if is_single else np.float64(value)
        if value == 0 or 1e-3 <= abs(value) < 1e7:
            return np.format_float_positional(number, trim="0")
        mantissa, _, exponent = np.format_float_scientific(number, trim="0").partition("e")
        return f"{mantissa}E{int(exponent)}"

    return each(values, pa.string(), text)


def _bytes(column: str, targets: Collection[pa.DataType], spelling: Spelling) -> ReadColumn:
    if spelling.binaries in ("bytes", "base64") or (targets and all(map(pa.types.is_binary, targets))):
        return ReadColumn(column, WireType("bytes"))
    wire = WireType("string", spelling.binaries)
    if spelling.binaries == readings.HEX:
        return ReadColumn(f"encode({column}, 'hex')", wire)
    return ReadColumn(f"translate(encode({column}, 'base64'), E'+/\\n', '-_')", wire)


def _time(
    column: str, type_name: str, modifier: int, targets: Collection[pa.DataType], spelling: Spelling
) -> ReadColumn:
    digits = modifier if modifier >= 0 else 6
    if type_name == "timestamptz":
        is_moment = all(pa.types.is_timestamp(target) and target.tz is not None for target in targets)
        if is_moment:
            return ReadColumn(column, WireType("string", logical.ZONED_TIMESTAMP), _instants)
        return ReadColumn(column, WireType("string", logical.ZONED_TIMESTAMP), partial(_zoned_texts, digits))
    if type_name == "timetz":
        # the cast leaves zeros at the end out, as messages do
        return ReadColumn(
            f"({column} AT TIME ZONE 'UTC')::time::text || 'Z'", WireType("string", "io.debezium.time.ZonedTime")
        )
    is_native = pa.types.is_date if type_name == "date" else pa.types.is_timestamp
    if spelling.times == "isostring" and not (targets and all(map(is_native, targets))):
        name = {"date": logical.ISO_DATE, "time": "io.debezium.time.IsoTime"}.get(type_name, logical.ISO_TIMESTAMP)
        # Java has no 24:00:00
        old, new = ("24:00:00", "00:00:00") if type_name == "time" else (" ", "T")
        return ReadColumn(f"replace({column}::text, '{old}', '{new}') || 'Z'", WireType("string", name))
    if type_name == "date":
        return ReadColumn(column, WireType("int32", "io.debezium.time.Date"), _days)
    if spelling.times == "connect":
        kind, name = ("int64", "Timestamp") if type_name == "timestamp" else ("int32", "Time")
        return ReadColumn(column, WireType(kind, f"org.apache.kafka.connect.data.{name}"), partial(_units, 1000))
    modes = ("adaptive", "adaptive_time_microseconds") if type_name == "timestamp" else ("adaptive",)
    micros = 1000 if digits <= 3 and spelling.times in modes else 1
    names = (_TIMESTAMP, _MICRO_TIMESTAMP) if type_name == "timestamp" else (_TIME, _MICRO_TIME)
    kind = "int32" if micros == 1000 and type_name == "time" else "int64"
    return ReadColumn(column, WireType(kind, names[micros == 1]), partial(_units, micros))


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


def _pairs(column: str) -> str:
    pair = "to_json(key)::text || ':' || coalesce(to_json(value)::text, 'null')"
    pairs = f"(SELECT string_agg({pair}, ',') FROM each({column}))"
    return f"CASE WHEN {column} IS NOT NULL THEN '{{' || coalesce({pairs}, '') || '}}' END"


def _interval(column: str, targets: Collection[pa.DataType]) -> ReadColumn:
    """Text columns have what `interval.handling.mode: string` sends, as a number of microseconds isn't exact."""
    parts = ", ".join(f"extract({part} FROM {column})::int8" for part in _INTERVAL_PARTS)
    sql = f"CASE WHEN {column} IS NOT NULL THEN ARRAY[{parts}] END"
    if pa.string() in targets:
        return ReadColumn(sql, WireType("string", "io.debezium.time.Interval"), _interval_texts)
    return ReadColumn(sql, WireType("int64", "io.debezium.time.MicroDuration"), _durations)


_INTERVAL_PARTS = ("year", "month", "day", "hour", "minute", "microseconds")


def _parts_of(values: pa.ListArray) -> tuple[np.ndarray[tuple[int, int], np.dtype[np.int64]], pa.Array]:
    """The parts of the intervals that aren't null, and which rows have them."""
    valid = pa.array(present(values))
    return values.filter(valid).flatten().to_numpy().reshape(-1, len(_INTERVAL_PARTS)), valid


def _durations(values: pa.ListArray) -> pa.Array:
    """With Debezium's own arithmetic (`io.debezium.time.MicroDuration.durationMicros`): doubles, cut off."""
    parts, valid = _parts_of(values)
    years, months, days, hours, minutes, micros = parts.T
    whole_days = (years * 12 + months) * _DAYS_A_MONTH + days
    seconds = ((whole_days * 24 + hours) * 60 + minutes) * 60 + micros / 1e6
    return _spread((seconds * 1e6).astype(np.int64), valid)


def _interval_texts(values: pa.ListArray) -> pa.Array:
    parts, valid = _parts_of(values)
    years, months, days, hours, minutes = (pa.array(part).cast(pa.string()) for part in parts.T[:5])
    seconds = pa.array([f"{micro / 1e6:.6f}".rstrip("0").rstrip(".") for micro in parts[:, 5].tolist()], pa.string())
    texts = pc.binary_join_element_wise(
        "P", years, "Y", months, "M", days, "DT", hours, "H", minutes, "M", seconds, "S", ""
    )
    return _spread(texts, valid)


def _spread(found: object, valid: pa.Array) -> pa.Array:
    """Values of the rows that have any, with null in the others."""
    made = found if isinstance(found, pa.Array) else pa.array(found)
    flags = valid.to_numpy(zero_copy_only=False)
    places = np.cumsum(flags) - 1
    return made.take(pa.array(places, mask=~flags))


def _bits_type(digits: int) -> WireType:
    return WireType("bytes", logical.BITS, {"length": str(digits)})


def _bits(values: pa.Array) -> pa.Array:
    """Texts of 0 and 1, the highest bit first, as bytes, the lowest one first, without zeros at the end."""
    longest = pc.max(pc.binary_length(values)).as_py() or 0
    width = max(1, -(-longest // 8)) * 8
    characters, _ = pieces(pc.utf8_lpad(values.fill_null(""), width, "0"))
    packed = np.packbits(characters.reshape(-1, width)[:, ::-1] == ord("1"), axis=1, bitorder="little")
    octets = ((packed > 0) * np.arange(1, width // 8 + 1)).max(axis=1)
    return binary(packed[np.arange(width // 8) < octets[:, None]], octets, present(values))


_POINTS = WireType(
    "struct",
    _POINT,
    children={"x": WireType("double"), "y": WireType("double"), "wkb": WireType("bytes"), "srid": WireType("int32")},
)


def _points(values: pa.ListArray) -> pa.Array:
    """Lists of both coordinates as Debezium's points."""
    valid = present(values)
    both = np.zeros((len(values), 2), "<f8")
    both[valid] = values.filter(pa.array(valid)).flatten().to_numpy().reshape(-1, 2)
    whole = np.empty((len(values), 21), np.uint8)
    whole[:, :5] = (1, 1, 0, 0, 0)  # little endian, a point
    whole[:, 5:] = both.view(np.uint8)
    wkb = binary(whole.reshape(-1), np.full(len(values), 21, np.int64), np.ones(len(values), np.bool_))
    parts = [pa.array(both[:, 0]), pa.array(both[:, 1]), wkb, pa.nulls(len(values), pa.int32())]
    return pa.StructArray.from_arrays(parts, names=["x", "y", "wkb", "srid"], mask=pa.array(~valid))


_IN_NO_ARRAY = frozenset([_POINT, "io.debezium.time.Interval", "io.debezium.time.MicroDuration"])
"""They are selected as arrays."""


def _made_in_lists(made: Made, values: pa.ListArray) -> pa.Array:
    begins = values.offsets.to_numpy()
    items = made(stored(values.values[begins[0] : begins[-1]]))
    mask = values.is_null() if values.null_count else None
    return pa.ListArray.from_arrays(pa.array(begins - begins[0]), items, mask=mask)
