"""Counts and sizes as logs and commands show them."""

import pytest

from changelog.amounts import amount, amounts, sized


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [
        (1, "data file", "1 data file"),
        (0, "row", "0 rows"),
        (2100, "row", "2,100 rows"),
        (2, "key", "2 keys"),
        (3, "entry", "3 entries"),
        (2, "micro-batch", "2 micro-batches"),
        (2, "index", "2 indexes"),
    ],
)
def test_a_count_has_its_plural(count: int, noun: str, text: str) -> None:
    assert amount(count, noun) == text


def test_nothing_is_said_of_zero() -> None:
    assert amounts({"data file": 2, "delete file": 0, "row": 1}) == "2 data files, 1 row"
    assert amounts({"data file": 0}) == "nothing"
    assert amounts({}, "no changes") == "no changes"


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (999, "999 bytes"),
        (999.6, "1.0 kB"),
        (61_200, "61.2 kB"),
        (999_960, "1.0 MB"),
        (41_500_000, "41.5 MB"),
        (2.5e9, "2.5 GB"),
        (7e15, "7,000.0 TB"),
    ],
)
def test_a_size_has_a_unit_in_which_it_is_not_zero(number: float, text: str) -> None:
    assert sized(number) == text
