"""Kafka Connect dies between a database and the sink."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from random import Random

import psycopg
import pytest
from confluent_kafka import Consumer, TopicPartition

from tests.faults.chain import PATIENCE, start
from tests.faults.plugin import Seen
from tests.sink.test_submit import LOCAL
from tests.stack.connect import Connect, json_converter, postgres_connector
from tests.stack.kafka import Kafka, container_or_process
from tests.stack.postgres import Postgres
from tests.stack.process import wait_until
from tests.stack.sink_process import SinkProcess, written

pytestmark = [pytest.mark.spark, pytest.mark.kafka]

TABLES = {"orders": "ice.shop.orders", "lines": "lake.shop.lines"}
"""Tables of the database, and those of the sink: in Iceberg and in Delta."""
TOPICS = [f"pg.public.{table}" for table in TABLES]
KEYS = 60


class Source:
    """The tables of the database, which change at random. `changes` is the number of all changes."""

    def __init__(self, postgres: Postgres) -> None:
        self.changes = 0
        self._postgres = postgres
        self._random = Random(5)
        for table in TABLES:
            postgres.execute(f"CREATE TABLE {table} (id bigint PRIMARY KEY, v bigint)")

    def change(self, count: int) -> None:
        """Each change of a row is one message."""
        with psycopg.connect(self._postgres.url, autocommit=True) as connection:
            for number in range(self.changes, self.changes + count):
                table, key = self._random.choice(list(TABLES)), self._random.randrange(KEYS)
                if self._random.random() < 0.3:
                    done = connection.execute(f"DELETE FROM {table} WHERE id = {key}".encode())
                else:
                    set_v = "ON CONFLICT (id) DO UPDATE SET v = excluded.v"
                    done = connection.execute(f"INSERT INTO {table} VALUES ({key}, {number}) {set_v}".encode())
                self.changes += done.rowcount

    def mark(self) -> None:
        """The last change of each table. A table that has it has all messages before it: a topic has one partition."""
        for table in TABLES:
            self._postgres.execute(f"INSERT INTO {table} VALUES ({KEYS}, {self.changes})")
            self.changes += 1


def messages(kafka: Kafka, *topics: str) -> int:
    """How many there are in topics of one partition."""
    consumer = Consumer({"bootstrap.servers": kafka.bootstrap_servers, "group.id": "count"})
    try:
        return sum(consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=30)[1] for topic in topics)
    finally:
        consumer.close()


def differences(folder: Path, postgres: Postgres) -> str:
    """Between the database and the sink's tables, in words."""
    from tests.stack import compare  # delta-rs isn't there with every Spark

    for table, target in TABLES.items():
        source = compare.rows_of_postgres(postgres, f"SELECT id, v FROM {table}")
        if what := compare.differences(source, compare.rows_in_warehouse(folder, target, ["id", "v"])):
            return f"{target}: {what}"
    return ""


def configuration(folder: Path, kafka: Kafka) -> Path:
    columns = {"id": "bigint", "v": "bigint"}
    values = {
        "sink": {"id": "shop", "checkpoint": str(folder / "state"), "trigger": "200 milliseconds"},
        "source": {
            "type": "kafka",
            "format": "debezium-json",
            "options": {"kafka.bootstrap.servers": kafka.bootstrap_servers, "startingOffsets": "earliest"},
        },
        "catalogs": {
            "ice": {"type": "hadoop", "warehouse": str(folder / "ice")},
            "lake": {"type": "delta", "warehouse": str(folder / "lake")},
        },
        "tables": [
            {"source": f"pg.public.{table}", "target": target, "key": ["id"], "columns": columns}
            for table, target in TABLES.items()
        ],
        "spark": LOCAL,
    }
    return written(folder, values)


@pytest.mark.fault(
    "Kafka Connect",
    "`kill -9` of its worker, which stores its offsets rarely (`offset.flush.interval.ms`), while Postgres changes",
    "The next worker sends again what came after these offsets. That changes nothing",
)
def test_the_worker_is_killed(tmp_path: Path, seen: Seen) -> None:
    for name in ("kafka", "postgres", "connect"):
        (tmp_path / name).mkdir()
    kafka, postgres = container_or_process(tmp_path / "kafka"), Postgres(tmp_path / "postgres")
    connect = Connect(tmp_path / "connect", kafka, flush_seconds=3600)
    folder = tmp_path / "sink"
    with ExitStack() as ends, ThreadPoolExecutor() as threads:
        for server in (kafka, postgres, connect):
            ends.callback(server.close)
        start([kafka, postgres])
        for topic in TOPICS:
            kafka.create_topic(topic)
        sink = SinkProcess(configuration(folder, kafka), folder)
        ends.callback(sink.stop)
        sink_starts = threads.submit(sink.start)
        connect.start()
        source = Source(postgres)
        connector = postgres_connector(
            postgres, "pg", r"public\..*", tombstones_on_delete="false", **json_converter(schemas=False)
        )
        connect.put("pg", connector)
        source.change(20)
        assert wait_until(lambda: messages(kafka, *TOPICS) == source.changes)
        # a connector whose configuration changes ends first, and what ends stores its offsets
        connect.put("pg", connector | {"poll.interval.ms": "51"})
        assert wait_until(lambda: messages(kafka, connect.OFFSETS) > 0)
        sent_before = source.changes
        source.change(150)
        assert wait_until(lambda: messages(kafka, *TOPICS) == source.changes)
        again = source.changes - sent_before
        sink_starts.result()
        assert wait_until(lambda: not differences(folder, postgres), PATIENCE), sink.text()[-10_000:]

        connect.kill()
        source.change(20)
        connect.start()
        assert wait_until(lambda: messages(kafka, *TOPICS) >= source.changes + again, PATIENCE)
        source.mark()
        assert wait_until(lambda: not differences(folder, postgres), PATIENCE), sink.text()[-10_000:]
        assert sink.exit_code is None
        twice = messages(kafka, *TOPICS) - source.changes
    seen(f"{twice} of {source.changes} messages came twice. Table = source")
