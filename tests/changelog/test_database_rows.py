"""Rows that were read from a database become changelog rows like messages."""

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import types as T

from changelog import formats
from changelog.changes import WireType
from changelog.decoding import ChangelogDecoder
from changelog.formats.database_rows import NAME, column_of, described, read_records
from changelog.rows import BAD, KIND, SNAPSHOT, RowKind, SoftDelete, order_column
from changelog.spec import ChangelogSpec, ColumnSpec
from tests.changelog.messages import spec

TYPES = {
    "id": WireType("int32"),
    "name": WireType("string"),
    "amount": WireType("bytes", "org.apache.kafka.connect.data.Decimal", {"scale": "2"}),
    "at": WireType("int64", "io.debezium.time.MicroTimestamp"),
    "tags": WireType("array", children={"element": WireType("string")}),
    "more": WireType("int64", "io.debezium.time.Timestamp"),
}
COLUMNS = {"id": "bigint", "name": "string", "amount": "decimal(12,2)", "at": "timestamp_ntz", "tags": "array<string>"}
READ_AT = datetime(2026, 11, 29, 14, 0, tzinfo=UTC)


def rows(**columns: pa.Array) -> pa.RecordBatch:
    given: dict[str, pa.Array] = {
        "id": pa.array([1, 2, 3], pa.int32()),
        "name": pa.array(["Ada", None, ""]),
        "amount": pa.array([Decimal("1.10"), None, Decimal("-0.01")], pa.decimal128(12, 2)),
        "at": pa.array([0, None, 1_795_222_923_123_456], pa.int64()),
        "tags": pa.array([["a", None], None, []], pa.list_(pa.string())),
    }
    given |= columns
    return read_records(pa.StructArray.from_arrays(list(given.values()), list(given)), "shop.public.orders", READ_AT)


def decoded(
    spec: ChangelogSpec, records: pa.RecordBatch, order: Mapping[str, Any] | None = None, observed: Any = None
) -> pa.Table:
    spec = replace(spec, options=described(TYPES, order or {}))
    return pa.Table.from_batches(ChangelogDecoder(NAME, spec, observed)([records]))


def test_each_row_is_an_insert_of_a_snapshot() -> None:
    found = decoded(
        spec(COLUMNS, ("id",), trust_before=True, metadata=("_op", "_ts", "_source", "_offset")),
        rows(),
    )
    assert found.column(KIND).to_pylist() == [RowKind.INSERT] * 3
    assert found.column(SNAPSHOT).to_pylist() == [True] * 3
    assert found.column(BAD).null_count == 3
    assert found.select(list(COLUMNS)).to_pylist() == [
        {"id": 1, "name": "Ada", "amount": Decimal("1.10"), "at": datetime(1970, 1, 1), "tags": ["a", None]},
        {"id": 2, "name": None, "amount": None, "at": None, "tags": None},
        {"id": 3, "name": "", "amount": Decimal("-0.01"), "at": datetime(2026, 11, 21, 1, 2, 3, 123456), "tags": []},
    ]
    assert found.column("_op").to_pylist() == ["r"] * 3
    assert found.column("_ts").to_pylist() == [READ_AT] * 3
    assert found.column("_source").to_pylist() == ["shop.public.orders"] * 3
    # without a place in the topic they come before all messages
    assert [found.column(order_column(n)).null_count for n in (0, 1)] == [3, 3]


def test_what_does_not_fit_is_a_bad_record_with_the_row() -> None:
    endless = pa.array([0, 9_223_372_036_825_200_000, None], pa.int64())
    found = decoded(spec(COLUMNS, ("id",)), rows(id=pa.array([1, 2, None], pa.int32()), at=endless))
    letters = found.column(BAD).drop_null().to_pylist()
    assert [(letter["error_class"], json.loads(letter["value"])["id"]) for letter in letters] == [
        ("null_key", None),
        ("type_mismatch", 2),
    ]
    _, letter = letters
    assert letter["reason"].startswith("column at: '9223372036825200000' does not fit timestamp_ntz")
    assert (letter["source"], letter["offset"]) == ("shop.public.orders", None)
    assert found.column("id").drop_null().to_pylist() == [1]


@pytest.mark.parametrize("name", ["at", "after.at"])
def test_the_order_is_a_column_or_given_for_all_rows(name: str) -> None:
    order_by = ((name, T.TimestampNTZType()), ("source.lsn", T.LongType()), ("source.ts_ms", T.StringType()))
    found = decoded(spec(COLUMNS, ("id",), order_by=order_by), rows(), {"source.lsn": 77, "source.ts_ms": 5})
    assert column_of(name) == "at"
    assert found.column(order_column(0)).to_pylist() == found.column("at").to_pylist()
    assert found.column(order_column(1)).to_pylist() == [77] * 3
    assert found.column(order_column(2)).to_pylist() == ["5"] * 3


def test_columns_that_only_one_side_has() -> None:
    columns = (
        ColumnSpec("key", T.LongType(), source="id"),
        ColumnSpec("later", T.IntegerType(), default=7),
        ColumnSpec("name", T.StringType(), is_uuid=True),
    )
    observed: dict[str, str] = {}
    wanted = ChangelogSpec(columns, ("key",), schema_changes="evolve", excluded=frozenset({"tags"}))
    found = decoded(wanted, rows(name=pa.array(["11111111-2222-3333-4444-555555555555"] * 3)), observed=observed.update)
    assert found.column("key").to_pylist() == [1, 2, 3]
    assert found.column("later").to_pylist() == [7] * 3
    assert found.column("name").to_pylist() == [bytes.fromhex("11111111222233334444555555555555")] * 3
    assert observed == {"amount": "decimal(38,2)", "at": "timestamp_ntz", "more": "timestamp_ntz"}


def test_a_table_that_marks_deletes_has_no_mark() -> None:
    found = decoded(spec(COLUMNS, ("id",), soft_delete=SoftDelete("gone", "gone_at")), rows())
    assert found.column("gone").to_pylist() == [False] * 3
    assert found.column("gone_at").null_count == 3


def test_nobody_can_choose_the_format() -> None:
    assert NAME not in formats.names()
    assert NAME not in formats.OURS
    assert formats.find(NAME).REQUIRED
