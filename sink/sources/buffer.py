"""Reads what Debezium's engine has put into the buffer (`sink.sources.engine`), as if its topics were Kafka's: each has
one partition, and a position is the next offset in it, `{"0": 42}`. So everything that holds for topics holds here.

The query has nothing to read: it ticks, and each of its micro-batches goes up to the ends that the buffer has by then.
"""

import json
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from sink.config import Config, TableSection
from sink.databases.captured import captured_topics
from sink.errors import DataError, TemporaryError
from sink.sources.engine import LAST_ERROR, is_running
from sink.sources.kafka import KafkaSource, raw_records
from sink.sources.source import Held, Position, Range, Stream, TableBatch
from sink.sources.topics import Admin, At, Offsets, Places, places_of
from sink.spark.expressions import any_of

log = logging.getLogger("rowdelta")

_PARTITION = "0"
_SEGMENT = re.compile(r"(\d{20})-(\d+)-(\d+)\.tsv")
_FIELDS = ("offset", "timestamp", "key", "headers", "value")


@dataclass(frozen=True, order=True)
class Segment:
    """A file of a topic: its first offset, the one after its last, and when it was written (milliseconds)."""

    first: int
    end: int
    written: int
    path: Path


class BufferSource(KafkaSource):
    """Reads each topic of the buffer from its table's position."""

    def __init__(self, spark: SparkSession, config: Config) -> None:
        super().__init__(spark, config)
        assert config.source.buffer is not None
        self._buffer = Path(config.source.buffer)

    def streams(self, tables: Sequence[TableSection]) -> Sequence[Stream]:
        location = self._begin_generation(tables)
        ticks = self._spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 1).load()
        return [Stream(self._config.sink.id, ticks, location, tuple(tables))]

    def batch(
        self, stream: Stream, batch_id: int, frame: DataFrame, table: TableSection, position: Position | None
    ) -> TableBatch | None:
        found = super().batch(stream, batch_id, frame, table, position)
        if found is None:
            return None
        assert found.share is not None
        ranges = found.share.ranges
        return replace(found, records=lambda: self._frame(frame.sparkSession, ranges))

    def names(self) -> Sequence[str]:
        """Tables that are loaded have topics also before the first change of a row."""
        found = super().names()
        if not self._config.load.auto:
            return found
        try:
            return sorted({*found, *(captured_topics(self._spark, self._config) or ())})
        except TemporaryError as error:
            log.warning("can't look which tables the database has: %s", error)
            return found

    def _start(
        self,
        admin: Admin,
        table: TableSection,
        position: Position | None,
        from_start: Collection[str],
        earliest: Mapping[str, Offsets],
        latest: Mapping[str, Offsets],
    ) -> Places:
        """:raises DataError: events that a new table needs were removed when others had passed them."""
        starts, had = (
            super()._start(admin, table, position, from_start, earliest, latest),
            places_of(table, position or {}),
        )
        for topic, offsets in starts.items():
            if not had.get(topic) and offsets[_PARTITION] > 0:
                raise DataError(
                    f"{table.target}: the buffer {self._buffer} no longer has the first events of {topic}. Load the "
                    "table, or take a new snapshot: docs/without-kafka.md says how."
                )
        return starts

    def remove_applied(self, tables: Sequence[tuple[TableSection, Position | None]]) -> None:
        """Remove segments that all tables of their topics have passed. Those of a topic that no table has stay.

        :param tables: all tables, with the positions from which they need it; None if it isn't known.
        """
        for topic, reached in _passed(tables).items():
            segments = self._admin().segments(topic)
            for segment in segments[:-1]:
                if segment.end <= reached:
                    segment.path.unlink(missing_ok=True)

    def held(self, tables: Sequence[tuple[TableSection, Position | None]]) -> Held:
        """What the buffer holds for tables. Another thread may ask while it is written and read.

        :param tables: as of `remove_applied`.
        """
        passed, admin = _passed(tables), self._admin()
        events = size = written = 0
        for topic, end in admin.ends(admin.topics()).items():
            reached = passed.get(topic, 0)
            events += max(0, end[_PARTITION] - reached)
            for segment in admin.segments(topic):
                written = max(written, segment.written)
                if segment.end > reached:
                    with suppress(FileNotFoundError):  # it was just removed
                        size += segment.path.stat().st_size
        return Held(events, size, written or None)

    def is_written(self) -> bool:
        """Whether an engine runs."""
        return is_running(self._buffer)

    def last_error(self) -> str:
        """Why the engine has ended, until it works again. Else empty."""
        with suppress(FileNotFoundError):
            return (self._buffer / LAST_ERROR).read_text(encoding="utf-8")
        return ""

    def _admin(self) -> "_Buffer":
        return _Buffer(self._buffer)

    def _frame(self, spark: SparkSession, ranges: Sequence[Range], tasks: int | None = None) -> DataFrame:
        paths, wanted = list[str](), list[Any]()
        lines = F.split("value", "\t", len(_FIELDS))
        topic = F.element_at(F.split("_metadata.file_path", "/"), -2)
        for part in ranges:
            begin, end = max(part.begin[_PARTITION], 0), part.end[_PARTITION]
            reached = begin
            for segment in self._admin().segments(part.topic):
                if segment.first <= reached < min(segment.end, end):
                    paths.append(f"file:{segment.path}")
                    reached = segment.end
            if reached < end:
                raise DataError(
                    f"the buffer {self._buffer} has lost events of {part.topic} from offset {reached} on. Take a new "
                    "snapshot: docs/without-kafka.md says how."
                )
            offset = lines[0].cast("long")
            wanted.append((topic == part.topic) & (offset >= begin) & (offset < end))
        reader = spark.read.option("__globPaths__", "false")
        # whatever the session says: what isn't read would be lost
        text = reader.options(ignoreMissingFiles="false", ignoreCorruptFiles="false").format("text").load(paths)
        # a task may get several segments, in any order
        found = text.where(any_of(wanted)).select(
            topic.alias("topic"),
            F.lit(int(_PARTITION)).alias("partition"),
            lines[0].cast("long").alias("offset"),
            F.timestamp_millis(lines[1].cast("long")).alias("timestamp"),
            F.when(lines[2] != "", lines[2]).cast("binary").alias("key"),  # Spark 3.5 has no `nullif` of such columns
            F.when(lines[4] != "", lines[4]).cast("binary").alias("value"),
            F.expr(
                "transform(map_entries(from_json(nullif(split(value, '\t', 5)[3], ''), 'map<string,string>')), "
                "entry -> struct(entry.key AS key, CAST(entry.value AS binary) AS value))"
            ).alias("headers"),
        )
        ordered = (found if tasks is None else found.coalesce(tasks)).sortWithinPartitions("topic", "offset")
        return raw_records(ordered, self._headers)

    def _offsets(self, batch_id: int) -> tuple[dict[str, Offsets], dict[str, Offsets]]:
        if self._read is None or self._read[0] != batch_id:
            before = self._begin if self._read is None else self._read[2]
            ends = self._admin().offsets(list(self._begin), "latest")
            self._read = batch_id, before, ends
        return self._read[1:]


def _passed(tables: Sequence[tuple[TableSection, Position | None]]) -> dict[str, int]:
    """How far all tables of a topic have come."""
    passed = dict[str, int]()
    for table, position in tables:
        places = places_of(table, position or {})
        for topic in table.topics:
            reached = places.get(topic, {}).get(_PARTITION, 0)
            passed[topic] = min(reached, passed.get(topic, reached))
    return passed


def topics_source(spark: SparkSession, config: Config) -> KafkaSource:
    """The source of topics, whoever keeps them."""
    return BufferSource(spark, config) if config.source.type == "debezium" else KafkaSource(spark, config)


class _Buffer(Admin):
    """What the buffer has. A topic without an event is empty, since the engine makes it with its first one."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self._folder = folder

    def __enter__(self) -> "_Buffer":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def _state(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((self._folder / "state.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {"ends": {}}
        return found

    def segments(self, topic: str) -> list[Segment]:
        """In their order. The engine may have begun more of them than its state says."""
        folder = self._folder / "topics" / topic
        files = folder.iterdir() if folder.is_dir() else ()
        found = [(name, file) for file in files if (name := _SEGMENT.fullmatch(file.name))]
        return sorted(Segment(int(name[1]), int(name[1]) + int(name[2]), int(name[3]), file) for name, file in found)

    def topics(self) -> list[str]:
        return sorted(self._state()["ends"])

    def partitions(self, topics: Sequence[str]) -> dict[str, list[int]]:
        return {topic: [int(_PARTITION)] for topic in topics}

    def ids(self, topics: Sequence[str]) -> dict[str, str]:
        state = self._state()
        return {topic: state["id"] for topic in topics if "id" in state}

    def offsets(self, topics: Sequence[str], at: At) -> dict[str, Offsets]:
        ends: Mapping[str, int] = self._state()["ends"]

        def offset(topic: str) -> int:
            if at == "latest":
                return ends.get(topic, 0)
            segments = (s for s in self.segments(topic) if at == "earliest" or s.written >= at)
            none = ends.get(topic, 0) if at == "earliest" else -1
            return min((segment.first for segment in segments), default=none)

        return {topic: {_PARTITION: offset(topic)} for topic in topics}

    def ends(self, topics: Sequence[str]) -> dict[str, Offsets]:
        return self.offsets(topics, "latest")

    def first_since(self, times: Mapping[tuple[str, str], int]) -> dict[tuple[str, str], tuple[int, int]]:
        """As `sink.sources.kafka` asks: of each partition the first event at or after a time, and its own time."""
        found = dict[tuple[str, str], tuple[int, int]]()
        for part, timestamp in times.items():
            segment = next((s for s in self.segments(part[0]) if s.written >= timestamp), None)
            if segment is not None:
                found[part] = segment.first, segment.written
        return found
