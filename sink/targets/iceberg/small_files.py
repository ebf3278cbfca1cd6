"""Finds the small files of a sink's last commits in an Iceberg table's snapshots, for minor compactions
(`sink.table.minor_compaction`).
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from py4j.java_gateway import JavaObject

from deltawriters.content import DataFile, DeleteFile
from deltawriters.keyindex import IndexedFile
from sink.errors import TemporaryError
from sink.spark.java_errors import JAVA_ERRORS, java_message
from sink.targets import merge_levels
from sink.targets.iceberg.java_table import JavaTable
from sink.targets.iceberg.writers import IcebergTableSpec
from sink.targets.notes import MERGED_FROM, MINOR, REWRITE, SINK_ID
from sink.targets.upkeep_values import Mergeable, MergeCandidates

_MOST_KNOWN = 1000
"""The files of this many snapshots are remembered. A minor compaction never looks back so far."""
_MOST_REPLACED = 1000
"""The search ends at a commit that removed more data files than this, since each costs a call to the JVM."""


@dataclass(frozen=True)
class _Seen:
    """What one snapshot changed.

    :param added: files that may be merged, if the sink made the snapshot; else the position delete files (v2).
    :param removed: paths of the files that it removed, if the sink made it.
    """

    added: Sequence["Mergeable"]
    removed: frozenset[str] = frozenset()


class _By(Enum):
    """Who made a snapshot."""

    SINK = auto()
    MINOR_COMPACTION = auto()
    REWRITE = auto()
    """By the sink, of files that aren't small any more (`sink.table.rewriting`)."""
    OTHERS = auto()


class SmallFiles:
    """The small files of one table. What is known of snapshots is kept for the next search."""

    def __init__(self, table: JavaTable) -> None:
        self._table = table
        # the layout, and what is known under it: one value, since two threads use it
        self._known: tuple[object, dict[int, _Seen]] = None, {}

    def search(self, spec: IcebergTableSpec, prefix: str, is_enough: Callable[[int, int], bool]) -> MergeCandidates:
        """See `Upkeep.merge_candidates`."""
        layout = spec.current_spec_id, spec.format_version
        known_as, known = self._known
        if known_as != layout or len(known) > _MOST_KNOWN:
            known = {}
            self._known = layout, known
        try:
            found = _Search(_Snapshots(self._table, spec, prefix, known), is_enough)
        except JAVA_ERRORS as error:  # perhaps somebody has just expired a snapshot that the search reads
            raise TemporaryError(java_message(error)) from None
        return MergeCandidates(
            found.number, found.commits, found.files, spec.current_spec_id, found.partitions, found.deletes, found.gone
        )

    def look_at_last(self, spec: IcebergTableSpec, prefix: str) -> None:
        """See `Upkeep.look_at_last`."""
        known_as, known = self._known
        if known_as == (spec.current_spec_id, spec.format_version):
            snapshots, last = _Snapshots(self._table, spec, prefix, known), self._table.java.currentSnapshot()
            if last is not None:
                snapshots.seen(last)


class _Snapshots:
    """Reads what snapshots changed.

    :param known: what is known of a snapshot, by its id. What is read is added, since each file costs several calls to
        the JVM.
    """

    def __init__(self, table: JavaTable, spec: IcebergTableSpec, prefix: str, known: dict[int, _Seen]) -> None:
        self.table = table
        self.spec = spec
        self._sink_id = prefix.removeprefix("rowdelta.")
        self._known = known

    def seen(self, snapshot: JavaObject) -> _Seen:
        number = int(snapshot.snapshotId())
        found = self._known.get(number)
        if found is None:
            summary = self.table.summary(snapshot)
            by = self.author(summary)
            removes = any(summary.get(f"{what}-files", "0") != "0" for what in ("deleted-data", "removed-delete"))
            removed = self._removed(snapshot) if by is not _By.OTHERS and removes else ()
            found = self._known[number] = _Seen(list(self._files(snapshot, by)), frozenset(removed))
        return found

    def author(self, summary: Mapping[str, str]) -> "_By":
        if summary.get(SINK_ID) != self._sink_id:
            return _By.OTHERS
        if REWRITE in summary:
            return _By.REWRITE
        return _By.MINOR_COMPACTION if MINOR in summary else _By.SINK

    def _removed(self, snapshot: JavaObject) -> Iterator[str]:
        """Paths that the snapshot removed. Iceberg also removes by itself delete files that are older than all data."""
        io = self.table.java.io()
        removed = [snapshot.removedDataFiles(io)]
        if self.spec.format_version < 3:
            removed.append(snapshot.removedDeleteFiles(io))
        return (path for files in removed for path in self.table.paths(files))

    def _files(self, snapshot: JavaObject, by: "_By") -> Iterator[Mergeable]:
        """The files that the snapshot added under the current spec: small data files, if the sink made the snapshot,
        and position delete files (v2).
        """
        io = self.table.java.io()
        sequence_number = int(snapshot.sequenceNumber())
        fields = [str(field.field_id) for field in self.spec.current_spec.fields]
        added = [snapshot.addedDataFiles(io)] if by in (_By.SINK, _By.MINOR_COMPACTION) else []
        if self.spec.format_version < 3:
            added.append(snapshot.addedDeleteFiles(io))
        described = (
            (files, number, content)
            for files in map(self.table.as_list, added)
            for number, content in enumerate(self.table.described_files(files))
        )
        for files, number, content in described:
            if content["spec-id"] != self.spec.current_spec_id:
                continue
            kind, size = content["content"].upper(), content["file-size-in-bytes"]
            if kind != "DATA" and not kind.startswith("POSITION"):
                continue
            if kind == "DATA" and (size * 2 > self.spec.target_file_size or self._has_unknown_row_ids(content)):
                continue
            partition = dict(zip(fields, content.get("partition", [None] * len(fields)), strict=True))
            path, row_id = content["file-path"], content.get("first-row-id")
            file: DataFile | DeleteFile = DeleteFile(path, size)
            if kind == "DATA":
                # in v2 only the delete files tell which rows are live
                rows = content["record-count"] if self.spec.format_version >= 3 else None
                file = DataFile(IndexedFile(path, content["spec-id"], partition), size, row_id, sequence_number, rows)
            yield Mergeable(json.dumps(partition), file, files.get(number))

    def _has_unknown_row_ids(self, content: Mapping[str, Any]) -> bool:
        """Whether the file was written before the table became v3. Such a file got its row ids later, and the manifest
        that added the file doesn't have them.
        """
        return self.spec.format_version >= 3 and "first-row-id" not in content


class _Search:
    """Finds the sink's small files in the snapshots.

    `number` is the number of the next minor compaction. `commits` and `files` count what was committed since the last
    one. `partitions` has the files that may be merged, and `deletes` all position delete files (v2) that may apply to
    them. Both are by partition. `gone` has the paths of files that were removed meanwhile.
    """

    def __init__(self, snapshots: _Snapshots, is_enough: Callable[[int, int], bool]) -> None:
        self.number = 1
        self._is_enough = is_enough
        self.commits = self.files = 0
        self.partitions: dict[str, list[Mergeable]] = {}
        self.deletes: dict[str, list[Mergeable]] = {}
        self.gone = set[str]()
        self._read = snapshots
        self._table, self._spec = snapshots.table, snapshots.spec
        found, spec = list(self._snapshots()), self._spec
        if self._is_enough(self.commits, self.files) and not spec.keeps_dropped_fields(spec.current_spec_id):
            self._collect(found)

    def _snapshots(self) -> Iterator[tuple[JavaObject, "_By", bool]]:
        """The snapshots whose files may be merged, and other writers' snapshots that may delete rows of these files;
        newest first. Of minor compactions also whether their files are of a higher level, and not merged. Also counts
        the sink's commits.

        The search ends at an equality delete: nobody knows which rows it deletes, but it applies to older files only.
        """
        java = self._table.java
        java_snapshot, older = java.currentSnapshot(), 0
        last, passed = None, None  # numbers of minor compactions
        begun = dict[int, int]()  # the snapshot from which each has moved rows, and its number
        while java_snapshot is not None:
            summary: Mapping[str, str] = self._table.summary(java_snapshot)
            by, snapshot_id, is_below = self._read.author(summary), int(java_snapshot.snapshotId()), False
            if by is _By.MINOR_COMPACTION:
                number = int(summary[MINOR])
                last = last or number
                self.number = last + 1
                begun[int(summary.get(MERGED_FROM, snapshot_id))] = number
                is_below = merge_levels.is_below(number, self.number)
            elif by is not _By.REWRITE and (
                self._removes_deletes(summary) or self._removes_too_much(summary, by is _By.SINK)
            ):
                return
            if snapshot_id in begun:
                passed = begun[snapshot_id]
                if not self._is_enough(self.commits, self.files) or merge_levels.is_below(passed, self.number):
                    return
            if java_snapshot.schemaId() != java.schema().schemaId():
                return
            if by is _By.SINK:
                if passed is None:
                    self.commits += 1
                    self.files += self._added(summary)
                older += passed in (None, 1)
            if by is not _By.OTHERS or summary.get("added-position-delete-files", "0") != "0":
                yield java_snapshot, by, is_below
            if summary.get("added-equality-delete-files", "0") != "0":
                return
            if older >= merge_levels.EVERY**2 and self._is_enough(self.commits, self.files):
                return  # these commits came before the first minor compaction, and may be very many
            parent = java_snapshot.parentId()
            java_snapshot = None if parent is None else java.snapshot(parent)

    def _added(self, summary: Mapping[str, str]) -> int:
        """How many files of the snapshot can be merged. In v3, delete files can't be."""
        deletes = summary.get("added-delete-files", "0") if self._spec.format_version < 3 else "0"
        return int(summary.get("added-data-files", "0")) + int(deletes)

    def _removes_too_much(self, summary: Mapping[str, str], own: bool) -> bool:
        """Whether data files were removed by others, or by the sink (`deletes: copy-on-write`) more than can be told
        apart one by one.
        """
        return int(summary.get("deleted-data-files", "0")) > (_MOST_REPLACED if own else 0)

    def _removes_deletes(self, summary: Mapping[str, str]) -> bool:
        """Whether delete files were removed that matter here. In v3 each commit removes deletion vectors, but minor
        compactions don't merge these.
        """
        return self._spec.format_version < 3 and summary.get("removed-delete-files", "0") != "0"

    def _collect(self, snapshots: Sequence[tuple[JavaObject, "_By", bool]]) -> None:
        for snapshot, by, is_below in snapshots:
            seen = self._read.seen(snapshot)
            for file in seen.added:
                if is_below or file.file.path in self.gone:
                    continue
                if by in (_By.SINK, _By.MINOR_COMPACTION):
                    self.partitions.setdefault(file.partition, []).append(file)
                if isinstance(file.file, DeleteFile):
                    self.deletes.setdefault(file.partition, []).append(file)
            self.gone |= seen.removed
