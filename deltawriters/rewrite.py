"""Moves live rows to new data files, and leaves deleted rows out. The same writers write the rows as in a micro-batch.
The task writes the new places of the rows into the key index, so the index doesn't have to read the new files.

A minor compaction merges small files this way: the index tells which rows are live, and the table how many there are.
With `deletes: copy-on-write`, a task replaces the files from which a micro-batch deletes rows (`Rewriter.copy`). The
positions of deleted rows tell it which rows are live.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from deltawriters.arrow_types import storage
from deltawriters.collapse import Ints
from deltawriters.content import ContentFile, DataFile, DataFiles, DeleteFile, Partition, TaskId
from deltawriters.deletes import Deletes
from deltawriters.keyindex import (
    RUN_ENTRIES,
    SUPERSEDES,
    CorruptIndexError,
    Entries,
    IndexSlice,
    RunInfo,
    low_hash,
    write_run,
)
from deltawriters.old_rows import DeletedRows
from deltawriters.ordering import RowOrder
from deltawriters.parquet import ROW_GROUP_BYTES, joined
from deltawriters.partitioning import PartitionedWriter
from deltawriters.resolve import indexed, key_columns
from deltawriters.table import FileFactory, TableSpec, UnreadableRowsError
from deltawriters.vectors import positions_of

_SORTED_BYTES = 1024 * 1024 * 1024
"""A task sorts at most this many bytes of rows at once, with what it needs to sort them. Of a larger group each part is
sorted by itself.
"""
_BYTES_TO_SORT = 72
"""For each row: the hashes of its key, its place, and numbers by which it is sorted."""
_KEPT, _KEPT_BYTES = 256, 64 * 1024
"""At most this many delete files, of up to this size, are kept in memory. They are needed twice if they are merged
with data files."""

HashKeys = Callable[[pa.RecordBatch], npt.NDArray[np.uint64]]
"""A function from key columns, in the types that Spark has for them, to the high hashes of the keys."""


@dataclass(frozen=True)
class RewriteGroup:
    """Files of one partition that a task merges: data files, or position delete files if the format has such files.

    :param spec_id: see `Partition`.
    :param partition: see `Partition.text`.
    :param files: data files to merge.
    :param deletes: position delete files to merge.
    :param gone: paths of data files that this compaction merges too. Merged delete files need no positions in them.
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


@dataclass(frozen=True)
class CopyGroup:
    """Data files whose live rows a task moves to new files.

    :param rows: rows that the commit deletes in these files.
    """

    files: tuple[DataFile, ...]
    rows: DeletedRows

    @property
    def size_in_bytes(self) -> int:
        return sum(file.part_bytes for file in self.files)


@dataclass(frozen=True)
class Rewritten:
    """What a task wrote: the new files, and the index runs that say where the rows are now. `paths` has the paths of
    both.

    :param rows: number of rows that were moved.
    """

    files: list[ContentFile]
    runs: list[RunInfo]
    paths: list[str]
    rows: int


Moved = tuple[pa.Table, npt.NDArray[np.uint64], npt.NDArray[np.uint64], npt.NDArray[np.bool_]]
"""n rows, the n high and n low hashes of their keys, and n flags: the key is known to have no other live row. For rows
that the key index doesn't have, since their keys are NULL, there are no hashes and flags.
"""


class Rewriter:
    """Rewrites groups of files.

    :param key: names of the key columns.
    :param index: the table's key index of the snapshot that has the files.
    :param sequence: sequence of the runs that the rewriter writes.
    :param hash_keys: computes the high hashes of keys.
    :param order: the order in which the rows of a group are written. None keeps theirs, and copies always keep it.
    """

    def __init__(
        self,
        table: TableSpec,
        key: Sequence[str],
        index: IndexSlice,
        sequence: int,
        hash_keys: HashKeys,
        task: TaskId,
        order: RowOrder | None = None,
    ) -> None:
        self._table = self._moving = table
        self._key = list(key)
        self._index = index
        self._sequence = sequence
        self._hash_keys = hash_keys
        self._task = task
        self._order = order
        self._factory = FileFactory(table, task)
        self._files = DataFiles()
        self._entries: list[Entries] = []
        self._runs: list[RunInfo] = []
        self._read: dict[str, tuple[list[str], Ints, Ints]] = {}

    def rewrite(self, groups: Iterable[RewriteGroup]) -> Rewritten:
        """Write the new files and index runs of all groups. After any exception, all files written here are deleted.

        :raises CorruptIndexError: a run is damaged or missing, or the index and the table differ in a file's live rows.
        :raises UnreadableRowsError: a file has other columns than the table.
        """
        deletes = self._table.deletes(self._factory, self._files)
        merged = list[ContentFile]()

        def moved() -> Iterator[Moved]:
            for group in groups:
                yield from self._live_rows(group, self._deleted(group))
                if group.live is None:
                    self._delete_again(group, deletes)
                else:
                    merged.extend(self._merged_deletes(group))

        self._moving = self._table.of_moved_rows(data_change=False)
        return self._written(moved(), lambda files: [*deletes.close(files), *merged], self._order)

    def copy(self, groups: Iterable[CopyGroup]) -> Rewritten:
        """Write the rows that stay of all groups, and their index runs. After any exception, all files written here are
        deleted.

        :raises CorruptIndexError: positions of deleted rows can't be read, or a run of the index.
        :raises LostVectorError: a deletion vector of the table can't be read.
        :raises UnreadableRowsError: a file can't be read as one of the table.
        """
        moved = (part for group in groups for part in _together(self._kept_parts(group), ROW_GROUP_BYTES))
        self._moving = self._table.of_moved_rows(data_change=True)
        return self._written(moved, lambda files: files)

    def _written(
        self,
        moved: Iterator[Moved],
        finish: Callable[[list[ContentFile]], list[ContentFile]],
        order: RowOrder | None = None,
    ) -> Rewritten:
        data = PartitionedWriter(self._moving, self._factory, self._files, order, lasting=True)
        count = 0
        try:
            for rows, high, low, superseding in moved:
                located = data.write(rows)
                count += rows.num_rows
                del rows  # before the next ones are read
                file = located.file[: len(high)].astype(np.uint32) | np.where(superseding, SUPERSEDES, np.uint32(0))
                pos = located.pos[: len(high)].astype(np.uint32)
                for start in range(0, len(high), RUN_ENTRIES):
                    part = slice(start, start + RUN_ENTRIES)
                    self._entries.append(Entries(high[part], low[part], file[part], pos[part], ()))
                    if sum(len(part.high) for part in self._entries) >= RUN_ENTRIES:
                        self._write_run()
            files = finish(data.close())
            self._write_run()
        except BaseException:
            data.abort()
            self._factory.delete_all()
            for run in self._runs:
                with suppress(OSError):  # the index's clean-up finds it later, and the first error says what to do
                    self._index.io.delete(f"{self._index.location}/{run.name}")
            raise
        paths = [*self._factory.created, *(f"{self._index.location}/{run.name}" for run in self._runs)]
        return Rewritten(files, self._runs, paths, count)

    def _kept_parts(self, group: CopyGroup) -> Iterator[Moved]:
        """The rows that a commit leaves in data files, a slice of a row group at a time.

        Nothing is said of other rows of their keys: another writer may have written some, and to look for them would
        take a probe for each row.
        """
        # what Spark shares out goes through a file, so it has no credentials
        rows_to_delete = replace(group.rows, io_properties=self._index.io_properties)
        left_out = {file.path: positions for file, positions in rows_to_delete.positions()}
        for touched in group.files:
            (deleted,) = self._table.deleted_in([touched])
            gone = left_out[touched.path] | deleted
            parts = self._moving.rows(touched, left_out=positions_of(gone))
            if touched.by_key:  # each question to the index has a price
                parts = joined(parts, ROW_GROUP_BYTES)
            for places, rows in parts:
                if len(rows) != len(places):
                    raise UnreadableRowsError(f"{touched.path} has {len(places)} rows, of which {len(rows)} were read")
                has_key = self._has_key(rows)
                if not has_key.all():
                    if touched.by_key:
                        raise UnreadableRowsError(
                            f"{touched.path} has rows whose key is NULL, and equality deletes apply to it. Nothing "
                            "tells which of these rows are live: compact the table with Spark"
                        )
                    yield _without_key(rows.filter(pa.array(~has_key)))
                    rows, places = rows.filter(pa.array(has_key)), places[has_key]
                keys = rows.select(self._key)
                high = self._hash_keys(_as_spark_types(keys))
                low = low_hash(key_columns(self._table, keys), self._index.base)
                if touched.by_key:
                    live = self._live_by_index(touched.path, places, high, low)
                    rows, high, low = rows.filter(pa.array(live)), high[live], low[live]
                yield rows, high, low, np.zeros(len(high), np.bool_)

    def _has_key(self, rows: pa.Table) -> npt.NDArray[np.bool_]:
        """Which rows have a key without a NULL. Others are other writers', and the key index has none of them."""
        found = np.ones(len(rows), np.bool_)
        for name in self._key:
            if rows.column(name).null_count:
                found &= rows.column(name).is_valid().to_numpy()
        return found

    def _live_by_index(
        self, path: str, places: Ints, high: npt.NDArray[np.uint64], low: npt.NDArray[np.uint64]
    ) -> npt.NDArray[np.bool_]:
        """Which rows of a data file are live, as the key index knows.

        :param places: positions of n rows, ascending.
        :param high: high hashes of their keys, and `low` the low ones.
        """
        located = self._index.probe(high, low, 0, 2**64)
        own = next((n for n, file in enumerate(located.files) if file.path == path), -1)
        live = np.zeros(len(places), np.bool_)
        live[located.query[(located.file == own) & (located.pos == places[located.query])]] = True
        return live

    def _live_rows(self, group: RewriteGroup, deleted: Mapping[str, Ints]) -> Iterator[Moved]:
        """The rows to keep, about a row group at a time. Rows that are to be sorted come all at once, if they aren't
        too many.

        :param deleted: positions that delete files delete, by path of the data file.
        """
        parts = self._live_parts(group, deleted)
        if self._order is None:
            return _together(parts, ROW_GROUP_BYTES)
        return _together(parts, _SORTED_BYTES, _BYTES_TO_SORT)

    def _live_parts(self, group: RewriteGroup, deleted: Mapping[str, Ints]) -> Iterator[Moved]:
        """Like `_live_rows`, as they come. The index is asked once for many small files: each question has a price."""
        parts, whole, size = list[_Part](), list[_LiveCheck](), 0
        for small in group.files:
            check = _LiveCheck(small, deleted)
            for places, rows in self._moving.rows(small):
                has_key = self._has_key(rows)
                if has_key.all():
                    part = _Part(check, small.path, places, rows, places)
                else:
                    if not check.knows_vector:
                        (deleted_by_vector,) = self._table.deleted_in([small])
                        check.add_vector(positions_of(deleted_by_vector))
                    stay = ~has_key & ~check.is_deleted(places)
                    yield _without_key(rows.filter(pa.array(stay)))
                    rows = rows.filter(pa.array(has_key))
                    part = _Part(check, small.path, places[has_key], rows, places, places[stay])
                parts.append(part)
                size += rows.nbytes
                del rows
                if size >= ROW_GROUP_BYTES:
                    yield self._live(parts)
                    size = 0
            whole.append(check)
            if not parts:
                _finish(whole)
        if parts:
            yield self._live(parts)
        _finish(whole)

    def _live(self, parts: list["_Part"]) -> Moved:
        """The live rows of some parts of files. Nothing holds the parts afterwards."""
        keys = pa.concat_tables([part.rows.select(self._key) for part in parts]).combine_chunks()
        high = self._hash_keys(_as_spark_types(keys))
        low = low_hash(key_columns(self._table, keys), self._index.base)
        del keys
        located = self._index.probe(high, low, 0, 2**64)
        number_of = {file.path: number for number, file in enumerate(located.files)}
        own = np.array([number_of.get(part.path, -1) for part in parts])
        lengths = [len(part.places) for part in parts]
        of_part, places = np.repeat(np.arange(len(parts)), lengths), np.concatenate([part.places for part in parts])
        is_own = (located.file == own[of_part[located.query]]) & (located.pos == places[located.query])
        live = np.sort(located.query[is_own])
        alone = np.bincount(located.query, minlength=len(high)) == 1
        ends = np.cumsum(lengths)
        found = list[pa.Table]()
        for part, mine in zip(parts, np.split(live, np.searchsorted(live, ends[:-1])), strict=True):
            mine = mine - (ends[len(found)] - len(part.places))
            part.check.add(part.all_places, np.union1d(part.places[mine], part.without_key) - part.all_places[0])
            found.append(part.rows.take(pa.array(mine)))
        parts.clear()
        return pa.concat_tables(found), high[live], low[live], alone[live]

    def _deleted(self, group: RewriteGroup) -> dict[str, Ints]:
        """The positions that delete files delete in the group's data files, by path of the data file."""
        found: dict[str, list[Ints]] = {small.path: [] for small in group.files}
        for small in group.applying:
            names, file, pos = read = self._table.deleted_rows(small.path)
            if small.size_in_bytes <= _KEPT_BYTES and len(self._read) < _KEPT:
                self._read[small.path] = read
            for number in np.flatnonzero([name in found for name in names]).tolist():
                found[names[number]].append(pos[file == number])
        return {path: np.concatenate(parts) for path, parts in found.items() if parts}

    def _delete_again(self, group: RewriteGroup, deletes: Deletes) -> None:
        """Add to `deletes` all positions of the group's delete files in data files that stay."""
        for file, pos in self._deleted_again(group):
            deletes.delete(file, pos)

    def _merged_deletes(self, group: RewriteGroup) -> Iterator[ContentFile]:
        """Write the same positions into one delete file, or each data file's into one. If there were more of them, the
        same files might be due again at once.
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
                    numbers[data_file] = self._files.add(data_file, _partition(group))
            file = np.array([numbers.get(data_file, -1) for data_file in names], np.int64)[codes]
            yield file[file >= 0], pos[file >= 0]

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


@dataclass(frozen=True)
class _Part:
    """Rows of a file that have a key, and their positions in it.

    :param all_places: also those of rows without a key.
    :param without_key: positions of those that are live, ascending.
    """

    check: "_LiveCheck"
    path: str
    places: Ints
    rows: pa.Table
    all_places: Ints
    without_key: Ints = field(default_factory=lambda: np.empty(0, np.int64))


def _finish(checks: list["_LiveCheck"]) -> None:
    """See `_LiveCheck.finish`."""
    for check in checks:
        check.finish()
    checks.clear()


class _LiveCheck:
    """Checks that the index knows the same live rows of a file as the table. A rewrite would lose a row that the index
    doesn't know.

    :param deleted: positions that delete files delete, by path of the data file.
    """

    def __init__(self, small: DataFile, deleted: Mapping[str, Ints]) -> None:
        self._small = small
        self._deleted = np.sort(deleted.get(small.path, np.empty(0, np.int64)))
        self._known = 0
        self._expected = 0
        self._is_right = True
        self.knows_vector = small.vector is None

    def add_vector(self, deleted: Ints) -> None:
        """The positions that the file's deletion vector deletes. They are needed only if there are rows without a key:
        the index knows which others are live.
        """
        self._deleted = np.union1d(self._deleted, deleted)
        self.knows_vector = True

    def is_deleted(self, places: Ints) -> npt.NDArray[np.bool_]:
        """Which rows are deleted by delete files.

        :param places: their positions: all between the first and the last.
        """
        found = np.zeros(len(places), np.bool_)
        first, last = np.searchsorted(self._deleted, [places[0], places[-1] + 1])
        found[self._deleted[first:last] - places[0]] = True
        return found

    def add(self, places: Ints, live: Ints) -> None:
        """A part of the file's rows.

        :param places: their positions: all between the first and the last.
        :param live: which of them are live by the index, or have no key, ascending.
        """
        self._known += len(live)
        if self._small.live_rows is None:
            kept = ~self.is_deleted(places)
            self._expected += int(np.count_nonzero(kept))
            self._is_right &= np.array_equal(live, np.flatnonzero(kept))

    def finish(self) -> None:
        """All rows were added.

        :raises CorruptIndexError: the index knows other rows.
        """
        if self._small.live_rows is not None:
            self._expected = self._small.live_rows
            self._is_right = self._known == self._expected
        if not self._is_right:
            raise CorruptIndexError(
                f"the index and the table have different live rows for {self._small.path}: "
                f"the index knows {self._known:,}, the table has {self._expected:,}"
            )


def _without_key(rows: pa.Table) -> Moved:
    """Rows that the key index doesn't have."""
    nothing = np.empty(0, np.uint64)
    return rows, nothing, nothing, np.empty(0, np.bool_)


def _together(parts: Iterable[Moved], at_once: int, per_row: int = 0) -> Iterator[Moved]:
    """The parts, together up to so many bytes. A larger part stays as it is. Rows without a key stay apart from others.

    :param per_row: bytes to add for each row.
    """
    waiting: dict[bool, list[Moved]] = {True: [], False: []}
    held = 0
    for part in parts:
        rows, high, _, _ = part
        size = rows.nbytes + len(rows) * per_row
        if held and held + size > at_once:
            yield from _taken(waiting)
            held = 0
        if len(rows):
            waiting[len(high) == len(rows)].append(part)
            held += size
        del part, rows, high  # before the next one is read
        if held >= at_once:
            yield from _taken(waiting)
            held = 0
    yield from _taken(waiting)


def _taken(waiting: Mapping[bool, list[Moved]]) -> Iterator[Moved]:
    """All parts, as one with keys and one without. Nothing holds them afterwards, so that their memory is free when the
    caller is done with it.
    """
    for parts in waiting.values():
        if parts:
            tables, high, low, alone = zip(*parts, strict=True)
            parts.clear()
            yield pa.concat_tables(tables), np.concatenate(high), np.concatenate(low), np.concatenate(alone)


def _as_spark_types(keys: pa.Table) -> pa.RecordBatch:
    """The key columns in Spark's types: binary for a uuid, other types as they are."""
    columns = []
    for column in keys.columns:
        values = storage(column)
        columns.append(values.cast(pa.binary()) if pa.types.is_fixed_size_binary(values.type) else values)
    return pa.RecordBatch.from_arrays(columns, keys.column_names)
