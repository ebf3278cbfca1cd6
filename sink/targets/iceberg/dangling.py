"""Delete files that no longer apply to any live data file, by Iceberg's own rules (spec, Scan Planning).

    position deletes      data files of the same spec and partition that aren't newer
    ... of one data file  this data file (so do deletion vectors)
    equality deletes      older data files of the same spec and partition
    ... without partition older data files of all specs

Iceberg's procedure for this (`RemoveDanglingDeletesSparkAction`, 1.11) has no rule like the last one: it drops deletes
that reach into all partitions, and so brings deleted rows back.

A delete file that applies to nothing can't apply to what comes later. New data files are newer than it. Those of a
rewrite may have an older sequence number, but not one that is older than all the files that they replace. Only a
rollback brings old data files back: so the commit must be validated from the snapshot that was looked at.
"""

import logging
from typing import TYPE_CHECKING

from py4j.java_gateway import JavaObject

from sink.errors import TemporaryError
from sink.spark.java_errors import JAVA_ERRORS, java_message

if TYPE_CHECKING:
    from sink.targets.iceberg.table import IcebergTable

log = logging.getLogger("rowdelta")

_MOST_FILES = 20_000
"""A table with more data and delete files isn't looked at: micro-batches wait meanwhile, and a part would not tell."""


def dangling_deletes(table: "IcebergTable") -> list[JavaObject]:
    """See `Target.dangling_deletes`."""
    last, snapshot = table.current_snapshot(), table.java.currentSnapshot()
    if last is None or last.summary.get("total-delete-files") == "0":
        return []
    totals = [last.summary.get(name) for name in ("total-data-files", "total-delete-files")]
    if None in totals or sum(int(total or 0) for total in totals) > _MOST_FILES:
        log.info("%s: has too many files to look for deletes that apply to nothing", table.name)
        return []
    try:
        live = _Live(table, snapshot)
        return [delete for manifest in _delete_manifests(table, snapshot) for delete in live.dangling(manifest)]
    except JAVA_ERRORS as error:  # perhaps somebody has just expired a snapshot
        raise TemporaryError(java_message(error)) from None


def _delete_manifests(table: "IcebergTable", snapshot: JavaObject) -> list[JavaObject]:
    return table.elements(snapshot.deleteManifests(table.java.io()))


class _Live:
    """The live data files of a snapshot."""

    def __init__(self, table: "IcebergTable", snapshot: JavaObject) -> None:
        self._table = table
        self._paths = set[str]()
        self._oldest: dict[tuple[int, str], int] = {}
        """The lowest sequence number, by spec and partition."""
        io, columns = table.java.io(), table.java_list(["file_path", "partition"])
        for manifest in table.elements(snapshot.dataManifests(io)):
            spec_id = int(manifest.partitionSpecId())
            reader = table.iceberg.ManifestFiles.read(manifest, io, table.java_specs).select(columns)
            paths, numbers, partitions = table.places(table.as_list(reader), spec_id)
            reader.close()
            self._paths.update(paths)
            for number, partition in zip(numbers, partitions, strict=True):
                place = spec_id, partition
                self._oldest[place] = min(number, self._oldest.get(place, number))
        self._oldest_of_all = min(self._oldest.values(), default=None)

    def dangling(self, manifest: JavaObject) -> list[JavaObject]:
        """The delete files of a manifest that apply to none of the data files."""
        table, spec_id = self._table, int(manifest.partitionSpecId())
        is_global = bool(table.java_specs.get(spec_id).isUnpartitioned())
        reader = table.iceberg.ManifestFiles.readDeleteManifest(manifest, table.java.io(), table.java_specs)
        files = table.as_list(reader)
        reader.close()
        found = list[JavaObject]()
        facts = zip(*table.places(files, spec_id)[1:], *table.contents(files), strict=True)
        for at, (number, partition, content, data_file) in enumerate(facts):
            oldest = self._oldest.get((spec_id, partition))
            if content == "EQUALITY_DELETES":
                oldest = self._oldest_of_all if is_global else oldest
                is_dangling = oldest is None or oldest >= number
            elif data_file is not None:
                is_dangling = data_file not in self._paths
            else:
                is_dangling = oldest is None or oldest > number
            if is_dangling:
                found.append(files.get(at))
        return found
