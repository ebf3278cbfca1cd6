"""Merges position delete files, as version 2 of Iceberg's format has them: many small ones become one."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from deltawriters.collapse import Ints
from deltawriters.content import ContentFile, DataFile, DataFiles, DeleteFile, Partition
from deltawriters.table import FileFactory, TableSpec

_KEPT, _KEPT_BYTES = 256, 64 * 1024
"""At most this many delete files, of up to this size, are kept in memory. They are needed twice if they are merged
with data files."""


@dataclass(frozen=True)
class RewriteGroup:
    """Files of one partition that a task merges: data files, or position delete files if the format has such files.

    :param spec_id: see `Partition`.
    :param partition: see `Partition.text`.
    :param files: data files to merge.
    :param deletes: position delete files to merge.
    :param gone: paths of data files that this compaction merges too, or an earlier one has merged. Merged delete files
        need no positions in them.
    :param applying: all position delete files that may delete rows of `files`.
    :param live: paths of the live data files in which `deletes` delete rows. Other positions are left out, and a task
        holds all of them (48 bytes each). None if these aren't known.
    :param apart: with `live`: each data file gets a delete file of its own. Else there is one for all of them.
    """

    spec_id: int
    partition: str
    files: tuple[DataFile, ...]
    deletes: tuple[DeleteFile, ...] = ()
    gone: frozenset[str] = frozenset()
    applying: tuple[DeleteFile, ...] = ()
    live: frozenset[str] | None = None
    apart: bool = False

    @property
    def size_in_bytes(self) -> int:
        files: tuple[DataFile | DeleteFile, ...] = (*self.files, *self.deletes)
        return sum(file.size_in_bytes for file in files)


class DeleteFileMerger:
    """Reads the position delete files of groups, and writes new ones in their place.

    :param files: gets the data files to which new delete files apply.
    """

    def __init__(self, table: TableSpec, factory: FileFactory, files: DataFiles) -> None:
        self._table = table
        self._factory = factory
        self._files = files
        self._deletes = table.deletes(factory, files)
        self._merged: list[ContentFile] = []
        self._read: dict[str, tuple[list[str], Ints, Ints]] = {}

    def deleted(self, group: RewriteGroup) -> dict[str, Ints]:
        """The positions that delete files delete in the group's data files, by path of the data file."""
        found: dict[str, list[Ints]] = {file.path: [] for file in group.files}
        for small in group.applying:
            names, file, pos = read = self._table.deleted_rows(small.path)
            if small.size_in_bytes <= _KEPT_BYTES and len(self._read) < _KEPT:
                self._read[small.path] = read
            for number in np.flatnonzero([name in found for name in names]).tolist():
                found[names[number]].append(pos[file == number])
        return {path: np.concatenate(parts) for path, parts in found.items() if parts}

    def merge(self, group: RewriteGroup) -> None:
        """Delete again what the group's delete files delete in data files that stay."""
        if group.live is not None:
            self._merged += self._written(group)
            return
        for file, pos in self._deleted_again(group):
            self._deletes.delete(file, pos)

    def close(self, files: list[ContentFile]) -> list[ContentFile]:
        """Finish the delete files.

        :param files: the new data files.
        :return: what the commit adds: these, and the delete files.
        """
        return [*self._deletes.close(files), *self._merged]

    def _written(self, group: RewriteGroup) -> Iterator[ContentFile]:
        """Write the positions into one delete file, or each data file's into one. If there were more of them, the same
        files might be due again at once.
        """
        parts = list(self._deleted_again(group))
        if not parts:
            return
        file, pos = (np.concatenate(column) for column in zip(*parts, strict=True))
        order = np.lexsort((pos, file))
        file, pos = file[order], pos[order]
        is_first = np.append(True, (file[1:] != file[:-1]) | (pos[1:] != pos[:-1]))
        file, pos = file[is_first], pos[is_first]
        starts = np.unique(file, return_index=True)[1].tolist() if group.apart else [0]
        for start, stop in pairwise([*starts, len(file)]):
            deletes = self._table.deletes(self._factory, self._files, stop - start + 1)
            deletes.delete(file[start:stop], pos[start:stop])
            yield from deletes.close([])

    def _deleted_again(self, group: RewriteGroup) -> Iterator[tuple[Ints, Ints]]:
        """Numbers of data files that stay, and positions in them, delete file by delete file."""
        numbers: dict[str, int] = {}
        for small in group.deletes:
            known = self._read.pop(small.path, None)
            names, codes, pos = self._table.deleted_rows(small.path) if known is None else known
            for data_file in names:
                stays = data_file not in group.gone and (group.live is None or data_file in group.live)
                if stays and data_file not in numbers:
                    numbers[data_file] = self._files.add(data_file, Partition(group.spec_id, group.partition))
            file = np.array([numbers.get(data_file, -1) for data_file in names], np.int64)[codes]
            yield file[file >= 0], pos[file >= 0]
