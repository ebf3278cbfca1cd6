"""A table as its database's catalog describes it, and how a load reads it. Each kind of database has its own."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame

from sink.databases.read_columns import ReadColumn, Spelling

Batches = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]


@dataclass(frozen=True)
class CatalogColumn:
    """:param type: its name in the database, for messages.
    :param is_sent: the log has it.
    :param is_required: it is NOT NULL.
    :param read: Arrow types of the target's columns that take its values (or `UUID`) -> how it is read. None if nothing
        is known of its type.
    """

    name: str
    type: str
    is_sent: bool
    is_required: bool
    read: Callable[[Collection[pa.DataType], Spelling], ReadColumn | None]


class CatalogTable(ABC):
    """One table. It holds a connection for questions until it is closed.

    Every method raises ConfigError if the database refuses the user, and TemporaryError if it doesn't answer.
    """

    order_names: str
    """What a load knows for `order_by` beside columns, for messages."""

    @abstractmethod
    def columns(self) -> Sequence[CatalogColumn]:
        """In the table's order. Empty if there is no such table."""

    @abstractmethod
    def key(self) -> tuple[str, ...]:
        """The columns of the primary key, in its order. Empty if there is none."""

    @abstractmethod
    def estimated_rows(self) -> int: ...

    @abstractmethod
    def ranges(self, rows: int) -> Sequence[str]:
        """See `sink.table.loading.SourceTable`, likewise of `files`, `writers` and `order`."""

    @abstractmethod
    def files(self) -> str: ...

    @abstractmethod
    def writers(self) -> Mapping[str, str]: ...

    @abstractmethod
    def order(self) -> Mapping[str, Any]: ...

    @abstractmethod
    def read(self, columns: Sequence[str], conditions: Sequence[str], tasks: int) -> tuple[DataFrame, Batches]:
        """The rows that fulfil the conditions, each part read by one short query while the server sends it.

        :param columns: expressions in SQL.
        :param tasks: that read, each by one connection.
        :return: a frame, and what a task makes of its batches: those of the rows, with these columns.
        """

    @abstractmethod
    def close(self) -> None: ...
