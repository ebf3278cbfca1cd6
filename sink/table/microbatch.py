"""Applies micro-batches to one table: what each one continues, what is committed, and what comes after a refusal.

What runs in tasks is behind `sink.table.engine`.
"""

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING
from uuid import uuid4

from changelog.decoding import ChangelogDecoder, Stated
from changelog.spec import ChangelogSpec
from changelog.topics import partition_named
from deltawriters.keyindex.versions import IndexLostError
from deltawriters.scratch import Scratch
from sink import logs
from sink.config import Config
from sink.deadletters.table import DeadLetters
from sink.errors import DataError, RowdeltaError, TableError
from sink.plans import Share
from sink.sources.source import DatabaseRows, Position, Source, Stream, TableBatch, Work
from sink.sources.topics import check_form, continued, places_of
from sink.table.engine import Engine
from sink.table.evolution import evolve_schema
from sink.table.guards import (
    SAME_OFFSETS,
    check_bad_records,
    check_directory,
    check_format,
    check_snapshots,
    check_topic,
)
from sink.table.keys import TableKey, with_key
from sink.table.load_state import LOAD, Load, Loaded, load_of
from sink.table.observer import (
    BatchStarted,
    CommitRefused,
    CommitTried,
    Observer,
    Refusal,
    StageDone,
    StageStarted,
    TableOpened,
    last_commit,
    nobody,
    stage,
)
from sink.table.open_table import OpenTable
from sink.table.patterns import ResolvedTable
from sink.table.plan import (
    declared_changes,
    truncate_refused,
)
from sink.table.proposals import Proposals
from sink.table.resnapshot import RESNAPSHOT, Resnapshot
from sink.table.stated import StatedByMessages
from sink.table.table_dead_letters import TableDeadLetters
from sink.table.table_plan import TablePlan
from sink.table.table_upkeep import TableUpkeep
from sink.table.task_plans import TaskPlans, is_small
from sink.table.telling import committed, copied, log_committed
from sink.table.written import Begun, Written
from sink.targets.own_state import HEALING, start_position
from sink.targets.retries import Retries
from sink.targets.seam import Table
from sink.targets.values import (
    ChangeSet,
    CommitUnknownError,
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
        self._source = source
        self.stated = StatedByMessages(config, table.name, key, source)
        self._letters = TableDeadLetters(
            dead_letters, plan.section.target, table.name, source, observer, self._named_as_now
        )
        self._dead_letters = dead_letters
        self._scratch = Scratch(table.name, self._open.io_of)
        """What tasks have written for the next commit."""
        self._proposals = Proposals(config, self._open, source, self.stated)
        self._task_plans = TaskPlans(config, plan, dead_letters)
        self._writer = engine.writer(plan, self._task_plans, self._scratch)
        self._followed = plan
        self._letters.publish()
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
    def has_committed(self) -> bool:
        return self._open.stored is not None

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
        state, section = self._open.state, self.plan.section
        name, same = f"{self._open.prefix}.{SAME_OFFSETS}", self.table.property(f"{self._open.prefix}.{SAME_OFFSETS}")
        if self._config.source.type == "files":
            found = self._source.identities(section).get(section.source)
            check_directory(
                self.table.name, name, same, position=self.position, directory=section.source, identity=found
            )
            return
        check_form(section, self.position)
        ids = self._source.identities(section)
        for topic, offsets in places_of(section, self.position).items():
            if not any(offsets.values()) and self.load is None:  # it has passed no message of the topic
                continue
            before = topic if section.many_topics or state.topic_id.startswith("{") else state.topic
            stored = before, state.ids.get(before, "")
            check_topic(self.table.name, name, same, stored=stored, read=(topic, ids.get(topic)))

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
            state = self._open.state
            for name, value in self._proposals.in_topics(state).changes_from(state).items():
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
        return self.commit(batch_id, batch, self.prepare_batch(batch))

    def long_deleted(self) -> "tuple[DataFrame, int] | None":
        """Changes that remove the rows which were marked as deleted longer ago than they are kept, and their number.
        Micro-batches may go on meanwhile. None if there are none.
        """
        section, position = self.plan.section.soft_delete, self.position
        seconds = None if section is None else section.purge_seconds
        if seconds is None or position is None:
            return None
        before = datetime.now(UTC) - timedelta(seconds=seconds)
        changes, count = self._open.engine.removals(self.upkeep.newest_table(), self.plan, before)
        return (changes, count) if count else None

    @property
    def _snapshot(self) -> Resnapshot | None:
        return self._open.state.resnapshot if self.plan.changelog.finds_snapshots else None

    @property
    def ended_snapshot(self) -> Resnapshot | None:
        """A new snapshot of the source's table that is whole in the table, and whose missing rows aren't removed."""
        found = self._snapshot
        return found if found is not None and found.has_ended(self.position) else None

    def forget_snapshot(self) -> None:
        """Its missing rows are removed, or can't be. No micro-batch may be applied meanwhile."""
        self.table.set_property(f"{self._open.prefix}.{RESNAPSHOT}", "")  # a rollback takes back what is there
        self.table.refresh()

    @property
    def needed_from(self) -> Position | None:
        """From where on the source is read again if it must be. None if it isn't known."""
        position, snapshot = self.position, self._snapshot
        return position if position is None or snapshot is None else snapshot.needs(position)

    def apply_beside(self, work: Work, changes: "DataFrame", count: int) -> Written:
        """Apply changes that are of no stream: the position stays where it is.

        :param changes: changelog rows.
        :raises RowdeltaError: see `apply_batch`. With `FencedError`, a run has committed meanwhile.
        """
        position = self.position
        assert position is not None
        return self.apply_batch(None, TableBatch(None, position, count, changes, work=work))

    @property
    def load(self) -> tuple[Load, Loaded] | None:
        """The load that the table has had, and how far it has got."""
        return load_of(self.table, self._open.prefix)

    def follow_schema(self, observed: Mapping[str, str]) -> None:
        """Change the table's schema for all that the source's table has.

        :raises RowdeltaError: see `_evolve`.
        """
        try:
            self._evolve(observed)
        except SchemaEvolvedError:
            self._open.rebase()

    def take_in(self, load: Load, rows: DatabaseRows, estimated: int, parts: int) -> Written:
        """Take in rows that a load has read. The position is where the load began.

        :param estimated: about how many they are.
        :param parts: how many parts of the load are in the table then.
        :raises RowdeltaError: see `apply_batch`.
        """
        known = load.to_json(), parts
        batch = TableBatch(None, load.begin, estimated, rows=rows, work="load", load=known)
        return self.apply_batch(None, batch)

    def end_load(self, load: Load) -> None:
        """Store that all parts are there.

        :raises FencedError: another run has committed meanwhile.
        """
        self._open.catch_up()
        self.table.set_property(f"{self._open.prefix}.{LOAD}", load.to_json())
        self.table.refresh()

    @contextmanager
    def going_first(self) -> Iterator[None]:
        """Runs of the sink wait with their next micro-batch, for some time, while the table is corrected."""
        name = f"{self._open.prefix}.{HEALING}"
        self.table.set_property(name, uuid4().hex)
        try:
            yield
        finally:
            self.table.refresh()
            self.table.set_property(name, None)

    def prepare_batch(self, batch: TableBatch) -> Written | None:
        """Write changes that continue the table's position, without a commit. None if they must be written again.

        The caller must then call `commit` or `discard`.
        """
        self._open.catch_up()
        return self._prepared_by(lambda: self._write(batch))

    def _prepared_by(self, write: Callable[[], Written]) -> Written | None:
        try:
            return write()
        except SchemaEvolvedError:
            self._open.observer(CommitRefused(self.table.name, "schema"))
            self._open.rebase()
        except IndexLostError as error:
            self._open.forget_index(error)
        return None

    @property
    def may_have_companions(self) -> bool:
        """Whether a job may write the table with others that take the same records (`write_with`): Python decodes its
        changes, and deals them out by key.
        """
        return self.plan.is_decoded_whole and self.plan.section.mode != "append"

    def begin(self, batch: TableBatch) -> Begun | None:
        """Begin to write in a job with other tables. None if the table needs a job of its own (`apply_batch`).

        The caller must pass the job's result to `apply_written`, or call `discard`.
        """
        if batch.share is None or not self.plan.is_decoded_whole:
            return None
        self._open.catch_up()
        try:
            begun = self._begin(batch)
        except IndexLostError as error:
            self._open.forget_index(error)
            return None
        if self._letters.is_ahead(self.position):  # asked after `begun` knows their last commit
            return None
        self._scratch.keep()
        self._follow_plan()
        return begun

    def write_with(self, others: "Sequence[TableSink]", batch: TableBatch, begun: Sequence[Begun]) -> list[Written]:
        """Write the same records for several tables at once.

        :param begun: of this table, and of the `others` (`begin`).
        :return: likewise.
        """
        return self._writer.write_with([other._writer for other in others], batch, begun)

    def share(self, batch: TableBatch) -> tuple[Begun, Share] | None:
        """The table's share in a joint job for small tables. None if the table needs another one.

        See `begin` for what the caller must do.
        """
        begun = self.begin(batch) if is_small(batch.estimated_rows) else None
        if begun is None:
            return None
        assert batch.share is not None
        decoder = ChangelogDecoder(self._config.source.format, self.plan.changelog)
        begin = {part.topic: part.begin for part in batch.share.ranges}
        return begun, Share(decoder, self._task_plans.plan(begun, 1), self._task_plans.hash(begun, 1), begin)

    def take_over(self, paths: Sequence[str]) -> None:
        """Take responsibility for the files that a joint job wrote for this table."""
        self._scratch.paths = list(paths)

    def apply_written(self, batch_id: int, batch: TableBatch, written: Written) -> Written:
        """Like `apply_batch`, for files that a job with other tables wrote. The table knows them (`take_over`)."""
        return self.commit(batch_id, batch, self._prepared_by(lambda: self._finish(written)))

    def commit(self, batch_id: int | None, batch: TableBatch, written: Written | None) -> Written:
        """Commit what `prepare_batch` wrote. Returns what was committed.

        This is the only loop around a refused commit. What goes on depends on what others have done meanwhile: the same
        files are sent again, or with other deletes of earlier rows, or the micro-batch is written again.

        :raises RowdeltaError: see `apply_batch`.
        """
        logs.note_snapshot(self._open.base)
        request: ChangeSet | None = None
        retries, schemas, started = self.table.retries(), 0, 0.0
        of_letters = self._letters.retries() or retries
        while True:
            try:
                written = written or self._write(batch)
                with self._deleting_after_errors():
                    outcome: Outcome = Done()
                    if request is None:
                        started = time.monotonic()
                        with stage(self._open.observer, self.table.name, "prepare"):
                            outcome = self._letters.commit(batch.end, written, self._scratch)
                            request = self._proposals.make(batch, written) if outcome == Done() else None
                    if request is not None:
                        outcome = self._send(request)
                    refused = refusal(outcome)
                    if refused is not None:
                        written, request = self._after(refused, written, request, retries, of_letters)
                if written is not None and request is not None and refused is None:
                    self._see_committed(batch_id, batch, written, request, time.monotonic() - started)
                    return written
            except SchemaEvolvedError:
                self._open.observer(CommitRefused(self.table.name, "schema"))
                schemas += 1
                if schemas > _MOST_SCHEMAS:
                    raise TableError(
                        f"{self.table.name}: after {_MOST_SCHEMAS} changes of its schema the micro-batch still needs "
                        "another. Does somebody else alter the table at the same time? Nothing was applied."
                    ) from None
                self._open.rebase()
                written = request = None
            except IndexLostError as error:
                self._open.forget_index(error)
                written = request = None
                retries.wait(Refused(str(error)))
                self._open.rebase()

    def _send(self, request: ChangeSet) -> Outcome:
        """Try to commit.

        :raises RowdeltaError: see `Table.commit`, and for `IndexLostError`.
        """
        self._open.observer(CommitTried(self.table.name))
        with stage(self._open.observer, self.table.name, "commit"):
            outcome = self.table.commit(request)
        if isinstance(outcome, Refused):
            reason: Refusal = "conflict" if outcome.again == "send" else "changed"
            self._open.observer(CommitRefused(self.table.name, reason))
        return outcome

    def _after(
        self, refused: Refused, written: Written, request: ChangeSet | None, retries: Retries, of_letters: Retries
    ) -> tuple[Written | None, ChangeSet | None]:
        """What is left of an attempt after a refusal, to be sent again. Nothing, if it must be written again.

        :param request: None if the bad records were refused.
        :raises IndexLostError: the micro-batch must be written again.
        :raises RowdeltaError: another run has committed, the table was rolled back, or there are no more retries.
        """
        if request is None and refused.again == "send":
            of_letters.wait(refused)
            return written, None
        if request is not None:
            again = self._proposals.again(request, written, refused, retries)
            if again is not None:
                return written, again
        log.info("%s: others changed it meanwhile; writing again", self.table.name)
        self.discard()
        retries.wait(refused)
        self._open.rebase()
        return None, None

    @contextmanager
    def _deleting_after_errors(self) -> Iterator[None]:
        """Delete an attempt's files if it ends with an error after which nothing of it is committed."""
        try:
            yield
        except CommitUnknownError:
            self._keep()  # the files may belong to the table now
            raise
        except (RowdeltaError, IndexLostError):
            self.discard()
            raise
        except BaseException:
            self._keep()  # likewise: such an error says nothing of the commit
            raise

    def _keep(self) -> None:
        self._scratch.keep()
        self._proposals.prepared.keep()

    def _see_committed(
        self, batch_id: int | None, batch: TableBatch, written: Written, request: ChangeSet, commit_seconds: float
    ) -> None:
        """Go on from what was committed."""
        self._keep()  # the files belong to the table now
        logs.note_snapshot(self.table.snapshot_id())
        work: str = batch.work if batch_id is None else f"batch {batch_id}"
        log_committed(self.table.name, work, written, request, commit_seconds, copies=self.plan.section.copies)
        deletes = 0 if request.index is None else request.index.delete_files
        self.upkeep.count(len(written.files) + deletes)
        self.written_bytes += written.bytes
        self._open.see_committed(request.operation)
        if self._open.observer is not nobody:
            if request.index is not None and request.index.copied is not None:
                self._open.observer(copied(self.table.name, request.index.copied))
            index_size = None if self._open.key_index is None else self._open.key_index.size
            self._open.observer(committed(self.table, batch_id, written, request, index_size))

    def discard(self) -> None:
        """Delete files that were written and not committed."""
        self._scratch.delete()
        self._proposals.prepared.delete()

    def _see_partitions(self, position: Position | None) -> None:
        """Follow the number of the topic's partitions, which decides whether a TRUNCATE has a place in an order."""
        refused = truncate_refused(self.plan.section, position)
        self._decode_by(replace(self.plan.changelog, truncate_refused=refused))

    def _write(self, batch: TableBatch) -> Written:
        begun = self._begin(batch)
        self._follow_plan()
        may_repeat = self._letters.is_ahead(self.position, or_there=batch.load is not None)
        return self._finish(self._writer.write(batch, begun, may_repeat=may_repeat))

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
            opening=self._letters.opening,
            letters=self._letters.operation,
            index_seconds=index_seconds,
            work=batch.work,
            absent_before=self._caught_up_at,
        )

    @property
    def _caught_up_at(self) -> Mapping[int, int]:
        """See `DeltaOptions.absent_before`."""
        found = self.load
        until = None if found is None else found[0].until
        # partitions of several topics have other names
        return {int(name): offset for name, offset in (until or {}).items() if name.isdigit()}

    def _finish(self, written: Written) -> Written:
        try:
            self._compare(written.stated)
            if written.observed:
                self._evolve(written.observed)
            self._refuse(written)
        except (RowdeltaError, SchemaEvolvedError):
            self.discard()
            raise
        self._open.observer(StageDone(self.table.name, "write", written.seconds - written.begun.index_seconds))
        return written

    def _compare(self, stated: Stated) -> None:
        """Compare what messages state of their table with what is known of it.

        :raises TableError: the messages' key has changed.
        :raises SchemaEvolvedError: the micro-batch must be decoded again, for one table of several.
        """
        was_mixed = self.plan.changelog.is_mixed
        self._decode_by(self.stated.decoding(stated, self.plan))
        self._open.source_tables = self.stated.source_tables
        if self.plan.changelog.is_mixed != was_mixed:
            raise SchemaEvolvedError
        self.stated.compare_keys(stated, self.plan)

    def _evolve(self, observed: Mapping[str, str]) -> None:
        """Change the table's schema, once, for all that the micro-batch's messages have. Then the micro-batch is
        written again under the new schema.

        :raises SchemaEvolvedError: the schema has changed.
        :raises DataError: see `evolved_columns`.
        :raises TableError: see `evolved_columns`.
        """
        if evolve_schema(self._config, self.plan, self.table, observed, self._open.layout):
            raise SchemaEvolvedError

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
        name, state = self.table.name, self._open.state
        if not self._letters.are_kept:
            check_bad_records(name, written, fails=self._config.sink.on_bad_record == "fail")
        check_format(name, written, state.undecoded)
        self._letters.check_limit(written)
        section, streamed = self.plan.section, state.streamed_before(self.position)
        check_snapshots(name, written, streamed, section.mode, lambda number: partition_named(section.topics, number))

    def _named_as_now(self, position: Position) -> Position:
        """A position of an earlier run, which may have had only one of the topics."""
        section = self.plan.section
        named = continued(section, position, self._open.state.topic)
        if not section.many_topics:
            return named
        return {part: offset for part, offset in named.items() if part.rpartition("-")[0] in section.topics}
