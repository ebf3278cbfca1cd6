"""All differences between the versions of Spark that the sink runs on.

The version is read from the names of the installed jars. This needs no JVM, and not even an import of PySpark.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sink.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType


@dataclass(frozen=True)
class Known:
    """A minor version of Spark that the suite runs on.

    :param tested: the patch release that the suite runs on.
    :param iceberg: version of Iceberg's runtime. None if there is none yet for this Spark.
    :param delta: version of Delta Lake.
    :param delta_spark: name of Delta Lake's package for Spark, without Scala's version.
    :param delta_brings: what these packages bring in that Spark has itself, or that isn't needed, as `group:name`.
    :param connector: version of Kafka's connector, if it isn't Spark's own.
    :param checkpointing: package of the classes that write checkpoints.
    :param runtime: package of the classes that run streaming queries.
    :param reads_scan_tasks: whether Iceberg's tables take the option `scan-task-set-id`, by which some of their files
        are read. If not, `SparkRewriteTable` is a table of these files.
    """

    tested: str
    iceberg: str | None
    delta: str
    delta_spark: str
    delta_brings: tuple[str, ...]
    connector: str | None = None
    checkpointing: str = "org.apache.spark.sql.execution.streaming"
    runtime: str = "org.apache.spark.sql.execution.streaming"
    reads_scan_tasks: bool = True


_FOR_UNITY = (
    "io.delta:delta-kernel-api",
    "io.delta:delta-kernel-defaults",
    "io.delta:delta-kernel-unitycatalog",
    "io.unitycatalog:unitycatalog-client",
    "io.unitycatalog:unitycatalog-hadoop",
)
"""What Delta Lake needs only for tables whose commits Unity Catalog makes. With what it brings in (Hadoop, for one) it
has 80 MB.
"""

KNOWN = {
    "3.5": Known(
        "3.5.7",
        iceberg="1.11.0",
        delta="3.3.3",
        delta_spark="delta-spark",
        delta_brings=("org.antlr:antlr4-runtime",),
    ),
    "4.0": Known(
        "4.0.2",
        iceberg="1.11.0",
        delta="4.4.0",
        delta_spark="delta-spark_4.0",
        delta_brings=_FOR_UNITY,
        # some repositories lack dependencies of the connectors of later patch releases
        connector="4.0.0",
    ),
    "4.1": Known(
        "4.1.1",
        iceberg="1.12.0",
        delta="4.4.0",
        delta_spark="delta-spark_4.1",
        delta_brings=_FOR_UNITY,
        checkpointing="org.apache.spark.sql.execution.streaming.checkpointing",
        runtime="org.apache.spark.sql.execution.streaming.runtime",
        reads_scan_tasks=False,
    ),
    "4.2": Known(
        "4.2.0",
        iceberg=None,
        delta="4.4.0",
        delta_spark="delta-spark_4.2",
        delta_brings=_FOR_UNITY,
        checkpointing="org.apache.spark.sql.execution.streaming.checkpointing",
        runtime="org.apache.spark.sql.execution.streaming.runtime",
        reads_scan_tasks=False,
    ),
}
"""Minor version -> what is known about it."""
TESTED = KNOWN["4.1"].tested
"""The version that the whole suite runs on."""


@dataclass(frozen=True)
class SparkVersion:
    """An installed Spark.

    :param full: the version, such as 4.0.2, or a vendor's version such as 3.5.5-amzn-1.
    :param scala: the Scala version of its jars, such as 2.13.
    """

    full: str
    scala: str

    @property
    def minor(self) -> str:
        """The minor version, such as 4.0."""
        return ".".join(self.full.split(".")[:2])

    @property
    def known(self) -> Known:
        """:raises ConfigError: the sink isn't known to work on this version."""
        if self.minor not in KNOWN:
            raise ConfigError(
                f"Spark {self.full}: rowdelta does not know this version. It is known to work on Spark "
                f"{known_versions()}. Install one of them: "
                f"pip install 'pyspark=={TESTED}', and if SPARK_HOME is set, point it there."
            )
        return KNOWN[self.minor]

    @property
    def iceberg_runtime(self) -> str:
        """Maven coordinates of Iceberg's runtime.

        :raises ConfigError: there is none for this Spark.
        """
        if self.known.iceberg is None:
            raise ConfigError(
                f"Spark {self.full}: Iceberg has no runtime for this version, so only catalogs of type delta work with "
                f"it. Install Spark {TESTED}: pip install 'pyspark=={TESTED}'"
            )
        return f"org.apache.iceberg:iceberg-spark-runtime-{self.minor}_{self.scala}:{self.known.iceberg}"

    @property
    def delta_packages(self) -> tuple[str, str]:
        """Maven coordinates of Delta Lake."""
        return (
            f"io.delta:{self.known.delta_spark}_{self.scala}:{self.known.delta}",
            f"io.delta:delta-storage:{self.known.delta}",
        )

    @property
    def kafka_connector(self) -> str:
        """Maven coordinates of Kafka's connector."""
        release = re.match(r"[\d.]*\d", self.full)  # without a vendor's suffix, since Maven Central lacks its releases
        version = self.known.connector or (release[0] if release else self.known.tested)
        return f"org.apache.spark:spark-sql-kafka-0-10_{self.scala}:{version}"

    @property
    def local_checkpoints(self) -> str:
        """Class that writes checkpoints through Hadoop's `FileSystem`."""
        return f"{self.known.checkpointing}.FileSystemBasedCheckpointFileManager"

    @property
    def micro_batches(self) -> str:
        """Class that runs the micro-batches of a query."""
        return f"{self.known.runtime}.MicroBatchExecution"


def installed() -> SparkVersion:
    """The Spark that a new session would use: the one in SPARK_HOME, else the one that PySpark contains.

    :raises ConfigError: there is no Spark.
    """
    folder = home()
    for jar in sorted((folder / "jars").glob("spark-core_*.jar")):
        if found := re.fullmatch(r"spark-core_([\d.]+)-(\d+\.\d+.*)\.jar", jar.name):
            return SparkVersion(found[2], found[1])
    if "SPARK_HOME" in os.environ and "PYSPARK_GATEWAY_PORT" not in os.environ:  # so spark-submit didn't start us
        raise ConfigError(f"SPARK_HOME: no Spark found, there is no spark-core jar in {folder / 'jars'}. Correct it.")
    # the driver runs in a container of a cluster, whose jars are elsewhere
    full = import_module("pyspark").__version__
    return SparkVersion(full, "2.12" if full.startswith("3.") else "2.13")


def check(settings: Mapping[str, str]) -> None:
    """Check, before a session is started, that the sink can work with it.

    :param settings: Spark's settings in the configuration.
    :raises ConfigError: it would be a session of Spark Connect, or PySpark and Spark have different versions, or the
        sink doesn't know the version.
    """
    version = installed()
    _ = version.known
    if reason := _connect(settings):
        raise ConfigError(
            f"{reason} makes a session of Spark Connect, and rowdelta needs one with Spark's JVM in reach: it commits "
            "to Iceberg there. Remove it, and set spark.master instead, or start rowdelta with spark-submit."
        )
    pyspark = str(import_module("pyspark").__version__)
    if pyspark.split(".")[:2] != version.full.split(".")[:2]:
        raise ConfigError(
            f"SPARK_HOME: {home()} is Spark {version.full}, but PySpark is {pyspark}. Install the same version "
            f"(pip install 'pyspark=={version.minor}.*'), or unset SPARK_HOME."
        )


def _connect(settings: Mapping[str, str]) -> str | None:
    """The setting or variable that makes PySpark use Spark Connect, or None. PySpark decides in the same way."""
    if "spark.remote" in settings:
        return "spark: spark.remote"
    if settings.get("spark.api.mode", "").lower() == "connect":
        return "spark: spark.api.mode: connect"
    if "spark.api.mode" not in settings and os.environ.get("SPARK_API_MODE", "").lower() == "connect":
        return "SPARK_API_MODE=connect"
    # PySpark sets the second one while such a session is active, for example in a notebook
    for name in ("SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED"):
        if name in os.environ:
            return name
    return None


def known_versions() -> str:
    """Text such as `3.5, 4.0 and 4.1`."""
    return " and ".join(", ".join(KNOWN).rsplit(", ", 1))


def home() -> Path:
    """The folder of the installed Spark.

    :raises ConfigError: there is no Spark.
    """
    if home := os.environ.get("SPARK_HOME"):
        return Path(home)
    pyspark = find_spec("pyspark")
    if pyspark is None or pyspark.origin is None:
        raise ConfigError("no Spark found. Install it: pip install 'pyspark>=3.5,<4.3'")
    return Path(pyspark.origin).parent


def parse_ddl(text: str) -> "DataType":
    """`DataType.fromDDL`, which Spark 3.5 has under a private name only.

    :raises PySparkException: the text is no type.
    """
    from pyspark.sql import types

    parse: Callable[[str], DataType] = getattr(types.DataType, "fromDDL", None) or types._parse_datatype_string
    return parse(text)


def to_arrow(rows: "DataFrame") -> "pa.Table":
    """`DataFrame.toArrow`. Spark 3.5 has only a private method that returns batches."""
    import pyarrow as pa
    from pyspark.sql.pandas.types import to_arrow_schema

    frame: Any = rows
    if installed().minor == "3.5":
        return pa.Table.from_batches(frame._collect_as_arrow(), to_arrow_schema(rows.schema))
    return frame.toArrow()


def try_cast(column: "Column", dtype: "DataType") -> "Column":
    """`Column.try_cast`, which Spark 3.5 lacks. There a plain cast makes null of a text that doesn't fit."""
    if installed().minor == "3.5":
        return column.cast("string").cast(dtype)
    return column.try_cast(dtype)
