"""Inside a Spark task: record batches from the JVM into a delta writer, descriptors of the written files back out."""

import json
import resource
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from zipimport import zipimporter

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.accumulators import Accumulator, AccumulatorParam

from changelog.rows import BAD, SNAPSHOT
from deltawriters import ContentFile, DeltaOptions, DeltaWriter, FileContent, TableSpec, TaskId
from deltawriters.files import DataFiles, FileFactory
from deltawriters.partitioning import PartitionedWriter

RESULT_SCHEMA = "result string"
_SAMPLES = 3


@dataclass(frozen=True)
class TaskPlan:
    """What every task of one micro-batch and table must know. Pickles small.

    :param dead_letters: the dead-letter table, or None if a bad record stops the job.
    :param source_partition: the order column with the Kafka partition, to say which partitions had snapshot rows.
    :param new_bad_records: which bad records the dead-letter table doesn't have yet, as a mask; None if it has none.
    """

    table: TableSpec
    options: DeltaOptions
    operation: str
    target: str
    dead_letters: TableSpec | None
    source_partition: str | None
    new_bad_records: Callable[[pa.StructArray], pa.BooleanArray] | None = None


class PathList(AccumulatorParam[list[str]]):
    """Paths written by finished tasks: they reach the driver even if the job fails later, so that it can delete them."""

    def zero(self, value: list[str]) -> list[str]:
        return []

    def addInPlace(self, value1: list[str], value2: list[str]) -> list[str]:  # noqa: N802 - Spark's name
        return value1 + value2


def run(plan: TaskPlan, written: Accumulator[list[str]], batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Write a task's changes. Yields one row: a JSON object with `files`, `dead_letters`, counts and samples.

    :raises CardinalityError: two changes contradict each other. Whatever is raised, the task's files are deleted first.
    """
    context = TaskContext.get()
    assert context is not None
    task = TaskId(context.partitionId(), context.taskAttemptId(), plan.operation)
    writer = DeltaWriter(plan.table, plan.options, task)
    dead = DeadLetterWriter(plan, task) if plan.dead_letters else None
    bad, samples = 0, list[str]()
    snapshot_partitions, streamed_partitions = set[int](), set[int]()
    try:
        for batch in batches:
            good, rejected = _split(batch)
            if rejected is not None and plan.new_bad_records is not None:
                rejected = rejected.filter(plan.new_bad_records(rejected))
            if rejected is not None:
                bad += len(rejected)
                samples += [_sample(row) for row in rejected.slice(0, _SAMPLES - len(samples)).to_pylist()]
                if dead:
                    dead.write(rejected)
            if SNAPSHOT in good.schema.names:
                if plan.source_partition is not None and plan.options.mode == "changelog":
                    partitions, is_snapshot = good.column(plan.source_partition), good.column(SNAPSHOT)
                    snapshot_partitions |= set(partitions.filter(is_snapshot).unique().to_pylist())
                    streamed_partitions |= set(partitions.filter(pc.invert(is_snapshot)).unique().to_pylist())
                good = good.drop_columns([SNAPSHOT])
            if good.num_rows:
                writer.write(good)
        result = writer.close()
        dead_files = dead.close() if dead else []
    except BaseException:
        writer.abort()
        if dead:
            dead.abort()
        raise
    _forget_archives()
    written.add(writer.created_paths + (dead.created_paths if dead else []))
    schema = plan.table.iceberg_schema
    summary: dict[str, Any] = {
        "files": [file.to_json(schema) for file in result.files],
        "rows": result.rows,
        "bytes": sum(file.size_in_bytes for file in result.files),
        "records": {content.value: result.records(content) for content in FileContent},
        "bad": bad,
        "samples": samples,
        "snapshot_partitions": sorted(snapshot_partitions),
        "streamed_partitions": sorted(streamed_partitions),
        "peak_memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    if plan.dead_letters:
        summary["dead_letters"] = [file.to_json(plan.dead_letters.iceberg_schema) for file in dead_files]
    yield pa.RecordBatch.from_pydict({"result": [json.dumps(summary)]})


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
        self._writer.write(
            pa.table([fields[name].cast(schema.field(name).type) for name in schema.names], schema=schema)
        )

    def close(self) -> list[ContentFile]:
        return self._writer.close()

    def abort(self) -> None:
        self._writer.abort()
        self._factory.delete_all()


def _forget_archives() -> None:
    """Drop Python's importers of zip and jar files, before PySpark's worker calls `importlib.invalidate_caches` for the next task.

    Up to Python 3.12 each importer then reads its archive's directory again: pyspark.zip a dozen times, and every jar of `--packages`. That
    took 100 to 250 ms a task, more than all the work done there. An import that needs one makes it anew, from what was read before.
    """
    for path, importer in list(sys.path_importer_cache.items()):
        if isinstance(importer, zipimporter):
            del sys.path_importer_cache[path]


def _split(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.StructArray | None]:
    """The rows to apply, and the bad records if there are any."""
    bad = batch.column(BAD)
    good = batch.drop_columns([BAD])
    if bad.null_count == len(bad):
        return good, None
    return good.filter(bad.is_null()), bad.drop_null()


def _sample(row: dict[str, Any]) -> str:
    place = row["source"] if row["partition"] is None else f"{row['source']}-{row['partition']} offset {row['offset']}"
    return f"{place}: {row['reason']}"
