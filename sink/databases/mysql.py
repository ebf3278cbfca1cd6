"""A table of MySQL or MariaDB: one query, which is a snapshot of its own, and whether the binlog was sent."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from sink.databases.conversion import Selected
from sink.databases.database import Database
from sink.databases.mysql_catalog import binlog_place, literal, quoted, read_columns, select
from sink.databases.reading import Delivered, Keys, SourceRows
from sink.errors import ConfigError, RowdeltaError

_BEGIN = "START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY"
_DUMPS = "SELECT state FROM information_schema.processlist WHERE command LIKE 'Binlog Dump%'"


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
        for query in ("SELECT @@global.gtid_current_pos", "SELECT @@global.gtid_executed"):  # MariaDB, MySQL
            with suppress(RowdeltaError):
                ((found,),) = self._connection.rows(query)
                if found:
                    return f"GTID {found}"
        place = binlog_place(self._connection)
        return "" if place is None else f"binlog {place[0]}:{place[1]}"

    def _find_columns(self) -> tuple[dict[str, Selected], dict[str, str]]:
        found = read_columns(self._connection, self._table)
        if not found:
            raise ConfigError(f"{self._path}: there is no table {self.name}. Correct verify.table or {self._path}.url.")
        known, unknown = {}, {}
        for column in found:
            selected = select(column)
            if selected is None:
                unknown[column.name] = column.type
            else:
                known[column.name] = selected
        return known, unknown

    def _quoted(self, name: str) -> str:
        return quoted(name)

    def _literal(self, text: str) -> str:
        return literal(text)
