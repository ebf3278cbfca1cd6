"""Deletes of earlier rows that the driver writes for a commit: a vector a data file (v3), or delete files (v2)."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from pyroaring import BitMap64

from deltawriters import TaskId
from deltawriters.content import Partition
from deltawriters.keyindex import IndexedFile
from deltawriters.resolve import OldRows, delete_rows
from deltawriters.vectors import bitmap, positions_of
from sink.targets.base import WrittenDeletes
from sink.targets.iceberg.puffin import read_deletion_vectors, write_deletion_vectors
from sink.targets.iceberg.writers import IcebergTableSpec


def written_deletes(
    table: IcebergTableSpec,
    name: str,
    tasks: int,
    rows: Mapping[str, tuple[IndexedFile, BitMap64]],
    known: Callable[[str], Mapping[str, Any] | None],
    parquet_deletes: Mapping[str, Sequence[str]],
    created: list[str],
) -> WrittenDeletes:
    """See `Target.delete_rows`."""
    files, removed, vectors = list[str](), list[str](), dict[str, Mapping[str, Any]]()
    if table.format_version < 3:
        # positions that tasks have already deleted themselves are empty here
        old = (OldRows(file, positions_of(deleted)) for file, deleted in rows.values() if len(deleted))
        for delete in delete_rows(table, TaskId(tasks, 0, name), old):
            created.append(delete.path)
            files.append(json.dumps(delete.description))
    elif rows:
        replaced = {path: vector for path in rows if (vector := known(path)) is not None}
        earlier = _stored_vectors(table, list(replaced.values()))
        united = []
        for path, (file, deleted) in rows.items():
            positions = BitMap64(deleted)
            if path in earlier:
                positions |= earlier[path]
                removed.append(json.dumps(replaced[path]))
            for deletes in parquet_deletes.get(path, ()):
                positions |= _parquet_positions(table, deletes, path)
            united.append((path, _partition(file), positions))
        puffin = table.locations.new_data_location(f"{name}-deletes.puffin", None)
        created.append(puffin)
        for new in write_deletion_vectors(table.io, puffin, united):
            vectors[new.description["referenced-data-file"]] = new.description
            files.append(json.dumps(new.description))
    return WrittenDeletes(files, removed, vectors)


def _partition(file: IndexedFile) -> Partition:
    return Partition(file.spec_id, json.dumps(file.partition))


def _stored_vectors(table: IcebergTableSpec, vectors: Sequence[Mapping[str, Any]]) -> dict[str, BitMap64]:
    """Data file -> deleted positions, read from vectors that are given as `ContentFileParser` JSON."""
    by_path: dict[str, list[Mapping[str, Any]]] = {}
    for vector in vectors:
        by_path.setdefault(vector["file-path"], []).append(vector)
    stored: dict[str, BitMap64] = {}
    for path, members in by_path.items():
        places = [(vector["content-offset"], vector["content-size-in-bytes"]) for vector in members]
        bitmaps = read_deletion_vectors(table.io, path, places)
        stored |= {vector["referenced-data-file"]: found for vector, found in zip(members, bitmaps, strict=True)}
    return stored


def _parquet_positions(table: IcebergTableSpec, deletes: str, data_file: str) -> BitMap64:
    with table.io.new_input(deletes).open() as stream:
        rows = pq.read_table(stream, columns=["pos"], filters=[("file_path", "=", data_file)])
    return bitmap(rows.column("pos").to_numpy().astype(np.int64))
