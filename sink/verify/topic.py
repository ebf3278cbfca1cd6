"""The topic between source and table: how far it is, and which keys changed in a part of it."""

from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from sink.config import Config
from sink.sources.buffer import topics_source
from sink.sources.source import Position
from sink.sources.topics import Offsets
from sink.spark.changes import is_bad, is_truncate
from sink.spark.decoding import RecordDecoder
from sink.table.table_plan import TablePlan

_BATCH_ROWS = 32_768


@dataclass(frozen=True)
class TopicChanges:
    """A part of the topic.

    :param rows: the changelog rows that change a key. Partial ones are among them.
    :param empties: whether a TRUNCATE is among the records, so that the row of any key may be gone.
    """

    rows: DataFrame
    empties: bool

    @classmethod
    def of(cls, decoded: DataFrame) -> "TopicChanges":
        """Those of decoded changelog rows. A record that can't be decoded is left out: it is a dead letter, and the
        table has nothing of it.
        """
        return cls(decoded.where(~is_bad(decoded)), not decoded.where(is_truncate()).isEmpty())


class Topic:
    """The topic, or all topics of a table that takes several.

    :param plan: how the table's messages are decoded."""

    def __init__(self, spark: SparkSession, config: Config, plan: TablePlan) -> None:
        self.name = plan.section.source
        self._table = plan.section
        self._source = topics_source(spark, config)
        self._decoder = RecordDecoder(config, plan, _ignore, _ignore, _BATCH_ROWS)

    def begin(self, time: int | None) -> Offsets:
        """Where messages begin that are at or after a time, in milliseconds since 1970; None: the first ones that it
        has. A partition without such messages is left out.
        """
        return self._source.offsets_since(self._table, time)

    def ends(self) -> Offsets:
        """Where it ends at the moment."""
        return self._source.ends(self._table)

    def left(self, position: Position, ends: Offsets) -> int:
        """How many messages before `ends` a position hasn't passed. Those that Kafka has removed don't count."""
        firsts = self.begin(None)
        starts = {p: max(int(position.get(p, 0)), firsts.get(p, 0)) for p in ends}
        return sum(max(0, end - starts[p]) for p, end in ends.items())

    def changes(self, begin: Offsets, end: Position) -> TopicChanges | None:
        """The changes between two places. None if there are no messages."""
        decoded = self.decoded(begin, end)
        return None if decoded is None else TopicChanges.of(decoded)

    def decoded(self, begin: Offsets, end: Position) -> DataFrame | None:
        """The changelog rows between two places, bad ones too. None if there are no messages."""
        # a partition that was added meanwhile is read from its first message
        first = {p: begin.get(p, 0) for p in end if int(end[p]) > begin.get(p, 0)}
        records = self._source.read_again(self._table, first, {p: end[p] for p in first}) if first else None
        return None if records is None else self._decoder.changes(records)


def _ignore(_: Any) -> None:
    return
