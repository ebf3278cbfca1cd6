"""Encoded order values compare like the values."""

import datetime
from decimal import Decimal
from functools import cmp_to_key
from itertools import product
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from deltawriters.order_values import UNKNOWN, OrderColumns, latest

VALUES: dict[str, tuple[pa.DataType, list[Any]]] = {
    "bigint": (pa.int64(), [None, -(2**63), -5, 0, 7, 2**62, 2**63 - 1]),
    "int": (pa.int32(), [None, -(2**31), -1, 0, 2**31 - 1]),
    "double": (pa.float64(), [None, float("-inf"), -5.5, 0.0, 7.25, 1e300, float("inf"), float("nan")]),
    "string": (pa.string(), [None, "", "\x00", "\x00a", "a", "a\x00", "a\x00b", "ab", "b", "é"]),
    "long string": (pa.large_string(), [None, "", "a", "ab"]),
    "binary": (pa.binary(), [None, b"", b"\x00", b"\x00\xff", b"\xff", b"\xff\xff"]),
    "uuid": (pa.binary(16), [None, bytes(16), b"\xff" * 16]),
    "decimal": (pa.decimal128(30, 1), [None, Decimal("-1.5"), Decimal("0.0"), Decimal("99999999999999999999.1")]),
    "large decimal": (pa.decimal256(60, 1), [None, Decimal("-1.5"), Decimal("0.0"), Decimal("1.1")]),
    "timestamp": (pa.timestamp("us"), [None, datetime.datetime(1960, 1, 1), datetime.datetime(2024, 1, 1)]),
    "date": (pa.date32(), [None, datetime.date(1960, 1, 1), datetime.date(2024, 1, 1)]),
    "boolean": (pa.bool_(), [None, False, True]),
}
"""Values of a type in their order."""


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("chunked", [False, True])
def test_values_keep_their_order(name: str, chunked: bool) -> None:
    dtype, values = VALUES[name]
    rows = pa.table({"a": pa.array([*values[:2], *values], dtype)[2:] if chunked else pa.array(values, dtype)})
    ascending = OrderColumns(("a",)).of_rows(rows).to_pylist()
    assert ascending == sorted(ascending)
    assert len(set(ascending)) == len(values)
    assert ascending[0] > UNKNOWN
    first, *rest = OrderColumns(("a",), descending=frozenset("a")).of_rows(rows).to_pylist()
    assert first < min(rest), "NULL comes first in both directions"
    assert rest == sorted(rest, reverse=True)


def test_tuples_are_compared_value_by_value() -> None:
    texts, numbers = ["", "a", "a\x00", "aa", "b", None], [1, -1, None, 256]
    rows = [{"a": text, "b": number, "c": text} for text, number in product(texts, numbers)]
    table = pa.Table.from_pylist(rows, pa.schema([("a", pa.string()), ("b", pa.int64()), ("c", pa.string())]))
    order = OrderColumns(("a", "b", "c"), descending=frozenset("b"))

    def compared(left: dict[str, Any], right: dict[str, Any]) -> int:
        for name in order.columns:
            one, other = left[name], right[name]
            if one != other:
                if one is None or other is None:
                    return -1 if one is None else 1
                return -1 if (one < other) != (name in order.descending) else 1
        return 0

    encoded = order.of_rows(table).to_pylist()
    by_bytes = [rows[number] for number in sorted(range(len(rows)), key=encoded.__getitem__)]
    assert by_bytes == sorted(rows, key=cmp_to_key(compared))


@pytest.mark.parametrize("floor", [UNKNOWN, b"b"])
def test_the_latest_of_each_group(floor: bytes) -> None:
    orders, groups = [b"a", b"c", b"aa", b"d"], [0, 2, 0, 3]
    for count in (2, 4):
        found = latest(pa.array(orders[:count], pa.binary()), np.array(groups[:count]), 5, floor)
        known = {group: order for order, group in sorted(zip(orders[:count], groups[:count], strict=True))}
        assert found.to_pylist() == [max(floor, known.get(group, UNKNOWN)) for group in range(5)]
