"""Columns of a table that nobody described, from the messages of its source."""

from collections.abc import Mapping

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from changelog import formats
from changelog.changes import RAW_SCHEMA, Changes
from changelog.decoding import merged_types
from changelog.row_kind import Kinds
from changelog.schema_registry import RegistryError
from changelog.spec import ChangelogSpec
from changelog.values import spark_type
from sink.config import Config, TableSection
from sink.errors import ConfigError, TemporaryError
from sink.iceberg import JAVA_ERRORS, java_class, java_message
from sink.spark_versions import to_arrow

SAMPLE = 1000
"""Messages looked at, from the beginning of the source."""


def infer_columns(spark: SparkSession, config: Config, table: TableSection) -> dict[str, str] | None:
    """Name -> Spark SQL type of each field; None if the source has no messages yet.

    A schema that comes with the messages says it exactly; of plain JSON the types are a guess, so it is worth a look
    (`rowdelta check`).

    :raises TemporaryError: the schema registry doesn't answer.
    """
    if config.source.type == "files" and config.source.file_format == "parquet":
        schema = _parquet_schema(spark, table)
        known = {Kinds.of(config.source.format_options).column, *table.exclude}
        return {f.name: f.dataType.simpleString() for f in schema.fields if f.name not in known} or None
    sample = to_arrow(_sample(spark, config, table))
    try:
        types = infer_fields(config, sample)
    except RegistryError as error:
        raise TemporaryError(f"{table.target}: {error}. Nothing was applied; run again.") from error
    return {name: dtype for name, dtype in types.items() if name not in table.exclude} or None


def _parquet_schema(spark: SparkSession, table: TableSection) -> T.StructType:
    try:
        return spark.read.parquet(table.source).schema
    except JAVA_ERRORS as error:
        text = java_message(error)
        if java_class(error) != "AnalysisException" and "not a Parquet file" not in text:
            raise
        raise ConfigError(
            f"{table.target}: no columns can be inferred from {table.source}: {text.strip().splitlines()[0]} Correct "
            "tables[].source or "
            "source.options.path_format, or add columns."
        ) from None


def infer_fields(config: Config, records: pa.Table) -> dict[str, str]:
    """The same of raw records (`RAW_SCHEMA`)."""
    decoder = formats.find(config.source.format)(
        ChangelogSpec((), (), options=config.source.format_options, schema_changes="evolve")
    )
    found: Mapping[str, str] = {}
    for batch in records.cast(RAW_SCHEMA).to_batches():
        for changes in decoder.changes(batch):
            if isinstance(changes, Changes):
                seen = {name: spark_type(wire).simpleString() for name, wire in changes.unknown.items()}
                found = merged_types(found, seen)
    return dict(found)


def _sample(spark: SparkSession, config: Config, table: TableSection) -> DataFrame:
    options = {name: v for name, v in config.source.options.items() if name.lower() not in _OWN}
    if config.source.type == "files":
        absent = {name: F.lit(None).cast(_SQL[name]).alias(name) for name in RAW_SCHEMA.names}
        absent["value"] = F.col("value").cast("binary").alias("value")
        return spark.read.text(table.source).limit(SAMPLE).select(*absent.values())
    frame = spark.read.format("kafka").options(**options).option("subscribe", table.source).load()
    return frame.select(F.col("topic").alias("source"), *RAW_SCHEMA.names[1:]).limit(SAMPLE)


_OWN = {
    "subscribe",
    "startingoffsets",
    "startingtimestamp",
    "startingoffsetsbytimestamp",
    "maxoffsetspertrigger",
    "path_format",
}
_SQL = {
    "source": "string",
    "partition": "int",
    "offset": "bigint",
    "timestamp": "timestamp",
    "key": "binary",
    "value": "binary",
}
