"""Applies a micro-batch to one table: decode, shuffle by key, write in tasks, commit once."""

import functools
import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from changelog.decoding import ChangelogDecoder, StatedKeys
from changelog.rows import BAD, order_column
from deltawriters import DeltaOptions
from deltawriters.combine import BUFFER_BYTES
from deltawriters.keyindex import CorruptIndexError, IndexSlice
from deltawriters.keyindex.versions import IndexLostError
from sink.config import Config
from sink.deadletters.table import DeadLetters
from sink.errors import ConfigError, DataError, RowdeltaError, TableError, TemporaryError
from sink.run.decoding import RecordDecoder
from sink.run.keyindex import KeyIndex
from sink.run.keys import TableKey, compared, property_name, with_key
from sink.run.minor_compaction import MinorCompaction
from sink.run.patterns import ResolvedTable
from sink.run.plan import (
    TablePlan,
    declared_changes,
    deletes_by_value,
    deletes_carry_row,
    evolved_columns,
    files_last,
    needs_global_deletes,
    plan_table,
    shown_changes,
)
from sink.run.written import Written, sum_up
from sink.sources.source import Position, Source, Stream, TableBatch
from sink.spark import task, vectors
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
from sink.spark.failures import TaskFailure, failure_of
from sink.spark.routing import RANGES, KeyHash
from sink.targets.base import (
    ROWS,
    SINK_ID,
    ChangeSet,
    CommitUnknownError,
    StoredPosition,
    TableChangedError,
    TableNoLongerEmptyError,
    Target,
    property_prefix,
)
from sink.targets.catalogs import Catalogs
from sink.targets.retries import Retries

log = logging.getLogger("rowdelta")

_MOST_SCHEMAS = 10
"""One micro-batch may change the schema up to this many times. Only columns that the table already has show whether
values fit, so one change may lead to another.
"""

_MOST_UNDECODED = 10
"""If a format fails on up to this many records, in succession or as a large part of a micro-batch, these are bad
records. If it fails on more, the format is broken: it would turn a whole topic into dead letters.
"""

SMALL_BATCH = 10_000
"""Up to this many records, one task does all the work. A shuffle would cost more than a second core gains."""


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


class SchemaEvolvedError(Exception):
    """The table has just got new or wider columns."""


SMALL_MERGE = 1_000_000
"""A table that merges more entries of its key index than this is written alone, so that other tables don't wait for it.
"""


@dataclass(frozen=True)
class Begun:
    """The state from which an attempt to write a micro-batch starts.

    :param operation: id of the attempt.
    :param empty: whether the table has no rows.
    :param index: the key index of the table's rows, if it has one.
    :param started: when the attempt began (`time.monotonic`).
    :param opening: the `opening` of the dead-letter table (`DeadLetters`).
    :param index_seconds: how long it took to bring the index up to the table.
    """

    operation: str
    empty: bool
    index: IndexSlice | None
    started: float
    opening: int
    index_seconds: float = 0.0


@dataclass(frozen=True)
class TableShare:
    """A table's part of a micro-batch, and its share in the joint job that writes several tables."""

    batch: TableBatch
    begun: Begun
    share: task.Share


@dataclass(frozen=True)
class Attempt:
    """A micro-batch's files that are written and not yet committed."""

    begun: Begun
    written: Written
    write_seconds: float


@dataclass(frozen=True)
class Pending:
    """A table's part of a micro-batch before its commit. `attempt` is None if it must be written again."""

    batch_id: int
    batch: TableBatch
    attempt: Attempt | None


class TableSink:
    """Applies micro-batches to one table. Knows the table's position and the snapshot that it belongs to."""

    def __init__(
        self,
        config: Config,
        resolved: ResolvedTable,
        table: Target,
        plan: TablePlan,
        key: TableKey,
        source: Source,
        dead_letters: DeadLetters | None,
    ) -> None:
        self.plan = plan
        self.table = table
        self._config = config
        self._resolved = with_key(resolved, key)
        self._key = key
        self._key_warning: str | None = None
        self._source = source
        self._dead_letters = dead_letters
        self._prefix = property_prefix(config)
        self._committer = table.committer()
        self._spec, self._layout = table.spec, table.layout
        self._stored: StoredPosition | None = None
        self._base: int | None = None
        self._global_deletes = False
        self._key_index = self._open_key_index()
        self._written_paths = table.spark.sparkContext.accumulator(list[str](), task.ListParam[str]())
        self._observed = table.spark.sparkContext.accumulator(dict[str, str](), task.ObservedTypes())
        self._stated_keys = table.spark.sparkContext.accumulator(task.FirstPlaces.NONE, task.FirstPlaces())
        self._decoder = self._open_decoder()
        self._left_out = table.spark.sparkContext.accumulator(dict[str, int](), task.Counts())
        self._not_plain = table.spark.sparkContext.accumulator(0)
        every = plan.section.compact_every
        self._compaction = table.compaction(every) if every is not None else None
        self._minor_compaction = MinorCompaction(table, plan.section.key, self._committer, self._prefix)
        stored = table.position(self._prefix)
        self._adopt(stored.operation if stored else None)
        self._committer.settle(self._prefix)
        if dead_letters is not None:
            dead_letters.publish(plan.section.target)

    @property
    def position(self) -> Position | None:
        """The position of the table's last commit, or the position where reading began if there is no commit."""
        return self._stored.position if self._stored else self.table.start_position(self._prefix)

    @property
    def _appends(self) -> bool:
        """Whether the table only grows."""
        return self.plan.section.mode == "append"

    def _open_key_index(self) -> KeyIndex | None:
        if self._appends or self.plan.section.deletes != "position":
            return None
        target, index = self.plan.section.target, self._config.index
        properties = index.properties if index is not None else None
        if properties is None:
            properties = Catalogs(self.table.spark, self._config).storage_properties(target)
        return KeyIndex(self.table, self.plan, f"{self._config.index_location}/{target}", properties)

    def _open_decoder(self) -> RecordDecoder:
        batch_rows = int(self.table.spark.conf.get("spark.sql.execution.arrow.maxRecordsPerBatch") or 0)
        # for Spark, 0 or less means that there is no limit
        batch_rows = batch_rows if batch_rows > 0 else 1 << 20
        return RecordDecoder(self._config, self.plan, self._observed.add, self._stated_keys.add, batch_rows)

    def remember_start(self, position: Position | None) -> None:
        """Store the start position of a table without commits, so that `startingOffsets: latest` means the same after a
        restart.

        :raises DataError: the mode is `changelog` or `append`, and the table has rows, but no position of this sink.
        """
        if self._stored is not None:
            return
        mode = self.plan.section.mode
        if mode != "upsert" and not self.table.is_empty():
            raise DataError(
                f"{self.table.name} holds rows, but sink {self._config.sink.id!r} has no position in it. Reading the "
                "source from "
                f"its start would duplicate rows in mode {mode}. Use mode: upsert, or an empty table."
            )
        if position is not None and self.table.start_position(self._prefix) is None:
            self.table.set_property(f"{self._prefix}.start", json.dumps(dict(position)))
            self.table.refresh()

    def batch(self, stream: Stream, batch_id: int, frame: DataFrame) -> TableBatch | None:
        """The table's part of a micro-batch, if it has one."""
        return self._source.batch(stream, batch_id, frame, self.plan.section, self.position)

    def apply_batch(self, batch_id: int, batch: TableBatch) -> None:
        """Apply changes that continue the table's position, exactly once, and store the position `batch.end`.

        :raises RowdeltaError: nothing was applied; with `CommitUnknownError`, it is unknown whether it was applied.
        """
        self.commit(self.prepare_batch(batch_id, batch))

    def prepare_batch(self, batch_id: int, batch: TableBatch) -> Pending:
        """Write changes that continue the table's position, without a commit.

        The caller must then call `commit` or `discard`.
        """
        self._take_bearings()
        try:
            return Pending(batch_id, batch, self._attempt(batch))
        except SchemaEvolvedError:
            self._rebase()
        except IndexLostError as error:
            self._forget_index(error)
        return Pending(batch_id, batch, None)

    def share(self, batch: TableBatch) -> TableShare | None:
        """The table's share in a joint job. None if the table needs a job of its own (`prepare_batch`).

        The caller must pass the job's result to `prepare_share`, or call `discard`.
        """
        if (
            batch.share is None
            or not _is_small(batch.estimated_rows)
            or not self.plan.is_decoded_whole
            or self._has_kept_letters()
        ):
            return None
        self._take_bearings()
        try:
            begun = self._begin(batch)
        except IndexLostError as error:
            self._forget_index(error)
            return None
        if begun.index is not None and begun.index.merged_entries > SMALL_MERGE:
            return None
        self._written_paths.value = []
        decoder = ChangelogDecoder(self._config.source.format, self.plan.changelog)
        return TableShare(batch, begun, task.Share(decoder, self._task_plan(begun, 1), self._key_hash(1)))

    def take_over(self, paths: Sequence[str]) -> None:
        """Take responsibility for the files that a joint job wrote for this table."""
        self._written_paths.value = list(paths)

    def prepare_share(self, batch_id: int, share: TableShare, result: Mapping[str, Any]) -> Pending:
        """Like `prepare_batch`, for files that a joint job wrote. Call `take_over` first."""
        batch = share.batch
        try:
            stated = {tuple(fields): (int(partition), int(offset)) for fields, (partition, offset) in result["keys"]}
            written = replace(sum_up([result]), tasks=1, observed=result["observed"], stated_keys=stated)
            return Pending(batch_id, batch, self._finish(share.begun, written))
        except SchemaEvolvedError:
            self._rebase()
        return Pending(batch_id, batch, None)

    def _take_bearings(self) -> None:
        """Find out whether others changed the table since the last commit."""
        # with an outdated schema or spec, the new files would lack values, and deletes would miss rows
        self.table.refresh()
        if self.table.snapshot_id() != self._base:
            # With a key index, the current snapshot becomes the commit's base. The commit's validation won't look at
            # earlier snapshots, so the position is checked here.
            self._committer.own_position(self._prefix, self._operation)
            self._global_deletes = self.table.needs_global_deletes()
        self._replan_if_altered()

    def commit(self, pending: Pending) -> None:
        """Commit what `prepare_batch` or `prepare_share` wrote. If others changed the table meanwhile, write it again.

        :raises RowdeltaError: see `apply_batch`.
        """
        attempt = pending.attempt
        retries = self._committer.retries()
        schemas = 0
        while True:
            try:
                attempt = attempt or self._attempt(pending.batch)
                self._commit_attempt(pending, attempt, retries)
                self._minor_compaction.count(len(attempt.written.files))
                self._adopt(attempt.begun.operation)
                if self._key_index is not None:
                    self._key_index.committed(self._stored)
                return
            except TableNoLongerEmptyError as error:
                refused: Exception = error
                log.info("%s: others added rows to the empty table; writing again with deletes", self.table.name)
            except TableChangedError as error:
                refused = error
                log.info("%s: others changed it meanwhile; writing again", self.table.name)
            except SchemaEvolvedError:
                schemas += 1
                if schemas > _MOST_SCHEMAS:
                    raise TableError(
                        f"{self.table.name}: after {_MOST_SCHEMAS} changes of its schema the micro-batch still needs "
                        "another. Does "
                        "somebody else alter the table at the same time? Nothing was applied."
                    ) from None
                self._rebase()
                attempt = None
                continue
            except IndexLostError as error:
                refused = error
                self._forget_index(error)
            attempt = None
            retries.wait(refused)
            self._rebase()

    def compact(self) -> None:
        """Merge small files, and compact the table if the configuration says so. Call this after each commit, at a time
        when other tables don't wait for it.
        """
        if self._key_index is not None and self.plan.section.merge_small_files and self._minor_compaction.is_due():
            self._merge_small_files(self._key_index)
        if self._compaction is not None:
            self._compaction.after_commit()
        self.table.tend()

    def _merge_small_files(self, key_index: KeyIndex) -> None:
        self._take_bearings()
        if key_index is not self._key_index or self._stored is None:
            return  # somebody altered the table
        try:
            key_index.synchronize(self._stored)
            if not self._minor_compaction.run(self._spec, key_index, self._stored.operation):
                return
        except IndexLostError as error:
            self._forget_index(error)
            return
        self.table.refresh()
        self._adopt(self._stored.operation)
        key_index.committed(self._stored)

    def discard(self) -> None:
        """Delete files that were written and not committed."""
        self._delete_written()

    def _rebase(self) -> None:
        """Make the table's current state the base, so that the micro-batch can be written again.

        :raises FencedError: the table's position isn't the one that the micro-batch continues.
        :raises RolledBackError: likewise, after a rollback.
        """
        self.table.refresh()
        self._committer.own_position(self._prefix, self._operation)
        self._replan_if_altered()
        self._adopt(self._operation)

    def _forget_index(self, error: IndexLostError) -> None:
        assert self._key_index is not None
        self._key_index.forget()
        log.warning("%s: %s; building the key index again", self.table.name, error)

    @property
    def _operation(self) -> str | None:
        """The operation that stored the position which the next micro-batch continues."""
        return self._stored.operation if self._stored else None

    def _adopt(self, operation: str | None) -> None:
        """Make the table's current metadata the base of the next commit.

        :param operation: the operation that stored the position which the next micro-batch continues.
        :raises FencedError: another operation has stored a position since.
        :raises RolledBackError: the table was rolled back to another operation.
        """
        self._stored = self._committer.own_position(self._prefix, operation)
        base, self._base = self._base, self.table.snapshot_id()
        if base is None or self.table.parent_snapshot_id() != base:
            # Others committed, perhaps under another spec. To find out, every manifest must be read, so this is done
            # only here.
            self._global_deletes = self.table.needs_global_deletes()

    def _replan_if_altered(self) -> None:
        if self.table.spec.properties_by_name.keys() != self._spec.properties_by_name.keys():
            self.table.check_writable(appends=self._appends)  # as is rare, and whatever their values
        if not self._is_altered():
            self._spec = self.table.spec
            return
        log.info("%s was altered; checking it against the configuration again", self.table.name)
        self.plan = plan_table(Catalogs(self.table.spark, self._config), self._config, self._resolved, self.table)
        self._global_deletes = self.table.needs_global_deletes()
        if deletes_by_value(self.plan.section) and (needs_global_deletes(self.plan) or self._global_deletes):
            self.table.prepare_global_deletes()
        self._decoder = self._open_decoder()
        self._spec, self._layout = self.table.spec, self.table.layout
        self._key_index = self._open_key_index()

    def _is_altered(self) -> bool:
        """Whether the table's layout differs from what files are written for."""
        return self.table.layout != self._layout

    def _attempt(self, batch: TableBatch) -> Attempt:
        begun = self._begin(batch)
        return self._finish(begun, self._write(batch, begun))

    def _begin(self, batch: TableBatch) -> Begun:
        operation = uuid4().hex[:16]
        started = time.monotonic()
        if batch.declared is not None:
            self._evolve(declared_changes(self.plan, batch.declared))
        # a sink that only appends doesn't conflict with other writers' appends
        empty = not self._appends and self.table.is_empty()
        before = time.monotonic()
        if self._key_index is not None:
            self._key_index.synchronize(self._stored)
        index_seconds = time.monotonic() - before
        index = self._key_index.slice() if self._key_index is not None else None
        opening = self._dead_letters.opening if self._dead_letters else 0
        return Begun(operation, empty, index, started, opening, index_seconds)

    def _finish(self, begun: Begun, written: Written) -> Attempt:
        try:
            self._compare_keys(written.stated_keys)
            if written.observed:
                self._evolve(written.observed)
            self._refuse(written)
        except (RowdeltaError, SchemaEvolvedError):
            self._delete_written()
            raise
        return Attempt(begun, written, time.monotonic() - begun.started)

    def _compare_keys(self, stated: StatedKeys) -> None:
        """Compare the messages' key with the table's. This is the first check, since with a wrong key all files are
        wrong.

        :raises TableError: the messages' key has changed.
        """
        section = self.plan.section
        if self._appends or not stated:
            return
        key = compared(self._key, stated, section, property_name(self._config))
        if key != self._key:
            self._warn_of(key)
        self._key = key

    @property
    def awaits_message_keys(self) -> bool:
        """Whether the key is configured, and no micro-batch has shown the messages' key yet."""
        return self._key.configured and not self._key.messages

    def note_message_keys(self, stated: Iterable[tuple[str, ...]]) -> None:
        """Warn if messages that no micro-batch has read yet have another key than the configured one."""
        if self.awaits_message_keys:
            self._warn_of(replace(self._key, messages=tuple(sorted(fields for fields in stated if fields))))

    def _warn_of(self, key: TableKey) -> None:
        """Warn, once, that the messages have another key than the configured one."""
        warning = key.warning(self.plan.section)
        if warning is not None and warning != self._key_warning:
            self._key_warning = warning
            log.warning("%s", warning)

    def _commit_attempt(self, pending: Pending, attempt: Attempt, retries: Retries) -> None:
        end, begun, written = pending.batch.end, attempt.begun, attempt.written
        started = time.monotonic()
        try:
            if written.dead_letters:
                self._keep_dead_letters(end, begun, written)
            self._commit(end, begun, written, attempt.write_seconds, retries)
            self._written_paths.value = []  # the files belong to the table now
        except CommitUnknownError:
            self._written_paths.value = []  # the files may belong to the table now
            raise
        except (RowdeltaError, TableNoLongerEmptyError, TableChangedError, IndexLostError):
            # after these errors nothing is committed; after any other error it might be, so then the files stay
            self._delete_written()
            raise
        self._log(pending.batch_id, end, written, attempt.write_seconds, time.monotonic() - started)

    def _evolve(self, observed: Mapping[str, str]) -> None:
        """Change the table's schema, once, for all that the micro-batch's messages have. Then the micro-batch is
        written again under the new schema.

        :raises SchemaEvolvedError: the schema has changed.
        :raises DataError: see `evolved_columns`.
        :raises TableError: see `evolved_columns`.
        """
        can = self._config.capabilities(self.plan.section.target)
        changes = evolved_columns(self.plan, observed, can) if observed else {}
        if changes:
            log.info("%s: the source's schema changed: %s", self.table.name, shown_changes(observed))
            self.table.refresh()
            if not self._is_altered():  # else others altered it; compare with their schema first
                self.table.evolve(changes)
            raise SchemaEvolvedError

    def _write(self, batch: TableBatch, begun: Begun) -> Written:
        frame = batch.records() if batch.changes is None else batch.changes
        spark = frame.sparkSession
        # The session belongs to the stream, so these settings change nothing else. Re-planning at run time costs more
        # than it can gain on one shuffle.
        spark.conf.set("spark.sql.adaptive.enabled", "false")
        # without this, a failed cast in a computed column would give null
        spark.conf.set("spark.sql.ansi.enabled", "true")
        # without this, text that Spark has decoded could have other Arrow types
        spark.conf.set("spark.sql.execution.arrow.useLargeVarTypes", "false")
        tasks = self._tasks(batch, spark)
        self._observed.value, self._left_out.value, self._written_paths.value = {}, {}, []
        self._stated_keys.value = task.FirstPlaces.NONE
        self._not_plain.value = 0
        plan = self._task_plan(begun, tasks)
        results = None
        if batch.files and self._decoder.plain is not None and not self._has_kept_letters():
            results = self._write_plain_files(batch, plan, tasks)
        if results is None:
            results = self._collected(lambda: self._writing(batch, frame, plan, tasks))
        observed = dict(self._observed.value)
        written = sum_up(results)
        counts = {kind: count + self._left_out.value.get(kind, 0) for kind, count in written.rows.items()}
        stated = dict(self._stated_keys.value)
        return replace(written, tasks=tasks, observed=observed, rows=counts, stated_keys=stated)

    def _write_plain_files(self, batch: TableBatch, plan: task.TaskPlan, tasks: int) -> list[dict[str, Any]] | None:
        """Results of tasks that read whole files. None if a file needs Spark's reader; then all written files are
        deleted.
        """
        try:
            results = self._collected(lambda: self._writing_files(batch, plan, tasks))
            if not self._not_plain.value:
                if not self._appends and _is_read_by_each(batch, tasks):
                    self._check_all_read(batch, results, tasks)
                return results
        except (RowdeltaError, IndexLostError):
            # without the changes of a file that can't be read this way, other changes may seem to contradict each other
            if not self._not_plain.value:
                raise
        log.info("%s: its files need Spark's reader", self.table.name)
        self._decoder.plain = None
        self._delete_written()
        self._left_out.value = {}
        return None

    def _check_all_read(self, batch: TableBatch, results: Sequence[Mapping[str, Any]], tasks: int) -> None:
        """Check that the tasks together wrote as many rows as the files' footers say. Each task reads the files at
        another time, so somebody may replace a file in between.

        :raises TemporaryError: the numbers differ. All written files are deleted.
        """
        found = sum(sum(result["rows"].values()) for result in results)
        if len(results) == tasks and found == batch.estimated_rows:
            return
        self._delete_written()
        raise TemporaryError(
            f"{self.table.name}: change files were replaced while they were read: of {batch.estimated_rows:,} rows "
            f"{found:,} were found. "
            "Nothing was applied; run again. Write files elsewhere, move them into the directory, and leave them as "
            "they are."
        )

    def _collected(self, job: Callable[[], Results]) -> list[dict[str, Any]]:
        """Results of the job's tasks. If the job fails, the files of its finished tasks are deleted."""
        try:
            return [json.loads(row[0]) for row in job().collect()]
        except (PySparkException, Py4JJavaError) as error:
            self._delete_written()
            failure = failure_of(error)
            if failure is not None and failure.kind == "corrupt index":
                raise IndexLostError(failure.message) from error
            raise job_error(self.plan.section.target, error) from error

    def _writing_files(self, batch: TableBatch, plan: task.TaskPlan, tasks: int) -> Results:
        """Like `_writing`, but reads whole files. `_not_plain` says afterwards whether a file could not be read this
        way.
        """
        assert batch.files is not None
        assert self._decoder.plain is not None
        decode = functools.partial(task.decode_files, self._decoder.plain, self._not_plain)
        whole = files(batch.files, self.table.spark.sparkContext)
        write_own, route, run = self._steps(plan, tasks)
        if self._appends:
            return files_written(whole, tasks, functools.partial(decode, run))
        if _is_read_by_each(batch, tasks):
            return files_by_each(whole, tasks, functools.partial(decode, write_own))
        return files_exchanged(whole, functools.partial(decode, route), tasks, run)

    def _writing(self, batch: TableBatch, frame: DataFrame, plan: task.TaskPlan, tasks: int) -> Results:
        """The Spark job that writes the files. It runs when its result is collected.

        :param frame: the batch's records or changes.
        :return: the tasks' results.
        """
        write_own, route, run = self._steps(plan, tasks)
        shuffles = tasks > 1 and not self._appends
        if not shuffles:
            frame = frame.coalesce(tasks)
        then, schema = (route, PACKED_SCHEMA) if shuffles else (write_own, task.RESULT_SCHEMA)
        if batch.changes is None and self._decoder.ends_in_python and not self._has_kept_letters():
            made = self._decoder.changes_into(then, schema, frame)
        else:
            changes = self._without_kept(frame if batch.changes is not None else self._decoder.changes(frame))
            made = in_arrow(changes, then, schema)
        return exchanged(made, tasks, run) if shuffles else made

    def _steps(self, plan: task.TaskPlan, tasks: int) -> tuple[Step, Step, Step]:
        """Three steps of tasks. The first one writes a task's own changes (in mode append, all changes that it has).
        The second one deals changes out to tasks. The third one writes the changes that were dealt to a task.
        """
        run = functools.partial(task.run, plan, self._written_paths)
        how = self._key_hash(tasks), tasks, plan.index is not None
        own = functools.partial(task.own, *how)
        write_own = run if self._appends else lambda changes: run(own(changes))
        return write_own, functools.partial(task.route, self._combine(), *how, PART_ROWS), run

    def _tasks(self, batch: TableBatch, spark: SparkSession) -> int:
        """How many tasks write the micro-batch."""
        return 1 if _is_small(batch.estimated_rows) else min(_shuffle_partitions(spark), RANGES)

    def _key_hash(self, tasks: int) -> KeyHash:
        """The hash that decides which task gets a change."""
        if self._key_index is not None:
            return self._key_index.key_hash(self._spec)
        bucket = self._spec.key_bucket(self.plan.section.key)
        return KeyHash(tuple(self.plan.section.key), bucket if bucket is not None and bucket.count >= tasks else None)

    def _combine(self) -> task.Combine | None:
        """How changes of the same key are combined. None in mode changelog, where a key's first change matters too."""
        if self.plan.section.mode != "upsert":
            return None
        columns = tuple(column.name for column in self.plan.columns)
        return task.Combine(tuple(self.plan.section.key), columns, self._left_out, BUFFER_BYTES)

    def _task_plan(self, begun: Begun, tasks: int) -> task.TaskPlan:
        section, index = self.plan.section, None
        if self._key_index is not None and begun.index is not None:
            index = task.IndexPlan(begun.index, self._key_index.next_sequence, tasks, vectors.ON_DRIVER // tasks)
        decoded, stored = ([column.name for column in spec.columns] for spec in (self.plan.changelog, self.plan))
        options = None
        if section.mode != "append":
            options = DeltaOptions(
                key=tuple(section.key),
                mode=section.mode,
                table_is_empty=begun.empty,
                global_deletes=self._global_deletes or self.plan.derived_partition,
                deletes_carry_row=deletes_carry_row(self._config),
                # the same row in two files differs in `_source`, which isn't a contradiction
                content=tuple(name for name in decoded if name in stored) if section.mode == "changelog" else (),
            )
        return task.TaskPlan(
            self._spec,
            options,
            begun.operation,
            section.target,
            self._dead_letters.spec if self._dead_letters else None,
            order_column(len(section.order_by)) if self._config.source.type == "kafka" else None,
            index,
            lasting=files_last(section),
        )

    def _has_kept_letters(self) -> bool:
        """Whether the dead-letter table may have bad records beyond the table's position.

        That happens if the run crashed between both commits, or if somebody set the table's position back.
        """
        kept = self._dead_letters.position(self.plan.section.target) if self._dead_letters else None
        return kept is not None and (self.position is None or self._source.is_ahead(kept, self.position))

    def _without_kept(self, changes: DataFrame) -> DataFrame:
        """Leave out bad records that the dead-letter table already has.

        The records' places are compared, not only positions: the topic may have been created anew, and the
        configuration may refuse other records now.
        """
        target = self.plan.section.target
        if self._dead_letters is None or not self._has_kept_letters():
            return changes
        # The checkpoint makes Spark compute the changes once. Without it, Catalyst would push the filter below the
        # decoder, and repeat the decoder's expressions there.
        changes = changes.localCheckpoint()
        bad = self._dead_letters.without_kept(target, changes.where(F.col(BAD).isNotNull()), changes.sparkSession)
        return changes.where(F.col(BAD).isNull()).unionByName(bad)

    def decoded(
        self, records: DataFrame, keep: Callable[[DataFrame], DataFrame] = lambda changes: changes
    ) -> DataFrame:
        """Decode raw records. The executors compute and store the changelog rows.

        If the table follows the messages' schema, it first gets the columns that the records have.

        :param keep: filters the changelog rows.
        """
        # see `_write`
        records.sparkSession.conf.set("spark.sql.ansi.enabled", "true")
        while True:
            self._observed.value, self._stated_keys.value = {}, task.FirstPlaces.NONE
            try:
                changes = keep(self._decoder.changes(records)).localCheckpoint()
            except (PySparkException, Py4JJavaError) as error:
                raise job_error(self.plan.section.target, error) from error
            self._compare_keys(self._stated_keys.value)
            if not self._observed.value:
                return changes
            try:
                self._evolve(self._observed.value)
            except SchemaEvolvedError:
                self.table.refresh()
                self._replan_if_altered()
            else:
                return changes

    def _refuse(self, written: Written) -> None:
        if written.bad and self._dead_letters is None:
            raise DataError(
                f"{self.table.name}: {written.bad:,} bad records, and on_bad_record is fail. "
                + "; ".join(written.samples)
                + ". Correct the source, or set on_bad_record: dead-letter."
            )
        undecoded = written.undecoded_since(self._undecoded())
        alike = written.failing_alike(_MOST_UNDECODED)
        if undecoded > _MOST_UNDECODED or alike is not None:
            failed = f"on all of the last {undecoded:,} records"
            if undecoded <= _MOST_UNDECODED and alike is not None:
                failed = (
                    f"with {alike} on {written.undecoded[alike]:,} of the {written.read:,} records of a micro-batch"
                )
            raise DataError(
                f"{self.table.name}: the format failed {failed}, so it seems to be at "
                f"fault, not they: {'; '.join(written.samples)}. Nothing of this micro-batch was applied. Correct the "
                "format, or the package that it comes from, and run again. If the records are wrong, have the format "
                "reject them (changelog.changes.Rejected)."
            )
        if self._dead_letters is not None:
            self._dead_letters.check_limit(self.plan.section.target, written.bad_by_class, written.samples)
        again = written.snapshot_partitions & self._streamed()
        if again:
            raise DataError(
                f"{self.table.name}: the source was snapshot again (op r after other changes, in partition "
                f"{min(again)}). In mode {self.plan.section.mode} that would duplicate rows. Use mode: upsert."
            )

    def _streamed(self) -> set[int]:
        stored = self.table.property(f"{self._prefix}.streamed")
        return set(json.loads(stored)) if stored else set()

    def _undecoded(self) -> int:
        """How many successive records the format has failed on, up to the table's position."""
        return int(self.table.property(f"{self._prefix}.undecoded") or 0)

    def _properties(self, written: Written) -> dict[str, str]:
        """Table properties that the commit sets, besides the position."""
        properties = dict[str, str]()
        streamed = self._streamed() | written.streamed_partitions
        if streamed:
            properties[f"{self._prefix}.streamed"] = json.dumps(sorted(streamed))
        before = self._undecoded()
        undecoded = written.undecoded_since(before)
        if undecoded != before:
            properties[f"{self._prefix}.undecoded"] = str(undecoded)
        name, remembered = property_name(self._config), self._key.to_json()
        if self._key.messages and self.table.property(name) != remembered:
            properties[name] = remembered
        return properties

    def _commit(self, end: Position, begun: Begun, written: Written, write_seconds: float, retries: Retries) -> None:
        operation, slice_ = begun.operation, begun.index
        index = None
        if self._key_index is not None and slice_ is not None:
            with _before_commit(self.table.name):
                index = self._key_index.prepare(operation, slice_, written.tasks, written.index)
        request = ChangeSet(
            prefix=self._prefix,
            operation=operation,
            position=end,
            files=written.files,
            base_snapshot=self._base,
            previous_operation=self._operation,
            written_for=self._layout,
            written_for_empty_table=begun.empty,
            summary={SINK_ID: self._config.sink.id, ROWS: json.dumps(written.rows)},
            properties=self._properties(written),
            metrics=_metrics(begun, written, write_seconds),
        )
        if self._key_index is None or slice_ is None or index is None:
            self._committer.commit(request, retries)
            return
        while True:
            earlier = list(self._written_paths.value)
            self._written_paths.value = [*earlier, *index.new_paths]
            try:
                self._committer.commit(replace(request, base_snapshot=index.base, index=index), retries)
                return
            except TableChangedError as error:
                refused = error
            retries.wait(refused)
            self.table.refresh()
            self._committer.own_position(self._prefix, request.previous_operation)
            if self._is_altered():
                raise refused
            with _before_commit(self.table.name):
                amended = self._key_index.amend(operation, slice_, written.tasks, written.index)
            if amended is None:
                raise refused
            self._delete(set(index.new_paths) - set(amended.new_paths))
            self._written_paths.value = earlier
            index = amended

    def _keep_dead_letters(self, end: Position, begun: Begun, written: Written) -> None:
        """Commit the bad records. This happens before the table's own commit. If the run crashes in between, it repeats
        the batch, and the dead-letter table's position prevents a second copy.
        """
        assert self._dead_letters is not None
        target = self.plan.section.target
        self._dead_letters.commit(
            target, begun.operation, end, written.dead_letters, written.bad_by_class, begun.opening
        )
        committed = set(written.dead_letter_paths)
        self._written_paths.value = [path for path in self._written_paths.value if path not in committed]
        log.warning(
            "%s: %d bad records to %s. %s",
            self.table.name,
            written.bad,
            self._dead_letters.name,
            "; ".join(written.samples),
        )
        self._dead_letters.publish(target)

    def _delete_written(self) -> None:
        """After a failed job or commit, delete the files of finished tasks. Failed tasks have deleted their own."""
        self._delete(self._written_paths.value)
        self._written_paths.value = []

    def _delete(self, paths: Iterable[str]) -> None:
        for path in paths:
            io = self._spec.io if self._key_index is None else self._key_index.io_of(path, self._spec)
            try:
                io.delete(path)
            except OSError:
                log.warning("%s: could not delete %s; a clean-up of orphan files will", self.table.name, path)

    def _log(self, batch_id: int, end: Position, written: Written, write: float, commit: float) -> None:
        log.info(
            "%s batch %d: %s | write %d ms, commit %d ms, peak %d MB | %s",
            self.table.name,
            batch_id,
            written.shown(self._spec.unites_deletes),
            write * 1000,
            commit * 1000,
            written.peak_memory / 1e6,
            json.dumps(end),
        )


@contextmanager
def _before_commit(name: str) -> Iterator[None]:
    """Translate errors before the commit. After them nothing is committed, so all of the micro-batch's files can be
    deleted.
    """
    try:
        yield
    except CorruptIndexError as error:
        raise IndexLostError(str(error)) from error
    except (PySparkException, Py4JJavaError) as error:
        raise job_error(name, error) from error
    except OSError as error:
        raise TemporaryError(
            f"{name}: what the commit needs could not be written: {error}. Nothing was applied; run again."
        ) from error


def _metrics(begun: Begun, written: Written, write_seconds: float) -> dict[str, int]:
    """Numbers about a micro-batch's work, by the names that Delta has for those of an update."""
    return {
        "scanTimeMs": int(begun.index_seconds * 1000),
        "rewriteTimeMs": int((write_seconds - begun.index_seconds) * 1000),
        "numSourceRows": sum(written.rows.values()),
        "numTargetRowsInserted": written.keys("inserted"),
        "numTargetRowsUpdated": written.keys("updated"),
        "numTargetRowsDeleted": written.keys("deleted"),
    }


def _is_read_by_each(batch: TableBatch, tasks: int) -> bool:
    """Whether each task reads all of the batch's Parquet files, and keeps only its own rows."""
    assert batch.files is not None
    assert batch.estimated_rows is not None
    size = sum(max(size, _OPENING) for size in batch.files.values())
    again = tasks - 1
    return not again or (size * again <= READ_AGAIN and batch.estimated_rows * again <= _ROWS_AGAIN)


def _is_small(estimated_rows: int | None) -> bool:
    return estimated_rows is not None and estimated_rows <= SMALL_BATCH


def _shuffle_partitions(spark: SparkSession) -> int:
    return int(spark.conf.get("spark.sql.shuffle.partitions") or 1)


_EXPIRED = "Some data may have been lost because they are not available in Kafka any more"
"""What Spark's Kafka source says of messages that it was to read, unless `failOnDataLoss` is false."""


def job_error(target: str, error: Exception) -> RowdeltaError:
    """What a failed Spark job means for the user."""
    failure, text = failure_of(error), str(error)
    if failure is not None:
        return _meaning(target, failure)
    if "PARQUET_COLUMN_DATA_TYPE_MISMATCH" in text or "SchemaColumnConvertNotSupportedException" in text:
        return DataError(f"{target}: a change file has a column of another type. {_first_lines(text)}")
    failed = re.search(r"\[([A-Z_.]+)\] (.*?)SQLSTATE: 22", text)
    if failed:
        # SQLSTATE 22 is a "data exception" of an expression; conversions of messages' values raise no errors
        return DataError(
            f"{target}: the expression of a computed column failed on a value: {failed.group(2).strip()} Nothing was "
            "applied. Correct "
            "the expression; try_cast and the like give null instead."
        )
    if _EXPIRED in text:
        return DataError(
            f"{target}: messages expired in Kafka before they were read. Nothing of this micro-batch was applied. Take "
            "a new snapshot of the source into the topic (mode: upsert), with source.options.failOnDataLoss: false to "
            f"go on from what is there. {_first_lines(text)}"
        )
    if "No space left on device" in text:
        return TemporaryError(
            f"{target}: no space left on device while writing. Free space and run again; nothing was applied."
        )
    return TemporaryError(f"{target}: the Spark job failed; nothing was applied. {_first_lines(text)}")


def _meaning(target: str, failure: TaskFailure) -> RowdeltaError:
    if failure.kind == "contradiction":
        return DataError(f"{target}: {failure.message}")
    if failure.kind == "broken format":
        return ConfigError(
            f"{target}: {failure.message}. No record is at fault, and nothing was applied. Correct the format, or "
            "install the versions of the packages that it needs, and run again."
        )
    # a damaged index is built again where the job was started; where it wasn't, the next run does it
    return TemporaryError(f"{target}: {failure.message}. Nothing was applied; run again.")


def _first_lines(text: str) -> str:
    """The important lines of an error: Spark's first lines, or Python's exception, which comes after its calls."""
    raised: list[str] = _RAISED.findall(text)
    if raised:
        return raised[-1][:800]
    lines = [
        line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith(("at ", "File "))
    ]
    return " ".join(lines[:3])[:800]


_RAISED = re.compile(r"^.*Traceback \(most recent call last\):\n(?:[ \t].*\n)+(\S.*)", re.MULTILINE)
