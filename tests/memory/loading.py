"""Stories of loads: the source changes while its table is read part by part, and then its changes are applied.

The connector may have a change before other sessions see it, or long after. One TRUNCATE, before the load or while its
parts are read, is in no message.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from threading import Lock
from typing import Any

import pyarrow as pa

from changelog.rows import BAD, KIND, MOVED, RowKind, order_column
from sink.errors import TableError
from sink.sources.source import DatabaseRows
from sink.table.load_state import times_before
from sink.table.loading import Loading, is_due
from sink.table.microbatch import TableSink
from tests.memory.storage import Clock
from tests.memory.stories import _BAD_TYPE, PREFIX, SCHEMA, Content, Player, Story, _kept, marks
from tests.memory.table import Snapshot

_VERBS = {"set", "update", "delete", "change key", "repeat", "truncate", "shift keys", "swap keys"}
_PARTS = 3


def load_story(seed: int) -> Story:
    """A story in which others change no row, since in the end the table must be what the source is."""
    story, random = replace(Story.random(seed), mode="upsert"), Random(seed)
    operations = tuple(
        operation if operation.verb in _VERBS else replace(operation, verb=random.choice(("set", "delete")))
        for operation in story.operations
    )
    story = replace(story, operations=operations)
    return story.without("append", "append again", "delete", "delete in place", "second driver")


class LoadPlayer(Player):
    """Plays a story of a load. Its first processes load the table, and what follows applies changes."""

    fixed = ("mode",)

    def __init__(self, story: Story, folder: Path) -> None:
        super().__init__(story, folder)
        self.emptied = self._leave_a_truncate_out()
        """After so many messages the source was emptied, of which there is no message. -1 if it wasn't."""
        self.until = len(self.messages)
        """Where the table was equal to the source first. Updates before it may be of rows that are gone."""
        self.states = [Counter[Any]()]
        """What the source has after each number of messages."""
        for number in range(len(self.messages)):
            self.states.append(self._applied(self.states[-1], number, number + 1, ()))
            if number + 1 == self.emptied:
                self.states[-1] = Counter()
        self.now = self.random.randint(0, len(self.messages))
        """How many messages the source has committed."""
        self.delivered = self.random.randint(0, self.now)
        """How many of them are in the topic."""
        self.seen = self.random.randint(0, self.now)
        """How many of them other sessions see."""
        self.read: Content = Counter()
        """The rows of the parts that were read last."""
        self.were_files_told = False
        self.store.on_add = self._see

    def _leave_a_truncate_out(self) -> int:
        places = [number for number, message in enumerate(self.messages) if message.truncates]
        if not places or self.random.random() < 0.3:
            return -1
        place = self.random.choice(places)
        del self.messages[place]
        self.marks = marks(self.story, self.messages)
        return place

    def play(self) -> None:
        try:
            super().play()
        except TableError:
            files = json.loads(self.store.properties[f"{PREFIX}.load"])["files"]
            assert files != self.files(), "the load was refused without a reason"

    def opened(self, clock: Clock, *, is_guest: bool = False) -> TableSink:
        sink = super().opened(clock, is_guest=is_guest)
        table: Any = _Table(self, clock)
        if is_due(sink, auto=True):
            Loading(sink, table, table, table.ends, self.random.randint(1, _PARTS), 1, Lock()).run()
        return sink

    def files(self) -> str:
        return "as they were" if self.seen < self.emptied else "others"

    def go_on(self) -> None:
        """The source commits something, the connector writes something, and others see something."""
        self.now = self.random.randint(self.now, len(self.messages))
        self.delivered = self.random.randint(self.delivered, self.now)
        self.seen = self.random.randint(self.seen, self.now)

    def _apply(self, sink: TableSink, size: int) -> bool:
        self.now = self.delivered = self.seen = len(self.messages)
        return super()._apply(sink, size)

    def _see(self, snapshot: Snapshot) -> None:
        """Note what a part of a load adds. Unlike a micro-batch, it leaves the position where it is."""
        self.kept[snapshot.id] = frozenset(self.offsets())
        if f"{PREFIX}.load" in self.store.properties:
            self.start = json.loads(self.store.properties[f"{PREFIX}.load"])["begin"]["0"]
        if "position" in snapshot.sink and snapshot.sink["position"]["0"] == self.start:
            read = self.read
            keys = {self.key_of(row) for row in read}
            self.effects[snapshot.id] = lambda content: _kept(content, lambda row: self.key_of(row) not in keys) + read

    def _apply_partial(self, content: Content, number: int, end: int, is_refused: bool) -> None:
        ((key, _),) = self.messages[number].rows.items()
        if is_refused or number >= self.until or any(self.key_of(row) == key for row in content.elements()):
            super()._apply_partial(content, number, end, is_refused)

    def check(self) -> None:
        self.until = json.loads(self.store.properties[f"{PREFIX}.load"])["until"]["0"]
        if "rollback" not in self.happened:  # after which another load may have ended later
            assert all(offset >= self.until for offset in self.offsets()), "an update of a row that is gone was refused"
        super().check()
        newest = next(reversed(self.store.snapshots.values()), None)
        assert (self.content(newest) if newest else Counter()) == self.states[-1]


class _Table:
    """See `SourceTable` and `Connector`. Each part has the rows of some keys."""

    name = "the source"

    def __init__(self, player: LoadPlayer, clock: Clock) -> None:
        self._player = player
        self._clock = clock

    def check(self) -> None:
        self._step("look at the source's log")

    def order(self) -> Mapping[str, Any]:
        return times_before()

    def estimated_rows(self) -> int:
        return 7

    def files(self) -> str:
        """When they are compared, what was to happen has happened."""
        self._step("look at the source's files")
        player = self._player
        if player.were_files_told:
            player.seen = max(player.seen, player.emptied)
            player.now = max(player.now, player.seen)
        player.were_files_told = True
        return player.files()

    def is_as_opened(self) -> bool:
        return True

    def ends(self) -> Mapping[str, int]:
        self._step("look at the topic's end")
        return {"0": self._player.delivered}

    def writers(self) -> Mapping[str, str]:
        player = self._player
        self._step("look at the source's transactions")
        player.seen = min(player.seen + 1, player.now)
        return {str(number): f"number {number}" for number in range(player.seen, player.now)}

    def ranges(self, rows: int) -> Sequence[str]:
        self._player.go_on()
        return [str(number) for number in range(_PARTS)]

    def of(self, conditions: Sequence[str], order: Mapping[str, Any]) -> DatabaseRows:
        return _Rows(self, conditions)

    def _step(self, step: str) -> None:
        self._clock.step(step)
        self._player.go_on()

    def read(self, parts: Sequence[str]) -> Any:
        self._clock.step("read a part")
        player = self._player
        read = Counter[Any]()
        for part in parts:
            player.go_on()
            read += _kept(player.states[player.seen], lambda row, part=part: row[0] % _PARTS == int(part))  # type: ignore[misc]
        player.read = read
        rows = list(read.elements())
        arrays: dict[str, Any] = {
            KIND: pa.array([int(RowKind.INSERT)] * len(rows), pa.int8()),
            order_column(0): pa.array([0] * len(rows), pa.int64()),
            BAD: pa.nulls(len(rows), _BAD_TYPE),
            MOVED: pa.nulls(len(rows), pa.string()),
        }
        arrays |= {f.name: pa.array([row[n] for row in rows], f.type) for n, f in enumerate(SCHEMA)}
        return pa.table(arrays)

    def wait(self, stopping: Callable[[], bool]) -> bool:
        player, due = self._player, self._player.now
        self._step("wait for the connector")
        player.delivered = max(player.delivered, due)
        return True


class _Rows:
    """See `DatabaseRows`."""

    def __init__(self, table: _Table, parts: Sequence[str]) -> None:
        self._table = table
        self._parts = parts

    def changes(self, plan: Any, observe: Any = None) -> Any:
        return self._table.read(self._parts)

    def changes_into(self, plan: Any, observe: Any, step: Any, schema: str) -> Any:
        raise NotImplementedError("the engine of stories takes changes")
