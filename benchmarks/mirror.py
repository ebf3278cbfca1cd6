"""`python -m benchmarks.mirror`: a Postgres table reaches an Iceberg table, by Debezium's own engine (`source: {type:
debezium}`), or by Kafka Connect and Kafka.

Each way has a server, a JVM for Debezium and one for Spark on the same cores, and does the same three things in turn:

- *alone*: changes are made, and nobody applies them. It ends when all are in the buffer, or in the topic.
- *to the table*: the same while the sink runs with a trigger of one second. It ends when all are in the table.
- *freshness*: so many changes a second, in transactions of 10, half of them updates. A change has the server's time in
  its row. Its age is that of the first snapshot which has it, or a later change: one connection makes all of them.

Postgres, Kafka and Connect come as packages, as in `tests/stack`.
"""

import argparse
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
from pyspark.sql import SparkSession

from benchmarks.streams import CATALOG
from sink.config import Config
from sink.run.pipeline import Pipeline
from sink.sources.buffer import topics_source
from sink.sources.engine import Engine
from sink.spark import session
from tests.stack.connect import Connect, json_converter, postgres_connector
from tests.stack.kafka import running_kafka
from tests.stack.postgres import Postgres, running_postgres
from tests.stack.process import running

TOPIC, TARGET = "shop.public.orders", f"{CATALOG}.db.orders"
_CREATE = "CREATE TABLE orders (id bigint PRIMARY KEY, amount numeric(12,2), note text, sent timestamptz)"
_MANY = """
INSERT INTO orders SELECT n, n / 7.0, md5(n::text), clock_timestamp() FROM generate_series({begin}, {end} - 1) n
"""
_A_FEW = """
INSERT INTO orders SELECT n, n / 7.0, md5(n::text), clock_timestamp() FROM generate_series({begin}, {end} - 1) n
ON CONFLICT (id) DO UPDATE SET note = md5(random()::text), sent = clock_timestamp()
"""
_TRANSACTION = 10
_OF_CONNECT = ("tasks.", "topic.creation.", "offset.")
"""How properties begin that Connect alone has."""
_POLL_SECONDS = 0.2


class Way:
    """One way of changes into the lake. Its connector reads the log, without a snapshot, when it is measured."""

    def __init__(self, spark: SparkSession, config: Config, postgres: Postgres) -> None:
        self.config = config
        self._spark = spark
        self._postgres = postgres

    def measure(self, changes: int, rate: int, seconds: int, end_alone: Callable[[], None]) -> None:
        """:param end_alone: is called before the sink runs."""
        self._insert(0, 1000)  # the first events compile much
        self._wait(lambda: self._arrived() >= 1000)
        alone = self._taken(1000, changes, self._arrived)
        print(f"  alone         {changes / alone:10,.0f} events/s", flush=True)
        end_alone()
        with self._running():
            whole = changes + 1000
            self._wait(lambda: self._visible() >= whole)
            through = self._taken(whole, changes, self._visible)
            print(f"  to the table  {changes / through:10,.0f} events/s", flush=True)
            self._change(whole + changes, rate, seconds)
            self._wait(lambda: self._newest() >= self._newest_sent())
        ages = sorted(self._ages(seconds))
        shown = ", ".join(f"p{percent} {ages[len(ages) * percent // 100]:.2f}" for percent in (50, 90, 99))
        print(f"  freshness     {shown}, max {ages[-1]:.2f} s, at {rate} changes/s", flush=True)

    def _taken(self, begin: int, changes: int, count: Callable[[], int]) -> float:
        started = time.perf_counter()
        for first in range(begin, begin + changes, 1000):
            self._insert(first, min(first + 1000, begin + changes))
        self._wait(lambda: count() >= begin + changes)
        return time.perf_counter() - started

    def _insert(self, begin: int, end: int) -> None:
        self._postgres.execute(_MANY.format(begin=begin, end=end))

    def _arrived(self) -> int:
        ends = topics_source(self._spark, self.config).ends(self.config.tables[0])
        return sum(ends.values())

    def _visible(self) -> int:
        found = self._sql(f"SELECT summary['total-records'] AS rows FROM {TARGET}.snapshots ORDER BY committed_at DESC")
        return int(found[0]["rows"]) if found else 0

    def _newest(self) -> float:
        return float(self._sql(f"SELECT max(unix_micros(sent)) / 1e6 AS at FROM {TARGET}")[0]["at"])

    def _newest_sent(self) -> float:
        with psycopg.connect(self._postgres.url) as connection:
            found = connection.execute("SELECT extract(epoch FROM max(sent))::float8 FROM orders").fetchone()
        assert found is not None
        return float(found[0])

    def _sql(self, query: str) -> list[Any]:
        if not self._spark.catalog.tableExists(TARGET):
            return []
        return self._spark.sql(query).collect()

    def _change(self, begin: int, rate: int, seconds: int) -> None:
        started = time.perf_counter()
        with psycopg.connect(self._postgres.url, autocommit=True) as connection:
            for number in range(rate * seconds // _TRANSACTION):
                time.sleep(max(0.0, started + number * _TRANSACTION / rate - time.perf_counter()))
                first = begin + number // 2 * _TRANSACTION  # rows are inserted, and then updated
                connection.execute(_A_FEW.format(begin=first, end=first + _TRANSACTION).encode())

    def _ages(self, seconds: int) -> Iterator[float]:
        """The ages of all changes of the last phase when they became visible."""
        snapshots = self._sql(
            f"SELECT snapshot_id, unix_micros(committed_at) / 1e6 AS at FROM {TARGET}.snapshots ORDER BY committed_at"
        )
        last = snapshots[-1]["at"] - seconds - 5
        before = 0.0
        with psycopg.connect(self._postgres.url) as connection:
            found = connection.execute("SELECT extract(epoch FROM sent)::float8 FROM orders ORDER BY sent").fetchall()
        sent = [at for (at,) in found if at > last]
        for snapshot in snapshots:
            if snapshot["at"] < last:
                continue
            query = f"SELECT max(unix_micros(sent)) / 1e6 AS at FROM {TARGET} VERSION AS OF {snapshot['snapshot_id']}"
            newest = self._sql(query)[0]["at"]
            yield from (snapshot["at"] - at for at in sent if before < at <= newest)
            before = max(before, newest)

    @contextmanager
    def _running(self) -> Iterator[None]:
        pipeline = Pipeline(self._spark, self.config)
        thread = threading.Thread(target=pipeline.run)
        thread.start()
        try:
            yield
        finally:
            pipeline.stop()
            thread.join()

    def _wait(self, until: Callable[[], bool]) -> None:
        while not until():
            time.sleep(_POLL_SECONDS)


def run(folder: Path, changes: int, rate: int, seconds: int) -> None:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    with running_postgres() as postgres, running_kafka() as kafka:
        options = {"kafka.bootstrap.servers": kafka.bootstrap_servers}
        topics = {"type": "kafka", "format": "debezium-json", "options": options}
        spark = session.start(_config(folder, topics))
        spark.sparkContext.setLogLevel("ERROR")
        print("Debezium's engine", flush=True)
        postgres.execute(_CREATE)
        connector = postgres_connector(postgres, "shop", r"public\.orders", snapshot_mode="no_data")
        own = {name: value for name, value in connector.items() if not name.startswith(_OF_CONNECT)}
        buffer = {"type": "debezium", "connector": own, "buffer": str(folder / "buffer")}
        way = Way(spark, _config(folder, buffer), postgres)
        engine = Engine(spark, way.config)
        engine.start()
        engine.catch_up()
        way.measure(changes, rate, seconds, engine.stop)
        print("Kafka Connect and Kafka", flush=True)
        spark.sql(f"DROP TABLE {TARGET}")
        postgres.execute(f"SELECT pg_drop_replication_slot('shop'); DROP TABLE orders; {_CREATE}")
        kafka.create_topic(TOPIC)
        with running(lambda place: Connect(place, kafka), "connect") as connect:
            connect.put("shop", connector | json_converter(schemas=True))
            Way(spark, _config(folder / "kafka", topics), postgres).measure(changes, rate, seconds, lambda: None)
        spark.stop()


def _config(folder: Path, source: dict[str, Any]) -> Config:
    return Config.model_validate(
        {
            "sink": {"id": "bench", "checkpoint": str(folder / "state"), "trigger": "1 second"},
            "source": source,
            "catalogs": {CATALOG: {"type": "hadoop", "warehouse": str(folder / "warehouse")}},
            "tables": [{"source": TOPIC, "target": TARGET, "key": ["id"]}],
            "spark": {"spark.master": "local[2]", "spark.driver.memory": "2g", "spark.ui.enabled": "false"},
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--changes", type=int, default=300_000)
    parser.add_argument("--rate", type=int, default=1000, help="changes a second, for their freshness")
    parser.add_argument("--seconds", type=int, default=60)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rowdelta-mirror-") as folder:
        run(Path(folder), args.changes, args.rate, args.seconds)


if __name__ == "__main__":
    main()
