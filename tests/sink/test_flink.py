"""Flink's Iceberg sink and this one take turns at a table."""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from benchmarks.peers.writers import Asked, flink_program
from sink.commands.maintain import maintain
from tests.sink.harness import Job, by_pyiceberg

pytestmark = [
    pytest.mark.spark,
    pytest.mark.skipif(shutil.which("javac") is None, reason="Flink's program has to be compiled, which needs a JDK"),
]

REMOVED = None


@pytest.fixture
def flink(tmp_path: Path) -> Iterator[Asked]:
    with flink_program(tmp_path / "flink.log") as program:
        yield program


def test_flink_writes_between_two_runs(spark: SparkSession, tmp_path: Path, flink: Asked) -> None:
    """Its upserts delete by value. The key index takes them in, and says them by position."""
    job = Job(spark, tmp_path, tasks=1, properties={"format-version": "2"}, table={"merge_small_files": False})
    job.write([("+I", {"id": number, "region": "ours"}) for number in range(6)])
    job.run()

    said(flink, "start", str(job.table_folder), str(tmp_path / "state"), "upsert", "none")
    changed(flink, tmp_path / "first", {1: "flink's", 2: REMOVED, 10: "flink's", 11: "flink's"})
    changed(flink, tmp_path / "second", {1: "flink's newer", 10: REMOVED})
    said(flink, "stop")
    expected = {0: "ours", 1: "flink's newer", 3: "ours", 4: "ours", 5: "ours", 11: "flink's"}
    assert regions(job) == expected
    assert [file for file in job.files() if file["content"] == 2]

    job.write(
        [("+U", {"id": 11, "region": "ours"}), ("-D", {"id": 1, "region": "ours"}), ("+U", {"id": 2, "region": "new"})]
    )
    job.run()
    expected = {0: "ours", 2: "new", 3: "ours", 4: "ours", 5: "ours", 11: "ours"}
    assert regions(job) == expected
    assert job.check_index() is not None

    (found,) = maintain(spark, job.config(), ["orders"], dry_run=False)
    assert found.error is None
    assert not [file for file in job.files() if file["content"] == 2]
    assert {row["id"]: row["region"] for row in by_pyiceberg(job)} == regions(job) == expected
    assert job.check_index() is not None


def said(flink: Asked, *words: str) -> None:
    answer = flink.ask("\t".join(words))
    assert answer.startswith("ok"), answer


def changed(flink: Asked, folder: Path, rows: Mapping[int, str | None]) -> None:
    """One checkpoint with the newest region of these ids."""
    folder.mkdir()
    files = []
    for parity in (0, 1):
        part = [(key, region) for key, region in rows.items() if key % 2 == parity]
        changes = {
            "row_kind": ["-D" if region is REMOVED else "+I" for _, region in part],
            "id": [key for key, _ in part],
            "region": [region or "" for _, region in part],
        }
        schema = pa.schema({"row_kind": pa.string(), "id": pa.int64(), "region": pa.string()})
        files.append(folder / f"{parity}.parquet")
        pq.write_table(pa.table(changes, schema=schema), files[-1])
    said(flink, "batch", *map(str, files))


def regions(job: Job) -> dict[int, str]:
    job.spark.catalog.refreshTable(job.target)
    return {row["id"]: row["region"] for row in job.rows()}
