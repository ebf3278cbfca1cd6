"""How the delta writers write a Delta table. No Spark and no JVM: this runs in Python workers.

DeltaTableSpec     what the writers know about the table
├─ schema.py       columns in Arrow, with physical names and field ids
├─ partitions.py   partition values of rows, and folders
├─ statistics.py   the `stats` of an `add` action
├─ projection.py   rows of data files, which may be older than the schema
├─ deletes.py      rows of the commit that a later change superseded
└─ vectors.py      deletion vectors
"""

import json
import string
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import pyarrow as pa
from pyiceberg.io import FileIO
from pyroaring import BitMap64

from deltawriters.collapse import Ints
from deltawriters.content import ContentFile, DataFile, DataFiles, FileContent, Partition
from deltawriters.deletes import FLUSH_THRESHOLD, Deletes, KeyDeletes
from deltawriters.parquet import Compression, ParquetFacts
from deltawriters.storage import file_io
from deltawriters.table import FileFactory, Projection, TableSpec
from sink.targets.delta.deletes import VectorDeletes
from sink.targets.delta.partitions import encoded_path, folder, split_by_partition
from sink.targets.delta.projection import DeltaProjection
from sink.targets.delta.schema import Column, columns_of
from sink.targets.delta.statistics import Path, indexed, statistics
from sink.targets.delta.vectors import Descriptor, read_vectors

VECTORS = "delta.enableDeletionVectors"
MAPPING_MODE = "delta.columnMapping.mode"
TARGET_FILE_SIZE = "delta.targetFileSize"
_TARGET_FILE_SIZE_DEFAULT = 512 * 1024 * 1024
_ROW_GROUP_SIZE = 128 * 1024 * 1024
_RANDOM_PREFIXES = "delta.randomizeFilePrefixes"
_PREFIX_LENGTH = "delta.randomPrefixLength"
_CODEC = "delta.parquet.compression.codec"
_CODECS = {"none": "uncompressed", "lz4_raw": "lz4", "lz4raw": "lz4"}
"""Names of codecs that are others here."""
_PROLEPTIC = {"org.apache.spark.version": "4.0.0"}
"""The convention of a version of Spark from 3.0 on: dates and times are of the proleptic Gregorian calendar."""
_SUFFIXES = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_ALPHANUMERIC = string.ascii_letters + string.digits


@dataclass(frozen=True)
class DeltaTableSpec(TableSpec):
    """What the writers know about a Delta table.

    :param location: root of the table, not encoded: `DeltaLog.dataPath` as a text.
    :param schema: `schemaString` of the table's metadata.
    :param partition_columns: `partitionColumns` of the table's metadata.
    :param properties: `configuration` of the table's metadata.
    :param supports_vectors: the table's protocol has the feature `deletionVectors`.
    :param io_properties: how files are reached. They may hold credentials, so `repr` doesn't show them.
    :param moves_rows: the rows are in the table already, in other files.
    """

    location: str
    schema: str
    partition_columns: tuple[str, ...] = ()
    properties: tuple[tuple[str, str], ...] = ()
    supports_vectors: bool = False
    io_properties: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    moves_rows: bool = False

    @cached_property
    def properties_by_name(self) -> dict[str, str]:
        return dict(self.properties)

    @property
    def has_vectors(self) -> bool:
        """Whether new deletion vectors may be written (PROTOCOL.md, "Deletion Vectors")."""
        return self.supports_vectors and self._is_set(VECTORS)

    @cached_property
    def columns(self) -> tuple[Column, ...]:
        """The table's columns, partition columns among them."""
        return columns_of(self.schema, self._mapping)

    @cached_property
    def partitioning(self) -> tuple[Column, ...]:
        """The partition columns, in the table's order of them."""
        by_name = {column.name: column for column in self.columns}
        return tuple(by_name[name] for name in self.partition_columns)

    @cached_property
    def arrow_schema(self) -> pa.Schema:
        return pa.schema([column.logical_field for column in self.columns])

    @cached_property
    def file_schema(self) -> pa.Schema:
        return pa.schema([column.physical_field for column in self._written])

    def file_rows(self, rows: pa.Table) -> pa.Table:
        return _seen_as(rows.select([column.name for column in self._written]), self.file_schema)

    @property
    def source_columns(self) -> tuple[str, ...]:
        return self.partition_columns

    def split_by_partition(self, rows: pa.Table) -> Iterator[tuple[Partition, Ints]]:
        return split_by_partition(self.partitioning, rows)

    def new_path(self, name: str, partition: Partition) -> str:
        """In the partition's folder, or in one of a random name, as Delta's own writer has it."""
        place = self.random_prefix(name) or folder(self.partitioning, json.loads(partition.text))
        return f"{self._root}/{place}/{name}" if place else f"{self._root}/{name}"

    def random_prefix(self, name: str) -> str:
        """A folder for the file `name`, always the same one. Empty if the table doesn't want one."""
        if self._mapping == "none" and not self._is_set(_RANDOM_PREFIXES):
            return ""
        number = zlib.crc32(name.encode())
        length = int(self.properties_by_name.get(_PREFIX_LENGTH, 2))
        letters = (number // len(_ALPHANUMERIC) ** i % len(_ALPHANUMERIC) for i in range(length))
        return "".join(_ALPHANUMERIC[letter] for letter in letters)

    @cached_property
    def io(self) -> FileIO:
        return file_io(self.io_properties)

    @cached_property
    def target_file_size(self) -> int:
        text = self.properties_by_name.get(TARGET_FILE_SIZE)
        return _TARGET_FILE_SIZE_DEFAULT if text is None else _bytes(text)

    def with_target_file_size(self, size: int) -> "DeltaTableSpec":
        return replace(self, properties=(*self.properties, (TARGET_FILE_SIZE, str(size))))

    @property
    def row_group_size(self) -> int:
        return _ROW_GROUP_SIZE

    @property
    def compression(self) -> Compression:
        codec = self.properties_by_name.get(_CODEC, "zstd").lower()
        return Compression(_CODECS.get(codec, codec))

    @property
    def footer_notes(self) -> Mapping[str, str]:
        """Without this, Spark before 4.0 takes old dates and times for those of the Julian calendar, or refuses them
        (`DataSourceUtils.datetimeRebaseSpec`).
        """
        return _PROLEPTIC

    def data_file(self, path: str, partition: Partition, facts: ParquetFacts) -> ContentFile:
        stats = statistics(
            facts, self._written, self._indexed, self.properties_by_name, has_bounds_flag=self.supports_vectors
        )
        add = {
            "path": encoded_path(path.removeprefix(f"{self._root}/")),
            "partitionValues": json.loads(partition.text),
            "size": facts.size_in_bytes,
            "modificationTime": time.time_ns() // 1_000_000,
            "dataChange": not self.moves_rows,
            "stats": stats,
        }
        return ContentFile(FileContent.DATA, path, facts.rows, facts.size_in_bytes, {"add": add})

    def deletes(self, factory: FileFactory, files: DataFiles, flush_threshold: int = FLUSH_THRESHOLD) -> Deletes:
        return VectorDeletes(self, factory, files)

    def key_deletes(self, factory: FileFactory, key: tuple[str, ...]) -> KeyDeletes:
        raise ValueError(f"the table at {self.location} is a Delta table, which has no deletes by key")

    def of_moved_rows(self, *, data_change: bool) -> "DeltaTableSpec":
        return self if data_change else replace(self, moves_rows=True)

    def projection(self, file: DataFile, columns: Sequence[str] | None) -> Projection:
        wanted = [column for column in self.columns if columns is None or column.name in columns]
        return DeltaProjection(file.file, wanted, by_id=self.finds_by_id)

    def read_vectors(self, vectors: Sequence[Descriptor]) -> list[BitMap64]:
        return read_vectors(self.io, self.location, vectors)

    def deleted_rows(self, path: str) -> tuple[list[str], Ints, Ints]:
        raise ValueError(f"the table at {self.location} is a Delta table, which has no delete files")

    @property
    def _root(self) -> str:
        return self.location.rstrip("/")

    @property
    def _mapping(self) -> str:
        return self.properties_by_name.get(MAPPING_MODE, "none")

    @property
    def finds_by_id(self) -> bool:
        return self._mapping == "id"

    @cached_property
    def _written(self) -> tuple[Column, ...]:
        """The columns of data files."""
        return tuple(column for column in self.columns if column.name not in self.partition_columns)

    @cached_property
    def _indexed(self) -> tuple[Path, ...]:
        return indexed(self._written, self.properties_by_name)

    def _is_set(self, name: str) -> bool:
        return self.properties_by_name.get(name, "false").lower() == "true"


def _seen_as(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """The same values under other names, also inside of structs. A cast would look for fields by their names."""
    columns = [
        column if column.type == part.type else pa.chunked_array([c.view(part.type) for c in column.chunks], part.type)
        for column, part in zip(rows.columns, schema, strict=True)
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def _bytes(text: str) -> int:
    """A size such as `134217728`, `128m` or `128mb`, as Delta reads it."""
    plain = text.strip().lower().removesuffix("b")
    unit = _SUFFIXES.get(plain[-1:], 1)
    try:
        return int(plain if unit == 1 else plain[:-1]) * unit
    except ValueError:
        raise ValueError(f"{TARGET_FILE_SIZE} is {text!r}; expected a size such as 134217728 or 128mb") from None
