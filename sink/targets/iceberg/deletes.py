"""Deletes of earlier rows that are written for a commit: a vector a data file (v3), or delete files (v2)."""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pyspark.sql import SparkSession

from deltawriters import TaskId
from deltawriters.old_rows import DeletedRows
from deltawriters.resolve import OldRows, delete_rows
from deltawriters.vectors import LostVectorError, positions_of
from sink.errors import TableError
from sink.spark.vectors import new_vectors
from sink.targets.base import WrittenDeletes
from sink.targets.iceberg.uniting import Before, united
from sink.targets.iceberg.writers import IcebergTableSpec


def written_deletes(
    spark: SparkSession,
    table_name: str,
    table: IcebergTableSpec,
    name: str,
    tasks: int,
    rows: DeletedRows,
    known: Callable[[str], Mapping[str, Any] | None],
    parquet_deletes: Mapping[str, Sequence[str]],
    created: list[str],
) -> WrittenDeletes:
    """See `Target.delete_rows`.

    :param table_name: for messages.
    :raises TableError: a vector is damaged, so nothing tells which rows of its file are live.
    """
    if table.format_version < 3:
        # positions that tasks have already deleted themselves are empty here
        old = (OldRows(file, positions_of(deleted)) for file, deleted in rows.positions() if len(deleted))
        files, size = list[str](), 0
        for delete in delete_rows(table, TaskId(tasks, 0, name), old):
            created.append(delete.path)
            files.append(json.dumps(delete.description))
            size += delete.size_in_bytes
        return WrittenDeletes(files, bytes=size)
    if not rows.found:
        return WrittenDeletes()
    before = {path: Before(known(path), tuple(parquet_deletes.get(path, ()))) for path in rows.found}
    try:
        vectors = new_vectors(
            spark, table_name, table, rows, before, _old_bytes, functools.partial(united, name), created
        )
    except LostVectorError as error:
        raise TableError(
            f"{table_name}: a deletion vector of the table can't be read, so nothing tells which rows are live: "
            f"{error}. Nothing was applied. Restore the file, or roll the table back to a snapshot that doesn't need "
            "it."
        ) from error
    return WrittenDeletes(
        [json.dumps(vector) for vector in vectors],
        [json.dumps(old.vector) for old in before.values() if old.vector is not None],
        {vector["referenced-data-file"]: vector for vector in vectors},
        sum(vector["content-size-in-bytes"] for vector in vectors),
    )


def _old_bytes(before: Before) -> int:
    return 0 if before.vector is None else int(before.vector["content-size-in-bytes"])
