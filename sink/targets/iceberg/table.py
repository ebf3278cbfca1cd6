"""Calls Iceberg's Java API: loads, creates and describes tables in the catalogs of the Spark session.

The sink uses Iceberg's Java library through py4j because this library is the reference. It makes retries, validation,
sequence numbers and manifests.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from py4j.java_gateway import JavaObject
from pyiceberg.transforms import VoidTransform
from pyspark.sql import SparkSession
from pyspark.sql import types as T
from pyspark.sql.pandas.types import from_arrow_type

from changelog.decoding import METADATA
from changelog.spec import ColumnSpec
from sink.config import Config, PartitionField, TableSection
from sink.errors import ConfigError, TableError, TableGoneError, TemporaryError
from sink.redaction import masked
from sink.spark.java_errors import JAVA_ERRORS, exception_message, java_class, java_exception, java_message
from sink.spark.versions import parse_ddl
from sink.targets.base import Snapshot, TableState, written_properties
from sink.targets.iceberg.storage_access import StorageAccess
from sink.targets.iceberg.writers import IcebergTableSpec

if TYPE_CHECKING:
    from sink.targets.iceberg.expired_snapshots import ExpiredSnapshots

_STORAGE_CREDENTIALS = "org.apache.iceberg.io.SupportsStorageCredentials"


class _Java:
    """What of Java's classes is used for every table. To find a class by its name takes a round trip for each of the
    name's parts, and one of its static methods another.
    """

    def __init__(self, jvm: Any) -> None:
        self.iceberg = iceberg = jvm.org.apache.iceberg
        self.schema_to_json = iceberg.SchemaParser.toJson
        self.spec_to_json = iceberg.PartitionSpecParser.toJson
        self.snapshot_to_json = iceberg.SnapshotParser.toJson
        self.content_from_json = iceberg.ContentFileParser.fromJson
        self.content_to_json = iceberg.ContentFileParser.toJson
        self.mapper = iceberg.util.JsonUtil.mapper()
        self.new_list = iceberg.relocated.com.google.common.collect.Lists.newArrayList
        self.list_class = jvm.java.lang.Class.forName("java.util.ArrayList")


_java = lru_cache(maxsize=1)(_Java)


@dataclass(frozen=True)
class _Layout:
    """What of a table's metadata is as before after the sink's own commits."""

    schema_id: int
    spec_id: int
    spec_ids: tuple[int, ...]
    format_version: int
    location: str
    properties: tuple[tuple[str, str], ...]


class _View:
    """A table's metadata as the JVM has it at one moment, as far as it was asked for. `IcebergTable.look` replaces the
    whole of it: so no part of an earlier one stays, even if another thread was reading it meanwhile.
    """

    def __init__(self, table: "IcebergTable", metadata: JavaObject, location: str | None) -> None:
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


class IcebergTable(TableState):
    """One table as the sink sees it. Views of its metadata are cached until `refresh` or `look`.

    :param load: asks the catalog for the table again, and so for new credentials.
    """

    def __init__(
        self, spark: SparkSession, name: str, table: JavaObject, load: Callable[[], JavaObject] | None = None
    ) -> None:
        jvm = spark.sparkContext._jvm
        assert jvm is not None
        self.spark = spark
        self.jvm = jvm
        self._calls = _java(jvm)
        self.iceberg = self._calls.iceberg
        self.name = name
        self.java = table
        self._load = load
        self._loaded_at = time.time()
        self._seen: JavaObject | None = None
        self._view: _View | None = None
        self._layout: _Layout | None = None
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
                self.java.refresh()
            self.look()
        except JAVA_ERRORS as error:
            raise table_error(self.name, error) from None

    @property
    def needs_credentials(self) -> bool:
        """The catalog has vended credentials that are about to expire; `refresh` gets new ones."""
        return self._storage.is_running_out(time.time())

    def _load_again(self, load: Callable[[], JavaObject]) -> None:
        """Iceberg's own refresh keeps the credentials with which the table was loaded."""
        asked_at, loaded = time.time(), load()
        if str(loaded.uuid()) != str(self.java.uuid()):
            raise _replaced(self.name)
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
            self._seen, self._view, self._layout = self.java, None, None
        elif self._view is not None and location is not None and location == self._view.location:
            return  # as is usual where nobody but the sink commits
        view = _View(self, metadata, location)
        layout = _Layout(
            int(metadata.currentSchemaId()),
            int(metadata.defaultSpecId()),
            tuple(sorted(self.as_json(metadata.specsById().keySet()))),
            int(metadata.formatVersion()),
            str(metadata.location()),
            written_properties(view.properties),
        )
        if layout != self._layout:
            self._layout = layout
            for name in ("spec", "java_specs"):
                self.__dict__.pop(name, None)
        self._view = view

    @property
    def layout(self) -> tuple[int, int, int]:
        """What files are written for: ids of the schema and the partition spec, and the format version."""
        layout = self._known_layout()
        return layout.schema_id, layout.spec_id, layout.format_version

    def _known_layout(self) -> "_Layout":
        assert self._layout is not None
        return self._layout

    @cached_property
    def java_specs(self) -> JavaObject:
        """All partition specs by id, a Java map."""
        return self.java.specs()

    @cached_property
    def spec(self) -> IcebergTableSpec:
        """What the delta writers need, as plain values. The sink's own properties aren't among the table's."""
        by_id, layout = self.java_specs, self._known_layout()
        data = dict(layout.properties).get("write.data.path", layout.location)
        return IcebergTableSpec(
            location=layout.location,
            format_version=layout.format_version,
            schema=str(self._calls.schema_to_json(self.java.schema())),
            specs=tuple(str(self._calls.spec_to_json(by_id.get(i))) for i in layout.spec_ids),
            current_spec_id=layout.spec_id,
            properties=layout.properties,
            io_properties=tuple(self._storage.at(data).items()),
        )

    def as_json(self, collection: JavaObject) -> Any:
        """Read a Java map or set in one call. Iterating over it from Python takes several calls for each entry."""
        return json.loads(self._calls.mapper.writeValueAsString(collection))

    def as_list(self, iterable: JavaObject) -> JavaObject:
        """A Java `Iterable` as a Java list."""
        return self._calls.new_list(iterable)

    def java_list(self, values: Sequence[str]) -> JavaObject:
        """A Java list of texts. Py4j would make one by a call for each."""
        return self._calls.mapper.readValue(json.dumps(list(values)), self._calls.list_class)

    def content_file(self, text: str) -> JavaObject:
        """The Java data or delete file that a `ContentFileParser` JSON describes."""
        return self._calls.content_from_json(self._calls.mapper.readTree(text), self.java_specs)

    def described(self, file: JavaObject) -> dict[str, Any]:
        """The `ContentFileParser` JSON of a Java data or delete file."""
        spec_id = int(file.specId())
        spec, fields = self.java_specs.get(spec_id), self.spec.specs_by_id[spec_id].fields
        if fields and all(isinstance(field.transform, VoidTransform) for field in fields):
            # a table that was v1 keeps dropped partition fields so, and the parser takes their nulls for a
            # contradiction (Iceberg 1.11)
            is_data = str(file.content()) == "DATA"
            builder = self.iceberg.DataFiles.builder if is_data else self.iceberg.FileMetadata.deleteFileBuilder
            file = builder(spec).copy(file).build()
        described: dict[str, Any] = json.loads(self._calls.content_to_json(file, spec))
        return described

    def elements(self, iterable: JavaObject) -> list[JavaObject]:
        """The elements of a Java `Iterable`. Iterating over it from Python takes ten times as long, 2 ms an element."""
        elements = self.as_list(iterable)
        return [elements.get(i) for i in range(elements.size())]

    def scanned_paths(self, scans: JavaObject) -> list[str]:
        """The data file of each `FileScanTask` in a Java list: as many calls across the bridge for any number."""
        paths: list[str] = self.as_json(scans.stream().map(self._scanned_path).toArray())
        return paths

    def sequence_numbers(self, files: JavaObject) -> set[int]:
        """The sequence numbers of the data or delete files of a Java `Iterable`, which readers compare."""
        lang, loader = self.jvm.java.lang, self.java.getClass().getClassLoader()
        handles, returning = lang.invoke.MethodHandles, lang.invoke.MethodType.methodType
        file = lang.Class.forName("org.apache.iceberg.ContentFile", True, loader)
        number, function = (lang.Class.forName(f"java.{name}") for name in ("lang.Long", "util.function.Function"))
        number_of = handles.publicLookup().findVirtual(file, "dataSequenceNumber", returning(number))
        numbers = lang.invoke.MethodHandleProxies.asInterfaceInstance(function, number_of)
        return set(self.as_json(self.as_list(files).stream().map(numbers).distinct().toArray()))

    @cached_property
    def _scanned_path(self) -> JavaObject:
        """A Java `Function`: from a `FileScanTask` to the path of its data file. Python can't write a function that
        the JVM calls without coming back for each element, but it can put one together.
        """
        lang, loader = self.jvm.java.lang, self.java.getClass().getClassLoader()
        handles, returning = lang.invoke.MethodHandles, lang.invoke.MethodType.methodType
        task = lang.Class.forName("org.apache.iceberg.FileScanTask", True, loader)
        file = lang.Class.forName("org.apache.iceberg.ContentFile", True, loader)
        text, function = (lang.Class.forName(f"java.{name}") for name in ("lang.String", "util.function.Function"))
        lookup = handles.publicLookup()
        file_of = lookup.findVirtual(task, "file", returning(file))
        path_of = lookup.findVirtual(file, "location", returning(text))
        return lang.invoke.MethodHandleProxies.asInterfaceInstance(
            function, handles.filterReturnValue(file_of, path_of)
        )

    def summary(self, snapshot: JavaObject) -> dict[str, str]:
        """A snapshot's summary, which counts what it added and removed."""
        summary: dict[str, str] = self.as_json(snapshot.summary())
        return summary

    def metadata(self) -> dict[str, Any]:
        """All metadata as JSON (Iceberg spec, Table Metadata Fields)."""
        text = str(self.iceberg.TableMetadataParser.toJson(self.java.operations().current()))
        metadata: dict[str, Any] = json.loads(text)
        return metadata

    def snapshot(self, snapshot_id: int | None) -> Snapshot | None:
        current = self.current_snapshot()
        if current is not None and current.snapshot_id == snapshot_id:
            return current
        found = None if snapshot_id is None else self.java.snapshot(snapshot_id)
        return None if found is None else self.snapshot_of(found)

    def snapshot_of(self, java: JavaObject) -> Snapshot:
        """Of Iceberg's object, in one call across the bridge."""
        return Snapshot.of_json(json.loads(self._calls.snapshot_to_json(java)))

    def is_ancestor(self, ancestor_id: int, snapshot_id: int) -> bool:
        return bool(self.iceberg.util.SnapshotUtil.isAncestorOf(self.java, snapshot_id, ancestor_id))

    def expired_snapshots(self) -> "ExpiredSnapshots":
        from sink.targets.iceberg.expired_snapshots import ExpiredSnapshots

        return ExpiredSnapshots(self)

    def is_sorted(self) -> bool:
        return not self.java.sortOrder().isUnsorted()

    def columns(self) -> tuple[ColumnSpec, ...]:
        try:
            converted = self.iceberg.spark.SparkSchemaUtil.convert(self.java.schema())
        except JAVA_ERRORS as error:
            raise TableError(f"{self.name}: {java_message(error)}") from None
        struct = T.StructType.fromJson(json.loads(converted.json()))
        fields = self.spec.iceberg_schema.fields
        return tuple(
            ColumnSpec(s.name, s.dataType, required=f.required, is_uuid=str(f.field_type) == "uuid")
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

    def has_data_under_other_specs(self) -> bool:
        """Whether a data manifest was written under another spec than the current one. Reads only the manifest list."""
        snapshot = self.java.currentSnapshot()
        if snapshot is None or len(self.spec.specs) == 1:
            return False
        manifests = self.elements(snapshot.dataManifests(self.java.io()))
        return any(int(m.partitionSpecId()) != self.spec.current_spec_id for m in manifests)

    def has_global_deletes(self) -> bool:
        """Whether the table has partitions, and also deletes under an unpartitioned spec, which apply to all of them.
        Reads only the manifest list.
        """
        snapshot, specs = self.java.currentSnapshot(), self.java.specs()
        if snapshot is None or int(specs.size()) == 1:
            return False
        manifests = self.elements(snapshot.deleteManifests(self.java.io()))
        return any(specs.get(manifest.partitionSpecId()).isUnpartitioned() for manifest in manifests)

    def property(self, name: str) -> str | None:
        return self._known_view().properties.get(name)

    def set_property(self, name: str, value: str) -> None:
        self.java.updateProperties().set(name, value).commit()
        self.look()

    def evolve(self, changes: Mapping[str, T.DataType | None]) -> None:
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
                    update = update.addColumn(None, name, iceberg_type)
                else:
                    update = update.updateColumn(name, iceberg_type)
            update.commit()
        except JAVA_ERRORS as error:
            if java_class(error) != "CommitFailedException":
                raise table_error(self.name, error) from None
        self.refresh()

    def ensure_unpartitioned_spec(self) -> None:
        """Add an unpartitioned spec to the history of a partitioned table. Equality deletes under it are global.

        The current spec stays the same: one transaction removes its fields and adds them again.
        """
        if self.spec.unpartitioned_spec_id is not None:
            return
        fields = [(f.name(), f) for f in self.java.spec().fields()]
        schema = self.java.schema()
        expressions = self.iceberg.expressions.Expressions
        transaction = self.java.newTransaction()
        removal = transaction.updateSpec()
        for name, _ in fields:
            removal = removal.removeField(name)
        removal.commit()
        addition = transaction.updateSpec()
        for name, field in fields:
            term = expressions.transform(schema.findColumnName(field.sourceId()), field.transform())
            addition = addition.addField(name, term)
        addition.commit()
        transaction.commitTransaction()
        self.refresh()


_DEFAULTS = {
    "format-version": "2",
    # each commit adds a metadata file, and Iceberg keeps them for ever by default
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "100",
}
"""Default properties of new tables."""


class Catalogs:
    """Tables of the session's Iceberg catalogs by `catalog.namespace.table`."""

    def __init__(self, spark: SparkSession) -> None:
        jvm = spark.sparkContext._jvm
        assert jvm is not None
        self.spark = spark
        self._jvm = jvm
        self._iceberg = jvm.org.apache.iceberg

    def load(self, name: str) -> IcebergTable | None:
        """The table, or None if it doesn't exist.

        :raises TemporaryError: the catalog did not answer.
        """
        catalog, identifier = self._resolve(name)
        try:
            return self._opened(name, catalog, identifier, catalog.loadTable(identifier))
        except JAVA_ERRORS as error:
            if java_class(error) in ("NoSuchTableException", "NoSuchNamespaceException"):
                return None
            raise table_error(name, error) from None

    def create(
        self,
        name: str,
        columns: T.StructType,
        key: Sequence[str],
        properties: Mapping[str, str],
        partition_spec: JavaObject | None = None,
    ) -> IcebergTable:
        """Create a table with `key` as identifier fields.

        :param properties: properties of the table. They replace our defaults, and so do the catalog's
            `table-default.…` properties.
        """
        catalog, identifier = self._resolve(name)
        of_catalog = f"spark.sql.catalog.{name.split('.')[0]}.table-default."
        defaults = {n: v for n, v in _DEFAULTS.items() if self.spark.conf.get(f"{of_catalog}{n}", None) is None}
        converted = self._converted(columns)
        ids = self._jvm.java.util.HashSet()
        for column in key:
            ids.add(converted.findField(column).fieldId())
        schema = self._iceberg.Schema(converted.columns(), ids)
        try:
            self._ensure_namespace(catalog, identifier)
            builder = catalog.buildTable(identifier, schema)
            for property_name, value in (defaults | dict(properties)).items():
                builder = builder.withProperty(property_name, value)
            if partition_spec is not None:
                builder = builder.withPartitionSpec(partition_spec)
            table = builder.create()
        except JAVA_ERRORS as error:
            raise table_error(name, error) from None
        return self._opened(name, catalog, identifier, table)

    def _opened(self, name: str, catalog: JavaObject, identifier: JavaObject, table: JavaObject) -> IcebergTable:
        def load() -> JavaObject:
            # without this, Iceberg keeps the old credentials if a REST catalog answers "not modified"
            catalog.invalidateTable(identifier)
            return catalog.loadTable(identifier)

        return IcebergTable(self.spark, name, table, load)

    def storage_properties(self, config: Config, name: str) -> dict[str, str]:
        """By what the catalog of a table reaches files that are no table's: as configured, and as a REST catalog says
        for all tables alike. What it vends for a table isn't for other places.
        """
        catalog_name = name.split(".")[0]
        prefix = f"spark.sql.catalog.{catalog_name}."
        given = {key.removeprefix(prefix): value for key, value in config.spark.items() if key.startswith(prefix)}
        configured = given | config.catalogs[catalog_name]
        if configured.get("type", "rest") != "rest":
            return configured
        catalog, _ = self._resolve(name)
        rest = self._jvm.java.lang.Class.forName(
            "org.apache.iceberg.rest.RESTCatalog", True, catalog.getClass().getClassLoader()
        )
        return configured | dict(catalog.properties()) if rest.isInstance(catalog) else configured

    def partition_spec(self, columns: T.StructType, partition_by: Sequence[PartitionField], path: str) -> JavaObject:
        """Iceberg's partition spec for a new table with these columns.

        :param path: the table's place in the configuration.
        :raises ConfigError: a transform doesn't fit its column's type, or two fields are the same.
        """
        try:
            builder = self._iceberg.PartitionSpec.builderFor(self._converted(columns))
        except JAVA_ERRORS as error:
            raise ConfigError(f"{path}.columns: {java_message(error)}") from None
        spec = builder.build()
        for number, field in enumerate(partition_by):
            where = f"{path}.partition_by[{number}]"
            if field.column not in columns.names:
                names = ", ".join(columns.names)
                raise ConfigError(f"{where}: there is no column {field.column!r}. The columns are: {names}.")
            parameters = [] if field.parameter is None else [field.parameter]
            try:
                builder = getattr(builder, field.transform)(field.column, *parameters)
                spec = builder.build()  # only this call checks the types
            except JAVA_ERRORS as error:
                dtype = columns[field.column].dataType.simpleString()
                raise ConfigError(
                    f"{where}: {field.transform} of column {field.column}, which is {dtype}: {java_message(error)}"
                ) from None
        return spec

    def _converted(self, columns: T.StructType) -> JavaObject:
        """The columns as an Iceberg schema."""
        return self._iceberg.spark.SparkSchemaUtil.convert(
            self._jvm.org.apache.spark.sql.types.DataType.fromJson(columns.json())
        )

    def _resolve(self, name: str) -> tuple[JavaObject, JavaObject]:
        catalog_name, *namespace, table = name.split(".")
        manager = self.spark._jsparkSession.sessionState().catalogManager()
        try:
            catalog = manager.catalog(catalog_name).icebergCatalog()
        except JAVA_ERRORS as error:
            raise self._unusable(catalog_name, error) from None
        gateway = self.spark.sparkContext._gateway
        assert gateway is not None
        levels = gateway.new_array(self._jvm.java.lang.String, len(namespace))
        for i, level in enumerate(namespace):
            levels[i] = level
        identifier = self._iceberg.catalog.TableIdentifier.of(self._iceberg.catalog.Namespace.of(levels), table)
        return catalog, identifier

    def _unusable(self, catalog: str, error: Exception) -> ConfigError | TemporaryError:
        kind, message = java_class(error), _with_cause(error)
        if kind in (*_REFUSALS, "ClassNotFoundException", "CatalogNotFoundException"):
            return ConfigError(f"catalogs.{catalog}: it can't be opened: {message}. Correct its properties.")
        prefix = f"spark.sql.catalog.{catalog}"
        uri = self.spark.conf.get(f"{prefix}.uri", None)
        if uri is None and self.spark.conf.get(f"{prefix}.type", None) == "rest":
            return ConfigError(f"catalogs.{catalog}: a catalog of type rest needs its address. Add uri.")
        at = "" if uri is None else f" at {masked(uri)}"
        return TemporaryError(
            f"catalog {catalog}{at} can't be opened: {message}. Nothing was applied; run again once it answers, or "
            "correct "
            f"catalogs.{catalog}."
        )

    def _ensure_namespace(self, catalog: JavaObject, identifier: JavaObject) -> None:
        supports = self._jvm.java.lang.Class.forName(
            "org.apache.iceberg.catalog.SupportsNamespaces", True, catalog.getClass().getClassLoader()
        )
        if not supports.isInstance(catalog) or catalog.namespaceExists(identifier.namespace()):
            return
        try:
            catalog.createNamespace(identifier.namespace())
        except JAVA_ERRORS as error:
            if java_class(error) != "AlreadyExistsException":
                raise


_REFUSALS = ("IllegalArgumentException", "BadRequestException", "NotAuthorizedException", "ForbiddenException")


def _with_cause(error: Exception) -> str:
    """The message, and that of the innermost cause. If a catalog doesn't answer, the innermost one has its address."""
    exception = java_exception(error)
    while (cause := exception.getCause()) is not None:
        exception = cause
    message, inner = java_message(error).strip(), exception_message(exception)
    return message if inner in message else f"{message} ({inner})"


def _replaced(name: str) -> TableGoneError:
    return TableGoneError(f"{name} was dropped and created again while the sink ran. Start the sink again.")


def table_error(name: str, error: Exception) -> TableError | TemporaryError:
    """The error that a Java exception means for the table: it is gone or was replaced, or the error is temporary."""
    kind, message = java_class(error), java_message(error)
    # the hadoop catalog says it by the message
    if kind in ("NoSuchTableException", "NotFoundException") or message.startswith("Metadata file for version"):
        return TableGoneError(
            f"{name} is gone: it was dropped or its files were removed. Start again to create it anew. ({message})"
        )
    if "UUID does not match" in message:
        return _replaced(name)
    if kind in (*_REFUSALS, "ValidationException"):
        return TableError(f"{name}: {message}")
    return TemporaryError(f"{name}: catalog {name.split('.')[0]} failed: {kind}: {_with_cause(error)}")


def wanted_columns(table: TableSection, path: str, types: Mapping[str, str] | None = None) -> T.StructType | None:
    """The stored `columns` and metadata columns as a Spark schema. Key columns can't be null. None if the configuration
    names no columns and `types` has none.

    :param types: Spark SQL types of the columns, used if the configuration names no columns.
    :raises ConfigError: a type is invalid, or a key can't have it.
    """
    if table.columns is not None:
        types = {name: column.type for name, column in table.columns.items() if column.stored}
    if types is None:
        return None
    fields = []
    for name, text in types.items():
        fields.append(T.StructField(name, parse_type(text, f"{path}.columns.{name}"), nullable=name not in table.key))
    fields += [T.StructField(name, from_arrow_type(METADATA[name])) for name in table.metadata]
    advice = "" if table.columns is not None else " (columns: say the types of all columns)"
    for name in table.key:
        if name not in types:
            raise ConfigError(f"{path}.key: there is no column {name!r}. The columns are: {', '.join(types)}.")
        dtype = T.StructType(fields)[name].dataType
        if isinstance(dtype, T.FloatType | T.DoubleType):
            raise ConfigError(
                f"{path}.key: {name} is a {types[name]}; Iceberg allows no floating-point keys. Use decimal or string"
                f"{advice}."
            )
        if not isinstance(dtype, T.AtomicType):
            raise ConfigError(
                f"{path}.key: {name} is a {types[name]}; Iceberg allows no keys that have parts. Use string{advice}."
            )
    return T.StructType(fields)


def parse_type(text: str, path: str) -> T.DataType:
    """Parse a Spark SQL type such as `decimal(12,2)`.

    :raises ConfigError: the text isn't such a type.
    """
    from pyspark.errors import PySparkException

    try:
        return parse_ddl(text)
    except (PySparkException, ValueError):
        raise ConfigError(
            f"{path}: got {text!r}, expected a Spark SQL type such as bigint, string, decimal(12,2) or timestamp"
        ) from None
