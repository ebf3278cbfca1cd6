"""The seam between the sink and a table format: what a table is to everything else.

A `TableView` is what can be looked at, with or without a JVM. A `Table` is what micro-batches need, an `Upkeep` what
maintenance needs, and a `Reader` gives its rows as Spark's frames. Each format has a package beside this module.
Nothing outside of such a package knows a format.

What a **snapshot id** is depends on the format: Iceberg's snapshot ids are random numbers, and the id of a Delta
table's state is its version. Here it only tells one state of a table's rows from another.
"""

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from sink.targets.upkeep_values import (
    Compacted,
    CompactionLimits,
    EqualityDeleted,
    MergeCandidates,
    MergedDeletes,
    Rewritable,
    UpkeepFacts,
)
from sink.targets.values import (
    ChangeSet,
    LastCommit,
    LiveFile,
    Outcome,
    Rewrite,
    StoredPosition,
    TableChanges,
    TouchedFiles,
    WrittenDeletes,
)

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql import types as T

    from changelog.spec import ColumnSpec
    from deltawriters import TableSpec
    from deltawriters.old_rows import DeletedRows
    from deltawriters.ordering import RowOrder
    from deltawriters.scratch import Scratch
    from sink.config import TableSection
    from sink.targets.history import History
    from sink.targets.retries import Retries


class TableView(Protocol):
    """A table as it was when it was read."""

    name: str
    snapshot_word: ClassVar[str]
    """What the format calls a state of the table, in messages: `snapshot` or `version`."""

    @property
    def spec(self) -> "TableSpec":
        """The facts that delta writers need, as plain values."""

    def property(self, name: str) -> str | None:
        """A property's value: one of the table's own, or (`rowdelta.…`) one in which a sink keeps its state."""

    def stored(self, part: str) -> Mapping[str, str]:
        """What sinks have stored in properties `<prefix>.<part>`, by prefix (`rowdelta.…`)."""

    def position(self, prefix: str, *, newest_if_in_doubt: bool = False) -> StoredPosition | None:
        """The sink's position in the current state, also after somebody took the table back to an earlier one.

        :param newest_if_in_doubt: take the newest position if what is left of the table's history doesn't tell. It may
            be ahead of the data.
        :raises TableError: nothing that is left tells the position.
        """

    def snapshot_id(self) -> int | None:
        """Id of the current state of the rows. None if the table has never had a row."""

    def older_of(self, first: int, second: int) -> int:
        """Which of two states came before the other one. If one is unknown (by now), the other one."""
        return min(first, second)

    def last_commit(self) -> LastCommit | None:
        """None if the table has no snapshot."""

    def facts(self) -> UpkeepFacts | None:
        """What its maintenance depends on. None if the table has no snapshot, or doesn't tell."""

    def dangling_positions(self) -> int:
        """How many of `UpkeepFacts.deleted_rows` are in delete files that are known to apply to nothing."""
        return 0

    def columns(self) -> tuple["ColumnSpec", ...]:
        """The table's columns as Spark types.

        :raises TableError: a column has a type that Spark can't represent.
        """

    def identifiers(self) -> tuple[str, ...]:
        """The columns that the table itself calls its key. Empty if it names none.

        :raises TableError: the writers don't know the type of a column.
        """

    def check_writable(self, *, appends: bool = False, copies: bool = False) -> None:
        """:param appends: whether the sink only appends to it.
        :param copies: whether it deletes rows copy-on-write.
        :raises TableError: it has a property, a feature or a column that the sink doesn't know or must not ignore.
        """

    def check_fits(self, section: "TableSection") -> None:
        """:raises TableError: key or partitioning aren't as `section` says, or the sink can't write such a table so."""

    def row_order(self) -> "RowOrder | None":
        """The order that the table itself has for its rows. None if it has none, or one that the writers can't keep."""
        return None

    def not_followed(self) -> Iterator[str]:
        """A sentence for each property and feature of the table that the sink doesn't follow."""


class Table(TableView, Protocol):
    """A table that the sink writes, in a Spark session. What it knows is as of the last `refresh` or commit."""

    spark: "SparkSession"

    @property
    def layout(self) -> Hashable:
        """What files are written for (schema, partitioning, …). Files for another one must not be committed."""

    @property
    def table_id(self) -> str:
        """Another table that gets the same name has another one."""

    @property
    def needs_credentials(self) -> bool:
        """Credentials for the table's files are about to expire; `refresh` gets new ones."""
        return False

    def refresh(self) -> None:
        """Read its state again.

        :raises TableError: it is gone or was replaced.
        :raises TemporaryError: the catalog did not answer.
        """

    def is_empty(self) -> bool:
        """Whether the current state has no live data file."""

    def own_state(self, prefix: str) -> Mapping[str, str]:
        """What a sink has stored in the table, by the last part of the property's name."""

    def set_property(self, name: str, value: str | None) -> None:
        """Set a property, or (None) remove it, in a commit that changes no row.

        :raises TableError: the table is gone, or the catalog refuses.
        :raises TemporaryError: the catalog doesn't answer, or others commit all the time.
        """

    def evolve(self, changes: "Mapping[str, T.DataType | None]", defaults: Mapping[str, Any]) -> Mapping[str, Any]:
        """Add columns, widen columns, or (None) make them optional, in one commit. If others commit meanwhile, nothing
        changes: the next attempt at the micro-batch finds out what is still missing.

        :param defaults: of new columns, as `changelog.values.defaults.default_of` gives them.
        :return: those of them that earlier rows have, as far as the format can.
        :raises TableError: the format refuses the change.
        """

    def prepare_global_deletes(self, *, always: bool) -> bool:
        """Let equality deletes apply to all partitions: `always`, or if it has rows that were partitioned in another
        way. Returns whether it has, so that all of them must be global.
        """
        return False

    def key_encoding(self, key: Sequence[str], buckets: int | None) -> str:
        """Everything on which the hashes of keys and the form of vectors depend, as a text. A key index with another
        one is of no use.

        :param buckets: number of the table's buckets of a key column, if hashes begin with it.
        """

    def index_forbidden_at(self, location: str) -> str | None:
        """Why the key index must not be at a location. None if it may."""

    def changes_since(self, base: int | None, included: "set[int]") -> TableChanges | None:
        """What others changed between a snapshot and the current one.

        :param included: snapshots after `base` that don't count as others'.
        :return: None if the history doesn't tell any more, or doesn't lead from `base` over `included` to here. The
            caller then reads the whole table.
        """

    def live_files(self) -> Iterator[LiveFile]:
        """The data files of the current state."""

    def delete_rows(
        self,
        name: str,
        rows: "DeletedRows",
        known: Callable[[str], Mapping[str, Any] | None],
        parquet_deletes: Mapping[str, Sequence[str]],
        scratch: "Scratch",
    ) -> WrittenDeletes:
        """Write deletes for rows of earlier snapshots.

        :param name: beginning of the names of new files.
        :param known: data file -> its current vector.
        :param parquet_deletes: see `LiveFile`; of data files that have no vector.
        :param scratch: gets the files that are written, also after an error.
        """

    def delete_new_rows(
        self, name: str, files: Sequence[str], rows: "DeletedRows", scratch: "Scratch"
    ) -> tuple[Sequence[str], WrittenDeletes]:
        """Write deletes for rows of data files that aren't committed yet.

        :param files: the data files, as in `ChangeSet`. See `delete_rows` for the rest.
        :return: what to commit of `files`, and deletes to commit beside them.
        """

    def touched_files(self, paths: Collection[str]) -> TouchedFiles:
        """Find data files of the current state, and what deletes their rows already.

        :raises IndexLostError: one of them isn't live.
        """

    def commit(self, request: ChangeSet | Rewrite) -> Outcome:
        """Try to commit, once.

        :raises IndexLostError: index and table differ in their live files. Nothing was committed.
        :raises RowdeltaError: the table is gone, can't be written, or the catalog doesn't answer; another run has
            committed, or the table was taken back (`own_position`). Nothing was committed.
        """

    def reset(self, prefix: str, state: Mapping[str, str], kept: Collection[str], *, empty: bool) -> Outcome:
        """Try to forget a sink's state, in one commit. A commit of the sink that was begun before is refused after it.

        :param state: the state that is to be forgotten (`own_state`).
        :param kept: names of its parts that stay.
        :param empty: whether all rows are removed too.
        :raises TableError: the sink has committed since, or the table is gone.
        """

    def retries(self) -> "Retries":
        """How often a micro-batch is committed again after refusals."""

    def settle(self, prefix: str) -> None:
        """When a table is opened: store what a commit could not know before it was done, if it is still missing."""
        return

    @cached_property
    def newest_seen(self) -> dict[str, str | None]:
        """By prefix, for `sink.targets.own_position`: the operation that had stored the newest position when the sink's
        was last right.
        """
        return {}

    def upkeep(self) -> "Upkeep":
        """What maintenance needs of this table: always the same object."""

    def reader(self) -> "Reader":
        """The table's rows, as Spark reads them."""


class Upkeep(Protocol):
    """What maintenance needs of a table. Each verb raises `TemporaryError` if the table's metadata can't be read now,
    or if not all of it could be done.
    """

    def merge_candidates(self, prefix: str, is_enough: Callable[[int, int], bool]) -> MergeCandidates:
        """Find the small files of the sink's last commits.

        :param is_enough: whether so many commits with so many files are worth a minor compaction.
        """

    def rewritables(self) -> Iterator[Sequence[Rewritable]]:
        """The data files whose live rows the key index knows, as far as the table's metadata tell. Those of a very
        large table come in parts, in any order: what lets micro-batches wait takes one part, so that each file has its
        turn some time.
        """

    def files_where(self, condition: str) -> "frozenset[str]":
        """Paths of the data files that may have rows for which a condition is true, as partitions and statistics tell.

        :param condition: in Spark SQL.
        :raises ConfigError: it isn't a condition on the table's columns, or the format can't compare files with it.
        """

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

    def equality_deletes(self) -> EqualityDeleted | None:
        """Equality deletes that somebody has left. None if there are none, as in formats that have no such thing."""
        return None

    def dangling_deletes(self) -> Sequence[Any]:
        """What names, in a `Rewrite`, delete files that apply to no data file. Empty if the format has no such thing,
        or the table has too many files to look at.
        """
        return ()

    def compact(self, limits: CompactionLimits, *, dry_run: bool = False) -> tuple[Compacted, int] | None:
        """Rewrite files while others commit, with deletes by value applied: of a table without a key index. Use a table
        of its own for it, as `load` returns it.

        :return: what was (`dry_run`: would be) done, and how many groups of files weren't rewritten because of others
            or an error. None if there is nothing to do.
        :raises CompactionFailedError: not all was done.
        """

    def remove_rows(self, rows: "DataFrame", columns: Sequence[str]) -> Exception | None:
        """Try to delete the rows that are equal to one of `rows` in some columns; NULL equals NULL.

        :return: why it was refused, if others changed the table meanwhile; None if it is done.
        """

    def has_old_states(self, older_than: timedelta, retain_last: int, keep: int | None) -> bool:
        """Whether `expire` may find something to do. This is cheap."""
        return False

    def expire(self, older_than: timedelta, retain_last: int, keep: int | None) -> int:
        """Remove states of the table that nobody needs any more, with the files that only they have.

        :param retain_last: so many of the newest stay, whatever their age.
        :param keep: a state. It and all that came after it stay.
        :return: how many files were deleted. 0 if the format does this by itself.
        """
        return 0

    def remove_orphans(self, older_than: timedelta, *, dry_run: bool = False) -> Sequence[str]:
        """Delete (`dry_run`: find) files in the table's folder that no state of the table has. Returns their paths.

        :param older_than: younger files may be those of a commit that is still to come.
        """

    def tend(self) -> None:
        """After commits: do what is due, such as a checkpoint of the log, without holding up the stream."""
        return

    def finish_tending(self, seconds: float) -> None:
        """Wait for what `tend` has begun, but no longer than this."""
        return


class Reader(Protocol):
    """A table's rows, as Spark's frames."""

    def frame(self, spark: "SparkSession") -> "DataFrame":
        """The rows of now, in a session of the caller's."""

    def frame_at(self, snapshot_id: int) -> "DataFrame":
        """The rows of a state that `history` knows. If its files are gone, reading them fails."""

    def current_frame(self, snapshot_id: int) -> "DataFrame":
        """The rows of the newest state, with the columns that it has now: it may have been altered since."""
        return self.frame_at(snapshot_id)

    def frame_of_commit(self, snapshot_id: int) -> "DataFrame | None":
        """The rows that a commit added. None if the history no longer has it."""

    def rows_of(
        self, files: Sequence[LiveFile], columns: Sequence[str]
    ) -> "AbstractContextManager[tuple[DataFrame, Column, Column, Sequence[str]]]":
        """The live rows of data files, all deletes applied.

        :param columns: those that will be read.
        :return: a frame with at least these columns; two more columns of it, the row's file and position; and for each
            of `files` the text that the file's column has for it.
        """

    def history(self, prefix: str) -> "History":
        """The table's commits, with the positions of the sink whose state has this prefix."""
