"""The seam between the sink and a table format: what a table is to everything else.

A `TableState` is what can be looked at, with or without a JVM. A `Target` is a table that a session of Spark reads and
writes, and a `Committer` changes it. Each format has a package beside this module. Nothing outside of such a package
knows a format.

What a **snapshot id** is depends on the format: Iceberg's snapshot ids are random numbers, and the id of a Delta
table's state is its version. Here it only tells one state of a table's rows from another.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from changelog.amounts import amount, sized
from sink.errors import ConfigError, FencedError, RolledBackError, TableError, TemporaryError
from sink.spark.java_errors import message_of

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql import types as T

    from changelog.spec import ColumnSpec
    from deltawriters import TableSpec
    from deltawriters.content import SmallFile, TouchedFile
    from deltawriters.keyindex import IndexedFile
    from deltawriters.old_rows import DeletedRows
    from deltawriters.ordering import RowOrder
    from sink.config import Config, TableSection
    from sink.sources.source import Position
    from sink.targets.history import History
    from sink.targets.retries import Retries

NO_FLOATS = "A commit can't name the partition of NaN. Partition by another column."


class TableNoLongerEmptyError(Exception):
    """The files were written for an empty table, without deletes, and somebody else has added rows since."""


class TableChangedError(Exception):
    """The rows to delete were looked up in a state of the table that is no longer current, or the table no longer has
    the layout for which the files were written.
    """


class CommitUnknownError(TemporaryError):
    """It is unknown whether the commit succeeded. The attempt's files must not be deleted."""


OF_POSITION = {"source": "", "topic-id": "", "streamed": "[]", "undecoded": "0"}
"""Sink properties that describe the changes up to the position: last part of the name -> its neutral value. A rollback
of the table takes them back.
"""


@dataclass(frozen=True)
class StoredPosition:
    """A sink's position as a table stores it, and which commit stored it.

    `index` names the version of the key index that belongs to the commit (`sink.run.keyindex`), if it has one, and
    `index_snapshot_id` the snapshot that is the last one in it: the commit's own, or that of a rewrite which came
    after. `state` is what the table's properties said of the changes up to the position (`OF_POSITION`): None if the
    table's properties say it.
    """

    position: "Position"
    operation: str
    snapshot_id: int | None = None
    index: Mapping[str, Any] | None = None
    index_snapshot_id: int | None = None
    state: Mapping[str, str] | None = None


@dataclass(frozen=True)
class FileCounts:
    """How many files a reader of the whole table opens.

    :param data: data files.
    :param deletes: delete files; of deletion vectors, the data files that have one.
    """

    data: int
    deletes: int


@dataclass(frozen=True)
class Upkeep:
    """What a table's metadata tell of its maintenance.

    :param data_files: live data files.
    :param size_in_bytes: of them together.
    :param rows: in them, live or not.
    :param deleted_rows: how many of these are deleted by position. In Iceberg's version 2, positions in data files that
        are gone count too, until their delete files go.
    :param equality_deletes: keys that are deleted by value.
    :param snapshots: when each snapshot was made that is still there, in milliseconds since 1970, the oldest first.
        Empty if the format looks after them by itself.
    :param rewritten_at: when a rewrite beside the stream was committed last; None if no known commit is one.
    :param rewritten_files: how many data files that commit replaced.
    """

    data_files: int
    size_in_bytes: int
    rows: int
    deleted_rows: int
    equality_deletes: int = 0
    snapshots: Sequence[int] = ()
    rewritten_at: int | None = None
    rewritten_files: int = 0


@dataclass(frozen=True)
class LastCommit:
    """The newest commit of a table, by whomever.

    :param timestamp_ms: milliseconds since 1970.
    :param counts: in words, the table's files and deletes after it.
    :param live: the files; None if the table doesn't tell.
    """

    snapshot_id: int
    timestamp_ms: int
    counts: str
    live: FileCounts | None = None


class TableState(ABC):
    """A table as it was when it was read."""

    name: str
    snapshot_word: ClassVar[str]
    """What the format calls a state of the table, in messages: `snapshot` or `version`."""

    @property
    @abstractmethod
    def spec(self) -> "TableSpec":
        """The facts that delta writers need, as plain values."""

    @abstractmethod
    def property(self, name: str) -> str | None:
        """A property's value: one of the table's own, or (`rowdelta.…`) one in which a sink keeps its state."""

    @abstractmethod
    def stored(self, part: str) -> Mapping[str, str]:
        """What sinks have stored in properties `<prefix>.<part>`, by prefix (`rowdelta.…`)."""

    @abstractmethod
    def snapshot_id(self) -> int | None:
        """Id of the current state of the rows. None if the table has never had a row."""

    def older_of(self, first: int, second: int) -> int:
        """Which of two states came before the other one. If the table doesn't know one of them any more, the other
        one.
        """
        return min(first, second)

    @abstractmethod
    def last_commit(self) -> LastCommit | None:
        """None if the table has no snapshot."""

    @abstractmethod
    def upkeep(self) -> Upkeep | None:
        """None if the table has no snapshot, or doesn't tell."""

    def dangling_positions(self) -> int:
        """How many of `Upkeep.deleted_rows` are in delete files that are known to apply to nothing."""
        return 0

    @abstractmethod
    def columns(self) -> tuple["ColumnSpec", ...]:
        """The table's columns as Spark types.

        :raises TableError: a column has a type that Spark can't represent.
        """

    @abstractmethod
    def identifiers(self) -> tuple[str, ...]:
        """The columns that the table itself calls its key. Empty if it names none.

        :raises TableError: the writers don't know the type of a column.
        """

    @abstractmethod
    def check_writable(self, *, appends: bool = False, copies: bool = False) -> None:
        """Check that the sink can write the table at all.

        :param appends: whether the sink only appends to it.
        :param copies: whether it deletes rows copy-on-write.
        :raises TableError: it has a property, a feature or a column that the sink doesn't know or must not ignore.
        """

    @abstractmethod
    def check_fits(self, section: "TableSection") -> None:
        """Check that key and partitioning are as the table's section of the configuration says.

        :raises TableError: they aren't, or the sink can't write such a table in this way.
        """

    def row_order(self) -> "RowOrder | None":
        """The order that the table itself has for its rows. None if it has none, or one that the writers can't keep."""
        return None

    @abstractmethod
    def not_followed(self) -> Iterator[str]:
        """A sentence for each property and feature of the table that the sink doesn't follow."""

    def start_position(self, prefix: str) -> "Position | None":
        """The stored start position of a table without commits. None if no run has stored one."""
        text = self.property(f"{prefix}.start")
        start: Position | None = json.loads(text) if text else None
        return start

    @abstractmethod
    def position(self, prefix: str, *, newest_if_in_doubt: bool = False) -> StoredPosition | None:
        """The sink's position in the current state, also after somebody took the table back to an earlier one.

        :param newest_if_in_doubt: take the newest position if what is left of the table's history doesn't tell. It may
            be ahead of the data.
        :raises TableError: nothing that is left tells the position.
        :raises NeedsSparkError: only Spark can tell.
        """


@dataclass(frozen=True)
class LiveFile:
    """A data file of the current state.

    :param vector: its deletion vector, in the format's terms, with `record-count`; None if it has none.
    :param parquet_deletes: Iceberg's position delete files that apply to it, if the table was v2 and has vectors now.
    :param handle: what the format needs to read it (`Target.rows_of`).
    """

    file: "IndexedFile"
    vector: Mapping[str, Any] | None = None
    parquet_deletes: tuple[str, ...] = ()
    handle: Any = None

    @property
    def path(self) -> str:
        return self.file.path


@dataclass(frozen=True)
class TableChanges:
    """What commits changed that a version of the key index doesn't have.

    :param files: data files that were added, or whose deletes changed, as they are now.
    :param removed: paths of data files that are gone.
    """

    files: Sequence[LiveFile] = ()
    removed: frozenset[str] = frozenset()


@dataclass(frozen=True)
class WrittenDeletes:
    """Deletes of earlier rows that the driver wrote for a commit.

    :param files: what the commit adds, as JSON in the format's terms.
    :param removed: what the commit removes because of that: earlier vectors of the same data files.
    :param vectors: data file -> its new vector; None if it has none any more.
    :param bytes: of the vectors or delete files.
    :param delete_files: how many of `files` a minor compaction merges. Vectors aren't merged.
    """

    files: Sequence[str] = ()
    removed: Sequence[str] = ()
    vectors: Mapping[str, Mapping[str, Any] | None] = field(default_factory=dict)
    bytes: int = 0
    delete_files: int = 0


@dataclass(frozen=True)
class TouchedFiles:
    """Data files from which a commit deletes rows, as `deletes: copy-on-write` replaces them.

    :param files: what tasks need to read their live rows.
    :param handles: what names each of them in a commit.
    :param deletes: deletes that apply to no other files, as JSON in the format's terms.
    :param total: number of the table's data files.
    """

    files: Sequence["TouchedFile"]
    handles: Sequence[Any]
    deletes: Sequence[str]
    total: int


@dataclass(frozen=True)
class Copied:
    """What `deletes: copy-on-write` did for a commit.

    :param total: number of the table's data files before.
    :param touched: number of files from which rows were deleted.
    :param written: number of files that replace them.
    :param rows: number of rows that were copied.
    :param bytes_read: of the touched files.
    :param bytes_written: of the files that replace them.
    :param scan_seconds: to find the touched files and their deletes.
    :param rewrite_seconds: to copy the rows.
    """

    total: int
    touched: int
    written: int
    rows: int
    bytes_read: int
    bytes_written: int
    scan_seconds: float
    rewrite_seconds: float

    @property
    def shown(self) -> str:
        """Text for the log."""
        return (
            f"{self.touched} of {amount(self.total, 'file')} replaced by {self.written}: "
            f"{amount(self.rows, 'row')} copied, {sized(self.bytes_read)} read, {sized(self.bytes_written)} written, "
            f"{(self.scan_seconds + self.rewrite_seconds) * 1000:.0f} ms"
        )


@dataclass(frozen=True)
class IndexCommit:
    """The facts that a commit needs from the key index.

    :param base: the snapshot in which the rows were looked up.
    :param stored: is stored together with the position. Empty for a rewrite of a table without a key index.
    :param files: further files with deletes, as in `WrittenDeletes`; or, if there are `replaced` ones, data files that
        have their rows.
    :param removed: deletion vectors that `files` replace, or deletes whose data files are gone.
    :param referenced: data files whose rows are deleted.
    :param new_paths: paths of all files that were written for this commit. If it fails, they are deleted.
    :param bytes: of `files`.
    :param replaced: the handles of the data files that `files` replace (`TouchedFiles`).
    :param copied: None if no file was replaced.
    :param delete_files: see `WrittenDeletes`.
    """

    base: int | None
    stored: Mapping[str, Any]
    files: Sequence[str]
    removed: Sequence[str]
    referenced: Sequence[str]
    new_paths: Sequence[str]
    bytes: int = 0
    replaced: Sequence[Any] = ()
    copied: Copied | None = None
    delete_files: int = 0

    def added_to(self, metrics: Mapping[str, int]) -> dict[str, int]:
        """`ChangeSet.metrics` with the work of copying rows."""
        if self.copied is None:
            return dict(metrics)
        seconds = {"scanTimeMs": self.copied.scan_seconds, "rewriteTimeMs": self.copied.rewrite_seconds}
        times = {name: metrics[name] + int(1000 * more) for name, more in seconds.items()}
        return {**metrics, **times, "numTargetRowsCopied": self.copied.rows}


@dataclass(frozen=True)
class ChangeSet:
    """A request to commit a micro-batch: files, and the source position that they reach. Only plain values.

    :param prefix: prefix of the sink's state in this table (`rowdelta.<sink id>`).
    :param operation: id of this attempt at this micro-batch.
    :param position: the source position after the micro-batch.
    :param files: the files that tasks wrote, as JSON in the format's terms (`ContentFile.description`).
    :param base_snapshot: the snapshot whose position this batch continues; None if the table had none.
    :param previous_operation: the commit that stored the position which this batch continues; None if there was none.
    :param written_for: the `Target.layout` for which the files were written. None if it doesn't matter.
    :param conflicts_with: a column and its value. Only files that may have such rows conflict with this commit. By
        default all files do.
    :param written_for_empty_table: the files have no deletes, because the table was empty.
    :param truncates: the source emptied its table. All data files and deletes that the table has at the moment of the
        commit are removed, whoever wrote them: only `files` stay.
    :param summary: what the table's history says of the commit.
    :param properties: further properties of the sink's state, set in the same commit.
    :param metrics: numbers about the work, for a history that shows them.
    :param index: the key index's part. Rows were looked up in `base_snapshot`, so the commit is only right there.
    """

    prefix: str
    operation: str
    position: "Position"
    files: Sequence[str]
    base_snapshot: int | None
    previous_operation: str | None
    written_for: Hashable = None
    conflicts_with: tuple[str, str] | None = None
    written_for_empty_table: bool = False
    truncates: bool = False
    summary: Mapping[str, str] = field(default_factory=dict)
    properties: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, int] = field(default_factory=dict)
    index: IndexCommit | None = None


@dataclass(frozen=True)
class Rewrite:
    """A request to replace files by others that have the same live rows and deletes.

    It doesn't set the source position, so it does no harm if another run has stored a newer one meanwhile.

    :param prefix: as in `ChangeSet`.
    :param position_operation: the commit that stored the sink's position.
    :param files: the new files, as in `ChangeSet`.
    :param replaced: the `Mergeable.handle` of the old ones, or what `Target.handles` returned.
    :param index: the key index's part. The rows of `files` come from the snapshot `index.base`.
    :param summary: what the table's history says of the commit.
    :param written_for: the `Target.layout` of `files`.
    :param properties: further properties of the sink's state, set in the same commit.
    """

    prefix: str
    position_operation: str
    files: Sequence[str]
    replaced: Sequence[Any]
    index: IndexCommit
    summary: Mapping[str, str]
    written_for: Hashable
    properties: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Mergeable:
    """A small file of the sink that a minor compaction may merge: a data file, or (Iceberg v2) a position delete file.

    :param partition: JSON text of the partition value.
    :param rows: rows in the file, live or not; None if the table's metadata don't tell which are live (Iceberg v2).
    :param handle: what names it in a `Rewrite`.
    """

    is_data: bool
    partition: str
    rows: int | None
    small: "SmallFile"
    handle: Any


@dataclass(frozen=True)
class MergeCandidates:
    """The small files of the last commits.

    :param number: the number of the next minor compaction.
    :param commits: commits of the sink since the last one.
    :param files: files that these wrote.
    :param spec_id: id of the partitioning of all these files.
    :param partitions: files that may be merged, by partition. Empty if `is_enough` said no.
    :param deletes: all position delete files (Iceberg v2) that may apply to them, by partition.
    """

    number: int
    commits: int
    files: int
    spec_id: int
    partitions: Mapping[str, Sequence[Mergeable]]
    deletes: Mapping[str, Sequence[Mergeable]]


@dataclass(frozen=True)
class EqualityDeleted:
    """Equality deletes of a table, and the data files to which they apply.

    :param files: with the number of their rows, live or not.
    :param handles: what names the delete files in a `Rewrite`.
    """

    files: "Mapping[IndexedFile, int]"
    handles: Sequence[Any]


@dataclass(frozen=True)
class AppliedDeletes:
    """A position delete file (Iceberg v2) that applies to live data files.

    :param rows: number of its positions.
    :param data_files: to how many of the table's data files it applies; 0 if it isn't to be merged.
    """

    small: "SmallFile"
    rows: int
    data_files: int


@dataclass(frozen=True)
class MergedDeletes:
    """What replaces position delete files that were merged, in the table's current state.

    :param handles: what names the old delete files in a `Rewrite`.
    :param files: the new delete files that still apply, as in `ChangeSet`.
    :param referenced: the data files to which the old ones apply.
    :param dropped: paths of new delete files that no longer apply to anything.
    """

    handles: Sequence[Any]
    files: Sequence[str]
    referenced: Sequence[str]
    dropped: Sequence[str]


@dataclass(frozen=True)
class Rewritable:
    """A live data file that a rewrite may take.

    :param spec_id: of its partitioning.
    :param partition: JSON text of the partition value.
    :param rows: rows in the file, live or not.
    :param deleted: how many of them are deleted, as far as the table's metadata tell. Iceberg's v2 delete files may be
        about several data files; then it is this file's share.
    :param deletes: number of delete files and vectors that a reader of the file opens.
    :param small: the file itself, with the number of its live rows if the metadata tell it.
    :param applying: the position delete files (Iceberg v2) that apply to it.
    :param settled: number of commits since the last one that deleted a row of it, as far as the table's metadata tell.
    """

    spec_id: int
    partition: str
    rows: int
    deleted: int
    deletes: int
    small: "SmallFile"
    applying: Sequence[AppliedDeletes] = ()
    settled: int = 0


def no_condition(table: str, text: str, reason: str) -> ConfigError:
    """:param reason: what Spark or the format says."""
    return ConfigError(
        f"{table}: {text!r} is not a condition by which its files can be told apart: "
        f"{reason.strip().splitlines()[0]} Compare columns with values, such as \"day >= '2026-01-01' AND region IN "
        "('eu', 'us')\"."
    )


class CompactionFailedError(TemporaryError):
    """It failed after it had begun, so it may have committed a part of what it was to rewrite.

    :param most_bytes: of the files that it may have rewritten.
    """

    def __init__(self, message: str, most_bytes: int) -> None:
        super().__init__(message)
        self.most_bytes = most_bytes


class Target(TableState):
    """A table that the sink writes, in a Spark session. What it knows is as of the last `refresh` or commit."""

    spark: "SparkSession"

    @property
    @abstractmethod
    def layout(self) -> Hashable:
        """What files are written for: schema, partitioning and version of the format. Files for another layout must
        not be committed.
        """

    @property
    @abstractmethod
    def table_id(self) -> str:
        """Another table that gets the same name has another one."""

    @property
    def needs_credentials(self) -> bool:
        """Credentials for the table's files are about to expire; `refresh` gets new ones."""
        return False

    @abstractmethod
    def refresh(self) -> None:
        """Read the table's state again.

        :raises TableError: the table is gone or was replaced.
        :raises TemporaryError: the catalog did not answer.
        """

    @abstractmethod
    def is_empty(self) -> bool:
        """Whether the current state has no live data file."""

    @abstractmethod
    def parent_snapshot_id(self) -> int | None:
        """Id of the state before the current one."""

    @abstractmethod
    def set_property(self, name: str, value: str | None) -> None:
        """Set a property, or (None) remove it, in a commit that changes no row.

        :raises TableError: the table is gone, or the catalog refuses.
        :raises TemporaryError: the catalog doesn't answer, or others commit all the time.
        """

    @abstractmethod
    def own_state(self, prefix: str) -> Mapping[str, str]:
        """What a sink has stored in the table, by the last part of the property's name."""

    @abstractmethod
    def evolve(self, changes: "Mapping[str, T.DataType | None]", defaults: Mapping[str, Any]) -> None:
        """Add columns, widen columns, or (None) make them optional, in one commit.

        :param defaults: of new columns, as `changelog.values.defaults.default_of` gives them: earlier rows have them.
            Only those that the table keeps (`keeps_default`).

        If others commit meanwhile, nothing changes. The next attempt at the micro-batch finds out what is still
        missing.

        :raises TableError: the format refuses the change.
        """

    def keeps_default(self, dtype: "T.DataType") -> bool:
        """Whether a new column of a type can have a value in earlier rows."""
        return False

    def needs_global_deletes(self) -> bool:
        """Whether a key's old row may be in a partition that its values don't tell (equality deletes)."""
        return False

    def prepare_global_deletes(self) -> None:
        """Make the table such that equality deletes can apply to all of its partitions."""

    @abstractmethod
    def committer(self, *, newest_if_in_doubt: bool = False) -> "Committer":
        """:param newest_if_in_doubt: see `position`."""

    # for the key index

    @abstractmethod
    def key_encoding(self, key: Sequence[str], buckets: int | None) -> str:
        """A text with everything on which the hashes of keys and the form of vectors depend: a key index with another
        text is of no use.

        :param key: the key columns.
        :param buckets: number of the table's buckets of a key column, if hashes begin with it.
        """

    @abstractmethod
    def changes_since(self, base: int | None, included: "set[int]") -> TableChanges | None:
        """What others changed between a snapshot and the current one.

        :param base: the snapshot.
        :param included: snapshots after it that don't count as others'.
        :return: None if the history doesn't tell any more, or doesn't lead from `base` over `included` to here. The
            caller then reads the whole table.
        """

    @abstractmethod
    def frame(self, spark: "SparkSession") -> "DataFrame":
        """The table's rows.

        :param spark: the session that is to read them.
        """

    @abstractmethod
    def frame_at(self, snapshot_id: int) -> "DataFrame":
        """The table's rows in a state that `history` knows, in the table's own session. If its files are gone, reading
        them fails.
        """

    def current_frame(self, snapshot_id: int) -> "DataFrame":
        """The table's rows in its newest state, with the columns that it has now: it may have been altered since."""
        return self.frame_at(snapshot_id)

    @abstractmethod
    def history(self, prefix: str) -> "History":
        """The table's commits.

        :param prefix: prefix of the state of the sink whose positions are read.
        """

    @abstractmethod
    def remove_rows(self, rows: "DataFrame", columns: Sequence[str]) -> Exception | None:
        """Try to delete the rows that are equal to one of `rows` in some columns; NULL equals NULL.

        :return: why it was refused, if others changed the table meanwhile; None if it is done.
        """

    @abstractmethod
    def frame_of_commit(self, snapshot_id: int) -> "DataFrame | None":
        """The rows that a commit added. None if the history no longer has it."""

    @abstractmethod
    def live_files(self) -> "Iterator[LiveFile]":
        """The data files of the current state."""

    @abstractmethod
    def rows_of(
        self, files: Sequence[LiveFile], columns: Sequence[str]
    ) -> "AbstractContextManager[tuple[DataFrame, Column, Column, Sequence[str]]]":
        """The live rows of data files, all deletes applied.

        :param columns: those that will be read.
        :return: a frame with at least these columns; two more columns of it, the row's file and position; and for each
            of `files` the text that the file's column has for it.
        """

    @abstractmethod
    def delete_rows(
        self,
        name: str,
        rows: "DeletedRows",
        known: Callable[[str], Mapping[str, Any] | None],
        parquet_deletes: Mapping[str, Sequence[str]],
        created: list[str],
    ) -> WrittenDeletes:
        """Write deletes for rows of earlier snapshots.

        :param name: beginning of the names of new files.
        :param known: data file -> its current vector.
        :param parquet_deletes: see `LiveFile`; of data files that have no vector.
        :param created: the path of each written file is added to it, also after an error.
        """

    @abstractmethod
    def touched_files(self, paths: Collection[str]) -> TouchedFiles:
        """Find data files of the current state, and what deletes their rows already.

        :param paths: of the files.
        :raises IndexLostError: one of them isn't live.
        """

    @abstractmethod
    def index_forbidden_at(self, location: str) -> str | None:
        """Why the key index must not be at a location. None if it may."""

    def tend(self) -> None:
        """Do what the format needs from time to time, such as a checkpoint of its log, without holding up the stream.
        It is called after commits.
        """
        return

    def finish_tending(self, seconds: float) -> None:
        """Wait for what `tend` has begun, but no longer than this: the session is about to end."""
        return

    # for what else maintenance does

    def equality_deletes(self) -> EqualityDeleted | None:
        """Equality deletes that somebody has left. None if there are none, as in formats that have no such thing.

        :raises TemporaryError: the table's metadata can't be read now.
        """
        return None

    def dangling_deletes(self) -> Sequence[Any]:
        """What names, in a `Rewrite`, delete files that apply to no data file of the current state. Empty if the format
        has no such thing, or the table has too many files to look at.

        :raises TemporaryError: the table's metadata can't be read now.
        """
        return ()

    def has_old_states(self, older_than: timedelta, retain_last: int, keep: int | None) -> bool:
        """Whether `expire` may find something to do. This is cheap."""
        return False

    def expire(self, older_than: timedelta, retain_last: int, keep: int | None) -> int:
        """Remove states of the table that nobody needs any more, with the files that only they have.

        :param retain_last: so many of the newest stay, whatever their age.
        :param keep: a state. It and all that came after it stay.
        :return: how many files were deleted. 0 if the format does this by itself.
        :raises TemporaryError: not all of it could be done.
        """
        return 0

    @abstractmethod
    def stored_at(self) -> int:
        """When its metadata was written last, by the storage's clock, in milliseconds since 1970."""

    @abstractmethod
    def remove_orphans(self, older_than: timedelta, *, dry_run: bool = False) -> Sequence[str]:
        """Delete files in the table's folder that no state of the table has.

        :param older_than: younger files may be those of a commit that is still to come.
        :param dry_run: only find them.
        :return: their paths.
        :raises TemporaryError: not all of it could be done.
        """

    # for compactions

    @abstractmethod
    def merge_candidates(self, prefix: str, is_enough: Callable[[int, int], bool]) -> MergeCandidates:
        """Find the small files of the sink's last commits.

        :param prefix: prefix of the sink's state.
        :param is_enough: whether so many commits with so many files are worth a minor compaction.
        :raises TemporaryError: the history can't be read now.
        """

    # for rewrites beside the stream

    @abstractmethod
    def rewritables(self) -> Iterator[Sequence[Rewritable]]:
        """The data files whose live rows the key index knows, as far as the table's metadata tell. Those of a very
        large table come in parts, in any order: what lets micro-batches wait takes one part, so that each file has its
        turn some time.

        :raises TemporaryError: the table's metadata can't be read now.
        """

    @abstractmethod
    def files_where(self, condition: str) -> "frozenset[str]":
        """Paths of the data files that may have rows for which a condition is true, as partitions and statistics tell.

        :param condition: in Spark SQL.
        :raises ConfigError: it isn't a condition on the table's columns, or the format can't compare files with it.
        """

    @abstractmethod
    def delete_new_rows(
        self, name: str, files: Sequence[str], rows: "DeletedRows", created: list[str]
    ) -> tuple[Sequence[str], WrittenDeletes]:
        """Write deletes for rows of data files that aren't committed yet.

        :param name: beginning of the names of new files.
        :param files: the data files, as in `ChangeSet`.
        :param created: the path of each written file is added to it, before it is written.
        :return: what to commit of `files`, and deletes to commit beside them.
        """

    @abstractmethod
    def handles(self, paths: Collection[str]) -> Sequence[Any]:
        """What names data files in a `Rewrite`, with the deletes that are only about them, of those that are live."""

    def merge_deletes(
        self, paths: Collection[str], data_files: Collection[str], files: Sequence[str]
    ) -> MergedDeletes | None:
        """What a commit replaces that merges position delete files.

        :param paths: of the old delete files.
        :param data_files: to which they applied.
        :param files: the new delete files, as in `ChangeSet`.
        :return: None if one of the old files applies to none of these any more, or to others (a rollback may have
            brought them back), or the format has no such files.
        """
        return None

    @abstractmethod
    def compact(self, limits: "CompactionLimits", *, dry_run: bool = False) -> "tuple[Compacted, int] | None":
        """Rewrite files while others commit, with deletes by value applied: of a table without a key index. Use a table
        of its own for it, as `load` returns it.

        :param dry_run: only find out how much there is to do.
        :return: what was done, and how many groups of files weren't rewritten because of others or an error. None if
            there is nothing to do.
        :raises CompactionFailedError: not all was done.
        :raises TemporaryError: nothing was done.
        """


@dataclass(frozen=True)
class Compacted:
    """What a compaction by the format's own procedure did.

    :param touched: number of data and delete files that are gone.
    :param written: number of new data files.
    :param bytes: of the data files that were read.
    :param seconds: that it took.
    """

    touched: int
    written: int
    bytes: int
    seconds: float


_SMALL = 0.75
"""A file below this share of the target size is small (as in Iceberg's `SizeBasedFileRewritePlanner`)."""


@dataclass(frozen=True)
class CompactionLimits:
    """What a compaction beside the stream takes, and how much of it.

    :param min_input_files: so many small files of a partition are merged.
    :param delete_ratio_threshold: a file with this share of deleted rows is rewritten.
    :param delete_file_threshold: likewise, with so many delete files.
    :param max_file_group_size: bytes that are rewritten by one commit.
    :param target_file_size: see `RewriteOptions`.
    :param max_concurrent_groups: so many groups are rewritten at the same time.
    :param fewest_opened: so many files less must a scan open afterwards, or nothing is done.
    :param most_bytes: of data files that may be rewritten. None if it doesn't matter.
    :param where: only files that may have such rows (`Target.files_where`). None for all files.
    :param small_file_size: bytes below which a file is small. None for a share of the table's target file size.
    """

    min_input_files: int
    delete_ratio_threshold: float
    delete_file_threshold: int
    max_file_group_size: int
    target_file_size: int | None = None
    max_concurrent_groups: int = 1
    fewest_opened: int = 1
    most_bytes: int | None = None
    where: str | None = None
    small_file_size: int | None = None

    def small_below(self, target_file_size: int) -> int:
        """The size below which a file is small, in bytes."""
        return self.small_file_size or int(_SMALL * target_file_size)


class Committer(ABC):
    """Changes one table. After each call, the table's state is that of its newest commit.

    :param newest_if_in_doubt: see `TableState.position`.
    """

    def __init__(self, table: Target, *, newest_if_in_doubt: bool = False) -> None:
        self.table = table
        self._newest_if_in_doubt = newest_if_in_doubt
        # sink -> the operation that was the newest one when the position was last right, taken back or not
        self._newest: dict[str, str | None] = {}

    @abstractmethod
    def retries(self) -> "Retries":
        """The retries of one micro-batch."""

    def commit(self, request: ChangeSet, retries: "Retries") -> None:
        """Commit, or find out why not.

        :raises TableNoLongerEmptyError: write the batch again, with deletes.
        :raises TableChangedError: look its keys up and write it again.
        :raises TableError: another sink commits under the same id, or the table is gone.
        :raises TemporaryError: the outcome is unknown or `retries` are used up. Files must be kept after an unknown
            outcome; it is a `CommitUnknownError` then.
        """
        base = request.base_snapshot
        while (refusal := self.commit_once(request, base)) is not None:
            base = self.base_after(refusal, request)
            retries.wait(refusal)

    def base_after(self, refusal: Exception, request: ChangeSet) -> int | None:
        """From where the same files may be sent again after a refusal: the `base` for `commit_once`.

        :raises TableNoLongerEmptyError: see `commit`.
        :raises TableChangedError: see `commit`.
        :raises TableError: see `commit`.
        """
        self.table.refresh()
        self.own_position(request.prefix, request.previous_operation)
        if request.written_for_empty_table and not self.table.is_empty():
            raise TableNoLongerEmptyError
        if request.index is not None and self.table.snapshot_id() != request.base_snapshot:
            raise TableChangedError(message_of(refusal))
        return self.table.snapshot_id()

    @abstractmethod
    def commit_once(self, request: ChangeSet, base: int | None) -> Exception | None:
        """Try to commit.

        :param base: the snapshot after which others' commits may be in conflict.
        :return: why it was refused, if the same files may be sent again; None if it was committed.
        :raises TableChangedError: the files are for another layout than the table has.
        :raises TableError: the table is gone, or can't be written any more.
        :raises TemporaryError: the outcome is unknown (`CommitUnknownError`), or the catalog doesn't answer.
        """

    @abstractmethod
    def rewrite(self, request: Rewrite) -> None:
        """Try to commit once. Nothing is lost if a rewrite has to wait for the next time.

        :raises TableChangedError: rows of the replaced files were deleted meanwhile, or files are gone.
        :raises IndexLostError: index and table differ in their live files. Nothing was committed.
        :raises CommitUnknownError: see `commit`.
        :raises RowdeltaError: any other one: nothing was committed.
        """

    def reset(self, prefix: str, state: Mapping[str, str], kept: Collection[str], *, empty: bool) -> None:
        """Forget a sink's state, in one commit. A commit of the sink that was begun before is refused after it.

        :param state: the state that is to be forgotten (`Target.own_state`).
        :param kept: names of its parts that stay.
        :param empty: whether all rows are removed too.
        :raises TableError: the sink has committed since, or the table is gone.
        :raises TemporaryError: see `commit`.
        """
        retries = self.retries()
        while (refusal := self.reset_once(prefix, state, kept, empty=empty)) is not None:
            retries.wait(refusal)
            self.table.refresh()

    @abstractmethod
    def reset_once(
        self, prefix: str, state: Mapping[str, str], kept: Collection[str], *, empty: bool
    ) -> Exception | None:
        """Try to `reset`. Returns why it was refused because of others, or None if it is done."""

    def check_idle(self, prefix: str, state: Mapping[str, str]) -> None:
        """:raises TableError: the sink has committed since it had this state."""
        if self.table.own_state(prefix).get("position") != state.get("position"):
            sink = prefix.removeprefix("rowdelta.")
            raise TableError(
                f"{self.table.name}: sink {sink!r} runs, and has just committed. Nothing was reset. Stop it first."
            )

    @abstractmethod
    def settle(self, prefix: str) -> None:
        """Store what a commit could not know before it was done, if anything is still missing. Call this when a table
        is opened.
        """

    def own_position(self, prefix: str, operation: str | None) -> StoredPosition | None:
        """The table's position, after a check that `operation` stored it. None if there is none and `operation` is
        None.

        :raises RolledBackError: the table was taken back since, so it has an earlier operation's position.
        :raises FencedError: another operation has stored a position, so somebody else commits with this sink's id.
        :raises TableError: the position was removed, or it is unknown whether the table was taken back.
        """
        stored = self.table.position(prefix, newest_if_in_doubt=self._newest_if_in_doubt)
        newest: str | None = json.loads(self.table.property(f"{prefix}.position") or "{}").get("operation")
        if (stored.operation if stored else None) == operation:
            self._newest[prefix] = newest
            return stored
        if stored is None:
            raise TableError(f"{self.table.name}: the sink's position was removed while it ran. Start it again.")
        # if nobody has committed since, it was taken back, perhaps not for the first time
        if newest in (operation, self._newest.get(prefix)):
            raise RolledBackError(
                f"{self.table.name} was rolled back to an earlier snapshot while the sink ran. What followed is read "
                "again from that snapshot's position."
            )
        raise FencedError(
            f"{self.table.name}: another run with the same sink id ({prefix.removeprefix('rowdelta.')}) committed "
            "while this one was working. This one stops; nothing was applied twice. If both are meant to run, give "
            "one its own sink.id."
        )


class Tables(Protocol):
    """Tables by `catalog.namespace.table`, and everything else that depends on the reader.

    `spark` is the session. If it is None, calls that need it raise `NeedsSparkError`.
    """

    @property
    def spark(self) -> "SparkSession | None": ...

    def load(self, name: str) -> TableState | None:
        """The table, or None if it doesn't exist.

        :raises TemporaryError: the catalog did not answer.
        """

    def check_new(self, section: "TableSection", columns: "T.StructType", path: str) -> None:
        """Check that a table with these columns could be created as its section of the configuration says.

        :param path: the table's place in the configuration.
        :raises ConfigError: it can't.
        """


class TargetCatalogs(Protocol):
    """The tables of one format in the session's catalogs, by `catalog.namespace.table`."""

    def load(self, name: str) -> Target | None: ...

    def create(
        self, section: "TableSection", columns: "T.StructType", properties: Mapping[str, str], path: str
    ) -> Target:
        """Create a table, or take the one that somebody else has just created.

        :param properties: properties of the table and of the sink's state. They replace the sink's defaults.
        :param path: the table's place in the configuration.
        :raises ConfigError: see `Tables.check_new`.
        :raises TableError: the catalog refuses it.
        """

    def create_log(self, name: str, columns: "T.StructType", properties: Mapping[str, str], writer: str) -> Target:
        """Create a table without a key that only grows.

        :param writer: a column. Appends with different values in it don't conflict (`ChangeSet.conflicts_with`).
        """

    def check_new(self, section: "TableSection", columns: "T.StructType", path: str) -> None: ...

    def storage_properties(self, config: "Config", name: str) -> dict[str, str]:
        """By what the catalog of a table reaches files that are no table's, such as the key index."""
