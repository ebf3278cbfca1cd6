"""`ignore_null_updates`: in a change's NULL the key's row keeps its value, in each format."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
from pyspark.sql import SparkSession

from sink.commands.inspection import check
from sink.errors import ConfigError, TemporaryError
from tests.delta.harness import DeltaJob
from tests.delta.harness import crashing as delta_crashing
from tests.sink.harness import Job, crashing, tiny_thresholds
from tests.sink.partial_story import letters, toast_job, update
from tests.sink.partial_story import write as write_messages

pytestmark = pytest.mark.spark

COLUMNS = {"id": "bigint", "region": "string", "note": "string", "amount": "decimal(12,2)"}


@pytest.mark.parametrize(
    ("kind", "deletes", "partition_by", "ignored"),
    [
        pytest.param(Job, "position", [], True, id="iceberg"),
        pytest.param(Job, "copy-on-write", ["region"], ["note", "amount"], id="copy-on-write"),
        pytest.param(DeltaJob, "position", ["region"], {"except": ["region"]}, id="delta"),
    ],
)
def test_a_null_keeps_the_value_of_the_keys_row(
    spark: SparkSession, tmp_path: Path, kind: type[Job], deletes: Any, partition_by: list[str], ignored: Any
) -> None:
    """Any history, in several tasks and in any order of arrival; a row that was deleted has no value to keep."""
    random = Random(f"{kind.__name__} {deletes}")
    names = ["region", "note", "amount"] if ignored is True else ["note", "amount"]
    job = kind(
        spark, tmp_path, COLUMNS, deletes=deletes, partition_by=partition_by, table={"ignore_null_updates": ignored}
    )
    rows: dict[int, dict[str, Any]] = {}
    with tiny_thresholds(1, 2, spark):
        for number in range(3):
            changes: list[tuple[str, dict[str, Any]]] = []
            for _ in range(random.randrange(1, 40)):
                key = random.randrange(12)
                if key in rows and random.random() < 0.2:
                    changes.append(("-D", rows.pop(key)))
                    continue
                row = {name: random.choice([None, *values]) for name, values in {"region": "ab", "note": "xyz"}.items()}
                row |= {"id": key, "amount": random.choice([None, 1, 2])}
                changes.append((random.choice(["+I", "+U"]), row))
                kept = {name: rows[key][name] for name in names if row[name] is None} if key in rows else {}
                rows[key] = row | kept
            job.write(changes, shuffle=random.shuffle)
            if number == 1:
                crash = delta_crashing if kind is DeltaJob else crashing
                with crash("before the commit"), pytest.raises(TemporaryError):
                    job.run()
                job.lose_checkpoint()
            job.run()
            found = [row | {"amount": row["amount"] and int(row["amount"])} for row in job.rows()]
            assert found == [row for _, row in sorted(rows.items())]
    job.check_deletes()
    assert job.check_index() is not None
    told = f"  NULL is ignored in {', '.join(sorted(names))}"
    assert told in list(check(spark, job.config()))


def test_nulls_and_values_that_were_not_sent(spark: SparkSession, tmp_path: Path) -> None:
    """An update that lacks values needs its row; one whose NULLs are ignored doesn't."""
    job = toast_job(Job(spark, tmp_path), {"ignore_null_updates": ["note"]})
    first = {"id": 1, "note": "a", "big": "b"}
    write_messages(job, {"op": "c", "before": None, "after": first, "source": {"lsn": 1}})
    job.run()
    write_messages(job, update(1, 11, note=None), update(2, 12, note=None))
    write_messages(
        job, {"op": "c", "before": None, "after": {"id": 3, "note": None, "big": "c"}, "source": {"lsn": 13}}
    )
    job.run()
    assert [(row["id"], row["note"], row["big"]) for row in job.rows()] == [(1, "a", "b"), (3, None, "c")]
    assert [(kind, message["after"]["id"]) for kind, _, message in letters(job)] == [("row_absent", 2)]


def test_nulls_of_rows_that_enter(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(
        spark,
        tmp_path,
        COLUMNS,
        table={"ignore_null_updates": ["note"], "where": "upper(region) = 'EU'", "late": "drop"},
    )

    def row(number: int, region: str, note: str | None) -> dict[str, Any]:
        return {"id": number, "region": region, "note": note, "amount": 1}

    job.write([("+I", row(1, "eu", "a")), ("+I", row(2, "eu", "a")), ("+I", row(3, "us", "a"))])
    job.write([("+U", row(1, "eu", None)), ("+U", row(2, "us", None)), ("+U", row(3, "eu", None))])
    job.write_records([{"row_kind": "+U", "seq": 0, **row(1, "eu", "late")}])
    job.run()
    assert [(row["id"], row["note"]) for row in job.rows()] == [(1, "a"), (3, None)]
    job.table = {**job.table, "where": "note = 'a'"}
    with pytest.raises(ConfigError, match=r"where: .* names note, whose NULLs are ignored.*except: \[note\]"):
        job.run()


def test_versions_of_wanted_rows_with_kept_values(spark: SparkSession, tmp_path: Path) -> None:
    """A row that isn't wanted any more is closed; one that comes back begins with its own values."""
    table = {"history": {}, "where": "lower(region) <> 'us'", "ignore_null_updates": ["note"]}
    job = Job(spark, tmp_path, COLUMNS, properties={"format-version": "3"}, table=table)

    def change(order: int, number: int, region: str, note: str | None) -> dict[str, Any]:
        return {"row_kind": "+U", "seq": order, "id": number, "region": region, "note": note, "amount": 1}

    job.write_records([change(1, 1, "eu", "a"), change(1, 2, "us", "a"), change(2, 2, "eu", None)])
    job.write_records([change(3, 1, "asia", None), change(4, 2, "us", None), change(5, 2, "eu", None)])
    job.run()
    found = {(row["id"], row["region"], row["note"], row["valid_from"], row["valid_to"]) for row in job.rows()}
    assert found == {
        (1, "eu", "a", 1, 3),
        (1, "asia", "a", 3, None),
        (2, "eu", None, 2, 4),
        (2, "eu", None, 5, None),
    }


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"mode": "changelog"}, "mode changelog takes changes as they are. Write mode: upsert"),
        ({"deletes": "equality"}, "only the key index finds the table's rows"),
        ({"ignore_null_updates": ["id"]}, "got 'id', which is in key; expected some of region, note, amount"),
        ({"ignore_null_updates": ["nope"]}, "names 'nope', which is not in columns"),
        ({"ignore_null_updates": "note"}, "expected true, a list of columns, or"),
        ({"order_by": ["amount"], "ignore_null_updates": ["amount"]}, "got 'amount', which is in order_by"),
        ({"soft_delete": {"column": "gone"}}, "would give its values to the next insert of its key. Leave one"),
        ({"columns": {"id": "int", "twice": {"type": "int", "expression": "id * 2"}}}, "a computed column could be"),
    ],
)
def test_where_null_can_t_be_ignored(spark: SparkSession, tmp_path: Path, table: dict[str, Any], message: str) -> None:
    job = Job(spark, tmp_path, COLUMNS, table={"ignore_null_updates": True, **table})
    with pytest.raises((ConfigError, ValueError), match=message):
        job.run()
