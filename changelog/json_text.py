"""JSON fields to exact typed columns.

Messages are parsed once into Spark's VARIANT, which keeps numbers of up to 38 digits exactly (`from_json` would send them
through a double) and tells a missing field from a null one. Each field is then taken as text and converted strictly: a value
that the type can't hold exactly becomes null here and a bad record in `column_errors`; nothing is rounded or truncated.
"""

from dataclasses import dataclass

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql import types as T

from changelog.row_kind_columns import Select, any_of, error, extend, quoted, sets_row
from changelog.rows import KIND, PREFIX, BadRecord
from changelog.spec import ColumnSpec

IMAGE = f"{PREFIX}image"
"""The VARIANT object with the row's fields."""

_TEXT = f"{PREFIX}text_"
_MAX_SHOWN = 80
_NESTED = (T.ArrayType, T.MapType, T.StructType)


@dataclass(frozen=True)
class Encoding:
    """How a format spells values that JSON has no type for.

    :param epoch: dates are days and timestamps are integers since 1970-01-01; otherwise only ISO 8601 text is accepted.
    :param epoch_unit: unit of an integer timestamp that has no semantic type: `micros` or `millis`.
    :param base64_decimals: decimals without a semantic type are base64 of the unscaled big-endian integer.
    :param semantic: map<string,string> column with the semantic (Kafka Connect schema) name of each field, if the format has one.
    """

    epoch: bool = False
    epoch_unit: str = "micros"
    base64_decimals: bool = False
    semantic: str | None = None


def field(variant: Column | str, name: str, dtype: str = "string") -> Column:
    """Field `name` of an object; null if it is missing, null, or not convertible."""
    return F.try_variant_get(F.col(variant) if isinstance(variant, str) else variant, path(name), dtype)


def path(*names: str) -> str:
    """A VARIANT path to a field, whatever characters its name has (but for a single quote)."""
    return "$" + "".join(f"['{name}']" for name in names)


def text_columns(columns: tuple[ColumnSpec, ...]) -> list[Column]:
    """Each column's field of the image as text, named so that it can't clash with the typed column."""
    return [field(IMAGE, column.name).alias(_TEXT + column.name) for column in columns]


def typed_columns(columns: tuple[ColumnSpec, ...], encoding: Encoding) -> list[Select]:
    """Steps that convert each column from its text (`text_columns`); null where the text doesn't fit the type.

    Several projections, so that no expression stands in another more than once: Spark would generate its code each time.
    """
    decimals = {c.name: c.type.scale for c in columns if isinstance(c.type, T.DecimalType)}
    encoded = bool(decimals) and (encoding.base64_decimals or encoding.semantic is not None)
    plain = _plain_decimals(decimals, encoding) if encoded else []
    return [*plain, extend(*(_typed(column, encoding).alias(column.name) for column in columns))]


def column_errors(
    columns: tuple[ColumnSpec, ...], key: tuple[str, ...], kept: frozenset[str], placeholders: tuple[str, ...]
) -> list[Column]:
    """One error expression a column: missing, a placeholder for an unavailable value, or a value that doesn't fit.

    :param kept: columns that matter in -U and -D rows as well.
    :param placeholders: texts that stand for "the source didn't send this value".
    """
    sets = sets_row(F.col(KIND))
    errors = []
    for column in columns:
        name = column.name
        text = F.col(quoted(_TEXT + name))
        absent = text.isNull() & F.try_variant_get(F.col(IMAGE), path(name), "variant").isNull()
        if name in key:
            # whatever the kind, and before the null check, which would say less
            errors.append(F.when(absent, error(BadRecord.NULL_KEY, f"key column {name} is missing")))
        else:
            errors.append(F.when(sets & absent, error(BadRecord.MISSING_COLUMN, f"column {name} is missing")))
        applies = F.lit(True) if name in kept else sets
        if placeholders:
            errors.append(
                F.when(
                    applies & text.isin(*placeholders),
                    error(BadRecord.UNAVAILABLE_VALUE, f"column {name}: the source didn't send the unchanged value"),
                )
            )
        shown = F.when(F.length(text) > _MAX_SHOWN, F.concat(F.substring(text, 1, _MAX_SHOWN), F.lit("…"))).otherwise(
            text
        )
        errors.append(
            F.when(
                applies & text.isNotNull() & F.col(quoted(name)).isNull(),
                error(
                    BadRecord.TYPE_MISMATCH, f"column {name}: '", shown, f"' does not fit {column.type.simpleString()}"
                ),
            )
        )
    return errors


def _typed(column: ColumnSpec, encoding: Encoding) -> Column:
    text = F.col(quoted(_TEXT + column.name))
    dtype = column.type
    if column.is_uuid:
        return F.when(
            F.length(text) == 36, F.expr(f"try_to_binary(replace({quoted(_TEXT + column.name)}, '-', ''), 'hex')")
        )
    if isinstance(dtype, T.DecimalType) and (encoding.base64_decimals or encoding.semantic):
        return _decimal(F.col(quoted(f"{PREFIX}plain_{column.name}")), dtype)
    if isinstance(dtype, _NESTED):
        return _nested(F.col(IMAGE), path(column.name), dtype, encoding)
    return _from_text(text, dtype, encoding, F.col(encoding.semantic)[column.name] if encoding.semantic else None)


def _from_text(text: Column, dtype: T.DataType, encoding: Encoding, semantic: Column | None) -> Column:
    """The text's value, or null if the type can't hold it exactly."""
    if isinstance(dtype, T.StringType):
        return text
    if isinstance(dtype, T.DecimalType):
        return _decimal(text, dtype)
    if isinstance(dtype, T.DateType):
        iso = F.when(text.rlike(r"^[+-]?[0-9]{4,6}-[0-9]{2}-[0-9]{2}$"), text.try_cast("date"))
        days = text.try_cast("int")
        return F.coalesce(F.date_from_unix_date(days), iso) if encoding.epoch else iso
    if isinstance(dtype, T.TimestampType | T.TimestampNTZType):
        return _timestamp(text, dtype, encoding, semantic)
    if isinstance(dtype, T.BinaryType):
        return F.try_to_binary(text, F.lit("base64"))
    if isinstance(dtype, T.FloatType | T.DoubleType):
        value = text.try_cast(dtype)
        overflow = F.abs(value) == float("inf")
        return F.when(~overflow | text.rlike("(?i)inf"), value)
    return text.try_cast(dtype)


def _nested(variant: Column, place: str, dtype: T.DataType, encoding: Encoding) -> Column:
    """The array, map or struct at `place`, or null if any part of it doesn't fit: read as texts, since a VARIANT's own
    conversion rounds parts, and makes null of those that it can't convert."""

    def part(text: Column, part_type: T.DataType) -> Column:
        if isinstance(part_type, _NESTED):
            return _nested(F.try_parse_json(text), "$", part_type, encoding)
        if isinstance(part_type, T.DecimalType) and encoding.base64_decimals:
            # base64 of an integer, which may look like digits; only decimals that are whole columns are decoded
            return F.lit(None).cast(part_type)
        return _from_text(text, part_type, encoding, None)

    def present(values: Column) -> Column:
        return F.size(F.filter(values, lambda value: value.isNotNull()))

    if isinstance(dtype, T.ArrayType):
        texts = F.try_variant_get(variant, place, "array<string>")
        typed = F.transform(texts, lambda text: part(text, dtype.elementType))
        return F.when(present(typed) == present(texts), typed)
    if isinstance(dtype, T.MapType):
        texts = F.try_variant_get(variant, place, "map<string,string>")
        typed = F.transform_values(texts, lambda _, text: part(text, dtype.valueType))
        return F.when(present(F.map_values(typed)) == present(F.map_values(texts)), typed)
    assert isinstance(dtype, T.StructType)
    as_texts = T.StructType([T.StructField(f.name, T.StringType()) for f in dtype.fields])
    texts = F.try_variant_get(variant, place, as_texts.simpleString())
    parts = {f.name: part(texts[f.name], f.dataType) for f in dtype.fields}
    misfits = any_of([texts[name].isNotNull() & value.isNull() for name, value in parts.items()])
    return F.when(texts.isNotNull() & ~misfits, F.struct(*(value.alias(name) for name, value in parts.items())))


def _timestamp(text: Column, dtype: T.DataType, encoding: Encoding, semantic: Column | None) -> Column:
    zoned = text.rlike(r"[0-9]:[0-9]{2}.*[A-Za-z+-]")  # Z, +05, +05:30, Europe/Paris: anything after the time
    finer_than_micros = text.rlike(r"\.[0-9]{6}[0-9]*[1-9]")
    iso = F.when(~finer_than_micros & text.rlike("^[+-]?[0-9]{4,6}-[0-9]{2}-[0-9]{2}"), text.try_cast(dtype))
    if isinstance(dtype, T.TimestampNTZType):
        iso = F.when(~zoned, iso)  # a cast would drop the zone
    if not encoding.epoch:
        return iso
    number = text.try_cast("bigint")
    fits_millis = F.abs(number) <= (2**63 - 1) // 1000
    millis = F.when(fits_millis, F.timestamp_millis(number))
    micros = F.timestamp_micros(number)
    # integer division: `/` goes through a double, which has no 19 digits
    nanos = F.when(number % 1000 == 0, F.timestamp_micros(F.call_function("div", number, F.lit(1000))))
    value = micros if encoding.epoch_unit == "micros" else millis
    if semantic is not None:
        value = (
            F.when(semantic.isin("io.debezium.time.Timestamp", "org.apache.kafka.connect.data.Timestamp"), millis)
            .when(semantic == "io.debezium.time.MicroTimestamp", micros)
            .when(semantic == "io.debezium.time.NanoTimestamp", nanos)
            .otherwise(value)
        )
    # the session's zone is UTC, so the cast to a zoneless timestamp keeps the wall clock that the source meant
    return F.when(number.isNotNull(), value.cast(dtype)).otherwise(iso)


def _plain_decimals(decimals: dict[str, int], encoding: Encoding) -> list[Select]:
    """Replace the text of encoded decimals by plain digits with a point.

    Kafka Connect's Decimal is base64 of a big-endian two's complement integer, its scale that of the column;
    Debezium's VariableScaleDecimal is an object of `scale` and such a `value`.

    :param decimals: column name -> scale.
    """

    def column(stage: str, name: str) -> Column:
        return F.col(quoted(f"{PREFIX}{stage}_{name}"))

    def is_encoded(name: str) -> Column:
        encoded = F.lit(encoding.base64_decimals)
        if encoding.semantic:
            semantic = F.col(encoding.semantic)[name]
            encoded = F.coalesce(semantic == "org.apache.kafka.connect.data.Decimal", encoded)
        return encoded

    def bytes_of(name: str) -> Column:
        text = F.col(quoted(_TEXT + name))
        inner = F.try_variant_get(F.col(IMAGE), path(name, "value"), "string")
        return F.try_to_binary(F.when(text.startswith("{"), inner).when(is_encoded(name), text), F.lit("base64"))

    def scale_of(name: str) -> Column:
        text = F.col(quoted(_TEXT + name))
        inner = F.try_variant_get(F.col(IMAGE), path(name, "scale"), "int")
        return F.when(text.startswith("{"), inner).otherwise(F.lit(decimals[name]))

    def sign_extended(name: str) -> Column:
        digits = F.hex(column("binary", name))
        fill = F.when(digits >= "8", F.lit("F")).otherwise(F.lit("0"))
        return F.when(F.length(digits).between(2, 32), F.concat(F.repeat(fill, F.lit(32) - F.length(digits)), digits))

    def integer(name: str) -> Column:
        base = F.lit(str(2**64)).cast("decimal(20,0)")
        high = F.conv(F.substring(column("hex", name), 1, 16), 16, -10).cast("decimal(20,0)")
        low = F.conv(F.substring(column("hex", name), 17, 16), 16, 10).cast("decimal(20,0)")
        # towards zero, or the product alone could have a 39th digit
        borrow = F.when(high < 0, F.lit(1)).otherwise(F.lit(0)).cast("decimal(1,0)")
        wide = F.try_add(F.try_multiply(high + borrow, base), low - borrow * base).cast("string")
        narrow = F.conv(F.substring(column("hex", name), 17, 16), 16, -10)
        return F.when(F.length(column("binary", name)) <= 8, narrow).otherwise(wide)

    def padded(name: str) -> Column:
        digits = F.ltrim(column("integer", name), F.lit("-"))
        return F.concat(F.repeat(F.lit("0"), column("scale", name) + 1 - F.length(digits)), digits)

    def plain(name: str) -> Column:
        sign = F.when(column("integer", name).startswith("-"), F.lit("-")).otherwise(F.lit(""))
        digits, scale = column("digits", name), column("scale", name)
        point = F.length(digits) - scale
        fraction = F.concat(F.lit("."), F.substring(digits, point + 1, scale))
        moved = F.when(scale > 0, F.concat(sign, F.substring(digits, F.lit(1), point), fraction)).otherwise(
            F.concat(sign, digits, F.repeat(F.lit("0"), -scale))
        )
        text = F.col(quoted(_TEXT + name))
        return F.when(text.startswith("{") | is_encoded(name), moved).otherwise(text)

    stages = {
        "binary": bytes_of,
        "hex": sign_extended,
        "integer": integer,
        "scale": scale_of,
        "digits": padded,
        "plain": plain,
    }
    return [
        extend(*(value(name).alias(f"{PREFIX}{stage}_{name}") for name in decimals)) for stage, value in stages.items()
    ]


def _decimal(text: Column, dtype: T.DecimalType) -> Column:
    """Exactly, or null: a cast alone would round digits past the scale away."""
    value = text.try_cast(dtype)
    point = F.locate(".", text)
    digits_after_point = F.length(text) - point
    fits = (
        (point == 0)
        | (digits_after_point <= dtype.scale)
        | (F.length(F.rtrim(text, F.lit("0"))) - point <= dtype.scale)
    )
    exponent = text.rlike("[eE]")
    return F.when(exponent, F.when(value.cast("double") == text.try_cast("double"), value)).otherwise(
        F.when(fits, value)
    )
