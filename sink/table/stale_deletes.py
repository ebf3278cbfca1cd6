"""Ends delete files of a table: equality deletes become deletes by position, and what applies to nothing goes.

Another mode or another writer, such as Flink, leaves equality deletes. Files that were rewritten leave deletes that
apply to nothing. All of this happens between micro-batches.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any
from uuid import uuid4

from pyiceberg.io import FileIO

from changelog.amounts import amount
from deltawriters.keyindex.versions import IndexLostError
from deltawriters.scratch import Scratch
from sink.config import TableSection
from sink.errors import RowdeltaError
from sink.spark.job_errors import before_commit
from sink.table.keyindex import KeyIndex
from sink.targets.notes import REWRITE, SINK_ID
from sink.targets.seam import Table
from sink.targets.upkeep_values import EqualityDeleted
from sink.targets.values import CommitUnknownError, IndexCommit, Rewrite, StoredPosition, refusal

log = logging.getLogger("rowdelta")


class StaleDeletes:
    """The delete files of one table that can be done without.

    :param prefix: property prefix of the sink's state.
    :param io_of: what reaches a file that was written for the table.
    """

    def __init__(self, table: Table, section: TableSection, prefix: str, io_of: Callable[[str], FileIO]) -> None:
        self._table = table
        self._section = section
        self._prefix = prefix
        self._io_of = io_of

    @property
    def not_converted(self) -> str:
        """Why `convert` leaves equality deletes. Empty if it doesn't."""
        section = self._section
        if section.mode == "append":
            return "no key index knows the rows of a table that only grows (mode: append)"
        if section.deletes == "equality":
            return "the table is to have equality deletes (deletes: equality)"
        if section.deletes == "copy-on-write":
            return "the table has no deletes (deletes: copy-on-write): a file loses older ones when it changes"
        if not self._index_knows_all_rows():
            return f"a column of the key may be NULL ({', '.join(section.key)}), and the key index has no such rows"
        return ""

    def convertible(self) -> int:
        """How many equality delete files `convert` would find."""
        found = self._convertible()
        return 0 if found is None else len(found.handles)

    def convert(self, key_index: KeyIndex, stored: StoredPosition) -> int:
        """Say by position what equality deletes say.

        :param stored: the table's position.
        :return: how many equality delete files are gone. 0 if there are none, or others changed the table meanwhile.
        :raises RowdeltaError: see `Table.commit`.
        :raises IndexLostError: see `KeyIndex.synchronize`. Nothing was committed.
        """
        found = self._convertible()
        if found is None:
            return 0
        index_of = partial(self._converted_index, key_index, stored, found)
        if not self._replaced(found.handles, stored, index_of, "equality deletes not converted"):
            return 0
        files = amount(len(found.handles), "equality delete file")
        log.info("%s: %s converted into deletes by position", self._table.name, files)
        return len(found.handles)

    def dangling(self) -> Sequence[Any]:
        """What `drop` would remove. See `Upkeep.dangling_deletes`."""
        return () if self._section.mode == "append" else self._table.upkeep().dangling_deletes()

    def drop(self, key_index: KeyIndex | None, stored: StoredPosition) -> int:
        """Remove delete files that no longer apply to any data file, so that readers don't plan with them.

        :param stored: the table's position.
        :return: how many are gone. 0 if there are none, or others changed the table meanwhile.
        :raises RowdeltaError: see `Table.commit`.
        :raises IndexLostError: see `KeyIndex.synchronize`. Nothing was committed.
        """
        found = self.dangling()
        index_of = partial(self._same_index, key_index, stored)
        if not found or not self._replaced(found, stored, index_of, "deletes that apply to nothing stay"):
            return 0
        log.info("%s: removed %s that applied to nothing", self._table.name, amount(len(found), "delete file"))
        return len(found)

    def _convertible(self) -> EqualityDeleted | None:
        return None if self.not_converted else self._table.upkeep().equality_deletes()

    def _converted_index(
        self, key_index: KeyIndex, stored: StoredPosition, found: EqualityDeleted, scratch: Scratch
    ) -> IndexCommit:
        key_index.synchronize(stored)
        live = self._live_rows({file.path for file in found.files})
        return key_index.prepare_conversion(uuid4().hex[:16], found.files, live, scratch)

    def _same_index(self, key_index: KeyIndex | None, stored: StoredPosition, scratch: Scratch) -> IndexCommit:
        if key_index is None:
            return IndexCommit(self._table.snapshot_id(), {}, (), (), ())
        key_index.synchronize(stored)
        return key_index.prepare_restatement(uuid4().hex[:16], (), scratch)

    def _replaced(
        self,
        handles: Sequence[Any],
        stored: StoredPosition,
        index_of: Callable[[Scratch], IndexCommit],
        what_stays: str,
    ) -> bool:
        """Commit the end of delete files.

        :param index_of: what the commit needs from the key index. New files are in the scratch.
        :param what_stays: for the log, if others changed the table meanwhile.
        :return: whether they are gone.
        """
        scratch = Scratch(self._table.name, self._io_of)
        try:
            with before_commit(self._table.name):
                index = index_of(scratch)
            summary = {REWRITE: str(len(handles)), SINK_ID: self._prefix.removeprefix("rowdelta.")}
            outcome = self._table.commit(
                Rewrite(self._prefix, stored.operation, (), handles, index, summary, self._table.layout)
            )
        except CommitUnknownError:
            raise  # the files may belong to the table now
        except (IndexLostError, RowdeltaError):
            scratch.delete()
            raise
        refused = refusal(outcome)  # if it is unknown, the files may belong to the table now
        if refused is not None:
            scratch.delete()
            log.warning("%s: %s, tried again later: %s", self._table.name, what_stays, refused.why)
        return refused is None

    def _live_rows(self, paths: Collection[str]) -> dict[str, int]:
        """How many rows of data files are live, by path, as the format's own reader sees them."""
        files = [file for file in self._table.live_files() if file.path in paths]
        with self._table.reader().rows_of(files, self._section.key) as (frame, path, _, names):
            count_of: dict[str, int] = dict(frame.groupBy(path).count().collect())
        return {file.path: count_of.get(name, 0) for file, name in zip(files, names, strict=True)}

    def _index_knows_all_rows(self) -> bool:
        """Whether no row can have a NULL key. Such rows are others', and the index doesn't have them."""
        required = {column.name for column in self._table.columns() if column.required}
        return required.issuperset(self._section.key)
