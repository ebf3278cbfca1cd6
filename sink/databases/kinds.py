"""Which code reads a database: its URL says it."""

from pyspark.sql import SparkSession

from sink.config import DatabaseSection
from sink.databases.catalog_table import CatalogTable
from sink.databases.mysql import MySQL
from sink.databases.mysql_table import MySQLTable
from sink.databases.postgres import Postgres
from sink.databases.postgres_table import PostgresTable
from sink.spark.jdbc import POSTGRES, driver_of


def database_of(url: str) -> type[Postgres] | type[MySQL]:
    return Postgres if driver_of(url) is POSTGRES else MySQL


def open_table(
    spark: SparkSession, section: DatabaseSection, name: str, path: str, replica: DatabaseSection | None = None
) -> CatalogTable:
    """A table for a load.

    :param name: as `schema.table`.
    :param path: the section's place in the configuration, for messages.
    :param replica: from which rows of a Postgres table are read.
    :raises ConfigError: there is no driver, or the database refuses the user.
    :raises TemporaryError: it doesn't answer.
    """
    if database_of(section.url) is MySQL:
        return MySQLTable(spark, section, name, path)
    return PostgresTable(spark, section, name, path, replica)
