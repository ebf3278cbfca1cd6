"""Rewrites beside the stream, step by step between a test's micro-batches."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import pytest

from sink.table import keyindex
from sink.table.microbatch import TableSink
from sink.table.observer import RewriteDone
from sink.table.rewrite_plan import RewriteOptions
from sink.table.rewriting import RunningRewrite
from sink.table.table_upkeep import TableUpkeep
from tests.sink.harness import Job

ALL_FILES = RewriteOptions(min_input_files=1, min_file_size=1.0, delete_ratio_threshold=0.0, least_gain=1)
"""Takes every file there is."""

Step = Literal["begin", "write", "adopt", "nothing"]


def with_null_keys(job: Job, properties: str) -> None:
    """Create the job's Iceberg table with one file of twelve rows of another writer. Every third has no key.

    :param properties: of the table, in SQL.
    """
    job.spark.sql(f"CREATE NAMESPACE {job.catalog}.{job.namespace}")
    job.spark.sql(f"CREATE TABLE {job.target} (id bigint, region string) USING iceberg TBLPROPERTIES ({properties})")
    rows = ", ".join(f"({'NULL' if n % 3 == 0 else n}, '{n}')" for n in range(12))
    job.spark.sql(f"INSERT INTO {job.target} SELECT /*+ COALESCE(1) */ * FROM VALUES {rows}").collect()


@contextmanager
def rewriting(
    steps: Sequence[Step | tuple[Step, ...]] = ("begin", "nothing", "write", "nothing", "adopt"),
    options: RewriteOptions = ALL_FILES,
    *,
    may_fail: bool = False,
) -> Iterator[list[RewriteDone | None]]:
    """After each micro-batch of a table that isn't empty, take one step more, or several; then begin again.

    :param may_fail: whether it may be that new files can't be written, such as without the key index.
    :return: what came of each rewrite.
    """
    done: list[RewriteDone | None] = []
    begun: dict[TableUpkeep, RunningRewrite] = {}
    at: dict[TableUpkeep, int] = {}
    written: dict[TableUpkeep, bool] = {}
    tend = TableUpkeep.tend

    def take_step(self: TableUpkeep, *, may_wait: bool = False) -> None:
        tend(self, may_wait=may_wait)
        number = at.get(self, 0)
        taken = steps[number % len(steps)]
        for step in (taken,) if isinstance(taken, str) else taken:
            if step == "begin":
                found = self.begin_rewrite(options)
                if found is None:
                    return
                begun[self] = found
            elif step == "write":
                written[self] = self.write_rewrite(begun[self])
                assert written[self] or may_fail
            elif step == "adopt":
                done.append(self.end_rewrite(begun.pop(self), written=written[self]))
        at[self] = number + 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TableUpkeep, "tend", take_step)
        patch.setattr(keyindex, "_FEWEST_BUCKETS", 2)
        yield done
    for upkeep, left in begun.items():
        upkeep.end_rewrite(left, written=False)


def rewritten_files(
    sink: TableSink, options: RewriteOptions = ALL_FILES, most_bytes: int | None = None
) -> RunningRewrite:
    """Begin a rewrite and write its files, so that only its commit is still to come."""
    begun = sink.upkeep.begin_rewrite(options, most_bytes)
    assert begun is not None
    assert sink.upkeep.write_rewrite(begun)
    return begun


def only_sink(job: Job) -> TableSink:
    """The sink of the job's table, as a process opens it."""
    (member,) = job.pipeline()._supervisor.members.values()
    assert member.sink is not None
    return member.sink
