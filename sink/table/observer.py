"""What a run tells about itself while it works, for whoever watches it (`sink.watch`).

`sink.table` and `sink.run` call an `Observer` with events, which are plain values. They know nothing of who listens. An
observer must be quick and must not raise: it is called between the steps of a micro-batch, from several threads.
"""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

from sink.sources.source import Behind, Held, Position, Slot
from sink.targets.seam import TableView
from sink.targets.values import FileCounts, LastCommit

log = logging.getLogger("rowdelta")

Stage = Literal["index", "write", "prepare", "commit"]
"""A micro-batch's way, for one table. `index`: the key index catches up with other writers. `write`: tasks decode and
write. `prepare`: dead letters, deletes of old rows, the index's next version. `commit`: the catalog answers.
"""

Refusal = Literal["conflict", "changed", "index lost", "schema"]
"""Why an attempt was not committed. `conflict`: others committed in between. `changed`: the files are for another
layout of the table. Before it was sent at all: `index lost`, the key index has to be built again; `schema`, the table
got new columns first.
"""

RewriteKind = Literal["minor compaction", "copy-on-write", "rewrite"]
"""What replaces data files. `copy-on-write` is a part of a micro-batch, and told just before it is `Committed`."""


@dataclass(frozen=True)
class TableFound:
    """The job has a table, which isn't open yet."""

    table: str
    source: str


@dataclass(frozen=True)
class TableOpened:
    """:param live: None if the table has no snapshot, or its files aren't counted.
    :param committed_at: when it was committed to last, by whomever, in milliseconds since 1970. None if it never was.
    """

    table: str
    snapshot: int | None
    position: Position | None
    live: FileCounts | None
    committed_at: int | None = None


@dataclass(frozen=True)
class TableWaits:
    """The table isn't worked on, and nothing is wrong with it."""

    table: str
    reason: str


@dataclass(frozen=True)
class TableFailed:
    """The table was set aside, or ended the job.

    :param error: name of the error's class.
    :param reason: the error in words.
    """

    table: str
    error: str
    reason: str


@dataclass(frozen=True)
class BatchStarted:
    table: str
    batch_id: int | None


@dataclass(frozen=True)
class StageStarted:
    table: str
    stage: Stage


@dataclass(frozen=True)
class StageDone:
    table: str
    stage: Stage
    seconds: float


@dataclass(frozen=True)
class CommitTried:
    table: str


@dataclass(frozen=True)
class CommitRefused:
    table: str
    reason: Refusal


@dataclass(frozen=True)
class DeadLettersKept:
    """:param by_class: number of records by error class."""

    table: str
    by_class: Mapping[str, int]


@dataclass(frozen=True)
class Files:
    """Files of one content that a commit added."""

    count: int
    bytes: int


@dataclass(frozen=True)
class Index:
    """A key index after a commit.

    :param keys: entries in its runs; a key that was changed lately may have several.
    :param bytes: in its runs.
    """

    keys: int
    bytes: int


@dataclass(frozen=True)
class Committed:
    """A table has a micro-batch.

    :param rows: number of changes by kind, as `Written.counts` names them.
    :param files: by content, as `FileContent` names it.
    :param probe_seconds: that the tasks, all together, took to look keys up in the index.
    :param task_memory: peak of a task's process, in bytes.
    :param seconds: from the beginning of the attempt to the end of the commit.
    """

    table: str
    batch_id: int | None
    snapshot: int | None
    position: Position
    rows: Mapping[str, int]
    files: Mapping[str, Files]
    live: FileCounts | None
    index: Index | None
    probe_seconds: float
    task_memory: int
    seconds: float


@dataclass(frozen=True)
class RewriteStarted:
    table: str
    kind: RewriteKind


@dataclass(frozen=True)
class RewriteDone:
    """:param touched: number of files that were read and replaced; 0 if there was nothing to do, or it was given up.
    :param written: number of new files.
    :param bytes: read.
    :param scan_seconds: to find the files.
    :param rewrite_seconds: to read, write and commit them; of copy-on-write without the commit.
    :param live: the table's files now.
    :param rows: that were copied, of copy-on-write.
    :param bytes_written: of new files. 0 of a compaction by the format's own procedure, which doesn't tell them.
    """

    table: str
    kind: RewriteKind
    touched: int = 0
    written: int = 0
    bytes: int = 0
    scan_seconds: float = 0.0
    rewrite_seconds: float = 0.0
    live: FileCounts | None = None
    rows: int = 0
    bytes_written: int = 0


@dataclass(frozen=True)
class Lags:
    """How far tables are behind their sources, as seen just now.

    :param behind: table -> its parts: Kafka's partitions, or one part `""` of a directory.
    :param unit: of `Behind.count`.
    """

    behind: Mapping[str, Mapping[str, Behind]]
    unit: Literal["messages", "files"]


@dataclass(frozen=True)
class LagsUnknown:
    """The source did not answer."""

    reason: str


@dataclass(frozen=True)
class EngineSeen:
    """Debezium's engine and its buffer, as seen just now.

    :param is_reading: it reads the database's log.
    :param failures: so often it has ended by itself.
    :param reason: why, until it reads again.
    """

    is_reading: bool
    failures: int
    reason: str
    held: Held


@dataclass(frozen=True)
class SlotsSeen:
    """The database's replication slots, as seen just now.

    :param reason: why they aren't known.
    """

    slots: Sequence[Slot]
    reason: str = ""


@dataclass(frozen=True)
class JvmMemory:
    """:param heap: bytes in use."""

    heap: int


@dataclass(frozen=True)
class LoopTurned:
    """The job's main loop goes on."""


Event = (
    TableFound
    | TableOpened
    | TableWaits
    | TableFailed
    | BatchStarted
    | StageStarted
    | StageDone
    | CommitTried
    | CommitRefused
    | DeadLettersKept
    | Committed
    | RewriteStarted
    | RewriteDone
    | Lags
    | LagsUnknown
    | EngineSeen
    | SlotsSeen
    | JvmMemory
    | LoopTurned
)


class Observer(Protocol):
    def __call__(self, event: Event, /) -> None: ...


def nobody(event: Event, /) -> None:
    """The observer of a run that nobody watches. What costs more than an event isn't found out for it."""


@contextmanager
def stage(observer: Observer, table: str, name: Stage) -> Iterator[None]:
    """Tell of a stage. If it fails, it isn't told as done."""
    observer(StageStarted(table, name))
    started = time.monotonic()
    yield
    observer(StageDone(table, name, time.monotonic() - started))


def last_commit(table: TableView) -> LastCommit | None:
    """The table's last commit, for an event. None if there is none, or it can't be read: what is only told must not set
    a table aside.
    """
    try:
        return table.last_commit()
    except Exception:
        log.debug("%s: its last commit can't be read", table.name, exc_info=True)
        return None


def live_files(table: TableView) -> FileCounts | None:
    """The table's files, for an event. None if they aren't counted, or can't be."""
    last = last_commit(table)
    return None if last is None else last.live
