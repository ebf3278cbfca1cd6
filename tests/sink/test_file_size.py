"""What a row of a first load takes on disk, beside Spark's own writer of Iceberg tables."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from deltawriters.partitioning import LASTING_BYTES
from tests.sink.harness import Job

pytestmark = pytest.mark.spark

ROWS = 150_000


def changes() -> pa.Table:
    """A shop's tickets: foreign keys, times, notes with repeated phrases, comments that are never the same."""
    random = np.random.default_rng(1)
    words = pa.array([f"{word:x}" * 2 for word in range(300)])

    def texts(count: int, length: int) -> pa.Array:
        return pc.binary_join_element_wise(
            *(words.take(pa.array(random.integers(300, size=count))) for _ in range(length)), " "
        )

    numbers = np.arange(ROWS)
    return pa.table(
        {
            "row_kind": pa.repeat(pa.scalar("+I"), ROWS),
            "seq": pa.array(numbers),
            "id": pa.array(numbers),
            "customer": pa.array(random.integers(ROWS // 10, size=ROWS) * 1_000_003),
            "note": texts(6000, 10).take(pa.array(random.integers(6000, size=ROWS))),
            "comment": texts(ROWS, 10),
            "at": pa.array(1_735_689_600_000_000 + numbers * 1_250).cast(pa.timestamp("us", "UTC")),
        }
    )


def test_a_first_load_is_no_larger_than_by_sparks_own_writer(spark: SparkSession, tmp_path: Path) -> None:
    columns = {"id": "bigint", "customer": "bigint", "note": "string", "comment": "string", "at": "timestamp"}
    job = Job(spark, tmp_path, columns=columns, tasks=1)
    loaded = changes()
    assert loaded.nbytes > 1.2 * LASTING_BYTES
    job.write_table(loaded)
    job.run()
    own = f"lake.{job.namespace}.own"
    spark.table(job.target).sort("id").coalesce(1).writeTo(own).using("iceberg").create()
    sizes = {}
    for table in (job.target, own):
        total = spark.table(f"{table}.files").agg(F.sum("file_size_in_bytes"), F.sum("record_count")).collect()[0]
        assert total[1] == ROWS
        sizes[table] = total[0] / ROWS
    assert sizes[job.target] <= sizes[own], sizes
