"""`rowdelta warm`: makes the archive of the JVM's classes (`sink.spark.archive`).

A JVM does the work of a run: it streams two tiny files into a new table in a temporary folder, one of each format that
the configuration has. When it ends, it writes the classes that it has loaded into the archive.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pyspark.sql import SparkSession

from sink.config import Config
from sink.errors import ConfigError, RowdeltaError
from sink.run.pipeline import Pipeline
from sink.spark import archive, jars, session

_JVM_SECONDS = 120.0
"""Time for the JVM to end. At its end it writes about 15,000 classes."""
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
    yield f"making {found}; this takes half a minute"
    with tempfile.TemporaryDirectory(prefix="rowdelta-warm-") as folder:
        trained = _config(config, Path(folder))
        spark = session.start(trained, training=True)
        try:
            Pipeline(spark, trained).run()
            if any("spark-sql-kafka" in jar.path for jar in packages):
                _load_kafka(spark)
        finally:
            session.stop(spark, _JVM_SECONDS)
    if not found.exists():
        raise RowdeltaError(
            f"this JVM made no archive of its classes, for which {found.parent} needs 200 MB. Spark starts without it, "
            "as before."
        )
    yield "ok"


def _go_on(path: Path) -> None:
    """Go on in another process. A process can start only one JVM, and this one has started it.

    :raises SystemExit: the other process has failed and said why.
    """
    code = subprocess.run([sys.executable, "-m", "sink", "warm", str(path)], check=False).returncode
    if code != 0:
        raise SystemExit(code if code > 0 else 128 - code)  # below 0: ended by this signal


def _config(config: Config, folder: Path) -> Config:
    """A configuration with most of the user's Spark settings, and with its own source and table."""
    records = [{"row_kind": "+U", "id": key, "v": "v", "seq": 1} for key in range(20)]
    text = "".join(json.dumps(record) + "\n" for record in records)
    for name in config.formats:
        (folder / "changes" / name).mkdir(parents=True)
        for number in range(2):
            (folder / "changes" / name / f"{number}.json").write_text(text)
            os.utime(folder / "changes" / name / f"{number}.json", (1_700_000_000 + number,) * 2)
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
                    "source": str(folder / "changes" / catalog),
                    "target": f"{catalog}.shop.warm",
                    "key": ["id"],
                    "columns": {"id": "bigint", "v": "string"},
                    "order_by": ["seq bigint"],
                }
                for catalog in catalogs
            ],
            "spark": own | {"spark.jars.packages": ",".join(session.packages(config))},
        }
    )


def _load_kafka(spark: SparkSession) -> None:
    """Load the classes of Spark's Kafka source, and of clients that call an address where no broker answers."""
    options = {
        "kafka.bootstrap.servers": "127.0.0.1:9",
        "subscribe": "warm",
        "fetchOffset.numRetries": "1",
        "kafka.request.timeout.ms": "400",
        "kafka.default.api.timeout.ms": "500",
    }
    with suppress(Exception):
        spark.read.format("kafka").options(**options).load().count()
