"""Deletes mark rows as deleted, whatever happens to the sink, its index, and the table."""

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from changelog.rows import RowKind
from deltawriters import delta
from deltawriters.partial import Partials
from tests.memory.late import TwoSinks
from tests.memory.soft import SoftPlayer, soft_story
from tests.memory.stories import SOFT_DELETE, Story, played, shrunk
from tests.memory.test_stories import PARTS, SEED, STORIES


def _failure(story: Story, folder: Path) -> Exception | None:
    try:
        played(replace(story, soft=True, mode="upsert"), folder, SoftPlayer)
    except Exception as error:  # noqa: BLE001 - any is a failure of the story
        return error
    return None


@pytest.mark.timeout(60 + STORIES)
@pytest.mark.parametrize("part", range(PARTS))
def test_deletes_mark_rows(tmp_path: Path, part: int) -> None:
    folder = tmp_path / "story"
    for seed in range(SEED + part, SEED + STORIES // 3, PARTS):
        story = soft_story(seed)
        error = _failure(story, folder)
        if error is not None:
            simplest = shrunk(story, lambda simpler: _failure(simpler, folder) is not None)
            found = _failure(simplest, folder) or error
            pytest.fail(f"seed {seed}: {found!r}\n{simplest}")


def _delete_rows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(delta, "as_partial", lambda changes, soft, key: changes)


def _let_the_last_delete_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Partials, "_may_be_deleted", lambda self, keys: keys < 0)


def _mark_what_is_not_there(patch: pytest.MonkeyPatch) -> None:
    def without_row(self: Partials, keys: Any, why: str) -> Any:
        return [self.completed(keys, None)], []

    patch.setattr(Partials, "without_row", without_row)


@pytest.mark.parametrize("mistake", [_delete_rows, _let_the_last_delete_count, _mark_what_is_not_there])
def test_soft_stories_find_a_mistake(mistake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake(monkeypatch)
    found = (_failure(soft_story(seed), tmp_path / "story") for seed in range(100))
    error = next((error for error in found if error is not None), None)
    assert error is not None, "no story was different"
    assert not isinstance(error, (TypeError, AttributeError, NameError)), error


class TwoSoftSinks(TwoSinks, SoftPlayer):
    options: ClassVar[dict[str, Any]] = {"soft_delete": SOFT_DELETE}

    @property
    def marked(self) -> dict[int, bool]:
        rows = [row for file in self.store.live.values() for row in self._live_rows(file)]
        found = {row[0]: row[4] for row in rows}
        assert len(found) == len(rows)
        return found


@pytest.mark.parametrize("in_between", [False, True])
def test_another_sink_inserts_the_key_between_look_up_and_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_between: bool
) -> None:
    """The key had no row when it was looked up. Its row isn't removed, but marked."""
    sinks, waiting = TwoSoftSinks(tmp_path), [1]
    stream, backfill = sinks.process("stream", "backfill"), sinks.process("backfill", "stream")
    sinks.apply(stream, (RowKind.INSERT, 1, 10))
    commit = backfill.table.commit

    def commit_after_others(request: Any) -> Any:
        if waiting and waiting.pop():
            sinks.apply(stream, (RowKind.INSERT, 2, 20), (RowKind.INSERT, 3, 20))
        return commit(request)

    if in_between:
        monkeypatch.setattr(backfill.table, "commit", commit_after_others)
    else:
        sinks.apply(stream, (RowKind.INSERT, 2, 20), (RowKind.INSERT, 3, 20))
    sinks.apply(backfill, (RowKind.DELETE, 2, 50), (RowKind.DELETE, 4, 50))
    assert sinks.marked == {1: False, 2: True, 3: False}
