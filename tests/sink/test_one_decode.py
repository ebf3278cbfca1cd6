"""Several tables from one topic: a micro-batch is read, decoded and shuffled once for all that have reached the same
position.
"""

import functools
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import Mock
from uuid import uuid4

import pyarrow as pa
import pytest
from confluent_kafka import Producer
from pyspark.sql import SparkSession

from changelog import formats
from changelog.decoding import ChangelogDecoder
from changelog.formats.row_kind import RowKindRows
from changelog.rows import RowKind
from changelog.source_tables import Found
from changelog.versions import VersionColumns
from sink.config import Config
from sink.errors import RowdeltaError
from sink.plans import Share
from sink.results import TaskResult
from sink.routing import KeyHash
from sink.run.pipeline import Pipeline
from sink.sources.source import Range, SharedRead, TableBatch
from sink.spark.accumulators import ListParam
from sink.spark.joint import JointWriter
from sink.spark.tasks import decode, shares, write
from sink.spark.tasks.worker import this_task
from sink.spark.versions import to_arrow
from sink.spark.writing import SparkWriter
from sink.table import task_plans
from sink.table.microbatch import TableSink
from tests.changelog.messages import Message, raw_records, spec, sql
from tests.delta.log_model import DeltaLog
from tests.memory.engine import in_task
from tests.memory.history import versions
from tests.sink.harness import CrashError
from tests.stack.kafka import Kafka

COLUMNS = {"id": "bigint", "region": "string", "email": "string"}
KINDS = {kind.short: kind for kind in RowKind}


class Counted(RowKindRows):
    """Counts what it reads."""

    read: ClassVar[list[int]] = []

    def changes(self, records: pa.RecordBatch) -> Iterator[Found]:
        self.read.append(len(records))
        yield from super().changes(records)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    monkeypatch.setitem(formats.OURS, "row-kind", f"{__name__}:Counted")
    Counted.read.clear()
    return Counted.read


def batches(*sizes: int) -> list[pa.RecordBatch]:
    """Raw records of one partition with offsets from 0."""
    rows = iter(range(sum(sizes)))
    return [
        raw_records([Message({"row_kind": "+I", "seq": n, "id": n}, n) for n in islice(rows, size)]) for size in sizes
    ]


def decoders(count: int = 2) -> list[ChangelogDecoder]:
    plain = spec(COLUMNS, order_by=(("seq", sql("bigint")),))
    history = spec(COLUMNS, order_by=plain.order_by, history=VersionColumns("valid_from", "valid_to", "is_current"))
    return [ChangelogDecoder("row-kind", table) for table in (plain, history)]


def test_no_step_gets_far_ahead(read: list[int]) -> None:
    """What a step takes first is kept for the others, in memory."""
    taken = {"slow": 0, "fast": 0}
    ahead = []

    def step(name: str, at_once: int) -> Any:
        def run(changes: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for number, batch in enumerate(changes):
                taken[name] += len(batch)
                ahead.append(abs(taken["slow"] - taken["fast"]))
                if number % at_once == 0:
                    yield batch.slice(0, 0)
            yield batch

        return run

    list(decode.decode_together(decoders(), [step("slow", 1), step("fast", 4)], batches(*[10] * 20)))
    assert taken == {"slow": 200, "fast": 200}
    assert max(ahead) <= 50
    assert read == [10] * 20


def test_a_table_whose_changes_are_gathered_gets_no_further_than_the_others(read: list[int]) -> None:
    """It has few of them, say, so a shuffle's part is full only at the end of the topic."""
    taken, ahead = [0, 0], list[int]()

    def noting(number: int, changes: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in changes:
            taken[number] += len(batch)
            ahead.append(abs(taken[0] - taken[1]))
            yield batch

    left_out = SimpleNamespace(add=lambda _: None)
    combines = [write.Combine(("id",), tuple(COLUMNS), left_out, 1 << 26), None]  # type: ignore[arg-type]
    routes = [partial(write.route, combine, KeyHash(("id",)), 2, False, 4096) for combine in combines]
    steps = [lambda changes, n=n: routes[n](noting(n, changes)) for n in range(2)]
    rows = sum(len(found) for found in decode.decode_together(decoders(), steps, batches(*[10] * 20)))
    assert taken == [200, 200]
    assert rows == 4, "a part for each of the two tasks"
    assert max(ahead) <= 10
    assert len(read) == 20


@dataclass(frozen=True)
class Plan:
    """As much of a `TaskPlan` as `run_shares` looks at."""

    operation: str
    index: None = None


def test_small_micro_batches_are_decoded_once_too(read: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those of the same position are, and if one of the tables can't be written, the others are."""
    wrote: dict[str, int] = {}

    def write(plan: Any, _: Any, changes: Iterable[pa.RecordBatch]) -> tuple[TaskResult, list[str]]:
        wrote[plan.operation] = sum(map(len, changes))
        if plan.operation == "broken":
            raise ValueError("no room")
        return TaskResult(), []

    monkeypatch.setattr(shares, "write_changes", write)
    packed = shares.PackedShares()
    plain, history = decoders()
    for name, decoder, begin in (("a", plain, 0), ("broken", history, 0), ("b", history, 0), ("late", history, 3)):
        plan: Any = Plan(name)
        hash_: Any = None
        packed.add("topic", name, Share(decoder, plan, hash_, {"topic": {"0": begin}}))
    written = Mock()
    grouped = [batch.append_column(shares.GROUP, pa.repeat("topic", len(batch))) for batch in batches(4, 6)]
    with in_task(0, 1):
        (results,) = shares.run_shares(packed, written, grouped)
    found = {result["table"]: result.get("failed") for result in map(json.loads, results.column("result").to_pylist())}
    assert found == {"a": None, "b": None, "broken": "ValueError: no room", "late": None}
    assert wrote == {"a": 10, "broken": 10, "b": 10, "late": 7}
    assert read == [4, 6, 1, 6]


def test_after_a_failure_each_table_gets_a_job_of_its_own() -> None:
    def batch(begin: int) -> TableBatch:
        return TableBatch(Mock(), {}, 9, share=SharedRead([Range("topic", {"0": begin}, {"0": 9})], Mock()))

    batches = {
        f"{begin}-{number}": batch(begin) for begin, count in ((0, 1), (1, 9), (2, 2)) for number in range(count)
    }
    joint = JointWriter(Mock())
    assert joint.companions(batches) == [[f"1-{number}" for number in range(8)], ["2-0", "2-1"]]
    sinks = {"2-0": Mock(), "2-1": Mock()}
    sinks["2-0"].write_with.side_effect = ValueError("no room")
    assert joint.write_companions(sinks, batches["2-0"], dict.fromkeys(sinks, Mock())) == {}
    assert joint.companions(batches) == []


Change = tuple[RowKind, int, str]
"""Kind, key and region. Its place in the topic is its order value."""


@dataclass
class Twins:
    """A topic, and a job with a table of the current rows and one of all versions, in another format."""

    spark: SparkSession
    folder: Path
    kafka: Kafka
    changes: list[Change] = field(default_factory=list)
    more: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.name = f"twins{uuid4().hex[:10]}"
        self.kafka.create_topic(self.name, 2)

    def config(self) -> Config:
        lake = {"type": "hadoop", "warehouse": str(self.spark.conf.get("spark.sql.catalog.lake.warehouse"))}
        entry = {"source": self.name, "key": ["id"], "columns": COLUMNS, "order_by": ["seq"]}
        tables: list[dict[str, Any]] = [
            {"target": f"lake.{self.name}.current", "where": "region <> 'hidden'"},
            {"target": f"dlt.{self.name}.history", "history": {}},
            *self.more,
        ]
        return Config.model_validate(
            {
                "sink": {"id": "shop", "checkpoint": str(self.folder / "state")},
                "source": {
                    "type": "kafka",
                    "format": "row-kind",
                    "options": {"kafka.bootstrap.servers": self.kafka.bootstrap_servers},
                },
                "maintenance": {"budget": 0, "expire": None, "orphans": None},
                "catalogs": {"lake": lake, "dlt": {"type": "delta", "warehouse": str(self.folder / "delta")}},
                "tables": [entry | table for table in tables],
            }
        )

    def send(self, *changes: tuple[str, int, str]) -> None:
        producer = Producer({"bootstrap.servers": self.kafka.bootstrap_servers, "enable.idempotence": True})
        for kind, number, region in changes:
            row = {"row_kind": kind, "seq": len(self.changes), "id": number, "region": region, "email": f"{number}@x"}
            self.changes.append((KINDS[kind], number, region))
            key = json.dumps({"id": number}).encode()
            producer.produce(self.name, key=key, value=json.dumps(row).encode(), partition=number % 2)
        assert producer.flush(60) == 0

    def run(self) -> None:
        Pipeline(self.spark, self.config()).run()

    def rows(self, target: str) -> list[dict[str, Any]]:
        catalog, _, name = target.partition(".")
        if catalog == "lake":
            frame = self.spark.table(target)
        else:
            path = self.folder / "delta" / name.replace(".", "/")
            DeltaLog(path).check()
            frame = self.spark.read.format("delta").load(str(path))
        rows: list[dict[str, Any]] = to_arrow(frame).to_pylist()
        return rows

    def files(self) -> set[str]:
        """Of the tables and their key indexes."""
        lake = Path(str(self.spark.conf.get("spark.sql.catalog.lake.warehouse"))) / self.name
        folders = (lake, self.folder / "delta", self.folder / "state" / "index")
        return {str(path) for folder in folders for path in folder.rglob("*") if path.is_file()}

    def current(self, name: str = "current") -> dict[int, str]:
        rows = self.rows(f"lake.{self.name}.{name}")
        assert len(rows) == len({row["id"] for row in rows})
        return {row["id"]: row["region"] for row in rows}

    def versions(self) -> set[tuple[Any, ...]]:
        names = ("id", "region", "valid_from", "valid_to", "is_current")
        rows = [tuple(row[name] for name in names) for row in self.rows(f"dlt.{self.name}.history")]
        assert len(rows) == len(set(rows))
        return set(rows)

    def expected(self, count: int | None = None, hidden: str = "hidden") -> dict[int, str]:
        """The current rows after so many changes."""
        rows: dict[int, str] = {}
        for kind, number, region in self.changes[:count]:
            rows.pop(number, None)
            if kind in (RowKind.INSERT, RowKind.UPDATE_AFTER) and region != hidden:
                rows[number] = region
        return rows

    def expected_versions(self, count: int | None = None) -> set[tuple[Any, ...]]:
        events: dict[int, list[Any]] = {}
        for order, (kind, number, region) in enumerate(self.changes[:count]):
            events.setdefault(number, []).append((order, kind, (number, region)))
        return {version for of_key in events.values() for version in versions(of_key, [1])}


def fail_last(last: int, told: Path, plan: Any, written: Any, changes: Any, first: int = 0) -> Iterator[pa.RecordBatch]:
    """`sink.spark.tasks.write.run`, but the last task of a job fails, once the driver knows the others' files."""

    def failing() -> Iterator[pa.RecordBatch]:
        yield from changes
        while this_task().partition == last:
            if told.exists():
                raise CrashError("crash in the last task")
            time.sleep(0.05)

    yield from write.run(plan, written, failing(), first)


@contextmanager
def failing(twins: Twins, tasks: int) -> Iterator[list[set[str]]]:
    """Let the next joint job fail in the last of its tasks. Yields its files: all that were there, and those that are
    left when it has failed.
    """
    told, before, found, wrote = twins.folder / "told", twins.files(), list[set[str]](), list[str]()
    add, pause = ListParam.addInPlace, JointWriter._pause

    def adding(self: ListParam[str], known: list[str], more: list[str]) -> list[str]:
        wrote.extend(more[:1])  # a task tells the files of its table, and of the other table that it has none
        if len(wrote) == tasks - 1 and not found:
            found.append(twins.files() - before)
            told.touch()
        return add(self, known, more)

    with pytest.MonkeyPatch.context() as patch:

        def pausing(self: JointWriter, *arguments: Any) -> None:
            found.append(twins.files() - before)
            patch.undo()
            pause(self, *arguments)

        patch.setattr(ListParam, "addInPlace", adding)
        patch.setattr(JointWriter, "_pause", pausing)
        patch.setattr(write, "run", functools.partial(fail_last, tasks - 1, told))
        yield found


@pytest.mark.spark
@pytest.mark.kafka
def test_current_rows_and_versions_from_one_decode(
    spark: SparkSession, tmp_path: Path, kafka: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them dies between the commits of both, and their job fails. A third table, with another key, comes
    later.
    """
    spark.conf.set("spark.sql.shuffle.partitions", "2")
    monkeypatch.setattr(task_plans, "SMALL_BATCH", 0)
    jobs: list[set[str]] = []
    write, write_with, commit = SparkWriter.write, SparkWriter.write_with, TableSink.commit

    def name(writer: SparkWriter) -> str:
        return writer._plan.section.target.rpartition(".")[2]

    def alone(writer: SparkWriter, *arguments: Any, **options: Any) -> Any:
        jobs.append({name(writer)})
        return write(writer, *arguments, **options)

    def together(writer: SparkWriter, others: Sequence[SparkWriter], *arguments: Any) -> Any:
        jobs.append({name(each) for each in (writer, *others)})
        return write_with(writer, others, *arguments)

    monkeypatch.setattr(SparkWriter, "write", alone)
    monkeypatch.setattr(SparkWriter, "write_with", together)

    def dies(which: str) -> None:
        """Run, and die before the commit of one table. It is tried once more, without the other."""

        def failing(sink: TableSink, *arguments: Any) -> Any:
            if sink.table.name.endswith(which):
                raise CrashError
            return commit(sink, *arguments)

        jobs.clear()
        with monkeypatch.context() as patch:
            patch.setattr(TableSink, "commit", failing)
            with pytest.raises(RowdeltaError):
                twins.run()
        assert jobs == [{"current", "history"}, {which}]

    def goes_on(*expected: set[str]) -> None:
        jobs.clear()
        twins.run()
        assert sorted(map(sorted, jobs)) == sorted(map(sorted, expected))
        assert (twins.current(), twins.versions()) == (twins.expected(), twins.expected_versions())

    twins = Twins(spark, tmp_path, kafka)
    twins.send(("+I", 1, "eu"), ("+I", 2, "eu"), ("+U", 1, "us"), ("+I", 3, "hidden"), ("+I", 4, "eu"))
    goes_on({"current", "history"})
    before = len(twins.changes)
    twins.send(("-U", 1, "us"), ("+U", 1, "hidden"), ("-D", 2, "eu"), ("+U", 3, "eu"), ("+U", 3, "us"))
    dies("history")
    assert (twins.current(), twins.versions()) == (twins.expected(), twins.expected_versions(before))
    goes_on({"history"})
    before = len(twins.changes)
    twins.send(("+U", 1, "ap"), ("+I", 2, "again"), ("-D", 4, "eu"))
    dies("current")
    assert (twins.current(), twins.versions()) == (twins.expected(before), twins.expected_versions())
    twins.send(("+U", 3, "hidden"))
    goes_on({"current"}, {"history"})  # their positions differ at the beginning of this micro-batch

    twins.send(("+U", 1, "eu"), ("-D", 3, "hidden"), *(("+I", number, "eu") for number in range(6, 60)))
    with failing(twins, 4) as files:
        goes_on({"current", "history"}, {"current"}, {"history"})
    for place in ("warehouse/*/current/data/*", "delta/*/history/*", "*.current/runs/*", "*.history/runs/*"):
        assert any(fnmatch(path, f"*/{place}") for path in files[0])
    assert files[1:] == [set()]

    twins.more = [{"target": f"lake.{twins.name}.by_email", "key": ["email"]}]
    twins.send(("+U", 2, "eu"))
    goes_on({"by_email"}, {"current", "history"})
    assert twins.current("by_email") == twins.expected(hidden="")
    twins.send(("+U", 2, "us"), ("-D", 1, "ap"), ("+I", 5, "eu"))
    goes_on({"by_email", "current", "history"})
    assert twins.current("by_email") == twins.expected(hidden="")
