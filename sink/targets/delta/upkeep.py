"""What maintenance needs of a Delta table. Rows are deleted, and files merged and removed, by Delta's own commands."""

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import unquote

from pyspark.sql import DataFrame

from sink.errors import TableError, TemporaryError
from sink.spark.java_errors import JAVA_ERRORS, java_message
from sink.targets.delta.checkpoints import Checkpoints
from sink.targets.delta.commands import delete_equal, kept_after_deletion, table_inside
from sink.targets.delta.live_files import full
from sink.targets.delta.new_vectors import live_add, remove_of
from sink.targets.delta.optimize import compact_files
from sink.targets.delta.small_files import candidates, counted, rewritables
from sink.targets.delta.state import DeltaState
from sink.targets.locations import in_one_form
from sink.targets.notes import REWRITE
from sink.targets.own_state import orphans_reach
from sink.targets.scan_costs import DELTA
from sink.targets.seam import Upkeep
from sink.targets.upkeep_values import (
    Compacted,
    CompactionLimits,
    MergeCandidates,
    Rewritable,
    UpkeepFacts,
    no_condition,
)

_LATEST = 20
"""In so many commits `facts` looks for a rewrite."""
_IGNORES_RETENTION = "spark.databricks.delta.vacuum.retentionWindowIgnore.enabled"
"""With its default, Delta 4 ignores the time in the statement, and goes by the table's property alone."""
_SHORTEST_RETENTION = timedelta(days=7)
"""Delta's default of `delta.deletedFileRetentionDuration`. A commit may take long, and a table may say less."""


class DeltaUpkeep(Upkeep):
    """See `Upkeep`."""

    def __init__(self, table: DeltaState) -> None:
        self._table = table
        self._checkpoints = Checkpoints(table.spark, table.log, table.name)

    def facts(self) -> UpkeepFacts | None:
        files = counted(self._table)
        if not files or len(files) < len(self._table.live):  # files without statistics
            return None
        commits = self._table.log.history(_LATEST, self._table.snapshot_id())
        last = next((commit for commit in commits if REWRITE in commit.notes), None)
        return UpkeepFacts(
            data_files=len(files),
            size_in_bytes=sum(file.file.size_in_bytes for file in files),
            rows=sum(file.rows for file in files),
            count_deleted=lambda: sum(file.deleted for file in files),
            rewritten_at=self._table.log.time_of(last) if last else None,
            rewritten_files=int(last.notes[REWRITE]) if last else 0,
        )

    def merge_candidates(self, prefix: str, is_enough: Callable[[int, int], bool]) -> MergeCandidates:
        return candidates(self._table, prefix, is_enough)

    scan_costs = DELTA

    def rewritables(self) -> Iterator[list[Rewritable]]:
        return rewritables(self._table)

    def files_where(self, condition: str) -> frozenset[str]:
        try:
            read = self._table.rows_in(self._table.spark).where(condition).inputFiles()
        except JAVA_ERRORS as error:
            raise no_condition(self._table.name, condition, java_message(error)) from None
        found = {in_one_form(unquote(path)) for path in read}
        paths = (full(self._table.spec.location, path) for path in self._table.live)
        return frozenset(path for path in paths if in_one_form(path) in found)

    def handles(self, paths: Collection[str]) -> Sequence[Mapping[str, Any]]:
        adds = [live_add(self._table.spec.location, self._table.live, path) for path in paths]
        return [remove_of(add, data_change=False) for add in adds if add is not None]

    def remove_rows(self, rows: DataFrame, columns: Sequence[str]) -> Exception | None:
        refusal = delete_equal(self._table.log, rows, columns)
        self._table.refresh()
        return refusal

    def remove_orphans(self, older_than: timedelta, *, dry_run: bool = False) -> list[str]:
        """By VACUUM, which also keeps what is younger than a week or the table's `delta.deletedFileRetentionDuration`:
        older versions of the table and streams that read it need these files. It tells 1,000 files at most.
        """
        inside = table_inside(self._table.log)
        if inside is not None:
            raise TableError(
                f"{self._table.name}: orphan files not removed: there seems to be another table at {inside}, whose "
                "files VACUUM would delete. Move it, or set maintenance.orphans of this table to null."
            )
        stored_at = self._table.log.stored_at(self._table.snapshot_id())
        wanted = max(older_than, kept_after_deletion(self._table.log), _SHORTEST_RETENTION)
        wanted += timedelta(seconds=max(0.0, time.time() - orphans_reach(self._table, stored_at) / 1000))
        hours = math.ceil(wanted / timedelta(hours=1))
        self._table.spark.conf.set(_IGNORES_RETENTION, "false")
        statement = f"VACUUM delta.`{self._table.log.path}` RETAIN {hours} HOURS"
        try:
            # only this tells the files
            found = [str(row[0]) for row in self._table.spark.sql(f"{statement} DRY RUN").collect()]
            if found and not dry_run:
                self._table.spark.sql(statement).collect()
        except JAVA_ERRORS as error:
            raise TemporaryError(f"{self._table.name}: orphan files not removed: {java_message(error)}") from None
        return found

    def compact(self, limits: CompactionLimits, *, dry_run: bool = False) -> tuple[Compacted, int] | None:
        return compact_files(self._table, limits, self.files_where, dry_run=dry_run)

    def tend(self) -> None:
        self._checkpoints.write_if_due()

    def finish_tending(self, seconds: float) -> None:
        self._checkpoints.wait(seconds)
