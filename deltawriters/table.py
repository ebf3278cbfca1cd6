"""What a writer must know about its table, whatever the table's format. Each format has its own `TableSpec`."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pyarrow as pa
from pyiceberg.io import FileIO
from pyroaring import BitMap64

from deltawriters.arrow_types import as_table_types
from deltawriters.collapse import Ints, grouped
from deltawriters.content import ContentFile, DataFile, DataFiles, Partition, TaskId
from deltawriters.deletes import FLUSH_THRESHOLD, Deletes, KeyDeletes
from deltawriters.keyindex import IndexedFile
from deltawriters.parquet import Compression, ParquetFacts, rows_at, rows_without
from deltawriters.vectors import LostVectorError, bitmap


class UnreadableRowsError(ValueError):
    """A data file's rows can't be read as rows of the table, or nothing tells which of them are live."""


@dataclass(frozen=True)
class Bucket(ABC):
    """A key column. The table is partitioned by it, in `count` buckets."""

    column: str
    count: int

    @abstractmethod
    def numbers(self, values: pa.Array) -> Ints:
        """The bucket of each value, from 0 to `count` - 1.

        :param values: of the column, in the types that Spark gives, without nulls.
        """


class Projection(ABC):
    """Reads rows of one data file as rows of the table, which may be of a later schema.

    :param schema: names and types of the columns.
    """

    schema: pa.Schema

    @abstractmethod
    def choose(self, physical: pa.Schema) -> Sequence[str]:
        """Names of the top-level columns to read.

        :param physical: the file's schema.
        :raises UnreadableRowsError: the rows can't be read as rows of the table.
        """

    @abstractmethod
    def project(self, rows: pa.Table, positions: Ints) -> pa.Table:
        """Rows with the columns of `schema`. A column that the file lacks has the value that the format says.

        :param rows: the chosen columns; without a column there is no row.
        :param positions: of the rows in the file.
        :raises UnreadableRowsError: the rows can't be read as rows of the table.
        """


@dataclass(frozen=True)
class TableSpec(ABC):
    """What the writers know about a table. The fields of a format's class are plain values, so that the object pickles
    small, and each worker parses them once.

    :param location: root of the table's files.
    """

    location: str

    def __getstate__(self) -> dict[str, Any]:
        """The fields without the cached properties, which would double the size."""
        return {part.name: getattr(self, part.name) for part in fields(self)}

    @property
    @abstractmethod
    def io(self) -> FileIO:
        """Reads, writes and deletes the table's files."""

    @property
    def data_root(self) -> str:
        """Root of the files that writers write: `io` reaches what is below it."""
        return self.location

    @property
    @abstractmethod
    def properties_by_name(self) -> Mapping[str, str]:
        """The table's properties, without those in which the sink keeps its state."""

    @property
    @abstractmethod
    def arrow_schema(self) -> pa.Schema:
        """The table's columns. Changes are cast to these types."""

    @property
    @abstractmethod
    def file_schema(self) -> pa.Schema:
        """The columns of data files, with Parquet field ids. A format may leave partition columns out, and give the
        columns other names.
        """

    @abstractmethod
    def file_rows(self, rows: pa.Table) -> pa.Table:
        """Rows as a data file has them. Copies no values.

        :param rows: columns and types of `arrow_schema`.
        :return: columns and types of `file_schema`.
        """

    @property
    @abstractmethod
    def source_columns(self) -> tuple[str, ...]:
        """Top-level columns that the partition values derive from, without repeats."""

    @abstractmethod
    def split_by_partition(self, rows: pa.Table) -> Iterator[tuple[Partition, Ints]]:
        """Each partition that occurs in `rows`, with the numbers of its rows in ascending order.

        :param rows: at least the source columns, in the table's Arrow types.
        """

    def key_bucket(self, key: Sequence[str]) -> Bucket | None:
        """The first key column by whose buckets the table is partitioned. None if there is no such column."""
        return None

    @abstractmethod
    def new_path(self, name: str, partition: Partition) -> str:
        """Where a new file of this name and partition goes."""

    @property
    @abstractmethod
    def target_file_size(self) -> int:
        """Bytes at which a data file is finished."""

    @abstractmethod
    def with_target_file_size(self, size: int) -> "TableSpec":
        """The table as if it wanted data files of so many bytes."""

    @property
    @abstractmethod
    def row_group_size(self) -> int:
        """Arrow bytes of a row group."""

    @property
    @abstractmethod
    def compression(self) -> Compression:
        """How files are compressed."""

    @property
    def footer_notes(self) -> Mapping[str, str]:
        """Key-value metadata in the footer of each data file."""
        return {}

    @abstractmethod
    def data_file(self, path: str, partition: Partition, facts: ParquetFacts) -> ContentFile:
        """The description of a data file that was written."""

    @abstractmethod
    def deletes(self, factory: "FileFactory", files: DataFiles, flush_threshold: int = FLUSH_THRESHOLD) -> Deletes:
        """A task's deletes by position.

        :param factory: names new files.
        :param files: the data files whose numbers `Deletes.delete` takes.
        :param flush_threshold: positions held before a file of positions is written, if the format has such files.
        """

    @abstractmethod
    def key_deletes(self, factory: "FileFactory", key: tuple[str, ...]) -> KeyDeletes:
        """A task's deletes by key.

        :raises ValueError: the format has none.
        """

    @abstractmethod
    def of_moved_rows(self, *, data_change: bool) -> "TableSpec":
        """The table as rows of other files are written to it: with the columns, if the format has them, in which a row
        keeps its id when it moves.

        :param data_change: the same commit deletes or changes rows of these files.
        """

    @abstractmethod
    def projection(self, file: DataFile, columns: Sequence[str] | None) -> Projection:
        """How the rows of a data file are read; see `rows`."""

    def rows(
        self,
        file: DataFile,
        *,
        at: Ints | None = None,
        left_out: Ints | None = None,
        columns: Sequence[str] | None = None,
    ) -> Iterator[tuple[Ints, pa.Table]]:
        """Rows of a data file, or of a part of it, in parts of a row group. Any writer may have written the file,
        perhaps under an earlier schema of the table.

        :param at: positions of the rows in the file, ascending. Only the row groups that have these are read. None
            means all rows.
        :param left_out: positions of rows to leave out, if all others are read; ascending.
        :param columns: names of at least one column. None means all.
        :return: positions, and their rows, with types of `arrow_schema`.
        :raises UnreadableRowsError: the rows can't be read as rows of the table.
        """
        projection = self.projection(file, columns)
        if at is not None:
            parts = rows_at(self.io, file.path, at, projection.choose)
        else:
            left_out = np.empty(0, np.int64) if left_out is None else left_out
            parts = rows_without(self.io, file.path, left_out, file.part, projection.choose)
        for positions, rows in parts:
            yield positions, as_table_types(projection.project(rows, positions), projection.schema)

    def rows_in_files(
        self, files: Sequence[IndexedFile], file: Ints, pos: Ints, columns: Sequence[str]
    ) -> Iterator[tuple[Ints, "pa.Table | UnreadableRowsError"]]:
        """n rows of data files, in parts of a row group; see `rows`.

        :param file: for each row the number of the data file in `files`, and `pos` the position in it.
        :return: numbers of rows, and the rows, or why they can't be read.
        """
        for number, places in grouped(file):
            here = places[np.argsort(pos[places], kind="stable")]
            distinct, row_of = np.unique(pos[here], return_inverse=True)
            done, start = 0, 0
            try:
                for read, rows in self.rows(DataFile(files[number]), at=distinct, columns=columns):
                    stop = int(np.searchsorted(row_of, done + len(read)))
                    repeats = stop - start > len(read)
                    yield here[start:stop], rows.take(pa.array(row_of[start:stop] - done)) if repeats else rows
                    done, start = done + len(read), stop
            except UnreadableRowsError as error:
                yield here[start:], error

    def deleted_in(self, files: Sequence[DataFile]) -> list[BitMap64]:
        """The positions that the table's deletes by position delete in each data file.

        :raises LostVectorError: a vector is missing or damaged.
        """
        try:
            read = iter(self.read_vectors([file.vector for file in files if file.vector is not None]))
        except (FileNotFoundError, ValueError) as error:  # after others, the storage may answer the next time
            raise LostVectorError(str(error)) from error
        found = [BitMap64() if file.vector is None else next(read) for file in files]
        for path in sorted({path for file in files for path in file.deletes}):
            names, codes, pos = self.deleted_rows(path)
            codes_by_path = {name: code for code, name in enumerate(names)}
            for number, file in enumerate(files):
                if path in file.deletes and file.path in codes_by_path:
                    found[number] |= bitmap(pos[codes == codes_by_path[file.path]])
        return found

    @abstractmethod
    def read_vectors(self, vectors: Sequence[Mapping[str, Any]]) -> list[BitMap64]:
        """Read deletion vectors, in the order of their descriptions. Each file is read once: a commit writes all its
        vectors side by side.

        :raises FileNotFoundError: a vector is missing.
        :raises ValueError: a vector isn't as its description says, or is damaged.
        """

    @abstractmethod
    def deleted_rows(self, path: str) -> tuple[list[str], Ints, Ints]:
        """Read a file of n deletes by position, if the format has such files.

        :return: paths of the data files, and for each of the n deletes the data file's number among them and the
            position.
        """


class FileFactory:
    """Names the files of one task, and can delete all of them.

    `created` has every path that `new_path` returned, also the paths of files that were never finished.
    """

    def __init__(self, table: TableSpec, task: TaskId) -> None:
        self._table = table
        self._task = task
        self.created: list[str] = []

    def new_path(self, partition: Partition, extension: str = "parquet") -> str:
        """A path that no other task attempt uses. The table decides the folder."""
        path = self._table.new_path(self._task.file_name(len(self.created) + 1, extension), partition)
        self.created.append(path)
        return path

    def delete_all(self) -> None:
        """Delete the files that this task wrote. The format's clean-up later finds files that can't be deleted."""
        for path in self.created:
            with suppress(OSError):
                self._table.io.delete(path)
