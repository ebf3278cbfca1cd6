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

    def frame_at(self, snapshot_id: int, columns: str = "*") -> DataFrame:
        # not Iceberg's option snapshot-id, which Spark 4.1 refuses
        name = quoted_name(self._table.name)
        return self._table.spark.sql(f"SELECT {columns} FROM {name} VERSION AS OF {snapshot_id}")

    def current_frame(self, snapshot_id: int) -> DataFrame:
        return self._with_current_columns(self.frame_at(snapshot_id), snapshot_id)

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
        """See `Reader.rows_of`. On Spark 4.1 the whole table is read, and rows of other files are left out."""
        table, paths = self._table, [file.path for file in files]
        if not spark_versions.installed().known.reads_scan_tasks:
            current = table.current_snapshot()
            assert current is not None, "there are files"
            frame = self.frame_at(current.snapshot_id, "*, _file, _pos")
            frame = self._with_current_columns(frame, current.snapshot_id)
            if current.summary.get("total-data-files") != str(len(set(paths))):
                frame = frame.where(F.col("_file").isin(paths))
            yield frame, F.col("_file"), F.col("_pos"), paths
            return
        tasks = table.jvm.java.util.ArrayList()
        for file in files:
            tasks.add(scan_of(file))
        manager, name = table.iceberg.spark.ScanTaskSetManager.get(), uuid4().hex
        manager.stageTasks(table.java, name, tasks)
        try:
            frame = table.spark.read.option("scan-task-set-id", name).table(table.name)
            yield frame, F.col("_file"), F.col("_pos"), paths
        finally:
            manager.removeTasks(table.java, name)

    def history(self, prefix: str) -> IcebergHistory:
        table, sink_id = self._table, prefix.removeprefix("rowdelta.")
        return IcebergHistory(table.name, table.metadata(), sink_id, lambda number: table.position_in(number, prefix))

    def _with_current_columns(self, frame: DataFrame, snapshot_id: int) -> DataFrame:
        """Rows of a snapshot with the columns, names and types that the table has now. A read at a snapshot has those
        of that time (`SnapshotUtil.schemaFor`), and an ALTER makes no snapshot.

        :param frame: what `frame_at` returns. Columns that aren't the table's stay, behind the others.
        """
        table = self._table
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
        others = [name for name in frame.columns if name not in earlier.values()]
        return frame.select(*columns, *map(quoted, others))
