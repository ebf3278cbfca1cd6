"""A table of MySQL or MariaDB, as a load reads it: by Spark's JDBC reader, a part in each task.

Parts are ranges of the primary key, in whose order InnoDB keeps the rows. There is no sample of it, so the server walks
through the key and tells each n-th. It takes about as long as `SELECT count(*)`, and the parts are of one size.
"""

import json
import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise, takewhile
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from sink.config import DatabaseSection
from sink.databases.catalog_table import Batches, CatalogColumn, CatalogTable
from sink.databases.database import Connection, jdbc_options
from sink.databases.mysql import MySQL
from sink.databases.mysql_catalog import MySQLColumn, binlog_place, quoted, read_columns
from sink.databases.mysql_values import read_column
from sink.errors import RowdeltaError
from sink.table.load_state import times_before

_SESSION = (
    # literals of a key's timestamps are in UTC; a task that writes lets the server wait; MySQL 8 keeps old statistics;
    # what is rolled back is in no message, so it must not be read
    "SET SESSION time_zone = '+00:00', net_write_timeout = 3600 "
    "/*!80000 , information_schema_stats_expiry = 0, transaction_isolation = 'READ-COMMITTED' */ "
    "/*M! , tx_isolation = 'READ-COMMITTED' */"
)
_OF_TABLE = "table_schema = COALESCE(NULLIF(?, ''), DATABASE()) AND table_name = ?"
_ROWS = f"SELECT table_rows FROM information_schema.tables WHERE {_OF_TABLE}"
_KEY = f"""
SELECT column_name FROM information_schema.statistics
WHERE {_OF_TABLE} AND index_name = 'PRIMARY' ORDER BY seq_in_index
"""
_FILES = """
SELECT table_id FROM information_schema.{tables}
WHERE SUBSTRING_INDEX(SUBSTRING_INDEX(name, '#P#', 1), '#p#', 1) = CONCAT(
    CAST(CONVERT({schema} USING filename) AS BINARY), '/', CAST(CONVERT({table} USING filename) AS BINARY))
ORDER BY table_id
"""
_STORED = "IF(@@lower_case_table_names = 0, {0}, LOWER({0}))"
"""A name as InnoDB has it."""
_OLDEST = """
SELECT TIMESTAMPDIFF(SECOND, CONVERT_TZ(MIN(trx_started), 'SYSTEM', '+00:00'), UTC_TIMESTAMP())
FROM information_schema.innodb_trx
"""
_WRITERS = """
SELECT trx_id, IF(trx_mysql_thread_id = 0, 'a prepared XA transaction',
    CONCAT('connection ', trx_mysql_thread_id, ' since ', CONVERT_TZ(trx_started, 'SYSTEM', '+00:00'), ' UTC'))
FROM information_schema.innodb_trx WHERE trx_rows_modified > 0
"""
"""InnoDB doesn't tell which tables they have changed."""
_STALE_SECONDS = 0.2
"""What InnoDB tells of transactions may be 0.1 s old."""
_DEFINED = f"""
SELECT column_name, column_type, COALESCE(NULLIF(column_default, 'NULL'), ''), is_nullable,
       COALESCE(generation_expression, '')
FROM information_schema.columns WHERE {_OF_TABLE} ORDER BY ordinal_position
"""


class MySQLTable(CatalogTable):
    """:param name: as `database.table`, or a table of the URL's database."""

    order_names = (
        "source.ts_ms or ts_ms; or source.file string and source.pos (with REPLICATION CLIENT or BINLOG MONITOR)"
    )

    def __init__(self, spark: SparkSession, section: DatabaseSection, name: str, path: str) -> None:
        self._spark, self._section = spark, section
        schema, _, table = name.rpartition(".")
        self._name = schema, table
        self._table = ".".join(quoted(part) for part in self._name if part)
        self._connection = Connection(spark, MySQL.driver, MySQL.package, section, path)
        try:
            self._connection.run(_SESSION)
            self._columns = read_columns(self._connection, name)
        except BaseException:
            self.close()
            raise

    def columns(self) -> list[CatalogColumn]:
        return [CatalogColumn(c.name, c.type, True, c.is_required, partial(read_column, c)) for c in self._columns]

    def key(self) -> tuple[str, ...]:
        return tuple(str(name) for (name,) in self._connection.rows(_KEY, *self._name))

    def estimated_rows(self) -> int:
        found = self._connection.rows(_ROWS, *self._name)
        return int(found[0][0] or 0) if found else 0

    def ranges(self, rows: int) -> list[str]:
        """The first has no lower bound, and the last no upper one."""
        columns = {column.name: column for column in self._columns}
        key = list(takewhile(lambda column: column.type in _LITERALS, (columns[name] for name in self.key())))
        if not key:
            return ["1 = 1"]
        names = ", ".join(quoted(column.name) for column in key)
        texts = ", ".join(_LITERALS[column.type][0].format(quoted(column.name)) for column in key)
        bounds: list[list[str]] = []
        while True:
            after = f"WHERE {_beyond(key, bounds[-1], '>')}" if bounds else ""
            step = rows - 1 if bounds else rows
            found = self._connection.rows(
                f"SELECT {texts} FROM {self._table} {after} ORDER BY {names} LIMIT 1 OFFSET {step}"
            )
            if not found:
                break
            bounds.append([_LITERALS[c.type][1].format(text) for c, text in zip(key, found[0], strict=True)])
        if not bounds:
            return ["1 = 1"]
        inner = [f"{_beyond(key, first, '>=')} AND {_beyond(key, end, '<')}" for first, end in pairwise(bounds)]
        return [_beyond(key, bounds[0], "<"), *inner, _beyond(key, bounds[-1], ">=")]

    def files(self) -> str:
        """The server's number, since rows that were read may be gone after a failover; InnoDB's numbers of the table or
        its partitions, which are others after TRUNCATE; how columns are defined of which a row has a value that no
        message tells when they are new; and all columns.
        """
        names = {"schema": _STORED.format("COALESCE(NULLIF(?, ''), DATABASE())"), "table": _STORED.format("?")}
        # a parameter stands there twice
        twice = [part for part in self._name for _ in range(2)]
        try:
            found = self._connection.rows(_FILES.format(tables="innodb_tables", **names), *twice)  # MySQL
        except RowdeltaError:
            found = self._connection.rows(_FILES.format(tables="innodb_sys_tables", **names), *twice)
        columns = self._connection.rows(_DEFINED, *self._name)
        filled = [column for column in columns if column[2] or column[3] == "NO" or column[4]]
        ((server,),) = self._connection.rows("SELECT @@server_id")
        parts = [[server, *(number for (number,) in found)], filled, [column[:2] for column in columns]]
        return ";".join(map(json.dumps, parts)).removesuffix("]")

    def writers(self) -> Mapping[str, str]:
        time.sleep(_STALE_SECONDS)
        return {str(transaction): str(who) for transaction, who in self._connection.rows(_WRITERS)}

    def order(self) -> Mapping[str, Any]:
        """A change has the time of its statement, and may be committed much later."""
        ((age,),) = self._connection.rows(_OLDEST)
        millis = max(0, int(age or 0)) * 1000
        times = {name: value - millis * (1000 if name.endswith("us") else 1) for name, value in times_before().items()}
        place = binlog_place(self._connection)
        return times if place is None else times | {"source.file": place[0], "source.pos": place[1]}

    def read(self, columns: Sequence[str], conditions: Sequence[str], tasks: int) -> tuple[DataFrame, Batches]:
        # Spark's plans don't show conditions of its reader. These are about columns by their names.
        own = [quoted(c.name) for c in self._columns if any(quoted(c.name) in condition for condition in conditions)]
        names = [f"rowdelta {n}" for n in range(len(columns))]
        selected = ", ".join([*(f"{sql} AS {quoted(name)}" for sql, name in zip(columns, names, strict=True)), *own])
        options = jdbc_options(self._section, MySQL.driver, _SESSION)
        with self._connection.errors("refuses a query"):
            frame = self._spark.read.jdbc(
                options.pop("url"),
                f"(SELECT {selected} FROM {self._table}) AS part",
                predicates=[f"({condition})" for condition in conditions],
                properties=options,
            )
        return frame.select(*map(quoted, names)).coalesce(tasks), iter

    def close(self) -> None:
        self._connection.close()


_NUMBER, _TEXT, _BYTES = (
    ("CAST({} AS CHAR)", "{}"),
    ("HEX(CONVERT({} USING utf8mb4))", "_utf8mb4 x'{}'"),
    ("HEX({})", "x'{}'"),
)
_TIME = ("CAST({} AS CHAR)", "'{}'")
_LITERALS = {
    **dict.fromkeys(("tinyint", "smallint", "mediumint", "int", "bigint", "year", "decimal"), _NUMBER),
    **dict.fromkeys(("char", "varchar"), _TEXT),
    **dict.fromkeys(("binary", "varbinary"), _BYTES),
    **dict.fromkeys(("date", "time", "datetime", "timestamp"), _TIME),
}
"""Type -> an expression for a text of its values, and the literal in SQL that has it."""


def _beyond(key: Sequence[MySQLColumn], bound: Sequence[str], comparison: str) -> str:
    """Whether a row is beyond a bound. Servers don't look up `(a, b) >= (1, 2)` in an index.

    :param comparison: `<`, `>` or `>=`.
    """
    name, value = quoted(key[0].name), bound[0]
    if len(key) == 1:
        return f"{name} {comparison} {value}"
    return f"({name} {comparison[0]} {value} OR {name} = {value} AND {_beyond(key[1:], bound[1:], comparison)})"
