"""Many Delta tables in one job that reads Kafka: patterns, tables that come later, and dead letters of several
tables in one.
"""

import json
import logging
import re
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from confluent_kafka import Producer
from pyspark.sql import DataFrame, SparkSession

from sink.commands import inspection
from sink.config import Config
from sink.deadletters import table as dead_letters
from sink.deadletters.table import Selection
from sink.deadletters.topic import DeadLetterTopic
from sink.errors import RowdeltaError, TableError
from sink.run.pipeline import Pipeline
from sink.spark import joint
from sink.spark.versions import to_arrow
from sink.targets.delta import live_files
from tests.delta.harness import vacuum
from tests.delta.log_model import DeltaLog
from tests.delta.readers import plain
from tests.sink.harness import CrashError
from tests.sink.test_dead_letters import messages
from tests.sink.test_kafka import KafkaJob, insert, order
from tests.stack.kafka import Kafka

pytestmark = [pytest.mark.spark, pytest.mark.kafka]

NAMES = ("orders", "items", "customers", "refunds")


class Shop:
    """Topics `<name>.<table>`: those of a pattern, and `<name>-prices`."""

    def __init__(self, spark: SparkSession, folder: Path, kafka: Kafka) -> None:
        self.spark = spark
        self.folder = folder
        self.kafka = kafka
        self.name = f"n{uuid4().hex[:12]}"

    def config(self, **columns: str) -> Config:
        entry = {"key": ["id"], "columns": {"id": "bigint", "v": "int"} | columns}
        return Config.model_validate(
            {
                "sink": {"id": "shop", "checkpoint": str(self.folder / "state"), "dead_letter_table": "lake.shop.dead"},
                "source": {
                    "type": "kafka",
                    "format": "row-kind",
                    "options": {"kafka.bootstrap.servers": self.kafka.bootstrap_servers},
                },
                "maintenance": {"budget": 0, "expire": None, "orphans": None},
                "catalogs": {"lake": {"type": "delta", "warehouse": str(self.folder / "warehouse")}},
                "tables": [
                    {"source": rf"{self.name}\.(\w+)", "target": "lake.shop.$1", **entry},
                    {"source": f"{self.name}-prices", "target": "lake.shop.prices", **entry},
                ],
            }
        )

    def topic(self, table: str) -> str:
        return f"{self.name}-prices" if table == "prices" else f"{self.name}.{table}"

    def produce(self, table: str, *messages: dict[str, Any]) -> None:
        producer = Producer({"bootstrap.servers": self.kafka.bootstrap_servers, "enable.idempotence": True})
        for message in messages:
            producer.produce(self.topic(table), value=json.dumps(message).encode(), key=str(message.get("id")).encode())
        assert producer.flush(60) == 0

    def run(self, **columns: str) -> None:
        Pipeline(self.spark, self.config(**columns)).run()

    def rows(self, table: str) -> dict[int, Any]:
        """Read by Delta, and compared with what the model of the log has."""
        path = self.folder / "warehouse" / "shop" / table
        read = to_arrow(self.spark.read.format("delta").load(str(path)))
        log = DeltaLog(path)
        log.check()
        assert plain(log.rows()) == plain(read)
        return {row["id"]: row["v"] for row in read.to_pylist()}


def change(kind: str, key: int | None, value: Any) -> dict[str, Any]:
    return {"row_kind": kind, "id": key, "v": value}


def test_five_tables_in_one_job(
    spark: SparkSession, kafka: Kafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together: list[int] = []
    original = joint._jobs

    def jobs(shares: Any, groups: Any, most_records: int) -> Any:
        for part, packed in original(shares, groups, most_records):
            together.append(len(part))
            yield part, packed

    monkeypatch.setattr(joint, "_jobs", jobs)
    shop = Shop(spark, tmp_path, kafka)
    for name in (*NAMES, "prices"):
        kafka.create_topic(shop.topic(name))
        shop.produce(name, *(change("+I", key, key) for key in range(20)))
    shop.run()
    for number, name in enumerate((*NAMES, "prices")):
        assert shop.rows(name) == {key: key for key in range(20)}
        shop.produce(name, change("-D", number, number), change("+U", 10, 100 + number), change("+I", 50, 0))
    shop.produce("items", change("+I", None, 1))
    shop.produce("refunds", change("+U", 11, "many"))
    shop.run()
    for number, name in enumerate((*NAMES, "prices")):
        assert shop.rows(name) == {key: key for key in range(20) if key != number} | {10: 100 + number, 50: 0}
    assert max(together, default=0) > 1  # one Spark job wrote several of them

    letters = dead_letters.find(spark, shop.config(), Selection()).collect()
    assert {row["table"]: row["offset"] for row in letters} == {"lake.shop.items": 23, "lake.shop.refunds": 23}


def test_a_table_that_comes_later(spark: SparkSession, kafka: Kafka, tmp_path: Path) -> None:
    shop = Shop(spark, tmp_path, kafka)
    for name in ("orders", "prices"):
        kafka.create_topic(shop.topic(name))
        shop.produce(name, change("+I", 1, 1))
    shop.run()
    kafka.create_topic(shop.topic("late"))
    shop.produce("late", change("+I", 1, 7))
    shop.produce("orders", change("+U", 1, 2))
    shop.run()
    assert (shop.rows("orders"), shop.rows("prices"), shop.rows("late")) == ({1: 2}, {1: 1}, {1: 7})
    lines = list(inspection.status(spark, shop.config()))
    assert len([line for line in lines if ": version " in line]) == 3
    assert [line for line in lines if line.startswith("  lag: ")] == ["  lag: 0 messages behind"] * 3


class OrdersJob(KafkaJob):
    """Orders that Debezium sends, into a Delta table."""

    def config(self) -> Config:
        values = super().config().model_dump(exclude_none=True)
        values["catalogs"] = {"lake": {"type": "delta", "warehouse": str(self.folder / "warehouse")}}
        return Config.model_validate(values)


def test_another_key_of_the_messages_is_accepted_by_sql(spark: SparkSession, kafka: Kafka, tmp_path: Path) -> None:
    """Whatever the sink has stored in the log of the key that it knows."""
    job = OrdersJob(spark, tmp_path, kafka.bootstrap_servers)
    kafka.create_topic(job.topic())

    def produce(number: int, key: dict[str, Any]) -> None:
        job.produce([(key, insert(order(number, "ann"))[1])])

    produce(1, {"id": 1})
    job.run()
    produce(2, {"id": 2, "customer": "ann"})
    for _ in range(2):
        with pytest.raises(TableError, match="from partition 0 offset 1 on it is id, customer") as stopped:
            job.run()
    statement = re.search(r"SET TBLPROPERTIES .*?\)(?=;)", str(stopped.value))
    assert statement is not None
    folder = tmp_path / "warehouse" / job.name / "orders"
    spark.sql(f"ALTER TABLE delta.`{folder}` {statement[0]}")
    job.run()
    produce(3, {"id": 3})
    produce(4, {"customer": "ann", "id": 4})
    job.run()
    assert sorted(row["id"] for row in spark.read.format("delta").load(str(folder)).collect()) == [1, 2, 3, 4]
    produce(5, {"customer": "ann"})
    with pytest.raises(TableError, match="was id or id, customer, and from partition 0 offset 4 on it is customer"):
        job.run()


def test_dead_letters_go_to_the_topic_too(
    spark: SparkSession, kafka: Kafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each once, whenever the run dies, and also after others have rewritten the dead-letter table's files, and have
    committed thousands of times. What VACUUM has deleted before it was sent is only in the table, and the sink goes on.
    """
    job = OrdersJob(spark, tmp_path, kafka.bootstrap_servers)
    dead = f"{job.name}.dead"
    job.sink = {"dead_letter_topic": dead}
    letters = f"delta.`{tmp_path / 'warehouse' / job.name / 'dead_letters'}`"
    for name in (job.topic(), dead):
        kafka.create_topic(name)
    send = DeadLetterTopic.send

    def run(number: int, *, crash: str | None) -> None:
        """A run that finds one more good order and one more bad record."""
        job.produce([insert(order(number, "ann")), (None, f"bad {number}".encode())])

        def dying(self: DeadLetterTopic, target: str, commit: str, rows: DataFrame) -> None:
            is_new = [bytes(row["value"]) for row in rows.collect()] == [f"bad {number}".encode()]
            if not is_new or crash == "after sending":
                send(self, target, commit, rows)
            if is_new:
                raise CrashError(str(crash))

        with monkeypatch.context() as patch:
            if crash is None:
                job.run()
                return
            patch.setattr(DeadLetterTopic, "send", dying)
            with pytest.raises(RowdeltaError, match=crash):
                job.run()

    run(1, crash="after sending")
    run(2, crash="before sending")
    assert [m.value() for m in messages(kafka, dead, 1)] == [b"bad 1"]
    spark.sql(f"OPTIMIZE {letters}")
    monkeypatch.setattr(live_files, "_MOST_COMMITS", 2)  # as if there were thousands
    for number in range(3):
        spark.sql(f"INSERT INTO {letters} (table, value) VALUES ('another', CAST('other {number}' AS BINARY))")
    run(3, crash="before sending")
    assert [m.value() for m in messages(kafka, dead, 2)] == [b"bad 1", b"bad 2"]
    spark.sql(f"OPTIMIZE {letters}")
    vacuum(spark, letters)
    with caplog.at_level(logging.WARNING, "rowdelta"):
        run(4, crash=None)
    assert f"can't be sent to topic {dead}" in caplog.text
    assert [m.value() for m in messages(kafka, dead, 3)] == [b"bad 1", b"bad 2", b"bad 4"]
    kept = dead_letters.find(spark, job.config(), Selection()).where("table <> 'another'").collect()
    assert sorted(bytes(letter["value"]) for letter in kept) == [f"bad {number}".encode() for number in range(1, 5)]
    rows = to_arrow(spark.read.format("delta").load(str(tmp_path / "warehouse" / job.name / "orders"))).to_pylist()
    assert sorted(row["id"] for row in rows) == [1, 2, 3, 4]
