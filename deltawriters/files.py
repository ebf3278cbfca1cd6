"""The rolling writer of the data files of one partition."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from deltawriters.collapse import Ints
from deltawriters.content import ContentFile, DataFiles, Locations, Partition
from deltawriters.parquet import ParquetFileWriter
from deltawriters.table import FileFactory, TableSpec

if TYPE_CHECKING:
    from deltawriters.ordering import RowOrder


class RollingFileWriter:
    """Writes the data files of one partition. It starts a new file when the current file has reached the table's target
    size.

    :param order: in which the rows of each write are written. None leaves them as they come.
    :param lasting: see `ParquetFileWriter`.
    """

    def __init__(
        self,
        table: TableSpec,
        factory: FileFactory,
        files: DataFiles,
        partition: Partition,
        order: "RowOrder | None" = None,
        *,
        lasting: bool = False,
    ) -> None:
        self._order = order
        self._lasting = lasting
        self._table = table
        self._factory = factory
        self._files = files
        self._partition = partition
        self._current: ParquetFileWriter | None = None
        self._number = -1
        self._done: list[ContentFile] = []

    def write(self, rows: pa.Table) -> Locations:
        """Write `rows` (the table's columns and Arrow types), and return the place of each row."""
        file = np.empty(rows.num_rows, np.int64)
        pos = np.empty(rows.num_rows, np.int64)
        for numbers, chunk in self._row_groups(rows):
            writer = self._writer()
            file[numbers] = self._number
            pos[numbers] = np.arange(writer.rows, writer.rows + chunk.num_rows)
            writer.write(chunk)
            if writer.size() >= self._table.target_file_size:
                self._roll()
        return Locations(file, pos)

    def close(self) -> list[ContentFile]:
        """Finish the open file and return all files of this partition."""
        self._roll()
        return self._done

    def abort(self) -> None:
        if self._current is not None:
            self._current.abort()

    def _writer(self) -> ParquetFileWriter:
        if self._current is None:
            path = self._factory.new_path(self._partition)
            self._number = self._files.add(path, self._partition)
            self._current = ParquetFileWriter(
                self._table.io,
                path,
                self._table.file_schema,
                self._table.compression,
                lasting=self._lasting,
                notes=self._table.footer_notes,
            )
        return self._current

    def _roll(self) -> None:
        if self._current is None:
            return
        facts = self._current.close()
        self._done.append(self._table.data_file(self._current.path, self._partition, facts))
        self._current = None

    def _row_groups(self, rows: pa.Table) -> Iterator[tuple[slice | Ints, pa.Table]]:
        """Cut `rows` into row groups, as a data file has them, each with the numbers of its rows. A row group is at
        most as large as the smaller of row group size and target file size, in Arrow bytes. So a file exceeds its
        target size by at most one row group.
        """
        in_file = self._table.file_rows(rows)
        limit = min(self._table.row_group_size, self._table.target_file_size)
        per_row = max(1, in_file.nbytes // max(1, rows.num_rows))
        length = max(1, limit // per_row)
        if self._order is None:
            for start in range(0, rows.num_rows, length):
                chunk = in_file.slice(start, length)
                yield slice(start, start + chunk.num_rows), chunk
            return
        order = self._order.permutation(rows)
        batches = in_file.to_batches()
        for start in range(0, rows.num_rows, length):
            numbers = order[start : start + length]
            yield numbers, _taken(batches, numbers)


def _taken(batches: list[pa.RecordBatch], numbers: Ints) -> pa.Table:
    """Some rows of several batches, in any order. All batches together may be larger than memory has room for twice, so
    they aren't joined.
    """
    if len(batches) == 1:
        return pa.Table.from_batches([batches[0].take(pa.array(numbers))])
    ends = np.cumsum([len(batch) for batch in batches])
    by_place = np.argsort(numbers)
    batch, ascending = np.searchsorted(ends, numbers[by_place], side="right"), numbers[by_place]
    parts = []
    found, first = np.unique(batch, return_index=True)
    for number, places in zip(found.tolist(), np.split(ascending, first[1:]), strict=True):
        start = ends[number] - len(batches[number])
        parts.append(batches[number].take(pa.array(places - start)))
    back = np.empty_like(by_place)
    back[by_place] = np.arange(len(numbers))
    return pa.Table.from_batches(parts).combine_chunks().take(pa.array(back))
