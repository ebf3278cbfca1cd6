"""The delta writer of one task: changes in, data and delete files out.

Changes that have all values collapse as they come (`whole_changes.py`). Two kinds of changes are kept until the writer
is closed, since any later change may be one that they build on: partial rows (`partial.py`), and removals of rows that
went to another key (`moves.py`). In a table with history all changes are kept (`history.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from changelog.rows import BAD, HASH, KIND, MOVED, UNAVAILABLE, RowKind, sets_row
from deltawriters import tombstones
from deltawriters.arrow_types import storage
from deltawriters.collapse import dense_ids, ranked
from deltawriters.content import ContentFile, DataFiles, FileContent, Locations, TaskId
from deltawriters.history import History
from deltawriters.key_deletes import delete_keys
from deltawriters.late import LateChanges, deleted_at
from deltawriters.moves import Settled, settle_moves
from deltawriters.ordering import RowOrder
from deltawriters.partial import Completed, complete, divided
from deltawriters.partitioning import PartitionedWriter
from deltawriters.resolve import NOWHERE, IndexResult, IndexTask, resolve
from deltawriters.soft_deletes import as_partial
from deltawriters.superseded import SupersededRows
from deltawriters.table import FileFactory, TableSpec
from deltawriters.whole_changes import DeltaOptions, WholeChanges, kinds_of, order_of


@dataclass(frozen=True)
class WriteResult:
    """What a task wrote. `rows` counts the changes that the task received, by `RowKind.short`.

    `index` is None if the table has no key index. The caller has to delete `index.old_rows`, those of all tasks
    together: readers open each delete file, and a data file has only one deletion vector.

    `rows` doesn't count the partial rows that nothing could complete (`completed.letters`), nor late changes: those
    that become dead letters are in `late_letters`, and `late` is the number of the others. `ignored` is the number of
    removals that weren't applied (`DeltaOptions.ignores_removals`).
    """

    files: list[ContentFile]
    rows: dict[str, int] = field(default_factory=dict)
    index: IndexResult | None = None
    completed: Completed = field(default_factory=Completed)
    moves: Settled = field(default_factory=Settled)
    late: int = 0
    late_letters: Sequence[pa.StructArray] = ()
    ignored: int = 0

    def records(self, content: FileContent) -> int:
        """Number of rows in all files of kind `content`."""
        return sum(file.record_count for file in self.files if file.content is content)


class DeltaWriter:
    """Writes one task's share of a commit. All changes of a key must come to one writer.

    `write` takes record batches of changelog rows (`changelog.rows`), in any order, without bad records. If there is
    the column `_rowdelta_unavailable`, rows may be partial.

    :param order: see `PartitionedWriter`, and for `lasting`.
    """

    def __init__(
        self,
        table: TableSpec,
        options: DeltaOptions,
        task: TaskId,
        index: IndexTask | None = None,
        order: RowOrder | None = None,
        *,
        lasting: bool = False,
    ) -> None:
        self._table = table
        self._index = index
        self._options = options
        self._factory = FileFactory(table, task)
        self._files = DataFiles()
        self._data = PartitionedWriter(table, self._factory, self._files, order, lasting=lasting)
        self._superseded = None
        if options.copy_on_write:
            self._superseded = SupersededRows(table, self._factory, self._files, lasting=lasting)
        self._deletes = self._superseded or table.deletes(self._factory, self._files, options.position_delete_threshold)
        self._late = None
        if index is not None and index.slice.order is not None:
            self._late = LateChanges(table, options.key, index, keeps=options.keeps_late)
        self._whole = WholeChanges(
            table,
            options,
            self._files,
            self._data,
            self._deletes,
            has_index=index is not None,
            keeps_order=self._late is not None,
        )
        self._partial: list[pa.RecordBatch] = []
        self._moved: list[pa.RecordBatch] = []
        self._came_late: list[pa.RecordBatch] = []
        self._history = None
        if options.history is not None:
            assert self._late is not None, "a table with history has order values"
            self._history = History(table, options.history, options.key, self._late.order)
        self._of_versions: list[pa.RecordBatch] = []
        self._truncates: list[pa.RecordBatch] = []
        """In a table with history: the rows that stand for TRUNCATEs."""
        self._deleted: list[pa.Table] = []
        self._kind_counts = np.zeros(len(RowKind), np.int64)
        self._ignored = 0

    @property
    def created_paths(self) -> list[str]:
        """Every path that this task has opened. A failed job deletes these files."""
        return self._factory.created

    def write(self, changes: pa.RecordBatch) -> None:
        """Take a batch of changes.

        :raises CardinalityError: two changes contradict each other (`changelog` mode), or a change has the order value
            of a TRUNCATE.
        """
        if self._late is not None and self._index is not None and not self._options.applies_late:
            changes, late = self._late.divided(changes, self._index)
            self._came_late += [late] if len(late) else []
        self._take_in(changes)

    def _take_in(self, changes: pa.RecordBatch) -> None:
        kinds = changes.column(KIND).to_numpy(zero_copy_only=False)
        if self._options.ignores_removals:
            sets = sets_row(kinds)
            self._ignored += len(sets) - int(np.count_nonzero(sets))
            changes, kinds = changes.filter(pa.array(sets)), kinds[sets]
        self._kind_counts += np.bincount(kinds, minlength=len(RowKind))
        if self._options.soft_delete is not None:
            changes = as_partial(changes, self._options.soft_delete, self._options.key)
        if self._history is not None:
            self._of_versions += [changes] if len(changes) else []
            return
        if MOVED in changes.schema.names:
            changes, moved = divided(changes, MOVED)
            self._moved += moved
            changes = changes.drop_columns([MOVED])
        if UNAVAILABLE in changes.schema.names:
            changes, partial = divided(changes, UNAVAILABLE)  # no bytes: it lacks nothing
            self._partial += partial
            changes = changes.drop_columns([BAD, UNAVAILABLE])
        self._whole.add(changes)

    def truncate(self, barriers: pa.RecordBatch) -> None:
        """Take TRUNCATEs of the source. Only what came after the last of them counts.

        :param barriers: rows with the order columns of changes.
        :raises CardinalityError: a change has the same order value.
        """
        if self._history is None:
            self._whole.truncate(barriers)
        else:
            self._truncates.append(barriers)

    def close(self) -> WriteResult:
        """Write what is buffered and finish all files.

        :raises CardinalityError: two changes contradict each other (`changelog` mode), or a change has the order value
            of a TRUNCATE.
        :raises CorruptIndexError: a run of the index is damaged or missing.
        """
        whole, index = self._whole, self._index
        if index is not None and whole.barrier is not None:
            index = index.of_empty_table
        self._settle_late(index)
        completed, moves, resolved = Completed(), Settled(), None
        if self._history is not None and index is not None:
            resolved, completed, moves = self._with_versions(self._history, index)
        earlier = list[pa.Table]()
        while self._partial or self._moved:
            partial, moved = self._first_kept()
            if moved:
                settled, not_last, partial_ones = settle_moves(moved, whole, index)
                moves, earlier = moves.and_more(settled), [*earlier, not_last]
                partial = partial + partial_ones
            if partial:
                assert index is not None, "only a key index finds the rows that complete partial rows"
                completed = completed.and_more(complete(partial, whole, index))
        whole.flush(last=True)
        data_files = self._data.close()
        known = whole.map
        if self._superseded is not None:
            data_files = self._superseded.removed(data_files, Locations(known.file, known.pos))
        self._kind_counts[RowKind.UPDATE_AFTER] -= sum(map(len, completed.letters))
        rows = {kind.short: int(self._kind_counts[kind]) for kind in RowKind}
        completed, ignored = completed.without_absent(self._options.absent_before)
        if index is not None:
            resolved, written = resolved or self._resolve(index), None
            if self._late is not None and self._deleted:
                written = self._late.write_deleted(pa.concat_tables(self._deleted), self._factory.created)
            resolved = replace(resolved, deleted_keys=written, truncates=self._truncate_orders)
        files = self._deletes.close(data_files)
        if index is None and len(known) and not (self._options.table_is_empty or whole.barrier is not None):
            deletes = self._table.key_deletes(self._factory, self._options.key)
            delete_keys(deletes, whole, pa.concat_tables(earlier) if earlier else None)
            files += deletes.close()
        result = WriteResult(files, rows, resolved, completed, moves, ignored=self._ignored + ignored)
        late = self._late
        return result if late is None else replace(result, late=late.count, late_letters=late.letters)

    def abort(self) -> None:
        """Give up: close open files and delete everything written."""
        self._data.abort()
        self._factory.delete_all()

    def _first_kept(self) -> tuple[list[pa.RecordBatch], list[pa.RecordBatch]]:
        """Take from the changes that the writer has kept: of each key either the partial rows that come before its
        removals, or the removals that come before its partial rows. What comes after them builds on them.
        """
        partial, moved = self._partial, self._moved
        self._partial, self._moved = [], []
        if not partial or not moved:
            return partial, moved
        tables = [pa.Table.from_batches(part) for part in (partial, moved)]
        names = order_of(tables[0]).column_names
        keys, orders, kinds = (
            pa.concat_tables([table.select(part) for table in tables]).combine_chunks()
            for part in (list(self._options.key), names, [KIND])
        )
        ids, count = dense_ids([storage(column) for column in keys.columns])
        rank = ranked([storage(column) for column in orders.columns], kinds_of(kinds))
        is_partial = np.arange(len(ids)) < len(tables[0])
        first = np.full((2, count), np.iinfo(np.int64).max)
        for number, chosen in enumerate((is_partial, ~is_partial)):
            np.minimum.at(first[number], ids[chosen], rank[chosen])
        # at an equal order value, a row is set before it is removed
        now = np.where(is_partial, rank <= first[1][ids], rank < first[0][ids])
        borders = (now[: len(tables[0])], now[len(tables[0]) :])
        taken, rest = (
            [table.filter(pa.array(flags ^ later)).to_batches() for table, flags in zip(tables, borders, strict=True)]
            for later in (False, True)
        )
        self._partial, self._moved = rest
        return taken[0], taken[1]

    def _settle_late(self, index: IndexTask | None) -> None:
        """Leave late changes out. After a TRUNCATE those aren't late that were late by rows which it removes.

        :param index: of the empty table after a TRUNCATE.
        """
        for late in self._came_late:
            assert self._late is not None
            assert index is not None
            if self._whole.barrier is not None:
                changes, late = self._late.divided(late, index)
                self._take_in(changes)
            self._late.leave_out(late)

    def _with_versions(self, history: History, index: IndexTask) -> tuple[IndexResult, Completed, Settled]:
        """Write the versions that the changes make."""
        found, completed, moves = IndexResult([], [], []), Completed(), Settled()
        for truncates in self._truncates:
            for changes in self._of_versions:
                self._whole.distinct_ranks(*(order_of(pa.Table.from_batches([rows])) for rows in (truncates, changes)))
        for part, changes in history.parts(self._of_versions, self._truncates, index):
            if not len(changes):
                found = found.and_more(IndexResult([], part.merged_runs(), []))
                continue
            versions = history.versions(changes, part)
            completed, moves = completed.and_more(versions.completed), moves.and_more(versions.moves)
            found = found.and_more(history.write(versions, self._data, self._files, part))
            self._note_deleted(*(rows.drop_columns([HASH]) for rows in (versions.gone, versions.idle)))
        return found, completed, moves

    def _resolve(self, index: IndexTask) -> IndexResult:
        """Find the rows that the keys have in earlier snapshots."""
        known, late = self._whole.map, self._late
        if not len(known):
            # no change of the task counts, but it still has runs to merge
            return IndexResult([], index.merged_runs(), [])
        keys, orders = known.keys, known.last_order
        assert keys is not None
        assert known.hash is not None
        high = known.hash.view(np.uint64)
        if late is None:
            return resolve(self._table, index, keys, high, known.file, known.pos, self._files)
        assert orders is not None
        encoded, times = late.order.of_changes(orders), deleted_at(orders)
        seconds = tombstones.seconds_of(times)
        gone = pa.array(np.flatnonzero(known.file == NOWHERE))
        self._note_deleted(late.deleted(keys.take(gone), encoded.take(gone), times.take(gone)))
        return resolve(self._table, index, keys, high, known.file, known.pos, self._files, encoded, seconds)

    def _note_deleted(self, *deleted: pa.Table) -> None:
        """Keep what is to be known of deleted keys. A TRUNCATE tells of all that it removes."""
        told = pa.array(self._truncate_orders, pa.binary())
        for keys in deleted:
            keys = keys.filter(pc.invert(pc.is_in(keys.column(tombstones.ORDER_VALUE), told)))
            self._deleted += [keys] if len(keys) else []

    @property
    def _truncate_orders(self) -> tuple[bytes, ...]:
        late, barrier = self._late, self._whole.barrier
        rows = self._truncates if barrier is None else [barrier]
        return (
            () if late is None else tuple(order for part in rows for order in late.order.of_changes(part).to_pylist())
        )
