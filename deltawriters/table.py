"""What a writer must know about its table: schema, partition specs, properties, location and storage access."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache
from typing import Any

import pyarrow as pa
from pyiceberg.io import FileIO
from pyiceberg.io.pyarrow import PyArrowFileIO, schema_to_pyarrow
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.locations import LocationProvider, load_location_provider

TARGET_FILE_SIZE = "write.target-file-size-bytes"
TARGET_FILE_SIZE_DEFAULT = 512 * 1024 * 1024
ROW_GROUP_SIZE = "write.parquet.row-group-size-bytes"
ROW_GROUP_SIZE_DEFAULT = 128 * 1024 * 1024


@dataclass(frozen=True)
class TaskId:
    """Names the files of one task attempt, in the way of Iceberg's `OutputFileFactory`.

    `operation` is unique to one attempt at a micro-batch. `attempt` is unique to one task attempt within the
    application. So two attempts never write the same path, and the files of a superseded attempt can be recognised.
    """

    partition: int
    attempt: int
    operation: str

    def file_name(self, sequence: int, extension: str) -> str:
        """`{partition}-{task}-{operation}-{sequence}.{extension}`"""
        return f"{self.partition:05d}-{self.attempt}-{self.operation}-{sequence:05d}.{extension}"


@dataclass(frozen=True)
class TableSpec:
    """What the writers know about an Iceberg table. The fields are plain strings, so that the object pickles small, and
    each worker parses them once.

    `schema` and `specs` are JSON as in Appendix C of the Iceberg spec (`SchemaParser.toJson`,
    `PartitionSpecParser.toJson`). `io_properties` are the catalog's FileIO properties (`s3.endpoint`, …). They may hold
    credentials, so `repr` doesn't show them.
    """

    location: str
    format_version: int
    schema: str
    specs: tuple[str, ...]
    current_spec_id: int
    properties: tuple[tuple[str, str], ...] = ()
    io_properties: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """The fields without the cached properties, which would double the size."""
        return {part.name: getattr(self, part.name) for part in fields(self)}

    @cached_property
    def iceberg_schema(self) -> Schema:
        return _parse_schema(self.schema)

    @cached_property
    def arrow_schema(self) -> pa.Schema:
        """The table's schema in Arrow, with Parquet field ids. Data files have this schema."""
        return _small_types(schema_to_pyarrow(self.iceberg_schema))

    @cached_property
    def specs_by_id(self) -> Mapping[int, PartitionSpec]:
        specs = (PartitionSpec.model_validate_json(spec) for spec in self.specs)
        return {spec.spec_id: spec for spec in specs}

    @cached_property
    def current_spec(self) -> PartitionSpec:
        return self.specs_by_id[self.current_spec_id]

    @cached_property
    def unpartitioned_spec_id(self) -> int | None:
        """Id of the unpartitioned spec, or None if the table has none. Equality deletes under this spec are global
        (spec, "Scan Planning").
        """
        return next((i for i, spec in self.specs_by_id.items() if spec.is_unpartitioned()), None)

    @property
    def unites_deletes(self) -> bool:
        """Whether the deletes of earlier snapshots' rows are written once a commit, instead of by each task.

        This is true in v3, since a data file has only one deletion vector. It is also true in an unpartitioned table,
        where a scan reads each position delete file with every data file. In a partitioned v2 table there may be many
        delete files, so the tasks write them side by side.
        """
        return self.format_version >= 3 or self.current_spec.is_unpartitioned()

    @cached_property
    def properties_by_name(self) -> dict[str, str]:
        return dict(self.properties)

    @cached_property
    def locations(self) -> LocationProvider:
        return load_location_provider(self.location, self.properties_by_name)

    @cached_property
    def io(self) -> FileIO:
        return PyArrowFileIO(dict(self.io_properties))

    @cached_property
    def target_file_size(self) -> int:
        return int(self.properties_by_name.get(TARGET_FILE_SIZE, TARGET_FILE_SIZE_DEFAULT))

    @cached_property
    def row_group_size(self) -> int:
        return int(self.properties_by_name.get(ROW_GROUP_SIZE, ROW_GROUP_SIZE_DEFAULT))


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
