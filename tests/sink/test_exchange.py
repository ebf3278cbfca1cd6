"""Changes dealt out to tasks: each arrives once, at the task that owns its key, however they came."""

import struct
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from changelog.rows import BAD, HASH
from deltawriters.keyindex import high_hash
from sink.routing import RANGES, KeyHash, owner, range_of
from sink.spark import exchange
from sink.spark.exchange import (
    PACKED_SCHEMA,
    Results,
    exchanged,
    files,
    files_by_each,
    files_exchanged,
    in_arrow,
    owned,
    packed,
)

ROWS = st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.text(max_size=8) | st.none()), max_size=40)


def batches(rows: list[tuple[int, str | None]], cuts: list[int]) -> list[pa.RecordBatch]:
    columns = {"id": pa.array([i for i, _ in rows], pa.int64()), "text": pa.array([t for _, t in rows], pa.string())}
    whole = pa.record_batch(columns | {BAD: pa.nulls(len(rows), pa.struct([("reason", pa.string())]))})
    borders = [0, *sorted(cut % (len(rows) + 1) for cut in cuts), len(rows)]
    return [whole.slice(start, end - start) for start, end in pairwise(borders)]


@given(
    rows=ROWS,
    cuts=st.lists(st.integers(0, 100), max_size=3),
    tasks=st.sampled_from([1, 2, 3, 200, 1024]),
    keep=st.booleans(),
)
@settings(max_examples=200)
def test_each_row_arrives_once_at_its_owner(
    rows: list[tuple[int, str | None]], cuts: list[int], tasks: int, keep: bool
) -> None:
    hash_keys = KeyHash(("id",))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "_BYTES", 200)  # so that parts are cut
        parts = [row for part in packed(hash_keys.added(batches(rows, cuts)), tasks, keep) for row in part.to_pylist()]
    arrived: list[tuple[int, str | None]] = []
    for part in parts:
        for batch in exchange._unpacked([part["rows"]]):
            assert (HASH in batch.schema.names) == keep
            hashes = hash_keys(batch.select(["id"]))
            first, last = range_of(part["task"], tasks)
            assert all(first <= int(value) < last for value in hashes)
            arrived += zip(batch.column("id").to_pylist(), batch.column("text").to_pylist(), strict=True)
    assert sorted(arrived, key=repr) == sorted(rows, key=repr)
    for task in {part["task"] for part in parts} | {0, tasks - 1}:
        dealt = exchange._unpacked(part["rows"] for part in parts if part["task"] == task)
        kept = owned(hash_keys.added(batches(rows, cuts)), task, tasks, keep)
        assert [row for b in kept for row in b.to_pylist()] == [row for b in dealt for row in b.to_pylist()]


@given(hashes=st.lists(st.integers(0, 2**64 - 1), min_size=1), tasks=st.integers(1, RANGES))
def test_an_owner_is_the_task_whose_range_has_the_hash(hashes: list[int], tasks: int) -> None:
    for value, number in zip(hashes, owner(np.array(hashes, np.uint64), tasks).tolist(), strict=True):
        first, last = range_of(number, tasks)
        assert first <= value < last


def deal(ids: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    bad = pa.struct([("reason", pa.string())])
    yield from packed(KeyHash(("id",)).added(b.append_column(BAD, pa.nulls(len(b), bad)) for b in ids), 3, False)


def look(arrived: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    for batch in arrived:
        task = pa.repeat(context.partitionId(), len(batch))
        yield pa.record_batch({"task": task, "id": batch.column("id")})


def test_rows_go_through_spark_to_their_task_in_bounded_pieces(spark: SparkSession) -> None:
    dealt = in_arrow(spark.range(0, 10_000, 1, 4), deal, PACKED_SCHEMA)
    _check(exchanged(dealt, 3, look))


@pytest.mark.versions
@pytest.mark.parametrize("by", ["Hadoop", "the task"])
def test_so_do_rows_of_files_that_are_read_whole(spark: SparkSession, tmp_path: Path, by: str) -> None:
    paths = [tmp_path / f"part {part} %20 é" for part in "abcde"]
    for number, path in enumerate(paths):
        path.write_bytes(struct.pack("!q", number))

    def read(contents: Iterable[tuple[str, bytes | None]]) -> Iterator[pa.RecordBatch]:
        for path, content in contents:
            assert path.startswith("file:/")
            assert (content is None) == (by == "the task")
            content = Path(path.removeprefix("file:")).read_bytes() if content is None else content
            first = 2_000 * struct.unpack("!q", content)[0]
            yield pa.record_batch({"id": pa.array(range(first, first + 2_000), pa.int64())})

    whole = files([f"{'' if by == 'Hadoop' else 'file:'}{path}" for path in paths], spark.sparkContext)
    _check(files_exchanged(whole, lambda contents: deal(read(contents)), 3, look))
    for tasks in (1, 3):
        seen = files_by_each(whole, tasks, lambda contents: look(read(contents))).collect()
        assert sorted(seen) == [(task, number) for task in range(tasks) for number in range(10_000)]


def _check(results: Results) -> None:
    rows = results.collect()
    assert sorted(number for _, number in rows) == list(range(10_000))
    owners = owner(high_hash([pa.array([number for _, number in rows], pa.int64())]), 3).tolist()
    assert [task for task, _ in rows] == owners


def test_each_task_has_the_name_that_spark_sends_to_it(spark: SparkSession) -> None:
    for tasks in (1, 2, 3, 200, 1024):
        named = spark.createDataFrame([(name,) for name in exchange._names(tasks, spark.sparkContext)], "name int")
        found = named.select(F.pmod(F.hash("name"), F.lit(tasks)).alias("task")).collect()
        assert [row.task for row in found] == list(range(tasks))
