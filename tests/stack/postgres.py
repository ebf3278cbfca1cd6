"""PostgreSQL with logical decoding."""

import atexit
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path

import psycopg

from tests.stack.container import Container, has
from tests.stack.jars import HERE, cache_folder, program
from tests.stack.process import Process, Service, as_user, finish, free_ports, running

_USER = "nobody" if os.geteuid() == 0 else None
"""As whom the server runs: it refuses root."""
_SETTINGS = {
    "shared_buffers": "64MB",
    "fsync": "off",  # only a crash of the machine would show it
    "log_min_messages": "warning",
    "max_prepared_transactions": "5",
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
        self._runner = self._container() if has("postgres") else self._local(folder / "postgres.log")

    def _local(self, log: Path) -> Process:
        command = [str(_programs() / "postgres"), "-D", str(self._data), "-p", str(self.port)]
        command += _options(_SETTINGS | _LOCAL_SETTINGS)
        # SIGINT: it would wait for its clients after SIGTERM
        return Process(command, log, self._answers, user=_USER, stop_signal=signal.SIGINT)

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
        if _USER:
            shutil.chown(self._data, _USER)
            _let_pass(self._data)
        password = self._data.with_name("password")
        password.write_text(self.password)
        command = [str(_programs() / "initdb"), "-D", str(self._data), "-U", self.user, "--no-sync"]
        command += [f"--pwfile={password}", "--auth=scram-sha-256", "--encoding=UTF8", "--locale=C.UTF-8"]
        finish(command, "initdb failed", cwd=self._data, **as_user(_USER))


def _let_pass(data: Path) -> None:
    """Let the server's user reach his files."""
    for parent in data.parents:
        if parent.is_relative_to(tempfile.gettempdir()):
            parent.chmod(parent.stat().st_mode | 0o011)


@contextmanager
def running_replica(primary: Postgres) -> Iterator[Postgres]:
    """A started replica of a server that isn't in a container. Its files are gone when the block ends."""

    def copied(folder: Path) -> Postgres:
        replica = Postgres(folder)
        with psycopg.connect(primary.url, autocommit=True) as connection:
            connection.execute("SELECT pg_backup_start('copy', true)")
            finish(["cp", "-a", str(primary._data), str(replica._data)], "the primary's files can't be copied")
            ((label,),) = connection.execute("SELECT labelfile FROM pg_backup_stop(false)").fetchall()
        for name, text in (("backup_label", label), ("standby.signal", "")):
            (replica._data / name).write_text(text)
            if _USER:
                shutil.chown(replica._data / name, _USER)
        (replica._data / "postmaster.pid").unlink()
        for slot in (replica._data / "pg_replslot").iterdir():
            shutil.rmtree(slot)
        with (replica._data / "postgresql.auto.conf").open("a") as file:
            place = f"host={primary.host} port={primary.port} user={primary.user} password={primary.password}"
            file.write(f"primary_conninfo = '{place}'\nhot_standby_feedback = on\n")
        _let_pass(replica._data)
        return replica

    with running(copied, "replica") as replica:
        yield replica


def _options(settings: dict[str, str]) -> list[str]:
    return [part for key, value in settings.items() for part in ("-c", f"{key}={value}")]


def server() -> Path:
    """The server's program; its others are beside it. NotInstalledError when there is none."""
    # Debian keeps it out of the PATH
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return program("postgres", HERE / "ivy-postgres.xml", folders, "postgresql", "postgresql")


@cache
def _programs() -> Path:
    """The folder of the programs: where the server runs as another user, a copy to which he can pass."""
    folder = server().parent
    if _USER is None or not folder.is_relative_to(cache_folder()):
        return folder
    # Not in the folder of temporary files: that may be in memory, where systems let nobody run a program.
    copy = Path(tempfile.mkdtemp(prefix="rowdelta-postgres-", dir="/var/tmp"))
    atexit.register(shutil.rmtree, copy)
    shutil.copytree(folder.parent, copy, dirs_exist_ok=True)
    copy.chmod(0o755)
    return copy / folder.name


def running_postgres() -> AbstractContextManager[Postgres]:
    """A started server; its databases are gone when the block ends."""
    return running(Postgres, "postgres")
