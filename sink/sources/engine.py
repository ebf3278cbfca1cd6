"""Runs Debezium's engine, which appends a database's changes to the *buffer*: a folder that stands for Kafka.

The engine runs in a JVM of its own, with jars of its own. `Engine.java` is all of it that is ours. Java compiles no
source without a JDK, so Janino does it, which Spark brings along. A compiled copy would have to be compared with its
source, and to call Debezium from Python through py4j would take a round trip for each event.

The buffer has

- `topics/<topic>/<first offset>-<events>-<milliseconds>.tsv`: a segment, with a line for each event: its offset, the
  time, the key, the headers and the value. The last three are JSON, or empty.
- `error.txt`: why the engine has ended, until it works again
- `history.jsonl`: what connectors but Postgres' need to know of schemas over time
- `state.json`: `{"id": …, "ends": {topic: next offset}, "offsets": …, "begun": …, "events": {topic: number}, "history":
  bytes}`. What it says is in the buffer; the offsets are the engine's own. Of what has the offset `begun`, which comes
  next, the buffer has so many events already.

A batch of the engine is a segment for each of its topics. They are made durable first, and then, by one rename, the
state with their ends and the engine's offset. So the offset is never ahead of the events, nor behind: segments beyond
the ends are removed when the engine starts, and nobody has read them, and so is what the history has more. Each event
is in the buffer once. Only then Postgres hears of the offset.

The engine rolls segments by size and time as it makes batches, by `max.batch.size` and `poll.interval.ms`. It gets its
properties, with the passwords, by a pipe: they are in no file and no command line. When the pipe is closed, it ends,
also if the sink was killed.
"""

import fcntl
import hashlib
import json
import logging
import os
import re
import socket
import subprocess
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from pyspark.sql import SparkSession

from sink.config import Config
from sink.config.job_sections import POSTGRES
from sink.errors import ConfigError, RowdeltaError, TemporaryError
from sink.redaction import masked
from sink.spark import cache, jars
from sink.spark import versions as spark_versions
from sink.spark.java_errors import JAVA_ERRORS, java_message

log = logging.getLogger("rowdelta")

_VERSION = "3.6.1.Final"
_VERSIONS = {"mysql": "3.5.0.Final", "mariadb": "3.5.0.Final"}
"""Connector -> another version of Debezium, with which it was tried."""
_DEFAULTS = {
    # with its schema a message tells the exact types of its columns
    "key.converter.schemas.enable": "false",
    "value.converter.schemas.enable": "true",
    "poll.interval.ms": "500",
    "max.batch.size": "8192",
    "max.queue.size": "32768",
    # a batch of wide rows has to fit into memory several times
    "max.queue.size.in.bytes": "67108864",
    "include.schema.changes": "false",
}
"""Unless the configuration has others."""
_DEFAULTS_OF_POSTGRES = {
    "plugin.name": "pgoutput",
    # So that the database can remove its log also if only other tables change: the connector hears nothing of these,
    # and a heartbeat alone confirms nothing. `Engine.java` leaves out what begins so.
    "heartbeat.interval.ms": "10000",
    "heartbeat.action.query": "SELECT pg_logical_emit_message(true, 'rowdelta-mark-', '')",
}
_DEFAULTS_OF_OTHERS = {"heartbeat.interval.ms": "1000"}  # by which it is known how far the connector is
_OWN_OF_OTHERS = {
    "schema.history.internal": "Engine$History",
    # MySQL's would begin a transaction again in the same process. The server sends its heartbeats in this interval
    "connect.keep.alive": "false",
    "connect.keep.alive.interval.ms": "1000",
}
LAST_ERROR = "error.txt"
"""The file of the buffer that says why the engine has ended, until it works again."""
_SHOWN_LINES = 5
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
_END_SECONDS = 10.0
_ATTEMPTS = 3
"""So often a run that ends by itself starts an engine that the database doesn't answer."""
_LOOK_SECONDS = 0.2
_TELL_SECONDS = 30.0
_PASSING = re.compile(
    "refused|timed? ?out|terminat|reset|closed|shutting down|starting up|recovery|unreachable|unknown ?host|no route"
    "|is active for|too many|i/o error|can't be written|no space|out ?of ?memory|link failure",
    re.IGNORECASE,
)
"""Fits errors after which another attempt may work."""
_LOST = re.compile("purged|no longer available on the server|could not find first log", re.IGNORECASE)
"""Fits errors of a binlog that lacks what comes next."""


class Engine:
    """The engine's process, which is started again when it ends.

    :param spark: its Ivy finds the engine's jars.
    """

    def __init__(self, spark: SparkSession, config: Config) -> None:
        assert config.source.buffer is not None
        self._config = config
        self._buffer = Path(config.source.buffer)
        self._spark = spark
        self._process: subprocess.Popen[str] | None = None
        self._ending = threading.Event()
        self._polled = self._is_restarting = False
        self.is_reading, self.failures, self.reason = False, 0, ""
        """Whether it reads the database's log, how often it has ended by itself, and why, until it reads again."""
        self._error: RowdeltaError | None = None
        self._lock = threading.Lock()
        self._marks = dict[str, threading.Event]()
        """Marks that a process is to put into the database's log, and whether they came out of it."""
        self._thread = threading.Thread(target=self._run, name="rowdelta-engine", daemon=True)

    def catch_up(self, stopping: Callable[[], bool] = lambda: False) -> bool:
        """Wait until the buffer has all that is in the database's log at the moment. What comes into the log later
        will be there too. Returns False if it was stopped before.

        :raises RowdeltaError: why it can't.
        """
        mark, came, told_at = uuid4().hex, threading.Event(), time.monotonic()
        with self._lock:
            self._marks[mark] = came
            self._send(mark)
        try:
            while not came.wait(_LOOK_SECONDS):
                self.raise_error()
                if stopping():
                    return False
                if time.monotonic() - told_at > _TELL_SECONDS:
                    told_at = time.monotonic()
                    log.info("waiting until Debezium's engine has read the database's log to its end")
            return True
        finally:
            with self._lock:
                del self._marks[mark]

    def restart(self) -> None:
        """Let the connector look which tables there are, and add new ones to its publication."""
        self._is_restarting = True
        self._close()

    def start(self) -> None:
        """Run until `stop`."""
        self._thread.start()

    def raise_error(self) -> None:
        """:raises RowdeltaError: the engine has ended, and another attempt makes no sense."""
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        self._ending.set()
        self._close()
        if self._thread.ident is not None:
            self._thread.join(2 * _END_SECONDS)

    def _run(self) -> None:
        pause, failures = _FIRST_PAUSE, 0
        attempts = _ATTEMPTS if self._config.sink.trigger == "available-now" else None
        try:
            command = self._command()
            while True:
                began, had_polled = time.monotonic(), self._polled
                self._polled = False
                error = self._run_once(command)
                if self._ending.is_set():
                    return
                if self._is_restarting:
                    self._is_restarting = False
                    continue
                has_worked = time.monotonic() - began > _LONGEST_PAUSE
                failures = 0 if has_worked else failures + 1
                # one that has worked is tried once more, whatever it says
                is_hopeless = not isinstance(error, TemporaryError) and not self._polled and not had_polled
                if is_hopeless or failures == attempts:
                    raise error
                pause = _FIRST_PAUSE if has_worked else min(2 * pause, _LONGEST_PAUSE)
                log.warning("%s Debezium's engine is started again in %.0f s.", error, pause)
                if self._ending.wait(pause):
                    return
        except RowdeltaError as error:
            self._error = error
        except OSError as error:
            self._error = TemporaryError(f"source.buffer: Debezium's engine can't run: {error}. Run again.")
        except Exception as error:  # noqa: BLE001 - without its thread, the run would wait for ever
            self._error = RowdeltaError(f"an unexpected error of the engine's thread: {type(error).__name__}: {error}")

    def _run_once(self, command: Sequence[str]) -> RowdeltaError:
        """Run one process to its end. Returns why it ended, unless `stop` did it."""
        self._buffer.mkdir(mode=0o700, parents=True, exist_ok=True)
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # Ctrl-C is for the sink, which stops it
        )
        with self._lock:
            self._process = process
            for line in (json.dumps(self._properties()), *self._marks):
                self._send(line)
        if self._ending.is_set():
            self._close()
        assert process.stdout is not None
        assert process.stderr is not None
        complaints, reason = deque[str](maxlen=_SHOWN_LINES), ""
        reader = threading.Thread(target=_keep_errors, args=(process.stderr, complaints), daemon=True)
        reader.start()
        try:
            for line in process.stdout:
                what, _, rest = line.strip().partition(" ")
                if what == "polling":
                    self._polled = self.is_reading = True
                    self.reason = ""
                    (self._buffer / LAST_ERROR).unlink(missing_ok=True)
                    log.info("Debezium's engine reads the database's log into %s", self._buffer)
                elif what == "waiting":
                    log.warning("another run has source.buffer %s: waiting until it has ended", self._buffer)
                elif what == "failed":
                    reason = json.loads(rest)
                elif what == "Terminating":  # the JVM's own words: out of memory
                    reason = line.strip()
                elif what == "caught":
                    with self._lock:
                        if rest in self._marks:
                            self._marks[rest].set()
        finally:
            self.is_reading = False
            self._close()
            reader.join(_END_SECONDS)
            process.stdout.close()
            process.stderr.close()
        text = masked("; ".join(dict.fromkeys([reason, *complaints]) if reason else complaints))
        text = f"source.connector: Debezium's engine has ended: {text or f'exit code {process.returncode}'}."
        if not (self._ending.is_set() or self._is_restarting):
            self.failures, self.reason = self.failures + 1, text
            (self._buffer / LAST_ERROR).write_text(text, encoding="utf-8")
        is_killed = process.returncode < 0
        if _LOST.search(text):
            return ConfigError(f"{text} Changes are lost. Take a new snapshot: docs/without-kafka.md says how.")
        # a JDBC URL has names of timeouts
        if self._polled or is_killed or _PASSING.search(re.sub(r"jdbc:\S+", "", text)):
            return TemporaryError(text)
        return ConfigError(f"{text} Correct source.connector, or the database.")

    def _send(self, line: str) -> None:
        """Send a line to the process. If it has ended, it says why, and the next one gets all lines."""
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError, ValueError):
                self._process.stdin.write(line + "\n")
                self._process.stdin.flush()

    def _close(self) -> None:
        """Have the process end soon."""
        process = self._process
        if process is not None and process.stdin is not None:
            with suppress(OSError):
                process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)
                return
            process.kill()
            process.wait()

    def _properties(self) -> dict[str, str]:
        own = {
            "name": "rowdelta",  # the offset belongs to the buffer, whatever sink.id is
            "offset.storage": "Engine$Store",
            # a connector that starts again by itself would send again what the buffer has
            "errors.max.retries": "0",
            "key.converter.replace.null.with.default": "false",
            "value.converter.replace.null.with.default": "false",
            "rowdelta.buffer": str(self._buffer),
        }
        if self._config.load.auto:
            own["snapshot.mode"] = "no_data"
        is_postgres = self._config.source.connector["connector.class"] == POSTGRES
        # of all that read a binlog; the server lets go of a process that was killed when the next one comes with its id
        server_id = {"database.server.id": str(1 + zlib.crc32(f"{socket.gethostname()}:{self._buffer}".encode()))}
        defaults = _DEFAULTS | (_DEFAULTS_OF_POSTGRES if is_postgres else _DEFAULTS_OF_OTHERS | server_id)
        return defaults | self._config.source.connector | ({} if is_postgres else _OWN_OF_OTHERS) | own

    def _command(self) -> list[str]:
        home = spark_versions.home() / "jars"
        compiler = [*home.glob("janino-*.jar"), *home.glob("commons-compiler-*.jar")]
        classpath = [*compiler, *_jars(self._spark, _packages(self._config.source.connector["connector.class"]))]
        java = str(Path(os.environ["JAVA_HOME"], "bin", "java")) if "JAVA_HOME" in os.environ else "java"
        return [
            *(java, "-Xmx1g", "-XX:+UseSerialGC", "-XX:+ExitOnOutOfMemoryError"),
            "-Dorg.slf4j.simpleLogger.defaultLogLevel=error",
            "-Dorg.slf4j.simpleLogger.showThreadName=false",
            "-Dorg.slf4j.simpleLogger.showLogName=false",
            "-Dorg.codehaus.janino.UnitCompiler.defaultTargetVersion=8",  # with calls of static methods of interfaces
            *("-cp", os.pathsep.join(map(str, classpath))),
            "org.codehaus.janino.JavaSourceClassLoader",
            *("-sourcepath", str(Path(__file__).parent), "Engine"),
        ]


def is_running(buffer: Path) -> bool:
    """Whether an engine has a buffer at the moment."""
    with suppress(FileNotFoundError), (buffer / "lock").open("r+") as opened:
        try:
            fcntl.lockf(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def _keep_errors(lines: Iterator[str], kept: deque[str]) -> None:
    """Keep what says why: errors of the log, and their causes without the stacks."""
    for line in lines:
        found = re.match(
            r"(?:ERROR |(?:Caused by|Exception in thread \"\w+\"): ?|[\w.]+(?:Exception|Error): )(.*)", line
        )
        if found is not None:
            kept.append(found[1].strip())


def _packages(connector: str) -> tuple[str, ...]:
    """Maven coordinates of what the engine needs.

    :param connector: the connector's class, such as `io.debezium.connector.mysql.MySqlConnector`.
    """
    kind = connector.split(".")[3].replace("postgresql", "postgres")
    version = _VERSIONS.get(kind, _VERSION)
    return (
        f"io.debezium:debezium-embedded:{version}",
        f"io.debezium:debezium-connector-{kind}:{version}",
        "org.slf4j:slf4j-simple:1.7.36",  # or the connector's errors would be nowhere
    )


def _jars(spark: SparkSession, packages: Sequence[str]) -> list[str]:
    """The engine's jars. Spark's Ivy finds them as it does all others, with the same settings, and they are remembered.

    :raises TemporaryError: they can't be downloaded.
    """
    folder = cache.folder("jars")
    name = hashlib.sha256(json.dumps([*packages, str(Path.home())]).encode()).hexdigest()[:32]
    record = None if folder is None else folder / f"engine-{name}.json"
    with suppress(OSError, ValueError, TypeError):
        if record is not None:
            known = [jars.Jar(**jar) for jar in json.loads(record.read_text())]
            if all(jars.stamp(jar.path) == jar for jar in known):
                return [jar.path for jar in known]
    log.info("downloading Debezium's engine: %s", ", ".join(packages))
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    found = dict[str, None]()
    for each in packages:
        uri = jvm.java.net.URI.create(f"ivy://{each}")
        try:
            resolved = jvm.org.apache.spark.util.DependencyUtils.resolveMavenDependencies(uri)
        except JAVA_ERRORS as error:
            raise TemporaryError(
                f"source.type: {each} can't be downloaded: {java_message(error)}. Run again."
            ) from None
        found |= dict.fromkeys(str(resolved.mkString("\n")).split("\n"))
    if record is not None:
        cache.write(record, json.dumps([vars(jars.stamp(path)) for path in found]))
    return list(found)
