"""A field with values of several types gets one type, which doesn't depend on their order."""

from decimal import Decimal
from functools import reduce
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from changelog.observed_types import MISSING, merged_types
from changelog.values.encoded import MAYBE_BASE64

DECIMALS = st.integers(1, 38).flatmap(lambda p: st.integers(0, p).map(lambda s: f"decimal({p},{s})"))
TYPES = st.one_of(
    st.sampled_from(["tinyint", "smallint", "int", "bigint", "float", "double", "string", "date", "array<int>"]),
    DECIMALS,
)
MARKS = st.sampled_from(["", MISSING, MAYBE_BASE64])
OBSERVED = st.dictionaries(st.sampled_from(["a", "b"]), st.one_of(TYPES, MARKS))
BITS = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}


def extremes(dtype: str) -> list[Decimal]:
    """The values of an exact number type that are hardest to hold."""
    if dtype in BITS:
        return [Decimal(-(2 ** (BITS[dtype] - 1))), Decimal(2 ** (BITS[dtype] - 1) - 1)]
    precision, scale = map(int, dtype.removeprefix("decimal(").removesuffix(")").split(","))
    return [Decimal((0, (9,) * precision, -scale)), Decimal((0, (1,), -scale))]


def holds(dtype: str, value: Decimal) -> bool:
    if dtype in BITS:
        return value == int(value) and -(2 ** (BITS[dtype] - 1)) <= value < 2 ** (BITS[dtype] - 1)
    precision, scale = map(int, dtype.removeprefix("decimal(").removesuffix(")").split(","))
    exponent = value.as_tuple().exponent
    assert isinstance(exponent, int)
    return -exponent <= scale and value.adjusted() < precision - scale


@given(OBSERVED, OBSERVED)
def test_order_does_not_matter(first: dict[str, str], second: dict[str, str]) -> None:
    assert merged_types(first, second) == merged_types(second, first)
    assert merged_types(first, second).keys() == first.keys() | second.keys()


@given(OBSERVED)
def test_the_same_again_changes_nothing(observed: dict[str, str]) -> None:
    assert merged_types(observed, observed) == observed
    assert merged_types(observed, {}) == observed


@given(st.lists(st.one_of(TYPES, MARKS), min_size=3, max_size=3))
def test_tasks_may_report_in_any_order(types: list[str]) -> None:
    """Spark merges what tasks saw as they finish."""
    merged = [reduce(merged_types, [{"a": t} for t in order]) for order in permutations(types)]
    assert all(m == merged[0] for m in merged)


@given(TYPES, TYPES)
def test_the_result_holds_both(first: str, second: str) -> None:
    merged = merged_types({"a": first}, {"a": second})["a"]
    if merged == "string":
        return  # holds anything, as text
    exact = [t for t in (first, second) if t in BITS or t.startswith("decimal")]
    if len(exact) == 2:
        assert all(holds(merged, value) for dtype in exact for value in extremes(dtype))
    else:
        assert merged == first == second or ({first, second} <= {*BITS, "float", "double"} and merged == "double")


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("int", "bigint", "bigint"),
        ("bigint", "double", "double"),
        ("int", "float", "double"),
        ("decimal(10,2)", "decimal(12,2)", "decimal(12,2)"),
        ("decimal(10,2)", "decimal(10,4)", "decimal(12,4)"),
        ("decimal(38,0)", "decimal(2,2)", "string"),
        ("int", "decimal(4,2)", "decimal(12,2)"),
        ("bigint", "string", "string"),
        ("double", "decimal(4,2)", "string"),
        ("boolean", "int", "string"),
        ("", "bigint", "bigint"),
    ],
)
def test_examples(first: str, second: str, expected: str) -> None:
    assert merged_types({"a": first}, {"a": second}) == {"a": expected}
