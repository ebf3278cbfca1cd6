"""The Spark session: packages that match the installed Spark, catalogs from the configuration, settings the sink relies
on.
"""

import os
import re
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkRuntimeError
from pyspark.errors.exceptions.captured import CapturedException
from pyspark.sql import SparkSession

from sink import archive, interrupts, jars, spark_versions
from sink.config import Config
from sink.errors import ConfigError, TemporaryError
from sink.jars import Jar
from sink.java_errors import java_class, java_message
from sink.redaction import is_secret, masked, spark_pattern

_TOLD_TWICE = (
    "org.apache.spark.executor.Executor",
    "org.apache.spark.scheduler.TaskSetManager",
    "org.apache.spark.util.Utils",
)
"""Loggers of the driver that print, with stacks of a hundred lines each, what also reaches us as an exception. That of
the micro-batches does too; its name depends on Spark's version."""
WORKERS_KEEP_MEMORY = {
    "spark.executorEnv.MALLOC_MMAP_THRESHOLD_": str(64 * 1024 * 1024),
    "spark.executorEnv.MALLOC_TRIM_THRESHOLD_": str(256 * 1024 * 1024),
}
"""For glibc in Python workers: what a batch of records took is kept for the next. By default it is returned and asked
for again, and the system clears each page of it: two thirds of a worker's page faults, and half of what it spends in
the kernel."""
_REDACTION = "spark.redaction.regex"
_ICEBERG_CATALOG = "org.apache.iceberg.spark.SparkCatalog"
LOCAL_FILES = "com.globalmentor:hadoop-bare-naked-local-fs:0.1.0"
_LOCAL_FILE_SYSTEM = "com.globalmentor.apache.hadoop.fs.BareLocalFileSystem"


def packages(config: Config) -> list[str]:
    """Maven coordinates the job needs: Iceberg's runtime, Kafka's source if it is used, and the user's own."""
    version = spark_versions.installed()
    needed = [version.iceberg_runtime]
    if config.source.type == "kafka":
        needed.append(version.kafka_connector)
    own = [p.strip() for p in config.spark.get("spark.jars.packages", "").split(",") if p.strip()]
    return [*needed, *(p for p in own if p not in needed)]


def settings(config: Config) -> dict[str, str]:
    """All Spark settings of the job. The user's `spark:` section wins over defaults, not over what
    correctness needs.
    """
    defaults = {
        "spark.master": "local[*]",
        "spark.app.name": f"rowdelta {config.sink.id}",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "32768",
        # below 2^31-1 Spark 4 adds up the size of all columns after every row, which takes longer than to write the row
        "spark.sql.execution.arrow.maxBytesPerBatch": str(2**31 - 1),
        "spark.python.worker.reuse": "true",
        **WORKERS_KEEP_MEMORY,
    }
    if config.source.type == "files":
        # what it costs to open a file is added up and then not looked at: many small files, or two of 4 MB, would be
        # one task's
        defaults["spark.files.openCostInBytes"] = "1"
    if config.source.type == "kafka":
        # Spark keeps a connected consumer for each partition of a topic that it has read, by default 64: with more,
        # each micro-batch connects anew, which takes longer than all else that it does for a table
        defaults["spark.kafka.consumer.cache.capacity"] = "500"
    needed = {
        "spark.sql.session.timeZone": "UTC",
        "spark.jars.packages": ",".join(packages(config)),
        _REDACTION: spark_pattern(config.spark.get(_REDACTION)),
    }
    if (defaults | config.spark)["spark.master"].startswith("local"):
        needed["spark.jars.packages"] += f",{LOCAL_FILES}"
        # of a cluster's machines it isn't known whether the module can be imported before a task has been sent there
        defaults["spark.python.daemon.module"] = "sink.daemon"
        # or tasks of SQL would have a daemon of their own, with this in its environment
        defaults["spark.sql.execution.pyspark.udf.simplifiedTraceback.enabled"] = "false"
    if re.match("file:|(?![a-z0-9+.-]+:)", config.sink.checkpoint):
        # on a local disk, Hadoop's other file API, which is Spark's first choice, forks a `readlink` 16 times a
        # micro-batch
        defaults["spark.sql.streaming.checkpointFileManagerClass"] = spark_versions.installed().local_checkpoints
    catalogs = {}
    for name, properties in config.catalogs.items():
        prefix = f"spark.sql.catalog.{name}"
        catalogs[prefix] = _ICEBERG_CATALOG
        # foreachBatch runs in a cloned session; a cached table would be stale in one of the two
        catalogs[f"{prefix}.cache-enabled"] = "false"
        catalogs |= {f"{prefix}.{key}": value for key, value in properties.items()}
    return defaults | dict(config.spark) | catalogs | needed


def start(config: Config, *, short: bool = False, training: Path | None = None) -> SparkSession:
    """The session of `spark-submit` if there is one, else a new one.

    :param short: its JVM will live for seconds to minutes, as for `rowdelta check` and in tests.
    :param training: where its JVM writes its classes when it ends (`sink.archive`).
    :raises ConfigError: a session exists and lacks the packages, or the sink can't work on this Spark.
    """
    spark_versions.check(config.spark)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    options = settings(config)
    if "PYSPARK_GATEWAY_PORT" in os.environ or SparkSession.getActiveSession() is not None:
        # under spark-submit, what it was started with wins: master, memory, packages
        options = {k: v for k, v in options.items() if k.startswith("spark.sql.")}
        if SparkContext._active_spark_context is None:
            SparkContext._ensure_initialized()  # only then a SparkConf knows what spark-submit was given
            options[_REDACTION] = spark_pattern(SparkConf().get(_REDACTION, None))
        spark = _created(options)
    else:
        ours = jars.are_ours(options)
        resolved: Sequence[Jar] = (jars.recorded(options) if ours else None) or ()
        given = {k: v for k, v in options.items() if k != "spark.jars.packages"} if resolved else options
        with archive.launching(options, resolved, short=short, training=training):
            spark = _created(given)
        if ours and not resolved:
            jars.record(options, spark.sparkContext.getConf().get("spark.jars", "") or "")
    if "spark.sql.shuffle.partitions" not in config.spark and not _is_set(spark, "spark.sql.shuffle.partitions"):
        spark.conf.set("spark.sql.shuffle.partitions", str(spark.sparkContext.defaultParallelism))
    spark.sparkContext.setLogLevel("ERROR")
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    if "spark.log.level" not in config.spark and _has_class(jvm, "org.apache.logging.log4j.core.config.Configurator"):
        log4j = jvm.org.apache.logging.log4j
        for name in (*_TOLD_TWICE, spark_versions.installed().micro_batches):
            log4j.core.config.Configurator.setLevel(name, log4j.Level.OFF)
    if not _has_class(jvm, "org.apache.iceberg.spark.SparkCatalog"):
        raise ConfigError(
            "Spark was started without Iceberg. Start it with\n"
            f"  spark-submit --packages {','.join(packages(config))} …"
        )
    speed_up_local_files(spark)
    return spark


def start_workers(spark: SparkSession) -> threading.Thread:
    """Have Spark start its Python workers meanwhile, which takes a second or two. The first tasks find them there.

    Nothing depends on it: if it fails, so will they, and say why.
    """

    def run() -> None:
        with suppress(Exception):
            context = spark.sparkContext
            # a function that is pickled by its name and imported without the driver's modules
            context.parallelize(range(context.defaultParallelism), context.defaultParallelism).map(bool).count()

    thread = threading.Thread(target=run, name="rowdelta-workers", daemon=True)
    thread.start()
    return thread


def warm_later(config: Config, path: Path) -> None:
    """Make the archive of classes for the next run, unless it is there or the JVM wasn't ours.

    :param path: of the configuration.
    """
    options = settings(config)
    if "PYSPARK_GATEWAY_PORT" not in os.environ and jars.are_ours(options):
        archive.make_later(path, archive.find(options, jars.recorded(options) or ()))


@contextmanager
def stopping(spark: SparkSession) -> Iterator[None]:
    """Stop it in the end."""
    try:
        yield
    except KeyboardInterrupt:
        raise  # in the middle of a call, after which the JVM can't be asked anything; it is told to end
    except BaseException:
        stop(spark)
        raise
    stop(spark)


def stop(spark: SparkSession) -> None:
    """Stop it, and end its JVM: this process can't start another.

    A signal to the whole process group, as systemd sends it, ends the JVM too; it may be gone before us.
    """
    with suppress(Py4JError, OSError), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # PySpark's, that the JVM is gone
        spark.stop()
    interrupts.jvms.end()


def _created(options: Mapping[str, str]) -> SparkSession:
    """The session that there is, or a new one.

    That is made in a thread of its own: so a signal interrupts nothing but our waiting for it, and PySpark leaves the
    handler of Ctrl-C as it is. Its own talks to the JVM, wherever the main thread is in doing the same.
    """
    builder = SparkSession.builder
    for name, value in options.items():
        builder = builder.config(name, value)
    if SparkSession.getActiveSession() is not None:
        return builder.getOrCreate()

    def create() -> SparkSession:
        # PySpark would put all settings on the JVM's command line, which every user of the machine can read
        SparkContext._ensure_initialized(conf=_for_command_line(options))
        return builder.getOrCreate()

    with interrupts.jvms.noted(), ThreadPoolExecutor(1, "rowdelta-start") as pool:
        try:
            spark = pool.submit(create).result()
        except KeyboardInterrupt:
            interrupts.jvms.terminate()
            raise
        except PySparkRuntimeError as error:
            raise TemporaryError(
                "Spark's JVM ended while it started; what it printed says why. If it could not download packages, run "
                f"again; else correct the section spark. ({error})"
            ) from None
        except (Py4JJavaError, CapturedException) as error:
            refusal = _refused(error)
            interrupts.jvms.end()  # now, so that what it still prints comes before what we have to say
            raise refusal from None
    activate(spark)
    return spark


def _for_command_line(options: Mapping[str, str]) -> SparkConf:
    """What Spark's launcher is told: all but secrets, which the session gets when the JVM runs.

    The launcher itself needs those of the driver's JVM, and those by which it fetches packages and other files.
    """
    needed = ["spark.driver.", "spark.jars", "spark.submit."]
    if any(name.startswith(("spark.jars", "spark.files", "spark.archives")) for name in options.keys() - jars.DECIDING):
        needed.append("spark.hadoop.")
    conf = SparkConf(loadDefaults=False)
    for name, value in options.items():
        if name.startswith(tuple(needed)) or not (is_secret(name) or masked(value) != value):
            conf.set(name, value)
    return conf


def _refused(error: Exception) -> ConfigError | TemporaryError:
    kind, message = java_class(error), java_message(error).split("\n", 1)[0].rstrip(".")
    if kind in ("SparkException", "IllegalArgumentException", "SparkIllegalArgumentException", "NumberFormatException"):
        return ConfigError(f"spark: Spark does not start with these settings: {message}. Correct the section spark.")
    return TemporaryError(f"Spark does not start: {kind}: {message}. Run again, or correct the section spark.")


def speed_up_local_files(spark: SparkSession) -> None:
    """Have Hadoop create local files without forking a process for each, and without a `.crc` file beside each.

    Hadoop's own class for local files sets permissions by a `chmod` that it forks, unless its native library is there.
    That takes 5 to 10 ms a file, and a commit creates five. The class of the package `LOCAL_FILES` asks Java to set
    them. It can't be named in Spark's settings: Spark's launcher opens local files before it knows the package.
    """
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    configuration = spark.sparkContext._jsc.hadoopConfiguration()
    place, files = jvm.java.net.URI("file:///"), jvm.org.apache.hadoop.fs.FileSystem
    if configuration.get("fs.file.impl") is None and _has_class(jvm, _LOCAL_FILE_SYSTEM):
        configuration.set("fs.file.impl", _LOCAL_FILE_SYSTEM)
        files.get(place, configuration).close()  # which takes it out of Hadoop's cache
    local = files.get(place, configuration)
    if jvm.java.lang.Class.forName("org.apache.hadoop.fs.ChecksumFileSystem").isInstance(local):
        local.setWriteChecksum(False)


def activate(spark: SparkSession) -> None:
    """Make it the session of this thread. In a thread without one, Spark takes settings from nowhere and knows no
    catalogs.
    """
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    # the public class: PySpark's own way to name it differs between versions
    jvm.org.apache.spark.sql.SparkSession.setActiveSession(spark._jsparkSession)


def _is_set(spark: SparkSession, name: str) -> bool:
    return bool(spark.sparkContext.getConf().contains(name))


def _has_class(jvm: object, name: str) -> bool:
    from py4j.java_gateway import JavaClass

    found: object = jvm
    for part in name.split("."):
        found = getattr(found, part)
    return isinstance(found, JavaClass)
