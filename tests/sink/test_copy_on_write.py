"""`deletes: copy-on-write`: files with old rows are replaced, and the table never gets a delete file."""

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from sink.errors import TableError
from sink.table import copy_on_write
from tests.rewrites import only_sink, rewritten_files, with_null_keys
from tests.sink.harness import Changes, Job, before_commit, by_pyiceberg, merging_soon

pytestmark = pytest.mark.spark

BOTH = pytest.mark.parametrize("version", [2, 3])


def new_job(spark: SparkSession, folder: Path, version: int, **arguments: Any) -> Job:
    properties = {"format-version": str(version)} | arguments.pop("properties", {})
    return Job(spark, folder, deletes="copy-on-write", properties=properties, **arguments)


@contextmanager
def in_tasks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copy_on_write, "_ON_DRIVER", -1)
        patch.setattr(copy_on_write, "_LEAST", 1)
        patch.setattr(copy_on_write, "_WORTH_A_TASK", 1)
        yield


def deletes(job: Job) -> list[str]:
    return [file["file_path"] for file in job.files() if file["content"] != 0]


def copied(caplog: pytest.LogCaptureFixture) -> list[tuple[int, ...]]:
    """Of each commit that replaced files: touched, total, written, rows copied."""
    found = re.findall(r"(\d+) of (\d+) files? replaced by (\d+): ([\d,]+) rows? copied", caplog.text)
    return [tuple(int(number.replace(",", "")) for number in numbers) for numbers in found]


@pytest.mark.parametrize(
    ("partition_by", "version"), [((), 2), pytest.param(("truncate(2, region)",), 3, marks=pytest.mark.versions)]
)
def test_the_table_never_gets_a_delete_file(
    spark: SparkSession, tmp_path: Path, version: int, partition_by: tuple[str, ...]
) -> None:
    job = new_job(spark, tmp_path, version, partition_by=partition_by)
    changes = Changes(job)
    changes.write(3)
    job.run()
    with in_tasks():
        changes.write(2)
        job.run()
    assert job.rows() == by_pyiceberg(job) == changes.expected()
    assert job.check_index() is not None
    assert job.unreferenced_files() == []
    assert {snapshot["summary"]["total-delete-files"] for snapshot in job.snapshots()} == {"0"}
    operations = [snapshot["operation"] for snapshot in job.snapshots() if snapshot["operation"] != "replace"]
    assert operations == ["append"] + ["overwrite"] * 4
    changes = Changes(job)
    job.write([("-D", row) for row in job.rows()])
    job.run()
    assert job.rows() == [] == job.files()


def test_only_what_is_touched_is_replaced(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No file, some files, all files."""
    caplog.set_level(logging.INFO, "rowdelta")
    job = new_job(spark, tmp_path, 3, partition_by=("region",), tasks=1)
    job.write([("+I", {"id": n, "region": "abc"[n % 3]}) for n in range(30)])
    job.write([("+I", {"id": 100, "region": "d"})])
    job.write([("+U", {"id": 3, "region": "a"}), ("-D", {"id": 6, "region": "a"})])
    job.write([("+U", {"id": n, "region": "b"}) for n in (0, 1, 2, 100)])
    job.run()
    # then of partition a the copied file and that with the new row 3; partition d; b and c
    assert copied(caplog) == [(1, 4, 1, 8), (4, 5, 3, 25)]
    before = [(snapshot["summary"]["deleted-data-files"]) for snapshot in job.snapshots()[2:]]
    assert before == ["1", "4"]
    expected = {n: "abc"[n % 3] for n in range(30) if n != 6} | {0: "b", 1: "b", 2: "b", 100: "b"}
    assert job.rows() == by_pyiceberg(job) == [{"id": n, "region": text} for n, text in sorted(expected.items())]
    assert job.check_index() is not None


@BOTH
@pytest.mark.parametrize("before", ["position", "equality"])
def test_a_file_loses_the_deletes_that_it_has(spark: SparkSession, tmp_path: Path, version: int, before: Any) -> None:
    """They are of another mode and of another writer. The files that aren't touched keep theirs."""
    properties = {"write.delete.mode": "merge-on-read", "write.distribution-mode": "none"}
    job = new_job(spark, tmp_path, version, properties=properties, tasks=1)
    job = replace(job, deletes=before, table={"merge_small_files": False})
    job.write([("+I", {"id": n, "region": "a"}) for n in range(10)])
    job.write([("+I", {"id": n, "region": "b"}) for n in range(10, 20)])
    job.write([("-D", {"id": n, "region": None}) for n in (1, 2, 11, 12)])
    job.run()
    spark.sql(f"DELETE FROM {job.target} WHERE id IN (3, 13)").collect()
    assert deletes(job)
    writer, job = job, replace(job, deletes="copy-on-write")
    job._sequence, job._files = writer._sequence, writer._files
    with in_tasks():
        job.write([("+U", {"id": 0, "region": "new"})])
        job.run()
        planned = job.planned_files()
        assert {bool(found) for _, found in planned} == {True, False}
        assert job.check_index() is not None
        left = [n for n in range(20) if n not in (1, 2, 3, 11, 12, 13)]
        expected = {n: "a" if n < 10 else "b" for n in left} | {0: "new"}
        assert job.rows() == [{"id": n, "region": text} for n, text in expected.items()]
        job.write([("+U", {"id": 10, "region": "new"})])
        job.run()
    assert [found for _, found in job.planned_files() if found] == []
    if before == "position":
        assert deletes(job) == []
        assert by_pyiceberg(job) == job.rows()
    assert job.rows() == [{"id": n, "region": text} for n, text in (expected | {10: "new"}).items()]
    assert job.check_index() is not None


@BOTH
def test_others_commit_meanwhile(spark: SparkSession, tmp_path: Path, version: int) -> None:
    """An append of a key that the micro-batch changes, a compaction and a delete: the files are replaced anew."""
    job = new_job(spark, tmp_path, version, tasks=1, properties={"write.delete.mode": "merge-on-read"})
    job.write([("+I", {"id": n, "region": "a"}) for n in range(10)])
    job.run()

    def delete() -> None:
        spark.sql(f"DELETE FROM {job.target} WHERE id = 5").collect()

    expected = dict.fromkeys(range(10), "a")
    others: list[Callable[[], None]] = [lambda: job.append([{"id": 1, "region": "theirs"}]), job.compact, delete]
    for number, happens in enumerate(others):
        new = {1: str(number), 7 + number: "c", 20 + number: "b"}
        job.write([("+U", {"id": key, "region": region}) for key, region in new.items()])
        with before_commit(happens):
            job.run()
        expected |= new
    del expected[5]
    assert job.rows() == by_pyiceberg(job) == [{"id": n, "region": text} for n, text in sorted(expected.items())]
    assert deletes(job) == []
    assert job.check_index() is not None
    assert job.unreferenced_files() == []


@BOTH
def test_small_files_are_merged(spark: SparkSession, tmp_path: Path, version: int) -> None:
    """Also those that replaced others."""
    job = new_job(spark, tmp_path, version, partition_by=("truncate(1, region)",))
    changes = Changes(job)
    changes.write(7)
    with merging_soon():
        job.run()
    merged = [snapshot["summary"] for snapshot in job.snapshots() if snapshot["operation"] == "replace"]
    assert len(merged) > 1
    assert all(summary["total-delete-files"] == "0" for summary in merged)
    assert job.rows() == by_pyiceberg(job) == changes.expected()
    assert job.check_index() is not None


def test_rows_keep_their_ids(spark: SparkSession, tmp_path: Path) -> None:
    """Format version 3: only the row that changed has another id, and another number of its last change."""
    job = new_job(spark, tmp_path, 3, tasks=1)

    def lineage() -> dict[int, tuple[int, int]]:
        rows = spark.sql(f"SELECT id, _row_id, _last_updated_sequence_number FROM {job.target}").collect()
        return {row[0]: (row[1], row[2]) for row in rows}

    job.write([("+I", {"id": n, "region": "a"}) for n in range(10)])
    job.run()
    before = lineage()
    for number in (3, 4):  # the second one moves rows that were moved before
        job.write([("+U", {"id": number, "region": "b"})])
        with in_tasks():
            job.run()
    after = lineage()
    assert {n: ids for n, ids in after.items() if n not in (3, 4)} == {
        n: ids for n, ids in before.items() if n not in (3, 4)
    }
    assert [after[n][1] for n in (3, 4)] == [2, 3]
    assert len({number for number, _ in after.values()}) == 10


def test_a_large_file_is_shared_out(spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By row groups. Each part becomes a file."""
    caplog.set_level(logging.INFO, "rowdelta")
    job = new_job(spark, tmp_path, 3, tasks=1, properties={"write.parquet.row-group-size-bytes": "20000"})
    loaded = {n: str(n * 7919) for n in range(10_000)}
    job.write([("+I", {"id": n, "region": region}) for n, region in loaded.items()])
    job.run()
    assert len(job.files()) == 1
    job.tasks = 3
    job.write([("+U", {"id": 5_000, "region": "new"})])
    with in_tasks():
        job.run()
    assert copied(caplog) == [(1, 1, 3, 9_999)]
    counts = sorted(found["record_count"] for found in job.files())
    assert counts[0] == 1
    assert counts[1] > 2_000
    assert job.rows() == [{"id": n, "region": region} for n, region in (loaded | {5_000: "new"}).items()]
    assert job.check_index() is not None


def test_files_of_an_earlier_schema_and_partitioning(spark: SparkSession, tmp_path: Path) -> None:
    job = new_job(spark, tmp_path, 3, tasks=1)
    job.write([("+I", {"id": n, "region": "ab"[n % 2]}) for n in range(10)])
    job.run()
    spark.sql(f"ALTER TABLE {job.target} RENAME COLUMN region TO place").collect()
    spark.sql(f"ALTER TABLE {job.target} ADD COLUMN note string").collect()
    job.java_table().updateSpec().addField("place").commit()
    job.columns = {"id": "bigint", "place": "string", "note": "string"}
    job.write([("+U", {"id": 3, "place": "c", "note": "new"})])
    job.run()
    expected = [{"id": n, "place": "ab"[n % 2], "note": None} for n in range(10)]
    expected[3] = {"id": 3, "place": "c", "note": "new"}
    assert job.rows() == by_pyiceberg(job) == expected
    assert len(job.files()) == 3
    assert job.check_index() is not None


@BOTH
def test_rows_of_others_whose_key_is_null_are_copied(spark: SparkSession, tmp_path: Path, version: int) -> None:
    """The key index has none of them."""
    job = new_job(spark, tmp_path, version, tasks=1, configure_columns=False)
    with_null_keys(job, f"'format-version' = '{version}'")
    job.write([("+U", {"id": 1, "region": "new"}), ("-D", {"id": 4, "region": None})])
    with in_tasks():
        job.run()
    job.write([("+U", {"id": 2, "region": "newer"})])
    job.run()
    found = spark.table(job.target).orderBy("region").collect()
    expected = [(None if n % 3 == 0 else n, str(n)) for n in range(12) if n not in (1, 2, 4)]
    assert sorted(map(tuple, found), key=repr) == sorted([*expected, (1, "new"), (2, "newer")], key=repr)
    assert deletes(job) == []
    # and moved later, also beside deletes
    job.deletes = "position"
    job.write([("-D", {"id": 5, "region": None})])
    with merging_soon():
        job.run()
    assert len([file for file in job.files() if file["content"] == 0]) == 1
    job.write([("-D", {"id": 7, "region": None})])
    job.run()
    assert deletes(job)
    sink = only_sink(job)
    assert sink.upkeep.end_rewrite(rewritten_files(sink)) is not None
    assert len([file for file in job.files() if file["content"] == 0]) == 1
    found = spark.table(job.target).orderBy("region").collect()
    left = [row for row in [*expected, (1, "new"), (2, "newer")] if row[0] not in (5, 7)]
    assert sorted(map(tuple, found), key=repr) == sorted(left, key=repr)


def test_what_is_no_parquet_can_not_be_replaced(spark: SparkSession, tmp_path: Path) -> None:
    job = new_job(spark, tmp_path, 2, tasks=1)
    job.write([("+I", {"id": 1, "region": "a"})])
    job.run()
    spark.sql(f"ALTER TABLE {job.target} SET TBLPROPERTIES ('write.format.default' = 'avro')").collect()
    job.append([{"id": 2, "region": "theirs"}])
    job.write([("+U", {"id": 2, "region": "new"})])
    with in_tasks(), pytest.raises(TableError, match=r"avro is no Parquet file.*deletes: position"):
        job.run()
    assert job.rows() == [{"id": 1, "region": "a"}, {"id": 2, "region": "theirs"}]
    assert job.unreferenced_files() == []
