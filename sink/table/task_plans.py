"""What the tasks of a micro-batch are told."""

from changelog.rows import order_column
from deltawriters import DeltaOptions
from sink import plans
from sink.config import Config
from sink.deadletters.table import DeadLetters
from sink.routing import KeyHash
from sink.table.plan import deletes_carry_row, files_last
from sink.table.table_plan import TablePlan
from sink.table.written import Begun

SMALL_BATCH = 10_000
"""Up to this many records, one task does all the work. A shuffle would cost more than a second core gains."""


def is_small(estimated_rows: int | None) -> bool:
    """Whether one task does all the work."""
    return estimated_rows is not None and estimated_rows <= SMALL_BATCH


class TaskPlans:
    """What the tasks of a micro-batch are told.

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
                keeps_late=section.late == "dead-letter" and begun.work != "purge",
                soft_delete=None if begun.work == "purge" else self._plan.changelog.soft_delete,
                ignores_removals=section.source_deletes == "ignore",
                applies_late=section.late == "apply" or begun.work == "reconcile",
                history=self._plan.changelog.history,
                absent_before=begun.absent_before,
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
            (order_column(place), order_column(place + 1)) if self._config.source.has_topics else None,
            index,
            lasting=files_last(section),
            order=self._plan.order,
            purges=begun.work == "purge",
        )

    def hash(self, begun: Begun, tasks: int) -> KeyHash:
        """The hash that decides which task gets a change."""
        if begun.hash is not None:
            return begun.hash
        bucket = begun.spec.key_bucket(self._plan.section.key)
        key = tuple(self._plan.section.key)
        return KeyHash(key, bucket if bucket is not None and bucket.count >= tasks else None)
