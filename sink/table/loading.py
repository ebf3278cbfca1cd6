"""Loads a table from its source's database, part by part, before its stream begins.

There is no moment at which the whole table is read, and nothing is locked:

1. It is noted on what the parts depend: what changes it (a TRUNCATE, say) may be in no message. Then the connector
   catches up, and E is where the topic ends. So changes from before such a thing are before E, or step 3 notices it.
2. Transactions that have changed the table, and haven't ended, are outlasted. A connector may have a change before
   other sessions see it, but who made it still holds the table then. So parts see all that is before E. What such a
   transaction has changed before the connector took the table is in no message, and parts see it too.
3. The source's table is read in parts, each by one short query, and each part is committed with the position E. What
   the topic has from E on isn't applied meanwhile. A crash repeats at most the parts that weren't committed.
4. When the connector has written all that step 3 can have seen, the topic ends at U. The stream goes on from E, in
   upsert semantics. Until U it may take rows back to an earlier state, and it may bring rows that are gone again, or
   deletes of rows that are there no more: each key is then as its last change before U says.

At U the table is what the source was then: a row that didn't change since E is as its part has read it, and any other
is as its last change says.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import Lock
from typing import Any, Protocol

from changelog.amounts import amount
from sink.errors import TableError, TemporaryError
from sink.sources.source import DatabaseRows, Position
from sink.table.load_state import Load
from sink.table.microbatch import TableSink
from sink.targets.retries import doubled
from sink.targets.values import CommitUnknownError

log = logging.getLogger("rowdelta")

_ATTEMPTS = 6
"""At each part."""
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
"""Seconds between two of them."""
_LOOK_SECONDS = 0.5
_FIRST_NOTICE, _NOTICE_SECONDS = 2.0, 30.0
_SHOWN_WRITERS = 5


class SourceTable(Protocol):
    """A table of a database, which others change while it is read (`sink.databases.rows.TableRows`).

    :param name: for people, without secrets.
    """

    name: str

    def ranges(self, rows: int) -> Sequence[str]:
        """Conditions that divide the table into parts of about so many rows. Each row is in one of them."""

    def files(self) -> str:
        """Names what the parts depend on. If it doesn't begin so later, rows or values may be missing.

        :raises ConfigError: the log has no changes of such a table.
        """

    def writers(self) -> Mapping[str, str]:
        """The transactions that may have changed the table and whose changes others don't see yet: what identifies each
        -> who it is, for people.
        """

    def is_as_opened(self) -> bool:
        """Whether it has the columns that it had when it was opened, which are those that parts have."""

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
        """Check that what transactions change that begin from now on gets into the topic.

        :raises ConfigError: nobody reads the log, or not for this table.
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
    :param ends: returns where the topic ends.
    :param connections: parts that are read at the same time, and committed together.
    :param part_rows: rows of a part.
    :param turn: who holds it may begin and read. A load that waits lets others.
    :param stopping: whether the load is to end after the parts in progress.
    """

    def __init__(
        self,
        sink: TableSink,
        source: SourceTable,
        connector: Connector,
        ends: Callable[[], Position],
        connections: int,
        part_rows: int,
        turn: Lock,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self._sink = sink
        self._source = source
        self._connector = connector
        self._ends = ends
        self._connections = connections
        self._part_rows = part_rows
        self._turn = turn
        self._stopping = stopping
        self._name = sink.table.name

    def run(self) -> bool:
        """Load what isn't loaded yet. False if it was stopped before all parts were there.

        :raises TableError: its stream has gone on since the load began.
        :raises RowdeltaError: what is committed stays. Another load goes on from there.
        """
        with self._turn:
            load = self._read()
        if load is None or not self._connector.wait(self._stopping):
            return False
        self._sink.end_load(replace(load, parts=(), until=self._ends()))
        return True

    def _read(self) -> Load | None:
        """Read all parts. None if it was stopped before."""
        known = self._sink.load
        if known is None:
            begun = self._begin()
            if begun is None:
                return None
            load, done = begun, 0
        elif not known[0].parts:  # the table was taken back after its load: rows that it has come once more
            self._connector.check()
            load, done = self._divided(known[0]), 0
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
                return None
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
        return load

    def _begin(self) -> Load | None:
        """Decide from where the stream begins, and how the table is read. None if it was stopped before."""
        self._connector.check()
        order, files = self._source.order(), self._source.files()
        with self._letting_others():
            if not self._connector.wait(self._stopping):
                return None
        begin = self._ends()
        if not self._outlast_writers():
            return None
        if not self._source.is_as_opened():
            raise TemporaryError(f"{self._name}: {self._source.name} was altered while its load began. Run again.")
        return self._divided(Load((), 0, 0, files, begin, order))

    def _outlast_writers(self) -> bool:
        waiting = self._source.writers()
        if not waiting:
            return True
        with self._letting_others():
            return self._outlast(waiting)

    def _outlast(self, waiting: Mapping[str, str]) -> bool:
        begun, told = time.monotonic(), _FIRST_NOTICE
        while waiting:
            if self._stopping():
                return False
            if time.monotonic() - begun >= told:
                told += _NOTICE_SECONDS
                log.warning(
                    "%s: its load begins when these have ended, which have changed %s: %s",
                    *(self._name, self._source.name, "; ".join(sorted(waiting.values())[:_SHOWN_WRITERS])),
                )
            time.sleep(_LOOK_SECONDS)
            now = self._source.writers()
            waiting = {writer: now[writer] for writer in waiting if writer in now}
        return True

    @contextmanager
    def _letting_others(self) -> Iterator[None]:
        self._turn.release()
        try:
            yield
        finally:
            self._turn.acquire()

    def _divided(self, load: Load) -> Load:
        """The load with the parts that the source's table has now."""
        estimated = self._source.estimated_rows()
        parts = tuple(self._source.ranges(self._part_rows))
        log.info("%s: loading about %s of %s", self._name, amount(estimated, "row"), self._source.name)
        return replace(load, parts=parts, count=len(parts), estimated=estimated, until=None)

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
        rate = loaded.rows * (loaded.parts - first) / loaded.parts / max(seconds, 0.001)  # parts are of about one size
        left = seconds / (loaded.parts - first) * (load.count - loaded.parts)
        log.info(
            "%s: loaded %s of about %s (%d %%), %s rows/s, %.0f s left",
            *(self._name, f"{loaded.rows:,}", amount(max(load.estimated, loaded.rows), "row")),
            *(100 * loaded.parts // load.count, f"{rate:,.0f}", left),
        )
