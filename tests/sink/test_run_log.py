"""What a run prints besides its commits: how its start goes on, how far it is, and how it ended."""

import logging
import re
import subprocess
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml
from pyspark.sql import SparkSession

from sink import cli
from sink.commands.run import refuse_early
from sink.config import Config, load
from sink.config.table_parts import TableSource
from sink.errors import ConfigError
from sink.run import supervisor as supervising
from sink.run.pipeline import Pipeline, open_source
from sink.run.supervisor import Supervisor
from sink.spark import progress, session
from sink.spark.jvm_output import JvmOutput
from sink.table.patterns import ResolvedTable
from tests.sink.harness import Job
from tests.sink.test_submit import write_changes, write_config
from tests.stack.process import wait_until


@pytest.fixture(autouse=True)
def all_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rowdelta")


def two_tables(job: Job, **sink: Any) -> Config:
    """The job's configuration, with a second table."""
    config = job.config()
    (first,) = config.tables
    second = first.model_copy(update={"feed": TableSource(topic=f"{first.source}2"), "target": f"{first.target}2"})
    return config.model_copy(
        update={"tables": (first, second), "sink": config.sink.model_copy(update={"trigger": "available-now", **sink})}
    )


@pytest.mark.spark
def test_a_run_says_how_it_ended(spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Job(spark, tmp_path, file_format="json", sections={"sink": {"on_bad_record": "dead-letter"}})
    job.write([("+I", {"id": 1, "region": "eu"}), ("-U", {"id": 1, "region": "eu"}), ("+U", {"id": 1, "region": "us"})])
    (job.changes_folder / "bad.json").write_text("no JSON\n")
    job.run()
    assert re.fullmatch(
        rf"1 table up to date; \d micro-batch(es)?, 2 changes, 1 dead letter in {job.dead_letters}, \d+ s",
        caplog.messages[-1],
    )
    (commit, *_) = (line for line in caplog.messages if " batch 0: " in line)
    assert "{" not in commit  # the position is for `--verbose` and `rowdelta status`
    caplog.clear()
    job.run()
    assert re.fullmatch(r"1 table up to date; nothing to do, \d+ s", caplog.messages[-1])


@pytest.mark.spark
def test_an_error_that_ends_the_job_is_told_once(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(spark, tmp_path)
    with pytest.raises(ConfigError, match="there is no directory"):
        Pipeline(spark, two_tables(job, on_table_error="stop")).run()
    assert [line for line in caplog.messages if "there is no directory" in line] == []


@pytest.mark.spark
def test_progress_reaches_its_end(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_FIRST_SECONDS", 0.1)
    config = two_tables(Job(spark, tmp_path))
    supervisor = Supervisor(spark, config, open_source(spark, config, {}), {})
    members = supervisor.enter(ResolvedTable(table, "tables[0]") for table in config.tables)
    supervisor._each(members, lambda member: time.sleep(1.2), "opened")
    supervisor.close()
    assert caplog.messages == ["opened 0 of 2 tables", "opened 2 of 2 tables"]


@pytest.mark.spark
@pytest.mark.timeout(120)
def test_loads_wait_beside_others_and_a_stopped_run_waits_for_those_in_progress_alone(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervising, "_MOST_LOADS", 2)
    config = two_tables(Job(spark, tmp_path))
    supervisor = Supervisor(spark, config, open_source(spark, config, {}), {})
    loaded, begun, over = list[str](), threading.Event(), threading.Event()

    def wait() -> None:
        assert begun.wait(60)
        loaded.append("waited")
        assert over.wait(60)

    def load() -> None:
        begun.set()
        assert over.wait(60)
        loaded.append("loaded")

    submit = supervisor._submitter(supervisor._loaders)
    for work in (wait, load, load):
        submit(work)
    assert wait_until(lambda: loaded == ["waited"])
    supervisor.close()
    over.set()
    supervisor.finish_loads()
    assert loaded == ["waited", "loaded"]


MISTAKES = {
    "no directory": ("source: ./changes", "source: ./chagnes", "there is no directory"),
    "key": ("- id\n", "- idd\n", "key names 'idd', which is not in columns (did you mean 'id'?)"),
    "checkpoint": ("checkpoint: ./state", "checkpoint: ./sink.yaml", "expected a folder"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found_before_a_jvm_starts(
    tmp_path: Path, mistake: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: Config) -> None:
        raise AssertionError("a JVM was started")

    monkeypatch.setattr(session, "start", start)
    write_changes(tmp_path, 1)
    path = write_config(tmp_path)
    before, after, expected = MISTAKES[mistake]
    assert path.read_text().count(before) == 1
    path.write_text(path.read_text().replace(before, after))
    assert cli.main(["run", str(path)]) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(("on_table_error", "is_refused"), [("continue", False), ("stop", True)])
def test_a_run_goes_on_with_the_tables_that_are_right(tmp_path: Path, on_table_error: str, is_refused: bool) -> None:
    write_changes(tmp_path, 1)
    (entry,) = yaml.safe_load(write_config(tmp_path).read_text())["tables"]
    wrong = entry | {"source": "./chagnes", "target": "lake.shop.other"}
    sink = {"id": "shop", "checkpoint": "./state", "on_table_error": on_table_error}
    loaded = load(write_config(tmp_path, sink=sink, tables=[entry, wrong]))
    with pytest.raises(ConfigError, match="no directory") if is_refused else nullcontext():
        refuse_early(loaded)
    both = [wrong, entry | {"source": "./chnages", "target": "lake.shop.third"}]
    with pytest.raises(ConfigError, match=r"no directory .* 1 more error: rowdelta check shows all"):
        refuse_early(load(write_config(tmp_path, sink=sink, tables=both)))


def printing(output: JvmOutput, text: str) -> None:
    with output.taken() as descriptor:
        subprocess.run(["printf", text], stdout=descriptor, stderr=descriptor, check=True)


def test_what_the_jvm_prints_at_its_start_is_shown_if_the_start_fails(capfd: pytest.CaptureFixture[str]) -> None:
    failed = JvmOutput(is_held=True)
    printing(failed, "a warning\nwhat went wrong\n")
    failed._thread.join()
    assert capfd.readouterr().err == ""
    failed.release(shown=True)
    assert capfd.readouterr().err == "a warning\nwhat went wrong\n"


def test_what_the_jvm_prints_later_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    output = JvmOutput(is_held=True)
    output.release(shown=False)
    printing(output, "it runs out of memory\n")
    output._thread.join()
    assert capfd.readouterr().err == "it runs out of memory\n"


def test_downloads_are_named(caplog: pytest.LogCaptureFixture) -> None:
    output = JvmOutput(is_held=True)
    printing(output, "downloading https://repo.example/org/x/1.1/x-1.1.jar ...\n")
    output._thread.join()
    assert caplog.messages == ["downloading x-1.1.jar"]


def test_no_secret_is_passed_on(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    """Ivy prints the repositories' URLs."""
    added, loads = "https://me:geheim@repo.example/m2 added\n", "downloading https://x.example/y.jar?token=geheim ...\n"
    held, later = JvmOutput(is_held=True), JvmOutput(is_held=False)
    for output in (held, later):
        printing(output, added + loads)
        output._thread.join()
    held.release(shown=True)
    shown = "https://****@repo.example/m2 added\ndownloading https://x.example/y.jar?token=**** ...\n"
    assert capfd.readouterr().err == 2 * shown
    assert "geheim" not in caplog.text
