"""`deletes: position`: each test checks one promise. `test_properties` has random changes for it."""

import functools
import json
import logging
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError
from pyspark.sql import SparkSession

from deltawriters.keyindex import BASE, IndexSlice
from deltawriters.keyindex import vector_log as deletion_vectors
from sink import plans
from sink.errors import TableError, TemporaryError
from sink.results import IndexPart, TaskResult
from sink.spark import deletes as delete_tasks
from sink.spark.beside import beside
from sink.spark.engine import HadoopFolder
from sink.spark.keyreading import read_keys
from sink.spark.session import MAINTENANCE_POOL
from sink.table import keyindex
from sink.table.keyindex import KeyIndex
from sink.table.run_merging import RunMerging
from sink.table.written import sum_up
from sink.targets.iceberg import changes as iceberg_changes
from sink.targets.iceberg import position_deletes
from sink.targets.iceberg import uniting as iceberg_uniting
from sink.targets.iceberg.table import IcebergTable
from tests.sink.harness import Change, Job, before_commit, crashing, damage, jvm_calls, tiny_thresholds
from tests.sink.test_commit_faults import Table

pytestmark = pytest.mark.spark


@pytest.fixture(params=["2", "3"], ids=lambda version: f"v{version}")
def job(request: pytest.FixtureRequest, spark: SparkSession, tmp_path: Path) -> Job:
    # foreign writers delete by position, as the sink does
    properties = {"write.delete.mode": "merge-on-read", "write.merge.mode": "merge-on-read"}
    return Job(spark, tmp_path, tasks=1, properties={"format-version": request.param, **properties})


once = pytest.mark.parametrize("job", ["3"], indirect=True, ids=["v3"])
"""How deletes are written doesn't matter here."""


@pytest.fixture(autouse=True)
def _log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rowdelta")


def row(number: int, region: str = "eu") -> dict[str, Any]:
    return {"id": number, "region": region}


def insert(*numbers: int, region: str = "eu") -> list[Change]:
    return [("+I", row(number, region)) for number in numbers]


def update(*numbers: int, region: str = "us") -> list[Change]:
    return [("+U", row(number, region)) for number in numbers]


def delete(*numbers: int) -> list[Change]:
    return [("-D", row(number)) for number in numbers]


def apply(job: Job, *batches: list[Change]) -> None:
    """A run of the job over `batches`, after which index and table agree."""
    for changes in batches:
        job.write(changes)
    job.run()
    job.check_deletes()
    assert job.check_index() is not None


def deletes(job: Job) -> list[tuple[str, int]]:
    """Format and rows of each live delete file."""
    frame = job.spark.sql(f"SELECT file_format, record_count FROM {job.target}.delete_files")
    return sorted((found.file_format, found.record_count) for found in frame.collect())


@contextmanager
def attempts(expected: int) -> Iterator[None]:
    """It takes this many attempts to commit."""
    made: list[int] = []
    with before_commit(lambda: made.append(1), times=99):
        yield
    assert len(made) == expected


# What is deleted


@once
def test_an_insert_of_an_unknown_key_writes_no_delete(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    apply(job, insert(1, 2), insert(3))
    assert deletes(job) == []
    assert "; keys: 1 new |" in caplog.text


def test_an_insert_of_a_known_key_is_an_upsert(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    apply(job, insert(1, 2), insert(2, region="us"))
    assert job.rows() == [row(1), row(2, "us")]
    assert [count for _, count in deletes(job)] == [1]
    assert "; keys: 1 updated |" in caplog.text


@once
def test_a_delete_of_an_unknown_key_is_a_counted_no_op(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    apply(job, insert(1, 2), delete(2, 7))
    assert job.rows() == [row(1)]
    assert [count for _, count in deletes(job)] == [1]
    assert "; keys: 1 deleted, 1 inserted and deleted within the micro-batch, or never there |" in caplog.text


def test_a_micro_batch_of_bad_records_only_has_no_keys_to_show() -> None:
    keys = dict.fromkeys(("inserted", "updated", "deleted", "absent", "duplicates", "completed"), 0)
    begun: Any = SimpleNamespace(started=0.0)
    index = IndexPart([], [], [], {}, keys, [], 0.0)
    written = sum_up(begun, 1, [TaskResult(bad={"null_key": 6}, index=index)], {}, {})
    assert written.shown(copies=True) == "no changes | nothing to write, 6 dead letters"
    keys["duplicates"] = 2
    assert "; keys: 2 duplicate rows removed, 6 dead letters" in written.shown(copies=True)


@pytest.mark.versions
@once
def test_duplicates_of_others_are_all_deleted_on_the_keys_next_change(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    job.pipeline()  # creates the table
    job.append([row(1), row(2), row(2, "us"), row(3)])
    job.append([row(1, "us"), row(2, "ap")])
    apply(job, update(2, region="final"))
    rows = sorted((found["id"], found["region"]) for found in job.rows())
    assert rows == [(1, "eu"), (1, "us"), (2, "final"), (3, "eu")], "key 1 didn't change"
    assert "2 duplicate rows removed" in caplog.text
    apply(job, delete(1))
    assert job.rows() == [row(2, "final"), row(3)]


def test_v3_has_one_deletion_vector_a_data_file_united_with_the_one_before(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(spark, tmp_path, tasks=2, properties={"format-version": "3"})
    apply(job, insert(*range(10)))
    with tiny_thresholds(1 << 20, 10, spark):  # both tasks delete from the same data files
        apply(job, delete(*range(3)))
        first = deletes(job)
        apply(job, delete(*range(3, 9)))
    assert {file_format for file_format, _ in first} == {"PUFFIN"}
    assert sum(count for _, count in first) == 3
    assert sum(count for _, count in deletes(job)) == 9
    assert len(deletes(job)) <= 2, "one for each data file"
    assert job.snapshots()[-1]["summary"]["removed-dvs"] == str(len(first))
    assert job.rows() == [row(9)]


def test_tasks_write_many_deletes_of_v2_however_small_their_vectors_are(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rowdelta")
    job = Job(spark, tmp_path, tasks=1)
    apply(job, insert(*range(1000)))
    monkeypatch.setattr(plans, "ON_DRIVER", 7000)  # bytes, and a row counts 8
    apply(job, delete(*range(800)))
    assert "written by 1 task |" not in caplog.text
    apply(job, insert(*range(1000, 2000)), delete(*range(1000, 1900)))
    assert "deletes in 1 data file written by 1 task |" in caplog.text
    assert len(job.rows()) == 300


@pytest.mark.parametrize("partition_by", [[], ["region"]])
def test_v2_has_one_delete_file_for_all_tasks_of_a_commit(
    spark: SparkSession, tmp_path: Path, partition_by: list[str]
) -> None:
    """In a partitioned table one a partition. A scan reads each of them with each data file of its partition."""
    job = Job(spark, tmp_path, tasks=2, partition_by=partition_by)
    apply(job, insert(*range(20)) + insert(*range(20, 40), region="us"))
    with tiny_thresholds(1 << 20, 100, spark, on_driver=1 << 20):
        apply(job, delete(*range(9), *range(20, 29)))
        apply(job, delete(*range(9, 18)))
    files = [("PARQUET", 9), ("PARQUET", 9), ("PARQUET", 9)]
    assert deletes(job) == (files if partition_by else [("PARQUET", 9), ("PARQUET", 18)])
    assert [found["id"] for found in job.rows()] == [18, 19, *range(29, 40)]


def test_deletes_that_can_t_be_written_leave_nothing_behind(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    apply(job, insert(1, 2))

    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(position_deletes, "delete_rows", full)
        patch.setattr(iceberg_uniting, "write_deletion_vectors", full)
        job.write(update(1))
        with pytest.raises(
            TemporaryError,
            match=r"could not be read or written: No space left on device\. Nothing was applied; run again",
        ):
            job.run()
    assert job.rows() == [row(1), row(2)]
    assert job.unreferenced_files() == []
    apply(job)
    assert job.rows() == [row(1, "us"), row(2)]


def test_tasks_that_can_t_read_a_vector_leave_nothing_behind(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two tasks finds the old vector damaged. The other one has written its file by then."""
    monkeypatch.setattr(plans, "ON_DRIVER", 0)
    monkeypatch.setattr(delete_tasks, "_LEAST", 1)
    job = Job(spark, tmp_path, tasks=1, properties={"format-version": "3"})
    apply(job, insert(*range(10)), insert(*range(10, 20)), delete(1), delete(11))
    files = sorted((job.table_folder / "data").glob("*.puffin"))
    assert len(files) == 2
    content = files[0].read_bytes()
    files[0].write_bytes(content[:12] + bytes([content[12] ^ 1]) + content[13:])  # in the vector, not in the footer
    job.write(delete(2, 12))
    with pytest.raises(TableError, match=r"vector of the table can't be read.*Nothing was applied"):
        job.run()
    assert job.unreferenced_files() == []
    assert list(job.index_folder.rglob("*-positions")) == []
    files[0].write_bytes(content)
    apply(job)
    assert job.rows() == [row(key) for key in range(20) if key % 10 not in (1, 2)]
    assert len([count for _, count in deletes(job)]) == 2
    assert list(job.index_folder.rglob("*-positions")) == []


@pytest.mark.parametrize("on_driver", [0, plans.ON_DRIVER], ids=["tasks", "driver"])
def test_position_deletes_of_v2_go_on_as_vectors_when_the_table_is_upgraded(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_driver: int
) -> None:
    """Readers ignore a data file's Parquet position deletes once it has a vector, so the vector has them too."""
    monkeypatch.setattr(plans, "ON_DRIVER", on_driver)
    job = Job(spark, tmp_path, tasks=1, partition_by=["region"])
    apply(job, insert(1, 2, 3, 4), insert(5, 6, region="us"), delete(1))
    assert deletes(job) == [("PARQUET", 1)]
    spark.sql(f"ALTER TABLE {job.target} SET TBLPROPERTIES ('format-version' = '3')")
    apply(job, delete(2))
    assert ("PUFFIN", 2) in deletes(job)
    apply(job, delete(3, 5))
    assert job.rows() == [row(4), row(6, "us")]


@once
def test_from_equality_to_position_and_back_is_a_change_of_the_configuration(job: Job) -> None:
    job.deletes = "equality"
    job.write(insert(1, 2, 3, 4))
    job.write(update(1))
    job.run()
    job.deletes = "position"
    apply(job, [*update(1, region="ap"), *delete(2)])
    assert job.rows() == [row(1, "ap"), row(3), row(4)]
    job.deletes = "equality"
    job.write([*update(1, region="sa"), *delete(3)])
    job.run()
    assert job.rows() == [row(1, "sa"), row(4)]
    job.deletes = "position"
    apply(job, [*update(1, 4, region="af"), *insert(3)])
    assert job.rows() == [row(1, "af"), row(3), row(4, "af")]


# Others at work


@pytest.mark.parametrize(
    "foreign",
    [
        lambda job: job.compact(),
        lambda job: job.spark.sql(f"DELETE FROM {job.target} WHERE id = 2"),
        lambda job: job.spark.sql(
            f"MERGE INTO {job.target} t USING (SELECT 1 AS id) s ON t.id = s.id WHEN MATCHED THEN UPDATE SET region = "
            "'foreign'"
        ),
        lambda job: job.append([row(1, "foreign")]),
    ],
    ids=["compaction", "delete", "merge", "append"],
)
@once
def test_keys_are_looked_up_again_when_others_moved_their_rows_before_the_commit(
    job: Job, foreign: Callable[[Job], None]
) -> None:
    apply(job, insert(1, 2, 3), insert(4, 5))
    job.write([*update(1), *delete(2)])
    with attempts(2), before_commit(lambda: foreign(job)):
        job.run()
    assert job.rows() == [row(1, "us"), row(3), row(4), row(5)]
    apply(job, update(1, 3, 4, 5, region="ap"))
    assert job.rows() == [row(n, "ap") for n in (1, 3, 4, 5)]


def test_others_may_commit_before_the_commit_what_touches_no_row_of_it(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(spark, tmp_path, tasks=1, partition_by=["region"], properties={"format-version": "3"})
    apply(job, insert(1, 2), insert(3), insert(4, region="us"))
    job.write(update(4))
    with (
        attempts(1),
        before_commit(
            lambda: job.call("rewrite_data_files", "where => 'region = \"eu\"', options => map('rewrite-all', 'true')")
        ),
    ):
        job.run()
    apply(job, update(1, 2, 3, 4, region="ap"))
    assert job.rows() == [row(n, "ap") for n in (1, 2, 3, 4)]


@once
def test_a_branch_is_not_the_table(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    apply(job, insert(1, 2))
    job.replace_branch("side")
    job.spark.sql(f"DELETE FROM {job.target}.branch_side WHERE id = 1")
    caplog.clear()
    apply(job, update(1))
    assert job.rows() == [row(1, "us"), row(2)]
    assert "catching up" not in caplog.text
    assert "key index built" not in caplog.text


@pytest.mark.versions
def test_no_file_is_read_that_others_left_alone(job: Job) -> None:
    """Those that they wrote or changed are read as Iceberg does: in any format and partitioning, with all deletes."""
    apply(job, insert(1, 2), insert(3))
    own = [Path(file["file_path"].removeprefix("file:")) for file in job.files()]
    job.java_table().updateSpec().addField("region").commit()
    job.spark.sql(f"REFRESH TABLE {job.target}")
    for file_format, number in (("orc", 10), ("avro", 20), ("parquet", 30)):
        job.spark.sql(f"ALTER TABLE {job.target} SET TBLPROPERTIES ('write.format.default' = '{file_format}')")
        job.append([row(number), row(number + 1), row(3, "us")])
    job.spark.sql(f"DELETE FROM {job.target} WHERE id IN (10, 20, 30)")
    for path in own:
        path.rename(path.with_suffix(".away"))
    job.write([*update(11, 21, 31), *delete(3)])
    job.run()
    for path in own:
        path.with_suffix(".away").rename(path)
    assert job.check_index() is not None
    assert job.rows() == [row(1), row(2), *(row(number, "us") for number in (11, 21, 31))]


# The index itself


@once
def test_the_index_follows_others_without_being_built_again(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    apply(job, insert(1, 2, 3))
    job.append([row(7)])
    job.spark.sql(f"DELETE FROM {job.target} WHERE id = 2")
    caplog.clear()
    apply(job, update(1, 2, 7))
    assert job.rows() == [row(1, "us"), row(2, "us"), row(3), row(7, "us")]
    assert "2 commits by others: 1 added file" in caplog.text
    assert "key index built" not in caplog.text


@pytest.mark.parametrize(
    ("job", "granularity", "foreign", "left"),
    [
        ("3", "file", lambda job: job.spark.sql(f"DELETE FROM {job.target} WHERE id = 2"), {0, 1, 3}),
        ("2", "partition", lambda job: job.spark.sql(f"DELETE FROM {job.target} WHERE id IN (1, 2)"), {0, 3}),
        (
            "3",
            "file",
            lambda job: job.call("rewrite_data_files", "where => 'id < 4', options => map('rewrite-all', 'true')"),
            {0, 1, 2, 3},
        ),
    ],
    indirect=["job"],
    ids=["delete", "delete from two", "compaction of two"],
)
def test_catching_up_costs_what_others_changed_not_what_the_table_has(
    job: Job, granularity: str, foreign: Callable[[Job], None], left: set[int], caplog: pytest.LogCaptureFixture
) -> None:
    calls = []
    for files in (4, 40):
        table = replace(
            job,
            folder=job.folder / str(files),
            checkpoint=Path(),
            namespace=f"{job.namespace}_{files}",
            properties={**job.properties, "write.delete.granularity": granularity},
        )
        table.pipeline()  # creates the table
        rows = table.spark.range(0, 2 * files, 1, files).selectExpr("id", "'eu' AS region")
        rows.writeTo(table.target).append()
        apply(table, insert(100))
        foreign(table)
        caplog.clear()
        table.write(update(0, 2, 3))
        with jvm_calls(KeyIndex, "_catch_up") as made:
            table.run()
        assert "1 commit by others" in caplog.text
        assert "key index built" not in caplog.text
        assert len(table.planned_files()) >= files
        table.check_deletes()
        assert table.check_index() is not None
        rest = left | {2} | set(range(4, 2 * files))
        assert table.rows() == [*(row(n, "us" if n in (0, 2, 3) else "eu") for n in sorted(rest)), row(100)]
        calls.append(len(made))
    assert calls[1] <= calls[0] + 3, "tables of 4 and of 40 files"


@pytest.mark.parametrize("error", [FileNotFoundError("no such file"), ValueError("scheme")])
def test_catching_up_looks_at_all_files_where_only_a_scan_can_say(
    job: Job, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """A delete file of others that was removed and is gone, or that Iceberg can read and we can't."""
    apply(job, insert(1, 2, 3), insert(4, 5))
    job.spark.sql(f"DELETE FROM {job.target} WHERE id IN (2, 4)")

    asked = list[Any]()

    def unread(*arguments: Any) -> set[str]:
        asked.append(arguments)
        raise error

    monkeypatch.setattr(iceberg_changes, "deleted_from", unread)
    apply(job, update(1, 2, 5))
    assert bool(asked) == (job.properties["format-version"] == "2"), "vectors name their data file"
    assert job.rows() == [row(1, "us"), row(2, "us"), row(3), row(5, "us")]


def test_rows_come_back_when_others_remove_a_delete_file(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if another delete file of theirs doesn't say what it is about, as an equality delete doesn't."""
    apply(job, insert(1, 2, 3))
    job.spark.sql(f"DELETE FROM {job.target} WHERE id = 1")
    apply(job, update(3))
    table = job.java_table()
    scans = table.newScan().planFiles().iterator()
    found: dict[str, Any] = {}
    while scans.hasNext():
        found |= {str(delete.location()): delete for delete in scans.next().deletes()}
    removal = table.newRowDelta()
    for delete_file in found.values():
        removal = removal.removeDeletes(delete_file)
    removal.commit()
    assert row(1) in job.rows()
    data_files_of = iceberg_changes.Changes._data_files_of
    monkeypatch.setattr(iceberg_changes.Changes, "_data_files_of", lambda *args: (data_files_of(*args)[0], False))
    apply(job, update(1, 2, 3, region="ap"))
    assert job.rows() == [row(1, "ap"), row(2, "ap"), row(3, "ap")]


def test_rows_come_back_when_others_remove_an_equality_delete(spark: SparkSession, tmp_path: Path) -> None:
    """Nothing tells in which files they are."""
    job = Job(spark, tmp_path, deletes="equality", tasks=1)
    job.write(insert(1))
    job.write(update(1))
    job.run()
    job.deletes = "position"
    apply(job, insert(2))
    table = job.java_table()
    scans = table.newScan().planFiles().iterator()
    removal = table.newRowDelta()
    while scans.hasNext():
        for delete in scans.next().deletes():
            assert str(delete.content()) == "EQUALITY_DELETES"
            removal = removal.removeDeletes(delete)
    removal.commit()
    assert [found["id"] for found in job.rows()] == [1, 1, 2]
    apply(job, update(1, region="ap"))
    assert job.rows() == [row(1, "ap"), row(2)]


@once
def test_a_table_that_was_moved_gets_a_new_index(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    """As by Iceberg's `rewrite_table_path`, which keeps all snapshots and properties, but no path."""
    apply(job, insert(1, 2))
    name = "rowdelta.shop.position"
    properties = {line[0]: line[1] for line in job.spark.sql(f"SHOW TBLPROPERTIES {job.target}").collect()}
    stored = json.loads(properties[name])
    assert stored["index"]["table"] == job.java_table().location()
    stored["index"]["table"] = "/elsewhere"
    job.spark.sql(f"ALTER TABLE {job.target} SET TBLPROPERTIES ('{name}' = '{json.dumps(stored)}')")
    apply(job, update(1, region="ap"))
    assert "the table is in another place" in caplog.text
    assert job.rows() == [row(1, "ap"), row(2)]
    assert job.check_index() is not None


@once
def test_expired_snapshots_cost_no_new_index(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    apply(job, insert(1), insert(2))
    job.expire_snapshots()
    caplog.clear()
    apply(job, update(1, 2))
    assert "key index built" not in caplog.text


@once
def test_after_a_rollback_the_index_is_that_of_the_older_table(job: Job) -> None:
    apply(job, insert(1, 2), update(1), delete(2))
    job.rollback(job.own_ancestors()[-1])
    assert job.rows() == [row(1), row(2)]
    apply(job, update(1, region="ap"))
    assert job.rows() == [row(1, "ap")]


def test_versions_share_what_they_say_of_deletion_vectors(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each commit writes those that it changes. They are found again by another run, and what is damaged is noticed."""
    monkeypatch.setattr(deletion_vectors, "_INLINE", 0)
    job = Job(spark, tmp_path, tasks=1, properties={"format-version": "3"}, table={"merge_small_files": False})
    folder = job.index_folder / "vectors"
    apply(job, *(insert(10 * n, 10 * n + 1, 10 * n + 2) for n in range(5)))
    apply(job, update(*range(0, 50, 10)))
    (all_files,) = folder.iterdir()
    apply(job, update(1))
    assert all_files.exists(), "it isn't written again"
    for path in (job.index_folder / "versions").iterdir():
        assert b"deletes.puffin" not in path.read_bytes()
    caplog.clear()
    apply(job, update(1, 2, 11))
    assert "key index" not in caplog.text
    assert len(list(folder.iterdir())) <= 4, "of the newest version and the one before"
    assert deletes(job)
    for path in folder.iterdir():
        damage(path, Random(1))
    apply(job, delete(1))
    assert "the key index can't be used" in caplog.text
    assert [found["id"] for found in job.rows()] == [n for n in range(50) if n % 10 < 3 and n != 1]


@pytest.mark.parametrize("folder", ["runs", "versions"])
@once
def test_a_damaged_index_is_built_again(job: Job, caplog: pytest.LogCaptureFixture, folder: str) -> None:
    apply(job, insert(*range(9)))
    for path in (job.index_folder / folder).iterdir():
        damage(path, Random(1))
    caplog.clear()
    apply(job, update(*range(5)))
    assert "key index built: 9 keys" in caplog.text
    assert job.rows() == [row(n, "us" if n < 5 else "eu") for n in range(9)]


@once
def test_an_index_whose_keys_an_earlier_release_hashed_is_built_again(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    apply(job, insert(*range(9)))
    for path in (job.index_folder / "versions").iterdir():
        body = json.loads(path.read_bytes().partition(b"\n")[2])
        _, _, rest = body["encoding"].split(" ", 2)
        earlier = json.dumps(body | {"encoding": f"2 {rest}"}).encode()
        path.write_bytes(json.dumps({"format": 2, "crc32": zlib.crc32(earlier)}).encode() + b"\n" + earlier)
    caplog.clear()
    apply(job, update(*range(5)))
    assert "an earlier release of rowdelta wrote it" in caplog.text
    assert "key index built: 9 keys" in caplog.text
    assert job.rows() == [row(n, "us" if n < 5 else "eu") for n in range(9)]
    caplog.clear()
    apply(job, update(7))
    assert "key index" not in caplog.text


@once
def test_a_run_that_is_gone_is_noticed(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    apply(job, insert(1, 2))
    for path in (job.index_folder / "runs").iterdir():
        path.unlink()
    apply(job, update(1))
    assert "is missing; building the key index again" in caplog.text
    assert job.rows() == [row(1, "us"), row(2)]


def test_merges_keep_the_keys_of_tasks_that_got_no_changes(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(spark, tmp_path, tasks=4, properties={"format-version": "3"})
    with tiny_thresholds(1 << 20, 10, spark):
        apply(job, *(insert(n) for n in range(10)))
        apply(job, update(*range(10)))
    assert job.rows() == [row(n, "us") for n in range(10)]


def test_what_the_stream_may_wait_for_does_not_wait_for_merges_of_runs(spark: SparkSession) -> None:
    """Those of tables with a hundred million keys take minutes."""
    release = threading.Event()
    merges = [beside(spark, release.wait, is_long=True) for _ in range(3)]
    try:
        assert beside(spark, lambda: "merged").result(30) == "merged"
    finally:
        release.set()
    assert all(merge.result(30) for merge in merges)


def test_larger_runs_are_merged_by_a_job_beside_the_stream(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = RunMerging.begin

    def wait_for_it(self: RunMerging, index: IndexSlice) -> None:
        begin(self, index)
        if self._merge is not None:
            self._merge.written.result()
            merged.add(self._merge.name)

    merged, jobs = set[str](), spark.sparkContext.statusTracker().getJobIdsForGroup
    before = len(jobs(MAINTENANCE_POOL))
    monkeypatch.setattr(keyindex, "_MERGED_BY_TASKS", 0)
    monkeypatch.setattr(RunMerging, "begin", wait_for_it)
    job = Job(spark, tmp_path, tasks=2, properties={"format-version": "3"})
    apply(job, *(insert(n) for n in range(9)), update(*range(9)))
    assert job.rows() == [row(n, "us") for n in range(9)]
    assert merged
    assert len(jobs(MAINTENANCE_POOL)) >= before + len(merged)
    assert len(list((job.index_folder / "runs").iterdir())) < 9


def test_old_runs_and_versions_are_removed(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(spark, tmp_path, tasks=1, properties={"format-version": "3"})
    for n in range(3):
        apply(job, *(update(n, m) for m in range(4)))
        job.compact()
    job.write(update(1, 2))
    with crashing("before the commit"), pytest.raises(TemporaryError):
        job.run()
    job.write(update(3))
    with before_commit(job.compact, times=3):
        job.run()
    # the newest version and the one before are kept
    assert len(list((job.index_folder / "versions").iterdir())) <= 2
    assert len(list((job.index_folder / "runs").iterdir())) <= 16


def test_the_index_is_where_the_configuration_says(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(spark, tmp_path, index_location=str(tmp_path / "indexes"))
    apply(job, insert(1), update(1))
    assert list((tmp_path / "indexes" / job.sink_id / job.target / "runs").iterdir())
    job.lose_checkpoint()
    apply(job, delete(1))
    assert job.rows() == []


@pytest.mark.parametrize("scheme", ["", "file:", "file://"])
def test_an_index_inside_the_tables_folder_is_refused(spark: SparkSession, tmp_path: Path, scheme: str) -> None:
    """The configuration alone shows this, if both paths are written in the same way."""
    job = Job(spark, tmp_path)
    job.index_location = f"{scheme}{job.table_folder}"
    if not scheme:
        with pytest.raises(ValidationError, match=rf"is inside .*, which is for table {job.target}\. Name a folder"):
            job.config()
        return
    with pytest.raises(TableError, match=r"inside the table's own folder.*Set index\.location to a folder elsewhere"):
        job.run()


def test_each_new_index_has_bases_of_its_own(spark: SparkSession, tmp_path: Path) -> None:
    """Whoever knows the bases can make keys that collide."""
    bases = set()
    for name in ("a", "b"):
        index = index_of(Table(spark).opened(), tmp_path / name)
        index.synchronize(None)
        bases |= {index.slice().base, index.key_hash(Table(spark).opened().spec).base}
    assert len(bases - {BASE}) == 4


def test_files_are_deleted_by_what_reaches_them(spark: SparkSession, tmp_path: Path) -> None:
    """A commit that fails leaves files of the table and of the index."""
    table = Table(spark).opened()
    index = index_of(table, tmp_path, {"s3.region": "eu"})
    assert index.io_of(f"{tmp_path}/runs/run", table.spec).properties == {"s3.region": "eu"}
    assert index.io_of(f"{table.spec.location}/data/file.parquet", table.spec) is table.spec.io


def index_of(table: IcebergTable, location: Path, properties: Mapping[str, str] | None = None) -> KeyIndex:
    plan = Job(table.spark, location).plan()
    folder = HadoopFolder(table, str(location), properties or {})
    engine: Any = SimpleNamespace(index_folder=lambda: folder, read_keys=functools.partial(read_keys, table))
    return KeyIndex(table, plan, engine, "rowdelta.test")


@pytest.mark.versions
def test_a_key_that_was_altered_since_the_last_commit(spark: SparkSession, tmp_path: Path) -> None:
    """The keys of all files are read again, and have the new type and name."""
    job = Job(spark, tmp_path, columns={"id": "int", "region": "string"}, file_format="json")
    job.write([("+I", {"id": n, "region": "eu"}) for n in range(20)])
    job.run()
    spark.sql(f"ALTER TABLE {job.target} ALTER COLUMN id TYPE bigint")
    spark.sql(f"ALTER TABLE {job.target} RENAME COLUMN id TO number")
    job.columns, job.key = {"number": "bigint", "region": "string"}, ("number",)
    job.write([("+U", {"number": n, "region": "us"}) for n in range(5)])
    job.run()
    assert [(row["number"], row["region"]) for row in job.rows()] == [(n, "us" if n < 5 else "eu") for n in range(20)]
