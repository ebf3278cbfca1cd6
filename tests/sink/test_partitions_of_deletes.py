"""Deletes by position have the spec and partition of their data files, whatever the partition values are: Iceberg's
reader refuses others since 1.12.
"""

import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from sink.errors import TableError
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
    "i": "int",
    "x": "binary",
    "local": "timestamp_ntz",
}
PLAIN = {
    "t": "a",
    "d": "2020-01-01",
    "at": "2020-01-01T00:00:00Z",
    "n": "1.50",
    "b": True,
    "i": 1,
    "x": "AQ==",
    "local": "2020-01-01T00:00:00",
}
ODD: list[dict[str, Any]] = [
    {"t": 'a/b=c%2F d"\\\n\té\u2028\U0001f600'},
    {"t": ""},
    {"t": "null"},
    {"d": "1969-12-31", "at": "1969-12-31T23:59:59.999999Z", "local": "1969-12-31T23:59:59.999999"},
    {"d": "0001-01-01", "at": "0001-01-01T00:00:00Z", "local": "0001-01-01T00:00:00"},
    {"n": "-0.05"},
    {"n": "9999999999.99"},
    {"b": False, "i": -(2**31), "x": ""},
    {"i": 0, "x": "AP8vPSU="},
    dict.fromkeys(PLAIN),
]


def rows(first: int) -> list[dict[str, Any]]:
    return [{"id": first + number} | PLAIN | odd for number, odd in enumerate(ODD)]


@pytest.mark.parametrize(
    ("partition_by", "version"),
    [
        (("t",), 2),
        (("d", "n", "b"), 3),
        (("at", "month(d)"), 2),
        (("day(at)", "truncate(3, t)"), 3),
        (("bucket(2, t)", "truncate(7, n)"), 2),
        (("i", "x", "local"), 3),
        (("hour(local)", "truncate(10, i)", "truncate(2, x)", "year(at)"), 2),
    ],
    ids=lambda value: value if isinstance(value, int) else "-".join(value),
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
    job.rows()  # reads them
    # the spec moves, and others write and delete
    assert spark._jvm is not None
    columns = ", ".join(PLAIN)
    bucket = spark._jvm.org.apache.iceberg.expressions.Expressions.bucket("id", 2)
    job.java_table().updateSpec().addField(bucket).commit()
    spark.sql(f"REFRESH TABLE {job.target}")
    spark.sql(f"INSERT INTO {job.target} SELECT id + 100, {columns} FROM {job.target}").collect()
    spark.sql(f"DELETE FROM {job.target} WHERE id IN (101, 2)").collect()
    job.rows()  # reads them
    moved = replace(job, partition_by=(*partition_by, "bucket(2, id)"))
    moved._sequence, moved._files = job._sequence, job._files
    moved.write([("+I", row) for row in rows(3 * count)])
    moved.write([("-D", {"id": number}) for number in (1, 4, 7, 104, 107, 3 * count, 3 * count + 5)])
    moved.run()
    moved.rows()
    sink = only_sink(moved)
    sink.upkeep.end_rewrite(rewritten_files(sink))
    left = {row["id"] for row in moved.rows()}
    assert not left & {0, 1, 2, 4, 7, 101, 104, 107, 3 * count, 3 * count + 5}
    assert {5, 3 * count + 1, 105} <= left


@pytest.mark.parametrize("version", [2, 3])
def test_files_of_a_spec_by_floats_that_others_left(spark: SparkSession, tmp_path: Path, version: int) -> None:
    """The sink refuses to write such partitions, and deletes from old ones. Those of NaN and infinity stop the table
    (docs/limits.md).
    """
    columns = {"id": "bigint", "f": "float", "g": "double"}
    job = Job(spark, tmp_path, columns=columns, partition_by=("f", "g"), file_format="json")
    job.properties = {"format-version": str(version), "write.delete.mode": "merge-on-read"}
    job.configure_columns = False
    job.create_table(
        [
            {"id": 1, "name": "id", "required": True, "type": "long"},
            {"id": 2, "name": "f", "required": False, "type": "float"},
            {"id": 3, "name": "g", "required": False, "type": "double"},
        ]
    )
    odd = [-0.0, 0.0, -1.1, 1e-300, None]
    others: list[dict[str, Any]] = [{"id": number, "f": f, "g": g} for number, (f, g) in enumerate(product(odd, odd))]
    job.append([row for row in others for row in (row, row | {"id": row["id"] + 100})])
    job.java_table().updateSpec().removeField("f").removeField("g").commit()
    spark.sql(f"REFRESH TABLE {job.target}")
    job.partition_by = ()
    job.write([("-D", {"id": number}) for number in range(len(others))])
    job.run()
    assert [row["id"] for row in job.rows()] == [row["id"] + 100 for row in others]
    # partitions that a commit can't name
    job.java_table().updateSpec().addField("g").commit()
    job.append([{"id": 1000 + number, "f": None, "g": odd} for number, odd in enumerate([math.nan, math.inf])])
    job.java_table().updateSpec().removeField("g").commit()
    spark.sql(f"REFRESH TABLE {job.target}")
    job.write([("-D", {"id": 1000})])
    with pytest.raises(TableError, match="Cannot parse"):
        job.run()
    assert len(job.rows()) == len(others) + 2
