"""Computed columns. They are Spark SQL expressions over a row's other columns, its fields that aren't stored, and
metadata columns.
"""

import re

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from changelog.decoding import spark_schema
from changelog.rows import KIND, PREFIX, UNAVAILABLE, RowKind
from sink.errors import ConfigError
from sink.spark.conditions import unwanted
from sink.spark.expressions import quoted, sentence
from sink.table.table_plan import TablePlan

_UNWANTED = f"{PREFIX}unwanted"
_INTEGERS = {"tinyint": 3, "smallint": 5, "int": 10, "bigint": 19}
"""Decimal digits that are enough for every value."""


def compute(rows: DataFrame, plan: TablePlan) -> DataFrame:
    """Add computed columns to changelog rows, and remove fields that only those need. What sets a row that the table
    doesn't want becomes a -D, if Python hasn't seen to it (`changelog.wanted`).

    :raises ConfigError: Spark can't compute an expression.
    """
    if plan.is_decoded_whole:
        return rows
    inner = {name: F.col(name) for name in rows.columns if name.startswith(PREFIX)}
    types = {column.name: column.type for column in plan.columns}
    values = {name: F.expr(expression).cast(types[name]) for name, expression in plan.computed}
    # without computed columns rows may be partial, and have a flag for each column, in this order
    order = list(types) if plan.computed else [name for name in rows.columns if name in types]
    columns = {name: values.get(name, F.col(quoted(name))) for name in order}
    where, text = plan.changelog.where, plan.section.where
    try:
        if where is not None and text is not None and where.condition is None:
            rows = rows.select("*", *(values[name].alias(name) for name in where.computed))
            rows = rows.withColumn(_UNWANTED, unwanted(rows, text))
            columns |= {name: F.col(quoted(name)) for name in where.computed}
            for part, names in ((inner, where.lost_records), (columns, where.columns | values.keys())):
                part |= {name: F.when(~F.col(_UNWANTED), part[name]) for name in part if name in names}
            inner[KIND] = F.when(F.col(_UNWANTED), F.lit(int(RowKind.DELETE)).cast("tinyint")).otherwise(F.col(KIND))
            if UNAVAILABLE in inner and where.keeps_records:
                inner[UNAVAILABLE] = F.when(F.col(_UNWANTED), F.lit(b"")).otherwise(F.col(UNAVAILABLE))
        return rows.select(*(value.alias(name) for part in (inner, columns) for name, value in part.items()))
    except PySparkException as error:
        raise ConfigError(f"{plan.section.target}: a computed column can't be computed. {sentence(error)}") from None


def check_computed(spark: SparkSession, plan: TablePlan, path: str) -> None:
    """Check expressions before anything runs.

    :param path: the table's place in the configuration, `tables[0]`.
    :raises ConfigError: an expression doesn't parse, names an unknown column, has another type than its column, returns
        several rows, or isn't deterministic.
    """
    if not plan.computed:
        return
    rows = spark.createDataFrame(
        [], T.StructType([f for f in spark_schema(plan.changelog) if not f.name.startswith(PREFIX)])
    )
    known = ", ".join(rows.columns)
    types = {column.name: column.type for column in plan.columns}
    for name, expression in plan.computed:
        where = f"{path}.columns.{name}.expression"
        try:
            result = rows.select(F.expr(expression).alias(name))
        except PySparkException as error:
            raise ConfigError(f"{where}: {expression!r}: {sentence(error)} It may use: {known}.") from None
        analyzed = result._jdf.queryExecution().analyzed()
        if re.search(r"^\W*(Generate|Aggregate|Window)\b", str(analyzed.toString()), re.MULTILINE):
            raise ConfigError(f"{where}: {expression!r} does not give one value a row. Write a scalar expression.")
        if not analyzed.deterministic():
            raise ConfigError(
                f"{where}: {expression!r} is not the same each time, and a micro-batch may be written again. Leave "
                "such functions out."
            )
        found = result.schema[name].dataType
        if not _holds(types[name], found):
            shown = types[name].simpleString()
            raise ConfigError(
                f"{where}: {expression!r} is {found.simpleString()}, and the column {shown}. Write cast({expression} "
                f"as {shown}), or correct the type."
            )


def _holds(dtype: T.DataType, other: T.DataType) -> bool:
    """Whether `dtype` has all values of `other`."""
    to, of = dtype.simpleString(), other.simpleString()
    if to == of or isinstance(other, T.NullType):
        return True
    if to in _INTEGERS and of in _INTEGERS:
        return _INTEGERS[to] >= _INTEGERS[of]
    if isinstance(dtype, T.DecimalType):
        if of in _INTEGERS:
            other = T.DecimalType(_INTEGERS[of], 0)
        if isinstance(other, T.DecimalType):
            whole = dtype.precision - dtype.scale
            return bool(dtype.scale >= other.scale and whole >= other.precision - other.scale)
    return (to, of) == ("double", "float")
