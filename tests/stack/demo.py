"""`make demo-stack`: a bank and a shop change, and their rows arrive in Iceberg and Delta tables, for you to watch.

It starts the stack of docker-compose.yml from packages, without Docker, runs the same configuration
(docs/examples/stack/sink.yaml) and pgbench's transactions, shows how the tables grow, compares them with their sources,
and stops all of it. Ctrl-C ends it at any time.
"""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import FrameType

from tests.stack import workloads
from tests.stack.compare import Row, differences, rows_of_delta, rows_of_iceberg, rows_of_mysql, rows_of_postgres
from tests.stack.connect import place, place_of_kafka
from tests.stack.container import VARIABLE
from tests.stack.prepare import EXAMPLE, missing
from tests.stack.process import free_ports
from tests.stack.sink_process import SinkProcess
from tests.stack.stack import Stack, running_stack

SHOWN_EVERY = 3.0
RATE = 50
PATIENCE = 600.0
"""Seconds after the last change until the tables must equal their sources."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)

Read = Callable[[Stack, str], list[Row]]


def _postgres(stack: Stack, query: str) -> list[Row]:
    return rows_of_postgres(stack.postgres, query)


def _mysql(stack: Stack, query: str) -> list[Row]:
    return rows_of_mysql(stack.mysql, query)


# target, columns, the source's table, and who reads it
_TABLES: Sequence[tuple[str, str, str, Read]] = [
    ("ice.shop.orders", "id, customer, status, amount, placed", "orders", _postgres),
    ("lake.shop.lines", "order_id, line, item, price", "lines", _postgres),
    ("ice.crm.customers", "id, name, city, since", "customers", _mysql),
    ("ice.bank.pgbench_branches", "bid, bbalance", "pgbench_branches", _postgres),
    ("ice.bank.pgbench_tellers", "tid, bid, tbalance", "pgbench_tellers", _postgres),
    ("ice.bank.pgbench_accounts", "aid, bid, abalance", "pgbench_accounts", _postgres),
    ("lake.bank.pgbench_history", "tid, bid, aid, delta, mtime", "pgbench_history", _postgres),
]


def main() -> int:
    arguments = argparse.ArgumentParser(prog="python -m tests.stack.demo", description=__doc__)
    arguments.add_argument("--transactions", type=int, default=2500, help="of the bank (default: 2500)")
    transactions = arguments.parse_args().transactions
    print("fetching the databases unless they are here (`make stack` fetches all)", flush=True)
    if what := missing():
        print("\n".join(what), file=sys.stderr)
        return 1
    return interruptible(lambda: _demo(transactions))


def interruptible(demo: Callable[[], int]) -> int:
    """Run a demo with servers that are processes, until it ends or a signal ends it. Returns its exit code."""
    os.environ[VARIABLE] = "local"  # that is what it shows
    for number in _SIGNALS:
        signal.signal(number, _interrupt)
    try:
        return demo()
    except KeyboardInterrupt:
        print("\nstopped", flush=True)
        return 130


def _demo(transactions: int) -> int:
    with ExitStack() as ends:
        # Ends after the stack: without their database the bank's clients end too.
        threads = ends.enter_context(ThreadPoolExecutor())
        print("starting Postgres, MariaDB, Kafka, Connect, a registry, an S3 store and a REST catalog", flush=True)
        started = time.monotonic()

        def told(name: str) -> None:
            print(f"  {name} after {time.monotonic() - started:.0f} s", flush=True)

        stack = ends.enter_context(running_stack(told))
        sink = SinkProcess(EXAMPLE / "sink.yaml", stack.folder, environment(stack))
        ends.callback(sink.stop)
        ends.callback(stopping)
        stack.postgres.execute(workloads.BANK)
        stack.postgres.execute((EXAMPLE / "postgres.sql").read_text(encoding="utf-8"))
        stack.mysql.execute((EXAMPLE / "mysql.sql").read_text(encoding="utf-8"))
        for name in ("postgres", "mysql"):
            print(f"  Debezium for {name}", flush=True)
            stack.connect.put(name, connector(stack, name))
        print(f"rowdelta run docs/examples/stack/sink.yaml, which prints to {sink.log}", flush=True)
        # In a thread: Ctrl-C can't come between the process and the note of its id.
        threads.submit(sink.start).result()
        print("the tables are loaded: rows in the table / in the source", flush=True)
        if failed := _compare(stack, sink):
            return failed
        print(f"the bank: {transactions} transactions, {RATE} a second", flush=True)
        bank = threads.submit(workloads.run_bank, stack.postgres, transactions, rate=RATE)
        while not bank.done():
            _show(stack)
            time.sleep(SHOWN_EVERY)
        bank.result()
        return _compare(stack, sink) or verify(sink, "docs/examples/stack/sink.yaml")


def _show(stack: Stack) -> None:
    """A line with the number of rows of each table, here and there."""
    counts = []
    for target, columns, table, source in _TABLES:
        (here,) = source(stack, f"SELECT count(*) FROM {table}")
        there = len(_rows(stack, target, columns.partition(",")[0]))
        counts.append(f"{table.removeprefix('pgbench_')} {there}/{here[0]}")
    print(f"{time.strftime('%H:%M:%S')}  " + "  ".join(counts), flush=True)


def _compare(stack: Stack, sink: SinkProcess) -> int:
    """Each table against its source, row by row."""
    deadline = time.monotonic() + PATIENCE
    for target, columns, table, source in _TABLES:
        wanted = source(stack, f"SELECT {columns} FROM {table}")
        while what := differences(wanted, _rows(stack, target, columns)):
            if time.monotonic() > deadline:
                print(f"{target} DIFFERS: {what}\n{sink.text()[-4000:]}", file=sys.stderr)
                return 1
            _show(stack)
            time.sleep(SHOWN_EVERY)
        print(f"{target} EQUAL: {len(wanted)} rows", flush=True)
    return 0


def verify(sink: SinkProcess, shown: str) -> int:
    """Compare a running sink's tables with their databases. Returns the exit code.

    :param shown: the configuration, as it is printed.
    """
    print(f"rowdelta verify {shown}", flush=True)
    done = sink.finish("verify", str(sink.config))
    print(done.stdout, end="", flush=True)
    if done.returncode:
        print(done.stderr[-4000:], file=sys.stderr)
    return done.returncode


def _rows(stack: Stack, target: str, columns: str) -> list[Row]:
    catalog, _, table = target.partition(".")
    read = rows_of_iceberg if catalog == "ice" else rows_of_delta
    return read(stack, table, columns.split(", "))


def connector(stack: Stack, name: str) -> dict[str, str]:
    """The connector of docs/examples/stack with this stack's addresses, and perhaps MariaDB in MySQL's place."""
    settings: dict[str, str] = json.loads((EXAMPLE / f"connector-{name}.json").read_text(encoding="utf-8"))
    server = stack.postgres if name == "postgres" else stack.mysql
    settings |= {
        **place(server),
        "database.user": server.user,
        "database.password": server.password,
    }
    if name == "postgres":
        settings["database.dbname"] = server.database
    else:
        settings["connector.class"] = stack.mysql.CONNECTOR
        settings["schema.history.internal.kafka.bootstrap.servers"] = place_of_kafka(stack.kafka)
    for side in ("key", "value"):
        settings[f"{side}.converter.apicurio.registry.url"] = stack.registry.own_url
    return settings


def environment(stack: Stack) -> dict[str, str]:
    """What docs/examples/stack/sink.yaml takes from its environment, for this stack's doors that want nothing."""
    return {
        "ROWDELTA_CHECKPOINT": str(stack.folder / "state"),
        "KAFKA_BOOTSTRAP_SERVERS": stack.kafka.bootstrap_servers,
        "SCHEMA_REGISTRY_URL": stack.registry.url,
        "CATALOG_URI": stack.catalog.uri,
        "S3_ENDPOINT": stack.s3.endpoint,
        "S3_KEY": stack.s3.KEY,
        "S3_SECRET": stack.s3.SECRET,
        "SHOP_JDBC_URL": stack.postgres.jdbc_url,
        "SHOP_USER": stack.postgres.user,
        "SHOP_PASSWORD": stack.postgres.password,
        "CRM_JDBC_URL": stack.mysql.jdbc_url,
        "CRM_USER": stack.mysql.user,
        "CRM_PASSWORD": stack.mysql.password,
        # any: nobody looks, and another may run beside it
        "ROWDELTA_HTTP": f"127.0.0.1:{free_ports(1)[0]}",
    }


def _interrupt(number: int, frame: FrameType | None) -> None:
    _ignore_more()
    raise KeyboardInterrupt


def stopping() -> None:
    _ignore_more()
    print("stopping everything", flush=True)


def _ignore_more() -> None:
    """Whoever presses Ctrl-C again while all is being stopped would leave processes behind."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    sys.exit(main())
