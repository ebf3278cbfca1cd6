"""The live files of a Delta table, kept in memory and brought up to date by the log."""

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from sink.targets.delta.actions import Commit
from sink.targets.delta.log import DeltaLog

Add = Mapping[str, Any]
"""The content of an `add` action."""


_MOST_COMMITS = 2_000
"""A commit that gives many files new vectors takes some 300 KB of memory."""


class LiveFiles:
    """The live files of one table. The first look replays the log, which takes Delta about half a second. Later ones
    read only the commits that came since.

    It also remembers the commits that it has read, as long as nothing older is asked for.
    """

    def __init__(self, log: DeltaLog) -> None:
        self._log = log
        self._version: int | None = None
        self._files: dict[str, Add] = {}
        self._read: list[Commit] = []
        self._first: int | None = None

    def at(self, version: int) -> Mapping[str, Add]:
        """Decoded path -> `add` of each file that is live at the newest version known."""
        if self._version is None or version < self._version:
            self._replay(version)
        elif version > self._version:
            commits = self.commits_since(self._version)
            if commits is None:
                self._replay(version)
            else:
                for commit in commits:
                    if commit.version <= version:
                        self.apply(commit)
                if self._version != version:
                    self._replay(version)
        return self._files

    def apply(self, commit: Commit) -> None:
        """Take a commit into account, if it is the next one."""
        if self._first is not None and self._first + len(self._read) == commit.version - 1:
            self._read.append(commit)
        if self._version is None or commit.version != self._version + 1:
            return
        for kind, content in file_actions(commit):
            if kind == "remove" and self._files.pop(unquote(content["path"]), None) is None:
                self._version = None  # it is known by another name, such as without a scheme, which Delta sees through
                return
        for kind, content in file_actions(commit):
            if kind == "add":
                self._files[unquote(content["path"])] = content
        self._version = commit.version

    def commits_since(self, version: int) -> list[Commit] | None:
        """All commits after a version; None if log clean-up has deleted some of them, or there are too many to hold.

        :raises RowdeltaError: the log can't be read.
        """
        newest = self._log.refresh().version
        if self._first is None or version < self._first or newest - self._first > _MOST_COMMITS:
            self._first, self._read = None, []
            commits = self._log.commits(version + 1, newest) if newest - version <= _MOST_COMMITS else None
            if commits is None:
                return None
            self._first, self._read = version, list(commits)
            return list(commits)
        more = self._log.commits(self._first + len(self._read) + 1, newest)
        if more is None:
            return None
        self._read += more
        return [commit for commit in self._read if commit.version > version]

    def forget_before(self, version: int) -> None:
        """Commits up to a version won't be asked for any more."""
        if self._first is not None and version > self._first:
            self._read = [commit for commit in self._read if commit.version > version]
            self._first = version

    def _replay(self, version: int) -> None:
        self._files = {unquote(add["path"]): add for add in self._log.live_files(version)}
        self._version = version


_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")


def full(location: str, path: str) -> str:
    """A data file's path as tasks name it.

    :param path: decoded; relative to the table's location, unless the file is elsewhere (a shallow clone).
    """
    return path if path.startswith("/") or _SCHEME.match(path) else f"{location.rstrip('/')}/{path}"


def relative(location: str, path: str) -> str:
    """The reverse of `full`."""
    return path.removeprefix(f"{location.rstrip('/')}/")


def file_actions(commit: Commit) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The `add` and `remove` actions of a commit: pairs of name and content."""
    for action in commit.actions:
        for kind in ("add", "remove"):
            if kind in action:
                yield kind, action[kind]
