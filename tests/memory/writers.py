"""How delta writers write the table in memory: Parquet files in a dictionary, with deletion vectors in the table's own
metadata.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyroaring import BitMap64

from deltawriters import ContentFile, FileContent, TableSpec
from deltawriters.arrow_types import storage
from deltawriters.collapse import Ints
from deltawriters.content import DataFile, DataFiles, Partition
from deltawriters.deletes import FLUSH_THRESHOLD, Deletes, KeyDeletes
from deltawriters.parquet import Compression, ParquetFacts
from deltawriters.table import FileFactory, Projection
from deltawriters.vectors import bitmap
from tests.memory.storage import MemoryFiles


def parquet(content: bytes, columns: list[str] | None = None) -> pa.Table:
    """Read a small file. To wake other threads would take longer."""
    rows: pa.Table = pq.ParquetFile(pa.BufferReader(content)).read(columns, use_threads=False)
    return rows


@dataclass(frozen=True)
class MemoryTableSpec(TableSpec):
    """:param schema: the table's columns.
    :param partitioned_by: a column, or nothing.
    :param files: where data files are.
    :param file_size: bytes at which a data file is finished.
    """

    schema: pa.Schema = field(default_factory=lambda: pa.schema([]))
    partitioned_by: str | None = None
    files: MemoryFiles = field(default_factory=lambda: MemoryFiles({}, None), compare=False, repr=False)
    file_size: int = 1 << 20
    properties: tuple[tuple[str, str], ...] = ()

    @property
    def io(self) -> MemoryFiles:
        return self.files

    @cached_property
    def properties_by_name(self) -> Mapping[str, str]:
        return dict(self.properties)

    @property
    def arrow_schema(self) -> pa.Schema:
        return self.schema

    @property
    def file_schema(self) -> pa.Schema:
        return self.schema

    def file_rows(self, rows: pa.Table) -> pa.Table:
        return rows

    @property
    def source_columns(self) -> tuple[str, ...]:
        return () if self.partitioned_by is None else (self.partitioned_by,)

    def split_by_partition(self, rows: pa.Table) -> Iterator[tuple[Partition, Ints]]:
        if self.partitioned_by is None:
            yield Partition(0, "{}"), np.arange(len(rows))
            return
        column = storage(rows.column(self.partitioned_by))
        for value in column.unique():
            same = pc.is_null(column) if value.as_py() is None else pc.fill_null(pc.equal(column, value), False)
            text = json.dumps({self.partitioned_by: value.as_py()})
            yield Partition(0, text), np.flatnonzero(same.to_numpy(zero_copy_only=False))

    def new_path(self, name: str, partition: Partition) -> str:
        return f"{self.location}/{name}"

    @property
    def target_file_size(self) -> int:
        return self.file_size

    def with_target_file_size(self, size: int) -> "MemoryTableSpec":
        return replace(self, file_size=size)

    @property
    def row_group_size(self) -> int:
        return 1 << 20

    @property
    def compression(self) -> Compression:
        return Compression("uncompressed")

    def data_file(self, path: str, partition: Partition, facts: ParquetFacts) -> ContentFile:
        description = {
            "path": path,
            "partition": partition.text,
            "rows": facts.rows,
            "size": facts.size_in_bytes,
            "columns": self.schema.names,
        }
        return ContentFile(FileContent.DATA, path, facts.rows, facts.size_in_bytes, description)

    def deletes(self, factory: FileFactory, files: DataFiles, flush_threshold: int = FLUSH_THRESHOLD) -> Deletes:
        return _Vectors(files)

    def key_deletes(self, factory: FileFactory, key: tuple[str, ...]) -> KeyDeletes:
        raise ValueError("this format has no deletes by key")

    def of_moved_rows(self, *, data_change: bool) -> TableSpec:
        return self

    def projection(self, file: DataFile, columns: Sequence[str] | None) -> Projection:
        wanted = self.schema.names if columns is None else columns
        return _Projection(pa.schema([self.schema.field(name) for name in wanted]))

    def rows(
        self,
        file: DataFile,
        *,
        at: Ints | None = None,
        left_out: Ints | None = None,
        columns: Sequence[str] | None = None,
    ) -> Iterator[tuple[Ints, pa.Table]]:
        if at is not None or left_out is not None:
            self.files.step("read a data file")
        return super().rows(file, at=at, left_out=left_out, columns=columns)

    def read_vectors(self, vectors: Sequence[Mapping[str, Any]]) -> list[BitMap64]:
        return [bitmap(np.array(vector["positions"], np.int64)) for vector in vectors]

    def deleted_rows(self, path: str) -> tuple[list[str], Ints, Ints]:
        raise ValueError("this format has no delete files")


class _Projection(Projection):
    """By name. What a file lacks is NULL."""

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema

    def choose(self, physical: pa.Schema) -> Sequence[str]:
        return [name for name in self.schema.names if name in physical.names]

    def project(self, rows: pa.Table, positions: Ints) -> pa.Table:
        for part in self.schema:
            if part.name not in rows.column_names:
                rows = rows.append_column(part, pa.nulls(len(positions), part.type))
        return rows


class _Vectors(Deletes):
    """Deletes of rows of the same commit, in the descriptions of their files."""

    def __init__(self, files: DataFiles) -> None:
        self._files = files
        self._deleted: defaultdict[str, set[int]] = defaultdict(set)

    def delete(self, file: Ints, pos: Ints) -> None:
        for number, position in zip(file.tolist(), pos.tolist(), strict=True):
            self._deleted[self._files.path(number)].add(position)

    def close(self, data_files: list[ContentFile]) -> list[ContentFile]:
        return [_with_vector(file, sorted(self._deleted[file.path])) for file in data_files]


def _with_vector(file: ContentFile, positions: list[int]) -> ContentFile:
    if not positions:
        return file
    vector = {"positions": positions, "record-count": len(positions)}
    return replace(file, description={**file.description, "vector": vector}, vector=(file.path, vector))
