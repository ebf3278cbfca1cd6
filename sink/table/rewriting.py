"""Rewrites whole data files beside the stream: rows move from files that are dear to read into files that aren't.

A minor compaction (`sink.table.minor_compaction`) merges what the last commits wrote, between two micro-batches. A
rewrite takes any file of the table: small ones, those of which many rows are deleted, and those with many delete files.
It takes long, so micro-batches go on meanwhile:

    begin   between two micro-batches: hold the state of the key index (`KeyIndex.pin`)
    write   beside micro-batches: the state's live rows go to new files
    adopt   between two micro-batches: one commit replaces the files

What micro-batches have deleted since `begin` is deleted in the new files too, in the same commit. So neither waits for
the other, and a table in which every micro-batch deletes from every file is rewritten too. If another writer changed
the files, or the index was built again, the rewrite gives way: its files are deleted, and it is tried again later.
"""

import logging
import time
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal
from uuid import uuid4

from changelog.amounts import amount, sized
from deltawriters import TableSpec
from deltawriters.delete_files import RewriteGroup
from deltawriters.keyindex import RunInfo
from deltawriters.ordering import RowOrder
from deltawriters.scratch import Scratch
from sink.plans import RewritePlan
from sink.spark.failures import failure_of
from sink.spark.java_errors import message_of
from sink.spark.job_errors import JOB_ERRORS, before_commit, job_error
from sink.table.keyindex import KeyIndex, Pin
from sink.table.moving import move_rows
from sink.table.observer import RewriteDone, RewriteStarted, live_files, nobody
from sink.table.open_table import OpenTable
from sink.table.rewrite_plan import RewriteOptions, chosen
from sink.targets.notes import REWRITE, SINK_ID
from sink.targets.values import IndexCommit, Rewrite, StoredPosition, refusal

log = logging.getLogger("rowdelta")

_FAILED_SECONDS = 3600.0
_SUSPECTED_SECONDS = 86400.0
KIND: Literal["rewrite"] = "rewrite"


@dataclass
class RunningRewrite:
    """A rewrite between `begin` and `adopt`.

    :param name: of its commit.
    :param spec: the table for which the new files are written.
    :param written_for: its `Table.layout`.
    :param groups: what is rewritten, each by a task.
    :param order: in which its rows are written.
    :param files: the new files, as in `ChangeSet`.
    :param runs: entries of the moved rows.
    :param written_bytes: of `files`.
    :param is_counted: whether it is part of the budget.
    :param index_lost: what is wrong with the key index, if that was found out while its rows were moved.
    :param is_sent: whether its commit was sent. After an error that says nothing of the commit, its files must stay.
    """

    name: str
    spec: TableSpec
    written_for: Hashable
    pin: Pin
    groups: tuple[RewriteGroup, ...]
    scratch: Scratch
    is_counted: bool = False
    order: RowOrder | None = None
    files: list[str] = field(default_factory=list)
    runs: list[RunInfo] = field(default_factory=list)
    written_bytes: int = 0
    scan_seconds: float = 0.0
    rewrite_seconds: float = 0.0
    index_lost: str | None = None
    is_sent: bool = False

    @property
    def paths(self) -> frozenset[str]:
        """Of the files that it replaces."""
        return frozenset[str]().union(*map(_paths, self.groups))

    @property
    def merges_deletes(self) -> bool:
        """Whether it replaces delete files, and leaves the data files as they are."""
        return not self.groups[0].files

    @property
    def size_in_bytes(self) -> int:
        return sum(group.size_in_bytes for group in self.groups)


class Rewriting:
    """The rewrites of one table. There is one at a time."""

    def __init__(self, opened: OpenTable) -> None:
        self._table = opened.table
        self._key = tuple(opened.plan.section.key)
        self._prefix = opened.prefix
        self._engine = opened.engine.another()  # micro-batches go on at the same time
        self._observer = opened.observer
        self.moving: frozenset[str] = frozenset()
        """Paths of the files that are being rewritten."""
        self._failed: dict[str, float] = {}
        """When files could not be rewritten, by path. Others come first then."""
        self._alone: dict[str, float] = {}
        """When files of several groups failed together, or gave way. They are tried group by group, so that one bad
        file stops no other.
        """
        self._suspected: dict[str, float] = {}
        """When the key index missed rows of files. An index that was built since and misses them too isn't to blame."""

    def begin(
        self,
        spec: TableSpec,
        key_index: KeyIndex,
        stored: StoredPosition,
        options: RewriteOptions,
        most_bytes: int | None = None,
        only: Collection[str] | None = None,
        order: RowOrder | None = None,
        but: Collection[str] = (),
        *,
        every_part: bool = False,
    ) -> RunningRewrite | None:
        """Choose what pays most. Call this between micro-batches. The index is synchronized only if something pays: one
        that was lost must not be built by each run that has nothing to do.

        :param spec: the table.
        :param stored: the table's position.
        :param most_bytes: don't rewrite more than this. None if it doesn't matter.
        :param only: paths of the data files that may be rewritten. None for all.
        :param order: in which rows are written. None leaves them as they are.
        :param but: paths of files that may not be rewritten.
        :param every_part: of a very large table, go on until something pays (`Upkeep.rewritables`). It may take long.
        :return: None if nothing pays.
        :raises TemporaryError: see `Upkeep.rewritables`.
        :raises IndexLostError: see `KeyIndex.synchronize`.
        """
        started = time.monotonic()
        self._failed = _younger(self._failed, started - _FAILED_SECONDS)
        self._alone = _younger(self._alone, started - _FAILED_SECONDS)
        self._suspected = _younger(self._suspected, started - _SUSPECTED_SECONDS)
        left_out = self._failed.keys() | but
        if options.target_file_size is not None:
            spec = spec.with_target_file_size(options.target_file_size)
        groups: tuple[RewriteGroup, ...] = ()
        for part in islice(self._table.upkeep().rewritables(), None if every_part else 1):
            files = [
                file for file in part if file.file.path not in left_out and (only is None or file.file.path in only)
            ]
            found = chosen(files, options, spec.target_file_size, most_bytes)
            groups = self._together(
                (group for group in found if not left_out & _paths(group)), options.max_concurrent_groups, most_bytes
            )
            if groups:
                break
        else:
            return None
        with before_commit(self._table.name):
            key_index.synchronize(stored)
        groups = tuple(_with_vectors(group, key_index) for group in groups)
        self._observer(RewriteStarted(self._table.name, KIND))
        scratch = Scratch(self._table.name, lambda path: key_index.io_of(path, spec))
        begun = RunningRewrite(uuid4().hex[:16], spec, self._table.layout, key_index.pin(), groups, scratch)
        begun.is_counted = most_bytes is not None
        begun.order = order
        begun.scan_seconds = time.monotonic() - started
        self.moving = begun.paths
        return begun

    def _together(self, groups: Iterator[RewriteGroup], most: int, most_bytes: int | None) -> tuple[RewriteGroup, ...]:
        """The first groups, as many as may be rewritten at the same time. Delete files are merged by themselves."""
        found, size = list[RewriteGroup](), 0
        for group in groups:
            is_alone = not group.files or not self._alone.keys().isdisjoint(_paths(group))
            size += group.size_in_bytes
            if found and (is_alone or (most_bytes is not None and size > most_bytes)):
                break
            found.append(group)
            if is_alone or len(found) == most:
                break
        return tuple(found)

    def write(self, begun: RunningRewrite) -> bool:
        """Write the new files. Micro-batches may go on meanwhile. A failure is only logged.

        :return: whether `adopt` has something to commit. If not, call `give_up`.
        """
        started = time.monotonic()
        pin = begun.pin
        plan = RewritePlan(begun.spec, self._key, pin.slice, pin.sequence, pin.hash, begun.name, begun.order)
        try:
            new = move_rows(self._engine, plan, begun.groups, begun.scratch)
        except Exception as error:  # noqa: BLE001 - nothing is lost if the old files stay, whatever it is
            failure = failure_of(error)
            if failure is not None and failure.kind == "corrupt index":
                if len(begun.groups) > 1 or begun.paths & self._suspected.keys():
                    self._set_aside(begun)
                else:
                    begun.index_lost = failure.message
                    self._suspected |= dict.fromkeys(begun.paths, started)
                return False
            self._set_aside(begun)
            known = isinstance(error, JOB_ERRORS)
            self._log_failure(message_of(job_error(self._table.name, error) if known else error))
            return False
        begun.files, begun.runs, begun.written_bytes = new.files, new.runs, new.bytes
        begun.rewrite_seconds = time.monotonic() - started
        return True

    def _set_aside(self, begun: RunningRewrite) -> None:
        """Don't try the same again at once."""
        into = self._alone if len(begun.groups) > 1 else self._failed
        into |= dict.fromkeys(begun.paths, time.monotonic())

    def give_up(self, begun: RunningRewrite, key_index: KeyIndex | None) -> None:
        """Delete what was written, and hold the index's state no longer."""
        self._release(begun, key_index)
        begun.scratch.delete()
        self._observer(RewriteDone(self._table.name, KIND))

    def leave(self, begun: RunningRewrite, key_index: KeyIndex | None) -> None:
        """Hold the index's state no longer. The files stay: they may belong to the table now."""
        self._release(begun, key_index)
        self._observer(RewriteDone(self._table.name, KIND))

    def _release(self, begun: RunningRewrite, key_index: KeyIndex | None) -> None:
        self.moving = frozenset()
        if key_index is not None:
            key_index.release(begun.pin)

    def adopt(self, begun: RunningRewrite, key_index: KeyIndex, operation: str) -> RewriteDone | None:
        """Commit the new files. Call this between micro-batches, with the index synchronized.

        :param operation: the commit that stored the sink's position.
        :return: what was done. None if the rewrite gave way, and nothing was committed.
        :raises CommitUnknownError: the files stay.
        :raises IndexLostError: see `KeyIndex.synchronize`.
        """
        started = time.monotonic()
        paths = list(begun.paths)
        commit = self._commit_deletes if begun.merges_deletes else self._commit
        if not commit(begun, key_index, operation, paths):
            if len(begun.groups) > 1:
                self._set_aside(begun)
            self.give_up(begun, key_index)
            return None
        self.moving = frozenset()
        key_index.release(begun.pin)
        begun.scratch.keep()
        seconds = begun.rewrite_seconds + time.monotonic() - started
        size = begun.size_in_bytes
        log.info(
            "%s: %s %s into %d | %s | %d ms",
            self._table.name, "merged" if begun.merges_deletes else "rewrote",
            amount(len(paths), "delete file" if begun.merges_deletes else "data file"),
            len(begun.files), sized(size), seconds * 1000,
        )  # fmt: skip
        told = RewriteDone(
            self._table.name,
            KIND,
            len(paths),
            len(begun.files),
            size,
            begun.scan_seconds,
            seconds,
            live_files(self._table) if self._observer is not nobody else None,
            bytes_written=begun.written_bytes,
        )
        self._observer(told)
        return told

    def _commit(self, begun: RunningRewrite, key_index: KeyIndex, operation: str, paths: Sequence[str]) -> bool:
        adopted = None
        with before_commit(self._table.name):
            # a file without a live row may have been removed by a micro-batch
            replaced = self._table.upkeep().handles(paths)
            if replaced and self._table.layout == begun.written_for:
                adopted = key_index.adopt(begun.pin, begun.name, begun.files, paths, begun.runs, begun.scratch)
        if adopted is None:
            log.info("%s: its files were changed by others meanwhile; not rewritten", self._table.name)
            return False
        if not self._send(begun, operation, adopted.files, replaced, adopted.index):
            return False
        begun.scratch.discard(adopted.dropped)
        return True

    def _commit_deletes(self, begun: RunningRewrite, key_index: KeyIndex, operation: str, paths: Sequence[str]) -> bool:
        """What micro-batches have deleted meanwhile is in delete files of their own, which stay."""
        with before_commit(self._table.name):
            (group,) = begun.groups
            merged = self._table.upkeep().merge_deletes(paths, group.live or (), begun.files)
            is_same = key_index.holds(begun.pin) and self._table.layout == begun.written_for
            if merged is None or not is_same:
                log.info("%s: its delete files were changed by others meanwhile; not merged", self._table.name)
                return False
            index = key_index.prepare_restatement(begun.name, merged.referenced, begun.scratch)
        index = replace(index, files=merged.files, bytes=begun.written_bytes)
        if not self._send(begun, operation, (), merged.handles, index):
            return False
        begun.scratch.discard(merged.dropped)
        return True

    def _send(
        self, begun: RunningRewrite, operation: str, files: Sequence[str], replaced: Sequence[Any], index: IndexCommit
    ) -> bool:
        summary = {REWRITE: str(len(begun.paths)), SINK_ID: self._prefix.removeprefix("rowdelta.")}
        name = f"{self._prefix}.rewritten"
        spent = int(self._table.property(name) or 0) + begun.written_bytes
        properties = {name: str(spent)} if begun.is_counted else {}
        begun.is_sent = True
        outcome = self._table.commit(
            Rewrite(self._prefix, operation, files, replaced, index, summary, begun.written_for, properties)
        )
        refused = refusal(outcome)
        if refused is not None:
            self._log_failure(refused.why)
        return refused is None

    def _log_failure(self, message: str) -> None:
        reason = message.split("\n", 1)[0]
        level = logging.INFO if "cancelled" in reason else logging.WARNING  # as when the run ends
        log.log(level, "%s: files not rewritten, tried again later: %s", self._table.name, reason)


def _younger(times: dict[str, float], than: float) -> dict[str, float]:
    return {path: at for path, at in times.items() if at > than}


def _with_vectors(group: RewriteGroup, key_index: KeyIndex) -> RewriteGroup:
    files = (replace(file, vector=key_index.vector(file.path)) for file in group.files)
    return replace(group, files=tuple(files))


def _paths(group: RewriteGroup) -> frozenset[str]:
    """Of the files that a rewrite replaces."""
    return frozenset(file.path for file in group.files) | {file.path for file in group.deletes}
