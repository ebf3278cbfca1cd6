"""Partial updates in Iceberg tables (`tests.sink.partial_story`), read back by PyIceberg."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.table import StaticTable
from pyspark.sql import SparkSession

from tests.sink.harness import Job, crashing
from tests.sink.partial_story import FIRST, play_read_again, play_toast, play_tools, toast_job

pytestmark = pytest.mark.spark


def rows(job: Job) -> list[dict[str, Any]]:
    """As PyIceberg reads them."""
    metadata = max(
        (job.table_folder / "metadata").glob("v*.metadata.json"), key=lambda p: int(p.name[1:].split(".")[0])
    )
    found = StaticTable.from_metadata(str(metadata)).scan().to_arrow().to_pylist()
    return sorted(found, key=lambda row: int(row["id"]))


@pytest.mark.parametrize("version", ["2", "3"])
def test_unchanged_toast_values_are_kept(spark: SparkSession, tmp_path: Path, version: str) -> None:
    """In v2 the table is partitioned by what an update leaves out; in v3 a column gets another name."""
    job = toast_job(Job(spark, tmp_path, properties={"format-version": version}))
    job.partition_by = ["truncate(1, big)"] if version == "2" else ()

    def foreign() -> None:
        job.append([FIRST | {"id": 3}])
        if version == "3":
            spark.sql(f"ALTER TABLE {job.target} RENAME COLUMN arr TO list")
            spark.sql(f"ALTER TABLE {job.target} RENAME COLUMN list TO arr")
            spark.sql(f"ALTER TABLE {job.target} ALTER COLUMN arr AFTER big")

    play_toast(job, partial(rows, job), partial(crashing, "before the commit"), foreign)
    job.check_deletes()


def test_updates_of_tools_that_send_only_what_changed(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(spark, tmp_path)
    play_tools(job, partial(rows, job))


def test_a_kept_dead_letter_is_applied_when_it_is_read_again(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(spark, tmp_path)

    def forget() -> None:
        spark.sql(f"ALTER TABLE {job.target} UNSET TBLPROPERTIES ('rowdelta.{job.sink_id}.position')")

    play_read_again(job, partial(rows, job), forget)
