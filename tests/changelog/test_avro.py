"""Plain Avro: schemas to types, bodies to values, messages to changes. What fastavro writes is what we read."""

import datetime as dt
import io
import json
import math
from collections.abc import Iterable
from decimal import Decimal
from typing import Any
from uuid import UUID

import fastavro
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pyspark.sql import types as T

from changelog import formats
from changelog.changes import Changes, WireType
from changelog.formats.avro import Avro
from changelog.formats.debezium_avro import DebeziumAvro
from changelog.parse import avro_schema
from changelog.parse.avro_body import read_bodies
from changelog.parse.avro_schema import SchemaError, UnsupportedSchemaError
from changelog.parse.schema_registry import RegistryError
from changelog.spec import ChangelogSpec
from changelog.values import convert
from tests.changelog import avro_messages
from tests.changelog.avro_messages import Outcome, Pair, message, outcome, spec

# Schemas and values


def optional(schema: Any) -> list[Any]:
    return ["null", schema]


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ("boolean", WireType("boolean")),
        ("int", WireType("int32")),
        ({"type": "int", "connect.type": "int16"}, WireType("int16")),
        ("long", WireType("int64")),
        ("float", WireType("float")),
        (["null", "double"], WireType("double")),
        (["double", "null"], WireType("double")),
        (["double"], WireType("double")),
        ("string", WireType("string")),
        ({"type": "enum", "name": "e", "symbols": ["a"]}, WireType("string")),
        ({"type": "fixed", "name": "f", "size": 3}, WireType("bytes")),
        (
            {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2},
            WireType(
                "bytes",
                "org.apache.kafka.connect.data.Decimal",
                {"scale": "2", "connect.decimal.precision": "9"},
            ),
        ),
        (  # Postgres' numeric(5,-2): its logical type is invalid in Avro, and so ignored
            {
                "type": "bytes",
                "logicalType": "decimal",
                "precision": 5,
                "scale": -2,
                "connect.name": "org.apache.kafka.connect.data.Decimal",
                "connect.parameters": {"scale": "-2", "connect.decimal.precision": "5"},
            },
            WireType(
                "bytes",
                "org.apache.kafka.connect.data.Decimal",
                {"scale": "-2", "connect.decimal.precision": "5"},
            ),
        ),
        (
            {"type": "fixed", "name": "f", "size": 8, "logicalType": "decimal", "precision": 9},
            WireType(
                "bytes",
                "org.apache.kafka.connect.data.Decimal",
                {"scale": "0", "connect.decimal.precision": "9"},
            ),
        ),
        (
            {"type": "int", "logicalType": "date"},
            WireType("int32", "org.apache.kafka.connect.data.Date"),
        ),
        (
            {"type": "int", "logicalType": "time-millis"},
            WireType("int32", "org.apache.kafka.connect.data.Time"),
        ),
        (
            {"type": "long", "logicalType": "time-micros"},
            WireType("int64", "io.debezium.time.MicroTime"),
        ),
        (
            {"type": "long", "logicalType": "timestamp-millis"},
            WireType("int64", "timestamp-millis"),
        ),
        ({"type": "long", "logicalType": "timestamp-micros"}, WireType("int64", "timestamp-micros")),
        (
            {"type": "long", "logicalType": "local-timestamp-micros"},
            WireType("int64", "io.debezium.time.MicroTimestamp"),
        ),
        ({"type": "string", "logicalType": "uuid"}, WireType("string", "io.debezium.data.Uuid")),
        (
            {"type": "long", "logicalType": "timestamp-millis", "connect.name": "io.debezium.time.Timestamp"},
            WireType("int64", "io.debezium.time.Timestamp"),
        ),
        # a logical type that doesn't fit its type is ignored
        ({"type": "string", "logicalType": "date"}, WireType("string")),
        (
            {"type": "array", "items": ["null", "int"]},
            WireType("array", children={"element": WireType("int32")}),
        ),
        (
            {"type": "map", "values": "int"},
            WireType(
                "map",
                children={"key": WireType("string"), "value": WireType("int32")},
            ),
        ),
        (
            {
                "type": "array",
                "items": {
                    "type": "record",
                    "name": "MapEntry",
                    "connect.internal.type": "MapEntry",
                    "fields": [{"name": "key", "type": "int"}, {"name": "value", "type": ["null", "string"]}],
                },
            },
            WireType("map", children={"key": WireType("int32"), "value": WireType("string")}),
        ),
    ],
)
def test_wire_types(schema: Any, expected: WireType) -> None:
    assert avro_schema.parse(json.dumps(schema)).wire_type() == expected


@pytest.mark.parametrize(
    "schema",
    [
        ["null", "int", "string"],
        {"type": "array", "items": ["int", "string"]},
        {"type": "record", "name": "r", "fields": [{"name": "next", "type": ["null", "r"]}]},
    ],
)
def test_what_no_column_can_hold(schema: Any) -> None:
    node = avro_schema.parse(json.dumps(schema))
    with pytest.raises(UnsupportedSchemaError):
        node.wire_type()
    with pytest.raises(UnsupportedSchemaError):
        node.arrow()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "7",
        "null",
        '"unheard.of"',
        "{}",
        '{"type": "record", "name": "r", "fields": [{"name": "a", "type": "b"}]}',
        '{"type": "array", "items": "null"}',
        '{"type": "fixed", "name": "f", "size": -1}',
        '{"type": "array", "items": ' * 100 + '"int"' + "}" * 100,
        '{"type": "array", "items": ' * 5000 + '"int"' + "}" * 5000,
    ],
)
def test_what_is_no_schema(text: str) -> None:
    with pytest.raises(SchemaError):
        avro_schema.parse(text)


def test_a_schema_may_refer_to_others() -> None:
    inner = '{"type": "record", "name": "a.Inner", "fields": [{"name": "x", "type": "int"}]}'
    outer = (
        '{"type": "record", "name": "a.Outer", "fields": [{"name": "i", "type": "Inner"}, {"name": "j", "type": '
        '"a.Inner"}]}'
    )
    node = avro_schema.parse(outer, [inner])
    assert node.arrow() == pa.struct([("i", pa.struct([("x", pa.int32())])), ("j", pa.struct([("x", pa.int32())]))])


# Round trips: random schemas and values. A strategy gives a schema, and a strategy for its values as Python has them
# after reading.

Drawn = tuple[Any, st.SearchStrategy[Any]]

_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
_DOUBLES = st.floats(allow_nan=False)
_SINGLES = st.floats(allow_nan=False, width=32)

primitives: st.SearchStrategy[Drawn] = st.sampled_from(
    [
        ("boolean", st.booleans()),
        ("int", st.integers(-(2**31), 2**31 - 1)),
        ("long", st.integers(-(2**63), 2**63 - 1)),
        ("float", _SINGLES),
        ("double", _DOUBLES),
        ("string", _TEXT),
        ("bytes", st.binary(max_size=20)),
        ({"type": "long", "logicalType": "timestamp-micros"}, st.integers(-(2**62), 2**62)),
        ({"type": "bytes", "logicalType": "decimal", "precision": 30, "scale": 3}, st.binary(max_size=12)),
    ]
)


@st.composite
def named(draw: st.DrawFn) -> Drawn:
    name = f"n{draw(st.integers(0, 10**12))}"
    if draw(st.booleans()):
        symbols = draw(st.lists(st.sampled_from(["A", "B", "C_1", "_d"]), min_size=1, max_size=4, unique=True))
        return {"type": "enum", "name": name, "symbols": symbols}, st.sampled_from(symbols)
    size = draw(st.integers(1, 9))
    return {"type": "fixed", "name": name, "size": size}, st.binary(min_size=size, max_size=size)


@st.composite
def nested(draw: st.DrawFn, inner: st.SearchStrategy[Drawn]) -> Drawn:
    schema, values = draw(inner)
    match draw(st.sampled_from(["array", "map", "null", "record"])):
        case "array":
            return {"type": "array", "items": schema}, st.lists(values, max_size=4)
        case "map":
            pairs = st.dictionaries(_TEXT, values, max_size=4).map(lambda d: list(d.items()))
            return {"type": "map", "values": schema}, pairs
        case "null" if not isinstance(schema, list):
            order = draw(st.booleans())
            return ["null", schema] if order else [schema, "null"], st.none() | values
        case _:
            return draw(records(inner))


@st.composite
def records(draw: st.DrawFn, inner: st.SearchStrategy[Drawn]) -> Drawn:
    children = draw(st.lists(inner, min_size=1, max_size=5))
    fields = [{"name": f"f{i}", "type": schema} for i, (schema, _) in enumerate(children)]
    name = f"r{draw(st.integers(0, 10**12))}"
    return {"type": "record", "name": name, "fields": fields}, st.fixed_dictionaries(
        {f"f{i}": values for i, (_, values) in enumerate(children)}
    )


anything: st.SearchStrategy[Drawn] = st.recursive(primitives | named(), nested, max_leaves=8)


@st.composite
def bodies(draw: st.DrawFn) -> tuple[Any, list[Any]]:
    """A schema with unique names, and values."""
    schema, values = draw(records(anything))
    return renamed(schema, iter(range(1000))), draw(st.lists(values, min_size=1, max_size=8))


def renamed(schema: Any, numbers: Iterable[int]) -> Any:
    if isinstance(schema, list):
        return [renamed(item, numbers) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = dict(schema)
    if schema["type"] in ("record", "enum", "fixed"):
        result["name"] = f"n{next(iter(numbers))}"
    for inner in ("items", "values"):
        if inner in result:
            result[inner] = renamed(result[inner], numbers)
    if "fields" in result:
        result["fields"] = [{**field, "type": renamed(field["type"], numbers)} for field in result["fields"]]
    return result


def plain(schema: Any) -> Any:
    """Without logical types, of which fastavro makes Python's."""
    if isinstance(schema, list):
        return [plain(item) for item in schema]
    if isinstance(schema, dict):
        return {name: plain(value) for name, value in schema.items() if name != "logicalType"}
    return schema


def writable(schema: Any, value: Any) -> Any:
    """Maps as dicts, for fastavro."""
    if isinstance(schema, list):
        if value is None:
            return None
        (branch,) = (each for each in schema if each != "null")
        return writable(branch, value)
    if isinstance(schema, dict) and schema["type"] == "map":
        return {key: writable(schema["values"], each) for key, each in value}
    if isinstance(schema, dict) and schema["type"] == "array":
        return [writable(schema["items"], each) for each in value]
    if isinstance(schema, dict) and schema["type"] == "record":
        return {field["name"]: writable(field["type"], value[field["name"]]) for field in schema["fields"]}
    return value


def written(schema: Any, values: Iterable[Any]) -> list[bytes]:
    parsed = fastavro.parse_schema(plain(schema))
    result = []
    for value in values:
        buffer = io.BytesIO()
        fastavro.schemaless_writer(buffer, parsed, writable(schema, value))
        result.append(buffer.getvalue())
    return result


def read(schema: Any, encoded: list[bytes], want: Any = True) -> tuple[list[Any], list[bool]]:
    values = pa.array(encoded, pa.binary())
    array, good = read_bodies(avro_schema.parse(json.dumps(schema)), values, 0, want)
    array.validate(full=True)
    return array.to_pylist(), good.tolist()


SLOW = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=100)


@SLOW
@given(bodies())
def test_what_fastavro_writes_is_read_as_it_was(drawn: tuple[Any, list[Any]]) -> None:
    schema, values = drawn
    found, good = read(schema, written(schema, values))
    assert all(good)
    assert found == values


@SLOW
@given(bodies(), st.data())
def test_fields_that_nobody_wants_are_stepped_over(drawn: tuple[Any, list[Any]], data: st.DataObject) -> None:
    schema, values = drawn
    names = [field["name"] for field in schema["fields"]]
    chosen = data.draw(st.lists(st.sampled_from(names), unique=True))
    found, good = read(schema, written(schema, values), dict.fromkeys(chosen, True))
    assert all(good)
    assert found == [{name: value[name] for name in chosen} for value in values]


@SLOW
@given(bodies(), st.data())
def test_a_broken_body_harms_no_other(drawn: tuple[Any, list[Any]], data: st.DataObject) -> None:
    """Cut, longer, changed or random bodies are a value or marked; all others are read as if they weren't there."""
    schema, values = drawn
    encoded = written(schema, values)
    mixed: list[bytes] = []
    at: list[int] = []
    for body in encoded:
        kind = data.draw(st.sampled_from(["cut", "longer", "changed", "random", "none"]))
        if kind == "cut" and body:
            mixed.append(body[: data.draw(st.integers(0, len(body) - 1))])
        elif kind == "longer":
            mixed.append(body + data.draw(st.binary(min_size=1, max_size=3)))
        elif kind == "changed" and body:
            place = data.draw(st.integers(0, len(body) - 1))
            mixed.append(body[:place] + bytes([data.draw(st.integers(0, 255))]) + body[place + 1 :])
        elif kind == "random":
            mixed.append(data.draw(st.binary(max_size=40)))
        at.append(len(mixed))
        mixed.append(body)
    found, good = read(schema, mixed)
    assert [found[i] for i in at] == values
    assert all(good[i] for i in at)
    for i, body in enumerate(mixed):
        if i not in at:
            assert good[i] == fits(schema, body), body
            if good[i]:
                assert repr(found[i]) == repr(read(schema, [body])[0][0])


def fits(schema: Any, body: bytes) -> bool:
    """Whether the body is taken when it is alone. fastavro is asked too: it must read the same, or not what was
    written.
    """
    found, (good,) = read(schema, [body])
    if not good:
        parsed, rewritten = fastavro.parse_schema(plain(schema)), io.BytesIO()
        try:
            fastavro.schemaless_writer(rewritten, parsed, fastavro.schemaless_reader(io.BytesIO(body), parsed, None))
        except Exception:  # noqa: BLE001 - whatever fastavro says of bytes that aren't Avro
            return False
        assert rewritten.getvalue() != body
    if good and "NaN" not in repr(found) and "nan" not in repr(found):
        # another spelling of the same value is as good: longer numbers, blocks with sizes
        again, (still,) = read(schema, written(schema, found))
        assert still
        assert again == found
        buffer = io.BytesIO(body)
        theirs = fastavro.schemaless_reader(buffer, fastavro.parse_schema(plain(schema)), None)
        assert writable(schema, found[0]) == theirs
        assert buffer.tell() == len(body)
    return bool(good)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1))
@example([0, -1, 1, 63, 64, -64, -65, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63)])
def test_numbers_of_every_length(numbers: list[int]) -> None:
    assert read("long", written("long", numbers)) == (numbers, [True] * len(numbers))
    fitting = [-(2**31) <= number < 2**31 for number in numbers]
    found, good = read("int", written("long", numbers))
    assert good == fitting
    assert [n for n, ok in zip(found, good, strict=True) if ok] == [
        n for n, ok in zip(numbers, fitting, strict=True) if ok
    ]


@pytest.mark.parametrize(
    ("schema", "body"),
    [
        ("long", b"\x80" * 9 + b"\x02"),  # more than 64 bits
        ("long", b"\x80" * 10 + b"\x00"),
        ("long", b"\x80"),
        ("boolean", b"\x02"),
        ("string", b"\x04\xff\xff"),
        ("string", b"\x01"),  # of length -1
        ("bytes", b"\xfe\xff\xff\xff\xff\xff\xff\xff\xff\x01"),  # of length 2^63 - 1
        (["null", "int"], b"\x04\x00"),
        (["null", "int"], b"\x01\x00"),
        ({"type": "enum", "name": "e", "symbols": ["a"]}, b"\x02"),
        ({"type": "array", "items": "int"}, b"\x04\x02\x04"),  # no end
        ({"type": "array", "items": "int"}, b"\xfe\xff\xff\xff\xff\xff\xff\xff\xff\x01\x00"),
        ({"type": "array", "items": "int"}, b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01\x00"),  # -2^63 items
        ("double", b"\0" * 7),
        ("null", b"\0"),
    ],
)
def test_broken_values_between_good_ones(schema: Any, body: bytes) -> None:
    samples: dict[str, Any] = {"long": 5, "boolean": True, "string": "x", "bytes": b"x", "double": 1.5, "null": None}
    kind = schema["type"] if isinstance(schema, dict) else schema
    value = {"enum": "a", "array": [1, 2]}[kind] if isinstance(schema, dict) else samples.get(str(schema), 7)
    good = written(schema, [value])[0]
    found, marks = read(schema, [good, body, good])
    assert marks == [True, False, True]
    assert [found[0], found[2]] == [value, value]


def test_blocks_with_sizes_and_several_blocks() -> None:
    schema = {"type": "array", "items": "int"}
    blocks = b"\x04\x02\x04" + b"\x03\x04\x06\x08" + b"\x00"  # two items; two items in two bytes; the end
    found, good = read(schema, [blocks, b"\x00"])
    assert good == [True, True]
    assert found == [[1, 2, 3, 4], []]


def test_a_recursive_field_that_nobody_wants() -> None:
    schema = {
        "type": "record",
        "name": "node",
        "fields": [{"name": "id", "type": "int"}, {"name": "next", "type": ["null", "node"]}],
    }

    def chain(length: int) -> bytes:
        return b"\x02\x02" * (length - 1) + b"\x02\x00"

    assert read(schema, [chain(1), chain(20), chain(10**5), chain(2)[:-1]], {"id": True}) == (
        [{"id": 1}] * 4,
        [True, True, False, False],  # too deep, and cut
    )


def test_nothing_but_nan_is_nan() -> None:
    (found, *_), good = read("double", written("double", [math.nan, math.inf, -0.0]))
    assert math.isnan(found)
    assert good == [True] * 3


# Messages

ROW: dict[str, Any] = {
    "type": "record",
    "name": "Row",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "name", "type": ["null", "string"]},
        {
            "name": "meta",
            "type": ["null", {"type": "record", "name": "Meta", "fields": [{"name": "lsn", "type": "long"}]}],
        },
        {"name": "either", "type": ["null", "int", "string"]},
    ],
}
WIDER: dict[str, Any] = {**ROW, "fields": [*ROW["fields"], {"name": "extra", "type": ["null", "int"]}]}
KEYLESS = {"type": "record", "name": "Row", "fields": [{"name": "name", "type": "string"}]}
KEY = {"type": "record", "name": "Key", "fields": [{"name": "id", "type": "long"}]}
SCHEMAS = {
    1: json.dumps(ROW),
    2: json.dumps(WIDER),
    3: json.dumps(KEY),
    4: '"long"',
    5: json.dumps(KEYLESS),
    0x01020304: json.dumps(ROW),
}
COLUMNS = ["id", "name"]
LSN = (("meta.lsn", T.LongType()),)


def decoded(messages: list[Pair], table: ChangelogSpec) -> Outcome:
    return outcome(Avro(table, avro_messages.given(SCHEMAS)), messages)


def row(number: int, name: str | None = None, **more: Any) -> dict[str, Any]:
    return {"id": number, "name": name, "meta": None, "either": None} | more


def test_upserts_tombstones_and_a_schema_that_changes_in_between() -> None:
    messages: list[Pair] = [
        (message(3, KEY, {"id": 1}), message(1, ROW, row(1, "a"))),
        (None, message(2, WIDER, row(2, "b", extra=5))),
        (message(3, KEY, {"id": 1}), None),
        (message(4, "long", 2), None),
        (None, message(0x01020304, ROW, row(3, None))),
        (None, message(1, ROW, row(1, "c"))),
    ]
    found = decoded(messages, spec(COLUMNS))
    assert found.rows == [
        (0, "+U", {"id": 1, "name": "a"}),
        (1, "+U", {"id": 2, "name": "b"}),
        (2, "-D", {"id": 1}),
        (3, "-D", {"id": 2}),
        (4, "+U", {"id": 3, "name": None}),
        (5, "+U", {"id": 1, "name": "c"}),
    ]
    unknown = {name for each in found.raw if isinstance(each, Changes) for name in each.unknown}
    assert unknown == {"meta", "extra"}  # `either` can't be a column


def test_order_columns_are_paths_into_the_row() -> None:
    messages: list[Pair] = [
        (None, message(1, ROW, row(1, meta={"lsn": 77}))),
        (None, message(1, ROW, row(2))),
        (message(4, "long", 2), None),
    ]
    found = decoded(messages, spec(COLUMNS, order_by=LSN))
    assert [change.order for change in found.changes] == [(77,), (None,), (None,)]


def test_keys_that_the_values_leave_out() -> None:
    messages: list[Pair] = [
        (message(3, KEY, {"id": 1}), message(5, KEYLESS, {"name": "a"})),
        (message(4, "long", 2), message(5, KEYLESS, {"name": "b"})),
        (None, message(5, KEYLESS, {"name": "c"})),
        (b"7", message(5, KEYLESS, {"name": "d"})),
    ]
    found = decoded(messages, spec(COLUMNS))
    assert sorted((c.record, c.row["id"], c.row["name"]) for c in found.changes) == [
        (0, 1, "a"),
        (1, 2, "b"),
        (3, "7", "d"),  # a text is converted later, or doesn't fit the column
    ]
    assert found.rejected == {2: "null_key: the message has no key"}


def test_what_is_rejected() -> None:
    good = message(1, ROW, row(1))
    messages: list[Pair] = [
        (None, None),
        (message(4, "long", 1), message(4, "long", 1)),
        (None, good[:-1]),
        (None, good),
        (None, b"\0\0\0\0\x09" + good[5:]),
    ]
    found = decoded(messages, spec(COLUMNS))
    assert found.rejected == {
        0: "null_key: the message has no key",
        1: "unparseable: the value is Avro of type long, expected a record",
        2: "unparseable: the body doesn't fit its schema, id 1",
        4: "unparseable: schema id 9 is unknown",
    }
    assert [change.record for change in found.changes] == [3]
    two = decoded([(message(4, "long", 1), None)], spec(["id", "name"], key=("id", "name")))
    assert two.rejected == {0: "null_key: the message's key: it is one long, and the table's key is id, name"}


def test_a_union_of_several_types_is_rejected_if_it_is_a_column() -> None:
    found = decoded([(None, message(1, ROW, row(1, either="x")))], spec(["id", "either"]))
    assert found.rejected == {0: "type_mismatch: column either: its schema is a union of null, int, string"}
    assert decoded([(None, message(1, ROW, row(1, either="x")))], spec(["id"])).rows == [(0, "+U", {"id": 1})]


UTC = dt.UTC
ENTRIES = {
    "type": "array",
    "items": {
        "type": "record",
        "name": "MapEntry",
        "connect.internal.type": "MapEntry",
        "fields": [{"name": "key", "type": "int"}, {"name": "value", "type": ["null", "string"]}],
    },
}


@pytest.mark.parametrize(
    ("schema", "value", "target", "expected"),
    [
        (
            {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2},
            Decimal("-12.34"),
            pa.decimal128(9, 2),
            Decimal("-12.34"),
        ),
        (
            {"type": "fixed", "name": "f", "size": 16, "logicalType": "decimal", "precision": 38, "scale": 0},
            Decimal(10**38 - 1),
            pa.decimal128(38, 0),
            Decimal(10**38 - 1),
        ),
        ({"type": "int", "logicalType": "date"}, dt.date(1969, 12, 31), pa.date32(), dt.date(1969, 12, 31)),
        (
            {"type": "long", "logicalType": "timestamp-millis"},
            dt.datetime(2026, 1, 2, 3, 4, 5, 678000, UTC),
            pa.timestamp("us", "UTC"),
            dt.datetime(2026, 1, 2, 3, 4, 5, 678000, UTC),
        ),
        (
            {"type": "long", "logicalType": "timestamp-micros"},
            dt.datetime(2026, 1, 2, 3, 4, 5, 678901, UTC),
            pa.timestamp("us", "UTC"),
            dt.datetime(2026, 1, 2, 3, 4, 5, 678901, UTC),
        ),
        (
            {"type": "long", "logicalType": "local-timestamp-micros"},
            dt.datetime(1066, 10, 14, 9, 0, 0, 1),
            pa.timestamp("us"),
            dt.datetime(1066, 10, 14, 9, 0, 0, 1),
        ),
        ({"type": "string", "logicalType": "uuid"}, UUID(int=7), "uuid", UUID(int=7).bytes),
        (
            {"type": "fixed", "name": "f", "size": 16, "logicalType": "uuid"},
            UUID(int=7).bytes,
            "uuid",
            UUID(int=7).bytes,
        ),
        ({"type": "enum", "name": "e", "symbols": ["A", "B"]}, "B", pa.string(), "B"),
        ({"type": "fixed", "name": "f", "size": 2}, b"ab", pa.binary(), b"ab"),
        (
            {"type": "map", "values": ["null", "int"]},
            {"a": 1, "b": None},
            pa.map_(pa.string(), pa.int32()),
            [("a", 1), ("b", None)],
        ),
        (
            ENTRIES,
            [{"key": 1, "value": "x"}, {"key": 2, "value": None}],
            pa.map_(pa.int32(), pa.string()),
            [(1, "x"), (2, None)],
        ),
    ],
)
def test_values_become_the_columns_types(schema: Any, value: Any, target: Any, expected: Any) -> None:
    record = {"type": "record", "name": "r", "fields": [{"name": "id", "type": "int"}, {"name": "v", "type": schema}]}
    known = avro_messages.given({1: json.dumps(record)})
    found = outcome(Avro(spec(["id", "v"]), known), [(None, message(1, record, {"id": 1, "v": value}))])
    (changes,) = found.raw
    assert isinstance(changes, Changes)
    is_uuid = isinstance(target, str)
    array, misfits = convert(changes.fields["v"], pa.binary() if is_uuid else target, is_uuid)
    assert misfits is None or not any(misfits.to_pylist())
    assert array.to_pylist() == [expected]


def test_a_registry_that_cannot_be_asked_stops_the_job() -> None:
    table = spec(COLUMNS, options={"schema.registry.url": "http://127.0.0.1:9", "schema.registry.max.retries": "0"})
    with pytest.raises(RegistryError, match=r"schema registry http://127\.0\.0\.1:9 can't be asked for schema id 1: "):
        outcome(Avro(table), [(None, message(1, ROW, row(1)))])


@SLOW
@given(
    st.sampled_from([(Avro, "false"), (DebeziumAvro, "false"), (DebeziumAvro, "true")]),
    st.lists(
        st.tuples(
            st.none() | st.binary(max_size=12) | st.sampled_from([message(3, KEY, {"id": 5}), message(4, "long", 6)]),
            st.none()
            | st.binary(max_size=30)
            | st.builds(
                lambda schema_id, body: b"\0\0\0\0" + bytes([schema_id]) + body,
                st.integers(0, 6) | st.sampled_from([9, 11, 28]),
                st.binary(max_size=60),
            )
            | st.builds(lambda number, text: message(1, ROW, row(number, text)), st.integers(0, 9), st.none() | _TEXT),
        ),
        max_size=12,
    ),
)
def test_no_record_is_lost(chosen: tuple[Any, str], messages: list[Pair]) -> None:
    """Each record, whatever its content, is either a change or rejected, and never both. Only tombstones and logical
    decoding messages are neither.
    """
    known = avro_messages.given(avro_messages.sample_schemas() | SCHEMAS)
    decoder, flattened = chosen
    table = spec(["id", "name", "customer"], options={"flattened": flattened})
    found = outcome(decoder(table, known), messages)
    changed = {change.record for change in found.changes}
    assert not changed & set(found.rejected)
    missing = set(range(len(messages))) - changed - set(found.rejected)
    if decoder is Avro or flattened == "true":
        assert not missing
    for record in missing:
        value = messages[record][1]
        assert value is None or value[4] == 28  # a tombstone, or a logical decoding message


def test_formats_are_found_by_name() -> None:
    assert formats.find("avro") is Avro
    assert formats.find("debezium-avro") is DebeziumAvro
    assert "schema.registry.basic.auth.user.info" in Avro.OPTIONS
