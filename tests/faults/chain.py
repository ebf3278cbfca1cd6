"""A source, the servers around a sink, and the sink: a chain of which any part can fail while changes come.

    chain.store.add(Fault("PUT", "/data/", status=503))
    chain.provoke()               # changes come until it has happened
    outcome = chain.settled()     # both tables equal the source

The sink is one process for all tests of a module. It has an Iceberg table in a REST catalog and a Delta table, both in
a bucket, and topics of Avro. What it talks to by HTTP has a door (`HttpProxy`) that fails on request. The tables are
read without these doors.
"""

import io
import json
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import fastavro
import yaml
from confluent_kafka import ElectionType, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient

from tests.sink.test_submit import complaints
from tests.stack.kafka import LocalKafka
from tests.stack.process import Service, wait_until
from tests.stack.proxy import BasicAuth, Fault, HttpProxy, OAuth2
from tests.stack.registry import Registry
from tests.stack.rest_catalog import RestCatalog
from tests.stack.s3 import S3
from tests.stack.sink_process import SinkProcess, spark_section, written

PATIENCE = 240.0
"""Seconds until the tables must equal the source."""
TIMEOUT = 15.0
"""Seconds until Hadoop's S3A gives a request up: it takes no fewer. Without `in_the_bucket` they are 200."""
TEMPORARY = 75
"""The exit code after which a supervisor starts the sink again."""

COLUMNS = {"id": "bigint", "customer": "string", "number": "bigint"}
ICEBERG, DELTA = "ice.shop.orders", "lake.shop.orders"
_TOPICS = {"ice.orders": ICEBERG, "lake.orders": DELTA}
UNAVAILABLE = "__debezium_unavailable_value"
_PARTITIONS = 2
_KEYS = 400

Row = tuple[Any, ...]


@dataclass(frozen=True)
class End:
    """That the sink ended by itself: exit code, and its last words."""

    code: int
    message: str


@dataclass(frozen=True)
class Outcome:
    """What came of a fault until both tables were as the source.

    :param seconds: since the last change.
    :param requests: that failed.
    :param set_aside: what the sink said when it set a table aside.
    :param ends: of the sink, which was started again after each.
    """

    seconds: float
    requests: int
    set_aside: list[str]
    ends: list[End]


class Chain:
    """The servers, started, and the sink.

    :param folder: for the servers' files and logs.
    """

    def __init__(self, folder: Path) -> None:
        self.kafka = LocalKafka(_made(folder / "kafka"))
        self.second = LocalKafka(_made(folder / "kafka2"), first=self.kafka)
        self.brokers = [self.kafka, self.second]
        self.servers = ",".join(broker.bootstrap_servers for broker in self.brokers)
        self.s3 = S3(_made(folder / "s3"))
        self.catalog = RestCatalog(_made(folder / "catalog"), self.s3)
        self.registry = Registry(_made(folder / "registry"))
        self.store_door = HttpProxy(self.s3.endpoint)
        self.catalog_door = OAuth2(self.catalog.uri, "rowdelta", "secret-of-catalog")
        self.registry_door = BasicAuth(self.registry.address, "rowdelta", "secret-of-registry")
        self.doors: list[HttpProxy] = [self.store_door, self.catalog_door, self.registry_door]
        self.ends: list[End] = []
        self._folder = folder
        self._seen = 0
        self._changed = time.monotonic()
        self._compared = 0, 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        with ExitStack() as ends:
            servers: list[Service] = [*self.brokers, self.s3, self.catalog, self.registry]
            for server in servers:
                ends.callback(server.close)
            start(servers)
            for door in self.doors:
                ends.enter_context(door)
            self._create_topics()
            self.source = Source(self.servers, self.registry.url)
            folder = self._folder / "sink"
            self.sink = SinkProcess(written(folder, self._configuration(folder)), folder, is_patient=False)
            ends.callback(self.sink.stop)
            self.change(50)
            self.sink.start()
            self.settled()
            yield

    def change(self, count: int = 20, *, partial: bool = False) -> None:
        """Changes of the source arrive in the topics."""
        if partial:
            self.source.change_partially(count)
        else:
            self.source.change(count)
        self.source.flush()
        self._changed = time.monotonic()

    def provoke(self, rounds: int = 10, *, partial: bool = False) -> None:
        """Let changes come until all faults of the doors have happened.

        :param rounds: at most so many times.
        :param partial: of updates that don't say the whole row.
        """
        for _ in range(rounds):
            self.change(partial=partial)
            if not wait_until(lambda: not self.pending or self._is_equal(), PATIENCE):
                break
            if not self.pending:
                return
        raise AssertionError(f"these faults met no request: {self.pending}\n{self.news()[-10_000:]}")

    @property
    def pending(self) -> list[Fault]:
        return [fault for door in self.doors for fault in door.waiting]

    def settled(self) -> Outcome:
        """Wait until both tables equal the source. If the sink ends by 75, it is started again, as by a supervisor."""
        if not wait_until(self._is_equal, PATIENCE):
            raise AssertionError(f"{self.differences()}\n{self.news()[-10_000:]}")
        text = self.news()
        # with an error that is meant for people, the sink needs no calls
        assert complaints(text) == [], text
        assert "unexpected error" not in text, text
        requests = sum(len(door.failed) for door in self.doors)
        set_aside = [line for line in text.splitlines() if " set aside" in line]
        return Outcome(time.monotonic() - self._changed, requests, set_aside, list(self.ends))

    def news(self) -> str:
        """What the sink has printed since the last `begin`."""
        return self.sink.text()[self._seen :]

    def begin(self) -> None:
        """A test begins: nothing of an earlier one is left."""
        for door in self.doors:
            door.clear()
        self._compared = 0, 0.0  # look at once
        self.settled()
        for door in self.doors:
            door.failed.clear()
        self.ends.clear()
        self._seen = len(self.sink.text())

    def _is_equal(self) -> bool:
        """Whether both tables equal the source, after a look at the sink. To read them takes the sink's own time, so
        that is done only when it has said something new, or for long nothing.
        """
        self._look_after()
        size, now = len(self.sink.text()), time.monotonic()
        if size == self._compared[0] and now - self._compared[1] < 2:
            return False
        self._compared = size, now
        return not self.differences()

    def _look_after(self) -> None:
        code = self.sink.exit_code
        if code is not None:
            self.ends.append(End(code, self._last_words()))
            assert code == TEMPORARY, self.news()[-10_000:]
            self.restart()

    def has_noticed(self) -> bool:
        """Whether the sink has said that something failed."""
        return " set aside" in self.news() or self.sink.exit_code is not None

    def restart(self) -> None:
        self.sink.stop()
        self.sink.start()

    def ended(self) -> End:
        """Wait until the sink ends by itself."""
        assert wait_until(lambda: self.sink.exit_code is not None, PATIENCE), self.news()[-10_000:]
        code = self.sink.exit_code
        assert code is not None
        self.sink.stop()
        return End(code, self._last_words())

    def _last_words(self) -> str:
        return self.sink.text().rstrip().rsplit("\nrowdelta: ", 1)[-1]

    def leaders(self) -> set[int]:
        """The brokers that lead a partition of a topic."""
        topics = self._admin().list_topics(timeout=30).topics
        return {partition.leader for topic in _TOPICS for partition in topics[topic].partitions.values()}

    def has_second_leader(self) -> bool:
        """Whether the second broker leads partitions. If not, Kafka is asked for it: it doesn't do that by itself after
        each start of a broker.
        """
        if 2 in self.leaders():
            return True
        admin = self._admin()
        admin.elect_leaders(ElectionType.PREFERRED).result(30)
        return 2 in self.leaders()

    def let_expire(self) -> None:
        """Kafka removes all messages but the last one of each partition, as retention does."""
        admin = self._admin()
        kept = [TopicPartition(*place, end - 1) for place, end in self.source.ends.items()]
        for removed in admin.delete_records(kept).values():
            removed.result(30)

    @contextmanager
    def allowing_loss(self) -> Iterator[None]:
        """A sink that starts inside goes on without messages that are gone."""

        def lenient(values: dict[str, Any]) -> None:
            values["source"]["options"]["failOnDataLoss"] = "false"

        with self._configured(lenient):
            yield

    @contextmanager
    def in_the_bucket(self) -> Iterator[None]:
        """A sink that starts inside has its checkpoint in the bucket too, and merges small files."""

        def change(values: dict[str, Any]) -> None:
            values["sink"]["checkpoint"] = f"s3a://{self.s3.BUCKET}/state"
            values["spark"]["spark.hadoop.fs.s3a.connection.timeout"] = f"{TIMEOUT:.0f}s"
            for table in values["tables"]:
                table["merge_small_files"] = True

        with self._configured(change):
            yield

    @contextmanager
    def _configured(self, change: Callable[[dict[str, Any]], None]) -> Iterator[None]:
        usual = self.sink.config.read_text()
        values = yaml.safe_load(usual)
        change(values)
        self.sink.config.write_text(yaml.safe_dump(values))
        try:
            yield
        finally:
            self.sink.config.write_text(usual)

    def differences(self) -> str:
        """Between the source and the tables, in words."""
        from tests.stack import compare  # delta-rs isn't there with every Spark

        properties = {
            "uri": self.catalog.uri,
            "s3.endpoint": self.s3.endpoint,
            "s3.region": self.s3.REGION,
            "s3.access-key-id": self.s3.KEY,
            "s3.secret-access-key": self.s3.SECRET,
        }
        of_iceberg = compare.rows_by_catalog(properties, ICEBERG.partition(".")[2], list(COLUMNS))
        if what := compare.differences(self.source.table, of_iceberg):
            return f"{ICEBERG}: {what}"
        of_delta = compare.rows_in_bucket(self.s3, DELTA.partition(".")[2], list(COLUMNS))
        what = compare.differences(self.source.table, of_delta)
        return f"{DELTA}: {what}" if what else ""

    def _admin(self) -> AdminClient:
        return AdminClient({"bootstrap.servers": self.servers, "log_level": 0})

    def _create_topics(self) -> None:
        """Both brokers have each partition, and each of them leads one."""
        admin = self._admin()
        assert wait_until(lambda: len(admin.list_topics(timeout=5).brokers) == len(self.brokers))
        topics = [NewTopic(topic, _PARTITIONS, replica_assignment=[[1, 2], [2, 1]]) for topic in _TOPICS]
        for created in admin.create_topics(topics).values():
            created.result(30)

    def _configuration(self, folder: Path) -> dict[str, Any]:
        door, registry = self.catalog_door, self.registry_door
        tables = [
            {"source": topic, "target": target, "key": ["id"], "columns": COLUMNS, "merge_small_files": False}
            for topic, target in _TOPICS.items()
        ]
        tables[0]["properties"] = {"format-version": "3"}
        kafka = {
            "kafka.bootstrap.servers": self.servers,
            "startingOffsets": "earliest",
            # Kafka's client asks a broker that is gone until this time is over. By default that is a minute.
            "kafka.default.api.timeout.ms": "15000",
            "kafka.request.timeout.ms": "10000",
        }
        return {
            "sink": {"id": "faults", "checkpoint": str(folder / "state"), "trigger": "200 milliseconds"},
            "index": {"location": f"s3a://{self.s3.BUCKET}/index"},
            "source": {
                "type": "kafka",
                "format": "debezium-avro",
                "options": kafka,
                "format_options": {
                    "schema.registry.url": registry.url + self.registry.PATH,
                    "schema.registry.basic.auth.user.info": f"{registry.user}:{registry.password}",
                },
            },
            "catalogs": {
                "ice": {
                    "type": "rest",
                    "uri": door.url,
                    "credential": f"{door.client}:{door.secret}",
                    "oauth2-server-uri": door.token_url,
                    "rest.client.socket-timeout-ms": "10000",
                    "rest.client.connection-timeout-ms": "10000",
                    "io-impl": "org.apache.iceberg.aws.s3.S3FileIO",
                    "http-client.type": "urlconnection",
                    "s3.endpoint": self.store_door.url,
                    "s3.path-style-access": "true",
                    "client.region": self.s3.REGION,
                    "s3.region": self.s3.REGION,
                    "s3.access-key-id": self.s3.KEY,
                    "s3.secret-access-key": self.s3.SECRET,
                },
                "lake": {"type": "delta", "warehouse": f"s3a://{self.s3.BUCKET}/delta"},
            },
            "tables": tables,
            # or a fault that is meant for a micro-batch's commit may meet a commit of maintenance
            "maintenance": {"budget": 0, "expire": None, "orphans": None},
            "spark": spark_section(self.store_door.url),
        }


class Source:
    """A table that changes at random, and sends its changes as Debezium does. `rows` is its content, `ends` are the
    offsets up to which topics and partitions have its messages.

    :param servers: of Kafka.
    :param registry: its URL.
    """

    def __init__(self, servers: str, registry: str) -> None:
        self.rows: dict[int, dict[str, Any]] = {}
        self._registry = registry
        self._random = Random(7)
        self._number = 0
        self._producer = Producer({"bootstrap.servers": servers, "enable.idempotence": True, "log_level": 0})
        self.ends: Counter[tuple[str, int]] = Counter()
        self._sent: deque[tuple[str, bytes, bytes, int]] = deque(maxlen=200)
        self._schemas: list[Any] = []
        self._ids: list[int] = []
        self.new_schema()

    @property
    def table(self) -> list[Row]:
        return [tuple(row[name] for name in COLUMNS) for row in self.rows.values()]

    def flush(self) -> None:
        """Wait until Kafka has all changes."""
        assert self._producer.flush(PATIENCE) == 0

    @property
    def schema_id(self) -> int:
        return self._ids[-1]

    def new_schema(self) -> None:
        """From now on changes have another schema in the registry."""
        self._schemas.append(fastavro.parse_schema(_event(len(self._schemas))))
        self._ids.append(self._registered(len(self._schemas) - 1))

    def register_again(self) -> None:
        """In a registry that has lost them."""
        assert [self._registered(number) for number in range(len(self._schemas))] == self._ids

    def change(self, count: int) -> None:
        """Change so many rows. `flush` says when Kafka has the changes."""
        for _ in range(count):
            key = self._random.randrange(_KEYS)
            old = self.rows.pop(key, None)
            self._number += 1
            if old is not None and self._random.random() < 0.3:
                self._send(key, "d", old, None)
                continue
            customer = self._random.choice([None, "Ada", "zoë 😀"])
            self.rows[key] = {"id": key, "customer": customer, "number": self._number}
            self._send(key, "c" if old is None else "u", old, self.rows[key])

    def change_partially(self, count: int) -> None:
        """Change the number of so many rows. The messages don't have the customer, which stays as it is."""
        for key in self._random.sample(sorted(self.rows), count):
            self._number += 1
            self.rows[key] = {**self.rows[key], "number": self._number}
            self._send(key, "u", None, {**self.rows[key], "customer": UNAVAILABLE})

    def snapshot(self) -> None:
        """What each key is now, as a new snapshot of the source has it, with the deletes that it lacks."""
        for key in range(_KEYS):
            row = self.rows.get(key)
            if row is None:
                self._send(key, "d", {"id": key, "customer": None, "number": 0}, None)
            else:
                self._send(key, "r", None, row)

    def send_again(self) -> int:
        """The last messages, in their order. Returns how many."""
        again = list(self._sent)
        for message in again:
            self._produce(*message)
        return len(again)

    def _send(self, key: int, op: str, before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> None:
        event = {"before": before, "after": after, "op": op, "ts_ms": self._number}
        body = io.BytesIO()
        fastavro.schemaless_writer(body, self._schemas[-1], event)
        value = b"\0" + self._ids[-1].to_bytes(4, "big") + body.getvalue()
        for topic in _TOPICS:
            message = topic, value, str(key).encode(), key % _PARTITIONS
            self._sent.append(message)
            self._produce(*message)

    def _produce(self, topic: str, value: bytes, key: bytes, partition: int) -> None:
        self._producer.produce(topic, value, key, partition=partition)
        self.ends[topic, partition] += 1

    def _registered(self, number: int) -> int:
        with SchemaRegistryClient({"url": self._registry}) as client:
            return int(client.register_schema(f"orders-{number}", Schema(json.dumps(_event(number)))))


def _event(number: int) -> dict[str, Any]:
    """An envelope of Debezium's. Those of different numbers differ only in a field that no table has."""
    fields = [
        {"name": "id", "type": "long"},
        {"name": "customer", "type": ["null", "string"]},
        {"name": "number", "type": "long"},
    ]
    parts: list[dict[str, Any]] = [
        {"name": "before", "type": ["null", {"type": "record", "name": "Value", "fields": fields}]},
        {"name": "after", "type": ["null", "Value"]},
        {"name": "op", "type": "string"},
        {"name": "ts_ms", "type": "long"},
        {"name": f"extra{number}", "type": ["null", "long"], "default": None},
    ]
    return {"type": "record", "name": "Envelope", "namespace": "shop.orders", "fields": parts}


def start(servers: Sequence[Service]) -> None:
    """All at once."""
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda server: server.start(), servers))


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
