"""In which order rows are written, so that readers can skip files.

A reader skips a file if its statistics say that no row of it can match. So the rows that a filter wants should be in
few files.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from deltawriters.arrow_types import storage
from deltawriters.collapse import Ints, ordered_as_numbers


@dataclass(frozen=True)
class RowOrder:
    """An order of rows. NULL is below all values, and NaN above all numbers.

    :param columns: top-level columns whose types have an order, one after the other.
    """

    columns: tuple[str, ...]

    def permutation(self, rows: pa.Table) -> Ints:
        """The numbers of the rows in this order. Equal rows stay as they are."""
        columns = [storage(rows.column(name)) for name in self.columns]
        return np.lexsort([_rank(column) for column in reversed(columns)])


def _rank(column: pa.Array) -> Ints:
    """How many other values are smaller, for each value. Only values that differ are compared: texts often repeat."""
    encoded = pc.dictionary_encode(ordered_as_numbers(column), null_encoding="encode")
    values = pa.table([encoded.dictionary], ["value"])
    ascending = pc.sort_indices(values, sort_keys=[("value", "ascending", "at_start")]).to_numpy()
    rank = np.empty(len(ascending), np.int64)
    rank[ascending] = np.arange(len(ascending))
    ranks: Ints = rank[encoded.indices.to_numpy(zero_copy_only=False)]
    return ranks
