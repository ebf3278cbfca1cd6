"""A database is loaded while it changes and the sink is killed, by Kafka or without. In the end its tables equal it.

`ROWDELTA_KILLS=20` kills it so often.
"""

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import psycopg
import pytest

from tests.stack import workloads
from tests.stack.compare import differences, rows_in_warehouse, rows_of_postgres
from tests.stack.connect import Connect, json_converter, postgres_connector
from tests.stack.kafka import Kafka
from tests.stack.postgres import Postgres, running_postgres
from tests.stack.process import wait_until
from tests.stack.sink_process import SinkProcess, written

KILLS = int(os.environ.get("ROWDELTA_KILLS", "1"))
PATIENCE = 300.0
TABLES = {
    "ice.bank.pgbench_accounts": "aid, bid, abalance, filler",
    "ice.bank.pgbench_tellers": "tid, bid, tbalance",
    "ice.bank.orders": "id, customer, amount, qty, status, note, tags, placed, due, changed, paid, score",
    "lake.bank.lines": "order_id, line, item, price",
}
"""Target -> columns that are compared."""
_READERS = "SELECT count(*) FROM pg_replication_slots WHERE active"
NAMES = ",".join(rf"public\.{target.rpartition('.')[2]}" for target in TABLES)

pytestmark = [pytest.mark.spark, pytest.mark.kafka, pytest.mark.timeout(600 + 120 * KILLS)]


@pytest.fixture
def postgres() -> Iterator[Postgres]:
    with running_postgres() as server:
        yield server


@pytest.mark.parametrize("by", ["kafka", "debezium"])
def test_tables_that_are_loaded_meanwhile_equal_their_sources(
    tmp_path: Path, kafka: Kafka, postgres: Postgres, by: str
) -> None:
    postgres.execute(workloads.BANK + workloads.ORDERS)
    postgres.execute(
        "INSERT INTO pgbench_accounts SELECT n, 1, 0, 'more' FROM generate_series(10001, 60000) n; ANALYZE"
    )
    connect = Connect(tmp_path, kafka)
    folder = tmp_path / "sink"
    sink = SinkProcess(written(folder, _configuration(folder, kafka, postgres, by)), folder)
    over, chance = threading.Event(), Random(KILLS)

    def change() -> None:
        while not over.is_set():
            with ThreadPoolExecutor() as threads:
                threads.submit(workloads.run_bank, postgres, 200, rate=100).result()
            _change_orders(postgres, chance)

    with ThreadPoolExecutor() as threads:
        try:
            if by == "kafka":
                connect.start()
                for target in TABLES:
                    kafka.create_topic(f"load.public.{target.rpartition('.')[2]}", 2)
                connector = postgres_connector(postgres, "load", NAMES) | json_converter(schemas=True)
                connect.put("load", connector | {"snapshot.mode": "no_data"})
                assert wait_until(lambda: rows_of_postgres(postgres, _READERS) == [(1,)])
            changes = threads.submit(change)
            for _ in range(KILLS):
                sink.start()
                time.sleep(chance.uniform(3, 20))
                sink.kill()
            sink.start()
            assert wait_until(lambda: _is_loaded(sink), PATIENCE), sink.text()[-20000:]
            over.set()
            changes.result()
            left, deadline = {}, time.monotonic() + PATIENCE
            for target, columns in TABLES.items():
                source = rows_of_postgres(postgres, f"SELECT {columns} FROM {target.rpartition('.')[2]}")
                while (what := differences(source, rows_in_warehouse(folder, target, columns.split(", ")))) != "":
                    if time.monotonic() > deadline:
                        left[target] = what
                        break
                    time.sleep(1)
            assert not left, f"{left}\n{sink.text()[-20000:]}"
            sink.stop()
            verify = sink.finish("verify", str(sink.config)) if by == "kafka" else None
            assert verify is None or verify.returncode == 0, verify.stdout + verify.stderr
            assert not rows_in_warehouse(folder, "ice.bank.dead_letters", ["reason"])
        finally:
            over.set()
            sink.stop()
            if by == "kafka":
                connect.stop()


def _is_loaded(sink: SinkProcess) -> bool:
    """Whether a run has applied changes to each table, which comes after its load."""
    return all(f"{target} batch " in sink.text() for target in TABLES)


def _change_orders(postgres: Postgres, chance: Random) -> None:
    """Rows come, change, get other keys and go. Their long texts stay as they are."""
    new = 10_000 + chance.randrange(10**9)
    with psycopg.connect(postgres.url, autocommit=True) as connection, connection.transaction():
        for statement, values in workloads.changes_of_orders(chance, new, "status"):
            connection.execute(statement.encode(), values)


def _configuration(folder: Path, kafka: Kafka, postgres: Postgres, by: str) -> dict[str, Any]:
    database = {"url": postgres.jdbc_url, "user": postgres.user, "password": postgres.password}
    source: dict[str, Any] = {
        "type": "kafka",
        "format": "debezium-json",
        "options": {"kafka.bootstrap.servers": kafka.bootstrap_servers},
        "database": {**database, "slot": "load"},
    }
    if by == "debezium":
        source = {
            "type": "debezium",
            "buffer": str(folder / "buffer"),
            "connector": {
                "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
                "database.hostname": postgres.host,
                "database.port": str(postgres.port),
                "database.user": postgres.user,
                "database.password": postgres.password,
                "database.dbname": postgres.database,
                "topic.prefix": "load",
                "slot.name": "load",
                "publication.name": "load",
                "publication.autocreate.mode": "filtered",
                "table.include.list": NAMES,
            },
        }
    return {
        "sink": {"id": "load", "checkpoint": str(folder / "state"), "trigger": "1 second"},
        "source": source,
        "load": {"auto": True, "connections": 2, "part_rows": 10_000},
        "catalogs": {
            "ice": {"type": "hadoop", "warehouse": str(folder / "ice")},
            "lake": {"type": "delta", "warehouse": str(folder / "lake")},
        },
        "spark": {"spark.master": "local[2]", "spark.ui.enabled": "false", "spark.sql.shuffle.partitions": "2"},
        "tables": [
            {"source": f"load.public.{target.rpartition('.')[2]}", "target": target}
            | ({"verify": {**database, "slot": "load"}} if by == "kafka" else {})
            for target in TABLES
        ],
    }
