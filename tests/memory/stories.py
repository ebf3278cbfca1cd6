"""Stories about one table: what its source says, what processes of the sink do with it, what happens to these, and what
others do meanwhile.

    Player(Story.random(seed), folder).play()

A story runs the real `TableSink` with its key index, delta writers and minor compactions on a table in memory
(`tests.memory.table`). Whatever happens, each snapshot that the table has ever had must be right: the rows of its
parent, with what the changes between their two positions say, or with what another writer did. So a change that is
lost, applied twice or applied half is found, also if a later commit covers it up.

What happens, happens at a step of a process (`tests.memory.storage.Clock`): at any read, write, look or commit.
"""

import json
import logging
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_schema

from changelog.decoding import decoded_schema
from changelog.moves import with_moves
from changelog.rows import (
    BAD,
    KIND,
    MOVED,
    MOVED_SEPARATOR,
    TRUNCATE,
    UNAVAILABLE,
    RowKind,
    known_columns,
    order_column,
    unavailable_bits,
)
from changelog.spec import ChangelogSpec, ColumnSpec
from deltawriters import DeltaOptions, history, move
from deltawriters.keyindex import index as index_probe
from deltawriters.keyindex import runs as index_runs
from sink.config import Config
from sink.deadletters import table as dead_letters
from sink.deadletters.table import DeadLetters
from sink.errors import FencedError, RolledBackError, TemporaryError
from sink.sources.source import TableBatch
from sink.table import copy_on_write, deleted_keys, keyindex, minor_compaction, observer, task_plans
from sink.table.keys import TableKey
from sink.table.microbatch import TableSink
from sink.table.observer import Event, Files
from sink.table.patterns import ResolvedTable, resolve_tables
from sink.table.plan import plan_table
from sink.table.rewrite_plan import RewriteOptions
from sink.table.rewriting import RunningRewrite
from sink.targets import merge_levels
from sink.targets.values import CommitUnknownError
from tests.memory.engine import MemoryEngine
from tests.memory.storage import ANY, Clock, CrashError, Step
from tests.memory.table import MemoryFile, MemoryTable, Snapshot, Store, add_files
from tests.memory.writers import parquet

Row = tuple[Any, ...]
Key = tuple[Any, ...]
Content = Counter[Row]

PREFIX = "rowdelta.story"
TARGET = "lake.n.t"
REGIONS = [None, "eu", "us"]
KEYS = 6
SOFT_DELETE = {"column": "deleted", "at": "since"}
_BAD_TYPE = decoded_schema(ChangelogSpec((), ())).field(BAD).type
LETTERS = to_arrow_schema(dead_letters.COLUMNS)
_AGAIN = -77
"""The value of rows that others append for keys of the source. The source has no such value."""
CHANGES_ROWS = {"append again", "delete", "delete in place"}
"""After these, what the table has isn't what the source said."""

Fault = Literal["crash", "error"]
"""`crash`: the process is killed. `error`: the step fails, or (of a commit) its answer is lost."""
Others = Literal[
    "append", "append again", "delete", "delete in place", "update", "compaction", "empty commit", "alter",
    "property", "rollback", "expiry", "index lost", "index damaged", "index restored", "second driver",
]  # fmt: skip
Happening = Fault | Others
SPOILS_INDEX = {
    "rollback", "expiry", "index lost", "index damaged", "index restored", "second driver", "alter", "read the index",
}  # fmt: skip
"""After these the key index may be built again. After anything else it must not: it would only hide a mistake."""


@dataclass(frozen=True)
class Operation:
    """What the source did to a key, and what its row became. `repeat` says the last message of the key again. `update`
    says only a part of the row, or of a row that the source never said as a whole. After a `truncate` no key has a row.
    `shift keys` moves the rows of this and all higher keys up by one, and `swap keys` exchanges two. One statement does
    it, and keys are checked at its end.
    """

    verb: Literal["set", "delete", "change key", "shift keys", "swap keys", "repeat", "update", "truncate"]
    key: int
    value: int = 0
    other: int = 0


@dataclass(frozen=True)
class Process:
    """A process of the sink.

    :param batches: sizes of its micro-batches, in messages. Then it ends, unless something ended it earlier.
    :param happenings: pairs of a step and what happens at it.
    :param then: what happens after it.
    """

    batches: tuple[int, ...]
    happenings: tuple[tuple[Step, Happening], ...] = ()
    then: tuple[Others, ...] = ()


@dataclass(frozen=True)
class Story:
    """:param late: changes come late, and order values tell so (`tests.memory.late`).
    :param soft: deletes mark rows as deleted (`tests.memory.soft`).
    :param key: the key's columns.
    :param is_strict: see `Store`.
    :param leaves_idle_out: see `MemoryEngine`.
    :param rewrites: whether files are rewritten beside the micro-batches.
    :param order: how rows are ordered in files.
    """

    operations: tuple[Operation, ...]
    processes: tuple[Process, ...]
    key: tuple[str, ...] = ("a",)
    partitioned_by: str | None = None
    mode: Literal["upsert", "changelog"] = "upsert"
    is_strict: bool = False
    tasks: int = 1
    leaves_idle_out: bool = False
    file_size: int = 1 << 20
    flush_bytes: int = 1 << 20
    batch_rows: int = 1000
    merges: Literal["never", "on the driver", "in tasks"] = "never"
    deletes: Literal["position", "copy-on-write"] = "position"
    rewrites: bool = False
    order: Literal["none", "sort"] = "none"
    late: bool = False
    soft: bool = False
    seed: int = 0

    @classmethod
    def random(cls, seed: int) -> "Story":
        random = Random(seed)
        mode = random.choice(("upsert", "changelog"))
        verbs = ["set", "set", "set", "delete", "change key"] + ["repeat", "update", "update"] * (mode == "upsert")
        verbs = verbs * 2 + ["truncate"] * random.choice((0, 1)) + ["shift keys", "swap keys"] * random.choice((0, 1))
        operations = tuple(
            Operation(random.choice(verbs), random.randrange(KEYS), random.randrange(9), random.randrange(KEYS))  # type: ignore[arg-type]
            for _ in range(random.randint(1, 24))
        )
        happenings = [*get_args(Fault), *get_args(Others)]
        processes = tuple(
            Process(
                tuple(random.randint(1, 6) for _ in range(random.randint(1, 4))),
                tuple((_random_step(random), random.choice(happenings)) for _ in range(random.choice((0, 1, 1, 2, 3)))),
                tuple(random.choice(get_args(Others)) for _ in range(random.choice((0, 0, 1)))),
            )
            for _ in range(random.randint(1, 3))
        )
        return cls(
            operations,
            processes,
            key=random.choice((("a",), ("b",), ("a", "b"))),
            partitioned_by=random.choice((None, "region", "b")),
            mode=random.choice(("upsert", "changelog")) if mode == "changelog" else "upsert",
            is_strict=random.random() < 0.5,
            tasks=random.choice((1, 1, 2, 3)),
            leaves_idle_out=random.random() < 0.3,
            file_size=random.choice((1, 1 << 20, 1 << 20)),
            flush_bytes=random.choice((1, 1 << 20)),
            batch_rows=random.choice((1, 3, 1000)),
            merges=random.choice(("never", "on the driver", "in tasks")),
            deletes=random.choice(("position", "copy-on-write")),
            rewrites=random.random() < 0.5,
            order=random.choice(("none", "sort")),
            seed=seed,
        )

    def without(self, *left_out: Happening) -> "Story":
        """The story in which some things don't happen."""
        processes = tuple(
            replace(
                process,
                happenings=tuple((step, what) for step, what in process.happenings if what not in left_out),
                then=tuple(what for what in process.then if what not in left_out),
            )
            for process in self.processes
        )
        return replace(self, processes=processes)

    def simpler(self, fixed: Collection[str] = ()) -> "list[Story]":
        """Stories that have a little less of something.

        :param fixed: names of fields that stay as they are.
        """
        found = [replace(self, processes=_without(self.processes, n)) for n in range(len(self.processes))]
        for n, process in enumerate(self.processes):
            lesser = [
                replace(process, happenings=_without(process.happenings, i)) for i in range(len(process.happenings))
            ]
            lesser += [replace(process, then=_without(process.then, i)) for i in range(len(process.then))]
            lesser += [replace(process, batches=_without(process.batches, i)) for i in range(len(process.batches))]
            found += [replace(self, processes=(*self.processes[:n], p, *self.processes[n + 1 :])) for p in lesser]
        found += [replace(self, operations=_without(self.operations, n)) for n in range(len(self.operations))]
        for part in fields(self):
            is_fixed = part.name in ("operations", "processes", "seed", *fixed)
            if not is_fixed and getattr(self, part.name) != part.default:
                plain: dict[str, Any] = {part.name: part.default}
                found.append(replace(self, **plain))
        return found


def _random_step(random: Random) -> Step:
    """Most mistakes are made about what happens just before a commit."""
    if random.random() < 0.5:
        return ANY, random.randint(1, random.choice((12, 40, 100)))
    steps = ("send a commit", "send a commit", "hear of a commit", "send a rewrite", "look at the table")
    return random.choice(steps), random.randint(1, 4)


def _without(items: tuple[Any, ...], number: int) -> tuple[Any, ...]:
    return items[:number] + items[number + 1 :]


@dataclass(frozen=True)
class Message:
    """What the source says of one operation: changes, and the row that each key has after them; None if it has none. Or
    that it has no rows any more.
    """

    changes: tuple[tuple[RowKind, Row], ...]
    rows: Mapping[Key, Row | None]
    truncates: bool = False
    lacking: tuple[int, ...] = ()
    """The columns that a partial update lacks."""


def messages(story: Story) -> list[Message]:
    """The source's changelog. Rows are (a, b, region, value)."""
    live: dict[int, Row] = {}
    last: dict[int, Message] = {}
    found: list[Message] = []
    key_of = _key_of(story)

    at_once = any(operation.verb in ("shift keys", "swap keys") for operation in story.operations)

    def row(operation: Operation, key: int) -> Row:
        # partition values move with the row, unless they are of the key. Only by their values are rows told apart.
        value = operation.value + 9 * (len(found) + 1) if at_once else operation.value
        return (key, f"b{key}", REGIONS[operation.value % 3], value)

    for operation in story.operations:
        key, other = operation.key, operation.other
        old, said = live.get(key), Message((), {})
        if operation.verb == "truncate":
            live, last = {}, {}
            found.append(Message((), {}, truncates=True))
        elif operation.verb in ("shift keys", "swap keys"):
            found += moved(operation, live, key_of, lambda to, old: (to, f"b{to}", *old[2:]))
            last = {}
        elif operation.verb == "repeat":
            said = last.get(key, said)
        elif operation.verb == "set":
            new = live[key] = row(operation, key)
            changes = (
                [(RowKind.INSERT, new)] if old is None else [(RowKind.UPDATE_BEFORE, old), (RowKind.UPDATE_AFTER, new)]
            )
            said = Message(tuple(changes), {key_of(new): new})
        elif operation.verb == "update":
            new = row(operation, key)
            lacking = ((2,), (3,), (2, 3))[other % 3] if story.partitioned_by != "region" or other % 2 else (3,)
            if old is not None:
                new = live[key] = tuple(old[n] if n in lacking else value for n, value in enumerate(new))
            sent = tuple(None if n in lacking else value for n, value in enumerate(new))
            said = Message(((RowKind.UPDATE_AFTER, sent),), {key_of(new): sent}, lacking=lacking)
        elif operation.verb == "delete":
            gone = live.pop(key, None)
            if gone is not None or story.mode == "upsert":  # which doesn't trust the stream, so must bear with this
                removed = gone or row(operation, key)
                said = Message(((RowKind.DELETE, removed),), {key_of(removed): None})
        elif old is not None and key != other:
            replaced = live.pop(other, None)
            del live[key]
            new = live[other] = row(operation, other)
            changes = [(RowKind.DELETE, replaced)] if replaced is not None else []
            said = Message((*changes, *_set(old, new)), {key_of(old): None, key_of(new): new})
        if said.changes:
            found.append(said)
            last = {k: m for k, m in last.items() if k not in (key, other)}
            if operation.verb in ("set", "repeat", "update"):
                last[key] = said
    return found


def moved(
    operation: Operation, live: dict[int, Row], key_of: Callable[[Row], Key], new: Callable[[int, Row], Row]
) -> list[Message]:
    """Rows go to other keys in one statement, which is told row by row.

    :param live: the row of each key. It has those that went there then.
    :param new: makes a row of its key and of the row that went there.
    """
    key, other = operation.key, operation.other
    to = {key: other, other: key} if operation.verb == "swap keys" else {n: n + 1 for n in range(key, 4 * KEYS)}
    gone = {n: live.pop(n) for n in sorted(to) if n in live and n != to[n]}
    halves = ((RowKind.UPDATE_BEFORE, RowKind.UPDATE_AFTER), (RowKind.DELETE, RowKind.INSERT))[other % 2]
    found = list[Message]()
    for n, old in gone.items():
        made = live[to[n]] = new(to[n], old)
        found.append(Message(((halves[0], old), (halves[1], made)), {key_of(old): None, key_of(made): made}))
    return found


def _set(old: Row | None, new: Row) -> tuple[tuple[RowKind, Row], ...]:
    if old is None:
        return ((RowKind.INSERT, new),)
    return (RowKind.UPDATE_BEFORE, old), (RowKind.UPDATE_AFTER, new)


def _key_of(story: Story) -> Callable[[Row], Key]:
    places = ["ab".index(name) for name in story.key]
    return lambda row: tuple(row[place] for place in places)


SCHEMA = pa.schema(
    [
        pa.field("a", pa.int64(), nullable=False),
        pa.field("b", pa.string(), nullable=False),
        pa.field("region", pa.string()),
        pa.field("value", pa.int64()),
    ]
)


def marks(story: Story, messages: list[Message]) -> dict[tuple[int, int], str]:
    """What removals of rows that went to another key tell (`_rowdelta_moved`), by message and number in it."""
    types = (T.LongType(), T.StringType(), T.StringType(), T.LongType())
    columns = tuple(ColumnSpec(name, dtype) for name, dtype in zip(SCHEMA.names, types, strict=True))
    said = [(place, n, *change) for place, message in enumerate(messages) for n, change in enumerate(message.changes)]
    changes = {KIND: pa.array([int(kind) for _, _, kind, _ in said], pa.int8()), BAD: pa.nulls(len(said))}
    changes |= {MOVED: pa.nulls(len(said), pa.string())}
    changes |= {f.name: pa.array([row[n] for *_, row in said], f.type) for n, f in enumerate(SCHEMA)}
    place, number = (np.array([change[n] for change in said], np.int64) for n in range(2))
    partition = np.zeros(len(messages), np.int64)
    rows = with_moves(pa.table(changes), ChangelogSpec(columns, story.key), place, number, partition)
    told = zip(place.tolist(), number.tolist(), rows.column(MOVED).to_pylist(), strict=True)
    return {(place_, number_): mark for place_, number_, mark in told if mark is not None}


class _Source:
    """Nothing but what `TableSink` asks."""

    def is_ahead(self, position: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
        return bool(position["0"] > other["0"])

    def furthest(self, one: Mapping[str, Any], other: Mapping[str, Any]) -> Mapping[str, Any]:
        return max(one, other, key=lambda position: position["0"])

    def partitions(self, _: Any) -> int:
        return 1

    def identities(self, _: Any) -> Mapping[str, str]:
        return {}


class _Catalogs:
    """The catalog of the one table."""

    spark = None


class Warnings(logging.Handler):
    """Collects the sink's warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


class Told:
    """Hears what a process tells, and compares it with the table."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._doing: str | None = None
        self._sent = 0

    def __call__(self, event: Event, /) -> None:
        assert event.table == TARGET  # type: ignore[union-attr]  # no other event is told by a table
        match event:
            case observer.StageStarted():
                self._doing = event.stage
            case observer.StageDone():
                assert (self._doing, event.seconds >= 0) == (event.stage, True)
                self._doing = None
            case observer.CommitTried():
                self._sent += 1
            case observer.Committed():
                assert (self._doing, self._sent > 0) == (None, True)
                self._sent = 0
                self._compare(event)
            case observer.RewriteDone() if event.kind == "copy-on-write":
                assert event.touched > 0
                assert event.rewrite_seconds > 0
                assert (event.bytes_written > 0) == (event.written > 0)
            case observer.RewriteDone() if event.touched:
                assert event.written <= event.touched

    def _compare(self, event: observer.Committed) -> None:
        snapshots = self._store.snapshots
        ours = [found for found in snapshots.values() if found.sink.get("position") == event.position][-1]
        before = snapshots[ours.parent].files if ours.parent is not None else {}
        written = event.files.get("DATA", Files(0, 0))
        assert written.count == len(ours.files.keys() - before.keys())
        assert (written.bytes > 0) == (written.count > 0)
        if event.snapshot is not None and event.live is not None:
            assert event.live.data == len(snapshots[event.snapshot].files)


class Rewritings:
    """Rewrites files beside a process's micro-batches: between two of them it takes one step, or none."""

    def __init__(self, sink: TableSink, random: Random) -> None:
        self._sink = sink
        self._random = random
        self._begun: RunningRewrite | None = None
        self._written = False

    def go_on(self) -> None:
        while self._random.random() < 0.6:
            if self._begun is None:
                size = self._random.choice((1, 1 << 30))
                ratio = self._random.choice((0.0, 0.3))
                options = RewriteOptions(
                    self._random.choice((1, 2)),
                    1.0,
                    ratio,
                    max_file_group_size=size,
                    max_concurrent_groups=3,
                    least_gain=1,
                )
                self._begun = self._sink.upkeep.begin_rewrite(options)
                if self._begun is None:
                    return
            elif not self._written:
                self._written = self._sink.upkeep.write_rewrite(self._begun)
                if not self._written:
                    self.stop()
            else:
                begun, self._begun, self._written = self._begun, None, False
                self._sink.upkeep.end_rewrite(begun)

    def stop(self) -> None:
        if self._begun is not None:
            begun, self._begun, self._written = self._begun, None, False
            self._sink.upkeep.end_rewrite(begun, written=False)


class Player:
    """Plays a story, and checks every snapshot of the table after it.

    :param folder: an empty folder for the key index.
    """

    schema = SCHEMA
    """Of the table, and of the rows that it has. The source's rows may have fewer columns."""
    fixed: ClassVar[tuple[str, ...]] = ()
    """Fields of stories without which they would be stories of another player."""

    def __init__(self, story: Story, folder: Path) -> None:
        self.story = story
        self.random = Random(story.seed)
        self._beside = Random(story.seed)
        self.messages = messages(story)
        self.marks = marks(story, self.messages)
        self.key_of = _key_of(story)
        self.folder = folder
        self.index = folder / "index"
        self.store = Store(self.schema, story.partitioned_by, is_strict=story.is_strict, file_size=story.file_size)
        self.letters = Store(LETTERS, None, is_strict=False, file_size=1 << 20)
        self.letters.contents = self.store.contents
        self.kept: dict[int, frozenset[int]] = {}
        """The dead letters at each snapshot, by offset."""
        self.refused: dict[str, set[int]] = {}
        """The partial updates that the files of an attempt, by its operation, don't apply. A dead letter alone doesn't
        tell: a later attempt may apply it.
        """
        self.happened: set[str] = set()
        self.effects: dict[int, Callable[[Content], Content]] = {}
        self.start = 0
        """The offset from which the table is read."""
        self._foreign = iter(range(1 << 30))
        self._files = iter(range(1 << 30))
        self._content: dict[str, list[Row]] = {}
        self.config = self.configured()
        self.store.on_add = lambda snapshot: self.kept.update({snapshot.id: frozenset(self.offsets())})

    def configured(self) -> tuple[Config, ResolvedTable]:
        story = self.story
        merges, late = story.merges != "never", "drop" if story.late else "apply"
        return _config(story.key, story.mode, story.deletes, story.order, merges=merges, late=late, soft=story.soft)

    def play(self) -> None:
        warnings = Warnings()
        log = logging.getLogger("rowdelta")
        level, propagate = log.level, log.propagate
        log.addHandler(warnings)
        log.setLevel(logging.WARNING)
        log.propagate = False
        try:
            for process in self.story.processes:
                self._run(process)
                for other in process.then:
                    self._others(other)
            self._drain()
        finally:
            log.removeHandler(warnings)
            log.setLevel(level)
            log.propagate = propagate
        self.check()
        if not self.happened & SPOILS_INDEX:
            rebuilt = [text for text in warnings.texts if "key index" in text]
            assert not rebuilt, rebuilt
        if not self.happened & {"crash", "error", "second driver"}:
            self._check_no_orphans()

    # -- the sink's processes

    def opened(self, clock: Clock, *, is_guest: bool = False) -> TableSink:
        """What a process does first.

        :param is_guest: see `TableSink`.
        """
        index_runs._opened.clear()  # of another process
        config, resolved = self.config
        table = MemoryTable(self.store, TARGET, clock)
        catalogs: Any = _Catalogs()
        plan = plan_table(catalogs, config, resolved, table)
        engine = MemoryEngine(
            catalogs,
            table,
            self.index,
            clock,
            tasks=self.story.tasks,
            leaves_idle_out=self.story.leaves_idle_out,
            batch_rows=self.story.batch_rows,
            kept=lambda: set(self.offsets()),
            refused=self.refused,
            is_ready=lambda: self._beside.random() < 0.5,
        )
        source: Any = _Source()
        key = TableKey(self.story.key, configured=True)
        letters = None
        if any(message.lacking for message in self.messages):
            letters = DeadLetters(config, lambda: MemoryTable(self.letters, config.dead_letter_table, clock))
        told = Told(self.store)
        sink = TableSink(config, resolved, table, plan, key, source, letters, engine, told, is_guest=is_guest)
        sink.remember_start(None)
        return sink

    def _run(self, process: Process) -> None:
        """Run one process to its end."""
        clock = Clock({step: self._happening(what) for step, what in process.happenings})
        try:
            sink = self.opened(clock)
            rewriting = Rewritings(sink, self.random) if self.story.rewrites else None
            try:
                for size in process.batches:
                    if not self._apply(sink, size):
                        break
                    if rewriting is not None:
                        rewriting.go_on()
            finally:
                if "crash" not in self.happened:
                    sink.upkeep.abandon_merge()
                    if rewriting is not None:
                        rewriting.stop()
        except CrashError:
            pass
        except FencedError:
            assert "second driver" in self.happened
        except RolledBackError:
            assert "rollback" in self.happened
        except CommitUnknownError:
            assert "error" in self.happened
        except TemporaryError:
            assert "error" in self.happened
        except OSError:
            assert "error" in self.happened

    def _apply(self, sink: TableSink, size: int) -> bool:
        """Apply the next micro-batch. Returns whether there was one."""
        start = int((sink.position or {"0": 0})["0"])
        end = min(start + size, len(self.messages))
        if start == end:
            return False
        sink.apply_batch(0, self._batch(start, end))
        sink.upkeep.tend()
        return True

    def _batch(self, start: int, end: int) -> TableBatch:
        changes: list[tuple[RowKind | None, Row, int, tuple[int, ...]]] = [
            (kind, row, place << 8 | number, self.messages[place].lacking)
            for place in range(start, end)
            for number, (kind, row) in enumerate(self.messages[place].changes)
        ]
        nothing = (None,) * len(SCHEMA.names)
        changes += [(None, nothing, place << 8, ()) for place in range(start, end) if self.messages[place].truncates]
        self.random.shuffle(changes)
        columns = {name: [row[n] for _, row, _, _ in changes] for n, name in enumerate(SCHEMA.names)}
        said = {"source": "t", "partition": 0, "reason": "column x: not sent", "error_class": "unavailable_value"}
        bad = [
            {"error_class": TRUNCATE} if kind is None else said | {"offset": order >> 8} if lacks else None
            for kind, _, order, lacks in changes
        ]
        lacking = [np.array([n in part for _, _, _, part in changes]) for n in range(len(SCHEMA.names))]
        arrays = {
            KIND: pa.array([int(RowKind.DELETE if kind is None else kind) for kind, _, _, _ in changes], pa.int8()),
            order_column(0): pa.array([self.order_value(order) for _, _, order, _ in changes], pa.int64()),
            BAD: pa.array(bad, _BAD_TYPE),
            MOVED: pa.array([self.marks.get((order >> 8, order & 255)) for _, _, order, _ in changes], pa.string()),
        }
        if any(message.lacking for message in self.messages):
            arrays[UNAVAILABLE] = unavailable_bits(lacking, np.any(lacking, axis=0))
        arrays |= {name: pa.array(columns[name], SCHEMA.field(name).type) for name in SCHEMA.names}
        frame: Any = pa.table(arrays)
        return TableBatch(lambda: frame, {"0": end}, None, changes=frame)

    def order_value(self, place: int) -> int:
        """:param place: of a change: its message's number, and its own number in it."""
        return place

    def _drain(self) -> None:
        """A last process that nothing disturbs reads the source to its end."""
        sink = self.opened(Clock())
        for _ in range(len(self.messages)):
            if not self._apply(sink, 7):
                break
        sink.upkeep.abandon_merge()
        assert (sink.position or {"0": 0})["0"] == len(self.messages)

    def offsets(self) -> list[int]:
        """The offsets of all dead letters."""
        files = self.letters.live.values()
        return [n for file in files for n in parquet(self.letters.contents[file.path]).column("offset").to_pylist()]

    # -- what happens

    def _happening(self, what: Happening) -> Callable[[Clock, str], None]:
        def happens(clock: Clock, step: str) -> None:
            if what == "crash":
                self.happened.add(what)
                clock.die(step)
            elif what == "error":
                self.happened |= {what, step}
                raise _error(step)
            else:
                self._others(what)

        return happens

    def _others(self, what: Others) -> None:
        if self.story.mode == "changelog" and f"{PREFIX}.position" not in self.store.properties:
            return  # such a sink begins with an empty table, or not at all
        self.happened.add(what)
        {
            "append": self._append,
            "append again": self._append_again,
            "delete": self._delete,
            "delete in place": self._delete_in_place,
            "update": self._update,
            "compaction": self._compact,
            "empty commit": lambda: self._commit(dict(self.store.live), "replace"),
            "alter": self._alter,
            "property": lambda: self.store.properties.update(comment=str(next(self._foreign))),
            "rollback": self._roll_back,
            "expiry": self._expire,
            "index lost": self._lose_index,
            "index damaged": self._damage_index,
            "index restored": self._restore_index,
            "second driver": self._second_driver,
        }[what]()

    def _commit(
        self,
        files: Mapping[str, MemoryFile],
        kind: Literal["append", "overwrite", "replace"],
        effect: Callable[[Content], Content] = lambda content: content,
    ) -> None:
        self.effects[self.store.add(files, kind).id] = effect

    def _append(self) -> None:
        number = 100 + next(self._foreign)
        self._append_row((number, f"b{number}", self.random.choice(REGIONS), 0))

    def _append_again(self) -> None:
        """A row of a key that the source may have too, as others do not know better."""
        key = self.random.randrange(KEYS)
        self._append_row((key, f"b{key}", self.random.choice(REGIONS), _AGAIN))

    def _append_row(self, row: Row) -> None:
        row += (None,) * (len(self.schema) - len(row))
        files = dict(self.store.live)
        self._write(files, [row])
        self._commit(files, "append", lambda content: content + Counter([row]))

    def _delete(self) -> None:
        """Rows of a value are deleted merge on read."""
        value = self.random.randrange(9)
        files = dict(self.store.live)
        for path, file in self.store.live.items():
            rows = self.rows_in(path)
            gone = {n for n, row in enumerate(rows) if row[3] == value} | set(file.deleted)
            if len(gone) == len(rows):
                del files[path]
            elif len(gone) > len(file.deleted):
                files[path] = replace(file, vector={"positions": sorted(gone), "record-count": len(gone)})
        if files != self.store.live:
            self._commit(files, "overwrite", lambda content: _kept(content, lambda row: row[3] != value))

    def _delete_in_place(self) -> None:
        """Rows of a value are deleted copy on write."""
        value = self.random.randrange(9)
        self._rewrite("overwrite", lambda row: row[3] == value, lambda row: None)

    def _update(self) -> None:
        """Rows are written again as they are, in other files, as a MERGE does it."""
        value = self.random.randrange(9)
        self._rewrite("overwrite", lambda row: row[3] == value, lambda row: row)

    def _rewrite(
        self, kind: Literal["overwrite", "replace"], is_meant: Callable[[Row], bool], new: Callable[[Row], Row | None]
    ) -> None:
        """Write the files anew that have rows which are meant."""
        files = dict(self.store.live)
        moved: list[Row] = []
        for path, file in self.store.live.items():
            rows = self._live_rows(file)
            if any(map(is_meant, rows)):
                del files[path]
                moved += [made for row in rows if (made := new(row) if is_meant(row) else row) is not None]
        if files == self.store.live:
            return
        self.random.shuffle(moved)
        self._write(files, moved)
        self._commit(files, kind, lambda content: _kept(content, lambda row: not is_meant(row) or new(row) is not None))

    def _compact(self) -> None:
        self._rewrite("replace", lambda row: True, lambda row: row)

    def _alter(self) -> None:
        name = f"note{next(self._foreign)}"
        self.store.schema = self.store.schema.append(pa.field(name, pa.string()))

    def _roll_back(self) -> None:
        earlier = [snapshot.id for snapshot in self.store.ancestors() if "position" in snapshot.sink]
        if earlier:
            self.store.current = self.random.choice(earlier)

    def _expire(self) -> None:
        """All but the newest snapshot."""
        self.store.forgotten |= {snapshot.id for snapshot in self.store.ancestors()} - {self.store.current or 0}

    def _lose_index(self) -> None:
        files = sorted(path for path in self.index.rglob("*") if path.is_file())
        for path in files if self.random.random() < 0.3 else self.random.sample(files, min(1, len(files))):
            path.unlink()

    def _damage_index(self) -> None:
        files = sorted(path for path in self.index.rglob("*") if path.is_file())
        if files:
            path = self.random.choice(files)
            content = bytearray(path.read_bytes())
            at = self.random.randrange(len(content))
            if self.random.random() < 0.5:
                content[at] ^= 1 << self.random.randrange(8)
            else:
                del content[at:]
            path.unlink()  # who has it mapped still sees the old content
            path.write_bytes(content)

    def _restore_index(self) -> None:
        """From a copy, which is made at the first call."""
        copy = self.folder / "copy"
        if copy.exists():
            shutil.rmtree(self.index, ignore_errors=True)
            shutil.copytree(copy, self.index)
        elif self.index.exists():
            shutil.copytree(self.index, copy)

    def _second_driver(self) -> None:
        mapped = dict(index_runs._opened)
        sink = self.opened(Clock())
        self._apply(sink, self.random.randint(1, 3))
        index_runs._opened.update(mapped)

    def _write(self, files: dict[str, MemoryFile], rows: list[Row]) -> None:
        """Write rows as another writer does: a file for each partition, ordered by nothing."""
        place = None if self.story.partitioned_by is None else self.schema.names.index(self.story.partitioned_by)
        by_partition: dict[str, list[Row]] = {}
        for row in rows:
            text = "{}" if place is None else json.dumps({self.story.partitioned_by: row[place]})
            by_partition.setdefault(text, []).append(row)
        for partition, part in by_partition.items():
            columns = {name: [row[n] for row in part] for n, name in enumerate(self.schema.names)}
            table = pa.table(columns, schema=self.schema)
            for added in self.store.schema.names[len(self.schema.names) :]:
                table = table.append_column(added, pa.nulls(len(part), pa.string()))
            stream = pa.BufferOutputStream()
            pq.write_table(table, stream)
            path = f"memory/foreign-{next(self._files)}.parquet"
            self.store.contents[path] = stream.getvalue().to_pybytes()
            description = {
                "path": path,
                "partition": partition,
                "rows": len(part),
                "size": len(self.store.contents[path]),
            }
            add_files(files, [json.dumps({**description, "columns": self.store.schema.names})], None)

    # -- what the table has

    def rows_in(self, path: str) -> list[Row]:
        """All rows of a data file, by position."""
        if path not in self._content:
            table = parquet(self.store.contents[path], self.schema.names)
            self._content[path] = list(zip(*(column.to_pylist() for column in table.columns), strict=True))
        return self._content[path]

    def _live_rows(self, file: MemoryFile) -> list[Row]:
        deleted = set(file.deleted)
        return [row for position, row in enumerate(self.rows_in(file.path)) if position not in deleted]

    def content(self, snapshot: Snapshot) -> Content:
        return Counter(row for file in snapshot.files.values() for row in self._live_rows(file))

    def check(self) -> None:
        """Check every snapshot: it has the rows that its parent and its own commit give."""
        expected: dict[int | None, Content] = {None: Counter()}
        offsets: dict[int | None, int] = {None: self.start}
        for snapshot in self.store.snapshots.values():
            before, offset = expected[snapshot.parent], offsets[snapshot.parent]
            if snapshot.id in self.effects:
                before = self.effects[snapshot.id](before)
            elif "position" in snapshot.sink:
                end = int(snapshot.sink["position"]["0"])
                assert offset < end, "a micro-batch was applied twice"
                refused = self.refused.get(snapshot.sink["operation"], set())
                assert refused <= self.kept[snapshot.id], "an update was not applied, and no dead letter was kept"
                given, start, offset = before, offset, end
                before = self._applied(given, start, end, refused)
                if "append again" in self.happened and self.content(snapshot) != before:
                    before = self._applied(given, start, end, refused, came_late=True)
            expected[snapshot.id], offsets[snapshot.id] = before, offset
            if self.story.deletes == "copy-on-write" and "position" in snapshot.sink:
                self._check_has_no_new_deletes(snapshot)
            found = self.content(snapshot)
            missing, extra = before - found, found - before
            assert not missing, f"missing after {snapshot.sink or snapshot.kind}: {missing}, and too much: {extra}"
            assert not extra, f"too much after {snapshot.sink or snapshot.kind}: {extra}"
            for file in snapshot.files.values():
                self._check_partition(file)
        letters = self.offsets()
        if "second driver" not in self.happened:  # which may not know that the first has just kept the same
            assert len(set(letters)) == len(letters), f"dead letters were kept twice: {letters}"

    def _check_has_no_new_deletes(self, snapshot: Snapshot) -> None:
        """With copy-on-write, a file has deletes only if another writer gave it some, and the commit left it alone."""
        before = self.store.snapshots[snapshot.parent].files if snapshot.parent is not None else {}
        for path, file in snapshot.files.items():
            assert file.vector is None or before.get(path) == file, f"{path} has got a vector"

    def _applied(
        self, content: Content, start: int, end: int, refused: Collection[int], *, came_late: bool = False
    ) -> Content:
        """The rows after a micro-batch. It takes all earlier rows of its keys away, also those of others. A TRUNCATE is
        about all keys.

        :param refused: the partial updates that nothing could complete.
        :param came_late: rows that others appended for keys of the source came after the tasks looked the keys up. What
            a removal says of its row was compared without them.
        """
        content = Counter(content)
        written: set[Key] = set()

        def seen() -> Content:
            return _kept(content, lambda row: row[3] != _AGAIN) if came_late else content

        for number, message in enumerate(self.messages[start:end], start):
            if message.truncates:
                content = Counter()
            elif message.lacking:
                self._apply_partial(content, number, end, number in refused)
            else:
                rows = {key: row for key, row in message.rows.items() if not self._stays(seen(), number, key, written)}
                content = _kept(content, lambda row, rows=rows: self.key_of(row) not in rows)  # type: ignore[misc]
                content += Counter(row for row in rows.values() if row is not None)
            written |= {key for key, row in message.rows.items() if row is not None}
        return content

    def _stays(self, content: Content, number: int, key: Key, written: Collection[Key]) -> bool:
        """Whether the key's only row is another one than the one that the message says has gone to another key.

        :param written: the keys of rows that the same micro-batch wrote: what only looks like half of a move is
            compared with these only.
        """
        found = [row for row in content.elements() if self.key_of(row) == key]
        message = self.messages[number]
        for place, (_, removed) in enumerate(message.changes):
            mark = self.marks.get((number, place))
            if mark is None or (mark.startswith(MOVED_SEPARATOR) and key not in written):
                continue
            if self.key_of(removed) == key and message.rows[key] is None and len(found) == 1:
                known = [SCHEMA.names.index(name) for name in known_columns(mark)]
                return any(removed[n] != found[0][n] for n in known if found[0][n] is not None)
        return False

    def _apply_partial(self, content: Content, number: int, end: int, is_refused: bool) -> None:
        """Change the row that a partial update is about, unless nothing could complete it."""
        message = self.messages[number]
        ((key, sent),) = message.rows.items()
        assert sent is not None
        found = [row for row in content.elements() if self.key_of(row) == key]
        if is_refused:
            assert len(found) != 1 or self.happened & CHANGES_ROWS, f"message {number} became a dead letter"
        elif len(found) == 1:
            content.subtract(found)
            content[tuple(found[0][n] if n in message.lacking else value for n, value in enumerate(sent))] += 1
        else:
            later = (m for m in self.messages[number + 1 : end] if not m.lacking)
            assert any(m.truncates or key in m.rows for m in later), f"message {number} had {len(found)} rows"

    def _check_partition(self, file: MemoryFile) -> None:
        for name, value in json.loads(file.partition).items():
            place = self.schema.names.index(name)
            assert all(row[place] == value for row in self.rows_in(file.path)), file

    def _check_no_orphans(self) -> None:
        """Whatever was written for an attempt that was given up is deleted."""
        snapshots = [*self.store.snapshots.values(), *self.letters.snapshots.values()]
        referenced = {path for snapshot in snapshots for path in snapshot.files}
        assert set(self.store.contents) <= referenced


def _kept(content: Content, is_kept: Callable[[Row], bool]) -> Content:
    return Counter({row: count for row, count in content.items() if is_kept(row)})


def _error(step: str) -> Exception:
    """What a failed step raises."""
    if "commit" in step or "rewrite" in step:
        return CommitUnknownError(f"no answer: {step}")
    if step.startswith(("look", "set")):
        return TemporaryError(f"no answer: {step}")
    return OSError(5, f"{step}: input/output error")


@cache
def _config(
    key: tuple[str, ...],
    mode: str,
    deletes: str,
    order: str,
    *,
    merges: bool,
    late: str,
    soft: bool = False,
    tracked: str | None = None,
) -> tuple[Config, ResolvedTable]:
    table: dict[str, Any] = {
        "source": "/nowhere/t",
        "target": TARGET,
        "key": list(key),
        "order_by": ["value"],
        "mode": mode,
        "deletes": deletes,
        "merge_small_files": merges,
        "late": late,
    }
    if soft:
        table["soft_delete"] = SOFT_DELETE
    if tracked is not None:
        table["history"] = {"track": tracked.split()}
    if order != "none":
        table["maintenance"] = {"rewrite": {order: ["region", "value"]}}
    config = Config.model_validate(
        {
            "sink": {"id": "story", "checkpoint": "/nowhere"},
            "source": {"type": "files", "format": "row-kind"},
            "catalogs": {"lake": {"type": "delta", "warehouse": "/nowhere"}},
            "tables": [table],
        }
    )
    return config, resolve_tables(config, ())[0]


@contextmanager
def tiny_thresholds(story: Story) -> Iterator[None]:
    """Writers flush every few rows, and minor compactions begin after few commits."""
    options = partial(DeltaOptions, flush_bytes=story.flush_bytes)
    parts = copy_on_write._parts
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task_plans, "DeltaOptions", options)
        patch.setattr(move, "_SORTED_BYTES", story.flush_bytes)
        patch.setattr(history, "PART_ENTRIES", 2)
        patch.setattr(merge_levels, "EVERY", 2)
        patch.setattr(index_probe, "_TIER", 2 if story.seed % 2 else 4)
        patch.setattr(keyindex, "_MERGED_BY_TASKS", story.seed % 3 * 4)
        patch.setattr(keyindex, "_MOST_AGES", 3 if story.seed % 5 == 0 else 48)
        if story.seed % 4 == 3:
            patch.setattr(keyindex, "_MOST_LOOKED_UP", 0)
        patch.setattr(minor_compaction, "_enough", lambda _: 1)
        patch.setattr(minor_compaction, "_FEWEST", 2)
        patch.setattr(minor_compaction, "_ON_DRIVER", 1 << 22 if story.merges == "on the driver" else -1)
        patch.setattr(copy_on_write, "_ON_DRIVER", 1 << 22 if story.merges == "on the driver" else -1)
        patch.setattr(copy_on_write, "_LEAST", 1)
        patch.setattr(deleted_keys, "_MOST_SMALL", 1)
        patch.setattr(copy_on_write, "_WORTH_A_TASK", 1)
        # else a file of some rows has a part for each of its bytes, nearly all without a row
        patch.setattr(copy_on_write, "_parts", lambda file, count: parts(file, min(count, 3)))
        yield


def played(story: Story, folder: Path, player: type[Player] = Player) -> None:
    """Play a story in a new folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tiny_thresholds(story):
        player(story, folder).play()
