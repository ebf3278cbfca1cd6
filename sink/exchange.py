"""Rows on their way between tasks: whole Arrow batches through Spark's shuffle.

Left to itself, Spark takes a batch apart into rows, sorts and compresses them one by one, and makes batches of them again: 3 us a row,
more than the delta writer takes. So what the shuffle sees is one row for each batch and task, with a part of the batch in Arrow's IPC
format.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

import numpy as np
import pyarrow as pa
from pyspark import SparkContext
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from changelog.rows import HASH
from sink.routing import owner

PACKED_SCHEMA = "task int, rows binary"

_ROWS = 4096
"""Rows for each task that are waited for, or the parts would be smaller than what is said about them."""
_BYTES = 16 * 1024 * 1024
"""Arrow bytes that a part has at most: the JVM holds several copies of it."""


def packed(changes: Iterable[pa.RecordBatch], tasks: int, keep_hash: bool) -> Iterator[pa.RecordBatch]:
    """Changes dealt out to tasks: batches of `PACKED_SCHEMA`.

    :param changes: rows of one schema, with `_rowdelta_hash` (int64), which the receiver gets if `keep_hash`.
    """
    for batch in _gathered(changes, tasks * _ROWS):
        owners = owner(batch.column(HASH).to_numpy().view(np.uint64), tasks)
        order = np.argsort(owners.astype(np.uint16), kind="stable")  # by radix sort
        rows = (batch if keep_hash else batch.drop_columns([HASH])).take(pa.array(order))
        ends = np.cumsum(np.bincount(owners, minlength=tasks))
        yield from _parts(rows, np.concatenate([[0], ends]).tolist())


def unpacked(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """What `packed` was given, as far as it is this task's."""
    for batch in batches:
        for part in batch.column("rows"):
            yield from pa.ipc.open_stream(part.as_buffer())


def in_arrow(
    rows: DataFrame,
    function: Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]],
    schema: str | T.StructType,
) -> DataFrame:
    """`mapInArrow` of any callable: Spark wants a function."""
    return rows.mapInArrow(lambda batches: function(batches), schema)


def exchanged(packed_rows: DataFrame, tasks: int) -> DataFrame:
    """What `packed` made, each row in the task that it is for. Arrow batches of the result have one row each.

    Spark counts rows to end a batch, not bytes, and by a setting of the session; so the result is another session's.
    """
    spark = packed_rows.sparkSession
    routed = packed_rows.repartition(tasks, _to_task(F.col("task"), tasks, spark))
    receiving = _row_by_row(spark.sparkContext)
    rows = routed._jdf.toJavaRDD()
    return DataFrame(receiving._jsparkSession.createDataFrame(rows, routed._jdf.schema()), receiving)


@functools.lru_cache(maxsize=1)
def _row_by_row(context: SparkContext) -> SparkSession:
    spark = SparkSession(context).newSession()
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "1")
    return spark


def _to_task(number: Column, tasks: int, spark: SparkSession) -> Column:
    """What to repartition by, so that a row goes to task `number` of `tasks`.

    Spark hashes what it is given once more, so each task is named by an integer that hashes to its number.
    """
    return F.array(*(F.lit(name) for name in _names(tasks, spark.sparkContext)))[number]


@functools.lru_cache(maxsize=8)
def _names(tasks: int, context: SparkContext) -> tuple[int, ...]:
    numbers = (
        SparkSession(context)
        .range(100 * tasks)
        .select("id", F.pmod(F.hash(F.col("id").cast("int")), F.lit(tasks)).alias("task"))
    )
    chosen = {row.task: row.id for row in numbers.groupBy("task").agg(F.min("id").alias("id")).collect()}
    return tuple(int(chosen[number]) for number in range(tasks))


def _gathered(changes: Iterable[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    """The same changes in batches of about as many rows, or so many bytes that it doesn't matter."""
    waiting, count, size = list[pa.RecordBatch](), 0, 0
    for batch in changes:
        waiting.append(batch)
        count += batch.num_rows
        size += batch.nbytes
        if count >= rows or size >= _BYTES:
            yield pa.concat_batches(waiting)
            waiting, count, size = [], 0, 0
    if count:
        yield pa.concat_batches(waiting)


def _parts(rows: pa.RecordBatch, borders: list[int]) -> Iterator[pa.RecordBatch]:
    """:param borders: where each task's rows begin, and the end of the last."""
    most = max(1, rows.num_rows * _BYTES // max(rows.nbytes, 1))
    for task, (start, end) in enumerate(pairwise(borders)):
        for first in range(start, end, most):
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, rows.schema) as writer:
                writer.write_batch(rows.slice(first, min(most, end - first)))
            yield _packed_row(task, sink.getvalue())


def _packed_row(task: int, stream: pa.Buffer) -> pa.RecordBatch:
    offsets = pa.py_buffer(np.array([0, stream.size], np.int32))
    content = pa.Array.from_buffers(pa.binary(), 1, [None, offsets, stream])
    return pa.RecordBatch.from_arrays([pa.array([task], pa.int32()), content], ["task", "rows"])
