"""Leaves out, before the shuffle, each change that a later change of the same key makes superfluous. MapReduce calls
this a combiner.

This is right only where the last change of a key is all that counts: in `mode: upsert`. A stream that catches up often
repeats its keys. It then sends only a fraction of its rows through the shuffle.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from changelog.rows import BAD, MOVED, ORDER, UNAVAILABLE, RowKind, sets_row
from deltawriters.arrow_types import storage
from deltawriters.collapse import Ints, collapse, dense_ids, settle, tied_rows
from deltawriters.rowhash import row_hash
from deltawriters.whole_changes import kinds_of

BUFFER_BYTES = 64 * 1024 * 1024
"""Repeated keys are found within a buffer of this many Arrow bytes."""
_WORTHWHILE = 0.8
"""If more than this share of a buffer's rows stays, combining doesn't pay: all later rows of the task pass as they are.
"""
_PROBE_ROWS = 32_768
_NEARLY_ALL = 0.98
"""If more than this share of the first rows has distinct keys, the rows are probably a snapshot of the source: all rows
pass as they are.
"""
_BATCH = 32_768


def combined(
    changes: Iterable[pa.RecordBatch],
    key: Sequence[str],
    columns: Sequence[str],
    left_out: Callable[[dict[str, int]], None],
    buffer_bytes: int = BUFFER_BYTES,
    *,
    keeps_removals: bool = False,
) -> Iterator[pa.RecordBatch]:
    """The last change of each key in each buffer of changes, and all bad records. Partial rows stay too, and removals
    of rows that went to another key, and no other change is left out for their sake: they build on it.

    For each batch that it takes it gives at least one, if only an empty one. So whoever has several of these can let
    them take turns (`sink.spark.tasks.decode.decode_together`).

    :param changes: changelog rows (`changelog.rows`) of one schema.
    :param key: names of the key columns.
    :param columns: names of the table's columns in the table's order. Their content settles ties, as in the delta
        writer.
    :param left_out: is called with the number of changes that were left out, by `RowKind.short`.
    :param buffer_bytes: Arrow bytes of a buffer.
    :param keeps_removals: removals don't take their keys' rows away. So they stay, and what they come after.
    """
    batches, rows, size = list[pa.RecordBatch](), 0, 0
    probed = False
    remaining = iter(changes)
    for batch in remaining:
        batches.append(batch)
        rows += batch.num_rows
        size += batch.nbytes
        if not probed and rows >= _PROBE_ROWS:
            probed = True
            if _distinct(batches, key) > _NEARLY_ALL * rows:
                yield from batches
                yield from remaining
                return
        if size < buffer_bytes:
            yield batch.slice(0, 0)
            continue
        last = _last_changes(batches, key, columns, left_out, keeps_removals)
        yield from last.to_batches(_BATCH)
        if last.num_rows > _WORTHWHILE * rows:
            yield from remaining
        rows = size = 0
    if batches:
        yield from _last_changes(batches, key, columns, left_out, keeps_removals).to_batches(_BATCH)


def _distinct(batches: list[pa.RecordBatch], key: Sequence[str]) -> int:
    keys = pa.Table.from_batches(batches).select(list(key)).combine_chunks()
    return dense_ids([storage(column) for column in keys.columns])[1]


def _last_changes(
    batches: list[pa.RecordBatch],
    key: Sequence[str],
    columns: Sequence[str],
    left_out: Callable[[dict[str, int]], None],
    keeps_removals: bool,
) -> pa.Table:
    """Combine one buffer. This function empties `batches`, so that they don't stay in memory beside the result."""
    rows = pa.Table.from_batches(batches).combine_chunks()
    batches.clear()
    good, others = rows, list[pa.Table]()
    for name in (BAD, MOVED, UNAVAILABLE):
        if name in rows.column_names and good.column(name).null_count < good.num_rows:
            others.append(good.filter(pc.is_valid(good.column(name))))
            good = good.filter(good.column(name).is_null())
    if keeps_removals:
        sets = pa.array(sets_row(kinds_of(good)))
        others.append(good.filter(pc.invert(sets)))
        good = good.filter(sets)
    if not good.num_rows:
        return rows
    keys = [storage(good.column(name)) for name in key]
    kinds = kinds_of(good)
    outcome = collapse(keys, [storage(good.column(n)) for n in good.column_names if n.startswith(ORDER)], kinds)
    if len(outcome.last) > _WORTHWHILE * good.num_rows:
        return rows
    ties = tied_rows(outcome)
    if len(ties):

        def hashed(numbers: Ints) -> Ints:
            return row_hash([storage(column) for column in good.select(columns).take(pa.array(numbers)).columns])

        outcome, _ = settle(outcome, keys, ties, hashed)
    stays = np.zeros(good.num_rows, np.bool_)
    stays[outcome.last] = True
    counts = np.bincount(kinds[~stays], minlength=len(RowKind))
    left_out({kind.short: int(counts[kind]) for kind in RowKind if counts[kind]})
    last = good.filter(pa.array(stays))
    return pa.concat_tables([last, *others])
