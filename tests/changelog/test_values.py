"""Values of messages become exactly what they mean in the table's type, or misfits. `docs/types.md` is tested line by
line.
"""

import base64
import io
import json
import math
import re
import uuid
from collections.abc import Mapping, Sequence
from decimal import Context, Decimal, Inexact, InvalidOperation
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyspark.sql.pandas.types import to_arrow_type

from changelog.changes import NUMERAL, Wire, WireType
from changelog.values import convert, json_candidates, logical, spark_type

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "types.md").read_text(encoding="utf-8")


class Misfit:
    def __repr__(self) -> str:
        return "misfit"


MISFIT = Misfit()


def converted(values: Any, wire: WireType, target: pa.DataType, is_uuid: bool = False) -> pa.Array:
    """The result of `convert`. Also checks rules that are true for all inputs."""
    result, misfits = convert(Wire(values, wire), target, is_uuid)
    result.validate(full=True)
    assert result.type == target
    assert len(result) == len(values)
    expected = pc.and_(values.is_valid(), result.is_null())
    if misfits is None:
        assert not pc.any(expected).as_py()
    else:
        assert misfits.type == pa.bool_()
        assert misfits.equals(expected)
        assert pc.any(misfits).as_py()
    return result


def fits(
    values: Sequence[Any],
    source: pa.DataType,
    target: pa.DataType,
    name: str | None = None,
    kind: str = "",
    is_uuid: bool = False,
    **parameters: str,
) -> list[Any]:
    """Each value as the column has it, or MISFIT. Timestamps and dates are integers, because Python has no dates BC."""
    wire = WireType(kind, name, parameters)
    whole = converted(pa.array(values, source), wire, target, is_uuid)
    # the same values inside a longer array, like parts of nested values: the array's offset must not matter
    around = pa.concat_arrays([pa.array(values[-1:], source), pa.array(values, source), pa.array(values[:1], source)])
    part = converted(around.slice(len(values[:1]), len(values)), wire, target, is_uuid)
    assert part.fill_null(0).equals(whole.fill_null(0)) if pa.types.is_floating(target) else part.equals(whole)
    if pa.types.is_temporal(target):
        whole = whole.cast(pa.int64() if pa.types.is_timestamp(target) else pa.int32())
    found = whole.to_pylist(maps_as_pydicts="strict")
    return [MISFIT if f is None and v is not None else f for f, v in zip(found, values, strict=True)]


# The document ---------------------------------------------------------------------------------------------------------

_TYPES = {
    "boolean": pa.bool_(),
    "tinyint": pa.int8(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "uuid": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}


def arguments(text: str) -> list[str]:
    """The parts between a type's outermost brackets: `map<string,array<int>>` -> `string`, `array<int>`."""
    parts, depth = [""], 0
    for character in text[text.index("<") + 1 : -1]:
        depth += {"<": 1, "(": 1, ">": -1, ")": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def arrow_type(sql: str) -> pa.DataType:
    """The Arrow type of a Spark column."""
    if sql.startswith("decimal"):
        return pa.decimal128(*map(int, re.findall(r"\d+", sql)))
    if sql.startswith("array"):
        return pa.list_(pa.field("element", arrow_type(arguments(sql)[0])))
    if sql.startswith("map"):
        return pa.map_(*map(arrow_type, arguments(sql)))
    if sql.startswith("struct"):
        return pa.struct([(part.split(":")[0], arrow_type(part.split(":", 1)[1])) for part in arguments(sql)])
    return _TYPES[sql]


def wire_type(kind: str, name: str = "", parameters: Mapping[str, str] | None = None) -> WireType:
    """`array<int32>` and the like, with its children."""
    children = {}
    if "<" in kind:
        parts, kind = arguments(kind), kind[: kind.index("<")]
        if kind == "struct":
            children = {part.split(":")[0]: wire_type(part.split(":", 1)[1]) for part in parts}
        else:
            names = ["element"] if kind == "array" else ["key", "value"]
            children = dict(zip(names, map(wire_type, parts), strict=True))
    return WireType(kind, name or None, parameters or {}, children)


def table(header: str) -> list[list[list[str]]]:
    """Lines of a table in the document: what stands in backticks in each cell."""
    lines = DOCUMENT.split(f"\n{header}\n")[1].split("\n\n")[0].splitlines()[1:]
    rows = [
        [re.findall(r"`([^`]*)`", cell) or cell.split() for cell in line.strip("| ").split(" | ")] for line in lines
    ]
    return [[["" if part == "–" else part for part in cell] for cell in row] for row in rows]


BY_TYPE = table("| schema name | kind | parameters | in JSON | column | holds | also |")
BY_VALUE = table("| column | schema name | in JSON | becomes |")


def one_by_one(text: str) -> pa.Array:
    """A JSON value as the record-by-record path of `JsonReader` gives it."""
    if text[0] in "{[":
        return pa.array([text])
    parsed = json.loads(text)
    if isinstance(parsed, bool | str):
        return pa.array([parsed])
    if isinstance(parsed, int) and -(2**63) <= parsed < 2**63:
        return pa.array([parsed], pa.int64())
    return pa.array([text], NUMERAL)


def at_once(text: str, candidates: Sequence[pa.DataType]) -> pa.Array | None:
    """A JSON value as `pyarrow.json` reads it, with the first of the types that it can be read as."""
    for candidate in candidates:
        options = pj.ParseOptions(
            explicit_schema=pa.schema([("v", candidate)]), unexpected_field_behavior="ignore", newlines_in_values=True
        )
        try:
            return pj.read_json(io.BytesIO(f'{{"v":{text}}}'.encode()), parse_options=options)["v"].combine_chunks()
        except pa.ArrowInvalid:
            continue
    return None


def shown(result: pa.Array, sql: str) -> Any:
    """A value as the document shows it. Nested values are Python objects."""
    (value,) = result.to_pylist(maps_as_pydicts="strict")
    if value is None:
        return "misfit"
    if sql.startswith(("array", "map", "struct")):
        return value
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float):
        if not math.isfinite(value):
            return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(value)]
        return str(np.float32(value)) if sql == "float" else str(value)
    return str(value)


def both_ways(text: str, wire: WireType, sql: str) -> Any:
    """A JSON value in a column, whether it was read alone or in a batch. As `shown`."""
    target, is_uuid = arrow_type(sql), sql == "uuid"
    alone = shown(converted(one_by_one(text), wire, target, is_uuid), sql)
    in_batch = at_once(text, json_candidates(wire, target, is_uuid))
    if in_batch is not None:
        assert shown(converted(in_batch, wire, target, is_uuid), sql) == alone
    return alone


@pytest.mark.parametrize("row", BY_TYPE, ids=lambda row: f"{row[0][0].rsplit('.', 1)[-1]}-{row[3][0]}")
def test_logical_types(row: list[list[str]]) -> None:
    (name,), (kind,), parameters, (text,), (column,), (holds,), *also = row
    wire = wire_type(kind, name, dict(p.split("=") for p in parameters if p))
    assert spark_type(wire).simpleString() == column
    found = both_ways(text, wire, column)
    assert found == (json.loads(holds) if isinstance(found, list | dict) else holds)
    for sql in also[0] if also else []:
        assert both_ways(text, wire, sql) != "misfit", sql


@pytest.mark.parametrize("row", BY_VALUE, ids=lambda row: f"{row[0][0]}-{row[2][0]}")
def test_values(row: list[list[str]]) -> None:
    (column,), (name,), (text,), (becomes,) = row
    found = both_ways(text, WireType("", name or None), column)
    assert found == (json.loads(becomes) if isinstance(found, list | dict) else becomes)


def test_the_document_names_every_logical_type() -> None:
    values = [value for key, value in vars(logical).items() if key.isupper()]
    names = {name for value in values for name in ([value] if isinstance(value, str) else value)}
    assert names == {row[0][0] for row in BY_TYPE} - {""}


def test_default_columns_are_types_that_values_convert_to() -> None:
    for row in BY_TYPE:
        wire = wire_type(row[1][0], row[0][0])
        assert to_arrow_type(spark_type(wire)) == arrow_type(spark_type(wire).simpleString())


# Real messages --------------------------------------------------------------------------------------------------------


def test_string_modes() -> None:
    """The same row with `decimal.handling.mode: string`, `time.precision.mode: isostring`, `hstore.handling.mode: map`,
    `interval.handling.mode: string`. Real texts; the format makes types of the options."""
    iso = "io.debezium.time.Iso"
    cases = [
        ("12345.678901234567890123", None, "decimal(38,18)", "12345.678901234567890123"),
        ("9" * 38, None, "decimal(38,0)", "9" * 38),
        ("NAN", None, "decimal(38,18)", "misfit"),
        ("2026-11-21Z", f"{iso}Date", "date", "2026-11-21"),
        ("23:59:59.123456Z", f"{iso}Time", "string", "23:59:59.123456Z"),
        ("2026-11-21T01:02:03.123Z", f"{iso}Timestamp", "timestamp_ntz", "2026-11-21 01:02:03.123000"),
        ("+292278994-08-16Z", f"{iso}Date", "date", "misfit"),
        ("+292278994-08-16T23:00:00Z", f"{iso}Timestamp", "timestamp_ntz", "misfit"),
        ("0001-01-01T00:00:00Z", f"{iso}Timestamp", "timestamp_ntz", "0001-01-01 00:00:00"),
        ("P1Y2M3DT4H5M6.7S", "io.debezium.time.Interval", "string", "P1Y2M3DT4H5M6.7S"),
    ]
    for text, name, sql, expected in cases:
        assert both_ways(json.dumps(text), WireType("string", name), sql) == expected
    assert both_ways('{"a": "1", "b": null}', WireType(), "map<string,string>") == {"a": "1", "b": None}
    assert both_ways('["1.10", "2.20"]', WireType(), "array<decimal(10,2)>") == [Decimal("1.10"), Decimal("2.20")]


# By hand --------------------------------------------------------------------------------------------------------------


def big_endian(value: int, size: int | None = None) -> bytes:
    """`java.math.BigInteger.toByteArray`, or longer."""
    return value.to_bytes(size or (8 + (value + (value < 0)).bit_length()) // 8, "big", signed=True)


def text_of(value: int, size: int | None = None) -> str:
    return base64.b64encode(big_endian(value, size)).decode()


def test_unscaled_integers_of_every_length() -> None:
    largest = 10**38 - 1
    good = [largest, -largest, 0, -1, 127, 128, -128, -129, 2**63, -(2**63), 2**64, -(2**64) - 1]
    target = pa.decimal128(38, 10)
    for encode, source in ((text_of, pa.string()), (big_endian, pa.binary())):
        found = fits([encode(n) for n in good], source, target, logical.DECIMAL, scale="10")
        assert found == [Decimal(f"{n}e-10") for n in good]
        found = fits(
            [encode(1, 16), encode(10**38), encode(-(10**38)), None], source, target, logical.DECIMAL, scale="10"
        )
        assert found == [Decimal("1e-10"), MISFIT, MISFIT, None]
    # no base64, no bytes, half a group, bits that mean nothing
    bad = ["***", "", "AAA", "AA=A", "AB==", "AAB=", "====", "A===", "AA==AA=="]
    assert fits(bad, pa.string(), target, logical.DECIMAL, scale="10") == [MISFIT] * len(bad)


def test_decimals_of_more_than_38_digits_have_a_place_as_text() -> None:
    huge = 12345678901234567890 * 10**40
    for encode, source in ((text_of, pa.string()), (big_endian, pa.binary())):
        found = fits([encode(huge), encode(-5)], source, pa.string(), logical.DECIMAL, scale="3")
        assert found == [f"{huge // 1000}.000", "-0.005"]
        assert fits([encode(huge)], source, pa.decimal128(38, 0), logical.DECIMAL, scale="3") == [MISFIT]


def test_an_encoded_decimal_in_other_columns() -> None:
    for encode, source in ((text_of, pa.string()), (big_endian, pa.binary())):
        values = [encode(n) for n in (150, 100, 110)]
        assert fits(values, source, pa.int32(), logical.DECIMAL, scale="2") == [MISFIT, 1, MISFIT]
        # a declared decimal has to be exact in a float
        assert fits(values, source, pa.float64(), logical.DECIMAL, scale="2") == [1.5, 1.0, MISFIT]


def test_a_decimal_with_its_own_scale_needs_no_schema() -> None:
    """`numeric` without a scale: where only the options speak, the format can but say Decimal."""
    values = [
        json.dumps({"scale": s, "value": text_of(n)}) for n, s in [(1005, 3), (1000, 3), (7, -3), (1, 40), (0, 40)]
    ]
    odd = [
        '{"scale": 1}',
        '{"scale": true, "value": "AQ=="}',
        '{"scale": 1, "value": 1}',
        "{",
        '{"scale":99999999999,"value":"AQ=="}',
    ]
    found = fits([*values, *odd, text_of(5)], pa.string(), pa.decimal128(12, 2), logical.DECIMAL, scale="2")
    assert found[:5] == [MISFIT, Decimal("1.00"), Decimal("7000.00"), MISFIT, Decimal("0.00")]
    assert found[5:] == [*[MISFIT] * len(odd), Decimal("0.05")]


def test_arrow_does_not_wrap_long_digits_around() -> None:
    """Arrow's own cast of 2^128 + 1 as text gives 1."""
    values = [str(2**128 + 1), "1" * 45, "9" * 38, "1" + "0" * 38, "0" * 60 + "1.5"]
    assert fits(values, pa.string(), pa.decimal128(38, 0)) == [MISFIT, MISFIT, Decimal("9" * 38), MISFIT, MISFIT]


def test_huge_exponents_take_no_time() -> None:
    values = ["1e999999999", "1e-999999999", "0e999999999", "1e9999999999", "-1e99999"]
    for source in (pa.string(), NUMERAL):
        assert fits(values, source, pa.int64()) == [MISFIT, MISFIT, 0, MISFIT, MISFIT]
        assert fits(values, source, pa.decimal128(38, 2)) == [MISFIT, MISFIT, 0, MISFIT, MISFIT]
        assert fits(values, source, pa.float64()) == [MISFIT, 0.0, 0.0, MISFIT, MISFIT]


def test_booleans() -> None:
    words = ["true", "T", "yes", "Y", "1", "FALSE", "f", "no", "n", "0", "maybe", "", None]
    expected = [True] * 5 + [False] * 5 + [MISFIT, MISFIT, None]
    assert fits(words, pa.string(), pa.bool_()) == expected
    assert fits([0, 1, 2, -1, None], pa.int64(), pa.bool_()) == [False, True, MISFIT, MISFIT, None]
    assert fits([1.0], pa.float64(), pa.bool_()) == [MISFIT]
    assert fits([True, None], pa.bool_(), pa.string()) == ["true", None]
    assert fits([True], pa.bool_(), pa.decimal128(3, 0)) == [MISFIT]


def test_floats() -> None:
    third = float(np.float32(1 / 3))
    assert fits([1 / 3, 3e38, 4e38, math.inf, None], pa.float64(), pa.float32()) == [
        third,
        float(np.float32(3e38)),
        MISFIT,
        math.inf,
        None,
    ]
    assert fits([1 / 3, third, math.inf], pa.float64(), pa.float32(), kind="double") == [MISFIT, third, math.inf]
    assert fits([2**24, 2**24 + 1, 2**60, None], pa.int64(), pa.float32(), kind="int64") == [
        2.0**24,
        MISFIT,
        2.0**60,
        None,
    ]
    assert fits([2**53 + 1], pa.int64(), pa.float64()) == [
        2.0**53
    ]  # a number of JSON, and nobody says that it is no float
    assert fits([2**53, 2**53 + 1, -(2**63)], pa.int64(), pa.float64(), kind="int64") == [2.0**53, MISFIT, -(2.0**63)]
    assert fits([1.5, -2.0, 2.0**63, 1e300, math.nan, None], pa.float64(), pa.int64()) == [
        MISFIT,
        -2,
        MISFIT,
        MISFIT,
        MISFIT,
        None,
    ]
    assert fits([0.1, 1e20, 1e-7], pa.float64(), pa.string()) == ["0.1", "1e+20", "1e-7"]
    assert fits([0.1, 1e-7, 1e30, math.nan], pa.float64(), pa.decimal128(12, 2)) == [Decimal("0.10"), *[MISFIT] * 3]


def test_bytes_and_uuids() -> None:
    target = pa.binary()
    text = "11111111-2222-3333-4444-55555555555f"
    expected = uuid.UUID(text).bytes
    texts = [
        text,
        text.upper(),
        text[:-1],
        text.replace("-", ""),
        text.replace("5", "g"),
        text.replace("-", "1"),
        "",
        None,
    ]
    assert fits(texts, pa.string(), target, is_uuid=True) == [expected, expected, *[MISFIT] * 5, None]
    assert fits([expected, b"", None], pa.binary(), target, is_uuid=True) == [expected, MISFIT, None]
    assert fits([expected], pa.binary(16), target, is_uuid=True) == [expected]
    encoded = [base64.b64encode(expected).decode(), "AQ=="]
    assert fits(encoded, pa.string(), target, kind="bytes", is_uuid=True) == [expected, MISFIT]
    assert fits([b"\xde\xad", b"", None], pa.binary(), pa.string()) == ["3q0=", "", None]
    assert fits([b"\xde\xad"], pa.binary(2), target) == [b"\xde\xad"]


def test_geometries() -> None:
    point = {"x": 1.5, "y": 2.0, "wkb": b"\x01\x02", "srid": None}
    wire_struct = pa.struct([("x", pa.float64()), ("y", pa.float64()), ("wkb", pa.binary()), ("srid", pa.int32())])
    name = "io.debezium.data.geometry.Point"
    assert fits([point, None], wire_struct, pa.binary(), name) == [b"\x01\x02", None]
    assert fits([point], wire_struct, pa.string(), name) == ['{"x":1.5,"y":2.0,"wkb":"AQI=","srid":null}']
    texts = ['{"wkb":"AQI="}', '{"wkb":1}', '{"wkb":null}', "{", "{}", "AQI="]
    assert fits(texts, pa.string(), pa.binary(), name) == [b"\x01\x02", *[MISFIT] * 4, b"\x01\x02"]
    assert fits([{"a": 1}], pa.struct([("a", pa.int64())]), pa.binary()) == [MISFIT]


def test_the_types_of_avro() -> None:
    """Arrow's own dates, times and timestamps mean what the same logical types mean in JSON."""
    zoned, local = _TYPES["timestamp"], _TYPES["timestamp_ntz"]
    assert fits([20778, -622191234], pa.date32(), pa.date32()) == [20778, MISFIT]
    assert fits([1, None], pa.date32(), local) == [86_400_000_000, None]
    assert fits([1500], pa.timestamp("ms"), local) == [1_500_000]
    assert fits([1500], pa.timestamp("ns"), local) == [MISFIT]
    assert fits([2], pa.timestamp("s"), zoned) == [2_000_000]
    assert fits([7], pa.timestamp("us"), zoned) == [7]
    assert fits([7, None], pa.timestamp("us", "UTC"), zoned) == [7, None]
    assert fits([7], pa.timestamp("us", "Asia/Tokyo"), zoned) == [7]
    # an instant has no place in a column without zone, unless the connector's type is one without
    assert fits([7], pa.timestamp("us", "UTC"), local) == [MISFIT]
    assert fits([7], pa.timestamp("us", "UTC"), local, "io.debezium.time.MicroTimestamp") == [7]
    assert fits([2**63 - 1], pa.timestamp("us"), local) == [MISFIT]
    assert fits([7], pa.timestamp("ms", "UTC"), pa.int64(), "io.debezium.time.Timestamp") == [7]
    assert fits([7], pa.timestamp("ms", "UTC"), pa.int64(), "io.debezium.time.MicroTimestamp") == [7000]
    assert fits([0], pa.timestamp("us", "UTC"), pa.string()) == ["1970-01-01T00:00:00.000000Z"]
    assert fits([86_399_123], pa.time32("ms"), pa.string()) == ["23:59:59.123"]
    assert fits([86_399_123_456], pa.time64("us"), pa.int64()) == [86_399_123_456]
    assert fits([7], pa.int32(), pa.int32()) == [7]
    assert fits([Decimal("1.50")], pa.decimal256(64, 2), pa.decimal128(3, 1)) == [Decimal("1.5")]
    assert fits([Decimal("1.55"), Decimal(10**50)], pa.decimal256(64, 2), pa.decimal128(3, 1)) == [MISFIT, MISFIT]
    assert fits([Decimal("2.00"), Decimal("2.50")], pa.decimal128(9, 2), pa.int8()) == [2, MISFIT]
    assert fits([2**64 - 1, 2**63, 5], pa.uint64(), pa.int64()) == [MISFIT, MISFIT, 5]
    assert fits([2**64 - 1], pa.uint64(), pa.decimal128(20, 0)) == [Decimal(2**64 - 1)]
    dictionary = pa.array(["1", "x", "1", None]).dictionary_encode()
    assert converted(dictionary, WireType(), pa.int64()).to_pylist() == [1, None, 1, None]


@pytest.mark.parametrize("parameters", [{}, {"scale": ""}, {"scale": "two"}, {"scale": "1e3"}])
def test_a_decimal_whose_scale_nobody_knows_is_no_decimal(parameters: dict[str, str]) -> None:
    wire = WireType("bytes", logical.DECIMAL, parameters)
    for target in (pa.decimal128(5, 2), pa.string(), pa.int64(), pa.float64()):
        assert converted(pa.array(["AQ=="]), wire, target).to_pylist() == [None]
    assert spark_type(wire).simpleString() == "string"


def test_sets_of_names() -> None:
    values = ["a,c", "", '["a"]', "a", None]
    expected = [["a", "c"], [], ["a"], ["a"], None]
    assert fits(values, pa.string(), arrow_type("array<string>"), logical.ENUM_SET) == expected
    assert fits(["1,2", "1,x"], pa.string(), arrow_type("array<int>"), logical.ENUM_SET) == [[1, 2], MISFIT]


def test_times_of_day_as_text() -> None:
    # MySQL's TIME may be negative, and longer than a day
    values = [0, 86_400_000_000, -1, (838 * 3600 + 59 * 60 + 59) * 1_000_000, None]
    expected = ["00:00:00.000000", "24:00:00.000000", "-00:00:00.000001", "838:59:59.000000", None]
    assert fits(values, pa.int64(), pa.string(), "io.debezium.time.MicroTime") == expected
    assert fits([1, -(2**63)], pa.int64(), pa.string(), "io.debezium.time.NanoTime") == ["00:00:00.000000001", MISFIT]


def test_moments_as_text() -> None:
    name = "io.debezium.time.MicroTimestamp"
    assert fits([-1, 2**63 - 1, 10**18], pa.int64(), pa.string(), name) == [
        "1969-12-31T23:59:59.999999",
        MISFIT,
        MISFIT,
    ]
    assert fits([1001], pa.int64(), pa.string(), "io.debezium.time.NanoTimestamp") == [MISFIT]


def test_timestamps_as_text() -> None:
    zoned, local = _TYPES["timestamp"], _TYPES["timestamp_ntz"]
    at = int(np.datetime64("2026-01-02T12:00:00.123456", "us").astype(int))
    wall = "2026-01-02T12:00:00.123456"
    zones = {"Z": 0, "+00": 0, " UTC": 0, "+05:30": 330, "+0530": 330, "-05": -300, "-5": -300, "+18:00": 1080}
    expected = [at - minutes * 60_000_000 for minutes in zones.values()]
    assert fits([wall + zone for zone in zones], pa.string(), zoned) == expected
    assert fits([wall + zone for zone in zones], pa.string(), local) == [MISFIT] * len(zones)
    bad = [f"{wall}+18:01", f"{wall}+05:60", f"{wall} Europe/Paris", f"{wall}z", f" {wall}Z", "2026-13-01T00:00:00Z"]
    bad += ["2026-00-01T00:00:00Z", "2026-01-00T00:00:00Z", "2026-01-01T24:00:00Z", "2026-01-01T00:60:00Z", "12:00:00Z"]
    bad += ["2026-01-01T00:00:60Z", "2026-1-1T00:00:00Z", "1900-02-29T00:00:00Z", "+300000-01-01T00:00:00Z", "", "\n"]
    assert fits(bad, pa.string(), zoned) == [MISFIT] * len(bad)
    assert fits(["2000-02-29T00:00Z", "2026-01-02T12Z"], pa.string(), zoned) == [951_782_400_000_000, at - 123456]


def test_nested_types() -> None:
    """Inside of arrays, maps and structs as everywhere: exact, or refused. A part that doesn't fit never
    becomes null.
    """
    target = arrow_type("struct<a:int,b:array<string>,c:map<string,double>>")
    values = [
        {"a": 1, "b": ["x", None], "c": {"k": 1.5, "n": None}},
        {"a": None, "b": None, "c": {}},
        {"a": "one", "b": [], "c": {}},
        {"a": 1, "b": [], "c": {"k": "x"}},
        {"b": [5, {"deep": [1.50, True]}]},
        [],
        None,
    ]
    expected = [*values[:2], MISFIT, MISFIT, {"a": None, "b": ["5", '{"deep":[1.5,true]}'], "c": None}, MISFIT, None]
    assert fits([None if v is None else json.dumps(v) for v in values], pa.string(), target) == expected
    source = arrow_type("struct<a:bigint,b:array<string>,c:map<string,string>,d:int>")
    parts = [
        {"a": 1, "b": ["x", None], "c": {"k": "1.5", "n": None}, "d": 1},
        {"a": 2**31, "b": None, "c": None, "d": 2},
        {"a": 1, "b": None, "c": {"k": "x"}, "d": 3},
        None,
    ]
    assert fits(parts, source, target) == [{"a": 1, "b": ["x", None], "c": {"k": 1.5, "n": None}}, MISFIT, MISFIT, None]
    lists = [[[1], [], None], [[1], [2**40]], [[2**40]], None, []]
    nested = arrow_type("array<array<int>>")
    assert fits(lists, arrow_type("array<array<bigint>>"), nested) == [[[1], [], None], MISFIT, MISFIT, None, []]
    assert fits(["[[1],[],null]", '[[1],["x"]]', "[1]", "5", "{", ""], pa.string(), nested) == [
        [[1], [], None],
        *[MISFIT] * 5,
    ]
    assert fits([5], pa.int64(), nested) == [MISFIT]
    assert fits([[5]], arrow_type("array<int>"), arrow_type("struct<a:int>")) == [MISFIT]


def test_parts_of_nested_values_have_logical_types() -> None:
    children = {"element": WireType("bytes", logical.DECIMAL, {"scale": "2"})}
    wire, target = WireType("array", children=children), arrow_type("array<decimal(10,2)>")
    for values in (
        pa.array([["bg==", None], ["***"]]),
        pa.array(['["bg==",null]', '["***"]']),
        pa.array([[b"\x6e", None], [b""]]),
    ):
        assert converted(values, wire, target).to_pylist() == [[Decimal("1.10"), None], None]
    # without a logical type the text is not decoded as base64, and isn't a number
    assert fits(['["bg=="]'], pa.string(), target) == [MISFIT]


def test_parts_that_may_not_be_null() -> None:
    element = pa.list_(pa.field("element", pa.int32(), nullable=False))
    assert fits([[1], [None]], pa.list_(pa.int64()), element) == [[1], MISFIT]
    assert fits(["[1]", "[null]"], pa.string(), element) == [[1], MISFIT]
    fields = pa.struct([pa.field("a", pa.int32(), nullable=False)])
    assert fits(['{"a":1}', "{}"], pa.string(), fields) == [{"a": 1}, MISFIT]
    pairs = arrow_type("map<int,string>")
    assert fits(['[[1,"x"]]', '{"1":"x"}', '[[null,"x"]]', "[[1]]"], pa.string(), pairs) == [
        {1: "x"},
        {1: "x"},
        MISFIT,
        MISFIT,
    ]


def test_deep_nesting_is_no_crash() -> None:
    deep = "[" * 100_000 + "]" * 100_000
    levels = "[" * 900 + "]" * 900
    for sql in ("array<string>", "map<string,string>", "struct<a:string>", "binary"):
        fits([deep, levels, '{"a":' + levels + "}"], pa.string(), arrow_type(sql))
    name = logical.VARIABLE_SCALE_DECIMAL
    assert fits(['{"scale":' + levels + "}", "{" * 100_000], pa.string(), pa.decimal128(5, 0), name) == [MISFIT, MISFIT]


def test_nested_values_as_text() -> None:
    source = arrow_type("struct<a:array<binary>,b:map<string,double>,c:map<int,date>,d:decimal(3,2)>")
    value = {"a": [b"\x01", None], "b": [("k", math.nan), ("i", -math.inf)], "c": [(1, None)], "d": Decimal("1.50")}
    assert fits([value, None], source, pa.string()) == [
        '{"a":["AQ==",null],"b":{"k":"NaN","i":"-Infinity"},"c":[[1,null]],"d":1.50}',
        None,
    ]


# Properties -----------------------------------------------------------------------------------------------------------


def exactly(value: Decimal, precision: int, scale: int) -> Any:
    """The oracle: a decimal of this precision and scale, or MISFIT."""
    try:
        quantized = value.quantize(
            Decimal((0, (1,), -scale)), context=Context(prec=400, traps=[Inexact, InvalidOperation])
        )
    except (Inexact, InvalidOperation):
        return MISFIT
    return quantized if quantized.copy_abs() < Decimal(10) ** (precision - scale) else MISFIT


def columns_of_decimals() -> st.SearchStrategy[tuple[int, int]]:
    return st.integers(1, 38).flatmap(lambda p: st.tuples(st.just(p), st.integers(0, p)))


def some(values: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(st.none() | values, min_size=1, max_size=20)


UNSCALED = st.integers(-(10**40), 10**40) | st.integers(-300, 300) | st.sampled_from([10**38 - 1, -(10**38), 2**127])


@settings(deadline=None)
@given(some(UNSCALED), st.integers(-3, 41), columns_of_decimals())
def test_decimals_as_bytes(values: list[int | None], scale: int, column: tuple[int, int]) -> None:
    expected = [None if v is None else exactly(Decimal(v).scaleb(-scale, Context(prec=99)), *column) for v in values]
    for encode, source in ((text_of, pa.string()), (big_endian, pa.binary())):
        encoded = [None if v is None else encode(v) for v in values]
        target = pa.decimal128(*column)
        assert fits(encoded, source, target, logical.DECIMAL, scale=str(scale)) == expected
        texts = fits(encoded, source, pa.string(), logical.DECIMAL, scale=str(scale))
        assert [None if t is None else exactly(Decimal(t), *column) for t in texts] == expected


@settings(deadline=None)
@given(some(st.tuples(UNSCALED, st.integers(-3, 41))), columns_of_decimals())
def test_decimals_with_their_own_scale(values: list[tuple[int, int] | None], column: tuple[int, int]) -> None:
    expected = [None if v is None else exactly(Decimal(v[0]).scaleb(-v[1], Context(prec=99)), *column) for v in values]
    for encode, part in ((text_of, pa.string()), (big_endian, pa.binary())):
        structs = [None if v is None else {"scale": v[1], "value": encode(v[0])} for v in values]
        source = pa.struct([("scale", pa.int32()), ("value", part)])
        assert fits(structs, source, pa.decimal128(*column), logical.VARIABLE_SCALE_DECIMAL) == expected


@settings(deadline=None)
@given(some(st.decimals(allow_nan=False, allow_infinity=False) | UNSCALED.map(Decimal)), columns_of_decimals())
@example([Decimal("1." + "0" * 50)], (38, 0))
@example([Decimal("0." + "0" * 50)], (38, 38))
def test_decimals_as_text(values: list[Decimal | None], column: tuple[int, int]) -> None:
    expected = [None if v is None else exactly(v, *column) for v in values]
    for source in (pa.string(), NUMERAL):
        assert fits([None if v is None else str(v) for v in values], source, pa.decimal128(*column)) == expected


@settings(deadline=None)
@given(some(st.integers(-(2**70), 2**70) | st.integers(-200, 200)), st.sampled_from([8, 16, 32, 64]))
def test_integers(values: list[int | None], bits: int) -> None:
    target = {8: pa.int8(), 16: pa.int16(), 32: pa.int32(), 64: pa.int64()}[bits]
    limit = 2 ** (bits - 1)
    expected = [v if v is None or -limit <= v < limit else MISFIT for v in values]
    assert fits([None if v is None else str(v) for v in values], pa.string(), target) == expected
    assert fits([None if v is None else f"{v}.0" for v in values], NUMERAL, target) == expected
    short = [None if v is None or not -(2**63) <= v < 2**63 else v for v in values]
    expected = [v if v is None or -limit <= v < limit else MISFIT for v in short]
    assert fits(short, pa.int64(), target) == expected
    precise = [None if v is None else Decimal(v) for v in short]
    assert fits(short, pa.int64(), pa.decimal128(38, 19)) == precise


@settings(deadline=None)
@given(some(st.floats(allow_nan=False)))
def test_doubles(values: list[float | None]) -> None:
    words = {math.inf: "Infinity", -math.inf: "-Infinity"}
    texts = [None if v is None else words.get(v, repr(v)) for v in values]
    assert fits(texts, pa.string(), pa.float64()) == values
    assert fits(fits(values, pa.float64(), pa.string()), pa.string(), pa.float64()) == values


@settings(deadline=None)
@given(some(st.floats(width=32, allow_nan=False)))
def test_floats_are_the_nearest_of_what_the_source_wrote(values: list[float | None]) -> None:
    finite = [None if v is None or math.isinf(v) else str(np.float32(v)) for v in values]
    expected = [None if text is None else v for text, v in zip(finite, values, strict=True)]
    assert fits(finite, pa.string(), pa.float32()) == expected
    assert fits([None if t is None else float(t) for t in finite], pa.float64(), pa.float32()) == expected


@settings(deadline=None)
@given(some(st.integers(-2_440_588, 5_000_000)), st.booleans())
def test_dates(days: list[int | None], signed: bool) -> None:
    texts = [None if day is None else iso(np.datetime64(day, "D"), signed) for day in days]
    assert fits(texts, pa.string(), pa.date32()) == days
    assert fits(days, pa.int32(), pa.date32(), "io.debezium.time.Date") == days
    assert fits(days, pa.int64(), pa.timestamp("us"), "io.debezium.time.Date") == [
        d and d * 86_400_000_000 for d in days
    ]


def iso(moment: np.datetime64, signed: bool = False) -> str:
    """ISO 8601 with years of at least four digits, also negative, as Java writes them."""
    sign, year, rest = re.fullmatch(r"(-?)(\d+)(-.*)", str(moment)).groups()  # type: ignore[union-attr]
    return f"{sign or ('+' if signed or len(year) > 4 else '')}{year:0>4}{rest}"


MICROS = st.integers(-(2**62), 2**62) | st.integers(-(10**17), 10**17)


@settings(deadline=None)
@given(some(MICROS), st.integers(-18 * 60, 18 * 60))
def test_timestamps(values: list[int | None], minutes: int) -> None:
    local, zoned = _TYPES["timestamp_ntz"], _TYPES["timestamp"]
    walls = [None if v is None else iso(np.datetime64(v, "us")) for v in values]
    assert fits(walls, pa.string(), local) == values
    assert fits([w and f"{w}Z" for w in walls], pa.string(), zoned) == values
    shown_offset = f"{'-' if minutes < 0 else '+'}{abs(minutes) // 60:02}:{abs(minutes) % 60:02}"
    shifted = [None if v is None else v - minutes * 60_000_000 for v in values]
    assert fits([w and w + shown_offset for w in walls], pa.string(), zoned) == shifted
    assert fits(values, pa.int64(), zoned, "io.debezium.time.MicroTimestamp") == values
    millis = [None if v is None else v // 1000 for v in values]
    assert fits(millis, pa.int64(), local, "io.debezium.time.Timestamp") == [m and m * 1000 for m in millis]
    nanos = [v if v is None or v % 1000 == 0 else MISFIT for v in values]
    nanos = [v // 1000 if isinstance(v, int) else v for v in nanos]
    assert fits(values, pa.int64(), local, "io.debezium.time.NanoTimestamp") == nanos


@settings(deadline=None)
@given(some(st.integers(-(2**63), 2**63 - 1)))
def test_milliseconds_past_microseconds(values: list[int | None]) -> None:
    expected = [v if v is None else v * 1000 if abs(v) * 1000 < 2**63 else MISFIT for v in values]
    assert fits(values, pa.int64(), pa.timestamp("us"), "org.apache.kafka.connect.data.Timestamp") == expected


@settings(deadline=None)
@given(some(st.binary(max_size=40)))
def test_base64(values: list[bytes | None]) -> None:
    encoded = [None if v is None else base64.b64encode(v).decode() for v in values]
    assert fits(encoded, pa.string(), pa.binary()) == values
    assert fits(values, pa.binary(), pa.string()) == encoded


@settings(deadline=None)
@given(some(st.text("AQgw9+/=-_ é\n", max_size=12)))
def test_base64_is_strict(texts: list[str | None]) -> None:
    def strictly(text: str | None) -> Any:
        if text is None:
            return None
        try:
            decoded = base64.b64decode(text, validate=True)
        except ValueError:
            return MISFIT
        return decoded if base64.b64encode(decoded).decode() == text else MISFIT

    assert fits(texts, pa.string(), pa.binary()) == [strictly(text) for text in texts]


@settings(deadline=None)
@given(some(st.uuids() | st.text("0f-", min_size=35, max_size=37)))
def test_uuids(values: list[uuid.UUID | str | None]) -> None:
    form = re.compile("-".join(f"[0-9a-f]{{{n}}}" for n in (8, 4, 4, 4, 12)))
    expected = [None if v is None else uuid.UUID(str(v)).bytes if form.fullmatch(str(v)) else MISFIT for v in values]
    assert fits([None if v is None else str(v) for v in values], pa.string(), pa.binary(), is_uuid=True) == expected


@settings(deadline=None)
@given(some(st.lists(st.none() | st.integers(-(2**33), 2**33), max_size=4)))
def test_lists(values: list[list[int | None] | None]) -> None:
    def fitting(part: list[int | None]) -> bool:
        return all(n is None or -(2**31) <= n < 2**31 for n in part)

    expected = [v if v is None or fitting(v) else MISFIT for v in values]
    target = arrow_type("array<int>")
    assert fits(values, pa.list_(pa.int64()), target) == expected
    assert fits([None if v is None else json.dumps(v) for v in values], pa.string(), target) == expected


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "b", "scale", "value", "wkb"]), inner, max_size=3)
    ),
    max_leaves=6,
)
TEXTS = (
    st.text(max_size=8)
    | JSON.map(json.dumps)
    | st.from_regex(r"[+-]?\d{1,6}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d(\.\d{1,9})?)?)?(Z|[+-]\d\d)?", fullmatch=True)
    | st.from_regex(r"[+-]?\d{0,45}\.?\d{0,45}([eE][+-]?\d{1,12})?", fullmatch=True)
    | st.binary(max_size=20).map(lambda raw: base64.b64encode(raw).decode())
    | st.sampled_from(["NaN", "Infinity", "-infinity", "true", "no"])
)
LONGS = st.integers(-(2**63), 2**63 - 1)
SOURCES: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.string(), TEXTS),
    (NUMERAL, TEXTS),
    (pa.int64(), LONGS | st.integers(-3, 3)),
    (pa.int32(), st.integers(-(2**31), 2**31 - 1)),
    (pa.bool_(), st.booleans()),
    (pa.float64(), st.floats()),
    (pa.float32(), st.floats(width=32)),
    (pa.binary(), st.binary(max_size=20)),
    (
        pa.decimal128(38, 5),
        st.integers(-(10**38) + 1, 10**38 - 1).map(lambda n: Decimal(n).scaleb(-5, Context(prec=38))),
    ),
    (pa.date32(), st.integers(-(2**31), 2**31 - 1)),
    (pa.time64("us"), st.integers(0, 86_399_999_999)),
    (pa.timestamp("ms"), LONGS),
    (pa.timestamp("us", "UTC"), LONGS),
    (pa.list_(pa.string()), st.lists(st.none() | TEXTS, max_size=3)),
    (pa.map_(pa.string(), pa.string()), st.dictionaries(st.text(max_size=3), TEXTS, max_size=3)),
    (
        pa.struct([("scale", pa.int64()), ("value", pa.string()), ("wkb", pa.binary())]),
        st.fixed_dictionaries({"scale": LONGS | st.integers(-3, 40), "value": TEXTS, "wkb": st.binary(max_size=5)}),
    ),
]
TARGETS = [
    *_TYPES,
    "decimal(38,0)",
    "decimal(5,5)",
    "array<string>",
    "array<decimal(10,2)>",
    "map<string,timestamp>",
    "struct<a:int,scale:bigint,value:string,wkb:binary>",
]
NAMES = [None, *sorted({row[0][0] for row in BY_TYPE} - {""})]


@settings(deadline=None)
@given(st.data(), st.sampled_from(TARGETS), st.sampled_from(NAMES), st.sampled_from(["", "bytes", "double", "int64"]))
def test_whatever_comes_is_a_value_or_a_misfit(data: st.DataObject, sql: str, name: str | None, kind: str) -> None:
    source, values = data.draw(st.sampled_from(SOURCES))
    array = pa.array(data.draw(st.lists(st.none() | values, max_size=8)), source)
    wire = WireType(kind, name, {"scale": str(data.draw(st.integers(-2, 45)))})
    converted(array, wire, arrow_type(sql), sql == "uuid")
    json_candidates(wire, arrow_type(sql), sql == "uuid")
    spark_type(wire)


@settings(deadline=None)
@given(JSON, st.sampled_from(TARGETS), st.sampled_from(NAMES))
def test_json_means_the_same_alone_and_in_a_batch(value: Any, sql: str, name: str | None) -> None:
    text = json.dumps(value)
    if value is None or "NaN" in text or "Infinity" in text:
        return
    target = arrow_type(sql)
    in_batch = at_once(text, json_candidates(WireType("", name, {"scale": "2"}), target, sql == "uuid"))
    if in_batch is not None:
        wire = WireType("", name, {"scale": "2"})
        alone = converted(one_by_one(text), wire, target, sql == "uuid")
        assert converted(in_batch, wire, target, sql == "uuid").equals(alone)
