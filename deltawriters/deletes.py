"""How a writer says which rows are deleted. Each table format writes this in its own way."""

from abc import ABC, abstractmethod

import pyarrow as pa

from deltawriters.collapse import Ints
from deltawriters.content import ContentFile

FLUSH_THRESHOLD = 1_000_000
"""Where positions become files of their own, a task holds this many (16 bytes each) before it writes a file."""


class Deletes(ABC):
    """Deletes of rows by position, in the data files of one task's `DataFiles`."""

    @abstractmethod
    def delete(self, file: Ints, pos: Ints) -> None:
        """Delete row `pos[i]` of data file `file[i]`, for all i."""

    @abstractmethod
    def close(self, data_files: list[ContentFile]) -> list[ContentFile]:
        """Write what is still held.

        :param data_files: the data files that the task wrote.
        :return: all files of the task. A format that keeps deletes apart adds its delete files to the data files. One
            that keeps them in the description of the data file returns the data files with other descriptions, and may
            leave out files without a live row.
        """


class KeyDeletes(ABC):
    """Deletes of all rows that earlier commits wrote for given keys (Iceberg's equality deletes)."""

    @abstractmethod
    def delete(self, keys: pa.Table, partition_sources: pa.Table) -> None:
        """Delete `keys` from their partitions.

        :param keys: key columns, n rows.
        :param partition_sources: the partition source columns, n rows; row i tells the partition of key i.
        """

    @abstractmethod
    def delete_globally(self, keys: pa.Table) -> None:
        """Delete `keys` from all partitions.

        :raises ValueError: the table can't have such deletes.
        """

    @abstractmethod
    def close(self) -> list[ContentFile]:
        """All delete files written."""
