"""One topic has messages of many tables of the source: each entry takes its own, from its own position."""

import json
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from confluent_kafka import Producer
from pyspark.sql import DataFrame, SparkSession

from sink.commands import inspection
from sink.config import Config
from sink.errors import RowdeltaError, TemporaryError
from sink.run import supervisor
from sink.run.pipeline import Pipeline
from sink.run.supervisor import Member, Supervisor
from sink.sources.kafka import KafkaSource
from sink.sources.source import Range
from sink.spark.joint import read_once
from sink.spark.versions import to_arrow
from sink.table import task_plans
from sink.table.microbatch import TableSink
from tests.delta.log_model import DeltaLog
from tests.sink.harness import CrashError
from tests.sink.test_kafka import Running
from tests.sink.test_source_tables import message
from tests.stack.kafka import Kafka
from tests.stack.process import wait_until

pytestmark = [pytest.mark.spark, pytest.mark.kafka]


@dataclass
class Shop:
    """A topic, and a job whose entries take some of its tables."""

    spark: SparkSession
    folder: Path
    kafka: Kafka
    catalog: str
    tables: dict[str, dict[str, Any]] = field(default_factory=lambda: {"orders": {}, "items": {}, "users": {}})
    options: dict[str, str] = field(default_factory=dict)
    trigger: str = "available-now"

    def __post_init__(self) -> None:
        self.topic = f"shared.{uuid4().hex[:10]}"
        self.kafka.create_topic(self.topic, 2)

    def config(self) -> Config:
        lake = {"type": "hadoop", "warehouse": str(self.spark.conf.get("spark.sql.catalog.lake.warehouse"))}
        if self.catalog == "delta":
            lake = {"type": "delta", "warehouse": str(self.folder / "warehouse")}
        return Config.model_validate(
            {
                "sink": {"id": "shop", "checkpoint": str(self.folder / "state"), "trigger": self.trigger},
                "source": {
                    "type": "kafka",
                    "format": "debezium-json",
                    "options": {"kafka.bootstrap.servers": self.kafka.bootstrap_servers, **self.options},
                    "discovery_interval": "500 milliseconds",
                },
                "maintenance": {"budget": 0, "expire": None, "orphans": None},
                "catalogs": {"lake": lake},
                "tables": [
                    {"source": {"topic": self.topic, "table": f"shop.{name}"}, "target": self.target(name), **more}
                    for name, more in self.tables.items()
                ],
            }
        )

    def target(self, table: str) -> str:
        return f"lake.{self.topic.replace('.', '_')}.{table}"

    def produce(self, *messages: tuple[Any, Any]) -> None:
        producer = Producer({"bootstrap.servers": self.kafka.bootstrap_servers, "enable.idempotence": True})
        for key, value in messages:
            texts = [None if text is None else json.dumps(text).encode() for text in (key, value)]
            producer.produce(self.topic, key=texts[0], value=texts[1], partition=key["id"] % 2)
        assert producer.flush(60) == 0

    def pipeline(self) -> Pipeline:
        return Pipeline(self.spark, self.config())

    def run(self) -> None:
        self.pipeline().run()

    def rows(self, table: str) -> dict[int, str]:
        return {row["id"]: row["name"] for row in self._read(self.target(table))}

    def has(self, **tables: dict[int, str]) -> bool:
        """Whether these are the rows of tables."""
        there = self.spark.catalog.tableExists
        rows = {name: self.rows(name) if there(self.target(name)) else None for name in tables}
        print(rows) if rows != tables else None
        return rows == tables

    def letters(self) -> list[tuple[str, str]]:
        letters = self._read(self.config().dead_letter_table)
        return sorted((letter["table"].rpartition(".")[2], letter["error_class"]) for letter in letters)

    def _read(self, target: str) -> list[dict[str, Any]]:
        if self.catalog == "iceberg":
            rows = to_arrow(self.spark.table(target))
        else:
            log = DeltaLog(self.folder / "warehouse" / target.partition(".")[2].replace(".", "/"))
            log.check()
            rows = log.rows()
        found: list[dict[str, Any]] = rows.to_pylist()
        return found


@pytest.fixture
def shop(spark: SparkSession, tmp_path: Path, kafka: Kafka, request: pytest.FixtureRequest) -> Shop:
    spark.conf.set("spark.sql.shuffle.partitions", "2")
    return Shop(spark, tmp_path, kafka, getattr(request, "param", "iceberg"))


def test_a_table_whose_messages_come_late_in_the_topic(shop: Shop) -> None:
    """Its columns are those of its own messages, wherever they are."""
    shop.produce(*(message("orders", number, "o") for number in range(1500)))
    shop.produce(message("users", 1, "u1", city="Oslo"))
    shop.tables = {"users": {}, "items": {}}
    shop.run()
    assert shop.rows("users") == {1: "u1"}
    shop.produce(message("items", 1, "i1"))
    shop.run()
    assert shop.rows("items") == {1: "i1"}


def test_large_micro_batches_are_read_once(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that only grows has a job of its own, so Kafka's records are kept on disk until all have read them."""
    monkeypatch.setattr(task_plans, "SMALL_BATCH", 0)
    shop.tables["users"] = {"mode": "append"}
    kept, frames = list[bool](), list[DataFrame]()

    @contextmanager
    def noting(frame: DataFrame) -> Iterator[None]:
        with read_once(frame):
            yield
            kept.append(frame.storageLevel.useDisk)
        frames.append(frame)

    monkeypatch.setattr(supervisor, "read_once", noting)
    for number in range(3):
        shop.produce(*(message(name, number, f"{name}{number}") for name in shop.tables))
        shop.run()
    assert {name: shop.rows(name) for name in shop.tables} == {
        name: {number: f"{name}{number}" for number in range(3)} for name in shop.tables
    }
    assert kept == [True] * 3
    assert not any(frame.storageLevel.useDisk for frame in frames)


@pytest.mark.parametrize("shop", ["iceberg", "delta"], indirect=True)
def test_each_entry_takes_its_table_and_goes_on_from_its_own_position(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One table fails in the middle, and goes on from its own position while the others are further."""
    shop.produce(
        message("orders", 1, "o1"), message("items", 1, "i1"), message("users", 1, "u1"), message("audit", 1, "a1"),
        message("orders", 2, "o2"), message("items", 2, "i2"), message("users", 2, "u2", city="Oslo"),
    )  # fmt: skip
    shop.run()
    assert {name: shop.rows(name) for name in shop.tables} == {
        "orders": {1: "o1", 2: "o2"}, "items": {1: "i1", 2: "i2"}, "users": {1: "u1", 2: "u2"}
    }  # fmt: skip
    commit = TableSink.commit

    def failing(sink: TableSink, *arguments: Any) -> Any:
        if sink.table.name == shop.target("items"):
            raise CrashError
        return commit(sink, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(TableSink, "commit", failing)
        shop.produce(
            message("orders", 1, "o1", "d"), ({"id": 1}, None), message("items", 1, "i1", "d"), ({"id": 1}, None),
            message("items", 2, "i2b", "u"), message("users", 2, "u2b", "u"),
        )  # fmt: skip
        with pytest.raises(RowdeltaError):
            shop.run()
    assert (shop.rows("orders"), shop.rows("items")) == ({2: "o2"}, {1: "i1", 2: "i2"})
    assert shop.rows("users") == {1: "u1", 2: "u2b"}
    shop.run()
    assert shop.rows("items") == {2: "i2b"}, "from where it was"
    assert shop.letters() == [], "a table that no entry takes is left out"

    # another entry reads the topic from its start, and one of them keeps what nobody takes
    shop.tables = {**shop.tables, "audit": {"other_tables": "reject"}}
    shop.produce(message("stray", 1, "s1"), message("orders", 3, "o3"), message("audit", 1, "a1b", "u"))
    shop.run()
    assert (shop.rows("audit"), shop.rows("orders")) == ({1: "a1b"}, {2: "o2", 3: "o3"})
    assert shop.letters() == [("audit", "other_table")]
    assert "\n".join(inspection.status(shop.spark, shop.config())).count("lag: 0 messages behind") == 4
    assert "ok" in inspection.check(shop.spark, shop.config())


@pytest.mark.parametrize("shop", ["iceberg"], indirect=True)
def test_a_pattern_finds_the_tables_that_messages_name(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a new one while the job runs, or after a crash. Each has all of its messages, and none reads the topic from
    its start for a name that came late.
    """
    users = {"source": {"topic": shop.topic, "table": "shop.users"}, "target": shop.target("people")}
    pattern = {"source": {"topic": shop.topic, "table": r"shop\.(.*)"}, "target": shop.target("$1")}
    shop.tables = {"users": users, "(.*)": pattern}
    shop.produce(message("users", 1, "u1"), message("orders", 1, "o1"), message("items", 2, "i2"))
    told = "\n".join(inspection.check(shop.spark, shop.config()))
    for name in ("orders", "items"):
        assert f"shop.{name} in {shop.topic} -> {shop.target(name)}: will be created" in told
    assert f"{shop.topic} -> {shop.target('people')}: will be created" in told
    assert f"pattern shop\\.(.*) in {shop.topic} -> {shop.target('$1')}: looks for more every 500 milliseconds" in told
    assert not (shop.folder / "state").exists()

    shop.trigger = "200 milliseconds"
    search, first = KafkaSource._names_in, iter([True])

    def searching_once(source: KafkaSource, part: Range) -> Collection[str]:
        if next(first, False):
            return search(source, part)
        raise TemporaryError("what a micro-batch reads isn't looked at again")

    monkeypatch.setattr(KafkaSource, "_names_in", searching_once)
    with Running(shop) as running:  # type: ignore[arg-type]  # it needs `pipeline` only
        assert wait_until(lambda: shop.has(orders={1: "o1"}, items={2: "i2"}, people={1: "u1"}), 60)
        shop.produce(message("orders", 2, "o2"), message("audit", 1, "a1", city="Oslo"), message("audit", 3, "a3"))
        assert wait_until(lambda: shop.has(orders={1: "o1", 2: "o2"}, audit={1: "a1", 3: "a3"}), 60)
        shop.produce(message("audit", 3, "a3", "d"), ({"id": 3}, None), message("users", 2, "u2"))
        assert wait_until(lambda: shop.has(audit={1: "a1"}, people={1: "u1", 2: "u2"}), 60)
    assert running.error is None
    monkeypatch.undo()
    audit = {row["key"]: row["value"] for row in shop.spark.sql(f"SHOW TBLPROPERTIES {shop.target('audit')}").collect()}
    assert json.loads(audit["rowdelta.shop.start"]) == {"0": 1, "1": 2}

    # it can't be opened at first: the others go on, and a run later it has all, also if nothing is remembered
    shop.trigger = "available-now"
    open_member = Supervisor._open

    def failing(supervisor: Supervisor, member: Member) -> None:
        if member.target == shop.target("log"):
            raise CrashError
        open_member(supervisor, member)

    with monkeypatch.context() as patch:
        patch.setattr(Supervisor, "_open", failing)
        shop.produce(message("log", 1, "l1"), message("log", 2, "l2"), message("orders", 3, "o3"))
        with pytest.raises(RowdeltaError):
            shop.run()
    assert shop.has(orders={1: "o1", 2: "o2", 3: "o3"})
    shutil.rmtree(shop.folder / "state")
    shop.options = {"startingOffsets": "latest"}
    shop.run()
    assert shop.has(log={1: "l1", 2: "l2"}, audit={1: "a1"}, people={1: "u1", 2: "u2"})
    assert "\n".join(inspection.status(shop.spark, shop.config())).count("lag: 0 messages behind") == 5
