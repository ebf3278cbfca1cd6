"""A reading of a source is of one point in its history. It is taken as fast as possible, so that no transaction stays
open in the database while the sink catches up.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql.types import DataType


class Delivered(Enum):
    """Whether the topic has all changes that a reading saw."""

    YES = auto()
    TO_CONNECTOR = auto()
    """The database has given them to the connector, which needs some time to write them."""
    NOT_YET = auto()
    UNKNOWN = auto()
    """The database doesn't tell."""


Newest = Callable[[Sequence[tuple[str, DataType]]], Sequence[tuple[Any, ...] | None]]
"""Names and types of fields in messages, as in `order_by` -> their values in the newest message of each partition of
the topic; None if no message has come since the reading.
"""
_POLL_SECONDS = 0.5


def wait_for_delivery(
    delivered: Callable[[], tuple[Delivered, str]],
    settle: float,
    until: float,
    tell: Callable[[str], None],
    stopping: Callable[[], bool] = lambda: False,
) -> bool:
    """Wait until the topic has all changes that a reading saw. False if somebody stopped it before.

    :param delivered: says whether that is so, and in words how far it is.
    :param settle: seconds that a change takes from the connector into the topic, at most.
    :param until: the time (`time.monotonic`) at which the wait ends.
    :param tell: is called with these words.
    :raises TimeoutError: with these words.
    """
    settled = None
    while not stopping():
        state, text = delivered()
        now = time.monotonic()
        if state is Delivered.YES:
            return True
        if state is Delivered.NOT_YET:
            settled = None
        else:
            settled = now + settle if settled is None else settled
            if now >= settled:
                return True
        if now > until:
            raise TimeoutError(text)
        tell(text)
        time.sleep(_POLL_SECONDS if settled is None else min(_POLL_SECONDS, settled - now))
    return False


@dataclass(frozen=True)
class Keys:
    """Only rows with these keys are wanted. A source may give others too.

    :param columns: the key's columns in the source.
    :param values: their values as text, one tuple a key.
    """

    columns: Sequence[str]
    values: Sequence[tuple[str, ...]]


@dataclass(frozen=True)
class SourceRows:
    """Rows of one point in the source's history.

    :param frame: has a column for each one that was asked for, of its own name.
    :param position: the point, in words: an LSN, a GTID. Empty if the source has none.
    """

    frame: DataFrame
    position: str
