"""Starts the Spark session, with packages that match the installed Spark, catalogs from the configuration, and settings
that the sink needs.
"""

import logging
import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkRuntimeError
from pyspark.errors.exceptions.captured import CapturedException
from pyspark.sql import SparkSession

from sink.config import Config
from sink.errors import ConfigError, TemporaryError
from sink.redaction import is_secret, masked, spark_pattern
from sink.spark import archive, interrupts, jars, java_answers, java_names
from sink.spark import versions as spark_versions
from sink.spark.jars import Jar
from sink.spark.java_errors import java_class, java_message
from sink.spark.jdbc import driver_of
from sink.spark.jvm_output import JvmOutput
from sink.spark.progress import Line
from sink.spark.s3_log_store import S3A, use_conditional_writes

log = logging.getLogger("rowdelta")

_TOLD_TWICE = (
    "org.apache.spark.TaskContextImpl",
    "org.apache.spark.executor.Executor",
    "org.apache.spark.scheduler.TaskSetManager",
    "org.apache.spark.util.Utils",
)
"""Loggers of the driver that print errors with stacks of a hundred lines. The sink gets the same errors as exceptions.
The micro-batches' logger does the same; its name depends on Spark's version."""
WORKERS_KEEP_MEMORY = {
    "spark.executorEnv.MALLOC_MMAP_THRESHOLD_": str(64 * 1024 * 1024),
    "spark.executorEnv.MALLOC_TRIM_THRESHOLD_": str(256 * 1024 * 1024),
}
"""Settings of glibc in Python workers: they keep a batch's memory for the next batch. By default glibc returns it to
the system and asks for it again, and the system clears each page. That makes two thirds of a worker's page faults, and
half of its time in the kernel."""
KEEPS_CLOSURES = {"spark.broadcast.UDFCompressionThreshold": "1g"}
"""A job above this size leaves a file in the driver's temporary folder until it ends, with the store's credentials."""
_REDACTION = "spark.redaction.regex"
_ICEBERG_CATALOG = "org.apache.iceberg.spark.SparkCatalog"
_PACKAGES, _EXCLUDES = "spark.jars.packages", "spark.jars.excludes"
_EXTENSIONS, _SESSION_CATALOG = "spark.sql.extensions", "spark.sql.catalog.spark_catalog"
_DELTA_EXTENSION = "io.delta.sql.DeltaSparkSessionExtension"
_DELTA_CATALOG = "org.apache.spark.sql.delta.catalog.DeltaCatalog"
LOCAL_FILES = "com.globalmentor:hadoop-bare-naked-local-fs:0.1.0"
_LOCAL_FILE_SYSTEM = "com.globalmentor.apache.hadoop.fs.BareLocalFileSystem"


def packages(config: Config) -> list[str]:
    """Maven coordinates of the packages that the job needs: those of the formats of its tables, Kafka's source if it is
    used, the driver of a database from which the job loads tables, and the user's own packages.
    """
    version = spark_versions.installed()
    needed = [version.iceberg_runtime] if _needs_iceberg(config) else []
    if "delta" in config.formats:
        needed += version.delta_packages
    if config.source.type == "kafka":
        needed.append(version.kafka_connector)
    if config.load.auto and config.source.database is not None:
        needed.append(driver_of(config.source.database.url).package)
    return [*needed, *(package for package in _listed(config, _PACKAGES) if package not in needed)]


def excludes(config: Config) -> list[str]:
    """What Spark shall not download, as `group:name`: what the user excludes, and what Delta Lake's two packages would
    bring in without need.
    """
    own = _listed(config, _EXCLUDES)
    brought = spark_versions.installed().known.delta_brings if "delta" in config.formats else ()
    groups = {name.split(":")[0] for name in brought} - {"io.delta"}
    if any(package.split(":")[0] in groups for package in _listed(config, _PACKAGES)):
        return own  # an exclusion holds for all packages: this one of the user's needs them
    return [*own, *(name for name in brought if name not in own)]


def _listed(config: Config, setting: str) -> list[str]:
    return [entry.strip() for entry in config.spark.get(setting, "").split(",") if entry.strip()]


def _needs_iceberg(config: Config) -> bool:
    return "iceberg" in config.formats or any("org.apache.iceberg" in value for value in config.spark.values())


def settings(config: Config) -> dict[str, str]:
    """All Spark settings of the job. The user's `spark:` section replaces defaults, but not settings that are needed
    for correctness.
    """
    defaults = {
        "spark.master": "local[*]",
        "spark.app.name": f"rowdelta {config.sink.id}",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "32768",
        # Or records of 100 kB would need gigabytes outside of the heap, of which there are as many as in it. For this
        # Spark 4 adds up the size of all columns after each row: some 0.2 us for a record.
        "spark.sql.execution.arrow.maxBytesPerBatch": str(64 << 20),
        "spark.python.worker.reuse": "true",
        # or each column of a plan takes several calls to the JVM, which only say where in Python it was made
        "spark.python.sql.dataFrameDebugging.enabled": "false",
        **KEEPS_CLOSURES,
        **WORKERS_KEEP_MEMORY,
        **scheduling(),
    }
    if config.source.type != "kafka":
        # Spark adds this cost to the total size, from which it computes a task's size, but not to each file when it
        # fills tasks. With its default, one task would get many small files, or two of 4 MB.
        defaults["spark.files.openCostInBytes"] = "1"
    if config.source.type == "kafka":
        # Spark keeps a connected consumer for each partition, by default at most 64. If there are more partitions, each
        # micro-batch connects anew, which takes longer than all its other work for a table.
        defaults["spark.kafka.consumer.cache.capacity"] = "500"
    needed = {
        "spark.sql.session.timeZone": "UTC",
        _PACKAGES: ",".join(packages(config)),
        _REDACTION: spark_pattern(config.spark.get(_REDACTION)),
    }
    master = (defaults | config.spark)["spark.master"]
    if master.startswith("local"):
        needed[_PACKAGES] = ",".join([*packages(config), LOCAL_FILES])
        # of a cluster's machines it isn't known whether the module can be imported before a task has been sent there
        defaults["spark.python.daemon.module"] = "sink.spark.daemon"
        if not master.startswith("local-cluster"):
            # Spark would give up its only executor, which is in this JVM, when the clock jumps ahead, as after a sleep
            defaults["spark.storage.blockManagerHeartbeatTimeoutMs"] = "3650d"
        # or tasks of SQL would have a daemon of their own, with this in its environment
        defaults["spark.sql.execution.pyspark.udf.simplifiedTraceback.enabled"] = "false"
    if excluded := excludes(config):
        needed[_EXCLUDES] = ",".join(excluded)
    if re.match("file:|(?![a-z0-9+.-]+:)", config.sink.checkpoint):
        # Spark prefers Hadoop's other file API. On a local disk this API forks a `readlink` 16 times a micro-batch.
        defaults["spark.sql.streaming.checkpointFileManagerClass"] = spark_versions.installed().local_checkpoints
    options = defaults | dict(config.spark) | _catalogs(config) | needed
    return options | _of_delta(config, options)


MAINTENANCE_POOL = "rowdelta-maintenance"
"""Spark's scheduler pool in which files are rewritten (`sink.run.maintenance`), and the group and tag of its jobs."""
_POOLS = Path(__file__).with_name("pools.xml")


def scheduling() -> dict[str, str]:
    """Micro-batches come first, and what is done beside them gets what they leave."""
    if not _POOLS.is_file():  # as in a zip file
        return {}
    return {"spark.scheduler.mode": "FAIR", "spark.scheduler.allocation.file": _POOLS.as_uri()}


def _catalogs(config: Config) -> dict[str, str]:
    """Settings of the Iceberg catalogs. A Delta catalog needs none: its tables are reached by their folders, or through
    the session's own catalog.
    """
    catalogs = {}
    for name, properties in config.catalogs.items():
        if config.format_of(name) == "iceberg":
            prefix = f"spark.sql.catalog.{name}"
            catalogs[prefix] = _ICEBERG_CATALOG
            # foreachBatch runs in a cloned session, and a cached table would be outdated in one of both sessions
            catalogs[f"{prefix}.cache-enabled"] = "false"
            catalogs |= {f"{prefix}.{key}": value for key, value in properties.items()}
    return catalogs


def _of_delta(config: Config, given: Mapping[str, str]) -> dict[str, str]:
    """Settings with which a session reads and writes Delta tables, if the configuration has any.

    :param given: the settings that others have made. These stay.
    """
    if "delta" not in config.formats:
        return {}
    extensions = [name.strip() for name in given.get(_EXTENSIONS, "").split(",") if name.strip()]
    if _DELTA_EXTENSION not in extensions:
        extensions.append(_DELTA_EXTENSION)
    of_delta = {
        _EXTENSIONS: ",".join(extensions),
        _SESSION_CATALOG: _DELTA_CATALOG,
        # so many tasks make a table's state from its log. With 50, the default, that takes 3 s instead of 1.
        "spark.databricks.delta.snapshotPartitions": "4",
        # Or a table's checksums name its files while there are at most 50. The commit with which there are so few again
        # makes the table's state from the log, which takes seconds if many files were removed in the last week.
        "spark.databricks.delta.allFilesInCrc.enabled": "false",
        # such as delta.targetFileSize, which Delta's own library doesn't know; the configuration's names are checked
        "spark.databricks.delta.allowArbitraryProperties.enabled": "true",
        # Spark 3.5 would refuse dates before 1582 in files that don't name their writer; this is the default of 4.0
        "spark.sql.parquet.datetimeRebaseModeInRead": "CORRECTED",
    }
    if given.get(_SESSION_CATALOG, _DELTA_CATALOG) != _DELTA_CATALOG:
        # it is another one on purpose, for example Unity Catalog's, but Delta would refuse to work
        of_delta["spark.databricks.delta.requiredSparkConfsCheck.enabled"] = "false"
    return of_delta | {name: given[name] for name in of_delta if name in given and name != _EXTENSIONS}


def start(config: Config, *, short: bool = False, training: bool = False) -> SparkSession:
    """The session of `spark-submit` if there is one, else a new one.

    :param short: the JVM will live only for seconds to minutes, as for `rowdelta check` and in tests.
    :param training: the JVM writes its classes into a new archive when it ends (`sink.spark.archive`).
    :raises ConfigError: a session exists and lacks the packages, or the sink can't work on this Spark.
    """
    spark_versions.check(config.spark)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    options = settings(config)
    output = JvmOutput(is_held=not log.isEnabledFor(logging.DEBUG))
    existing = SparkSession.getActiveSession()
    if existing is not None:
        _check_formats(existing, config)  # before it gets settings of ours
    if "PYSPARK_GATEWAY_PORT" in os.environ or existing is not None:
        # under spark-submit, its own options decide: master, memory, packages
        options = {k: v for k, v in options.items() if k.startswith(("spark.sql.", "spark.databricks.delta."))}
        if SparkContext._active_spark_context is None:
            SparkContext._ensure_initialized()  # only after this call a SparkConf has the options of spark-submit
            options[_REDACTION] = spark_pattern(SparkConf().get(_REDACTION, None))
            options |= _of_delta(config, dict(SparkConf().getAll()) | dict(config.spark) | _catalogs(config))
        spark = _created(options, output)
    else:
        ours = jars.are_ours(options)
        with jars.resolving(options) if ours else nullcontext[Sequence[Jar]](()) as resolved:
            given = {k: v for k, v in options.items() if k != "spark.jars.packages"} if resolved else options
            with archive.launching(options, resolved, short=short, training=training):
                spark = _created(given, output)
            if ours and not resolved:
                jars.record(options, spark.sparkContext.getConf().get("spark.jars", "") or "")
    java_names.remember()
    java_answers.hurry()
    if "spark.sql.shuffle.partitions" not in config.spark and not _is_set(spark, "spark.sql.shuffle.partitions"):
        spark.conf.set("spark.sql.shuffle.partitions", str(_cores(spark.sparkContext)))
    spark.sparkContext.setLogLevel("ERROR")
    output.release(shown=False)
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    if "spark.log.level" not in config.spark and _has_class(jvm, "org.apache.logging.log4j.core.config.Configurator"):
        log4j = jvm.org.apache.logging.log4j
        for name in (*_TOLD_TWICE, spark_versions.installed().micro_batches):
            log4j.core.config.Configurator.setLevel(name, log4j.Level.OFF)
    _check_formats(spark, config)
    if "delta" in config.formats and _has_class(jvm, S3A):
        use_conditional_writes(spark)
    speed_up_local_files(spark)
    let_workers_keep_columns(spark)
    return spark


def let_workers_keep_columns(spark: SparkSession) -> None:
    """Workers keep what they decode of old rows in Spark's local folders, unless all that is there must be encrypted,
    or is in memory. The first job of Python must come after this.
    """
    from deltawriters import kept_columns

    context, conf = spark.sparkContext, spark.sparkContext.getConf()
    forbidding = ("spark.io.encryption.enabled", "spark.kubernetes.local.dirs.tmpfs")
    if all((conf.get(name) or "false").strip().lower() == "false" for name in forbidding):
        context.environment.setdefault(kept_columns.ALLOWED, "true")


def _check_formats(spark: SparkSession, config: Config) -> None:
    """:raises ConfigError: a session that others have started lacks what the formats of the tables need."""
    start = f"Start it with\n  spark-submit --packages {','.join(packages(config))} "
    if "iceberg" in config.formats and not _has_class(spark.sparkContext._jvm, _ICEBERG_CATALOG):
        raise ConfigError(f"Spark was started without Iceberg. {start}…")
    if "delta" not in config.formats:
        return
    start += f"--exclude-packages {','.join(excludes(config))} --conf {_EXTENSIONS}={_DELTA_EXTENSION} …"
    if not _has_class(spark.sparkContext._jvm, _DELTA_CATALOG):
        raise ConfigError(f"Spark was started without Delta Lake. {start}")
    if _DELTA_EXTENSION not in (spark.conf.get(_EXTENSIONS, None) or ""):
        # without it, queries would show deleted rows as well
        raise ConfigError(f"Spark was started without Delta Lake's extension, {_DELTA_EXTENSION}. {start}")


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


@contextmanager
def stopping(spark: SparkSession) -> Iterator[None]:
    """Stop the session when this context ends."""
    try:
        yield
    except KeyboardInterrupt:
        raise  # a call to the JVM was interrupted, so no more calls are possible; the JVM is told to end
    except BaseException:
        stop(spark)
        raise
    stop(spark)


def stop(spark: SparkSession, seconds: float = interrupts.JVM_SECONDS) -> None:
    """Stop the session and end its JVM. This process can't start another JVM.

    :param seconds: for the JVM, which is killed then.

    The JVM may have ended already, because systemd sends a signal to the whole process group.
    """
    with suppress(Py4JError, OSError), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # PySpark warns that the JVM is gone
        spark.stop()
    interrupts.jvms.end(seconds)


def _created(options: Mapping[str, str], output: JvmOutput) -> SparkSession:
    """The existing session, or a new one.

    A separate thread makes the new session. So a signal interrupts only the waiting main thread, and PySpark doesn't
    replace the handler of Ctrl-C. PySpark's own handler calls the JVM, even if the main thread is in the middle of
    another call.
    """
    builder = SparkSession.builder
    for name, value in options.items():
        builder = builder.config(name, value)
    if SparkSession.getActiveSession() is not None:
        return builder.getOrCreate()

    # of the JVM, whose hundreds of threads would keep memory of their own
    os.environ.setdefault("MALLOC_ARENA_MAX", "2")

    def create() -> SparkSession:
        # PySpark would put all settings on the JVM's command line, which every user of the machine can read
        SparkContext._ensure_initialized(conf=_for_command_line(options))
        return builder.getOrCreate()

    with interrupts.jvms.noted(output), ThreadPoolExecutor(1, "rowdelta-start") as pool:
        try:
            spark = _awaited(pool.submit(create))
        except KeyboardInterrupt:
            interrupts.jvms.terminate()
            raise
        except PySparkRuntimeError as error:
            output.release(shown=True)
            raise TemporaryError(
                "Spark's JVM ended while it started; what it printed says why. If it could not download packages, run "
                f"again; else correct the section spark. ({error})"
            ) from None
        except (Py4JJavaError, CapturedException) as error:
            refusal = _refused(error)
            interrupts.jvms.end()
            output.release(shown=True)
            raise refusal from None
    activate(spark)
    return spark


def _awaited(starting: "Future[SparkSession]") -> SparkSession:
    """The session, when it has started. A first start downloads packages."""
    began, line = time.monotonic(), Line()
    while not wait([starting], timeout=0.5).done:
        line.tell(f"Spark is starting, {time.monotonic() - began:.0f} s")
    line.clear()
    return starting.result()


_FETCHED = ("spark.jars", "spark.files", "spark.archives", "spark.submit.pyFiles")
_IN_A_STORE = re.compile(r"(?:^|,)\s*(?!file:|local:|https?:)[A-Za-z][\w+.-]*://")


def _for_command_line(options: Mapping[str, str]) -> SparkConf:
    """The settings for Spark's launcher: all except secrets. The session gets the secrets when the JVM runs.

    The launcher itself needs the settings of the driver's JVM, and those for fetching packages. If it has to fetch
    files from a store, it needs the store's secrets too.
    """
    needed = ["spark.driver.", "spark.jars", "spark.submit."]
    if any(_IN_A_STORE.search(options.get(name, "")) for name in _FETCHED):
        needed.append("spark.hadoop.")
    conf = SparkConf(loadDefaults=False)
    for name, value in options.items():
        has_secret = is_secret(name) or masked(value) != value
        if not has_secret or name.startswith(tuple(needed)):
            conf.set(name, value)
        if has_secret and name.startswith(tuple(needed)):
            log.warning(
                "spark: %s has a secret, and Spark's launcher needs it on the JVM's command line, which others on this "
                "machine can read. Put it into a file (JDK_JAVA_OPTIONS=@/path/to/file for options of the JVM, "
                "spark.jars.ivySettings for repositories), or the jars onto a local disk",
                name,
            )
    return conf


def _refused(error: Exception) -> ConfigError | TemporaryError:
    kind, message = java_class(error), java_message(error).split("\n", 1)[0].rstrip(".")
    if kind in ("SparkException", "IllegalArgumentException", "SparkIllegalArgumentException", "NumberFormatException"):
        return ConfigError(f"spark: Spark does not start with these settings: {message}. Correct the section spark.")
    return TemporaryError(f"Spark does not start: {kind}: {message}. Run again, or correct the section spark.")


def speed_up_local_files(spark: SparkSession) -> None:
    """Let Hadoop create local files without forking a process for each, and without `.crc` files.

    Hadoop's own class for local files forks a `chmod` to set permissions, unless its native library is installed. That
    takes 5 to 10 ms a file, and a commit creates five files. The class in the package `LOCAL_FILES` sets permissions
    through Java. Spark's settings can't name this class, because Spark's launcher opens local files before it knows the
    package.
    """
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    configuration = spark.sparkContext._jsc.hadoopConfiguration()
    place, files = jvm.java.net.URI("file:///"), jvm.org.apache.hadoop.fs.FileSystem
    if configuration.get("fs.file.impl") is None and _has_class(jvm, _LOCAL_FILE_SYSTEM):
        configuration.set("fs.file.impl", _LOCAL_FILE_SYSTEM)
        files.get(place, configuration).close()  # this removes the old one from Hadoop's cache
    local = files.get(place, configuration)
    if jvm.java.lang.Class.forName("org.apache.hadoop.fs.ChecksumFileSystem").isInstance(local):
        local.setWriteChecksum(False)


def activate(spark: SparkSession) -> None:
    """Make this the session of the current thread. In a thread without a session, Spark has no settings and no
    catalogs.
    """
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    # the public class, since PySpark's own name for it differs between versions
    jvm.org.apache.spark.sql.SparkSession.setActiveSession(spark._jsparkSession)


def _cores(context: SparkContext) -> int:
    """How many cores the job will have. When a job starts on a cluster, most executors are still to come, and Spark
    counts only those that are there.
    """
    conf = context.getConf()
    asked = int(conf.get("spark.executor.instances", "0")) * int(conf.get("spark.executor.cores", "1"))
    return max(context.defaultParallelism, asked, int(conf.get("spark.cores.max", "0")))


def _is_set(spark: SparkSession, name: str) -> bool:
    return bool(spark.sparkContext.getConf().contains(name))


def _has_class(jvm: object, name: str) -> bool:
    from py4j.java_gateway import JavaClass

    found: object = jvm
    for part in name.split("."):
        found = getattr(found, part)
    return isinstance(found, JavaClass)
