"""Moves live rows to new data files, and leaves deleted rows out. The same writers write the rows as in a micro-batch.
The task writes the new places of the rows into the key index, so the index doesn't have to read the new files.

A minor compaction merges small files this way: the index tells which rows are live, and the table how many there are.
With `deletes: copy-on-write`, a task replaces the files from which a micro-batch deletes rows (`CopyGroup`). The
positions of deleted rows tell it which rows are live.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from deltawriters.arrow_types import storage
from deltawriters.collapse import Ints
from deltawriters.content import ContentFile, DataFile, DataFiles, TaskId
from deltawriters.delete_files import DeleteFileMerger, RewriteGroup
from deltawriters.keyindex import (
    RUN_ENTRIES,
    SUPERSEDES,
    CorruptIndexError,
    Entries,
    IndexSlice,
    RunInfo,
    write_run,
)
from deltawriters.old_rows import DeletedRows
from deltawriters.ordering import RowOrder
from deltawriters.parquet import ROW_GROUP_BYTES, joined
from deltawriters.partitioning import PartitionedWriter
from deltawriters.resolve import indexed, is_current, low_hashes
from deltawriters.table import FileFactory, TableSpec, UnreadableRowsError
from deltawriters.vectors import positions_of

_SORTED_BYTES = 1024 * 1024 * 1024
"""A task sorts at most this many bytes of rows at once, with what it needs to sort them. Of a larger group each part is
sorted by itself.
"""
_BYTES_TO_SORT = 72
"""For each row: the hashes of its key, its place, and numbers by which it is sorted."""

HashKeys = Callable[[pa.RecordBatch], npt.NDArray[np.uint64]]
"""A function from key columns, in the types that Spark has for them, to the high hashes of the keys."""


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
class MovedFiles:
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


class Mover:
    """Moves the live rows of groups of files.

    :param key: names of the key columns.
    :param index: the table's key index of the snapshot that has the files.
    :param sequence: sequence of the runs that it writes.
    :param hash_keys: computes the high hashes of keys.
    :param order: the order in which the rows of a group are written. None keeps theirs.
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

    def move(self, groups: Sequence[RewriteGroup] | Sequence[CopyGroup]) -> MovedFiles:
        """Write the groups' live rows to new files, with the index runs that say where they are now. The key index
        tells which rows of a `RewriteGroup` are live, and deleted positions which of a `CopyGroup`. After any
        exception, all files written here are deleted.

        :raises CorruptIndexError: a run is damaged or missing, or the index and the table differ in a file's live rows;
            or positions of deleted rows can't be read.
        :raises LostVectorError: a deletion vector of the table can't be read.
        :raises UnreadableRowsError: a file can't be read as one of the table, or has other columns.
        """
        merger = DeleteFileMerger(self._table, self._factory, self._files)

        def live_rows() -> Iterator[Moved]:
            for group in groups:
                if isinstance(group, CopyGroup):
                    yield from _together(self._kept_parts(group), ROW_GROUP_BYTES)
                else:
                    yield from self._live_rows(group, merger.deleted(group))
                    merger.merge(group)

        self._moving = self._table.of_moved_rows(data_change=all(isinstance(group, CopyGroup) for group in groups))
        return self._written(live_rows(), merger)

    def _written(self, moved: Iterator[Moved], merger: DeleteFileMerger) -> MovedFiles:
        data = PartitionedWriter(self._moving, self._factory, self._files, self._order, lasting=True)
        count = 0
        try:
            for rows, high, low, superseding in moved:
                located = data.write(rows)
                count += rows.num_rows
                order = None if self._index.order is None else self._index.order.of_rows(rows.slice(0, len(high)))
                del rows  # before the next ones are read
                file = located.file[: len(high)].astype(np.uint32) | np.where(superseding, SUPERSEDES, np.uint32(0))
                pos = located.pos[: len(high)].astype(np.uint32)
                for start in range(0, len(high), RUN_ENTRIES):
                    part = slice(start, start + RUN_ENTRIES)
                    orders = None if order is None else order[part]
                    self._entries.append(Entries(high[part], low[part], file[part], pos[part], (), orders))
                    if sum(len(part.high) for part in self._entries) >= RUN_ENTRIES:
                        self._write_run()
            files = merger.close(data.close())
            self._write_run()
        except BaseException:
            data.abort()
            self._factory.delete_all()
            for run in self._runs:
                with suppress(OSError):  # the index's clean-up finds it later, and the first error says what to do
                    self._index.io.delete(f"{self._index.location}/{run.name}")
            raise
        paths = [*self._factory.created, *(f"{self._index.location}/{run.name}" for run in self._runs)]
        return MovedFiles(files, self._runs, paths, count)

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
                low = low_hashes(self._table, self._index, self._key, rows)
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
                if size >= ROW_GROUP_BYTES // 4:  # what is read comes on top of the row group that is being filled
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
        names = dict.fromkeys([*self._key, *self._index.columns_of_versions])
        keys = pa.concat_tables([part.rows.select(list(names)) for part in parts]).combine_chunks()
        high = self._hash_keys(_as_spark_types(keys.select(self._key)))
        low, may_supersede = low_hashes(self._table, self._index, self._key, keys), is_current(self._index, keys)
        del keys
        located = self._index.probe(high, low, 0, 2**64)
        number_of = {file.path: number for number, file in enumerate(located.files)}
        own = np.array([number_of.get(part.path, -1) for part in parts])
        lengths = [len(part.places) for part in parts]
        of_part, places = np.repeat(np.arange(len(parts)), lengths), np.concatenate([part.places for part in parts])
        is_own = (located.file == own[of_part[located.query]]) & (located.pos == places[located.query])
        live = np.sort(located.query[is_own])
        alone = (np.bincount(located.query, minlength=len(high)) == 1) & may_supersede
        ends = np.cumsum(lengths)
        found = list[pa.Table]()
        for part, mine in zip(parts, np.split(live, np.searchsorted(live, ends[:-1])), strict=True):
            mine = mine - (ends[len(found)] - len(part.places))
            part.check.add(part.all_places, np.union1d(part.places[mine], part.without_key) - part.all_places[0])
            found.append(part.rows.take(pa.array(mine)))
        parts.clear()
        return pa.concat_tables(found), high[live], low[live], alone[live]

    def _write_run(self) -> None:
        if not self._entries:
            return
        name = f"{self._task.operation}-{self._task.partition:05d}-{self._task.attempt}-{len(self._runs)}"
        files = self._files
        named = tuple(indexed(files.path(n), files.partition(n)) for n in range(len(files)))
        entries, index = Entries.joined(self._entries, named), self._index
        self._runs.append(write_run(index.io, index.location, name, self._sequence, entries, index.entries))
        self._entries = []


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
