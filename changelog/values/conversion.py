"""Chooses the rule that converts a value: first by the target type, then by what the message says about the value."""

import pyarrow as pa
import pyarrow.compute as pc

from changelog.changes import Wire, WireType
from changelog.values import decimals, encoded, logical, nested, numerals, readings, times
from changelog.values.arrays import merged, only, present


def convert(wire: Wire, target: pa.DataType, is_uuid: bool = False) -> tuple[pa.Array, pa.Array | None]:
    """Convert `wire`'s values to the type `target`. No value is rounded, truncated or wrapped around.

    :param target: the Arrow type of a Spark column: bool, int8 to int64, float, double, decimal128, string, binary,
        date32, timestamp[us, UTC], timestamp[us], or a list, map or struct of these.
    :param is_uuid: the column is a UUID, and `target` is binary.
    :return: the converted values, and a mask of the values that don't fit (they are null in the result). The mask is
        None if all values fit.
    """
    # Arrow has times that no table has
    is_checked = is_uuid or wire.type.name or nested.is_nested(target) or pa.types.is_temporal(target)
    if wire.values.type == target and not is_checked:
        return wire.values, None
    result = _converted(wire.values, wire.type, target, is_uuid)
    if result.null_count == wire.values.null_count:
        return result, None
    return result, pa.array(present(wire.values) & ~present(result))


def _converted(values: pa.Array, wire: WireType, target: pa.DataType, is_uuid: bool = False) -> pa.Array:
    dtype = values.type
    if values.null_count == len(values):
        return pa.nulls(len(values), target)
    if pa.types.is_dictionary(dtype):
        return _converted(values.dictionary_decode(), wire, target, is_uuid)
    if is_uuid:
        in_base64 = wire.kind == "bytes" and pa.types.is_string(dtype)
        return encoded.uuid(encoded.from_base64(values) if in_base64 else values)
    zoned = False
    if pa.types.is_date(dtype) or pa.types.is_time(dtype) or pa.types.is_timestamp(dtype):
        zoned = pa.types.is_timestamp(dtype) and dtype.tz is not None and wire.name not in logical.TIMESTAMPS
        values, wire = times.integers(values, wire)
    if nested.is_nested(target):
        return _nested(values, wire, target)
    if pa.types.is_string(target):
        return _text(values, wire, zoned)
    if pa.types.is_binary(target):
        return _bytes(values, wire)
    if pa.types.is_timestamp(target):
        if zoned and target.tz is None:
            return pa.nulls(len(values), target)
        return times.to_timestamps(values, wire, target)
    if pa.types.is_date32(target):
        return times.to_dates(values, wire)
    if pa.types.is_decimal(target):
        return _decimals(values, wire, target)
    if _is_encoded_decimal(values, wire):
        values = _decimal_text(values, wire)
    if pa.types.is_integer(target):
        if wire.name in logical.FINER_THAN_MILLIS and target.bit_width < 64:
            return pa.nulls(len(values), target)
        return numerals.to_integers(values, target)
    if pa.types.is_floating(target):
        is_exact = wire.kind.startswith("int") or wire.name in (logical.DECIMAL, logical.VARIABLE_SCALE_DECIMAL)
        return numerals.to_floats(values, target, "exact" if is_exact else wire.kind)
    if pa.types.is_boolean(target):
        return numerals.to_booleans(values)
    raise TypeError(f"no rule makes {target} of anything")


def _nested(values: pa.Array, wire: WireType, target: pa.DataType) -> pa.Array:
    if wire.name == logical.ENUM_SET and nested.is_list(target) and pa.types.is_string(values.type):
        return _names(values, target)
    if pa.types.is_string(values.type):
        return nested.from_json(values, wire, target, _converted)
    return nested.from_arrow(values, wire, target, _converted)


def _names(values: pa.Array, target: pa.DataType) -> pa.Array:
    """Lists of names from texts: names with commas between them, or a JSON array of names."""
    arrays = pc.starts_with(values, "[")
    names = pc.split_pattern(only(values, pc.and_not(pc.not_equal(values, ""), arrays)), ",")
    none = only(pa.array([[]] * len(values), names.type), pc.equal(values, ""))
    split = _converted(merged([names, none], names.type, len(values)), WireType(), target)
    return merged([split, _converted(only(values, arrays), WireType(), target)], target, len(values))


def _bytes(values: pa.Array, wire: WireType) -> pa.Array:
    dtype = values.type
    if pa.types.is_struct(dtype):
        return encoded.geometry(values)
    if _is_bytes(dtype):
        return values if pa.types.is_binary(dtype) else values.cast(pa.binary())
    if not pa.types.is_string(dtype):
        return pa.nulls(len(values), pa.binary())
    if wire.name == readings.HEX:
        return encoded.from_hex(values)
    if wire.name == readings.BASE64_URL:
        values = pc.replace_substring(pc.replace_substring(values, "-", "+"), "_", "/")
    result = encoded.from_base64(values)
    if wire.doubtful:
        result = only(result, pc.invert(readings.are_hex(values)))
    if result.null_count > values.null_count and (not wire.name or wire.name in logical.GEOMETRIES):
        return merged([result, encoded.geometry(only(values, result.is_null()))], pa.binary(), len(values))
    return result


def _is_encoded_decimal(values: pa.Array, wire: WireType) -> bool:
    """Whether the values are decimals that are encoded as bytes, base64 text or a struct, not as a number or its
    text.
    """
    dtype = values.type
    if wire.name not in (logical.DECIMAL, logical.VARIABLE_SCALE_DECIMAL):
        return False
    return bool(pa.types.is_string(dtype) or _is_bytes(dtype) or pa.types.is_struct(dtype))


def _is_bytes(dtype: pa.DataType) -> bool:
    return bool(pa.types.is_binary(dtype) or pa.types.is_large_binary(dtype) or pa.types.is_fixed_size_binary(dtype))


def _decimals(values: pa.Array, wire: WireType, target: pa.Decimal128Type) -> pa.Array:
    dtype = values.type
    if _is_encoded_decimal(values, wire):
        if wire.name == logical.VARIABLE_SCALE_DECIMAL or pa.types.is_struct(dtype):
            return decimals.variable(values, target)
        result = decimals.from_bytes(values, decimals.scale_of(wire), target)
        return readings.without_numbers(values, result) if wire.doubtful else result
    if numerals.is_text(dtype):
        return decimals.from_text(values, target)
    if pa.types.is_decimal(dtype):
        return decimals.from_decimals(values, target)
    if pa.types.is_integer(dtype):
        return decimals.from_integers(values, target)
    if pa.types.is_floating(dtype):
        # a float means the shortest decimal number that is read as this float
        return decimals.from_text(numerals.float_text(values), target)
    return pa.nulls(len(values), target)


def _decimal_text(values: pa.Array, wire: WireType) -> pa.Array:
    if wire.name == logical.VARIABLE_SCALE_DECIMAL or pa.types.is_struct(values.type):
        return decimals.variable_as_text(values)
    return decimals.bytes_as_text(values, decimals.scale_of(wire))


def _text(values: pa.Array, wire: WireType, zoned: bool) -> pa.Array:
    """Values as text. Text stays as it is; other values get a spelling that can be read again."""
    dtype = values.type
    if _is_encoded_decimal(values, wire):
        return _decimal_text(values, wire)
    if pa.types.is_string(dtype):
        return values
    if pa.types.is_large_string(dtype) or pa.types.is_boolean(dtype):
        return pc.cast(values, pa.string())
    if pa.types.is_integer(dtype):
        moments = times.to_text(values, wire)
        if moments is None:
            return pc.cast(values, pa.string())
        return pc.binary_join_element_wise(moments, "Z", "") if zoned else moments
    if pa.types.is_floating(dtype):
        return numerals.float_text(values)
    if pa.types.is_decimal(dtype):
        return decimals.as_text(values)
    if _is_bytes(dtype):
        return encoded.to_base64(values)
    if nested.is_nested(dtype):
        return pa.array([None if v is None else nested.json_text(v, dtype) for v in values.to_pylist()], pa.string())
    return pa.nulls(len(values), pa.string())
