"""A table of MySQL or MariaDB: one query, which is a snapshot of its own, and whether the binlog was sent."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from sink.databases.conversion import Kind, Selected
from sink.databases.database import INTEGER, Database
from sink.databases.reading import Delivered, Keys, SourceRows
from sink.errors import ConfigError, RowdeltaError

_BEGIN = "START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY"
_COLUMNS = """
SELECT column_name, data_type, column_type, numeric_scale, datetime_precision
FROM information_schema.columns WHERE table_schema = ? AND table_name = ? ORDER BY ordinal_position
"""
_DUMPS = "SELECT state FROM information_schema.processlist WHERE command LIKE 'Binlog Dump%'"
_PADDED = frozenset(["char", "enum", "set"])
"""Spark adds blanks to texts of a fixed length, which the drivers say these have."""
_TEXTS = frozenset(["varchar", "tinytext", "text", "mediumtext", "longtext"])
_BYTES = frozenset(["binary", "varbinary", "tinyblob", "blob", "mediumblob", "longblob"])
_INTEGERS = frozenset(["tinyint", "smallint", "mediumint", "int", "bigint", "year"])


class MySQL(Database):
    driver = "org.mariadb.jdbc.Driver"
    package = "org.mariadb.jdbc:mariadb-java-client:3.5.3"

    @contextmanager
    def reading(self, columns: Sequence[str], keys: Keys | None) -> Iterator[SourceRows]:
        position = self._position()
        yield SourceRows(self._frame(self._query(columns, self.with_keys(keys)), columns, _BEGIN), position)

    def delivered(self) -> tuple[Delivered, str]:
        # what a reading saw was in the binlog before; a thread that has sent all since has sent it
        states = [str(state) for (state,) in self._connection.rows(_DUMPS)]
        if not states:
            return Delivered.UNKNOWN, "no connector is seen, which needs the privilege PROCESS"
        if all("has sent all" in state.lower() for state in states):
            return Delivered.TO_CONNECTOR, "the connector has the changes"
        return Delivered.NOT_YET, "the connector still gets changes"

    def _position(self) -> str:
        """The GTIDs, or the place in the binlog. Only for people: both move on until the snapshot is taken."""
        for query, what in (
            ("SELECT @@global.gtid_current_pos", "GTID"),  # MariaDB
            ("SELECT @@global.gtid_executed", "GTID"),
            ("SHOW BINARY LOG STATUS", "binlog"),
            ("SHOW MASTER STATUS", "binlog"),
        ):
            try:
                rows = self._connection.rows(query)
            except RowdeltaError:
                continue  # the server doesn't have it, or the user may not
            if rows and rows[0][0]:
                return f"{what} {':'.join(str(part) for part in rows[0][:2])}"
        return ""

    def _find_columns(self) -> tuple[dict[str, Selected], dict[str, str]]:
        schema, _, table = self._table.rpartition(".")
        if not schema:
            ((found,),) = self._connection.rows("SELECT database()")
            schema = found or ""
        rows = self._connection.rows(_COLUMNS, schema, table)
        if not rows:
            raise ConfigError(f"{self._path}: there is no table {self.name}. Correct verify.table or {self._path}.url.")
        known, unknown = {}, {}
        for name, data_type, column_type, scale, digits in rows:
            selected = _selected(self._quoted(str(name)), str(data_type), str(column_type), scale, digits)
            if selected is None:
                unknown[str(name)] = str(data_type)
            else:
                known[str(name)] = selected
        return known, unknown

    def _quoted(self, name: str) -> str:
        return "`" + name.replace("`", "``") + "`"

    def _literal(self, text: str) -> str:
        # whether a backslash escapes depends on the server's mode, so it is bytes
        return f"_utf8mb4 x'{text.encode().hex()}'"


def _selected(column: str, data_type: str, column_type: str, scale: str | None, digits: str | None) -> Selected | None:
    """How a column is selected; None if its type is unknown.

    :param column_type: as in `CREATE TABLE`.
    :param digits: of fractions of a second.
    """
    seconds = int(digits or 0)
    if data_type in _INTEGERS:
        if data_type == "bigint" and "unsigned" in column_type:
            return Selected(f"CAST({column} AS CHAR)", Kind.UNSIGNED)
        return Selected(f"CAST({column} AS SIGNED)", Kind.INTEGER, key_text=INTEGER)
    if data_type == "decimal":
        return Selected(f"CAST({column} AS CHAR)", Kind.DECIMAL, int(scale or 0))
    if data_type in ("float", "double"):
        # as a text, a float would have 6 digits
        return Selected(f"({column} + 0e0)", Kind.FLOAT if data_type == "float" else Kind.DOUBLE)
    if data_type in _PADDED:
        return Selected(f"CAST({column} AS CHAR)", Kind.TEXT, key_text=".*")
    if data_type in _TEXTS:
        return Selected(column, Kind.TEXT, key_text=".*")
    if data_type in _BYTES:
        return Selected(column, Kind.BYTES)
    if data_type == "bit":
        bits = f"CONV(HEX({column} + 0), 16, 2)"
        if column_type == "bit(1)":
            return Selected(f"({column} + 0)", Kind.INTEGER)
        return Selected(f"LPAD({bits}, {column_type[4:-1]}, '0')", Kind.BITS)
    if data_type == "date":
        return Selected(f"(TO_DAYS({column}) - TO_DAYS('1970-01-01'))", Kind.DATE)
    if data_type == "datetime":
        micros = f"TIMESTAMPDIFF(MICROSECOND, '1970-01-01 00:00:00', {column})"
        return Selected(micros, Kind.TIMESTAMP, seconds)
    if data_type == "timestamp":
        # the value itself, whatever the session's time zone is
        return Selected(f"CAST(UNIX_TIMESTAMP({column}) * 1000000 AS SIGNED)", Kind.INSTANT, seconds)
    if data_type == "time":
        base = "'2000-01-01 00:00:00'"
        return Selected(f"TIMESTAMPDIFF(MICROSECOND, {base}, ADDTIME({base}, {column}))", Kind.TIME, seconds)
    return None
