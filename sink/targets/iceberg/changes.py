"""What commits of others changed in an Iceberg table, by walking its snapshots, and the files that are live."""

import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from py4j.java_gateway import JavaObject

from changelog.amounts import amount, amounts
from deltawriters.keyindex import IndexedFile
from sink.targets.iceberg.compaction import COMPACTION
from sink.targets.iceberg.java_table import JavaTable
from sink.targets.iceberg.writers import IcebergTableSpec
from sink.targets.values import LiveFile, TableChanges

log = logging.getLogger("rowdelta")

_READERS = 8
"""Delete files of others that are read at a time."""


class Changes:
    """The changes of one table since a snapshot.

    :param table: the table, as it is now.
    :param base: id of the snapshot. It may have expired, since its child still names it.
    """

    def __init__(self, table: JavaTable, base: int | None) -> None:
        self._table = table
        self._base = base

    def since(self, included: set[int]) -> TableChanges | None:
        """See `Table.changes_since`."""
        current = self._table.snapshot_id()
        if current == self._base and not included:
            return TableChanges()
        is_own = included == {current} and self._table.parent_snapshot_id() == self._base
        foreign = [] if is_own else self._snapshots(included)
        if foreign is None:
            return None
        if not foreign:
            return TableChanges()
        io = self._table.java.io()
        added = {str(file.location()) for s in foreign for file in self._table.elements(s.addedDataFiles(io))}
        gone = {str(file.location()) for s in foreign for file in self._table.elements(s.removedDataFiles(io))}
        removed = [file for s in foreign for file in self._table.elements(s.removedDeleteFiles(io))]
        if any(str(file.content()) == "EQUALITY_DELETES" for file in removed):
            # rows that they deleted are there again, and nothing tells in which files
            log.info("%s: others removed equality deletes", self._table.name)
            return None
        deletes = [*removed, *(file for s in foreign for file in self._table.elements(s.addedDeleteFiles(io)))]
        own = sum(s.summary().get(COMPACTION) is not None for s in foreign)
        others = len(foreign) - own
        of = [f"{amount(others, 'commit')} by others"] * (others > 0)
        of += [f"{amount(own, 'compaction')} of its own"] * (own > 0)
        counts = {"added file": len(added), "removed file": len(gone), "delete file": len(deletes)}
        log.info("%s: %s: %s; catching up", self._table.name, ", ".join(of), amounts(counts))
        if _only_append(foreign) and not deletes:
            changed = [file for file in self._appended_files() if file.path in added]
        else:
            changed = self._changed_files(added, deletes)
        return TableChanges(changed, frozenset(gone))

    def _snapshots(self, included: set[int]) -> list[JavaObject] | None:
        """Snapshots after the base that aren't `included`. None if the walk doesn't meet the base and these."""
        found: list[JavaObject] = []
        missing = set(included)
        number = self._table.snapshot_id()
        while number is not None and number != self._base:
            snapshot = self._table.java.snapshot(number)
            if snapshot is None:
                return None
            if number in missing:
                missing.remove(number)
            else:
                found.append(snapshot)
            parent = snapshot.parentId()
            number = None if parent is None else int(parent)
        return found if number == self._base and not missing else None

    def _appended_files(self) -> Iterator[LiveFile]:
        """The data files of `append` snapshots after the base. Doesn't read the rest of the table."""
        scan = self._table.java.newIncrementalAppendScan().toSnapshot(self._table.snapshot_id())
        return _planned(self._table, scan if self._base is None else scan.fromSnapshotExclusive(self._base))

    def _changed_files(self, added: set[str], deletes: Sequence[JavaObject]) -> list[LiveFile]:
        """Data files of the current snapshot that were `added`, or of which `deletes` delete rows. Each costs calls to
        the JVM, and the others of the table don't.
        """
        if not added and not deletes:
            return []
        touched, are_all = self._data_files_of(deletes)
        wanted = added | touched
        if not are_all:
            paths = {str(file.location()) for file in deletes}
            return [
                file for file in live_files(self._table) if file.path in wanted or not paths.isdisjoint(_deletes(file))
            ]
        scans = self._table.as_list(self._table.scan().planFiles())
        chosen = [n for n, path in enumerate(self._table.scanned_paths(scans)) if path in wanted]
        return [_described_scan(self._table, scans.get(n)) for n in chosen]

    def _data_files_of(self, deletes: Sequence[JavaObject]) -> tuple[set[str], bool]:
        """The data files whose rows delete files delete, as far as these say, and whether they say all. If not, only a
        scan of the table can tell the others.
        """
        found, unread, are_all = set[str](), list[str](), True
        for delete in deletes:
            content = self._table.described(delete)
            if "referenced-data-file" in content:
                found.add(content["referenced-data-file"])
            elif content["content"].upper().startswith("POSITION") and content["file-format"].upper() == "PARQUET":
                unread.append(content["file-path"])
            else:
                are_all = False
        try:
            with ThreadPoolExecutor(_READERS) as pool:
                return found.union(*pool.map(functools.partial(deleted_from, self._table.spec), unread)), are_all
        except (OSError, KeyError, ValueError, pa.ArrowException):
            # A file that was removed may be gone. Others may write what Iceberg reads and we don't.
            return found, False


def live_files(table: JavaTable) -> Iterator[LiveFile]:
    """The data files of the current snapshot, with the files that delete their rows."""
    return _planned(table, table.scan()) if table.snapshot_id() is not None else iter(())


def _planned(table: JavaTable, plan: JavaObject) -> Iterator[LiveFile]:
    return (_described_scan(table, scan) for scan in table.elements(plan.planFiles()))


def _described_scan(table: JavaTable, scan: JavaObject) -> LiveFile:
    data = table.described(scan.file())
    vector, parquet, others = None, [], []
    for delete in table.elements(scan.deletes()):
        content = table.described(delete)
        others.append(content["file-path"])
        if content["file-format"].upper() == "PUFFIN":
            vector = content
        elif table.spec.format_version >= 3 and content["content"].upper().startswith("POSITION"):
            parquet.append(content["file-path"])
    return LiveFile(indexed(table, data), vector, tuple(parquet), (scan, tuple(others)))


def indexed(table: JavaTable, data: Mapping[str, Any]) -> IndexedFile:
    """A data file as the key index stores it.

    :param data: the file as `ContentFileParser` JSON.
    """
    fields = table.spec.specs_by_id[data["spec-id"]].fields
    partition = data.get("partition", [None] * len(fields))
    values = zip((str(field.field_id) for field in fields), partition, strict=True)
    return IndexedFile(data["file-path"], data["spec-id"], dict(values))


def scan_of(file: LiveFile) -> JavaObject:
    """Iceberg's scan task that reads a live file."""
    return file.handle[0]


def _deletes(file: LiveFile) -> tuple[str, ...]:
    """The paths of all delete files that apply to a live file."""
    deletes: tuple[str, ...] = file.handle[1]
    return deletes


def _only_append(snapshots: Sequence[JavaObject]) -> bool:
    return all(str(snapshot.operation()) == "append" for snapshot in snapshots)


def deleted_from(table: IcebergTableSpec, deletes: str) -> set[str]:
    """The data files whose rows a Parquet position delete file deletes.

    :raises OSError: it can't be read.
    :raises pa.ArrowException: it is not a Parquet file.
    :raises KeyError: its columns have other names. Iceberg finds them by their ids.
    :raises ValueError: there is no client for its location.
    """
    with table.io.new_input(deletes).open() as stream:
        file = pq.ParquetFile(stream, read_dictionary=["file_path"])
        return {
            path
            for batch in file.iter_batches(columns=["file_path"])
            for path in batch.column("file_path").unique().to_pylist()
        }
