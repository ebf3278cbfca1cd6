"""The columns of a table that doesn't exist yet, from its section of the configuration."""

from collections.abc import Collection, Mapping

from pyspark.sql import types as T
from pyspark.sql.pandas.types import from_arrow_type

from changelog.spec import METADATA
from changelog.values.defaults import without_default
from changelog.values.encoded import MAYBE_BASE64
from sink.config import TableSection
from sink.config.table_parts import OrderColumn
from sink.errors import ConfigError
from sink.spark.java_errors import SPARK_ERRORS
from sink.spark.versions import parse_ddl
from sink.table.inference import NOT_NULL


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
        observed = text if table.columns is not None else text.removesuffix(NOT_NULL)
        dtype = parse_type(column_type(observed), f"{path}.columns.{name}")
        fields.append(T.StructField(name, dtype, nullable=name not in table.key and observed == text))
    fields += [T.StructField(name, from_arrow_type(METADATA[name]), name not in table.key) for name in table.metadata]
    fields += added_order_fields(table, [field.name for field in fields], path)
    for mark in mark_fields(table):
        if mark.name in types:
            raise ConfigError(
                f"{path}.soft_delete: got {mark.name!r}, which is a field of the messages too, and the sink sets this "
                "column. Name another one, or name the field in exclude."
            )
        fields.append(mark)
    fields += version_fields(table, fields, path)
    advice = "" if table.columns is not None else " (columns: say the types of all columns)"
    found = {field.name: field.dataType for field in fields}
    for name in table.key:
        if name not in {*types, *table.metadata}:
            raise ConfigError(f"{path}.key: there is no column {name!r}. The columns are: {', '.join(types)}.")
        dtype = found[name]
        if isinstance(dtype, T.FloatType | T.DoubleType):
            raise ConfigError(
                f"{path}.key: {name} is a {types[name]}; a key can't be floating-point. Use decimal or string{advice}."
            )
        if not isinstance(dtype, T.AtomicType):
            raise ConfigError(f"{path}.key: {name} is a {types[name]}; a key can't have parts. Use string{advice}.")
    return T.StructType(fields)


def mark_fields(table: TableSection) -> list[T.StructField]:
    """The columns by which a row says that it is deleted."""
    types = (T.BooleanType(), T.TimestampType())
    return [T.StructField(name, dtype) for name, dtype in zip(table.marks, types, strict=False)]


def added_order_fields(table: TableSection, columns: Collection[str], path: str) -> list[T.StructField]:
    """The columns that only hold order values, which late changes are told by.

    :param columns: the table's other columns.
    :raises ConfigError: a type is invalid.
    """
    added = table.added_order_columns(columns)
    fields = []
    for number, order in enumerate(table.order_columns):
        if order.name in added:
            dtype = order_type(order, field_type(table, order.name, path), f"{path}.order_by[{number}]")
            fields.append(T.StructField(added[order.name], dtype))
    return fields


def version_fields(table: TableSection, fields: Collection[T.StructField], path: str) -> list[T.StructField]:
    """The columns of versions, if the table has history.

    :param fields: the table's other columns.
    :raises ConfigError: one of these has such a name, or the first order value is no time or number.
    """
    if table.history is None:
        return []
    known = {field.name.lower(): field.name for field in fields}
    for name in table.history.columns:
        if name.lower() in known:
            raise ConfigError(
                f"{path}.history: got {name}, and the rows have a column {known[name.lower()]}. Name another column "
                "(from, to, current)."
            )
    order = table.order_columns[0]
    column = next((field.dataType for field in fields if field.name == order.name), None)
    dtype = order_type(order, column or field_type(table, order.name, path), f"{path}.order_by[0]")
    check_version_time(order, dtype, path)
    start, end, current = table.history.columns
    return [T.StructField(start, dtype), T.StructField(end, dtype), T.StructField(current, T.BooleanType())]


def check_version_time(order: OrderColumn, dtype: T.DataType, path: str) -> None:
    """:raises ConfigError: versions can't hold from one such order value to the next."""
    if order.descending or not isinstance(dtype, T.IntegralType | T.DateType | T.TimestampType | T.TimestampNTZType):
        raise ConfigError(
            f"{path}.order_by[0]: got {order.name}{' desc' * order.descending} of type {dtype.simpleString()}, and "
            "with history a version holds from its first order value on; expected a timestamp, a date or a whole "
            "number, ascending. Write such a field first, or leave order_by out: then it is _ts, the time of the "
            "change at the source."
        )


def field_type(table: TableSection, name: str, path: str) -> T.DataType | None:
    """The type of a field that isn't stored, as the configuration has it. None if it has none."""
    for column, origin in (table.columns or {}).items():
        if not origin.stored and name == (origin.source or column):
            return parse_type(origin.type, f"{path}.columns.{column}")
    return None


def held_order(table: TableSection, fields: Collection[T.StructField]) -> dict[str, str]:
    """What the columns hold that only hold order values: their names, and the fields of messages.

    :param fields: `added_order_fields`.
    """
    holds = {column: name for name, column in table.added_order_columns([field.name for field in fields]).items()}
    return {field.name: holds[field.name] for field in fields}


def order_type(order: OrderColumn, column: T.DataType | None, path: str) -> T.DataType:
    """The type of an order value: as it is configured, or that of the table's column, or a 64-bit integer.

    :raises ConfigError: the type is invalid, or has no order.
    """
    if order.type is not None:
        dtype = parse_type(order.type, path)
    elif column is None and order.name in METADATA:
        dtype = from_arrow_type(METADATA[order.name])
    else:
        dtype = column or T.LongType()
    check_ordered(order.name, dtype, path)
    return dtype


def check_ordered(name: str, dtype: T.DataType, path: str) -> None:
    """:raises ConfigError: values of the column's type can't be compared."""
    if not isinstance(dtype, T.AtomicType) or dtype.typeName() == "variant":
        raise ConfigError(
            f"{path}: got {name} of type {dtype.simpleString()}, which has no order; expected a number, a string, a "
            "date or a timestamp. Name another column."
        )


def column_type(observed: str) -> str:
    """The Spark SQL type of the column for an observed type (`changelog.observed_types.Observed`)."""
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
