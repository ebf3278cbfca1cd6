"""Changes whose NULLs say nothing (`ignore_null_updates`): the key's row keeps its values."""

from collections.abc import Collection

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from changelog.rows import (
    KIND,
    PREFIX,
    UNAVAILABLE,
    Mask,
    RowKind,
    is_bad,
    sets_row,
    unavailable_bits,
    unavailable_columns,
)


def ignore_nulls(rows: pa.RecordBatch, columns: Collection[str], further: Collection[str] = ()) -> pa.RecordBatch:
    """Make partial rows of those +I and +U that have NULL in one of the columns. They are +I: if their key has no row,
    they set one. A +U that lacks a value for another reason stays one, and is a dead letter then.

    :param rows: changelog rows, with `_rowdelta_unavailable`.
    :param further: columns after those of the table.
    """
    sets, bad = sets_row(rows.column(KIND).to_numpy()), is_bad(rows)
    if bad is not None:
        sets &= ~bad.to_numpy(zero_copy_only=False)
    names = [name for name in rows.schema.names if not name.startswith(PREFIX) and name not in further]
    lacks = [_nulls(rows.column(name)) & sets if name in columns else np.zeros(len(rows), np.bool_) for name in names]
    ignores = np.logical_or.reduce(lacks)
    if not ignores.any():
        return rows
    before = rows.column(UNAVAILABLE)
    is_partial = pc.greater(pc.fill_null(pc.binary_length(before), 0), 0).to_numpy(zero_copy_only=False)
    if is_partial.any():
        known = unavailable_columns(before.filter(pa.array(is_partial)), len(names))
        for number, flags in enumerate(lacks):
            flags[is_partial] |= known[:, number]
    kinds = pc.if_else(pa.array(ignores & ~is_partial), pa.scalar(int(RowKind.INSERT), pa.int8()), rows.column(KIND))
    rows = rows.set_column(rows.schema.get_field_index(KIND), rows.schema.field(KIND), kinds)
    bits = unavailable_bits(lacks, ignores | is_partial)
    return rows.set_column(
        rows.schema.get_field_index(UNAVAILABLE),
        rows.schema.field(UNAVAILABLE),
        pc.if_else(pa.array(ignores | is_partial), bits, before),
    )


def _nulls(values: pa.Array) -> Mask:
    flags: Mask = values.is_null().to_numpy(zero_copy_only=False).copy()
    return flags
