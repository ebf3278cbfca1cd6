"""Converts numbers of any wire type to integers, floats and booleans, and floats to text."""

from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from changelog.values.arrays import merged, only
from changelog.values.decimals import as_text, each, exact, number, split

_FALSE_OR_TRUE = {False: ["f", "false", "n", "no", "0"], True: ["t", "true", "y", "yes", "1"]}
"""The words that Spark's cast of text to boolean knows."""

_WORDS = {"nan": "nan", "inf": "inf", "infinity": "inf"}


def is_text(dtype: pa.DataType) -> bool:
    return bool(pa.types.is_string(dtype) or pa.types.is_large_string(dtype))


def to_integers(values: pa.Array, target: pa.DataType) -> pa.Array:
    """Numbers as integers of the target's width. Null where a number has a fraction or is too large."""
    if pa.types.is_integer(values.type):
        return _narrowed(values, target)
    if is_text(values.type):
        if pc.all(pc.match_substring_regex(values, "^-?[0-9]{1,19}$")).as_py():
            try:
                return _narrowed(pc.cast(values, pa.int64()), target)
            except pa.ArrowInvalid:
                pass  # only some integers of 19 digits fit
        usual = pc.match_substring_regex(values, "^-?[0-9]{1,18}$")

        def slow(rest: pa.Array) -> pa.Array:
            def parse(text: str) -> int | None:
                found = exact(number(text), 19, 0)
                return None if found is None or not -(2**63) <= found < 2**63 else int(found)

            return each(rest, pa.int64(), parse)

        return _narrowed(split(values, usual, lambda some: pc.cast(some, pa.int64()), slow), target)
    if pa.types.is_floating(values.type):
        wide = values.cast(pa.float64())
        # 2.0**63 is the smallest double above all int64 values
        whole = pc.and_(
            pc.equal(pc.floor(wide), wide), pc.and_(pc.greater_equal(wide, -(2.0**63)), pc.less(wide, 2.0**63))
        )
        return _narrowed(pc.cast(only(wide, whole), pa.int64()), target)
    if pa.types.is_decimal(values.type):
        return to_integers(as_text(values), target)
    return pa.nulls(len(values), target)


def _narrowed(values: pa.Array, target: pa.DataType) -> pa.Array:
    if values.type == target:
        return values
    try:
        return pc.cast(values, target)
    except pa.ArrowInvalid:
        limit = 2 ** (target.bit_width - 1)
        if pa.types.is_unsigned_integer(values.type):
            return pc.cast(only(values, pc.less_equal(values, pa.scalar(limit - 1, values.type))), target)
        fits = pc.and_(pc.greater_equal(values, -limit), pc.less_equal(values, limit - 1))
        return pc.cast(only(values, fits), target)


def to_floats(values: pa.Array, target: pa.DataType, kind: str) -> pa.Array:
    """Numbers as float or double.

    A text or a JSON number becomes the nearest float, since sources spell their floats in this way. A declared double,
    or a value that isn't a float at the source, must be exact.

    :param kind: kind of the wire type, or `exact` if the value isn't a float at the source.
    """
    if values.type == target:
        return values
    if pa.types.is_floating(values.type):
        if pa.types.is_float64(target):
            return values.cast(target)
        narrow = values.cast(target)
        infinite = pc.is_inf(narrow)
        if kind == "double":
            same = pc.or_(pc.equal(narrow.cast(values.type), values), pc.is_nan(values))
        else:
            same = pc.or_(pc.invert(infinite), pc.is_inf(values))
        return narrow if pc.all(same).as_py() is not False else only(narrow, same)
    if is_text(values.type):
        if kind == "exact":
            return each(values, target, lambda text: _exact_float(number(text), target))
        return to_floats(_doubles(values), target, kind)
    if pa.types.is_integer(values.type):
        if kind == "exact":
            return _exact_floats(values, target)
        return to_floats(pc.cast(values, pa.float64(), safe=False), target, kind)
    if pa.types.is_decimal(values.type):
        return each(values, target, lambda value: _exact_float(value, target))
    return pa.nulls(len(values), target)


def _exact_float(value: Decimal | int | None, target: pa.DataType) -> float | None:
    if value is None:
        return None
    found = float(str(value))
    if pa.types.is_float32(target):
        with np.errstate(over="ignore"):
            found = float(np.float32(found))
    return found if found == value else None  # Python compares decimals with floats exactly


def _doubles(texts: pa.Array) -> pa.Array:
    usual = pc.match_substring_regex(texts, r"^-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]{1,3})?$")

    def fast(some: pa.Array) -> pa.Array:
        values = pc.cast(some, pa.float64())
        overflow = pc.is_inf(values)
        return only(values, pc.invert(overflow)) if pc.any(overflow).as_py() else values

    def slow(rest: pa.Array) -> pa.Array:
        def parse(text: str) -> float | None:
            text = text.strip(" \t\r\n")
            sign, word = ("-", text[1:]) if text.startswith("-") else ("", text.removeprefix("+"))
            if word.lower() in _WORDS:
                return float(sign + _WORDS[word.lower()])
            if number(text) is None:
                return None
            found = float(text)
            return None if abs(found) == float("inf") else found

        return each(rest, pa.float64(), parse)

    return split(texts, usual, fast, slow)


def _exact_floats(values: pa.Array, target: pa.DataType) -> pa.Array:
    digits = 24 if pa.types.is_float32(target) else 53
    fits = pc.and_(pc.greater_equal(values, -(2**digits)), pc.less_equal(values, 2**digits))
    if (values.type.bit_width <= 32 and digits == 53) or pc.all(fits).as_py() is not False:
        return pc.cast(values, target)
    return each(values, target, lambda value: _exact_float(value, target))


def to_booleans(values: pa.Array) -> pa.Array:
    """Booleans, the integers 0 and 1, and the words that Spark knows."""
    if pa.types.is_boolean(values.type):
        return values
    if is_text(values.type):
        words = pc.utf8_lower(values.cast(pa.string()))
        parts = [
            only(pa.array(np.full(len(values), truth)), pc.is_in(words, pa.array(spellings)))
            for truth, spellings in _FALSE_OR_TRUE.items()
        ]
        return merged(parts, pa.bool_(), len(values))
    if pa.types.is_integer(values.type):
        one = pc.equal(values, 1)
        return only(one, pc.or_(one, pc.equal(values, 0)))
    return pa.nulls(len(values), pa.bool_())


def float_text(values: pa.Array) -> pa.Array:
    """For each float, the shortest text that is read as this float. Special values are NaN, Infinity and -Infinity."""
    texts = pc.cast(values, pa.string())
    for word, name in (("nan", "NaN"), ("-nan", "NaN"), ("inf", "Infinity"), ("-inf", "-Infinity")):
        texts = pc.if_else(pc.equal(texts, word), name, texts)
    return texts
