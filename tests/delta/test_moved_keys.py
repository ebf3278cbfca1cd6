"""Statements that move keys, applied to Delta tables (`tests.sink.moved_keys`)."""

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.delta.harness import DeltaJob
from tests.delta.readers import READERS
from tests.sink.moved_keys import play

pytestmark = pytest.mark.spark


def test_all_rows_stay(spark: SparkSession, tmp_path: Path) -> None:
    job = DeltaJob(spark, tmp_path, columns={"id": "bigint", "name": "string", "size": "int"})

    def rows() -> list[dict[str, Any]]:
        return sorted(READERS["delta-rs"](job.table_folder), key=lambda found: int(found["id"]))

    play(job, ("-U", "+U"), 3, rows)
