"""Values that have two readings. A message without a schema doesn't say how its values are spelled: the settings of its
connector do (`WireType.setting`), and the user repeats them. If nobody has set one, a value that would mean something
else by another setting doesn't fit, whatever other messages show. So a value never means one thing in one micro-batch
and another thing in the next.
"""

import datetime as dt
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from changelog.changes import WireType
from changelog.shown_values import shown
from changelog.values import decimals, encoded, logical
from changelog.values.arrays import only

HEX = "hex"
BASE64_URL = "base64-url-safe"
"""How bytes are spelled by a connector's setting. Without such a name they are base64."""

DECIMALS = "decimal.handling.mode"
TIME_UNITS = "time.precision.mode"
BINARIES = "binary.handling.mode"
"""Settings of Debezium's connectors, and options of the format, that say what values without a schema mean."""

_YEAR_1, _YEAR_1900, _YEAR_2200, _YEAR_10000 = (-62_135_596_800, -2_208_988_800, 7_258_118_400, 253_402_300_800)
"""Seconds since 1970."""
_DAY = 86_400
_LONGEST = 80
"""Longer texts aren't shown."""
_UNITS = {10**3: "milliseconds", 10**6: "microseconds", 10**9: "nanoseconds"}
_QUARTER = 90 * _DAY
"""A time so near to 1970 is in another unit."""
_ENDLESS = 9_200_000_000_000_000_000
"""Larger numbers are a source's infinity."""
_EPOCH = dt.datetime(1970, 1, 1)


def without_numbers(texts: pa.Array, values: pa.Array) -> pa.Array:
    """Decimals from base64, without those whose text is a number too.

    Such a text begins with a digit or a plus. These are among the last of base64's characters, so by base64 it is a
    negative number, and only negative ones must be looked at.

    :param texts: string; other types have no second reading.
    :param values: decimals.
    """
    if not pa.types.is_string(texts.type):
        return values
    lowest = pc.min(values).as_py()
    if lowest is None or lowest >= 0:
        return values
    number = pc.match_substring_regex(texts, r"^\+?[0-9]+(?:[eE]\+?[0-9]+)?$")
    return only(values, pc.invert(number)) if pc.any(number).as_py() else values


def are_hex(texts: pa.Array) -> pa.Array:
    """Flags the texts that are hexadecimal, as a connector spells it."""
    return pc.match_substring_regex(texts, "^(?:[0-9a-f]{2})+$")


def plausible(numbers: pa.Array, wire: WireType) -> pa.Array:
    """Integers of a timestamp, without those that are a likelier time in another unit.

    After the year 9999 there are no times in a database, but each time of our years is in a larger unit. Around 1970,
    microseconds have their doubt: a time between 1900 and 2200 in milliseconds, and the ends of time that databases
    have, 0001-01-01 and 9999-12-31.
    """
    per_second = logical.TIMESTAMPS[wire.name or ""]
    limits = pc.min_max(numbers).as_py()
    if limits["max"] is None:
        return numbers
    if limits["max"] >= _YEAR_10000 * per_second:
        numbers = only(numbers, pc.less(numbers, _YEAR_10000 * per_second))
    if wire.doubtful and limits["min"] < _YEAR_10000 * 10**3:
        likelier = pc.and_(_between(numbers, _YEAR_1900, _YEAR_2200), pc.not_equal(numbers, 0))
        for first in (_YEAR_1, _YEAR_10000 - _DAY):
            likelier = pc.or_(likelier, _between(numbers, first, first + _DAY))
        numbers = only(numbers, pc.invert(likelier))
    return numbers


def _between(millis: pa.Array, first: int, end: int) -> pa.Array:
    return pc.and_(pc.greater_equal(millis, first * 1000), pc.less(millis, end * 1000))


def contradiction(wire: WireType, value: Any, field: str, *, visible: bool) -> str | None:
    """What another setting would make of a value that doesn't fit, and what to set. None if it is no better.

    :param field: the value's field in the messages.
    :param visible: the text may quote the value.
    """
    if isinstance(value, str) and len(value) > _LONGEST:
        return None
    if wire.setting == DECIMALS and isinstance(value, str):
        return _of_decimal(wire, value, visible=visible)
    if wire.setting == TIME_UNITS and isinstance(value, int) and wire.name in logical.TIMESTAMPS:
        return _of_timestamp(wire, value, field, visible=visible)
    if wire.setting == BINARIES and isinstance(value, str):
        return _of_bytes(wire, value, shown(value, visible=visible))
    settings = sorted({child.setting for child in wire.children.values() if child.setting})
    if settings:
        repeated = " and ".join(settings)
        part = shown(value, visible=visible)
        return f"a part of {part} does not fit. Does format_options repeat the connector's {repeated}?"
    return None


def _of_decimal(wire: WireType, text: str, *, visible: bool) -> str | None:
    named = shown(text, visible=visible)
    in_base64 = encoded.from_base64(pa.array([text])).null_count == 0 and text != ""
    is_number = decimals.number(text) is not None
    if wire.name == logical.DECIMAL and is_number:
        if in_base64 and wire.doubtful:
            read = "another"
            if visible:
                read = decimals.bytes_as_text(pa.array([text]), decimals.scale_of(wire))[0].as_py()
            return (
                f"{named} is a number, and base64 of {read} too. Set {DECIMALS} in format_options to what it "
                "is in the connector: precise is the connector's default, and means base64"
            )
        if not in_base64:
            return f"{named} is a number, not base64: {_set(DECIMALS, 'string')}"
    if wire.name != logical.DECIMAL and in_base64 and not is_number:
        return f"{named} is base64, not a number: {_set(DECIMALS, 'precise')}"
    return None


def _of_timestamp(wire: WireType, number: int, field: str, *, visible: bool) -> str | None:
    own = logical.TIMESTAMPS[wire.name or ""]
    if abs(number) >= _ENDLESS:
        return None
    for per_second, unit in _UNITS.items():
        other = _moment(number, per_second)
        if per_second == own or other is None or abs(number) < _QUARTER * per_second:
            continue
        if not visible:
            named = shown(number, visible=False)
            return f"{named} is one time in {_UNITS[own]}, and another in {unit}. {_advice(per_second, field)}"
        read = _moment(number, own) or "beyond the year 9999"
        return f"{number} is {read} in {_UNITS[own]}, and {other} in {unit}. {_advice(per_second, field)}"
    return None


def _advice(per_second: int, field: str) -> str:
    """What to set for a column whose timestamps have this unit."""
    if per_second == 10**3:
        return (
            "Without a mode of its own, the connector sends timestamps of up to 3 digits in milliseconds. Name such "
            f"columns in format_options (milliseconds: [{field}]), or set {TIME_UNITS} there: connect for "
            "milliseconds in all columns, microseconds if these are microseconds"
        )
    if per_second == 10**9:
        return f"Set {TIME_UNITS}: microseconds in the connector, or give the column the type bigint"
    return f"Set {TIME_UNITS} in format_options to what it is in the connector"


def _moment(number: int, per_second: int) -> str | None:
    seconds = number // per_second
    if not _YEAR_1 <= seconds < _YEAR_10000:
        return None
    micros = number * 10**6 // per_second
    return (_EPOCH + dt.timedelta(microseconds=micros)).isoformat()


def _of_bytes(wire: WireType, text: str, named: str) -> str | None:
    is_hex = bool(pc.all(are_hex(pa.array([text]))).as_py())
    in_base64 = encoded.from_base64(pa.array([text])).null_count == 0
    if wire.name == HEX:
        return f"{named} is base64, not hexadecimal: {_set(BINARIES, 'base64')}" if in_base64 else None
    if is_hex and in_base64 and wire.doubtful:
        return (
            f"{named} is hexadecimal, and base64 too. Set {BINARIES} in format_options to what it is in the "
            "connector: bytes is the connector's default, and means base64"
        )
    if is_hex:
        return f"{named} is hexadecimal, not base64: {_set(BINARIES, 'hex')}"
    return f"{named} is not base64: {_set(BINARIES, 'base64-url-safe')}" if set(text) & set("-_") else None


def _set(option: str, value: str) -> str:
    return f"the connector's {option} seems to be {value}. Set {option}: {value} in format_options"
