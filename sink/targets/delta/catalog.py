"""Delta tables by name: below a catalog's warehouse folder, or in the session catalog of Spark."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from py4j.java_gateway import JavaObject
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T

from sink.config import Config, TableSection
from sink.errors import ConfigError, TableError, TemporaryError
from sink.spark.expressions import quoted
from sink.spark.java_errors import JAVA_ERRORS, java_class, java_message, message_of
from sink.targets.delta import commands
from sink.targets.delta.log import DeltaLog
from sink.targets.delta.storage import storage_properties
from sink.targets.delta.table import DeltaTable
from sink.targets.delta.table_properties import required
from sink.targets.own_state import CREATED_BY, cleaned_property

_DEFAULTS = {
    # At each commit of this interval, Delta counts all files, for which it makes the table's state from the log. That
    # takes a second, and more with each file removed in the last week. The sink writes checkpoints beside its commits,
    # and more often (`DeltaTable.tend`).
    "delta.checkpointInterval": "1000",
}
"""Default properties of new tables."""


class DeltaCatalogs:
    """Delta tables by `catalog.namespace.table`."""

    def __init__(self, spark: SparkSession, config: Config) -> None:
        self._spark = spark
        self._config = config

    def load(self, name: str) -> DeltaTable | None:
        """The table, or None if it doesn't exist.

        :raises TableError: there is something else than a Delta table.
        :raises TemporaryError: the catalog or the file system doesn't answer.
        """
        found = self._located(name)
        if found is None:
            return None
        log = DeltaLog(self._spark, found)
        if not log.exists():
            if self._session_catalog(name):
                raise TableError(f"{name}: there is no Delta log at {found}. Drop the table, or restore its files.")
            return None
        return self._opened(name, log)

    def create(
        self, section: TableSection, columns: T.StructType, properties: Mapping[str, str], path: str
    ) -> DeltaTable:
        """See `TargetCatalogs.create`."""
        partition_by = [field.column for field in section.partition_fields]
        at_creation = (CREATED_BY, cleaned_property(self._config))  # these need no commit of their own
        own = {n: value for n, value in properties.items() if n.startswith("rowdelta.") and n not in at_creation}
        given = {name: value for name, value in properties.items() if name not in own}
        given = required(appends=section.mode == "append", copies=section.copies) | given
        table = self._created(section.target, columns, partition_by, given, section.cluster_by)
        for name, value in own.items():
            table.set_property(name, value)
        return table

    def create_log(self, name: str, columns: T.StructType, properties: Mapping[str, str], writer: str) -> DeltaTable:
        """See `TargetCatalogs.create_log`."""
        return self._created(name, columns, [], required(appends=True) | dict(properties))

    def check_new(self, section: TableSection, columns: T.StructType, path: str) -> None:
        """See `TargetCatalogs.check_new`.

        :raises TableError: the table's folder has other files.
        """
        if not self._session_catalog(section.target):
            commands.check_no_other_files(DeltaLog(self._spark, self._folder(section.target)))
        for number, field in enumerate(section.partition_fields):
            dtype = columns[field.column].dataType
            if not isinstance(dtype, T.AtomicType) or isinstance(dtype, T.BinaryType):
                kind = dtype.simpleString()
                raise ConfigError(
                    f"{path}.partition_by[{number}]: column {field.column} is {kind}, and Delta can't partition by it."
                )

    def storage_properties(self, config: Config, name: str) -> dict[str, str]:
        """See `TargetCatalogs.storage_properties`."""
        return storage_properties(self._spark, config.index_location)

    def _created(
        self,
        name: str,
        columns: T.StructType,
        partition_by: list[str],
        properties: Mapping[str, str],
        cluster_by: Sequence[str] = (),
    ) -> DeltaTable:
        properties = _DEFAULTS | dict(properties)
        if self._session_catalog(name):
            table = _in_session_catalog(name)
            with _creating(name):
                self._spark.sql(f"CREATE NAMESPACE IF NOT EXISTS {table.rpartition('.')[0]}")
            self._create_by_sql(name, table, columns, partition_by, cluster_by, properties)
        elif cluster_by:
            self._create_by_sql(
                name, f"delta.{quoted(self._folder(name))}", columns, partition_by, cluster_by, properties
            )
        else:
            commands.create(DeltaLog(self._spark, self._folder(name)), columns, partition_by, properties)
        found = self._located(name)
        assert found is not None
        return self._opened(name, DeltaLog(self._spark, found))

    def _create_by_sql(
        self,
        name: str,
        table: str,
        columns: T.StructType,
        partition_by: Sequence[str],
        cluster_by: Sequence[str],
        properties: Mapping[str, str],
    ) -> None:
        """:param table: the table in SQL."""
        shown = ", ".join(
            f"{quoted(field.name)} {field.dataType.simpleString()}{'' if field.nullable else ' NOT NULL'}"
            for field in columns
        )
        layout = f" PARTITIONED BY ({', '.join(map(quoted, partition_by))})" if partition_by else ""
        layout += f" CLUSTER BY ({', '.join(map(quoted, cluster_by))})" if cluster_by else ""
        texts = ", ".join(f"{_text(key)} = {_text(value)}" for key, value in properties.items())
        with _creating(name):
            self._spark.sql(f"CREATE TABLE IF NOT EXISTS {table} ({shown}) USING delta{layout} TBLPROPERTIES ({texts})")

    def _opened(self, name: str, log: DeltaLog) -> DeltaTable:
        def frame(spark: SparkSession) -> DataFrame:
            if self._session_catalog(name):
                return spark.table(_in_session_catalog(name))
            return spark.read.format("delta").load(log.path)

        return DeltaTable(self._spark, name, log, frame, storage_properties(self._spark, log.path))

    def _session_catalog(self, name: str) -> bool:
        """Whether the table is one of Spark's session catalog."""
        return self._config.catalogs[name.split(".")[0]].get("spark_catalog") == "true"

    def _located(self, name: str) -> str | None:
        """The folder of a table, whether or not there is one; None if the session catalog has no such table."""
        if not self._session_catalog(name):
            return self._folder(name)
        catalog = self._spark._jsparkSession.sessionState().catalog()
        try:
            metadata = catalog.getTableMetadata(self._identifier(name))
        except JAVA_ERRORS as error:
            if java_class(error) in ("NoSuchTableException", "NoSuchDatabaseException", "NoSuchNamespaceException"):
                return None
            raise TemporaryError(f"{name}: the catalog failed: {java_message(error)}") from None
        provider = metadata.provider()
        if provider.isEmpty() or str(provider.get()).lower() != "delta":
            raise TableError(
                f"{name} is a table of {provider.get() if provider.isDefined() else 'another kind'}, not of Delta "
                "Lake. Name another target, or convert it: CONVERT TO DELTA."
            )
        # the location is a URI, and encoded
        return str(self._spark.sparkContext._jvm.org.apache.hadoop.fs.Path(metadata.location()).toString())  # type: ignore[union-attr]

    def _identifier(self, name: str) -> JavaObject:
        _, *namespace, table = name.split(".")
        if len(namespace) != 1:
            raise ConfigError(
                f"{name}: tables of Spark's session catalog have one namespace. Write catalog.schema.table."
            )
        jvm = self._spark.sparkContext._jvm
        assert jvm is not None
        return jvm.org.apache.spark.sql.catalyst.TableIdentifier(table, jvm.scala.Option.apply(namespace[0]))

    def _folder(self, name: str) -> str:
        folder = self._config.table_folder(name)
        assert folder is not None, "such a catalog has a warehouse"
        return folder


@contextmanager
def _creating(name: str) -> Iterator[None]:
    """:raises TableError: what was done in this context failed."""
    try:
        yield
    except (PySparkException, *JAVA_ERRORS) as error:
        raise TableError(f"{name}: it could not be created: {message_of(error)}") from None


def _in_session_catalog(name: str) -> str:
    return ".".join(["spark_catalog", *map(quoted, name.split(".")[1:])])


def _text(value: str) -> str:
    """A text in SQL."""
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
