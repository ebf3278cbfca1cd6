"""What a table tells of itself, and what a commit to it says: plain values."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from changelog.amounts import amount, sized
from sink.errors import TemporaryError

if TYPE_CHECKING:
    from deltawriters.content import DataFile
    from deltawriters.keyindex import IndexedFile
    from sink.sources.source import Position

NO_FLOATS = "A commit can't name the partition of NaN. Partition by another column."


class CommitUnknownError(TemporaryError):
    """It is unknown whether the commit succeeded. The attempt's files must not be deleted."""


@dataclass(frozen=True)
class Done:
    """It is committed, and the table's state is that of the commit."""


@dataclass(frozen=True)
class Refused:
    """Nothing was committed, because of what others did.

    :param again: `send` the same files, if they fit what is current now; or `write` them for that.
    """

    why: str
    again: Literal["send", "write"] = "write"


@dataclass(frozen=True)
class Unknown:
    """Nothing tells whether it was committed. The files must be kept; the table's position decides later."""

    why: str


Outcome = Done | Refused | Unknown


def refusal(outcome: Outcome) -> Refused | None:
    """For those who give up after a refusal.

    :raises CommitUnknownError: the outcome is unknown.
    """
    if isinstance(outcome, Unknown):
        raise CommitUnknownError(outcome.why)
    return outcome if isinstance(outcome, Refused) else None


OF_POSITION = {"source": "", "topic-id": "", "streamed": "[]", "undecoded": "0", "loaded": "", "resnapshot": ""}
"""Sink properties that describe the changes up to the position: last part of the name -> its neutral value. A rollback
of the table takes them back.
"""


@dataclass(frozen=True)
class StoredPosition:
    """A sink's position as a table stores it, and which commit stored it.

    `index` names the version of the key index that belongs to the commit (`sink.table.keyindex`), if it has one, and
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


@dataclass(frozen=True)
class LiveFile:
    """A data file of the current state.

    :param vector: its deletion vector, in the format's terms, with `record-count`; None if it has none.
    :param parquet_deletes: Iceberg's position delete files that apply to it, if the table was v2 and has vectors now.
    :param handle: what the format needs to read it (`Reader.rows_of`).
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

    files: Sequence["DataFile"]
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
    :param base_snapshot: the snapshot after which others' commits may be in conflict; None if the table had none.
    :param previous_operation: the commit that stored the position which this batch continues; None if there was none.
    :param written_for: the `Table.layout` for which the files were written. None if it doesn't matter.
    :param conflicts_with: a column and its value. Only files that may have such rows conflict with this commit. By
        default all files do.
    :param written_for_empty_table: the files have no deletes, because the table was empty.
    :param truncates: the source emptied its table. All data files and deletes that the table has at the moment of the
        commit are removed, whoever wrote them: only `files` stay.
    :param summary: what the table's history says of the commit.
    :param properties: further properties of the sink's state, set in the same commit.
    :param metrics: numbers about the work, for a history that shows them.
    :param index: the key index's part. Rows were looked up in `base_snapshot`, so the commit is only right there.
    :param newest_if_in_doubt: see `TableView.position`.
    :param amends: the operations that had stored this position before, if the commit corrects rows beside a run of the
        sink (`sink.verify.healing`). That run goes on from it (`AmendedError`).
    :param others: the positions of other sinks, as the table has them in `base_snapshot`, if their commits may be in
        conflict that change no file: they may have deleted a key that had no row. None if not.
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
    newest_if_in_doubt: bool = False
    amends: Sequence[str] = ()
    others: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Rewrite:
    """A request to replace files by others that have the same live rows and deletes.

    It doesn't set the source position, so it does no harm if another run has stored a newer one meanwhile.

    :param prefix: as in `ChangeSet`.
    :param position_operation: the commit that stored the sink's position.
    :param files: the new files, as in `ChangeSet`.
    :param replaced: the `Mergeable.handle` of the old ones, or what `Upkeep.handles` returned.
    :param index: the key index's part. The rows of `files` come from the snapshot `index.base`.
    :param summary: what the table's history says of the commit.
    :param written_for: the `Table.layout` of `files`.
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
