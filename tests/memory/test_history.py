"""A table with history has the versions that all changes make, in whatever order they come, whatever happens to the
sink, its index, and the table.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltawriters import history, move, resolve
from deltawriters.history import History
from deltawriters.keyindex import IndexSlice
from sink.table import keyindex
from tests.memory.history import HistoryPlayer, history_story
from tests.memory.stories import Story, played, shrunk
from tests.memory.test_stories import PARTS, SEED, STORIES


def _failure(story: Story, folder: Path) -> Exception | None:
    try:
        played(replace(story, late=True, mode="upsert"), folder, HistoryPlayer)
    except Exception as error:  # noqa: BLE001 - any is a failure of the story
        return error
    return None


@pytest.mark.timeout(60 + STORIES)
@pytest.mark.parametrize("part", range(PARTS))
def test_all_versions_are_there(tmp_path: Path, part: int) -> None:
    folder = tmp_path / "story"
    for seed in range(SEED + part, SEED + STORIES // 3, PARTS):
        story = history_story(seed)
        error = _failure(story, folder)
        if error is not None:
            simplest = shrunk(story, lambda simpler: _failure(simpler, folder) is not None)
            found = _failure(simplest, folder) or error
            pytest.fail(f"seed {seed}: {found!r}\n{simplest}")


def _forget_closed_versions(patch: pytest.MonkeyPatch) -> None:
    probe = IndexSlice.probe

    def current_only(self: IndexSlice, high: Any, low: Any, first: int, last: int) -> Any:
        found = probe(self, high, low, first, last)
        is_closed = [not file.partition.get("is_current", True) for file in found.files]
        kept = ~np.array([*is_closed, False])[found.file]
        return replace(found, query=found.query[kept], file=found.file[kept], pos=found.pos[kept])

    patch.setattr(IndexSlice, "probe", current_only)


def _index_closed_versions_as_current_rows(patch: pytest.MonkeyPatch) -> None:
    for module in (resolve, history, keyindex):
        patch.setattr(module, "of_versions", lambda low, is_current: low)


def _let_moved_versions_supersede(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(move, "is_current", lambda index, rows: np.ones(len(rows), np.bool_))


def _end_versions_at_the_next_one(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(History, "_deletes", lambda self, keys, latest: nothing(self, keys[:0], latest[:0]))


nothing = History._deletes


@pytest.mark.parametrize(
    "mistake",
    [
        _forget_closed_versions,
        _index_closed_versions_as_current_rows,
        _let_moved_versions_supersede,
        _end_versions_at_the_next_one,
    ],
)
def test_stories_of_history_find_a_mistake(mistake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake(monkeypatch)
    found = (_failure(history_story(seed), tmp_path / "story") for seed in range(3000))
    error = next((error for error in found if error is not None), None)
    assert error is not None, "no story was different"
    assert not isinstance(error, (TypeError, AttributeError, NameError)), error
