"""Spark for tests of Delta tables."""

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

INTERPRETED = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    # a query is planned once, and not again after each of its stages
    "spark.sql.adaptive.enabled": "false",
    # small files are read by one task: each task gets all of a query's expressions, and that takes longer than reading
    "spark.sql.files.minPartitionNum": "1",
    "spark.databricks.delta.snapshotPartitions": "1",
}
"""Delta's many queries are large, and the tests' tables are small: a third of all time went into generated code. What
runs in processes of its own, and the tests of Iceberg tables, have it."""


@pytest.fixture(scope="package")
def spark(spark: SparkSession) -> Iterator[SparkSession]:
    """The session of all tests, with expressions that are interpreted and not compiled."""
    before = {name: spark.conf.get(name, None) for name in INTERPRETED}
    for name, value in INTERPRETED.items():
        spark.conf.set(name, value)
    yield spark
    for name, text in before.items():
        if text is None:
            spark.conf.unset(name)
        else:
            spark.conf.set(name, text)
