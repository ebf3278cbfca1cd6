"""PostgreSQL with logical decoding."""

import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

from tests.stack.process import Process, Service, as_user, finish, free_ports, give_to, installed, unprivileged

# Debian keeps the server's programs out of the PATH.
_FOLDERS = "/usr/lib/postgresql"
_SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "wal_level": "logical",
    "shared_buffers": "64MB",
    "fsync": "off",  # only a crash of the machine would show it
    "log_min_messages": "warning",
}


class Postgres(Service):
    """A server on 127.0.0.1 which keeps its databases while it is stopped.

    `user` is a superuser, and may replicate. `url` is what psycopg takes, and `jdbc_url` what Spark's JDBC source does,
    beside user and password.
    """

    def __init__(self, folder: Path) -> None:
        (self.port,) = free_ports(1)
        self.host = "127.0.0.1"
        self.user = "postgres"
        self.password = "secret-of-postgres"
        self.database = "postgres"
        self.url = f"postgresql://{self.user}:{self.password}@{self.host}:{self.port}/{self.database}"
        self.jdbc_url = f"jdbc:postgresql://{self.host}:{self.port}/{self.database}"
        self._data = folder / "data"
        self._os_user = unprivileged("postgres")
        command = [program("postgres"), "-D", str(self._data), "-p", str(self.port)]
        command += [part for key, value in _SETTINGS.items() for part in ("-c", f"{key}={value}")]
        # SIGINT: it would wait for its clients after SIGTERM
        self._process = Process(
            command, folder / "postgres.log", self._answers, user=self._os_user, stop_signal=signal.SIGINT
        )

    def start(self) -> None:
        """Start, or start again on the same port with the same databases; returns when the server serves."""
        if not self._data.exists():
            self._create()
        super().start()

    def execute(self, script: str) -> None:
        """Run SQL statements, each in a transaction of its own unless the script says otherwise (`BEGIN; …`).

        Statements are separated by a semicolon at the end of a line.
        """
        with psycopg.connect(self.url, autocommit=True) as connection:
            for statement in script.split(";\n"):
                if statement.strip():
                    connection.execute(statement.encode())

    def _answers(self) -> bool:
        try:
            psycopg.connect(self.url, connect_timeout=5).close()
            return True
        except psycopg.OperationalError:
            return False

    def _create(self) -> None:
        self._data.mkdir()
        give_to(self._data, self._os_user)
        password = self._data.with_name("password")
        password.write_text(self.password)
        command = [program("initdb"), "-D", str(self._data), "-U", self.user, f"--pwfile={password}", "--no-sync"]
        command += ["--auth=scram-sha-256", "--encoding=UTF8", "--locale=C.UTF-8"]
        finish(command, "initdb failed", cwd=self._data, **as_user(self._os_user))


def program(name: str) -> str:
    """The path of one of PostgreSQL's programs; ServiceError when it is not installed."""
    return installed(name, sorted(Path(_FOLDERS).glob("*/bin"), reverse=True), "postgresql", "postgresql")


@contextmanager
def running_postgres() -> Iterator[Postgres]:
    """A started server; its databases are gone when the block ends."""
    with tempfile.TemporaryDirectory(prefix="rowdelta-postgres-") as folder:
        server = Postgres(Path(folder))
        try:
            server.start()
            yield server
        finally:
            server.stop()
