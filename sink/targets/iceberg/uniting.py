"""New deletion vectors of data files that may have one already (v3): old and newly deleted positions united. No Spark:
this runs on the driver or in tasks (`sink.spark.deletes`).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from pyroaring import BitMap64

from deltawriters.content import Partition
from deltawriters.keyindex import IndexedFile
from deltawriters.old_rows import DeleteGroup
from deltawriters.vectors import LostVectorError
from sink.targets.iceberg.position_deletes import positions_in
from sink.targets.iceberg.puffin import place_of, read_deletion_vectors, write_deletion_vectors
from sink.targets.iceberg.writers import IcebergTableSpec


@dataclass(frozen=True)
class Before:
    """What deletes rows of a data file already.

    :param vector: its vector, as `ContentFileParser` JSON.
    :param parquet_deletes: position delete files that apply to it, if it has no vector.
    """

    vector: Mapping[str, Any] | None
    parquet_deletes: tuple[str, ...]


def unite(
    name: str, table: IcebergTableSpec, group: DeleteGroup[Before], created: list[str]
) -> list[Mapping[str, Any]]:
    """Write the new vectors of a group into one Puffin file. Returns them as `ContentFileParser` JSON.

    :param name: beginning of the file's name.
    :param created: the path of the file is added to it before the file is written.
    :raises LostVectorError: an old vector is damaged.
    :raises CorruptIndexError: see `DeletedRows.positions`.
    """
    earlier = _stored_vectors(table, [old.vector for old in group.facts.values() if old.vector is not None])
    vectors = []
    for file, positions in group.rows.positions():
        positions |= earlier.pop(file.path, BitMap64())
        for deletes in group.facts[file.path].parquet_deletes:
            positions |= positions_in(table.io, deletes, file.path)
        vectors.append((file.path, _partition(file), positions))
    # several tasks write such files for a commit, and Spark may run a task twice
    puffin = table.locations.new_data_location(f"{name}-{uuid4().hex}-deletes.puffin", None)
    created.append(puffin)
    return [vector.description for vector in write_deletion_vectors(table.io, puffin, vectors)]


def _partition(file: IndexedFile) -> Partition:
    return Partition(file.spec_id, json.dumps(file.partition))


def _stored_vectors(table: IcebergTableSpec, vectors: Sequence[Mapping[str, Any]]) -> dict[str, BitMap64]:
    """Data file -> deleted positions, read from vectors that are given as `ContentFileParser` JSON."""
    by_path: dict[str, list[Mapping[str, Any]]] = {}
    for vector in vectors:
        by_path.setdefault(vector["file-path"], []).append(vector)
    stored: dict[str, BitMap64] = {}
    for path, members in by_path.items():
        places = [place_of(vector) for vector in members]
        try:
            bitmaps = read_deletion_vectors(table.io, path, places)
        except (FileNotFoundError, ValueError) as error:  # after others, the storage may answer the next time
            raise LostVectorError(str(error)) from error
        stored |= {vector["referenced-data-file"]: found for vector, found in zip(members, bitmaps, strict=True)}
    return stored
