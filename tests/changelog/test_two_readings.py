"""Debezium's values that mean one thing by one setting of the connector, and another thing by another setting. Without
the schema envelope the message doesn't say which.
"""

import base64
import datetime as dt
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.changelog.messages import decode, messages, raw_records, spec

COLUMNS = {"id": "int", "d": "decimal(12,2)", "n": "decimal(12,0)", "at": "timestamp_ntz", "b": "binary"}
DECIMALS, TIMES, BYTES = "decimal.handling.mode", "time.precision.mode", "binary.handling.mode"
MILLIS, MICROS, NANOS = 1767323045123, 1767323045123456, 1767323045123456000
NOW = dt.datetime(2026, 1, 2, 3, 4, 5, 123456)


def read(column: str, *values: Any, **options: Any) -> list[Any]:
    """For each value, what the column gets, or the reason of the bad record."""
    events = [{"before": None, "after": {"id": 1, column: value}, "op": "c"} for value in values]
    settings = {name.replace("_", "."): option for name, option in options.items()}
    found = decode("debezium-json", raw_records(messages(*events)), spec(COLUMNS, options=settings))
    found.sort(key=lambda one: one.offset or 0)
    return [one.row[column] if one.error is None else one.error for one in found]


def advised(reason: Any, *parts: str) -> bool:
    return isinstance(reason, str) and reason.startswith("type_mismatch: ") and all(part in reason for part in parts)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("1234", ["'1234' is a number, and base64 of -26588.24 too", DECIMALS]),
        ("10.50", ["'10.50' is a number, not base64", f"Set {DECIMALS}: string in format_options"]),
        ("100", ["'100' is a number, not base64"]),
        ("+123", ["'+123' is a number, and base64"]),
        ("1E12", ["'1E12' is a number, and base64"]),
        ("-12.00", ["'-12.00' is a number, not base64"]),
    ],
)
def test_a_number_is_no_decimal_in_base64_unless_somebody_says_so(text: str, parts: list[str]) -> None:
    (reason,) = read("d", text)
    assert advised(reason, "column d: ", *parts)


def test_what_a_set_option_says_is_believed() -> None:
    assert read("d", "1234", "BNI=", decimal_handling_mode="precise") == [Decimal("-26588.24"), Decimal("12.34")]
    assert read("d", "1234", "10.50", decimal_handling_mode="string") == [Decimal(1234), Decimal("10.50")]
    (reason,) = read("d", "BNI=", decimal_handling_mode="string")
    assert advised(reason, "'BNI=' is base64, not a number", f"Set {DECIMALS}: precise")
    (reason,) = read("d", "10.50", decimal_handling_mode="precise")
    assert advised(reason, "'10.50' is a number, not base64")


@settings(deadline=None)
@given(st.lists(st.integers(-(10**11), 10**11), min_size=1, max_size=20))
def test_a_decimal_is_read_exactly_or_not_at_all(numbers: list[int]) -> None:
    """By its own record alone, whatever the other records of the batch are."""
    encoded = [n.to_bytes((n + (n < 0)).bit_length() // 8 + 1, "big", signed=True) for n in numbers]
    values = [base64.b64encode(data).decode() for data in encoded]
    found = read("d", *values)
    for number, value, one in zip(numbers, values, found, strict=True):
        if value.isdigit():
            assert advised(one, "is a number, and base64")
        else:
            assert one == Decimal(number).scaleb(-2)
    texts = [f"{number:+d}" if number % 2 else str(number) for number in numbers]
    assert all(advised(one, "is a number") for one in read("n", *texts))


def test_milliseconds_are_not_read_as_microseconds() -> None:
    """MySQL's DATETIME comes in milliseconds, DATETIME(6) in microseconds, with the connector's default."""
    for options in ({}, {"time_precision_mode": "adaptive"}, {"time_precision_mode": "adaptive_time_microseconds"}):
        micros, millis, nanos, zero = read("at", MICROS, MILLIS, NANOS, 0, **options)
        assert (micros, zero) == (NOW, dt.datetime(1970, 1, 1))
        said = f"{MILLIS} is 1970-01-21T10:55:23.045123 in microseconds, and 2026-01-02T03:04:05.123000 in milliseconds"
        assert advised(millis, said, "milliseconds: [at]", f"{TIMES} there: connect")
        assert advised(nanos, "beyond the year 9999 in microseconds, and 2026-01-02T03:04:05.123456 in nanoseconds")


@pytest.mark.parametrize("year", [1, 1900, 1950, 2030, 2199, 9999])
def test_milliseconds_that_databases_have(year: int) -> None:
    """A time of a person's life, and the first and last day that a database knows."""
    moment = dt.datetime(year, 12, 31, 12) if year == 9999 else dt.datetime(year, 1, 1, 12)
    millis = int((moment - dt.datetime(1970, 1, 1)).total_seconds()) * 1000
    (reason,) = read("at", millis)
    assert advised(reason, f"{moment.isoformat()} in milliseconds")
    assert read("at", millis, milliseconds=("at",)) == [moment]
    assert read("at", millis * 1000) == [moment]


def test_the_unit_that_is_set_is_believed() -> None:
    assert read("at", MILLIS, time_precision_mode="connect") == [NOW.replace(microsecond=123000)]
    assert read("at", MILLIS, time_precision_mode="microseconds") == [dt.datetime(1970, 1, 21, 10, 55, 23, 45123)]
    for options in ({"time_precision_mode": "connect"}, {"milliseconds": "at"}):
        (reason,) = read("at", MICROS, **options)
        assert advised(reason, "beyond the year 9999 in milliseconds, and 2026-01-02T03:04:05.123456 in microseconds")
    # one column in milliseconds, the others in microseconds
    assert read("at", MILLIS, milliseconds="at", time_precision_mode="microseconds") == [
        NOW.replace(microsecond=123000)
    ]


def test_bytes_in_each_spelling() -> None:
    data = bytes.fromhex("fbefbe00")
    assert read("b", "++++AA==") == [bytes.fromhex("fbefbe00")]
    assert read("b", "fbefbe00", binary_handling_mode="hex") == [data]
    assert read("b", "FBEFBE00", "", binary_handling_mode="hex") == [data, b""]
    assert read("b", "----AA==", "____", binary_handling_mode="base64-url-safe") == [data, b"\xff\xff\xff"]
    for option in ("bytes", "base64"):
        assert read("b", "deadbeef", binary_handling_mode=option) == [base64.b64decode("deadbeef")]
    (reason,) = read("b", "deadbeef")
    assert advised(reason, "'deadbeef' is hexadecimal, and base64 too", BYTES)
    (reason,) = read("b", "00ffff")
    assert advised(reason, f"'00ffff' is hexadecimal, not base64: the connector's {BYTES} seems to be hex")
    (reason,) = read("b", "----AA==")
    assert advised(reason, f"Set {BYTES}: base64-url-safe in format_options")
    for text in ("++++AA==", "abc", "0g"):
        (reason,) = read("b", text, binary_handling_mode="hex")
        assert advised(reason, "column b: ")


def test_parts_of_a_column_have_two_readings_too() -> None:
    event = {"before": None, "after": {"id": 1, "v": ["1234"]}, "op": "c"}
    columns = {"id": "int", "v": "array<decimal(8,2)>"}
    (found,) = decode("debezium-json", raw_records(messages(event)), spec(columns))
    assert advised(found.error, f"Does format_options repeat the connector's {DECIMALS}?")


def test_an_envelope_leaves_nothing_open() -> None:
    """Its schema says how values are spelled, whatever the options are."""
    row = {"type": "struct", "fields": [
        {"field": "id", "type": "int32"}, {"field": "at", "type": "int64", "name": "io.debezium.time.Timestamp"},
        {"field": "d", "type": "bytes", "name": "org.apache.kafka.connect.data.Decimal", "parameters": {"scale": "2"}},
    ]}  # fmt: skip
    fields = [row | {"field": side} for side in ("before", "after")] + [{"field": "op", "type": "string"}]
    payload = {"before": None, "after": {"id": 1, "at": MILLIS, "d": "1234"}, "op": "c"}
    event = {"schema": {"type": "struct", "fields": fields}, "payload": payload}
    (found,) = decode("debezium-json", raw_records(messages(event)), spec(COLUMNS))
    assert (found.row["at"], found.row["d"]) == (NOW.replace(microsecond=123000), Decimal("-26588.24"))
