"""Debezium's connector, if the sink runs it itself, and a table is loaded beside it."""

import logging
from collections.abc import Callable
from contextlib import closing

from pyspark.sql import SparkSession

from sink.config import Config, DatabaseSection, TableSection
from sink.databases.captured import captured_topics
from sink.databases.kinds import database_of
from sink.databases.mysql import MySQL
from sink.databases.postgres_catalog import published_query, quoted_table
from sink.databases.postgres_connection import PostgresConnection
from sink.errors import ConfigError, TemporaryError
from sink.sources.engine import Engine

log = logging.getLogger("rowdelta")

_MARKS_SINCE = 140_000
"""Version of the server whose log takes marks."""

_SERVER = "SELECT pg_is_in_recovery(), current_setting('server_version_num')::int8"


class OwnConnector:
    """The connector of a table (`sink.table.loading.Connector`).

    :param engine: has caught up once.
    :param table: in the database, as `schema.table`.
    :param stopping: whether a load that hasn't begun is not to begin.
    """

    def __init__(
        self,
        spark: SparkSession,
        engine: Engine,
        config: Config,
        database: DatabaseSection,
        section: TableSection,
        table: str,
        stopping: Callable[[], bool],
    ) -> None:
        self._spark = spark
        self._engine = engine
        self._config = config
        self._database = database
        self._section = section
        self._table = table
        self._stopping = stopping

    def check(self) -> None:
        """What transactions change that begin from now on gets into the buffer, if the engine reads the log, and its
        publication has the table.

        :raises ConfigError: the connector doesn't take the table.
        :raises TemporaryError: it was stopped before that.
        """
        topics = captured_topics(self._spark, self._config)
        if topics is not None and not topics >= set(self._section.topics):
            raise ConfigError(
                f"{self._section.target}: the connector has no table whose topic is {self._section.source}, so that "
                f"changes of {self._table} would be lost. Topics are <topic.prefix>.<schema or database>.<table>, of "
                "tables that source.connector.table.include.list takes."
            )
        if database_of(self._database.url) is MySQL:
            return  # its log has all tables, and each transaction as a whole when it is committed
        with closing(PostgresConnection(self._database)) as connection:
            ((is_replica, version),) = connection.rows(_SERVER)
            if is_replica or version < _MARKS_SINCE:
                raise ConfigError(
                    f"source.connector: {self._section.target} can be loaded from the primary of Postgres 14 or newer. "
                    "Leave load out for the connector's own snapshot."
                )
            self._have_published(connection)

    def wait(self, stopping: Callable[[], bool]) -> bool:
        return self._engine.catch_up(stopping)

    def _have_published(self, connection: PostgresConnection) -> None:
        """See to it that the publication has the table. The engine looks for new ones only when it starts."""
        connector = self._config.source.connector
        name = connector.get("publication.name", "dbz_publication")
        query = published_query(quoted_table(self._table), [name])
        if connector.get("plugin.name", "pgoutput") != "pgoutput" or connection.rows(query) == [("itself",)]:
            return
        log.info("%s: Debezium's engine is started again, for %s", self._section.target, self._table)
        self._engine.restart()
        if not self._engine.catch_up(self._stopping):
            raise self._stopped()
        if connection.rows(query) == [("itself",)]:
            return
        raise ConfigError(
            f"{self._section.target}: the publication {name} doesn't have {self._table} with all its rows, columns "
            "and operations, so that changes would be lost. Add it (ALTER PUBLICATION), or let the connector do it: "
            "publication.autocreate.mode: filtered."
        )

    def _stopped(self) -> TemporaryError:
        return TemporaryError(f"{self._section.target}: stopped before its load began. Run again.")
