"""Rows that an Iceberg table has, read by file and position (spec, "Column Projection").

A file may be of any writer, and older than the table's schema. Columns are found by field id, or by the table's name
mapping. A column that the file lacks has the value of an identity partition, else its initial default, else null.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import pyarrow as pa
from pyiceberg.conversions import from_json
from pyiceberg.exceptions import ResolveError
from pyiceberg.io.pyarrow import UnsupportedPyArrowTypeException, _to_requested_schema, pyarrow_to_schema
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.name_mapping import parse_mapping_from_json
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import PrimitiveType

from deltawriters.collapse import Ints
from deltawriters.keyindex import IndexedFile
from deltawriters.partitioning import as_table_types
from deltawriters.table import OtherColumnsError

NAME_MAPPING = "schema.name-mapping.default"
_OTHER_FORMATS = (".orc", ".avro")


Part = TypeVar("Part", slice, Ints)
Choose = Callable[[pa.Schema], Sequence[str]]


def present_rows(
    file: IndexedFile,
    read: Callable[[Choose], Iterator[tuple[Part, pa.Table]]],
    wanted: Schema,
    types: pa.Schema,
    spec: PartitionSpec | None,
    properties: Mapping[str, str],
) -> Iterator[tuple[Part, pa.Table]]:
    """See `TableSpec.present_rows` and `copied_rows`.

    :param read: reads rows of the file (`deltawriters.parquet`). It is given what chooses the columns.
    :param wanted: the columns to read.
    :param types: the same in Arrow.
    :param spec: the file's.
    :param properties: the table's.
    """
    if file.path.endswith(_OTHER_FORMATS):
        raise OtherColumnsError(f"{file.path} is no Parquet file")
    mapping = properties.get(NAME_MAPPING)
    stored, ids = Schema(), {field.field_id for field in wanted.fields}

    def choose(physical: pa.Schema) -> Sequence[str]:
        nonlocal stored
        try:
            names = parse_mapping_from_json(mapping) if mapping is not None else None
            found = pyarrow_to_schema(physical, names, downcast_ns_timestamp_to_us=True)
        except (ValueError, UnsupportedPyArrowTypeException) as error:
            raise OtherColumnsError(f"{file.path} has columns that can't be read: {error}") from None
        stored = Schema(*(field for field in found.fields if field.field_id in ids))
        return [field.name for field in stored.fields]

    of_partition = _of_partition(file, wanted, spec)
    for part, rows in read(choose):
        if rows.num_columns:
            batch = rows.combine_chunks().to_batches()[0]
        else:
            count = part.stop - part.start if isinstance(part, slice) else len(part)
            batch = pa.RecordBatch.from_arrays([pa.nulls(count)], ["_rowdelta_nothing"])
        try:
            found = _to_requested_schema(
                wanted,
                stored,
                batch,
                downcast_ns_timestamp_to_us=True,
                projected_missing_fields=of_partition,
                allow_timestamp_tz_mismatch=True,
            )
        except ResolveError as error:
            raise OtherColumnsError(f"{file.path} has other columns than the table: {error}") from None
        yield part, as_table_types(pa.Table.from_batches([found]), types)


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
