"""Partial rows: changes that lack the values of some columns (`changelog.rows`).

Of a key's changes in a commit, the last whole one decides what partial rows build on: they are applied to its row, in
their order, if they come after it. At an equal order value they come after it too if it sets a row, since nothing tells
the order, and this loses least. If a key has no whole change in the commit, its partial rows are applied to the
row that the table has. If there is no row to apply them to, their kinds say what becomes of them.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from changelog.rows import (
    BAD,
    KEPT,
    KIND,
    PREFIX,
    UNAVAILABLE,
    BadRecord,
    RowKind,
    SoftDelete,
    sets_row,
    unavailable_columns,
)
from deltawriters.arrow_types import storage
from deltawriters.collapse import Ints, grouped
from deltawriters.keyindex import IndexedFile
from deltawriters.resolve import NOWHERE, IndexTask, rows_of
from deltawriters.rowhash import row_hash
from deltawriters.table import UnreadableRowsError
from deltawriters.whole_changes import LastChanges, WholeChanges, kinds_of

_RECORD = f"{PREFIX}record"


@dataclass(frozen=True)
class Partials:
    """The partial rows of n keys.

    :param rows: the rows, ordered by key, and those of a key as they are to be applied.
    :param starts: number of the first row of each key.
    :param newest: for each key and column, number of the last row that has the column's value; -1 if none has it.
    :param columns: the columns, in the order of `newest`.
    :param records: the records (`_rowdelta_bad`), by their numbers in a column of `rows`. They stay in their chunks:
        all of them may have more bytes than one array can have.
    :param soft: the columns that removals set. What is deleted stays so since the first of several removals.
    """

    rows: pa.Table
    starts: Ints
    newest: npt.NDArray[np.int32]
    columns: tuple[str, ...]
    records: pa.ChunkedArray
    soft: SoftDelete | None = None

    @staticmethod
    def without_records(batches: Sequence[pa.RecordBatch]) -> tuple[pa.Table, pa.ChunkedArray]:
        """Partial rows with the numbers of their records, and the records."""
        rows = pa.Table.from_batches(batches)
        numbers = pa.array(np.arange(len(rows)))
        return rows.drop_columns([BAD]).append_column(_RECORD, numbers).combine_chunks(), rows.column(BAD)

    @classmethod
    def of(
        cls, rows: pa.Table, records: pa.ChunkedArray, keys: Ints, rank: Ints, soft: SoftDelete | None
    ) -> "Partials":
        """:param rows: some of the rows of `without_records`, whose records these are.
        :param keys: a number for each row's key.
        :param rank: orders the rows.
        """
        columns = tuple(name for name in rows.column_names if not name.startswith(PREFIX))
        order = np.lexsort((rank, keys))
        same = (keys[order][1:] == keys[order][:-1]) & (rank[order][1:] == rank[order][:-1])
        if same.any():  # the content decides, as between whole rows
            content = row_hash([storage(rows.column(name)) for name in (*columns, UNAVAILABLE)])
            order = np.lexsort((content, rank, keys))
        rows, keys = rows.take(pa.array(order)), keys[order]
        starts = np.flatnonzero(np.concatenate([np.ones(min(len(keys), 1), np.bool_), keys[1:] != keys[:-1]]))
        lacking = unavailable_columns(storage(rows.column(UNAVAILABLE)), len(columns))
        if soft is not None and soft.at is not None:
            removes = ~sets_row(kinds_of(rows))
            again = removes[1:] & removes[:-1] & (keys[1:] == keys[:-1])
            lacking[1:, columns.index(soft.at)] |= again
        newest = np.where(lacking, np.int32(-1), np.arange(len(rows), dtype=np.int32)[:, np.newaxis])
        if len(starts) < len(rows):
            newest = np.maximum.reduceat(newest, starts, axis=0)
        return cls(rows, starts, newest, columns, records, soft)

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def last(self) -> Ints:
        """Number of the last row of each key."""
        return np.append(self.starts[1:], len(self.rows)) - 1

    def lacked(self, keys: Ints) -> list[str]:
        """The columns that some of these keys lack."""
        lacks = np.any(self.newest[keys] < 0, axis=0)
        if self.soft is not None and self._may_be_deleted(keys).any():
            lacks |= np.isin(self.columns, self.soft.columns)
        return [name for name, flag in zip(self.columns, lacks.tolist(), strict=True) if flag]

    def _may_be_deleted(self, keys: Ints) -> npt.NDArray[np.bool_]:
        """Whether the rows that these keys have may be deleted already, and stay so."""
        if self.soft is None or self.soft.at is None:
            return np.zeros(len(keys), np.bool_)
        starts = self.starts[keys]
        is_first: npt.NDArray[np.bool_] = self.newest[keys, self.columns.index(self.soft.at)] == starts
        return is_first & ~sets_row(self.kinds[starts])

    @property
    def _whole_schema(self) -> pa.Schema:
        return pa.schema([field for field in self.rows.schema if field.name not in (_RECORD, UNAVAILABLE)])

    @property
    def kinds(self) -> npt.NDArray[np.int8]:
        """The kind of each row."""
        return kinds_of(self.rows)

    def only_updates(self, keys: Ints) -> npt.NDArray[np.bool_]:
        """Whether all rows of each of these keys are +U, so that they have records."""
        flags: npt.NDArray[np.bool_] = np.logical_and.reduceat(self.kinds == RowKind.UPDATE_AFTER, self.starts)
        return flags[keys]

    def completed(self, keys: Ints, base: pa.Table | None, since: Ints | None = None) -> pa.Table:
        """Whole changes of these keys, in the place of their last partial rows.

        :param base: the keys' present rows, with at least the columns `lacked`. None: the keys have no rows, and what
            they lack is NULL.
        :param since: for each of the keys the number of its first row that counts.
        """
        last, columns = pa.array(self.last[keys]), dict[str, pa.Array]()
        schema = self._whole_schema
        for name in schema.names:
            values = self.rows.column(name)
            if name == KIND:
                columns[name] = pa.repeat(pa.scalar(int(RowKind.UPDATE_AFTER), pa.int8()), len(keys))
                continue
            if name not in self.columns:
                columns[name] = storage(values.take(last))
                continue
            newest = self.newest[keys, self.columns.index(name)]
            lacks = newest < (0 if since is None else since)
            if base is not None and self.soft is not None and name == self.soft.at:
                deleted = self._may_be_deleted(keys)
                if deleted.any():
                    is_deleted = pc.and_(base.column(self.soft.column), base.column(name).is_valid())
                    lacks |= deleted & np.asarray(pc.fill_null(is_deleted, False))
            column = storage(values.take(pa.array(newest, mask=lacks)))
            if base is not None and lacks.any():
                column = pc.if_else(pa.array(lacks), storage(base.column(name)).cast(column.type), column)
            columns[name] = column
        return pa.table(columns, schema)

    def without_row(self, keys: Ints, why: str) -> tuple[list[pa.Table], list[pa.StructArray]]:
        """What becomes of keys that have no row. The first +I sets it. A +U before it is a letter, and a removal before
        it only says that the key has no row, if no +I follows.

        :param why: see `letters`.
        :return: whole changes, and letters.
        """
        kinds, numbers, nowhere = self.kinds, np.arange(len(self.rows)), len(self.rows)
        first_insert = np.minimum.reduceat(np.where(kinds == RowKind.INSERT, numbers, nowhere), self.starts)[keys]
        last_removal = np.maximum.reduceat(np.where(sets_row(kinds), NOWHERE, numbers), self.starts)[keys]
        is_set = first_insert < nowhere
        changes = [self.completed(keys[is_set], None, first_insert[is_set])]
        removals = last_removal[~is_set & (last_removal != NOWHERE)]
        changes.append(self.rows.select(self._whole_schema.names).take(pa.array(removals)))
        return changes, self.letters(keys, why, until=first_insert)

    def letters(
        self, keys: Ints, why: str, error_class: str = BadRecord.ROW_ABSENT, until: Ints | None = None
    ) -> list[pa.StructArray]:
        """The records of all +U of these keys, as `_rowdelta_bad` has them.

        :param why: why the rows can't be completed; it ends their reasons.
        :param until: for each of the keys, only rows with smaller numbers become letters.
        """
        ends = np.zeros(len(self.starts), np.int64)
        ends[keys] = len(self.rows) if until is None else until
        sizes = np.diff(np.append(self.starts, len(self.rows)))
        chosen = (np.arange(len(self.rows)) < np.repeat(ends, sizes)) & (self.kinds == RowKind.UPDATE_AFTER)
        numbers = np.sort(storage(self.rows.column(_RECORD)).to_numpy()[chosen])
        ends = np.cumsum([len(chunk) for chunk in self.records.chunks])
        chunks = np.searchsorted(ends, numbers, side="right")
        letters = []
        for number, here in grouped(chunks):
            chunk = self.records.chunk(number)
            places = numbers[here] - (ends[number] - len(chunk))
            bad = chunk.take(pa.array(places))
            reasons = pc.binary_join_element_wise(bad.field("reason"), why, ", ")
            letters.append(as_letters(bad, reasons, error_class))
        return letters


def as_letters(bad: pa.StructArray, reasons: pa.Array, error_class: str) -> pa.StructArray:
    """Records of rows that could not be applied, with the reasons. Those of class `KEPT` stay of this class."""
    fields = {field.name: bad.field(number) for number, field in enumerate(bad.type)}
    fields["reason"] = reasons
    fields["error_class"] = pc.if_else(pc.equal(fields["error_class"], KEPT), KEPT, error_class)
    return pa.StructArray.from_arrays([fields[part.name] for part in bad.type], fields=list(bad.type))


@dataclass(frozen=True)
class Completed:
    """How a task's partial rows were completed.

    :param rows: number of keys that were completed from the table's rows.
    :param files: data files of earlier snapshots that had these rows.
    :param letters: records that nothing could complete, as `_rowdelta_bad` has them. Those of class `KEPT` are dead
        letters already.
    :param absent: number of keys that were looked for, and have no row in the table.
    """

    rows: int = 0
    files: Sequence[str] = ()
    letters: Sequence[pa.StructArray] = ()
    absent: int = 0

    def and_more(self, other: "Completed") -> "Completed":
        letters, absent = [*self.letters, *other.letters], self.absent + other.absent
        return Completed(self.rows + other.rows, [*self.files, *other.files], letters, absent)

    def without_absent(self, before: Mapping[int, int]) -> tuple["Completed", int]:
        """Leave out updates of absent rows.

        :param before: see `DeltaOptions.absent_before`.
        :return: what is left, and how many were left out.
        """
        letters = list[pa.StructArray]()
        for bad in self.letters:
            is_left = pc.equal(bad.field("error_class"), BadRecord.ROW_ABSENT)
            places = [
                pc.and_(pc.equal(bad.field("partition"), partition), pc.less(bad.field("offset"), offset))
                for partition, offset in before.items()
            ]
            is_before = functools.reduce(pc.or_, places, pa.repeat(False, len(bad)))
            letters.append(bad.filter(pc.fill_null(pc.invert(pc.and_(is_left, is_before)), True)))
        left_out = sum(map(len, self.letters)) - sum(map(len, letters))
        return replace(self, letters=letters), left_out


def complete(kept: Sequence[pa.RecordBatch], whole: WholeChanges, index: IndexTask) -> Completed:
    """Make whole changes of partial rows.

    Each takes the place of all changes of its key that came before it in the commit: these are dropped.

    :param kept: the partial rows.
    :param whole: gets the whole changes.
    :param index: finds the table's rows.
    :raises CorruptIndexError: a run of the index is damaged or missing.
    :raises UnreadableRowsError: see `_complete_from`.
    """
    partials, numbers, found = _standing(kept, whole)
    base, m = found.base[numbers], len(whole.map)
    in_buffer, in_table = np.flatnonzero(base >= m), np.flatnonzero(base == NOWHERE)
    in_map = np.flatnonzero((base >= 0) & (base < m))
    in_file = in_map[whole.map.file[base[in_map]] != NOWHERE]
    if len(in_buffer):
        in_buffer = in_buffer[sets_row(found.kinds[base[in_buffer]])]
    letters = list[pa.StructArray]()

    places = whole.map.file[base[in_file]], whole.map.pos[base[in_file]]
    buffered = _dropped(found, whole, numbers[in_buffer], numbers[in_file])
    whole.add(*partials.completed(in_buffer, buffered).to_batches())
    if len(in_file):
        letters += _complete_from(partials, base, whole, in_file, whole.readable_files(), *places)

    def set_or_refuse(absent: Ints, why: str) -> None:
        if len(absent):
            changes, refused = partials.without_row(absent, why)
            whole.add(*(batch for table in changes for batch in table.to_batches()))
            letters.extend(refused)

    gone = np.setdiff1d(np.arange(len(partials)), np.concatenate([in_buffer, in_table, in_file]))
    set_or_refuse(gone, "and the row was deleted before")
    if not len(in_table):
        return Completed(letters=letters)

    located, counts = rows_of(whole.table, index, whole.options.key, partials.rows.take(partials.last[in_table]))
    absent = in_table[counts == 0]
    set_or_refuse(absent, "and the table has no row with this key")
    several = (counts > 1) & partials.only_updates(in_table)
    if several.any():  # which only another writer can have written
        why = "and the table has several rows with this key"
        letters += partials.letters(in_table[several], why, BadRecord.UNAVAILABLE_VALUE)
    # whatever has no record builds on the first row that was found
    query, first = np.unique(located.query, return_index=True)
    query, first = query[~several[query]], first[~several[query]]
    chosen, file, pos = in_table[query], located.file[first], located.pos[first]
    letters += _complete_from(partials, base, whole, chosen, located.files, file, pos)
    files = [located.files[number].path for number in np.unique(file).tolist()]
    return Completed(len(chosen), files, letters, len(absent))


def _standing(kept: Sequence[pa.RecordBatch], whole: WholeChanges) -> tuple[Partials, Ints, LastChanges]:
    """Find out what partial rows build on. What a TRUNCATE made void is left out.

    :return: three results:
        - the partial rows that no whole change of their key comes after, by key;
        - for each of these keys, its number in `LastChanges`;
        - the last whole changes of all keys.
    """
    partial, records = Partials.without_records(kept)
    partial = whole.since_truncate(partial)
    found = whole.last_changes(partial, kinds_of(partial))
    stays = np.flatnonzero((found.base[found.of] == NOWHERE) | found.is_after)
    of_partial = found.of[stays]
    rows, soft = partial.take(pa.array(stays)), whole.options.soft_delete
    partials = Partials.of(rows, records, of_partial, found.rank[stays], soft)
    return partials, np.unique(of_partial), found


def _dropped(found: LastChanges, whole: WholeChanges, in_buffer: Ints, in_file: Ints) -> pa.Table:
    """Drop whole changes of some keys of partial rows: all from the buffer, and from the map those of the keys
    `in_buffer`. The rows of the others stay until they are read again.

    :param in_buffer: numbers of keys whose last whole change is in the buffer.
    :param in_file: numbers of other keys.
    :return: the last whole changes of the keys `in_buffer`.
    """
    m = len(whole.map)
    is_dropped = np.zeros(len(found.base), np.bool_)
    is_dropped[in_buffer] = True
    whole.forget(np.flatnonzero(is_dropped[:m]))
    is_dropped[in_file] = True
    changes = whole.keep_buffered(~is_dropped[found.ids[m:]])
    return changes.take(pa.array(found.base[in_buffer] - m))


def _complete_from(
    partials: Partials,
    base: Ints,
    whole: WholeChanges,
    keys: Ints,
    files: Sequence[IndexedFile],
    file: Ints,
    pos: Ints,
) -> list[pa.StructArray]:
    """Complete partial rows from rows of data files. Rows of the commit itself are dropped as soon as others take
    their place.

    :param base: the last whole change of each key of `partials`, or `NOWHERE`.
    :param keys: numbers of n keys.
    :param file: for each of the keys the number of the data file in `files`, and `pos` the position in it.
    :return: the records that can't be completed since a file can't be read.
    :raises UnreadableRowsError: the same of rows that have no records.
    """
    columns, letters = partials.lacked(keys), list[pa.StructArray]()

    def add_completed(some: Ints, rows: pa.Table) -> None:
        replaced = base[some]
        if (replaced != NOWHERE).any():
            whole.forget(replaced[replaced != NOWHERE])
        whole.add(*partials.completed(some, rows).to_batches())

    if not columns:
        add_completed(keys, pa.table({}))
        return letters
    for here, rows in whole.table.rows_in_files(files, file, pos, columns):
        if isinstance(rows, UnreadableRowsError):
            if not partials.only_updates(keys[here]).all():
                raise rows
            # a file's path has values, those of its partition
            why = str(rows) if whole.options.show_values else "the file of the table's row can't be read"
            letters += partials.letters(keys[here], f"and {why}", BadRecord.UNAVAILABLE_VALUE)
        else:
            add_completed(keys[here], rows)
    return letters


def divided(changes: pa.RecordBatch, name: str) -> tuple[pa.RecordBatch, list[pa.RecordBatch]]:
    """The changes that have no value in a column, and the others, if there are any. In the column
    `_rowdelta_unavailable`, no bytes are no value.
    """
    values = changes.column(name)
    flags = pc.and_(values.is_valid(), pc.not_equal(values, b"")) if name == UNAVAILABLE else values.is_valid()
    flags = pc.fill_null(flags, False)
    if not pc.any(flags).as_py():
        return changes, []
    return changes.filter(pc.invert(flags)), [changes.filter(flags)]
