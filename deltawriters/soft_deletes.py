"""Soft deletes: a removal marks the row of its key as deleted, and all its other values stay.

So a removal is a partial row (`changelog.rows`): it has the key, the order, and the columns of `SoftDelete`. Whatever
reads the old row for partial rows does it for removals too. A removal whose flag isn't set is none of the source's: the
table doesn't want the row (`changelog.wanted`), so it goes.
"""

import pyarrow as pa
import pyarrow.compute as pc

from changelog.rows import BAD, KIND, PREFIX, UNAVAILABLE, SoftDelete, sets_row, unavailable_bits


def as_partial(changes: pa.RecordBatch, soft: SoftDelete, key: tuple[str, ...]) -> pa.RecordBatch:
    """The changes, with the removals of the source as partial rows.

    :param changes: changelog rows without bad records, with the columns of `soft`.
    """
    names = changes.schema.names
    if UNAVAILABLE not in names:
        changes = changes.append_column(pa.field(UNAVAILABLE, pa.binary()), pa.nulls(len(changes), pa.binary()))
    if BAD not in names:
        changes = changes.append_column(pa.field(BAD, pa.struct([])), pa.nulls(len(changes), pa.struct([])))
    removes = ~sets_row(changes.column(KIND).to_numpy(zero_copy_only=False))
    removes &= pc.fill_null(changes.column(soft.column), False).to_numpy(zero_copy_only=False)
    if not removes.any():
        return changes
    has = {*key, *soft.columns, *soft.order.values()}
    columns = [name for name in names if not name.startswith(PREFIX)]
    bits = unavailable_bits([None if name in has else removes for name in columns], removes)
    place, field = changes.schema.get_field_index(UNAVAILABLE), changes.schema.field(UNAVAILABLE)
    return changes.set_column(place, field, pc.coalesce(bits, changes.column(UNAVAILABLE)))
