"""Reads a table's commits from its metadata (Iceberg spec, Table Metadata Fields).

The commits of a table are its current snapshot and the ancestors of this snapshot. A snapshot that was rolled back
doesn't belong to them.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from sink.errors import TableError
from sink.sources.source import Position
from sink.targets.history import Commit, History, moved_by, shown_counts, shown_time
from sink.targets.iceberg.compaction import COMPACTION
from sink.targets.notes import ROWS, SINK_ID

Metadata = Mapping[str, Any]

_FILES = {
    "added-data-files": "+data files",
    "added-delete-files": "+delete files",
    "deleted-data-files": "-data files",
    "removed-delete-files": "-delete files",
}
_RECORDS = {
    "added-records": "rows",
    "added-position-deletes": "position deletes",
    "added-equality-deletes": "equality deletes",
}


class IcebergHistory(History):
    """The commits of one table.

    :param table: its name, for messages.
    :param metadata: the table's metadata, as JSON.
    :param sink_id: the sink whose positions are read.
    :param position_in: the sink's position in a snapshot whose ancestors have expired; None if it is unknown.
    """

    def __init__(
        self, table: str, metadata: Metadata, sink_id: str, position_in: Callable[[int], Position | None]
    ) -> None:
        super().__init__(table, "snapshot")
        self._metadata = metadata
        self._sink_id = sink_id
        self._position_in = position_in
        self._lineage = _lineage(metadata)

    @property
    def has_expired(self) -> bool:
        return bool(self._lineage) and self._lineage[0].get("parent-snapshot-id") is not None

    def read(self) -> Iterator[Commit]:
        complete = not self.has_expired
        before = None if complete else self._position_in(int(self._lineage[0]["snapshot-id"]))
        return iter(_commits(self._metadata, self._lineage, self._sink_id, before, complete=complete)[::-1])

    def at_time(self, time: int) -> int:
        """The table's snapshot log says which."""
        log = self._metadata.get("snapshot-log", [])
        then = [entry for entry in log if int(entry["timestamp-ms"]) <= time]
        if then:
            return int(then[-1]["snapshot-id"])
        if not log:
            raise TableError(f"{self.table}: the table has no snapshot yet. Run rowdelta run first.")
        raise TableError(
            f"{self.table}: its first snapshot that is known was made at {shown_time(int(log[0]['timestamp-ms']))}; "
            f"{self.older or 'before that the table had none'}. Give a later time."
        )

    def has(self, snapshot_id: int) -> bool:
        return snapshot_id in {int(snapshot["snapshot-id"]) for snapshot in self._metadata.get("snapshots", [])}

    def time(self, snapshot_id: int) -> int:
        known = self._metadata["snapshots"]
        return next(int(found["timestamp-ms"]) for found in known if int(found["snapshot-id"]) == snapshot_id)


def _commits(
    metadata: Metadata,
    lineage: Sequence[Mapping[str, Any]],
    sink_id: str,
    position: Position | None,
    *,
    complete: bool,
) -> list[Commit]:
    name = f"rowdelta.{sink_id}.position"
    before = _start(metadata, sink_id) if complete else None
    found = []
    for snapshot in lineage:
        summary: dict[str, str] = snapshot.get("summary", {})
        stored = json.loads(summary[name]) if name in summary else None
        begin, end = (None, None) if stored is None else (before, stored["position"])
        if end is not None:
            before = position = end
        counts = {name: int(summary[name]) for name in (*_FILES, *_RECORDS) if name in summary}
        files = {shown: counts.get(name, 0) for name, shown in _FILES.items()}
        records = {shown: counts[name] for name, shown in _RECORDS.items() if name in counts}
        found.append(
            Commit(
                snapshot_id=int(snapshot["snapshot-id"]),
                time=int(snapshot["timestamp-ms"]),
                operation=summary.get("operation", "unknown"),
                by=_author(summary),
                begin=begin,
                end=end,
                position=position,
                rows=json.loads(summary.get(ROWS, "{}")),
                counts=counts,
                files=shown_counts(files, records),
                word="snapshot",
            )
        )
    return found


def _lineage(metadata: Metadata) -> list[Mapping[str, Any]]:
    """The current snapshot and those of its ancestors that still exist, oldest first."""
    by_id = {int(snapshot["snapshot-id"]): snapshot for snapshot in metadata.get("snapshots", [])}
    current = metadata.get("current-snapshot-id")
    found = []
    while current is not None and int(current) in by_id:
        found.append(by_id[int(current)])
        current = found[-1].get("parent-snapshot-id")
    return found[::-1]


def _start(metadata: Metadata, sink_id: str) -> Position:
    """The position where the sink's first commit began. Empty if the table doesn't have it."""
    text = metadata.get("properties", {}).get(f"rowdelta.{sink_id}.start")
    return json.loads(text) if text else {}


def _author(summary: Mapping[str, str]) -> str:
    sink_id = summary.get(SINK_ID)
    if sink_id is not None:
        return f"sink {sink_id}{moved_by(summary)}"
    if COMPACTION in summary:
        return "a sink, table compacted"
    program = " ".join(summary[name] for name in ("engine-name", "engine-version") if name in summary)
    app = summary.get("app-name") or summary.get("spark.app.id") or summary.get("app-id")
    return f"{program or 'another program'}{f' ({app})' if app else ''}"
