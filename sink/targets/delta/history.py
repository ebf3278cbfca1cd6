"""Reads a table's commits from its log, newest first.

The sink's position is the metadata domain in a commit's own actions. RESTORE takes the files back and not the domain,
so the position after it is that of the version to which it went.
"""

import json
from collections.abc import Iterator, Mapping, Sequence

from sink.errors import TableError
from sink.sources.source import Position
from sink.targets import history
from sink.targets.delta.actions import CLONE, RESTORE, Commit, decoded, made_and_taken_back
from sink.targets.delta.live_files import file_actions
from sink.targets.delta.new_vectors import stated_rows
from sink.targets.delta.state import DeltaState
from sink.targets.history import History, moved_by, shown_counts
from sink.targets.notes import ROWS, SINK_ID

_FIRST_READ, _MOST_READ = 20, 1_000
"""So many commits are read at first, and so many at once when more and more are asked for. For each such part, Delta
makes a snapshot of the version before, which takes half a second.
"""


class DeltaHistory(History):
    """The commits of one table.

    :param prefix: prefix of the sink's state.
    """

    def __init__(self, table: DeltaState, prefix: str) -> None:
        super().__init__(table.name, table.snapshot_word)
        self._table = table
        self._log = table.log
        self._prefix = prefix

    @property
    def has_expired(self) -> bool:
        return bool(self._known) and self._known[-1].snapshot_id > 0

    def read(self) -> Iterator[history.Commit]:
        last, size = self._table.snapshot_id(), _FIRST_READ
        while last >= 0:
            part = list(self._log.history(size, last))[::-1]
            if not part:
                return
            yield from reversed(self._commits(part))
            last, size = part[0].version - 1, min(size * 2, _MOST_READ)

    def commit(self, snapshot_id: int) -> history.Commit | None:
        """Without those after it."""
        found = [] if snapshot_id < 0 else list(self._log.history(1, snapshot_id))
        return self._commits(found)[0] if found else None

    def at_time(self, time: int) -> int:
        """As `TIMESTAMP AS OF` finds it."""
        return self._log.version_at(time)

    def has(self, snapshot_id: int) -> bool:
        if not 0 <= snapshot_id <= self._table.snapshot_id():
            return False
        try:
            self._log.snapshot_at(snapshot_id)
        except TableError:
            return False
        return True

    def time(self, snapshot_id: int) -> int:
        return self._log.snapshot_at(snapshot_id).timestamp_ms

    def _commits(self, part: Sequence[Commit]) -> list[history.Commit]:
        """:param part: versions that follow each other, the oldest first."""
        first = part[0].version
        # nothing is an empty position, and None an unknown one
        position: Position | None = {} if first == 0 else self._position_in(first - 1)
        positions: dict[int, Position | None] = {first - 1: position}
        found: list[history.Commit] = []
        for commit in part:
            state = self._stored(commit)
            stored = json.loads(state.get("position", "{}"))
            begin = end = None
            if stored and stored["operation"] == commit.operation_id:
                begin, end = position, stored["position"]
                position = end
                if begin == {}:
                    begin = json.loads(state.get("start", "{}"))
            elif commit.info.get("operation") == CLONE:
                position = None  # the source's table may have been at any
            elif commit.info.get("operation") == RESTORE:
                restored = self._table.restored_version(commit)
                position = positions[restored] if restored in positions else self._position_in(restored)
            elif position is None and commit.version == first:
                position = self._position_in(commit.version)
            positions[commit.version] = position
            counts, files = _counted(commit)
            time = self._log.time_of(commit)
            found.append(
                history.Commit(
                    snapshot_id=commit.version,
                    # time travel lets no version be older than the one before
                    time=max(time, found[-1].time + 1) if found else time,
                    operation=commit.info.get("operation", "unknown"),
                    by=_author(commit),
                    begin=begin,
                    end=end,
                    position=position or None,
                    rows=json.loads(commit.notes.get(ROWS, "{}")),
                    counts=counts,
                    files=files,
                    word=self.word,
                )
            )
        return found

    def _stored(self, commit: Commit) -> Mapping[str, str]:
        """The sink's state, if a commit has written it."""
        for action in commit.actions:
            domain = action.get("domainMetadata", {})
            if domain.get("domain") == self._prefix and not domain.get("removed"):
                state: Mapping[str, str] = json.loads(domain["configuration"])
                return state
        return {}

    def _position_in(self, version: int) -> Position | None:
        """The sink's position in a version. Empty if it had none yet, None if it is unknown."""
        try:
            snapshot = self._log.snapshot_at(version)
        except TableError:
            return None  # log clean-up
        stored = json.loads(json.loads(snapshot.domains.get(self._prefix, "{}")).get("position", "{}"))
        if not stored:
            return {}
        commits = self._log.commits(int(stored["after"]) + 1, version)
        if commits is None:
            return None
        _, restored = made_and_taken_back(commits, stored["operation"])
        if restored is not None and restored.info["operation"] == CLONE:
            return None
        if restored is not None:
            return self._position_in(self._table.restored_version(restored))
        position: Position = stored["position"]
        return position


def _counted(commit: Commit) -> tuple[dict[str, int], str]:
    """What a commit did with files, as numbers and in words. The actions tell it, whoever wrote them."""
    adds = {decoded(content["path"]): content for kind, content in file_actions(commit) if kind == "add"}
    removes = {decoded(content["path"]) for kind, content in file_actions(commit) if kind == "remove"}
    added = [content for path, content in adds.items() if path not in removes]
    counts = {
        "added-data-files": len(added),
        "deleted-data-files": len(removes - adds.keys()),
        "changed-deletion-vectors": len(adds.keys() & removes),
    }
    shown = {
        "+data files": counts["added-data-files"],
        "-data files": counts["deleted-data-files"],
        "~deletion vectors": counts["changed-deletion-vectors"],
    }
    rows = [stated_rows(content) for content in added]
    if rows and None not in rows:
        counts["added-records"] = sum(filter(None, rows))
    records = {"rows": counts["added-records"]} if "added-records" in counts else {}
    return {name: count for name, count in counts.items() if count}, shown_counts(shown, records)


def _author(commit: Commit) -> str:
    sink_id = commit.notes.get(SINK_ID)
    if sink_id is not None:
        return f"sink {sink_id}{moved_by(commit.notes)}"
    if commit.operation_id is not None:
        return "a sink, its state stored"
    return str(commit.info.get("engineInfo") or "another program")
