"""Files that are written for a commit, as long as no commit has taken them."""

import logging
from collections.abc import Callable, Iterable
from types import TracebackType

from pyiceberg.io import FileIO

log = logging.getLogger("rowdelta")


class Scratch:
    """The files that were written for a commit. An error inside of its `with` deletes them.

    A path is added before its file is written, so that what an interrupted write leaves goes too. After a commit of
    unknown outcome the files must stay: call `keep`.

    :param table: name of the table, for messages.
    :param io_of: what reaches a file.
    """

    def __init__(self, table: str, io_of: Callable[[str], FileIO]) -> None:
        self.paths: list[str] = []
        self._table = table
        self._io_of = io_of

    def __enter__(self) -> "Scratch":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.delete()

    def add(self, *paths: str) -> None:
        """Call this before the files are written."""
        self.paths += paths

    def keep(self, paths: Iterable[str] | None = None) -> None:
        """Forget some of the files, or all: they belong to a table now, or may belong to it."""
        kept = set(self.paths if paths is None else paths)
        self.paths = [path for path in self.paths if path not in kept]

    def delete(self) -> None:
        """Delete all of them. Failed tasks have deleted their own."""
        self.discard(self.paths)

    def discard(self, paths: Iterable[str]) -> None:
        """Delete some of them."""
        paths = list(paths)
        for path in paths:
            try:
                self._io_of(path).delete(path)
            except FileNotFoundError:
                continue  # as of a task that has deleted its files, or of an index that was built again
            except OSError:
                log.warning("%s: could not delete %s; a clean-up of orphan files will", self._table, path)
        self.keep(paths)
