"""The tables of all catalogs in the session, whatever their format."""

from collections.abc import Mapping

from pyspark.sql import SparkSession
from pyspark.sql import types as T

from sink.config import Config, TableSection
from sink.targets.base import Target, TargetCatalogs
from sink.targets.delta.catalog import DeltaCatalogs
from sink.targets.iceberg.catalog import IcebergCatalogs


class Catalogs:
    """Tables by `catalog.namespace.table`. The catalog's type in the configuration tells the format."""

    def __init__(self, spark: SparkSession, config: Config) -> None:
        self.spark = spark
        self._config = config

    def load(self, name: str) -> Target | None:
        """The table, or None if it doesn't exist.

        :raises TemporaryError: the catalog did not answer.
        """
        return self._of(name).load(name)

    def create(self, section: TableSection, columns: T.StructType, properties: Mapping[str, str], path: str) -> Target:
        """See `TargetCatalogs.create`."""
        return self._of(section.target).create(section, columns, properties, path)

    def create_log(self, name: str, columns: T.StructType, writer: str) -> Target:
        """See `TargetCatalogs.create_log`."""
        return self._of(name).create_log(name, columns, writer)

    def check_new(self, section: TableSection, columns: T.StructType, path: str) -> None:
        self._of(section.target).check_new(section, columns, path)

    def storage_properties(self, name: str) -> dict[str, str]:
        """See `TargetCatalogs.storage_properties`."""
        return self._of(name).storage_properties(self._config, name)

    def _of(self, name: str) -> TargetCatalogs:
        if self._config.format_of(name) == "delta":
            return DeltaCatalogs(self.spark, self._config)
        return IcebergCatalogs(self.spark)
