"""What maintenance needs of an Iceberg table. What nobody needs any more is removed by Iceberg's own procedures in
Spark.
"""

import logging
import re
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from itertools import islice

from py4j.java_gateway import JavaObject
from pyspark.sql import DataFrame

from changelog.amounts import amount
from sink.errors import TableError, TemporaryError
from sink.spark.expressions import quoted
from sink.spark.java_errors import JAVA_ERRORS, java_class, java_message
from sink.targets.iceberg.compaction import compact_files
from sink.targets.iceberg.dangling import dangling_deletes
from sink.targets.iceberg.java_table import JavaTable, quoted_name
from sink.targets.iceberg.rewritables import equality_deleted, handles, merge_deletes, rewritables
from sink.targets.iceberg.small_files import SmallFiles
from sink.targets.locations import in_one_form, in_pattern
from sink.targets.notes import REWRITE
from sink.targets.own_state import orphans_reach
from sink.targets.scan_costs import V2, V3, ScanCosts
from sink.targets.seam import Upkeep
from sink.targets.upkeep_values import (
    Compacted,
    CompactionLimits,
    EqualityDeleted,
    MergeCandidates,
    MergedDeletes,
    Rewritable,
    UpkeepFacts,
)

log = logging.getLogger("rowdelta")

_TOTALS = (
    "total-data-files", "total-files-size", "total-records", "total-position-deletes", "total-equality-deletes",
)  # fmt: skip
"""Of a snapshot's summary (Iceberg spec, Appendix F)."""
_DELETED_AT_ONCE = 10_000
_READERS = 16
_HEAD = 1024
_UUID = re.compile(rb'"table-uuid"\s*:\s*"([^"]+)"')
_GC = "gc.enabled"
_MAX_AGE, _MIN_SNAPSHOTS = "history.expire.max-snapshot-age-ms", "history.expire.min-snapshots-to-keep"
"""The table's own wishes. The larger of these and the configuration's count."""
_REMOVED = "rowdelta_removed"
"""A view with rows to remove."""


class IcebergUpkeep(Upkeep):
    """See `Upkeep`."""

    def __init__(self, table: JavaTable) -> None:
        self._table = table
        self._small_files = SmallFiles(table)

    def facts(self) -> UpkeepFacts | None:
        current = self._table.current_snapshot()
        if current is None or not set(_TOTALS) <= current.summary.keys():
            return None
        files, size, rows, deleted, equality = (int(current.summary[name]) for name in _TOTALS)
        known = sorted(self._table.snapshots(), key=lambda snapshot: snapshot.timestamp_ms)
        last = next((snapshot for snapshot in reversed(known) if REWRITE in snapshot.summary), None)
        return UpkeepFacts(
            data_files=files,
            size_in_bytes=size,
            rows=rows,
            count_deleted=lambda: deleted - self._dangling_positions(rows, deleted),
            equality_deletes=equality,
            snapshots=[snapshot.timestamp_ms for snapshot in known],
            rewritten_at=last.timestamp_ms if last else None,
            rewritten_files=int(last.summary[REWRITE]) if last else 0,
        )

    def _dangling_positions(self, rows: int, deleted: int) -> int:
        """How many deleted rows are in delete files that are known to apply to nothing."""
        if 2 * deleted <= rows:  # it isn't worth a look at each delete file
            return 0
        try:
            found = dangling_deletes(self._table)
        except TemporaryError as error:  # it only makes a figure better
            log.debug("%s", error)
            return 0
        return sum(int(file.recordCount()) for file in found if str(file.content()) != "EQUALITY_DELETES")

    def merge_candidates(self, prefix: str, is_enough: Callable[[int, int], bool]) -> MergeCandidates:
        return self._small_files.search(self._table.spec, prefix, is_enough)

    def look_at_last(self, prefix: str) -> None:
        self._small_files.look_at_last(self._table.spec, prefix)

    @property
    def scan_costs(self) -> ScanCosts:
        return V2 if self._table.spec.format_version < 3 else V3

    def rewritables(self) -> Iterator[list[Rewritable]]:
        return rewritables(self._table)

    def files_where(self, condition: str) -> frozenset[str]:
        return frozenset(self._table.scanned_paths(self._table.current_scans(self._table.condition(condition))))

    def handles(self, paths: Collection[str]) -> Sequence[JavaObject]:
        return handles(self._table, paths)

    def merge_deletes(
        self, paths: Collection[str], data_files: Collection[str], files: Sequence[str]
    ) -> MergedDeletes | None:
        return merge_deletes(self._table, paths, data_files, files)

    def equality_deletes(self) -> EqualityDeleted | None:
        last = self._table.current_snapshot()
        has_any = last is not None and last.summary.get("total-equality-deletes", "0") != "0"
        return equality_deleted(self._table) if has_any else None

    def dangling_deletes(self) -> Sequence[JavaObject]:
        return dangling_deletes(self._table)

    def compact(self, limits: CompactionLimits, *, dry_run: bool = False) -> tuple[Compacted, int] | None:
        return compact_files(self._table, limits, dry_run=dry_run)

    def remove_rows(self, rows: DataFrame, columns: Sequence[str]) -> Exception | None:
        same = " AND ".join(f"kept.{quoted(name)} <=> removed.{quoted(name)}" for name in columns)
        rows.createOrReplaceTempView(_REMOVED)
        try:
            self._table.spark.sql(
                f"DELETE FROM {quoted_name(self._table.name)} AS kept "
                f"WHERE EXISTS (SELECT 1 FROM {_REMOVED} AS removed WHERE {same})"
            )
        except JAVA_ERRORS as error:
            if java_class(error) not in ("ValidationException", "CommitFailedException"):
                raise
            return error
        finally:
            self._table.spark.catalog.dropTempView(_REMOVED)
        return None

    def expire(self, older_than: timedelta, retain_last: int, keep: int | None) -> int:
        """See `Upkeep.expire`. Branches and tags keep what they need by rules of their own (`ExpireSnapshots`).

        Spark's procedure compares the files of what stays with those of what goes. `Table.expireSnapshots` alone would
        delete a Puffin file as soon as one of its vectors goes, though others are live (v3). The procedure tells the
        files, and they are deleted here: those outside of the table's own folders, such as those of `add_files`, are
        others'.
        """
        try:
            if not self.has_old_states(older_than, retain_last, keep):
                return 0
            before, retain_last = self._limits(older_than, retain_last, keep)
            action = self._actions().expireSnapshots(self._table.java).expireOlderThan(before).retainLast(retain_last)
            files = DataFrame(action.expireFiles().toDF(), self._table.spark).select("path").toLocalIterator()
            deleted, others = self._deleted(path for (path,) in files)
        except JAVA_ERRORS as error:
            raise TemporaryError(f"{self._table.name}: old snapshots not removed: {java_message(error)}") from None
        stay = f"; {amount(others, 'file')} outside of the table's folder left" if others else ""
        log.info("%s: old snapshots removed, with %s%s", self._table.name, amount(deleted, "file"), stay)
        return deleted

    def _deleted(self, paths: Iterator[str]) -> tuple[int, int]:
        """Delete files that only old snapshots had.

        :return: how many were deleted, and how many stay since they aren't in the table's own folders.
        """
        deleted, kept = 0, 0
        while part := list(islice(paths, _DELETED_AT_ONCE)):
            own = [path for path in part if self._table.spec.is_own_file(path)]
            # an object store deletes many files by one request
            delete_files = self._table.iceberg.CatalogUtil.deleteFiles
            delete_files(self._table.java.io(), self._table.java_list(own), "expired", True)
            deleted, kept = deleted + len(own), kept + len(part) - len(own)
        return deleted, kept

    def has_old_states(self, older_than: timedelta, retain_last: int, keep: int | None) -> bool:
        """See `Upkeep.has_old_states`. Spark's procedure takes seconds to find out."""
        before, retain_last = self._limits(older_than, retain_last, keep)
        snapshots = self._table.as_list(self._table.java.snapshots())  # the oldest first
        if before < 0 or int(snapshots.size()) <= retain_last:
            return False
        named = {int(reference.snapshotId()) for reference in self._table.elements(self._table.java.refs().values())}
        for number in range(int(snapshots.size())):
            snapshot = snapshots.get(number)
            if int(snapshot.timestampMillis()) >= before:
                return False
            if int(snapshot.snapshotId()) not in named:
                return True
        return False

    def _limits(self, older_than: timedelta, retain_last: int, keep: int | None) -> tuple[int, int]:
        """Snapshots before a time (-1 if none may go) are removed, except so many of the newest."""
        age = max(int(older_than.total_seconds() * 1000), int(self._table.property(_MAX_AGE) or 0))
        retain_last = max(retain_last, int(self._table.property(_MIN_SNAPSHOTS) or 1))
        kept, current = self._table.snapshot(keep), self._table.snapshot_id()
        is_kept = kept is not None and current is not None and self._table.is_ancestor(kept.snapshot_id, current)
        if kept is None or not is_kept or self._keeps_all():
            return -1, retain_last  # nothing tells what came after it
        before = int(time.time() * 1000) - age
        snapshots = self._table.as_list(self._table.java.snapshots())
        # Each commit is last in the list, but its time may be up to a minute before that of its parent, by another
        # clock. Iceberg removes all that comes before the first snapshot that is too old.
        for number in reversed(range(int(snapshots.size()))):
            snapshot = snapshots.get(number)
            before = min(before, int(snapshot.timestampMillis()))
            if int(snapshot.snapshotId()) == kept.snapshot_id:
                break
        return before, retain_last

    def remove_orphans(self, older_than: timedelta, *, dry_run: bool = False) -> list[str]:
        """See `Upkeep.remove_orphans`. Only in the folders in which Iceberg writes by default: another table may be
        inside the table's folder, such as one of a namespace of its name.
        """
        if self._keeps_all():
            return []
        found = list[str]()
        try:
            before = orphans_reach(self._table, self._stored_at()) - int(older_than.total_seconds() * 1000)
            if before <= 0:
                return []  # nothing was ever committed
            other = self._other_table()
            if other is not None:
                raise TableError(
                    f"{self._table.name}: no orphan files are removed, since the table's folder has metadata of "
                    f"another table, whose files would be deleted: {other}. Set maintenance.orphans to null for this "
                    "table."
                )
            for folder in self._own_folders():
                action = self._actions().deleteOrphanFiles(self._table.java).location(folder).olderThan(before)
                if dry_run:
                    action = action.deleteWith(self._nothing())
                found += map(str, self._table.as_json(self._table.as_list(action.execute().orphanFileLocations())))
        except JAVA_ERRORS as error:
            raise TemporaryError(f"{self._table.name}: orphan files not removed: {java_message(error)}") from None
        if found and not dry_run:
            log.info("%s: %s removed", self._table.name, amount(len(found), "orphan file"))
        return found

    def _stored_at(self) -> int:
        """When the metadata was written last, by the storage's clock, in milliseconds since 1970."""
        location = self._table.java.operations().current().metadataFileLocation()
        if location is None:  # the catalog keeps it elsewhere
            return int(time.time() * 1000)
        path, file_system = self._on_storage(str(location))
        return int(file_system.getFileStatus(path).getModificationTime())

    def _keeps_all(self) -> bool:
        """Whether nothing may be deleted, since the files may be another table's too."""
        return (self._table.property(_GC) or "true").lower() == "false"

    def _other_table(self) -> str | None:
        """A metadata file of another table in the table's own folders, if there is one. After a rename, or a DROP
        without PURGE, catalogs may give a new table the old one's folder.
        """
        metadata = self._table.java.operations().current()
        own = {str(entry.file()).rpartition("/")[2] for entry in self._table.elements(metadata.previousFiles())}
        own.add(str(metadata.metadataFileLocation()).rpartition("/")[2])
        own_folder = f"{in_one_form(self._table.spec.location).rstrip('/')}/metadata"
        uuid, old = str(metadata.uuid()), list[str]()
        for pattern in ("metadata", "{data,metadata}/{metadata,*/metadata,*/*/metadata}"):
            for path in self._glob(f"{pattern}/*.metadata.json"):
                folder, _, name = path.rpartition("/")
                if in_one_form(folder) != own_folder:
                    return path
                if name not in own:
                    old.append(path)
        # a table whose catalog deletes none of them has one for each commit since its creation
        with ThreadPoolExecutor(_READERS) as readers:
            try:
                found = zip(old, readers.map(self._uuid, old), strict=True)
                return next((path for path, others in found if others != uuid), None)
            finally:
                readers.shutdown(wait=False, cancel_futures=True)

    def _uuid(self, path: str) -> str:
        """The UUID in a metadata file. Iceberg writes it in the first line; what follows may be megabytes."""
        with suppress(OSError), self._table.spec.io.new_input(path).open() as file:
            found = _UUID.search(file.read(_HEAD))
            if found is not None:
                return found[1].decode()
        return str(self._table.iceberg.TableMetadataParser.read(self._table.java.io(), path).uuid())

    def _glob(self, pattern: str) -> Iterator[str]:
        """Paths of what matches below the table's folder."""
        path, file_system = self._on_storage(f"{in_pattern(self._table.spec.location)}/{pattern}")
        for status in file_system.globStatus(path) or ():
            yield str(status.getPath().toString())

    def _own_folders(self) -> Iterator[str]:
        """Those of the table's folders that exist."""
        for name in ("data", "metadata"):
            folder = f"{self._table.spec.location.rstrip('/')}/{name}"
            path, file_system = self._on_storage(folder)
            if file_system.exists(path):
                yield folder

    def _on_storage(self, location: str) -> tuple[JavaObject, JavaObject]:
        """A path, or a pattern of paths, and the file system that has it, both Hadoop's."""
        path = self._table.jvm.org.apache.hadoop.fs.Path(location)
        return path, path.getFileSystem(self._table.spark._jsc.hadoopConfiguration())

    def _actions(self) -> JavaObject:
        return self._table.iceberg.spark.actions.SparkActions.get(self._table.spark._jsparkSession)

    def _nothing(self) -> JavaObject:
        """A Java `Consumer` that does nothing: it adds to a list that nobody reads."""
        lang = self._table.jvm.java.lang
        takes = lang.invoke.MethodType.methodType(lang.Boolean.TYPE, lang.Class.forName("java.lang.Object"))
        add = lang.invoke.MethodHandles.publicLookup().bind(self._table.jvm.java.util.ArrayList(), "add", takes)
        return self._table.as_interface("java.util.function.Consumer", add)
