"""One row delta per micro-batch, with the source position in the same atomic commit.

The position is a table property, set in the transaction that adds the files: it survives snapshot expiry. The
snapshot's summary has it too, for rollbacks. What makes a second application impossible is validation *inside* the
commit, since Iceberg retries a commit on newer metadata by itself: the row delta validates from the snapshot whose
position was read, so any data or delete file that came after refuses it, and only then is the position read again.
"""

import json
import logging
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from py4j.java_gateway import JavaObject

from sink.errors import FencedError, RolledBackError, RowdeltaError, TableError, TemporaryError
from sink.iceberg import IcebergTable, table_error
from sink.java_errors import JAVA_ERRORS, java_class, java_exception, java_message
from sink.keyindex import IndexCommit
from sink.sources.source import Position
from sink.table_state import StoredPosition

log = logging.getLogger("rowdelta")

_LOOKS = 5
"""At the table, to find out whether a commit happened."""
_MOST_DOUBLINGS = 30
"""Of a pause: more than any limit needs, and few enough that the pause remains a number."""
_CLEANABLE = "org.apache.iceberg.exceptions.CleanableFailure"


class TableNoLongerEmptyError(Exception):
    """The files were written for an empty table, without deletes, and somebody else has added rows since."""


class TableChangedError(Exception):
    """The rows to delete were looked up in a snapshot that is no longer the current one, or the files are for a schema,
    partitions or a format version that the table has left.
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
    :param written_under_version: Iceberg's format version likewise: deletes are files of another kind in each.
    :param conflicts_with: a column and its value: only files that may have such rows are in this commit's way. By
        default all files are.
    """

    prefix: str
    operation: str
    position: Position
    files: Sequence[str]
    base_snapshot: int | None
    previous_operation: str | None
    written_under_schema: int | None = None
    written_under_spec: int | None = None
    written_under_version: int | None = None
    conflicts_with: tuple[str, str] | None = None
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


@dataclass(frozen=True)
class _Staged:
    """A transaction that is ready to be sent.

    :param base: the snapshot from which conflicts are looked for.
    :param snapshot: id of the transaction's snapshot. It is the same in each of Iceberg's own attempts.
    :param sequence_number: of the snapshot, unless Iceberg has to try again.
    :param name: of the property that the transaction sets to `value`, and that is `before` until then.
    """

    transaction: JavaObject
    base: int | None
    snapshot: int
    sequence_number: int
    name: str
    value: str
    before: str | None


class Retries:
    """How often a micro-batch may be committed again, over all reasons for which it was refused. The table's
    `commit.retry.*` settings say it, and how long to wait before.

    :param number: of retries.
    :param shortest: seconds to wait before the first.
    :param longest: seconds to wait before any.
    """

    def __init__(self, table: str, number: int, shortest: float, longest: float) -> None:
        self._table = table
        self._number = number
        self._shortest = shortest
        self._longest = longest
        self._done = 0
        self._last: Exception | None = None

    def wait(self, refusal: Exception) -> None:
        """To be called before another attempt. The same refusal counts once, whoever comes to know of it.

        :raises TemporaryError: there have been enough.
        """
        if refusal is self._last:
            return
        self._last = refusal
        if self._done >= self._number:
            reason = java_message(refusal) if isinstance(refusal, JAVA_ERRORS) else refusal
            raise TemporaryError(
                f"{self._table}: other writers kept committing in between, and the table's commit.retry settings are "
                "used up. Nothing was applied; run again, or raise commit.retry.num-retries. Last conflict: "
                f"{reason}"
            )
        time.sleep(doubled(self._shortest, self._done, self._longest) * random.uniform(0.9, 1.1))
        self._done += 1


def doubled(pause: float, times: int, longest: float) -> float:
    """A pause that is twice as long after each failure, up to the longest."""
    return min(longest, pause * 2.0 ** min(times, _MOST_DOUBLINGS))


class IcebergCommitter:
    """Commits row deltas and rewrites to one table."""

    def __init__(self, table: IcebergTable) -> None:
        self._table = table
        self._everything = table.iceberg.expressions.Expressions.alwaysTrue()
        # the last commit's deletion vectors, of which the next one replaces most: each costs two calls to the JVM
        self._vectors: dict[str, JavaObject] = {}

    def retries(self) -> Retries:
        """For one micro-batch."""
        properties = self._table.spec.properties_by_name
        return Retries(
            self._table.name,
            int(properties.get("commit.retry.num-retries", 4)),
            int(properties.get("commit.retry.min-wait-ms", 100)) / 1000,
            int(properties.get("commit.retry.max-wait-ms", 60_000)) / 1000,
        )

    def commit(self, request: RowDeltaCommit, retries: Retries) -> None:
        """Commit, or find out why not.

        :raises TableNoLongerEmptyError: write the batch again, with deletes.
        :raises TableChangedError: look its keys up and write it again.
        :raises TableError: another sink commits under the same id, or the table is gone.
        :raises TemporaryError: the outcome is unknown or `retries` are used up. Files must be kept after an unknown
            outcome; it is a `CommitUnknownError` then.
        """
        base = request.base_snapshot
        while True:
            try:
                staged = self._stage(request, base)
                refusal = self._settled(staged)
            except JAVA_ERRORS as error:  # while it was staged: nothing was sent
                refusal = error
            if refusal is None:
                self._table.look()
                committed = self._table.snapshot(staged.snapshot)
                if committed is not None and committed.sequence_number != staged.sequence_number:
                    self.note_sequence_number(request.prefix)
                return
            retryable = java_class(refusal) in ("ValidationException", "CommitFailedException")
            if not retryable and not _base_is_gone(refusal):
                # an upgrade that came after staging: Iceberg's own retry refuses the delete files of the version before
                self._check_layout(request)
                raise table_error(self._table.name, refusal) from None
            self._table.refresh()
            self.own_position(request.prefix, request.previous_operation)
            if request.written_for_empty_table and not self._table.is_empty():
                raise TableNoLongerEmptyError
            if request.index is not None and self._table.snapshot_id() != request.base_snapshot:
                raise TableChangedError(java_message(refusal))
            base = self._table.snapshot_id()
            retries.wait(refusal)

    def _check_layout(self, request: RowDeltaCommit) -> None:
        """:raises TableChangedError: the files are for another schema, spec or format version than the table has."""
        schema, spec, version = self._table.layout
        if request.written_under_spec not in (None, spec):
            # a delete in a partition of the one doesn't reach the rows that others moved to partitions of the other
            raise TableChangedError("the table was partitioned in another way")
        if request.written_under_schema not in (None, schema):
            raise TableChangedError("the table has other columns")
        if request.written_under_version not in (None, version):
            raise TableChangedError("the table has another format version")

    def _stage(self, request: RowDeltaCommit, base: int | None) -> _Staged:
        table = self._table
        name = f"{request.prefix}.position"
        stored: dict[str, Any] = {"position": request.position, "operation": request.operation}
        if request.index is not None:
            stored["index"] = request.index.stored
        transaction = table.java.newTransaction()  # of metadata that it reads anew
        table.look()
        self._check_layout(request)
        before = table.property(name)
        delta = transaction.newRowDelta()
        for key, value in request.summary.items():
            delta = delta.set(key, value)
        delta = delta.set(name, json.dumps(stored))
        for file in request.files:
            content = table.content_file(file)
            delta = delta.addRows(content) if json.loads(file)["content"] == "DATA" else delta.addDeletes(content)
        if request.index is not None:
            earlier, self._vectors = self._vectors, {}
            for file in request.index.files:
                self._vectors[file] = table.content_file(file)
                delta = delta.addDeletes(self._vectors[file])
            for file in request.index.removed:
                delta = delta.removeDeletes(earlier.get(file) or table.content_file(file))
            if request.index.referenced:
                # also compactions remove the files that hold the rows to delete
                referenced = table.java_list(request.index.referenced)
                delta = delta.validateDataFilesExist(referenced).validateDeletedFiles()
        if base is not None:
            delta = delta.validateFromSnapshot(base)
        if request.conflicts_with is None:
            conflicts = self._everything
        else:
            conflicts = table.iceberg.expressions.Expressions.equal(*request.conflicts_with)
        delta = delta.conflictDetectionFilter(conflicts)
        delta.validateNoConflictingDataFiles().validateNoConflictingDeleteFiles().commit()
        snapshot = table.snapshot_of(transaction.table().currentSnapshot())
        number, sequence_number = snapshot.snapshot_id, snapshot.sequence_number
        stored |= {"snapshot-id": number, "sequence-number": sequence_number}
        text = json.dumps(stored)
        update = transaction.updateProperties().set(name, text)
        for key, value in request.properties.items():
            update = update.set(key, value)
        update.commit()
        return _Staged(transaction, base, number, sequence_number, name, text, before)

    def _send(self, staged: _Staged) -> None:
        staged.transaction.commitTransaction()

    def _settled(self, staged: _Staged) -> Exception | None:
        """Send it. Returns why it was refused, if it is certain that it isn't committed.

        A refusal alone doesn't make it certain: a request whose answer was lost is sent again, and then it is our own
        commit that is in the way.

        :raises CommitUnknownError: neither the catalog nor the table can say.
        """
        try:
            self._send(staged)
        except JAVA_ERRORS as error:
            is_refusal = self._is_refusal(error)
            for attempt in range(_LOOKS):
                if attempt or not is_refusal:
                    time.sleep(0.2 * 2**attempt)
                try:
                    is_committed = self._is_committed(staged)
                except RowdeltaError:  # whatever it is, it doesn't say that the commit failed
                    continue
                if is_committed:
                    return None
                if is_refusal:
                    return error
            raise CommitUnknownError(
                f"{self._table.name}: it is unknown whether the commit went through ({java_message(error)}). Its files "
                "are kept. Run again: the table's position decides."
            ) from None
        return None

    def _is_committed(self, staged: _Staged) -> bool:
        """Whether the table has it, now.

        :raises RowdeltaError: it can't be read, or what could say so has expired.
        """
        self._table.refresh()
        stored = self._table.property(staged.name)
        if stored == staged.value or self._table.java.snapshot(staged.snapshot) is not None:
            return True
        if stored == staged.before:
            return False  # the property would have changed with it
        # somebody else has stored something since, perhaps on top of it
        number = self._table.snapshot_id()
        while number is not None and number != staged.base:
            snapshot = self._table.java.snapshot(number)
            if snapshot is None:
                raise TemporaryError(f"{self._table.name}: snapshot {number} has expired")
            parent = snapshot.parentId()
            number = None if parent is None else int(parent)
        return False

    def note_sequence_number(self, prefix: str) -> None:
        """Store the sequence number of the snapshot that has the sink's position, if it isn't what the position says:
        Iceberg gives the snapshot another one when it tries again by itself. `IcebergTable.position` needs it.

        The position itself isn't written again, since another run may have stored a newer one.
        """
        text = self._table.property(f"{prefix}.position")
        stored = json.loads(text) if text is not None else {}
        committed = self._table.snapshot(stored.get("snapshot-id"))
        if committed is None or committed.sequence_number == stored.get("sequence-number"):
            return
        noted = json.dumps({"operation": stored["operation"], "sequence-number": committed.sequence_number})
        if self._table.property(f"{prefix}.sequence-number") == noted:
            return
        try:
            self._table.set_property(f"{prefix}.sequence-number", noted)
        except JAVA_ERRORS as error:  # the next start tries again; only a rollback before that would need it
            log.info("%s: the sequence number could not be stored: %s", self._table.name, java_message(error))

    def rewrite(self, request: RewriteCommit) -> None:
        """Commit at once or not at all: what is rewritten loses nothing by waiting.

        :raises TableChangedError: rows of the replaced files were deleted meanwhile, or files are gone.
        :raises CommitUnknownError: as `commit`.
        """
        try:
            staged = self._stage_rewrite(request)
        except JAVA_ERRORS as error:  # whatever it is: nothing was sent
            raise TableChangedError(java_message(error)) from None
        refusal = self._settled(staged)
        if refusal is not None:
            raise TableChangedError(java_message(refusal))

    def _stage_rewrite(self, request: RewriteCommit) -> _Staged:
        table, name = self._table, f"{request.prefix}.index"
        transaction = table.java.newTransaction()
        table.look()
        if table.layout != request.written_for:
            raise TableChangedError("the table was altered")
        before = table.property(name)
        rewrite = transaction.newRewrite()
        for key, value in request.summary.items():
            rewrite = rewrite.set(key, value)
        for replaced in request.replaced:
            rewrite = rewrite.deleteFile(replaced)
        for file in request.index.removed:
            # Iceberg (1.11) overlooks some vectors of data files that are removed
            rewrite = rewrite.deleteFile(table.content_file(file))
        for file in request.files:
            rewrite = rewrite.addFile(table.content_file(file))
        rewrite.validateFromSnapshot(request.index.base).commit()
        snapshot = table.snapshot_of(transaction.table().currentSnapshot())
        number = snapshot.snapshot_id
        text = json.dumps(
            {"operation": request.position_operation, "index": request.index.stored, "snapshot-id": number}
        )
        transaction.updateProperties().set(name, text).commit()
        return _Staged(transaction, request.index.base, number, snapshot.sequence_number, name, text, before)

    def own_position(self, prefix: str, operation: str | None) -> StoredPosition | None:
        """The position that `operation` stored, as it is now; None if there is none and `operation` is None.

        :raises RolledBackError: the table was rolled back since, so an earlier operation's counts.
        :raises FencedError: another operation has stored one: somebody else commits as this sink.
        :raises TableError: there is none any more.
        """
        stored = self._table.position(prefix)
        if (stored.operation if stored else None) == operation:
            return stored
        if stored is None:
            raise TableError(f"{self._table.name}: the sink's position was removed while it ran. Start it again.")
        newest = json.loads(self._table.property(f"{prefix}.position") or "{}")
        if newest.get("operation") == operation:
            raise RolledBackError(
                f"{self._table.name} was rolled back to an earlier snapshot while the sink ran. What followed is read "
                "again from that snapshot's position."
            )
        raise FencedError(
            f"{self._table.name}: another run with the same sink id ({prefix.removeprefix('rowdelta.')}) committed "
            "while this one was working. This one stops; nothing was applied twice. If both are meant to run, give "
            "one its own sink.id."
        )

    def _is_refusal(self, error: Exception) -> bool:
        """Whether the catalog says that nothing was committed. Iceberg itself cleans up after `CleanableFailure` only
        (`SnapshotProducer`, strict cleanup): a connection that breaks, for one, may break behind the commit.
        """
        if java_class(error) == "CommitStateUnknownException":
            return False
        loader = self._table.java.getClass().getClassLoader()
        cleanable = self._table.jvm.java.lang.Class.forName(_CLEANABLE, True, loader)
        return bool(cleanable.isInstance(java_exception(error))) or java_class(error) == "IllegalArgumentException"


class CommitUnknownError(TemporaryError):
    """Neither success nor failure: files of the attempt must not be deleted."""


def _base_is_gone(error: Exception) -> bool:
    """The base snapshot was expired or rolled back; validation can't start from it, so start from the current one."""
    message = java_message(error)
    return "is not an ancestor" in message or "Cannot determine history" in message
