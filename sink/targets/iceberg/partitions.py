"""Partition values of rows under an Iceberg partition spec, and the folders that are named for them."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote_plus
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.conversions import to_json
from pyiceberg.partitioning import PartitionField, PartitionFieldValue, PartitionKey, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import BucketTransform, MonthTransform, VoidTransform, YearTransform
from pyiceberg.typedef import Record
from pyiceberg.types import DateType, IcebergType, PrimitiveType, TimestampType, TimestamptzType, UUIDType

from deltawriters.arrow_types import date_text, storage, timestamp_text
from deltawriters.collapse import Ints, dense_ids, grouped
from deltawriters.content import Partition
from deltawriters.partitioning import path_part
from deltawriters.table import Bucket


@dataclass(frozen=True)
class PartitionOfRows(Partition):
    """A partition value of rows at hand. Its text maps partition field ids to JSON single values (spec, "JSON
    single-value serialization").

    :param values: the same in the partition fields' internal types, null allowed.
    """

    values: tuple[Any, ...] = field(compare=False)


@dataclass(frozen=True)
class IcebergBucket(Bucket):
    """:param type: the column's type, which Iceberg's hash depends on."""

    type: IcebergType

    def numbers(self, values: pa.Array) -> Ints:
        numbers: Ints = BucketTransform(self.count).pyarrow_transform(self.type)(aligned(values)).to_numpy()
        return numbers


def key_bucket(spec: PartitionSpec, schema: Schema, key: Sequence[str]) -> IcebergBucket | None:
    """The first key column by whose buckets the spec partitions. None if there is no such column."""
    for part in spec.fields:
        source = schema.find_column_name(part.source_id)
        if isinstance(part.transform, BucketTransform) and source is not None and source in key:
            return IcebergBucket(source, part.transform.num_buckets, schema.find_type(part.source_id))
    return None


def source_columns(spec: PartitionSpec, schema: Schema) -> tuple[str, ...]:
    """Top-level columns that the partition values derive from, without repeats."""
    names = [schema.find_column_name(field.source_id) for field in spec.fields]
    return tuple(dict.fromkeys(name.split(".")[0] for name in names if name is not None))


def split_by_partition(spec: PartitionSpec, schema: Schema, rows: pa.Table) -> Iterator[tuple[Partition, Ints]]:
    """Each partition that occurs in `rows`, with the numbers of its rows in ascending order.

    :param rows: at least the spec's source columns, in the table's Arrow types.
    """
    if spec.is_unpartitioned():
        yield Partition(spec.spec_id, "{}"), np.arange(rows.num_rows)
        return
    columns = [_transformed(field, schema, rows) for field in spec.fields]
    fields = spec.partition_type(schema).fields
    for _, numbers in grouped(dense_ids(columns)[0]):
        values = tuple(_internal_value(column, int(numbers[0])) for column in columns)
        shown = {str(f.field_id): _single_value(f.field_type, v) for f, v in zip(fields, values, strict=True)}
        yield PartitionOfRows(spec.spec_id, json.dumps(shown), values), numbers


def partition_key(partition: Partition, spec: PartitionSpec, schema: Schema) -> PartitionKey | None:
    """What names the folder of the partition's files. None for the folder of all files."""
    if not isinstance(partition, PartitionOfRows):
        return None
    values = [PartitionFieldValue(field, value) for field, value in zip(spec.fields, partition.values, strict=True)]
    return _TransformedKey(values, spec, schema)


def aligned(column: pa.Array) -> pa.Array:
    """`column`, with decimals aligned to 16 bytes. PyIceberg's transforms in Rust panic at other decimals, and Spark's
    Arrow streams align to 8 bytes.
    """
    return column.take(pa.array(np.arange(len(column)))) if pa.types.is_decimal(column.type) else column


class _TransformedKey(PartitionKey):
    """A partition key from transformed values. PyIceberg's own class transforms the values itself, and so allows only
    one partition field for each source column. This class allows any number.
    """

    @property
    def partition(self) -> Record:
        return Record(*(value.value for value in self.field_values))

    def to_path(self) -> str:
        return "/".join(map(path_part, self._whole_path().split("/")))

    def _whole_path(self) -> str:
        try:
            return super().to_path()
        except (OverflowError, ValueError):
            # The year is outside the range of Python's dates. The path may have the stored number instead, because
            # readers take partition values from the metadata, not from the path.
            return "/".join(
                f"{quote_plus(part.field.name)}={quote_plus(str(part.value))}" for part in self.field_values
            )


def _transformed(field: PartitionField, schema: Schema, rows: pa.Table) -> pa.Array:
    name = schema.find_column_name(field.source_id)
    if name is None or isinstance(field.transform, VoidTransform):
        return pa.nulls(rows.num_rows, pa.int32())
    source = aligned(storage(_nested(rows, name.split(".")) if name not in rows.column_names else rows.column(name)))
    transform = field.transform.pyarrow_transform(schema.find_type(field.source_id))
    made = storage(transform(source))
    if made.null_count > source.null_count and isinstance(field.transform, YearTransform | MonthTransform):
        # PyIceberg's transforms in Rust know no years after 262142
        unit = "Y" if isinstance(field.transform, YearTransform) else "M"
        return _since_1970(source, unit)
    return made


def _since_1970(source: pa.Array, unit: str) -> pa.Array:
    """Years (Y) or months (M) of dates or timestamps."""
    is_date = pa.types.is_date(source.type)
    numbers = source.cast(pa.int32() if is_date else pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
    found = numbers.astype(f"datetime64[{'D' if is_date else 'us'}]").astype(f"datetime64[{unit}]").astype(np.int32)
    return pa.array(found, mask=source.is_null().to_numpy(zero_copy_only=False))


def _nested(rows: pa.Table, path: Sequence[str]) -> pa.Array:
    column = rows.column(path[0]).combine_chunks()
    for name in path[1:]:
        column = pc.struct_field(column, name)
    return column


def _internal_value(column: pa.Array, row: int) -> Any:
    """A partition value in Iceberg's internal representation: dates and times are integers."""
    dtype = column.type
    if pa.types.is_date32(dtype):
        column = column.slice(row, 1).cast(pa.int32())
    elif pa.types.is_timestamp(dtype) or pa.types.is_time(dtype):
        column = column.slice(row, 1).cast(pa.int64())
    else:
        column = column.slice(row, 1)
    return column[0].as_py()


def _single_value(dtype: Any, value: Any) -> Any:
    """Like PyIceberg's `to_json`, but dates and times may be outside the years 1 to 9999 that Python knows. They are
    ISO 8601, as Java reads and writes them.
    """
    assert isinstance(dtype, PrimitiveType)
    if value is None:
        return None
    if isinstance(dtype, UUIDType):
        value = UUID(bytes=value)
    if isinstance(dtype, DateType):
        return date_text(value)
    if isinstance(dtype, TimestampType | TimestamptzType):
        return timestamp_text(value, 6) + ("+00:00" if isinstance(dtype, TimestamptzType) else "")
    return to_json(dtype, value)
