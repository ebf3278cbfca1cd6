"""Which rows of earlier snapshots a commit's keys have, by the key index, and what the index has to learn from the
commit.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from deltawriters.collapse import Ints
from deltawriters.content import ContentFile, StoredPartition
from deltawriters.files import DataFiles, FileFactory
from deltawriters.keyindex import (
    SUPERSEDES,
    TOMBSTONE,
    Entries,
    IndexedFile,
    IndexSlice,
    Located,
    RunInfo,
    low_hash,
    open_run,
    write_run,
)
from deltawriters.partitioning import large_type, storage
from deltawriters.positions import PositionDeletes
from deltawriters.table import TableSpec, TaskId

NOWHERE = -1
"""In a key map's `file`: the key has no live row in this commit."""


@dataclass(frozen=True)
class IndexTask:
    """One task's part of the key index: it owns the keys whose high hash, unsigned, is in [first, last).

    :param sequence: age of the run that the task writes; newer than all in `slice`.
    :param run_name: of that run's file, unique to the task attempt.
    """

    slice: IndexSlice
    first: int
    last: int
    sequence: int
    run_name: str

    def merged_runs(self) -> list[RunInfo]:
        """Do the task's share of merging runs."""
        return self.slice.write_merged(f"{self.run_name}-merged", self.first, self.last) if self.slice.merge else []


@dataclass(frozen=True)
class OldRows:
    """Positions to delete in one data file of an earlier snapshot."""

    file: IndexedFile
    positions: Ints


@dataclass(frozen=True)
class IndexResult:
    """What the key index knew of a task's keys, and the runs that it gains.

    :param inserted: keys that were not in the table.
    :param updated: keys that were and have a new row.
    :param deleted: keys that were and are gone.
    :param absent: keys deleted that weren't there.
    :param duplicates: rows beyond the first of a key, of a table that was not ours; all are deleted.
    """

    runs: list[RunInfo]
    merged: list[RunInfo]
    old_rows: list[OldRows]
    inserted: int = 0
    updated: int = 0
    deleted: int = 0
    absent: int = 0
    duplicates: int = 0


def key_columns(table: TableSpec, keys: pa.Table) -> list[pa.Array]:
    """The key columns in the table's types, as plain arrays: what the low hash is computed over.

    Text may be of Arrow's large types, of which the hash is the same: it may be too much for the usual ones.
    """
    columns = []
    for name in keys.column_names:
        dtype = table.arrow_schema.field(name).type
        dtype = dtype.storage_type if isinstance(dtype, pa.BaseExtensionType) else dtype
        column = storage(keys.column(name))
        columns.append(column if column.type == large_type(dtype) else column.cast(dtype))
    return columns


def resolve(
    table: TableSpec,
    index: IndexTask,
    keys: pa.Table,
    high: npt.NDArray[np.uint64],
    file: Ints,
    pos: Ints,
    files: DataFiles,
) -> IndexResult:
    """Look up every key of the commit, and write the run that says where they are now.

    :param keys: key columns, n rows, distinct.
    :param high: their high hashes.
    :param file: number in `files` of the data file with the key's row, or `NOWHERE`; `pos`: its position there.
    :raises CorruptIndexError: a run is not as it was written.
    """
    low = low_hash(key_columns(table, keys), index.slice.base)
    located = index.slice.probe(high, low, index.first, index.last)
    known = np.zeros(len(file), np.bool_)
    known[located.query] = True
    live = file != NOWHERE
    own = [
        IndexedFile(
            files.path(number), files.partition(number).spec_id, files.partition(number).json(table.iceberg_schema)
        )
        for number in range(len(files))
    ]
    entries = Entries(
        high=high,
        low=low,
        # also of keys that weren't there: the run then names every key of the commit (`rows_appended_meanwhile`)
        file=np.where(live, file.astype(np.uint32) | SUPERSEDES, TOMBSTONE),
        pos=np.where(live, pos, 0).astype(np.uint32),
        files=tuple(own),
    )
    run = index.run_name
    return IndexResult(
        runs=[write_run(index.slice.io, index.slice.location, run, index.sequence, entries)],
        merged=index.merged_runs(),
        old_rows=_by_file(located),
        inserted=int(np.count_nonzero(live & ~known)),
        updated=int(np.count_nonzero(live & known)),
        deleted=int(np.count_nonzero(known & ~live)),
        absent=int(np.count_nonzero(~known & ~live)),
        duplicates=len(located.query) - int(np.count_nonzero(known)),
    )


def rows_appended_meanwhile(own: IndexSlice, appended: IndexSlice) -> list[OldRows]:
    """Rows that others appended after a commit's keys were looked up, and that the commit has to delete too.

    :param own: the runs that the commit's tasks wrote.
    :param appended: runs of the rows that others appended.
    """
    runs = [open_run(own.io, own.location, info) for info in own.runs]
    if not runs:
        return []
    high = np.concatenate([run.high for run in runs])
    low = np.concatenate([run.low for run in runs])
    return _by_file(appended.probe(high, low, 0, 2**64))


def delete_rows(table: TableSpec, task: TaskId, rows: Iterable[OldRows]) -> list[ContentFile]:
    """Position delete files (v2) for rows of earlier snapshots, outside a delta writer."""
    files = DataFiles()
    deletes = PositionDeletes(table, FileFactory(table, task), files)
    for old in rows:
        deletes.delete(np.full(len(old.positions), register(old, files), np.int64), old.positions)
    return deletes.close()


def register(rows: OldRows, files: DataFiles) -> int:
    """Number the data file of an earlier snapshot among the task's."""
    return files.add(rows.file.path, StoredPartition(rows.file.spec_id, json.dumps(rows.file.partition)))


def _by_file(located: Located) -> list[OldRows]:
    if not len(located.file):
        return []
    order = np.argsort(located.file, kind="stable")
    numbers, starts = np.unique(located.file[order], return_index=True)
    stops = [*starts[1:], len(order)]
    return [
        OldRows(located.files[int(number)], located.pos[order[start:stop]])
        for number, start, stop in zip(numbers, starts, stops, strict=True)
    ]
