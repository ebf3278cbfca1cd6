"""Rows that a table doesn't want (`where`).

A change that sets such a row becomes a -D of its key. So the row leaves the table if it was there, and the change keeps
its place in the order: what came before it is void, and what is late is late. A table that only grows (`mode: append`)
leaves these -D out: it has no others.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from changelog.conditions import Condition, Field, evaluated
from changelog.rows import BAD, KIND, PREFIX, UNAVAILABLE, Mask, RowKind, is_bad, sets_row, unavailable_columns


@dataclass(frozen=True)
class Where:
    """Which rows a table wants.

    :param inputs: the decoded columns that the condition depends on.
    :param condition: None if only Spark can evaluate it; then Spark does what `applied` does, on rows that are
        `decidable`.
    :param only: the decoded columns that nothing else needs. `applied` removes them.
    :param columns: the columns whose values a -D doesn't have.
    :param metadata: the metadata columns among the inputs that the table doesn't have. They come last.
    :param computed: the computed columns that the condition names.
    :param keeps_records: all rows have their records (`ChangelogSpec.keeps_late`).
    """

    inputs: frozenset[str]
    condition: Condition | Field | None
    only: frozenset[str]
    columns: frozenset[str]
    metadata: tuple[str, ...] = ()
    computed: frozenset[str] = frozenset()
    keeps_records: bool = False

    def applied(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Changelog rows, of which those that set an unwanted row are a -D, without the columns `only`."""
        rows, sets = self._decidable(rows)
        if self.condition is None:
            return rows
        if sets.any():
            wanted = pc.fill_null(evaluated(self.condition, rows), False)
            unwanted = sets & ~wanted.to_numpy(zero_copy_only=False)
            if unwanted.any():
                rows = self._removed(rows, pa.array(unwanted))
        return rows.drop_columns([name for name in rows.schema.names if name in self.only]) if self.only else rows

    @property
    def lost_records(self) -> frozenset[str]:
        """The columns with records that a -D doesn't have either."""
        return frozenset() if self.keeps_records else frozenset((BAD, UNAVAILABLE))

    def _decidable(self, rows: pa.RecordBatch) -> tuple[pa.RecordBatch, Mask]:
        """The rows, with a bad record in place of each partial row that lacks a value which the condition needs; and
        the flags of those that set a row.
        """
        sets, bad = sets_row(rows.column(KIND).to_numpy()), is_bad(rows)
        if bad is not None:
            sets &= ~bad.to_numpy(zero_copy_only=False)
        if UNAVAILABLE not in rows.schema.names:
            return rows, sets
        bits = rows.column(UNAVAILABLE)
        partial = np.flatnonzero(pc.greater(pc.fill_null(pc.binary_length(bits), 0), 0))
        if not len(partial):
            return rows, sets
        names = [name for name in rows.schema.names if not name.startswith(PREFIX) and name not in self.metadata]
        lacks = unavailable_columns(bits.take(pa.array(partial)), len(names))
        inputs = [number for number, name in enumerate(names) if name in self.inputs]
        undecided = np.zeros(len(rows), np.bool_)
        undecided[partial] = lacks[:, inputs].any(axis=1)
        if not undecided.any():
            return rows, sets
        letters = rows.column(BAD)
        reasons = pc.binary_join_element_wise(letters.field("reason"), "and where needs it", ", ")
        parts = [reasons if field.name == "reason" else letters.field(field.name) for field in letters.type]
        told = pa.StructArray.from_arrays(parts, fields=list(letters.type))
        flags = pa.array(undecided)
        rows = _with(rows, UNAVAILABLE, pc.if_else(flags, pa.scalar(None, bits.type), bits))
        return _with(rows, BAD, pc.if_else(flags, told, letters)), sets & ~undecided

    def _removed(self, rows: pa.RecordBatch, unwanted: pa.BooleanArray) -> pa.RecordBatch:
        delete = pa.scalar(int(RowKind.DELETE), pa.int8())
        rows = _with(rows, KIND, pc.if_else(unwanted, delete, rows.column(KIND)))
        kept = pa.array(np.arange(len(rows)), mask=unwanted.to_numpy(zero_copy_only=False))
        for name in rows.schema.names:
            values = rows.column(name)
            if name in self.columns | self.lost_records and values.null_count < len(rows):
                # Arrow takes nested values far faster than it chooses between them
                is_nested = pa.types.is_nested(values.type)
                left = values.take(kept) if is_nested else pc.if_else(unwanted, pa.scalar(None, values.type), values)
                rows = _with(rows, name, left)
        if self.keeps_records:
            bits = rows.column(UNAVAILABLE)
            rows = _with(rows, UNAVAILABLE, pc.if_else(unwanted, pa.scalar(b"", bits.type), bits))
        return rows


def _with(rows: pa.RecordBatch, name: str, values: pa.Array) -> pa.RecordBatch:
    number = rows.schema.get_field_index(name)
    return rows.set_column(number, rows.schema.field(number), values)
