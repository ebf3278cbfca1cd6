"""Content hashes: equal for equal rows, wherever they stand, and different for rows that differ in anything."""

import time
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltawriters.rowhash import row_hash

TYPES: dict[str, tuple[pa.DataType, list[Any]]] = {
    "long": (pa.int64(), [0, 1, -1, 2**62]),
    "bool": (pa.bool_(), [True, False]),
    "double": (pa.float64(), [0.0, 1.5, -1.5, float("inf")]),
    "float": (pa.float32(), [0.5, 1.0]),
    "string": (pa.string(), ["", "a", "ab", "a" * 50]),
    "fixed": (pa.binary(5), [b"12345", b"54321"]),
    "decimal": (pa.decimal128(30, 2), [Decimal("1.10"), Decimal("-1.10"), Decimal(10**27)]),
    "list": (pa.list_(pa.int32()), [[], [1], [1, 2], [2, 1], [None], [1, None], [None, 1]]),
    "nested list": (pa.list_(pa.list_(pa.string())), [[], [[]], [[], []], [["a"], []], [[], ["a"]], [["a", "b"]]]),
    "map": (pa.map_(pa.string(), pa.int64()), [[], [("a", 1)], [("a", 2)], [("b", 1)], [("a", None)]]),
    "struct": (pa.struct([("x", pa.int64()), ("y", pa.string())]), [{"x": 1, "y": None}, {"x": None, "y": "1"}, {}]),
}


@pytest.mark.parametrize("name", TYPES)
def test_different_values_have_different_hashes(name: str) -> None:
    dtype, values = TYPES[name]
    values = [*values, None]
    hashes = row_hash([pa.array(values, dtype)])
    assert len(set(hashes.tolist())) == len(values)
    beside = pa.array(range(len(values)))
    assert len(set(row_hash([pa.array([values[0]] * len(values), dtype), beside]).tolist())) == len(values)


@given(st.data())
def test_a_row_s_hash_does_not_depend_on_the_others(data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from(sorted(TYPES)), min_size=1, max_size=3))
    count = data.draw(st.integers(1, 6))
    columns = []
    for name in names:
        dtype, values = TYPES[name]
        column = data.draw(st.lists(st.sampled_from([*values, None]), min_size=count, max_size=count))
        columns.append(pa.array(column, dtype))
    hashes = row_hash(columns)
    for row in range(count):
        assert row_hash([column.slice(row, 1) for column in columns])[0] == hashes[row]
        assert row_hash([pa.array([column[row].as_py()], column.type) for column in columns])[0] == hashes[row]


def test_columns_are_not_interchangeable() -> None:
    a, b = pa.array([1, 2]), pa.array([2, 1])
    assert not np.array_equal(row_hash([a, b]), row_hash([b, a]))
    assert row_hash([a, pa.nulls(2)]).tolist() != row_hash([pa.nulls(2), a]).tolist()


def test_no_rows() -> None:
    for dtype, _ in TYPES.values():
        assert row_hash([pa.array([], dtype)]).tolist() == []


def test_text_of_every_length() -> None:
    """Words of eight bytes, and what is left: also where only zeros or the last byte differ."""
    for values in (
        [b"\0" * n for n in [*range(40), *range(1000, 1050)]],
        [b"x" * n for n in [*range(40), *range(1000, 1050)]],
        [b"x" * n + b"\xff" for n in [*range(40), *range(1000, 1050)]],
    ):
        hashes = row_hash([pa.array(values)])
        assert len(set(hashes.tolist())) == len(values)
        assert [row_hash([pa.array([value])])[0] for value in values] == hashes.tolist()


def test_long_texts() -> None:
    """They differ where their ends differ, and are hashed at the speed of memory rather than word by word."""
    size = 8_000_000
    values = ["a" * size, "a" * (size - 1), "a" * (size - 1) + "b", "b" + "a" * (size - 1), "short"]
    began = time.perf_counter()
    hashes = row_hash([pa.array(values)])
    assert time.perf_counter() - began < 3
    assert len(set(hashes.tolist())) == len(values)
    assert [row_hash([pa.array([value])])[0] for value in values] == hashes.tolist()
