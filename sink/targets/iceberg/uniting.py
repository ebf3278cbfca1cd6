"""Puffin files of new deletion vectors (v3). No Spark: this runs on the driver or in tasks (`sink.spark.deletes`)."""

import json
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from deltawriters.content import DataFile, Partition
from deltawriters.old_rows import DeleteGroup
from deltawriters.scratch import Scratch
from deltawriters.uniting import unite
from sink.targets.iceberg.puffin import write_deletion_vectors
from sink.targets.iceberg.writers import IcebergTableSpec


def write_vectors(
    name: str, table: IcebergTableSpec, group: DeleteGroup[DataFile], scratch: Scratch
) -> list[Mapping[str, Any]]:
    """Write the new vectors of a group into one Puffin file. Returns them as `ContentFileParser` JSON.

    :param name: beginning of the file's name.
    :param scratch: gets the file.
    :raises LostVectorError: see `unite`.
    :raises CorruptIndexError: see `unite`.
    """
    vectors = [
        (data.path, Partition(data.file.spec_id, json.dumps(data.file.partition)), positions)
        for data, positions in unite(table, group)
    ]
    if not vectors:
        return []
    # several tasks write such files for a commit, and Spark may run a task twice
    puffin = table.locations.new_data_location(f"{name}-{uuid4().hex}-deletes.puffin", None)
    scratch.add(puffin)
    return [vector.description for vector in write_deletion_vectors(table.io, puffin, vectors)]
