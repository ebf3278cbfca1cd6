"""Statements that move keys, applied to Iceberg tables (`tests.sink.moved_keys`)."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Producer
from pyspark.sql import SparkSession

from tests.sink.harness import Job
from tests.sink.moved_keys import EXPECTED, ROWS, play, row, shift, swap
from tests.sink.test_kafka import KafkaJob
from tests.stack.kafka import Kafka

pytestmark = pytest.mark.spark

COLUMNS = {"id": "bigint", "name": "string", "size": "int"}


@pytest.mark.parametrize(
    ("kinds", "files", "mode", "deletes"),
    [
        (("-U", "+U"), 3, "upsert", "position"),
        (("-D", "+I"), 3, "changelog", "copy-on-write"),
        (("-D", "+I"), 1, "upsert", "position"),
        (("-U", "+U"), 1, "changelog", "equality"),
        (("-D", "+I"), 1, "upsert", "equality"),
    ],
)
def test_all_rows_stay(
    spark: SparkSession, tmp_path: Path, kinds: tuple[str, str], files: int, mode: Any, deletes: Any
) -> None:
    job = Job(spark, tmp_path, columns=COLUMNS, mode=mode, deletes=deletes)
    play(job, kinds, files, job.rows)


class NarrowJob(Job):
    """Its files have narrower types than the table, so Spark reads them."""

    def write_table(self, records: pa.Table) -> Path:
        place = records.schema.get_field_index("size")
        return super().write_table(records.set_column(place, "size", records.column(place).cast(pa.int16())))


def test_files_that_spark_reads(spark: SparkSession, tmp_path: Path) -> None:
    job = NarrowJob(spark, tmp_path, columns=COLUMNS)
    play(job, ("-U", "+U"), 3, job.rows)


@pytest.mark.parametrize("is_split", [True, False])
def test_debezium(spark: SparkSession, tmp_path: Path, is_split: bool) -> None:
    """Its connectors write a delete and an insert. With another key, it is an update."""
    table = {"order_by": ["source.lsn bigint"]}
    sections = {"source": {"format": "debezium-json"}}
    job = Job(spark, tmp_path, columns=COLUMNS, file_format="json", sections=sections, table=table)
    events = [{"op": "c", "before": None, "after": row(key, name)} for key, name in ROWS.items()]
    for old, new in shift() + swap():
        if is_split:
            events += [{"op": "d", "before": old, "after": None}, {"op": "c", "before": None, "after": new}]
        else:
            events.append({"op": "u", "before": old, "after": new})
    for start in (0, 5, 8, 11):
        end = {0: 5, 5: 8, 8: 11}.get(start, len(events))
        lines = [json.dumps(event | {"source": {"lsn": 100 + n}}) for n, event in enumerate(events[start:end], start)]
        job.write_text("\n".join(lines) + "\n")
    job.run()
    assert job.rows() == EXPECTED


@pytest.mark.kafka
def test_halves_in_different_partitions(spark: SparkSession, tmp_path: Path, kafka: Kafka) -> None:
    """Debezium's headers tell the deletes whose rows go on. Micro-batches of three messages cut the statement."""
    job = KafkaJob(spark, tmp_path, kafka.bootstrap_servers, {"orders": COLUMNS}, options={"maxOffsetsPerTrigger": 3})
    kafka.create_topic(job.topic(), 3)
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers})

    def say(key: int, event: Any, header: str | None = None) -> None:
        headers: list[tuple[str, str | bytes | None]] = [] if header is None else [(f"__debezium.{header}", b"{}")]
        value = None if event is None else json.dumps(event)
        producer.produce(job.topic(), value, json.dumps({"id": key}), key % 3, headers=headers)

    for key, name in ROWS.items():
        say(key, {"op": "c", "before": None, "after": row(key, name)})
    for old, new in shift():
        say(old["id"], {"op": "d", "before": old, "after": None}, "newkey")
        say(old["id"], None, "newkey")
        say(new["id"], {"op": "c", "before": None, "after": new}, "oldkey")
    assert producer.flush(60) == 0
    job.run()
    assert job.rows() == [new for _, new in shift()]
    assert job.snapshots() > 5
