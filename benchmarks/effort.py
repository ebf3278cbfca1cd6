"""What a sink costs while it applies micro-batches: CPU time, and memory of Python and of the JVM."""

import os
import threading
from dataclasses import dataclass, field
from typing import Any, Self

from pyspark.sql import SparkSession

from benchmarks.processes import command_of, cpu_seconds, memory_bytes, tree

_SAMPLE_SECONDS = 0.1


@dataclass
class Effort:
    """Of this process and all below it, while this context lasts. Memory is sampled.

    :param python: peak bytes of the Python workers, and of what this process has more than before.
    :param execution: peak bytes that Spark's tasks have reserved for joins, sorts and aggregates (`MemoryManager`).
    :param heap: peak bytes of the JVM's heap above what was live before, with garbage that wasn't collected yet.
    """

    spark: SparkSession
    cpu_seconds: float = 0.0
    python: int = 0
    execution: int = 0
    heap: int = 0
    _end: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Self:
        jvm: Any = self.spark.sparkContext._jvm
        jvm.System.gc()
        self._manager = jvm.org.apache.spark.SparkEnv.get().memoryManager()
        self._heap = jvm.java.lang.management.ManagementFactory.getMemoryMXBean()
        self._before = self._heap.getHeapMemoryUsage().getUsed()
        self._own = memory_bytes([os.getpid()])
        self._cpu = cpu_seconds(tree(os.getpid()))
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self.cpu_seconds = cpu_seconds(tree(os.getpid())) - self._cpu

    def _sample(self) -> None:
        while not self._end.wait(_SAMPLE_SECONDS):
            workers = [pid for pid in tree(os.getpid()) if "pyspark.daemon" in command_of(pid)]
            own = max(0, memory_bytes([os.getpid()]) - self._own)
            self.python = max(self.python, memory_bytes(workers) + own)
            self.execution = max(self.execution, int(self._manager.executionMemoryUsed()))
            self.heap = max(self.heap, int(self._heap.getHeapMemoryUsage().getUsed()) - self._before)
