"""Plain Parquet files, decoded by Arrow: the same rows as by Spark, or not at all."""

import io
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
from pyspark.sql import functions as F
from pyspark.sql import types as T

from changelog.row_kind_columns import SOURCE, columns_decoder, columns_to_read
from changelog.row_kind_parquet import NotPlainError, PlainRows
from changelog.rows import BAD, KIND, MOVED, RowKind
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
    plain = PlainRows.of(table, batch_rows)
    assert plain is not None
    return pa.Table.from_batches(plain(content))


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
    frame = (
        spark.read.schema(columns_to_read(TABLE))
        .parquet(str(tmp_path))
        .withColumn(SOURCE, F.when(F.rand() >= 0, "1.parquet"))
    )
    by_spark = to_arrow(columns_decoder(TABLE)(frame))
    ours = rows(content, replace(TABLE, trust_before=True))
    in_upsert = rows(content)
    removed = [kind in (RowKind.UPDATE_BEFORE, RowKind.DELETE) for kind in ours.column(KIND).to_pylist()]
    for name in ours.schema.names:
        if name not in (BAD, MOVED):  # what removals tell depends on the rows of their batch
            is_kept = name in TABLE.kept_by_removals or name not in [column.name for column in TABLE.columns]
            read = [is_kept or not is_removed for is_removed in removed]
            expected = by_spark.column(name).cast(ours.schema.field(name).type).to_pylist()
            for decoded in (ours, in_upsert):
                found = decoded.column(name).to_pylist()
                assert repr([*compress(found, read)]) == repr([*compress(expected, read)]), name
    assert by_spark.column(BAD).null_count == ours.column(BAD).null_count == len(values)


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
    "change",
    [
        lambda table: table.drop_columns(["v"]),
        lambda table: table.append_column("V", pa.array(["x", "y"])),
        lambda table: table.rename_columns(["row_kind", "ID", "v", "n", "seq"]),
        lambda table: table.set_column(1, "id", pa.array([1, 2], pa.int32())),
        lambda table: table.set_column(1, "id", pa.array([1, None], pa.int64())),
        lambda table: table.set_column(4, "seq", pa.array([None, 2], pa.int64())),
        lambda table: table.set_column(3, "n", pa.array([None, 2], pa.int64())),
        lambda table: table.set_column(0, "row_kind", pa.array(["+I", "?"])),
        lambda table: table.set_column(0, "row_kind", pa.array(["+I", None])),
        lambda table: table.set_column(2, "v", pa.array([b"a", b"b"])),
        lambda table: table.set_column(2, "v", pa.array([["a"], ["b"]])),
        lambda table: table.replace_schema_metadata({"org.apache.spark.version": "2.4.8"}),
        lambda table: table.replace_schema_metadata({"org.apache.spark.version": "of one's own"}),
        lambda table: table.replace_schema_metadata({"org.apache.spark.version": "3.0.1"}),
        lambda table: table.replace_schema_metadata({"org.apache.spark.legacyDateTime": ""}),
    ],
)
def test_what_is_not_plain(change: Callable[[pa.Table], pa.Table]) -> None:
    rows(written(small()), SMALL)
    with pytest.raises(NotPlainError):
        rows(written(change(small())), SMALL)


@pytest.mark.parametrize("content", [b"", b"PAR1", written(small())[:-20], b"x" * 1000])
def test_what_is_not_parquet_is_not_plain(content: bytes) -> None:
    with pytest.raises(NotPlainError):
        rows(content, SMALL)


def test_a_time_in_96_bits_is_no_local_time() -> None:
    table = spec({"id": "bigint", "at": "timestamp_ntz"}, order_by=SEQ, source_order=False)
    at = pa.array([0, 1], pa.timestamp("us"))
    rows(written(small(at=at)), table)
    with pytest.raises(NotPlainError, match="column at is an instant"):
        rows(written(small(at=at), use_deprecated_int96_timestamps=True), table)


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


def test_tables_without_plain_files() -> None:
    assert PlainRows.of(spec({"id": "bigint", "u": "uuid"}, order_by=SEQ, source_order=False), 9) is None
    columns = (ColumnSpec("id", T.LongType()),)
    assert PlainRows.of(ChangelogSpec(columns, ("id",), order_by=SEQ, metadata=("_source",)), 9) is None


def test_values_are_not_changed() -> None:
    """A file whose decimals, for example, have another type than the table isn't plain."""
    table = spec({"id": "bigint", "v": "decimal(12,2)"}, order_by=SEQ, source_order=False)
    narrow = pa.array([Decimal("1.5"), None], pa.decimal128(12, 1))
    with pytest.raises(NotPlainError):
        rows(written(small(v=narrow)), table)
