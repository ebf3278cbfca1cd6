"""Work beside micro-batches: its jobs get what these leave free, and are cancelled when the run ends."""

import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from pyspark import SparkContext
from pyspark.sql import SparkSession

from sink.spark.session import MAINTENANCE_POOL, activate

T = TypeVar("T")

_THREADS = 2
"""For short work, and as many for long work."""


def take_pool(spark: SparkSession) -> None:
    """Let this thread's jobs run in the pool of maintenance, with a tag by which they are cancelled. A group isn't
    enough: Iceberg's procedures give their jobs groups of their own (`JobGroupUtils`).
    """
    context = spark.sparkContext
    activate(spark)
    context.setLocalProperty("spark.scheduler.pool", MAINTENANCE_POOL)
    context.setJobGroup(MAINTENANCE_POOL, "maintenance", interruptOnCancel=True)
    context.addJobTag(MAINTENANCE_POOL)


def cancel(spark: SparkSession) -> None:
    """Cancel the jobs of all threads that have taken the pool."""
    spark.sparkContext.cancelJobsWithTag(MAINTENANCE_POOL)


def beside(spark: SparkSession, work: Callable[[], T], *, is_long: bool = False) -> Future[T]:
    """Do some work, of all tables at most two at a time.

    :param is_long: whether it may take minutes. It has threads of its own, so that short work needn't wait for it.
    """

    def in_pool() -> T:
        take_pool(spark)  # for each: a thread of the JVM's may have changed hands
        return work()

    return _threads(spark.sparkContext, is_long).submit(in_pool)


@functools.lru_cache(maxsize=2)
def _threads(context: SparkContext, is_long: bool) -> ThreadPoolExecutor:
    del context, is_long  # a new context has new threads: those of the JVM are its own
    return ThreadPoolExecutor(_THREADS, "rowdelta-beside")
