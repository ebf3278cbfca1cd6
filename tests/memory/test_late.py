"""Late changes are dropped, whatever happens to the sink, its index, and the table."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from deltawriters import tombstones
from deltawriters.keyindex import IndexSlice
from deltawriters.late import LateChanges
from deltawriters.order_values import OrderColumns
from sink.table.deleted_keys import DeletedKeys
from tests.memory.late import LatePlayer, late_story
from tests.memory.stories import Story, played, shrunk
from tests.memory.test_stories import PARTS, SEED, STORIES


def _failure(story: Story, folder: Path) -> Exception | None:
    try:
        played(replace(story, late=True, mode="upsert"), folder, LatePlayer)
    except Exception as error:  # noqa: BLE001 - any is a failure of the story
        return error
    return None


@pytest.mark.timeout(60 + STORIES)
@pytest.mark.parametrize("part", range(PARTS))
def test_late_changes_are_dropped(tmp_path: Path, part: int) -> None:
    folder = tmp_path / "story"
    for seed in range(SEED + part, SEED + STORIES, PARTS):
        story = late_story(seed)
        error = _failure(story, folder)
        if error is not None:
            simplest = shrunk(story, lambda simpler: _failure(simpler, folder) is not None)
            found = _failure(simplest, folder) or error
            pytest.fail(f"seed {seed}: {found!r}\n{simplest}")


def _apply_late_changes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LateChanges, "without", lambda self, changes: changes)


def _forget_deleted_keys_with_the_index(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DeletedKeys, "read", lambda self, names: [])


def _forget_which_files_have_deleted_keys(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DeletedKeys, "restored", lambda self, version, stored: version)


def _lose_deleted_keys_when_files_are_merged(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tombstones, "since", lambda parts, horizon: next(iter(parts)))


def _forget_deletes_when_runs_are_merged(patch: pytest.MonkeyPatch) -> None:
    merged = IndexSlice._merged

    def without(self: IndexSlice, infos: Any, first: int, last: int, most: int, horizon: int) -> Any:
        return merged(self, infos, first, last, most, 2**32 if horizon else 0)

    patch.setattr(IndexSlice, "_merged", without)


def _forget_the_truncate(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DeletedKeys, "floor", lambda self, version: b"")


def _forget_the_order_of_moved_rows(patch: pytest.MonkeyPatch) -> None:
    of_rows = OrderColumns.of_rows
    patch.setattr(OrderColumns, "of_rows", lambda self, rows: pa.array([b""] * len(of_rows(self, rows)), pa.binary()))


@pytest.mark.parametrize(
    "mistake",
    [
        _apply_late_changes,
        _forget_deleted_keys_with_the_index,
        _forget_which_files_have_deleted_keys,
        _lose_deleted_keys_when_files_are_merged,
        _forget_deletes_when_runs_are_merged,
        _forget_the_truncate,
        _forget_the_order_of_moved_rows,
    ],
)
def test_late_stories_find_a_mistake(mistake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake(monkeypatch)
    found = (_failure(late_story(seed), tmp_path / "story") for seed in range(1000))
    error = next((error for error in found if error is not None), None)
    assert error is not None, "no story was different"
    assert not isinstance(error, (TypeError, AttributeError, NameError)), error
