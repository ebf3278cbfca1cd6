"""The file of new deletion vectors. No Spark: this runs on the driver or in tasks (`sink.spark.deletes`)."""

from dataclasses import dataclass
from typing import Any

import pyarrow.parquet as pq
from pyroaring import BitMap64

from deltawriters.content import DataFile
from deltawriters.old_rows import DeleteGroup
from deltawriters.scratch import Scratch
from deltawriters.uniting import unite
from sink.targets.delta.deletes import write_vectors
from sink.targets.delta.writers import DeltaTableSpec


@dataclass(frozen=True)
class After:
    """A data file from which rows are deleted that were live.

    :param rows: rows in the file, live or not.
    :param vector: its new vector. None if no row is live any more.
    """

    path: str
    rows: int
    vector: dict[str, Any] | None


def write_new_vectors(table: DeltaTableSpec, group: DeleteGroup[DataFile], scratch: Scratch) -> list[After]:
    """Write the new vectors of a group into one file. A file without a live row gets none.

    :param scratch: gets the file.
    :raises LostVectorError: see `unite`.
    :raises CorruptIndexError: see `unite`.
    """
    gone, staying = list[After](), list[tuple[str, int, BitMap64]]()
    for data, positions in unite(table, group):
        rows = _counted(table, data.path) if data.rows is None else data.rows
        if len(positions) < rows:
            staying.append((data.path, rows, positions))
        else:
            gone.append(After(data.path, rows, None))
    vectors = write_vectors(table, [positions for _, _, positions in staying], scratch.add)
    return gone + [After(path, rows, vector) for (path, rows, _), vector in zip(staying, vectors, strict=True)]


def _counted(table: DeltaTableSpec, path: str) -> int:
    with table.io.new_input(path).open() as stream:
        return int(pq.ParquetFile(stream).metadata.num_rows)
