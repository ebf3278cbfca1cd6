"""Rows are corrected beside a run of the sink, which goes on from its position."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from changelog.rows import RowKind
from sink.errors import AmendedError
from sink.run.maintenance import Maintenance
from sink.table import open_table
from sink.table.microbatch import TableSink
from tests.memory.late import TwoSinks
from tests.memory.storage import Clock
from tests.memory.stories import Message


class Healed(TwoSinks):
    """A run whose table somebody corrects."""

    def heal(self, *changes: tuple[RowKind, int, int]) -> None:
        """Rows as they are in the source, or keys that it doesn't have: kind, key and order value."""
        self.messages = [Message(((kind, (key, "b", "eu", order)),), {}) for kind, key, order in changes]
        self.orders = [order for *_, order in changes]
        rows: Any = self._batch(0, len(changes)).changes
        self.opened(Clock(), is_guest=True).apply_beside("reconcile", rows, len(changes))

    def run(self) -> TableSink:
        return self.process("stream", "another")


@pytest.mark.parametrize("restarted_after", [0, 1, 2])
def test_a_run_goes_on_after_each_correction(tmp_path: Path, restarted_after: int) -> None:
    """Also if it has been opened after an earlier one, and has committed nothing since."""
    table = Healed(tmp_path)
    run = table.run()
    table.apply(run, (RowKind.INSERT, 1, 10))
    for number in range(3):
        if number == restarted_after:
            run = table.run()
        table.heal((RowKind.INSERT, 1, 20 + number))
    with pytest.raises(AmendedError):
        table.apply(run, (RowKind.INSERT, 2, 30))
    table.apply(table.run(), (RowKind.INSERT, 2, 30))
    assert table.rows == {1: 22, 2: 30}


def test_a_run_goes_on_if_the_table_was_taken_back_before_a_correction(tmp_path: Path) -> None:
    table = Healed(tmp_path)
    table.apply(table.run(), (RowKind.INSERT, 1, 10))
    before = table.store.current
    table.apply(table.run(), (RowKind.INSERT, 1, 20))
    run = table.run()
    table.store.current = before
    table.heal((RowKind.INSERT, 2, 10))
    with pytest.raises(AmendedError):
        table.apply(run, (RowKind.INSERT, 3, 30))
    table.apply(table.run(), (RowKind.INSERT, 3, 30))
    assert table.rows == {1: 10, 2: 10, 3: 30}


def test_a_correction_is_not_late_and_other_changes_still_are(tmp_path: Path) -> None:
    """Whatever the order values of the table's rows: the source may have been restored from a backup. What was deleted
    before stays known, and what the correction deletes too.
    """
    table = Healed(tmp_path)
    table.apply(table.run(), *((RowKind.INSERT, key, 100) for key in (1, 2, 3)), (RowKind.DELETE, 4, 100))
    table.heal((RowKind.INSERT, 1, 50), (RowKind.DELETE, 2, 100))
    assert table.rows == {1: 50, 3: 100}
    table.apply(
        table.run(), *((RowKind.UPDATE_AFTER, key, order) for key, order in ((1, 40), (2, 90), (3, 90), (4, 90)))
    )
    assert table.rows == {1: 50, 3: 100}
    table.apply(table.run(), *((RowKind.UPDATE_AFTER, key, 101) for key in (1, 2, 3, 4)))
    assert table.rows == dict.fromkeys((1, 2, 3, 4), 101)


def test_who_corrects_rows_is_waited_for_and_not_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If he was killed, one run waits, and none after it."""
    waited, now = list[float](), iter(range(0, 1000, 25))
    monkeypatch.setattr(open_table, "time", SimpleNamespace(sleep=waited.append, monotonic=lambda: next(now)))
    table = Healed(tmp_path)
    table.apply(table.run(), (RowKind.INSERT, 1, 10))
    killed = table.opened(Clock(), is_guest=True).going_first()
    killed.__enter__()
    for number in (2, 3):
        table.apply(table.run(), (RowKind.INSERT, number, 10))
        assert len(waited) == 2
    assert table.rows == {1: 10, 2: 10, 3: 10}


def test_maintenance_has_a_corrected_table_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would fail until the table's next micro-batch."""
    amended, said = AmendedError("rows were corrected"), list[object]()

    def refuse(*_: object) -> None:
        raise amended

    for step in ("_merge", "_drop", "_expire", "_clean", "_purge", "_reconcile", "_move"):
        monkeypatch.setattr(Maintenance, step, refuse)
    supervisor: Any = SimpleNamespace(set_aside=lambda member, error: said.append((member, error)))
    member: Any = SimpleNamespace(target="lake.t", sink=MagicMock())
    spark, config = MagicMock(), MagicMock()
    Maintenance(spark, config, supervisor)._attend(member)
    assert said == [(member, amended)]
