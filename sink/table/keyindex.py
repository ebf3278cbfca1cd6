"""The driver's part of a table's key index: it knows which version belongs to which snapshot, and keeps both in step.

A *version* is an immutable manifest. It has the runs (`deltawriters.keyindex`), the dead data files, and each data
file's deletion vector. A commit names its version in the same transaction as the source position, so table and index
change together. A crash before the commit leaves files that nothing names. The commit also names the snapshot from
which the version was made (`base`):

    version = the table at `base`, and then the commit that names it

The driver finds everything else that happened since `base` (a compaction, a delete, another writer's append, also one
just before our commit) by walking the snapshots, and reads only the data files that changed. If the walk doesn't reach
`base` (rollback, expired snapshots), or if the version is lost or damaged, the index is built again from the key
columns of the whole table.
"""

import json
import logging
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any
from uuid import uuid4

import numpy as np
import pyarrow as pa
from pyiceberg.io import FileIO

from changelog.amounts import amount, amounts
from deltawriters import TableSpec, tombstones
from deltawriters.arrow_types import storage
from deltawriters.content import OldRows, by_file
from deltawriters.keyindex import (
    DELETED_BEFORE,
    Entries,
    IndexedFile,
    IndexSlice,
    RunInfo,
    low_hash,
    of_deletes,
    plan_merge,
    run_files,
    write_run,
)
from deltawriters.keyindex.vector_log import Vector
from deltawriters.keyindex.versions import IndexLostError, IndexVersion, new_encoding
from deltawriters.old_rows import DeletedRows
from deltawriters.resolve import key_columns, rows_superseded_meanwhile, rows_written_meanwhile
from deltawriters.scratch import Scratch
from deltawriters.table import Bucket
from sink.errors import TableError
from sink.plans import RewritePlan
from sink.results import IndexPart
from sink.routing import RANGES, KeyHash
from sink.table.copy_on_write import Replacement
from sink.table.deleted_keys import DeletedKeys, emptied, with_truncates
from sink.table.engine import Engine, KeyReading
from sink.table.index_versions import StoredVersions
from sink.table.run_merging import RunMerging
from sink.table.table_plan import TablePlan
from sink.targets.locations import check_location
from sink.targets.seam import Table
from sink.targets.values import IndexCommit, LiveFile, StoredPosition, TableChanges, WrittenDeletes

log = logging.getLogger("rowdelta")

_FEWEST_BUCKETS = 8
"""With fewer buckets in the table, too many tasks would be idle if each bucket went to one task."""
_MOST_LOOKED_UP = 20_000_000
"""Keys of rows that others changed, among which the driver looks a micro-batch's keys up. Among more, tasks do it."""
_MERGED_BY_TASKS = 100_000
"""Entries that a micro-batch's tasks merge on their way. It doesn't wait for the merge of more (`RunMerging`), which
takes a job of its own.
"""
_MOST_AGES = 48
"""If runs have more ages, each look-up takes long, and tasks merge any number of entries: jobs beside the stream don't
keep up, or each run ends before they do.
"""
_DEAD_UNTIL_LOOKED = 1000
"""Dead data files in a version before it is looked whether runs still name them."""


@dataclass(frozen=True)
class Pin:
    """The state of the index from which rows are moved while micro-batches go on.

    :param slice: the state. The files of its runs stay as long as the pin holds. Runs of the state are merged with each
        other meanwhile, and later runs with each other.
    :param sequence: age of the entries that say where the rows are then: between those of the state and later ones.
    :param hash: how keys are hashed.
    """

    slice: IndexSlice
    sequence: int
    hash: KeyHash


@dataclass(frozen=True)
class Adopted:
    """What a commit adopts of rows that were moved since a state was pinned.

    :param files: the new data files with a live row, with their deletes if the format has these there.
    :param index: the index's part.
    :param dropped: paths of the new data files without a live row.
    """

    files: Sequence[str]
    index: IndexCommit
    dropped: Sequence[str]


@dataclass(frozen=True)
class Meanwhile:
    """What others changed after the tasks looked the keys up.

    :param touched: paths of the data files that others wrote, changed or removed. What the tasks have found in them no
        longer holds.
    :param rows: the rows in these files that the commit deletes.
    """

    touched: frozenset[str] = frozenset()
    rows: tuple[OldRows, ...] = ()

    def followed_by(self, changes: TableChanges, rows: Iterable[OldRows]) -> "Meanwhile":
        touched = changes.removed | {file.path for file in changes.files}
        kept = (old for old in self.rows if old.file.path not in touched)
        return Meanwhile(self.touched | touched, (*kept, *rows))


@dataclass(frozen=True)
class Prepared:
    """What a commit that is still to come makes of the index.

    :param name: the version's, and the commit's that names it.
    :param base: the snapshot from which it was made.
    :param truncates: see `prepare`.
    :param spent: files in the index's folder that only this commit needed.
    :param meanwhile: what others have changed since the tasks looked up.
    """

    name: str
    base: int | None
    version: IndexVersion
    truncates: bool
    spent: frozenset[str]
    meanwhile: Meanwhile


class KeyIndex:
    """The index of one table. For each micro-batch, call `synchronize`, `slice` for the tasks, `prepare` with their
    results, and after the commit `see_committed`.

    :param prefix: of the sink's properties in the table.
    :param is_guest: see `TableSink`. What it doesn't delete, the sink's next process does.
    """

    def __init__(self, table: Table, plan: TablePlan, engine: Engine, prefix: str, *, is_guest: bool = False) -> None:
        self._is_guest = is_guest
        self._late = plan.late
        self._deleted = None if plan.late is None else DeletedKeys(table, plan.section.key, plan.late, prefix)
        self._table = table
        self._plan = plan
        self._engine = engine
        self._folder = engine.index_folder()
        self._location = self._folder.location
        self._io = self._folder.io
        forbidden = table.index_forbidden_at(self._location)
        if forbidden is not None:
            raise TableError(
                f"{table.name}: the key index would be at {self._location}, {forbidden}. Set index.location to a "
                "folder elsewhere."
            )
        check_location(f"{table.name}: the key index", self._location)
        self._version: IndexVersion | None = None
        self._base: int | None = None
        self._included: set[int] = set()
        self._prepared: Prepared | None = None
        self._stored = StoredVersions(self._folder, is_guest=is_guest)
        self._damaged = False
        self._dead_until_looked = _DEAD_UNTIL_LOOKED
        self._merging = RunMerging(table.name, engine, self._folder)
        self._pins: list[Pin] = []
        """What rows are being moved from, the oldest first."""
        self._place = table.spec.location
        """The table's location. The index has full paths of its files."""

    @property
    def base(self) -> int | None:
        """The snapshot that the index belongs to."""
        return self._base

    def key_hash(self, spec: TableSpec) -> KeyHash:
        """How keys are hashed. If the table has a suitable number of buckets of a key column, a hash begins with it."""
        return self._hash(spec, self._synchronized())

    def _hash(self, spec: TableSpec, version: IndexVersion) -> KeyHash:
        return KeyHash(tuple(self._plan.section.key), self._bucket(spec), version.bases[0])

    def _bucket(self, spec: TableSpec) -> Bucket | None:
        bucket = spec.key_bucket(self._plan.section.key)
        return bucket if bucket is not None and _FEWEST_BUCKETS <= bucket.count <= RANGES else None

    def forget(self) -> None:
        """The index is damaged. Let the next micro-batch build it again."""
        self._version = None
        self._damaged = True
        self._let_go()

    def abandon_merge(self) -> None:
        """Give up the merge of runs: another object has the index now, or nobody."""
        # what came of the last commit may be unknown
        self._merging.drop(kept=() if self._prepared is None else self._prepared.version.runs)

    def remove_orphans(self, stored: StoredPosition) -> None:
        """Delete files of the index that nothing names, nor did the last time. Call this seldom. What was merged or
        moved has files that no version names yet, and this may be long, if no micro-batch comes.

        :param stored: the table's position.
        """
        if self._version is not None and stored.index is not None and not self._pins:
            self._stored.remove_orphans(self._version, str(stored.index["version"]), self._merging.name)

    def synchronize(self, stored: StoredPosition | None) -> None:
        """Bring the index up to the table's current snapshot.

        :param stored: the table's position, which names the version.
        :raises TemporaryError: the table can't be read.
        """
        bucket = self._bucket(self._table.spec)
        keys = self._table.key_encoding(self._plan.section.key, None if bucket is None else bucket.count)
        if self._late is not None:
            keys += f"; order {self._late.columns.spec}"
        if self._empty_slice.current is not None:
            keys += f"; closed versions where {self._empty_slice.current} isn't true"
        place, self._place = self._place, self._table.spec.location
        if self._version is not None and not (self._version.is_encoded(keys) and place == self._place):
            self._version = None
        elif self._version is None and not self._damaged and stored is not None and stored.index is not None:
            self._load(stored, keys)
        if self._version is None or self._catch_up() is None:
            self._build(keys, {} if stored is None or stored.index is None else stored.index)
        if self._deleted is not None:
            self._version = self._with_deletes_of_others(self._synchronized(), self._deleted)

    def slice(self) -> IndexSlice:
        """The part of the index that the tasks of a micro-batch need."""
        slice_ = self._next_merge()
        # a guest would lose what it has merged to the process at work, which doesn't wait for long
        is_left = self._is_guest or self._is_merged_beside(slice_)
        return replace(slice_, merge=(), drop_tombstones=False) if is_left else slice_

    def _is_merged_beside(self, slice_: IndexSlice) -> bool:
        ages = len({run.sequence for run in slice_.runs})
        return slice_.merged_entries > _MERGED_BY_TASKS and ages <= _MOST_AGES

    def _next_merge(self) -> IndexSlice:
        version = self._synchronized()
        # what was deleted since a pin must be told apart from the rest
        ages = sorted({self._merging.newest, *(pin.sequence for pin in self._pins), sys.maxsize})
        ages = [age for age in ages if age >= self._merging.newest]
        parts = [[run for run in version.runs if begin < run.sequence <= end] for begin, end in pairwise(ages)]
        merge = max(map(plan_merge, parts), key=len)  # else the latest runs would always come first
        oldest = min((run.sequence for run in version.runs), default=0)
        slice_ = replace(
            self._empty_slice,
            runs=version.runs,
            dead=dict(version.dead),
            merge=merge,
            # those since the pin say which of its rows were deleted
            drop_tombstones=any(
                run.name in merge and run.sequence == oldest <= self._pinned_at for run in version.runs
            ),
            base=version.bases[1],
        )
        if self._deleted is None:
            return slice_
        return replace(slice_, truncates=self._deleted.truncates(version), horizon=self._deleted.horizon)

    @property
    def _empty_slice(self) -> IndexSlice:
        order = None if self._late is None else self._late.columns
        history = self._plan.changelog.history
        current = None if history is None else history.current
        return IndexSlice(f"{self._location}/runs", self._folder.io_properties, (), {}, order=order, current=current)

    @property
    def _pinned_at(self) -> int:
        """The oldest pin's sequence; without one, no entry is as new."""
        return self._pins[0].sequence if self._pins else sys.maxsize

    @property
    def size(self) -> tuple[int, int] | None:
        """Entries and bytes of its runs. None if it has to be built again."""
        if self._version is None:
            return None
        runs = self._version.runs
        return sum(run.entries for run in runs), sum(run.size_in_bytes for run in runs)

    @property
    def parquet_deletes(self) -> Mapping[str, Sequence[str]]:
        """See `LiveFile`, by the path of the data file."""
        return self._synchronized().parquet_deletes

    @property
    def next_sequence(self) -> int:
        """Sequence of the runs that the tasks write next."""
        return self._synchronized().sequence + 1

    def look_up_again(self, slice_: IndexSlice, results: Sequence[IndexPart]) -> Meanwhile | None:
        """Look keys up in the files that others wrote or changed, after a commit was refused because of them. Nothing
        is written again. So a busy writer can't block large micro-batches for ever.

        :param slice_: see `prepare`, and for `results`.
        :return: what others have changed since the tasks looked up: for `deleted_rows` and `prepare`. None if that
            isn't enough, and the micro-batch must be written again.
        """
        before, base, refused = self._synchronized().runs, self._base, self._prepared
        assert refused is not None
        changes = self._catch_up()
        if changes is None or self._base == base:
            return None
        if self._deleted is not None:
            self._version = self._with_deletes_of_others(self._synchronized(), self._deleted)
        new = tuple(run for run in self._synchronized().runs if run not in before)
        if refused.truncates:  # whatever others did, the commit removes it, and tasks have looked nothing up
            new = ()
        if sum(run.entries for run in new) > _MOST_LOOKED_UP:
            return None
        own = tuple(run for result in results for run in result.runs)
        others = replace(self.slice(), runs=new)
        if others.current is not None:
            if others.truncates != slice_.truncates or (new and any(result.truncates for result in results)):
                return None  # there are other rows that a TRUNCATE closes
            others = replace(others, truncates=())
        rows: list[OldRows] | None = []
        if new or self._late is not None:
            rows = rows_written_meanwhile(replace(self._empty_slice, runs=own), others)
        if rows is None:
            return None  # changes that weren't late are late now
        if refused.truncates:
            return refused.meanwhile
        if rows and others.current is not None:
            return None  # the keys' rows aren't those from which their versions were made
        read = {path for result in results for path in result.completed_from}
        if read & (changes.removed | {file.path for file in changes.files}):
            return None  # partial rows may have been completed from what others have changed now
        if rows and (read or any(result.depends_on_others for result in results)):
            return None  # or from another row than a key has now
        log.info(
            "%s: changed by others meanwhile: %s; the keys were looked up there too",
            self._table.name,
            amounts({"added or changed file": len(changes.files), "removed file": len(changes.removed)}),
        )
        return refused.meanwhile.followed_by(changes, rows)

    def deleted_rows(self, results: Sequence[IndexPart], meanwhile: Meanwhile) -> DeletedRows:
        """The earlier rows that a micro-batch deletes."""
        return self._found_by_tasks(results).without(meanwhile.touched).with_rows(meanwhile.rows)

    def _found_by_tasks(self, results: Sequence[IndexPart]) -> DeletedRows:
        return DeletedRows.told((result.old_rows for result in results), self._folder.io_properties)

    def copying(self, slice_: IndexSlice) -> RewritePlan:
        """What tasks are told that copy the rows of files from which a micro-batch deletes others.

        :param slice_: the part of the index that the micro-batch's tasks had. What others wrote meanwhile isn't in it.
        """
        spec, key = self._table.spec, tuple(self._plan.section.key)
        slice_ = replace(slice_, runs=self._synchronized().runs, dead=dict(self._synchronized().dead))
        # not the commit's name: it may be sent again with other files, before the first ones are deleted
        return RewritePlan(spec, key, slice_, self.next_sequence, self.key_hash(spec), uuid4().hex[:16])

    def io_of(self, path: str, table: TableSpec) -> FileIO:
        """What reaches a file: of the index, or else of the table."""
        return self._io if path.startswith(f"{self._location}/") else table.io

    def prepare(
        self,
        operation: str,
        slice_: IndexSlice,
        tasks: int,
        results: Sequence[IndexPart],
        deleted: Collection[str],
        gone: WrittenDeletes | Replacement,
        scratch: Scratch,
        meanwhile: Meanwhile,
        *,
        truncates: bool = False,
    ) -> IndexCommit:
        """Write the version that the commit will name.

        :param operation: name of the commit.
        :param slice_: the part of the index that the tasks had.
        :param tasks: number of tasks that share the hash space.
        :param results: `index` of each task's result.
        :param deleted: paths of the data files with earlier rows that the commit deletes (`deleted_rows`).
        :param gone: the deletes of these rows, or the files that replace those files.
        :param scratch: gets the files that are written.
        :param meanwhile: what `look_up_again` has found.
        :param truncates: the commit removes all rows that the table has (`ChangeSet.truncates`).
        """
        version, base = self._synchronized(), self._base
        told = {order for result in results for order in result.truncates}
        version = emptied(version, told) if truncates else with_truncates(version, told)
        vectors: dict[str, Vector | None] = {}
        for result in results:
            vectors |= result.new_vectors
        spent = {f"runs/{path.rpartition('/')[2]}" for path in self._found_by_tasks(results).files}
        replaced = gone if isinstance(gone, Replacement) else None
        written = gone.deletes if isinstance(gone, Replacement) else gone
        vectors |= written.vectors
        parquet_deletes = {
            path: deletes for path, deletes in version.parquet_deletes.items() if path not in written.vectors
        }
        runs = list(version.runs)
        if len(results) == tasks:  # Spark may leave out tasks that have no rows
            runs = [run for run in runs if run.name not in slice_.merge]
            runs += [run for result in results for run in result.merged]
        else:
            self._folder.delete([f"runs/{run.name}" for result in results for run in result.merged])
        runs = self._merging.taken_in(runs)
        sequence = version.sequence + 1  # the files that others wrote meanwhile are older than this commit
        own = [run for result in results for run in result.runs]
        runs += [replace(run, sequence=sequence) for run in own]
        dead = dict(version.dead)
        if replaced is not None:
            # no key has both a changed row and a copied one, so their runs are of one age
            runs += [replace(run, sequence=sequence) for run in replaced.runs]
            dead |= dict.fromkeys(deleted, sequence)
            runs, dead_ends = self._without_dead_ends(runs, dead)
            spent |= dead_ends
        oldest = min((run.sequence for run in runs), default=0)
        oldest = min(oldest, self._pinned_at)  # `adopt` must see what others have removed since
        prepared = replace(
            version,
            sequence=sequence,
            runs=tuple(runs),
            dead=self._still_dead({path: seq for path, seq in dead.items() if seq > oldest}, runs),
            vectors=version.vectors.changed(vectors),
            parquet_deletes=parquet_deletes,
        )
        if self._deleted is not None:
            prepared = self._deleted.followed_by(prepared, [f for result in results for f in result.deleted], scratch)
        stored = self._prepared_as(
            operation, prepared, scratch, truncates=truncates, spent=frozenset(spent), meanwhile=meanwhile
        )
        return IndexCommit(
            base,
            stored,
            written.files,
            written.removed,
            sorted(deleted),
            written.bytes,
            replaced=() if replaced is None else replaced.replaced,
            copied=None if replaced is None else replaced.copied,
            delete_files=written.delete_files,
        )

    def _without_dead_ends(self, runs: list[RunInfo], dead: Mapping[str, int]) -> tuple[list[RunInfo], set[str]]:
        """The runs without the oldest ones that have only entries of dead files. There is nothing left that these could
        hide. If all files of a table are replaced again and again, no run ever has to be merged.

        Also the files of those among the left out ones that no version has.
        """
        spent = set[str]()
        if self._pins or self._late is not None:  # their runs stay; or tombstones do, which say the order
            return runs, spent
        known = {run.name for run in self._synchronized().runs}
        for sequence in sorted({run.sequence for run in runs})[:-1]:
            of_age = [run for run in runs if run.sequence == sequence]
            named = (run_files(self._io, f"{self._location}/runs", run) for run in of_age)
            if any(dead.get(path, -1) <= sequence for files in named for path in files):
                break
            runs = [run for run in runs if run.sequence != sequence]
            spent |= {f"runs/{run.name}" for run in of_age if run.name not in known}
        return runs, spent

    def vector(self, path: str) -> Vector | None:
        """The deletion vector of a data file (Iceberg v3, Delta Lake), in the format's terms. If the file is older than
        the table's format version 3, position delete files may delete other rows.
        """
        return self._synchronized().vectors.get(path)

    def pin(self) -> Pin:
        """The current state, to move rows from it while micro-batches go on."""
        sequence = self.next_sequence
        # later entries are newer than the moved rows'
        self._version = replace(self._synchronized(), sequence=sequence)
        state = replace(self.slice(), merge=(), drop_tombstones=False)
        pin = Pin(state, sequence, self.key_hash(self._table.spec))
        self._pins.append(pin)
        return pin

    def holds(self, pin: Pin) -> bool:
        """Whether the pin's state is still there: the index wasn't built again since."""
        return any(held is pin for held in self._pins)

    def release(self, pin: Pin) -> None:
        """The state needn't stay any longer."""
        self._unpin([held for held in self._pins if held is not pin])

    def _let_go(self) -> None:
        """What was begun with the runs of an earlier state is of no use any more."""
        self._unpin(())
        self._merging.drop()

    def _unpin(self, holding: Sequence[Pin]) -> None:
        """:param holding: the pins that stay."""
        self._pins = list(holding)
        self._stored.release(self._pinned_runs)

    @property
    def _pinned_runs(self) -> set[str]:
        return {run.name for pin in self._pins for run in pin.slice.runs}

    def adopt(
        self,
        pin: Pin,
        operation: str,
        files: Sequence[str],
        gone: Iterable[str],
        runs: Sequence[RunInfo],
        scratch: Scratch,
    ) -> Adopted | None:
        """Like `prepare`, for a commit that moves rows to new data files, which were written since a state was pinned.
        Rows that micro-batches have deleted since, or given their keys other rows, are deleted in the new files too.

        :param operation: name of the commit.
        :param files: the new data files, as in `ChangeSet`.
        :param gone: the old data files.
        :param runs: entries of the rows in their new files, with the pin's sequence.
        :param scratch: see `prepare`.
        :return: None if others have changed one of the old files, or the index was built again: the rewrite gives way.
        """
        version, removed = self._synchronized(), set(gone)
        if not self.holds(pin):
            return None
        if any(version.dead.get(path, -1) > pin.sequence for path in removed):
            return None
        newer = tuple(run for run in version.runs if run.sequence > pin.sequence)
        moved = IndexSlice(pin.slice.location, pin.slice.io_properties, tuple(runs), {})
        superseded = rows_superseded_meanwhile(moved, replace(moved, runs=newer)) if newer else []
        deleted = DeletedRows({}, self._folder.io_properties).with_rows(superseded)
        files, written = self._table.delete_new_rows(f"{operation}-{self._base}", files, deleted, scratch)
        prepared = replace(
            version,
            runs=(*version.runs, *runs),
            dead=self._still_dead(dict(version.dead) | dict.fromkeys(removed, pin.sequence), (*version.runs, *runs)),
            vectors=version.vectors.changed({**dict.fromkeys(removed), **written.vectors}),
            parquet_deletes={path: found for path, found in version.parquet_deletes.items() if path not in removed},
        )
        stored = self._prepared_as(operation, prepared, scratch)
        removed_vectors = _vectors_of(version, removed)
        index = IndexCommit(self._base, stored, written.files, removed_vectors, (), written.bytes)
        return Adopted(files, index, [path for path, vector in written.vectors.items() if vector is None])

    def prepare_conversion(
        self, operation: str, files: Mapping[IndexedFile, int], live: Mapping[str, int], scratch: Scratch
    ) -> IndexCommit:
        """Like `prepare`, for a commit that says by position what equality deletes say by value: which rows of data
        files aren't live.

        :param operation: name of the commit.
        :param files: the data files to which equality deletes apply, and the number of their rows, live or not.
        :param live: how many rows of each are live, as the format's own reader sees it.
        :param scratch: see `prepare`.
        :raises CorruptIndexError: a run is damaged or missing.
        :raises IndexLostError: the index has more or fewer live rows of a file. It would delete wrong ones.
        """
        version = self._synchronized()
        dead = {file.path: np.ones(count, np.bool_) for file, count in files.items()}
        for _, found in self.slice().live_rows():
            for live_rows in by_file(found.file, found.pos, found.files):
                if (rows := dead.get(live_rows.file.path)) is not None:
                    rows[live_rows.positions] = False
        for path, rows in dead.items():
            known = int(np.count_nonzero(~rows))
            if known != live.get(path, 0):
                raise IndexLostError(f"it has {known:,} rows of {path}, and the table {live.get(path, 0):,}")
        old = [OldRows(file, np.flatnonzero(dead[file.path])) for file in files if dead[file.path].any()]
        deleted = DeletedRows({}, self._folder.io_properties).with_rows(old)
        written = self._table.delete_rows(
            f"{operation}-{self._base}", deleted, version.vectors.get, version.parquet_deletes, scratch
        )
        parquet_deletes = {path: old for path, old in version.parquet_deletes.items() if path not in written.vectors}
        prepared = replace(version, vectors=version.vectors.changed(written.vectors), parquet_deletes=parquet_deletes)
        stored = self._prepared_as(operation, prepared, scratch)
        paths = [file.path for file in files]
        return IndexCommit(self._base, stored, written.files, written.removed, paths, written.bytes)

    def prepare_restatement(self, operation: str, referenced: Sequence[str], scratch: Scratch) -> IndexCommit:
        """Like `prepare`, for a commit that says deletes in another way, and changes no vector.

        :param operation: name of the commit.
        :param referenced: see `IndexCommit`.
        :param scratch: see `prepare`.
        """
        stored = self._prepared_as(operation, self._synchronized(), scratch)
        return IndexCommit(self._base, stored, (), (), referenced)

    def _still_dead(self, dead: dict[str, int], runs: Sequence[RunInfo]) -> dict[str, int]:
        """The list of dead data files. From time to time, files that no older run names are removed from it. Otherwise
        the list would grow with each commit.

        :raises CorruptIndexError: a run is missing.
        """
        if len(dead) <= self._dead_until_looked:
            return dead
        oldest: dict[str, int] = {}
        for run in sorted(runs, key=lambda run: -run.sequence):
            oldest |= dict.fromkeys(run_files(self._io, f"{self._location}/runs", run), run.sequence)
        kept = {
            path: sequence
            for path, sequence in dead.items()
            if oldest.get(path, sequence) < sequence or sequence > self._pinned_at
        }
        self._dead_until_looked = max(_DEAD_UNTIL_LOOKED, 2 * len(kept))
        return kept

    def see_committed(self, stored: StoredPosition | None) -> None:
        """Call this after the commit that names the prepared version. Deletes files of the version before last that no
        later version has.

        :param stored: the table's position, which names the version.
        """
        prepared = self._prepared
        named = None if stored is None or stored.index is None else stored.index["version"]
        if stored is None or stored.index_snapshot_id is None or prepared is None or named != prepared.name:
            self.forget()  # a second driver has already committed, so the version doesn't fit the current snapshot
            return
        assert self._version is not None
        if self._deleted is not None and not self._is_guest:
            self._deleted.delete_unneeded(self._version, prepared.version)
        if prepared.truncates:
            self._pins = []  # no row of the states is live
        self._stored.see_committed(prepared.name, self._version, prepared.version, prepared.spent, self._pinned_runs)
        self._version, self._prepared = prepared.version, None
        self._base, self._included = prepared.base, {stored.index_snapshot_id}
        self._merging.see_committed(prepared.version.runs)
        due = self._next_merge()
        if not self._is_guest and self._is_merged_beside(due):
            self._merging.begin(due)

    def _synchronized(self) -> IndexVersion:
        assert self._version is not None
        return self._version

    def _load(self, stored: StoredPosition, keys: str) -> None:
        assert stored.index is not None
        name = str(stored.index["version"])
        try:
            version = self._stored.read(name)
            if not version.is_encoded(keys):
                raise IndexLostError(
                    "the key's columns, types or buckets, or the format version changed, or an earlier release of "
                    "rowdelta wrote it"
                )
            if stored.index.get("table", self._place) != self._place:
                raise IndexLostError("the table is in another place, and the index has paths of its files")
        except (OSError, IndexLostError) as error:
            log.warning("%s: the key index can't be used (%s)", self._table.name, error)
            return
        self._version = version
        self._let_go()
        self._base = stored.index["base"]
        self._included = {stored.index_snapshot_id} if stored.index_snapshot_id is not None else set()
        self._stored.begin_with(version, name)

    def _catch_up(self) -> TableChanges | None:
        """Add other writers' commits since the base to the index. Returns what they changed. None if that can't be
        found out; then nothing was added.
        """
        changes = self._table.changes_since(self._base, self._included)
        if changes is None:
            log.info(
                "%s: its history no longer reaches the snapshot that the key index was made from", self._table.name
            )
            return None
        if changes.files or changes.removed:
            self._version = self._with_files(self._synchronized(), changes.files, changes.removed)
        self._base, self._included = self._table.snapshot_id(), set()
        return changes

    def _build(self, keys: str, stored: Mapping[str, Any]) -> None:
        """:param stored: what the table's position has of the index."""
        files = list(self._table.live_files())
        started = time.monotonic()
        version = IndexVersion(new_encoding(keys))
        if self._deleted is not None:
            version = self._deleted.restored(version, stored)
            version = self._with_deletes(version, self._deleted.read(name for name, _ in version.deleted))
        self._version = self._with_files(version, files, set())
        self._base, self._included = self._table.snapshot_id(), set()
        self._damaged = False
        self._let_go()
        if files:
            entries = sum(run.entries for run in self._version.runs)
            seconds = time.monotonic() - started
            log.info(
                "%s: key index built: %s of %s in %.1f s",
                self._table.name,
                amount(entries, "key"),
                amount(len(files), "file"),
                seconds,
            )
        self._stored.begin_with(self._version, None)

    def _with_files(self, version: IndexVersion, changed: Sequence[LiveFile], gone: Iterable[str]) -> IndexVersion:
        """`version`, after the files `changed` are read again and the files `gone` are removed."""
        sequence = version.sequence + 1
        dead = dict(version.dead) | dict.fromkeys(gone, sequence) | {file.path: sequence for file in changed}
        vectors: dict[str, Vector | None] = dict.fromkeys(gone)
        parquet_deletes = {path: deletes for path, deletes in version.parquet_deletes.items() if path not in gone}
        for file in changed:
            vectors[file.path] = file.vector
            parquet_deletes.pop(file.path, None)
            if file.parquet_deletes:
                parquet_deletes[file.path] = file.parquet_deletes
        return replace(
            version,
            sequence=sequence,
            runs=(*version.runs, *self._read(changed, sequence, version)),
            dead=dead if version.runs or self._pins else {},
            vectors=version.vectors.changed(vectors),
            parquet_deletes=parquet_deletes,
        )

    def _with_deletes_of_others(self, version: IndexVersion, deleted: DeletedKeys) -> IndexVersion:
        """The version with the keys that other sinks have deleted meanwhile."""
        names = deleted.files_of_others
        rows = deleted.read(names - {*version.others})
        return replace(self._with_deletes(version, rows), others=tuple(sorted(names)))

    def _with_deletes(self, version: IndexVersion, deletes: Iterable[pa.Table]) -> IndexVersion:
        """The version with the order values of deleted keys. They say nothing of rows, so theirs may be older or newer.

        :param deletes: as `DeletedKeys.read` returns them.
        """
        table = self._table.spec
        for rows in deletes:
            keys = rows.select(self._plan.section.key).combine_chunks()
            entries = Entries(
                high=self._hash(table, version)(keys.to_batches()[0]),
                low=low_hash(key_columns(table, keys), version.bases[1]),
                file=np.full(len(rows), DELETED_BEFORE),
                pos=tombstones.seconds_of(rows.column(tombstones.DELETED_AT)),
                files=(),
                order=storage(rows.column(tombstones.ORDER_VALUE)),
            )
            if self._empty_slice.current is not None:  # late changes may come before each of them
                of_closed = replace(entries, low=of_deletes(entries.low))
                entries = Entries.joined([entries, of_closed], ())
            sequence = version.sequence + 1
            run = write_run(self._io, f"{self._location}/runs", f"{uuid4().hex}-deleted", sequence, entries)
            version = replace(version, sequence=sequence, runs=(*version.runs, run))
        return version

    def _read(self, files: Sequence[LiveFile], sequence: int, version: IndexVersion) -> list[RunInfo]:
        """Read the keys of the live rows of `files`, and write runs of the version."""
        if not files:
            return []
        uuids = frozenset(column.name for column in self._plan.changelog.columns if column.is_uuid)
        index = replace(self._empty_slice, base=version.bases[1])
        table = self._table.spec
        return self._engine.read_keys(files, KeyReading(table, self._hash(table, version), uuids, index, sequence))

    def _prepared_as(
        self,
        operation: str,
        version: IndexVersion,
        scratch: Scratch,
        *,
        truncates: bool = False,
        spent: frozenset[str] = frozenset(),
        meanwhile: Meanwhile | None = None,
    ) -> dict[str, Any]:
        """Write the version that a commit will name. Returns what the commit stores of it."""
        written = self._stored.write(operation, version, scratch)
        self._prepared = Prepared(operation, self._base, written, truncates, spent, meanwhile or Meanwhile())
        stored: dict[str, Any] = {"version": operation, "base": self._base, "table": self._place}
        return stored if self._deleted is None else {**stored, **self._deleted.told(written)}


def _vectors_of(version: IndexVersion, paths: Iterable[str]) -> list[str]:
    """The deletion vectors of data files, as in `IndexCommit.removed`."""
    return [json.dumps(vector) for path in paths if (vector := version.vectors.get(path)) is not None]
