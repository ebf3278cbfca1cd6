"""What a process and all that came of it cost: CPU time, memory, open files, bytes written. Linux only, from /proc."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Self

import numpy as np
from pyspark.sql import SparkSession

_PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK")
_GONE = (FileNotFoundError, ProcessLookupError, PermissionError)


@dataclass(frozen=True)
class _Stat:
    pid: int
    parent: int
    cpu_seconds: float
    """Its own, and that of its children that have ended and were waited for."""


def _stat(pid: int) -> _Stat | None:
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except _GONE:
        return None
    fields = text[text.rindex(")") + 2 :].split()  # a program's name may have spaces and parentheses
    return _Stat(pid, int(fields[1]), sum(int(ticks) for ticks in fields[11:15]) / _TICKS)


def cpu_clock(spark: SparkSession) -> int:
    """For `time.clock_gettime`: the CPU time of the session's JVM."""
    jvm: Any = spark.sparkContext._jvm
    pid = int(jvm.java.lang.ProcessHandle.current().pid())
    return (~pid << 3) | 2  # of a process: clock_getcpuclockid(3)


def tree(pid: int) -> list[int]:
    """The process and its descendants that are alive."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir(_PROC):
        if entry.isdigit() and (stat := _stat(int(entry))) is not None:
            children.setdefault(stat.parent, []).append(stat.pid)
    found, ahead = [], [pid]
    while ahead:
        found.append(ahead.pop())
        ahead += children.get(found[-1], ())
    return found


def cpu_seconds(pids: Iterable[int]) -> float:
    """CPU time that these processes have used, with that of children of theirs that have ended."""
    return sum(stat.cpu_seconds for pid in pids if (stat := _stat(pid)) is not None)


def memory_bytes(pids: Iterable[int]) -> int:
    """Resident memory. What several of them share counts once."""
    return sum(_figure(_PROC / str(pid) / "smaps_rollup", "Pss:") * 1024 for pid in pids)


def written_bytes(pids: Iterable[int]) -> int:
    """Bytes that they have sent to storage, with checkpoints and files of the shuffle."""
    return sum(_figure(_PROC / str(pid) / "io", "write_bytes:") for pid in pids)


def open_files(pids: Iterable[int]) -> int:
    count = 0
    for pid in pids:
        with suppress(*_GONE):
            count += len(os.listdir(_PROC / str(pid) / "fd"))
    return count


def command_of(pid: int) -> str:
    with suppress(*_GONE):
        return (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


def _figure(file: Path, name: str) -> int:
    with suppress(*_GONE):
        for line in file.read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1])
    return 0


class Sampled:
    """Looks at something every few seconds while this context lasts, and at its end."""

    seconds = 0.5

    def __init__(self) -> None:
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        ended = False
        while not ended:
            ended = self._end.wait(self.seconds)
            self.sample()

    def sample(self) -> None:
        raise NotImplementedError


class PeakMemory(Sampled):
    """The highest use of memory of a process and its descendants while this context lasts."""

    def __init__(self, pid: int) -> None:
        super().__init__()
        self._pid = pid
        self.bytes = 0

    def sample(self) -> None:
        self.bytes = max(self.bytes, memory_bytes(tree(self._pid)))


class FolderGrowth(Sampled):
    """The bytes of files that come into folders while this context lasts, also of those that are gone by its end. A
    file that comes and goes between two samples is not seen.
    """

    seconds = 0.05

    def __init__(self, *folders: Path) -> None:
        super().__init__()
        self._folders = folders
        self._known: dict[Path, int] = {}
        self._before: dict[Path, int] = {}

    def __enter__(self) -> Self:
        self.sample()
        self._before = dict(self._known)
        return super().__enter__()

    def sample(self) -> None:
        for folder in self._folders:
            for path, size in sizes(folder).items():
                self._known[path] = max(size, self._known.get(path, 0))

    @property
    def files(self) -> dict[Path, int]:
        """The files that came, or have grown, and by how much."""
        grown = {path: size - self._before.get(path, 0) for path, size in self._known.copy().items()}
        return {path: size for path, size in grown.items() if size}


def sizes(folder: Path, counts: Callable[[Path], bool] = lambda _: True) -> dict[Path, int]:
    """The files below a folder, with their sizes. Files may go while they are listed."""
    found = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            if counts(path):
                with suppress(FileNotFoundError):
                    found[path] = path.stat().st_size
    return found


def machine_seconds() -> float:
    """How long the same small piece of work takes now, on one core. It says how busy the machine is."""
    numbers = np.random.default_rng(1).integers(0, 1 << 62, 1_500_000)
    started = perf_counter()
    np.sort(numbers)
    return perf_counter() - started


def commit() -> str:
    """The commit of the repository from which this runs."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def own_environment() -> dict[str, str]:
    """The environment for a child with a Spark session of its own: what a session of this process has set must not leak
    into it.
    """
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name == "SPARK_SUBMIT_OPTS" or not name.startswith(("PYSPARK", "SPARK"))
    }
    return inherited | {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
