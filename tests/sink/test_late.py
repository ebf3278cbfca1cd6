"""Late changes are dropped: the order value of what the table holds, or held last, decides, in each format."""

import json
import os
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions
from pyspark.sql import SparkSession

from changelog.rows import LATE_REASON
from sink.commands.inspection import check, status
from sink.errors import ConfigError, TableError
from tests.delta.harness import DeltaJob
from tests.rewrites import only_sink
from tests.sink.harness import Job, before_commit, crashing
from tests.sink.test_kafka import KafkaJob
from tests.stack.kafka import Kafka

pytestmark = pytest.mark.spark

COLUMNS = {"id": "bigint", "region": "string"}
FORMATS = [
    pytest.param(Job, {"format-version": "2"}, "position", id="v2"),
    pytest.param(Job, {"format-version": "3"}, "position", id="v3"),
    pytest.param(Job, {"format-version": "3"}, "copy-on-write", id="v3-copy-on-write"),
    pytest.param(DeltaJob, {}, "position", id="delta"),
]


def a_job(spark: SparkSession, folder: Path, kind: type[Job], properties: Mapping[str, str], deletes: Any) -> Job:
    return kind(spark, folder, columns=COLUMNS, properties=properties, deletes=deletes, table={"late": "drop"})


def change(op: str, order: int, number: int, region: str | None = None) -> dict[str, Any]:
    return {"row_kind": op, "seq": order, "id": number, "region": region}


def regions(job: Job) -> dict[int, str]:
    return {row["id"]: row["region"] for row in job.rows()}


@pytest.mark.parametrize(("kind", "properties", "deletes"), FORMATS[1::2])
def test_late_changes_are_dropped(
    spark: SparkSession, tmp_path: Path, kind: type[Job], properties: Mapping[str, str], deletes: Any
) -> None:
    job = a_job(spark, tmp_path, kind, properties, deletes)
    job.write_records([change("+I", 10, 1, "new"), change("+I", 10, 2, "new"), change("+I", 10, 3, "new")])
    job.write_records([change("+U", 9, 1, "late"), change("-D", 9, 2), change("-D", 11, 3)])
    job.write_records([change("+U", 10, 1, "same"), change("+I", 10, 3, "late"), change("+I", 4, 4, "first")])
    job.run()
    assert regions(job) == {1: "same", 2: "new", 4: "first"}
    assert {row["id"]: row["_order"] for row in job.rows()} == {1: 10, 2: 10, 4: 4}
    assert any("ordered by seq; late changes are left out" in line for line in check(spark, job.config()))
    assert "  late: 3 changes left out so far" in list(status(spark, job.config()))

    shutil.rmtree(job.index_folder)  # and the position says where the deleted keys are
    job.write_records([change("+I", 10, 3, "late"), change("+U", 9, 1, "late"), change("+U", 5, 4, "newer")])
    job.run()
    assert regions(job) == {1: "same", 2: "new", 4: "newer"}
    job.write_records([change("+I", 12, 3, "again")])
    job.run()
    assert regions(job) == {1: "same", 2: "new", 3: "again", 4: "newer"}


def test_late_changes_become_dead_letters_once(spark: SparkSession, tmp_path: Path) -> None:
    job = a_job(spark, tmp_path, Job, {"format-version": "3"}, "position")
    job.table = {"late": "dead-letter"}
    job.write_records([change("+I", 10, 1, "new"), change("+I", 10, 2, "new")])
    job.run()
    job.write_records([change("+U", 9, 1, "late"), change("-D", 11, 2), change("+I", 3, 3, "first")])
    with crashing("before the commit"), pytest.raises(Exception, match="crash"):
        job.run()
    job.write_records([change("+I", 10, 2, "late"), change("+U", 4, 3, "newer")])
    job.run()
    assert regions(job) == {1: "new", 3: "newer"}
    letters = job.spark.table(job.dead_letters).collect()
    found = sorted((letter["error_class"], json.loads(letter["value"])["seq"], letter["reason"]) for letter in letters)
    assert found == [("late", 9, LATE_REASON), ("late", 10, LATE_REASON)]


def test_a_second_source_of_the_same_keys(spark: SparkSession, tmp_path: Path) -> None:
    """A backfill writes beside the stream, and knows what the stream has deleted, and the other way round."""
    stream = a_job(spark, tmp_path, Job, {"format-version": "3"}, "position")
    backfill = replace(stream, folder=tmp_path / "backfill", sink_id="other", checkpoint=Path())
    stream.write_records([change("+I", 5, 1, "stream"), change("+I", 5, 2, "stream"), change("-D", 6, 3)])
    stream.run()
    backfill.write_records([change("+I", n, n, "backfill") for n in range(1, 8)])
    backfill.run()
    expected = {1: "stream", 2: "stream", 4: "backfill", 5: "backfill", 6: "backfill", 7: "backfill"}
    assert regions(stream) == expected  # 3 was deleted after its row of the backfill
    backfill.write_records([change("-D", 9, 2), change("-D", 4, 1), change("-D", 9, 7)])
    backfill.run()
    stream.write_records([change("+U", 8, 2, "late"), change("+U", 8, 7, "late"), change("+U", 8, 4, "stream")])
    stream.run()
    assert regions(stream) == {1: "stream", 4: "stream", 5: "backfill", 6: "backfill"}
    shutil.rmtree(stream.index_folder)
    stream.write_records([change("+I", 8, 2, "late"), change("+U", 8, 7, "late"), change("+U", 5, 3, "late")])
    stream.run()
    assert regions(stream) == {1: "stream", 4: "stream", 5: "backfill", 6: "backfill"}


def test_another_sink_deletes_between_look_up_and_commit(spark: SparkSession, tmp_path: Path) -> None:
    """A key that has no row, so that no file changes."""
    stream = a_job(spark, tmp_path, Job, {"format-version": "3"}, "position")
    backfill = replace(
        stream, spark=spark.newSession(), folder=tmp_path / "backfill", sink_id="other", checkpoint=Path()
    )
    stream.write_records([change("+I", 5, 1, "stream"), change("+I", 5, 2, "stream")])
    stream.run()
    stream.write_records([change("-D", 9, 9)])
    backfill.write_records([change("+U", 7, 9, "late"), change("+U", 7, 2, "backfill")])
    with before_commit(stream.run):
        backfill.run()
    assert regions(stream) == {1: "stream", 2: "backfill"}


@pytest.mark.parametrize("kind", [Job, DeltaJob])
def test_orphans_are_removed_and_deleted_keys_stay(spark: SparkSession, tmp_path: Path, kind: type[Job]) -> None:
    job = a_job(spark, tmp_path, kind, {"format-version": "3"} if kind is Job else {}, "position")
    job.write_records([change("+I", 1, 1, "a"), change("+I", 1, 2, "b")])
    job.write_records([change("-D", 5, 1)])
    job.run()
    orphan = job.table_folder / ("x.parquet" if isinstance(job, DeltaJob) else "data/x.parquet")
    orphan.write_bytes(b"")
    long_ago = time.time() - 9 * 24 * 3600
    for path in job.table_folder.rglob("*"):
        os.utime(path, (long_ago, long_ago))
    if isinstance(job, DeltaJob):
        job.sql("VACUUM {t}")
    else:
        job.call("remove_orphan_files")
    assert not orphan.exists()
    (file,) = (job.table_folder / "_rowdelta" / "deleted").glob("*.parquet")
    assert pq.read_table(file).column("id").to_pylist() == [1]
    outdated = file.with_name(f"{int(long_ago)}-after-a-crash.parquet")
    outdated.write_bytes(b"")
    assert only_sink(job).upkeep.remove_orphans(timedelta(days=3)) == [str(outdated)]
    assert file.exists()
    assert not outdated.exists()
    shutil.rmtree(job.index_folder)
    job.write_records([change("+I", 4, 1, "late"), change("+I", 2, 2, "newer")])
    job.run()
    assert regions(job) == {2: "newer"}


def test_deleted_keys_are_where_data_files_are(spark: SparkSession, tmp_path: Path) -> None:
    """A catalog may vend credentials for nothing else. And the owner may move that place."""
    places = [tmp_path / "first", tmp_path / "second"]
    job = a_job(spark, tmp_path, Job, {"write.data.path": str(places[0])}, "position")
    job.write_records([change("+I", 1, 1, "a"), change("+I", 1, 2, "b"), change("+I", 1, 3, "c"), change("-D", 5, 1)])
    job.run()
    spark.sql(f"ALTER TABLE {job.target} SET TBLPROPERTIES ('write.data.path' = '{places[1]}')")
    job.write_records([change("-D", 5, 2)])
    job.run()
    assert [len(list((place / "_rowdelta" / "deleted").glob("*.parquet"))) for place in places] == [1, 1]
    assert not (job.table_folder / "_rowdelta").exists()
    shutil.rmtree(job.index_folder)
    job.write_records([change("+I", 4, number, "late") for number in (1, 2, 3)])
    job.run()
    assert regions(job) == {3: "late"}


def test_a_delete_is_forgotten_after_its_time(spark: SparkSession, tmp_path: Path) -> None:
    job = a_job(spark, tmp_path, Job, {"format-version": "3"}, "position")
    job.table = {"late": "drop", "tombstones": "1 second"}
    job.write_records([change("+I", 1, 1, "a"), change("-D", 5, 1), change("+I", 5, 2, "stays")])
    job.run()
    time.sleep(2)
    job.write_records([change("+I", 4, 1, "counts as new"), change("+U", 4, 2, "late")])
    job.run()
    assert regions(job) == {1: "counts as new", 2: "stays"}


def test_a_table_gets_the_column_and_all_changes_are_later_than_its_rows(spark: SparkSession, tmp_path: Path) -> None:
    job = a_job(spark, tmp_path, Job, {"format-version": "3"}, "position")
    job.table = {}
    job.write_records([change("+I", 10, 1, "before"), change("+I", 10, 2, "before")])
    job.run()
    job.table = {"late": "drop"}
    job.write_records([change("+U", 3, 1, "new")])
    job.run()
    job.write_records([change("+U", 2, 1, "late")])
    job.run()
    assert {row["id"]: (row["region"], row["_order"]) for row in job.rows()} == {1: ("new", 3), 2: ("before", None)}


def test_a_column_of_another_field_is_not_compared(spark: SparkSession, tmp_path: Path) -> None:
    job = a_job(spark, tmp_path, Job, {"format-version": "3"}, "position")
    job.file_format = "json"
    job.write_records([change("+I", 10, 1, "new")])
    job.run()
    for order in (["other bigint"], ["other bigint", "seq"]):
        job.table = {"late": "drop", "order_by": order}
        with pytest.raises(
            TableError, match=r"column _order holds seq, but order_by has other: its values can't be comp"
        ):
            job.run()
    job.table = {"late": "drop", "order_by": ["other bigint"], "order_column": "_order_of_other"}
    job.write_records([change("+U", 1, 1, "newer") | {"other": 5}, change("+I", 1, 2, "new") | {"other": 7}])
    job.write_records([change("+U", 2, 2, "late") | {"other": 6}])
    job.run()
    assert regions(job) == {1: "newer", 2: "new"}


def test_a_column_of_somebody_else_is_not_taken_over(spark: SparkSession, tmp_path: Path) -> None:
    job = a_job(spark, tmp_path, Job, {"format-version": "3"}, "position")
    job.columns = {**COLUMNS, "_order": "bigint"}
    job.table = {}
    job.write_records([change("+I", 10, 1, "a") | {"_order": 3}])
    job.run()
    job.table = {"late": "drop"}
    with pytest.raises((TableError, ConfigError), match="_order"):
        job.run()


def test_an_order_column_becomes_wider(spark: SparkSession, tmp_path: Path) -> None:
    """The index and the deleted keys stay as they are."""
    job = a_job(spark, tmp_path, Job, {"format-version": "3"}, "position")
    job.columns = {"id": "bigint", "version": "int", "region": "string"}
    job.table = {"late": "drop", "order_by": ["version"]}
    rows = [(1, 5), (2, 5)]
    job.write_records([{"row_kind": "+I", "id": n, "version": v, "region": "a"} for n, v in rows])
    job.write_records([{"row_kind": "-D", "id": 2, "version": 9, "region": "a"}])
    job.run()
    job.spark.sql(f"ALTER TABLE {job.target} ALTER COLUMN version TYPE bigint")
    job.columns = {**job.columns, "version": "bigint"}
    (index,) = {job.index_version(manifest).encoding for manifest in (job.index_folder / "versions").glob("*.json")}
    job.write_records([{"row_kind": "+I", "id": n, "version": 8, "region": "b"} for n in (1, 2)])
    job.run()
    assert regions(job) == {1: "b"}
    assert {job.index_version(m).encoding for m in (job.index_folder / "versions").glob("*.json")} == {index}


@pytest.mark.parametrize(
    ("order_by", "columns", "why"),
    [
        (
            "x",
            {"x": {"type": "bigint", "from": "y"}},
            "got x, a column whose values aren't those of the messages' field x",
        ),
        ("x", {"x": {"type": "bigint", "expression": "id + 1"}}, "got x, a column whose values aren't those of the"),
        ("x", {"x": "uuid"}, "got x, a uuid, whose text and bytes differ"),
        ("x int", {"x": "bigint"}, "but the column x is bigint, and late: drop compares its values. Write order_by: x"),
    ],
)
def test_columns_that_do_not_hold_the_order_are_refused(
    spark: SparkSession, tmp_path: Path, order_by: str, columns: Mapping[str, Any], why: str
) -> None:
    job = a_job(spark, tmp_path, Job, {"format-version": "3"}, "position")
    if columns["x"] == "uuid":
        fields = [("id", "long", True), ("x", "uuid", False)]
        job.create_table([{"id": i, "name": n, "type": t, "required": r} for i, (n, t, r) in enumerate(fields, 1)])
        job.configure_columns = False
    else:
        job.columns = {"id": "bigint", **columns}
    job.table = {"late": "drop", "order_by": [order_by]}
    job.write_text("")
    with pytest.raises(ConfigError, match=re.escape(why)):
        job.run()


@pytest.mark.parametrize("schema_changes", ["evolve", "fail"])
def test_late_changes_are_applied_again_and_the_column_stays(
    spark: SparkSession, tmp_path: Path, schema_changes: str
) -> None:
    job = a_job(spark, tmp_path, Job, {"format-version": "3"}, "position")
    job.write_records([change("+I", 10, 1, "new"), change("+I", 10, 2, "stays")])
    job.run()
    job.table = {"schema_changes": schema_changes}
    job.write_records([change("+U", 9, 1, "late"), change("+I", 9, 3, "new")])
    job.run()
    assert {row["id"]: (row["region"], row["_order"]) for row in job.rows()} == {
        1: ("late", None), 2: ("stays", 10), 3: ("new", None)
    }  # fmt: skip


@pytest.fixture
def topic(spark: SparkSession, tmp_path: Path, kafka: Kafka) -> KafkaJob:
    tables = {"orders": {"id": "bigint", "customer": "string"}}
    return KafkaJob(spark, tmp_path, kafka.bootstrap_servers, tables=tables)


def event(source: Mapping[str, Any], ts_ms: int, number: int, customer: str | None) -> tuple[Any, Any]:
    """Debezium's message of an update, or of a delete if there is no customer."""
    row = {"id": number, "customer": customer}
    images = {"before": row, "after": None, "op": "d"} if customer is None else {"after": row, "op": "u"}
    return {"id": number}, {**images, "source": dict(source), "ts_ms": ts_ms}


@pytest.mark.kafka
def test_partitions_are_added_and_keys_move(topic: KafkaJob, kafka: Kafka) -> None:
    """The old partition's messages of a key come after the new one's."""
    topic.table = {"order_by": ["source.lsn"], "late": "drop"}
    kafka.create_topic(topic.topic())
    topic.produce([event({"lsn": n}, 0, n, "first") for n in range(1, 5)])
    topic.run()
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    admin.create_partitions([NewPartitions(topic.topic(), 2)])[topic.topic()].result(30)
    topic.produce([event({"lsn": 21}, 0, 1, "newest"), event({"lsn": 22}, 0, 2, None)], partition=1)
    topic.run()
    topic.produce([event({"lsn": 11}, 0, 1, "late"), event({"lsn": 12}, 0, 2, "late"), event({"lsn": 13}, 0, 3, "new")])
    topic.run()
    assert {row["id"]: row["customer"] for row in topic.rows()} == {1: "newest", 3: "new", 4: "first"}


@pytest.mark.kafka
def test_an_update_that_lacks_values_is_a_dead_letter_unless_the_user_keeps_it(topic: KafkaJob, kafka: Kafka) -> None:
    """A late one may have values that the table's row, by a later update without them, has missed."""
    topic.table = {"order_by": ["source.lsn"], "late": "drop"}
    kafka.create_topic(topic.topic())
    topic.produce([event({"lsn": 1}, 0, 1, "a"), event({"lsn": 3}, 0, 1, "__debezium_unavailable_value")])
    topic.run()
    letters = topic.spark.table(f"lake.{topic.name}.dead_letters").collect()
    assert [(letter["offset"], letter["error_class"]) for letter in letters] == [(1, "unavailable_value")]
    topic.produce([event({"lsn": 2}, 0, 1, "b")])
    topic.run()
    topic.table = {**topic.table, "unavailable": "keep"}
    topic.produce([event({"lsn": 4}, 0, 1, "__debezium_unavailable_value"), event({"lsn": 3}, 0, 1, "late")])
    topic.run()
    assert [(row["customer"], row["_order"]) for row in topic.rows()] == [("late", 4)]
    assert topic.spark.table(f"lake.{topic.name}.dead_letters").count() == 1


@pytest.mark.kafka
def test_headers_say_the_order(topic: KafkaJob, kafka: Kafka) -> None:
    topic.table = {"order_by": ["headers.version int", "headers.part"], "late": "drop"}
    topic.options = {"maxOffsetsPerTrigger": "1"}
    kafka.create_topic(topic.topic())
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers})
    places: list[tuple[Any, ...]] = [("9", "1"), ("10", "1"), ("9", "7"), ("10", "1", "0"), (b"\xff", "1"), ("x", "1")]
    for version, *parts in places:
        headers = [("version", version), *(("part", part) for part in parts)]
        key, value = event({}, 0, 1, f"{version!r} {parts}")
        producer.produce(topic.topic(), json.dumps(value), json.dumps(key), headers=headers)
    producer.flush()
    topic.run()
    assert [row["customer"] for row in topic.rows()] == ["'10' ['1']"]
    letters = topic.spark.table(f"lake.{topic.name}.dead_letters").collect()
    assert [(letter["offset"], letter["error_class"]) for letter in letters] == [(5, "missing_order")]


@pytest.mark.kafka
def test_fields_of_the_message_and_of_the_record_in_both_directions(topic: KafkaJob, kafka: Kafka) -> None:
    """Each key gets the later one of two changes first."""
    topic.table = {"order_by": ["source.file string", "source.rank desc", "_ts", "_offset"], "late": "drop"}
    kafka.create_topic(topic.topic())
    places = [("b.1", 7, 100), ("b.1", 6, 50), ("b.1", 6, 60), ("b.2", None, 0), ("b.2", 9, 0), ("b.2", -1, 0)]

    def said(number: int, file: str, rank: int | None, ts: int) -> tuple[Any, Any]:
        return event({"file": file, "rank": rank}, ts, number, f"{file} {rank} {ts}")

    topic.produce([said(number, *later) for number, later in enumerate(places[1:])])
    topic.run()
    rows = topic.rows()
    topic.produce([said(number, *earlier) for number, earlier in enumerate(places[:-1])])
    topic.run()
    assert topic.rows() == rows
    assert [row["customer"] for row in rows] == [f"{file} {rank} {ts}" for file, rank, ts in places[1:]]
    assert (rows[-1]["_order"], rows[-1]["_order_2"], rows[-1]["_order_3"].timestamp()) == ("b.2", -1, 0)
