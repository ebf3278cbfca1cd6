"""The table of faults in docs/faults.md, which the tests of the faults write.

A test of a fault says what is done and what must come of it, and, when it has seen it, what came of it:

    @pytest.mark.fault("Kafka", "The broker is killed", "The sink waits and goes on")
    def test_a_broker_that_dies(seen: Seen) -> None:
        ...
        seen("Went on 4 s after the broker was back; table = source")

`make faults` runs these tests and writes the table. In every other run, a test fails whose words are not those of its
line in the page; figures may differ.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "faults.md"
SECTIONS = ("Processes", "Machine", "Kafka", "Kafka Connect", "Registry", "Catalog", "Storage", "Other writers")
"""The headings of the page, in their order: where a fault happens."""

_START = "<!-- What follows is written by `make faults`. -->"


@dataclass(frozen=True)
class Fault:
    section: str
    fault: str
    expected: str


def of_tests() -> list[Fault]:
    """The arguments of all `pytest.mark.fault(…)`, in the order of sections and files."""
    found = [fault for path in sorted((ROOT / "tests").rglob("test_*.py")) for fault in _marks(path)]
    return sorted(found, key=lambda fault: SECTIONS.index(fault.section))


def read() -> dict[Fault, str]:
    """What the page says was seen of each fault."""
    seen: dict[Fault, str] = {}
    section = ""
    for line in PAGE.read_text().partition(_START)[2].splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        cells = [cell.strip() for cell in line.split(" | ")]
        if line.startswith("| ") and len(cells) == 3 and cells[0] != "| Fault":
            seen[Fault(section, cells[0].removeprefix("| "), cells[1])] = cells[2].removesuffix(" |")
    return seen


def write(seen: Mapping[Fault, str]) -> None:
    """Write the lines of these faults anew. Others stay as they are, and those that no test has are left out."""
    known = {**read(), **seen}
    lines = [PAGE.read_text().partition(_START)[0] + _START]
    section = ""
    for fault in of_tests():
        if fault not in known:
            continue
        if fault.section != section:
            section = fault.section
            lines += ["", f"## {section}", "", "| Fault | Expected | Seen |", "|---|---|---|"]
        lines.append(f"| {fault.fault} | {fault.expected} | {known[fault]} |")
    PAGE.write_text("\n".join(lines) + "\n")


def same_words(one: str, other: str) -> bool:
    """Whether two texts differ in figures only."""
    return _without_figures(one) == _without_figures(other)


def _without_figures(text: str) -> str:
    return re.sub(r"\d+(\.\d+)?", "#", text)


def _marks(path: Path) -> Iterator[Fault]:
    text = path.read_text()
    if "mark.fault(" not in text:
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.fault":
            yield Fault(*(ast.literal_eval(argument) for argument in node.args))
