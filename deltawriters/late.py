"""Late changes: those whose order value is below what the table holds for their key.

The key index tells the order value of each key's row, or of the delete of its last row. So a change is told to be late
before anything is written, whatever came in earlier commits, and no data file is read. An equal order value isn't late:
the change may be the same one once more.
"""

import time

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from changelog.rows import BAD, HASH, KIND, LATE_REASON, BadRecord, RowKind, order_column
from deltawriters import tombstones
from deltawriters.arrow_types import storage
from deltawriters.keyindex import distinct, low_hash
from deltawriters.partial import as_letters
from deltawriters.resolve import IndexTask, key_columns
from deltawriters.table import TableSpec


class LateChanges:
    """Tells a task's late changes, and writes down the keys that it deletes.

    :param key: names of the key columns.
    :param index: has order values.
    :param keeps: the changes have their records, and late ones become dead letters.
    """

    def __init__(self, table: TableSpec, key: tuple[str, ...], index: IndexTask, *, keeps: bool = False) -> None:
        assert index.slice.order is not None
        self._table = table
        self._key = list(key)
        self._index = index
        self.order = index.slice.order
        self._keeps = keeps
        self.count = 0
        """How many changes were late, and are no letters."""
        self.letters: list[pa.StructArray] = []
        """Records of late changes, as `_rowdelta_bad` has them. Those of class `KEPT` are dead letters already."""

    def divided(self, changes: pa.RecordBatch, index: IndexTask) -> tuple[pa.RecordBatch, pa.RecordBatch]:
        """The changes that aren't late, and those that are.

        :param changes: changelog rows with the hashes of their keys.
        :raises CorruptIndexError: a run of the index is damaged or missing.
        """
        slice_ = index.slice
        high = changes.column(HASH).to_numpy().view(np.uint64)
        keys = pa.Table.from_batches([changes.select(self._key)])
        low = low_hash(key_columns(self._table, keys), slice_.base)
        number, high, low = distinct(high, low)  # an update is two changes of a key, and a hot key has many
        latest = slice_.probe(high, low, index.first, index.last).latest
        assert latest is not None
        is_late = pc.less(self.order.of_changes(changes), latest.take(pa.array(number)))
        if not pc.any(is_late).as_py():
            return changes, changes.slice(0, 0)
        return changes.filter(pc.invert(is_late)), changes.filter(is_late)

    def leave_out(self, late: pa.RecordBatch) -> None:
        """Count late changes, or let them become dead letters."""
        if self._keeps:  # a +U is beside a -U, of the same record
            kept = late.filter(pc.not_equal(late.column(KIND), int(RowKind.UPDATE_BEFORE)))
            reasons = pa.repeat(LATE_REASON, len(kept))
            self.letters.append(as_letters(kept.column(BAD), reasons, BadRecord.LATE))
            late = late.slice(len(kept))
        self.count += len(late)

    def deleted(self, keys: pa.Table, orders: pa.BinaryArray, times: pa.Array) -> pa.Table:
        """Deleted keys as a file has them (`deltawriters.tombstones`).

        :param keys: the key columns.
        :param orders: the order values of the deletes.
        :param times: see `deleted_at`.
        """
        columns = dict(zip(keys.column_names, key_columns(self._table, keys), strict=True))
        return pa.table({**columns, tombstones.ORDER_VALUE: orders, tombstones.DELETED_AT: times})

    def write_deleted(self, rows: pa.Table, paths: list[str]) -> tuple[str, int]:
        """Write a file of deleted keys.

        :param rows: see `deleted`; at least one.
        :param paths: gets the file's path before it is written.
        :return: its name and the number of keys.
        """
        name = tombstones.name_of(self._table, rows, self._index.run_name)
        paths.append(tombstones.path_of(self._table, name))
        tombstones.write_tombstones(self._table, name, self.order.spec, rows)
        return name, len(rows)


def deleted_at(orders: pa.Table) -> pa.Array:
    """From when on it counts how long keys are deleted (timestamp, UTC): from now, or from the time in the first order
    column if that is later. It may be much earlier, since a backlog is read.

    :param orders: the order columns of the deletes.
    """
    first, dtype = storage(orders.column(order_column(0))), pa.timestamp("us", "UTC")
    now = pa.scalar(int(time.time() * 1_000_000), pa.int64())
    if not pa.types.is_timestamp(first.type) and not pa.types.is_date(first.type):
        return pa.repeat(now.cast(dtype), len(first))
    return pc.max_element_wise(first.cast(pa.timestamp("us")).cast(pa.int64()), now).cast(dtype)
