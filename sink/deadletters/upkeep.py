"""Looks after the dead-letter table. Each micro-batch with bad records adds a file and a state to it, and each state
makes the next commit a little slower. Nobody else would merge or remove them.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pyspark.sql import SparkSession

from sink.config import Config
from sink.config.maintenance import MaintenanceSection, age
from sink.deadletters.table import UNPUBLISHED, check_table
from sink.targets.catalogs import Catalogs
from sink.targets.own_state import CREATED_BY, expiring, is_cleaning_due, maintenance_of, note_cleaning
from sink.targets.seam import Table
from sink.targets.upkeep_values import Compacted, CompactionLimits

log = logging.getLogger("rowdelta")

_LIMITS = CompactionLimits(
    min_input_files=20,
    delete_ratio_threshold=0.3,
    delete_file_threshold=20,
    max_file_group_size=256 * 1024 * 1024,
    most_bytes=256 * 1024 * 1024,
    small_file_size=12 * 1024 * 1024,
)
"""In Iceberg so few bytes at once that nothing waits long for it, and the next time goes on. Twenty small files must
fit into a group, or they would never be merged.
"""
CHECKPOINT_SECONDS = 60.0
"""A command that ends waits so long for a checkpoint."""


@dataclass(frozen=True)
class Upkeep:
    """What can be done for the table. Micro-batches of this job and of others go on beside it: use a table of its own.

    By the global section `maintenance`: the job that created the table does it, and another one if the section names
    `expire` or `orphans`. Each method raises `RowdeltaError` if something failed; the table has the same rows then.
    """

    config: Config
    table: Table
    settings: MaintenanceSection

    def expire(self) -> int:
        """Remove old states, and the files that only they had.

        :return: how many files.
        """
        expire = self.settings.expire
        if expire is None or self._is_waiting():
            return 0
        return self.table.upkeep().expire(age(expire.older_than), expire.retain_last, self.table.snapshot_id())

    def expiring(self) -> int:
        """How many states `expire` would remove at most."""
        expire = self.settings.expire
        return 0 if expire is None or self._is_waiting() else expiring(self.table, expire)

    def compact(self, *, dry_run: bool = False) -> tuple[Compacted, int] | None:
        """Merge small files, if there are many. See `sink.targets.seam.Upkeep.compact`."""
        is_own = self.table.property(CREATED_BY) == self.config.sink.id
        if not (is_own or self.settings.expire or self.settings.orphans):
            return None
        self.table.refresh()
        return self.table.upkeep().compact(_LIMITS, dry_run=dry_run)

    def clean(self, *, only_due: bool = False, dry_run: bool = False) -> Sequence[str]:
        """Remove files that no state has.

        :param only_due: only if it was done long enough ago.
        :param dry_run: only find them.
        :return: their paths.
        """
        orphans = self.settings.orphans
        if orphans is None or (only_due and not is_cleaning_due(self.config, self.table, age(orphans.every))):
            return ()
        if self._is_waiting():
            return ()
        found = self.table.upkeep().remove_orphans(age(orphans.older_than), dry_run=dry_run)
        if not dry_run:
            note_cleaning(self.config, self.table)
        return found

    def tend(self) -> None:
        """See `sink.targets.seam.Upkeep.tend`. It waits for what is done in a thread."""
        self.table.refresh()
        self.table.upkeep().tend()
        self.table.upkeep().finish_tending(CHECKPOINT_SECONDS)

    def _is_waiting(self) -> bool:
        """Whether bad records of any job aren't sent yet: the state that added them, and its files, tell which they
        are.
        """
        self.table.refresh()
        waiting = list(self._waiting())
        if waiting:
            log.info(
                "%s: old %ss and files stay while bad records wait for being sent to the topic: %s. The job with this "
                "sink.id sends them when it starts. If they needn't be sent, start it without dead_letter_topic.",
                self.table.name,
                self.table.snapshot_word,
                ", ".join(waiting),
            )
        return bool(waiting)

    def _waiting(self) -> Iterator[str]:
        """The marks of targets that wait. A mark of an earlier commit tells nothing any more."""
        for prefix, operation in self.table.stored(UNPUBLISHED).items():
            position = self.table.position(prefix, newest_if_in_doubt=True)
            if position is not None and position.operation == operation:
                yield prefix.removeprefix("rowdelta.")


def open_upkeep(spark: SparkSession, config: Config) -> Upkeep | None:
    """None if there is no dead-letter table.

    :raises RowdeltaError: there is one that can't be it, or the catalog doesn't answer.
    """
    table = Catalogs(spark, config).load(config.dead_letter_table)
    if table is None:
        return None
    check_table(table)
    return Upkeep(config, table, maintenance_of(config, None, table))
