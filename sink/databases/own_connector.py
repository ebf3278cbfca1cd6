"""Debezium's connector, if the sink runs it itself, and a table is loaded beside it."""

import logging
import time
from collections.abc import Callable
from contextlib import closing

from pyspark.sql import SparkSession

from sink.config import Config, DatabaseSection, TableSection
from sink.databases.captured import captured_topics
from sink.databases.database import Connection
from sink.databases.kinds import database_of
from sink.databases.mysql import MySQL, refuse_missing
from sink.databases.postgres_catalog import literal, published_query, quoted_table
from sink.databases.postgres_connection import PostgresConnection
from sink.errors import ConfigError, TemporaryError
from sink.sources.engine import Engine
from sink.spark.jdbc import MARIADB

log = logging.getLogger("rowdelta")

_MARKS_SINCE = 140_000
"""Version of the server whose log takes marks."""
_REMEMBERS_SINCE = {14: 18, 15: 13, 16: 9, 17: 5}
"""Major version of a server that once forgot a publication's new table -> the minor one that doesn't."""

_LOOK_SECONDS = 0.5
_PATIENT_LOOKS = 4
_NEXT_TRANSACTION = "SELECT pg_current_xact_id()::text"
"""All that run have lower numbers. A snapshot's `xmax` may be below theirs, too."""
_HAVE_ENDED = "SELECT pg_snapshot_xmin(pg_current_snapshot()) > '{}'::xid8"
_SERVER = "SELECT pg_is_in_recovery(), current_setting('server_version_num')::int8"


class OwnConnector:
    """The connector of a table (`sink.table.loading.Connector`).

    :param engine: has caught up once.
    :param table: in the database, as `schema.table`.
    :param remembered: tables that the engine gets from a server that forgets some. It grows.
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
        remembered: set[str],
        stopping: Callable[[], bool],
    ) -> None:
        self._spark = spark
        self._engine = engine
        self._config = config
        self._database = database
        self._section = section
        self._table = table
        self._remembered = remembered
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
            # a log has each transaction as a whole when it is committed
            with closing(Connection(self._spark, *MARIADB, self._database)) as mysql:
                refuse_missing(mysql, self._table)
            return
        with closing(PostgresConnection(self._database)) as connection:
            ((is_replica, version),) = connection.rows(_SERVER)
            if is_replica or version < _MARKS_SINCE:
                raise ConfigError(
                    f"source.connector: {self._section.target} can be loaded from the primary of Postgres 14 or newer. "
                    "Leave load out for the connector's own snapshot."
                )
            publication = self._config.source.connector.get("publication.name", "dbz_publication")
            if self._config.source.connector.get("plugin.name", "pgoutput") != "pgoutput":
                return  # others have none
            self._have_published(connection, publication)
            if version % 10_000 < _REMEMBERS_SINCE.get(version // 10_000, 0) and self._table not in self._remembered:
                self._have_remembered(connection, publication)

    def wait(self, stopping: Callable[[], bool]) -> bool:
        return self._engine.catch_up(stopping)

    def _have_published(self, connection: PostgresConnection, name: str) -> None:
        """See to it that the publication has the table. The engine looks for new ones only when it starts."""
        query = published_query(quoted_table(self._table), [name])
        if connection.rows(query) == [("itself",)]:
            return
        self._restart()
        if connection.rows(query) == [("itself",)]:
            return
        raise ConfigError(
            f"{self._section.target}: the publication {name} doesn't have {self._table} with all its rows, columns "
            "and operations, so that changes would be lost. Add it (ALTER PUBLICATION), or let the connector do it: "
            "publication.autocreate.mode: filtered."
        )

    def _have_remembered(self, connection: PostgresConnection, name: str) -> None:
        """See to it that the server sends changes of all tables that the publication has now. It takes one for
        unpublished, as long as the engine reads, after a transaction that changed it before it was added. So the engine
        reads anew when these have ended, from a place after them.
        """
        tables = connection.rows(
            f"SELECT schemaname, tablename FROM pg_publication_tables WHERE pubname = {literal(name)}"
        )
        ((following,),) = connection.rows(_NEXT_TRANSACTION)
        looks = 0
        while connection.rows(_HAVE_ENDED.format(following)) != [(True,)]:
            if self._stopping():
                raise self._stopped()
            if looks == _PATIENT_LOOKS:
                log.warning(
                    "%s: its load begins when all transactions that run now have ended, since this version of Postgres "
                    "may forget that a publication has got a table. SELECT pid FROM pg_stat_activity WHERE backend_xid "
                    "IS NOT NULL tells which they are. Later minor versions don't forget it.",
                    self._section.target,
                )
            looks += 1
            time.sleep(_LOOK_SECONDS)
        for _ in range(2):  # Debezium goes on after the transaction before the last one that it has seen
            self._catch_up()
        self._restart()
        self._remembered.update(f"{schema}.{table}" for schema, table in tables)

    def _restart(self) -> None:
        log.info("%s: Debezium's engine is started again, for %s", self._section.target, self._table)
        self._engine.restart()
        self._catch_up()

    def _catch_up(self) -> None:
        if not self._engine.catch_up(self._stopping):
            raise self._stopped()

    def _stopped(self) -> TemporaryError:
        return TemporaryError(f"{self._section.target}: stopped before its load began. Run again.")
