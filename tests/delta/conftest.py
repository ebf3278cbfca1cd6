"""A Spark session with Delta Lake."""

from collections.abc import Iterator, Mapping

import pyspark
import pytest
from pyspark.sql import SparkSession

from tests.services.jars import ivy_to_itself

_PACKAGES = {
    "3.5": "io.delta:delta-spark_2.12:3.3.3",
    "4.0": "io.delta:delta-spark_4.0_2.13:4.4.0",
    "4.1": "io.delta:delta-spark_4.1_2.13:4.4.0",
}
WITH_CATALOG = {"spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog"}
WITHOUT_CATALOG = {"spark.databricks.delta.requiredSparkConfsCheck.enabled": "false"}
"""The session's own catalog may be another one, Iceberg's for instance. Delta has to be told that it is meant so."""


@pytest.fixture(scope="session")
def delta_spark() -> Iterator[SparkSession]:
    active = SparkSession.getActiveSession()
    if active is not None:
        yield active
        return
    with ivy_to_itself():
        started = session(WITH_CATALOG)
    yield started
    started.stop()


def session(catalog: Mapping[str, str]) -> SparkSession:
    """A new session, in tests and in the processes that they start.

    :param catalog: `WITH_CATALOG` or `WITHOUT_CATALOG`.
    """
    package = _PACKAGES[".".join(pyspark.__version__.split(".")[:2])]
    builder = SparkSession.builder.master("local[2]").appName("delta")
    settings = {
        "spark.jars.packages": package,
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        **catalog,
        "spark.databricks.delta.snapshotPartitions": "1",
        "spark.sql.sources.parallelPartitionDiscovery.parallelism": "2",  # tasks of VACUUM; the default is 10,000
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "2",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    for name, value in settings.items():
        builder = builder.config(name, value)
    started = builder.getOrCreate()
    started.sparkContext.setLogLevel("ERROR")
    return started
