"""Rewrites files of a table that no key index knows, by Iceberg's `rewrite_data_files`: small ones become large, and
deletes are applied.

Iceberg refuses a rewrite if somebody has meanwhile deleted rows by position in its files. The sink doesn't do that with
`deletes: equality` or `mode: append`, so such a table is rewritten beside the stream. A file that Iceberg rewrites
keeps the sequence number of the snapshot that was read, so equality deletes that came meanwhile apply to it.
"""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from py4j.java_gateway import JavaObject

from changelog.amounts import amount, sized
from sink.errors import TemporaryError
from sink.spark.java_errors import JAVA_ERRORS, java_message
from sink.targets.iceberg.java_table import JavaTable
from sink.targets.upkeep_values import Compacted, CompactionFailedError, CompactionLimits

log = logging.getLogger("rowdelta")

COMPACTION = "rowdelta.compaction"
"""Key in the summary of a snapshot that Iceberg made for a compaction of this module."""


def _procedure(table: JavaTable) -> JavaObject:
    actions = table.iceberg.spark.actions.SparkActions.get(table.spark._jsparkSession)
    rewrite = actions.rewriteDataFiles(table.java).snapshotProperty(COMPACTION, "true")
    return rewrite if table.row_order() is None else rewrite.sort()  # by the table's sort order


def _compacted(table: JavaTable, result: JavaObject, started: float) -> Compacted:
    removed = int(result.removedDeleteFilesCount())
    log.info(
        "%s: compacted %s into %d%s | %s | %d ms",
        table.name,
        amount(result.rewrittenDataFilesCount(), "data file"),
        result.addedDataFilesCount(),
        f" and removed {amount(removed, 'delete file')}" if removed else "",
        sized(result.rewrittenBytesCount()),
        (time.monotonic() - started) * 1000,
    )
    return Compacted(
        int(result.rewrittenDataFilesCount()) + int(result.removedDeleteFilesCount()),
        int(result.addedDataFilesCount()),
        int(result.rewrittenBytesCount()),
        time.monotonic() - started,
    )


@dataclass(frozen=True)
class _Due:
    """What Iceberg's procedure would rewrite.

    :param sizes: of the data files in bytes, the largest first.
    :param opened: number of files that a scan opens for them.
    :param new: about how many files they become.
    """

    sizes: Sequence[int]
    opened: int
    new: int

    def gain(self, count: int) -> int:
        """About how many files less a scan opens if so many of them are rewritten."""
        return (self.opened - self.new) * count // max(1, len(self.sizes))


def compact_files(table: JavaTable, limits: CompactionLimits, *, dry_run: bool) -> tuple[Compacted, int] | None:
    """See `Upkeep.compact`. Delete files that no longer apply to anything aren't looked for: Iceberg's own procedure
    for that would drop deletes that reach into all partitions, and the stream may write some meanwhile.
    """
    started = time.monotonic()
    try:
        target = limits.target_file_size or table.spec.target_file_size
        condition = None if limits.where is None else table.condition(limits.where)
        due = _due(table.described_scans(table.current_scans(condition)), limits, target)
        # One file stays. A commit drops deletes that are older than every data file it leaves alone
        # (`MergingSnapshotProducer.apply`, Iceberg 1.11). It doesn't count the new files, and the stream may have
        # deleted rows of these meanwhile.
        count = min(_most_files(due.sizes, limits.most_bytes), int(table.current_scans().size()) - 1)
        if not count or due.gain(count) < limits.fewest_opened:
            return None
        if dry_run:
            return Compacted(len(due.sizes), 0, sum(due.sizes), time.monotonic() - started), 0
        options = {
            "min-input-files": limits.min_input_files,
            "delete-ratio-threshold": limits.delete_ratio_threshold,
            "delete-file-threshold": limits.delete_file_threshold,
            "max-file-group-size-bytes": min(
                limits.max_file_group_size, limits.most_bytes or limits.max_file_group_size
            ),
            "min-file-size-bytes": limits.small_below(target),
            "max-file-size-bytes": 2**62,  # large files are cheap to read
            "max-files-to-rewrite": count,
            "target-file-size-bytes": target,
            "max-concurrent-file-group-rewrites": limits.max_concurrent_groups,
            "partial-progress.enabled": "true",
            "partial-progress.max-commits": count,
        }
        rewrite = _procedure(table)
        if condition is not None:
            rewrite = rewrite.filter(condition)
        for name, value in options.items():
            rewrite = rewrite.option(name, str(value))
    except JAVA_ERRORS as error:
        raise TemporaryError(f"{table.name}: not compacted: {java_message(error)}") from None
    try:
        result = rewrite.execute()
    except JAVA_ERRORS as error:
        message = f"{table.name}: not compacted: {java_message(error)}"
        raise CompactionFailedError(message, sum(due.sizes[:count])) from None
    return _compacted(table, result, started), int(result.rewriteFailures().size())


def _due(scans: Iterable[Mapping[str, Any]], limits: CompactionLimits, target_file_size: int) -> _Due:
    """By the rules of Iceberg's `BinPackRewriteFilePlanner`."""
    partitions: dict[str, list[tuple[int, int, bool]]] = {}
    smaller = limits.small_below(target_file_size)
    for scan in scans:
        data, deletes = scan["data-file"], scan.get("delete-files", ())
        deleted = sum(int(delete["record-count"]) for delete in deletes if "referenced-data-file" in delete)
        is_dear = len(deletes) >= limits.delete_file_threshold or deleted >= limits.delete_ratio_threshold * max(
            1, int(data["record-count"])
        )
        key = f"{data['spec-id']} {data.get('partition')}"
        partitions.setdefault(key, []).append((int(data["file-size-in-bytes"]), len(deletes), is_dear))
    sizes, opened, new = list[int](), 0, 0
    largest = min(target_file_size, limits.max_file_group_size)
    for files in partitions.values():
        before, small = len(sizes), sum(size < smaller for size, _, _ in files)
        for size, deletes, is_dear in files:
            if is_dear or (small >= limits.min_input_files and size < smaller):
                sizes.append(size)
                opened += 1 + deletes
        new += -(-sum(sizes[before:]) // largest)
    return _Due(sorted(sizes, reverse=True), opened, new)


def _most_files(sizes: Sequence[int], most_bytes: int | None) -> int:
    """How many of the files may be rewritten, whichever they are: the procedure takes a number, not bytes."""
    count, total = 0, 0
    for size in sizes:
        total += size
        if most_bytes is not None and total > most_bytes:
            break
        count += 1
    return count
