"""What is installed with rowdelta may be used and passed on, and the page lists it."""

import re
import tomllib

import pytest

from tests.licenses import ALLOWED, PAGE, installed, license_of, page

DEPENDENCIES = installed()


@pytest.mark.parametrize("name", DEPENDENCIES)
def test_every_license_is_one_of_those_that_are_fine(name: str) -> None:
    parts = re.split(r" AND | OR ", re.sub("[()]", "", license_of(DEPENDENCIES[name])))
    assert set(parts) <= ALLOWED


def test_the_page_lists_what_rowdelta_names() -> None:
    """Not what these packages need: that changes with their versions."""
    project = tomllib.loads((PAGE.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = {re.split(r"[^\w-]", text)[0].lower() for text in project["dependencies"]}
    assert named <= DEPENDENCIES.keys()
    listed = PAGE.read_text(encoding="utf-8")
    assert [name for name in named if f"| {name} | {license_of(DEPENDENCIES[name])} |\n" not in listed] == []
    assert listed.split("\n|---")[0] == page().split("\n|---")[0]
