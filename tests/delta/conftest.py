"""A Spark session with Delta Lake. Its catalog isn't Delta's: the sink must not need that."""

import os
from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from tests.services.jars import ivy_to_itself


@pytest.fixture(scope="session")
def delta_spark() -> Iterator[SparkSession]:
    active = SparkSession.getActiveSession()
    if active is not None:
        yield active
        return
    with ivy_to_itself():
        started = session()
    yield started
    started.stop()


def session() -> SparkSession:
    """A new session, in tests and in the processes that they start."""
    packages = {
        "3": "io.delta:delta-spark_2.12:3.3.3",
        "4.0": "io.delta:delta-spark_4.0_2.13:4.4.0",
        "4.1": "io.delta:delta-spark_4.1_2.13:4.4.0",
    }
    version = __import__("pyspark").__version__
    package = next(found for prefix, found in packages.items() if version.startswith(prefix))
    builder = SparkSession.builder.master("local[2]").appName("delta")
    settings = {
        "spark.jars.packages": package,
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": os.environ.get(
            "SPARK_CATALOG", "org.apache.spark.sql.delta.catalog.DeltaCatalog"
        ),
        "spark.databricks.delta.snapshotPartitions": "2",
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
