"""Replaces data files by new ones: their live rows move, and what is deleted in them goes.

Which files these are is chosen elsewhere. A minor compaction takes small files of the last commits
(`sink.table.minor_compaction`). A rewrite takes any file that costs readers much (`sink.table.rewrite_plan`). The two
may run at the same time, with other files each. Micro-batches go on meanwhile:

    begin   between two micro-batches: hold the state of the key index (`KeyIndex.pin`)
    write   beside micro-batches: the state's live rows go to new files
    end     between two micro-batches: one commit replaces the files

What micro-batches have deleted since `begin` is deleted in the new files too, in the same commit. So neither waits for
the other, and a table in which every micro-batch deletes from every file is rewritten too. If another writer changed
the files, or the index was built again, the rewrite gives way: its files are deleted, and it is tried again later.
"""

import logging
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

from changelog.amounts import amounts, sized
from deltawriters import TableSpec
from deltawriters.content import DataFile
from deltawriters.delete_files import RewriteGroup
from deltawriters.keyindex import RunInfo
from deltawriters.keyindex.versions import IndexLostError
from deltawriters.ordering import RowOrder
from deltawriters.scratch import Scratch
from sink.errors import RowdeltaError
from sink.plans import RewritePlan
from sink.spark.failures import failure_of
from sink.spark.java_errors import message_of
from sink.spark.job_errors import JOB_ERRORS, before_commit, job_error
from sink.table.keyindex import Adopted, KeyIndex, Pin
from sink.table.moving import move_rows
from sink.table.observer import RewriteDone, RewriteKind, RewriteStarted, live_files, nobody
from sink.table.open_table import OpenTable
from sink.targets.notes import SINK_ID
from sink.targets.values import CommitUnknownError, IndexCommit, Refused, Rewrite, refusal

log = logging.getLogger("rowdelta")

_SUSPECTED_SECONDS = 86400.0
_MOST_SENT = 5
"""So often a rewrite is sent while others commit at the same moment. Micro-batches wait meanwhile."""


@dataclass(frozen=True)
class Chosen:
    """Files to replace.

    :param spec: the table for which the new files are written.
    :param groups: the files. Each group is moved by a task.
    :param note: what the snapshot's summary says of the commit.
    :param replaced: what names the files (`Rewrite.replaced`). None: it is looked up when they are committed.
    :param on_driver: whether the driver moves the rows: a Spark job would cost more than it saves.
    :param is_counted: whether it is part of the budget.
    :param set_aside: call this if the files could not be replaced, so that others come first.
    """

    kind: RewriteKind
    spec: TableSpec
    groups: tuple[RewriteGroup, ...]
    note: Mapping[str, str]
    replaced: Sequence[Any] | None = None
    on_driver: bool = False
    is_counted: bool = False
    set_aside: Callable[[], None] = lambda: None

    @property
    def is_of_stream(self) -> bool:
        """Whether the stream's thread begins and ends it, which must not fail for it."""
        return self.kind == "minor compaction"

    @property
    def paths(self) -> frozenset[str]:
        """Of the files."""
        return frozenset[str]().union(*map(paths_of, self.groups))

    @property
    def merges_deletes(self) -> bool:
        """Whether it replaces delete files, and leaves the data files as they are."""
        return self.groups[0].live is not None


@dataclass
class RunningRewrite:
    """A rewrite between `begin` and `end`.

    :param name: of its commit.
    :param written_for: the `Table.layout` of its files.
    :param groups: those of `chosen`, with what the key index knows of their files.
    :param order: in which its rows are written. None leaves them as they are.
    :param files: the new files, as in `ChangeSet`.
    :param runs: entries of the moved rows.
    :param written_bytes: of `files`.
    :param index_lost: what is wrong with the key index, if that was found out while its rows were moved.
    :param is_abandoned: whether nobody waits for it any more, and so nothing is told of it.
    :param is_sent: whether its commit was sent, and not refused. After an error that says nothing of the commit, its
        files must stay.
    """

    name: str
    chosen: Chosen
    written_for: Hashable
    pin: Pin
    groups: tuple[RewriteGroup, ...]
    scratch: Scratch
    order: RowOrder | None
    scan_seconds: float
    files: list[str] = field(default_factory=list)
    runs: list[RunInfo] = field(default_factory=list)
    written_bytes: int = 0
    rewrite_seconds: float = 0.0
    index_lost: str | None = None
    is_abandoned: bool = False
    is_sent: bool = False

    @property
    def paths(self) -> frozenset[str]:
        """Of the files that it replaces."""
        return self.chosen.paths


class Rewriting:
    """The rewrites of one table: of each kind there is one at a time."""

    def __init__(self, opened: OpenTable) -> None:
        self._open = opened
        self._table = opened.table
        # they run at the same time
        self._engines = {"minor compaction": opened.engine, "rewrite": opened.engine.another()}
        self._observer = opened.observer
        self._running = list[RunningRewrite]()
        self._suspected: dict[str, float] = {}
        """When the key index missed rows of files that maintenance rewrote, whose thread alone uses this. An index that
        was built since and misses them too isn't to blame.
        """

    @property
    def moving(self) -> frozenset[str]:
        """Paths of the files that are being replaced."""
        return frozenset[str]().union(*(running.paths for running in self._running))

    def begin(self, choose: Callable[[], Chosen | None]) -> RunningRewrite | None:
        """Choose files, and hold the state from which their rows are moved. Call this between micro-batches. The index
        is synchronized only if something was chosen: one that was lost must not be built by each run that has nothing
        to do.

        :return: None if nothing pays, or nothing can be done now.
        :raises RowdeltaError: the table can't be read now, or needs its owner.
        """
        opened = self._open
        opened.catch_up()
        key_index, spec, layout, started = opened.key_index, opened.spec, self._table.layout, time.monotonic()
        if key_index is None or opened.stored is None:
            return None
        try:
            chosen = choose()
            if chosen is None:
                return None
            with before_commit(opened.name):
                key_index.synchronize(opened.stored)
        except IndexLostError as error:
            opened.forget_index(error)
            return None
        self._observer(RewriteStarted(opened.name, chosen.kind))
        groups = tuple(_with_vectors(group, key_index) for group in chosen.groups)
        # not the scratch of micro-batches: one that failed deletes the files in it
        scratch = Scratch(opened.name, lambda path: key_index.io_of(path, spec))
        pin, seconds = key_index.pin(), time.monotonic() - started
        begun = RunningRewrite(uuid4().hex[:16], chosen, layout, pin, groups, scratch, opened.plan.order, seconds)
        self._running.append(begun)
        return begun

    def write(self, begun: RunningRewrite) -> bool:
        """Write the new files. A failure is only logged.

        :return: whether `end` has something to commit.
        """
        started = time.monotonic()
        chosen, pin = begun.chosen, begun.pin
        key = tuple(self._open.plan.section.key)
        plan = RewritePlan(chosen.spec, key, pin.slice, pin.sequence, pin.hash, begun.name, begun.order)
        try:
            new = move_rows(self._engines[chosen.kind], plan, begun.groups, begun.scratch, on_driver=chosen.on_driver)
        except Exception as error:  # noqa: BLE001 - nothing is lost if the old files stay, whatever it is
            self._note_failure(begun, error)
            return False
        begun.files, begun.runs, begun.written_bytes = new.files, new.runs, new.bytes
        begun.rewrite_seconds = time.monotonic() - started
        return True

    def end(self, begun: RunningRewrite, *, written: bool = True) -> RewriteDone | None:
        """Commit the new files, or give them up if others have changed the old ones. Call this between micro-batches.

        What becomes of an error, and of the new files. It is known if it says that nothing was committed:

            sent?   known?   of the stream?   error         new files
            no      any      no               raised        deleted
            no      any      yes              logged        deleted
            yes     yes      any              raised        deleted
            yes     no       any              raised        kept, since the table may have them
            any     (lost index)              index built   deleted

        :param written: whether there is anything to commit.
        :return: what was done. None if nothing was.
        :raises RowdeltaError: see `Table.commit`.
        """
        key_index, done = self._open.key_index, None
        try:
            if written:
                done = self._committed(begun, key_index)
            elif begun.index_lost is not None and key_index is not None and key_index.holds(begun.pin):
                raise IndexLostError(begun.index_lost)
        except Exception as error:
            is_known = isinstance(error, (RowdeltaError, IndexLostError)) and not isinstance(error, CommitUnknownError)
            if begun.is_sent and not is_known:
                begun.scratch.keep()  # the files may belong to the table now
            self._let_go(begun, key_index)
            if isinstance(error, IndexLostError):
                self._open.forget_index(error)
                return None
            if begun.is_sent or not begun.chosen.is_of_stream:
                raise
            self._log_failure(begun, message_of(error))
            return None
        self._let_go(begun, key_index, done)
        return done

    def _let_go(self, begun: RunningRewrite, key_index: KeyIndex | None, done: RewriteDone | None = None) -> None:
        """Hold the index's state no longer, and delete what was written for no commit."""
        self._running.remove(begun)
        if key_index is not None:
            key_index.release(begun.pin)
        begun.scratch.delete()
        self._observer(done or RewriteDone(self._table.name, begun.chosen.kind))

    def _note_failure(self, begun: RunningRewrite, error: Exception) -> None:
        if begun.is_abandoned:
            return
        failure = failure_of(error)
        if failure is not None and failure.kind == "corrupt index" and self._blames_index(begun):
            begun.index_lost = failure.message
            return
        begun.chosen.set_aside()
        known = isinstance(error, JOB_ERRORS)
        self._log_failure(begun, message_of(job_error(self._table.name, error) if known else error))

    def _blames_index(self, begun: RunningRewrite) -> bool:
        """Whether the index is at fault if it misses rows, not the files."""
        if begun.chosen.is_of_stream:
            return True  # it must not touch what rewrites suspect
        now, paths = time.monotonic(), begun.paths
        self._suspected = {path: at for path, at in self._suspected.items() if at > now - _SUSPECTED_SECONDS}
        if len(begun.groups) > 1 or not paths.isdisjoint(self._suspected):
            return False  # several groups come again one by one
        self._suspected |= dict.fromkeys(paths, now)
        return True

    def _committed(self, begun: RunningRewrite, key_index: KeyIndex | None) -> RewriteDone | None:
        """Commit the new files. None if the rewrite gave way."""
        started, opened, chosen = time.monotonic(), self._open, begun.chosen
        for _ in range(_MOST_SENT):
            adopted = self._sent(begun, key_index)
            if not (isinstance(adopted, Refused) and adopted.again == "send"):
                break
        if isinstance(adopted, Refused):
            self._log_failure(begun, adopted.why, logging.INFO)
            chosen.set_aside()
        if not isinstance(adopted, Adopted):
            return None
        begun.scratch.discard(adopted.dropped)
        begun.scratch.keep()
        seconds = begun.rewrite_seconds + time.monotonic() - started
        count, size = len(chosen.paths), sum(group.size_in_bytes for group in begun.groups)
        data = sum(len(group.files) for group in begun.groups)
        log.info(
            "%s: %s %s into %d | %s | %d ms",
            opened.name, "merged" if chosen.is_of_stream or not data else "rewrote",
            amounts({"small file" if chosen.is_of_stream else "data file": data, "delete file": count - data}),
            len(begun.files), sized(size), seconds * 1000,
        )  # fmt: skip
        live = live_files(self._table) if self._observer is not nobody else None
        return RewriteDone(
            opened.name,
            chosen.kind,
            count,
            len(begun.files),
            size,
            begun.scan_seconds,
            seconds,
            live,
            bytes_written=begun.written_bytes,
        )

    def _sent(self, begun: RunningRewrite, key_index: KeyIndex | None) -> Adopted | Refused | None:
        """Commit the new files as they fit what the table has now. None if the index was built again."""
        opened, before = self._open, tuple(begun.scratch.paths)
        opened.catch_up()
        if key_index is None or key_index is not opened.key_index or opened.stored is None:
            return None
        with before_commit(opened.name):
            key_index.synchronize(opened.stored)
            replaced, adopted = self._adopted(begun, key_index)
        if adopted is None:
            return Refused("others changed them, or the table, meanwhile")
        refused = self._send(begun, opened.stored.operation, adopted.files, replaced, adopted.index)
        if refused is None:
            return adopted
        begun.is_sent = False
        begun.scratch.discard(set(begun.scratch.paths).difference(before))
        return refused

    def _adopted(self, begun: RunningRewrite, key_index: KeyIndex) -> tuple[Sequence[Any], Adopted | None]:
        """What names the files in the commit, and what replaces them. None if others have changed them meanwhile."""
        upkeep, chosen = self._table.upkeep(), begun.chosen
        if self._table.layout != begun.written_for:
            return (), None
        if chosen.merges_deletes:
            # what micro-batches have deleted meanwhile is in delete files of their own, which stay
            merged = upkeep.merge_deletes(chosen.paths, chosen.groups[0].live or (), begun.files)
            if merged is None or not key_index.holds(begun.pin):
                return (), None
            index = key_index.prepare_restatement(begun.name, merged.referenced, begun.scratch)
            index = replace(index, files=merged.files, bytes=begun.written_bytes)
            return merged.handles, Adopted((), index, merged.dropped)
        paths = [file.path for group in begun.groups for file in group.files]
        # a file without a live row may have been removed by a micro-batch
        replaced = upkeep.handles(paths) if chosen.replaced is None else chosen.replaced
        if not replaced:
            return (), None
        return replaced, key_index.adopt(begun.pin, begun.name, begun.files, paths, begun.runs, begun.scratch)

    def _send(
        self, begun: RunningRewrite, operation: str, files: Sequence[str], replaced: Sequence[Any], index: IndexCommit
    ) -> Refused | None:
        prefix, chosen = self._open.prefix, begun.chosen
        summary = {**chosen.note, SINK_ID: prefix.removeprefix("rowdelta.")}
        name = f"{prefix}.rewritten"
        spent = int(self._table.property(name) or 0) + begun.written_bytes
        properties = {name: str(spent)} if chosen.is_counted else {}
        begun.is_sent = True
        return refusal(
            self._table.commit(
                Rewrite(prefix, operation, files, replaced, index, summary, begun.written_for, properties)
            )
        )

    def _log_failure(self, begun: RunningRewrite, message: str, level: int = logging.WARNING) -> None:
        reason = message.split("\n", 1)[0]
        if "cancelled" in reason:  # as when the run ends
            level = logging.INFO
        what = "small files not merged" if begun.chosen.is_of_stream else "files not rewritten"
        log.log(level, "%s: %s, tried again later: %s", self._table.name, what, reason)


def paths_of(group: RewriteGroup) -> frozenset[str]:
    """Of the files that a rewrite replaces."""
    return frozenset(file.path for file in group.files) | {file.path for file in group.deletes}


def _with_vectors(group: RewriteGroup, key_index: KeyIndex) -> RewriteGroup:
    return replace(group, files=tuple(_with_vector(file, key_index.vector(file.path)) for file in group.files))


def _with_vector(file: DataFile, vector: Mapping[str, Any] | None) -> DataFile:
    if file.rows is None:
        return replace(file, vector=vector)
    return replace(file, vector=vector, live_rows=file.rows - (0 if vector is None else int(vector["record-count"])))
