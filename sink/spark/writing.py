"""Writes the files of a micro-batch by a Spark job: decode, shuffle by key, write in tasks."""

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Self

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from changelog.rows import BAD, KEPT, TRUNCATE, UNAVAILABLE
from deltawriters.combine import BUFFER_BYTES
from deltawriters.keyindex.versions import IndexLostError
from deltawriters.scratch import Scratch
from sink.config import Config
from sink.deadletters.table import DeadLetters
from sink.errors import TemporaryError
from sink.results import TaskResult
from sink.routing import RANGES
from sink.sources.source import TableBatch
from sink.spark.accumulators import Counts, FirstPlaces, ListParam, ObservedTypes, accumulator
from sink.spark.decoding import RecordDecoder
from sink.spark.exchange import (
    PACKED_SCHEMA,
    PART_ROWS,
    Results,
    Step,
    exchanged,
    files,
    files_by_each,
    files_exchanged,
    files_written,
    in_arrow,
)
from sink.spark.failures import failure_of
from sink.spark.job_errors import JOB_ERRORS, job_error
from sink.spark.tasks import decode, write
from sink.spark.tasks.worker import RESULT_SCHEMA, this_task
from sink.spark.tasks.write import Combine
from sink.table.engine import Decoded
from sink.table.table_plan import TablePlan
from sink.table.task_plans import TaskPlans, is_small
from sink.table.written import Begun, Written, sum_up

READ_AGAIN = 128 * 1024 * 1024
"""Each task reads all Parquet files, without a shuffle, if the extra reads sum up to at most this many bytes.

The shuffle of a row takes a core about three times as long as decoding it a second time. With two tasks, files of 58
and 115 MB were written a fifth to a third faster this way. Even an almost empty shuffle costs about as much as decoding
10 MB.
"""
_OPENING = 256 * 1024
"""Opening a file takes as long as reading this many bytes."""
_ROWS_AGAIN = 4_000_000
"""The same limit in rows: a snapshot's files may have millions of rows in few bytes."""


class SparkWriter:
    """Writes one table's micro-batches (`sink.table.engine.BatchWriter`).

    :param spark: the session of the table.
    :param plan: the table.
    :param tasks: what tasks are told.
    :param scratch: gets the files.
    """

    def __init__(
        self,
        spark: SparkSession,
        config: Config,
        plan: TablePlan,
        tasks: TaskPlans,
        scratch: Scratch,
        dead_letters: DeadLetters | None,
    ) -> None:
        self._spark = spark
        self._config = config
        self._scratch = scratch
        self._dead_letters = dead_letters
        context = spark.sparkContext
        self._paths = accumulator(context, self, list[str](), ListParam[str]())
        self._observed = accumulator(context, self, dict[str, str](), ObservedTypes())
        self._stated_keys = accumulator(context, self, FirstPlaces.NONE, FirstPlaces())
        self._left_out = accumulator(context, self, dict[str, int](), Counts())
        self._read = accumulator(context, self, list[tuple[str, int]](), ListParam[tuple[str, int]]())
        self.follow(plan, tasks)

    def follow(self, plan: TablePlan, tasks: TaskPlans) -> None:
        batch_rows = int(self._spark.conf.get("spark.sql.execution.arrow.maxRecordsPerBatch") or 0)
        # for Spark, 0 or less means that there is no limit
        batch_rows = batch_rows if batch_rows > 0 else 1 << 20
        self._plan = plan
        self._task_plans = tasks
        self._decoder = RecordDecoder(self._config, plan, self._observed.add, self._stated_keys.add, batch_rows)

    @property
    def _appends(self) -> bool:
        return self._plan.section.mode == "append"

    def write(self, batch: TableBatch, begun: Begun, *, may_repeat: bool) -> Written:
        if batch.files and self._decoder.reader is not None and not may_repeat:
            tasks = _tasks(batch, self._spark)
            steps = self._steps(begun, tasks)
            results = _collected([self], lambda: self._writing_files(batch, steps, tasks))
            if self._appends or is_read_by_each(batch, tasks):
                self._check_all_read(batch, results)
        else:
            frame = self._frame(batch)
            tasks = _tasks(batch, _set_up(frame))
            steps = self._steps(begun, tasks)
            results = _collected([self], lambda: self._writing(batch, frame, steps, tasks, may_repeat=may_repeat))
        return self._summed_up(begun, tasks, results)

    def write_with(self, others: Sequence[Self], batch: TableBatch, begun: Sequence[Begun]) -> list[Written]:
        assert batch.records is not None
        writers, frame = [self, *others], batch.records()
        tasks = _tasks(batch, _set_up(frame))
        parts = [
            writer._steps(each, tasks, number * tasks, BUFFER_BYTES // len(writers))
            for number, (writer, each) in enumerate(zip(writers, begun, strict=True))
        ]
        decoders = [writer._decoder.decoder for writer in writers]
        route = functools.partial(decode.decode_together, decoders, [route for _, route, _ in parts])
        runs = [run for _, _, run in parts]

        def run(changes: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            return runs[this_task().partition // tasks](changes)

        made = in_arrow(frame, route, PACKED_SCHEMA)
        results = _collected(writers, lambda: exchanged(made, tasks * len(writers), run))
        of_each = [results[number * tasks : (number + 1) * tasks] for number in range(len(writers))]
        return [w._summed_up(each, tasks, found) for w, each, found in zip(writers, begun, of_each, strict=True)]

    def _frame(self, batch: TableBatch) -> DataFrame:
        """The batch's changes, or the records of which they are made."""
        if batch.rows is not None:
            return batch.rows.changes(self._plan, self._observed.add)
        if batch.changes is not None:
            return batch.changes
        assert batch.records is not None
        return batch.records()

    def _summed_up(self, begun: Begun, tasks: int, results: Sequence[TaskResult]) -> Written:
        written = sum_up(begun, tasks, results, dict(self._observed.value), dict(self._stated_keys.value))
        counts = {kind: count + self._left_out.value.get(kind, 0) for kind, count in written.rows.items()}
        return replace(written, rows=counts)

    def decoded(self, records: DataFrame, keep: Callable[[DataFrame], DataFrame]) -> Decoded:
        # see `write`
        records.sparkSession.conf.set("spark.sql.ansi.enabled", "true")
        self._observed.value, self._stated_keys.value = {}, FirstPlaces.NONE
        try:
            changes = keep(self._decoder.changes(records)).localCheckpoint()
        except JOB_ERRORS as error:
            raise job_error(self._plan.section.target, error) from error
        return Decoded(changes, self._observed.value, self._stated_keys.value)

    def _check_all_read(self, batch: TableBatch, results: Sequence[TaskResult]) -> None:
        """Check that the tasks have read the same files, with as many rows as the files' footers said. Each task reads
        the files at another time, so somebody may replace a file in between.

        :raises TemporaryError: they haven't. All written files are deleted.
        """
        assert batch.files is not None
        found = sum(sum(result.rows.values()) + sum(result.bad.values()) for result in results)
        found += sum(result.late + result.ignored for result in results)
        if len(set(self._read.value)) == len(batch.files) and found == batch.estimated_rows:
            return
        self._delete_written()
        raise TemporaryError(
            f"{self._plan.section.target}: change files were replaced while they were read: {batch.estimated_rows:,} "
            f"rows were listed, and {found:,} read. Nothing was applied; run again. Write files elsewhere, move them "
            "into the directory, and leave them as they are."
        )

    def _delete_written(self) -> None:
        self._scratch.discard(self._paths.value)
        self._scratch.keep()
        self._paths.value = []

    def _writing_files(self, batch: TableBatch, steps: tuple[Step, Step, Step], tasks: int) -> Results:
        """Like `_writing`, but reads whole files."""
        assert batch.files is not None
        assert self._decoder.reader is not None
        sources = {path: file.source for path, file in batch.files.items()}
        read = functools.partial(decode.decode_files, self._decoder.decoder, self._decoder.reader, sources, self._read)
        whole = files(batch.files, self._spark.sparkContext)
        write_own, route, run = steps
        if self._appends:
            return files_written(whole, tasks, functools.partial(read, write_own))
        if is_read_by_each(batch, tasks):
            return files_by_each(whole, tasks, functools.partial(read, write_own))
        return files_exchanged(whole, functools.partial(read, route), tasks, run)

    def _writing(
        self, batch: TableBatch, frame: DataFrame, steps: tuple[Step, Step, Step], tasks: int, *, may_repeat: bool
    ) -> Results:
        """The Spark job that writes the files. It runs when its result is collected.

        :param frame: the batch's records or changes.
        :return: the tasks' results.
        """
        write_own, route, run = steps
        shuffles = tasks > 1 and not self._appends
        if not shuffles:
            frame = frame.coalesce(tasks)
        then, schema = (route, PACKED_SCHEMA) if shuffles else (write_own, RESULT_SCHEMA)
        in_python = self._plan.is_decoded_whole and not may_repeat
        is_decoded = batch.changes is not None or batch.rows is not None
        if batch.rows is not None and in_python and shuffles:
            made = batch.rows.changes_into(self._plan, self._observed.add, then, schema)
        elif not is_decoded and in_python:
            made = self._decoder.changes_into(then, schema, frame)
        else:
            changes = frame if is_decoded else self._decoder.changes(frame)
            if may_repeat:
                changes = self._without_kept(changes)
                # bad records, and partial rows with them, come from other partitions: a task owns the keys of its own
                changes = changes if shuffles else changes.coalesce(tasks)
            made = in_arrow(changes, then, schema)
        return exchanged(made, tasks, run) if shuffles else made

    def _steps(
        self, begun: Begun, tasks: int, first: int = 0, buffer_bytes: int = BUFFER_BYTES
    ) -> tuple[Step, Step, Step]:
        """Three steps of tasks. The first one writes a task's own changes (in mode append, all changes that it has).
        The second one deals changes out to tasks. The third one writes the changes that were dealt to a task.

        :param first: number of the first task that changes are dealt to.
        :param buffer_bytes: see `Combine`.
        """
        self._observed.value, self._left_out.value, self._paths.value = {}, {}, []
        self._stated_keys.value, self._read.value = FirstPlaces.NONE, []
        plan = self._task_plans.plan(begun, tasks)
        run = functools.partial(write.run, plan, self._paths, first=first)
        how = self._task_plans.hash(begun, tasks), tasks, plan.index is not None
        own = functools.partial(write.own, *how)
        write_own = run if self._appends else lambda changes: run(own(changes))
        route = functools.partial(write.route, self._combine(buffer_bytes), *how, PART_ROWS, first=first)
        return write_own, route, run

    def _combine(self, buffer_bytes: int) -> Combine | None:
        """How changes of the same key are combined. None where the others matter
        too: in mode changelog and for tables with history."""
        if self._plan.section.mode != "upsert" or self._plan.section.history is not None:
            return None
        columns, section = tuple(column.name for column in self._plan.columns), self._plan.section
        return Combine(tuple(section.key), columns, self._left_out, buffer_bytes, section.keeps_deleted)

    def _without_kept(self, changes: DataFrame) -> DataFrame:
        """Leave out bad records that the dead-letter table already has. Partial rows stay: the table may be able to
        complete them now. Those that are dead letters already get the class `KEPT`.

        The records' places are compared, not only positions: the topic may have been created anew, and the
        configuration may refuse other records now.
        """
        assert self._dead_letters is not None
        target = self._plan.section.target
        # The checkpoint makes Spark compute the changes once. Without it, Catalyst would push the filter below the
        # decoder, and repeat the decoder's expressions there.
        changes = changes.localCheckpoint()
        # a TRUNCATE that is applied now may have been refused with another configuration
        is_bad = F.col(BAD).isNotNull() & (F.col(f"{BAD}.error_class") != TRUNCATE)
        new, kept = self._dead_letters.divided(target, changes.where(is_bad), changes.sparkSession)
        left = changes.where(~is_bad).unionByName(new)
        if UNAVAILABLE not in changes.columns:
            return left
        partial = kept.where(F.col(UNAVAILABLE).isNotNull())
        return left.unionByName(partial.withColumn(BAD, F.col(BAD).withField("error_class", F.lit(KEPT))))


def _set_up(frame: DataFrame) -> SparkSession:
    """The frame's session. It belongs to the stream, so what is set here changes nothing else."""
    spark = frame.sparkSession
    # re-planning at run time costs more than it can gain on one shuffle
    spark.conf.set("spark.sql.adaptive.enabled", "false")
    # without this, a failed cast in a computed column would give null
    spark.conf.set("spark.sql.ansi.enabled", "true")
    # without this, text that Spark has decoded could have other Arrow types
    spark.conf.set("spark.sql.execution.arrow.useLargeVarTypes", "false")
    return spark


def _tasks(batch: TableBatch, spark: SparkSession) -> int:
    """How many tasks write the micro-batch of a table."""
    if is_small(batch.estimated_rows):
        return 1
    return min(int(spark.conf.get("spark.sql.shuffle.partitions") or 1), RANGES)


def _collected(writers: Sequence[SparkWriter], job: Callable[[], Results]) -> list[TaskResult]:
    """Results of the job's tasks. If the job fails, the files of its finished tasks are deleted."""
    try:
        return [TaskResult.from_json(json.loads(row[0])) for row in job().collect()]
    except JOB_ERRORS as error:
        for writer in writers:
            writer._delete_written()
        failure = failure_of(error)
        if failure is not None and failure.kind == "corrupt index":
            raise IndexLostError(failure.message) from error
        raise job_error(", ".join(writer._plan.section.target for writer in writers), error) from error
    finally:
        for writer in writers:
            writer._scratch.paths = list(writer._paths.value)


def is_read_by_each(batch: TableBatch, tasks: int) -> bool:
    """Whether each task reads all of the batch's Parquet files, and keeps only its own rows."""
    assert batch.files is not None
    assert batch.estimated_rows is not None
    size = sum(max(file.bytes, _OPENING) for file in batch.files.values())
    again = tasks - 1
    return not again or (size * again <= READ_AGAIN and batch.estimated_rows * again <= _ROWS_AGAIN)
