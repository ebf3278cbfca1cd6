"""The delta writer of one task: changes in, data and delete files out.

One rule of Iceberg shapes the writer (spec, "Scan Planning"): an equality delete applies to data files with a strictly
lower sequence number, and all files of a commit have the same sequence number. So an equality delete can't remove a row
of the same commit; only a position delete can, and other formats have no other deletes. Therefore the writer remembers
the row's place for every key of the commit, until the commit ends. Iceberg's `BaseTaskWriter.BaseEqualityDeltaWriter`,
which the Flink sink extends, does the same with its `insertedRowMap`, row by row; this writer does it buffer by buffer.

A TRUNCATE of the source is a barrier in the order of changes: what is before it doesn't count, in this commit or in
earlier ones. The writer keeps the last barrier. It drops the changes before it, removes the rows that it has already
written for such changes, and writes no deletes of earlier commits' rows: the commit removes all of them.

The key map holds the collapsed changes of the commit so far. A flush collapses map entries and buffered changes
together, by the same comparison. So changes may arrive in any order, and the outcome doesn't depend on when the writer
flushes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from changelog.amounts import amount
from changelog.made_up import surely_logged
from changelog.rows import BAD, HASH, KIND, MOVED, MOVED_SEPARATOR, ORDER, UNAVAILABLE, BadRecord, RowKind, sets_row
from changelog.shown_values import shown
from deltawriters import arrow_types
from deltawriters.arrow_types import as_table_types, storage
from deltawriters.collapse import (
    Collapsed,
    Ints,
    collapse,
    dense_ids,
    grouped,
    order_rank,
    ranked,
    settle,
    tied_rows,
)
from deltawriters.content import ContentFile, DataFile, DataFiles, FileContent, Locations, TaskId
from deltawriters.deletes import FLUSH_THRESHOLD, KeyDeletes
from deltawriters.keyindex import IndexedFile, low_hash
from deltawriters.moves import Settled, are_about_others, columns_known
from deltawriters.ordering import RowOrder
from deltawriters.partial import Completed, Partials
from deltawriters.partitioning import PartitionedWriter
from deltawriters.resolve import NOWHERE, IndexResult, IndexTask, indexed, key_columns, resolve
from deltawriters.rowhash import row_hash
from deltawriters.superseded import SupersededRows
from deltawriters.table import FileFactory, TableSpec, UnreadableRowsError


class CardinalityError(ValueError):
    """Two changes of one key have equal order values and different content, so nothing tells which row is right.

    MERGE has the same check (`MergeRowsExec`, cardinality check). The writer raises this error in `changelog` mode
    only, because there it trusts the stream. In all modes it is raised if a change has the order value of a TRUNCATE.
    """


@dataclass(frozen=True)
class DeltaOptions:
    """How changes become files.

    :param key: key columns; their field ids become the `equality_ids`.
    :param mode: `upsert`: every key of the commit may be in the table, so the writer writes an equality delete for
        each key. `changelog`: the stream is complete, so a key whose first change is +I needs no equality delete.
    :param table_is_empty: earlier snapshots have no rows to delete. The commit must then refuse concurrent appends.
    :param global_deletes: the table has data under other specs than the current spec, so the writer writes equality
        deletes under the unpartitioned spec.
    :param deletes_carry_row: -U and -D rows have the old values of the partition source columns. False: a -D row has
        only its key, and a -U row may have made-up values (`changelog.made_up`).
    :param content: the columns whose content settles ties. Empty means all columns.
    :param flush_bytes: the writer buffers this many Arrow bytes before it writes rows.
    :param copy_on_write: the table gets no deletes. The caller has to remove `IndexResult.old_rows` from their files.
    :param position_delete_threshold: the writer holds this many positions before it writes a file of them, if the
        format has such files.
    :param show_values: errors and reasons may quote values of rows. Else they have types and lengths.
    """

    key: tuple[str, ...]
    mode: Literal["upsert", "changelog"] = "upsert"
    table_is_empty: bool = False
    global_deletes: bool = False
    deletes_carry_row: bool = True
    content: tuple[str, ...] = ()
    flush_bytes: int = 128 * 1024 * 1024
    position_delete_threshold: int = FLUSH_THRESHOLD
    copy_on_write: bool = False
    show_values: bool = True


@dataclass(frozen=True)
class WriteResult:
    """What a task wrote. `rows` counts the changes that the task received, by `RowKind.short`.

    `index` is None if the table has no key index. The caller has to delete `index.old_rows`, those of all tasks
    together: readers open each delete file, and a data file has only one deletion vector.

    `rows` doesn't count the partial rows that nothing could complete (`completed.letters`).
    """

    files: list[ContentFile]
    rows: dict[str, int] = field(default_factory=dict)
    index: IndexResult | None = None
    completed: Completed = field(default_factory=Completed)
    moves: Settled = field(default_factory=Settled)

    def records(self, content: FileContent) -> int:
        """Number of rows in all files of kind `content`."""
        return sum(file.record_count for file in self.files if file.content is content)


class DeltaWriter:
    """Writes one task's share of a commit. All changes of a key must come to one writer.

    `write` takes record batches of changelog rows (`changelog.rows`), in any order, without bad records. If there is
    the column `_rowdelta_unavailable`, rows may be partial. The writer keeps them until it is closed, since any later
    change may be one that they build on. For the same reason it keeps the removals of rows that went to another key.

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
        self._map = _KeyMap.empty()
        self._barrier: pa.Table | None = None
        self._buffer: list[pa.RecordBatch] = []
        self._buffered_bytes = 0
        self._partial: list[pa.RecordBatch] = []
        self._moved: list[pa.RecordBatch] = []
        self._earlier: pa.Table | None = None
        self._kind_counts = np.zeros(len(RowKind), np.int64)
        self._sources = list(table.source_columns)
        self._partitioned_by_key = set(self._sources) <= set(options.key)

    @property
    def created_paths(self) -> list[str]:
        """Every path that this task has opened. A failed job deletes these files."""
        return self._factory.created

    def write(self, changes: pa.RecordBatch) -> None:
        """Take a batch of changes.

        :raises CardinalityError: two changes contradict each other (`changelog` mode), or a change has the order value
            of a TRUNCATE.
        """
        kinds = changes.column(KIND).to_numpy(zero_copy_only=False)
        self._kind_counts += np.bincount(kinds, minlength=len(RowKind))
        if MOVED in changes.schema.names:
            changes, moved = _divided(changes, MOVED)
            self._moved += moved
            changes = changes.drop_columns([MOVED])
        if UNAVAILABLE in changes.schema.names:
            changes, partial = _divided(changes, UNAVAILABLE)
            self._partial += partial
            changes = changes.drop_columns([BAD, UNAVAILABLE])
        self._add(changes)

    def _add(self, changes: pa.RecordBatch) -> None:
        if not len(changes):
            return
        self._buffer.append(changes)
        self._buffered_bytes += changes.nbytes
        if self._buffered_bytes >= self._options.flush_bytes:
            self._flush(last=False)

    def truncate(self, barriers: pa.RecordBatch) -> None:
        """Take TRUNCATEs of the source. Only what came after the last of them counts.

        :param barriers: rows with the order columns of changes.
        :raises CardinalityError: a change has the same order value.
        """
        names = [name for name in barriers.schema.names if name.startswith(ORDER)]
        candidates = _concat(self._barrier, pa.Table.from_batches([barriers]).select(names))
        last = int(np.argmax(order_rank([storage(column) for column in candidates.columns])))
        self._barrier = candidates.slice(last, 1)
        known = self._map
        if known.last_order is None:
            return
        gone = self._is_void(known.last_order)
        written = np.flatnonzero(gone & (known.file != NOWHERE))
        self._deletes.delete(known.file[written], known.pos[written])
        self._map = known.filter(~gone)

    def _is_void(self, orders: pa.Table) -> npt.NDArray[np.bool_]:
        """Whether each change came before the last TRUNCATE.

        :raises CardinalityError: a change has the order value of the TRUNCATE.
        """
        rank = order_rank([storage(column) for column in _concat(self._barrier, orders).columns])
        ties = np.flatnonzero(rank[1:] == rank[0])
        if len(ties):
            tied = tuple(orders.slice(int(ties[0]), 1).to_pylist()[0].values())
            raise CardinalityError(
                f"{amount(len(ties), 'change')} with the same order value as a TRUNCATE of the source, "
                f"{self._named(tied)}, so nothing says which of them came "
                "before it. Add columns to order_by that make the order unique, or set truncate: reject"
            )
        void: npt.NDArray[np.bool_] = rank[1:] < rank[0]
        return void

    def close(self) -> WriteResult:
        """Write what is buffered and finish all files.

        :raises CardinalityError: two changes contradict each other (`changelog` mode), or a change has the order value
            of a TRUNCATE.
        :raises CorruptIndexError: a run of the index is damaged or missing.
        """
        completed, moves = Completed(), Settled()
        while self._partial or self._moved:
            partial, moved = self._first_kept()
            if partial:
                completed = completed.and_more(self._complete(partial, self._index))
            if moved:
                moves = moves.and_more(self._settle_moves(moved, self._index))
        self._flush(last=True)
        data_files = self._data.close()
        if self._superseded is not None:
            data_files = self._superseded.removed(data_files, Locations(self._map.file, self._map.pos))
        self._kind_counts[RowKind.UPDATE_AFTER] -= sum(map(len, completed.letters))
        rows = {kind.short: int(self._kind_counts[kind]) for kind in RowKind}
        resolved = None if self._index is None else self._resolve(self._index)
        files = self._deletes.close(data_files)
        is_empty = self._options.table_is_empty or self._barrier is not None
        if self._index is None and not is_empty and len(self._map):
            files += self._key_deletes()
        return WriteResult(files, rows, resolved, completed, moves)

    def abort(self) -> None:
        """Give up: close open files and delete everything written."""
        self._data.abort()
        self._factory.delete_all()

    def _flush(self, last: bool) -> None:
        if not self._buffer:
            return
        changes = pa.Table.from_batches(self._buffer).combine_chunks()
        self._buffer, self._buffered_bytes = [], 0
        kinds = storage(changes.column(KIND)).to_numpy(zero_copy_only=False).astype(np.int8)
        order_names = [n for n in changes.column_names if n.startswith(ORDER)]
        if self._barrier is not None:
            counts = ~self._is_void(changes.select(order_names))
            changes, kinds = changes.filter(pa.array(counts)).combine_chunks(), kinds[counts]
            if not len(kinds):
                return
        known = self._map
        m = len(known)

        keys = _concat(known.keys, changes.select(self._options.key))
        orders = _concat(known.last_order, changes.select(order_names))
        all_kinds = np.concatenate([known.last_kinds, kinds])
        outcome = self._collapse(keys, orders, all_kinds, changes)

        # Keys 0..m-1 are the keys of the map: ids are numbered by first appearance, and the map's rows come first.
        changed = outcome.last >= m
        superseded = np.flatnonzero(changed[:m] & (known.file != NOWHERE))
        self._deletes.delete(known.file[superseded], known.pos[superseded])

        file = np.full(len(outcome.last), NOWHERE, np.int64)
        pos = np.zeros(len(outcome.last), np.int64)
        file[:m], pos[:m] = known.file, known.pos
        file[superseded] = NOWHERE
        sets = np.flatnonzero(changed & sets_row(all_kinds[outcome.last]))
        # with ascending row numbers, `take` reads memory in order
        sets = sets[np.argsort(outcome.last[sets], kind="stable")]
        rows = _take(changes.select(self._table.arrow_schema.names), outcome.last[sets] - m)
        located = self._data.write(as_table_types(rows, self._table.arrow_schema), last)
        file[sets], pos[sets] = located.file, located.pos

        new_keys = _take(changes.select(self._options.key), outcome.last[m:] - m)
        hashes = known.hash
        if self._index is not None:
            new_hashes = storage(changes.column(HASH)).to_numpy()[outcome.last[m:] - m]
            hashes = new_hashes if hashes is None else np.concatenate([hashes, new_hashes])
        first = None
        if self._options.mode == "changelog" and self._index is None:
            first = self._first_changes(changes, keys, order_names)
        self._map = _KeyMap(
            keys=_concat(known.keys, new_keys),
            # after the last flush the writer compares nothing, so it needs neither order nor content
            last_order=None if last else _take(orders, outcome.last),
            last_kinds=all_kinds[outcome.last],
            content=None if last else self._content(changes, outcome.last),
            file=file,
            pos=pos,
            first=first,
            hash=hashes,
        )

    def _first_kept(self) -> tuple[list[pa.RecordBatch], list[pa.RecordBatch]]:
        """Take from the changes that the writer has kept: of each key either the partial rows that come before its
        removals, or the removals that come before its partial rows. What comes after them builds on them.
        """
        partial, moved = self._partial, self._moved
        self._partial, self._moved = [], []
        if not partial or not moved:
            return partial, moved
        tables = [pa.Table.from_batches(part) for part in (partial, moved)]
        names = [name for name in tables[0].column_names if name.startswith(ORDER)]
        keys, orders, kinds = (
            pa.concat_tables([table.select(part) for table in tables]).combine_chunks()
            for part in (list(self._options.key), names, [KIND])
        )
        ids, count = dense_ids([storage(column) for column in keys.columns])
        rank = ranked([storage(column) for column in orders.columns], storage(kinds.column(0)).to_numpy())
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

    def _complete(self, kept: list[pa.RecordBatch], index: IndexTask | None) -> Completed:
        """Make whole changes of partial rows, and add them to the buffer.

        Each takes the place of all changes of its key that came before it in the commit: these are dropped.

        :raises CorruptIndexError: a run of the index is damaged or missing.
        """
        assert index is not None, "only a key index finds the rows that complete partial rows"
        if self._barrier is not None:
            index = index.of_empty_table
        standing = self._standing(kept)
        partials, base, m = standing.partials, standing.base, len(self._map)
        in_buffer, in_table = np.flatnonzero(base >= m), np.flatnonzero(base == NOWHERE)
        in_map = np.flatnonzero((base >= 0) & (base < m))
        in_file = in_map[self._map.file[base[in_map]] != NOWHERE]
        if len(in_buffer):
            in_buffer = in_buffer[sets_row(standing.kinds[base[in_buffer]])]
        gone = np.setdiff1d(np.arange(len(partials)), np.concatenate([in_buffer, in_table, in_file]))
        letters = partials.letters(gone, "and the row was deleted before")

        places = self._map.file[base[in_file]], self._map.pos[base[in_file]]
        whole = self._dropped(standing, in_buffer, in_file)
        self._add_all(partials.completed(in_buffer, whole))
        if len(in_file):
            self._data.close()  # so that the files can be read; the next rows go to other files
            files = [indexed(self._files.path(n), self._files.partition(n)) for n in range(len(self._files))]
            letters += self._complete_from(standing, in_file, files, *places)
        if not len(in_table):
            return Completed(letters=letters)

        keys = partials.rows.take(pa.array(partials.last[in_table]))
        high = storage(keys.column(HASH)).to_numpy().view(np.uint64)
        low = low_hash(key_columns(self._table, keys.select(self._options.key)), index.slice.base)
        located = index.slice.probe(high, low, index.first, index.last)
        found = np.bincount(located.query, minlength=len(in_table))
        if (found == 0).any():
            letters += partials.letters(in_table[found == 0], "and the table has no row with this key")
        if (found > 1).any():  # which only another writer can have written
            why = "and the table has several rows with this key"
            letters += partials.letters(in_table[found > 1], why, BadRecord.UNAVAILABLE_VALUE)
        alone = found[located.query] == 1
        chosen, file, pos = in_table[located.query[alone]], located.file[alone], located.pos[alone]
        letters += self._complete_from(standing, chosen, located.files, file, pos)
        return Completed(len(chosen), [located.files[number].path for number in np.unique(file).tolist()], letters)

    def _standing(self, kept: list[pa.RecordBatch]) -> "_Standing":
        """Find out what partial rows build on. What a TRUNCATE made void leaves the writer."""
        partial, records = Partials.without_records(kept)
        if self._barrier is not None:
            partial = self._since_truncate(partial)
        found = self._last_changes(partial, np.full(len(partial), RowKind.UPDATE_AFTER, np.int8))
        stays = np.flatnonzero((found.base[found.of] == NOWHERE) | found.is_after)
        of_partial = found.of[stays]
        partials = Partials.of(partial.take(pa.array(stays)), records, of_partial, found.rank[stays])
        numbers = np.unique(of_partial)
        return _Standing(partials, numbers, found.base[numbers], found.ids, found.kinds)

    def _last_changes(self, rows: pa.Table, kinds: npt.NDArray[np.int8]) -> "_LastChanges":
        """The last whole change of each key, in the map and the buffer, for rows that the writer has kept apart.

        :param rows: n changes after the last TRUNCATE; `kinds` are theirs. What is before it leaves the buffer.
        """
        names = [name for name in rows.column_names if name.startswith(ORDER)]
        if self._barrier is not None and self._buffer:
            self._buffer = self._since_truncate(pa.Table.from_batches(self._buffer)).to_batches()
        key, known = list(self._options.key), self._map
        keys, orders, whole_kinds = known.keys, known.last_order, known.last_kinds
        base = np.arange(len(known))
        if self._buffer:
            changes = pa.Table.from_batches(self._buffer).combine_chunks()
            keys, orders = _concat(keys, changes.select(key)), _concat(orders, changes.select(names))
            more = storage(changes.column(KIND)).to_numpy(zero_copy_only=False).astype(np.int8)
            whole_kinds = np.concatenate([whole_kinds, more])
            base = self._collapse(keys, orders, whole_kinds, changes).last
        whole = len(whole_kinds)
        keys, orders = _concat(keys, rows.select(key)), _concat(orders, rows.select(names))
        # keys are numbered by first appearance, so those of whole changes have the numbers that they have in `base`
        ids, count = dense_ids([storage(column) for column in keys.columns])
        base = np.concatenate([base, np.full(count - len(base), NOWHERE)])
        rank = ranked([storage(column) for column in orders.columns], np.concatenate([whole_kinds, kinds]))
        of = ids[whole:]
        is_after = rank[whole:] >= rank[base[of]]
        return _LastChanges(of, rank[whole:], is_after, base, ids[:whole], whole_kinds)

    def _since_truncate(self, changes: pa.Table) -> pa.Table:
        """The changes after the last TRUNCATE."""
        void = self._is_void(changes.select([name for name in changes.column_names if name.startswith(ORDER)]))
        return changes.filter(pa.array(~void)).combine_chunks()

    def _dropped(self, standing: "_Standing", in_buffer: Ints, in_file: Ints) -> pa.Table:
        """Drop whole changes of some keys of partial rows: all from the buffer, and from the map those of the keys
        `in_buffer`. The rows of the others stay until they are read again.

        :param in_buffer: keys whose last whole change is in the buffer.
        :param in_file: other keys.
        :return: the last whole changes of the keys `in_buffer`.
        """
        m = len(self._map)
        is_dropped = np.zeros(standing.ids.max(initial=-1) + 1, np.bool_)
        is_dropped[standing.numbers[in_buffer]] = True
        self._forget(np.flatnonzero(is_dropped[:m]))
        if not self._buffer:
            return pa.table({})
        is_dropped[standing.numbers[in_file]] = True
        changes = pa.Table.from_batches(self._buffer).combine_chunks()
        rest = changes.filter(pa.array(~is_dropped[standing.ids[m:]]))
        self._buffer, self._buffered_bytes = rest.to_batches(), rest.nbytes
        return changes.take(pa.array(standing.base[in_buffer] - m))

    def _forget(self, mapped: Ints) -> None:
        """Drop what the map has of some of its keys. A change with an equal order value takes its place."""
        known = self._map
        live = mapped[known.file[mapped] != NOWHERE]
        self._deletes.delete(known.file[live], known.pos[live])
        file, kinds = known.file.copy(), known.last_kinds.copy()
        file[mapped] = NOWHERE
        kinds[mapped] = RowKind.UPDATE_BEFORE  # at an equal order value, what takes their place comes later
        self._map = replace(known, file=file, last_kinds=kinds)

    def _complete_from(
        self, standing: "_Standing", keys: Ints, files: Sequence[IndexedFile], file: Ints, pos: Ints
    ) -> list[pa.StructArray]:
        """Complete partial rows from rows of data files. Rows of the commit itself are dropped as soon as others take
        their place.

        :param keys: numbers of n keys of `standing.partials`.
        :param file: for each of the keys the number of the data file in `files`, and `pos` the position in it.
        :return: the records that can't be completed since a file can't be read.
        """
        partials = standing.partials
        columns, letters = partials.lacked(keys), list[pa.StructArray]()

        def complete(some: Ints, rows: pa.Table) -> None:
            base = standing.base[some]
            if (base != NOWHERE).any():
                self._forget(base[base != NOWHERE])
            self._add_all(partials.completed(some, rows))

        if not columns:
            complete(keys, pa.table({}))
            return letters
        for number, places in grouped(file):
            here = places[np.argsort(pos[places])]
            done = 0
            try:
                for read, rows in self._table.rows(DataFile(files[number]), at=pos[here], columns=columns):
                    complete(keys[here[done : done + len(read)]], rows)
                    done += len(read)
            except UnreadableRowsError as error:
                # a file's path has values, those of its partition
                why = str(error) if self._options.show_values else "the file of the table's row can't be read"
                letters += partials.letters(keys[here[done:]], f"and {why}", BadRecord.UNAVAILABLE_VALUE)
        return letters

    def _settle_moves(self, kept: list[pa.RecordBatch], index: IndexTask | None) -> Settled:
        """Add the removals of moved rows to the buffer, but for those that are about other rows than their keys have.

        :raises CorruptIndexError: a run of the index is damaged or missing.
        """
        moved = pa.Table.from_batches(kept).combine_chunks()
        if self._barrier is not None:
            moved = self._since_truncate(moved)
            index = None  # the table has no rows
        kinds = storage(moved.column(KIND)).to_numpy(zero_copy_only=False).astype(np.int8)
        found = self._last_changes(moved, kinds)
        base, m = found.base[found.of], len(self._map)
        follows_row = (base != NOWHERE) & found.is_after
        follows_row[follows_row] = sets_row(found.kinds[base[follows_row]])
        in_buffer, in_map = (np.flatnonzero(follows_row & there) for there in (base >= m, base < m))
        in_map = in_map[self._map.file[base[in_map]] != NOWHERE]
        is_certain = ~np.asarray(pc.starts_with(storage(moved.column(MOVED)), MOVED_SEPARATOR))
        in_table = np.flatnonzero((base == NOWHERE) & is_certain & (index is not None))
        others = np.zeros(len(moved), np.bool_)
        columns = [name for name in columns_known(moved) if name in self._table.arrow_schema.names]

        def compare(removals: Ints, rows: pa.Table) -> None:
            others[removals] = are_about_others(moved.take(pa.array(removals)), rows)

        if len(in_buffer):
            buffered = pa.Table.from_batches(self._buffer).combine_chunks()
            compare(in_buffer, buffered.take(pa.array(base[in_buffer] - m)))
        if len(in_map) and columns:
            self._data.close()  # so that the files can be read; the next rows go to other files
            files = [indexed(self._files.path(n), self._files.partition(n)) for n in range(len(self._files))]
            file, pos = self._map.file[base[in_map]], self._map.pos[base[in_map]]
            self._read_present(files, file, pos, columns, lambda numbers, rows: compare(in_map[numbers], rows))
        looked_at: list[str] = []
        if len(in_table) and columns:
            assert index is not None
            asked = moved.take(pa.array(in_table))
            high = storage(asked.column(HASH)).to_numpy().view(np.uint64)
            low = low_hash(key_columns(self._table, asked.select(self._options.key)), index.slice.base)
            located = index.slice.probe(high, low, index.first, index.last)
            alone = np.bincount(located.query, minlength=len(in_table))[located.query] == 1
            asking, file, pos = in_table[located.query[alone]], located.file[alone], located.pos[alone]
            self._read_present(located.files, file, pos, columns, lambda numbers, rows: compare(asking[numbers], rows))
            # one that is applied removes whatever others make of its key's row meanwhile, as all removals do
            left_in = np.unique(file[others[asking]])
            looked_at = [located.files[number].path for number in left_in.tolist()]
        says_nothing = pc.equal(moved.column(MOVED), "").to_numpy()
        untold = int(np.count_nonzero(follows_row & says_nothing))
        moved = moved.drop_columns([name for name in (MOVED, BAD, UNAVAILABLE) if name in moved.column_names])
        earlier = moved.filter(pa.array(others | ((base != NOWHERE) & ~found.is_after)))
        self._earlier = earlier if self._earlier is None else pa.concat_tables([self._earlier, earlier])
        self._add_all(moved.filter(pa.array(~others)))
        return Settled(int(np.count_nonzero(others)), untold, looked_at)

    def _read_present(
        self,
        files: Sequence[IndexedFile],
        file: Ints,
        pos: Ints,
        columns: Sequence[str],
        take: Callable[[Ints, pa.Table], None],
    ) -> None:
        """Read rows of data files. Those of a file that can't be read are left out.

        :param file: for each row the number of the data file in `files`, and `pos` the position in it.
        :param take: is called with numbers of the rows, and the rows.
        """
        for number, places in grouped(file):
            here = places[np.argsort(pos[places], kind="stable")]
            distinct, row_of = np.unique(pos[here], return_inverse=True)
            done = 0
            try:
                for read, rows in self._table.rows(DataFile(files[number]), at=distinct, columns=columns):
                    chosen = np.flatnonzero((row_of >= done) & (row_of < done + len(read)))
                    take(here[chosen], rows.take(pa.array(row_of[chosen] - done)))
                    done += len(read)
            except UnreadableRowsError:
                continue

    def _with_earlier(self, keys: pa.Table, firsts: pa.Table, earlier: pa.Table) -> tuple[pa.Table, pa.Table]:
        """Add removals to the first changes of keys that begin with an insert: earlier snapshots may have the row that
        such a removal is about.

        :param earlier: removals that aren't the last changes of their keys.
        """
        all_keys = _concat(keys, earlier.select(keys.column_names))
        ids, _ = dense_ids([storage(column) for column in all_keys.columns])
        inserts = np.append(storage(firsts.column(KIND)).to_numpy(zero_copy_only=False) == RowKind.INSERT, False)
        of_earlier = np.minimum(ids[len(keys) :], len(keys))
        chosen = np.concatenate([np.arange(len(keys)), len(keys) + np.flatnonzero(inserts[of_earlier])])
        return _take(all_keys, chosen), _take(_concat(firsts, earlier.select(firsts.column_names)), chosen)

    def _add_all(self, changes: pa.Table) -> None:
        for batch in changes.to_batches():
            self._add(batch)

    def _resolve(self, index: IndexTask) -> IndexResult:
        """Find the rows that the keys have in earlier snapshots."""
        known = self._map
        if self._barrier is not None:
            index = index.of_empty_table
        if known.keys is None or known.hash is None or not len(known):
            # no change of the task counts, but it still has runs to merge
            return IndexResult([], index.merged_runs(), [])
        return resolve(self._table, index, known.keys, known.hash.view(np.uint64), known.file, known.pos, self._files)

    def _collapse(self, keys: pa.Table, orders: pa.Table, kinds: npt.NDArray[np.int8], changes: pa.Table) -> Collapsed:
        """Collapse, and settle ties by the rows' content hash so that every replay settles them the same way."""
        key_columns = [storage(column) for column in keys.columns]
        outcome = collapse(key_columns, [storage(column) for column in orders.columns], kinds)
        ties = tied_rows(outcome)
        if not len(ties):
            return outcome
        settled, content = settle(outcome, key_columns, ties, lambda rows: self._content(changes, rows))
        if self._options.mode == "changelog":
            winners = outcome.last[outcome.ids[ties]]
            contradicting = ties[(content[ties] != content[winners]) & sets_row(kinds[ties])]
            if len(contradicting):
                raise self._cardinality_error(keys, orders, contradicting)
        return settled

    def _content(self, changes: pa.Table, rows: Ints) -> Ints:
        """Content hashes of `rows`.

        :param rows: row numbers. Numbers below `len(self._map)` are rows of the map, higher numbers rows of `changes`.
        """
        m = len(self._map)
        hashes = np.empty(len(rows), np.int64)
        known = rows < m
        if self._map.content is not None:
            hashes[known] = self._map.content[rows[known]]
        if not known.all():
            columns = self._options.content or self._table.arrow_schema.names
            new = _take(changes.select(columns), rows[~known] - m)
            hashes[~known] = row_hash([storage(column) for column in new.columns])
        return hashes

    def _cardinality_error(self, keys: pa.Table, orders: pa.Table, rows: Ints) -> CardinalityError:
        shown = pa.array(rows[:3])
        examples = [
            f"{self._named(key)} at order {self._named(tuple(order.values()))}"
            for key, order in zip(keys.take(shown).to_pylist(), orders.take(shown).to_pylist(), strict=True)
        ]
        return CardinalityError(
            f"{amount(len(rows), 'change')} with the order value of another change of the same key, for example "
            f"{'; '.join(examples)}. In mode changelog the order must decide. Add columns to order_by that make the "
            "order unique, or use mode: upsert, which settles ties by the rows' content."
        )

    def _named(self, values: Mapping[str, Any] | tuple[Any, ...]) -> str:
        """A key or an order for people."""
        if self._options.show_values:
            return str(values)
        if isinstance(values, Mapping):
            return ", ".join(f"{name} ({shown(value, visible=False)})" for name, value in values.items())
        return f"({', '.join(shown(value, visible=False) for value in values)})"

    def _first_changes(self, changes: pa.Table, keys: pa.Table, order_names: list[str]) -> pa.Table:
        """The first change of each key so far: order, kind and partition source columns, one row a key, in the order
        of the map.
        """
        columns = [*order_names, KIND, *(n for n in self._sources if n in changes.column_names)]
        candidates = _concat(self._map.first, changes.select(columns))
        kinds = storage(candidates.column(KIND)).to_numpy(zero_copy_only=False).astype(np.int8)
        order = [storage(candidates.column(name)) for name in order_names]
        outcome = collapse([storage(column) for column in keys.columns], order, kinds)
        return _take(candidates, outcome.first)

    def _key_deletes(self) -> list[ContentFile]:
        """Write deletes for all keys that earlier snapshots may have."""
        deletes = self._table.key_deletes(self._factory, self._options.key)
        assert self._map.keys is not None
        keys, firsts = self._map.keys, self._map.first
        if self._earlier is not None and firsts is not None:
            keys, firsts = self._with_earlier(keys, firsts, self._earlier)
        for start, stop in _portions(keys, firsts):
            first = None if firsts is None else firsts.slice(start, stop - start)
            self._delete_keys(keys.slice(start, stop - start), first, deletes)
        return deletes.close()

    def _delete_keys(self, keys: pa.Table, first: pa.Table | None, deletes: KeyDeletes) -> None:
        types = self._table.arrow_schema
        keys = as_table_types(keys, pa.schema([types.field(name) for name in self._options.key]))
        if first is not None:
            kinds = storage(first.column(KIND)).to_numpy(zero_copy_only=False)
            removed = pa.array(kinds != RowKind.INSERT)
            keys, first = keys.filter(removed), first.filter(removed)
        if self._options.global_deletes:
            deletes.delete_globally(keys)
        elif self._partitioned_by_key:  # true for an unpartitioned table too: it has no source columns
            deletes.delete(keys, keys)
        elif first is None:
            deletes.delete_globally(keys)
        else:
            sources = as_table_types(first.select(self._sources), pa.schema([types.field(n) for n in self._sources]))
            known = pa.array(self._old_partition_known(first))
            deletes.delete(keys.filter(known), sources.filter(known))
            deletes.delete_globally(keys.filter(pc.invert(known)))

    def _old_partition_known(self, first: pa.Table) -> npt.NDArray[np.bool_]:
        """Whether each first change tells the partition that its key must be deleted from.

        A null in a source column is ambiguous: the old value was null, or the before-image lacks the column. So null
        counts as unknown, and so does what may be made up.
        """
        kinds = storage(first.column(KIND)).to_numpy(zero_copy_only=False)
        known: npt.NDArray[np.bool_] = kinds == RowKind.UPDATE_BEFORE
        if self._options.deletes_carry_row:
            known |= kinds == RowKind.DELETE
        for name in self._sources:
            values = storage(first.column(name))
            known &= values.is_valid().to_numpy(zero_copy_only=False)
            if not self._options.deletes_carry_row and name not in self._options.key:
                known &= surely_logged(pc.if_else(pa.array(known), values, pa.scalar(None, values.type)))
        return known


@dataclass(frozen=True)
class _LastChanges:
    """What comes before n rows that the writer has kept apart. Whole changes are numbered: first those of the map, then
    those of the buffer.

    :param of: the number of each row's key.
    :param rank: orders the rows.
    :param is_after: whether each row comes after its key's last whole change, if there is one.
    :param base: the last whole change of each key, or `NOWHERE`.
    :param ids: the number of each whole change's key.
    :param kinds: the kind of each whole change.
    """

    of: Ints
    rank: Ints
    is_after: npt.NDArray[np.bool_]
    base: Ints
    ids: Ints
    kinds: npt.NDArray[np.int8]


@dataclass(frozen=True)
class _Standing:
    """What partial rows build on. Whole changes are numbered: first those of the map, then those of the buffer.

    :param partials: the partial rows that no whole change of their key comes after.
    :param numbers: the number of each of their keys.
    :param base: the last whole change of each of their keys, or `NOWHERE`.
    :param ids: the number of each whole change's key.
    :param kinds: the kind of each whole change.
    """

    partials: Partials
    numbers: Ints
    base: Ints
    ids: Ints
    kinds: npt.NDArray[np.int8]


@dataclass(frozen=True)
class _KeyMap:
    """Every key of the commit so far. Row i of every field describes key number i.

    :param keys: key columns.
    :param last_order: order columns of the key's last change. `last_kinds` has the kind of that change, and `content`
        the hash of its row.
    :param file: number of the data file that has the key's live row, or `NOWHERE`. `pos` is the row's position in it.
    :param hash: high half of the keys' hashes, if the table has a key index.
    :param first: order, kind and partition source columns of the key's first change; `changelog` mode only.
    """

    keys: pa.Table | None
    last_order: pa.Table | None
    last_kinds: npt.NDArray[np.int8]
    file: Ints
    pos: Ints
    first: pa.Table | None
    hash: Ints | None = None
    content: Ints | None = None

    @classmethod
    def empty(cls) -> "_KeyMap":
        return cls(None, None, np.empty(0, np.int8), np.empty(0, np.int64), np.empty(0, np.int64), None)

    def __len__(self) -> int:
        return len(self.file)

    def filter(self, stays: npt.NDArray[np.bool_]) -> "_KeyMap":
        """The keys where `stays` is true."""

        def rows(table: pa.Table | None) -> pa.Table | None:
            return None if table is None else table.filter(pa.array(stays)).combine_chunks()

        return _KeyMap(
            keys=rows(self.keys),
            last_order=rows(self.last_order),
            last_kinds=self.last_kinds[stays],
            file=self.file[stays],
            pos=self.pos[stays],
            first=rows(self.first),
            hash=None if self.hash is None else self.hash[stays],
            content=None if self.content is None else self.content[stays],
        )


def _divided(changes: pa.RecordBatch, name: str) -> tuple[pa.RecordBatch, list[pa.RecordBatch]]:
    """The changes that have no value in a column, and the others, if there are any."""
    flags = changes.column(name).is_valid()
    if not pc.any(flags).as_py():
        return changes, []
    return changes.filter(pc.invert(flags)), [changes.filter(flags)]


def _concat(known: pa.Table | None, more: pa.Table) -> pa.Table:
    """Both tables as one table of one chunk. With more than `MOST_TEXT` bytes it uses Arrow's large types."""
    if known is None:
        return more
    if known.nbytes + more.nbytes > arrow_types.MOST_TEXT:
        types = [field.with_type(arrow_types.large_type(field.type)) for field in known.schema]
        known = known.cast(pa.schema(types))
    return pa.concat_tables([known, more.cast(known.schema)]).combine_chunks()


def _portions(keys: pa.Table, first: pa.Table | None) -> Iterator[tuple[int, int]]:
    """Row ranges [start, stop) of the key map, each small enough for Arrow's usual types (`MOST_TEXT`). Usually this is
    one range with all rows.
    """
    waiting = [(0, keys.num_rows)]
    while waiting:
        start, stop = waiting.pop()
        sizes = (table.slice(start, stop - start).nbytes for table in (keys, first) if table is not None)
        if stop - start <= 1 or max(sizes) <= arrow_types.MOST_TEXT:
            yield start, stop
        else:
            middle = (start + stop) // 2
            waiting += [(middle, stop), (start, middle)]


def _take(table: pa.Table, rows: Ints) -> pa.Table:
    if len(rows) == table.num_rows and np.array_equal(rows, np.arange(len(rows))):
        return table  # nothing was collapsed, as in a snapshot of the source; a copy would take most of the time
    # `take` on a table of many chunks gathers chunk by chunk; on one chunk it is a plain gather
    return table.combine_chunks().take(pa.array(rows))
