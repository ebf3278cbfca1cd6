"""A table of a real Postgres or MariaDB is loaded beside a real connector, while it changes and the sink dies."""

import json
import logging
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from pyspark.sql import SparkSession

from sink.commands import inspection
from sink.commands.load import Load
from sink.config import Config
from sink.databases.postgres import Postgres as PostgresTables
from sink.errors import ConfigError, RowdeltaError, TableError, TemporaryError
from sink.run.pipeline import Pipeline
from sink.spark.versions import to_arrow
from sink.table import loading, task_plans
from sink.table.loading import Loading
from sink.table.microbatch import TableSink
from sink.targets.values import ChangeSet
from tests.sink.harness import CrashError
from tests.stack.connect import Connect, json_converter, mysql_connector, postgres_connector
from tests.stack.container import has
from tests.stack.kafka import Kafka
from tests.stack.mariadb import MariaDB, running_mariadb
from tests.stack.postgres import Postgres, running_postgres, running_replica
from tests.stack.process import wait_until

pytestmark = [pytest.mark.spark, pytest.mark.kafka]


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    with running_postgres() as server:
        yield server


@pytest.fixture(scope="module")
def mariadb() -> Iterator[MariaDB]:
    with running_mariadb() as server:
        yield server


@pytest.fixture(scope="module")
def connect(tmp_path_factory: pytest.TempPathFactory, kafka: Kafka) -> Iterator[Connect]:
    worker = Connect(tmp_path_factory.mktemp("connect"), kafka)
    worker.start()
    yield worker
    worker.stop()


class Shop:
    """A table of Postgres, and the sink that mirrors it. `table` is its name."""

    schema = "public"

    def __init__(self, spark: SparkSession, folder: Path, kafka: Kafka, server: Any) -> None:
        self.spark, self.folder, self.kafka, self.server = spark, folder, kafka, server
        self.prefix = f"p{uuid4().hex[:8]}"
        self.table = f"t{uuid4().hex[:8]}"
        self.target = f"lake.{self.prefix}.things"
        self.catalog = {"type": "hadoop", "warehouse": str(spark.conf.get("spark.sql.catalog.lake.warehouse"))}
        self.entry: dict[str, Any] = {}
        self.trigger = "available-now"
        self.sections: dict[str, Any] = {}
        self.database: dict[str, Any] = {"slot": self.prefix}
        server.execute(f"CREATE TABLE {self.table} (id bigint PRIMARY KEY, name text, amount numeric(12,2))")
        kafka.create_topic(self.topic, 2)

    def use_delta(self) -> None:
        self.catalog = {"type": "delta", "warehouse": str(self.folder / "warehouse")}

    @property
    def sql_name(self) -> str:
        """The target, for Spark."""
        if self.catalog["type"] == "hadoop":
            return self.target
        return f"delta.`{self.folder}/warehouse/{self.target.partition('.')[2].replace('.', '/')}`"

    @property
    def topic(self) -> str:
        return f"{self.prefix}.{self.schema}.{self.table}"

    def config(self) -> Config:
        database = {"url": self.server.jdbc_url, "user": self.server.user, "password": self.server.password}
        return Config.model_validate(
            {
                "sink": {"id": "shop", "checkpoint": str(self.folder / "state"), "trigger": self.trigger},
                "source": {
                    "type": "kafka",
                    "format": "debezium-json",
                    "options": {"kafka.bootstrap.servers": self.kafka.bootstrap_servers},
                    "database": {**database, **self.database},
                },
                "load": {"connections": 2, "part_rows": 1000},
                "maintenance": {"budget": 0, "expire": None, "orphans": None},
                "catalogs": {"lake": self.catalog},
                "tables": [{"source": self.topic, "target": self.target, **self.entry}],
                **self.sections,
            }
        )

    def fill(self, rows: int) -> None:
        self.server.execute(
            f"INSERT INTO {self.table} SELECT n, 'name ' || n, n / 7.0 FROM generate_series(1, {rows}) n;\n"
            f"ANALYZE {self.table}"
        )

    def start_connector(self, connect: Connect) -> None:
        connector = postgres_connector(self.server, self.prefix, rf"public\.{self.table}")
        more = {"snapshot.mode": "no_data", "slot.name": self.prefix, "publication.name": self.prefix}
        connect.put(self.prefix, connector | json_converter(schemas=True) | more)

    def stop_connector(self, connect: Connect) -> None:
        """Others must not take it for theirs."""
        connect.delete(self.prefix)
        named = f"WHERE slot_name LIKE '{self.prefix}%'"
        gone = f"SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots {named}"
        assert wait_until(lambda: self._done(gone))

    def _done(self, statement: str) -> bool:
        try:
            self.server.execute(statement)
        except psycopg.Error:
            return False
        return True

    def connected(self) -> Any:
        """A connection that commits each statement."""
        return psycopg.connect(self.server.url, autocommit=True)

    def statements(self, key: int, other: int) -> list[str]:
        """Changes of the table."""
        return [
            f"UPDATE {self.table} SET name = 'new {other}' WHERE id = {key}",
            f"DELETE FROM {self.table} WHERE id = {key}",
            f"INSERT INTO {self.table} VALUES ({key}, 'in', {other}) ON CONFLICT DO NOTHING",
            f"UPDATE {self.table} SET id = {20_000 + other} WHERE id = {key} AND NOT EXISTS "
            f"(SELECT FROM {self.table} WHERE id = {20_000 + other})",
        ]

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Rows are inserted, updated, deleted, and get other keys all the time."""
        over, random = threading.Event(), Random(7)

        def work() -> None:
            with closing(self.connected()) as connection, connection.cursor() as cursor:
                while not over.wait(0.002):
                    key, other = random.randint(1, 12_000), random.randint(1, 12_000)
                    cursor.execute(random.choice(self.statements(key, other)))

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    @contextmanager
    def reading(self, slot: str) -> Iterator[None]:
        """Somebody else reads a slot."""
        with psycopg.connect(self.server.url + "?replication=database", autocommit=True) as connection:
            options = "(proto_version '1', publication_names 'none')"
            connection.pgconn.send_query(f"START_REPLICATION SLOT {slot} LOGICAL 0/0 {options}".encode())
            yield
            connection.pgconn.finish()

    def load(self) -> list[str]:
        return list(Load(self.spark, self.config(), ()).run())

    def source_rows(self) -> list[tuple[Any, ...]]:
        with closing(self.connected()) as connection, connection.cursor() as cursor:
            cursor.execute(f"SELECT id, name, amount FROM {self.table} ORDER BY id")
            return list(cursor.fetchall())

    def rows(self) -> list[tuple[Any, ...]]:
        rows = to_arrow(self.spark.table(self.sql_name).select("id", "name", "amount").orderBy("id")).to_pylist()
        return [tuple(row.values()) for row in rows]

    def pipeline(self) -> Pipeline:
        return Pipeline(self.spark, self.config())

    def catches_up(self) -> bool:
        self.pipeline().run()
        return self.rows() == self.source_rows()


class MySQLShop(Shop):
    """Likewise a table of MariaDB."""

    schema = "shop"

    def __init__(self, spark: SparkSession, folder: Path, kafka: Kafka, server: Any) -> None:
        super().__init__(spark, folder, kafka, server)
        self.database = {"connector_user": server.user}

    def fill(self, rows: int) -> None:
        self.server.execute(
            f"INSERT INTO {self.table} SELECT seq, CONCAT('name ', seq), seq / 7.0 FROM seq_1_to_{rows};\n"
            f"ANALYZE TABLE {self.table}"
        )

    def start_connector(self, connect: Connect) -> None:
        connector = mysql_connector(self.server, self.prefix, rf"shop\.{self.table}", self.kafka)
        connect.put(self.prefix, connector | json_converter(schemas=True) | {"snapshot.mode": "no_data"})
        assert wait_until(lambda: self._is_read())

    def stop_connector(self, connect: Connect) -> None:
        connect.delete(self.prefix)

        def is_gone() -> bool:
            """The server sees it when it sends something."""
            self.server.execute(f"UPDATE {self.table} SET amount = COALESCE(amount, 0) + 1 LIMIT 1")
            return not self._is_read()

        assert wait_until(is_gone)

    def _is_read(self) -> bool:
        with closing(self.connected()) as connection, connection.cursor() as cursor:
            cursor.execute("SELECT count(*) FROM information_schema.processlist WHERE command = 'Binlog Dump'")
            return bool(cursor.fetchone()[0])

    def connected(self) -> Any:
        return self.server.connect()

    def statements(self, key: int, other: int) -> list[str]:
        return [
            f"UPDATE {self.table} SET name = 'new {other}' WHERE id = {key}",
            f"DELETE FROM {self.table} WHERE id = {key}",
            f"INSERT IGNORE INTO {self.table} VALUES ({key}, 'in', {other})",
            f"UPDATE IGNORE {self.table} SET id = {20_000 + other} WHERE id = {key}",
        ]


def shop_of(request: pytest.FixtureRequest, spark: SparkSession, folder: Path, kafka: Kafka) -> Shop:
    """With the database that the test is run for."""
    spark.conf.set("spark.sql.shuffle.partitions", "2")
    if getattr(request, "param", None) == "mariadb":
        return MySQLShop(spark, folder, kafka, request.getfixturevalue("mariadb"))
    return Shop(spark, folder, kafka, request.getfixturevalue("postgres"))


@pytest.fixture
def shop(
    request: pytest.FixtureRequest, spark: SparkSession, tmp_path: Path, kafka: Kafka, connect: Connect
) -> Iterator[Shop]:
    made = shop_of(request, spark, tmp_path, kafka)
    yield made
    made.stop_connector(connect)


def test_what_is_not_in_messages_comes_from_the_catalog(shop: Shop, connect: Connect) -> None:
    """Columns, types and the key, before the first message. After it the stream finds what it expects."""
    shop.server.execute(
        f"DROP TABLE {shop.table};\n"
        f"CREATE TABLE {shop.table} (name text, id bigint, amount numeric(12,2), line int, at timestamptz, "
        "flag boolean NOT NULL DEFAULT true, PRIMARY KEY (line, id));\n"
        f"INSERT INTO {shop.table} VALUES ('pen', 1, 1.10, 7, '2026-11-29 10:00:00+02'), (NULL, 2, NULL, 7, NULL);\n"
        f"CREATE TABLE {shop.table}_child () INHERITS ({shop.table});\n"
        f"INSERT INTO {shop.table}_child VALUES ('of another topic', 3, 2, 7, NULL)"
    )
    shop.start_connector(connect)
    (told,) = shop.load()
    assert "loaded 2 rows" in told
    assert "equal" in told
    shop.server.execute(f"DROP TABLE {shop.table}_child")
    frame = shop.spark.table(shop.target)
    types = {field.name: field.dataType.simpleString() for field in frame.schema}
    texts = {"name": "string", "id": "bigint", "amount": "decimal(12,2)", "line": "int", "at": "timestamp"}
    assert types == {**texts, "flag": "boolean"}
    assert {field.name for field in frame.schema if not field.nullable} == {"id", "line", "flag"}
    assert shop.rows() == shop.source_rows()
    # from the first part on, so that another topic of the same name is known as such
    properties = {row["key"]: row["value"] for row in shop.spark.sql(f"SHOW TBLPROPERTIES {shop.target}").collect()}
    assert properties["rowdelta.shop.topic-id"]
    shop.server.execute(
        f"UPDATE {shop.table} SET name = 'new' WHERE id = 2;\n"
        f"ALTER TABLE {shop.table} ALTER flag DROP NOT NULL;\n"
        f"INSERT INTO {shop.table} VALUES ('cap', 3, 2, 8, now(), NULL);\nDELETE FROM {shop.table} WHERE id = 1"
    )
    assert wait_until(shop.catches_up)
    (status,) = [line for line in inspection.status(shop.spark, shop.config()) if "load:" in line]
    assert status == "  load: equal; 2 rows loaded"


def test_what_would_lose_changes_is_refused(shop: Shop, connect: Connect) -> None:
    shop.fill(10)
    with pytest.raises(ConfigError, match=r"source\.database\.slot: .* has no logical replication slot"):
        shop.load()
    shop.database = {}
    with pytest.raises(ConfigError, match=r"nobody reads the log of public\.t\w+ of jdbc:.*snapshot.mode: no_data"):
        shop.load()
    waiting = f"SELECT pg_create_logical_replication_slot('{shop.prefix}_1', 'pgoutput')"
    there = f"SELECT 1 / count(*) FROM pg_replication_slots WHERE slot_name = '{shop.prefix}_1'"
    with ThreadPoolExecutor(1) as pool, psycopg.connect(shop.server.url) as connection:
        connection.execute("SELECT txid_current()")  # a new slot waits for its end
        pool.submit(shop.server.execute, waiting)
        assert wait_until(lambda: shop._done(there))
        with pytest.raises(ConfigError, match="nobody reads the log"):
            shop.load()
    shop.database = {"password": "wrong"}
    with pytest.raises(ConfigError, match=r"source\.database: .*password authentication failed"):
        shop.load()
    shop.database = {}
    shop.start_connector(connect)
    shop.server.execute(f"SELECT pg_create_logical_replication_slot('{shop.prefix}_2', 'pgoutput')")
    both = rf"database\.slot: .* read now: {shop.prefix}, {shop.prefix}_2"
    with shop.reading(f"{shop.prefix}_2"), pytest.raises(ConfigError, match=both):
        shop.load()
    shop.database = {"slot": shop.prefix}
    shop.server.execute(
        f"CREATE TABLE {shop.table}_2 (id int);\nALTER PUBLICATION {shop.prefix} SET TABLE {shop.table}_2"
    )
    with pytest.raises(ConfigError, match=f"the publication {shop.prefix} does not have public.{shop.table} of"):
        shop.load()
    shop.database = {"slot": f"{shop.prefix}_2"}  # nobody tells by which publication it is read
    with pytest.raises(ConfigError, match=f"no publication has public.{shop.table} of"):
        shop.load()
    shop.database = {"slot": shop.prefix}
    whole = f"SET TABLE {shop.table}"
    for part in (f"{whole} WHERE (id < 0)", f"{whole} (id, name)", f"{whole}", "SET (publish = 'insert, update')"):
        shop.server.execute(f"ALTER PUBLICATION {shop.prefix} {part}")
        if part != whole:
            with pytest.raises(
                ConfigError, match=f"the publication {shop.prefix} does not have public.{shop.table} of"
            ):
                shop.load()
    shop.server.execute(
        f"ALTER PUBLICATION {shop.prefix} SET (publish = 'insert, update, delete, truncate');\n"
        f"CREATE TABLE {shop.table}_3 (id int PRIMARY KEY) PARTITION BY RANGE (id);\n"
        f"CREATE TABLE {shop.table}_4 PARTITION OF {shop.table}_3 FOR VALUES FROM (0) TO (9);\n"
        f"ALTER PUBLICATION {shop.prefix} ADD TABLE {shop.table}_3"
    )
    database = shop.config().source.database
    assert database is not None
    with closing(PostgresTables(shop.spark, database, f"public.{shop.table}_3", "source.database")) as parted:
        parted.check_server()
        parted.check_reader(is_named=True)
        with pytest.raises(ConfigError, match="come under the names of its partitions, in topics of their own"):
            parted.check_reader(is_named=False)
        shop.server.execute(f"ALTER PUBLICATION {shop.prefix} SET (publish_via_partition_root = true)")
        parted.check_reader(is_named=False)
    shop.entry = {"mode": "append"}
    with pytest.raises(ConfigError, match="got mode append, expected upsert for a load"):
        shop.load()
    shop.entry = {"target": f"{shop.target}_2"}
    shop.target = f"{shop.target}_2"
    shop.server.execute(f"UPDATE {shop.table} SET name = 'n'")

    def is_there() -> bool:
        Pipeline(shop.spark, shop.config()).run()
        return shop.spark.catalog.tableExists(shop.target)

    assert wait_until(is_there)  # from the first message on
    with pytest.raises(TableError, match="has rows, or a position in its source, already"):
        shop.load()


def test_what_was_begun_or_removed_before_the_load_is_as_in_the_source(
    shop: Shop, connect: Connect, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a table that others have created. As by the stream, it gets columns that it lacks, wider types, and NULL."""
    caplog.set_level(logging.INFO, "rowdelta")
    monkeypatch.setattr(loading, "_FIRST_NOTICE", 0.0)
    shop.spark.sql(f"CREATE TABLE {shop.target} (id bigint, amount decimal(4,2) NOT NULL) USING iceberg")
    shop.entry = {"key": ["id"], "order_by": ["source.lsn"], "late": "drop"}
    shop.start_connector(connect)
    active = f"SELECT 1 / count(*) FROM pg_replication_slots WHERE slot_name = '{shop.prefix}' AND active"
    assert wait_until(lambda: shop._done(active))
    connect.pause()  # it gets the changes, and writes them when it goes on
    shop.fill(100)
    shop.server.execute(f"TRUNCATE {shop.table}")
    shop.fill(10)
    shop.server.execute(f"INSERT INTO {shop.table} VALUES (11, 'none', NULL), (12, 'wide', 1234567.89)")
    with ThreadPoolExecutor(1) as pool, psycopg.connect(shop.server.url) as connection:
        connection.execute(f"UPDATE {shop.table} SET name = 'late' WHERE id = 1".encode())
        shop.server.execute(f"UPDATE {shop.table} SET name = 'now' WHERE id = 2")
        loaded = pool.submit(shop.load)
        waiting = f"have changed public.{shop.table} of {shop.server.jdbc_url}: pid {connection.info.backend_pid}, "

        def is_confirmed() -> bool:
            shop.server.execute(f"UPDATE {shop.table} SET name = 'more' WHERE id = 3")
            return waiting in caplog.text

        try:
            assert wait_until(lambda: "was altered or emptied lately" in caplog.text)
            assert not wait_until(lambda: waiting in caplog.text, 12)
        finally:
            connect.resume()
        assert wait_until(is_confirmed)
        connection.commit()
        assert "equal" in loaded.result()[0]
    assert wait_until(shop.catches_up)


@pytest.fixture
def replica(request: pytest.FixtureRequest, shop: Shop) -> Iterator[Postgres | None]:
    """From which the shop's rows are read, if there can be one."""
    if isinstance(shop, MySQLShop) or has("postgres"):
        yield None
        return
    with running_replica(shop.server) as server:
        shop.sections = {"load": {"connections": 2, "part_rows": 1000, "replica": server.jdbc_url}}
        yield server


@pytest.mark.parametrize("shop", ["postgres", "mariadb"], indirect=True)
def test_a_loaded_table_is_equal_after_kills_while_the_source_changes(
    shop: Shop, replica: Postgres | None, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of Postgres' table are read from a replica."""
    if isinstance(shop, MySQLShop):
        shop.entry = {"order_by": ["source.file string", "source.pos"], "late": "drop"}
    shop.fill(12_000)
    if not isinstance(shop, MySQLShop):  # each 500th of these is a bad record
        shop.server.execute(
            f"ALTER TABLE {shop.table} ADD COLUMN at timestamp;\nINSERT INTO {shop.table} SELECT -n, 'n', n, "
            "CASE WHEN n % 500 = 0 THEN timestamp 'infinity' END FROM generate_series(1, 3000) n;\n"
            f"ANALYZE {shop.table}"
        )
    shop.start_connector(connect)
    send, attempts = TableSink._send, iter(range(100))
    monkeypatch.setattr(task_plans, "SMALL_BATCH", 1500)  # two parts have more

    def crashing(sink: TableSink, request: ChangeSet) -> Any:
        number = next(attempts)
        if number % 4 == 1:
            raise CrashError
        outcome = send(sink, request)
        if number % 4 == 3:
            raise CrashError
        return outcome

    monkeypatch.setattr(TableSink, "_send", crashing)
    told: list[str] = []
    with shop.changing():
        for number in range(20):
            try:
                told = shop.load()
                break
            except (CrashError, TemporaryError):
                if number == 2:
                    shutil.rmtree(shop.folder / "state")  # the checkpoint, with the key index
    monkeypatch.undo()
    assert len(told) == 1
    assert "equal to the database" in told[0], told
    if replica is not None:
        with psycopg.connect(replica.url) as connection:
            read = f"SELECT seq_tup_read + idx_tup_fetch FROM pg_stat_user_tables WHERE relname = '{shop.table}'"
            ((rows,),) = connection.execute(read.encode()).fetchall()
        assert rows > 10_000
    if not isinstance(shop, MySQLShop):
        letters = shop.spark.table(shop.config().dead_letter_table).where(f"table = '{shop.target}'")
        values = [json.loads(row["value"])["id"] for row in letters.collect()]
        assert sorted(values) == [-3000, -2500, -2000, -1500, -1000, -500]
        shop.server.execute(f"DELETE FROM {shop.table} WHERE at = 'infinity'")
    assert wait_until(shop.catches_up)


@pytest.mark.parametrize(
    ("statement", "again", "expected"),
    [
        ("TRUNCATE {}", "was written anew", "was written anew"),
        (
            "ALTER TABLE {} ALTER amount TYPE text USING 'much'",
            "have other types now",
            "or altered while it was loaded",
        ),
        (
            "ALTER TABLE {0} DROP CONSTRAINT {0}_pkey, ADD PRIMARY KEY (id, name)",
            "or altered while it was loaded",
            "or altered while it was loaded",
        ),
        ("DROP TABLE {}", "does not exist", "there is no table"),
    ],
)
def test_a_table_that_is_changed_as_a_whole_meanwhile(
    shop: Shop, connect: Connect, monkeypatch: pytest.MonkeyPatch, statement: str, again: str, expected: str
) -> None:
    """Seen by a user with the rights that docs/load.md names, and by the next load."""
    shop.fill(5_000)
    role = f"reader_{shop.prefix}"
    shop.server.execute(
        f"CREATE ROLE {role} LOGIN PASSWORD 'reading';\nGRANT SELECT ON {shop.table} TO {role};\n"
        f"GRANT pg_monitor TO {role}"
    )
    shop.database |= {"user": role, "password": "reading"}
    shop.start_connector(connect)
    take_in, parts = Loading._take_in, iter(range(100))

    def altering(self: Loading, *arguments: Any) -> None:
        if next(parts) == 1:
            shop.server.execute(statement.format(shop.table))
        take_in(self, *arguments)

    monkeypatch.setattr(Loading, "_take_in", altering)
    monkeypatch.setattr(loading, "_FIRST_PAUSE", 0.0)
    with pytest.raises(RowdeltaError, match=again) as raised:
        shop.load()
    assert "reading" not in str(raised.value)
    with pytest.raises(RowdeltaError, match=expected):
        shop.load()
