"""What is sent to be committed: a micro-batch's files, deletes of earlier rows, the key index's version, and what the
table knows of its sink beside the position.
"""

import json
from collections.abc import Mapping
from dataclasses import replace

from deltawriters.scratch import Scratch
from sink.config import Config
from sink.sources.source import Source, TableBatch
from sink.spark.job_errors import before_commit
from sink.table.copy_on_write import Replacement, replace_files
from sink.table.keyindex import Meanwhile
from sink.table.load_state import Loaded
from sink.table.open_table import OpenTable
from sink.table.resnapshot import resnapshot_after
from sink.table.sink_state import SinkState
from sink.table.stated import StatedByMessages
from sink.table.written import Written
from sink.targets.notes import ROWS, SINK_ID, WORK
from sink.targets.own_position import amended, others_positions, own_position
from sink.targets.retries import Retries
from sink.targets.values import ChangeSet, IndexCommit, Refused, WrittenDeletes

_METADATA = 256 * 1024
"""Bytes that a commit writes beside its files, about: manifests, the table's metadata, the key index."""


class Proposals:
    """Makes the proposals of one table's commits.

    :param opened: the table.
    :param stated: what messages state of it.
    """

    def __init__(self, config: Config, opened: OpenTable, source: Source, stated: StatedByMessages) -> None:
        self._config = config
        self._open = opened
        self._source = source
        self._stated = stated
        self.prepared = Scratch(opened.name, opened.io_of)
        """What was written to prepare the last one: deletes of earlier rows, and the key index's next version."""

    def make(self, batch: TableBatch, written: Written) -> ChangeSet:
        """The proposal of what a micro-batch has written.

        :raises RowdeltaError: nothing was committed.
        :raises IndexLostError: likewise.
        """
        begun, index = written.begun, self._index_commit(written, Meanwhile())
        base = self._open.base if index is None else index.base
        before = self._open.state
        changed = self._state_after(before, batch, written).changes_from(before)
        work = {} if batch.work == "micro-batch" else {WORK: batch.work}
        return ChangeSet(
            prefix=self._open.prefix,
            operation=begun.operation,
            position=batch.end,
            files=written.files,
            base_snapshot=base,
            previous_operation=self._open.operation,
            written_for=self._open.layout,
            # a commit that removes all rows removes others' too
            written_for_empty_table=begun.empty and not self._empties(written),
            truncates=self._empties(written),
            summary={SINK_ID: self._config.sink.id, ROWS: json.dumps(written.counts), **work},
            properties={f"{self._open.prefix}.{name}": value for name, value in changed.items()},
            metrics=written.metrics if index is None else index.added_to(written.metrics),
            index=index,
            amends=self._amends if batch.work == "reconcile" else (),
            others=self._others,
        )

    def again(self, request: ChangeSet, written: Written, refused: Refused, retries: Retries) -> ChangeSet | None:
        """What is left of a refused proposal, to be sent again. None if the micro-batch must be written again.

        :raises IndexLostError: it must be written again, with another index.
        :raises RowdeltaError: another run has committed, the table was rolled back, or there are no more retries.
        """
        return self._same_files(request, refused, retries) or self._amended(request, written, refused, retries)

    def in_topics(self, state: SinkState) -> SinkState:
        """The state after a position in the topics that are read."""
        section = self._open.plan.section
        return state.in_topics(section, self._source.identities(section)) if self._config.source.has_topics else state

    def _same_files(self, request: ChangeSet, refused: Refused, retries: Retries) -> ChangeSet | None:
        """The same files, to be sent again. None if the table isn't any more as it was when they were written."""
        if refused.again != "send":
            return None
        self._open.table.refresh()
        own_position(self._open.table, self._open.prefix, request.previous_operation)
        if self._lacks_deletes(request):
            return None
        if request.index is not None and self._open.table.snapshot_id() != request.base_snapshot:
            return None
        retries.wait(refused)
        return replace(request, base_snapshot=self._open.table.snapshot_id())

    def _amended(self, request: ChangeSet, written: Written, refused: Refused, retries: Retries) -> ChangeSet | None:
        """The same files, with deletes of earlier rows as others have left them since the look-up. None if that isn't
        enough.
        """
        slice_ = written.begun.index
        if self._open.key_index is None or slice_ is None or request.index is None:
            return None
        retries.wait(refused)
        self._open.table.refresh()
        own_position(self._open.table, self._open.prefix, request.previous_operation)
        if self._open.is_altered() or self._lacks_deletes(request):
            return None
        self._open.check_new_properties()
        with before_commit(self._open.name):
            meanwhile = self._open.key_index.look_up_again(slice_, written.index)
        index = None if meanwhile is None else self._index_commit(written, meanwhile)
        if index is None:
            return None
        metrics = index.added_to(written.metrics)
        return replace(request, base_snapshot=index.base, index=index, metrics=metrics, others=self._others)

    def _lacks_deletes(self, request: ChangeSet) -> bool:
        """Whether others have added rows to the table, which was empty when the files were written."""
        return request.written_for_empty_table and not self._open.table.is_empty()

    @property
    def _amends(self) -> tuple[str, ...]:
        operation = self._open.operation
        return () if operation is None else amended(self._open.table, self._open.prefix, operation)

    @property
    def _others(self) -> Mapping[str, str] | None:
        """See `ChangeSet.others`."""
        return None if self._open.plan.late is None else others_positions(self._open.table, self._open.prefix)

    def _empties(self, written: Written) -> bool:
        """Whether the commit removes all rows that the table has. With history, they were closed."""
        return written.truncates > 0 and self._open.plan.changelog.history is None

    def _state_after(self, before: SinkState, batch: TableBatch, written: Written) -> SinkState:
        """What the commit stores besides the position."""
        end = batch.end
        state = replace(
            self.in_topics(before),
            undecoded=written.undecoded_since(before.undecoded),
            # a replay of dead letters reads nothing new
            late=before.late + (0 if dict(end) == dict(self._open.position or {}) else written.late),
            source_tables=self._stated.source_tables or before.source_tables,
            key=self._stated.key if self._stated.key.columns else before.key,
        )
        if self._open.plan.changelog.tells_snapshots:
            # a TRUNCATE removes what was streamed before it, so that a snapshot that follows it writes no row twice
            known = frozenset[int]() if written.truncates else before.streamed_before(self._open.position)
            state = replace(state, streamed=known | written.streamed_partitions)
        elif self._config.source.has_topics and dict(end) != dict(self._open.position or {}):
            # a replay has this mode in each table
            state = replace(state, streamed=None)
        if batch.load is not None:
            load, parts = batch.load
            rows = 0 if before.loaded is None or load != before.load else before.loaded.rows
            state = replace(state, load=load, loaded=Loaded(parts, rows + written.read))
        if self._open.plan.changelog.finds_snapshots:
            found = resnapshot_after(before.resnapshot, written.stated)
            state = replace(state, resnapshot=found)
        spent = before.written + written.bytes + _METADATA
        return replace(state, written=spent) if self._open.maintenance.budget else state

    def _index_commit(self, written: Written, meanwhile: Meanwhile) -> IndexCommit | None:
        """Write deletes of earlier rows, or the files that replace those with such rows, and the key index's version
        that the commit will name. None if the table has no index.

        :param meanwhile: what others have changed since tasks looked the keys up.
        :raises RowdeltaError: nothing was committed.
        :raises IndexLostError: likewise.
        """
        key_index, begun = self._open.key_index, written.begun
        if key_index is None or begun.index is None:
            return None
        operation, results = begun.operation, written.index
        with before_commit(self._open.name), Scratch(self._open.name, self._open.io_of) as scratch:
            deleted = key_index.deleted_rows(results, meanwhile)
            gone: WrittenDeletes | Replacement
            if self._open.plan.section.copies and deleted.found:
                copying = key_index.copying(begun.index)
                gone = replace_files(self._open.table, self._open.engine, copying, deleted, scratch)
            else:
                name = f"{operation}-{key_index.base}"
                gone = self._open.table.delete_rows(name, deleted, key_index.vector, key_index.parquet_deletes, scratch)
            index = key_index.prepare(
                operation,
                begun.index,
                written.tasks,
                results,
                deleted.found,
                gone,
                scratch,
                meanwhile,
                truncates=self._empties(written),
            )
        refused, self.prepared = self.prepared, scratch
        refused.keep(scratch.paths)  # a version of the same name was written over the refused one
        refused.delete()
        return index
