"""Versions of rows in a table with history (slowly changing dimension, type 2).

Each key has at most one current row, and any number of closed versions of it. A version holds from the order value of
the change that opened it until that of the change that closed it. A change of a tracked column closes the current row
and opens another one; a change of other columns is written into the current row; a delete closes it.

The old row is read at its position, by the key index. The task lays the versions that a key has and its changes in one
sequence of events and reads the new versions off it, for all keys at once. A late change takes part in the same way:
then the key's closed versions since its time are read too, and written again.

A TRUNCATE of the source removes each key that has a row then, or changes. Its order value is known from then on, since
it also closes what late changes open before it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from changelog.order_values import encoded, first_of
from changelog.rows import (
    BAD,
    HASH,
    KIND,
    MOVED,
    MOVED_SEPARATOR,
    ORDER,
    PREFIX,
    UNAVAILABLE,
    BadRecord,
    RowKind,
    sets_row,
    unavailable_columns,
)
from changelog.versions import VersionColumns
from deltawriters import tombstones
from deltawriters.arrow_types import as_table_types, storage
from deltawriters.collapse import Ints, dense_ids, order_rank
from deltawriters.content import DataFiles, OldRows, by_file
from deltawriters.keyindex import DELETED_BEFORE, TOMBSTONE, ClosedRows, Entries, Located, low_hash, of_deletes
from deltawriters.late import deleted_at
from deltawriters.moves import Settled, are_about_others
from deltawriters.order_values import UNKNOWN, OrderColumns
from deltawriters.partial import Completed, as_letters
from deltawriters.partitioning import PartitionedWriter
from deltawriters.resolve import NOWHERE, ClosedVersions, IndexResult, IndexTask, key_columns, low_hashes, resolve
from deltawriters.rowhash import row_hash
from deltawriters.table import TableSpec, UnreadableRowsError
from deltawriters.whole_changes import concat, kinds_of, order_of

_KEY, _CHANGE, _ORDER = f"{PREFIX}event_key", f"{PREFIX}event_change", f"{PREFIX}event_order"
"""Columns of events: the number of the key; that of the change, or -1 if a version of the table tells the event, and -2
if it is a delete that the index remembers; and the encoded order value.
"""
_REMEMBERED = -1
PART_ENTRIES = 500_000
"""After a TRUNCATE, a task holds the rows of about so many entries of the index at once."""

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Versions:
    """What becomes of a task's changes.

    :param current: the current rows of the keys that have changes, with the table's columns and `_rowdelta_hash`.
    :param gone: keys that have none, each with its last delete: the columns of `deltawriters.tombstones`, and
        `_rowdelta_hash`.
    :param closed: closed versions, likewise rows of the table.
    :param replaced: the index's entries of closed versions that these replace, as tombstones.
    :param old_rows: the rows of those.
    :param idle: deletes that closed no version; late changes may come before them. The columns of `gone`.
    """

    current: pa.Table
    gone: pa.Table
    closed: pa.Table
    replaced: Entries
    old_rows: Sequence[OldRows]
    idle: pa.Table
    completed: Completed
    moves: Settled


class History:
    """Makes versions of a task's changes.

    :param names: the table's columns that make a row a version.
    :param key: names of the key columns.
    :param order: the table's columns with the order values of rows.
    """

    def __init__(self, table: TableSpec, names: VersionColumns, key: Sequence[str], order: OrderColumns) -> None:
        self._table = table
        self._names = names
        self._key = list(key)
        self._order = order
        own = {*names.names, *names.untracked, *order.columns}
        tracked = names.tracked or tuple(name for name in table.arrow_schema.names if name not in own)
        self._tracked = [name for name in tracked if name not in self._key]

    def parts(
        self, kept: Sequence[pa.RecordBatch], truncates: Sequence[pa.RecordBatch], index: IndexTask
    ) -> Iterator[tuple[IndexTask, pa.Table]]:
        """A task's changes, with the removals of TRUNCATEs. These are about all keys: of them, a part at a time.

        :param kept: the changes.
        :param truncates: rows that stand for TRUNCATEs. One whose order value is known was applied already.
        :raises CorruptIndexError: a run of the index is damaged or missing.
        :raises UnreadableRowsError: a row of the table can't be read.
        """
        changes = pa.Table.from_batches([*kept, *(rows.slice(0, 0) for rows in truncates)] or [pa.record_batch({})])
        known = pa.array(index.slice.truncates, pa.binary())
        new = [rows.filter(pc.invert(pc.is_in(self._order.of_changes(rows), known))) for rows in truncates]
        if not any(map(len, new)):
            yield index, changes
            return
        high = storage(changes.column(HASH)).to_numpy().view(np.uint64)
        for part in index.parts(PART_ENTRIES):
            here = changes.filter(pa.array((high >= part.first) & (high <= part.last - 1)))
            yield part, pa.concat_tables([here, self._removals(pa.Table.from_batches(new), here, part)])

    def _removals(self, truncates: pa.Table, changes: pa.Table, index: IndexTask) -> pa.Table:
        """n TRUNCATEs as n removals of each key that has changes, or a row that holds then."""
        keys = [changes.select([*self._key, HASH])]
        schema, columns = keys[0].schema, [*self._key, self._names.start, self._names.end]
        for high, located in index.slice.live_rows(index.first, index.last):
            for here, rows in self._rows_at(located, columns):
                values = [storage(rows.column(name)).cast(schema.field(name).type) for name in self._key]
                found = pa.table([*values, pa.array(high[here].view(np.int64))], schema=schema)
                keys.append(found.filter(pa.array(self._hold(rows, truncates))))
        found = pa.concat_tables(keys).combine_chunks()
        ids, _ = dense_ids([storage(found.column(name)) for name in self._key])
        found = found.take(pa.array(np.unique(ids, return_index=True)[1]))
        rows = truncates.take(pa.array(np.repeat(np.arange(len(truncates)), len(found))))
        for name in schema.names:
            rows = _with(rows, name, pa.chunked_array([storage(found.column(name))] * len(truncates)))
        return _with(rows, BAD, pa.nulls(len(rows), rows.schema.field(BAD).type)) if BAD in rows.column_names else rows

    def _hold(self, rows: pa.Table, truncates: pa.Table) -> Flags:
        """Which rows of the table hold at the time of a TRUNCATE."""
        start, end = (storage(rows.column(name)) for name in (self._names.start, self._names.end))
        found = np.zeros(len(rows), np.bool_)
        for time in storage(truncates.column(self._names.start)).unique().cast(start.type):
            is_begun, goes_on = (
                pc.fill_null(flags, True) for flags in (pc.less_equal(start, time), pc.greater(end, time))
            )
            found |= np.asarray(pc.and_(is_begun, goes_on))
        return found

    def versions(self, changes: pa.Table, index: IndexTask) -> Versions:
        """:param changes: n changes, at least one, in any order.
        :raises CorruptIndexError: a run of the index is damaged or missing.
        :raises UnreadableRowsError: a row of the table can't be read.
        """
        records = changes.column(BAD) if BAD in changes.column_names else None
        changes = changes.drop_columns([] if records is None else [BAD]).combine_chunks()
        ids, count = dense_ids([storage(changes.column(name)) for name in self._key])
        first = np.full(count, len(ids))
        np.minimum.at(first, ids, np.arange(len(ids)))
        changed = changes.select([*self._key, HASH]).take(pa.array(first))
        columns = key_columns(self._table, changed.select(self._key))
        keys = pa.table([*columns, changed.column(HASH)], changed.column_names)
        high, low = _hashes(keys), low_hash(columns, index.slice.base)
        current = replace(index.slice, truncates=()).probe(high, low, index.first, index.last)
        assert current.latest is not None
        orders = self._order.of_changes(changes)
        is_before = np.asarray(pc.less_equal(orders, index.slice.floor))
        # at an equal order value, the change may be one that the table has already
        is_late = np.zeros(count, np.bool_)
        is_late[ids[is_before | np.asarray(pc.less_equal(orders, current.latest.take(pa.array(ids))))]] = True
        is_new = np.asarray(pc.equal(current.latest, UNKNOWN)).copy()
        is_new[current.query] = False
        asked = np.flatnonzero(is_late | is_new)
        closed = index.slice.closed_versions(high[asked], low[asked])
        # of a key that was deleted longer ago than tombstones are kept, or by others, only closed versions and
        # remembered deletes are known
        is_late[is_new] = False
        is_late[asked[np.concatenate([closed.query, closed.deletes[0]])]] = True
        is_late[ids[is_before]] = True
        late = np.flatnonzero(is_late)
        closed = self._concerned(closed.of(np.searchsorted(late, asked)), late, ids, orders)

        rows, of_key = self._read(current, np.arange(count))
        older, of_older = self._read(closed, late)
        has_no_row = is_late.copy()
        has_no_row[of_key] = False
        deleted = np.flatnonzero(has_no_row)
        known = pa.array(index.slice.truncates, pa.binary())
        truncates = known.filter(pc.greater_equal(known, pc.min_max(orders)["min"]))
        all_truncates = np.tile(np.arange(len(truncates)), len(late))
        told = [
            self._events_of(pa.concat_tables([rows, older]), np.concatenate([of_key, of_older]), is_late),
            self._deletes(deleted, current.latest.take(pa.array(deleted))),
            self._deletes(late[closed.deletes[0]], closed.deletes[1]),
            self._deletes(np.repeat(late, len(truncates)), truncates.take(pa.array(all_truncates))),
        ]
        events = self._in_sequence(changes, ids, orders, told, is_late)
        hashes = storage(keys.column(HASH)).take(events.column(_KEY))
        events = events.append_column(HASH, hashes)
        events, moves = self._without_idle_removals(self._without_repeats(events))
        events, lost = self._completed(events, [name for name in changes.column_names if not name.startswith(PREFIX)])
        if self._names.last_only:
            events = _last_only(events)
        letters = list[pa.StructArray]()
        if records is not None and len(lost):
            for bad in records.take(pa.array(np.sort(lost))).chunks:
                reasons = pc.binary_join_element_wise(bad.field("reason"), "and the key has no row then", ", ")
                letters.append(as_letters(bad, reasons, BadRecord.ROW_ABSENT))
        current_rows, closed_rows, *deletes = self._read_off(events, np.isin(np.arange(count), of_key))
        gone, idle = (
            keys.take(found.column(_KEY))
            .append_column(tombstones.ORDER_VALUE, found.column(_ORDER))
            .append_column(tombstones.DELETED_AT, deleted_at(order_of(found)))
            for found in deletes
        )
        # a TRUNCATE is known, whatever key it is about
        idle = idle.filter(pc.invert(pc.is_in(idle.column(tombstones.ORDER_VALUE), known)))
        files = sorted({file.path for file in (*current.files, *closed.files)})
        replaced = Entries(
            high=high[late[closed.query]],
            low=closed.low,
            file=np.full(len(closed.query), TOMBSTONE),
            pos=np.zeros(len(closed.query), np.uint32),
            files=(),
            order=closed.orders,
        )
        old_rows = by_file(closed.file, closed.pos, closed.files)
        completed = Completed(0, files, letters)
        return Versions(current_rows, gone, closed_rows, replaced, old_rows, idle, completed, moves)

    @staticmethod
    def _concerned(closed: ClosedRows, late: Ints, ids: Ints, orders: pa.BinaryArray) -> ClosedRows:
        """The closed versions that changes may split: of each key those since its earliest change, and the one before.

        :param late: numbers of the keys of `closed`.
        :param ids: the number of each change's key.
        :param orders: the changes' order values.
        """
        rank = order_rank([pa.concat_arrays([orders, closed.orders])])
        earliest = np.full(int(ids.max()) + 1, len(rank))
        np.minimum.at(earliest, ids, rank[: len(ids)])
        of_key, of_version = late[closed.query], rank[len(ids) :]
        is_before = of_version < earliest[of_key]
        before = np.full(len(earliest), -1)
        np.maximum.at(before, of_key[is_before], of_version[is_before])
        return closed.take(np.flatnonzero(~is_before | (of_version == before[of_key])))

    def write(self, versions: Versions, data: PartitionedWriter, files: DataFiles, index: IndexTask) -> IndexResult:
        """Write the versions. The index gets closed ones under hashes of their own.

        :param files: those of `data`.
        """
        schema, gone, idle = self._table.arrow_schema, versions.gone, versions.idle
        current, closed = (
            as_table_types(rows.select(schema.names), schema) for rows in (versions.current, versions.closed)
        )
        live, at = data.write(current), data.write(closed)
        seconds = [tombstones.seconds_of(rows.column(tombstones.DELETED_AT)) for rows in (gone, idle)]
        orders = [storage(rows.column(tombstones.ORDER_VALUE)) for rows in (gone, idle)]
        entries = Entries(
            high=_hashes(versions.closed),
            low=low_hashes(self._table, index.slice, self._key, closed),
            file=at.file.astype(np.uint32),
            pos=at.pos.astype(np.uint32),
            files=(),
            order=self._order.of_rows(closed),
        )
        remembered = Entries(
            high=_hashes(idle),
            low=of_deletes(low_hash(key_columns(self._table, idle.select(self._key)), index.slice.base)),
            file=np.full(len(idle), DELETED_BEFORE),
            pos=seconds[1],
            files=(),
            order=orders[1],
        )
        return resolve(
            self._table,
            index,
            concat(gone.select(self._key), pa.table(key_columns(self._table, current.select(self._key)), self._key)),
            np.concatenate([_hashes(gone), _hashes(versions.current)]),
            np.concatenate([np.full(len(gone), NOWHERE), live.file]),
            np.concatenate([np.zeros(len(gone), np.int64), live.pos]),
            files,
            pa.concat_arrays([orders[0], self._order.of_rows(current)]),
            np.concatenate([seconds[0], np.zeros(len(current), np.uint32)]),
            ClosedVersions(Entries.joined([entries, remembered], ()), versions.replaced, versions.old_rows),
        )

    def _read(self, located: Located, keys: Ints) -> tuple[pa.Table, Ints]:
        """The rows that were located, and the number of the key of each.

        :param keys: the numbers of the keys that were probed.
        """
        schema = self._table.arrow_schema
        parts, of_key = [schema.empty_table()], [np.empty(0, np.int64)]
        for here, rows in self._rows_at(located, schema.names):
            parts.append(rows.select(schema.names))
            of_key.append(keys[located.query[here]])
        return pa.concat_tables(parts), np.concatenate(of_key)

    def _rows_at(self, located: Located, columns: Sequence[str]) -> Iterator[tuple[Ints, pa.Table]]:
        """The rows that were located, in parts of a row group: their numbers, and the rows."""
        for here, rows in self._table.rows_in_files(located.files, located.file, located.pos, columns):
            if isinstance(rows, UnreadableRowsError):
                raise rows
            yield here, rows

    def _events_of(self, versions: pa.Table, keys: Ints, late: Flags) -> "_Told":
        """What the table's versions tell of earlier changes: a version was set when it begins; it was set once more, to
        what it is now, by the last change that was written into it; and it was removed when it ends, unless another one
        begins then. Of keys without late changes only the first counts.

        :param keys: the number of the key of each version.
        :param late: for each key, whether it has late changes.
        """
        start, end = (storage(versions.column(name)) for name in (self._names.start, self._names.end))
        last = self._order.of_rows(versions)
        begins, ends = encoded(start), encoded(end)
        by_end = np.where(np.asarray(end.is_valid()), order_rank([ends]), len(ends))
        in_order = np.lexsort((by_end, order_rank([last]), order_rank([begins]), keys))
        number = np.empty(len(versions), np.int64)
        number[in_order] = np.arange(len(versions))
        same_key = keys[in_order][1:] == keys[in_order][:-1]
        goes_on = np.zeros(len(versions), np.bool_)
        goes_on[in_order[:-1]] = same_key & np.asarray(
            pc.equal(ends.take(pa.array(in_order[:-1])), begins.take(pa.array(in_order[1:])))
        )
        at = storage(versions.column(self._order.columns[0])).cast(start.type)
        # the order value of a time alone is below those that begin with it: take the whole one if it is the row's
        is_late = late[keys]
        begins = pc.if_else(pc.or_(pc.fill_null(pc.equal(at, start), False), pa.array(~is_late)), last, begins)
        # a version that was split off has the order value of a row that was written after its end
        is_before_end = pc.fill_null(pc.less_equal(at, end), True)
        again = np.flatnonzero(is_late & np.asarray(pc.and_(pc.greater(last, begins), is_before_end)))
        removed = np.flatnonzero(is_late & np.asarray(end.is_valid()) & ~goes_on)
        parts = ((np.arange(len(keys)), begins, start), (again, last, at), (removed, ends, end))
        rows = np.concatenate([chosen for chosen, _, _ in parts])
        return _Told(
            _with(versions.take(pa.array(rows)), self._names.start, _joined(parts, 2)),
            keys[rows],
            np.repeat([RowKind.UPDATE_AFTER, RowKind.UPDATE_AFTER, RowKind.DELETE], [len(part[0]) for part in parts]),
            _joined(parts, 1),
            number[rows] * 3 + np.repeat([0, 1, 2], [len(part[0]) for part in parts]),
        )

    def _deletes(self, keys: Ints, latest: pa.BinaryArray) -> "_Told":
        """The deletes of keys that have no row.

        :param latest: their order values, as the index has them.
        """
        schema = self._table.arrow_schema
        rows = pa.table([pa.nulls(len(keys), field.type) for field in schema], schema=_nullable(schema))
        times = first_of(latest, schema.field(self._names.start).type)
        return _Told(
            _with(rows, self._names.start, times),
            keys,
            np.full(len(keys), RowKind.DELETE),
            latest,
            np.full(len(keys), _REMEMBERED),
        )

    def _in_sequence(
        self, changes: pa.Table, ids: Ints, orders: pa.BinaryArray, told: Sequence["_Told"], late: Flags
    ) -> pa.Table:
        """All events of all keys, by key and in their order.

        :return: the table's columns, of which `start` has the time of the event, KIND, the order columns, MOVED and
            UNAVAILABLE of changes, `_KEY`, `_CHANGE` and `_ORDER`.
        """
        schema, order_names = self._table.arrow_schema, order_of(changes).column_names
        values = as_table_types(changes.select(schema.names), _nullable(schema))
        for name in (KIND, *order_names, MOVED, UNAVAILABLE):
            if name in changes.column_names:
                values = values.append_column(name, changes.column(name))
        before = pa.concat_tables([part.rows.cast(_nullable(schema)) for part in told])
        kinds = np.concatenate([part.kinds for part in told])
        before = self._with_columns_of_changes(before, kinds, values.schema)
        together = pa.concat_tables([values, before.select(values.column_names)])

        changed = len(changes)
        keys = np.concatenate([ids, *(part.keys for part in told)])
        tie = np.concatenate([np.zeros(changed, np.int64), *(part.tie for part in told)])
        is_change = np.arange(len(keys)) < changed
        encoded_orders = pa.concat_arrays([orders, *(part.orders for part in told)])
        rank = order_rank([encoded_orders])
        rank = np.where(is_change | late[keys], rank, -1)  # else it comes before all changes
        # no event of a key's versions comes before an earlier one
        versions = np.flatnonzero(~is_change & (tie != _REMEMBERED))
        in_turn = versions[np.lexsort((tie[versions], keys[versions]))]
        span = len(keys) + 2
        raised = np.maximum.accumulate(rank[in_turn] + keys[in_turn] * span) - keys[in_turn] * span
        rank[in_turn] = raised
        places = [
            storage(together.column(name)).cast(pa.int64()).fill_null(-1).to_numpy()
            for name in order_names[len(self._order.columns) :]
        ]
        kind = (kinds_of(together) + 1) // 2  # as in `collapse.ranked`
        sequence = np.lexsort((kind, *reversed(places), tie, is_change, rank, keys))
        number = np.where(is_change, np.arange(len(keys)), np.where(tie == _REMEMBERED, -2, -1))
        together = together.append_column(_KEY, pa.array(keys)).append_column(_CHANGE, pa.array(number))
        return together.append_column(_ORDER, encoded_orders).take(pa.array(sequence))

    def _with_columns_of_changes(self, rows: pa.Table, kinds: npt.NDArray[np.int64], schema: pa.Schema) -> pa.Table:
        """Rows of the table as changelog rows of a schema. They have no place in the source."""
        order = self._order
        for number, name in enumerate(name for name in schema.names if name.startswith(ORDER)):
            dtype, column = schema.field(name).type, pa.nulls(len(rows), schema.field(name).type)
            if number < len(order.columns):
                values = storage(rows.column(order.columns[number]))
                is_descending = order.columns[number] in order.descending
                column = encoded(values, descending=True) if is_descending else values.cast(dtype)
            rows = rows.append_column(name, column)
        rows = rows.append_column(KIND, pa.array(kinds.astype(np.int8)))
        for name in (MOVED, UNAVAILABLE):
            if name in schema.names:
                rows = rows.append_column(name, pa.nulls(len(rows), schema.field(name).type))
        return rows

    def _without_repeats(self, events: pa.Table) -> pa.Table:
        """Leave changes out that the table has already: of the same order value and content."""
        names = [name for name in self._table.arrow_schema.names if name not in self._names.names]
        key, number = (storage(events.column(name)).to_numpy() for name in (_KEY, _CHANGE))
        order, sets = storage(events.column(_ORDER)), sets_row(kinds_of(events))
        group, count = dense_ids([pa.array(key), order])
        has_row = np.zeros(count, np.bool_)
        has_row[group[(number < 0) & sets]] = True
        asked = np.flatnonzero(has_row[group] & sets)
        content = pa.array(row_hash([storage(events.column(name).take(pa.array(asked))) for name in names]))
        same, count = dense_ids([pa.array(group[asked]), content])
        is_known = np.zeros(count, np.bool_)
        is_known[same[number[asked] < 0]] = True
        repeats = asked[is_known[same] & (number[asked] >= 0)]
        if not len(repeats):
            return events
        stays = np.ones(len(events), np.bool_)
        stays[repeats] = False
        return events.filter(pa.array(stays))

    def _without_idle_removals(self, events: pa.Table) -> tuple[pa.Table, Settled]:
        """Leave out what removes nothing: removals of rows that went to another key, where the key has another row
        (`deltawriters.moves`), and a -U of a row that a later change sets again.
        """
        kinds, key = kinds_of(events), storage(events.column(_KEY)).to_numpy()
        number = storage(events.column(_CHANGE)).to_numpy()
        marks = storage(events.column(MOVED)) if MOVED in events.column_names else pa.nulls(len(events), pa.string())
        is_moved = np.asarray(marks.is_valid())
        order = storage(events.column(_ORDER))
        sets = sets_row(kinds)
        before_set = np.append(sets[1:], False) & _goes_on(key)
        is_equal = np.asarray(pc.equal(order[:-1], order[1:])) & (key[1:] == key[:-1])
        # its order value is that of the change, or that of the row which it is about
        tells = np.append(is_equal, False) | np.concatenate([[False], is_equal & sets[:-1]])
        left_out = (kinds == RowKind.UPDATE_BEFORE) & ~is_moved & before_set & tells
        others = np.zeros(len(events), np.bool_)
        if is_moved.any():
            before = _last_before(sets, key)
            is_certain = ~np.asarray(pc.fill_null(pc.starts_with(marks, MOVED_SEPARATOR), False))
            asking = np.flatnonzero(is_moved & (before >= 0))
            asking = asking[(number[before[asking]] >= 0) | is_certain[asking]]
            others[asking] = are_about_others(events.take(pa.array(asking)), events.take(pa.array(before[asking])))
        stays = ~(left_out | others)
        events = events if stays.all() else events.filter(pa.array(stays))
        return events, Settled(int(np.count_nonzero(others)))

    def _completed(self, events: pa.Table, names: Sequence[str]) -> tuple[pa.Table, Ints]:
        """Give partial rows the values of the row before them.

        :param names: the columns that the bits of partial rows count.
        :return: the events, and the numbers of changes that have no such row, and are left out.
        """
        nothing = np.empty(0, np.int64)
        if UNAVAILABLE not in events.column_names:
            return events, nothing
        bits = storage(events.column(UNAVAILABLE))
        partial = np.flatnonzero(np.asarray(pc.fill_null(pc.greater(pc.binary_length(bits), 0), False)))
        if not len(partial):
            return events, nothing
        key, kinds, places = storage(events.column(_KEY)).to_numpy(), kinds_of(events), np.arange(len(events))
        sets, needs_row = sets_row(kinds), np.zeros(len(events), np.bool_)
        needs_row[partial] = kinds[partial] == RowKind.UPDATE_AFTER
        # a stretch is a row and what is written into it, up to its removal
        begins = np.concatenate([[True], (key[1:] != key[:-1]) | ~sets[:-1]])
        begin = np.maximum.accumulate(np.where(begins, places, 0))
        whole = np.maximum.accumulate(np.where(sets & ~needs_row, places, -1))
        lost = needs_row & (whole < begin)
        lacking = unavailable_columns(bits.take(pa.array(partial)), len(names))
        for number in np.flatnonzero(lacking.any(axis=0)).tolist():
            has = ~lost
            has[partial[lacking[:, number]]] = False
            newest = np.maximum.accumulate(np.where(has, places, -1))
            column = events.column(names[number]).take(pa.array(newest, mask=newest < begin))
            events = _with(events, names[number], column)
        numbers = storage(events.column(_CHANGE)).to_numpy()
        return events.filter(pa.array(~lost)), numbers[lost]

    def _read_off(self, events: pa.Table, had_row: Flags) -> tuple[pa.Table, pa.Table, pa.Table, pa.Table]:
        """The current rows and the closed versions of a sequence of events (`Versions`), and the events that are `gone`
        and `idle`.

        :param had_row: whether each key has a current row so far.
        """
        names, schema = self._names, self._table.arrow_schema
        key, number = (storage(events.column(name)).to_numpy() for name in (_KEY, _CHANGE))
        sets, goes_on = sets_row(kinds_of(events)), _goes_on(key)
        is_same = np.zeros(len(events), np.bool_)  # as the event before
        content = row_hash([storage(events.column(name)) for name in (*self._key, *self._tracked)])
        is_same[1:] = (content[1:] == content[:-1]) & sets[1:] & sets[:-1] & goes_on[:-1]
        first = np.flatnonzero(sets & ~is_same)
        last = np.flatnonzero(sets & ~np.append(is_same[1:], False))
        ends = goes_on[last]
        times = storage(events.column(names.start))
        versions = events.take(pa.array(last))
        versions = _with(versions, names.start, times.take(pa.array(first)))
        versions = _with(versions, names.end, times.take(pa.array(np.where(ends, last + 1, 0), mask=~ends)))
        versions = _with(versions, names.current, pa.array(~ends))
        versions = versions.select([*schema.names, HASH])
        # a delete that the table tells is in the index
        gone = ~sets & ~goes_on & ((number >= 0) | had_row[key])
        follows_row = np.concatenate([[False], (sets & goes_on)[:-1]])
        idle = ~sets & ~follows_row & (number != -2)
        flags = (pa.array(flags) for flags in (~ends, ends, gone, idle))
        of = (versions, versions, events, events)
        return tuple(rows.filter(chosen) for rows, chosen in zip(of, flags, strict=True))


@dataclass(frozen=True)
class _Told:
    """n events that the table tells of.

    :param rows: the table's columns.
    :param keys: numbers of the keys.
    :param orders: encoded order values, perhaps only of the first column.
    :param tie: puts those of a key's versions in sequence. `_REMEMBERED` of deletes that are of no version: one that
        came after a version of the same order value has closed it.
    """

    rows: pa.Table
    keys: Ints
    kinds: npt.NDArray[np.int64]
    orders: pa.BinaryArray
    tie: Ints


def _hashes(rows: pa.Table) -> npt.NDArray[np.uint64]:
    hashes: npt.NDArray[np.uint64] = storage(rows.column(HASH)).to_numpy().view(np.uint64)
    return hashes


def _joined(parts: Sequence[tuple[Ints, pa.Array, pa.Array]], number: int) -> pa.Array:
    """The chosen values of each part, one part after the other."""
    return pa.concat_arrays([storage(part[number]).take(pa.array(part[0])) for part in parts])


def _with(rows: pa.Table, name: str, values: pa.Array | pa.ChunkedArray) -> pa.Table:
    """The rows with other values in a column."""
    field = rows.schema.field(name)
    return rows.set_column(rows.column_names.index(name), field, values.cast(field.type))


def _nullable(schema: pa.Schema) -> pa.Schema:
    """Of a delete, only the key is known."""
    return pa.schema([field.with_nullable(True) for field in schema])


def _last_only(events: pa.Table) -> pa.Table:
    """Without the changes of each key but the last one."""
    key, number = (storage(events.column(name)).to_numpy() for name in (_KEY, _CHANGE))
    is_change = number >= 0
    last = np.full(int(key.max(initial=-1)) + 1, -1)
    last[key[is_change]] = np.flatnonzero(is_change)  # numpy keeps the last of repeated assignments to one index
    return events.filter(pa.array(~is_change | (last[key] == np.arange(len(key)))))


def _goes_on(key: Ints) -> Flags:
    """Whether another event of its key comes after each event."""
    return np.concatenate([key[1:] == key[:-1], [False]])


def _last_before(flags: Flags, key: Ints) -> Ints:
    """For each event, the number of the last flagged one before it of the same key; -1 if there is none."""
    numbers = np.arange(len(flags))
    newest = np.concatenate([[-1], np.maximum.accumulate(np.where(flags, numbers, -1))[:-1]])
    begin = np.maximum.accumulate(np.where(np.concatenate([[True], key[1:] != key[:-1]]), numbers, 0))
    return np.where(newest >= begin, newest, -1)
