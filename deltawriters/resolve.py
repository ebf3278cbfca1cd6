"""Finds the rows that a commit's keys have in earlier snapshots, by the key index, and writes the commit's own entries
into the index.
"""

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from changelog.rows import HASH
from deltawriters.arrow_types import large_type, storage
from deltawriters.collapse import Ints
from deltawriters.content import ContentFile, DataFiles, OldRows, Partition, TaskId, by_file
from deltawriters.keyindex import (
    SUPERSEDES,
    TOMBSTONE,
    Entries,
    IndexedFile,
    IndexSlice,
    Located,
    RunInfo,
    low_hash,
    of_versions,
    open_run,
    write_run,
)
from deltawriters.order_values import UNKNOWN
from deltawriters.scratch import Scratch
from deltawriters.table import FileFactory, TableSpec

NOWHERE = -1
"""In a key map's `file`: the key has no live row in this commit."""
_COMPARED = 500_000
"""The driver compares at most this many moved rows at a time with what was written meanwhile, 60 bytes each."""


@dataclass(frozen=True)
class IndexTask:
    """One task's part of the key index. The task owns the keys whose high hash (unsigned) is in [first, last).

    :param slice: the version of the index that the task reads.
    :param sequence: age of the run that the task writes. It is higher than the sequence of every run in `slice`.
    :param run_name: file name of the run that the task writes. It is unique to the task attempt.
    """

    slice: IndexSlice
    first: int
    last: int
    sequence: int
    run_name: str

    @property
    def of_empty_table(self) -> "IndexTask":
        """The same part of an index that knows no row."""
        return replace(self, slice=replace(self.slice, runs=(), merge=()))

    def parts(self, most: int) -> "list[IndexTask]":
        """The task in parts of about `most` entries each."""
        ranges = self.slice.ranges(self.first, self.last, most)
        return [
            replace(self, first=first, last=last, run_name=f"{self.run_name}-{number}")
            for number, (first, last) in enumerate(ranges)
        ]

    def merged_runs(self) -> list[RunInfo]:
        """Do the task's share of merging runs."""
        return self.slice.write_merged(f"{self.run_name}-merged", self.first, self.last) if self.slice.merge else []


@dataclass(frozen=True)
class IndexResult:
    """What the key index knew about a task's keys, and the runs that the task adds to the index.

    :param runs: the new run with the task's own entries.
    :param merged: new runs that replace the runs of `IndexSlice.merge`.
    :param old_rows: rows of earlier snapshots that must be deleted.
    :param inserted: number of keys that were not in the table and now have a row.
    :param updated: number of keys that were in the table and have a new row.
    :param deleted: number of keys that were in the table and have no row now.
    :param absent: number of keys that were deleted, but were not in the table.
    :param duplicates: number of old rows beyond the first row of each key. Only another writer can have written them;
        the commit deletes them too.
    :param probe_seconds: seconds that the look-up of the keys took.
    :param deleted_keys: the file with deleted keys that the task wrote, if it wrote one (`deltawriters.tombstones`):
        its name and the number of keys.
    :param truncates: the order values of the source's TRUNCATEs, if the index has order values: of the last one, or in
        a table with history of all.
    """

    runs: list[RunInfo]
    merged: list[RunInfo]
    old_rows: list[OldRows]
    inserted: int = 0
    updated: int = 0
    deleted: int = 0
    absent: int = 0
    duplicates: int = 0
    probe_seconds: float = 0.0
    deleted_keys: tuple[str, int] | None = None
    truncates: tuple[bytes, ...] = ()

    def and_more(self, other: "IndexResult") -> "IndexResult":
        """Both parts of a task, but for `deleted_keys` and `truncates`."""
        both = ((name, getattr(self, name), getattr(other, name)) for name in _ADDED)
        return IndexResult(**{name: one + another for name, one, another in both})


_ADDED = (
    *("runs", "merged", "old_rows"),
    *("inserted", "updated", "deleted", "absent", "duplicates", "probe_seconds"),
)


def key_columns(table: TableSpec, keys: pa.Table) -> list[pa.Array]:
    """The key columns in the table's types, as plain arrays. The low hash is computed over them.

    Text that is too long for Arrow's usual types has Arrow's large types. Its hash is the same.
    """
    columns = []
    for name in keys.column_names:
        dtype = table.arrow_schema.field(name).type
        dtype = dtype.storage_type if isinstance(dtype, pa.BaseExtensionType) else dtype
        column = storage(keys.column(name))
        columns.append(column if column.type == large_type(dtype) else column.cast(dtype))
    return columns


def low_hashes(table: TableSpec, index: IndexSlice, key: Sequence[str], rows: pa.Table) -> npt.NDArray[np.uint64]:
    """The low hashes under which the index has n rows of the table.

    :param rows: has the key columns, and of an index with history `current` and the order columns.
    """
    low = low_hash(key_columns(table, rows.select(key)), index.base)
    closed = np.flatnonzero(~is_current(index, rows))
    if len(closed):
        assert index.order is not None
        orders = index.order.of_rows(rows.select(index.order.columns).take(pa.array(closed)))
        low[closed] = of_versions(low[closed], orders, index.base)
    return low


def is_current(index: IndexSlice, rows: pa.Table) -> npt.NDArray[np.bool_]:
    """Which rows of a table are no closed versions."""
    if index.current is None:
        return np.ones(len(rows), np.bool_)
    flags = pc.fill_null(storage(rows.column(index.current)), False)
    return np.asarray(flags.to_numpy(zero_copy_only=False))


@dataclass(frozen=True)
class ClosedVersions:
    """Closed versions of rows that a commit writes into a table with history.

    :param entries: the index's entries of n versions. The files are those of the task.
    :param replaced: the index's entries of versions that these replace, as tombstones.
    :param old_rows: the rows of those, which are to be deleted.
    """

    entries: Entries
    replaced: Entries
    old_rows: Sequence[OldRows]


def resolve(
    table: TableSpec,
    index: IndexTask,
    keys: pa.Table,
    high: npt.NDArray[np.uint64],
    file: Ints,
    pos: Ints,
    files: DataFiles,
    order: pa.BinaryArray | None = None,
    deleted_at: npt.NDArray[np.uint32] | None = None,
    closed: ClosedVersions | None = None,
) -> IndexResult:
    """Look up every key of the commit, and write the run that says where the rows of these keys are now.

    :param keys: key columns, n rows, distinct.
    :param high: high hashes of the n keys.
    :param file: number in `files` of the data file that has the key's row, or `NOWHERE`.
    :param pos: position of the key's row in that file.
    :param files: the data files that the task wrote.
    :param order: the order value of each key's last change, if the index has order values.
    :param deleted_at: when each key was deleted, if it was, in seconds since 1970; likewise.
    :param closed: what the commit writes beside the keys' rows, if the table has history.
    :raises CorruptIndexError: a run of the index is damaged or missing.
    """
    low = low_hash(key_columns(table, keys), index.slice.base)
    started = time.monotonic()
    located = index.slice.probe(high, low, index.first, index.last)
    probe_seconds = time.monotonic() - started
    known = np.zeros(len(file), np.bool_)
    known[located.query] = True
    live = file != NOWHERE
    entries = Entries(
        high=high,
        low=low,
        # A key that wasn't in the table gets a tombstone too: so the run has every key of the commit, and
        # `rows_written_meanwhile` finds them there.
        file=np.where(live, file.astype(np.uint32) | SUPERSEDES, TOMBSTONE),
        pos=np.where(live, pos, 0 if deleted_at is None else deleted_at).astype(np.uint32),
        files=tuple(indexed(files.path(number), files.partition(number)) for number in range(len(files))),
        order=order,
    )
    old_rows = by_file(located.file, located.pos, located.files)
    if closed is not None:
        # of a version's entries, those before its tombstone stay visible
        entries = Entries.joined([entries, closed.entries, closed.replaced], entries.files)
        old_rows = _united([*old_rows, *closed.old_rows])
    runs = list[RunInfo]()
    if len(entries.high):  # of a table with history, all changes may have been late, or partial and without a row
        slice_ = index.slice
        runs = [write_run(slice_.io, slice_.location, index.run_name, index.sequence, entries, slice_.entries)]
    return IndexResult(
        runs=runs,
        merged=index.merged_runs(),
        old_rows=old_rows,
        inserted=int(np.count_nonzero(live & ~known)),
        updated=int(np.count_nonzero(live & known)),
        deleted=int(np.count_nonzero(known & ~live)),
        absent=int(np.count_nonzero(~known & ~live)),
        duplicates=len(located.query) - int(np.count_nonzero(known)),
        probe_seconds=probe_seconds,
    )


def rows_of(table: TableSpec, index: IndexTask, key: Sequence[str], changes: pa.Table) -> tuple[Located, Ints]:
    """Look up the keys of n changes.

    :param changes: with the key columns and the high half of the key's hash.
    :return: the rows found, and for each change their number.
    :raises CorruptIndexError: a run of the index is damaged or missing.
    """
    high = storage(changes.column(HASH)).to_numpy().view(np.uint64)
    low = low_hash(key_columns(table, changes.select(key)), index.slice.base)
    located = index.slice.probe(high, low, index.first, index.last)
    return located, np.bincount(located.query, minlength=len(changes))


def rows_written_meanwhile(own: IndexSlice, others: IndexSlice) -> list[OldRows] | None:
    """Rows of the commit's keys in files that other writers wrote or changed after the look-up. The commit has to
    delete them too. None if a change of the commit is late by now.

    :param own: the runs that the commit's tasks wrote.
    :param others: runs with all live rows of these files, and with what other sinks have deleted.
    """
    found = list[OldRows]()
    for info in own.runs:  # one by one: of those that no cache keeps, one is in memory
        run = open_run(own.io, own.location, info)
        # closed versions take no other row's place
        superseding = np.flatnonzero(run.file & SUPERSEDES)
        at = others.probe(run.high[superseding], run.low[superseding], 0, 2**64)
        if others.current is not None and pc.any(pc.not_equal(at.latest, UNKNOWN)).as_py():
            return None  # the versions of a key were made without what others did to it
        if run.order is not None and at.latest is not None:
            own_order = run.order.take(pa.array(superseding))
            if pc.any(pc.less(own_order, at.latest)).as_py():
                return None
        found += by_file(at.file, at.pos, at.files)
    return _united(found)


def rows_superseded_meanwhile(moved: IndexSlice, newer: IndexSlice) -> list[OldRows]:
    """Rows that were moved to new files while commits deleted them or gave their keys other rows.

    :param moved: the runs that say where the rows are now.
    :param newer: the runs of these commits.
    """
    found = list[OldRows]()
    for info in moved.runs:  # one by one: of those that no cache keeps, one is in memory
        run = open_run(moved.io, moved.location, info)
        for start in range(0, info.entries, _COMPARED):
            part = slice(start, start + _COMPARED)
            gone = start + np.flatnonzero(newer.superseded(run.high[part], run.low[part]))
            file, pos = (run.file[gone] & ~SUPERSEDES).astype(np.int64), run.pos[gone].astype(np.int64)
            found += by_file(file, pos, run.files)
    return _united(found)


def _united(rows: Iterable[OldRows]) -> list[OldRows]:
    """The rows, with each data file once."""
    found: dict[str, list[OldRows]] = {}
    for old in rows:
        found.setdefault(old.file.path, []).append(old)
    return [OldRows(parts[0].file, np.concatenate([old.positions for old in parts])) for parts in found.values()]


def delete_rows(table: TableSpec, task: TaskId, rows: Iterable[OldRows], scratch: Scratch) -> list[ContentFile]:
    """Write delete files for rows of earlier snapshots, without a delta writer.

    :param scratch: gets the files, also after an error.
    """
    files, factory = DataFiles(), FileFactory(table, task)
    deletes = table.deletes(factory, files)
    try:
        for old in rows:
            number = files.add(old.file.path, Partition(old.file.spec_id, json.dumps(old.file.partition)))
            deletes.delete(np.full(len(old.positions), number, np.int64), old.positions)
        return deletes.close([])
    finally:
        scratch.add(*factory.created)


def indexed(path: str, partition: Partition) -> IndexedFile:
    """A data file as the key index stores it."""
    return IndexedFile(path, partition.spec_id, json.loads(partition.text))
