"""The processes that write tables. Each is asked in lines of text, and answers with the seconds of each micro-batch.

A peer has a process of its own for each changelog, so that its CPU time and memory are known. It writes a small table
first, so that what is measured finds it warm.
"""

import json
import os
import selectors
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import Any, Protocol, Self

from benchmarks.peers.cases import Changelog, Format, Peer
from benchmarks.processes import own_environment
from tests.stack.jars import cache_folder, jars
from tests.stack.process import java_command

HERE = Path(__file__).parent
MEMORY = "4g"
"""The largest heap of each JVM."""
CORES = 2
DATABASE = "db"
_SECONDS = 3600
_TAIL = 3000
# what Flink's serializers look at
_OPENED = ("java.util", "java.lang", "java.net", "java.time", "java.nio", "sun.nio.ch", "java.util.concurrent")


class WriterError(RuntimeError):
    """A process said that it failed, or ended."""


class RefusedError(WriterError):
    """What was asked is something that this peer doesn't do. The message says why."""


class Asked:
    """A process that answers each line with a line that begins with `@`. What else it prints goes to its log."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._log = log
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=own_environment(),
                cwd=HERE.parents[1],
            )
        assert self._process.stdout is not None
        self._unread = b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._process.stdout, selectors.EVENT_READ)

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._selector.close()
        try:
            self._process.stdin.close()
            self._process.wait(60)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def ask(self, line: str) -> str:
        """Send a line, and return the answer without its `@`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        deadline = monotonic() + _SECONDS
        while True:
            found, newline, rest = self._unread.partition(b"\n")
            if newline:
                self._unread = rest
                if found.startswith(b"@"):
                    return found[1:].decode()
                continue
            if not self._selector.select(max(0, deadline - monotonic())):
                raise WriterError(f"no answer within {_SECONDS} s to {line[:200]}")
            assert self._process.stdout is not None
            more = os.read(self._process.stdout.fileno(), 1 << 16)
            if not more:
                raise self._ended()
            self._unread += more

    def _ended(self) -> WriterError:
        return WriterError(f"the process has ended: {self._log.read_text(errors='replace')[-_TAIL:]}")


class PythonProgram(Asked):
    """A module of this package that speaks JSON."""

    def __init__(self, module: str, log: Path, *arguments: str) -> None:
        super().__init__([sys.executable, "-m", module, *arguments], log)

    def tell(self, verb: str, **values: Any) -> dict[str, Any]:
        """:raises RefusedError: the program doesn't do this.
        :raises WriterError: it failed.
        """
        answer: dict[str, Any] = json.loads(self.ask(json.dumps({"do": verb, **values})))
        if "refused" in answer:
            raise RefusedError(answer["refused"])
        if "error" in answer:
            raise WriterError(answer["error"])
        return answer


class Writer(Protocol):
    """Writes tables, one after another."""

    @property
    def pid(self) -> int: ...

    def open(self, table: str, changelog: Changelog) -> None:
        """Begin with a table, which doesn't exist."""

    def load(self, files: Sequence[Path]) -> float:
        """Write the first load. Returns its seconds."""

    def apply(self, batches: Sequence[Sequence[Path]]) -> list[float]:
        """Write micro-batches, and return the seconds of each."""

    def settle(self) -> float:
        """Wait until nothing works on the table any more. Returns the seconds."""

    def leave(self) -> None:
        """No more is written to this table."""


class SparkWriter:
    """rowdelta or `MERGE INTO`; see `benchmarks.peers.spark_writer`."""

    def __init__(self, program: PythonProgram) -> None:
        self._program = program

    @property
    def pid(self) -> int:
        return self._program.pid

    def open(self, table: str, changelog: Changelog) -> None:
        self._program.tell("open", table=table, changelog=asdict(changelog))

    def load(self, files: Sequence[Path]) -> float:
        return float(self._program.tell("load", files=[str(file) for file in files])["seconds"])

    def apply(self, batches: Sequence[Sequence[Path]]) -> list[float]:
        answer = self._program.tell("apply", batches=[[str(file) for file in files] for files in batches])
        return [float(seconds) for seconds in answer["seconds"]]

    def settle(self) -> float:
        return 0.0

    def leave(self) -> None:
        pass


class FlinkWriter:
    """Flink's Iceberg sink; see `FlinkUpserts.java`. Its table is created and loaded by Spark: its upserts would write
    an equality delete for each row of the load too.
    """

    def __init__(self, program: Asked, peer: Peer, work: Path, loader: PythonProgram) -> None:
        self._program, self._peer, self._work, self._loader = program, peer, work, loader
        self._table: tuple[str, Changelog] | None = None
        self._states = 0

    @property
    def pid(self) -> int:
        return self._program.pid

    def open(self, table: str, changelog: Changelog) -> None:
        self._table = (table, changelog)

    def load(self, files: Sequence[Path]) -> float:
        assert self._table is not None
        table, changelog = self._table
        answer = self._loader.tell(
            "create",
            table=table,
            changelog=asdict(changelog),
            version=self._peer.format.removeprefix("v"),
            files=[str(file) for file in files],
        )
        self._states += 1
        state = self._work / f"state-{self._states}"
        state.mkdir(parents=True)
        # its upsert mode refuses a partition's column that is not in the key
        form = "changelog" if changelog.partitioning == "day" else "upsert"
        self._ask("start", str(answer["location"]), str(state), form, self._peer.maintenance or "none")
        return float(answer["seconds"])

    def apply(self, batches: Sequence[Sequence[Path]]) -> list[float]:
        return [float(self._ask("batch", *map(str, files))) for files in batches]

    def settle(self) -> float:
        return float(self._ask("settle", "120"))

    def leave(self) -> None:
        if self._table is not None:
            self._ask("stop")
            self._table = None

    def _ask(self, *words: str) -> str:
        state, _, answer = self._program.ask("\t".join(words)).partition("\t")
        if state != "ok":
            raise WriterError(answer)
        return answer


def flink_program(log: Path) -> Asked:
    """Start Flink.

    :raises RefusedError: this machine has no Java compiler, or its jars can't be had.
    """
    java = java_command()
    compiler = shutil.which("javac", path=str(Path(java).parent)) or shutil.which("javac")
    if compiler is None:
        raise RefusedError("there is no javac: Flink's program has to be compiled, which needs a JDK")
    try:
        path = os.pathsep.join(str(jar) for jar in jars(HERE / "ivy-flink.xml"))
    except RuntimeError as error:
        raise RefusedError(f"Flink's jars can't be had: {error}") from error
    source = HERE / "FlinkUpserts.java"
    classes = cache_folder() / "flink-upserts"
    compiled = classes / "FlinkUpserts.class"
    if not compiled.exists() or compiled.stat().st_mtime < source.stat().st_mtime:
        classes.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            [compiler, "-nowarn", "-proc:none", "-cp", path, "-d", str(classes), str(source)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise WriterError(done.stdout + done.stderr)
    opened = [f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in _OPENED]
    command = [java, f"-Xmx{MEMORY}", "-XX:ActiveProcessorCount=2", *opened]
    command += ["-Dorg.slf4j.simpleLogger.defaultLogLevel=error", "-cp", f"{classes}{os.pathsep}{path}", "FlinkUpserts"]
    return Asked(command, log)


def location_of(warehouse: Path, table: str) -> Path:
    """The folder of a table."""
    return warehouse / DATABASE / table


def kind_of(format_: Format) -> str:
    """The kind of catalog."""
    return "delta" if format_ == "delta" else "iceberg"
