"""Deletes mark rows as deleted, whatever happens to the sink, its index, and the table."""

import shutil
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from changelog.rows import RowKind
from deltawriters import DeltaWriter, delta, moves
from deltawriters.partial import Partials
from tests.memory.hunting import PARTS, STORIES, hunt, is_found
from tests.memory.late import TwoSinks
from tests.memory.soft import SoftPlayer, soft_story, time_of
from tests.memory.stories import SOFT_DELETE


@pytest.mark.timeout(60 + STORIES)
@pytest.mark.parametrize("part", range(PARTS))
def test_deletes_mark_rows(tmp_path: Path, part: int) -> None:
    hunt(soft_story, part, STORIES // 3, tmp_path / "story", SoftPlayer)


def _delete_rows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(delta, "as_partial", lambda changes, soft, key: changes)


def _let_the_last_delete_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Partials, "_may_be_deleted", lambda self, keys: keys < 0)


def _mark_what_is_not_there(patch: pytest.MonkeyPatch) -> None:
    def without_row(self: Partials, keys: Any, why: str) -> Any:
        return [self.completed(keys, None)], []

    patch.setattr(Partials, "without_row", without_row)


def _purge_rows_that_were_inserted_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(moves, "are_about_others", lambda removals, rows: np.zeros(len(removals), np.bool_))


def _forget_the_order_of_what_was_purged(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DeltaWriter, "_note_deleted", lambda self, *deleted: None)


@pytest.mark.parametrize(
    "mistake",
    [
        _delete_rows,
        _let_the_last_delete_count,
        _mark_what_is_not_there,
        _purge_rows_that_were_inserted_again,
        _forget_the_order_of_what_was_purged,
    ],
)
def test_soft_stories_find_a_mistake(mistake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake(monkeypatch)
    assert is_found(map(soft_story, range(1000)), tmp_path / "story", SoftPlayer)


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


SET_AGAIN = ((RowKind.INSERT, 1, 40),)
DELETED_AGAIN = (*SET_AGAIN, (RowKind.DELETE, 1, 50))


@pytest.mark.parametrize("late", ["drop", "apply"])
@pytest.mark.parametrize("when", ["before the look-up", "before the commit"])
@pytest.mark.parametrize(
    ("meanwhile", "expected"),
    [
        ((), {2: True, 3: False}),
        (SET_AGAIN, {1: False, 2: True, 3: False}),
        (DELETED_AGAIN, {1: True, 2: True, 3: False}),
    ],
)
def test_purge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str, late: str, meanwhile: Any, expected: dict[int, bool]
) -> None:
    """Rows that were deleted long ago go, unless they have changed since they were looked for, whoever did it."""
    monkeypatch.setitem(TwoSoftSinks.options, "late", late)
    sinks, waiting = TwoSoftSinks(tmp_path), [1]
    stream, backfill = sinks.process("stream", "backfill"), sinks.process("backfill", "stream")
    sinks.apply(stream, *((RowKind.INSERT, key, 10) for key in (1, 2, 3)))
    sinks.apply(stream, (RowKind.DELETE, 1, 20), (RowKind.DELETE, 2, 30))
    commit = backfill.table.commit
    sinks.apply(backfill, (RowKind.DELETE, 4, 10))

    def commit_after_others(request: Any) -> Any:
        if waiting and waiting.pop() and meanwhile:
            sinks.apply(stream, *meanwhile)
        return commit(request)

    backfill.table.refresh()
    found = backfill._open.engine.removals(backfill.table, backfill.plan, time_of(25))
    assert found[1] == 1
    if when == "before the commit":
        monkeypatch.setattr(backfill.table, "commit", commit_after_others)
    elif meanwhile:
        sinks.apply(stream, *meanwhile)
    backfill.apply_beside("purge", *found)
    assert sinks.marked == expected
    if not meanwhile and late == "drop":  # the order of its delete is known, also without the index
        shutil.rmtree(sinks.folder / "backfill")
        sinks.apply(sinks.process("backfill", "stream"), (RowKind.INSERT, 1, 15))
        assert sinks.marked == expected
        sinks.apply(stream, (RowKind.INSERT, 1, 25))
        assert sinks.marked == expected | {1: False}
