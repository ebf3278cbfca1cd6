"""What the database's catalog tells of a table before there are messages of it (`sink.table.inference.Sample`)."""

from collections.abc import Callable, Mapping
from contextlib import closing
from functools import cached_property

from changelog.observed_types import observed_type
from sink.config import Config, DatabaseSection, TableSection
from sink.databases.postgres_catalog import PostgresColumn, columns_query, key_query, quoted_table
from sink.databases.postgres_connection import PostgresConnection
from sink.databases.postgres_values import Spelling, read_column
from sink.errors import ConfigError
from sink.redaction import masked
from sink.table.inference import NOT_NULL


class DatabaseSample:
    """A table of Postgres, as its messages would tell of it.

    :param name: tells the table, as `schema.table`, if it is asked for anything.
    """

    is_empty = False

    def __init__(self, config: Config, database: DatabaseSection, name: Callable[[], str], table: TableSection) -> None:
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
            read = read_column(column, (), spelling)
            if read is not None and column.name not in self._table.exclude:
                types[column.name] = observed_type(read.wire) + (NOT_NULL if column.is_required else "")
        return types

    def message_keys(self) -> frozenset[tuple[str, ...]]:
        """See `columns` for errors."""
        return frozenset([self._read[1]])

    def source_tables(self) -> Mapping[str, int]:
        return {}

    @cached_property
    def _read(self) -> tuple[list[PostgresColumn], tuple[str, ...]]:
        name = self._name()
        table = quoted_table(name)
        with closing(PostgresConnection(self._database)) as connection:
            columns = [PostgresColumn.of(row) for row in connection.rows(columns_query(table))]
            key = tuple(str(name) for (name,) in connection.rows(key_query(table)))
        if not columns:
            raise ConfigError(
                f"source.database: there is no table {name} of {masked(self._database.url)}. Correct "
                "verify.table or source.database.url."
            )
        return columns, key
