"""What a process and all that came of it cost: CPU time, memory, open files, bytes written. Linux only, from /proc."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Self

import numpy as np

_PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK")
_SAMPLE_SECONDS = 0.5
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


@dataclass
class PeakMemory:
    """The highest use of memory of a process and its descendants while this context lasts. It is sampled."""

    pid: int
    bytes: int = 0
    _end: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._thread is not None
        self._end.set()
        self._thread.join()

    def _sample(self) -> None:
        while True:
            self.bytes = max(self.bytes, memory_bytes(tree(self.pid)))
            if self._end.wait(_SAMPLE_SECONDS):
                return


class FolderGrowth:
    """The bytes of files that come into a folder. A file that comes and goes between two looks is not seen."""

    def __init__(self, folder: Path, counts: Callable[[Path], bool] = lambda _: True) -> None:
        self._folder = folder
        self._counts = counts
        self._known: dict[Path, int] = {}
        self.look()

    def look(self) -> int:
        """Bytes of the files that are new since the last look, and what others have grown by."""
        found = sizes(self._folder, self._counts)
        new = sum(max(0, size - self._known.get(path, 0)) for path, size in found.items())
        self._known = found
        return new


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
