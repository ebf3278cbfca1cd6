"""Which removals are half of a key change, and what they tell about their rows, in Debezium's events."""

import itertools
from typing import Any

import pyarrow as pa
import pytest

from changelog.changes import MOVED_AWAY
from changelog.decoding import ChangelogDecoder
from changelog.rows import KIND, MOVED, MOVED_SEPARATOR, RowKind
from tests.changelog.messages import Message, raw_records, spec

TABLE = spec({"id": "bigint", "name": "string", "size": "int"})
KNOWN = MOVED_SEPARATOR.join(("name", "size"))


def decoded(*events: tuple[int, Any, bool | None], parts: tuple[int, ...] = ()) -> list[tuple[str, int, str | None]]:
    """Kind, key and mark of the removals of one partition's messages.

    :param events: key, value, and whether a header says that the row goes on.
    :param parts: where batches end.
    """
    records = raw_records([Message(value, n, {"id": key}) for n, (key, value, _) in enumerate(events)])
    records = records.append_column(MOVED_AWAY, pa.array([told for *_, told in events], pa.bool_()))
    borders = [0, *parts, len(events)]
    batches = [records.slice(start, end - start) for start, end in itertools.pairwise(borders)]
    rows = pa.Table.from_batches(ChangelogDecoder("debezium-json", TABLE)(batches))
    found = zip(*(rows.column(name).to_pylist() for name in (KIND, "id", MOVED)), strict=True)
    return [(RowKind(kind).short, key, mark) for kind, key, mark in found if kind in (RowKind.DELETE, 0)]


def removed(key: int, name: str | None, size: int | None) -> dict[str, Any]:
    return {"op": "d", "before": {"id": key, "name": name, "size": size}, "after": None}


def created(key: int, name: str, size: int) -> dict[str, Any]:
    return {"op": "c", "before": None, "after": {"id": key, "name": name, "size": size}}


@pytest.mark.parametrize("after", [[], [(5, created(5, "e", 9), None)], [(8, removed(8, "z", 1), None)]])
def test_a_delete_that_says_so_is_half_of_a_move(after: list[Any]) -> None:
    """Its other half is in another partition, or in another micro-batch."""
    assert ("-D", 2, KNOWN) in decoded((2, removed(2, "b", 7), True), *after)
    assert ("-D", 2, None) in decoded((2, removed(2, "b", 7), None), *after)


def test_values_that_may_be_made_up_tell_nothing() -> None:
    assert decoded((2, removed(2, None, None), True)) == [("-D", 2, "")]
    assert decoded((2, removed(2, "", 0), True)) == [("-D", 2, "")]


def test_its_tombstone_deletes_nothing() -> None:
    move = [(2, removed(2, "b", 7), True), (2, None, True), (3, created(3, "b", 7), None)]
    assert decoded(*move) == [("-D", 2, KNOWN)]
    assert decoded(*move, parts=(1,)) == [("-D", 2, KNOWN)]
    assert decoded(*move[1:]) == []  # the delete was in another micro-batch
    assert decoded(*move[:2], move[1]) == [("-D", 2, KNOWN)]  # its producer sent it twice
    # compaction has removed the delete
    assert decoded((7, created(7, "x", 1), None), *move[1:]) == [("-D", 2, None)]
    assert decoded((7, created(7, "x", 1), None), *move[1:], parts=(1,)) == [("-D", 2, None)]
    # nothing says so
    assert decoded((2, None, None)) == [("-D", 2, None)]


def test_what_only_looks_like_a_move_says_so() -> None:
    other = (3, created(3, "b", 9), None)
    assert decoded((2, removed(2, "b", 7), None), other) == [("-D", 2, MOVED_SEPARATOR + KNOWN)]
    assert decoded((2, removed(2, "b", 7), None), (3, created(3, "b", 7), None)) == [("-D", 2, KNOWN)]
    assert decoded((2, removed(2, "b", 7), True), other) == [("-D", 2, KNOWN)]
