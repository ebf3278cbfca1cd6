"""Descriptors of written files, in the JSON that Iceberg's `ContentFileParser` reads."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any
from uuid import UUID

import numpy as np
from pyiceberg.conversions import to_json
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.types import DateType, PrimitiveType, TimestampType, TimestamptzType, UUIDType


class FileContent(Enum):
    """Iceberg's `FileContent`, by the enum names that every `ContentFileParser` since 1.10 accepts."""

    DATA = "DATA"
    POSITION_DELETES = "POSITION_DELETES"
    EQUALITY_DELETES = "EQUALITY_DELETES"


@dataclass(frozen=True)
class Metrics:
    """Column metrics of one file by field id, as Iceberg stores them in manifests (spec, "Data File Fields").

    Bounds are single-value serialized (Appendix D), already truncated as the table's metrics mode asks.
    """

    column_sizes: Mapping[int, int]
    value_counts: Mapping[int, int]
    null_value_counts: Mapping[int, int]
    nan_value_counts: Mapping[int, int]
    lower_bounds: Mapping[int, bytes]
    upper_bounds: Mapping[int, bytes]
    split_offsets: tuple[int, ...] = ()


NO_METRICS = Metrics({}, {}, {}, {}, {}, {})


@dataclass(frozen=True)
class Partition:
    """A partition value under a spec. `values` are in the partition fields' internal types, null allowed."""

    spec: PartitionSpec
    values: tuple[Any, ...]

    @property
    def spec_id(self) -> int:
        return self.spec.spec_id

    def json(self, schema: Schema) -> dict[str, Any]:
        """Partition field id -> JSON single value (spec, "JSON single-value serialization")."""
        result: dict[str, Any] = {}
        for partition_field, value in zip(self.spec.partition_type(schema).fields, self.values, strict=True):
            dtype = partition_field.field_type
            assert isinstance(dtype, PrimitiveType)
            result[str(partition_field.field_id)] = None if value is None else _single_value(dtype, value)
        return result


def _single_value(dtype: PrimitiveType, value: Any) -> Any:
    """Like PyIceberg's `to_json`, but dates and times may be outside the years 1 to 9999 that Python knows. They are
    ISO 8601, as Java reads and writes them.
    """
    if isinstance(dtype, UUIDType):
        value = UUID(bytes=value)
    if not isinstance(dtype, DateType | TimestampType | TimestamptzType):
        return to_json(dtype, value)
    moment = np.datetime64(value, "D" if isinstance(dtype, DateType) else "us")
    year = int(moment.astype("datetime64[Y]").astype(int)) + 1970
    shown = f"{year:04d}" if 0 <= year <= 9999 else f"{year:+05d}"
    # NumPy writes years above 9999 without a sign, and 44 BC with three digits: so we write the year ourselves
    _, rest = str(moment).lstrip("-").split("-", 1)
    return f"{shown}-{rest}{'+00:00' if isinstance(dtype, TimestamptzType) else ''}"


@dataclass(frozen=True)
class StoredPartition:
    """A partition value as the key index stores it: JSON text, which the sink passes on without parsing the values.

    So a spec whose source column was dropped stays usable.
    """

    spec_id: int
    text: str

    def json(self, schema: Schema) -> dict[str, Any]:
        result: dict[str, Any] = json.loads(self.text)
        return result


@dataclass(frozen=True)
class ContentFile:
    """One written data or delete file, with all facts that a commit needs: the commit doesn't open the file."""

    content: FileContent
    path: str
    partition: Partition | StoredPartition
    record_count: int
    size_in_bytes: int
    metrics: Metrics = NO_METRICS
    equality_ids: tuple[int, ...] = ()
    file_format: str = "PARQUET"
    referenced_data_file: str | None = None
    content_offset: int | None = None
    content_size_in_bytes: int | None = None

    def to_json(self, schema: Schema) -> dict[str, Any]:
        """The object that `ContentFileParser.fromJson` reads."""
        result: dict[str, Any] = {
            "spec-id": self.partition.spec_id,
            "content": self.content.value,
            "file-path": self.path,
            "file-format": self.file_format,
            "partition": self.partition.json(schema),
            "file-size-in-bytes": self.size_in_bytes,
            "record-count": self.record_count,
        }
        metrics = self.metrics
        for name, counts in (
            ("column-sizes", metrics.column_sizes),
            ("value-counts", metrics.value_counts),
            ("null-value-counts", metrics.null_value_counts),
            ("nan-value-counts", metrics.nan_value_counts),
        ):
            if counts:
                result[name] = {"keys": list(counts), "values": list(counts.values())}
        for name, bounds in (("lower-bounds", metrics.lower_bounds), ("upper-bounds", metrics.upper_bounds)):
            if bounds:
                result[name] = {"keys": list(bounds), "values": [b.hex().upper() for b in bounds.values()]}
        if metrics.split_offsets:
            result["split-offsets"] = list(metrics.split_offsets)
        if self.equality_ids:
            result["equality-ids"] = list(self.equality_ids)
        if self.referenced_data_file is not None:
            result["referenced-data-file"] = self.referenced_data_file
        if self.content_offset is not None:
            result["content-offset"] = self.content_offset
            result["content-size-in-bytes"] = self.content_size_in_bytes
        return result
