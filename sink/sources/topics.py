"""Kafka's topics as an admin client sees them: which topics exist, and how far a position is in them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from sink.config import TableSection
from sink.errors import ConfigError, RowdeltaError
from sink.sources.source import Position

Offsets = dict[str, int]
"""Partition -> next offset."""


class Admin(ABC):
    """A client of a cluster.

    :param servers: its address.
    """

    def __init__(self, servers: str) -> None:
        self.servers = servers

    @abstractmethod
    def latest(self) -> Any:
        """The end of a partition, for `offsets`."""

    @abstractmethod
    def earliest(self) -> Any:
        """The first message of a partition, for `offsets`."""

    @abstractmethod
    def topics(self) -> list[str]:
        """Names of all topics, without Kafka's internal ones."""

    @abstractmethod
    def offsets(self, topics: Sequence[str], spec: Any) -> dict[str, Offsets]:
        """Topic -> offsets that `spec` selects. A topic that doesn't exist is left out."""

    def no_topic(self, topic: str) -> ConfigError:
        return ConfigError(f"Kafka at {self.servers} has no topic {topic!r}. Create it, or correct tables[].source.")


class Topics(ABC):
    """The tables' topics."""

    @abstractmethod
    def _admin(self) -> AbstractContextManager[Admin]:
        """Who is asked."""

    def names(self) -> Sequence[str]:
        with self._admin() as admin:
            return admin.topics()

    def lag(self, tables: Sequence[tuple[TableSection, Position | None]]) -> Sequence[str]:
        with self._admin() as admin:
            topics = [table.source for table, _ in tables]
            latest, earliest = admin.offsets(topics, admin.latest()), admin.offsets(topics, admin.earliest())

        def behind(topic: str, position: Position) -> str:
            if topic not in latest or topic not in earliest:
                return f"unknown; there is no topic {topic}"
            count = sum(max(0, end - int(position.get(p, earliest[topic][p]))) for p, end in latest[topic].items())
            return f"{count:,} messages behind"

        return [behind(table.source, position or {}) for table, position in tables]

    def check(self, tables: Sequence[TableSection]) -> Sequence[str | RowdeltaError]:
        with self._admin() as admin:
            topics = [table.source for table in tables]
            latest, earliest = admin.offsets(topics, admin.latest()), admin.offsets(topics, admin.earliest())

            def found(topic: str) -> str | RowdeltaError:
                if topic not in latest or topic not in earliest:
                    return admin.no_topic(topic)
                messages = sum(end - earliest[topic][p] for p, end in latest[topic].items())
                return f"topic {topic}: {len(latest[topic])} partitions, {messages:,} messages"

            return [found(topic) for topic in topics]

    def check_patterns(self) -> Sequence[RowdeltaError]:
        return ()
