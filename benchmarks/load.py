"""`python -m benchmarks.load`: how fast rows of a table of Postgres, or of MariaDB (`--database mariadb`), are read and
decoded, beside Spark's own JDBC source.

Each reads the same table in the same parts, one task and one connection a part. The rows go nowhere (`noop`): so this
is what a load takes before it writes. `in the task` is what a load does that writes where it decodes: no row leaves
Python. The server comes as a package, as in `tests/stack`, and has the same cores.
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from time import perf_counter

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from benchmarks.processes import cpu_seconds, tree
from sink.commands.verify import with_drivers
from sink.config import Config, DatabaseSection
from sink.databases.kinds import database_of
from sink.databases.rows import TableRows
from sink.spark import session
from sink.table.patterns import ResolvedTable
from sink.table.plan import plan_table
from sink.targets.catalogs import Catalogs
from tests.stack.mariadb import MariaDB, running_mariadb
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
_CREATE_POSTGRES = """
CREATE TABLE orders (id bigint PRIMARY KEY, customer bigint, status text, amount numeric(12,2), note text,
  placed timestamptz, changed timestamp, paid boolean);
INSERT INTO orders SELECT n, n::bigint * 7919 % 100003, CASE n % 3 WHEN 0 THEN 'new' WHEN 1 THEN 'paid' ELSE 'sent' END,
  (n % 100000) / 100.0, md5(n::text), timestamptz '2026-01-01 00:00:00+00' + n * interval '1 second',
  timestamp '2026-01-01 00:00:00' + n * interval '1 millisecond', n % 2 = 0 FROM generate_series(1, {rows}) n;
VACUUM ANALYZE orders
"""
_CREATE_MARIADB = """
CREATE TABLE orders (id bigint PRIMARY KEY, customer bigint, status varchar(10), amount numeric(12,2), note text,
  placed timestamp(6), changed datetime(3), paid boolean);
INSERT INTO orders SELECT seq, seq * 7919 % 100003, CASE seq % 3 WHEN 0 THEN 'new' WHEN 1 THEN 'paid' ELSE 'sent' END,
  seq % 100000 / 100.0, md5(seq), timestamp '2026-01-01 00:00:00' + INTERVAL seq SECOND,
  timestamp '2026-01-01 00:00:00' + INTERVAL seq * 1000 MICROSECOND, seq % 2 = 0 FROM seq_1_to_{rows};
ANALYZE TABLE orders
"""


def run(folder: Path, kind: str, rows: int, turns: int) -> None:
    running: AbstractContextManager[Postgres | MariaDB] = running_mariadb() if kind == "mariadb" else running_postgres()
    with running as server:
        create = _CREATE_MARIADB if kind == "mariadb" else _CREATE_POSTGRES
        server.execute(create.format(rows=rows))
        config = with_drivers(_config(folder, server))
        spark = session.start(config)
        spark.sparkContext.setLogLevel("ERROR")
        database = config.source.database
        assert database is not None
        plan = plan_table(Catalogs(spark, config), config, ResolvedTable(config.tables[0], "tables[0]"), None)
        source = TableRows(spark, config, database, config.tables[0].source.partition(".")[2], config.tables[0])
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
    given = {"user": str(database.user), "password": str(database.password), "driver": database_of(database.url).driver}
    given["sessionVariables"] = "sql_mode=ANSI_QUOTES"  # MariaDB's: Spark quotes names as the standard does
    return spark.read.jdbc(database.url, "orders", predicates=list(parts), properties=given | {"fetchsize": "10000"})


def _config(folder: Path, server: Postgres | MariaDB) -> Config:
    schema = "public" if isinstance(server, Postgres) else server.database
    return Config.model_validate(
        {
            "sink": {"id": "bench", "checkpoint": str(folder / "state")},
            "source": {
                "type": "kafka",
                "format": "debezium-json",
                "options": {"kafka.bootstrap.servers": "nowhere:9092"},
                "database": {"url": server.jdbc_url, "user": server.user, "password": server.password},
            },
            "catalogs": {"lake": {"type": "hadoop", "warehouse": str(folder / "warehouse")}},
            "tables": [
                {"source": f"shop.{schema}.orders", "target": "lake.db.orders", "key": ["id"], "columns": COLUMNS}
            ],
            "spark": {"spark.master": "local[2]", "spark.driver.memory": "2g", "spark.ui.enabled": "false"},
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--database", choices=["postgres", "mariadb"], default="postgres")
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rowdelta-load-") as folder:
        run(Path(folder), args.database, args.rows, args.turns)


if __name__ == "__main__":
    main()
