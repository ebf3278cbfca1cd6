"""Finds the tables of a MySQL or MariaDB for `rowdelta init`. It is read by JDBC, so this starts a JVM."""

from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

from pyspark.sql import SparkSession

from changelog.recognition import Recognized
from sink.commands.database_discovery import OPTION, chosen, named_otherwise
from sink.commands.discovery import Found, LeftOut
from sink.config import Config, DatabaseSection
from sink.databases.database import Connection
from sink.databases.mysql_catalog import list_tables, missing_in_log
from sink.databases.mysql_table import MySQLTable
from sink.databases.read_columns import Spelling
from sink.spark import session
from sink.spark.jdbc import MARIADB

_PRIVILEGES = """
SELECT privilege_type FROM information_schema.user_privileges WHERE REPLACE(grantee, CHAR(39), '') = CURRENT_USER()
"""
_NEEDED = ("REPLICATION SLAVE", "REPLICATION CLIENT", "RELOAD", "PROCESS")
_OTHER_NAMES = {"BINLOG MONITOR": "REPLICATION CLIENT"}


def tables(
    connector: Mapping[str, str], section: DatabaseSection, database: str, prefix: str, pattern: str
) -> tuple[list[Found | LeftOut], list[str]]:
    """Find out which tables of a database can be mirrored.

    :param connector: properties that say where the database is.
    :param database: its name.
    :param prefix: of topics.
    :param pattern: regular expression. Only tables `database.table` that it matches as a whole are looked at.
    :return: what was found, by topics; what the database lacks, in words.
    :raises ConfigError: the database refuses the user, or it has no such table.
    :raises TemporaryError: it doesn't answer.
    """
    spark = session.start(_job(connector, section), short=True)
    with session.stopping(spark):
        existing = [f"{name}.{table}" for name, table in list_tables(spark, section, OPTION) if name == database]
        names = chosen(existing, pattern)
        results = [_table(spark, section, prefix, name) for name in names]
        with closing(Connection(spark, *MARIADB, section, OPTION)) as connection:
            return results, list(_lacking(connection, database))


def _table(spark: SparkSession, section: DatabaseSection, prefix: str, name: str) -> Found | LeftOut:
    topic = f"{prefix}.{name}"
    if named_otherwise(name):
        return LeftOut(topic, "its topic has another name, which the entry's verify.table must say")
    with closing(MySQLTable(spark, section, name, OPTION)) as table:
        key, unread = table.key(), [c.name for c in table.columns() if c.read((), Spelling()) is None]
    if not key:
        return LeftOut(topic, "it has no primary key, by which rows would be found")
    return Found(topic, Recognized("debezium-json", has_schema=True), key, 0, key_is_stated=True, excluded=unread)


def _lacking(connection: Connection, database: str) -> Iterator[str]:
    yield from missing_in_log(connection, database)
    rights = {str(right) for (right,) in connection.rows(_PRIVILEGES)}
    rights |= {_OTHER_NAMES[right] for right in rights & _OTHER_NAMES.keys()}
    missing = [right for right in _NEEDED if right not in rights]
    if missing:
        yield f"the user lacks rights, unless a role has them: GRANT {', '.join(missing)} ON *.* TO …"


def _job(connector: Mapping[str, str], section: DatabaseSection) -> Config:
    """A job whose session has the driver."""
    folder = Path.cwd()
    return Config.model_validate(
        {
            "sink": {"id": "init", "checkpoint": str(folder / "state")},
            "source": {
                "type": "debezium",
                "buffer": str(folder / "buffer"),
                "connector": {**connector, "topic.prefix": "init"},
                "database": section.model_dump(exclude_none=True),
            },
            "load": {"auto": True},
            "catalogs": {"lake": {"type": "hadoop", "warehouse": str(folder / "warehouse")}},
            "tables": [{"source": "init.init.init", "target": "lake.init.init"}],
            "spark": {"spark.master": "local[1]"},
        }
    )
