"""A table of MySQL or MariaDB: one query, which is a snapshot of its own, and whether the binlog was sent."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from pyspark.sql.types import LongType, StringType

from sink.databases.conversion import Selected
from sink.databases.database import Connection, Database
from sink.databases.mysql_catalog import binlog_place, literal, missing_in_log, quoted, read_columns, select
from sink.databases.reading import Delivered, Keys, Newest, SourceRows
from sink.errors import ConfigError, RowdeltaError
from sink.spark.jdbc import MARIADB

_BEGIN = "START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY"
_DUMPS = "SELECT user, state FROM information_schema.processlist WHERE command LIKE 'Binlog Dump%'"
_PLACE = (("source.file", StringType()), ("source.pos", LongType()))


class MySQL(Database):
    driver, package = MARIADB

    _place: tuple[int, int] | None = None
    """What came next in the binlog after the last reading: its file's number, and where in the file. None if the user
    may not see it.
    """
    _is_sent = False
    """Whether the connector had all since the last reading. In a busy server it has all at times only."""

    @contextmanager
    def reading(self, columns: Sequence[str], keys: Keys | None) -> Iterator[SourceRows]:
        position = self._position()
        yield SourceRows(self._frame(self._query(columns, self.with_keys(keys)), columns, _BEGIN), position)
        self.note_log_position()

    def delivered(self, newest: Newest) -> tuple[Delivered, str]:
        place = self._place
        if place is not None:
            has_passed = [found is not None and _numbered(*found) >= place for found in newest(_PLACE)]
            if all(has_passed):
                return Delivered.YES, ""
            if any(has_passed):  # other partitions have no message, or theirs is on its way
                return Delivered.TO_CONNECTOR, "the connector has the changes"
        # what a reading saw was in the binlog before; a thread that has sent all since has sent it
        dumps = self._dumps()
        if not dumps:
            return Delivered.UNKNOWN, "no connector is seen, which needs the privilege PROCESS"
        self._is_sent |= all("has sent all" in str(state).lower() for _, state in dumps)
        if self._is_sent:
            return Delivered.TO_CONNECTOR, "the connector has the changes"
        return Delivered.NOT_YET, "the connector still gets changes"

    def note_log_position(self) -> None:
        self._is_sent, place = False, binlog_place(self._connection)
        self._place = None if place is None else _numbered(*place)

    def check_server(self) -> None:
        """The server that the connector reads is the right one, also if it is a replica."""
        self.check_reader(is_named=True)

    def check_reader(self, *, is_named: bool) -> None:
        users = sorted({user for user, _ in self._dumps()})
        if not users:
            wanted = self._section.connector_user
            raise ConfigError(
                f"nobody{'' if wanted is None else f' named {wanted}'} is seen to read the binlog of {self.name}, so "
                "changes may be missing in the topic. Name the server that the connector reads, and start the "
                f"connector, with snapshot.mode: no_data for a load. {self._path}.user needs PROCESS to see it: GRANT "
                "PROCESS ON *.* TO …"
            )
        if self._section.connector_user is None:
            raise ConfigError(
                f"{self._path}.connector_user: the user is needed by whom the connector reads the binlog of "
                f"{self.name}. Those who read it now: {', '.join(users)}. If another one, such as a replica, passed "
                "for the connector, changes would be lost."
            )
        refuse_missing(self._connection, self._table, self._path)

    def _dumps(self) -> list[tuple[str, str | None]]:
        """User and state of those who read the binlog: the connector, or all if it isn't named."""
        wanted = self._section.connector_user
        return [(str(user), state) for user, state in self._connection.rows(_DUMPS) if wanted in (None, user)]

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


def refuse_missing(connection: Connection, table: str, path: str = "source.database") -> None:
    """:param table: as `database.table`, or without a database.
    :param path: the section's place in the configuration, for messages.
    :raises ConfigError: the server's binlog doesn't have the changes of a table.
    """
    for lacking in missing_in_log(connection, table.rpartition(".")[0]):
        raise ConfigError(f"{path}.url: the server's log lacks changes of {table}, which would be lost: {lacking}.")


def _numbered(file: str, place: int) -> tuple[int, int]:
    return int(file.rpartition(".")[2]), place
