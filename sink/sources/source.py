"""What a source of changes gives the pipeline: streams, and for each micro-batch the rows that a table hasn't had yet.

A *position* says how far a table has got in its source, as a JSON object. It is stored in the table with every commit.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from sink.config import TableSection
from sink.errors import RowdeltaError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql import types as T

Position = Mapping[str, Any]


@dataclass(frozen=True)
class Stream:
    """One streaming query: its frame, where Spark keeps its checkpoint, and the tables that it feeds."""

    name: str
    frame: "DataFrame"
    checkpoint: str
    tables: tuple[TableSection, ...]


@dataclass(frozen=True)
class Range:
    """Records of a topic: by partition the first offset (-2: the earliest that there is), and the one after
    the last.
    """

    topic: str
    begin: Mapping[str, int]
    end: Mapping[str, int]


@dataclass(frozen=True)
class SharedRead:
    """Where records are, and what makes one frame of all such ranges, read by so many tasks."""

    range: Range
    read: Callable[[Sequence[Range], int], "DataFrame"]


@dataclass(frozen=True)
class TableBatch:
    """A table's part of a micro-batch.

    :param records: makes a frame of the raw records (or typed rows of Parquet files) beyond the table's position.
    :param end: the position once they are applied.
    :param estimated_rows: how many records there are, if the source can tell without reading them.
    :param changes: changelog rows, if the records have been decoded.
    :param declared: path -> the columns of each file, if the records are typed.
    :param share: how to read the records with those of other tables, if that is possible.
    :param files: path -> size of the Parquet files, if they can be read whole, and as nothing but their bytes.
    """

    records: Callable[[], "DataFrame"]
    end: Position
    estimated_rows: int | None
    changes: "DataFrame | None" = None
    declared: "Mapping[str, T.StructType] | None" = None
    share: SharedRead | None = None
    files: Mapping[str, int] | None = None


class SourceView(Protocol):
    """Kafka or files, only looked at."""

    def names(self) -> Sequence[str]:
        """Topics or directories that exist and that a pattern may match.

        :raises TemporaryError: the source did not answer.
        """

    def lag(self, tables: Sequence[tuple[TableSection, Position | None]]) -> Sequence[str]:
        """How far each position is behind the source, for people."""

    def check(self, tables: Sequence[TableSection]) -> Sequence[str | RowdeltaError]:
        """Reach the source. Returns for each table what was found, for people, or that it has no such topic or
        directory.

        :raises TemporaryError: it can't be reached.
        """

    def check_patterns(self) -> Sequence[RowdeltaError]:
        """Why patterns can't find anything, now."""


class Source(SourceView, Protocol):
    """Kafka or files, for Spark to read."""

    one_stream: bool
    """Whether one query feeds all tables. Then a table that joins has the query started anew."""

    def locate(
        self, tables: Sequence[tuple[TableSection, Position | None]], from_start: Collection[str]
    ) -> Mapping[str, RowdeltaError]:
        """Settle where each table is read from: where it got to, or if it has no position, where the options say.

        :param from_start: sources that are read from their first change if their table has no position, whatever the
            options say.
        :return: by source, why a table can't be read.
        :raises TemporaryError: the source did not answer.
        """

    def streams(self, tables: Sequence[TableSection]) -> Sequence[Stream]:
        """Queries over tables that `locate` found, from there."""

    def touched(self, stream: Stream, batch_id: int) -> Sequence[str]:
        """Sources of the stream's tables for which a micro-batch has something. The others needn't be looked at."""

    def batch(
        self, stream: Stream, batch_id: int, frame: "DataFrame", table: TableSection, position: Position | None
    ) -> TableBatch | None:
        """The table's part of a micro-batch; None if the table has had all of it, or it has nothing for the table."""

    def is_ahead(self, other: Position, position: Position) -> bool:
        """Whether `other` may have passed records that `position` hasn't: both are one table's."""

    def start_position(self, table: TableSection) -> Position | None:
        """Where a table without a position is read from, to be remembered; known after `locate`."""

    def last_records(self, table: TableSection, count: int) -> "DataFrame | None":
        """Raw records: the last `count` of each partition. None if there are none, or the source has no partitions.

        :raises TemporaryError: the source did not answer.
        """

    def with_messages(self, sources: Collection[str]) -> Collection[str]:
        """Which of these topics or directories have anything to read, at the price of one look for all of them.

        :raises TemporaryError: the source did not answer.
        """
