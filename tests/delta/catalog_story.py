"""What a job does with a table of Spark's session catalog, and others by its name: `follow`.

`python -m tests.delta.catalog_story FOLDER` is a process of its own for it, whose catalog is a Hive metastore.
"""

import contextlib
import io
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import yaml
from pyspark.sql import SparkSession

from sink import cli
from sink.config import Config
from sink.spark import session
from sink.spark.versions import to_arrow
from tests.delta.harness import DeltaJob
from tests.sink.harness import Row
from tests.stack.jars import ivy_to_itself

SETTINGS = {
    "spark.master": "local[2]",
    "spark.driver.memory": "1g",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.databricks.delta.snapshotPartitions": "1",
    "spark.sql.shuffle.partitions": "2",
}


@dataclass
class CatalogJob(DeltaJob):
    """A job whose catalog `prod` is the session's."""

    catalog: ClassVar[str] = "prod"

    @property
    def catalog_options(self) -> dict[str, str]:
        return {"type": "delta", "spark_catalog": "true"}

    @property
    def table_folder(self) -> Path:
        warehouse = str(self.spark.conf.get("spark.sql.warehouse.dir")).removeprefix("file:")
        return Path(warehouse) / f"{self.namespace}.db" / "orders"

    def sql_name(self) -> str:
        return f"spark_catalog.{self.namespace}.orders"

    def change(self, *records: tuple[str, Mapping[str, Any]], first: int) -> None:
        """A JSON change file. `first` is the order of the first change."""
        lines = [json.dumps({"row_kind": kind, "seq": first + n, **row}) for n, (kind, row) in enumerate(records)]
        self.write_text("".join(f"{line}\n" for line in lines))

    def by_name(self) -> list[dict[str, Any]]:
        """The rows that a query by the table's name sees."""
        rows: list[dict[str, Any]] = to_arrow(self.spark.table(self.sql_name())).to_pylist()
        return sorted(rows, key=lambda row: row["id"])


def job_in(spark: SparkSession, folder: Path, **others: Any) -> CatalogJob:
    return CatalogJob(spark, folder, file_format="json", **others)


def row(key: int, region: str | None = "eu", **others: Any) -> Row:
    return {"id": key, "region": region, **others}


def command(job: DeltaJob, name: str, *options: str) -> list[str]:
    """Lines of what a command prints."""
    file = job.folder / "sink.yaml"
    file.write_text(yaml.safe_dump(job.config().model_dump(exclude_none=True)))
    printed = io.StringIO()
    with (
        patch.object(session, "start", lambda _, **how: job.spark),
        patch.object(session, "stop", lambda _: None),
        contextlib.redirect_stdout(printed),
    ):
        assert cli.main([*name.split(), str(file), *options]) == 0, name
    return printed.getvalue().splitlines()


def follow(job: CatalogJob) -> None:
    """Micro-batches, restarts, what others do by the table's name, a RESTORE, and the commands."""
    assert command(job, "status") == [f"{job.target}: does not exist yet; rowdelta run creates it"]
    assert any("will be created" in line for line in command(job, "check"))
    job.change(*(("+I", row(key)) for key in range(6)), first=0)
    job.change(("-D", row(0)), ("+U", row(1, "us")), ("+I", row(6)), first=10)
    job.run()
    assert job.by_name() == job.rows() == [row(1, "us"), *map(row, range(2, 7))]
    assert any("exists" in line for line in command(job, "check"))
    first = job.version()

    job.sql(
        "MERGE INTO {t} t USING (SELECT id, 'merged' AS region FROM VALUES (2L), (3L), (50L) AS s(id)) s "
        "ON t.id = s.id WHEN MATCHED AND t.id = 3 THEN DELETE WHEN MATCHED THEN UPDATE SET region = s.region "
        "WHEN NOT MATCHED THEN INSERT *"
    )
    job.lose_checkpoint()  # a restart on another machine
    job.change(("+U", row(2, "us")), ("-D", row(50)), ("+I", row(3, "again")), first=20)
    job.write_text("no JSON\n")
    job.run()
    expected = [row(1, "us"), row(2, "us"), row(3, "again"), *map(row, range(4, 7))]
    assert job.by_name() == job.rows() == expected
    assert job.check_index() is not None

    _look_back(job, first)
    letters_by_name = f"spark_catalog.{job.namespace}.dead_letters"
    assert [found.value for found in job.spark.table(letters_by_name).collect()] == [b"no JSON"]

    job.sql("ALTER TABLE {t} ADD COLUMN (note STRING)")
    before = job.columns
    job.columns = {**before, "note": "string"}
    job.change(("+U", row(4, "us", note="new")), first=30)
    job.run()
    expected = [{**found, "note": None} for found in expected]
    expected[3] = row(4, "us", note="new")
    assert job.by_name() == job.rows() == expected
    job.columns = before
    _restore(job, first)
    assert [found.value for found in job.spark.table(letters_by_name).collect()] == [b"no JSON"]
    job.check()
    assert job.check_index() is not None


def _restore(job: CatalogJob, first: int) -> None:
    """The new column is gone, and comes back with its first value."""
    job.sql(f"RESTORE TABLE {{t}} TO VERSION AS OF {first}")
    job.run()  # what followed is read from the source again
    regions, notes = {1: "us", 2: "us", 3: "again", 4: "us"}, {4: "new"}
    expected = [row(key, regions.get(key, "eu"), note=notes.get(key)) for key in range(1, 7)]
    assert job.by_name() == job.rows() == expected


def _look_back(job: CatalogJob, first: int) -> None:
    """What the commands show of both versions.

    :param first: the version of the first run.
    """
    status = command(job, "status")
    assert status[0].startswith(f"{job.target}: version {job.version()} of ")
    assert "lag: " in status[2]
    heads = [line for line in command(job, "history", "orders") if not line.startswith(" ")]
    assert sum("by sink shop" in line for line in heads) == 4
    assert any("MERGE" in line for line in heads)
    assert ["2", "us"] in [line.split() for line in command(job, "show", "orders", "--key", "2")]
    of_first = command(job, "show", "orders", "--version", str(first))
    shown = sorted(line.split() for line in of_first if line.split()[0].isdigit())
    assert shown == [["1", "us"], *([str(key), "eu"] for key in range(2, 7))]
    letters = command(job, "dead-letters list")
    assert any("no JSON" in line for line in letters)


def main(folder: Path) -> None:
    job = job_in(None, folder, partition_by=("region",))  # type: ignore[arg-type]
    values = job.config_values()
    values["spark"] = {
        **SETTINGS,
        "spark.sql.catalogImplementation": "hive",
        "spark.sql.warehouse.dir": str(folder / "tables"),
        "spark.hadoop.javax.jdo.option.ConnectionURL": f"jdbc:derby:;databaseName={folder}/metastore;create=true",
    }
    with ivy_to_itself():
        job.spark = session.start(Config.model_validate(values), short=True)
    assert job.spark.conf.get("spark.sql.catalogImplementation") == "hive"
    follow(job)
    session.stop(job.spark)
    print("done")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
