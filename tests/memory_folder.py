"""A folder in memory for the temporary files of one run of the tests."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MEMORY = Path("/dev/shm")
_ROOM = 4 << 30
"""Bytes that must be free there; a run of all tests takes less than a quarter of it."""
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Where a container reads how much memory it may use."""
_PREFIX = "rowdelta-pytest-"


@dataclass(frozen=True)
class MemoryFolder:
    """A folder that no other run removes.

    :param lock: the open folder. It is locked until it is closed, at the latest when the process ends. A process id
        would say nothing about a run in another container.
    """

    path: Path
    lock: int


def claim(memory: Path = MEMORY) -> MemoryFolder:
    """A new folder."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=memory))
        with suppress(FileNotFoundError):  # until it is locked, another run may remove it
            lock = _opened(path)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():
                return MemoryFolder(path, lock)
            os.close(lock)


def remove_left(memory: Path = MEMORY) -> None:
    """Remove the folders that were kept, or left behind by processes that were killed."""
    for left in memory.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # it is another user's, or is being removed
            lock = _opened(left)
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
            os.close(lock)


def has_room(memory: Path = MEMORY, limits: Iterable[Path] = _LIMITS) -> bool:
    """Whether the temporary files of a run have room there, and the JVMs beside them."""
    found = os.statvfs(memory)
    is_usable = found.f_bavail * found.f_frsize >= _ROOM and not found.f_flag & os.ST_NOEXEC
    return is_usable and all(limit >= 2 * _ROOM for limit in _known(limits))


def _known(limits: Iterable[Path]) -> Iterable[int]:
    for path in limits:
        with suppress(OSError, ValueError):  # there is no such file, or it says "max"
            yield int(path.read_text())


def _opened(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
