"""How tables are found and made. Each format has its own way."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from sink.targets.seam import Table, TableView

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql import types as T

    from sink.config import Config, TableSection


class Tables(Protocol):
    """Tables by `catalog.namespace.table`, and the session that reads them."""

    spark: "SparkSession"

    def load(self, name: str) -> TableView | None:
        """The table, or None if it doesn't exist.

        :raises TemporaryError: the catalog did not answer.
        """

    def check_new(self, section: "TableSection", columns: "T.StructType", path: str) -> None:
        """Check that a table with these columns could be created as its section of the configuration says.

        :param path: the table's place in the configuration.
        :raises ConfigError: it can't.
        """


class TargetCatalogs(Protocol):
    """The tables of one format in the session's catalogs, by `catalog.namespace.table`."""

    def load(self, name: str) -> Table | None: ...

    def create(
        self, section: "TableSection", columns: "T.StructType", properties: Mapping[str, str], path: str
    ) -> Table:
        """Create a table, or take the one that somebody else has just created.

        :param properties: properties of the table and of the sink's state. They replace the sink's defaults.
        :param path: the table's place in the configuration.
        :raises ConfigError: see `Tables.check_new`.
        :raises TableError: the catalog refuses it.
        """

    def create_log(self, name: str, columns: "T.StructType", properties: Mapping[str, str], writer: str) -> Table:
        """Create a table without a key that only grows.

        :param writer: a column. Appends with different values in it don't conflict (`ChangeSet.conflicts_with`).
        """

    def check_new(self, section: "TableSection", columns: "T.StructType", path: str) -> None: ...

    def storage_properties(self, config: "Config", name: str) -> dict[str, str]:
        """By what the catalog of a table reaches files that are no table's, such as the key index."""
