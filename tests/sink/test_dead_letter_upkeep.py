"""The dead-letter table looks after itself: its files and states don't become more and more, and no letter is lost."""

import json
import logging
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from pyspark.sql import SparkSession

from sink.commands import maintain
from sink.config import Config
from sink.config.maintenance import MaintenanceSection
from sink.deadletters import upkeep
from sink.deadletters.upkeep import Upkeep, open_upkeep
from sink.errors import TableError
from sink.run import maintenance
from sink.run.maintenance import Maintenance
from sink.run.pipeline import Pipeline
from sink.spark.versions import to_arrow
from sink.targets.delta import checkpoints
from sink.targets.iceberg.snapshots import Snapshot
from sink.targets.iceberg.table import IcebergTable
from sink.targets.own_state import CREATED_BY
from tests.delta.harness import DeltaJob
from tests.sink.harness import Job

pytestmark = pytest.mark.spark

NOTHING_KEPT = {"expire": {"older_than": "0 minutes", "retain_last": 1}}
WEEK = 7 * 86400


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "_LIMITS", replace(upkeep._LIMITS, min_input_files=6))


@pytest.fixture(params=["iceberg", "delta"])
def job(request: pytest.FixtureRequest, spark: SparkSession, tmp_path: Path) -> Job:
    made = DeltaJob if request.param == "delta" else Job
    return made(spark, tmp_path, file_format="json")


def config(job: Job, **maintained: Any) -> Config:
    return Config.model_validate(job.config_values() | {"maintenance": maintained})


def settings(job: Job, **more: Any) -> Config:
    """By which no state stays, if the format lets us choose."""
    return config(job, **more, **({} if isinstance(job, DeltaJob) else NOTHING_KEPT))


def apply(job: Job, *texts: str) -> None:
    """A micro-batch, and so a commit of dead letters, for each text. None of them is JSON. The job rewrites nothing."""
    for text in texts:
        job.write_text(f"{text}\n")
    job.run()


def folder(job: Job) -> Path:
    return job.table_folder.with_name("dead_letters")


def letters(job: Job) -> list[str]:
    name = f"delta.`{folder(job)}`" if isinstance(job, DeltaJob) else job.dead_letters
    rows = to_arrow(job.spark.sql(f"SELECT value FROM {name}")).to_pylist()
    return sorted(row["value"].decode() for row in rows)


def live_files(job: Job) -> int:
    if isinstance(job, DeltaJob):
        return len(job.spark.read.format("delta").load(str(folder(job))).inputFiles())
    return job.spark.sql(f"SELECT * FROM {job.dead_letters}.data_files").count()


def states(job: Job) -> int:
    return job.spark.sql(f"SELECT * FROM {job.dead_letters}.snapshots").count()


def orphan(job: Job) -> Path:
    path = folder(job) / "orphan.parquet" if isinstance(job, DeltaJob) else folder(job) / "data" / "orphan.parquet"
    path.write_bytes(b"x")
    os.utime(path, (time.time() - 2 * WEEK, time.time() - 2 * WEEK))
    return path


def opened(job: Job, given: Config | None = None) -> Upkeep:
    found = open_upkeep(job.spark, given or settings(job))
    assert found is not None
    return found


def everything(job: Job, given: Config | None = None) -> None:
    found = opened(job, given)
    found.compact()
    found.expire()
    found.clean()
    found.tend()


def test_small_files_old_states_and_orphans_go_and_the_letters_stay(job: Job) -> None:
    bad = [f"bad {number}" for number in range(8)]
    apply(job, *bad)
    assert live_files(job) == 8
    left = orphan(job)
    found = opened(job)
    done = found.compact()
    assert done is not None
    assert done[1] == 0
    assert live_files(job) <= 2, "Iceberg leaves one as it is"
    assert opened(job).compact() is None, "not before there are more small files"
    if not isinstance(job, DeltaJob):
        assert opened(job).expire() >= 7
        assert states(job) == 1
    assert [Path(path).name for path in found.clean(dry_run=True)] == [left.name]
    found.clean()
    assert not left.exists()
    found.tend()
    assert letters(job) == bad
    job.run()  # reads what it has read: the position of the letters is found without the history
    apply(job, "bad 8", "bad 9")
    assert letters(job) == [*bad, "bad 8", "bad 9"]


def test_large_files_of_a_checkpoints_stay(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = DeltaJob(spark, tmp_path, file_format="json")
    limits = replace(upkeep._LIMITS, min_input_files=3, small_file_size=20_000)
    monkeypatch.setattr(upkeep, "_LIMITS", replace(limits, min_input_files=100))
    apply(job, random.Random(1).randbytes(500_000).hex(), *(f"bad {number}" for number in range(6)))
    sizes = sorted(path.stat().st_size for path in folder(job).glob("*.parquet"))
    assert sizes[-1] > 10 * sum(sizes[:-1])
    monkeypatch.setattr(upkeep, "_LIMITS", limits)
    done = opened(job).compact()
    assert done is not None
    assert (done[0].touched, live_files(job)) == (6, 2)


def test_a_job_that_ends_does_it_if_it_kept_bad_records(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint too, in Delta Lake: without it the log would be kept for ever."""
    monkeypatch.setattr(checkpoints, "_EVERY", 5)
    opening: list[str] = []

    def counted(spark: SparkSession, given: Config) -> Upkeep | None:
        opening.append(given.dead_letter_table)
        return open_upkeep(spark, given)

    monkeypatch.setattr(maintenance, "open_upkeep", counted)
    job = DeltaJob(spark, tmp_path, file_format="json")
    for text in "abcdefgh":
        job.write_text(f"{text}\n")
    Pipeline(spark, config(job)).run()
    looks = len(opening)
    assert looks in (1, 2), "at its end, and once before if the machine is slow"
    assert live_files(job) <= 2
    assert letters(job) == [*"abcdefgh"]
    assert list((folder(job) / "_delta_log").glob("*.checkpoint*"))
    job.write_text('{"row_kind": "+I", "seq": 1, "id": 1, "region": "eu"}\n')
    Pipeline(spark, config(job)).run()
    assert len(opening) == looks


def test_history_stays_while_letters_wait_for_the_topic(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rowdelta")
    job = Job(spark, tmp_path, file_format="json")
    apply(job, *"abc")
    given, table = settings(job), opened(job).table
    prefix = f"rowdelta.{given.sink.id}.{job.target}"
    position = table.position(prefix)
    assert position is not None
    table.set_property(f"{prefix}.unpublished", position.operation)
    assert opened(job).expire() == 0
    assert states(job) == 3
    assert "old snapshots and files stay while bad records wait" in caplog.text
    assert f"to the topic: {given.sink.id}." in caplog.text
    left = orphan(job)
    assert opened(job).clean() == ()
    assert left.exists()
    table.refresh()
    table.set_property(f"{prefix}.unpublished", "an earlier commit")
    opened(job).expire()
    assert states(job) == 1


def test_letters_that_wait_are_seen_though_marked_later(spark: SparkSession, tmp_path: Path) -> None:
    """A compaction may have taken minutes since the table was opened."""
    job = Job(spark, tmp_path, file_format="json")
    apply(job, *"abc")
    found = opened(job)
    prefix = f"rowdelta.{job.config().sink.id}.{job.target}"
    position = found.table.position(prefix)
    assert position is not None
    opened(job).table.set_property(f"{prefix}.unpublished", position.operation)
    assert found.expire() == 0
    assert states(job) == 3


def test_twenty_small_files_fit_into_a_group() -> None:
    limits = upkeep._LIMITS
    assert limits.small_file_size is not None
    assert 20 * limits.small_file_size <= limits.max_file_group_size


def test_a_quiet_target_walks_through_the_history_once(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The snapshot of its last letters has expired, and other targets go on adding theirs."""
    job = Job(spark, tmp_path, file_format="json")
    apply(job, "a")
    add = f"INSERT INTO {job.dead_letters} VALUES ('another', 'there', 0, 0, NULL, NULL, 'x', 'y', current_timestamp())"
    for _ in range(3):
        spark.sql(add)
    assert opened(job).expire() >= 1
    for _ in range(3):
        spark.sql(add)
    table, prefix = opened(job).table, f"rowdelta.{job.config().sink.id}.{job.target}"
    assert isinstance(table, IcebergTable)
    first = table.position(prefix, newest_if_in_doubt=True)
    spark.sql(add)
    table.refresh()
    walked: list[int] = []
    original = IcebergTable.snapshot

    def counted(self: IcebergTable, snapshot_id: int | None) -> Snapshot | None:
        walked.append(0)
        return original(self, snapshot_id)

    monkeypatch.setattr(IcebergTable, "snapshot", counted)
    assert first is not None
    assert table.position(prefix, newest_if_in_doubt=True) == first
    assert len(walked) <= 1


def test_a_job_goes_on_after_the_table_was_replaced(spark: SparkSession, tmp_path: Path) -> None:
    """Iceberg keeps its properties then, and no snapshot is the current one."""
    job = Job(spark, tmp_path, file_format="json")
    apply(job, "a")
    columns = ", ".join(
        f"{field.name} {field.dataType.simpleString()}{'' if field.nullable else ' NOT NULL'}"
        for field in spark.table(job.dead_letters).schema
    )
    spark.sql(f"CREATE OR REPLACE TABLE {job.dead_letters} ({columns}) USING iceberg")
    table, prefix = opened(job).table, f"rowdelta.{job.config().sink.id}.{job.target}"
    assert table.property(f"{prefix}.position") is not None
    assert table.snapshot_id() is None
    assert table.position(prefix, newest_if_in_doubt=True) is None
    apply(job, "b")
    assert letters(job) == ["b"]


def test_a_mark_is_forgotten_with_its_topic(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(spark, tmp_path, file_format="json")
    apply(job, "a")
    table, prefix = opened(job).table, f"rowdelta.{job.config().sink.id}.{job.target}"
    table.set_property(f"{prefix}.unpublished", "op")
    assert opened(job).table.stored("unpublished") == {prefix: "op"}
    job.run()
    assert opened(job).table.stored("unpublished") == {}
    assert "weren't sent to the topic that there was" in caplog.text


def test_a_job_goes_on_after_a_rollback_to_before_what_has_expired(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No micro-batch depends on the dead-letter table's history: letters are compared with what it has."""
    job = Job(spark, tmp_path, file_format="json")
    apply(job, "a")
    other = "'another', 'there', 0, 0, NULL, NULL, 'x', 'unparseable', current_timestamp()"
    spark.sql(f"INSERT INTO {job.dead_letters} VALUES ({other})")
    kept = spark.sql(f"SELECT snapshot_id FROM {job.dead_letters}.snapshots ORDER BY committed_at DESC").first()
    assert kept is not None
    everything(job)
    assert states(job) == 1
    apply(job, "b")
    catalog = job.dead_letters.split(".")[0]
    spark.sql(f"CALL {catalog}.system.rollback_to_snapshot('{job.dead_letters}', {kept.snapshot_id})")
    job.write_text('{"row_kind": "+I", "seq": 1, "id": 1, "region": "eu"}\nc\n')
    job.run()
    assert job.rows() == [{"id": 1, "region": "eu"}]
    values = spark.sql(f"SELECT value FROM {job.dead_letters} WHERE table != 'another'").collect()
    assert sorted(row.value.decode() for row in values) == ["a", "c"]


def test_a_table_that_another_job_created_is_its_own(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(spark, tmp_path, file_format="json")
    apply(job, *"abcdefgh")
    spark.sql(f"ALTER TABLE {job.dead_letters} SET TBLPROPERTIES ('{CREATED_BY}' = 'another')")
    left = orphan(job)
    found = opened(job, config(job))
    assert (found.expire(), found.compact(), list(found.clean())) == (0, None, [])
    assert left.exists()
    assert (states(job), live_files(job)) == (8, 8)
    everything(job)
    assert states(job) == 1, "the configuration says so"


def test_another_table_of_its_name_is_left_alone(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(spark, tmp_path, file_format="json")
    apply(job, "a")
    spark.sql(f"ALTER TABLE {job.dead_letters} DROP COLUMN error_class")
    with pytest.raises(TableError, match="can't be the dead-letter table"):
        open_upkeep(spark, config(job))


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.1)
    assert condition()


@contextmanager
def looking(spark: SparkSession, given: Config, monkeypatch: pytest.MonkeyPatch) -> Iterator[Maintenance]:
    monkeypatch.setattr(maintenance, "SECONDS", 0.05)
    thread = Maintenance(
        spark, given, Mock(working=list, dead_letters=SimpleNamespace(commits=1, name=given.dead_letter_table))
    )
    thread.start()
    try:
        yield thread
    finally:
        thread.stop()


def test_a_running_job_does_it_once_an_hour(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(spark, tmp_path, file_format="json")
    apply(job, *"abcdefgh")
    opening: list[Config] = []

    def counted(spark: SparkSession, given: Config) -> Upkeep | None:
        opening.append(given)
        return open_upkeep(spark, given)

    monkeypatch.setattr(maintenance, "open_upkeep", counted)
    with looking(spark, settings(job), monkeypatch):
        wait_until(lambda: live_files(job) <= 2 and states(job) == 1)
        time.sleep(0.5)
    assert len(opening) == 1
    assert "maintenance failed" not in caplog.text


def test_files_are_merged_and_states_go_when_the_window_opens(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(spark, tmp_path, file_format="json")
    apply(job, *"abcdefgh")
    is_open: list[bool] = []
    monkeypatch.setattr(MaintenanceSection, "is_open", lambda *_: bool(is_open))
    tend, tended = Upkeep.tend, list[Upkeep]()

    def noted(self: Upkeep) -> None:
        tend(self)
        tended.append(self)

    monkeypatch.setattr(Upkeep, "tend", noted)
    with looking(spark, settings(job), monkeypatch):
        wait_until(lambda: bool(tended))
        assert (live_files(job), states(job)) == (8, 8)
        is_open.append(True)
        wait_until(lambda: live_files(job) <= 2 and states(job) == 1)


def test_a_step_that_fails_is_a_warning_and_stops_no_other(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError("the store is away")

    job = Job(spark, tmp_path, file_format="json")
    apply(job, *"abcdefgh")
    left = orphan(job)
    monkeypatch.setattr(Upkeep, "expire", fails)
    with looking(spark, config(job, **NOTHING_KEPT, orphans={"every": "0 days"}), monkeypatch):
        wait_until(lambda: not left.exists() and "the store is away" in caplog.text)
    assert "dead_letters: maintenance failed, tried again later: the store is away" in caplog.text
    assert live_files(job) <= 2


def test_a_step_that_failed_is_tried_again_without_new_letters(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(spark, tmp_path, file_format="json")
    apply(job, *"abcdefgh")
    compact, failed = Upkeep.compact, list[Upkeep]()

    def fails_once(self: Upkeep) -> Any:
        if not failed:
            failed.append(self)
            raise OSError("the store is away")
        return compact(self)

    monkeypatch.setattr(Upkeep, "compact", fails_once)
    monkeypatch.setattr(maintenance, "_LOOK_EVERY", 0.0)
    with looking(spark, settings(job), monkeypatch):
        wait_until(lambda: live_files(job) <= 2)
    assert failed


def test_the_command_does_it_too(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(spark, tmp_path, file_format="json")
    bad = [f"bad {number}" for number in range(8)]
    apply(job, *bad)
    given = settings(job, budget=0)
    left = orphan(job)
    target = job.target.rpartition(".")[0] + ".dead_letters"
    *_, planned = maintain.maintain(job.spark, given, (), dry_run=True)
    assert (planned.table, planned.error) == (target, None)
    assert planned.rewritten_data_files == 8
    assert [Path(path).name for path in planned.orphans] == [left.name]
    assert live_files(job) == 8
    *_, done = maintain.maintain(job.spark, given, (), dry_run=False)
    assert (done.table, done.added_data_files) == (target, 1)
    assert done.rewritten_data_files >= 7
    assert json.loads(maintain.as_json(done))["error"] is None
    assert not left.exists()
    assert letters(job) == bad
    only = [each.table for each in maintain.maintain(job.spark, given, [job.target], dry_run=True)]
    assert only == [job.target]
