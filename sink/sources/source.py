"""The interface of a source of changes. A source gives the pipeline streams, and for each micro-batch the rows that a
table hasn't applied yet.

A *position* is a JSON object that says how far a table has got in its source. Every commit stores it in the table.

Tables are named by `TableSection.id`: several may have the same source, and one may have several topics.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from sink.config import TableSection
from sink.errors import RowdeltaError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql import types as T

Position = Mapping[str, Any]


@dataclass(frozen=True)
class Stream:
    """One streaming query: its frame, the folder of Spark's checkpoint, and the tables that it feeds."""

    name: str
    frame: "DataFrame"
    checkpoint: str
    tables: tuple[TableSection, ...]


@dataclass(frozen=True)
class Range:
    """Records of a topic.

    :param topic: the topic.
    :param begin: partition -> first offset. -2 means the earliest one.
    :param end: partition -> the offset after the last.
    """

    topic: str
    begin: Mapping[str, int]
    end: Mapping[str, int]


@dataclass(frozen=True)
class SharedRead:
    """Where records are, and what makes one frame of all such ranges, read by so many tasks."""

    ranges: Sequence[Range]
    read: Callable[[Sequence[Range], int], "DataFrame"]


@dataclass(frozen=True)
class WholeFile:
    """A file that tasks can read as bytes.

    :param source: its path as Spark's reader spells it.
    :param bytes: its size.
    """

    source: str
    bytes: int


class DatabaseRows(Protocol):
    """Rows of a database's table. They are read whenever a job needs them."""

    def changes(self, plan: Any, observe: Callable[[Any], None] | None = None) -> "DataFrame":
        """The rows as changelog rows.

        :param plan: how they are decoded (`sink.table.table_plan.TablePlan`).
        :param observe: is called with types that the table can't store (`changelog.observed_types.Observed`).
        """

    def changes_into(self, plan: Any, observe: Callable[[Any], None], step: Any, schema: str) -> "DataFrame":
        """Run a step (`sink.spark.exchange.Step`) on them in the tasks that read them. Only if Python decodes them
        alone.

        :param schema: of the step's result.
        """


Work = Literal["micro-batch", "load", "replay", "reconcile", "purge"]
"""What changes are. Those of `reconcile` correct rows beside a run of the sink, which may go on: the position stays,
and no change is late, whatever its order value. A purge removes rows that were marked as deleted (`soft_delete`),
unless they have changed since.
"""


@dataclass(frozen=True)
class TableBatch:
    """A table's part of a micro-batch.

    :param records: makes a frame of the raw records (or typed rows of Parquet files) beyond the table's position. None
        if there are only `changes` or `rows`.
    :param end: the position after the records are applied.
    :param estimated_rows: the number of records, if the source knows it without reading them.
    :param changes: changelog rows, if the records are already decoded.
    :param rows: rows of a database in place of records.
    :param declared: path -> the columns of each file, if the records are typed.
    :param share: how to read the records together with those of other tables, if that is possible.
    :param files: the Parquet files in their order by their paths, if tasks can read them whole.
    :param more: whether the table has a further part in the micro-batch. It comes after this one is committed.
    :param work: what it is.
    :param load: of a load, what it has decided (`sink.table.load_state.Load`), and how many of its parts are in the
        table after this.
    """

    records: "Callable[[], DataFrame] | None"
    end: Position
    estimated_rows: int | None
    changes: "DataFrame | None" = None
    rows: "DatabaseRows | None" = None
    declared: "Mapping[str, T.StructType] | None" = None
    share: SharedRead | None = None
    files: Mapping[str, WholeFile] | None = None
    more: bool = False
    work: "Work" = "micro-batch"
    load: tuple[str, int] | None = None


@dataclass(frozen=True)
class Behind:
    """How far a table is behind a part of its source: a partition of a topic, or a directory.

    :param count: messages or files that aren't applied yet.
    :param seconds: age of the oldest of them by its own timestamp; 0 if there is none, None if it isn't known.
    """

    count: int
    seconds: float | None


@dataclass(frozen=True)
class Held:
    """What a buffer holds for tables.

    :param events: that a table of their topic hasn't applied yet, or that no table reads.
    :param bytes: of the files in which they are.
    :param last_event: when the newest event came, also an applied one, in milliseconds since 1970. None if there is
        none.
    """

    events: int
    bytes: int
    last_event: int | None


@dataclass(frozen=True)
class Slot:
    """A replication slot of Postgres.

    :param is_active: somebody reads it.
    :param retained: bytes of its log that the database keeps for it. None if it keeps none.
    :param unread: bytes of these that the reader hasn't confirmed yet.
    :param state: as the database says it: `reserved`, `extended`, `unreserved` or `lost`.
    :param idle_since: since when nobody reads it. None before Postgres 17.
    """

    name: str
    is_active: bool
    retained: int | None
    unread: int | None
    state: str
    idle_since: str | None


class Source(Protocol):
    """Kafka or files, for Spark to read."""

    one_stream: bool
    """Whether one query feeds all tables. If so, the query is started anew when a table joins."""

    def names(self) -> Sequence[str]:
        """Topics or directories that exist and that a pattern may match.

        :raises TemporaryError: the source did not answer.
        """

    def search(self, topics: Sequence[str], *, remember: bool) -> Mapping[str, Collection[str]]:
        """Search topics for the source's tables that their messages name. A message is looked at once: see `note`, and
        `remember`.

        :param remember: later searches, also those of other runs, go on from here.
        :return: topic -> names.
        :raises ConfigError: there is no such topic.
        :raises TemporaryError: the source did not answer, or its messages couldn't be read.
        """

    def note(self, ranges: Sequence[Range], names: Collection[str]) -> None:
        """Take over which tables messages name that were read anyway, so that `search` need not look at them.

        :param names: all names in these messages.
        """

    def lag(self, tables: Sequence[tuple[TableSection, Position | None]]) -> Sequence[str]:
        """Text for people: how far each position is behind the source."""

    def check(
        self, tables: Sequence[tuple[TableSection, Position | None]], from_start: Collection[str]
    ) -> Sequence[str | RowdeltaError]:
        """Ask the source about the tables.

        :param tables: the tables with their positions.
        :param from_start: see `locate`.
        :return: for each table, a text about what was found, or the error with which `locate` would refuse it.
        :raises TemporaryError: the source did not answer.
        """

    def check_patterns(self) -> Sequence[RowdeltaError]:
        """Reasons why patterns can't find anything at the moment."""

    def locate(
        self, tables: Sequence[tuple[TableSection, Position | None]], from_start: Collection[str]
    ) -> Mapping[str, RowdeltaError]:
        """Decide from where each table is read: from its position. If it has none, the options decide.

        :param tables: the tables with their positions.
        :param from_start: tables whose sources are read from their first change if they have no position, even if the
            options say something else.
        :return: table -> the reason why it can't be read.
        :raises TemporaryError: the source did not answer.
        """

    def streams(self, tables: Sequence[TableSection]) -> Sequence[Stream]:
        """Queries that read tables from where `locate` decided."""

    def lacks_topics(self) -> bool:
        """Whether topics that the last stream reads have gone since, as `locate` has seen: its tables have others."""

    def touched(self, stream: Stream, batch_id: int) -> Sequence[str]:
        """Tables that may have changes in the micro-batch. The stream's other tables have none."""

    def batch(
        self, stream: Stream, batch_id: int, frame: "DataFrame", table: TableSection, position: Position | None
    ) -> TableBatch | None:
        """The table's part of a micro-batch, or the next one if there are several (`TableBatch.more`). None if there is
        nothing that the table hasn't applied yet.
        """

    def is_ahead(self, other: Position, position: Position) -> bool:
        """Whether `other` may have passed records that `position` hasn't. Both positions belong to the same table."""

    def furthest(self, one: Position, other: Position) -> Position:
        """The position that has passed what any of two positions of the same table has passed."""

    def behind(self, tables: Sequence[tuple[TableSection, Position | None]]) -> Mapping[str, Mapping[str, Behind]]:
        """How far positions are behind the source: table -> part -> what it lacks. The part of a directory is `""`.

        Another thread may call this while streams are read.

        :raises TemporaryError: the source did not answer.
        """

    def start_position(self, table: TableSection) -> Position | None:
        """The start position of a table without a position. It is known after `locate`, and the table stores it."""

    def identities(self, table: TableSection) -> Mapping[str, str]:
        """What each topic got when it was created, so that another one of the same name is known as such; or a hash of
        the directory's path. Those that have no such thing are left out, and so are all before `locate`.
        """

    def partitions(self, table: TableSection) -> int:
        """How many partitions the topic has at the moment, or the one of several with the most. A directory counts as
        one.

        :raises TemporaryError: the source did not answer.
        """

    def records(self, table: TableSection) -> "DataFrame":
        """All raw records (`RAW_SCHEMA`), whatever the options say about where reading starts: of a table that `search`
        has found, from the first one on that may be its own.

        :raises ConfigError: there is no such topic.
        :raises TemporaryError: the source did not answer.
        """

    def last_records(self, table: TableSection, count: int) -> "DataFrame | None":
        """The last `count` raw records of each partition. None if there are none, or if the source has no partitions.

        :raises TemporaryError: the source did not answer.
        """

    def with_messages(self, tables: Sequence[TableSection]) -> Collection[str]:
        """The tables whose topics or directories have anything to read. One request answers this for all of them.

        :raises TemporaryError: the source did not answer.
        """
