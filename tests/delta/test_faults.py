"""Crashes, a second driver, lost indexes, changes of the schema, and tables that the sink must not write."""

import json
import logging
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, get_args

import pytest
from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

from sink.errors import FencedError, TableError, TemporaryError
from sink.targets.delta.log import DeltaLog
from tests.delta.harness import DeltaJob, When, before_commit, before_rewrite, crashing
from tests.delta.test_target import inserts, row
from tests.sink.harness import Fault, damage, merging_soon

pytestmark = pytest.mark.spark


@pytest.mark.parametrize("fault", ["before the commit", "after the commit"])
def test_a_crash_applies_nothing_twice(spark: SparkSession, tmp_path: Path, fault: Fault) -> None:
    job = DeltaJob(spark, tmp_path, mode="changelog")
    for key in range(4):
        job.write(inserts(key, key + 100))
    job.write([("-D", row(0)), ("-U", row(1)), ("+U", row(1, "us"))])
    with merging_soon():
        for after_commits in (0, 1):
            with crashing(fault, after_commits=after_commits), pytest.raises(TemporaryError, match="crash"):
                job.run()
            job.lose_checkpoint()
        job.run()
    expected = dict.fromkeys((*range(2, 4), *range(100, 104)), "eu") | {1: "us"}
    assert job.rows() == [row(key, region) for key, region in sorted(expected.items())]
    job.check()
    assert job.check_index() is not None


def test_commits_of_unknown_outcome(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store says that it failed, whether or not it wrote the commit."""
    job = DeltaJob(spark, tmp_path, mode="changelog")
    job.write(inserts(1, 2))
    job.run()
    original = DeltaLog._send
    failures: list[str] = []

    def send(self: DeltaLog, *args: Any) -> int:
        if not failures:
            return original(self, *args)
        if failures.pop() == "written":
            original(self, *args)
        raise io_error(spark)

    monkeypatch.setattr(DeltaLog, "_send", send)
    job.write([("-D", row(1)), ("+I", row(3))])
    failures.append("written")
    job.run()
    assert job.rows() == [row(2), row(3)]
    job.check()
    job.write([("-D", row(2)), ("+I", row(4))])
    failures.append("not written")
    with pytest.raises(TemporaryError, match="unknown whether"):
        job.run()
    assert job.rows() == [row(2), row(3)]
    job.run()
    assert job.rows() == [row(3), row(4)]
    assert failures == []
    job.write([("-D", row(3))])
    job.run()
    assert job.rows() == [row(4)]
    job.check()


def io_error(spark: SparkSession) -> Exception:
    jvm: Any = spark.sparkContext._jvm
    error: Exception = Py4JJavaError("timeout", jvm.java.io.IOException("timeout"))
    return error


def test_a_second_driver_is_fenced(spark: SparkSession, tmp_path: Path) -> None:
    """By the sink's own look, and by Delta itself."""
    job = DeltaJob(spark, tmp_path, mode="changelog")
    job.write(inserts(0))
    job.run()
    second = job.second_driver()
    for key, when in enumerate(get_args(When)):
        job.write([("-D", row(key)), ("+I", row(key + 1))])
        with before_commit(second.run, when) as ran, pytest.raises(FencedError):
            job.run()
        assert len(ran) == 1
        assert job.rows() == [row(key + 1)]
    job.write([("-D", row(2)), ("+I", row(3))])
    job.run()
    assert job.rows() == [row(3)]
    job.check()


def test_another_sink_in_the_same_table(spark: SparkSession, tmp_path: Path) -> None:
    job = DeltaJob(spark, tmp_path)
    job.write(inserts(1, 2))
    job.run()
    (tmp_path / "other").mkdir()
    other = replace(
        job, sink_id="other", spark=spark.newSession(), folder=tmp_path / "other", checkpoint=tmp_path / "other state"
    )
    (tmp_path / "other" / "warehouse").symlink_to(job.warehouse)
    other.write([("+U", row(1, "other")), ("+I", row(9))])
    job.write([("+U", row(1, "us")), ("-D", row(2))])
    with before_commit(other.run) as ran:
        job.run()
    assert len(ran) == 1
    assert job.rows() == [row(1, "us"), row(9)]
    job.check()


def test_the_index_is_built_again(spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rowdelta")
    job = DeltaJob(spark, tmp_path)
    job.write(inserts(*range(10)))
    job.write([("-D", row(0)), ("+U", row(1, "us"))])
    job.run()
    rows = dict.fromkeys(range(2, 10), "eu") | {1: "us"}

    def others() -> None:
        job.sql("DELETE FROM {t} WHERE id = 8")
        job.sql("INSERT INTO {t} VALUES (50, 'x')")
        job.clean_log()

    for key, loss in enumerate(("lost", "damaged", "log"), start=1):
        if loss == "lost":
            shutil.rmtree(job.index_folder)
        elif loss == "damaged":
            for path in sorted(job.index_folder.rglob("*")):
                if path.is_file():
                    damage(path, Random(1))
        job.write([("-D", row(key, rows[key])), ("+U", row(key + 1, loss))])
        caplog.clear()
        if loss == "log":
            with before_commit(others):
                job.run()
            rows |= {50: "x"}
            del rows[8]
        else:
            job.run()
            assert "key index built" in caplog.text
        del rows[key]
        rows[key + 1] = loss
        assert job.rows() == [row(key, region) for key, region in sorted(rows.items())]
        job.check(since=job.version())
        assert job.check_index() is not None


def test_log_clean_up_between_runs(spark: SparkSession, tmp_path: Path) -> None:
    """A file of the sink's last commit that is live tells that the table was not restored to before it."""
    job = DeltaJob(spark, tmp_path)
    job.write(inserts(1, 2))
    job.run()
    job.write([("-D", row(1)), ("+I", row(3))])
    job.run()
    job.sql("INSERT INTO {t} VALUES (50, 'x')")
    job.clean_log()
    job.write([("+U", row(3, "us"))])
    job.run()
    assert job.rows() == [row(2), row(3, "us"), row(50, "x")]
    job.check()
    assert job.check_index() is not None
    job.write([("-D", row(3, "us"))])
    job.run()
    job.sql(f"RESTORE TABLE {{t}} TO VERSION AS OF {job.version() - 1}")
    job.sql("INSERT INTO {t} VALUES (51, 'x')")
    job.clean_log()
    job.write(inserts(7))
    with pytest.raises(TableError, match="nothing tells whether"):
        job.run()


def test_others_commit_during_minor_compactions(spark: SparkSession, tmp_path: Path) -> None:
    job = DeltaJob(spark, tmp_path)
    rows: dict[int, str] = {}
    ran: list[str] = []

    def act(statement: str) -> None:
        job.sql(statement)
        ran.append(statement)

    for number, (statement, changed, gone) in enumerate(
        [
            ("INSERT INTO {t} VALUES (77, 'x')", {77: "x"}, []),
            ("DELETE FROM {t} WHERE id = 10", {}, [10]),
            ("UPDATE {t} SET region = 'x' WHERE id = 20", {20: "x"}, []),
            ("OPTIMIZE {t}", {}, []),
        ]
    ):
        keys = [10 * number, 10 * number + 1]
        for key in keys:
            job.write([*inserts(key, key + 100), ("-D", row(key + 99))])
        with merging_soon(), before_rewrite(partial(act, statement)):
            job.run()
        assert ran[-1:] == [statement]
        rows |= dict.fromkeys((*keys, keys[1] + 100), "eu") | changed
        rows = {key: region for key, region in rows.items() if key not in gone}
        assert job.rows() == [row(key, region) for key, region in sorted(rows.items())], statement
        job.check()
    job.write([("+U", row(key, "us")) for key in rows])
    job.run()
    assert job.rows() == [row(key, "us") for key in sorted(rows)]
    job.check()
    assert job.check_index() is not None


# -- columns


def test_new_and_wider_columns(spark: SparkSession, tmp_path: Path) -> None:
    columns = {"id": "bigint", "region": "string", "n": "int"}
    job = DeltaJob(spark, tmp_path, columns=columns, file_format="json", configure_columns=False)
    job.create("id bigint, region string NOT NULL, n int")
    job.write([("+I", row(1, n=1)), ("+I", row(2, n=2))])
    job.write([("+U", row(1, n=3, more="x"))])
    job.run()
    assert job.rows() == [row(1, n=3, more="x"), row(2, n=2, more=None)]
    assert job.check_index() is not None
    job.write([("+U", row(1, n=2**40, more="x"))])
    with pytest.raises(TableError, match=r"delta\.enableTypeWidening"):
        job.run()
    assert job.rows() == [row(1, n=3, more="x"), row(2, n=2, more=None)]
    job.sql("ALTER TABLE {t} SET TBLPROPERTIES ('delta.enableTypeWidening' = 'true')")
    job.write([("-D", row(2, n=2, more=None)), ("+I", row(3, None, n=-1, more=None))])
    job.run()
    assert job.rows() == [row(1, n=2**40, more="x"), row(3, None, n=-1, more=None)]
    job.check(readers=("DuckDB",))
    assert job.check_index() is not None


def test_a_table_that_becomes_append_only_while_the_sink_runs(spark: SparkSession, tmp_path: Path) -> None:
    job = DeltaJob(spark, tmp_path)
    job.write(inserts(1, 2))
    job.run()
    job.write([("-D", row(1))])
    with (
        before_commit(lambda: job.sql("ALTER TABLE {t} SET TBLPROPERTIES ('delta.appendOnly' = 'true')")),
        pytest.raises(TableError, match="appendOnly"),
    ):
        job.run()
    assert job.rows() == [row(1), row(2)]
    job.check()


def test_a_missing_vector_file(spark: SparkSession, tmp_path: Path) -> None:
    job = DeltaJob(spark, tmp_path)
    job.write(inserts(*range(3000)))
    job.run()
    job.write([("-D", row(key)) for key in range(0, 3000, 7)])
    job.run()
    (file,) = job.table_folder.rglob("deletion_vector_*.bin")
    file.rename(tmp_path / "away")
    before = job.version()
    job.write([("-D", row(1))])
    with pytest.raises(TableError, match="deletion vector"):
        job.run()
    assert job.version() == before
    (tmp_path / "away").rename(file)
    job.run()
    assert len(job.check()) == 3000 - 429 - 1


def test_a_vector_file_that_the_storage_doesn_t_give_now(spark: SparkSession, tmp_path: Path) -> None:
    """Unlike one that is lost, it needs nobody's help: the next run may read it."""
    job = DeltaJob(spark, tmp_path)
    job.write(inserts(*range(10)))
    job.run()
    job.write([("-D", row(0))])
    job.run()
    (file,) = job.table_folder.rglob("deletion_vector_*.bin")
    file.rename(tmp_path / "away")
    file.mkdir()  # opening it is an error, but not that there is no such file
    before = job.version()
    job.write([("-D", row(1))])
    with pytest.raises(TemporaryError, match="Nothing was applied; run again") as raised:
        job.run()
    assert raised.value.exit_code == 75
    assert job.version() == before
    file.rmdir()
    (tmp_path / "away").rename(file)
    job.run()
    assert [found["id"] for found in job.check()] == list(range(2, 10))


def test_two_processes_with_one_sink_id(spark: SparkSession, tmp_path: Path) -> None:
    """Both run to the end or are fenced. Whatever happens, nothing is applied twice."""
    job = DeltaJob(spark, tmp_path, mode="changelog")
    job.write(inserts(0))
    job.run()
    for key in range(1, 7):
        job.write([("-D", row(key - 1)), *inserts(key, key + 100)])
    command = [sys.executable, "-m", "tests.delta.second_process"]
    processes = []
    for number in range(2):
        config = job.config_values()
        path = tmp_path / f"{number}.json"
        config["sink"]["checkpoint"] = str(tmp_path / f"state {number}")
        path.write_text(json.dumps(config))
        processes.append(subprocess.Popen([*command, str(path)], stdout=subprocess.PIPE, text=True))
    outcomes = [process.communicate(timeout=500)[0].split()[-1] for process in processes]
    assert set(outcomes) <= {"done", "FencedError"}
    assert "done" in outcomes
    assert [found["id"] for found in job.rows()] == [6, *range(101, 107)]
    job.check()
