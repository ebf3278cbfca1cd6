"""What only a table's maintenance exchanges with it: plain values."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sink.errors import ConfigError, TemporaryError

if TYPE_CHECKING:
    from deltawriters.content import DataFile, DeleteFile
    from deltawriters.keyindex import IndexedFile


@dataclass(frozen=True)
class UpkeepFacts:
    """What a table's metadata tell of its maintenance.

    :param data_files: live data files.
    :param size_in_bytes: of them together.
    :param rows: in them, live or not.
    :param count_deleted: tells how many of these are deleted by position, which may take long. In Iceberg's version 2,
        positions in data files that are gone count too until their delete files go, unless these are more than half of
        the rows, and known to apply to nothing.
    :param equality_deletes: keys that are deleted by value.
    :param snapshots: when each snapshot was made that is still there, in milliseconds since 1970, the oldest first.
        Empty if the format looks after them by itself.
    :param rewritten_at: when a rewrite beside the stream was committed last; None if no known commit is one.
    :param rewritten_files: how many data files that commit replaced.
    """

    data_files: int
    size_in_bytes: int
    rows: int
    count_deleted: Callable[[], int]
    equality_deletes: int = 0
    snapshots: Sequence[int] = ()
    rewritten_at: int | None = None
    rewritten_files: int = 0


@dataclass(frozen=True)
class Mergeable:
    """A small file of the sink that a minor compaction may merge: a data file, or (Iceberg v2) a position delete file.

    :param partition: JSON text of the partition value.
    :param file: with the number of a data file's rows, unless only delete files tell which are live (Iceberg v2).
    :param handle: what names it in a `Rewrite`. None: what micro-batches delete changes it, so it is looked up then.
    """

    partition: str
    file: "DataFile | DeleteFile"
    handle: Any = None


@dataclass(frozen=True)
class MergeCandidates:
    """The small files of the last commits.

    :param number: the number of the next minor compaction.
    :param commits: commits of the sink since the last one.
    :param files: files that these wrote.
    :param spec_id: id of the partitioning of all these files.
    :param partitions: files that may be merged, by partition. Empty if `is_enough` said no.
    :param deletes: all position delete files (Iceberg v2) that may apply to them, by partition.
    :param gone: paths of files that such deletes may name, and that were replaced meanwhile.
    """

    number: int
    commits: int
    files: int
    spec_id: int
    partitions: Mapping[str, Sequence[Mergeable]]
    deletes: Mapping[str, Sequence[Mergeable]]
    gone: Collection[str] = ()


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

    file: "DeleteFile"
    rows: int
    data_files: int


@dataclass(frozen=True)
class MergedDeletes:
    """What replaces position delete files that were merged, in the table's current state (`Upkeep.merge_deletes`).

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
    :param file: the file itself, with the number of its live rows if the metadata tell it.
    :param applying: the position delete files (Iceberg v2) that apply to it.
    :param settled: number of commits since the last one that deleted a row of it, as far as the table's metadata tell.
    """

    spec_id: int
    partition: str
    rows: int
    deleted: int
    deletes: int
    file: "DataFile"
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
    :param where: only files that may have such rows (`Upkeep.files_where`). None for all files.
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
