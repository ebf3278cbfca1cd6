"""The topic between source and table: how far it is, and which keys changed in a part of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import DataType

from changelog.changes import RAW_SCHEMA
from changelog.decoding import ChangelogDecoder, decoded_schema
from changelog.rows import BAD, order_column
from changelog.spec import ChangelogSpec
from sink.config import Config
from sink.databases.reading import Newest
from sink.sources.buffer import topics_source
from sink.sources.source import Position
from sink.sources.topics import Offsets
from sink.spark.changes import is_bad, is_truncate
from sink.spark.decoding import RecordDecoder
from sink.spark.versions import to_arrow
from sink.table.table_plan import TablePlan

_BATCH_ROWS = 32_768
_NEWEST = 20
"""So many offsets at the end of a partition have a change among them: others are tombstones and transactions' ends."""


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
        self._format, self._options = config.source.format, plan.changelog.options

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
        records = self._records(begin, end)
        return None if records is None else self._decoder.changes(records)

    def since_now(self) -> Newest:
        """What tells the newest messages that come from now on."""
        return partial(self._newest, self.ends())

    def _newest(self, begin: Offsets, fields: Sequence[tuple[str, DataType]]) -> list[tuple[Any, ...] | None]:
        end = self.ends()
        records = self._records({p: max(begin.get(p, 0), offset - _NEWEST) for p, offset in end.items()}, end)
        if records is None:
            return [None] * len(end)
        spec = ChangelogSpec((), (), order_by=tuple(fields), source_order=True, options=self._options)
        raw = to_arrow(records.select(*RAW_SCHEMA.names)).cast(RAW_SCHEMA)
        decoded = ChangelogDecoder(self._format, spec)(raw.to_batches())
        rows = pa.Table.from_batches(decoded, decoded_schema(spec)).filter(pc.field(BAD).is_null())
        columns = [rows.column(order_column(n)).to_pylist() for n in range(len(fields) + 2)]
        newest = dict[int, tuple[Any, ...] | None]()
        for *place, partition, _ in sorted(zip(*columns, strict=True), key=itemgetter(-1)):
            newest[partition] = tuple(place)
        return [*newest.values(), *[None] * (len(end) - len(newest))]

    def _records(self, begin: Offsets, end: Position) -> DataFrame | None:
        """Raw records between two places. None if there are none."""
        # a partition that was added meanwhile is read from its first message
        first = {p: begin.get(p, 0) for p in end if int(end[p]) > begin.get(p, 0)}
        return self._source.read_again(self._table, first, {p: end[p] for p in first}) if first else None


def _ignore(_: Any) -> None:
    return
