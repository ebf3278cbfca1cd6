"""Tables of Spark's session catalog (`spark_catalog: true`): in memory, and in a Hive metastore."""

import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.delta.catalog_story import follow, job_in
from tests.sink.test_submit import environment

pytestmark = pytest.mark.spark

ROOT = Path(__file__).parents[2]


def test_in_memory(spark: SparkSession, tmp_path: Path) -> None:
    follow(job_in(spark, tmp_path))


def test_in_a_hive_metastore(tmp_path: Path) -> None:
    """A process of its own, since a session can't change its catalog. The metastore is a database in a file."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.delta.catalog_story", str(tmp_path)],
        cwd=tmp_path,
        env={**environment(), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    assert done.stdout.splitlines()[-1] == "done"
    assert (tmp_path / "metastore").is_dir()
