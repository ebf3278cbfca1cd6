"""Decimals in every encoding: bytes of an unscaled integer, base64 of such bytes, a struct with its own scale, text,
and numbers.
"""

import json
import re
from collections.abc import Callable
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, Inexact, InvalidOperation
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from changelog.changes import WireType
from changelog.values.arrays import Flags, bitmap, merged, only, pieces, present
from changelog.values.encoded import from_base64

_EXACT = Context(prec=100, Emax=MAX_EMAX, Emin=MIN_EMIN, traps=[Inexact, InvalidOperation])
_NUMBER = re.compile(r"[+-]?([0-9]+(?:\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,9})?")
"""Only one part can match each digit: else a long text that isn't a number would take hours."""
_LONGEST = 1_000_000
"""A number may have so many characters. A longer text counts as a misfit, since reading it could take minutes."""


def scale_of(wire: WireType) -> int | None:
    """Digits after the point of Kafka Connect's Decimal. None if the schema lacks the scale, which it must have."""
    return integer_of(wire, "scale")


def integer_of(wire: WireType, parameter: str) -> int | None:
    text = wire.parameters.get(parameter, "")
    return int(text) if re.fullmatch("-?[0-9]{1,9}", text) else None


def number(text: str) -> Decimal | None:
    """The number that a text spells, or None. Blanks around the number are ignored."""
    text = text.strip(" \t\r\n")
    return Decimal(text) if len(text) <= _LONGEST and _NUMBER.fullmatch(text) else None


def exact(value: Decimal | None, precision: int, scale: int) -> Decimal | None:
    """`value` with `scale` digits after the point. None if it needs more digits after the point, or more than
    `precision` digits in all.
    """
    if value is None or not value.is_finite():
        return None
    if not value:
        return Decimal(0)
    if value.adjusted() >= precision - scale or value.adjusted() < -scale:
        return None
    try:
        return value.quantize(Decimal((0, (1,), -scale)), context=_EXACT)
    except (Inexact, InvalidOperation):
        return None


def plain(value: Decimal | None) -> str | None:
    """The number as digits and a point, without an exponent. None for numbers with more than 10,000 zeros."""
    exponent = None if value is None else value.as_tuple().exponent
    return f"{value:f}" if isinstance(exponent, int) and abs(exponent) <= 10_000 else None


def each(values: pa.Array, target: pa.DataType, convert: Callable[[Any], Any]) -> pa.Array:
    """Convert values one by one, for rare spellings."""
    return pa.array([None if value is None else convert(value) for value in values.to_pylist()], target)


def split(
    values: pa.Array, usual: pa.Array, fast: Callable[[pa.Array], pa.Array], slow: Callable[[pa.Array], pa.Array]
) -> pa.Array:
    """Convert the values where `usual` is true by `fast`, and the other values by `slow`."""
    unusual = pc.invert(usual)
    if not pc.any(unusual).as_py():
        return fast(values)
    rest = slow(only(values, unusual))
    return merged([fast(only(values, usual)), rest], rest.type, len(values))


def from_text(values: pa.Array, target: pa.Decimal128Type) -> pa.Array:
    """Texts of numbers as decimals. The texts may have an exponent."""
    if pa.types.is_large_string(values.type):
        values = values.cast(pa.string())
    whole, spare = target.precision - target.scale, 38 - target.precision
    # at most 38 digits: with more digits, Arrow's own cast of text wraps around
    digits = f"[0-9]{{1,{whole}}}" if whole else "0"
    usual = pc.match_substring_regex(values, rf"^-?{digits}(\.[0-9]{{0,{target.scale}}}0{{0,{spare}}})?$")

    def slow(rest: pa.Array) -> pa.Array:
        return each(rest, target, lambda text: exact(number(text), target.precision, target.scale))

    return split(values, usual, lambda some: pc.cast(some, target), slow)


def from_decimals(values: pa.Array, target: pa.Decimal128Type) -> pa.Array:
    """Decimals in another precision and scale."""
    if values.type == target:
        return values
    more = target.scale - values.type.scale
    try:
        if more > 0:
            # Arrow's own cast wraps around if the wider scale needs more than 128 bits. So first cast to a precision
            # that leaves enough room.
            narrow = pa.decimal128 if pa.types.is_decimal128(values.type) else pa.decimal256
            if target.precision <= more:
                raise pa.ArrowInvalid("all digits before the point are too many")
            values = pc.cast(values, narrow(target.precision - more, values.type.scale))
        return pc.cast(values, target)
    except pa.ArrowInvalid:
        return from_text(pc.cast(values, pa.string()), target)


def from_integers(values: pa.Array, target: pa.Decimal128Type) -> pa.Array:
    if target.scale > 18:  # a uint64 has 20 digits, and a decimal128 at most 38
        return from_text(pc.cast(values, pa.string()), target)
    return from_decimals(pc.cast(values, pa.decimal128(20 + target.scale, target.scale)), target)


def unscaled(values: pa.Array, scale: int) -> pa.Array:
    """Big-endian two's complement integers (`java.math.BigInteger.toByteArray`) as decimal128(38, scale). Null if an
    integer has more than 38 digits.

    :param values: binary.
    """
    data, offsets = pieces(values)
    begins, lengths = offsets[:-1], np.diff(offsets)
    fits = present(values) & (lengths > 0) & (lengths <= 16)
    if not fits.all():
        lengths = np.where(fits, lengths, 0)
    number_of = len(values)
    out = np.zeros((number_of, 16), np.uint8)
    longest = int(lengths.max(initial=0))
    if longest:
        last = begins + lengths - 1
        negative = fits & (data[np.minimum(begins, len(data) - 1)] > 127)
        out[negative] = 255
        shortest = int(lengths.min())
        for place in range(longest):  # from the least significant byte
            if place < shortest:
                out[:, place] = data[last - place]
            else:
                rows = np.flatnonzero(lengths > place)
                out[rows, place] = data[last[rows] - place]
        if longest == 16:
            fits = fits & _of_38_digits(out)
    return pa.Array.from_buffers(pa.decimal128(38, scale), number_of, [bitmap(fits), pa.py_buffer(out)])


def _of_38_digits(numbers: Any) -> Flags:
    """Flags the integers of at most 38 digits. `numbers` has 16 bytes for each, the least significant byte first."""
    halves = numbers.view("<u8").reshape(-1, 2)
    low, high = halves[:, 0], halves[:, 1].view("<i8")
    top, rest = divmod(10**38 - 1, 2**64)
    bottom, least = divmod(-(10**38) + 1, 2**64)
    small = (high < top) | (high == top) & (low <= np.uint64(rest))
    result: Flags = small & ((high > bottom) | (high == bottom) & (low >= np.uint64(least)))
    return result


def from_bytes(values: pa.Array, scale: int | None, target: pa.Decimal128Type) -> pa.Array:
    """Kafka Connect's Decimal as decimals.

    :param values: binary, or string with base64.
    """

    def slow(raw: bytes) -> Decimal | None:
        return exact(_shifted(raw, scale), target.precision, target.scale)

    def fast(narrow: pa.Array) -> pa.Array:
        return from_decimals(narrow, target)

    return _from_bytes(values, scale, target, fast, slow, variable)


def bytes_as_text(values: pa.Array, scale: int | None) -> pa.Array:
    """Kafka Connect's Decimal as text, with any number of digits."""

    def slow(raw: bytes) -> str | None:
        return plain(_shifted(raw, scale))

    return _from_bytes(values, scale, pa.string(), as_text, slow, lambda objects, _: variable_as_text(objects))


def _from_bytes(
    values: pa.Array,
    scale: int | None,
    target: pa.DataType,
    fast: Callable[[pa.Array], pa.Array],
    slow: Callable[[bytes], Any],
    of_objects: Callable[[pa.Array, pa.DataType], pa.Array],
) -> pa.Array:
    """Convert integers of up to 38 digits by `fast`, and longer integers by `slow`.

    :param of_objects: converts JSON texts of objects. Such a text is a VariableScaleDecimal in a message without a
        schema.
    """
    is_text = pa.types.is_string(values.type)
    decoded = from_base64(values) if is_text else values.cast(pa.binary())
    if scale is None:
        result = pa.nulls(len(values), target)
    elif 0 <= scale <= 38:
        narrow = unscaled(decoded, scale)
        result = fast(narrow)
        if narrow.null_count > decoded.null_count:
            result = merged([result, each(only(decoded, narrow.is_null()), target, slow)], target, len(values))
    else:
        result = each(decoded, target, slow)
    if is_text and decoded.null_count > values.null_count:
        objects = only(values, pc.starts_with(values, "{"))
        if objects.null_count < len(objects):
            result = merged([result, of_objects(objects, target)], target, len(values))
    return result


def as_text(values: pa.Array) -> pa.Array:
    """Decimals as digits with a point."""
    texts = pc.cast(values, pa.string())
    scientific = pc.match_substring(texts, "E")
    if not pc.any(scientific).as_py():
        return texts
    return merged(
        [only(texts, pc.invert(scientific)), each(only(values, scientific), pa.string(), plain)],
        pa.string(),
        len(texts),
    )


def variable(values: pa.Array, target: pa.Decimal128Type) -> pa.Array:
    """Debezium's VariableScaleDecimal as decimals.

    :param values: a struct of `scale` and `value`, or a string with the JSON text of such a struct.
    """
    return _variable(values, target, lambda part, scale: from_bytes(part, scale, target))


def variable_as_text(values: pa.Array) -> pa.Array:
    return _variable(values, pa.string(), bytes_as_text)


def _variable(values: pa.Array, target: pa.DataType, convert: Callable[[pa.Array, int], pa.Array]) -> pa.Array:
    if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        parsed = _objects(values)
        if parsed.null_count == len(parsed):
            return pa.nulls(len(values), target)
        return _variable(parsed, target, convert)
    if not pa.types.is_struct(values.type) or not {"scale", "value"} <= set(values.type.names):
        return pa.nulls(len(values), target)
    parts = dict(zip(values.type.names, values.flatten(), strict=True))
    scales = parts["scale"]
    if not pa.types.is_integer(scales.type):
        return pa.nulls(len(values), target)
    unscaled_parts = parts["value"]
    if pa.types.is_string(unscaled_parts.type):
        unscaled_parts = from_base64(unscaled_parts)
    if not pa.types.is_binary(unscaled_parts.type):
        return pa.nulls(len(values), target)
    results = []
    for scale in pc.unique(scales.drop_null()).to_pylist():  # few
        same = pc.fill_null(pc.equal(scales, scale), False)
        part = unscaled_parts if pc.all(same).as_py() else only(unscaled_parts, same)
        results.append(convert(part, scale))
    return merged(results, target, len(values))


def _objects(values: pa.Array) -> pa.Array:
    """JSON texts of VariableScaleDecimals as structs. Null where a text isn't one."""

    def parse(text: str) -> dict[str, Any] | None:
        try:
            found = json.loads(text) if text.startswith("{") else None
        except (ValueError, RecursionError):
            return None
        if not isinstance(found, dict):
            return None
        scale, value = found.get("scale"), found.get("value")
        right = type(scale) is int and abs(scale) < 2**31 and isinstance(value, str)
        return {"scale": scale, "value": value} if right else None

    return each(values, pa.struct([("scale", pa.int64()), ("value", pa.string())]), parse)


def _shifted(raw: bytes, scale: int | None) -> Decimal | None:
    if scale is None or not 0 < len(raw) <= 1024:
        return None
    sign, digits, _ = Decimal(int.from_bytes(raw, "big", signed=True)).as_tuple()
    return Decimal((sign, digits, -scale))
