"""Corrects the keys of a table that differ from the source (`rowdelta reconcile`), beside a run of the sink.

A key is corrected by the source's row, as a load reads it, or it is removed if the source has none. The run may commit
meanwhile, so a correction must not undo what it has applied:

1. E is where the topic ended when the round began in which the keys differed. That is some seconds ago, since a
   connector may have a change a moment before other sessions see it.
2. The source's rows of the keys are read. They have all that is in the topic before E. A key is removed only if the
   round's snapshot didn't have it either: a row that fits no column can't be read, and parts by place are no snapshot.
3. P is the table's position. Keys of messages from E to P are left out: the table has what these say. They are compared
   again, and corrected if they still differ: a delete, say, of a row that differs from that of the table.
4. The rest is committed on top of P. If the run has committed meanwhile, step 3 is done again. It waits with its next
   micro-batch (`TableSink.going_first`).

What the topic has from P on comes later, and brings each key to its last change. The run finds its position as it was,
opens the table again, and goes on (`AmendedError`).
"""

import logging
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from sink.databases.database import Database
from sink.databases.reading import Keys
from sink.databases.rows import TableRows
from sink.errors import AmendedError, FencedError, TemporaryError
from sink.sources.topics import Offsets
from sink.spark.changes import is_bad
from sink.spark.exchange import in_arrow
from sink.spark.expressions import binary_uuid, quoted
from sink.spark.tasks.purge import Removals
from sink.table.microbatch import TableSink
from sink.verify.comparison import Kept, joined
from sink.verify.rounds import Healed
from sink.verify.topic import Topic

log = logging.getLogger("rowdelta")

_ATTEMPTS = 5
"""A run of the sink commits the micro-batch in progress, and then waits."""
_KEYS_A_QUERY = 5_000


class Healing:
    """Corrects keys of one table.

    :param opened: opens the table as it is now.
    :param database: has the source's table, and answers for its keys.
    :param rows: reads its rows.
    :param part_rows: about how many rows a task reads, if keys can't be asked for.
    :param connections: parts that are read at the same time.
    """

    def __init__(
        self,
        opened: Callable[[], TableSink],
        database: Database,
        rows: TableRows,
        topic: Topic,
        connections: int,
        part_rows: int,
    ) -> None:
        self._opened = opened
        self._database = database
        self._rows = rows
        self._topic = topic
        self._connections = connections
        self._part_rows = part_rows

    def __call__(
        self,
        keys: DataFrame,
        gone: DataFrame,
        texts: Keys | None,
        begin: Offsets,
        with_key: Callable[[DataFrame], DataFrame],
    ) -> Healed:
        """Correct keys.

        :param keys: their canonical columns (`sink.verify.canonical`).
        :param gone: those of them that the source didn't have when they were compared.
        :param texts: the keys for a query, if there are few.
        :param begin: see E above.
        :param with_key: adds these columns to a frame with the table's columns.
        :raises TemporaryError: a run of the sink commits all the time, or the database doesn't answer.
        """
        plan = self._opened().plan
        read = self._rows.of(self._conditions(texts), self._rows.order(), self._connections).changes(plan)
        read = with_key(read.where(~is_bad(read)))
        found = Kept(joined(read, keys, keys.columns, "left_semi")).rows
        missing = joined(gone, found, keys.columns, "left_anti")
        with self._opened().going_first():
            for _ in range(_ATTEMPTS):
                sink = self._opened()
                try:
                    return self._commit(sink, found, missing, begin, with_key)
                except (FencedError, AmendedError):
                    log.info("%s: a run has committed meanwhile; looking again", sink.table.name)
        raise TemporaryError(
            f"{sink.table.name}: a run of the sink commits all the time, so that nothing could be corrected. Run again."
        )

    def _conditions(self, texts: Keys | None) -> Sequence[str]:
        """What the source is asked for: the keys, or the whole table."""
        if texts is not None:
            parts = [texts.values[n : n + _KEYS_A_QUERY] for n in range(0, len(texts.values), _KEYS_A_QUERY)]
            found = [self._database.with_keys(Keys(texts.columns, part)) for part in parts]
            if all(found):
                return found
        return self._rows.ranges(self._part_rows)

    def _commit(
        self,
        sink: TableSink,
        found: DataFrame,
        missing: DataFrame,
        begin: Offsets,
        with_key: Callable[[DataFrame], DataFrame],
    ) -> Healed:
        """:param found: the source's rows of keys, as changelog rows with the key's canonical columns.
        :param missing: the canonical columns of keys that the source doesn't have.
        """
        position, key = sink.position, missing.columns
        assert position is not None
        changes, changed = self._topic.changes(begin, position), None
        if changes is not None:
            if changes.empties:
                return Healed(0, found.select(*key).unionByName(missing))
            changed = Kept(with_key(changes.rows).select(*key).distinct()).rows
            found, missing = (joined(side, changed, key, "left_anti") for side in (found, missing))
        gone = Kept(missing)
        corrections = Kept(found.drop(*key).unionByName(removals(sink, gone.rows, with_key)))
        if corrections.count:
            sink.apply_beside("reconcile", corrections.rows, corrections.count)
        return Healed(found.select(*key).distinct().count() + gone.count, changed)


def removals(sink: TableSink, keys: DataFrame, with_key: Callable[[DataFrame], DataFrame]) -> DataFrame:
    """Changelog rows that remove the table's rows of some keys.

    :param keys: the columns that `with_key` adds to a frame with the table's columns.
    """
    table, plan = sink.table, sink.plan
    made, snapshot = Removals.of(plan, ()), table.snapshot_id()
    assert snapshot is not None
    rows = joined(with_key(table.reader().current_frame(snapshot)), keys, keys.columns, "left_semi")
    uuids = {column.name for column in plan.columns if column.is_uuid}
    names = dict.fromkeys([*plan.section.key, *made.order.values()])
    columns = [binary_uuid(name) if name in uuids else F.col(quoted(name)) for name in names]
    soft = plan.changelog.soft_delete
    if soft is not None:
        columns.append(F.lit(True).alias(soft.column))
        columns += [] if soft.at is None else [F.lit(datetime.now(UTC)).alias(soft.at)]
    return in_arrow(rows.select(*columns), made, from_arrow_schema(made.schema))
