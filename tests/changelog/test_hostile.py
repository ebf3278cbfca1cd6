"""Messages and schemas that are made to do harm end as values or bad records, in bounded time and memory."""

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import fastavro
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import types as T

from changelog.decoding import ChangelogDecoder
from changelog.formats.row_kind_parquet import FileReader
from changelog.parse.avro_body import arrow_type, read_bodies
from changelog.parse.avro_schema import SchemaError, UnsupportedSchemaError, parse
from tests.changelog.messages import decode, messages, raw_records, spec

ROOT = Path(__file__).parents[2]
TYPES = ("bigint", "decimal(12,2)", "decimal(38,0)", "double", "float", "string", "timestamp", "date", "boolean")
TYPES_IN_TYPES = ("array<decimal(12,2)>", "map<string,decimal(12,2)>", "struct<a:decimal(12,2)>")
NUMBERS = (
    "1e999999999", "-1E400000000", "1e-400000000", "0.5E-0400000000", "1e-77", "1.5e-40", "1E+2147483648",
    "1e99999999999999999999", "9" * 100_000, "0." + "1" * 300_000, "NaN", "-Infinity",
)  # fmt: skip
GOOD = '{"row_kind":"+I","id":2,"v":1}'


def decoded(dtype: str) -> int:
    """Decode each number as a column of this type, spelled in several ways. Returns how many were no value."""
    bad = 0
    for number in NUMBERS:
        escaped = "".join(f"\\u{ord(c):04x}" for c in number[:20]) + number[20:]
        for value in (number, f'"{number}"', f'"{escaped}"', f"[{number}]", f'{{"a":{number}}}'):
            record = f'{{"row_kind":"+I","id":1,"v":{value}}}'
            # alone, and between good ones
            for records in ([record], [GOOD] * 20 + [record] + [GOOD] * 20):
                found = decode("row-kind", raw_records(messages(*records)), spec({"id": "bigint", "v": dtype}))
                assert len(found) == len(records)
                bad += sum(d.error is not None for d in found if d.row["id"] != 2)
                assert not any("decoder_failed" in (d.error or "") for d in found)
    return bad


def test_huge_and_tiny_numbers() -> None:
    """In a process of its own: Arrow's reader used to end it at `1e-400000000` in a decimal."""
    code = "from tests.changelog.test_hostile import *; print(*(decoded(t) for t in [*TYPES, *TYPES_IN_TYPES]))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    bad = dict(zip([*TYPES, *TYPES_IN_TYPES], map(int, done.stdout.split()), strict=True))
    assert [dtype for dtype, count in bad.items() if count < 20] == ["string"]


def test_a_large_integer_is_not_infinite() -> None:
    numbers = ("1" * 310, "-1" + "0" * 400, "1e309", "1" * 20, '"Infinity"')
    records = messages(*(f'{{"row_kind":"+I","id":1,"v":{number}}}' for number in numbers))
    found = decode("row-kind", raw_records(records), spec({"id": "bigint", "v": "double"}))
    assert [d.row["v"] for d in found] == [None, None, None, float("1" * 20), float("inf")]
    assert [(d.error or "").partition(":")[0] for d in found] == ["type_mismatch"] * 3 + [""] * 2


def test_a_small_number_is_no_zero() -> None:
    records = messages(*(f'{{"row_kind":"+I","id":1,"v":{number}}}' for number in ("1e-3", "1e-40", "1e-400", "0e-99")))
    found = decode("row-kind", raw_records(records), spec({"id": "bigint", "v": "decimal(12,2)"}))
    assert [d.error is None for d in found] == [False, False, False, True]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ('"v":"a","v":"b"', "b"),  # as most parsers have it
        ('"v":"b","\\u0076":"b"', "b"),
        ('"v":"\\ud800"', None),
        ('"v":"b","\\udc00":1', None),
        ('"v":"b","w":"\\ud800"', None),
        ('"v":"\\u0000\\u001b[2J\\u202e"', "\0\x1b[2J\u202e"),
        (f'"v":"b","{"n" * 100_000}":1', "b"),
        ('"v":"b",' + ",".join(f'"f{n}":{n}' for n in range(20_000)), "b"),
        (f'"v":"{"x" * 2_000_000}"', "x" * 2_000_000),
        ('"v":"b"}{"row_kind":"+I","id":3,"v":"b"', None),
        ('"v":"b"}\n{"row_kind":"-D","id":2', None),
    ],
    ids=lambda value: str(value)[:30],
)
@pytest.mark.parametrize("around", [0, 20])
def test_odd_objects(fields: str, expected: str | None, around: int) -> None:
    odd = f'{{"row_kind":"+I","id":1,{fields}}}'
    records = raw_records(messages(*[GOOD] * around, odd, *[GOOD] * around))
    found = decode("row-kind", records, spec({"id": "bigint", "v": "string"}, schema_changes="evolve"))
    assert len(found) == 2 * around + 1
    (one,) = [d for d in found if d.bad or d.row["id"] != 2]
    assert (None if one.bad else one.row["v"]) == expected


def test_bytes_that_are_no_text() -> None:
    for damage in (b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe2\x82"):
        records = raw_records(messages(GOOD, GOOD, GOOD))
        value = b'{"row_kind":"+I","id":2,"v":"' + damage + b'"}'
        records = records.set_column(
            records.schema.get_field_index("value"),
            records.schema.field("value"),
            pa.array([GOOD.encode(), value, GOOD.encode()], records.schema.field("value").type),
        )
        found = decode("row-kind", records, spec({"id": "bigint", "v": "string"}))
        assert sorted(d.error is None for d in found) == [False, True, True]


@pytest.mark.parametrize("depth", [50, 100, 200, 300, 450, 480, 600, 700, 900])
@pytest.mark.parametrize("spelling", ["plain", "spaces", "key", "payload", "null"])
@pytest.mark.parametrize("options", [{}, {"flattened": "true"}], ids=str)
def test_schemas_and_payloads_that_are_nested_deeply(depth: int, spelling: str, options: dict[str, str]) -> None:
    deep = '{"type":"struct","fields":[' + '{"type":"struct","field":"a","fields":[' * depth + "]}" * depth + "]}"
    nested = '{"after":' + '{"a":' * depth + "1" + "}" * (depth + 1)
    plain = '{"type":"struct","fields":[]}'
    envelope = '{{"schema":{},"payload":{}}}'
    value = {
        "plain": envelope.format(deep, '{"op":"c","after":{"id":1}}'),
        "spaces": envelope.format(deep, '{"op":"c","after":{"id":1}}').replace(',"payload":', ', "payload": '),
        "key": '{"op":"c","after":{"id":1}}',
        "payload": envelope.format(plain, nested).replace(',"payload":', ', "payload": '),
        "null": envelope.format("null", nested).replace(',"payload":', ', "payload": '),
    }[spelling]
    records = raw_records(messages(value, '{"op":"c","after":{"id":2}}'))
    if spelling == "key":
        keys = pa.array([envelope.format(deep, '{"id":1}').encode(), b'{"id":2}'], records.schema.field("key").type)
        records = records.set_column(records.schema.get_field_index("key"), records.schema.field("key"), keys)
    found = decode("debezium-json", records, spec({"id": "bigint"}, options=options, schema_changes="evolve"))
    assert not [one.error for one in found if "decoder_failed" in (one.error or "")]
    if spelling in ("plain", "spaces") and depth >= 100:
        assert "unparseable" in {(one.error or "").partition(":")[0] for one in found}


@pytest.mark.parametrize("depth", [300, 900, 2000])
@pytest.mark.parametrize("unavailable", [True, False])
def test_partial_updates_that_are_nested_deeply(depth: int, unavailable: bool) -> None:
    deep = '{"a":' * depth + "1" + "}" * depth
    record = '{"op_type":"U","before":{"id":1,"v":"a"},"after":{"id":1,"deep":' + deep + ',"v":null}}'
    found = decode(
        "ogg-json", raw_records(messages(record)), spec({"id": "bigint", "v": "string"}, keeps_unavailable=unavailable)
    )
    assert not [one.error for one in found if "decoder_failed" in (one.error or "")]
    if depth == 2000:
        assert [one.error for one in found] == ["unparseable: the value is nested too deeply"]


def zigzag(number: int) -> bytes:
    number = (number << 1 ^ number >> 63) & (2**64 - 1)
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    return bytes([*encoded, number])


def record(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": [{"name": n, "type": t} for n, t in fields.items()]}


def read(schema: Any, want: Any, *bodies: bytes) -> tuple[pa.Array, list[bool]]:
    array, good = read_bodies(parse(json.dumps(schema)), pa.array(bodies, pa.binary()), 0, want)
    return array, good.tolist()


@pytest.mark.parametrize("count", [-1, -(2**31), -(2**63), 2**31, 10**9, 2**63 - 1])
@pytest.mark.parametrize(
    "dtype",
    [
        "string",
        "bytes",
        {"type": "array", "items": "int"},
        {"type": "map", "values": "int"},
        {"type": "fixed", "name": "F", "size": 10**18},
    ],
    ids=str,
)
@pytest.mark.parametrize("rest", [b"", b"\x00" * 50, b"\x80" * 50])
def test_sizes_that_are_lies(dtype: Any, count: int, rest: bytes) -> None:
    array, good = read(
        record("T", id="long", x=dtype), {"id": True}, zigzag(7) + zigzag(count) + rest, zigzag(8) + b"\0"
    )
    is_fixed = isinstance(dtype, dict) and dtype["type"] == "fixed"
    assert good == [False, not is_fixed]
    assert array.field("id").to_pylist()[1] == 8


TREE = record("A", left=["null", "A"], right=["null", "A"])


@pytest.mark.parametrize("rest", [b"", b"\x02" * 3, b"\x02" * 100_000])
def test_a_recursive_schema(rest: bytes) -> None:
    """The body that is too short is followed by bytes that would make it go on."""
    _, good = read(record("T", id="long", x=TREE), {"id": True}, zigzag(1) + rest, b"\x02" * 20, zigzag(3) + b"\0\0")
    assert good == [False, False, True]


def test_a_list_of_lists_of_itself() -> None:
    tree = record("A", inner={"type": "array", "items": "A"}, n="int")
    _, good = read(
        record("T", id="long", x=tree), {"id": True}, b"\x02\x00\x02", b"\x02\x02\x00\x04\x00\x02", b"\x02\x02"
    )
    assert good == [True, True, False]


def doubled(depth: int, leaf: Any) -> Any:
    """A type that has another one twice, which has another one twice, and so on."""
    schema = record(f"R{depth}", a=leaf)
    for n in range(depth - 1, -1, -1):
        schema = record(f"R{n}", a=schema, b=f"R{n + 1}")
    return schema


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (doubled(28, "null"), "unfolds to more than 100,000 types"),
        (doubled(28, ["null", "int"]), "unfolds to more than 100,000 types"),
        ({"type": "array", "items": doubled(28, "null")}, "unfolds to more than 100,000 types"),
        ({"type": "array", "items": doubled(4, "null")}, "take no bytes"),
        (record("A", x="A", y="A"), "contains itself"),
        (record("A", u=["null", record("B", a="A")], b="B"), "contains itself"),
        (record("T", **{f"f{n}": ["null", "string"] for n in range(40_000)}), "unfolds to more than 100,000 types"),
        ({"type": "fixed", "name": "F", "size": -1}, "negative"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_schemas_that_would_never_end(schema: Any, reason: str) -> None:
    with pytest.raises(SchemaError, match=reason):
        parse(json.dumps(schema))


@pytest.mark.parametrize(
    "text",
    [
        '{"type":"array","items":' * 100_000 + '"int"' + "}" * 100_000,
        '{"type":"fixed","name":"F","size":1' + "0" * 5000 + "}",
    ],
    ids=["deep", "a huge number"],
)
def test_texts_that_are_no_schemas(text: str) -> None:
    with pytest.raises(SchemaError):
        parse(text)


def test_a_schema_of_ten_megabytes() -> None:
    fields = [{"name": f"f{n}", "type": "int", "default": 0, "doc": "x" * 500} for n in range(20_000)]
    text = json.dumps({"type": "record", "name": "T", "fields": fields})
    assert len(text) > 10_000_000
    assert len(parse(text).fields) == 20_000


def test_an_array_of_many_items() -> None:
    count = 30_000
    body = zigzag(count) + b"\x06" * count + b"\0"
    array, good = read({"type": "array", "items": "int"}, True, body, b"\0", body)
    assert good == [True, True, True]
    assert np.array_equal(array.value_lengths().to_numpy(), [count, 0, count])
    assert set(array.flatten().to_pylist()) == {3}


def calls(schema: Any, want: Any, *bodies: bytes) -> int:
    """How many functions are called to read bodies, all of which are good."""
    values, node, count = pa.array(bodies, pa.binary()), parse(json.dumps(schema)), 0

    def seen(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(seen)
    try:
        _, good = read_bodies(node, values, 0, want)
    finally:
        sys.setprofile(None)
    assert good.all()
    return count


MANY = 100_000
LISTS = {
    "numbers": ({"type": "array", "items": "int"}, zigzag(MANY) + b"\x06" * MANY + b"\0"),
    "one-item blocks": ({"type": "array", "items": "int"}, b"\x02\x06" * (MANY // 2) + b"\0"),
    "one-item blocks with sizes": ({"type": "array", "items": "int"}, b"\x01\x02\x06" * (MANY // 3) + b"\0"),
    "a block with a size": (
        {"type": "array", "items": "string"},
        zigzag(-MANY) + zigzag(MANY) + b"\0" * MANY + b"\0",
    ),
    "texts": ({"type": "array", "items": "string"}, zigzag(MANY) + b"\0" * MANY + b"\0"),
    "records": ({"type": "array", "items": record("R", a="int")}, zigzag(MANY) + b"\0" * MANY + b"\0"),
    "unions": ({"type": "array", "items": ["null", "int"]}, zigzag(MANY) + b"\0" * MANY + b"\0"),
    "lists": ({"type": "array", "items": {"type": "array", "items": "int"}}, zigzag(MANY) + b"\0" * MANY + b"\0"),
    "a map": ({"type": "map", "values": "int"}, zigzag(MANY // 2) + b"\0" * MANY + b"\0"),
}


@pytest.mark.parametrize("is_wanted", [False, True])
@pytest.mark.parametrize("name", LISTS)
def test_a_message_of_very_many_items_takes_few_steps(name: str, is_wanted: bool) -> None:
    """A megabyte of them is a kilobyte for the broker, if it is packed."""
    dtype, items = LISTS[name]
    steps = calls(record("T", x=dtype), is_wanted or {}, items)
    if name == "numbers" or (name == "a block with a size" and not is_wanted):
        assert steps < 1000
    else:
        # a step of NumPy is ten calls and more
        assert steps < 10 * MANY


@pytest.mark.parametrize("bodies", [1, 100])
def test_items_of_many_pieces_are_copied_twice_at_most(bodies: int, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = 0

    def concatenated(parts: Any, concatenate: Any = np.concatenate) -> Any:
        nonlocal copied
        found = concatenate(parts)
        copied += len(found)
        return found

    count = 12_000
    dtype = {"type": "array", "items": record("R", a="int")}
    body = zigzag(count) + b"\x06" * count + b"\0"
    monkeypatch.setattr(np, "concatenate", concatenated)
    array, good = read(dtype, True, *[body] * bodies)
    assert all(good)
    assert len(array.flatten()) == count * bodies
    assert copied < 2.1 * count * bodies
    copied = 0
    read(record("T", x=dtype), {}, *[body] * bodies)
    assert copied < 1000, "nothing is kept of what isn't wanted"


DAMAGED = (
    {"type": "array", "items": "int"},
    {"type": "array", "items": "long"},
    {"type": "array", "items": "boolean"},
    {"type": "array", "items": "double"},
    {"type": "array", "items": {"type": "fixed", "name": "F", "size": 3}},
    {"type": "array", "items": {"type": "enum", "name": "E", "symbols": ["a", "b"]}},
    {"type": "array", "items": "string"},
    {"type": "array", "items": ["null", "int", "string"]},
    {"type": "map", "values": ["null", "bytes"]},
    {"type": "array", "items": record("R", a="int", b={"type": "array", "items": "float"}, c="null")},
    {"type": "array", "items": {"type": "map", "values": {"type": "array", "items": "long"}}},
    record("A", inner={"type": "array", "items": "A"}, n="int"),
    TREE,
)


@pytest.mark.parametrize("dtype", DAMAGED, ids=str)
def test_a_body_is_good_or_bad_whatever_is_beside_it(dtype: Any) -> None:
    """Few bodies are read in another way than many, and so are long arrays."""
    random = np.random.default_rng(5)
    bodies = []
    for number in range(400):
        size = int(random.integers(1, 20))
        content = random.choice([0, 0, 1, 2, 2, 3, 4, 6, 8, 128, 255], size).astype(np.uint8).tobytes()
        if number % 4 == 0:  # a long block
            rest = bytes(random.choice([0, 2], 1200).tolist())
            content = zigzag(int(random.choice([70, 1100, -70]))) + content + rest
        bodies.append(zigzag(1) + content)
    schema = record("T", id="long", x=dtype)
    node = parse(json.dumps(schema))
    try:
        arrow_type(node, True)
        wants: list[Any] = [{"id": True}, True]
    except UnsupportedSchemaError:
        wants = [{"id": True}]
    for want in wants:
        together, good = read(schema, want, *bodies)
        alone = [read(schema, want, body) for body in bodies]
        assert [one for _, (one,) in alone] == good
        found = [(array.to_pylist(), value) for (array, (one,)), value in zip(alone, together, strict=True) if one]
        assert all(repr(values) == repr([value.as_py()]) for values, value in found)


@pytest.mark.parametrize("item", ["int", "double", "string", {"type": "map", "values": "int"}], ids=str)
@pytest.mark.parametrize("is_nested", [False, True])
def test_long_and_short_arrays_in_one_batch(item: Any, is_nested: bool) -> None:
    """What is behind an array is read at the array's own end, wherever long ones and the few last ones are."""
    random = np.random.default_rng(7)
    one: Any = {"int": 5, "double": 0.5, "string": "s"}[item] if isinstance(item, str) else {"k": 1}
    fields = {"xs": {"type": "array", "items": item}, "behind": "string"}
    of_x: Any = {"type": "array", "items": record("I", **fields)} if is_nested else record("I", **fields)
    schema = record("T", id="long", x=of_x, last="string")
    parsed = fastavro.parse_schema(schema)
    for _ in range(8):
        sizes = random.choice([0, 0, 0, 1, 2, 40, 70, 1100, 2500], 45).tolist()
        made = [{"xs": [one] * size, "behind": f"n{number}"} for number, size in enumerate(sizes)]
        inner: list[Any] = [[made[n], made[n - 1]] for n in range(len(made))] if is_nested else made
        bodies = []
        for number, x in enumerate(inner):
            written = io.BytesIO()
            fastavro.schemaless_writer(written, parsed, {"id": number, "x": x, "last": f"l{number}"})
            bodies.append(written.getvalue())
        table, good = read(schema, {"id": True, "last": True}, *bodies)
        assert all(good)
        assert table.to_pylist() == [{"id": n, "last": f"l{n}"} for n in range(len(bodies))]
        table, good = read(schema, True, *bodies)
        assert all(good)
        whole = table.to_pylist()
        assert [row["last"] for row in whole] == [f"l{n}" for n in range(len(bodies))]
        found = [[each["behind"] for each in (row["x"] if is_nested else [row["x"]])] for row in whole]
        assert found == [[each["behind"] for each in (x if is_nested else [x])] for x in inner]


def test_a_small_file_of_very_many_rows() -> None:
    """50 million equal rows, of 6 GB, in 1.2 MB are read by and by."""
    rows, groups = 1_000_000, 50
    ones = pa.repeat(pa.scalar(1, pa.int64()), rows)
    table = pa.table({"row_kind": pa.repeat("+I", rows), "id": ones, "v": pa.repeat("x" * 100, rows), "seq": ones})
    table = table.set_column(0, "row_kind", table.column(0).dictionary_encode())
    table = table.set_column(2, "v", table.column(2).dictionary_encode())
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, table.schema, store_schema=False) as writer:
        for _ in range(groups):
            writer.write_table(table, row_group_size=rows)
    assert len(sink.getvalue()) < 2_000_000
    order = (("seq", T.LongType()),)
    table_spec = spec({"id": "bigint", "v": "string"}, order_by=order, source_order=False)
    reader, decoder = FileReader(table_spec, batch_rows=8192), ChangelogDecoder("row-kind", table_spec)
    before, most, seen = pa.total_allocated_bytes(), 0, 0
    for number, batch in enumerate(decoder(reader(sink.getvalue(), "1.parquet"))):
        seen += batch.num_rows
        most = max(most, pa.total_allocated_bytes() - before)
        if number == 300:
            break
    assert seen > 2 * rows
    assert most < 300_000_000


def test_a_long_text_that_is_no_number_is_soon_known_as_such() -> None:
    """If several parts of a pattern can match the same digits, this takes hours."""
    for text in ("9" * 999_999 + "x", "9" * 500_000 + "e9999999999"):
        found = decode(
            "row-kind",
            raw_records(messages(f'{{"row_kind":"+I","id":1,"v":"{text}"}}')),
            spec({"id": "bigint", "v": "int"}, schema_changes="evolve"),
        )
        assert [(d.error or "").split(":")[0] for d in found] == ["type_mismatch"]


def test_a_message_of_many_rows_is_held_once() -> None:
    code = """
import json, pyarrow as pa
from changelog.decoding import ChangelogDecoder
from tests.changelog.messages import messages, raw_records, spec
rows = [{"id": str(n), "v": None} for n in range(4000)]
text = json.dumps({"type": "INSERT", "isDdl": False, "data": rows, "old": None, "pkNames": ["id"]})
table = spec({"id": "bigint", "v": "string", "gone": "string"}, schema_changes="fail")
observed = []
decoder = ChangelogDecoder("canal-json", table, observe=observed.append)
print(sum(batch.num_rows for batch in decoder([raw_records(messages(text))])), *map(sorted, observed))
print(pa.default_memory_pool().max_memory())
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    decoded, most = done.stdout.splitlines()
    assert decoded == "4000 ['gone']"
    assert int(most) < 100_000_000
