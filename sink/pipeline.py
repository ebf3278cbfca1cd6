"""Runs the job: opens the tables, starts the streaming queries, and stops between micro-batches when asked to."""

import logging
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import ClassVar

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from changelog.spec import ChangelogSpec
from sink.config import Config
from sink.dead_letters import open_dead_letters
from sink.errors import RowdeltaError, TemporaryError
from sink.microbatch import TableSink
from sink.sources.files import FilesSource
from sink.sources.kafka import KafkaSource
from sink.sources.source import Source, Stream
from sink.tables import open_table

log = logging.getLogger("rowdelta")

_POLL_SECONDS = 0.2


class Pipeline:
    """All tables of a configuration. `run` returns when the source is exhausted (`available-now`) or `stop` was called."""

    def __init__(self, spark: SparkSession, config: Config) -> None:
        self._spark = spark
        self._config = config
        self._stopping = threading.Event()
        self._between_batches = threading.Lock()
        self._failure: BaseException | None = None
        opened = [open_table(spark, config, index) for index in range(len(config.tables))]
        dead_letters = open_dead_letters(spark, config) if config.sink.on_bad_record == "dead-letter" else None
        self._source = open_source(spark, config, {plan.section.target: plan.changelog for _, plan in opened})
        self._sinks = {
            plan.section.target: TableSink(config, index, table, plan, self._source, dead_letters)
            for index, (table, plan) in enumerate(opened)
        }

    def run(self) -> None:
        """Apply what the source has, micro-batch by micro-batch.

        :raises RowdeltaError: says what happened and what to do; every table is as its last commit left it.
        """
        streams = self._source.streams({target: sink.position for target, sink in self._sinks.items()})
        for sink in self._sinks.values():
            sink.remember_start(self._source.start_position(sink.plan.section))
        queries = [self._start(stream) for stream in streams]
        try:
            self._wait(queries)
        finally:
            # the JVM may have gone; what ended the run matters more
            with suppress(Py4JError, OSError):
                for query in queries:
                    query.stop()

    def stop(self) -> None:
        """Finish the micro-batch in progress, then stop. Safe to call from a signal handler, more than once."""
        self._stopping.set()

    def _start(self, stream: Stream) -> StreamingQuery:
        trigger = self._config.sink.trigger
        writer = stream.frame.writeStream.queryName(f"rowdelta {stream.name}").option(
            "checkpointLocation", stream.checkpoint
        )
        writer = (
            writer.trigger(availableNow=True) if trigger == "available-now" else writer.trigger(processingTime=trigger)
        )
        return writer.foreachBatch(self._apply(stream)).start()

    def _apply(self, stream: Stream) -> Callable[[DataFrame, int], None]:
        sinks = [self._sinks[table.target] for table in stream.tables]

        def apply(frame: DataFrame, batch_id: int) -> None:
            with self._between_batches:
                if self._stopping.is_set():
                    self._quieten_spark()
                    raise _Stopped
                shared = len(sinks) > 1
                if shared:
                    frame.persist()
                try:
                    for sink in sinks:
                        sink.apply(stream, batch_id, frame)
                except BaseException as error:
                    self._failure = self._failure or error
                    raise
                finally:
                    if shared:
                        frame.unpersist()

        return apply

    def _wait(self, queries: Sequence[StreamingQuery]) -> None:
        running = list(queries)
        while running and not self._stopping.is_set():
            try:
                # each in turn: a failed query must not go unnoticed behind one that runs on
                ended = [query for query in running if query.awaitTermination(_POLL_SECONDS / len(running))]  # type: ignore[arg-type]  # fractions work
            except PySparkException as error:
                if self._stopping.is_set() and self._failure is None:
                    break  # `_Stopped`, thrown while we waited
                raise self._explain(error) from error
            except (Py4JError, OSError) as error:
                raise TemporaryError(
                    f"the JVM went away: {error}. Every table is as its last commit left it; run again."
                ) from None
            running = [query for query in running if query not in ended]
        with self._between_batches:
            if self._failure is not None:
                raise self._explain(self._failure)
        if running:
            self._quieten_spark()

    def _quieten_spark(self) -> None:
        """Spark reports the interruption of a batch that hasn't begun as an error; it isn't one."""
        self._spark.sparkContext.setLogLevel("OFF")

    def _explain(self, error: BaseException) -> RowdeltaError:
        cause = self._failure or error
        if isinstance(cause, RowdeltaError):
            return cause
        text = str(cause).strip()
        lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("at ")]
        return TemporaryError(
            f"the stream failed: {' '.join(lines[:3])[:800]}. Every table is as its last commit left it; run again."
        )


class _Stopped(Exception):  # noqa: N818 - ends a micro-batch that hasn't begun
    """The pipeline is stopping."""


def open_source(spark: SparkSession, config: Config, changelogs: dict[str, ChangelogSpec]) -> Source:
    """The configured source. `changelogs` by target name; files need them for their schema."""
    if config.source.type == "kafka":
        return KafkaSource(spark, config)
    return FilesSource(spark, config, changelogs)


@contextmanager
def stops_on_signals(spark: SparkSession, pipeline: Pipeline) -> Iterator[None]:
    """Ctrl-C and SIGTERM finish the micro-batch and stop. A second Ctrl-C interrupts at once, which is safe too.

    Under `spark-submit` the JVM is the parent process and gets the signal. There a shutdown hook, which Hadoop runs before Spark's
    own, makes it wait for the pipeline.
    """
    finished = threading.Event()

    def handle(signum: int, _: FrameType | None) -> None:
        log.info("%s: finishing the micro-batch, then stopping", signal.Signals(signum).name)
        pipeline.stop()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    hook = _ShutdownHook(spark, pipeline, finished)
    try:
        yield
    finally:
        hook.remove()
        finished.set()
        for number, handler in previous.items():
            signal.signal(number, handler)


class _ShutdownHook:
    """A Java `Runnable` that the JVM runs when it is told to end: stops the pipeline and waits until it has."""

    _PRIORITY = 100  # Spark's own hook has 50; higher ones run first
    _WAIT_SECONDS = 300

    class Java:
        implements: ClassVar[list[str]] = ["java.lang.Runnable"]

    def __init__(self, spark: SparkSession, pipeline: Pipeline, finished: threading.Event) -> None:
        from pyspark.java_gateway import ensure_callback_server_started

        gateway = spark.sparkContext._gateway
        assert gateway is not None
        ensure_callback_server_started(gateway)  # type: ignore[no-untyped-call]
        self._pipeline = pipeline
        self._finished = finished
        jvm = spark.sparkContext._jvm
        assert jvm is not None
        self._manager = jvm.org.apache.hadoop.util.ShutdownHookManager.get()
        seconds = jvm.java.util.concurrent.TimeUnit.SECONDS
        # the manager keeps hooks in a hash set: a Java thread around us has the hashCode that we lack
        self._hook = jvm.java.lang.Thread(self)
        self._manager.addShutdownHook(self._hook, self._PRIORITY, self._WAIT_SECONDS, seconds)

    def run(self) -> None:
        log.info("the JVM was told to end: finishing the micro-batch, then stopping")
        self._pipeline.stop()
        self._finished.wait(self._WAIT_SECONDS)

    def remove(self) -> None:
        # a JVM that ends just now refuses, and one that has ended doesn't answer
        with suppress(Py4JError, OSError):
            if not self._manager.isShutdownInProgress():
                self._manager.removeShutdownHook(self._hook)
