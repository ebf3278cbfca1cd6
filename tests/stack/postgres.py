"""PostgreSQL with logical decoding."""

import signal
from contextlib import AbstractContextManager
from pathlib import Path

import psycopg

from tests.stack.container import Container, has
from tests.stack.process import Process, Service, as_user, finish, free_ports, give_to, installed, running, unprivileged

# Debian keeps the server's programs out of the PATH.
_FOLDERS = "/usr/lib/postgresql"
_SETTINGS = {
    "shared_buffers": "64MB",
    "fsync": "off",  # only a crash of the machine would show it
    "log_min_messages": "warning",
}
_LOCAL_SETTINGS = {"listen_addresses": "127.0.0.1", "unix_socket_directories": "", "wal_level": "logical"}


class Postgres(Service):
    """A server on 127.0.0.1 which keeps its databases while it is stopped.

    `user` is a superuser, and may replicate. `url` is what psycopg takes, and `jdbc_url` what Spark's JDBC source does,
    beside user and password. `inside` is host and port for other containers.
    """

    def __init__(self, folder: Path) -> None:
        (self.port,) = free_ports(1)
        self.host = "127.0.0.1"
        self.user = "postgres"
        self.password = "secret-of-postgres"
        self.database = "postgres"
        self.url = f"postgresql://{self.user}:{self.password}@{self.host}:{self.port}/{self.database}"
        self.jdbc_url = f"jdbc:postgresql://{self.host}:{self.port}/{self.database}"
        self.inside = f"{self.host}:{self.port}"
        self._data = folder / "data"
        self._os_user = unprivileged("postgres")
        self._runner = self._container() if has("postgres") else self._local(folder / "postgres.log")

    def _local(self, log: Path) -> Process:
        command = [program("postgres"), "-D", str(self._data), "-p", str(self.port)]
        command += _options(_SETTINGS | _LOCAL_SETTINGS)
        # SIGINT: it would wait for its clients after SIGTERM
        return Process(command, log, self._answers, user=self._os_user, stop_signal=signal.SIGINT)

    def _container(self) -> Container:
        container = Container("postgres", self.port, self._answers)
        own = {"POSTGRES_DB": self.database, "POSTGRES_USER": self.user, "POSTGRES_PASSWORD": self.password}
        container.environment |= own
        container.command += _options(_SETTINGS)
        self.inside = container.inside
        return container

    def start(self) -> None:
        """Start, or start again on the same port with the same databases; returns when the server serves."""
        if isinstance(self._runner, Process) and not self._data.exists():
            self._create()
        super().start()

    def pgbench(self, *arguments: str) -> None:
        """Run PostgreSQL's own benchmark in `database`; ServiceError with what it printed when it fails."""
        if isinstance(self._runner, Container):
            self._runner.run("pgbench", *arguments, self.url.replace(f"{self.host}:{self.port}", self.inside))
        else:
            finish([program("pgbench"), *arguments, self.url], "pgbench failed")

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


def _options(settings: dict[str, str]) -> list[str]:
    return [part for key, value in settings.items() for part in ("-c", f"{key}={value}")]


def program(name: str) -> str:
    """The path of one of PostgreSQL's programs; ServiceError when it is not installed."""
    return installed(name, sorted(Path(_FOLDERS).glob("*/bin"), reverse=True), "postgresql", "postgresql")


def running_postgres() -> AbstractContextManager[Postgres]:
    """A started server; its databases are gone when the block ends."""
    return running(Postgres, "postgres")
