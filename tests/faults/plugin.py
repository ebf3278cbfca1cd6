"""The fixture `seen` of tests that are marked by `fault`, and the option with which their run writes the page."""

from collections.abc import Callable, Generator, Iterator

import pytest

from tests.faults import page
from tests.faults.page import Fault

Seen = Callable[[str], None]
"""Says what came of the fault: an English sentence, in which only figures may differ between runs."""

_PASSED = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-faults", action="store_true", help="write what tests of faults saw into docs/faults.md")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call":
        item.stash[_PASSED] = report.passed
    return report


@pytest.fixture
def seen(request: pytest.FixtureRequest) -> Iterator[Seen]:
    """Must be called once by a test that passes."""
    mark = request.node.get_closest_marker("fault")
    assert mark is not None, "only tests that are marked by `fault` see one"
    fault = Fault(*mark.args)
    said: list[str] = []

    def say(what: str) -> None:
        assert "|" not in what
        assert not said, "said twice"
        said.append(what)
        if request.config.getoption("--write-faults"):
            page.write({fault: what})
            return
        known = page.read().get(fault)
        assert known is not None, "docs/faults.md lacks this fault: run its test with --write-faults"
        assert page.same_words(known, what), f"docs/faults.md says: {known}"

    yield say
    if request.node.stash.get(_PASSED, False):
        assert said, "a test of a fault must say what it has seen"
