"""`rowdelta verify` without a database: the comparison itself, and tables that Spark reads."""

import json
import math
from collections.abc import Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from sink import cli
from sink.commands import verify as verify_command
from sink.commands.verify import as_json, lines, verify
from sink.errors import ConfigError, TableError
from sink.spark import session
from sink.spark.versions import parse_ddl
from sink.verify.canonical import comparable, value
from sink.verify.comparison import (
    ColumnDifference,
    ComparedColumns,
    Difference,
    checksums,
    differing,
    hashed,
    in_buckets,
    shown_differences,
)
from sink.verify.rounds import Outcome
from tests.delta.harness import DeltaJob
from tests.sink.harness import Job

pytestmark = pytest.mark.spark

TYPES = {
    "id": "bigint",
    "part": "string",
    "flag": "boolean",
    "amount": "decimal(12,2)",
    "ratio": "double",
    "note": "string",
    "raw": "binary",
    "day": "date",
    "at": "timestamp",
    "tags": "array<string>",
    "pairs": "map<string,int>",
    "point": "struct<x:int,y:string>",
}


def random_row(random: Random, number: int) -> dict[str, Any]:
    """A row whose key is one of a number; each other value may be NULL."""

    def some(found: object) -> object:
        return None if random.random() < 0.3 else found

    return {
        "id": number // 2,
        "part": "Ab" if number % 2 else "aB",  # one key in a collation that ignores case
        "flag": some(random.random() < 0.5),
        "amount": some(Decimal(random.randrange(10**6)).scaleb(-2)),
        "ratio": some(random.choice([0.5, -0.0, math.nan, math.inf])),
        "note": some(random.choice(["", "a", "a ", "é", "e\u0301"])),
        "raw": some(random.choice([b"", b"\x00"])),
        "day": some(date(1900 + random.randrange(200), 1, 1)),
        "at": some(datetime(2026, 1, 1, microsecond=random.randrange(10**6), tzinfo=UTC)),
        "tags": some(random.choice([[], ["a, b"], ["a", "b"], ["a", None], [None, "a"]])),
        "pairs": some(random.choice([{}, {"a": 1, "b": 2}, {"b": 2, "a": None}])),
        "point": some(random.choice([{"x": None, "y": "1"}, {"x": 1, "y": None}])),
    }


def same(one: object, other: object) -> bool:
    is_nan = isinstance(one, float) and isinstance(other, float) and math.isnan(one) and math.isnan(other)
    return is_nan or one == other


def frame_of(spark: SparkSession, rows: Sequence[dict[str, Any]]) -> DataFrame:
    schema = T.StructType([T.StructField(name, parse_ddl(dtype)) for name, dtype in TYPES.items()])
    frame = spark.createDataFrame([tuple(row[name] for name in TYPES) for row in rows], schema)
    columns = [comparable(F.col(f.name), f.dataType)[0].alias(value(n)) for n, f in enumerate(schema)]
    return frame.select(*columns)


@pytest.fixture(scope="module")
def layout(spark: SparkSession) -> ComparedColumns:
    types = [comparable(F.lit(None), parse_ddl(dtype))[1] for dtype in TYPES.values()]
    return ComparedColumns(list(TYPES), types, [0, 1])


@pytest.mark.parametrize("seed", [1, 2])
def test_each_difference_of_random_rows_is_found_and_no_other(
    spark: SparkSession, layout: ComparedColumns, seed: int
) -> None:
    """Against a comparison of the rows in Python."""
    random = Random(seed)
    source = [random_row(random, number) for number in range(400)]
    table, expected = list[dict[str, Any]](), dict[tuple[Any, ...], tuple[str, list[str]]]()
    for row in source:
        chance, key = random.random(), (str(row["id"]), row["part"])
        if chance < 0.05:
            expected[key] = ("missing in table", [])
        elif chance < 0.1:
            table += [row, row]
            expected[key] = ("1 in source, 2 in table", [])
        elif chance < 0.5:
            other = random_row(random, 0) | {"id": row["id"], "part": row["part"]}
            changed = {name: random.choice([row, other])[name] for name in TYPES}
            table.append(changed)
            if names := [name for name in TYPES if not same(row[name], changed[name])]:
                expected[key] = ("differs", names)
        else:
            table.append(dict(row))
    for number in range(900, 910):
        table.append(random_row(random, number))
        expected[str(number // 2), table[-1]["part"]] = ("missing in source", [])
    random.shuffle(table)

    left, right = (hashed(frame_of(spark, rows), layout, with_values=True) for rows in (source, table))
    sums = checksums(left, right, layout, 1_000_000)
    assert (sums.source_rows, sums.table_rows) == (len(source), len(table))
    assert 0 < sums.different <= len(expected) < sums.buckets
    left, right = (in_buckets(side, sums, layout) for side in (left, right))
    found = differing(left, right, layout).localCheckpoint()
    shown = shown_differences(found, layout, 1000)
    assert {(d.key["id"], d.key["part"]): (d.kind, [column.column for column in d.columns]) for d in shown} == expected
    assert [int(str(d.key["id"])) for d in shown_differences(found, layout, 3)] == sorted(
        int(key[0]) for key in expected
    )[:3]


COLUMNS = {"id": "bigint", "name": "string", "amount": "decimal(12,2)"}


def verified(job: Job, **options: Any) -> list[str]:
    """What verify prints about the job's tables."""
    found = verify(job.spark, job.config(), (), options.get("limit", 20), 30)
    printed = list[str]()
    for outcome in found:
        if outcome.error is not None:
            raise outcome.error
        printed += lines(outcome)
    return printed


def test_a_table_against_one_that_spark_reads(spark: SparkSession, tmp_path: Path) -> None:
    """Renamed, computed, excluded and metadata columns; a changed, a missing and an additional row; dead letters."""
    truth = f"lake.{Path(tmp_path).name.replace('-', '_')}.truth"
    job = Job(
        spark,
        tmp_path,
        columns={**COLUMNS, "secret": "string"},
        file_format="json",
        sections={"sink": {"on_bad_record": "dead-letter"}},
        table={
            "columns": {
                "id": "bigint",
                "name": {"type": "string", "from": "title"},
                "amount": "decimal(12,2)",
                "label": {"type": "string", "from": "title"},  # two columns of one field
                "twice": {"type": "decimal(14,2)", "expression": "amount * 2"},
            },
            "exclude": ["secret"],
            "metadata": ["_ts"],
            "verify": {"spark_table": truth},
        },
    )
    rows = [{"id": n, "title": f"n{n}", "amount": f"{n}.50", "secret": "s"} for n in range(1, 30)]
    spark.createDataFrame(
        [(row["id"], row["title"], Decimal(str(row["amount"])), "s", 1) for row in rows],
        "id int, title string, amount decimal(20,4), secret string, more int",
    ).writeTo(truth).create()
    job.write([("+I", row) for row in rows])
    job.run()
    name = job.target
    not_compared = [
        "  not compared: twice (computed)",
        "  not compared: _ts (about the change, not of the source)",
        "  not compared: more (the table has no such column)",
    ]
    equal = verified(job)
    assert equal[0] == f"{name} against {truth}: EQUAL"
    assert equal[1].startswith("  table at snapshot ")
    assert equal[1].endswith("; 29 and 29 rows, 1 round")
    assert equal[2:] == not_compared

    spark.sql(f"UPDATE {truth} SET amount = amount + 0.0001 WHERE id = 7")  # the table can't hold it
    spark.sql(f"UPDATE {truth} SET title = NULL WHERE id = 8")
    spark.sql(f"DELETE FROM {truth} WHERE id = 9")
    spark.sql(f"DELETE FROM {name} WHERE id = 10")
    spark.sql(f"INSERT INTO {name} SELECT * FROM {name} WHERE id = 11")
    job.write([("+I", {"id": 99, "title": "bad", "amount": "x", "secret": "s"})])
    job.run()
    different = verified(job)
    assert different[0] == f"{name} against {truth}: DIFFERENT in 5 keys"
    assert different[5:] == [
        "  id=7: differs in amount",
        "    amount: source 7.5001, table 7.50",
        "  id=8: differs in name, label",
        "    name: source NULL, table n8",
        "    label: source NULL, table n8",
        "  id=9: missing in source",
        "  id=10: missing in table",
        "  id=11: 1 in source, 2 in table",
        "  the table has 1 dead letter, which may be why: rowdelta dead-letters list",
    ]
    assert verified(job, limit=1)[5:8] == [*different[5:7], "  and 4 more keys (--limit shows more)"]
    (outcome,) = verify(spark, job.config(), ["orders"], 1, 30)
    told = json.loads(as_json(outcome))
    assert told["equal"] is False
    assert told["differences"] == [
        {
            "key": {"id": "7"},
            "kind": "differs",
            "source_rows": 1,
            "table_rows": 1,
            "columns": {"amount": {"source": "7.5001", "table": "7.50"}},
        }
    ]
    with pytest.raises(ConfigError, match="items is no table of this configuration"):
        list(verify(spark, job.config(), ["items"], 1, 30))


def test_a_table_that_drops_late_changes(spark: SparkSession, tmp_path: Path) -> None:
    truth = f"lake.{Path(tmp_path).name.replace('-', '_')}.truth"
    job = Job(spark, tmp_path, table={"late": "drop", "verify": {"spark_table": truth}})
    spark.createDataFrame([(1, "eu"), (2, "us")], "id bigint, region string").writeTo(truth).create()
    job.write([("+I", {"id": 1, "region": "eu"}), ("+I", {"id": 2, "region": "us"}), ("+I", {"id": 3, "region": "x"})])
    job.write([("-D", {"id": 3, "region": None})])
    job.run()
    found = verified(job)
    assert found[0] == f"{job.target} against {truth}: EQUAL"
    assert found[2:] == ["  not compared: _order (about the change, not of the source)"]


def test_only_rows_that_the_table_wants_are_compared(spark: SparkSession, tmp_path: Path) -> None:
    truth = f"lake.{Path(tmp_path).name.replace('-', '_')}.truth"
    columns: dict[str, Any] = {
        "id": "bigint",
        "place": {"type": "string", "from": "region"},
        "cents": {"type": "bigint", "stored": False},
        "euros": {"type": "bigint", "expression": "cents div 100"},
    }
    job = Job(
        spark, tmp_path, columns=columns, file_format="json",
        table={"where": "place <> 'us' AND cents > 0 AND euros < 9", "verify": {"spark_table": truth}},
    )  # fmt: skip
    rows = [(1, "eu", 500), (2, "us", 500), (3, None, 500), (4, "eu", 0), (5, "eu", 950)]
    spark.createDataFrame(rows, "id int, region string, cents int").writeTo(truth).create()
    job.write([("+I", {"id": number, "region": region, "cents": cents}) for number, region, cents in rows])
    job.run()
    assert [row["id"] for row in job.rows()] == [1]
    assert verified(job)[:2] == [
        f"{job.target} against {truth}: EQUAL",
        f"  table at snapshot {job.current_snapshot()}; 1 and 1 rows, 1 round",
    ]
    spark.sql(f"UPDATE {truth} SET cents = 100 WHERE id = 4")
    assert "  id=4: missing in table" in verified(job)
    job.table = {**job.table, "where": "_op = '+I'"}
    with pytest.raises(ConfigError, match=r"where needs _op, which lake.*doesn't have"):
        verified(job)


def test_a_table_that_was_altered_since_its_last_commit(spark: SparkSession, tmp_path: Path) -> None:
    """A read at a snapshot has the columns of that time."""
    truth = f"lake.{Path(tmp_path).name.replace('-', '_')}.truth"
    job = Job(
        spark, tmp_path, columns={"id": "int", "name": "string"}, file_format="json",
        table={"verify": {"spark_table": truth}},
    )  # fmt: skip
    rows = [{"id": n, "name": f"n{n}"} for n in range(5)]
    spark.createDataFrame([(row["id"], row["name"], None) for row in rows], "id int, name string, more string").writeTo(
        truth
    ).create()
    job.write([("+I", row) for row in rows])
    job.run()
    spark.sql(f"ALTER TABLE {job.target} ALTER COLUMN id TYPE bigint")
    spark.sql(f"ALTER TABLE {job.target} ADD COLUMN more string")
    job.columns = {"id": "bigint", "name": "string", "more": "string"}
    assert verified(job)[0] == f"{job.target} against {truth}: EQUAL"


def test_nothing_to_compare_is_no_equality(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the Kafka user may not see the topics of a pattern."""
    job = Job(spark, tmp_path)
    monkeypatch.setattr(verify_command, "find_tables", lambda *_: [])
    with pytest.raises(ConfigError, match="No table was compared"):
        list(verify(spark, job.config(), [], 1, 30))


def test_rows_of_a_table_that_only_grows_are_counted(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a Delta table, on the command line."""
    truth = f"lake.{Path(tmp_path).name.replace('-', '_')}.truth"
    job = DeltaJob(
        spark, tmp_path, columns={"name": "string"}, key=(), mode="append", table={"verify": {"spark_table": truth}}
    )
    spark.createDataFrame([("a",), ("a",), (None,)], "name string").writeTo(truth).create()
    job.write([("+I", {"name": name}) for name in ("a", "a", None)])
    job.run()
    config = tmp_path / "sink.yaml"
    config.write_text(yaml.safe_dump(job.config_values()))
    monkeypatch.setattr(session, "start", lambda *_, **__: spark)  # and leave it running
    monkeypatch.setattr(session, "stop", lambda _: None)
    assert cli.main(["verify", str(config)]) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith(": EQUAL")
    spark.sql(f"INSERT INTO {truth} VALUES (NULL), ('b')")
    assert cli.main(["verify", str(config), "--table", "orders"]) == 1
    assert capsys.readouterr().out.splitlines()[2:] == [
        "  name=NULL: 2 in source, 1 in table",
        "  name=b: missing in table",
    ]


def test_what_cannot_be_compared_is_said_with_the_way_out(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(spark, tmp_path)
    with pytest.raises(
        ConfigError, match=r"tables\[0\]: .* has no verify section. Say with what it is compared: verify:"
    ):
        verified(job)
    other = Job(spark, tmp_path, table={"verify": {"spark_table": "lake.nothing.here"}})
    with pytest.raises(TableError, match=r"does not exist. rowdelta run creates it"):
        verified(other)
    job.write([("+I", {"id": 1, "region": "eu"})])
    job.run()
    job.table = {"verify": {"spark_table": "lake.nothing.here"}}
    with pytest.raises(ConfigError, match=r"verify.spark_table: Spark can't read lake.nothing.here"):
        verified(job)
    truth = f"{job.target}_other"
    spark.createDataFrame([("eu",)], "region string").writeTo(truth).create()
    job.table = {"verify": {"spark_table": truth}}
    with pytest.raises(ConfigError, match=r"the key column id can't be compared \(the source has no column id\)"):
        verified(job)


def test_values_of_differences_may_be_left_out() -> None:
    found = Difference({"id": "73519", "region": None}, 1, 1, [ColumnDifference("v", "S3cr3t-value", None)])
    outcome = Outcome("t", "s", different=1, differences=[found.without_values()])
    texts = "\n".join([*lines(outcome), as_json(outcome)])
    assert "id=text of 5 characters, region=NULL: differs in v" in texts
    assert "v: source text of 12 characters, table NULL" in texts
    assert not any(secret in texts for secret in ("73519", "S3cr3t"))
