"""`make demo-database`: a bank's tables are mirrored from a Postgres while they change, without Kafka and Docker.

It starts an embedded Postgres and pgbench's transactions (TPC-B), runs docs/examples/database/sink.yaml, which copies
two tables into Iceberg and Delta and follows them, and compares them with `rowdelta verify`. Ctrl-C ends it.
The tables stay in the folder.
"""

import argparse
import itertools
import shutil
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from sink.commands.demo import prepare
from tests.stack import postgres, workloads
from tests.stack.demo import PATIENCE, interruptible, stopping, verify
from tests.stack.jars import HERE, NotInstalledError
from tests.stack.postgres import Postgres, running_postgres
from tests.stack.sink_process import SinkProcess

EXAMPLE = HERE.parents[1] / "docs" / "examples" / "database" / "sink.yaml"
ACCOUNTS = 100_000
RATE = 20
STREAMED = 5.0
"""Seconds for which changes are followed before the comparison."""
BRIEF = {"SPARK_SUBMIT_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
"""In the minute that they live, the JVMs would take a third of their time to compile well what they hardly use."""
TARGETS = ("ice.bank.accounts", "lake.bank.tellers")


def main() -> int:
    arguments = argparse.ArgumentParser(prog="python -m tests.stack.demo_database", description=__doc__)
    arguments.add_argument("--folder", type=Path, default=Path("demo-database"), help="where the tables are to be")
    folder = arguments.parse_args().folder
    print("fetching Postgres unless it is here", flush=True)
    try:
        postgres.server()
    except NotInstalledError as error:
        print(error, file=sys.stderr)
        return 1
    return interruptible(lambda: _demo(folder))


def _demo(folder: Path) -> int:
    prepare(folder)
    shutil.copy(EXAMPLE, folder / "sink.yaml")
    with ExitStack() as ends:
        # Ends after the server: without it the bank's clients end too.
        pool = ends.enter_context(ThreadPoolExecutor())
        print(f"starting Postgres, with {ACCOUNTS:,} accounts of a bank", flush=True)
        database = ends.enter_context(running_postgres())
        sink = SinkProcess(folder / "sink.yaml", folder, environment(database) | BRIEF)
        sink.log.unlink(missing_ok=True)
        ends.callback(sink.stop)
        ends.callback(stopping)
        database.execute(workloads.BANK)
        database.execute(
            f"INSERT INTO pgbench_accounts SELECT n, 1, 0, '' FROM generate_series(10001, {ACCOUNTS}) n;\nANALYZE"
        )
        print(f"the bank: {RATE} transactions a second", flush=True)
        ending = threading.Event()
        ends.callback(ending.set)

        def work() -> None:
            for seed in itertools.takewhile(lambda _: not ending.is_set(), itertools.count()):
                workloads.run_bank(database, RATE, rate=RATE, seed=seed)

        bank = pool.submit(work)
        print(f"rowdelta run {folder / 'sink.yaml'}", flush=True)
        # In a thread: Ctrl-C can't come between the process and the note of its id.
        pool.submit(sink.start).result()
        shown, deadline = 0, time.monotonic() + PATIENCE
        while not all(f"INFO {target} batch" in sink.text() for target in TARGETS):
            shown = _show(sink, shown)
            if time.monotonic() > deadline or bank.done():
                print("a table has no change yet", file=sys.stderr)
                return 1
            time.sleep(0.5)
        time.sleep(STREAMED)
        ending.set()
        bank.result()
        _show(sink, shown)
        failed = verify(sink, str(sink.config))
    if not failed:
        print(
            f"Tables and database are equal. What to try next:\n  rowdelta history {folder}/sink.yaml accounts\n"
            f"  rowdelta show {folder}/sink.yaml tellers"
        )
    return failed


def _show(sink: SinkProcess, shown: int) -> int:
    """Print what the sink has said of its loads and micro-batches since. Returns how many lines there are."""
    lines = sink.text().splitlines(keepends=True)
    lines = lines[: -1 if lines and not lines[-1].endswith("\n") else None]
    for line in lines[shown:]:
        if " INFO " in line:
            print("  " + line.partition(" INFO ")[2].rstrip(), flush=True)
    return len(lines)


def environment(database: Postgres) -> dict[str, str]:
    """What docs/examples/database/sink.yaml takes from its environment."""
    return {
        "PGHOST": database.host,
        "PGPORT": str(database.port),
        "PGUSER": database.user,
        "PGPASSWORD": database.password,
        "PGDATABASE": database.database,
    }


if __name__ == "__main__":
    sys.exit(main())
