"""Dead letters: kept as they were, counted, limited, sent to a topic, and replayed so that an old change never undoes a
newer one.
"""

import json
import logging
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import AlterConfigOpType, ConfigEntry, ConfigResource
from confluent_kafka.cimpl import NewPartitions
from pyspark.sql import DataFrame, SparkSession

from sink import cli
from sink.commands import inspection
from sink.commands.replay import Replayed, replay
from sink.config import Config
from sink.deadletters import table as dead_letters
from sink.deadletters.table import Selection
from sink.deadletters.topic import DeadLetterTopic
from sink.errors import ConfigError, DataError, RowdeltaError, TableError, TemporaryError
from sink.run.pipeline import Pipeline
from sink.spark import session
from sink.spark.versions import to_arrow
from tests.sink.harness import CrashError, Job, crashing
from tests.sink.test_kafka import KafkaJob
from tests.stack.kafka import Kafka
from tests.stack.process import wait_until

pytestmark = [pytest.mark.spark, pytest.mark.kafka]

NOT_UTF_8 = b"\xff\xfe{\x00"
Letter = dict[str, Any]


@pytest.fixture
def job(spark: SparkSession, tmp_path: Path, kafka: Kafka) -> KafkaJob:
    """Two partitions. Amounts arrive as text, which is refused until `corrected` says so."""
    job = KafkaJob(spark, tmp_path, kafka.bootstrap_servers)
    kafka.create_topic(job.topic(), 2)
    return job


@pytest.fixture
def files(spark: SparkSession, tmp_path: Path) -> Job:
    return Job(spark, tmp_path, file_format="json")


def change(op: str, number: int, customer: str, amount: str | None = None) -> tuple[Any, Any]:
    """A message. Those with an amount are bad until the configuration is corrected."""
    row = {"id": number, "customer": customer, "amount": amount}
    return {"id": number}, {"op": op, "before": row if op == "d" else None, "after": None if op == "d" else row}


def corrected(job: KafkaJob) -> Config:
    config = job.config()
    source = config.source.model_copy(update={"format_options": {"decimal.handling.mode": "string"}})
    return config.model_copy(update={"source": source})


def run(job: KafkaJob, config: Config) -> None:
    Pipeline(job.spark, config).run()


def replayed(job: KafkaJob, *, force: bool = False, config: Config | None = None, **selection: str) -> Replayed:
    (outcome,) = replay(job.spark, config or corrected(job), Selection(**selection), force)
    return outcome


def content(job: KafkaJob) -> dict[int, tuple[str, str | None]]:
    return {row["id"]: (row["customer"], row["amount"] and str(row["amount"])) for row in job.rows()}


def letters(job: KafkaJob | Job) -> list[Letter]:
    table = job.dead_letters if isinstance(job, Job) else f"lake.{job.name}.dead_letters"
    rows: list[Letter] = to_arrow(job.spark.table(table)).to_pylist()
    return sorted(rows, key=lambda row: (row["source"], row["partition"] or 0, row["offset"] or 0, row["value"]))


def messages(kafka: Kafka, topic: str, count: int) -> list[Any]:
    """The first `count` messages, and any that follow within a second."""
    consumer = Consumer({"bootstrap.servers": kafka.bootstrap_servers, "group.id": "test", "enable.auto.commit": False})
    try:
        consumer.assign([TopicPartition(topic, 0, 0)])
        found = consumer.consume(count, timeout=30)
        return [*found, *consumer.consume(100, timeout=1)]
    finally:
        consumer.close()


# what the table keeps


def test_bytes_that_are_no_utf_8_are_kept_as_they_are(job: KafkaJob) -> None:
    job.produce(
        [(b"\xfe", NOT_UTF_8), (b"\xc3", b'{"op": "c", "after": {"id": 1, "customer": "\xff", "amount": "x"}}')]
    )
    job.run()
    assert [(letter["key"], letter["value"]) for letter in letters(job)] == [
        (b"\xfe", NOT_UTF_8),
        (b"\xc3", b'{"op": "c", "after": {"id": 1, "customer": "\xff", "amount": "x"}}'),
    ]
    assert [(letter["source"], letter["partition"], letter["offset"]) for letter in letters(job)] == [
        (job.topic(), 0, 0),
        (job.topic(), 0, 1),
    ]
    assert {letter["table"] for letter in letters(job)} == {job.target()}
    assert all(letter["reason"] and letter["error_class"] and letter["time"] for letter in letters(job))


def test_another_table_of_that_name_is_refused(files: Job) -> None:
    files.write([("+I", {"id": 1})])
    files.spark.sql(f"CREATE TABLE {files.dead_letters} (id bigint) USING iceberg")
    message = "has no column 'table', so it can't be the dead-letter table"
    with pytest.raises(TableError, match=message):
        list(inspection.check(files.spark, files.config()))
    with pytest.raises(TableError, match=message):
        files.run()


def test_a_column_that_somebody_added_to_the_dead_letter_table(files: Job) -> None:
    files.write_text('x\n{"row_kind": "+I", "seq": 1, "id": 1, "region": "eu"}\n')
    files.run()
    files.spark.sql(f"ALTER TABLE {files.dead_letters} ADD COLUMN handled BOOLEAN")
    files.write_text("y\n")
    files.run()
    assert sorted((letter["value"], letter["handled"]) for letter in letters(files)) == [(b"x", None), (b"y", None)]


def test_a_dead_letter_table_of_format_version_1(files: Job) -> None:
    """It only grows, and needs no row-level deletes."""
    empty = files.spark.createDataFrame([], dead_letters.COLUMNS)
    empty.writeTo(files.dead_letters).using("iceberg").tableProperty("format-version", "1").create()
    files.write_text('x\n{"row_kind": "+I", "seq": 1, "id": 1, "region": "eu"}\n')
    assert not [line for line in inspection.check(files.spark, files.config()) if "format version" in line]
    files.run()
    assert [letter["value"] for letter in letters(files)] == [b"x"]


def test_a_new_topic_s_bad_records_are_kept_after_a_reset(job: KafkaJob, kafka: Kafka) -> None:
    """The new topic's offsets begin at 0, below the position that the dead-letter table has for the target."""
    same = (b"k", b"as before")
    job.produce([same, (b"k", b"old"), change("c", 1, "a"), (None, b"end")])
    job.run()
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    admin.delete_topics([job.topic()])[job.topic()].result(30)
    assert wait_until(lambda: job.topic() not in admin.list_topics(timeout=5).topics)
    kafka.create_topic(job.topic(), 2)
    job.produce([same, (b"k", b"new"), change("c", 2, "b")])
    job.spark.sql(
        f"ALTER TABLE {job.target()} UNSET TBLPROPERTIES IF EXISTS ('rowdelta.shop.position', 'rowdelta.shop.start')"
    )
    job.run()
    assert content(job) == {1: ("a", None), 2: ("b", None)}
    assert [(letter["offset"], letter["value"]) for letter in letters(job)] == [
        (0, b"as before"),
        (1, b"new"),
        (1, b"old"),
        (3, b"end"),
    ]
    job.produce([change("c", 3, "c"), (None, b"next")])
    job.run()
    assert [letter["value"] for letter in letters(job)][-2:] == [b"end", b"next"]


def test_what_is_bad_only_after_a_crash_is_kept(job: KafkaJob) -> None:
    """The dead letters were committed, the table not, and the next run has another configuration."""
    job.produce([change("c", 1, "a", "1.00"), change("c", 2, "b", "ZA=="), (None, b"garbage"), (None, None)])
    with crashing("before the commit"), pytest.raises(TemporaryError):
        job.run()
    assert [letter["offset"] for letter in letters(job)] == [0, 2]
    run(job, corrected(job))
    assert content(job) == {1: ("a", "1.00")}
    assert [letter["offset"] for letter in letters(job)] == [0, 1, 2]


def test_two_crashes_in_different_partitions(job: KafkaJob) -> None:
    """The second run has bad records of another partition, and reads less of the first one."""
    job.produce([(None, b"first"), (None, b"second"), (None, b"third")], partition=0)
    with crashing("before the commit"), pytest.raises(TemporaryError):
        job.run()
    job.produce([(None, b"other"), (None, b"last")], partition=1)
    job.lose_checkpoint()
    job.options = {"maxOffsetsPerTrigger": 2}
    with crashing("before the commit"), pytest.raises(TemporaryError):
        job.run()
    known = [(letter["partition"], letter["offset"]) for letter in letters(job)]
    assert known == [(0, 0), (0, 1), (0, 2), (1, 0)]
    kept = dead_letters.open_dead_letters(job.spark, job.config())
    assert kept.position(job.target()) == {"0": 3, "1": 1}
    job.options = {}
    job.run()
    assert [(letter["partition"], letter["offset"]) for letter in letters(job)] == [*known, (1, 1)]


# max_bad_records


def test_more_bad_records_than_allowed_stop_the_job_before_the_micro_batch_that_has_them(files: Job) -> None:
    files.sections = {"sink": {"max_bad_records": 3}}
    files.write_text('x\ny\n{"row_kind": "+I", "seq": 1, "id": 1, "region": "eu"}\n')
    files.write_text('z\n{"row_kind": "+I", "seq": 2, "id": 2, "region": "eu"}\n')
    files.write_text(
        '{"row_kind": "+I", "seq": 3, "id": null, "region": "eu"}\n{"row_kind": "+I", "seq": 3, "id": 3, "region": '
        '"eu"}\n'
    )
    with pytest.raises(DataError) as caught:
        files.run()
    assert caught.value.exit_code == 3
    for part in ("4 bad records in this "
                 "run", "max_bad_records is 3 (3 unparseable, 1 null_key)", "key column id is null",
                 "rowdelta dead-letters counts"):  # fmt: skip
        assert part in str(caught.value)
    assert [row["id"] for row in files.rows()] == [1, 2], "three are allowed"
    assert sorted(letter["value"] for letter in letters(files)) == [b"x", b"y", b"z"]
    assert files.unreferenced_files() == []
    files.run()  # each run counts from 0
    assert [row["id"] for row in files.rows()] == [1, 2, 3]
    assert len(letters(files)) == 4


def test_a_micro_batch_with_more_bad_records_than_allowed_stops_every_run(files: Job) -> None:
    files.sections = {"sink": {"max_bad_records": 0}}
    files.write_text('x\n{"row_kind": "+I", "seq": 1, "id": 1, "region": "eu"}\n')
    for _ in range(2):
        with pytest.raises(DataError, match="1 bad record in this run, and max_bad_records is 0"):
            files.run()
    assert files.rows() == []
    assert letters(files) == []


# rowdelta dead-letters list and counts


@pytest.fixture
def command(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, list[str]]]:
    """`rowdelta dead-letters …` in the session of the tests. Returns the exit code and the lines printed."""
    monkeypatch.setattr(session, "start", lambda _, **how: spark)
    monkeypatch.setattr(session, "stop", lambda _: None)

    def call(config: Config, action: str, *options: str) -> tuple[int, list[str]]:
        file = tmp_path / "sink.yaml"
        file.write_text(yaml.safe_dump(config.model_dump(exclude_none=True)))
        capsys.readouterr()
        code = cli.main(["dead-letters", action, str(file), *options])
        return code, capsys.readouterr().out.splitlines()

    return call


@pytest.mark.versions
def test_list_and_counts(files: Job, command: Any) -> None:
    files.write_text("old one\n")
    files.run()
    files.write_text('two\nthree\n{"row_kind": "+I", "seq": 1, "id": null, "region": "eu"}\n')
    files.run()
    code, lines = command(files.config(), "list", "--limit", "3")
    assert code == 0
    assert [lines[0].split(), len(lines)] == [["time", "table", "class", "record", "reason", "value"], 4]
    assert "old one" not in "".join(lines), "newest first"
    _, lines = command(files.config(), "list", "--class", "null_key", "--json")
    (letter,) = map(json.loads, lines)
    assert (letter["table"], letter["error_class"]) == (files.target, "null_key")
    assert json.loads(letter["value"])["region"] == "eu"
    _, lines = command(files.config(), "list", "--reason", "is not a JSON", "--json")
    assert [json.loads(line)["value"] for line in lines][-1] == "old one"
    assert len(lines) == 3
    there = f"There are some of {files.target} (null_key, unparseable)"
    for action in ("list", "counts"):
        _, lines = command(files.config(), action, "--table", "lake.other.table")
        assert lines == [f"no dead letters of table 'lake.other.table'. {there}"]
    _, lines = command(files.config(), "list", "--table", files.target, "--class", "null_kee")
    assert lines == [f"no dead letters of table '{files.target}', class 'null_kee'. {there}"]
    _, lines = command(files.config(), "counts")
    assert [line.split()[:3] for line in lines] == [
        ["count", "table", "class"],
        ["3", files.target, "unparseable"],
        ["1", files.target, "null_key"],
    ]
    _, lines = command(files.config(), "counts", "--json")
    assert [(json.loads(line)["count"], json.loads(line)["error_class"]) for line in lines] == [
        (3, "unparseable"),
        (1, "null_key"),
    ]


def test_bytes_that_are_no_utf_8_are_shown(job: KafkaJob, command: Any) -> None:
    job.produce([(None, NOT_UTF_8)])
    job.run()
    _, lines = command(job.config(), "list", "--json")
    assert json.loads(lines[0])["value_base64"] == "//57AA=="
    _, lines = command(job.config(), "list")
    assert lines[1].rstrip().endswith(r"\xff\xfe{")


def test_no_dead_letter_table(files: Job, command: Any) -> None:
    assert command(files.config(), "list") == (4, [])


# replay


@pytest.mark.parametrize(
    ("deletes", "mode"),
    [
        pytest.param("position", "upsert", marks=pytest.mark.versions),
        ("equality", "changelog"),
    ],
)
def test_replay_applies_what_was_refused_but_undoes_nothing_newer(job: KafkaJob, deletes: str, mode: str) -> None:
    job.table = {"deletes": deletes, "mode": mode}
    job.produce([change("c", 1, "old"), change("c", 3, "deleted later"), change("c", 7, "other")])
    job.run()
    job.produce(
        [
            change("c", 2, "late", "12.50"),
            change("u", 1, "changed", "99.00"),
            change("u", 3, "deleted later", "3.00"),
            change("c", 4, "first", "4.00"),
            change("c", 5, "first", "5.00"),
            change("u", 5, "second", "5.50"),
            (None, b"garbage"),
        ]
    )
    job.produce([change("c", 8, "elsewhere", "8.00")], partition=1)
    job.run()
    job.produce([change("d", 3, "deleted later"), change("u", 4, "newer"), change("c", 9, "other")])
    job.run()
    assert content(job) == {1: ("old", None), 4: ("newer", None), 7: ("other", None), 9: ("other", None)}
    assert len(letters(job)) == 8
    position = job.spark.sql(f"SHOW TBLPROPERTIES {job.target()}").collect()

    outcome = replayed(job)

    assert outcome == Replayed(job.target(), applied=7, refused={"unparseable": 1}, ahead=0, gone=0)
    expected = {
        1: ("changed", "99.00"),
        2: ("late", "12.50"),
        4: ("newer", None),
        5: ("second", "5.50"),
        7: ("other", None),
        8: ("elsewhere", "8.00"),
        9: ("other", None),
    }
    assert content(job) == expected
    assert [letter["value"] for letter in letters(job)] == [b"garbage"]
    assert _positions(position) == _positions(job.spark.sql(f"SHOW TBLPROPERTIES {job.target()}").collect())
    assert replayed(job).applied == 0
    job.produce([change("u", 2, "later", "13.00"), change("d", 8, "elsewhere")])
    run(job, corrected(job))
    assert content(job) == {key: row for key, row in expected.items() if key != 8} | {2: ("later", "13.00")}


def _positions(properties: list[Any]) -> Any:
    """The position, and what came from where up to it."""
    values = {row["key"]: row["value"] for row in properties}
    return json.loads(values["rowdelta.shop.position"])["position"], values["rowdelta.shop.streamed"]


def test_replay_undoes_nothing_newer_in_another_partition(job: KafkaJob, kafka: Kafka) -> None:
    """Key 1 has moved to partition 0, before that one's only letter, key 2 from there, and key 3 to and fro."""
    job.produce([change("c", 1, "old", "1.00"), change("c", 4, "only", "4.00")], partition=1)
    job.produce([change("c", 2, "older"), change("c", 3, "older")], partition=0)
    time.sleep(0.05)
    job.produce([change("u", 2, "newer", "2.00"), change("c", 3, "old", "3.00")], partition=1)
    time.sleep(0.05)
    job.produce([change("u", 1, "newer"), change("u", 3, "newer"), change("c", 5, "late", "5.00")], partition=0)
    job.run()
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    admin.create_partitions([NewPartitions(job.topic(), 3)])[job.topic()].result(30)
    job.produce([change("u", 3, "newest")], partition=2)
    job.run()
    assert replayed(job).applied == 5
    expected = {1: ("newer", None), 2: ("newer", "2.00"), 3: ("newest", None), 4: ("only", "4.00")}
    assert content(job) == expected | {5: ("late", "5.00")}


def test_replay_undoes_nothing_newer_of_a_machine_whose_clock_is_behind(job: KafkaJob, kafka: Kafka) -> None:
    """Its change is in another partition, and Kafka's timestamp of it is an hour before that of the letter."""
    job.table = {"order_by": ["customer string"]}
    now = int(time.time() * 1000)
    job.produce([change("c", 1, "a", "1.00")], partition=0, timestamp=now)
    job.produce([change("u", 1, "b")], partition=1, timestamp=now - 3_600_000)
    job.run()
    assert replayed(job).applied == 1
    assert content(job) == {1: ("b", None)}


def test_replay_undoes_no_truncate_and_repeats_none(spark: SparkSession, tmp_path: Path, kafka: Kafka) -> None:
    """The messages state the key. Those of a TRUNCATE have none, which doesn't mean that the table has none."""
    job = KafkaJob(spark, tmp_path, kafka.bootstrap_servers, key={"orders": []})
    kafka.create_topic(job.topic(), 1)
    truncate = None, {"op": "t", "before": None, "after": None}
    job.produce([change("c", 1, "a"), change("c", 2, "a", "1.50"), truncate, change("c", 3, "b")])
    job.produce([change("c", 4, "b", "2.50"), truncate, change("c", 5, "c"), change("c", 6, "c", "3.50")])
    job.run()
    assert content(job) == {5: ("c", None)}
    job.table = {"truncate": "reject"}
    job.produce([truncate, change("c", 7, "d")])
    job.run()
    assert len(letters(job)) == 4
    job.table = {}
    assert str(replayed(job)).endswith("3 replayed; 1 still refused (1 unsupported_event)")
    assert content(job) == {5: ("c", None), 7: ("d", None)}, "what was truncated doesn't come back"
    assert [letter["offset"] for letter in letters(job)] == [8]
    job.produce([change("c", 8, "d", "4.50"), change("c", 9, "e"), truncate, change("c", 10, "e", "5.50")])
    job.run()
    assert str(replayed(job)).endswith("2 replayed; 1 still refused (1 unsupported_event)")
    assert content(job) == {10: ("e", "5.50")}


def test_replay_opens_a_version_that_a_truncate_closes(spark: SparkSession, tmp_path: Path, kafka: Kafka) -> None:
    """At the same time as others, the TRUNCATE has its place between them."""
    job = KafkaJob(spark, tmp_path, kafka.bootstrap_servers)
    job.table = {"history": {}, "order_by": ["ts_ms bigint"]}
    kafka.create_topic(job.topic(), 1)
    changes = [change("c", 1, "a"), change("c", 2, "a", "1.50"), change("u", 1, "b"), change("c", 1, "c")]
    said = [(key, value | {"ts_ms": time}) for time, (key, value) in zip((1, 2, 5, 5), changes, strict=True)]
    job.produce([*said[:3], (None, {"op": "t", "before": None, "after": None, "ts_ms": 5}), said[3]])
    job.run()
    assert replayed(job).applied == 1
    found = {(row["id"], row["customer"], row["valid_from"], row["valid_to"]) for row in job.rows()}
    assert found == {(1, "a", 1, 5), (1, "b", 5, 5), (1, "c", 5, None), (2, "a", 2, 5)}


def test_letters_without_a_value_are_replayed(job: KafkaJob) -> None:
    """A null equals nothing in a join, and then the letter would count as gone from the topic."""
    job.format_options = {"flattened": "true"}  # a delete, and its key is no JSON
    job.produce([(b"k", None)])
    job.run()
    assert [letter["value"] for letter in letters(job)] == [None]
    job.format_options = {"tombstones": "ignore"}
    assert replayed(job, config=job.config()) == Replayed(job.target(), applied=1, refused={}, ahead=0, gone=0)
    assert letters(job) == []


def test_replay_never_makes_nulls_of_what_an_expression_can_not_take(job: KafkaJob) -> None:
    number = {"type": "int", "expression": "cast(customer as int)"}
    job.table = {"columns": {"id": "bigint", "customer": "string", "amount": "decimal(12,2)", "n": number}}
    job.produce([change("c", 1, "none", "1.00"), change("c", 2, "2")])
    job.run()
    before = str(job.spark.conf.get("spark.sql.ansi.enabled"))
    job.spark.conf.set("spark.sql.ansi.enabled", "false")  # as the user may have it
    try:
        with pytest.raises(DataError, match="the expression of a computed column failed on a value"):
            replayed(job)
    finally:
        job.spark.conf.set("spark.sql.ansi.enabled", before)
    assert content(job) == {2: ("2", None)}
    assert len(letters(job)) == 1


def test_replay_of_a_selection(job: KafkaJob, command: Any) -> None:
    job.produce([change("c", 1, "a", "1.00"), (None, b"garbage")])
    job.run()
    assert command(corrected(job), "replay", "--class", "unparseable") == (
        3,
        [f"{job.target()}: 0 replayed; 1 still refused (1 unparseable)"],
    )
    code, lines = command(corrected(job), "replay", "--table", job.target(), "--class", "type_mismatch", "--json")
    assert (code, json.loads(lines[0])["applied"]) == (0, 1)
    assert content(job) == {1: ("a", "1.00")}
    code, (line,) = command(corrected(job), "replay", "--class", "type_mismatch")
    assert (code, line.split(",")[0].split(" of ")[0]) == (0, "no dead letters")
    assert command(corrected(job), "replay", "--table", "lake.no.such")[0] == 2


def test_replay_leaves_out_late_changes_and_their_letters(job: KafkaJob) -> None:
    def ordered(order: int, *words: Any) -> tuple[Any, Any]:
        key, value = change(*words)
        return key, value | {"source": {"lsn": order}}

    job.table = {"order_by": ["source.lsn"], "late": "dead-letter"}
    job.produce([ordered(5, "c", 1, "first"), ordered(7, "u", 1, "refused", "7.00"), ordered(1, "c", 2, "b", "2.00")])
    job.run()
    job.produce([ordered(6, "u", 1, "not late yet"), ordered(8, "u", 1, "newest")])
    job.run()
    job.produce([ordered(3, "u", 1, "late")])
    job.run()
    assert [letter["error_class"] for letter in letters(job)] == ["type_mismatch", "type_mismatch", "late"]
    outcome = replayed(job)
    assert outcome == Replayed(job.target(), applied=2, refused={}, ahead=0, gone=0, late=1)
    assert (str(outcome), outcome.left) == (
        f"{job.target()}: 2 replayed; 1 late, which replay leaves alone (to remove: DELETE FROM)", 0
    )  # fmt: skip
    assert content(job) == {1: ("newest", None), 2: ("b", "2.00")}
    assert [letter["error_class"] for letter in letters(job)] == ["late"]
    assert "rowdelta.shop.late" not in job.properties(), "what is read again came in time"
    assert replayed(job, error_class="late").late == 1
    assert content(job) == {1: ("newest", None), 2: ("b", "2.00")}


def test_replay_completes_partial_updates_as_soon_as_their_rows_are_there(job: KafkaJob) -> None:
    unavailable = "__debezium_unavailable_value"
    job.produce([change("u", 1, unavailable), change("c", 2, "b", "2.00"), change("u", 2, unavailable)])
    job.run()
    assert [letter["error_class"] for letter in letters(job)] == ["row_absent", "type_mismatch", "row_absent"]
    with pytest.raises(DataError, match=r"a replay applies all changes of a key or none.*has no row with this key"):
        replayed(job)
    assert (content(job), len(letters(job))) == ({}, 3)
    job.spark.sql(f"INSERT INTO {job.target()} VALUES (1, 'loaded', 1.00)")
    assert replayed(job).applied == 3
    assert content(job) == {1: ("loaded", None), 2: ("b", None)}
    assert letters(job) == []


def test_replay_without_a_correction_changes_nothing(job: KafkaJob) -> None:
    job.produce([change("c", 1, "a", "1.00"), change("c", 2, "b")])
    job.run()
    before = job.snapshots()
    assert replayed(job, config=job.config()).refused == {"type_mismatch": 1}
    assert (job.snapshots(), len(letters(job))) == (before, 1)


@pytest.mark.parametrize(
    ("when", "deletes"),
    [
        ("before the commit", "position"),
        ("after the commit", "position"),
        ("before the removal", "equality"),
        ("after the removal", "position"),
    ],
)
def test_a_crash_of_replay_neither_loses_nor_repeats(
    job: KafkaJob, monkeypatch: pytest.MonkeyPatch, deletes: str, when: Any
) -> None:
    job.table = {"deletes": deletes}
    job.produce([change("c", 1, "a", "1.00"), change("c", 2, "b", "2.00"), change("c", 3, "c")])
    job.run()
    if when.endswith("commit"):
        with crashing(when), pytest.raises(CrashError):
            replayed(job)
    else:
        original = dead_letters.remove

        def die(*arguments: Any) -> None:
            if when == "after the removal":
                original(*arguments)
            raise CrashError(when)

        with monkeypatch.context() as patch:
            patch.setattr(dead_letters, "remove", die)
            with pytest.raises(CrashError):
                replayed(job)
    applied = when != "before the commit"
    assert (content(job).get(1) is not None) == applied
    assert len(letters(job)) == (0 if when == "after the removal" else 2)
    # the sink goes on before anybody tries again
    job.produce([change("d", 1, "a"), change("u", 2, "newer", "2.50")])
    run(job, corrected(job))
    list(replay(job.spark, corrected(job), Selection()))
    assert content(job) == {2: ("newer", "2.50"), 3: ("c", None)}
    assert letters(job) == []


def test_records_that_the_topic_has_lost_are_left_unless_forced(job: KafkaJob, kafka: Kafka) -> None:
    job.produce(
        [change("c", 1, "a", "1.00"), change("c", 2, "b", "2.00"), change("u", 2, "newer"), change("c", 3, "c", "3.00")]
    )
    job.run()
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    for future in admin.delete_records([TopicPartition(job.topic(), 0, 2)]).values():
        future.result(30)
    outcome = replayed(job)
    assert (outcome.applied, outcome.gone, outcome.left) == (1, 2, 2)
    assert content(job) == {2: ("newer", None), 3: ("c", "3.00")}
    outcome = replayed(job, force=True)
    assert (outcome.applied, outcome.gone) == (2, 0)
    assert content(job) == {1: ("a", "1.00"), 2: ("newer", None), 3: ("c", "3.00")}, (
        "the topic still knows what 2 became"
    )
    assert letters(job) == []


def test_records_that_the_table_has_not_passed_are_left_to_the_run(job: KafkaJob) -> None:
    job.produce([change("c", 1, "a", "1.00"), change("c", 2, "b")])
    with crashing("before the commit"), pytest.raises(TemporaryError):
        job.run()
    assert (len(letters(job)), content(job)) == (1, {})
    assert replayed(job).ahead == 1
    assert (len(letters(job)), content(job)) == (1, {})
    run(job, corrected(job))
    assert replayed(job) == Replayed(job.target(), applied=1, refused={}, ahead=0, gone=0)
    assert content(job) == {1: ("a", "1.00"), 2: ("b", None)}


def test_a_configuration_that_refuses_what_was_applied_is_no_correction(job: KafkaJob) -> None:
    """In base64, as it was before: the last state of key 1 can't be read any more, so an older one would come back."""
    job.produce([change("c", 1, "a", "1.00"), change("u", 1, "b", "ZA=="), change("c", 2, "c", "2.00")])
    job.run()
    assert content(job) == {1: ("b", "1.00")}
    with pytest.raises(DataError, match="refuses 1 later records of the topic that are not dead letters") as caught:
        replayed(job)
    assert "offset 1" in str(caught.value)
    assert (content(job), len(letters(job))) == ({1: ("b", "1.00")}, 2)
    assert replayed(job, force=True).applied == 2
    assert content(job) == {1: ("a", "1.00"), 2: ("c", "2.00")}


def test_a_replay_under_another_key_is_refused(job: KafkaJob) -> None:
    """The configured key is left out now, and what the table has for one is not what the messages say."""
    job.produce(
        [({"tenant": 1, "id": 1}, change("c", 1, "a", "2.00")[1]), ({"tenant": 1, "id": 2}, change("c", 2, "b")[1])]
    )
    job.run()
    before = content(job), letters(job)
    assert len(before[1]) == 1
    correction = corrected(job)
    (entry,) = correction.tables
    keyless = correction.model_copy(update={"tables": [entry.model_copy(update={"key": []})]})
    with pytest.raises(TableError, match=r"was id, and from partition 0 offset 0 on it is tenant, id"):
        replayed(job, config=keyless)
    assert (content(job), letters(job)) == before
    assert replayed(job).applied == 1


def test_of_a_replay_and_a_run_at_the_same_time_one_is_refused(job: KafkaJob) -> None:
    job.produce([change("c", 1, "a", "1.00"), change("c", 2, "b")])
    job.run()
    running = job.pipeline()
    assert replayed(job).applied == 1
    job.produce([change("u", 1, "newer")])
    with pytest.raises(TableError, match="another run with the same sink id"):
        running.run()
    run(job, corrected(job))
    assert content(job) == {1: ("newer", None), 2: ("b", None)}


def test_replay_is_for_kafka(files: Job, command: Any) -> None:
    files.write_text("x\n")
    files.run()
    with pytest.raises(ConfigError, match="Write the corrected records into a new change file"):
        list(replay(files.spark, files.config(), Selection()))


# the topic


@pytest.fixture
def topic(job: KafkaJob, kafka: Kafka) -> str:
    name = f"{job.name}.dead"
    kafka.create_topic(name)
    job.sink = {"dead_letter_topic": name}
    return name


@pytest.mark.versions
def test_bad_records_go_to_the_topic_too(job: KafkaJob, kafka: Kafka, topic: str) -> None:
    job.produce([change("c", 1, "a"), (b"\xfe", NOT_UTF_8), (None, b"[1]")], partition=1)
    job.run()
    job.run()
    job.produce([(b"k", b"third")], partition=1)
    job.run()
    found = messages(kafka, topic, 3)
    assert [(m.key(), m.value()) for m in found] == [(b"\xfe", NOT_UTF_8), (None, b"[1]"), (b"k", b"third")]
    for message, letter in zip(found, letters(job), strict=True):
        headers = {name: value.decode() for name, value in message.headers()}
        assert headers == {
            "rowdelta.topic": job.topic(),
            "rowdelta.partition": "1",
            "rowdelta.offset": str(letter["offset"]),
            "rowdelta.table": job.target(),
            "rowdelta.reason": letter["reason"],
            "rowdelta.error_class": letter["error_class"],
            "rowdelta.time": letter["time"].strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        }
    assert content(job) == {1: ("a", None)}


@pytest.mark.parametrize("when", ["in the transaction", "after sending"])
def test_the_topic_has_each_bad_record_once_after_a_crash(
    job: KafkaJob, kafka: Kafka, topic: str, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The topic has each bad record once, like the table, whatever happens."""
    job.produce([change("c", 1, "a"), (b"k", b"bad")])
    send = DeadLetterTopic.send
    producers = []

    def die(self: DeadLetterTopic, target: str, commit: str, letters: DataFrame) -> None:
        if when == "in the transaction":
            # one message is there already, of a transaction that the crash left open
            name = f"rowdelta.{job.config().sink.id}.{target}"
            producer = Producer({"bootstrap.servers": kafka.bootstrap_servers, "transactional.id": name})
            producers.append(producer)
            producer.init_transactions()
            producer.begin_transaction()
            producer.produce(topic, b"bad", b"k")
            producer.flush()
        elif when == "after sending":
            send(self, target, commit, letters)
        raise CrashError(when)

    with monkeypatch.context() as patch:
        patch.setattr(DeadLetterTopic, "send", die)
        with pytest.raises(RowdeltaError):
            job.run()
    job.run()
    job.produce([(b"k", b"last")])
    job.run()
    assert [m.value() for m in messages(kafka, topic, 2)] == [b"bad", b"last"]
    assert [letter["value"] for letter in letters(job)] == [b"bad", b"last"]
    assert content(job) == {1: ("a", None)}
    job.run()
    assert len(messages(kafka, topic, 2)) == 2


def test_a_record_that_is_as_large_as_its_topic_allows(job: KafkaJob, kafka: Kafka, topic: str) -> None:
    """In the other topic, where it has headers too, it is larger."""
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    room = ConfigEntry("max.message.bytes", "4000000", incremental_operation=AlterConfigOpType.SET)
    for name in (job.topic(), topic):
        resource = ConfigResource(ConfigResource.Type.TOPIC, name, incremental_configs=[room])
        for done in admin.incremental_alter_configs([resource]).values():
            done.result(30)
    bad = random.Random(1).randbytes(3_000_000)
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers, "message.max.bytes": 4_000_000})
    producer.produce(job.topic(), bad, b"k", partition=0)
    assert producer.flush(60) == 0
    job.run()
    (found,) = messages(kafka, topic, 1)
    assert found.value() == bad


def test_a_topic_that_does_not_take_them(job: KafkaJob, kafka: Kafka) -> None:
    job.sink = {
        "dead_letter_topic": f"{job.name}.missing",
        "dead_letter_options": {"kafka.bootstrap.servers": kafka.bootstrap_servers, "kafka.max.block.ms": 2000},
    }
    job.produce([change("c", 1, "a"), (b"k", b"bad")])
    with pytest.raises(TemporaryError, match=rf"dead-letter topic {job.name}\.missing at .*the next run sends them"):
        job.run()
    assert content(job) == {}
    kafka.create_topic(f"{job.name}.missing")
    job.run()
    assert [m.value() for m in messages(kafka, f"{job.name}.missing", 1)] == [b"bad"]
    assert (content(job), len(letters(job))) == ({1: ("a", None)}, 1)


def test_bad_records_whose_snapshot_expired_before_they_were_sent(
    job: KafkaJob, kafka: Kafka, topic: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job.produce([(b"k", b"bad")])

    def die(*_: Any) -> None:
        raise CrashError("before sending")

    with monkeypatch.context() as patch:
        patch.setattr(DeadLetterTopic, "send", die)
        with pytest.raises(RowdeltaError):
            job.run()
    table = f"{job.name}.dead_letters"
    job.spark.sql(f"INSERT INTO lake.{table} SELECT * FROM lake.{table} LIMIT 1")
    job.spark.sql(
        f"CALL lake.system.expire_snapshots(table => '{table}', older_than => TIMESTAMP '2999-01-01', retain_last => 1)"
    )
    with caplog.at_level(logging.WARNING, "rowdelta"):
        job.run()
    assert "can't be sent to topic" in caplog.text
    assert messages(kafka, topic, 0) == []


def test_replay_under_a_new_key_takes_no_row_of_another_key(spark: SparkSession, tmp_path: Path, kafka: Kafka) -> None:
    job = KafkaJob(spark, tmp_path, kafka.bootstrap_servers, key={"orders": ["id", "customer"]})
    kafka.create_topic(job.topic(), 1)
    columns = "id BIGINT NOT NULL, customer STRING NOT NULL, amount DECIMAL(12,2)"
    spark.sql(f"CREATE TABLE {job.target()} ({columns}) USING iceberg")
    job.produce([change("c", 1, "a"), change("c", 1, "b"), change("c", 1, "c", "1.00")])
    job.run()
    spark.sql(f"""ALTER TABLE {job.target()} SET TBLPROPERTIES ('rowdelta.shop.new-key' = '["id"]')""")
    job.key = {"orders": ["id"]}
    with pytest.raises(TableError, match=r"1 keys \(id\) have several rows"):
        replayed(job)
    assert spark.table(job.target()).count() == 2
