"""Versions of rows, in a table with history."""

from dataclasses import dataclass


@dataclass(frozen=True)
class VersionColumns:
    """The columns by which a row of a table with history is a version: it holds from `start` until before `end`, and
    `current` is true if it has no end.

    :param tracked: the columns whose changes make another version. None: all.
    :param untracked: those whose changes don't, if `tracked` is None.
    :param last_only: of a key's changes in a micro-batch, only the last one counts.
    """

    start: str
    end: str
    current: str
    tracked: tuple[str, ...] | None = None
    untracked: tuple[str, ...] = ()
    last_only: bool = False

    @property
    def names(self) -> tuple[str, str, str]:
        return self.start, self.end, self.current
