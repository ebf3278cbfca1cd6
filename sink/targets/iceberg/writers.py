"""How the delta writers write an Iceberg table. No Spark and no JVM: this runs in Python workers.

IcebergTableSpec        what the writers know about the table
├─ partitions.py        partition values of rows, and folders
├─ column_metrics.py    column metrics from Parquet footers
├─ position_deletes.py  rows deleted by position: Parquet files (v2), or vectors (v3) in Puffin files (`puffin.py`)
├─ equality.py          rows deleted by key
├─ projection.py        rows of data files, which may be older than the schema
├─ row_lineage.py       row ids of rows that move to other files
└─ content_files.py     what the commit is told about a file
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import pyarrow as pa
from pyiceberg.io import FileIO
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.locations import LocationProvider, load_location_provider
from pyiceberg.transforms import VoidTransform
from pyroaring import BitMap64

from deltawriters.collapse import Ints
from deltawriters.content import ContentFile, DataFile, DataFiles, FileContent, Partition
from deltawriters.deletes import FLUSH_THRESHOLD, Deletes, KeyDeletes
from deltawriters.parquet import Compression, ParquetFacts
from deltawriters.storage import file_io
from deltawriters.table import Bucket, FileFactory, Projection, TableSpec
from sink.targets.iceberg.column_metrics import metrics_of
from sink.targets.iceberg.content_files import content_file
from sink.targets.iceberg.equality import EqualityDeletes
from sink.targets.iceberg.partitions import key_bucket, partition_key, source_columns, split_by_partition
from sink.targets.iceberg.position_deletes import PositionDeletes, read_position_deletes
from sink.targets.iceberg.projection import IcebergProjection
from sink.targets.iceberg.puffin import read_deletion_vectors
from sink.targets.iceberg.row_lineage import LINEAGE_FIELDS
from sink.targets.locations import in_one_form

COMPRESSION = "write.parquet.compression-codec"
COMPRESSION_LEVEL = "write.parquet.compression-level"
TARGET_FILE_SIZE = "write.target-file-size-bytes"
TARGET_FILE_SIZE_DEFAULT = 512 * 1024 * 1024
ROW_GROUP_SIZE = "write.parquet.row-group-size-bytes"
ROW_GROUP_SIZE_DEFAULT = 128 * 1024 * 1024


@dataclass(frozen=True)
class IcebergTableSpec(TableSpec):
    """What the writers know about an Iceberg table.

    `schema` and `specs` are JSON as in Appendix C of the Iceberg spec (`SchemaParser.toJson`,
    `PartitionSpecParser.toJson`). `io_properties` are the catalog's FileIO properties (`s3.endpoint`, …). They may hold
    credentials, so `repr` doesn't show them.
    """

    format_version: int
    schema: str
    specs: tuple[str, ...]
    current_spec_id: int
    properties: tuple[tuple[str, str], ...] = ()
    io_properties: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    @cached_property
    def iceberg_schema(self) -> Schema:
        return _parse_schema(self.schema)

    @cached_property
    def arrow_schema(self) -> pa.Schema:
        """The table's schema in Arrow, with Parquet field ids. Data files have this schema."""
        return _small_types(schema_to_pyarrow(self.iceberg_schema))

    @property
    def file_schema(self) -> pa.Schema:
        return self.arrow_schema

    def file_rows(self, rows: pa.Table) -> pa.Table:
        return rows

    @cached_property
    def specs_by_id(self) -> Mapping[int, PartitionSpec]:
        specs = (PartitionSpec.model_validate_json(spec) for spec in self.specs)
        return {spec.spec_id: spec for spec in specs}

    @cached_property
    def current_spec(self) -> PartitionSpec:
        return self.specs_by_id[self.current_spec_id]

    def keeps_dropped_fields(self, spec_id: int) -> bool:
        """Whether a spec has only dropped partition fields, as in a table that was v1. Iceberg 1.11 can neither write
        nor read the JSON of such a file: it takes their nulls for a contradiction.
        """
        fields = self.specs_by_id[spec_id].fields
        return bool(fields) and all(isinstance(field.transform, VoidTransform) for field in fields)

    @cached_property
    def unpartitioned_spec_id(self) -> int | None:
        """Id of the unpartitioned spec, or None if the table has none. Equality deletes under this spec are global
        (spec, "Scan Planning").
        """
        return next((i for i, spec in self.specs_by_id.items() if spec.is_unpartitioned()), None)

    @cached_property
    def source_columns(self) -> tuple[str, ...]:
        return source_columns(self.current_spec, self.iceberg_schema)

    def split_by_partition(self, rows: pa.Table) -> Iterator[tuple[Partition, Ints]]:
        return split_by_partition(self.current_spec, self.iceberg_schema, rows)

    def key_bucket(self, key: Sequence[str]) -> Bucket | None:
        return key_bucket(self.current_spec, self.iceberg_schema, key)

    def new_path(self, name: str, partition: Partition) -> str:
        """The table's location provider decides the folder."""
        key = partition_key(partition, self.specs_by_id[partition.spec_id], self.iceberg_schema)
        return self.locations.new_data_location(name, key)

    def is_own_file(self, path: str) -> bool:
        """Whether a file is in a folder in which the table's files are written. A file elsewhere may be another
        table's too, such as those of `add_files`.
        """
        return in_one_form(path).startswith(self._own_folders)

    @cached_property
    def _own_folders(self) -> tuple[str, ...]:
        elsewhere = (self.properties_by_name.get(name) for name in ("write.data.path", "write.metadata.path"))
        return tuple(f"{in_one_form(place).rstrip('/')}/" for place in (self.location, *elsewhere) if place)

    @property
    def data_root(self) -> str:
        return self.properties_by_name.get("write.data.path", self.location)

    @cached_property
    def properties_by_name(self) -> dict[str, str]:
        return dict(self.properties)

    @cached_property
    def locations(self) -> LocationProvider:
        return load_location_provider(self.location, self.properties_by_name)

    @cached_property
    def io(self) -> FileIO:
        return file_io(self.io_properties)

    @cached_property
    def target_file_size(self) -> int:
        return int(self.properties_by_name.get(TARGET_FILE_SIZE, TARGET_FILE_SIZE_DEFAULT))

    def with_target_file_size(self, size: int) -> "IcebergTableSpec":
        return replace(self, properties=(*self.properties, (TARGET_FILE_SIZE, str(size))))

    @cached_property
    def row_group_size(self) -> int:
        return int(self.properties_by_name.get(ROW_GROUP_SIZE, ROW_GROUP_SIZE_DEFAULT))

    @cached_property
    def compression(self) -> Compression:
        level = self.properties_by_name.get(COMPRESSION_LEVEL)
        return Compression(
            self.properties_by_name.get(COMPRESSION, "zstd"), level=None if level is None else int(level)
        )

    def data_file(self, path: str, partition: Partition, facts: ParquetFacts) -> ContentFile:
        metrics = metrics_of(facts, self.iceberg_schema, self.properties_by_name)
        return content_file(FileContent.DATA, path, partition, facts.rows, facts.size_in_bytes, metrics)

    def deletes(self, factory: FileFactory, files: DataFiles, flush_threshold: int = FLUSH_THRESHOLD) -> Deletes:
        return PositionDeletes(self, self.format_version, factory, files, flush_threshold)

    def key_deletes(self, factory: FileFactory, key: tuple[str, ...]) -> KeyDeletes:
        fields = [self.iceberg_schema.find_field(name) for name in key]
        return EqualityDeletes(self, factory, fields, self.unpartitioned_spec_id, self.properties_by_name)

    def of_moved_rows(self, *, data_change: bool) -> "IcebergTableSpec":
        """In v3 the table with the columns of the row lineage."""
        if self.format_version < 3:
            return self
        schema = json.loads(self.schema)
        schema["fields"] += LINEAGE_FIELDS
        # These columns get no bounds: a null in them means that the value is inherited, so bounds would mislead.
        no_metrics = tuple((f"write.metadata.metrics.column.{part['name']}", "none") for part in LINEAGE_FIELDS)
        return replace(self, schema=json.dumps(schema), properties=(*self.properties, *no_metrics))

    def projection(self, file: DataFile, columns: Sequence[str] | None) -> Projection:
        wanted = self.iceberg_schema if columns is None else self.iceberg_schema.select(*columns)
        types = pa.schema([self.arrow_schema.field(field.name) for field in wanted.fields])
        return IcebergProjection(file, wanted, types, self.specs_by_id.get(file.file.spec_id), self.properties_by_name)

    def read_vectors(self, vectors: Sequence[Mapping[str, Any]]) -> list[BitMap64]:
        return read_deletion_vectors(self.io, vectors)

    def deleted_rows(self, path: str) -> tuple[list[str], Ints, Ints]:
        return read_position_deletes(self.io, path)


@lru_cache(maxsize=64)
def _parse_schema(json: str) -> Schema:
    return Schema.model_validate_json(json)


def _small_types(schema: pa.Schema) -> pa.Schema:
    """`schema` with 32-bit offsets. PyIceberg's schemas have 64-bit offsets, but Spark sends 32-bit offsets. So the
    cast to the table's types copies nothing.
    """
    return pa.schema([field.with_type(_small_type(field.type)) for field in schema], metadata=schema.metadata)


def _small_type(dtype: pa.DataType) -> pa.DataType:
    if pa.types.is_large_string(dtype):
        return pa.string()
    if pa.types.is_large_binary(dtype):
        return pa.binary()
    if pa.types.is_large_list(dtype):
        return pa.list_(dtype.value_field.with_type(_small_type(dtype.value_type)))
    if pa.types.is_struct(dtype):
        return pa.struct([f.with_type(_small_type(f.type)) for f in dtype])
    if pa.types.is_map(dtype):
        return pa.map_(
            dtype.key_field.with_type(_small_type(dtype.key_type)),
            dtype.item_field.with_type(_small_type(dtype.item_type)),
        )
    return dtype
