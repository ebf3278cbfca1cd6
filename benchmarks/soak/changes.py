"""The changes of the soak, and what a table must hold after any number of micro-batches.

A row's columns follow from its key, its region and the number of the change that wrote it. So the model of the table is
three arrays, and a micro-batch is made without a loop over rows.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

Ints = npt.NDArray[np.int64]

REGIONS = pa.array([f"region-{number}" for number in range(8)])
NOTES = pa.array([f"note {number * 2654435761 % 2**32:08x} " * 3 for number in range(4096)])
COLUMNS = {"id": "bigint", "region": "string", "amount": "bigint", "note": "string", "seq": "bigint"}
"""Of the table in the beginning, by their types in Spark's SQL."""
DELETE_SHARE = 0.1
MOVE_SHARE = 0.1
"""Share of the changes that put the row into another region, and so into another partition."""
_SKEW = 4
"""A uniform number to this power is the rank of a key: half of the changes hit a sixteenth of the keys."""
_PRIME = 2_654_435_761


class Changes:
    """The source: keys from 0 on, with the region and the last change of each. Changes are numbered from 1 on.

    :param column_every: after so many micro-batches the rows have another column.
    """

    def __init__(self, keys: int, events: int, column_every: int, seed: int, regions: int = len(REGIONS)) -> None:
        self.batches = 0
        self._regions = regions
        self._events, self._column_every, self._seed = events, column_every, seed
        self._next = 1
        self._keys = keys
        self._alive = np.zeros(keys, np.bool_)
        self._region = np.zeros(keys, np.int64)
        self._seq = np.zeros(keys, np.int64)
        self._columns_from: list[int] = []
        """The first change that has the added column of this number."""

    def first_load(self) -> pa.Table:
        """A row for each key. It is not counted as a micro-batch."""
        random = np.random.default_rng((self._seed, 0))
        return self._put(np.arange(self._keys), np.zeros(self._keys, np.bool_), random)

    def batch(self) -> pa.Table:
        """The next micro-batch."""
        self.batches += 1
        if self.batches % self._column_every == 0:
            self._columns_from.append(self._next)
        random = np.random.default_rng((self._seed, self.batches))
        ranks = (self._keys * random.random(self._events) ** _SKEW).astype(np.int64)
        keys = ranks * _PRIME % self._keys
        return self._put(keys, (random.random(self._events) < DELETE_SHARE) & self._alive[keys], random)

    def expected(self) -> pa.Table:
        """What a table must hold now, by id."""
        keys = np.flatnonzero(self._alive)
        return self._rows(keys, self._region[keys], self._seq[keys])

    def _put(self, keys: Ints, deleted: npt.NDArray[np.bool_], random: np.random.Generator) -> pa.Table:
        count = len(keys)
        seq = np.arange(self._next, self._next + count)
        self._next += count
        moved = (random.random(count) < MOVE_SHARE) | (self._seq[keys] == 0)
        # a key that comes twice keeps the region that it had before the micro-batch, or moves
        region = np.where(moved, random.integers(self._regions, size=count), self._region[keys])
        rows = self._rows(keys, region, seq)
        kinds = pa.array(["+U", "-D"]).take(pa.array(deleted.astype(np.int64)))
        last = count - 1 - np.unique(keys[::-1], return_index=True)[1]
        self._alive[keys[last]] = ~deleted[last]
        self._region[keys[last]] = region[last]
        self._seq[keys[last]] = seq[last]
        return rows.add_column(0, "row_kind", kinds)

    def _rows(self, keys: Ints, region: Ints, seq: Ints) -> pa.Table:
        mixed = seq * _PRIME % (1 << 31)
        columns = {
            "id": pa.array(keys),
            "region": REGIONS.take(pa.array(region)),
            "amount": pa.array(mixed),
            "note": NOTES.take(pa.array(mixed % len(NOTES))),
            "seq": pa.array(seq),
        }
        for number, first in enumerate(self._columns_from, 1):
            columns[f"added_{number}"] = pa.array(mixed % 1000 + number, mask=seq < first)
        return pa.table(columns)


def differences(found: pa.Table, expected: pa.Table) -> list[str]:
    """In which way a table's rows are not those that are expected. Empty if they are."""
    if found.num_rows != expected.num_rows:
        return [f"{found.num_rows:,} rows, not {expected.num_rows:,}"]
    if missing := [name for name in expected.column_names if name not in found.column_names]:
        return [f"no columns {missing}"]
    # readers have texts of several types, and Arrow sorts only some of them
    found = found.select(expected.column_names).cast(expected.schema).sort_by("id")
    return [f"column {name} differs" for name in expected.column_names if not found[name].equals(expected[name])]


def write(table: pa.Table, path: Path) -> None:
    pq.write_table(table, path, compression="zstd", compression_level=1)
