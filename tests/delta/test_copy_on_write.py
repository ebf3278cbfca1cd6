"""`deletes: copy-on-write` on Delta tables: files are replaced, and the table never gets a deletion vector. So it needs
no feature that old readers don't know.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from sink.errors import TemporaryError
from sink.table import copy_on_write
from tests.delta.harness import DeltaJob, before_commit, crashing
from tests.sink.harness import Changes

pytestmark = pytest.mark.spark


@contextmanager
def in_tasks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copy_on_write, "_ON_DRIVER", -1)
        patch.setattr(copy_on_write, "_LEAST", 1)
        patch.setattr(copy_on_write, "_WORTH_A_TASK", 1)
        yield


def new_job(spark: SparkSession, folder: Path, **arguments: Any) -> DeltaJob:
    return DeltaJob(spark, folder, deletes="copy-on-write", **arguments)


@pytest.mark.parametrize("partition_by", [(), pytest.param(("region",), marks=pytest.mark.versions)])
def test_the_table_never_gets_a_vector(spark: SparkSession, tmp_path: Path, partition_by: tuple[str, ...]) -> None:
    job = new_job(spark, tmp_path, partition_by=partition_by)
    changes = Changes(job)
    changes.write(3)
    job.run()
    changes.write(2)
    with in_tasks(), crashing("after the commit"), pytest.raises(TemporaryError, match="crash "):
        job.run()
    with in_tasks():
        job.run()
    assert job.rows() == changes.expected()
    job.check()
    assert job.check_index() is not None
    protocol = job.snapshot().protocol
    assert "deletionVectors" not in (protocol.get("writerFeatures") or ())
    assert protocol["minReaderVersion"] == 1
    own = [info for _, info in sorted(job.log.history().items()) if "rowdelta-operation" in str(info)]
    metrics = [info["operationMetrics"] for info in own[-5:]]
    assert all(int(found["numDeletionVectorsUpdated"]) == 0 for found in metrics)
    assert [int(found["numTouchedFiles"]) > 0 for found in metrics] == [False] + [True] * 4
    assert sum(int(found.get("numTargetRowsCopied", 0)) for found in metrics) > 0
    for found in metrics[1:]:
        assert min(int(found[name]) for name in ("numRemovedBytes", "numAddedBytes", "rewriteTimeMs")) > 0
    job.write([("-D", row) for row in job.rows()])
    job.run()
    assert job.rows() == []
    assert job.snapshot().files == {}
    job.check(readers=())


def test_a_file_loses_the_vector_that_it_has(spark: SparkSession, tmp_path: Path) -> None:
    """It is of another mode, or of another writer. The files that aren't touched keep theirs."""
    writer = DeltaJob(spark, tmp_path, tasks=1, table={"merge_small_files": False})
    writer.write([("+I", {"id": n, "region": "a"}) for n in range(10)])
    writer.write([("+I", {"id": n, "region": "b"}) for n in range(10, 20)])
    writer.write([("-D", {"id": n, "region": None}) for n in (1, 11)])
    writer.run()
    writer.sql("DELETE FROM {t} WHERE id IN (3, 13)")
    assert len(writer.vectors()) == 2
    job = replace(writer, deletes="copy-on-write")
    job._sequence, job._files = writer._sequence, writer._files
    expected = {n: "a" if n < 10 else "b" for n in range(20) if n not in (1, 3, 11, 13)}
    for number, left in ((0, 1), (10, 0)):
        job.write([("+U", {"id": number, "region": "new"})])
        expected[number] = "new"
        with in_tasks():
            job.run()
        assert len(job.vectors()) == left
        assert job.rows() == [{"id": n, "region": text} for n, text in expected.items()]
        job.check()
        assert job.check_index() is not None


def test_others_commit_meanwhile(spark: SparkSession, tmp_path: Path) -> None:
    job = new_job(spark, tmp_path, tasks=1)
    job.write([("+I", {"id": n, "region": "a"}) for n in range(10)])
    job.run()
    expected = dict.fromkeys(range(10), "a")
    others: list[Callable[[], Any]] = [
        lambda: job.append([{"id": 1, "region": "theirs"}]),
        lambda: job.sql("OPTIMIZE {t}"),
        lambda: job.sql("DELETE FROM {t} WHERE id = 5"),
    ]
    for number, happens in enumerate(others):
        new = {1: str(number), 7 + number: "c", 20 + number: "b"}
        job.write([("+U", {"id": key, "region": region}) for key, region in new.items()])
        with before_commit(happens):
            job.run()
        expected |= new
    del expected[5]
    assert job.rows() == [{"id": n, "region": text} for n, text in sorted(expected.items())]
    job.check()
    assert job.vectors() == {}
    assert job.check_index() is not None


def test_mapped_columns_and_files_of_an_earlier_schema(spark: SparkSession, tmp_path: Path) -> None:
    job = new_job(spark, tmp_path, tasks=1, properties={"delta.columnMapping.mode": "name"})
    job.write([("+I", {"id": n, "region": "ab"[n % 2]}) for n in range(10)])
    job.run()
    job.sql("ALTER TABLE {t} RENAME COLUMN region TO place")
    job.sql("ALTER TABLE {t} ADD COLUMN note string")
    job.columns = {"id": "bigint", "place": "string", "note": "string"}
    job.write([("+U", {"id": 3, "place": "c", "note": "new"})])
    job.run()
    expected = [{"id": n, "place": "ab"[n % 2], "note": None} for n in range(10)]
    expected[3] = {"id": 3, "place": "c", "note": "new"}
    assert job.rows() == expected
    job.check(readers=())
    stats = [json.loads(add["stats"])["numRecords"] for add in job.snapshot().files.values()]
    assert sorted(stats) == [1, 9]
