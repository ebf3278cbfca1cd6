"""A model of a Delta table, written from PROTOCOL.md alone: a pure function of the table's files.

    log = DeltaLog(path)
    log.snapshot(7).files        (path, vector's unique id) -> `add`
    log.rows(7)                  rows as an Arrow table
    log.check()                  everything, at every version

It is strict. A reader has to make the best of what it finds; this model raises `ProtocolViolation` where a writer broke
a rule. Two rules go further than the protocol's text, and are marked so: nobody keeps them by accident.

`_last_checkpoint` isn't read: it is a hint for those who can't list a folder.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.delta import data_files
from tests.delta.data_files import Action, TableSchema, decoded, vector_id
from tests.delta.violations import ProtocolViolation, about, require

Key = tuple[str, str | None]
"""Path of a data file, decoded, and its vector's unique id: what identifies a logical file."""

_COMMIT = re.compile(r"(\d{20})\.json")
_CHECKPOINT = re.compile(
    r"(?P<version>\d{20})\.checkpoint\."
    r"((?P<part>\d{10})\.(?P<parts>\d{10})\.|(?P<uuid>[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12})\.)?(parquet|json)"
)
_INTERVAL = re.compile(r"(?:interval )?(\d+) (week|day|hour|minute|second|millisecond)s?", re.IGNORECASE)
_UNITS = {"week": 604_800, "day": 86_400, "hour": 3600, "minute": 60, "second": 1, "millisecond": 0.001}
_REQUIRED: dict[str, dict[str, type]] = {
    "add": {"path": str, "partitionValues": dict, "size": int, "modificationTime": int, "dataChange": bool},
    "remove": {"path": str, "dataChange": bool},
    "cdc": {"path": str, "partitionValues": dict, "size": int, "dataChange": bool},
    "metaData": {"id": str, "format": dict, "schemaString": str, "partitionColumns": list, "configuration": dict},
    "protocol": {"minReaderVersion": int, "minWriterVersion": int},
    "txn": {"appId": str, "version": int},
    "domainMetadata": {"domain": str, "configuration": str, "removed": bool},
    "commitInfo": {},
    "sidecar": {"path": str, "sizeInBytes": int, "modificationTime": int},
    "checkpointMetadata": {"version": int},
}
_IDENTITY = {"txn": "appId", "domainMetadata": "domain", "add": "path", "remove": "path"}
"""Of these a commit has one for each of the field's values; of `metaData` and `protocol` it has one."""
_IN_ORDER = ("domainMetadata", "cdc", "remove", "add")
"""A commit's actions have no order; so a path is removed before it is added with another vector."""
_VECTOR: dict[str, type] = {"storageType": str, "pathOrInlineDv": str, "sizeInBytes": int, "cardinality": int}
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
        key = _key(add)
        self.files[key], self.vectors[key[0]] = add, key[1]
        self.spelling[key[0]] = add["path"]
        self.tombstones.pop(key, None)

    def bury(self, remove: Action) -> None:
        """Make a logical file a tombstone."""
        key = _key(remove)
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


class DeltaLog:
    """A table's log.

    :param table: the table's folder.
    """

    def __init__(self, table: Path) -> None:
        self.table = table
        names = sorted(path.name for path in (table / "_delta_log").iterdir())
        self.commits = [int(match[1]) for name in names if (match := _COMMIT.fullmatch(name))]
        require(self.commits, "log has commits", table)
        self._checkpoints = _complete(names)
        for version, after in zip(self.commits, self.commits[1:], strict=False):
            with about(version + 1, None):
                require(after == version + 1, "versions are contiguous", f"{version} is followed by {after}")
        reachable = [v for v in self._checkpoints if self.commits[0] - 1 <= v <= self.commits[-1]]
        with about(self.commits[0], None):
            missing = f"the log begins at {self.commits[0]}, without a checkpoint of an earlier version"
            require(self.commits[0] == 0 or reachable, "versions are contiguous", missing)
        first = 0 if self.commits[0] == 0 else min(reachable)
        self.versions = range(first, self.commits[-1] + 1)
        """The versions that can be read."""

    def snapshot(self, version: int | None = None) -> Snapshot:
        """The table at a version, by default the latest: from the newest checkpoint that isn't newer.

        :raises LookupError: there is no such version, or it was cleaned up.
        :raises ProtocolViolation: a commit or checkpoint on the way breaks a rule.
        """
        version = self.versions[-1] if version is None else version
        if version not in self.versions:
            raise LookupError(f"{self.table} has the versions {self.versions}, not {version}")
        checkpoint = max((v for v in self._checkpoints if v <= version), default=None)
        snapshot = Snapshot() if checkpoint is None else self._checkpoint(checkpoint, self._checkpoints[checkpoint][0])
        for number in range(snapshot.version + 1, version + 1):
            snapshot = self._after(snapshot, number)
        return snapshot

    def version_at(self, time: int) -> int:
        """The newest version that was committed at or before a time ("In-Commit Timestamps").

        A commit has its file's modification time, or its in-commit timestamp. File times may go back, time doesn't:
        then a commit counts as one millisecond later than the one before it.

        :param time: milliseconds since 1970.
        :raises LookupError: the time is before the first version.
        """
        found, last = None, -1
        for version in self.commits:
            info = self._actions(version)[0].get("commitInfo", {}) if version in self.versions else {}
            modified = self._commit_path(version).stat().st_mtime_ns // 1_000_000
            last = info["inCommitTimestamp"] if "inCommitTimestamp" in info else max(modified, last + 1)
            found = version if last <= time and version in self.versions else found
        if found is None:
            raise LookupError(f"{self.table} has no version that was committed by {time}")
        return found

    def history(self) -> dict[int, Action]:
        """`commitInfo` of all versions whose commit is there and has one."""
        found = {v: [a["commitInfo"] for a in self._actions(v) if "commitInfo" in a] for v in self.commits}
        return {version: infos[0] for version, infos in found.items() if infos}

    def rows(self, version: int | None = None) -> pa.Table:
        """The rows at a version, in no particular order, with the table's columns.

        :raises ProtocolViolation: as `snapshot`, or files and log contradict each other.
        """
        snapshot = self.snapshot(version)
        files = []
        for add in snapshot.files.values():
            with about(snapshot.version, add):
                files.append(data_files.read(self.table, add, snapshot.schema).rows)
        return pa.concat_tables([snapshot.schema.arrow.empty_table(), *files])

    def check(self, *, files_since: int = 0) -> None:
        """Check every version: its actions, its checkpoints and checksum, and its files with their statistics.

        :param files_since: of earlier versions only the log is checked: VACUUM may have deleted their files.
        :raises ProtocolViolation: a rule is broken.
        """
        snapshot = Snapshot() if self.commits[0] == 0 else self.snapshot(self.versions[0])
        checked = set[str]()
        for version in self.versions:
            if version > snapshot.version:
                snapshot = self._after(snapshot, version)
            for names in self._checkpoints.get(version, ()):
                for name in names:
                    with about(version, name):
                        _compare_checkpoint(self._checkpoint(version, names), snapshot, self._log / name)
            with about(version, f"{version:020}.crc"):
                _compare_checksum(self._log / f"{version:020}.crc", snapshot)
            for add in snapshot.files.values() if version >= files_since else ():
                said = json.dumps([add, snapshot.metadata], sort_keys=True, default=str)
                if said not in checked:
                    with about(version, add):
                        file = data_files.read(self.table, add, snapshot.schema)
                        data_files.check_statistics(add, file, snapshot.schema)
                checked.add(said)

    @property
    def _log(self) -> Path:
        return self.table / "_delta_log"

    def _commit_path(self, version: int) -> Path:
        return self._log / f"{version:020}.json"

    def _actions(self, version: int) -> list[Action]:
        with about(version, None):
            return _lines(self._commit_path(version))

    def _after(self, before: Snapshot, version: int) -> Snapshot:
        """The snapshot after a commit."""
        actions = self._actions(version)
        with about(version, None):
            for action in actions:
                with about(version, action):
                    _check_shape(action)
                    kept = not {"sidecar", "checkpointMetadata"} & action.keys()
                    require(kept, "checkpoints' actions aren't in commits", action)
            _check_unique(actions)
        after = before.copy()
        after.version = version
        after.commit_info = next((a["commitInfo"] for a in actions if "commitInfo" in a), None)
        by_kind = _by_kind(actions)
        for kind in ("protocol", "metaData", "txn", "domainMetadata"):
            for action in by_kind.get(kind, ()):
                _reconcile(after, kind, action)
        with about(version, None):
            require(after.protocol and after.metadata, "version 0 has protocol and metadata", actions)
            _check_protocol(after)
            _check_commit_info(actions, before, after)
        removed, added = by_kind.get("remove", []), by_kind.get("add", [])
        ordered = [(kind, action) for kind in _IN_ORDER for action in by_kind.get(kind, ())]
        for kind, action in ordered:
            with about(version, {kind: action}):
                if kind == "domainMetadata":
                    require(after.supports("domainMetadata"), "domains need the feature", after.protocol)
                elif kind == "cdc":
                    require(after.supports("changeDataFeed"), "change data files need the feature", after.protocol)
                    require(action["dataChange"] is False, "change data files don't change data", action)
                elif kind == "remove":
                    _remove(before, after, action, added)
                else:
                    _add(before, after, action, removed)
        return after

    def _checkpoint(self, version: int, names: list[str]) -> Snapshot:
        """The snapshot in a checkpoint of one or several files."""
        snapshot = Snapshot(version)
        with about(version, names):
            actions = [action for name in names for action in _lines(self._log / name)]
            kinds = Counter(kind for action in actions for kind in action)
            is_v2, match = bool(kinds["checkpointMetadata"]), _CHECKPOINT.fullmatch(names[0])
            assert match is not None
            require(not kinds["commitInfo"] and not kinds["cdc"], "checkpoint has the state only", kinds)
            require(is_v2 or not match["uuid"], "checkpoint with a uuid is of v2", kinds)
            require(not is_v2 or not match["part"], "checkpoint in parts is of v1", kinds)
            require(is_v2 or not kinds["sidecar"], "checkpoint with sidecars is of v2", kinds)
            require(kinds["protocol"] == kinds["metaData"] == 1, "checkpoint has one protocol and metadata", kinds)
            if is_v2:
                said = [a["checkpointMetadata"]["version"] for a in actions if "checkpointMetadata" in a]
                require(said == [version], "checkpoint says its version", said)
                mixed = kinds["sidecar"] and (kinds["add"] or kinds["remove"])
                require(not mixed, "files are in the checkpoint or in sidecars", kinds)
            for sidecar in [a["sidecar"] for a in actions if "sidecar" in a]:
                path = self._log / "_sidecars" / decoded(sidecar["path"]).rpartition("/")[2]
                require(path.is_file(), "sidecar exists", path)
                require(path.stat().st_size == sidecar["sizeInBytes"], "sidecar's size", path.stat().st_size)
                inside = _lines(path)
                require(all(a.keys() <= {"add", "remove"} for a in inside), "sidecars have file actions only", path)
                actions += inside
            for action in actions:
                with about(version, action):
                    _check_shape(action)
            _check_unique(actions, of_commit=False)
            for kind in ("protocol", "metaData", "txn", "domainMetadata"):
                for action in _by_kind(actions).get(kind, ()):
                    _reconcile(snapshot, kind, action)
            _check_protocol(snapshot)
            require(not is_v2 or snapshot.supports("v2Checkpoint", reading=True), "v2 needs the feature", names)
            is_allowed = not match["part"] or not snapshot.supports("v2Checkpoint", reading=True)
            require(is_allowed, "no checkpoint in parts with the feature v2Checkpoint", names)
            for add in _by_kind(actions).get("add", ()):
                with about(version, {"add": add}):
                    _check_add(snapshot, add)
                    snapshot.put(add)
            for remove in _by_kind(actions).get("remove", ()):
                require(_key(remove) not in snapshot.files, "no file is live and removed", remove)
                snapshot.bury(remove)
        return snapshot


def _complete(names: list[str]) -> dict[int, list[list[str]]]:
    """Checkpoints by version, each a list of its files. One that lacks parts is ignored, as a reader must."""
    found: dict[int, dict[str, list[str]]] = {}
    for name in names:
        if match := _CHECKPOINT.fullmatch(name):
            found.setdefault(int(match["version"]), {}).setdefault(match["parts"] or name, []).append(name)
    complete = {
        version: [files for parts, files in checkpoints.items() if not parts.isdigit() or len(files) == int(parts)]
        for version, checkpoints in found.items()
    }
    return {version: checkpoints for version, checkpoints in complete.items() if checkpoints}


def _lines(path: Path) -> list[Action]:
    """The actions of a commit, a checkpoint or a sidecar, without fields that are null."""
    if path.suffix == ".parquet":
        with pq.ParquetFile(path) as file:
            lines = file.read().to_pylist(maps_as_pydicts="strict")
    else:
        try:
            lines = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line]
        except ValueError as error:
            raise ProtocolViolation("an action is a line of JSON", f"{path.name}: {error}") from error
    require(all(isinstance(line, dict) for line in lines), "an action is a line of JSON", path.name)
    return [{kind: _without_nulls(action) for kind, action in line.items() if action is not None} for line in lines]


def _without_nulls(action: Any) -> Any:
    """Values of maps may be null, fields that are null are absent."""
    if not isinstance(action, dict):
        return action
    kept = {name: value for name, value in action.items() if value is not None}
    if "deletionVector" in kept:
        kept["deletionVector"] = _without_nulls(kept["deletionVector"])
    return kept


def _by_kind(actions: list[Action]) -> dict[str, list[Action]]:
    found: dict[str, list[Action]] = {}
    for action in actions:
        for kind, content in action.items():
            found.setdefault(kind, []).append(content)
    return found


def _key(action: Action) -> Key:
    return decoded(action["path"]), vector_id(action)


def _check_fields(content: Action, fields: Mapping[str, type]) -> None:
    for name, type_ in fields.items():
        require(type(content.get(name)) is type_, "required fields", f"{name} is {content.get(name)!r}")


def _check_shape(action: Action) -> None:
    """Fields that the schemas of the actions require. Actions that this model doesn't know are ignored."""
    require(len(action) == 1, "an action is a line of JSON", list(action))
    ((kind, content),) = action.items()
    _check_fields(content, _REQUIRED.get(kind, {}))
    if kind == "remove" and content.get("extendedFileMetadata"):
        _check_fields(content, {"partitionValues": dict, "size": int})
    if vector := content.get("deletionVector") if kind in ("add", "remove") else None:
        _check_fields(vector, _VECTOR)
        require(vector["storageType"] in ("u", "i", "p"), "vector's storage type", vector)
    if kind in ("add", "remove", "cdc"):
        decoded(content["path"])


def _check_unique(actions: list[Action], *, of_commit: bool = True) -> None:
    """Actions of one commit don't reconcile with each other ("Delta Log Entries"). In a checkpoint, tombstones of one
    path may name several vectors.
    """
    seen = set[tuple[Any, ...]]()
    for action in actions:
        ((kind, content),) = action.items()
        if kind not in _IDENTITY and kind not in ("metaData", "protocol"):
            continue
        identity: Any = content[_IDENTITY[kind]] if kind in _IDENTITY else None
        if kind in ("add", "remove"):
            identity = _key(content) if kind == "remove" and not of_commit else decoded(content["path"])
        require((kind, identity) not in seen, f"one {kind} for each {_IDENTITY.get(kind, 'commit')}", action)
        seen.add((kind, identity))
    if not of_commit:
        return
    both = {_key(a["add"]) for a in actions if "add" in a} & {_key(a["remove"]) for a in actions if "remove" in a}
    require(not both, "no logical file is added and removed in a commit", both)


def _reconcile(snapshot: Snapshot, kind: str, action: Action) -> None:
    """The latest `protocol`, `metaData`, `txn` of an appId and `domainMetadata` of a domain win."""
    if kind == "protocol":
        snapshot.protocol = action
    elif kind == "metaData":
        snapshot.metadata = action
    elif kind == "txn":
        snapshot.transactions[action["appId"]] = action
    elif action["removed"]:
        snapshot.domains.pop(action["domain"], None)
    else:
        snapshot.domains[action["domain"]] = action["configuration"]


def _check_protocol(snapshot: Snapshot) -> None:
    """Table Features", and what a schema needs of them."""
    protocol, rule = snapshot.protocol, "features belong to reader version 3 and writer version 7"
    reader, writer = protocol["minReaderVersion"], protocol["minWriterVersion"]
    require(reader < 3 or writer == 7, rule, protocol)
    require((reader == 3) == ("readerFeatures" in protocol), rule, protocol)
    require((writer == 7) == ("writerFeatures" in protocol), rule, protocol)
    only_reader = set(protocol.get("readerFeatures", ())) - set(protocol.get("writerFeatures", ()))
    require(not only_reader, "reader features are writer features too", only_reader)
    schema, text = snapshot.schema, snapshot.metadata["schemaString"]
    names = [f["name"].lower() for f in schema.fields]
    require(len(set(names)) == len(names), "column names are unique", names)
    unknown = set(schema.partition_columns) - {f["name"] for f in schema.fields}
    require(not unknown, "partition columns are columns", unknown)
    assert schema.arrow is not None  # its types are known
    for feature, is_used in {
        "timestampNtz": '"timestamp_ntz"' in text,
        "typeWidening": "delta.typeChanges" in text,
        "deletionVectors": snapshot.is_set("delta.enableDeletionVectors"),
    }.items():
        has_feature = snapshot.supports(feature, reading=True) and snapshot.supports(feature)
        require(not is_used or has_feature, f"{feature} needs the feature", protocol)
    if schema.mapping != "none":
        ids = [f["metadata"].get("delta.columnMapping.id") for f in schema.fields]
        physical = [f["metadata"].get("delta.columnMapping.physicalName") for f in schema.fields]
        is_mapped = None not in ids + physical and len(set(ids)) == len(set(physical)) == len(ids)
        require(is_mapped, "columns have an id and a physical name", schema.fields)
        most = int(snapshot.metadata["configuration"].get("delta.columnMapping.maxColumnId", -1))
        require(max(ids, default=0) <= most, "maxColumnId is the largest column id", f"{ids}, not {most}")


def _check_commit_info(actions: list[Action], before: Snapshot, after: Snapshot) -> None:
    """In-Commit Timestamps"."""
    if not (after.supports("inCommitTimestamp") and after.is_set("delta.enableInCommitTimestamps")):
        return
    time = actions[0].get("commitInfo", {}).get("inCommitTimestamp")
    require(type(time) is int, "commitInfo with inCommitTimestamp comes first", actions[0])
    earlier = (before.commit_info or {}).get("inCommitTimestamp", -1)
    require(time > earlier, "in-commit timestamps grow", f"{time} after {earlier}")


def _check_add(snapshot: Snapshot, add: Action) -> None:
    """What holds for an `add` in commits and checkpoints."""
    fields = snapshot.schema.partition_fields
    names = list(add["partitionValues"])
    require(sorted(names) == sorted(fields), "partition values of all partition columns", names)
    for name, text in add["partitionValues"].items():
        data_files.partition_value(text, fields[name]["type"])
    path = decoded(add["path"])
    folders = path.split("/")[:-1] if not path.startswith("/") else []
    hidden = [f for f in folders if f.startswith("_") and f.partition("=")[0] not in fields]
    require(not hidden, "data files aren't in hidden folders", path)
    live = snapshot.vectors.get(path, vector_id(add))
    require(live == vector_id(add), "a path is live with one vector", f"{live} and {vector_id(add)}")
    stats = data_files.statistics(add)
    if vector := add.get("deletionVector"):
        feature = snapshot.supports("deletionVectors", reading=True) and snapshot.supports("deletionVectors")
        require(feature, "vectors need the feature", snapshot.protocol)
        is_less = stats is not None and 0 <= vector["cardinality"] <= stats["numRecords"]
        require(is_less, "vector's cardinality", f"{vector['cardinality']} of {stats}")
    if snapshot.is_set("delta.enableRowTracking"):
        has_ids = {"baseRowId", "defaultRowCommitVersion"} <= add.keys()
        require(has_ids, "row tracking needs row ids and commit versions", add)
        mark = json.loads(snapshot.domains.get("delta.rowTracking", "{}")).get("rowIdHighWaterMark", -1)
        last = add["baseRowId"] + (stats or {}).get("numRecords", 0) - 1
        require(last <= mark, "row ids are below the high water mark", f"{last}, the mark is {mark}")


def _remove(before: Snapshot, after: Snapshot, remove: Action, added: list[Action]) -> None:
    key = _key(remove)
    # stricter than the protocol, which lets a remove that removes nothing pass
    require(key[0] in before.vectors, "a removed file was live", key)
    live = before.vectors[key[0]]
    require(live == key[1], "a remove names the live vector", f"{live}, not {key[1]}")
    # stricter than the protocol, which compares decoded paths
    require(remove["path"] == before.spelling[key[0]], "a path is always spelled the same", before.spelling[key[0]])
    if after.supports("appendOnly") and after.is_set("delta.appendOnly"):
        require(not remove["dataChange"], "appendOnly tables lose no rows", remove)
    records = (data_files.statistics(before.files[key]) or {}).get("numRecords")
    has_rows = records is None or records > remove.get("deletionVector", {}).get("cardinality", 0)
    if not remove["dataChange"] and has_rows:
        require(added, "a remove without dataChange has an add", remove)
    ids = [
        {name: a.get(name) for name in ("baseRowId", "defaultRowCommitVersion")} for a in (before.files[key], remove)
    ]
    require(ids[0] == ids[1] or not after.is_set("delta.enableRowTracking"), "a path keeps its row ids", ids)
    after.bury(remove)


def _add(before: Snapshot, after: Snapshot, add: Action, removed: list[Action]) -> None:
    key = _key(add)
    _check_add(after, add)
    spelled = before.spelling.get(key[0])
    require(spelled in (None, add["path"]), "a path is always spelled the same", spelled)
    is_new = key not in before.files and key not in before.tombstones
    if key[1] is not None and is_new:
        require(after.is_set("delta.enableDeletionVectors"), "new vectors need enableDeletionVectors", key)
    if not add["dataChange"] and key not in before.files:
        require(removed, "an add without dataChange has a remove", add)
    if after.is_set("delta.enableRowTracking") and spelled is None:
        mark = json.loads(before.domains.get("delta.rowTracking", "{}")).get("rowIdHighWaterMark", -1)
        require(add["baseRowId"] > mark, "new row ids are above the high water mark", f"{add['baseRowId']}, {mark}")
        require(add["defaultRowCommitVersion"] == after.version, "new row commit versions", add)
    live = before.files.get(key)
    if live is not None and after.is_set("delta.enableRowTracking") and "baseRowId" in live:
        require(live["baseRowId"] == add["baseRowId"], "a path keeps its row ids", [live, add])
    after.put(add)


def _compare_checkpoint(found: Snapshot, replayed: Snapshot, path: Path) -> None:
    """A checkpoint holds the whole state, but no tombstones that had expired when it was written."""
    for name in ("protocol", "metadata", "domains", "transactions"):
        said, is_ = getattr(found, name), getattr(replayed, name)
        if name == "transactions" and "delta.setTransactionRetentionDuration" in replayed.metadata["configuration"]:
            is_ = {key: value for key, value in is_.items() if key in said}
        require(_plain(said) == _plain(is_), f"checkpoint has the {name}", f"{said}, not {is_}")
    require(
        found.files.keys() == replayed.files.keys(),
        "checkpoint has the live files",
        found.files.keys() ^ replayed.files.keys(),
    )
    for key, add in found.files.items():
        same = ("path", "partitionValues", "size", "modificationTime", "stats", "baseRowId", "defaultRowCommitVersion")
        for name in same:
            is_same = add.get(name) == replayed.files[key].get(name) or (name == "stats" and name not in add)
            require(is_same, "checkpoint has the live files", f"{key}: {name} is {add.get(name)!r}")
    kept = replayed.unexpired(path.stat().st_mtime_ns // 1_000_000).keys()
    wrong = (kept - found.tombstones.keys()) | (found.tombstones.keys() - replayed.tombstones.keys())
    require(not wrong, "checkpoint has the tombstones", wrong)


def _plain(value: Any) -> Any:
    """Equal for actions that say the same in JSON and in Parquet, which writes defaults."""
    if not isinstance(value, Mapping):
        return sorted(value) if isinstance(value, list) and all(isinstance(v, str) for v in value) else value
    return {name: _plain(v) for name, v in value.items() if v is not None and v != {}}


def _compare_checksum(path: Path, snapshot: Snapshot) -> None:
    """Version Checksum File": optional, but right."""
    if not path.exists():
        return
    said, files = json.loads(path.read_text("utf-8")), snapshot.files.values()
    vectors = [add["deletionVector"]["cardinality"] for add in files if "deletionVector" in add]
    expected = {
        "tableSizeBytes": sum(add["size"] for add in files),
        "numFiles": len(files),
        "numMetadata": 1,
        "numProtocol": 1,
        "numDeletedRecordsOpt": sum(vectors),
        "numDeletionVectorsOpt": len(vectors),
        "metadata": _plain(snapshot.metadata),
        "protocol": _plain(snapshot.protocol),
    }
    for name, value in expected.items():
        is_said = name in said or not name.endswith("Opt")
        require(
            not is_said or _plain(said.get(name)) == value, "version checksum", f"{name}: {said.get(name)}, not {value}"
        )
    if "domainMetadata" in said:
        domains = {d["domain"]: d["configuration"] for d in said["domainMetadata"]}
        require(domains == snapshot.domains, "version checksum", f"domains: {domains}, not {snapshot.domains}")
    if "setTransactions" in said:
        versions = {t["appId"]: t["version"] for t in said["setTransactions"]}
        expected_ = {app: t["version"] for app, t in snapshot.transactions.items()}
        require(versions == expected_, "version checksum", f"transactions: {versions}, not {expected_}")
