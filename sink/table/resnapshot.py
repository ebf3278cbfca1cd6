"""What a table knows of new snapshots of its source's table, whose rows come by the topic."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from changelog.decoding import SnapshotMark, Stated
from sink.sources.source import Position

RESNAPSHOT = "resnapshot"
"""Part of a sink's state: the `Resnapshot`."""


@dataclass(frozen=True)
class Mark:
    """The first or the last record of a snapshot: when it was sent, in milliseconds since 1970, and where it is."""

    time: int
    partition: int
    offset: int

    def is_before(self, position: Position) -> bool:
        return int(position.get(str(self.partition), 0)) > self.offset


@dataclass(frozen=True)
class Resnapshot:
    """The newest snapshot. Of several partitions, older marks may come after newer ones.

    :param first: its first record.
    :param last: the newest last record, which may be that of an older one.
    """

    first: Mark
    last: Mark | None = None

    @classmethod
    def from_json(cls, text: str) -> Self:
        first, last = (None if mark is None else Mark(**mark) for mark in json.loads(text).values())
        assert first is not None
        return cls(first, last)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def has_ended(self, position: Position | None) -> bool:
        """Whether both are before a position, and the last one isn't of an older snapshot."""
        if position is None or self.last is None or self.last.time < self.first.time:
            return False
        return self.first.is_before(position) and self.last.is_before(position)

    def needs(self, position: Mapping[str, Any]) -> Position:
        """From where on the topic is read once more, as far as a position was kept for."""
        name = str(self.first.partition)
        return {**position, name: min(int(position.get(name, 0)), self.first.offset)}


def resnapshot_after(known: Resnapshot | None, stated: Stated) -> Resnapshot | None:
    """What is known after the messages of a micro-batch. A snapshot that begins anew, as after a crash of the
    connector, replaces one that hasn't ended.
    """
    found = [(mark, place) for mark, place in stated.items() if isinstance(mark, SnapshotMark)]
    firsts, lasts = (
        [Mark(mark.time, *place) for mark, place in found if mark.is_last is is_last] for is_last in (False, True)
    )
    if known is not None:
        firsts.append(known.first)
        lasts += [] if known.last is None else [known.last]
    if not firsts:
        return None  # nobody knows where it began
    by_time = sorted(lasts, key=lambda mark: mark.time)
    return Resnapshot(max(firsts, key=lambda mark: mark.time), by_time[-1] if by_time else None)
