"""Merges small files of a Delta table that no key index knows, by Delta's own OPTIMIZE."""

import json
import logging
import time
from collections.abc import Callable, Iterable

from changelog.amounts import amount, sized
from sink.targets.delta.commands import optimize
from sink.targets.delta.live_files import full
from sink.targets.delta.state import DeltaState
from sink.targets.upkeep_values import Compacted, CompactionLimits

log = logging.getLogger("rowdelta")


def compact_files(
    table: DeltaState, limits: CompactionLimits, files_where: Callable[[str], frozenset[str]], *, dry_run: bool
) -> tuple[Compacted, int] | None:
    """See `Upkeep.compact`. `limits.where` may name partition columns only. In a clustered table OPTIMIZE orders rows
    too, however many bytes that takes, so such a table is left to its owner.
    """
    started = time.monotonic()
    if table.clustering():
        return None
    target = limits.target_file_size or table.spec.target_file_size
    only = None if limits.where is None else files_where(limits.where)
    below, partitions = limits.small_below(target), dict[str, list[int]]()
    for path, add in table.live.items():
        if int(add["size"]) < below and (only is None or full(table.spec.location, path) in only):
            partitions.setdefault(json.dumps(add["partitionValues"]), []).append(int(add["size"]))
    merged = [size for sizes in partitions.values() if len(sizes) > 1 for size in sizes]
    below = _below(merged, below, limits.most_bytes)
    small = [size for size in merged if size < below]
    fullest = max(map(len, partitions.values()), default=0)
    if fullest < limits.min_input_files or len(small) < max(2, limits.fewest_opened):
        return None
    if dry_run:
        return Compacted(len(small), 0, sum(small), time.monotonic() - started), 0
    removed, added, size = optimize(table.log, below, target, limits.where)
    table.refresh()
    if not removed:
        return None
    seconds = time.monotonic() - started
    log.info(
        "%s: compacted %s into %d | %s | %d ms",
        table.name, amount(removed, "data file"), added, sized(size), seconds * 1000,
    )  # fmt: skip
    return Compacted(removed, added, size, seconds), 0


def _below(sizes: Iterable[int], below: int, most_bytes: int | None) -> int:
    """The size that files to merge must be below: the smallest ones first, as many as may be read."""
    total = 0
    for size in sorted(sizes):
        total += size
        if most_bytes is not None and total > most_bytes:
            return size
    return below
