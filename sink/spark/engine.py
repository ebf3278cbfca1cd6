"""Spark runs the tasks of a table, and Hadoop's file systems reach the folder of its key index."""

import functools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import datetime
from itertools import pairwise
from typing import Any, TypeVar

from py4j.java_gateway import JavaObject
from py4j.protocol import Py4JError
from pyspark.sql import DataFrame

from changelog.amounts import amount
from deltawriters.keyindex import IndexSlice, RunInfo
from deltawriters.scratch import Scratch
from deltawriters.storage import file_io
from sink.config import Config
from sink.deadletters.table import DeadLetters
from sink.plans import Groups, RewritePlan
from sink.spark.accumulators import ListParam, accumulator
from sink.spark.beside import beside
from sink.spark.failures import told
from sink.spark.java_errors import JAVA_ERRORS, java_class, java_message
from sink.spark.keyreading import read_keys
from sink.spark.purging import removals
from sink.spark.tasks import move
from sink.spark.tasks.index import merge_runs
from sink.spark.writing import SparkWriter
from sink.table.engine import KeyReading
from sink.table.moving import shares
from sink.table.table_plan import TablePlan
from sink.table.task_plans import TaskPlans
from sink.targets.catalogs import Catalogs
from sink.targets.seam import Table
from sink.targets.values import LiveFile

log = logging.getLogger("rowdelta")

T = TypeVar("T")


class SparkEngine:
    """Runs one table's tasks in the session of the table (`sink.table.engine.Engine`)."""

    def __init__(self, config: Config, table: Table, dead_letters: DeadLetters | None) -> None:
        self.catalogs = Catalogs(table.spark, config)
        self._config = config
        self._table = table
        self._dead_letters = dead_letters
        # not the accumulator of the micro-batches: a failed micro-batch deletes the files that are in it
        self._rewritten = accumulator(table.spark.sparkContext, self, list[str](), ListParam[str]())

    def another(self) -> "SparkEngine":
        return SparkEngine(self._config, self._table, self._dead_letters)

    def beside(self, work: Callable[[], T], *, is_long: bool = False) -> Future[T]:
        return beside(self._table.spark, work, is_long=is_long)

    def writer(self, plan: TablePlan, tasks: TaskPlans, files: Scratch) -> SparkWriter:
        return SparkWriter(self._table.spark, self._config, plan, tasks, files, self._dead_letters)

    def index_folder(self) -> "HadoopFolder":
        name, index = self._table.name, self._config.index
        properties = index.properties if index is not None else None
        if properties is None:
            properties = self.catalogs.storage_properties(name)
        return HadoopFolder(self._table, f"{self._config.index_location}/{name}", properties)

    def table_folder(self) -> "HadoopFolder":
        return HadoopFolder(self._table, self._table.spec.location, {})

    def removals(self, table: Table, plan: TablePlan, before: datetime) -> tuple[DataFrame, int]:
        return removals(table, plan, before)

    def read_keys(self, files: Sequence[LiveFile], reading: KeyReading) -> list[RunInfo]:
        return read_keys(self._table, files, reading)

    def merge_runs(self, index: IndexSlice, name: str) -> list[RunInfo]:
        edges = [2**64 * number // self.parallelism for number in range(self.parallelism + 1)]
        merge = functools.partial(merge_runs, index, name)
        parts = self._table.spark.sparkContext.parallelize(list(pairwise(edges)), self.parallelism)
        return [RunInfo.from_json(run) for run in parts.mapPartitions(lambda part: told(merge)(part)).collect()]

    @property
    def parallelism(self) -> int:
        return int(self._table.spark.conf.get("spark.sql.shuffle.partitions") or 1)

    def rewrite(self, plan: RewritePlan, groups: Groups, written: list[str]) -> Sequence[Mapping[str, Any]]:
        spark = self._table.spark
        tasks = min(len(groups), self.parallelism)
        self._rewritten.value = []
        rewrite = functools.partial(move.rewrite, plan, self._rewritten)
        try:
            dealt = spark.sparkContext.parallelize(shares(groups, tasks), tasks)
            results: Sequence[Mapping[str, Any]] = dealt.mapPartitions(lambda part: told(rewrite)(part)).collect()
            return results
        finally:
            written += self._rewritten.value


class HadoopFolder:
    """A folder on any Hadoop file system (`sink.table.engine.IndexFolder`)."""

    def __init__(self, table: Table, location: str, properties: Mapping[str, str]) -> None:
        """:param properties: properties with which tasks and the driver reach the folder by Arrow, if they do."""
        self.location = location.rstrip("/")
        self.io_properties = tuple(properties.items())
        self.io = file_io(self.io_properties)
        jvm = table.spark.sparkContext._jvm
        assert jvm is not None
        self._path = jvm.org.apache.hadoop.fs.Path
        self._files = self._path(self.location).getFileSystem(table.spark._jsc.hadoopConfiguration())
        self._bulk: JavaObject | None = None
        if self._files.getScheme() != "file":
            with suppress(Py4JError):  # Hadoop has it since 3.4.1
                self._bulk = self._files.createBulkDelete(self._path(self.location))
        self._list = jvm.java.util.ArrayList

    def names(self, folder: str) -> list[str]:
        path = self._path(f"{self.location}/{folder}")
        try:
            return [status.getPath().getName() for status in self._files.listStatus(path)]
        except JAVA_ERRORS as error:
            if java_class(error) != "FileNotFoundException":
                raise
            return []

    def delete(self, paths: Collection[str]) -> None:
        found = [self._path(f"{self.location}/{path}") for path in paths]
        if self._bulk is None:
            for path in found:
                with self._logged():
                    self._files.delete(path, False)
            return
        # An object store deletes many files by one request. By `delete` each takes three or four: is it there, is it a
        # folder, and is its folder still one?
        size = int(self._bulk.pageSize())
        for start in range(0, len(found), size):
            page = self._list()
            for path in found[start : start + size]:
                page.add(path)
            with self._logged():
                failed = self._bulk.bulkDelete(page)
                if not failed.isEmpty():
                    log.warning("%s: %s could not be deleted", self.location, amount(int(failed.size()), "file"))

    @contextmanager
    def _logged(self) -> Iterator[None]:
        try:
            yield
        except JAVA_ERRORS as error:
            log.warning("%s: files could not be deleted: %s", self.location, java_message(error))
