"""A reading of a source is of one point in its history. It is taken as fast as possible, so that no transaction stays
open in the database while the sink catches up.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from pyspark.sql import DataFrame


class Delivered(Enum):
    """Whether the topic has all changes that a reading saw."""

    YES = auto()
    TO_CONNECTOR = auto()
    """The database has given them to the connector, which needs some time to write them."""
    NOT_YET = auto()
    UNKNOWN = auto()
    """The database doesn't tell."""


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
