"""Changes of a real Postgres reach tables by Debezium's own engine, without Kafka, whoever is killed meanwhile."""

import functools
import json
import os
import re
import shutil
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from pyspark.sql import SparkSession

from sink.commands import inspection
from sink.config import Config
from sink.errors import ConfigError, DataError, TemporaryError
from sink.run.pipeline import Pipeline
from sink.sources.engine import Engine
from sink.table.observer import EngineSeen, Event, Observer, SlotsSeen, nobody
from tests.stack.postgres import Postgres, running_postgres
from tests.stack.process import wait_until, with_descendants
from tests.stack.sink_process import SinkProcess, written

pytestmark = [pytest.mark.spark]


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    with running_postgres() as server:
        yield server


class Source(ABC):
    """Tables of a database, and the sink that mirrors them.

    :param password: of the database, which nobody may see.
    """

    def __init__(self, spark: SparkSession, folder: Path, password: str) -> None:
        self.spark, self.folder, self.password = spark, folder, password
        self.name = f"s{uuid4().hex[:8]}"
        self.buffer = folder / "buffer"
        self.warehouse = str(spark.conf.get("spark.sql.catalog.lake.warehouse"))
        self.connector = dict[str, str]()

    @abstractmethod
    def in_database(self, table: str) -> list[tuple[Any, ...]]: ...

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
        }

    def run(self, observer: Observer = nobody) -> None:
        Pipeline(self.spark, Config.model_validate(self.values("available-now")), observer).run()

    def in_lake(self, table: str) -> list[tuple[Any, ...]]:
        target = f"lake.{self.name}.{table}"
        if not self.spark.catalog.tableExists(target):
            return []
        self.spark.sql(f"REFRESH TABLE {target}")
        return sorted(tuple(row) for row in self.spark.table(target).collect())

    def count(self, table: str) -> int:
        return len(self.in_lake(table))

    def equals(self, *tables: str) -> bool:
        return all(self.in_database(table) == self.in_lake(table) for table in tables)

    def end(self) -> int:
        """So many events of things the buffer has had."""
        state = self.buffer / "state.json"
        ends: dict[str, int] = json.loads(state.read_text())["ends"] if state.exists() else {}
        return ends.get(f"{self.name}.{self.name}.things", 0)

    def paths(self) -> list[Path]:
        return sorted(self.buffer.glob("topics/*.things/*"))

    def net(self) -> dict[int, int]:
        """Key of things -> how many rows more its events add than they take away."""
        keys: dict[int, int] = {}
        for line in "".join(path.read_text() for path in self.paths()).splitlines():
            _, _, key, _, value = line.split("\t")
            if value:
                number = json.loads(key)["id"]
                kind = json.loads(value)["payload"]["op"]
                keys[number] = keys.get(number, 0) + {"u": 0, "d": -1}.get(kind, 1)
        return keys

    def kill_engine(self) -> bool:
        """Whether there was one."""
        for pid in with_descendants(os.getpid()):
            with suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_text()
                if command.endswith("\0Engine\0"):
                    assert self.password not in command
                    os.kill(pid, signal.SIGKILL)
                    return True
        return False


class Shop(Source):
    """Two tables of Postgres, and the sink that mirrors them: one in mode upsert, and one that only grows."""

    def __init__(self, spark: SparkSession, folder: Path, postgres: Postgres) -> None:
        super().__init__(spark, folder, postgres.password)
        self.postgres = postgres
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
        return super().values(trigger) | {
            "tables": [
                {"source": f"{self.name}.{self.name}.things", "target": f"lake.{self.name}.things"},
                {"source": f"{self.name}.{self.name}.events", "target": f"lake.{self.name}.events", "mode": "append"},
            ]
        }

    def in_database(self, table: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.postgres.url) as connection:
            return connection.execute(f"SELECT * FROM {self.name}.{table} ORDER BY 1".encode()).fetchall()

    def is_equal(self) -> bool:
        return self.equals("things", "events")

    def has_events(self, count: int) -> bool:
        return len(self.in_lake("events")) >= count

    def log_position(self, of: str) -> int:
        with psycopg.connect(self.postgres.url) as connection:
            found = connection.execute(f"SELECT {of} - '0/0'".encode()).fetchone()
        assert found is not None
        return int(found[0])

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


@pytest.mark.versions
def test_available_now_applies_what_the_database_has_at_its_start(shop: Shop) -> None:
    s = shop.name
    shop.postgres.execute(
        f"INSERT INTO {s}.things SELECT i, 'tab\t' || i || E'\\n\\r', i / 3.0 FROM generate_series(1, 1000) i;\n"
        f"INSERT INTO {s}.events (what) SELECT 'e' || i FROM generate_series(1, 500) i"
    )
    told: list[Event] = []
    shop.run(told.append)
    assert shop.is_equal()
    engine = next(event for event in told if isinstance(event, EngineSeen))
    slots = next(event for event in told if isinstance(event, SlotsSeen))
    assert (engine.is_reading, engine.failures, engine.held.bytes > 10_000) == (False, 0, True)
    assert [(slot.name, slot.is_active, (slot.retained or 0) > 0) for slot in slots.slots] == [(s, False, True)]
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
    assert len(shop.paths()) == 1  # what is applied was removed


def test_rows_that_a_new_snapshot_does_not_have_are_removed(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    """Deletes that the log doesn't bring, and a snapshot of two tables: one of them has its first row, and the other
    its last one.
    """
    things, values = f"{shop.name}.things", shop.values("available-now")
    values["tables"][0] |= {"key": ["id"], "resnapshot": "reconcile"}
    values["tables"][1] |= {"mode": "upsert", "resnapshot": "reconcile"}
    shop.connector |= {"snapshot.mode": "always", "max.batch.size": "20", "max.queue.size": "40"}  # many segments
    shop.postgres.execute(
        f"INSERT INTO {things} SELECT i, 'n' || i, i FROM generate_series(1, 100) i;\n"
        f"INSERT INTO {shop.name}.events (what) SELECT 'e' || i FROM generate_series(1, 50) i"
    )
    Pipeline(shop.spark, Config.model_validate(values)).run()
    assert shop.is_equal()
    shop.postgres.execute(
        f"ALTER PUBLICATION {shop.name} SET (publish = 'insert, update');\n"
        f"DELETE FROM {things} WHERE id % 7 = 0;\nDELETE FROM {shop.name}.events WHERE id % 5 = 0;\n"
        f"UPDATE {things} SET amount = -1 WHERE id % 4 = 0;\nINSERT INTO {things} VALUES (1000)"
    )
    Pipeline(shop.spark, Config.model_validate(values)).run()
    assert shop.is_equal()
    assert "can't look at the messages' keys" not in caplog.text


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


@contextmanager
def running(shop: Source, **connector: str) -> Iterator[Engine]:
    """The engine alone, whose batches are small."""
    shop.connector |= {"max.batch.size": "7", "max.queue.size": "20", **connector}
    engine = Engine(shop.spark, Config.model_validate(shop.values("1 second")))
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def test_events_with_one_position_in_the_log_are_in_the_buffer_once(shop: Shop) -> None:
    """The connector goes on after all of them: rows that COPY wrote together, and the delete and insert of a key. Then
    nothing else is in the log, in which it has to find where to go on.
    """
    things, random = f"{shop.name}.things", Random(3)
    with running(shop) as engine:
        assert engine.catch_up()
        with psycopg.connect(shop.postgres.url, autocommit=True) as connection:
            with connection.cursor().copy(f"COPY {things} (id) FROM STDIN".encode()) as rows:
                for number in range(2000):
                    rows.write_row((number,))
            connection.execute(f"UPDATE {things} SET id = id + 5000 WHERE id < 500".encode())
        before = 0
        for _ in range(4):
            assert wait_until(lambda: shop.end() > before)  # noqa: B023 - it is called at once
            time.sleep(random.uniform(0, 0.3))
            assert wait_until(shop.kill_engine)
            before = shop.end()
            if before >= 3500:
                break
        assert engine.catch_up()
    assert shop.end() == 3500
    assert shop.net() == dict.fromkeys(range(500), 0) | dict.fromkeys(range(500, 2000), 1) | dict.fromkeys(
        range(5000, 5500), 1
    )


def test_the_database_hears_only_of_what_the_buffer_has(shop: Shop) -> None:
    def insert() -> None:
        shop.postgres.execute(f"INSERT INTO {shop.name}.things SELECT count(*) FROM {shop.name}.things")

    def has_failed() -> bool:
        return (
            "state.json" in (shop.buffer / "error.txt").read_text() if (shop.buffer / "error.txt").exists() else False
        )

    with running(shop, **{"heartbeat.interval.ms": "500"}) as engine:
        insert()
        assert engine.catch_up()
        (shop.buffer / ".state.json").mkdir()  # as if the disk were full
        insert()
        assert wait_until(has_failed)
        assert "state.json" in engine.reason
        assert not engine.is_reading
        (shop.buffer / ".state.json").rmdir()
        assert engine.catch_up()
        assert (engine.is_reading, engine.failures > 0, engine.reason) == (True, True, "")
        # it may remove its log also if only others' tables change
        shop.postgres.execute("CREATE TABLE IF NOT EXISTS others AS SELECT generate_series(1, 50000)")
        written = shop.log_position("pg_current_wal_lsn()")
        confirmed = f"(SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = '{shop.name}')"
        assert wait_until(lambda: shop.log_position(confirmed) > written)
    assert shop.end() == 2
    assert [path.name for path in shop.buffer.glob("topics/*")] == [f"{shop.name}.{shop.name}.things"]


def test_status_tells_of_the_engine_and_of_the_databases_slots(shop: Shop) -> None:
    def status(**connector: str) -> str:
        values = shop.values("1 second")
        values["source"]["connector"] = shop.connector | connector
        return "\n".join(inspection.status(shop.spark, Config.model_validate(values)))

    things, old = f"{shop.name}.things", f"{shop.name}_old"
    shop.postgres.execute(f"SELECT pg_create_logical_replication_slot('{old}', 'pgoutput')")
    try:
        found = status()
        assert "engine: doesn't run; no event yet; 0 events to apply, 0 bytes in the buffer" in found
        assert f"slot {shop.name}: there is none; the connector makes it when it starts" in found
        with running(shop) as engine:
            shop.postgres.execute(f"INSERT INTO {things} SELECT generate_series(1, 3000)")
            assert engine.catch_up()
            found = status()
            assert re.search(r"engine: runs; last event at 20\S+ \S+ UTC; 3,000 events to apply, \S+ MB", found), found
            assert re.search(rf"slot {shop.name}: is read; .+ to read, the database keeps .+ of its log", found), found
            kept = re.search(rf"slot {old}: nobody reads it.* keeps ([\d.]+) kB of its .* drop it: (SELECT .*)", found)
            assert kept is not None, found
            assert float(kept[1]) > 200
        found = status(**{"database.password": "another-secret"})
        assert "slots: not known: source.database: " in found
        assert "password authentication failed" in found
        assert "another-secret" not in found
        (shop.buffer / "error.txt").write_text("it has ended")
        shop.postgres.execute(kept[2])
        found = status()
        assert "engine: doesn't run; last event at" in found
        assert "\n  it has ended" in found
        assert f"slot {shop.name}: nobody reads it" in found
        assert old not in found
    finally:
        shop.postgres.execute(
            f"SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = '{old}'"
        )


def test_a_database_that_takes_no_mark_ends_the_run(shop: Shop) -> None:
    shop.postgres.execute(
        f"CREATE ROLE {shop.name} LOGIN REPLICATION PASSWORD 'secret-of-reader';\n"
        f"GRANT USAGE ON SCHEMA {shop.name} TO {shop.name};\n"
        f"GRANT SELECT ON ALL TABLES IN SCHEMA {shop.name} TO {shop.name};\n"
        f"CREATE PUBLICATION {shop.name} FOR TABLE {shop.name}.things;\n"
        "REVOKE EXECUTE ON FUNCTION pg_logical_emit_message(boolean, text, text) FROM PUBLIC"
    )
    shop.connector |= {"database.user": shop.name, "database.password": "secret-of-reader"}
    shop.connector |= {"publication.autocreate.mode": "disabled"}
    try:
        with pytest.raises(TemporaryError, match="permission denied for function pg_logical_emit_message"):
            shop.run()
    finally:
        shop.postgres.execute("GRANT EXECUTE ON FUNCTION pg_logical_emit_message(boolean, text, text) TO PUBLIC")


def test_events_that_are_lost_are_not_left_out_silently(shop: Shop, tmp_path: Path) -> None:
    things = f"{shop.name}.things"
    shop.postgres.execute(f"INSERT INTO {things} VALUES (1)")
    shop.run()
    shutil.copytree(shop.buffer, tmp_path / "copy")
    with running(shop, **{"heartbeat.interval.ms": "300"}):
        before = shop.log_position("pg_current_wal_lsn()")
        shop.postgres.execute(f"INSERT INTO {things} VALUES (2)")
        confirmed = f"(SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = '{shop.name}')"
        assert wait_until(lambda: shop.log_position(confirmed) > before)
    # an older copy of the buffer
    shutil.move(shop.buffer, tmp_path / "newest")
    shutil.move(tmp_path / "copy", shop.buffer)
    shop.postgres.execute(f"INSERT INTO {things} VALUES (3)")
    with pytest.raises(ConfigError, match="the replication slot is ahead of the buffer"):
        shop.run()
    shutil.rmtree(shop.buffer)
    shutil.move(tmp_path / "newest", shop.buffer)
    # a table that comes later
    shop.run()
    values = shop.values("available-now")
    values["tables"].append({"source": f"{shop.name}.{things}", "target": f"lake.{shop.name}.later"})
    with pytest.raises(DataError, match="no longer has the first events"):
        Pipeline(shop.spark, Config.model_validate(values)).run()
    # a file that is missing between others
    with running(shop) as engine:
        for key in range(4, 7):
            shop.postgres.execute(f"INSERT INTO {things} VALUES ({key})")
            assert engine.catch_up()
    shop.paths()[-2].unlink()
    with pytest.raises(DataError, match="has lost events"):
        shop.run()
    # another slot
    shop.close()
    shop.postgres.execute(f"SELECT pg_create_logical_replication_slot('{shop.name}', 'pgoutput')")
    with pytest.raises(ConfigError, match="the replication slot is ahead of the buffer"):
        shop.run()


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
