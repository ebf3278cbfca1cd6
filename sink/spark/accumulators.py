"""Accumulators of Spark that go when their owner goes."""

import weakref
from typing import TypeVar

from pyspark import SparkContext
from pyspark.accumulators import Accumulator, AccumulatorParam, _accumulatorRegistry

Value = TypeVar("Value")


def accumulator(
    context: SparkContext, owner: object, start: Value, param: AccumulatorParam[Value] | None = None
) -> Accumulator[Value]:
    """An accumulator of jobs that end before their owner is collected. PySpark itself keeps each one for ever.

    :param owner: whoever starts the jobs.
    """
    made = context.accumulator(start, param)
    weakref.finalize(owner, _accumulatorRegistry.pop, made.aid, None)
    return made
