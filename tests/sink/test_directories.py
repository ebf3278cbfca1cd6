"""Several directories of change files: each has a query of its own, and none waits for another."""

import itertools
import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from pyspark.sql import SparkSession

from sink.config import Config
from sink.errors import ConfigError, FencedError, TableError
from sink.run import supervisor
from sink.run.pipeline import Pipeline
from sink.table import plan as tables
from sink.table.microbatch import TableSink
from sink.targets.iceberg.commit import IcebergCommitter
from sink.targets.values import ChangeSet, Done, Outcome
from tests.sink.harness import java_table
from tests.stack.process import wait_until

pytestmark = pytest.mark.spark


class Directories:
    """A job of two directories, `a` and `b`, and its tables."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark = spark
        self.folder = folder
        self.name = f"m{uuid4().hex[:12]}"
        self._sequence = itertools.count()
        for name in "ab":
            (folder / "cdc" / name).mkdir(parents=True)

    def write(self, table: str, *ids: int) -> None:
        """One change file, which is one micro-batch."""
        number = next(self._sequence)
        hidden = self.folder / "cdc" / table / f".{number:04d}.json"
        records = [{"row_kind": "+I", "id": id, "seq": number} for id in ids]
        hidden.write_text("".join(json.dumps(record) + "\n" for record in records))
        hidden.rename(hidden.with_name(hidden.name[1:]))

    def write_bad(self, table: str) -> None:
        (self.folder / "cdc" / table / f"{next(self._sequence):04d}.json").write_text('{"row_kind": "?"}\n')

    def target(self, table: str) -> str:
        return f"lake.{self.name}.{table}"

    def pipeline(
        self, trigger: str = "available-now", tables: Sequence[Mapping[str, Any]] = (), **sink: Any
    ) -> Pipeline:
        """:param tables: sources in the folder, targets in the namespace, in place of `a` and `b`."""
        entry = {"columns": {"id": "bigint"}, "order_by": ["seq bigint"], "deletes": "equality"}
        tables = tables or [{"source": name, "target": name, "key": ["id"]} for name in "ab"]
        config = {
            "sink": {"id": "s", "checkpoint": str(self.folder / "s"), "trigger": trigger, **sink},
            "source": {
                "type": "files",
                "format": "row-kind",
                "options": {"path_format": "json", "maxFilesPerTrigger": "1"},
            },
            "catalogs": {"lake": {"type": "hadoop", "warehouse": "unused"}},
            "tables": [
                {
                    **entry,
                    **table,
                    "source": f"{self.folder}/cdc/{table['source']}",
                    "target": self.target(table["target"]),
                }
                for table in tables
            ],
        }
        return Pipeline(self.spark, Config.model_validate(config))

    def ids(self, table: str) -> list[int]:
        return sorted(row.id for row in self.spark.table(self.target(table)).collect())

    def rollback_to_first(self, table: str) -> None:
        java = java_table(self.spark, self.target(table))
        first = java.currentSnapshot()
        while first.parentId() is not None:
            first = java.snapshot(first.parentId())
        java.manageSnapshots().rollbackTo(first.snapshotId()).commit()


@pytest.fixture
def job(spark: SparkSession, tmp_path: Path) -> Directories:
    return Directories(spark, tmp_path)


@contextmanager
def around_commits(
    before: Callable[[str, int], None], after: Callable[[str, int], None] = lambda *_: None
) -> Iterator[None]:
    """Call these functions with the table's name, and the number of its commits that have begun."""
    original, counts = IcebergCommitter.commit, {name: itertools.count(1) for name in ("a", "b", "dead_letters")}

    def commit(self: IcebergCommitter, request: ChangeSet) -> Outcome:
        name = self._table.name.rsplit(".", 1)[-1]
        number = next(counts[name])
        before(name, number)
        outcome = original(self, request)
        if outcome == Done():
            after(name, number)
        return outcome

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(IcebergCommitter, "commit", commit)
        yield


@contextmanager
def running(pipeline: Pipeline) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=pipeline.run)
    thread.start()
    try:
        yield thread
    finally:
        pipeline.stop()
        thread.join()


def test_micro_batches_of_directories_run_in_parallel(job: Directories) -> None:
    job.write("a", 1)
    job.write("b", 1)
    both = threading.Barrier(2)  # one that waits for the other's commit would wait in vain

    def meet(_: str, number: int) -> None:
        if number == 1:
            both.wait(120)

    with around_commits(meet):
        job.pipeline().run()
    assert job.ids("a") == job.ids("b") == [1]


def test_so_many_tables_at_a_time(job: Directories, monkeypatch: pytest.MonkeyPatch) -> None:
    """`parallel_tables` also bounds how many directories' micro-batches run at a time."""
    for number in range(3):
        job.write("a", number)
        job.write("b", number)
    at_work, most, original = set[str](), list[int](), TableSink.apply_batch

    def noted(self: TableSink, *arguments: Any, **more: Any) -> Any:
        at_work.add(self.table.name)
        most.append(len(at_work))
        try:
            return original(self, *arguments, **more)
        finally:
            at_work.discard(self.table.name)

    monkeypatch.setattr(TableSink, "apply_batch", noted)
    job.pipeline(parallel_tables=1).run()
    assert most == [1] * 6
    assert job.ids("a") == job.ids("b") == [0, 1, 2]


def test_a_table_that_is_opened_again_hinders_no_other(job: Directories, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "FIRST_PAUSE", 0.0)
    failed, reopened, other = threading.Event(), threading.Event(), threading.Event()
    original = tables.open_table

    def slow(spark: SparkSession, config: Config, resolved: Any, *rest: Any) -> Any:
        if failed.is_set() and resolved.section.target == job.target("a"):
            reopened.set()
            assert other.wait(60), "b waits for a to be opened"
        return original(spark, config, resolved, *rest)

    def fail(name: str, number: int) -> None:
        if (name, number) == ("a", 1):
            failed.set()
            raise TableError("not now")

    def note(name: str, _: int) -> None:
        if name == "b" and reopened.is_set():
            other.set()

    monkeypatch.setattr(supervisor, "open_table", slow)
    job.write("a", 1)
    with around_commits(fail, note), running(job.pipeline("100 milliseconds")):
        assert reopened.wait(60)
        job.write("b", 1)
        assert wait_until(lambda: job.ids("a") == [1], 60)
    assert job.ids("b") == [1]


def test_what_stops_the_job_lets_other_directories_finish(job: Directories) -> None:
    """A micro-batch that is being committed when another table ends the job is committed."""
    job.write("a", 1)
    job.write("b", 1)
    both, a_failed = threading.Barrier(2), threading.Event()

    def fail(name: str, _: int) -> None:
        both.wait(60)
        if name == "a":
            raise TableError("no more")
        assert a_failed.wait(60)

    original = supervisor.Supervisor.set_aside

    def set_aside(self: supervisor.Supervisor, *arguments: Any) -> None:
        original(self, *arguments)
        a_failed.set()

    with pytest.MonkeyPatch.context() as patch, around_commits(fail):
        patch.setattr(supervisor.Supervisor, "set_aside", set_aside)
        with pytest.raises(TableError, match="no more"):
            job.pipeline(on_table_error="stop").run()
    assert job.ids("a") == []
    assert job.ids("b") == [1]


def test_what_ends_the_job_leaves_the_parts_of_other_directories_for_the_next_run(job: Directories) -> None:
    """A backlog is one micro-batch in parts, and nobody waits for all of it."""
    job.write("a", 1)
    for number in range(1, 7):
        job.write("b", number)
    pipeline, committing = job.pipeline(), threading.Event()

    def fail(name: str, number: int) -> None:
        if name == "a":
            assert committing.wait(60)
            raise FencedError("another run has the table")
        if number == 1:
            committing.set()
            assert wait_until(lambda: pipeline._stopping, 60)

    with around_commits(fail), pytest.raises(FencedError, match="another run has the table"):
        pipeline.run()
    assert job.ids("b") == [1]
    job.pipeline().run()
    assert job.ids("b") == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("on_table_error", ["continue", "stop"])
def test_a_table_that_is_rolled_back_is_read_again_and_no_other_stops(
    job: Directories, on_table_error: str, caplog: pytest.LogCaptureFixture
) -> None:
    for number in (1, 2, 3):
        job.write("a", number)
        job.write("b", number)

    def roll_back(name: str, number: int) -> None:
        if (name, number) == ("a", 3):
            job.rollback_to_first("a")

    commits: list[str] = []
    with around_commits(roll_back, lambda name, _: commits.append(name)):
        job.pipeline(on_table_error=on_table_error).run()
    assert job.ids("a") == job.ids("b") == [1, 2, 3]
    assert commits.count("b") == 3
    assert commits.count("a") == 4, "the first, the second, and both again that were rolled back or not committed"
    assert "another run" not in caplog.text
    assert f"{job.target('a')} was rolled back to an earlier snapshot while the sink ran" in caplog.text
    assert not [r for r in caplog.records if r.name == "rowdelta" and r.levelno >= logging.ERROR]


def test_a_dead_letter_table_that_is_dropped_is_made_again(job: Directories, caplog: pytest.LogCaptureFixture) -> None:
    job.write_bad("a")
    letters = f"lake.{job.name}.dead_letters"
    job.pipeline().run()
    assert job.spark.table(letters).count() == 1
    for number in (1, 2):
        job.write("a", number)
        job.write_bad("a")

    def drop(name: str, number: int) -> None:
        if (name, number) == ("dead_letters", 1):
            job.spark.sql(f"DROP TABLE {letters} PURGE")

    with around_commits(drop):
        job.pipeline().run()
    assert job.ids("a") == [1, 2]
    assert job.spark.table(letters).count() == 2
    assert "It is opened again" in caplog.text


def test_a_directory_that_keys_does_not_name_has_no_key(job: Directories) -> None:
    """Files have no message keys. The directory that is named goes on."""
    job.write("a", 1)
    job.write("b", 2)
    pattern = {"source": "(.*)", "target": "$1", "keys": {"a": ["id"]}}
    with pytest.raises(ConfigError, match=r"\.b has no key: .*Name the columns .* in keys"):
        job.pipeline(tables=[pattern], dead_letter_table=job.target("dead")).run()
    assert job.ids("a") == [1]
    assert not job.spark.catalog.tableExists(job.target("b"))
