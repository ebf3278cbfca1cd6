"""Removes rows that a new snapshot of the source's table didn't have (`resnapshot: reconcile`), beside the stream.

A connector that reads the table again sends all its rows, and no deletes. So a row is gone at the source if no message
has named its key since the snapshot began:

1. E is where the topic ends now.
2. B is where the snapshot's first record is. In the topic's other partitions, that is where messages are which came an
   hour earlier: the order of partitions tells nothing. A B that is too early only leaves rows behind.
3. The keys of all messages from B to E are mentioned. Rows of the table with other keys are to be removed. They are
   found beside micro-batches.
4. In the table's turn, P is its position. Keys of messages from E to P have changed since, and are left out.

Messages that retention has removed, or that can't be read, may have named any key: then nothing is removed. Likewise if
it would be most of the table: a snapshot of a part of it (`additional-conditions`) looks like one of all.
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from changelog.amounts import amount
from changelog.rows import BAD, PREFIX, UNAVAILABLE
from sink.config import Config
from sink.sources.source import Position
from sink.sources.topics import Offsets
from sink.spark.changes import is_bad, is_truncate
from sink.spark.expressions import binary_uuid, quoted
from sink.spark.job_errors import JOB_ERRORS, job_error
from sink.table.microbatch import TableSink
from sink.table.resnapshot import Resnapshot
from sink.table.table_plan import TablePlan
from sink.verify.comparison import Kept, joined
from sink.verify.healing import removals
from sink.verify.topic import Topic

log = logging.getLogger("rowdelta")

_MARGIN = 3_600_000
"""Milliseconds. If a partition's leader was lost, a producer sends a snapshot's first record so much later, at most."""
_MOST = 0.5
"""The part of the table's rows that a snapshot removes at most."""


class _UnknownError(Exception):
    """It can't be told which rows are gone, and why."""


def remove_unmentioned(
    spark: SparkSession, config: Config, sink: TableSink, turn: Callable[[], AbstractContextManager[bool]]
) -> None:
    """Remove what the last snapshot didn't have, if one has ended.

    :param turn: waits until no micro-batch of the table is applied, and yields whether the sink still works.
    :raises RowdeltaError: it is tried again.
    """
    snapshot = sink.ended_snapshot
    if snapshot is None:
        return
    removing = _Removing(spark, config, sink, snapshot)
    try:
        removing.run(turn)
    except _UnknownError as why:
        removing.give_up(turn, str(why))
    except JOB_ERRORS as error:
        raise job_error(sink.table.name, error) from error


class _Removing:
    def __init__(self, spark: SparkSession, config: Config, sink: TableSink, snapshot: Resnapshot) -> None:
        self._sink = sink
        self._name = sink.table.name
        self._snapshot = snapshot
        self._plan = sink.plan
        self._topic = Topic(spark, config, sink.plan)

    def run(self, turn: Callable[[], AbstractContextManager[bool]]) -> None:
        """:raises _UnknownError: nothing is removed."""
        ends = self._topic.ends()
        missing = self._missing(self._begin(ends), ends)
        with turn() as has_turn:
            position = self._sink.position
            if not has_turn or position is None or self._sink.ended_snapshot != self._snapshot:
                return
            count = 0
            if missing.count:
                since, gone = self._read(ends, position), missing.rows
                gone = gone if since is None else joined(gone, self._keys(since), gone.columns, "left_anti")
                changes = Kept(removals(self._sink, gone, lambda frame: frame.select("*", *_table_key(self._plan))))
                count = changes.count
                if count:
                    self._sink.apply_beside("reconcile", changes.rows, count)
            self._sink.forget_snapshot()
        log.info("%s: removed %s that the source's new snapshot doesn't have", self._name, amount(count, "row"))

    def give_up(self, turn: Callable[[], AbstractContextManager[bool]], why: str) -> None:
        with turn() as has_turn:
            if not has_turn or self._sink.ended_snapshot != self._snapshot:
                return
            self._sink.forget_snapshot()
        log.warning(
            "%s: the source's table was read again, and rows that it doesn't have any more stay, since %s. rowdelta "
            "reconcile removes them",
            *(self._name, why),
        )

    def _begin(self, ends: Offsets) -> Offsets:
        """B.

        :param ends: E.
        """
        first, firsts = self._snapshot.first, self._topic.begin(None)
        later = self._topic.begin(first.time - _MARGIN)
        begin = ends | later | {str(first.partition): first.offset}
        for name, end in ends.items():
            oldest = firsts.get(name, end)
            is_sure = begin[name] >= oldest if name == str(first.partition) else begin[name] > oldest
            if oldest and not is_sure:
                raise _UnknownError("messages of it may not be in the topic any more")
        return begin

    def _missing(self, begin: Offsets, ends: Offsets) -> Kept:
        """The keys of the table's rows that no message names from B to E."""
        table, plan = self._sink.upkeep.newest_table(), self._plan
        changes, snapshot = self._read(begin, ends), table.snapshot_id()
        if changes is None or snapshot is None:
            raise _UnknownError("it has no messages")
        frame = table.reader().current_frame(snapshot)
        if plan.section.soft_delete is not None:  # they are marked already
            frame = frame.where(~F.col(quoted(plan.section.soft_delete.column)).eqNullSafe(F.lit(True)))
        rows = frame.select(*_table_key(plan))
        missing, total = Kept(joined(rows, self._keys(changes), rows.columns, "left_anti")), rows.count()
        if missing.count > _MOST * total:
            raise _UnknownError(
                f"they would be {missing.count:,} of {total:,}, as if it were one of a part of the table"
            )
        return missing

    def _read(self, begin: Offsets, end: Position) -> DataFrame | None:
        """What the changelog rows from one place to another say of their keys. None if there are none.

        :raises _UnknownError: some can't be read, or aren't there any more.
        """
        decoded = self._topic.decoded(begin, end)
        if decoded is None:
            return None
        names = [*self._plan.section.key, BAD, *({UNAVAILABLE} & {*decoded.columns})]
        changes = decoded.select(*map(quoted, names)).localCheckpoint()
        firsts = self._topic.begin(None)
        if any(firsts.get(name, 0) > offset < int(end[name]) for name, offset in begin.items() if name in end):
            raise _UnknownError("messages of it were removed while they were read")
        if not changes.where(is_bad(changes) & ~is_truncate()).isEmpty():
            raise _UnknownError("some of its messages can't be read, so that they may be of any row")
        return changes

    def _keys(self, changes: DataFrame) -> DataFrame:
        columns = [F.col(quoted(name)).alias(_key_name(n)) for n, name in enumerate(self._plan.section.key)]
        return Kept(changes.where(~is_bad(changes)).select(*columns).distinct()).rows


def _table_key(plan: TablePlan) -> list[Column]:
    """The key of a row of the table, as changelog rows have it."""
    uuids = {column.name for column in plan.columns if column.is_uuid}
    return [
        (binary_uuid(name) if name in uuids else F.col(quoted(name))).alias(_key_name(n))
        for n, name in enumerate(plan.section.key)
    ]


def _key_name(number: int) -> str:
    return f"{PREFIX}key{number}"
