"""Conditions that Python evaluates mean what Spark means by them; all others are left to Spark, or refused."""

import datetime as dt
from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_schema

from changelog.conditions import evaluated
from changelog.wanted import Where
from sink.errors import ConfigError
from sink.spark.versions import parse_ddl, to_arrow
from tests.sink.harness import Job

pytestmark = pytest.mark.spark

COLUMNS = {
    "id": "bigint",
    "small": "int",
    "flag": "boolean",
    "amount": "decimal(12,2)",
    "region": "string",
    "day": "date",
    "at": "timestamp",
    "ratio": "double",
}
VALUES: dict[str, list[Any]] = {
    "id": [0, 1, -(2**63), 2**63 - 1],
    "small": [None, 0, 5, -(2**31), 2**31 - 1],
    "flag": [None, True, False],
    "amount": [None, Decimal("0.00"), Decimal("-0.01"), Decimal("9999999999.99")],
    "region": [None, "", "eu", "us", "US", "ä%_", "e"],
    "day": [None, dt.date(1969, 12, 31), dt.date(2026, 1, 2)],
    "at": [None, dt.datetime(1969, 12, 31, tzinfo=dt.UTC), dt.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=dt.UTC)],
    "ratio": [None, 0.0, 1.5],
}
SIMPLE = [
    "id > 0", "id <= 9223372036854775807", "id IN (0, 1)", "ID >= small", "small >= 5.0", "small BETWEEN 0 AND 5",
    "small <=> NULL", "small <=> 5", "small NOT IN (5, 7)", "small <> 0", "coalesce(small, 0) = 0", "flag", "NOT flag",
    "flag IS NOT FALSE", "flag = (small > 0)", "amount > 0", "amount = 0", "amount < 1.001", "amount <> -0.01",
    f"amount IN ({', '.join(map(str, range(12)))})", "region <> 'US'", "region LIKE 'e%'", "region LIKE '%u'",
    "contains(region, 'ä%')", "region > 'e'", "region IN ('eu', '', 'x')", "day >= '2026-01-02'",
    "day < date'2000-01-01'", "day IS NULL", "at > '2020-01-01'", "at <= timestamp'2026-01-02 03:04:05.000006'",
]  # fmt: skip
ONLY_SPARK = ["lower(region) = 'eu'", "ratio > 1", "small % 2 = 1", "region LIKE 'e%u_'", "1 = 1", "id = small"]


def where(job: Job, text: str) -> Where:
    job.table = {"where": text}
    found = job.plan().changelog.where
    assert found is not None
    return found


@pytest.fixture
def job(spark: SparkSession, tmp_path: Path) -> Job:
    return Job(spark, tmp_path, columns=COLUMNS)


ROWS = [tuple(values[n * (2 + k) % len(values)] for k, values in enumerate(VALUES.values())) for n in range(60)]


def left_to_spark(job: Job, texts: Sequence[str]) -> list[str]:
    """Those that Python doesn't evaluate. It evaluates the others as Spark does."""
    schema = T.StructType([T.StructField(name, parse_ddl(dtype)) for name, dtype in COLUMNS.items()])
    rows = pa.RecordBatch.from_pylist([dict(zip(COLUMNS, row, strict=True)) for row in ROWS], to_arrow_schema(schema))
    found = {text: where(job, text).condition for text in texts}
    own = {text: evaluated(term, rows).fill_null(False).to_pylist() for text, term in found.items() if term is not None}
    frame = job.spark.createDataFrame(ROWS, schema).coalesce(1)
    spark = to_arrow(frame.selectExpr(*(f"coalesce({text}, false) AS c{n}" for n, text in enumerate(own))))
    assert dict(zip(own, (column.to_pylist() for column in spark.columns), strict=True)) == own
    return [text for text, term in found.items() if term is None]


@pytest.mark.versions
def test_python_evaluates_comparisons(job: Job) -> None:
    assert left_to_spark(job, [*SIMPLE, *ONLY_SPARK]) == ["ID >= small", *ONLY_SPARK]


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.recursive(
            st.sampled_from(SIMPLE),
            lambda inner: st.one_of(
                st.tuples(inner, st.sampled_from(["AND", "OR"]), inner).map(
                    lambda parts: f"({parts[0]}) {parts[1]} ({parts[2]})"
                ),
                inner.map(lambda text: f"NOT ({text})"),
            ),
            max_leaves=6,
        ),
        min_size=10,
        max_size=10,
        unique=True,
    )
)
def test_python_and_spark_agree(job: Job, texts: list[str]) -> None:
    left_to_spark(job, texts)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("id", "expected a condition on one row in Spark SQL.*is not a boolean"),
        ("nope > 1", "`nope` cannot be resolved.*It may use: id, small, .*ratio, and the metadata columns _op"),
        ("region > ;", "Syntax error"),
        ("count(*) > 1", "contains invalid expressions"),
        ("sum(id) OVER () > 1", "."),
        ("explode(array(true))", "."),
        ("rand() > 0.5", "it isn't the same each time, and a micro-batch may be written again. Leave it out"),
        ("day < current_date()", "CurrentDate isn't of the row"),
        ("at < now()", "isn't of the row"),
        ("id IN (SELECT 1)", "isn't of the row"),
        ("EXISTS (SELECT 1)", "isn't of the row"),
        ("id > 'abc'", "which fails on each row.*'abc'.*cannot be cast"),
    ],
)
def test_what_is_no_condition_on_a_row_is_refused(job: Job, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^tables\[0\]\.where: got .*{message}"):
        where(job, text)


def test_a_condition_means_the_same_in_a_session_without_ansi(job: Job) -> None:
    """Micro-batches run with ANSI's rules, whatever the session's default is (Spark 3.5)."""
    lax = replace(job, spark=job.spark.newSession(), columns=COLUMNS)
    lax.spark.conf.set("spark.sql.ansi.enabled", "false")
    texts = SIMPLE[2::3]
    assert [where(lax, text) for text in texts] == [where(job, text) for text in texts]
    with pytest.raises(ConfigError, match="which fails on each row"):
        where(lax, "id > 'abc'")
    assert lax.spark.conf.get("spark.sql.ansi.enabled") == "false"


def test_an_empty_condition_is_refused(job: Job) -> None:
    job.table = {"where": " "}
    with pytest.raises(ValueError, match="write a condition in Spark SQL"):
        job.config()
