"""Kafka: one streaming query for all topics. A position is topic-partition -> next offset, `{"0": 42, "1": 17}`."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from py4j.protocol import Py4JJavaError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from changelog.row_kind_columns import any_of
from sink.config import Config, TableSection
from sink.errors import ConfigError, DataError, TableError, TemporaryError
from sink.sources.checkpoint import CheckpointFolder
from sink.sources.source import BadRecords, Position, Stream, TableBatch

_TIMEOUT_MS = 15_000
_OWN_OPTIONS = {"subscribe", "startingoffsets", "startingtimestamp", "startingoffsetsbytimestamp"}


class KafkaSource:
    """Reads each topic from where its table got to; Spark's checkpoint is fresh in every run."""

    def __init__(self, spark: SparkSession, config: Config) -> None:
        self._spark = spark
        self._config = config
        self._options = config.source.options
        self._folder = CheckpointFolder(spark, f"{config.sink.checkpoint.rstrip('/')}/kafka")
        self._generation = ""
        self._starts: dict[str, dict[str, int]] = {}

    def streams(self, positions: Mapping[str, Position | None]) -> Sequence[Stream]:
        self._generation = self._folder.new_generation()
        with self._admin() as admin:
            for table in self._config.tables:
                self._starts[table.source] = admin.start(table, positions[table.target], self._options)
        options = {name: value for name, value in self._options.items() if name.lower() not in _OWN_OPTIONS}
        frame = (
            self._spark.readStream.format("kafka")
            .options(**options)
            .option("subscribe", ",".join(self._starts))
            .option("startingOffsets", json.dumps(self._starts))
            .load()
        )
        tables = tuple(self._config.tables)
        return [Stream(self._config.sink.id, _records(frame), self._folder.location(self._generation), tables)]

    def start_position(self, table: TableSection) -> Position | None:
        return self._starts[table.source]

    def batch(
        self, stream: Stream, batch_id: int, frame: DataFrame, table: TableSection, position: Position | None
    ) -> TableBatch | None:
        topic = table.source
        end = self._folder.offsets(self._generation, batch_id).get(topic, {})
        before = self._folder.offsets(self._generation, batch_id - 1)
        begin = self._starts[topic] if before is None else before.get(topic, {})
        had = {partition: int(offset) for partition, offset in (position or {}).items()}
        for partition, offset in begin.items():
            if offset > had.get(partition, offset):
                raise TableError(
                    f"{table.target}: its stored position for {topic}-{partition} is {had[partition]}, but this run has "
                    f"read on to {offset}. The position was set back while the sink ran; start it again."
                )
        todo = {p: to - max(begin.get(p, 0), had.get(p, 0)) for p, to in end.items()}
        if not any(count > 0 for count in todo.values()):
            return None
        overlap = {p: had[p] for p in end if begin.get(p, 0) < had.get(p, 0)}
        records = frame if len(stream.tables) == 1 else frame.where(F.col("source") == topic)
        if overlap:
            applied = [(F.col("partition") == int(p)) & (F.col("offset") < offset) for p, offset in overlap.items()]
            records = records.where(~any_of(applied))
        ahead = {p: max(int(offset), had.get(p, 0)) for p, offset in end.items()}
        return TableBatch(records, had | ahead, _beyond, sum(max(0, count) for count in todo.values()))

    def read_again(self, topic: str, first: Mapping[int, int], end: Position) -> DataFrame | None:
        """Raw records that were read before: of each partition in `first` from that offset, or the earliest that there is, to `end`.

        :return: None if the topic has none of them any more.
        """
        with self._admin() as admin:
            earliest = admin.offsets(topic, admin.earliest())
        spans = {str(p): (max(offset, earliest.get(str(p), offset)), int(end[str(p)])) for p, offset in first.items()}
        spans = {partition: span for partition, span in spans.items() if partition in earliest and span[0] < span[1]}
        if not spans:
            return None
        options = {name: value for name, value in self._options.items() if name.startswith("kafka.")}
        frame = (
            self._spark.read.format("kafka")
            .options(**options)
            .option("assign", json.dumps({topic: sorted(int(partition) for partition in spans)}))
            .option(
                "startingOffsets", json.dumps({topic: {partition: start for partition, (start, _) in spans.items()}})
            )
            .option("endingOffsets", json.dumps({topic: {partition: stop for partition, (_, stop) in spans.items()}}))
            .load()
        )
        return _records(frame)

    def lag(self, table: TableSection, position: Position | None) -> str:
        with self._admin() as admin:
            latest = admin.offsets(table.source, admin.latest())
            earliest = admin.offsets(table.source, admin.earliest())
        had = position or {}
        behind = sum(max(0, end - int(had.get(p, earliest[p]))) for p, end in latest.items())
        return f"{behind:,} messages behind"

    def check(self, table: TableSection) -> str:
        with self._admin() as admin:
            latest = admin.offsets(table.source, admin.latest())
            earliest = admin.offsets(table.source, admin.earliest())
        messages = sum(latest[p] - earliest[p] for p in latest)
        return f"topic {table.source}: {len(latest)} partitions, {messages:,} messages"

    def _admin(self) -> "_Admin":
        return _Admin(self._spark, self._options)


def _records(frame: DataFrame) -> DataFrame:
    """Raw records from the columns of Spark's Kafka source."""
    return frame.select(F.col("topic").alias("source"), "partition", "offset", "timestamp", "key", "value")


def _beyond(position: Position) -> BadRecords:
    offsets = {int(partition): int(offset) for partition, offset in position.items()}

    def beyond(bad: pa.StructArray) -> pa.BooleanArray:
        partition, offset = bad.field("partition"), bad.field("offset")
        mask = pa.repeat(True, len(bad))
        for number, end in offsets.items():
            mask = pc.and_(mask, pc.or_(pc.not_equal(partition, number), pc.greater_equal(offset, end)))
        return mask

    return beyond


class _Admin:
    """Kafka's own admin client in the JVM: it takes the very options that Spark's source takes, SASL and TLS included."""

    def __init__(self, spark: SparkSession, options: Mapping[str, str]) -> None:
        jvm = spark.sparkContext._jvm
        assert jvm is not None
        self._jvm = jvm
        self._servers = options["kafka.bootstrap.servers"]
        properties = jvm.java.util.HashMap()
        properties.put("default.api.timeout.ms", str(_TIMEOUT_MS))
        properties.put("request.timeout.ms", str(_TIMEOUT_MS // 2))
        for name, value in options.items():
            if name.startswith("kafka."):
                properties.put(name.removeprefix("kafka."), value)
        self._client = jvm.org.apache.kafka.clients.admin.Admin.create(properties)

    def __enter__(self) -> "_Admin":
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def latest(self) -> Any:
        return self._jvm.org.apache.kafka.clients.admin.OffsetSpec.latest()

    def earliest(self) -> Any:
        return self._jvm.org.apache.kafka.clients.admin.OffsetSpec.earliest()

    def offsets(self, topic: str, spec: Any) -> dict[str, int]:
        """Partition -> offset that `spec` (an `OffsetSpec`) selects."""
        query = self._jvm.java.util.HashMap()
        for partition in self._partitions(topic):
            query.put(self._jvm.org.apache.kafka.common.TopicPartition(topic, partition), spec)
        found = self._get(self._client.listOffsets(query).all(), topic)
        return {str(entry.getKey().partition()): int(entry.getValue().offset()) for entry in found.entrySet()}

    def start(self, table: TableSection, position: Position | None, options: Mapping[str, str]) -> dict[str, int]:
        """Next offset of every partition: the stored one, else what `startingOffsets` asks for.

        :raises TableError: the topic ends before the stored position.
        :raises DataError: the topic begins after it.
        """
        topic = table.source
        latest = self.offsets(topic, self.latest())
        if position is None:
            return self._configured(topic, options, latest)
        earliest = self.offsets(topic, self.earliest())
        # partitions that were added since begin at their first message
        start = earliest | {p: int(offset) for p, offset in position.items()}
        may_lose = {name.lower(): value for name, value in options.items()}.get(
            "failondataloss", "true"
        ).lower() == "false"
        for partition, first in earliest.items():
            if start[partition] < first and not may_lose:
                raise DataError(
                    f"{table.target} has applied {topic}-{partition} up to offset {start[partition]}, but Kafka has removed "
                    f"what follows before offset {first}. Take a new snapshot of the source into the topic (mode: upsert), "
                    "with source.options.failOnDataLoss: false to go on from what is there."
                )
        for partition, end in latest.items():
            if start[partition] > end:
                raise TableError(
                    f"{table.target} has applied {topic}-{partition} up to offset {start[partition]}, but the topic ends at "
                    f"{end}. Was it deleted and created again? To read it from the start, remove the stored position (see "
                    "README, Reset)."
                )
        return {partition: start[partition] for partition in latest}

    def _configured(self, topic: str, options: Mapping[str, str], latest: dict[str, int]) -> dict[str, int]:
        by_name = {name.lower(): value for name, value in options.items()}
        if "startingtimestamp" in by_name:
            spec = self._jvm.org.apache.kafka.clients.admin.OffsetSpec.forTimestamp(int(by_name["startingtimestamp"]))
            found = self.offsets(topic, spec)
            return {p: found[p] if found[p] >= 0 else latest[p] for p in latest}
        text = by_name.get("startingoffsets", "earliest")
        earliest = self.offsets(topic, self.earliest())
        if text in ("earliest", "latest"):
            return earliest if text == "earliest" else latest
        try:
            given = {str(p): int(offset) for p, offset in json.loads(text)[topic].items()}
        except (ValueError, KeyError, AttributeError, TypeError):
            raise ConfigError(
                f"source.options.startingOffsets: got {text!r}, expected earliest, latest, or JSON such as "
                f'{{"{topic}": {{"0": 42}}}}'
            ) from None
        special = {-2: earliest, -1: latest}
        chosen = earliest | given
        return {p: special[offset][p] if offset in special else offset for p, offset in chosen.items() if p in latest}

    def _partitions(self, topic: str) -> list[int]:
        names = self._jvm.java.util.Collections.singletonList(topic)
        found = self._get(self._client.describeTopics(names).allTopicNames(), topic)
        return [partition.partition() for partition in found.get(topic).partitions()]

    def _get(self, future: Any, topic: str) -> Any:
        try:
            return future.get(2 * _TIMEOUT_MS, self._jvm.java.util.concurrent.TimeUnit.MILLISECONDS)
        except Py4JJavaError as error:
            reason = str(error.java_exception)
            if "UnknownTopicOrPartition" in reason:
                raise ConfigError(
                    f"Kafka at {self._servers} has no topic {topic!r}. Create it, or correct tables[].source."
                ) from None
            raise TemporaryError(f"Kafka at {self._servers} did not answer for topic {topic!r}: {reason}") from None
