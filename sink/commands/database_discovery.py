"""Finds the tables of a Postgres for `rowdelta init`. It needs no JVM."""

import re
from collections.abc import Sequence
from contextlib import closing

from changelog.recognition import Recognized
from sink.commands.discovery import Found, LeftOut
from sink.config import DatabaseSection
from sink.databases.postgres_catalog import PostgresColumn, columns_query, key_query, quoted_table
from sink.databases.postgres_connection import PostgresConnection
from sink.databases.postgres_values import read_column
from sink.databases.read_columns import Spelling
from sink.errors import ConfigError

OPTION = "--database"

_TABLES = """
SELECT n.nspname || '.' || c.relname, c.relkind::text, c.relpersistence::text
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition AND c.relpersistence <> 't'
AND n.nspname NOT IN ('pg_catalog', 'information_schema') ORDER BY 1
"""
_SERVER = """
SELECT current_setting('wal_level'), current_setting('server_version_num')::int8, pg_is_in_recovery(),
       EXISTS (SELECT FROM pg_roles WHERE rolname = current_user AND (rolsuper OR rolreplication))
"""
_FIRST_VERSION = 140_000


def tables(section: DatabaseSection, prefix: str, pattern: str) -> tuple[list[Found | LeftOut], list[str], bool]:
    """Find out which tables of a database can be mirrored.

    :param prefix: of topics.
    :param pattern: regular expression. Only tables `schema.table` that it matches as a whole are looked at.
    :return: what was found, by topics; what the database lacks, in words; whether a table is partitioned.
    :raises ConfigError: the database refuses the user, or it has no such table.
    :raises TemporaryError: it doesn't answer.
    """
    with closing(PostgresConnection(section, OPTION)) as connection:
        existing = [tuple(map(str, row)) for row in connection.rows(_TABLES)]
        names = set(chosen([name for name, *_ in existing], pattern))
        rows = [row for row in existing if row[0] in names]
        results = [_table(connection, prefix, name, persistence) for name, _, persistence in rows]
        ((level, version, is_replica, replicates),) = connection.rows(_SERVER)
    partitioned = {f"{prefix}.{name}" for name, kind, _ in rows if kind == "p"}
    return (
        results,
        list(_lacking(level, version, is_replica, replicates)),
        any(isinstance(each, Found) and each.name in partitioned for each in results),
    )


def chosen(existing: Sequence[str], pattern: str) -> list[str]:
    """The tables that a pattern matches.

    :raises ConfigError: it matches none.
    """
    found = [name for name in existing if re.fullmatch(pattern, name)]
    if not found:
        there = ", ".join(existing[:10]) or "none"
        raise ConfigError(f"the database has no table that {pattern!r} matches; there are {there}. Correct --tables.")
    return found


def named_otherwise(table: str) -> bool:
    """Whether the topic of a table isn't named as the table."""
    return table.count(".") > 1 or not re.fullmatch(r"[\w.-]+", table, re.ASCII)


def _table(connection: PostgresConnection, prefix: str, name: str, persistence: str) -> Found | LeftOut:
    topic, quoted = f"{prefix}.{name}", quoted_table(name)
    if named_otherwise(name):
        return LeftOut(topic, "its topic has another name, which the entry's verify.table must say")
    if persistence != "p":
        return LeftOut(topic, "it is unlogged")
    key = tuple(str(column) for (column,) in connection.rows(key_query(quoted)))
    if not key:
        return LeftOut(
            topic, "it has no primary key: while a publication has it, the database refuses its UPDATEs and DELETEs"
        )
    columns = [PostgresColumn.of(row) for row in connection.rows(columns_query(quoted))]
    unread = [c.name for c in columns if not c.is_generated and read_column(c, (), Spelling()) is None]
    return Found(topic, Recognized("debezium-json", has_schema=True), key, 0, key_is_stated=True, excluded=unread)


def _lacking(level: str, version: int, is_replica: bool, replicates: bool) -> Sequence[str]:
    lacks = {
        f"wal_level is {level}. As a superuser: ALTER SYSTEM SET wal_level = logical, and restart it": level
        != "logical",
        "it is a replica. Name the primary": is_replica,
        "it is older than Postgres 14": version < _FIRST_VERSION,
        "the user may not replicate. As a superuser: ALTER ROLE … REPLICATION": not replicates,
    }
    return [text for text, holds in lacks.items() if holds]
