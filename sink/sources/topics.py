"""Kafka's topics as an admin client sees them: which topics exist, and how far a position is in them."""

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Literal, TypeAlias

from changelog.amounts import amount
from sink.config import TableSection
from sink.errors import ConfigError, DataError, RowdeltaError, TableError
from sink.sources.source import Position

Offsets = dict[str, int]
"""Partition -> next offset."""
Places = dict[str, Offsets]
"""Topic -> its offsets."""
At: TypeAlias = Literal["earliest", "latest"] | int
"""A partition's first message, its end, or the first message at or after a time in milliseconds."""
EARLIEST = -2
"""Stands for a partition's first offset in Spark's options."""
_LATEST = -1


def part_name(table: TableSection, topic: str, partition: str | int) -> str:
    """How a position calls a partition: `0`, or if its table has several topics `orders-0`."""
    return f"{topic}-{partition}" if table.many_topics else str(partition)


def places_of(table: TableSection, position: Position) -> Places:
    """A position by topics. Those that the table had earlier are among them."""
    if not table.many_topics:
        return {table.source: {p: int(offset) for p, offset in position.items()}}
    found: Places = {}
    for name, offset in position.items():
        topic, _, partition = name.rpartition("-")
        found.setdefault(topic, {})[partition] = int(offset)
    return found


def position_of(table: TableSection, places: Mapping[str, Offsets]) -> Offsets:
    """The reverse of `places_of`."""
    return {part_name(table, topic, p): offset for topic, of in places.items() for p, offset in of.items()}


def continued(table: TableSection, position: Position, topic: str) -> Position:
    """A position as the table's source names its parts: a table of one topic may get others.

    :param topic: the one that the position is in, if it is one.
    """
    if not table.many_topics or _has_topics(position):
        return position
    return {f"{topic}-{partition}": offset for partition, offset in position.items()}


def check_form(table: TableSection, position: Position) -> None:
    """:raises TableError: the position is in several topics, and the table has one, so it would forget the others."""
    if not table.many_topics and _has_topics(position):
        raise TableError(
            f"{table.target}: its position is in several topics, and the configuration has one. Write it as a list, "
            f"source: [{table.source}]: then the others may come back, and go on from where they were."
        )


def _has_topics(position: Position) -> bool:
    return any("-" in name for name in position)


class Admin(ABC):
    """A client of a cluster.

    :param servers: its address.
    """

    def __init__(self, servers: str) -> None:
        self.servers = servers

    @abstractmethod
    def topics(self) -> list[str]:
        """Names of all topics, without Kafka's internal ones."""

    @abstractmethod
    def offsets(self, topics: Sequence[str], at: At) -> dict[str, Offsets]:
        """Topic -> offsets of its partitions, -1 where no message is so late. A topic that doesn't exist is left out. A
        topic ends where a transaction is open, as for who reads it, unless the options say `read_uncommitted`.
        """

    @abstractmethod
    def ends(self, topics: Sequence[str]) -> dict[str, Offsets]:
        """Topic -> ends of its partitions, after messages of open transactions too."""

    def limits(self, topics: Sequence[str]) -> tuple[dict[str, Offsets], dict[str, Offsets]]:
        """The first offsets and the ends of topics. Topics and partitions that were created between both looks are left
        out: the next call has them.
        """
        first, end = self.offsets(topics, "earliest"), self.offsets(topics, "latest")
        both = {topic: first[topic].keys() & end[topic].keys() for topic in first if topic in end}

        def known(offsets: Mapping[str, Offsets]) -> dict[str, Offsets]:
            return {topic: {p: offsets[topic][p] for p in offsets[topic] if p in both[topic]} for topic in both}

        return known(first), known(end)

    def no_topic(self, topic: str) -> ConfigError:
        return ConfigError(f"Kafka at {self.servers} has no topic {topic!r}. Create it, or correct tables[].source.")


class Topics(ABC):
    """The tables' topics.

    :param options: of Spark's source.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        self._options = options

    @abstractmethod
    def _admin(self) -> AbstractContextManager[Admin]:
        """Who is asked."""

    def names(self) -> Sequence[str]:
        with self._admin() as admin:
            return admin.topics()

    def lag(self, tables: Sequence[tuple[TableSection, Position | None]]) -> Sequence[str]:
        with self._admin() as admin:
            earliest, latest = admin.limits(topics_of(table for table, _ in tables))

        def behind(table: TableSection, position: Position) -> str:
            places, count, removed = places_of(table, position), 0, 0
            known = [topic for topic in table.topics if topic in latest and topic in earliest]
            if not known:
                return f"unknown; there is no topic {table.source}"
            for topic in known:
                ends, firsts, had = latest[topic], earliest[topic], places.get(topic, {})
                reached = {p: had.get(p, firsts[p]) for p in ends}
                for partition, end in ends.items():
                    if reached[partition] > end:
                        return (
                            f"unknown; offset {reached[partition]} is past the end of {topic}-{partition}, which is "
                            f"{end}. Was it deleted and created again?"
                        )
                count += sum(ends[p] - offset for p, offset in reached.items())
                removed += sum(max(0, firsts[p] - offset) for p, offset in reached.items())
            gone = f", of which Kafka has removed {removed:,}" if removed else ""
            return f"{amount(count, 'message')} behind{gone}"

        return [behind(table, position or {}) for table, position in tables]

    def check(
        self, tables: Sequence[tuple[TableSection, Position | None]], from_start: Collection[str]
    ) -> Sequence[str | RowdeltaError]:
        with self._admin() as admin:
            earliest, latest = admin.limits(topics_of(table for table, _ in tables))

            def found(table: TableSection, position: Position | None) -> str | RowdeltaError:
                try:
                    places = self._start(admin, table, position, from_start, earliest, latest)
                except (ConfigError, DataError, TableError) as error:
                    return error
                messages = sum(end - earliest[topic][p] for topic in places for p, end in latest[topic].items())
                partitions = amount(sum(len(latest[topic]) for topic in places), "partition")
                name = amount(len(places), "topic") if table.many_topics else f"topic {table.source}"
                return f"{name}: {partitions}, {amount(messages, 'message')}"

            return [found(table, position) for table, position in tables]

    def _start(
        self,
        admin: Admin,
        table: TableSection,
        position: Position | None,
        from_start: Collection[str],
        earliest: Mapping[str, Offsets],
        latest: Mapping[str, Offsets],
    ) -> Places:
        """The offsets from which a table is read. Of several topics, those are left out that have gone; one that the
        position doesn't have came later, and is read from its first message.

        :param from_start: tables that are read from their first message if there is no position.
        :raises ConfigError: there is no such topic, or the options name offsets that it doesn't have.
        :raises DataError: messages after the position were removed.
        :raises TableError: the topic ends before the position.
        """
        check_form(table, position or {})
        had, starts = places_of(table, position or {}), Places()
        there = [topic for topic in table.topics if topic in latest and topic in earliest]
        for topic in table.topics:
            if topic not in there:
                if not there or not (topic in had or table.feed.pattern):
                    raise admin.no_topic(topic)
            elif position is not None:
                starts[topic] = self._continued(admin, table, topic, had.get(topic, {}), earliest[topic], latest[topic])
            elif first := self._first_named(table, topic):
                starts[topic] = {p: max(offset, first.get(p, 0)) for p, offset in earliest[topic].items()}
            elif table.id in from_start:
                starts[topic] = earliest[topic]
            else:
                starts[topic] = self._configured(admin, topic, earliest[topic], latest[topic])
        return starts

    def _first_named(self, table: TableSection, topic: str) -> Offsets:
        """Offsets before which no message of a topic is of the source's table that a pattern has found in it. Empty if
        it was found at the first look, or named in the configuration.
        """
        return {}

    def _continued(
        self, admin: Admin, table: TableSection, topic: str, position: Offsets, earliest: Offsets, latest: Offsets
    ) -> Offsets:
        # partitions that were added later begin at their first message
        start = earliest | position
        if gone := sorted(position.keys() - latest.keys(), key=int):
            raise TableError(
                f"{table.target}: its position has partition {gone[0]}, which topic {topic} doesn't have. Was the "
                "topic deleted and created again? To read it from the start, use rowdelta reset (see "
                "docs/operations.md, Reset)."
            )
        by_name = {name.lower(): value for name, value in self._options.items()}
        may_lose = by_name.get("failondataloss", "true").lower() == "false"
        for partition, first in earliest.items():
            reached = position.get(partition, 0 if position else first)
            if reached < first and not may_lose:
                raise DataError(
                    f"{table.target}: its position in {topic}-{partition} is offset {reached}, but Kafka has removed "
                    f"what follows before offset {first}. Take a new snapshot of the source into the topic (mode: "
                    "upsert), with source.options.failOnDataLoss: false to go on from what is there."
                )
        beyond = [partition for partition, end in latest.items() if start[partition] > end]
        self._check_ends(admin, table, topic, {partition: start[partition] for partition in beyond})
        for partition in beyond:
            # messages of a transaction that is still open were read, with another isolation level; what the table has
            # is left out
            start[partition] = latest[partition]
        return {partition: start[partition] for partition in latest}

    def _check_ends(self, admin: Admin, table: TableSection, topic: str, reached: Offsets) -> None:
        """:param reached: offsets up to which the table has read. A committed read of the topic ends before them.
        :raises TableError: and so does the topic itself.
        """
        ends = admin.ends([topic]).get(topic, {}) if reached else {}
        for partition, offset in reached.items():
            if offset > (end := ends.get(partition, 0)):
                raise TableError(
                    f"{table.target}: its position in {topic}-{partition} is offset {offset}, but the topic ends at "
                    f"{end}. Was it deleted and created again? To read it from the start, use rowdelta reset (see "
                    "docs/operations.md, Reset)."
                )

    def _configured(self, admin: Admin, topic: str, earliest: Offsets, latest: Offsets) -> Offsets:
        by_name = {name.lower(): value for name, value in self._options.items()}
        if "startingtimestamp" in by_name:
            found = admin.offsets([topic], _milliseconds(by_name["startingtimestamp"]))[topic]
            return {p: found[p] if found[p] >= 0 else latest[p] for p in latest}
        text = by_name.get("startingoffsets", "earliest")
        if text in ("earliest", "latest"):
            return earliest if text == "earliest" else latest
        try:
            given = {str(p): int(offset) for p, offset in json.loads(text)[topic].items()}
        except (ValueError, KeyError, AttributeError, TypeError):
            raise ConfigError(
                f"source.options.startingOffsets: got {text!r}, expected earliest, latest, or JSON such as "
                f'{{"{topic}": {{"0": 42}}}}'
            ) from None
        special = {EARLIEST: earliest, _LATEST: latest}
        chosen = earliest | given
        start = {p: special[offset][p] if offset in special else offset for p, offset in chosen.items() if p in latest}
        for partition, offset in start.items():
            # check it now: the table stores this offset before anything is read, and then ignores a corrected option
            if not earliest[partition] <= offset <= latest[partition]:
                raise ConfigError(
                    f"source.options.startingOffsets: {topic}-{partition} has offsets {earliest[partition]} to "
                    f"{latest[partition]}, got {offset}. Use one of these, -2 (earliest) or -1 (latest)."
                )
        return start

    def check_patterns(self) -> Sequence[RowdeltaError]:
        return ()


def topics_of(tables: Iterable[TableSection]) -> list[str]:
    """The topics of tables, each once."""
    return list(dict.fromkeys(topic for table in tables for topic in table.topics))


def _milliseconds(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            f"source.options.startingTimestamp: got {text!r}, expected milliseconds since 1970 such as 1767225600000"
        ) from None
