"""What `rowdelta verify` compares a table with: a database, or a table that Spark reads.

A reading of a source is of one point in its history. It is taken as fast as possible, so that no transaction stays open
in the database while the sink catches up.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from pyspark.sql import DataFrame, SparkSession

from sink.errors import ConfigError
from sink.spark.expressions import quoted
from sink.spark.java_errors import JAVA_ERRORS, java_message
from sink.verify.conversion import Kind, Selected


class Delivered(Enum):
    """Whether the topic has all changes that a reading saw."""

    YES = auto()
    TO_CONNECTOR = auto()
    """The database has given them to the connector, which needs some time to write them."""
    NOT_YET = auto()
    UNKNOWN = auto()
    """The database doesn't tell."""


@dataclass(frozen=True)
class Keys:
    """Only rows with these keys are wanted. A source may give others too.

    :param columns: the key's columns in the source.
    :param values: their values as text, one tuple a key.
    """

    columns: Sequence[str]
    values: Sequence[tuple[str, ...]]


@dataclass(frozen=True)
class SourceRows:
    """Rows of one point in the source's history.

    :param frame: has a column for each one that was asked for, of its own name.
    :param position: the point, in words: an LSN, a GTID. Empty if the source has none.
    """

    frame: DataFrame
    position: str


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

    def delivered(self) -> tuple[Delivered, str]:
        """Whether the topic has all changes that the last reading saw, and in words how far it is."""

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

    def delivered(self) -> tuple[Delivered, str]:
        return Delivered.UNKNOWN, "a table doesn't tell"

    def close(self) -> None:
        return
