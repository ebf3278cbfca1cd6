"""What the database's catalog tells of a table before there are messages of it (`sink.table.inference.Sample`)."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import cached_property

from pyspark.sql import SparkSession

from changelog.observed_types import observed_type
from sink.config import Config, DatabaseSection, TableSection
from sink.databases.catalog_table import CatalogColumn
from sink.databases.kinds import open_table
from sink.databases.read_columns import Spelling
from sink.errors import ConfigError
from sink.redaction import masked
from sink.table.inference import NOT_NULL


class DatabaseSample:
    """A table of a database, as its messages would tell of it.

    :param name: tells the table, as `schema.table`, if it is asked for anything.
    """

    is_empty = False

    def __init__(
        self,
        spark: SparkSession,
        config: Config,
        database: DatabaseSection,
        name: Callable[[], str],
        table: TableSection,
    ) -> None:
        self._spark = spark
        self._config = config
        self._database = database
        self._name = name
        self._table = table

    def columns(self) -> dict[str, str]:
        """:raises ConfigError: there is no such table, or the database refuses the user.
        :raises TemporaryError: it doesn't answer.
        """
        spelling, types = Spelling.of(self._config.source.format, self._config.source.format_options), dict[str, str]()
        for column in self._read[0]:
            read = column.read((), spelling)
            if read is not None and column.is_sent and column.name not in self._table.exclude:
                types[column.name] = observed_type(read.wire) + (NOT_NULL if column.is_required else "")
        return types

    def message_keys(self) -> frozenset[tuple[str, ...]]:
        """See `columns` for errors."""
        return frozenset([self._read[1]])

    def source_tables(self) -> Mapping[str, int]:
        return {}

    @cached_property
    def _read(self) -> tuple[Sequence[CatalogColumn], tuple[str, ...]]:
        name = self._name()
        with closing(open_table(self._spark, self._database, name, "source.database")) as table:
            columns, key = table.columns(), table.key()
        if not columns:
            raise ConfigError(
                f"source.database: there is no table {name} of {masked(self._database.url)}. Correct "
                "verify.table or source.database.url."
            )
        return columns, key
