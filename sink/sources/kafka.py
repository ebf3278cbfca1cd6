"""Reads from Kafka with one streaming query for all topics. A position is partition -> next offset,
`{"0": 42, "1": 17}`; of a table with several topics `{"a-0": 42, "b-0": 17}`.

The query says which offsets a micro-batch covers. If several topics have messages in it, each table reads its own
topics' offsets in a separate batch read, or together with other tables that have few messages. So each message is read
once, and no messages are held in memory for other tables. Of a topic that several tables have, the query begins where
the first of them is, and each leaves out what it has.
"""

import functools
import heapq
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from py4j.java_gateway import JavaObject
from py4j.protocol import Py4JJavaError
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from changelog.amounts import amount
from changelog.changes import MOVED_AWAY, RAW_SCHEMA
from changelog.spec import HEADERS, header_column
from sink.config import Config, TableSection
from sink.errors import ConfigError, RowdeltaError, TableError, TemporaryError
from sink.sources.checkpoint import CheckpointFolder
from sink.sources.named_tables import NamedTables
from sink.sources.source import Behind, Position, Range, SharedRead, Stream, TableBatch
from sink.sources.topics import (
    EARLIEST,
    Admin,
    At,
    Offsets,
    Places,
    Topics,
    part_name,
    places_of,
    position_of,
    topics_of,
)
from sink.spark.expressions import any_of
from sink.spark.table_names import table_names

_TIMEOUT_MS = 15_000
_NO_ID = "AAAAAAAAAAAAAAAAAAAAAA"
"""Kafka's `Uuid.ZERO_UUID`."""
_MOST_TIMED = 100
"""The age of what isn't applied is asked of so many partitions, those with the most messages: that takes some requests
each."""
_MANY = 100_000
"""So many messages take a time to search that is worth a line in the log."""
_AGE_FACTOR = 1.25
_AGE_STEPS = 70
"""1.25 to this power is 70 days in seconds."""
_OWN_OPTIONS = {"subscribe", "startingoffsets", "startingtimestamp", "startingoffsetsbytimestamp"}
_STREAM_OPTIONS = {"maxoffsetspertrigger", "minoffsetspertrigger", "maxtriggerdelay", "kafka.group.id", "groupidprefix"}
_ISOLATION = "kafka.isolation.level"
_NEW_KEY = "__debezium.newkey"
"""The header by which Debezium says that the row of a delete goes on under another key."""
READ_OPTIONS = {"kafka.fetch.max.wait.ms": "10", _ISOLATION: "read_committed"}
"""Options of Spark's source, unless the configuration has others. The second one leaves out messages of transactions
that were aborted: whoever wrote them sends them again.

The first one: after each poll Spark asks for the partition's ends. The broker answers only after the next fetch has
ended. At the end of a topic, where a stream nearly always is, Kafka's default lets this fetch wait for half a second.
That happens for each partition that has messages."""


Part = tuple[str, str]
"""A topic and a partition of it."""
_PartOfTable = tuple[str, str, int]
"""The same, and the number of a table."""

log = logging.getLogger("rowdelta")


class KafkaSource(Topics):
    """Reads each topic from its table's position. Spark's checkpoint starts anew in every run, and for a new table."""

    one_stream = True

    def __init__(self, spark: SparkSession, config: Config) -> None:
        super().__init__(config.source.options)
        self._spark = spark
        self._config = config
        self._folder = CheckpointFolder(spark, f"{config.sink.checkpoint.rstrip('/')}/kafka/{config.sink.id}")
        names = {order.name for table in config.tables for order in table.order_columns}
        self._headers = sorted(name for name in names if name.startswith(HEADERS))
        self._with_headers = bool(self._headers) or config.source.format.startswith("debezium")
        self._generation = ""
        self._starts: dict[str, Places] = {}
        """By table: from where it is read."""
        self._begin: Places = {}
        """Where the stream begins."""
        self._ids: dict[str, Mapping[str, str]] = {}
        """By table: ids of its topics."""
        self._newer_ids: Mapping[str, str] = {}
        self._named = NamedTables(self._folder, "tables.json")
        self._looked_at = time.monotonic()
        self._caught_up: dict[tuple[str, str], int] = {}
        self._read: tuple[int, dict[str, Offsets], dict[str, Offsets]] | None = None

    def search(self, topics: Sequence[str], *, remember: bool) -> Mapping[str, Collection[str]]:
        with self._admin() as admin:
            ids = admin.ids(topics)
            earliest, latest = admin.limits(topics)
            for topic in topics:
                if topic not in latest and topic not in self._named.names:
                    raise admin.no_topic(topic)
        for topic, end in latest.items():
            searched = self._named.of(topic, ids.get(topic, ""), end).searched
            begin = {p: max(offset, searched.get(p, 0)) for p, offset in earliest[topic].items()}
            left = [p for p, offset in begin.items() if offset < end[p]]
            part = Range(topic, {p: begin[p] for p in left}, {p: end[p] for p in left})
            self._named.add(topic, {}, end, self._names_in(part) if left else ())
        if remember:
            self._named.store()
        return self._named.names

    def _names_in(self, part: Range) -> Collection[str]:
        count = sum(part.end[p] - offset for p, offset in part.begin.items())
        if count >= _MANY:
            log.info("%s: searching %s for the names of tables", part.topic, amount(count, "message"))
        return table_names(self._config, part.topic, self._frame(self._spark, [part]))

    def note(self, ranges: Sequence[Range], names: Collection[str]) -> None:
        for part in ranges:
            self._named.add(part.topic, dict(part.begin), dict(part.end), names)

    def _first_named(self, table: TableSection, topic: str) -> Offsets:
        return {} if table.feed.table is None else self._named.first(topic, table.source_tables[0])

    def locate(
        self, tables: Sequence[tuple[TableSection, Position | None]], from_start: Collection[str]
    ) -> Mapping[str, RowdeltaError]:
        failures: dict[str, RowdeltaError] = {}
        with self._admin() as admin:
            topics = topics_of(table for table, _ in tables)
            # first, so that offsets of a topic that is created again now get the id of the earlier one
            ids = admin.ids(topics)
            self._newer_ids = {topic: number for topic, number in self._newer_ids.items() if topic not in topics}
            earliest, latest = admin.limits(topics)
            for table, position in tables:
                self._ids[table.id] = {topic: ids[topic] for topic in table.topics if topic in ids}
                try:
                    self._starts[table.id] = self._start(admin, table, position, from_start, earliest, latest)
                except RowdeltaError as error:
                    failures[table.id] = error
                    continue
                if gone := [topic for topic in table.topics if topic not in self._starts[table.id]]:
                    log.warning("%s: there is no topic %s any more; the others are read", table.target, ", ".join(gone))
        return failures

    def streams(self, tables: Sequence[TableSection]) -> Sequence[Stream]:
        location = self._begin_generation(tables)
        options = READ_OPTIONS | {n: value for n, value in self._options.items() if n.lower() not in _OWN_OPTIONS}
        frame = (
            self._spark.readStream.format("kafka")
            .options(**options)
            .option("subscribe", ",".join(self._begin))
            .option("startingOffsets", json.dumps(self._begin))
            .option("includeHeaders", self._with_headers)
            .load()
        )
        return [Stream(self._config.sink.id, raw_records(frame, self._headers), location, tuple(tables))]

    def _begin_generation(self, tables: Sequence[TableSection]) -> str:
        """Let a new stream begin where `locate` decided. Returns the folder of its checkpoint."""
        self._generation = self._folder.new_generation()
        self._read = None
        self._caught_up = {}
        self._starts = {table.id: self._starts[table.id] for table in tables}
        self._begin = _first_of(self._starts.values())
        return self._folder.location(self._generation)

    def start_position(self, table: TableSection) -> Position | None:
        return position_of(table, self._starts[table.id])

    def identities(self, table: TableSection) -> Mapping[str, str]:
        return self._ids.get(table.id, {})

    def identify(self, table: TableSection) -> None:
        """Ask for the `identities` of a table that isn't located yet. Another thread may apply a micro-batch."""
        with self._admin() as admin:
            self._ids[table.id] = admin.ids(table.topics)

    def lacks_topics(self) -> bool:
        return not self._begin.keys() <= {topic for places in self._starts.values() for topic in places}

    def touched(self, stream: Stream, batch_id: int) -> Sequence[str]:
        begin, end = self._offsets(batch_id)
        changed = {topic for topic, ends in end.items() if begin.get(topic) != ends}
        return [table.id for table in stream.tables if not changed.isdisjoint(table.topics)]

    def batch(
        self, stream: Stream, batch_id: int, frame: DataFrame, table: TableSection, position: Position | None
    ) -> TableBatch | None:
        places, begins, ends = places_of(table, position or {}), *self._offsets(batch_id)
        self._check_ids(table, places)
        read, own = functools.partial(self._frame, frame.sparkSession), list[Range]()
        for topic in (topic for topic in table.topics if topic in ends):
            had = places.get(topic, {})
            found = self._left(table, topic, had, begins.get(topic, {}), ends[topic])
            new = [p for p in found.end if p not in had]
            if new and had and self._caught_up.get((table.id, topic)) != batch_id:
                self._caught_up[table.id, topic] = batch_id
                earlier = self._before_new(topic, new, had)
                if earlier is not None:
                    count = sum(to - earlier.begin[p] for p, to in earlier.end.items())
                    records = functools.partial(read, [earlier])
                    after = position_of(table, {**places, topic: {**had, **earlier.end}})
                    return TableBatch(records, after, count, share=SharedRead([earlier], read), more=True)
            if found.end:
                own.append(found)
        if not own:
            return None
        records = functools.partial(read, own)
        if all(other in table.topics or begins.get(other) == ends[other] for other in ends):
            # the usual case for a job with one table, or with one topic: use what Spark has planned anyway
            overlap = {
                (topic, p): offset
                for topic in table.topics
                for p, offset in places.get(topic, {}).items()
                if p in ends.get(topic, {}) and begins.get(topic, {}).get(p, 0) < offset
            }
            records = functools.partial(_beyond, frame, overlap)
        ahead = {topic: _begun(ends[topic], places.get(topic, {})) for topic in table.topics if topic in ends}
        end = self.furthest(position_of(table, ahead), position or {})
        count = sum(to - max(0, ours.begin[p]) for ours in own for p, to in ours.end.items())
        return TableBatch(records, end, count, share=SharedRead(own, read))

    def _left(self, table: TableSection, topic: str, had: Offsets, begin: Offsets, end: Offsets) -> Range:
        """What a micro-batch has of a topic that a table hasn't.

        :param begin: where the micro-batch begins and ends in the topic.
        :raises TableError: the table's position was set back, or the topic is shorter.
        """
        for partition, offset in begin.items():
            # a partition that the table's position doesn't have was read from the query's start, or was added later
            reached = had.get(partition, self._starts[table.id].get(topic, {}).get(partition, 0))
            if offset > reached:
                raise TableError(
                    f"{table.target}: its stored position for {topic}-{partition} is {reached}, but this run has "
                    f"read on to {offset}. The position was set back while the sink ran; start it again."
                )
        if shorter := {p: had[p] for p, to in end.items() if to < had.get(p, 0)}:
            # with failOnDataLoss: false Spark goes on from there, and what the table has would be left out
            with self._admin() as admin:
                self._check_ends(admin, table, topic, shorter)
        # a partition that was added meanwhile is read from its first message, whose offset may be above 0
        starts = {p: max(begin.get(p, 0), had.get(p, 0)) for p in end}
        todo = [p for p, to in end.items() if to > starts[p]]
        from_first = {p for p in todo if p not in begin and p not in had}
        return Range(topic, {p: EARLIEST if p in from_first else starts[p] for p in todo}, {p: end[p] for p in todo})

    def _before_new(self, topic: str, new: Sequence[str], had: Offsets) -> Range | None:
        """What other partitions have from before the first messages of new ones, and a position hasn't passed. Once a
        partition is added, messages of a key go to another one, and only their times say which are older.
        """
        with self._admin() as admin:
            latest = admin.offsets([topic], "latest").get(topic, {})
            first = admin.first_since({(topic, p): 0 for p in new})
            begin = {p: offset for p, offset in had.items() if offset < latest.get(p, 0)}
            if not first or not begin:
                return None
            oldest = min(timestamp for _, timestamp in first.values())
            since = admin.first_since({(topic, p): oldest for p in begin})
        end = {p: min(since.get((topic, p), (latest[p], 0))[0], latest[p]) for p in begin}
        end = {p: to for p, to in end.items() if to > begin[p]}
        return Range(topic, {p: begin[p] for p in end}, end) if end else None

    def _check_ids(self, table: TableSection, places: Places) -> None:
        """Look now and then whether topics were created again. Spark notices it only of one that is shorter now.

        :param places: the table's position.
        :raises TableError: a topic of the table was, and its position has passed messages of the earlier one.
        """
        if time.monotonic() - self._looked_at >= self._config.source.discovery_seconds:
            self._looked_at = time.monotonic()
            with suppress(TemporaryError), self._admin() as admin:  # if it doesn't answer, the stream itself tells
                self._newer_ids = admin.ids(list({topic for ids in list(self._ids.values()) for topic in ids}))
        for topic, known in self._ids.get(table.id, {}).items():
            number = self._newer_ids.get(topic, known)
            if number == known:
                continue
            if any(places.get(topic, {}).values()):
                raise TableError(
                    f"{table.target}: topic {topic} was deleted and created again while the sink ran, so the table's "
                    "position says nothing of it. Start the sink again: it says what can be done."
                )
            self._ids[table.id] = {**self._ids[table.id], topic: number}

    def is_ahead(self, other: Position, position: Position) -> bool:
        return any(int(offset) > int(position.get(partition, 0)) for partition, offset in other.items())

    def furthest(self, one: Position, other: Position) -> Position:
        return {p: max(int(one.get(p, 0)), int(other.get(p, 0))) for p in {**one, **other}}

    def read_again(self, table: TableSection, first: Position, end: Position) -> DataFrame | None:
        """Read raw records of a table's topics again.

        :param first: the position to begin with. Where Kafka has removed it, reading begins at the earliest offset.
        :param end: the position to read up to.
        :return: None if the topics have none of these records any more.
        """
        with self._admin() as admin:
            earliest = admin.offsets(table.topics, "earliest")
        ranges, ends = list[Range](), places_of(table, end)
        for topic, offsets in places_of(table, first).items():
            here, to = earliest.get(topic, {}), ends.get(topic, {})
            begin = {p: max(offset, here[p]) for p, offset in offsets.items() if p in here and p in to}
            begin = {p: offset for p, offset in begin.items() if offset < to[p]}
            ranges += [Range(topic, begin, {p: to[p] for p in begin})] if begin else []
        return self._frame(self._spark, ranges) if ranges else None

    def ends(self, table: TableSection) -> Offsets:
        """The position at which the table's topics end at the moment.

        :raises ConfigError: there is no such topic.
        """
        with self._admin() as admin:
            found = admin.offsets(table.topics, "latest")
            if not found:
                raise admin.no_topic(table.source)
            return position_of(table, found)

    def offsets_since(self, table: TableSection, timestamp: int | None) -> Offsets:
        """A position before the first message at or after a time, in all of a table's topics. A partition without such
        a message is left out.

        :param timestamp: milliseconds since 1970. None means the first message of all.
        """
        with self._admin() as admin:
            found = admin.offsets(table.topics, "earliest" if timestamp is None else timestamp)
        return {p: offset for p, offset in position_of(table, found).items() if offset >= 0}

    def _frame(self, spark: SparkSession, ranges: Sequence[Range], tasks: int | None = None) -> DataFrame:
        """Messages of some topics. To filter them out of a stream's frame would read all topics for each table.

        :param tasks: that read them; by default one for each topic-partition.
        """
        options = READ_OPTIONS | {
            name: value
            for name, value in self._options.items()
            if name.lower() not in _OWN_OPTIONS and name.lower() not in _STREAM_OPTIONS
        }
        by_name = {name.lower(): value for name, value in self._options.items()}
        # All reads use the same group, so that they share consumers. Otherwise each read would connect new ones. The
        # consumers never commit offsets.
        prefix = by_name.get("groupidprefix", "spark-kafka-source")
        group = by_name.get("kafka.group.id", f"{prefix}-rowdelta-{self._config.sink.id}")
        own = (
            spark.read.format("kafka")
            .options(**options)
            .option("kafka.group.id", group)
            .option("assign", json.dumps({part.topic: [int(p) for p in part.begin] for part in ranges}))
            .option("startingOffsets", json.dumps({part.topic: dict(part.begin) for part in ranges}))
            .option("endingOffsets", json.dumps({part.topic: dict(part.end) for part in ranges}))
            .option("includeHeaders", self._with_headers)
            .load()
        )
        # here, below the columns' selection: Spark forgets it where a shuffle follows at once (`CollapseRepartition`)
        return raw_records(own if tasks is None else own.coalesce(tasks), self._headers)

    def _offsets(self, batch_id: int) -> tuple[dict[str, Offsets], dict[str, Offsets]]:
        """The offsets where a micro-batch begins and ends, by topic. They are read once for all tables."""
        if self._read is None or self._read[0] != batch_id:
            if self._read is not None and self._read[0] == batch_id - 1:
                before = self._read[2]
            else:
                stored = self._folder.offsets(self._generation, batch_id - 1)
                before = self._begin if stored is None else stored
            self._read = batch_id, before, self._folder.offsets(self._generation, batch_id)
        return self._read[1:]

    def records(self, table: TableSection) -> DataFrame:
        with self._admin() as admin:
            earliest, latest = admin.limits(table.topics)
            if not latest:
                raise admin.no_topic(table.source)
        ranges = list[Range]()
        for topic, end in latest.items():
            first = self._first_named(table, topic)
            ranges.append(Range(topic, {p: max(earliest[topic][p], first.get(p, 0)) for p in end}, end))
        return self._frame(self._spark, ranges).select(*RAW_SCHEMA.names)

    def last_records(self, table: TableSection, count: int) -> DataFrame | None:
        with self._admin() as admin:
            earliest, latest = admin.limits(table.topics)
        ranges = list[Range]()
        for topic, end in latest.items():
            first = earliest[topic]
            begin = {p: max(first[p], to - count) for p, to in end.items() if to > first[p]}
            ranges += [Range(topic, begin, {p: end[p] for p in begin})] if begin else []
        return self._frame(self._spark, ranges).drop(MOVED_AWAY) if ranges else None

    def behind(self, tables: Sequence[tuple[TableSection, Position | None]]) -> Mapping[str, Mapping[str, Behind]]:
        with self._admin() as admin:
            earliest, latest = admin.limits(topics_of(table for table, _ in tables))
            reached = dict[_PartOfTable, int]()
            for number, (table, position) in enumerate(tables):
                places = places_of(table, position or {})
                for topic in table.topics:
                    for p, first in earliest.get(topic, {}).items():
                        reached[topic, p, number] = max(places.get(topic, {}).get(p, first), first)
            counts = {
                (topic, p, number): max(0, latest.get(topic, {}).get(p, offset) - offset)
                for (topic, p, number), offset in reached.items()
            }
            most = heapq.nlargest(
                _MOST_TIMED, (part for part, count in counts.items() if count), key=counts.__getitem__
            )
            ages = dict[_PartOfTable, float]()
            for parts in _each_once(most):
                aged = _ages({part: reached[whole] for part, whole in parts.items()}, admin.first_since, time.time())
                ages |= {parts[part]: seconds for part, seconds in aged.items()}
        found: dict[str, dict[str, Behind]] = {}
        for (topic, p, number), count in counts.items():
            table, _ = tables[number]
            age = ages.get((topic, p, number)) if count else 0.0
            found.setdefault(table.id, {})[part_name(table, topic, p)] = Behind(count, age)
        return found

    def partitions(self, table: TableSection) -> int:
        with self._admin() as admin:
            return max(map(len, admin.partitions(table.topics).values()), default=0)

    def with_messages(self, tables: Sequence[TableSection]) -> Collection[str]:
        with self._admin() as admin:
            earliest, latest = admin.limits(topics_of(tables))
        return [table.id for table in tables if any(latest.get(topic) != earliest.get(topic) for topic in table.topics)]

    def _admin(self) -> Any:
        return _Admin(self._spark, self._options)


def raw_records(frame: DataFrame, headers: Sequence[str]) -> DataFrame:
    """Raw records from the columns of Spark's Kafka source.

    :param headers: names of headers with `HEADERS` before them. Of several of a name, the last one counts.
    """
    columns = [F.col("topic").alias("source"), *map(F.col, ("partition", "offset", "timestamp", "key", "value"))]
    if "headers" in frame.columns:
        columns.append(F.exists("headers", lambda header: header["key"] == _NEW_KEY).alias(MOVED_AWAY))
    for name in headers:
        last = F.try_element_at(F.filter("headers", _named(name)), F.lit(-1))["value"]
        columns.append(last.alias(header_column(name)))
    return frame.select(*columns)


def _named(header: str) -> Callable[[Column], Column]:
    return lambda found: found["key"] == header.removeprefix(HEADERS)


def _begun(ends: Offsets, had: Offsets) -> Offsets:
    """Without partitions that were added and have no message yet: their first ones may be newer than what is unread of
    others (`KafkaSource._before_new`). Those of a table's start are known, and empty.
    """
    return {partition: offset for partition, offset in ends.items() if offset or partition in had}


def _beyond(frame: DataFrame, overlap: Mapping[Part, int]) -> DataFrame:
    """A stream's frame without the records that a table has already applied.

    :param overlap: offsets before which records are applied.
    """
    applied = [
        (F.col("source") == topic) & (F.col("partition") == int(p)) & (F.col("offset") < offset)
        for (topic, p), offset in overlap.items()
    ]
    return frame.where(~any_of(applied)) if applied else frame


def _first_of(starts: Iterable[Places]) -> Places:
    """Of each partition the lowest offset."""
    lowest: Places = {}
    for places in starts:
        for topic, offsets in places.items():
            known = lowest.setdefault(topic, {})
            known.update({p: min(offset, known.get(p, offset)) for p, offset in offsets.items()})
    return lowest


class _Admin(Admin):
    """Kafka's own admin client in the JVM. It accepts the same options as Spark's source, including SASL and TLS."""

    def __init__(self, spark: SparkSession, options: Mapping[str, str]) -> None:
        jvm = spark.sparkContext._jvm
        assert jvm is not None
        self._jvm = jvm
        super().__init__(options["kafka.bootstrap.servers"])
        self._milliseconds = jvm.java.util.concurrent.TimeUnit.MILLISECONDS
        self._specs = jvm.org.apache.kafka.clients.admin.OffsetSpec
        isolation = jvm.org.apache.kafka.common.IsolationLevel
        self._uncommitted = isolation.READ_UNCOMMITTED
        level = (READ_OPTIONS | dict(options))[_ISOLATION]
        self._level = self._uncommitted if level == "read_uncommitted" else isolation.READ_COMMITTED
        properties = jvm.java.util.HashMap()
        properties.put("default.api.timeout.ms", str(_TIMEOUT_MS))
        properties.put("request.timeout.ms", str(_TIMEOUT_MS // 2))
        for name, value in options.items():
            if name.startswith("kafka."):
                properties.put(name.removeprefix("kafka."), value)
        try:
            self._client = jvm.org.apache.kafka.clients.admin.Admin.create(properties)
        except Py4JJavaError as error:
            reason = _innermost(error)
            if "No resolvable bootstrap" in reason:
                raise TemporaryError(
                    f"Kafka at {self.servers} can't be reached: no server of this name is known. Correct "
                    "source.options.kafka.bootstrap.servers, or run again when the name can be resolved."
                ) from None
            raise ConfigError(
                f"source.options: Kafka's client refuses the options for {self.servers}: {reason}"
            ) from None

    def __enter__(self) -> "_Admin":
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def topics(self) -> list[str]:
        """Names of all topics, without Kafka's internal ones."""
        # joined in the JVM, because iterating over a Java set from Python takes round trips for each name
        names = self._get(self._client.listTopics().names())
        return [name for name in str(self._jvm.java.lang.String.join(",", names)).split(",") if name]

    def offsets(self, topics: Sequence[str], at: At) -> dict[str, Offsets]:
        spec = self._specs.forTimestamp(at) if isinstance(at, int) else getattr(self._specs, at)()
        return self._listed(topics, spec, self._level)

    def ends(self, topics: Sequence[str]) -> dict[str, Offsets]:
        return self._listed(topics, self._specs.latest(), self._uncommitted)

    def _listed(self, topics: Sequence[str], spec: JavaObject, level: JavaObject) -> dict[str, Offsets]:
        """:param spec: an `OffsetSpec`."""
        query = self._jvm.java.util.HashMap()
        partition_of = self._jvm.org.apache.kafka.common.TopicPartition
        for topic, partitions in self.partitions(topics).items():
            for partition in partitions:
                query.put(partition_of(topic, partition), spec)
        result: dict[str, Offsets] = {}
        if not query:
            return result
        listed = self._client.listOffsets(query, self._jvm.org.apache.kafka.clients.admin.ListOffsetsOptions(level))
        for entry in self._get(listed.all(), topics).entrySet():
            place = entry.getKey()
            result.setdefault(str(place.topic()), {})[str(place.partition())] = int(entry.getValue().offset())
        return result

    def first_since(self, times: Mapping[Part, int]) -> dict[Part, tuple[int, int]]:
        """Of each partition the first message at or after a time: its offset and its own time. Without such a message,
        the partition is left out.

        :param times: topic and partition -> milliseconds since 1970.
        """
        query = self._jvm.java.util.HashMap()
        partition_of = self._jvm.org.apache.kafka.common.TopicPartition
        for (topic, partition), timestamp in times.items():
            query.put(partition_of(topic, int(partition)), self._specs.forTimestamp(timestamp))
        found: dict[Part, tuple[int, int]] = {}
        for entry in self._get(self._client.listOffsets(query).all(), [topic for topic, _ in times]).entrySet():
            place, info = entry.getKey(), entry.getValue()
            if int(info.offset()) >= 0:
                found[str(place.topic()), str(place.partition())] = int(info.offset()), int(info.timestamp())
        return found

    def partitions(self, topics: Sequence[str]) -> dict[str, list[int]]:
        """The partitions of each topic, but of those that don't exist."""
        result = {}
        for topic, described in self._described(topics):
            partitions = described.partitions()
            # by index: to iterate over a Java list takes ten times as many calls to the JVM
            result[topic] = [int(partitions.get(i).partition()) for i in range(partitions.size())]
        return result

    def ids(self, topics: Sequence[str]) -> dict[str, str]:
        """The id of each topic, but of those that don't exist. Brokers before Kafka 2.8 have none."""
        found = {topic: str(described.topicId()) for topic, described in self._described(topics)}
        return {topic: number for topic, number in found.items() if number != _NO_ID}

    def _described(self, topics: Sequence[str]) -> Iterator[tuple[str, JavaObject]]:
        """:return: topics that exist, each with a `TopicDescription`."""
        names = self._jvm.java.util.ArrayList()
        for topic in topics:
            names.add(topic)
        futures = self._client.describeTopics(names).topicNameValues()
        for topic in topics:
            try:
                yield topic, self._get(futures.get(topic), [topic])
            except _UnknownTopicError:
                continue

    def _get(self, future: JavaObject, topics: Sequence[str] = ()) -> JavaObject:
        """The answer to a question.

        :param topics: those that it is about, for the message.
        """
        try:
            return future.get(2 * _TIMEOUT_MS, self._milliseconds)
        except Py4JJavaError as error:
            reason = str(error.java_exception)
            if "UnknownTopicOrPartition" in reason or "InvalidTopicException" in reason:
                raise _UnknownTopicError from None
            about = f" for {', '.join(list(dict.fromkeys(topics))[:3])}" if topics else ""
            raise TemporaryError(f"Kafka at {self.servers} did not answer{about}: {reason}") from None


def _each_once(parts: Iterable[_PartOfTable]) -> list[dict[Part, _PartOfTable]]:
    """Groups in which each partition of a topic is once: several tables may have reached different places in it."""
    groups, seen = list[dict[Part, _PartOfTable]](), Counter[Part]()
    for part in parts:
        place = part[:2]
        if seen[place] == len(groups):
            groups.append({})
        groups[seen[place]][place] = part
        seen[place] += 1
    return groups


def _ages(
    reached: Mapping[Part, int], first_since: Callable[[Mapping[Part, int]], Mapping[Part, tuple[int, int]]], now: float
) -> dict[Part, float]:
    """How old the first message is that a position hasn't passed, by the message's timestamp.

    No message is read. The broker is asked which message is the first one at or after a time, and the time is halved on
    and on, for all partitions at once. If it finds the message itself, the answer is exact, because the broker also
    says the message's own time. Otherwise it is at most a quarter too high.

    :param reached: partition -> offset of that message.
    :param now: seconds since 1970.
    """
    bounds = dict.fromkeys(reached, (0, _AGE_STEPS))
    ages: dict[Part, float] = {}
    while bounds:
        middles = {part: (low + high) // 2 for part, (low, high) in bounds.items()}
        found = first_since({part: int((now - _AGE_FACTOR**step) * 1000) for part, step in middles.items()})
        for part, step in middles.items():
            low, high = bounds.pop(part)
            offset, timestamp = found.get(part, (None, 0))
            if offset == reached[part]:
                ages[part] = max(0.0, now - timestamp / 1000)
                continue
            if offset is None or offset > reached[part]:
                low = step + 1  # it is older than that
            else:
                high = step
            if low < high:
                bounds[part] = low, high
            else:
                ages[part] = _AGE_FACTOR**high
    return ages


def _innermost(error: Py4JJavaError) -> str:
    """The exception at the beginning of the chain of causes."""
    exception = error.java_exception
    while (cause := exception.getCause()) is not None:
        exception = cause
    return str(exception.toString())


class _UnknownTopicError(TemporaryError):
    """The topic doesn't exist."""
