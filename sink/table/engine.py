"""The seam between what decides about a table and what runs its tasks.

`TableSink`, `KeyIndex` and `Rewriting` decide what is written and committed. They know plain values only: an
engine runs the programs of tasks (`sink.spark.tasks`) on records and data files, as plans say (`sink.plans`), and tells
what came of it. The engine of every run is Spark (`sink.spark.engine`).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from pyiceberg.io import FileIO

from changelog.decoding import Stated
from deltawriters import TableSpec
from deltawriters.keyindex import IndexSlice, RunInfo
from deltawriters.scratch import Scratch
from sink.plans import Groups, RewritePlan
from sink.routing import KeyHash
from sink.sources.source import TableBatch
from sink.table.table_plan import TablePlan
from sink.table.task_plans import TaskPlans
from sink.table.written import Begun, Written
from sink.targets.seam import Table
from sink.targets.values import LiveFile

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from sink.targets.catalogs import Catalogs

T = TypeVar("T")


@dataclass(frozen=True)
class KeyReading:
    """How the keys of data files get into a key index.

    :param table: the table that has the files.
    :param hash: computes the high hashes.
    :param uuids: columns that are UUIDs.
    :param index: where the runs go, and the base of the low hashes. It has no runs.
    :param sequence: sequence number of the runs.
    """

    table: TableSpec
    hash: KeyHash
    uuids: frozenset[str]
    index: IndexSlice
    sequence: int


@dataclass(frozen=True)
class Decoded:
    """Changelog rows that are stored in the executors.

    :param observed: see `Written`.
    :param stated: see `Written`.
    """

    changes: "DataFrame"
    observed: Mapping[str, str]
    stated: Stated


class BatchWriter(Protocol):
    """Writes the files of one table's micro-batches."""

    def follow(self, plan: TablePlan, tasks: TaskPlans) -> None:
        """Write for a table that was altered."""

    def write(self, batch: TableBatch, begun: Begun, *, may_repeat: bool) -> Written:
        """Decode a micro-batch's records and write them. The files are in the `Scratch` of the writer, also those
        of a job that is interrupted. After any of the following errors they are deleted.

        :param may_repeat: the dead-letter table may already have some of the bad records. They are left out.
        :raises IndexLostError: a part of the key index is missing or damaged.
        :raises RowdeltaError: see `job_error`.
        """

    def write_with(self, others: Sequence[Self], batch: TableBatch, begun: Sequence[Begun]) -> list[Written]:
        """Write the same records for several tables at once. See `write` for errors: the files of all are deleted.

        :param begun: of this table, and of those of the `others`.
        :return: likewise.
        """

    def decoded(self, records: "DataFrame", keep: "Callable[[DataFrame], DataFrame]") -> Decoded:
        """Decode raw records, without writing.

        :param keep: filters the changelog rows.
        :raises RowdeltaError: see `job_error`.
        """


class StoredFolder(Protocol):
    """A folder with folders of files."""

    def names(self, folder: str) -> Sequence[str]:
        """Names of the files in one of its folders, which need not exist."""

    def delete(self, paths: Collection[str]) -> None:
        """Delete files. It is no error if one isn't there. If one can't be deleted, this is logged, and the next
        clean-up finds it.

        :param paths: relative to the folder.
        """


class IndexFolder(StoredFolder, Protocol):
    """The folder of a table's key index.

    `location` has no slash at the end. `io` reads and writes the folder's files, and `io_properties` are those with
    which tasks make such an `io`. The table's own properties are for its folder, and credentials among them may expire.
    """

    @property
    def location(self) -> str: ...

    @property
    def io(self) -> FileIO: ...

    @property
    def io_properties(self) -> tuple[tuple[str, str], ...]: ...


class Engine(Protocol):
    """Runs the tasks of one table, and reaches what the table's driver needs beside it."""

    @property
    def catalogs(self) -> "Catalogs":
        """The catalogs of the configuration."""

    def another(self) -> "Engine":
        """An engine of the same table, whose tasks may run at the same time."""

    def beside(self, work: Callable[[], T], *, is_long: bool = False) -> Future[T]:
        """Do some work beside micro-batches. Its jobs get what these leave free, and end with the run.

        :param is_long: whether it may take minutes. Short work of any table doesn't wait for it.
        """

    def writer(self, plan: TablePlan, tasks: TaskPlans, files: Scratch) -> BatchWriter: ...

    def index_folder(self) -> IndexFolder: ...

    def table_folder(self) -> StoredFolder:
        """The table's own."""

    def removals(self, table: Table, plan: TablePlan, before: datetime) -> "tuple[DataFrame, int]":
        """Changelog rows that remove the rows which were marked as deleted before a time, and their number
        (`sink.spark.tasks.purge`).
        """

    def read_keys(self, files: Sequence[LiveFile], reading: KeyReading) -> list[RunInfo]:
        """Read the live rows' keys of at least one data file, and write runs.

        :return: what was written.
        """

    def merge_runs(self, index: IndexSlice, name: str) -> list[RunInfo]:
        """Merge the runs `index.merge` in tasks (`IndexSlice.write_merged`).

        :param name: beginning of the new runs' names.
        :return: what was written.
        """

    @property
    def parallelism(self) -> int:
        """How many tasks may run side by side."""

    def rewrite(self, plan: RewritePlan, groups: Groups, written: list[str]) -> Sequence[Mapping[str, Any]]:
        """Move rows to new files in tasks.

        :param written: the paths of new files are added to it, also if it fails.
        :return: the tasks' results (`RewritePlan.move`).
        """
