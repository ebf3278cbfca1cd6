"""Debezium JSON that connectors send rarely or never. It is refused with a reason, and nothing is guessed."""

import base64
import datetime as dt
import hashlib
import json
from dataclasses import replace
from decimal import Decimal
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest
from pyspark.sql import types as T

from changelog.decoding import CHANGES_PER_RECORD, ChangelogDecoder
from changelog.formats.debezium_json import DebeziumJson
from changelog.formats.row_images import differ
from changelog.rows import BAD, SNAPSHOT
from changelog.spec import ChangelogSpec, ColumnSpec
from changelog.values.encoded import MAYBE_BASE64
from tests.changelog.messages import Decoded, Message, decode, in_order, messages, raw_records, spec, sql

COLUMNS = {"id": "bigint", "v": "string"}


def event(op: str, after: Any = None, before: Any = None, **more: Any) -> dict[str, Any]:
    return {"before": before, "after": after, "op": op, **more}


def with_envelope(value: Any, kafka_type: str, name: str | None = None) -> dict[str, Any]:
    """An insert of {id: 1, v: value} whose envelope gives v this type and semantic name."""
    v = {"type": kafka_type, "optional": True, "field": "v"} | ({"name": name} if name else {})
    fields = [{"type": "int64", "optional": False, "field": "id"}, v]
    rows = [{"type": "struct", "fields": fields, "optional": True, "field": side} for side in ("before", "after")]
    return {"schema": {"type": "struct", "fields": rows}, "payload": event("c", {"id": 1, "v": value})}


def decoded(values: list[Any], **table: Any) -> list[Decoded]:
    columns = table.pop("columns", COLUMNS)
    return decode("debezium-json", raw_records(messages(*values)), spec(columns, **table))


def texts(value: int, size: int | None = None) -> str:
    """What Kafka Connect's JSON has for the unscaled value of a decimal."""
    length = size or (8 + (value + (value < 0)).bit_length()) // 8
    return base64.b64encode(value.to_bytes(length, "big", signed=True)).decode()


def test_bad_records_say_why() -> None:
    cases: list[tuple[Any, str]] = [
        ("no JSON", "unparseable: the value is not a JSON object"),
        ('{"op": "c", "after": {"id": 1', "unparseable: the value is not a JSON object"),
        ("", "unparseable: the value is not a JSON object"),
        ("[1, 2]", "unparseable: the value is not a JSON object"),
        ("null", "unparseable: the value is not a JSON object"),
        ("{}", "unknown_operation: the event has no op"),
        (event("x", {"id": 1, "v": "a"}), "unknown_operation: op is 'x'; expected one of r, c, u, d, t, m"),
        (event("t"), "truncate: the source emptied its table"),
        (event("c"), "missing_column: op 'c' has no after"),
        (event("u", before={"id": 1, "v": "a"}), "missing_column: op 'u' has no after"),
        (event("d"), "missing_column: op 'd' has no before"),
        (event("c", {"v": "a"}), "null_key: key column id is null or missing"),
        (event("c", {"id": None, "v": "a"}), "null_key: key column id is null or missing"),
        (event("d", before={"id": None, "v": "a"}), "null_key: key column id is null or missing"),
        (event("c", {"id": "one", "v": "a"}), "type_mismatch: column id: 'one' does not fit bigint"),
        (event("c", {"id": 1.5, "v": "a"}), "type_mismatch: column id: '1.5' does not fit bigint"),
        (event("c", {"id": 2**63, "v": "a"}), f"type_mismatch: column id: '{2**63}' does not fit bigint"),
        (event("d", before={"id": "one"}), "type_mismatch: column id: 'one' does not fit bigint"),
        (event("c", {"id": "x" * 100, "v": "a"}), f"type_mismatch: column id: '{'x' * 80}…' does not fit bigint"),
    ]
    found = decoded([value for value, _ in cases])
    assert [d.error for d in found] == [reason for _, reason in cases]


def test_bad_records_keep_the_message() -> None:
    bad = Message("no JSON, zoë", 42, {"id": 7}, partition=3, topic="shop.orders")
    (found,) = decode("debezium-json", raw_records([bad]), spec(COLUMNS))
    assert found.bad == {
        "source": "shop.orders",
        "partition": 3,
        "offset": 42,
        "key": b'{"id":7}',
        "value": "no JSON, zoë".encode(),
        "reason": "the value is not a JSON object",
        "error_class": "unparseable",
    }


def test_what_is_ignored() -> None:
    found = decoded([None, {"op": "m", "message": {"prefix": "p"}}, event("c", {"id": 1, "v": None}), None])
    assert [(d.offset, d.kind, d.row, d.error) for d in found] == [(2, "+I", {"id": 1, "v": None}, None)]


def test_a_tombstone_whose_delete_was_compacted_away() -> None:
    """Kafka's compaction keeps the last record of a key, which is the tombstone."""

    def read(*read: Message, **table: Any) -> list[Decoded]:
        return decode("debezium-json", raw_records(read), spec(COLUMNS, **table))

    key = {"id": 7}
    created, deleted = event("c", {"id": 7, "v": "a"}), event("d", before={"id": 7, "v": None})
    usual = [Message(created, 0, key), Message(deleted, 1, key), Message(None, 2, key)]
    assert [(d.offset, d.kind) for d in read(*usual)] == [(0, "+I"), (1, "-D")]
    others = Message(created, 0, key), Message(created, 1, {"id": 8}), Message(created, 1, key, partition=1)
    for before in ([], *([other] for other in others)):
        last = read(*before, Message(None, 2, key))[-1]
        assert (last.offset, last.kind, last.row["id"], last.error) == (2, "-D", 7, None)
    for inserted in (created, event("u", {"id": 7, "v": "a"})):  # a filter has taken the `d`, and not its tombstone
        found = read(Message(inserted, 0, key), Message(None, 1, key))
        assert [(d.offset, d.kind) for d in found][-1] == (1, "-D")
        assert found[-1].row["id"] == 7
    unclear = Message(None, 2), Message(None, 2, {"other": 7}), Message(None, 2, {"id": None})
    assert read(*unclear) == []
    assert read(Message(None, 2, key), order_by=[("v", T.StringType())]) == []
    assert read(Message(None, 2, key), options={"tombstones": "ignore"}) == []


@pytest.mark.parametrize("flattened", [False, True])
def test_a_tombstone_whose_delete_ends_the_batch_before(flattened: bool) -> None:
    """The `d` may be about a row that went on to another key, and so leave the row alone that its key has got
    (`changelog.moves`). Its tombstone would remove that one.
    """
    key, row = {"id": 7}, {"id": 7, "v": "b"}
    removed = Message(row | {"__deleted": "true"} if flattened else event("d", before=row), 1, key)
    table = spec(COLUMNS, options={"flattened": str(flattened).lower()})

    def read(*batches: list[Message]) -> list[tuple[str, int | None]]:
        found = ChangelogDecoder("debezium-json", table)([raw_records(batch) for batch in batches])
        return [(d.kind, d.offset) for rows in found for d in in_order(rows, table, {})]

    tombstone = Message(None, 2, key)
    assert read([removed, tombstone]) == [("-D", 1)]
    assert read([removed], [tombstone]) == [("-D", 1)]
    assert read([removed], [tombstone, Message(None, 3, key)]) == [("-D", 1), ("-D", 3)]
    for other in (Message(None, 3, key), Message(None, 2, {"id": 8}), Message(None, 2, key, partition=1)):
        assert read([removed], [other])[1:] == [("-D", other.offset)]
        assert read([removed], [], [other])[1:] == [("-D", other.offset)]


def test_a_record_is_applied_whole_or_not_at_all() -> None:
    """An update is two changes, and both must be readable: a key that can't be read removes nothing."""
    found = decoded([event("u", {"id": 1, "v": "b"}, {"id": "?", "v": "a"})], trust_before=True)
    assert [d.error for d in found] == ["type_mismatch: column id: '?' does not fit bigint"]


def test_before_matters_in_upsert_only_when_the_key_changes() -> None:
    """Not every connector splits a key change into d and c."""
    values = [
        event("u", {"id": 1, "v": "b"}, {"id": 1, "v": "a"}),
        event("u", {"id": 2, "v": "b"}, {"id": 1, "v": "b"}),
        event("u", {"id": 3, "v": "b"}, None),
        event("u", {"id": 3, "v": "c"}, {"id": None, "v": None}),
    ]
    assert [(d.kind, d.row["id"], d.error) for d in decoded(values)] == [
        ("+U", 1, None),
        ("-U", 1, None),
        ("+U", 2, None),
        ("+U", 3, None),
        ("+U", 3, None),
    ]


def test_before_and_after_may_spell_a_key_differently() -> None:
    """A key as an object and as its text, and a decimal in two forms. If the forms differ, the key may have changed,
    and an extra -U does no harm.
    """
    own = {"scale": 2, "value": texts(1234)}
    again = [event("u", {"id": own}, {"id": own}), event("u", {"id": own}, {"id": {"scale": 2, "value": texts(1)}})]
    unlike = [event("u", {"id": own}, {"id": "1234"}), event("u", {"id": "1234"}, {"id": own})]
    options = {"decimal.handling.mode": "precise"}
    found = decoded([*again, *unlike], columns={"id": "decimal(12,2)"}, options=options)
    assert [(d.offset, d.kind, d.row["id"], d.error) for d in found] == [
        (0, "+U", Decimal("12.34"), None),
        (1, "-U", Decimal("0.01"), None),
        (1, "+U", Decimal("12.34"), None),
        (2, "-U", Decimal("-26588.24"), None),
        (2, "+U", Decimal("12.34"), None),
        (3, "-U", Decimal("12.34"), None),
        (3, "+U", Decimal("-26588.24"), None),
    ]
    # all of a batch, so that Arrow reads each side with one type
    found = decoded([unlike[0]] * 40, columns={"id": "decimal(12,2)"}, options=options)
    assert [d.kind for d in found] == ["-U", "+U"] * 40


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ([{"a": 1}, {"a": 1}, None], ['{"a":1}', '{"a":2}', "x"], [False, True, False]),
        ([[1], [2], None], [[1], [3], [4]], [False, True, False]),
        ([[1], [2]], ["[1]", "2"], [False, True]),
        ([b"a", b"\xff", None], ["a", "a", "a"], [True, True, False]),
        ([b"a", b"b", None], ["a", "a", "a"], [False, True, False]),
        ([{"a": 1}, {"a": 2}], [{"a": 1}, {"a": 1}], [False, True]),
        ([1, 2], ["1", "3"], [False, True]),
        ([None, None], [1, 2], [False, False]),
    ],
)
def test_values_that_differ(before: list[Any], after: list[Any], expected: list[bool]) -> None:
    assert differ(pa.array(before), pa.array(after)).to_pylist() == expected


def test_snapshot_reads_are_marked() -> None:
    records = raw_records(messages(event("r", {"id": 1, "v": "a"}), event("c", {"id": 2, "v": "a"})))
    (rows,) = ChangelogDecoder("debezium-json", spec(COLUMNS, trust_before=True))([records])
    assert dict(zip(*rows.select(["id", SNAPSHOT]).to_pydict().values(), strict=True)) == {1: True, 2: False}


def test_order_columns_from_the_event() -> None:
    order_by = (("source.lsn", T.LongType()), ("v", T.StringType()))
    values = [
        event("c", {"id": 1, "v": "a"}, source={"lsn": 27627472}),
        event("d", before={"id": 1, "v": "z"}, source={"lsn": 27627473}),
        event("c", {"id": 1, "v": "a"}, source={}),
        event("c", {"id": 1, "v": None}, source={}),
        event("d", before={"id": 1, "v": "a"}, source={}),
    ]
    records = raw_records(messages(*values))
    table = spec(COLUMNS, order_by=order_by)
    names = ["_rowdelta_order_0", "_rowdelta_order_1", "_rowdelta_order_2", "_rowdelta_order_3"]
    (rows,) = ChangelogDecoder("debezium-json", table)([records])
    found = list(zip(*rows.select(names).to_pydict().values(), strict=True))
    assert sorted(found, key=str) == [
        (27627472, "a", 0, 1),
        (27627473, "z", 0, CHANGES_PER_RECORD + 1),
        (None, "a", 0, 2 * CHANGES_PER_RECORD + 1),
        (None, None, None, None),
        (None, None, None, None),
    ]
    reason = "missing_order: order column source.lsn or v is null or missing"
    assert [d.error for d in decode("debezium-json", records, table)] == [None, None, None, reason, reason]


def test_a_delete_of_only_a_key_has_no_order_value_of_the_row() -> None:
    """Its offset alone would put it before the row, and the row would stay."""
    values = [event("u", {"id": 1, "v": "a"}), event("d", before={"id": 1, "v": None})]
    table = spec(COLUMNS, order_by=(("v", T.StringType()), ("_offset", T.LongType())))
    errors = [d.error for d in decode("debezium-json", raw_records(messages(*values)), table)]
    assert errors == [None, "missing_order: order column v is null or missing"]


def test_a_field_of_the_row_goes_before_metadata() -> None:
    values = [event("u", {"id": 1, "_offset": 7}, ts_ms=5), event("u", {"id": 1, "_offset": 6}, ts_ms=5)]
    columns = {"id": "bigint", "_offset": "bigint"}
    table = spec(columns, order_by=(("_offset", T.LongType()), ("_ts", T.TimestampType())))
    (rows,) = ChangelogDecoder("debezium-json", table)([raw_records(messages(*values))])
    assert rows.column("_rowdelta_order_0").to_pylist() == [7, 6]
    assert rows.column("_rowdelta_order_1").cast(pa.int64()).to_pylist() == [5000] * 2


def test_order_columns_of_the_record_and_descending_ones() -> None:
    order_by = (("source.rank", T.LongType()), ("_ts", T.TimestampType()), ("_offset", T.LongType()))
    ranks = [7, None, -1, 2**40]
    values = [event("u", {"id": 1, "v": "a"}, source={"rank": rank}, ts_ms=5) for rank in ranks]
    plain = spec(COLUMNS, order_by=order_by, descending=frozenset({"source.rank"}), stored_order={0: "_order"})
    # a column with what the record has makes it no field of the message
    table = replace(plain, columns=(*plain.columns, ColumnSpec("place", T.LongType(), source="_offset")))
    (rows,) = ChangelogDecoder("debezium-json", table)([raw_records(messages(*values))])
    assert rows.column("_order").to_pylist() == ranks
    encoded = rows.column("_rowdelta_order_0").to_pylist()
    assert sorted(range(4), key=encoded.__getitem__) == [1, 3, 0, 2], "NULL comes first, and the largest before others"
    assert rows.column("_rowdelta_order_1").cast(pa.int64()).to_pylist() == [5000] * 4
    assert rows.column("_rowdelta_order_2").to_pylist() == [0, 1, 2, 3]


def test_a_required_column_may_not_be_null() -> None:
    columns = (ColumnSpec("id", T.LongType(), required=True), ColumnSpec("v", T.StringType(), required=True))
    table = ChangelogSpec(columns, ("id",))
    records = raw_records(messages(event("c", {"id": 1, "v": None}), event("d", before={"id": 1, "v": None})))
    assert [d.error for d in decode("debezium-json", records, table)] == [
        "type_mismatch: column v is null or missing, and the table requires a value",
        None,
    ]


@pytest.mark.parametrize(
    ("column", "good", "other"),
    [
        (ColumnSpec("v", T.ArrayType(T.StringType()), required=True), ["a"], ["b"]),
        (ColumnSpec("v", T.BinaryType(), required=True, width=2), "AAE=", "AAI="),
        (ColumnSpec("v", T.IntegerType(), required=True), 1, "no number"),
    ],
    ids=["an array", "fixed(2)", "beside a value that doesn't fit"],
)
def test_a_required_column_becomes_optional_whatever_stands_beside_the_null(
    column: ColumnSpec, good: Any, other: Any
) -> None:
    table = ChangelogSpec((ColumnSpec("id", T.LongType(), required=True), column), ("id",), schema_changes="evolve")
    rows = [event("c", {"id": number, "v": value}) for number, value in enumerate([good, None, other])]
    observed: list[dict[str, str]] = []
    list(ChangelogDecoder("debezium-json", table, observed.append)([raw_records(messages(*rows))]))
    assert observed == [{"v": ""}]


def test_columns_with_odd_names() -> None:
    columns = {"id": "bigint", "a b": "string", "ü`x": "int", "ID2": "string", "$": "string"}
    row = {"id": 1, "a b": "x", "ü`x": 2, "ID2": "y", "$": "z"}
    (found,) = decoded([event("c", row)], columns=columns)
    assert (found.error, found.row) == (None, row)


# Decimals -------------------------------------------------------------------------------------------------------------


def fits(sql_type: str, values: list[Any], **options: str) -> list[Any]:
    """Each value as the decoded column has it, or the error class."""
    rows = decoded(
        [event("c", {"id": 1, "v": v}) for v in values], columns={"id": "bigint", "v": sql_type}, options=options
    )
    return [d.bad["error_class"] if d.bad else d.row["v"] for d in rows]


MISFIT = "type_mismatch"


@pytest.mark.parametrize(
    ("sql_type", "is_enveloped"),
    [
        ("decimal(12,2)", True),
        ("decimal(12,2)", False),
        ("decimal(38,0)", True),
        ("decimal(38,0)", False),
        ("string", True),
    ],
)
def test_base64_of_digits_only_is_no_number(sql_type: str, is_enveloped: bool) -> None:
    """A topic whose connector was set from numbers to base64 and back. Each value is read by its own form."""
    scale = {"decimal(12,2)": 2, "decimal(38,0)": 0}.get(sql_type, 2)

    def made(value: Any) -> Any:
        if not is_enveloped:
            return event("c", {"id": 1, "v": value})
        found = with_envelope(value, "bytes", "org.apache.kafka.connect.data.Decimal")
        for row in found["schema"]["fields"]:
            row["fields"][1]["parameters"] = {"scale": str(scale)}
        return found

    values = [12, "1234", *[7] * 40, "1234", *["5678"] * 40, 1234, "0000"]
    options = {"decimal.handling.mode": "precise"}
    found = decoded([made(value) for value in values], columns={"id": "bigint", "v": sql_type}, options=options)
    assert [d.error for d in found] == [None] * len(values)

    def meant(value: Any) -> Decimal:
        if isinstance(value, int):
            return Decimal(value)
        return Decimal(int.from_bytes(base64.b64decode(value), "big", signed=True)).scaleb(-scale)

    assert [Decimal(str(d.row["v"])) for d in found] == [meant(value) for value in values]


def test_decimals_as_text_are_never_rounded() -> None:
    values = ["1.005", "1.00", "1.000", "-0.01", "9999999999.99", "10000000000", "1e3", "1.005e0", "NaN", "abc", " 1 "]
    found = fits("decimal(12,2)", values, **{"decimal.handling.mode": "string"})
    assert found[:8] == [
        MISFIT,
        Decimal("1.00"),
        Decimal("1.00"),
        Decimal("-0.01"),
        Decimal("9999999999.99"),
        MISFIT,
        Decimal("1000.00"),
        MISFIT,
    ]
    assert found[8:10] == [MISFIT, MISFIT]
    thirty_eight = "0." + "123456789" * 4 + "12"
    (exact,) = fits("decimal(38,38)", [thirty_eight], **{"decimal.handling.mode": "string"})
    assert exact == Decimal(thirty_eight)


def test_decimals_as_numbers_keep_38_digits() -> None:
    """decimal.handling.mode: double, and connectors that write numbers: JSON numbers don't pass through a double."""
    digits = "1234567890123456789012345678.9012345678"
    text = f'{{"op":"c","after":{{"id":1,"v":{digits}}}}}'
    columns = {"id": "bigint", "v": "decimal(38,10)"}
    (found,) = decoded([text], columns=columns, options={"decimal.handling.mode": "double"})
    assert found.row["v"] == Decimal(digits)
    values = [1.005, 1.5, 0.1, 12345678901]
    found_values = fits("decimal(12,2)", values, **{"decimal.handling.mode": "double"})
    assert found_values == [MISFIT, Decimal("1.50"), Decimal("0.10"), MISFIT]


# Dates and times ------------------------------------------------------------------------------------------------------

NOON = dt.datetime(2026, 1, 2, 12, 0, 0, 123456)
EPOCH = dt.datetime(1970, 1, 1)
MICROS = (NOON - EPOCH) // dt.timedelta(microseconds=1)
MILLIS = MICROS // 1000
TO_MILLIS = NOON.replace(microsecond=123000)


@pytest.mark.parametrize("sql_type", ["timestamp", "timestamp_ntz"])
def test_the_envelope_says_the_unit_of_a_timestamp(sql_type: str) -> None:
    values = [
        with_envelope(MILLIS, "int64", "io.debezium.time.Timestamp"),
        with_envelope(MILLIS, "int64", "org.apache.kafka.connect.data.Timestamp"),
        with_envelope(MICROS, "int64", "io.debezium.time.MicroTimestamp"),
        with_envelope(MICROS * 1000, "int64", "io.debezium.time.NanoTimestamp"),
        *(with_envelope((MICROS + n) * 1000, "int64", "io.debezium.time.NanoTimestamp") for n in range(8)),
        with_envelope(MICROS * 1000 + 1, "int64", "io.debezium.time.NanoTimestamp"),
        with_envelope(2**63 - 1, "int64", "io.debezium.time.Timestamp"),
        with_envelope(None, "int64", "io.debezium.time.Timestamp"),
    ]
    found = decoded(values, columns={"id": "bigint", "v": sql_type})
    zone = dt.UTC if sql_type == "timestamp" else None
    assert [d.bad["error_class"] if d.bad else d.row["v"] for d in found] == [
        TO_MILLIS.replace(tzinfo=zone),
        TO_MILLIS.replace(tzinfo=zone),
        NOON.replace(tzinfo=zone),
        NOON.replace(tzinfo=zone),
        *(NOON.replace(tzinfo=zone) + dt.timedelta(microseconds=n) for n in range(8)),
        MISFIT,
        MISFIT,
        None,
    ]


def test_timestamps_without_envelope_are_micros() -> None:
    """Unless time.precision.mode says otherwise."""
    assert fits("timestamp_ntz", [MICROS, 0]) == [NOON, EPOCH]
    micros = {"time.precision.mode": "microseconds"}
    assert fits("timestamp_ntz", [MICROS, -1], **micros) == [NOON, EPOCH - dt.timedelta(microseconds=1)]
    connect = {"time.precision.mode": "connect"}
    assert fits("timestamp_ntz", [MILLIS, 2**62], **connect) == [TO_MILLIS, MISFIT]
    iso = {"time.precision.mode": "isostring"}
    assert fits("timestamp_ntz", ["2026-01-02T12:00:00.123456Z", MICROS], **iso) == [NOON, MISFIT]
    assert fits("timestamp", ["2026-01-02T12:00:00.123456Z", MICROS], **iso) == [NOON.replace(tzinfo=dt.UTC), MISFIT]
    assert fits("date", ["2026-01-02Z", "+292278994-08-16Z"], **iso) == [NOON.date(), MISFIT]


# Other types ----------------------------------------------------------------------------------------------------------


def test_text_is_kept_as_it_is() -> None:
    values = ["", " ", "ab   ", "zoë 😀", "\x00", 'a"b\\', "null", "__debezium_unavailable_valu"]
    assert fits("string", values) == values


def test_objects_in_a_text_column_stay_json() -> None:
    (found,) = fits("string", [{"x": 1.5, "y": [1, None]}])
    assert json.loads(found) == {"x": 1.5, "y": [1, None]}


def test_decimals_in_arrays() -> None:
    values = [["1.00", None], [1.5], [1.005], ["1234"]]
    as_text = fits("array<decimal(10,2)>", values, **{"decimal.handling.mode": "string"})
    assert as_text == [[Decimal("1.00"), None], [Decimal("1.50")], MISFIT, [Decimal("1234.00")]]
    # precise: texts are base64 of an integer, "1234" too
    assert fits("array<decimal(10,2)>", [["bg==", None], ["1234"]]) == [[Decimal("1.10"), None], MISFIT]
    precise = {"decimal.handling.mode": "precise"}
    assert fits("array<decimal(10,2)>", [["bg==", None], [1.5], ["1234"]], **precise) == [
        [Decimal("1.10"), None],
        [Decimal("1.50")],
        [Decimal("-26588.24")],
    ]


# Keys, placeholders and order columns ---------------------------------------------------------------------------------


def keyed(schema: dict[str, Any] | None, value: Any) -> Any:
    """A message's key {k: value}, in an envelope if it has a schema."""
    if schema is None:
        return {"k": value}
    fields = [schema | {"field": "k", "optional": False}]
    return {"schema": {"type": "struct", "fields": fields, "optional": False}, "payload": {"k": value}}


NAMED_DECIMAL: dict[str, Any] = {"type": "bytes", "name": "org.apache.kafka.connect.data.Decimal"}


@pytest.mark.parametrize("is_flattened", [False, True])
def test_a_delete_by_the_key_reads_it_as_the_keys_schema_says(is_flattened: bool) -> None:
    millis = {"type": "int64", "name": "io.debezium.time.Timestamp"}
    nanos = {"type": "int64", "name": "io.debezium.time.NanoTimestamp"}
    nothing = None if is_flattened else event("d")
    options = {"flattened": "true"} if is_flattened else {}

    def removed(sql_type: str, *keys: Any) -> list[Any]:
        records = raw_records([Message(nothing, offset, key) for offset, key in enumerate(keys)])
        found = decode("debezium-json", records, spec({"k": sql_type}, key=("k",), options=options))
        assert {d.kind for d in found} == {"-D"}
        return [d.bad["error_class"] if d.bad else d.row["k"] for d in found]

    # the last one has no schema: as the connector's settings say
    keys = keyed(millis, MILLIS), keyed(nanos, MICROS * 1000), keyed(millis, MILLIS + 1), keyed(None, MICROS)
    assert removed("timestamp_ntz", *keys) == [TO_MILLIS, NOON, TO_MILLIS + dt.timedelta(milliseconds=1), NOON]
    scaled = [keyed(NAMED_DECIMAL | {"parameters": {"scale": scale}}, texts(1000)) for scale in ("2", "4")]
    assert removed("decimal(12,4)", *scaled) == [Decimal("10.0000"), Decimal("0.1000")]
    # a schema that is none says nothing of the key
    broken = {"schema": {"type": "struct", "fields": [{"type": "int64"}]}, "payload": {"k": MICROS}}
    (error,) = removed("timestamp_ntz", broken)
    assert error == ("null_key" if is_flattened else "missing_column")


@pytest.mark.parametrize("choice", ["delete", "ignore"])
def test_tombstones_of_rows_without_envelope(choice: str) -> None:
    options = {"flattened": "true", "tombstones": choice}
    records = raw_records([Message({"id": 1}, 0, {"id": 1}), Message(None, 1, {"id": 1})])
    found = decode("debezium-json", records, spec({"id": "bigint"}, options=options))
    assert [each.kind for each in found] == ["+U", *["-D"] * (choice == "delete")]


GEOMETRY = "0101000020E6100000000000FC83D797C1000000FC83D797C1"
GEOGRAPHY = "0101000020E61000000C21E7FDFF7F66401842CEFBFF7F5640"
POINT = "0101000000000000FC83D797C1000000FC83D797C1"


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.mark.parametrize("setting", [None, "not sent – ü", "hex:f0e1000a"])
def test_unavailable_values_never_reach_the_table(setting: str | None) -> None:
    """In every form that Debezium's `UnchangedToastedPlaceholder` gives them, in columns of every type that
    holds such.
    """
    name = setting or "__debezium_unavailable_value"
    data = bytes.fromhex(name[4:]) if name.startswith("hex:") else name.encode()
    text = data.decode(errors="replace")
    signed = [byte - 256 if byte > 127 else byte for byte in data]
    nameless = bytearray(hashlib.md5(data).digest())
    nameless[6], nameless[8] = nameless[6] & 0x0F | 0x30, nameless[8] & 0x3F | 0x80
    uuid = str(UUID(bytes=bytes(nameless)))
    geometries = [{"srid": 4326, "wkb": base64_of(bytes.fromhex(wkb))} for wkb in (GEOMETRY, GEOGRAPHY, POINT)]
    # what Debezium sends; what is like it and no placeholder; types of columns
    cases: list[tuple[list[Any], Any, list[str]]] = [
        ([text], f"{text}.", ["string"]),
        ([base64_of(data)], base64_of(data + b"x"), ["string", "binary"]),
        ([signed], signed[1:], ["array<int>", "array<bigint>", "array<double>", "array<decimal(12,2)>", "string"]),
        ([[text]], [text, text], ["array<string>", "string"]),
        ([[base64_of(data)]], [base64_of(data)] * 2, ["array<binary>", "array<string>", "string"]),
        ([[uuid]], [str(UUID(int=1))], ["array<string>", "string"]),
        ([{text: text}], {"k": text}, ["map<string,string>", "string"]),
        (geometries, {"srid": 4326, "wkb": base64_of(b"x")}, ["struct<wkb:binary,srid:int>", "string", "binary"]),
    ]
    options = {} if setting is None else {"unavailable.value.placeholder": setting}
    for unavailable, value, types in cases:
        for sql_type in types:
            values = [value, *unavailable, value, *unavailable, value]
            rows = decoded(
                [event("u", {"id": 1, "v": v}) for v in values],
                columns={"id": "bigint", "v": sql_type},
                options=options,
            )
            expected = ["unavailable_value" if v in unavailable else None for v in values]
            assert [d.bad and d.bad["error_class"] for d in rows] == expected, (sql_type, unavailable)


def test_a_placeholder_of_ones_own_replaces_debeziums() -> None:
    options = {"unavailable.value.placeholder": "?"}
    assert fits("string", ["__debezium_unavailable_value", "?"], **options) == [
        "__debezium_unavailable_value",
        "unavailable_value",
    ]
    with pytest.raises(ValueError, match=r"unavailable\.value\.placeholder: expected hexadecimal digits"):
        DebeziumJson(spec(COLUMNS, options={"unavailable.value.placeholder": "hex:x"}))


def orders(values: list[Any], sql_type: str, order_by: tuple[str, str], **table: Any) -> list[Any]:
    """The order column of each change of a table {id, v}, or why it is bad."""
    by = ((order_by[0], sql(order_by[1])),)
    described = spec({"id": "bigint", "v": sql_type}, order_by=by, **table)
    (rows,) = ChangelogDecoder("debezium-json", described)([raw_records(messages(*values))])
    places = rows.column("_rowdelta_order_2").to_pylist()
    found = zip(rows.column(BAD).to_pylist(), rows.column("_rowdelta_order_0").to_pylist(), places, strict=True)
    good = sorted((p, value) for bad, value, p in found if bad is None)
    return [bad["reason"] for bad in rows.column(BAD).to_pylist() if bad] + [value for _, value in good]


@pytest.mark.parametrize("op", ["c", "d"])
def test_an_order_column_of_the_row_means_what_the_column_does(op: str) -> None:
    def enveloped(value: Any, *of_type: Any, **more: Any) -> Any:
        found = with_envelope(value, *of_type)
        for row in found["schema"]["fields"]:
            row["fields"][1] |= more
        if op == "d":
            found["payload"] = event("d", before=found["payload"]["after"])
        return found

    decimal = "decimal(12,2)"
    scaled = [
        enveloped(value, "bytes", "org.apache.kafka.connect.data.Decimal", parameters={"scale": "2"})
        for value in ("1234", texts(1050), "0000")
    ]
    # the bytes of "1234" are d7 6d f8, those of "0000" d3 4d 34
    amounts = [Decimal("-26588.24"), Decimal("10.50"), Decimal("-29293.56")]
    assert orders(scaled, decimal, ("v", decimal)) == amounts
    micros = [enveloped(MICROS + n, "int64", "io.debezium.time.MicroTimestamp") for n in range(2)]
    assert orders(micros, "timestamp_ntz", ("v", "timestamp_ntz")) == [NOON, NOON + dt.timedelta(microseconds=1)]
    parts = [{"type": "int32", "field": "scale"}, {"type": "bytes", "field": "value"}]
    own = [
        enveloped({"scale": n, "value": texts(1234)}, "struct", "io.debezium.data.VariableScaleDecimal", fields=parts)
        for n in (0, 1, 2)
    ]
    assert orders(own, decimal, ("v", decimal)) == [Decimal("1234.00"), Decimal("123.40"), Decimal("12.34")]
    # a field that is no column has a type, too
    of_a_field = [enveloped(MICROS * 1000, "int64", "io.debezium.time.NanoTimestamp")]
    described = ChangelogSpec((ColumnSpec("id", T.LongType()),), ("id",), order_by=(("v", T.TimestampNTZType()),))
    (rows,) = ChangelogDecoder("debezium-json", described)([raw_records(messages(*of_a_field))])
    assert rows.column("_rowdelta_order_0").to_pylist() == [NOON]


def test_order_columns_of_rows_that_are_spelled_unlike() -> None:
    """Before and after of one batch, with a schema or without, as an object and as text."""
    own = {"scale": 2, "value": texts(1234)}
    values = [
        event("d", before={"id": 1, "v": own}),
        event("c", {"id": 2, "v": "1234"}),
        event("c", {"id": 2, "v": own}),
    ]
    decimal, options = "decimal(12,2)", {"decimal.handling.mode": "precise"}
    assert orders(values, decimal, ("v", decimal), options=options) == [
        Decimal("12.34"),
        Decimal("-26588.24"),
        Decimal("12.34"),
    ]
    times = [event("d", before={"id": 1, "v": MICROS}), event("c", {"id": 2, "v": MICROS})]
    assert orders(times, "timestamp_ntz", ("v", "timestamp_ntz")) == [NOON, NOON]


def test_an_order_column_below_a_column_that_has_no_parts() -> None:
    options = {"flattened": "true"}
    found = orders([{"id": 1, "v": "x"}], "string", ("v.lsn", "bigint"), options=options)
    assert found == ["order column v.lsn is null or missing"]
    assert orders([{"id": 1, "v": MICROS}], "timestamp_ntz", ("v", "timestamp_ntz"), options=options) == [NOON]


# Fields that are no columns -------------------------------------------------------------------------------------------


def struct_of(*names: str, **more: Any) -> dict[str, Any]:
    return {"type": "struct", "fields": [{"type": "int64", "optional": True, "field": n} for n in names]} | more


@pytest.mark.parametrize("is_flattened", [False, True])
@pytest.mark.parametrize("is_enveloped", [False, True])
@pytest.mark.parametrize("schema_changes", ["evolve", "fail", "ignore"])
def test_new_fields_within_a_column_are_not_lost(schema_changes: str, is_enveloped: bool, is_flattened: bool) -> None:
    def made(value: Any, declared: dict[str, Any]) -> Any:
        if not is_enveloped:
            return {"id": 1, "v": value} if is_flattened else event("c", {"id": 1, "v": value})
        fields = [{"type": "int64", "optional": False, "field": "id"}, declared | {"field": "v"}]
        row = {"type": "struct", "fields": fields}
        if is_flattened:
            return {"schema": row, "payload": {"id": 1, "v": value}}
        sides = [row | {"field": side} for side in ("before", "after")]
        return {"schema": {"type": "struct", "fields": sides}, "payload": event("c", {"id": 1, "v": value})}

    def found(sql_type: str, declared: dict[str, Any], *values: Any) -> list[Any]:
        columns = {"id": "bigint", "v": sql_type}
        options = {"flattened": "true"} if is_flattened else {}
        rows = decoded(
            [made(v, declared) for v in values], columns=columns, schema_changes=schema_changes, options=options
        )
        return [d.bad["error_class"] if d.bad else d.row["v"] for d in rows]

    lost = {"a": 1} if schema_changes == "ignore" else MISFIT
    values = {"a": 1, "b": None}, {"a": 1, "b": 2}, {"a": 2}, None
    assert found("struct<a:bigint>", struct_of("a", "b"), *values) == [{"a": 1}, lost, {"a": 2}, None]
    nested = struct_of(fields=[struct_of("a", "b", field="s")])
    (inner,) = found("struct<s:struct<a:bigint>>", nested, {"s": {"a": 1, "b": 2}})
    assert inner == ({"s": lost} if schema_changes == "ignore" else MISFIT)
    array = {"type": "array", "items": struct_of("a", "b")}
    assert found("array<struct<a:bigint>>", array, [{"a": 1, "b": None}], [{"a": 1, "b": 2}]) == [
        [{"a": 1}],
        [lost] if schema_changes == "ignore" else MISFIT,
    ]


def test_the_most_exact_time_of_a_row_without_envelope() -> None:
    row = {"id": 1, "__source_ts_ms": 1767323045123, "__source_ts_us": 1767323045123456, "__ts_ms": 5}
    table = spec({"id": "bigint"}, options={"flattened": "true"}, metadata=("_ts",))
    (rows,) = ChangelogDecoder("debezium-json", table)([raw_records(messages(row))])
    assert rows.column("_ts")[0].as_py() == dt.datetime(2026, 1, 2, 3, 4, 5, 123456, dt.UTC)


@pytest.mark.parametrize("is_enveloped", [False, True])
@pytest.mark.parametrize("prefix", ["", "__"])
def test_new_fields_of_rows_whose_added_fields_have_no_prefix(prefix: str, is_enveloped: bool) -> None:
    added = {"op": "u", "deleted": "false", "ts_ms": 2, "source_ts_ms": 1, "lsn": 7}
    row = {"id": 1, "v": "a", "qty": 5} | {prefix + name: value for name, value in added.items()}
    kinds = {name: "string" if isinstance(value, str) else "int64" for name, value in row.items()}
    fields = [{"type": kind, "optional": True, "field": name} for name, kind in kinds.items()]
    value = {"schema": {"type": "struct", "fields": fields}, "payload": row} if is_enveloped else row
    options = {"flattened": "true", "add.fields.prefix": prefix}
    by = ((prefix + "lsn", T.LongType()),)
    table = spec(COLUMNS, options=options, schema_changes="evolve", order_by=by)
    observed: list[dict[str, str]] = []
    decoder = ChangelogDecoder("debezium-json", table, observed.append)
    (rows,) = decoder([raw_records(messages(value))])
    assert rows.column("id").to_pylist() == [1]
    assert observed == [{"qty": "bigint"}]


@pytest.mark.parametrize("names", [("text", "number"), ("number", "text")])
def test_a_text_and_a_decimal_of_one_field(names: tuple[str, ...]) -> None:
    """The decimal says how the field is spelled, whatever the order of the columns."""
    types = {"text": T.StringType(), "number": T.DecimalType(10, 3)}
    columns = [ColumnSpec("id", T.IntegerType()), *(ColumnSpec(name, types[name], source="w") for name in names)]
    row = {"id": 1, "w": "ASbs"}
    event = {"before": None, "after": row, "op": "c"}
    table = ChangelogSpec(tuple(columns), ("id",))
    (rows,) = ChangelogDecoder("debezium-json", table)([raw_records(messages(event))])
    assert [(row["text"], row["number"]) for row in rows.to_pylist()] == [("75.500", Decimal("75.500"))]


@pytest.mark.parametrize("flattened", [False, True])
@pytest.mark.parametrize(
    ("values", "observed"),
    [
        (["BNI=", None, "ASbs"], MAYBE_BASE64),
        (["ASbs"], MAYBE_BASE64),  # 75.500: three bytes need no padding
        (["BNI=", "a note"], "string"),
        (["open", "paid", "AB12", "Shop"], "string"),
        (["", None], "string"),
        (["AAECAwQFBgcICQoLDA0ODxAREhM="], "string"),  # more bytes than a decimal has
        (["BNI=", 7], "string"),
        ([7], "bigint"),
    ],
)
def test_new_fields_that_look_like_base64_decimals(values: list[Any], observed: str, flattened: bool) -> None:
    """Each batch may have one of the values, and each record may be read alone."""
    rows = [{"id": n, **({} if value is None else {"weight": value})} for n, value in enumerate(values)]
    events = rows if flattened else [{"before": None, "after": row, "op": "c"} for row in rows]
    table = spec(COLUMNS, options={"flattened": str(flattened).lower()}, schema_changes="evolve")
    for batches in ([raw_records(messages(*events))], [raw_records(messages(event)) for event in events]):
        found: list[dict[str, str]] = []
        list(ChangelogDecoder("debezium-json", table, found.append)(batches))
        assert found == [{"weight": observed}]


@pytest.mark.parametrize(("column", "fits"), [("int", []), ("decimal(6,0)", [1]), ("float", [1])])
@pytest.mark.parametrize("name", ["MicroTime", "NanoTime"])
def test_no_column_grows_for_times_of_a_finer_unit(name: str, column: str, fits: list[int]) -> None:
    """Its earlier rows have milliseconds: `ALTER TABLE … ALTER t TYPE time(6)` was once followed without a word."""
    fields = [{"type": "int64", "optional": False, "field": "id"}]
    fields.append({"type": "int64", "optional": True, "name": f"io.debezium.time.{name}", "field": "t"})
    row = {"type": "struct", "fields": fields}
    schema = {"type": "struct", "fields": [row | {"field": "before"}, row | {"field": "after"}]}
    values = [{"schema": schema, "payload": event("c", {"id": 1, "t": t})} for t in (86_399_000_001, 1)]
    table = spec({"id": "bigint", "t": column}, schema_changes="evolve")
    observed: list[dict[str, str]] = []
    (rows,) = ChangelogDecoder("debezium-json", table, observed.append)([raw_records(messages(*values))])
    classes = [bad and bad["error_class"] for bad in rows.column(BAD).to_pylist()]
    assert classes == [*(None for _ in fits), *[MISFIT] * (2 - len(fits))]
    assert rows.column("t").to_pylist()[: len(fits)] == fits
    assert observed == []
