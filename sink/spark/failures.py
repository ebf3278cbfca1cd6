"""Failures of tasks that mean something to the driver: values with fields, on both sides of the JVM.

Of a failed task, Spark passes on one text: Python's traceback, and its own words around it. So a task puts the failure
into the error's message, as one line of JSON behind a mark, and the driver takes it out again.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Literal, TypeVar

from changelog.changes import FormatError, UnavailableError
from changelog.formats.row_kind_parquet import UnreadableFileError
from deltawriters import CardinalityError
from deltawriters.keyindex import CorruptIndexError
from deltawriters.table import UnreadableRowsError
from deltawriters.vectors import LostVectorError
from sink.errors import ConfigError, TemporaryError

Kind = Literal[
    "contradiction", "corrupt index", "broken format", "refused", "unavailable", "not replaceable", "unreadable file"
]

_KINDS: dict[type[Exception], Kind] = {
    CardinalityError: "contradiction",
    CorruptIndexError: "corrupt index",
    FormatError: "broken format",
    ConfigError: "refused",
    UnavailableError: "unavailable",
    TemporaryError: "unavailable",
    LostVectorError: "not replaceable",
    UnreadableFileError: "unreadable file",
    UnreadableRowsError: "not replaceable",
}
_MARK = "rowdelta task failure: "

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class TaskFailure:
    """Why a task failed.

    :param kind: `contradiction`: two changes of a key contradict each other. `corrupt index`: a part of the key index
        is missing or damaged. `broken format`: a decoder fails whatever the records are. `refused`: a database
        refuses the user, or a table. `unavailable`: a service didn't answer, such as a schema registry or a database.
        `not replaceable`: a data file can't be read for a copy of its rows. `unreadable file`: a change file can't be
        read.
    :param message: for people.
    """

    kind: Kind
    message: str


class TaskFailedError(Exception):
    """What a task raises in place of an error that the driver is to understand."""

    def __init__(self, failure: TaskFailure) -> None:
        super().__init__(_MARK + json.dumps(asdict(failure)))


def told(step: Callable[[Iterable[T]], Iterator[R]]) -> Callable[[Iterable[T]], Iterator[R]]:
    """A step of a task whose failures `failure_of` understands."""

    def run(items: Iterable[T]) -> Iterator[R]:
        try:
            yield from step(items)
        except tuple(_KINDS) as error:
            kind = next(kind for known, kind in _KINDS.items() if isinstance(error, known))
            raise TaskFailedError(TaskFailure(kind, str(error))) from error

    return run


def failure_of(error: BaseException) -> TaskFailure | None:
    """The failure because of which a Spark job failed. None if a task failed in another way.

    :param error: what Spark raised, or the task's own error where there was no job.
    """
    for known, kind in _KINDS.items():
        if isinstance(error, known):
            return TaskFailure(kind, str(error))
    text = str(error)
    start = text.find(f"{TaskFailedError.__name__}: {_MARK}{{")
    if start < 0:
        return None
    start += len(f"{TaskFailedError.__name__}: ")
    try:
        found, _ = json.JSONDecoder().raw_decode(text, start + len(_MARK))
        return TaskFailure(**found)
    except (ValueError, TypeError):  # somebody else's text
        return None
