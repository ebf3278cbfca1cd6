"""A table in memory that applies Iceberg's scan rules to written files: the model that delta writer tests read back
with.

It follows the spec's "Scan Planning" by the letter and shares no code with the writers: an equality delete reaches data
files with a lower sequence number in the same partition of the same spec (any partition if its spec is unpartitioned),
a position delete reaches sequence numbers lower or equal.
"""

from dataclasses import dataclass, field
from typing import Any

import pyarrow.parquet as pq
from pyiceberg.table.deletion_vector import deletion_vectors_from_puffin_file
from pyiceberg.table.puffin import PuffinFile

from deltawriters import ContentFile, FileContent
from sink.targets.iceberg.writers import IcebergTableSpec


@dataclass
class Lake:
    table: IcebergTableSpec
    snapshots: list[list[ContentFile]] = field(default_factory=list)

    def commit(self, files: list[ContentFile]) -> None:
        self.snapshots.append(files)

    def rows(self) -> list[dict[str, Any]]:
        """Live rows of the latest snapshot."""
        files = [(number, file) for number, files in enumerate(self.snapshots) for file in files]
        live = []
        for sequence, data in files:
            if data.content is not FileContent.DATA:
                continue
            dead = set[int]()
            keys: list[tuple[tuple[str, ...], set[tuple[Any, ...]]]] = []
            for delete_sequence, delete in files:
                if delete.content is FileContent.POSITION_DELETES and delete_sequence >= sequence:
                    dead |= _positions(delete, data.path)
                if delete.content is FileContent.EQUALITY_DELETES and delete_sequence > sequence:
                    unpartitioned = self.table.specs_by_id[delete.description["spec-id"]].is_unpartitioned()
                    if unpartitioned or _same_partition(delete, data):
                        keys.append(_keys(delete))
            for position, row in enumerate(pq.read_table(data.path).to_pylist()):
                deleted = any(tuple(row[name] for name in names) in values for names, values in keys)
                if position not in dead and not deleted:
                    live.append(row)
        return live


def _same_partition(delete: ContentFile, data: ContentFile) -> bool:
    return all(delete.description[name] == data.description[name] for name in ("spec-id", "partition"))


def _positions(delete: ContentFile, path: str) -> set[int]:
    if delete.description["file-format"] == "PUFFIN":
        if delete.description["referenced-data-file"] != path:
            return set()
        with open(delete.path, "rb") as stream:
            vectors = deletion_vectors_from_puffin_file(PuffinFile(stream.read()))
        (vector,) = [v for v in vectors if v.referenced_data_file == path]
        return set(vector.to_vector().to_pylist())
    rows = pq.read_table(delete.path).to_pylist()
    assert rows == sorted(rows, key=lambda row: (row["file_path"], row["pos"])), "position deletes must be sorted"
    return {row["pos"] for row in rows if row["file_path"] == path}


def _keys(delete: ContentFile) -> tuple[tuple[str, ...], set[tuple[Any, ...]]]:
    table = pq.read_table(delete.path)
    return tuple(table.column_names), {tuple(row.values()) for row in table.to_pylist()}
