"""Stories in which changes come late, or twice, and the sink drops those that are late.

The order value of a change is the number of its operation, and the column `value` has it. What must be in the table is
told by a rule of a few lines (`LatePlayer._applied`): the oracle of `late: drop`.
"""

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import pytest

from changelog.rows import RowKind
from sink.config import Config
from sink.table.keyindex import KeyIndex
from sink.table.microbatch import TableSink
from sink.table.patterns import resolve_tables
from tests.memory.storage import Clock
from tests.memory.stories import REGIONS, TARGET, Content, Key, Message, Player, Row, Story, _key_of, moved
from tests.memory.table import Snapshot
from tests.memory.writers import parquet

_VERBS = {"set", "delete", "change key", "repeat", "truncate"}


def late_story(seed: int, more: frozenset[str] = frozenset()) -> Story:
    """A story of changes with all values. Others delete no rows: whether a late change may bring these back depends on
    whether the index was built again.

    :param more: verbs besides `_VERBS`.
    """
    story, random = replace(Story.random(seed), mode="upsert", late=True), Random(seed)
    operations = tuple(
        operation if operation.verb in _VERBS | more else replace(operation, verb=random.choice(("set", "delete")))
        for operation in story.operations
    )
    return replace(story, operations=operations).without("delete", "delete in place")


class LatePlayer(Player):
    """Plays a story of late changes."""

    fixed = ("late", "mode")
    truncates_in_turn = True
    """A TRUNCATE comes before all that follows it, and once."""

    def __init__(self, story: Story, folder: Path) -> None:
        super().__init__(story, folder)
        self.messages, self.orders = _delayed(story, truncates_in_turn=self.truncates_in_turn)
        self.marks = {}
        self.deleted: dict[int | None, dict[Key, int]] = {None: {}}
        """The order values of deleted keys, and of the last TRUNCATE (by the empty key), at each snapshot."""

    def order_value(self, place: int) -> int:
        return self.orders[place >> 8]

    def _check_no_orphans(self) -> None:
        """A file of deleted keys is one that some commit names."""
        indexes = [snapshot.sink["index"]["deleted"] for snapshot in self.store.snapshots.values() if snapshot.sink]
        named = {name for told in indexes for name, _ in told["files"]}
        found = {path: path.rpartition("/")[2] for path in self.store.contents if "/_rowdelta/" in path}
        assert set(found.values()) <= named
        for path in found:
            del self.store.contents[path]
        super()._check_no_orphans()

    def check(self) -> None:
        self._snapshots = iter(self.store.snapshots.values())
        super().check()

    def content(self, snapshot: Snapshot) -> Content:
        self.deleted.setdefault(snapshot.id, self.deleted[snapshot.parent])
        return super().content(snapshot)

    def _deleted_before(self, end: int) -> dict[Key, int]:
        """The order values of keys that are deleted before the micro-batch that ends there. It adds its own."""
        snapshot = self._snapshot_at(end)
        deleted = self.deleted[snapshot.id] = dict(self.deleted[snapshot.parent])
        return deleted

    def _snapshot_at(self, end: int) -> Snapshot:
        """The next snapshot of the sink, which reaches this offset."""
        snapshots = (s for s in self._snapshots if s.id not in self.effects and "position" in s.sink)
        return next(s for s in snapshots if int(s.sink["position"]["0"]) == end)

    def _applied(
        self, content: Content, start: int, end: int, refused: Collection[int], *, came_late: bool = False
    ) -> Content:
        """A change counts if the table has no later row of its key, and the key wasn't deleted later."""
        deleted, rows = self._deleted_before(end), Counter(content)
        for message, order in zip(self.messages[start:end], self.orders[start:end], strict=True):
            if message.truncates:
                rows = Counter()
                deleted.clear()
                deleted[()] = order
                continue
            for key, row in message.rows.items():
                found = [there for there in rows.elements() if self.key_of(there) == key]
                if order < max([deleted.get((), -100), deleted.get(key, -100), *(there[3] for there in found)]):
                    continue
                for there in found:
                    rows[there] -= 1
                if row is None:
                    deleted[key] = order
                else:
                    rows[row] += 1
        return +rows


class TwoSinks(LatePlayer):
    """A stream and a backfill of one table. Its key is the column `a`, and `value` has the order values."""

    options: ClassVar[dict[str, Any]] = {}
    """Of the table, besides."""

    def __init__(self, folder: Path) -> None:
        super().__init__(Story((), (), mode="upsert", late=True), folder)
        self.folder = folder
        self._end = 0

    def process(self, name: str, other: str) -> TableSink:
        """A process of a sink, before its first micro-batch."""
        table = {
            "source": "/nowhere/t",
            "target": TARGET,
            "key": ["a"],
            "order_by": ["value"],
            "late": "drop",
            "merge_small_files": False,
            "shared_with": [other],
            **self.options,
        }
        config = Config.model_validate(
            {
                "sink": {"id": name, "checkpoint": "/nowhere"},
                "source": {"type": "files", "format": "row-kind"},
                "catalogs": {"lake": {"type": "delta", "warehouse": "/nowhere"}},
                "tables": [table],
            }
        )
        self.config, self.index = (config, resolve_tables(config, ())[0]), self.folder / name
        return self.opened(Clock())

    @staticmethod
    def before_commit(patch: pytest.MonkeyPatch, sink: TableSink, happen: Callable[[], None]) -> list[bool]:
        """Something happens before the sink's next commit.

        :return: gets for each further look-up whether it was enough, so that the micro-batch isn't written again.
        """
        commit, look_up_again, enough, waiting = sink.table.commit, KeyIndex.look_up_again, list[bool](), [happen]

        def commit_after_others(request: Any) -> Any:
            if waiting:
                waiting.pop()()
            return commit(request)

        def looked_up_again(self: KeyIndex, *args: Any) -> Any:
            found = look_up_again(self, *args)
            enough.append(found is not None)
            return found

        patch.setattr(sink.table, "commit", commit_after_others)
        patch.setattr(KeyIndex, "look_up_again", looked_up_again)
        return enough

    def apply(self, sink: TableSink, *changes: tuple[RowKind | None, int, int]) -> None:
        """A micro-batch of changes: kind (None: a TRUNCATE), key and order value."""
        rows = [(kind, (key, "b", "eu", order)) for kind, key, order in changes]
        self.messages = [
            Message((), {}, truncates=True) if kind is None else Message(((kind, row),), {}) for kind, row in rows
        ]
        self.orders, self._end = [order for *_, order in changes], self._end + 1
        sink.apply_batch(0, replace(self._batch(0, len(changes)), end={"0": self._end}))

    @property
    def rows(self) -> dict[int, int]:
        """The table: key -> order value."""
        found = dict[int, int]()
        for file in self.store.live.values():
            rows = parquet(self.store.contents[file.path]).to_pylist()
            found |= {row["a"]: row["value"] for number, row in enumerate(rows) if number not in file.deleted}
        return found


def _delayed(story: Story, *, truncates_in_turn: bool) -> tuple[list[Message], list[int]]:
    """The source's messages as they come, with their order values. Some come late, some come again."""
    random, live = Random(story.seed), dict[int, Row]()
    key_of = _key_of(story)
    said: list[tuple[float, int, Message]] = []
    for number, operation in enumerate(story.operations):
        key, other = operation.key, operation.other
        new: Row = (key, f"b{key}", REGIONS[operation.value % 3], number)
        message = Message((), {})
        if operation.verb == "truncate":
            live.clear()
            message = Message((), {}, truncates=True)
        elif operation.verb == "delete":
            gone = live.pop(key, new)
            message = Message(((RowKind.DELETE, gone),), {key_of(gone): None})
        elif operation.verb == "change key" and key in live and key != other:
            old, new = live.pop(key), (other, f"b{other}", REGIONS[operation.value % 3], number)
            live[other] = new
            changes = ((RowKind.UPDATE_BEFORE, old), (RowKind.UPDATE_AFTER, new))
            message = Message(changes, {key_of(old): None, key_of(new): new})
        elif operation.verb in ("shift keys", "swap keys"):
            # only known rows are told apart, so that what the statement is about has come before it
            said = [(min(time, number - 0.5), order, message) for time, order, message in said]
            for told in moved(operation, live, key_of, lambda to, _, n=number: (to, f"b{to}", REGIONS[n % 3], n)):  # type: ignore[misc]
                said.append((number + random.choice((0, 0, 0, random.uniform(0, 12))), number, told))
        elif operation.verb != "repeat":
            live[key] = new
            message = Message(((RowKind.UPDATE_AFTER, new),), {key_of(new): new})
        elif said and not ((last := random.choice(said))[2].truncates and truncates_in_turn):
            said.append((number, last[1], last[2]))
        if message.changes or message.truncates:
            in_turn = message.truncates and truncates_in_turn
            said.append(
                (number if in_turn else number + random.choice((0, 0, 0, random.uniform(0, 12))), number, message)
            )
    said.sort(key=lambda found: found[0])
    return [message for _, _, message in said], [order for _, order, _ in said]
