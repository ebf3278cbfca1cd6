"""Dead letters in a Delta table: each is kept once, whoever commits meanwhile. They can be looked at and removed."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from pyspark.sql import SparkSession

from sink import cli
from sink.deadletters import table as dead_letters
from sink.deadletters.table import Selection
from sink.errors import TemporaryError
from sink.spark import session
from sink.spark.versions import to_arrow
from sink.targets.delta import upkeep
from sink.targets.delta.log import CommitRefusedError, DeltaLog
from tests.delta.harness import DeltaJob, before_commit, crashing
from tests.stack.process import wait_until

pytestmark = pytest.mark.spark

GOOD = '{"row_kind": "+I", "seq": 1, "id": 1, "region": "eu"}\n'


@pytest.fixture
def job(spark: SparkSession, tmp_path: Path) -> DeltaJob:
    return DeltaJob(spark, tmp_path, file_format="json")


def folder(job: DeltaJob) -> Path:
    return job.table_folder.with_name("dead_letters")


def letters(job: DeltaJob) -> list[bytes]:
    rows = to_arrow(job.spark.read.format("delta").load(str(folder(job)))).to_pylist()
    assert {row["table"] for row in rows} <= {f"{job.catalog}.{job.namespace}.{name}" for name in ("orders", "others")}
    return sorted(row["value"] for row in rows)


def found(job: DeltaJob, **selection: str) -> list[bytes | None]:
    return [
        x.value for x in dead_letters.newest(dead_letters.find(job.spark, job.config(), Selection(**selection)), 99)
    ]


def test_a_bad_record_is_kept_once_also_after_a_crash(job: DeltaJob) -> None:
    job.write_text(f"x\n{GOOD}")
    with crashing("before the commit"), pytest.raises(TemporaryError, match="crash"):
        job.run()
    assert letters(job) == [b"x"]  # they are committed before the table
    job.run()
    job.write_text("y\n")
    job.run()
    assert letters(job) == [b"x", b"y"]
    assert job.rows() == [{"id": 1, "region": "eu"}]


def test_letters_are_listed_counted_and_removed(
    job: DeltaJob, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job.write_text(f'x\nx y\n{{"row_kind": "+I", "seq": 1, "region": "eu"}}\n{GOOD}')
    job.run()
    monkeypatch.setattr(session, "start", lambda _, **how: job.spark)
    monkeypatch.setattr(session, "stop", lambda _: None)
    file = job.folder / "sink.yaml"
    file.write_text(yaml.safe_dump(job.config().model_dump(exclude_none=True)))
    assert cli.main(["dead-letters", "counts", str(file), "--json"]) == 0
    counts = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert sum(count["count"] for count in counts) == 3
    assert len({count["error_class"] for count in counts}) == 2
    assert cli.main(["dead-letters", "list", str(file), "--class", "null_key", "--json"]) == 0
    (letter,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert letter["table"] == job.target

    all_letters = dead_letters.find(job.spark, job.config(), Selection())
    before = folder_version(job)
    dead_letters.remove(job.spark, job.config(), all_letters.where("value = CAST('x' AS BINARY)"))
    assert folder_version(job) == before + 1
    assert letters(job) == sorted(value for value in found(job) if value)
    assert len(found(job)) == 2
    job.write_text("z\n")  # and the table goes on
    job.run()
    assert b"z" in letters(job)


def folder_version(job: DeltaJob) -> int:
    return DeltaLog(job.spark, str(folder(job))).refresh().version


def test_a_removal_waits_for_others(job: DeltaJob) -> None:
    """Another program deletes a letter while the removal works. Delta refuses one of both, and it is done again."""
    job.write_text("x\ny\nz\n")
    job.run()
    started, goes_on = str(job.folder / "started"), str(job.folder / "goes on")

    def wait(batches: Any) -> Any:
        Path(started).touch()
        while not Path(goes_on).exists():
            time.sleep(0.05)
        yield from batches

    chosen = dead_letters.find(job.spark, job.config(), Selection()).where("value = CAST('x' AS BINARY)")
    waiting = chosen.mapInArrow(wait, chosen.schema)
    with ThreadPoolExecutor(1) as pool:
        removal = pool.submit(dead_letters.remove, job.spark, job.config(), waiting)
        assert wait_until(lambda: Path(started).exists(), 60)
        before = folder_version(job)
        job.spark.sql(f"DELETE FROM delta.`{folder(job)}` WHERE value = CAST('y' AS BINARY)")
        Path(goes_on).touch()
        removal.result(120)
    assert letters(job) == [b"z"]
    assert folder_version(job) == before + 2


def test_a_removal_that_others_keep_from_going_through(job: DeltaJob, monkeypatch: pytest.MonkeyPatch) -> None:
    job.write_text("x\n")
    job.run()
    refusal = CommitRefusedError("ConcurrentDeleteReadException", "files were deleted")
    monkeypatch.setattr(upkeep, "delete_equal", lambda log, rows, columns: refusal)
    with pytest.raises(TemporaryError, match="others kept changing it: files were deleted"):
        dead_letters.remove(job.spark, job.config(), dead_letters.find(job.spark, job.config(), Selection()))
    assert letters(job) == [b"x"]


def test_two_jobs_keep_their_letters_in_one_table(job: DeltaJob) -> None:
    """The other job commits its letters between the look and the commit of this one."""
    job.write_text("x\n")
    job.run()
    other = DeltaJob(
        job.spark.newSession(),
        job.folder / "other",
        file_format="json",
        sink_id="crm",
        namespace=job.namespace,
        table={"target": f"{job.catalog}.{job.namespace}.others"},
        sections={"catalogs": {job.catalog: job.catalog_options}},
    )
    assert other.config().dead_letter_table == job.config().dead_letter_table
    job.write_text("y\n")
    other.write_text("a\n")
    with before_commit(other.run, "in the commit") as ran:
        job.run()
    assert len(ran) == 1
    assert letters(job) == [b"a", b"x", b"y"]
    other.run()
    job.run()
    assert letters(job) == [b"a", b"x", b"y"]
