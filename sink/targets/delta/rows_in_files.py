"""Reads columns of data files with the rows' positions, in tasks and without Delta's reader: that one tells positions
only in tables that may have deletion vectors. The files have none.
"""

import json
from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa

from deltawriters.content import DataFile
from deltawriters.keyindex import IndexedFile
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
    for path, partition in (found.values() for batch in batches for found in batch.to_pylist()):
        file = DataFile(IndexedFile(path, 0, json.loads(partition)))
        for places, rows in table.rows(file, columns=columns):
            rows = rows.select(list(columns)).append_column(PATH, pa.repeat(path, len(places)))
            yield from rows.append_column(ROW, pa.array(places)).combine_chunks().to_batches()
