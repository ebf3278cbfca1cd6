"""Which values of an old row say something: of all types that a column can have."""

import datetime as dt
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from changelog.made_up import says_something


@pytest.mark.parametrize(
    ("dtype", "made_up", "said"),
    [
        (pa.int8(), 0, -1),
        (pa.int64(), 0, 2**63 - 1),
        (pa.int64(), 0, -(2**63)),
        (pa.float32(), -0.0, 0.5),
        (pa.float64(), 0.0, float("inf")),
        (pa.decimal128(38, 10), Decimal(0), Decimal("12345678901234567890.0000000001")),
        (pa.bool_(), False, True),
        (pa.string(), "", " "),
        (pa.binary(), b"", b"\0"),
        (pa.binary(2), None, b"\0\0"),
        (pa.date32(), dt.date(1970, 1, 1), dt.date(1969, 12, 31)),
        (pa.timestamp("us"), dt.datetime(1970, 1, 1), dt.datetime(1, 1, 1)),
        (pa.timestamp("us", "UTC"), dt.datetime(1970, 1, 1, tzinfo=dt.UTC), dt.datetime(2026, 1, 1, tzinfo=dt.UTC)),
    ],
    ids=str,
)
def test_what_says_something(dtype: pa.DataType, made_up: Any, said: Any) -> None:
    assert says_something(pa.array([made_up, None, said], dtype)).tolist() == [False, False, True]
