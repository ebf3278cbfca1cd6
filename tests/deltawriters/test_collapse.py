"""Collapsing, against a dictionary."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from changelog.rows import RowKind
from deltawriters.collapse import collapse, dense_ids, order_rank


@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.none(), max_size=20), st.booleans())
def test_tuples_are_numbered_in_the_order_of_first_appearance(values: list[int | None], in_order: bool) -> None:
    if in_order:
        values = list[int | None](sorted({value for value in values if value is not None}))
    ids, count = dense_ids([pa.array(values, pa.int64())])
    numbers: dict[int | None, int] = {}
    assert ids.tolist() == [numbers.setdefault(value, len(numbers)) for value in values]
    assert count == len(numbers)


@pytest.mark.parametrize("keys", [[1, 2, 3, 4], [1, 2, 2, 4], [4, 1, 4, 1], [4, 3, 2, 1]])
def test_the_first_and_the_last_change_of_each_key(keys: list[int]) -> None:
    order = [40, 20, 30, 10]
    outcome = collapse([pa.array(keys)], [pa.array(order)], np.zeros(4, np.int8))
    by_key: dict[int, list[tuple[int, int]]] = {}
    for row, key in enumerate(keys):
        by_key.setdefault(key, []).append((order[row], row))
    assert outcome.first.tolist() == [min(rows)[1] for rows in by_key.values()]
    assert outcome.last.tolist() == [max(rows)[1] for rows in by_key.values()]


@pytest.mark.parametrize("last", [(2**63 - 1) // 3, -(2**63) // 3, 2**63 - 1, -(2**63) + 1])
def test_orders_at_the_ends_of_what_can_be_counted(last: int) -> None:
    """Ranks are multiplied by three."""
    for kinds in ([RowKind.UPDATE_AFTER, RowKind.DELETE], [RowKind.UPDATE_BEFORE, RowKind.UPDATE_BEFORE]):
        codes = np.array([int(kind) for kind in kinds], np.int8)
        assert collapse([pa.array([1, 1])], [pa.array([last - 1, last])], codes).last.tolist() == [1]


@pytest.mark.parametrize("dtype", [pa.float32(), pa.float64()])
def test_floating_point_order(dtype: pa.DataType) -> None:
    in_order = [None, -np.inf, -2.5, -1e-30, 0.0, 1e-30, 1.5, np.inf, np.nan]
    rank = order_rank([pa.array(in_order, dtype)])
    assert (rank[1:] > rank[:-1]).all()
    zeros = order_rank([pa.array([-0.0, 0.0, -0.0, 1.0], dtype)])
    assert zeros[0] == zeros[1] == zeros[2] < zeros[3]
