"""The writer of one task for a table that only grows: inserts in, data files out.

The writer compares nothing, so it needs no key and no order, and writes no deletes. The commit makes sure that each
insert is applied once: it stores the source position together with the files.
"""

import pyarrow as pa
import pyarrow.compute as pc

from changelog.rows import KIND, RowKind
from deltawriters.arrow_types import as_table_types
from deltawriters.content import DataFiles, TaskId
from deltawriters.delta import WriteResult
from deltawriters.ordering import RowOrder
from deltawriters.partitioning import PartitionedWriter
from deltawriters.table import FileFactory, TableSpec

FLUSH_BYTES = 128 * 1024 * 1024
"""The writer buffers this many Arrow bytes before it writes rows, since each write makes at least one row group."""


class AppendWriter:
    """Writes one task's share of a commit.

    `write` takes record batches of changelog rows. All of them must be +I, or -D in place of a row that the table
    doesn't want (`changelog.wanted`), and none a `_rowdelta_bad` row.

    :param order: see `PartitionedWriter`, and for `lasting`.
    """

    def __init__(self, table: TableSpec, task: TaskId, order: RowOrder | None = None, *, lasting: bool = False) -> None:
        self._table = table
        self._factory = FileFactory(table, task)
        self._data = PartitionedWriter(table, self._factory, DataFiles(), order, lasting=lasting)
        self._buffer: list[pa.RecordBatch] = []
        self._buffered_bytes = 0
        self._rows, self._left_out = 0, 0

    @property
    def created_paths(self) -> list[str]:
        """Every path that this task has opened. A failed job deletes these files."""
        return self._factory.created

    def write(self, changes: pa.RecordBatch) -> None:
        """Take a batch of inserts."""
        wanted = pc.equal(changes.column(KIND), int(RowKind.INSERT))
        if not pc.all(wanted).as_py():
            self._left_out += len(changes) - pc.sum(wanted).as_py()
            changes = changes.filter(wanted)
        rows = changes.select(self._table.arrow_schema.names)
        self._buffer.append(rows)
        self._buffered_bytes += rows.nbytes
        self._rows += rows.num_rows
        if self._buffered_bytes >= FLUSH_BYTES:
            self._flush(last=False)

    def close(self) -> WriteResult:
        """Write what is buffered and finish all files."""
        self._flush(last=True)
        counts = {RowKind.INSERT: self._rows, RowKind.DELETE: self._left_out}
        rows = {kind.short: counts.get(kind, 0) for kind in RowKind}
        return WriteResult(self._data.close(), rows)

    def abort(self) -> None:
        """Give up: close open files and delete everything written."""
        self._data.abort()
        self._factory.delete_all()

    def _flush(self, last: bool) -> None:
        if self._buffer:
            rows = pa.Table.from_batches(self._buffer).combine_chunks()
            self._buffer, self._buffered_bytes = [], 0
            self._data.write(as_table_types(rows, self._table.arrow_schema), last)
