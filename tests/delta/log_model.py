"""A model of a Delta table, written from PROTOCOL.md alone: a pure function of the table's files.

    log = DeltaLog(path)
    log.snapshot(7).files        (path, vector's unique id) -> `add`
    log.rows(7)                  rows as an Arrow table
    log.check()                  everything, at every version

It is strict. A reader has to make the best of what it finds; this model raises `ProtocolViolation` where a writer broke
a rule. Two rules go further than the protocol's text, and are marked so in `rules`.

`_last_checkpoint` isn't read: it is a hint for those who can't list a folder.
"""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.delta import data_files
from tests.delta.data_files import Action, decoded
from tests.delta.rules import (
    apply_add,
    apply_remove,
    check_add,
    check_commit_info,
    check_protocol,
    check_shape,
    check_unique,
    compare_checkpoint,
    compare_checksum,
    reconcile,
)
from tests.delta.snapshot import Snapshot, key_of
from tests.delta.violations import ProtocolViolation, about, require

_COMMIT = re.compile(r"(\d{20})\.json")
_CHECKPOINT = re.compile(
    r"(?P<version>\d{20})\.checkpoint\."
    r"((?P<part>\d{10})\.(?P<parts>\d{10})\.|(?P<uuid>[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12})\.)?(parquet|json)"
)
_IN_ORDER = ("domainMetadata", "cdc", "remove", "add")
"""A commit's actions have no order; so a path is removed before it is added with another vector."""


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
                        compare_checkpoint(self._checkpoint(version, names), snapshot, self._log / name)
            with about(version, f"{version:020}.crc"):
                compare_checksum(self._log / f"{version:020}.crc", snapshot)
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
                    check_shape(action)
                    kept = not {"sidecar", "checkpointMetadata"} & action.keys()
                    require(kept, "checkpoints' actions aren't in commits", action)
            check_unique(actions)
        after = before.copy()
        after.version = version
        after.commit_info = next((a["commitInfo"] for a in actions if "commitInfo" in a), None)
        by_kind = _by_kind(actions)
        for kind in ("protocol", "metaData", "txn", "domainMetadata"):
            for action in by_kind.get(kind, ()):
                reconcile(after, kind, action)
        with about(version, None):
            require(after.protocol and after.metadata, "version 0 has protocol and metadata", actions)
            check_protocol(after)
            check_commit_info(actions, before, after)
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
                    apply_remove(before, after, action, added)
                else:
                    apply_add(before, after, action, removed)
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
                    check_shape(action)
            check_unique(actions, of_commit=False)
            for kind in ("protocol", "metaData", "txn", "domainMetadata"):
                for action in _by_kind(actions).get(kind, ()):
                    reconcile(snapshot, kind, action)
            check_protocol(snapshot)
            require(not is_v2 or snapshot.supports("v2Checkpoint", reading=True), "v2 needs the feature", names)
            is_allowed = not match["part"] or not snapshot.supports("v2Checkpoint", reading=True)
            require(is_allowed, "no checkpoint in parts with the feature v2Checkpoint", names)
            for add in _by_kind(actions).get("add", ()):
                with about(version, {"add": add}):
                    check_add(snapshot, add)
                    snapshot.put(add)
            for remove in _by_kind(actions).get("remove", ()):
                require(key_of(remove) not in snapshot.files, "no file is live and removed", remove)
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
