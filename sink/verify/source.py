"""What `rowdelta verify` compares a table with: a database, or a table that Spark reads."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from pyspark.sql import SparkSession

from sink.databases.conversion import Kind, Selected
from sink.databases.reading import Delivered, Keys, Newest, SourceRows
from sink.errors import ConfigError
from sink.spark.expressions import quoted
from sink.spark.java_errors import JAVA_ERRORS, java_message


class VerifySource(Protocol):
    """:param name: for people, without secrets.
    :param is_live: others may change it while it is read.
    """

    name: str
    is_live: bool

    def columns(self) -> Mapping[str, Selected]:
        """The source's columns and how they are selected. A column with an unknown type is left out."""

    def unknown(self) -> Mapping[str, str]:
        """The columns that `columns` leaves out, with their types."""

    def reading(self, columns: Sequence[str], keys: Keys | None) -> AbstractContextManager[SourceRows]:
        """Read these columns. The frame may be used until the context ends."""

    def delivered(self, newest: Newest) -> tuple[Delivered, str]:
        """Whether the topic has all changes that the last reading saw, and in words how far it is.

        :param newest: what messages say that have come since.
        """

    def close(self) -> None:
        """Close connections."""


class SparkTable:
    """A table that Spark reads."""

    is_live = False

    def __init__(self, spark: SparkSession, name: str) -> None:
        self.name = name
        self._spark = spark
        try:
            self._frame = spark.table(name)
        except JAVA_ERRORS as error:
            reason = java_message(error).partition("\n")[0]
            raise ConfigError(
                f"verify.spark_table: Spark can't read {name}: {reason}. Write a table as in Spark SQL, such as "
                "catalog.namespace.table or parquet.`/path`."
            ) from None

    def columns(self) -> Mapping[str, Selected]:
        return {field.name: Selected("", Kind.SPARK, dtype=field.dataType) for field in self._frame.schema}

    def unknown(self) -> Mapping[str, str]:
        return {}

    @contextmanager
    def reading(self, columns: Sequence[str], keys: Keys | None) -> Iterator[SourceRows]:
        # named anew: a table of a catalog is read as it is now, as after changes since the last reading
        yield SourceRows(self._spark.table(self.name).select(*map(quoted, columns)), "")

    def delivered(self, newest: Newest) -> tuple[Delivered, str]:
        return Delivered.UNKNOWN, "a table doesn't tell"

    def close(self) -> None:
        return
