"""Tasks that decode and write a few records of several tables, one table after the other."""

import io
import pickle
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.accumulators import Accumulator

from sink.plans import Share
from sink.results import ShareResult
from sink.spark.tasks.worker import forget_archives, results, this_task
from sink.spark.tasks.write import write_changes


class PackedShares:
    """Shares by source, compressed one after the other: those of tables of one pattern say nearly the same."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._compressor: Any = zlib.compressobj(1)

    def __getstate__(self) -> dict[str, Any]:
        return {"_parts": self._parts}

    def add(self, source: str, share: Share) -> None:
        self._parts.append(self._compressor.compress(pickle.dumps((source, share))))
        self._parts.append(self._compressor.flush(zlib.Z_SYNC_FLUSH))

    @property
    def size(self) -> int:
        """In bytes."""
        return sum(map(len, self._parts))

    def unpacked(self) -> dict[str, Share]:
        stream = io.BytesIO(zlib.decompressobj().decompress(b"".join(self._parts)))
        size = stream.getbuffer().nbytes
        found: dict[str, Share] = {}
        while stream.tell() < size:
            source, share = pickle.load(stream)
            found[source] = share
        return found


def run_shares(
    shares: "PackedShares", written: Accumulator[list[tuple[str, str]]], batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Decode and write the records of several tables, one table after the other.

    Yields a row for each table: the JSON of a `ShareResult`. If the table failed, the object has only `source` and
    `failed`, and the task has deleted the table's files.

    :param shares: the tables' parts, by source.
    :param written: collects pairs of source and path.
    :param batches: raw records, grouped by source, so that memory holds the records of one table at a time.
    """
    found, by_source = list[dict[str, Any]](), shares.unpacked()
    for source, records in _by_source(batches):
        share, observed = by_source[source], dict[str, str]()
        stated = dict[tuple[str, ...] | str, tuple[int, int]]()
        decoder = replace(share.decoder, observe=observed.update, observe_stated=stated.update)
        task = replace(this_task(share.plan.operation), partition=0)
        try:
            changes = decoder(records)
            result, paths = write_changes(share.plan, task, share.hash.added(changes) if share.plan.index else changes)
        except Exception as error:  # noqa: BLE001 - the other tables go on; this one's own job then shows the error
            found.append({"source": source, "failed": f"{type(error).__name__}: {error}"})
        else:
            written.add([(source, path) for path in paths])
            found.append(ShareResult(source, result, observed, stated).to_json())
    forget_archives()
    yield results(found)


def _by_source(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[str, list[pa.RecordBatch]]]:
    """Group consecutive records of the same source."""
    current, waiting = "", list[pa.RecordBatch]()
    for batch in batches:
        runs = pc.run_end_encode(batch.column("source"), pa.int32())
        start = 0
        for source, end in zip(runs.values.to_pylist(), runs.run_ends.to_pylist(), strict=True):
            if source != current and waiting:
                yield current, waiting
                waiting = []
            current = source
            waiting.append(batch.slice(start, end - start))
            start = end
    if waiting:
        yield current, waiting
