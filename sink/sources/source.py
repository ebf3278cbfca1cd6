"""What a source of changes gives the pipeline: streams, and for each micro-batch the rows that a table hasn't had yet.

A *position* says how far a table has got in its source, as a JSON object. It is stored in the table with every commit.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa
from pyspark.sql import DataFrame

from sink.config import TableSection

Position = Mapping[str, Any]
BadRecords = Callable[[pa.StructArray], pa.BooleanArray]


@dataclass(frozen=True)
class Stream:
    """One streaming query: its frame, where Spark keeps its checkpoint, and the tables that it feeds."""

    name: str
    frame: DataFrame
    checkpoint: str
    tables: tuple[TableSection, ...]


@dataclass(frozen=True)
class TableBatch:
    """A table's part of a micro-batch.

    :param records: raw records (or typed rows of Parquet files) beyond the table's position.
    :param end: the position once they are applied.
    :param beyond: which records of `_rowdelta_bad` (`changelog.rows.BAD_FIELDS`) lie beyond a position (the dead-letter
        table's), as a mask. For the tasks: as a Spark filter, Catalyst would push it below the decoder and there repeat the
        decoder's expressions until the driver's memory is full.
    :param estimated_rows: how many records there are, if the source can tell without reading them.
    :param changes: changelog rows, if the records have been decoded.
    """

    records: DataFrame
    end: Position
    beyond: Callable[[Position], BadRecords]
    estimated_rows: int | None
    changes: DataFrame | None = None


class Source(Protocol):
    """Kafka or files."""

    def streams(self, positions: Mapping[str, Position | None]) -> Sequence[Stream]:
        """Queries that begin where the tables (by target name) got to."""

    def batch(
        self, stream: Stream, batch_id: int, frame: DataFrame, table: TableSection, position: Position | None
    ) -> TableBatch | None:
        """The table's part of a micro-batch; None if the table has had all of it, or it has nothing for the table."""

    def start_position(self, table: TableSection) -> Position | None:
        """Where a table without a position is read from, to be remembered; known after `streams`."""

    def lag(self, table: TableSection, position: Position | None) -> str:
        """How far `position` is behind the source, for people."""

    def check(self, table: TableSection) -> str:
        """Reach the source. Returns what was found, for people.

        :raises TemporaryError: it can't be reached. :raises ConfigError: it has no such topic or directory.
        """
