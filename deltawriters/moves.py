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

from changelog.rows import BAD, MOVED, MOVED_SEPARATOR, UNAVAILABLE, known_columns, sets_row
from deltawriters.arrow_types import storage
from deltawriters.collapse import Ints, grouped
from deltawriters.keyindex import IndexedFile
from deltawriters.partial import divided
from deltawriters.resolve import NOWHERE, IndexTask, rows_of
from deltawriters.rowhash import row_hash
from deltawriters.whole_changes import WholeChanges, kinds_of


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


def settle_moves(
    kept: Sequence[pa.RecordBatch], whole: WholeChanges, index: IndexTask | None
) -> tuple[Settled, pa.Table, list[pa.RecordBatch]]:
    """Find the removals of moved rows that are about other rows than their keys have, and leave them out.

    :param kept: the removals.
    :param whole: gets the others, unless they are partial.
    :param index: finds the table's rows. Without one, these aren't looked at.
    :return: what became of them, those after which their keys may still have a row in this commit, and the partial ones
        of those that weren't left out.
    :raises CorruptIndexError: a run of the index is damaged or missing.
    """
    moved = whole.since_truncate(pa.Table.from_batches(kept).combine_chunks())
    found = whole.last_changes(moved, kinds_of(moved))
    base, m = found.base[found.of], len(whole.map)
    follows_row = (base != NOWHERE) & found.is_after
    follows_row[follows_row] = sets_row(found.kinds[base[follows_row]])
    in_buffer, in_map = (np.flatnonzero(follows_row & there) for there in (base >= m, base < m))
    in_map = in_map[whole.map.file[base[in_map]] != NOWHERE]
    is_certain = ~np.asarray(pc.starts_with(storage(moved.column(MOVED)), MOVED_SEPARATOR))
    in_table = np.flatnonzero((base == NOWHERE) & is_certain)
    others = np.zeros(len(moved), np.bool_)
    columns = [name for name in _columns_known(moved) if name in whole.table.arrow_schema.names]

    def compare(removals: Ints, rows: pa.Table) -> None:
        others[removals] = are_about_others(moved.take(pa.array(removals)), rows)

    def compare_in_files(removals: Ints, files: Sequence[IndexedFile], file: Ints, pos: Ints) -> None:
        for here, rows in whole.table.rows_in_files(files, file, pos, columns):
            if isinstance(rows, pa.Table):  # what can't be read says nothing
                compare(removals[here], rows)

    if len(in_buffer):
        compare(in_buffer, whole.buffered.take(pa.array(base[in_buffer] - m)))
    if len(in_map) and columns:
        places = whole.map.file[base[in_map]], whole.map.pos[base[in_map]]
        compare_in_files(in_map, whole.readable_files(), *places)
    looked_at: list[str] = []
    if len(in_table) and columns and index is not None:
        located, counts = rows_of(whole.table, index, whole.options.key, moved.take(pa.array(in_table)))
        alone = counts[located.query] == 1
        asking, file, pos = in_table[located.query[alone]], located.file[alone], located.pos[alone]
        compare_in_files(asking, located.files, file, pos)
        # one that is applied removes whatever others make of its key's row meanwhile, as all removals do
        left_in = np.unique(file[others[asking]])
        looked_at = [located.files[number].path for number in left_in.tolist()]
    says_nothing = pc.equal(moved.column(MOVED), "").to_numpy()
    untold = int(np.count_nonzero(follows_row & says_nothing))
    bare = [name for name in (MOVED, BAD, UNAVAILABLE) if name in moved.column_names]
    earlier = moved.filter(pa.array(others | ((base != NOWHERE) & ~found.is_after))).drop_columns(bare)
    partial = list[pa.RecordBatch]()
    for batch in moved.filter(pa.array(~others)).to_batches():
        if UNAVAILABLE in bare:
            batch, more = divided(batch, UNAVAILABLE)
            partial += [part.drop_columns([MOVED]) for part in more]
        whole.add(batch.drop_columns(bare))
    return Settled(int(np.count_nonzero(others)), untold, looked_at), earlier, partial


def _columns_known(removals: pa.Table) -> list[str]:
    """All columns that some of the removals know."""
    texts = pc.unique(removals.column(MOVED)).to_pylist()
    return sorted({name for text in texts for name in known_columns(text)} & set(removals.column_names))


def are_about_others(removals: pa.Table, rows: pa.Table) -> npt.NDArray[np.bool_]:
    """Whether each of n removals surely is about another row than the one beside it: both have a value in a column that
    the removal knows, and these differ. A null says nothing: the table may have got the column later.

    :param removals: with `_rowdelta_moved`.
    :param rows: n rows with at least the columns that are known (`_columns_known`).
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
