"""Partial rows: updates without the values of columns that they left unchanged (`changelog.rows`).

Of a key's changes in a commit, the last whole one decides what partial rows build on: they are applied to its row, in
their order, if they come after it. At an equal order value they come after it too if it sets a row, since nothing tells
the order, and this loses least. If a key has no whole change in the commit, its partial rows are applied to the
row that the table has.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from changelog.rows import BAD, KEPT, PREFIX, UNAVAILABLE, BadRecord, unavailable_columns
from deltawriters.arrow_types import storage
from deltawriters.collapse import Ints, grouped
from deltawriters.rowhash import row_hash

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
    """

    rows: pa.Table
    starts: Ints
    newest: npt.NDArray[np.int32]
    columns: tuple[str, ...]
    records: pa.ChunkedArray

    @staticmethod
    def without_records(batches: Sequence[pa.RecordBatch]) -> tuple[pa.Table, pa.ChunkedArray]:
        """Partial rows with the numbers of their records, and the records."""
        rows = pa.Table.from_batches(batches)
        numbers = pa.array(np.arange(len(rows)))
        return rows.drop_columns([BAD]).append_column(_RECORD, numbers).combine_chunks(), rows.column(BAD)

    @classmethod
    def of(cls, rows: pa.Table, records: pa.ChunkedArray, keys: Ints, rank: Ints) -> "Partials":
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
        newest = np.where(lacking, np.int32(-1), np.arange(len(rows), dtype=np.int32)[:, np.newaxis])
        if len(starts) < len(rows):
            newest = np.maximum.reduceat(newest, starts, axis=0)
        return cls(rows, starts, newest, columns, records)

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def last(self) -> Ints:
        """Number of the last row of each key."""
        return np.append(self.starts[1:], len(self.rows)) - 1

    def lacked(self, keys: Ints) -> list[str]:
        """The columns that some of these keys lack."""
        lacks = np.any(self.newest[keys] < 0, axis=0).tolist()
        return [name for name, flag in zip(self.columns, lacks, strict=True) if flag]

    def completed(self, keys: Ints, base: pa.Table) -> pa.Table:
        """Whole changes of these keys, in the place of their last partial rows.

        :param base: the keys' present rows, with at least the columns `lacked`.
        """
        last, columns = pa.array(self.last[keys]), dict[str, pa.Array]()
        schema = pa.schema([field for field in self.rows.schema if field.name not in (_RECORD, UNAVAILABLE)])
        for name in schema.names:
            values = self.rows.column(name)
            if name not in self.columns:
                columns[name] = storage(values.take(last))
                continue
            newest = self.newest[keys, self.columns.index(name)]
            lacks = newest < 0
            column = storage(values.take(pa.array(newest, mask=lacks)))
            if lacks.any():
                column = pc.if_else(pa.array(lacks), storage(base.column(name)).cast(column.type), column)
            columns[name] = column
        return pa.table(columns, schema)

    def letters(self, keys: Ints, why: str, error_class: str = BadRecord.ROW_ABSENT) -> list[pa.StructArray]:
        """The records of all partial rows of these keys, as `_rowdelta_bad` has them.

        :param why: why the rows can't be completed; it ends their reasons.
        """
        chosen = np.zeros(len(self.starts), np.bool_)
        chosen[keys] = True
        sizes = np.diff(np.append(self.starts, len(self.rows)))
        numbers = np.sort(storage(self.rows.column(_RECORD)).to_numpy()[np.repeat(chosen, sizes)])
        ends = np.cumsum([len(chunk) for chunk in self.records.chunks])
        chunks = np.searchsorted(ends, numbers, side="right")
        letters = []
        for number, here in grouped(chunks):
            chunk = self.records.chunk(number)
            places = numbers[here] - (ends[number] - len(chunk))
            letters.append(_letters(chunk.take(pa.array(places)), why, error_class))
        return letters


def _letters(bad: pa.StructArray, why: str, error_class: str) -> pa.StructArray:
    fields = {field.name: bad.field(number) for number, field in enumerate(bad.type)}
    fields["reason"] = pc.binary_join_element_wise(fields["reason"], why, ", ")
    fields["error_class"] = pc.if_else(pc.equal(fields["error_class"], KEPT), KEPT, error_class)
    return pa.StructArray.from_arrays([fields[part.name] for part in bad.type], fields=list(bad.type))


@dataclass(frozen=True)
class Completed:
    """How a task's partial rows were completed.

    :param rows: number of keys that were completed from the table's rows.
    :param files: data files of earlier snapshots that had these rows.
    :param letters: records that nothing could complete, as `_rowdelta_bad` has them. Those of class `KEPT` are dead
        letters already.
    """

    rows: int = 0
    files: Sequence[str] = ()
    letters: Sequence[pa.StructArray] = ()

    def and_more(self, other: "Completed") -> "Completed":
        return Completed(self.rows + other.rows, [*self.files, *other.files], [*self.letters, *other.letters])
