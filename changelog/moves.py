"""Removals of a row that went to another key, and what they tell about that row.

A database that checks keys at the end of a statement writes `UPDATE t SET id = id + 1` row by row as
`-1 +2(a) | -2(b) +3(b)`. Here the removal of key 2 is about the row b, not about the row a that has just come there. So
such a removal must say which row it removes: by the columns of its image that surely have the row's values. Whoever
applies it leaves a row in place that differs in one of them (`deltawriters.moves`).

An image may have made-up values: Postgres logs only the key of an old row, unless it is told otherwise
(`REPLICA IDENTITY FULL`), and Debezium then writes 0, '' or the column's default. A made-up value is the same in all
images. So a value of an image counts

- if it is not 0 or '', the row has it also under its new key, and the image has such a value wherever that row has one;
  new rows often begin with what is made up; or
- if it is not 0 or '', other images of the batch have other such values in its column, and the image has values in most
  columns; or
- if the image has a value (not 0 or '') in each of several columns.

Only removals that are half of a move are marked. Others remove whatever row their key has, as ever. A removal surely is
half of a move if its message says so (`MOVED_AWAY`), if it is a -U, if one record has both halves, or if its row goes
on with all its values. One that only looks like half of a move is compared with rows of the same commit, not with the
table's (`_rowdelta_moved` begins with a separator).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from changelog.changes import MOVED_AWAY
from changelog.made_up import says_something, surely_logged
from changelog.rows import BAD, KIND, MOVED, MOVED_SEPARATOR, Mask, RowKind, sets_row
from changelog.spec import ChangelogSpec

Ints = npt.NDArray[np.int64]


def moved_away(raw: pa.RecordBatch) -> Mask:
    """Flags the raw records that say that they are half of a move."""
    if MOVED_AWAY not in raw.schema.names:
        return np.zeros(len(raw), np.bool_)
    return np.asarray(raw.column(MOVED_AWAY).fill_null(False))


def with_moves(
    rows: pa.Table, spec: ChangelogSpec, record: Ints, place: Ints, partition: Ints, told: Mask | None = None
) -> pa.Table:
    """Mark the removals of rows that went to another key (`_rowdelta_moved`).

    A removal is half of a move if its record says so, or if the next change of its partition sets another key, and is
    of the same record, or the other half of an update, or has half of the values of the removal's image. A -U that has
    no next change in the batch is one, too.

    :param rows: changelog rows, in which removals may have all their columns. The column `_rowdelta_moved` is null.
    :param record: the record's row number in the raw batch, for each of the rows; and `place` the change's place in it.
    :param partition: for each record a number of its partition.
    :param told: for each record whether it says that it is half of a move (`moved_away`).
    """
    kinds = rows.column(KIND).to_numpy()
    removes = ~sets_row(kinds)
    if not removes.any():
        return rows
    if rows.column(BAD).null_count < len(rows):
        removes &= rows.column(BAD).is_null().to_numpy()
    says_so = np.zeros(len(rows), np.bool_) if told is None else told[record]
    candidates, partners = _halves(rows, spec, kinds, removes, record, place, partition, says_so)
    # a removal may have an order value of its own
    ordering = {name for name, _ in spec.order_fields}
    others = {column.name for column in spec.of_messages.columns if column.field not in ordering} - set(spec.key)
    names = [field.name for field in rows.schema if field.name in others and not pa.types.is_nested(field.type)]
    if len(candidates) and names:
        known, is_move, is_certain = _known(rows, names, candidates, partners, kinds, record, says_so)
        rows = _with_texts(rows, candidates[is_move], names, known[is_move], is_certain[is_move])
    return rows


def bared(rows: pa.Table, spec: ChangelogSpec) -> pa.Table:
    """The rows, of whose removals only those with `_rowdelta_moved` have more columns than the writers read."""
    keeps = pc.or_(pa.array(sets_row(rows.column(KIND).to_numpy())), rows.column(MOVED).is_valid())
    for column in spec.columns:
        place = rows.schema.get_field_index(column.name)
        if place >= 0 and column.name not in spec.kept_by_removals:
            field = rows.schema.field(place)
            rows = rows.set_column(place, field, pc.if_else(keeps, rows.column(place), pa.scalar(None, field.type)))
    return rows


def _halves(
    rows: pa.Table,
    spec: ChangelogSpec,
    kinds: npt.NDArray[np.int8],
    removes: Mask,
    record: Ints,
    place: Ints,
    partition: Ints,
    says_so: Mask,
) -> tuple[Ints, Ints]:
    """Numbers of the removals that may be half of a move, and of the next change after each; -1 if it isn't known."""
    order = np.lexsort((place, record, partition[record]))
    here, after = order[:-1], order[1:]
    same = partition[record[here]] == partition[record[after]]
    paired = removes[here] & sets_row(kinds[after]) & same
    # a -D and a +U are no halves of one change
    paired &= (
        (kinds[here] == RowKind.UPDATE_BEFORE) | (kinds[after] == RowKind.INSERT) | (record[here] == record[after])
    )
    here, after = here[paired], after[paired]
    if len(here):
        moves = np.zeros(len(here), np.bool_)
        for name in spec.key:
            column = rows.column(name)
            moves |= pc.not_equal(column.take(pa.array(here)), column.take(pa.array(after))).to_numpy()
        here, after = here[moves], after[moves]
    ends = np.flatnonzero(np.append(~same, True)) if len(order) else order
    alone = np.zeros(len(rows), np.bool_)
    # a -D is most likely no half of anything, and what its producer writes beside the key may be no row's
    alone[order[ends]] = removes[order[ends]] & (kinds[order[ends]] == RowKind.UPDATE_BEFORE)
    alone |= removes & says_so
    alone[here] = False
    others = np.flatnonzero(alone)
    return np.concatenate([here, others]), np.concatenate([after, np.full(len(others), -1)])


def _known(
    rows: pa.Table,
    names: Sequence[str],
    removals: Ints,
    partners: Ints,
    kinds: npt.NDArray[np.int8],
    record: Ints,
    says_so: Mask,
) -> tuple[npt.NDArray[np.bool_], Mask, Mask]:
    """For each removal and column, whether the image surely has the row's value. And whether each removal is half of a
    move, and whether this is certain.
    """
    shape = len(removals), len(names)
    valid, there, moved, says, logged = (np.zeros(shape, np.bool_) for _ in range(5))
    blank = np.zeros(len(removals), np.bool_)
    is_paired = partners >= 0
    for number, name in enumerate(names):
        column = rows.column(name)
        image = column.take(pa.array(removals))
        other = column.take(pa.array(partners, mask=~is_paired))
        valid[:, number] = image.is_valid()
        there[:, number] = other.is_valid()
        moved[:, number] = pc.fill_null(pc.equal(image, other), False)
        logged[:, number] = surely_logged(image)
        says[:, number] = says_something(image)
        blank |= says_something(other) & ~says[:, number]
    told = says_so[removals]
    certain = told | (kinds[removals] == RowKind.UPDATE_BEFORE) | (record[removals] == record[partners])
    same, there_too, here = (flags.sum(axis=1) for flags in (moved, there, valid))
    alike = moved.any(axis=1) & (2 * same >= there_too)
    certain |= alike & (same == there_too) & (same == here)
    rich = (2 * here > shape[1])[:, np.newaxis]
    whole = (says.all(axis=1) & (shape[1] > 1)) | (told & (2 * says.sum(axis=1) > shape[1]))
    known = (moved & says & ~blank[:, np.newaxis]) | (logged & rich) | (says & whole[:, np.newaxis])
    return known, certain | alike, certain


def _with_texts(
    rows: pa.Table, removals: Ints, names: Sequence[str], known: npt.NDArray[np.bool_], certain: Mask
) -> pa.Table:
    # an empty name in front says that the removal isn't certain
    named = np.column_stack([~certain & known.any(axis=1), known])
    patterns, pattern = np.unique(named, axis=0, return_inverse=True)
    texts = [
        MOVED_SEPARATOR.join(name for name, flag in zip(("", *names), flags, strict=True) if flag) for flags in patterns
    ]
    numbers, mask = np.zeros(len(rows), np.int64), np.ones(len(rows), np.bool_)
    numbers[removals], mask[removals] = pattern.reshape(-1), False
    marks = pa.array([*texts, ""], pa.string()).take(pa.array(numbers, mask=mask))
    return rows.set_column(rows.schema.get_field_index(MOVED), rows.schema.field(MOVED), marks)
