"""Accumulators of Spark: what tasks tell the driver beside their results. They go when their owner goes."""

import weakref
from collections import Counter
from typing import ClassVar, TypeVar

from pyspark import SparkContext
from pyspark.accumulators import Accumulator, AccumulatorParam, _accumulatorRegistry

from changelog.decoding import Stated, merged_facts
from changelog.observed_types import merged_types

T = TypeVar("T")
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


class ListParam(AccumulatorParam[list[T]]):
    """Collects the paths that finished tasks wrote. The driver gets them even if the job fails later, and deletes the
    files.
    """

    def zero(self, value: list[T]) -> list[T]:
        return []

    def addInPlace(self, value1: list[T], value2: list[T]) -> list[T]:  # noqa: N802 - Spark's name
        return value1 + value2


class Counts(AccumulatorParam[dict[str, int]]):
    """Adds up numbers by name."""

    def zero(self, value: dict[str, int]) -> dict[str, int]:
        return {}

    def addInPlace(self, value1: dict[str, int], value2: dict[str, int]) -> dict[str, int]:  # noqa: N802 - Spark's name
        return dict(Counter(value1) + Counter(value2))


class ObservedTypes(AccumulatorParam[dict[str, str]]):
    """Types that decoders saw and that the table can't store (`changelog.observed_types.Observed`)."""

    def zero(self, value: dict[str, str]) -> dict[str, str]:
        return {}

    def addInPlace(self, value1: dict[str, str], value2: dict[str, str]) -> dict[str, str]:  # noqa: N802 - Spark's name
        return merged_types(value1, value2)


class FirstPlaces(AccumulatorParam[Stated]):
    """The keys that the messages state, with the first place of each."""

    NONE: ClassVar[Stated] = {}

    def zero(self, value: Stated) -> Stated:
        return self.NONE

    def addInPlace(self, value1: Stated, value2: Stated) -> Stated:  # noqa: N802 - Spark's name
        return merged_facts(value1, value2)
