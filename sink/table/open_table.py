"""A table that a run has open: what its next commit continues."""

import logging
import time
from dataclasses import replace

from pyiceberg.io import FileIO

from deltawriters.keyindex.versions import IndexLostError
from sink import logs
from sink.config import Config
from sink.config.maintenance import MaintenanceSection
from sink.sources.source import Position
from sink.table.engine import Engine
from sink.table.keyindex import KeyIndex
from sink.table.observer import CommitRefused, Observer, nobody
from sink.table.patterns import ResolvedTable
from sink.table.plan import deletes_by_value, needs_global_deletes, plan_table
from sink.table.sink_state import SinkState, position_in
from sink.table.source_tables import SourceTables
from sink.table.table_plan import TablePlan
from sink.targets.own_position import own_position
from sink.targets.own_state import HEALING, maintenance_of, property_prefix
from sink.targets.seam import Table
from sink.targets.values import StoredPosition

log = logging.getLogger("rowdelta")

_LONGEST_HEALING = 60.0
_POLL_SECONDS = 0.2


class OpenTable:
    """A table, with what its next commit continues: the sink's position, the snapshot, the layout, the key index.

    Micro-batches (`TableSink`) and what happens between and beside them (`TableUpkeep`) share it, and take turns.

    :param resolved: its entry of the configuration, with its key.
    :param plan: what the tasks write, for the layout that the table has now.
    :param is_guest: another process of the sink may apply micro-batches to the table. So nothing of the key index is
        deleted that this object doesn't know, and its runs aren't merged.
    """

    def __init__(
        self,
        config: Config,
        resolved: ResolvedTable,
        table: Table,
        plan: TablePlan,
        engine: Engine,
        observer: Observer = nobody,
        *,
        is_guest: bool = False,
    ) -> None:
        self.table = table
        self.plan = plan
        self.prefix = property_prefix(config)
        """Of the sink's properties in the table."""
        self.engine = engine
        self.observer = observer
        self.is_guest = is_guest
        self.source_tables: SourceTables | None = None
        self._config = config
        self._resolved = resolved
        self.spec, self.layout = table.spec, table.layout
        """What files are written for."""
        self.stored: StoredPosition | None = None
        """The position that the next micro-batch continues."""
        self.base: int | None = None
        """The snapshot that the next commit continues."""
        self.global_deletes = False
        self.key_index = self._open_key_index()
        stored = table.position(self.prefix)
        self.go_on_from(stored.operation if stored else None)
        table.settle(self.prefix)

    @property
    def name(self) -> str:
        return self.table.name

    @property
    def operation(self) -> str | None:
        """The operation that stored the position which the next micro-batch continues."""
        return self.stored.operation if self.stored else None

    @property
    def position(self) -> Position | None:
        """The position of the table's last commit, or the position where reading began if there is no commit."""
        return position_in(self.table, self.prefix, self.plan.section, self.stored)

    @property
    def state(self) -> SinkState:
        """What the table knows of its sink beside the position."""
        return SinkState.read(self.table, self.prefix, self.plan.section)

    @property
    def appends(self) -> bool:
        """Whether the table only grows."""
        return self.plan.section.mode == "append"

    @property
    def maintenance(self) -> MaintenanceSection:
        """What is done for the table beside its micro-batches."""
        return maintenance_of(self._config, self.plan.section, self.table)

    def io_of(self, path: str) -> FileIO:
        """What reaches a file that was written for the table."""
        return self.spec.io if self.key_index is None else self.key_index.io_of(path, self.spec)

    def catch_up(self) -> None:
        """Find out whether others changed the table since the last commit. Call this before anything is written.

        :raises FencedError: see `go_on_from`.
        :raises RolledBackError: see `go_on_from`.
        :raises TableError: the table was altered, and no longer fits the configuration.
        """
        # with an outdated schema or spec, the new files would lack values, and deletes would miss rows
        self.table.refresh()
        self._wait_for_healing()
        if self.table.snapshot_id() != self.base:
            # The current snapshot becomes the commit's base, since the micro-batch is written for it: whether the table
            # is empty, and where its rows are. The commit's validation won't look at earlier snapshots, so the position
            # is checked here.
            own_position(self.table, self.prefix, self.operation)
            self.base = self.table.snapshot_id()
        self._follow_table()
        logs.note_snapshot(self.base)

    def _wait_for_healing(self) -> None:
        """Let somebody who corrects rows commit first: between two commits of a busy stream he would never get to it.
        If he has gone, the stream goes on after a while, and no later run waits.
        """
        name, end = f"{self.prefix}.{HEALING}", time.monotonic() + _LONGEST_HEALING
        while not self.is_guest and self.table.property(name) is not None:
            if time.monotonic() > end:
                self.table.set_property(name, None)
                return
            time.sleep(_POLL_SECONDS)
            self.table.refresh()

    def rebase(self) -> None:
        """Make the table's current state the base, so that the micro-batch can be written again.

        :raises FencedError: see `go_on_from`.
        :raises RolledBackError: see `go_on_from`.
        """
        self.table.refresh()
        own_position(self.table, self.prefix, self.operation)
        self._follow_table()
        self.go_on_from(self.operation)

    def go_on_from(self, operation: str | None) -> None:
        """Make the table's current metadata the base of the next commit.

        :param operation: the operation that stored the position which the next micro-batch continues.
        :raises FencedError: another operation has stored a position since.
        :raises RolledBackError: the table was rolled back to another operation.
        """
        self.stored = own_position(self.table, self.prefix, operation)
        self.base = self.table.snapshot_id()

    def see_committed(self, operation: str | None) -> None:
        """Go on from a commit of the sink's own.

        :param operation: the commit that stored the sink's position: this one, or an earlier one if it changed no row.
        """
        self.go_on_from(operation)
        if self.key_index is not None:
            self.key_index.see_committed(self.stored)

    def forget_index(self, error: IndexLostError) -> None:
        """Have the key index built again."""
        assert self.key_index is not None
        self.observer(CommitRefused(self.name, "index lost"))
        self.key_index.forget()
        log.warning("%s: %s; building the key index again", self.name, error)

    def is_altered(self) -> bool:
        """Whether the table's layout differs from what files are written for."""
        return self.table.layout != self.layout

    def replan_if_altered(self) -> None:
        """Follow a change of the table's layout.

        :raises TableError: it no longer fits the configuration.
        """
        self.check_new_properties()
        if not self.is_altered():
            self.spec = self.table.spec
            return
        log.info("%s was altered; checking it against the configuration again", self.name)
        self.plan = plan_table(self.engine.catalogs, self._config, self._resolved, self.table)
        if self.source_tables is not None:
            self.plan = replace(self.plan, changelog=self.source_tables.of(self.plan.changelog))
        self._prepare_global_deletes()
        self.spec, self.layout = self.table.spec, self.table.layout
        if self.key_index is not None:
            self.key_index.abandon_merge()
        self.key_index = self._open_key_index()

    def check_new_properties(self) -> None:
        """:raises TableError: the table got a property that the sink doesn't know or must not ignore."""
        if self.table.spec.properties_by_name.keys() != self.spec.properties_by_name.keys():
            # a property is refused by its name (Iceberg); one of Delta Lake with another value is another layout
            self.table.check_writable(appends=self.appends, copies=self.plan.section.copies)

    def _open_key_index(self) -> KeyIndex | None:
        if not self.plan.section.has_index:
            return None
        return KeyIndex(self.table, self.plan, self.engine, self.prefix, is_guest=self.is_guest)

    def _follow_table(self) -> None:
        """See what others have changed of the table's metadata."""
        self._prepare_global_deletes()
        self.replan_if_altered()

    def _prepare_global_deletes(self) -> None:
        if deletes_by_value(self.plan.section) and not self.is_guest:  # guests write none
            is_needed = needs_global_deletes(self.plan)
            self.global_deletes = self.table.prepare_global_deletes(always=is_needed)
