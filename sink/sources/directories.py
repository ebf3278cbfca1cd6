"""Directories of change files as they are listed: which directories exist, and how far a position is in them."""

import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import unquote, urlsplit

from changelog.amounts import amount
from sink.config import Config, TableSection
from sink.errors import ConfigError, RowdeltaError
from sink.sources.source import Behind, Position

_JSON = re.compile(r"\.(json|jsonl|ndjson)(\.\w+)?$", re.IGNORECASE)

_CHOOSING_FILES = ("pathglobfilter", "recursivefilelookup")
"""Options by which Spark finds fewer or more files than are in the directory itself."""


@dataclass(frozen=True)
class ChangeFile:
    """A change file.

    :param path: its URI as in Spark's log.
    :param modified: modification time in milliseconds.
    :param name: its path below the table's directory.
    """

    path: str
    modified: int
    name: str


class Folders(Protocol):
    """A file system.

    :raises TemporaryError: a folder can't be listed. Each method may raise this error.
    """

    def exists(self, place: str) -> bool: ...

    def is_file(self, place: str) -> bool: ...

    def folders(self, place: str) -> list[str]:
        """Names of the folders in a folder."""

    def files(self, place: str) -> list[tuple[str, int]]:
        """(URI, milliseconds of its modification) of each file in a folder."""

    def qualified(self, place: str) -> str:
        """The absolute path, without scheme and authority."""


class Directories:
    """The tables' directories.

    :param folders: lists them.
    """

    def __init__(self, config: Config, folders: Folders) -> None:
        self._config = config
        self._file_system = folders
        self._roots: dict[str, str] = {}

    def names(self) -> Sequence[str]:
        return [name for parent in self._parents() for name in self._directories(parent)]

    def _parents(self) -> list[str]:
        """The folders of the patterns: the part before the last `/`."""
        return sorted({_parent(table) for table in self._config.tables if table.is_pattern})

    def _directories(self, parent: str) -> list[str]:
        if not self._file_system.exists(parent):
            return []
        names = self._file_system.folders(parent)
        return [f"{parent.rstrip('/')}/{name}" for name in names if not name.startswith(("_", "."))]

    def lag(self, tables: Sequence[tuple[TableSection, Position | None]]) -> Sequence[str]:
        choosing = [name for name in self._config.source.options if name.lower() in _CHOOSING_FILES]
        regardless = f", regardless of {' and '.join(choosing)}" if choosing else ""

        def behind(table: TableSection, position: Position | None) -> str:
            try:
                files = [self.change_file(table, path, modified) for path, modified in self.listed(table)]
            except ConfigError:
                return f"unknown; there is no directory {table.source}"
            waiting = [file for file in files if position is None or is_beyond(file, position)]
            late = ", not counting late ones" if position is not None else ""
            return f"{amount(len(waiting), 'file')} behind{late}{regardless}"

        return [behind(table, position) for table, position in tables]

    def behind(self, tables: Sequence[tuple[TableSection, Position | None]]) -> Mapping[str, Mapping[str, Behind]]:
        """As with `lag`, late files don't count."""
        found: dict[str, Mapping[str, Behind]] = {}
        for table, position in tables:
            try:
                files = [self.change_file(table, path, modified) for path, modified in self.listed(table)]
            except ConfigError:
                continue
            times = [file.modified for file in files if position is None or is_beyond(file, position)]
            seconds = max(0.0, time.time() - min(times) / 1000) if times else 0.0
            found[table.id] = {"": Behind(len(times), seconds)}
        return found

    def check(
        self, tables: Sequence[tuple[TableSection, Position | None]], from_start: Collection[str]
    ) -> Sequence[str | RowdeltaError]:
        def found(table: TableSection) -> str | RowdeltaError:
            try:
                return f"directory {table.source}: {amount(len(self.look(table)), 'file')}"
            except ConfigError as error:
                return error

        return [found(table) for table, _ in tables]

    def check_patterns(self) -> Sequence[RowdeltaError]:
        missing = [parent for parent in self._parents() if not self._file_system.exists(parent)]
        return [
            ConfigError(f"tables[{n}].source: there is no folder {_parent(table)}. Create it, or correct the path.")
            for n, table in enumerate(self._config.tables)
            if table.is_pattern and _parent(table) in missing
        ]

    def change_file(self, table: TableSection, uri: str, modified: int) -> ChangeFile:
        path = unquote(urlsplit(uri).path)
        return ChangeFile(uri, modified, path.removeprefix(f"{self._root(table)}/"))

    def _root(self, table: TableSection) -> str:
        """The directory's path, with which the paths of its files begin."""
        if table.source not in self._roots:
            self._roots[table.source] = self._file_system.qualified(table.source).rstrip("/")
        return self._roots[table.source]

    def look(self, table: TableSection) -> list[tuple[str, int]]:
        """The directory's files. Also checks that they look like what the configuration says.

        :raises ConfigError: there is no such directory; or it has only JSON files, and the configuration doesn't say
            JSON.
        """
        files = self.listed(table)
        is_assumed = "path_format" not in self._config.source.options and self._config.source.file_format == "parquet"
        if is_assumed and files and all(_JSON.search(uri) for uri, _ in files):
            raise ConfigError(
                f"source.options.path_format: it is left out, which means parquet, but {table.source} has only JSON "
                f"files ({unquote(files[0][0].rsplit('/', 1)[-1])}, …). Set path_format: json."
            )
        return files

    def listed(self, table: TableSection) -> list[tuple[str, int]]:
        """(URI, milliseconds of its modification) of each file in the table's directory.

        :raises ConfigError: there is no such directory.
        """
        if not self._file_system.exists(table.source):
            raise no_directory(table.source)
        if self._file_system.is_file(table.source):
            raise ConfigError(
                f"tables[].source: {table.source} is a file, expected a directory of change files. Name its folder."
            )
        files = self._file_system.files(table.source)
        return [(uri, modified) for uri, modified in files if not uri.rsplit("/", 1)[-1].startswith(("_", "."))]


def no_directory(place: str) -> ConfigError:
    return ConfigError(f"tables[].source: there is no directory {place}. Create it, or correct the path.")


def _parent(table: TableSection) -> str:
    """A pattern's folder: the part before the last `/`."""
    return table.source.rpartition("/")[0] or "/"


def is_beyond(file: ChangeFile, position: Position) -> bool:
    """Whether a position hasn't passed the file."""
    modified = int(position["modified"])
    return file.modified > modified or (file.modified == modified and file.name not in position["files"])
