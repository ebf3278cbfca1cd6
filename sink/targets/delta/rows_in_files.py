"""Reads columns of data files with the rows' positions, in tasks and without Delta's reader: that one tells positions
only in tables that may have deletion vectors. The files have none.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import numpy as np
import pyarrow as pa

from deltawriters.keyindex import IndexedFile
from deltawriters.parquet import rows_without
from sink.targets.delta.present_rows import present_rows
from sink.targets.delta.writers import DeltaTableSpec

PATH = "_rowdelta_path"
ROW = "_rowdelta_row"
PARTITION = "_rowdelta_partition"


def rows_in_files(
    table: DeltaTableSpec, columns: Sequence[str], batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """All rows of data files, in parts of a row group.

    :param columns: names of the columns to read.
    :param batches: `PATH` and `PARTITION` (JSON) of each file.
    :return: the columns, `PATH`, and the row's position as `ROW`.
    """
    nothing = np.empty(0, np.int64)
    for path, partition in (found.values() for batch in batches for found in batch.to_pylist()):
        file = IndexedFile(path, 0, json.loads(partition))
        read = partial(rows_without, table.io, path, nothing, (0, 1))
        wanted = [column for column in table.columns if column.name in columns]
        for places, rows in present_rows(file, read, wanted, by_id=table.finds_by_id):
            rows = rows.select(list(columns)).append_column(PATH, pa.repeat(path, len(places)))
            yield from rows.append_column(ROW, pa.array(places)).combine_chunks().to_batches()
