"""Removes what nobody needs any more of an Iceberg table, by Iceberg's own procedures in Spark."""

import logging
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import islice

from py4j.java_gateway import JavaObject
from pyspark.sql import DataFrame

from changelog.amounts import amount
from sink.errors import TableError, TemporaryError
from sink.spark.java_errors import JAVA_ERRORS, java_message
from sink.targets.iceberg.java_table import JavaTable
from sink.targets.locations import in_one_form, in_pattern
from sink.targets.own_state import orphans_reach

log = logging.getLogger("rowdelta")

_DELETED_AT_ONCE = 10_000
_READERS = 16
_HEAD = 1024
_UUID = re.compile(rb'"table-uuid"\s*:\s*"([^"]+)"')
_GC = "gc.enabled"
_MAX_AGE, _MIN_SNAPSHOTS = "history.expire.max-snapshot-age-ms", "history.expire.min-snapshots-to-keep"
"""The table's own wishes. The larger of these and the configuration's count."""


def expire_snapshots(table: JavaTable, older_than: timedelta, retain_last: int, keep: int | None) -> int:
    """See `Target.expire`. Branches and tags keep what they need by rules of their own (`ExpireSnapshots`).

    Spark's procedure compares the files of what stays with those of what goes. `Table.expireSnapshots` alone would
    delete a Puffin file as soon as one of its vectors goes, though others are live (v3). The procedure tells the files,
    and they are deleted here: those outside of the table's own folders, such as those of `add_files`, are others'.
    """
    try:
        if not has_expired(table, older_than, retain_last, keep):
            return 0
        before, retain_last = _limits(table, older_than, retain_last, keep)
        action = _actions(table).expireSnapshots(table.java).expireOlderThan(before).retainLast(retain_last)
        files = DataFrame(action.expireFiles().toDF(), table.spark).select("path").toLocalIterator()
        deleted, others = _deleted(table, (path for (path,) in files))
    except JAVA_ERRORS as error:
        raise TemporaryError(f"{table.name}: old snapshots not removed: {java_message(error)}") from None
    stay = f"; {amount(others, 'file')} outside of the table's folder left" if others else ""
    log.info("%s: old snapshots removed, with %s%s", table.name, amount(deleted, "file"), stay)
    return deleted


def _deleted(table: JavaTable, paths: Iterator[str]) -> tuple[int, int]:
    """Delete files that only old snapshots had.

    :return: how many were deleted, and how many stay since they aren't in the table's own folders.
    """
    deleted, kept = 0, 0
    while part := list(islice(paths, _DELETED_AT_ONCE)):
        own = [path for path in part if table.spec.is_own_file(path)]
        # an object store deletes many files by one request
        table.iceberg.CatalogUtil.deleteFiles(table.java.io(), table.java_list(own), "expired", True)
        deleted, kept = deleted + len(own), kept + len(part) - len(own)
    return deleted, kept


def has_expired(table: JavaTable, older_than: timedelta, retain_last: int, keep: int | None) -> bool:
    """See `Target.has_old_states`. Spark's procedure takes seconds to find out."""
    before, retain_last = _limits(table, older_than, retain_last, keep)
    snapshots = table.as_list(table.java.snapshots())  # the oldest first
    if before < 0 or int(snapshots.size()) <= retain_last:
        return False
    named = {int(reference.snapshotId()) for reference in table.elements(table.java.refs().values())}
    for number in range(int(snapshots.size())):
        snapshot = snapshots.get(number)
        if int(snapshot.timestampMillis()) >= before:
            return False
        if int(snapshot.snapshotId()) not in named:
            return True
    return False


def _limits(table: JavaTable, older_than: timedelta, retain_last: int, keep: int | None) -> tuple[int, int]:
    """Snapshots before a time (-1 if none may go) are removed, except so many of the newest."""
    age = max(int(older_than.total_seconds() * 1000), int(table.property(_MAX_AGE) or 0))
    retain_last = max(retain_last, int(table.property(_MIN_SNAPSHOTS) or 1))
    kept, current = table.snapshot(keep), table.snapshot_id()
    if _keeps_all(table) or kept is None or current is None or not table.is_ancestor(kept.snapshot_id, current):
        return -1, retain_last  # nothing tells what came after it
    before = int(time.time() * 1000) - age
    snapshots = table.as_list(table.java.snapshots())
    # Each commit is last in the list, but its time may be up to a minute before that of its parent, by another clock.
    # Iceberg removes all that comes before the first snapshot that is too old.
    for number in reversed(range(int(snapshots.size()))):
        snapshot = snapshots.get(number)
        before = min(before, int(snapshot.timestampMillis()))
        if int(snapshot.snapshotId()) == kept.snapshot_id:
            break
    return before, retain_last


def remove_orphans(table: JavaTable, older_than: timedelta, *, dry_run: bool) -> list[str]:
    """See `Target.remove_orphans`. Only in the folders in which Iceberg writes by default: another table may be inside
    the table's folder, such as one of a namespace of its name.
    """
    if _keeps_all(table):
        return []
    found = list[str]()
    try:
        before = orphans_reach(table) - int(older_than.total_seconds() * 1000)
        if before <= 0:
            return []  # nothing was ever committed
        other = _other_table(table)
        if other is not None:
            raise TableError(
                f"{table.name}: no orphan files are removed, since the table's folder has metadata of another table, "
                f"whose files would be deleted: {other}. Set maintenance.orphans to null for this table."
            )
        for folder in _own_folders(table):
            action = _actions(table).deleteOrphanFiles(table.java).location(folder).olderThan(before)
            if dry_run:
                action = action.deleteWith(_nothing(table))
            found += map(str, table.as_json(table.as_list(action.execute().orphanFileLocations())))
    except JAVA_ERRORS as error:
        raise TemporaryError(f"{table.name}: orphan files not removed: {java_message(error)}") from None
    if found and not dry_run:
        log.info("%s: %s removed", table.name, amount(len(found), "orphan file"))
    return found


def stored_at(table: JavaTable) -> int:
    """See `Target.stored_at`."""
    location = table.java.operations().current().metadataFileLocation()
    if location is None:  # the catalog keeps it elsewhere
        return int(time.time() * 1000)
    path, file_system = _on_storage(table, str(location))
    return int(file_system.getFileStatus(path).getModificationTime())


def _keeps_all(table: JavaTable) -> bool:
    """Whether nothing may be deleted, since the files may be another table's too."""
    return (table.property(_GC) or "true").lower() == "false"


def _other_table(table: JavaTable) -> str | None:
    """A metadata file of another table in the table's own folders, if there is one. After a rename, or a DROP without
    PURGE, catalogs may give a new table the old one's folder.
    """
    metadata = table.java.operations().current()
    own = {str(entry.file()).rpartition("/")[2] for entry in table.elements(metadata.previousFiles())}
    own.add(str(metadata.metadataFileLocation()).rpartition("/")[2])
    own_folder = f"{in_one_form(table.spec.location).rstrip('/')}/metadata"
    uuid, old = str(metadata.uuid()), list[str]()
    for pattern in ("metadata", "{data,metadata}/{metadata,*/metadata,*/*/metadata}"):
        for path in _glob(table, f"{pattern}/*.metadata.json"):
            folder, _, name = path.rpartition("/")
            if in_one_form(folder) != own_folder:
                return path
            if name not in own:
                old.append(path)
    # a table whose catalog deletes none of them has one for each commit since its creation
    with ThreadPoolExecutor(_READERS) as readers:
        try:
            found = zip(old, readers.map(partial(_uuid, table), old), strict=True)
            return next((path for path, others in found if others != uuid), None)
        finally:
            readers.shutdown(wait=False, cancel_futures=True)


def _uuid(table: JavaTable, path: str) -> str:
    """The UUID in a metadata file. Iceberg writes it in the first line; what follows may be megabytes."""
    with suppress(OSError), table.spec.io.new_input(path).open() as file:
        found = _UUID.search(file.read(_HEAD))
        if found is not None:
            return found[1].decode()
    return str(table.iceberg.TableMetadataParser.read(table.java.io(), path).uuid())


def _glob(table: JavaTable, pattern: str) -> Iterator[str]:
    """Paths of what matches below the table's folder."""
    path, file_system = _on_storage(table, f"{in_pattern(table.spec.location)}/{pattern}")
    for status in file_system.globStatus(path) or ():
        yield str(status.getPath().toString())


def _own_folders(table: JavaTable) -> Iterator[str]:
    """Those of the table's folders that exist."""
    for name in ("data", "metadata"):
        folder = f"{table.spec.location.rstrip('/')}/{name}"
        path, file_system = _on_storage(table, folder)
        if file_system.exists(path):
            yield folder


def _on_storage(table: JavaTable, location: str) -> tuple[JavaObject, JavaObject]:
    """A path, or a pattern of paths, and the file system that has it, both Hadoop's."""
    path = table.jvm.org.apache.hadoop.fs.Path(location)
    return path, path.getFileSystem(table.spark._jsc.hadoopConfiguration())


def _actions(table: JavaTable) -> JavaObject:
    return table.iceberg.spark.actions.SparkActions.get(table.spark._jsparkSession)


def _nothing(table: JavaTable) -> JavaObject:
    """A Java `Consumer` that does nothing: it adds to a list that nobody reads."""
    lang = table.jvm.java.lang
    takes = lang.invoke.MethodType.methodType(lang.Boolean.TYPE, lang.Class.forName("java.lang.Object"))
    add = lang.invoke.MethodHandles.publicLookup().bind(table.jvm.java.util.ArrayList(), "add", takes)
    return table.as_interface("java.util.function.Consumer", add)
