"""Tasks that read the keys of data files into a key index."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from changelog.rows import HASH
from deltawriters import TableSpec
from deltawriters.keyindex import RUN_ENTRIES, Entries, IndexedFile, IndexSlice, RunInfo, write_run
from deltawriters.resolve import low_hashes
from sink.routing import KeyHash
from sink.spark.exchange import Step, packed
from sink.spark.tasks.worker import forget_archives, results, this_task

INDEX_FILE = "_rowdelta_file"
INDEX_POS = "_rowdelta_pos"
_LOW = "_rowdelta_low"
_ORDER = "_rowdelta_order_value"


def index_entries(
    table: TableSpec,
    path_hashes: npt.NDArray[np.uint64],
    hash_keys: KeyHash,
    index: IndexSlice,
    batches: Iterable[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """Entries of the key index for live rows.

    :param path_hashes: hashes of the paths of the data files that are read.
    :param index: the index to write to.
    :param batches: the key columns, the index's order columns and `current`, `INDEX_FILE` (the path's hash) and
        `INDEX_POS`.
    :return: `_rowdelta_hash` (int64), `_LOW` (uint64), `INDEX_FILE` (the file's number, uint32), `INDEX_POS` (uint32),
        and `_ORDER` (binary) if the index has order values.
    """
    order = np.argsort(path_hashes).astype(np.uint32)
    in_order = path_hashes[order]
    for batch in batches:
        keys = batch.select(list(hash_keys.key))
        files = batch.column(INDEX_FILE).to_numpy().view(np.uint64)
        places = np.searchsorted(in_order, files)
        if not np.array_equal(np.take(in_order, places, mode="clip"), files):
            raise ValueError("a row is of none of the files that are read")
        columns = {
            HASH: pa.array(hash_keys(keys).view(np.int64)),
            _LOW: pa.array(low_hashes(table, index, hash_keys.key, pa.Table.from_batches([batch]))),
            INDEX_FILE: pa.array(order[places]),
            INDEX_POS: batch.column(INDEX_POS).cast(pa.uint32()),
        }
        if index.order is not None:
            columns[_ORDER] = index.order.of_rows(batch)
        yield pa.RecordBatch.from_pydict(columns)


def route_entries(entries: Step, tasks: int, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Compute the index entries of the batches, and deal them out to tasks."""
    yield from packed(entries(batches), tasks, keep_hash=True)
    forget_archives()


def build_index(
    index: IndexSlice,
    files: Sequence[IndexedFile],
    sequence: int,
    name: str,
    entries: Iterable[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """Write runs of the key index. Yields one row: a JSON list of `RunInfo`.

    :param index: the index to write to.
    :param files: the data files, by their numbers in the entries.
    :param sequence: sequence number of the runs.
    :param name: beginning of the runs' names.
    :param entries: this task's share of what `index_entries` makes.
    """
    name = f"{name}-{this_task().attempt}"
    pending: list[Entries] = []
    runs: list[RunInfo] = []

    def flush() -> None:
        run_name = f"{name}-{len(runs)}"
        run = Entries.joined(pending, tuple(files))
        runs.append(write_run(index.io, index.location, run_name, sequence, run))
        pending.clear()

    for batch in entries:
        if not batch.num_rows:  # all rows of a file are deleted
            continue
        high, low, file, pos = (batch.column(part).to_numpy() for part in (HASH, _LOW, INDEX_FILE, INDEX_POS))
        order = batch.column(_ORDER) if index.order is not None else None
        pending.append(Entries(high=high.view(np.uint64), low=low, file=file, pos=pos, files=(), order=order))
        if sum(len(part.high) for part in pending) >= RUN_ENTRIES:
            flush()
    if pending:
        flush()
    if len(runs) > 1:
        # the merged runs have separate ranges, so that a key is looked up in only one of them
        overlapping = replace(index, runs=tuple(runs), merge=tuple(run.name for run in runs))
        merged = overlapping.write_merged(f"{name}-merged", 0, 2**64)
        for run in runs:
            index.io.delete(f"{index.location}/{run.name}")
        runs = merged
    yield results([[run.to_json() for run in runs]])


def merge_runs(index: IndexSlice, name: str, ranges: Iterable[tuple[int, int]]) -> Iterator[dict[str, Any]]:
    """Merge the runs `index.merge` in ranges of high hashes (`IndexSlice.write_merged`). Yields what it wrote
    (`RunInfo.to_json`).

    :param name: beginning of the new runs' names.
    """
    for first, last in ranges:
        task = this_task()
        for run in index.write_merged(f"{name}-{task.partition}-{task.attempt}", first, last):
            yield run.to_json()
