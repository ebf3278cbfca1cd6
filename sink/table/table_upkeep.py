"""What is done for one table between and beside its micro-batches: small files merge, files that are expensive to read
are rewritten, deletes that nothing needs go.
"""

import logging
from collections.abc import Callable, Collection
from concurrent.futures import Future
from datetime import timedelta
from functools import partial

from deltawriters.keyindex.versions import IndexLostError
from sink.config import Config
from sink.config.maintenance import MaintenanceSection
from sink.errors import TableGoneError
from sink.table.deleted_keys import remove_outdated
from sink.table.minor_compaction import SmallFiles
from sink.table.observer import RewriteDone, live_files, nobody
from sink.table.open_table import OpenTable
from sink.table.rewrite_plan import DearFiles, RewriteOptions
from sink.table.rewriting import Chosen, Rewriting, RunningRewrite
from sink.table.stale_deletes import StaleDeletes
from sink.targets.own_state import COUNTED, is_cleaning_due, note_cleaning, rewrite_credit
from sink.targets.seam import Table
from sink.targets.upkeep_values import Compacted
from sink.targets.values import CommitUnknownError, StoredPosition

log = logging.getLogger("rowdelta")

_MOST_WAITED, _MOST_WITH_COPIES = 60.0, 600.0
"""Seconds that the stream waits for a merge, which may be stuck, or wait itself for other tables' merges. A micro-batch
that copies files hardly ever leaves those of the merge as they are, so that its work would be lost."""


class TableUpkeep:
    """Looks after one table. Unless it says otherwise, call each method between micro-batches.

    :param opened: the table, which micro-batches change in turn.
    """

    def __init__(self, config: Config, opened: OpenTable) -> None:
        self._config = config
        self._open = opened
        self.stale_deletes = StaleDeletes(opened.table, opened.plan.section, opened.prefix, opened.io_of)
        self._rewriting = Rewriting(opened)
        self._small_files = SmallFiles(opened)
        self._merge: tuple[RunningRewrite, Future[bool]] | None = None
        """Of small files, with whether it is written."""
        self._look: Future[None] | None = None
        self._dear_files = DearFiles(opened)

    @property
    def settings(self) -> MaintenanceSection:
        """What the configuration says of the table's maintenance."""
        return self._open.maintenance

    def credit(self, budget: float) -> int:
        """See `rewrite_credit`."""
        return rewrite_credit(self._open.table, self._open.prefix, budget)

    def remove_orphans(self, older_than: timedelta, *, dry_run: bool = False) -> list[str]:
        """Remove (`dry_run`: find) files that no state of the table has, and what is outdated of deleted keys. May be
        called at any time. Returns the paths.
        """
        table, section = self.newest_table(), self._open.plan.section
        found = list(table.upkeep().remove_orphans(older_than, dry_run=dry_run))
        seconds = max(section.tombstone_seconds, older_than.total_seconds())
        folder = self._open.engine.table_folder()
        return found + remove_outdated(table, self._open.prefix, folder, seconds, dry_run=dry_run)

    def is_cleaning_due(self, every: timedelta) -> bool:
        """Whether orphans were removed so long ago, if ever."""
        return is_cleaning_due(self._config, self._open.table, every)

    def note_cleaning(self) -> None:
        """Store that orphans were removed now, and remove those of the key index."""
        note_cleaning(self._config, self._open.table)
        self._open.catch_up()
        if self._open.key_index is not None and self._open.stored is not None:
            self._open.key_index.remove_orphans(self._open.stored)

    def note_compacted(self, done: Compacted) -> None:
        """Count what was rewritten without a commit of the sink's own."""
        table, observer = self._open.table, self._open.observer
        table.refresh()
        name = f"{self._open.prefix}.{COUNTED[1]}"
        table.set_property(name, str(int(table.property(name) or 0) + done.bytes))
        table.refresh()
        live = live_files(table) if observer is not nobody else None
        observer(RewriteDone(table.name, "rewrite", done.touched, done.written, done.bytes, 0.0, done.seconds, live))

    def count(self, files: int) -> None:
        """Count the files that a micro-batch has added."""
        self._small_files.count(files)

    def tend(self, *, may_wait: bool = False) -> None:
        """Begin to merge small files if there are enough, commit those that are merged, and let the format do what it
        needs from time to time. Call this after each commit, at a time when other tables don't wait for it.

        :param may_wait: whether the merge is left to a later commit, unless small files pile up.
        """
        opened = self._open
        opened.table.upkeep().tend()
        if may_wait and not self._small_files.are_too_many:
            return
        self.end_merge(wait=self._small_files.are_too_many)
        is_wanted = opened.key_index is not None and opened.plan.section.merge_small_files
        if self._merge is None and is_wanted and self._small_files.are_due():
            begun = self._rewriting.begin(lambda: self._small_files.choose(self._rewriting.moving))
            if begun is not None:
                self._small_files.start_over()
                self._merge = begun, opened.engine.beside(partial(self._rewriting.write, begun))
                self.end_merge(wait=opened.plan.section.copies)  # the next micro-batch may replace the same files
        elif is_wanted and (self._look is None or self._look.done()):  # so that it is known when they are chosen
            self._look = opened.engine.beside(partial(opened.table.upkeep().look_at_last, opened.prefix))

    @property
    def has_merged(self) -> bool:
        """Whether there is a merge to commit. May be asked at any time."""
        merge = self._merge
        return merge is not None and merge[1].done()

    def end_merge(self, *, wait: bool) -> None:
        """Commit the merge of small files, if it is written.

        :param wait: until it is, but not for ever.
        """
        if self._merge is None or not (wait or self._merge[1].done()):
            return
        merge, self._merge = self._merge, None
        begun, written = merge
        if not written.done():
            log.info("%s: waiting until small files are merged", self._open.name)
        try:
            is_written = written.result(_MOST_WITH_COPIES if self._open.plan.section.copies else _MOST_WAITED)
        except TimeoutError:
            self._merge = merge
            self._small_files.start_over()  # the stream waits again when as many have come
            log.warning("%s: small files are still being merged. The stream goes on", self._open.name)
            return
        self.end_rewrite(begun, written=is_written)

    def abandon_merge(self) -> None:
        """Give up the merges of small files, and of the key index's runs: somebody else has the table now, or nobody.
        May be called at any time.
        """
        if self._open.key_index is not None:
            self._open.key_index.abandon_merge()
        if self._merge is not None:
            (begun, written), self._merge = self._merge, None
            begun.is_abandoned = True
            written.add_done_callback(lambda _: begun.scratch.delete())

    def begin_rewrite(
        self,
        options: RewriteOptions,
        most_bytes: int | None = None,
        only: Collection[str] | None = None,
        but: Collection[str] = (),
    ) -> RunningRewrite | None:
        """Begin a rewrite beside the stream. See `Rewriting.begin`, and `DearFiles.choose` for the files."""

        def choose() -> Chosen | None:
            return self._dear_files.choose(options, most_bytes, only, {*but, *self._rewriting.moving})

        return self._rewriting.begin(choose)

    def write_rewrite(self, begun: RunningRewrite) -> bool:
        """Write the new files beside micro-batches. See `Rewriting.write`."""
        return self._rewriting.write(begun)

    def end_rewrite(self, begun: RunningRewrite, *, written: bool = True) -> RewriteDone | None:
        """Commit the new files, or give them up. See `Rewriting.end`."""
        try:
            done = self._rewriting.end(begun, written=written)
        except CommitUnknownError as error:
            error.is_harmless = True  # whatever came of it, the table has the same rows
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
