"""A Delta table's rows, as Spark reads them."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from urllib.parse import quote, unquote

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from sink.errors import TableError
from sink.targets.delta.history import DeltaHistory
from sink.targets.delta.live_files import file_actions
from sink.targets.delta.rows_in_files import PARTITION, PATH, ROW, rows_in_files
from sink.targets.delta.state import DeltaState
from sink.targets.locations import in_one_form
from sink.targets.seam import Reader
from sink.targets.values import LiveFile


class DeltaReader(Reader):
    """See `Reader`."""

    def __init__(self, table: DeltaState) -> None:
        self._table = table

    def frame(self, spark: SparkSession) -> DataFrame:
        return self._table.rows_in(spark)

    def frame_at(self, snapshot_id: int) -> DataFrame:
        return self._table.spark.read.format("delta").option("versionAsOf", str(snapshot_id)).load(self._table.log.path)

    def history(self, prefix: str) -> DeltaHistory:
        return DeltaHistory(self._table, prefix)

    def frame_of_commit(self, snapshot_id: int) -> DataFrame | None:
        commits = self._table.log.commits(snapshot_id, snapshot_id)
        if not commits:
            return None
        adds = [content for kind, content in file_actions(commits[0]) if kind == "add"]
        rewritten = [path for add in adds if (path := unquote(add["path"])) not in self._table.live]
        if not all(self._table.spec.io.new_input(self._table.full_path(path)).exists() for path in rewritten):
            return None  # VACUUM has deleted them
        return self._table.log.frame_of(snapshot_id, adds)

    @contextmanager
    def rows_of(
        self, files: Sequence[LiveFile], columns: Sequence[str]
    ) -> Iterator[tuple[DataFrame, Column, Column, Sequence[str]]]:
        if not self._table.spec.supports_vectors:
            frame = self._rows_in_files(files, columns)
            yield frame, F.col(PATH), F.col(ROW), [file.path for file in files]
            return
        frame = self._table.log.frame_of(self._table.snapshot_id(), [file.handle for file in files])
        path, position = F.col("_metadata.file_path"), F.col("_metadata.row_index")
        names = [file.path.rpartition("/")[2] for file in files]
        if len(set(names)) == len(names) and all(quote(name) == name for name in names):
            yield frame, F.element_at(F.split(path, "/"), -1), position, names
        else:  # as in a folder that CONVERT TO DELTA made a table of: files of one name, or names that are encoded
            yield (
                frame,
                path,
                position,
                self._shown(files, [text for (text,) in frame.select(path).distinct().collect()]),
            )

    def _rows_in_files(self, files: Sequence[LiveFile], columns: Sequence[str]) -> DataFrame:
        """Rows of a table whose positions Delta's reader doesn't tell."""
        names = T.StructType().add(PATH, "string").add(PARTITION, "string")
        found = [(file.path, json.dumps(dict(file.file.partition))) for file in files]
        tasks = min(len(files), int(self._table.spark.conf.get("spark.sql.shuffle.partitions") or 1))
        types = {column.name: column.type for column in self._table.columns()}
        schema = T.StructType([T.StructField(name, types[name]) for name in columns])
        read = partial(rows_in_files, self._table.spec, tuple(columns))
        shared = self._table.spark.createDataFrame(found, names).repartition(tasks)
        return shared.mapInArrow(lambda batches: read(batches), schema.add(PATH, "string").add(ROW, "long"))

    def _shown(self, files: Sequence[LiveFile], texts: Sequence[str]) -> list[str]:
        """The text of each file's path in Spark, which encodes other characters than Delta does.

        :param texts: of all files that have rows.
        """
        known = {in_one_form(unquote(text)): text for text in texts}
        shown = [known.pop(in_one_form(file.path), file.path) for file in files]
        if known:
            raise TableError(
                f"{self._table.name}: its log has no file of the name {next(iter(known))}, but Spark reads it"
            )
        return shown
