"""Finds the small files of a sink's last commits in a Delta table, for minor compactions (`sink.run.minor_compaction`).

The sink's files have tags in their `add`: the commit that wrote them, and the number of the minor compaction, if it was
one. So the live files tell everything, and no commit needs to be read.
"""

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from deltawriters.rewrite import SmallFile
from sink.targets import merge_levels
from sink.targets.base import MINOR, Mergeable, MergeCandidates
from sink.targets.delta.live_files import full
from sink.targets.delta.new_vectors import physical_rows, remove_of

if TYPE_CHECKING:
    from sink.targets.delta.table import DeltaTable

WRITER = "rowdelta.operation"
"""Tag of a data file: the commit of the sink that wrote it."""


def candidates(table: "DeltaTable", prefix: str, is_enough: Callable[[int, int], bool]) -> MergeCandidates:
    """See `Target.merge_candidates`."""
    spec = table.spec
    number = int(table.property(f"{prefix}.merges") or 0) + 1
    small: list[tuple[str, Any]] = []
    fresh = set[str]()
    for path, add in table.live.items():
        tags = add.get("tags") or {}
        if WRITER not in tags or int(add["size"]) * 2 > spec.target_file_size:
            continue
        merged = int(tags.get(MINOR, 0))
        if not merged:
            fresh.add(tags[WRITER])
        if not merged or not merge_levels.is_below(merged, number):
            small.append((path, add))
    files = sum(not (add.get("tags") or {}).get(MINOR) for _, add in small)
    partitions: dict[str, list[Mergeable]] = {}
    if is_enough(len(fresh), files):
        for path, add in small:
            text = json.dumps(add["partitionValues"])
            file = SmallFile(full(spec.location, path), int(add["size"]), None, 0)
            handle = remove_of(add, data_change=False)
            partitions.setdefault(text, []).append(Mergeable(True, text, physical_rows(add), file, handle))
    return MergeCandidates(number, len(fresh), files, 0, partitions, {})
