"""What tasks are told: plain values that the driver makes. They know no Spark."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from changelog.decoding import ChangelogDecoder
from deltawriters import DeltaOptions, TableSpec, TaskId
from deltawriters.delete_files import RewriteGroup
from deltawriters.keyindex import IndexSlice
from deltawriters.move import CopyGroup, Mover
from deltawriters.ordering import RowOrder
from deltawriters.resolve import IndexTask
from sink.routing import KeyHash, range_of

ON_DRIVER = 16 * 1024 * 1024
"""Most bytes of positions and old vectors that the driver takes. They are about 8 million rows, and the driver holds
some four times as much. On two cores, a job of tasks unites vectors faster from about 40 MB on.
"""


@dataclass(frozen=True)
class IndexPlan:
    """The key index for a micro-batch. The range of the high hash is cut into `tasks` parts; task i owns part i.

    :param sequence: sequence number of the runs that the tasks write.
    :param told_bytes: most bytes of positions of old rows that each task tells the driver (`deltawriters.old_rows`).
    """

    slice: IndexSlice
    sequence: int
    tasks: int
    told_bytes: int

    def task(self, number: int, operation: str) -> IndexTask:
        """The part that task `number` owns."""
        first, last = range_of(number, self.tasks)
        return IndexTask(self.slice, first, last, self.sequence, f"{operation}-{number:05d}")


@dataclass(frozen=True)
class TaskPlan:
    """What every task of one micro-batch and table must know. It is small when pickled.

    :param options: None for a table that only grows.
    :param dead_letters: the dead-letter table, or None if a bad record stops the job.
    :param source_place: the order columns with the Kafka partition and the place in it. The task reports which
        partitions had snapshot rows. None if nobody needs this report.
    :param lasting: pack all data files for a long life (`sink.table.plan.files_last`).
    :param order: in which rows are written.
    :param purges: whether it is a purge (`sink.sources.source.Work`).
    """

    table: TableSpec
    options: DeltaOptions | None
    operation: str
    target: str
    dead_letters: TableSpec | None
    source_place: tuple[str, str] | None
    index: IndexPlan | None = None
    lasting: bool = False
    order: RowOrder | None = None
    purges: bool = False


@dataclass(frozen=True)
class Share:
    """A table's part in a job that writes several tables. One task writes the whole table, so it owns all hashes.

    :param begin: topic -> partition -> offset from which the table hasn't applied records. Other tables may have others
        of the same topics.
    """

    decoder: ChangelogDecoder
    plan: TaskPlan
    hash: KeyHash
    begin: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class RewritePlan:
    """What every task must know that moves rows to new files (`deltawriters.move.Mover`).

    :param order: in which rows are written.
    """

    table: TableSpec
    key: tuple[str, ...]
    index: IndexSlice
    sequence: int
    hash: KeyHash
    operation: str
    order: RowOrder | None = None

    def move(self, task: TaskId, groups: "Groups", written: Callable[[list[str]], None]) -> dict[str, Any]:
        """Move the rows of groups of files, as one task.

        :param written: is called with the paths of the new files.
        :return: the `files` and their `bytes`, the `runs` for the key index, as JSON objects, and the number of `rows`.
        """
        mover = Mover(self.table, self.key, self.index, self.sequence, self.hash, task, self.order)
        result = mover.move(groups)
        written(result.paths)
        return {
            "files": [file.description for file in result.files],
            "bytes": sum(file.size_in_bytes for file in result.files),
            "runs": [run.to_json() for run in result.runs],
            "rows": result.rows,
        }


Groups = Sequence[RewriteGroup] | Sequence[CopyGroup]
"""Files whose rows a task moves: for a minor compaction, or for `deletes: copy-on-write`."""
