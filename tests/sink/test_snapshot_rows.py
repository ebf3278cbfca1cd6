"""Which rows of a snapshot would be written twice, and which rows were streamed, in whatever order a task gets them."""

from collections.abc import Sequence

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from changelog.rows import SNAPSHOT, order_column
from sink.spark.snapshots import SnapshotRows

Message = str
"""`r`: of a snapshot. `c`: streamed. `t`: a TRUNCATE."""


def batch(places: Sequence[int], kinds: Sequence[Message], text: bool) -> pa.RecordBatch:
    """Rows of these places in the topic's only partition. The first order column has nulls, which come first."""
    names = [None if place < 2 else f"{place:03}" if text else place for place in places]
    return pa.RecordBatch.from_pydict(
        {
            order_column(0): pa.array(names, pa.string() if text else pa.int64()),
            order_column(1): pa.array([3] * len(places), pa.int32()),
            order_column(2): pa.array([place * 8 for place in places], pa.int64()),
            SNAPSHOT: pa.array([kind == "r" for kind in kinds], pa.bool_()),
        }
    )


def told(messages: Sequence[Message], batches: Sequence[Sequence[int]], text: bool = False) -> tuple[bool, bool, bool]:
    """Whether there are rows of a snapshot, other rows, and rows of a snapshot after these.

    :param batches: the places of the messages, as a task gets them.
    """
    found = SnapshotRows(order_column(1), order_column(2), may_truncate="t" in messages)
    for places in batches:
        for is_truncate in (False, True):
            chosen = [place for place in places if (messages[place] == "t") == is_truncate]
            if chosen:
                rows = batch(chosen, [messages[place] for place in chosen], text)
                found.truncate(rows.drop_columns([SNAPSHOT])) if is_truncate else found.add(rows)
    assert found.snapshot_partitions | found.streamed_partitions <= {3}
    last, first = found.last_snapshot, found.first_streamed
    assert last.keys() | first.keys() <= {3}
    is_repeated = 3 in last and 3 in first and first[3] < last[3]
    return bool(found.snapshot_partitions), bool(found.streamed_partitions), is_repeated


@given(st.data(), st.text("rct", max_size=8), st.booleans())
def test_a_truncate_makes_way_for_what_follows_it(data: st.DataObject, messages: str, text: bool) -> None:
    places = data.draw(st.permutations(range(len(messages))))
    cut = data.draw(st.integers(0, len(messages)))
    until_first, _, _ = messages.partition("t")
    since_last = messages.rpartition("t")[2]
    assert told(messages, [places[:cut], places[cut:]], text) == (
        "r" in until_first,
        "c" in since_last,
        "r" in since_last.partition("c")[2],
    )


@pytest.mark.parametrize("may_truncate", [False, True])
def test_partitions_are_told_apart(may_truncate: bool) -> None:
    """A snapshot of one partition may come when another one has been streamed for long."""
    found = SnapshotRows(order_column(1), order_column(2), may_truncate=may_truncate)
    streamed, snapshot = batch([0, 1], "cc", text=False), batch([2, 3], "rr", text=False)
    found.add(snapshot)
    found.add(streamed.set_column(1, order_column(1), pa.array([4, 3], pa.int32())))
    assert found.last_snapshot == {3: 24}
    assert found.first_streamed == {3: 8, 4: 0}
