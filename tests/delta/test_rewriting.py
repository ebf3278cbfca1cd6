"""Files of a Delta table are rewritten beside the stream."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from sink.commands import inspection
from tests.delta.harness import DeltaJob
from tests.rewrites import ALL_FILES, only_sink, rewriting
from tests.sink.harness import Changes

pytestmark = pytest.mark.spark


@pytest.mark.parametrize("partition_by", [(), ("region",)])
def test_rows_change_while_their_files_are_rewritten(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture, partition_by: tuple[str, ...]
) -> None:
    job = DeltaJob(spark, tmp_path, partition_by=partition_by, tasks=1)
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
    assert status(spark, job)[-1] == "  files: 0.0 MB on average, 33.3% of their rows are deleted"
    begun = sink.begin_rewrite(ALL_FILES)
    assert begun is not None
    assert sink.write_rewrite(begun)
    assert sink.end_rewrite(begun) is not None
    job.check()
    found = [{name: value for name, value in row.items() if name != "seq"} for row in job.rows()]
    assert found == [row | {"note": None} for row in changes.expected()]
    files, rewritten = status(spark, job)[-2:]
    assert files == "  files: 0.0 MB on average, 0.0% of their rows are deleted"
    assert rewritten.startswith("  rewritten last: 3 files at ")


def status(spark: SparkSession, job: DeltaJob) -> list[str]:
    return list(inspection.status(spark, job.config()))
