"""Partial updates in Delta tables (`tests.sink.partial_story`), read back by delta-rs."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from deltawriters.keyindex import IndexedFile
from tests.delta.harness import DeltaJob, crashing
from tests.delta.readers import READERS
from tests.delta.test_writers import field, struct, table_at
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


def test_rows_of_files_that_are_older_than_the_schema(tmp_path: Path) -> None:
    """Columns were renamed, widened and added, inside of a struct too. A partition column is in no file."""
    point = struct(field("x", "long", 4), field("y", "string", 5))
    table = table_at(
        tmp_path,
        field("id", "long", 1), field("note", "string", 2), field("point", point, 3), field("new", "string", 6),
        field("day", "date", 7),
        by=["day"], properties={"delta.columnMapping.mode": "name"},
    )  # fmt: skip
    path = str(tmp_path / "old.parquet")
    place = pa.array([{"col-4": 1}, None, {"col-4": None}], pa.struct([("col-4", pa.int32())]))
    old = pa.table({"col-2": ["a", "b", None], "col-3": place, "col-1": pa.array([1, 2, 3], pa.int32())})
    pq.write_table(old, path, row_group_size=2)
    file = IndexedFile(path, 0, json.loads('{"col-7": "2026-01-02"}'))
    found = list(table.present_rows(file, np.array([0, 1, 2]), table.arrow_schema.names))
    assert [part for part, _ in found] == [slice(0, 2), slice(2, 3)]
    rows = pa.concat_tables([rows for _, rows in found])
    assert rows.schema == table.arrow_schema
    assert [list(row.values())[:4] for row in rows.to_pylist()] == [
        [1, "a", {"x": 1, "y": None}, None],
        [2, "b", None, None],
        [3, None, {"x": None, "y": None}, None],
    ]
    assert {str(day) for day in rows.column("day").to_pylist()} == {"2026-01-02"}
    ((_, nothing),) = table.present_rows(file, np.array([1]), ["new", "day"])
    assert [str(value) for value in nothing.to_pylist()[0].values()] == ["None", "2026-01-02"]
