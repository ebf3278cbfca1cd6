"""Runs the job: opens the tables, starts the streaming queries, and stops between micro-batches when asked to."""

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, ClassVar

from py4j.java_gateway import JavaObject
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from changelog.amounts import amount
from changelog.spec import ChangelogSpec
from sink.config import Config
from sink.config.folders import check_folders
from sink.databases.slots import has_slots, slots_of
from sink.errors import ConfigError, DataError, RowdeltaError, TableError, TemporaryError, summary
from sink.run.maintenance import Maintenance
from sink.run.sampling import Sampling
from sink.run.supervisor import Member, Supervisor, is_harmless
from sink.sources.buffer import BufferSource, topics_source
from sink.sources.engine import Engine
from sink.sources.files import FilesSource
from sink.sources.source import Source, Stream
from sink.spark.interrupts import jvms
from sink.spark.java_errors import JAVA_ERRORS
from sink.spark.session import activate, start_workers
from sink.table.observer import EngineSeen, Event, LoopTurned, Observer, SlotsSeen, nobody
from sink.table.patterns import NO_TABLE, find_tables

log = logging.getLogger("rowdelta")

_POLL_SECONDS = 0.2
_END_SECONDS = 30.0
_TEND_SECONDS = 5.0


@dataclass
class StartedQuery:
    """A started query. Once it is `over`, no more of its micro-batches begin. `error` is the error of a micro-batch
    that failed.

    A micro-batch that must not begin waits until the query is `ending`. While somebody holds `idle`, no micro-batch of
    the query is being applied.
    """

    stream: Stream
    query: StreamingQuery | None = None
    over: bool = False
    idle: threading.Lock = field(default_factory=threading.Lock)
    ending: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None


class Pipeline:
    """Runs all tables of a configuration. `run` returns when the source is exhausted (`available-now`), or after a call
    of `stop`.
    """

    def __init__(self, spark: SparkSession, config: Config, observer: Observer = nobody) -> None:
        self._spark = spark
        self._config = config
        self._observer = observer
        # Not an `Event`: a signal handler would wait for its lock for ever if the interrupted thread holds this lock.
        self._stopping = self._is_told_to_stop = False
        self._runs: list[StartedQuery] = []
        self._ended: list[StartedQuery] = []
        check_folders(spark, config)
        if config.sink.trigger != "available-now":
            start_workers(spark)
        changelogs: dict[str, ChangelogSpec] = {}
        self._engine = Engine(spark, config) if config.source.type == "debezium" else None
        self._source = open_source(spark, config, changelogs)
        self._supervisor = Supervisor(spark, config, self._source, changelogs, observer, self._engine)
        self._has_patterns = any(table.may_find_more for table in config.tables)
        self._looked_at = self._tended_at = self._began_at = time.monotonic()
        try:
            if self._engine is not None and config.sink.trigger == "available-now":
                self._engine.start()
                self._engine.catch_up()
                if not config.load.auto:
                    self._engine.stop()
            found = find_tables(config, self._source, remember=True)
            self._supervisor.take_up(self._supervisor.open(self._supervisor.enter(found)))
        except BaseException:
            self._supervisor.close()
            if self._engine is not None:
                self._engine.stop()
            raise
        if config.sink.trigger == "available-now" and any(
            member.sink is not None and member.sink.position is None for member in self._supervisor.working()
        ):
            start_workers(spark)  # other tables may have nothing to do

    def run(self) -> None:
        """Apply what the source has, micro-batch by micro-batch.

        :raises RowdeltaError: its message says what happened and what to do. Every table is as its last commit left it.
        """
        activate(self._spark)  # the caller's thread may be another one than the session's
        sampling = Sampling(self._spark, self._sample, self._observer) if self._observer is not nobody else None
        maintenance = Maintenance(self._spark, self._config, self._supervisor)
        try:
            self._raise_if_over()
            if self._engine is not None and self._config.sink.trigger != "available-now":
                self._engine.start()
            working = self._supervisor.working()
            known = any(member.sink and member.sink.position for member in working)
            for member in self._supervisor.members.values():
                # a topic is new if a pattern matches it now, and no earlier run read it
                member.from_start = member.awaits_messages or (known and member.resolved.from_pattern)
            with self._between_batches(self._all_runs()):
                located = self._locate(working)
            self._read(located)
            self._raise_if_over()
            if sampling is not None:
                sampling.start()
            maintenance.start()
            self._wait(maintenance)
            maintenance.finish(lambda: self._stopping)
            broken = self._supervisor.broken()
            if broken:
                raise self._failure(broken)
            self._remove_applied()
        except RowdeltaError:
            self._stopping = self._supervisor.stopping = True
            maintenance.stop()
            with self._between_batches(self._all_runs()):
                raise  # the lock has waited for other queries' micro-batches in progress
        finally:
            self._stopping = self._supervisor.stopping = True
            maintenance.stop()
            if self._engine is not None:
                self._engine.stop()
            if sampling is not None:
                sampling.stop()
            self._supervisor.close()
            self._supervisor.finish_loads()
            # the JVM may have gone; the error that ended the run is more important
            with suppress(Py4JError, OSError):
                if self._runs:
                    self._quieten_spark()
                for run in list(self._runs):
                    self._end(run)
            self._supervisor.finish_tending()
        log.info("%s", self._how_it_ended(time.monotonic() - self._began_at))

    def _how_it_ended(self, seconds: float) -> str:
        """The last words of a run without an error."""
        members, tally = self._supervisor.taken(), self._supervisor.tally
        if not members:
            return NO_TABLE
        waiting = sum(member.awaits_messages for member in members)
        state = "stopped" if self._is_told_to_stop else f"{amount(len(members) - waiting, 'table')} up to date"
        if waiting:
            state += f", {amount(waiting, 'table')} without a message yet"
        work = "nothing to do"
        if tally.batches:
            work = f"{amount(tally.batches, 'micro-batch')}, {amount(tally.changes, 'change')}"
        if tally.bad:
            work += f", {amount(tally.bad, 'dead letter')} in {self._config.dead_letter_table}"
        return f"{state}; {work}, {seconds:,.0f} s"

    def stop(self) -> None:
        """Finish the micro-batch in progress, then stop. A signal handler may call this, also several times."""
        self._stopping = self._supervisor.stopping = self._is_told_to_stop = True

    def _all_runs(self) -> list[StartedQuery]:
        """All queries, also those that have ended while their micro-batch is still being applied. Spark, for example,
        stops a query when another one takes its checkpoint, but the micro-batch goes on.
        """
        return [*self._runs, *self._ended]

    @contextmanager
    def _between_batches(self, runs: Iterable[StartedQuery]) -> Iterator[None]:
        """Wait until none of these queries applies a micro-batch. Inside this context none of them begins another."""
        with ExitStack() as held:
            for run in runs:
                held.enter_context(run.idle)
            yield

    def _reopen(self, members: Sequence[Member]) -> None:
        """Open tables (again), and read them on from their positions.

        If all tables share one query, this query ends, and a new one begins at the tables' positions. Only these
        positions count, so nothing is lost or applied twice, whatever state each table is in.

        Queries that don't feed these tables go on meanwhile. Queries that do may also go on while tables are opened,
        because the tables are set aside. Opening takes long if a catalog doesn't answer.
        """
        runs = self._runs_of(members)
        with self._between_batches(runs):
            pass  # wait for the micro-batch in which a table was set aside, which may still be in progress
        opened = self._supervisor.open(members)
        if self._stopping:
            return
        with self._between_batches(runs):
            opened = self._supervisor.take_up(opened)
            try:
                located = self._locate(opened)
            except TemporaryError as error:
                for member in opened:
                    self._supervisor.set_aside(member, error)
                return
        self._read(located)

    def _runs_of(self, members: Iterable[Member]) -> list[StartedQuery]:
        """The queries that feed these tables, or will feed them."""
        if self._source.one_stream:
            return self._all_runs()
        names = {member.id for member in members}
        return [run for run in self._all_runs() if any(table.id in names for table in run.stream.tables)]

    def _locate(self, members: Sequence[Member]) -> Sequence[Member]:
        """Find the start positions of tables that were just opened. Call this between micro-batches.

        After this, a query that has to end begins no more micro-batches, because it has already read past these tables'
        positions.
        """
        if members and self._source.one_stream and self._config.sink.trigger != "available-now":
            members = self._supervisor.working()
        # first, so that the query runs on if the source doesn't answer
        located = self._supervisor.locate(members) if members else ()
        if members:
            for run in self._runs if self._source.one_stream else self._runs_of(located):
                run.over = True
        return located

    def _read(self, located: Sequence[Member]) -> None:
        ending = [run for run in self._runs if run.over]
        if ending:
            self._quieten_spark()
            for run in ending:
                self._end(run)
            self._spark.sparkContext.setLogLevel("ERROR")
        if located:
            for stream in self._source.streams([member.resolved.section for member in located]):
                self._runs.append(self._start(stream))

    def _start(self, stream: Stream) -> StartedQuery:
        trigger = self._config.sink.trigger
        writer = stream.frame.writeStream.queryName(f"rowdelta {stream.name}").option(
            "checkpointLocation", stream.checkpoint
        )
        writer = (
            writer.trigger(availableNow=True) if trigger == "available-now" else writer.trigger(processingTime=trigger)
        )
        run = StartedQuery(stream)
        run.query = writer.foreachBatch(self._apply(run)).start()
        return run

    def _end(self, run: StartedQuery) -> None:
        assert run.query is not None
        run.ending.set()
        run.query.stop()
        self._forget(run)

    def _forget(self, run: StartedQuery) -> None:
        """Drop the reference to a query that has ended.

        The query refers to this object by its `foreachBatch` function. If this object also referred to the query,
        neither the JVM's nor Python's garbage collector could free them: the query, its session and its threads would
        stay.
        """
        self._runs.remove(run)
        run.over, run.query = True, None
        self._ended = [other for other in (*self._ended, run) if other.idle.locked()]

    def _apply(self, run: StartedQuery) -> Callable[[DataFrame, int], None]:
        members = [self._supervisor.members[table.id] for table in run.stream.tables]

        def begin(frame: DataFrame, batch_id: int) -> None:
            self._supervisor.apply(run.stream, batch_id, frame)
            if self._supervisor.closed:
                raise _StoppedError  # some tables may have been left out, so Spark must not mark this micro-batch done
            if self._stopping:  # likewise: parts of the micro-batch may have been left out
                run.over = True
                raise _StoppedError
            if self._is_over() or not any(member.works for member in members):
                run.over = True
                raise next((member.error for member in members if member.error is not None), _StoppedError())

        def apply(frame: DataFrame, batch_id: int) -> None:
            with self._supervisor.turns, run.idle:
                if not (self._stopping or run.over or self._is_over()):
                    try:
                        begin(frame, batch_id)
                    except Exception as error:  # noqa: BLE001 - it ends the query, and `StartedQuery.error` has it
                        run.error = error
                        # Spark gets no more than a name, also of the error's causes. If the query is ending, Spark
                        # searches the text with a regular expression, which overflows the stack if it is that of a
                        # Java error (`StreamExecution.PROXY_ERROR`).
                        raise _FailedError(type(error).__name__) from None
                    return
            # this waits without a call to the JVM: the query's end would interrupt such a call with a Java error
            run.ending.wait(_END_SECONDS)
            raise _StoppedError

        return apply

    def _wait(self, maintenance: Maintenance) -> None:
        retried = False
        while not self._stopping:
            self._observer(LoopTurned())
            self._tend_buffer()
            for run in list(self._runs):
                # each query is asked in turn, so that a failed one is noticed while others run on; handling one failure
                # may end other queries
                if run in self._runs and self._has_ended(run) and run in self._runs:
                    self._forget(run)
            self._raise_if_over()
            if self._config.sink.trigger != "available-now":
                self._look_around()
            elif not self._runs:
                # a table with a temporary failure may work now; a table that was rolled back does
                again = [member for member in self._supervisor.failed() if not retried or is_harmless(member.error)]
                retried = retried or not all(is_harmless(member.error) for member in again)
                again += self._supervisor.loaded()
                if again:
                    self._reopen(again)
                elif not self._supervisor.is_loading():
                    break
            if not self._runs:
                time.sleep(_POLL_SECONDS)
        if self._stopping:
            maintenance.stop()  # the micro-batch in progress may wait for it
        with self._between_batches(self._all_runs()):
            self._raise_if_over()
            for run in self._runs:
                if run.error is not None and not run.over:
                    raise self._explain(run.error)

    def _tend_buffer(self) -> None:
        """Remove what all tables have passed, now and then.

        :raises RowdeltaError: nothing comes into the buffer any more.
        """
        if self._engine is None:
            return
        self._engine.raise_error()
        if time.monotonic() - self._tended_at >= _TEND_SECONDS:
            self._tended_at = time.monotonic()
            self._remove_applied()

    def _remove_applied(self) -> None:
        if isinstance(self._source, BufferSource):
            self._source.remove_applied(self._supervisor.needed_from())

    def _sample(self) -> Iterator[Event]:
        """What is to be seen beside the micro-batches at the moment. Another thread asks."""
        if self._engine is not None and isinstance(self._source, BufferSource):
            engine, held = self._engine, self._source.held(self._supervisor.positions())
            yield EngineSeen(engine.is_reading, engine.failures, engine.reason, held)
        if has_slots(self._config):
            try:
                yield SlotsSeen(slots_of(self._config))
            except RowdeltaError as error:
                yield SlotsSeen((), summary(error))
        yield self._supervisor.lags()

    def _has_ended(self, run: StartedQuery) -> bool:
        assert run.query is not None
        try:
            # fractions of a second work, down to a millisecond
            seconds: Any = max(0.001, _POLL_SECONDS / len(self._runs))
            return bool(run.query.awaitTermination(seconds))
        except PySparkException as error:
            if run.over or self._is_over() or (self._stopping and run.error is None):
                return True  # `awaitTermination` raised the error of the query's tables, or `_StoppedError`
            failure = self._explain(run.error or error)
            if not self._stopping and self._goes_on_without(run, failure):
                return True
            raise failure from error
        except (Py4JError, OSError) as error:
            raise TemporaryError(
                f"the JVM went away: {error}. Every table is as its last commit left it; run again."
            ) from None

    def _goes_on_without(self, run: StartedQuery, failure: RowdeltaError) -> bool:
        """Whether a query failed because of some of its tables, for example because a topic was deleted. These tables
        are set aside, and the others go on.
        """
        members = [member for table in run.stream.tables if (member := self._supervisor.members[table.id]).works]
        if not members:
            return False
        if not self._source.one_stream:
            if len(self._supervisor.members) > 1:
                run.over = True
                self._supervisor.set_aside(members[0], failure)
            return run.over
        run.over = True
        try:
            fine = self._supervisor.locate(members)
        except TemporaryError as error:
            log.warning("can't find out why the stream failed: %s", error)
            return False
        if len(fine) == len(members) and not self._source.lacks_topics():
            return False
        if not self._is_over():
            with self._between_batches(self._all_runs()):
                located = self._locate(fine)
            self._read(located)
        return True

    def _look_around(self) -> None:
        """Add tables that have appeared, and try failed tables again whose pause is over."""
        now = time.monotonic()
        members = self._supervisor.due()
        new: list[Member] = []
        if self._has_patterns and now - self._looked_at >= self._config.source.discovery_seconds:
            self._looked_at = now
            try:
                found = find_tables(self._config, self._source, remember=True)
                new = self._supervisor.enter(found, from_start=True)
            except TemporaryError as error:
                log.warning("can't look for new tables: %s", error)
            for member in new:
                log.info("found %s, for %s", member.resolved.section.origin, member.target)
        if not members and not new:
            return
        self._reopen([*members, *new])

    def _is_over(self) -> bool:
        """Whether the job must end: a table failed and the others must stop too, or all tables have failed."""
        failed = self._supervisor.broken()
        if not failed:
            return False
        if self._config.sink.on_table_error == "stop" or len(failed) == len(self._supervisor.taken()):
            return True
        return any(isinstance(member.error, RowdeltaError) and member.error.stops_job for member in failed)

    def _raise_if_over(self) -> None:
        if self._is_over():
            raise self._failure(self._supervisor.broken())

    def _failure(self, failed: Sequence[Member]) -> RowdeltaError:
        """One error for all tables that failed. Its type is that of the most serious error."""
        errors = [self._explain(member.error) for member in failed if member.error is not None]
        # temporary errors come last
        errors.sort(key=lambda error: (not error.stops_job, isinstance(error, TemporaryError)))
        if len(errors) == 1:
            return errors[0]
        shown = "\n".join(f"  {error}" for error in errors[:10])
        more = f"\n  and {len(errors) - 10} more" if len(errors) > 10 else ""
        worst = next((kind for kind in _KINDS if isinstance(errors[0], kind)), RowdeltaError)
        return worst(
            f"{len(errors)} of {amount(len(self._supervisor.taken()), 'table')} failed; each is as its last commit "
            f"left it:\n{shown}{more}"
        )

    def _quieten_spark(self) -> None:
        """Turn Spark's log off. Spark logs the interruption of a batch that hasn't begun as an error; it isn't one."""
        self._spark.sparkContext.setLogLevel("OFF")

    def _explain(self, error: BaseException) -> RowdeltaError:
        if isinstance(error, RowdeltaError):
            return error
        if not isinstance(error, (*JAVA_ERRORS, PySparkException, Py4JError, OSError)):
            return RowdeltaError(
                f"an unexpected error: {type(error).__name__}: {error}. Every table is as its last commit left it; "
                "please report it."
            )
        if "No space left on device" in str(error):
            return TemporaryError(
                "the stream failed: no space left on device. It needs some in sink.checkpoint "
                f"({self._config.sink.checkpoint}) and in spark.local.dir. Every table is as its last commit left it; "
                "free space and run again."
            )
        return TemporaryError(
            f"the stream failed: {summary(error)}. Every table is as its last commit left it; run again."
        )


_KINDS = (ConfigError, DataError, TableError, TemporaryError)


class _StoppedError(Exception):
    """The pipeline is stopping."""


class _FailedError(Exception):
    """What Spark is told of a micro-batch that failed. `StartedQuery.error` is the error."""


def open_source(spark: SparkSession, config: Config, changelogs: dict[str, ChangelogSpec]) -> Source:
    """The configured source.

    :param changelogs: the tables' changelogs, by target. A source of files needs them for the files' schema.
    """
    if config.source.has_topics:
        return topics_source(spark, config)
    return FilesSource(spark, config, changelogs)


@contextmanager
def stops_on_signals(spark: SparkSession, stop_work: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """Let Ctrl-C and SIGTERM finish the micro-batch and stop. A second Ctrl-C interrupts at once, which is safe too.

    Signals that reach the JVM do the same. The JVM gets them under `spark-submit`, where it is the parent process, and
    from service managers that send a signal to all processes.

    Yields a function that says whether a signal has come.
    """
    told = False

    def stop(signal_name: str) -> None:
        nonlocal told
        if not told:
            told = True
            log.info("%s: finishing the micro-batch, then stopping", signal_name)
        stop_work()

    def handle(signum: int, _: FrameType | None) -> None:
        signal.signal(signal.SIGINT, previous[signal.SIGINT])
        stop(signal.Signals(signum).name)

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    in_jvm = _JvmSignals(spark, stop)
    try:
        in_jvm.register()
        yield lambda: told
    finally:
        in_jvm.restore()
        for number, handler in previous.items():
            signal.signal(number, handler)


class _JvmSignals:
    """A Java `SignalHandler`. Without it, a signal makes the JVM end at once, and Iceberg's threads then refuse to
    commit the micro-batch.
    """

    class Java:
        implements: ClassVar[list[str]] = ["sun.misc.SignalHandler"]

    def __init__(self, spark: SparkSession, stop: Callable[[str], None]) -> None:
        from pyspark.java_gateway import ensure_callback_server_started

        gateway = spark.sparkContext._gateway
        assert gateway is not None
        ensure_callback_server_started(gateway)  # type: ignore[no-untyped-call]
        self._stop = stop
        self._told = False
        self._signal: Any = gateway.jvm.sun.misc.Signal
        self._previous: dict[str, JavaObject] = {}

    def register(self) -> None:
        for name in ("INT", "TERM"):
            try:
                self._previous[name] = self._signal.handle(self._signal(name), self)
            except JAVA_ERRORS as error:  # with its option -Xrs, the JVM doesn't handle signals
                log.info("the JVM can't be told of SIG%s: %s", name, summary(error))

    def handle(self, received: JavaObject) -> None:
        """Stop the pipeline. A second Ctrl-C, or a signal that this process sends, ends the JVM."""
        name = str(received.getName())
        if jvms.ending or (self._told and name == "INT"):
            self.restore()
            getattr(self._signal, "raise")(received)
        else:
            self._told = True
            self._stop(f"SIG{name}")

    def restore(self) -> None:
        with suppress(Py4JError, OSError):  # the JVM may have gone
            for name, previous in self._previous.items():
                self._signal.handle(self._signal(name), previous)
