"""What runs inside a Spark task: it feeds record batches to a delta writer, and returns descriptions of the files that
the writer wrote.
"""

import io
import json
import pickle
import resource
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, ClassVar, TypeVar
from zipimport import zipimporter

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.accumulators import Accumulator, AccumulatorParam

from changelog.changes import MOVED_AWAY, RAW_SCHEMA
from changelog.decoding import ChangelogDecoder, Stated, failed_with, merged_facts, merged_types
from changelog.formats.row_kind_parquet import SOURCE, FileReader, typed_records
from changelog.rows import BAD, BLOCK, FILE, HASH, KEPT, ROW, SNAPSHOT, UNAVAILABLE, BadRecord, is_bad
from deltawriters import ContentFile, DeltaOptions, DeltaWriter, FileContent, TableSpec, TaskId, WriteResult
from deltawriters.append import AppendWriter
from deltawriters.combine import combined
from deltawriters.content import DataFiles
from deltawriters.keyindex import RUN_ENTRIES, Entries, IndexedFile, IndexSlice, RunInfo, low_hash, write_run
from deltawriters.old_rows import tell
from deltawriters.ordering import RowOrder
from deltawriters.partitioning import PartitionedWriter
from deltawriters.resolve import IndexTask, key_columns
from deltawriters.rewrite import CopyGroup, RewriteGroup, Rewriter
from deltawriters.table import FileFactory
from sink.spark.exchange import Step, owned, packed
from sink.spark.routing import KeyHash, is_truncate, range_of, to_all
from sink.spark.snapshots import SnapshotRows

T = TypeVar("T")

RESULT_SCHEMA = "result string"
INDEX_FILE = "_rowdelta_file"
INDEX_POS = "_rowdelta_pos"
_LOW = "_rowdelta_low"
_SAMPLES = 3


@dataclass(frozen=True)
class IndexPlan:
    """The key index for a micro-batch. The range of the high hash is cut into `tasks` parts; task i owns part i.

    :param sequence: sequence number of the runs that the tasks write.
    :param told_bytes: most bytes of positions of old rows that each task tells the driver (`deltawriters.old_rows`).
    """

    slice: IndexSlice
    sequence: int
    tasks: int
    told_bytes: int

    def task(self, number: int, operation: str) -> IndexTask:
        """The part that task `number` owns."""
        first, last = range_of(number, self.tasks)
        return IndexTask(self.slice, first, last, self.sequence, f"{operation}-{number:05d}")


@dataclass(frozen=True)
class TaskPlan:
    """What every task of one micro-batch and table must know. It is small when pickled.

    :param options: None for a table that only grows.
    :param dead_letters: the dead-letter table, or None if a bad record stops the job.
    :param source_place: the order columns with the Kafka partition and the place in it. The task reports which
        partitions had snapshot rows. None if nobody needs this report.
    :param lasting: pack all data files for a long life (`sink.run.plan.files_last`).
    :param order: in which rows are written.
    """

    table: TableSpec
    options: DeltaOptions | None
    operation: str
    target: str
    dead_letters: TableSpec | None
    source_place: tuple[str, str] | None
    index: IndexPlan | None = None
    lasting: bool = False
    order: RowOrder | None = None


@dataclass(frozen=True)
class Share:
    """A table's part in a job that writes several tables. One task writes the whole table, so it owns all hashes."""

    decoder: ChangelogDecoder
    plan: TaskPlan
    hash: KeyHash


class PackedShares:
    """Shares by source, compressed one after the other: those of tables of one pattern say nearly the same."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._compressor: Any = zlib.compressobj(1)

    def __getstate__(self) -> dict[str, Any]:
        return {"_parts": self._parts}

    def add(self, source: str, share: Share) -> None:
        self._parts.append(self._compressor.compress(pickle.dumps((source, share))))
        self._parts.append(self._compressor.flush(zlib.Z_SYNC_FLUSH))

    @property
    def size(self) -> int:
        """In bytes."""
        return sum(map(len, self._parts))

    def unpacked(self) -> dict[str, Share]:
        stream = io.BytesIO(zlib.decompressobj().decompress(b"".join(self._parts)))
        size = stream.getbuffer().nbytes
        found: dict[str, Share] = {}
        while stream.tell() < size:
            source, share = pickle.load(stream)
            found[source] = share
        return found


class ListParam(AccumulatorParam[list[T]]):
    """Collects the paths that finished tasks wrote. The driver gets them even if the job fails later, and deletes the
    files.
    """

    def zero(self, value: list[T]) -> list[T]:
        return []

    def addInPlace(self, value1: list[T], value2: list[T]) -> list[T]:  # noqa: N802 - Spark's name
        return value1 + value2


class Counts(AccumulatorParam[dict[str, int]]):
    """Adds up numbers by name."""

    def zero(self, value: dict[str, int]) -> dict[str, int]:
        return {}

    def addInPlace(self, value1: dict[str, int], value2: dict[str, int]) -> dict[str, int]:  # noqa: N802 - Spark's name
        return dict(Counter(value1) + Counter(value2))


@dataclass(frozen=True)
class Combine:
    """Combines decoded changes of the same key (`deltawriters.combine`).

    :param columns: all columns of the table, in the table's order.
    :param left_out: counts the changes that are left out, by kind.
    :param buffer_bytes: Arrow bytes of a buffer in which repeated keys are found.
    """

    key: tuple[str, ...]
    columns: tuple[str, ...]
    left_out: Accumulator[dict[str, int]]
    buffer_bytes: int

    def combined(self, changes: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return combined(changes, self.key, self.columns, self.left_out.add, self.buffer_bytes)


class ObservedTypes(AccumulatorParam[dict[str, str]]):
    """Types that decoders saw and that the table can't store (`changelog.decoding.Observed`)."""

    def zero(self, value: dict[str, str]) -> dict[str, str]:
        return {}

    def addInPlace(self, value1: dict[str, str], value2: dict[str, str]) -> dict[str, str]:  # noqa: N802 - Spark's name
        return merged_types(value1, value2)


class FirstPlaces(AccumulatorParam[Stated]):
    """The keys that the messages state, with the first place of each."""

    NONE: ClassVar[Stated] = {}

    def zero(self, value: Stated) -> Stated:
        return self.NONE

    def addInPlace(self, value1: Stated, value2: Stated) -> Stated:  # noqa: N802 - Spark's name
        return merged_facts(value1, value2)


def decode(decoder: ChangelogDecoder, then: Step | None, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Decode a task's raw records, and pass the changes to `then`.

    :param batches: columns of `RAW_SCHEMA`. Columns that the source doesn't have may be left out, and a value may be
        text.
    """
    changes = decoder(numbered(map(_completed, batches)))
    yield from changes if then is None else then(changes)
    _forget_archives()


def decode_columns(
    decoder: ChangelogDecoder, then: Step | None, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Decode rows of Parquet files that Spark has read, and pass the changes to `then`.

    :param batches: the files' columns, `SOURCE`, `FILE` and `ROW`.
    """

    def records() -> Iterator[pa.RecordBatch]:
        for batch in batches:
            columns = dict(zip(batch.schema.names, batch.columns, strict=True))
            source, file, row = (columns.pop(name) for name in (SOURCE, FILE, ROW))
            yield typed_records(columns, source, file, row)

    changes = decoder(records())
    yield from changes if then is None else then(changes)
    _forget_archives()


def decode_files(
    decoder: ChangelogDecoder,
    reader: FileReader,
    sources: Mapping[str, str],
    read: Accumulator[list[tuple[str, int]]],
    then: Step,
    files: Iterable[tuple[str, bytes]],
) -> Iterator[pa.RecordBatch]:
    """Decode a task's Parquet files, and pass the changes to `then`.

    :param files: paths and contents.
    :param sources: by the files' paths how Spark's reader spells them, in the order of files.
    :param read: collects each file's path with the checksum of what was read.
    """
    numbers = {path: number for number, path in enumerate(sources)}

    def records() -> Iterator[pa.RecordBatch]:
        for path, content in files:
            read.add([(path, zlib.crc32(content))])
            yield from reader(content, sources[path], numbers[path])

    yield from then(decoder(records()))
    _forget_archives()


def _completed(records: pa.RecordBatch) -> pa.RecordBatch:
    have = dict(zip(records.schema.names, records.columns, strict=True))
    columns = [
        have[field.name].cast(field.type) if field.name in have else pa.nulls(records.num_rows, field.type)
        for field in RAW_SCHEMA
    ]
    completed = pa.RecordBatch.from_arrays(columns, schema=RAW_SCHEMA)
    for name in (MOVED_AWAY, FILE, BLOCK):
        completed = completed.append_column(name, have[name]) if name in have else completed
    return completed


def numbered(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Give records of text files their `ROW`: the first byte of the part of the file, plus the number in the part. A
    line has at least one byte, so the rows of a later part have higher numbers.
    """
    last, count = None, 0
    for batch in batches:
        if BLOCK not in batch.schema.names or not batch.num_rows:
            yield batch
            continue
        file, block = (batch.column(name).to_numpy().astype(np.int64) for name in (FILE, BLOCK))
        starts = np.flatnonzero(np.r_[True, (np.diff(file) != 0) | (np.diff(block) != 0)])
        number = np.arange(len(file)) - np.repeat(starts, np.diff(np.r_[starts, len(file)]))
        if last == (file[0], block[0]):
            number[: starts[1] if len(starts) > 1 else len(file)] += count
        last, count = (file[-1], block[-1]), int(number[-1]) + 1
        yield batch.append_column(ROW, pa.array(block + number))


def route(
    combine: Combine | None,
    hash_keys: KeyHash,
    tasks: int,
    indexed: bool,
    part_rows: int,
    changes: Iterable[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """Deal changes out to tasks, for `run`."""
    kept = changes if combine is None else combine.combined(changes)
    yield from packed(to_all(hash_keys.added(kept), tasks), tasks, indexed, part_rows)
    _forget_archives()


def own(hash_keys: KeyHash, tasks: int, indexed: bool, changes: Iterable[pa.RecordBatch]) -> Iterable[pa.RecordBatch]:
    """Keep this task's share of changes that all tasks get, for `run`."""
    if tasks == 1:
        return hash_keys.added(changes) if indexed else changes
    context = TaskContext.get()
    assert context is not None
    return owned(to_all(hash_keys.added(changes), tasks), context.partitionId(), tasks, indexed)


def run(plan: TaskPlan, written: Accumulator[list[str]], changes: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Write a task's changes. Yields one row: a JSON object with `files`, `dead_letters`, counts and samples.

    The task deletes its files before it raises any error.

    :param changes: changelog rows, with their hashes if the table has a key index.
    :raises CardinalityError: two changes contradict each other.
    """
    context = TaskContext.get()
    assert context is not None
    summary, paths = _written(plan, TaskId(context.partitionId(), context.taskAttemptId(), plan.operation), changes)
    _forget_archives()
    written.add(paths)
    yield _results([summary])


def run_shares(
    shares: "PackedShares", written: Accumulator[list[tuple[str, str]]], batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Decode and write the records of several tables, one table after the other.

    Yields a row for each table: the JSON object that `run` yields, with `source`, `observed` types and pairs of
    `Stated` (`keys`). If the table failed, the object has only `source` and `failed`, and the task has deleted the
    table's files.

    :param shares: the tables' parts, by source.
    :param written: collects pairs of source and path.
    :param batches: raw records, grouped by source, so that memory holds the records of one table at a time.
    """
    context = TaskContext.get()
    assert context is not None
    results, by_source = [], shares.unpacked()
    for source, records in _by_source(batches):
        share, observed = by_source[source], dict[str, str]()
        stated = dict[tuple[str, ...] | str, tuple[int, int]]()
        decoder = replace(share.decoder, observe=observed.update, observe_stated=stated.update)
        task = TaskId(0, context.taskAttemptId(), share.plan.operation)
        try:
            changes = decoder(records)
            summary, paths = _written(share.plan, task, share.hash.added(changes) if share.plan.index else changes)
        except Exception as error:  # noqa: BLE001 - the other tables go on; this one's own job then shows the error
            results.append({"source": source, "failed": f"{type(error).__name__}: {error}"})
        else:
            written.add([(source, path) for path in paths])
            results.append(summary | {"source": source, "observed": observed, "keys": list(stated.items())})
    _forget_archives()
    yield _results(results)


def _results(results: Sequence[Any]) -> pa.RecordBatch:
    """Results as a batch of `RESULT_SCHEMA`, which may be empty."""
    return pa.RecordBatch.from_arrays([pa.array([json.dumps(result) for result in results], pa.string())], ["result"])


def _by_source(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[str, list[pa.RecordBatch]]]:
    """Group consecutive records of the same source."""
    current, waiting = "", list[pa.RecordBatch]()
    for batch in batches:
        runs = pc.run_end_encode(batch.column("source"), pa.int32())
        start = 0
        for source, end in zip(runs.values.to_pylist(), runs.run_ends.to_pylist(), strict=True):
            if source != current and waiting:
                yield current, waiting
                waiting = []
            current = source
            waiting.append(batch.slice(start, end - start))
            start = end
    if waiting:
        yield current, waiting


def _written(plan: TaskPlan, task: TaskId, batches: Iterable[pa.RecordBatch]) -> tuple[dict[str, Any], list[str]]:
    """Write changes. The files are deleted before any error is raised.

    :return: a summary of what was written, and the paths of the files.
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
        for letters in result.completed.letters:
            new = letters.filter(pc.not_equal(letters.field("error_class"), KEPT))
            if len(new):
                reject(new)
        dead_files = dead.close() if dead else []
        index_part = _index_part(plan, index, result) if plan.index and index and result.index else None
    except BaseException:
        writer.abort()
        if dead:
            dead.abort()
        raise
    summary: dict[str, Any] = {
        "files": [file.description for file in result.files],
        "rows": result.rows,
        "truncates": truncates,
        "moves": {"left": result.moves.left, "untold": result.moves.untold},
        "bytes": sum(file.size_in_bytes for file in result.files),
        "records": {content.value: result.records(content) for content in FileContent},
        "contents": _contents(result.files),
        "bad": bad,
        "undecoded": undecoded,
        "samples": samples,
        "snapshot_partitions": sorted(snapshots.snapshot_partitions) if snapshots is not None else [],
        "streamed_partitions": sorted(snapshots.streamed_partitions) if snapshots is not None else [],
        "last_snapshot": sorted(snapshots.last_snapshot.items()) if snapshots is not None else [],
        "first_streamed": sorted(snapshots.first_streamed.items()) if snapshots is not None else [],
        "peak_memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    if index_part is not None:
        summary["index"] = index_part[0]
    if plan.dead_letters:
        summary["dead_letters"] = [file.description for file in dead_files]
        summary["dead_letter_paths"] = [file.path for file in dead_files]
    paths = writer.created_paths + (dead.created_paths if dead else [])
    if index_part is not None:
        paths += index_part[1]
    return summary, paths


def index_entries(
    table: TableSpec,
    path_hashes: npt.NDArray[np.uint64],
    hash_keys: KeyHash,
    base: int,
    batches: Iterable[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """Entries of the key index for live rows.

    :param path_hashes: hashes of the paths of the data files that are read.
    :param base: base of the low hashes.
    :param batches: the key columns, `INDEX_FILE` (the path's hash) and `INDEX_POS`.
    :return: `_rowdelta_hash` (int64), `_LOW` (uint64), `INDEX_FILE` (the file's number, uint32) and `INDEX_POS`
        (uint32).
    """
    order = np.argsort(path_hashes).astype(np.uint32)
    in_order = path_hashes[order]
    for batch in batches:
        keys = batch.select(list(hash_keys.key))
        files = batch.column(INDEX_FILE).to_numpy().view(np.uint64)
        places = np.searchsorted(in_order, files)
        if not np.array_equal(np.take(in_order, places, mode="clip"), files):
            raise ValueError("a row is of none of the files that are read")
        columns = {
            HASH: pa.array(hash_keys(keys).view(np.int64)),
            _LOW: pa.array(low_hash(key_columns(table, pa.Table.from_batches([keys])), base)),
            INDEX_FILE: pa.array(order[places]),
            INDEX_POS: batch.column(INDEX_POS).cast(pa.uint32()),
        }
        yield pa.RecordBatch.from_pydict(columns)


def route_entries(entries: Step, tasks: int, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Compute the index entries of the batches, and deal them out to tasks."""
    yield from packed(entries(batches), tasks, keep_hash=True)
    _forget_archives()


def build_index(
    index: IndexSlice,
    files: Sequence[IndexedFile],
    sequence: int,
    name: str,
    entries: Iterable[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """Write runs of the key index. Yields one row: a JSON list of `RunInfo`.

    :param index: the index to write to.
    :param files: the data files, by their numbers in the entries.
    :param sequence: sequence number of the runs.
    :param name: beginning of the runs' names.
    :param entries: this task's share of what `index_entries` makes.
    """
    context = TaskContext.get()
    assert context is not None
    pending: list[Entries] = []
    runs: list[RunInfo] = []

    def flush() -> None:
        run = Entries(
            high=np.concatenate([part.high for part in pending]),
            low=np.concatenate([part.low for part in pending]),
            file=np.concatenate([part.file for part in pending]),
            pos=np.concatenate([part.pos for part in pending]),
            files=tuple(files),
        )
        run_name = f"{name}-{context.taskAttemptId()}-{len(runs)}"
        runs.append(write_run(index.io, index.location, run_name, sequence, run))
        pending.clear()

    for batch in entries:
        if not batch.num_rows:  # all rows of a file are deleted
            continue
        high, low, file, pos = (batch.column(part).to_numpy() for part in (HASH, _LOW, INDEX_FILE, INDEX_POS))
        pending.append(Entries(high=high.view(np.uint64), low=low, file=file, pos=pos, files=()))
        if sum(len(part.high) for part in pending) >= RUN_ENTRIES:
            flush()
    if pending:
        flush()
    if len(runs) > 1:
        # the merged runs have separate ranges, so that a key is looked up in only one of them
        overlapping = replace(index, runs=tuple(runs), merge=tuple(run.name for run in runs))
        merged = overlapping.write_merged(f"{name}-{context.taskAttemptId()}-merged", 0, 2**64)
        for run in runs:
            index.io.delete(f"{index.location}/{run.name}")
        runs = merged
    yield _results([[run.to_json() for run in runs]])


@dataclass(frozen=True)
class RewritePlan:
    """What every task must know that moves rows to new files (`deltawriters.rewrite.Rewriter`).

    :param order: in which rows are written.
    """

    table: TableSpec
    key: tuple[str, ...]
    index: IndexSlice
    sequence: int
    hash: KeyHash
    operation: str
    order: RowOrder | None = None


Groups = Sequence[RewriteGroup] | Sequence[CopyGroup]
"""Files whose rows a task moves: for a minor compaction, or for `deletes: copy-on-write`."""


def rewrite(plan: RewritePlan, written: Accumulator[list[str]], shares: Iterable[Groups]) -> Iterator[dict[str, Any]]:
    """Move the rows of a task's share of files. Yields the results of `rewritten`."""
    context = TaskContext.get()
    assert context is not None
    task = TaskId(context.partitionId(), context.taskAttemptId(), plan.operation)
    for groups in shares:
        yield rewritten(plan, task, groups, written.add)
    _forget_archives()


def rewritten(plan: RewritePlan, task: TaskId, groups: Groups, written: Callable[[list[str]], None]) -> dict[str, Any]:
    """Move the rows of groups of files.

    :param written: is called with the paths of the new files.
    :return: the `files` and their `bytes`, the `runs` for the key index, as JSON objects, and the number of `rows`.
    """
    rewriter = Rewriter(plan.table, plan.key, plan.index, plan.sequence, plan.hash, task, plan.order)
    small = [group for group in groups if isinstance(group, RewriteGroup)]
    result = rewriter.rewrite(small) if small else rewriter.copy(g for g in groups if isinstance(g, CopyGroup))
    written(result.paths)
    return {
        "files": [file.description for file in result.files],
        "bytes": sum(file.size_in_bytes for file in result.files),
        "runs": [run.to_json() for run in result.runs],
        "rows": result.rows,
    }


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


def _forget_archives() -> None:
    """Drop Python's importers of zip and jar files. PySpark's worker calls `importlib.invalidate_caches` before the
    next task.

    Up to Python 3.12 this call makes each importer read its archive's directory again: pyspark.zip a dozen times, and
    every jar of `--packages`. That took 100 to 250 ms a task, more than all its real work. If an import needs an
    importer later, Python makes a new one from the directory that it has already read.
    """
    for path, importer in list(sys.path_importer_cache.items()):
        if isinstance(importer, zipimporter):
            del sys.path_importer_cache[path]


def _contents(files: Sequence[ContentFile]) -> dict[str, tuple[int, int]]:
    """Number of files and their bytes, by content."""
    counts, sizes = Counter[str](), Counter[str]()
    for file in files:
        counts[file.content.value] += 1
        sizes[file.content.value] += file.size_in_bytes
    return {content: (count, sizes[content]) for content, count in counts.items()}


def _index_part(plan: TaskPlan, index: IndexTask, result: WriteResult) -> tuple[dict[str, Any], list[str]]:
    """What the driver has to know for the key index, and the paths of the index's files that the task wrote."""
    found = result.index
    assert plan.index is not None
    assert found is not None
    place = f"{index.slice.location}/{index.run_name}-positions"
    rows, file = tell(found.old_rows, plan.index.told_bytes, place, index.slice.io)
    summary = {
        "runs": [run.to_json() for run in found.runs],
        "merged": [run.to_json() for run in found.merged],
        "old_rows": rows,
        "new_vectors": dict(file.vector for file in result.files if file.vector is not None),
        "keys": {name: getattr(found, name) for name in ("inserted", "updated", "deleted", "absent", "duplicates")}
        | {"completed": result.completed.rows},
        "completed_from": [*result.completed.files, *result.moves.files],
        "probe_seconds": found.probe_seconds,
    }
    paths = [f"{index.slice.location}/{run.name}" for run in (*found.runs, *found.merged)]
    return summary, paths if file is None else [*paths, file]


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
