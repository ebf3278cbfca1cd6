"""One Iceberg table, by Iceberg's Java API: what the sink asks of it.

The sink uses Iceberg's Java library through py4j because this library is the reference. It makes retries, validation,
sequence numbers and manifests.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

from py4j.java_gateway import JavaObject
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import types as T

from deltawriters.old_rows import DeletedRows
from sink.spark.expressions import quoted
from sink.spark.java_errors import JAVA_ERRORS, java_class
from sink.targets.base import (
    Compacted,
    CompactionLimits,
    EqualityDeleted,
    LiveFile,
    MergeCandidates,
    MergedDeletes,
    Rewritable,
    TableChanges,
    TouchedFiles,
    WrittenDeletes,
)
from sink.targets.iceberg.changes import Changes, live_files, rows_of
from sink.targets.iceberg.commit import IcebergCommitter
from sink.targets.iceberg.compaction import compact_files
from sink.targets.iceberg.dangling import dangling_deletes
from sink.targets.iceberg.deletes import write_deletes
from sink.targets.iceberg.errors import table_error
from sink.targets.iceberg.expired_snapshots import ExpiredSnapshots
from sink.targets.iceberg.history import IcebergHistory
from sink.targets.iceberg.housekeeping import expire_snapshots, has_expired, remove_orphans, stored_at
from sink.targets.iceberg.java_table import JavaTable, quoted_name
from sink.targets.iceberg.rewritables import equality_deleted, handles, merge_deletes, rewritables
from sink.targets.iceberg.small_files import SmallFiles
from sink.targets.iceberg.touched_files import touched_files
from sink.targets.locations import in_one_form

_ATTEMPTS = 5
"""To add a spec, while others commit."""
_REMOVED = "rowdelta_removed"
"""A view with rows to remove."""


class IcebergTable(JavaTable):
    """One table as the sink sees it."""

    def __init__(
        self, spark: SparkSession, name: str, table: JavaObject, load: Callable[[], JavaObject] | None = None
    ) -> None:
        super().__init__(spark, name, table, load)
        self._small_files = SmallFiles(self)

    def files_where(self, condition: str) -> frozenset[str]:
        return frozenset(self.scanned_paths(self.current_scans(self.condition(condition))))

    def expired_snapshots(self) -> ExpiredSnapshots:
        return ExpiredSnapshots(self)

    def keeps_default(self, dtype: T.DataType) -> bool:
        # Iceberg 1.11 can't read files with the column then: "Cannot cast default value to long"
        return self.spec.format_version >= 3 and not isinstance(dtype, T.DecimalType)

    def evolve(self, changes: Mapping[str, T.DataType | None], defaults: Mapping[str, Any]) -> None:
        """Add columns, widen columns, or (None) make them optional, in one commit without a snapshot.

        If others commit meanwhile, nothing changes. The next attempt at the micro-batch finds out what is still
        missing.

        :raises TableError: Iceberg refuses the change.
        """
        schema = self.java.schema()
        update = self.java.updateSchema()
        try:
            for name, dtype in changes.items():
                if dtype is None:
                    update = update.makeColumnOptional(name)
                    continue
                column = T.StructType([T.StructField(name, dtype)])
                wanted = self.iceberg.spark.SparkSchemaUtil.convert(
                    self.jvm.org.apache.spark.sql.types.DataType.fromJson(column.json())
                )
                iceberg_type = wanted.columns().get(0).type()
                if schema.findField(name) is None:
                    lit = self.iceberg.expressions.Expressions.lit
                    default = (None, lit(defaults[name])) if name in defaults else ()
                    update = update.addColumn(None, name, iceberg_type, *default)
                else:
                    update = update.updateColumn(name, iceberg_type)
            update.commit()
        except JAVA_ERRORS as error:
            if java_class(error) != "CommitFailedException":
                raise table_error(self.name, error) from None
        self.refresh()

    def prepare_global_deletes(self) -> None:
        """Add an unpartitioned spec to the history of a partitioned table. Equality deletes under it are global.

        The current spec stays the same: one transaction removes its fields and adds them again.
        """
        for attempt in range(1, _ATTEMPTS + 1):
            if self.spec.unpartitioned_spec_id is not None:
                return
            try:
                self._add_unpartitioned_spec()
            except JAVA_ERRORS as error:  # another commit may have come in between
                if java_class(error) != "CommitFailedException" or attempt == _ATTEMPTS:
                    raise table_error(self.name, error) from None
            self.refresh()

    def _add_unpartitioned_spec(self) -> None:
        transaction = self.java.newTransaction()
        schema, fields = transaction.table().schema(), list(transaction.table().spec().fields())
        expressions = self.iceberg.expressions.Expressions
        removal = transaction.updateSpec()
        for field in fields:
            removal = removal.removeField(field.name())
        removal.commit()
        addition = transaction.updateSpec()
        for field in fields:
            term = expressions.transform(schema.findColumnName(field.sourceId()), field.transform())
            addition = addition.addField(field.name(), term)
        addition.commit()
        transaction.commitTransaction()

    def committer(self, *, newest_if_in_doubt: bool = False) -> IcebergCommitter:
        return IcebergCommitter(self, newest_if_in_doubt=newest_if_in_doubt)

    def key_encoding(self, key: Sequence[str], buckets: int | None) -> str:
        schema, spec = self.spec.iceberg_schema, self.spec
        keys = ", ".join(f"{schema.find_field(name).field_id} {schema.find_type(name)}" for name in key)
        shown = "" if buckets is None else f"; {buckets} buckets by {spec.current_spec}"
        return f"{keys}{shown}; v{spec.format_version}"

    def changes_since(self, base: int | None, included: set[int]) -> TableChanges | None:
        return Changes(self, base).since(included)

    def history(self, prefix: str) -> IcebergHistory:
        sink_id = prefix.removeprefix("rowdelta.")
        return IcebergHistory(self.name, self.metadata(), sink_id, lambda number: self.position_in(number, prefix))

    def remove_rows(self, rows: DataFrame, columns: Sequence[str]) -> Exception | None:
        same = " AND ".join(f"kept.{quoted(name)} <=> removed.{quoted(name)}" for name in columns)
        rows.createOrReplaceTempView(_REMOVED)
        try:
            self.spark.sql(
                f"DELETE FROM {quoted_name(self.name)} AS kept "
                f"WHERE EXISTS (SELECT 1 FROM {_REMOVED} AS removed WHERE {same})"
            )
        except JAVA_ERRORS as error:
            if java_class(error) not in ("ValidationException", "CommitFailedException"):
                raise
            return error
        finally:
            self.spark.catalog.dropTempView(_REMOVED)
        return None

    def frame_of_commit(self, snapshot_id: int) -> DataFrame | None:
        snapshot = self.java.snapshot(snapshot_id)
        if snapshot is None:
            return None
        parent = snapshot.parentId()
        if parent is None:
            return self.frame_at(snapshot_id)
        reader = self.spark.read.option("start-snapshot-id", str(parent)).option("end-snapshot-id", str(snapshot_id))
        return reader.table(quoted_name(self.name))

    def live_files(self) -> Iterator[LiveFile]:
        return live_files(self)

    def rows_of(
        self, files: Sequence[LiveFile], columns: Sequence[str]
    ) -> AbstractContextManager[tuple[DataFrame, Column, Column, Sequence[str]]]:
        return rows_of(self, files)

    def delete_rows(
        self,
        name: str,
        rows: DeletedRows,
        known: Callable[[str], Mapping[str, Any] | None],
        parquet_deletes: Mapping[str, Sequence[str]],
        created: list[str],
    ) -> WrittenDeletes:
        return write_deletes(self.spark, self.name, self.spec, name, rows, known, parquet_deletes, created)

    def touched_files(self, paths: Collection[str]) -> TouchedFiles:
        return touched_files(self, paths)

    def index_forbidden_at(self, location: str) -> str | None:
        if not f"{in_one_form(location)}/".startswith(f"{in_one_form(self.spec.location).rstrip('/')}/"):
            return None
        return "inside the table's own folder, where Iceberg's remove_orphan_files deletes it"

    def merge_candidates(self, prefix: str, is_enough: Callable[[int, int], bool]) -> MergeCandidates:
        return self._small_files.search(self.spec, prefix, is_enough)

    def rewritables(self) -> Iterator[list[Rewritable]]:
        return rewritables(self)

    def handles(self, paths: Collection[str]) -> Sequence[JavaObject]:
        return handles(self, paths)

    def merge_deletes(
        self, paths: Collection[str], data_files: Collection[str], files: Sequence[str]
    ) -> MergedDeletes | None:
        return merge_deletes(self, paths, data_files, files)

    def delete_new_rows(
        self, name: str, files: Sequence[str], rows: DeletedRows, created: list[str]
    ) -> tuple[Sequence[str], WrittenDeletes]:
        written = write_deletes(self.spark, self.name, self.spec, f"{name}-carried", rows, lambda _: None, {}, created)
        return files, written

    def equality_deletes(self) -> EqualityDeleted | None:
        last = self.current_snapshot()
        has_any = last is not None and last.summary.get("total-equality-deletes", "0") != "0"
        return equality_deleted(self) if has_any else None

    def dangling_deletes(self) -> Sequence[JavaObject]:
        return dangling_deletes(self)

    def has_old_states(self, older_than: timedelta, retain_last: int, keep: int | None) -> bool:
        return has_expired(self, older_than, retain_last, keep)

    def expire(self, older_than: timedelta, retain_last: int, keep: int | None) -> int:
        return expire_snapshots(self, older_than, retain_last, keep)

    def stored_at(self) -> int:
        return stored_at(self)

    def remove_orphans(self, older_than: timedelta, *, dry_run: bool = False) -> list[str]:
        return remove_orphans(self, older_than, dry_run=dry_run)

    def compact(self, limits: CompactionLimits, *, dry_run: bool = False) -> tuple[Compacted, int] | None:
        return compact_files(self, limits, dry_run=dry_run)
