"""MariaDB with a binlog of rows and GTIDs; it stands for MySQL, of which there is no package."""

import os
from contextlib import AbstractContextManager
from pathlib import Path

from tests.stack.container import has
from tests.stack.jars import HERE, program
from tests.stack.mysql import ContainerMySQL, MySQL
from tests.stack.process import Process, finish, running

_SETTINGS = {
    "bind-address": "127.0.0.1",
    "socket": "mariadb.sock",  # relative to the data: the whole path might be too long for a socket
    "log-bin": "binlog",
    "binlog-format": "ROW",
    "binlog-row-image": "FULL",
    "binlog-row-metadata": "FULL",
    "gtid-strict-mode": "ON",
    "server-id": "1",
    "innodb-flush-log-at-trx-commit": "2",  # to the disk each second: only a crash of the machine would show it
    "innodb-buffer-pool-size": "64M",
}


class MariaDB(MySQL):
    """A server whose files are in `folder`."""

    CONNECTOR = "io.debezium.connector.mariadb.MariaDbConnector"
    SCHEME = "mariadb"

    def __init__(self, folder: Path) -> None:
        super().__init__("debezium", "secret-of-mariadb")
        self._data = folder / "data"
        self._temporary = folder / "tmp"
        self._first = folder / "first.sql"
        command = [*self._command("mariadbd"), f"--port={self.port}", f"--tmpdir={self._temporary}"]
        command += [f"--{key}={value}" for key, value in _SETTINGS.items()]
        command += [f"--init-file={self._first}"]
        self._runner = Process(command, folder / "mariadb.log", self._answers)

    def start(self) -> None:
        """Start, or start again on the same port with the same databases; returns when the server serves."""
        if not self._data.exists():
            self._create()
        super().start()

    def _create(self) -> None:
        for folder in (self._data, self._temporary):
            folder.mkdir()
        # Run at each start.
        self._first.write_text(
            f"CREATE DATABASE IF NOT EXISTS {self.database} CHARACTER SET utf8mb4;\n"
            f"CREATE USER IF NOT EXISTS {self.user}@'127.0.0.1' IDENTIFIED BY '{self.password}';\n"
            f"GRANT ALL ON *.* TO {self.user}@'127.0.0.1' WITH GRANT OPTION;\n"
        )
        command = [*self._command("mariadb-install-db"), "--auth-root-authentication-method=normal"]
        command += ["--skip-test-db", "--skip-name-resolve"]
        environment = {**os.environ, "TMPDIR": str(self._temporary)}
        finish(command, "mariadb-install-db failed", cwd=self._data, env=environment)

    def _command(self, name: str) -> list[str]:
        """One of MariaDB's programs with what all of them are told."""
        command = [str(_program(name)), "--no-defaults", f"--basedir={server().parents[1]}", f"--datadir={self._data}"]
        # it wants to be told that root means it
        return command + ["--user=root"] * (os.geteuid() == 0)


def server() -> Path:
    """The server's program; NotInstalledError when there is none."""
    return _program("mariadbd")


def _program(name: str) -> Path:
    folders = map(Path, ("/usr/sbin", "/usr/local/sbin", "/usr/libexec"))
    return program(name, HERE / "ivy-mariadb.xml", folders, "mariadb-server", "mariadb")


def mysql_or_mariadb(folder: Path) -> MySQL:
    """MySQL where Docker has it, else MariaDB."""
    return ContainerMySQL() if has("mysql") else MariaDB(folder)


def running_mariadb() -> AbstractContextManager[MariaDB]:
    """A started server; its databases are gone when the block ends."""
    return running(MariaDB, "mariadb")
