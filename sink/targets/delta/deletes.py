"""Rows of this commit that a later change of the same commit superseded: deletion vectors in the `add` actions."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from pyroaring import BitMap64

from deltawriters.collapse import Ints
from deltawriters.content import ContentFile
from deltawriters.deletes import Deletes
from deltawriters.files import DataFiles, FileFactory
from deltawriters.vectors import bitmap
from sink.targets.delta.statistics import with_wide_bounds
from sink.targets.delta.vectors import NewVectorFile, inline_vector

if TYPE_CHECKING:
    from sink.targets.delta.writers import DeltaTableSpec

_INLINE_BYTES = 256
"""A vector of at most this size is kept in the action, so that readers need no file for it."""


class VectorDeletes(Deletes):
    """Collects positions in the data files that the task writes. When they are all written, each gets its vector."""

    def __init__(self, table: "DeltaTableSpec", factory: FileFactory, files: DataFiles) -> None:
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
        stored = dict(zip(changed, self._stored([deleted[path] for path in changed]), strict=True))
        return [_with_vector(file, stored[file.path]) if file.path in stored else file for file in kept]

    def _deleted(self) -> dict[str, BitMap64]:
        """Positions by path."""
        file, pos = (np.concatenate(parts) for parts in zip(*self._pending, strict=True))
        order = np.argsort(file, kind="stable")
        numbers, starts = np.unique(file[order], return_index=True)
        stops = [*starts[1:], len(order)]
        return {
            self._files.path(int(number)): bitmap(pos[order[start:stop]])
            for number, start, stop in zip(numbers, starts, stops, strict=True)
        }

    def _stored(self, vectors: Sequence[BitMap64]) -> list[dict[str, Any]]:
        """Descriptors of the vectors. The large ones are written into one file."""
        inline = [inline_vector(vector) for vector in vectors]
        large = [i for i, descriptor in enumerate(inline) if descriptor["sizeInBytes"] > _INLINE_BYTES]
        if large:
            file = NewVectorFile(self._table.location, self._table.random_prefix(self._factory.created[-1]))
            self._factory.created.append(file.path)
            for i, descriptor in zip(large, file.write(self._table.io, [vectors[i] for i in large]), strict=True):
                inline[i] = descriptor
        return inline


def _with_vector(file: ContentFile, descriptor: dict[str, Any]) -> ContentFile:
    add = file.description["add"]
    add = add | {"deletionVector": descriptor, "stats": with_wide_bounds(add["stats"])}
    return replace(file, description={"add": add}, has_vector=True)
