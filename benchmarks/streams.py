"""What all sinks under test share: one Spark session, the stream that reads a workload's files, and the trigger times.

The session has the settings that any user of a small machine would give it, and none that favours a sink; a sink's own
settings belong to its module.
"""

import os
import sys
from itertools import pairwise
from pathlib import Path
from time import perf_counter

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from benchmarks.workload import SPARK_CHANGE_SCHEMA
from sink.config import Config
from sink.run.pipeline import Pipeline
from sink.spark import session
from sink.spark import versions as spark_versions
from sink.table.observer import BatchStarted, Committed, Event, Observer, RewriteDone, RewriteKind, nobody

CATALOG = "bench"
_COMPACTION: RewriteKind = "minor compaction"
_ICEBERG = "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions"


def build_session(
    warehouse: Path,
    cores: int = 2,
    driver_memory: str = "8g",
    *,
    with_delta: bool = False,
    with_kafka: bool = False,
) -> SparkSession:
    """Start a local Spark with an Iceberg hadoop catalog named CATALOG in the folder `warehouse`.

    :param with_delta: the session can read and write Delta tables too.
    :param with_kafka: the session can read and write topics too.
    """
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder
    for name, value in session.WORKERS_KEEP_MEMORY.items():  # as `rowdelta run` sets it
        builder = builder.config(name, value)
    installed, extensions = spark_versions.installed(), [_ICEBERG]
    packages = [installed.iceberg_runtime, session.LOCAL_FILES]
    if with_kafka:
        packages.append(installed.kafka_connector)
    if with_delta:
        packages += installed.delta_packages
        extensions.append("io.delta.sql.DeltaSparkSessionExtension")
        builder = builder.config("spark.jars.excludes", ",".join(installed.known.delta_brings))
        # as `rowdelta run` sets it
        builder = builder.config("spark.sql.catalog.spark_catalog", "org.apache.spark.sql.delta.catalog.DeltaCatalog")
        builder = builder.config("spark.databricks.delta.snapshotPartitions", cores)
        builder = builder.config("spark.databricks.delta.allFilesInCrc.enabled", value=False)
    spark = (
        builder.appName("rowdelta benchmarks")
        .master(f"local[{cores}]")
        .config("spark.driver.memory", driver_memory)
        .config("spark.jars.packages", ",".join(packages))
        .config("spark.sql.extensions", ",".join(extensions))
        .config(f"spark.sql.catalog.{CATALOG}", "org.apache.iceberg.spark.SparkCatalog")
        .config(f"spark.sql.catalog.{CATALOG}.type", "hadoop")
        .config(f"spark.sql.catalog.{CATALOG}.warehouse", str(warehouse.absolute()))
        # foreachBatch runs in a cloned session: a cached table of the outer one would not see its commits.
        .config(f"spark.sql.catalog.{CATALOG}.cache-enabled", "false")
        .config("spark.sql.shuffle.partitions", cores)
        .config("spark.sql.session.timeZone", "UTC")
        # as `rowdelta run` sets them: static settings, which nothing else here looks at
        .config("spark.files.openCostInBytes", "1")
        .config("spark.python.daemon.module", "sink.spark.daemon")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .getOrCreate()
    )
    # for the sink and what it is compared with alike
    session.speed_up_local_files(spark)
    session.let_workers_keep_columns(spark)
    return spark


def read_changes(
    spark: SparkSession, source: Path, files_per_batch: int = 2, schema: str = SPARK_CHANGE_SCHEMA
) -> DataFrame:
    """Return the stream of change rows from the files in `source`, `files_per_batch` of them in a micro-batch."""
    source.mkdir(parents=True, exist_ok=True)
    return spark.readStream.schema(schema).option("maxFilesPerTrigger", files_per_batch).parquet(str(source))


def run_available(writer: DataStreamWriter, checkpoint: Path) -> list[float]:
    """Run a stream over all files that are there, and return the seconds of its micro-batches in order: listing files,
    planning, the sink, write-ahead and commit log (`triggerExecution`).

    At most 100 micro-batches (`spark.sql.streaming.numRecentProgressUpdates`) are remembered by a query.
    """
    query = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
    query.awaitTermination()
    batches = [progress.durationMs for progress in query.recentProgress if "addBatch" in progress.durationMs]
    return [milliseconds["triggerExecution"] / 1000 for milliseconds in batches]


class TimedPipeline(Pipeline):
    """A pipeline whose micro-batches can be asked for after it has run.

    Spark's own micro-batch may be several here: it has all files that wait, and the sink applies them in parts. So a
    micro-batch lasts from its beginning to the next one's, which has its planning; the last one to its last commit, or
    to the end of the minor compaction after it.
    Not by a `StreamingQueryListener`: PySpark makes Python objects of its events in thousands of calls to the JVM, with
    a third of a core's time, in which the next micro-batch runs.
    """

    def __init__(self, spark: SparkSession, config: Config, observer: Observer = nobody) -> None:
        self._begun: list[float] = []
        self._working: set[str] = set()  # tables of the micro-batch in progress
        self._done = 0.0

        def hear(event: Event) -> None:
            if isinstance(event, BatchStarted):
                if not self._begun or event.table in self._working:
                    self._begun.append(perf_counter())
                    self._working.clear()
                self._working.add(event.table)
            elif isinstance(event, Committed) or (isinstance(event, RewriteDone) and event.kind == _COMPACTION):
                self._done = perf_counter()
            observer(event)

        super().__init__(spark, config, hear)

    @property
    def batch_seconds(self) -> list[float]:
        """Of each micro-batch, in order. A stage that waits for the next trigger's time counts."""
        return [end - begin for begin, end in pairwise([*self._begun, self._done])]
