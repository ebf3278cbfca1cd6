"""An entry takes the messages of one of the source's tables, whatever else is in its topic."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from sink.commands import reset
from sink.commands.inspection import check
from sink.config import Config, SinkSection, SourceSection
from sink.errors import DataError
from sink.sources.kafka_client import Message
from sink.spark.versions import to_arrow
from sink.table.inference import infer_fields, of_one_table, raw_records, source_tables
from tests.sink.harness import Job
from tests.sink.test_kafka import KafkaJob
from tests.stack.kafka import Kafka

COLUMNS = {"id": "bigint", "name": "string"}


def message(table: str, number: int, name: str, op: str = "c", **more: Any) -> tuple[Any, Any]:
    row = {"id": number, "name": name, **more}
    source = {"connector": "mysql", "db": "shop", "table": table}
    sides = {"before": row, "after": None} if op == "d" else {"before": None, "after": row}
    return {"id": number}, {**sides, "source": source, "op": op}


@pytest.mark.spark
@pytest.mark.kafka
def test_the_first_table_is_taken_and_remembered(spark: SparkSession, tmp_path: Path, kafka: Kafka) -> None:
    job = KafkaJob(spark, tmp_path, kafka.bootstrap_servers, tables={"orders": COLUMNS})
    kafka.create_topic(job.topic(), 2)
    # the other partition is read by a task that doesn't see the first name
    job.produce([message("orders", 1, "pen"), message("orders", 2, "ink")], partition=0)
    others = [message("customers", 1, "Ada", city="Oslo"), message("customers", 2, "Bob", "d")]
    job.produce([*others, ({"id": 2}, None)], partition=1)
    shown = "\n".join(check(spark, job.config()))
    assert "messages of: shop.orders (2), shop.customers (2)" in shown
    assert "those of shop.customers become bad records" in shown
    job.run()
    assert [(row["id"], row["name"]) for row in job.rows()] == [(1, "pen"), (2, "ink")]
    assert [field.name for field in spark.table(job.target()).schema] == ["id", "name"]
    stored = job.properties()["rowdelta.shop.source-tables"]
    assert json.loads(stored) == {"names": ["shop.orders"], "mixed": True}
    letters = to_arrow(spark.table(job.config().dead_letter_table)).to_pylist()
    own = [letter for letter in letters if letter["table"] == job.target()]
    assert [letter["error_class"] for letter in own] == ["other_table"] * 2

    # from now on the name is known, also after a restart from the beginning of a topic with another first message
    job.lose_checkpoint()
    job.produce([({"id": 1}, None), message("customers", 1, "Ada"), message("orders", 1, "pen2", "u")])
    job.run()
    assert [(row["id"], row["name"]) for row in job.rows()] == [(1, "pen2"), (2, "ink")]

    # both belong together, the user says; or the others are not wanted
    job.table = {"source_tables": ["shop.*"]}
    job.produce([message("orders_2", 3, "cap")])
    job.run()
    job.table = {"source_tables": ["*.orders*"], "other_tables": "ignore"}
    job.produce([message("customers", 3, "Eve"), message("orders_2", 4, "box")])
    job.run()
    assert [row["name"] for row in job.rows()] == ["pen2", "ink", "cap", "box"]
    job.table = {}
    job.sink = {"on_bad_record": "fail"}
    job.produce([message("customers", 3, "Eve")])
    with pytest.raises(DataError, match=r"of table shop\.customers, and this entry takes those of"):
        job.run()


def test_columns_are_those_of_one_table() -> None:
    config = Config.model_construct(
        sink=SinkSection.model_construct(), source=SourceSection(type="kafka", format="debezium-json", options={})
    )
    found = [message("orders", 1, "pen"), message("customers", 1, "Ada", city="Oslo"), message("orders", 2, "ink")]
    pairs = [(json.dumps(key).encode(), json.dumps(value).encode()) for key, value in found]
    records = raw_records("t", [Message("t", 0, n, key, value) for n, (key, value) in enumerate(pairs)])
    assert source_tables(config, records) == {"shop.orders": 2, "shop.customers": 1}
    assert list(infer_fields(config, of_one_table(config, records, ()))) == ["id", "name"]
    assert list(infer_fields(config, of_one_table(config, records, ["*.customers"]))) == ["id", "name", "city"]


def test_a_topic_that_begins_with_a_control_record_of_another_table() -> None:
    """DMS's own tables, or a DDL statement, don't decide which columns a table gets."""
    config = Config.model_construct(
        sink=SinkSection.model_construct(), source=SourceSection(type="kafka", format="dms-json", options={})
    )

    def dms(table: str, row: dict[str, int] | None) -> bytes:
        kind = {"record-type": "control", "operation": "create-table"}
        if row is not None:
            kind = {"record-type": "data", "operation": "insert"}
        metadata = kind | {"schema-name": "SHOP", "table-name": table}
        return json.dumps({"data": row, "metadata": metadata}).encode()

    values = [dms("AWSDMS_STATUS", None), dms("ORDERS", {"ID": 1})]
    records = raw_records("t", [Message("t", 0, n, None, value) for n, value in enumerate(values)])
    assert source_tables(config, records) == {"SHOP.ORDERS": 1}
    assert list(infer_fields(config, of_one_table(config, records, ()))) == ["ID"]


def file_of(job: Job, table: str, numbers: Iterable[int]) -> Path:
    changes = (message(table, number, f"{table}-{number}", seq=number)[1] for number in numbers)
    return job.write_text("".join(json.dumps(change) + "\n" for change in changes))


@pytest.fixture
def job(spark: SparkSession, tmp_path: Path) -> Job:
    sections = {"source": {"format": "debezium-json"}, "sink": {"on_bad_record": "dead-letter"}}
    return Job(spark, tmp_path, file_format="json", configure_columns=False, sections=sections)


@pytest.mark.spark
def test_the_table_whose_columns_were_inferred_is_taken(job: Job) -> None:
    """The sample may begin with another table than the first micro-batch, as with startingOffsets: latest."""
    file_of(job, "orders", range(2))
    file_of(job, "customers", range(10))  # Spark begins with the largest file
    job.run()
    assert {row["name"].partition("-")[0] for row in job.rows()} == {"customers"}
    assert len(job.rows()) == 10


@pytest.mark.spark
def test_rows_that_stay_after_a_reset_stay_those_of_their_table(job: Job) -> None:
    """A topic may begin with another table when it is read again: of the first one, old messages are gone."""
    first = file_of(job, "orders", range(3))
    job.run()
    file_of(job, "customers", range(2))
    plan = reset.find(job.spark, job.config(), "orders", empty=False)
    assert plan is not None
    plan.apply()
    first.unlink()
    job.run()
    assert [row["name"] for row in job.rows()] == [f"orders-{number}" for number in range(3)]
