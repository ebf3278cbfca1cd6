"""The dead-letter table looks after itself: its files and states don't become more and more, and no letter is lost."""

import json
import os
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from pyspark.sql import SparkSession

from sink.commands import maintain
from sink.config import Config
from sink.deadletters import upkeep
from sink.deadletters.upkeep import LookedAfter, look_after
from sink.run import maintenance
from sink.run.maintenance import Maintenance
from sink.spark.versions import to_arrow
from sink.targets.base import CREATED_BY
from sink.targets.catalogs import Catalogs
from tests.delta.harness import DeltaJob
from tests.sink.harness import Job

pytestmark = pytest.mark.spark

NOTHING_KEPT = {"expire": {"older_than": "0 minutes", "retain_last": 1}}
WEEK = 7 * 86400


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "COMPACT_EVERY", 6)


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
    """A micro-batch, and so a commit of dead letters, for each text. None of them is JSON."""
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


def test_small_files_old_states_and_orphans_go_and_the_letters_stay(job: Job) -> None:
    bad = [f"bad {number}" for number in range(7)]
    apply(job, *bad)
    assert live_files(job) == 7
    left = orphan(job)
    given = settings(job)
    first = look_after(job.spark, given)
    assert first is not None
    assert first.compacted is not None
    assert live_files(job) == 1
    assert not left.exists()
    assert letters(job) == bad
    second = look_after(job.spark, given)
    assert second is not None
    assert second.compacted is None, "not before there are more commits"
    if not isinstance(job, DeltaJob):
        assert second.expired_files > 0, "those that the compaction replaced"
        assert states(job) == 1
    job.run()  # reads what it has read: the position of the letters is found without the history
    apply(job, "bad 7", "bad 8")
    assert letters(job) == [*bad, "bad 7", "bad 8"]


def test_files_are_merged_also_if_few_states_are_left_to_count_commits(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(spark, tmp_path, file_format="json")
    given = config(job, expire={"older_than": "0 minutes", "retain_last": 2})
    for number in range(7):
        apply(job, f"bad {number}")
        look_after(spark, given)
    assert live_files(job) < 6
    assert letters(job) == [f"bad {number}" for number in range(7)]


def test_nothing_is_done_while_letters_wait_for_the_topic(job: Job) -> None:
    apply(job, *"abcdefg")
    left = orphan(job)
    given = settings(job)
    table = Catalogs(job.spark, given).load(given.dead_letter_table)
    assert table is not None
    table.set_property("rowdelta.another.lake.x.t.unpublished", "op")
    assert look_after(job.spark, given) == LookedAfter()
    assert live_files(job) == 7
    assert left.exists()
    table.refresh()
    table.set_property("rowdelta.another.lake.x.t.unpublished", None)
    look_after(job.spark, given)
    assert live_files(job) == 1


@pytest.mark.parametrize("by", [None, "another"])
def test_a_table_that_another_job_created_keeps_its_history(
    spark: SparkSession, tmp_path: Path, by: str | None
) -> None:
    job = Job(spark, tmp_path, file_format="json")
    apply(job, *"abc")
    change = f"UNSET TBLPROPERTIES ('{CREATED_BY}')" if by is None else f"SET TBLPROPERTIES ('{CREATED_BY}' = '{by}')"
    spark.sql(f"ALTER TABLE {job.dead_letters} {change}")
    left = orphan(job)
    done = look_after(spark, config(job))
    assert done is not None
    assert (done.expired_files, list(done.orphans)) == (0, [])
    assert left.exists()
    assert states(job) == 3


def test_a_running_job_does_it_once_an_hour(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(spark, tmp_path, file_format="json")
    apply(job, *"abcdefg")
    monkeypatch.setattr(maintenance, "SECONDS", 0.05)
    given = config(job, **NOTHING_KEPT)
    calls: list[dict[str, Any]] = []

    def counted(*arguments: Any, **how: Any) -> Any:
        calls.append(how)
        return look_after(*arguments, **how)

    monkeypatch.setattr(maintenance, "look_after", counted)
    thread = Maintenance(spark, given, Mock(working=list))
    thread.start()
    end = time.monotonic() + 60
    while not (calls and live_files(job) == 1) and time.monotonic() < end:
        time.sleep(0.1)
    time.sleep(0.3)
    thread.stop()
    assert calls == [{"may_rewrite": True, "only_due": True}]
    assert live_files(job) == 1
    assert "maintenance failed" not in caplog.text


def test_a_failure_is_a_warning(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError("the store is away")

    monkeypatch.setattr(maintenance, "look_after", fails)
    monkeypatch.setattr(maintenance, "SECONDS", 0.05)
    thread = Maintenance(spark, config(Job(spark, tmp_path, file_format="json")), Mock(working=list))
    thread.start()
    end = time.monotonic() + 30
    while "the store is away" not in caplog.text and time.monotonic() < end:
        time.sleep(0.05)
    thread.stop()
    assert "dead_letters: maintenance failed, tried again later: the store is away" in caplog.text


def test_the_command_does_it_too(job: Job) -> None:
    bad = [f"bad {number}" for number in range(7)]
    apply(job, *bad)
    given = settings(job, budget=0)
    left = orphan(job)
    target = job.target.rpartition(".")[0] + ".dead_letters"
    *_, planned = maintain.maintain(job.spark, given, (), dry_run=True)
    assert (planned.table, planned.rewritten_data_files, planned.error) == (target, 0, None)
    assert [Path(path).name for path in planned.orphans] == [left.name]
    assert live_files(job) == 7
    *_, done = maintain.maintain(job.spark, given, (), dry_run=False)
    assert (done.table, done.rewritten_data_files, done.added_data_files) == (target, 7, 1)
    assert json.loads(maintain.as_json(done))["error"] is None
    assert not left.exists()
    assert letters(job) == bad
    only = [each.table for each in maintain.maintain(job.spark, given, [job.target], dry_run=True)]
    assert only == [job.target]
