"""What a source's column is in the table: how a value that was read from the source is brought into the table's type.

A database's module (`sink.databases.postgres`, `sink.databases.mysql`) selects each column by an expression whose
result is the same in all drivers and time zones: a number, a text or bytes. Its `Kind` says what that result means.
This module makes the table's value of it, by the rules of docs/types.md, and with Spark's functions only.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum, auto

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql import types as T

from sink.spark.versions import try_cast

_DAY = 86_400_000_000
Function = Callable[[Column], Column]


class Kind(Enum):
    """What a selected value is."""

    INTEGER = auto()
    UNSIGNED = auto()
    """Of 64 bits, as a text. In a bigint, messages have it as a negative number."""
    DECIMAL = auto()
    """A text with digits."""
    FLOAT = auto()
    """Of single precision."""
    DOUBLE = auto()
    TEXT = auto()
    JSON = auto()
    """A text whose spelling the messages have too."""
    PAIRS = auto()
    """A JSON object of texts, whose blanks the messages may not have."""
    BYTES = auto()
    BOOLEAN = auto()
    DATE = auto()
    """Days since 1970."""
    TIMESTAMP = auto()
    """Microseconds since 1970, of a wall clock."""
    INSTANT = auto()
    """Likewise, in UTC."""
    TIME = auto()
    """Microseconds since midnight, in UTC if the type has a zone."""
    INTERVAL = auto()
    """A text P1Y2M3DT4H5M6.7S, and in a column of a number the microseconds."""
    BITS = auto()
    """A text of 0 and 1, the highest bit first. Messages have all of its bytes (MySQL)."""
    SHORT_BITS = auto()
    """Likewise, but messages lack the highest bytes if these are 0 (Postgres)."""
    ARRAY = auto()
    """A JSON array of texts."""
    SPARK = auto()
    """A value of a table that Spark reads."""


@dataclass(frozen=True)
class Selected:
    """How a column of the source is selected.

    :param sql: the expression.
    :param kind: what its value is.
    :param precision: digits of the seconds, or of a decimal after the point; None if it isn't known.
    :param element: what the elements of an array are.
    :param dtype: its type, if Spark reads it.
    :param key_text: a regular expression for the texts of all its values, if a row can be looked up by them.
    """

    sql: str
    kind: Kind
    precision: int | None = None
    element: "Selected | None" = None
    dtype: T.DataType | None = None
    key_text: str | None = None


@dataclass(frozen=True)
class Conversion:
    """:param dtype: the type in which both sides are compared.
    :param source: selected value -> value. Null if it doesn't fit.
    :param table: the table's value -> value.
    :param may_misfit: whether `source` may make null of something else.
    :param table_may_misfit: whether `table` may.
    :param as_null: texts of selected values, in capitals, that mean null.
    """

    dtype: T.DataType
    source: Function
    table: Function = lambda column: column
    may_misfit: bool = False
    table_may_misfit: bool = False
    as_null: tuple[str, ...] = ()


def conversion(selected: Selected, dtype: T.DataType) -> Conversion | None:
    """How a value becomes one of the table's column. None if this isn't known, and the column can't be compared.

    :param dtype: the column's type in Spark.
    """
    kind = selected.kind
    if kind is Kind.SPARK:
        own = selected.dtype
        if own == dtype:
            return Conversion(dtype, lambda column: column)
        if isinstance(own, T.ArrayType | T.MapType | T.StructType) and isinstance(dtype, T.StringType):
            schema = own.simpleString()
            return _read_again(own, lambda column: column, lambda column: F.from_json(column, schema))
        return Conversion(dtype, _exact_cast(selected.dtype, dtype), may_misfit=True)
    if kind is Kind.ARRAY:
        return _array(selected, dtype)
    if isinstance(dtype, T.StringType):
        return _in_text(selected)
    if kind is Kind.UNSIGNED and isinstance(dtype, T.LongType):
        return Conversion(dtype, _signed)
    if kind in (Kind.INTEGER, Kind.UNSIGNED, Kind.DECIMAL, Kind.TEXT) and isinstance(dtype, T.NumericType):
        return _number(selected, dtype)
    if kind in (Kind.FLOAT, Kind.DOUBLE) and isinstance(dtype, T.FloatType | T.DoubleType):
        # a float is written as the nearest decimal, which is another double
        own = T.FloatType() if kind is Kind.FLOAT else dtype
        if kind is Kind.DOUBLE and isinstance(dtype, T.FloatType):
            return Conversion(dtype, _exact_cast(T.DoubleType(), dtype), may_misfit=True)
        return Conversion(own, lambda column: column.cast(own), lambda column: column.cast(own))
    if kind is Kind.BOOLEAN and isinstance(dtype, T.BooleanType | T.IntegralType):
        return Conversion(dtype, lambda column: column.cast(dtype))
    if kind is Kind.INTEGER and isinstance(dtype, T.BooleanType):
        return Conversion(dtype, lambda column: column.cast("bigint") != 0)
    if kind is Kind.BYTES and isinstance(dtype, T.BinaryType):
        return Conversion(dtype, lambda column: column)
    if kind in (Kind.BITS, Kind.SHORT_BITS) and isinstance(dtype, T.BinaryType):
        return Conversion(dtype, lambda column: F.unhex(_octets(column, short=kind is Kind.SHORT_BITS)))
    if kind in (Kind.DATE, Kind.TIMESTAMP, Kind.INSTANT):
        return _day_or_time(selected, dtype)
    if kind is Kind.TIME and isinstance(dtype, T.IntegralType):
        unit = 1 if isinstance(dtype, T.LongType) else 1000
        return Conversion(dtype, lambda column: _div(column, unit).cast(dtype))
    if kind is Kind.INTERVAL and isinstance(dtype, T.LongType):
        return Conversion(dtype, _microseconds_of_interval)
    if kind in (Kind.JSON, Kind.PAIRS) and isinstance(dtype, T.MapType | T.StructType | T.ArrayType):
        return Conversion(dtype, lambda column: F.from_json(column, dtype.simpleString()), may_misfit=True)
    return None


def _in_text(selected: Selected) -> Conversion | None:
    """In a column of texts. Where messages spell a value in another way than the database, the texts are read again."""
    text, kind = T.StringType(), selected.kind
    if kind is Kind.DECIMAL:
        return Conversion(text, _shortest, _shortest)
    if kind in (Kind.TEXT, Kind.INTEGER, Kind.UNSIGNED, Kind.JSON, Kind.BOOLEAN):
        return Conversion(text, lambda column: column.cast("string"))
    if kind is Kind.BYTES:
        return Conversion(text, F.base64)
    if kind is Kind.INTERVAL:
        return Conversion(text, _interval, _interval)
    read: Function
    if kind is Kind.PAIRS:
        pairs = T.MapType(text, text)

        def parsed(column: Column) -> Column:
            return F.from_json(column, pairs.simpleString())

        return _read_again(pairs, parsed, parsed)
    if kind in (Kind.FLOAT, Kind.DOUBLE):
        own = T.FloatType() if kind is Kind.FLOAT else T.DoubleType()
        return _read_again(own, lambda column: column.cast(own), _cast(own))
    if kind is Kind.TIME:
        return _read_again(T.LongType(), lambda column: column.cast("bigint"), _microseconds_of_day)
    if kind is Kind.DATE:
        read = _cast(T.DateType())
        return _read_again(T.DateType(), _date, lambda column: read(F.regexp_replace(column, "Z$", "")))
    if kind in (Kind.TIMESTAMP, Kind.INSTANT):
        return _read_again(T.TimestampType(), F.timestamp_micros, _cast(T.TimestampType()))
    return None


def _read_again(dtype: T.DataType, source: Function, table: Function) -> Conversion:
    return Conversion(dtype, source, table, table_may_misfit=True)


def _number(selected: Selected, dtype: T.NumericType) -> Conversion:
    """Exact, or it doesn't fit: Spark's cast would round what has more digits after the point."""
    cast = _cast(dtype)
    if isinstance(dtype, T.FractionalType) and not isinstance(dtype, T.DecimalType):
        return Conversion(dtype, lambda column: _floating(column, dtype), may_misfit=True)
    scale = dtype.scale if isinstance(dtype, T.DecimalType) else 0
    if selected.kind in (Kind.INTEGER, Kind.UNSIGNED):
        return Conversion(dtype, cast, may_misfit=True)

    def exact(column: Column) -> Column:
        column = _numeric(column)
        if selected.precision is not None and selected.precision <= scale:
            return cast(column)
        digits = F.length(F.regexp_extract(column.cast("string"), r"\.(\d*?)0*$", 1))
        whole = cast(F.regexp_replace(column.cast("string"), r"\.0*$", ""))
        return F.when(digits <= scale, whole)

    return Conversion(dtype, exact, may_misfit=True, as_null=("NAN",) if selected.kind is Kind.DECIMAL else ())


def _day_or_time(selected: Selected, dtype: T.DataType) -> Conversion | None:
    is_date = selected.kind is Kind.DATE
    if isinstance(dtype, T.DateType):
        if is_date:
            return Conversion(dtype, _date)
        return Conversion(
            dtype, lambda column: F.when(F.pmod(column, F.lit(_DAY)) == 0, _date(_div(column, _DAY))), may_misfit=True
        )
    if isinstance(dtype, T.TimestampType | T.TimestampNTZType):
        # the session's time zone is UTC
        return Conversion(dtype, lambda column: F.timestamp_micros(column * _DAY if is_date else column).cast(dtype))
    if isinstance(dtype, T.IntegralType):
        if is_date:
            return Conversion(dtype, lambda column: column.cast(dtype))
        # Debezium's Timestamp, or MicroTimestamp
        unit = 1000 if selected.precision is not None and selected.precision <= 3 else 1
        return Conversion(dtype, lambda column: _div(column, unit).cast(dtype))
    return None


def _array(selected: Selected, dtype: T.DataType) -> Conversion | None:
    is_text = isinstance(dtype, T.StringType)  # of a JSON array, as the messages spell it
    if selected.element is None or not (is_text or isinstance(dtype, T.ArrayType)):
        return None
    inner = conversion(selected.element, dtype.elementType if isinstance(dtype, T.ArrayType) else dtype)
    if inner is None:
        return None
    texts = T.ArrayType(T.StringType())
    # elements are texts, whatever they are when they are selected alone
    of_text: dict[Kind, Function] = {
        Kind.BYTES: F.unhex,
        **{kind: _cast(T.LongType()) for kind in (Kind.DATE, Kind.TIMESTAMP, Kind.INSTANT, Kind.TIME)},
        Kind.BOOLEAN: _cast(T.BooleanType()),
        Kind.FLOAT: _cast(T.FloatType()),
        Kind.DOUBLE: _cast(T.DoubleType()),
    }
    prepared = of_text.get(selected.element.kind)

    def element(text: Column) -> Column:
        return inner.source(text if prepared is None else prepared(text))

    def parsed(column: Column) -> Column:
        if selected.element is not None and selected.element.kind is Kind.DECIMAL:
            # Spark would read numbers as doubles on their way to texts
            column = F.regexp_replace(column, r"(?<=[\[,\s])(-?\d[\d.eE+-]*)(?=\s*[,\]])", '"$1"')
        return F.from_json(column, texts)

    return replace(
        inner,
        dtype=T.ArrayType(inner.dtype),
        source=lambda column: F.transform(F.from_json(column, texts), element),
        table=lambda column: F.transform(parsed(column) if is_text else column, inner.table),
        may_misfit=False,
        table_may_misfit=is_text,
    )


def _cast(dtype: T.DataType) -> Function:
    """A cast that makes null of what doesn't fit."""
    return lambda column: try_cast(column, dtype)


def _exact_cast(own: T.DataType | None, dtype: T.DataType) -> Function:
    """Likewise, of what would be rounded or cut off."""
    cast = _cast(dtype)
    is_rounded = isinstance(own, T.NumericType | T.TimestampType | T.TimestampNTZType)
    if own is None or not is_rounded or isinstance(dtype, T.StringType):
        return cast
    if isinstance(own, T.DecimalType | T.LongType) and isinstance(dtype, T.FloatType | T.DoubleType):
        return lambda column: _floating(column.cast("string"), dtype)
    back = _cast(own)
    return lambda column: F.when(back(cast(column)) == column, cast(column))


def _floating(text: Column, dtype: T.DataType) -> Column:
    """Of a number with digits. A fraction such as 0.1 fits if it comes back: no floating number is 0.1 itself."""
    text = text.cast("string")
    # so many digits of any number come back (C's FLT_DIG and DBL_DIG)
    digits = 6 if isinstance(dtype, T.FloatType) else 15
    found = try_cast(text, dtype)
    wide = try_cast(text, T.DoubleType())
    is_short = F.length(F.regexp_replace(text, r"^-?0*\.?0*|\.0*$|\.", "")) <= digits
    # within the range of the type: neither infinite nor zero if the number isn't
    is_near = (F.abs(found) != float("inf")) & ((found != 0) | (wide == 0)) | ~text.rlike("[0-9]")
    whole = try_cast(text, T.LongType())
    is_whole = (try_cast(found, T.LongType()) == whole) & (whole != 2**63 - 1)  # to which a cast of 2^63 is brought
    back = try_cast(found.cast("string"), T.DecimalType(38, 18))
    comes_back = (back == try_cast(text, T.DecimalType(38, 18))) & ~text.rlike(r"\.\d{18}\d*[1-9]")
    return F.when(F.coalesce(is_short & is_near, F.lit(False)) | F.coalesce(is_whole, comes_back, F.lit(False)), found)


def _div(column: Column, unit: int) -> Column:
    """Without the doubles of `/`."""
    return F.call_function("div", column.cast("bigint"), F.lit(unit).cast("bigint"))


def _date(column: Column) -> Column:
    return F.date_from_unix_date(column.cast("int"))


def _octets(column: Column, *, short: bool) -> Column:
    """Debezium's Bits in hexadecimal: bytes, the lowest first."""
    count = F.ceil(F.length(column) / 8).cast("int")
    padded = _lpad(column, count * 8)
    octets = F.transform(
        F.sequence(count, F.lit(1), F.lit(-1)),
        lambda n: _lpad(F.conv(F.substr(padded, (n - 1) * 8 + 1, F.lit(8)), 2, 16), F.lit(2)),
    )
    joined = F.when(column.isNotNull(), F.array_join(octets, ""))
    return F.regexp_replace(joined, "(00)+$", "") if short else joined


def _lpad(column: Column, length: Column) -> Column:
    # `F.lpad` of Spark 3.5 has no length that differs from row to row
    return F.call_function("lpad", column, length.cast("int"), F.lit("0"))


def _numeric(column: Column) -> Column:
    """Debezium has null for a NaN of Postgres' numeric, or (`decimal.handling.mode: string`) the text NAN."""
    return F.when(F.upper(column) != "NAN", column)


def _shortest(column: Column) -> Column:
    """Without zeros at the end: Debezium has none in a numeric without a scale."""
    return F.regexp_replace(F.regexp_replace(_numeric(column), r"(\.\d*?)0+$", "$1"), r"\.$", "")


def _signed(column: Column) -> Column:
    wide = column.cast("decimal(20,0)")
    limit, modulus = (F.lit(str(number)).cast("decimal(20,0)") for number in (2**63, 2**64))
    return F.when(wide >= limit, wide - modulus).otherwise(wide).cast("bigint")


def _microseconds_of_day(column: Column) -> Column:
    """Of a text such as 23:59:59.123Z."""
    hours, minutes, seconds = _parts(column, r"^(\d+):(\d+):(\d+(?:\.\d+)?)Z?$", 3)
    return ((hours * 3600 + minutes * 60 + seconds) * 1_000_000).cast("bigint")


_INTERVAL = r"^P(-?\d+)Y(-?\d+)M(-?\d+)DT(-?\d+)H(-?\d+)M(-?[\d.]+)S$"


def _interval(column: Column) -> Column:
    """Without zeros at the end of the seconds."""
    return F.regexp_replace(F.regexp_replace(column, r"(\.\d*?)0+S$", "$1S"), r"\.S$", "S")


def _microseconds_of_interval(column: Column) -> Column:
    """Debezium's MicroDuration, in which a month has 30.4375 days."""
    years, months, days, hours, minutes, seconds = _parts(column, _INTERVAL, 6)
    whole_days = (years * 12 + months) * F.lit(30.4375).cast("decimal(6,4)") + days
    return ((whole_days * 86_400 + hours * 3600 + minutes * 60 + seconds) * 1_000_000).cast("bigint")


def _parts(column: Column, pattern: str, count: int) -> list[Column]:
    """The numbers in a text. Null if it is another text."""
    return [_cast(T.DecimalType(18, 6))(F.regexp_extract(column, pattern, n + 1)) for n in range(count)]
