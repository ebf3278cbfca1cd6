"""Files are rewritten beside the stream. The table's rows stay the same, whatever micro-batches do meanwhile."""

import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from sink.targets.iceberg import rewritables
from tests.rewrites import ALL_FILES, only_sink, rewriting
from tests.sink.harness import Changes, CrashError, Job, before_rewrite, crashing

pytestmark = pytest.mark.spark

BOTH = pytest.mark.parametrize("version", [2, 3])


def new_job(spark: SparkSession, folder: Path, version: int, **arguments: Any) -> Job:
    return Job(spark, folder, properties={"format-version": str(version)}, **arguments)


@BOTH
@pytest.mark.parametrize("partition_by", [(), ("bucket(2, id)",)])
def test_rows_change_while_their_files_are_rewritten(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture, version: int, partition_by: tuple[str, ...]
) -> None:
    caplog.set_level(logging.INFO, "rowdelta")
    job = new_job(spark, tmp_path, version, partition_by=partition_by, tasks=1)
    changes = Changes(job)
    changes.write(16)
    with rewriting() as done:
        job.run()
    assert len(done) == 3
    assert all(done), caplog.text
    assert job.rows() == changes.expected()
    job.check_deletes()
    assert job.check_index() is not None
    assert "catching up" not in caplog.text, "the index knows where the rows are now"
    assert "rewrote" in caplog.text
    # another process goes on
    changes.write(2)
    job.run()
    assert job.rows() == changes.expected()
    assert job.check_index() is not None


def test_every_micro_batch_deletes_from_every_file_while_all_are_rewritten(spark: SparkSession, tmp_path: Path) -> None:
    """Neither gives way: the new files get the deletes that were made meanwhile."""
    job = new_job(spark, tmp_path, 3, tasks=1, table={"merge_small_files": False})
    rows = dict.fromkeys(range(60), "new")
    for start in range(0, 60, 20):  # three files
        job.write([("+I", {"id": key, "region": "new"}) for key in range(start, start + 20)])
    for number in range(8):
        for key in range(number, 60, 10):  # rows of all files, old and new
            rows[key] = f"r{number}"
        job.write([("+U", {"id": key, "region": f"r{number}"}) for key in range(number, 60, 10)])
    with rewriting(("nothing", "nothing", "begin", "nothing", "write", "nothing", "adopt")) as done:
        job.run()
    assert len(done) == 1
    assert done[0] is not None
    assert job.rows() == [{"id": key, "region": region} for key, region in sorted(rows.items())]
    job.check_deletes()
    assert job.check_index() is not None


def test_row_ids_stay(spark: SparkSession, tmp_path: Path) -> None:
    job = new_job(spark, tmp_path, 3, tasks=1, table={"merge_small_files": False})
    for start in range(0, 30, 10):
        job.write([("+I", {"id": key, "region": "new"}) for key in range(start, start + 10)])
    job.run()
    columns = "id, _row_id, _last_updated_sequence_number"
    before = spark.sql(f"SELECT {columns} FROM {job.target} ORDER BY id").collect()
    sink = only_sink(job)
    begun = sink.begin_rewrite(ALL_FILES)
    assert begun is not None
    assert sink.write_rewrite(begun)
    assert sink.end_rewrite(begun) is not None
    assert len(job.files()) == 1
    assert spark.sql(f"SELECT {columns} FROM {job.target} ORDER BY id").collect() == before


@BOTH
def test_files_of_an_older_schema(spark: SparkSession, tmp_path: Path, version: int) -> None:
    job = new_job(spark, tmp_path, version, tasks=1, table={"merge_small_files": False}, configure_columns=False)
    changes = Changes(job)
    changes.write(2)
    job.run()
    spark.sql(f"ALTER TABLE {job.target} ADD COLUMN note string")
    changes.write(1)
    job.run()
    sink = only_sink(job)
    begun = sink.begin_rewrite(ALL_FILES)
    assert begun is not None
    assert sink.write_rewrite(begun)
    assert sink.end_rewrite(begun) is not None
    assert len([file for file in job.files() if file["content"] == 0]) == 1
    found = [{name: value for name, value in row.items() if name != "seq"} for row in job.rows()]
    assert found == [row | {"note": None} for row in changes.expected()]
    assert job.check_index() is not None


@pytest.mark.parametrize("what", ["compaction", "compaction at the commit", "append", "delete"])
def test_others_change_the_table_meanwhile(
    spark: SparkSession, tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A rewrite whose files others changed gives way; one whose files are as they were is done."""
    caplog.set_level(logging.INFO, "rowdelta")
    job = new_job(spark, tmp_path, 3, tasks=1, table={"merge_small_files": False})
    rows = dict.fromkeys(range(30), "new")
    for start in range(0, 30, 10):
        job.write([("+I", {"id": key, "region": "new"}) for key in range(start, start + 10)])
    job.run()
    sink = only_sink(job)
    begun = sink.begin_rewrite(ALL_FILES)
    assert begun is not None
    assert sink.write_rewrite(begun)
    if what == "compaction":
        job.compact()
    elif what == "append":
        job.append([{"id": 99, "region": "theirs"}])
        rows[99] = "theirs"
    elif what == "delete":
        spark.sql(f"DELETE FROM {job.target} WHERE id = 3")
        del rows[3]
    with before_rewrite(job.compact) if what == "compaction at the commit" else nullcontext():
        done = sink.end_rewrite(begun)
    assert (done is not None) == (what == "append"), caplog.text
    assert job.rows() == [{"id": key, "region": region} for key, region in sorted(rows.items())]
    assert job.unreferenced_files() == []
    job.write([("+U", {"id": 3, "region": "changed"})])
    job.run()
    rows[3] = "changed"
    assert job.rows() == [{"id": key, "region": region} for key, region in sorted(rows.items())]
    assert job.check_index() is not None


@pytest.mark.parametrize("fault", ["before a rewrite", "after a rewrite"])
def test_a_crash_around_the_commit(spark: SparkSession, tmp_path: Path, fault: Any) -> None:
    """The next process goes on with whichever files the table has."""
    job = new_job(spark, tmp_path, 3, tasks=1, table={"merge_small_files": False})
    changes = Changes(job)
    changes.write(4)
    job.run()
    sink = only_sink(job)
    begun = sink.begin_rewrite(ALL_FILES)
    assert begun is not None
    assert sink.write_rewrite(begun)
    with crashing(fault), pytest.raises(CrashError):
        sink.end_rewrite(begun)
    changes.write(3)
    job.run()
    assert job.rows() == changes.expected()
    job.check_deletes()
    assert job.check_index() is not None


def test_each_file_of_a_large_table_has_its_turn(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = new_job(spark, tmp_path, 3, tasks=1, table={"merge_small_files": False})
    for key in range(3):
        job.write([("+I", {"id": key, "region": "new"})])
    job.run()
    monkeypatch.setattr(rewritables, "_MOST_FILES", 2)
    table = only_sink(job).table
    looks = [[file.small.path for file in table.rewritables()] for _ in range(40)]
    assert {len(found) for found in looks} == {2}
    assert len({path for found in looks for path in found}) == 3
