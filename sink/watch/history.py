"""The last hour as numbers at fixed distances, in fixed memory."""

import math
from array import array

STEP = 10
"""Seconds between two points."""
POINTS = 360


class Series:
    """One series: for each step of time the sum of what was added, or the last value that was set.

    :param empty: the value of a step in which nothing happened: 0 for sums, NaN for values.
    """

    def __init__(self, empty: float) -> None:
        self._empty = empty
        self._points = array("d", [empty]) * POINTS
        self._newest = 0

    def add(self, now: float, amount: float) -> None:
        self._points[self._slot(now)] += amount

    def set(self, now: float, value: float) -> None:
        self._points[self._slot(now)] = value

    def points(self, now: float) -> list[float | None]:
        """Oldest first; the last one is the current step, which isn't over. None where there is no value."""
        end = self._slot(now) + 1
        ordered = [*self._points[end:], *self._points[:end]]
        return [None if math.isnan(value) else round(value, 3) for value in ordered]

    def rate(self, now: float, seconds: int = 60) -> float:
        """What was added per second in the last full steps."""
        steps = seconds // STEP
        slot = self._slot(now)
        return sum(self._points[(slot - n) % POINTS] for n in range(1, steps + 1)) / (steps * STEP)

    def _slot(self, now: float) -> int:
        """The place of the current step. Places of steps that were skipped are emptied."""
        step = int(now // STEP)
        for skipped in range(max(self._newest + 1, step - POINTS + 1), step + 1):
            self._points[skipped % POINTS] = self._empty
        self._newest = max(self._newest, step)
        return self._newest % POINTS
