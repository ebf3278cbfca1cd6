"""Runs of the tests at the same time, also in several containers, leave each other's temporary files alone."""

import os
from pathlib import Path

import pytest

from tests import memory_folder


def test_only_folders_of_runs_that_have_ended_are_removed(tmp_path: Path) -> None:
    first, second = memory_folder.claim(tmp_path), memory_folder.claim(tmp_path)
    (first.path / "left").touch()
    memory_folder.remove_left(tmp_path)
    assert set(tmp_path.iterdir()) == {first.path, second.path}
    os.close(first.lock)  # the system does it when a process ends, even if it is killed
    memory_folder.remove_left(tmp_path)
    assert set(tmp_path.iterdir()) == {second.path}
    os.close(second.lock)


@pytest.mark.parametrize(("limit", "enough"), [("max", True), (6 << 30, False), (1 << 63, True)])
def test_a_containers_limit_counts_as_well(tmp_path: Path, limit: object, enough: bool) -> None:
    file = tmp_path / "memory.max"
    file.write_text(f"{limit}\n")
    assert memory_folder.has_room(tmp_path, [tmp_path / "missing", file]) == (
        enough and memory_folder.has_room(tmp_path, [])
    )
