"""Each change is applied exactly once, also with replays, second drivers, foreign writers, rollbacks, and tables that
others change.
"""

import datetime as dt
import itertools
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import SparkSession

from sink.commands.inspection import check
from sink.errors import ConfigError, DataError, RowdeltaError, TableError, TemporaryError
from sink.table import keyindex
from sink.table.microbatch import TableSink
from sink.table.open_table import OpenTable
from sink.table.patterns import resolve_tables
from sink.table.plan import plan_table
from sink.targets.catalogs import Catalogs
from sink.targets.iceberg.commit import IcebergCommitter
from sink.targets.values import ChangeSet, CommitUnknownError, Done, Outcome
from tests.faults.plugin import Seen
from tests.sink.harness import Job, before_commit, crashing, java_error, jvm_calls

pytestmark = pytest.mark.spark

COMMIT_STATE_UNKNOWN = "org.apache.iceberg.exceptions.CommitStateUnknownException"


PAIRS = [("position", "3"), ("equality", "2")]
"""What is deleted matters, and whether it is found by the key index; how it is written doesn't."""


@pytest.fixture(params=PAIRS, ids=lambda pair: f"{pair[0]}-v{pair[1]}")
def job(request: pytest.FixtureRequest, spark: SparkSession, tmp_path: Path) -> Job:
    deletes, version = request.param
    return Job(spark, tmp_path, deletes=deletes, properties={"format-version": version})


def pairs(*chosen: tuple[str, str]) -> pytest.MarkDecorator:
    """Not all of them."""
    return pytest.mark.parametrize("job", chosen, indirect=True, ids=[f"{deletes}-v{v}" for deletes, v in chosen])


# Nothing is deleted, or nothing gets as far: neither the kind of deletes nor the version matters.
without_deletes = pairs(("position", "2"))
# The driver's logic is the same for both kinds of deletes, and `tests/memory` plays it.
once = pairs(("position", "3"))


def row(number: int, region: str = "eu") -> dict[str, Any]:
    return {"id": number, "region": region}


def insert(*numbers: int, region: str = "eu") -> list[tuple[str, dict[str, Any]]]:
    return [("+I", row(number, region)) for number in numbers]


def counted_attempts(attempts: list[int]) -> AbstractContextManager[None]:
    """Add each attempt to commit to `attempts`."""
    return before_commit(lambda: attempts.append(1), times=99)


@contextmanager
def after_first_commit(action: Callable[[], object]) -> Iterator[None]:
    """Run `action` once, after the first commit inside."""
    original = IcebergCommitter.commit
    done: list[bool] = []

    def commit(self: IcebergCommitter, request: ChangeSet) -> Outcome:
        outcome = original(self, request)
        if outcome == Done() and not done:
            done.append(True)
            action()
        return outcome

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(IcebergCommitter, "commit", commit)
        yield


def rebucket(job: Job, before: int, after: int) -> None:
    """Partition the table by so many buckets, as somebody else does."""
    expressions = job.spark._jvm.org.apache.iceberg.expressions.Expressions  # type: ignore[union-attr]
    update = job.java_table().updateSpec()
    update.removeField(expressions.bucket("id", before)).addField(expressions.bucket("id", after)).commit()


def operations(job: Job) -> int:
    """How many commits the sink made to the table."""
    summaries = [snapshot["summary"] for snapshot in job.snapshots()]
    return sum("rowdelta.sink-id" in s and "rowdelta.minor-compaction" not in s for s in summaries)


# Replays


@once
@pytest.mark.parametrize("mode", ["upsert", "changelog"])
def test_a_finished_job_run_again_applies_nothing(job: Job, mode: Any) -> None:
    job.mode = mode
    job.write(insert(1, 2))
    job.write([("-U", row(1)), ("+U", row(1, "us"))])
    job.run()
    assert operations(job) == 2
    job.run()
    job.lose_checkpoint()
    job.run()
    assert operations(job) == 2
    assert job.rows() == [row(1, "us"), row(2)]


@without_deletes
def test_a_batch_committed_before_the_crash_is_not_applied_again(job: Job) -> None:
    # in mode changelog a second application would be visible: as duplicates
    job.mode = "changelog"
    job.write(insert(1))
    with crashing("after the commit"), pytest.raises(TemporaryError):
        job.run()
    assert operations(job) == 1
    job.write(insert(2))
    job.run()
    assert operations(job) == 2
    assert job.rows() == [row(1), row(2)]


@without_deletes
@pytest.mark.parametrize("part", ["sources/0/1", "offsets/0"])
def test_a_checkpoint_of_which_another_run_has_deleted_a_part(
    job: Job, caplog: pytest.LogCaptureFixture, part: str
) -> None:
    """Spark could not read it, in this run and in any other. Or, without the end of its log of files, it would take a
    new file for one that is applied.
    """
    for number in (1, 2):
        job.write(insert(number))
        job.run()
    (path,) = job.checkpoint.rglob(part)
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    job.write(insert(3))
    job.run()
    assert job.rows() == [row(1), row(2), row(3)]
    assert "the checkpoint doesn't continue the table's position" in caplog.text


@without_deletes
def test_a_late_file_is_not_lost_while_the_checkpoint_lives(job: Job) -> None:
    job.write(insert(1))
    job.write(insert(2))
    late = job.write(insert(3))
    hidden = late.rename(job.folder / "late")
    job.write(insert(4))
    job.run()
    modified = hidden.stat().st_mtime - 30 * 86_400
    os.utime(hidden, (modified, modified))
    hidden.rename(late)
    job.run()
    assert [r["id"] for r in job.rows()] == [1, 2, 3, 4]


@without_deletes
def test_new_files_of_an_applied_ones_modification_time_when_the_checkpoint_is_lost(job: Job) -> None:
    # Spark lists some of them before the one that was applied, and some after it
    job.mode, job.deletes = "changelog", "equality"
    applied = job.write(insert(0))
    applied = applied.rename(applied.with_name(f"m{applied.suffix}"))
    os.utime(applied, (1_700_000_000, 1_700_000_000))
    job.run()
    job.lose_checkpoint()
    for number, name in enumerate("abcwxyz", start=1):
        path = job.write(insert(number))
        os.utime(path.rename(path.with_name(f"{name}{path.suffix}")), (1_700_000_000, 1_700_000_000))
    job.run()
    assert operations(job) == 8
    assert [r["id"] for r in job.rows()] == list(range(8))


@without_deletes
def test_a_removed_position_and_a_replay_in_upsert_mode(job: Job) -> None:
    job.write(insert(1, 2))
    job.write([("+U", row(1, "us")), ("-D", row(2))])
    job.run()
    job.spark.sql(f"ALTER TABLE {job.target} UNSET TBLPROPERTIES ('rowdelta.shop.position')")
    job.run()
    assert operations(job) == 4, "everything is read again"
    assert job.rows() == [row(1, "us")]


@without_deletes
@pytest.mark.parametrize("foreign", [True, False])
def test_changelog_mode_refuses_a_filled_table_without_a_position(job: Job, foreign: bool) -> None:
    job.mode = "changelog"
    job.write(insert(1))
    if foreign:
        job.pipeline()  # creates the table
        job.append([row(7)])
    else:
        job.run()
        job.spark.sql(f"ALTER TABLE {job.target} UNSET TBLPROPERTIES ('rowdelta.shop.position')")
    before = job.rows()
    with pytest.raises(DataError, match="holds rows, but sink 'shop' has no position in it"):
        job.run()
    assert job.rows() == before


# Second drivers


@without_deletes
def test_a_second_driver_is_refused_and_nothing_is_applied_twice(job: Job) -> None:
    job.mode = "changelog"
    job.write(insert(1))
    job.run()
    job.write(insert(2))
    with (
        before_commit(job.second_driver().run),
        pytest.raises(TableError, match="another run with the same sink id") as caught,
    ):
        job.run()
    assert caught.value.exit_code == 4
    assert job.rows() == [row(1), row(2)]
    assert job.unreferenced_files() == []


@without_deletes
def test_a_second_driver_on_the_same_checkpoint_does_no_harm(job: Job) -> None:
    """Each driver removes the other's checkpoint. Whatever errors they report, the next run completes the table."""
    job.mode = "changelog"
    job.write(insert(1))
    job.run()
    job.write(insert(2))
    second = replace(job.second_driver(), checkpoint=job.checkpoint)
    with before_commit(second.run), pytest.raises(RowdeltaError):
        job.run()
    job.write(insert(3))
    job.run()
    assert job.rows() == [row(1), row(2), row(3)]


@once
def test_a_second_driver_with_a_batch_that_has_a_new_column(job: Job) -> None:
    """Both drivers change the table's schema. The second one must not mistake the other's position for its own."""
    job.mode = "changelog"
    job.write(insert(1))
    job.run()
    job.configure_columns, job.columns = False, {**job.columns, "note": "string"}
    job.write([("+I", row(2) | {"note": "new"})])
    second = job.second_driver()
    original = TableSink._evolve
    turns = iter([second.run])

    def evolve(self: TableSink, observed: Mapping[str, str]) -> None:
        for others_turn in turns:
            others_turn()
            job.write([("-D", row(2) | {"note": "new"})])
            second.run()
        original(self, observed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TableSink, "_evolve", evolve)
        with pytest.raises(TableError, match="another run with the same sink id"):
            job.run()
    assert job.rows() == [row(1) | {"note": None}]
    assert operations(job) == 3


@once
def test_a_driver_that_overslept_is_refused(job: Job) -> None:
    """The driver read its position. Then others applied this batch and more, and a compaction removed the files with
    which it could have conflicted.
    """
    job.mode = "changelog"
    job.write(insert(1))
    job.run()
    sleeper = job.pipeline()
    job.write(insert(2))
    job.run()
    job.write([("-D", row(2))])
    job.run()
    job.compact()
    job.expire_snapshots()
    with pytest.raises(TableError):
        sleeper.run()
    assert job.rows() == [row(1)]


@once
def test_two_sinks_with_their_own_ids_share_a_table(job: Job, tmp_path: Path) -> None:
    other = replace(
        job.second_driver(), folder=tmp_path / "other", checkpoint=tmp_path / "other state", sink_id="other"
    )
    job.write(insert(1))
    other.write(insert(100))
    job.table, other.table = {**job.table, "shared_with": []}, {**other.table, "shared_with": []}
    job.run()
    with pytest.raises(TableError, match=r"sink shop writes this table\. Sink other .* write shared_with: \[shop\]"):
        other.run()
    with pytest.raises(TableError, match="sink shop writes this table"):
        list(check(other.spark, other.config()))
    del job.table["shared_with"], other.table["shared_with"]
    with before_commit(other.run):
        job.write(insert(2))
        job.run()
    other.write(insert(101))
    other.run()
    assert [r["id"] for r in job.rows()] == [1, 2, 100, 101]


# Foreign writers


@pytest.mark.fault(
    "Other writers", "Another writer appends to an Iceberg table between the write and the commit", "Both commit"
)
def test_a_foreign_append_between_write_and_commit_is_survived(job: Job, seen: Seen) -> None:
    job.write(insert(1, 2))
    job.run()
    job.write([("+U", row(1, "us")), ("-D", row(2))])
    with before_commit(lambda: job.append([row(100)])):
        job.run()
    assert job.rows() == [row(1, "us"), row(100)]
    seen("Table = source, and the other writer's row")


@pytest.mark.fault(
    "Other writers",
    "`rewrite_data_files` of an Iceberg table between the write and the commit",
    "The micro-batch is committed on top of it",
)
def test_a_foreign_compaction_between_write_and_commit_is_not_in_the_way(job: Job, seen: Seen) -> None:
    """Equality deletes reach the rewritten rows. Positions don't: they are looked up again, once."""
    job.write(insert(1, 2))
    job.write([("+U", row(1, "us"))])
    job.run()
    attempts: list[int] = []
    job.write([("-D", row(2))])
    with before_commit(job.compact), counted_attempts(attempts):
        job.run()
    assert job.rows() == [row(1, "us")]
    assert len(attempts) == (1 if job.deletes == "equality" else 2)
    seen("Committed on top of the compacted files. Table = source")


def test_a_batch_for_an_empty_table_is_written_again_when_rows_appear(job: Job) -> None:
    """The batch had no deletes, since there was nothing to delete; then somebody appended a row with one of
    its keys.
    """
    job.write(insert(1, 2))
    with before_commit(lambda: job.append([row(1, "foreign"), row(100)])):
        job.run()
    assert job.rows() == [row(1), row(2), row(100)]
    assert job.unreferenced_files() == []


@without_deletes
def test_a_table_replaced_between_write_and_commit(job: Job) -> None:
    """It has no snapshot then, and Iceberg validates nothing."""
    job.mode, job.key = "append", ()
    job.write(insert(1))
    job.run()
    job.write(insert(2))
    columns = "id bigint, region string"

    def replace_table() -> None:
        job.spark.sql(f"CREATE OR REPLACE TABLE {job.target} ({columns}) USING iceberg").collect()

    with before_commit(replace_table), pytest.raises(TableError):
        job.run()
    assert job.rows() == []
    with pytest.raises(TableError, match="rowdelta reset"):
        job.run()


@once
def test_a_busy_foreign_writer_does_not_starve_the_sink(job: Job) -> None:
    # with a key index each append costs a look-up, which takes longer than the second on a busy machine
    job.properties = {**job.properties, "commit.retry.num-retries": "100", "commit.retry.max-wait-ms": "100"}
    job.write(insert(1))
    job.run()
    stop, busy = threading.Event(), threading.Event()
    numbers = itertools.count(100)

    def append_until_stopped() -> None:
        while not stop.wait(1 if busy.is_set() else 0):
            job.append([row(next(numbers))])
            busy.set()

    writer = threading.Thread(target=append_until_stopped)
    writer.start()
    try:
        for n in range(2, 7):
            job.write(insert(n))
        assert busy.wait(60)
        job.run()
    finally:
        stop.set()
        writer.join()
    assert [r["id"] for r in job.rows()] == [1, 2, 3, 4, 5, 6, *range(100, next(numbers))]


@pytest.mark.parametrize(("version", "most"), [("2", 100), ("3", 0)])
def test_a_writer_of_any_kind_does_not_starve_the_sink(
    spark: SparkSession,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    most: int,
) -> None:
    """The keys are looked up in whatever others changed, and nothing is written again: unless that is very much."""
    monkeypatch.setattr(keyindex, "_MOST_LOOKED_UP", most)
    caplog.set_level(logging.INFO, "rowdelta")
    job = Job(
        spark,
        tmp_path,
        deletes="position",
        properties={"format-version": version, "write.delete.mode": "merge-on-read"},
    )
    job.write(insert(*range(1, 7)))
    job.run()
    job.write([("+U", row(1, "us")), ("-D", row(2)), ("+I", row(7)), ("-D", row(8))])
    others: Iterator[Callable[[], object]] = iter(
        [
            lambda: job.append([row(1, "x"), row(8, "x"), row(100, "x")]),
            lambda: job.spark.sql(f"DELETE FROM {job.target} WHERE id IN (2, 4) OR (id = 1 AND region = 'eu')"),
            job.compact,
            lambda: job.spark.sql(f"UPDATE {job.target} SET region = 'o' WHERE id IN (1, 5, 8)"),
        ]
    )
    attempts: list[int] = []

    def commit() -> None:
        attempts.append(1)
        next(others, lambda: None)()

    with before_commit(commit, times=99):
        job.run()
    assert len(attempts) == 5
    assert ("writing again" in caplog.text) == (most == 0)
    expected = [row(1, "us"), row(3), row(5, "o"), row(6), row(7), row(100, "x")]
    assert job.rows() == expected
    assert job.check_index() is not None
    job.write([("+U", row(found["id"], "last")) for found in expected])
    job.run()
    assert job.rows() == [row(found["id"], "last") for found in expected]
    assert job.unreferenced_files() == []


@once
def test_retries_are_bounded_and_back_off(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.properties = {**job.properties, "commit.retry.num-retries": "3", "commit.retry.min-wait-ms": "40"}
    job.write(insert(1))
    job.run()
    pauses: list[float] = []
    monkeypatch.setattr("sink.targets.retries.time", SimpleNamespace(sleep=pauses.append))
    numbers = itertools.count(100)
    job.write(insert(2))
    with (
        before_commit(lambda: job.append([row(next(numbers))]), times=99),
        pytest.raises(TemporaryError, match="other writers kept committing") as caught,
    ):
        job.run()
    assert caught.value.exit_code == 75
    assert next(numbers) == 104, "one attempt and three retries"
    assert len(pauses) == 3
    assert all(later > earlier * 1.5 for earlier, later in itertools.pairwise(pauses))
    assert job.unreferenced_files() == []
    job.run()
    assert [r["id"] for r in job.rows()] == [1, 2, 100, 101, 102, 103]


# Unknown outcomes


@without_deletes
@pytest.mark.parametrize("committed", [True, False])
def test_after_an_unknown_commit_state_the_table_is_asked(
    job: Job, monkeypatch: pytest.MonkeyPatch, committed: bool
) -> None:
    monkeypatch.setattr("sink.targets.iceberg.commit.time", SimpleNamespace(sleep=lambda _: None))
    original = IcebergCommitter._send
    failed: list[bool] = []

    def send(self: IcebergCommitter, staged: Any) -> None:
        if failed:
            return original(self, staged)
        failed.append(True)
        if committed:
            original(self, staged)
        raise java_error(job.spark, COMMIT_STATE_UNKNOWN, "the catalog hung up")

    monkeypatch.setattr(IcebergCommitter, "_send", send)
    job.mode = "changelog"
    job.write(insert(1))
    if committed:
        job.run()
    else:
        # without Iceberg's own advice about duplicates and orphans, which is wrong here
        with pytest.raises(CommitUnknownError, match=r"went through \(the catalog hung up\)\. Its files are kept"):
            job.run()
        assert list((job.table_folder / "data").rglob("*.parquet")), "its files may be in the table: never delete them"
        job.run()
    assert operations(job) == 1
    assert job.rows() == [row(1)]


@without_deletes
def test_a_commit_that_landed_and_was_reported_as_failed(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request is sent twice, or a connection breaks after the commit. The table shows what happened, and its files
    stay.
    """
    monkeypatch.setattr("sink.targets.iceberg.commit.time", SimpleNamespace(sleep=lambda _: None))
    original = IcebergCommitter._send

    def send(self: IcebergCommitter, staged: Any) -> None:
        original(self, staged)
        raise java_error(job.spark, "java.lang.RuntimeException", "so it says")

    monkeypatch.setattr(IcebergCommitter, "_send", send)
    job.write(insert(1, 2))
    job.run()
    job.write([("+U", row(1, "us"))])
    job.run()
    assert operations(job) == 2
    assert job.rows() == [row(1, "us"), row(2)]


# Time travel


@once
@pytest.mark.parametrize(("mode", "back"), [("upsert", 1), ("changelog", 2)])
def test_after_a_rollback_the_sink_goes_on_from_that_snapshots_position(job: Job, mode: Any, back: int) -> None:
    job.mode = mode
    job.write(insert(1, 2))
    job.write([("-U", row(1)), ("+U", row(1, "us"))])
    job.write([("-D", row(2)), ("+I", row(3))])
    job.run()
    job.call("rollback_to_snapshot", f"snapshot_id => {job.snapshots()[-1 - back]['snapshot_id']}")
    assert job.rows() != [row(1, "us"), row(3)]
    job.run()
    assert job.rows() == [row(1, "us"), row(3)]
    job.run()
    assert operations(job) == 3 + back


@without_deletes
def test_a_table_replaced_and_its_snapshots_expired(job: Job) -> None:
    job.configure_columns = False
    job.create_table(
        [
            {"id": 1, "name": "id", "required": True, "type": "long"},
            {"id": 2, "name": "region", "required": False, "type": "string"},
        ]
    )
    job.write(insert(1))
    job.run()
    job.spark.sql(f"CREATE OR REPLACE TABLE {job.target} USING iceberg AS SELECT 100L AS id, 'eu' AS region")
    job.append([row(101)])
    job.expire_snapshots()
    job.write(insert(2))
    with pytest.raises(TableError, match="rowdelta reset"):
        job.run()
    assert job.rows() == [row(100), row(101)]


@pytest.mark.fault(
    "Other writers",
    "`rollback_to_snapshot` of an Iceberg table between the write and the commit",
    "The table is opened again, and what was rolled back is read again",
)
@once
def test_a_rollback_while_the_sink_runs(job: Job, seen: Seen) -> None:
    """The batch was written on top of a snapshot that is no longer part of the table: it must not be applied to
    another.
    """
    job.mode = "changelog"
    job.write(insert(1))
    job.write(insert(2))
    job.run()
    first = job.snapshots()[0]["snapshot_id"]
    job.write(insert(3))
    with (
        before_commit(lambda: job.call("rollback_to_snapshot", f"snapshot_id => {first}")),
    ):
        job.run()
    assert job.rows() == [row(1), row(2), row(3)]
    seen("The same run went on. Table = source")


@without_deletes
def test_a_rollback_before_the_sinks_first_commit(job: Job) -> None:
    job.pipeline()
    job.append([row(100)])
    job.write(insert(1))
    job.run()
    job.call("rollback_to_snapshot", f"snapshot_id => {job.snapshots()[0]['snapshot_id']}")
    with pytest.raises(TableError, match="rowdelta reset"):
        job.run()


@without_deletes
def test_expired_snapshots_take_no_position_with_them(job: Job) -> None:
    job.mode = "changelog"
    job.write(insert(1))
    job.run()
    job.append([row(100)])  # the newest snapshot isn't the sink's
    job.expire_snapshots()
    assert len(job.snapshots()) == 1
    job.lose_checkpoint()
    job.write(insert(2))
    job.run()
    assert job.rows() == [row(1), row(2), row(100)]


@once
def test_snapshots_expire_between_write_and_commit(job: Job) -> None:
    job.mode = "changelog"
    job.write(insert(1))
    job.run()
    job.write(insert(2))

    def append_and_expire() -> None:
        job.append([row(100)])
        job.expire_snapshots()

    with before_commit(append_and_expire):
        job.run()
    assert job.rows() == [row(1), row(2), row(100)]


# Tables changed underneath


@once
def test_a_table_dropped_underneath(job: Job) -> None:
    job.write(insert(1))
    job.run()
    job.write(insert(2))
    with before_commit(job.drop), pytest.raises(TableError, match="is gone"):
        job.run()
    job.run()
    assert job.rows() == [row(1), row(2)], "a new table is filled from the start"


@once
def test_a_table_dropped_and_created_again_underneath(job: Job) -> None:
    job.write(insert(1))
    job.run()
    job.write(insert(2))

    def replace() -> None:
        job.drop()
        job.spark.sql(f"CREATE TABLE {job.target} (id BIGINT NOT NULL, region STRING) USING iceberg")

    with before_commit(replace), pytest.raises(TableError):
        job.run()
    assert job.rows() == []
    job.run()
    assert job.rows() == [row(1), row(2)]


@without_deletes
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("ADD COLUMN note STRING", "has a column 'note' that columns doesn't name"),
        ("DROP COLUMN region", "has no column 'region'"),
    ],
)
def test_columns_that_no_longer_fit_are_refused_before_anything_is_written(job: Job, change: str, message: str) -> None:
    job.table = {"schema_changes": "ignore"}
    job.write(insert(1))
    job.write(insert(2))
    with (
        after_first_commit(lambda: job.spark.sql(f"ALTER TABLE {job.target} {change}")),
        pytest.raises(TableError, match=message),
    ):
        job.run()
    assert operations(job) == 1
    with pytest.raises(TableError, match=message):
        job.run()
    assert job.unreferenced_files() == []


@without_deletes
@pytest.mark.parametrize("exists", [False, True])
def test_partitions_of_a_floating_point_column_are_refused(job: Job, exists: bool) -> None:
    job.columns, job.partition_by = {"id": "bigint", "x": "double"}, ["x"]
    if exists:
        job.create_table(
            [
                {"id": 1, "name": "id", "required": True, "type": "long"},
                {"id": 2, "name": "x", "required": False, "type": "double"},
            ]
        )
    job.write([("+I", {"id": 1, "x": float("nan")})])
    with pytest.raises(TableError if exists else ConfigError, match="floating-point"):
        job.run()


def test_a_fixed_key_is_refused(job: Job) -> None:
    """Iceberg 1.11 would apply only the last of a file's equality deletes."""
    job.columns, job.configure_columns = {"id": "fixed[3]"}, False
    job.create_table([{"id": 1, "name": "id", "required": True, "type": "fixed[3]"}])
    with pytest.raises(TableError, match=r"key column id is fixed\[3\]"):
        job.run()


@without_deletes
@pytest.mark.parametrize("file_format", ["parquet", "json"])
def test_a_column_added_while_the_sink_runs(job: Job, file_format: Any) -> None:
    """The table decides here. The running job may need a restart to see the column, but never drops the column's
    values.
    """
    job.table = {"schema_changes": "ignore"}
    job.create_table(
        [
            {"id": 1, "name": "id", "required": True, "type": "long"},
            {"id": 2, "name": "region", "required": False, "type": "string"},
        ]
    )
    job.configure_columns, job.file_format = False, file_format
    job.columns = {**job.columns, "note": "string"}
    job.write([("+I", row(1) | {"note": "not in the table yet"})])
    job.write([("+I", row(2) | {"note": "new"})])
    with (
        after_first_commit(lambda: job.spark.sql(f"ALTER TABLE {job.target} ADD COLUMN note STRING")),
        suppress(RowdeltaError),
    ):
        job.run()
    job.run()
    assert job.rows() == [row(1) | {"note": None}, row(2) | {"note": "new"}]


def test_a_table_repartitioned_underneath(job: Job) -> None:
    """Rows under the old spec can be reached only by global deletes."""
    job.write(insert(1, 2, 3))
    job.write([("+U", row(1, "us")), ("-D", row(2))])

    def repartition() -> None:
        table = job.java_table()
        table.updateSpec().addField("region").commit()

    with after_first_commit(repartition):
        job.run()
    assert job.rows() == [row(1, "us"), row(3)]


@pytest.mark.parametrize("change", ["rewritten", "appended"])
def test_a_table_repartitioned_between_write_and_commit(job: Job, change: str) -> None:
    """The deletes and the hashes were made for the old partitions and buckets of the rows."""
    job.partition_by = ["bucket(8, id)"]
    job.write(insert(1, 2, 3))
    job.run()
    job.partition_by = ()
    job.write([("+U", row(1, "us")), ("-D", row(2))])

    def repartition() -> None:
        rebucket(job, 8, 16)
        if change == "rewritten":
            job.compact()
        else:
            job.append([row(1, "foreign")])

    with before_commit(repartition):
        job.run()
    assert job.rows() == [row(1, "us"), row(3)]
    job.write([("+U", row(1, "eu")), ("-D", row(3))])
    job.run()
    assert job.rows() == [row(1, "eu")]


@pytest.mark.versions
@pytest.mark.parametrize(("was_empty", "when"), [(False, "before the commit"), (True, "between micro-batches")])
def test_others_write_under_an_older_partitioning(job: Job, was_empty: bool, when: str) -> None:
    """As a Flink job does that was started before the table was repartitioned. An equality delete of one partitioning
    doesn't apply to rows of another one.
    """
    job.partition_by = ["bucket(2, id)"]
    job.pipeline()  # creates the table
    rebucket(job, 2, 4)
    job.partition_by = ["bucket(4, id)"]
    job.write(insert(1, 2))
    job.run()
    if was_empty:
        job.spark.sql(f"DELETE FROM {job.target} WHERE id < 3")
        assert job.rows() == []

    def foreign() -> None:
        rows = job.spark.createDataFrame([(1, "foreign"), (5, "foreign"), (6, "foreign")], "id bigint, region string")
        rows.writeTo(job.target).option("output-spec-id", "0").append()

    job.write([("+U", row(1, "us")), ("-D", row(5))])
    if when == "between micro-batches":
        job.write([("+U", row(1, "ap")), ("-D", row(5))])
    happens = before_commit(foreign) if when == "before the commit" else after_first_commit(foreign)
    with happens:
        job.run()
    left = [] if was_empty else [row(2)]
    region = "us" if when == "before the commit" else "ap"
    assert job.rows() == [row(1, region), *left, row(6, "foreign")]
    job.write([("-D", row(6))])
    job.run()
    assert job.rows() == [row(1, region), *left]


def test_others_move_rows_to_an_older_partitioning(job: Job) -> None:
    """Iceberg takes a compaction for no conflict."""
    job.partition_by = ["bucket(2, id)"]
    job.pipeline()
    rebucket(job, 2, 4)
    job.partition_by = ["bucket(4, id)"]
    job.write(insert(1, 2, 3))
    job.run()
    job.write([("+U", row(1, "us")), ("-D", row(2))])
    options = "options => map('rewrite-all', 'true', 'output-spec-id', '0')"
    with before_commit(lambda: job.call("rewrite_data_files", options)):
        job.run()
    assert job.rows() == [row(1, "us"), row(3)]


@pytest.mark.parametrize("deletes", ["position", "equality"])
def test_a_table_that_becomes_v3_between_write_and_commit(spark: SparkSession, tmp_path: Path, deletes: Any) -> None:
    """Position deletes of v2 are files that v3 refuses."""
    job = Job(spark, tmp_path, deletes=deletes, properties={"format-version": "2"})
    job.write(insert(1, 2, 3))
    job.run()
    job.write([("+U", row(1, "us")), ("-D", row(2))])

    def upgrade() -> None:
        spark.sql(f"ALTER TABLE {job.target} SET TBLPROPERTIES ('format-version' = '3')")

    with before_commit(upgrade):
        job.run()
    assert job.rows() == [row(1, "us"), row(3)]
    assert job.unreferenced_files() == []
    if deletes == "position":
        assert job.check_index() is not None


def test_a_table_that_was_v1_and_dropped_its_partition_field(job: Job) -> None:
    """v1 keeps a dropped field, as one without values."""
    job.configure_columns = False
    job.spark.sql(
        f"CREATE TABLE {job.target} (id BIGINT NOT NULL, region STRING) USING iceberg PARTITIONED BY (region) "
        "TBLPROPERTIES ('format-version' = '1')"
    )
    job.append([row(1)])
    job.java_table().updateSpec().removeField("region").commit()
    job.append([row(2)])
    version = job.properties["format-version"]
    job.spark.sql(f"ALTER TABLE {job.target} SET TBLPROPERTIES ('format-version' = '{version}')")
    job.write([("+U", row(1, "us")), ("+U", row(2, "us"))])
    job.run()
    job.append([row(3)])
    job.write([("-D", row(1)), ("+U", row(3, "us"))])
    job.run()
    job.compact()
    job.write([("+U", row(2, "eu")), ("+I", row(4))])
    job.run()
    assert job.rows() == [row(2, "eu"), row(3, "us"), row(4)]


# Failures


@without_deletes
def test_a_manifest_that_the_store_does_not_show(job: Job) -> None:
    """Some stores show new files late. The table itself is there."""
    job.write(insert(1))
    job.run()
    job.write(insert(2))
    (manifest,) = (job.table_folder / "metadata").glob("snap-*.avro")
    hidden = manifest.with_name("hidden")

    def hide() -> None:
        manifest.rename(hidden)

    with (
        before_commit(hide),
        pytest.raises(TemporaryError, match=rf"has no file .*{manifest.name}.*Nothing was applied; run again"),
    ):
        job.run()
    hidden.rename(manifest)
    assert job.unreferenced_files() == []
    job.run()
    assert job.rows() == [row(1), row(2)]


@once
def test_a_failed_job_leaves_no_files(job: Job) -> None:
    job.write(insert(*range(50)))
    job.run()
    job.write([("+U", row(n, "us")) for n in range(50)])
    with crashing("in a task"), pytest.raises(TemporaryError, match="nothing was applied") as caught:
        job.run()
    assert "crash in a task" in str(caught.value)
    assert job.unreferenced_files() == []
    job.run()
    assert job.rows() == [row(n, "us") for n in range(50)]


@without_deletes
def test_a_dead_process_leaves_files_and_no_harm(job: Job) -> None:
    job.write(insert(1))
    with crashing("before the commit"), pytest.raises(TemporaryError):
        job.run()
    assert len(job.unreferenced_files()) == 1
    job.run()
    assert job.rows() == [row(1)]


@without_deletes
@pytest.mark.parametrize(
    ("partition_by", "message"),
    [
        (["month(region)"], r"tables\[0\]\.partition_by\[0\]: month of column region, which is string: .*"),
        (["region", "truncate(2, day)"], r"partition_by\[1\]: truncate of column day, which is date: .*"),
        (["month(day)", "day(day)"], r"partition_by\[1\]: day of column day, which is date: .*redundant.*"),
    ],
)
def test_partitions_that_do_not_fit_their_column_leave_no_table(
    job: Job, partition_by: list[str], message: str
) -> None:
    """If the table were left behind unpartitioned, it would not fit the corrected configuration."""
    job.columns, job.partition_by = {"id": "bigint", "region": "string", "day": "date"}, partition_by
    row = {"id": 1, "region": "eu", "day": dt.date(2026, 1, 2)}
    job.write([("+I", row)])
    mapped = resolve_tables(job.config(), ())[0]
    with pytest.raises(ConfigError, match=message):  # as `check` does
        plan_table(Catalogs(job.spark, job.config()), job.config(), mapped, None)
    with pytest.raises(ConfigError, match=message):
        job.run()
    job.partition_by = ["region", "day(day)"]
    job.run()
    assert job.rows() == [row]
    assert len(list((job.table_folder / "data" / "region=eu" / "day_day=2026-01-02").iterdir())) == 1
    assert job.java_table().currentSnapshot().parentId() is None


@pytest.mark.parametrize("deletes", ["position", "equality"])
def test_a_warm_commit_asks_the_catalog_three_times(spark: SparkSession, tmp_path: Path, deletes: Any) -> None:
    """Whether others changed the table, for the transaction's metadata, and, by Iceberg itself, before the commit. What
    the sink knows since its own last commit isn't read again.
    """
    job = Job(spark, tmp_path, deletes=deletes, table={"merge_small_files": False})
    job.write(insert(1, 2))
    job.run()
    batches = 3
    for number in range(batches):
        job.write([("+U", row(1, f"r{number}")), *insert(number + 3)])
    with jvm_calls(OpenTable, "catch_up") as looking, jvm_calls(TableSink, "commit") as committing:
        job.run()
    assert job.rows() == [row(1, "r2"), *(row(number) for number in range(2, 6))]
    calls = [command.split("\n")[2] for command in (*looking, *committing) if command.startswith("c\n")]
    assert {name: calls.count(name) for name in ("refresh", "newTransaction", "commitTransaction")} == {
        "refresh": batches,
        "newTransaction": batches,
        "commitTransaction": batches,
    }
    assert not {"schema", "spec", "partitionSpec"} & set(calls), "they are the same as before"
    assert len(looking) <= 4 * batches
    assert len(committing) <= 60 * batches
