"""rowdelta or `MERGE INTO` in a Spark session of its own, asked by `benchmarks.peers.writers`.

    python -m benchmarks.peers.spark_writer PEER WAREHOUSE WORK

PEER is the number of one in `cases.PEERS`. Both get the same cores and memory, and read the same files by Spark's file
stream. rowdelta runs in the session that `rowdelta run` would start, `MERGE INTO` in that of `benchmarks.streams`. A
micro-batch's seconds are those of its whole trigger.
"""

import argparse
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError
from pyspark.sql import SparkSession

from benchmarks import merge_baseline
from benchmarks.bench import table_columns
from benchmarks.peers.answering import Answer, serve
from benchmarks.peers.cases import BUCKETS, PEERS, Changelog, Peer
from benchmarks.peers.changelogs import COLUMNS, FILES, SPARK_CHANGES, SPARK_SCHEMA
from benchmarks.peers.writers import CORES, DATABASE, MEMORY, RefusedError, location_of
from benchmarks.streams import CATALOG, TimedPipeline, build_session, read_changes, run_available
from benchmarks.workload import publish
from sink.config import Config
from sink.spark import session

_ALL = 1_000


class Sink(Protocol):
    """Writes one table."""

    def load(self, files: list[Path]) -> float: ...

    def apply(self, batches: list[list[Path]]) -> list[float]: ...


class Rowdelta:
    """Our sink, as its configuration's defaults have it."""

    def __init__(self, peer: Peer, changelog: Changelog, warehouse: Path, work: Path, table: str) -> None:
        self._source = work / table / "source"
        partition_by = {"plain": [], "day": ["day"], "bucket": [f"bucket({BUCKETS}, id)"]}[changelog.partitioning]
        catalog = {"type": "delta" if peer.format == "delta" else "hadoop", "warehouse": str(warehouse)}
        properties = {} if peer.format == "delta" else {"format-version": peer.format.removeprefix("v")}
        self._values: dict[str, Any] = {
            "sink": {"id": "peers", "checkpoint": str(work / table / "state"), "on_bad_record": "fail"},
            "source": {"type": "files", "format": "row-kind"},
            "catalogs": {CATALOG: catalog},
            "tables": [
                {
                    "source": str(self._source),
                    "target": f"{CATALOG}.{DATABASE}.{table}",
                    "key": ["id"],
                    "deletes": peer.deletes,
                    "columns": table_columns() | {"day": "date"},
                    "order_by": ["seq"],
                    "partition_by": partition_by,
                    "properties": properties,
                }
            ],
            "spark": {
                "spark.master": f"local[{CORES}]",
                "spark.driver.memory": MEMORY,
                "spark.driver.bindAddress": "127.0.0.1",
                "spark.driver.host": "127.0.0.1",
                "spark.ui.enabled": "false",
            },
        }
        try:
            Config.model_validate(self._values)
        except ValidationError as error:
            raise RefusedError(f"rowdelta refuses it: {error.errors()[0]['msg']}") from error

    def load(self, files: list[Path]) -> float:
        publish(files, self._source)
        return sum(self._run(_ALL))

    def apply(self, batches: list[list[Path]]) -> list[float]:
        for files in batches:
            publish(files, self._source)
        return self._run(FILES)

    def _run(self, files: int) -> list[float]:
        source = self._values["source"] | {"options": {"maxFilesPerTrigger": files}}
        config = Config.model_validate(self._values | {"source": source})
        pipeline = TimedPipeline(session.start(config), config)
        pipeline.run()
        return pipeline.batch_seconds


class Merge:
    """`foreachBatch` + `MERGE INTO`; see `benchmarks.merge_baseline`."""

    def __init__(
        self, spark: SparkSession, peer: Peer, changelog: Changelog, warehouse: Path, work: Path, table: str
    ) -> None:
        self._spark = spark
        self._work = work / table
        if peer.format == "delta":
            self._table = f"delta.`{location_of(warehouse, table)}`"
            partitioned = "PARTITIONED BY (day)" if changelog.partitioning == "day" else ""
            vectors = "true" if peer.deletes == "merge-on-read" else "false"
            properties = f"'delta.enableDeletionVectors' = '{vectors}'"
            spark.sql(
                f"CREATE TABLE {self._table} ({SPARK_SCHEMA}) USING delta {partitioned} TBLPROPERTIES ({properties})"
            )
            return
        self._table = f"{CATALOG}.{DATABASE}.{table}"
        spark.sql(
            iceberg_table(
                self._table,
                changelog,
                merge_baseline.PROPERTIES
                | {"format-version": peer.format.removeprefix("v")}
                | {f"write.{each}.mode": peer.deletes for each in ("merge", "update", "delete")},
            )
        )

    def load(self, files: list[Path]) -> float:
        return merge_baseline.load(self._spark, self._table, files, COLUMNS)

    def apply(self, batches: list[list[Path]]) -> list[float]:
        source = self._work / "source"
        for files in batches:
            publish(files, source)
        stream = read_changes(self._spark, source, FILES, SPARK_CHANGES)
        return run_available(
            stream.writeStream.foreachBatch(
                lambda changes, _: merge_baseline.merge_changes(changes, self._table, COLUMNS)
            ),
            self._work / "state",
        )


def iceberg_table(table: str, changelog: Changelog, properties: dict[str, str]) -> str:
    """The statement that creates it."""
    partitioned = {"plain": "", "day": "PARTITIONED BY (day)", "bucket": f"PARTITIONED BY (bucket({BUCKETS}, id))"}
    rendered = ", ".join(f"'{key}' = '{value}'" for key, value in properties.items())
    return (
        f"CREATE TABLE {table} ({SPARK_SCHEMA}) USING iceberg {partitioned[changelog.partitioning]} "
        f"TBLPROPERTIES ({rendered})"
    )


class Program:
    """Answers what `SparkWriter` asks."""

    def __init__(self, peer: Peer, warehouse: Path, work: Path) -> None:
        self._peer, self._warehouse, self._work = peer, warehouse, work
        self._sink: Sink | None = None
        self._spark: SparkSession | None = None
        if peer.program == "merge":
            self._spark = build_session(warehouse, CORES, MEMORY, with_delta=peer.format == "delta")
            self._spark.sparkContext.setLogLevel("ERROR")

    def open(self, table: str, changelog: dict[str, Any]) -> Answer:
        of = Changelog(**changelog)
        if self._spark is None:
            self._sink = Rowdelta(self._peer, of, self._warehouse, self._work, table)
        else:
            self._sink = Merge(self._spark, self._peer, of, self._warehouse, self._work, table)
        return {}

    def load(self, files: list[str]) -> Answer:
        assert self._sink is not None
        return {"seconds": self._sink.load([Path(file) for file in files])}

    def apply(self, batches: list[list[str]]) -> Answer:
        assert self._sink is not None
        seconds = self._sink.apply([[Path(file) for file in files] for files in batches])
        assert len(seconds) == len(batches), f"{len(seconds)} micro-batches, not {len(batches)}"
        return {"seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.spark_writer")
    parser.add_argument("peer", type=int)
    parser.add_argument("warehouse", type=Path)
    parser.add_argument("work", type=Path)
    options = parser.parse_args()
    program = Program(PEERS[options.peer], options.warehouse, options.work)
    serve({"open": program.open, "load": program.load, "apply": program.apply})


if __name__ == "__main__":
    main()
