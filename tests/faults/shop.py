"""A shop whose changes come as files, the sink that applies them in a process of its own, and who restarts it.

    shop = Shop(tmp_path)
    with Supervised(shop, shop.configured(trigger="1 second")) as sink:
        sink.start()
        shop.write()
        sink.wait_until_applied()
        shop.check()

There are three tables. `orders` is kept in Iceberg and in Delta Lake by updates and deletes, `events` only grows: a
micro-batch that is applied twice shows there as rows that are there twice. PyIceberg and delta-rs read the tables.
"""

import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from random import Random
from threading import Lock
from typing import Any, Self

import pyarrow as pa
import yaml
from pyiceberg.table import StaticTable

from tests.sink.test_submit import LOCAL, Running
from tests.stack.process import wait_until
from tests.stack.sink_process import impatient

SECONDS = 240
"""How long something may take that takes seconds."""
ORDERS, DELTA_ORDERS, EVENTS = "lake.shop.orders", "delta.shop.orders", "lake.shop.events"
TARGETS = (ORDERS, DELTA_ORDERS, EVENTS)
_LONG_AGO = 1_700_000_000


class Shop:
    """Change files of a random stream, and what the tables must hold after them. Another thread may write.

    :param has_notes: each order has a text too, which no compression makes much smaller.
    """

    def __init__(self, folder: Path, keys: int = 300, *, has_notes: bool = False) -> None:
        self.folder = folder
        self.files = 0
        self._keys = keys
        self._has_notes = has_notes
        self._random = Random(21)
        self._changes = 0
        self._orders: dict[int, int] = {}
        self._lock = Lock()
        for source in ("orders", "orders for delta", "events"):
            (folder / "changes" / source).mkdir(parents=True)

    def configured(self, trigger: str, name: str = "sink", **spark: str) -> Path:
        """A configuration of all tables. What runs by another name has another checkpoint."""
        columns = {"id": "bigint", "v": "bigint"} | ({"note": "string"} if self._has_notes else {})
        of_orders = {"key": ["id"], "columns": columns, "order_by": ["v"]}
        values: dict[str, Any] = {
            "sink": {
                "id": "shop",
                "checkpoint": f"./state of {name}",
                "trigger": trigger,
                "on_bad_record": "fail",
            },
            "source": {"type": "files", "format": "row-kind", "options": {"path_format": "json"}},
            "index": {"location": "./index"},
            # or rewrites beside the stream would take the files that a minor compaction is to merge
            "maintenance": {"budget": 0, "expire": None, "orphans": None},
            "catalogs": {
                "lake": {"type": "hadoop", "warehouse": "./warehouse"},
                "delta": {"type": "delta", "warehouse": "./warehouse/delta"},
            },
            "tables": [
                {
                    "source": "./changes/orders",
                    "target": ORDERS,
                    "partition_by": ["bucket(4, id)"],
                    **of_orders,
                },
                {"source": "./changes/orders for delta", "target": DELTA_ORDERS, **of_orders},
                {
                    "source": "./changes/events",
                    "target": EVENTS,
                    "mode": "append",
                    "columns": {"v": "bigint"},
                },
            ],
            "spark": LOCAL | {"spark.driver.memory": "1g", "spark.databricks.delta.snapshotPartitions": "2"} | spark,
        }
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(values))
        return path

    def write(self, rows: int = 60) -> None:
        """Add a file of changes to each table's source."""
        with self._lock:
            orders, events = list[str](), list[str]()
            for _ in range(rows):
                self._changes += 1
                key = self._random.randrange(self._keys)
                kind = "+I"
                if key in self._orders:
                    kind = "-D" if self._random.random() < 0.2 else "+U"
                if kind == "-D":
                    del self._orders[key]
                else:
                    self._orders[key] = self._changes
                note = {"note": _note(self._changes)} if self._has_notes else {}
                orders.append(json.dumps({"row_kind": kind, "id": key, "v": self._changes} | note))
                events.append(json.dumps({"row_kind": "+I", "v": self._changes}))
            self._publish("events", events)
            self._publish("orders", orders)
            self._publish("orders for delta", orders)
            self.files += 1

    def _publish(self, source: str, lines: Iterable[str]) -> None:
        hidden = self.folder / "unfinished"
        hidden.write_text("".join(f"{line}\n" for line in lines))
        os.utime(hidden, (_LONG_AGO + self.files, _LONG_AGO + self.files))
        hidden.rename(self.folder / "changes" / source / self._name(self.files))

    def is_applied(self, *targets: str) -> bool:
        """Whether the positions of these tables, by default of all, have the last file."""
        return all(self._name(self.files - 1) in self._newest_state(target) for target in targets or TARGETS)

    @staticmethod
    def _name(number: int) -> str:
        return f"{number:06d}.json"

    def location(self, target: str) -> Path:
        catalog, namespace, table = target.split(".")
        warehouse = self.folder / "warehouse"
        return (warehouse / "delta" if catalog == "delta" else warehouse) / namespace / table

    def index(self, target: str) -> Path:
        return self.folder / "index" / "shop" / target

    def _newest_state(self, target: str) -> str:
        location = self.location(target)
        if target == DELTA_ORDERS:
            # a commit after the one that set the position, such as a compaction, has no position
            commits = sorted((location / "_delta_log").glob("*.json"))[-3:]
            return "".join(commit.read_text() for commit in commits)
        metadata = self._metadata(location)
        return "" if metadata is None else metadata.read_text()

    @staticmethod
    def _metadata(location: Path) -> Path | None:
        versions = (location / "metadata").glob("v*.metadata.json")
        return max(versions, key=lambda path: int(path.name.split(".")[0][1:]), default=None)

    def check(self) -> None:
        """The tables hold what the source does, as other readers read them."""
        with self._lock:
            expected = sorted(self._orders.items())
            assert _pairs(self._read_iceberg(ORDERS)) == expected
            assert _pairs(self._read_delta()) == expected
            events = self._read_iceberg(EVENTS).column("v").to_pylist()
            twice = [v for v, count in Counter(events).items() if count > 1]
            assert not twice, twice[:20]
            assert sorted(events) == list(range(1, self._changes + 1))

    def last_snapshot(self, target: str) -> float:
        """The time of an Iceberg table's last snapshot, in seconds."""
        snapshot = self._iceberg(target).current_snapshot()
        assert snapshot is not None
        return snapshot.timestamp_ms / 1000

    def _iceberg(self, target: str) -> StaticTable:
        metadata = self._metadata(self.location(target))
        assert metadata is not None
        return StaticTable.from_metadata(str(metadata))

    def _read_iceberg(self, target: str) -> pa.Table:
        return self._iceberg(target).scan().to_arrow()

    def _read_delta(self) -> pa.Table:
        from deltalake import DeltaTable, QueryBuilder  # not there where only the tests of other Sparks run

        table = DeltaTable(str(self.location(DELTA_ORDERS)))
        return pa.table(QueryBuilder().register("t", table).execute("SELECT * FROM t").read_all())


def _note(number: int) -> str:
    """The text of the order that this change makes."""
    return sha256(str(number).encode()).hexdigest()


def _pairs(table: pa.Table) -> list[tuple[int, int]]:
    if "note" in table.column_names:
        assert table.column("note").to_pylist() == [_note(v) for v in table.column("v").to_pylist()]
    return sorted(zip(table.column("id").to_pylist(), table.column("v").to_pylist(), strict=True))


class Sink(Running):
    """A run of the sink."""

    def __init__(self, config: Path, log: Path) -> None:
        super().__init__(impatient("run", "--verbose", config), log)

    @property
    def code(self) -> int | None:
        """The exit code. None while it runs."""
        return self._child.poll()

    def kill(self) -> None:
        """End it and all processes that came of it at once."""
        for pid in (self._child.pid, *self.descendants()):
            send(pid, signal.SIGKILL)
        self._child.wait(SECONDS)
        for pid in self.descendants():  # what was being started meanwhile
            send(pid, signal.SIGKILL)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait for something that this run does. It fails if the run ends before."""
        assert wait_until(lambda: condition() or self.code is not None, SECONDS), self.log
        assert condition(), self.log

    def wait_for_end(self) -> int:
        return self._child.wait(SECONDS)


class Supervised:
    """Starts the sink, again and again, as a supervisor does. In the end nothing of it runs."""

    def __init__(self, shop: Shop, config: Path) -> None:
        self.shop = shop
        self.run: Sink | None = None
        self._config = config
        self._starts = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.run is not None:
            self.run.kill()

    def start(self, config: Path | None = None) -> Sink:
        """:param config: of this run, if it is another one."""
        assert self.run is None or self.run.code is not None
        config = config or self._config
        self._starts += 1
        self.run = Sink(config, self.shop.folder / f"{config.stem} {id(self)} {self._starts}.log")
        return self.run

    def running(self) -> Sink:
        """The run in progress; a new one if it has ended. It has done all that there was to do."""
        run = self.run
        if run is None or run.code is not None:
            run = self.start()
            self.shop.write()  # which shows when it is there
        self.wait_until_applied()
        return run

    def wait_until_applied(self) -> None:
        assert self.run is not None
        self.run.wait_for(self.shop.is_applied)


def send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
