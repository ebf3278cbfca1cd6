"""Several topics into one table: keys are told apart by the topic, or belong together; topics come and go."""

import json
import re
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
from pydantic import ValidationError
from pyspark.sql import SparkSession

from sink.commands import inspection, replay
from sink.commands.verify import verify
from sink.config import Config
from sink.deadletters.table import Selection
from sink.errors import ConfigError, DataError, TableError
from sink.run.pipeline import Pipeline
from sink.spark.versions import to_arrow
from sink.table.microbatch import TableSink
from sink.targets.values import ChangeSet
from tests.sink.harness import CrashError
from tests.sink.test_kafka import Running
from tests.stack.kafka import Kafka
from tests.stack.process import wait_until

COLUMNS = {"shard": {"type": "string", "from": "_source"}, "id": "bigint", "name": "string"}


@dataclass
class Shards:
    """Databases with the same table, a topic for each, and the job that brings them together. `content` is theirs."""

    spark: SparkSession
    folder: Path
    kafka: Kafka
    table: dict[str, Any] = field(default_factory=dict)
    sink: dict[str, Any] = field(default_factory=dict)
    source: dict[str, Any] = field(default_factory=dict)
    options: dict[str, str] = field(default_factory=dict)
    without_columns: bool = False
    without_key: bool = False
    topics: list[str] = field(default_factory=lambda: ["a", "b"])
    name: str = field(default_factory=lambda: f"s{uuid4().hex[:10]}")
    is_delta: bool = False

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
        lake = {"type": "hadoop", "warehouse": str(self.spark.conf.get("spark.sql.catalog.lake.warehouse"))}
        if self.is_delta:
            lake = {"type": "delta", "warehouse": str(self.folder / "warehouse")}
        entry: dict[str, Any] = {
            "source": [self.topic(shard) for shard in self.topics],
            "target": self.target,
            "key": ["shard", "id"],
            "columns": COLUMNS,
        }
        options = {"kafka.bootstrap.servers": self.kafka.bootstrap_servers, **self.options}
        if self.without_columns:
            del entry["columns"]
        if self.without_key:
            del entry["key"]
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

    def letters(self) -> list[dict[str, Any]]:
        letters: list[dict[str, Any]] = to_arrow(self.spark.table(f"lake.{self.name}.dead_letters")).to_pylist()
        return letters

    def rows(self) -> list[dict[str, Any]]:
        if self.is_delta:
            frame = self.spark.read.format("delta").load(str(self.folder / "warehouse" / self.name / "orders"))
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
def shards(spark: SparkSession, tmp_path: Path, kafka: Kafka) -> Shards:
    spark.conf.set("spark.sql.shuffle.partitions", "2")
    return Shards(spark, tmp_path, kafka)


@pytest.mark.spark
@pytest.mark.kafka
@pytest.mark.parametrize("is_delta", [False, True])
def test_equal_keys_of_two_topics_are_two_rows_also_after_crashes(
    shards: Shards, monkeypatch: pytest.MonkeyPatch, is_delta: bool
) -> None:
    shards.is_delta = is_delta
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
    for number in range(4):
        shards.change(30)
        if number == 2:
            shutil.rmtree(shards.folder / "state")  # the checkpoint, with the key index
        with pytest.raises(Exception):  # noqa: B017 - whatever a crash becomes
            shards.run()
    monkeypatch.undo()
    shards.run()
    assert shards.is_exact()


@pytest.mark.spark
@pytest.mark.kafka
def test_topics_come_and_go_while_the_job_runs(shards: Shards) -> None:
    """By a pattern with one target. A topic that comes is read from its first message, whatever the options say."""
    shards.table = {"source": {"pattern": rf"{shards.name}\..*"}}
    shards.source = {"discovery_interval": "500 milliseconds"}
    shards.options = {"startingOffsets": "latest"}
    shards.create("a", "b")
    with shards.start() as running:
        assert wait_until(lambda: any((shards.folder / "state").rglob("sources/0/0")), 60)  # the query knows its start
        shards.change(20)
        assert wait_until(shards.is_exact, 60)
        shards.create("c")
        shards.change(20)
        assert wait_until(shards.is_exact, 60)
        shards.delete("b")
        for _ in range(2):
            shards.change(10, "a", "c")
            assert wait_until(shards.is_exact, 60), "what came from the deleted topic stays"
        assert running.alive
    assert running.error is None
    # and while it was down
    shards.sink = {}
    shards.create("d")
    shards.change(20, "a", "d")
    shards.run()
    assert shards.is_exact()
    status = "\n".join(inspection.status(shards.spark, shards.config()))
    assert "lag: 0 messages behind" in status
    assert f'"{shards.topic("b")}-0": ' in status, "its position stays"


@pytest.mark.spark
@pytest.mark.kafka
def test_a_list_gets_another_topic_and_loses_one(shards: Shards, caplog: pytest.LogCaptureFixture) -> None:
    shards.create("a", "b", "c")
    shards.change(20, "a", "b")
    shards.topics = ["a", "typo"]
    with pytest.raises(ConfigError, match=r"has no topic '\w+\.typo-0'"):
        shards.run()
    assert not shards.rows()
    shards.topics = ["a", "b"]
    shards.run()
    shards.topics = ["a", "b", "c"]
    shards.change(20)
    shards.run()
    assert shards.is_exact()
    shards.delete("b")
    shards.change(10, "a", "c")
    shards.run()
    assert shards.is_exact()
    assert f"there is no topic {shards.topic('b')} any more" in caplog.text
    assert f"{shards.target}: there is no topic" not in "\n".join(inspection.check(shards.spark, shards.config()))


@pytest.mark.spark
@pytest.mark.kafka
def test_a_topic_that_a_table_had_alone_gets_others(shards: Shards) -> None:
    """And the table goes on from its position, also after a time without one of them."""
    shards.create("a", "b")
    shards.table = {"source": shards.topic("a")}
    shards.change(20, "a")
    shards.run()
    shards.table = {}
    shards.change(20)
    shards.run()
    assert shards.is_exact()
    shards.table = {"source": shards.topic("a")}
    with pytest.raises(TableError, match=rf"Write it as a list, source: \[{shards.topic('a')}\]"):
        shards.run()
    shards.table = {}
    shards.topics = ["a"]
    before = shards.content["b"].copy()
    shards.set("b", {1: "later"})
    shards.change(20, "a")
    shards.run()
    after, shards.content["b"] = shards.content["b"], before
    assert shards.is_exact()
    shards.topics, shards.content["b"] = ["a", "b"], after
    shards.run()
    assert shards.is_exact()
    # another topic under the same name isn't the one of the position
    shards.delete("b")
    assert wait_until(lambda: shards.topic("b") not in AdminClient(
        {"bootstrap.servers": shards.kafka.bootstrap_servers}
    ).list_topics(timeout=10).topics, 30)  # fmt: skip
    shards.create("b")
    with pytest.raises(TableError, match=rf"{shards.topic('b')}-0 is offset .* Was it deleted and created again"):
        shards.run()


@pytest.mark.spark
@pytest.mark.kafka
def test_a_truncate_of_one_topic_empties_no_others(shards: Shards) -> None:
    shards.create("a", "b")
    shards.set("a", {1: "pen"})
    shards.set("b", {1: "Ada"})
    shards.send("a", None, {"op": "t", "before": None, "after": None})
    shards.set("a", {2: "ink"})
    shards.run()
    assert shards.is_exact()
    (letter,) = shards.letters()
    assert "takes several topics, and this message empties the table of one of them" in letter["reason"]


@pytest.mark.spark
@pytest.mark.kafka
def test_dead_letters_of_several_topics_are_replayed_where_they_belong(shards: Shards) -> None:
    """Both are at the same partition and offset, and have the same key. The columns were too narrow for them."""
    shards.table = {"columns": COLUMNS | {"name": "int"}, "metadata": ["_offset"]}
    shards.create("a", "b")
    for name in ("1", "2"):
        shards.set("a", {1: name, 2: name})
        shards.set("b", {1: name, 2: name})
    shards.set("a", {1: "pen"})
    shards.set("b", {1: "Ada"})
    shards.set("b", {1: "3"})
    shards.run()
    assert sorted(letter["source"] for letter in shards.letters()) == [shards.topic("a"), shards.topic("b")]
    shards.spark.sql(f"ALTER TABLE {shards.target} DROP COLUMN name")
    shards.spark.sql(f"ALTER TABLE {shards.target} ADD COLUMN name string")
    shards.table = {"columns": COLUMNS, "metadata": ["_offset"]}
    (done,) = replay.replay(shards.spark, shards.config(), Selection())
    assert (done.applied, done.left) == (2, 0)
    rows = {(row["shard"], row["id"]): (row["name"], row["_offset"]) for row in shards.rows()}
    assert rows[shards.topic("a"), 1] == ("pen", 4)
    assert rows[shards.topic("b"), 1] == ("3", 5), "what the topic says last"


@pytest.mark.spark
@pytest.mark.kafka
def test_monthly_topics_share_their_keys(shards: Shards) -> None:
    """The order is what the messages say, whichever topic is read first."""
    shards.table = {
        "shard": "none",
        "key": ["id"],
        "order_by": ["ts_ms"],
        "late": "drop",
        "columns": {"id": "bigint", "name": "string"},
    }
    shards.create("a", "b")

    def send(topic: str, ts_ms: int, number: int, name: str | None) -> None:
        row = {"id": number, "name": name or "gone"}
        images = {"op": "d", "before": row} if name is None else {"op": "u", "after": row}
        shards.send(topic, {"id": number}, {**images, "ts_ms": ts_ms})
        shards.flush()

    send("b", 20, 1, "february")
    send("a", 10, 1, "january")
    send("a", 11, 2, "january")
    shards.run()
    send("b", 21, 2, None)
    send("a", 12, 2, "late")
    shards.run()
    send("a", 13, 2, "later still")
    send("a", 14, 3, "new")
    shards.run()
    assert {row["id"]: row["name"] for row in shards.rows()} == {1: "february", 3: "new"}


@pytest.mark.spark
@pytest.mark.kafka
def test_columns_that_come_from_messages_and_a_topic_in_the_key(shards: Shards) -> None:
    """`_source` of `metadata`, with partitions of it, and a table that a topic has alone."""
    shards.table = {"metadata": ["_source"], "key": ["_source", "id"], "partition_by": ["_source"]}
    shards.without_columns = True
    shards.create("a", "b")
    shards.change(30)
    shards.run()
    shards.change(30)
    shards.run()
    rows = sorted((row["_source"], row["id"], row["name"]) for row in shards.rows())
    assert rows == sorted((shards.topic(s), n, name) for s, of in shards.content.items() for n, name in of.items())
    assert "ok" in inspection.check(shards.spark, shards.config())


@pytest.mark.spark
@pytest.mark.kafka
def test_a_snapshot_of_one_topic_comes_after_changes_of_another(shards: Shards) -> None:
    """In mode append a second snapshot would write rows twice, but this is the first one of its topic."""
    shards.table = {"mode": "append"}
    shards.without_key = True
    shards.create("a", "b")

    def send(shard: str, op: str, *numbers: int) -> None:
        for number in numbers:
            shards.send(shard, {"id": number}, {"op": op, "after": {"id": number, "name": op}})
        shards.flush()

    send("a", "r", 1, 2)
    send("a", "c", 3)
    shards.run()
    send("b", "r", 1)
    shards.run()
    rows = sorted((row["shard"], row["id"], row["name"]) for row in shards.rows())
    a, b = shards.topic("a"), shards.topic("b")
    assert rows == [(a, 1, "r"), (a, 2, "r"), (a, 3, "c"), (b, 1, "r")]
    send("a", "r", 9)
    with pytest.raises(DataError, match=f"the source was snapshot again .* in partition {a}-0"):
        shards.run()


def refusal(entry: Mapping[str, Any]) -> str:
    """What is wrong with an entry, or nothing."""
    values = {
        "sink": {"id": "shop", "checkpoint": "state"},
        "source": {"type": "kafka", "format": "debezium-json", "options": {"kafka.bootstrap.servers": "nowhere:1"}},
        "catalogs": {"lake": {"type": "hadoop", "warehouse": "warehouse"}},
        "tables": [{"target": "lake.shop.orders", **entry}],
    }
    try:
        Config.model_validate(values)
    except ValidationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"key": ["id"]}, r"nothing in its key tells .* Write metadata: \[_source\] and key: \[_source, id\]"),
        ({}, r"key: \[_source, …\]; or shard: "),
        ({"key": ["id"], "columns": COLUMNS}, r"Write key: \[shard, id\]; or shard: "),
        ({"key": ["id"], "shard": "tenant"}, "got tenant, which key doesn't name"),
        ({"key": ["id"], "shard": "none"}, "nothing says which topic's change is newer. Write order_by"),
        ({"key": ["id"], "mode": "append"}, "mode append compares no rows, so it has no key"),
        ({"mode": "append", "shard": "none"}, "mode append compares no rows. Leave shard out"),
        ({"source": "a", "key": ["id"], "shard": "id"}, "the table takes one topic. Leave shard out"),
        ({"source": ["a", "a"], "key": ["id"]}, "it names 'a' twice"),
        ({"source": {"pattern": "a("}, "shard": "none", "order_by": ["n"]}, "source is a pattern, so source must be"),
        ({"source": {"topic": "a", "pattern": "b"}}, "write a topic, a list of topics"),
        ({"source": {"topic": "a", "table": "t"}, "source_tables": ["t"]}, "source names the table too"),
        ({"source": "a", "columns": {"o": {"type": "bigint", "from": "_offset"}}, "key": ["o"]}, "names 'o', which"),
        ({"key": ["shard", "id"], "columns": COLUMNS}, ""),
        ({"key": ["_source", "id"], "metadata": ["_source"]}, ""),
        ({"key": ["tenant", "id"], "shard": "tenant"}, ""),
        ({"shard": "none", "order_by": ["ts_ms"]}, ""),
        ({"mode": "append"}, ""),
    ],
)  # fmt: skip
def test_entries(entry: Mapping[str, Any], message: str) -> None:
    found = refusal({"source": ["a", "b"], **entry})
    assert re.search(message, found) if message else not found, found


@pytest.mark.spark
@pytest.mark.kafka
def test_verify_compares_with_a_view_of_all_shards(shards: Shards) -> None:
    shards.create("a", "b")
    shards.change(30)
    shards.run()

    def compared() -> int:
        rows = [(shards.topic(s), n, name) for s, of in shards.content.items() for n, name in of.items()]
        path = str(shards.folder / uuid4().hex)
        shards.spark.createDataFrame(rows, "shard string, id bigint, name string").write.parquet(path)
        shards.table = {"verify": {"spark_table": f"parquet.`{path}`"}}
        (outcome,) = verify(shards.spark, shards.config(), [], 10, 60.0)
        assert outcome.error is None
        assert outcome.compared
        return outcome.different

    assert compared() == 0
    number = next(iter(shards.content["b"]))
    shards.content["b"][number] = "another"
    assert compared() == 1
    shards.table = {"verify": {"url": "jdbc:postgresql://nowhere/shop"}}
    (outcome,) = verify(shards.spark, shards.config(), [], 10, 60.0)
    assert "takes several topics, and a database has the rows of one" in str(outcome.error)
