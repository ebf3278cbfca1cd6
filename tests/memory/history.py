"""Stories of a table with history, in which changes come late, or twice."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from changelog.rows import MOVED_SEPARATOR, RowKind, order_column
from sink.config import Config
from sink.sources.source import TableBatch
from sink.table.patterns import ResolvedTable
from tests.memory.late import LatePlayer, late_story
from tests.memory.stories import SCHEMA, Content, Key, Row, Story, _config
from tests.memory.table import Snapshot

Event = tuple[int, RowKind, Row]
"""The order value of a change, its kind, and the row."""


def versions(events: Sequence[Event], tracked: Sequence[int], truncates: Collection[int] = ()) -> list[Row]:
    """The oracle: all versions of a key, after all its changes in whatever order they came. At the same time, a row
    goes to another key before another one comes.

    :param tracked: places in rows.
    :param truncates: the order values of TRUNCATEs. Each is a delete of the key.
    :return: the rows with from, to, and whether there is no to.
    """
    found, current = list[Row](), None
    removals = [(order, RowKind.DELETE, ()) for order in truncates]
    said = ((order, kind in (RowKind.INSERT, RowKind.UPDATE_AFTER), row) for order, kind, row in (*events, *removals))
    for order, is_set, row in sorted(said, key=lambda event: event[:2]):
        if is_set and current is not None and all(current[0][n] == row[n] for n in tracked):
            current = (row, current[1])
            continue
        if current is not None:
            found.append((*current[0], current[1], order, False))
        current = (row, order) if is_set else None
    return [*found, (*current[0], current[1], None, True)] if current is not None else found


_MOVES = frozenset({"shift keys", "swap keys"})
_OF_OTHERS = 100
"""From this key on, rows are those of other writers."""


def history_story(seed: int) -> Story:
    """A story of late changes, without rows that others write for keys of the source."""
    story = late_story(seed, _MOVES)
    return replace(story, partitioned_by="is_current").without("append again")


class HistoryPlayer(LatePlayer):
    """Plays a story whose table has history. Each change has a value of its own, so that none of them leaves no
    version.
    """

    schema = pa.schema([*SCHEMA, ("valid_from", pa.int64()), ("valid_to", pa.int64()), ("is_current", pa.bool_())])
    truncates_in_turn = False

    def __init__(self, story: Story, folder: Path) -> None:
        super().__init__(story, folder)
        for place, message in enumerate(self.messages):
            if message.changes and story.operations and story.operations[self.orders[place]].verb in _MOVES:
                self.marks[place, 0] = MOVED_SEPARATOR.join(("region", "value"))
        self.events: dict[int | None, dict[Key, list[Event]]] = {None: {}}
        """All changes of each key that are applied, at each snapshot."""
        self.truncates: dict[int | None, frozenset[int]] = {None: frozenset()}
        """The order values of the TRUNCATEs."""

    def configured(self, tracked: str = "region value", late: str = "apply") -> tuple[Config, ResolvedTable]:
        story, merges = self.story, self.story.merges != "never"
        return _config(story.key, "upsert", story.deletes, story.order, merges=merges, late=late, tracked=tracked)

    def _batch(self, start: int, end: int) -> TableBatch:
        batch = super()._batch(start, end)
        changes: Any = batch.changes
        order = changes.column(order_column(0)).combine_chunks()
        for name, values in zip(  # as the decoder does it
            self.schema.names[len(SCHEMA) :],
            (order, pa.nulls(len(order), order.type), pa.repeat(True, len(order))),
            strict=True,
        ):
            changes = changes.append_column(name, values)
        return replace(batch, changes=changes)

    def _append_row(self, row: Row) -> None:
        super()._append_row((*row, row[3], None, True))

    def content(self, snapshot: Snapshot) -> Content:
        self.events.setdefault(snapshot.id, self.events[snapshot.parent])
        self.truncates.setdefault(snapshot.id, self.truncates[snapshot.parent])
        return super().content(snapshot)

    def _applied(
        self, content: Content, start: int, end: int, refused: Collection[int], *, came_late: bool = False
    ) -> Content:
        snapshot = self._snapshot_at(end)
        events = {key: list(found) for key, found in self.events[snapshot.parent].items()}
        known, new = self.truncates[snapshot.parent], set[int]()
        for place in range(start, end):
            message, order = self.messages[place], self.orders[place]
            new |= {order} - known if message.truncates else set()
            for number, (kind, row) in enumerate(message.changes):
                # a -D, too, is of the row before the one that its statement brings, whenever that one comes
                kind = RowKind.UPDATE_BEFORE if (place, number) in self.marks else kind
                events.setdefault(self.key_of(row), []).append((order, kind, row[:4]))
        self.events[snapshot.id], self.truncates[snapshot.id] = events, known | new
        rows = Counter(_closed(row, new) for row in content.elements() if row[0] >= _OF_OTHERS)
        for found in events.values():
            rows.update(versions(found, (2, 3), known | new))
        return rows


def _closed(row: Row, truncates: Collection[int]) -> Row:
    """Another writer's row after TRUNCATEs."""
    *values, start, end, _ = row
    end = min((order for order in (*truncates, end) if order is not None and order >= start), default=None)
    return (*values, start, end, end is None)
