"""What a table knows of its sink beside the position: its properties `rowdelta.<sink id>.…` as typed values."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from changelog.topics import is_of_many, partition_number
from sink.config import TableSection
from sink.sources.source import Position
from sink.sources.topics import continued
from sink.table.keys import KEY, TableKey
from sink.table.load_state import LOAD, LOADED, Loaded
from sink.table.resnapshot import RESNAPSHOT, Resnapshot
from sink.table.source_tables import SOURCE_TABLES, SourceTables
from sink.targets.own_state import start_position
from sink.targets.seam import TableView
from sink.targets.values import OF_POSITION, StoredPosition

_EVERYWHERE = "*"
_DEFAULTS = {**OF_POSITION, "written": "0", "late": "0"}
"""What a property says that isn't set."""


@dataclass(frozen=True)
class SinkState:
    """State that is stored with a position.

    :param topic: the topic in which the position is, or several as people read them. Empty if none is known.
    :param topic_id: the id of this topic (`Source.identities`), or of several as JSON. Empty if none is known.
    :param streamed: partitions that have delivered rows of the stream of changes, and not of a snapshot read of the
        source. None is all that have delivered anything: in `mode: upsert` nobody looks which rows are of a snapshot.
    :param undecoded: how many successive records the format has failed on, up to the position.
    :param written: bytes that micro-batches have written, if maintenance has a budget.
    :param late: how many late changes were left out so far.
    :param key: the table's key, and which keys messages have stated. None if none is known.
    :param load: the `Load` that the table has had, as text. None if there was none.
    :param loaded: how far it has got.
    :param resnapshot: a snapshot of the source's table that came after its rows. None if none has begun.
    :param source_tables: which of the source's tables it has. None if that isn't known.
    """

    topic: str
    topic_id: str
    streamed: frozenset[int] | None
    undecoded: int
    written: int
    late: int
    key: TableKey | None
    source_tables: SourceTables | None
    load: str | None
    loaded: Loaded | None
    resnapshot: Resnapshot | None

    @classmethod
    def read(cls, table: TableView, prefix: str, section: TableSection) -> "SinkState":
        """The table's state.

        :param prefix: `rowdelta.<sink id>`.
        """
        found = {name: table.property(f"{prefix}.{name}") or default for name, default in _DEFAULTS.items()}
        streamed = found["streamed"]
        key, tables = (table.property(f"{prefix}.{name}") for name in (KEY, SOURCE_TABLES))
        return cls(
            found["source"],
            found["topic-id"],
            None if streamed == _EVERYWHERE else _numbered(json.loads(streamed), section, found["source"]),
            int(found["undecoded"]),
            int(found["written"]),
            int(found["late"]),
            None if key is None else TableKey.from_json(key),
            None if tables is None else SourceTables.from_json(tables),
            table.property(f"{prefix}.{LOAD}"),
            Loaded.from_json(found[LOADED]) if found[LOADED] else None,
            Resnapshot.from_json(found[RESNAPSHOT]) if found[RESNAPSHOT] else None,
        )

    @property
    def ids(self) -> Mapping[str, str]:
        """The ids of the topics in which the position is."""
        if self.topic_id.startswith("{"):
            ids: dict[str, str] = json.loads(self.topic_id)
            return ids
        return {self.topic: self.topic_id} if self.topic_id else {}

    def in_topics(self, section: TableSection, identities: Mapping[str, str]) -> "SinkState":
        """The state after a position in the table's topics.

        :param identities: `Source.identities`. A command that doesn't ask for ids leaves those of the same topics.
        """
        ids = {**self.ids, **identities}
        number = json.dumps(ids, sort_keys=True) if section.many_topics else ids.get(section.source, "")
        return replace(self, topic=section.source, topic_id=number)

    def streamed_before(self, position: Mapping[str, Any] | None) -> frozenset[int]:
        """Partitions that may have delivered rows of the stream of changes, up to a position in topics."""
        if self.streamed is not None:
            return self.streamed
        return frozenset(_number(name) for name, offset in (position or {}).items() if offset)

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
            "late": str(self.late),
            KEY: None if self.key is None else self.key.to_json(),
            SOURCE_TABLES: None if self.source_tables is None else self.source_tables.to_json(),
            LOAD: self.load,
            LOADED: "" if self.loaded is None else self.loaded.to_json(),
            RESNAPSHOT: "" if self.resnapshot is None else self.resnapshot.to_json(),
        }


def position_in(table: TableView, prefix: str, section: TableSection, stored: StoredPosition | None) -> Position | None:
    """The position of the table's last commit, or the position where reading began if there is no commit.

    :param stored: the last commit's.
    """
    position = stored.position if stored else start_position(table, prefix)
    return None if position is None else continued(section, position, table.property(f"{prefix}.source") or "")


def _numbered(partitions: Iterable[int], section: TableSection, topic: str) -> frozenset[int]:
    """The numbers of partitions, for a table that may have had one topic so far.

    :param topic: the one that it had.
    """
    if not section.many_topics:
        return frozenset(partitions)
    return frozenset(p if is_of_many(p) else partition_number(topic, p) for p in partitions)


def _number(name: str) -> int:
    """The number of a partition (`changelog.topics`) by its name in a position."""
    topic, _, partition = name.rpartition("-")
    return partition_number(topic, int(partition)) if topic else int(partition)
