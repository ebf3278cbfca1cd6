"""Intervals of time as the configuration has them: `10 seconds`."""

import re
from typing import Annotated

from pydantic import AfterValidator

from sink.config.base import Text

_INTERVAL = re.compile(r"(\d+) (millisecond|second|minute|hour|day)s?")
_UNIT_SECONDS = {"millisecond": 0.001, "second": 1.0, "minute": 60.0, "hour": 3600.0, "day": 86400.0}


def is_interval(text: str) -> bool:
    return _INTERVAL.fullmatch(text) is not None


def seconds_of(interval: str) -> float:
    match = _INTERVAL.fullmatch(interval)
    assert match is not None
    return int(match[1]) * _UNIT_SECONDS[match[2]]


def examples(value: str) -> str:
    """Intervals that may have been meant."""
    number = value if value.isdecimal() else "10"
    return f'"{number} seconds" or "1 minute"'


def _interval(value: str) -> str:
    if not is_interval(value):
        raise ValueError(f"write an interval such as {examples(value)}")
    return value


Interval = Annotated[Text, AfterValidator(_interval)]
