"""The data files of an Iceberg table that a rewrite beside the stream may take (`sink.run.rewriting`)."""

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from random import randrange
from typing import TYPE_CHECKING, Any

from py4j.java_gateway import JavaObject

from deltawriters.rewrite import SmallFile
from sink.errors import TemporaryError
from sink.spark.java_errors import JAVA_ERRORS, java_message
from sink.targets.base import AppliedDeletes, EqualityDeleted, MergedDeletes, Rewritable
from sink.targets.iceberg.changes import indexed
from sink.targets.iceberg.writers import IcebergTableSpec

if TYPE_CHECKING:
    from sink.targets.iceberg.table import IcebergTable


_MOST_FILES = 20_000
"""More files aren't looked at at once: each takes a tenth of a millisecond in which micro-batches wait."""


def rewritables(table: "IcebergTable") -> list[Rewritable]:
    """See `Target.rewritables`."""
    try:
        scans = table.current_scans()
        is_complete = int(scans.size()) <= _MOST_FILES
        first = randrange(max(1, int(scans.size()) - _MOST_FILES + 1))  # so that each file has its turn
        scans = scans.subList(first, min(int(scans.size()), first + _MOST_FILES))
        described, numbers = table.described_scans(scans), table.scanned_sequence_numbers(scans)
    except JAVA_ERRORS as error:  # perhaps somebody has just expired a snapshot
        raise TemporaryError(java_message(error)) from None
    applied: Counter[str] = Counter()
    """How many data files each delete file applies to. A vector applies to one, though a Puffin file has several."""
    for scan in described:
        applied.update(d["file-path"] for d in scan.get("delete-files", ()) if d["file-format"].upper() != "PUFFIN")
    found = (
        _rewritable(table, scan, number, applied, is_complete) for scan, number in zip(described, numbers, strict=True)
    )
    return [file for file in found if file is not None]


def _rewritable(
    table: "IcebergTable", scan: Mapping[str, Any], sequence_number: int, applied: Mapping[str, int], is_complete: bool
) -> Rewritable | None:
    """:param applied: to how many data files each delete file applies. Only if `is_complete`, these are all."""
    spec, data, deletes = table.spec, scan["data-file"], scan.get("delete-files", ())
    if data["spec-id"] != spec.current_spec_id or data["file-format"].upper() != "PARQUET":
        return None
    if spec.format_version >= 3 and "first-row-id" not in data:
        return None  # it was written before the table became v3, so nothing here tells its rows' ids
    if not spec.is_own_file(data["file-path"]):
        return None  # it is another table's too, and whoever removes old snapshots would delete it
    by_position = all(delete["content"].upper().startswith("POSITION") for delete in deletes)
    partition = json.dumps(indexed(table, data).partition)
    rows = int(data["record-count"])
    deleted = min(rows, sum(int(d["record-count"]) // applied.get(d["file-path"], 1) for d in deletes))
    is_counted = spec.format_version >= 3 and all(delete["file-format"].upper() == "PUFFIN" for delete in deletes)
    if not is_counted and not by_position:
        return None  # equality deletes
    small = SmallFile(
        data["file-path"],
        int(data["file-size-in-bytes"]),
        data.get("first-row-id"),
        sequence_number,
        live_rows=rows - deleted if is_counted else None,
    )
    applying = [
        AppliedDeletes(
            SmallFile(delete["file-path"], int(delete["file-size-in-bytes"]), None, 0),
            int(delete["record-count"]),
            applied[delete["file-path"]] if is_complete and _is_mergeable(spec, delete) else 0,
        )
        for delete in deletes
        if not is_counted
    ]
    return Rewritable(data["spec-id"], partition, rows, deleted, len(deletes), small, applying)


def _is_mergeable(spec: IcebergTableSpec, delete: Mapping[str, Any]) -> bool:
    """In v3 a data file gets a vector in place of such files when a row of it is deleted."""
    return spec.format_version < 3 and delete["file-format"].upper() == "PARQUET"


def handles(table: "IcebergTable", paths: Collection[str]) -> Sequence[JavaObject]:
    """See `Target.handles`. Vectors aren't among what is returned: the key index knows them."""
    scans, wanted = table.current_scans(), set(paths)
    found = list[JavaObject]()
    for number, path in enumerate(table.scanned_paths(scans)):
        if path in wanted:
            scan = scans.get(number)
            found.append(scan.file())
            if table.spec.format_version < 3:
                found += [d for d in table.elements(scan.deletes()) if d.referencedDataFile() in wanted]
    return found


def merged_deletes(table: "IcebergTable", paths: Collection[str], files: Sequence[str]) -> MergedDeletes | None:
    """See `Target.merged_deletes`."""
    scans, old = table.current_scans(), dict[str, JavaObject]()
    live, referenced = set[str](), list[str]()
    for number, described in enumerate(table.described_scans(scans)):
        path = described["data-file"]["file-path"]
        live.add(path)
        applying = {delete["file-path"] for delete in described.get("delete-files", ())}.intersection(paths)
        if applying:
            referenced.append(path)
        if not applying <= old.keys():
            found = {str(delete.location()): delete for delete in table.elements(scans.get(number).deletes())}
            old |= {path: found[path] for path in applying}
    if len(old) < len(set(paths)):
        return None
    described_files = {text: json.loads(text) for text in files}
    references = {text: file.get("referenced-data-file") for text, file in described_files.items()}
    dropped = {text for text, data_file in references.items() if data_file is not None and data_file not in live}
    return MergedDeletes(
        list(old.values()),
        [text for text in files if text not in dropped],
        referenced,
        [described_files[text]["file-path"] for text in dropped],
    )


def equality_deleted(table: "IcebergTable") -> EqualityDeleted | None:
    """See `Target.equality_deletes`. The delete files come from the manifests: a scan doesn't have those that apply to
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
