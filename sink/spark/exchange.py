"""How rows get from task to task.

Rows from Spark go through its shuffle as they are. Spark would turn Arrow batches from Python into rows, and these rows
into batches again. To avoid this, the sink packs a batch: for each receiving task, the shuffle gets one row with a part
of the batch in Arrow's IPC format.
"""

import functools
import itertools
import struct
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from pyspark import RDD, SparkContext
from pyspark.serializers import NoOpSerializer
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from changelog.rows import HASH
from sink.routing import owner
from sink.spark.failures import told

Step = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]
"""One step of a task's work."""

PACKED_SCHEMA = "task int, rows binary"

Results: TypeAlias = RDD[tuple[Any, ...]] | DataFrame
"""The rows that the last step of each task yields. The driver collects them."""

PART_ROWS = 4096
"""`packed` gathers about this many rows for each task, because smaller parts would be mostly overhead."""
_SEED = 42
"""Of the hash by which Spark partitions (`HashPartitioning`)."""
_BYTES = 16 * 1024 * 1024
"""Most Arrow bytes of a part. The JVM holds several copies of it."""


_NOTHING = pa.RecordBatch.from_pydict({"task": pa.array([], pa.int32()), "rows": pa.array([], pa.binary())})


def packed(
    changes: Iterable[pa.RecordBatch], tasks: int, keep_hash: bool, part_rows: int = PART_ROWS, first: int = 0
) -> Iterator[pa.RecordBatch]:
    """Deal changes out to tasks.

    :param changes: rows of one schema, with `_rowdelta_hash` (int64).
    :param tasks: number of receiving tasks.
    :param keep_hash: whether the receivers get `_rowdelta_hash` too.
    :param part_rows: about so many rows are gathered for each task before they are packed.
    :param first: number of the first receiving task.
    :return: batches of `PACKED_SCHEMA`, one at least for each batch of changes, if only an empty one (`combined`).
    """
    for batch in _gathered(changes, tasks * part_rows):
        if not batch.num_rows:
            yield _NOTHING
            continue
        owners = owner(batch.column(HASH).to_numpy().view(np.uint64), tasks)
        order = np.argsort(owners.astype(np.uint16), kind="stable")  # by radix sort
        rows = (batch if keep_hash else batch.drop_columns([HASH])).take(pa.array(order))
        ends = np.cumsum(np.bincount(owners, minlength=tasks))
        yield from _parts(rows, np.concatenate([[0], ends]).tolist(), first)


def owned(changes: Iterable[pa.RecordBatch], number: int, tasks: int, keep_hash: bool) -> Iterator[pa.RecordBatch]:
    """Only those of the `changes` that `packed` would send to task `number`."""
    for batch in changes:
        own = pa.array(owner(batch.column(HASH).to_numpy().view(np.uint64), tasks) == number)
        yield (batch if keep_hash else batch.drop_columns([HASH])).filter(own)


def in_arrow(rows: DataFrame, step: Step, schema: str | T.StructType) -> DataFrame:
    """`mapInArrow` for any callable. Spark itself accepts only functions."""
    return rows.mapInArrow(lambda batches: told(step)(batches), schema)


def exchanged(packed_rows: DataFrame, tasks: int, then: Step) -> Results:
    """Shuffle the rows that `packed` made, and run `then` in each receiving task.

    A task gets its parts one by one, as bytes. Spark would put them into Arrow batches of a fixed number of rows, which
    could be too large for the memory.
    """
    context = packed_rows.sparkSession.sparkContext
    assert context._jvm is not None
    rows = packed_rows.repartition(tasks, _by_number(tasks, context)).select("rows")
    parts = getattr(rows._jdf, "as")(context._jvm.org.apache.spark.sql.Encoders.BINARY()).toJavaRDD()
    return RDD(parts, context, NoOpSerializer()).mapPartitions(lambda part: _as_tuples(told(then)(_unpacked(part))))


WholeFiles: TypeAlias = "RDD[tuple[str, bytes | None]]"
"""Paths of files with what is in them. None: the task opens the file itself."""
FileStep = Callable[[Iterable[tuple[str, bytes | None]]], Iterator[pa.RecordBatch]]
"""A step that takes such files."""
LOCAL = "file:"


def files(paths: Collection[str], context: SparkContext) -> WholeFiles:
    """Whole files, spread over partitions about evenly. Spark SQL doesn't plan this: planning takes as long as reading
    a small file. Where files are local, tasks needn't ask the JVM, which copies Hadoop's whole configuration for each
    file: 4 to 7 ms.
    """
    partitions = 4 * context.defaultParallelism
    if all(path.startswith(LOCAL) for path in paths):
        return context.parallelize([(path, None) for path in paths], min(len(paths), partitions))
    return context.binaryFiles(",".join(paths), partitions)


def files_exchanged(whole: WholeFiles, route: FileStep, tasks: int, then: Step) -> Results:
    """Like `exchanged`, but starts from files: `route` turns them into batches of `PACKED_SCHEMA`."""
    dealt = whole.mapPartitions(lambda part: _framed(_as_tuples(told(route)(part))))
    # like PySpark's `partitionBy`, but without pickling, because these are bytes already
    dealt._bypass_serializer = True  # type: ignore[attr-defined]
    jvm = whole.context._jvm
    assert jvm is not None
    partitioner = jvm.org.apache.spark.api.python.PythonPartitioner(tasks, 0)
    pairs = jvm.org.apache.spark.api.python.PairwiseRDD(dealt._jrdd.rdd()).asJavaPairRDD().partitionBy(partitioner)
    parts: RDD[bytes] = RDD(
        jvm.org.apache.spark.api.python.PythonRDD.valueOfPair(pairs), whole.context, NoOpSerializer()
    )
    return parts.mapPartitions(lambda part: _as_tuples(told(then)(_unpacked(part))))


def files_by_each(whole: WholeFiles, tasks: int, step: FileStep) -> Results:
    """Run `step` on all files in each task, without a shuffle. `step` has to leave out the other tasks' rows.

    A task's number is the number of its partition. Each task reads the files for itself.
    """
    return whole.context.union([whole.coalesce(1)] * tasks).mapPartitions(lambda part: _as_tuples(told(step)(part)))


def files_written(whole: WholeFiles, tasks: int, step: FileStep) -> Results:
    """Run `step` on files in at most `tasks` tasks. Each file goes to one task."""
    return whole.coalesce(tasks).mapPartitions(lambda part: _as_tuples(told(step)(part)))


def _framed(rows: Iterable[tuple[int, bytes]]) -> Iterator[bytes]:
    """The two halves of each pair, one after the other, as `PairwiseRDD` expects them."""
    for number, part in rows:
        yield struct.pack("!q", number)
        yield part


def _unpacked(parts: Iterable[bytes]) -> Iterator[pa.RecordBatch]:
    for part in parts:
        yield from pa.ipc.open_stream(part)


def _as_tuples(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[Any, ...]]:
    for batch in batches:
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


# Each part of an expression is a call to the JVM. The cache spares every micro-batch these calls.


@functools.lru_cache(maxsize=8)
def _by_number(tasks: int, context: SparkContext) -> Column:
    """What to repartition by, so that a row goes to task `task` of `tasks`.

    Spark hashes the expression's value, so the value is an integer whose hash leads to the task's number.

    :param context: to which the column belongs.
    """
    return F.array(*(F.lit(name) for name in _names(tasks, context)))[F.col("task")]


def _names(tasks: int, context: SparkContext) -> tuple[int, ...]:
    """For each task the smallest integer that Spark's hash partitioning sends to it."""
    assert context._jvm is not None
    hashed, names = context._jvm.org.apache.spark.unsafe.hash.Murmur3_x86_32(_SEED).hashInt, dict[int, int]()
    for number in itertools.count():
        names.setdefault(hashed(number) % tasks, number)
        if len(names) == tasks:
            return tuple(names[task] for task in range(tasks))
    raise AssertionError


def _gathered(changes: Iterable[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    """The same changes in batches of at least `rows` rows or `_BYTES` bytes, but for the last one, and for an empty one
    for each batch with which there are fewer.
    """
    waiting, count, size = list[pa.RecordBatch](), 0, 0
    for batch in changes:
        if batch.num_rows:  # an empty one may hold on to the memory of what it is a part of
            waiting.append(batch)
        count += batch.num_rows
        size += batch.nbytes
        if count >= rows or size >= _BYTES:
            yield _one(waiting)
            waiting, count, size = [], 0, 0
        else:
            yield batch.slice(0, 0)
    if count:
        yield _one(waiting)


def _one(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def _parts(rows: pa.RecordBatch, borders: list[int], first: int) -> Iterator[pa.RecordBatch]:
    """:param borders: where each task's rows begin, and where the last task's rows end.
    :param first: number of the first task.
    """
    most = max(1, rows.num_rows * _BYTES // max(rows.nbytes, 1))
    for task, (start, end) in enumerate(pairwise(borders), first):
        for begin in range(start, end, most):
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, rows.schema) as writer:
                writer.write_batch(rows.slice(begin, min(most, end - begin)))
            yield _packed_row(task, sink.getvalue())


def _packed_row(task: int, stream: pa.Buffer) -> pa.RecordBatch:
    offsets = pa.py_buffer(np.array([0, stream.size], np.int32))
    content = pa.Array.from_buffers(pa.binary(), 1, [None, offsets, stream])
    return pa.RecordBatch.from_arrays([pa.array([task], pa.int32()), content], ["task", "rows"])
