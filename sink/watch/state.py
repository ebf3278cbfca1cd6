"""What is known of a running sink and its tables, in bounded memory.

All of it comes from the events of `sink.table.observer`, which arrive on several threads. The server's threads read it.
A lock keeps them apart; nobody holds it for longer than it takes to copy plain values.
"""

import itertools
import json
import logging
import math
import resource
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, NamedTuple

from sink.redaction import beginning
from sink.sources.source import Behind, Slot
from sink.table import observer
from sink.table.observer import Event
from sink.targets.values import FileCounts
from sink.watch.history import STEP, Series

log = logging.getLogger("rowdelta")

SHOWN_TABLES = 500
"""So many tables have a history, labels of their own in the metrics, and a row on the page."""
KNOWN_TABLES = 10_000
"""Of so many tables anything is known at all: a few kilobytes each."""
LIVE_SECONDS = 600.0
"""The process is alive if the run has told anything within this time. Opening tables, or waiting for a micro-batch
before a new table joins, may take minutes in which the loop stands still."""
OTHERS = "(others)"
_ERRORS = 20
_CLASSES = 30
_WORDS = 800
MOST_NAME = 300
_BESIDE_THE_JOB = (
    *(observer.JvmMemory, observer.Lags, observer.LagsUnknown),
    *(observer.EngineSeen, observer.SlotsSeen),
)
"""Events of `sink.run.sampling`, which go on while the job stands still."""
_SERIES = ("rows", "behind", "batch_seconds", "dead_letters")


def words(text: str, most: int = _WORDS) -> str:
    """Text that may be shown: without secrets, and not too long."""
    shown = beginning(text, most + 1)
    return shown if len(shown) <= most else f"{shown[: most - 1]}…"


def _history() -> dict[str, Series]:
    sums = ("rows", "dead_letters")
    return {name: Series(0.0 if name in sums else math.nan) for name in _SERIES}


@dataclass
class Table:
    """One table. Counts are since the start of the process; times are of the monotonic clock, in seconds.

    :param number: of the order in which tables were found, by which the page asks for one.
    :param shown: its name, as it may be shown. If that isn't the whole name, `number` tells it from others.
    :param source: as it may be shown.
    :param status: `opening`, `working`, `waiting` (nothing is wrong) or `failed`.
    :param due_since: since when it has had something to apply without a commit, or has failed. None if it has nothing
        to do.
    :param doing: what is done now, and since when.
    :param parts: how far each part of its source is behind. None if that isn't known.
    """

    number: int
    name: str
    shown: str
    source: str
    found: float
    status: str = "opening"
    reason: str = ""
    doing: tuple[str, float] | None = None
    batch_id: int | None = None
    snapshot: int | None = None
    position: str = ""
    opened: bool = False
    due_since: float | None = None
    committed: float | None = None
    commits: int = 0
    attempts: int = 0
    rows: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    dead_letters: Counter[str] = field(default_factory=Counter)
    stage_seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    files: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    rewrites: defaultdict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    live: FileCounts | None = None
    index: observer.Index | None = None
    probe_seconds: float = 0.0
    parts: Mapping[str, Behind] | None = None
    unit: str = "messages"
    history: dict[str, Series] | None = None

    @property
    def behind(self) -> int | None:
        return None if self.parts is None else sum(part.count for part in self.parts.values())

    @property
    def behind_seconds(self) -> float | None:
        """Of its slowest part."""
        if self.parts is None:
            return None
        known = [part.seconds for part in self.parts.values() if part.seconds is not None]
        return max(known) if known else (0.0 if not self.behind else None)

    def overdue(self, now: float) -> float:
        """For how many seconds it has had something to apply without a commit."""
        return 0.0 if self.due_since is None else max(0.0, now - self.due_since)

    def since_commit(self, now: float) -> float:
        """Seconds since the table's last commit; since the table was found if there is none."""
        return now - (self.found if self.committed is None else self.committed)


class State:
    """Hears what a run tells (`sink.table.observer.Observer`), and answers questions.

    :param sink: its id.
    :param ready_seconds: a table may have something to apply for so long without a commit, and the sink is still ready.
    :param clock: seconds that only grow.
    :param wall: seconds since 1970.
    """

    def __init__(
        self,
        sink: str,
        version: str,
        ready_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.sink = sink
        self.version = version
        self._ready_seconds = ready_seconds
        self._clock = clock
        self._wall = wall
        self._lock = threading.Lock()
        self._tables: dict[str, Table] = {}
        self._started = self._heard = clock()
        self._history = _history()
        self._errors: deque[dict[str, Any]] = deque(maxlen=_ERRORS)
        self._lags_unknown = ""
        self._engine: observer.EngineSeen | None = None
        self._slots = observer.SlotsSeen(())
        self._memory: dict[str, int] = {}
        self._batch_seconds = Durations()
        self._broken = False

    def __call__(self, event: Event, /) -> None:
        """Take an event in. Nothing that is wrong here may end the job, so the first error is logged."""
        try:
            told = self._told(event)
            with self._lock:
                now = self._clock()
                if not isinstance(event, _BESIDE_THE_JOB):
                    self._heard = now
                self._hear(event, told, now)
        except Exception:
            if not self._broken:
                self._broken = True
                log.exception("what is shown over HTTP is incomplete from now on")

    def _told(self, event: Event) -> "_Told":
        """What is shown of the event's texts. It takes long for long ones, so it is made while nobody waits for it."""
        table = getattr(event, "table", None)
        is_new = table is not None and table not in self._tables
        return _Told(
            words(table, MOST_NAME) if table is not None and is_new else "",
            words(str(getattr(event, "source", "")), MOST_NAME) if is_new else "",
            words(getattr(event, "reason", "")),
            _shown_position(getattr(event, "position", None)),
        )

    def _hear(self, event: Event, told: "_Told", now: float) -> None:
        match event:
            case observer.LoopTurned():
                return
            case observer.Lags():
                self._hear_lags(event, now)
                return
            case observer.LagsUnknown():
                self._lags_unknown = told.reason
                for known in self._tables.values():
                    known.parts = None
                return
            case observer.EngineSeen():
                self._engine = replace(event, reason=told.reason)
                return
            case observer.SlotsSeen():
                self._slots = replace(event, reason=told.reason)
                return
            case observer.JvmMemory():
                self._peak("jvm", event.heap)
                return
        table = self._table(event, told, now)
        if table is None:
            return
        match event:
            case observer.TableOpened():
                table.status, table.reason, table.doing, table.opened = "working", "", None, True
                # a table that failed is overdue until it commits, or has nothing to do: it may fail again
                table.snapshot, table.live = event.snapshot, event.live
                table.position = told.position
                if table.committed is None and event.committed_at is not None:
                    table.committed = now - max(0.0, self._wall() - event.committed_at / 1000)
            case observer.TableWaits():
                table.status, table.reason, table.doing = "waiting", told.reason, None
                table.due_since = None
            case observer.TableFailed():
                table.status, table.reason, table.doing = "failed", told.reason, None
                table.failures[event.error] += 1
                table.due_since = now if table.due_since is None else table.due_since
                self._note_error(table, event.error)
            case observer.BatchStarted():
                table.batch_id = event.batch_id
                table.due_since = now if table.due_since is None else table.due_since
            case observer.StageStarted():
                table.doing = event.stage, now
            case observer.StageDone():
                table.doing = None
                table.stage_seconds[event.stage] += event.seconds
            case observer.CommitTried():
                table.attempts += 1
            case observer.CommitRefused():
                table.refusals[event.reason] += 1
            case observer.DeadLettersKept():
                for error_class, count in event.by_class.items():
                    # a format of somebody's own may make classes up
                    shown = error_class[:MOST_NAME]
                    is_one_of_few = shown in table.dead_letters or len(table.dead_letters) < _CLASSES
                    table.dead_letters[shown if is_one_of_few else OTHERS] += count
                for series in self._series(table, "dead_letters"):
                    series.add(now, sum(event.by_class.values()))
            case observer.Committed():
                self._hear_commit(table, event, told, now)
            case observer.RewriteStarted() if event.kind != "rewrite":  # which goes on beside micro-batches
                table.doing = event.kind, now
            case observer.RewriteDone():
                self._hear_rewrite(table, event)

    def _hear_commit(self, table: Table, event: observer.Committed, told: "_Told", now: float) -> None:
        table.commits += 1
        table.committed, table.doing, table.due_since = now, None, None
        table.snapshot, table.position = event.snapshot, told.position
        table.rows.update(event.rows)
        for content, files in event.files.items():
            table.files[content] += files.count
            table.bytes[content] += files.bytes
        table.live, table.index = event.live, event.index
        table.probe_seconds += event.probe_seconds
        self._peak("worker", event.task_memory)
        self._batch_seconds.add(event.seconds)
        for series in self._series(table, "rows"):
            series.add(now, sum(event.rows.values()))
        for series in self._series(table, "batch_seconds"):
            series.set(now, event.seconds)

    def _hear_rewrite(self, table: Table, event: observer.RewriteDone) -> None:
        if event.kind != "rewrite":
            table.doing = None
        if not event.touched:
            return
        before = table.live
        figures = {
            "runs": 1.0,
            "total": float(before.data + before.deletes) if before is not None else 0.0,
            "touched": float(event.touched),
            "rewritten": float(event.written),
            "rows": float(event.rows),
            "bytes": float(event.bytes),
            "bytes written": float(event.bytes_written),
            "scan": event.scan_seconds,
            "rewrite": event.rewrite_seconds,
        }
        for name, amount in figures.items():
            table.rewrites[event.kind, name] += amount
        table.live = event.live

    def _hear_lags(self, event: observer.Lags, now: float) -> None:
        self._lags_unknown = ""
        for name, table in self._tables.items():
            table.parts, table.unit = event.behind.get(name), event.unit
            count = table.behind
            if count is None:
                continue
            if count and table.status == "working":
                table.due_since = now if table.due_since is None else table.due_since
            elif not count and table.doing is None and table.status == "working":
                table.due_since = None
            if table.history is not None:
                table.history["behind"].set(now, count)
        self._history["behind"].set(now, sum(table.behind or 0 for table in self._tables.values()))

    def _table(self, event: Any, told: "_Told", now: float) -> Table | None:
        table = self._tables.get(event.table)
        if table is None and len(self._tables) < KNOWN_TABLES:
            number = len(self._tables)
            shown = told.name if told.name == event.table else f"{told.name} #{number}"
            table = Table(number, event.table, shown, told.source, now)
            table.history = _history() if len(self._tables) < SHOWN_TABLES else None
            self._tables[event.table] = table
        return table

    def _series(self, table: Table, name: str) -> Iterator[Series]:
        yield self._history[name]
        if table.history is not None:
            yield table.history[name]

    def _note_error(self, table: Table, error: str) -> None:
        if self._errors and self._errors[-1]["table"] == table.shown and self._errors[-1]["words"] == table.reason:
            self._errors[-1] |= {"time": _iso(self._wall()), "times": self._errors[-1]["times"] + 1}
            return
        self._errors.append(
            {"time": _iso(self._wall()), "table": table.shown, "error": error, "words": table.reason, "times": 1}
        )

    def _peak(self, process: str, size: int) -> None:
        self._memory[process] = max(size, self._memory.get(process, 0))

    # what is asked

    @contextmanager
    def read(self) -> Iterator["Reading"]:
        """All of it at one moment. Nothing is heard meanwhile, so be quick."""
        with self._lock:
            self._peak("driver", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
            yield Reading(
                self._clock(),
                self._tables,
                self._memory,
                self._batch_seconds,
                self._clock() - self._started,
                not self._lags_unknown,
                self._engine,
                self._slots.slots,
                self._wall(),
            )

    def live(self) -> str | None:
        """Why the process isn't alive; None if it is."""
        silent = self._clock() - self._heard
        return f"the run has told nothing for {silent:.0f} s" if silent > LIVE_SECONDS else None

    def not_ready(self) -> list[str]:
        """Reasons why the sink isn't ready, a few of them; none if it is: all tables are open (or wait for messages),
        and each that has something to apply had a commit within the limit.
        """
        with self._lock:
            now = self._clock()
            if not self._tables:
                return ["the tables aren't known yet"]
            reasons = []
            for table in self._tables.values():
                overdue = table.overdue(now)
                if overdue > self._ready_seconds:
                    why = f": {table.reason}" if table.status == "failed" else ""
                    reasons.append(f"{table.shown} has had no commit for {overdue:.0f} s{why}")
                elif table.status == "opening" and not table.opened:
                    reasons.append(f"{table.shown} isn't open yet")
            more = len(reasons) - 5
            return reasons[:5] + ([f"and {more} more"] if more > 0 else [])

    def summary(self) -> dict[str, Any]:
        """For the page: the sink, and up to `SHOWN_TABLES` of its tables, those with a problem first."""
        live, not_ready = self.live(), self.not_ready()
        with self._lock:
            now = self._clock()
            tables = sorted(
                self._tables.values(), key=lambda table: (table.status != "failed", -table.overdue(now), table.name)
            )
            return {
                "sink": self.sink,
                "version": self.version,
                "time": _iso(self._wall()),
                "uptime": round(now - self._started),
                "live": live is None,
                "ready": not not_ready,
                "problems": [*([live] if live else []), *not_ready],
                "lags_unknown": self._lags_unknown,
                "engine": None if self._engine is None else self._engine_row(self._engine),
                "slots": [asdict(slot) for slot in self._slots.slots],
                "slots_unknown": self._slots.reason,
                "memory": dict(self._memory),
                "tables_total": len(tables),
                "statuses": Counter(table.status for table in tables),
                "rows_per_second": round(self._history["rows"].rate(now), 1),
                "behind": sum(table.behind or 0 for table in tables),
                "dead_letters": sum(table.dead_letters.total() for table in tables),
                "step": STEP,
                "history": {name: series.points(now) for name, series in self._history.items()},
                "errors": list(reversed(self._errors)),
                "tables": [self._row(table, now) for table in tables[:SHOWN_TABLES]],
            }

    def table(self, number: int) -> dict[str, Any] | None:
        """For the page: one table with its last hour. None if there is no such table."""
        with self._lock:
            if not 0 <= number < len(self._tables):
                return None
            table = next(itertools.islice(self._tables.values(), number, None))
            now = self._clock()
            history = table.history or {}
            parts = sorted((table.parts or {}).items(), key=lambda part: (-part[1].count, part[0]))
            return self._row(table, now) | {
                "step": STEP,
                "history": {name: series.points(now) for name, series in history.items()},
                "position": table.position,
                "attempts": table.attempts,
                "rows": dict(table.rows),
                "dead_letters_by_class": dict(table.dead_letters),
                "refusals": dict(table.refusals),
                "stage_seconds": {stage: round(seconds, 3) for stage, seconds in table.stage_seconds.items()},
                "parts": [
                    {"part": part, "behind": behind.count, "seconds": behind.seconds} for part, behind in parts[:100]
                ],
            }

    def _engine_row(self, engine: observer.EngineSeen) -> dict[str, Any]:
        held = engine.held
        return {
            "reading": engine.is_reading,
            "failures": engine.failures,
            "reason": engine.reason,
            "since_event": None if held.last_event is None else round(self._wall() - held.last_event / 1000, 1),
            "events": held.events,
            "bytes": held.bytes,
        }

    def _row(self, table: Table, now: float) -> dict[str, Any]:
        return {
            "number": table.number,
            "name": table.shown,
            "source": table.source,
            "status": table.status,
            "reason": table.reason,
            "doing": None if table.doing is None else {"what": table.doing[0], "for": round(now - table.doing[1], 1)},
            "batch": table.batch_id,
            "snapshot": None if table.snapshot is None else str(table.snapshot),
            "since_commit": None if table.committed is None else round(now - table.committed, 1),
            "overdue": round(table.overdue(now), 1),
            "commits": table.commits,
            "rows_per_second": round(table.history["rows"].rate(now), 1) if table.history is not None else None,
            "behind": table.behind,
            "behind_seconds": table.behind_seconds,
            "unit": table.unit,
            "dead_letters": table.dead_letters.total(),
            "data_files": None if table.live is None else table.live.data,
            "delete_files": None if table.live is None else table.live.deletes,
            "index_bytes": None if table.index is None else table.index.bytes,
            "index_keys": None if table.index is None else table.index.keys,
        }


class _Told(NamedTuple):
    """What is shown of an event's texts. Name and source only if the table is new."""

    name: str
    source: str
    reason: str
    position: str


@dataclass(frozen=True)
class Reading:
    """:param now: of the monotonic clock.
    :param memory: peak in bytes, by process.
    :param lags_known: whether the source answered when it was asked last.
    :param engine: Debezium's, if the sink runs it.
    :param wall: seconds since 1970.
    """

    now: float
    tables: Mapping[str, Table]
    memory: Mapping[str, int]
    batch_seconds: "Durations"
    uptime: float
    lags_known: bool
    engine: observer.EngineSeen | None
    slots: Sequence[Slot]
    wall: float


class Durations:
    """How many durations were not above each bound, as Prometheus counts them."""

    BOUNDS = (0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)

    def __init__(self) -> None:
        self._counts = [0] * (len(self.BOUNDS) + 1)
        self.sum = 0.0

    def add(self, seconds: float) -> None:
        self._counts[sum(seconds > bound for bound in self.BOUNDS)] += 1
        self.sum += seconds

    def buckets(self) -> Iterable[tuple[str, float]]:
        """(upper bound, number of durations up to it), the last without a bound."""
        total = 0
        for bound, count in zip((*map(str, self.BOUNDS), "+Inf"), self._counts, strict=True):
            total += count
            yield bound, total


def _shown_position(position: Mapping[str, Any] | None) -> str:
    return "" if position is None else words(json.dumps(position, ensure_ascii=False))


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
