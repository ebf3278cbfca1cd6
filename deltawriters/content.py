"""What is known of files: of those that a task writes, and of those that it reads or deletes rows of. Plain values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from deltawriters.collapse import Ints, grouped
from deltawriters.keyindex import IndexedFile


class FileContent(Enum):
    """What a file holds. The names are those of Iceberg's `FileContent`."""

    DATA = "DATA"
    POSITION_DELETES = "POSITION_DELETES"
    EQUALITY_DELETES = "EQUALITY_DELETES"


@dataclass(frozen=True)
class Partition:
    """A partition value as JSON text in the table format's own terms. The key index stores it so, and nobody but the
    format looks into it. So a partition stays usable even if a column that it derives from was dropped.

    :param spec_id: id of the layout under which the values count: Iceberg's partition spec. Always 0 if a table has
        only one layout.
    """

    spec_id: int
    text: str


@dataclass(frozen=True)
class ContentFile:
    """One written data or delete file.

    :param record_count: rows of a data file, or deletes of a delete file.
    :param description: the JSON object from which the commit adds the file to the table, with everything that the
        commit needs, since it doesn't open the file. For Iceberg, it is what `ContentFileParser` reads.
    :param vector: path of a data file and its deletion vector in the format's own terms, with `record-count`, if the
        description has one.
    """

    content: FileContent
    path: str
    record_count: int
    size_in_bytes: int
    description: Mapping[str, Any] = field(hash=False)
    vector: tuple[str, Mapping[str, Any]] | None = field(default=None, hash=False)


@dataclass(frozen=True)
class DeleteFile:
    """A position delete file of the table."""

    path: str
    size_in_bytes: int


@dataclass(frozen=True)
class DataFile:
    """A data file of the table, whose rows are read, moved or deleted, or a part of it. Facts that nobody asks for are
    left out.

    :param first_row_id: row id of the first row, for rows whose id isn't stored. None if the table has no row ids.
    :param sequence_number: number of the commit that added the file, as the table's format counts them.
    :param rows: number of its rows, live or not. None if the table's metadata don't tell.
    :param live_rows: number of live rows. None if only the delete files tell.
    :param vector: its deletion vector in the format's terms.
    :param deletes: paths of the position delete files that may delete rows of it, if the format has such files.
    :param by_key: other deletes apply to it, so only the key index tells which rows are live.
    :param part: see `deltawriters.parquet.rows_without`.
    """

    file: IndexedFile
    size_in_bytes: int = 0
    first_row_id: int | None = None
    sequence_number: int = 0
    rows: int | None = None
    live_rows: int | None = None
    vector: Mapping[str, Any] | None = None
    deletes: tuple[str, ...] = ()
    by_key: bool = False
    part: tuple[int, int] = (0, 1)

    @property
    def path(self) -> str:
        return self.file.path

    @property
    def part_bytes(self) -> int:
        return self.size_in_bytes // self.part[1]


@dataclass(frozen=True)
class OldRows:
    """Positions to delete in one data file of an earlier snapshot."""

    file: IndexedFile
    positions: Ints


def by_file(file: Ints, pos: Ints, files: Sequence[IndexedFile]) -> list[OldRows]:
    """Rows by their data file: row i is at position `pos[i]` of `files[file[i]]`."""
    return [OldRows(files[number], pos[places]) for number, places in grouped(file)]


@dataclass(frozen=True)
class Locations:
    """The place of each written row: `file[i]` is a number in the task's `DataFiles`, `pos[i]` the position in that
    file.
    """

    file: Ints
    pos: Ints


class DataFiles:
    """Data files by number: the files that one task writes, and files of earlier snapshots that the key index found."""

    def __init__(self) -> None:
        self._paths: list[str] = []
        self._partitions: list[Partition] = []

    def __len__(self) -> int:
        return len(self._paths)

    def add(self, path: str, partition: Partition) -> int:
        self._paths.append(path)
        self._partitions.append(partition)
        return len(self._paths) - 1

    def path(self, file: int) -> str:
        return self._paths[file]

    def partition(self, file: int) -> Partition:
        return self._partitions[file]


@dataclass(frozen=True)
class TaskId:
    """Names the files of one task attempt, in the way of Iceberg's `OutputFileFactory`.

    `operation` is unique to one attempt at a micro-batch. `attempt` is unique to one task attempt within the
    application. So two attempts never write the same path, and the files of a superseded attempt can be recognised.
    """

    partition: int
    attempt: int
    operation: str

    def file_name(self, sequence: int, extension: str) -> str:
        """`{partition}-{task}-{operation}-{sequence}.{extension}`"""
        return f"{self.partition:05d}-{self.attempt}-{self.operation}-{sequence:05d}.{extension}"
