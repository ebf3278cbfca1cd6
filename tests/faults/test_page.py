"""The page lists the faults of the tests, each once, and no others."""

from tests.faults import page


def test_the_page_lists_each_fault_of_the_tests() -> None:
    faults = page.of_tests()
    assert len(faults) == len(set(faults))
    assert list(page.read()) == faults


def test_figures_may_differ() -> None:
    assert page.same_words("back after 3.5 s", "back after 12 s")
    assert not page.same_words("back after 3.5 s", "gone after 3.5 s")
