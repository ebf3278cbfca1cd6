"""`python -m benchmarks.load`: how fast rows of a Postgres table are read and decoded, beside Spark's own JDBC source.

Each reads the same table in the same parts, one task and one connection a part. The rows go nowhere (`noop`): so this
is what a load takes before it writes. `in the task` is what a load does that writes where it decodes: no row leaves
Python. Postgres comes as a package, as in `tests/stack`, and has the same cores.
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from benchmarks.processes import cpu_seconds, tree
from sink.commands.verify import with_drivers
from sink.config import Config, DatabaseSection
from sink.databases.postgres import Postgres as PostgresReader
from sink.databases.rows import TableRows
from sink.spark import session
from sink.table.patterns import ResolvedTable
from sink.table.plan import plan_table
from sink.targets.catalogs import Catalogs
from tests.stack.postgres import Postgres, running_postgres

COLUMNS = {
    "id": "bigint",
    "customer": "bigint",
    "status": "string",
    "amount": "decimal(12,2)",
    "note": "string",
    "placed": "timestamp",
    "changed": "timestamp_ntz",
    "paid": "boolean",
}
_CREATE = """
CREATE TABLE orders (id bigint PRIMARY KEY, customer bigint, status text, amount numeric(12,2), note text,
  placed timestamptz, changed timestamp, paid boolean);
INSERT INTO orders SELECT n, n::bigint * 7919 % 100003, CASE n % 3 WHEN 0 THEN 'new' WHEN 1 THEN 'paid' ELSE 'sent' END,
  (n % 100000) / 100.0, md5(n::text), timestamptz '2026-01-01 00:00:00+00' + n * interval '1 second',
  timestamp '2026-01-01 00:00:00' + n * interval '1 millisecond', n % 2 = 0 FROM generate_series(1, {rows}) n;
VACUUM ANALYZE orders
"""


def run(folder: Path, rows: int, turns: int) -> None:
    with running_postgres() as postgres:
        postgres.execute(_CREATE.format(rows=rows))
        config = with_drivers(_config(folder, postgres))
        spark = session.start(config)
        spark.sparkContext.setLogLevel("ERROR")
        database = config.source.database
        assert database is not None
        plan = plan_table(Catalogs(spark, config), config, ResolvedTable(config.tables[0], "tables[0]"), None)
        source = TableRows(spark, config, database, "public.orders", config.tables[0])
        print(f"{rows:,} rows of 8 columns; rows a second, and rows a second of CPU time (medians of {turns})")
        for connections in (1, 2):
            parts = source.ranges(-(-rows // connections))
            read = source.of(parts, {})
            ways: Mapping[str, Callable[[], DataFrame]] = {
                "rowdelta": partial(read.changes, plan),
                "rowdelta, in the task": partial(read.changes_into, plan, None, _counted, "rows bigint"),
                "Spark's JDBC source": partial(_jdbc, spark, database, parts),
            }
            taken = {name: [_taken(way) for _ in range(turns + 1)][1:] for name, way in ways.items()}
            for name, turns_taken in taken.items():
                rates = [rows / statistics.median(seconds) for seconds in zip(*turns_taken, strict=True)]
                print(f"  {connections} connections  {name:22} {rates[0]:10,.0f} {rates[1]:10,.0f}", flush=True)
        source.close()
        spark.stop()


def _counted(changes: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield pa.record_batch({"rows": [sum(batch.num_rows for batch in changes)]})


def _taken(way: Callable[[], DataFrame]) -> tuple[float, float]:
    """Seconds, and those of all CPUs: of Python, the JVM and the server."""
    begin, cpu = perf_counter(), cpu_seconds(tree(os.getpid()))
    way().write.format("noop").mode("overwrite").save()
    return perf_counter() - begin, cpu_seconds(tree(os.getpid())) - cpu


def _jdbc(spark: SparkSession, database: DatabaseSection, parts: Sequence[str]) -> DataFrame:
    given = {"user": str(database.user), "password": str(database.password), "driver": PostgresReader.driver}
    return spark.read.jdbc(database.url, "orders", predicates=list(parts), properties=given | {"fetchsize": "10000"})


def _config(folder: Path, postgres: Postgres) -> Config:
    return Config.model_validate(
        {
            "sink": {"id": "bench", "checkpoint": str(folder / "state")},
            "source": {
                "type": "kafka",
                "format": "debezium-json",
                "options": {"kafka.bootstrap.servers": "nowhere:9092"},
                "database": {"url": postgres.jdbc_url, "user": postgres.user, "password": postgres.password},
            },
            "catalogs": {"lake": {"type": "hadoop", "warehouse": str(folder / "warehouse")}},
            "tables": [{"source": "shop.public.orders", "target": "lake.db.orders", "key": ["id"], "columns": COLUMNS}],
            "spark": {"spark.master": "local[2]", "spark.driver.memory": "2g", "spark.ui.enabled": "false"},
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rowdelta-load-") as folder:
        run(Path(folder), args.rows, args.turns)


if __name__ == "__main__":
    main()
