"""The seam between the sink and a table format: what a table is to everything else.

A `TableView` is what can be looked at. A `Table` is what micro-batches need, an `Upkeep` what maintenance needs, and a
`Reader` gives its rows as Spark's frames. Each format has a package beside this module. Nothing outside of such a
package knows a format. What goes through the seam is explained in `values.py` and `upkeep_values.py`.

What a **snapshot id** is depends on the format: Iceberg's snapshot ids are random numbers, and the id of a Delta
table's state is its version. Here it only tells one state of a table's rows from another. A **prefix** is that of a
sink's state in the table (`rowdelta.<sink id>`).
"""

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from sink.targets.scan_costs import ScanCosts
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
    """A table as it was when it was read.

    A verb raises `TableError` for a column whose type Spark or the writers don't know.
    """

    name: str
    snapshot_word: ClassVar[str]
    """What the format calls a state of the table, in messages: `snapshot` or `version`."""

    @property
    def spec(self) -> "TableSpec":
        """The facts that delta writers need, as plain values."""

    def property(self, name: str) -> str | None:
        """A property's value: one of the table's own, or (`rowdelta.…`) one in which a sink keeps its state."""

    def stored(self, part: str) -> Mapping[str, str]:
        """What sinks have stored in properties `<prefix>.<part>`, by prefix."""

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

    def columns(self) -> tuple["ColumnSpec", ...]:
        """As Spark types."""

    def identifiers(self) -> tuple[str, ...]:
        """The columns that the table itself calls its key. Empty if it names none."""

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
    """A table that the sink writes, in a Spark session. What it knows is as of the last `refresh` or commit.

    A verb that asks or changes the table raises `TableError` if it is gone, was replaced, or the catalog refuses; and
    `TemporaryError` if the catalog doesn't answer.
    """

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
        """Read the table's state again."""

    def is_empty(self) -> bool:
        """Whether the current state has no live data file."""

    def own_state(self, prefix: str) -> Mapping[str, str]:
        """What a sink has stored in the table, by the last part of the property's name."""

    def set_property(self, name: str, value: str | None) -> None:
        """Set a property, or (None) remove it, in a commit that changes no row."""

    def evolve(self, changes: "Mapping[str, T.DataType | None]", defaults: Mapping[str, Any]) -> Mapping[str, Any]:
        """Add columns, widen columns, or (None) make them optional, in one commit. If others commit meanwhile, nothing
        changes: the next attempt at the micro-batch finds out what is still missing.

        :param defaults: of new columns, as `changelog.values.defaults.default_of` gives them.
        :return: those of them that earlier rows have, as far as the format can.
        """

    def prepare_global_deletes(self, *, always: bool) -> bool:
        """Let equality deletes apply to all partitions: `always`, or if it has rows that were partitioned in another
        way. Returns whether it has, so that all of them must be global.
        """
        return False

    def key_encoding(self, key: Sequence[str], buckets: int | None) -> str:
        """All that hashes of keys and the form of vectors depend on: the key index of another one is of no use.

        :param buckets: number of the table's buckets of a key column, if hashes begin with it.
        """

    def index_forbidden_at(self, location: str) -> str | None:
        """Why the key index must not be at a location. None if it may."""

    def changes_since(self, base: int | None, included: "set[int]") -> TableChanges | None:
        """What others changed between a snapshot and the current one.

        :param base: the snapshot. None: before the table's first one.
        :param included: snapshots after `base` whose changes aren't others'. They are left out.
        :return: None if the history doesn't lead (any more) from `base` over all of `included` to here. The caller then
            reads the whole table.
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
        """Like `delete_rows`, for data files that aren't committed yet: what to commit of `files`, and deletes beside
        them.
        """

    def touched_files(self, paths: Collection[str]) -> TouchedFiles:
        """:raises IndexLostError: one of these data files isn't live."""

    def commit(self, request: ChangeSet | Rewrite) -> Outcome:
        """Try to commit, once.

        :raises IndexLostError: index and table differ in their live files. Nothing was committed.
        :raises RowdeltaError: likewise, also if another run has committed, or the table was taken back.
        """

    def reset(self, prefix: str, state: Mapping[str, str], kept: Collection[str], *, empty: bool) -> Outcome:
        """Try to forget a sink's state, in one commit. A commit of the sink that was begun before is refused after it.

        :param state: the state that is to be forgotten (`own_state`), but for the parts that are `kept`.
        :param empty: whether all rows are removed too.
        :raises TableError: the sink has committed since.
        """

    def retries(self) -> "Retries":
        """How often a micro-batch is committed again after refusals."""

    def settle(self, prefix: str) -> None:
        """When a table is opened: store what a commit could not know before it was done, if it is still missing."""
        return

    @cached_property
    def newest_seen(self) -> dict[str, str | None]:
        """For `own_position`: by prefix, the operation with the newest position when the sink's was last right."""
        return {}

    def upkeep(self) -> "Upkeep":
        """Always the same object."""

    def reader(self) -> "Reader":
        """The table's rows, as Spark reads them."""


class Upkeep(Protocol):
    """What maintenance needs of a table. Each verb raises `TemporaryError` if the table's metadata can't be read now,
    or if not all of it could be done. What a format has no need of does nothing.
    """

    def facts(self) -> UpkeepFacts | None:
        """None if the table has no snapshot, or doesn't tell."""

    def merge_candidates(self, prefix: str, is_enough: Callable[[int, int], bool]) -> MergeCandidates:
        """:param is_enough: whether so many commits with so many files are worth a minor compaction."""

    def look_at_last(self, prefix: str) -> None:
        """Read what the last commit changed, so that `merge_candidates` takes less time. Another thread may call it."""
        return

    @property
    def scan_costs(self) -> ScanCosts:
        """What readers of the table pay for."""

    def rewritables(self) -> Iterator[Sequence[Rewritable]]:
        """The data files whose live rows the key index knows. Those of a very large table come in parts, in any order:
        what lets micro-batches wait takes one part, so that each file has its turn some time.
        """

    def files_where(self, condition: str) -> "frozenset[str]":
        """Paths of the data files that may have rows for which a condition in Spark SQL is true.

        :raises ConfigError: it isn't a condition on the table's columns, or the format can't compare files with it.
        """

    def handles(self, paths: Collection[str]) -> Sequence[Any]:
        """What names data files in a `Rewrite`, with the deletes that are only about them, of those that are live."""

    def merge_deletes(
        self, paths: Collection[str], data_files: Collection[str], files: Sequence[str]
    ) -> MergedDeletes | None:
        """What a commit replaces that merges position delete files.

        :param paths: of the old delete files. When they were read, they applied to `data_files`.
        :param files: the new delete files, as in `ChangeSet`.
        :return: None, and they must stay, if one of the old files applies to none of `data_files` any more, or to
            others (a rollback may have brought them back). Also None if the format has no such files.
        """
        return None

    def equality_deletes(self) -> EqualityDeleted | None:
        """Equality deletes that somebody has left. None if there are none."""
        return None

    def dangling_deletes(self) -> Sequence[Any]:
        """What names, in a `Rewrite`, delete files that apply to no data file; none if there are too many to look."""
        return ()

    def compact(self, limits: CompactionLimits, *, dry_run: bool = False) -> tuple[Compacted, int] | None:
        """Rewrite files of a table without a key index, while others commit: what was (`dry_run`: would be) done, and
        how many groups of files were left because of others or an error. Use a table of its own for it, as `load`
        returns it.

        :raises CompactionFailedError: not all was done.
        """

    def remove_rows(self, rows: "DataFrame", columns: Sequence[str]) -> Exception | None:
        """Try to delete the rows that are equal to one of `rows` in some columns; NULL equals NULL. Returns why it was
        refused, if others changed the table meanwhile.
        """

    def has_old_states(self, older_than: timedelta, retain_last: int, keep: int | None) -> bool:
        """Whether `expire` may find something to do. This is cheap."""
        return False

    def expire(self, older_than: timedelta, retain_last: int, keep: int | None) -> int:
        """Remove states of the table that nobody needs any more. Returns how many files that only they had are deleted.

        :param retain_last: so many of the newest stay, whatever their age.
        :param keep: a state. It and all that came after it stay.
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
        """The live rows of data files, all deletes applied: a frame with at least `columns`; two more columns of it,
        the row's file and position; and for each of `files` the text that the file's column has for it.
        """

    def history(self, prefix: str) -> "History":
        """The table's commits, with the positions of the sink."""
