"""`python -m benchmarks.steadiness`: how long the longest micro-batches take, beside the median.

A table is loaded, and then gets micro-batches back to back, so that what one of them has to wait for isn't hidden by
the pause before the next trigger: merges of small files and of runs of the key index, and rewrites beside the stream.
Skewed keys come in small micro-batches, uniform ones in large ones. At the end the table's totals are compared with the
source's. A micro-batch lasts from its beginning to the next one's (`benchmarks.streams.TimedPipeline`).
"""

import argparse
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from benchmarks.bench import table_columns
from benchmarks.pages import p99
from benchmarks.processes import cpu_seconds, tree
from benchmarks.streams import CATALOG, TimedPipeline
from benchmarks.workload import Dataset, Keys, Workload, publish, totals, write_dataset
from sink.config import Config
from sink.spark import session

WARM = 5
"""The first micro-batches don't count: the JVM's compiler is still at work."""


def measure(format_: str, keys: Keys, dataset: Dataset, events: int, folder: Path) -> None:
    """Print one line."""
    source, target = folder / "source", f"{CATALOG}.db.accounts"
    table: dict[str, Any] = {
        "source": str(source),
        "target": target,
        "key": ["id"],
        "columns": table_columns(),
        "order_by": ["seq"],
        "properties": {} if format_ == "delta" else {"format-version": format_.removeprefix("v")},
    }

    def run(files: int) -> tuple[SparkSession, list[float]]:
        config = Config.model_validate(
            {
                "sink": {"id": "bench", "checkpoint": str(folder / "state"), "on_bad_record": "fail"},
                "source": {"type": "files", "format": "row-kind", "options": {"maxFilesPerTrigger": files}},
                "catalogs": {
                    CATALOG: {
                        "type": "delta" if format_ == "delta" else "hadoop",
                        "warehouse": str(folder / "warehouse"),
                    }
                },
                "tables": [table],
                "spark": {
                    "spark.master": "local[2]",
                    "spark.driver.memory": "4g",
                    "spark.driver.bindAddress": "127.0.0.1",
                    "spark.driver.host": "127.0.0.1",
                    "spark.ui.enabled": "false",
                },
            }
        )
        spark = session.start(config)
        pipeline = TimedPipeline(spark, config)
        pipeline.run()
        return spark, pipeline.batch_seconds

    publish(dataset.changes[0], source)
    run(1000)
    for batch in dataset.changes[1 : WARM + 1]:
        publish(batch, source)
    run(2)
    for batch in dataset.changes[WARM + 1 :]:
        publish(batch, source)
    before = cpu_seconds(tree(os.getpid()))
    spark, seconds = run(2)
    cpu = cpu_seconds(tree(os.getpid())) - before
    if format_ == "delta":
        found = spark.read.format("delta").load(str(folder / "warehouse" / "db" / "accounts"))
    else:
        found = spark.table(target)
    assert totals(found) == dataset.totals[-1]
    median, late = statistics.median(seconds), p99(seconds)
    rows = 1.7 * events * len(seconds)  # of the changelog: an update has two
    print(
        f"| {format_} | {keys}, {events:,} events | {median:.2f}, {statistics.fmean(seconds):.2f}, {late:.2f} | "
        f"{statistics.fmean(seconds) / median:.2f}x, {late / median:.2f}x | {cpu / rows * 1e6:.0f} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", choices=("v2", "v3", "delta"), default="v3")
    parser.add_argument("--keys", choices=("zipf", "uniform"), default="zipf")
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--events", type=int, default=10_000)
    parser.add_argument("--batches", type=int, default=100)
    parser.add_argument("--seed", type=int, default=11)
    args = parser.parse_args()
    print("| | changelog | seconds: median, mean, p99 | of the median: mean, p99 | CPU ms per 1,000 rows |")
    with tempfile.TemporaryDirectory(prefix="rowdelta-steadiness-") as folder:
        workload = Workload(rows=args.rows, seed=args.seed, keys=args.keys)
        dataset = write_dataset(workload, Path(folder, "data"), args.batches + WARM, args.events)
        measure(args.format, args.keys, dataset, args.events, Path(folder, "job"))


if __name__ == "__main__":
    main()
