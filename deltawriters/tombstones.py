"""Deleted keys with the order values of their deletes, in files beside the table's own.

The key index knows them too. These files are for an index that is built again, and for other sinks of the table. Each
is a Parquet file with the key's columns by the table's names and in its types, `_rowdelta_order` (binary,
`changelog.order_values`) and `_rowdelta_deleted_at` (timestamp, microseconds, UTC): from when on it counts how long the
row is deleted (`deltawriters.late.deleted_at`). Its name begins with the last of these times.
"""

from collections.abc import Iterable, Sequence
from io import BytesIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from changelog.rows import PREFIX
from deltawriters.table import TableSpec

ORDER_VALUE, DELETED_AT = f"{PREFIX}order", f"{PREFIX}deleted_at"
_SPEC = b"rowdelta.order"
Seconds = npt.NDArray[np.uint32]


def folder_of(root: str) -> str:
    """Where the files are. Neither Iceberg's nor Delta's removal of orphans looks into folders that begin with `_`.

    :param root: see `TableSpec.data_root`.
    """
    return f"{root.rstrip('/')}/_rowdelta/deleted"


def path_of(table: TableSpec, name: str) -> str:
    """Where a file is, by its name (`name_of`)."""
    return name if "/" in name else f"{folder_of(table.location)}/{name}"


def last_delete(name: str) -> int:
    """The time in the name of a file. 0 if it has none: it isn't one of ours."""
    head = name.rpartition("/")[2].partition("-")[0]
    return int(head) if head.isdecimal() else 0


def name_of(table: TableSpec, rows: pa.Table, unique: str) -> str:
    """The name of a file for these rows, of which there is at least one. It is the whole path if the table's files are
    elsewhere, since that may change.
    """
    name = f"{pc.max(rows.column(DELETED_AT)).cast(pa.int64()).as_py() // 1_000_000}-{unique}.parquet"
    return name if table.data_root == table.location else f"{folder_of(table.data_root)}/{name}"


def write_tombstones(table: TableSpec, name: str, spec: str, rows: pa.Table) -> None:
    """Write a file.

    :param spec: says how the order values were made (`OrderColumns`).
    :param rows: the columns of the file.
    """
    content = BytesIO()
    pq.write_table(rows.replace_schema_metadata({_SPEC: spec}), content, compression="zstd")
    with table.io.new_output(path_of(table, name)).create(overwrite=True) as stream:
        stream.write(content.getvalue())


def read_tombstones(table: TableSpec, name: str, spec: str, key: Sequence[str]) -> pa.Table | None:
    """The rows of a file. None if it was written for another key or order.

    :raises FileNotFoundError: the file is gone.
    """
    with table.io.new_input(path_of(table, name)).open() as stream:
        file = pq.ParquetFile(BytesIO(stream.read()))
    columns = [*key, ORDER_VALUE, DELETED_AT]
    if file.schema_arrow.metadata.get(_SPEC) != spec.encode() or set(file.schema_arrow.names) != set(columns):
        return None
    return file.read(columns).replace_schema_metadata(None)


def since(rows: Iterable[pa.Table], horizon: int) -> pa.Table:
    """The deletes that aren't older than `horizon`, in seconds since 1970."""
    table = pa.concat_tables(rows)
    return table.filter(pc.greater_equal(table.column(DELETED_AT).cast(pa.int64()), horizon * 1_000_000))


def seconds_of(times: pa.Array | pa.ChunkedArray) -> Seconds:
    """Values of `DELETED_AT` in seconds since 1970, as index entries have them."""
    micros = times.cast(pa.int64()).to_numpy()
    seconds: Seconds = np.clip(micros // 1_000_000, 1, 2**32 - 1).astype(np.uint32)
    return seconds
