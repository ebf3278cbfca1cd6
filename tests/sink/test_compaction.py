"""`compact_every`: the sink compacts its tables itself, between micro-batches."""

import logging
from pathlib import Path
from typing import Literal

import pytest
from pyspark.sql import SparkSession

from sink.targets.iceberg.compaction import RewriteDataFiles
from sink.targets.iceberg.table import IcebergTable
from tests.rewrites import only_sink
from tests.sink.harness import Changes, Job

pytestmark = pytest.mark.spark

EVERY = 5


def new_job(spark: SparkSession, folder: Path, deletes: Literal["position", "equality"], version: int) -> Job:
    properties = {"format-version": str(version)}
    table = {"compact_every": EVERY, "merge_small_files": False}
    return Job(spark, folder, tasks=1, deletes=deletes, properties=properties, table=table)


@pytest.fixture
def job(spark: SparkSession, tmp_path: Path) -> Job:
    return new_job(spark, tmp_path, "position", 3)


def compactions(job: Job) -> list[int]:
    """How many commits the sink had made at each compaction."""
    made, found = 0, set()
    for snapshot in job.snapshots():
        if snapshot["operation"] == "replace":
            found.add(made)
        else:
            made += 1
    return sorted(found)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("deletes", ["position", "equality"])
def test_after_so_many_commits(
    spark: SparkSession,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    deletes: Literal["position", "equality"],
    version: int,
) -> None:
    caplog.set_level(logging.INFO, "rowdelta")
    job = new_job(spark, tmp_path, deletes, version)
    changes = Changes(job)
    changes.write(2 * EVERY)
    job.run()
    assert compactions(job) == [EVERY, 2 * EVERY]
    assert "commits by others" not in caplog.text
    assert ("1 compaction of its own: " in caplog.text) == (deletes == "position")
    assert caplog.text.count(f"{job.target}: compacting after {EVERY} commits") == 2
    stays = int(deletes == "equality")  # where there are equality deletes one file stays
    assert f"{job.target}: compacted {EVERY + 1} data files into 1" in caplog.text
    # In tables that never had partitions Iceberg (1.11) drops some deletes without effect, and keeps others for a
    # while. A reader opens those that may apply: position deletes are written in the commit before at the latest.
    planned = job.planned_files()
    assert len(planned) == 1 + stays
    if deletes == "position":
        assert len(planned[0][1]) <= (1 if version == 2 else 0)
    assert job.rows() == changes.expected()
    changes.write(2)
    job.run()
    assert compactions(job) == [EVERY, 2 * EVERY]
    assert job.rows() == changes.expected()
    if deletes == "position":
        job.check_deletes()
        assert job.check_index() is not None


@pytest.mark.parametrize("partition_by", [(), ("region",)])
def test_deletes_that_come_while_all_files_are_compacted(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, partition_by: tuple[str, ...]
) -> None:
    """Iceberg drops delete files that are older than all data files that it leaves alone."""
    job = Job(spark, tmp_path, tasks=1, properties={"format-version": "2"}, partition_by=partition_by)
    job.deletes = "equality"
    for key in range(6):
        job.write([("+I", {"id": key, "region": "eu"})])
    job.write([("-D", {"id": 0, "region": "eu"})])
    job.run()
    table = only_sink(job).newest_table()
    assert isinstance(table, IcebergTable)
    compaction = RewriteDataFiles(table, 1)
    since_last = compaction._since_last

    def meanwhile() -> int:
        found = since_last()
        job.write([("-D", {"id": 1, "region": "eu"}), ("-D", {"id": 4, "region": "eu"})])
        job.write([("+I", {"id": 9, "region": "us"})])
        job.run()
        return found

    monkeypatch.setattr(compaction, "_since_last", meanwhile)
    done = compaction.after_commit()
    assert done is not None
    assert done.touched > 2
    assert [row["id"] for row in job.rows()] == [2, 3, 5, 9]


def test_deletes_that_reach_into_all_partitions_stay(spark: SparkSession, tmp_path: Path) -> None:
    """Iceberg considers these deletes dangling, because it compares them only with data files of their own spec."""
    job = Job(spark, tmp_path, tasks=1, deletes="equality", partition_by=["region"], table={"compact_every": 2})
    job.write([("+I", {"id": key, "region": "eu" if key < 4 else "us"}) for key in range(8)])
    # the file of "us" has two deletes and is rewritten, the file of "eu" has one and isn't
    for key in (4, 5, 0):
        job.write([("+U", {"id": key, "region": "ap"})])
    job.run()
    assert compactions(job) == [4]
    moved = {0: "ap", 4: "ap", 5: "ap"}
    expected = [(key, moved.get(key, "eu" if key < 4 else "us")) for key in range(8)]
    assert [(row["id"], row["region"]) for row in job.rows()] == expected
    assert [file["content"] for file in job.files()].count(2), "what it is about"


def test_commits_are_counted_across_runs_and_from_a_compaction_of_others(job: Job) -> None:
    changes = Changes(job)
    for number in range(1, EVERY + 6):
        changes.write(1)
        job.run()
        if number == 4:
            job.compact()
    assert compactions(job) == [4, 4 + EVERY]
    assert job.rows() == changes.expected()


def test_a_compaction_that_fails_stops_nothing(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    """It is tried again after as many commits."""
    changes = Changes(job)
    changes.write(2)
    job.run()
    (path, *_) = sorted(path for path in (job.table_folder / "data").rglob("*.parquet") if "delete" not in path.name)
    away = path.rename(job.folder / "away")
    changes.write(2 * EVERY - 3)
    job.run()
    assert f"{job.target}: not compacted, tried again after {EVERY} commits: " in caplog.text
    assert compactions(job) == []
    away.rename(path)
    assert job.rows() == changes.expected()
    changes.write(1)
    job.run()
    assert compactions(job) == [2 * EVERY]
    assert job.rows() == changes.expected()
