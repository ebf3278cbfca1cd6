"""The tables of all catalogs in the session, whatever their format."""

from collections.abc import Mapping
from typing import Protocol

from pyspark.sql import SparkSession
from pyspark.sql import types as T

from sink.config import Config, TableSection
from sink.errors import TableError
from sink.targets.capabilities import Format
from sink.targets.own_state import creation_properties
from sink.targets.seam import Table


class TargetCatalogs(Protocol):
    """The tables of one format in the session's catalogs, by `catalog.namespace.table`."""

    def load(self, name: str) -> Table | None:
        """The table, or None if it doesn't exist.

        :raises TemporaryError: the catalog did not answer.
        """

    def create(self, section: TableSection, columns: T.StructType, properties: Mapping[str, str], path: str) -> Table:
        """Create a table, or take the one that somebody else has just created.

        :param properties: properties of the table and of the sink's state. They replace the sink's defaults.
        :param path: the table's place in the configuration.
        :raises ConfigError: see `check_new`.
        :raises TableError: the catalog refuses it.
        """

    def create_log(self, name: str, columns: T.StructType, properties: Mapping[str, str], writer: str) -> Table:
        """Create a table without a key that only grows.

        :param writer: a column. Appends with different values in it don't conflict (`ChangeSet.conflicts_with`).
        """

    def check_new(self, section: TableSection, columns: T.StructType, path: str) -> None:
        """Check that a table with these columns could be created as its section of the configuration says.

        :param path: the table's place in the configuration.
        :raises ConfigError: it can't.
        """

    def storage_properties(self, config: Config, name: str) -> dict[str, str]:
        """By what the catalog of a table reaches files that are no table's, such as the key index."""


class Catalogs:
    """Tables by `catalog.namespace.table`. The catalog's type in the configuration tells the format."""

    def __init__(self, spark: SparkSession, config: Config) -> None:
        self.spark = spark
        self._config = config
        self._formats: dict[Format, TargetCatalogs] = {}

    def load(self, name: str) -> Table | None:
        """See `TargetCatalogs.load`."""
        return self._of(name).load(name)

    def existing(self, name: str) -> Table:
        """:raises TableError: there is no such table."""
        table = self.load(name)
        if table is None:
            raise TableError(f"{name} does not exist. rowdelta run creates it, and rowdelta status lists the tables.")
        return table

    def create(self, section: TableSection, columns: T.StructType, properties: Mapping[str, str], path: str) -> Table:
        """See `TargetCatalogs.create`."""
        return self._of(section.target).create(section, columns, properties, path)

    def create_log(self, name: str, columns: T.StructType, writer: str) -> Table:
        """See `TargetCatalogs.create_log`."""
        return self._of(name).create_log(name, columns, creation_properties(self._config), writer)

    def check_new(self, section: TableSection, columns: T.StructType, path: str) -> None:
        self._of(section.target).check_new(section, columns, path)

    def storage_properties(self, name: str) -> dict[str, str]:
        """See `TargetCatalogs.storage_properties`."""
        return self._of(name).storage_properties(self._config, name)

    def _of(self, name: str) -> TargetCatalogs:
        format_ = self._config.format_of(name)
        if format_ not in self._formats:
            self._formats[format_] = _catalogs(format_, self.spark, self._config)
        return self._formats[format_]


def _catalogs(format_: Format, spark: SparkSession, config: Config) -> TargetCatalogs:
    """Only the formats that the configuration has are imported."""
    if format_ == "delta":
        from sink.targets.delta.catalog import DeltaCatalogs

        return DeltaCatalogs(spark, config)
    from sink.targets.iceberg.catalog import IcebergCatalogs

    return IcebergCatalogs(spark)
