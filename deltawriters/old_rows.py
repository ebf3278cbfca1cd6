"""Rows of earlier snapshots that a commit deletes, on their way from the tasks that found them to where their deletes
are written.

Positions travel as deletion vectors (`deltawriters.vectors`). A task sends a few positions to the driver itself. It
writes many into a file, and sends only where in it each data file's positions are. So the driver's memory grows with
the number of data files, and not with the number of deleted rows.

    task    told, path = tell(rows, limit, path, io)
    driver  rows = DeletedRows.told(results, io_properties)
    task    for file, positions in rows.of(paths).positions(): …
"""

from base64 import b64decode, b64encode
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from pyiceberg.io import FileIO
from pyroaring import BitMap64

from deltawriters.content import OldRows
from deltawriters.keyindex import CorruptIndexError, IndexedFile
from deltawriters.storage import file_io
from deltawriters.vectors import bitmap, decode_blob, encode_blob

Fact = TypeVar("Fact")


@dataclass(frozen=True)
class Place:
    """Where a file has an encoded vector, in bytes."""

    path: str
    offset: int
    length: int


@dataclass(frozen=True)
class FoundRows:
    """Rows to delete in one data file.

    :param parts: what each task found: its encoded vector, or where that is.
    :param rows: how many rows the tasks found.
    """

    file: IndexedFile
    parts: tuple[bytes | Place, ...]
    rows: int

    @property
    def size(self) -> int:
        """In bytes, encoded."""
        return sum(part.length if isinstance(part, Place) else len(part) for part in self.parts)


def tell(rows: Sequence[OldRows], limit: int, path: str, io: FileIO) -> tuple[list[dict[str, Any]], str | None]:
    """What a task tells the driver of the rows that it found: a JSON object for each data file.

    :param limit: most bytes of positions that the objects may have. If there are more, they go into a file.
    :param path: where this file is to be.
    :return: the objects, and the path of the file if it was written.
    """
    rows = sorted(rows, key=lambda old: old.file.path)  # neighbours are read together
    told: list[dict[str, Any]] = [
        {
            "path": old.file.path,
            "spec-id": old.file.spec_id,
            "partition": dict(old.file.partition),
            "rows": len(old.positions),
        }
        for old in rows
    ]
    blobs = [encode_blob(bitmap(old.positions)) for old in rows]
    if sum(map(len, blobs)) <= limit:
        for each, blob in zip(told, blobs, strict=True):
            each["positions"] = b64encode(blob).decode()
        return told, None
    with io.new_output(path).create(overwrite=True) as stream:
        offset = 0
        for each, blob in zip(told, blobs, strict=True):
            stream.write(blob)
            each["place"] = [path, offset, len(blob)]
            offset += len(blob)
    return told, path


@dataclass(frozen=True)
class DeletedRows:
    """Rows to delete, by the path of the data file. Small when pickled, unless positions are in it.

    :param io_properties: how the files that `tell` wrote are reached.
    """

    found: Mapping[str, FoundRows] = field(default_factory=dict)
    io_properties: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    @classmethod
    def told(
        cls, told: Iterable[Sequence[Mapping[str, Any]]], io_properties: tuple[tuple[str, str], ...]
    ) -> "DeletedRows":
        """What all tasks told. Several of them may delete from the same data file."""
        found: dict[str, FoundRows] = {}
        for each in (each for of_task in told for each in of_task):
            path, place = each["path"], each.get("place")
            part = b64decode(each["positions"]) if place is None else Place(*place)
            before = found.get(path) or FoundRows(IndexedFile(path, each["spec-id"], each["partition"]), (), 0)
            found[path] = FoundRows(before.file, (*before.parts, part), before.rows + each["rows"])
        return cls(found, io_properties)

    def with_rows(self, rows: Iterable[OldRows]) -> "DeletedRows":
        """These rows, and others in further data files."""
        more = {
            old.file.path: FoundRows(old.file, (encode_blob(bitmap(old.positions)),), len(old.positions))
            for old in rows
        }
        return DeletedRows({**self.found, **more}, self.io_properties)

    def without(self, paths: Container[str]) -> "DeletedRows":
        """These rows but for those in some data files."""
        kept = {path: found for path, found in self.found.items() if path not in paths}
        return DeletedRows(kept, self.io_properties)

    def of(self, paths: Iterable[str]) -> "DeletedRows":
        """Those in some of the data files."""
        return DeletedRows({path: self.found[path] for path in paths}, self.io_properties)

    @property
    def files(self) -> set[str]:
        """Paths of the files that `tell` wrote."""
        return {part.path for found in self.found.values() for part in found.parts if isinstance(part, Place)}

    def positions(self) -> Iterator[tuple[IndexedFile, BitMap64]]:
        """Each data file with the positions to delete in it, in the order of paths. The order makes one read of each
        file that `tell` wrote, if the data files are neighbours.

        :raises CorruptIndexError: such a file is missing or damaged.
        """
        read = self._read()
        for path in sorted(self.found):
            positions = BitMap64()
            for part in self.found[path].parts:
                try:
                    positions |= decode_blob(part if isinstance(part, bytes) else read[part])
                except ValueError as error:
                    raise CorruptIndexError(f"the rows that a task found in {path} can't be read: {error}") from error
            yield self.found[path].file, positions

    def _read(self) -> dict[Place, bytes]:
        by_file: dict[str, list[Place]] = {}
        for part in (part for found in self.found.values() for part in found.parts):
            if isinstance(part, Place):
                by_file.setdefault(part.path, []).append(part)
        if not by_file:
            return {}
        io = file_io(self.io_properties)
        read: dict[Place, bytes] = {}
        for path, places in by_file.items():
            spans = [(place.offset, place.length) for place in places]
            try:
                read.update(zip(places, read_spans(io, path, spans), strict=True))
            except OSError as error:
                raise CorruptIndexError(f"rows that a task found can't be read: {error}") from error
        return read


def read_spans(io: FileIO, path: str, spans: Sequence[tuple[int, int]]) -> list[bytes]:
    """Parts of a file. What lies close together is read at once.

    :param spans: offset and length of each part.
    :return: the parts in the same order. They are shorter if the file is.
    """
    order = sorted(range(len(spans)), key=lambda number: spans[number])
    groups: list[list[int]] = []
    end = 0
    for number in order:
        offset, length = spans[number]
        if not groups or offset > end + _GAP:
            groups.append([])
        groups[-1].append(number)
        end = max(end, offset + length)
    found = [b""] * len(spans)
    with io.new_input(path).open() as stream:
        for numbers in groups:
            start = spans[numbers[0]][0]
            stream.seek(start)
            content = stream.read(max(sum(spans[number]) for number in numbers) - start)
            for number in numbers:
                offset, length = spans[number]
                found[number] = content[offset - start : offset - start + length]
    return found


_GAP = 1024 * 1024
"""A gap of up to this many bytes is read and thrown away: another request would take longer."""


@dataclass(frozen=True)
class DeleteGroup(Generic[Fact]):
    """Data files whose deletes are written together.

    :param facts: what the table's format has to know of each data file, by its path.
    """

    rows: DeletedRows
    facts: Mapping[str, Fact]
