"""Tasks that deal changes out and write them: each feeds its changes to a delta writer, and tells which files the
writer wrote.
"""

import json
import resource
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.accumulators import Accumulator

from changelog.decoding import failed_with
from changelog.rows import BAD, KEPT, SNAPSHOT, UNAVAILABLE, BadRecord, is_bad
from deltawriters import ContentFile, DeltaWriter, FileContent, TaskId, WriteResult
from deltawriters.append import AppendWriter
from deltawriters.combine import combined
from deltawriters.content import DataFiles
from deltawriters.old_rows import tell
from deltawriters.partitioning import PartitionedWriter
from deltawriters.resolve import IndexTask
from deltawriters.table import FileFactory
from sink.plans import TaskPlan
from sink.results import IndexPart, TaskResult
from sink.routing import KeyHash, is_truncate, to_all
from sink.spark.exchange import owned, packed
from sink.spark.snapshots import SnapshotRows
from sink.spark.tasks.worker import forget_archives, results, this_task

_SAMPLES = 3


@dataclass(frozen=True)
class Combine:
    """Combines decoded changes of the same key (`deltawriters.combine`).

    :param columns: all columns of the table, in the table's order.
    :param left_out: counts the changes that are left out, by kind.
    :param buffer_bytes: Arrow bytes of a buffer in which repeated keys are found.
    :param keeps_removals: see `combined`.
    """

    key: tuple[str, ...]
    columns: tuple[str, ...]
    left_out: Accumulator[dict[str, int]]
    buffer_bytes: int
    keeps_removals: bool = False

    def combined(self, changes: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        add, most = self.left_out.add, self.buffer_bytes
        return combined(changes, self.key, self.columns, add, most, keeps_removals=self.keeps_removals)


def route(
    combine: Combine | None,
    hash_keys: KeyHash,
    tasks: int,
    indexed: bool,
    part_rows: int,
    changes: Iterable[pa.RecordBatch],
    first: int = 0,
) -> Iterator[pa.RecordBatch]:
    """Deal changes out to tasks, for `run`."""
    kept = changes if combine is None else combine.combined(changes)
    yield from packed(to_all(hash_keys.added(kept), tasks), tasks, indexed, part_rows, first)
    forget_archives()


def own(hash_keys: KeyHash, tasks: int, indexed: bool, changes: Iterable[pa.RecordBatch]) -> Iterable[pa.RecordBatch]:
    """Keep this task's share of changes that all tasks get, for `run`."""
    if tasks == 1:
        return hash_keys.added(changes) if indexed else changes
    return owned(to_all(hash_keys.added(changes), tasks), this_task().partition, tasks, indexed)


def run(
    plan: TaskPlan, written: Accumulator[list[str]], changes: Iterable[pa.RecordBatch], first: int = 0
) -> Iterator[pa.RecordBatch]:
    """Write a task's changes. Yields one row: the JSON of a `TaskResult`.

    The task deletes its files before it raises any error.

    :param changes: changelog rows, with their hashes if the table has a key index.
    :param first: number of the first task that writes the table.
    :raises CardinalityError: two changes contradict each other.
    """
    task = this_task(plan.operation)
    result, paths = write_changes(plan, replace(task, partition=task.partition - first), changes)
    forget_archives()
    written.add(paths)
    yield results([result.to_json()])


def write_changes(plan: TaskPlan, task: TaskId, batches: Iterable[pa.RecordBatch]) -> tuple[TaskResult, list[str]]:
    """Write changes. The files are deleted before any error is raised.

    :return: what was written, and the paths of the files.
    """
    # the attempt's number makes the name unique: Spark may run a task twice at the same time
    index = plan.index.task(task.partition, f"{plan.operation}-{task.attempt}") if plan.index else None
    writer: DeltaWriter | AppendWriter
    if plan.options is None:
        writer = AppendWriter(plan.table, task, plan.order, lasting=plan.lasting)
    else:
        writer = DeltaWriter(plan.table, plan.options, task, index, plan.order, lasting=plan.lasting)
    dead = DeadLetterWriter(plan, task) if plan.dead_letters else None
    bad, undecoded, samples = Counter[str](), Counter[str](), list[str]()
    snapshots: SnapshotRows | None = None
    if plan.source_place is not None:
        snapshots = SnapshotRows(*plan.source_place, may_truncate=plan.options is not None)
    truncates = 0

    def reject(rejected: pa.StructArray) -> None:
        for found in pc.value_counts(rejected.field("error_class")):
            bad[found["values"].as_py()] += found["counts"].as_py()
        is_failure = pc.equal(rejected.field("error_class"), BadRecord.DECODER_FAILED)
        undecoded.update(map(failed_with, rejected.field("reason").filter(is_failure).to_pylist()))
        samples.extend(_sample(row) for row in rejected.slice(0, _SAMPLES - len(samples)).to_pylist())
        if dead:
            dead.write(rejected)

    try:
        for batch in batches:
            good, rejected, barriers = _split(batch)
            if len(barriers):
                assert isinstance(writer, DeltaWriter)  # decoders refuse a TRUNCATE of a table that only grows
                writer.truncate(barriers)
                truncates += len(barriers)
                if snapshots is not None:
                    snapshots.truncate(barriers)
            if rejected is not None:
                reject(rejected)
            if SNAPSHOT in good.schema.names:
                if snapshots is not None:
                    snapshots.add(good)
                good = good.drop_columns([SNAPSHOT])
            if good.num_rows:
                writer.write(good)
        result = writer.close()
        for letters in (*result.completed.letters, *result.late_letters):
            new = letters.filter(pc.not_equal(letters.field("error_class"), KEPT))
            if len(new):
                reject(new)
        dead_files = dead.close() if dead else []
        part, index_paths = _index_part(plan, index, result) if index and result.index else (None, [])
    except BaseException:
        writer.abort()
        if dead:
            dead.abort()
        raise
    found = TaskResult(
        files=[json.dumps(file.description) for file in result.files],
        rows=result.rows,
        records={content.value: result.records(content) for content in FileContent},
        contents=_contents(result.files),
        truncates=truncates,
        left=result.moves.left,
        untold=result.moves.untold,
        late=result.late,
        ignored=result.ignored,
        bad=dict(bad),
        undecoded=dict(undecoded),
        samples=samples,
        dead_letters=[json.dumps(file.description) for file in dead_files],
        dead_letter_paths=[file.path for file in dead_files],
        snapshot_partitions=sorted(snapshots.snapshot_partitions) if snapshots else [],
        streamed_partitions=sorted(snapshots.streamed_partitions) if snapshots else [],
        last_snapshot=sorted(snapshots.last_snapshot.items()) if snapshots else [],
        first_streamed=sorted(snapshots.first_streamed.items()) if snapshots else [],
        peak_memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        index=part,
    )
    return found, writer.created_paths + (dead.created_paths if dead else []) + index_paths


class DeadLetterWriter:
    """Appends bad records to the dead-letter table."""

    def __init__(self, plan: TaskPlan, task: TaskId) -> None:
        assert plan.dead_letters is not None
        self._table = plan.dead_letters
        self._target = plan.target
        self._factory = FileFactory(self._table, TaskId(task.partition, task.attempt, f"{task.operation}-bad"))
        self._writer = PartitionedWriter(self._table, self._factory, DataFiles())

    @property
    def created_paths(self) -> list[str]:
        return self._factory.created

    def write(self, bad: pa.StructArray) -> None:
        """Append records of `_rowdelta_bad` (`changelog.rows.BAD_FIELDS`)."""
        fields = {field.name: bad.field(i) for i, field in enumerate(bad.type)}
        fields["table"] = pa.repeat(self._target, len(bad))
        fields["time"] = pa.repeat(pa.scalar(datetime.now(UTC), pa.timestamp("us", "UTC")), len(bad))
        schema = self._table.arrow_schema
        columns = [
            # the table's owner may have added columns, for example to note how the record was handled
            pa.nulls(len(bad), field.type) if field.name not in fields else fields[field.name].cast(field.type)
            for field in schema
        ]
        self._writer.write(pa.table(columns, schema=schema))

    def close(self) -> list[ContentFile]:
        return self._writer.close()

    def abort(self) -> None:
        self._writer.abort()
        self._factory.delete_all()


def _contents(files: Sequence[ContentFile]) -> dict[str, tuple[int, int]]:
    """Number of files and their bytes, by content."""
    counts, sizes = Counter[str](), Counter[str]()
    for file in files:
        counts[file.content.value] += 1
        sizes[file.content.value] += file.size_in_bytes
    return {content: (count, sizes[content]) for content, count in counts.items()}


def _index_part(plan: TaskPlan, index: IndexTask, result: WriteResult) -> tuple[IndexPart, list[str]]:
    """What the driver has to know for the key index, and the paths of the index's files that the task wrote."""
    found = result.index
    assert plan.index is not None
    assert found is not None
    place = f"{index.slice.location}/{index.run_name}-positions"
    rows, file = tell(found.old_rows, plan.index.told_bytes, place, index.slice.io)
    part = IndexPart(
        runs=list(found.runs),
        merged=list(found.merged),
        old_rows=rows,
        new_vectors=dict(file.vector for file in result.files if file.vector is not None),
        keys={name: getattr(found, name) for name in ("inserted", "updated", "deleted", "absent", "duplicates")}
        | {"completed": result.completed.rows},
        completed_from=[*result.completed.files, *result.moves.files],
        probe_seconds=found.probe_seconds,
        deleted=[] if found.deleted_keys is None else [found.deleted_keys],
        truncates=[order.hex() for order in found.truncates],
        depends_on_others=result.completed.absent > 0 or plan.purges,
    )
    paths = [f"{index.slice.location}/{run.name}" for run in (*found.runs, *found.merged)]
    return part, paths if file is None else [*paths, file]


def _split(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.StructArray | None, pa.RecordBatch]:
    """The rows to apply, the bad records (None if there are none), and the rows that stand for a TRUNCATE. Only partial
    rows keep their records.
    """
    bad = is_bad(batch)
    good = batch if UNAVAILABLE in batch.schema.names else batch.drop_columns([BAD])
    if bad is None:
        return good, None, good.slice(0, 0)
    truncates = is_truncate(batch.column(BAD))
    rejected = batch.column(BAD).filter(pc.and_not(bad, truncates))
    return good.filter(pc.invert(bad)), rejected if len(rejected) else None, good.filter(truncates)


def _sample(row: dict[str, Any]) -> str:
    place = row["source"] if row["partition"] is None else f"{row['source']}-{row['partition']} offset {row['offset']}"
    return f"{place}: {row['reason']}"
