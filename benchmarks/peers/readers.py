"""The process that reads all tables, by Spark and DuckDB: one for all peers, so each finds the same readers, warm.

    python -m benchmarks.peers.readers WAREHOUSE

A scan adds up one column, counts, and takes a maximum. A point look-up reads all columns of one key. Each query is run
several times. The first run of a scan finds nothing of this snapshot in a cache, so it is kept apart.
"""

import argparse
import importlib
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import partial
from pathlib import Path
from threading import Timer
from time import perf_counter
from typing import Any

import duckdb
from pyspark.sql import DataFrame, SparkSession

from benchmarks import merge_baseline
from benchmarks.peers.answering import Answer, serve
from benchmarks.peers.cases import Changelog
from benchmarks.peers.changelogs import COLUMNS
from benchmarks.peers.spark_writer import iceberg_table
from benchmarks.peers.writers import CORES, DATABASE, MEMORY, location_of
from benchmarks.streams import CATALOG, build_session
from benchmarks.workload import Totals, checksum, totals

_SCAN = "SELECT count(*), sum(balance), max(version) FROM {}"
_POINT = "SELECT * FROM {} WHERE id = {}"
_ENOUGH_SECONDS = 20
"""After so many seconds a query isn't run again."""
_MOST_SECONDS = 120
"""After so many, DuckDB is interrupted: with equality deletes by the million its scan takes hours."""


class Readers:
    """Answers what `benchmarks.peers.measure` asks."""

    def __init__(self, warehouse: Path) -> None:
        self._warehouse = warehouse
        self._spark: SparkSession = build_session(warehouse, CORES, MEMORY, with_delta=True)
        self._spark.sparkContext.setLogLevel("ERROR")

    def create(self, table: str, changelog: dict[str, Any], version: str, files: list[str]) -> Answer:
        """An Iceberg table with its first load, for who doesn't load it himself."""
        name = f"{CATALOG}.{DATABASE}.{table}"
        self._spark.sql(iceberg_table(name, Changelog(**changelog), {"format-version": version}))
        seconds = merge_baseline.load(self._spark, name, [Path(file) for file in files], COLUMNS)
        return {"seconds": seconds, "location": str(location_of(self._warehouse, table))}

    def by_spark(self, table: str, kind: str, ids: list[int], scans: int) -> Answer:
        taken, found = _timed(lambda: totals(self._frame(table, kind)), scans)
        points = []
        for key in ids:
            seconds, rows = _timed(partial(self._point, table, kind, key), 1)
            assert len(rows) == 1, f"key {key} has {len(rows)} rows"
            points += seconds
        return {"scans": taken, "points": points, "totals": _plain(found)}

    def by_duckdb(self, table: str, kind: str, ids: list[int], scans: int) -> Answer:
        with connect_duckdb(kind) as connection:
            location = location_of(self._warehouse, table)
            source = f"delta_scan('{location}')" if kind == "delta" else f"iceberg_scan('{newest_metadata(location)}')"
            interrupt = Timer(_MOST_SECONDS, connection.interrupt)
            interrupt.start()
            try:
                taken, [row] = _timed(partial(_rows, connection, _SCAN.format(source)), scans)
            except duckdb.InterruptException:
                return {"slow": _MOST_SECONDS}
            finally:
                interrupt.cancel()
            points = []
            for key in ids:
                query = _POINT.format(source, key)
                seconds, rows = _timed(partial(_rows, connection, query), 1)
                assert len(rows) == 1, f"key {key} has {len(rows)} rows"
                points += seconds
        return {"scans": taken, "points": points, "totals": _plain(Totals(row[0], row[1] or Decimal(0), row[2] or 0))}

    def compare(self, table: str, kind: str, expected: str) -> Answer:
        """Whether all rows are those of a file."""
        return {"equal": checksum(self._frame(table, kind)) == checksum(self._spark.read.parquet(expected))}

    def _point(self, table: str, kind: str, key: int) -> list[Any]:
        return self._frame(table, kind).where(f"id = {key}").collect()

    def _frame(self, table: str, kind: str) -> DataFrame:
        if kind == "delta":
            return self._spark.read.format("delta").load(str(location_of(self._warehouse, table)))
        return self._spark.table(f"{CATALOG}.{DATABASE}.{table}")


def newest_metadata(location: Path) -> Path:
    """The metadata file of an Iceberg table of a hadoop catalog."""
    versions = (location / "metadata").glob("v*.metadata.json")
    return max(versions, key=lambda path: int(path.name.split(".")[0][1:]))


def connect_duckdb(kind: str) -> duckdb.DuckDBPyConnection:
    """Its extensions are packages: nothing is downloaded."""
    settings: dict[str, str | bool | int | float | list[str]] = {
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
        "threads": CORES,
    }
    connection = duckdb.connect(config=settings)
    for name in ("delta",) if kind == "delta" else ("avro", "iceberg"):
        package = importlib.import_module(f"duckdb_extension_{name}")
        (extension,) = Path(str(package.__file__)).parent.rglob("*.duckdb_extension")
        connection.execute(f"LOAD '{extension}'")
    return connection


def _rows(connection: duckdb.DuckDBPyConnection, query: str) -> list[Any]:
    return connection.execute(query).fetchall()


def _timed(query: Callable[[], Any], times: int) -> tuple[list[float], Any]:
    """The seconds of each run, and the last result."""
    taken: list[float] = []
    result = None
    while len(taken) < times and sum(taken) < _ENOUGH_SECONDS:
        started = perf_counter()
        result = query()
        taken.append(perf_counter() - started)
    return taken, result


def _plain(found: Totals) -> Sequence[str]:
    return [str(found.count), str(found.balance), str(found.version)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.readers")
    parser.add_argument("warehouse", type=Path)
    readers = Readers(parser.parse_args().warehouse)
    serve(
        {
            "create": readers.create,
            "spark": readers.by_spark,
            "duckdb": readers.by_duckdb,
            "compare": readers.compare,
        }
    )


if __name__ == "__main__":
    main()
