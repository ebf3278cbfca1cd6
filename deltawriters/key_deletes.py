"""Deletes of keys that the table may hold from earlier snapshots, where no key index says which it holds."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from changelog.made_up import surely_logged
from changelog.rows import RowKind
from deltawriters import arrow_types
from deltawriters.arrow_types import as_table_types, storage
from deltawriters.collapse import dense_ids
from deltawriters.deletes import KeyDeletes
from deltawriters.whole_changes import WholeChanges, concat, kinds_of, take


def delete_keys(deletes: KeyDeletes, whole: WholeChanges, earlier: pa.Table | None) -> None:
    """Delete all keys that earlier snapshots may have.

    :param whole: changes of at least one key.
    :param earlier: removals of some of the keys that aren't their last changes.
    """
    keys, firsts = whole.map.keys, whole.map.first
    assert keys is not None
    if earlier is not None and firsts is not None:
        keys, firsts = _with_earlier(keys, firsts, earlier)
    for start, stop in _portions(keys, firsts):
        first = None if firsts is None else firsts.slice(start, stop - start)
        _delete_portion(deletes, whole, keys.slice(start, stop - start), first)


def _with_earlier(keys: pa.Table, firsts: pa.Table, earlier: pa.Table) -> tuple[pa.Table, pa.Table]:
    """Add removals to the first changes of keys that begin with an insert: earlier snapshots may have the row that
    such a removal is about.
    """
    all_keys = concat(keys, earlier.select(keys.column_names))
    ids, _ = dense_ids([storage(column) for column in all_keys.columns])
    inserts = np.append(kinds_of(firsts) == RowKind.INSERT, False)
    of_earlier = np.minimum(ids[len(keys) :], len(keys))
    chosen = np.concatenate([np.arange(len(keys)), len(keys) + np.flatnonzero(inserts[of_earlier])])
    return take(all_keys, chosen), take(concat(firsts, earlier.select(firsts.column_names)), chosen)


def _delete_portion(deletes: KeyDeletes, whole: WholeChanges, keys: pa.Table, first: pa.Table | None) -> None:
    options, types, names = whole.options, whole.table.arrow_schema, list(whole.table.source_columns)
    keys = as_table_types(keys, pa.schema([types.field(name) for name in options.key]))
    if first is not None:
        removed = pa.array(kinds_of(first) != RowKind.INSERT)
        keys, first = keys.filter(removed), first.filter(removed)
    if options.global_deletes:
        deletes.delete_globally(keys)
    elif set(names) <= set(options.key):  # true for an unpartitioned table too: it has no source columns
        deletes.delete(keys, keys)
    elif first is None:
        deletes.delete_globally(keys)
    else:
        sources = as_table_types(first.select(names), pa.schema([types.field(name) for name in names]))
        known = pa.array(_old_partition_known(whole, first))
        deletes.delete(keys.filter(known), sources.filter(known))
        deletes.delete_globally(keys.filter(pc.invert(known)))


def _old_partition_known(whole: WholeChanges, first: pa.Table) -> npt.NDArray[np.bool_]:
    """Whether each first change tells the partition that its key must be deleted from.

    A null in a source column is ambiguous: the old value was null, or the before-image lacks the column. So null
    counts as unknown, and so does what may be made up.
    """
    options, kinds = whole.options, kinds_of(first)
    known: npt.NDArray[np.bool_] = kinds == RowKind.UPDATE_BEFORE
    if options.deletes_carry_row:
        known |= kinds == RowKind.DELETE
    for name in whole.table.source_columns:
        values = storage(first.column(name))
        known &= values.is_valid().to_numpy(zero_copy_only=False)
        if not options.deletes_carry_row and name not in options.key:
            known &= surely_logged(pc.if_else(pa.array(known), values, pa.scalar(None, values.type)))
    return known


def _portions(keys: pa.Table, first: pa.Table | None) -> Iterator[tuple[int, int]]:
    """Row ranges [start, stop) of the key map, each small enough for Arrow's usual types (`MOST_TEXT`). Usually this is
    one range with all rows.
    """
    waiting = [(0, keys.num_rows)]
    while waiting:
        start, stop = waiting.pop()
        sizes = (table.slice(start, stop - start).nbytes for table in (keys, first) if table is not None)
        if stop - start <= 1 or max(sizes) <= arrow_types.MOST_TEXT:
            yield start, stop
        else:
            middle = (start + stop) // 2
            waiting += [(middle, stop), (start, middle)]
