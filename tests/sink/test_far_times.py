"""Dates and timestamps before year 1 and after 9999, which Python can't represent: in columns, bounds, keys and
partitions.
"""

from pathlib import Path
from typing import Literal

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from tests.sink.harness import Job
from tests.sink.test_metrics import metrics, scanned_files, twin

pytestmark = pytest.mark.spark

COLUMNS = {"id": "bigint", "day": "date", "at": "timestamp", "wall": "timestamp_ntz"}
YEARS = {1: "-0043", 2: "+10000", 3: "0000", 4: "2026", 5: "-4712"}
"""By id. `-0043` is 44 BC."""


def row(number: int, year: str) -> dict[str, object]:
    return {"id": number, "day": f"{year}-03-15", "at": f"{year}-03-15T23:59:58Z", "wall": f"{year}-03-15T23:59:58"}


def stored(job: Job) -> dict[int, tuple[str, str, str]]:
    """The table's values by id, as texts from Iceberg's reader and Spark."""
    frame = job.spark.sql(f"SELECT id, CAST(day AS STRING), CAST(at AS STRING), CAST(wall AS STRING) FROM {job.target}")
    rows = {each[0]: tuple(each[1:]) for each in frame.collect()}
    assert len(rows) == frame.count()
    return rows


def shown(year: str) -> tuple[str, str, str]:
    return f"{year}-03-15", f"{year}-03-15 23:59:58", f"{year}-03-15 23:59:58"


@pytest.mark.parametrize(
    ("key", "partition_by", "deletes"),
    [
        (["id"], [], "equality"),
        (["id"], ["day"], "position"),
        (["id"], ["at"], "equality"),
        (["id"], ["wall"], "position"),
        (["id"], ["day(at)"], "equality"),
        (["id"], ["month(day)", "hour(wall)"], "position"),
        (["day"], ["year(day)"], "equality"),
        (["at", "wall"], ["bucket(4, at)"], "position"),
    ],
)
def test_far_years(
    spark: SparkSession,
    tmp_path: Path,
    key: list[str],
    partition_by: list[str],
    deletes: Literal["position", "equality"],
) -> None:
    job = Job(spark, tmp_path, columns=COLUMNS, key=key, partition_by=partition_by, deletes=deletes, file_format="json")
    job.write([("+I", row(number, year)) for number, year in YEARS.items()])
    job.run()
    assert stored(job) == {number: shown(year) for number, year in YEARS.items()}
    if key == ["id"]:
        # the row moves from one far partition to another, and one of them is emptied
        job.write([("-U", row(1, YEARS[1])), ("+U", row(1, "+294000")), ("-D", row(3, YEARS[3]))])
        expected = YEARS | {1: "+294000"}
    else:
        job.write([("-U", row(1, YEARS[1])), ("+U", row(11, YEARS[1])), ("-D", row(3, YEARS[3]))])
        expected = {11: YEARS[1]} | {number: year for number, year in YEARS.items() if number != 1}
    del expected[3]
    job.run()
    assert stored(job) == {number: shown(year) for number, year in expected.items()}
    if deletes == "position":
        job.check_deletes()
        if key == ["id"]:  # it makes Python values of keys
            assert job.check_index() is not None
    found = spark.sql(f"SELECT id FROM {job.target} WHERE day < DATE'-1000-01-01'").collect()
    assert [each.id for each in found] == [5]


def test_bounds_in_far_years_equal_those_of_icebergs_writer(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(spark, tmp_path, columns=COLUMNS, tasks=1)
    day, second = -735_160, -735_160 * 86_400_000_000 + 1
    columns = {"row_kind": ["+I"] * 3, "seq": [1, 2, 3], "id": [1, 2, 3], "day": [day, None, 2_932_897]}
    columns |= {"at": [second, None, 0], "wall": [None, None, second]}
    fields = [("row_kind", pa.string()), ("seq", pa.int64()), ("id", pa.int64()), ("day", pa.date32())]
    schema = pa.schema([*fields, ("at", pa.timestamp("us", "UTC")), ("wall", pa.timestamp("us"))])
    records = pa.table({f.name: pa.array(columns[f.name], f.type) for f in schema}, schema)
    job.write_table(records)
    job.run()
    (ours,) = metrics(spark, job.target)
    (theirs,) = metrics(spark, twin(job, records.num_rows))
    for name in ("value_counts", "null_value_counts", "lower_bounds", "upper_bounds"):
        assert ours[name] == theirs[name], name
    assert ours["lower_bounds"][2] == day.to_bytes(4, "little", signed=True)
    assert not scanned_files(job, ("greaterThan", "day", 2_932_897))
    assert scanned_files(job, ("lessThan", "day", day + 1))
