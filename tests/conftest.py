"""One Spark session for all tests of a process: a JVM takes seconds to start, and a process can have only one.
Temporary files, warehouses among them, are in memory where there is room.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.sql import SparkSession

from sink import redaction
from sink.config import Config
from sink.databases.mysql import MySQL
from sink.databases.postgres import Postgres
from sink.spark import session
from sink.spark import versions as spark_versions
from tests import memory_folder
from tests.memory_folder import MemoryFolder
from tests.stack.jars import delta_jars, ivy_to_itself

if TYPE_CHECKING:
    from tests.stack.kafka import Kafka

pytest_plugins = ["tests.faults.plugin", "tests.tiers"]

# Spark's scripts give these options to each JVM that this process and its children start. Tests run most of Spark's
# code only a few times, so the second compiler and more collector threads would cost more than they save. With one
# compiler the JVM has room for 48 MB of compiled code. That is full after some minutes, and from then on the JVM throws
# code away and compiles it again: a quarter of all time.
os.environ["SPARK_SUBMIT_OPTS"] = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ReservedCodeCacheSize=512m"


def _in_memory() -> MemoryFolder | None:
    """A folder in memory for this process and its children; None if the user says where, or there is no room."""
    if "TMPDIR" in os.environ or not os.access(memory_folder.MEMORY, os.W_OK):
        return None
    memory_folder.remove_left()
    if not memory_folder.has_room():
        return None
    folder = memory_folder.claim()
    os.environ["TMPDIR"] = str(folder.path)
    tempfile.tempdir = None  # found anew
    return folder


_temporary = _in_memory()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that take minutes come first: of two processes, the one that is done takes tests over from the other's end.
    So the last ones are short, and tests of faults, which share servers, stay together.
    """
    items.sort(key=lambda item: "faults" not in item.path.parts and item.get_closest_marker("timeout") is None)


def pytest_sessionfinish(exitstatus: int) -> None:
    """What failed tests left is kept until the next run."""
    if _temporary is not None and exitstatus == 0:
        shutil.rmtree(_temporary.path, ignore_errors=True)


@pytest.fixture(autouse=True)
def _no_secret_of_another_test() -> Iterator[None]:
    """A process knows the secrets of one configuration; a process of tests would know those of hundreds."""
    known = redaction._known
    redaction._known = redaction._Known()
    yield
    redaction._known = known


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A session as `rowdelta run` would start it, with Iceberg, Kafka's source and a hadoop catalog `lake`.

    It has Delta Lake too: `spark.read.format("delta")`, SQL on ``delta.`path` `` and tables of Spark's own catalog.

    Tests that need another catalog add it: `spark.conf.set("spark.sql.catalog.X", …)` works while X hasn't been used.
    """
    folder = tmp_path_factory.mktemp("spark")
    has_iceberg = spark_versions.installed().known.iceberg is not None
    config = Config.model_validate(
        {
            "sink": {"id": "tests", "checkpoint": str(folder / "state")},
            # Kafka, so that the session has the packages for it too
            "source": {"type": "kafka", "format": "row-kind", "options": {"kafka.bootstrap.servers": "nowhere:9092"}},
            "catalogs": {
                "lake": {"type": "hadoop" if has_iceberg else "delta", "warehouse": str(folder / "warehouse")}
            },
            "tables": [{"source": "none", "target": "lake.tests.none", "key": ["id"], "columns": {"id": "bigint"}}],
            "spark": {
                "spark.master": "local[2]",
                # for the JDBC catalog and for verify; drivers must be on the class path from the start
                "spark.jars.packages": ",".join(["org.xerial:sqlite-jdbc:3.50.3.0", Postgres.package, MySQL.package]),
                "spark.driver.extraClassPath": ":".join(map(str, delta_jars())),
                "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
                "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
                # Delta's default of 50 tasks to read a log is made for clusters
                "spark.databricks.delta.snapshotPartitions": "2",
                # tasks of VACUUM; the default is 10,000
                "spark.sql.sources.parallelPartitionDiscovery.parallelism": "2",
                "spark.driver.memory": "2g",
                # fewer collections: a query's garbage is gone at its end, and classes are hundreds of MB
                "spark.driver.extraJavaOptions": "-Xmn600m -XX:MetaspaceSize=512m",
                "spark.driver.bindAddress": "127.0.0.1",
                "spark.driver.host": "127.0.0.1",
                "spark.ui.enabled": "false",
                "spark.sql.shuffle.partitions": "2",
                "spark.sql.warehouse.dir": str(folder / "spark-warehouse"),
                # hundreds of short queries: keep neither their history nor their generated classes' compile times high
                "spark.sql.ui.retainedExecutions": "1",
                "spark.sql.streaming.numRecentProgressUpdates": "1",
                "spark.sql.streaming.ui.enabled": "false",
            },
        }
    )
    with ivy_to_itself():
        started = session.start(config)
    yield started
    started.stop()


@pytest.fixture(scope="session")
def kafka() -> Iterator["Kafka"]:
    """A broker for all tests of a process whose topics have names of their own."""
    from tests.stack.kafka import running_kafka

    with running_kafka() as broker:
        yield broker


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A temporary folder of this run of the tests, the same in all processes of it."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    folder.mkdir(exist_ok=True)
    return folder
