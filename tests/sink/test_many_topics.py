"""Several topics into one table: keys are told apart by the topic, or belong together; topics come and go."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any
from uuid import uuid4

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from pyspark.sql import SparkSession

from sink.config import Config
from sink.run.pipeline import Pipeline
from sink.spark.versions import to_arrow
from sink.table.microbatch import TableSink
from sink.targets.values import ChangeSet
from tests.delta.log_model import DeltaLog
from tests.sink.harness import CrashError
from tests.sink.test_kafka import Running
from tests.stack.kafka import Kafka

COLUMNS = {"shard": {"type": "string", "from": "_source"}, "id": "bigint", "name": "string"}


@dataclass
class Shards:
    """Databases with the same table, a topic for each, and the job that brings them together. `content` is theirs."""

    spark: SparkSession
    folder: Path
    kafka: Kafka
    catalog: str = "iceberg"
    table: dict[str, Any] = field(default_factory=dict)
    sink: dict[str, Any] = field(default_factory=dict)
    source: dict[str, Any] = field(default_factory=dict)
    options: dict[str, str] = field(default_factory=dict)
    topics: list[str] = field(default_factory=lambda: ["a", "b"])
    name: str = field(default_factory=lambda: f"s{uuid4().hex[:10]}")

    def __post_init__(self) -> None:
        self.content: dict[str, dict[int, str]] = {}
        self._random = Random(5)
        self._producer = Producer(
            {"bootstrap.servers": self.kafka.bootstrap_servers, "log_level": 0, "enable.idempotence": True}
        )

    def topic(self, shard: str) -> str:
        return f"{self.name}.{shard}-0"  # as a name may end

    @property
    def target(self) -> str:
        return f"lake.{self.name}.orders"

    def config(self) -> Config:
        warehouse = str(self.spark.conf.get("spark.sql.catalog.lake.warehouse"))
        lake = {"type": "hadoop", "warehouse": warehouse}
        if self.catalog == "delta":
            lake = {"type": "delta", "warehouse": str(self.folder / "warehouse")}
        entry = {
            "source": [self.topic(shard) for shard in self.topics],
            "target": self.target,
            "key": ["shard", "id"],
            "columns": COLUMNS,
        }
        options = {"kafka.bootstrap.servers": self.kafka.bootstrap_servers, **self.options}
        return Config.model_validate(
            {
                "sink": {"id": "shop", "checkpoint": str(self.folder / "state"), **self.sink},
                "source": {"type": "kafka", "format": "debezium-json", "options": options, **self.source},
                "maintenance": {"budget": 0, "expire": None, "orphans": None},
                "catalogs": {"lake": lake},
                "tables": [entry | self.table],
            }
        )

    def create(self, *shards: str, partitions: int = 1) -> None:
        for shard in shards:
            self.kafka.create_topic(self.topic(shard), partitions)
            self.content[shard] = {}

    def set(self, shard: str, rows: Mapping[int, str | None]) -> None:
        """Insert or update rows, or delete those without a name. After a delete comes Kafka's tombstone."""
        for number, name in rows.items():
            before = self.content[shard].pop(number, None)
            if name is not None:
                self.content[shard][number] = name
            after = None if name is None else {"id": number, "name": name}
            old = None if before is None else {"id": number, "name": before}
            self.send(shard, {"id": number}, {"op": "d" if after is None else "u", "before": old, "after": after})
            if name is None:
                self.send(shard, {"id": number}, None)
        self.flush()

    def change(self, count: int, *shards: str) -> None:
        """Rows that change at random, of the same keys in all shards."""
        for _ in range(count):
            shard, number = self._random.choice(shards or list(self.content)), self._random.randrange(20)
            delete = number in self.content[shard] and self._random.random() < 0.3
            self.set(shard, {number: None if delete else uuid4().hex[:6]})

    def send(self, shard: str, key: Any, value: Any) -> None:
        texts = [None if text is None else json.dumps(text).encode() for text in (key, value)]
        self._producer.produce(self.topic(shard), key=texts[0], value=texts[1])

    def flush(self) -> None:
        assert self._producer.flush(60) == 0

    def pipeline(self) -> Pipeline:
        return Pipeline(self.spark, self.config())

    def run(self) -> None:
        self.pipeline().run()

    def start(self) -> Running:
        self.sink["trigger"] = "200 milliseconds"
        return Running(self)  # type: ignore[arg-type]  # it needs `pipeline` only

    def delete(self, shard: str) -> None:
        admin = AdminClient({"bootstrap.servers": self.kafka.bootstrap_servers})
        admin.delete_topics([self.topic(shard)])[self.topic(shard)].result(30)

    def rows(self) -> list[dict[str, Any]]:
        if self.catalog == "delta":
            path = self.folder / "warehouse" / self.name / "orders"
            DeltaLog(path).check()
            frame = self.spark.read.format("delta").load(str(path))
        elif self.spark.catalog.tableExists(self.target):
            frame = self.spark.table(self.target)
        else:
            return []
        rows: list[dict[str, Any]] = to_arrow(frame).to_pylist()
        return rows

    def is_exact(self) -> bool:
        expected = sorted((self.topic(s), n, name) for s, rows in self.content.items() for n, name in rows.items())
        rows = sorted((row["shard"], row["id"], row["name"]) for row in self.rows())
        if rows != expected:
            print(f"the table has {rows}, not {expected}")
        return rows == expected


@pytest.fixture
def shards(spark: SparkSession, tmp_path: Path, kafka: Kafka, request: pytest.FixtureRequest) -> Shards:
    spark.conf.set("spark.sql.shuffle.partitions", "2")
    return Shards(spark, tmp_path, kafka, getattr(request, "param", "iceberg"))


of_both_formats = pytest.mark.parametrize("shards", ["iceberg", "delta"], indirect=True)


@pytest.mark.spark
@pytest.mark.kafka
@of_both_formats
def test_equal_keys_of_two_topics_are_two_rows_also_after_crashes(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards.options = {"maxOffsetsPerTrigger": "40"}
    shards.create("a")
    shards.create("b", partitions=2)
    shards.set("a", {1: "pen", 2: "ink", 3: "cap"})
    shards.set("b", {1: "Ada", 2: "Bob", 4: "Eve"})
    shards.run()
    assert shards.is_exact()
    send, attempts = TableSink._send, iter(range(100))

    def crashing(sink: TableSink, request: ChangeSet) -> Any:
        number = next(attempts)
        if number % 3 == 0:
            raise CrashError
        outcome = send(sink, request)
        if number % 3 == 1:
            raise CrashError
        return outcome

    monkeypatch.setattr(TableSink, "_send", crashing)
    for number in range(6):
        shards.change(30)
        if number == 3:
            shutil.rmtree(shards.folder / "state")  # the checkpoint, with the key index
        with pytest.raises(Exception):  # noqa: B017 - whatever a crash becomes
            shards.run()
    monkeypatch.undo()
    shards.run()
    assert shards.is_exact()
