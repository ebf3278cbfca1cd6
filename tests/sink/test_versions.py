"""Tables with history keep the versions of each row."""

import json
import shutil
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from pyspark.sql import SparkSession

from sink.commands.inspection import check
from sink.commands.time_travel import When, show
from sink.errors import ConfigError, TableError
from tests.delta.harness import DeltaJob
from tests.sink.harness import Job, tiny_thresholds
from tests.sink.partial_story import FIRST, inserted, letters, toast_job, update, write
from tests.sink.test_late import FORMATS
from tests.sink.test_verify import verified

pytestmark = pytest.mark.spark

COLUMNS = {"id": "bigint", "region": "string", "note": "string"}


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


@pytest.mark.parametrize(("kind", "properties", "deletes"), FORMATS[1::2])
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


def test_only_tracked_columns_make_versions(spark: SparkSession, tmp_path: Path) -> None:
    job = a_job(spark, tmp_path, track=["region"])
    job.write_records([change("+I", 1, 1, "eu", "a"), change("+I", 1, 2, None, "a")])
    job.run()
    job.table = {"history": {"except": ["note"]}}  # says the same
    job.write_records([change("+U", 2, 1, "eu", "b"), change("+U", 3, 1, "us", "c"), change("+U", 4, 1, "us", "d")])
    job.write_records([change("+U", 5, 2, None, "b"), change("+U", 6, 2, "eu", "c"), change("+U", 7, 2, "eu", "d")])
    job.run()
    assert versions(job) == {(1, "eu", 1, 3), (1, "us", 3, None), (2, None, 1, 6), (2, "eu", 6, None)}
    assert {(row["id"], row["region"], row["note"]) for row in job.rows()} == {
        (1, "eu", "b"),
        (1, "us", "d"),
        (2, None, "b"),
        (2, "eu", "d"),
    }
    # a replay, and a late change of what isn't tracked, change nothing
    job.write_records([change("+U", 4, 1, "us", "d"), change("+U", 2, 2, None, "late")])
    job.run()
    assert versions(job) == {(1, "eu", 1, 3), (1, "us", 3, None), (2, None, 1, 6), (2, "eu", 6, None)}
    assert {row["note"] for row in job.rows()} == {"b", "d"}


def test_only_the_last_change_of_a_micro_batch(spark: SparkSession, tmp_path: Path) -> None:
    job = a_job(spark, tmp_path, granularity="micro-batch")
    job.write_records([change("+I", 1, 1, "a"), change("+U", 2, 1, "b"), change("-D", 3, 1), change("+I", 4, 1, "c")])
    job.write_records([change("+U", 5, 1, "d"), change("+U", 6, 1, "e"), change("+I", 5, 2, "a"), change("-D", 6, 2)])
    job.run()
    assert versions(job) == {(1, "c", 4, 6), (1, "e", 6, None)}


def test_late_changes_are_left_out(spark: SparkSession, tmp_path: Path) -> None:
    job = a_job(spark, tmp_path)
    job.table = {**job.table, "late": "drop"}
    job.write_records([change("+I", 5, 1, "a")])
    job.write_records([change("+U", 4, 1, "late"), change("+U", 6, 1, "b"), change("-D", 9, 2)])
    job.write_records([change("+I", 8, 2, "late")])
    job.run()
    assert versions(job) == {(1, "a", 5, 6), (1, "b", 6, None)}


@pytest.mark.parametrize(("kind", "properties", "deletes"), [FORMATS[0], *FORMATS[2:]])
def test_a_table_that_others_change_and_whose_index_is_lost(
    spark: SparkSession, tmp_path: Path, kind: type[Job], properties: Mapping[str, str], deletes: Any
) -> None:
    """Files are rewritten, a column is added, deletes come before what they delete."""
    job = a_job(spark, tmp_path, kind, properties, deletes)
    job.partition_by = ["region"]
    for order in range(1, 5):
        job.write_records([change("+U", order, n, "eu" if order % 2 else "us", f"{order}") for n in range(1, 5)])
    job.write_records([change("-D", 9, 7), change("-D", 5, 4)])
    job.run()
    before = versions(job)
    shutil.rmtree(job.index_folder)
    job.columns = {**job.columns, "more": "string"}
    job.configure_columns = False
    job.write_records(
        [change("+U", 6, 1, "eu") | {"more": "new"}, change("+I", 8, 7, "late"), change("+U", 6, 4, "ap")]
    )
    job.run()
    if not isinstance(job, DeltaJob):
        job.compact()
    else:
        spark.sql(f"OPTIMIZE delta.`{job.table_folder}`")
    job.write_records([change("+U", 7, 1, "eu"), change("-D", 3, 2), change("+U", 7, 4, "ap") | {"more": "x"}])
    job.run()
    gone = {(1, "us", 4, None), (2, "eu", 3, 4)}  # 2 was set and removed at the same time
    assert versions(job) == (before - gone) | {
        (1, "us", 4, 6), (1, "eu", 6, 7), (1, "eu", 7, None), (2, "eu", 3, 3), (4, "ap", 6, 7), (4, "ap", 7, None),
        (7, "late", 8, 9),
    }  # fmt: skip
    assert {row["more"] for row in job.rows() if row["valid_from"] < 6} == {None}


@pytest.mark.parametrize(("kind", "properties", "deletes"), FORMATS[1::2])
def test_a_truncate_closes_all_rows(
    spark: SparkSession, tmp_path: Path, kind: type[Job], properties: Mapping[str, str], deletes: Any
) -> None:
    """Also those that late changes open before it."""
    job = a_job(spark, tmp_path, kind, properties, deletes)
    job.file_format, job.sections = "json", {"source": {"format": "debezium-json"}}
    job.table = {**job.table, "order_by": ["source.lsn bigint"]}

    def said(lsn: int, number: int | None = None, region: str | None = None) -> dict[str, Any]:
        row = None if number is None else {"id": number, "region": region, "note": None}
        return {"before": None, "after": row, "op": "t" if number is None else "c", "source": {"lsn": lsn}}

    write(job, *(said(number, number, "eu") for number in range(1, 6)))
    job.run()
    with tiny_thresholds(1, 2, spark):
        write(job, said(11, 1, "us"), said(20), said(21, 2, "us"), said(22, 6, "eu"), said(30), said(31, 1, "ap"))
        job.run()
    write(job, said(12, 7, "late"), said(25, 3, "late"), said(26, 6, "us"), said(6, 4, "us"))
    job.run()
    expected = {
        (1, "eu", 1, 11), (1, "us", 11, 20), (1, "ap", 31, None), (2, "eu", 2, 20), (2, "us", 21, 30),
        (3, "eu", 3, 20), (3, "late", 25, 30), (4, "eu", 4, 6), (4, "us", 6, 20), (5, "eu", 5, 20),
        (6, "eu", 22, 26), (6, "us", 26, 30), (7, "late", 12, 20),
    }  # fmt: skip
    assert versions(job) == expected
    job.check_index()
    # a late one, which closes version 26 of key 6 earlier, without an index
    shutil.rmtree(job.index_folder)
    write(job, said(28), said(32, 8, "eu"))
    job.run()
    assert versions(job) == (expected - {(3, "late", 25, 30), (2, "us", 21, 30), (6, "us", 26, 30)}) | {
        (3, "late", 25, 28), (2, "us", 21, 28), (6, "us", 26, 28), (8, "eu", 32, None),
    }  # fmt: skip


def test_updates_that_lack_values(spark: SparkSession, tmp_path: Path) -> None:
    """They take the values of the version before them. Without one they are dead letters."""
    job = toast_job(Job(spark, tmp_path), {"history": {}})
    write(job, inserted(1, 100), update(lsn=200, note="b"), update(lsn=300, note="c"), update(7, lsn=300))
    write(job, update(lsn=250, note="late"), update(lsn=400, note="d"), update(8, lsn=400))
    job.run()
    rows = sorted((row["valid_from"], row["valid_to"], row["note"], row["big"] == FIRST["big"]) for row in job.rows())
    assert rows == [
        (100, 200, "a", True), (200, 250, "b", True), (250, 300, "late", True), (300, 400, "c", True),
        (400, None, "d", True),
    ]  # fmt: skip
    assert [reason.rpartition(",")[2] for _, reason, _ in letters(job)] == [" and the key has no row then"] * 2


def test_ignored_nulls_after_a_new_column(spark: SparkSession, tmp_path: Path) -> None:
    """It comes after the columns of versions in the table, and before them in what is decoded."""
    job = a_job(spark, tmp_path)
    job.configure_columns, job.file_format = False, "json"
    job.table = {**job.table, "ignore_null_updates": True, "columns": None}
    write(job, change("+I", 1, 1, "eu", "a") | {"more": None})
    job.run()
    write(job, change("+U", 3, 1, "us") | {"more": "m"})
    job.run()
    write(job, change("+U", 7, 1, None, "b") | {"more": None}, change("+U", 9, 2) | {"more": "x"})
    job.run()
    found = {
        (row["id"], row["region"], row["note"], row["more"], row["valid_from"], row["valid_to"]) for row in job.rows()
    }
    assert found == {
        (1, "eu", "a", None, 1, 3), (1, "us", "a", "m", 3, 7), (1, "us", "b", "m", 7, None),
        (2, None, None, "x", 9, None),
    }  # fmt: skip


def test_the_time_of_the_change_at_its_source(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(spark, tmp_path, columns={"id": "int", "note": "string"}, file_format="json")
    job.sections, job.table = {"source": {"format": "debezium-json"}}, {"history": {}, "order_by": []}
    seconds = 1_767_225_600_000

    def said(op: str, ms: int, note: str | None) -> dict[str, Any]:
        row = {"id": 1, "note": note}
        source = {"ts_ms": seconds + ms}
        return {"before": row if op == "d" else None, "after": None if op == "d" else row, "op": op, "source": source}

    write(job, said("c", 0, "a"), said("u", 1000, "b"))
    write(job, said("d", 2000, "b"))
    job.run()
    start = datetime(2026, 1, 1, tzinfo=UTC)
    assert sorted((row["valid_from"], row["valid_to"], row["note"]) for row in job.rows()) == [
        (start + timedelta(seconds=n), start + timedelta(seconds=n + 1), note) for n, note in enumerate("ab")
    ]
    shown = show(spark, job.config(), job.target, When(), [], 10, "2026-01-01T00:00:01.5Z")
    assert [json.loads(row)["note"] for row in shown.rows] == ["b"]
    assert any("history: all versions, from valid_from to valid_to" in line for line in check(spark, job.config()))
    with pytest.raises(ConfigError, match=r"--valid-at is 'noon', expected a timestamp"):
        show(spark, job.config(), job.target, When(), [], 10, "noon")


def test_current_rows_are_compared_with_the_source(spark: SparkSession, tmp_path: Path) -> None:
    job = a_job(spark, tmp_path)
    job.table = {**job.table, "verify": {"spark_table": "truth_of_versions"}}
    job.write_records([change("+I", 1, 1, "a"), change("+U", 2, 1, "b"), change("+I", 1, 2, "a"), change("-D", 2, 2)])
    job.run()
    truth = spark.createDataFrame([(1, "b", None)], "id bigint, region string, note string")
    truth.createOrReplaceTempView("truth_of_versions")
    assert verified(job)[0] == f"{job.target} against truth_of_versions: EQUAL"


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"history": {}, "deletes": "equality"}, "got history, but with deletes: equality nothing tells"),
        ({"history": {}, "mode": "append"}, "got history, but mode append takes changes as they are"),
        ({"history": {"from": "a", "to": "A"}}, "from, to and current are three columns"),
        ({"history": {"track": ["region"], "except": ["note"]}}, "track names the columns already"),
        ({"history": {}, "soft_delete": {"column": "deleted"}}, "history closes the row of a deleted key"),
        ({"history": {"track": ["regoin"]}}, "there is no column 'regoin'.*did you mean.*region"),
        ({"history": {"current": "note"}}, "got note, and the rows have a column note"),
        ({"history": {}, "order_by": ["region"]}, "expected a timestamp, a date or a whole number"),
        ({"history": {}, "order_by": ["seq desc"]}, "ascending"),
    ],
)
def test_what_a_table_with_history_cannot_be(
    spark: SparkSession, tmp_path: Path, table: Mapping[str, Any], message: str
) -> None:
    job = Job(spark, tmp_path, columns=COLUMNS, table=table)
    with pytest.raises((ConfigError, ValidationError), match=message):
        list(check(spark, job.config()))


def test_a_table_gets_no_history_later(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(spark, tmp_path, columns=COLUMNS)
    job.write_records([change("+I", 1, 1, "a")])
    job.run()
    job.table = {"history": {}}
    with pytest.raises(TableError, match="history needs a column valid_from of type bigint, and it has no such column"):
        job.run()
