"""`python -m benchmarks.verify`: what `rowdelta verify` takes, beside a plain scan of the table and of its source; and
`rowdelta reconcile`, beside one of the source alone.

A Postgres table and an Iceberg table have the same rows. A plain scan reads all columns by Spark, and adds up a hash of
each row; Postgres is read in as many connections as `verify` has. All are done in turns, by one session. For
`reconcile`, every thousandth row has drifted. Postgres and Kafka come as packages, as in `tests/stack`.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

from confluent_kafka import Producer
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from benchmarks.streams import CATALOG
from sink.commands.reconcile import reconcile
from sink.commands.verify import verify, with_drivers
from sink.config import Config
from sink.run.pipeline import Pipeline
from sink.spark import session
from tests.stack.kafka import running_kafka
from tests.stack.postgres import Postgres, running_postgres

COLUMNS = {
    "id": "bigint",
    "customer": "bigint",
    "status": "string",
    "amount": "decimal(12,2)",
    "note": "string",
    "placed": "timestamp",
}
TOPIC, TARGET = "shop.public.orders", f"{CATALOG}.db.orders"
CONNECTIONS = 2
_CREATE = """
CREATE TABLE orders (id bigint PRIMARY KEY, customer bigint, status text, amount numeric(12,2), note text,
  placed timestamptz);
INSERT INTO orders SELECT n, n::bigint * 7919 % 100003, CASE n % 3 WHEN 0 THEN 'new' WHEN 1 THEN 'paid' ELSE 'sent' END,
  (n % 100000) / 100.0, md5(n::text), timestamptz '2026-01-01 00:00:00+00' + n * interval '1 second'
  FROM generate_series(1, {rows}) n;
ANALYZE orders
"""
_DRIFT = """
UPDATE orders SET note = 'drifted ' || {offset} WHERE id % 1000 = {offset} % 1000 AND id <= {rows} / 2;
DELETE FROM orders WHERE id % 1000 = {offset} % 1000 AND id > {rows} / 2
"""


def run(folder: Path, rows: int, turns: int) -> None:
    with running_postgres() as postgres, running_kafka() as kafka:
        postgres.execute(_CREATE.format(rows=rows))
        config = with_drivers(_config(folder, postgres, kafka.bootstrap_servers))
        kafka.create_topic(TOPIC)
        _send(kafka.bootstrap_servers)
        spark = session.start(config)
        spark.sparkContext.setLogLevel("ERROR")
        Pipeline(spark, config).run()
        source = _of_postgres(spark, postgres, rows)
        # the rest comes from another writer: a plain copy takes seconds
        source.where("id > 1").select(*COLUMNS).writeTo(TARGET).append()

        def scan(frame: DataFrame) -> None:
            frame.agg(F.count("*"), F.sum(F.xxhash64(*COLUMNS).cast("decimal(38,0)"))).collect()

        def plainly() -> None:
            scan(source.select(*COLUMNS).unionByName(spark.table(TARGET).select(*COLUMNS)))

        def verified() -> None:
            (outcome,) = verify(spark, config, (), 20, 600)
            assert outcome.error is None, outcome.error
            assert not outcome.differences

        def reconciled() -> None:
            (outcome,) = reconcile(spark, config, (), 20, 600)
            assert outcome.error is None, outcome.error
            assert outcome.is_equal, outcome
            assert outcome.healed == rows // 1000

        print(f"{rows:,} rows, seconds of a plain scan of both, and of verify", flush=True)
        ratios = [_compared(plainly, verified) for _ in range(turns + 1)]
        print(f"verify takes {statistics.median(ratios[1:]):.2f}x as long, when warm (target: at most 2x)")
        print("seconds of a plain scan of the source, and of reconcile", flush=True)
        ratios = []
        for turn in range(turns + 1):
            postgres.execute(_DRIFT.format(rows=rows, offset=1 + turn))
            ratios.append(_compared(lambda: scan(source.select(*COLUMNS)), reconciled))
        print(f"reconcile takes {statistics.median(ratios[1:]):.2f}x as long, when warm (target: at most 1.3x)")


def _compared(plainly: Callable[[], None], work: Callable[[], None]) -> float:
    one, other = _taken(plainly), _taken(work)
    print(f"  {one:6.2f}  {other:6.2f}  {other / one:.2f}x", flush=True)
    return other / one


def _taken(work: Callable[[], None]) -> float:
    started = perf_counter()
    work()
    return perf_counter() - started


def _of_postgres(spark: SparkSession, postgres: Postgres, rows: int) -> DataFrame:
    options = {
        "url": postgres.jdbc_url,
        "user": postgres.user,
        "password": postgres.password,
        "dbtable": "orders",
        "partitionColumn": "id",
        "lowerBound": "1",
        "upperBound": str(rows),
        "numPartitions": str(CONNECTIONS),
        "fetchsize": "10000",
    }
    return spark.read.format("jdbc").options(**options).load()


def _send(servers: str) -> None:
    """The first row, so that the sink creates its table and has a position."""
    row = {"id": 1, "customer": 7919, "status": "paid", "amount": 0.01, "placed": "2026-01-01T00:00:01Z"}
    row["note"] = "c4ca4238a0b923820dcc509a6f75849b"  # md5 of 1
    producer = Producer({"bootstrap.servers": servers})
    producer.produce(TOPIC, key=b'{"id": 1}', value=json.dumps({"before": None, "after": row, "op": "c"}).encode())
    assert producer.flush(60) == 0


def _config(folder: Path, postgres: Postgres, servers: str) -> Config:
    values: dict[str, Any] = {
        "sink": {"id": "bench", "checkpoint": str(folder / "state"), "on_bad_record": "fail"},
        "source": {
            "type": "kafka",
            "format": "debezium-json",
            "options": {"kafka.bootstrap.servers": servers, "startingOffsets": "earliest"},
            "database": {"url": postgres.jdbc_url, "user": postgres.user, "password": postgres.password},
        },
        "catalogs": {CATALOG: {"type": "hadoop", "warehouse": str(folder / "warehouse")}},
        "tables": [{"source": TOPIC, "target": TARGET, "key": ["id"], "columns": COLUMNS}],
        "verify": {"settle": "100 milliseconds"},
        "spark": {
            "spark.master": f"local[{CONNECTIONS}]",
            "spark.driver.memory": "4g",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
            "spark.ui.enabled": "false",
        },
    }
    return Config.model_validate(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=3_000_000)
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rowdelta-verify-") as folder:
        run(Path(folder), args.rows, args.turns)


if __name__ == "__main__":
    main()
