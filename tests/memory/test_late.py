"""Late changes are dropped, whatever happens to the sink, its index, and the table."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from changelog.rows import RowKind
from deltawriters import tombstones
from deltawriters.keyindex import IndexSlice
from deltawriters.late import LateChanges
from deltawriters.order_values import OrderColumns
from sink.table.deleted_keys import DeletedKeys
from tests.memory.hunting import PARTS, STORIES, hunt, is_found
from tests.memory.late import LatePlayer, TwoSinks, late_story
from tests.memory.stories import Message, Process, Story, tiny_thresholds


@pytest.mark.timeout(60 + STORIES)
@pytest.mark.parametrize("part", range(PARTS))
def test_late_changes_are_dropped(tmp_path: Path, part: int) -> None:
    hunt(late_story, part, STORIES // 3, tmp_path / "story", LatePlayer)


TRUNCATE = (None, 0, 100)


@pytest.mark.parametrize("in_between", [False, True])
@pytest.mark.parametrize(
    ("others", "first", "expected", "is_enough"),
    [
        ((RowKind.DELETE, 1, 100), (), {2: 10, 3: 50}, False),
        ((RowKind.DELETE, 3, 100), (), {1: 50, 2: 10}, False),
        (TRUNCATE, (), {}, False),
        (TRUNCATE, ((None, 0, 40),), {}, False),
        ((RowKind.UPDATE_AFTER, 1, 100), (), {1: 100, 2: 10, 3: 50}, False),
        ((RowKind.UPDATE_AFTER, 1, 100), ((None, 0, 40),), {1: 50, 3: 50}, True),
        ((RowKind.UPDATE_AFTER, 1, 20), (), {1: 50, 2: 10, 3: 50}, True),
        (None, (), {1: 50, 2: 10, 3: 50}, True),
    ],
)
def test_another_sink_of_the_table(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    others: Any,
    first: Any,
    expected: Any,
    is_enough: bool,
    in_between: bool,
) -> None:
    """What it changes before the commit counts too. A compaction makes nothing late, nor does an earlier change: then
    the micro-batch isn't written again, so a busy table can't block it for ever.
    """
    sinks = TwoSinks(tmp_path)
    stream = sinks.process("stream", "backfill")
    sinks.apply(stream, (RowKind.INSERT, 1, 10), (RowKind.INSERT, 2, 10))
    backfill = sinks.process("backfill", "stream")

    def happen() -> None:
        sinks._compact() if others is None else sinks.apply(stream, others)

    enough = sinks.before_commit(monkeypatch, backfill, happen if in_between else lambda: None)
    if not in_between:
        happen()
    sinks.apply(backfill, *first, (RowKind.UPDATE_AFTER, 1, 50), (RowKind.UPDATE_AFTER, 3, 50))
    assert sinks.rows == expected
    assert enough in ([], [is_enough] * in_between)


def test_a_truncate_says_nothing_of_later_ones(tmp_path: Path) -> None:
    """Neither of a later TRUNCATE, nor of what another sink deleted later."""
    sinks = TwoSinks(tmp_path)
    stream, backfill = sinks.process("stream", "backfill"), sinks.process("backfill", "stream")
    sinks.apply(stream, (RowKind.INSERT, 1, 10), (RowKind.DELETE, 2, 100))
    sinks.apply(backfill, (RowKind.UPDATE_AFTER, 2, 60))
    assert sinks.rows == {1: 10}
    sinks.apply(backfill, (None, 0, 50))
    sinks.apply(backfill, (None, 0, 40))
    sinks.apply(backfill, *((RowKind.UPDATE_AFTER, key, order) for key, order in ((1, 45), (2, 60), (3, 60))))
    assert sinks.rows == {3: 60}


def _apply_late_changes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LateChanges, "divided", lambda self, changes, index: (changes, changes.slice(0, 0)))


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
    patch.setattr(DeletedKeys, "truncates", lambda self, version: ())


def _forget_the_order_of_moved_rows(patch: pytest.MonkeyPatch) -> None:
    of_rows = OrderColumns.of_rows
    patch.setattr(OrderColumns, "of_rows", lambda self, rows: pa.array([b""] * len(of_rows(self, rows)), pa.binary()))


@pytest.mark.parametrize(
    "mistake",
    [
        _apply_late_changes,
        _forget_deleted_keys_with_the_index,
        _forget_which_files_have_deleted_keys,
        _forget_deletes_when_runs_are_merged,
        _forget_the_truncate,
        _forget_the_order_of_moved_rows,
    ],
)
def test_late_stories_find_a_mistake(mistake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake(monkeypatch)
    assert is_found(map(late_story, range(1000)), tmp_path / "story", LatePlayer)


@pytest.mark.parametrize("is_mistaken", [False, True])
def test_deleted_keys_survive_merges_of_their_files_and_the_loss_of_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_mistaken: bool
) -> None:
    if is_mistaken:
        _lose_deleted_keys_when_files_are_merged(monkeypatch)
    story = Story((), (Process((1,) * 8, then=("index lost",) * 20),), late=True)
    player = LatePlayer(story, tmp_path)
    rows = [(key, f"b{key}", "eu", order) for order in range(2) for key in range(4)]
    said = [Message(((RowKind.UPDATE_AFTER, row),), {(row[0],): row}) for row in rows[:4]]
    said += [Message(((RowKind.DELETE, row),), {(row[0],): None}) for row in rows[:4]]
    player.messages = [*said, *(Message(((RowKind.UPDATE_AFTER, row),), {(row[0],): row}) for row in rows[4:])]
    player.orders = [0] * 4 + [9] * 4 + [1] * 4
    with tiny_thresholds(story):
        if is_mistaken:
            with pytest.raises(AssertionError, match="too much"):
                player.play()
        else:
            player.play()
