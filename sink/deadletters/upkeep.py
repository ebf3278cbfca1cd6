"""Looks after the dead-letter table. Each micro-batch with bad records adds a file and a state to it, and each state
makes the next commit a little slower. Nobody else would merge or remove them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pyspark.sql import SparkSession

from sink.config import Config
from sink.config.maintenance import age
from sink.deadletters.table import UNPUBLISHED
from sink.targets.base import Compacted, is_cleaning_due, maintenance_of, note_cleaning
from sink.targets.catalogs import Catalogs

COMPACT_EVERY = 20
"""Commits between two compactions."""


@dataclass
class LookedAfter:
    """What was done for the table, or would be.

    :param compacted: None if its files aren't rewritten now.
    :param expired_files: files that only old states had.
    :param orphans: paths of files that no state has.
    """

    compacted: Compacted | None = None
    expired_files: int = 0
    orphans: Sequence[str] = ()


def look_after(
    spark: SparkSession, config: Config, *, may_rewrite: bool = True, only_due: bool = False, dry_run: bool = False
) -> LookedAfter | None:
    """Remove old states and orphans, and compact the table. Micro-batches of this job and of others go on beside it.

    By the global section `maintenance`: history goes only if the sink has created the table, or the section says so.
    While bad records wait for being sent to a topic, nothing is done: the state that added them tells which they are.

    :param may_rewrite: whether the table may be compacted.
    :param only_due: orphans are removed only if that was done long enough ago.
    :param dry_run: only find out which orphans there are.
    :return: None if there is no such table.
    :raises RowdeltaError: something failed; the table has the same rows.
    """
    table = Catalogs(spark, config).load(config.dead_letter_table)
    if table is None:
        return None
    done, settings = LookedAfter(), maintenance_of(config, None, table)
    expire, orphans = settings.expire, settings.orphans
    if table.has_any(UNPUBLISHED):
        return done
    if expire is not None and not dry_run:
        done.expired_files = table.expire(age(expire.older_than), expire.retain_last, table.snapshot_id())
    if may_rewrite and not dry_run:
        table.refresh()
        # commits are counted by the states that are left
        every = COMPACT_EVERY if expire is None else min(COMPACT_EVERY, expire.retain_last)
        done.compacted = table.compaction(every).after_commit()
    if orphans is not None and (not only_due or is_cleaning_due(config, table, age(orphans.every))):
        done.orphans = table.remove_orphans(age(orphans.older_than), dry_run=dry_run)
        if not dry_run:
            note_cleaning(config, table)
    return done
