"""`rowdelta warm`: makes the archive of the JVM's classes (`sink.spark.archive`).

A JVM does the work of a run: it streams two tiny files into a new Iceberg table in a temporary folder, and writes to a
Delta table there, each if the configuration has tables of this format. When it ends, it writes the classes that it has
loaded into the archive.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from zipfile import ZipFile

from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

from sink.config import Config
from sink.errors import ConfigError, RowdeltaError
from sink.run.pipeline import Pipeline
from sink.spark import archive, jars, session
from sink.spark.archive import Archive

_JVM_SECONDS = 120.0
"""Time for the JVM to end. At its end it writes about 15,000 classes."""
_KAFKA_SOURCE = "spark-sql-kafka"
_OF_THE_JOB = (
    "spark.app.name",
    "spark.eventLog.",
    "spark.extraListeners",
    "spark.plugins",
    "spark.sql.catalog.",
    "spark.sql.defaultCatalog",
    "spark.sql.queryExecutionListeners",
    "spark.sql.streaming.streamingQueryListeners",
)
"""Settings that this job doesn't take: the user's catalogs, and those who would be told of it as of the user's job."""
_NOBODY = "127.0.0.1:9"


def warm(path: Path, config: Config) -> Iterator[str]:
    """Make the archive for the runs of a configuration. Yields lines that say what happens.

    :param path: the configuration file.
    :param config: its content.
    :raises ConfigError: a run of this configuration can't use an archive.
    :raises RowdeltaError: this JVM can't make one.
    """
    options = session.settings(config)
    if not jars.are_ours(options):
        raise ConfigError(
            "spark: an archive of classes is only for a local master (spark.master: local[…]) whose jars are all named "
            "in spark.jars.packages, with fixed versions. Runs of this configuration start without one."
        )
    packages = jars.recorded(options)
    if packages is None:
        yield "starting Spark, which resolves the packages"
        with session.stopping(session.start(config)):
            packages = jars.recorded(options)
        if packages is None:
            raise RowdeltaError("the jars of the packages can't be remembered: there is no cache folder to write to.")
        _go_on(path)
        return
    found = archive.find(options, packages)
    if found is None:
        raise RowdeltaError("there is no cache folder to write the archive to, or no JVM.")
    if found.exists:
        yield f"{found.path} is there already"
        return
    yield f"making {found.path}; this takes half a minute"
    with archive.making(found) as target:
        if target is not None:
            _make(config, found, target)
    yield "ok"


def _go_on(path: Path) -> None:
    """Go on in another process. A process can start only one JVM, and this one has started it.

    :raises SystemExit: the other process has failed and said why.
    """
    code = subprocess.run([sys.executable, "-m", "sink", "warm", str(path)], check=False).returncode
    if code != 0:
        raise SystemExit(code if code > 0 else 128 - code)  # below 0: ended by this signal


def _make(config: Config, found: Archive, target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="rowdelta-warm-") as folder:
        trained = _config(config, Path(folder))
        spark = session.start(trained, training=target)
        with session.stopping(spark):
            if "iceberg" in trained.formats:
                Pipeline(spark, trained).run()
            if "delta" in trained.formats:
                _load_delta(spark, Path(folder))
            if any(_KAFKA_SOURCE in jar.path for jar in jars.recorded(session.settings(trained)) or ()):
                _load_kafka(spark)
            class_path = _end(spark)
    if target.exists() and not archive.accepted(target, class_path):
        target.unlink()


def _config(config: Config, folder: Path) -> Config:
    """A configuration with most of the user's Spark settings, and with its own source and table."""
    (folder / "changes").mkdir()
    for number in range(2):
        records = [{"row_kind": "+U", "id": key, "v": str(number), "seq": number} for key in range(20)]
        text = "".join(json.dumps(record) + "\n" for record in records)
        (folder / "changes" / f"{number}.json").write_text(text)
        os.utime(folder / "changes" / f"{number}.json", (1_700_000_000 + number,) * 2)
    own = {k: v for k, v in config.spark.items() if not k.startswith(_OF_THE_JOB)}
    types = {"iceberg": "hadoop", "delta": "delta"}
    # the formats decide which jars there are, and the archive is for these
    catalogs = {name: {"type": types[name], "warehouse": str(folder / name)} for name in config.formats}
    return Config.model_validate(
        {
            "sink": {"id": "warm", "checkpoint": str(folder / "state"), "trigger": "available-now"},
            "source": {
                "type": "files",
                "format": "row-kind",
                "options": {"path_format": "json", "maxFilesPerTrigger": "1"},
            },
            "catalogs": catalogs,
            "tables": [
                {
                    "source": str(folder / "changes"),
                    "target": f"{max(catalogs)}.shop.warm",  # Iceberg's, if there is one
                    "key": ["id"],
                    "columns": {"id": "bigint", "v": "string"},
                    "partition_by": ["bucket(2, id)"] if "iceberg" in catalogs else [],
                    "order_by": ["seq bigint"],
                }
            ],
            "spark": own | {"spark.jars.packages": ",".join(session.packages(config))},
        }
    )


def _load_delta(spark: SparkSession, folder: Path) -> None:
    """Load the classes that read and write a Delta table, with deletion vectors and a checkpoint."""
    path = folder / "delta" / "sql"
    spark.sql(f"CREATE TABLE delta.`{path}` (id BIGINT) USING delta TBLPROPERTIES (delta.enableDeletionVectors = true)")
    spark.sql(f"INSERT INTO delta.`{path}` SELECT id FROM range(0, 10, 1, 1)")
    spark.sql(f"DELETE FROM delta.`{path}` WHERE id = 1")
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    jvm.org.apache.spark.sql.delta.DeltaLog.forTable(spark._jsparkSession, str(path)).checkpoint()
    spark.read.format("delta").load(str(path)).collect()


def _load_kafka(spark: SparkSession) -> None:
    """Load the classes of Spark's Kafka source and of Kafka's clients. The clients call an address where no broker
    answers.
    """
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    class_path = str(jvm.java.lang.System.getProperty("java.class.path")).split(os.pathsep)
    (jar,) = [path for path in class_path if _KAFKA_SOURCE in Path(path).name]
    for name in ZipFile(jar).namelist():
        if name.endswith(".class"):
            with suppress(Py4JError):
                jvm.java.lang.Class.forName(name[:-6].replace("/", "."), False, loader)
    deserializer = "org.apache.kafka.common.serialization.ByteArrayDeserializer"
    properties = jvm.java.util.HashMap()
    for name, value in _client(deserializer).items():
        properties.put(name, value)
    with suppress(Py4JError):
        jvm.org.apache.kafka.clients.consumer.KafkaConsumer(properties).close()
    with suppress(Py4JError):
        admin = jvm.org.apache.kafka.clients.admin.Admin.create(properties)
        with suppress(Py4JError):
            admin.listTopics().names().get(500, jvm.java.util.concurrent.TimeUnit.MILLISECONDS)
        admin.close()


def _client(deserializer: str) -> Mapping[str, str]:
    return {
        "bootstrap.servers": _NOBODY,
        "key.deserializer": deserializer,
        "value.deserializer": deserializer,
        "request.timeout.ms": "400",
        "default.api.timeout.ms": "500",
    }


def _end(spark: SparkSession) -> str:
    """Tell the JVM to exit, and wait until it has ended. Returns its class path."""
    gateway = spark.sparkContext._gateway
    assert gateway is not None
    class_path = str(gateway.jvm.java.lang.System.getProperty("java.class.path"))
    process: subprocess.Popen[bytes] = gateway.proc
    spark.stop()
    with suppress(Py4JError, OSError):
        gateway.jvm.java.lang.System.exit(0)
    process.wait(_JVM_SECONDS)
    return class_path
