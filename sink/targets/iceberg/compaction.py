"""Compacts a table between micro-batches: small files become large ones, and deletes are applied.

Iceberg refuses a compaction if somebody has meanwhile deleted rows by position in the files that it rewrites. So a
compaction beside a busy sink may never succeed. The sink runs its own compaction while it writes nothing to the table.
"""

import logging
import time
from typing import TYPE_CHECKING

from py4j.java_gateway import JavaObject

from sink.spark.java_errors import JAVA_ERRORS, java_message
from sink.targets.base import MINOR, REWRITE, Compacted

if TYPE_CHECKING:
    from sink.targets.iceberg.table import IcebergTable

log = logging.getLogger("rowdelta")

OWN = "rowdelta.compaction"
"""Key in the summary of a snapshot that Iceberg made for a compaction of this module."""


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
            scan_seconds = time.monotonic() - started
            log.info("%s: compacting after %d commits", self._table.name, self._commits)
            result = self._rewrite()
        except JAVA_ERRORS as error:
            log.warning(
                "%s: not compacted, tried again after %d commits: %s",
                self._table.name,
                self._every,
                java_message(error).split("\n", 1)[0],
            )
            self._commits = 0
            return None
        log.info(
            "%s: compacted %d data files into %d and removed %d delete files | %.1f MB | %d ms",
            self._table.name,
            result.rewrittenDataFilesCount(),
            result.addedDataFilesCount(),
            result.removedDeleteFilesCount(),
            result.rewrittenBytesCount() / 1e6,
            (time.monotonic() - started) * 1000,
        )
        self._commits = 0
        return Compacted(
            int(result.rewrittenDataFilesCount()) + int(result.removedDeleteFilesCount()),
            int(result.addedDataFilesCount()),
            int(result.rewrittenBytesCount()),
            scan_seconds,
            time.monotonic() - started - scan_seconds,
        )

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

    def _rewrite(self) -> JavaObject:
        actions = self._table.iceberg.spark.actions.SparkActions.get(self._table.spark._jsparkSession)
        rewrite = actions.rewriteDataFiles(self._table.java)
        # a large file with this many delete files is read as slowly as the same number of small files
        rewrite = rewrite.option("delete-file-threshold", str(self._every)).snapshotProperty(OWN, "true")
        # Iceberg compares a delete only with data files of the same spec and partition. It would drop deletes that
        # apply to other files too, and so bring deleted rows back.
        if not self._table.has_global_deletes():
            rewrite = rewrite.option("remove-dangling-deletes", "true")
        return rewrite.execute()
