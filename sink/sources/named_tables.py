"""Which tables of the source the messages of topics name: how far each topic was searched, and what was found.

It is stored in a file, so that a later run goes on from there. It only saves work: without it topics are searched from
their first messages again.

    {"shop": {"id": "Hv3…", "searched": {"0": 1200}, "tables": {"shop.orders": {}, "shop.users": {"0": 700}}}}
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from threading import Lock

from sink.sources.checkpoint import CheckpointFolder
from sink.sources.topics import Offsets


@dataclass(frozen=True)
class Named:
    """What is known of one topic.

    :param id: the topic's. Empty if it has none.
    :param searched: partition -> the offset before which all messages are known.
    :param tables: name -> offsets before which no message names it. None are known of what the first search found.
    """

    id: str
    searched: Offsets = field(default_factory=dict)
    tables: Mapping[str, Offsets] = field(default_factory=dict)

    def still_of(self, topic_id: str, end: Offsets) -> "Named":
        """The same, or nothing if it is about an earlier topic of this name."""
        is_other = self.id != topic_id or any(offset > end.get(p, 0) for p, offset in self.searched.items())
        return Named(topic_id) if is_other else self

    def with_more(self, end: Offsets, names: Collection[str]) -> "Named":
        """With the names in further messages, which have no gap before them."""
        searched = {p: max(end.get(p, 0), self.searched.get(p, 0)) for p in {**self.searched, **end}}
        return Named(self.id, searched, {**dict.fromkeys(names, self.searched), **self.tables})


class NamedTables:
    """What is known of topics. Several threads may add to it.

    :param name: of the file in the folder.
    """

    def __init__(self, folder: CheckpointFolder, name: str) -> None:
        self._folder, self._name = folder, name
        self._lock = Lock()

    @cached_property
    def _topics(self) -> dict[str, Named]:
        try:
            return {topic: Named(**stored) for topic, stored in json.loads(self._folder.read(self._name)).items()}
        except ValueError:  # there is no file, or a crash has cut it off
            return {}

    def of(self, topic: str, topic_id: str, end: Offsets) -> Named:
        """What is known of a topic as it is now.

        :param end: where it ends.
        """
        with self._lock:
            known = self._topics[topic] = self._topics.get(topic, Named(topic_id)).still_of(topic_id, end)
            return known

    def add(self, topic: str, begin: Offsets, end: Offsets, names: Collection[str]) -> None:
        """Add the names in further messages, unless there is a gap before these.

        :param begin: partition -> their first offset, where there may be a gap.
        """
        with self._lock:
            known = self._topics.get(topic)
            if known is not None and all(offset <= known.searched.get(p, 0) for p, offset in begin.items()):
                self._topics[topic] = known.with_more(end, names)

    def first(self, topic: str, name: str) -> Offsets:
        """Offsets before which no message of a topic names a table. Empty if none are known."""
        return self._topics[topic].tables.get(name, {}) if topic in self._topics else {}

    @property
    def names(self) -> Mapping[str, Collection[str]]:
        """Topic -> the names that it has."""
        return {topic: known.tables.keys() for topic, known in self._topics.items()}

    def store(self) -> None:
        """Write the file."""
        with self._lock:
            text = json.dumps({topic: asdict(known) for topic, known in self._topics.items()})
        self._folder.write(self._name, text)
