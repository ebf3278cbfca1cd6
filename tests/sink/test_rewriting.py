"""Files are rewritten beside the stream. The table's rows stay the same, whatever micro-batches do meanwhile."""

import logging
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.rewrites import rewriting
from tests.sink.harness import Changes, Job

pytestmark = pytest.mark.spark

BOTH = pytest.mark.parametrize("version", [2, 3])


def new_job(spark: SparkSession, folder: Path, version: int, **arguments: Any) -> Job:
    return Job(spark, folder, properties={"format-version": str(version)}, **arguments)


@BOTH
@pytest.mark.parametrize("partition_by", [(), ("bucket(2, id)",)])
def test_rows_change_while_their_files_are_rewritten(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture, version: int, partition_by: tuple[str, ...]
) -> None:
    caplog.set_level(logging.INFO, "rowdelta")
    job = new_job(spark, tmp_path, version, partition_by=partition_by, tasks=1)
    changes = Changes(job)
    changes.write(16)
    with rewriting() as done:
        job.run()
    assert len(done) == 3
    assert all(done), caplog.text
    assert job.rows() == changes.expected()
    job.check_deletes()
    assert job.check_index() is not None
    assert "catching up" not in caplog.text, "the index knows where the rows are now"
    assert "rewrote" in caplog.text
    # another process goes on
    changes.write(2)
    job.run()
    assert job.rows() == changes.expected()
    assert job.check_index() is not None
