"""A table at a version, as the model of the log holds it."""

import json
import re
from dataclasses import dataclass, field, replace
from functools import cached_property

from tests.delta.data_files import Action, TableSchema, decoded, vector_id
from tests.delta.violations import require

Key = tuple[str, str | None]
"""Path of a data file, decoded, and its vector's unique id: what identifies a logical file."""

_INTERVAL = re.compile(r"(?:interval )?(\d+) (week|day|hour|minute|second|millisecond)s?", re.IGNORECASE)
_UNITS = {"week": 604_800, "day": 86_400, "hour": 3600, "minute": 60, "second": 1, "millisecond": 0.001}
_WRITER_FEATURES = {"appendOnly": 2, "changeDataFeed": 4, "columnMapping": 5}
_READER_FEATURES = {"columnMapping": 2}
"""The first version of the protocol that has a feature without naming it; others must be named."""


@dataclass
class Snapshot:
    """A table at a version ("Action Reconciliation").

    :param files: live logical files.
    :param tombstones: removed logical files, expired ones too (`unexpired`).
    :param transactions: `txn` actions by appId.
    :param domains: configurations by domain; removed ones are absent.
    :param vectors: live data files' paths, each with the unique id of its one live vector.
    :param spelling: decoded path -> URI by which actions name it.
    :param commit_info: of the commit at this version, if it is still there.
    """

    version: int = -1
    protocol: Action = field(default_factory=dict)
    metadata: Action = field(default_factory=dict)
    files: dict[Key, Action] = field(default_factory=dict)
    tombstones: dict[Key, Action] = field(default_factory=dict)
    transactions: dict[str, Action] = field(default_factory=dict)
    domains: dict[str, str] = field(default_factory=dict)
    vectors: dict[str, str | None] = field(default_factory=dict)
    spelling: dict[str, str] = field(default_factory=dict)
    commit_info: Action | None = None

    def copy(self) -> "Snapshot":
        return replace(
            self,
            files=dict(self.files),
            tombstones=dict(self.tombstones),
            transactions=dict(self.transactions),
            domains=dict(self.domains),
            vectors=dict(self.vectors),
            spelling=dict(self.spelling),
        )

    def put(self, add: Action) -> None:
        """Make a logical file live."""
        key = key_of(add)
        self.files[key], self.vectors[key[0]] = add, key[1]
        self.spelling[key[0]] = add["path"]
        self.tombstones.pop(key, None)

    def bury(self, remove: Action) -> None:
        """Make a logical file a tombstone."""
        key = key_of(remove)
        self.tombstones[key] = remove
        self.spelling[key[0]] = remove["path"]
        if self.files.pop(key, None) is not None:
            del self.vectors[key[0]]

    def supports(self, feature: str, *, reading: bool = False) -> bool:
        """Whether the protocol has the feature, by name or by its version ("Table Features")."""
        version = self.protocol["minReaderVersion" if reading else "minWriterVersion"]
        if version == (3 if reading else 7):
            return feature in self.protocol["readerFeatures" if reading else "writerFeatures"]
        return bool(version >= (_READER_FEATURES if reading else _WRITER_FEATURES).get(feature, 9))

    def is_set(self, name: str) -> bool:
        """Whether a table property is true."""
        return str(self.metadata["configuration"].get(name, "false")).lower() == "true"

    def unexpired(self, now: int) -> dict[Key, Action]:
        """Tombstones that VACUUM has to respect.

        :param now: milliseconds since 1970.
        """
        text = self.metadata["configuration"].get("delta.deletedFileRetentionDuration", "interval 1 week")
        match = _INTERVAL.fullmatch(text)
        require(match, "retention is an interval", text)
        assert match is not None
        kept = int(match[1]) * _UNITS[match[2].lower()] * 1000
        return {key: r for key, r in self.tombstones.items() if r.get("deletionTimestamp", 0) + kept > now}

    @cached_property
    def schema(self) -> TableSchema:
        mapping = self.metadata["configuration"].get("delta.columnMapping.mode", "none")
        return TableSchema(
            json.loads(self.metadata["schemaString"])["fields"],
            self.metadata["partitionColumns"],
            mapping if self.supports("columnMapping", reading=True) else "none",
            self.supports("typeWidening", reading=True),
        )


def key_of(action: Action) -> Key:
    return decoded(action["path"]), vector_id(action)
