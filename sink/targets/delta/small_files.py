"""Finds the small files of a sink's last commits in a Delta table, for minor compactions
(`sink.table.minor_compaction`).

The sink's files have tags in their `add`: the commit that wrote them, and the number of the minor compaction, if it was
one. So the live files tell everything, and no commit needs to be read.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from deltawriters.content import DataFile
from deltawriters.keyindex import IndexedFile
from sink.targets import merge_levels
from sink.targets.delta.live_files import full
from sink.targets.delta.new_vectors import stated_rows
from sink.targets.delta.partitions import is_clear
from sink.targets.delta.state import DeltaState
from sink.targets.delta.tags import DELETED_AT, SCHEMA, WRITER, schema_tag
from sink.targets.notes import MINOR, SINK_ID
from sink.targets.upkeep_values import Mergeable, MergeCandidates, Rewritable


def rewritables(table: DeltaState) -> Iterator[list[Rewritable]]:
    """See `Upkeep.rewritables`."""
    yield [file for file in counted(table) if is_clear(table.spec.partitioning, json.loads(file.partition))]


def counted(table: DeltaState) -> list[Rewritable]:
    """The live files whose number of rows the log has."""
    spec, found = table.spec, list[Rewritable]()
    for path, add in table.live.items():
        rows = stated_rows(add)
        if rows is None:
            continue
        deleted = int((add.get("deletionVector") or {}).get("cardinality", 0))
        file = _data_file(spec.location, path, add, rows - deleted)
        text = json.dumps(add["partitionValues"])
        found.append(Rewritable(0, text, rows, deleted, int(deleted > 0), file, settled=_settled(table, add)))
    return found


def _data_file(location: str, path: str, add: Mapping[str, Any], live_rows: int | None = None) -> DataFile:
    file = IndexedFile(full(location, path), 0, add["partitionValues"])
    return DataFile(file, int(add["size"]), live_rows=live_rows)


def _settled(table: DeltaState, add: Mapping[str, Any]) -> int:
    """See `Rewritable`. 0 if nothing tells."""
    version, _, place = (add.get("tags") or {}).get(DELETED_AT, "").partition(" ")
    is_of_vector = version and place == (add.get("deletionVector") or {}).get("pathOrInlineDv")
    return max(0, table.snapshot_id() - int(version)) if is_of_vector else 0  # a clone's versions begin at 0 again


def candidates(table: DeltaState, prefix: str, is_enough: Callable[[int, int], bool]) -> MergeCandidates:
    """See `Upkeep.merge_candidates`."""
    spec, sink_id = table.spec, prefix.removeprefix("rowdelta.")
    schema = schema_tag(spec.schema)
    number = int(table.property(f"{prefix}.merges") or 0) + 1
    small: list[tuple[str, Any]] = []
    fresh, files = set[str](), 0
    for path, add in table.live.items():
        tags = add.get("tags") or {}
        is_own = tags.get(SINK_ID) == sink_id and tags.get(SCHEMA) == schema
        if not is_own or int(add["size"]) * 2 > spec.target_file_size or stated_rows(add) is None:
            continue  # checkpoints may leave statistics out (delta.checkpoint.writeStatsAsJson)
        merged = int(tags.get(MINOR, 0))
        if not merged:
            fresh.add(tags[WRITER])
            files += 1
        if not merged or not merge_levels.is_below(merged, number):
            small.append((path, add))
    partitions: dict[str, list[Mergeable]] = {}
    if is_enough(len(fresh), files):
        for path, add in small:
            text = json.dumps(add["partitionValues"])
            file = replace(_data_file(spec.location, path, add), rows=stated_rows(add))
            partitions.setdefault(text, []).append(Mergeable(text, file))
    return MergeCandidates(number, len(fresh), files, 0, partitions, {})
