"""MySQL in a container. Where there is none, MariaDB stands for it, of which there is a package."""

from contextlib import closing

import pymysql

from tests.stack.container import Container
from tests.stack.process import Service, free_ports


class MySQL(Service):
    """A server on 127.0.0.1 which keeps its databases while it is stopped.

    `user` may do everything, and replicate. `jdbc_url` is what Spark's JDBC source takes, beside user and password.
    `inside` is host and port for other containers.
    """

    CONNECTOR = "io.debezium.connector.mysql.MySqlConnector"
    SCHEME = "mysql"

    def __init__(self, user: str, password: str) -> None:
        (self.port,) = free_ports(1)
        self.host = "127.0.0.1"
        self.user = user
        self.password = password
        self.database = "shop"
        self.jdbc_url = f"jdbc:{self.SCHEME}://{self.host}:{self.port}/{self.database}"
        self.inside = f"{self.host}:{self.port}"

    def connect(self) -> "pymysql.connections.Connection[pymysql.cursors.Cursor]":
        """A connection to `database` that commits each statement, in UTC and strict mode."""
        return pymysql.connect(
            host=self.host,
            port=self.port,
            user=self.user,
            password=self.password,
            database=self.database,
            autocommit=True,
            connect_timeout=5,
            init_command="SET time_zone = '+00:00'",
        )

    def execute(self, script: str) -> None:
        """Run SQL statements, separated by a semicolon at the end of a line."""
        with closing(self.connect()) as connection, connection.cursor() as cursor:
            for statement in script.split(";\n"):
                if statement.strip():
                    cursor.execute(statement)

    def _answers(self) -> bool:
        try:
            self.connect().close()
            return True
        except pymysql.err.OperationalError:
            return False


class ContainerMySQL(MySQL):
    """The compose file's MySQL."""

    def __init__(self) -> None:
        super().__init__("root", "secret-of-mysql")
        container = Container("mysql", self.port, self._answers)
        container.environment |= {"MYSQL_DATABASE": self.database, "MYSQL_ROOT_PASSWORD": self.password}
        self.inside = container.inside
        self._runner = container
