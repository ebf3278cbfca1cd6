"""Deletes of earlier rows of a Delta table: new deletion vectors that the driver writes for a commit.

A file gets its vector by a `remove` of what is live and an `add` of the same path with the new vector (PROTOCOL.md,
"Action Reconciliation"). The `remove` must name the live vector: Delta doesn't check it, and without it both files
would be live. A file without a live row is only removed.
"""

import json
import time
from collections.abc import Mapping
from typing import Any

import pyarrow.parquet as pq
from pyroaring import BitMap64

from deltawriters.keyindex import IndexedFile
from deltawriters.keyindex.versions import IndexLostError
from sink.errors import TableError
from sink.targets.base import WrittenDeletes
from sink.targets.delta.deletes import stored_vectors
from sink.targets.delta.live_files import Add, relative
from sink.targets.delta.statistics import with_wide_bounds
from sink.targets.delta.vectors import read_vectors
from sink.targets.delta.writers import DeltaTableSpec


def written_deletes(
    name: str,
    table: DeltaTableSpec,
    rows: Mapping[str, tuple[IndexedFile, BitMap64]],
    live: Mapping[str, Add],
    created: list[str],
) -> WrittenDeletes:
    """See `Target.delete_rows`.

    :param name: name of the table, for messages.
    :param live: the live files where the rows were looked up, by decoded path.
    :raises IndexLostError: a file isn't live.
    :raises TableError: a vector is missing or damaged, so nothing tells which rows of its file are live.
    """
    unknown = [path for path in rows if relative(table.location, path) not in live]
    if unknown:
        raise IndexLostError(f"the key index has rows in {unknown[0]}, which is no file of the table")
    adds = {path: _counted(table, path, live[relative(table.location, path)]) for path in rows}
    before = _live_vectors(name, table, adds)
    united, files, removed = dict[str, BitMap64](), list[str](), list[str]()
    vectors = dict[str, Mapping[str, Any] | None]()
    for path, (_, deleted) in rows.items():
        positions = BitMap64(deleted) | before.get(path, BitMap64())
        if path in before and len(positions) == len(before[path]):
            continue  # somebody else has deleted these rows already
        removed.append(json.dumps(remove_of(adds[path])))
        if len(positions) < physical_rows(adds[path]):
            united[path] = positions
        else:
            vectors[path] = None
    for path, vector in zip(united, stored_vectors(table, list(united.values()), created), strict=True):
        vectors[path] = {**vector, "record-count": vector["cardinality"]}
        files.append(json.dumps(with_vector(adds[path], vector)))
    return WrittenDeletes(files, removed, vectors)


def _counted(table: DeltaTableSpec, path: str, add: Add) -> Add:
    """The `add` with statistics that have at least the number of rows, which a file with a vector must have. Other
    writers may leave them out.
    """
    if "numRecords" in json.loads(add.get("stats") or "{}"):
        return add
    with table.io.new_input(path).open() as stream:
        rows = pq.ParquetFile(stream).metadata.num_rows
    return {**add, "stats": json.dumps({**json.loads(add.get("stats") or "{}"), "numRecords": rows})}


def _live_vectors(name: str, table: DeltaTableSpec, adds: Mapping[str, Add]) -> dict[str, BitMap64]:
    known = {path: add["deletionVector"] for path, add in adds.items() if add.get("deletionVector") is not None}
    try:
        return dict(zip(known, read_vectors(table.io, table.location, list(known.values())), strict=True))
    except (OSError, ValueError) as error:
        raise TableError(
            f"{name}: a deletion vector of the table can't be read, so nothing tells which rows are live: {error}. "
            "Nothing was applied. Restore the file, or take the table back to a version that doesn't need it (RESTORE)."
        ) from error


def remove_of(add: Add, *, data_change: bool = True) -> dict[str, Any]:
    """The `remove` of a live file (PROTOCOL.md, "Add File and Remove File")."""
    same = ("path", "partitionValues", "size", "deletionVector", "tags", "baseRowId", "defaultRowCommitVersion")
    content = {key: add[key] for key in same if add.get(key) is not None}
    now = int(time.time() * 1000)
    return {"remove": {**content, "dataChange": data_change, "deletionTimestamp": now, "extendedFileMetadata": True}}


def with_vector(add: Add, vector: Mapping[str, Any]) -> dict[str, Any]:
    """The `add` of a live file with another vector. Its statistics are bounds now, and no more than that."""
    stats = with_wide_bounds(add["stats"])
    return {"add": {**add, "dataChange": True, "stats": stats, "deletionVector": dict(vector)}}


def physical_rows(add: Add) -> int:
    """Rows in the file, live or not."""
    return int(json.loads(add["stats"])["numRecords"])
