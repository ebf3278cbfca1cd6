"""Asks from time to time, beside the job, what no micro-batch tells: how far tables are behind, what the connector
does, and the memory in use."""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from sink.errors import RowdeltaError, summary
from sink.spark.java_errors import SPARK_ERRORS
from sink.spark.session import activate
from sink.table.observer import Event, JvmMemory, LagsUnknown, Observer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger("rowdelta")

SECONDS = 15.0
_SHARE = 20
"""Between two questions to the source it pauses this many times as long as the last answer took, if that is longer."""
_STOP_SECONDS = 5.0


class Sampling:
    """A thread of a run that somebody watches.

    :param ask: finds out what is to be told.
    """

    def __init__(self, spark: "SparkSession", ask: Callable[[], Iterable[Event]], observer: Observer) -> None:
        self._spark = spark
        self._ask = ask
        self._observer = observer
        self._ending = threading.Event()
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="rowdelta-sampling", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End it. If the source doesn't answer just then, it isn't waited for."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_SECONDS)

    def _run(self) -> None:
        while not self._ending.is_set():
            started = time.monotonic()
            self._sample()
            self._ending.wait(max(SECONDS, _SHARE * (time.monotonic() - started)))

    def _sample(self) -> None:
        try:
            activate(self._spark)
            self._observer(JvmMemory(self._heap()))
            for event in self._ask():
                self._observer(event)
        except (RowdeltaError, *SPARK_ERRORS, OSError) as error:
            if not self._ending.is_set():
                self._observer(LagsUnknown(summary(error)))
        except Exception as error:
            # a question that nobody needs for the tables must not end their job
            if not self._ending.is_set():
                if not self._has_failed:
                    self._has_failed = True
                    log.exception("can't tell how far the tables are behind; it is tried again, and not logged again")
                # old numbers would look current
                self._observer(LagsUnknown(f"{type(error).__name__}: {summary(error)}"))

    def _heap(self) -> int:
        jvm = self._spark.sparkContext._jvm
        assert jvm is not None
        runtime = jvm.java.lang.Runtime.getRuntime()
        return int(runtime.totalMemory()) - int(runtime.freeMemory())
