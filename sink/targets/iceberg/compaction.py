"""Compacts a table between micro-batches: small files become large ones, and deletes are applied.

Iceberg refuses a compaction if somebody has meanwhile deleted rows by position in the files that it rewrites. So a
compaction beside a busy sink may never succeed. The sink runs its own compaction while it writes nothing to the table.

With `deletes: equality` nobody deletes rows by position in files of earlier commits. So such a table can be compacted
beside the stream too (`compacted`). A file that Iceberg rewrites keeps the sequence number of the snapshot that was
read, so equality deletes that were committed meanwhile apply to it.
"""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from py4j.java_gateway import JavaObject

from changelog.amounts import amount, sized
from sink.errors import TemporaryError
from sink.spark.java_errors import JAVA_ERRORS, java_message
from sink.targets.base import Compacted, CompactionFailedError, CompactionLimits
from sink.targets.notes import MINOR, REWRITE

if TYPE_CHECKING:
    from sink.targets.iceberg.table import IcebergTable

log = logging.getLogger("rowdelta")

COMPACTION = "rowdelta.compaction"
"""Key in the summary of a snapshot that Iceberg made for a compaction of this module."""
_SMALL = 0.75
"""A file below this share of the target size is small (`SizeBasedFileRewritePlanner`)."""


class RewriteDataFiles:
    """Runs Iceberg's `rewrite_data_files` on one table, after a number of commits.

    :param table: the table.
    :param every: number of commits between two compactions. Commits and compactions of other writers count too.
    """

    def __init__(self, table: "IcebergTable", every: int) -> None:
        self._table = table
        self._every = every
        self._commits = every  # so the first commit counts the commits of earlier runs

    def after_commit(self) -> Compacted | None:
        """Compact the table if it is due. A failure is only logged: the table stays as it was, and is only slower to
        read.
        """
        self._commits += 1
        if self._commits < self._every:
            return None
        started = time.monotonic()
        try:
            self._commits = self._since_last()
            if self._commits < self._every:
                return None
            most = self._most_files()
            if most == 0:
                self._commits = 0
                return None
            scan_seconds = time.monotonic() - started
            log.info("%s: compacting after %s", self._table.name, amount(self._commits, "commit"))
            result = self._rewrite(most)
            self._table.look()
        except JAVA_ERRORS as error:
            log.warning(
                "%s: not compacted, tried again after %s: %s",
                self._table.name,
                amount(self._every, "commit"),
                java_message(error).split("\n", 1)[0],
            )
            self._commits = 0
            return None
        self._commits = 0
        return _compacted(self._table, result, started, scan_seconds)

    def _since_last(self) -> int:
        """Number of commits since the newest compaction in the current snapshot's history. Counts up to `every`."""
        table = self._table.java
        table.refresh()
        snapshot, count = table.currentSnapshot(), 0
        while snapshot is not None and count < self._every:
            is_minor = any(snapshot.summary().get(name) is not None for name in (MINOR, REWRITE))
            if not is_minor and str(snapshot.operation()) == "replace":
                break
            count += not is_minor
            parent = snapshot.parentId()
            snapshot = None if parent is None else table.snapshot(parent)
        return count

    def _most_files(self) -> int | None:
        """How many files may be rewritten. One of them stays if there are equality deletes: see `compacted`."""
        summary = self._table.java.currentSnapshot().summary()
        if int(summary.get("total-equality-deletes") or 0) == 0:
            return None
        return int(self._table.current_scans().size()) - 1

    def _rewrite(self, most: int | None) -> JavaObject:
        # a large file with this many delete files is read as slowly as the same number of small files
        rewrite = _procedure(self._table).option("delete-file-threshold", str(self._every))
        if most is not None:
            rewrite = rewrite.option("max-files-to-rewrite", str(most))
        # Iceberg compares a delete only with data files of the same spec and partition. It would drop deletes that
        # apply to other files too, and so bring deleted rows back.
        if not self._table.has_global_deletes():
            rewrite = rewrite.option("remove-dangling-deletes", "true")
        return rewrite.execute()


def _procedure(table: "IcebergTable") -> JavaObject:
    actions = table.iceberg.spark.actions.SparkActions.get(table.spark._jsparkSession)
    return actions.rewriteDataFiles(table.java).snapshotProperty(COMPACTION, "true")


def _compacted(table: "IcebergTable", result: JavaObject, started: float, scan_seconds: float) -> Compacted:
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
        scan_seconds,
        time.monotonic() - started - scan_seconds,
    )


@dataclass(frozen=True)
class _Due:
    """What Iceberg's procedure would rewrite.

    :param sizes: of the data files in bytes, the largest first.
    :param opened: number of files that a scan opens for them.
    """

    sizes: Sequence[int]
    opened: int


def compacted(table: "IcebergTable", limits: CompactionLimits, *, dry_run: bool) -> tuple[Compacted, int] | None:
    """See `Target.compact`. Delete files that no longer apply to anything aren't looked for: Iceberg's own procedure
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
        if not count or due.opened - count < limits.fewest_opened:
            return None
        scan_seconds = time.monotonic() - started
        if dry_run:
            return Compacted(len(due.sizes), 0, sum(due.sizes), scan_seconds, 0.0), 0
        options = {
            "min-input-files": limits.min_input_files,
            "delete-ratio-threshold": limits.delete_ratio_threshold,
            "delete-file-threshold": limits.delete_file_threshold,
            "max-file-group-size-bytes": min(
                limits.max_file_group_size, limits.most_bytes or limits.max_file_group_size
            ),
            "min-file-size-bytes": limits.small_file_size or int(_SMALL * target),
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
    return _compacted(table, result, started, scan_seconds), int(result.rewriteFailures().size())


def _due(scans: Iterable[Mapping[str, Any]], limits: CompactionLimits, target_file_size: int) -> _Due:
    """By the rules of Iceberg's `BinPackRewriteFilePlanner`."""
    partitions: dict[str, list[tuple[int, int, bool]]] = {}
    smaller = limits.small_file_size or _SMALL * target_file_size
    for scan in scans:
        data, deletes = scan["data-file"], scan.get("delete-files", ())
        deleted = sum(int(delete["record-count"]) for delete in deletes if "referenced-data-file" in delete)
        is_dear = len(deletes) >= limits.delete_file_threshold or deleted >= limits.delete_ratio_threshold * max(
            1, int(data["record-count"])
        )
        key = f"{data['spec-id']} {data.get('partition')}"
        partitions.setdefault(key, []).append((int(data["file-size-in-bytes"]), len(deletes), is_dear))
    sizes, opened = list[int](), 0
    for files in partitions.values():
        small = sum(size < smaller for size, _, _ in files)
        for size, deletes, is_dear in files:
            if is_dear or (small >= limits.min_input_files and size < smaller):
                sizes.append(size)
                opened += 1 + deletes
    return _Due(sorted(sizes, reverse=True), opened)


def _most_files(sizes: Sequence[int], most_bytes: int | None) -> int:
    """How many of the files may be rewritten, whichever they are: the procedure takes a number, not bytes."""
    count, total = 0, 0
    for size in sizes:
        total += size
        if most_bytes is not None and total > most_bytes:
            break
        count += 1
    return count
