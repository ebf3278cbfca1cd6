"""What a table knows of its sink beside the position: its properties `rowdelta.<sink id>.…` as typed values."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sink.targets.seam import TableView
from sink.targets.values import OF_POSITION

_EVERYWHERE = "*"
_DEFAULTS = {**OF_POSITION, "written": "0"}
"""What a property says that isn't set."""


@dataclass(frozen=True)
class SinkState:
    """State that is stored with a position.

    :param topic: the topic in which the position is. Empty if none is known.
    :param topic_id: the id of this topic (`Source.identity`). Empty if none is known.
    :param streamed: partitions that have delivered rows of the stream of changes, and not of a snapshot read of the
        source. None is all that have delivered anything: in `mode: upsert` nobody looks which rows are of a snapshot.
    :param undecoded: how many successive records the format has failed on, up to the position.
    :param written: bytes that micro-batches have written, if maintenance has a budget.
    :param others: further properties of the sink as they are stored, by their last part; None for one that isn't set.
    """

    topic: str
    topic_id: str
    streamed: frozenset[int] | None
    undecoded: int
    written: int
    others: Mapping[str, str | None]

    @classmethod
    def read(cls, table: TableView, prefix: str, others: tuple[str, ...]) -> "SinkState":
        """The table's state.

        :param prefix: `rowdelta.<sink id>`.
        :param others: the names of `SinkState.others`.
        """
        found = {name: table.property(f"{prefix}.{name}") or default for name, default in _DEFAULTS.items()}
        streamed = found["streamed"]
        return cls(
            found["source"],
            found["topic-id"],
            None if streamed == _EVERYWHERE else frozenset(json.loads(streamed)),
            int(found["undecoded"]),
            int(found["written"]),
            {name: table.property(f"{prefix}.{name}") for name in others},
        )

    def streamed_before(self, position: Mapping[str, Any] | None) -> frozenset[int]:
        """Partitions that may have delivered rows of the stream of changes, up to a position in topics."""
        if self.streamed is not None:
            return self.streamed
        return frozenset(int(partition) for partition, offset in (position or {}).items() if offset)

    def changes_from(self, before: "SinkState") -> dict[str, str]:
        """The properties in which this state differs from an earlier one, by their last part."""
        stored = before._texts()
        return {name: text for name, text in self._texts().items() if text is not None and text != stored[name]}

    def _texts(self) -> dict[str, str | None]:
        return {
            "source": self.topic,
            "topic-id": self.topic_id,
            "streamed": _EVERYWHERE if self.streamed is None else json.dumps(sorted(self.streamed)),
            "undecoded": str(self.undecoded),
            "written": str(self.written),
            **self.others,
        }
