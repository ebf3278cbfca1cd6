"""Rows that carry their kind, as JSON and as typed columns."""

import datetime as dt
import json
from decimal import Decimal
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from changelog import row_kind
from changelog.decoding import ColumnSpec
from changelog.rows import TIE
from tests.changelog.messages import decode, messages, raw_records, spec

pytestmark = pytest.mark.spark

COLUMNS = {"id": "bigint", "v": "string"}


def change(kind: str, **row: Any) -> dict[str, Any]:
    return {"row_kind": kind, **row}


def test_kinds_and_what_they_keep(spark: SparkSession) -> None:
    """-U and -D keep the key and what partition values derive from, and need nothing else."""
    columns = COLUMNS | {"region": "string"}
    row = {"id": 1, "v": "a", "region": "eu"}
    kinds = ["+I", "-U", "+U", "-D", "INSERT", "UPDATE_BEFORE", "UPDATE_AFTER", "DELETE"]
    values = [change(kind, **row) for kind in kinds] + [change("-D", id=2), None]
    table = spec(columns, partition_sources=("region",))
    found = decode(row_kind.json_decoder, raw_records(spark, messages(*values)), table)
    assert [d.error for d in found] == [None] * 9
    assert [d.kind for d in found] == ["+I", "-U", "+U", "-D"] * 2 + ["-D"]
    removed = row | {"v": None}
    assert [d.row for d in found] == [row, removed] * 4 + [{"id": 2, "v": None, "region": None}]


def test_bad_records_say_why(spark: SparkSession) -> None:
    expected = "; expected one of +I, -U, +U, -D"
    cases: list[tuple[Any, str]] = [
        ("no JSON", "unparseable: the value is not a JSON object"),
        ("[]", "unparseable: the value is not a JSON object"),
        ("7", "unparseable: the value is not a JSON object"),
        ({"id": 1, "v": "a"}, "unknown_operation: row_kind is missing" + expected),
        (change("+i", id=1, v="a"), "unknown_operation: row_kind is '+i'" + expected),
        (change("+I", v="a"), "null_key: key column id is missing"),
        (change("-D", id=None), "null_key: key column id is null"),
        (change("+I", id=1), "missing_column: column v is missing"),
        (change("+I", id="x", v="a"), "type_mismatch: column id: 'x' does not fit bigint"),
        (change("-U", id="x"), "type_mismatch: column id: 'x' does not fit bigint"),
    ]
    records = raw_records(spark, messages(*(value for value, _ in cases)))
    found = decode(row_kind.json_decoder, records, spec(COLUMNS))
    assert [d.error for d in found] == [reason for _, reason in cases]
    assert [d.bad["value"] for d in found if d.bad][:2] == [b"no JSON", b"[]"]


def test_json_values_are_exact_or_refused(spark: SparkSession) -> None:
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
    found = decode(row_kind.json_decoder, raw_records(spark, messages(good, *bad)), spec(columns))
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
    errors = [d.error or "" for d in found[1:]]
    for (name, _), error in zip(misfits, errors, strict=True):
        assert error.startswith(f"type_mismatch: column {name}: "), (name, error)


def test_files_are_ordered_by_columns_and_ties_by_content(spark: SparkSession) -> None:
    table = spec(COLUMNS, order_by=(("seq", T.LongType()),), source_order=False)
    values = [change("+I", id=1, v="a", seq=1), change("+I", id=1, v="b", seq=1), change("+I", id=1, v="a", seq=1)]
    values += [change("+I", id=1, v="a"), change("+I", id=1, v="a", seq="x")]
    records = raw_records(spark, messages(*values))
    rows = row_kind.json_decoder(table)(records).where("_rowdelta_bad is null").select("v", TIE).collect()
    ties = {v: {row[TIE] for row in rows if row["v"] == v} for v in "ab"}
    assert len(ties["a"]) == len(ties["b"]) == 1
    assert ties["a"] != ties["b"]
    errors = [d.error for d in decode(row_kind.json_decoder, records, table) if d.bad]
    assert errors == ["missing_order: order column seq is null or missing"] * 2


def test_typed_columns(spark: SparkSession) -> None:
    """Of Parquet files: the columns are typed already, UUIDs are text."""
    table = spec({"id": "bigint", "v": "string", "u": "uuid"}, order_by=(("seq", T.LongType()),), source_order=False)
    read = row_kind.columns_to_read(table)
    assert read.simpleString() == "struct<row_kind:string,id:bigint,v:string,u:string,seq:bigint>"
    uuid = "11111111-2222-3333-4444-555555555555"
    rows: list[tuple[Any, ...]] = [("+I", 1, "a", uuid, 1), ("-D", 2, "b", None, 2)]
    rows += [
        (None, 3, "c", None, 3),
        ("?", 4, "d", None, 4),
        ("+I", None, "e", None, 5),
        ("+I", 6, "f", "no", 6),
        ("+I", 7, "g", None, None),
    ]
    records = spark.createDataFrame(rows, read).withColumn("source", F.when(F.rand() >= 0, "file:/changes/1.parquet"))
    found = decode(row_kind.columns_decoder, records, table)
    good = {d.row["id"]: (d.kind, d.row) for d in found if d.bad is None}
    assert good == {
        1: ("+I", {"id": 1, "v": "a", "u": bytes.fromhex(uuid.replace("-", ""))}),
        2: ("-D", {"id": 2, "v": None, "u": None}),
    }
    bad = {json.loads(d.bad["value"])["v"]: d.error for d in found if d.bad}
    assert bad == {
        "c": "unknown_operation: row_kind is missing; expected one of +I, -U, +U, -D",
        "d": "unknown_operation: row_kind is '?'; expected one of +I, -U, +U, -D",
        "e": "null_key: key column id is null",
        "f": "type_mismatch: column u is not a UUID",
        "g": "missing_order: order column seq is null or missing",
    }
    assert {d.bad["source"] for d in found if d.bad} == {"file:/changes/1.parquet"}


def test_a_column_with_a_map_can_break_ties(spark: SparkSession) -> None:
    """Spark doesn't hash maps."""
    columns = (ColumnSpec("id", T.LongType()), ColumnSpec("m", T.MapType(T.StringType(), T.LongType())))
    table = spec({"id": "bigint", "m": "map<string,bigint>"}, order_by=(("seq", T.LongType()),), source_order=False)
    assert table.columns == columns
    values = [change("+I", id=1, m={"a": 1}, seq=1), change("+I", id=1, m={"a": 2}, seq=1)]
    frame = row_kind.json_decoder(table)(raw_records(spark, messages(*values)))
    assert frame.select(TIE).distinct().count() == 2
