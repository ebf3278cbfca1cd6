"""Rows of this commit that a later change of the same commit superseded: deletion vectors in the `add` actions."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol
from uuid import uuid4

import numpy as np
from pyiceberg.io import FileIO
from pyroaring import BitMap64

from deltawriters.collapse import Ints, grouped
from deltawriters.content import ContentFile, DataFiles
from deltawriters.deletes import Deletes
from deltawriters.table import FileFactory
from deltawriters.vectors import bitmap
from sink.targets.delta.statistics import with_wide_bounds
from sink.targets.delta.vectors import NewVectorFile


class VectorTable(Protocol):
    """What vectors need of their table. `DeltaTableSpec` has it."""

    @property
    def location(self) -> str: ...

    @property
    def io(self) -> FileIO: ...

    @property
    def has_vectors(self) -> bool:
        """Whether new deletion vectors may be written."""

    def random_prefix(self, name: str) -> str:
        """A folder for the file `name`. Empty if the table doesn't want one."""


class VectorDeletes(Deletes):
    """Collects positions in the data files that the task writes. When they are all written, each gets its vector."""

    def __init__(self, table: VectorTable, factory: FileFactory, files: DataFiles) -> None:
        self._table = table
        self._factory = factory
        self._files = files
        self._pending: list[tuple[Ints, Ints]] = []

    def delete(self, file: Ints, pos: Ints) -> None:
        if len(file):
            self._pending.append((file, pos))

    def close(self, data_files: list[ContentFile]) -> list[ContentFile]:
        """:raises ValueError: rows are deleted, and the table can't have deletion vectors."""
        if not self._pending:
            return data_files
        if not self._table.has_vectors:
            raise ValueError(
                f"the table at {self._table.location} has no deletion vectors, which deletes of rows need. Set its "
                "property delta.enableDeletionVectors to true."
            )
        deleted = self._deleted()
        kept = []
        for file in data_files:
            if file.path in deleted and len(deleted[file.path]) == file.record_count:
                self._table.io.delete(file.path)
            else:
                kept.append(file)
        changed = [file.path for file in kept if file.path in deleted]
        vectors = write_vectors(self._table, [deleted[path] for path in changed], self._factory.created.append)
        descriptors = dict(zip(changed, vectors, strict=True))
        return [_with_vector(file, descriptors[file.path]) if file.path in descriptors else file for file in kept]

    def _deleted(self) -> dict[str, BitMap64]:
        """Positions by path."""
        file, pos = (np.concatenate(parts) for parts in zip(*self._pending, strict=True))
        return {self._files.path(number): bitmap(pos[places]) for number, places in grouped(file)}


def write_vectors(
    table: VectorTable, vectors: Sequence[BitMap64], note: Callable[[str], object]
) -> list[dict[str, Any]]:
    """Descriptors of new vectors, all in one file, which is written here.

    Small ones aren't kept in the actions (PROTOCOL.md allows it): Delta's own VACUUM fails on a table that has such
    vectors, with a `scala.MatchError` in `getDeletionVectorRelativePathAndSize` (seen with delta-spark 4.4.0).

    :param note: is called with the file's path before it is written.
    """
    if not vectors:
        return []
    file = NewVectorFile(table.location, table.random_prefix(uuid4().hex))
    note(file.path)
    return file.write(table.io, vectors)


def _with_vector(file: ContentFile, descriptor: dict[str, Any]) -> ContentFile:
    add = file.description["add"]
    add = add | {"deletionVector": descriptor, "stats": with_wide_bounds(add["stats"], file.record_count)}
    vector = {**descriptor, "record-count": descriptor["cardinality"]}
    return replace(file, description={"add": add}, vector=(file.path, vector))
