"""A TRUNCATE of the source is a barrier in the order of changes. The table has what came after it and nothing else,
whatever the order in which tasks get them, and however they are cut into buffers and tasks.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from changelog.rows import BAD, HASH, KIND, TRUNCATE, RowKind, order_column
from deltawriters import CardinalityError, ContentFile, DeltaOptions, DeltaWriter, FileContent, TaskId
from deltawriters.combine import combined
from deltawriters.delta import WriteResult
from deltawriters.keyindex import IndexSlice, RunInfo, high_hash
from deltawriters.order_values import OrderColumns
from deltawriters.resolve import IndexTask
from sink.routing import KeyHash, is_truncate, to_all
from sink.spark.exchange import owned, packed
from sink.targets.iceberg.writers import IcebergTableSpec
from tests.deltawriters.lake import Lake
from tests.deltawriters.test_delta import BY_REGION, UNPARTITIONED, table_at

ORDER = order_column(0)
KEY = ("id",)
BAD_TYPE = pa.struct([("error_class", pa.string()), ("reason", pa.string())])
Event = tuple[RowKind | None, int, int]
"""Kind (None: a TRUNCATE), order and key."""


def batch(events: Sequence[Event]) -> pa.RecordBatch:
    """Decoded rows. The order of a row tells what its values are."""
    bad = [{"error_class": TRUNCATE, "reason": ""} if kind is None else None for kind, _, _ in events]
    return pa.RecordBatch.from_pydict(
        {
            KIND: pa.array([int(RowKind.DELETE if kind is None else kind) for kind, _, _ in events], pa.int8()),
            ORDER: pa.array([order for _, order, _ in events], pa.int64()),
            BAD: pa.array(bad, BAD_TYPE),
            "id": pa.array([None if kind is None else key for kind, _, key in events], pa.int64()),
            "shop": pa.array([None if kind is None else "s" for kind, _, _ in events], pa.string()),
            "region": pa.array([None if kind is None else f"r{order % 2}" for kind, order, _ in events], pa.string()),
            "amount": pa.array([None if kind is None else order for kind, order, _ in events], pa.decimal128(12, 2)),
        }
    )


def written(
    table: IcebergTableSpec, options: DeltaOptions, batches: Sequence[pa.RecordBatch], task: str = "0-op"
) -> list[ContentFile]:
    """What one task writes of its rows, as `sink.spark.tasks.write` has it write them."""
    number, operation = task.split("-")
    writer = DeltaWriter(table, options, TaskId(int(number), 1, operation))
    for rows in batches:
        truncates = is_truncate(rows.column(BAD))
        good = rows.drop_columns([BAD])
        if truncates.true_count:
            writer.truncate(good.filter(truncates))
        writer.write(good.filter(rows.column(BAD).is_null()))
    return writer.close().files


def model(events: Sequence[Event], earlier: Sequence[int]) -> dict[int, int]:
    """Key -> order of the change that set its row. Rows of an earlier commit have the order -1."""
    rows = dict.fromkeys(earlier, -1)
    for kind, order, key in sorted(events, key=lambda event: event[1]):
        if kind is None:
            rows.clear()
        elif kind in (RowKind.INSERT, RowKind.UPDATE_AFTER):
            rows[key] = order
        else:
            rows.pop(key, None)
    return rows


KINDS = st.sampled_from([None, *RowKind, RowKind.UPDATE_AFTER])


@settings(max_examples=120, deadline=None)
@given(
    kinds=st.lists(st.tuples(KINDS, st.integers(0, 3)), max_size=14),
    data=st.data(),
    tasks=st.integers(1, 3),
    size=st.integers(1, 15),
    flush_bytes=st.sampled_from([1, 300, 1 << 20]),
    mode=st.sampled_from(["upsert", "changelog"]),
    spec=st.sampled_from([UNPARTITIONED, BY_REGION]),
    version=st.sampled_from([2, 3]),
)
def test_what_came_before_is_gone_and_what_came_after_stays(
    kinds: list[tuple[RowKind | None, int]],
    data: st.DataObject,
    tasks: int,
    size: int,
    flush_bytes: int,
    mode: Any,
    spec: str,
    version: int,
) -> None:
    events = [(kind, order, key) for order, (kind, key) in enumerate(kinds)]
    if mode == "changelog":
        # a stream that is trusted says first of all what happens to an earlier row; an insert has none
        events = [(RowKind.UPDATE_AFTER if kind is RowKind.INSERT else kind, *rest) for kind, *rest in events]  # type: ignore[misc]
    arriving = data.draw(st.permutations(events))
    parts = [batch(arriving[i : i + size]) for i in range(0, len(arriving), size)]
    with tempfile.TemporaryDirectory() as folder:
        table = table_at(folder, spec, version)
        empty = DeltaOptions(KEY, table_is_empty=True)
        first = written(table, empty, [batch([(RowKind.INSERT, -1, 0), (RowKind.INSERT, -1, 1)])], "0-first")
        if mode == "upsert":
            parts = list(combined(parts, KEY, ("id", "amount"), lambda _: None, 500))
        hashed = list(to_all(KeyHash(KEY).added(parts), tasks))
        shares = [list(owned(hashed, number, tasks, keep_hash=False)) for number in range(tasks)]
        dealt: list[list[pa.RecordBatch]] = [[] for _ in range(tasks)]
        for found in packed(hashed, tasks, keep_hash=False, part_rows=4):
            for row in found.to_pylist():
                dealt[row["task"]] += pa.ipc.open_stream(row["rows"])
        for way, share in (("kept", shares), ("dealt", dealt)):
            options = DeltaOptions(KEY, mode=mode, flush_bytes=flush_bytes, global_deletes=spec != UNPARTITIONED)
            files = [f for n, rows in enumerate(share) for f in written(table, options, rows, f"{n}-{way}")]
            is_emptied = any(kind is None for kind, _, _ in events)
            assert not (is_emptied and any(file.content is FileContent.EQUALITY_DELETES for file in files))
            lake = Lake(table, [files] if is_emptied else [first, files])
            rows = {row["id"]: int(row["amount"]) for row in lake.rows()}
            assert (len(lake.rows()), rows) == (len(rows), model(events, [0, 1]))


def test_an_order_value_that_a_truncate_has_too_decides_nothing(tmp_path: Path) -> None:
    tied = [batch([(RowKind.INSERT, 7, 1)]), batch([(None, 7, 0)])]
    for batches in (tied, tied[::-1]):
        for flush_bytes in (1, 1 << 20):
            with pytest.raises(CardinalityError, match=r"same order value as a TRUNCATE of the source, \(7,\)"):
                written(table_at(tmp_path), DeltaOptions(KEY, flush_bytes=flush_bytes), batches)
    with pytest.raises(CardinalityError, match=r"TRUNCATE of the source, \(integer of 1 digit\), so"):
        written(table_at(tmp_path), DeltaOptions(KEY, show_values=False), tied)


def wrote(folder: Path, events: Sequence[Event], runs: Sequence[RunInfo] = (), **of_slice: Any) -> WriteResult:
    """What one task writes of a table with a key index. The TRUNCATEs come last."""
    index = IndexTask(IndexSlice(str(folder), (), tuple(runs), {}, **of_slice), 0, 2**64, len(runs), f"run{len(runs)}")
    writer = DeltaWriter(table_at(folder), DeltaOptions(KEY), TaskId(0, 1, f"op{len(runs)}"), index)
    rows = batch(events)
    truncates, is_good = is_truncate(rows.column(BAD)), rows.column(BAD).is_null()
    hashes = high_hash([rows.column("id").fill_null(0)]).view(np.int64)
    rows = rows.append_column(HASH, pa.array(hashes)).drop_columns([BAD])
    writer.write(rows.filter(is_good))
    if truncates.true_count:
        writer.truncate(rows.filter(truncates))
    return writer.close()


def test_no_key_is_looked_up(tmp_path: Path) -> None:
    """The index has a run that isn't there any more: to look into it would fail."""
    first = wrote(tmp_path, [(RowKind.INSERT, 1, 1), (None, 0, 0)]).index
    assert first is not None
    (tmp_path / first.runs[0].name).unlink()
    result = wrote(tmp_path, [(RowKind.INSERT, 1, 1), (RowKind.INSERT, 3, 2), (None, 2, 0)], first.runs).index
    assert result is not None
    assert (result.inserted, result.old_rows, [found.entries for found in result.runs]) == (1, [], [1])


def test_a_row_that_a_truncate_removes_makes_no_change_late(tmp_path: Path) -> None:
    """A backfill wrote the row with the order value of its snapshot, and the stream is behind."""
    order = OrderColumns(("amount",))
    first = wrote(tmp_path, [(RowKind.INSERT, 100, 1)], order=order).index
    assert first is not None
    changes = [(RowKind.INSERT, 60, 1), (RowKind.INSERT, 55, 2), (RowKind.INSERT, 40, 3)]
    result = wrote(tmp_path, changes, first.runs, order=order)
    assert (result.late, result.rows["+I"]) == (1, 2)
    result = wrote(tmp_path, [*changes, (None, 50, 0)], first.runs, order=order)
    assert result.index is not None
    assert (result.late, result.rows["+I"], result.index.inserted) == (0, 3, 2)
    floor = order.of_rows(pa.table({"amount": [58]}))[0].as_py()  # of a TRUNCATE that came before
    result = wrote(tmp_path, [*changes, (None, 50, 0)], first.runs, order=order, truncates=(floor,))
    assert result.index is not None
    assert (result.late, result.rows["+I"], result.index.inserted) == (2, 1, 1)
