"""Deletes of earlier rows of a Delta table: the actions by which data files get new deletion vectors.

A file gets its vector by a `remove` of what is live and an `add` of the same path with the new vector (PROTOCOL.md,
"Action Reconciliation"). The `remove` must name the live vector: Delta doesn't check it, and without it both files
would be live. A file without a live row is only removed.
"""

import json
import time
from collections.abc import Iterable, Mapping
from typing import Any

from pyspark.sql import SparkSession

from deltawriters.content import DataFile
from deltawriters.keyindex.versions import IndexLostError
from deltawriters.old_rows import DeletedRows, FoundRows
from deltawriters.scratch import Scratch
from sink.spark.deletes import unite_deletes
from sink.targets.delta.live_files import Add, relative
from sink.targets.delta.statistics import with_wide_bounds
from sink.targets.delta.uniting import write_new_vectors
from sink.targets.delta.writers import DeltaTableSpec
from sink.targets.values import WrittenDeletes


def write_deletes(
    spark: SparkSession,
    name: str,
    table: DeltaTableSpec,
    rows: DeletedRows,
    live: Mapping[str, Add],
    scratch: Scratch,
) -> WrittenDeletes:
    """See `Table.delete_rows`.

    :param name: name of the table, for messages.
    :param live: the live files where the rows were looked up, by decoded path.
    :raises IndexLostError: a file isn't live.
    :raises TableError: see `unite_deletes`.
    """
    adds = live_adds(table.location, live, rows.found)
    known = {
        path: DataFile(rows.found[path].file, rows=stated_rows(add), vector=add.get("deletionVector"))
        for path, add in adds.items()
    }
    changed = unite_deletes(spark, name, table, rows, known, _cost, write_new_vectors, scratch)
    files, vectors, size = list[str](), dict[str, Mapping[str, Any] | None](), 0
    for file in changed:
        vectors[file.path] = None
        if file.vector is not None:
            vectors[file.path] = {**file.vector, "record-count": file.vector["cardinality"]}
            files.append(json.dumps(with_vector(adds[file.path], file.rows, file.vector)))
            size += file.vector["sizeInBytes"]
    return WrittenDeletes(files, [json.dumps(remove_of(adds[file.path])) for file in changed], vectors, size)


def live_add(location: str, live: Mapping[str, Add], path: str) -> Add | None:
    """The `add` of a file, if it is live; see `live_adds`."""
    return live.get(relative(location, path)) or live.get(path)  # the log may have a full path, too


def live_adds(location: str, live: Mapping[str, Add], paths: Iterable[str]) -> dict[str, Add]:
    """The `add` of each of some files.

    :param live: the live files by decoded path.
    :param paths: as tasks name them.
    :raises IndexLostError: a file isn't live.
    """
    adds = dict[str, Add]()
    for path in paths:
        add = live_add(location, live, path)
        if add is None:
            raise IndexLostError(f"the key index has rows in {path}, which is no file of the table")
        adds[path] = add
    return adds


def stated_rows(add: Add) -> int | None:
    """Rows in the file, if the log says so. Other writers may leave it out."""
    rows: int | None = json.loads(add.get("stats") or "{}").get("numRecords")
    return rows


def _cost(found: FoundRows, file: DataFile) -> int:
    return found.size + (0 if file.vector is None else int(file.vector["sizeInBytes"]))


def remove_of(add: Add, *, data_change: bool = True) -> dict[str, Any]:
    """The `remove` of a live file (PROTOCOL.md, "Add File and Remove File")."""
    same = ("path", "partitionValues", "size", "deletionVector", "tags", "baseRowId", "defaultRowCommitVersion")
    content = {key: add[key] for key in same if add.get(key) is not None}
    now = int(time.time() * 1000)
    return {"remove": {**content, "dataChange": data_change, "deletionTimestamp": now, "extendedFileMetadata": True}}


def with_vector(add: Add, rows: int, vector: Mapping[str, Any]) -> dict[str, Any]:
    """The `add` of a live file of so many rows with another vector. Its statistics are bounds now, and no more than
    that.
    """
    stats = with_wide_bounds(add.get("stats") or "{}", rows)
    return {"add": {**add, "dataChange": True, "stats": stats, "deletionVector": dict(vector)}}
