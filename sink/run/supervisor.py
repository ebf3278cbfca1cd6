"""Looks after the tables of a running job: opens them in parallel, applies micro-batches to them in parallel, and sets
a table aside when it fails.

A table that failed keeps its position, so it loses nothing. The supervisor opens it again after a while, and the table
goes on from its position.
"""

import contextvars
import functools
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from threading import BoundedSemaphore, Lock, Thread
from typing import TYPE_CHECKING, Any

from changelog.spec import ChangelogSpec
from sink import logs
from sink.config import Config, TableSection
from sink.deadletters.table import DeadLetters, open_dead_letters
from sink.errors import (
    ConfigError,
    MoreTopicsError,
    NoMessagesError,
    NotChangesError,
    RowdeltaError,
    TableError,
    TemporaryError,
    summary,
)
from sink.plans import Share
from sink.redaction import masked
from sink.run.loading import Loads
from sink.sources.source import Position, Source, Stream, TableBatch
from sink.spark.engine import SparkEngine
from sink.spark.interrupts import jvms
from sink.spark.java_errors import SPARK_ERRORS
from sink.spark.joint import JointWriter, read_once
from sink.spark.progress import Line
from sink.spark.session import activate
from sink.table import loading
from sink.table.inference import stated_keys
from sink.table.microbatch import TableSink
from sink.table.observer import Lags, Observer, TableFailed, TableFound, TableWaits, nobody
from sink.table.patterns import ResolvedTable
from sink.table.plan import open_table
from sink.table.written import Begun, Written, sum_up
from sink.targets.retries import doubled

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from sink.sources.engine import Engine

log = logging.getLogger("rowdelta")

FIRST_PAUSE = 10.0
LONGEST_PAUSE = 600.0
"""Seconds until a failed table is tried again. The pause doubles with each failure, up to the longest."""
_LOOK_SECONDS = 0.5
_MOST_THREADS = 16
_MOST_LOADS = 8
"""That have begun. Only one of them reads, the others wait: for the connector, or for transactions to end."""
_LONGEST_FINISH = 10.0
"""Seconds. A checkpoint of a Delta table's log takes up to 5."""


@dataclass
class Tally:
    """What a run has applied so far.

    :param batches: micro-batches with a commit.
    :param changes: an update counts once.
    :param bad: records that became dead letters.
    """

    batches: int = 0
    changes: int = 0
    bad: int = 0
    _lock: Lock = field(default_factory=Lock)

    def add(self, *, batches: int = 0, changes: int = 0, bad: int = 0) -> None:
        with self._lock:
            self.batches += batches
            self.changes += changes
            self.bad += bad


class Turn:
    """A lock that who waits for it gets before who has just released it."""

    def __init__(self) -> None:
        self._lock, self._next = Lock(), Lock()

    def __enter__(self) -> None:
        with self._next:
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits for it."""
        return self._next.locked()

    def pass_on(self) -> None:
        """Let others have it who wait, and take it again."""
        self._lock.release()
        self.__enter__()


@dataclass
class Member:
    """A table of the job. It is open (`sink`), or it has failed (`error`), or both: it is open, but set aside. Or it
    `awaits_messages`. `opened` takes the place of `sink` once no micro-batch uses `sink`.
    """

    resolved: ResolvedTable
    sink: TableSink | None = None
    opened: TableSink | None = None
    error: Exception | None = None
    failures: int = 0
    retry_at: float = 0.0
    is_left_out: bool = False
    """Whether a pattern matched its source, whose messages are a program's own. It is not looked at again."""
    awaits_messages: bool = False
    """Whether it can't be opened before its source has messages. This isn't a failure."""
    turn: Turn = field(default_factory=Turn)
    """Who holds it may change the table: a micro-batch, with what is begun and committed of merges after it, or
    maintenance."""
    commits: int = 0
    """Of micro-batches, in this run."""
    load: Future[None] | None = None
    """Reads the table's rows from the database. Its stream begins after it."""
    from_start: bool = False
    """Whether the source appeared while the job ran (or was down). Nobody has read its first messages, so the table
    reads it from its beginning. This stays true, also after failures, until the table has stored its start position."""

    @property
    def source(self) -> str:
        return self.resolved.section.source

    @property
    def id(self) -> str:
        return self.resolved.section.id

    @property
    def target(self) -> str:
        return self.resolved.section.target

    @property
    def works(self) -> bool:
        return self.sink is not None and self.error is None

    def leave(self) -> None:
        """It isn't open any more, and hasn't failed."""
        if self.sink is not None:
            self.sink.upkeep.abandon_merge()
        self.sink = self.error = None

    def fail(self, error: Exception) -> None:
        self.error, self.retry_at = error, time.monotonic()
        if not is_harmless(error):
            self.retry_at += doubled(FIRST_PAUSE, self.failures, LONGEST_PAUSE)
            self.failures += 1


class Supervisor:
    """All tables of a job, by `TableSection.id`."""

    def __init__(
        self,
        spark: "SparkSession",
        config: Config,
        source: Source,
        changelogs: dict[str, ChangelogSpec],
        observer: Observer = nobody,
        engine: "Engine | None" = None,
    ) -> None:
        self.members: dict[str, Member] = {}
        self._spark = spark
        self._config = config
        self._source = source
        self._changelogs = changelogs
        self._observer = observer
        self.dead_letters: DeadLetters | None = None
        self.tally = Tally()
        threads = config.sink.parallel_tables or min(_MOST_THREADS, 2 * (os.cpu_count() or 1))
        self.closed = False
        self.stopping = False
        """No more tables are to be opened. A micro-batch in progress is still finished."""
        self.turns = BoundedSemaphore(threads)
        """Only this many queries may apply a micro-batch at the same time."""
        self._joint = JointWriter(spark)
        self._loads: Loads | None = None
        if config.load.auto and config.source.database is not None:
            database = config.source.database
            self._loads = Loads(spark, config, source, database, lambda: self.stopping or self.closed, engine)
        self._pool = ThreadPoolExecutor(threads, "rowdelta-table", initializer=activate, initargs=(spark,))
        # tables whose catalog doesn't answer hold no thread that a micro-batch needs
        self._loaders = ThreadPoolExecutor(_MOST_LOADS, "rowdelta-load", initializer=activate, initargs=(spark,))
        self._openers = ThreadPoolExecutor(threads, "rowdelta-opening", initializer=activate, initargs=(spark,))

    def close(self) -> None:
        """Begin no more work. Work that has begun ends when its query ends, because it runs the query's jobs."""
        self.closed = True
        self._pool.shutdown(wait=False)
        self._openers.shutdown(wait=False, cancel_futures=True)
        self._loaders.shutdown(wait=False, cancel_futures=True)

    def finish_tending(self) -> None:
        """Wait some seconds for what tables do beside their micro-batches, such as checkpoints of their logs."""
        end = time.monotonic() + _LONGEST_FINISH
        for member in self.members.values():
            if member.sink is not None:
                member.sink.upkeep.abandon_merge()
                member.sink.table.upkeep().finish_tending(max(0.0, end - time.monotonic()))

    def finish_loads(self) -> None:
        """Wait until the parts of tables in progress are loaded. Call this after `close`."""
        self._loaders.shutdown()  # to wait for the futures would never end: nobody tells of those that were cancelled

    def is_loading(self) -> bool:
        return any(member.load is not None and not member.load.done() for member in self.members.values())

    def loaded(self) -> list[Member]:
        """Tables that should be opened now, since their loads have ended."""
        return [member for member in self.members.values() if member.load is not None and member.load.done()]

    def working(self) -> list[Member]:
        return [member for member in self.members.values() if member.works]

    def taken(self) -> list[Member]:
        """All tables but those that are left out."""
        return [member for member in self.members.values() if not member.is_left_out]

    def failed(self) -> list[Member]:
        return [member for member in self.members.values() if member.error is not None]

    def due(self) -> list[Member]:
        """Tables that should be opened (again) now: those whose pause after a failure is over, those whose first
        messages have arrived, and those that are loaded.
        """
        now = time.monotonic()
        late = [member for member in self.members.values() if member.retry_at <= now]
        awaiting = [member for member in late if member.awaits_messages]
        if awaiting:
            try:
                come = set(self._source.with_messages([member.resolved.section for member in awaiting]))
            except TemporaryError as error:
                log.warning("can't look for first messages: %s", error)
                come = set()
            for member in awaiting:
                member.retry_at = now + self._config.source.discovery_seconds
            awaiting = [member for member in awaiting if member.id in come]
        return [member for member in late if member.error is not None] + awaiting + self.loaded()

    def lags(self) -> Lags:
        """How far the open tables are behind their sources now. Another thread may ask while micro-batches are applied.

        :raises TemporaryError: the source did not answer.
        """
        open_tables = [(member.resolved.section, sink) for member in self.members.values() if (sink := member.sink)]
        behind = self._source.behind([(section, sink.position) for section, sink in open_tables])
        return Lags(
            {section.target: behind[section.id] for section, _ in open_tables if section.id in behind},
            "messages" if self._config.source.has_topics else "files",
        )

    def positions(self) -> list[tuple[TableSection, Position | None]]:
        """Of all tables. None of those that aren't open."""
        return [(m.resolved.section, m.sink.position if m.sink else None) for m in self.members.values()]

    def needed_from(self) -> list[tuple[TableSection, Position | None]]:
        """Of all tables, from where on their source is read again if it must be. None of those that aren't open."""
        return [(m.resolved.section, m.sink.needed_from if m.sink else None) for m in self.members.values()]

    def broken(self) -> list[Member]:
        """Tables that failed with an error that isn't harmless."""
        return [member for member in self.failed() if not is_harmless(member.error)]

    def enter(self, tables: Iterable[ResolvedTable], from_start: bool = False) -> list[Member]:
        """Add the tables that aren't known yet. The caller then opens them. Known tables whose patterns have found more
        topics are set aside, to be opened again (`due`).
        """
        tables = list(tables)
        new = [Member(table, from_start=from_start) for table in tables if table.section.id not in self.members]
        grown = [(member, table) for table in tables if (member := self._grown(table)) is not None]
        # a new dictionary, because the streams' threads may be iterating over the old one
        self.members = self.members | {member.id: member for member in new}
        for member in new:
            self._observer(TableFound(member.target, member.source))
        for member, table in grown:
            member.resolved = table
            if member.sink is not None:
                topics = ", ".join(table.section.topics)
                self.set_aside(member, MoreTopicsError(f"{member.target} has more topics: it takes {topics}."))
        return new

    def _grown(self, table: ResolvedTable) -> Member | None:
        """The table, if it is known, and its pattern has found more topics."""
        member = self.members.get(table.section.id)
        is_known = member is None or set(table.section.topics) <= set(member.resolved.section.topics)
        return None if is_known else member

    def open(self, members: Sequence[Member]) -> list[Member]:
        """Open tables (again), and create missing ones.

        They begin to work with `take_up`, because a micro-batch in progress may still use a table's old sink.

        :return: the tables that could be opened.
        """
        if not members:
            return []
        if self.dead_letters is None and self._config.sink.on_bad_record == "dead-letter":
            self.dead_letters = open_dead_letters(self._spark, self._config)
        self._each(members, self._open, "opened")
        unseen = [member.opened for member in members if member.opened and member.opened.stated.awaits_keys]
        if self._config.source.type == "kafka" and unseen:
            Thread(target=self._compare_keys, args=(unseen,), name="rowdelta-keys", daemon=True).start()
        return [member for member in members if member.opened is not None]

    def _compare_keys(self, sinks: Sequence[TableSink]) -> None:
        """Read some messages before the first micro-batch, and warn if they have another key than the table.

        A separate thread does this, so that nothing waits for a broker that the plain client can't reach. The first
        micro-batch compares the keys too, before its commit.
        """
        try:
            tables = [(sink.plan.section.topics, sink.plan.changelog.source_tables) for sink in sinks]
            for sink, stated in zip(sinks, stated_keys(self._config, tables), strict=True):
                sink.stated.note_keys(stated, sink.plan)
        except ConfigError as error:  # these options are for Spark's client only
            log.debug("can't look at the messages' keys: %s", error)
        except Exception as error:  # noqa: BLE001 - whatever it is, the run itself meets it too
            what = masked(f"{type(error).__name__}: {error}")
            log.warning("can't look at the messages' keys before the first micro-batch, which compares them: %s", what)

    def take_up(self, members: Sequence[Member]) -> list[Member]:
        """Let the tables work that `open` opened. Call this while none of their queries applies a micro-batch.

        :return: the tables that work now.
        """
        for member in members:
            with member.turn:
                member.leave()
                member.sink, member.opened = member.opened, None
        return [member for member in members if member.works]

    def locate(self, members: Sequence[Member]) -> list[Member]:
        """Decide from where open tables are read, and store this position in them.

        :return: the tables that can be read.
        :raises TemporaryError: the source did not answer.
        """
        sinks = {member.id: member.sink for member in members if member.sink is not None}
        from_start = {member.id for member in members if member.from_start}
        failures = self._source.locate([(sink.plan.section, sink.position) for sink in sinks.values()], from_start)
        for name, error in failures.items():
            self.set_aside(self.members[name], error)
        found = [member for member in members if member.works]

        def remember(member: Member) -> None:
            sink = sinks[member.id]
            sink.check_source()
            sink.remember_start(self._source.start_position(sink.plan.section))
            member.from_start = False

        return self._each(found, remember, "looked up")

    def apply(self, stream: Stream, batch_id: int, frame: "DataFrame") -> None:
        """Apply a micro-batch to the tables that it has records for. A table that fails is set aside.

        One job writes all tables that have few records. Each other table has a job of its own. The threads inherit the
        query's job group, so stopping the query stops their jobs.
        """
        touched = [self.members[name] for name in self._source.touched(stream, batch_id)]
        before = sum(member.commits for member in touched)
        try:
            with logs.about(batch=batch_id):
                self._apply(stream, batch_id, frame, touched)
        finally:
            commits = sum(member.commits for member in touched) - before
            self.tally.add(batches=commits if len(touched) == 1 else int(commits > 0))  # of one table, in parts

    def _apply(self, stream: Stream, batch_id: int, frame: "DataFrame", touched: Sequence[Member]) -> None:
        with ExitStack() as held:
            for member in touched:
                held.enter_context(member.turn)
            members = [member for member in touched if member.works]
            if len(members) == 1:
                self._attempt(functools.partial(self._apply_alone, stream, batch_id, frame), members[0])
            else:
                self._apply_together(stream, batch_id, frame, members)

    def _apply_together(self, stream: Stream, batch_id: int, frame: "DataFrame", members: list[Member]) -> None:
        batches: dict[str, TableBatch] = {}
        begun: dict[str, Begun] = {}
        shares: dict[str, tuple[TableBatch, Share]] = {}

        def begin(member: Member) -> None:
            sink = _sink(member)
            batch = sink.batch(stream, batch_id, frame)
            while batch is not None and batch.more:
                self._note_commit(member, batch, sink.apply_batch(batch_id, batch))
                batch = self._next_part(stream, batch_id, frame, member)
            if batch is not None:
                batches[member.id] = batch
                shared = sink.share(batch)
                if shared is not None:
                    begun[member.id], shares[member.id] = shared[0], (batch, shared[1])

        def begin_with_others(member: Member) -> None:
            found = _sink(member).begin(batches[member.id])
            if found is not None:
                begun[member.id] = found

        def write_companions(group: Sequence[str]) -> None:
            some = {name: begun[name] for name in group if name in sinks}
            if len(some) > 1 and not self._is_ending():
                results.update(self._joint.write_companions(sinks, batches[group[0]], some))

        def apply(member: Member) -> None:
            sink, batch = _sink(member), batches[member.id]
            written = results.pop(member.id, None)
            applied = (
                sink.apply_batch(batch_id, batch) if written is None else sink.apply_written(batch_id, batch, written)
            )
            self._note_commit(member, batch, applied)

        def work(some: Iterable[Member]) -> list[Future[None]]:
            return [submit(self._attempt, apply, member) for member in some]

        submit = self._submitter(self._pool)
        results: dict[str, Written] = {}
        _finish(submit(self._attempt, begin, member) for member in members)
        members = [member for member in members if member.id in batches and member.works]
        large = [member.id for member in members if member.id not in shares and _sink(member).may_have_companions]
        groups = self._joint.companions({name: batches[name] for name in large})
        _finish(submit(self._attempt, begin_with_others, self.members[name]) for group in groups for name in group)
        members = [member for member in members if member.works]
        sinks = {member.id: _sink(member) for member in members if member.id in begun}
        alone = [member for member in members if member.id not in sinks]
        topics = {member.resolved.section.topics for member in members}
        try:
            with read_once(frame) if len(topics) == 1 and len(alone) + len(groups) > 1 else nullcontext():
                # the tables with jobs of their own don't wait for the joint jobs
                futures, writing = work(alone), [submit(write_companions, group) for group in groups]
                small = {name: share for name, share in shares.items() if name in sinks}
                if len(small) > 1 and not self._is_ending():
                    for name, found in self._joint.write(frame.sparkSession, sinks, small).items():
                        results[name] = sum_up(begun[name], 1, [found.written], found.observed, found.stated)
                _finish(writing)
                _finish(futures + work(member for member in members if member.id in sinks))
        finally:
            for name in results:  # results are left over only if the job is ending
                sinks[name].discard()
        # compactions come last, so that no table waits for another table's compaction
        _finish(submit(self._attempt, _tend, member) for member in members if member.works)

    def _apply_alone(self, stream: Stream, batch_id: int, frame: "DataFrame", member: Member) -> None:
        sink = _sink(member)
        batch = sink.batch(stream, batch_id, frame)
        while batch is not None:
            self._note_commit(member, batch, sink.apply_batch(batch_id, batch))
            _tend(member)
            batch = self._next_part(stream, batch_id, frame, member) if batch.more else None

    def _next_part(self, stream: Stream, batch_id: int, frame: "DataFrame", member: Member) -> TableBatch | None:
        """The next part of a micro-batch, after others had their turn to change the table. None if there is none, or
        the next run is to apply it.
        """
        if not self._is_cut():
            member.turn.pass_on()
        return _sink(member).batch(stream, batch_id, frame) if member.works and not self._is_cut() else None

    def _note_commit(self, member: Member, batch: TableBatch, written: Written) -> None:
        if batch.share is not None:
            self._source.note(batch.share.ranges, [fact for fact in written.stated if isinstance(fact, str)])
        self.tally.add(changes=written.read - written.bad, bad=written.bad)
        member.commits += 1
        member.failures = 0

    def _submitter(self, pool: ThreadPoolExecutor) -> Callable[..., Future[None]]:
        """A function that submits work to a pool, with this thread's thread-local properties of Spark.

        Each task gets its own copy of them, since SQL executions write into the properties. PySpark's
        `inheritable_thread_target` doesn't copy them.
        """
        context = self._spark.sparkContext._jsc.sc()
        properties = context.getLocalProperties().clone()

        def inheriting(work: Callable[..., None], *args: Any) -> None:
            context.setLocalProperties(properties.clone())
            work(*args)

        def submit(work: Callable[..., None], *args: Any) -> Future[None]:
            # which copies what the log's lines are about, too
            try:
                return pool.submit(contextvars.copy_context().run, inheriting, work, *args)
            except RuntimeError:
                if not self.closed:
                    raise
                # the work must still run here: it discards what was begun
                work(*args)
                done = Future[None]()
                done.set_result(None)
                return done

        return submit

    def _is_ending(self) -> bool:
        return self.closed or (self._config.sink.on_table_error == "stop" and bool(self.broken()))

    def _is_cut(self) -> bool:
        """Whether further parts of a micro-batch are left to the next run."""
        return self.stopping or self._is_ending()

    def _attempt(self, work: Callable[[Member], None], member: Member) -> None:
        """Do a table's work. If it fails, set the table aside."""
        if self._is_ending():
            return
        with logs.about(table=member.target):
            try:
                work(member)
            except Exception as error:  # noqa: BLE001 - any error here is this table's own
                self.set_aside(member, error)

    def set_aside(self, culprit: Member, error: Exception) -> None:
        """Stop applying changes to a table for a while."""
        culprit.fail(error)
        if jvms.ending:  # a signal ends the process, and whatever fails without a JVM has nothing to say
            return
        if is_harmless(error):
            self._observer(TableWaits(culprit.target, summary(error)))
        else:
            self._observer(TableFailed(culprit.target, type(error).__name__, summary(error)))
        if is_harmless(error):
            log.warning("%s It is opened again.", summary(error))
        elif not self._ends_with(error):  # or it is the job's last word
            known = (RowdeltaError, *SPARK_ERRORS)
            unexpected = None if isinstance(error, known) else error
            log.error("%s set aside: %s", culprit.target, summary(error), exc_info=unexpected)

    def _ends_with(self, error: Exception) -> bool:
        """Whether one table's error ends the job, and so is printed at the end."""
        stops_job = isinstance(error, RowdeltaError) and error.stops_job
        return len(self.taken()) == 1 or self._config.sink.on_table_error == "stop" or stops_job

    def _each(self, members: Sequence[Member], work: Callable[[Member], None], done: str) -> list[Member]:
        """Do work for tables in parallel. Tables that fail are set aside.

        :param done: what was done, for the log: "opened".
        :return: the tables that work.
        """
        line = Line(on_terminal=False)  # other threads log meanwhile
        submit = self._submitter(self._openers)
        waiting = {submit(self._attempt, work, member) for member in members}
        while waiting and not self.stopping:
            finished, waiting = wait(waiting, timeout=_LOOK_SECONDS)
            for future in finished:
                future.result()
            if waiting:
                line.tell(f"{done} {len(members) - len(waiting):,} of {len(members):,} tables")
        if not waiting:
            fine = sum(member.error is None for member in members)
            line.end(f"{done} {fine:,} of {len(members):,} tables")
        for future in waiting:
            future.cancel()  # what has begun may take minutes, and nobody waits for it
        return [member for member in members if member.works]

    def _open(self, member: Member) -> None:
        if member.resolved.error is not None:
            raise member.resolved.error
        load, member.load = member.load, None
        if load is not None:
            load.result()
        loads = self._loads if member.resolved.section.mode == "upsert" else None
        sample = None if loads is None else loads.sample(member.resolved)
        try:
            table, plan, key = open_table(self._spark, self._config, member.resolved, self._source, sample)
        except NoMessagesError as error:
            self._wait_for_messages(member, error)
            return
        except NotChangesError as error:
            if not (error.is_internal and member.resolved.from_pattern):
                raise
            log.info("%s", error.left_out)
            member.leave()
            member.is_left_out = True
            return
        self._changelogs[plan.section.target] = plan.changelog
        letters = self.dead_letters
        engine = SparkEngine(self._config, table, letters)
        opened = TableSink(
            self._config, member.resolved, table, plan, key, self._source, letters, engine, self._observer
        )
        member.awaits_messages = False
        if not loading.is_due(opened, auto=self._loads is not None):
            member.opened = opened
        elif self._loads is None:
            raise TableError(
                f"{member.target}: its load from the database isn't finished, and its stream begins after it. Go on "
                "with rowdelta load."
            )
        elif not self.stopping:
            member.leave()
            member.load = self._submitter(self._loaders)(self._loads.load, member.resolved, opened)

    def _wait_for_messages(self, member: Member, error: NoMessagesError) -> None:
        """Let a table wait for its first messages. This isn't an error. The table must not miss these messages, so it
        will read its source from the start.
        """
        self._observer(TableWaits(member.target, str(error)))
        if not member.awaits_messages:
            log.info("%s", error)
        member.leave()
        member.awaits_messages = member.from_start = True
        member.retry_at = time.monotonic() + self._config.source.discovery_seconds


def is_harmless(error: Exception | None) -> bool:
    """Whether opening the table again is enough after this error."""
    return isinstance(error, RowdeltaError) and error.is_harmless


def _sink(member: Member) -> TableSink:
    assert member.sink is not None
    return member.sink


def _tend(member: Member) -> None:
    """If maintenance waits to change the table, it is enough that the next micro-batch waits for that."""
    _sink(member).upkeep.tend(may_wait=member.turn.is_awaited)


def _finish(futures: Iterable[Future[None]]) -> None:
    done, _ = wait(list(futures))
    for future in done:
        future.result()
