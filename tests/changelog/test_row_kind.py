"""JSON rows that carry their kind."""

import base64
import datetime as dt
import json
from dataclasses import replace
from decimal import Decimal
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import types as T

from changelog.decoding import CHANGES_PER_RECORD, ChangelogDecoder
from changelog.rows import BAD, BadRecord, order_column
from tests.changelog import fuzz
from tests.changelog.messages import Decoded, Message, decode, messages, raw_records, spec

COLUMNS = {"id": "bigint", "v": "string"}


def change(kind: Any, **row: Any) -> dict[str, Any]:
    return {"row_kind": kind, **row}


def decoded(values: list[Any], **table: Any) -> list[Decoded]:
    columns = table.pop("columns", COLUMNS)
    return decode("row-kind", raw_records(messages(*values)), spec(columns, **table))


def test_kinds_and_what_they_keep() -> None:
    """-U and -D keep the key and what partition values derive from, and need nothing else."""
    row = {"id": 1, "v": "a", "region": "eu"}
    kinds = ["+I", "-U", "+U", "-D", "INSERT", "UPDATE_BEFORE", "UPDATE_AFTER", "DELETE"]
    values = [change(kind, **row) for kind in kinds] + [change("-D", id=2), None]
    found = decoded(values, columns=COLUMNS | {"region": "string"}, partition_sources=("region",))
    assert [d.error for d in found] == [None] * 9
    assert [d.kind for d in found] == ["+I", "-U", "+U", "-D"] * 2 + ["-D"]
    removed = row | {"v": None}
    assert [d.row for d in found] == [row, removed] * 4 + [{"id": 2, "v": None, "region": None}]


def test_spark_s_row_operations() -> None:
    """As numbers and as their text; UPDATE is an upsert."""
    found = decoded([change(kind, id=1) for kind in (1, 2, 3, "1", "2", "3")])
    assert [d.kind for d in found] == ["-D", "+U", "+I"] * 2
    (bad,) = decoded([change(4, id=1)])
    assert bad.error == "unknown_operation: row_kind is '4'; expected one of +I, -U, +U, -D"


def test_a_mapping_of_one_s_own() -> None:
    """The mapping replaces our own names of kinds: these mean nothing then."""
    options = {"column": "op", "insert": ("I", "c"), "update": ("U",), "update_before": ("B",), "delete": "D"}
    values = [{"op": op, "id": 1} for op in ("I", "c", "B", "U", "D", "+I", 3)]
    found = decoded(values, options=options)
    assert [d.kind for d in found[:5]] == ["+I", "+I", "-U", "+U", "-D"]
    expected = "; expected one of I, c, U, B, D"
    assert [d.error for d in found[5:]] == [
        "unknown_operation: op is '+I'" + expected,
        "unknown_operation: op is '3'" + expected,
    ]
    numbers = {"column": "meta.deleted", "insert": ("false",), "delete": ("true",)}
    found = decoded([{"meta": {"deleted": flag}, "id": 1} for flag in (False, True)], options=numbers)
    assert [d.kind for d in found] == ["+I", "-D"]
    (found_one,) = decoded([{"op": "DELETE", "id": 1}], options={"column": "op"})
    assert found_one.kind == "-D"


def test_bad_records_say_why() -> None:
    expected = "; expected one of +I, -U, +U, -D"
    cases: list[tuple[Any, str]] = [
        ("no JSON", "unparseable: the value is not a JSON object"),
        ("[]", "unparseable: the value is not a JSON object"),
        ("7", "unparseable: the value is not a JSON object"),
        ({"id": 1, "v": "a"}, "unknown_operation: row_kind is missing" + expected),
        (change("+i", id=1, v="a"), "unknown_operation: row_kind is '+i'" + expected),
        (change("+I", v="a"), "null_key: key column id is null or missing"),
        (change("-D", id=None), "null_key: key column id is null or missing"),
        (change("+I", id="x", v="a"), "type_mismatch: column id: 'x' does not fit bigint"),
        (change("-U", id="x"), "type_mismatch: column id: 'x' does not fit bigint"),
    ]
    found = decoded([value for value, _ in cases])
    assert [d.error for d in found] == [reason for _, reason in cases]
    assert [d.bad["value"] for d in found if d.bad][:2] == [b"no JSON", b"[]"]


def test_removals_need_only_what_they_keep() -> None:
    (found,) = decoded([change("-D", id=1, n="not a number")], columns=COLUMNS | {"n": "int"})
    assert (found.error, found.row) == (None, {"id": 1, "v": None, "n": None})


def test_json_values_are_exact_or_refused() -> None:
    columns = {
        "id": "bigint",
        "amount": "decimal(12,2)",
        "wide": "decimal(38,10)",
        "day": "date",
        "at": "timestamp",
        "wall": "timestamp_ntz",
        "data": "binary",
        "u": "uuid",
    }
    good = (
        '{"row_kind":"+I","id":9007199254740993,"amount":12.50,"wide":1234567890123456789012345678.9012345678,'
        '"day":"2026-01-02","at":"2026-01-02T03:04:05.000001+01:00","wall":"2026-01-02T03:04:05","data":"AP8=",'
        '"u":"11111111-2222-3333-4444-555555555555"}'
    )
    whole = json.loads(good)
    misfits: list[tuple[str, Any]] = [
        ("amount", 1.005),
        ("amount", "AP8="),  # base64 is Debezium's way
        ("day", 20455),  # and so are days and microseconds since 1970
        ("at", 1767323045000000),
        ("at", "2026-01-02T03:04:05.0000001Z"),
        ("wall", "2026-01-02T03:04:05Z"),
        ("data", "***"),
        ("u", "1111"),
    ]
    bad = [json.dumps(whole | {"wide": None, name: value}) for name, value in misfits]
    found = decoded([good, *bad], columns=columns)
    assert found[0].error is None
    assert found[0].row == {
        "id": 9007199254740993,
        "amount": Decimal("12.50"),
        "wide": Decimal("1234567890123456789012345678.9012345678"),
        "day": dt.date(2026, 1, 2),
        "at": dt.datetime(2026, 1, 2, 2, 4, 5, 1, dt.UTC),
        "wall": dt.datetime(2026, 1, 2, 3, 4, 5),
        "data": b"\x00\xff",
        "u": bytes.fromhex("11111111222233334444555555555555"),
    }
    for (name, _), d in zip(misfits, found[1:], strict=True):
        assert (d.error or "").startswith(f"type_mismatch: column {name}: "), (name, d.error)


def test_order_columns() -> None:
    order = (("seq", T.LongType()), ("meta.at", T.LongType()))
    values = [change("+I", id=1, seq=1, meta={"at": 2}), change("+I", id=1, seq=1), change("+I", id=1)]
    values.append(change("+I", id=1, seq="x"))
    (batch,) = ChangelogDecoder("row-kind", spec(COLUMNS, order_by=order))([raw_records(messages(*values))])
    assert batch.column("_rowdelta_order_0").to_pylist()[0] == 1
    assert batch.column("_rowdelta_order_1").to_pylist()[0] == 2
    assert [d.error for d in decoded(values, order_by=order) if d.bad] == [
        "missing_order: order column seq or meta.at is null or missing",
        "missing_order: order column seq does not fit bigint",
    ]


def test_an_offset_whose_place_would_wrap() -> None:
    """A wrapped one would be older than all others."""
    beyond = 2**63 // CHANGES_PER_RECORD
    values = [Message(change("+I", id=1, v="a"), beyond - 1), Message(change("-D", id=1, v="a"), beyond)]
    good, bad = ChangelogDecoder("row-kind", spec(COLUMNS))([raw_records(values)])
    assert good.column(order_column(1)).to_pylist() == [2**63 - CHANGES_PER_RECORD + 1]
    assert [(each["offset"], each["error_class"]) for each in bad.column(BAD).to_pylist()] == [
        (beyond, BadRecord.DECODER_FAILED)
    ]


def test_renamed_columns_metadata_and_unknown_fields() -> None:
    seen: dict[str, str] = {}
    table = spec(COLUMNS, schema_changes="evolve", metadata=("_op", "_ts"))
    values = raw_records(messages(change("+I", id=1, v="a", extra=True)))
    (batch,) = ChangelogDecoder("row-kind", table, seen.update)([values])
    assert (batch.column("_op").to_pylist(), batch.column("_ts").to_pylist()) == (["+I"], [None])
    assert seen == {"extra": "boolean"}


def test_columns_are_inferred() -> None:
    assert fuzz.inferred("row-kind", [change("+I", id=1, v="a")]) == {"id": "int64", "v": "string"}


# Random.


def spelled(kind: str, row: fuzz.Row) -> dict[str, Any]:
    values = {"row_kind": kind, **row}
    values["at"] = None if row["at"] is None else row["at"].isoformat()
    values["day"] = None if row["day"] is None else row["day"].isoformat()
    values["data"] = None if row["data"] is None else base64.b64encode(row["data"]).decode()
    return values


@settings(deadline=None, max_examples=100)
@given(fuzz.histories, st.sampled_from([("+I", "+U", "-D"), ("INSERT", "UPDATE_AFTER", "DELETE"), (3, 2, 1)]))
def test_random_changes_come_back(history: list[fuzz.Change], kinds: tuple[Any, ...]) -> None:
    """Each row is a message: an update is its new row, after a delete of the old one if the key changed."""
    parts: list[list[fuzz.Change]] = []
    for part in history:
        if part.old is not None and part.new is not None and part.old["id"] != part.new["id"]:
            parts.append([fuzz.Change(part.old, None)])
            parts.append([fuzz.Change(None, part.new)])
        else:
            parts.append([part])
    by_name = dict(zip(("insert", "update", "delete"), kinds, strict=True))
    values = [spelled(by_name[c.operation], c.new or c.old or {}) for (c,) in parts]
    fuzz.assert_decoded("row-kind", values, parts, fuzz.table())


DAMAGED = [
    spelled("+I", dict.fromkeys(fuzz.COLUMNS) | {"id": 1, "region": "eu", "amount": 1.5, "ok": True, "ratio": 0.5}),
    {"row_kind": "-U", "id": 1, "region": None},
    {"row_kind": 2, "id": 1},
]


@fuzz.much(100)
@given(fuzz.damaged(DAMAGED), st.sampled_from(["ignore", "evolve"]))
def test_nothing_is_lost(messages: list[fuzz.Message], schema_changes: str) -> None:
    fuzz.assert_accounted("row-kind", messages, fuzz.table(schema_changes=schema_changes), lambda value: False)


def test_values_of_another_length_than_the_column_s() -> None:
    """Iceberg's `fixed`."""
    table = spec({"id": "bigint", "b": "binary"})
    table = replace(table, columns=(table.columns[0], replace(table.columns[1], width=4)))
    values = [{"row_kind": "+I", "id": n, "b": text} for n, text in enumerate(("Zm91cg==", "dGhyZWU=", None))]
    found = decode("row-kind", raw_records(messages(*values)), table)
    assert [d.row["b"] for d in found if d.error is None] == [b"four", None]
    assert [d.error for d in found if d.error] == ["type_mismatch: column b: 'dGhyZWU=' does not fit binary of 4 bytes"]
