"""The columns of a table that doesn't exist yet, from its section of the configuration."""

from collections.abc import Mapping

from pyspark.sql import types as T
from pyspark.sql.pandas.types import from_arrow_type

from changelog.decoding import METADATA
from changelog.values.defaults import without_default
from changelog.values.encoded import MAYBE_BASE64
from sink.config import TableSection
from sink.errors import ConfigError
from sink.spark.java_errors import SPARK_ERRORS
from sink.spark.versions import parse_ddl


def wanted_columns(table: TableSection, path: str, types: Mapping[str, str] | None = None) -> T.StructType | None:
    """The stored `columns` and metadata columns as a Spark schema. Key columns can't be null. None if the configuration
    names no columns and `types` has none.

    :param types: types of the columns, as in `Observed`, used if the configuration names no columns.
    :raises ConfigError: a type is invalid, or a key can't have it.
    """
    if table.columns is not None:
        types = {name: column.type for name, column in table.columns.items() if column.stored}
    if types is None:
        return None
    fields = []
    for name, text in types.items():
        dtype = parse_type(column_type(text), f"{path}.columns.{name}")
        fields.append(T.StructField(name, dtype, nullable=name not in table.key))
    fields += [T.StructField(name, from_arrow_type(METADATA[name])) for name in table.metadata]
    advice = "" if table.columns is not None else " (columns: say the types of all columns)"
    for name in table.key:
        if name not in types:
            raise ConfigError(f"{path}.key: there is no column {name!r}. The columns are: {', '.join(types)}.")
        dtype = T.StructType(fields)[name].dataType
        if isinstance(dtype, T.FloatType | T.DoubleType):
            raise ConfigError(
                f"{path}.key: {name} is a {types[name]}; a key can't be floating-point. Use decimal or string{advice}."
            )
        if not isinstance(dtype, T.AtomicType):
            raise ConfigError(f"{path}.key: {name} is a {types[name]}; a key can't have parts. Use string{advice}.")
    return T.StructType(fields)


def column_type(observed: str) -> str:
    """The Spark SQL type of the column for an observed type (`changelog.decoding.Observed`)."""
    return "string" if observed == MAYBE_BASE64 else without_default(observed)


def parse_type(text: str, path: str) -> T.DataType:
    """Parse a Spark SQL type such as `decimal(12,2)`.

    :raises ConfigError: the text isn't such a type.
    """
    try:
        return parse_ddl(text)
    except (*SPARK_ERRORS, ValueError):
        raise ConfigError(
            f"{path}: got {text!r}, expected a Spark SQL type such as bigint, string, decimal(12,2) or timestamp"
        ) from None
