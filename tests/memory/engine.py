"""Runs the programs of tasks one after the other in this process, without Spark."""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark import TaskContext
from pyspark.accumulators import Accumulator, AccumulatorParam

from changelog.rows import BAD, KEPT, PREFIX, UNAVAILABLE, unavailable_bits, unavailable_columns
from deltawriters import DeltaWriter, WriteResult
from deltawriters.keyindex import IndexSlice, RunInfo
from deltawriters.keyindex.versions import IndexLostError
from deltawriters.scratch import Scratch
from sink.plans import Groups, RewritePlan
from sink.results import TaskResult
from sink.routing import to_all
from sink.sources.source import TableBatch
from sink.spark.exchange import owned
from sink.spark.failures import failure_of
from sink.spark.job_errors import job_error
from sink.spark.tasks import index, move, write
from sink.spark.tasks.index import merge_runs
from sink.spark.tasks.purge import Removals
from sink.table.engine import Decoded, KeyReading
from sink.table.table_plan import TablePlan
from sink.table.task_plans import TaskPlans
from sink.table.written import Begun, Written, sum_up
from sink.targets.catalogs import Catalogs
from sink.targets.seam import Table
from sink.targets.values import LiveFile
from tests.memory.storage import Clock, SteppingFiles
from tests.memory.table import MemoryFile, MemoryTable
from tests.memory.writers import parquet

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

T = TypeVar("T")


@contextmanager
def in_task(number: int, attempt: int) -> Iterator[None]:
    """Who a task is, for its program."""
    context = object.__new__(TaskContext)
    context._partitionId, context._taskAttemptId = number, attempt
    before, TaskContext._taskContext = TaskContext._taskContext, context
    try:
        yield
    finally:
        TaskContext._taskContext = before


@contextmanager
def _noting(refused: set[int]) -> Iterator[None]:
    """Note which partial rows a task's writer can't complete."""

    class Noting(DeltaWriter):
        def close(self) -> WriteResult:
            result = super().close()
            for part in result.completed.letters:
                refused.update(part.field("offset").to_pylist())
            return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write, "DeltaWriter", Noting)
        yield


class Later(Future[T]):
    """Work that is done while somebody looks whether it is, or waits for it."""

    def __init__(self, work: Callable[[], T], is_ready: Callable[[], bool]) -> None:
        super().__init__()
        self._work = work
        self._is_ready = is_ready

    def done(self) -> bool:
        if not super().done() and self._is_ready():
            self._do()
        return super().done()

    def result(self, timeout: float | None = None) -> T:
        if not super().done():
            self._do()
        return super().result(timeout)

    def _do(self) -> None:
        try:
            self.set_result(self._work())
        except Exception as error:  # noqa: BLE001 - whoever waits for it gets it
            self.set_exception(error)


class MemoryEngine:
    """See `sink.table.engine.Engine`.

    :param catalogs: has the table.
    :param folder: of the key index.
    :param tasks: number of tasks that share a micro-batch.
    :param leaves_idle_out: a task without changes doesn't run, and so doesn't merge its share of the index, as Spark
        may do it.
    :param batch_rows: most rows of a record batch.
    :param clock: of the process.
    :param kept: returns the offsets of the dead letters that are kept.
    :param refused: gets, for each attempt's operation, the offsets of the partial rows that nothing could complete.
    :param is_ready: whether work beside micro-batches is done when somebody looks. By default it is done at once.
    """

    def __init__(
        self,
        catalogs: Catalogs,
        table: MemoryTable,
        folder: Path,
        clock: Clock,
        *,
        tasks: int = 1,
        leaves_idle_out: bool = False,
        batch_rows: int = 1000,
        kept: Callable[[], Collection[int]] = tuple,
        refused: dict[str, set[int]] | None = None,
        is_ready: Callable[[], bool] | None = None,
    ) -> None:
        self.catalogs = catalogs
        self.clock = clock
        self.tasks = tasks
        self.leaves_idle_out = leaves_idle_out
        self.batch_rows = batch_rows
        self.kept = kept
        self.refused = {} if refused is None else refused
        self.table = table
        self._is_ready = is_ready
        self._folder = folder
        self._attempts = iter(range(1, 1 << 30))

    def another(self) -> "MemoryEngine":
        return self

    def beside(self, work: Callable[[], T], *, is_long: bool = False) -> Future[T]:
        del is_long
        later = Later(work, self._is_ready or (lambda: True))
        if self._is_ready is None:
            later.done()
        return later

    def writer(self, plan: TablePlan, tasks: TaskPlans, files: Scratch) -> "MemoryWriter":
        return MemoryWriter(self, plan, tasks, files)

    def index_folder(self) -> "DiskFolder":
        return DiskFolder(self._folder, self.clock)

    def table_folder(self) -> "DiskFolder":
        raise NotImplementedError("no story removes orphans")

    def next_attempt(self) -> int:
        return next(self._attempts)

    def removals(self, table: Table, plan: TablePlan, before: datetime) -> "tuple[DataFrame, int]":
        self.clock.step("look for rows to purge")
        soft, marks, found = plan.section.soft_delete, plan.changelog.soft_delete, list[pa.RecordBatch]()
        assert soft is not None
        assert marks is not None
        made = Removals.of(plan, marks.columns)
        names = dict.fromkeys([*plan.section.key, *made.marks, *made.order.values()])
        for file in self.table.store.live.values():
            rows = parquet(self.table.store.contents[file.path])
            rows = rows.take(pa.array(np.setdiff1d(np.arange(len(rows)), np.array(file.deleted, np.int64))))
            rows = rows.filter(pc.field(soft.column) & (pc.field(soft.at) < before))
            found += rows.select(list(names)).to_batches()
        changes: Any = pa.Table.from_batches(list(made(found)), made.schema)
        return changes, len(changes)

    def read_keys(self, files: Sequence[LiveFile], reading: KeyReading) -> list[RunInfo]:
        self.clock.step("read keys")
        numbers = np.arange(len(files), dtype=np.uint64)
        batches = (_keys(file.handle, number, reading, self.table.store.contents) for number, file in enumerate(files))
        entries = index.index_entries(reading.table, numbers, reading.hash, reading.index, batches)
        with in_task(0, self.next_attempt()):
            indexed = [file.file for file in files]
            results = list(index.build_index(reading.index, indexed, reading.sequence, uuid4().hex, entries))
        return [RunInfo.from_json(run) for text in _texts(results) for run in json.loads(text)]

    def merge_runs(self, index: IndexSlice, name: str) -> list[RunInfo]:
        self.clock.step("merge runs")
        edges = [2**64 * number // self.tasks for number in range(self.tasks + 1)]
        found = list[RunInfo]()
        for number, ranges in enumerate(pairwise(edges)):
            with in_task(number, self.next_attempt()):
                found += map(RunInfo.from_json, merge_runs(index, name, [ranges]))
        return found

    @property
    def parallelism(self) -> int:
        return self.tasks

    def rewrite(self, plan: RewritePlan, groups: Groups, written: list[str]) -> Sequence[Mapping[str, Any]]:
        results: list[Mapping[str, Any]] = []
        for number, group in enumerate(groups):
            self.clock.step("start a task")
            with in_task(number, self.next_attempt()):
                results += move.rewrite(plan, _adding(written), [[group]])  # type: ignore[list-item]
        return results


class MemoryWriter:
    """See `sink.table.engine.BatchWriter`. Batches have their changes as an Arrow table, in the place of a frame."""

    def __init__(self, engine: MemoryEngine, plan: TablePlan, tasks: TaskPlans, files: Scratch) -> None:
        self._engine = engine
        self._scratch = files
        self.follow(plan, tasks)

    def follow(self, plan: TablePlan, tasks: TaskPlans) -> None:
        self._plan = plan
        self._task_plans = tasks

    def write(self, batch: TableBatch, begun: Begun, *, may_repeat: bool) -> Written:
        tasks = self._engine.tasks
        plan = self._task_plans.plan(begun, tasks)
        changes: Any = batch.changes if batch.rows is None else batch.rows.changes(self._plan)
        if may_repeat:
            self._engine.clock.step("look for dead letters")
            changes = _marked(changes, self._engine.kept())
        batches = _in_types(changes, self._plan).to_batches(self._engine.batch_rows)
        hashed = list(to_all(self._task_plans.hash(begun, tasks).added(batches), tasks))
        results = []
        self._scratch.keep()
        refused = self._engine.refused.setdefault(begun.operation, set())
        try:
            for number in range(tasks):
                own = [part for part in owned(hashed, number, tasks, keep_hash=True) if len(part)]
                if own or not self._engine.leaves_idle_out:
                    self._engine.clock.step("start a task")
                    with in_task(number, self._engine.next_attempt()), _noting(refused):
                        results += _texts(list(write.run(plan, _adding(self._scratch.paths), own)))
        except Exception as error:
            self._scratch.delete()
            failure = failure_of(error)
            if failure is not None and failure.kind == "corrupt index":
                raise IndexLostError(failure.message) from error
            raise job_error(self._plan.section.target, error) from error
        return sum_up(begun, tasks, [TaskResult.from_json(json.loads(text)) for text in results], {}, {})

    def write_with(self, others: Sequence[Self], batch: TableBatch, begun: Sequence[Begun]) -> list[Written]:
        raise NotImplementedError("a supervisor has tables written together, by Spark")

    def decoded(self, records: "DataFrame", keep: "Callable[[DataFrame], DataFrame]") -> Decoded:
        raise NotImplementedError("only a replay decodes without writing, by Spark")


class DiskFolder:
    """See `sink.table.engine.IndexFolder`."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self.location = str(folder)
        self.io = SteppingFiles(clock)
        self.io_properties: tuple[tuple[str, str], ...] = ()
        self._clock = clock
        for part in ("runs", "versions", "vectors"):
            (folder / part).mkdir(parents=True, exist_ok=True)

    def names(self, folder: str) -> list[str]:
        self._clock.step("list the index")
        place = Path(self.location, folder)
        return [path.name for path in place.iterdir()] if place.exists() else []

    def delete(self, paths: Collection[str]) -> None:
        for path in paths:
            self._clock.step("delete a file of the index")
            Path(self.location, path).unlink(missing_ok=True)


class _Lists(AccumulatorParam[list[str]]):
    """Adds to the same list, so that others see it."""

    def zero(self, value: list[str]) -> list[str]:
        return []

    def addInPlace(self, value1: list[str], value2: list[str]) -> list[str]:  # noqa: N802 - Spark's name
        value1 += value2
        return value1


def _adding(paths: list[str]) -> "Accumulator[list[str]]":
    return Accumulator(-1, paths, _Lists())


def _texts(results: Iterable[pa.RecordBatch]) -> list[str]:
    return [text for batch in results for text in batch.column(0).to_pylist()]


def _marked(changes: pa.Table, kept: Collection[int]) -> pa.Table:
    """The changes, all of whose dead letters are of partial rows, with the class `KEPT` of those that are kept."""
    bad = changes.column(BAD).combine_chunks()
    is_kept = pc.is_in(pc.struct_field(bad, ["offset"]), pa.array(kept, pa.int64()))
    fields = {field.name: bad.field(field.name) for field in bad.type}
    fields["error_class"] = pc.if_else(is_kept, KEPT, fields["error_class"])
    marked = pa.StructArray.from_arrays(list(fields.values()), fields=list(bad.type), mask=bad.is_null())
    return changes.set_column(changes.column_names.index(BAD), changes.schema.field(BAD), marked)


def _in_types(changes: pa.Table, plan: TablePlan) -> pa.Table:
    """The changes with all of the table's columns, as a decoder makes them."""
    before = sum(not name.startswith(PREFIX) for name in changes.column_names)
    added = [column.name for column in plan.columns if column.name not in changes.column_names]
    for name in added:
        changes = changes.append_column(name, pa.nulls(len(changes), pa.string()))
    if added and UNAVAILABLE in changes.column_names:
        bits = changes.column(UNAVAILABLE).combine_chunks()
        partial = bits.is_valid().to_numpy(zero_copy_only=False)
        lacking = np.zeros((len(bits), before + len(added)), np.bool_)
        lacking[partial, :before] = unavailable_columns(bits.drop_null(), before)
        place = changes.column_names.index(UNAVAILABLE)
        changes = changes.set_column(place, UNAVAILABLE, unavailable_bits(list(lacking.T), partial))
    return changes


def _keys(file: MemoryFile, number: int, reading: KeyReading, contents: Mapping[str, bytes]) -> pa.RecordBatch:
    """Keys and order values of a file's live rows, as `task.index_entries` takes them."""
    order = reading.index.order
    current = reading.index.columns_of_versions
    names = list(dict.fromkeys((*reading.hash.key, *(order.columns if order is not None else ()), *current)))
    rows = parquet(contents[file.path], names)
    places = np.setdiff1d(np.arange(len(rows)), np.array(file.deleted, np.int64))
    keys = rows.take(pa.array(places)).combine_chunks()
    columns = {name: _only_chunk(keys.column(name)) for name in names}
    columns[index.INDEX_FILE] = pa.array(np.full(len(places), number, np.int64))
    columns[index.INDEX_POS] = pa.array(places)
    return pa.RecordBatch.from_pydict(columns)


def _only_chunk(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.array([], column.type)
