"""How files are shared out that `deletes: copy-on-write` replaces."""

import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest

from deltawriters import TaskId
from deltawriters.content import DataFile
from deltawriters.keyindex import IndexedFile
from deltawriters.move import CopyGroup
from deltawriters.old_rows import DeletedRows, FoundRows
from deltawriters.scratch import Scratch
from sink.table import copy_on_write
from sink.table.moving import move_rows

MB = 1024 * 1024


def groups(*files: tuple[str, int], target: int = 512, cores: int = 2) -> list[CopyGroup]:
    """:param files: partition and size in MB of each."""
    touched = [DataFile(IndexedFile(str(n), 0, {"1": p}), size * MB) for n, (p, size) in enumerate(files)]
    deleted = DeletedRows({file.path: FoundRows(file.file, (), 0) for file in touched})
    return copy_on_write._groups(touched, deleted, target * MB, cores)


def sizes(found: list[CopyGroup]) -> list[int]:
    return sorted(round(group.size_in_bytes / MB) for group in found)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ([("a", 43), ("a", 44)], [43, 44]),  # about as large as a core's share, which neither must reach
        ([("a", 82), ("a", 3), ("a", 2)], [43, 44]),  # a file in two parts
        ([("a", 5), ("a", 6)], [11]),  # one file, although a core has nothing to do
        ([("a", 2), ("b", 2), ("c", 2)], [2, 2, 2]),  # which doesn't make more files
        ([("a", 900), ("a", 900)], [450, 450, 450, 450]),  # a group is no larger than a file
    ],
)
def test_each_core_gets_about_the_same(files: list[tuple[str, int]], expected: list[int]) -> None:
    found = groups(*files)
    assert sizes(found) == expected
    parts = {(file.path, file.part) for group in found for file in group.files}
    assert len(parts) == sum(len(group.files) for group in found)
    for path in {path for path, _ in parts}:
        (count,) = {part[1] for name, part in parts if name == path}
        assert {part[0] for name, part in parts if name == path} == set(range(count))
    for group in found:
        assert set(group.rows.found) == {file.path for file in group.files}


def test_many_small_partitions_are_few_tasks() -> None:
    touched = [DataFile(IndexedFile(str(n), 0, {"1": str(n)}), MB // 8) for n in range(80)]
    deleted = DeletedRows({file.path: FoundRows(file.file, (), 0) for file in touched})
    found = copy_on_write._groups(touched, deleted, 512 * MB, 200)
    assert [len(group.files) for group in found] == [8] * 10


def test_after_an_error_on_the_driver_all_files_are_known() -> None:
    """Else those of the other threads would stay."""
    failing = threading.Event()

    def move(task: TaskId, _: object, written: Callable[[list[str]], None]) -> dict[str, Any]:
        if task.partition == 0:
            failing.set()
            raise OSError("the disk is full")
        assert failing.wait(60)
        written([f"file of {task.partition}"])
        return {"files": [], "runs": [], "rows": 0, "bytes": 0}

    scratch = Scratch("a table", Mock())
    plan = Mock(operation="operation", move=move)
    two = groups(("a", 2), ("b", 2))
    with pytest.raises(OSError, match="the disk is full"):
        move_rows(Mock(), plan, two, scratch, on_driver=True, threads=4)
    assert scratch.paths == ["file of 1"]
