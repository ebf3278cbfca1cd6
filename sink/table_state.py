"""What the sink must know about a table's state. Either Iceberg's Java library reads it (`sink.iceberg`), or the sink
itself, from the metadata's JSON (`sink.metadata`).
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from sink.errors import TableError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql import types as T

    from changelog.spec import ColumnSpec
    from deltawriters import TableSpec
    from sink.config import Config, PartitionField
    from sink.sources.source import Position

_OWN = "rowdelta."
"""Begins the names of the properties that the sink sets."""


def property_prefix(config: "Config") -> str:
    """Prefix of the table properties that hold the sink's state."""
    return f"rowdelta.{config.sink.id}"


def written_properties(properties: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The properties by which the table is written, sorted: all but those that the sink sets."""
    return tuple(sorted((name, value) for name, value in properties.items() if not name.startswith(_OWN)))


@dataclass(frozen=True)
class Snapshot:
    """One snapshot of a table.

    :param timestamp_ms: milliseconds since 1970.
    :param summary: counts of what it added and removed, and notes of its author.
    """

    snapshot_id: int
    parent_id: int | None
    sequence_number: int
    timestamp_ms: int
    summary: Mapping[str, str]


@dataclass(frozen=True)
class StoredPosition:
    """A sink's position as a table stores it, and which commit stored it.

    `index` names the version of the key index that belongs to the commit (`sink.keyindex`), if it has one, and
    `index_snapshot_id` the snapshot that is the last one in it: the commit's own, or that of a rewrite which came
    after.
    """

    position: "Position"
    operation: str
    snapshot_id: int | None = None
    index: Mapping[str, Any] | None = None
    index_snapshot_id: int | None = None


class TableState(ABC):
    """A table as it was when it was read."""

    name: str

    @property
    @abstractmethod
    def spec(self) -> "TableSpec":
        """The facts that delta writers need, as plain values."""

    @abstractmethod
    def property(self, name: str) -> str | None:
        """A table property's value."""

    @abstractmethod
    def snapshot_id(self) -> int | None:
        """Id of the current snapshot."""

    @abstractmethod
    def snapshot(self, snapshot_id: int | None) -> Snapshot | None:
        """The snapshot with this id; None if it isn't known (any more)."""

    @abstractmethod
    def is_ancestor(self, ancestor_id: int, snapshot_id: int) -> bool:
        """Whether a snapshot is the same as another one, or one of its known ancestors."""

    @abstractmethod
    def columns(self) -> tuple["ColumnSpec", ...]:
        """The table's columns as Spark types.

        :raises TableError: a column has a type that Spark can't represent.
        """

    @abstractmethod
    def is_sorted(self) -> bool:
        """Whether the table has a sort order."""

    def current_snapshot(self) -> Snapshot | None:
        return self.snapshot(self.snapshot_id())

    def start_position(self, prefix: str) -> "Position | None":
        """The stored start position of a table without commits. None if no run has stored one."""
        text = self.property(f"{prefix}.start")
        start: Position | None = json.loads(text) if text else None
        return start

    def position(self, prefix: str) -> StoredPosition | None:
        """The sink's position in the current snapshot.

        The property has the newest position. After a rollback it is ahead of the data. Then the nearest ancestor
        snapshot that this sink committed has the right position. If the property's own snapshot is unknown, there may
        or may not have been a rollback: ancestors expire, and so do snapshots that were rolled back.

        :raises TableError: the table was rolled back, or replaced, and no known snapshot has a position.
        """
        text = self.property(f"{prefix}.position")
        if text is None:
            return None
        stored = json.loads(text)
        current, committed = self.snapshot_id(), stored.get("snapshot-id")
        result = StoredPosition(stored["position"], stored["operation"], committed, stored.get("index"), committed)
        if current == committed or committed is None:
            return result  # nearly always
        if current is not None and self.is_ancestor(committed, current):
            return self._with_newer_index(result, prefix, current)
        snapshot, may_have_expired = self.current_snapshot(), False
        sequence_number = self._sequence_number(prefix, stored)
        is_behind = False
        while snapshot is not None:
            summary = snapshot.summary.get(f"{prefix}.position")
            if summary is not None:
                older = json.loads(summary)
                number = snapshot.snapshot_id
                return StoredPosition(older["position"], older["operation"], number, older.get("index"), number)
            # if the commit were an ancestor, the walk would meet it before any snapshot that is older
            is_behind = is_behind or snapshot.sequence_number < sequence_number
            parent = snapshot.parent_id
            snapshot = self.snapshot(parent)
            may_have_expired = parent is not None and snapshot is None
        if may_have_expired and not is_behind:
            assert current is not None
            return self._with_newer_index(result, prefix, current)
        raise TableError(
            f"{self.name} was rolled back to a snapshot before this sink's first commit that is still known. To read "
            "the source again from the start, remove the stored position (see docs/operations.md, Reset)."
        )

    def _sequence_number(self, prefix: str, stored: Mapping[str, Any]) -> int:
        """Sequence number of the snapshot that has the position `stored`, or 0 if it isn't known. See
        `IcebergCommitter.note_sequence_number`.
        """
        text = self.property(f"{prefix}.sequence-number")
        noted = json.loads(text) if text is not None else {}
        if noted.get("operation") == stored["operation"]:
            return int(noted["sequence-number"])
        return int(stored.get("sequence-number", 0))

    def _with_newer_index(self, stored: StoredPosition, prefix: str, current: int) -> StoredPosition:
        """The position, with a rewrite's index version if a rewrite came after the commit."""
        text = self.property(f"{prefix}.index")
        newer = json.loads(text) if text is not None else {}
        if newer.get("operation") != stored.operation:
            return stored
        number = int(newer["snapshot-id"])
        if current != number and not self.is_ancestor(number, current):
            return stored
        return replace(stored, index=newer["index"], index_snapshot_id=number)


class Tables(Protocol):
    """Tables by `catalog.namespace.table`, and everything else that depends on the reader.

    `spark` is the session. If it is None, calls that need it raise `NeedsSparkError`.
    """

    @property
    def spark(self) -> "SparkSession | None": ...

    def load(self, name: str) -> TableState | None:
        """The table, or None if it doesn't exist.

        :raises TemporaryError: the catalog did not answer.
        """

    def partition_spec(self, columns: "T.StructType", partition_by: "Sequence[PartitionField]", path: str) -> object:
        """The partition spec of a new table with these columns.

        :param path: the table's place in the configuration.
        :raises ConfigError: a transform doesn't fit its column's type, or two fields are the same.
        """
