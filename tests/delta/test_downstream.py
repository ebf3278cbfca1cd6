"""What a streaming reader of the table sees of the sink's commits, as docs/delta.md says."""

from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from sink.spark.versions import to_arrow
from tests.delta.harness import DeltaJob
from tests.sink.harness import merging_soon

pytestmark = pytest.mark.spark


def followed(job: DeltaJob, target: Path, **options: str) -> list[int]:
    """The keys of all rows that a streaming query has seen, after one more look."""
    reader = job.spark.readStream.format("delta").options(**options).load(str(job.table_folder))
    writer = reader.writeStream.format("parquet").option("checkpointLocation", f"{target}-state")
    writer.trigger(availableNow=True).start(str(target)).awaitTermination()
    return sorted(to_arrow(job.spark.read.schema(reader.schema).parquet(str(target))).to_pydict()["id"])


def test_streaming_readers(spark: SparkSession, tmp_path: Path) -> None:
    job = DeltaJob(spark, tmp_path)
    strict, skipping = tmp_path / "strict", tmp_path / "skipping"
    job.write([("+I", {"id": 0, "region": "eu"})])
    job.run()
    assert followed(job, strict) == [0]
    for key in range(1, 4):
        job.write([("+I", {"id": key, "region": "eu"})])
    with merging_soon():
        job.run()
    assert "rowdelta.minor-compaction" in str([info.get("userMetadata") for info in job.log.history().values()])
    # micro-batches that only insert, and merges of their files, are appends to a reader: it sees each row once
    assert followed(job, strict) == [0, 1, 2, 3]
    assert followed(job, skipping, skipChangeCommits="true") == [0, 1, 2, 3]
    job.write([("+I", {"id": 4, "region": "eu"})])
    job.write([("-D", {"id": 0, "region": "eu"}), ("+I", {"id": 5, "region": "eu"})])
    job.write([("+I", {"id": 6, "region": "eu"})])
    job.run()
    # a commit that changes rows is left out as a whole
    assert followed(job, skipping, skipChangeCommits="true") == [0, 1, 2, 3, 4, 6]
    with pytest.raises(PySparkException, match="skipChangeCommits"):
        followed(job, strict)
