"""How `rowdelta check` and `status` look at tables and sources: with Spark, or without its JVM, which takes seconds to
start.

Without the JVM the answer is the same, or there is no answer (`NeedsSparkError`). There is none if the JVM could read
something else: because of Spark's and Hadoop's own settings, catalogs and file systems that only Java has clients for,
or options that mean something else to Kafka's Java client.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sink.config import Config, TableSection
from sink.errors import NeedsSparkError
from sink.sources.directories import Directories
from sink.sources.plain import LocalFolders, PlainTopics, check_options
from sink.sources.source import SourceView
from sink.spark import versions as spark_versions
from sink.spark.archive import OPTION_VARIABLES
from sink.targets.iceberg.metadata import MetadataTables
from sink.targets.loading import Tables

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sink.run.inference import Sample

_READING = re.compile(r"spark\.(sql\.catalog|sql\.defaultCatalog|hadoop|remote|api)\b.*")
"""Settings of Spark that may make it read other tables or files."""
_FILES = re.compile(r"io-impl|(s3|client|gcs|adls)\..+")
"""Properties of catalogs whose files are read by a Java class that Iceberg's runtime may not have."""
_STEERING = (
    "HADOOP_CONF_DIR", "YARN_CONF_DIR", "HADOOP_HOME", "PYSPARK_SUBMIT_ARGS", "SPARK_DIST_CLASSPATH", "CLASSPATH",
)  # fmt: skip
"""Environment variables through which the JVM gets settings, or finds files with settings."""
_SIZE = r"([1-9]\d*g|[5-9]\d\dm|[1-9]\d{3,}m)"
_HARMLESS: Mapping[str, str] = {
    "spark.app.name": r".*",
    "spark.default.parallelism": r"[1-9]\d{0,4}",
    "spark.driver.bindAddress": r"127\.0\.0\.1|localhost",
    "spark.driver.host": r"127\.0\.0\.1|localhost",
    "spark.driver.memory": _SIZE,
    "spark.executor.memory": _SIZE,
    "spark.log.level": r"OFF|ERROR|WARN|INFO",
    "spark.master": r"local(\[(\*|[1-9]\d{0,2})\])?",
    "spark.sql.shuffle.partitions": r"[1-9]\d{0,4}",
    "spark.ui.enabled": r"true|false",
}
"""Settings, and values of them, with which Spark surely starts, and understands types and expressions as by default.
With others `check` has to find out whether it does."""


@dataclass(frozen=True)
class Access:
    """:param spark: the session. None if there is none.
    :param sample: makes a sample of the messages of a table's source.
    :param activate: is called in each thread that asks.
    """

    spark: "SparkSession | None"
    tables: Tables
    source: SourceView
    sample: Callable[[TableSection], "Sample"]
    activate: Callable[[], None]


def by_spark(spark: "SparkSession", config: Config) -> Access:
    from sink.run.pipeline import open_source
    from sink.spark.session import activate
    from sink.targets.catalogs import Catalogs

    source = open_source(spark, config, {})

    def sample(table: TableSection) -> "Sample":
        from sink.run.inference import SparkSample

        return SparkSample(spark, config, table, source)

    return Access(spark, Catalogs(spark, config), source, sample, lambda: activate(spark))


def without_spark(config: Config) -> Access:
    """:raises ConfigError: no session could be started, either.
    :raises NeedsSparkError: what the JVM would read depends on more than the configuration.
    """
    spark_versions.check(config.spark)
    _check_environment(config)
    source: SourceView
    topics = None
    if config.source.type == "kafka":
        check_options(config.source.options)
        source = topics = PlainTopics(config.source.options)
    else:
        source = Directories(config, LocalFolders())

    def sample(table: TableSection) -> "Sample":
        from sink.run.inference import PlainSample

        return PlainSample(config, table, topics)

    return Access(None, MetadataTables(config), source, sample, lambda: None)


def check_settings(config: Config) -> None:
    """:raises NeedsSparkError: only Spark knows whether it starts with these settings and has the catalogs' classes."""
    for name, value in config.spark.items():
        if not re.fullmatch(_HARMLESS.get(name, r"(?!)"), value):
            raise NeedsSparkError(f"spark.{name}")
    for name, properties in config.catalogs.items():
        if properties.get("type", "").lower() == "jdbc" or any(map(_FILES.fullmatch, properties)):
            raise NeedsSparkError(f"catalogs.{name}: its driver, or its client for files")


def _check_environment(config: Config) -> None:
    """:raises NeedsSparkError: there is a session already, or settings that we don't know."""
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        raise NeedsSparkError("started by spark-submit")
    for name in config.spark:
        if _READING.fullmatch(name):
            raise NeedsSparkError(name)
    conf = Path(os.environ.get("SPARK_CONF_DIR") or spark_versions.home() / "conf")
    for file in (conf / "spark-defaults.conf", conf / "core-site.xml", conf / "hdfs-site.xml"):
        if file.exists():
            raise NeedsSparkError(str(file))
    for name in _STEERING:
        if os.environ.get(name):
            raise NeedsSparkError(name)
    for name in OPTION_VARIABLES:
        if "-Dspark." in os.environ.get(name, ""):
            raise NeedsSparkError(name)
