"""A connection to Postgres that brings rows into Arrow: ADBC's driver, which reads by binary COPY.

The configuration has a JDBC URL, since verify and Spark read by JDBC. It is brought into what libpq takes.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

import pyarrow as pa

from sink.config import DatabaseSection
from sink.errors import ConfigError, RowdeltaError, TemporaryError
from sink.redaction import MASK, masked

_BATCH_BYTES = 4 * 1024 * 1024
"""About so large are batches."""
_REFUSED_STATES = ("28", "3D")
"""Beginnings of SQLSTATEs that mean a wrong user, password or database."""
_REFUSED = re.compile(
    r"authentication failed|no pg_hba\.conf entry|does not exist|no password supplied|percent-encoded"
)
"""Of what libpq says before there is a session, which has no SQLSTATE."""
_PARAMETERS = {
    "sslmode": "sslmode",
    "sslrootcert": "sslrootcert",
    "sslcert": "sslcert",
    "sslkey": "sslkey",
    "sslpassword": "sslpassword",
    "gssencmode": "gssencmode",
    "options": "options",
    "applicationname": "application_name",
    "connecttimeout": "connect_timeout",
    "user": "user",
    "password": "password",
}
"""Of the JDBC driver, in small letters -> of libpq. All others are about the JDBC driver itself."""
_SERVERS = {"primary": "read-write", "secondary": "standby", "preferSecondary": "prefer-standby", "any": "any"}
"""Values of `targetServerType` -> of `target_session_attrs`."""
_DEFAULTS = {
    # a connection that a firewall or a crash of the server has cut would be waited for without end
    "keepalives_idle": "60",
    "keepalives_interval": "10",
    "keepalives_count": "6",
    "application_name": "rowdelta",
}
_SESSION = (
    "SET TimeZone = 'UTC'",
    "SET DateStyle = 'ISO'",
    "SET extra_float_digits = 1",
    "SET default_transaction_read_only = on",
    "SET row_security = off",  # an error in place of rows that a policy hides
)


class PostgresConnection:
    """Each statement is a transaction of its own, which only reads.

    :param path: the section's place in the configuration, for messages: `source.database`.
    :param patience: seconds for which it tries to connect, unless the URL says it.
    :raises ConfigError: it is another database, there is no driver, or the database refuses user or password.
    :raises TemporaryError: the database doesn't answer.
    """

    def __init__(self, section: DatabaseSection, path: str = "source.database", patience: int = 10) -> None:
        if not section.url.startswith("jdbc:postgresql:"):
            raise ConfigError(f"{path}.url: {masked(section.url)} can't be read: only Postgres is read so.")
        try:
            from adbc_driver_postgresql import StatementOptions, dbapi
        except ImportError:
            raise ConfigError(
                "Postgres is read with a driver that isn't installed. Install it where rowdelta runs, and on the "
                "executors: pip install 'rowdelta[postgres]'."
            ) from None
        self._section, self._path = section, path
        self._in_batches = {StatementOptions.BATCH_SIZE_HINT_BYTES.value: str(_BATCH_BYTES)}
        self._without_copy = {StatementOptions.USE_COPY.value: "false"}
        with self._errors("can't be reached"):
            self._connection: Any = dbapi.connect(libpq_url(section, patience), autocommit=True)
        try:
            for statement in (*_SESSION, *_search_path(section)):
                self.run(statement)
        except BaseException:
            self.close()
            raise

    def run(self, sql: str) -> None:
        with self._errors("refuses a statement"), self._connection.cursor() as cursor:
            cursor.execute(sql)

    def rows(self, sql: str, *, is_copied: bool = True) -> list[tuple[Any, ...]]:
        """:param is_copied: it is a query that COPY takes, and no other command."""
        options = None if is_copied else self._without_copy
        with self._errors("refuses a query"), self._connection.cursor(adbc_stmt_kwargs=options) as cursor:
            cursor.execute(sql)
            found: list[tuple[Any, ...]] = cursor.fetchall()
            return found

    def batches(self, sql: str) -> Iterator[pa.RecordBatch]:
        """The rows of a query while the server sends them."""
        with self._errors("refuses a query"), self._connection.cursor(adbc_stmt_kwargs=self._in_batches) as cursor:
            cursor.execute(sql)
            yield from cursor.fetch_record_batch()

    def close(self) -> None:
        self._connection.close()

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """Turn the driver's errors into ours, without secrets and without the query, which may have values of keys."""
        from adbc_driver_manager import Error

        try:
            yield
        except (Error, OSError, pa.ArrowException) as error:
            raise self._translated(error, what) from None

    def _translated(self, error: Exception, what: str) -> RowdeltaError:
        text = re.split(r"\nLINE \d+:|\n+Query was:", str(error))[0]
        text = re.sub(r"^[A-Z_]+: (?:\[libpq\] )?|\s+", lambda found: "" if found.start() == 0 else " ", text).strip()
        password, path = self._section.password, self._path
        message = masked(text.replace(password, MASK) if password else text).rstrip(".")
        state = getattr(error, "sqlstate", None) or ""
        found = f"{path}: {masked(self._section.url)} {what}: {message}"
        if state.startswith("42"):
            return ConfigError(f"{found}. Is the table there as it was before, and may {path}.user read it?")
        if state.startswith(_REFUSED_STATES) or (not state and _REFUSED.search(text)):
            return ConfigError(f"{found}. Correct {path}.url, {path}.user, {path}.password.")
        return TemporaryError(f"{found}. Run again when it answers, or correct {path}.url.")


def libpq_url(section: DatabaseSection, patience: int = 10) -> str:
    """The database as libpq takes it.

    :param patience: as of `PostgresConnection`.
    """
    place, _, _ = section.url.removeprefix("jdbc:postgresql:").partition("?")
    place = place if place.startswith("//") else f"//localhost/{place}"
    given = _given(section)
    named = {_PARAMETERS[name.lower()]: value for name, value in given.items() if name.lower() in _PARAMETERS}
    if given.get("ssl") in ("true", "") and "sslmode" not in named:
        named["sslmode"] = "verify-full"
    if (server := given.get("targetServerType")) in _SERVERS:
        named["target_session_attrs"] = _SERVERS[server]
    own = {"user": section.user, "password": section.password}
    named = (
        _DEFAULTS
        | {"connect_timeout": str(patience)}
        | named
        | {name: value for name, value in own.items() if value is not None}
    )
    return f"postgresql:{place}?{urlencode(named, quote_via=quote)}"


def _search_path(section: DatabaseSection) -> list[str]:
    schemas = _given(section).get("currentSchema")
    return [] if schemas is None else [f"SET search_path = {schemas}"]


def _given(section: DatabaseSection) -> Mapping[str, str]:
    """The parameters in the URL."""
    return dict(parse_qsl(section.url.partition("?")[2], keep_blank_values=True))
