"""What is done for one table between and beside its micro-batches: small files merge, files that are expensive to read
are rewritten, deletes that nothing needs go.
"""

from collections.abc import Callable, Collection
from datetime import timedelta

from deltawriters.keyindex.versions import IndexLostError
from sink.config import Config
from sink.config.maintenance import MaintenanceSection
from sink.errors import RowdeltaError, TableGoneError
from sink.spark.job_errors import before_commit
from sink.table.minor_compaction import MinorCompaction
from sink.table.observer import RewriteDone, live_files, nobody
from sink.table.open_table import OpenTable
from sink.table.rewrite_plan import RewriteOptions
from sink.table.rewriting import KIND, Rewriting, RunningRewrite
from sink.table.stale_deletes import StaleDeletes
from sink.targets.own_state import COUNTED, is_cleaning_due, note_cleaning, rewrite_credit
from sink.targets.seam import Table
from sink.targets.upkeep_values import Compacted
from sink.targets.values import CommitUnknownError, StoredPosition


class TableUpkeep:
    """Looks after one table. Unless it says otherwise, call each method between micro-batches.

    :param opened: the table, which micro-batches change in turn.
    """

    def __init__(self, config: Config, opened: OpenTable) -> None:
        self._config = config
        self._open = opened
        self._minor_compaction = MinorCompaction(opened)
        self.stale_deletes = StaleDeletes(opened.table, opened.plan.section, opened.prefix, opened.io_of)
        self._rewriting = Rewriting(opened)

    @property
    def settings(self) -> MaintenanceSection:
        """What the configuration says of the table's maintenance."""
        return self._open.maintenance

    def credit(self, budget: float) -> int:
        """See `rewrite_credit`."""
        return rewrite_credit(self._open.table, self._open.prefix, budget)

    def is_cleaning_due(self, every: timedelta) -> bool:
        """Whether orphans were removed so long ago, if ever."""
        return is_cleaning_due(self._config, self._open.table, every)

    def note_cleaning(self) -> None:
        """Store that orphans were removed now."""
        note_cleaning(self._config, self._open.table)

    def note_compacted(self, done: Compacted) -> None:
        """Count what was rewritten without a commit of the sink's own."""
        table, observer = self._open.table, self._open.observer
        table.refresh()
        name = f"{self._open.prefix}.{COUNTED[1]}"
        table.set_property(name, str(int(table.property(name) or 0) + done.bytes))
        table.refresh()
        live = live_files(table) if observer is not nobody else None
        observer(RewriteDone(table.name, KIND, done.touched, done.written, done.bytes, 0.0, done.seconds, live))

    def count(self, files: int) -> None:
        """Count the files that a micro-batch has added."""
        self._minor_compaction.count(files)

    def tend(self) -> None:
        """Merge small files if there are enough, and let the format do what it needs from time to time. Call this after
        each commit, at a time when other tables don't wait for it.
        """
        opened = self._open
        if opened.key_index is not None and opened.plan.section.merge_small_files and self._minor_compaction.is_due():
            self._merge_small_files()
        opened.table.upkeep().tend()

    def _merge_small_files(self) -> None:
        opened, key_index = self._open, self._open.key_index
        opened.catch_up()
        if key_index is None or key_index is not opened.key_index or opened.stored is None:
            return  # somebody altered the table
        try:
            key_index.synchronize(opened.stored)
            is_merged = self._minor_compaction.run(
                opened.spec, key_index, opened.stored.operation, self._rewriting.moving, opened.plan.order
            )
        except IndexLostError as error:
            opened.forget_index(error)
            return
        if is_merged:
            self._see_committed()

    def begin_rewrite(
        self,
        options: RewriteOptions,
        most_bytes: int | None = None,
        only: Collection[str] | None = None,
        but: Collection[str] = (),
    ) -> RunningRewrite | None:
        """Choose files to rewrite beside the stream, and hold the state from which this is done (`Rewriting`).

        :param most_bytes: see `Rewriting.begin`, and for `only` and `but`.
        :return: None if nothing pays, or nothing can be done now.
        :raises RowdeltaError: the table can't be read now, or needs its owner.
        """
        opened = self._open
        opened.catch_up()
        if opened.key_index is None or opened.stored is None:
            return None
        try:
            return self._rewriting.begin(
                opened.spec,
                opened.key_index,
                opened.stored,
                options,
                most_bytes,
                only,
                opened.plan.order,
                but,
                every_part=opened.is_guest,  # no micro-batch waits for it
            )
        except IndexLostError as error:
            opened.forget_index(error)
            return None

    def write_rewrite(self, begun: RunningRewrite) -> bool:
        """Write the new files beside micro-batches. See `Rewriting.write`."""
        return self._rewriting.write(begun)

    def end_rewrite(self, begun: RunningRewrite, *, written: bool = True) -> RewriteDone | None:
        """Commit the new files, or give them up if others have changed the old ones.

        :param written: whether there is anything to commit.
        :return: what was done; None if nothing was.
        :raises RowdeltaError: see `Table.commit`.
        """
        opened = self._open
        key_index, stored = opened.key_index, opened.stored
        try:
            if written:
                opened.catch_up()
            if not written or key_index is None or key_index is not opened.key_index or stored is None:
                if begun.index_lost is not None and key_index is not None and key_index.holds(begun.pin):
                    raise IndexLostError(begun.index_lost)
                self._rewriting.give_up(begun, key_index)
                return None
            with before_commit(opened.name):
                key_index.synchronize(stored)
            done = self._rewriting.adopt(begun, key_index, stored.operation)
        except IndexLostError as error:
            self._rewriting.give_up(begun, key_index)
            opened.forget_index(error)
            return None
        except Exception as error:
            is_known = isinstance(error, RowdeltaError) and not isinstance(error, CommitUnknownError)
            end = self._rewriting.give_up if is_known or not begun.is_sent else self._rewriting.leave
            end(begun, key_index)
            raise
        if done is not None:
            self._see_committed()
        return done

    def convert_equality_deletes(self) -> int:
        """See `StaleDeletes.convert`."""

        def convert(stored: StoredPosition) -> int:
            return 0 if self._open.key_index is None else self.stale_deletes.convert(self._open.key_index, stored)

        return self._end_deletes(convert)

    def drop_dangling_deletes(self) -> int:
        """See `StaleDeletes.drop`."""
        return self._end_deletes(lambda stored: self.stale_deletes.drop(self._open.key_index, stored))

    def _end_deletes(self, end: Callable[[StoredPosition], int]) -> int:
        self._open.catch_up()
        if self._open.stored is None:
            return 0
        try:
            count = end(self._open.stored)
        except IndexLostError as error:
            self._open.forget_index(error)
            return 0
        if count and self._open.key_index is not None:
            self._see_committed()
        elif count:
            self._open.rebase()
        return count

    def oldest_needed(self, older_than: timedelta, retain_last: int) -> int | None:
        """The oldest state of the table that the sink may still need to find out what others changed: `keep` of
        `Upkeep.expire`. Later micro-batches need none that is older.

        :param older_than: see `Upkeep.expire`, and for `retain_last`.
        :return: None if nothing tells, or there is nothing to do.
        """
        self._open.catch_up()
        table, stored = self._open.table, self._open.stored
        if stored is None:
            return None
        # what the table's position and the stored version of the index belong to
        needed: int | None = stored.snapshot_id if stored.index is None else stored.index["base"]
        if needed is not None and stored.snapshot_id is not None:
            needed = table.older_of(stored.snapshot_id, needed)
        return needed if table.upkeep().has_old_states(older_than, retain_last, needed) else None

    def newest_table(self) -> Table:
        """The table as it is now, as an object of its own: micro-batches go on with theirs while something is done
        with it that takes long.

        :raises TableGoneError: it is gone, or another table has its name.
        :raises TemporaryError: the catalog did not answer.
        """
        known = self._open.table
        table = self._open.engine.catalogs.load(known.name)
        if table is None:
            raise TableGoneError(f"{known.name} is gone. Somebody dropped it while the sink ran.")
        if table.table_id != known.table_id:
            raise TableGoneError(f"{known.name} was dropped and created again while the sink ran.")
        return table

    def _see_committed(self) -> None:
        """Go on from a commit that changed no row."""
        self._open.table.refresh()
        self._open.see_committed(self._open.operation)
