"""The whole changes of a commit, and the data files with the last of each key.

One rule of Iceberg shapes this (spec, "Scan Planning"): an equality delete applies to data files with a strictly lower
sequence number, and all files of a commit have the same sequence number. So an equality delete can't remove a row of
the same commit; only a position delete can, and other formats have no other deletes. Therefore the row's place is
remembered for every key of the commit, until the commit ends. Iceberg's `BaseTaskWriter.BaseEqualityDeltaWriter`,
which the Flink sink extends, does the same with its `insertedRowMap`, row by row; this does it buffer by buffer.

A TRUNCATE of the source is a barrier in the order of changes: what is before it doesn't count, in this commit or in
earlier ones. The last barrier is kept. Changes before it are dropped, and rows that are already written for such
changes are removed. Earlier commits' rows get no deletes: the commit removes all of them.

The key map holds the collapsed changes of the commit so far. A flush collapses map entries and buffered changes
together, by the same comparison. So changes may arrive in any order, and the outcome doesn't depend on when they are
flushed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from changelog.amounts import amount
from changelog.rows import HASH, KIND, ORDER, RowKind, SoftDelete, sets_row
from changelog.shown_values import shown
from changelog.versions import VersionColumns
from deltawriters import arrow_types
from deltawriters.arrow_types import as_table_types, storage
from deltawriters.collapse import Collapsed, Ints, collapse, dense_ids, order_rank, ranked, settle, tied_rows
from deltawriters.content import DataFiles
from deltawriters.deletes import FLUSH_THRESHOLD, Deletes
from deltawriters.keyindex import IndexedFile
from deltawriters.partitioning import PartitionedWriter
from deltawriters.resolve import NOWHERE, indexed
from deltawriters.rowhash import row_hash
from deltawriters.table import TableSpec


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
    :param keeps_late: late changes become dead letters.
    :param soft_delete: removals mark rows as deleted. The table has a key index.
    :param ignores_removals: removals are only counted.
    :param applies_late: they are applied, though the index has order values.
    :param history: the columns of versions, if the table has history.
    :param absent_before: partition -> offset. Updates before it that lack values are only counted if the table has no
        row of their key: a later message before it removes the row.
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
    keeps_late: bool = False
    soft_delete: SoftDelete | None = None
    ignores_removals: bool = False
    applies_late: bool = False
    history: VersionColumns | None = None
    absent_before: Mapping[int, int] = field(default_factory=dict)
    show_values: bool = True


@dataclass(frozen=True)
class KeyMap:
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
    def empty(cls) -> "KeyMap":
        return cls(None, None, np.empty(0, np.int8), np.empty(0, np.int64), np.empty(0, np.int64), None)

    def __len__(self) -> int:
        return len(self.file)

    def filter(self, stays: npt.NDArray[np.bool_]) -> "KeyMap":
        """The keys where `stays` is true."""
        mask = pa.array(stays)

        def filtered(values: Any) -> Any:
            if values is None:
                return None
            return values[stays] if isinstance(values, np.ndarray) else values.filter(mask).combine_chunks()

        return KeyMap(**{name: filtered(values) for name, values in vars(self).items()})


@dataclass(frozen=True)
class LastChanges:
    """What comes before n rows that were kept apart. Whole changes are numbered: first those of the map, then
    those of the buffer. The numbers are right only until the next `add`, `flush` or `keep_buffered`.

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


class WholeChanges:
    """Collapses changes that have all values, and writes the last of each key.

    :param data: writes the rows to `files`.
    :param deletes: is told the places of rows that a later change superseded.
    :param has_index: the table has a key index, and the changes have the high half of their keys' hashes.
    :param keeps_order: the map has the order of its keys' last changes also after the last flush.
    """

    def __init__(
        self,
        table: TableSpec,
        options: DeltaOptions,
        files: DataFiles,
        data: PartitionedWriter,
        deletes: Deletes,
        *,
        has_index: bool,
        keeps_order: bool = False,
    ) -> None:
        self.table = table
        self.options = options
        self.map = KeyMap.empty()
        self._files = files
        self._data = data
        self._deletes = deletes
        self._has_index = has_index
        self._keeps_order = keeps_order
        self.barrier: pa.Table | None = None
        """The order columns of the last TRUNCATE."""
        self._buffer: list[pa.RecordBatch] = []
        self._buffered_bytes = 0

    @property
    def buffered(self) -> pa.Table:
        """The changes that wait for the next flush. Without any, the table has no columns."""
        return pa.Table.from_batches(self._buffer).combine_chunks() if self._buffer else pa.table({})

    def add(self, *batches: pa.RecordBatch) -> None:
        """Take changes.

        :raises CardinalityError: two changes contradict each other (`changelog` mode), or a change has the order value
            of a TRUNCATE.
        """
        for changes in batches:
            if not len(changes):
                continue
            self._buffer.append(changes)
            self._buffered_bytes += changes.nbytes
            if self._buffered_bytes >= self.options.flush_bytes:
                self.flush(last=False)

    def keep_buffered(self, stays: npt.NDArray[np.bool_]) -> pa.Table:
        """Let only some of the buffered changes wait for the next flush.

        :return: all changes that were buffered before.
        """
        changes = self.buffered
        rest = changes.filter(pa.array(stays))
        self._buffer, self._buffered_bytes = rest.to_batches(), rest.nbytes
        return changes

    def truncate(self, barriers: pa.RecordBatch) -> None:
        """Take TRUNCATEs of the source. Only what came after the last of them counts.

        :param barriers: rows with the order columns of changes.
        :raises CardinalityError: a change has the same order value.
        """
        candidates = concat(self.barrier, order_of(pa.Table.from_batches([barriers])))
        last = int(np.argmax(order_rank([storage(column) for column in candidates.columns])))
        self.barrier = candidates.slice(last, 1)
        known = self.map
        if known.last_order is None:
            return
        gone = self._is_void(known.last_order)
        written = np.flatnonzero(gone & (known.file != NOWHERE))
        self._deletes.delete(known.file[written], known.pos[written])
        self.map = known.filter(~gone)

    def flush(self, last: bool) -> None:
        """Write what is buffered.

        :param last: nothing is added afterwards.
        :raises CardinalityError: see `add`.
        """
        changes = self.since_truncate(self.buffered)
        self._buffer, self._buffered_bytes = [], 0
        if not len(changes):
            return
        known = self.map
        m = len(known)

        keys = concat(known.keys, changes.select(self.options.key))
        orders = concat(known.last_order, order_of(changes))
        all_kinds = np.concatenate([known.last_kinds, kinds_of(changes)])
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
        rows = take(changes.select(self.table.arrow_schema.names), outcome.last[sets] - m)
        located = self._data.write(as_table_types(rows, self.table.arrow_schema), last)
        file[sets], pos[sets] = located.file, located.pos

        new_keys = take(changes.select(self.options.key), outcome.last[m:] - m)
        hashes = known.hash
        if self._has_index:
            new_hashes = storage(changes.column(HASH)).to_numpy()[outcome.last[m:] - m]
            hashes = new_hashes if hashes is None else np.concatenate([hashes, new_hashes])
        first = None
        if self.options.mode == "changelog" and not self._has_index:
            first = self._first_changes(changes, keys)
        self.map = KeyMap(
            keys=concat(known.keys, new_keys),
            # after the last flush nothing is compared, so the content isn't needed any more
            last_order=None if last and not self._keeps_order else take(orders, outcome.last),
            last_kinds=all_kinds[outcome.last],
            content=None if last else self._content(changes, outcome.last),
            file=file,
            pos=pos,
            first=first,
            hash=hashes,
        )

    def last_changes(self, rows: pa.Table, kinds: npt.NDArray[np.int8]) -> LastChanges:
        """The last whole change of each key, in the map and the buffer, for rows that were kept apart.

        :param rows: n changes after the last TRUNCATE; `kinds` are theirs. What is before it leaves the buffer.
        """
        changes = self.since_truncate(self.buffered)
        self._buffer = changes.to_batches()
        key, known = list(self.options.key), self.map
        keys, orders, whole_kinds = known.keys, known.last_order, known.last_kinds
        base = np.arange(len(known))
        if len(changes):
            keys, orders = concat(keys, changes.select(key)), concat(orders, order_of(changes))
            whole_kinds = np.concatenate([whole_kinds, kinds_of(changes)])
            base = self._collapse(keys, orders, whole_kinds, changes).last
        whole = len(whole_kinds)
        keys, orders = concat(keys, rows.select(key)), concat(orders, order_of(rows))
        # keys are numbered by first appearance, so those of whole changes have the numbers that they have in `base`
        ids, count = dense_ids([storage(column) for column in keys.columns])
        base = np.concatenate([base, np.full(count - len(base), NOWHERE)])
        rank = ranked([storage(column) for column in orders.columns], np.concatenate([whole_kinds, kinds]))
        of = ids[whole:]
        is_after = rank[whole:] >= rank[base[of]]
        return LastChanges(of, rank[whole:], is_after, base, ids[:whole], whole_kinds)

    def since_truncate(self, changes: pa.Table) -> pa.Table:
        """The changes after the last TRUNCATE.

        :raises CardinalityError: a change has the order value of the TRUNCATE.
        """
        if self.barrier is None or not len(changes):
            return changes
        return changes.filter(pa.array(~self._is_void(order_of(changes)))).combine_chunks()

    def readable_files(self) -> list[IndexedFile]:
        """The data files so far, which `map.file` numbers. They are finished, so that they can be read; the next rows
        go to other files.
        """
        self._data.close()
        return [indexed(self._files.path(n), self._files.partition(n)) for n in range(len(self._files))]

    def forget(self, mapped: Ints) -> None:
        """Drop what the map has of some of its keys. A change with an equal order value takes its place."""
        known = self.map
        live = mapped[known.file[mapped] != NOWHERE]
        self._deletes.delete(known.file[live], known.pos[live])
        file, kinds = known.file.copy(), known.last_kinds.copy()
        file[mapped] = NOWHERE
        kinds[mapped] = RowKind.UPDATE_BEFORE  # at an equal order value, what takes their place comes later
        self.map = replace(known, file=file, last_kinds=kinds)

    def _is_void(self, orders: pa.Table) -> npt.NDArray[np.bool_]:
        """Whether each change came before the last TRUNCATE.

        :raises CardinalityError: a change has the order value of the TRUNCATE.
        """
        assert self.barrier is not None
        rank = self.distinct_ranks(self.barrier, orders)
        void: npt.NDArray[np.bool_] = rank[1:] < rank[0]
        return void

    def distinct_ranks(self, barriers: pa.Table, orders: pa.Table) -> Ints:
        """Ranks of TRUNCATEs, and then of changes (`order_rank`).

        :param barriers: the order columns of TRUNCATEs, and `orders` those of changes.
        :raises CardinalityError: a change has the order value of a TRUNCATE.
        """
        rank = order_rank([storage(column) for column in concat(barriers, orders).columns])
        ties = np.flatnonzero(np.isin(rank[len(barriers) :], rank[: len(barriers)]))
        if len(ties):
            tied = tuple(orders.slice(int(ties[0]), 1).to_pylist()[0].values())
            raise CardinalityError(
                f"{amount(len(ties), 'change')} with the same order value as a TRUNCATE of the source, "
                f"{self._named(tied)}, so nothing says which of them came "
                "before it. Add columns to order_by that make the order unique, or set truncate: reject"
            )
        return rank

    def _collapse(self, keys: pa.Table, orders: pa.Table, kinds: npt.NDArray[np.int8], changes: pa.Table) -> Collapsed:
        """Collapse, and settle ties by the rows' content hash so that every replay settles them the same way."""
        key_columns = [storage(column) for column in keys.columns]
        outcome = collapse(key_columns, [storage(column) for column in orders.columns], kinds)
        ties = tied_rows(outcome)
        if not len(ties):
            return outcome
        settled, content = settle(outcome, key_columns, ties, lambda rows: self._content(changes, rows))
        if self.options.mode == "changelog":
            winners = outcome.last[outcome.ids[ties]]
            contradicting = ties[(content[ties] != content[winners]) & sets_row(kinds[ties])]
            if len(contradicting):
                raise self._cardinality_error(keys, orders, contradicting)
        return settled

    def _content(self, changes: pa.Table, rows: Ints) -> Ints:
        """Content hashes of `rows`.

        :param rows: row numbers. Numbers below `len(self.map)` are rows of the map, higher numbers rows of `changes`.
        """
        m = len(self.map)
        hashes = np.empty(len(rows), np.int64)
        known = rows < m
        if self.map.content is not None:
            hashes[known] = self.map.content[rows[known]]
        if not known.all():
            columns = self.options.content or self.table.arrow_schema.names
            new = take(changes.select(columns), rows[~known] - m)
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
        if self.options.show_values:
            return str(values)
        if isinstance(values, Mapping):
            return ", ".join(f"{name} ({shown(value, visible=False)})" for name, value in values.items())
        return f"({', '.join(shown(value, visible=False) for value in values)})"

    def _first_changes(self, changes: pa.Table, keys: pa.Table) -> pa.Table:
        """The first change of each key so far: order, kind and partition source columns, one row a key, in the order
        of the map.
        """
        columns = [KIND, *(n for n in self.table.source_columns if n in changes.column_names)]
        candidates = concat(self.map.first, changes.select([*order_of(changes).column_names, *columns]))
        order = [storage(column) for column in order_of(candidates).columns]
        outcome = collapse([storage(column) for column in keys.columns], order, kinds_of(candidates))
        return take(candidates, outcome.first)


def order_of(changes: pa.Table) -> pa.Table:
    """The order columns of changes."""
    return changes.select([name for name in changes.column_names if name.startswith(ORDER)])


def kinds_of(changes: pa.Table) -> npt.NDArray[np.int8]:
    """The kind of each change."""
    kinds: npt.NDArray[np.int8] = storage(changes.column(KIND)).to_numpy(zero_copy_only=False).astype(np.int8)
    return kinds


def concat(known: pa.Table | None, more: pa.Table) -> pa.Table:
    """Both tables as one table of one chunk. With more than `MOST_TEXT` bytes it uses Arrow's large types."""
    if known is None:
        return more
    if known.nbytes + more.nbytes > arrow_types.MOST_TEXT:
        types = [field.with_type(arrow_types.large_type(field.type)) for field in known.schema]
        known = known.cast(pa.schema(types))
    return pa.concat_tables([known, more.cast(known.schema)]).combine_chunks()


def take(table: pa.Table, rows: Ints) -> pa.Table:
    if len(rows) == table.num_rows and np.array_equal(rows, np.arange(len(rows))):
        return table  # nothing was collapsed, as in a snapshot of the source; a copy would take most of the time
    # `take` on a table of many chunks gathers chunk by chunk; on one chunk it is a plain gather
    return table.combine_chunks().take(pa.array(rows))
