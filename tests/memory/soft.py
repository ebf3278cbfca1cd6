"""Stories in which deletes mark rows as deleted, with and without changes that come late.

The time of a change is its order value. What must be in the table is told by a rule of a few lines
(`SoftPlayer._applied`): the oracle of `soft_delete`.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa

from changelog.rows import KIND, order_column, sets_row
from sink.sources.source import TableBatch
from sink.table.microbatch import TableSink
from tests.memory.late import LatePlayer, late_story
from tests.memory.stories import SCHEMA, Content, Row, Story
from tests.memory.table import Snapshot


def soft_story(seed: int) -> Story:
    """A story without a TRUNCATE, which a table with soft deletes refuses. Others write no row of a key that the table
    has: nothing tells which of them a delete is about.
    """
    story = late_story(seed)
    operations = tuple(o if o.verb != "truncate" else replace(o, verb="delete") for o in story.operations)
    return replace(story, operations=operations, soft=True, late=seed % 2 == 0).without("append again")


def time_of(order: int) -> datetime:
    return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=order)


class SoftPlayer(LatePlayer):
    """Plays a story of soft deletes. Rows are (a, b, region, value, deleted, since)."""

    fixed = ("soft", "mode")
    schema = SCHEMA.append(pa.field("deleted", pa.bool_())).append(pa.field("since", pa.timestamp("us", "UTC")))

    def __init__(self, story: Story, folder: Path) -> None:
        super().__init__(story, folder)
        self._marks = ("since", "value") if story.late else ("since",)
        """What tells whether a row is still the one that was looked for. It may be deleted once more."""
        self._purging = frozenset[Row]()
        self.store.on_add = self._see

    def _see(self, snapshot: Snapshot) -> None:
        """Note what a purge makes of the rows. Unlike a micro-batch, it leaves the position where it is."""
        self.kept[snapshot.id] = frozenset(self.offsets())
        before = snapshot.parent
        while before is not None and "position" not in self.store.snapshots[before].sink:
            before = self.store.snapshots[before].parent
        if before is not None and snapshot.sink.get("position") == self.store.snapshots[before].sink["position"]:
            purging = self._purging

            def purged(content: Content) -> Content:
                places = [self.schema.names.index(name) for name in (*self.story.key, *self._marks)]
                gone = {row for row in content if row[4] and tuple(row[n] for n in places) in purging}
                orders = {self.key_of(row): row[3] for row in gone}
                self.deleted[snapshot.id] = self.deleted[snapshot.parent] | orders
                return Counter({row: count for row, count in content.items() if row not in gone})

            self.effects[snapshot.id] = purged

    def _apply(self, sink: TableSink, size: int) -> bool:
        """Rows to purge are looked for before the micro-batch, and go after it."""
        changes: Any = None
        if self.random.random() < 0.3:
            before = time_of(self.random.randrange(24))
            changes, _ = sink._open.engine.removals(sink.table, sink.plan, before)
        if not super()._apply(sink, size):
            return False
        if changes:
            found = changes.select([*self.story.key, *self._marks]).to_pylist()
            outer, self._purging = self._purging, frozenset(tuple(row.values()) for row in found)
            try:
                sink.apply_beside("purge", changes, len(changes))
            finally:
                self._purging = outer
        return True

    def _check_no_orphans(self) -> None:
        if self.story.late:
            super()._check_no_orphans()

    def _batch(self, start: int, end: int) -> TableBatch:
        batch = super()._batch(start, end)
        changes: Any = batch.changes
        removes = (~sets_row(changes.column(KIND).to_numpy())).tolist()
        orders = zip(changes.column(order_column(0)).to_pylist(), removes, strict=True)
        times = [time_of(order) if removed else None for order, removed in orders]
        if self.story.late:  # as the decoder does it
            place, field = changes.column_names.index("value"), self.schema.field("value")
            changes = changes.set_column(place, field, changes.column(order_column(0)))
        changes = changes.append_column("deleted", pa.array(removes, pa.bool_()))
        changes = changes.append_column("since", pa.array(times, self.schema.field("since").type))
        return replace(batch, records=lambda: changes, changes=changes)

    def _applied(
        self, content: Content, start: int, end: int, refused: Collection[int], *, came_late: bool = False
    ) -> Content:
        """Changes that the table has later rows of are left out. The others count in their order."""
        deleted = self._deleted_before(end)
        rows = {self.key_of(row): row for row in content.elements()}
        others = Counter(content) - Counter(rows.values())
        known = deleted | {key: row[3] for key, row in rows.items()} if self.story.late else {}
        said = sorted(zip(self.orders[start:end], self.messages[start:end], strict=True), key=lambda found: found[0])
        for order, message in said:
            for key, row in message.rows.items():
                old = rows.get(key)
                if order < known.get(key, -100):
                    continue
                if row is not None:
                    rows[key] = (*row, False, None)
                elif old is not None:
                    since = old[5] if old[4] else time_of(order)
                    rows[key] = (*old[:3], order if self.story.late else old[3], True, since)
                else:
                    deleted[key] = order
        return others + Counter(rows.values())
