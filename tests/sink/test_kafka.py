"""The whole path from a real broker to a table that Iceberg's Spark reader sees."""

import base64
import json
import re
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any, Self
from unittest.mock import Mock
from uuid import uuid4

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions
from pyspark.sql import SparkSession

from sink.commands import inspection, reset
from sink.config import Config, SourceSection
from sink.config.table_parts import TableSource
from sink.errors import ConfigError, DataError, RowdeltaError, TableError, TemporaryError
from sink.run.pipeline import Pipeline
from sink.sources.kafka import KafkaSource
from sink.sources.source import Behind
from sink.spark.versions import to_arrow
from sink.table.plan import truncate_refused
from tests.changelog.messages import sample
from tests.sink.harness import before_commit, java_table
from tests.stack.kafka import Kafka
from tests.stack.process import free_ports, wait_until

pytestmark = [pytest.mark.spark, pytest.mark.kafka]

ORDERS = {"id": "bigint", "customer": "string", "amount": "decimal(12,2)"}
Event = dict[str, Any]
Row = Mapping[str, Any]


@pytest.fixture(scope="module")
def admin(kafka: Kafka) -> AdminClient:
    return AdminClient({"bootstrap.servers": kafka.bootstrap_servers})


@dataclass
class KafkaJob:
    """One sink on topics of its own. `tables` is topic -> columns; each topic's table has its name in a namespace of
    its own.
    """

    spark: SparkSession
    folder: Path
    servers: str
    tables: Mapping[str, Mapping[str, str]] = field(default_factory=lambda: {"orders": ORDERS})
    key: Mapping[str, Sequence[str]] = field(default_factory=dict)
    format: str = "debezium-json"
    sink: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    format_options: Mapping[str, Any] = field(default_factory=dict)
    table: Mapping[str, Any] = field(default_factory=dict)
    name: str = field(default_factory=lambda: f"n{uuid4().hex[:12]}")

    def topic(self, table: str = "orders") -> str:
        return f"{self.name}.{table}"

    def target(self, table: str = "orders") -> str:
        return f"lake.{self.name}.{table}"

    def config(self) -> Config:
        warehouse = str(self.spark.conf.get("spark.sql.catalog.lake.warehouse"))
        tables = [
            {
                "source": self.topic(name),
                "target": self.target(name),
                **({"key": key} if (key := list(self.key.get(name, ["id"]))) else {}),
                "columns": dict(columns),
                **self.table,
            }
            for name, columns in self.tables.items()
        ]
        return Config.model_validate(
            {
                "sink": {"id": "shop", "checkpoint": str(self.folder / "state"), **self.sink},
                "source": {
                    "type": "kafka",
                    "format": self.format,
                    "options": {"kafka.bootstrap.servers": self.servers, **self.options},
                    "format_options": dict(self.format_options),
                },
                "maintenance": {"budget": 0, "expire": None, "orphans": None},
                "catalogs": {"lake": {"type": "hadoop", "warehouse": warehouse}},
                "tables": tables,
            }
        )

    def pipeline(self) -> Pipeline:
        return Pipeline(self.spark, self.config())

    def run(self) -> None:
        self.pipeline().run()

    def lose_checkpoint(self) -> None:
        shutil.rmtree(self.folder / "state", ignore_errors=True)

    def produce(
        self, messages: Sequence[tuple[Any, Any]], partition: int = 0, table: str = "orders", timestamp: int = 0
    ) -> None:
        """Keys and values: None, bytes as they are, anything else as JSON.

        :param timestamp: of the messages, in milliseconds. 0 means now.
        """
        producer = Producer({"bootstrap.servers": self.servers, "enable.idempotence": True})
        for key, value in messages:
            producer.produce(
                self.topic(table), value=_bytes(value), key=_bytes(key), partition=partition, timestamp=timestamp
            )
        assert producer.flush(60) == 0

    def rows(self, table: str = "orders") -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = to_arrow(self.spark.table(self.target(table))).to_pylist()
        return sorted(rows, key=repr)

    def snapshots(self, table: str = "orders") -> int:
        return self.spark.sql(f"SELECT * FROM {self.target(table)}.snapshots").count()

    def current_snapshot(self) -> int:
        (row,) = self.spark.sql(f"SELECT snapshot_id FROM {self.target()}.refs WHERE name = 'main'").collect()
        return int(row["snapshot_id"])

    def properties(self) -> dict[str, str]:
        return {row["key"]: row["value"] for row in self.spark.sql(f"SHOW TBLPROPERTIES {self.target()}").collect()}

    def identifiers(self, table: str = "orders") -> set[str]:
        """The identifier fields, by Iceberg."""
        return set(java_table(self.spark, self.target(table)).schema().identifierFieldNames())


def _bytes(value: Any) -> bytes | None:
    return value if value is None or isinstance(value, bytes) else json.dumps(value, ensure_ascii=False).encode()


def order(number: int, customer: str, amount: str = "1.00") -> dict[str, Any]:
    return {"id": number, "customer": customer, "amount": Decimal(amount)}


def encoded(row: Row | None) -> dict[str, Any] | None:
    """A row as Debezium spells it: decimals are base64 of the unscaled integer."""
    if row is None:
        return None
    unscaled = int(row["amount"].scaleb(2))
    return {**row, "amount": base64.b64encode(unscaled.to_bytes(9, "big", signed=True)).decode()}


def event(op: str, before: Row | None, after: Row | None) -> tuple[Any, Any]:
    """Key and value of a change event."""
    row = after or before
    assert row is not None
    return {"id": row["id"]}, {"before": encoded(before), "after": encoded(after), "op": op}


def insert(row: Row, op: str = "c") -> tuple[Any, Any]:
    return event(op, None, row)


class Shop:
    """A source database that changes at random, and the messages which Debezium would send. `rows` is its content."""

    def __init__(self, partitions: int, seed: int) -> None:
        self.rows: dict[int, dict[str, Any]] = {}
        self._partitions = partitions
        self._random = Random(seed)
        self._next = 0

    def change(self, job: KafkaJob, count: int) -> None:
        messages: list[list[tuple[Any, Any]]] = [[] for _ in range(self._partitions)]
        for _ in range(count):
            for key, value in self._change():
                messages[key["id"] % self._partitions].append((key, value))
        for partition, batch in enumerate(messages):
            job.produce(batch, partition)

    def expected(self) -> list[dict[str, Any]]:
        return sorted(self.rows.values(), key=repr)

    def _change(self) -> list[tuple[Any, Any]]:
        what = self._random.choices(["insert", "update", "delete", "move"], [4, 6, 2, 1])[0] if self.rows else "insert"
        amount = str(Decimal(self._random.randint(-(10**12) + 1, 10**12 - 1)).scaleb(-2))
        if what == "insert":
            number = self._new_key()
            self.rows[number] = order(number, f"c{number}", amount)
            return [insert(self.rows[number])]
        number = self._random.choice(sorted(self.rows))
        before = self.rows[number]
        if what == "update":
            self.rows[number] = before | {"amount": Decimal(amount)}
            return [event("u", before, self.rows[number])]
        del self.rows[number]
        gone = [event("d", before, None), ({"id": number}, None)]
        if what == "delete":
            return gone
        moved = self._new_key()
        self.rows[moved] = before | {"id": moved}
        return [*gone, insert(self.rows[moved])]

    def _new_key(self) -> int:
        # a key that was used before comes back now and then
        unused = sorted(set(range(self._next)) - set(self.rows))
        if unused and self._random.random() < 0.3:
            return self._random.choice(unused)
        self._next += 1
        return self._next - 1


@pytest.mark.parametrize("mode", [pytest.param("upsert", marks=pytest.mark.versions), "changelog"])
def test_table_equals_source_over_restarts(spark: SparkSession, tmp_path: Path, kafka: Kafka, mode: str) -> None:
    """Three partitions, several micro-batches, restarts with the checkpoint, without it, and with nothing to do."""
    job = KafkaJob(spark, tmp_path, kafka.bootstrap_servers, options={"maxOffsetsPerTrigger": 60}, table={"mode": mode})
    kafka.create_topic(job.topic(), 3)
    shop = Shop(3, seed=7)
    shop.change(job, 150)
    job.run()
    assert job.rows() == shop.expected()
    assert job.snapshots() > 2
    shop.change(job, 80)
    job.run()
    assert job.rows() == shop.expected()
    job.lose_checkpoint()
    shop.change(job, 80)
    job.run()
    assert job.rows() == shop.expected()
    snapshots = job.snapshots()
    job.lose_checkpoint()
    job.run()
    assert job.snapshots() == snapshots
    assert any("lag: 0 messages behind" in line for line in inspection.status(spark, job.config()))


def test_real_messages_into_two_tables(spark: SparkSession, tmp_path: Path, kafka: Kafka) -> None:
    """Debezium's own messages of two tables, of which one is partitioned; one job, one stream, one position each."""
    tables = {
        "orders": ORDERS | {"status": "string", "created_at": "timestamp", "updated_at": "timestamp_ntz"},
        "comp": {"tenant": "int", "id": "string", "v": "string"},
    }
    job = KafkaJob(spark, tmp_path, kafka.bootstrap_servers, tables, key={"comp": ["tenant", "id"]})
    for table in tables:
        kafka.create_topic(job.topic(table))
        job.produce([(m.key, m.value) for m in sample("pgj", table)], table=table)
    job.run()
    rows = [{name: row[name] for name in ORDERS} | {"status": row["status"]} for row in job.rows()]
    assert rows == [
        order(1, "ann", "11.00") | {"status": "paid"},
        order(100, "bob", "99999999.99") | {"status": "new"},
        order(4, "cat", "5.00") | {"status": "new"},
        order(5, "tx1", "1.00") | {"status": None},
        order(6, "tx2", "2.00") | {"status": None},
        order(7, "after-ddl", "3.00") | {"status": "ddl2"},
        order(9, "nullts", "1.00") | {"status": None},
    ]
    assert job.rows("comp") == [{"tenant": 1, "id": "11111111-1111-1111-1111-111111111111", "v": "z"}]
    # only one of the two has something new
    job.produce([({}, {"op": "c", "before": None, "after": {"tenant": 2, "id": "x", "v": None}})], table="comp")
    before = job.snapshots()
    job.run()
    assert len(job.rows("comp")) == 2
    assert job.snapshots() == before


def test_row_kind_messages(spark: SparkSession, tmp_path: Path, kafka: Kafka) -> None:
    job = KafkaJob(spark, tmp_path, kafka.bootstrap_servers, format="row-kind", table={"partition_by": ["customer"]})
    kafka.create_topic(job.topic())

    def change(kind: str, number: int, customer: str) -> tuple[None, Row]:
        return None, {"row_kind": kind, "id": number, "customer": customer, "amount": 12.5}

    job.produce([change("+I", 1, "a"), change("+I", 2, "a"), change("-U", 1, "a"), change("+U", 1, "b")])
    job.run()
    job.produce([change("-U", 1, "b"), change("+U", 1, "c"), change("-D", 2, "a"), change("+I", 3, "a")])
    job.run()
    assert job.rows() == [order(1, "c", "12.50"), order(3, "a", "12.50")]


def test_aborted_transactions_are_left_out(spark: SparkSession, tmp_path: Path, kafka: Kafka) -> None:
    """Whoever wrote them sends them again, so that a table that only grows would have them twice."""
    job = KafkaJob(spark, tmp_path, kafka.bootstrap_servers, table={"mode": "append"}, key={"orders": ()})
    kafka.create_topic(job.topic())
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers, "transactional.id": job.name})
    producer.init_transactions(30)
    for number, ends in enumerate(
        (producer.abort_transaction, producer.commit_transaction, producer.abort_transaction)
    ):
        producer.begin_transaction()
        for key, value in (insert(order(1, "a")), insert(order(2, f"of {number}"))):
            producer.produce(job.topic(), json.dumps(value), json.dumps(key))
        producer.flush(30)
        ends(30)
    job.run()
    assert sorted(found["customer"] for found in job.rows()) == ["a", "of 1"]
    job.run()
    assert len(job.rows()) == 2
    assert any("0 messages behind" in line for line in inspection.status(spark, job.config()))


def test_no_column_is_inferred_from_an_aborted_transaction(spark: SparkSession, tmp_path: Path, kafka: Kafka) -> None:
    job = KafkaJob(spark, tmp_path, kafka.bootstrap_servers, table={"columns": None})
    kafka.create_topic(job.topic())
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers, "transactional.id": job.name})
    producer.init_transactions(30)
    producer.begin_transaction()
    key, value = insert({**order(1, "a"), "mistake": "a"})
    producer.produce(job.topic(), json.dumps(value), json.dumps(key))
    producer.flush(30)
    producer.abort_transaction(30)
    job.produce([insert(order(1, "a"))])
    job.run()
    assert [sorted(found) for found in job.rows()] == [sorted(ORDERS)]


def test_what_follows_an_open_transaction_waits(spark: SparkSession, tmp_path: Path, kafka: Kafka) -> None:
    job = KafkaJob(spark, tmp_path, kafka.bootstrap_servers)
    kafka.create_topic(job.topic())
    job.produce([insert(order(1, "a"))])
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers, "transactional.id": job.name})
    producer.init_transactions(30)
    producer.begin_transaction()
    key, value = insert(order(2, "b"))
    producer.produce(job.topic(), json.dumps(value), json.dumps(key))
    producer.flush(30)
    job.produce([insert(order(3, "c"))])
    job.run()
    assert [found["id"] for found in job.rows()] == [1]
    # a release that read uncommitted messages has gone on
    property_ = json.loads(property_of(job, "position"))
    property_["position"] = {"0": 3}
    spark.sql(f"ALTER TABLE {job.target()} SET TBLPROPERTIES ('rowdelta.shop.position' = '{json.dumps(property_)}')")
    job.run()
    producer.commit_transaction(30)
    job.produce([insert(order(4, "d"))])
    job.run()
    assert sorted(found["id"] for found in job.rows()) == [1, 4]


def property_of(job: KafkaJob, name: str) -> str:
    properties = job.spark.sql(f"SHOW TBLPROPERTIES {job.target()}").collect()
    (value,) = (line["value"] for line in properties if line["key"] == f"rowdelta.shop.{name}")
    return str(value)


def test_another_topic_is_not_read_from_the_position_in_the_first(
    spark: SparkSession, tmp_path: Path, kafka: Kafka
) -> None:
    job = KafkaJob(spark, tmp_path, kafka.bootstrap_servers)
    for name in ("orders", "other"):
        kafka.create_topic(job.topic(name))
    job.produce([insert(order(n, "a")) for n in range(3)])
    job.run()
    job.produce([insert(order(n, "b")) for n in range(10, 15)], table="other")
    config = job.config()
    tables = [section.model_copy(update={"feed": TableSource(topic=job.topic("other"))}) for section in config.tables]
    config = config.model_copy(update={"tables": tables})
    with pytest.raises(TableError, match=rf"in topic {job.topic()}, and the configuration says {job.topic('other')}"):
        Pipeline(spark, config).run()
    assert len(job.rows()) == 3
    property_ = f"'rowdelta.shop.same-offsets' = '{job.topic()}={job.topic('other')}'"
    spark.sql(f"ALTER TABLE {job.target()} SET TBLPROPERTIES ({property_})")
    Pipeline(spark, config).run()
    assert sorted(found["id"] for found in job.rows()) == [0, 1, 2, 13, 14]


def assert_refused(job: KafkaJob, error: type[RowdeltaError], message: str) -> None:
    """By `rowdelta check`, for the same reason as by `rowdelta run`."""
    with pytest.raises(error, match=message):
        list(inspection.check(job.spark, job.config()))
    with pytest.raises(error, match=message):
        job.run()


def test_latest_means_the_first_start(spark: SparkSession, tmp_path: Path, kafka: Kafka) -> None:
    """What arrives between a first start that found nothing and the second is not skipped: the first remembers where it
    began.
    """
    job = KafkaJob(spark, tmp_path, kafka.bootstrap_servers, options={"startingOffsets": "latest"})
    kafka.create_topic(job.topic(), 2)
    job.produce([insert(order(1, "before"))])
    job.run()
    assert job.rows() == []
    job.produce([insert(order(2, "after"))])
    job.produce([insert(order(3, "after"))], partition=1)
    job.lose_checkpoint()
    job.run()
    assert job.rows() == [order(2, "after"), order(3, "after")]


def test_starting_offsets_by_partition(spark: SparkSession, tmp_path: Path, kafka: Kafka) -> None:
    job = KafkaJob(spark, tmp_path, kafka.bootstrap_servers)
    kafka.create_topic(job.topic(), 3)
    for partition in range(3):
        job.produce([insert(order(10 * partition + n, "x")) for n in range(3)], partition)
    job.options = {"startingOffsets": json.dumps({job.topic(): {"0": 2, "1": -1}})}
    job.run()
    assert [row["id"] for row in job.rows()] == [2, 20, 21, 22]
    job.options = {"startingOffsets": "soon"}
    job.name += "x"
    kafka.create_topic(job.topic())
    assert_refused(job, ConfigError, r"startingOffsets: got 'soon', expected earliest, latest, or JSON")


@pytest.mark.parametrize(("offset", "retained"), [(999, "0 to 2"), (0, "1 to 2"), (-3, "0 to 2")])
def test_starting_offsets_that_the_topic_does_not_have_are_not_stored(
    spark: SparkSession, tmp_path: Path, kafka: Kafka, admin: AdminClient, offset: int, retained: str
) -> None:
    """Wrong offsets must not be stored, because then they would count instead of the corrected option."""
    job = KafkaJob(spark, tmp_path, kafka.bootstrap_servers)
    kafka.create_topic(job.topic())
    job.produce([insert(order(1, "a")), insert(order(2, "b"))])
    if retained == "1 to 2":
        admin.delete_records([TopicPartition(job.topic(), 0, 1)])[TopicPartition(job.topic(), 0, 1)].result(30)
    job.options = {"startingOffsets": json.dumps({job.topic(): {"0": offset}})}
    for _ in range(2):
        assert_refused(job, ConfigError, rf"startingOffsets: {job.topic()}-0 has offsets {retained}, got {offset}\.")
    job.options = {"startingOffsets": json.dumps({job.topic(): {"0": 1}})}
    job.run()
    assert job.rows() == [order(2, "b")]


def test_a_starting_timestamp_that_is_none(spark: SparkSession, tmp_path: Path, kafka: Kafka) -> None:
    job = KafkaJob(spark, tmp_path, kafka.bootstrap_servers, options={"startingTimestamp": "yesterday"})
    kafka.create_topic(job.topic())
    with pytest.raises(ConfigError, match=r"startingTimestamp: got 'yesterday', expected milliseconds"):
        job.run()
    job.options = {"startingTimestamp": "1767225600000"}
    assert list(inspection.check(spark, job.config()))[-1] == "ok"


def test_new_partitions_are_read_from_their_start(
    spark: SparkSession, tmp_path: Path, kafka: Kafka, admin: AdminClient
) -> None:
    job = KafkaJob(spark, tmp_path, kafka.bootstrap_servers)
    kafka.create_topic(job.topic())
    job.produce([insert(order(1, "a"))])
    job.run()
    admin.create_partitions([NewPartitions(job.topic(), 2)])[job.topic()].result(30)
    job.produce([insert(order(2, "b"))], partition=1)
    job.run()
    assert job.rows() == [order(1, "a"), order(2, "b")]


def delete_topic(admin: AdminClient, name: str) -> None:
    admin.delete_topics([name])[name].result(30)
    assert wait_until(lambda: name not in admin.list_topics(timeout=5).topics)


def test_a_topic_created_anew_that_is_longer_than_the_position(
    spark: SparkSession, tmp_path: Path, kafka: Kafka, admin: AdminClient
) -> None:
    job = KafkaJob(spark, tmp_path, kafka.bootstrap_servers)
    kafka.create_topic(job.topic())
    job.produce([insert(order(1, "a"))])
    job.run()
    before = property_of(job, "topic-id")
    job.run()
    assert property_of(job, "topic-id") == before
    delete_topic(admin, job.topic())
    kafka.create_topic(job.topic())
    job.produce([insert(order(n, "b")) for n in range(5, 8)])
    with pytest.raises(TableError, match=rf"topic {job.topic()} was created again .* its id was {before}") as refused:
        job.run()
    assert job.rows() == [order(1, "a")]
    property_, value = re.findall(r"property (\S+) to (\S+)\.", str(refused.value))[0]
    spark.sql(f"ALTER TABLE {job.target()} SET TBLPROPERTIES ('{property_}' = '{value}')")
    job.run()
    assert job.rows() == [order(1, "a"), order(6, "b"), order(7, "b")]
    assert property_of(job, "topic-id") == value.partition("=")[2] != before


def test_a_topic_created_anew_before_it_had_a_message(
    spark: SparkSession, tmp_path: Path, kafka: Kafka, admin: AdminClient
) -> None:
    """As by a connector that comes after the sink, to a topic that the broker had made itself."""
    job = KafkaJob(spark, tmp_path, kafka.bootstrap_servers)
    kafka.create_topic(job.topic())
    job.run()
    delete_topic(admin, job.topic())
    kafka.create_topic(job.topic(), 2)
    job.produce([insert(order(1, "a"))], partition=1)
    job.run()
    assert job.rows() == [order(1, "a")]


@pytest.mark.parametrize("partitions", [1, 2])
def test_messages_without_a_key_in_several_partitions_are_warned_of(
    spark: SparkSession, tmp_path: Path, kafka: Kafka, caplog: pytest.LogCaptureFixture, partitions: int
) -> None:
    job = KafkaJob(spark, tmp_path, kafka.bootstrap_servers)
    kafka.create_topic(job.topic(), partitions)
    for name in "ab":
        job.produce([(None, insert(order(1, name))[1])])
    job.run()
    warned = f"messages of one row may be in several of the 2 partitions of {job.topic()}" in caplog.text
    assert warned == (partitions == 2)


def test_a_topic_created_anew_is_refused(spark: SparkSession, tmp_path: Path, kafka: Kafka, admin: AdminClient) -> None:
    job = KafkaJob(spark, tmp_path, kafka.bootstrap_servers)
    kafka.create_topic(job.topic())
    job.produce([insert(order(n, "a")) for n in range(3)])
    job.run()
    delete_topic(admin, job.topic())
    with pytest.raises(ConfigError, match=r"has no topic .*Create it, or correct"):
        job.run()
    kafka.create_topic(job.topic())
    job.produce([insert(order(7, "b"))])
    assert_refused(job, TableError, r"is offset 3, but the topic ends at 1\. Was it deleted and created again\?")
    assert any("offset 3 is past the end" in line for line in inspection.status(spark, job.config()))
    assert [row["id"] for row in job.rows()] == [0, 1, 2]
    plan = reset.find(spark, job.config(), job.topic(), empty=False)
    assert plan is not None
    shown = "\n".join(plan.lines())
    assert '\n  position   {"0": 3}\n' in shown
    assert f"\n  topic      {job.topic()}, id " in shown
    plan.apply()
    job.run()
    assert [row["id"] for row in job.rows()] == [0, 1, 2, 7]


def test_messages_that_are_gone_are_not_skipped_silently(
    spark: SparkSession, tmp_path: Path, kafka: Kafka, admin: AdminClient
) -> None:
    """Retention has removed what the table hasn't had yet."""
    job = KafkaJob(spark, tmp_path, kafka.bootstrap_servers)
    kafka.create_topic(job.topic())
    job.produce([insert(order(1, "a"))])
    job.run()
    job.produce([insert(order(n, "b")) for n in range(2, 6)])
    admin.delete_records([TopicPartition(job.topic(), 0, 3)])[TopicPartition(job.topic(), 0, 3)].result(30)
    assert_refused(job, DataError, r"is offset 1, but Kafka has removed what follows before offset 3\.")
    lag = "  lag: 4 messages behind, of which Kafka has removed 2"
    assert lag in inspection.status(spark, job.config())
    (table,) = job.config().tables
    behind = KafkaSource(spark, job.config()).behind([(table, {"0": 1})])[table.id]["0"]
    assert behind.count == 2, "of those that are left"
    assert behind.seconds is not None
    assert 0 < behind.seconds < 600
    assert KafkaSource(spark, job.config()).behind([(table, {"0": 5})]) == {table.id: {"0": Behind(0, 0.0)}}
    assert job.rows() == [order(1, "a")]
    job.options = {"failOnDataLoss": "false"}
    job.run()
    assert job.rows() == [order(1, "a"), order(4, "b"), order(5, "b")]


def test_messages_of_a_new_partition_that_are_gone(
    spark: SparkSession, tmp_path: Path, kafka: Kafka, admin: AdminClient
) -> None:
    """The partition was added, and lost its first messages, while the job didn't run."""
    job = KafkaJob(spark, tmp_path, kafka.bootstrap_servers)
    kafka.create_topic(job.topic())
    job.produce([insert(order(1, "a"))])
    job.run()
    admin.create_partitions([NewPartitions(job.topic(), 2)])[job.topic()].result(30)
    job.produce([insert(order(n, "b")) for n in range(2, 6)], partition=1)
    admin.delete_records([TopicPartition(job.topic(), 1, 3)])[TopicPartition(job.topic(), 1, 3)].result(30)
    assert_refused(job, DataError, r"-1 is offset 0, but Kafka has removed what follows before offset 3\.")
    job.options = {"failOnDataLoss": "false"}
    job.run()
    assert job.rows() == [order(1, "a"), order(5, "b")]


def test_a_topic_that_became_shorter_than_the_position_while_the_job_runs(
    spark: SparkSession, tmp_path: Path, kafka: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an unclean election. With `failOnDataLoss: false` Spark reads on from the new end."""
    job = KafkaJob(spark, tmp_path, kafka.bootstrap_servers)
    kafka.create_topic(job.topic())
    job.produce([insert(order(n, "a")) for n in range(5)])
    source = KafkaSource(spark, job.config())
    (table,) = job.config().tables
    topic, position = job.topic(), {"0": 100}
    source._starts = {table.id: {topic: {"0": 100}}}
    monkeypatch.setattr(source, "_offsets", lambda _: ({topic: {"0": 5}}, {topic: {"0": 60}}))
    with pytest.raises(TableError, match=r"is offset 100, but the topic ends at 5\."):
        source.batch(Mock(), 1, Mock(), table, position)


def test_messages_that_expire_while_the_job_runs(
    spark: SparkSession, tmp_path: Path, kafka: Kafka, admin: AdminClient
) -> None:
    """To run again would not bring them back, so it ends as the next start would."""
    job = KafkaJob(spark, tmp_path, kafka.bootstrap_servers, sink={"trigger": "100 milliseconds"})
    kafka.create_topic(job.topic())
    job.produce([insert(order(1, "a"))])

    def expire() -> None:
        job.produce([insert(order(n, "b")) for n in range(2, 6)])
        admin.delete_records([TopicPartition(job.topic(), 0, 3)])[TopicPartition(job.topic(), 0, 3)].result(30)

    with before_commit(expire), pytest.raises(DataError, match=r"messages expired .*failOnDataLoss: false") as caught:
        job.run()
    assert caught.value.exit_code == 3
    assert job.rows() == [order(1, "a")]
    with pytest.raises(DataError, match="Kafka has removed what follows"):
        job.run()


DEAD_COLUMNS = ["table", "source", "partition", "offset", "key", "value", "error_class", "reason"]


def test_dead_letters(spark: SparkSession, tmp_path: Path, kafka: Kafka) -> None:
    """Each bad message is kept once, with its place and content. The good messages around it are applied."""
    job = KafkaJob(spark, tmp_path, kafka.bootstrap_servers)
    kafka.create_topic(job.topic(), 2)
    truncate = json.dumps({"op": "t", "before": None, "after": None}).encode()
    job.produce([insert(order(1, "a")), (b"k", b"no JSON \xff"), insert(order(2, "b"))])
    job.produce([(None, truncate), insert(order(3, "c")), ({"id": 9}, b'{"op":"d","before":{"id":null}}')], partition=1)
    job.run()

    def dead_letters() -> list[dict[str, Any]]:
        found = to_arrow(spark.table(f"lake.{job.name}.dead_letters").select(*DEAD_COLUMNS)).to_pylist()
        return sorted(found, key=lambda row: (row["partition"], row["offset"]))

    place = {"table": job.target(), "source": job.topic()}
    expected: list[tuple[Any, ...]] = [
        (0, 1, b"k", b"no JSON \xff", "unparseable", "the value is not a JSON object"),
        # between partitions there is no order
        (1, 0, None, truncate, "unsupported_event", truncate_refused(job.config().tables[0], {"0": 2, "1": 3})),
        (1, 2, b'{"id": 9}', b'{"op":"d","before":{"id":null}}', "null_key", "key column id is null or missing"),
    ]
    assert dead_letters() == [place | dict(zip(DEAD_COLUMNS[2:], values, strict=True)) for values in expected]
    assert [row["id"] for row in job.rows()] == [1, 2, 3]
    job.lose_checkpoint()
    job.produce([insert(order(4, "d"))])
    job.run()
    assert len(dead_letters()) == 3
    job.produce([(None, b"again")])
    job.run()
    assert dead_letters()[1]["value"] == b"again"


def test_a_bad_message_can_stop_the_job(spark: SparkSession, tmp_path: Path, kafka: Kafka) -> None:
    job = KafkaJob(spark, tmp_path, kafka.bootstrap_servers, sink={"on_bad_record": "fail"})
    kafka.create_topic(job.topic())
    job.produce([insert(order(1, "a")), (None, b"no JSON")])
    with pytest.raises(DataError, match=rf"1 bad record.*{job.topic()}-0 offset 1: the value is not a JSON object"):
        job.run()
    assert job.rows() == []


def test_a_new_snapshot_of_the_source_needs_upsert(spark: SparkSession, tmp_path: Path, kafka: Kafka) -> None:
    job = KafkaJob(spark, tmp_path, kafka.bootstrap_servers, table={"mode": "changelog"})
    kafka.create_topic(job.topic())
    job.produce([insert(order(1, "a"), "r"), insert(order(2, "b"), "r"), event("u", order(1, "a"), order(1, "c"))])
    job.run()
    expected = [order(1, "c"), order(2, "b")]
    assert job.rows() == expected
    job.produce([insert(row, "r") for row in expected])
    with pytest.raises(DataError, match=r"the source was snapshot again .*Use mode: upsert"):
        job.run()
    job.table = {"mode": "upsert"}
    job.run()
    assert job.rows() == expected


def test_a_new_snapshot_needs_upsert_also_right_after_it(spark: SparkSession, tmp_path: Path, kafka: Kafka) -> None:
    """In that mode nobody looks which changes are of the stream."""
    job = KafkaJob(spark, tmp_path, kafka.bootstrap_servers)
    kafka.create_topic(job.topic(), 2)
    job.produce([insert(order(1, "a"), "r"), event("u", order(1, "a"), order(1, "c"))])
    job.run()
    job.table = {"mode": "changelog", "deletes": "equality"}
    job.produce([insert(order(2, "b"), "r")], partition=1)  # nothing has come from there before
    job.run()
    expected = [order(1, "c"), order(2, "b")]
    assert job.rows() == expected
    job.produce([insert(order(1, "c"), "r")])
    with pytest.raises(DataError, match=r"the source was snapshot again .* in partition 0\).*Use mode: upsert"):
        job.run()
    assert job.rows() == expected
    job.table = {"mode": "upsert"}
    job.run()
    assert job.rows() == expected


@pytest.mark.parametrize("is_repeated", [False, True])
def test_a_new_snapshot_in_the_same_micro_batch_needs_upsert(
    spark: SparkSession, tmp_path: Path, kafka: Kafka, is_repeated: bool
) -> None:
    """As when Debezium has been set up anew before the sink first runs."""
    job = KafkaJob(spark, tmp_path, kafka.bootstrap_servers, table={"mode": "changelog", "deletes": "equality"})
    kafka.create_topic(job.topic(), 2)
    job.produce([insert(order(1, "a"), "r"), insert(order(2, "b"))])
    if is_repeated:
        job.produce([insert(order(1, "a"), "r")])
    # the other partition has its only snapshot later
    job.produce([insert(order(number, "e"), "r") for number in range(5, 9)], partition=1)
    if is_repeated:
        with pytest.raises(DataError, match=r"the source was snapshot again \(op r .* in partition 0\).*mode: upsert"):
            job.run()
        assert job.rows() == []
    else:
        job.run()
        assert len(job.rows()) == 6


TRUNCATE = None, {"op": "t", "before": None, "after": None}


def test_a_truncate_forgets_what_was_streamed_before_it(spark: SparkSession, tmp_path: Path, kafka: Kafka) -> None:
    """A snapshot of the source that comes after it writes no row twice. One that comes before it does, until then."""
    job = KafkaJob(spark, tmp_path, kafka.bootstrap_servers, table={"mode": "changelog", "deletes": "equality"})
    kafka.create_topic(job.topic())
    job.produce([insert(order(1, "a"), "r"), insert(order(2, "b"))])
    job.run()
    job.produce([TRUNCATE])
    job.run()
    job.produce([insert(order(1, "a"), "r")])
    job.run()
    assert job.rows() == [order(1, "a")]
    # all of it in one micro-batch, twice: streamed rows count if they come after the last one
    for _ in range(2):
        job.produce([insert(order(3, "c")), TRUNCATE, insert(order(1, "b"), "r"), insert(order(4, "d"), "r")])
        job.run()
        assert job.rows() == [order(1, "b"), order(4, "d")]
    job.produce([TRUNCATE, insert(order(1, "c"), "r"), insert(order(5, "e"))])
    job.run()
    expected = [order(1, "c"), order(5, "e")]
    for again in ([insert(order(1, "c"), "r")], [TRUNCATE, insert(order(6, "f"), "r")]):
        job.produce(again)
        with pytest.raises(DataError, match=r"the source was snapshot again .*Use mode: upsert"):
            job.run()
        assert job.rows() == expected


def test_what_belongs_to_a_position_goes_back_with_the_table(spark: SparkSession, tmp_path: Path, kafka: Kafka) -> None:
    """After a rollback to the middle of the source's snapshot, the rest of it is read again. It isn't a second one."""
    job = KafkaJob(spark, tmp_path, kafka.bootstrap_servers, table={"mode": "changelog"})
    kafka.create_topic(job.topic())
    job.produce([insert(order(1, "a"), "r")])
    job.run()
    first, streamed = job.current_snapshot(), "rowdelta.shop.streamed"
    job.produce([insert(order(2, "b"), "r"), insert(order(3, "c"))])
    job.run()
    last = job.current_snapshot()
    assert job.properties()[streamed] == "[0]"
    for snapshot in (first, last, first):  # forward again too
        spark.sql(f"CALL lake.system.set_current_snapshot('{job.name}.orders', {snapshot})")
        if snapshot == last:
            job.run()
            assert job.current_snapshot() == last
            assert job.properties()[streamed] == "[0]"
    job.run()
    assert job.rows() == [order(1, "a"), order(2, "b"), order(3, "c")]
    assert job.properties()[streamed] == "[0]"
    spark.sql(f"CALL lake.system.set_current_snapshot('{job.name}.orders', {first})")
    job.produce([TRUNCATE])
    job.run()
    assert job.properties()[streamed] == "[]"
    assert job.rows() == []
    # forward again, to what was committed before this
    spark.sql(f"CALL lake.system.set_current_snapshot('{job.name}.orders', {last})")
    (member,) = job.pipeline()._supervisor.members.values()
    assert member.sink is not None
    assert member.sink.table.property(streamed) == "[0]"


def small_batches(spark: SparkSession, folder: Path, kafka: Kafka) -> tuple[KafkaJob, int]:
    """A job that reads two messages at once from a topic of two partitions, and the time of the first ones."""
    job = KafkaJob(spark, folder, kafka.bootstrap_servers, options={"maxOffsetsPerTrigger": "2"})
    kafka.create_topic(job.topic(), 2)
    return job, int(time.time() * 1000) - 60_000


def test_a_partition_that_is_added_comes_after_what_is_older(
    spark: SparkSession, tmp_path: Path, kafka: Kafka, admin: AdminClient
) -> None:
    """Keys move to other partitions then, also to lower ones. A small micro-batch doesn't reach the older messages."""
    job, now = small_batches(spark, tmp_path, kafka)
    job.produce([insert(order(1, "a"))], partition=0, timestamp=now)
    job.produce([insert(order(2, "a"))], partition=1, timestamp=now)
    job.run()
    for second in range(1, 7):
        job.produce([insert(order(1, f"old {second}"), "u")], partition=1, timestamp=now + second * 1000)
    admin.create_partitions([NewPartitions(job.topic(), 3)])[job.topic()].result(30)
    job.produce([insert(order(3, "c"))], partition=2, timestamp=now + 10_000)
    job.produce([insert(order(1, "new"), "u")], partition=0, timestamp=now + 11_000)
    job.produce([insert(order(2, "new"), "u")], partition=2, timestamp=now + 12_000)
    job.run()
    assert job.rows() == [order(1, "new"), order(2, "new"), order(3, "c")]


def test_the_first_message_of_a_partition_that_was_always_there_waits_for_no_other(
    spark: SparkSession, tmp_path: Path, kafka: Kafka
) -> None:
    """No key has moved to it. So a micro-batch is as large as the source's options say."""
    job, now = small_batches(spark, tmp_path, kafka)
    job.produce([insert(order(1, "a"))], partition=0, timestamp=now)
    job.run()
    for second in range(1, 9):
        job.produce([insert(order(second, "b"), "u")], partition=0, timestamp=now + second * 1000)
    job.produce([insert(order(9, "c"))], partition=1, timestamp=now + 10_000)
    before = job.snapshots()
    job.run()
    assert job.rows() == [*(order(n, "b") for n in range(1, 9)), order(9, "c")]
    assert job.snapshots() - before >= 4


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_partition_that_is_added_empty_comes_after_what_is_older(
    spark: SparkSession, tmp_path: Path, kafka: Kafka, admin: AdminClient, has_begun: bool
) -> None:
    """A micro-batch may know of it before it has a message. Of the others some may have had none either."""
    job, now = small_batches(spark, tmp_path, kafka)
    job.produce([insert(order(1, "a"))], partition=0, timestamp=now)
    job.run()
    admin.create_partitions([NewPartitions(job.topic(), 3)])[job.topic()].result(30)
    expected = [order(1, "new"), order(3, "c")]
    if has_begun:
        job.produce([insert(order(2, "a"))], partition=1, timestamp=now)
        expected.insert(1, order(2, "a"))
    job.run()
    for second in range(1, 7):
        job.produce([insert(order(1, f"old {second}"), "u")], partition=1, timestamp=now + second * 1000)
    job.produce([insert(order(3, "c"))], partition=2, timestamp=now + 10_000)
    job.produce([insert(order(1, "new"), "u")], partition=0, timestamp=now + 11_000)
    job.run()
    assert job.rows() == expected


def test_a_truncate_before_a_second_partition_is_applied(
    spark: SparkSession, tmp_path: Path, kafka: Kafka, admin: AdminClient
) -> None:
    """One that comes later has no place in an order."""
    job = KafkaJob(spark, tmp_path, kafka.bootstrap_servers)
    kafka.create_topic(job.topic())
    now = int(time.time() * 1000) - 60_000
    job.produce([insert(order(1, "a"))], timestamp=now)
    job.run()
    job.produce([insert(order(2, "b")), TRUNCATE, insert(order(3, "c"))], timestamp=now + 1000)
    admin.create_partitions([NewPartitions(job.topic(), 2)])[job.topic()].result(30)
    job.produce([insert(order(4, "d"))], partition=1, timestamp=now + 2000)
    job.produce([TRUNCATE], timestamp=now + 3000)
    job.run()
    assert job.rows() == [order(3, "c"), order(4, "d")]
    (letter,) = spark.table(f"lake.{job.name}.dead_letters").collect()
    assert (letter["offset"], letter["reason"]) == (4, truncate_refused(job.config().tables[0], {"0": 5, "1": 1}))


def test_unreachable_broker(spark: SparkSession, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    job = KafkaJob(spark, tmp_path, f"127.0.0.1:{port}")
    started = time.monotonic()
    with pytest.raises(TemporaryError, match=rf"Kafka at 127\.0\.0\.1:{port} did not answer"):
        job.run()
    with pytest.raises(TemporaryError, match=rf"Kafka at 127\.0\.0\.1:{port} did not answer"):
        list(inspection.check(spark, job.config()))
    assert time.monotonic() - started < 80


def test_options_that_the_client_refuses(spark: SparkSession, tmp_path: Path) -> None:
    job = KafkaJob(spark, tmp_path, "no-such-broker.invalid:9092")
    with pytest.raises(TemporaryError, match=r"Kafka at no-such-broker\.invalid:9092 can't be reached"):
        job.run()
    job = KafkaJob(spark, tmp_path, "127.0.0.1:9092", options={"kafka.security.protocol": "CARRIER_PIGEON"})
    with pytest.raises(
        ConfigError, match=r"Kafka's client refuses the options for 127\.0\.0\.1:9092: .*CARRIER_PIGEON"
    ):
        job.run()


def test_unknown_topic(spark: SparkSession, tmp_path: Path, kafka: Kafka) -> None:
    job = KafkaJob(spark, tmp_path, kafka.bootstrap_servers)
    assert_refused(job, ConfigError, rf"has no topic '{job.topic()}'")


class Running:
    """A pipeline in a thread, as a process that runs for long; stopped when a `with` ends, also if a test
    fails in it.
    """

    def __init__(self, job: KafkaJob) -> None:
        self.error: BaseException | None = None
        self.pipeline = job.pipeline()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.pipeline.run()
        except RowdeltaError as error:
            self.error = error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, failure: BaseException | None, traceback: object) -> None:
        if failure is not None:
            failure.add_note(f"The job was {'running' if self.alive else 'not running'}; its error: {self.error!r}")
        self.stop()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def finish_micro_batch(self) -> None:
        """Wait until the one in progress, if there is one, is applied."""
        with self.pipeline._between_batches(self.pipeline._all_runs()):
            pass

    def stop(self) -> None:
        self.pipeline.stop()
        self._thread.join(120)
        assert not self.alive


def is_at_work(spark: SparkSession) -> bool:
    """Whether a streaming query of the session is in a micro-batch, or looks for what belongs into one."""
    return any(query.status["isTriggerActive"] for query in spark.streams.active)


def test_broker_gone_and_back(spark: SparkSession, tmp_path: Path, kafka: Kafka) -> None:
    """The job survives, or ends with an error that says to run again; either way each change is applied once."""
    job = KafkaJob(spark, tmp_path, kafka.bootstrap_servers, sink={"trigger": "1 second"})
    kafka.create_topic(job.topic(), 2)
    shop = Shop(2, seed=3)
    shop.change(job, 40)
    with Running(job) as running:
        assert wait_until(lambda: not running.alive or job.rows() == shop.expected(), 60)
        kafka.stop()
        # until a micro-batch has begun without a broker
        assert wait_until(lambda: not running.alive or is_at_work(spark), 30)
        kafka.start()
        shop.change(job, 40)
        wait_until(lambda: not running.alive or job.rows() == shop.expected(), 90)
    assert running.error is None or isinstance(running.error, TemporaryError)
    shop.change(job, 20)
    job.sink = {}
    job.run()
    assert job.rows() == shop.expected()


def test_a_topic_created_anew_while_the_job_waits_for_messages(
    spark: SparkSession, tmp_path: Path, kafka: Kafka, admin: AdminClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SourceSection, "discovery_seconds", 0.0)
    job = KafkaJob(spark, tmp_path, kafka.bootstrap_servers, sink={"trigger": "15 seconds"})
    kafka.create_topic(job.topic())
    job.produce([insert(order(n, "a")) for n in range(2)])
    with Running(job) as running:
        assert wait_until(lambda: bool(job.rows()), 60)
        running.finish_micro_batch()
        delete_topic(admin, job.topic())
        kafka.create_topic(job.topic())
        job.produce([insert(order(n, "b")) for n in range(4)])
        assert wait_until(lambda: not running.alive, 60)
    assert isinstance(running.error, TableError)
    assert f"topic {job.topic()} was deleted and created again while the sink ran" in str(running.error)
    assert job.rows() == [order(0, "a"), order(1, "a")]


def test_stop_finishes_the_micro_batch(spark: SparkSession, tmp_path: Path, kafka: Kafka) -> None:
    job = KafkaJob(
        spark,
        tmp_path,
        kafka.bootstrap_servers,
        sink={"trigger": "1 second"},
        options={"maxOffsetsPerTrigger": 25},
    )
    kafka.create_topic(job.topic())
    shop = Shop(1, seed=5)
    shop.change(job, 300)
    with Running(job) as running:
        assert wait_until(lambda: bool(job.rows()), 60)
    assert running.error is None
    assert job.rows() != shop.expected()
    job.sink = {}
    job.options = {}
    job.run()
    assert job.rows() == shop.expected()
