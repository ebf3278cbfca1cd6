"""One Iceberg table's state, by Iceberg's Java API: its metadata, its files and its rows, as of the last look at it."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

from py4j.java_gateway import JavaObject
from pyiceberg.types import FixedType
from pyspark.sql import SparkSession
from pyspark.sql import types as T

from changelog.spec import ColumnSpec
from sink.errors import TableError
from sink.spark.expressions import quoted
from sink.spark.java_errors import JAVA_ERRORS, java_class, java_message
from sink.targets.iceberg.bridge import Bridge
from sink.targets.iceberg.errors import NOT_AUTHORIZED, replaced, table_error
from sink.targets.iceberg.snapshots import Snapshot
from sink.targets.iceberg.state import IcebergState, Layout, stored, written_properties
from sink.targets.iceberg.storage_access import OWN_CLIENTS, StorageAccess, check_storage
from sink.targets.iceberg.writers import IcebergTableSpec
from sink.targets.seam import Table
from sink.targets.upkeep_values import no_condition
from sink.targets.values import OF_POSITION

_NEAR = ("", "file")
"""Schemes of locations whose files are read and written within milliseconds, also one after the other."""
_STORAGE_CREDENTIALS = "org.apache.iceberg.io.SupportsStorageCredentials"


@dataclass(frozen=True)
class _Stable:
    """The parts of a table's metadata that the sink's own commits don't change."""

    layout: Layout
    spec_ids: tuple[int, ...]
    location: str
    properties: tuple[tuple[str, str], ...]


class _View:
    """A table's metadata as the JVM has it at one moment, as far as it was asked for. `JavaTable.look` replaces the
    whole of it: so no part of an earlier one stays, even if another thread was reading it meanwhile.
    """

    def __init__(self, table: "JavaTable", metadata: JavaObject, location: str | None) -> None:
        self._table = table
        self._metadata = metadata
        self.location = location
        self.properties: dict[str, str] = table.as_json(metadata.properties())
        # Not a `cached_property`: Python 3.11 has one lock for all tables, whose threads would wait for each other.
        self._current: tuple[Snapshot | None] | None = None

    @property
    def current(self) -> Snapshot | None:
        if self._current is None:
            snapshot = self._metadata.currentSnapshot()
            self._current = (None if snapshot is None else self._table.snapshot_of(snapshot),)
        return self._current[0]


class JavaTable(Bridge, IcebergState, Table):
    """One table as Iceberg's Java library has it. Views of its metadata are cached until `refresh` or `look`.

    :param load: asks the catalog for the table again, and so for new credentials.
    """

    def __init__(
        self, spark: SparkSession, name: str, table: JavaObject, load: Callable[[], JavaObject] | None = None
    ) -> None:
        jvm = spark.sparkContext._jvm
        assert jvm is not None
        super().__init__(jvm, name, table)
        self.spark = spark
        executors = self.iceberg.relocated.com.google.common.util.concurrent.MoreExecutors
        self.same_thread = executors.newDirectExecutorService()
        """An executor that does all in the thread that asks for it."""
        self._load = load
        self._loaded_at = time.time()
        self._seen: JavaObject | None = None
        self._view: _View | None = None
        self._written: _Stable | None = None
        self._taken_back: dict[str, tuple[str, Mapping[str, str]]] = {}
        self._other_specs: tuple[tuple[int | None, int], bool] | None = None
        self.look()

    def refresh(self) -> None:
        """Read the table's metadata again.

        :raises TableError: the table is gone or was replaced.
        :raises TemporaryError: the catalog did not answer.
        """
        try:
            if self.needs_credentials and self._load is not None:
                self._load_again(self._load)
            else:
                self._refresh()
            self.look()
        except JAVA_ERRORS as error:
            raise table_error(self.name, error) from None

    def _refresh(self) -> None:
        try:
            self.java.refresh()
        except JAVA_ERRORS as error:
            if self._load is None or java_class(error) != NOT_AUTHORIZED:
                raise
            self._load_again(self._load)  # which logs in again

    @property
    def needs_credentials(self) -> bool:
        """The catalog has vended credentials that are about to expire; `refresh` gets new ones."""
        return self._storage.is_running_out(time.time())

    def _load_again(self, load: Callable[[], JavaObject]) -> None:
        """Iceberg's own refresh keeps the credentials with which the table was loaded."""
        asked_at, loaded = time.time(), load()
        if str(loaded.uuid()) != self.table_id:
            raise replaced(self.name)
        self.java, self._loaded_at = loaded, asked_at
        self.__dict__.pop("_storage", None)

    @cached_property
    def _storage(self) -> StorageAccess:
        io, vended = self.java.io(), []
        loader = self.java.getClass().getClassLoader()
        supports = self.jvm.java.lang.Class.forName(_STORAGE_CREDENTIALS, True, loader)
        if supports.isInstance(io):
            vended = [(str(found.prefix()), self.as_json(found.config())) for found in self.elements(io.credentials())]
        return StorageAccess(self._loaded_at, self.as_json(io.properties()), vended)

    def look(self) -> None:
        """Take the metadata that the JVM has now, for instance after a commit of ours. The catalog isn't asked."""
        metadata = self.java.operations().current()
        location = metadata.metadataFileLocation()
        if self._seen is not self.java:
            self._seen, self._view, self._written = self.java, None, None
        elif self._view is not None and location is not None and location == self._view.location:
            return  # as is usual where nobody but the sink commits
        view = _View(self, metadata, location)
        layout = Layout(int(metadata.currentSchemaId()), int(metadata.defaultSpecId()), int(metadata.formatVersion()))
        written = _Stable(
            layout,
            tuple(sorted(self.as_json(metadata.specsById().keySet()))),
            str(metadata.location()),
            written_properties(view.properties),
        )
        if written != self._written:
            self._written = written
            for name in ("spec", "java_specs"):
                self.__dict__.pop(name, None)
            self._describing.clear()  # a spec's types follow the schema
        self._view = view

    def check_writable(self, *, appends: bool = False, copies: bool = False) -> None:
        super().check_writable(appends=appends, copies=copies)
        if str(self.java.io().getClass().getSimpleName()) in OWN_CLIENTS:
            check_storage(self.name, self.spec.location, self._storage.properties)

    @property
    def table_id(self) -> str:
        return str(self.java.uuid())

    @property
    def layout(self) -> Layout:
        return self._known().layout

    def _known(self) -> "_Stable":
        assert self._written is not None
        return self._written

    @cached_property
    def java_specs(self) -> JavaObject:
        """All partition specs by id, a Java map."""
        return self.java.specs()

    @cached_property
    def spec(self) -> IcebergTableSpec:
        """What the delta writers need, as plain values. The sink's own properties aren't among the table's."""
        by_id, written = self.java_specs, self._known()
        data = dict(written.properties).get("write.data.path", written.location)
        return IcebergTableSpec(
            location=written.location,
            format_version=written.layout.format_version,
            schema=str(self._calls.schema_to_json(self.java.schema())),
            specs=tuple(str(self._calls.spec_to_json(by_id.get(i))) for i in written.spec_ids),
            current_spec_id=written.layout.spec_id,
            properties=written.properties,
            io_properties=tuple(self._storage.at(data).items()),
        )

    def current_scans(self, condition: JavaObject | None = None) -> JavaObject:
        """A Java list with a `FileScanTask` for each data file of the current snapshot.

        :param condition: only for files that may have such rows.
        """
        if self.snapshot_id() is None:
            return self.java_list([])
        scan = self.scan()
        return self.as_list((scan if condition is None else scan.filter(condition)).planFiles())

    @property
    def waits_for_no_pool(self) -> bool:
        """Whether Iceberg is to read and write manifests in the thread that asks. When its pool has done that, it is
        noticed up to 10 ms later, each time (`Tasks.waitFor`, `ParallelIterable`). On a disk this is longer than the
        work.
        """
        return urlsplit(self.spec.location).scheme in _NEAR

    def scan(self) -> JavaObject:
        """A scan of the current snapshot."""
        scan = self.java.newScan()
        return scan.planWith(self.same_thread) if self.waits_for_no_pool else scan

    def condition(self, text: str) -> JavaObject:
        """A condition in Spark SQL as Iceberg's expression, which the procedures' `where` becomes in the same way.

        :raises ConfigError: see `Upkeep.files_where`.
        """
        try:
            self.spark.table(quoted_name(self.name)).where(text)  # which says best what is wrong
            converter = self.jvm.org.apache.spark.sql.execution.datasources.SparkExpressionConverter
            found = converter.collectResolvedSparkExpression(self.spark._jsparkSession, quoted_name(self.name), text)
            return converter.convertToIcebergExpression(found)
        except JAVA_ERRORS as error:
            raise no_condition(self.name, text, java_message(error)) from None

    def snapshot(self, snapshot_id: int | None) -> Snapshot | None:
        current = self.current_snapshot()
        if current is not None and current.snapshot_id == snapshot_id:
            return current
        found = None if snapshot_id is None else self.java.snapshot(snapshot_id)
        return None if found is None else self.snapshot_of(found)

    def snapshots(self) -> list[Snapshot]:
        return [self.snapshot_of(snapshot) for snapshot in self.elements(self.java.snapshots())]

    def snapshot_of(self, java: JavaObject) -> Snapshot:
        """Of Iceberg's object, in one call across the bridge."""
        return Snapshot.of_json(json.loads(self._calls.snapshot_to_json(java)))

    def is_ancestor(self, ancestor_id: int, snapshot_id: int) -> bool:
        return bool(self.iceberg.util.SnapshotUtil.isAncestorOf(self.java, snapshot_id, ancestor_id))

    def sort_order(self) -> Mapping[str, Any]:
        order: Mapping[str, Any] = json.loads(self.iceberg.SortOrderParser.toJson(self.java.sortOrder()))
        return order

    def columns(self) -> tuple[ColumnSpec, ...]:
        try:
            converted = self.iceberg.spark.SparkSchemaUtil.convert(self.java.schema())
        except JAVA_ERRORS as error:
            raise TableError(f"{self.name}: {java_message(error)}") from None
        struct = T.StructType.fromJson(json.loads(converted.json()))
        fields = self.spec.iceberg_schema.fields
        return tuple(
            ColumnSpec(
                s.name,
                s.dataType,
                required=f.required,
                is_uuid=str(f.field_type) == "uuid",
                width=len(f.field_type) if isinstance(f.field_type, FixedType) else None,
                default=None if str(f.field_type) == "uuid" else f.write_default,
            )
            for s, f in zip(struct.fields, fields, strict=True)
        )

    def _known_view(self) -> _View:
        assert self._view is not None
        return self._view

    def current_snapshot(self) -> Snapshot | None:
        return self._known_view().current

    def snapshot_id(self) -> int | None:
        current = self.current_snapshot()
        return None if current is None else current.snapshot_id

    def parent_snapshot_id(self) -> int | None:
        current = self.current_snapshot()
        return None if current is None else current.parent_id

    def is_empty(self) -> bool:
        """Whether the current snapshot has no live data file."""
        current = self.current_snapshot()
        return current is None or current.summary.get("total-data-files") == "0"

    def has_other_specs(self) -> bool:
        """Whether a data manifest was written under another spec than the current one. Reads only the manifest list,
        and not after commits of this object (`took`).
        """
        snapshot_id, spec_id = self.snapshot_id(), self.spec.current_spec_id
        if snapshot_id is None or len(self.spec.specs) == 1:
            return False
        state = snapshot_id, spec_id
        if self._other_specs is None or self._other_specs[0] != state:
            manifests = self.elements(self.java.currentSnapshot().dataManifests(self.java.io()))
            self._other_specs = state, any(int(m.partitionSpecId()) != spec_id for m in manifests)
        return self._other_specs[1]

    def took(self, commit: Snapshot) -> None:
        """Know that a commit of this object wrote its files under the current spec, so that it changed nothing for
        `has_other_specs`.
        """
        spec_id = self.spec.current_spec_id
        if self._other_specs is not None and self._other_specs[0] == (commit.parent_id, spec_id):
            self._other_specs = (commit.snapshot_id, spec_id), self._other_specs[1]

    def property(self, name: str) -> str | None:
        properties = self._known_view().properties
        prefix, _, part = name.rpartition(".")
        if part in OF_POSITION and name in properties and prefix in self._taken_back:
            newest, state = self._taken_back[prefix]
            if newest == json.loads(properties.get(f"{prefix}.position", "{}")).get("operation"):
                return state.get(part)
        return properties.get(name)

    def stored(self, part: str) -> Mapping[str, str]:
        return stored(self._known_view().properties, part)

    def own_state(self, prefix: str) -> Mapping[str, str]:
        split = ((name.rpartition("."), value) for name, value in self._known_view().properties.items())
        return {part: value for (owner, _, part), value in split if owner == prefix}

    def taken_back(self, prefix: str) -> dict[str, str]:
        """The properties that a rollback has taken back, as they are now. One that says nothing isn't removed: only a
        user does that.
        """
        raw, names = self._known_view().properties, {f"{prefix}.{part}": part for part in OF_POSITION}
        now = {name: self.property(name) or OF_POSITION[part] for name, part in names.items() if name in raw}
        return {name: value for name, value in now.items() if value != raw[name]}

    def _take_back(self, prefix: str, newest: str, state: Mapping[str, str] | None) -> None:
        self._taken_back.pop(prefix, None)
        if state is not None:
            self._taken_back[prefix] = newest, state

    def set_property(self, name: str, value: str | None) -> None:
        update = self.java.updateProperties()
        try:
            (update.remove(name) if value is None else update.set(name, value)).commit()
        except JAVA_ERRORS as error:
            raise table_error(self.name, error) from None
        self.look()


def quoted_name(name: str) -> str:
    """A table's full name in SQL."""
    return ".".join(map(quoted, name.split(".")))
