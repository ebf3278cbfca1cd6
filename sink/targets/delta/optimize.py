"""Compacts a Delta table between micro-batches, by Delta's own OPTIMIZE."""

import logging
import time
from typing import TYPE_CHECKING

from changelog.amounts import amount
from sink.errors import RowdeltaError
from sink.targets.base import Compacted, CompactionLimits
from sink.targets.delta.live_files import file_actions

if TYPE_CHECKING:
    from sink.targets.delta.table import DeltaTable

log = logging.getLogger("rowdelta")

_VERY_MANY = 10
"""OPTIMIZE runs if there are this many times `min_input_files` small files,"""
_GOOD_PART = 0.1
"""or if these have this share of the bytes of all files."""


class Optimize:
    """Runs OPTIMIZE on one table, after a number of commits.

    :param every: number of commits between two compactions. Other writers' commits count too.
    """

    def __init__(self, table: "DeltaTable", every: int) -> None:
        self._table = table
        self._every = every
        self._last: int | None = None

    def after_commit(self) -> Compacted | None:
        """Compact the table if it is due. A failure is only logged: the table stays as it was, and is only slower to
        read.
        """
        started = time.monotonic()
        version = self._table.snapshot_id()
        try:
            if self._last is None:
                self._last = self._last_optimized()
            if version - self._last < self._every:
                return None
            scan_seconds = time.monotonic() - started
            log.info("%s: compacting after %s", self._table.name, amount(version - self._last, "commit"))
            removed, added = self._table.log.optimize()
            self._table.refresh()
        except RowdeltaError as error:
            reason = str(error).split("\n", 1)[0]
            again = amount(self._every, "commit")
            log.warning("%s: not compacted, tried again after %s: %s", self._table.name, again, reason)
            self._last = version
            return None
        self._last = self._table.snapshot_id()
        log.info(
            "%s: compacted %s into %d | %d ms",
            self._table.name,
            amount(removed, "data file"),
            added,
            (time.monotonic() - started) * 1000,
        )
        return Compacted(removed, added, 0, scan_seconds, time.monotonic() - started - scan_seconds)

    def _last_optimized(self) -> int:
        """The version of the newest OPTIMIZE, as far as the last commits tell; else that after which one is due."""
        for commit in self._table.log.history(self._every):
            if commit.info.get("operation") == "OPTIMIZE" and any(file_actions(commit)):
                return commit.version
        return self._table.snapshot_id() - self._every


def compacted(table: "DeltaTable", limits: CompactionLimits, *, dry_run: bool) -> tuple[Compacted, int] | None:
    """See `Target.compact`. OPTIMIZE takes larger files too, so there must be very many small files, or these must be a
    good part of the table.
    """
    started = time.monotonic()
    smaller = limits.small_file_size or table.spec.target_file_size
    sizes = [int(add["size"]) for add in table.live.values()]
    small = [size for size in sizes if size < smaller]
    is_much = len(small) >= _VERY_MANY * limits.min_input_files or sum(small) >= _GOOD_PART * sum(sizes)
    if len(small) < limits.min_input_files or not is_much:
        return None
    if dry_run:
        return Compacted(len(small), 0, sum(small), time.monotonic() - started, 0.0), 0
    removed, added = table.log.optimize()
    table.refresh()
    log.info("%s: compacted %s into %d", table.name, amount(removed, "data file"), added)
    return Compacted(removed, added, sum(small), 0.0, time.monotonic() - started), 0
