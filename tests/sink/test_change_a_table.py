"""The recipes of docs/change-a-table.md, as a user would follow them."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pyspark.sql import SparkSession

from sink.commands import reset
from sink.errors import TableError
from tests.delta.harness import DeltaJob
from tests.sink.harness import Changes, Job
from tests.sink.test_catalogs import add_catalog

pytestmark = pytest.mark.spark


def reset_table(job: Job, *, empty: bool = False) -> None:
    """`rowdelta reset sink.yaml orders`."""
    found = reset.find(job.spark, job.config(), "orders", empty=empty)
    assert found is not None
    found.apply()


def insert(number: int, **values: Any) -> tuple[str, Mapping[str, Any]]:
    return "+I", {"id": number, **values}


def debezium(spark: SparkSession, folder: Path) -> Job:
    """Without a schema: a decimal became text."""
    job = Job(spark, folder, columns={}, file_format="json", configure_columns=False)
    job.sections, job.table = {"source": {"format": "debezium-json"}}, {"order_by": ["source.lsn bigint"]}
    write(job, 1, "BNI=")
    job.run()
    assert job.rows() == [{"id": 1, "weight": "BNI="}]
    return job


def write(job: Job, number: int, weight: str) -> None:
    event = {"before": None, "after": {"id": number, "weight": weight}, "op": "c", "source": {"lsn": number}}
    job.write_text(json.dumps(event) + "\n")


def test_another_type_for_a_column_by_reading_again(spark: SparkSession, tmp_path: Path) -> None:
    job = debezium(spark, tmp_path)
    spark.sql(f"ALTER TABLE {job.target} DROP COLUMN weight")
    job.table = {**job.table, "types": {"weight": "decimal(10,3)"}}
    reset_table(job)
    write(job, 2, "ASbs")
    job.run()
    assert job.rows() == [{"id": 1, "weight": Decimal("1.234")}, {"id": 2, "weight": Decimal("75.500")}]
    assert job.check_index() is not None


def test_another_type_in_a_column_beside_the_old_one(spark: SparkSession, tmp_path: Path) -> None:
    job = debezium(spark, tmp_path)
    spark.sql(f"ALTER TABLE {job.target} ADD COLUMN weight_kg decimal(10,3)")
    job.table = {**job.table, "columns": {"id": "bigint", "weight_kg": {"type": "decimal(10,3)", "from": "weight"}}}
    write(job, 2, "ASbs")
    job.run()
    assert job.rows() == [
        {"id": 1, "weight": "BNI=", "weight_kg": None},
        {"id": 2, "weight": "75.500", "weight_kg": Decimal("75.500")},  # since it is known now what the text is
    ]


@pytest.mark.parametrize("deletes", ["position", "equality"])
def test_another_partitioning(spark: SparkSession, tmp_path: Path, deletes: Any) -> None:
    """The error says the statements."""
    job = Job(spark, tmp_path, deletes=deletes, partition_by=["bucket(4, id)"])
    changes = Changes(job)
    changes.write(3)
    job.run()
    job.partition_by = ["region", "bucket(8, id)"]
    with pytest.raises(TableError, match=r"partitioning \(bucket\(4, id\)\) differs from partition_by") as refused:
        job.run()
    statements = str(refused.value).partition("in SQL: ")[2].partition(" (docs/")[0].split("; ")
    assert [statement.partition(f"{job.target} ")[2] for statement in statements] == [
        "DROP PARTITION FIELD bucket(4, id)",
        "ADD PARTITION FIELD region",
        "ADD PARTITION FIELD bucket(8, id)",
    ]
    # what the statements do: they need Iceberg's SQL extensions, which the tests' session hasn't
    jvm: Any = spark._jvm
    bucket = jvm.org.apache.iceberg.expressions.Expressions.bucket("id", 8)
    job.java_table().updateSpec().removeField("id_bucket").addField("region").addField(bucket).commit()
    changes.write(3)
    job.run()
    assert job.rows() == changes.expected()
    specs = spark.sql(f"SELECT DISTINCT spec_id FROM {job.target}.files WHERE content = 0").count()
    assert specs == 2, "the old files stay as they are"
    job.check_deletes()


def test_another_partitioning_in_delta_is_another_table(spark: SparkSession, tmp_path: Path) -> None:
    job = DeltaJob(spark, tmp_path, file_format="json")
    job.write([insert(1, region="eu"), insert(2, region="us")])
    job.run()
    job.partition_by = ["region"]
    with pytest.raises(TableError, match=r"Delta Lake can't change it, only build the table anew"):
        job.run()
    shutil.rmtree(job.table_folder)
    job.write([insert(3, region="eu")])
    job.run()
    assert [row["id"] for row in job.rows()] == [1, 2, 3], "the source is read from its start"
    assert (job.table_folder / "region=eu").is_dir()


def test_other_deletes(spark: SparkSession, tmp_path: Path) -> None:
    """Each change with the next run. What equality deletes removed, the run says by position by itself."""
    job = Job(spark, tmp_path, deletes="equality", sections={"maintenance": {"budget": 0.5}})
    changes = Changes(job)
    for deletes in ("equality", "position", "copy-on-write", "position", "equality"):
        job.deletes = deletes
        changes.write(2)
        job.run()
        assert job.rows() == changes.expected()
        contents = {file["content"] for file in job.files()}
        assert (2 in contents) == (deletes == "equality"), deletes
        if deletes == "position":
            assert job.check_index() is not None


@pytest.mark.parametrize("kind", [Job, DeltaJob])
def test_another_key(spark: SparkSession, tmp_path: Path, kind: type[Job]) -> None:
    job = kind(spark, tmp_path, file_format="json")
    job.write([insert(1, region="eu"), insert(1, region="us"), insert(2, region="us")])
    job.run()
    assert len(job.rows()) == 2
    job.key = ["id", "region"]
    if kind is DeltaJob:
        shutil.rmtree(job.table_folder)
    else:
        job.drop()
    job.run()
    assert [(row["id"], row["region"]) for row in job.rows()] == [(1, "eu"), (1, "us"), (2, "us")]
    assert job.check_index() is not None


@dataclass
class RenamingJob(Job):
    """In a catalog that can rename a table, as all can but `hadoop`."""

    catalog: ClassVar[str] = "renaming"
    name: str = "orders"

    @property
    def catalog_options(self) -> dict[str, str]:
        uri = f"jdbc:sqlite:{self.folder / 'catalog.db'}"
        return {"type": "jdbc", "uri": uri, "warehouse": str(self.folder / "warehouse")}

    @property
    def target(self) -> str:
        return f"{self.catalog}.{self.namespace}.{self.name}"


def test_another_name_of_the_table(spark: SparkSession, tmp_path: Path) -> None:
    job = RenamingJob(spark, tmp_path, file_format="json")
    add_catalog(spark, job.catalog, job.catalog_options)
    job.write([insert(1, region="eu"), insert(2, region="us")])
    job.run()
    old, job.name = job.target, "orders_of_the_shop"
    spark.sql(f"ALTER TABLE {old} RENAME TO {job.target.partition('.')[2]}")
    job.write([("-D", {"id": 1}), insert(3, region="eu")])
    job.run()
    assert [row["id"] for row in job.rows()] == [2, 3]
    assert len(job.snapshots()) == 2, "the position has come with it"


def test_another_folder_of_a_delta_table(spark: SparkSession, tmp_path: Path) -> None:
    job = DeltaJob(spark, tmp_path, file_format="json")
    job.write([insert(1, region="eu"), insert(2, region="us")])
    job.run()
    old, version = job.table_folder, job.version()
    job.namespace = "moved"
    job.table_folder.parent.mkdir(parents=True)
    old.rename(job.table_folder)
    job.write([("-D", {"id": 1}), insert(3, region="eu")])
    job.run()
    assert [row["id"] for row in job.rows()] == [2, 3]
    assert job.version() == version + 1, "the position has come with it"


def test_another_source(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(spark, tmp_path, file_format="json")
    job.write([insert(1, region="eu"), insert(2, region="us")])
    job.run()
    other = Job(spark, tmp_path / "other", file_format="json", namespace=job.namespace, checkpoint=job.checkpoint)
    reset_table(other)
    other.write([insert(2, region="of the other"), insert(3, region="eu")])
    other.run()
    assert [(row["id"], row["region"]) for row in job.rows()] == [(1, "eu"), (2, "of the other"), (3, "eu")]
