"""The tables of all catalogs in the session, whatever their format."""

from collections.abc import Mapping

from pyspark.sql import SparkSession
from pyspark.sql import types as T

from sink.config import Config, TableSection
from sink.targets.capabilities import Format
from sink.targets.loading import TargetCatalogs
from sink.targets.own_state import creation_properties
from sink.targets.seam import Table


class Catalogs:
    """Tables by `catalog.namespace.table`. The catalog's type in the configuration tells the format."""

    def __init__(self, spark: SparkSession, config: Config) -> None:
        self.spark = spark
        self._config = config
        self._formats: dict[Format, TargetCatalogs] = {}

    def load(self, name: str) -> Table | None:
        """The table, or None if it doesn't exist.

        :raises TemporaryError: the catalog did not answer.
        """
        return self._of(name).load(name)

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
