"""The stored key is the authority, in both formats: under a narrower one, one change would remove several rows."""

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from sink.errors import ConfigError, TableError
from tests.delta.harness import DeltaJob
from tests.sink.harness import Job

pytestmark = pytest.mark.spark

KEY = ("id", "region")
ROWS = [{"id": number % 2, "region": f"r{number}"} for number in range(5)]


def opened(spark: SparkSession, folder: Path, kind: type[Job], **more: Any) -> Job:
    """A table whose key is two columns. Iceberg's own key is left out: it would refuse another one by itself."""
    job = kind(spark, folder, key=KEY, tasks=1, **more)
    if kind is Job:
        spark.sql(f"CREATE TABLE {job.target} (id BIGINT NOT NULL, region STRING NOT NULL) USING iceberg")
    return job


@pytest.mark.parametrize("kind", [Job, DeltaJob])
def test_another_key_is_refused_until_the_user_says_so(spark: SparkSession, tmp_path: Path, kind: type[Job]) -> None:
    job = opened(spark, tmp_path, kind)
    job.write([("+I", row) for row in ROWS])
    job.run()
    job.key = ("id",)
    job.write([("+U", {"id": 1, "region": "new"})])
    with pytest.raises(ConfigError, match=r"key: got id, but the rows of .* are told apart by id, region\.") as refused:
        job.run()
    statement = str(refused.value).partition("run again: ")[2].rstrip(".")
    spark.sql(statement.replace(job.target, job.sql_name()) if isinstance(job, DeltaJob) else statement)
    with pytest.raises(TableError, match=r"2 keys \(id\) have several rows, at most 3\. .*Nothing was applied"):
        job.run()
    assert len(job.rows()) == 5
    job.key = KEY
    job.run()  # the stored key is still the key
    assert {"id": 1, "region": "new"} in job.rows()
    assert len(job.rows()) == 6


@pytest.mark.parametrize("kind", [Job, DeltaJob])
def test_a_key_that_tells_the_rows_apart_can_be_changed(spark: SparkSession, tmp_path: Path, kind: type[Job]) -> None:
    job = opened(spark, tmp_path, kind)
    job.write([("+I", {"id": number, "region": "eu"}) for number in range(3)])
    job.run()
    name = job.sql_name() if isinstance(job, DeltaJob) else job.target
    spark.sql(f"""ALTER TABLE {name} SET TBLPROPERTIES ('rowdelta.shop.new-key' = '["id"]')""")
    job.key = ("id",)
    job.write([("+U", {"id": 1, "region": "us"})])
    job.run()
    assert job.rows() == [{"id": n, "region": "us" if n == 1 else "eu"} for n in range(3)]


@pytest.mark.parametrize("kind", [Job, DeltaJob])
def test_a_table_that_others_filled(spark: SparkSession, tmp_path: Path, kind: type[Job]) -> None:
    job = kind(spark, tmp_path, key=("id",), tasks=1)
    if isinstance(job, DeltaJob):
        job.create("id BIGINT NOT NULL, region STRING")
    else:
        spark.sql(f"CREATE TABLE {job.target} (id BIGINT NOT NULL, region STRING) USING iceberg")
    job.append(ROWS)
    job.write([("+U", {"id": 1, "region": "new"})])
    with pytest.raises(TableError, match=r"2 keys \(id\) have several rows, at most 3"):
        job.run()
    assert len(job.rows()) == 5
