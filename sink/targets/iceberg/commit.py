"""Commits one row delta for each micro-batch, with the source position in the same atomic commit.

The position is a table property. The transaction that adds the files sets it, and it survives snapshot expiry. The
snapshot's summary has it too, for rollbacks. Validation *inside* the commit makes sure that a micro-batch isn't applied
twice, because Iceberg itself retries a commit on newer metadata. The row delta validates from the snapshot whose
position was read. So Iceberg refuses it if any data or delete file was added since, and only then the position is read
again.
"""

import json
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
from py4j.java_gateway import JavaObject

from deltawriters.content import FileContent
from deltawriters.scratch import Scratch
from sink.errors import RowdeltaError, TableError, TemporaryError
from sink.spark.java_errors import JAVA_ERRORS, java_class, java_exception, java_message
from sink.targets.iceberg.errors import NOT_AUTHORIZED, table_error
from sink.targets.iceberg.java_table import JavaTable
from sink.targets.iceberg.snapshots import Snapshot
from sink.targets.iceberg.state import Layout
from sink.targets.own_position import check_idle, others_positions, own_position
from sink.targets.retries import Retries
from sink.targets.values import OF_POSITION, ChangeSet, Done, Outcome, Refused, Rewrite, Unknown

log = logging.getLogger("rowdelta")

_LOOKS = 5
"""The sink looks at the table this many times to find out whether a commit happened."""
_CLEANABLE = "org.apache.iceberg.exceptions.CleanableFailure"


@dataclass(frozen=True)
class _Staged:
    """A transaction that is ready to be sent.

    :param transaction: Iceberg's transaction.
    :param base: the snapshot after which conflicts are searched for.
    :param snapshot: id of the transaction's snapshot. It is the same in all of Iceberg's own attempts.
    :param sequence_number: sequence number of the snapshot. It changes if Iceberg has to try again.
    :param name: name of the property that the transaction sets.
    :param value: the property's new value. None if it is removed.
    :param before: the property's value before the transaction.
    """

    transaction: JavaObject
    base: int | None
    snapshot: int
    sequence_number: int
    name: str
    value: str | None
    before: str | None


class IcebergCommitter:
    """Commits row deltas and rewrites to one table."""

    def __init__(self, table: JavaTable) -> None:
        self._table = table
        self._everything = table.iceberg.expressions.Expressions.alwaysTrue()
        # The last commit's deletion vectors. The next commit replaces most of them, and to make one again would take
        # two calls to the JVM.
        self._vectors: dict[str, JavaObject] = {}
        self._login_refused = False
        self._may_write_itself: bool | None = None
        """Whether this Iceberg lets a commit choose who writes manifests, as 1.12 does. None: not asked yet."""

    def retries(self) -> Retries:
        properties = self._table.spec.properties_by_name
        return Retries(
            self._table.name,
            int(properties.get("commit.retry.num-retries", 4)),
            int(properties.get("commit.retry.min-wait-ms", 100)) / 1000,
            int(properties.get("commit.retry.max-wait-ms", 60_000)) / 1000,
            ", or raise the table property commit.retry.num-retries",
        )

    def commit(self, request: ChangeSet) -> Outcome:
        """See `Table.commit`."""
        try:
            staged = self._stage(request)
        except JAVA_ERRORS as error:  # nothing was sent
            refusal: Exception = error
        else:
            if isinstance(staged, Refused):
                return staged
            settled = self._settle(staged)
            if settled is None:
                self._login_refused = False
                return self._see_committed(request, staged)
            if isinstance(settled, Unknown):
                return settled
            refusal = settled
        if java_class(refusal) == NOT_AUTHORIZED and not self._login_refused:
            self._login_refused = True
            # before the next attempt the table is refreshed, which logs in again
            return Refused(java_message(refusal), again="send")
        if not _is_conflict(refusal):
            # after an upgrade since staging, Iceberg's own retry refuses the delete files of the old format version
            other = self._other_layout(request)
            if other is not None:
                return other
            if java_class(refusal) == "NotFoundException":
                self._table.refresh()  # if the table is gone, this says so
                raise TemporaryError(
                    f"{self._table.name}: its store has no file that the table's metadata names "
                    f"({java_message(refusal)}). Nothing was applied; run again. If the file stays away, somebody has "
                    "removed it: restore it, or roll the table back."
                )
            raise table_error(self._table.name, refusal) from None
        return Refused(java_message(refusal), again="send")

    def _other_layout(self, request: ChangeSet) -> Refused | None:
        """A refusal if the files are for another schema, spec or format version than the table has."""
        layout, wanted = self._table.layout, request.written_for
        if not isinstance(wanted, Layout):
            return None
        if wanted.spec_id != layout.spec_id:
            # deletes are for partitions of the old spec, and don't apply to rows that others moved to the new one
            return Refused("the table was partitioned in another way")
        if wanted.schema_id != layout.schema_id:
            return Refused("the table has other columns")
        if wanted.format_version != layout.format_version:
            return Refused("the table has another format version")
        return None

    def _see_committed(self, request: ChangeSet, staged: _Staged) -> Done | Unknown:
        """Take the table as the commit has left it. `Unknown` if the catalog doesn't answer any more."""
        try:
            self._table.look()
            committed = self._table.snapshot(staged.snapshot)
            if committed is not None:
                self._table.took(committed)
        except JAVA_ERRORS as error:
            return Unknown(
                f"{self._table.name}: the commit went through, but the table could not be read after it "
                f"({java_message(error)}). Run again: the table's position decides."
            )
        if committed is not None and committed.sequence_number != staged.sequence_number:
            self.settle(request.prefix)
        return Done()

    def _stage(self, request: ChangeSet) -> _Staged | Refused:
        table = self._table
        name = f"{request.prefix}.position"
        stored: dict[str, Any] = {"position": request.position, "operation": request.operation}
        if request.amends:
            stored["amends"] = request.amends
        if request.index is not None:
            stored["index"] = request.index.stored
        transaction = table.java.newTransaction()  # of metadata that it reads anew
        table.look()
        refused = self._other_layout(request) or self._out_of_reach(request) or self._others_went_on(request)
        if refused is not None:
            return refused
        # a table that was replaced meanwhile may have no snapshot, and then Iceberg validates nothing
        in_doubt = request.newest_if_in_doubt
        own_position(table, request.prefix, request.previous_operation, newest_if_in_doubt=in_doubt)
        before = table.property(name)
        properties = table.taken_back(request.prefix) | dict(request.properties)
        known = {part: f"{request.prefix}.{part}" for part in OF_POSITION}
        state = {part: properties.get(key, table.property(key)) for part, key in known.items()}
        is_overwrite = request.index is not None and request.index.replaced
        changes = self._overwrite(transaction, request) if is_overwrite else self._row_delta(transaction, request)
        for key, value in request.summary.items():
            changes = changes.set(key, value)
        changes = changes.set(name, json.dumps(stored | {"state": state}))
        if request.base_snapshot is not None:
            changes = changes.validateFromSnapshot(request.base_snapshot)
        snapshot = self._added(transaction, changes)
        number, sequence_number = snapshot.snapshot_id, snapshot.sequence_number
        stored |= {"snapshot-id": number, "sequence-number": sequence_number}
        text = json.dumps(stored)
        update = transaction.updateProperties().set(name, text)
        for key, value in properties.items():
            update = update.set(key, value)
        update.commit()
        return _Staged(transaction, request.base_snapshot, number, sequence_number, name, text, before)

    def _out_of_reach(self, request: ChangeSet) -> Refused | None:
        """Under a partitioned spec, an equality delete applies to data files of the same spec only (spec, "Scan
        Planning"). Others may write under older ones, also in commits that Iceberg takes for no conflict.

        :return: a refusal if equality deletes of the request don't apply to rows that others have written.
        """
        own = (json.loads(file) for file in request.files)
        specs = {file["spec-id"] for file in own if file["content"] == FileContent.EQUALITY_DELETES.value}
        if specs - {self._table.spec.unpartitioned_spec_id} and self._table.has_other_specs():
            return Refused("there are rows of another partition spec, which equality deletes don't reach")
        return None

    def _others_went_on(self, request: ChangeSet) -> Refused | None:
        """A refusal if other sinks have committed where that matters. To Iceberg, a commit without files is no
        conflict. What others commit after this look, and before the transaction's own, isn't noticed.
        """
        if request.others is None or others_positions(self._table, request.prefix) == request.others:
            return None
        return Refused("another sink has committed, and may have deleted keys")

    def _row_delta(self, transaction: JavaObject, request: ChangeSet) -> JavaObject:
        """New files, and deletes of earlier rows."""
        table = self._table
        delta = transaction.newRowDelta()
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
                # the commit must also be refused if a compaction removed a file with rows to delete
                referenced = table.java_list(request.index.referenced)
                delta = delta.validateDataFilesExist(referenced).validateDeletedFiles()
        if request.truncates:
            # others' compactions aren't in conflict, so the commit is refused if one of these files is gone
            table.remove_all(transaction.table().currentSnapshot(), delta.validateDeletedFiles())
        if request.conflicts_with is None:
            conflicts = self._everything
        else:
            conflicts = table.iceberg.expressions.Expressions.equal(*request.conflicts_with)
        delta = delta.conflictDetectionFilter(conflicts)
        return delta.validateNoConflictingDataFiles().validateNoConflictingDeleteFiles()

    def _overwrite(self, transaction: JavaObject, request: ChangeSet) -> JavaObject:
        """New files, and others in the place of those from which rows are deleted. It is refused if one of these is
        gone, or if rows of it were deleted.
        """
        table, index = self._table, request.index
        assert index is not None
        overwrite = transaction.newOverwrite()
        for file in (*request.files, *index.files):
            overwrite = overwrite.addFile(table.content_file(file))
        sets = table.iceberg.util
        # Iceberg (1.11) forgets to remove some vectors of removed data files
        deletes = table.objects(table.content_file(file) for file in index.removed)
        overwrite = overwrite.deleteFiles(
            sets.DataFileSet.of(table.objects(index.replaced)), sets.DeleteFileSet.of(deletes)
        )
        overwrite = overwrite.conflictDetectionFilter(self._everything)
        return overwrite.validateNoConflictingData().validateNoConflictingDeletes()

    def _added(self, transaction: JavaObject, change: JavaObject) -> Snapshot:
        """Add a change to the transaction.

        :return: its snapshot.
        """
        if self._table.waits_for_no_pool:
            change = change.scanManifestsWith(self._table.same_thread)
        if self._may_write_itself is None:
            self._may_write_itself = "writeManifestsWith" in dir(change)
        if self._may_write_itself:  # anywhere: the pool shares writing out only from 15,000 files on
            change = change.writeManifestsWith(self._table.same_thread, 1)
        change.commit()
        return self._table.snapshot_of(transaction.table().currentSnapshot())

    def _send(self, staged: _Staged) -> None:
        staged.transaction.commitTransaction()

    def _settle(self, staged: _Staged) -> Exception | Unknown | None:
        """Send the transaction. Returns the error if it is certain that nothing was committed, and None if it was.

        A refusal alone isn't certain: if the answer to a request was lost, the client sends the request again, and then
        our own first commit is the reason for the refusal.
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
                except (RowdeltaError, *JAVA_ERRORS):  # no such error means that the commit failed
                    continue
                if is_committed:
                    return None
                if is_refusal:
                    return error
            # without Iceberg's own advice, which follows: with a position in the table nothing is applied twice
            reason = java_message(error).partition("\n")[0]
            return Unknown(
                f"{self._table.name}: it is unknown whether the commit went through ({reason}). Its files are kept. "
                "Run again: the table's position decides."
            )
        return None

    def _is_committed(self, staged: _Staged) -> bool:
        """Whether the table has the transaction now.

        :raises RowdeltaError: the table can't be read, or snapshots that could tell have expired.
        """
        self._table.refresh()
        stored = self._table.property(staged.name)
        if stored == staged.value or self._table.java.snapshot(staged.snapshot) is not None:
            return True
        if stored == staged.before:
            return False  # the transaction would have changed the property
        # somebody else has stored another value since, perhaps on top of our commit
        number = self._table.snapshot_id()
        while number is not None and number != staged.base:
            snapshot = self._table.java.snapshot(number)
            if snapshot is None:
                raise TemporaryError(f"{self._table.name}: snapshot {number} has expired")
            parent = snapshot.parentId()
            number = None if parent is None else int(parent)
        return False

    def settle(self, prefix: str) -> None:
        """Store the sequence number of the snapshot that has the sink's position, if the position has another one. When
        Iceberg itself tries again, it gives the snapshot another number. `JavaTable.position` needs the right one.

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
        except (TableError, TemporaryError) as error:  # the next start tries again; only a rollback until then needs it
            log.info("the sequence number could not be stored: %s", error)

    def rewrite(self, request: Rewrite) -> Outcome:
        """See `Table.commit`. It is refused if rows of the replaced files were deleted meanwhile, or files are gone.
        Nothing is lost if a rewrite has to wait for the next time.
        """
        try:
            staged = self._stage_rewrite(request)
        except JAVA_ERRORS as error:  # nothing was sent
            settled: Exception | Unknown | None = error
        else:
            if isinstance(staged, Refused):
                return staged
            settled = self._settle(staged)
        if settled is None or isinstance(settled, Unknown):
            return settled or Done()
        return Refused(java_message(settled), again="send" if _is_conflict(settled) else "write")

    def reset(self, prefix: str, state: Mapping[str, str], kept: Collection[str], *, empty: bool) -> Outcome:
        """See `Table.reset`. Iceberg would apply a transaction that was begun before to the table without its position,
        since a change of properties conflicts with nothing. So this adds a data file without rows and removes it: a
        commit that is validated from an earlier snapshot is in conflict with it (`validateNoConflictingDataFiles`).
        """
        table = self._table
        scratch = Scratch(table.name, lambda _: table.spec.io)
        try:
            staged = self._stage_reset(prefix, state, kept, empty=empty, scratch=scratch)
            settled = self._settle(staged)
        except JAVA_ERRORS as error:  # nothing was sent
            settled = error
        if isinstance(settled, Unknown):
            return settled
        if settled is None:
            table.look()
            return Done()
        scratch.delete()
        if java_class(settled) in ("ValidationException", "CommitFailedException"):
            return Refused(java_message(settled), again="send")
        raise table_error(table.name, settled) from None

    def _stage_reset(
        self, prefix: str, state: Mapping[str, str], kept: Collection[str], *, empty: bool, scratch: Scratch
    ) -> _Staged:
        table = self._table
        transaction = table.java.newTransaction()
        table.look()
        check_idle(table, prefix, state)
        base = table.snapshot_id()
        if base is not None:
            mark = self._file_without_rows(scratch)
            fence = transaction.newRowDelta().addRows(mark).validateFromSnapshot(base)
            fence = fence.conflictDetectionFilter(self._everything)
            fence.validateNoConflictingDataFiles().validateNoConflictingDeleteFiles().commit()
            removal = transaction.newRowDelta()
            if empty:
                table.remove_all(transaction.table().currentSnapshot(), removal)
            else:
                removal.removeRows(mark)
            removal.commit()
        forgotten = sorted(state.keys() - set(kept), key=lambda part: part != "position")
        update = transaction.updateProperties()
        for part in forgotten:
            update.remove(f"{prefix}.{part}")
        update.commit()
        last = transaction.table().currentSnapshot()
        number = -1 if last is None else table.snapshot_of(last).snapshot_id
        if not forgotten:  # the snapshot alone tells whether it is committed
            return _Staged(transaction, base, number, 0, f"{prefix}.position", "", None)
        return _Staged(transaction, base, number, 0, f"{prefix}.{forgotten[0]}", None, state[forgotten[0]])

    def _file_without_rows(self, scratch: Scratch) -> JavaObject:
        """:param scratch: gets it."""
        table, spec = self._table, self._table.spec
        content = pa.BufferOutputStream()
        pq.write_table(spec.arrow_schema.empty_table(), content)
        found = content.getvalue()
        path = spec.locations.new_data_location(f"reset-{uuid4()}.parquet")
        scratch.add(path)
        with spec.io.new_output(path).create() as stream:
            stream.write(found)
        builder = table.iceberg.DataFiles.builder(table.java.spec()).withPath(path).withFormat("PARQUET")
        return builder.withFileSizeInBytes(found.size).withRecordCount(0).build()

    def _stage_rewrite(self, request: Rewrite) -> _Staged | Refused:
        table, name = self._table, f"{request.prefix}.index"
        transaction = table.java.newTransaction()
        table.look()
        if table.layout != request.written_for:
            return Refused("the table was altered")
        before = table.property(name)
        # Iceberg (1.11) forgets to remove some vectors of removed data files
        removed = [*request.replaced, *map(table.content_file, request.index.removed)]
        added = [*map(table.content_file, request.files), *map(table.content_file, request.index.files)]
        if not request.files or (request.index.files and all(_is_data(file) for file in removed)):
            change = self._by_row_delta(transaction, removed, added, request.index.referenced)
        else:
            change = transaction.newRewrite()
            for file in removed:
                change = change.deleteFile(file)
            for file in added:
                change = change.addFile(file)
        for key, value in request.summary.items():
            change = change.set(key, value)
        snapshot = self._added(transaction, change.validateFromSnapshot(request.index.base))
        number = snapshot.snapshot_id
        text = json.dumps(
            {"operation": request.position_operation, "index": request.index.stored or None, "snapshot-id": number}
        )
        update = transaction.updateProperties().set(name, text)
        for key, value in request.properties.items():
            update = update.set(key, value)
        update.commit()
        return _Staged(transaction, request.index.base, number, snapshot.sequence_number, name, text, before)

    def _by_row_delta(
        self,
        transaction: JavaObject,
        removed: Sequence[JavaObject],
        added: Sequence[JavaObject],
        referenced: Sequence[str],
    ) -> JavaObject:
        """A row delta that moves rows, or says deletes in another way. A `RewriteFiles` refuses to add deletes where it
        replaces none (`BaseRewriteFiles.validateReplacedAndAddedFiles`), as in v2. Where it replaces no data file, it
        doesn't look at what others did to the data files since the base: a compaction, another vector, a rollback.

        :param referenced: data files that must still be there.
        """
        delta = transaction.newRowDelta()
        for file in removed:
            delta = delta.removeRows(file) if _is_data(file) else delta.removeDeletes(file)
        for file in added:
            delta = delta.addRows(file) if _is_data(file) else delta.addDeletes(file)
        if referenced:
            delta = delta.validateDataFilesExist(self._table.java_list(referenced))
        delta = delta.conflictDetectionFilter(self._everything).validateDeletedFiles()
        return delta.validateNoConflictingDataFiles().validateNoConflictingDeleteFiles()

    def _is_refusal(self, error: Exception) -> bool:
        """Whether the catalog says that nothing was committed. Iceberg itself cleans up only after `CleanableFailure`
        (`SnapshotProducer`, strict cleanup). A connection, for example, may break after the commit.
        """
        if java_class(error) == "CommitStateUnknownException":
            return False
        loader = self._table.java.getClass().getClassLoader()
        cleanable = self._table.jvm.java.lang.Class.forName(_CLEANABLE, True, loader)
        return bool(cleanable.isInstance(java_exception(error))) or java_class(error) == "IllegalArgumentException"


def _is_data(file: JavaObject) -> bool:
    return str(file.content()) == "DATA"


def _is_conflict(error: Exception) -> bool:
    """Whether others have committed since the base, or at the same moment."""
    return java_class(error) in ("ValidationException", "CommitFailedException") or _base_is_gone(error)


def _base_is_gone(error: Exception) -> bool:
    """Whether the base snapshot has expired or was rolled back. Validation can't start from it then, so it must start
    from the current one.
    """
    message = java_message(error)
    return "is not an ancestor" in message or "Cannot determine history" in message
