"""Statements that move keys, as logs have them if keys are checked at a statement's end: what tests of both table
formats have in common.
"""

from collections.abc import Callable, Sequence
from typing import Any

from tests.sink.harness import Job

Row = dict[str, Any]
ROWS = {1: "a", 2: "b", 3: "c", 4: "d", 5: "e"}


def row(key: int, name: str) -> Row:
    return {"id": key, "name": name, "size": 10 * ord(name)}


def shift(by: int = 1) -> list[tuple[Row, Row]]:
    """`UPDATE t SET id = id + 1`: each row before and after."""
    return [(row(key, name), row(key + by, name)) for key, name in ROWS.items()]


def swap() -> list[tuple[Row, Row]]:
    """Of the keys 2 and 3, after `shift`."""
    return [(row(2, "a"), row(3, "a")), (row(3, "b"), row(2, "b"))]


EXPECTED = sorted([row(3, "a"), row(2, "b"), row(4, "c"), row(5, "d"), row(6, "e")], key=lambda found: int(found["id"]))


def play(job: Job, kinds: tuple[str, str], files: int, rows: Callable[[], list[Row]]) -> None:
    """Both statements, in one micro-batch or in several."""
    job.write([("+I", row(key, name)) for key, name in ROWS.items()])
    job.run()
    pairs = shift() + swap()
    changes = [change for old, new in pairs for change in ((kinds[0], old), (kinds[1], new))]
    for part in _parts(changes, files):
        job.write(part)
    job.run()
    assert [{name: found[name] for name in ("id", "name", "size")} for found in rows()] == EXPECTED


def _parts(changes: Sequence[Any], count: int) -> list[list[Any]]:
    """Parts that end in the middle of moves."""
    size = len(changes) if count == 1 else 2 * (len(changes) // count // 2) + 1
    return [list(changes[start : start + size]) for start in range(0, len(changes), size)]
