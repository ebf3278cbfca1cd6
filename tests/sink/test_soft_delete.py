"""Soft deletes: a delete of the source marks the row as deleted, in each format; and deletes that are left out."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.sink.harness import Job
from tests.sink.test_late import FORMATS, change

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


@pytest.mark.parametrize("late", ["apply", "drop"])
@pytest.mark.parametrize(("kind", "properties", "deletes"), FORMATS)
def test_a_delete_marks_the_row(
    spark: SparkSession, tmp_path: Path, kind: type[Job], properties: Mapping[str, str], deletes: Any, late: str
) -> None:
    """Its other values stay, and an insert of the key makes it a row like others again."""
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
