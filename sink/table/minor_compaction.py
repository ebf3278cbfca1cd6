"""Minor compactions merge the small files of the last commits into larger files. They cost little and keep reads fast.

They work like a log-structured merge tree. When at least `EVERY` commits have written at least `_ENOUGH` files, a minor
compaction merges these files. After `EVERY` minor compactions, the next one merges their files too, and so on. So a row
is written again only once for each level. Large files stay as they are, even if many of their rows are deleted:
`sink.table.rewriting` rewrites those.

A minor compaction merges only files of this sink from the last commits. Each format finds them
(`Upkeep.merge_candidates`), without a plan over the whole table.
"""

import logging
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from uuid import uuid4

from changelog.amounts import amounts, sized
from deltawriters import TableSpec
from deltawriters.content import DataFile, DeleteFile
from deltawriters.delete_files import RewriteGroup
from deltawriters.keyindex.versions import IndexLostError
from deltawriters.ordering import RowOrder
from deltawriters.scratch import Scratch
from sink.errors import RowdeltaError, TemporaryError
from sink.plans import RewritePlan
from sink.spark.failures import failure_of
from sink.spark.java_errors import message_of
from sink.table.keyindex import KeyIndex
from sink.table.moving import move_rows
from sink.table.observer import RewriteDone, RewriteStarted, live_files, nobody
from sink.table.open_table import OpenTable
from sink.targets import merge_levels
from sink.targets.notes import MINOR, SINK_ID
from sink.targets.upkeep_values import Mergeable
from sink.targets.values import CommitUnknownError, Rewrite, refusal

log = logging.getLogger("rowdelta")

_ENOUGH = 16
"""A minor compaction needs at least this many files in the last commits. A read hardly notices fewer files, and so a
table that gets one file a commit is compacted less often.
"""
_FEWEST = 4
"""With fewer files in a partition, merging doesn't pay."""
_OTHER_LEVEL = 8
"""A file isn't merged with smaller ones if it is this many times larger than they are on average."""
_SORTED_TOGETHER = 256 * 1024 * 1024
"""Bytes of files whose rows are sorted together. If each group made one file, all files would have the same values."""
_ON_DRIVER = 4 * 1024 * 1024
"""Up to this many bytes of files, the driver merges them itself: a Spark job would cost more than it saves."""


def _chosen(files: Sequence[Mergeable]) -> list[Mergeable]:
    """The files to merge among a partition's `files`. Empty if merging doesn't pay.

    Files that are much larger than the others are left out: they belong to a higher level, like those of a first load.
    """
    data = sorted((file for file in files if file.is_data), key=lambda file: file.file.size_in_bytes)
    deletes = [file for file in files if not file.is_data]
    count, total = 0, 0
    for file in data:
        if count and file.file.size_in_bytes * count > _OTHER_LEVEL * total:
            break
        count += 1
        total += file.file.size_in_bytes
    data = data[:count] if count >= _FEWEST else []
    return data + (deletes if (data and len(deletes) > 1) or len(deletes) >= _FEWEST else [])


def _groups(
    chosen: Sequence[Mergeable], applying: Sequence[Mergeable], spec_id: int, group_size: int
) -> Iterator[RewriteGroup]:
    """Groups of a partition's files, so that tasks can share the work. The delete files are a group of their own.

    :param chosen: the files to merge.
    :param applying: the partition's position delete files (Iceberg v2) of all writers.
    :param spec_id: id of the partitioning.
    :param group_size: bytes of data of each group, about.
    """
    partition = chosen[0].partition
    all_deletes = tuple(file.file for file in applying if isinstance(file.file, DeleteFile))
    data = [file.file for file in chosen if isinstance(file.file, DataFile)]
    waiting, size = list[DataFile](), 0
    for small in data:
        waiting.append(small)
        size += small.size_in_bytes
        if size >= group_size:
            yield RewriteGroup(spec_id, partition, tuple(waiting), applying=all_deletes)
            waiting, size = [], 0
    if waiting:
        yield RewriteGroup(spec_id, partition, tuple(waiting), applying=all_deletes)
    deletes = tuple(file.file for file in chosen if isinstance(file.file, DeleteFile))
    if deletes:
        yield RewriteGroup(spec_id, partition, (), deletes, frozenset(small.path for small in data))


class MinorCompaction:
    """The minor compactions of one table. Only this sink's files are merged."""

    def __init__(self, opened: OpenTable) -> None:
        self._table = opened.table
        self._key = tuple(opened.plan.section.key)
        self._prefix = opened.prefix
        self._engine = opened.engine
        self._observer = opened.observer
        # so the first commit looks for the small files of earlier runs
        self._commits, self._files = merge_levels.EVERY, _ENOUGH

    def count(self, files: int) -> None:
        """Call this after each commit, with the number of files that the commit wrote."""
        self._commits += 1
        self._files += files

    def is_due(self) -> bool:
        return _are_enough(self._commits, self._files)

    def run(
        self,
        spec: TableSpec,
        key_index: KeyIndex,
        operation: str,
        moving: Collection[str] = frozenset(),
        order: RowOrder | None = None,
    ) -> bool:
        """Merge the small files, if there are enough of them. A failure before the commit is only logged. The observer
        hears of the beginning and, whatever happens, of the end.

        :param spec: the table.
        :param key_index: the index of the current snapshot.
        :param operation: the commit that stored the sink's position.
        :param moving: paths of data files that a rewrite is moving rows from (`sink.table.rewriting`). They are left
            out.
        :param order: in which rows are written. None leaves them as they are.
        :return: whether there is a new snapshot.
        :raises IndexLostError: the index has to be built again.
        :raises TableError: see `Table.commit`.
        :raises TemporaryError: see `Table.commit`.
        """
        self._observer(RewriteStarted(self._table.name, "minor compaction"))
        done = RewriteDone(self._table.name, "minor compaction")
        try:
            made = self._run(spec, key_index, operation, moving, order)
            done = made or done
            return made is not None
        finally:
            self._observer(done)

    def _run(
        self, spec: TableSpec, key_index: KeyIndex, operation: str, moving: Collection[str], order: RowOrder | None
    ) -> RewriteDone | None:
        started = time.monotonic()
        written_for = self._table.layout
        try:
            found = self._table.upkeep().merge_candidates(self._prefix, _are_enough)
        except TemporaryError as error:
            self._give_up(message_of(error))
            return None
        self._commits, self._files = found.commits, found.files
        if not self.is_due():
            return None
        staying = ([file for file in files if file.file.path not in moving] for files in found.partitions.values())
        by_partition = [chosen for files in staying if (chosen := _chosen(files))]
        if not by_partition:
            return None  # the next commit makes it look again
        self._commits = self._files = 0
        # not that of the micro-batches: a failed micro-batch deletes the files that are in it
        written = Scratch(self._table.name, lambda path: key_index.io_of(path, spec))
        name = uuid4().hex[:16]
        by_partition = [[self._counted(file, key_index) for file in chosen] for chosen in by_partition]
        size = spec.target_file_size if order is None else max(spec.target_file_size, _SORTED_TOGETHER)
        groups = [
            group
            for chosen in by_partition
            for group in _groups(chosen, found.deletes.get(chosen[0].partition, ()), found.spec_id, size)
        ]
        gone = [file.path for group in groups for file in group.files]
        scan_seconds = time.monotonic() - started
        try:
            plan = RewritePlan(
                spec, self._key, key_index.slice(), key_index.next_sequence, key_index.key_hash(spec), name, order
            )
            on_driver = sum(group.size_in_bytes for group in groups) <= _ON_DRIVER
            new = move_rows(self._engine, plan, groups, written, on_driver=on_driver)
            index = key_index.prepare_rewrite(name, gone, new.runs, written)
        except Exception as error:
            # any error is caught: nothing is lost if the small files stay
            written.delete()
            failure = failure_of(error)
            if failure is not None and failure.kind == "corrupt index":
                raise IndexLostError(failure.message) from error
            self._give_up(message_of(error))
            return None
        replaced = [file.handle for chosen in by_partition for file in chosen]
        summary = {MINOR: str(found.number), SINK_ID: self._prefix.removeprefix("rowdelta.")}
        try:
            outcome = self._table.commit(
                Rewrite(self._prefix, operation, new.files, replaced, index, summary, written_for)
            )
        except CommitUnknownError:
            raise  # the files may belong to the table now
        except (RowdeltaError, IndexLostError):
            written.delete()
            raise
        refused = refusal(outcome)  # if it is unknown, the files may belong to the table now
        if refused is not None:
            written.delete()
            self._give_up(refused.why)
            return None
        log.info(
            "%s: merged %s into %d | %s | %d ms",
            self._table.name,
            amounts({"small file": len(gone), "delete file": len(replaced) - len(gone)}),
            len(new.files),
            sized(sum(group.size_in_bytes for group in groups)),
            (time.monotonic() - started) * 1000,
        )
        return RewriteDone(
            self._table.name,
            "minor compaction",
            len(replaced),
            len(new.files),
            sum(group.size_in_bytes for group in groups),
            scan_seconds,
            time.monotonic() - started - scan_seconds,
            live_files(self._table) if self._observer is not nobody else None,
            bytes_written=new.bytes,
        )

    def _counted(self, file: Mergeable, key_index: KeyIndex) -> Mergeable:
        """The file with the number of its live rows, if the table's metadata tell it."""
        if file.rows is None or not isinstance(file.file, DataFile):
            return file
        vector = key_index.vector(file.file.path)
        live = file.rows - (0 if vector is None else int(vector["record-count"]))
        return replace(file, file=replace(file.file, live_rows=live, vector=vector))

    def _give_up(self, reason: str) -> None:
        log.warning("%s: small files not merged, tried again later: %s", self._table.name, reason.split("\n", 1)[0])


def _are_enough(commits: int, files: int) -> bool:
    return commits >= merge_levels.EVERY and files >= _ENOUGH
