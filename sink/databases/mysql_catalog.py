"""What the catalog of MySQL or MariaDB says of a table, and how names, values and columns are written in SQL."""

from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Self

from pyspark.sql import SparkSession

from sink.config import DatabaseSection
from sink.databases.conversion import Kind, Selected
from sink.databases.database import INTEGER, Connection
from sink.errors import RowdeltaError
from sink.spark.jdbc import MARIADB

_COLUMNS = """
SELECT column_name, data_type, column_type, numeric_precision, numeric_scale, datetime_precision, is_nullable
FROM information_schema.columns
WHERE table_schema = COALESCE(NULLIF(?, ''), DATABASE()) AND table_name = ? ORDER BY ordinal_position
"""
_TABLES = """
SELECT table_schema, table_name FROM information_schema.tables
WHERE table_type = 'BASE TABLE' AND table_schema NOT IN ('mysql', 'information_schema', 'performance_schema', 'sys')
ORDER BY table_schema, table_name
"""
_LOG = "SELECT @@log_bin, @@binlog_format, @@binlog_row_image, @@lower_case_table_names, DATABASE()"
_REPLICATES = "SELECT 1 FROM information_schema.processlist WHERE user = 'system user' AND command <> 'Daemon' LIMIT 1"
_WITHOUT_REPLICATED = """
SHOW GLOBAL VARIABLES WHERE variable_name IN ('log_slave_updates', 'log_replica_updates') AND value = 'OFF'
"""
_PADDED = frozenset(["char", "enum", "set"])
"""Spark adds blanks to texts of a fixed length, which the drivers say these have."""
_TEXTS = frozenset(["varchar", "tinytext", "text", "mediumtext", "longtext"])
_BYTES = frozenset(["binary", "varbinary", "tinyblob", "blob", "mediumblob", "longblob"])
_INTEGERS = frozenset(["tinyint", "smallint", "mediumint", "int", "bigint"])


def quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def literal(text: str) -> str:
    # whether a backslash escapes depends on the server's mode, so it is bytes
    return f"_utf8mb4 x'{text.encode().hex()}'"


@dataclass(frozen=True)
class MySQLColumn:
    """:param type: the type's name.
    :param declared: the type as in `CREATE TABLE`.
    :param digits: of fractions of a second.
    :param is_required: it is NOT NULL.
    """

    name: str
    type: str
    declared: str
    precision: int
    scale: int
    digits: int
    is_required: bool

    @classmethod
    def of(cls, row: Sequence[str | None]) -> Self:
        """:param row: of `_COLUMNS`."""
        name, type_name, declared, precision, scale, digits, nullable = row
        return cls(
            *(str(name), str(type_name), str(declared), int(precision or 0), int(scale or 0), int(digits or 0)),
            is_required=nullable == "NO",
        )

    @property
    def is_unsigned(self) -> bool:
        return "unsigned" in self.declared

    @property
    def bits(self) -> int:
        """How many bits a `bit` has."""
        return int(self.declared[4:-1])


def read_columns(connection: Connection, table: str) -> list[MySQLColumn]:
    """The columns of a table, in its order. Empty if there is no such table.

    :param table: as `database.table`, or without a database.
    """
    schema, _, name = table.rpartition(".")
    return [MySQLColumn.of(row) for row in connection.rows(_COLUMNS, schema, name)]


def list_tables(spark: SparkSession, section: DatabaseSection, path: str = "source.database") -> list[tuple[str, str]]:
    """Database and name of all tables that the user may see, but the server's own.

    :param path: the section's place in the configuration, for messages.
    """
    with closing(Connection(spark, *MARIADB, section, path)) as connection:
        return [(str(schema), str(name)) for schema, name in connection.rows(_TABLES)]


def binlog_place(connection: Connection) -> tuple[str, int] | None:
    """The file of the binlog and the place in it that come next. None if the user may not see it."""
    for name, place, *_ in _binlog_status(connection):
        return str(name), int(str(place))
    return None


def _binlog_status(connection: Connection) -> list[tuple[str | None, ...]]:
    """One row: file, place, binlog_do_db, binlog_ignore_db and more. None at all if the user may not see it."""
    for query in ("SHOW BINARY LOG STATUS", "SHOW MASTER STATUS"):
        with suppress(RowdeltaError):  # the server doesn't have it, or the user may not
            return connection.rows(query)
    return []


def missing_in_log(connection: Connection, database: str) -> Iterator[str]:
    """What the binlog lacks of changes of a database's tables, and the way out, as far as the user may see it.

    :param database: empty for that of the URL.
    """
    ((is_on, form, image, case, own),) = connection.rows(_LOG)
    database = database or str(own)
    if is_on != "1":
        yield "it has no binlog. Start it with log_bin"
    if (form, image) != ("ROW", "FULL"):
        yield f"binlog_format is {form} and binlog_row_image {image}. Write ROW and FULL into its configuration"
    for _, _, taken, ignored, *_ in _binlog_status(connection):
        texts = (taken or "", ignored or "", database)
        taken, ignored, name = texts if case == "0" else map(str.lower, texts)
        if taken and name not in taken.split(","):
            yield f"binlog_do_db has {taken} only. Add {database}"
        if not taken and name in ignored.split(","):
            yield f"binlog_ignore_db has {database}. Remove it"
    if connection.rows(_REPLICATES) and (found := connection.rows(_WITHOUT_REPLICATED)):
        yield f"it is a replica without {found[0][0]}. Turn that on, or name the server from which it gets its changes"


def select(column: MySQLColumn) -> Selected | None:
    """How a column is selected; None if its type is unknown. What is no date (0000-00-00) is as messages have it: NULL,
    but the beginning of 1970 in a timestamp and in columns that are NOT NULL.
    """
    name = quoted(column.name)
    kind = column.type
    if kind == "year":  # a connector reads 0 as 1900
        return Selected(f"CAST(IF({name} = 0, 1900, {name}) AS SIGNED)", Kind.INTEGER, key_text=INTEGER)
    if kind in _INTEGERS:
        if kind == "bigint" and column.is_unsigned:
            return Selected(f"CAST({name} AS CHAR)", Kind.UNSIGNED)
        return Selected(f"CAST({name} AS SIGNED)", Kind.INTEGER, key_text=INTEGER)
    if kind == "decimal":
        number = f"{name} + 0" if "zerofill" in column.declared else name
        return Selected(f"CAST({number} AS CHAR)", Kind.DECIMAL, column.scale)
    if kind in ("float", "double"):
        # as a text, a float would have 6 digits
        return Selected(f"({name} + 0e0)", Kind.FLOAT if kind == "float" else Kind.DOUBLE)
    if kind in _PADDED:
        return Selected(f"CAST({name} AS CHAR)", Kind.TEXT, key_text=".*")
    if kind in _TEXTS:
        return Selected(name, Kind.TEXT, key_text=".*")
    if kind in _BYTES:
        return Selected(name, Kind.BYTES)
    if kind == "bit":
        if column.bits == 1:
            return Selected(f"({name} + 0)", Kind.INTEGER)
        return Selected(f"LPAD(CONV(HEX({name} + 0), 16, 2), {column.bits}, '0')", Kind.BITS)
    or_1970 = "COALESCE({}, 0)" if column.is_required else "({})"
    if kind == "date":
        return Selected(or_1970.format(f"TO_DAYS({name}) - TO_DAYS('1970-01-01')"), Kind.DATE)
    if kind == "datetime":
        micros = f"TIMESTAMPDIFF(MICROSECOND, '1970-01-01 00:00:00', {name})"
        return Selected(or_1970.format(micros), Kind.TIMESTAMP, column.digits)
    if kind == "timestamp":
        # the value itself, whatever the session's time zone is
        return Selected(f"CAST(UNIX_TIMESTAMP({name}) * 1000000 AS SIGNED)", Kind.INSTANT, column.digits)
    if kind == "time":
        base = "'2000-01-01 00:00:00'"
        return Selected(f"TIMESTAMPDIFF(MICROSECOND, {base}, ADDTIME({base}, {name}))", Kind.TIME, column.digits)
    return None
