"""A database is loaded while it changes and the sink is killed, by Kafka or without. In the end its tables equal it.

`ROWDELTA_KILLS=20` kills it so often.
"""

import os
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from random import Random
from typing import Any, Protocol

import psycopg
import pytest

from tests.stack import workloads
from tests.stack.compare import Row, differences, rows_in_warehouse, rows_of_mysql, rows_of_postgres
from tests.stack.connect import Connect, json_converter, mysql_connector, postgres_connector
from tests.stack.kafka import Kafka
from tests.stack.mariadb import running_mariadb
from tests.stack.mysql import MySQL
from tests.stack.postgres import Postgres, running_postgres
from tests.stack.process import running, wait_until
from tests.stack.sink_process import SinkProcess, written

KILLS = int(os.environ.get("ROWDELTA_KILLS", "1"))
PATIENCE = 600.0
_OF_CONNECT = ("tasks.", "topic.creation.", "offset.", "schema.history.")
"""How properties of a connector begin that its engine alone doesn't have."""

pytestmark = [pytest.mark.spark, pytest.mark.kafka, pytest.mark.timeout(1800 + 120 * KILLS)]


class Source(Protocol):
    """A database that changes.

    :param schema: the second part of its topics' names.
    :param tables: target -> columns that are compared.
    :param database: what the configuration says of it.
    """

    schema: str
    tables: Mapping[str, str]
    database: Mapping[str, str]

    def change(self, chance: Random, number: int) -> None:
        """Change rows for a second or two.

        :param number: how often it was done before. The first time a column is added.
        """

    def rows(self, table: str, columns: str) -> list[Row]: ...

    def connector(self, kafka: Kafka) -> dict[str, str]: ...

    def is_read(self) -> bool:
        """Whether a connector reads the log."""


class Bank:
    """TPC-B, and orders with lines: rows come, change, get other keys and go. Their long texts stay as they are."""

    schema = "public"
    tables: Mapping[str, str] = {
        "ice.bank.pgbench_accounts": "aid, bid, abalance, filler",
        "ice.bank.pgbench_tellers": "tid, bid, tbalance",
        "ice.bank.orders": "id, customer, amount, qty, status, note, tags, placed, due, changed, paid, score, channel",
        "lake.bank.lines": "order_id, line, item, price",
    }

    def __init__(self, server: Postgres) -> None:
        self._server = server
        self.database: Mapping[str, str] = {
            "url": server.jdbc_url,
            "user": server.user,
            "password": server.password,
            "slot": "load",
        }
        server.execute(workloads.BANK + workloads.ORDERS)
        server.execute(
            "INSERT INTO pgbench_accounts SELECT n, 1, 0, 'more' FROM generate_series(10001, 60000) n; ANALYZE"
        )

    def change(self, chance: Random, number: int) -> None:
        with psycopg.connect(self._server.url, autocommit=True) as connection:
            if not number:
                connection.execute("ALTER TABLE orders ADD COLUMN channel text")
            workloads.run_bank(self._server, 200, rate=100)
            new = 10_000 + chance.randrange(10**9)
            with connection.transaction():
                for statement, values in workloads.changes_of_orders(chance, new, "status"):
                    connection.execute(statement.encode(), values)
                connection.execute("UPDATE orders SET channel = 'web' WHERE id %% 7 = %s", (number % 7,))

    def rows(self, table: str, columns: str) -> list[Row]:
        return rows_of_postgres(self._server, f"SELECT {columns} FROM {table}")

    def connector(self, kafka: Kafka) -> dict[str, str]:
        names = ",".join(rf"public\.{target.rpartition('.')[2]}" for target in self.tables)
        return postgres_connector(self._server, "load", names)

    def is_read(self) -> bool:
        return rows_of_postgres(self._server, "SELECT count(*) FROM pg_replication_slots WHERE active") == [(1,)]


class Types:
    """Rows with the ends of each type's range."""

    schema = "shop"
    tables: Mapping[str, str] = {
        "ice.shop.types": (
            "id, t, s, m, b, ub, n, f, d, bits, flag, c, v, txt, bin, blb, day, dt, dt0, ts, tm, y, e, st, j, later"
        ),
    }

    def __init__(self, server: MySQL) -> None:
        self._server = server
        self.database: Mapping[str, str] = {
            "url": server.jdbc_url,
            "user": server.user,
            "password": server.password,
            "connector_user": "connector",
        }
        server.execute(
            workloads.TYPES + ";\nCREATE USER connector IDENTIFIED BY 'secret-of-connector';\n"
            "GRANT SELECT, RELOAD, PROCESS, SHOW DATABASES, REPLICATION SLAVE, REPLICATION CLIENT ON *.* TO connector"
        )
        with closing(server.connect()) as connection:
            for number in range(600):
                workloads.change_types(connection, Random(number), number)

    def change(self, chance: Random, number: int) -> None:
        with closing(self._server.connect()) as connection:
            if not number:
                connection.query("ALTER TABLE types ADD COLUMN later varchar(10)")
            for n in range(20):
                workloads.change_types(connection, chance, 600 + 20 * number + n)
                time.sleep(0.05)
            with connection.cursor() as cursor:
                cursor.execute("UPDATE types SET later = %s WHERE id %% 7 = %s", (str(number), number % 7))

    def rows(self, table: str, columns: str) -> list[Row]:
        # as the connector has them by default
        forms = {" tm,": " CAST(time_to_sec(tm) * 1000000 AS SIGNED),", " ub,": " CAST(ub AS SIGNED),"}
        for name, form in forms.items():
            columns = columns.replace(name, form)
        return rows_of_mysql(self._server, f"SELECT {columns} FROM {table}")

    def connector(self, kafka: Kafka) -> dict[str, str]:
        login = {"database.user": "connector", "database.password": "secret-of-connector"}
        return mysql_connector(self._server, "load", r"shop\.types", kafka) | login

    def is_read(self) -> bool:
        readers = "SELECT count(*) FROM information_schema.processlist WHERE command LIKE 'Binlog Dump%'"
        return rows_of_mysql(self._server, readers) == [(1,)]


@contextmanager
def changing(source: Source, chance: Random) -> Iterator[None]:
    """It changes all the time. An error of it is raised at the end."""
    over = threading.Event()

    def work() -> None:
        number = 0
        while not over.is_set():
            source.change(chance, number)
            number += 1

    with ThreadPoolExecutor() as threads:
        done = threads.submit(work)
        try:
            yield
        finally:
            over.set()
        done.result()


@pytest.mark.parametrize("by", ["kafka", "debezium"])
@pytest.mark.parametrize("kind", ["postgres", "mariadb"])
def test_tables_that_are_loaded_meanwhile_equal_their_sources(tmp_path: Path, kafka: Kafka, kind: str, by: str) -> None:
    with ExitStack() as ends:
        source: Source
        if kind == "postgres":
            source = Bank(ends.enter_context(running_postgres()))
        else:
            source = Types(ends.enter_context(running_mariadb()))
        folder, chance = tmp_path / "sink", Random(KILLS)
        if by == "kafka":
            connect = ends.enter_context(running(lambda place: Connect(place, kafka), "connect"))
            for target in source.tables:
                kafka.create_topic(_topic(source, target), 2)
            connect.put("load", source.connector(kafka) | json_converter(schemas=True) | {"snapshot.mode": "no_data"})
            assert wait_until(source.is_read)
        sink = SinkProcess(written(folder, _configuration(folder, kafka, source, by)), folder)
        ends.callback(sink.stop)
        with changing(source, chance):
            for _ in range(KILLS):
                sink.start()
                time.sleep(chance.uniform(3, 20))
                sink.kill()
            sink.start()
            assert wait_until(lambda: _is_loaded(sink, source), PATIENCE), sink.text()[-20000:]
        left, deadline = {}, time.monotonic() + PATIENCE
        for target, columns in source.tables.items():
            rows = source.rows(target.rpartition(".")[2], columns)
            while (what := differences(rows, rows_in_warehouse(folder, target, columns.split(", ")))) != "":
                if time.monotonic() > deadline:
                    left[target] = what
                    break
                time.sleep(1)
        assert not left, f"{left}\n{sink.text()[-20000:]}"
        if by == "kafka":
            sink.stop()
        verify = sink.finish("verify", str(sink.config))
        assert verify.returncode == 0, verify.stdout + verify.stderr
        assert not rows_in_warehouse(folder, f"ice.{next(iter(source.tables)).split('.')[1]}.dead_letters", ["reason"])


def _topic(source: Source, target: str) -> str:
    return f"load.{source.schema}.{target.rpartition('.')[2]}"


def _is_loaded(sink: SinkProcess, source: Source) -> bool:
    """Whether a run has applied changes to each table, which comes after its load."""
    return all(f"{target} batch " in sink.text() for target in source.tables)


def _configuration(folder: Path, kafka: Kafka, source: Source, by: str) -> dict[str, Any]:
    section: dict[str, Any] = {
        "type": "kafka",
        "format": "debezium-json",
        "options": {"kafka.bootstrap.servers": kafka.bootstrap_servers},
        "database": dict(source.database),
    }
    if by == "debezium":
        connector = source.connector(kafka)
        own = {name: value for name, value in connector.items() if not name.startswith(_OF_CONNECT)}
        section = {"type": "debezium", "buffer": str(folder / "buffer"), "connector": own}
    return {
        "sink": {"id": "load", "checkpoint": str(folder / "state"), "trigger": "1 second"},
        "source": section,
        "load": {"auto": True, "connections": 2, "part_rows": 10_000 if source.schema == "public" else 300},
        "catalogs": {
            "ice": {"type": "hadoop", "warehouse": str(folder / "ice")},
            "lake": {"type": "delta", "warehouse": str(folder / "lake")},
        },
        "spark": {"spark.master": "local[2]", "spark.ui.enabled": "false", "spark.sql.shuffle.partitions": "2"},
        "tables": [{"source": _topic(source, target), "target": target} for target in source.tables],
    }
