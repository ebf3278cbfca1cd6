"""Changes of a real Postgres reach tables by Debezium's own engine, without Kafka, whoever is killed meanwhile."""

import functools
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from pyspark.sql import SparkSession

from sink.config import Config
from sink.errors import ConfigError
from sink.run.pipeline import Pipeline
from tests.stack.postgres import Postgres, running_postgres
from tests.stack.process import wait_until, with_descendants
from tests.stack.sink_process import SinkProcess, written

pytestmark = [pytest.mark.spark]


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    with running_postgres() as server:
        yield server


class Shop:
    """Two tables of Postgres, and the sink that mirrors them: one in mode upsert, and one that only grows."""

    def __init__(self, spark: SparkSession, folder: Path, postgres: Postgres) -> None:
        self.spark, self.folder, self.postgres = spark, folder, postgres
        self.name = f"s{uuid4().hex[:8]}"
        self.buffer = folder / "buffer"
        self.warehouse = str(spark.conf.get("spark.sql.catalog.lake.warehouse"))
        self.connector = {
            "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
            "database.hostname": postgres.host,
            "database.port": str(postgres.port),
            "database.user": postgres.user,
            "database.password": postgres.password,
            "database.dbname": postgres.database,
            "topic.prefix": self.name,
            "slot.name": self.name,
            "publication.name": self.name,
            "publication.autocreate.mode": "filtered",
            "schema.include.list": self.name,
            "poll.interval.ms": "100",
        }
        postgres.execute(
            f"CREATE SCHEMA {self.name};\n"
            f"CREATE TABLE {self.name}.things (id bigint PRIMARY KEY, name text, amount numeric(12,2));\n"
            f"CREATE TABLE {self.name}.events (id bigserial PRIMARY KEY, what text)"
        )

    def values(self, trigger: str) -> dict[str, Any]:
        return {
            "sink": {"id": self.name, "checkpoint": str(self.folder / "state"), "trigger": trigger},
            "source": {
                "type": "debezium",
                "connector": self.connector,
                "buffer": str(self.buffer),
                "discovery_interval": "1 second",
            },
            "catalogs": {"lake": {"type": "hadoop", "warehouse": self.warehouse}},
            "tables": [
                {"source": f"{self.name}.{self.name}.things", "target": f"lake.{self.name}.things"},
                {"source": f"{self.name}.{self.name}.events", "target": f"lake.{self.name}.events", "mode": "append"},
            ],
        }

    def run(self) -> None:
        Pipeline(self.spark, Config.model_validate(self.values("available-now"))).run()

    def in_database(self, table: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.postgres.url) as connection:
            return connection.execute(f"SELECT * FROM {self.name}.{table} ORDER BY 1".encode()).fetchall()

    def in_lake(self, table: str) -> list[tuple[Any, ...]]:
        target = f"lake.{self.name}.{table}"
        if not self.spark.catalog.tableExists(target):
            return []
        self.spark.sql(f"REFRESH TABLE {target}")
        return sorted(tuple(row) for row in self.spark.table(target).collect())

    def is_equal(self) -> bool:
        return all(self.in_database(table) == self.in_lake(table) for table in ("things", "events"))

    def has_events(self, count: int) -> bool:
        return len(self.in_lake("events")) >= count

    def segments(self) -> list[str]:
        return sorted(file.name for file in self.buffer.glob("topics/*.things/*"))

    def kill_engine(self) -> bool:
        """Whether there was one."""
        for pid in with_descendants(os.getpid()):
            with suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_text()
                if command.endswith("\0Engine\0"):
                    assert self.postgres.password not in command
                    os.kill(pid, signal.SIGKILL)
                    return True
        return False

    def close(self) -> None:
        def drop() -> bool:
            try:
                self.postgres.execute(
                    f"SELECT pg_drop_replication_slot('{self.name}') FROM pg_replication_slots "
                    f"WHERE slot_name = '{self.name}'"
                )
                return True
            except psycopg.Error:
                return False  # the server may not know yet that the engine is gone

        assert wait_until(drop)


@pytest.fixture
def shop(spark: SparkSession, tmp_path: Path, postgres: Postgres) -> Iterator[Shop]:
    made = Shop(spark, tmp_path, postgres)
    yield made
    made.close()


def test_available_now_applies_what_the_database_has_at_its_start(shop: Shop) -> None:
    s = shop.name
    shop.postgres.execute(
        f"INSERT INTO {s}.things SELECT i, 'tab\t' || i || E'\\n\\r', i / 3.0 FROM generate_series(1, 1000) i;\n"
        f"INSERT INTO {s}.events (what) SELECT 'e' || i FROM generate_series(1, 500) i"
    )
    shop.run()
    assert shop.is_equal()
    shop.run()  # nothing has changed
    assert shop.is_equal()
    shop.postgres.execute(
        f"UPDATE {s}.things SET amount = NULL WHERE id % 3 = 0;\n"
        f"DELETE FROM {s}.things WHERE id % 7 = 0;\n"
        f"UPDATE {s}.things SET id = id + 1 WHERE id % 7 = 6;\n"
        f"BEGIN; UPDATE {s}.things SET id = id + 5000 WHERE id % 11 = 0; DELETE FROM {s}.things WHERE id = 3; COMMIT;\n"
        f"INSERT INTO {s}.events (what) VALUES ('late')"
    )
    shop.run()
    assert shop.is_equal()
    assert len(shop.segments()) == 1  # what is applied was removed


def test_whoever_is_killed_each_event_is_applied_once(shop: Shop, tmp_path: Path) -> None:
    """`append` would show an event that came twice, `upsert` one that is missing."""
    config = written(tmp_path / "config", {**shop.values("1 second"), "spark": {"spark.master": "local[2]"}})
    sink, random, ending = SinkProcess(config, tmp_path), Random(7), threading.Event()

    def change() -> None:
        with psycopg.connect(shop.postgres.url, autocommit=True) as connection:
            for n in range(1_000_000):
                if ending.wait(0.01):
                    return
                with connection.transaction():
                    key = random.randrange(200)
                    things = f"{shop.name}.things"
                    connection.execute(
                        f"INSERT INTO {things} VALUES ({key}, 'n{n}', {n}) "
                        f"ON CONFLICT (id) DO UPDATE SET name = 'n{n}', amount = {n}".encode()
                    )
                    connection.execute(f"DELETE FROM {things} WHERE id = {random.randrange(200)}".encode())
                    connection.execute(f"INSERT INTO {shop.name}.events (what) VALUES ('e{n}')".encode())

    writer = threading.Thread(target=change)
    writer.start()
    try:
        for whole in (False, True, False):
            if not sink.is_started:
                sink.start()
            grown = len(shop.in_lake("events")) + 20
            assert wait_until(functools.partial(shop.has_events, grown), 300), sink.text()
            if whole:
                sink.kill()
            else:
                assert wait_until(shop.kill_engine)
    finally:
        ending.set()
        writer.join()
        sink.kill()
    shop.run()
    assert shop.is_equal()
    assert shop.postgres.password not in sink.text()
    assert not any(shop.postgres.password in file.read_text() for file in shop.buffer.rglob("*") if file.is_file())


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"database.password": "another-secret"}, "password authentication failed"),
        ({"database.dbname": "nowhere"}, "nowhere"),
        ({"slot.name": "Not-a-slot"}, "slot.name"),
    ],
)
def test_the_connectors_own_words_end_the_run(shop: Shop, wrong: dict[str, str], words: str) -> None:
    shop.connector |= wrong
    with pytest.raises(ConfigError, match=words) as raised:
        shop.run()
    assert "another-secret" not in str(raised.value)
