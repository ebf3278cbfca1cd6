"""What is installed with rowdelta may be used, changed and passed on, in a product too; `make licenses` lists it."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from sink.commands import packaging

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "licenses.md"


def table() -> str:
    """What pip-licenses says of rowdelta's dependencies and theirs. It fails on a license that pyproject.toml lacks."""
    names = {each.name for each in packaging.needed()} - {"rowdelta"} | packaging.OF_SPARK
    program = Path(sys.executable).with_name("pip-licenses")
    done = subprocess.run(
        [program, "--packages", *sorted(names)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_licenses_are_those_that_are_fine_and_the_page_lists_what_rowdelta_names() -> None:
    """Not what these packages need: that changes with their versions."""
    here, listed = _by_name(table()), _by_name(PAGE.read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = {re.split(r"[^\w-]", text)[0].lower() for text in project["dependencies"]}
    assert {name: listed.get(name) for name in named} == {name: here[name] for name in named}


def _by_name(text: str) -> dict[str, str]:
    rows = re.findall(r"\| (\S+) +\| (.*?) *\|", text)
    return {re.sub(r"[-_.]+", "-", name).lower(): license_name for name, license_name in rows}


if __name__ == "__main__":
    PAGE.write_text(PAGE.read_text(encoding="utf-8").partition("|")[0] + table(), encoding="utf-8")
