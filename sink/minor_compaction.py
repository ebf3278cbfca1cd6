"""Minor compactions: the small files of the last commits become larger ones, so that reads stay fast at next to no
cost.

As in a log-structured merge tree: once the last commits, `EVERY` at least, wrote `_ENOUGH` files, these are merged,
after `EVERY` minor compactions what these wrote, and so on. So a row is written again only once a level, and large
files are left alone, however many of their rows are deleted: these are for `compact_every` (`sink.compaction`), or for
whoever maintains the table.

Only the sink's own files are merged, and none that are planned by looking at the whole table: the snapshots since the
last minor compaction name them. A commit of others that removes files ends the search.
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

from deltawriters import TableSpec, TaskId
from deltawriters.keyindex import CorruptIndexError, RunInfo
from deltawriters.rewrite import RewriteGroup, SmallFile
from sink import task
from sink.commit import IcebergCommitter, RewriteCommit, TableChangedError
from sink.compaction import MINOR
from sink.iceberg import IcebergTable
from sink.java_errors import JAVA_ERRORS, java_message
from sink.keyindex import IndexLostError, KeyIndex

log = logging.getLogger("rowdelta")

EVERY = 4
"""Commits from one minor compaction to the next, at least, and of these from one of a level to the next one of the
level above.
"""
_ENOUGH = 16
"""Files of the last commits, likewise: a read hardly notices fewer, and a table with a file a commit is left alone for
longer.
"""
_HIGHEST_LEVEL = 3
"""The files of 64 minor compactions become one; to look further back would take longer than it saves."""
_FEWEST = 4
"""Files of a partition, for which it pays."""
_OTHER_LEVEL = 8
"""A file that is so many times as large as those that are smaller, on average, isn't merged with them."""
_MOST_KNOWN = 1000
"""Snapshots whose files are remembered. More than a minor compaction ever looks back to."""
_ON_DRIVER = 4 * 1024 * 1024
"""Bytes of files up to which a Spark job would cost more than it does."""


@dataclass(frozen=True)
class _Seen:
    """What a snapshot added, of the sink's what may be merged, of others' their position deletes (v2); and the paths
    that it removed if it was a minor compaction.
    """

    added: Sequence["_File"]
    removed: frozenset[str] = frozenset()


@dataclass(frozen=True)
class _File:
    """A data file of the sink's, or (v2) a position delete file."""

    is_data: bool
    partition: str
    rows: int
    small: SmallFile
    java: JavaObject


def _chosen(files: Sequence[_File]) -> list[_File]:
    """Of a partition's files those to merge, if it pays: not the ones much larger than the others, which are of another
    level, like what a first load wrote.
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
    """A partition's files in groups that tasks can share: of about as much data as a file should have, and one of the
    deletes.

    :param applying: the partition's position delete files (v2), whoever wrote them.
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

    :param prefix: property prefix of the sink's state; only its own files are merged.
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
        # not the micro-batches' accumulator: what it has is deleted if the next one fails
        self._written: Accumulator[list[str]] = table.spark.sparkContext.accumulator(list[str](), task.ListParam[str]())
        self._commits, self._files = EVERY, _ENOUGH  # what an earlier run left is counted after the first commit
        self._known: dict[int, _Seen] = {}
        self._known_as: object = None

    def count(self, files: int) -> None:
        """To be told after each commit how many files it wrote."""
        self._commits += 1
        self._files += files

    def is_due(self) -> bool:
        return _are_enough(self._commits, self._files)

    def run(self, spec: TableSpec, key_index: KeyIndex, operation: str) -> bool:
        """Merge the small files, if there are enough of them. What goes wrong before the commit is logged and no more.

        :param key_index: of the current snapshot.
        :param operation: the commit that stored the sink's position.
        :return: whether there is a new snapshot.
        :raises IndexLostError: the index has to be built again.
        :raises TableError, TemporaryError: see `IcebergCommitter.rewrite`.
        """
        started = time.monotonic()
        layout = spec.current_spec_id, spec.format_version
        if self._known_as != layout or len(self._known) > _MOST_KNOWN:
            self._known, self._known_as = {}, layout
        try:
            found = _Search(self._table, spec, self._prefix, self._known)
        except JAVA_ERRORS as error:
            self._give_up(error)  # perhaps what it read has just expired
            return False
        self._commits, self._files = found.commits, found.files
        if not self.is_due():
            return False
        by_partition = [chosen for files in found.partitions.values() if (chosen := _chosen(files))]
        if not by_partition:
            return False  # looked at again after the next commit
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
            # whatever it is, nothing is lost by leaving the files as they are
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
        """With the number of its live rows (v3)."""
        return replace(file, small=replace(file.small, live_rows=file.rows - key_index.deleted_rows(file.small.path)))

    def _rewrite(
        self, spec: TableSpec, key_index: KeyIndex, name: str, groups: Sequence[RewriteGroup]
    ) -> tuple[list[str], list[RunInfo]]:
        """Files that are instead of the groups', as `ContentFileParser` JSON, and runs for the index."""
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
    """What the snapshots say of the sink's small files: the `number` of the next minor compaction, `commits` since the
    last one and how many `files` they added; by partition those that it may merge, and all position `deletes` that may
    apply to them (v2).

    :param known: by snapshot. Gets what is read, since each file takes some calls to the JVM.
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
        """Those whose files may be merged, newest first, and in between others that may delete rows of these.
        Counts the commits.

        Which rows of a file an equality delete deletes isn't known, but it reaches older files only.
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
                return  # commits from before there were minor compactions: there may be any number of them
            parent = java_snapshot.parentId()
            java_snapshot = None if parent is None else java.snapshot(parent)

    def _added(self, summary: Mapping[str, str]) -> int:
        """Files that are merged; in v3 no deletes are."""
        deletes = summary.get("added-delete-files", "0") if self._spec.format_version < 3 else "0"
        return int(summary.get("added-data-files", "0")) + int(deletes)

    def _removes_deletes(self, summary: Mapping[str, str]) -> bool:
        """In v3 each commit removes deletion vectors, but these aren't merged here."""
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
        """Also what Iceberg removed by itself: delete files that are older than all data."""
        io = self._table.java.io()
        removed = [snapshot.removedDataFiles(io)]
        if self._spec.format_version < 3:
            removed.append(snapshot.removedDeleteFiles(io))
        return (str(file.location()) for files in removed for file in self._table.elements(files))

    def _files(self, snapshot: JavaObject, by: "_By") -> Iterator[_File]:
        """What the snapshot added under the current spec: small data files, if they are the sink's, and, in v2,
        position delete files.
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
        """Written before the table became v3: row ids were given later, and aren't in the manifest that says the file
        was added.
        """
        return self._spec.format_version >= 3 and "first-row-id" not in content


def _are_enough(commits: int, files: int) -> bool:
    return commits >= EVERY and files >= _ENOUGH


def _level(number: int) -> int:
    """How often `EVERY` divides it: of which level the minor compaction of this number is."""
    level = next(level for level in range(number) if number % EVERY ** (level + 1))
    return min(level, _HIGHEST_LEVEL)


def _keeps_dropped_fields(spec: TableSpec) -> bool:
    """A table that was v1 keeps dropped partition fields, and their nulls aren't described so that Iceberg 1.11 could
    read it.
    """
    fields = spec.current_spec.fields
    return bool(fields) and all(isinstance(field.transform, VoidTransform) for field in fields)
