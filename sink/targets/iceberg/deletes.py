"""Deletes of earlier rows that are written for a commit: a vector a data file (v3), or delete files (v2)."""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pyspark.sql import SparkSession

from deltawriters.content import DataFile
from deltawriters.old_rows import DeletedRows, FoundRows
from deltawriters.scratch import Scratch
from sink.spark.deletes import unite_deletes
from sink.targets.iceberg.position_deletes import write_position_deletes
from sink.targets.iceberg.uniting import write_vectors
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
    scratch: Scratch,
) -> WrittenDeletes:
    """See `Table.delete_rows`.

    :param table_name: for messages.
    :raises TableError: see `unite_deletes`.
    """
    if not rows.found:
        return WrittenDeletes()
    if table.format_version < 3:
        nothing = dict.fromkeys(rows.found)  # delete files come beside those that there are
        write = functools.partial(write_position_deletes, name)
        files = unite_deletes(spark, table_name, table, rows, nothing, _cost_by_position, write, scratch)
        return WrittenDeletes(
            [json.dumps(file.description) for file in files],
            bytes=sum(file.size_in_bytes for file in files),
            delete_files=len(files),
        )
    known_files = {
        path: DataFile(found.file, vector=known(path), deletes=tuple(parquet_deletes.get(path, ())))
        for path, found in rows.found.items()
    }
    write_new = functools.partial(write_vectors, name)
    new = unite_deletes(spark, table_name, table, rows, known_files, _cost_of_vector, write_new, scratch)
    vectors = {vector["referenced-data-file"]: vector for vector in new}
    return WrittenDeletes(
        [json.dumps(vector) for vector in new],
        [json.dumps(known_files[path].vector) for path in vectors if known_files[path].vector is not None],
        vectors,
        sum(vector["content-size-in-bytes"] for vector in new),
    )


def _cost_by_position(found: FoundRows, _: None) -> int:
    return _BYTES_A_ROW * found.rows


def _cost_of_vector(found: FoundRows, file: DataFile) -> int:
    return found.size + (0 if file.vector is None else int(file.vector["content-size-in-bytes"]))
