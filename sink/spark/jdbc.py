"""The JDBC drivers of databases."""

from typing import NamedTuple


class Driver(NamedTuple):
    """:param name: of its class.
    :param package: its Maven coordinates.
    """

    name: str
    package: str


POSTGRES = Driver("org.postgresql.Driver", "org.postgresql:postgresql:42.7.7")
MARIADB = Driver("org.mariadb.jdbc.Driver", "org.mariadb.jdbc:mariadb-java-client:3.5.3")
"""For MySQL too."""


def driver_of(url: str) -> Driver:
    """:param url: a JDBC URL."""
    return POSTGRES if url.startswith("jdbc:postgresql:") else MARIADB
