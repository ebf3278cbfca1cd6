"""Tables with history keep the versions of each row."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.delta.harness import DeltaJob
from tests.sink.harness import Job

pytestmark = pytest.mark.spark

COLUMNS = {"id": "bigint", "region": "string", "note": "string"}
FORMATS = [
    pytest.param(Job, {"format-version": "2"}, "position", id="v2"),
    pytest.param(Job, {"format-version": "3"}, "position", id="v3"),
    pytest.param(Job, {"format-version": "3"}, "copy-on-write", id="v3-copy-on-write"),
    pytest.param(DeltaJob, {}, "position", id="delta"),
]


def a_job(
    spark: SparkSession,
    folder: Path,
    kind: type[Job] = Job,
    properties: Mapping[str, str] | None = None,
    deletes: Any = "position",
    **history: Any,
) -> Job:
    properties = {"format-version": "3"} if properties is None else properties
    return kind(spark, folder, columns=COLUMNS, properties=properties, deletes=deletes, table={"history": history})


def change(op: str, order: int, number: int, region: str | None = None, note: str | None = None) -> dict[str, Any]:
    return {"row_kind": op, "seq": order, "id": number, "region": region, "note": note}


def versions(job: Job) -> set[tuple[Any, ...]]:
    """(key, region, from, to) of each version."""
    rows = job.rows()
    assert all((row["valid_to"] is None) == row["is_current"] for row in rows)
    found = [(row["id"], row["region"], row["valid_from"], row["valid_to"]) for row in rows]
    assert len(found) == len(set(found))
    return set(found)


@pytest.mark.parametrize(("kind", "properties", "deletes"), FORMATS)
def test_each_change_makes_a_version(
    spark: SparkSession, tmp_path: Path, kind: type[Job], properties: Mapping[str, str], deletes: Any
) -> None:
    job = a_job(spark, tmp_path, kind, properties, deletes)
    job.write_records([change("+I", 1, 1, "eu"), change("+I", 1, 2, "eu"), change("+U", 3, 2, "us")])
    job.run()
    assert versions(job) == {(1, "eu", 1, None), (2, "eu", 1, 3), (2, "us", 3, None)}
    job.write_records([change("+U", 5, 1, "us"), change("-D", 6, 2), change("+I", 6, 3, "eu")])
    job.write_records([change("+U", 7, 1, "us"), change("+I", 8, 2, "again")])
    job.run()
    expected = {(1, "eu", 1, 5), (1, "us", 5, None), (2, "eu", 1, 3), (2, "us", 3, 6), (2, "again", 8, None)}
    assert versions(job) == expected | {(3, "eu", 6, None)}
    job.check_index()
    # late
    job.write_records([change("+U", 2, 2, "late"), change("-D", 4, 1), change("+I", 7, 2, "between")])
    job.run()
    assert versions(job) == {
        (1, "eu", 1, 4),
        (1, "us", 5, None),
        (2, "eu", 1, 2),
        (2, "late", 2, 3),
        (2, "us", 3, 6),
        (2, "between", 7, 8),
        (2, "again", 8, None),
        (3, "eu", 6, None),
    }
