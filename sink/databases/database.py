"""Reads databases by JDBC: a connection of the driver's own for questions, and Spark's reader for rows.

Spark's reader opens a connection for each of its tasks. Only one statement at the beginning of a task is ours
(`sessionInitStatement`). In Postgres it makes the task read a snapshot that our own connection has exported, so several
tasks read one point of the history. MySQL and MariaDB can't share a snapshot, so one task reads the whole table by one
query, which is a snapshot of its own.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, ClassVar

from py4j.java_gateway import JavaClass
from pyspark.sql import DataFrame, SparkSession

from sink.config import DatabaseSection
from sink.databases.conversion import Selected
from sink.databases.reading import Delivered, Keys, Newest, SourceRows
from sink.errors import ConfigError, RowdeltaError, TemporaryError
from sink.redaction import masked
from sink.spark.java_errors import JAVA_ERRORS, java_exception, java_message

_FETCH_ROWS = "5000"
"""Rows of one round trip. By default drivers hold a whole result in memory."""
_SOCKET_TIMEOUT = 3_600
"""Seconds that a server may be silent. A query that looks up keys without an index reads the whole table first."""
INTEGER = "-?[0-9]{1,20}"
"""Fits the texts of all integers of 64 bits. A database compares longer numbers with a column of them, too."""
_REFUSED = ("28", "3D", "08004", "42")
"""Beginnings of SQLSTATEs that mean a wrong user, password, database or table."""


class Connection:
    """A JDBC connection in the driver's JVM.

    :param driver: name of the driver's class.
    :param path: the section's place in the configuration, for messages: `verify`.
    :raises ConfigError: there is no such driver, or the database refuses user or password.
    :raises TemporaryError: the database doesn't answer.
    """

    def __init__(
        self, spark: SparkSession, driver: str, package: str, section: DatabaseSection, path: str = "verify"
    ) -> None:
        jvm: Any = spark.sparkContext._jvm
        made: Any = jvm
        for part in driver.split("."):
            made = getattr(made, part)
        if not isinstance(made, JavaClass):
            raise ConfigError(f"Spark was started without the driver {driver}. Start it with --packages {package}.")
        self._section = section
        self._path = path
        properties = jvm.java.util.Properties()
        for name, value in connection_properties(section).items():
            properties.setProperty(name, value)
        with self.errors("can't be reached"):
            self._connection = made().connect(address(section), properties)

    def rows(self, sql: str, *parameters: str) -> list[tuple[str | None, ...]]:
        """The rows of a query, with all values as text."""
        with self.errors("refuses a query"):
            statement = self._connection.prepareStatement(sql)
            for number, value in enumerate(parameters, 1):
                statement.setString(number, value)
            result = statement.executeQuery()
            count = range(1, int(result.getMetaData().getColumnCount()) + 1)
            found = []
            while result.next():
                found.append(tuple(result.getString(number) for number in count))
            statement.close()
        return found

    def run(self, sql: str) -> None:
        with self.errors("refuses a statement"):
            statement = self._connection.createStatement()
            statement.execute(sql)
            statement.close()

    @contextmanager
    def transaction(self, sql: str) -> Iterator[None]:
        """A transaction that only reads. It ends with the context.

        :param sql: its first statement.
        """
        self._connection.setAutoCommit(False)
        try:
            self.run(sql)
            yield
        finally:
            with suppress(*JAVA_ERRORS, OSError):  # the connection is gone, and the transaction with it
                self._connection.rollback()
                self._connection.setAutoCommit(True)

    def close(self) -> None:
        with suppress(Exception):  # the JVM may be gone already, after Ctrl-C
            self._connection.close()

    @contextmanager
    def errors(self, what: str) -> Iterator[None]:
        """Turn Java's errors into ours, without secrets."""
        try:
            yield
        except JAVA_ERRORS as error:
            raise self._translated(error, what) from None

    def _translated(self, error: Exception, what: str) -> RowdeltaError:
        cause = java_exception(error)
        while cause.getCause() is not None and not hasattr(cause, "getSQLState"):
            cause = cause.getCause()
        text = java_message(error).strip()
        inner = masked(str(cause.getMessage())).strip()
        message = re.sub(r"\s+", " ", inner if "Exception" in text or len(inner) < len(text) else text).rstrip(".")
        state = ""
        with suppress(*JAVA_ERRORS, TypeError):
            state = str(cause.getSQLState())
        found, path = f"{self._path}: {masked(self._section.url)} {what}: {message}", self._path
        if state.startswith(_REFUSED):
            return ConfigError(f"{found}. Correct {path}.url, {path}.user, {path}.password.")
        return TemporaryError(f"{found}. Run again when it answers, or correct {path}.url.")


def connection_properties(section: DatabaseSection) -> dict[str, str]:
    """Who connects, and how long the driver waits for an answer. A connection that a firewall or a crash of the server
    has cut would be waited for without end. What the URL says wins.
    """
    url = section.url
    second = 1 if url.startswith("jdbc:postgresql:") else 1000  # the driver of MariaDB counts milliseconds
    defaults = {"socketTimeout": str(_SOCKET_TIMEOUT * second), "tcpKeepAlive": "true"}
    named = {name: value for name, value in defaults.items() if not re.search(rf"[?&]{name}=", url, re.IGNORECASE)}
    given = {"user": section.user, "password": section.password}
    return named | {name: value for name, value in given.items() if value is not None}


def address(section: DatabaseSection) -> str:
    """The JDBC URL for the drivers and for Spark's dialects. The driver of MariaDB is used for MySQL too."""
    url = section.url
    if url.startswith("jdbc:postgresql:"):
        return url
    # Spark's dialect for MySQL quotes names as both do; it has none for MariaDB, and would quote as in standard SQL
    url = re.sub("^jdbc:mariadb:", "jdbc:mysql:", url)
    return url if "permitMysqlScheme" in url else f"{url}{'&' if '?' in url else '?'}permitMysqlScheme"


def jdbc_options(section: DatabaseSection, driver: str, first: str) -> dict[str, str]:
    """Options of Spark's JDBC reader.

    :param first: the first statement of a task's connection.
    """
    mine = {"url": address(section), "driver": driver, "fetchsize": _FETCH_ROWS, "sessionInitStatement": first}
    return mine | connection_properties(section)


class Database(ABC):
    """One table of a database.

    :param table: the table, as `schema.table`.
    :param path: the section's place in the configuration, for messages: `verify`.
    :raises ConfigError: the database refuses the user, or there is no such table.
    :raises TemporaryError: the database doesn't answer.
    """

    is_live = True
    driver: ClassVar[str]
    package: ClassVar[str]
    """Maven coordinates of the driver."""

    def __init__(self, spark: SparkSession, section: DatabaseSection, table: str, path: str = "verify") -> None:
        self.name = f"{table} of {masked(section.url)}"
        self._spark = spark
        self._section = section
        self._table = table
        self._path = path
        self._rows = self._quoted_table
        """What a query reads, in SQL."""
        self._connection = Connection(spark, self.driver, self.package, section, path)
        try:
            self._known, self._unknown = self._find_columns()
        except BaseException:
            self.close()
            raise

    def columns(self) -> Mapping[str, Selected]:
        return self._known

    def unknown(self) -> Mapping[str, str]:
        return self._unknown

    @abstractmethod
    def reading(self, columns: Sequence[str], keys: Keys | None) -> AbstractContextManager[SourceRows]:
        """See `VerifySource.reading`."""

    @abstractmethod
    def delivered(self, newest: Newest) -> tuple[Delivered, str]:
        """See `VerifySource.delivered`."""

    @abstractmethod
    def note_log_position(self) -> None:
        """Let `delivered` be about all that was committed so far."""

    @abstractmethod
    def check_server(self) -> None:
        """:raises ConfigError: the server may lack what the topic has already."""

    @abstractmethod
    def check_reader(self, *, is_named: bool) -> None:
        """Check that a connector reads the log, and which.

        :param is_named: whether the configuration names the table whose changes the topic has. Else it is that of the
            topic's name.
        :raises ConfigError: nobody does, it isn't clear who, or the table's changes come elsewhere.
        """

    def is_altered(self) -> bool:
        """Whether the table may have been emptied or altered, in a way of which no message tells, after changes that
        the connector may still write, or write again. False if the database doesn't tell.
        """
        return False

    def close(self) -> None:
        self._connection.close()

    @abstractmethod
    def _find_columns(self) -> tuple[dict[str, Selected], dict[str, str]]:
        """The table's columns, and those of unknown types with these.

        :raises ConfigError: there is no such table.
        """

    @abstractmethod
    def _quoted(self, name: str) -> str: ...

    @abstractmethod
    def _literal(self, text: str) -> str: ...

    @property
    def _quoted_table(self) -> str:
        return ".".join(map(self._quoted, self._table.split(".")))

    def _query(self, columns: Sequence[str], condition: str = "") -> str:
        selected = ", ".join(f"{self._known[name].sql} AS {self._quoted(f'c{n}')}" for n, name in enumerate(columns))
        return f"SELECT {selected} FROM {self._rows}" + (f" WHERE {condition}" if condition else "")

    def with_keys(self, keys: Keys | None) -> str:
        """A condition that holds for the keys' rows. Empty if the database can't look them up by their texts."""
        if keys is None:
            return ""
        forms = [self._known[name].key_text for name in keys.columns]
        if None in forms:
            return ""
        # a text of another form isn't in the source
        fits = [re.compile(str(form), re.DOTALL) for form in forms]
        possible = [row for row in keys.values if all(f.fullmatch(text) for f, text in zip(fits, row, strict=True))]
        if not possible:
            return "1 = 0"

        def literal(number: int, text: str) -> str:
            return text if forms[number] == INTEGER else self._literal(text)

        rows = [", ".join(literal(number, text) for number, text in enumerate(row)) for row in possible]
        names = ", ".join(map(self._quoted, keys.columns))
        if len(keys.columns) == 1:
            return f"{names} IN ({', '.join(rows)})"
        return f"({names}) IN ({', '.join(f'({row})' for row in rows)})"

    def _frame(self, query: str, columns: Sequence[str], first: str) -> DataFrame:
        """The rows of a query, in one task.

        :param first: the first statement of the task's connection.
        """
        options = jdbc_options(self._section, self.driver, first)
        with self._connection.errors("refuses a query"):
            frame = self._spark.read.format("jdbc").options(**options, query=query).load()
        return frame.toDF(*columns)
