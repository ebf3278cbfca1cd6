"""Removals of rows that went to another key (`changelog.moves`): each removes its key's row only if this may be the row
that it is about.

Which row a key has then is known when all changes of the commit are: its last change before the removal set it, or the
table has it. So the writer keeps these removals until it is closed. They are few.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from changelog.rows import MOVED, known_columns
from deltawriters.arrow_types import storage
from deltawriters.collapse import grouped
from deltawriters.rowhash import row_hash


@dataclass(frozen=True)
class Settled:
    """What became of the removals of moved rows.

    :param left: number of removals that left another row in place.
    :param untold: number of removals that took a row away which the same commit had set, and that tell nothing about
        the row they are about.
    :param files: data files of earlier snapshots that have rows which were left in place.
    """

    left: int = 0
    untold: int = 0
    files: Sequence[str] = ()

    def and_more(self, other: "Settled") -> "Settled":
        return Settled(self.left + other.left, self.untold + other.untold, [*self.files, *other.files])


def columns_known(removals: pa.Table) -> list[str]:
    """All columns that some of the removals know."""
    texts = pc.unique(removals.column(MOVED)).to_pylist()
    return sorted({name for text in texts for name in known_columns(text)} & set(removals.column_names))


def are_about_others(removals: pa.Table, rows: pa.Table) -> npt.NDArray[np.bool_]:
    """Whether each of n removals surely is about another row than the one beside it: both have a value in a column that
    the removal knows, and these differ. A null says nothing: the table may have got the column later.

    :param removals: with `_rowdelta_moved`.
    :param rows: n rows with at least the columns that are known (`columns_known`).
    """
    differs = np.zeros(len(removals), np.bool_)
    marks = storage(removals.column(MOVED)).dictionary_encode()
    numbers = marks.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    for number, places in grouped(numbers):
        for name in known_columns(marks.dictionary[number].as_py()):
            if name in rows.column_names:
                taken = pa.array(places)
                here = _differ(removals.column(name).take(taken), rows.column(name).take(taken))
                differs[places] |= here
    return differs


def _differ(values: pa.ChunkedArray, others: pa.ChunkedArray) -> npt.NDArray[np.bool_]:
    image, row = storage(values), storage(others)
    try:
        row = row if row.type == image.type else row.cast(image.type)
    except pa.ArrowInvalid:  # another writer's value
        return np.zeros(len(image), np.bool_)
    if pa.types.is_floating(image.type):
        image, row = (_plain(part) for part in (image, row))
    both = pc.and_(image.is_valid(), row.is_valid()).to_numpy(zero_copy_only=False)
    if pa.types.is_string(image.type) or pa.types.is_large_string(image.type):
        # JSON: MySQL spells a document otherwise in its log than in a snapshot
        for values in (image, row):
            both = both & ~np.asarray(pc.fill_null(pc.match_substring_regex(values, r'^\s*[{\["]'), False))
    differs: npt.NDArray[np.bool_] = both & (row_hash([image]) != row_hash([row]))
    return differs


def _plain(values: pa.Array) -> pa.Array:
    """Numbers as floats, since a row may be older than its column's type double. -0.0 is 0.0, and a NaN is a NaN."""
    numbers = values.cast(pa.float32(), safe=False).fill_null(0).to_numpy() + np.float32(0)
    numbers[np.isnan(numbers)] = np.nan
    return pa.array(numbers, mask=values.is_null().to_numpy(zero_copy_only=False), from_pandas=False)
