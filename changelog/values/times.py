"""Dates, times and timestamps: integers whose logical type says the unit, Arrow's own types, and ISO 8601 text."""

import pyarrow as pa
import pyarrow.compute as pc

from changelog.changes import WireType
from changelog.values import logical, readings
from changelog.values.arrays import only
from changelog.values.decimals import split
from changelog.values.numerals import to_integers

MICROS = pa.timestamp("us")
INSTANTS = pa.timestamp("us", "UTC")

_DAY = 86_400 * 10**6
_NUMBERS = (9_223_372_036_825_200_000, -9_223_372_036_832_400_000)
"""PostgreSQL's JDBC driver and Debezium send these numbers for infinity and -infinity, in any unit or in microseconds.
Newer versions send the largest and smallest int64. All real timestamps in microseconds lie between these numbers.
"""
_FIRST_DAY = -2_440_588
"""4714-11-24 BC, Julian day 0. No database has earlier dates. As an int32 of days, infinity is an earlier date."""
_LAST_DAYS = (622_191_231, 622_191_232, 622_191_233, 622_191_234)
"""As an int32 of days, -infinity (106,751,991,168 days ago, modulo 2^32) is one of these, depending on the time
zone.
"""

_DATE = r"(?P<sign>[+-]?)(?P<year>[0-9]{4,9})-(?P<month>[0-9]{2})-(?P<day>[0-9]{2})"
_TIME = (
    r"(?:[T ](?P<hour>[0-9]{2})(?::(?P<minute>[0-9]{2})(?::(?P<second>[0-9]{2})(?:\.(?P<fraction>[0-9]{1,18}))?)?)?)?"
)
_ZONE = r"(?P<zone> ?(?:Z|UTC|(?P<east>[+-])(?P<hours>[0-9]{1,2})(?::?(?P<minutes>[0-9]{2}))?))?"
_USUAL = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,6})?"
"""Arrow's cast reads texts of this form in the same way as this module. It also accepts other forms, but knows no years
before 0 or after 9999.
"""
_LONGEST_OFFSET = 18 * 60  # minutes, java.time.ZoneOffset.MAX


def integers(values: pa.Array, wire: WireType) -> tuple[pa.Array, WireType]:
    """Arrow's own dates, times and timestamps as integers with a logical type, so that the same rules apply to them."""
    dtype = values.type
    if pa.types.is_date(dtype):
        days = values.cast(pa.date32()).cast(pa.int32())
        return days, wire if wire.name in logical.DATES else WireType("int32", "io.debezium.time.Date")
    names, unit = (logical.TIMESTAMPS, dtype.unit) if pa.types.is_timestamp(dtype) else (logical.TIMES, dtype.unit)
    if unit == "s":
        longer = pa.timestamp("ms", dtype.tz) if pa.types.is_timestamp(dtype) else pa.time32("ms")
        return integers(values.cast(longer), wire)
    per_second = {"ms": 10**3, "us": 10**6, "ns": 10**9}[unit]
    numbers = values.cast(pa.int32()).cast(pa.int64()) if pa.types.is_time32(dtype) else values.view(pa.int64())
    if names.get(wire.name or "") == per_second:
        return numbers, wire
    if wire.name in names:
        numbers = _rescaled(numbers, per_second, names[wire.name or ""])
        return numbers, wire
    return numbers, WireType("int64", next(name for name, n in names.items() if n == per_second and "debezium" in name))


def to_timestamps(values: pa.Array, wire: WireType, target: pa.DataType) -> pa.Array:
    """Values as timestamps in microseconds, in UTC or without a zone, as `target` says."""
    name = wire.name or ""
    if pa.types.is_large_string(values.type):
        values = to_integers(values, pa.int64())
    if pa.types.is_string(values.type):
        return _timestamps_of_text(values, name, target)
    if not pa.types.is_integer(values.type):
        return pa.nulls(len(values), target)
    if name in logical.TIMESTAMPS:
        numbers = _finite(to_integers(values, pa.int64()))
        if wire.setting:
            numbers = readings.plausible(numbers, wire)
        micros = _rescaled(numbers, logical.TIMESTAMPS[name], 10**6)
        return (micros if micros is numbers else _finite(micros)).view(target)
    if name in logical.DATES:
        days = to_dates(values, wire).cast(pa.int32()).cast(pa.int64())
        micros = pc.multiply(only(days, pc.less(pc.abs(days), 2**63 // _DAY)), _DAY)
        return micros.view(target)
    return pa.nulls(len(values), target)


def _finite(numbers: pa.Array) -> pa.Array:
    """The numbers that don't mean infinity."""
    limits = pc.min_max(numbers).as_py()
    if limits["max"] is None or (limits["max"] < _NUMBERS[0] and limits["min"] > _NUMBERS[1]):
        return numbers
    return only(numbers, pc.and_(pc.less(numbers, _NUMBERS[0]), pc.greater(numbers, _NUMBERS[1])))


def to_dates(values: pa.Array, wire: WireType) -> pa.Array:
    name = wire.name or ""
    if pa.types.is_large_string(values.type):
        values = to_integers(values, pa.int64())
    if pa.types.is_string(values.type):
        return _dates_of_text(values, name)
    if name in logical.DATES and pa.types.is_integer(values.type):
        return _dates_of_days(values)
    if name in logical.TIMESTAMPS and pa.types.is_integer(values.type):
        micros = to_timestamps(values, wire, MICROS).view(pa.int64())
        days = pc.divide(micros, _DAY)
        return _dates_of_days(only(days, pc.equal(pc.multiply(days, _DAY), micros)))
    return pa.nulls(len(values), pa.date32())


def to_text(values: pa.Array, wire: WireType) -> pa.Array | None:
    """Integers that mean dates, times or timestamps, as ISO 8601 text. None if the integers have another meaning."""
    name = wire.name or ""
    if not pa.types.is_integer(values.type):
        return None
    if name in logical.DATES:  # Arrow names years of up to 32,767
        days = to_dates(values, wire).view(pa.int32())
        known = only(days, pc.less(pc.abs(pc.max_element_wise(days, -(2**30))), 11 * 10**6))
        return pc.cast(known.view(pa.date32()), pa.string())
    if name in logical.TIMES:
        return _clock(values.cast(pa.int64()), logical.TIMES[name])
    if name in logical.TIMESTAMPS:
        micros = to_timestamps(values, wire, MICROS).view(pa.int64())
        known = only(micros, pc.less(pc.abs(pc.max_element_wise(micros, -(2**62))), 96 * 10**16))
        return pc.replace_substring(pc.cast(known.view(MICROS), pa.string()), " ", "T", max_replacements=1)
    return None


def _clock(values: pa.Array, per_second: int) -> pa.Array:
    """HH:MM:SS.fff, with as many digits as the unit has. MySQL's TIME may be negative, or longer than a day."""
    negative = pc.less(values, 0)
    rest = pc.abs(pc.if_else(pc.equal(values, -(2**63)), pa.scalar(None, pa.int64()), values))

    def digits(part: pa.Array, width: int) -> pa.Array:
        return pc.utf8_lpad(pc.cast(part, pa.string()), width, "0")

    seconds = pc.divide(rest, per_second)
    minutes = pc.divide(seconds, 60)
    hours = pc.divide(minutes, 60)
    clock = pc.binary_join_element_wise(
        digits(hours, 2),
        digits(pc.subtract(minutes, pc.multiply(hours, 60)), 2),
        digits(pc.subtract(seconds, pc.multiply(minutes, 60)), 2),
        ":",
    )
    fraction = digits(pc.subtract(rest, pc.multiply(seconds, per_second)), len(str(per_second)) - 1)
    return pc.binary_join_element_wise(pc.if_else(negative, "-", ""), clock, ".", fraction, "")


def _rescaled(numbers: pa.Array, per_second: int, wanted: int) -> pa.Array:
    """Integers in another unit. Null where the result would have a fraction or doesn't fit int64."""
    if per_second == wanted:
        return numbers
    if per_second < wanted:
        factor = wanted // per_second
        try:
            return pc.multiply_checked(numbers, factor)
        except pa.ArrowInvalid:
            limit = (2**63 - 1) // factor
            fits = pc.and_(pc.less_equal(numbers, limit), pc.greater_equal(numbers, -limit))
            return pc.multiply(only(numbers, fits), factor)
    factor = per_second // wanted
    shorter = pc.divide(numbers, factor)
    same = pc.equal(pc.multiply(shorter, factor), numbers)
    return shorter if pc.all(same).as_py() is not False else only(shorter, same)


def _dates_of_days(days: pa.Array) -> pa.Array:
    limits = pc.min_max(days).as_py()
    if limits["min"] is not None and (limits["min"] < _FIRST_DAY or limits["max"] >= _LAST_DAYS[0]):
        real = pc.and_(pc.greater_equal(days, _FIRST_DAY), pc.less(days, 2**31))
        days = only(days, pc.and_(real, pc.invert(pc.is_in(days, pa.array(_LAST_DAYS, days.type)))))
    return days.cast(pa.int32()).cast(pa.date32())


def _dates_of_text(values: pa.Array, name: str) -> pa.Array:
    if name == logical.ISO_DATE:
        values = pc.replace_substring_regex(values, r"^([^Tt]*)Z$", r"\1")
    try:
        return pc.cast(values, pa.date32())
    except pa.ArrowInvalid:
        parts = pc.extract_regex(values, f"^{_DATE}$")
        return _dates_of_days(_days(parts))


def _timestamps_of_text(values: pa.Array, name: str, target: pa.DataType) -> pa.Array:
    local = target.tz is None
    if local and name == logical.ISO_TIMESTAMP:
        values = pc.replace_substring_regex(values, "Z$", "")
    usual = pc.match_substring_regex(values, f"{_USUAL}$" if local else f"{_USUAL}Z$")

    def fast(some: pa.Array) -> pa.Array:
        try:
            return pc.cast(some, target)
        except pa.ArrowInvalid:  # 30 February
            return _timestamps_of_parts(some, target)

    return split(values, usual, fast, lambda rest: _timestamps_of_parts(rest, target))


def _timestamps_of_parts(values: pa.Array, target: pa.DataType) -> pa.Array:
    local = target.tz is None
    parts = pc.extract_regex(values, f"^{_DATE}{_TIME}{_ZONE}$")
    days = _days(parts)
    hour, minute, second = (_number(parts, part) for part in ("hour", "minute", "second"))
    fraction = pc.utf8_rpad(pc.struct_field(parts, "fraction"), 18, "0")
    micros = pc.cast(pc.utf8_slice_codeunits(fraction, 0, 6), pa.int64())
    finer = pc.cast(pc.utf8_slice_codeunits(fraction, 6, 18), pa.int64())
    hours, minutes = _number(parts, "hours"), _number(parts, "minutes")
    offset = pc.add(pc.multiply(hours, 60), minutes)
    fits = pc.less(hour, 24)
    for part, limit in ((minute, 60), (second, 60), (finer, 1), (minutes, 60), (offset, _LONGEST_OFFSET + 1)):
        fits = pc.and_(fits, pc.less(part, limit))
    fits = pc.and_(fits, pc.less(pc.abs(days), 106_751_990))  # a day less than int64 has, for the offset
    if local:
        fits = pc.and_(fits, pc.equal(pc.struct_field(parts, "zone"), ""))
    east = pc.if_else(pc.equal(pc.struct_field(parts, "east"), "-"), -1, 1)
    minutes_of_day = pc.subtract(pc.add(pc.multiply(hour, 60), minute), pc.multiply(offset, east))
    seconds = pc.add(pc.multiply(minutes_of_day, 60), second)
    total = pc.add(pc.multiply(only(days, fits), _DAY), pc.add(pc.multiply(seconds, 10**6), micros))
    return total.view(target)


def _number(parts: pa.Array, name: str) -> pa.Array:
    """The integer in the named group of the pattern; 0 if the group is empty."""
    text = pc.struct_field(parts, name)
    return pc.cast(pc.if_else(pc.equal(text, ""), "0", text), pa.int64())


def _days(parts: pa.Array) -> pa.Array:
    """Days since 1970-01-01 in the proleptic Gregorian calendar. Year 0 is 1 BC. Null for dates that don't exist.

    The algorithm is `days_from_civil` of Howard Hinnant, "chrono-compatible low-level date algorithms".
    """
    year = pc.cast(pc.struct_field(parts, "year"), pa.int64())
    year = pc.if_else(pc.equal(pc.struct_field(parts, "sign"), "-"), pc.negate(year), year)
    month, day = (pc.cast(pc.struct_field(parts, name), pa.int64()) for name in ("month", "day"))
    leap = _is_leap(year)
    length = pc.if_else(pc.is_in(month, pa.array([4, 6, 9, 11])), 30, 31)
    length = pc.if_else(pc.equal(month, 2), pc.if_else(leap, 29, 28), length)
    fits = pc.and_(
        pc.and_(pc.greater(month, 0), pc.less_equal(month, 12)), pc.and_(pc.greater(day, 0), pc.less_equal(day, length))
    )
    early = pc.less_equal(month, 2)
    year = pc.if_else(early, pc.subtract(year, 1), year)
    era = _floored(year, 400)
    year_of_era = pc.subtract(year, pc.multiply(era, 400))
    shifted = pc.if_else(early, pc.add(month, 9), pc.subtract(month, 3))  # March is 0
    day_of_year = pc.add(pc.divide(pc.add(pc.multiply(shifted, 153), 2), 5), pc.subtract(day, 1))
    leap_days = pc.subtract(pc.divide(year_of_era, 4), pc.divide(year_of_era, 100))
    day_of_era = pc.add(pc.add(pc.multiply(year_of_era, 365), leap_days), day_of_year)
    days = pc.subtract(pc.add(pc.multiply(era, 146_097), day_of_era), 719_468)
    return only(days, fits)


def _is_leap(year: pa.Array) -> pa.Array:
    def divides(n: int) -> pa.Array:
        return pc.equal(pc.multiply(pc.divide(year, n), n), year)

    return pc.and_(divides(4), pc.or_(pc.invert(divides(100)), divides(400)))


def _floored(numbers: pa.Array, divisor: int) -> pa.Array:
    quotient = pc.divide(numbers, divisor)
    return pc.if_else(pc.less(numbers, pc.multiply(quotient, divisor)), pc.subtract(quotient, 1), quotient)
