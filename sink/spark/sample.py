"""The first and the last messages of a table's source, read by Spark jobs."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TypeVar

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from changelog.formats.row_kind import Kinds
from changelog.parse.schema_registry import RegistryError
from sink.config import Config, TableSection
from sink.errors import ConfigError, RowdeltaError, TemporaryError
from sink.sources.source import Source
from sink.spark.expressions import any_of
from sink.spark.java_errors import JAVA_ERRORS, java_class, java_message
from sink.spark.versions import to_arrow
from sink.table import inference
from sink.table.inference import (
    LAST,
    infer_fields,
    message_keys,
    of_one_table,
    refuse_others,
    source_tables,
    tell_nothing,
)

T = TypeVar("T")


class SparkSample:
    """Messages of one table's source. Spark reads them when they are needed first.

    `columns` and `message_keys` raise `NotChangesError` if the messages are something else than the format's changes,
    and all raise `TemporaryError` if the schema registry doesn't answer.

    :param source: reads the last messages of each partition.
    """

    def __init__(self, spark: SparkSession, config: Config, table: TableSection, source: Source) -> None:
        self._spark = spark
        self._config = config
        self._table = table
        self._source = source

    def columns(self) -> dict[str, str] | None:
        """Name -> type of each field (`changelog.observed_types.Observed`). None if the source has no messages yet.

        If the messages have a schema, the types are exact. For plain JSON they are a guess, so the user should look at
        them (`rowdelta check`).
        """
        config, table = self._config, self._table
        if config.source.type == "files" and config.source.file_format == "parquet":
            schema = _parquet_schema(self._spark, table)
            known = {Kinds.of(config.source.format_options).column, *table.exclude}
            return {f.name: f.dataType.simpleString() for f in schema.fields if f.name not in known} or None
        types = self._asking_registry(lambda: infer_fields(config, self._changes, _named(table)))
        return {name: dtype for name, dtype in types.items() if name not in table.exclude} or None

    def message_keys(self) -> frozenset[tuple[str, ...]]:
        """Keys that messages state (`MessageKey.fields`): the first messages, and the last ones of each partition."""
        found = self._asking_registry(lambda: message_keys(self._config, self._changes))
        if self._first.num_rows >= inference.SAMPLE:
            last = self._source.last_records(self._table, LAST)
            if last is not None:
                records = of_one_table(self._config, to_arrow(last), self._taken)
                found |= self._asking_registry(lambda: message_keys(self._config, records))
        return found

    def source_tables(self) -> Mapping[str, int]:
        """The source's tables that the messages name, the first one first, with the number of messages of each."""
        return self._asking_registry(lambda: source_tables(self._config, self._first))

    @cached_property
    def _taken(self) -> Sequence[str]:
        return self._table.source_tables or list(self.source_tables())[:1]

    @property
    def is_empty(self) -> bool:
        """Whether the source has no messages yet that tell columns: none, or for example only tombstones."""
        return self._asking_registry(lambda: tell_nothing(self._config, self._changes))

    @cached_property
    def _changes(self) -> pa.Table:
        refuse_others(self._config, self._table, self._first)
        return of_one_table(self._config, self._first, self._table.source_tables)

    @cached_property
    def _first(self) -> pa.Table:
        try:
            return to_arrow(_sample(self._table, self._source))
        except (*JAVA_ERRORS, PySparkException):
            found = self._source.check([(self._table, None)], [self._table.id])[0]
            if isinstance(found, RowdeltaError):  # there is no such directory
                raise found from None
            raise

    def _asking_registry(self, question: Callable[[], T]) -> T:
        try:
            return question()
        except RegistryError as error:
            raise TemporaryError(f"{self._table.target}: {error}. Nothing was applied; run again.") from error


def _named(table: TableSection) -> set[str]:
    """Columns that the configuration names."""
    return {*table.key, *(field.column for field in table.partition_fields), *table.types}


def _parquet_schema(spark: SparkSession, table: TableSection) -> StructType:
    try:
        return spark.read.parquet(table.source).schema
    except JAVA_ERRORS as error:
        text = java_message(error)
        if java_class(error) != "AnalysisException" and "not a Parquet file" not in text:
            raise
        raise ConfigError(
            f"{table.target}: no columns can be inferred from {table.source}: {text.strip().splitlines()[0]} Correct "
            "tables[].source or source.options.path_format, or add columns."
        ) from None


def _sample(table: TableSection, source: Source) -> DataFrame:
    frame = source.records(table)
    if table.other_tables == "ignore" and table.source_tables:
        frame = frame.where(_may_be_of(table.source_tables))
    return frame.limit(inference.SAMPLE)


def _may_be_of(patterns: Sequence[str]) -> Column:
    """Whether messages may be of the source's tables that an entry takes, which may come late in the topic: they have
    the longest part of the table's name without wildcards. Who decodes them knows exactly.
    """
    names = (name.rpartition(".")[2] for name in patterns)
    parts = [max(re.findall(r"[\w $-]+", name, re.ASCII), key=len, default="") for name in names]
    return any_of([F.contains("value", F.lit(part.encode())) for part in parts])
