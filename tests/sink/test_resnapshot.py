"""A new snapshot of the source's table brings no deletes: with `resnapshot: reconcile` rows that it doesn't have go."""

import time
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from pyspark.sql import SparkSession

from changelog.decoding import SnapshotMark, Stated
from sink.config import Config
from sink.errors import ConfigError
from sink.table.resnapshot import Mark, Resnapshot, resnapshot_after
from tests.sink.test_kafka import KafkaJob
from tests.stack.kafka import Kafka

COLUMNS = {"id": "bigint", "note": "string"}
SOFT = {"soft_delete": {"column": "deleted", "at": "deleted_at"}}
LONG_AGO = int((time.time() - 5 * 3600) * 1000)


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
    job, admin = a_job(spark, tmp_path, kafka, 2), AdminClient({"bootstrap.servers": kafka.bootstrap_servers})

    def remove(partition: int, before: int) -> None:
        place = TopicPartition(job.topic(), partition, before)
        admin.delete_records([place])[place].result(30)

    def warns(of: str) -> bool:
        job.run()
        found = of in caplog.text
        caplog.clear()
        return found and set(live(job)) == set(range(1, 7))

    job.produce([event("c", number) for number in range(1, 6)])
    job.produce([event("c", 6)], 1)
    job.run()
    everything = [read(1, "first"), *map(read, range(2, 5)), read(5, "last")]
    job.produce([everything[0], (b"{", b"{"), *everything[1:]])
    assert warns("some of its messages can't be read")
    job.produce([read(1, "first"), read(1, "last")])
    assert warns("they would be 4 of 6, as if it were one of a part of the table")
    job.produce([read(1, "first"), read(2)])
    job.run()
    remove(0, 15)
    job.produce([read(5, "last")])
    assert warns("messages of it may not be in the topic any more")
    job.produce(everything)
    remove(1, 1)
    assert warns("messages of it may not be in the topic any more"), "of the partition that is empty"
    # who takes the key out of the configuration doesn't want it any more
    job.produce([read(1, "first"), *map(read, range(2, 4)), read(4, "last")])
    job.table = {}
    job.run()
    assert set(live(job)) == set(range(1, 7))


def test_what_is_known_of_a_snapshot() -> None:
    def after(known: Resnapshot | None, *marks: tuple[bool, int, tuple[int, int]]) -> Resnapshot | None:
        stated: Stated = {SnapshotMark(is_last, at): place for is_last, at, place in marks}
        return resnapshot_after(known, {("id",): (0, 1), "shop.orders": (0, 1), **stated})

    begun = after(None, (False, 1000, (0, 5)))
    assert begun == Resnapshot(Mark(1000, 0, 5))
    assert not begun.has_ended({"0": 9})
    ended = after(begun, (True, 1000, (1, 3)))
    assert ended == Resnapshot(Mark(1000, 0, 5), Mark(1000, 1, 3))
    assert ended == after(None, (True, 1000, (1, 3)), (False, 1000, (0, 5))), "whichever partition is read first"
    assert ended == after(ended, (False, 900, (1, 1))), "the first record of an older one comes late"
    assert ended.has_ended({"0": 6, "1": 4})
    assert not ended.has_ended({"0": 6, "1": 3}), "the table was taken back"
    again = after(ended, (False, 2000, (1, 9)))
    assert again is not None
    assert not again.has_ended({"0": 20, "1": 20}), "the last record is of the one before"
    assert after(None, (True, 1000, (1, 3))) is None, "nobody knows where it began"
    assert Resnapshot.from_json(ended.to_json()) == ended
    assert ended.needs({"0": 9, "1": 2}) == {"0": 5, "1": 2}


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ({"deletes": "equality"}, "only a key index finds the rows"),
        ({"source_tables": ["shop.orders"]}, "tables of several databases may have its name"),
        ({"shared_with": ["other"]}, "other sinks write the table"),
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
