"""A snapshot of an Iceberg table, as its metadata has it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


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

    @classmethod
    def of_json(cls, described: Mapping[str, Any]) -> "Snapshot":
        """From the table's metadata (Iceberg spec, Snapshots)."""
        return cls(
            snapshot_id=int(described["snapshot-id"]),
            parent_id=described.get("parent-snapshot-id"),
            sequence_number=int(described.get("sequence-number", 0)),
            timestamp_ms=int(described["timestamp-ms"]),
            summary={name: value for name, value in described.get("summary", {}).items() if name != "operation"},
        )
