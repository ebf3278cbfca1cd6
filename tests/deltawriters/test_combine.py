"""Combining changes before the shuffle doesn't change the table: the delta writer makes the same rows from the changes
that are left.
"""

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from changelog.rows import BAD, BAD_FIELDS, KIND, RowKind, order_column
from deltawriters.combine import combined

ORDER = order_column(0)
BAD_TYPE = pa.struct([(name, pa.string()) for name in BAD_FIELDS])
COLUMNS = ("id", "name")

Change = tuple[RowKind, int, int | None, str | None]


def batch(changes: list[Change], reason: str | None = None) -> pa.RecordBatch:
    """Changelog rows of (kind, order, id, name); bad ones if there is a reason."""
    bad = None if reason is None else {"reason": reason}
    return pa.RecordBatch.from_pydict(
        {
            KIND: pa.array([int(kind) for kind, _, _, _ in changes], pa.int8()),
            ORDER: pa.array([order for _, order, _, _ in changes], pa.int64()),
            BAD: pa.array([bad] * len(changes), BAD_TYPE),
            "id": pa.array([number for _, _, number, _ in changes], pa.int64()),
            "name": pa.array([name for _, _, _, name in changes], pa.string()),
        }
    )


def run(batches: list[pa.RecordBatch], buffer_bytes: int = 1 << 30) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """The rows that are left, and how many were left out by kind."""
    counts: dict[str, int] = {}

    def left_out(found: dict[str, int]) -> None:
        for kind, count in found.items():
            counts[kind] = counts.get(kind, 0) + count

    out = list(combined(batches, ["id"], COLUMNS, left_out, buffer_bytes))
    assert all(found.schema == batches[0].schema for found in out)
    return [row for found in out for row in found.to_pylist()], counts


def test_the_last_change_of_a_key_is_left() -> None:
    changes: list[Change] = [
        (RowKind.INSERT, 1, 1, "a"),
        (RowKind.UPDATE_BEFORE, 2, 1, "a"),
        (RowKind.UPDATE_AFTER, 2, 1, "b"),
        (RowKind.INSERT, 3, 2, "x"),
        (RowKind.DELETE, 4, 2, None),
        (RowKind.UPDATE_AFTER, 0, 1, "older, and late"),
    ]
    rows, counts = run([batch(changes[:2]), batch(changes[2:])])
    assert sorted((row["id"], row[KIND], row["name"]) for row in rows) == [
        (1, RowKind.UPDATE_AFTER, "b"),
        (2, RowKind.DELETE, None),
    ]
    assert counts == {"+I": 2, "-U": 1, "+U": 1}


def test_bad_records_are_all_left() -> None:
    good: list[Change] = [(RowKind.INSERT, order, 1, "a") for order in range(10)]
    bad: list[Change] = [(RowKind.DELETE, 0, None, None)] * 3
    rows, counts = run([batch(good), batch(bad, "why"), batch(good)])
    assert [row["id"] for row in rows if row[BAD] is None] == [1]
    assert [row[BAD]["reason"] for row in rows if row[BAD] is not None] == ["why"] * 3
    assert counts == {"+I": 19}
    assert run([batch(bad, "why")]) == (batch(bad, "why").to_pylist(), {})
    assert run([batch([])]) == ([], {})


def test_where_keys_hardly_repeat_rows_go_through_as_they_came() -> None:
    """After the first buffer that doesn't pay, all later changes pass, even if combining them would pay."""
    batches = [batch([(RowKind.INSERT, 1, number, "a") for number in range(start, start + 10)]) for start in (0, 10)]
    batches += [batch([(RowKind.INSERT, order, 7, "a") for order in range(10)])] * 2
    rows, counts = run(batches, buffer_bytes=1)
    assert len(rows) == 40
    assert counts == {}


@pytest.mark.parametrize("ties", [False, True])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_combining_twice_or_not_at_all_ends_the_same(ties: bool, data: st.DataObject) -> None:
    """The result doesn't depend on how changes are cut into tasks: combining again after the shuffle gives the same as
    combining all changes at once.
    """
    kinds = st.sampled_from(list(RowKind))
    names = st.sampled_from(["a", "b", "c", None])
    drawn = data.draw(
        st.lists(st.tuples(kinds, st.integers(0, 3 if ties else 10**9), st.integers(0, 2), names), min_size=1)
    )
    removals = (RowKind.DELETE, RowKind.UPDATE_BEFORE)
    changes: list[Change] = [(kind, order, key, None if kind in removals else name) for kind, order, key, name in drawn]
    if not ties:
        changes = list({(change[1], change[2]): change for change in changes}.values())
    cut = data.draw(st.integers(0, len(changes)))
    # enough of the same that combining always pays
    padding: list[Change] = [(RowKind.INSERT, -1, -1, "x")] * 500
    whole, counts = run([batch(changes + padding)])
    parts = [run([batch(part + padding)]) for part in (changes[:cut], data.draw(st.permutations(changes[cut:])))]
    again, more = run(
        [batch([(RowKind(r[KIND]), r[ORDER], r["id"], r["name"]) for rows, _ in parts for r in rows] + padding)]
    )

    def seen(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
        sets = (RowKind.INSERT, RowKind.UPDATE_AFTER)
        # +I and +U of one content are the same to a table
        return sorted((row["id"], row[KIND] in sets, row["name"] or "") for row in rows)

    assert seen(again) == seen(whole)
    assert sum(counts.values()) + len(whole) == len(changes) + 500
    assert sum(sum(c.values()) for _, c in parts) + sum(more.values()) + len(again) == len(changes) + 1500
