"""What all programs of tasks need."""

import json
import sys
from collections.abc import Sequence
from typing import Any
from zipimport import zipimporter

import pyarrow as pa
from pyspark import TaskContext

from deltawriters import TaskId

RESULT_SCHEMA = "result string"


def this_task(operation: str = "") -> TaskId:
    """The task that runs."""
    context = TaskContext.get()
    assert context is not None
    return TaskId(context.partitionId(), context.taskAttemptId(), operation)


def results(found: Sequence[Any]) -> pa.RecordBatch:
    """Results as a batch of `RESULT_SCHEMA`, which may be empty."""
    return pa.RecordBatch.from_arrays([pa.array([json.dumps(result) for result in found], pa.string())], ["result"])


def forget_archives() -> None:
    """Drop Python's importers of zip and jar files. PySpark's worker calls `importlib.invalidate_caches` before the
    next task.

    Up to Python 3.12 this call makes each importer read its archive's directory again: pyspark.zip a dozen times, and
    every jar of `--packages`. That took 100 to 250 ms a task, more than all its real work. If an import needs an
    importer later, Python makes a new one from the directory that it has already read.
    """
    for path, importer in list(sys.path_importer_cache.items()):
        if isinstance(importer, zipimporter):
            del sys.path_importer_cache[path]
