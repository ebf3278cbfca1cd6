"""A Delta table as a target: what others changed, the deletes of earlier rows, and its upkeep."""

import json
import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from threading import Thread
from typing import Any
from urllib.parse import quote, unquote

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from changelog.amounts import amount, amounts
from deltawriters.content import TouchedFile
from deltawriters.keyindex import IndexedFile
from deltawriters.old_rows import DeletedRows
from sink.errors import TableError, TemporaryError
from sink.spark.java_errors import JAVA_ERRORS, java_message
from sink.spark.session import MAINTENANCE_POOL, activate
from sink.targets.base import (
    Compacted,
    CompactionLimits,
    LiveFile,
    MergeCandidates,
    Rewritable,
    TableChanges,
    TouchedFiles,
    Upkeep,
    WrittenDeletes,
    no_condition,
)
from sink.targets.delta.commit import DeltaCommitter
from sink.targets.delta.history import DeltaHistory
from sink.targets.delta.live_files import file_actions, full
from sink.targets.delta.log import Commit, CommitRefusedError, DeltaLog
from sink.targets.delta.new_vectors import live_add, live_adds, remove_of, write_deletes
from sink.targets.delta.optimize import compact_files
from sink.targets.delta.partitions import is_clear
from sink.targets.delta.rows_in_files import PARTITION, PATH, ROW, rows_in_files
from sink.targets.delta.small_files import candidates, counted, rewritables
from sink.targets.delta.state import DeltaState
from sink.targets.locations import in_one_form
from sink.targets.notes import REWRITE
from sink.targets.own_state import orphans_reach

log = logging.getLogger("rowdelta")

_IGNORES_RETENTION = "spark.databricks.delta.vacuum.retentionWindowIgnore.enabled"
"""With its default, Delta 4 ignores the time in the statement, and goes by the table's property alone."""
_SHORTEST_RETENTION = timedelta(days=7)
"""Delta's default of `delta.deletedFileRetentionDuration`. A commit may take long, and a table may say less."""
_CHECKPOINT_EVERY = 10
"""Versions from one checkpoint to the next, unless the table's own interval is shorter. It is Delta's default."""
_CHECKPOINT_EVERY_AT_MOST = 200
_CHECKPOINT_PAUSE = 10
"""A checkpoint names all files that were removed in the last week. With a commit each second it takes seconds, and the
next would be due as soon as it is written. So none is written for ten times as long, but for so many versions.
"""
_OF_A_TASK, _MOST_TASKS = 15_000, 200
"""A task makes the state of so many actions of the log, in a quarter of a second."""
_LATEST = 20
"""In so many commits `upkeep` looks for a rewrite."""


class DeltaTable(DeltaState):
    """One Delta table as the sink sees it."""

    _checkpoint: "_Checkpoint | None" = None
    _next_checkpoint = 0.0

    def set_property(self, name: str, value: str | None) -> None:
        prefix, _, key = name.rpartition(".")
        self.committer().store(prefix, key, value)

    def upkeep(self) -> Upkeep | None:
        files = counted(self)
        if self.is_empty() or len(files) < len(self.live):  # files without statistics
            return None
        commits = self.log.history(_LATEST, self.snapshot_id())
        last = next((commit for commit in commits if REWRITE in commit.notes), None)
        return Upkeep(
            data_files=len(files),
            size_in_bytes=sum(file.small.size_in_bytes for file in files),
            rows=sum(file.rows for file in files),
            deleted_rows=sum(file.deleted for file in files),
            rewritten_at=self.log.time_of(last) if last else None,
            rewritten_files=int(last.notes[REWRITE]) if last else 0,
        )

    def evolve(self, changes: Mapping[str, T.DataType | None], defaults: Mapping[str, Any]) -> None:
        struct = T.StructType.fromJson(json.loads(self._snapshot.metadata.schema))
        fields = {field.name: field for field in struct}
        for name, dtype in changes.items():
            old = fields.get(name)
            if dtype is None and old is not None:
                fields[name] = T.StructField(name, old.dataType, True, old.metadata)
            elif dtype is not None:
                nullable, metadata = (True, {}) if old is None else (old.nullable, old.metadata)
                fields[name] = T.StructField(name, dtype, nullable, metadata)
        try:
            self.log.evolve(self._snapshot.version, T.StructType(list(fields.values())))
        except ValueError as error:
            raise TableError(
                f"{self.name}: {error}. Allow it: ALTER TABLE … SET TBLPROPERTIES ('delta.enableTypeWidening' = "
                "'true'), which needs readers that know the feature typeWidening; or set schema_changes: fail."
            ) from None
        except CommitRefusedError as error:
            log.info("%s: others committed while its columns were changed: %s", self.name, error)
        self.refresh()

    def committer(self, *, newest_if_in_doubt: bool = False) -> DeltaCommitter:
        return DeltaCommitter(self, newest_if_in_doubt=newest_if_in_doubt)

    def key_encoding(self, key: Sequence[str], buckets: int | None) -> str:
        types = {column.name: column.type.simpleString() for column in self.columns()}
        # another column may get the name of one that was dropped or renamed
        physical = {column.name: column.physical_name for column in self.spec.columns}
        # the index has full paths of files
        place = f"{self._snapshot.metadata.table_id} at {self.log.path}"
        return f"{', '.join(f'{physical[name]} {types[name]}' for name in key)}; delta {place}"

    def changes_since(self, base: int | None, included: set[int]) -> TableChanges | None:
        current = self._snapshot.version
        if base == current:
            return None if included else TableChanges()
        if base is None or base > current:
            return None
        commits = self._commits_since(base)
        if commits is None or not included <= {commit.version for commit in commits}:
            return None
        foreign = [commit for commit in commits if commit.version not in included and any(file_actions(commit))]
        if not foreign:
            return TableChanges()
        touched = {unquote(content["path"]) for commit in foreign for _, content in file_actions(commit)}
        live = self.live
        if any((kind == "add") != (path in live) for path, kind in _last_actions(commits).items()):
            return None  # Delta's replay of the log names a file otherwise than a commit does, such as with a scheme
        files = [self._live_file(path, live[path]) for path in touched if path in live]
        gone = frozenset(self._path(path) for path in touched if path not in live)
        counts = amounts({"added or changed file": len(files), "removed file": len(gone)})
        log.info("%s: %s by others: %s; catching up", self.name, amount(len(foreign), "commit"), counts)
        return TableChanges(files, gone)

    def live_files(self) -> Iterator[LiveFile]:
        return (self._live_file(path, add) for path, add in self.live.items())

    def _live_file(self, path: str, add: Mapping[str, Any]) -> LiveFile:
        vector = add.get("deletionVector")
        known = None if vector is None else {**vector, "record-count": vector["cardinality"]}
        return LiveFile(IndexedFile(self._path(path), 0, dict(add["partitionValues"])), known, handle=add)

    def _path(self, path: str) -> str:
        """The full path of a data file, as tasks name it."""
        return full(self.log.path, path)

    def frame(self, spark: SparkSession) -> DataFrame:
        return self._frame(spark)

    def frame_at(self, snapshot_id: int) -> DataFrame:
        return self.spark.read.format("delta").option("versionAsOf", str(snapshot_id)).load(self.log.path)

    def history(self, prefix: str) -> DeltaHistory:
        return DeltaHistory(self, prefix)

    def remove_rows(self, rows: DataFrame, columns: Sequence[str]) -> Exception | None:
        refusal = self.log.delete_equal(rows, columns)
        self.refresh()
        return refusal

    def frame_of_commit(self, snapshot_id: int) -> DataFrame | None:
        commits = self.log.commits(snapshot_id, snapshot_id)
        if not commits:
            return None
        adds = [content for kind, content in file_actions(commits[0]) if kind == "add"]
        rewritten = [path for add in adds if (path := unquote(add["path"])) not in self.live]
        if not all(self.spec.io.new_input(self._path(path)).exists() for path in rewritten):
            return None  # VACUUM has deleted them
        return self.log.frame_of(snapshot_id, adds)

    @contextmanager
    def rows_of(
        self, files: Sequence[LiveFile], columns: Sequence[str]
    ) -> Iterator[tuple[DataFrame, Column, Column, Sequence[str]]]:
        if not self.spec.supports_vectors:
            frame = self._rows_in_files(files, columns)
            yield frame, F.col(PATH), F.col(ROW), [file.path for file in files]
            return
        frame = self.log.frame_of(self._snapshot.version, [file.handle for file in files])
        path, position = F.col("_metadata.file_path"), F.col("_metadata.row_index")
        names = [file.path.rpartition("/")[2] for file in files]
        if len(set(names)) == len(names) and all(quote(name) == name for name in names):
            yield frame, F.element_at(F.split(path, "/"), -1), position, names
        else:  # as in a folder that CONVERT TO DELTA made a table of: files of one name, or names that are encoded
            yield (
                frame,
                path,
                position,
                self._shown(files, [text for (text,) in frame.select(path).distinct().collect()]),
            )

    def _rows_in_files(self, files: Sequence[LiveFile], columns: Sequence[str]) -> DataFrame:
        """Rows of a table whose positions Delta's reader doesn't tell."""
        names = T.StructType().add(PATH, "string").add(PARTITION, "string")
        found = [(file.path, json.dumps(dict(file.file.partition))) for file in files]
        tasks = min(len(files), int(self.spark.conf.get("spark.sql.shuffle.partitions") or 1))
        types = {column.name: column.type for column in self.columns()}
        schema = T.StructType([T.StructField(name, types[name]) for name in columns])
        read = partial(rows_in_files, self.spec, tuple(columns))
        shared = self.spark.createDataFrame(found, names).repartition(tasks)
        return shared.mapInArrow(lambda batches: read(batches), schema.add(PATH, "string").add(ROW, "long"))

    def _shown(self, files: Sequence[LiveFile], texts: Sequence[str]) -> list[str]:
        """The text of each file's path in Spark, which encodes other characters than Delta does.

        :param texts: of all files that have rows.
        """
        known = {in_one_form(unquote(text)): text for text in texts}
        shown = [known.pop(in_one_form(file.path), file.path) for file in files]
        if known:
            raise TableError(f"{self.name}: its log has no file of the name {next(iter(known))}, but Spark reads it")
        return shown

    def delete_rows(
        self,
        name: str,
        rows: DeletedRows,
        known: Callable[[str], Mapping[str, Any] | None],
        parquet_deletes: Mapping[str, Sequence[str]],
        created: list[str],
    ) -> WrittenDeletes:
        return write_deletes(self.spark, self.name, self.spec, rows, self.live, created)

    def touched_files(self, paths: Collection[str]) -> TouchedFiles:
        files, handles = list[TouchedFile](), list[Mapping[str, Any]]()
        adds = live_adds(self.spec.location, self.live, paths)
        for path, add in adds.items():
            file = IndexedFile(path, 0, dict(add["partitionValues"]))
            if not is_clear(self.spec.partitioning, add["partitionValues"]):
                names = ", ".join(column.name for column in self.spec.partitioning)
                raise TableError(
                    f"{self.name}: a row to replace is in a partition ({names}) whose time has no zone. "
                    "Each reader takes it for a time of its own zone, so deletes: copy-on-write can't tell which time "
                    "it is. Write these partitions again in Spark, with spark.sql.session.timeZone set to the zone of "
                    "their writer (UPDATE … SET column = column). Or set deletes: position, which leaves the files "
                    "where they are."
                )
            files.append(TouchedFile(file, int(add["size"]), vector=add.get("deletionVector")))
            handles.append(remove_of(add))
        return TouchedFiles(files, handles, (), len(self.live))

    def merge_candidates(self, prefix: str, is_enough: Callable[[int, int], bool]) -> MergeCandidates:
        return candidates(self, prefix, is_enough)

    def rewritables(self) -> Iterator[list[Rewritable]]:
        return rewritables(self)

    def files_where(self, condition: str) -> frozenset[str]:
        try:
            read = self.frame(self.spark).where(condition).inputFiles()
        except JAVA_ERRORS as error:
            raise no_condition(self.name, condition, java_message(error)) from None
        found = {in_one_form(unquote(path)) for path in read}
        paths = (full(self.spec.location, path) for path in self.live)
        return frozenset(path for path in paths if in_one_form(path) in found)

    def handles(self, paths: Collection[str]) -> Sequence[Mapping[str, Any]]:
        adds = [live_add(self.spec.location, self.live, path) for path in paths]
        return [remove_of(add, data_change=False) for add in adds if add is not None]

    def delete_new_rows(
        self, name: str, files: Sequence[str], rows: DeletedRows, created: list[str]
    ) -> tuple[Sequence[str], WrittenDeletes]:
        new = {unquote(action["add"]["path"]): action["add"] for action in map(json.loads, files)}
        written = write_deletes(self.spark, self.name, self.spec, rows, new, created)
        for text in written.removed:
            del new[unquote(json.loads(text)["remove"]["path"])]
        kept = [json.dumps({"add": add}) for add in new.values()]
        with_vectors = [json.dumps({"add": json.loads(text)["add"] | {"dataChange": False}}) for text in written.files]
        return [*kept, *with_vectors], WrittenDeletes(vectors=written.vectors, bytes=written.bytes)

    def stored_at(self) -> int:
        return self.log.stored_at(self._snapshot.version)

    def remove_orphans(self, older_than: timedelta, *, dry_run: bool = False) -> list[str]:
        """By VACUUM, which also keeps what is younger than a week or the table's `delta.deletedFileRetentionDuration`:
        older versions of the table and streams that read it need these files. It tells 1,000 files at most.
        """
        inside = self.log.table_inside()
        if inside is not None:
            raise TableError(
                f"{self.name}: orphan files not removed: there seems to be another table at {inside}, whose files "
                "VACUUM would delete. Move it, or set maintenance.orphans of this table to null."
            )
        wanted = max(older_than, self.log.kept_after_deletion(), _SHORTEST_RETENTION)
        wanted += timedelta(seconds=max(0.0, time.time() - orphans_reach(self) / 1000))
        hours = math.ceil(wanted / timedelta(hours=1))
        self.spark.conf.set(_IGNORES_RETENTION, "false")
        statement = f"VACUUM delta.`{self.log.path}` RETAIN {hours} HOURS"
        try:
            # only this tells the files
            found = [str(row[0]) for row in self.spark.sql(f"{statement} DRY RUN").collect()]
            if found and not dry_run:
                self.spark.sql(statement).collect()
        except JAVA_ERRORS as error:
            raise TemporaryError(f"{self.name}: orphan files not removed: {java_message(error)}") from None
        return found

    def compact(self, limits: CompactionLimits, *, dry_run: bool = False) -> tuple[Compacted, int] | None:
        return compact_files(self, limits, dry_run=dry_run)

    def index_forbidden_at(self, location: str) -> str | None:
        location = in_one_form(location)
        folder = location.removeprefix(f"{in_one_form(self.log.path).rstrip('/')}/")
        if folder == location or folder.startswith("_"):
            return None
        return "inside the table's own folder, where Delta's VACUUM deletes it"

    def tend(self) -> None:
        """Write a due checkpoint in a thread of its own: it takes seconds."""
        if self._checkpoint is not None:
            if self._checkpoint.is_alive():
                return
            self._next_checkpoint = time.monotonic() + _CHECKPOINT_PAUSE * self._checkpoint.seconds
            self._checkpoint = None
            self.log.list_again()
        every = _CHECKPOINT_EVERY if time.monotonic() >= self._next_checkpoint else _CHECKPOINT_EVERY_AT_MOST
        if self.log.is_checkpoint_due(every):
            # a daemon: a second Ctrl-C doesn't wait for it, and a checkpoint that isn't finished isn't seen
            self._checkpoint = _Checkpoint(self.spark, self.log.path, self.name)
            self._checkpoint.start()

    def finish_tending(self, seconds: float) -> None:
        if self._checkpoint is not None:
            self._checkpoint.join(seconds)


def _last_actions(commits: Sequence[Commit]) -> dict[str, str]:
    """Decoded path -> the kind of the last action that names it, of each file that the commits add or remove."""
    last: dict[str, str] = {}
    for commit in commits:
        kinds: dict[str, str] = {}
        for kind, content in file_actions(commit):
            path = unquote(content["path"])
            kinds[path] = "add" if "add" in (kind, kinds.get(path)) else kind
        last |= kinds
    return last


class _Checkpoint(Thread):
    """Writes a checkpoint.

    :param path: the table's folder.
    :param name: the table, for messages.
    """

    def __init__(self, spark: SparkSession, path: str, name: str) -> None:
        super().__init__(name="checkpoint", daemon=True)
        self._arguments = spark, path, name
        self.seconds = 0.0

    def run(self) -> None:
        began = time.monotonic()
        _write_checkpoint(*self._arguments)
        self.seconds = time.monotonic() - began


def _write_checkpoint(spark: SparkSession, path: str, name: str) -> None:
    """Micro-batches come first: they get each core that a task of the checkpoint leaves, so its tasks are short."""
    try:
        own = SparkSession(spark.sparkContext, spark._jsparkSession.cloneSession())
        activate(own)
        own.sparkContext.setLocalProperty("spark.scheduler.pool", MAINTENANCE_POOL)
        log_of_thread = DeltaLog(own, path, apart=True)
        actions = log_of_thread.last_checkpoint.get("size", 0)
        if actions > _OF_A_TASK:
            own.conf.set("spark.databricks.delta.snapshotPartitions", min(_MOST_TASKS, actions // _OF_A_TASK + 3))
        log_of_thread.refresh()
        log_of_thread.checkpoint()
    except Exception as error:  # noqa: BLE001 - without it, readers replay more of the log; the next commit tries again
        log.warning("%s: no checkpoint of the log was written: %s", name, error)
