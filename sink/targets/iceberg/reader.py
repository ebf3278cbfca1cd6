"""An Iceberg table's rows, as Spark reads them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from uuid import uuid4

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from sink.spark import versions as spark_versions
from sink.spark.expressions import quoted
from sink.targets.iceberg.changes import scan_of
from sink.targets.iceberg.history import IcebergHistory
from sink.targets.iceberg.java_table import JavaTable, quoted_name
from sink.targets.seam import Reader
from sink.targets.values import LiveFile


class IcebergReader(Reader):
    """See `Reader`."""

    def __init__(self, table: JavaTable) -> None:
        self._table = table

    def frame(self, spark: SparkSession) -> DataFrame:
        return spark.table(quoted_name(self._table.name))

    def frame_at(self, snapshot_id: int) -> DataFrame:
        # not Iceberg's option snapshot-id, which Spark 4.1 refuses
        name = quoted_name(self._table.name)
        return self._table.spark.sql(f"SELECT * FROM {name} VERSION AS OF {snapshot_id}")

    def current_frame(self, snapshot_id: int) -> DataFrame:
        """See `Reader.current_frame`. A read at a snapshot has the columns of that time (`SnapshotUtil.schemaFor`), and
        an ALTER makes no snapshot.
        """
        table, frame = self._table, self.frame_at(snapshot_id)
        now, number = table.java.schema(), table.java.snapshot(snapshot_id).schemaId()
        if number is None or int(number) == int(now.schemaId()):
            return frame
        earlier = {
            int(field.fieldId()): str(field.name())
            for field in table.elements(table.java.schemas().get(number).columns())
        }
        columns = []
        for field, column in zip(table.elements(now.columns()), table.columns(), strict=True):
            name = earlier.get(int(field.fieldId()))
            values = F.lit(None) if name is None else F.col(quoted(name))
            if name is None or frame.schema[name].dataType != column.type:
                values = values.cast(column.type)
            columns.append(values.alias(column.name))
        return frame.select(*columns)

    def frame_of_commit(self, snapshot_id: int) -> DataFrame | None:
        snapshot = self._table.java.snapshot(snapshot_id)
        if snapshot is None:
            return None
        parent = snapshot.parentId()
        if parent is None:
            return self.frame_at(snapshot_id)
        reader = self._table.spark.read.option("start-snapshot-id", str(parent))
        return reader.option("end-snapshot-id", str(snapshot_id)).table(quoted_name(self._table.name))

    @contextmanager
    def rows_of(
        self, files: Sequence[LiveFile], columns: Sequence[str]
    ) -> Iterator[tuple[DataFrame, Column, Column, Sequence[str]]]:
        table, name = self._table, uuid4().hex
        tasks = table.objects(map(scan_of, files))
        manager = table.iceberg.spark.ScanTaskSetManager.get()
        manager.stageTasks(table.java, name, tasks)
        try:
            yield self._rows_of_tasks(name), F.col("_file"), F.col("_pos"), [file.path for file in files]
        finally:
            manager.removeTasks(table.java, name)

    def _rows_of_tasks(self, name: str) -> DataFrame:
        """What some scan tasks read.

        :param name: of the tasks, in Iceberg's manager of them.
        """
        spark, jvm = self._table.spark, self._table.jvm
        if spark_versions.installed().known.reads_scan_tasks:
            return spark.read.option("scan-task-set-id", name).table(quoted_name(self._table.name))
        rows = self._table.iceberg.spark.source.SparkRewriteTable(self._table.java, name)
        none = jvm.scala.Option.empty()
        relation = jvm.org.apache.spark.sql.execution.datasources.v2.DataSourceV2Relation.create(rows, none, none)
        # with columns of the row lineage, as in v3, Spark finds no other columns of metadata
        columns = relation.output().take(len(self._table.columns()))
        relation = relation.copy(rows, columns, none, none, relation.options(), none)
        return DataFrame(jvm.org.apache.spark.sql.classic.Dataset.ofRows(spark._jsparkSession, relation), spark)

    def history(self, prefix: str) -> IcebergHistory:
        table, sink_id = self._table, prefix.removeprefix("rowdelta.")
        return IcebergHistory(table.name, table.metadata(), sink_id, lambda number: table.position_in(number, prefix))
