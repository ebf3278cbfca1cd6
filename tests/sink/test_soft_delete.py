"""Soft deletes: a delete of the source marks the row as deleted, in each format; and deletes that are left out."""

import json
import shutil
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from changelog.rows import LATE_REASON
from sink.commands.inspection import check
from sink.errors import ConfigError, TableError
from tests.delta.harness import DeltaJob
from tests.sink.harness import Job
from tests.sink.test_kafka import KafkaJob
from tests.sink.test_late import FORMATS, change
from tests.sink.test_verify import verified
from tests.stack.kafka import Kafka

pytestmark = pytest.mark.spark

COLUMNS = {"id": "bigint", "region": "string", "note": "string"}
MARKS = {"column": "deleted", "at": "deleted_at"}


def a_job(
    spark: SparkSession, folder: Path, kind: type[Job], properties: Mapping[str, str], deletes: Any, **table: Any
) -> Job:
    table = {"soft_delete": MARKS} | table
    return kind(spark, folder, columns=COLUMNS, properties=properties, deletes=deletes, table=table)


def full(op: str, order: int, number: int, note: str) -> dict[str, Any]:
    return change(op, order, number, "eu") | {"note": note}


def marks(job: Job) -> dict[int, tuple[Any, ...]]:
    return {row["id"]: (row["note"], row["deleted"], row["deleted_at"] is not None) for row in job.rows()}


@pytest.mark.parametrize(("kind", "properties", "deletes"), FORMATS)
def test_a_delete_marks_the_row(
    spark: SparkSession, tmp_path: Path, kind: type[Job], properties: Mapping[str, str], deletes: Any
) -> None:
    """Its other values stay, and an insert of the key makes it a row like others again."""
    late = "apply" if kind is DeltaJob else "drop"
    job = a_job(spark, tmp_path, kind, properties, deletes, late=late)
    job.write_records([full("+I", 1, n, f"n{n}") for n in range(1, 6)])
    job.write_records([change("-D", 2, 1), change("-D", 2, 9), full("+I", 2, 6, "n6"), change("-D", 3, 6)])
    job.write_records([change("-D", 4, 2), full("+I", 5, 2, "again"), full("+U", 4, 3, "u3"), change("-D", 5, 3)])
    job.run()
    gone, live = (True, True), (False, False)
    assert marks(job) == {
        1: ("n1", *gone),
        2: ("again", *live),
        3: ("u3", *gone),
        4: ("n4", *live),
        5: ("n5", *live),
        6: ("n6", *gone),
    }
    since = {row["id"]: row["deleted_at"] for row in job.rows()}
    job.write_records([change("-D", 7, 1), full("+I", 7, 3, "back"), full("+I", 1, 9, "new"), full("+U", 7, 4, "u4")])
    job.run()
    expected = {1: ("n1", *gone), 2: ("again", *live), 3: ("back", *live), 4: ("u4", *live), 5: ("n5", *live)}
    expected |= {6: ("n6", *gone)} | ({9: ("new", *live)} if late == "apply" else {})
    assert marks(job) == expected
    assert {row["id"]: row["deleted_at"] for row in job.rows()}[1] == since[1]

    shutil.rmtree(job.index_folder)
    job.write_records([full("+U", 2, 6, "late?"), change("-D", 6, 4)])
    job.run()
    if late == "drop":
        assert marks(job) == expected
    else:
        assert marks(job) == expected | {4: ("u4", *gone), 6: ("late?", *live)}


@pytest.mark.parametrize(("kind", "properties", "deletes"), FORMATS[1::2])
def test_purge(
    spark: SparkSession, tmp_path: Path, kind: type[Job], properties: Mapping[str, str], deletes: Any
) -> None:
    """A run removes what was deleted long ago, and the key index knows it: an insert of the key is a new row."""
    job = a_job(spark, tmp_path, kind, properties, deletes, late="drop")
    job.write_records([full("+I", 1, n, f"n{n}") for n in range(1, 5)])
    job.write_records([change("-D", 5, 1), change("-D", 5, 2), change("-D", 5, 3), full("+I", 6, 3, "again")])
    job.run()
    job.table = {"soft_delete": MARKS | {"purge": "30 days"}, "late": "drop"}
    job.run()
    assert {number for number, (_, deleted, _) in marks(job).items() if deleted} == {1, 2}
    time.sleep(1)
    job.table = {"soft_delete": MARKS | {"purge": "1 second"}, "late": "drop"}
    job.run()
    live = (False, False)
    assert marks(job) == {3: ("again", *live), 4: ("n4", *live)}
    job.write_records([full("+I", 4, 1, "late"), full("+I", 7, 2, "new"), full("+U", 7, 4, "u4"), change("-D", 8, 3)])
    job.table = {"soft_delete": MARKS, "late": "drop"}
    job.run()
    assert marks(job) == {2: ("new", *live), 3: ("again", True, True), 4: ("u4", *live)}


def test_a_table_from_before(spark: SparkSession, tmp_path: Path) -> None:
    """The sink adds the columns. The rows that are there aren't deleted."""
    job = Job(spark, tmp_path, columns=COLUMNS)
    job.write_records([full("+I", 1, n, f"n{n}") for n in (1, 2)])
    job.run()
    job.table = {"soft_delete": MARKS, "verify": {"spark_table": "truth"}}
    job.write_records([change("-D", 2, 2), full("+I", 2, 3, "n3")])
    job.run()
    assert marks(job) == {1: ("n1", None, False), 2: ("n2", True, True), 3: ("n3", False, False)}
    assert any("a delete marks the row in deleted" in line for line in check(spark, job.config()))
    spark.sql(f"SELECT id, region, note FROM {job.target} WHERE deleted IS NOT TRUE").createOrReplaceTempView("truth")
    assert verified(job)[0] == f"{job.target} against truth: EQUAL"

    job.table, job.configure_columns = {"soft_delete": {"column": "note"}}, False
    with pytest.raises(TableError, match="has a column note of type string, and expected is boolean"):
        job.run()


def test_columns_that_are_inferred(spark: SparkSession, tmp_path: Path) -> None:
    """A field of the messages can't have the name of a column that the sink sets, unless it is left out."""
    job = Job(spark, tmp_path, columns=COLUMNS | {"deleted": "string"}, configure_columns=False)
    job.table = {"soft_delete": MARKS}
    job.write([("+I", {"id": n, "note": f"n{n}", "deleted": "no"}) for n in (1, 2)])
    with pytest.raises(ConfigError, match="got 'deleted', which is a field of the messages too, and the sink sets"):
        job.run()
    job.table = {"soft_delete": MARKS, "exclude": ["deleted"]}
    job.write([("-D", {"id": 2, "deleted": "yes"})])
    job.run()
    assert marks(job) == {1: ("n1", False, False), 2: ("n2", True, True)}


def test_computed_columns_and_partitions(spark: SparkSession, tmp_path: Path) -> None:
    """A computed column stays as it was, too. Deleted rows may have files of their own, which have no such column."""
    columns = {"id": "bigint", "region": "string", "note": {"type": "string", "expression": "upper(region)"}}
    job = DeltaJob(spark, tmp_path, partition_by=["deleted"])
    job.table = {"columns": columns, "soft_delete": MARKS}
    job.write([("+I", {"id": n, "region": f"r{n}"}) for n in (1, 2, 3)])
    job.write([("-D", {"id": 1}), ("+U", {"id": 2, "region": "new"}), ("-D", {"id": 3})])
    job.write([("+I", {"id": 3, "region": "again"})])
    job.run()
    assert marks(job) == {1: ("R1", True, True), 2: ("NEW", False, False), 3: ("AGAIN", False, False)}


def test_late_deletes_become_dead_letters(spark: SparkSession, tmp_path: Path) -> None:
    job = a_job(spark, tmp_path, Job, {"format-version": "3"}, "position", late="dead-letter")
    job.write_records([full("+I", 5, n, f"n{n}") for n in (1, 2)])
    job.write_records([change("-D", 4, 1), change("-D", 6, 2), change("-D", 6, 3)])
    job.write_records([full("+U", 5, 2, "late"), full("+I", 5, 3, "late")])
    job.run()
    assert marks(job) == {1: ("n1", False, False), 2: ("n2", True, True)}
    letters = spark.table(job.dead_letters).collect()
    assert sorted((json.loads(found["value"])["id"], found["reason"]) for found in letters) == [
        (number, LATE_REASON) for number in (1, 2, 3)
    ]
    job.table = {"soft_delete": MARKS | {"purge": "1 second"}, "late": "dead-letter"}
    time.sleep(1)
    job.run()
    assert marks(job) == {1: ("n1", False, False)}
    assert spark.table(job.dead_letters).count() == 3


def test_an_archive(spark: SparkSession, tmp_path: Path) -> None:
    """Deletes are counted, and nothing else. Nor does a row go that went to another key."""
    job = Job(spark, tmp_path, columns=COLUMNS, table={"source_deletes": "ignore"})
    job.write_records([full("+I", 1, n, f"n{n}") for n in (1, 2, 3)])
    job.write_records([change("-D", 2, 1), full("-U", 2, 2, "n2"), full("+U", 2, 9, "n2"), full("+U", 3, 3, "u3")])
    job.write_records([full("+I", 4, 4, "n4"), change("-D", 5, 4)])
    job.run()
    assert {row["id"]: row["note"] for row in job.rows()} == {1: "n1", 2: "n2", 3: "u3", 4: "n4", 9: "n2"}
    told = [json.loads(snapshot["summary"]["rowdelta.rows"]) for snapshot in job.snapshots()]
    assert sum(rows.get("ignored", 0) for rows in told) == 3
    assert all(rows["-D"] == rows["-U"] == 0 for rows in told)


def test_a_row_that_is_not_wanted_any_more_is_removed(spark: SparkSession, tmp_path: Path) -> None:
    """A delete of the source marks the row, if the table has it."""
    job = a_job(spark, tmp_path, Job, {"format-version": "3"}, "position", late="drop", where="region RLIKE 'e'")
    job.write_records([full("+I", 1, n, f"n{n}") for n in range(1, 5)])
    job.write_records([change("+U", 2, 1, "us"), change("-D", 2, 2), change("+U", 2, 3, "us"), change("-D", 3, 3)])
    job.write_records([change("-D", 4, 1), change("-D", 4, 4), change("+U", 5, 4, "us"), full("+I", 1, 3, "late")])
    job.run()
    assert marks(job) == {2: ("n2", True, True)}


NOT_SENT = "__debezium_unavailable_value"
DELETED_AT = datetime(2026, 1, 2, tzinfo=UTC)


def event(number: int, customer: str | None, lsn: int) -> tuple[Any, Any]:
    """Debezium's message of an update, or of a delete whose row isn't in it."""
    row = None if customer is None else {"id": number, "customer": customer}
    source = {"lsn": lsn, "ts_ms": int(DELETED_AT.timestamp() * 1000)}
    return {"id": number}, {"before": None, "after": row, "op": "d" if row is None else "u", "source": source}


@pytest.mark.kafka
def test_debezium_sends_the_key_alone(spark: SparkSession, tmp_path: Path, kafka: Kafka) -> None:
    """Of deletes; and updates lack values, also after a delete. A TRUNCATE removes nothing."""
    job = KafkaJob(spark, tmp_path, kafka.bootstrap_servers, {"orders": {"id": "bigint", "customer": "string"}})
    order = {"order_by": ["source.lsn"], "late": "drop", "unavailable": "keep"}
    job.table = {"soft_delete": MARKS, **order}
    kafka.create_topic(job.topic())
    job.produce([event(n, f"c{n}", n) for n in range(1, 6)])
    job.run()
    job.produce([event(1, None, 11), ({"id": 1}, None), event(2, None, 12), event(2, NOT_SENT, 13)])
    job.produce([event(3, NOT_SENT, 14), event(3, None, 15), event(9, None, 16), event(9, NOT_SENT, 17)])
    job.produce([(None, {"op": "t", "source": {"lsn": 18}}), event(4, None, 19)])
    job.run()
    found = {row["id"]: (row["customer"], row["deleted"], row["deleted_at"]) for row in job.rows()}
    gone, live = (True, DELETED_AT), (False, None)
    assert found == {1: ("c1", *gone), 2: ("c2", *live), 3: ("c3", *gone), 4: ("c4", *gone), 5: ("c5", *live)}
    letters = spark.table(f"lake.{job.name}.dead_letters").collect()
    assert sorted(letter["error_class"] for letter in letters) == ["row_absent", "unsupported_event"]

    job.table = {"soft_delete": MARKS | {"purge": "1 second"}, **order}
    job.run()
    assert {row["id"] for row in job.rows()} == {2, 5}
    job.produce([event(1, "back", 21), event(4, None, 22), event(5, None, 23)])
    job.table = {"soft_delete": MARKS, **order}
    job.run()
    assert {row["id"]: (row["customer"], row["deleted"]) for row in job.rows()} == {
        1: ("back", False), 2: ("c2", False), 5: ("c5", True)
    }  # fmt: skip
