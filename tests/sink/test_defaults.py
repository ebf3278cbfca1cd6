"""A column that was added to the source with a default: earlier rows have it there, and no message says so."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from sink.spark.versions import to_arrow
from tests.rewrites import only_sink, rewritten_files
from tests.sink.harness import Job, by_pyiceberg, merging_soon

pytestmark = pytest.mark.spark

OLD: dict[str, Any] = {"id": "int64", "name": "string"}
NEW: dict[str, Any] = {
    "c1": {"type": "int32", "default": 11},
    "state": {"type": "string", "optional": True, "default": "new"},
    "price": {
        "type": "bytes",
        "name": "org.apache.kafka.connect.data.Decimal",
        "parameters": {"scale": "2", "connect.decimal.precision": "12"},
        "default": "fQ==",
    },
    "day": {"type": "int32", "name": "io.debezium.time.Date", "default": 18262},
    "at": {"type": "int64", "name": "io.debezium.time.MicroTimestamp", "default": 1577836800000001},
    "zoned": {"type": "string", "name": "io.debezium.time.ZonedTimestamp", "default": "2020-01-01T00:00:00Z"},
    "ok": {"type": "boolean", "default": False},
    "rate": {"type": "double", "default": 0.5},
    "big": {"type": "int64", "default": 5},
}
EARLIER = {"c1": 11, "state": "new", "day": "2020-01-01", "at": "2020-01-01 00:00:00.000001"}
EARLIER |= {"zoned": "2020-01-01 00:00:00", "ok": "false", "rate": "0.5", "big": "5"}
LATER: dict[str, Any] = {"c1": 1, "state": None, "price": "AQ==", "day": 1, "at": 1, "zoned": "2021-01-01T00:00:00Z"}
LATER |= {"ok": True, "rate": 1.5, "big": 1}


def event(row: dict[str, Any], lsn: int, *, is_new: bool, op: str = "c") -> str:
    fields = [{"field": name, "type": kind} for name, kind in OLD.items()]
    fields += [{"field": name, **schema} for name, schema in NEW.items()] if is_new else []
    sides = [{"type": "struct", "optional": True, "field": side, "fields": fields} for side in ("before", "after")]
    source = {"type": "struct", "field": "source", "fields": [{"type": "int64", "field": "lsn"}]}
    schema = {"type": "struct", "fields": [*sides, source, {"type": "string", "field": "op"}]}
    payload = {"before": row, "after": None} if op == "d" else {"before": None, "after": row}
    return json.dumps({"schema": schema, "payload": payload | {"op": op, "source": {"lsn": lsn}}}) + "\n"


def old(number: int, lsn: int) -> str:
    return event({"id": number, "name": f"n{number}"}, lsn, is_new=False)


def new_job(spark: SparkSession, folder: Path, version: int, **arguments: Any) -> Job:
    job = Job(spark, folder, columns={}, file_format="json", configure_columns=False, tasks=1, **arguments)
    job.properties = {"format-version": str(version)}
    job.sections, job.table = {"source": {"format": "debezium-json"}}, {"order_by": ["source.lsn bigint"]}
    return job


def texts(job: Job) -> dict[int, dict[str, Any]]:
    columns = ", ".join(f"CAST({name} AS STRING) {name}" for name in NEW if name != "state")
    frame = job.spark.sql(f"SELECT id, name, state, {columns} FROM {job.target}")
    rows = to_arrow(frame).to_pylist()
    assert len({row["id"] for row in rows}) == len(rows)
    return {row.pop("id"): row for row in rows}


def is_earlier(job: Job, number: int) -> bool:
    """Whether a row is as it was before the columns were there, for all readers."""
    assert {row["id"]: row for row in by_pyiceberg(job)} == {row["id"]: row for row in job.rows()}
    expected = {"name": f"n{number}", "price": None, **{name: str(value) for name, value in EARLIER.items()}}
    found = texts(job)[number]
    assert found == expected
    return True


@pytest.mark.parametrize("deletes", ["position", "copy-on-write", "equality"])
def test_earlier_rows_have_the_default(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture, deletes: Any
) -> None:
    caplog.set_level(logging.INFO, "rowdelta")
    job = new_job(spark, tmp_path, 3, deletes=deletes)
    job.write_text("".join(old(number, number) for number in range(6)))
    job.run()
    # one micro-batch with messages of both schemas, of which some of the old one come late
    row = {"id": 1, "name": "x"} | LATER
    job.write_text(
        event(row, 20, is_new=True, op="u") + old(7, 10) + event({"id": 0, **LATER}, 21, is_new=True, op="d")
    )
    job.run()
    assert "earlier rows have" in caplog.text
    assert sorted(texts(job)) == [1, 2, 3, 4, 5, 7]
    by_number = texts(job)
    if deletes == "equality":  # PyIceberg doesn't know them
        assert all(by_number[number]["c1"] == "11" for number in (2, 7))
        return
    assert is_earlier(job, 2)
    assert is_earlier(job, 7)
    assert by_number[1]["c1"] == "1"
    assert by_number[1]["state"] is None, "a null is a null"
    # rows that the sink's own readers move keep it
    sink = only_sink(replace(job))
    sink.upkeep.end_rewrite(rewritten_files(sink))
    assert is_earlier(job, 3)
    with merging_soon(2):
        for number in (11, 12, 13):
            job.write_text(old(number, number + 20))
            job.run()
    assert is_earlier(job, 4)
    assert is_earlier(job, 13)
    job.check_deletes()
    # the column is gone in Iceberg's rewrite too
    job.call("rewrite_data_files", "options => map('rewrite-all', 'true')")
    assert is_earlier(job, 5)


def test_an_older_format_warns(spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = new_job(spark, tmp_path, 2)
    job.write_text(old(1, 1))
    job.run()
    job.write_text(event({"id": 2, "name": "x"} | LATER, 20, is_new=True))
    job.run()
    assert texts(job)[1]["c1"] is None
    (warning,) = [
        record.getMessage() for record in caplog.records if "where the source has the default" in record.message
    ]
    assert "c1 = 11" in warning
    assert f"UPDATE {job.target}" in warning
