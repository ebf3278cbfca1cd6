"""The condition on a table's rows (`where`). It is Spark SQL, and Spark says what it means.

Of most conditions Python evaluates what Spark has made of them, in the tasks that decode (`changelog.conditions`). Rows
that go through Spark for it cost more than the condition saves.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

import pyarrow as pa
from py4j.java_gateway import JavaObject
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.pandas.types import from_arrow_type, to_arrow_type

from changelog.conditions import CONSTANTS_FOLLOW, Condition, Constant, Field, Operator
from changelog.decoding import spark_schema
from changelog.rows import KIND, PREFIX, RowKind
from changelog.spec import METADATA
from changelog.wanted import Where
from sink.errors import ConfigError
from sink.spark.changes import is_bad
from sink.spark.expressions import sentence
from sink.spark.versions import parse_ddl
from sink.table.table_plan import TablePlan

_OPERATORS: dict[str, Operator] = {
    "And": "and",
    "Or": "or",
    "Not": "not",
    "EqualTo": "=",
    "EqualNullSafe": "<=>",
    "LessThan": "<",
    "LessThanOrEqual": "<=",
    "GreaterThan": ">",
    "GreaterThanOrEqual": ">=",
    "IsNull": "is null",
    "Coalesce": "coalesce",
    "In": "in",
    "StartsWith": "starts with",
    "EndsWith": "ends with",
    "Contains": "contains",
}
"""By the names of Spark's classes."""
_ALIKE = re.compile(r"boolean|tinyint|smallint|int|bigint|decimal\(\d+,\d+\)|string|date|timestamp|timestamp_ntz")
"""The types whose values Spark and Arrow compare alike. Of floating-point numbers they don't: NaN, -0.0."""
_NOT_OF_THE_ROW = re.compile(r"Current\w+|Now|Local(Timestamp|Time)|\w*UDF|\w*Subquery|Exists|ListQuery")
"""Spark's classes whose values the row alone doesn't determine."""


class _OnlySparkError(Exception):
    """Python can't evaluate a part of the condition as Spark does."""


def where_of(spark: SparkSession, plan: TablePlan, path: str) -> Where | None:
    """Which rows the table wants, as `plan.section.where` says it.

    :param plan: without `ChangelogSpec.where`.
    :param path: the table's place in the configuration, `tables[0]`.
    :raises ConfigError: the text isn't a condition on one row, or isn't the same each time.
    """
    text, spec, computed = plan.section.where, plan.changelog, dict(plan.computed)
    if text is None:
        return None
    known = {field.name: field.dataType for field in spark_schema(spec) if not field.name.startswith(PREFIX)}
    known |= {column.name: column.type for column in plan.columns if column.name in computed}
    lower = {name.lower() for name in known}
    further = {name: from_arrow_type(dtype) for name, dtype in METADATA.items() if name not in lower}
    rows = _no_rows(spark, known | further)
    condition = _analyzed(rows, text, f"{path}.where", known)
    named = _names(condition, rows)
    ignored = sorted(named & spec.ignored_nulls)
    if ignored:
        raise ConfigError(
            f"{path}.where: {text!r} names {ignored[0]}, whose NULLs are ignored, so that a change alone doesn't "
            f"decide. Write ignore_null_updates: {{except: [{', '.join(ignored)}]}}."
        )
    uuids = sorted(column.name for column in spec.columns if column.is_uuid and column.name in named)
    if uuids:
        raise ConfigError(
            f"{path}.where: {text!r} names {uuids[0]}, a uuid, whose text and bytes differ. Name other columns."
        )
    first = frozenset(named & computed.keys())
    inputs = named - first
    for name in first:
        inputs |= _names(_condition_of(rows.where(F.expr(f"({computed[name]}) IS NULL"))), rows)
    metadata = tuple(name for name in further if name in inputs)
    python = None if first else _in_python(rows, text, f"{path}.where")
    fields = {column.name for column in spec.columns}
    # with computed columns, other fields that aren't stored may be for these
    only = {*metadata, *(() if computed else fields - {column.name for column in plan.columns})}
    return Where(
        inputs=frozenset(inputs),
        condition=python,
        only=frozenset(only if python is not None else ()),
        columns=frozenset(fields - set(spec.key)),
        metadata=metadata,
        computed=first,
        keeps_records=spec.keeps_late,
    )


def unwanted(rows: DataFrame, text: str) -> Column:
    """Whether each changelog row sets a row that the table doesn't want. It is never NULL.

    :param text: the condition.
    """
    sets = F.col(KIND).isin(int(RowKind.INSERT), int(RowKind.UPDATE_AFTER)) & ~is_bad(rows)
    return F.when(sets, ~F.coalesce(F.expr(text), F.lit(False))).otherwise(F.lit(False))


def _no_rows(spark: SparkSession, types: Mapping[str, T.DataType]) -> DataFrame:
    """A frame of which Spark doesn't know that it is empty: it would say that no row satisfies the condition."""
    if spark.conf.get("spark.sql.ansi.enabled") != "true":  # as in micro-batches (`SparkWriter`)
        zone = spark.conf.get("spark.sql.session.timeZone")
        spark = spark.newSession()
        spark.conf.set("spark.sql.ansi.enabled", "true")
        spark.conf.set("spark.sql.session.timeZone", str(zone))
    schema = T.StructType([T.StructField(name, dtype) for name, dtype in types.items()])
    return spark.createDataFrame(spark.sparkContext.emptyRDD(), schema)


def _analyzed(rows: DataFrame, text: str, place: str, known: Iterable[str]) -> JavaObject:
    """The condition as Spark has resolved it.

    :raises ConfigError: the text isn't a condition on one row, or isn't the same each time.
    """
    expected = "expected a condition on one row in Spark SQL, such as country <> 'US' AND amount > 0"
    try:
        condition = _condition_of(rows.where(F.expr(text)))
    except PySparkException as error:
        raise ConfigError(
            f"{place}: got {text!r}, {expected}. {sentence(error)} It may use: {', '.join(known)}, and the metadata "
            f"columns {', '.join(METADATA)}."
        ) from None
    others = sorted({name for name in map(_class_of, _parts(condition)) if _NOT_OF_THE_ROW.fullmatch(name)})
    if others or not condition.deterministic():
        what = f"{others[0]} isn't of the row" if others else "it isn't the same each time"
        raise ConfigError(
            f"{place}: got {text!r}, {expected}; {what}, and a micro-batch may be written again. Leave it out."
        )
    return condition


def _condition_of(rows: DataFrame) -> JavaObject:
    return rows._jdf.queryExecution().analyzed().condition()


def _class_of(node: JavaObject) -> str:
    return str(node.getClass().getSimpleName())


def _items(found: JavaObject) -> list[Any]:
    """The items of a sequence of Scala."""
    return [found.apply(number) for number in range(found.size())]


def _parts(expression: JavaObject) -> Iterator[JavaObject]:
    """An expression, and all expressions in it."""
    yield expression
    for child in _items(expression.children()):
        yield from _parts(child)


def _names(expression: JavaObject, rows: DataFrame) -> set[str]:
    """The columns of `rows` in an expression."""
    parts = (part for part in _parts(expression) if _class_of(part) == "AttributeReference")
    return {_name(part, rows.columns) for part in parts}


def _name(attribute: JavaObject, columns: Sequence[str]) -> str:
    """The column's own name. Spark has it as the expression spells it."""
    spelt = str(attribute.name())
    return spelt if spelt in columns else next(name for name in columns if name.lower() == spelt.lower())


def _in_python(rows: DataFrame, text: str, place: str) -> Condition | Field | None:
    """The condition as Spark has simplified it, for Python. None if only Spark can evaluate it.

    :raises ConfigError: a part that depends on no row has no value.
    """
    try:
        plan = rows.where(F.expr(text))._jdf.queryExecution().optimizedPlan()
    except PySparkException as error:
        raise ConfigError(f"{place}: got {text!r}, which fails on each row. {sentence(error)} Correct it.") from None
    if _class_of(plan) != "Filter" or _class_of(plan.child()) != "LogicalRDD":
        return None  # it depends on no column
    try:
        found = _term(plan.condition(), rows.columns)
    except _OnlySparkError:
        return None
    return None if isinstance(found, Constant) else found


def _term(expression: JavaObject, columns: Sequence[str]) -> Condition | Field | Constant:
    """:raises _OnlySparkError: only Spark can evaluate it."""
    kind, dtype = _class_of(expression), str(expression.dataType().simpleString())
    if not _ALIKE.fullmatch(dtype):
        raise _OnlySparkError
    if kind == "AttributeReference":
        return Field(_name(expression, columns))
    if kind == "Literal":
        return _constant(expression.value(), dtype)
    operands = tuple(_term(child, columns) for child in _items(expression.children()))
    if kind == "IsNotNull":
        return Condition("not", (Condition("is null", operands),))
    if kind == "InSet":
        among = _items(expression.hset().toSeq())
        of = str(expression.child().dataType().simpleString())
        return Condition("in", (*operands, *(_constant(value, of) for value in among)))
    operator = _OPERATORS.get(kind)
    if operator is None or (
        operator in CONSTANTS_FOLLOW and not all(isinstance(term, Constant) for term in operands[1:])
    ):
        raise _OnlySparkError
    return Condition(operator, operands)


def _constant(value: Any, dtype: str) -> Constant:
    """:param value: as Spark has it: days since 1970, microseconds, objects of Java for texts and decimals."""
    if value is None:
        raise _OnlySparkError
    arrow = to_arrow_type(parse_ddl(dtype))
    if pa.types.is_date(arrow):
        return Constant(pa.scalar(value, pa.int32()).cast(arrow))
    if pa.types.is_timestamp(arrow):
        return Constant(pa.scalar(value, pa.int64()).cast(arrow))
    if pa.types.is_decimal(arrow):
        return Constant(pa.scalar(Decimal(value.toString()), arrow))
    return Constant(pa.scalar(value.toString() if pa.types.is_string(arrow) else value, arrow))
