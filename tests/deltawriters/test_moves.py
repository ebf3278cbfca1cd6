"""Removals of rows that went to another key, in the delta writer, against a plain model: whatever the order in which
the source says the halves of moves, the flushes, the commits and the arrival.
"""

import itertools
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import types as T

from changelog.changes import MOVED_AWAY
from changelog.decoding import ChangelogDecoder
from changelog.moves import with_moves
from changelog.rows import BAD, HASH, KIND, MOVED, RowKind, SoftDelete, known_columns, order_column, sets_row
from changelog.spec import ChangelogSpec
from deltawriters import DeltaOptions, DeltaWriter, TaskId, WriteResult
from deltawriters.combine import combined
from deltawriters.keyindex import IndexSlice, RunInfo, high_hash
from deltawriters.moves import are_about_others
from deltawriters.resolve import IndexTask, delete_rows
from deltawriters.scratch import Scratch
from tests.changelog.messages import Message, messages, raw_records, spec
from tests.deltawriters.lake import Lake
from tests.deltawriters.test_partial import BAD_TYPE, BY_REGION, SCHEMA, UNPARTITIONED, table_at

ORDER = order_column(0)
SPEC = spec({"id": "bigint", "region": "string", "note": "string"})
COLUMNS = ("id", "region", "note")

Row = tuple[int, str | None, str | None]
Change = tuple[RowKind, Row]
U, N, V, D = RowKind.UPDATE_BEFORE, RowKind.INSERT, RowKind.UPDATE_AFTER, RowKind.DELETE


def decoded(changes: Sequence[Change], first: int = 0, table: ChangelogSpec = SPEC) -> pa.RecordBatch:
    """Changes in the order of their source, as decoders give them to writers."""
    count = len(changes)
    columns: dict[str, pa.Array] = {
        KIND: pa.array([int(kind) for kind, _ in changes], pa.int8()),
        ORDER: pa.array(range(first, first + count), pa.int64()),
        BAD: pa.nulls(count, BAD_TYPE),
        MOVED: pa.nulls(count, pa.string()),
    }
    columns |= {
        name: pa.array([row[n] for _, row in changes], pa.int64() if n == 0 else pa.string())
        for n, name in enumerate(COLUMNS)
    }
    numbers, zeros = np.arange(count), np.zeros(count, np.int64)
    columns["tags"] = pa.nulls(count, pa.list_(pa.string()))
    rows = with_moves(pa.table(columns), table, numbers, zeros, zeros)
    (batch,) = rows.combine_chunks().to_batches()
    return batch.append_column(HASH, pa.array(high_hash([batch.column("id")]).view(np.int64)))


class Table:
    """A table with the commits of one task, with a key index or with equality deletes."""

    def __init__(self, folder: str, layout: str = UNPARTITIONED, *, indexed: bool = True, mode: Any = "upsert") -> None:
        self.spec = table_at(folder, layout, 3 if indexed else 2)
        self.lake = Lake(self.spec)
        self.runs: tuple[RunInfo, ...] = ()
        self.indexed = indexed
        self.mode = mode

    def commit(self, *batches: pa.RecordBatch, flush_bytes: int = 1 << 20, **more: Any) -> WriteResult:
        number = len(self.lake.snapshots) + 1
        index = None
        if self.indexed:
            slice_ = IndexSlice(self.spec.location, (), self.runs, {})
            index = IndexTask(slice_, 0, 2**64, number, f"run{number}")
        options = DeltaOptions(("id",), self.mode, number == 1, flush_bytes=flush_bytes, **more)
        writer = DeltaWriter(self.spec, options, TaskId(0, number, "op"), index)
        for changes in batches:
            changes = changes.drop_columns([BAD])
            writer.write(changes if self.indexed else changes.drop_columns([HASH]))
        result = writer.close()
        deletes = []
        if result.index is not None:
            deletes = delete_rows(
                self.spec, TaskId(1, number, "old"), result.index.old_rows, Scratch("t", lambda _: self.spec.io)
            )
            self.runs += tuple(result.index.runs)
        self.lake.commit([*result.files, *deletes])
        return result

    def rows(self) -> list[Row]:
        return sorted((row["id"], row["region"], row["note"]) for row in self.lake.rows())


def row(key: int, other: int) -> Row:
    return key, "abc"[other % 3], f"n{other}"


def shifted(count: int) -> list[Change]:
    """`UPDATE t SET id = id + 1` on rows 1 to `count`, keys checked at its end."""
    return [change for n in range(1, count + 1) for change in ((U, row(n, n)), (V, row(n + 1, n)))]


def inserted(count: int) -> list[Change]:
    return [(N, row(n, n)) for n in range(1, count + 1)]


@pytest.mark.parametrize("flush_bytes", [1, 1 << 20])
def test_a_shift_with_soft_deletes(tmp_path: Any, flush_bytes: int) -> None:
    """Only the key that no other row has come to is marked as deleted."""
    table = Table(str(tmp_path))
    gone = '{"id":6,"name":"gone","required":false,"type":"boolean"}'
    table.spec = replace(table.spec, schema=SCHEMA.replace("]}", f",{gone}]}}"))
    table.lake = Lake(table.spec)

    def marked(changes: pa.RecordBatch) -> pa.RecordBatch:
        return changes.append_column("gone", pa.array(~sets_row(changes.column(KIND).to_numpy())))

    table.commit(marked(decoded(inserted(5))))
    result = table.commit(marked(decoded(shifted(5), 100)), flush_bytes=flush_bytes, soft_delete=SoftDelete("gone"))
    assert table.rows() == [row(1, 1), *(row(n + 1, n) for n in range(1, 6))]
    assert {found["id"] for found in table.lake.rows() if found["gone"]} == {1}
    assert result.moves.left == 4


@pytest.mark.parametrize("mode", ["upsert", "changelog"])
@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("layout", [UNPARTITIONED, BY_REGION])
@pytest.mark.parametrize("flush_bytes", [1, 1 << 20])
def test_a_shift(tmp_path: Any, mode: str, indexed: bool, layout: str, flush_bytes: int) -> None:
    table = Table(str(tmp_path), layout, indexed=indexed, mode=mode)
    table.commit(decoded(inserted(5)))
    result = table.commit(decoded(shifted(5), 100), flush_bytes=flush_bytes)
    assert table.rows() == [row(n + 1, n) for n in range(1, 6)]
    assert result.moves.left == 4


@pytest.mark.parametrize("kinds", [(U, V), (D, N)])
def test_a_shift_whose_halves_are_in_different_commits(tmp_path: Any, kinds: tuple[RowKind, RowKind]) -> None:
    table = Table(str(tmp_path))
    table.commit(decoded(inserted(5)))
    changes = [(kinds[0] if kind is U else kinds[1], found) for kind, found in shifted(5)]
    marked = decoded(changes, 100)
    for start in range(0, 10, 3):
        table.commit(marked.slice(start, 3))
    assert table.rows() == [row(n + 1, n) for n in range(1, 6)]
    table.commit(marked.slice(6))  # a source that starts again says the end once more
    assert table.rows() == [row(n + 1, n) for n in range(1, 6)]


def test_a_swap_by_a_third_key_removes_it(tmp_path: Any) -> None:
    """Each step is right by itself: `-1` has the row that goes on from there."""
    table = Table(str(tmp_path))
    table.commit(decoded(inserted(2)))
    a, b = row(1, 1), row(2, 2)
    steps = [(U, a), (V, (-1, *a[1:])), (U, b), (V, (1, *b[1:])), (U, (-1, *a[1:])), (V, (2, *a[1:]))]
    table.commit(decoded(steps, 100))
    assert table.rows() == [(1, *b[1:]), (2, *a[1:])]


def test_images_of_the_key_only_remove_whatever_is_there(tmp_path: Any) -> None:
    """Postgres logs the key of the old row, and the connector makes the other values up."""
    table = Table(str(tmp_path))
    table.commit(decoded(inserted(1)))
    made_up = ("new", "")
    chain = [(U, (1, *made_up)), (V, (7, "b", "n1")), (U, (7, *made_up)), (V, (8, "new", "n1")), (D, (8, *made_up))]
    table.commit(decoded([*chain, (N, (9, "a", "b")), (D, (9, *made_up))], 100))
    assert table.rows() == []


def test_a_removal_with_a_value_of_its_own_removes_the_row(tmp_path: Any) -> None:
    """A producer that writes the key and the time of the removal, though the whole row is asked for."""
    table = Table(str(tmp_path))
    table.commit(
        decoded([(N, (1, "eu", "10:00")), (D, (1, None, "10:05")), (N, (2, "eu", "10:07")), (D, (2, None, "10:09"))])
    )
    assert table.rows() == []


def test_a_removal_with_an_order_value_of_its_own_removes_the_row(tmp_path: Any) -> None:
    """The table stores its order column, and a removal has the number or time of the removal there."""
    table = Table(str(tmp_path))
    by_note = replace(SPEC, order_by=(("note", T.StringType()),))
    table.commit(decoded([(N, (1, "eu", "seq 1")), (N, (2, "eu", "seq 2"))]))
    table.commit(decoded([(D, (1, "eu", "seq 3")), (N, (3, "eu", "seq 4")), (D, (2, "eu", "seq 5"))], 100, by_note))
    assert table.rows() == [(3, "eu", "seq 4")]


@pytest.mark.parametrize("made_up", [(None, ""), ("", ""), ("", None)])
def test_a_delete_with_made_up_values_comes_before_a_new_row_of_defaults(
    tmp_path: Any, made_up: tuple[str | None, str | None]
) -> None:
    """What the connector makes up is what new rows begin with: 0, '' or NULL."""
    table = Table(str(tmp_path))
    table.commit(decoded([(N, (1, "eu", "paid"))]))
    table.commit(decoded([(D, (1, *made_up)), (N, (2, *made_up))], 100))
    assert table.rows() == [(2, *made_up)]


class Source:
    """A table of a database that checks keys at the end of a statement, and its log."""

    def __init__(self) -> None:
        self.rows: dict[int, Row] = {}
        self.log: list[list[Change]] = []
        self._numbers = iter(range(1 << 30))

    def say(self, verb: str, key: int, other: int) -> None:
        said: list[Change] = []
        if verb == "set":
            new = row(key, next(self._numbers))
            old = self.rows.get(key)
            said = [(N, new)] if old is None else [(U, old), (V, new)]
            self.rows[key] = new
        elif verb == "delete" and key in self.rows:
            said = [(D, self.rows.pop(key))]
        elif verb == "move" and key in self.rows and other not in self.rows:
            said = self._moves({key: other})
        elif verb == "swap" and key in self.rows and other in self.rows and key != other:
            said = self._moves({key: other, other: key})
        elif verb == "shift":
            said = self._moves({n: n + 1 for n in self.rows})
        if said:
            self.log.append(said)

    def _moves(self, moves: dict[int, int]) -> list[Change]:
        halves = (U, V) if next(self._numbers) % 2 else (D, N)
        old = dict(self.rows)
        new = {to: (to, *old[key][1:]) for key, to in moves.items()}
        self.rows = {key: found for key, found in old.items() if key not in moves} | new
        return [change for key, to in moves.items() for change in ((halves[0], old[key]), (halves[1], new[to]))]


OPERATIONS = st.tuples(
    st.sampled_from(["set", "set", "delete", "move", "swap", "shift"]), st.integers(0, 3), st.integers(0, 4)
)


@given(st.data(), st.lists(OPERATIONS, min_size=1, max_size=14))
@settings(max_examples=150, deadline=None)
def test_any_moves(data: st.DataObject, operations: list[tuple[str, int, int]]) -> None:
    source = Source()
    for operation in operations:
        source.say(*operation)
    changes = [change for statement in source.log for change in statement]
    if not changes:
        return
    mode = data.draw(st.sampled_from(["upsert", "changelog"]))
    layout = data.draw(st.sampled_from([UNPARTITIONED, BY_REGION]))
    indexed = data.draw(st.booleans())
    with tempfile.TemporaryDirectory() as folder:
        table = Table(folder, layout, indexed=indexed, mode=mode)
        marked = decoded(changes)
        # without an index, nothing finds the row of an earlier commit: there a statement must be in one commit
        ends = np.cumsum([len(statement) for statement in source.log]).tolist()
        cuts = data.draw(st.sets(st.sampled_from(list(range(1, len(changes) + 1)) if indexed else ends)))
        borders = [0, *sorted(cuts - {len(changes)}), len(changes)] if changes else []
        for start, end in itertools.pairwise(borders):
            share = marked.slice(start, end - start)
            arriving = data.draw(st.permutations(range(len(share))))
            size = data.draw(st.integers(1, 8))
            flush = data.draw(st.sampled_from([1, 200, 1 << 20]))
            parts = pa.Table.from_batches([share.take(pa.array(arriving))]).combine_chunks().to_batches(size)
            if mode == "upsert" and data.draw(st.booleans()):
                parts = list(combined(parts, ("id",), (*COLUMNS, "tags"), lambda _: None, 1))
            table.commit(*parts, flush_bytes=flush)
        assert table.rows() == sorted(source.rows.values())


@pytest.mark.parametrize("columns", [("id", "v"), ("id", "v", "note")])
def test_moves_in_a_table_that_is_partitioned_by_its_only_other_column(columns: tuple[str, ...]) -> None:
    def image(key: int, value: str) -> dict[str, Any]:
        return {name: {"id": key, "v": value}.get(name, "n" + value) for name in columns}

    moves = [(1, 2, "a"), (2, 3, "b")]
    events = [{"op": "u", "before": image(old, v), "after": image(new, v)} for old, new, v in moves]
    table = spec(dict.fromkeys(columns, "string") | {"id": "bigint"}, partition_sources=("v",))
    (rows,) = ChangelogDecoder("debezium-json", table)([raw_records(messages(*events))])
    removals = rows.filter(pc.equal(rows.column(KIND), int(U)))
    assert [set(known_columns(mark)) for mark in removals.column(MOVED).to_pylist()] == [set(columns) - {"id"}] * 2


def test_a_float_that_became_a_double_is_the_same_value() -> None:
    """Rows from before the column was widened have 0.1 as the nearest float."""
    values = [0.1, -0.0, float("nan"), 1e300, 2.5]
    removals = pa.table({"v": pa.array(values), MOVED: ["v"] * 5})
    rows = pa.table({"v": pa.array([*values[:3], float("inf"), 2.25], pa.float32()).cast(pa.float64())})
    assert are_about_others(removals, rows).tolist() == [False, False, False, False, True]


@pytest.mark.parametrize("between", [[], [None], [{"schema": None, "payload": None}], [None, {"op": "m"}]])
def test_what_changes_no_row_may_be_between_the_halves_of_a_move(between: list[Any]) -> None:
    values: list[Any] = []
    for old, new, v in [(1, 2, "a"), (2, 3, "a")]:
        values += [{"op": "d", "before": {"id": old, "v": v}}, *between, {"op": "c", "after": {"id": new, "v": v}}]
    keys = itertools.chain.from_iterable([[{"id": key}] * (1 + len(between)) + [None] for key in (1, 2)])
    said = [replace(found, key=key) for found, key in zip(messages(*values), keys, strict=True)]
    (rows,) = ChangelogDecoder("debezium-json", spec({"id": "bigint", "v": "string"}))([raw_records(said)])
    removals = rows.filter(pc.equal(rows.column(KIND), int(D)))
    assert removals.column(MOVED).to_pylist() == ["v", "v"]


def test_what_only_looks_like_a_move_is_not_compared_with_the_table(tmp_path: Any) -> None:
    """The table's row isn't the source's any more: another writer has changed it."""
    table = Table(str(tmp_path))
    table.commit(decoded([(N, (1, "eu", "another writer's"))]))
    table.commit(decoded([(D, (1, "eu", "a")), (N, (2, "eu", "b"))], 100))
    assert table.rows() == [(2, "eu", "b")]
    # but with what the same commit set: this may be a swap whose rows change too
    table.commit(decoded([(N, (1, "eu", "b")), (D, (1, "eu", "a")), (N, (3, "eu", "c"))], 200))
    assert table.rows() == [(1, "eu", "b"), (2, "eu", "b"), (3, "eu", "c")]


PARTITIONS = 3


def debezium(source: Source, twice: int) -> list[tuple[Message, bool]]:
    """A source's log as Debezium's messages, one of them twice, and whether a header says that the row goes on."""
    said: list[tuple[int, Any, bool]] = []

    def image(found: Row) -> dict[str, Any]:
        return dict(zip(COLUMNS, found, strict=True))

    for statement in source.log:
        changes = iter(statement)
        for kind, found in changes:
            removes = kind in (U, D)
            _, to = next(changes) if kind is U or (removes and len(statement) > 1) else (None, None)
            if to is not None and to[0] == found[0]:
                said.append((to[0], {"op": "u", "before": image(found), "after": image(to)}, False))
                continue
            if removes:
                said.append((found[0], {"op": "d", "before": image(found), "after": None}, to is not None))
                said.append((found[0], None, to is not None))
            created = to if removes else found
            if created is not None:
                said.append((created[0], {"op": "c", "before": None, "after": image(created)}, False))
    said.insert(twice % len(said), said[twice % len(said)])
    offsets = [itertools.count() for _ in range(PARTITIONS)]
    return [
        (Message(value, next(offsets[key % PARTITIONS]), {"id": key}, key % PARTITIONS), told)
        for key, value, told in said
    ]


@given(st.data(), st.lists(OPERATIONS, min_size=1, max_size=14))
@settings(max_examples=150, deadline=None)
def test_any_moves_in_a_topic_with_partitions(data: st.DataObject, operations: list[tuple[str, int, int]]) -> None:
    """The halves of a move are in different partitions, and each partition's part of a micro-batch ends anywhere."""
    source = Source()
    for operation in operations:
        source.say(*operation)
    if not source.log:
        return
    said = debezium(source, data.draw(st.integers(0, 99)))
    parts = [[found for found in said if found[0].partition == number] for number in range(PARTITIONS)]
    layout = data.draw(st.sampled_from([UNPARTITIONED, BY_REGION]))
    with tempfile.TemporaryDirectory() as folder:
        table = Table(folder, layout)
        while any(parts):
            batches = []
            for number, left in enumerate(parts):
                count = data.draw(st.integers(0 if sum(map(bool, parts)) > 1 else min(1, len(left)), len(left)))
                read, parts[number] = left[:count], left[count:]
                batches += [_read(read)] if read else []
            if batches:
                table.commit(*batches, flush_bytes=data.draw(st.sampled_from([1, 1 << 20])))
        assert table.rows() == sorted(source.rows.values())


def _read(said: list[tuple[Message, bool]]) -> pa.RecordBatch:
    """What one task makes of messages."""
    records = raw_records([message for message, _ in said])
    records = records.append_column(MOVED_AWAY, pa.array([told for _, told in said]))
    (rows,) = ChangelogDecoder("debezium-json", SPEC)([records])
    rows = rows.append_column("tags", pa.nulls(len(rows), pa.list_(pa.string())))
    return rows.append_column(HASH, pa.array(high_hash([rows.column("id")]).view(np.int64)))


Told = tuple[int, int, Any, bool | None]
"""Offset, key, value, and whether the headers say that the row goes on."""


def _image(key: int, region: str | None, note: str | None) -> dict[str, Any]:
    return {"id": key, "region": region, "note": note}


def _sets(offset: int, key: int, region: str, note: str) -> Told:
    return offset, key, {"op": "c", "before": None, "after": _image(key, region, note)}, None


def _leaves(offset: int, key: int, region: str | None, note: str, told: bool | None = True) -> Told:
    return offset, key, {"op": "d", "before": _image(key, region, note), "after": None}, told


def _changes_key(offset: int, old: tuple[int, str, str], new: tuple[int, str, str]) -> Told:
    return offset, new[0], {"op": "u", "before": _image(*old), "after": _image(*new)}, None


def _commit(table: Table, *events: Told) -> None:
    records = raw_records([Message(value, offset, {"id": key}) for offset, key, value, _ in events])
    records = records.append_column(MOVED_AWAY, pa.array([told for *_, told in events], pa.bool_()))
    rows = pa.Table.from_batches(ChangelogDecoder("debezium-json", SPEC)([records])).combine_chunks()
    (batch,) = rows.to_batches()
    batch = batch.append_column("tags", pa.nulls(len(batch), pa.list_(pa.string())))
    table.commit(batch.append_column(HASH, pa.array(high_hash([batch.column("id")]).view(np.int64))))


@pytest.mark.parametrize(
    ("stored", "changes"),
    [
        (
            (2, "a", '{"a": 1}'),
            [_leaves(10, 2, "a", '{"a":1}'), (11, 2, None, True), _sets(12, 10, "a", '{"a":1}')],
        ),
        ((2, "a", '{"a": 1}'), [_changes_key(10, (2, "a", '{"a":1}'), (10, "a", '{"a":1}'))]),
        ((2, "a", '{"a": 1}'), [_leaves(10, 2, "a", '{"a":1}', told=None), _sets(12, 10, "a", '{"a":1}')]),
        (
            (2, "12.50", "3.00"),
            [_leaves(10, 2, "0.00", "0.00"), (11, 2, None, True), _sets(12, 10, "12.50", "3.00")],
        ),
        ((2, "12.50", "3.00"), [_changes_key(10, (2, "0.00", "0.00"), (10, "12.50", "3.00"))]),
    ],
)
def test_other_spellings_and_made_up_texts_are_no_other_row(tmp_path: Any, stored: Row, changes: list[Told]) -> None:
    table = Table(str(tmp_path))
    _commit(table, _sets(0, *stored))  # type: ignore[arg-type]
    _commit(table, *changes)
    last = changes[-1][2]["after"]
    assert table.rows() == [(10, last["region"], last["note"])]


def test_images_of_the_key_only_beside_whole_ones(tmp_path: Any) -> None:
    """After ALTER TABLE … REPLICA IDENTITY FULL, or from shards of which some have it."""
    table = Table(str(tmp_path))
    _commit(table, _sets(0, 2, "a", "n2"), _sets(1, 5, "b", "n5"))
    of_the_key = [_leaves(10, 2, "", ""), (11, 2, None, True), _sets(12, 20, "a", "n2")]
    _commit(table, *of_the_key, _leaves(13, 5, "b", "n5"), (14, 5, None, True), _sets(15, 50, "b", "n5"))
    assert table.rows() == [(20, "a", "n2"), (50, "b", "n5")]


@pytest.mark.parametrize("tombstone", [14, 15], ids=["next to its delete", "after the mark of a transaction"])
def test_the_tombstone_of_a_row_that_goes_on(tmp_path: Any, tombstone: int) -> None:
    table = Table(str(tmp_path))
    _commit(table, _sets(0, 1, "a", "n1"), _sets(1, 2, "b", "n2"))
    first = [_leaves(10, 1, "a", "n1"), (11, 1, None, True), _sets(12, 2, "a", "n1")]
    _commit(table, *first, _leaves(13, 2, "b", "n2"), (tombstone, 2, None, True), _sets(16, 3, "b", "n2"))
    assert table.rows() == [(2, "a", "n1"), (3, "b", "n2")]
