"""Writes each row to the rolling writer of its partition."""

import hashlib
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from deltawriters.content import ContentFile, DataFiles, Locations, Partition
from deltawriters.files import RollingFileWriter
from deltawriters.table import FileFactory, TableSpec

if TYPE_CHECKING:
    from deltawriters.ordering import RowOrder

MAX_OPEN_WRITERS = 64
"""Fanout limit: each open Parquet file holds column buffers, so a task keeps at most this many open at a time."""


_LONGEST_PART = 200
"""Bytes of a folder's name. Most file systems allow 255, and an object's whole name in S3 has at most 1,024."""


def path_part(text: str) -> str:
    """A partition's name as a part of a path: one that is too long is cut, and gets a hash. Readers take partition
    values from the table's metadata, so the path needs no more than to be another one for another partition.
    """
    content = text.encode()
    if len(content) <= _LONGEST_PART:
        return text
    digest = hashlib.sha256(content).hexdigest()[:16]
    kept = content[: _LONGEST_PART - 40].decode(errors="ignore")
    return f"{kept[: kept.rindex('%')] if '%' in kept[-2:] else kept}-{digest}"


LASTING_BYTES = 4 * 1024 * 1024
"""If a task writes at least this many Arrow bytes at once, as in a first load or a large micro-batch, its files are
packed for a long life, even where small files are merged: they are a fifth smaller, and 85,000 rows take 20 ms longer.
"""


class PartitionedWriter:
    """Data files of one task under the table's current layout.

    While rows keep coming, the writer keeps a file open for every partition (fanout). If there are more than
    `MAX_OPEN_WRITERS`, it finishes the least recently used file. In the last write of a task, it writes one partition
    after the other and closes each file at once (clustered), so it holds only one file's buffers at a time.

    :param order: see `RollingFileWriter`.
    :param lasting: pack all files for a long life, not only the files of large writes (`LASTING_BYTES`).
    """

    def __init__(
        self,
        table: TableSpec,
        factory: FileFactory,
        files: DataFiles,
        order: "RowOrder | None" = None,
        *,
        lasting: bool = False,
    ) -> None:
        self._order = order
        self._lasting = lasting
        self._table = table
        self._factory = factory
        self._files = files
        self._open: dict[Partition, RollingFileWriter] = {}
        self._done: list[ContentFile] = []

    def write(self, rows: pa.Table, last: bool = False) -> Locations:
        """Write `rows`, and return the place of each row.

        :param rows: the table's columns and Arrow types.
        :param last: no more rows will come.
        """
        located = Locations(np.empty(rows.num_rows, np.int64), np.empty(rows.num_rows, np.int64))
        for partition, numbers in self._table.split_by_partition(rows):
            writer = self._open.pop(partition, None)
            if writer is None:
                lasting = self._lasting or rows.nbytes >= LASTING_BYTES
                writer = RollingFileWriter(
                    self._table, self._factory, self._files, partition, self._order, lasting=lasting
                )
            self._open[partition] = writer
            part = rows if len(numbers) == rows.num_rows else rows.take(pa.array(numbers))
            written = writer.write(part)
            located.file[numbers] = written.file
            located.pos[numbers] = written.pos
            if last or len(self._open) > MAX_OPEN_WRITERS:
                self._finish(partition if last else next(iter(self._open)))
        return located

    def close(self) -> list[ContentFile]:
        """Finish all files and return them."""
        for partition in list(self._open):
            self._finish(partition)
        return self._done

    def abort(self) -> None:
        for writer in self._open.values():
            writer.abort()

    def _finish(self, partition: Partition) -> None:
        self._done.extend(self._open.pop(partition).close())
