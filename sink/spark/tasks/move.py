"""Tasks that move rows to new files."""

from collections.abc import Iterable, Iterator
from typing import Any

from pyspark.accumulators import Accumulator

from sink.plans import Groups, RewritePlan
from sink.spark.tasks.worker import forget_archives, this_task


def rewrite(plan: RewritePlan, written: Accumulator[list[str]], shares: Iterable[Groups]) -> Iterator[dict[str, Any]]:
    """Move the rows of a task's share of files. Yields the results of `RewritePlan.move`."""
    task = this_task(plan.operation)
    for groups in shares:
        yield plan.move(task, groups, written.add)
    forget_archives()
