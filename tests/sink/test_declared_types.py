"""`types`: types of columns that come later, and the warning of text that looks like base64 decimals."""

import json
import logging
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from pyspark.sql import SparkSession
from pyspark.sql import types as T

from changelog.spec import ChangelogSpec, ColumnSpec
from changelog.values.encoded import MAYBE_BASE64
from sink.commands import inspection
from sink.config import Config
from sink.config.table_section import TableSection
from sink.errors import ConfigError
from sink.table.patterns import resolve_tables
from sink.table.plan import evolved_columns, maybe_decimals
from sink.table.table_plan import TablePlan
from sink.targets.capabilities import CAPABILITIES
from tests.sink.harness import Job
from tests.sink.test_patterns import config

DECLARED = {"weight": "decimal(10,3)", ".*_at": "timestamp", "w.*": "double"}


def evolved(observed: dict[str, str], **table: Any) -> dict[str, T.DataType | None]:
    section = TableSection.model_validate(
        {"source": "t", "target": "lake.a.b", "key": ["id"], "types": DECLARED, **table}
    )
    columns = (ColumnSpec("id", T.LongType(), required=True), ColumnSpec("used_at", T.IntegerType()))
    plan = TablePlan(section, ChangelogSpec(columns, ("id",)), exists=True, columns=columns)
    return evolved_columns(plan, observed, CAPABILITIES["iceberg"])


@pytest.mark.spark
@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize(
    ("column", "observed", "dtype"),
    [
        ("weight", MAYBE_BASE64, T.DecimalType(10, 3)),  # its name goes before an expression
        ("weights", "string", T.DoubleType()),
        ("created_at", "bigint", T.TimestampType()),
        ("xcreated_at2", "bigint", T.LongType()),  # an expression fits whole names
        ("note", MAYBE_BASE64, T.StringType()),
        ("used_at", "bigint", T.LongType()),  # a column that is there grows as before
        ("used_at", "", None),
    ],
)
def test_new_columns_get_the_declared_type(column: str, observed: str, dtype: T.DataType | None) -> None:
    assert evolved({column: observed}) == {column: dtype}


def test_each_table_of_a_pattern_has_the_types() -> None:
    made = config([{"source": r"shop\.(.*)", "target": "lake.shop.$1", "types": DECLARED}])
    assert [t.section.declared_type("paid_at") for t in resolve_tables(made, ["shop.a", "shop.b"])] == ["timestamp"] * 2


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"types": {"a(": "int"}}, "'a(' is neither a column's name nor a regular expression for names"),
        ({"types": {"id": "int"}, "columns": {"id": "int"}}, "types names 'id', whose type columns says"),
    ],
)
def test_wrong_types(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        config([{"source": "a", "target": "lake.shop.a", **table}])
    assert message in str(caught.value)


def of_debezium(**options: str) -> Config:
    source = {"type": "kafka", "format": "debezium-json", "format_options": options}
    return config([{"source": "a", "target": "lake.shop.a"}], source | {"options": {"kafka.bootstrap.servers": "b:1"}})


def test_who_is_warned_of_base64() -> None:
    (warning,) = maybe_decimals(of_debezium(), {"weight": MAYBE_BASE64, "note": "string"})
    assert warning.startswith("weight: the text looks like base64")
    assert 'types: {weight: "decimal(p,s)"}' in warning
    assert "decimal.handling.mode: string" in warning
    assert not list(maybe_decimals(of_debezium(), {"weight": "decimal(10,3)"}))
    assert not list(maybe_decimals(of_debezium(**{"decimal.handling.mode": "string"}), {"weight": MAYBE_BASE64}))
    assert not list(maybe_decimals(config([{"source": "a", "target": "lake.a.b"}]), {"weight": MAYBE_BASE64}))


@pytest.mark.spark
def test_a_decimal_that_is_added_to_the_source(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Debezium's JSON without a schema, from the first row on and in a column that comes later."""
    job = Job(spark, tmp_path, columns={}, file_format="json", configure_columns=False)
    job.sections = {"source": {"format": "debezium-json"}}
    caplog.set_level(logging.INFO, "rowdelta")

    def write(number: int, **row: Any) -> None:
        event = {"before": None, "after": {"id": number, **row}, "op": "c", "source": {"lsn": number}}
        job.write_text(json.dumps(event) + "\n")

    job.table = {"order_by": ["source.lsn bigint"], "types": {"weight|price": "decimal(10,3)"}}
    write(1, price="ASbs", size="BNI=")
    shown = "\n".join(inspection.check(spark, job.config()))
    assert "price decimal(10,3)" in shown
    assert "size string" in shown
    assert "size: the text looks like base64" in shown
    job.run()
    assert "size: the text looks like base64" in caplog.text
    caplog.clear()
    write(2, price="BNI=", size="BNI=", weight="BNI=", height="BNI=")
    job.run()
    assert "the source's schema changed: height string, weight decimal(10,3)" in caplog.text
    assert "height: the text looks like base64" in caplog.text
    assert job.rows() == [
        {"id": 1, "price": Decimal("75.500"), "size": "BNI=", "height": None, "weight": None},
        {"id": 2, "price": Decimal("1.234"), "size": "BNI=", "height": "BNI=", "weight": Decimal("1.234")},
    ]

    caplog.clear()
    job.table |= {"types": {"height": "decimal(10,3)", "weight": "decimal(9,3)"}}
    shown = "\n".join(inspection.check(spark, job.config()))
    assert "column height is string, but types says decimal(10,3)" in shown
    assert "column weight" not in shown, "it has grown"
    job.table |= {"types": {"height": "decimel"}}
    with pytest.raises(ConfigError, match=r"tables\[0\]\.types\.height: got 'decimel', expected a Spark SQL type"):
        list(inspection.check(spark, job.config()))
