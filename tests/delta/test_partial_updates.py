"""Partial updates in Delta tables (`tests.sink.partial_story`), read back by delta-rs."""

import json
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from deltawriters.content import DataFile
from deltawriters.keyindex import IndexedFile
from deltawriters.table import UnreadableRowsError
from sink.targets.delta.writers import DeltaTableSpec
from tests.delta.harness import DeltaJob, crashing
from tests.delta.readers import READERS
from tests.delta.test_writers import array, field, struct, table_at
from tests.sink.partial_story import FIRST, play_toast, toast_job

COLUMNS = "id INT, note STRING, big STRING, bb BINARY, arr ARRAY<STRING>"


@pytest.mark.spark
def test_unchanged_toast_values_are_kept(spark: SparkSession, tmp_path: Path) -> None:
    """Columns have other names in the files than in the table."""
    job = DeltaJob(spark, tmp_path)
    toast_job(job)
    job.create(COLUMNS, properties={"delta.columnMapping.mode": "name"})

    def rows() -> list[dict[str, Any]]:
        found = READERS["delta-rs"](job.table_folder)
        return sorted(found, key=lambda row: int(row["id"]))

    play_toast(job, rows, partial(crashing, "before the commit"), lambda: job.append([FIRST | {"id": 3}]))
    job.check(readers=())


def named_otherwise(dtype: pa.DataType) -> pa.DataType:
    """The type with other names, and with the field ids that the names end in."""
    if pa.types.is_list(dtype):
        return pa.list_(named_otherwise(dtype.value_type))
    if not pa.types.is_struct(dtype):
        return dtype
    ids = [part.name.removeprefix("col-") for part in dtype]
    return pa.struct([
        pa.field(f"other-{number}", named_otherwise(part.type), part.nullable, {"PARQUET:field_id": number})
        for part, number in zip(dtype, ids, strict=True)
    ])  # fmt: skip


@pytest.mark.parametrize("mode", ["name", "id"])
def test_rows_of_files_that_are_older_than_the_schema(tmp_path: Path, mode: str) -> None:
    """Columns were renamed, widened and added, inside of a struct too. A partition column is in no file. In mode `id`
    the file has names of its own.
    """
    point = struct(field("x", "long", 4), field("y", "string", 5))
    table = table_at(
        tmp_path,
        field("id", "long", 1), field("note", "string", 2), field("point", point, 3), field("new", "string", 6),
        field("day", "date", 7), field("points", array(point), 8),
        by=["day"], properties={"delta.columnMapping.mode": mode},
    )  # fmt: skip
    path = str(tmp_path / "old.parquet")
    place = pa.struct([("col-4", pa.int32())])
    old = pa.table({
        "col-2": ["a", "b", None],
        "col-3": pa.array([{"col-4": 1}, None, {"col-4": None}], place),
        "col-8": pa.array([[{"col-4": 1}, None], None, []], pa.list_(place)),
        "col-1": pa.array([1, 2, 3], pa.int32()),
    }).to_struct_array().combine_chunks()  # fmt: skip
    if mode == "id":
        old = old.view(named_otherwise(old.type))
    pq.write_table(pa.Table.from_struct_array(old), path, row_group_size=2)
    file = IndexedFile(path, 0, json.loads('{"col-7": "2026-01-02"}'))
    found = list(table.rows(DataFile(file), at=np.array([0, 1, 2]), columns=table.arrow_schema.names))
    assert [part.tolist() for part, _ in found] == [[0, 1], [2]]
    rows = pa.concat_tables([rows for _, rows in found])
    assert rows.schema == table.arrow_schema
    assert [list(row.values())[:4] for row in rows.to_pylist()] == [
        [1, "a", {"x": 1, "y": None}, None],
        [2, "b", None, None],
        [3, None, {"x": None, "y": None}, None],
    ]
    assert rows.column("points").to_pylist() == [[{"x": 1, "y": None}, None], None, []]
    assert {str(day) for day in rows.column("day").to_pylist()} == {"2026-01-02"}
    ((_, nothing),) = table.rows(DataFile(file), at=np.array([1]), columns=["new", "day"])
    assert [str(value) for value in nothing.to_pylist()[0].values()] == ["None", "2026-01-02"]


def test_a_partition_s_time_without_a_zone_is_no_value(tmp_path: Path) -> None:
    """Each reader takes it for a time of its own zone, so nobody knows which one the row has."""
    table = table_at(tmp_path, field("id", "long"), field("at", "timestamp"), by=["at"])
    path = str(tmp_path / "old.parquet")
    pq.write_table(pa.table({"id": [1, 2]}), path)
    file = IndexedFile(path, 0, {"at": "2026-01-01 03:04:05"})
    ((_, rows),) = table.rows(DataFile(file), at=np.array([1]), columns=["id"])
    assert rows.to_pylist() == [{"id": 2}]
    with pytest.raises(UnreadableRowsError, match=r"no zone \(at\)"):
        list(table.rows(DataFile(file), at=np.array([1]), columns=["id", "at"]))
    ((_, rows),) = table.rows(
        DataFile(IndexedFile(path, 0, {"at": "2026-01-01T03:04:05Z"})), at=np.array([1]), columns=["at"]
    )
    assert rows.column("at").cast(pa.int64()).to_pylist() == [1_767_236_645_000_000]


def all_readings(table: DeltaTableSpec, path: str, partition: Mapping[str, str]) -> list[list[dict[str, Any]]]:
    """A data file's rows as partial updates and moves read them."""
    file = IndexedFile(path, 0, dict(partition))
    count = pq.read_metadata(path).num_rows
    readings = (
        table.rows(DataFile(file), at=np.arange(count), columns=table.arrow_schema.names),
        table.rows(DataFile(file)),
    )
    return [pa.concat_tables(rows for _, rows in found).to_pylist() for found in readings]


def test_names_that_differ_in_case_only(tmp_path: Path) -> None:
    """`CONVERT TO DELTA` takes a metastore's names, which are in lower case, and Spark finds columns by them."""
    point = struct(field("xaxis", "long"))
    table = table_at(tmp_path, field("id", "long"), field("customername", "string"), field("point", point))
    path = str(tmp_path / "theirs.parquet")
    pq.write_table(pa.table({"ID": [1], "customerName": ["a"], "point": [{"xAxis": 7}]}), path)
    file, expected = IndexedFile(path, 0, {}), {"id": 1, "customername": "a", "point": {"xaxis": 7}}
    ((_, present),) = table.rows(DataFile(file), at=np.array([0]), columns=table.arrow_schema.names)
    ((_, copied),) = table.rows(DataFile(file))
    assert present.to_pylist() == copied.to_pylist() == [expected]
    pq.write_table(pa.table({"id": [1], "customername": ["a"], "point": [{"xAxis": 7}]}), path)
    assert all_readings(table, path, {}) == [[expected]] * 2
    pq.write_table(pa.table({"id": [1], "customername": ["a"], "CustomerName": ["b"]}), path)
    assert next(table.rows(DataFile(file), at=np.array([0]), columns=["customername"]))[1].to_pylist() == [
        {"customername": "a"}
    ]
    pq.write_table(pa.table({"id": [1], "customerName": ["a"], "CustomerName": ["b"]}), path)
    with pytest.raises(UnreadableRowsError, match="customerName and CustomerName"):
        list(table.rows(DataFile(file), at=np.array([0]), columns=["customername"]))


@pytest.mark.parametrize("mode", ["name", "id"])
def test_a_field_that_was_dropped_and_added_again_is_null(tmp_path: Path, mode: str) -> None:
    """Columns were mapped when the table was older, so that names in its files are those of the table."""

    def named(name: str, dtype: Any, number: int, physical: str | None = None) -> dict[str, Any]:
        known = {"delta.columnMapping.id": number, "delta.columnMapping.physicalName": physical or name}
        return field(name, dtype) | {"metadata": known}

    pair = struct(named("b", "long", 3), named("a", "string", 9, "col-9"))
    table = table_at(
        tmp_path, named("id", "long", 1), named("pair", pair, 2), named("pairs", array(pair), 4),
        properties={"delta.columnMapping.mode": mode},
    )  # fmt: skip
    parts = [pa.field(name, dtype, True, {"PARQUET:field_id": str(number)})
             for name, dtype, number in (("b", pa.int64(), 3), ("a", pa.string(), 5))]  # fmt: skip
    stored = pa.schema(
        [
            pa.field("id", pa.int64(), True, {"PARQUET:field_id": "1"}),
            pa.field("pair", pa.struct(parts), True, {"PARQUET:field_id": "2"}),
            pa.field("pairs", pa.list_(pa.struct(parts)), True, {"PARQUET:field_id": "4"}),
        ]
    )
    old = {"b": 1, "a": "secret"}
    path = str(tmp_path / "old.parquet")
    pq.write_table(pa.Table.from_pylist([{"id": 1, "pair": old, "pairs": [old]}], stored), path)
    new = {"b": 1, "a": None}
    assert all_readings(table, path, {}) == [[{"id": 1, "pair": new, "pairs": [new]}]] * 2


def test_the_log_says_the_partition_also_if_the_file_does(tmp_path: Path) -> None:
    table = table_at(tmp_path, field("id", "long"), field("day", "string"), by=["day"])
    path = str(tmp_path / "both.parquet")
    pq.write_table(pa.table({"id": [1], "day": ["2024-01-01"]}), path)
    assert all_readings(table, path, {"day": "2024-02-02"}) == [[{"id": 1, "day": "2024-02-02"}]] * 2


def test_null_structs_whose_fields_are_not_nullable(tmp_path: Path) -> None:
    """Whatever the file says of the fields, and as rows that can be written again."""
    inner = struct(field("z", "string", nullable=False))
    point = struct(field("x", "long", nullable=False), field("inner", inner, nullable=False))
    table = table_at(tmp_path, field("id", "long"), field("point", point))
    rows = [{"x": 1, "inner": {"z": "a"}}, None]
    path = str(tmp_path / "any.parquet")
    stored = pa.struct([("x", pa.int32()), ("inner", pa.struct([("z", pa.string())]))])
    pq.write_table(pa.table({"id": [1, 2], "point": pa.array(rows, stored)}), path)
    ((_, found),) = table.rows(DataFile(IndexedFile(path, 0, {})), at=np.array([0, 1]), columns=["point"])
    assert found.column("point").to_pylist() == rows
    again = str(tmp_path / "again.parquet")
    pq.write_table(found, again)
    assert pq.read_table(again).column("point").to_pylist() == rows


def test_values_that_the_table_can_t_have(tmp_path: Path) -> None:
    """They are no error of the file's format, which would stop the table."""
    point = struct(field("x", "long", nullable=False))
    table = table_at(tmp_path, field("id", "long"), field("at", "timestamp_ntz"), field("point", point))
    path = str(tmp_path / "any.parquet")
    old = {
        "id": pa.array([{"x": 1}]),
        "at": pa.array([1], pa.timestamp("ns")),
        "point": pa.array([{"x": None}], pa.struct([("x", pa.int64())])),
    }
    pq.write_table(pa.table(old), path, store_schema=False)
    for name in old:
        with pytest.raises(UnreadableRowsError, match=f"{path} has values of column {name} that can't be read as "):
            list(table.rows(DataFile(IndexedFile(path, 0, {})), at=np.array([0]), columns=[name]))


def test_files_without_field_ids_in_a_table_that_finds_columns_by_them(tmp_path: Path) -> None:
    table = table_at(tmp_path, field("id", "long", 1), properties={"delta.columnMapping.mode": "id"})
    path = str(tmp_path / "any.parquet")
    pq.write_table(pa.table({"col-1": [1]}), path)
    with pytest.raises(UnreadableRowsError, match="has no field ids"):
        list(table.rows(DataFile(IndexedFile(path, 0, {})), at=np.array([0]), columns=["id"]))


@pytest.mark.parametrize(
    ("notes", "is_legacy"),
    [
        ({"org.apache.spark.version": "3.5.0", "org.apache.spark.legacyDateTime": ""}, True),
        ({"org.apache.spark.version": "3.5.0", "org.apache.spark.legacyINT96": ""}, True),
        ({"org.apache.spark.version": "2.4.8"}, True),
        ({"org.apache.spark.version": "3.5.0"}, False),
        ({}, False),
    ],
)
def test_dates_of_another_calendar(tmp_path: Path, notes: dict[str, str], is_legacy: bool) -> None:
    """Old files of Spark have dates and times of the Julian calendar, also inside of a struct."""
    day = struct(field("day", "date"))
    table = table_at(tmp_path, field("id", "long"), field("at", "timestamp"), field("span", day), field("new", "date"))
    path = str(tmp_path / "any.parquet")
    old = pa.table(
        {
            "id": [1],
            "at": pa.array([0], pa.timestamp("us", "UTC")),
            "span": pa.array([{"day": None}], pa.struct([("day", pa.date32())])),
        }
    )
    with pq.ParquetWriter(path, old.schema, store_schema=False) as writer:
        writer.write_table(old)
        writer.add_key_value_metadata(notes)
    file = IndexedFile(path, 0, {})
    for name in table.arrow_schema.names:
        if is_legacy and name in ("at", "span"):
            with pytest.raises(UnreadableRowsError, match=f"{path} has dates or times of the Julian calendar"):
                list(table.rows(DataFile(file), at=np.array([0]), columns=[name]))
        else:
            assert len(list(table.rows(DataFile(file), at=np.array([0]), columns=[name]))) == 1
    # a rewrite too, which would say of the new file that its dates are of today's calendar
    same = table_at(tmp_path, field("id", "long"), field("at", "timestamp"), field("span", day))
    with pytest.raises(UnreadableRowsError, match="Julian calendar") if is_legacy else nullcontext():
        assert len(list(same.rows(DataFile(file)))) == 1
