"""How often and how fast a refused commit is tried again."""

import random
import time

from sink.errors import TemporaryError
from sink.targets.values import Refused

_MOST_DOUBLINGS = 30
"""A pause is doubled at most this often. Every limit is reached before, and the number doesn't overflow."""


class Retries:
    """Counts how often a micro-batch is committed again, whatever the reasons for the refusals.

    :param table: name of the table, for messages.
    :param number: most retries.
    :param shortest: seconds to wait before the first retry.
    :param longest: most seconds to wait before a retry.
    :param way_out: what the user can do besides running again, for messages. Empty if there is nothing.
    """

    def __init__(self, table: str, number: int, shortest: float, longest: float, way_out: str = "") -> None:
        self._table = table
        self._number = number
        self._shortest = shortest
        self._longest = longest
        self._way_out = way_out
        self._done = 0
        self._last: Refused | None = None

    def wait(self, refused: Refused) -> None:
        """Call this before another attempt. The same refusal counts only once, even if several callers report it.

        :raises TemporaryError: the limit is reached.
        """
        if refused is self._last:
            return
        self._last = refused
        if self._done >= self._number:
            raise TemporaryError(
                f"{self._table}: other writers kept committing in between, and all {self._number} retries are used up. "
                f"Nothing was applied; run again{self._way_out}. Last conflict: {refused.why}"
            )
        time.sleep(doubled(self._shortest, self._done, self._longest) * random.uniform(0.9, 1.1))
        self._done += 1


def doubled(pause: float, times: int, longest: float) -> float:
    """A pause that is twice as long after each failure, up to the longest."""
    return min(longest, pause * 2.0 ** min(times, _MOST_DOUBLINGS))
