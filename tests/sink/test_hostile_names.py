"""Names and values that a source's users choose end as values, bad records or a stop, and no file leaves the table's
folder.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import types as T

from changelog.spec import ChangelogSpec, ColumnSpec
from sink.config import TableSection
from sink.errors import TableError
from sink.spark.versions import to_arrow
from sink.table.plan import evolved_columns
from sink.table.table_plan import TablePlan
from sink.targets.capabilities import CAPABILITIES
from tests.delta.harness import DeltaJob
from tests.sink.harness import Job

VALUES = [
    "../../../escaped", "..", "/etc/passwd", "a/b\\c", "it's \"quoted\" `so`", "x\ny\r\t", "n\0l", "\u202etxt\u200f",
    "数\u0301ß🎉", "%2e%2e%2f", "a=b/c=d", "x" * 1000, "é" * 1000, " ", "{}[]#?&;*|<>~$", "__HIVE_DEFAULT_PARTITION__x",
]  # fmt: skip
FIELDS = ["it's", "a.b", "", "x\ny", "n\0l", "r\u202etl\u0085", "n" * 1000, "_rowdelta_x", "ID"]
"""Names that no column can have."""
COLUMNS = ["a b", "a/b", "/x", "数", "a`b", 'a"b', "a\\b", "%2e", "x=y", "-", "1", "select"]
"""Names that a column can have."""


def line(number: int, **more: Any) -> dict[str, Any]:
    return {"row_kind": "+I", "seq": number, "id": number, "region": "eu", **more}


@pytest.fixture(params=["iceberg", "delta"])
def job(request: pytest.FixtureRequest, spark: SparkSession, tmp_path: Path) -> Job:
    kind = {"iceberg": Job, "delta": DeltaJob}[request.param]
    made: Job = kind(spark, tmp_path, partition_by=["region"])
    made.file_format = "json"
    return made


def write(job: Job, *lines: dict[str, Any]) -> None:
    job.write_text("".join(f"{json.dumps(each)}\n" for each in lines))


def files_of(folder: Path) -> set[str]:
    return {os.path.relpath(Path(base, name), folder) for base, _, names in os.walk(folder) for name in names}


@pytest.mark.spark
def test_values_of_partitions_and_names_of_fields(job: Job, tmp_path: Path) -> None:
    write(job, *(line(n, region=value) for n, value in enumerate(VALUES)))
    before = {path.name for path in tmp_path.parent.iterdir()}
    job.run()
    # the second change must find each row again
    write(job, *({**line(100 + n, region=value), "id": n} for n, value in enumerate(VALUES) if n % 2))
    job.run()
    assert {row["id"]: row["region"] for row in job.rows()} == dict(enumerate(VALUES))
    assert {path.name for path in tmp_path.parent.iterdir()} == before, "nothing is outside"
    assert not [path for path in files_of(job.table_folder) if path.startswith("..")]
    is_delta = isinstance(job, DeltaJob)
    assert is_delta or job.unreferenced_files() == []

    # Delta refuses some characters where a table has no column mapping
    names = [name for name in COLUMNS if not (is_delta and re.search("[ ,;{}()\n\t=]", name))]
    write(job, line(300, **dict.fromkeys(names, 1)))
    job.run()
    table = job.spark.read.format("delta").load(str(job.table_folder)) if is_delta else job.spark.table(job.target)
    (row,) = [row for row in to_arrow(table).to_pylist() if row["id"] == 300]
    assert {name: row[name] for name in names} == dict.fromkeys(names, 1)
    write(job, line(400, **{"it's": 1}))
    with pytest.raises(TableError, match="exclude"):
        job.run()


def refusal(*names: str) -> str:
    """Why fields with these names stop a table."""
    section = TableSection.model_validate({"source": "t", "target": "lake.a.b", "key": ["id"]})
    columns = (ColumnSpec("id", T.LongType(), required=True),)
    plan = TablePlan(section, ChangelogSpec(columns, ("id",)), exists=True, columns=columns)
    with pytest.raises(TableError) as caught:
        evolved_columns(plan, dict.fromkeys(names, "bigint"), CAPABILITIES["iceberg"])
    return str(caught.value)


@pytest.mark.parametrize("name", FIELDS, ids=ascii)
def test_names_that_no_column_can_have(name: str) -> None:
    message = refusal(name)
    assert f"messages have a field {name[:80]!r}"[:-1] in message
    assert "exclude" in message
    assert len(message) < 800


def test_fields_that_are_data() -> None:
    message = refusal(*(f"{n}-{'x' * 1000}" for n in range(1001)))
    assert "1,001 fields that are no columns" in message
    assert "schema_changes: ignore" in message
    assert len(message) < 800


@pytest.mark.spark
@pytest.mark.parametrize("character", ["#", "?"])
@pytest.mark.parametrize("place", ["table", "data", "index"])
def test_a_location_whose_end_clients_cut_off(spark: SparkSession, tmp_path: Path, place: str, character: str) -> None:
    """All files below it would be one file, which each commit would replace."""
    location = f"file:{tmp_path}/a{character}b"
    job: Job = Job(spark, tmp_path, file_format="json")
    if place == "table":
        warehouse = {"type": "delta", "warehouse": location}
        job = DeltaJob(spark, tmp_path, file_format="json", sections={"catalogs": {DeltaJob.catalog: warehouse}})
    elif place == "data":
        job.properties = {"write.data.path": location}
    else:
        job.index_location = location
    write(job, line(1))
    with pytest.raises(TableError, match=r"for the end of a path.*Choose a location"):
        job.run()
