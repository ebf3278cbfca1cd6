"""Reads a table's commits, newest first, from its metadata. `rowdelta history` shows them, and `rowdelta show` finds a
position in them.

The caller passes the table's metadata as JSON (Iceberg spec, Table Metadata Fields). The commits of a table are its
current snapshot and the ancestors of this snapshot. A snapshot that was rolled back doesn't belong to them.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sink.errors import ConfigError, TableError
from sink.sources.source import Position
from sink.targets.base import MINOR, ROWS
from sink.targets.iceberg.compaction import OWN

Metadata = Mapping[str, Any]

_FILES = {
    "added-data-files": "data files",
    "added-delete-files": "delete files",
    "deleted-data-files": "data files",
    "removed-delete-files": "delete files",
}
_RECORDS = {
    "added-records": "rows",
    "added-position-deletes": "position deletes",
    "added-equality-deletes": "equality deletes",
}


@dataclass(frozen=True)
class Commit:
    """One snapshot of the table's current history.

    :param time: milliseconds since 1970, as the committing client set it.
    :param operation: Iceberg's name: append, overwrite, replace or delete.
    :param by: who committed: `sink shop`, `sink shop, small files merged`, `spark`, …
    :param begin: the position of the sink's previous commit. Empty if this is the sink's first commit. None if the
        previous commit is unknown, or if another writer made this commit.
    :param end: the position that this commit stored. None if another writer made it.
    :param position: the sink's position in this snapshot, also if another writer committed it. None if it is unknown,
        or if the sink hadn't committed anything yet.
    :param rows: changes by kind (`+I`, …) of a sink's commit. Empty if the summary doesn't have them.
    :param summary: the snapshot's summary.
    """

    snapshot_id: int
    time: int
    operation: str
    by: str
    begin: Position | None
    end: Position | None
    position: Position | None
    rows: Mapping[str, int]
    summary: Mapping[str, str]

    @property
    def utc(self) -> str:
        return shown_time(self.time)

    def as_json(self) -> dict[str, Any]:
        counted = {name: int(self.summary[name]) for name in (*_FILES, *_RECORDS) if name in self.summary}
        return {
            "snapshot_id": self.snapshot_id,
            "time": datetime.fromtimestamp(self.time / 1000, UTC).isoformat(timespec="milliseconds"),
            "operation": self.operation,
            "by": self.by,
            "from": self.begin,
            "to": self.end,
            "rows": self.rows,
            "files": counted,
        }

    def lines(self) -> Iterator[str]:
        """The commit as text for people."""
        yield f"{self.utc}  snapshot {self.snapshot_id}  {self.operation} by {self.by}"
        if self.end is not None:
            if self.begin is None:
                begin = "unknown, the commit before has expired"
            else:
                begin = shown_position(self.begin) if self.begin else "the beginning"
            yield f"  position: {shown_position(self.end)} (before: {begin})"
        if self.rows:
            yield f"  changes:  {' '.join(f'{kind} {count:,}' for kind, count in self.rows.items() if count) or 'none'}"
        yield f"  files:    {self._shown_files()}"

    def _shown_files(self) -> str:
        parts = []
        for name, shown in _FILES.items():
            count = int(self.summary.get(name, "0"))
            if count:
                parts.append(f"{'+' if name.startswith('added') else '-'}{count:,} {shown}")
        records = [f"{int(self.summary[name]):,} {shown}" for name, shown in _RECORDS.items() if name in self.summary]
        return (", ".join(parts) or "unchanged") + (f" with {', '.join(records)}" if records else "")


class History:
    """The commits of one table.

    :param table: its name, for messages.
    :param metadata: the table's metadata, as JSON.
    :param sink_id: the sink whose positions are read.
    :param position_in: the sink's position in a snapshot whose ancestors have expired; None if it is unknown.
    """

    def __init__(
        self, table: str, metadata: Metadata, sink_id: str, position_in: Callable[[int], Position | None]
    ) -> None:
        self._table = table
        self._metadata = metadata
        lineage = _lineage(metadata)
        self.has_expired = bool(lineage) and lineage[0].get("parent-snapshot-id") is not None
        """Whether older snapshots of the table's history have expired."""
        before = position_in(int(lineage[0]["snapshot-id"])) if self.has_expired else None
        self.commits = _commits(metadata, lineage, sink_id, before, complete=not self.has_expired)[::-1]
        """The current snapshot and those of its ancestors that still exist, newest first."""

    def at_position(self, wanted: Position) -> tuple[Commit, Commit | None]:
        """The newest snapshot whose position is not past the wanted one, and the snapshot after it with a position.

        Kafka: a position is past another if it is ahead in a partition that the other names. A partition that the
        wanted position doesn't name may be anywhere: `{"0": 42}` finds the last state in which no message of partition
        0 from offset 42 on had been applied. The table's positions can be compared with each other, since each
        continues the one before. The table doesn't need to have had the wanted position. Files: the modification time
        decides, and if it is the same, the names.

        :raises ConfigError: the wanted position doesn't fit this source.
        :raises TableError: the wanted position is before all known positions.
        """
        known = [commit for commit in self.commits if commit.position is not None]
        if not known:
            raise TableError(
                f"{self._table}: no snapshot that is left has a position of this sink. Use --version or --as-of; "
                "rowdelta history lists the snapshots."
            )
        self._check_position(wanted, known[0].position or {})
        later = None
        for commit in known:
            if not _is_past(commit.position or {}, wanted):
                return commit, later
            later = commit
        oldest = known[-1]
        why = "older snapshots have expired" if self.has_expired else "before that the table held nothing of this sink"
        raise TableError(
            f"{self._table}: the position {json.dumps(wanted)} is before the first one that is known, "
            f"{shown_position(oldest.position or {})} of snapshot {oldest.snapshot_id} ({oldest.utc}); {why}. "
            "Give a later position."
        )

    def at_time(self, time: int) -> int:
        """Id of the snapshot that was current at a time. The table's snapshot log says which.

        :param time: milliseconds since 1970.
        :raises TableError: the log doesn't reach back so far.
        """
        log = self._metadata.get("snapshot-log", [])
        then = [entry for entry in log if int(entry["timestamp-ms"]) <= time]
        if then:
            return int(then[-1]["snapshot-id"])
        if not log:
            raise TableError(f"{self._table}: the table has no snapshot yet. Run rowdelta run first.")
        why = "older snapshots have expired" if self.has_expired else "before that the table had none"
        raise TableError(
            f"{self._table}: its first snapshot that is known was made at {shown_time(int(log[0]['timestamp-ms']))}; "
            f"{why}. Give a later time."
        )

    def check_version(self, snapshot_id: int) -> int:
        """Check that a snapshot exists. Returns its id.

        :raises TableError: there is no such snapshot (any more).
        """
        known = self._metadata.get("snapshots", [])
        if snapshot_id in {int(snapshot["snapshot-id"]) for snapshot in known}:
            return snapshot_id
        newest = ", ".join(str(commit.snapshot_id) for commit in self.commits[:3]) or "none"
        raise TableError(
            f"{self._table}: there is no snapshot {snapshot_id}; it has expired, or never existed. The newest ones are "
            f"{newest}; rowdelta history lists all."
        )

    def _check_position(self, wanted: Position, known: Position) -> None:
        """:raises ConfigError: the wanted position doesn't look like the table's positions."""
        if "modified" in known:
            if isinstance(wanted.get("modified"), int):
                return
            expected = '{"modified": 1767225601000}, in milliseconds since 1970'
        else:
            unknown = [partition for partition in wanted if partition not in known]
            if wanted and not unknown and all(isinstance(offset, int) for offset in wanted.values()):
                return
            expected = f"the next offset by partition ({', '.join(known)}), such as {json.dumps(known)}"
        raise ConfigError(f"{self._table}: --at-position is {json.dumps(wanted)}, expected {expected}.")


def shown_time(milliseconds: int) -> str:
    return f"{datetime.fromtimestamp(milliseconds / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC"


def shown_position(position: Position) -> str:
    """A position for people. For files, it shows the time and the number of names instead of many names."""
    if "modified" not in position:
        return json.dumps(position)
    names = position.get("files", [])
    return json.dumps({"modified": position["modified"], "files": names if len(names) <= 3 else f"{len(names)} files"})


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
                summary=summary,
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
    sink_id = summary.get("rowdelta.sink-id")
    if sink_id is not None:
        return f"sink {sink_id}{', small files merged' if MINOR in summary else ''}"
    if OWN in summary:
        return "a sink, table compacted"
    program = " ".join(summary[name] for name in ("engine-name", "engine-version") if name in summary)
    app = summary.get("app-name") or summary.get("spark.app.id") or summary.get("app-id")
    return f"{program or 'another program'}{f' ({app})' if app else ''}"


def _is_past(position: Position, wanted: Position) -> bool:
    if "modified" not in position:
        return any(int(position.get(partition, 0)) > offset for partition, offset in wanted.items())
    if position["modified"] != wanted["modified"]:
        return bool(position["modified"] > wanted["modified"])
    return "files" in wanted and not set(position["files"]) <= set(wanted["files"])
