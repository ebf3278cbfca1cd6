"""The levels of minor compactions (`sink.table.minor_compaction`): how far back the one with a given number looks."""

EVERY = 4
"""A minor compaction follows after at least this many commits. One of the next higher level follows after this many
minor compactions of a level.
"""
_HIGHEST_LEVEL = 3
"""At this level the files of 64 minor compactions become one. Looking further back would cost more than it saves."""


def level(number: int) -> int:
    """The level of the minor compaction with this number: how many times `EVERY` divides the number."""
    found = next(level for level in range(number) if number % EVERY ** (level + 1))
    return min(found, _HIGHEST_LEVEL)


def is_below(number: int, current: int) -> bool:
    """Whether the files of minor compaction `number` belong to a higher level than the one that `current` merges."""
    return number <= current - int(EVERY ** level(current))
