"""Rows that a minor compaction moves keep their row ids (format version 3; spec, "Row Lineage")."""

from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.io import FileIO

from deltawriters.arrow_types import as_table_types
from deltawriters.collapse import Ints
from deltawriters.content import DataFile, SmallFile
from deltawriters.parquet import all_rows
from deltawriters.table import UnreadableRowsError

ROW_ID = "_row_id"
LAST_UPDATED = "_last_updated_sequence_number"
LINEAGE_FIELDS = (
    {"id": 2147483540, "name": ROW_ID, "type": "long", "required": False},
    {"id": 2147483539, "name": LAST_UPDATED, "type": "long", "required": False},
)


def read_rows(io: FileIO, small: SmallFile, columns: pa.Schema, written: pa.Schema) -> Iterator[tuple[Ints, pa.Table]]:
    """All rows of a data file, in slices of a row group.

    :param columns: the table's columns.
    :param written: the same, or with the columns of the row lineage.
    :return: positions, and their rows in the columns of `written`.
    :raises UnreadableRowsError: the file has other columns than the table.
    """
    for places, rows in all_rows(io, small.path, lambda stored: _check_columns(small, stored, columns)):
        if ROW_ID in written.names:
            rows = _with_row_ids(rows, places, small.first_row_id, small.sequence_number)
        yield places, as_table_types(rows, written)


def with_row_ids(rows: pa.Table, places: Ints, touched: DataFile) -> pa.Table:
    """Rows of a data file with the ids that they have without storing them, if there are columns for these.

    :param places: positions of the rows in the file.
    """
    if ROW_ID not in rows.column_names:
        return rows
    found = _with_row_ids(rows, places, touched.first_row_id, touched.sequence_number)
    return as_table_types(found, rows.schema)


def _with_row_ids(rows: pa.Table, places: Ints, first_row_id: int | None, sequence_number: int) -> pa.Table:
    inherited = {
        ROW_ID: pa.nulls(len(rows), pa.int64()) if first_row_id is None else pa.array(places + first_row_id),
        LAST_UPDATED: pa.repeat(pa.scalar(sequence_number, pa.int64()), len(rows)),
    }
    for name, values in inherited.items():
        if name in rows.column_names:
            stored = rows.column(name)
            rows = rows.set_column(rows.column_names.index(name), name, pc.coalesce(stored, pa.chunked_array([values])))
        else:
            rows = rows.append_column(name, values)
    return rows


def _check_columns(small: SmallFile, found: pa.Schema, columns: pa.Schema) -> None:
    """Check that the file's columns have the names and field ids of the table's columns, and so have all fields inside
    of them. The rewriter finds columns by name, as a cast finds the fields of structs. The schema id of the file's
    commit doesn't tell which schema the file was written with.

    :raises UnreadableRowsError: names or field ids differ.
    """
    if _names(field for field in found if field.name not in (ROW_ID, LAST_UPDATED)) != _names(columns):
        raise UnreadableRowsError(f"{small.path} has other columns than the table")


def _names(fields: Iterable[pa.Field]) -> dict[str, Any]:
    """Of each field its id, and the same of what is inside of it."""
    return {field.name: (_field_id(field), _inside(field.type)) for field in fields}


def _inside(dtype: pa.DataType) -> Any:
    """Elements of lists, and keys and values of maps, have names that mean nothing."""
    if pa.types.is_struct(dtype):
        return _names(dtype)
    if pa.types.is_map(dtype):
        parts = [dtype.key_field, dtype.item_field]
    elif pa.types.is_list(dtype) or pa.types.is_large_list(dtype) or pa.types.is_fixed_size_list(dtype):
        parts = [dtype.value_field]
    else:
        return None
    return [(_field_id(part), _inside(part.type)) for part in parts]


def _field_id(field: pa.Field) -> bytes | None:
    """The Parquet field id. It is the id of the column in the table's schema."""
    return (field.metadata or {}).get(b"PARQUET:field_id")
