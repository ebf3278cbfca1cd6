"""Order values of the rows of a table, as the key index has them (`changelog.order_values`)."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from changelog.order_values import encoded
from changelog.rows import order_column
from deltawriters.arrow_types import storage

UNKNOWN = b""
"""Of an entry that says nothing of its key's order: it is below all values."""


@dataclass(frozen=True)
class OrderColumns:
    """The columns of a table by whose values late changes are told.

    :param columns: compared one after the other, NULL first.
    :param spec: the columns with their types and directions, as a text. Values of another one can't be compared.
    :param descending: those whose smaller values are the later ones.
    """

    columns: tuple[str, ...]
    spec: str = ""
    descending: frozenset[str] = frozenset()

    def of_rows(self, rows: pa.Table | pa.RecordBatch) -> pa.BinaryArray:
        """The order values of n rows, as n texts of bytes."""
        return joined(
            [encoded(storage(rows.column(name)), descending=name in self.descending) for name in self.columns]
        )

    def of_changes(self, orders: pa.Table | pa.RecordBatch) -> pa.BinaryArray:
        """The order values of n changes.

        :param orders: has the order columns of changes, of which descending ones are encoded already.
        """
        return joined(
            [
                column if name in self.descending else encoded(column)
                for number, name in enumerate(self.columns)
                for column in [storage(orders.column(order_column(number)))]
            ]
        )


def joined(parts: list[pa.BinaryArray]) -> pa.BinaryArray:
    return parts[0] if len(parts) == 1 else pc.binary_join_element_wise(*parts, pa.scalar(b"", pa.binary()))


def latest(orders: pa.BinaryArray, groups: npt.NDArray[np.int64], count: int, floor: bytes) -> pa.BinaryArray:
    """The highest order value of each of `count` groups, or `floor` if that is higher.

    :param groups: the number of each value's group.
    """
    chosen = np.full(count, len(orders), np.int64)
    if len(np.unique(groups)) == len(groups):
        chosen[groups] = np.arange(len(groups))
    else:  # other writers have given a key several rows
        by_rank = pc.sort_indices(orders).to_numpy()
        chosen[groups[by_rank]] = by_rank  # numpy keeps the last of repeated assignments to one index
    highest = pa.concat_arrays([orders, pa.array([floor], pa.binary())]).take(pa.array(chosen))
    return pc.if_else(pc.less(highest, floor), floor, highest) if floor else highest
