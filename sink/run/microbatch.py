"""Applies micro-batches to one table: what each one continues, what is committed, and what comes after a refusal.

What runs in tasks is behind `sink.run.engine`.
"""

import json
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from pyiceberg.io import FileIO

from changelog.amounts import amount, sized
from changelog.decoding import ChangelogDecoder, Place, Stated, StatedKeys
from changelog.shown_values import shown
from changelog.source_tables import takes
from deltawriters import FileContent
from deltawriters.keyindex.versions import IndexLostError
from sink import logs
from sink.config import Config
from sink.config.maintenance import MaintenanceSection
from sink.deadletters.table import DeadLetters
from sink.errors import DataError, RowdeltaError, TableError, TableGoneError, TemporaryError
from sink.plans import Share
from sink.results import ShareResult
from sink.run.attempt import Attempt, Begun, Pending, Proposal, TableShare, TaskPlans, is_small
from sink.run.engine import Engine
from sink.run.guards import (
    SAME_OFFSETS,
    check_bad_records,
    check_directory,
    check_format,
    check_snapshots,
    check_topic,
)
from sink.run.keyindex import KeyIndex
from sink.run.keys import KEY, TableKey, accepted_property, compared, may_spread, with_key
from sink.run.minor_compaction import MinorCompaction
from sink.run.observer import (
    BatchStarted,
    CommitRefused,
    Committed,
    CommitTried,
    DeadLettersKept,
    Files,
    Index,
    Observer,
    Refusal,
    RewriteDone,
    StageDone,
    StageStarted,
    TableOpened,
    last_commit,
    live_files,
    nobody,
    stage,
)
from sink.run.patterns import ResolvedTable
from sink.run.plan import (
    declared_changes,
    declared_types,
    deletes_by_value,
    evolved_columns,
    maybe_decimals,
    needs_global_deletes,
    new_defaults,
    plan_table,
    shown_changes,
    truncate_refused,
)
from sink.run.rewrite_plan import RewriteOptions
from sink.run.rewriting import KIND, Rewriting, RunningRewrite
from sink.run.sink_state import SinkState
from sink.run.source_tables import SOURCE_TABLES, SourceTables
from sink.run.stale_deletes import StaleDeletes
from sink.run.table_plan import TablePlan
from sink.run.written import Uncommitted, Written, sum_up
from sink.sources.source import Position, Source, Stream, TableBatch
from sink.spark.job_errors import before_commit
from sink.targets.notes import ROWS, SINK_ID
from sink.targets.own_position import own_position
from sink.targets.own_state import (
    COUNTED,
    is_cleaning_due,
    maintenance_of,
    note_cleaning,
    property_prefix,
    rewrite_credit,
    start_position,
)
from sink.targets.retries import Retries
from sink.targets.seam import Table
from sink.targets.upkeep_values import Compacted
from sink.targets.values import (
    ChangeSet,
    CommitUnknownError,
    Copied,
    Done,
    Outcome,
    Refused,
    StoredPosition,
    refusal,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

log = logging.getLogger("rowdelta")

_MOST_SCHEMAS = 10
"""One micro-batch may change the schema up to this many times. Only columns that the table already has show whether
values fit, so one change may lead to another.
"""

SMALL_MERGE = 1_000_000
"""A table that merges more entries of its key index than this is written alone, so that other tables don't wait for it.
"""


class SchemaEvolvedError(Exception):
    """The table has just got new or wider columns."""


class TableSink:
    """Applies micro-batches to one table. Knows the table's position and the snapshot that it belongs to.

    :param is_guest: only looks after the table, while another process of the sink may apply micro-batches to it. So it
        deletes nothing of the key index that it doesn't know.
    """

    def __init__(
        self,
        config: Config,
        resolved: ResolvedTable,
        table: Table,
        plan: TablePlan,
        key: TableKey,
        source: Source,
        dead_letters: DeadLetters | None,
        engine: Engine,
        observer: Observer = nobody,
        *,
        is_guest: bool = False,
    ) -> None:
        self.plan = plan
        self._source_tables: SourceTables | None = None
        self.table = table
        self._config = config
        self._resolved = with_key(resolved, key)
        self._key = key
        self._key_warning: str | None = None
        self._spread_known = False
        self._source = source
        self._dead_letters = dead_letters
        self._engine = engine
        self._observer = observer
        self._prefix = property_prefix(config)
        self._spec, self._layout = table.spec, table.layout
        self._stored: StoredPosition | None = None
        self._base: int | None = None
        self.written_bytes = 0
        """By its micro-batches, since it was opened."""
        self._global_deletes = False
        self._is_guest = is_guest
        self._key_index = self._open_key_index()
        self._task_plans = TaskPlans(config, plan, dead_letters)
        self._uncommitted = Uncommitted(table.name, self._io_of)
        self._writer = engine.writer(plan, self._task_plans, self._uncommitted)
        self._minor_compaction = MinorCompaction(table, plan.section.key, self._prefix, engine, observer)
        self.stale_deletes = StaleDeletes(table, plan.section, self._prefix, self._io_of)
        # an engine of its own, since micro-batches go on meanwhile
        self._rewriting = Rewriting(table, plan.section.key, self._prefix, engine.another(), observer)
        stored = table.position(self._prefix)
        self._adopt(stored.operation if stored else None)
        table.settle(self._prefix)
        if dead_letters is not None:
            dead_letters.publish(plan.section.target)
        if observer is not nobody:
            last = last_commit(table)
            live, at = (None, None) if last is None else (last.live, last.timestamp_ms)
            observer(TableOpened(table.name, self._base, self.position, live, at))

    @property
    def position(self) -> Position | None:
        """The position of the table's last commit, or the position where reading began if there is no commit."""
        return self._stored.position if self._stored else start_position(self.table, self._prefix)

    @property
    def maintenance(self) -> MaintenanceSection:
        """What is done for the table beside its micro-batches."""
        return maintenance_of(self._config, self.plan.section, self.table)

    def credit(self, budget: float) -> int:
        """See `rewrite_credit`."""
        return rewrite_credit(self.table, self._prefix, budget)

    def is_cleaning_due(self, every: timedelta) -> bool:
        """Whether orphans were removed so long ago, if ever."""
        return is_cleaning_due(self._config, self.table, every)

    def note_cleaning(self) -> None:
        """Store that orphans were removed now. Call this between micro-batches."""
        note_cleaning(self._config, self.table)

    def note_compacted(self, done: Compacted) -> None:
        """Count what was rewritten without a commit of the sink's own. Call this between micro-batches."""
        self.table.refresh()
        name = f"{self._prefix}.{COUNTED[1]}"
        self.table.set_property(name, str(int(self.table.property(name) or 0) + done.bytes))
        self.table.refresh()
        live = live_files(self.table) if self._observer is not nobody else None
        self._observer(
            RewriteDone(self.table.name, KIND, done.touched, done.written, done.bytes, 0.0, done.seconds, live)
        )

    @property
    def has_key_index(self) -> bool:
        """Whether a key index knows where the table's rows are."""
        return self._key_index is not None

    @property
    def _appends(self) -> bool:
        """Whether the table only grows."""
        return self.plan.section.mode == "append"

    def _open_key_index(self) -> KeyIndex | None:
        if not self.plan.section.has_index:
            return None
        return KeyIndex(self.table, self.plan, self._engine, is_guest=self._is_guest)

    def _io_of(self, path: str) -> FileIO:
        """What reaches a file that was written for the table."""
        return self._spec.io if self._key_index is None else self._key_index.io_of(path, self._spec)

    def check_source(self) -> None:
        """A position is true of one topic or directory only. Call this after `Source.locate`.

        :raises TableError: the table's position is one in another topic or directory than it is read from now.
        """
        if self.position is None:
            return
        state, section = self._state(), self.plan.section
        name, same = f"{self._prefix}.{SAME_OFFSETS}", self.table.property(f"{self._prefix}.{SAME_OFFSETS}")
        if self._config.source.type == "files":
            found = self._source.identity(section.source)
            check_directory(
                self.table.name, name, same, position=self.position, directory=section.source, identity=found
            )
        elif any(int(offset) for offset in self.position.values()):  # else it has passed no message of any topic
            stored, read = (state.topic, state.topic_id), (section.source, self._source.identity(section.source))
            check_topic(self.table.name, name, same, stored=stored, read=read)

    def remember_start(self, position: Position | None) -> None:
        """Store the start position of a table without commits, so that `startingOffsets: latest` means the same after a
        restart.

        :raises DataError: the mode is `changelog` or `append`, and the table has rows, but no position of this sink.
        """
        if self._stored is not None:
            return
        mode = self.plan.section.mode
        if mode != "upsert" and not self.table.is_empty():
            raise DataError(
                f"{self.table.name} holds rows, but sink {self._config.sink.id!r} has no position in it. Reading the "
                f"source from its start would duplicate rows in mode {mode}. Use mode: upsert, or an empty table."
            )
        if position is not None and start_position(self.table, self._prefix) is None:
            state = self._state()
            for name, value in self._in_topic(state).changes_from(state).items():
                self.table.set_property(f"{self._prefix}.{name}", value)
            self.table.set_property(f"{self._prefix}.start", json.dumps(dict(position)))
            self.table.refresh()

    def batch(self, stream: Stream, batch_id: int, frame: "DataFrame") -> TableBatch | None:
        """The table's part of a micro-batch, if it has one."""
        batch = self._source.batch(stream, batch_id, frame, self.plan.section, self.position)
        if batch is not None:
            self._observer(BatchStarted(self.table.name, batch_id))
        return batch

    def apply_batch(self, batch_id: int | None, batch: TableBatch) -> Written:
        """Apply changes that continue the table's position, exactly once, and store the position `batch.end`. Returns
        what was committed.

        :raises RowdeltaError: nothing was applied; with `CommitUnknownError`, it is unknown whether it was applied.
        """
        return self.commit(self.prepare_batch(batch_id, batch))

    def prepare_batch(self, batch_id: int | None, batch: TableBatch) -> Pending:
        """Write changes that continue the table's position, without a commit.

        The caller must then call `commit` or `discard`.
        """
        self._take_bearings()
        try:
            return Pending(batch_id, batch, self._attempt(batch))
        except SchemaEvolvedError:
            self._observer(CommitRefused(self.table.name, "schema"))
            self._rebase()
        except IndexLostError as error:
            self._forget_index(error)
        return Pending(batch_id, batch, None)

    def share(self, batch: TableBatch) -> TableShare | None:
        """The table's share in a joint job. None if the table needs a job of its own (`apply_batch`).

        The caller must pass the job's result to `apply_share`, or call `discard`.
        """
        if batch.share is None or not is_small(batch.estimated_rows) or not self.plan.is_decoded_whole:
            return None
        self._take_bearings()
        try:
            begun = self._begin(batch)
        except IndexLostError as error:
            self._forget_index(error)
            return None
        if begun.index is not None and begun.index.merged_entries > SMALL_MERGE:
            return None
        if self._has_kept_letters():  # asked after `begun` knows their last commit
            return None
        self._uncommitted.paths = []
        decoder = ChangelogDecoder(self._config.source.format, self.plan.changelog)
        share = Share(decoder, self._task_plans.plan(begun, 1), self._task_plans.hash(begun, 1))
        return TableShare(batch, begun, share)

    def take_over(self, paths: Sequence[str]) -> None:
        """Take responsibility for the files that a joint job wrote for this table."""
        self._uncommitted.paths = list(paths)

    def apply_share(self, batch_id: int, share: TableShare, result: ShareResult) -> Written:
        """Like `apply_batch`, for files that a joint job wrote. Call `take_over` first."""
        return self.commit(self._prepare_share(batch_id, share, result))

    def _prepare_share(self, batch_id: int, share: TableShare, result: ShareResult) -> Pending:
        batch = share.batch
        try:
            written = replace(sum_up([result.written]), tasks=1, observed=result.observed, stated=result.stated)
            return Pending(batch_id, batch, self._finish(share.begun, written))
        except SchemaEvolvedError:
            self._observer(CommitRefused(self.table.name, "schema"))
            self._rebase()
        return Pending(batch_id, batch, None)

    def _take_bearings(self) -> None:
        """Find out whether others changed the table since the last commit."""
        # with an outdated schema or spec, the new files would lack values, and deletes would miss rows
        self.table.refresh()
        if self.table.snapshot_id() != self._base:
            # The current snapshot becomes the commit's base, since the micro-batch is written for it: whether the table
            # is empty, and where its rows are. The commit's validation won't look at earlier snapshots, so the position
            # is checked here.
            own_position(self.table, self._prefix, self._operation)
            self._base = self.table.snapshot_id()
        self._follow_table()
        logs.note_snapshot(self._base)

    def commit(self, pending: Pending) -> Written:
        """Commit what `prepare_batch` wrote. Returns what was committed.

        This is the only loop around a refused commit. What goes on depends on what others have done meanwhile: the same
        files are sent again, or with other deletes of earlier rows, or the micro-batch is written again.

        :raises RowdeltaError: see `apply_batch`.
        """
        logs.note_snapshot(self._base)
        attempt: Attempt | None = pending.attempt
        proposal: Proposal | None = None
        retries, schemas = self.table.retries(), 0
        while True:
            try:
                attempt = attempt or self._attempt(pending.batch)
                with self._deleting_after_errors():
                    outcome: Outcome = Done()
                    if proposal is None:
                        with stage(self._observer, self.table.name, "prepare"):
                            outcome = self._keep_dead_letters(pending.batch.end, attempt)
                            proposal = self._proposed(pending.batch.end, attempt) if outcome == Done() else None
                    if proposal is not None:
                        outcome = self._send(proposal)
                    refused = refusal(outcome)
                    if refused is not None:
                        attempt, proposal = self._after(refused, attempt, proposal, retries)
                if attempt is not None and proposal is not None and refused is None:
                    self._see_committed(pending, attempt, proposal)
                    return attempt.written
            except SchemaEvolvedError:
                self._observer(CommitRefused(self.table.name, "schema"))
                schemas += 1
                if schemas > _MOST_SCHEMAS:
                    raise TableError(
                        f"{self.table.name}: after {_MOST_SCHEMAS} changes of its schema the micro-batch still needs "
                        "another. Does somebody else alter the table at the same time? Nothing was applied."
                    ) from None
                self._rebase()
                attempt = proposal = None
            except IndexLostError as error:
                self._forget_index(error)
                attempt = proposal = None
                retries.wait(Refused(str(error)))
                self._rebase()

    def _send(self, proposal: Proposal) -> Outcome:
        """Send a proposal to be committed.

        :raises RowdeltaError: see `Table.commit`, and for `IndexLostError`.
        """
        self._observer(CommitTried(self.table.name))
        with stage(self._observer, self.table.name, "commit"):
            outcome = self.table.commit(proposal.request)
        if isinstance(outcome, Refused):
            reason: Refusal = "conflict" if outcome.again == "send" else "changed"
            self._observer(CommitRefused(self.table.name, reason))
        return outcome

    def _after(
        self, refused: Refused, attempt: Attempt, proposal: Proposal | None, retries: Retries
    ) -> tuple[Attempt | None, Proposal | None]:
        """What is left of an attempt after a refusal, to be sent again. Nothing, if it must be written again.

        :param proposal: None if the bad records were refused.
        :raises IndexLostError: the micro-batch must be written again.
        :raises RowdeltaError: another run has committed, the table was rolled back, or there are no more retries.
        """
        if proposal is None and refused.again == "send":
            retries.wait(refused)
            return attempt, None
        if proposal is not None:
            again = self._same_files(proposal, refused, retries) or self._amended(proposal, attempt, refused, retries)
            if again is not None:
                return attempt, again
        log.info("%s: others changed it meanwhile; writing again", self.table.name)
        self._uncommitted.delete()
        retries.wait(refused)
        self._rebase()
        return None, None

    def _same_files(self, proposal: Proposal, refused: Refused, retries: Retries) -> Proposal | None:
        """The same files, to be sent again. None if the table isn't any more as it was when they were written."""
        if refused.again != "send":
            return None
        request = proposal.request
        self.table.refresh()
        own_position(self.table, self._prefix, request.previous_operation)
        if self._lacks_deletes(request):
            return None
        if request.index is not None and self.table.snapshot_id() != request.base_snapshot:
            return None
        retries.wait(refused)
        return replace(proposal, request=replace(request, base_snapshot=self.table.snapshot_id()))

    def _amended(self, proposal: Proposal, attempt: Attempt, refused: Refused, retries: Retries) -> Proposal | None:
        """The same files, with deletes of earlier rows as others have left them since the look-up. None if that isn't
        enough.
        """
        request, slice_ = proposal.request, attempt.begun.index
        if self._key_index is None or slice_ is None or request.index is None:
            return None
        retries.wait(refused)
        self.table.refresh()
        own_position(self.table, self._prefix, request.previous_operation)
        if self._is_altered() or self._lacks_deletes(request):
            return None
        self._check_new_properties()
        written = attempt.written
        with before_commit(self.table.name):
            index = self._key_index.amend(request.operation, slice_, written.tasks, written.index)
        if index is None:
            return None
        self._uncommitted.discard(set(request.index.new_paths) - set(index.new_paths))
        kept = [path for path in self._uncommitted.paths if path not in set(request.index.new_paths)]
        self._uncommitted.paths = [*kept, *index.new_paths]
        request = replace(request, base_snapshot=index.base, index=index, metrics=index.added_to(attempt.metrics))
        return replace(proposal, request=request)

    def _lacks_deletes(self, request: ChangeSet) -> bool:
        """Whether others have added rows to the table, which was empty when the files were written."""
        return request.written_for_empty_table and not self.table.is_empty()

    @contextmanager
    def _deleting_after_errors(self) -> Iterator[None]:
        """Delete an attempt's files if it ends with an error after which nothing of it is committed."""
        try:
            yield
        except CommitUnknownError:
            self._uncommitted.paths = []  # the files may belong to the table now
            raise
        except (RowdeltaError, IndexLostError):
            # after any other error it might be committed, so then the files stay
            self._uncommitted.delete()
            raise

    def _see_committed(self, pending: Pending, attempt: Attempt, proposal: Proposal) -> None:
        """Go on from what was committed."""
        self._uncommitted.paths = []  # the files belong to the table now
        logs.note_snapshot(self.table.snapshot_id())
        self._log(pending, attempt, proposal, time.monotonic() - proposal.started)
        deletes = 0 if proposal.request.index is None else proposal.request.index.delete_files
        self._minor_compaction.count(len(attempt.written.files) + deletes)
        self.written_bytes += attempt.written.bytes
        self._adopt(attempt.begun.operation)
        if self._key_index is not None:
            self._key_index.see_committed(self._stored)
        if self._observer is not nobody:
            index = proposal.request.index
            if index is not None and index.copied is not None:
                self._observer(_rewrite_done(self.table.name, index.copied))
            self._observer(self._committed(pending, attempt, proposal))

    def _committed(self, pending: Pending, attempt: Attempt, proposal: Proposal) -> Committed:
        written = attempt.written
        files = {content: Files(*amount) for content, amount in written.contents.items()}
        index = proposal.request.index
        if index is not None and index.files:  # which came after the tasks' files
            content = (FileContent.DATA if index.replaced else FileContent.POSITION_DELETES).value
            of_tasks = files.get(content, Files(0, 0))
            files[content] = Files(of_tasks.count + len(index.files), of_tasks.bytes + index.bytes)
        return Committed(
            self.table.name,
            pending.batch_id,
            self._base,
            pending.batch.end,
            written.counts,
            files,
            live_files(self.table),
            Index(*self._key_index.size) if self._key_index is not None and self._key_index.size else None,
            written.probe_seconds,
            written.peak_memory,
            time.monotonic() - attempt.begun.started,
        )

    def compact(self) -> None:
        """Merge small files. Call this after each commit, at a time when other tables don't wait for it."""
        if self._key_index is not None and self.plan.section.merge_small_files and self._minor_compaction.is_due():
            self._merge_small_files(self._key_index)
        self.table.upkeep().tend()

    def _merge_small_files(self, key_index: KeyIndex) -> None:
        self._take_bearings()
        if key_index is not self._key_index or self._stored is None:
            return  # somebody altered the table
        try:
            key_index.synchronize(self._stored)
            if not self._minor_compaction.run(
                self._spec, key_index, self._stored.operation, self._rewriting.moving, self.plan.order
            ):
                return
        except IndexLostError as error:
            self._forget_index(error)
            return
        self._see_rewritten(key_index, self._stored.operation)

    def begin_rewrite(
        self,
        options: RewriteOptions,
        most_bytes: int | None = None,
        only: Collection[str] | None = None,
        but: Collection[str] = (),
    ) -> RunningRewrite | None:
        """Choose files to rewrite beside the stream, and hold the state from which this is done (`Rewriting`). Call
        this between micro-batches.

        :param most_bytes: see `Rewriting.begin`, and for `only` and `but`.
        :return: None if nothing pays, or nothing can be done now.
        :raises RowdeltaError: the table can't be read now, or needs its owner.
        """
        self._take_bearings()
        if self._key_index is None or self._stored is None:
            return None
        try:
            return self._rewriting.begin(
                self._spec,
                self._key_index,
                self._stored,
                options,
                most_bytes,
                only,
                self.plan.order,
                but,
                every_part=self._is_guest,  # no micro-batch waits for it
            )
        except IndexLostError as error:
            self._forget_index(error)
            return None

    def write_rewrite(self, begun: RunningRewrite) -> bool:
        """Write the new files beside micro-batches. See `Rewriting.write`."""
        return self._rewriting.write(begun)

    def end_rewrite(self, begun: RunningRewrite, *, written: bool = True) -> RewriteDone | None:
        """Commit the new files between micro-batches, or give them up if others have changed the old ones.

        :param written: whether there is anything to commit.
        :return: what was done; None if nothing was.
        :raises RowdeltaError: see `Table.commit`.
        """
        key_index, stored = self._key_index, self._stored
        try:
            if written:
                self._take_bearings()
            if not written or key_index is None or key_index is not self._key_index or stored is None:
                if begun.index_lost is not None and key_index is not None and key_index.holds(begun.pin):
                    raise IndexLostError(begun.index_lost)
                self._rewriting.give_up(begun, key_index)
                return None
            with before_commit(self.table.name):
                key_index.synchronize(stored)
            done = self._rewriting.adopt(begun, key_index, stored.operation)
        except IndexLostError as error:
            self._rewriting.give_up(begun, key_index)
            self._forget_index(error)
            return None
        except Exception as error:
            is_known = isinstance(error, RowdeltaError) and not isinstance(error, CommitUnknownError)
            end = self._rewriting.give_up if is_known or not begun.is_sent else self._rewriting.leave
            end(begun, key_index)
            raise
        if done is not None:
            self._see_rewritten(key_index, stored.operation)
        return done

    def convert_equality_deletes(self) -> int:
        """See `StaleDeletes.convert`. Call this between micro-batches."""

        def convert(stored: StoredPosition) -> int:
            return 0 if self._key_index is None else self.stale_deletes.convert(self._key_index, stored)

        return self._end_deletes(convert)

    def drop_dangling_deletes(self) -> int:
        """See `StaleDeletes.drop`. Call this between micro-batches."""
        return self._end_deletes(lambda stored: self.stale_deletes.drop(self._key_index, stored))

    def _end_deletes(self, end: Callable[[StoredPosition], int]) -> int:
        self._take_bearings()
        key_index, stored = self._key_index, self._stored
        if stored is None:
            return 0
        try:
            count = end(stored)
        except IndexLostError as error:
            self._forget_index(error)
            return 0
        if count and key_index is not None:
            self._see_rewritten(key_index, stored.operation)
        elif count:
            self._rebase()
        return count

    def oldest_needed(self, older_than: timedelta, retain_last: int) -> int | None:
        """The oldest state of the table that the sink may still need to find out what others changed: `keep` of
        `Upkeep.expire`. Later micro-batches need none that is older. Call this between micro-batches.

        :param older_than: see `Upkeep.expire`, and for `retain_last`.
        :return: None if nothing tells, or there is nothing to do.
        """
        self._take_bearings()
        stored = self._stored
        if stored is None:
            return None
        # what the table's position and the stored version of the index belong to
        needed: int | None = stored.snapshot_id if stored.index is None else stored.index["base"]
        if needed is not None and stored.snapshot_id is not None:
            needed = self.table.older_of(stored.snapshot_id, needed)
        return needed if self.table.upkeep().has_old_states(older_than, retain_last, needed) else None

    def newest_table(self) -> Table:
        """The table as it is now, as an object of its own: micro-batches go on with theirs while something is done
        with it that takes long.

        :raises TableGoneError: it is gone, or another table has its name.
        :raises TemporaryError: the catalog did not answer.
        """
        table = self._engine.catalogs.load(self.table.name)
        if not isinstance(table, Table):
            raise TableGoneError(f"{self.table.name} is gone. Somebody dropped it while the sink ran.")
        if table.table_id != self.table.table_id:
            raise TableGoneError(f"{self.table.name} was dropped and created again while the sink ran.")
        return table

    def _see_rewritten(self, key_index: KeyIndex, operation: str) -> None:
        """Go on from a commit that changed no row.

        :param operation: the commit that stored the sink's position.
        """
        self.table.refresh()
        self._adopt(operation)
        key_index.see_committed(self._stored)

    def discard(self) -> None:
        """Delete files that were written and not committed."""
        self._uncommitted.delete()

    def _rebase(self) -> None:
        """Make the table's current state the base, so that the micro-batch can be written again.

        :raises FencedError: the table's position isn't the one that the micro-batch continues.
        :raises RolledBackError: likewise, after a rollback.
        """
        self.table.refresh()
        own_position(self.table, self._prefix, self._operation)
        self._follow_table()
        self._adopt(self._operation)

    def _forget_index(self, error: IndexLostError) -> None:
        assert self._key_index is not None
        self._observer(CommitRefused(self.table.name, "index lost"))
        self._key_index.forget()
        log.warning("%s: %s; building the key index again", self.table.name, error)

    @property
    def _operation(self) -> str | None:
        """The operation that stored the position which the next micro-batch continues."""
        return self._stored.operation if self._stored else None

    def _adopt(self, operation: str | None) -> None:
        """Make the table's current metadata the base of the next commit.

        :param operation: the operation that stored the position which the next micro-batch continues.
        :raises FencedError: another operation has stored a position since.
        :raises RolledBackError: the table was rolled back to another operation.
        """
        self._stored = own_position(self.table, self._prefix, operation)
        self._base = self.table.snapshot_id()

    def _follow_table(self) -> None:
        """See what others have changed of the table's metadata."""
        self._prepare_global_deletes()
        self._replan_if_altered()

    def _prepare_global_deletes(self) -> None:
        if deletes_by_value(self.plan.section) and not self._is_guest:  # guests write none
            is_needed = needs_global_deletes(self.plan)
            self._global_deletes = self.table.prepare_global_deletes(always=is_needed)

    def _check_new_properties(self) -> None:
        if self.table.spec.properties_by_name.keys() != self._spec.properties_by_name.keys():
            # a property is refused by its name (Iceberg); one of Delta Lake with another value is another layout
            self.table.check_writable(appends=self._appends, copies=self.plan.section.copies)

    def _replan_if_altered(self) -> None:
        self._check_new_properties()
        if not self._is_altered():
            self._spec = self.table.spec
            return
        log.info("%s was altered; checking it against the configuration again", self.table.name)
        self.plan = plan_table(self._engine.catalogs, self._config, self._resolved, self.table)
        if self._source_tables is not None:
            self.plan = replace(self.plan, changelog=self._source_tables.of(self.plan.changelog))
        self._prepare_global_deletes()
        self._task_plans = TaskPlans(self._config, self.plan, self._dead_letters)
        self._writer.follow(self.plan, self._task_plans)
        self._spec, self._layout = self.table.spec, self.table.layout
        self._key_index = self._open_key_index()

    def _see_partitions(self, position: Position | None) -> None:
        """Follow the number of the topic's partitions, which decides whether a TRUNCATE has a place in an order."""
        refused = truncate_refused(self.plan.section, position)
        if refused != self.plan.changelog.truncate_refused:
            self.plan = replace(self.plan, changelog=replace(self.plan.changelog, truncate_refused=refused))
            self._writer.follow(self.plan, self._task_plans)

    def _is_altered(self) -> bool:
        """Whether the table's layout differs from what files are written for."""
        return self.table.layout != self._layout

    def _attempt(self, batch: TableBatch) -> Attempt:
        begun = self._begin(batch)
        return self._finish(begun, self._writer.write(batch, begun, may_repeat=self._has_kept_letters()))

    def _begin(self, batch: TableBatch) -> Begun:
        operation = uuid4().hex[:16]
        started = time.monotonic()
        self._see_partitions(batch.end)
        if batch.declared is not None:
            self._evolve(declared_changes(self.plan, batch.declared))
        # a sink that only appends doesn't conflict with other writers' appends
        empty = not self._appends and self.table.is_empty()
        before = time.monotonic()
        if self._key_index is not None:
            with stage(self._observer, self.table.name, "index"):
                self._key_index.synchronize(self._stored)
        index_seconds = time.monotonic() - before
        self._observer(StageStarted(self.table.name, "write"))
        key_index = self._key_index
        return Begun(
            operation,
            self._spec,
            empty,
            self._global_deletes,
            index=key_index.slice() if key_index is not None else None,
            sequence=key_index.next_sequence if key_index is not None else 0,
            hash=key_index.key_hash(self._spec) if key_index is not None else None,
            started=started,
            opening=self._dead_letters.opening if self._dead_letters else 0,
            letters=self._dead_letters.operation(self.plan.section.target) if self._dead_letters else None,
            index_seconds=index_seconds,
        )

    def _finish(self, begun: Begun, written: Written) -> Attempt:
        try:
            self._compare(written.stated)
            if written.observed:
                self._evolve(written.observed)
            self._refuse(written)
        except (RowdeltaError, SchemaEvolvedError):
            self._uncommitted.delete()
            raise
        seconds = time.monotonic() - begun.started
        self._observer(StageDone(self.table.name, "write", seconds - begun.index_seconds))
        return Attempt(begun, written, seconds)

    def _compare(self, stated: Stated) -> None:
        """Compare what messages state of their table with what is known of it.

        :raises TableError: the messages' key has changed.
        :raises SchemaEvolvedError: the micro-batch must be decoded again, for one table of several.
        """
        self._compare_tables({fact: place for fact, place in stated.items() if isinstance(fact, str)})
        self._compare_keys({fact: place for fact, place in stated.items() if isinstance(fact, tuple)})

    def _compare_tables(self, stated: Mapping[str, Place]) -> None:
        """Without `source_tables` an entry takes the messages of the table that is named first.

        :raises SchemaEvolvedError: the topic turns out to have messages of other tables too.
        """
        spec = self.plan.changelog
        if not stated:
            return
        taken = spec.source_tables or (min(stated, key=lambda name: stated[name]),)
        is_mixed = spec.is_mixed or not all(takes(taken, name) for name in stated)
        if is_mixed != spec.is_mixed:
            others = ", ".join(sorted(name for name in stated if not takes(taken, name)))
            what = "left out" if spec.ignores_other_tables else "bad records"
            log.warning(
                "%s: %s has messages of other tables than %s: %s. They are %s; see source_tables",
                *(self.table.name, self.plan.section.source, ", ".join(taken), others, what),
            )
        self._take_tables(taken, is_mixed)
        if is_mixed != spec.is_mixed:
            raise SchemaEvolvedError

    def _take_tables(self, taken: tuple[str, ...], is_mixed: bool) -> None:
        self._source_tables = SourceTables(taken, is_mixed)
        spec = self._source_tables.of(self.plan.changelog)
        if spec != self.plan.changelog:
            self.plan = replace(self.plan, changelog=spec)
            self._writer.follow(self.plan, self._task_plans)

    def _compare_keys(self, stated: StatedKeys) -> None:
        """Compare the messages' key with the table's. This is the first check, since with a wrong key all files are
        wrong.

        :raises TableError: the messages' key has changed.
        """
        section = self.plan.section
        if self._appends or not stated:
            return
        key = compared(self._key, stated, section, accepted_property(self._config))
        if key != self._key:
            self._warn_of(key)
        self._key = key
        if not self._spread_known and may_spread(key, stated, section):
            count = 1
            with suppress(TemporaryError):  # then the next micro-batch asks
                count = self._source.partitions(section.source)
                self._spread_known = True
            if count > 1:
                log.warning(
                    "%s: messages of one row may be in several of the %d partitions of %s, since its messages have no "
                    "key or a larger one than %s. Nothing says which of them is newer: give the topic one partition, "
                    "or name order_by",
                    *(self.table.name, count, section.source, ", ".join(key.columns)),
                )

    @property
    def awaits_message_keys(self) -> bool:
        """Whether the key is configured, and no micro-batch has shown the messages' key yet."""
        return self._key.configured and not self._key.messages

    def note_message_keys(self, stated: Iterable[tuple[str, ...]]) -> None:
        """Warn if messages that no micro-batch has read yet have another key than the configured one."""
        if self.awaits_message_keys:
            self._warn_of(replace(self._key, messages=tuple(sorted(fields for fields in stated if fields))))

    def _warn_of(self, key: TableKey) -> None:
        """Warn, once, that the messages have another key than the configured one."""
        warning = key.warning(self.plan.section)
        if warning is not None and warning != self._key_warning:
            self._key_warning = warning
            log.warning("%s", warning)

    def _evolve(self, observed: Mapping[str, str]) -> None:
        """Change the table's schema, once, for all that the micro-batch's messages have. Then the micro-batch is
        written again under the new schema.

        :raises SchemaEvolvedError: the schema has changed.
        :raises DataError: see `evolved_columns`.
        :raises TableError: see `evolved_columns`.
        """
        can = self._config.capabilities(self.plan.section.target)
        changes = evolved_columns(self.plan, observed, can) if observed else {}
        if changes:
            new = {name: dtype.simpleString() if dtype else "" for name, dtype in changes.items()}
            log.info("%s: the source's schema changed: %s", self.table.name, shown_changes(new))
            for warning in maybe_decimals(self._config, declared_types(self.plan.section, observed)):
                log.warning("%s: %s", self.table.name, warning)
            defaults = new_defaults(self.plan, observed, changes)
            self.table.refresh()
            if not self._is_altered():  # else others altered it; compare with their schema first
                self._tell_defaults(defaults, self.table.evolve(changes, defaults))
            raise SchemaEvolvedError

    def _tell_defaults(self, defaults: Mapping[str, Any], kept: Mapping[str, Any]) -> None:
        """Say what the source has in rows from before, where the table has such rows."""
        if self.table.is_empty():
            return
        if kept:
            log.info("%s: earlier rows have %s, as in the source", self.table.name, self._named(kept))
        lost = {name: value for name, value in defaults.items() if name not in kept}
        if lost:
            log.warning(
                "%s: rows from before have null in new columns where the source has the default (%s). Only Iceberg's "
                "format version 3 gives earlier rows a value, and none of type decimal. Set it by hand (UPDATE %s SET "
                "… WHERE … IS NULL), or let the connector read the source's rows again (a snapshot)",
                *(self.table.name, self._named(lost), self.table.name),
            )

    def _named(self, values: Mapping[str, Any]) -> str:
        """Defaults of columns for people."""
        is_shown = self._config.sink.show_values
        texts = {name: json.dumps(each) if is_shown else shown(each, visible=False) for name, each in values.items()}
        return ", ".join(f"{name} = {text}" for name, text in texts.items())

    def _has_kept_letters(self) -> bool:
        """Whether the dead-letter table may have bad records beyond the table's position.

        That happens if the run crashed between both commits, or if somebody set the table's position back.
        """
        kept = self._dead_letters.position(self.plan.section.target) if self._dead_letters else None
        return kept is not None and (self.position is None or self._source.is_ahead(kept, self.position))

    def decoded(
        self, records: "DataFrame", keep: "Callable[[DataFrame], DataFrame]" = lambda changes: changes
    ) -> "DataFrame":
        """Decode raw records. The executors compute and store the changelog rows.

        If the table follows the messages' schema, it first gets the columns that the records have.

        :param keep: filters the changelog rows.
        """
        while True:
            self._see_partitions(self.position)
            decoded = self._writer.decoded(records, keep)
            try:
                self._compare(decoded.stated)
                if not decoded.observed:
                    return decoded.changes
                self._evolve(decoded.observed)
            except SchemaEvolvedError:
                self.table.refresh()
                self._replan_if_altered()
            else:
                return decoded.changes

    def _refuse(self, written: Written) -> None:
        name, state = self.table.name, self._state()
        if self._dead_letters is None:
            check_bad_records(name, written, fails=self._config.sink.on_bad_record == "fail")
        check_format(name, written, state.undecoded)
        if self._dead_letters is not None:
            self._dead_letters.check_limit(self.plan.section.target, written.bad_by_class, written.samples)
        check_snapshots(name, written, state.streamed_before(self.position), self.plan.section.mode)

    def _state(self) -> SinkState:
        return SinkState.read(self.table, self._prefix, (KEY, SOURCE_TABLES))

    def _in_topic(self, state: SinkState) -> SinkState:
        """The state after a position in the topic that is read."""
        topic = self.plan.section.source
        if self._config.source.type != "kafka":
            return state
        # a command that doesn't ask for ids leaves that of the same topic as it is
        number = self._source.identity(topic) or (state.topic_id if state.topic == topic else "")
        return replace(state, topic=topic, topic_id=number)

    def _state_after(self, before: SinkState, end: Position, written: Written) -> SinkState:
        """What the commit stores besides the position `end`."""
        state = replace(self._in_topic(before), undecoded=written.undecoded_since(before.undecoded))
        if self.plan.changelog.tells_snapshots:
            # a TRUNCATE removes what was streamed before it, so that a snapshot that follows it writes no row twice
            known = frozenset[int]() if written.truncates else before.streamed_before(self.position)
            state = replace(state, streamed=known | written.streamed_partitions)
        elif self._config.source.type == "kafka" and dict(end) != dict(self.position or {}):
            # a replay of dead letters reads nothing new, and has this mode in each table
            state = replace(state, streamed=None)
        if self.maintenance.budget:
            state = replace(state, written=before.written + written.bytes)
        others = dict(state.others)
        if self._source_tables is not None:
            others[SOURCE_TABLES] = self._source_tables.to_json()
        if self._key.columns:
            others[KEY] = self._key.to_json()
        return replace(state, others=others)

    def _proposed(self, end: Position, attempt: Attempt) -> Proposal:
        """What is sent to be committed.

        :raises RowdeltaError: nothing was committed.
        :raises IndexLostError: likewise.
        """
        started, begun, written = time.monotonic(), attempt.begun, attempt.written
        index = None
        if self._key_index is not None and begun.index is not None:
            with before_commit(self.table.name):
                index = self._key_index.prepare(
                    begun.operation, begun.index, written.tasks, written.index, truncated=written.truncates > 0
                )
            self._uncommitted.paths = [*self._uncommitted.paths, *index.new_paths]
        base = self._base if index is None else index.base
        before = self._state()
        changed = self._state_after(before, end, written).changes_from(before)
        request = ChangeSet(
            prefix=self._prefix,
            operation=begun.operation,
            position=end,
            files=written.files,
            base_snapshot=base,
            previous_operation=self._operation,
            written_for=self._layout,
            # a commit that removes all rows removes others' too
            written_for_empty_table=begun.empty and not written.truncates,
            truncates=written.truncates > 0,
            summary={SINK_ID: self._config.sink.id, ROWS: json.dumps(written.counts)},
            properties={f"{self._prefix}.{name}": value for name, value in changed.items()},
            metrics=attempt.metrics if index is None else index.added_to(attempt.metrics),
            index=index,
        )
        return Proposal(request, started)

    def _keep_dead_letters(self, end: Position, attempt: Attempt) -> Outcome:
        """Commit the bad records, if there are any. This happens before the table's own commit. If the run crashes in
        between, it repeats the batch, and the dead-letter table's position prevents a second copy.
        """
        begun, written = attempt.begun, attempt.written
        if not written.dead_letters:
            return Done()
        assert self._dead_letters is not None
        target = self.plan.section.target
        kept = self._dead_letters.position(target)
        if kept is not None:  # an earlier attempt may have read further, and its letters are beyond the end of this one
            end = self._source.furthest(kept, end)
        outcome = self._dead_letters.commit(
            target, begun.operation, end, written.dead_letters, written.bad_by_class, begun.opening, begun.letters
        )
        if outcome != Done():
            return outcome
        committed = set(written.dead_letter_paths)
        self._uncommitted.paths = [path for path in self._uncommitted.paths if path not in committed]
        log.warning(
            "%s: %s to %s. %s",
            self.table.name,
            amount(written.bad, "bad record"),
            self._dead_letters.name,
            "; ".join(written.samples),
        )
        self._observer(DeadLettersKept(self.table.name, written.bad_by_class))
        self._dead_letters.publish(target)
        return outcome

    def _log(self, pending: Pending, attempt: Attempt, proposal: Proposal, commit_seconds: float) -> None:
        index = proposal.request.index
        files = pending.batch.end.get("applied")
        part = "" if files is None else f", first {amount(files, 'file')}"
        log.info(
            "%s %s: %s%s | write %d ms, commit %d ms, peak %s%s",
            self.table.name,
            "replay" if pending.batch_id is None else f"batch {pending.batch_id}{part}",
            attempt.written.shown(copies=self.plan.section.copies),
            "" if index is None or index.copied is None else f" | {index.copied.shown}",
            attempt.write_seconds * 1000,
            commit_seconds * 1000,
            sized(attempt.written.peak_memory),
            f" | {json.dumps(pending.batch.end)}" if log.isEnabledFor(logging.DEBUG) else "",
        )
        if attempt.written.untold:
            log.warning(
                "%s batch %d: %d rows were set and then left for another key, and the messages don't tell which row "
                "left. If the source checks keys at the end of a statement, rows may be missing. Let it log whole rows "
                "before a change (Postgres: REPLICA IDENTITY FULL)",
                self.table.name,
                pending.batch_id,
                attempt.written.untold,
            )


def _rewrite_done(table: str, copied: Copied) -> RewriteDone:
    return RewriteDone(
        table,
        "copy-on-write",
        copied.touched,
        copied.written,
        copied.bytes_read,
        copied.scan_seconds,
        copied.rewrite_seconds,
        rows=copied.rows,
        bytes_written=copied.bytes_written,
    )
