"""Minor compactions merge the small files of the last commits into larger files. They cost little and keep reads fast.

They work like a log-structured merge tree. When at least `EVERY` commits have written at least `_ENOUGH` files, a minor
compaction merges these files. After `EVERY` minor compactions, the next one merges their files too, and so on. So a row
is written again only once for each level. Large files stay as they are, even if many of their rows are deleted:
`compact_every` (`sink.targets.iceberg.compaction`), or whoever maintains the table, rewrites these.

A minor compaction merges only files of this sink, and doesn't plan over the whole table: it finds the files in the
snapshots since the last minor compaction. The search ends at another writer's commit that removed files.
"""

import json
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any
from uuid import uuid4

from py4j.java_gateway import JavaObject
from pyiceberg.transforms import VoidTransform
from pyspark.accumulators import Accumulator

from deltawriters import TaskId
from deltawriters.keyindex import CorruptIndexError, RunInfo
from deltawriters.rewrite import RewriteGroup, SmallFile
from sink.run.keyindex import IndexLostError, KeyIndex
from sink.spark import task
from sink.spark.java_errors import JAVA_ERRORS, java_message
from sink.targets.iceberg.commit import IcebergCommitter, RewriteCommit, TableChangedError
from sink.targets.iceberg.compaction import MINOR
from sink.targets.iceberg.table import IcebergTable
from sink.targets.iceberg.writers import IcebergTableSpec as TableSpec

log = logging.getLogger("rowdelta")

EVERY = 4
"""A minor compaction follows after at least this many commits. One of the next higher level follows after this many
minor compactions of a level.
"""
_ENOUGH = 16
"""A minor compaction needs at least this many files in the last commits. A read hardly notices fewer files, and so a
table that gets one file a commit is compacted less often.
"""
_HIGHEST_LEVEL = 3
"""At this level the files of 64 minor compactions become one. Looking further back would cost more than it saves."""
_FEWEST = 4
"""With fewer files in a partition, merging doesn't pay."""
_OTHER_LEVEL = 8
"""A file isn't merged with smaller ones if it is this many times larger than they are on average."""
_MOST_KNOWN = 1000
"""The files of this many snapshots are remembered. A minor compaction never looks back so far."""
_ON_DRIVER = 4 * 1024 * 1024
"""Up to this many bytes of files, the driver merges them itself: a Spark job would cost more than it saves."""


@dataclass(frozen=True)
class _Seen:
    """What one snapshot changed.

    :param added: files that may be merged, if the sink made the snapshot; else the position delete files (v2).
    :param removed: paths of the files that it removed, if it was a minor compaction.
    """

    added: Sequence["_File"]
    removed: frozenset[str] = frozenset()


@dataclass(frozen=True)
class _File:
    """A data file of this sink, or a position delete file (v2)."""

    is_data: bool
    partition: str
    rows: int
    small: SmallFile
    java: JavaObject


def _chosen(files: Sequence[_File]) -> list[_File]:
    """The files to merge among a partition's `files`. Empty if merging doesn't pay.

    Files that are much larger than the others are left out: they belong to a higher level, like those of a first load.
    """
    data = sorted((file for file in files if file.is_data), key=lambda file: file.small.size_in_bytes)
    deletes = [file for file in files if not file.is_data]
    count, total = 0, 0
    for file in data:
        if count and file.small.size_in_bytes * count > _OTHER_LEVEL * total:
            break
        count += 1
        total += file.small.size_in_bytes
    data = data[:count] if count >= _FEWEST else []
    return data + (deletes if (data and len(deletes) > 1) or len(deletes) >= _FEWEST else [])


def _groups(chosen: Sequence[_File], applying: Sequence[_File], spec: TableSpec) -> Iterator[RewriteGroup]:
    """Groups of a partition's files, so that tasks can share the work. Each group has about as much data as a file
    should have. The delete files are a group of their own.

    :param chosen: the files to merge.
    :param applying: the partition's position delete files (v2) of all writers.
    """
    spec_id, partition = spec.current_spec_id, chosen[0].partition
    all_deletes = tuple(file.small for file in applying)
    data = [file.small for file in chosen if file.is_data]
    waiting, size = list[SmallFile](), 0
    for small in data:
        waiting.append(small)
        size += small.size_in_bytes
        if size >= spec.target_file_size:
            yield RewriteGroup(spec_id, partition, tuple(waiting), applying=all_deletes)
            waiting, size = [], 0
    if waiting:
        yield RewriteGroup(spec_id, partition, tuple(waiting), applying=all_deletes)
    deletes = tuple(file.small for file in chosen if not file.is_data)
    if deletes:
        yield RewriteGroup(spec_id, partition, (), deletes, frozenset(small.path for small in data))


class _By(Enum):
    """Who made a snapshot."""

    SINK = auto()
    MINOR_COMPACTION = auto()
    OTHERS = auto()


class MinorCompaction:
    """The minor compactions of one table.

    :param prefix: property prefix of the sink's state. Only this sink's files are merged.
    """

    def __init__(
        self,
        table: IcebergTable,
        key: Sequence[str],
        committer: IcebergCommitter,
        prefix: str,
    ) -> None:
        self._table = table
        self._key = tuple(key)
        self._committer = committer
        self._prefix = prefix
        # not the accumulator of the micro-batches: a failed micro-batch deletes the files that are in it
        self._written: Accumulator[list[str]] = table.spark.sparkContext.accumulator(list[str](), task.ListParam[str]())
        self._commits, self._files = EVERY, _ENOUGH  # so the first commit looks for the small files of earlier runs
        self._known: dict[int, _Seen] = {}
        self._known_as: object = None

    def count(self, files: int) -> None:
        """Call this after each commit, with the number of files that the commit wrote."""
        self._commits += 1
        self._files += files

    def is_due(self) -> bool:
        return _are_enough(self._commits, self._files)

    def run(self, spec: TableSpec, key_index: KeyIndex, operation: str) -> bool:
        """Merge the small files, if there are enough of them. A failure before the commit is only logged.

        :param spec: the table.
        :param key_index: the index of the current snapshot.
        :param operation: the commit that stored the sink's position.
        :return: whether there is a new snapshot.
        :raises IndexLostError: the index has to be built again.
        :raises TableError: see `IcebergCommitter.rewrite`.
        :raises TemporaryError: see `IcebergCommitter.rewrite`.
        """
        started = time.monotonic()
        layout = spec.current_spec_id, spec.format_version
        if self._known_as != layout or len(self._known) > _MOST_KNOWN:
            self._known, self._known_as = {}, layout
        try:
            found = _Search(self._table, spec, self._prefix, self._known)
        except JAVA_ERRORS as error:
            self._give_up(error)  # perhaps somebody has just expired a snapshot that the search reads
            return False
        self._commits, self._files = found.commits, found.files
        if not self.is_due():
            return False
        by_partition = [chosen for files in found.partitions.values() if (chosen := _chosen(files))]
        if not by_partition:
            return False  # the next commit makes it look again
        self._commits = self._files = 0
        self._written.value = []
        name = uuid4().hex[:16]
        if spec.format_version >= 3:
            by_partition = [[self._counted(file, key_index) for file in chosen] for chosen in by_partition]
        groups = [
            group
            for chosen in by_partition
            for group in _groups(chosen, found.deletes.get(chosen[0].partition, ()), spec)
        ]
        gone = [file.path for group in groups for file in group.files]
        try:
            files, runs = self._rewrite(spec, key_index, name, groups)
            index = key_index.rewritten(name, gone, runs, self._written.value)
        except Exception as error:
            # any error is caught: nothing is lost if the small files stay
            self._delete(spec, key_index, self._written.value)
            if isinstance(error, CorruptIndexError) or "CorruptIndexError" in str(error):
                raise IndexLostError(str(error).split("\n", 1)[0]) from error
            self._give_up(error)
            return False
        replaced = [file.java for chosen in by_partition for file in chosen]
        summary = {MINOR: str(found.number), "rowdelta.sink-id": self._prefix.removeprefix("rowdelta.")}
        written_for = spec.iceberg_schema.schema_id, spec.current_spec_id, spec.format_version
        try:
            self._committer.rewrite(
                RewriteCommit(self._prefix, operation, files, replaced, index, summary, written_for)
            )
        except TableChangedError as error:
            self._delete(spec, key_index, index.new_paths)
            self._give_up(error)
            return False
        log.info(
            "%s: merged %d small files and %d delete files into %d | %.1f MB | %d ms",
            self._table.name,
            len(gone),
            len(replaced) - len(gone),
            len(files),
            sum(group.size_in_bytes for group in groups) / 1e6,
            (time.monotonic() - started) * 1000,
        )
        return True

    def _counted(self, file: _File, key_index: KeyIndex) -> _File:
        """The file with the number of its live rows (v3)."""
        return replace(file, small=replace(file.small, live_rows=file.rows - key_index.deleted_rows(file.small.path)))

    def _rewrite(
        self, spec: TableSpec, key_index: KeyIndex, name: str, groups: Sequence[RewriteGroup]
    ) -> tuple[list[str], list[RunInfo]]:
        """Write the groups' rows into new files.

        :return: the new files as `ContentFileParser` JSON, and their runs for the index.
        """
        spark = self._table.spark
        plan = task.RewritePlan(
            spec, self._key, key_index.slice(), key_index.next_sequence, key_index.key_hash(spec), name
        )
        if sum(group.size_in_bytes for group in groups) <= _ON_DRIVER:
            results = [task.rewritten(plan, TaskId(0, 0, name), groups, self._written.add)]
        else:
            tasks = min(len(groups), int(spark.conf.get("spark.sql.shuffle.partitions") or 1))
            shares: list[list[RewriteGroup]] = [[] for _ in range(tasks)]
            for group in sorted(groups, key=lambda group: -group.size_in_bytes):
                min(shares, key=lambda share: sum(g.size_in_bytes for g in share)).append(group)
            written = self._written
            dealt = spark.sparkContext.parallelize(shares, tasks)
            results = dealt.mapPartitions(lambda part: task.rewrite(plan, written, part)).collect()
        files = [json.dumps(file) for result in results for file in result["files"]]
        return files, [RunInfo.from_json(run) for result in results for run in result["runs"]]

    def _give_up(self, error: Exception) -> None:
        reason = java_message(error) if isinstance(error, JAVA_ERRORS) else str(error)
        log.warning("%s: small files not merged, tried again later: %s", self._table.name, reason.split("\n", 1)[0])

    def _delete(self, spec: TableSpec, key_index: KeyIndex, paths: Iterable[str]) -> None:
        for path in paths:
            try:
                key_index.io_of(path, spec).delete(path)
            except OSError:
                log.warning("%s: could not delete %s; Iceberg's remove_orphan_files will", self._table.name, path)


class _Search:
    """Finds the sink's small files in the snapshots.

    `number` is the number of the next minor compaction. `commits` and `files` count what was committed since the last
    one. `partitions` has the files that may be merged, and `deletes` all position delete files (v2) that may apply to
    them. Both are by partition.

    :param known: what is known of a snapshot, by its id. The search adds what it reads, since each file costs several
        calls to the JVM.
    """

    def __init__(self, table: IcebergTable, spec: TableSpec, prefix: str, known: dict[int, _Seen]) -> None:
        self.number = 1
        self.commits = self.files = 0
        self.partitions: dict[str, list[_File]] = {}
        self.deletes: dict[str, list[_File]] = {}
        self._table = table
        self._spec = spec
        self._sink_id = prefix.removeprefix("rowdelta.")
        snapshots = list(self._snapshots())
        if _are_enough(self.commits, self.files) and not _keeps_dropped_fields(spec):
            self._collect(snapshots, known)

    def _snapshots(self) -> Iterator[tuple[JavaObject, "_By"]]:
        """The snapshots whose files may be merged, and other writers' snapshots that may delete rows of these files;
        newest first. Also counts the sink's commits.

        The search ends at an equality delete: nobody knows which rows it deletes, but it applies to older files only.
        """
        java = self._table.java
        java_snapshot, last, first_passed, older = java.currentSnapshot(), None, False, 0
        while java_snapshot is not None:
            summary: Mapping[str, str] = self._table.summary(java_snapshot)
            own = summary.get("rowdelta.sink-id") == self._sink_id
            number = int(summary[MINOR]) if own and MINOR in summary else None
            if number is not None:
                last = last or number
                self.number = last + 1
                if not _are_enough(self.commits, self.files) or number <= self.number - EVERY ** _level(self.number):
                    return
                first_passed = number == 1
            elif summary.get("deleted-data-files", "0") != "0" or self._removes_deletes(summary):
                return
            if java_snapshot.schemaId() != java.schema().schemaId():
                return
            if own:
                if number is None and last is None:
                    self.commits += 1
                    self.files += self._added(summary)
                older += number is None and (first_passed or last is None)
            by = _By.OTHERS if not own else _By.SINK if number is None else _By.MINOR_COMPACTION
            if own or summary.get("added-position-delete-files", "0") != "0":
                yield java_snapshot, by
            if summary.get("added-equality-delete-files", "0") != "0":
                return
            if older >= EVERY**2 and _are_enough(self.commits, self.files):
                return  # these commits are from before minor compactions existed; there may be very many of them
            parent = java_snapshot.parentId()
            java_snapshot = None if parent is None else java.snapshot(parent)

    def _added(self, summary: Mapping[str, str]) -> int:
        """How many files of the snapshot can be merged. In v3, delete files can't be."""
        deletes = summary.get("added-delete-files", "0") if self._spec.format_version < 3 else "0"
        return int(summary.get("added-data-files", "0")) + int(deletes)

    def _removes_deletes(self, summary: Mapping[str, str]) -> bool:
        """Whether delete files were removed that matter here. In v3 each commit removes deletion vectors, but minor
        compactions don't merge these.
        """
        return self._spec.format_version < 3 and summary.get("removed-delete-files", "0") != "0"

    def _collect(self, snapshots: Sequence[tuple[JavaObject, "_By"]], known: dict[int, _Seen]) -> None:
        gone = set[str]()
        for snapshot, by in snapshots:
            number = int(snapshot.snapshotId())
            if number not in known:
                removed = self._removed(snapshot) if by is _By.MINOR_COMPACTION else ()
                known[number] = _Seen(list(self._files(snapshot, by)), frozenset(removed))
            for file in known[number].added:
                if file.small.path in gone:
                    continue
                if by is not _By.OTHERS:
                    self.partitions.setdefault(file.partition, []).append(file)
                if not file.is_data:
                    self.deletes.setdefault(file.partition, []).append(file)
            gone |= known[number].removed

    def _removed(self, snapshot: JavaObject) -> Iterator[str]:
        """Paths that the snapshot removed. Iceberg also removes by itself delete files that are older than all data."""
        io = self._table.java.io()
        removed = [snapshot.removedDataFiles(io)]
        if self._spec.format_version < 3:
            removed.append(snapshot.removedDeleteFiles(io))
        return (str(file.location()) for files in removed for file in self._table.elements(files))

    def _files(self, snapshot: JavaObject, by: "_By") -> Iterator[_File]:
        """The files that the snapshot added under the current spec: small data files, if the sink made the snapshot,
        and position delete files (v2).
        """
        io = self._table.java.io()
        sequence_number = int(snapshot.sequenceNumber())
        fields = [str(field.field_id) for field in self._spec.current_spec.fields]
        added = [snapshot.addedDataFiles(io)] if by is not _By.OTHERS else []
        if self._spec.format_version < 3:
            added.append(snapshot.addedDeleteFiles(io))
        for java in (java for files in added for java in self._table.elements(files)):
            if java.specId() != self._spec.current_spec_id:
                continue
            content = self._table.described(java)
            kind, size = content["content"].upper(), content["file-size-in-bytes"]
            if kind != "DATA" and not kind.startswith("POSITION"):
                continue
            if kind == "DATA" and (size * 2 > self._spec.target_file_size or self._has_unknown_row_ids(content)):
                continue
            partition = dict(zip(fields, content.get("partition", [None] * len(fields)), strict=True))
            small = SmallFile(content["file-path"], size, content.get("first-row-id"), sequence_number)
            yield _File(kind == "DATA", json.dumps(partition), content["record-count"], small, java)

    def _has_unknown_row_ids(self, content: Mapping[str, Any]) -> bool:
        """Whether the file was written before the table became v3. Such a file got its row ids later, and the manifest
        that added the file doesn't have them.
        """
        return self._spec.format_version >= 3 and "first-row-id" not in content


def _are_enough(commits: int, files: int) -> bool:
    return commits >= EVERY and files >= _ENOUGH


def _level(number: int) -> int:
    """The level of the minor compaction with this number: how many times `EVERY` divides the number."""
    level = next(level for level in range(number) if number % EVERY ** (level + 1))
    return min(level, _HIGHEST_LEVEL)


def _keeps_dropped_fields(spec: TableSpec) -> bool:
    """Whether the current spec has only dropped partition fields, as in a table that was v1. Iceberg 1.11 can't read
    the JSON of a file with their nulls.
    """
    fields = spec.current_spec.fields
    return bool(fields) and all(isinstance(field.transform, VoidTransform) for field in fields)
