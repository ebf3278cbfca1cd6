"""Deletes by position have the spec and partition of their data files, whatever the partition values are: readers
refuse others (https://github.com/apache/iceberg/pull/16957).
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.rewrites import only_sink, rewritten_files
from tests.sink.harness import Job, merging_soon

pytestmark = pytest.mark.spark

COLUMNS = {
    "id": "bigint",
    "t": "string",
    "d": "date",
    "at": "timestamp",
    "n": "decimal(12,2)",
    "b": "boolean",
}
PLAIN = {"t": "a", "d": "2020-01-01", "at": "2020-01-01T00:00:00Z", "n": "1.50", "b": True}
ODD: list[dict[str, Any]] = [
    {"t": 'a/b=c%2F d"\\\n\té\u2028\U0001f600'},
    {"t": ""},
    {"t": "null"},
    {"d": "1969-12-31", "at": "1969-12-31T23:59:59.999999Z"},
    {"d": "0001-01-01", "at": "0001-01-01T00:00:00Z"},
    {"n": "-0.05"},
    {"n": "9999999999.99"},
    {"b": False},
    dict.fromkeys(PLAIN),
]


def rows(first: int) -> list[dict[str, Any]]:
    return [{"id": first + number} | PLAIN | odd for number, odd in enumerate(ODD)]


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize(
    "partition_by",
    [
        ("t",),
        ("d", "n", "b"),
        ("at", "month(d)"),
        ("day(at)", "truncate(3, t)"),
        ("bucket(2, t)", "truncate(7, n)"),
    ],
    ids=lambda parts: "-".join(parts),
)
def test_deletes_have_the_partitions_of_their_data_files(
    spark: SparkSession, tmp_path: Path, version: int, partition_by: tuple[str, ...]
) -> None:
    job = Job(
        spark,
        tmp_path,
        columns=COLUMNS,
        partition_by=partition_by,
        properties={"format-version": str(version), "write.delete.mode": "merge-on-read"},
        file_format="json",
        tasks=1,
    )
    count = len(ODD)

    def deleted(*offsets: int) -> None:
        job.write([("-D", {"id": first + offset}) for first in range(0, 4 * count, count) for offset in offsets])

    for first in range(0, 3 * count, count):
        job.write([("+I", row) for row in rows(first)])
    deleted(*range(0, count, 3))
    with merging_soon(2):
        job.run()
    job.check_deletes()
    # the spec moves, and others write and delete
    assert spark._jvm is not None
    bucket = spark._jvm.org.apache.iceberg.expressions.Expressions.bucket("id", 2)
    job.java_table().updateSpec().addField(bucket).commit()
    spark.sql(f"REFRESH TABLE {job.target}")
    spark.sql(f"INSERT INTO {job.target} SELECT id + 100, t, d, at, n, b FROM {job.target}").collect()
    spark.sql(f"DELETE FROM {job.target} WHERE id IN (101, 2)").collect()
    job.check_deletes()
    moved = replace(job, partition_by=(*partition_by, "bucket(2, id)"))
    moved._sequence, moved._files = job._sequence, job._files
    moved.write([("+I", row) for row in rows(3 * count)])
    moved.write([("-D", {"id": number}) for number in (1, 4, 7, 104, 107, 3 * count, 3 * count + 5)])
    moved.run()
    moved.check_deletes()
    sink = only_sink(moved)
    sink.end_rewrite(rewritten_files(sink))
    moved.check_deletes()
    left = {row["id"] for row in moved.rows()}
    assert not left & {0, 1, 2, 4, 7, 101, 104, 107, 3 * count, 3 * count + 5}
    assert {5, 3 * count + 1, 105} <= left
