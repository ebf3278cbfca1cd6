"""Joint Spark jobs: for all tables that have few records in a micro-batch, since planning a job for each table would
take longer than running it; and for tables that take the same records, since these are then read and decoded once.
"""

import functools
import json
import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.storagelevel import StorageLevel

from changelog.amounts import amount
from sink.errors import summary
from sink.plans import Share
from sink.results import ShareResult
from sink.sources.source import Range, TableBatch
from sink.spark.accumulators import ListParam, accumulator
from sink.spark.tasks.shares import GROUP, PackedShares, run_shares
from sink.spark.tasks.worker import RESULT_SCHEMA
from sink.table.microbatch import TableSink
from sink.table.task_plans import SMALL_BATCH
from sink.table.written import Begun, Written

log = logging.getLogger("rowdelta")

MOST_BYTES = 500_000
"""What the tasks must know of their tables, packed (`PackedShares`): a job of more than 1 MB leaves a file in the
driver's temporary folder (`spark.broadcast.UDFCompressionThreshold`)."""
MOST_PARTITIONS = 400
"""Topic-partitions that a job may read. Its few tasks hold a Kafka consumer for each until they end, whatever
`spark.kafka.consumer.cache.capacity` says."""
MOST_COMPANIONS = 8
"""Tables with the same records that a job writes. Each task has a buffer for each."""
PAUSE = 60.0
"""After a joint job failed, no other is tried for this many seconds."""


class JointWriter:
    """Writes several tables' shares of a micro-batch."""

    def __init__(self, spark: SparkSession) -> None:
        self._paths = accumulator(spark.sparkContext, self, list[tuple[str, str]](), ListParam[tuple[str, str]]())
        self._paused_until = 0.0

    def write(
        self, spark: SparkSession, sinks: Mapping[str, TableSink], shares: Mapping[str, tuple[TableBatch, Share]]
    ) -> dict[str, ShareResult]:
        """Write as many tables as possible. Each table's sink takes over its files.

        :param spark: the stream's session.
        :param sinks: the tables' sinks, by `TableSection.id`.
        :param shares: the tables' shares, likewise.
        :return: likewise. The caller must write each missing table in a job of its own.
            If the table caused a failure, that job shows the reason.
        """
        # the same setting as for a table's own job
        spark.conf.set("spark.sql.adaptive.enabled", "false")
        tasks = int(spark.conf.get("spark.sql.shuffle.partitions") or 1)
        done: dict[str, ShareResult] = {}
        groups = _groups(shares)
        for part, packed in _jobs(shares, groups, tasks * SMALL_BATCH):
            if len(part) > 1 and time.monotonic() >= self._paused_until:
                done |= self._write(sinks, part, packed, groups, tasks)
        return done

    def companions(self, batches: Mapping[str, TableBatch]) -> list[list[str]]:
        """Groups of tables that take the same records, each for `write_companions`."""
        groups, most = dict[str, list[str]](), MOST_COMPANIONS
        for table, batch in batches.items():
            if batch.share is not None and time.monotonic() >= self._paused_until:
                groups.setdefault(repr(batch.share.ranges), []).append(table)
        parts = (group[first : first + most] for group in groups.values() for first in range(0, len(group), most))
        return [part for part in parts if len(part) > 1]

    def write_companions(
        self, sinks: Mapping[str, TableSink], batch: TableBatch, begun: Mapping[str, Begun]
    ) -> dict[str, Written]:
        """Write tables that take the same records, however many records these are. See `write` for the rest.

        :param batch: that of any of the tables.
        :param begun: by table, see `TableSink.begin`.
        """
        first, *others = (sinks[table] for table in begun)
        try:
            return dict(zip(begun, first.write_with(others, batch, list(begun.values())), strict=True))
        except Exception as error:  # noqa: BLE001 - see `_write`
            self._pause(len(begun), error)
            return {}

    def _write(
        self,
        sinks: Mapping[str, TableSink],
        batches: Mapping[str, TableBatch],
        packed: PackedShares,
        groups: Mapping[str, str],
        most_tasks: int,
    ) -> dict[str, ShareResult]:
        function = functools.partial(run_shares, packed, self._paths)
        self._paths.value = []
        results: list[Mapping[str, Any]] = []
        failure: Exception | None = None
        try:
            reads = [batch.share for batch in batches.values() if batch.share is not None]
            ranges = _united(part for read in reads for part in read.ranges)
            tasks = min(len({groups[part.topic] for part in ranges}), most_tasks)
            records = reads[0].read(ranges, tasks)
            others = {part.topic: groups[part.topic] for part in ranges if groups[part.topic] != part.topic}
            group = F.col("source")
            if others:
                pairs = [F.lit(text) for pair in others.items() for text in pair]
                group = F.coalesce(F.element_at(F.create_map(*pairs), group), group)
            records = records.withColumn(GROUP, group)
            if tasks > 1:
                records = records.repartition(tasks, GROUP)
            written = records.sortWithinPartitions(GROUP).mapInArrow(lambda batches: function(batches), RESULT_SCHEMA)
            results = [json.loads(row.result) for row in written.collect()]
        except Exception as error:  # noqa: BLE001 - if one of the tables is the cause, its own job will show that
            failure = error
            self._pause(len(batches), error)
        by_table: dict[str, list[str]] = {}
        for table, path in self._paths.value:
            by_table.setdefault(table, []).append(path)
        for table, paths in by_table.items():
            sinks[table].take_over(paths)
            if failure is not None:
                # if one task fails, the files of the other tasks are deleted too
                sinks[table].discard()
        for result in results:
            if "failed" in result:
                name = sinks[result["table"]].table.name
                log.warning("%s: to be written by itself: %s", name, result["failed"])
        return {result["table"]: ShareResult.from_json(result) for result in results if "failed" not in result}

    def _pause(self, tables: int, error: Exception) -> None:
        self._paused_until = time.monotonic() + PAUSE
        told = amount(tables, "table"), summary(error)
        log.warning("%s could not be written in one job; for a minute each gets its own: %s", *told)


@contextmanager
def read_once(frame: DataFrame) -> Iterator[None]:
    """Inside this context, jobs of several tables with the same topics read a micro-batch's frame once. Nothing is kept
    before one of them asks for it.
    """
    frame.persist(StorageLevel.DISK_ONLY)
    try:
        yield
    finally:
        frame.unpersist()


def _groups(shares: Mapping[str, tuple[TableBatch, Share]]) -> dict[str, str]:
    """Topic -> the first topic of its group: tables that have topics in common are written by one task."""
    groups: dict[str, str] = {}
    for _, share in shares.values():
        topics = sorted(share.begin)
        groups.update({topic: topic for topic in topics if topic not in groups})
        if len(topics) > 1:
            together = {groups[topic] for topic in topics}
            groups = {topic: min(together) if group in together else group for topic, group in groups.items()}
    return groups


def _united(ranges: Iterable[Range]) -> list[Range]:
    """All records of several ranges, each once. Of the same partition they have the same end."""
    found: dict[str, Range] = {}
    for part in ranges:
        known = found.get(part.topic, part)
        begin = {p: min(offset, known.begin.get(p, offset)) for p, offset in part.begin.items()}
        found[part.topic] = Range(part.topic, {**known.begin, **begin}, {**known.end, **part.end})
    return list(found.values())


def _jobs(
    shares: Mapping[str, tuple[TableBatch, Share]], groups: Mapping[str, str], most_records: int
) -> Iterator[tuple[dict[str, TableBatch], PackedShares]]:
    """Groups of shares, each for one job. A job has not too many records, and not too many topic-partitions. Its tasks
    get not too many bytes.
    """
    part: dict[str, TableBatch] = {}
    packed, records, partitions = PackedShares(), 0, 0
    for table, (batch, share) in shares.items():
        more = batch.estimated_rows or 0
        read = sum(len(part.begin) for part in batch.share.ranges) if batch.share is not None else 0
        full = records + more > most_records or partitions + read > MOST_PARTITIONS or packed.size > MOST_BYTES
        if part and full:
            yield part, packed
            part, packed, records, partitions = {}, PackedShares(), 0, 0
        part[table] = batch
        packed.add(groups[next(iter(share.begin))], table, share)
        records += more
        partitions += read
    if part:
        yield part, packed
