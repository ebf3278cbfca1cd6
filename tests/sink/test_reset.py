"""`rowdelta reset`: the source is read from its start again, and a sink that runs meanwhile does no harm."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from sink import cli
from sink.commands import reset
from sink.errors import ConfigError, TableError, TemporaryError
from sink.run import running
from sink.targets.catalogs import Catalogs
from sink.targets.delta.log import DeltaLog
from sink.targets.iceberg.commit import IcebergCommitter
from tests.delta.harness import DeltaJob
from tests.sink.harness import Job
from tests.sink.test_submit import write_config


@pytest.fixture
def make(spark: SparkSession, tmp_path: Path) -> Callable[..., Job]:
    def made(kind: str, **more: Any) -> Job:
        if kind == "delta":
            return DeltaJob(spark, tmp_path, **more)
        return Job(spark, tmp_path, properties={"format-version": kind[1:]}, **more)

    return made


def found(job: Job, *, empty: bool) -> reset.Reset:
    plan = reset.find(job.spark, job.config(), "orders", empty=empty)
    assert plan is not None
    return plan


def state(job: Job) -> dict[str, str]:
    table = Catalogs(job.spark, job.config()).load(job.target)
    assert table is not None
    return dict(table.own_state("rowdelta.shop"))


def write(job: Job) -> None:
    job.write([("+I", {"id": 1, "region": "eu"}), ("+I", {"id": 2, "region": "us"})])
    job.write([("-U", {"id": 1, "region": "eu"}), ("+U", {"id": 1, "region": "ch"})])


ROWS = [{"id": 1, "region": "ch"}, {"id": 2, "region": "us"}]


@pytest.mark.spark
@pytest.mark.parametrize(("empty", "kind"), [(True, "v3"), (False, "v2"), (True, "delta")])
def test_the_source_is_read_again(make: Callable[..., Job], kind: str, empty: bool) -> None:
    job = make(kind)
    write(job)
    job.run()
    stale = {"id": 9, "region": "old"}
    job.append([stale])
    plan = found(job, empty=empty)
    lines = list(plan.lines())
    assert any("position" in line and "modified" in line for line in lines)
    assert any("key index" in line for line in lines)
    plan.apply()
    assert not state(job).keys() - {"cleaned", "written", "rewritten", "key"}
    assert job.rows() == ([] if empty else [*ROWS, stale])
    assert [name for name in job.index_folder.rglob("*") if name.is_file() and not name.name.endswith(".crc")] == []
    first = job.changes_folder / "000 first.parquet"
    os.utime(job.write([("+I", {"id": 3, "region": "at"})]).rename(first), (1, 1))  # what a position would pass over
    job.run()
    assert job.rows() == [*ROWS, {"id": 3, "region": "at"}, *([] if empty else [stale])]


@pytest.fixture
def once() -> Callable[[Callable[[], None]], Callable[[], None]]:
    def only(work: Callable[[], None]) -> Callable[[], None]:
        left = [work]
        return lambda: left.pop()() if left else None

    return only


@pytest.mark.spark
@pytest.mark.parametrize(("empty", "kind"), [(False, "v3"), (True, "delta")])
def test_a_commit_that_was_begun_before_is_refused(
    make: Callable[..., Job],
    once: Callable[[Callable[[], None]], Callable[[], None]],
    kind: str,
    empty: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise its position would say that rows are there which the reset has removed."""
    job = make(kind)
    write(job)
    job.run()
    before = job.rows()
    job.write([("+I", {"id": 3, "region": "at"})])
    pipeline = job.pipeline()
    interfere = once(lambda: found(job, empty=empty).apply())
    send, commit = IcebergCommitter._send, DeltaLog.commit

    def sent(self: IcebergCommitter, staged: Any) -> None:
        interfere()
        send(self, staged)

    def committed(self: DeltaLog, proposal: Any) -> int:
        interfere()
        return commit(self, proposal)

    monkeypatch.setattr(IcebergCommitter, "_send", sent)
    monkeypatch.setattr(DeltaLog, "commit", committed)
    with pytest.raises(TableError, match="position was removed while it ran"):
        pipeline.run()
    assert "position" not in state(job)
    assert job.rows() == ([] if empty else before)
    job.run()
    assert job.rows() == [*ROWS, {"id": 3, "region": "at"}]


@pytest.mark.spark
@pytest.mark.parametrize("kind", ["v3", "delta"])
def test_a_sink_that_has_committed_meanwhile_runs(make: Callable[..., Job], kind: str) -> None:
    job = make(kind)
    write(job)
    job.run()
    plan = found(job, empty=True)
    job.write([("+I", {"id": 3, "region": "at"})])
    job.run()
    before = state(job)
    with pytest.raises(TableError, match="'shop' runs, and has just committed"):
        plan.apply()
    assert state(job) == before
    assert len(job.rows()) == 3


@pytest.mark.spark
def test_what_would_duplicate_or_lose_rows_is_refused(make: Callable[..., Job]) -> None:
    job = make("v2", mode="changelog")
    job.write([("+I", {"id": 1, "region": "eu"})])
    job.run()
    with pytest.raises(ConfigError, match="--empty"):
        found(job, empty=False)
    job.spark.sql(f"ALTER TABLE {job.target} SET TBLPROPERTIES ('rowdelta.other.position' = '{{}}')")
    with pytest.raises(TableError, match="sink 'other' writes to it too"):
        found(job, empty=True)
    job.spark.sql(f"ALTER TABLE {job.target} UNSET TBLPROPERTIES ('rowdelta.other.position')")
    found(job, empty=True).apply()
    job.run()
    assert job.rows() == [{"id": 1, "region": "eu"}]


@pytest.mark.spark
def test_nothing_to_forget(make: Callable[..., Job]) -> None:
    job = make("v2")
    job.run()
    assert reset.find(job.spark, job.config(), "orders", empty=False) is None


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    return write_config(tmp_path)


def test_a_sink_that_runs_here_is_noticed(config_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from sink import config

    loaded = config.load(config_path)
    with running.marked(loaded), running.marked(loaded):  # which is for the tables' positions to decide
        assert cli.main(["reset", str(config_path), "orders", "--yes"]) == 4
    assert "runs. Nothing was reset. Stop it" in capsys.readouterr().err
    with running.idle(loaded), pytest.raises(TemporaryError, match="is being reset"), running.marked(loaded):
        pass


def test_it_asks_nobody(config_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["reset", str(config_path), "orders"]) == 2
    assert "Give --yes" in capsys.readouterr().err
