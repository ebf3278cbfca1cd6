"""Tasks that decode and write a few records of several tables, one table after the other."""

import io
import pickle
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.accumulators import Accumulator

from changelog.decoding import Fact, Place, decoded_together
from sink.plans import Share
from sink.results import ShareResult
from sink.spark.tasks.worker import forget_archives, results, this_task
from sink.spark.tasks.write import write_changes

GROUP = "_rowdelta_group"


class PackedShares:
    """Shares, compressed one after the other: those of tables of one pattern say nearly the same."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._compressor: Any = zlib.compressobj(1)

    def __getstate__(self) -> dict[str, Any]:
        return {"_parts": self._parts}

    def add(self, group: str, table: str, share: Share) -> None:
        """:param group: see `run_shares`."""
        self._parts.append(self._compressor.compress(pickle.dumps((group, table, share))))
        self._parts.append(self._compressor.flush(zlib.Z_SYNC_FLUSH))

    @property
    def size(self) -> int:
        """In bytes."""
        return sum(map(len, self._parts))

    def unpacked(self) -> dict[str, dict[str, Share]]:
        """The tables' shares by group."""
        stream = io.BytesIO(zlib.decompressobj().decompress(b"".join(self._parts)))
        size = stream.getbuffer().nbytes
        found: dict[str, dict[str, Share]] = {}
        while stream.tell() < size:
            group, table, share = pickle.load(stream)
            found.setdefault(group, {})[table] = share
        return found


def run_shares(
    shares: "PackedShares", written: Accumulator[list[tuple[str, str]]], batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Decode and write the records of several tables, one table after the other.

    Yields a row for each table: the JSON of a `ShareResult`. If the table failed, the object has only `table` and
    `failed`, and the task has deleted the table's files.

    :param shares: the tables' parts. A group has the tables that have topics in common, and is named by one topic.
    :param written: collects pairs of table and path.
    :param batches: raw records with the column `GROUP`, grouped by it, so that memory holds the records of one group at
        a time.
    """
    found, groups = list[dict[str, Any]](), shares.unpacked()
    for group, records in _by_group(batches):
        for alike in _alike(groups[group]):
            own = records if len(groups[group]) == 1 else list(_own(records, next(iter(alike.values()))))
            if any(batch.num_rows for batch in own):
                found += _written(alike, written, own)
    forget_archives()
    yield results(found)


def _alike(shares: Mapping[str, Share]) -> Collection[dict[str, Share]]:
    """Tables that take the same records."""
    groups: dict[str, dict[str, Share]] = {}
    for table, share in shares.items():
        groups.setdefault(repr(share.begin), {})[table] = share
    return groups.values()


def _written(
    shares: Mapping[str, Share], written: Accumulator[list[tuple[str, str]]], records: list[pa.RecordBatch]
) -> Iterator[dict[str, Any]]:
    """Write the same records for several tables: see `run_shares`."""
    observed = {table: dict[str, str]() for table in shares}
    stated = {table: dict[Fact, Place]() for table in shares}
    decoders = [
        replace(share.decoder, observe=observed[table].update, observe_stated=stated[table].update)
        for table, share in shares.items()
    ]
    # if a table fails, the others go on; its own job then shows the error
    try:
        decoded = list(decoded_together(decoders, records))
    except Exception as error:  # noqa: BLE001 - see above
        yield from (_failed(table, error) for table in shares)
        return
    for number, (table, share) in enumerate(shares.items()):
        task = replace(this_task(share.plan.operation), partition=0)
        changes = (batch for of_tables in decoded for batch in of_tables[number])
        try:
            hashed = share.hash.added(changes) if share.plan.index else changes
            result, paths = write_changes(share.plan, task, hashed)
        except Exception as error:  # noqa: BLE001 - see above
            yield _failed(table, error)
        else:
            written.add([(table, path) for path in paths])
            yield ShareResult(table, result, observed[table], stated[table]).to_json()


def _failed(table: str, error: Exception) -> dict[str, Any]:
    return {"table": table, "failed": f"{type(error).__name__}: {error}"}


def _own(batches: Iterable[pa.RecordBatch], share: Share) -> Iterator[pa.RecordBatch]:
    """The records of a group that a table hasn't applied."""
    for batch in batches:
        is_own = np.zeros(batch.num_rows, np.bool_)
        topics, partitions, offsets = (batch.column(name) for name in ("source", "partition", "offset"))
        for topic, begin in share.begin.items():
            for partition, offset in begin.items():
                here = pc.and_(pc.equal(topics, topic), pc.equal(partitions, int(partition)))
                is_own |= pc.and_(here, pc.greater_equal(offsets, offset)).to_numpy(zero_copy_only=False)
        yield batch.filter(pa.array(is_own))


def _by_group(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[str, list[pa.RecordBatch]]]:
    """Group consecutive records of the same group, without the column `GROUP`."""
    current, waiting = "", list[pa.RecordBatch]()
    for batch in batches:
        runs = pc.run_end_encode(batch.column(GROUP), pa.int32())
        batch, start = batch.drop_columns([GROUP]), 0
        for group, end in zip(runs.values.to_pylist(), runs.run_ends.to_pylist(), strict=True):
            if group != current and waiting:
                yield current, waiting
                waiting = []
            current = group
            waiting.append(batch.slice(start, end - start))
            start = end
    if waiting:
        yield current, waiting
