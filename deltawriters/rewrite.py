"""Merges small data files into large ones and leaves deleted rows out. A task of a minor compaction does this.

The key index knows which rows are live. The same writers write the rows as in a micro-batch. The task writes the new
places of the rows into the index, so the index doesn't have to read the new files.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from deltawriters.collapse import Ints
from deltawriters.content import ContentFile, Partition
from deltawriters.deletes import Deletes
from deltawriters.files import DataFiles, FileFactory
from deltawriters.keyindex import (
    SUPERSEDES,
    CorruptIndexError,
    Entries,
    IndexSlice,
    RunInfo,
    low_hash,
    write_run,
)
from deltawriters.partitioning import PartitionedWriter, storage
from deltawriters.resolve import indexed, key_columns
from deltawriters.table import TableSpec, TaskId

_FLUSH_BYTES = 128 * 1024 * 1024
_RUN_ENTRIES = 4_000_000
"""A task holds this many index entries (24 bytes each) before it writes a run."""

HashKeys = Callable[[pa.RecordBatch], npt.NDArray[np.uint64]]
"""A function from key columns, in the types that Spark has for them, to the high hashes of the keys."""


@dataclass(frozen=True)
class SmallFile:
    """A data file or position delete file that the sink wrote under the table's current schema and layout.

    :param first_row_id: row id of the first row, for rows whose id isn't stored. None if the table has no row ids, and
        for delete files.
    :param sequence_number: number of the commit that added the file, as the table's format counts them.
    :param live_rows: number of live rows, from the table's metadata. None if only the delete files tell.
    """

    path: str
    size_in_bytes: int
    first_row_id: int | None
    sequence_number: int
    live_rows: int | None = None


@dataclass(frozen=True)
class RewriteGroup:
    """Files of one partition that a task merges: data files, or position delete files if the format has such files.

    :param spec_id: see `Partition`.
    :param partition: see `Partition.text`.
    :param files: data files to merge.
    :param deletes: position delete files to merge.
    :param gone: paths of data files that this compaction merges too. Merged delete files need no positions in them.
    :param applying: all position delete files that may delete rows of `files`.
    """

    spec_id: int
    partition: str
    files: tuple[SmallFile, ...]
    deletes: tuple[SmallFile, ...] = ()
    gone: frozenset[str] = frozenset()
    applying: tuple[SmallFile, ...] = ()

    @property
    def size_in_bytes(self) -> int:
        return sum(file.size_in_bytes for file in (*self.files, *self.deletes))


@dataclass(frozen=True)
class Rewritten:
    """What a task wrote: the new files, and the index runs that say where the rows are now. `paths` has the paths of
    both.
    """

    files: list[ContentFile]
    runs: list[RunInfo]
    paths: list[str]


class Rewriter:
    """Rewrites groups of small files.

    :param key: names of the key columns.
    :param index: the table's key index of the snapshot that has the files.
    :param sequence: sequence of the runs that the rewriter writes.
    :param hash_keys: computes the high hashes of keys.
    """

    def __init__(
        self, table: TableSpec, key: Sequence[str], index: IndexSlice, sequence: int, hash_keys: HashKeys, task: TaskId
    ) -> None:
        self._table = table
        self._key = list(key)
        self._index = index
        self._sequence = sequence
        self._hash_keys = hash_keys
        self._task = task
        self._factory = FileFactory(table, task)
        self._files = DataFiles()
        self._entries: list[Entries] = []
        self._runs: list[RunInfo] = []

    def rewrite(self, groups: Iterable[RewriteGroup]) -> Rewritten:
        """Write the new files and index runs of all groups. After any exception, all files written here are deleted.

        :raises CorruptIndexError: a run is damaged or missing, or the index and the table differ in a file's live rows.
        :raises OtherColumnsError: a file has other columns than the table.
        """
        data = PartitionedWriter(self._table.of_moved_rows, self._factory, self._files, lasting=True)
        deletes = self._table.deletes(self._factory, self._files)
        try:
            for group in groups:
                for rows, high, low, superseding in self._live_rows(group, self._deleted(group)):
                    located = data.write(rows)
                    file = located.file.astype(np.uint32) | np.where(superseding, SUPERSEDES, np.uint32(0))
                    self._entries.append(Entries(high, low, file, located.pos.astype(np.uint32), ()))
                    if sum(len(part.high) for part in self._entries) >= _RUN_ENTRIES:
                        self._write_run()
                self._delete_again(group, deletes)
            files = deletes.close(data.close())
            self._write_run()
        except BaseException:
            data.abort()
            self._factory.delete_all()
            for run in self._runs:
                self._index.io.delete(f"{self._index.location}/{run.name}")
            raise
        paths = [*self._factory.created, *(f"{self._index.location}/{run.name}" for run in self._runs)]
        return Rewritten(files, self._runs, paths)

    def _live_rows(
        self, group: RewriteGroup, deleted: Mapping[str, Ints]
    ) -> Iterator[tuple[pa.Table, npt.NDArray[np.uint64], npt.NDArray[np.uint64], npt.NDArray[np.bool_]]]:
        """The rows to keep, about a row group at a time.

        :param deleted: positions that delete files delete, by path of the data file.
        :return: tuples of n rows, the n high and n low hashes of their keys, and n flags. A flag is true if the key has
            no other live row.
        """
        waiting, size = list[tuple[pa.Table, Ints, Ints, npt.NDArray[np.bool_]]](), 0
        for small in group.files:
            rows = self._table.moved_rows(small, _partition(group))
            keys = rows.select(self._key)
            high = self._hash_keys(_as_spark_types(keys))
            low = low_hash(key_columns(self._table, keys), self._index.base)
            located = self._index.probe(high, low, 0, 2**64)
            own = next((n for n, file in enumerate(located.files) if file.path == small.path), -1)
            query = located.query[(located.file == own) & (located.pos == located.query)]
            alone = np.bincount(located.query, minlength=len(high)) == 1
            live = np.sort(query)
            self._check_live(small, live, len(rows), deleted)
            waiting.append((rows.take(pa.array(live)), high[live], low[live], alone[live]))
            size += waiting[-1][0].nbytes
            if size >= _FLUSH_BYTES:
                yield _joined(waiting)
                waiting, size = [], 0
        if any(len(high) for _, high, _, _ in waiting):
            yield _joined(waiting)

    def _check_live(self, small: SmallFile, live: Ints, rows: int, deleted: Mapping[str, Ints]) -> None:
        """Check that the index knows the same live rows as the table. The rewrite would lose a row that the index
        doesn't know.

        :param live: positions of the live rows by the index, ascending.
        :param rows: number of rows in the file.
        :param deleted: positions that delete files delete, by path of the data file.
        :raises CorruptIndexError: the index knows other rows.
        """
        if small.live_rows is not None:
            is_right, expected = len(live) == small.live_rows, small.live_rows
        else:
            kept = np.ones(rows, np.bool_)
            if small.path in deleted:
                kept[deleted[small.path]] = False
            is_right, expected = np.array_equal(live, np.flatnonzero(kept)), int(np.count_nonzero(kept))
        if not is_right:
            raise CorruptIndexError(
                f"the index and the table have different live rows for {small.path}: "
                f"the index knows {len(live):,}, the table has {expected:,}"
            )

    def _deleted(self, group: RewriteGroup) -> dict[str, Ints]:
        """The positions that delete files delete in the group's data files, by path of the data file."""
        found: dict[str, list[Ints]] = {small.path: [] for small in group.files}
        for small in group.applying:
            names, file, pos = self._table.deleted_rows(small)
            for number in np.flatnonzero([name in found for name in names]).tolist():
                found[names[number]].append(pos[file == number])
        return {path: np.concatenate(parts) for path, parts in found.items() if parts}

    def _delete_again(self, group: RewriteGroup, deletes: Deletes) -> None:
        """Add to `deletes` all positions of the group's delete files, except those in the data files `group.gone`."""
        numbers: dict[str, int] = {}
        for small in group.deletes:
            names, codes, pos = self._table.deleted_rows(small)
            for data_file in names:
                if data_file not in numbers and data_file not in group.gone:
                    numbers[data_file] = self._files.add(data_file, _partition(group))
            file = np.array([numbers.get(data_file, -1) for data_file in names], np.int64)[codes]
            deletes.delete(file[file >= 0], pos[file >= 0])

    def _write_run(self) -> None:
        if not self._entries:
            return
        name = f"{self._task.operation}-{self._task.partition:05d}-{self._task.attempt}-{len(self._runs)}"
        files = self._files
        entries = Entries(
            high=np.concatenate([part.high for part in self._entries]),
            low=np.concatenate([part.low for part in self._entries]),
            file=np.concatenate([part.file for part in self._entries]),
            pos=np.concatenate([part.pos for part in self._entries]),
            files=tuple(indexed(files.path(n), files.partition(n)) for n in range(len(files))),
        )
        self._runs.append(write_run(self._index.io, self._index.location, name, self._sequence, entries))
        self._entries = []


def _partition(group: RewriteGroup) -> Partition:
    return Partition(group.spec_id, group.partition)


def _joined(
    parts: Sequence[tuple[pa.Table, Ints, Ints, npt.NDArray[np.bool_]]],
) -> tuple[pa.Table, npt.NDArray[np.uint64], npt.NDArray[np.uint64], npt.NDArray[np.bool_]]:
    tables, high, low, alone = zip(*parts, strict=True)
    return pa.concat_tables(tables), np.concatenate(high), np.concatenate(low), np.concatenate(alone)


def _as_spark_types(keys: pa.Table) -> pa.RecordBatch:
    """The key columns in Spark's types: binary for a uuid, other types as they are."""
    columns = []
    for column in keys.columns:
        values = storage(column)
        columns.append(values.cast(pa.binary()) if pa.types.is_fixed_size_binary(values.type) else values)
    return pa.RecordBatch.from_arrays(columns, keys.column_names)
