"""`where`: rows for which a condition isn't true are not in the table, whatever their history is, in each format."""

import shutil
from pathlib import Path
from random import Random
from typing import Any

import pytest
from pyspark.sql import SparkSession

from sink.commands.inspection import check
from sink.errors import TemporaryError
from tests.delta.harness import DeltaJob
from tests.delta.harness import crashing as delta_crashing
from tests.sink.harness import Job, crashing, tiny_thresholds
from tests.sink.partial_story import FIRST, TOAST, inserted, letters, toast_job, update
from tests.sink.partial_story import write as write_messages
from tests.sink.test_truncate import SETTINGS

pytestmark = pytest.mark.spark

COLUMNS = {"id": "bigint", "region": "string", "amount": "decimal(12,2)"}
PYTHON = "region <> 'us' AND amount > 0"
SPARK = "lower(region) <> 'us' AND amount * 2 > 0"


def change(op: str, number: int, region: str | None, amount: int | None = 1) -> tuple[str, dict[str, Any]]:
    return op, {"id": number, "region": region, "amount": amount}


def regions(job: Job) -> dict[int, str]:
    return {row["id"]: row["region"] for row in job.rows()}


def indexed(job: Job) -> None:
    if job.deletes != "equality":
        job.check_deletes()
        assert job.check_index() is not None


@pytest.mark.parametrize(
    ("kind", "deletes", "partition_by", "where"),
    [
        pytest.param(Job, "position", [], PYTHON, id="iceberg-python"),
        pytest.param(Job, "equality", ["region"], SPARK, id="equality-spark"),
        pytest.param(DeltaJob, "position", ["region"], SPARK, id="delta-spark"),
    ],
)
def test_rows_enter_and_leave(
    spark: SparkSession, tmp_path: Path, kind: type[Job], deletes: Any, partition_by: list[str], where: str
) -> None:
    job = kind(spark, tmp_path, COLUMNS, deletes=deletes, partition_by=partition_by, table={"where": where})
    job.write([change("+I", 1, "eu"), change("+I", 2, "us"), change("+I", 3, None), change("+I", 4, "eu", 0)])
    job.run()
    assert regions(job) == {1: "eu"}
    assert f"  only rows where {where}" in list(check(spark, job.config()))
    job.write([change("+U", 1, "us"), change("+U", 2, "eu"), change("-D", 3, None), change("+U", 4, "asia", 5)])
    job.write([change("-U", 2, "eu"), change("+U", 5, "eu"), change("-D", 4, "asia", 5), change("+I", 1, "asia")])
    job.run()
    assert regions(job) == {1: "asia", 5: "eu"}
    # in one micro-batch a row leaves and enters, or enters and leaves
    job.write([change("+U", 1, "us"), change("+U", 1, "eu"), change("+I", 6, "eu"), change("+U", 6, "us")])
    job.write([change("+U", 5, "us", None)])
    with (delta_crashing if kind is DeltaJob else crashing)("before the commit"), pytest.raises(TemporaryError):
        job.run()
    job.lose_checkpoint()
    job.run()
    assert regions(job) == {1: "eu"}
    indexed(job)


@pytest.mark.parametrize("where", ["region <> 'us'", "upper(region) <> 'US'"], ids=["python", "spark"])
def test_late_changes_and_unwanted_rows(spark: SparkSession, tmp_path: Path, where: str) -> None:
    """A change whose row isn't wanted counts in the order: what is older comes too late."""
    job = Job(spark, tmp_path, table={"where": where, "late": "dead-letter"})

    def late(op: str, order: int, number: int, region: str) -> dict[str, Any]:
        return {"row_kind": op, "seq": order, "id": number, "region": region}

    job.write_records([late("+I", 10, 1, "us"), late("+I", 10, 2, "eu"), late("+I", 10, 3, "eu")])
    job.write_records([late("+U", 9, 1, "eu"), late("+U", 11, 2, "us"), late("+U", 9, 3, "us")])
    job.write_records([late("+U", 10, 2, "eu"), late("+U", 11, 1, "eu")])
    job.run()
    assert regions(job) == {1: "eu", 3: "eu"}
    shutil.rmtree(job.index_folder)
    job.write_records([late("+I", 10, 2, "eu"), late("+I", 12, 2, "asia")])
    job.run()
    assert regions(job) == {1: "eu", 2: "asia", 3: "eu"}
    found = sorted((message["id"], message["seq"]) for kind, _, message in letters(job) if kind == "late")
    assert found == [(1, 9), (2, 10), (2, 10), (3, 9)]


def test_a_row_that_lacks_values(spark: SparkSession, tmp_path: Path) -> None:
    """It is decided by the values that it has, and completed from the table. What can't be decided is a bad record."""
    job = toast_job(Job(spark, tmp_path), {"where": "note <> 'no'"})
    first = [{"id": number, "note": "a", "big": "b"} for number in (1, 2, 3)]
    write_messages(job, *({"op": "c", "before": None, "after": row, "source": {"lsn": row["id"]}} for row in first))
    job.run()
    write_messages(job, update(1, 11, note="yes"), update(2, 12, note="no"), update(4, 13, note="no"))
    write_messages(job, update(2, 14, note="yes"), update(3, 15, note="no"), update(3, 16, note="yes"))
    job.run()
    assert [(row["id"], row["note"], row["big"]) for row in job.rows()] == [(1, "yes", "b")]
    refused = {(kind, message["after"]["id"]) for kind, _, message in letters(job)}
    assert refused == {("row_absent", 2), ("row_absent", 3)}
    job.table = {**job.table, "where": "big <> 'no'"}
    write_messages(job, update(1, 17, note="undecided"), update(1, 18, note="new", big="c"))
    job.run()
    assert [(row["id"], row["note"], row["big"]) for row in job.rows()] == [(1, "new", "c")]
    reason = "column big: the source didn't send the unchanged value, and where needs it"
    assert ("unavailable_value", reason) in {(kind, why) for kind, why, _ in letters(job)}
    job.check_deletes()


@pytest.mark.parametrize(
    "where", ["note <> 'no' AND _offset IS NULL", "left(note, 2) <> 'no'"], ids=["python", "spark"]
)
def test_lacking_values_are_those_of_their_columns(spark: SparkSession, tmp_path: Path, where: str) -> None:
    """The table's columns are in another order than decoded ones, and there is one for the condition alone."""
    job = toast_job(Job(spark, tmp_path), {"metadata": ["_op"], "where": where})
    job.columns = {"id": "int", "note": "string"}
    write_messages(job, {"op": "c", "before": None, "after": {"id": 9, "note": "a"}, "source": {"lsn": 1}})
    job.run()
    spark.sql(f"ALTER TABLE {job.target} ADD COLUMNS (big string, bb binary, arr array<string>)")
    job.columns = TOAST
    write_messages(job, *(inserted(number, number) for number in (1, 2)))
    job.run()
    write_messages(job, update(1, 11, note="yes"), update(2, 12, note="no"))
    job.run()
    assert job.rows() == [
        FIRST | {"note": "yes", "_op": "u"},
        dict.fromkeys(TOAST) | {"id": 9, "note": "a", "_op": "c"},
    ]
    assert letters(job) == []


def test_a_truncate_and_bad_records_pass(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(spark, tmp_path, **{**SETTINGS, "table": {**SETTINGS["table"], "where": "region = 'eu'"}})

    def said(op: str, row: dict[str, Any] | None, lsn: int) -> dict[str, Any]:
        return {"op": op, "before": None, "after": row, "source": {"lsn": lsn}}

    def row(number: int, region: str) -> dict[str, Any]:
        return {"id": number, "region": region}

    write_messages(job, said("c", row(1, "eu"), 1), said("c", row(2, "us"), 2), said("c", {"region": "us"}, 3))
    job.run()
    assert regions(job) == {1: "eu"}
    assert [kind for kind, _, _ in letters(job)] == ["null_key"]
    write_messages(job, said("c", row(3, "eu"), 4), said("t", None, 5))
    write_messages(job, said("c", row(4, "eu"), 6), said("c", row(5, "us"), 7))
    job.run()
    assert regions(job) == {4: "eu"}


@pytest.mark.parametrize(("deletes", "partition_by"), [("position", ["region"]), ("equality", [])])
def test_mode_changelog(spark: SparkSession, tmp_path: Path, deletes: Any, partition_by: list[str]) -> None:
    job = Job(
        spark, tmp_path, COLUMNS, mode="changelog", deletes=deletes, partition_by=partition_by,
        table={"where": PYTHON},
    )  # fmt: skip
    job.write([change("+I", 1, "eu"), change("+I", 2, "us"), change("+I", 3, "asia")])
    job.write([change("-U", 1, "eu"), change("+U", 1, "us"), change("-U", 2, "us"), change("+U", 2, "eu")])
    job.write([change("-U", 3, "asia"), change("+U", 3, "eu"), change("-U", 3, "eu"), change("+U", 3, "asia", 0)])
    job.run()
    assert regions(job) == {2: "eu"}
    job.write([change("-D", 1, "us"), change("-D", 2, "eu"), change("-U", 3, "asia", 0), change("+U", 3, "asia")])
    job.run()
    assert regions(job) == {3: "asia"}
    indexed(job)


@pytest.mark.parametrize("where", ["region <> 'us'", "upper(region) <> 'US'"], ids=["python", "spark"])
def test_mode_append_leaves_rows_out(spark: SparkSession, tmp_path: Path, where: str) -> None:
    job = Job(spark, tmp_path, key=(), mode="append", table={"where": where})
    job.write([("+I", {"id": n, "region": region}) for n, region in enumerate(["eu", "us", None, "eu", "asia"])])
    job.write([("+I", {"id": 9, "region": "us"})])
    job.run()
    job.lose_checkpoint()
    job.run()
    assert sorted(row["id"] for row in job.rows()) == [0, 3, 4]


def test_what_a_condition_may_name(spark: SparkSession, tmp_path: Path) -> None:
    """Fields that aren't stored, computed columns and metadata columns that the table doesn't have."""
    columns: dict[str, Any] = {"id": "bigint", "region": "string", "cents": {"type": "bigint", "stored": False}}
    job = Job(spark, tmp_path, file_format="json", columns=columns)

    def play(where: str) -> list[int]:
        spark.sql(f"DROP TABLE IF EXISTS {job.target} PURGE")
        job.lose_checkpoint()
        job.table = {"where": where}
        job.run()
        return sorted(row["id"] for row in job.rows())

    inserts = [("+I", {"id": number, "region": "eu", "cents": number * 10}) for number in range(5)]
    job.write([*inserts, ("+U", {"id": 9, "region": "us", "cents": 0})])
    assert play("cents > 20") == [3, 4]
    assert play("sqrt(cents) > 5") == [3, 4]
    assert play("_op = '+U' OR cents = 10") == [1, 9]
    assert play("upper(_op) = '+U'") == [9]
    assert set(spark.table(job.target).columns) == {"id", "region"}
    columns |= {
        "euros": {"type": "bigint", "expression": "cents div 10"},
        "per": {"type": "bigint", "expression": "60 div cents"},
    }
    assert play("euros BETWEEN 2 AND 3") == [2, 3]  # where cents is 0 nothing is computed
    assert [(row["euros"], row["per"]) for row in job.rows()] == [(2, 3), (3, 2)]
    assert play("region = 'eu' AND cents > 0") == [1, 2, 3, 4]


@pytest.mark.parametrize(("deletes", "where"), [("copy-on-write", PYTHON), ("equality", SPARK)])
def test_the_table_is_the_source_where_it_is_true(
    spark: SparkSession, tmp_path: Path, deletes: Any, where: str
) -> None:
    """Any history, in several tasks and in any order of arrival."""
    random = Random(deletes)
    job = Job(spark, tmp_path, COLUMNS, deletes=deletes, table={"where": where})
    rows: dict[int, dict[str, Any]] = {}
    with tiny_thresholds(1, 2, spark):
        for _ in range(3):
            changes = []
            for _ in range(random.randrange(1, 40)):
                number = random.randrange(12)
                if number in rows and random.random() < 0.3:
                    changes.append(("-D", rows.pop(number)))
                    continue
                op = "+U" if number in rows else "+I"
                region = random.choice(["eu", "us", None])
                rows[number] = {"id": number, "region": region, "amount": random.randrange(3)}
                changes.append((op, rows[number]))
            job.write(changes, shuffle=random.shuffle)
            job.run()
            wanted = [row for _, row in sorted(rows.items()) if row["region"] == "eu" and row["amount"] > 0]
            assert [row | {"amount": int(row["amount"])} for row in job.rows()] == wanted
    indexed(job)
