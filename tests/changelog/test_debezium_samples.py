"""Real Debezium messages give the database's own values. The expected values here come from `dml.sql`."""

import datetime as dt
import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from tests.changelog.messages import Decoded, Message, decode, raw_records, sample, spec

ORDERS = {
    "id": "bigint",
    "customer": "string",
    "amount": "decimal(12,2)",
    "status": "string",
    "created_at": "timestamp",
    "updated_at": "timestamp_ntz",
}
ORDERS_WITH_QTY = ORDERS | {"qty": "int"}
ORDERS_WITH_DISCOUNT = ORDERS | {"discount": "decimal(6,3)"}

ALLTYPES = {
    "id": "int",
    "i2": "smallint",
    "i8": "bigint",
    "f4": "float",
    "f8": "double",
    "n_un": "decimal(38,18)",
    "n_12_2": "decimal(12,2)",
    "n_38_0": "decimal(38,0)",
    "b": "boolean",
    "c": "string",
    "vc": "string",
    "t": "string",
    "by": "binary",
    "d": "date",
    "tm": "int",
    "tm6": "bigint",
    "tmtz": "string",
    "ts": "timestamp_ntz",
    "tstz": "timestamp",
    "iv": "bigint",
    "u": "uuid",
    "js": "string",
    "jb": "string",
    "x": "string",
    "ia": "array<int>",
    "ta": "array<string>",
    "na": "array<string>",
    "tsa": "array<timestamp>",
    "m": "string",
    "hs": "string",
    "ip": "string",
    "mny": "decimal(19,2)",
    "bits": "binary",
    "pt": "struct<x:double,y:double,wkb:string,srid:int>",
    "rng": "string",
}


def utc(text: str) -> dt.datetime:
    return dt.datetime.fromisoformat(text).replace(tzinfo=dt.UTC)


def order(
    number: int,
    customer: str,
    amount: str,
    status: str | None,
    created: str | None,
    updated: str | None = None,
    **more: Any,
) -> dict[str, Any]:
    row = {"id": number, "customer": customer, "amount": Decimal(amount), "status": status}
    created_at = None if created is None else utc(created)
    updated_at = None if updated is None else dt.datetime.fromisoformat(updated)
    return row | {"created_at": created_at, "updated_at": updated_at} | more


def removal(columns: Mapping[str, str], **key: Any) -> dict[str, Any]:
    """A -U or -D row: the key, and null elsewhere."""
    return dict.fromkeys(columns) | key


def changes(decoded: list[Decoded]) -> list[tuple[int | None, str, dict[str, Any]]]:
    """Offset, kind and row, after making sure that no record is bad."""
    assert [d.error for d in decoded if d.bad] == []
    return [(d.offset, d.kind, d.row) for d in decoded]


ANN_NEW = order(1, "ann", "10.50", "new", "2026-01-02 03:04:05.123456", "2026-01-02 03:04:05.123456")
ANN_PAID = order(1, "ann", "11.00", "paid", "2026-01-02 03:04:05.123456", "2026-01-02 03:04:05.123456")
BOB = order(2, "bob", "99999999.99", "new", "2026-01-02 03:04:06")
# NULL in a column with a default arrives as the default, unless the connector is told otherwise
ZOE = order(3, "zoë 😀", "-0.01", None, "1970-01-01 00:00:00")
CAT = order(4, "cat", "5.00", "new", "2026-11-21 07:13:28.320791")
TX1 = order(5, "tx1", "1.00", None, "2026-11-21 07:13:28.324269")
TX2 = order(6, "tx2", "2.00", None, "2026-11-21 07:13:28.324269")
DDL = order(7, "after-ddl", "3.00", None, "2026-11-21 07:13:28.330231")
DAN = order(8, "dan", "7.25", "new", "2026-11-21 07:19:45.336415")
DAN_CHANGED = DAN | {"amount": Decimal("8.25")}
NULLTS = order(9, "nullts", "1.00", None, "1970-01-01 00:00:00")


def test_orders_without_envelope() -> None:
    """REPLICA IDENTITY FULL, a key change as d + tombstone + c with one LSN, and columns dropped and altered in
    between.
    """
    decoded = decode("debezium-json", raw_records(sample("pgj", "orders")), spec(ORDERS))
    gone = {number: removal(ORDERS, id=number) for number in (2, 3, 8, 200)}
    assert changes(decoded) == [
        (0, "+I", ANN_NEW),
        (1, "+I", BOB),
        (2, "+I", ZOE),
        (3, "+I", CAT),
        (4, "+U", ANN_PAID),
        (5, "-D", gone[2]),
        (7, "+I", BOB | {"id": 100}),
        (8, "-D", gone[3]),
        (10, "+I", TX1),
        (11, "+I", TX2),
        (12, "+U", TX1),
        (13, "+I", DDL),
        (14, "+U", DDL | {"status": "ddl2"}),
        (15, "+I", DAN),
        (16, "+U", DAN_CHANGED),
        (17, "-D", gone[8]),
        (19, "+I", DAN_CHANGED | {"id": 200}),
        (20, "-D", gone[200]),
        (22, "+I", NULLTS),
    ]


def test_orders_in_changelog_mode_give_before_images() -> None:
    table = spec(ORDERS_WITH_QTY, trust_before=True, partition_sources=("customer",))
    decoded = decode("debezium-json", raw_records(sample("pgj", "orders")[:13]), table)
    assert changes(decoded)[4:] == [
        (4, "-U", removal(ORDERS_WITH_QTY, id=1, customer="ann")),
        (4, "+U", ANN_PAID | {"qty": 1}),
        (5, "-D", removal(ORDERS_WITH_QTY, id=2, customer="bob")),
        (7, "+I", BOB | {"id": 100, "qty": 2}),
        (8, "-D", removal(ORDERS_WITH_QTY, id=3, customer="zoë 😀")),
        (10, "+I", TX1 | {"qty": None}),
        (11, "+I", TX2 | {"qty": None}),
        (12, "-U", removal(ORDERS_WITH_QTY, id=5, customer="tx1")),
        (12, "+U", TX1 | {"qty": 7}),
    ]
    assert [(d.kind, d.half) for d in decoded if d.offset == 4] == [("-U", 0), ("+U", 1)]


def test_orders_with_envelope() -> None:
    decoded = decode("debezium-json", raw_records(sample("pgenv", "orders")), spec(ORDERS_WITH_DISCOUNT))
    discount = {"discount": Decimal("0.125")}
    assert changes(decoded) == [
        (0, "+I", CAT | discount),
        (1, "+I", ANN_PAID | discount),
        (2, "+I", BOB | {"id": 100} | discount),
        (5, "+I", DDL | {"status": "ddl2", "discount": Decimal("1.500")}),
        (6, "+I", DAN | discount),
        (7, "+U", DAN_CHANGED | discount),
        (8, "-D", removal(ORDERS_WITH_DISCOUNT, id=8)),
        (10, "+I", DAN_CHANGED | {"id": 200} | discount),
        (11, "-D", removal(ORDERS_WITH_DISCOUNT, id=200)),
    ]


def test_orders_with_nulls_kept() -> None:
    decoded = decode("debezium-json", raw_records(sample("pgnull", "orders")), spec(ORDERS_WITH_DISCOUNT))
    rows = {d.offset: d.row for d in decoded}
    discount = {"discount": Decimal("0.125")}
    assert rows[1] == ANN_PAID | discount
    assert rows[4] == TX1 | discount
    assert rows[13] == NULLTS | discount | {"created_at": None}
    assert "".join(d.kind for d in decoded) == "+I" * 7 + "+U" + "-D" + "+I" + "-D" + "+I"


TRUE_VALUES: dict[str, Any] = {
    "id": 1,
    "i2": 1,
    "i8": 9007199254740993,
    "f4": 1.5,
    "n_un": Decimal("12345.678901234567890123"),
    "n_12_2": Decimal("1.10"),
    "n_38_0": Decimal("9" * 38),
    "b": True,
    "c": "ab   ",
    "vc": "vc",
    "t": "t'\"\\n",
    "by": b"\xde\xad\xbe\xef",
    "d": dt.date(2026, 11, 21),
    "tm": 86399123,
    "tm6": 86399123456,
    "tmtz": "08:11:12Z",
    "ts": dt.datetime(2026, 11, 21, 1, 2, 3, 123456),
    "tstz": dt.datetime(2026, 11, 20, 20, 2, 3, 123456, dt.UTC),
    "iv": 37091106700000,
    "u": bytes.fromhex("11111111222233334444555555555555"),
    "js": '{"a": 1,  "b":[1,2]}',
    "jb": '{"a": 1, "b": [1, 2]}',
    "x": "<a>1</a>",
    "ia": [1, None, 3],
    "ta": ["a", None, "b,c"],
    "na": ["bg==", "ANw="],
    "tsa": [dt.datetime(2026, 1, 1, tzinfo=dt.UTC)],
    "m": "ok",
    "hs": '{"a":"1","b":null}',
    "ip": "10.0.0.1/24",
    "mny": Decimal("12.34"),
    "bits": b"\x0a",
    "pt": {"x": 1.5, "y": 2.0, "wkb": "AQEAAAAAAAAAAAD4PwAAAAAAAABA", "srid": None},
    "rng": "[1,10)",
}


def true_row(row: dict[str, Any]) -> dict[str, Any]:
    """`row` without the NaN, which equals nothing. Also checks that it is NaN."""
    assert math.isnan(row["f8"])
    return {name: value for name, value in row.items() if name != "f8"}


@pytest.mark.parametrize(("server", "i8"), [("pgj", [-1, 0, 1]), ("pgenv", [0, 1]), ("pgnull", [0, 1])])
def test_every_postgres_type(server: str, i8: list[int]) -> None:
    """Row 1 in the snapshot and after each update, which adds one to i8: a number that no double can hold."""
    records = [m for m in sample(server, "alltypes") if m.value is not None and _after_id(m) == 1]
    decoded = decode("debezium-json", raw_records(records), spec(ALLTYPES))
    assert [d.error for d in decoded] == [None] * len(i8)
    # in a text column, decimals are digits if the schema says that they are decimals
    declared = {"na": ["1.10", "2.20"]} if server == "pgenv" else {}
    assert [true_row(d.row) for d in decoded] == [TRUE_VALUES | declared | {"i8": 9007199254740994 + n} for n in i8]


def test_a_timestamp_in_milliseconds_needs_the_envelope() -> None:
    """timestamp(3) arrives in ms. The envelope says so; without one an integer is what time.precision.mode says."""
    columns = {"id": "int", "ts3": "timestamp_ntz"}
    (row,) = decode("debezium-json", raw_records(sample("pgenv", "alltypes")[2:3]), spec(columns))
    assert row.row == {"id": 1, "ts3": dt.datetime(2026, 11, 21, 1, 2, 3, 123000)}
    connect = spec(columns, options={"time.precision.mode": "connect"})
    (row,) = decode("debezium-json", raw_records(sample("pgnull", "alltypes")[2:3]), connect)
    assert row.row == {"id": 1, "ts3": dt.datetime(2026, 11, 21, 1, 2, 3, 123000)}


@pytest.mark.parametrize("server", ["pgj", "pgenv", "pgnull"])
def test_nulls_and_far_dates(server: str) -> None:
    """Row 3 holds 44 BC, which Python's datetime can't, so that timestamp is compared in microseconds."""
    records = [m for m in sample(server, "alltypes") if m.value is not None and _after_id(m) == 3]
    decoded = decode("debezium-json", raw_records(records), spec(ALLTYPES), {"tstz": pa.int64()})
    # the calendar repeats every 400 years, which are 146,097 days
    ides_of_march_44_bc = utc("0357-03-15") - utc("1970-01-01") - dt.timedelta(days=146_097)
    known = {
        "id": 3,
        "n_un": Decimal("0E-18"),
        "ts": dt.datetime(1, 1, 1),
        "tstz": ides_of_march_44_bc // dt.timedelta(microseconds=1),
        "d": dt.date(9999, 12, 31),
    }
    assert [d.row for d in decoded] == [dict.fromkeys(ALLTYPES) | known]
    assert decoded[0].error is None


def test_infinity_has_no_place_in_a_timestamp() -> None:
    """Debezium sends 'infinity' as the largest number where it sends numbers, and as that word where it sends text."""
    (infinite,) = [m for m in sample("pgj", "alltypes") if m.offset == 1]
    records = raw_records([infinite])
    (row,) = decode("debezium-json", records, spec({"id": "int", "tstz": "timestamp"}))
    assert row.error == "type_mismatch: column tstz: '-infinity' does not fit timestamp"
    (row,) = decode("debezium-json", records, spec({"id": "int", "ts": "timestamp_ntz"}))
    assert row.error == f"type_mismatch: column ts: '{2**63 - 1}' does not fit timestamp_ntz"


def test_composite_keys_and_a_uuid() -> None:
    columns = {"tenant": "int", "id": "uuid", "v": "string"}
    decoded = decode("debezium-json", raw_records(sample("pgj", "comp")), spec(columns, ["tenant", "id"]))
    ones, twos = bytes.fromhex("11" * 16), bytes.fromhex("22" * 16)
    assert changes(decoded) == [
        (0, "+I", {"tenant": 1, "id": ones, "v": "a"}),
        (1, "+I", {"tenant": 1, "id": twos, "v": "b"}),
        (2, "+U", {"tenant": 1, "id": ones, "v": "z"}),
        (3, "-D", {"tenant": 1, "id": twos, "v": None}),
    ]


def test_a_delete_with_the_key_only() -> None:
    """REPLICA IDENTITY DEFAULT: an update's before is null, and a delete's has the key only."""
    columns = {"id": "int", "note": "string", "big": "string"}
    decoded = decode("debezium-json", raw_records(sample("pgj", "orders_default")), spec(columns, trust_before=True))
    assert changes(decoded) == [
        (1, "+I", {"id": 2, "note": "b", "big": None}),
        (3, "+U", {"id": 2, "note": "c", "big": None}),
        (4, "-D", {"id": 2, "note": None, "big": None}),
    ]


@pytest.mark.parametrize("server", ["pgj", "pgenv", "pgnull"])
@pytest.mark.parametrize(("column", "sql_type"), [("big", "string"), ("bb", "binary"), ("arr", "array<string>")])
def test_an_unchanged_toast_value_is_refused(server: str, column: str, sql_type: str) -> None:
    """The placeholder never gets into the table, as text, as bytes or as an array. A delete doesn't need the value."""
    columns = {"id": "int", "note": "string", column: sql_type}
    update, delete = decode("debezium-json", raw_records(sample(server, "toast_def")), spec(columns))
    assert update.error == f"unavailable_value: column {column}: the source didn't send the unchanged value"
    assert (delete.kind, delete.error, delete.row) == ("-D", None, removal(columns, id=1))
    assert update.bad is not None
    assert (update.bad["source"], update.bad["offset"]) == (f"{server}.public.toast_def", update.offset)


def test_a_table_without_a_key_needs_one_in_the_configuration() -> None:
    """Its columns can serve; its tombstones with a null key are ignored; its TRUNCATE has no row."""
    columns = {"a": "int", "b": "string"}
    decoded = decode("debezium-json", raw_records(sample("pgj", "nokey")), spec(columns, ["a"]))
    assert [(d.offset, d.kind, d.row) for d in decoded if d.bad is None] == [
        (0, "+I", {"a": 1, "b": "x"}),
        (1, "+I", {"a": 1, "b": "x"}),
        (2, "+I", {"a": 2, "b": None}),
        (3, "+U", {"a": 2, "b": "y"}),
        (4, "-D", {"a": 1, "b": None}),
        (6, "-D", {"a": 1, "b": None}),
    ]
    assert [(d.offset, d.error) for d in decoded if d.bad] == [(8, "truncate: the source emptied its table")]


def test_a_column_that_was_dropped_at_the_source() -> None:
    records = raw_records(sample("pgj", "orders")[13:15])
    before, after = decode("debezium-json", records, spec(ORDERS_WITH_QTY))
    assert (before.error, before.row) == (None, DDL | {"qty": None})
    assert (after.error, after.row["qty"]) == (None, None)


def test_transactions_and_logical_messages() -> None:
    """A logical message changes no row. A transaction topic is no table: pointed at one, the sink says so."""
    table = spec({"id": "string"})
    assert decode("debezium-json", raw_records(sample("pgj", "message")), table) == []
    decoded = decode("debezium-json", raw_records(sample("pgj", "transaction")), table)
    what = "the event has no op; such messages are the beginnings and ends of transactions, from Debezium"
    assert [d.error for d in decoded] == [f"unknown_operation: {what}"] * 3


def _after_id(message: Message) -> int | None:
    event = message.value.get("payload", message.value)
    return event["after"]["id"] if event["after"] else None
