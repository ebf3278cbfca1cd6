"""What all programs of tasks need."""

import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from zipimport import zipimporter

import pyarrow as pa
from pyspark import TaskContext

from deltawriters import TaskId

T = TypeVar("T")

RESULT_SCHEMA = "result string"
_NICE = 10
"""A tenth of the time of a core that micro-batches want too, all of one that they leave."""


def this_task(operation: str = "") -> TaskId:
    """The task that runs."""
    context = TaskContext.get()
    assert context is not None
    return TaskId(context.partitionId(), context.taskAttemptId(), operation)


def results(found: Sequence[Any]) -> pa.RecordBatch:
    """Results as a batch of `RESULT_SCHEMA`, which may be empty."""
    return pa.RecordBatch.from_arrays([pa.array([json.dumps(result) for result in found], pa.string())], ["result"])


def give_way(work: Callable[[], T]) -> T:
    """Do some work while the tasks of micro-batches come first.

    In Linux a thread may lower its own priority, but never raise it again. So a thread of its own does the work: the
    process will run other tasks. Elsewhere the work has the priority of all.
    """
    with ThreadPoolExecutor(1, initializer=_lower_priority) as pool:
        return pool.submit(work).result()


def _lower_priority() -> None:
    if sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICE)


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
