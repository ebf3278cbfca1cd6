"""Applies micro-batches to one table: what each one continues, what is committed, and what comes after a refusal.

What runs in tasks is behind `sink.run.engine`.
"""

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from changelog.amounts import amount, sized
from changelog.decoding import ChangelogDecoder, Place, Stated, StatedKeys
from changelog.shown_values import shown
from changelog.source_tables import takes
from changelog.spec import ChangelogSpec
from deltawriters import FileContent
from deltawriters.keyindex.versions import IndexLostError
from sink import logs
from sink.config import Config
from sink.deadletters.table import DeadLetters
from sink.errors import DataError, RowdeltaError, TableError, TemporaryError
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
from sink.run.keys import KEY, TableKey, accepted_property, compared, may_spread, with_key
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
from sink.run.open_table import OpenTable
from sink.run.patterns import ResolvedTable
from sink.run.plan import (
    declared_changes,
    declared_types,
    evolved_columns,
    maybe_decimals,
    new_defaults,
    shown_changes,
    truncate_refused,
)
from sink.run.sink_state import SinkState
from sink.run.source_tables import SOURCE_TABLES, SourceTables
from sink.run.table_plan import TablePlan
from sink.run.table_upkeep import TableUpkeep
from sink.run.written import Uncommitted, Written, sum_up
from sink.sources.source import Position, Source, Stream, TableBatch
from sink.spark.job_errors import before_commit
from sink.targets.notes import ROWS, SINK_ID
from sink.targets.own_position import own_position
from sink.targets.own_state import (
    start_position,
)
from sink.targets.retries import Retries
from sink.targets.seam import Table
from sink.targets.values import (
    ChangeSet,
    CommitUnknownError,
    Copied,
    Done,
    Outcome,
    Refused,
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

    :param is_guest: see `OpenTable`.
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
        self._open = OpenTable(config, with_key(resolved, key), table, plan, engine, observer, is_guest=is_guest)
        self.upkeep = TableUpkeep(config, self._open)
        """What is done for the table between and beside its micro-batches."""
        self.written_bytes = 0
        """By its micro-batches, since it was opened."""
        self._config = config
        self._key = key
        self._key_warning: str | None = None
        self._spread_known = False
        self._source = source
        self._dead_letters = dead_letters
        self._uncommitted = Uncommitted(table.name, self._open.io_of)
        self._task_plans = TaskPlans(config, plan, dead_letters)
        self._writer = engine.writer(plan, self._task_plans, self._uncommitted)
        self._followed = plan
        if dead_letters is not None:
            dead_letters.publish(plan.section.target)
        if observer is not nobody:
            last = last_commit(table)
            live, at = (None, None) if last is None else (last.live, last.timestamp_ms)
            observer(TableOpened(table.name, self._open.base, self.position, live, at))

    @property
    def table(self) -> Table:
        return self._open.table

    @property
    def plan(self) -> TablePlan:
        """What its tasks write."""
        return self._open.plan

    @property
    def position(self) -> Position | None:
        """See `OpenTable.position`."""
        return self._open.position

    @property
    def has_key_index(self) -> bool:
        """Whether a key index knows where the table's rows are."""
        return self._open.key_index is not None

    def _follow_plan(self) -> None:
        """Have tasks write what the plan says now: the table may have been altered, or messages have shown more."""
        if self._followed is not self.plan:
            self._followed = self.plan
            self._task_plans = TaskPlans(self._config, self.plan, self._dead_letters)
            self._writer.follow(self.plan, self._task_plans)

    def _decode_by(self, changelog: ChangelogSpec) -> None:
        """Read messages in another way from now on."""
        if changelog != self.plan.changelog:
            self._open.plan = replace(self.plan, changelog=changelog)

    def check_source(self) -> None:
        """A position is true of one topic or directory only. Call this after `Source.locate`.

        :raises TableError: the table's position is one in another topic or directory than it is read from now.
        """
        if self.position is None:
            return
        state, section = self._state(), self.plan.section
        name, same = f"{self._open.prefix}.{SAME_OFFSETS}", self.table.property(f"{self._open.prefix}.{SAME_OFFSETS}")
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
        if self._open.stored is not None:
            return
        mode = self.plan.section.mode
        if mode != "upsert" and not self.table.is_empty():
            raise DataError(
                f"{self.table.name} holds rows, but sink {self._config.sink.id!r} has no position in it. Reading the "
                f"source from its start would duplicate rows in mode {mode}. Use mode: upsert, or an empty table."
            )
        if position is not None and start_position(self.table, self._open.prefix) is None:
            state = self._state()
            for name, value in self._in_topic(state).changes_from(state).items():
                self.table.set_property(f"{self._open.prefix}.{name}", value)
            self.table.set_property(f"{self._open.prefix}.start", json.dumps(dict(position)))
            self.table.refresh()

    def batch(self, stream: Stream, batch_id: int, frame: "DataFrame") -> TableBatch | None:
        """The table's part of a micro-batch, if it has one."""
        batch = self._source.batch(stream, batch_id, frame, self.plan.section, self.position)
        if batch is not None:
            self._open.observer(BatchStarted(self.table.name, batch_id))
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
        self._open.catch_up()
        try:
            return Pending(batch_id, batch, self._attempt(batch))
        except SchemaEvolvedError:
            self._open.observer(CommitRefused(self.table.name, "schema"))
            self._open.rebase()
        except IndexLostError as error:
            self._open.forget_index(error)
        return Pending(batch_id, batch, None)

    def share(self, batch: TableBatch) -> TableShare | None:
        """The table's share in a joint job. None if the table needs a job of its own (`apply_batch`).

        The caller must pass the job's result to `apply_share`, or call `discard`.
        """
        if batch.share is None or not is_small(batch.estimated_rows) or not self.plan.is_decoded_whole:
            return None
        self._open.catch_up()
        try:
            begun = self._begin(batch)
        except IndexLostError as error:
            self._open.forget_index(error)
            return None
        if begun.index is not None and begun.index.merged_entries > SMALL_MERGE:
            return None
        if self._has_kept_letters():  # asked after `begun` knows their last commit
            return None
        self._uncommitted.paths = []
        decoder = ChangelogDecoder(self._config.source.format, self.plan.changelog)
        self._follow_plan()
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
            self._open.observer(CommitRefused(self.table.name, "schema"))
            self._open.rebase()
        return Pending(batch_id, batch, None)

    def commit(self, pending: Pending) -> Written:
        """Commit what `prepare_batch` wrote. Returns what was committed.

        This is the only loop around a refused commit. What goes on depends on what others have done meanwhile: the same
        files are sent again, or with other deletes of earlier rows, or the micro-batch is written again.

        :raises RowdeltaError: see `apply_batch`.
        """
        logs.note_snapshot(self._open.base)
        attempt: Attempt | None = pending.attempt
        proposal: Proposal | None = None
        retries, schemas = self.table.retries(), 0
        while True:
            try:
                attempt = attempt or self._attempt(pending.batch)
                with self._deleting_after_errors():
                    outcome: Outcome = Done()
                    if proposal is None:
                        with stage(self._open.observer, self.table.name, "prepare"):
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
                self._open.observer(CommitRefused(self.table.name, "schema"))
                schemas += 1
                if schemas > _MOST_SCHEMAS:
                    raise TableError(
                        f"{self.table.name}: after {_MOST_SCHEMAS} changes of its schema the micro-batch still needs "
                        "another. Does somebody else alter the table at the same time? Nothing was applied."
                    ) from None
                self._open.rebase()
                attempt = proposal = None
            except IndexLostError as error:
                self._open.forget_index(error)
                attempt = proposal = None
                retries.wait(Refused(str(error)))
                self._open.rebase()

    def _send(self, proposal: Proposal) -> Outcome:
        """Send a proposal to be committed.

        :raises RowdeltaError: see `Table.commit`, and for `IndexLostError`.
        """
        self._open.observer(CommitTried(self.table.name))
        with stage(self._open.observer, self.table.name, "commit"):
            outcome = self.table.commit(proposal.request)
        if isinstance(outcome, Refused):
            reason: Refusal = "conflict" if outcome.again == "send" else "changed"
            self._open.observer(CommitRefused(self.table.name, reason))
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
        self._open.rebase()
        return None, None

    def _same_files(self, proposal: Proposal, refused: Refused, retries: Retries) -> Proposal | None:
        """The same files, to be sent again. None if the table isn't any more as it was when they were written."""
        if refused.again != "send":
            return None
        request = proposal.request
        self.table.refresh()
        own_position(self.table, self._open.prefix, request.previous_operation)
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
        if self._open.key_index is None or slice_ is None or request.index is None:
            return None
        retries.wait(refused)
        self.table.refresh()
        own_position(self.table, self._open.prefix, request.previous_operation)
        if self._open.is_altered() or self._lacks_deletes(request):
            return None
        self._open.check_new_properties()
        written = attempt.written
        with before_commit(self.table.name):
            index = self._open.key_index.amend(request.operation, slice_, written.tasks, written.index)
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
        self.upkeep.count(len(attempt.written.files) + deletes)
        self.written_bytes += attempt.written.bytes
        self._open.see_committed(attempt.begun.operation)
        if self._open.observer is not nobody:
            index = proposal.request.index
            if index is not None and index.copied is not None:
                self._open.observer(_rewrite_done(self.table.name, index.copied))
            self._open.observer(self._committed(pending, attempt, proposal))

    def _committed(self, pending: Pending, attempt: Attempt, proposal: Proposal) -> Committed:
        written = attempt.written
        files = {content: Files(*amount) for content, amount in written.contents.items()}
        key_index, index = self._open.key_index, proposal.request.index
        if index is not None and index.files:  # which came after the tasks' files
            content = (FileContent.DATA if index.replaced else FileContent.POSITION_DELETES).value
            of_tasks = files.get(content, Files(0, 0))
            files[content] = Files(of_tasks.count + len(index.files), of_tasks.bytes + index.bytes)
        return Committed(
            self.table.name,
            pending.batch_id,
            self._open.base,
            pending.batch.end,
            written.counts,
            files,
            live_files(self.table),
            Index(*key_index.size) if key_index is not None and key_index.size else None,
            written.probe_seconds,
            written.peak_memory,
            time.monotonic() - attempt.begun.started,
        )

    def discard(self) -> None:
        """Delete files that were written and not committed."""
        self._uncommitted.delete()

    def _see_partitions(self, position: Position | None) -> None:
        """Follow the number of the topic's partitions, which decides whether a TRUNCATE has a place in an order."""
        refused = truncate_refused(self.plan.section, position)
        self._decode_by(replace(self.plan.changelog, truncate_refused=refused))

    def _attempt(self, batch: TableBatch) -> Attempt:
        begun = self._begin(batch)
        self._follow_plan()
        return self._finish(begun, self._writer.write(batch, begun, may_repeat=self._has_kept_letters()))

    def _begin(self, batch: TableBatch) -> Begun:
        operation = uuid4().hex[:16]
        started = time.monotonic()
        self._see_partitions(batch.end)
        if batch.declared is not None:
            self._evolve(declared_changes(self.plan, batch.declared))
        # a sink that only appends doesn't conflict with other writers' appends
        empty = not self._open.appends and self.table.is_empty()
        before = time.monotonic()
        if self._open.key_index is not None:
            with stage(self._open.observer, self.table.name, "index"):
                self._open.key_index.synchronize(self._open.stored)
        index_seconds = time.monotonic() - before
        self._open.observer(StageStarted(self.table.name, "write"))
        key_index = self._open.key_index
        return Begun(
            operation,
            self._open.spec,
            empty,
            self._open.global_deletes,
            index=key_index.slice() if key_index is not None else None,
            sequence=key_index.next_sequence if key_index is not None else 0,
            hash=key_index.key_hash(self._open.spec) if key_index is not None else None,
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
        self._open.observer(StageDone(self.table.name, "write", seconds - begun.index_seconds))
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
        self._open.source_tables = SourceTables(taken, is_mixed)
        self._decode_by(self._open.source_tables.of(self.plan.changelog))

    def _compare_keys(self, stated: StatedKeys) -> None:
        """Compare the messages' key with the table's. This is the first check, since with a wrong key all files are
        wrong.

        :raises TableError: the messages' key has changed.
        """
        section = self.plan.section
        if self._open.appends or not stated:
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
            if not self._open.is_altered():  # else others altered it; compare with their schema first
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
            self._follow_plan()
            decoded = self._writer.decoded(records, keep)
            try:
                self._compare(decoded.stated)
                if not decoded.observed:
                    return decoded.changes
                self._evolve(decoded.observed)
            except SchemaEvolvedError:
                self.table.refresh()
                self._open.replan_if_altered()
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
        return SinkState.read(self.table, self._open.prefix, (KEY, SOURCE_TABLES))

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
        if self._open.maintenance.budget:
            state = replace(state, written=before.written + written.bytes)
        others = dict(state.others)
        if self._open.source_tables is not None:
            others[SOURCE_TABLES] = self._open.source_tables.to_json()
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
        if self._open.key_index is not None and begun.index is not None:
            with before_commit(self.table.name):
                index = self._open.key_index.prepare(
                    begun.operation, begun.index, written.tasks, written.index, truncated=written.truncates > 0
                )
            self._uncommitted.paths = [*self._uncommitted.paths, *index.new_paths]
        base = self._open.base if index is None else index.base
        before = self._state()
        changed = self._state_after(before, end, written).changes_from(before)
        request = ChangeSet(
            prefix=self._open.prefix,
            operation=begun.operation,
            position=end,
            files=written.files,
            base_snapshot=base,
            previous_operation=self._open.operation,
            written_for=self._open.layout,
            # a commit that removes all rows removes others' too
            written_for_empty_table=begun.empty and not written.truncates,
            truncates=written.truncates > 0,
            summary={SINK_ID: self._config.sink.id, ROWS: json.dumps(written.counts)},
            properties={f"{self._open.prefix}.{name}": value for name, value in changed.items()},
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
        self._open.observer(DeadLettersKept(self.table.name, written.bad_by_class))
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
