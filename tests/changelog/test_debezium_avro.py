"""Debezium's Avro events, real ones first. Values stand here as `dml.sql` gave them to the database."""

import hashlib
import json
from typing import Any
from uuid import UUID

import pytest
from pyspark.sql import types as T

from changelog.changes import Changes
from changelog.formats.debezium_avro import DebeziumAvro
from changelog.spec import ChangelogSpec
from tests.changelog.avro_messages import Outcome, Pair, given, message, outcome, sample, sample_schemas, spec

ORDERS = ["id", "customer", "amount", "status", "created_at", "updated_at"]


def decoded(messages: list[Pair], table: ChangelogSpec, schemas: dict[int, str] | None = None) -> Outcome:
    return outcome(DebeziumAvro(table, given(schemas or sample_schemas())), messages)


def order(number: int, customer: str, cents: int, status: str | None, created: str, updated: int | None = None) -> Any:
    size = (8 + cents.bit_length() if cents >= 0 else 8 + (cents + 1).bit_length()) // 8
    amount = cents.to_bytes(size, "big", signed=True)
    row = {"id": number, "customer": customer, "amount": amount, "status": status}
    return row | {"created_at": created, "updated_at": updated}


ANN = order(1, "ann", 1050, "new", "2026-01-02T03:04:05.123456Z", 1767323045123456)
BOB = order(2, "bob", 9999999999, "new", "2026-01-02T03:04:06.000000Z")
# NULL in a column with a default arrives as the default
ZOE = order(3, "zoë 😀", -1, None, "1970-01-01T00:00:00.000000Z")
CAT = order(4, "cat", 500, "new", "2026-11-21T07:13:28.320791Z")
TX1 = order(5, "tx1", 100, None, "2026-11-21T07:13:28.324269Z")
TX2 = order(6, "tx2", 200, None, "2026-11-21T07:13:28.324269Z")
DDL = order(7, "after-ddl", 300, None, "2026-11-21T07:13:28.330231Z")
DAN = order(8, "dan", 725, "new", "2026-11-21T07:19:45.336415Z")
DAN_CHANGED = DAN | {"amount": (825).to_bytes(2, "big")}


def test_orders_whose_schema_changes_twice() -> None:
    """REPLICA IDENTITY FULL, a key change as d + tombstone + c, and columns added and dropped between the messages of a
    batch.
    """
    found = decoded(sample("orders"), spec(ORDERS))
    assert [change[:2] for change in found.rows] == [
        *((number, "+I") for number in range(4)),
        (4, "+U"),
        (5, "-D"),
        (7, "+I"),
        (8, "-D"),
        (10, "+I"),
        (11, "+I"),
        (12, "+U"),
        (13, "+I"),
        (14, "+U"),
        (15, "+I"),
        (16, "+U"),
        (17, "-D"),
        (19, "+I"),
        (20, "-D"),
    ]
    rows = {number: row for number, _, row in found.rows}
    assert rows[0] == ANN
    assert rows[1] == BOB
    assert rows[2] == ZOE
    assert rows[3] == CAT
    assert rows[4] == ANN | {"amount": (1100).to_bytes(2, "big"), "status": "paid"}
    assert rows[5] == {"id": 2}
    assert rows[7] == BOB | {"id": 100}
    assert rows[8] == {"id": 3}
    assert [rows[10], rows[11], rows[12]] == [TX1, TX2, TX1]
    assert [rows[13], rows[14]] == [DDL, DDL | {"status": "ddl2"}]
    assert [rows[15], rows[16], rows[17]] == [DAN, DAN_CHANGED, {"id": 8}]
    assert [rows[19], rows[20]] == [DAN_CHANGED | {"id": 200}, {"id": 200}]


def test_fields_that_are_no_columns_are_told_of() -> None:
    found = decoded(sample("orders"), spec(ORDERS))
    unknown = [change.unknown for change in found.raw if isinstance(change, Changes) and change.unknown]
    types = {name: wire_type for each in unknown for name, wire_type in each.items()}
    assert set(types) == {"qty", "discount"}
    assert types["qty"].kind == "int32"
    assert types["discount"].name == "org.apache.kafka.connect.data.Decimal"
    assert types["discount"].parameters["scale"] == "3"


def test_changelog_mode_gives_the_images_before() -> None:
    found = decoded(sample("orders")[:13], spec(ORDERS, trust_before=True, partition_sources=("customer",)))
    assert found.rows[4:8] == [
        (4, "-U", {"id": 1, "customer": "ann"}),
        (4, "+U", ANN | {"amount": (1100).to_bytes(2, "big"), "status": "paid"}),
        (5, "-D", {"id": 2, "customer": "bob"}),
        (7, "+I", BOB | {"id": 100}),
    ]
    snapshot = [c.snapshot.to_pylist() for c in found.raw if isinstance(c, Changes) and c.snapshot is not None]
    assert sum(map(sum, snapshot)) == 3


def test_order_and_metadata() -> None:
    by = (("source.lsn", T.LongType()), ("ts_ms", T.LongType()), ("amount", T.DecimalType(12, 2)))
    found = decoded(sample("orders")[:6], spec(ORDERS, order_by=by, metadata=("_op", "_ts")))
    assert found.changes[0].order == (27657456, 1795245173708, b"\x04\x1a")
    # of a -D, the row before
    assert found.changes[5].order[2] == BOB["amount"]
    metadata = [c.metadata for c in found.raw if isinstance(c, Changes)]
    assert sorted(op for m in metadata for op in m["_op"].to_pylist()) == ["c", "d", "r", "r", "r", "u"]
    times = [str(time) for m in metadata for time in m["_ts"].to_pylist()]
    assert "2026-11-21 07:12:53.540969+00:00" in times


def test_rows_before_with_the_key_only() -> None:
    """REPLICA IDENTITY DEFAULT: no `before` in updates, the key in deletes."""
    found = decoded(sample("orders_default"), spec(["id", "note"]))
    assert found.rows == [
        (0, "+I", {"id": 2, "note": "b"}),
        (1, "+U", {"id": 2, "note": "c"}),
        (2, "-D", {"id": 2}),
    ]


def test_keys_of_two_columns() -> None:
    found = decoded(sample("comp"), spec(["tenant", "id", "v"], key=("tenant", "id")))
    one, two = "11111111-1111-1111-1111-111111111111", "22222222-2222-2222-2222-222222222222"
    assert found.rows == [
        (0, "+I", {"tenant": 1, "id": one, "v": "a"}),
        (1, "+I", {"tenant": 1, "id": two, "v": "b"}),
        (2, "+U", {"tenant": 1, "id": one, "v": "z"}),
        (3, "-D", {"tenant": 1, "id": two}),
    ]


def test_every_postgres_type() -> None:
    columns = ["id", "i2", "i8", "f4", "n_un", "n_12_2", "n_38_0", "b", "c", "t", "by", "d", "tm", "tm6", "tmtz", "ts"]
    columns += ["ts3", "tstz", "iv", "u", "jb", "ia", "ta", "na", "tsa", "m", "hs", "mny", "bits", "pt", "rng"]
    found = decoded(sample("alltypes"), spec(columns))
    (_, kind, row), *_ = found.rows
    assert kind == "+I"
    assert row == {
        "id": 1,
        "i2": 1,
        "i8": 9007199254740993,
        "f4": 1.5,
        "n_un": {"scale": 18, "value": (12345678901234567890123).to_bytes(10, "big")},
        "n_12_2": b"\x6e",
        "n_38_0": (10**38 - 1).to_bytes(16, "big"),
        "b": True,
        "c": "ab   ",
        "t": "t'\"\\n",
        "by": b"\xde\xad\xbe\xef",
        "d": 20778,
        "tm": 86399123,
        "tm6": 86399123456,
        "tmtz": "08:11:12Z",
        "ts": 1795222923123456,
        "ts3": 1795222923123,
        "tstz": "2026-11-20T20:02:03.123456Z",
        "iv": 37091106700000,
        "u": "11111111-2222-3333-4444-555555555555",
        "jb": '{"a": 1, "b": [1, 2]}',
        "ia": [1, None, 3],
        "ta": ["a", None, "b,c"],
        "na": [b"\x6e", b"\x00\xdc"],
        "tsa": ["2026-01-01T00:00:00.000000Z"],
        "m": "ok",
        "hs": '{"a":"1","b":null}',
        "mny": (1234).to_bytes(2, "big"),
        "bits": b"\x0a",
        "pt": {"x": 1.5, "y": 2.0, "wkb": bytes.fromhex("0101000000000000000000f83f0000000000000040"), "srid": None},
        "rng": "[1,10)",
    }
    (first, *_) = (change for change in found.raw if isinstance(change, Changes))
    assert first.fields["n_un"].type.name == "io.debezium.data.VariableScaleDecimal"
    assert first.fields["ts"].type.name == "io.debezium.time.MicroTimestamp"
    assert first.fields["i2"].type.kind == "int16"


def test_what_changes_no_row() -> None:
    assert decoded(sample("message"), spec(["id"])).rows == []
    rejected = decoded(sample("transaction"), spec(["id"])).rejected
    assert rejected == dict.fromkeys(range(2), "unknown_operation: the event has no op")
    truncate = decoded(sample("nokey")[-1:], spec(["a", "b"], key=("a",))).rejected
    assert truncate == {0: "unsupported_event: the source emptied its table"}


ROW = {
    "type": "record",
    "name": "Value",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "v", "type": ["null", "string"]},
        {"name": "b", "type": ["null", "bytes"]},
        {"name": "l", "type": ["null", {"type": "array", "items": ["null", "string"]}]},
        {"name": "m", "type": ["null", {"type": "map", "values": ["null", "string"]}]},
    ],
}
ENVELOPE: dict[str, Any] = {
    "type": "record",
    "name": "Envelope",
    "fields": [
        {"name": "before", "type": ["null", ROW]},
        {"name": "after", "type": ["null", "Value"]},
        {"name": "op", "type": "string"},
    ],
}
KEY = {"type": "record", "name": "Key", "fields": [{"name": "id", "type": "long"}]}
SCHEMAS = {1: json.dumps(ENVELOPE), 2: json.dumps(KEY), 3: '"long"', 4: '"string"'}
COLUMNS = ["id", "v", "b", "l", "m"]


def row(number: int, **more: Any) -> dict[str, Any]:
    return {"id": number, "v": None, "b": None, "l": None, "m": None} | more


def event(op: str, after: Any = None, before: Any = None) -> bytes:
    return message(1, ENVELOPE, {"before": before, "after": after, "op": op})


def test_a_delete_without_a_row_is_applied_by_the_messages_key() -> None:
    found = decoded(
        [
            (message(2, KEY, {"id": 7}), event("d")),
            (message(3, "long", 8), event("d")),
            (None, event("d")),
            (b"\0\0\0\0\x63\0", event("d")),
            (message(2, KEY, {"id": 9}), event("d", before=row(10))),
        ],
        spec(COLUMNS),
        SCHEMAS,
    )
    assert [(c.record, c.kind, c.row) for c in found.changes] == [
        (0, "-D", {"id": 7}),
        (1, "-D", {"id": 8}),
        (4, "-D", {"id": 10}),
    ]
    assert found.rejected == dict.fromkeys((2, 3), "missing_column: op 'd' has no before")


def test_a_tombstone_whose_delete_was_compacted_away() -> None:
    keys = [message(2, KEY, {"id": number}) for number in range(3)]
    lone: list[Pair] = [
        (keys[0], event("d", before=row(0))),
        (keys[0], None),
        (keys[1], None),
        (None, None),
        (b"\xff", None),
    ]
    found = decoded([*lone, (keys[2], event("c", row(2))), (keys[0], None)], spec(COLUMNS), SCHEMAS)
    removed = [(c.record, c.row["id"]) for c in found.changes if c.kind == "-D"]
    assert sorted(removed) == [(0, 0), (2, 1), (6, 0)]
    reason = "a tombstone deletes the row of its key, and can't here: the message's key: it is neither JSON nor text"
    assert found.rejected == {4: f"null_key: {reason}"}


def test_an_update_that_changes_the_key_removes_the_old_row() -> None:
    updates: list[Pair] = [(None, event("u", row(2, v="x"), row(1, v="x"))), (None, event("u", row(3), row(3)))]
    found = decoded(updates, spec(COLUMNS), SCHEMAS)
    assert [(n, kind, changed["id"]) for n, kind, changed in found.rows] == [(0, "-U", 1), (0, "+U", 2), (1, "+U", 3)]


@pytest.mark.parametrize(
    "unavailable",
    [
        {"v": "__debezium_unavailable_value"},
        {"b": b"__debezium_unavailable_value"},
        {"l": ["__debezium_unavailable_value"]},
        {"m": {"__debezium_unavailable_value": "__debezium_unavailable_value"}},
    ],
)
def test_placeholders_are_refused(unavailable: dict[str, Any]) -> None:
    found = decoded([(None, event("u", row(1, **unavailable))), (None, event("c", row(2)))], spec(COLUMNS), SCHEMAS)
    (name,) = unavailable
    assert found.rejected == {0: f"unavailable_value: column {name}: the source didn't send the unchanged value"}
    assert [change.record for change in found.changes] == [1]
    # nobody misses a column that a -D doesn't have
    assert decoded([(None, event("d", before=row(1, **unavailable)))], spec(COLUMNS), SCHEMAS).rows == [
        (0, "-D", {"id": 1})
    ]


def test_placeholders_of_every_type_and_of_ones_own() -> None:
    wkb = {"type": "record", "name": "Geometry", "fields": [{"name": "wkb", "type": "bytes"}]}
    arrays = {name: {"type": "array", "items": name} for name in ("int", "long", "bytes", "string")}
    fields = [{"name": name, "type": ["null", v], "default": None} for name, v in (arrays | {"wkb": wkb}).items()]
    row = {"type": "record", "name": "Value", "fields": [{"name": "id", "type": "long"}, *fields]}
    sides = [{"name": "before", "type": ["null", row]}, {"name": "after", "type": ["null", "Value"]}]
    schema = {"type": "record", "name": "Envelope", "fields": [*sides, {"name": "op", "type": "string"}]}
    name = b"not sent"
    point = bytes.fromhex("0101000020E6100000000000FC83D797C1000000FC83D797C1")
    cases: list[dict[str, Any]] = [
        {"int": list(name)},
        {"long": list(name)},
        {"bytes": [name]},
        {"string": ["not sent"]},
        {"string": [str(UUID(bytes=hashlib.md5(name).digest(), version=3))]},
        {"wkb": {"wkb": point}},
    ]
    others: list[dict[str, Any]] = [
        {"int": list(b"__debezium_unavailable_value"), "long": list(name)[1:], "wkb": {"wkb": point[1:]}},
        {"bytes": [name, name], "string": ["__debezium_unavailable_value"]},
    ]
    values = [message(1, schema, {"after": {"id": 1, **case}, "op": "u"}) for case in cases + others]
    table = spec(["id", *arrays, "wkb"], options={"unavailable.value.placeholder": "not sent"})
    found = decoded([(None, value) for value in values], table, {1: json.dumps(schema)})
    reason = "unavailable_value: column {}: the source didn't send the unchanged value"
    assert found.rejected == {number: reason.format(*case) for number, case in enumerate(cases)}
    assert [change.record for change in found.changes] == [len(cases), len(cases) + 1]


def test_bad_events_say_why() -> None:
    cases = [
        (event("x", row(1)), "unknown_operation: op is 'x'; expected one of r, c, u, d, t, m"),
        (event("c"), "missing_column: op 'c' has no after"),
        (event("u", before=row(1)), "missing_column: op 'u' has no after"),
        (event("c", row(1))[:-1], "unparseable: the body doesn't fit its schema, id 1"),
        (event("c", row(1)) + b"\0", "unparseable: the body doesn't fit its schema, id 1"),
        (b"\0\0\0\0\x63\2", "unparseable: schema id 99 is unknown"),
        (b"\1\0\0\0\1\2", "unparseable: not in Confluent's wire format: a zero byte, a schema id, Avro"),
        (b"{}", "unparseable: not in Confluent's wire format: a zero byte, a schema id, Avro"),
        (b"", "unparseable: not in Confluent's wire format: a zero byte, a schema id, Avro"),
        (message(4, "string", "x"), "unknown_operation: the event has no op"),
    ]
    good = (None, event("c", row(1)))
    found = decoded([pair for value, _ in cases for pair in ((None, value), good)], spec(COLUMNS), SCHEMAS)
    assert found.rejected == {2 * i: reason for i, (_, reason) in enumerate(cases)}
    assert [change.record for change in found.changes] == [2 * i + 1 for i in range(len(cases))]


def test_events_of_a_table_that_nobody_described() -> None:
    """No columns, no key: what there is to know is which fields the rows have."""
    alone: list[Pair] = [(None, event("c", row(1)))]
    for messages in (sample("orders")[:1], alone):
        found = decoded(messages, spec([], key=()), sample_schemas() | {1: SCHEMAS[1]})
        (changes,) = found.raw
        assert isinstance(changes, Changes)
        assert {"id"} < set(changes.unknown)
        assert found.rows == [(0, "+I", {})]


def test_a_field_that_cannot_be_a_column_is_no_harm_until_it_is_one() -> None:
    fields = [{"name": "id", "type": "long"}, {"name": "either", "type": ["null", "int", "string"]}]
    either = {"type": "record", "name": "Value", "fields": fields}
    sides = [{"name": "before", "type": ["null", either]}, {"name": "after", "type": ["null", "Value"]}]
    schema = {"type": "record", "name": "Envelope", "fields": [*sides, {"name": "op", "type": "string"}]}
    value = message(1, schema, {"before": None, "after": {"id": 1, "either": "x"}, "op": "c"})
    assert decoded([(None, value)], spec(["id"]), {1: json.dumps(schema)}).rows == [(0, "+I", {"id": 1})]
    found = decoded([(None, value)], spec(["id", "either"]), {1: json.dumps(schema)})
    assert found.rejected == {0: "type_mismatch: column either: its schema is a union of null, int, string"}


FLAT: dict[str, Any] = {
    "type": "record",
    "name": "Value",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "v", "type": ["null", "string"]},
        {"name": "n", "type": ["null", "int"]},
        {"name": "__op", "type": ["null", "string"]},
        {"name": "__deleted", "type": ["null", "string"]},
        {"name": "__source_ts_ms", "type": ["null", "long"]},
    ],
}


def flat(number: int, **more: Any) -> bytes:
    row = {"id": number, "v": None, "n": None, "__op": None, "__deleted": "false", "__source_ts_ms": 1767323045123}
    return message(5, FLAT, row | more)


@pytest.mark.parametrize("prefix", ["", "__"])
def test_new_fields_of_rows_whose_added_fields_have_no_prefix(prefix: str) -> None:
    added = [{"name": f"{prefix}{name}", "type": "string"} for name in ("op", "deleted", "ts_ms", "lsn")]
    fields = [{"name": "id", "type": "long"}, {"name": "qty", "type": "long"}, *added]
    schema = {"type": "record", "name": "Value", "fields": fields}
    value = message(1, schema, {"id": 1, "qty": 5} | {field["name"]: "c" for field in added})
    options = {"flattened": "true", "add.fields.prefix": prefix}
    table = spec(["id"], options=options, order_by=((f"{prefix}lsn", T.StringType()),))
    (changes,) = decoded([(None, value)], table, {1: json.dumps(schema)}).raw
    assert isinstance(changes, Changes)
    assert list(changes.unknown) == ["qty"]


def test_flattened_tombstones_that_are_to_be_ignored() -> None:
    table = spec(["id", "v"], options={"flattened": "true", "tombstones": "ignore"})
    messages: list[Pair] = [(None, flat(1, v="a")), (message(2, KEY, {"id": 1}), None), (None, None)]
    found = decoded(messages, table, SCHEMAS | {5: json.dumps(FLAT)})
    assert [(c.record, c.kind) for c in found.changes] == [(0, "+U")]
    assert not found.rejected


def test_flattened_rows() -> None:
    options = {"flattened": "true"}
    messages: list[Pair] = [
        (None, flat(1, v="a", __op="c")),
        (None, flat(1, v="b")),
        (None, flat(1, __deleted="true")),
        (None, flat(2, __op="d")),
        (message(2, KEY, {"id": 3}), None),
        (None, None),
        (None, flat(4, v="__debezium_unavailable_value")),
        (None, flat(5, __op="x")),
    ]
    found = decoded(
        messages, spec(["id", "v"], options=options, metadata=("_op", "_ts")), SCHEMAS | {5: json.dumps(FLAT)}
    )
    assert [(c.record, c.kind, c.row) for c in found.changes] == [
        (0, "+I", {"id": 1, "v": "a"}),
        (1, "+U", {"id": 1, "v": "b"}),
        (2, "-D", {"id": 1}),
        (3, "-D", {"id": 2}),
        (4, "-D", {"id": 3}),
    ]
    assert found.rejected == {
        5: "null_key: a tombstone deletes the row of its key, and can't here: the message has no key",
        6: "unavailable_value: column v: the source didn't send the unchanged value",
        7: "unknown_operation: op is 'x'; expected one of r, c, u, d, t, m",
    }
    (first, *_) = (c for c in found.raw if isinstance(c, Changes) and c.metadata.get("_ts") is not None)
    assert str(first.metadata["_ts"][0]) == "2026-01-02 03:04:05.123000+00:00"
    assert set(first.unknown) == {"n"}
