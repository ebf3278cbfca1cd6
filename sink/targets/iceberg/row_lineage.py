"""Rows that move to other files keep their row ids (format version 3; spec, "Row Lineage")."""

import pyarrow as pa
import pyarrow.compute as pc

from deltawriters.collapse import Ints
from deltawriters.content import DataFile

ROW_ID = "_row_id"
LAST_UPDATED = "_last_updated_sequence_number"
LINEAGE_FIELDS = (
    {"id": 2147483540, "name": ROW_ID, "type": "long", "required": False},
    {"id": 2147483539, "name": LAST_UPDATED, "type": "long", "required": False},
)


def with_row_ids(rows: pa.Table, positions: Ints, file: DataFile) -> pa.Table:
    """Rows of a data file with the ids that they have without storing them, if there are columns for these.

    :param positions: of the rows in the file.
    """
    if ROW_ID not in rows.column_names:
        return rows
    first = file.first_row_id
    inherited = {
        ROW_ID: pa.nulls(len(rows), pa.int64()) if first is None else pa.array(positions + first),
        LAST_UPDATED: pa.repeat(pa.scalar(file.sequence_number, pa.int64()), len(rows)),
    }
    for name, values in inherited.items():
        found = pc.coalesce(rows.column(name), pa.chunked_array([values]))
        rows = rows.set_column(rows.column_names.index(name), name, found)
    return rows
