"""Sends dead letters to a topic too, each exactly once, by Kafka's transactions.

A transaction contains the messages of one commit, and the commit's name. The name is stored as an offset of a consumer
group that nobody joins. So if the name is there, the messages are in the topic. (Kafka's own clients commit offsets in
a transaction in the same way; see the protocol's `TxnOffsetCommit`.)
"""

from collections.abc import Iterator
from uuid import uuid4

from py4j.java_gateway import JavaObject
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from sink.config import Config
from sink.errors import TemporaryError

HEADERS = {
    "rowdelta.topic": "source",
    "rowdelta.partition": "partition",
    "rowdelta.offset": "offset",
    "rowdelta.table": "table",
    "rowdelta.reason": "reason",
    "rowdelta.error_class": "error_class",
    "rowdelta.time": "time",
}
"""Header of a message -> column of the dead-letter table whose value it has, as text."""

_TIMEOUT_SECONDS = 30
_BYTES = "org.apache.kafka.common.serialization.ByteArraySerializer"
_LIMITS = {
    "kafka.max.request.size": str(2**31 - 1),
    "kafka.buffer.memory": str(128 * 1024 * 1024),
    "kafka.transaction.timeout.ms": str(5 * 60_000),
}
"""Producer's options, unless the configuration has others. By default it takes no message of more than 1 MB, and a
letter is larger than its record. All letters of a commit are one transaction, which by default may take a minute."""


class DeadLetterTopic:
    """Sends dead letters to `sink.dead_letter_topic`."""

    def __init__(self, spark: SparkSession, config: Config, name: str) -> None:
        jvm = spark.sparkContext._jvm
        assert jvm is not None
        self._jvm = jvm
        self._kafka = jvm.org.apache.kafka
        self._sink_id = config.sink.id
        self._options = topic_options(config)
        self.name = name

    @property
    def servers(self) -> str:
        return self._options["kafka.bootstrap.servers"]

    def send(self, target: str, commit: str, letters: DataFrame) -> None:
        """Send the rows that a commit added for a target, unless the topic already has them.

        :param target: the target table.
        :param commit: name of the commit.
        :param letters: rows of the dead-letter table.
        :raises TemporaryError: Kafka did not accept them, or its answer was lost. The next call finds out which.
        """
        group = f"rowdelta.{self._sink_id}.{target}"
        messages = letters.select("key", "value", F.array(*_headers()).alias("headers"))
        try:
            self._send(group, commit, messages)
        except (PySparkException, Py4JJavaError) as error:
            raise TemporaryError(
                f"dead-letter topic {self.name} at {self.servers} did not take the bad records; they are in the "
                "dead-letter table, and the next run sends them. Does the topic exist, may the sink write to it, in "
                "transactions, does its max.message.bytes leave room for a record with its headers, and does the "
                "broker allow kafka.transaction.timeout.ms (five minutes, unless dead_letter_options say otherwise)? "
                f"{_cause(error)}"
            ) from None

    def _send(self, group: str, commit: str, messages: DataFrame) -> None:
        spark_kafka = self._jvm.org.apache.spark.sql.kafka010
        pool = getattr(getattr(spark_kafka.producer, "InternalKafkaProducerPool$"), "MODULE$")
        properties = self._properties(
            {name.removeprefix("kafka."): value for name, value in _LIMITS.items() if name not in self._options}
            | {
                "key.serializer": _BYTES,
                "value.serializer": _BYTES,
                "acks": "all",
                # Kafka aborts an open transaction of a dead run with this id, and fences a run that only seemed dead
                "transactional.id": group,
                # Spark reuses a producer for equal properties, but one that failed or was fenced can't be used again
                "client.id": f"{group}.{uuid4().hex[:8]}",
            }
        )
        query = messages._jdf.queryExecution()
        writer = spark_kafka.KafkaWriteTask(
            properties, query.analyzed().output(), self._jvm.scala.Option.apply(self.name)
        )
        cached = pool.acquire(properties)
        producer = cached.producer()
        try:
            producer.initTransactions()
            place = self._kafka.common.TopicPartition(self.name, 0)
            if self._sent(group, place) == commit:
                return
            producer.beginTransaction()
            writer.execute(query.executedPlan().executeToIterator())
            writer.close()  # sends everything, or raises
            mark = self._jvm.java.util.HashMap()
            mark.put(place, self._kafka.clients.consumer.OffsetAndMetadata(0, commit))
            producer.sendOffsetsToTransaction(mark, self._kafka.clients.consumer.ConsumerGroupMetadata(group))
            producer.commitTransaction()
        finally:
            # this also aborts an open transaction
            producer.close(self._jvm.java.time.Duration.ofSeconds(_TIMEOUT_SECONDS))
            pool.release(cached)

    def _sent(self, group: str, place: JavaObject) -> str | None:
        """Name of the commit whose messages were sent last."""
        admin = self._kafka.clients.admin.Admin.create(self._properties({}))
        try:
            unit = self._jvm.java.util.concurrent.TimeUnit.SECONDS
            # a transaction that has just been committed may not have reached the group yet
            stable = self._kafka.clients.admin.ListConsumerGroupOffsetsOptions().requireStable(True)
            answer = admin.listConsumerGroupOffsets(group, stable).partitionsToOffsetAndMetadata()
            found = answer.get(_TIMEOUT_SECONDS, unit)
        finally:
            admin.close()
        offset = found.get(place)
        return None if offset is None else str(offset.metadata())

    def _properties(self, more: dict[str, str]) -> JavaObject:
        properties = self._jvm.java.util.HashMap()
        for name, value in ({n.removeprefix("kafka."): v for n, v in self._options.items()} | more).items():
            properties.put(name, value)
        return properties


def topic_options(config: Config) -> dict[str, str]:
    """Options of Kafka's clients for the dead-letter topic. If it has none of its own, the source's `kafka.…`."""
    options = config.sink.dead_letter_options or config.source.options
    return {name: value for name, value in options.items() if name.startswith("kafka.")}


def _headers() -> Iterator[Column]:
    for name, column in HEADERS.items():
        value = F.col(column)
        if column == "time":
            value = F.date_format(value, "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX")
        yield F.struct(F.lit(name).alias("key"), value.cast("string").cast("binary").alias("value"))


def _cause(error: Exception) -> str:
    causes = [line.strip() for line in str(error).splitlines() if line.strip().startswith("Caused by:")]
    lines = causes[-1:] or [line.strip() for line in str(error).splitlines() if line.strip()][:1]
    return "".join(lines)[:500]
