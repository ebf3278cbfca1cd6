"""What a row takes on disk: in a first load, beside Spark's own writer; and where nothing merges the files."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from changelog.rows import BAD, BAD_FIELDS, KIND, RowKind, order_column
from deltawriters import DeltaOptions, TaskId
from deltawriters.partitioning import LASTING_BYTES
from sink.config import TableSection
from sink.plans import TaskPlan
from sink.spark.tasks import write
from sink.table.plan import files_last
from sink.targets.iceberg.writers import IcebergTableSpec
from tests.sink.harness import Job

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


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({"mode": "append"}, True),
        ({"deletes": "equality"}, True),
        ({"merge_small_files": False}, True),
        ({}, False),
    ],
)
def test_files_last_where_nothing_merges_them(entries: dict[str, Any], expected: bool) -> None:
    section = TableSection.model_validate({"source": "shop.orders", "target": "lake.shop.orders", **entries})
    assert files_last(section) == expected


@pytest.mark.parametrize("options", [None, DeltaOptions(("id",), table_is_empty=True)], ids=["append", "upsert"])
def test_small_files_that_last_are_packed_well(tmp_path: Path, options: DeltaOptions | None) -> None:
    schema = """{"type":"struct","schema-id":0,"fields":[
      {"id":1,"name":"id","required":true,"type":"long"},{"id":2,"name":"comment","required":false,"type":"string"}]}"""
    rows = changes().slice(0, 10_000)
    columns = {
        KIND: pa.repeat(pa.scalar(int(RowKind.INSERT), pa.int8()), rows.num_rows),
        order_column(0): rows.column("seq").combine_chunks(),
        "id": rows.column("id").combine_chunks(),
        "comment": rows.column("comment").combine_chunks(),
        BAD: pa.nulls(rows.num_rows, pa.struct([(name, pa.string()) for name in BAD_FIELDS])),
    }
    batch = pa.RecordBatch.from_pydict(columns)

    def written(*, lasting: bool, level: int | None = None) -> int:
        """Bytes of the files."""
        properties = (("write.parquet.compression-level", str(level)),) if level else ()
        table = IcebergTableSpec(str(tmp_path), 2, schema, ('{"spec-id":0,"fields":[]}',), 0, properties)
        plan = TaskPlan(table, options, "op", "lake.shop.orders", None, None, lasting=lasting)
        result, _ = write.write_changes(plan, TaskId(0, 1, "op"), [batch])
        assert result.records["DATA"] == rows.num_rows
        return sum(size for _, size in result.contents.values())

    assert written(lasting=True) == written(lasting=False, level=3)
    assert written(lasting=False) == written(lasting=False, level=1) > written(lasting=True)


@pytest.mark.spark
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
