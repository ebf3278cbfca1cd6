"""Tells the driver whether a micro-batch has rows of a snapshot read of the source, and rows of its stream of changes.

A table that trusts its stream, or only grows, takes each row of a snapshot as a new one. So a snapshot that comes after
other changes would write rows twice, unless a TRUNCATE in between has removed them.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from changelog.rows import ORDER, SNAPSHOT
from deltawriters.arrow_types import storage
from deltawriters.collapse import Ints, order_rank


class SnapshotRows:
    """What one task gets, in any order. It gets every TRUNCATE of the micro-batch.

    A TRUNCATE is applied only if the topic has one partition. So of the order it is enough to know the first row of a
    snapshot, the last other row, and the first and the last TRUNCATE. Each of them is a row with the order columns.
    Whether a snapshot comes after other rows of the same micro-batch, the places in the partitions tell.

    :param partition: the order column with the Kafka partition.
    :param place: the order column with the change's place in it.
    :param may_truncate: whether the table takes a TRUNCATE. Only then the places of all streamed rows must be kept, 12
        bytes for each, and only as long as there is one partition.
    """

    def __init__(self, partition: str, place: str, *, may_truncate: bool) -> None:
        self._partition, self._place = partition, place
        self._may_truncate = may_truncate
        self._last_snapshot: list[pa.Table] = []
        """A row for each batch and partition, with the highest place."""
        self._streamed_places: list[pa.Table] = []
        """Of all rows, if there may be a TRUNCATE: which of them come after the last one is known in the end."""
        self._snapshot, self._streamed = set[int](), set[int]()
        self._first_snapshot: list[pa.Table] = []
        self._last_streamed: list[pa.Table] = []
        self._truncates: list[pa.Table] = []

    def add(self, rows: pa.RecordBatch) -> None:
        """:param rows: changes that are applied."""
        is_snapshot, orders = rows.column(SNAPSHOT), _orders(rows)
        snapshot, streamed = orders.filter(is_snapshot), orders.filter(pc.invert(is_snapshot))
        if len(snapshot):
            self._snapshot |= set(snapshot.column(self._partition).unique().to_pylist())
            self._first_snapshot = [_chosen(np.argmin, [*self._first_snapshot, snapshot])]
            self._last_snapshot.append(self._by_partition([snapshot], "max"))
        if len(streamed):
            self._streamed |= set(streamed.column(self._partition).unique().to_pylist())
            self._last_streamed = [_chosen(np.argmax, [*self._last_streamed, streamed])]
            self._streamed_places.append(streamed.select([self._partition, self._place]))
            if not self._may_truncate or len(self._streamed) > 1:
                self._streamed_places = [self._by_partition(self._streamed_places, "min")]

    def truncate(self, barriers: pa.RecordBatch) -> None:
        """:param barriers: rows that stand for a TRUNCATE."""
        self._truncates.append(_orders(barriers))

    @property
    def snapshot_partitions(self) -> set[int]:
        """Partitions with rows of a snapshot, unless all of them come after a TRUNCATE."""
        is_free = self._truncates and _is_before(_chosen(np.argmin, self._truncates), self._first_snapshot)
        return set() if is_free else self._snapshot

    @property
    def streamed_partitions(self) -> set[int]:
        """Partitions with other rows, unless a TRUNCATE comes after all of them."""
        is_gone = self._truncates and not _is_before(_chosen(np.argmax, self._truncates), self._last_streamed)
        return set() if is_gone else self._streamed

    @property
    def last_snapshot(self) -> dict[int, int]:
        """The place of the last row of a snapshot, by partition."""
        return self._told(self._by_partition(self._last_snapshot, "max"))

    @property
    def first_streamed(self) -> dict[int, int]:
        """The place of the first other row, by partition, since the last TRUNCATE."""
        places = self._streamed_places
        if self._truncates:
            last = pc.max(pa.concat_tables(self._truncates).column(self._place))
            places = [part.filter(pc.greater(part.column(self._place), last)) for part in places]
        return self._told(self._by_partition(places, "min"))

    def _by_partition(self, rows: Sequence[pa.Table], choose: Literal["min", "max"]) -> pa.Table:
        """:return: a row for each partition, with the columns partition and place."""
        if not rows:
            return pa.table({self._partition: pa.array([], pa.int32()), self._place: pa.array([], pa.int64())})
        found = pa.concat_tables(rows).group_by(self._partition, use_threads=False).aggregate([(self._place, choose)])
        return found.rename_columns([self._partition, self._place])

    def _told(self, chosen: pa.Table) -> dict[int, int]:
        return dict(zip(*(chosen.column(name).to_pylist() for name in (self._partition, self._place)), strict=True))


def _orders(rows: pa.RecordBatch) -> pa.Table:
    return pa.Table.from_batches([rows.select([name for name in rows.schema.names if name.startswith(ORDER)])])


def _ranks(orders: Sequence[pa.Table]) -> tuple[pa.Table, Ints]:
    rows = pa.concat_tables(orders).combine_chunks()
    return rows, order_rank([storage(column) for column in rows.columns])


def _chosen(choose: Callable[[Ints], np.intp], orders: Sequence[pa.Table]) -> pa.Table:
    """A copy of one row."""
    rows, ranks = _ranks(orders)
    return rows.take([int(choose(ranks))])


def _is_before(barrier: pa.Table, row: Sequence[pa.Table]) -> bool:
    """:param row: one, or none, which nothing is before."""
    ranks = _ranks([barrier, *row])[1]
    return len(ranks) > 1 and bool(ranks[0] < ranks[1])
