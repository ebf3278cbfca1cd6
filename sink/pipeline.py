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

from changelog.spec import ChangelogSpec
from sink.config import Config
from sink.errors import ConfigError, DataError, RowdeltaError, TableError, TemporaryError, summary
from sink.folders import check_folders
from sink.interrupts import jvms
from sink.java_errors import JAVA_ERRORS
from sink.patterns import find_tables
from sink.session import start_workers
from sink.sources.files import FilesSource
from sink.sources.kafka import KafkaSource
from sink.sources.source import Source, Stream
from sink.supervisor import Member, Supervisor, is_harmless

log = logging.getLogger("rowdelta")

_POLL_SECONDS = 0.2
_END_SECONDS = 30.0


@dataclass
class Run:
    """A started query. Once `over`, no micro-batch of it begins any more. `error` is what ended one that had begun.

    A micro-batch that doesn't begin waits until the query is `ending`. Whoever holds `idle` is sure that no micro-batch
    of the query is being applied.
    """

    stream: Stream
    query: StreamingQuery | None = None
    over: bool = False
    idle: threading.Lock = field(default_factory=threading.Lock)
    ending: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None


class Pipeline:
    """All tables of a configuration. `run` returns when the source is exhausted (`available-now`) or `stop`
    was called.
    """

    def __init__(self, spark: SparkSession, config: Config) -> None:
        self._spark = spark
        self._config = config
        # not an `Event`: a signal handler that sets it would wait for the lock of one that the same thread waits for
        self._stopping = False
        self._runs: list[Run] = []
        self._ended: list[Run] = []
        check_folders(spark, config)
        if config.sink.trigger != "available-now":
            start_workers(spark)
        changelogs: dict[str, ChangelogSpec] = {}
        self._source = open_source(spark, config, changelogs)
        self._supervisor = Supervisor(spark, config, self._source, changelogs)
        self._has_patterns = any(table.is_pattern for table in config.tables)
        self._looked_at = time.monotonic()
        try:
            self._supervisor.take_up(self._supervisor.open(self._supervisor.enter(find_tables(config, self._source))))
        except KeyboardInterrupt:
            self._supervisor.close()
            raise
        if config.sink.trigger == "available-now" and any(
            member.sink is not None and member.sink.position is None for member in self._supervisor.working()
        ):
            start_workers(spark)  # other tables may have nothing to do

    def run(self) -> None:
        """Apply what the source has, micro-batch by micro-batch.

        :raises RowdeltaError: says what happened and what to do; every table is as its last commit left it.
        """
        try:
            self._raise_if_over()
            working = self._supervisor.working()
            known = any(member.sink and member.sink.position for member in working)
            for member in self._supervisor.members.values():
                # a topic that a pattern matches now but didn't in an earlier run is new
                member.from_start = member.awaits_messages or (known and member.resolved.from_pattern)
            with self._between_batches(self._all_runs()):
                located = self._locate(working)
            self._read(located)
            self._raise_if_over()
            self._wait()
            broken = self._supervisor.broken()
            if broken:
                raise self._failure(broken)
        except RowdeltaError:
            self._stopping = True
            with self._between_batches(self._all_runs()):
                raise  # other queries' micro-batches in progress are finished
        finally:
            self._stopping = True
            self._supervisor.close()
            # the JVM may have gone; what ended the run matters more
            with suppress(Py4JError, OSError):
                if self._runs:
                    self._quieten_spark()
                for run in list(self._runs):
                    self._end(run)

    def stop(self) -> None:
        """Finish the micro-batch in progress, then stop. Safe to call from a signal handler, more than once."""
        self._stopping = True

    def _all_runs(self) -> list[Run]:
        """Also queries that have ended, as long as a micro-batch of theirs is being applied: whoever stops a query, as
        Spark itself does if another one takes its checkpoint, doesn't stop us in the midst of one.
        """
        return [*self._runs, *self._ended]

    @contextmanager
    def _between_batches(self, runs: Iterable[Run]) -> Iterator[None]:
        """Wait until none of these queries applies a micro-batch. Meanwhile none of them begins another."""
        with ExitStack() as held:
            for run in runs:
                held.enter_context(run.idle)
            yield

    def _reopen(self, members: Sequence[Member]) -> None:
        """Open tables (again), and have them read from where they are.

        Where all tables share one query, it ends and begins anew from the tables' positions, which are the truth: so
        nothing is lost or read twice, whatever state each of them is in.

        Queries that have nothing to do with these tables go on meanwhile. The others may, while tables are opened,
        which takes long if a catalog doesn't answer: they have set these tables aside.
        """
        runs = self._runs_of(members)
        with self._between_batches(runs):
            pass  # the micro-batch in which a table was set aside may still be in progress
        opened = self._supervisor.open(members)
        with self._between_batches(runs):
            opened = self._supervisor.take_up(opened)
            try:
                located = self._locate(opened)
            except TemporaryError as error:
                for member in opened:
                    self._supervisor.set_aside(member, error)
                return
        self._read(located)

    def _runs_of(self, members: Iterable[Member]) -> list[Run]:
        """The queries that feed these tables, or will: those of other directories have nothing to do with them."""
        if self._source.one_stream:
            return self._all_runs()
        sources = {member.source for member in members}
        return [run for run in self._all_runs() if any(table.source in sources for table in run.stream.tables)]

    def _locate(self, members: Sequence[Member]) -> Sequence[Member]:
        """Find where tables that were just opened are read from; to be called between micro-batches, like the opening.

        From here on no micro-batch of a query that is to end begins: it has read past what these tables have had.
        """
        if members and self._source.one_stream and self._config.sink.trigger != "available-now":
            members = self._supervisor.working()
        # first, so that the query runs on if the source doesn't answer
        located = self._supervisor.locate(members) if members else ()
        if members and self._source.one_stream:
            for run in self._runs:
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

    def _start(self, stream: Stream) -> Run:
        trigger = self._config.sink.trigger
        writer = stream.frame.writeStream.queryName(f"rowdelta {stream.name}").option(
            "checkpointLocation", stream.checkpoint
        )
        writer = (
            writer.trigger(availableNow=True) if trigger == "available-now" else writer.trigger(processingTime=trigger)
        )
        run = Run(stream)
        run.query = writer.foreachBatch(self._apply(run)).start()
        return run

    def _end(self, run: Run) -> None:
        assert run.query is not None
        run.ending.set()
        run.query.stop()
        self._forget(run)

    def _forget(self, run: Run) -> None:
        """Let go of a query that has ended.

        It refers to us by its `foreachBatch` function, so if we refer to it neither the JVM's garbage collector nor
        Python's sees that nobody needs either: the query, its session and its threads would stay.
        """
        self._runs.remove(run)
        run.over, run.query = True, None
        self._ended = [other for other in (*self._ended, run) if other.idle.locked()]

    def _apply(self, run: Run) -> Callable[[DataFrame, int], None]:
        members = [self._supervisor.members[table.source] for table in run.stream.tables]

        def begin(frame: DataFrame, batch_id: int) -> None:
            self._supervisor.apply(run.stream, batch_id, frame)
            if self._supervisor.closed:
                raise _StoppedError  # tables may have been left out: Spark must not take this micro-batch for done
            if self._is_over() or not any(member.works for member in members):
                run.over = True
                raise next((member.error for member in members if member.error is not None), _StoppedError())

        def apply(frame: DataFrame, batch_id: int) -> None:
            with self._supervisor.turns, run.idle:
                if not (self._stopping or run.over or self._is_over()):
                    try:
                        begin(frame, batch_id)
                    except RowdeltaError as error:
                        run.error = error  # Spark passes on its text only
                        # Not the Java error that it may come from: if the query is ending, Spark searches the text of
                        # that by a regular expression which overflows the stack (`StreamExecution.PROXY_ERROR`).
                        raise error from None
                    except Exception as error:
                        run.error = error
                        raise
                    return
            # without a call to the JVM, which the query's end would interrupt: a Java error
            run.ending.wait(_END_SECONDS)
            raise _StoppedError

        return apply

    def _wait(self) -> None:
        retried = False
        while not self._stopping:
            for run in list(self._runs):
                # each in turn: a failed query must not go unnoticed behind one that runs on
                # and what follows the failure of one may end others
                if run in self._runs and self._has_ended(run) and run in self._runs:
                    self._forget(run)
            self._raise_if_over()
            if self._config.sink.trigger != "available-now":
                self._look_around()
            elif not self._runs:
                # what failed in passing may work now; what was rolled back does
                again = [member for member in self._supervisor.failed() if not retried or is_harmless(member.error)]
                if not again:
                    break
                retried = retried or not all(is_harmless(member.error) for member in again)
                self._reopen(again)
            if not self._runs:
                time.sleep(_POLL_SECONDS)
        with self._between_batches(self._all_runs()):
            self._raise_if_over()
            for run in self._runs:
                if run.error is not None and not run.over:
                    raise self._explain(run.error)

    def _has_ended(self, run: Run) -> bool:
        assert run.query is not None
        try:
            # fractions work, down to a millisecond
            seconds: Any = max(0.001, _POLL_SECONDS / len(self._runs))
            return bool(run.query.awaitTermination(seconds))
        except PySparkException as error:
            if run.over or self._is_over() or (self._stopping and run.error is None):
                return True  # the error of its tables, or `_StoppedError`, thrown while we waited
            failure = self._explain(run.error or error)
            if not self._stopping and self._goes_on_without(run, failure):
                return True
            raise failure from error
        except (Py4JError, OSError) as error:
            raise TemporaryError(
                f"the JVM went away: {error}. Every table is as its last commit left it; run again."
            ) from None

    def _goes_on_without(self, run: Run, failure: RowdeltaError) -> bool:
        """Whether a query failed because of some of its tables, as when a topic was deleted. They are set aside, the
        others go on.
        """
        members = [member for table in run.stream.tables if (member := self._supervisor.members[table.source]).works]
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
        if len(fine) == len(members):
            return False
        if not self._is_over():
            with self._between_batches(self._all_runs()):
                located = self._locate(fine)
            self._read(located)
        return True

    def _look_around(self) -> None:
        """Take in what appeared, and try again what failed a while ago."""
        now = time.monotonic()
        members = self._supervisor.due()
        new: list[Member] = []
        if self._has_patterns and now - self._looked_at >= self._config.source.discovery_seconds:
            self._looked_at = now
            try:
                new = self._supervisor.enter(find_tables(self._config, self._source), from_start=True)
            except TemporaryError as error:
                log.warning("can't look for new tables: %s", error)
            for member in new:
                log.info("found %s, for %s", member.source, member.target)
        if not members and not new:
            return
        self._reopen([*members, *new])

    def _is_over(self) -> bool:
        """Whether there is no reason to go on: a table failed and the others must stop too, or there are no others."""
        failed = self._supervisor.broken()
        if not failed:
            return False
        if self._config.sink.on_table_error == "stop" or len(failed) == len(self._supervisor.members):
            return True
        return any(isinstance(member.error, RowdeltaError) and member.error.stops_job for member in failed)

    def _raise_if_over(self) -> None:
        if self._is_over():
            raise self._failure(self._supervisor.broken())

    def _failure(self, failed: Sequence[Member]) -> RowdeltaError:
        """One error for all tables that failed, of the kind that most needs somebody's attention."""
        errors = [self._explain(member.error) for member in failed if member.error is not None]
        # what goes away by itself comes last
        errors.sort(key=lambda error: (not error.stops_job, isinstance(error, TemporaryError)))
        if len(errors) == 1:
            return errors[0]
        shown = "\n".join(f"  {error}" for error in errors[:10])
        more = f"\n  and {len(errors) - 10} more" if len(errors) > 10 else ""
        worst = next((kind for kind in _KINDS if isinstance(errors[0], kind)), RowdeltaError)
        return worst(
            f"{len(errors)} of {len(self._supervisor.members)} tables failed; each is as its last commit left "
            f"it:\n{shown}{more}"
        )

    def _quieten_spark(self) -> None:
        """Spark reports the interruption of a batch that hasn't begun as an error; it isn't one."""
        self._spark.sparkContext.setLogLevel("OFF")

    def _explain(self, error: BaseException) -> RowdeltaError:
        if isinstance(error, RowdeltaError):
            return error
        if not isinstance(error, (*JAVA_ERRORS, PySparkException, Py4JError, OSError)):
            return RowdeltaError(
                f"an unexpected error: {type(error).__name__}: {error}. Every table is as its last commit left it; "
                "please report it."
            )
        return TemporaryError(
            f"the stream failed: {summary(error)}. Every table is as its last commit left it; run again."
        )


_KINDS = (ConfigError, DataError, TableError, TemporaryError)


class _StoppedError(Exception):
    """The pipeline is stopping."""


def open_source(spark: SparkSession, config: Config, changelogs: dict[str, ChangelogSpec]) -> Source:
    """The configured source. `changelogs` by target name; files need them for their schema."""
    if config.source.type == "kafka":
        return KafkaSource(spark, config)
    return FilesSource(spark, config, changelogs)


@contextmanager
def stops_on_signals(spark: SparkSession, pipeline: Pipeline) -> Iterator[None]:
    """Ctrl-C and SIGTERM finish the micro-batch and stop. A second Ctrl-C interrupts at once, which is safe too.

    So does the JVM, which gets the signal under `spark-submit`, where it is the parent process, and of service managers
    that send it to all processes.
    """
    told = False

    def stop(signal_name: str) -> None:
        nonlocal told
        if not told:
            told = True
            log.info("%s: finishing the micro-batch, then stopping", signal_name)
        pipeline.stop()

    def handle(signum: int, _: FrameType | None) -> None:
        signal.signal(signal.SIGINT, previous[signal.SIGINT])
        stop(signal.Signals(signum).name)

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    in_jvm = _JvmSignals(spark, stop)
    try:
        in_jvm.register()
        yield
    finally:
        in_jvm.restore()
        for number, handler in previous.items():
            signal.signal(number, handler)


class _JvmSignals:
    """A Java `SignalHandler`. Without it the JVM begins to end at once, and Iceberg's threads refuse to commit the
    micro-batch.
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
            except JAVA_ERRORS as error:  # with its option -Xrs the JVM leaves signals to the system
                log.info("the JVM can't be told of SIG%s: %s", name, summary(error))

    def handle(self, received: JavaObject) -> None:
        """Signals stop the pipeline. A second Ctrl-C, or a signal that we send, ends the JVM."""
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
