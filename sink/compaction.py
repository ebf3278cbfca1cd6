"""Compaction between micro-batches: small files become large ones, and deletes are applied.

Iceberg refuses a compaction if rows of the files that it rewrites were deleted by position meanwhile, so one that runs
beside a busy sink may never get through. The sink's own runs when nothing of the table is being written.
"""

import logging
import time

from py4j.java_gateway import JavaObject

from sink.iceberg import IcebergTable
from sink.java_errors import JAVA_ERRORS, java_message

log = logging.getLogger("rowdelta")

OWN = "rowdelta.compaction"
"""In the summary of a snapshot that is a compaction of ours, though Iceberg made it."""

MINOR = "rowdelta.minor-compaction"
"""In the summary of a snapshot that is a minor compaction (`sink.minor_compaction`): how many there were, with it."""


class Compaction:
    """Iceberg's `rewrite_data_files` on one table, after every so many commits.

    :param every: commits, the sink's and others', from one compaction (the sink's or another) to the next.
    """

    def __init__(self, table: IcebergTable, every: int) -> None:
        self._table = table
        self._every = every
        self._commits = every  # what an earlier run left is counted after the first commit

    def after_commit(self) -> None:
        """Compact the table if it is time to. What goes wrong is logged and no more: the table is as it was, only
        slower to read.
        """
        self._commits += 1
        if self._commits < self._every:
            return
        started = time.monotonic()
        try:
            self._commits = self._since_last()
            if self._commits < self._every:
                return
            log.info("%s: compacting after %d commits", self._table.name, self._commits)
            result = self._rewrite()
        except JAVA_ERRORS as error:
            log.warning(
                "%s: not compacted, tried again after %d commits: %s",
                self._table.name,
                self._every,
                java_message(error).split("\n", 1)[0],
            )
        else:
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

    def _since_last(self) -> int:
        """Commits since the newest compaction in the current snapshot's history, as far as matters."""
        table = self._table.java
        table.refresh()
        snapshot, count = table.currentSnapshot(), 0
        while snapshot is not None and count < self._every:
            is_minor = snapshot.summary().get(MINOR) is not None
            if not is_minor and str(snapshot.operation()) == "replace":
                break
            count += not is_minor
            parent = snapshot.parentId()
            snapshot = None if parent is None else table.snapshot(parent)
        return count

    def _rewrite(self) -> JavaObject:
        actions = self._table.iceberg.spark.actions.SparkActions.get(self._table.spark._jsparkSession)
        rewrite = actions.rewriteDataFiles(self._table.java)
        # a file with as many delete files is read as slowly as that many small files, however large it is
        rewrite = rewrite.option("delete-file-threshold", str(self._every)).snapshotProperty(OWN, "true")
        # Iceberg compares a delete with the data files of its own spec and partition, so it would drop deletes that
        # reach further, and bring back the rows that they delete
        if not self._table.has_global_deletes():
            rewrite = rewrite.option("remove-dangling-deletes", "true")
        return rewrite.execute()
