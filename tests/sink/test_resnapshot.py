"""A new snapshot of the source's table brings no deletes: with `resnapshot: reconcile` rows that it doesn't have go."""

import time
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from pyspark.sql import SparkSession

from changelog.decoding import SnapshotMark
from sink.config import Config
from sink.errors import ConfigError
from sink.table.resnapshot import Resnapshot, resnapshot_after
from tests.sink.test_kafka import KafkaJob
from tests.stack.kafka import Kafka

COLUMNS = {"id": "bigint", "note": "string"}
SOFT = {"soft_delete": {"column": "deleted", "at": "deleted_at"}}
LONG_AGO = int((time.time() - 3600) * 1000)


def event(op: str, number: int, note: str | None = "a", snapshot: str = "false") -> tuple[Any, Any]:
    """A snapshot's row says where in the snapshot it is."""
    row = None if note is None else {"id": number, "note": note}
    source = {"snapshot": snapshot, "schema": "public", "table": "orders"}
    return {"id": number}, {"before": None, "after": row, "op": op, "source": source}


def read(number: int, snapshot: str = "true", note: str = "read") -> tuple[Any, Any]:
    return event("r", number, note, snapshot)


def a_job(spark: SparkSession, folder: Path, kafka: Kafka, partitions: int, **table: Any) -> KafkaJob:
    job = KafkaJob(spark, folder, kafka.bootstrap_servers, {"orders": COLUMNS})
    job.table = {"resnapshot": "reconcile", **table}
    kafka.create_topic(job.topic(), partitions)
    return job


def live(job: KafkaJob) -> dict[int, str]:
    return {row["id"]: row["note"] for row in job.rows() if not row.get("deleted")}


@pytest.mark.spark
@pytest.mark.kafka
@pytest.mark.parametrize("table", [{"deletes": "position"}, {"deletes": "copy-on-write"} | SOFT])
def test_rows_that_a_new_snapshot_does_not_have_are_removed(
    spark: SparkSession, tmp_path: Path, kafka: Kafka, table: dict[str, Any]
) -> None:
    """Also if the snapshot takes several runs, and begins anew, and its rows are in two partitions."""
    job = a_job(spark, tmp_path, kafka, 2, **table)
    job.produce([read(1, "first"), read(3), read(5, "last_in_data_collection")], 0, timestamp=LONG_AGO)
    job.produce([read(2), read(4), read(6)], 1, timestamp=LONG_AGO)
    job.run()
    assert live(job) == dict.fromkeys(range(1, 7), "read")
    assert not any(name.endswith(".resnapshot") for name in job.properties())  # nothing was there before it
    job.produce([event("u", 5, "old"), event("c", 7)], 0, timestamp=LONG_AGO)
    job.produce([event("c", 8)], 1, timestamp=LONG_AGO)
    # 4 and 5 are deleted at the source, which nobody says; then the connector crashes, and 3 is deleted
    job.produce([read(1, "first_in_data_collection", "again"), read(3)], 0, timestamp=LONG_AGO + 1_000_000)
    job.produce([read(2)], 1, timestamp=LONG_AGO + 1_000_000)
    job.run()
    assert set(live(job)) == set(range(1, 9))
    job.produce([read(1, "first_in_data_collection", "second")], 0)
    job.produce([read(2, note="second"), read(6, note="second")], 1)
    job.run()
    assert set(live(job)) == set(range(1, 9))
    job.produce([event("c", 9), read(7, "last_in_data_collection", "second")], 0)
    job.produce([event("c", 8, "newer"), event("d", 6, None)], 1)
    job.run()
    assert live(job) == {1: "second", 2: "second", 7: "second", 8: "newer", 9: "a"}
    if "soft_delete" in table:
        assert {row["id"] for row in job.rows()} == set(range(1, 10))
    job.run()
    job.produce([event("c", 3, "back")], 0)
    job.run()
    assert live(job) == {1: "second", 2: "second", 3: "back", 7: "second", 8: "newer", 9: "a"}


@pytest.mark.spark
@pytest.mark.kafka
def test_nothing_is_removed_if_a_message_may_have_named_the_row(
    spark: SparkSession, tmp_path: Path, kafka: Kafka, caplog: pytest.LogCaptureFixture
) -> None:
    job, admin = a_job(spark, tmp_path, kafka, 1), AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    job.produce([event("c", number) for number in range(1, 4)])
    job.run()
    job.produce([read(1, "first"), (b"{", b"{"), read(2, "last")])
    job.run()
    assert "some of its messages can't be read" in caplog.text
    job.produce([read(1, "first"), read(2)])
    job.run()
    newest = TopicPartition(job.topic(), 0, 7)
    admin.delete_records([newest])[newest].result(30)
    job.produce([read(2, "last")])
    job.run()
    assert "messages of it aren't in the topic any more" in caplog.text
    assert set(live(job)) == {1, 2, 3}
    job.produce([read(1, "first"), read(2, "last")])
    job.run()
    assert set(live(job)) == {1, 2}


def test_what_is_known_of_a_snapshot() -> None:
    first, last = (SnapshotMark(is_last, 1000) for is_last in (False, True))
    again, end = SnapshotMark(False, 2000), SnapshotMark(True, 3000)
    begun = resnapshot_after(None, {first: (0, 5), ("id",): (0, 1), "shop.orders": (0, 1)}, is_first=False)
    assert begun == Resnapshot(1000, (0, 5))
    assert resnapshot_after(begun, {last: (1, 3)}, is_first=False) == Resnapshot(1000, (0, 5), (1, 3))
    assert resnapshot_after(begun, {end: (1, 3), again: (1, 2)}, is_first=False) == Resnapshot(2000, (1, 2), (1, 3))
    assert resnapshot_after(None, {last: (1, 3)}, is_first=False) is None  # nobody knows where it began
    assert resnapshot_after(begun, {again: (0, 9)}, is_first=True) is None  # it begins with an empty table
    ended = Resnapshot(1000, (0, 5), (1, 3))
    assert Resnapshot.from_json(ended.to_json()) == ended
    assert not ended.has_ended({"0": 6, "1": 3})  # the table was taken back
    assert ended.has_ended({"0": 6, "1": 4})


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ({"deletes": "equality"}, "only a key index finds the rows"),
        ({"source_tables": ["shop.orders*"]}, "a snapshot has the rows of one of them"),
        ({"history": {}}, "nothing tells since when a row has been gone"),
        ({"source_deletes": "ignore"}, "keeps rows that the source doesn't have"),
    ],
)
def test_where_rows_cannot_be_removed_it_is_refused(table: dict[str, Any], why: str) -> None:
    source = {"type": "kafka", "format": "debezium-json", "options": {"kafka.bootstrap.servers": "127.0.0.1:1"}}
    entry = {"source": "orders", "target": "lake.db.orders", "key": ["id"], "resnapshot": "reconcile", **table}
    values = {"sink": {"id": "s", "checkpoint": "/tmp/s"}, "source": source, "catalogs": {"lake": {}}}
    with pytest.raises((ConfigError, ValueError), match=why):
        Config.model_validate(values | {"tables": [entry]})
    entry = {"source": "orders", "target": "lake.db.orders", "key": ["id"], "resnapshot": "reconcile"}
    with pytest.raises((ConfigError, ValueError), match="only Debezium's messages"):
        Config.model_validate(values | {"source": {**source, "format": "maxwell-json"}, "tables": [entry]})
