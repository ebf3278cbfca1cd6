"""Databases change while the sink runs, and in the end its tables equal theirs: the whole stack, with nothing replaced.

`ROWDELTA_STACK_SCALE=20` runs twenty times as many transactions, and has so much more patience.
"""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from tests.stack import workloads
from tests.stack.compare import (
    Row,
    differences,
    rows_of_delta,
    rows_of_iceberg,
    rows_of_mysql,
    rows_of_postgres,
)
from tests.stack.connect import avro_converter, json_converter, mysql_connector, postgres_connector
from tests.stack.mysql import MySQL
from tests.stack.postgres import Postgres
from tests.stack.process import wait_until
from tests.stack.sink_process import SinkProcess, configuration, written
from tests.stack.stack import Stack

SCALE = int(os.environ.get("ROWDELTA_STACK_SCALE", "1"))
PATIENCE = 600 + 60 * SCALE
"""Seconds until the tables must equal their sources."""

ORDERS_AT_FIRST = {
    "id": "bigint",
    "customer": "string",
    "amount": "decimal(12,2)",
    "qty": "int",
    "status": "string",
    "note": "string",
    "doc": "string",
    "tags": "array<string>",
    "uid": "string",
    "placed": "timestamp",
    "due": "date",
    "changed": "timestamp_ntz",
    "paid": "boolean",
    "score": "double",
}
# JSON without schemas says of no number what it is.
JSON_TABLES: list[dict[str, Any]] = [
    {
        "source": "j.public.pgbench_history",
        "target": "ice.bank.pgbench_history",
        "mode": "append",
        "columns": {"tid": "int", "bid": "int", "aid": "int", "delta": "int", "mtime": "timestamp_ntz"},
    },
    {"source": r"j\.public\.(pgbench_.*)", "target": "ice.bank.$1"},
    {
        "source": "j.public.orders",
        "target": "ice.json.orders",
        "properties": {"format-version": "3"},
        "columns": ORDERS_AT_FIRST,
    },
    {
        "source": "j.public.lines",
        "target": "lake.json.lines",
        "columns": {"order_id": "bigint", "line": "int", "item": "string", "price": "decimal(10,2)"},
    },
    # Types as wide as they will be: a Delta table whose types change, delta-rs refuses to read.
    {
        "source": "e.public.orders",
        "target": "lake.envelope.orders",
        "columns": {**ORDERS_AT_FIRST, "amount": "decimal(14,2)", "qty": "bigint"},
    },
    {"source": r"e\.public\.(li.*)", "target": "lake.envelope.$1"},
    {"source": "m.shop.types", "target": "ice.envelope.types"},
]
AVRO_TABLES: list[dict[str, Any]] = [
    {"source": "a.public.orders", "target": "ice.avro.orders"},
    {"source": "a.public.lines", "target": "ice.avro.lines", "partition_by": ["bucket(4, order_id)"]},
    {"source": "b.shop.types", "target": "lake.avro.types"},
]

ORDERS = "id, customer, amount, qty, state, note, doc, tags, uid, placed, due, changed, score, channel, points"
LINES = "order_id, line, item, price"
TYPES = "id, t, s, m, b, ub, n, f, d, bits, flag, c, v, txt, bin, blb, day, dt, dt0, ts, tm, y, e, st, j, later"


@dataclass(frozen=True)
class Pair:
    """A table of the sink, and how each side is read."""

    name: str
    source: Callable[[], list[Row]]
    table: Callable[[], list[Row]]


def test_all_tables_equal_their_sources(stack: Stack) -> None:
    stack.postgres.execute(workloads.BANK + workloads.ORDERS)
    stack.mysql.execute(workloads.TYPES)
    connect(stack)
    door = stack.registry_door
    registry = {
        "schema.registry.url": door.url + stack.registry.PATH,
        "schema.registry.basic.auth.user.info": f"{door.user}:{door.password}",
        "schema.registry.ssl.ca.location": stack.certificate.path("ca.pem"),
    }
    folders = [stack.folder / name for name in ("json", "avro")]
    tables = [[table | {"verify": source_of(stack, table)} for table in each] for each in (JSON_TABLES, AVRO_TABLES)]
    configurations = [
        # the connector's default: by chance a negative amount in base64 may be digits only
        configuration(
            stack, folders[0], "json", "debezium-json", tables[0], format_options={"decimal.handling.mode": "precise"}
        ),
        configuration(stack, folders[1], "avro", "debezium-avro", tables[1], format_options=registry),
    ]
    with ExitStack() as ends:
        sinks = [
            SinkProcess(written(folder, values), folder) for folder, values in zip(folders, configurations, strict=True)
        ]
        for sink in sinks:
            ends.callback(sink.stop)
            sink.start()
        assert wait_until(lambda: all(" batch 0:" in sink.text() for sink in sinks), PATIENCE), sinks[0].text()
        with ThreadPoolExecutor() as threads:
            work = [
                threads.submit(workloads.run_bank, stack.postgres, 300 * SCALE),
                threads.submit(workloads.run_orders, stack.postgres, 120 * SCALE),
                threads.submit(workloads.run_types, stack.mysql, 60 * SCALE),
            ]
        for each in work:
            each.result()
        left = unequal(pairs(stack), time.monotonic() + PATIENCE)
        printed = "\n".join(sink.text()[-20000:] for sink in sinks)
        assert not left, "\n".join(f"{name}: {what}" for name, what in left.items()) + f"\n{printed}"
        with ThreadPoolExecutor() as threads:
            for verify in threads.map(lambda sink: sink.finish("verify", str(sink.config)), sinks):
                assert verify.returncode == 0, verify.stdout + verify.stderr
        for dead_letters in ("bank.dead_letters", "avro.dead_letters"):
            assert rows_of_iceberg(stack, dead_letters, ["reason"]) == [], printed
    # nothing of what lets it in is in what it prints
    for secret in (stack.s3.SECRET, stack.catalog_door.secret, stack.registry_door.password, "secret-of-kafka"):
        assert [sink.log for sink in sinks if secret in sink.text()] == []


def source_of(stack: Stack, table: dict[str, Any]) -> dict[str, str]:
    """The section `verify` of a table: its database, by the prefix of its topic."""
    prefix = table["source"][0]
    if prefix in "jea":
        database: Postgres | MySQL = stack.postgres
        slot = {"slot": prefix}
    else:
        database, slot = stack.mysql, {}
    return {"url": database.jdbc_url, "user": database.user, "password": database.password, **slot}


def connect(stack: Stack) -> None:
    """Debezium, once for each encoding of each database."""
    shop = r"public\.orders,public\.lines,public\.signals"
    signals = {"signal_data_collection": "public.signals"}
    # A TRUNCATE has an order only among the messages of one partition.
    truncates = {
        "skipped_operations": "none",
        "topic_creation_groups": "single",
        "topic_creation_single_include": r".*\.lines",
        "topic_creation_single_partitions": "1",
        "topic_creation_single_replication_factor": "1",
    }
    encodings = {
        "j": json_converter(schemas=False),
        "e": json_converter(schemas=True),
        "a": avro_converter(stack.registry.own_url),
    }
    for prefix, encoding in encodings.items():
        tables = shop + (r",public\.pgbench_.*" if prefix == "j" else "")
        stack.connect.put(
            prefix, postgres_connector(stack.postgres, prefix, tables, **signals, **truncates, **encoding)
        )
    for number, (prefix, encoding) in enumerate([("m", encodings["e"]), ("b", encodings["a"])]):
        more = {"bigint_unsigned_handling_mode": "precise", "database_server_id": str(4711 + number)}
        connector = mysql_connector(stack.mysql, prefix, r"shop\.types", stack.kafka, **more, **encoding)
        stack.connect.put(prefix, connector)


def unequal(all_pairs: list[Pair], deadline: float) -> dict[str, str]:
    """Wait until all are equal; what tells those apart which aren't at the deadline, by table."""
    left: dict[str, str] = {}
    for pair in all_pairs:
        source = pair.source()
        while what := differences(source, pair.table()):
            if time.monotonic() > deadline:
                left[pair.name] = what
                break
            time.sleep(1)
    return left


def pairs(stack: Stack) -> list[Pair]:
    # `columns` is a part of a SELECT: what it names, the table must have.
    def ice(name: str, columns: str, source: Callable[[], list[Row]]) -> Pair:
        return Pair(f"ice.{name}", source, lambda: rows_of_iceberg(stack, name, columns.split(", ")))

    def lake(name: str, columns: str, source: Callable[[], list[Row]]) -> Pair:
        return Pair(f"lake.{name}", source, lambda: rows_of_delta(stack, name, columns.split(", ")))

    def postgres(query: str) -> Callable[[], list[Row]]:
        return lambda: rows_of_postgres(stack.postgres, query)

    def bank(table: str, columns: str) -> Pair:
        return ice(f"bank.pgbench_{table}", columns, postgres(f"SELECT {columns} FROM pgbench_{table}"))

    orders = postgres(f"SELECT {ORDERS} FROM orders".replace("doc", "doc::text").replace("uid", "uid::text"))
    lines = postgres(f"SELECT {LINES} FROM lines")
    chosen = TYPES.replace(" tm,", " CAST(time_to_sec(tm) * 1000000 AS SIGNED),")

    def types() -> list[Row]:
        return rows_of_mysql(stack.mysql, f"SELECT {chosen} FROM types")

    return [
        ice("json.orders", ORDERS, orders),
        lake("json.lines", LINES, lines),
        lake("envelope.orders", ORDERS, orders),
        lake("envelope.lines", LINES, lines),
        ice("envelope.types", TYPES, types),
        ice("avro.orders", ORDERS, orders),
        ice("avro.lines", LINES, lines),
        lake("avro.types", TYPES, types),
        # their fillers are NULL: JSON without a schema doesn't say that there is such a column
        bank("branches", "bid, bbalance"),
        bank("tellers", "tid, bid, tbalance"),
        bank("history", "tid, bid, aid, delta, mtime"),
        bank("accounts", "aid, bid, abalance, filler"),
    ]


pytestmark = [pytest.mark.spark, pytest.mark.kafka, pytest.mark.timeout(600 + 2 * PATIENCE)]
