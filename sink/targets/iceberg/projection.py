"""Rows that an Iceberg table has, read by file and position (spec, "Column Projection").

A file may be of any writer, and older than the table's schema. Columns are found by field id, or by the table's name
mapping. A column that the file lacks has the value of an identity partition, else its initial default, else null.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyiceberg.conversions import from_json
from pyiceberg.exceptions import ResolveError
from pyiceberg.io.pyarrow import (
    ArrowAccessor,
    ArrowProjectionVisitor,
    UnsupportedPyArrowTypeException,
    pyarrow_to_schema,
)
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema, visit_with_partner
from pyiceberg.table.name_mapping import parse_mapping_from_json
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import ListType, MapType, PrimitiveType

from deltawriters.arrow_types import with_elements
from deltawriters.collapse import Ints
from deltawriters.content import DataFile
from deltawriters.keyindex import IndexedFile
from deltawriters.table import Projection, UnreadableRowsError
from sink.targets.iceberg.row_lineage import with_row_ids

NAME_MAPPING = "schema.name-mapping.default"
_OTHER_FORMATS = (".orc", ".avro")


class IcebergProjection(Projection):
    """See `Projection`.

    :param file: with what its rows inherit: the ids that they don't store.
    :param wanted: the columns to read.
    :param schema: the same in Arrow.
    :param spec: the file's.
    :param properties: the table's.
    """

    def __init__(
        self,
        file: DataFile,
        wanted: Schema,
        schema: pa.Schema,
        spec: PartitionSpec | None,
        properties: Mapping[str, str],
    ) -> None:
        if file.path.endswith(_OTHER_FORMATS):
            raise UnreadableRowsError(f"{file.path} is no Parquet file")
        self.schema = schema
        self._file = file
        self._wanted = wanted
        self._mapping = properties.get(NAME_MAPPING)
        self._of_partition = _of_partition(file.file, wanted, spec)
        self._stored = Schema()

    def choose(self, physical: pa.Schema) -> Sequence[str]:
        try:
            names = parse_mapping_from_json(self._mapping) if self._mapping is not None else None
            found = pyarrow_to_schema(physical, names, downcast_ns_timestamp_to_us=True)
        except (ValueError, UnsupportedPyArrowTypeException) as error:
            raise UnreadableRowsError(f"{self._file.path} has columns that can't be read: {error}") from None
        ids = {field.field_id for field in self._wanted.fields}
        self._stored = Schema(*(field for field in found.fields if field.field_id in ids))
        return [field.name for field in self._stored.fields]

    def project(self, rows: pa.Table, positions: Ints) -> pa.Table:
        if not rows.num_columns:
            rows = pa.table({"_rowdelta_nothing": pa.nulls(len(positions))})
        try:
            # text of more than 2 GB has several chunks, whatever is done to unite them
            found = [self._projected(batch) for batch in rows.to_batches()]
        except ResolveError as error:
            raise UnreadableRowsError(f"{self._file.path} has other columns than the table: {error}") from None
        return with_row_ids(pa.Table.from_batches(found), positions, self._file) if found else self.schema.empty_table()

    def _projected(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        visitor = _Projection(
            self._stored,
            downcast_ns_timestamp_to_us=True,
            projected_missing_fields=dict(self._of_partition),
            allow_timestamp_tz_mismatch=True,
        )
        columns = visit_with_partner(self._wanted, batch, visitor, ArrowAccessor(self._stored))
        return pa.RecordBatch.from_struct_array(columns)


class _Projection(ArrowProjectionVisitor):
    """PyIceberg's, whose lists and maps of structs forget which of them are NULL
    (https://github.com/apache/iceberg-python/issues/3833), and which finds fields of structs in lists of lists by name.
    """

    def list(self, list_type: ListType, list_array: pa.Array | None, value_array: pa.Array | None) -> pa.Array | None:
        if isinstance(list_array, pa.FixedSizeListArray) and isinstance(value_array, pa.StructArray):
            raise ResolveError("it has lists of a fixed size, of structs")
        if not isinstance(list_array, pa.ListArray | pa.LargeListArray) or value_array is None:
            return super().list(list_type, list_array, value_array)
        values = self._cast_if_needed(list_type.element_field, value_array)
        field = self._construct_field(list_type.element_field, values.type)
        is_large = isinstance(list_array, pa.LargeListArray)
        return with_elements(list_array, pa.large_list(field) if is_large else pa.list_(field), values)

    def map(
        self, map_type: MapType, map_array: pa.Array | None, key_result: pa.Array | None, value_result: pa.Array | None
    ) -> pa.Array | None:
        if not isinstance(map_array, pa.MapArray) or key_result is None or value_result is None:
            return super().map(map_type, map_array, key_result, value_result)
        keys = self._cast_if_needed(map_type.key_field, key_result)
        values = self._cast_if_needed(map_type.value_field, value_result)
        dtype = pa.map_(
            self._construct_field(map_type.key_field, keys.type),
            self._construct_field(map_type.value_field, values.type),
        )
        entries = pa.StructArray.from_arrays([keys, values], fields=[dtype.key_field, dtype.item_field])
        return with_elements(map_array, dtype, entries)


def _of_partition(file: IndexedFile, wanted: Schema, spec: PartitionSpec | None) -> dict[int, Any]:
    """Values of columns that may be missing in the file since all of its rows have the same: by field id."""
    values: dict[int, Any] = {}
    for part in spec.fields if spec is not None else ():
        if isinstance(part.transform, IdentityTransform) and part.source_id in wanted.field_ids:
            text = file.partition.get(str(part.field_id))
            if text is not None:
                values[part.source_id] = from_json(_primitive(wanted, part.source_id), text)
    return values


def _primitive(schema: Schema, field_id: int) -> PrimitiveType:
    dtype = schema.find_type(field_id)
    assert isinstance(dtype, PrimitiveType)  # partition values derive from no others
    return dtype
