"""Removes what nobody needs any more of an Iceberg table, by Iceberg's own procedures in Spark."""

import logging
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

from py4j.java_gateway import JavaObject

from sink.errors import TemporaryError
from sink.spark.java_errors import JAVA_ERRORS, java_message

if TYPE_CHECKING:
    from sink.targets.iceberg.table import IcebergTable

log = logging.getLogger("rowdelta")

_GC = "gc.enabled"
_MAX_AGE, _MIN_SNAPSHOTS = "history.expire.max-snapshot-age-ms", "history.expire.min-snapshots-to-keep"
"""The table's own wishes. The larger of these and the configuration's count."""


def expired(table: "IcebergTable", older_than: timedelta, retain_last: int, keep: int | None) -> int:
    """See `Target.expire`. Branches and tags keep what they need by rules of their own (`ExpireSnapshots`).

    Spark's procedure compares the files of what stays with those of what goes. `Table.expireSnapshots` alone would
    delete a Puffin file as soon as one of its vectors goes, though others are live (v3).
    """
    if _keeps_all(table):
        return 0
    kept = table.snapshot(keep)
    age = max(int(older_than.total_seconds() * 1000), int(table.property(_MAX_AGE) or 0))
    retain_last = max(retain_last, int(table.property(_MIN_SNAPSHOTS) or 1))
    before = int(time.time() * 1000) - age
    if kept is None:
        return 0  # nothing tells what came after it
    before = min(before, kept.timestamp_ms)
    try:
        if not _has_older(table, before, retain_last):
            return 0
        actions = _actions(table).expireSnapshots(table.java)
        result = actions.expireOlderThan(before).retainLast(retain_last).execute()
        kinds = ("DataFiles", "PositionDeleteFiles", "EqualityDeleteFiles", "Manifests", "ManifestLists")
        deleted = sum(int(getattr(result, f"deleted{kind}Count")()) for kind in kinds)
    except JAVA_ERRORS as error:
        raise TemporaryError(f"{table.name}: old snapshots not removed: {java_message(error)}") from None
    log.info("%s: old snapshots removed, with %d files", table.name, deleted)
    return deleted


def _has_older(table: "IcebergTable", before: int, retain_last: int) -> bool:
    """Whether any snapshot may go. Spark's procedure takes seconds to find out."""
    snapshots = table.elements(table.java.snapshots())
    return len(snapshots) > retain_last and any(int(snapshot.timestampMillis()) < before for snapshot in snapshots)


def orphans_removed(table: "IcebergTable", older_than: timedelta, *, dry_run: bool) -> list[str]:
    """See `Target.remove_orphans`. Only in the folders in which Iceberg writes by default: another table may be inside
    the table's folder, such as one of a namespace of its name.
    """
    if _keeps_all(table):
        return []
    before = int((time.time() - older_than.total_seconds()) * 1000)
    found = list[str]()
    try:
        for folder in _own_folders(table):
            action = _actions(table).deleteOrphanFiles(table.java).location(folder).olderThan(before)
            if dry_run:
                action = action.deleteWith(_nothing(table))
            found += map(str, table.as_json(table.as_list(action.execute().orphanFileLocations())))
    except JAVA_ERRORS as error:
        raise TemporaryError(f"{table.name}: orphan files not removed: {java_message(error)}") from None
    if found and not dry_run:
        log.info("%s: %d orphan files removed", table.name, len(found))
    return found


def _keeps_all(table: "IcebergTable") -> bool:
    """Whether nothing may be deleted, since the files may be another table's too."""
    return (table.property(_GC) or "true").lower() == "false"


def _own_folders(table: "IcebergTable") -> Iterator[str]:
    """Those of the table's folders that exist, and aren't another table's folder."""
    path = table.jvm.org.apache.hadoop.fs.Path
    for name in ("data", "metadata"):
        folder = f"{table.spec.location.rstrip('/')}/{name}"
        files = path(folder).getFileSystem(table.spark._jsc.hadoopConfiguration())
        if files.exists(path(folder)) and not files.exists(path(f"{folder}/metadata")):
            yield folder


def _actions(table: "IcebergTable") -> JavaObject:
    return table.iceberg.spark.actions.SparkActions.get(table.spark._jsparkSession)


def _nothing(table: "IcebergTable") -> JavaObject:
    """A Java `Consumer` that does nothing: it adds to a list that nobody reads."""
    lang = table.jvm.java.lang
    takes = lang.invoke.MethodType.methodType(lang.Boolean.TYPE, lang.Class.forName("java.lang.Object"))
    add = lang.invoke.MethodHandles.publicLookup().bind(table.jvm.java.util.ArrayList(), "add", takes)
    return table.as_interface("java.util.function.Consumer", add)
