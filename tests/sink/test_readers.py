"""Tables with `deletes: position` are read alike by engines that aren't Spark: PyIceberg and polars."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from pyiceberg.table import StaticTable
from pyspark.sql import SparkSession

from tests.sink.harness import Job, Row, merging_soon

pytestmark = pytest.mark.spark


@pytest.mark.parametrize("version", ["2", "3"])
@pytest.mark.parametrize("partition_by", [[], ["bucket(4, id)"]])
@pytest.mark.parametrize("merged", [False, True])
def test_other_engines_read_the_same_rows(
    spark: SparkSession, tmp_path: Path, version: str, partition_by: list[str], merged: bool
) -> None:
    """:param merged: there was a minor compaction."""
    job = Job(spark, tmp_path, partition_by=partition_by, properties={"format-version": version})
    for first in range(3):
        upserts = [("+U", {"id": key, "region": f"r{first}"}) for key in range(first * 3, first * 3 + 9)]
        job.write([*upserts, ("-D", {"id": first, "region": None})])
    with merging_soon() if merged else nullcontext():
        job.run()
    expected = job.rows()
    assert len(expected) == 12
    assert any("rowdelta.minor-compaction" in snapshot["summary"] for snapshot in job.snapshots()) == merged

    metadata = _latest_metadata(job)
    assert _sorted(StaticTable.from_metadata(metadata).scan().to_arrow().to_pylist()) == expected
    assert _sorted(pl.scan_iceberg(metadata).collect().to_dicts()) == expected


def _latest_metadata(job: Job) -> str:
    """Of a hadoop catalog's table: the highest version."""
    versions = (job.table_folder / "metadata").glob("v*.metadata.json")
    return str(max(versions, key=lambda path: int(path.name[1:].split(".")[0])))


def _sorted(rows: list[dict[str, Any]]) -> list[Row]:
    return sorted(rows, key=lambda row: row["id"])
