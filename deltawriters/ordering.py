"""In which order rows are written, so that readers can skip files.

A reader skips a file if its statistics say that no row of it can match. So the rows that a filter wants should be in
few files.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from changelog.order_values import ordered_as_numbers
from deltawriters.arrow_types import storage
from deltawriters.collapse import Ints


@dataclass(frozen=True)
class RowOrder:
    """An order of rows. NaN is above all numbers, and NULL comes first unless the column is one of `nulls_last`.

    :param columns: top-level columns whose types have an order, one after the other.
    :param descending: those of them whose largest values come first.
    """

    columns: tuple[str, ...]
    descending: frozenset[str] = frozenset()
    nulls_last: frozenset[str] = frozenset()

    def permutation(self, rows: pa.Table) -> Ints:
        """The numbers of the rows in this order. Equal rows stay as they are."""
        return np.lexsort([self._rank(name, storage(rows.column(name))) for name in reversed(self.columns)])

    def _rank(self, name: str, column: pa.Array) -> Ints:
        direction = "descending" if name in self.descending else "ascending"
        return _rank(column, direction, "at_end" if name in self.nulls_last else "at_start")


def _rank(column: pa.Array, direction: str, nulls: str) -> Ints:
    """How many other values come before it, for each value. Texts often repeat, so only values that differ are
    compared.
    """
    encoded = pc.dictionary_encode(ordered_as_numbers(column), null_encoding="encode")
    values = pa.table([encoded.dictionary], ["value"])
    in_order = pc.sort_indices(values, sort_keys=[("value", direction, nulls)]).to_numpy()
    rank = np.empty(len(in_order), np.int64)
    rank[in_order] = np.arange(len(in_order))
    ranks: Ints = rank[encoded.indices.to_numpy(zero_copy_only=False)]
    return ranks
