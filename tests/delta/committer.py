"""A process of its own that commits to a Delta table, in rounds, at the same moment as others that do the same:

    python -m tests.delta.committer <table> <folder to meet in> <name>

Its session has no catalog of Delta. It prints the outcome of each round as a line of JSON.
"""

import json
import sys
import time
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql.types import LongType, StructField, StructType

from sink.targets.delta.actions import Proposal
from sink.targets.delta.commands import create
from sink.targets.delta.log import CommitRefusedError, DeltaLog
from tests.stack.jars import delta_jars

ROUNDS = ("txn", "domain", "add") * 4
PROCESSES = 2


def session() -> SparkSession:
    settings = {
        "spark.master": "local[1]",
        "spark.driver.extraClassPath": ":".join(map(str, delta_jars())),
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        # the session's catalog may be another one, Iceberg's for instance; Delta has to be told that it is meant so
        "spark.databricks.delta.requiredSparkConfsCheck.enabled": "false",
        "spark.databricks.delta.snapshotPartitions": "1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.sql.shuffle.partitions": "1",
        "spark.ui.enabled": "false",
    }
    builder = SparkSession.builder
    for name, value in settings.items():
        builder = builder.config(name, value)
    started = builder.getOrCreate()
    started.sparkContext.setLogLevel("ERROR")
    return started


def meet(folder: Path, name: str, place: str) -> None:
    """Wait until all processes are here."""
    (folder / f"{place}-{name}").touch()
    while len(list(folder.glob(f"{place}-*"))) < PROCESSES:
        time.sleep(0.001)


def main(path: str, folder: Path, name: str) -> None:
    log = DeltaLog(session(), path)
    meet(folder, name, "create")
    schema = StructType([StructField("id", LongType())])
    created = create(log, schema, (), {"delta.feature.domainMetadata": "supported"})
    print(json.dumps({"created": created, "table": log.refresh().metadata.table_id}), flush=True)
    for number, kind in enumerate(ROUNDS):
        actions = {
            # nothing but the action can be in the way of the other process
            "txn": {"txn": {"appId": "app", "version": number, "lastUpdated": 1}},
            "domain": {"domainMetadata": {"domain": "rowdelta.x", "configuration": name, "removed": False}},
            "add": {
                "add": {
                    "path": f"{name}-{number}.parquet",
                    "partitionValues": {},
                    "size": 1,
                    "modificationTime": 1,
                    "dataChange": True,
                    "stats": '{"numRecords": 1}',
                }
            },
        }
        meet(folder, name, f"before-{number}")
        base = log.refresh().version
        meet(folder, name, f"round-{number}")
        try:
            outcome = str(
                log.commit(
                    Proposal(
                        [actions[kind]],
                        base_version=base,
                        live={},
                        app_id="app" if kind == "txn" else name,
                        operation=f"{name}-{number}",
                    )
                )
            )
        except CommitRefusedError as error:
            outcome = error.conflict
        print(json.dumps({"round": number, "kind": kind, "base": base, "outcome": outcome}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
