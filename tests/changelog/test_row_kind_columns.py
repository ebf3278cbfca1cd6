"""Rows that carry their kind as typed columns, decoded by Spark."""

import json
from dataclasses import replace
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from changelog.row_kind_columns import SOURCE, columns_decoder, columns_to_read
from changelog.rows import BAD, KIND, RowKind
from changelog.spec import ChangelogSpec, ColumnSpec
from tests.changelog.messages import spec

pytestmark = pytest.mark.spark

SEQ = (("seq", T.LongType()),)


def records(spark: SparkSession, table: ChangelogSpec, rows: list[tuple[Any, ...]]) -> DataFrame:
    """Rows as files would have them, in the order of `columns_to_read`."""
    frame = spark.createDataFrame(rows, columns_to_read(table))
    return frame.withColumn(SOURCE, F.when(F.rand() >= 0, "file:/changes/1.parquet"))


def test_rows_and_bad_rows(spark: SparkSession) -> None:
    """UUIDs are text in files."""
    table = spec({"id": "bigint", "v": "string", "u": "uuid"}, order_by=SEQ, source_order=False)
    assert columns_to_read(table).simpleString() == "struct<row_kind:string,id:bigint,v:string,u:string,seq:bigint>"
    uuid = "11111111-2222-3333-4444-555555555555"
    rows: list[tuple[Any, ...]] = [("+I", 1, "a", uuid, 1), ("-D", 2, "b", None, 2)]
    rows += [
        (None, 3, "c", None, 3),
        ("?", 4, "d", None, 4),
        ("+I", None, "e", None, 5),
        ("+I", 6, "f", "no", 6),
        ("+I", 7, "g", None, None),
        ("+I", 8, "h", "deadbeef", 8),
    ]
    found = columns_decoder(table)(records(spark, table, rows)).collect()
    good = {r["id"]: (r[KIND], r["v"], r["u"]) for r in found if r[BAD] is None}
    assert good == {
        1: (RowKind.INSERT, "a", bytearray.fromhex(uuid.replace("-", ""))),
        2: (RowKind.DELETE, "b", None),
    }
    bad = {json.loads(r[BAD]["value"])["v"]: f"{r[BAD]['error_class']}: {r[BAD]['reason']}" for r in found if r[BAD]}
    assert bad == {
        "c": "unknown_operation: row_kind is missing; expected one of +I, -U, +U, -D",
        "d": "unknown_operation: row_kind is '?'; expected one of +I, -U, +U, -D",
        "e": "null_key: key column id is null",
        "f": "type_mismatch: column u is not a UUID",
        "h": "type_mismatch: column u is not a UUID",
        "g": "missing_order: order column seq is null or missing",
    }
    assert {r[BAD]["source"] for r in found if r[BAD]} == {"file:/changes/1.parquet"}
    (hidden,) = columns_decoder(replace(table, show_values=False))(records(spark, table, rows[3:4])).collect()
    assert hidden[BAD]["reason"] == "row_kind is text of 1 characters; expected one of +I, -U, +U, -D"


@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        ({}, ["3", "2", "1"]),
        ({"column_type": "integer"}, [3, 2, 1]),
        ({"column": "op", "insert": ("I", "c"), "update": ("U",), "delete": ("D",)}, ["c", "U", "D"]),
        ({"column": "op", "column_type": "integer", "insert": ("0",), "update": ("7",), "delete": "9"}, [0, 7, 9]),
    ],
)
def test_kinds_by_number_and_by_one_s_own_words(spark: SparkSession, options: dict[str, Any], kinds: list[Any]) -> None:
    table = spec({"id": "bigint"}, order_by=SEQ, source_order=False, options=options)
    rows = [(kind, number, number) for number, kind in enumerate(kinds)]
    found = columns_decoder(table)(records(spark, table, [*rows, (None, 9, 9)])).orderBy("id").collect()
    assert [r[KIND] for r in found[:3]] == [RowKind.INSERT, RowKind.UPDATE_AFTER, RowKind.DELETE]
    assert [r[BAD] is None for r in found] == [True, True, True, False]


def test_fields_of_other_names_and_metadata(spark: SparkSession) -> None:
    columns = (ColumnSpec("id", T.LongType(), source="ID"), ColumnSpec("v", T.StringType(), source="V value"))
    table = ChangelogSpec(columns, ("id",), order_by=SEQ, source_order=False, metadata=("_op", "_source", "_offset"))
    assert columns_to_read(table).names == ["row_kind", "ID", "V value", "seq"]
    (row,) = columns_decoder(table)(records(spark, table, [("INSERT", 1, "a", 1)])).collect()
    assert (row["id"], row["v"]) == (1, "a")
    assert (row["_op"], row["_source"], row["_offset"]) == ("INSERT", "file:/changes/1.parquet", None)


def test_values_of_another_length_than_the_column_s(spark: SparkSession) -> None:
    """Iceberg's `fixed`."""
    table = spec({"id": "bigint", "b": "binary"}, order_by=SEQ, source_order=False)
    table = replace(table, columns=(table.columns[0], replace(table.columns[1], width=4)))
    rows = [("+I", 1, b"four", 1), ("+I", 2, b"three", 2), ("+I", 3, None, 3), ("-D", 4, b"x", 4)]
    found = columns_decoder(table)(records(spark, table, rows)).collect()
    assert {r["id"]: r["b"] for r in found if r[BAD] is None} == {1: b"four", 3: None, 4: b"x"}
    assert [r[BAD]["reason"] for r in found if r[BAD]] == ["column b does not fit binary of 4 bytes"]
