"""In which order rows are written, so that readers can skip files: by columns, or along a Z-order curve.

A reader skips a file if its statistics say that no row of it can match. So the rows that a filter wants should be in
few files. Rows in the order of columns do this for filters on the first column. Rows along a Z-order curve do it for
filters on any of the columns, each one less well. Iceberg's `rewrite_data_files` and Delta's `OPTIMIZE` offer the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from deltawriters.arrow_types import storage
from deltawriters.collapse import Ints, ordered_as_numbers


@dataclass(frozen=True)
class RowOrder:
    """An order of rows. NULL is below all values, and NaN above all numbers.

    :param columns: top-level columns whose types have an order.
    :param curved: along a Z-order curve, and not by one column after the other.
    """

    columns: tuple[str, ...]
    curved: bool = False

    def permutation(self, rows: pa.Table) -> Ints:
        """The numbers of the rows in this order. Equal rows stay as they are."""
        columns = [storage(rows.column(name)) for name in self.columns]
        if self.curved:
            return np.argsort(z_values(columns), kind="stable")
        return np.lexsort([_rank(column) for column in reversed(columns)])


def z_values(columns: Sequence[pa.Array]) -> npt.NDArray[np.uint64]:
    """The place of each of n rows on a Z-order curve.

    Each value counts by the share of rows that have a smaller one. So columns of any types, with any distribution of
    values, have the same weight, and each piece of the curve has as many rows as any other of its length.

    :param columns: a few, of equal length n.
    """
    bits = 64 // len(columns)
    too_fine = max(0, len(columns[0]).bit_length() - bits)
    return _interleaved([_smaller(column) >> np.uint64(too_fine) for column in columns], bits)


def _rank(column: pa.Array) -> Ints:
    """How many other values are smaller, for each value. Only values that differ are compared: texts often repeat."""
    encoded = pc.dictionary_encode(ordered_as_numbers(column), null_encoding="encode")
    values = pa.table([encoded.dictionary], ["value"])
    ascending = pc.sort_indices(values, sort_keys=[("value", "ascending", "at_start")]).to_numpy()
    rank = np.empty(len(ascending), np.int64)
    rank[ascending] = np.arange(len(ascending))
    ranks: Ints = rank[encoded.indices.to_numpy(zero_copy_only=False)]
    return ranks


def _smaller(column: pa.Array) -> npt.NDArray[np.uint64]:
    """How many rows have a smaller value, for each row."""
    rank = _rank(column)
    counts = np.bincount(rank)
    return (np.cumsum(counts) - counts)[rank].astype(np.uint64)


def _interleaved(columns: Sequence[npt.NDArray[np.uint64]], bits: int) -> npt.NDArray[np.uint64]:
    """The bits of numbers of several columns by turns, the highest ones first.

    :param bits: of each number.
    """
    count = len(columns)
    byte = np.arange(256, dtype=np.uint64)
    # the bits of each byte with gaps between them, for the bits of the other columns
    spread = np.zeros(256, np.uint64)
    for bit in map(np.uint64, range(8)):
        spread |= (byte >> bit & np.uint64(1)) << bit * np.uint64(count)
    interleaved = np.zeros(len(columns[0]), np.uint64)
    for place, column in enumerate(reversed(columns)):
        for first in range(0, bits, 8):
            piece = spread[column >> np.uint64(first) & np.uint64(255)]
            interleaved |= piece << np.uint64(first * count + place)
    return interleaved
