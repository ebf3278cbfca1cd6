"""Finds the data files that a commit replaces (`deletes: copy-on-write`), and the deletes that apply to them."""

import json
from collections.abc import Collection
from typing import Any

from py4j.java_gateway import JavaObject

from deltawriters.content import DataFile
from deltawriters.keyindex.versions import IndexLostError
from sink.targets.iceberg.changes import deleted_from, indexed
from sink.targets.iceberg.java_table import JavaTable
from sink.targets.values import TouchedFiles


def touched_files(table: JavaTable, paths: Collection[str]) -> TouchedFiles:
    """See `Table.touched_files`."""
    scans = table.as_list(table.scan().useSnapshot(table.snapshot_id()).planFiles())
    live = table.scanned_paths(scans)
    places = {path: number for number, path in enumerate(live) if path in paths}
    missing = set(paths) - places.keys()
    if missing:
        raise IndexLostError(f"the key index has rows in {min(missing)}, which is no file of the table")
    files, handles = list[DataFile](), list[JavaObject]()
    vectors, parquet = list[str](), dict[str, dict[str, Any]]()
    for path in sorted(places):
        scan = scans.get(places[path])
        java = scan.file()
        data = table.described(java)
        vector, deletes, by_key = None, list[str](), False
        for delete in table.elements(scan.deletes()):
            content = table.described(delete)
            if content["file-format"].upper() == "PUFFIN":
                vector = content
                vectors.append(json.dumps(content))
            elif content["content"].upper().startswith("POSITION") and content["file-format"].upper() == "PARQUET":
                deletes.append(content["file-path"])
                parquet[content["file-path"]] = content
            else:  # the index was made of rows that Iceberg's own reader has read
                by_key = True
        handles.append(java)
        files.append(
            DataFile(
                indexed(table, data),
                data["file-size-in-bytes"],
                data.get("first-row-id"),
                int(java.dataSequenceNumber()),
                vector=vector,
                deletes=tuple(deletes),
                by_key=by_key,
            )
        )
    staying = set(live) - places.keys()
    dangling = [json.dumps(content) for content in parquet.values() if _is_dangling(table, content, staying)]
    return TouchedFiles(files, handles, [*vectors, *dangling], len(live))


def _is_dangling(table: JavaTable, deletes: dict[str, Any], staying: set[str]) -> bool:
    """Whether a position delete file applies to no data file that stays."""
    if "referenced-data-file" in deletes:
        return deletes["referenced-data-file"] not in staying
    return staying.isdisjoint(deleted_from(table.spec, deletes["file-path"]))
