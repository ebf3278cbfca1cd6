"""Deletes of earlier rows that are written for a commit: a vector a data file (v3), or delete files (v2)."""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pyspark.sql import SparkSession

from deltawriters.old_rows import DeletedRows, FoundRows
from deltawriters.vectors import LostVectorError
from sink.errors import TableError
from sink.spark.deletes import unite_deletes
from sink.targets.iceberg.position_deletes import write_position_deletes
from sink.targets.iceberg.uniting import Before, unite
from sink.targets.iceberg.writers import IcebergTableSpec
from sink.targets.values import WrittenDeletes

_BYTES_A_ROW = 8
"""Cost of a row in a v2 delete file, in bytes of a vector that take as long to unite."""


def write_deletes(
    spark: SparkSession,
    table_name: str,
    table: IcebergTableSpec,
    name: str,
    rows: DeletedRows,
    known: Callable[[str], Mapping[str, Any] | None],
    parquet_deletes: Mapping[str, Sequence[str]],
    created: list[str],
) -> WrittenDeletes:
    """See `Table.delete_rows`.

    :param table_name: for messages.
    :raises TableError: a vector is damaged, so nothing tells which rows of its file are live.
    """
    if not rows.found:
        return WrittenDeletes()
    if table.format_version < 3:
        nothing = dict.fromkeys(rows.found)  # delete files come beside those that there are
        write = functools.partial(write_position_deletes, name)
        files = unite_deletes(spark, table_name, table, rows, nothing, _cost_by_position, write, created)
        return WrittenDeletes(
            [json.dumps(file.description) for file in files],
            bytes=sum(file.size_in_bytes for file in files),
            delete_files=len(files),
        )
    before = {path: Before(known(path), tuple(parquet_deletes.get(path, ()))) for path in rows.found}
    try:
        vectors = unite_deletes(
            spark, table_name, table, rows, before, _cost_of_vector, functools.partial(unite, name), created
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


def _cost_by_position(found: FoundRows, _: None) -> int:
    return _BYTES_A_ROW * found.rows


def _cost_of_vector(found: FoundRows, before: Before) -> int:
    return found.size + (0 if before.vector is None else int(before.vector["content-size-in-bytes"]))
