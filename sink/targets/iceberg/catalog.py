"""Iceberg's tables in the catalogs of the Spark session: found, created, and how their files are reached."""

import logging
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import ClassVar

from py4j.java_gateway import JavaObject
from pyspark.sql import SparkSession
from pyspark.sql import types as T

from sink.config import Config, PartitionField, TableSection
from sink.errors import ConfigError, TemporaryError
from sink.redaction import masked
from sink.spark.java_errors import JAVA_ERRORS, java_class, java_message
from sink.targets.iceberg.errors import NOT_AUTHORIZED, REFUSALS, table_error, with_cause
from sink.targets.iceberg.table import IcebergTable

log = logging.getLogger("rowdelta")

_DEFAULTS = {
    "format-version": "2",
    # each commit adds a metadata file, and Iceberg keeps them for ever by default
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "100",
}
"""Default properties of new tables."""
_LOGIN_PAUSE = 300.0
"""Seconds after a login in which the sink doesn't log in again. Each login leaves a client that Iceberg keeps."""


class IcebergCatalogs:
    """Tables of the session's Iceberg catalogs by `catalog.namespace.table`."""

    # by catalog, for the objects of all tables: one that doesn't answer hinders no other, and a login serves all
    _logins: ClassVar[defaultdict[str, Lock]] = defaultdict(Lock)
    _next_login: ClassVar[dict[str, float]] = {}

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
            return self._opened(name, self._loaded(name, catalog, identifier))
        except JAVA_ERRORS as error:
            if java_class(error) in ("NoSuchTableException", "NoSuchNamespaceException"):
                return None
            raise table_error(name, error) from None

    def create(
        self, section: TableSection, columns: T.StructType, properties: Mapping[str, str], path: str
    ) -> IcebergTable:
        """Create a table with the key as identifier fields.

        :param properties: properties of the table. They replace our defaults, and so do the catalog's
            `table-default.…` properties.
        :param path: the table's place in the configuration.
        :raises ConfigError: see `partition_spec`.
        """
        spec = self.partition_spec(columns, section.partition_fields, path)
        identifiers = section.key if section.history is None else []  # each version of a row has its key
        return self.create_table(section.target, columns, identifiers, properties, spec)

    def create_log(self, name: str, columns: T.StructType, properties: Mapping[str, str], writer: str) -> IcebergTable:
        # When several writers commit at the same time, Iceberg tells their files apart by the bounds of the column. By
        # default these have only the first 16 characters of a text.
        return self.create_table(name, columns, [], {**properties, f"write.metadata.metrics.column.{writer}": "full"})

    def check_new(self, section: TableSection, columns: T.StructType, path: str) -> None:
        if section.partition_fields:
            self.partition_spec(columns, section.partition_fields, path)

    def create_table(
        self,
        name: str,
        columns: T.StructType,
        key: Sequence[str],
        properties: Mapping[str, str],
        partition_spec: JavaObject | None = None,
    ) -> IcebergTable:
        """Create a table with `key` as identifier fields."""
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
        return self._opened(name, table)

    def _opened(self, name: str, table: JavaObject) -> IcebergTable:
        def load() -> JavaObject:
            catalog, identifier = self._resolve(name)
            # without this, Iceberg keeps the old credentials if a REST catalog answers "not modified"
            catalog.invalidateTable(identifier)
            return self._loaded(name, catalog, identifier)

        return IcebergTable(self.spark, name, table, load)

    def _loaded(self, name: str, catalog: JavaObject, identifier: JavaObject) -> JavaObject:
        """Load a table; with a new token if a REST catalog doesn't accept the one that we have. Iceberg renews tokens
        only by the clock: it knows of none that was revoked, and if the catalog is down when a token is due, it tries a
        few times and then never again.
        """
        try:
            return catalog.loadTable(identifier)
        except JAVA_ERRORS as error:
            if java_class(error) != NOT_AUTHORIZED or not self._has_new_login(name.split(".")[0], catalog):
                raise
        return self._resolve(name)[0].loadTable(identifier)

    def _has_new_login(self, name: str, refused: JavaObject) -> bool:
        """Let Spark's catalog make its Iceberg catalog anew, unless another table has had that done. Not again for some
        time: if the new token isn't accepted either, it isn't the token's fault.

        :param refused: the Iceberg catalog. Tables that were loaded by it still use it, so it isn't closed.
        """
        state, prefix = self.spark._jsparkSession.sessionState(), f"spark.sql.catalog.{name}."
        plugin, options = state.catalogManager().catalog(name), self._jvm.java.util.HashMap()
        for key, value in dict(state.conf().settings()).items():
            if key.startswith(prefix):
                options.put(key.removeprefix(prefix), value)
        with self._logins[name]:
            if not plugin.icebergCatalog().equals(refused):
                return True
            if time.monotonic() < self._next_login.get(name, 0.0):
                return False
            self._next_login[name] = time.monotonic() + _LOGIN_PAUSE
            plugin.initialize(name, self._jvm.org.apache.spark.sql.util.CaseInsensitiveStringMap(options))
            log.info("catalog %s did not accept the token any more; logged in again", name)
            return True

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
        kind, message = java_class(error), with_cause(error)
        if kind in (*REFUSALS, "ClassNotFoundException", "CatalogNotFoundException"):
            return ConfigError(f"catalogs.{catalog}: it can't be opened: {message}. Correct its properties.")
        prefix = f"spark.sql.catalog.{catalog}"
        uri = self.spark.conf.get(f"{prefix}.uri", None)
        if uri is None and self.spark.conf.get(f"{prefix}.type", None) == "rest":
            return ConfigError(f"catalogs.{catalog}: a catalog of type rest needs its address. Add uri.")
        at = "" if uri is None else f" at {masked(uri)}"
        return TemporaryError(
            f"catalog {catalog}{at} can't be opened: {message}. Nothing was applied; run again once it answers, or "
            f"correct catalogs.{catalog}."
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
