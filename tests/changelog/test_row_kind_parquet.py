"""Parquet files of rows that carry their kind: the same values as Spark reads."""

import io
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from itertools import compress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_type

from changelog.decoding import ChangelogDecoder
from changelog.formats.row_kind_parquet import FileReader, UnreadableFileError, columns_to_read
from changelog.rows import BAD, KIND, RowKind, order_column
from changelog.spec import ChangelogSpec, ColumnSpec
from sink.spark.versions import to_arrow
from tests.changelog.messages import spec

SEQ = (("seq", T.LongType()),)
COLUMNS = {
    "id": "bigint",
    "region": "string",
    "amount": "decimal(12,2)",
    "total": "decimal(38,10)",
    "ratio": "double",
    "short": "float",
    "count": "int",
    "flag": "boolean",
    "raw": "binary",
    "day": "date",
    "at": "timestamp",
    "local": "timestamp_ntz",
}
ARROW = pa.schema(
    [
        ("row_kind", pa.string()),
        ("id", pa.int64()),
        ("region", pa.string()),
        ("amount", pa.decimal128(12, 2)),
        ("total", pa.decimal128(38, 10)),
        ("ratio", pa.float64()),
        ("short", pa.float32()),
        ("count", pa.int32()),
        ("flag", pa.bool_()),
        ("raw", pa.binary()),
        ("day", pa.date32()),
        ("at", pa.timestamp("us", "UTC")),
        ("local", pa.timestamp("us")),
        ("seq", pa.int64()),
    ]
)
TABLE = spec(COLUMNS, order_by=SEQ, source_order=False)
SMALL = ChangelogSpec(
    (
        ColumnSpec("id", T.LongType()),
        ColumnSpec("v", T.StringType()),
        ColumnSpec("n", T.LongType(), required=True),
    ),
    ("id",),
    order_by=SEQ,
    source_order=False,
)

_FROM, _TO = datetime(1, 1, 1), datetime(9999, 12, 31)
ROWS = st.fixed_dictionaries(
    {
        "row_kind": st.sampled_from(["+I", "-U", "+U", "-D", "INSERT", "2"]),
        "id": st.integers(-(2**63), 2**63 - 1),
        "seq": st.integers(-(2**63), 2**63 - 1),
        "region": st.none() | st.text(max_size=5),
        "amount": st.none() | st.decimals(-(10**10) + 1, 10**10 - 1, places=2),
        "total": st.none() | st.decimals(-(10**28) + 1, 10**28 - 1, places=10),
        "ratio": st.none() | st.floats(),
        "short": st.none() | st.floats(width=32),
        "count": st.none() | st.integers(-(2**31), 2**31 - 1),
        "flag": st.none() | st.booleans(),
        "raw": st.none() | st.binary(max_size=5),
        "day": st.none() | st.dates(),
        "at": st.none() | st.datetimes(_FROM, _TO, timezones=st.just(UTC)),
        "local": st.none() | st.datetimes(_FROM, _TO),
    }
)


def written(table: pa.Table, **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, **options)
    return sink.getvalue()


def rows(content: bytes, table: ChangelogSpec = TABLE, batch_rows: int = 7) -> pa.Table:
    records = FileReader(table, batch_rows)(content, "file:///changes/1.parquet")
    return pa.Table.from_batches(ChangelogDecoder("row-kind", table)(records))


def small(**columns: pa.Array) -> pa.Table:
    given = {
        "row_kind": pa.array(["+I", "-D"]),
        "id": pa.array([1, 2], pa.int64()),
        "v": pa.array(["a", "b"]),
        "n": pa.array([5, None], pa.int64()),
        "seq": pa.array([1, 2], pa.int64()),
    }
    return pa.table(given | columns)


@pytest.mark.spark
@given(values=st.lists(ROWS, min_size=1, max_size=30), options=st.sampled_from([{}, {"row_group_size": 7}]))
@settings(
    max_examples=25, deadline=None, phases=[Phase.generate], suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_the_same_rows_as_by_spark(
    spark: SparkSession, tmp_path: Path, values: list[dict[str, Any]], options: dict[str, Any]
) -> None:
    content = written(pa.Table.from_pylist(values, ARROW), store_decimal_as_integer=True, **options)
    (tmp_path / "1.parquet").write_bytes(content)
    by_spark = to_arrow(spark.read.schema(columns_to_read(TABLE)).parquet(str(tmp_path)))
    ours = rows(content)
    removed = [kind in (RowKind.UPDATE_BEFORE, RowKind.DELETE) for kind in ours.column(KIND).to_pylist()]
    assert by_spark.column("seq").to_pylist() == ours.column(order_column(0)).to_pylist()
    for column in TABLE.columns:
        is_kept = column.name in TABLE.kept_by_removals
        read = [is_kept or not is_removed for is_removed in removed]  # what else removals tell depends on their batch
        found = ours.column(column.name)
        expected = by_spark.column(column.name).cast(found.type).to_pylist()
        assert repr([*compress(found.to_pylist(), read)]) == repr([*compress(expected, read)]), column.name
    assert ours.column(BAD).null_count == len(values)


@pytest.mark.spark
@pytest.mark.parametrize("kind", ["INT96", "TIMESTAMP_MICROS", "TIMESTAMP_MILLIS"])
def test_times_as_spark_writes_them(spark: SparkSession, tmp_path: Path, kind: str) -> None:
    """Spark writes timestamps in 96 bits by default, which Arrow reads as local times."""
    at = datetime(2026, 1, 2, 3, 4, 5, 678000, UTC)
    table = spec({"id": "bigint", "at": "timestamp", "day": "date"}, order_by=SEQ, source_order=False)
    frame = spark.createDataFrame([("+I", 1, at, date(1500, 1, 1), 1)], columns_to_read(table))
    spark.conf.set("spark.sql.parquet.outputTimestampType", kind)
    try:
        frame.coalesce(1).write.parquet(str(tmp_path / "out"))
    finally:
        spark.conf.unset("spark.sql.parquet.outputTimestampType")
    (path,) = (tmp_path / "out").glob("*.parquet")
    (row,) = rows(path.read_bytes(), table).to_pylist()
    assert (row["at"], row["day"]) == (at, date(1500, 1, 1))


def test_text_of_other_layouts_and_times_of_other_zones() -> None:
    table = spec({"id": "bigint", "v": "string", "at": "timestamp"}, order_by=SEQ, source_order=False)
    at = pa.array([0, 1], pa.timestamp("ms", "Europe/Paris"))
    found = rows(written(small(v=pa.array(["a", "b"], pa.large_string()), at=at)), replace(table, trust_before=True))
    assert found.column("v").to_pylist() == ["a", None], "a -D has no row"
    assert found.column("at").to_pylist()[0] == datetime(1970, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda table: table.append_column("V", pa.array(["x", "y"])), "several columns v"),
        (lambda table: table.set_column(1, "id", pa.array([1.0, 2.0])), "id in 1.parquet is double, .*needs int64"),
        (lambda table: table.set_column(1, "id", pa.array(["1", "2"])), "id in 1.parquet is string"),
        (lambda table: table.set_column(1, "id", pa.array([1, 2], pa.uint64())), "id in 1.parquet is uint64"),
        (lambda table: table.set_column(2, "v", pa.array([["a"], ["b"]])), "v in 1.parquet is list"),
        (lambda table: table.set_column(2, "v", pa.array([1, 2])), "v in 1.parquet is int64"),
    ],
)
def test_columns_of_other_types_are_refused(change: Callable[[pa.Table], pa.Table], reason: str) -> None:
    with pytest.raises(UnreadableFileError, match=reason):
        list(FileReader(SMALL, 7)(written(change(small())), "1.parquet"))


@pytest.mark.parametrize(
    "metadata",
    [
        {"org.apache.spark.version": "2.4.8"},
        {"org.apache.spark.version": "of one's own"},
        {"org.apache.spark.version": "3.0.1"},
        {"org.apache.spark.legacyDateTime": ""},
    ],
)
def test_files_of_the_julian_calendar_are_refused_if_they_have_times(metadata: dict[str, str]) -> None:
    assert rows(written(small().replace_schema_metadata(metadata)), SMALL).num_rows == 2
    table = spec({"id": "bigint", "day": "date"}, order_by=SEQ, source_order=False)
    with_day = small(day=pa.array([date(1500, 1, 1), None]))
    in_list = small(day=pa.array([[date(1500, 1, 1)], None]))
    of_lists = spec({"id": "bigint", "day": "array<date>"}, order_by=SEQ, source_order=False)
    for content, its_table in ((with_day, table), (in_list, of_lists)):
        with pytest.raises(UnreadableFileError, match=r"Julian calendar.*write it again"):
            rows(written(content.replace_schema_metadata(metadata)), its_table)
    assert rows(written(with_day.replace_schema_metadata({"org.apache.spark.version": "3.5.1"})), table).num_rows == 2


DAMAGED = b"PAR1" + bytes(200) + written(small())[204:]


@pytest.mark.parametrize("content", [b"", b"PAR1", written(small())[:-20], b"x" * 1000, DAMAGED])
def test_what_is_not_parquet_is_refused(content: bytes) -> None:
    with pytest.raises(UnreadableFileError, match=r"change file file:///changes/1.parquet can't be read as Parquet"):
        rows(content, SMALL)


def test_a_time_in_96_bits_is_no_local_time() -> None:
    table = spec({"id": "bigint", "at": "timestamp_ntz"}, order_by=SEQ, source_order=False)
    at = pa.array([0, 1], pa.timestamp("us"))
    rows(written(small(at=at)), table)
    with pytest.raises(UnreadableFileError, match=r"at in .* is timestamp"):
        rows(written(small(at=at), use_deprecated_int96_timestamps=True), table)


def test_narrower_types_are_widened_and_missing_columns_are_null() -> None:
    types = {"id": "bigint", "v": "string", "ratio": "double", "amount": "decimal(12,2)", "other": "string"}
    table = replace(spec(types, order_by=SEQ, source_order=False), trust_before=True)
    narrow = {
        "id": pa.array([1, 2], pa.int32()),
        "v": pa.array([b"a", None]),
        "ratio": pa.array([0.5, None], pa.float32()),
        "amount": pa.array([Decimal("1.5"), None], pa.decimal128(9, 1)),
        "seq": pa.array([1, 2], pa.int16()),
    }
    found = rows(written(small(**narrow).rename_columns(["row_kind", "ID", "v", "n", "seq", "ratio", "amount"])), table)
    assert found.column("id").to_pylist() == [1, 2]
    row = {name: found.column(name)[0].as_py() for name in types}
    assert row == {"id": 1, "v": "a", "ratio": 0.5, "amount": Decimal("1.50"), "other": None}


def test_bad_rows() -> None:
    """UUIDs are text in files."""
    table = spec({"id": "bigint", "v": "string", "u": "uuid"}, order_by=SEQ, source_order=False)
    uuid = "11111111-2222-3333-4444-555555555555"
    changes = [
        ("+I", 1, "a", uuid, 1),
        ("-D", 2, "b", None, 2),
        (None, 3, "c", None, 3),
        ("?", 4, "d", None, 4),
        ("+I", None, "e", None, 5),
        ("+I", 6, "f", "no", 6),
        ("+I", 7, "g", None, None),
        ("+I", 8, "h", "deadbeef", 8),
    ]
    names = ["row_kind", "id", "v", "u", "seq"]
    content = written(pa.table(dict(zip(names, map(list, zip(*changes, strict=True)), strict=True))))
    found = rows(content, table, 100).to_pylist()
    good = {row["id"]: (row[KIND], row["u"]) for row in found if row[BAD] is None}
    assert good == {1: (RowKind.INSERT, bytes.fromhex(uuid.replace("-", ""))), 2: (RowKind.DELETE, None)}
    bad = {json.loads(r[BAD]["value"])["v"]: f"{r[BAD]['error_class']}: {r[BAD]['reason']}" for r in found if r[BAD]}
    assert bad == {
        "c": "unknown_operation: row_kind is missing; expected one of +I, -U, +U, -D",
        "d": "unknown_operation: row_kind is '?'; expected one of +I, -U, +U, -D",
        "e": "null_key: key column id is null or missing",
        "f": "type_mismatch: column u: 'no' does not fit uuid",
        "h": "type_mismatch: column u: 'deadbeef' does not fit uuid",
        "g": "missing_order: order column seq is null or missing",
    }
    assert {row[BAD]["source"] for row in found if row[BAD]} == {"file:///changes/1.parquet"}
    hidden = next(
        row
        for row in rows(content, replace(table, show_values=False), 100).to_pylist()
        if row[BAD] and b'"d"' in row[BAD]["value"]
    )
    assert hidden[BAD]["reason"] == "row_kind is text of 1 character; expected one of +I, -U, +U, -D"


@pytest.mark.parametrize(
    "dtype",
    [
        "array<struct<city:string,at:timestamp>>",
        "map<string,struct<city:string,at:timestamp>>",
        "struct<city:string,at:timestamp>",
    ],
)
def test_fields_in_a_column_that_differ_in_case(dtype: str) -> None:
    """Spark reads them as one, so large files have their values."""
    table = replace(spec({"id": "bigint", "v": dtype}, order_by=SEQ, source_order=False), trust_before=True)
    whole, at = to_arrow_type(table.columns[1].type), datetime(2026, 1, 1, tzinfo=UTC)
    value = {"City": "Bonn", "AT": at}
    part = pa.struct([("City", pa.string()), ("AT", pa.timestamp("us", "UTC"))])
    if pa.types.is_list(whole):
        found = pa.array([[value], None], pa.list_(part))
    elif pa.types.is_map(whole):
        found = pa.array([[("home", value)], None], pa.map_(pa.string(), part))
    else:
        found = pa.array([value, None], part)
    (first, _) = rows(written(small(v=found)), table).column("v").to_pylist()
    read = {"city": "Bonn", "at": at}
    assert first == ([read] if pa.types.is_list(whole) else [("home", read)] if pa.types.is_map(whole) else read)


def test_text_without_its_annotation() -> None:
    """Old writers leave it out, and Spark reads what the table needs."""
    table = replace(spec({"id": "bigint", "v": "struct<a:string,b:binary>"}, order_by=SEQ, source_order=False))
    found = small(row_kind=["+I", "+I"], v=pa.array([{"a": b"Ulm", "b": "abcd"}, None]))
    assert rows(written(found), table).column("v").to_pylist() == [{"a": "Ulm", "b": b"abcd"}, None]
    with pytest.raises(UnreadableFileError, match="UTF8"):
        rows(written(small(v=pa.array([{"a": b"\xff", "b": "abcd"}, None]))), table)


def test_a_bad_row_is_as_spark_reads_it() -> None:
    """After a crash Spark reads the file, and tells by the row whether it is kept already."""
    types = {
        "id": "bigint",
        "v": "string",
        "amount": "decimal(12,2)",
        "at": "timestamp",
        "place": "struct<a:int,b:int>",
    }
    narrow = {
        "id": pa.nulls(2, pa.int64()),
        "amount": pa.array([Decimal("1.5")] * 2, pa.decimal128(9, 1)),
        "at": pa.array([0, 0], pa.timestamp("ms", "UTC")),
        "place": pa.array([{"B": 1, "c": 2}] * 2, pa.struct([("B", pa.int8()), ("c", pa.int8())])),
    }
    content = written(small(**narrow).drop_columns(["v"]))
    letters = rows(content, spec(types, order_by=SEQ, source_order=False)).column(BAD).to_pylist()
    assert letters[0]["value"] == (
        b'{"row_kind":"+I","id":null,"v":null,"amount":1.50,"at":"1970-01-01T00:00:00.000000Z",'
        b'"place":{"a":null,"b":1},"seq":1}'
    )


def test_fields_in_a_column_with_one_name() -> None:
    table = spec({"id": "bigint", "v": "struct<city:string>"}, order_by=SEQ, source_order=False)
    twice = pa.array([{"City": "Bonn", "city": "Ulm"}, None])
    with pytest.raises(UnreadableFileError, match=r"upper and lower case at most: v in .* is struct<City"):
        rows(written(small(v=twice)), table)


def test_integers_as_decimals() -> None:
    """Spark reads unsigned bigints so."""
    table = replace(spec({"id": "bigint", "v": "decimal(20,0)"}, order_by=SEQ, source_order=False), trust_before=True)
    for values in (pa.array([2**64 - 1, 1], pa.uint64()), pa.array([-5, 1], pa.int32())):
        assert rows(written(small(v=values)), table).column("v").to_pylist() == [Decimal(values[0].as_py()), None]
    narrower = spec({"id": "bigint", "v": "decimal(19,0)"}, order_by=SEQ, source_order=False)
    with pytest.raises(UnreadableFileError, match=r"v in .* is uint64"):
        rows(written(small(v=pa.array([1, 2], pa.uint64()))), narrower)


def test_json_as_text() -> None:
    """DuckDB writes such columns."""
    texts = pa.array(['{"a": 1}', None], pa.json_())
    found = rows(written(small(v=texts)), replace(SMALL, trust_before=True))
    assert found.column("v").to_pylist() == ['{"a": 1}', None]


FAR = pa.array([2**63 - 1, 0], pa.int64()).view(pa.timestamp("us", "UTC"))
"""PostgreSQL's infinity."""


@pytest.mark.parametrize(
    ("dtype", "values", "shown"),
    [
        ("timestamp", FAR, 2**63 - 1),
        ("struct<at:timestamp>", pa.StructArray.from_arrays([FAR], ["at"]), {"at": 2**63 - 1}),
        ("array<timestamp>", pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), FAR), [2**63 - 1]),
        ("map<string,timestamp>", pa.MapArray.from_arrays([0, 1, 2], pa.array(["a", "b"]), FAR), {"a": 2**63 - 1}),
    ],
)
def test_a_time_that_no_table_has(dtype: str, values: pa.Array, shown: Any) -> None:
    table = replace(spec({"id": "bigint", "v": dtype}, order_by=SEQ, source_order=False), trust_before=True)
    bad, good = sorted(rows(written(small(v=values)), table).to_pylist(), key=lambda row: row[BAD] is None)
    assert good[BAD] is None
    assert bad[BAD]["error_class"] == "type_mismatch"
    assert json.loads(bad[BAD]["value"])["v"] == shown


def test_a_bad_row_with_a_time_that_python_has_not() -> None:
    table = spec({"id": "bigint", "at": "timestamp"}, order_by=SEQ, source_order=False)
    at = pa.array([2**62, 2**62], pa.timestamp("us", "UTC"))
    found = rows(written(small(id=pa.array([None, None], pa.int64()), at=at)), table)
    assert [bad["error_class"] for bad in found.column(BAD).to_pylist()] == ["null_key"] * 2


def test_metadata_and_the_place_of_rows() -> None:
    columns = (ColumnSpec("id", T.LongType()),)
    table = ChangelogSpec(columns, ("id",), order_by=SEQ, metadata=("_op", "_source", "_offset"))
    records = FileReader(table, 1)(written(small()), "file:///changes/1.parquet", 7)
    found = pa.Table.from_batches(ChangelogDecoder("row-kind", table)(records))
    assert found.column("_op").to_pylist() == ["+I", "-D"]
    assert set(found.column("_source").to_pylist()) == {"file:///changes/1.parquet"}
    assert found.column("_offset").null_count == 2
    assert found.column(order_column(1)).to_pylist() == [7, 7]
    first, second = found.column(order_column(2)).to_pylist()
    assert first < second


def test_values_of_another_length_than_the_column_s() -> None:
    """Iceberg's `fixed`."""
    table = spec({"id": "bigint", "b": "binary"}, order_by=SEQ, source_order=False)
    table = replace(table, columns=(table.columns[0], replace(table.columns[1], width=4)))
    found = rows(written(small(row_kind=["+I", "+I"], b=pa.array([b"four", b"three"]))), table).to_pylist()
    assert [row["b"] for row in found if row[BAD] is None] == [b"four"]
    assert [row[BAD]["reason"] for row in found if row[BAD]] == ["column b: 'b'three'' does not fit binary of 4 bytes"]


@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        ({}, pa.array(["3", "1"])),
        ({"column_type": "integer"}, pa.array([3, 1], pa.int64())),
        ({"insert": ("c",), "delete": ("d",)}, pa.array(["c", "d"])),
    ],
)
def test_kinds_of_one_s_own_and_fields_of_other_names(options: dict[str, Any], kinds: pa.Array) -> None:
    columns = (ColumnSpec("id", T.LongType()), ColumnSpec("name", T.StringType(), source="v"))
    table = ChangelogSpec(columns, ("id",), order_by=SEQ, source_order=False, options=options)
    found = rows(written(small(row_kind=kinds)), replace(table, trust_before=True))
    assert found.column("_rowdelta_kind").to_pylist() == [1, 3]
    assert found.column("name").to_pylist() == ["a", None]
