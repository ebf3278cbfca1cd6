"""Merges runs of a key index beside micro-batches. Runs don't change, so nothing waits for it: a version of the index
takes the merged runs in, in the place of those that they were made of, as soon as they are there.
"""

import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from uuid import uuid4

from deltawriters.keyindex import IndexSlice, RunInfo
from deltawriters.keyindex.versions import IndexLostError
from sink.spark.failures import failure_of
from sink.spark.java_errors import message_of
from sink.spark.job_errors import JOB_ERRORS
from sink.table.engine import Engine, IndexFolder

log = logging.getLogger("rowdelta")


@dataclass(frozen=True)
class _Merge:
    """:param name: beginning of the names of what it writes.
    :param names: of the runs that are merged.
    :param newest: the sequence of the newest one.
    """

    name: str
    names: frozenset[str]
    newest: int
    written: Future[list[RunInfo]]


class RunMerging:
    """The merge of one index's runs: there is one at a time.

    :param table: its name.
    """

    def __init__(self, table: str, engine: Engine, folder: IndexFolder) -> None:
        self._table = table
        self._engine = engine
        self._folder = folder
        self._merge: _Merge | None = None

    @property
    def newest(self) -> int:
        """Runs up to this sequence may be in the merge. -1: there is none."""
        return -1 if self._merge is None else self._merge.newest

    @property
    def name(self) -> str | None:
        """Beginning of the names of what the merge writes. None: there is none."""
        return None if self._merge is None else self._merge.name

    def begin(self, index: IndexSlice) -> None:
        """:param index: whose `merge` is to be merged."""
        if self._merge is None and index.merge:
            name, names = uuid4().hex, frozenset(index.merge)
            newest = max(run.sequence for run in index.runs if run.name in names)
            written = self._engine.beside(partial(self._engine.merge_runs, index, name), is_long=True)
            self._merge = _Merge(name, names, newest, written)

    def taken_in(self, runs: Sequence[RunInfo]) -> list[RunInfo]:
        """The runs, with the merged ones in the place of theirs, if these are written.

        :raises IndexLostError: a run is damaged or missing.
        """
        merge = self._merge
        if merge is None or not merge.written.done() or not merge.names <= {run.name for run in runs}:
            return list(runs)
        try:
            merged = merge.written.result()
        except (CancelledError, OSError, *JOB_ERRORS) as error:
            self.drop()
            failure = failure_of(error)
            if failure is not None and failure.kind == "corrupt index":
                raise IndexLostError(failure.message) from error
            log.info("%s: runs of the key index not merged, tried again: %s", self._table, message_of(error))
            return list(runs)
        return [*(run for run in runs if run.name not in merge.names), *merged]

    def see_committed(self, runs: Iterable[RunInfo]) -> None:
        """:param runs: of the version that was committed."""
        if self._merge is not None and not self._merge.names <= {run.name for run in runs}:
            self.drop(kept=runs)

    def drop(self, kept: Iterable[RunInfo] = ()) -> None:
        """Forget the merge. What it writes is deleted, also if it fails, but for the runs `kept`."""
        if self._merge is None:
            return
        names, merge, self._merge = {run.name for run in kept}, self._merge, None

        def delete(_: Future[list[RunInfo]]) -> None:
            with suppress(Exception):  # the JVM may have gone; the next process cleans up
                written = (name for name in self._folder.names("runs") if name.startswith(merge.name))
                self._folder.delete([f"runs/{name}" for name in written if name not in names])

        merge.written.add_done_callback(delete)
