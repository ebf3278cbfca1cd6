"""Delete files that no longer apply to any live data file, by Iceberg's own rules (spec, Scan Planning).

    position deletes      data files of the same spec and partition that aren't newer
    ... of one data file  this data file, whatever its partition (so do deletion vectors)
    equality deletes      older data files of the same spec and partition
    ... without partition older data files of all specs

Iceberg's procedure for this (`RemoveDanglingDeletesSparkAction`, 1.11) has no rule like the last one: it drops deletes
that reach into all partitions, and so brings deleted rows back.

A delete file that applies to nothing can't apply to what comes later. New data files are newer than it. Those of a
rewrite may have an older sequence number, but not one that is older than all the files that they replace. Only a
rollback brings old data files back: so the commit must be validated from the snapshot that was looked at.
"""

import logging
from collections.abc import Iterable, Iterator
from contextlib import closing

from py4j.java_gateway import JavaObject

from sink.errors import TemporaryError
from sink.spark.java_errors import JAVA_ERRORS, java_message
from sink.targets.iceberg.java_table import JavaTable

log = logging.getLogger("rowdelta")

_MOST_FILES = 20_000
"""A table with more data and delete files isn't looked at: micro-batches wait meanwhile, and a part would not tell."""
_MOST_MANIFESTS = 500
"""Likewise. Each is a request to the store."""


def dangling_deletes(table: JavaTable) -> list[JavaObject]:
    """See `Upkeep.dangling_deletes`."""
    last = table.current_snapshot()
    if last is None or last.summary.get("total-delete-files") == "0":
        return []
    totals = [last.summary.get(name) for name in ("total-data-files", "total-delete-files")]
    if None in totals or sum(int(total or 0) for total in totals) > _MOST_FILES:
        log.info("%s: has too many files to look for deletes that apply to nothing", table.name)
        return []
    try:
        # the one that the commit is validated from: another thread may have refreshed the Java object
        snapshot = table.java.snapshot(last.snapshot_id)
        io = table.java.io()
        data, deletes = table.elements(snapshot.dataManifests(io)), table.elements(snapshot.deleteManifests(io))
        if len(data) + len(deletes) > _MOST_MANIFESTS:
            log.info("%s: has too many manifests to look for deletes that apply to nothing", table.name)
            return []
        live, dangling, needed = _Live(table, data), list[tuple[str, JavaObject]](), set[str]()
        for manifest in deletes:
            for path, file, is_dangling in live.compared(manifest):
                if is_dangling:
                    dangling.append((path, file))
                else:
                    needed.add(path)
    except JAVA_ERRORS as error:  # perhaps somebody has just expired a snapshot
        raise TemporaryError(f"{table.name}: {java_message(error)}") from None
    # Iceberg removes all entries of a file, and a writer may have added one twice. A Puffin file has several vectors.
    return [file for path, file in dangling if path not in needed or str(file.format()) == "PUFFIN"]


class _Live:
    """The live data files that manifests list."""

    def __init__(self, table: JavaTable, manifests: Iterable[JavaObject]) -> None:
        self._table = table
        self._paths = set[str]()
        self._oldest: dict[tuple[int, str], int] = {}
        """The lowest sequence number, by spec and partition."""
        io, columns = table.java.io(), table.java_list(["file_path", "partition"])
        for manifest in manifests:
            spec_id = int(manifest.partitionSpecId())
            with closing(table.iceberg.ManifestFiles.read(manifest, io, table.java_specs)) as reader:
                paths, numbers, partitions = table.places(table.as_list(reader.select(columns)), spec_id)
            self._paths.update(paths)
            for number, partition in zip(numbers, partitions, strict=True):
                place = spec_id, partition
                self._oldest[place] = min(number, self._oldest.get(place, number))
        self._oldest_of_all = min(self._oldest.values(), default=None)

    def compared(self, manifest: JavaObject) -> Iterator[tuple[str, JavaObject, bool]]:
        """Path and object of each delete file of a manifest, and whether it applies to none of the data files."""
        table, spec_id = self._table, int(manifest.partitionSpecId())
        is_global = bool(table.java_specs.get(spec_id).isUnpartitioned())
        opened = table.iceberg.ManifestFiles.readDeleteManifest(manifest, table.java.io(), table.java_specs)
        with closing(opened) as reader:
            files = table.as_list(reader)
        facts = zip(*table.places(files, spec_id), *table.contents(files), strict=True)
        for at, (path, number, partition, content, data_file, by_bounds) in enumerate(facts):
            oldest = self._oldest.get((spec_id, partition))
            if content == "EQUALITY_DELETES":
                oldest = self._oldest_of_all if is_global else oldest
                is_dangling = oldest is None or oldest >= number
            elif data_file is not None:
                is_dangling = data_file not in self._paths
            else:
                # bounds may be cut off, so that they can't tell that a data file is gone
                is_dangling = (oldest is None or oldest > number) and by_bounds not in self._paths
            yield path, files.get(at), is_dangling
