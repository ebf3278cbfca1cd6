"""Shows progress: with a bar on a terminal, else with a log line from time to time."""

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from pyspark.sql import SparkSession

from changelog.amounts import amount

log = logging.getLogger("rowdelta")

_WIDTH = 30
_FIRST_SECONDS = 2.0
_LINE_SECONDS = 10.0


class Line:
    """A line on a terminal that is written over; else a log line every ten seconds, the first one after two."""

    def __init__(self, *, on_terminal: bool | None = None) -> None:
        """:param on_terminal: whether the line is written over. By default it is where that is possible."""
        self.on_terminal = sys.stderr.isatty() if on_terminal is None else on_terminal
        self._next = time.monotonic() + _FIRST_SECONDS
        self._told = ""

    def tell(self, text: str) -> None:
        if self.on_terminal:
            print(f"\r{text}\033[K", end="", file=sys.stderr, flush=True)
        elif time.monotonic() >= self._next:
            self._next = time.monotonic() + _LINE_SECONDS
            self._told = text
            log.info("%s", text)

    def end(self, text: str) -> None:
        """Tell how it ended, if anything was told of it."""
        if self._told not in ("", text):
            log.info("%s", text)

    def clear(self) -> None:
        if self.on_terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


@contextmanager
def progress(spark: SparkSession, what: str) -> Iterator[None]:
    """Show how many tasks of the running jobs are done, and how many rows they have read."""
    finished = threading.Event()
    line = Line()

    def watch() -> None:
        while not finished.wait(0.5 if line.on_terminal else _FIRST_SECONDS):
            with suppress(Exception):  # the JVM may be ending
                done, total, rows = _state(spark)
                if total:
                    bar = f"[{'#' * (_WIDTH * done // total):{_WIDTH}}] " if line.on_terminal else ""
                    read = f", {amount(rows, 'row')} read" if rows else ""
                    line.tell(f"{what}: {bar}{done} of {amount(total, 'task')}{read}")
        line.clear()

    thread = threading.Thread(target=watch, name="rowdelta-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()


def _state(spark: SparkSession) -> tuple[int, int, int]:
    """Finished tasks, all tasks and read rows of the running stages. Executors tell the rows every few seconds."""
    tracker = spark.sparkContext.statusTracker()
    found = [info for stage in tracker.getActiveStageIds() if (info := tracker.getStageInfo(stage)) is not None]
    store: Any = spark.sparkContext._jsc.sc().statusStore()
    rows = sum(int(store.lastStageAttempt(info.stageId).inputRecords()) for info in found)
    return sum(info.numCompletedTasks for info in found), sum(info.numTasks for info in found), rows
