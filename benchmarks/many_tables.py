"""The time of a micro-batch by the number of tables in the job, from a real Kafka broker into real tables.

    python -m benchmarks.many_tables                # 1, 10, 100 and 300 tables, all active; 300 of which 5 are
    python -m benchmarks.many_tables --cases 10:10 100:5 --rows 20 --batches 5
    python -m benchmarks.many_tables --cases 1:1 300:300 --rows 10    # what `make bench` runs, with the targets

A case `300:5` is 300 topics and tables of which 5 get `--rows` changes in each micro-batch. All tables get changes in a
first run, which creates them. The second run is measured: how long the tables take to open, and the median micro-batch
as Spark reports it (`triggerExecution`). What is sent depends on `--seed` only. At the end each table's content is
compared with what was sent.

`--apart` gives each table a Spark job of its own, for comparison.
"""

import argparse
import json
import logging
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from pyspark.sql import SparkSession

from benchmarks.streams import TimedPipeline
from sink.config import Config
from sink.run.pipeline import Pipeline
from sink.spark import session
from sink.table.microbatch import TableSink
from tests.stack.kafka import Kafka, running_kafka

KEYS = 1000
TARGETS = {(1, 1): 300, (300, 300): 8000}
"""Milliseconds of a micro-batch, by tables and active ones, with 10 changes each on two cores."""


@dataclass(frozen=True)
class Case:
    tables: int
    active: int

    @classmethod
    def parse(cls, text: str) -> "Case":
        tables, active = text.split(":")
        return cls(int(tables), int(active))


class Topics:
    """Upserts and deletes of random keys, and the rows that should be left."""

    def __init__(self, kafka: Kafka, case: Case, seed: int) -> None:
        self.prefix = f"c{case.tables}x{case.active}"
        self.names = [f"{self.prefix}.t{number:03d}" for number in range(case.tables)]
        self.content: dict[str, dict[int, int]] = {name: {} for name in self.names}
        self._random = Random(seed)
        self._producer = Producer({"bootstrap.servers": kafka.bootstrap_servers})
        admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
        for future in admin.create_topics([NewTopic(name, num_partitions=1) for name in self.names]).values():
            future.result(120)

    def send(self, active: int, rows: int) -> None:
        """`rows` messages to each of the first `active` topics."""
        for name in self.names[:active]:
            content = self.content[name]
            for _ in range(rows):
                number, value = self._random.randrange(KEYS), self._random.randrange(10**9)
                kind = "+U"
                if number in content and self._random.random() < 0.2:
                    kind, value = "-D", content.pop(number)
                else:
                    content[number] = value
                message = {"row_kind": kind, "id": number, "value": value, "note": f"row {number} of {name}"}
                self._producer.produce(name, value=json.dumps(message).encode())
                self._producer.poll(0)
        if self._producer.flush(120):
            raise RuntimeError("Kafka did not take the messages")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=Case.parse, nargs="+", metavar="TABLES:ACTIVE",
                        default=[Case(1, 1), Case(10, 10), Case(100, 100), Case(300, 300), Case(300, 5)])  # fmt: skip
    parser.add_argument(
        "--rows", type=int, default=20, help="changes for each active table and micro-batch (default: 20)"
    )
    parser.add_argument("--batches", type=int, default=5, help="measured micro-batches (default: 5)")
    parser.add_argument("--threads", type=int, help="sink.parallel_tables (default: the sink's)")
    parser.add_argument("--deletes", choices=["position", "equality"], default="position")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--apart", action="store_true", help="a Spark job for each table")
    args = parser.parse_args()
    logging.basicConfig(level=logging.ERROR, format="%(asctime)s %(message)s", stream=sys.stderr)
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    if args.apart:
        TableSink.share = lambda self, batch: None  # type: ignore[method-assign]
    folder = Path(tempfile.mkdtemp(prefix="rowdelta-many-"))
    try:
        with running_kafka() as kafka:
            print(
                "| tables | active | open, s | first micro-batch, ms | micro-batch, ms | target, ms "
                "| for each active table, ms |"
            )
            print("|---:|---:|---:|---:|---:|---:|---:|", flush=True)
            for case in args.cases:
                _measure(kafka, folder, case, args)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _measure(kafka: Kafka, folder: Path, case: Case, args: argparse.Namespace) -> None:
    topics = Topics(kafka, case, args.seed)
    config = _config(kafka, folder, topics, case.active * args.rows, args)
    # the same session for all cases
    spark = session.start(config)
    topics.send(case.tables, args.rows)
    Pipeline(spark, _config(kafka, folder, topics, case.tables * args.rows, args)).run()
    topics.send(case.active, args.rows * args.batches)
    started = time.monotonic()
    pipeline = TimedPipeline(spark, config)
    opened = time.monotonic() - started
    pipeline.run()
    first, *rest = [round(seconds * 1000) for seconds in pipeline.batch_seconds]
    median = statistics.median(rest or [first])
    target = TARGETS.get((case.tables, case.active), "")
    print(
        f"| {case.tables} | {case.active} | {opened:.1f} | {first} | {median:.0f} | {target} "
        f"| {median / case.active:.0f} |",
        flush=True,
    )
    for name in topics.names:
        _compare(spark, name, topics)


def _compare(spark: SparkSession, name: str, topics: Topics) -> None:
    found = {row.id: row.value for row in spark.table(f"lake.{name}").collect()}
    if found != topics.content[name]:
        raise SystemExit(f"{name}: the table differs from what was sent")


def _config(kafka: Kafka, folder: Path, topics: Topics, rows: int, args: argparse.Namespace) -> Config:
    return Config.model_validate(
        {
            "sink": {
                "id": "bench",
                "checkpoint": str(folder / "state" / topics.prefix),
                "on_bad_record": "fail",
                "parallel_tables": args.threads,
            },
            "source": {
                "type": "kafka",
                "format": "row-kind",
                "options": {"kafka.bootstrap.servers": kafka.bootstrap_servers, "maxOffsetsPerTrigger": rows},
            },
            "catalogs": {"lake": {"type": "hadoop", "warehouse": str(folder / "warehouse")}},
            "tables": [
                {
                    "source": rf"({topics.prefix})\.(.*)",
                    "target": "lake.$1.$2",
                    "key": ["id"],
                    "columns": {"id": "bigint", "value": "bigint", "note": "string"},
                    "deletes": args.deletes,
                }
            ],
            "spark": {
                "spark.driver.memory": "4g",
                "spark.driver.bindAddress": "127.0.0.1",
                "spark.driver.host": "127.0.0.1",
                "spark.ui.enabled": "false",
            },
        }
    )


if __name__ == "__main__":
    main()
