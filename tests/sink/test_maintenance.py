"""What a job does for its tables beside its micro-batches, and `rowdelta maintain`."""

import json
import logging
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from pyspark.sql import SparkSession

from deltawriters.rewrite import SmallFile
from sink.commands import inspection
from sink.commands.maintain import as_json, lines, maintain
from sink.config import Config
from sink.config.maintenance import MaintenanceSection
from sink.run import maintenance
from sink.run.rewrite_plan import OPEN_COST, RewriteOptions, chosen
from sink.targets.base import Rewritable
from tests.sink.harness import Changes, Job, by_pyiceberg, seen
from tests.stack.process import wait_until


@pytest.fixture(autouse=True)
def _tiny_tables_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance, "LEAST_GAIN", 1)


GREEDY = {"budget": 1000, "rewrite": {"min-input-files": 2}}
MANY = 1 << 40


def rewritable(path: str, size: int, *, deleted: int = 0, deletes: int = 0, partition: str = "{}") -> Rewritable:
    """A file of 100 rows."""
    return Rewritable(0, partition, 100, deleted, deletes, SmallFile(path, size, None, 0))


def groups(files: list[Rewritable], most_bytes: int | None = None, **options: Any) -> list[list[str]]:
    found = chosen(files, RewriteOptions(**options), 100 * OPEN_COST, most_bytes)
    return [[small.path for small in group.files] for group in found]


def test_what_pays_most_comes_first() -> None:
    large = 100 * OPEN_COST
    files = [
        rewritable("clean", large),
        rewritable("few dead", large, deleted=5, deletes=1),
        rewritable("many dead", large, deleted=60, deletes=1, partition="b"),
        rewritable("some dead", large, deleted=20, deletes=1),
        rewritable("nothing lives", large, deleted=100, deletes=1, partition="c"),
        *(rewritable(f"small {n}", OPEN_COST, partition="d") for n in range(5)),
        *(rewritable(f"lonely {n}", OPEN_COST, partition="e") for n in range(4)),
        rewritable("many deletes", large, deletes=8, partition="f"),
    ]
    assert groups(files) == [
        ["nothing lives"],
        ["many dead"],
        [f"small {n}" for n in range(5)],
        ["some dead"],
        ["many deletes"],
    ]


def test_the_budget_is_kept() -> None:
    large = 100 * OPEN_COST
    files = [rewritable(f"{n}", large, deleted=50 + n) for n in range(4)]
    assert groups(files, 100 * OPEN_COST) == [["3", "2"], ["1", "0"]]
    assert groups(files, 49 * OPEN_COST) == [["3"], ["2"], ["1"]]
    assert groups(files, 40 * OPEN_COST) == []


def test_a_window_opens_and_closes() -> None:
    at_night = MaintenanceSection(window="* 1-5 * * *")
    assert at_night.is_open(datetime(2026, 1, 31, 5, 59, 59, tzinfo=UTC))
    assert not at_night.is_open(datetime(2026, 1, 31, 6, 0, tzinfo=UTC))
    assert MaintenanceSection().is_open(datetime(2026, 1, 31, 6, 0, 30, tzinfo=UTC))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"window": "at night"}, "not a cron expression"),
        ({"expire": {"older_than": "soon"}}, 'write a time such as "5 days"'),
        ({"orphans": {"older_than": "3 hours"}}, 'write at least "1 day"'),
    ],
)
def test_mistakes_are_explained(values: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValidationError, match=expected):
        MaintenanceSection.model_validate(values)


def test_a_table_has_values_of_its_own(tmp_path: Path) -> None:
    table = {"source": "t", "target": "lake.n.t", "key": ["id"], "maintenance": {"budget": 2}}
    config = Config.model_validate(
        {
            "sink": {"id": "shop", "checkpoint": str(tmp_path)},
            "source": {"type": "kafka", "format": "debezium-json", "options": {"kafka.bootstrap.servers": "b:9092"}},
            "catalogs": {"lake": {"type": "hadoop", "warehouse": str(tmp_path)}},
            "maintenance": {"window": "* 1 * * *", "expire": None},
            "tables": [table],
        }
    )
    found = config.maintenance_of(config.tables[0])
    assert (found.budget, found.window, found.expire) == (2, "* 1 * * *", None)


@contextmanager
def looking_often(seconds: float = 0.05) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(maintenance, "SECONDS", seconds)
        patch.setattr(maintenance, "PAUSE", 0.2)
        yield


def rewrites(caplog: pytest.LogCaptureFixture) -> int:
    return sum("rewrote" in record.getMessage() for record in caplog.records)


def running(job: Job, **maintenance_of_table: Any) -> Job:
    job.sections = {"sink": {"trigger": "100 milliseconds"}}
    job.table = {"merge_small_files": False, "maintenance": GREEDY | maintenance_of_table}
    return job


@pytest.mark.spark
def test_a_running_job_rewrites_files(spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Beside the stream, again and again, and what the table has stays right."""
    caplog.set_level(logging.INFO, "rowdelta")
    job = running(Job(spark, tmp_path, tasks=1, properties={"format-version": "3"}))
    changes = Changes(job)
    changes.write(6)
    with looking_often():
        pipeline = job.pipeline()
        thread = threading.Thread(target=pipeline.run)
        thread.start()
        try:
            for number in range(1, 4):
                assert wait_until(lambda number=number: rewrites(caplog) >= number)  # type: ignore[misc]
                changes.write(6)
            assert wait_until(lambda: "batch 23:" in caplog.text)
        finally:
            pipeline.stop()
            thread.join(60)
    assert not thread.is_alive()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING], caplog.text
    assert job.rows() == changes.expected()
    job.check_deletes()
    assert job.check_index() is not None
    assert job.unreferenced_files() == []


@pytest.mark.spark
def test_a_job_that_ends_does_what_is_due(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as one that a scheduler starts each minute."""
    caplog.set_level(logging.INFO, "rowdelta")
    job = Job(spark, tmp_path, tasks=1, table={"merge_small_files": False, "maintenance": GREEDY})
    changes = Changes(job)
    changes.write(3)
    job.run()
    assert rewrites(caplog) == 1
    assert job.rows() == changes.expected()


@pytest.mark.spark
@pytest.mark.parametrize("off", [{"budget": 0}, {"window": "0 0 29 2 *"}])
def test_it_can_be_switched_off(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture, off: dict[str, Any]
) -> None:
    caplog.set_level(logging.INFO, "rowdelta")
    job = Job(spark, tmp_path, tasks=1, table={"merge_small_files": False, "maintenance": GREEDY | off})
    Changes(job).write(2)
    job.run()
    assert rewrites(caplog) == 0


@pytest.mark.spark
@pytest.mark.parametrize("trigger", ["100 milliseconds", "available-now"])
def test_a_job_that_is_stopped_does_not_wait_for_a_rewrite(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trigger: str
) -> None:
    """The task is cancelled, and what it wrote is gone. The same while a job finishes that has read all there is."""
    started = tmp_path / "started"

    def slow(*_: object) -> Iterator[dict[str, Any]]:
        started.touch()
        time.sleep(600)
        yield {}

    monkeypatch.setattr("sink.spark.task.rewrite", slow)
    job = running(Job(spark, tmp_path, tasks=1))
    job.sections = {"sink": {"trigger": trigger}}
    seconds = 600 if trigger == "available-now" else 0.05  # there only the end is meant
    changes = Changes(job)
    changes.write(3)
    with looking_often(seconds):
        pipeline = job.pipeline()
        thread = threading.Thread(target=pipeline.run)
        thread.start()
        assert wait_until(started.exists)
        if trigger != "available-now":
            changes.write(1)
            assert wait_until(lambda: job.rows() == changes.expected())  # micro-batches go on beside it
        pipeline.stop()
        thread.join(30)
    assert not thread.is_alive()
    assert job.rows() == changes.expected()
    assert job.unreferenced_files() == []


@pytest.mark.spark
@pytest.mark.parametrize("version", [2, 3])
def test_the_command_does_it_once(spark: SparkSession, tmp_path: Path, version: int) -> None:
    job = Job(spark, tmp_path, tasks=1, properties={"format-version": str(version)})
    job.table = {
        "merge_small_files": False,
        "maintenance": {"budget": 0, "expire": {"older_than": "0 minutes", "retain_last": 1}, "orphans": {}},
    }
    changes = Changes(job)
    changes.write(6)
    job.run()
    orphan, young = job.table_folder / "data" / "orphan.parquet", job.table_folder / "data" / "young.parquet"
    for path in (orphan, young):
        path.write_bytes(b"x")
    week = time.time() - 7 * 86400
    os.utime(orphan, (week, week))

    status = "\n".join(seen(inspection.status, spark, job.config()))
    assert re.search(
        r"\n  files: 0\.0 MB on average, [1-9]\d\.\d% of their rows are deleted\n  [2-6] snapshots since", status
    )
    assert re.search(r" UTC; due to expire: [1-5]$", status)
    assert "rewritten last" not in status

    (found,) = maintain(spark, job.config(), ["orders"], dry_run=True)
    assert found.error is None
    assert [Path(path).name for path in found.orphans] == ["orphan.parquet"]
    assert orphan.exists()
    assert "  rewrite      6 data files" in "\n".join(lines(found))

    (done,) = maintain(spark, job.config(), ["orders"], dry_run=False)
    assert done.error is None
    assert (done.rewritten_data_files, done.added_data_files, done.failed_groups) == (6, 1, 0)
    assert done.expired_files > 0
    assert json.loads(as_json(done))["orphans"] == done.orphans
    status = "\n".join(seen(inspection.status, spark, job.config()))
    assert re.search(r"\n  files: .+, 0\.0% of their rows are deleted\n  rewritten last: 6 files at ", status)
    assert status.endswith(" UTC; due to expire: 1")  # it stays, since it stored the position
    assert not orphan.exists()
    assert young.exists()
    young.unlink()
    assert len([file for file in job.files() if file["content"] == 0]) == 1
    assert job.rows() == changes.expected()
    assert job.check_index() is not None
    changes.write(2)  # the index needs none of the snapshots that are gone
    job.run()
    assert job.rows() == changes.expected()
    assert job.check_index() is not None
    for _ in range(2):
        (again,) = maintain(spark, job.config(), [], dry_run=False)
    assert again.rewritten_data_files == 0


@pytest.mark.spark
@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("partition_by", [(), ("bucket(2, id)",)])
def test_equality_deletes_become_deletes_by_position(
    spark: SparkSession, tmp_path: Path, version: int, partition_by: tuple[str, ...]
) -> None:
    """Of another mode here. Then engines read the table that don't know equality deletes, such as PyIceberg."""
    job = Job(spark, tmp_path, tasks=1, properties={"format-version": str(version)}, partition_by=partition_by)
    job.deletes = "equality"
    changes = Changes(job)
    changes.write(5)
    job.run()
    assert re.search(r"\n  due: [1-9]\d* equality deletes; ", "\n".join(seen(inspection.status, spark, job.config())))
    equality_deletes = len([file for file in job.files() if file["content"] == 2])
    assert equality_deletes > 0

    job.deletes = "position"
    job.table = {"merge_small_files": False, "maintenance": {"budget": 0}}
    before = job.rows()
    (found,) = maintain(spark, job.config(), [], dry_run=False)
    assert found.error is None
    assert found.skipped == ""
    assert found.converted_equality_deletes == equality_deletes
    assert not [file for file in job.files() if file["content"] == 2]
    assert job.rows() == before == changes.expected()
    assert job.check_index() is not None
    assert by_pyiceberg(job) == before

    changes.write(3)
    job.run()
    assert job.rows() == changes.expected()
    assert job.check_index() is not None
    (again,) = maintain(spark, job.config(), [], dry_run=False)
    assert again.converted_equality_deletes == 0
