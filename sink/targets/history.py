"""A table's commits, newest first, and the state that a position, a time or an id stands for. `rowdelta history` shows
them, and `rowdelta show` finds a state in them.

Each format makes the commits from its metadata. A state is called as the format calls it: `History.word`.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

from changelog.amounts import amount
from sink.errors import ConfigError, TableError
from sink.targets.notes import MINOR, REWRITE

if TYPE_CHECKING:
    from sink.sources.source import Position


@dataclass(frozen=True)
class Commit:
    """One commit of the table's current history.

    :param time: milliseconds since 1970.
    :param operation: the format's name of it: `append`, `overwrite`, `MERGE`, …
    :param by: who committed: `sink shop`, `sink shop, small files merged`, `spark`, …
    :param begin: the position of the sink's previous commit. Empty if this is the sink's first commit. None if the
        previous commit is unknown, or if another writer made this commit.
    :param end: the position that this commit stored. None if another writer made it.
    :param position: the sink's position in the state that the commit made, also if another writer made it. None if it
        is unknown, or if the sink hadn't committed anything yet.
    :param rows: changes by kind (`+I`, …) of a sink's commit. Empty if the history doesn't have them.
    :param counts: numbers of files and rows, by the format's names of them.
    :param files: the same in words.
    :param word: see `History.word`.
    """

    snapshot_id: int
    time: int
    operation: str
    by: str
    begin: "Position | None"
    end: "Position | None"
    position: "Position | None"
    rows: Mapping[str, int]
    counts: Mapping[str, int]
    files: str
    word: str

    @property
    def utc(self) -> str:
        return shown_time(self.time)

    def as_json(self) -> dict[str, Any]:
        return {
            "snapshot_id": self.snapshot_id,
            "time": datetime.fromtimestamp(self.time / 1000, UTC).isoformat(timespec="milliseconds"),
            "operation": self.operation,
            "by": self.by,
            "from": self.begin,
            "to": self.end,
            "rows": self.rows,
            "files": dict(self.counts),
        }

    def lines(self) -> Iterator[str]:
        """The commit as text for people."""
        yield f"{self.utc}  {self.word} {self.snapshot_id}  {self.operation} by {self.by}"
        if self.end is not None:
            if self.begin is None:
                begin = "unknown, the commit before has expired"
            else:
                begin = shown_position(self.begin) if self.begin else "the beginning"
            yield f"  position: {shown_position(self.end)} (before: {begin})"
        if self.rows:
            yield f"  changes:  {' '.join(f'{kind} {count:,}' for kind, count in self.rows.items() if count) or 'none'}"
        yield f"  files:    {self.files}"


class History(ABC):
    """The commits of one table.

    :param table: its name, for messages.
    :param word: what the format calls a state of the table: `snapshot` or `version`.
    """

    def __init__(self, table: str, word: str) -> None:
        self.table = table
        self.word = word
        self._known: list[Commit] = []

    @abstractmethod
    def read(self) -> Iterator[Commit]:
        """The current state's commit and those before it that still exist, newest first."""

    @property
    @abstractmethod
    def has_expired(self) -> bool:
        """Whether older commits of the table's history have expired. Known when all others have been read."""

    @abstractmethod
    def at_time(self, time: int) -> int:
        """Id of the state that was current at a time.

        :param time: milliseconds since 1970.
        :raises TableError: nothing that is left tells it, or there was no table yet.
        """

    @abstractmethod
    def has(self, snapshot_id: int) -> bool:
        """Whether there is such a state, also one that was rolled back."""

    @cached_property
    def _unread(self) -> Iterator[Commit]:
        return self.read()

    @abstractmethod
    def time(self, snapshot_id: int) -> int:
        """When a state that exists was made, in milliseconds since 1970."""

    def __iter__(self) -> Iterator[Commit]:
        """All commits, newest first. Each is read when it is asked for: a history may have a hundred thousand."""
        number = 0
        while True:
            if number == len(self._known):
                following = next(self._unread, None)
                if following is None:
                    return
                self._known.append(following)
            yield self._known[number]
            number += 1

    @property
    def commits(self) -> Sequence[Commit]:
        """All commits, newest first."""
        return list(self)

    def commit(self, snapshot_id: int) -> Commit | None:
        """The commit that made a state. None if the state is not in the current history."""
        return next((commit for commit in self if commit.snapshot_id == snapshot_id), None)

    def at_position(self, wanted: "Position") -> tuple[Commit, Commit | None]:
        """The newest commit whose position is not past the wanted one, and the commit after it with a position.

        Kafka: a position is past another if it is ahead in a partition that the other names. A partition that the
        wanted position doesn't name may be anywhere: `{"0": 42}` finds the last state in which no message of partition
        0 from offset 42 on had been applied. The table's positions can be compared with each other, since each
        continues one before. The table doesn't need to have had the wanted position. Files: the modification time
        decides, and if it is the same, the names.

        :raises ConfigError: the wanted position doesn't fit this source.
        :raises TableError: the wanted position is before all known positions.
        """
        later = None
        for commit in self:
            if commit.position is None:
                continue
            if later is None:
                self._check_position(wanted, commit.position)
            if not _is_past(commit.position, wanted):
                return commit, later
            later = commit
        if later is None:
            raise TableError(
                f"{self.table}: no {self.word} that is left has a position of this sink. Use --version or --as-of; "
                f"rowdelta history lists the {self.word}s."
            )
        why = self.older or "before that the table held nothing of this sink"
        raise TableError(
            f"{self.table}: the position {json.dumps(wanted)} is before the first one that is known, "
            f"{shown_position(later.position or {})} of {self.word} {later.snapshot_id} ({later.utc}); {why}. "
            "Give a later position."
        )

    def check_version(self, snapshot_id: int) -> int:
        """Check that a state exists. Returns its id.

        :raises TableError: there is no such state (any more).
        """
        if self.has(snapshot_id):
            return snapshot_id
        newest = ", ".join(str(commit.snapshot_id) for commit in islice(self, 3)) or "none"
        raise TableError(
            f"{self.table}: there is no {self.word} {snapshot_id}; it has expired, or never existed. The newest ones "
            f"are {newest}; rowdelta history lists all."
        )

    def lines(self, limit: int, *, as_json: bool) -> Iterator[str]:
        """The newest commits: text for people, or one JSON object a line."""
        for commit in islice(self, limit):
            if as_json:
                yield json.dumps(commit.as_json())
            else:
                yield from commit.lines()
        if as_json or next(islice(self, limit, None), None) is not None:
            return
        if not self._known:
            yield "no commit yet"
        elif self.older:
            yield self.older

    @property
    def older(self) -> str:
        """Says that older commits have expired; else it is empty."""
        return f"older {self.word}s have expired" if self.has_expired else ""

    def _check_position(self, wanted: "Position", known: "Position") -> None:
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
        raise ConfigError(f"{self.table}: --at-position is {json.dumps(wanted)}, expected {expected}.")


def moved_by(notes: Mapping[str, str]) -> str:
    """What a commit of the sink did that changed no row, in words; empty if it did something else.

    :param notes: what the commit says of itself.
    """
    if MINOR in notes:
        return ", small files merged"
    return ", files rewritten" if REWRITE in notes else ""


def shown_time(milliseconds: int) -> str:
    return f"{datetime.fromtimestamp(milliseconds / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC"


def shown_position(position: "Position") -> str:
    """A position for people. For files, it shows the time and the number of names instead of many names."""
    if "modified" not in position:
        return json.dumps(position)
    names = position.get("files", [])
    return json.dumps({"modified": position["modified"], "files": names if len(names) <= 3 else f"{len(names)} files"})


def shown_counts(files: Mapping[str, int], records: Mapping[str, int]) -> str:
    """`+2 data files, -1 delete file with 7 rows`.

    :param files: `+data files` (added), `-data files` (removed) or `~…` (changed) -> how many. Zeros are left out.
    :param records: rows and deletes -> how many.
    """
    parts = [f"{what[0]}{amount(count, what[1:].removesuffix('s'))}" for what, count in files.items() if count]
    shown = [amount(count, what.removesuffix("s")) for what, count in records.items()]
    return (", ".join(parts) or "unchanged") + (f" with {', '.join(shown)}" if shown else "")


def _is_past(position: "Position", wanted: "Position") -> bool:
    if "modified" not in position:
        return any(int(position.get(partition, 0)) > offset for partition, offset in wanted.items())
    if position["modified"] != wanted["modified"]:
        return bool(position["modified"] > wanted["modified"])
    return "files" in wanted and not set(position["files"]) <= set(wanted["files"])
