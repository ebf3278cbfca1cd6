"""Minor compactions: the small files of the last commits become larger ones, so that reads stay fast at next to no cost.

As in a log-structured merge tree: after every `EVERY` commits what they wrote is merged, after as many minor compactions what these
wrote, and so on. So a row is written again only once a level, and large files are left alone, however many of their rows are deleted: these
are for `compact_every` (`sink.compaction`), or for whoever maintains the table.

Only the sink's own files are merged, and none that are planned by looking at the whole table: the snapshots since the last minor
compaction name them. A commit of others that removes files ends the search.
"""

import json
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from py4j.java_gateway import JavaObject
from py4j.protocol import Py4JJavaError
from pyiceberg.transforms import VoidTransform
from pyspark.accumulators import Accumulator
from pyspark.errors import PySparkException

from deltawriters import TableSpec, TaskId
from deltawriters.keyindex import CorruptIndex, RunInfo
from deltawriters.rewrite import RewriteGroup, SmallFile
from sink import task
from sink.commit import IcebergCommitter, RewriteCommit, TableChanged
from sink.compaction import MINOR
from sink.iceberg import JAVA_ERRORS, IcebergTable, java_message
from sink.keyindex import IndexLost, KeyIndex

log = logging.getLogger("rowdelta")

EVERY = 8
"""Commits from one minor compaction to the next, and of these from one of a level to the next one of the level above."""
_HIGHEST_LEVEL = 2
"""The files of `EVERY`**3 commits become one; to look further back would take longer than it saves."""
_FEWEST = 4
"""Files of a partition, for which it pays."""
_ON_DRIVER = 4 * 1024 * 1024
"""Bytes of files up to which a Spark job would cost more than it does."""


@dataclass
class _Small:
    """A partition's small files, and (v2) position delete files."""

    spec_id: int
    partition: str
    files: list[tuple[SmallFile, JavaObject]] = field(default_factory=list)
    deletes: list[tuple[str, JavaObject]] = field(default_factory=list)

    def chosen(self) -> "_Small":
        """Without the files that are much larger than the others: these are of another level, like what a first load wrote."""
        by_size = sorted(self.files, key=lambda file: file[0].size_in_bytes)
        count, total = 0, 0
        for small, _ in by_size:
            if count and small.size_in_bytes * count > EVERY * total:
                break
            count += 1
            total += small.size_in_bytes
        files = by_size[:count] if count >= _FEWEST else []
        deletes = self.deletes if (files and len(self.deletes) > 1) or len(self.deletes) >= _FEWEST else []
        return _Small(self.spec_id, self.partition, files, deletes)

    def group(self) -> RewriteGroup:
        files = tuple(small for small, _ in self.files)
        return RewriteGroup(self.spec_id, self.partition, files, tuple(path for path, _ in self.deletes))


class MinorCompaction:
    """The minor compactions of one table.

    :param written: told the paths of files that tasks wrote. :param sink_id: whose files are merged.
    """

    def __init__(
        self,
        table: IcebergTable,
        key: Sequence[str],
        committer: IcebergCommitter,
        prefix: str,
        written: Accumulator[list[str]],
    ) -> None:
        self._table = table
        self._key = tuple(key)
        self._committer = committer
        self._prefix = prefix
        self._written = written
        self._commits = EVERY  # what an earlier run left is counted after the first commit

    def is_due(self) -> bool:
        """To be asked after each commit."""
        self._commits += 1
        return self._commits >= EVERY

    def run(self, spec: TableSpec, key_index: KeyIndex, operation: str) -> bool:
        """Merge the small files, if there are enough of them. What goes wrong is logged and no more.

        :param key_index: of the current snapshot. :param operation: the commit that stored the sink's position.
        :return: whether there is a new snapshot.
        :raises IndexLost: the index has to be built again. :raises TableError, TemporaryError: see `IcebergCommitter.rewrite`.
        """
        started = time.monotonic()
        found = _Search(self._table, spec, self._prefix)
        self._commits = found.commits
        if found.commits < EVERY:
            return False
        self._commits = 0
        chosen = [small for small in (s.chosen() for s in found.partitions.values()) if small.files or small.deletes]
        if not chosen:
            return False
        self._written.value = []
        name = uuid4().hex[:16]
        groups = [small.group() for small in chosen]
        gone = [file.path for group in groups for file in group.files]
        try:
            files, runs = self._rewrite(spec, key_index, name, groups)
            index = key_index.rewritten(name, gone, runs, self._written.value)
        except (CorruptIndex, PySparkException, Py4JJavaError, OSError) as error:
            self._delete(spec, self._written.value)
            if isinstance(error, CorruptIndex) or "CorruptIndex" in str(error):
                raise IndexLost(str(error).split("\n", 1)[0]) from error
            self._give_up(error)
            return False
        replaced = [java for small in chosen for _, java in (*small.files, *small.deletes)]
        summary = {MINOR: str(found.number), "rowdelta.sink-id": self._prefix.removeprefix("rowdelta.")}
        try:
            self._committer.rewrite(RewriteCommit(self._prefix, operation, files, replaced, index, summary))
        except TableChanged as error:
            self._delete(spec, index.new_paths)
            self._give_up(error)
            return False
        log.info(
            "%s: merged %d small files and %d delete files into %d | %.1f MB | %d ms",
            self._table.name,
            len(gone),
            sum(len(group.deletes) for group in groups),
            len(files),
            sum(group.size_in_bytes for group in groups) / 1e6,
            (time.monotonic() - started) * 1000,
        )
        return True

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
        log.warning(
            "%s: small files not merged, tried again after %d commits: %s",
            self._table.name,
            EVERY,
            reason.split("\n", 1)[0],
        )

    def _delete(self, spec: TableSpec, paths: Iterable[str]) -> None:
        for path in paths:
            try:
                spec.io.delete(path)
            except OSError:
                log.warning("%s: could not delete %s; Iceberg's remove_orphan_files will", self._table.name, path)


class _Search:
    """What the snapshots say of the sink's small files: the `number` of the next minor compaction, `commits` since the last one, and the
    files that it is to merge, by partition.
    """

    def __init__(self, table: IcebergTable, spec: TableSpec, prefix: str) -> None:
        self.number = 1
        self.commits = 0
        self.partitions: dict[str, _Small] = {}
        self._table = table
        self._spec = spec
        self._sink_id = prefix.removeprefix("rowdelta.")
        snapshots = list(self._snapshots())
        if self.commits >= EVERY and not _keeps_dropped_fields(spec):
            self._collect(snapshots)

    def _snapshots(self) -> Iterator[JavaObject]:
        """Those whose files are to be merged, newest first. Counts the commits."""
        java = self._table.java
        java_snapshot, last = java.currentSnapshot(), None
        while java_snapshot is not None:
            summary: Mapping[str, str] = self._table.summary(java_snapshot)
            number = summary.get(MINOR)
            if number is not None:
                last = last or int(number)
                self.number = last + 1
                if self.commits < EVERY or _level(int(number)) >= _level(self.number):
                    return
            elif summary.get("deleted-data-files", "0") != "0" or self._removes_deletes(summary):
                return
            if java_snapshot.schemaId() != java.schema().schemaId():
                return
            if number is not None or summary.get("rowdelta.sink-id") == self._sink_id:
                self.commits += number is None and last is None
                yield java_snapshot
            if last is None and self.commits >= EVERY**2:
                return  # a table that has never been compacted so
            parent = java_snapshot.parentId()
            java_snapshot = None if parent is None else java.snapshot(parent)

    def _removes_deletes(self, summary: Mapping[str, str]) -> bool:
        """In v3 each commit removes deletion vectors, but these aren't merged here."""
        return self._spec.format_version < 3 and summary.get("removed-delete-files", "0") != "0"

    def _collect(self, snapshots: Sequence[JavaObject]) -> None:
        io = self._table.java.io()
        gone = set[str]()
        for snapshot in snapshots:
            sequence_number = int(snapshot.sequenceNumber())
            for java in snapshot.addedDataFiles(io):
                content = self._described(java)
                if content["file-path"] in gone or content["file-size-in-bytes"] * 2 > self._spec.target_file_size:
                    continue
                first_row_id = java.firstRowId() if self._spec.format_version >= 3 else None
                small = SmallFile(content["file-path"], content["file-size-in-bytes"], first_row_id, sequence_number)
                self._partition(content).files.append((small, java))
            if self._spec.format_version < 3:
                for java in snapshot.addedDeleteFiles(io):
                    content = self._described(java)
                    if content["file-path"] not in gone and content["content"].upper().startswith("POSITION"):
                        self._partition(content).deletes.append((content["file-path"], java))
            if MINOR in self._table.summary(snapshot):
                gone |= {str(java.location()) for java in snapshot.removedDataFiles(io)}
                gone |= {str(java.location()) for java in snapshot.removedDeleteFiles(io)}
        current = self._spec.current_spec_id
        self.partitions = {text: small for text, small in self.partitions.items() if small.spec_id == current}

    def _described(self, java: JavaObject) -> dict[str, Any]:
        spec = self._table.java.specs().get(java.specId())
        described: dict[str, Any] = json.loads(self._table.content_file_parser.toJson(java, spec))
        return described

    def _partition(self, content: Mapping[str, Any]) -> _Small:
        fields = self._spec.specs_by_id[content["spec-id"]].fields
        values = content.get("partition", [None] * len(fields))
        ids = (str(field.field_id) for field in fields)
        text = json.dumps(dict(zip(ids, values, strict=True)))
        return self.partitions.setdefault(f"{content['spec-id']} {text}", _Small(content["spec-id"], text))


def _level(number: int) -> int:
    """How often `EVERY` divides it: of which level the minor compaction of this number is."""
    level = next(level for level in range(number) if number % EVERY ** (level + 1))
    return min(level, _HIGHEST_LEVEL)


def _keeps_dropped_fields(spec: TableSpec) -> bool:
    """A table that was v1 keeps dropped partition fields, and their nulls aren't described so that Iceberg 1.11 could read it."""
    fields = spec.current_spec.fields
    return bool(fields) and all(isinstance(field.transform, VoidTransform) for field in fields)
