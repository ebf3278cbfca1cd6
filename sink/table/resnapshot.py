"""What a table knows of a new snapshot of its source's table, whose rows come by the topic."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from changelog.decoding import Place, SnapshotMark, Stated

RESNAPSHOT = "resnapshot"
"""Part of a sink's state: the `Resnapshot`."""


@dataclass(frozen=True)
class Resnapshot:
    """A snapshot that began when the table had rows already.

    :param time: of its first record, in milliseconds since 1970.
    :param first: the place of this record: partition and offset.
    :param last: that of its last record. None until it has come.
    """

    time: int
    first: Place
    last: Place | None = None

    @classmethod
    def from_json(cls, text: str) -> Self:
        found = json.loads(text)
        last = found["last"]
        return cls(found["time"], tuple(found["first"]), None if last is None else tuple(last))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def has_ended(self, position: Mapping[str, Any] | None) -> bool:
        """Whether all its records are before a position, as far as their order tells."""
        if self.last is None or position is None:
            return False
        return all(int(position.get(str(part), 0)) > offset for part, offset in (self.first, self.last))


def resnapshot_after(known: Resnapshot | None, stated: Stated, *, is_first: bool) -> Resnapshot | None:
    """What is known after the messages of a micro-batch. A snapshot that begins anew, as after a crash of the
    connector, replaces one that hasn't ended.

    :param is_first: the table had no rows, so that a snapshot that begins leaves none behind.
    """
    marks = [(mark.time, place, mark.is_last) for mark, place in stated.items() if isinstance(mark, SnapshotMark)]
    for time, place, is_last in sorted(marks):
        if is_last:
            known = None if known is None else replace(known, last=place)
        else:
            known = None if is_first else Resnapshot(time, place)
    return known
