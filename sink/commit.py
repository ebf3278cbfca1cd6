"""One row delta per micro-batch, with the source position in the same atomic commit.

The position is a table property, set in the transaction that adds the files: it survives snapshot expiry. The
snapshot's summary has it too, for rollbacks. What makes a second application impossible is validation *inside* the
commit, since Iceberg retries a commit on newer metadata by itself: the row delta validates from the snapshot whose
position was read, so any data or delete file that came after refuses it, and only then is the position read again.
"""

import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from py4j.java_gateway import JavaObject

from sink.errors import FencedError, RowdeltaError, TemporaryError
from sink.iceberg import JAVA_ERRORS, IcebergTable, java_class, java_exception, java_message, table_error
from sink.keyindex import IndexCommit
from sink.sources.source import Position

_LOOKS_AFTER_UNKNOWN_STATE = 5
_CLEANABLE = "org.apache.iceberg.exceptions.CleanableFailure"


class TableNoLongerEmptyError(Exception):
    """The files were written for an empty table, without deletes, and somebody else has added rows since."""


class TableChangedError(Exception):
    """The rows to delete were looked up in a snapshot that is no longer the current one, or the deletes are for
    partitions that no longer are.
    """


@dataclass(frozen=True)
class RowDeltaCommit:
    """A request to commit: plain values, so that a committer for another table format can stand here.

    :param prefix: property prefix of the sink's state in this table (`rowdelta.<sink id>`).
    :param operation: unique to this attempt at this micro-batch.
    :param files: `ContentFileParser` JSON of data and delete files.
    :param base_snapshot: the snapshot whose position this batch continues; None if the table had none.
    :param properties: further table properties to set in the same transaction.
    :param index: the key index's part: rows were looked up in `base_snapshot`, so no other will do.
    :param previous_operation: the commit that stored the position which this batch continues; None if there was none.
    :param written_under_schema: id of the schema that was current. A snapshot says of which schema it is, and readers
        of single commits go by that; None if it doesn't matter.
    :param written_under_spec: id of the partition spec likewise; None if there are no deletes.
    """

    prefix: str
    operation: str
    position: Position
    files: Sequence[str]
    base_snapshot: int | None
    previous_operation: str | None
    written_under_schema: int | None = None
    written_under_spec: int | None = None
    written_for_empty_table: bool = False
    summary: Mapping[str, str] = field(default_factory=dict)
    properties: Mapping[str, str] = field(default_factory=dict)
    index: IndexCommit | None = None


@dataclass(frozen=True)
class RewriteCommit:
    """A request to replace files by others that have the same live rows and deletes.

    It says nothing of the source position, so it can do no harm if another run has stored a newer one meanwhile.

    :param prefix: as in `RowDeltaCommit`.
    :param position_operation: the commit that stored the sink's position.
    :param files: `ContentFileParser` JSON.
    :param replaced: Java `DataFile`s and `DeleteFile`s.
    :param index: the key index's part: `index.base` is the snapshot that `files` have the rows of.
    :param written_for: ids of the schema and the partition spec, and the format version, of `files`.
    """

    prefix: str
    position_operation: str
    files: Sequence[str]
    replaced: Sequence[JavaObject]
    index: IndexCommit
    summary: Mapping[str, str]
    written_for: tuple[int, int, int]


class IcebergCommitter:
    """Commits row deltas and rewrites to one table."""

    def __init__(self, table: IcebergTable) -> None:
        self._table = table
        self._everything = table.iceberg.expressions.Expressions.alwaysTrue()
        # the last commit's deletion vectors, of which the next one replaces most: each costs two calls to the JVM
        self._vectors: dict[str, JavaObject] = {}

    def commit(self, request: RowDeltaCommit) -> None:
        """Commit, or find out why not. Retries with the table's own `commit.retry.*` settings.

        :raises TableNoLongerEmptyError: write the batch again, with deletes.
        :raises TableChangedError: look its keys up and write it again.
        :raises TableError: another sink commits under the same id, or the table is gone.
        :raises TemporaryError: the outcome is unknown or retries are used up. Files must be kept after an unknown
            outcome; it is a `CommitUnknownError` then.
        """
        base = request.base_snapshot
        for pause in self.pauses():
            try:
                self._try(request, base)
                return
            except JAVA_ERRORS as error:
                if not self._is_refusal(error):
                    self._look(lambda: self._is_committed(request), error)
                    return
                if java_class(error) not in ("ValidationException", "CommitFailedException") and not _base_is_gone(
                    error
                ):
                    raise table_error(self._table.name, error) from None
                reason = java_message(error)
            # a request that was sent twice is refused the second time: it may be our own commit that is in the way
            if self._is_committed(request):
                return
            self.check_not_fenced(request.prefix, request.previous_operation)
            if request.written_for_empty_table and not self._table.is_empty():
                raise TableNoLongerEmptyError
            if request.index is not None and self._table.snapshot_id() != request.base_snapshot:
                raise TableChangedError(reason)
            base = self._table.snapshot_id()
            time.sleep(pause)
        raise retries_used_up(self._table.name, reason)

    def _try(self, request: RowDeltaCommit, base: int | None) -> None:
        table, parser, mapper = self._table.java, self._table.content_file_parser, self._table.json_mapper
        specs = table.specs()
        stored: dict[str, Any] = {"position": request.position, "operation": request.operation}
        if request.index is not None:
            stored["index"] = request.index.stored
        transaction = table.newTransaction()  # of metadata that it reads anew
        found = transaction.table()
        if request.written_under_spec not in (None, int(found.spec().specId())):
            # a delete in a partition of the one doesn't reach the rows that others moved to partitions of the other
            raise TableChangedError("the table was partitioned in another way")
        if request.written_under_schema not in (None, int(found.schema().schemaId())):
            raise TableChangedError("the table has other columns")
        delta = transaction.newRowDelta()
        for name, value in request.summary.items():
            delta = delta.set(name, value)
        delta = delta.set(f"{request.prefix}.position", json.dumps(stored))
        for file in request.files:
            content = parser.fromJson(mapper.readTree(file), specs)
            delta = delta.addRows(content) if json.loads(file)["content"] == "DATA" else delta.addDeletes(content)
        if request.index is not None:
            earlier, self._vectors = self._vectors, {}
            for file in request.index.files:
                self._vectors[file] = parser.fromJson(mapper.readTree(file), specs)
                delta = delta.addDeletes(self._vectors[file])
            for file in request.index.removed:
                delta = delta.removeDeletes(earlier.get(file) or parser.fromJson(mapper.readTree(file), specs))
            # also compactions remove the files that hold the rows to delete
            delta = delta.validateDataFilesExist(list(request.index.referenced)).validateDeletedFiles()
        if base is not None:
            delta = delta.validateFromSnapshot(base)
        delta = delta.conflictDetectionFilter(self._everything)
        delta.validateNoConflictingDataFiles().validateNoConflictingDeleteFiles().commit()
        snapshot = transaction.table().currentSnapshot()
        stored |= {"snapshot-id": int(snapshot.snapshotId()), "sequence-number": int(snapshot.sequenceNumber())}
        properties = json.dumps(stored)
        update = transaction.updateProperties().set(f"{request.prefix}.position", properties)
        for name, value in request.properties.items():
            update = update.set(name, value)
        update.commit()
        transaction.commitTransaction()

    def rewrite(self, request: RewriteCommit) -> None:
        """Commit at once or not at all: what is rewritten loses nothing by waiting.

        :raises TableChangedError: rows of the replaced files were deleted meanwhile, or files are gone.
        :raises TableError, TemporaryError: as `commit`.
        """
        table, parser, mapper = self._table.java, self._table.content_file_parser, self._table.json_mapper
        name = f"{request.prefix}.index"
        try:
            transaction = table.newTransaction()
            found = transaction.table()
            layout = int(found.schema().schemaId()), int(found.spec().specId()), self._table.format_version(found)
            if layout != request.written_for:
                raise TableChangedError("the table was altered")
            rewrite = transaction.newRewrite()
            for key, value in request.summary.items():
                rewrite = rewrite.set(key, value)
            for replaced in request.replaced:
                rewrite = rewrite.deleteFile(replaced)
            for file in request.index.removed:
                # Iceberg (1.11) overlooks some vectors of data files that are removed
                rewrite = rewrite.deleteFile(parser.fromJson(mapper.readTree(file), table.specs()))
            for file in request.files:
                rewrite = rewrite.addFile(parser.fromJson(mapper.readTree(file), table.specs()))
            rewrite.validateFromSnapshot(request.index.base).commit()
            stored = {
                "operation": request.position_operation,
                "index": request.index.stored,
                "snapshot-id": int(transaction.table().currentSnapshot().snapshotId()),
            }
            transaction.updateProperties().set(name, json.dumps(stored)).commit()
        except JAVA_ERRORS as error:  # whatever it is: the transaction wasn't committed
            raise TableChangedError(java_message(error)) from None
        try:
            transaction.commitTransaction()
        except JAVA_ERRORS as error:
            if self._is_refusal(error):
                raise TableChangedError(java_message(error)) from None

            def is_committed() -> bool:
                self._table.refresh()
                text = self._table.property(name)
                return text is not None and json.loads(text)["index"] == request.index.stored

            self._look(is_committed, error)

    def check_not_fenced(self, prefix: str, previous_operation: str | None) -> None:
        """:raises FencedError: the position isn't the one that `previous_operation` stored: somebody else commits as
        this sink.
        """
        stored = self._table.position(prefix)
        if (stored.operation if stored else None) != previous_operation:
            raise FencedError(
                f"{self._table.name}: another run with the same sink id ({prefix.removeprefix('rowdelta.')}) committed "
                "while this one was working. This one stops; nothing was applied twice. If both are meant to run, "
                "give one "
                "its own sink.id."
            )

    def _look(self, is_committed: Callable[[], bool], error: Exception) -> None:
        """The catalog can't say whether the commit happened. The table can: it names the operation."""
        for attempt in range(_LOOKS_AFTER_UNKNOWN_STATE):
            time.sleep(0.2 * 2**attempt)
            try:
                if is_committed():
                    return
            except RowdeltaError:  # whatever it is, it doesn't say that the commit failed
                continue
        raise CommitUnknownError(
            f"{self._table.name}: it is unknown whether the commit went through ({java_message(error)}). Its files "
            "are kept. "
            "Run again: the table's position decides."
        )

    def _is_refusal(self, error: Exception) -> bool:
        """Whether it is certain that nothing was committed. Iceberg itself cleans up after `CleanableFailure` only
        (`SnapshotProducer`, strict cleanup): a connection that breaks, for one, may break behind the commit.
        """
        if java_class(error) == "CommitStateUnknownException":
            return False
        loader = self._table.java.getClass().getClassLoader()
        cleanable = self._table.jvm.java.lang.Class.forName(_CLEANABLE, True, loader)
        return bool(cleanable.isInstance(java_exception(error))) or java_class(error) == "IllegalArgumentException"

    def _is_committed(self, request: RowDeltaCommit) -> bool:
        self._table.refresh()
        stored = self._table.position(request.prefix)
        return stored is not None and stored.operation == request.operation

    def pauses(self) -> list[float]:
        """Seconds to wait after each refused attempt: Iceberg's `commit.retry.*` back-off, with jitter."""
        properties = self._table.spec.properties_by_name
        retries = int(properties.get("commit.retry.num-retries", 4))
        shortest = int(properties.get("commit.retry.min-wait-ms", 100)) / 1000
        longest = int(properties.get("commit.retry.max-wait-ms", 60_000)) / 1000
        return [min(longest, shortest * 2**n) * random.uniform(0.9, 1.1) for n in range(retries + 1)]


class CommitUnknownError(TemporaryError):
    """Neither success nor failure: files of the attempt must not be deleted."""


def retries_used_up(table: str, reason: object) -> TemporaryError:
    return TemporaryError(
        f"{table}: other writers kept committing in between, and the table's commit.retry settings are used up. "
        "Nothing was "
        f"applied; run again, or raise commit.retry.num-retries. Last conflict: {reason}"
    )


def _base_is_gone(error: Exception) -> bool:
    """The base snapshot was expired or rolled back; validation can't start from it, so start from the current one."""
    message = java_message(error)
    return "is not an ancestor" in message or "Cannot determine history" in message
