"""An attempt at a micro-batch: from which state of the table it starts, what its tasks are told, and what is to be
committed. Only plain values.
"""

from dataclasses import dataclass

from changelog.rows import order_column
from deltawriters import DeltaOptions, TableSpec
from deltawriters.keyindex import IndexSlice
from sink import plans
from sink.config import Config
from sink.deadletters.table import DeadLetters
from sink.routing import KeyHash
from sink.sources.source import TableBatch
from sink.table.plan import deletes_carry_row, files_last
from sink.table.table_plan import TablePlan
from sink.table.written import Written

SMALL_BATCH = 10_000
"""Up to this many records, one task does all the work. A shuffle would cost more than a second core gains."""


@dataclass(frozen=True)
class Begun:
    """The state from which an attempt to write a micro-batch starts.

    :param operation: id of the attempt.
    :param spec: the table for which files are written.
    :param empty: whether the table has no rows.
    :param global_deletes: see `DeltaOptions`.
    :param index: the key index of the table's rows, if it has one.
    :param sequence: sequence number of the runs that the tasks add to the index.
    :param hash: how the index hashes keys, if there is one.
    :param started: when the attempt began (`time.monotonic`).
    :param opening: the `opening` of the dead-letter table (`DeadLetters`).
    :param letters: the last commit of the table's bad records (`DeadLetters.operation`).
    :param index_seconds: how long it took to bring the index up to the table.
    """

    operation: str
    spec: TableSpec
    empty: bool
    global_deletes: bool
    index: IndexSlice | None
    sequence: int
    hash: KeyHash | None
    started: float
    opening: int
    letters: str | None
    index_seconds: float = 0.0


@dataclass(frozen=True)
class TableShare:
    """A table's part of a micro-batch, and its share in the joint job that writes several tables."""

    batch: TableBatch
    begun: Begun
    share: plans.Share


@dataclass(frozen=True)
class Attempt:
    """A micro-batch's files that are written and not yet committed."""

    begun: Begun
    written: Written
    write_seconds: float

    @property
    def metrics(self) -> dict[str, int]:
        """Numbers about the work, by the names that Delta has for those of an update."""
        return {
            "scanTimeMs": int(self.begun.index_seconds * 1000),
            "rewriteTimeMs": int((self.write_seconds - self.begun.index_seconds) * 1000),
            "numSourceRows": sum(self.written.rows.values()),
            "numTargetRowsInserted": self.written.keys("inserted"),
            "numTargetRowsUpdated": self.written.keys("updated"),
            "numTargetRowsDeleted": self.written.keys("deleted"),
        }


@dataclass(frozen=True)
class Pending:
    """A table's part of a micro-batch before its commit. `attempt` is None if it must be written again, `batch_id` if
    it is a replay of dead letters.
    """

    batch_id: int | None
    batch: TableBatch
    attempt: Attempt | None


def is_small(estimated_rows: int | None) -> bool:
    """Whether one task does all the work."""
    return estimated_rows is not None and estimated_rows <= SMALL_BATCH


class TaskPlans:
    """What the tasks of an attempt are told.

    :param plan: the table.
    :param dead_letters: None if a bad record stops the job.
    """

    def __init__(self, config: Config, plan: TablePlan, dead_letters: DeadLetters | None) -> None:
        self._config = config
        self._plan = plan
        self._dead_letters = dead_letters

    def plan(self, begun: Begun, tasks: int) -> plans.TaskPlan:
        """:param tasks: number of tasks that share the work."""
        section, index = self._plan.section, None
        if begun.index is not None:
            index = plans.IndexPlan(begun.index, begun.sequence, tasks, plans.ON_DRIVER // tasks)
        decoded, stored = ([c.name for c in spec.columns] for spec in (self._plan.changelog, self._plan))
        options = None
        if section.mode != "append":
            options = DeltaOptions(
                key=tuple(section.key),
                mode=section.mode,
                table_is_empty=begun.empty,
                global_deletes=begun.global_deletes or self._plan.derived_partition,
                deletes_carry_row=deletes_carry_row(self._config),
                copy_on_write=section.copies,
                show_values=self._config.sink.show_values,
                # the same row in two files differs in `_source`, which isn't a contradiction
                content=tuple(name for name in decoded if name in stored) if section.mode == "changelog" else (),
            )
        place = len(section.order_by)
        return plans.TaskPlan(
            begun.spec,
            options,
            begun.operation,
            section.target,
            self._dead_letters.spec if self._dead_letters else None,
            (order_column(place), order_column(place + 1)) if self._config.source.type == "kafka" else None,
            index,
            lasting=files_last(section),
            order=self._plan.order,
        )

    def hash(self, begun: Begun, tasks: int) -> KeyHash:
        """The hash that decides which task gets a change."""
        if begun.hash is not None:
            return begun.hash
        bucket = begun.spec.key_bucket(self._plan.section.key)
        key = tuple(self._plan.section.key)
        return KeyHash(key, bucket if bucket is not None and bucket.count >= tasks else None)
