"""Sources seen without a JVM: local folders, and topics by a plain Kafka client."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from confluent_kafka.admin import OffsetSpec  # type: ignore[attr-defined]

from sink.config import TableSection
from sink.config.local_paths import local_path
from sink.errors import NeedsSparkError, RowdeltaError
from sink.sources.kafka_client import EARLIEST, JAAS, LATEST, PREFIX, Broker, Message, Range
from sink.sources.topics import Admin, Offsets, Topics

_INTERNAL = ("__consumer_offsets", "__transaction_state", "__share_group_state")
"""Topics that the Java client leaves out of its lists."""
_CLIENT_OPTIONS: Mapping[str, str] = {
    "bootstrap.servers": r".+",
    "security.protocol": r"PLAINTEXT|SASL_PLAINTEXT",
    "sasl.mechanism": r"PLAIN|SCRAM-SHA-256|SCRAM-SHA-512",
    JAAS: (
        r"\s*org\.apache\.kafka\.common\.security\.(plain\.PlainLoginModule|scram\.ScramLoginModule)\s+required"
        r"(\s+(username|password)=\"([^\"\\]|\\.)*\")+\s*;\s*"
    ),
}
"""Options that mean the same to both clients, and their values. TLS options don't, because both clients look for
certificates in different places.
"""
_OPTIONS: Mapping[str, str] = {
    "subscribe": r".*",
    "startingoffsets": r".*",
    "startingtimestamp": r"\d+",
    "failondataloss": r"true|false",
    "maxoffsetspertrigger": r"\d+",
    "minoffsetspertrigger": r"\d+",
    "minpartitions": r"\d+",
}
"""Options of Spark's source that mean nothing to a client, in lower case, and values that Spark accepts."""


class LocalFolders:
    """Folders of local disks."""

    def exists(self, place: str) -> bool:
        return local_path(place).exists()

    def is_file(self, place: str) -> bool:
        return local_path(place).is_file()

    def folders(self, place: str) -> list[str]:
        return [path.name for path in _entries(place) if path.is_dir()]

    def files(self, place: str) -> list[tuple[str, int]]:
        try:
            found = [(path, path.stat()) for path in _entries(place) if path.is_file()]
            return [(f"file:{quote(str(path))}", status.st_mtime_ns // 1_000_000) for path, status in found]
        except (OSError, ValueError) as error:
            raise NeedsSparkError(f"directory {place}: {error}") from error

    def qualified(self, place: str) -> str:
        return str(local_path(place))


def _entries(place: str) -> list[Path]:
    """:raises NeedsSparkError: the folder can't be listed, or has something in it that is neither folder nor file."""
    try:
        found = list(local_path(place).iterdir())
        odd = [path for path in found if not (path.is_dir() or path.is_file())]
    except OSError as error:
        raise NeedsSparkError(f"directory {place}: {error}") from error
    if odd:
        raise NeedsSparkError(str(odd[0]))
    return found


def check_options(options: Mapping[str, str]) -> None:
    """:raises NeedsSparkError: options may mean something else to the Java client, or to Spark."""
    for name, value in options.items():
        of_client = name.startswith(PREFIX)
        known = _CLIENT_OPTIONS.get(name.removeprefix(PREFIX)) if of_client else _OPTIONS.get(name.lower())
        if known is None or not re.fullmatch(known, value):
            raise NeedsSparkError(f"source.options.{name}")


class PlainTopics(Topics):
    """The tables' topics.

    :param options: of Spark's source (`check_options`).
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(options)
        self.broker = Broker(options)

    def ranges(self, table: TableSection) -> dict[int, Range]:
        """The table's partitions that have messages, and where these are.

        :raises ConfigError: there is no such topic.
        """
        with self._admin() as admin:
            first, end = admin.limits([table.source])
        if table.source not in first or table.source not in end:
            raise admin.no_topic(table.source)
        ends = end[table.source]
        return {int(p): (offset, ends[p]) for p, offset in sorted(first[table.source].items()) if ends[p] > offset}

    def messages(self, table: TableSection, ranges: Mapping[int, Range], most: int) -> dict[int, list[Message]]:
        """At most so many of the first messages in a range of each partition."""
        with asking(self.broker):
            return self.broker.messages(table.source, ranges, most)

    @contextmanager
    def _admin(self) -> Iterator[Admin]:
        with asking(self.broker):
            yield _PlainAdmin(self.broker)


@contextmanager
def asking(broker: Broker) -> Iterator[None]:
    """Turn errors into `NeedsSparkError`, since this client may be their cause. The client in the JVM decides.

    :raises NeedsSparkError: the cluster doesn't answer, or not to this client.
    """
    try:
        yield
    except RowdeltaError as error:
        raise NeedsSparkError(f"Kafka at {broker.servers}: {error}") from error


class _PlainAdmin(Admin):
    def __init__(self, broker: Broker) -> None:
        super().__init__(broker.servers)
        self._broker = broker
        self._partitions: dict[tuple[str, ...], dict[str, list[int]]] = {}

    def latest(self) -> Any:
        return LATEST

    def earliest(self) -> Any:
        return EARLIEST

    def at(self, timestamp: int) -> Any:
        return OffsetSpec.for_timestamp(timestamp)

    def topics(self) -> list[str]:
        return [name for name in self._broker.topics() if name not in _INTERNAL]

    def offsets(self, topics: Sequence[str], spec: Any) -> dict[str, Offsets]:
        return self._listed(topics, spec)

    def ends(self, topics: Sequence[str]) -> dict[str, Offsets]:
        return self._listed(topics, LATEST, committed=False)

    def _listed(self, topics: Sequence[str], spec: Any, *, committed: bool = True) -> dict[str, Offsets]:
        asked = tuple(topics)
        if asked not in self._partitions:
            self._partitions[asked] = self._broker.partitions(topics) if topics else {}
        found = self._broker.offsets(self._partitions[asked], spec, committed=committed)
        return {topic: {str(n): offset for n, offset in of.items()} for topic, of in found.items() if of}
