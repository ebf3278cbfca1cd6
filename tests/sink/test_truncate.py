"""A TRUNCATE of the source, applied to Iceberg tables: what came before it is gone, what came after it stays, and both
happens in one commit. The events are Debezium's, read from files.
"""

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from pyspark.sql import SparkSession

from sink.errors import RowdeltaError
from sink.targets.iceberg.commit import IcebergCommitter
from tests.sink.harness import Job, by_pyiceberg, crashing, merging_soon, tiny_thresholds

pytestmark = pytest.mark.spark

Row = dict[str, Any]
TRUNCATE = "truncate"
Event = Row | int | str
"""A row that is set, a key that is deleted, or `TRUNCATE`."""
SETTINGS: dict[str, Any] = {
    "file_format": "json",
    "sections": {"source": {"format": "debezium-json"}},
    "table": {"order_by": ["source.lsn bigint"]},
}
"""Of a job whose change files have these events."""


def row(key: int, region: str = "eu") -> Row:
    return {"id": key, "region": region}


class Source:
    """Writes events for a job, one file for each micro-batch, in an order that tells nothing, and knows the rows."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._lsn = itertools.count(27768904)
        self._random = Random(7)
        self.rows: dict[int, Row] = {}

    def write(self, *events: Event) -> None:
        lines = [json.dumps(self._said(event) | {"source": {"lsn": next(self._lsn)}}) for event in events]
        self._random.shuffle(lines)
        self._job.write_text("\n".join(lines) + "\n")

    def _said(self, event: Event) -> dict[str, Any]:
        if event == TRUNCATE:
            self.rows.clear()
            return {"op": "t", "before": None, "after": None}
        if isinstance(event, int):
            return {"op": "d", "before": self.rows.pop(event), "after": None}
        assert isinstance(event, dict)
        self.rows[event["id"]] = event
        return {"op": "c", "before": None, "after": event}

    def expected(self) -> list[Row]:
        return [self.rows[key] for key in sorted(self.rows)]


@pytest.fixture(params=["v2, equality", "v2", "v3"])
def job(spark: SparkSession, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Job]:
    version, _, deletes = str(request.param).partition(", ")
    job = Job(
        spark,
        tmp_path,
        partition_by=["region"] if version == "v3" or deletes else [],
        deletes="equality" if deletes else "position",
        properties={"format-version": version[1:]},
        **SETTINGS,
    )
    # several tasks, and rows that are written before their task knows of the TRUNCATE
    with tiny_thresholds(1, 2, spark):
        yield job


def seen(job: Job, source: Source) -> None:
    """Check what Spark and PyIceberg read, and the index."""
    assert job.rows() == source.expected()
    assert by_pyiceberg(job) == source.expected()
    job.check_deletes()
    if job.deletes == "position":
        assert job.check_index() is not None


def test_what_came_before_is_gone_and_what_came_after_stays(job: Job) -> None:
    source = Source(job)
    source.write(*map(row, range(5)))
    source.write(row(1, "us"), 2)
    job.run()
    before, full = job.current_snapshot(), source.expected()

    # The first attempt dies. Then others compact and append while the catalog is asked to commit.
    source.write(row(0, "us"), row(8), TRUNCATE, row(1, "ap"), TRUNCATE, row(5, "us"), row(9), 9, row(4), row(10))
    with crashing("before the commit"), pytest.raises(RowdeltaError):
        job.run()
    assert job.rows() == full

    others: Iterator[Callable[[], object]] = iter(
        [
            job.compact,
            lambda: job.append([row(100), row(5, "foreign")]),
            lambda: job.spark.sql(f"DELETE FROM {job.target} WHERE id IN (0, 100)"),
        ]
    )
    send = IcebergCommitter._send

    def send_after_others(self: IcebergCommitter, staged: Any) -> None:
        for other in itertools.islice(others, 1):
            other()
        send(self, staged)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(IcebergCommitter, "_send", send_after_others)
        job.run()
    assert next(others, None) is None
    seen(job, source)
    told = [json.loads(s["summary"].get("rowdelta.rows", "{}")).get("TRUNCATE") for s in job.snapshots()]
    assert told == [None, None, None, None, None, 2], "both in one commit, after those of others"
    assert job.spark.sql(f"SELECT * FROM {job.target} VERSION AS OF {before}").count() == len(full)

    # After it, rows are found and changed, and small files are merged. Then come a commit with nothing but a TRUNCATE,
    # whose answer gets lost, and a TRUNCATE of a table without rows.
    source.write(row(4, "ap"), 10)
    source.write(row(5, "ap"), row(13))
    later = source.expected()
    source.write(TRUNCATE)
    with merging_soon(), crashing("after the commit", after_commits=2), pytest.raises(RowdeltaError):
        job.run()
    assert (job.rows(), job.files()) == ([], [])
    number = [s["snapshot_id"] for s in job.snapshots() if s["summary"].get("rowdelta.sink-id")][-2]
    assert job.rows(f"{job.target}.snapshot_id_{number}") == later
    job.lose_checkpoint()
    source.write(TRUNCATE)
    source.write(TRUNCATE, row(1), row(2), 1)
    job.run()
    seen(job, source)
    assert job.spark.table(job.dead_letters).isEmpty()


def test_a_table_that_does_not_apply_it_keeps_it(spark: SparkSession, tmp_path: Path) -> None:
    """Another configuration applies it later, but not a second time."""
    job = Job(spark, tmp_path, **{**SETTINGS, "table": {**SETTINGS["table"], "truncate": "reject"}})
    source = Source(job)
    source.write(row(1), TRUNCATE, row(2))
    job.run()
    assert job.rows() == [row(1), row(2)]
    (letter,) = spark.table(job.dead_letters).collect()
    assert (letter["error_class"], letter["reason"].partition(";")[0]) == (
        "unsupported_event",
        "TRUNCATE: truncate is reject",
    )
    applying = Job(spark, tmp_path, namespace=job.namespace, **SETTINGS)
    applying.run()
    assert applying.rows() == [row(1), row(2)]
