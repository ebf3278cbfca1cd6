"""A TRUNCATE of the source, applied to a Delta table: what came before it is gone, what came after it stays, and both
happens in one version.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from sink.errors import RowdeltaError
from tests.delta.harness import DeltaJob, before_commit, crashing
from tests.sink.harness import merging_soon, tiny_thresholds
from tests.sink.test_truncate import SETTINGS, TRUNCATE, Source, row

pytestmark = pytest.mark.spark


def test_what_came_before_is_gone_and_what_came_after_stays(spark: SparkSession, tmp_path: Path) -> None:
    settings: dict[str, Any] = SETTINGS
    job = DeltaJob(spark, tmp_path, partition_by=["region"], **settings)
    source = Source(job)
    source.write(*map(row, range(5)))
    source.write(row(1, "us"), 2)
    with tiny_thresholds(1, 2, spark):
        job.run()
        before, full = job.version(), source.expected()

        # the first attempt dies; at the second one others append and compact between look-up and commit
        source.write(row(0, "us"), row(8), TRUNCATE, row(1, "ap"), TRUNCATE, row(5, "us"), row(9), 9, row(4), row(10))
        with crashing("before the commit"), pytest.raises(RowdeltaError):
            job.run()
        assert job.rows() == full

        def others() -> None:
            job.append([row(100), row(5, "foreign")])
            job.sql("OPTIMIZE {t}")

        with before_commit(others, "in the commit"):
            job.run()
        assert job.rows() == source.expected()
        assert job.check_index() is not None
        info = job.log.history()[job.version()]
        assert json.loads(json.loads(info["userMetadata"])["rowdelta.rows"])["TRUNCATE"] == 2
        assert job.version() == before + 3, "in one version, after those of others"

        # after it, rows are found and changed, and small files are merged; then nothing but a TRUNCATE
        source.write(row(4, "ap"), 10)
        source.write(row(5, "ap"), row(13))
        later = source.expected()
        source.write(TRUNCATE)
        with merging_soon(), crashing("after the commit", after_commits=2), pytest.raises(RowdeltaError):
            job.run()
        assert (job.rows(), job.snapshot().files) == ([], {})
        assert sorted(job.log.rows(job.version() - 1).to_pylist(), key=lambda found: found["id"]) == later
        job.lose_checkpoint()
        source.write(TRUNCATE)
        source.write(TRUNCATE, row(1), row(2), 1)
        job.run()
        assert job.rows() == source.expected()
        job.check(travel=(before, before + 3))
        assert job.check_index() is not None
