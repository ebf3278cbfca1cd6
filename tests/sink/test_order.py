"""`order_by` through the whole sink: several fields, compared as typed values, ties broken by the source position."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from pyspark.sql import SparkSession

from sink.run.pipeline import Pipeline
from sink.spark.versions import to_arrow
from tests.sink.harness import Job
from tests.sink.test_kafka import KafkaJob
from tests.stack.kafka import Kafka

pytestmark = [pytest.mark.spark, pytest.mark.kafka]


@pytest.fixture
def job(spark: SparkSession, tmp_path: Path, kafka: Kafka) -> KafkaJob:
    """Debezium's events of one partition, ordered by `source.lsn`, then `ts_ms`."""
    job = KafkaJob(
        spark,
        tmp_path,
        kafka.bootstrap_servers,
        tables={"orders": {"id": "bigint", "customer": "string"}},
        table={"order_by": ["source.lsn", "ts_ms"]},
    )
    kafka.create_topic(job.topic())
    return job


def event(lsn: Any, ts_ms: Any, number: int, customer: str | None) -> tuple[Any, Any]:
    """An update, or a delete if there is no customer."""
    row = {"id": number, "customer": customer}
    images = {"before": row, "after": None, "op": "d"} if customer is None else {"after": row, "op": "u"}
    return {"id": number}, {**images, "source": {"lsn": lsn}, "ts_ms": ts_ms}


def customers(job: KafkaJob) -> dict[int, str]:
    return {row["id"]: row["customer"] for row in job.rows()}


@pytest.mark.parametrize("spelled", [int, str])
def test_fields_are_compared_as_numbers_and_the_first_decides(job: KafkaJob, spelled: Any) -> None:
    places = [(8, 100), (9, 9), (9, 10), (9, 99), (10, 1), (100, 0)]
    for number in range(2, len(places) + 1):
        # as text, 9 would come after 10, and 99 after 100
        job.produce([event(spelled(a), spelled(b), number, f"{a}.{b}") for a, b in reversed(places[:number])])
    job.run()
    assert customers(job) == {n: "{}.{}".format(*places[n - 1]) for n in range(2, len(places) + 1)}


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_arrival_ends_in_the_same_row(job: KafkaJob, seed: int) -> None:
    random = Random(seed)
    places = [(random.choice([1, 9, 10, 99, 100, 2**40]), random.randrange(12)) for _ in range(60)]
    changes = [(*place, i % 4, random.choice([f"c{i}", f"c{i}", None])) for i, place in enumerate(places)]
    random.shuffle(changes)
    job.produce([event(*change) for change in changes])
    job.run()
    in_order = sorted(changes, key=lambda change: change[:2])  # stable: ties stay as they arrived
    expected = {number: customer for _, _, number, customer in in_order}
    assert customers(job) == {number: customer for number, customer in expected.items() if customer is not None}


def test_ties_are_broken_by_the_offset(job: KafkaJob) -> None:
    """As when a primary key changes: a delete and an insert of one transaction, with one LSN and one time."""
    job.produce(
        [
            event(7, 1, 1, "first"),
            event(7, 1, 1, "second"),
            event(7, 1, 2, "first"),
            event(7, 1, 2, None),
            event(7, 1, 3, None),
            event(7, 1, 3, "again"),
        ]
    )
    job.run()
    assert customers(job) == {1: "second", 3: "again"}


def test_null_comes_before_all_values_of_its_field(job: KafkaJob) -> None:
    job.produce([event(2, None, 1, "first"), event(2, -5, 1, "last"), event(None, 9, 1, "before both")])
    job.run()
    assert customers(job) == {1: "last"}


@pytest.mark.parametrize("missing", ["lsn", "ts_ms", "both"])
def test_a_change_without_an_order_value_is_a_dead_letter(job: KafkaJob, missing: str) -> None:
    """A value of another type isn't one, and neither is NULL in all of the fields."""
    lsn, ts_ms = {"lsn": ("x", 1), "ts_ms": (1, "x"), "both": (None, None)}[missing]
    job.produce([event(1, 1, 1, "good"), event(lsn, ts_ms, 1, "bad"), event(lsn, ts_ms, 1, None)])
    key, value_without = event(lsn, ts_ms, 1, "also bad")
    if missing == "both":
        del value_without["source"], value_without["ts_ms"]
    job.produce([(key, value_without)])
    job.run()
    assert customers(job) == {1: "good"}
    letters = to_arrow(job.spark.table(f"lake.{job.name}.dead_letters")).to_pylist()
    assert sorted(letter["offset"] for letter in letters) == [1, 2, 3]
    name = "ts_ms" if missing == "ts_ms" else "source.lsn"
    assert {letter["error_class"] for letter in letters} == {"missing_order"}
    assert all(f"order column {name} " in letter["reason"] for letter in letters)


ORDERED: list[tuple[str, Sequence[str]]] = [
    # a type, and texts in the order that they have as such values
    ("bigint", ["-10", "-9", "0", "9", "10", "9223372036854775807"]),
    ("decimal(20,4)", ["-1.5", "1.25", "1.3", "1.3001", "9.5", "10"]),
    ("string", ["-9", "10", "9", "a", "ä"]),
    ("timestamp", ["2026-01-01T00:30:00+01:00", "2026-01-01T00:00:00Z", "2025-12-31T23:00:00.000001-02:00"]),
    ("date", ["0999-12-31", "2025-12-31", "2026-01-01"]),
]


@pytest.mark.parametrize(("dtype", "texts"), ORDERED, ids=[dtype for dtype, _ in ORDERED])
def test_each_type_has_its_own_order(spark: SparkSession, tmp_path: Path, dtype: str, texts: Sequence[str]) -> None:
    """Every pair of values has its own key, and the greater value comes first. Then the values are the second of two
    order fields.
    """
    job = Job(spark, tmp_path, columns={"id": "bigint", "region": "string"}, file_format="json")
    config = job.config()
    table = config.tables[0].model_copy(update={"order_by": ["epoch int", f"version {dtype}"]})
    config = config.model_copy(update={"tables": [table]})
    pairs = list(itertools.combinations(texts, 2))
    lines = []
    for number, (less, greater) in enumerate(pairs):
        for epoch, version, region in ((1, greater, "right"), (1, less, "wrong"), (0, greater, "older")):
            lines.append({"row_kind": "+U", "epoch": epoch, "version": version, "id": number, "region": region})
    job.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    Pipeline(spark, config).run()
    assert job.rows() == [{"id": number, "region": "right"} for number in range(len(pairs))]
