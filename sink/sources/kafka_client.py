"""A Kafka client without a JVM (confluent-kafka), for `rowdelta init`, and for the keys of many topics at once.

It takes the options of Spark's source, which are those of Kafka's Java client. librdkafka has other names for a few of
them.
"""

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]

from changelog.amounts import amount
from sink.errors import ConfigError, TemporaryError

PREFIX = "kafka."
"""The names of the client's options in `source.options` begin with this."""

JAAS = "sasl.jaas.config"
_LOGIN_MODULES = {"PLAIN": "plain.PlainLoginModule", "SCRAM": "scram.ScramLoginModule"}
_TIMEOUT_SECONDS = 10.0
_SILENCE_SECONDS = 30.0
"""If no message arrives for this long, although there are some, reading fails."""
_TOPICS_AT_ONCE = 100
_NO_TOPIC = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.TOPIC_EXCEPTION)

_EARLIEST = OffsetSpec.earliest()  # type: ignore[no-untyped-call]
_LATEST = OffsetSpec.latest()  # type: ignore[no-untyped-call]

Range = tuple[int, int]
"""The first offset of a partition, and the offset after the last."""


@dataclass(frozen=True)
class Message:
    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None


def jaas(mechanism: str, username: str, password: str) -> str:
    """The Java client's `sasl.jaas.config` for a user with a password.

    :raises ConfigError: the mechanism doesn't use a password.
    """
    module = _LOGIN_MODULES.get(mechanism.upper().split("-")[0])
    if module is None:
        raise ConfigError(
            f"sasl.mechanism is {mechanism!r}; with sasl.username and sasl.password it is PLAIN, SCRAM-SHA-256 or "
            f"SCRAM-SHA-512. For another one give {JAAS}."
        )
    user = f'username="{_escaped(username)}" password="{_escaped(password)}"'
    return f"org.apache.kafka.common.security.{module} required {user};"


def oauth_jaas(options: Mapping[str, str]) -> str:
    """The Java client's `sasl.jaas.config` for a client of an OpenID provider.

    :param options: librdkafka's `sasl.oauthbearer.client.id`, `.client.secret` and `.scope`.
    """
    given = {java: options[name] for name, java in _OAUTH.items() if name in options}
    quoted = (f'{java}="{_escaped(value)}"' for java, value in given.items())
    return f"org.apache.kafka.common.security.{_OAUTH_MODULE} required {' '.join(quoted)};"


def client_settings(options: Mapping[str, str]) -> dict[str, str]:
    """Translate `kafka.…` options into settings of librdkafka. Other options are left out.

    :raises ConfigError: librdkafka has no such setting.
    """
    given = {name.removeprefix(PREFIX): value for name, value in options.items() if name.startswith(PREFIX)}
    settings = {_RENAMED.get(name, name): value for name, value in given.items() if name not in _JAVA_ONLY}
    if JAAS in given:
        settings |= _of_jaas(given[JAAS])
    for store in ("truststore", "keystore"):
        kind = given.get(f"ssl.{store}.type", "JKS").upper()
        file = given.get(f"ssl.{store}.location")
        if file is None:
            continue
        if kind == "PEM":
            # a key store has key and certificates in one file, and OpenSSL finds each
            files = ("ssl.ca",) if store == "truststore" else ("ssl.certificate", "ssl.key")
            settings |= {f"{name}.location": file for name in files}
        elif (store, kind) == ("keystore", "PKCS12"):
            settings |= {n: given[n] for n in ("ssl.keystore.location", "ssl.keystore.password") if n in given}
        else:
            raise ConfigError(
                f"source.options.kafka.ssl.{store}.location is a Java {store.replace('store', ' store')} ({kind}), "
                f"which this command can't read. Give the certificates as PEM, with kafka.ssl.{store}.type: PEM."
            )
    return settings


def _of_jaas(line: str) -> dict[str, str]:
    found = {name: re.sub(r"\\(.)", r"\1", value) for name, value in _JAAS_OPTION.findall(line)}
    if {"username", "password"} <= found.keys():
        return {f"sasl.{name}": found[name] for name in ("username", "password")}
    if _OAUTH_MODULE in line and {"clientId", "clientSecret"} <= found.keys():
        return {"sasl.oauthbearer.method": "oidc"} | {n: found[java] for n, java in _OAUTH.items() if java in found}
    raise ConfigError(
        f"source.options.kafka.{JAAS} has neither username and password, nor clientId and clientSecret. This command "
        "doesn't use Java, and knows PLAIN, SCRAM and OAUTHBEARER only."
    )


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


OAUTH_HANDLER = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginCallbackHandler"
"""The Java client's `sasl.login.callback.handler.class` that gets tokens from an OpenID provider."""
_OAUTH_MODULE = "oauthbearer.OAuthBearerLoginModule"
_OAUTH = {
    "sasl.oauthbearer.client.id": "clientId",
    "sasl.oauthbearer.client.secret": "clientSecret",
    "sasl.oauthbearer.scope": "scope",
}
"""librdkafka's settings -> the options of Java's login module."""
_JAAS_OPTION = re.compile(r'(\w+)\s*=\s*"((?:[^"\\]|\\.)*)"')
_RENAMED = {
    "ssl.truststore.certificates": "ssl.ca.pem",
    "ssl.keystore.certificate.chain": "ssl.certificate.pem",
    "ssl.keystore.key": "ssl.key.pem",
}
"""Settings that have PEM text: Java's name -> librdkafka's name."""
_JAVA_ONLY = {
    JAAS,
    "sasl.login.callback.handler.class",
    *(f"ssl.{store}.{part}" for store in ("truststore", "keystore") for part in ("location", "type", "password")),
}


@dataclass
class Broker:
    """Reads from a Kafka cluster with a plain client. It commits nothing and joins no group.

    :param options: options of Spark's source. `kafka.bootstrap.servers` must be among them.
    :param progress: is called from time to time with a text that says what is being done.
    """

    options: Mapping[str, str]
    progress: Callable[[str], None] = lambda _: None
    _errors: list[KafkaError] = field(default_factory=list)
    _partitions: dict[str, list[int]] = field(default_factory=dict)

    @property
    def servers(self) -> str:
        return self.options[f"{PREFIX}bootstrap.servers"]

    def _settings(self) -> dict[str, Any]:
        # the client's own lines on stderr would repeat what our errors say
        quiet: dict[str, Any] = {"log_level": 0, "error_cb": self._errors.append}
        return client_settings(self.options) | quiet

    def topics(self) -> list[str]:
        """Names of all topics, sorted.

        :raises TemporaryError: no broker answers.
        :raises ConfigError: the broker refuses the user.
        """
        began = time.monotonic()
        admin = self._client()
        while True:
            try:
                found = admin.list_topics(timeout=2.0).topics
                break
            except KafkaException as error:
                admin.poll(0)  # delivers errors to `error_cb`, which say more than this one
                waited = time.monotonic() - began
                if waited > _TIMEOUT_SECONDS or self._is_refused():
                    raise self._unreachable(error) from None
                self.progress(f"Kafka at {self.servers} doesn't answer, {waited:.0f} s")
        self._partitions = {name: sorted(topic.partitions) for name, topic in found.items()}
        return sorted(found)

    def _offsets(self, partitions: Mapping[str, Sequence[int]], spec: OffsetSpec) -> dict[str, dict[int, int]]:
        """By topic and partition the offset that `spec` selects. A partition ends where a transaction is open, unless
        the options say `read_uncommitted`.

        :raises TemporaryError: no broker answers.
        """
        places = [TopicPartition(topic, number) for topic, numbers in partitions.items() for number in numbers]
        found: dict[str, dict[int, int]] = {topic: {} for topic in partitions}
        if not places:
            return found
        admin = self._client()  # without a name it would be gone before it answers
        uncommitted = self._settings().get("isolation.level") == "read_uncommitted"
        level = IsolationLevel.READ_UNCOMMITTED if uncommitted else IsolationLevel.READ_COMMITTED
        asked = admin.list_offsets(dict.fromkeys(places, spec), isolation_level=level, request_timeout=_TIMEOUT_SECONDS)
        try:
            for place, answer in asked.items():
                found[place.topic][place.partition] = answer.result().offset
        except KafkaException as error:
            raise self._unreachable(error) from None
        return found

    def _ranges(self, topics: Sequence[str]) -> dict[str, dict[int, Range]]:
        """Topic -> its partitions that have messages, with the range of their offsets."""
        partitions = {topic: self._partitions[topic] for topic in topics}
        firsts, ends = self._offsets(partitions, _EARLIEST), self._offsets(partitions, _LATEST)
        return {
            topic: {number: (first, ends[topic][number]) for number, first in of.items() if ends[topic][number] > first}
            for topic, of in firsts.items()
        }

    def sample(self, topics: Sequence[str], count: int) -> Iterator[tuple[str, list[Message]]]:
        """The first and the last messages of each topic, about `count` of each, in order. A topic without messages has
        an empty list.
        """
        ranges = self._ranges(topics)
        for at in range(0, len(topics), _TOPICS_AT_ONCE):
            group = topics[at : at + _TOPICS_AT_ONCE]
            starts: dict[tuple[str, int], Range] = {}
            ends: dict[tuple[str, int], Range] = {}
            for topic in group:
                share = -(-count // max(1, len(ranges[topic])))
                for number, (first, end) in ranges[topic].items():
                    middle = min(first + share, end)
                    starts[topic, number] = first, middle
                    if end > middle:
                        ends[topic, number] = max(middle, end - share), end
            found: dict[str, list[Message]] = {topic: [] for topic in group}
            for message in (*self._read(starts), *self._read(ends)):
                found[message.topic].append(message)
            yield from found.items()

    def _read(self, ranges: Mapping[tuple[str, int], Range]) -> Iterable[Message]:
        """The messages in ranges of partitions.

        :raises TemporaryError: they don't come.
        """
        if not ranges:
            return
        settings = (
            {"isolation.level": "read_committed"}
            | self._settings()
            | {
                "group.id": "rowdelta-init",  # librdkafka requires one; nothing is committed
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "auto.offset.reset": "earliest",
                "max.partition.fetch.bytes": 262_144,
                "queued.max.messages.kbytes": 16_384,
            }
        )
        consumer = Consumer(settings)
        left = dict(ranges)
        began = told = last = time.monotonic()
        try:
            consumer.assign([TopicPartition(*place, first) for place, (first, _) in ranges.items()])
            while left:
                now = time.monotonic()
                if now - last > _SILENCE_SECONDS:
                    topic, number = next(iter(left))
                    raise self._unreachable(f"no message of {topic}-{number} came within {_SILENCE_SECONDS:.0f} s")
                if now - told > 2.0:
                    told = now
                    done = len(ranges) - len(left)
                    self.progress(f"{done:,} of {amount(len(ranges), 'partition')} read, {now - began:.0f} s")
                for message in consumer.consume(500, timeout=0.5):
                    last = time.monotonic()
                    error = message.error()
                    if error is not None and error.code() != KafkaError._PARTITION_EOF:
                        raise self._unreachable(error)
                    place = str(message.topic()), int(message.partition() or 0)
                    if place not in left:
                        continue
                    offset, end = int(message.offset() or 0), left[place][1]
                    if error is None and offset < end:
                        yield Message(*place, offset, _bytes(message.key()), _bytes(message.value()))
                    if error is not None or offset >= end - 1:
                        del left[place]
                        consumer.incremental_unassign([TopicPartition(*place)])
        finally:
            consumer.close()

    def _client(self) -> AdminClient:
        try:
            return AdminClient(self._settings())
        except KafkaException as error:
            raise ConfigError(
                f"the client of Kafka at {self.servers} refuses its options: {error.args[0].str()}. Correct --option."
            ) from None

    def _is_refused(self) -> bool:
        return any(known.code() == KafkaError._AUTHENTICATION for known in self._errors)

    def _unreachable(self, error: Any) -> ConfigError | TemporaryError:
        told = [known.str() for known in self._errors if known.code() != KafkaError._ALL_BROKERS_DOWN]
        reason = told[-1] if told else error.args[0].str() if isinstance(error, KafkaException) else str(error)
        if self._is_refused():
            return ConfigError(
                f"Kafka at {self.servers} refuses the user: {reason}. Correct sasl.username and sasl.password, or "
                "sasl.mechanism."
            )
        return TemporaryError(
            f"Kafka at {self.servers} can't be reached: {reason}. Correct the address, or run again once it answers. "
            "If it wants TLS or a user, give its options, such as --option security.protocol=SASL_SSL."
        )


def _bytes(content: str | bytes | None) -> bytes | None:
    return content.encode() if isinstance(content, str) else content
