"""Checkpoints of a Delta table's log, which are written beside the stream."""

import logging
import time
from threading import Thread

from pyspark.sql import SparkSession

from sink.spark.session import MAINTENANCE_POOL, activate
from sink.targets.delta.log import DeltaLog

log = logging.getLogger("rowdelta")

_EVERY = 10
"""Versions from one checkpoint to the next, unless the table's own interval is shorter. It is Delta's default."""
_EVERY_AT_MOST = 200
_PAUSE = 10
"""A checkpoint names all files that were removed in the last week. With a commit each second it takes seconds, and the
next would be due as soon as it is written. So none is written for ten times as long, but for so many versions.
"""
_OF_A_TASK, _MOST_TASKS = 15_000, 200
"""A task makes the state of so many actions of the log, in a quarter of a second."""


class Checkpoints:
    """The checkpoints of one table's log.

    :param name: the table, for messages.
    """

    def __init__(self, spark: SparkSession, log: DeltaLog, name: str) -> None:
        self._spark = spark
        self._log = log
        self._name = name
        self._running: Thread | None = None
        self._seconds = 0.0
        self._next = 0.0

    def write_if_due(self) -> None:
        """Write a due checkpoint in a thread of its own: it takes seconds."""
        if self._running is not None:
            if self._running.is_alive():
                return
            self._next = time.monotonic() + _PAUSE * self._seconds
            self._running = None
            self._log.list_again()
        every = _EVERY if time.monotonic() >= self._next else _EVERY_AT_MOST
        if self._log.is_checkpoint_due(every):
            # a daemon: a second Ctrl-C doesn't wait for it, and a checkpoint that isn't finished isn't seen
            self._running = Thread(target=self._write, name="checkpoint", daemon=True)
            self._running.start()

    def wait(self, seconds: float) -> None:
        """Wait for the one that is being written, but no longer than this."""
        if self._running is not None:
            self._running.join(seconds)

    def _write(self) -> None:
        began = time.monotonic()
        _write_checkpoint(self._spark, self._log.path, self._name)
        self._seconds = time.monotonic() - began


def _write_checkpoint(spark: SparkSession, path: str, name: str) -> None:
    """Micro-batches come first: they get each core that a task of the checkpoint leaves, so its tasks are short."""
    try:
        own = SparkSession(spark.sparkContext, spark._jsparkSession.cloneSession())
        activate(own)
        own.sparkContext.setLocalProperty("spark.scheduler.pool", MAINTENANCE_POOL)
        log_of_thread = DeltaLog(own, path, apart=True)
        actions = log_of_thread.last_checkpoint.get("size", 0)
        if actions > _OF_A_TASK:
            own.conf.set("spark.databricks.delta.snapshotPartitions", min(_MOST_TASKS, actions // _OF_A_TASK + 3))
        log_of_thread.refresh()
        log_of_thread.checkpoint()
    except Exception as error:  # noqa: BLE001 - without it, readers replay more of the log; the next commit tries again
        log.warning("%s: no checkpoint of the log was written: %s", name, error)
