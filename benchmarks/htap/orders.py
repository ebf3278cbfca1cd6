"""The source: rows of a shop's tables, by how often they change, as in TPC-C.

Ids from 0 on are those of districts, which change all the time, then come articles in stock, any of which may change,
and then orders: each new one is delivered some time later, and removed at last. As many are removed as come, so the
table keeps its size, and whatever grows isn't the number of rows.
"""

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from benchmarks.soak.changes import NOTES, REGIONS

Ints = npt.NDArray[np.int64]

DISTRICTS = 100
NEW, DELIVERED, REMOVED, DISTRICT, STOCK = 0.3, 0.1, 0.3, 0.15, 0.15
"""Shares of the changes."""
_WAIT = 0.2
"""After so many of the orders that there are, an order is delivered."""
_PRIME = 2_654_435_761


class Orders:
    """Makes the changes. Each has a number, from 1 on, and a row follows from its id and the number of its last change.

    :param stock: number of articles.
    :param orders: number of orders at any time.
    :param most: number of all changes after the first load, at most.
    """

    def __init__(self, stock: int, orders: int, most: int, seed: int) -> None:
        self._stock, self._orders, self._seed = stock, orders, seed
        self._first = DISTRICTS + stock
        """The id of the oldest order."""
        self._end = self._first + orders
        self._seq = np.zeros(self._end + most, np.int64)
        """Of each id the number of its last change; 0 if there is no such row."""
        self.batches = 0
        self._next = 1

    def first_load(self) -> pa.Table:
        """A row for each id. It is not counted as a batch."""
        return self._changes(np.arange(self._end), np.zeros(self._end, np.bool_))

    def batch(self, count: int) -> pa.Table:
        """The next so many changes, or one or two fewer."""
        self.batches += 1
        random = np.random.default_rng((self._seed, self.batches))
        moved = round(count * NEW)
        new, removed = self._end + np.arange(moved), self._first + np.arange(moved)
        self._end, self._first = self._end + moved, self._first + moved
        oldest = self._end - moved - round(self._orders * _WAIT)
        delivered = oldest + np.arange(round(count * DELIVERED))
        # half of the changes of districts hit six of them
        districts = (DISTRICTS * random.random(round(count * DISTRICT)) ** 4).astype(np.int64)
        stock = DISTRICTS + random.integers(self._stock, size=round(count * STOCK))
        ids = np.concatenate([new, delivered, removed, districts, stock])
        is_removed = np.repeat(
            [False, False, True, False, False], [*map(len, (new, delivered, removed, districts, stock))]
        )
        mixed = random.permutation(len(ids))
        return self._changes(ids[mixed], is_removed[mixed])

    def expected(self) -> pa.Table:
        """What the table must hold now, by id."""
        ids = np.flatnonzero(self._seq)
        return self._rows(ids, self._seq[ids])

    def newest(self) -> int:
        """The id of an order that has just come."""
        return self._end - 1

    def _changes(self, ids: Ints, removed: npt.NDArray[np.bool_]) -> pa.Table:
        seq = np.arange(self._next, self._next + len(ids))
        self._next += len(ids)
        self._seq[ids] = np.where(removed, 0, seq)  # of several changes of an id numpy keeps the last one
        kinds = pa.array(["+U", "-D"]).take(pa.array(removed.astype(np.int64)))
        return self._rows(ids, seq).add_column(0, "row_kind", kinds)

    def _rows(self, ids: Ints, seq: Ints) -> pa.Table:
        mixed = seq * _PRIME % (1 << 31)
        return pa.table(
            {
                "id": pa.array(ids),
                "region": REGIONS.take(pa.array(ids % len(REGIONS))),
                "amount": pa.array(mixed),
                "note": NOTES.take(pa.array(mixed % len(NOTES))),
                "seq": pa.array(seq),
            }
        )
