"""A table with history has the versions that all changes make, in whatever order they come, whatever happens to the
sink, its index, and the table.
"""

import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pytest

from changelog.rows import KIND, RowKind
from changelog.versions import VersionColumns
from deltawriters import history, resolve
from deltawriters.history import History
from deltawriters.keyindex import ClosedRows, IndexSlice
from deltawriters.order_values import OrderColumns
from sink.errors import TableError
from sink.table.deleted_keys import DeletedKeys
from sink.table.keyindex import KeyIndex
from tests.memory.history import HistoryPlayer, history_story
from tests.memory.hunting import PARTS, STORIES, hunt, is_found
from tests.memory.late import TwoSinks
from tests.memory.storage import Clock
from tests.memory.stories import Message, Operation, Process, Story


@pytest.mark.timeout(60 + STORIES)
@pytest.mark.parametrize("part", range(PARTS))
def test_all_versions_are_there(tmp_path: Path, part: int) -> None:
    hunt(history_story, part, STORIES // 3, tmp_path / "story", HistoryPlayer)


def _forget_closed_versions(patch: pytest.MonkeyPatch) -> None:
    nothing = np.empty(0, np.int64)
    patch.setattr(IndexSlice, "closed_versions", lambda self, high, low: ClosedRows(nothing, nothing, nothing, ()))


def _index_closed_versions_as_current_rows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(resolve, "of_versions", lambda low, orders, base: low)


def _concern_only_later_versions(patch: pytest.MonkeyPatch) -> None:
    def concerned(closed: ClosedRows, late: Any, ids: Any, orders: Any) -> ClosedRows:
        found = all_concerned(closed, late, ids, orders)
        return found.take(np.arange(1, len(found.query)))

    patch.setattr(History, "_concerned", staticmethod(concerned))


all_concerned = History._concerned


def _end_versions_at_the_next_one(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(History, "_deletes", lambda self, keys, latest: nothing(self, keys[:0], latest[:0]))


nothing = History._deletes


def _forget_truncates(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DeletedKeys, "truncates", lambda self, version: ())


def _know_only_the_last_truncate(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DeletedKeys, "truncates", lambda self, version: all_truncates(self, version)[-1:])


all_truncates = DeletedKeys.truncates


def _truncate_only_keys_with_changes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(IndexSlice, "live_rows", lambda self, first, last: iter(()))


def _remove_whatever_row_a_key_has(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(history, "are_about_others", lambda removals, rows: np.zeros(len(removals), np.bool_))


def _leave_rows_that_come_before_the_commit(patch: pytest.MonkeyPatch) -> None:
    def look_up_again(self: KeyIndex, slice_: Any, results: Any) -> Any:
        return looked_up_again(self, slice_, [replace(result, truncates=[]) for result in results])

    patch.setattr(KeyIndex, "look_up_again", look_up_again)


looked_up_again = KeyIndex.look_up_again


def _remove_no_row_that_a_truncate_closes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(History, "_read_off", lambda self, events, had_row: read_off(self, events, had_row & False))


read_off = History._read_off


@pytest.mark.parametrize(
    "mistake",
    [
        _forget_closed_versions,
        _index_closed_versions_as_current_rows,
        _concern_only_later_versions,
        _end_versions_at_the_next_one,
        _forget_truncates,
        _know_only_the_last_truncate,
        _truncate_only_keys_with_changes,
        _remove_whatever_row_a_key_has,
    ],
)
def test_stories_of_history_find_a_mistake(mistake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake(monkeypatch)
    assert is_found(map(history_story, range(3000)), tmp_path / "story", HistoryPlayer)


@pytest.mark.parametrize(
    ("mistake", "verbs", "step"),
    [
        (_leave_rows_that_come_before_the_commit, ("set", "truncate"), "send a commit"),
        (_remove_no_row_that_a_truncate_closes, ("truncate", "truncate"), "look at the table"),
    ],
)
def test_a_truncate_closes_rows_of_others(
    mistake: Any, verbs: Any, step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that come just before the commit, and those that are older than an earlier TRUNCATE."""
    process = Process((1,), (((step, 1), "append"),))
    operations = tuple(Operation(verb, 1) for verb in verbs)
    stories = [Story(operations, (Process((1,)), process), seed=seed) for seed in range(20)]
    assert not is_found(stories, tmp_path / "story", HistoryPlayer)
    mistake(monkeypatch)
    assert is_found(stories, tmp_path / "story", HistoryPlayer)


SPARKS = {  # micro-batches are between bars; each event is U or D, its order value, and the row's value
    "U10A U20C | U15B": "A10-15 B15-20 C20-",
    "U10A U20C | U15B | U16A": "A10-15 B15-16 A16-20 C20-",
    "U10A U20C | U15B | U16A | U5Z": "Z5-10 A10-15 B15-16 A16-20 C20-",
    "U10A U20C | D15": "A10-15 C20-",
    "U10A U20C | D15 | U17A": "A10-15 A17-20 C20-",
    "U10A | D20 | D15": "A10-15",
    "U10A | D20 | D15 | U17B": "A10-15 B17-20",
    "U5A U10A D20 | D7": "A5-7 A10-20",
    "D20 | D30 | D20 | U25A": "A25-30",
    "D20 | D30 | D20 | U25A | U10B": "B10-20 A25-30",
    "D20 | D30 | D20 | U25A | U10B | U40C": "B10-20 A25-30 C40-",
    "U30A | D50 D60": "A30-50",
    "U30A | D50 D60 | U55A": "A30-50 A55-60",
    "U10A D20 U30A": "A10-20 A30-",
    "U10A | D5": "A10-",
    "U10A | D5 | U3A": "A3-5 A10-",
    "U5A U10A U15B": "A5-15 B15-",
    "U5A U10A U15A U20C | U12B": "A5-12 B12-15 A15-20 C20-",
    "U30C U10A D25 U20B U11A": "A10-20 B20-25 C30-",
    "U10A | D20 | U10A U10A": "A10-20",
    "U10A U20A | D20": "A10-20",
}
"""What AutoCDC of Spark 4.3.0 (`Scd2ForeachBatchHandler.reconcileMicrobatch`) made of these histories of one key."""


OURS = {  # V is a -U; after ! the index is lost
    "D5 | U5A | U2B": "B2-5 A5-",
    "U1A | D5 | U5B ! U3C": "A1-3 C3-5 B5-",
    "U5A | U5B | U5A | U5B": "A5-5 B5-",
    "U5A | U5B | U5B ! U5A": "A5-5 B5-",
    "U1A | U5A | V5A U9A": "A1-",
    "U1A | U5A | V9A U9B": "A1-9 B9-",
    "U10A | D10": "A10-10",
    "U50A | U70A | D60 | U65B": "A50-60 B65-70 A70-",
    "U10B | U18B | U14A | D17": "B10-14 A14-17 B18-",
    "D5 | U10A / U40B": "B40-",
    "U10A | T20": "A10-20",
    "U10A | T20 | U20B | T20": "A10-20 B20-",
    "U10A | T20 T30 | U15B | U25C": "A10-15 B15-20 C25-30",
    "T20 | T30 | U15B ! U10A": "A10-15 B15-20",
    "T20 | U20A": "A20-",
    "U10A U30B | T20": "A10-20 B30-",
    "U10A U30A | T20": "A10-20 A30-",
    "U10A D15 | T20 T12": "A10-12",
}
"""Several changes of the same time, -U, late changes before one that left no version, and TRUNCATE (T), which may come
late. After / another writer has deleted the rows."""


@pytest.mark.parametrize("history", [*SPARKS, *OURS])
def test_the_outcome_of_a_history(tmp_path: Path, history: str) -> None:
    assert _outcome(history, tmp_path) == (SPARKS | OURS)[history]


@pytest.mark.parametrize(
    ("history", "outcome"),
    [("U10A T20 | U15B", "A10-20"), ("T20 | T30 ! U25A", ""), ("U10A U30B | T20 | U20C U40D", "A10-20 B30-40 D40-")],
)
def test_the_outcome_without_late_changes(tmp_path: Path, history: str, outcome: str) -> None:
    assert _outcome(history, tmp_path, late="drop") == outcome


def test_a_key_whose_tombstone_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its closed versions still say until when it was there."""
    monkeypatch.setattr(DeletedKeys, "horizon", 2**32 - 1)
    assert _outcome("U1A | D10 | U5B", tmp_path) == "A1-5 B5-10"


class TwoSinksOfVersions(TwoSinks, HistoryPlayer):
    options: ClassVar[dict[str, Any]] = {"history": {"track": ["value"]}, "late": "apply"}

    @property
    def versions(self) -> set[tuple[Any, ...]]:
        """(key, from, to)"""
        rows = [row for file in self.store.live.values() for row in self._live_rows(file)]
        found = {(row[0], *row[4:6]) for row in rows}
        assert len(found) == len(rows)
        return found


@pytest.mark.parametrize(
    ("others", "more", "own", "expected", "is_enough"),
    [
        ((RowKind.UPDATE_AFTER, 1, 30), (), (), {(1, 10, 30), (1, 30, 50), (1, 50, None), (2, 10, None)}, False),
        ((RowKind.UPDATE_AFTER, 1, 60), (), (), {(1, 10, 50), (1, 50, 60), (1, 60, None), (2, 10, None)}, False),
        ((RowKind.DELETE, 1, 40), (), (), {(1, 10, 40), (1, 50, None), (2, 10, None)}, False),
        ((RowKind.INSERT, 3, 30), (), (), {(1, 10, 50), (1, 50, None), (2, 10, None), (3, 30, None)}, True),
        ((None, 0, 70), (), (), {(1, 10, 50), (1, 50, 70), (2, 10, 70)}, False),
        ((RowKind.INSERT, 3, 30), (), (None, 0, 70), {(1, 10, 50), (1, 50, 70), (2, 10, 70), (3, 30, 70)}, False),
        (
            (RowKind.INSERT, 3, 30),
            (None, 0, 9),
            (),
            {(1, 10, 50), (1, 50, None), (2, 10, None), (3, 30, None)},
            True,
        ),
    ],
)
def test_another_sink_makes_versions_before_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: Any, more: Any, own: Any, expected: Any, is_enough: bool
) -> None:
    """Those of its keys take part. A change of other keys doesn't make the micro-batch be written again.

    :param more: comes before both.
    """
    sinks = TwoSinksOfVersions(tmp_path)
    stream = sinks.process("stream", "backfill")
    sinks.apply(stream, *filter(None, (more,)), (RowKind.INSERT, 1, 10), (RowKind.INSERT, 2, 10))
    backfill = sinks.process("backfill", "stream")
    enough = sinks.before_commit(monkeypatch, backfill, lambda: sinks.apply(stream, others))
    sinks.apply(backfill, (RowKind.UPDATE_AFTER, 1, 50), *filter(None, (own,)))
    assert (sinks.versions, enough) == (expected, [is_enough])


def test_a_version_needs_an_end_that_may_be_null(tmp_path: Path) -> None:
    player = HistoryPlayer(Story((), (), partitioned_by="is_current"), tmp_path)
    place = player.schema.get_field_index("valid_to")
    player.store.schema = player.schema.set(place, player.schema.field(place).with_nullable(False))
    with pytest.raises(TableError, match=r"column valid_to can't be NULL, .* ALTER COLUMN valid_to DROP NOT NULL"):
        player.opened(Clock())


def test_a_repeat_is_told_though_another_event_lies_between() -> None:
    """With several order columns, the end of a version has the first one's value only, and comes after its row."""
    table: Any = SimpleNamespace(arrow_schema=pa.schema([("id", pa.int64()), ("region", pa.string())]))
    history = History(table, VersionColumns("start", "end", "current"), ["id"], OrderColumns(("a", "b")))
    events = pa.table(
        {
            "id": pa.array([1] * 4),
            "region": ["A", None, "A", "B"],
            KIND: pa.array(
                [RowKind.UPDATE_AFTER, RowKind.DELETE, RowKind.UPDATE_AFTER, RowKind.UPDATE_AFTER], pa.int8()
            ),
            "_rowdelta_event_key": pa.array([0] * 4),
            "_rowdelta_event_change": pa.array([-1, -1, 0, 1]),
            "_rowdelta_event_order": pa.array([b"7.1", b"7", b"7.1", b"7.1"]),
        }
    )
    assert history._without_repeats(events).column("_rowdelta_event_change").to_pylist() == [-1, -1, 1]


def _outcome(history: str, folder: Path, late: str = "apply") -> str:
    player = HistoryPlayer(Story((), (), mode="upsert", late=True, partitioned_by="is_current"), folder)
    player.config = player.configured(tracked="region", late=late)
    sink = player.opened(Clock())
    for mark, text in re.findall(r"([|!/]?)([^|!/]+)", history):
        if mark == "!":
            shutil.rmtree(player.index)
            sink = player.opened(Clock())
        if mark == "/":
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(player.random, "randrange", lambda *_: player.messages[-1].changes[0][1][3])
                player._delete()
        for event in text.split():
            kind = {"U": RowKind.UPDATE_AFTER, "D": RowKind.DELETE, "V": RowKind.UPDATE_BEFORE}.get(event[0])
            order = int(event.strip("UDVTABCZ"))
            row = (1, "b1", event[-1] if event[-1].isalpha() else None, order)
            changes = () if kind is None else ((kind, row),)
            player.messages.append(Message(changes, {}, truncates=kind is None))
            player.orders.append(order)
        player._apply(sink, len(text.split()))
    rows = [row for file in player.store.live.values() for row in player._live_rows(file)]
    versions = sorted((start, end is None, end, region) for _, _, region, _, start, end, _ in rows)
    return " ".join(f"{region}{start}-{'' if end is None else end}" for start, _, end, region in versions)
