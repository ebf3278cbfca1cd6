"""A micro-batch larger than memory: small executors, one huge commit, bounded Python workers.

Runs `rowdelta` on two executor processes (Spark's local-cluster) of little memory each, with the whole workload as one
micro-batch, and prints the sink's own log lines, which show the peak memory of the Python workers. Spark spills its
shuffle; the delta writers write whenever their buffer is full, and keep no more than the key map.
"""

import argparse
import logging
import shutil
import sys
import tempfile
from pathlib import Path

import pyarrow.parquet as pq

from benchmarks.bench import table_columns
from benchmarks.workload import Workload, checksum, write_dataset
from sink.config import Config
from sink.run.pipeline import Pipeline
from sink.spark import session


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000, help="inserts, then as many changes again")
    parser.add_argument("--executor-memory", type=int, default=512, help="MB of JVM heap of each of two executors")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    logging.getLogger("py4j").setLevel(logging.WARNING)
    folder = Path(tempfile.mkdtemp(prefix="rowdelta-memory-"))
    try:
        dataset = write_dataset(
            Workload(args.rows, seed=1), folder / "data", 1, args.rows // 2, files_per_batch=8, expected_after=[1]
        )
        source = folder / "source"
        source.mkdir()
        arrow_bytes = 0
        for files in dataset.changes:
            for file in files:
                arrow_bytes += pq.read_table(file).nbytes
                file.rename(source / file.name)
        print(f"one micro-batch of {arrow_bytes / 1e9:.1f} GB, two executors of {args.executor_memory} MB", flush=True)
        config = Config.model_validate(_settings(folder, source, args.executor_memory))
        spark = session.start(config)
        Pipeline(spark, config).run()
        found = checksum(spark.table("lake.db.accounts"))
        assert found == checksum(spark.read.parquet(str(dataset.expected[1]))), "content differs from the source"
        print("content equals the source's")
        spark.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _settings(folder: Path, source: Path, executor_memory: int) -> dict[str, object]:
    return {
        "sink": {"id": "memory", "checkpoint": str(folder / "state"), "on_bad_record": "fail"},
        "source": {"type": "files", "format": "row-kind"},
        "catalogs": {"lake": {"type": "hadoop", "warehouse": str(folder / "warehouse")}},
        "tables": [
            {
                "source": str(source),
                "target": "lake.db.accounts",
                "key": ["id"],
                "columns": table_columns(),
                "order_by": ["seq"],
            }
        ],
        "spark": {
            "spark.master": f"local-cluster[2,1,{executor_memory}]",
            "spark.executor.memory": f"{executor_memory}m",
            "spark.driver.memory": "1g",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.ui.enabled": False,
            "spark.sql.shuffle.partitions": 4,
        },
    }


if __name__ == "__main__":
    main()
