"""Files of a Delta table are rewritten beside the stream."""

import os
import time
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from sink.commands import inspection
from sink.errors import RolledBackError, TableError
from sink.targets.delta.log import DeltaLog
from sink.targets.own_state import CREATED_BY
from tests.delta.harness import DeltaJob, before_rewrite, crashing
from tests.delta.test_faults import io_error
from tests.rewrites import ALL_FILES, only_sink, rewriting, rewritten_files
from tests.sink.harness import Changes, CrashError, merging_soon

pytestmark = pytest.mark.spark


def test_rows_change_while_their_files_are_rewritten(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = DeltaJob(spark, tmp_path, partition_by=("region",), tasks=1)
    changes = Changes(job)
    changes.write(11)
    with rewriting() as done:
        job.run()
    assert len(done) == 2
    assert any(done), caplog.text  # a partition may lose its last row meanwhile
    job.check()
    assert job.rows() == changes.expected()
    assert job.check_index() is not None
    changes.write(2)
    job.run()
    job.check()
    assert job.rows() == changes.expected()


def test_files_of_an_older_schema(spark: SparkSession, tmp_path: Path) -> None:
    job = DeltaJob(spark, tmp_path, tasks=1, table={"merge_small_files": False}, configure_columns=False)
    changes = Changes(job)
    changes.write(2)
    job.run()
    job.sql("ALTER TABLE {t} ADD COLUMN note string")
    changes.write(1)
    job.run()
    sink = only_sink(job)
    assert status(spark, job)[-1].endswith(" bytes on average, at most 33.3% of their rows are deleted")
    begun = rewritten_files(sink)
    assert sink.upkeep.end_rewrite(begun) is not None
    job.check()
    found = [{name: value for name, value in row.items() if name != "seq"} for row in job.rows()]
    assert found == [row | {"note": None} for row in changes.expected()]
    files, rewritten = status(spark, job)[-2:]
    assert files.endswith(" bytes on average, at most 0.0% of their rows are deleted")
    assert rewritten.startswith("  rewritten last: 3 files at ")


def test_rows_whose_key_is_null_that_others_deleted(spark: SparkSession, tmp_path: Path) -> None:
    """The key index has none of them, and only the vector knows which of them are deleted."""
    job = DeltaJob(spark, tmp_path, tasks=1)
    job.create("id BIGINT, region STRING")
    rows = ", ".join(f"({'NULL' if n % 3 == 0 else n}, '{n}')" for n in range(12))
    job.sql(f"INSERT INTO {{t}} SELECT /*+ COALESCE(1) */ * FROM VALUES {rows}")
    job.sql("DELETE FROM {t} WHERE id IS NULL AND region IN ('3', '9')")
    job.write([("+U", {"id": 1, "region": "new"}), ("-D", {"id": 4, "region": None})])
    job.run()
    sink = only_sink(job)
    assert sink.upkeep.end_rewrite(rewritten_files(sink)) is not None
    assert len(job.snapshot().files) == 1
    assert job.vectors() == {}
    left = {(n, str(n)) for n in (2, 5, 7, 8, 10, 11)} | {(None, "0"), (None, "6"), (1, "new")}
    assert {tuple(row.values()) for row in job.content().to_pylist()} == left


def status(spark: SparkSession, job: DeltaJob) -> list[str]:
    return list(inspection.status(spark, job.config()))


def test_orphans_stay_as_long_as_the_table_wants(spark: SparkSession, tmp_path: Path) -> None:
    """Delta's VACUUM refuses to delete earlier, and other tables' readers rely on it. A week is the least."""
    job = DeltaJob(spark, tmp_path, tasks=1, properties={"delta.deletedFileRetentionDuration": "interval 30 days"})
    job.write([("+I", {"id": 1, "region": "eu"})])
    job.run()
    ages = (2, 5, 8, 20, 40)

    def path(age: int) -> Path:
        return job.table_folder / f"{age}.parquet"

    for age in ages:
        path(age).write_bytes(b"x")
        then = time.time() - age * 86400
        os.utime(path(age), (then, then))
    for dry_run in (True, False):
        found = only_sink(job).table.upkeep().remove_orphans(timedelta(days=3), dry_run=dry_run)
        assert [Path(name).name for name in found] == ["40.parquet"]
    assert [age for age in ages if path(age).exists()] == [2, 5, 8, 20]
    job.sql("ALTER TABLE {t} SET TBLPROPERTIES ('delta.deletedFileRetentionDuration' = 'interval 1 day')")
    only_sink(job).table.upkeep().remove_orphans(timedelta(days=3))
    assert [age for age in ages if path(age).exists()] == [2, 5]
    assert job.rows() == [{"id": 1, "region": "eu"}]


def test_a_table_knows_what_was_done_for_it(spark: SparkSession, tmp_path: Path) -> None:
    """It is the sink's own, and new. Rewrites are counted."""
    job = DeltaJob(spark, tmp_path, tasks=1, table={"merge_small_files": False, "maintenance": {"budget": 1}})
    changes = Changes(job)
    changes.write(3)
    job.run()
    sink = only_sink(job)
    assert sink.table.property(CREATED_BY) == job.sink_id
    assert job.version() == 3, "which took no commit of its own"
    assert not sink.upkeep.is_cleaning_due(timedelta(days=7))
    before = sink.upkeep.credit(1)
    assert before > 0
    begun = rewritten_files(sink, ALL_FILES, 1 << 40)
    assert sink.upkeep.end_rewrite(begun) is not None
    assert sink.upkeep.credit(1) == before - begun.written_bytes
    sink.upkeep.note_cleaning()
    changes.write(1)
    job.run()
    job.check()
    assert not only_sink(job).upkeep.is_cleaning_due(timedelta(hours=1))
    assert job.rows() == changes.expected()
    assert job.check_index() is not None


def test_orphans_stay_if_another_table_is_inside(spark: SparkSession, tmp_path: Path) -> None:
    job = DeltaJob(spark, tmp_path, tasks=1)
    job.write([("+I", {"id": 1, "region": "eu"})])
    job.run()
    inside = job.table_folder / "archive/of/items {1}"
    spark.range(3).write.format("delta").save(str(inside))
    with pytest.raises(TableError, match=r"another table at .*/items \{1\}, whose files VACUUM would delete"):
        only_sink(job).table.upkeep().remove_orphans(timedelta(days=3))


@pytest.mark.parametrize("name", ["v1.metadata.json", "version-hint.text"])
def test_orphans_stay_if_an_iceberg_table_has_the_same_root(spark: SparkSession, tmp_path: Path, name: str) -> None:
    job = DeltaJob(spark, tmp_path, tasks=1)
    job.write([("+I", {"id": 1, "region": "eu"})])
    job.run()
    (job.table_folder / "metadata").mkdir()
    (job.table_folder / "metadata" / name).touch()
    with pytest.raises(TableError, match=r"another table at .*/metadata, whose files VACUUM would delete"):
        only_sink(job).table.upkeep().remove_orphans(timedelta(days=3))


def test_moved_rows_prove_the_position(spark: SparkSession, tmp_path: Path) -> None:
    """After a clean-up of the log. They are in the table's state that has the position, so it was not taken back."""
    job = DeltaJob(spark, tmp_path, tasks=1)
    changes = Changes(job)
    changes.write(3)
    with merging_soon(every=3):
        job.run()
    assert len(job.snapshot().files) == 1
    job.clean_log()
    changes.write(1)
    job.run()
    job.check(since=job.version())
    assert job.rows() == changes.expected()


def goes_on(job: DeltaJob, changes: Changes) -> None:
    """The next process applies more, with whichever files the table has."""
    changes.write(3)
    job.run()
    job.check()
    assert job.rows() == changes.expected()
    assert job.check_index() is not None


@pytest.mark.parametrize("fault", ["before a rewrite", "after a rewrite"])
def test_a_crash_around_the_commit(spark: SparkSession, tmp_path: Path, fault: Any) -> None:
    """The next process goes on with whichever files the table has."""
    job = DeltaJob(spark, tmp_path, tasks=1, table={"merge_small_files": False})
    changes = Changes(job)
    changes.write(4)
    job.run()
    sink = only_sink(job)
    begun = rewritten_files(sink)
    with crashing(fault), pytest.raises(CrashError):
        sink.upkeep.end_rewrite(begun)
    assert len(job.snapshot().files) == (1 if fault == "after a rewrite" else 4)
    goes_on(job, changes)


def test_an_answer_that_is_lost(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store says that a rewrite's commit failed, and has written it. The table has the same rows."""
    job = DeltaJob(spark, tmp_path, tasks=1, table={"merge_small_files": False})
    changes = Changes(job)
    changes.write(4)
    job.run()
    sink = only_sink(job)
    begun = rewritten_files(sink)
    original = DeltaLog._send

    def send(self: DeltaLog, *arguments: Any) -> int:
        original(self, *arguments)
        raise io_error(spark)

    with monkeypatch.context() as patch:
        patch.setattr(DeltaLog, "_send", send)
        assert sink.upkeep.end_rewrite(begun) is not None
    assert len(job.snapshot().files) == 1
    assert job.rows() == changes.expected()
    goes_on(job, changes)


@pytest.mark.parametrize("what", ["delete", "vacuum", "restore"])
def test_others_change_the_table_meanwhile(spark: SparkSession, tmp_path: Path, what: str) -> None:
    """A rewrite whose files others changed gives way. One whose files are as they were is done."""
    job = DeltaJob(spark, tmp_path, tasks=1, table={"merge_small_files": False})
    rows = dict.fromkeys(range(30), "new")
    for start in range(0, 30, 10):
        job.write([("+I", {"id": key, "region": "new"}) for key in range(start, start + 10)])
    job.write([("-D", {"id": 0, "region": "new"})])
    job.run()
    del rows[0]
    sink = only_sink(job)
    begun = rewritten_files(sink)
    if what == "delete":
        job.sql("DELETE FROM {t} WHERE id = 3")
        del rows[3]
    elif what == "vacuum":
        sink.table.upkeep().remove_orphans(timedelta(days=1))
    elif what == "restore":
        job.sql(f"RESTORE TABLE {{t}} TO VERSION AS OF {job.version() - 1}")
        rows[0] = "new"
    done = None
    with suppress(RolledBackError):
        done = sink.upkeep.end_rewrite(begun)
    assert (done is not None) == (what == "vacuum")
    assert job.rows() == [{"id": key, "region": region} for key, region in sorted(rows.items())]
    job.write([("+U", {"id": 4, "region": "changed"})])
    rows[4] = "changed"
    rows.pop(0, None)  # after a RESTORE the sink goes on from the position that the table has
    job.run()
    job.check()
    assert job.rows() == [{"id": key, "region": region} for key, region in sorted(rows.items())]
    assert job.check_index() is not None


@pytest.mark.parametrize("when", ["before", "at the commit"])
def test_optimize_gives_way_or_the_rewrite_does(spark: SparkSession, tmp_path: Path, when: str) -> None:
    job = DeltaJob(spark, tmp_path, tasks=1, table={"merge_small_files": False})
    changes = Changes(job)
    changes.write(3)
    job.run()
    sink = only_sink(job)
    begun = rewritten_files(sink)
    if when == "before":
        job.sql("OPTIMIZE {t}")
    with before_rewrite(lambda: job.sql("OPTIMIZE {t}")) if when == "at the commit" else nullcontext():
        assert sink.upkeep.end_rewrite(begun) is None
    assert len(job.snapshot().files) == 1
    assert len(list(job.table_folder.glob("*.parquet"))) == 4, "that of the rewrite is deleted"
    changes.write(1)
    job.run()
    job.check()
    assert job.rows() == changes.expected()
    assert job.check_index() is not None
