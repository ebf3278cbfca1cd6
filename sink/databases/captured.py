"""Which tables of its database Debezium's connector takes, by its own properties: before there is a message of them."""

import re
from collections.abc import Callable
from contextlib import closing

from pyspark.sql import SparkSession

from sink.config import Config
from sink.databases.kinds import database_of
from sink.databases.mysql import MySQL
from sink.databases.mysql_catalog import list_tables
from sink.databases.postgres_connection import PostgresConnection
from sink.errors import ConfigError

_TABLES = """
SELECT n.nspname, c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relpersistence = 'p' AND c.relkind IN {kinds} AND n.nspname NOT IN ('pg_catalog', 'information_schema')
"""
_NAMING = ("transforms", "topic.delimiter", "topic.naming.strategy")
"""Properties that give topics other names."""
_OTHER_CHARACTERS = re.compile(r"[^a-zA-Z0-9._-]")


def captured_topics(spark: SparkSession, config: Config) -> set[str] | None:
    """The topics of all tables that the connector takes. None if they are named by other rules than Debezium's own.

    :raises ConfigError: the database refuses the user, or a list of the connector is none of regular expressions.
    :raises TemporaryError: the database doesn't answer.
    """
    connector, database = config.source.connector, config.source.database
    if database is None or any(name in connector for name in _NAMING):
        return None
    if database_of(database.url) is MySQL:
        tables, is_schema = list_tables(spark, database), _filter(connector, "database")
    else:
        # without the property, changes of a partitioned table are those of its partitions
        by_root = connector.get("publish.via.partition.root", "false") == "true"
        kinds = "('r', 'p') AND NOT c.relispartition" if by_root else "('r')"
        with closing(PostgresConnection(database)) as postgres:
            tables = [(str(schema), str(table)) for schema, table in postgres.rows(_TABLES.format(kinds=kinds))]
        is_schema = _filter(connector, "schema")
    is_table = _filter(connector, "table")
    names = [f"{schema}.{table}" for schema, table in tables if is_schema(schema) and is_table(f"{schema}.{table}")]
    return {_OTHER_CHARACTERS.sub("_", f"{connector['topic.prefix']}.{name}") for name in names}


def _filter(connector: dict[str, str], what: str) -> Callable[[str], bool]:
    """Whether `schema.include.list` and `schema.exclude.list`, or those of databases or tables, take a name."""
    lists = [connector.get(f"{what}.{kind}.list") for kind in ("include", "exclude")]
    try:
        included, excluded = [
            None if text is None else [re.compile(part.strip(), re.IGNORECASE) for part in re.split(r"(?<!\\),", text)]
            for text in lists
        ]
    except re.error as error:
        raise ConfigError(
            f"source.connector: {what}.include.list or {what}.exclude.list is no list of regular expressions: {error}."
        ) from None

    def takes(name: str) -> bool:
        if included is not None:
            return any(pattern.fullmatch(name) for pattern in included)
        return not any(pattern.fullmatch(name) for pattern in excluded or ())

    return takes
