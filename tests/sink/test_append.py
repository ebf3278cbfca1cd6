"""`mode: append`: inserts are appended exactly once, and nothing else is applied."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from sink.errors import ConfigError, DataError, FencedError, TemporaryError
from sink.table.plan import truncate_refused
from tests.sink.harness import Fault, Job, before_commit, crashing
from tests.sink.test_kafka import ORDERS, KafkaJob, event, insert, order
from tests.stack.kafka import Kafka

pytestmark = [pytest.mark.spark, pytest.mark.kafka]


@pytest.fixture
def job(spark: SparkSession, tmp_path: Path) -> Job:
    return Job(spark, tmp_path, key=(), table={"mode": "append"})


def visits(*numbers: int) -> list[tuple[str, dict[str, Any]]]:
    """Inserts of equal rows."""
    return [("+I", {"id": number, "region": "eu"}) for number in numbers]


def ids(job: Job) -> list[int]:
    return sorted(row["id"] for row in job.rows())


@pytest.mark.parametrize("fault", ["in a task", "before the commit", "after the commit"])
def test_each_insert_is_there_once_after_a_crash(job: Job, fault: Fault) -> None:
    job.write(visits(1, 1, 2))
    job.write(visits(1))
    with crashing(fault, after_commits=1 if fault != "after the commit" else 0), pytest.raises(TemporaryError):
        job.run()
    job.lose_checkpoint()
    job.run()
    assert ids(job) == [1, 1, 1, 2]
    assert not (job.checkpoint / "index").exists()
    assert [(s["operation"], s["summary"].get("total-delete-files")) for s in job.snapshots()] == [("append", "0")] * 2


def test_a_second_driver_appends_nothing_twice(job: Job) -> None:
    job.write(visits(1))
    job.run()
    job.write(visits(1))
    with before_commit(job.second_driver().run), pytest.raises(FencedError):
        job.run()
    assert ids(job) == [1, 1]


def test_what_others_append_is_not_in_the_way(job: Job) -> None:
    job.write(visits(1))
    with before_commit(lambda: job.append([{"id": 2, "region": "us"}])):
        job.run()
    assert ids(job) == [1, 2]


@pytest.mark.parametrize("file_format", ["parquet", "json"])
def test_what_is_not_an_insert_is_a_bad_record(job: Job, file_format: Any) -> None:
    job = replace(job, file_format=file_format, partition_by=["region"], tasks=3)
    job.write([*visits(*range(20)), ("+U", {"id": 1, "region": "us"}), ("-D", {"id": 2, "region": "eu"})])
    job.write(visits(20))
    job.run()
    assert ids(job) == list(range(21))
    letters = job.spark.table(job.dead_letters).orderBy("reason").collect()
    assert [(row["error_class"], row["reason"].split(":")[0]) for row in letters] == [
        ("not_an_insert", "+U"),
        ("not_an_insert", "-D"),
    ]


def test_files_need_no_order(job: Job) -> None:
    job.table = {"mode": "append", "order_by": []}
    job.write(visits(*range(20_000)))  # more than one task's
    job.run()
    assert ids(job) == list(range(20_000))


def test_rows_of_which_the_sink_knows_nothing(job: Job) -> None:
    job.write(visits(1))
    job.run()
    job.lose_checkpoint()
    job.sink_id = "another"
    with pytest.raises(DataError, match="would duplicate rows in mode append"):
        job.run()


def test_no_row_is_taken_away(job: Job) -> None:
    job.table = {"mode": "append", "truncate": "apply"}
    with pytest.raises(ValueError, match=r"can't apply a TRUNCATE\. Write truncate: reject, or leave it out"):
        job.config()
    job.table = {"mode": "append", "truncate": "reject"}
    refused = truncate_refused(job.config().tables[0], None)
    assert refused == "TRUNCATE: a table in mode append loses no rows; empty the table by hand, if it should"


@pytest.mark.parametrize("name", ["key", "keys"])
def test_there_is_no_key(job: Job, name: str) -> None:
    pattern = {"source": "/data/(.*)", "target": "lake.shop.$1"} if name == "keys" else {}
    job.table = {"mode": "append", name: ["id"] if name == "key" else {"x": ["id"]}, **pattern}
    with pytest.raises(ValueError, match=rf"so it has no {name}\. Leave {name} out"):
        job.config()


def test_from_kafka(spark: SparkSession, tmp_path: Path, kafka: Kafka) -> None:
    job = KafkaJob(
        spark, tmp_path, kafka.bootstrap_servers, key={"orders": ()}, table={"mode": "append"},
        options={"maxOffsetsPerTrigger": 7},
    )  # fmt: skip
    kafka.create_topic(job.topic(), 3)
    for partition in range(3):
        snapshot = [insert(order(number, f"p{partition}"), "r") for number in range(4)]
        job.produce(snapshot + [insert(order(number, f"p{partition}")) for number in range(4)], partition)
    job.run()
    expected = sorted((number, f"p{partition}") for number in range(4) for partition in range(3) for _ in range(2))
    assert sorted((row["id"], row["customer"]) for row in job.rows()) == expected
    # a restart, other operations, messages without a key, of which nobody wants to know the fields
    job.lose_checkpoint()
    row = order(9, "new")
    job.produce([(None, insert(row)[1]), event("u", None, row), event("d", row, None), (None, None)])
    job.run()
    assert sorted((row["id"], row["customer"]) for row in job.rows()) == [*expected, (9, "new")]
    letters = spark.table(f"lake.{job.name}.dead_letters")
    assert sorted(row["reason"][:2] for row in letters.collect()) == ["+U", "-D"]
    # a second snapshot of the source would duplicate rows
    job.produce([insert(order(0, "p0"), "r")])
    with pytest.raises(DataError, match="In mode append that would duplicate rows"):
        job.run()


def test_a_topic_without_a_key_may_be_appended(spark: SparkSession, tmp_path: Path, kafka: Kafka) -> None:
    job = KafkaJob(spark, tmp_path, kafka.bootstrap_servers, key={"orders": ()}, tables={"orders": ORDERS})
    kafka.create_topic(job.topic())
    job.produce([(None, insert(order(1, "a"))[1])] * 2)
    with pytest.raises(ConfigError, match=r"has no key: .* or set mode: append for a table that only grows"):
        job.run()
    job.table = {"mode": "append"}
    job.run()
    assert job.rows() == [order(1, "a")] * 2
