"""Loads a table from its source's database, part by part, before its stream begins.

There is no moment at which the whole table is read, and nothing is locked:

1. E is where the topic ended some minutes ago. The connector reads the database's log already, so all that is before
   E was committed before step 2, and all that is committed later comes after E. Some minutes, since a connector may
   have a change a moment before other sessions see it, and since clocks differ.
2. The source's table is read in parts, each by one short query, and each part is committed with the position E. What
   the topic has from E on isn't applied meanwhile. A crash repeats at most the parts that weren't committed.
3. When the connector has written all that step 2 can have seen, the topic ends at U. The stream goes on from E, in
   upsert semantics. Until U it may take rows back to an earlier state, and it may bring rows that are gone again, or
   deletes of rows that are there no more: each key is then as its last change before U says.

At U the table is what the source was then: a row that didn't change since E is as its part has read it, and any other
is as its last change says.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from changelog.amounts import amount
from sink.errors import TableError, TemporaryError
from sink.sources.source import DatabaseRows, Position
from sink.table.load_state import MARGIN, Load
from sink.table.microbatch import TableSink
from sink.targets.retries import doubled
from sink.targets.values import CommitUnknownError

log = logging.getLogger("rowdelta")

_ATTEMPTS = 6
"""At each part."""
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
"""Seconds between two of them."""


class SourceTable(Protocol):
    """A table of a database, which others change while it is read (`sink.databases.rows.TableRows`).

    :param name: for people, without secrets.
    """

    name: str

    def ranges(self, rows: int) -> Sequence[str]:
        """Conditions that divide the table into parts of about so many rows. Each row is in one of them."""

    def files(self) -> str:
        """Names what the parts depend on. If it doesn't begin so later, rows or values may be missing."""

    def order(self) -> Mapping[str, Any]:
        """What rows that are read from now on have for names in `order_by` that are no columns of the table. No change
        that they lack may be late beside them.
        """

    def estimated_rows(self) -> int:
        """About how many rows there are."""

    def of(self, conditions: Sequence[str], order: Mapping[str, Any]) -> DatabaseRows:
        """The rows of parts. A task reads one part.

        :param order: name in `order_by` that is no column of the table -> its value in all rows.
        """


class Connector(Protocol):
    """What reads the database's log and writes the topic."""

    def check(self) -> None:
        """Check that what is committed from now on gets into the topic.

        :raises ConfigError: nobody reads the log.
        """

    def wait(self, stopping: Callable[[], bool]) -> bool:
        """Wait until the topic has all that was committed so far. False if it was stopped before.

        :raises TemporaryError: it takes too long.
        """


def is_due(sink: TableSink, *, auto: bool) -> bool:
    """Whether a table has to be loaded before its stream begins: a load has begun, or (`auto`) it has nothing yet."""
    found = sink.load
    if found is not None:
        load, loaded = found
        return load.until is None or loaded.parts < load.count  # the latter after a rollback of the table
    return auto and sink.plan.section.mode == "upsert" and sink.position is None and sink.table.is_empty()


class Loading:
    """The load of one table.

    :param sink: the table, whose load `is_due`.
    :param source: what is loaded.
    :param connector: what writes the topic.
    :param ends: returns where the topic ended so many seconds ago.
    :param connections: parts that are read at the same time, and committed together.
    :param part_rows: rows of a part.
    :param stopping: whether the load is to end after the parts in progress.
    """

    def __init__(
        self,
        sink: TableSink,
        source: SourceTable,
        connector: Connector,
        ends: Callable[[float], Position],
        connections: int,
        part_rows: int,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self._sink = sink
        self._source = source
        self._connector = connector
        self._ends = ends
        self._connections = connections
        self._part_rows = part_rows
        self._stopping = stopping
        self._name = sink.table.name

    def run(self) -> bool:
        """Load what isn't loaded yet. False if it was stopped before all parts were there.

        :raises TableError: its stream has gone on since the load began.
        :raises RowdeltaError: what is committed stays. Another load goes on from there.
        """
        known = self._sink.load
        if known is None:
            load, done = self._begin(self._ends(MARGIN)), 0
        elif not known[0].parts:  # the table was taken back after its load: rows that it has come once more
            load, done = self._begin(known[0].begin), 0
        else:
            load, done = known[0], known[1].parts
        if self._sink.position is not None and dict(self._sink.position) != dict(load.begin):
            raise TableError(
                f"{self._name}: changes were applied since its load began, which would be undone by rows that were "
                "read before. Start over: rowdelta reset, and an empty table."
            )
        since, first = time.monotonic(), done
        while done < load.count:
            if self._stopping():
                return False
            parts = load.parts[done : done + self._connections]
            done += len(parts)
            self._take_in(load, parts, done)
            self._tell(load, since, first)
        if not self._source.files().startswith(load.files):
            raise TableError(
                f"{self._name}: {self._source.name} was written anew (VACUUM FULL, CLUSTER, TRUNCATE or the like) or "
                "altered while it was loaded, so that rows or values may be missing. Start over: rowdelta reset, and "
                "an empty table."
            )
        if not self._connector.wait(self._stopping):
            return False
        self._sink.end_load(replace(load, parts=(), until=self._ends(0)))
        return True

    def _begin(self, begin: Position) -> Load:
        """:param begin: the log's position, and what is read, must be later."""
        self._connector.check()
        order, files, estimated = self._source.order(), self._source.files(), self._source.estimated_rows()
        parts = tuple(self._source.ranges(self._part_rows))
        log.info("%s: loading about %s of %s", self._name, amount(estimated, "row"), self._source.name)
        return Load(parts, len(parts), estimated, files, begin, order)

    def _take_in(self, load: Load, parts: Sequence[str], done: int) -> None:
        """Read parts, and commit them. A database that doesn't answer is asked again."""
        estimated = load.estimated * len(parts) // load.count
        for attempt in range(_ATTEMPTS):
            try:
                self._sink.take_in(load, self._source.of(parts, load.order), estimated, done)
            except CommitUnknownError:
                raise  # only when the table is opened again its state tells
            except TemporaryError as error:
                if attempt + 1 == _ATTEMPTS or error.is_harmless or self._stopping():
                    raise
                pause = doubled(_FIRST_PAUSE, attempt, _LONGEST_PAUSE)
                log.warning("%s: a part could not be loaded, again in %.0f s: %s", self._name, pause, error)
                time.sleep(pause)
            else:
                return

    def _tell(self, load: Load, since: float, first: int) -> None:
        found = self._sink.load
        assert found is not None
        _, loaded = found
        seconds = time.monotonic() - since
        left = seconds / (loaded.parts - first) * (load.count - loaded.parts)
        log.info(
            "%s: loaded %s of about %s (%d %%), %.0f s left",
            *(self._name, f"{loaded.rows:,}", amount(max(load.estimated, loaded.rows), "row")),
            *(100 * loaded.parts // load.count, left),
        )
