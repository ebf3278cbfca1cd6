"""The data files of an Iceberg table that a rewrite beside the stream may take (`sink.table.rewriting`)."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from random import randrange, sample
from typing import Any

from py4j.java_gateway import JavaObject

from deltawriters.content import DataFile, DeleteFile
from sink.errors import TemporaryError
from sink.spark.java_errors import JAVA_ERRORS, java_message
from sink.targets.iceberg.changes import indexed
from sink.targets.iceberg.java_table import JavaTable
from sink.targets.iceberg.writers import IcebergTableSpec
from sink.targets.upkeep_values import AppliedDeletes, EqualityDeleted, MergedDeletes, Rewritable

_MOST_FILES = 20_000
"""More files aren't looked at at once: each takes a tenth of a millisecond in which micro-batches wait."""


def rewritables(table: JavaTable) -> Iterator[list[Rewritable]]:
    """See `Upkeep.rewritables`."""
    try:
        all_scans = table.current_scans()
        for start, end in _parts(int(all_scans.size())):
            scans = all_scans.subList(start, end)
            described, numbers = table.described_scans(scans), table.scanned_sequence_numbers(scans)
            deletes = (delete for scan in described for delete in scan.get("delete-files", ()))
            applied = {} if all(map(_is_vector, deletes)) else table.applied_deletes(all_scans)
            ages = table.commits_since_deletes(scans)
            files = (
                _rewritable(table, scan, number, applied, ages) for scan, number in zip(described, numbers, strict=True)
            )
            yield [file for file in files if file is not None]
    except JAVA_ERRORS as error:  # perhaps somebody has just expired a snapshot
        raise TemporaryError(java_message(error)) from None


def _parts(size: int) -> list[tuple[int, int]]:
    """Start and end of each part of a list, in any order. Parts begin elsewhere each time, so that neighbours of any
    place are together some time.
    """
    first = randrange(_MOST_FILES) if size > _MOST_FILES else 0
    parts = list(pairwise([*range(first - _MOST_FILES, size, _MOST_FILES), size]))
    return [(max(0, start), end) for start, end in sample(parts, len(parts)) if end > max(0, start)]


def _rewritable(
    table: JavaTable,
    scan: Mapping[str, Any],
    sequence_number: int,
    applied: Mapping[str, int],
    ages: Mapping[str, int],
) -> Rewritable | None:
    """:param applied: to how many data files each delete file applies. Nothing is asked of vectors.
    :param ages: how many commits ago each delete file was added.
    """
    spec, data, deletes = table.spec, scan["data-file"], scan.get("delete-files", ())
    if data["spec-id"] != spec.current_spec_id or data["file-format"].upper() != "PARQUET":
        return None
    if spec.format_version >= 3 and "first-row-id" not in data:
        return None  # it was written before the table became v3, so nothing here tells its rows' ids
    if not spec.is_own_file(data["file-path"]):
        return None  # it is another table's too, and whoever removes old snapshots would delete it
    by_position = all(delete["content"].upper().startswith("POSITION") for delete in deletes)
    file = indexed(table, data)
    rows = int(data["record-count"])
    # a vector applies to one data file, though a Puffin file has several
    shares = (int(d["record-count"]) // (1 if _is_vector(d) else applied[d["file-path"]]) for d in deletes)
    deleted = min(rows, sum(shares))
    is_counted = spec.format_version >= 3 and all(map(_is_vector, deletes))
    if not is_counted and not by_position:
        return None  # equality deletes
    small = DataFile(
        file,
        int(data["file-size-in-bytes"]),
        data.get("first-row-id"),
        sequence_number,
        live_rows=rows - deleted if is_counted else None,
    )
    applying = [
        AppliedDeletes(
            DeleteFile(delete["file-path"], int(delete["file-size-in-bytes"])),
            int(delete["record-count"]),
            applied[delete["file-path"]] if _is_mergeable(spec, delete) else 0,
        )
        for delete in deletes
        if not is_counted
    ]
    settled = min((ages[delete["file-path"]] for delete in deletes), default=0)
    return Rewritable(file.spec_id, json.dumps(file.partition), rows, deleted, len(deletes), small, applying, settled)


def _is_vector(delete: Mapping[str, Any]) -> bool:
    return bool(delete["file-format"].upper() == "PUFFIN")


def _is_mergeable(spec: IcebergTableSpec, delete: Mapping[str, Any]) -> bool:
    """In v3 a data file gets a vector in place of such files when a row of it is deleted."""
    return spec.format_version < 3 and delete["file-format"].upper() == "PARQUET"


def handles(table: JavaTable, paths: Collection[str]) -> Sequence[JavaObject]:
    """See `Upkeep.handles`. Vectors aren't among what is returned: the key index knows them."""
    scans, wanted = table.current_scans(), set(paths)
    found = list[JavaObject]()
    for number, path in enumerate(table.scanned_paths(scans)):
        if path in wanted:
            scan = scans.get(number)
            found.append(scan.file())
            if table.spec.format_version < 3:
                found += [d for d in table.elements(scan.deletes()) if d.referencedDataFile() in wanted]
    return found


def merge_deletes(
    table: JavaTable, paths: Collection[str], data_files: Collection[str], files: Sequence[str]
) -> MergedDeletes | None:
    """See `Upkeep.merge_deletes`."""
    scans = table.current_scans()
    live = table.scanned_paths(scans)
    own = {number: path for number, path in enumerate(live) if path in data_files}
    own_scans = table.objects(map(scans.get, own))
    applied, applied_to_own = table.applied_deletes(scans), table.applied_deletes(own_scans)
    if any(path not in applied or applied[path] != applied_to_own.get(path) for path in paths):
        return None
    described_files = {text: json.loads(text) for text in files}
    references = {text: file.get("referenced-data-file") for text, file in described_files.items()}
    gone = {data_file for data_file in references.values() if data_file is not None}.difference(live)
    dropped = {text for text, data_file in references.items() if data_file in gone}
    return MergedDeletes(
        table.deletes_at(own_scans, paths),
        [text for text in files if text not in dropped],
        list(own.values()),
        [described_files[text]["file-path"] for text in dropped],
    )


def equality_deleted(table: JavaTable) -> EqualityDeleted | None:
    """See `Upkeep.equality_deletes`. The delete files come from the manifests: a scan doesn't have those that apply to
    no data file, such as the first one of a partition, and some engines refuse a table for such a file too.
    """
    try:
        files = {
            indexed(table, described["data-file"]): int(described["data-file"]["record-count"])
            for described in table.described_scans(table.current_scans())
            if any(delete["content"].upper().startswith("EQUALITY") for delete in described.get("delete-files", ()))
        }
        found = [delete for delete in table.delete_files() if str(delete.content()) == "EQUALITY_DELETES"]
    except JAVA_ERRORS as error:
        raise TemporaryError(java_message(error)) from None
    return EqualityDeleted(files, found) if found else None
