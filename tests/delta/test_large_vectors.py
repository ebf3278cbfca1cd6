"""Deletion vectors of many rows: tasks make them, and the driver sees no positions. `test_properties` has random
changes for it.
"""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from deltawriters.old_rows import DeletedRows
from sink import plans
from sink.errors import TableError, TemporaryError
from sink.spark import deletes as delete_tasks
from sink.table.keyindex import KeyIndex
from tests.delta.harness import DeltaJob, When, before_commit, crashing
from tests.delta.test_target import inserts, row
from tests.sink.harness import damage

pytestmark = pytest.mark.spark

WRITTEN = "deletes in"


@pytest.fixture(autouse=True)
def _log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rowdelta")


@contextmanager
def in_tasks(on_driver: int = 0, least: int = 1) -> Iterator[None]:
    """Let tasks make vectors, also if they are small.

    :param on_driver: most bytes on the driver.
    :param least: a task gets at least so many bytes.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "ON_DRIVER", on_driver)
        patch.setattr(delete_tasks, "_LEAST", least)
        yield


def changes(kind: str, keys: Any, first: int) -> pa.Table:
    """Changes of many keys. Their order is that of `keys`, from `first` on."""
    columns = {
        "row_kind": pa.repeat(pa.scalar(kind), len(keys)),
        "seq": pa.array(np.arange(first, first + len(keys))),
        "id": pa.array(keys),
        "region": pa.repeat(pa.scalar("eu"), len(keys)),
    }
    return pa.table(columns)


def left(job: DeltaJob) -> list[str]:
    """Files of positions in the index's folder, which nobody needs after the commit."""
    return [path.name for path in job.index_folder.rglob("*-positions*")]


def vector_files(job: DeltaJob) -> set[str]:
    return {path.name for path in job.table_folder.rglob("*.bin")}


def test_most_rows_of_a_large_table(spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows, kept = 750_000, 300
    job = DeltaJob(spark, tmp_path, properties={"delta.targetFileSize": "256kb"})
    job.write_table(changes("+I", np.random.default_rng(1).permutation(rows), 0))
    job.run()
    files = len(job.snapshot().files)
    assert files >= 8
    of_kept = job.frame().where(f"id % {rows // kept} = 0").select("_metadata.file_path").distinct().collect()
    random = np.random.default_rng(2)
    for least in (10 * kept, kept):  # the second time there are old vectors
        gone = np.setdiff1d(np.arange(rows), np.arange(0, rows, rows // least))
        if least == kept:
            gone = gone[gone % (rows // (10 * kept)) == 0]
        job.write_table(changes("-D", random.permutation(gone), rows))
        caplog.clear()
        with in_tasks(on_driver=1024, least=4096):
            job.run()
        written = re.search(rf"{WRITTEN} (\d+) data files written by 2 tasks", caplog.text)
        assert written is not None
        assert files - 2 <= int(written[1]) <= files
        assert [found["id"] for found in job.rows()] == list(range(0, rows, rows // least))
    job.check()
    # the last file of each task has about 2,000 rows, and perhaps none of the 300
    assert job.vectors().keys() == {Path(file).name for (file,) in of_kept}, "files without a live row are gone"
    assert len(job.snapshot().files) == len(of_kept) >= files - 2
    assert len({vector["pathOrInlineDv"] for vector in job.vectors().values()}) == 2, "a file for each task"
    assert left(job) == []


def test_tasks_make_the_same_vectors_as_the_driver(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of data files with an old one and without, and of those without a live row."""
    found = []
    for name in ("driver", "tasks"):
        (tmp_path / name).mkdir()
        job = DeltaJob(spark, tmp_path / name, partition_by=("region",), tasks=1)
        for start in range(0, 6000, 1500):
            job.write(inserts(*range(start, start + 1500), region=f"r{start}"))
        job.run()
        for deleted in (range(0, 4600, 500), range(1500, 4500, 3), range(3000, 4500), range(1, 2000, 7)):
            job.write([("-D", row(key, f"r{key // 1500 * 1500}")) for key in deleted])
        with in_tasks(0 if name == "tasks" else plans.ON_DRIVER):
            job.run()
        assert (WRITTEN in caplog.text) == (name == "tasks")
        job.check(travel=(5, 6, 7))
        assert job.check_index() is not None
        assert left(job) == []
        kept = job.snapshot().files.values()
        described = [(add["stats"], add.get("deletionVector", {})) for add in kept]
        found.append(sorted((stats, v.get("storageType"), v.get("cardinality")) for stats, v in described))
    assert found[0] == found[1]
    assert [kind for _, kind, _ in found[0]] == ["u"] * 3, "one of four files has no live row"


def test_a_small_micro_batch_has_no_job_of_its_own(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = DeltaJob(spark, tmp_path)
    job.write(inserts(*range(10_000)))
    job.run()
    job.write([("-D", row(key)) for key in range(0, 9000, 2)])
    with in_tasks(on_driver=64 * 1024):
        job.run()
    assert WRITTEN not in caplog.text
    job.write([("-D", row(key)) for key in range(1, 9000, 2)])
    with in_tasks(on_driver=1024):  # the same again is too large for it, because of the old vector
        job.run()
    assert WRITTEN in caplog.text
    assert [found["id"] for found in job.rows()] == list(range(9000, 10_000))


def two_files(job: DeltaJob) -> None:
    """A table of two data files, each with a vector in a file of its own."""
    job.write(inserts(*range(1000)))
    job.write(inserts(*range(1000, 2000)))
    job.run()
    for first in (0, 1000):
        job.write([("-D", row(first + key)) for key in range(0, 1000, 3)])
        job.run()
    assert len(vector_files(job)) == 2


def test_a_task_that_fails_leaves_nothing_behind(spark: SparkSession, tmp_path: Path) -> None:
    """One of two tasks can't read the old vector. The other one has written its file by then."""
    job = DeltaJob(spark, tmp_path, tasks=1)
    two_files(job)
    victim = sorted(job.table_folder.glob("*.bin"))[0]
    content = victim.read_bytes()
    before, version = vector_files(job), job.version()
    gone = {2, *(key for key in range(2000) if key % 1000 % 3 == 1)}
    job.write([("-D", row(key)) for key in sorted(gone)])
    damage(victim, Random(1))
    with in_tasks(), pytest.raises(TableError, match=r"vector of the table can't be read.*Nothing was applied"):
        job.run()
    assert job.version() == version
    assert vector_files(job) == before
    assert left(job) == []
    victim.write_bytes(content)
    with in_tasks():
        job.run()
    expected = [key for key in range(2000) if key % 1000 % 3 and key not in gone]
    assert [found["id"] for found in job.rows()] == expected
    job.check()
    assert job.check_index() is not None


def test_positions_that_are_gone_when_they_are_needed(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They are a part of the key index, so it is built again, and the micro-batch written again."""
    job = DeltaJob(spark, tmp_path)
    two_files(job)
    lost: list[Path] = []
    original = KeyIndex.deleted_rows

    def deleted_rows(self: KeyIndex, *args: Any) -> DeletedRows:
        if not lost:
            lost.extend(job.index_folder.rglob("*-positions"))
            for path in lost:
                path.unlink()
        return original(self, *args)

    monkeypatch.setattr(KeyIndex, "deleted_rows", deleted_rows)
    changed = list(range(1, 2000, 5))
    job.write([("+U", row(key, "us")) for key in changed])
    before = job.version()
    caplog.clear()
    with in_tasks():
        job.run()
    assert len(lost) == 1
    assert "building the key index again" in caplog.text
    assert "key index built: " in caplog.text
    assert job.version() == before + 1
    rows = job.rows()
    others = {key for key in range(2000) if key % 1000 % 3}
    assert [found["id"] for found in rows] == sorted(others | set(changed))
    assert [found["id"] for found in rows if found["region"] == "us"] == changed
    assert left(job) == []
    job.check()
    assert job.check_index() is not None


def test_a_crash_applies_nothing_twice(spark: SparkSession, tmp_path: Path) -> None:
    job = DeltaJob(spark, tmp_path, mode="changelog")
    two_files(job)
    job.write([("-D", row(key)) for key in range(1, 1000, 3)])
    with in_tasks():
        with crashing("after the commit"), pytest.raises(TemporaryError, match="crash"):
            job.run()
        job.lose_checkpoint()
        job.run()
    assert [found["id"] for found in job.rows()][:3] == [2, 5, 8]
    job.check()
    job.write([("-D", row(2))])
    job.run()
    assert left(job) == [], "what the crash left is gone, too"


@pytest.mark.parametrize(
    ("when", "statement"),
    [
        ("in the commit", "DELETE FROM {t} WHERE id % 3 = 2"),
        ("before the look", "OPTIMIZE {t}"),
        (
            "in the commit",
            "MERGE INTO {t} t USING (SELECT 2L AS id) s ON t.id % 3 = s.id "
            "WHEN MATCHED THEN UPDATE SET region = 'merged'",
        ),
    ],
    ids=["delete", "optimize", "merge"],
)
def test_a_retry_has_the_vectors_of_the_new_state(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture, when: When, statement: str
) -> None:
    """A remove that names an outdated vector would double rows, and a vector made from one would bring rows back."""
    job = DeltaJob(spark, tmp_path)
    two_files(job)
    changed = list(range(1, 2000, 5))
    job.write([("+U", row(key, "us")) for key in changed])
    with in_tasks(), before_commit(lambda: job.sql(statement), when) as ran:
        job.run()
    assert len(ran) == 1
    others = {key for key in range(2000) if key % 1000 % 3} - set(changed)
    if "DELETE" in statement:
        others = {key for key in others if key % 3 != 2}
    expected = sorted([*changed, *others])
    rows = job.rows()
    assert [found["id"] for found in rows] == expected
    assert [found["id"] for found in rows if found["region"] == "us"] == changed
    assert caplog.text.count(WRITTEN) == 2
    assert left(job) == []
    job.check()
    assert job.check_index() is not None
