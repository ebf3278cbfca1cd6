"""One Iceberg table, by Iceberg's Java API: what the sink asks of it.

The sink uses Iceberg's Java library through py4j because this library is the reference. It makes retries, validation,
sequence numbers and manifests.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from py4j.java_gateway import JavaObject
from pyspark.sql import SparkSession
from pyspark.sql import types as T

from deltawriters.old_rows import DeletedRows
from deltawriters.scratch import Scratch
from sink.spark.java_errors import JAVA_ERRORS, java_class
from sink.targets.iceberg.changes import Changes, live_files
from sink.targets.iceberg.commit import IcebergCommitter
from sink.targets.iceberg.deletes import write_deletes
from sink.targets.iceberg.errors import table_error
from sink.targets.iceberg.expired_snapshots import ExpiredSnapshots
from sink.targets.iceberg.java_table import JavaTable
from sink.targets.iceberg.reader import IcebergReader
from sink.targets.iceberg.touched_files import touched_files
from sink.targets.iceberg.upkeep import IcebergUpkeep
from sink.targets.locations import in_one_form
from sink.targets.retries import Retries
from sink.targets.values import ChangeSet, LiveFile, Outcome, Rewrite, TableChanges, TouchedFiles, WrittenDeletes

_ATTEMPTS = 5
"""To add a spec, while others commit."""


class IcebergTable(JavaTable):
    """One table as the sink sees it."""

    def __init__(
        self, spark: SparkSession, name: str, table: JavaObject, load: Callable[[], JavaObject] | None = None
    ) -> None:
        super().__init__(spark, name, table, load)
        self._committer = IcebergCommitter(self)
        self._upkeep = IcebergUpkeep(self)
        self._reader = IcebergReader(self)

    def expired_snapshots(self) -> ExpiredSnapshots:
        return ExpiredSnapshots(self)

    def _keeps_default(self, dtype: T.DataType | None) -> bool:
        # Iceberg 1.11 can't read files with the column then: "Cannot cast default value to long"
        return self.spec.format_version >= 3 and dtype is not None and not isinstance(dtype, T.DecimalType)

    def evolve(self, changes: Mapping[str, T.DataType | None], defaults: Mapping[str, Any]) -> Mapping[str, Any]:
        kept = {name: value for name, value in defaults.items() if self._keeps_default(changes[name])}
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
                    default = (None, lit(kept[name])) if name in kept else ()
                    update = update.addColumn(None, name, iceberg_type, *default)
                else:
                    update = update.updateColumn(name, iceberg_type)
            update.commit()
        except JAVA_ERRORS as error:
            if java_class(error) != "CommitFailedException":
                raise table_error(self.name, error) from None
        self.refresh()
        return kept

    def prepare_global_deletes(self, *, always: bool) -> bool:
        """Add an unpartitioned spec to the history of a partitioned table. Equality deletes under it are global.

        The current spec stays the same: one transaction removes its fields and adds them again.
        """
        has_others = self.has_other_specs()
        for attempt in range(1, _ATTEMPTS + 1):
            if self.spec.unpartitioned_spec_id is not None or not (has_others or always):
                break
            try:
                self._add_unpartitioned_spec()
            except JAVA_ERRORS as error:  # another commit may have come in between
                if java_class(error) != "CommitFailedException" or attempt == _ATTEMPTS:
                    raise table_error(self.name, error) from None
            self.refresh()
        return has_others

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

    def commit(self, request: ChangeSet | Rewrite) -> Outcome:
        return self._committer.rewrite(request) if isinstance(request, Rewrite) else self._committer.commit(request)

    def reset(self, prefix: str, state: Mapping[str, str], kept: Collection[str], *, empty: bool) -> Outcome:
        return self._committer.reset(prefix, state, kept, empty=empty)

    def retries(self) -> Retries:
        return self._committer.retries()

    def settle(self, prefix: str) -> None:
        self._committer.settle(prefix)

    def key_encoding(self, key: Sequence[str], buckets: int | None) -> str:
        schema, spec = self.spec.iceberg_schema, self.spec
        keys = ", ".join(f"{schema.find_field(name).field_id} {schema.find_type(name)}" for name in key)
        shown = "" if buckets is None else f"; {buckets} buckets by {spec.current_spec}"
        return f"{keys}{shown}; v{spec.format_version}"

    def changes_since(self, base: int | None, included: set[int]) -> TableChanges | None:
        return Changes(self, base).since(included)

    def live_files(self) -> Iterator[LiveFile]:
        return live_files(self)

    def delete_rows(
        self,
        name: str,
        rows: DeletedRows,
        known: Callable[[str], Mapping[str, Any] | None],
        parquet_deletes: Mapping[str, Sequence[str]],
        scratch: Scratch,
    ) -> WrittenDeletes:
        return write_deletes(self.spark, self.name, self.spec, name, rows, known, parquet_deletes, scratch)

    def touched_files(self, paths: Collection[str]) -> TouchedFiles:
        return touched_files(self, paths)

    def index_forbidden_at(self, location: str) -> str | None:
        if not f"{in_one_form(location)}/".startswith(f"{in_one_form(self.spec.location).rstrip('/')}/"):
            return None
        return "inside the table's own folder, where Iceberg's remove_orphan_files deletes it"

    def delete_new_rows(
        self, name: str, files: Sequence[str], rows: DeletedRows, scratch: Scratch
    ) -> tuple[Sequence[str], WrittenDeletes]:
        written = write_deletes(self.spark, self.name, self.spec, f"{name}-carried", rows, lambda _: None, {}, scratch)
        return files, written

    def upkeep(self) -> IcebergUpkeep:
        return self._upkeep

    def reader(self) -> IcebergReader:
        return self._reader
