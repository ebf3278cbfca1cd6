"""A mark that a sink runs. Other processes of the machine see it, if the checkpoint is on a local disk."""

import fcntl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from sink.config import Config
from sink.config.local_paths import local_path
from sink.errors import TableError, TemporaryError


@contextmanager
def marked(config: Config) -> Iterator[None]:
    """The sink runs inside this context. Several of its runs may; they see each other by the tables' positions.

    :raises TemporaryError: one of its tables is being reset.
    """
    with ExitStack() as stack:
        file = _opened(config, stack)
        if file is not None and not _is_locked(file, fcntl.LOCK_SH):
            raise TemporaryError(f"a table of sink {config.sink.id!r} is being reset. Run again when that is done.")
        yield


@contextmanager
def idle(config: Config) -> Iterator[None]:
    """No run of the sink begins inside this context, as far as the mark tells.

    :raises TableError: the sink runs.
    """
    with ExitStack() as stack:
        file = _opened(config, stack)
        if file is not None and not _is_locked(file, fcntl.LOCK_EX):
            raise TableError(f"sink {config.sink.id!r} runs. Nothing was reset. Stop it, and run again.")
        yield


def _opened(config: Config, stack: ExitStack) -> IO[str] | None:
    """None if there can be no such mark: the table's position alone keeps them apart then."""
    folder = local_path(config.sink.checkpoint)
    if folder is None:
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return stack.enter_context(Path(folder, f".running-{config.sink.id}").open("w"))
    except OSError:
        return None


def _is_locked(file: IO[str], kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True
