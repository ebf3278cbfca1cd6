"""Removes rows that a new snapshot of the source's table didn't have (`resnapshot: reconcile`), beside the stream.

A connector that reads the table again sends all its rows, and no deletes. So a row is gone at the source if no message
has named its key since the snapshot began:

1. B is where its first record is. In the topic's other partitions, that is where messages are which came a minute
   earlier: the order of partitions tells nothing.
2. E is where the topic ends now. The keys of all messages from B to E are mentioned.
3. Rows of the table with other keys are to be removed. They are found beside micro-batches.
4. In the table's turn, P is its position. Keys of messages from E to P have changed since, and are left out.

Messages that retention has removed, or that can't be read, may have named any key: then nothing is removed.
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from changelog.amounts import amount
from changelog.rows import PREFIX
from sink.config import Config
from sink.sources.topics import Offsets
from sink.spark.changes import is_bad, is_truncate
from sink.spark.expressions import binary_uuid, quoted
from sink.spark.job_errors import JOB_ERRORS, job_error
from sink.table.microbatch import TableSink
from sink.table.resnapshot import Resnapshot
from sink.table.table_plan import TablePlan
from sink.verify.comparison import joined
from sink.verify.healing import removals
from sink.verify.topic import Topic

log = logging.getLogger("rowdelta")

_MARGIN = 60_000
"""Milliseconds. A producer doesn't take longer between its sendings to two partitions."""


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
    try:
        _Removing(spark, config, sink, snapshot).run(turn)
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
        begin, ends = self._begin(), self._topic.ends()
        if begin is None:
            return self._give_up("messages of it aren't in the topic any more")
        missing = self._missing(begin, ends)
        if missing is None:
            return self._give_up("some of its messages can't be read, so that they may be of any row")
        with turn() as has_turn:
            position = self._sink.position
            if not has_turn or position is None or self._sink.ended_snapshot != self._snapshot:
                return None
            since = self._topic.decoded(ends, position)
            if since is not None:
                if not since.where(is_bad(since)).isEmpty():
                    return None  # another look finds out what is left
                missing = joined(missing, _keys(since, self._plan), missing.columns, "left_anti")
            changes = removals(self._sink, missing, lambda frame: frame.select("*", *_table_key(self._plan)))
            changes = changes.localCheckpoint()
            count = changes.count()
            if count:
                self._sink.apply_beside("correction", changes, count)
            self._sink.forget_snapshot(self._snapshot)
        log.info("%s: removed %s that the source's new snapshot doesn't have", self._name, amount(count, "row"))
        return None

    def _begin(self) -> Offsets | None:
        """B. None if the topic may not have all since then."""
        partition, offset = self._snapshot.first
        firsts = self._topic.begin(None)
        begin = self._topic.begin(self._snapshot.time - _MARGIN) | {str(partition): offset}
        for name, since in begin.items():
            is_sure = since > firsts.get(name, 0) or firsts.get(name, 0) == 0
            if not is_sure and (name != str(partition) or since < firsts[name]):
                return None
        # nothing came since then in the other partitions
        return self._topic.ends() | begin

    def _missing(self, begin: Offsets, ends: Offsets) -> DataFrame | None:
        """The keys of the table's rows that no message names between two places. None if that can't be told."""
        decoded = self._topic.decoded(begin, ends)
        if decoded is None:
            return None
        decoded = decoded.localCheckpoint()
        if not decoded.where(is_bad(decoded) & ~is_truncate()).isEmpty():
            return None
        table = self._sink.upkeep.newest_table()
        snapshot = table.snapshot_id()
        if snapshot is None:
            return None
        rows = table.reader().current_frame(snapshot).select(*_table_key(self._plan))
        return joined(rows, _keys(decoded, self._plan), rows.columns, "left_anti").localCheckpoint()

    def _give_up(self, why: str) -> None:
        log.warning(
            "%s: the source's table was read again, and rows that it doesn't have any more stay, since %s. rowdelta "
            "reconcile removes them",
            *(self._name, why),
        )
        self._sink.forget_snapshot(self._snapshot)


def _keys(changes: DataFrame, plan: TablePlan) -> DataFrame:
    """The keys of changelog rows."""
    columns = [F.col(quoted(name)).alias(_key_name(n)) for n, name in enumerate(plan.section.key)]
    return changes.where(~is_bad(changes)).select(*columns).distinct().localCheckpoint()


def _table_key(plan: TablePlan) -> list[Column]:
    """The key of a row of the table, as changelog rows have it."""
    uuids = {column.name for column in plan.columns if column.is_uuid}
    return [
        (binary_uuid(name) if name in uuids else F.col(quoted(name))).alias(_key_name(n))
        for n, name in enumerate(plan.section.key)
    ]


def _key_name(number: int) -> str:
    return f"{PREFIX}key{number}"
