"""What each type of Postgres is in Debezium's messages, and how it is read (`sink.databases.read_columns`)."""

from collections.abc import Collection
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from changelog.changes import WireType
from changelog.values import logical
from changelog.values.arrays import binary, present
from changelog.values.nested import is_list
from sink.databases.postgres_catalog import PostgresColumn, quoted
from sink.databases.read_columns import (
    NO_NUMBERS,
    UUID,
    Made,
    ReadColumn,
    Spelling,
    as_it_is,
    bits,
    fixed_decimal,
    floats,
    instants,
    local_times,
    numerals,
    octets,
    stored,
    to_decimals,
)

_POINT = "io.debezium.data.geometry.Point"
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


def read_column(column: PostgresColumn, targets: Collection[pa.DataType], spelling: Spelling) -> ReadColumn | None:
    """How a column is read. None if nothing is known of its type.

    :param targets: Arrow types of the table's columns that take its values, or `UUID`.
    """
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
        return floats(column, "float" if type_name == "float4" else "double", targets, spelling)
    if type_name == "bytea":
        base64 = f"translate(encode({column}, 'base64'), E'+/\\n', '-_')"
        return octets(column, f"encode({column}, 'hex')", base64, targets, spelling)
    if type_name in ("date", "time", "timestamp"):
        # Java has no 24:00:00
        old, new = ("24:00:00", "00:00:00") if type_name == "time" else (" ", "T")
        iso = f"replace({column}::text, '{old}', '{new}') || 'Z'"
        digits = modifier if modifier >= 0 else 6
        return local_times(column, type_name, digits, (iso, as_it_is), targets, spelling)
    if type_name == "timestamptz":
        return instants(column, modifier if modifier >= 0 else 6, targets)
    length = modifier if modifier > 0 else 2**31 - 1
    return {
        "bool": ReadColumn(column, WireType("boolean")),
        "oid": ReadColumn(f"{column}::int8", WireType("int64")),
        "hstore": ReadColumn(_pairs(column), WireType("string", _NAMED["json"])),
        "interval": _interval(column, targets),
        "bit": ReadColumn(f"({column}::text = '1')", WireType("boolean"))
        if modifier == 1
        else bits(f"{column}::text", length, short=True),
        "varbit": bits(f"{column}::text", length, short=True),
        # the cast leaves zeros at the end out, as messages do
        "timetz": ReadColumn(
            f"({column} AT TIME ZONE 'UTC')::time::text || 'Z'", WireType("string", "io.debezium.time.ZonedTime")
        ),
        "point": ReadColumn(
            f"CASE WHEN {column} IS NOT NULL THEN ARRAY[({column})[0], ({column})[1]] END", _POINTS, _points
        ),
    }.get(type_name)


def _decimal(
    column: str, type_name: str, modifier: int, targets: Collection[pa.DataType], spelling: Spelling
) -> ReadColumn:
    number = f"{column}::numeric" if type_name == "money" else column
    if spelling.decimals == "double":
        return floats(f"{number}::float8", "double", targets, spelling)
    number += "::text"  # the driver takes three times as long for a numeric
    if spelling.decimals == "string":
        return ReadColumn(number, WireType("string"), _numeric_texts)
    if type_name == "money":
        return ReadColumn(number, WireType("bytes", logical.DECIMAL, {"scale": "2"}), partial(to_decimals, 19, 2))
    if modifier < 4:
        return ReadColumn(number, WireType("struct", logical.VARIABLE_SCALE_DECIMAL), _shortest_numerals)
    precision, scale = (modifier - 4) >> 16, ((modifier - 4 & 0x7FF) ^ 1024) - 1024
    return fixed_decimal(number, precision, scale)


def _numeric_texts(values: pa.Array) -> pa.Array:
    for own, name in NO_NUMBERS.items():
        values = pc.if_else(pc.equal(values, own), name, values)
    return values


def _shortest_numerals(values: pa.Array) -> pa.Array:
    """Without zeros at the end, as messages have numbers without a scale of their own."""
    shorter = pc.utf8_rtrim(pc.utf8_rtrim(values, "0"), ".")
    return numerals(pc.if_else(pc.match_substring(values, "."), shorter, values))


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
