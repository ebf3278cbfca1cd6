"""A commit's deletes of earlier rows. The driver writes a few itself, since a Spark job takes longer. Of more, tasks do
it, each for some of the data files, and the driver sees none of their positions.
"""

import contextlib
import functools
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

import numpy as np
from pyspark.accumulators import Accumulator, _accumulatorRegistry
from pyspark.sql import SparkSession

from changelog.amounts import amount, sized
from deltawriters import TableSpec
from deltawriters.keyindex import CorruptIndexError
from deltawriters.old_rows import DeletedRows, DeleteGroup, FoundRows
from deltawriters.scratch import Scratch
from deltawriters.vectors import LostVectorError
from sink import plans
from sink.errors import TableError
from sink.spark.accumulators import ListParam

log = logging.getLogger("rowdelta")

Table = TypeVar("Table", bound=TableSpec)
Fact = TypeVar("Fact")
Result = TypeVar("Result")

Write = Callable[[Table, DeleteGroup[Fact], Scratch], list[Result]]
"""Writes the deletes of a group, and returns what the commit has to know of them. The scratch
gets the files, also if it fails. It runs in tasks, too.
"""

_LEAST = 4 * 1024 * 1024
"""A task gets at least so many bytes, if it isn't the only one."""
_MOST = 32 * 1024 * 1024
"""And at most about so many. It needs a few times as much memory."""


def unite_deletes(
    spark: SparkSession,
    name: str,
    table: Table,
    rows: DeletedRows,
    facts: Mapping[str, Fact],
    cost: Callable[[FoundRows, Fact], int],
    write: Write[Table, Fact, Result],
    scratch: Scratch,
) -> list[Result]:
    """`write` for all data files.

    :param name: name of the table, for messages.
    :param facts: see `DeleteGroup`.
    :param cost: of a data file's deletes, in bytes of positions and old vectors that take as long to unite.
    :param scratch: gets the files, also after an error.
    :raises TableError: an old vector is missing or damaged, so nothing tells which rows of its file are live.
    :raises CorruptIndexError: positions that tasks found can't be read.
    """
    with _explain_lost_vector(name):
        sizes = {path: cost(found, facts[path]) for path, found in rows.found.items()}
        total = sum(sizes.values())
        if total <= plans.ON_DRIVER and not rows.files:
            return write(table, DeleteGroup(rows, facts), scratch)
        started = time.monotonic()
        # what Spark shares out goes through a file, so it has no credentials
        shared = replace(rows, io_properties=())
        groups = [
            DeleteGroup(shared.of(paths), {path: facts[path] for path in paths})
            for paths in _shared_out(sizes, spark.sparkContext.defaultParallelism)
        ]
        written = spark.sparkContext.accumulator(list[str](), ListParam[str]())
        step = functools.partial(_written, table, write, rows.io_properties, written)
        try:
            outcomes = spark.sparkContext.parallelize(groups, len(groups)).mapPartitions(step).collect()
        finally:
            scratch.add(*written.value)
            # PySpark keeps each accumulator for ever. The job is over, so Spark merges no more into this one.
            _accumulatorRegistry.pop(written.aid, None)
        results = list[Result]()
        for outcome in outcomes:
            if isinstance(outcome, (LostVectorError, CorruptIndexError)):
                raise outcome
            results.append(outcome)
        log.info(
            "%s: deletes in %s written by %s | %s of positions and old vectors | %d ms",
            name,
            amount(len(sizes), "data file"),
            amount(len(groups), "task"),
            sized(total),
            (time.monotonic() - started) * 1000,
        )
        return results


@contextlib.contextmanager
def _explain_lost_vector(name: str) -> Iterator[None]:
    try:
        yield
    except LostVectorError as error:
        raise TableError(
            f"{name}: a deletion vector of the table can't be read, so nothing tells which rows are live: {error}. "
            "Nothing was applied. Restore the file that is lost or damaged, or take the table back to a snapshot that "
            "doesn't need it (Iceberg: rollback_to_snapshot; Delta: RESTORE)."
        ) from error


def _shared_out(sizes: Mapping[str, int], cores: int) -> list[list[str]]:
    """Data files in groups of about the same size. Those of a group are neighbours in the order of their paths, in
    which tasks write their positions and deletes: so a group's are side by side.
    """
    paths = sorted(sizes)
    each = np.array([sizes[path] for path in paths])
    ends = np.cumsum(each)
    total = int(ends[-1])
    count = min(len(paths), max(1, -(-total // _MOST), min(cores, total // _LEAST)))
    middles = ends - each / 2  # a file is where its middle is, so a large one leaves its neighbours to others
    borders = np.searchsorted(middles, np.arange(1, count) * total / count).tolist()
    groups = [paths[start:end] for start, end in itertools.pairwise((0, *borders, len(paths)))]
    return [group for group in groups if group]


def _written(
    table: Table,
    write: Write[Table, Fact, Result],
    io_properties: tuple[tuple[str, str], ...],
    written: Accumulator[list[str]],
    groups: Iterable[DeleteGroup[Fact]],
) -> Iterator[Result | LostVectorError | CorruptIndexError]:
    """In a task. It deletes its files before any error.

    What can't be read is a result. If the task failed instead, the job would end without the other tasks, and nobody
    would delete their files. Nor would it help to run the task again.
    """
    results = list[Result | LostVectorError | CorruptIndexError]()
    try:
        with Scratch("a task of deletes", lambda _: table.io) as scratch:
            for group in groups:
                rows = replace(group.rows, io_properties=io_properties)
                results += write(table, replace(group, rows=rows), scratch)
    except (LostVectorError, CorruptIndexError) as error:
        results = [error]
    written.add(scratch.paths)
    yield from results
