"""Engines other than Spark read tables: PyIceberg, polars, DuckDB, ClickHouse (as chdb) and Daft. The rows must be
equal to the source. docs/deletes.md has a table of what each engine can't read, and these tests check it.
"""

import contextlib
import importlib
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import chdb
import daft
import duckdb
import polars as pl
import pyarrow as pa
import pytest
from pyiceberg.table import StaticTable
from pyspark.sql import SparkSession

from benchmarks.workload import TABLE_SCHEMA, Workload
from tests.sink import test_defaults as defaults
from tests.sink.harness import Job

pytestmark = pytest.mark.spark

DELETES = Path(__file__).parents[2] / "docs" / "deletes.md"
COLUMNS = {
    "id": "bigint",
    "region": "string",
    "balance": "decimal(12,2)",
    "name": "string",
    "note": "string",
    "updated_at": "timestamp",
    "version": "bigint",
}
NO_EQUALITY = "PyIceberg does not yet support equality deletes"
REFUSALS = {
    ("PyIceberg", "equality"): NO_EQUALITY,
    ("polars", "equality"): NO_EQUALITY,
    ("Daft", "equality"): NO_EQUALITY,
    ("Daft", "3"): "Unable to parse parquet metadata for file .*deletes.puffin",
    ("ClickHouse", "3"): "Position deletes are supported only for parquet format",
}
"""The error of a reader that can't read equality deletes, or the format version."""


def by_pyiceberg(metadata: Path) -> pa.Table:
    return StaticTable.from_metadata(str(metadata)).scan().to_arrow()


def by_polars(metadata: Path) -> pa.Table:
    return pl.scan_iceberg(str(metadata)).collect().to_arrow()


def by_duckdb(metadata: Path) -> pa.Table:
    """Its extensions are packages: nothing is downloaded."""
    connection = duckdb.connect(config={"autoinstall_known_extensions": False, "autoload_known_extensions": False})
    for name in ("avro", "iceberg"):
        package = importlib.import_module(f"duckdb_extension_{name}")
        (extension,) = Path(str(package.__file__)).parent.rglob("*.duckdb_extension")
        connection.execute(f"LOAD '{extension}'")
    connection.execute("SET TimeZone = 'UTC'")
    return connection.execute("SELECT * FROM iceberg_scan(?)", [str(metadata)]).to_arrow_table()


def by_clickhouse(metadata: Path) -> pa.Table:
    """It reads files below the current directory only."""
    query = f"SELECT * FROM icebergLocal('{metadata.parents[1]}/')"
    with contextlib.chdir("/"):
        result: Any = chdb.query(query, "Arrow")  # type: ignore[no-untyped-call]
    return pa.ipc.open_file(pa.BufferReader(result.bytes())).read_all()


def by_daft(metadata: Path) -> pa.Table:
    return daft.read_iceberg(StaticTable.from_metadata(str(metadata))).to_arrow()


READERS: dict[str, Callable[[Path], pa.Table]] = {
    "PyIceberg": by_pyiceberg,
    "polars": by_polars,
    "DuckDB": by_duckdb,
    "ClickHouse": by_clickhouse,
    "Daft": by_daft,
}


@cache
def documented() -> dict[str, dict[str, str]]:
    """Engine -> what is read (`equality`, `2`, `3`) -> yes or no, by the documents."""
    rows = re.findall(r"^\| (\w+)[^|]*\| (\w+)[^|]*\| (\w+)[^|]*\| (\w+)", DELETES.read_text("utf-8"), re.MULTILINE)
    return {name: {"equality": equality, "2": v2, "3": v3} for name, equality, v2, v3 in rows}


@contextlib.contextmanager
def refused(message: str) -> Iterator[None]:
    """Whatever kind of exception the engine has for it."""
    with pytest.raises(Exception, match=message):
        yield


@pytest.mark.parametrize(
    ("version", "partition_by", "deletes"),
    [
        ("2", [], "position"),
        ("2", ["bucket(4, id)"], "position"),
        ("3", [], "position"),
        ("3", ["bucket(4, id)"], "position"),
        ("2", [], "equality"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # theirs
def test_other_engines_read_the_source(
    spark: SparkSession, tmp_path: Path, version: str, partition_by: list[str], deletes: str
) -> None:
    """After 20 micro-batches, and the minor compactions that belong to them."""
    properties = {"format-version": version}
    job = Job(
        spark, tmp_path, columns=COLUMNS, partition_by=partition_by, properties=properties, table={"deletes": deletes}
    )
    workload = Workload(rows=400)
    for changes in workload.initial():
        job.write_table(changes)
    for _ in range(20):
        job.write_table(workload.batch(40))
    job.run()
    summaries = [snapshot["summary"] for snapshot in job.snapshots()]
    merges = sum("rowdelta.minor-compaction" in summary for summary in summaries)
    assert len(summaries) - merges == 21
    assert (merges > 0) == (deletes == "position")

    expected = workload.expected_table()
    metadata = _latest_metadata(job)
    for name, read in READERS.items():
        kind = "equality" if deletes == "equality" else version
        if documented()[name][kind] == "no":
            with refused(REFUSALS[name, kind]):
                read(metadata)
        else:
            assert _as_source(read(metadata)).equals(expected), f"{name} reads other rows"


def _latest_metadata(job: Job) -> Path:
    """Of a hadoop catalog's table: the highest version."""
    versions = (job.table_folder / "metadata").glob("v*.metadata.json")
    return max(versions, key=lambda path: int(path.name[1:].split(".")[0]))


def _as_source(rows: pa.Table) -> pa.Table:
    return rows.select(TABLE_SCHEMA.names).cast(TABLE_SCHEMA).sort_by("id").combine_chunks()


def test_a_small_vector_beside_a_large_one(spark: SparkSession, tmp_path: Path) -> None:
    """DuckDB's file cache gives the second one the positions of the first, if these come in this order."""
    columns = {"id": "bigint", "region": "string"}
    properties = {"format-version": "3"}
    job = Job(spark, tmp_path, columns=columns, properties=properties, tasks=1, table={"merge_small_files": False})
    regions = dict.fromkeys(range(3000), "first")
    job.write([("+I", {"id": key, "region": region}) for key, region in regions.items()])
    for name, keys in (("second", range(0, 2000, 2)), ("third", range(0, 40, 3))):
        changed = dict.fromkeys(keys, name)
        job.write([("+U", {"id": key, "region": region}) for key, region in changed.items()])
        regions |= changed
    job.run()
    sizes = [row[0] for row in spark.sql(f"SELECT content_size_in_bytes FROM {job.target}.delete_files").collect()]
    assert max(sizes) > 10 * min(sizes)
    for read in (by_duckdb, by_pyiceberg):
        rows = read(_latest_metadata(job)).to_pydict()
        assert dict(zip(rows["id"], rows["region"], strict=True)) == regions
        assert len(rows["id"]) == len(regions)


def test_columns_with_defaults(spark: SparkSession, tmp_path: Path) -> None:
    job = defaults.new_job(spark, tmp_path, 3)
    job.write_text(defaults.old(1, 1))
    job.run()
    job.write_text(defaults.event({"id": 2, "name": "x"} | defaults.LATER, 20, is_new=True))
    job.run()
    metadata = Path(str(job.java_table().operations().current().metadataFileLocation()).removeprefix("file:"))
    rows = by_duckdb(metadata).to_pylist()
    assert {row["id"]: (row["c1"], row["state"]) for row in rows} == {1: (11, "new"), 2: (1, None)}
    assert {row["id"]: row for row in rows} == {row["id"]: row for row in by_pyiceberg(metadata).to_pylist()}
