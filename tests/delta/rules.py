"""The rules that actions, checkpoints and checksums of a Delta log have to keep, after PROTOCOL.md. Each function
raises `ProtocolViolation` where one is broken.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.delta import data_files
from tests.delta.data_files import Action, decoded, vector_id
from tests.delta.snapshot import Snapshot, key_of
from tests.delta.violations import require

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
_VECTOR: dict[str, type] = {"storageType": str, "pathOrInlineDv": str, "sizeInBytes": int, "cardinality": int}


def _check_fields(content: Action, fields: Mapping[str, type]) -> None:
    for name, type_ in fields.items():
        require(type(content.get(name)) is type_, "required fields", f"{name} is {content.get(name)!r}")


def check_shape(action: Action) -> None:
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


def check_unique(actions: list[Action], *, of_commit: bool = True) -> None:
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
            identity = key_of(content) if kind == "remove" and not of_commit else decoded(content["path"])
        require((kind, identity) not in seen, f"one {kind} for each {_IDENTITY.get(kind, 'commit')}", action)
        seen.add((kind, identity))
    if not of_commit:
        return
    both = {key_of(a["add"]) for a in actions if "add" in a} & {key_of(a["remove"]) for a in actions if "remove" in a}
    require(not both, "no logical file is added and removed in a commit", both)


def reconcile(snapshot: Snapshot, kind: str, action: Action) -> None:
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


def check_protocol(snapshot: Snapshot) -> None:
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


def check_commit_info(actions: list[Action], before: Snapshot, after: Snapshot) -> None:
    """In-Commit Timestamps"."""
    if not (after.supports("inCommitTimestamp") and after.is_set("delta.enableInCommitTimestamps")):
        return
    time = actions[0].get("commitInfo", {}).get("inCommitTimestamp")
    require(type(time) is int, "commitInfo with inCommitTimestamp comes first", actions[0])
    earlier = (before.commit_info or {}).get("inCommitTimestamp", -1)
    require(time > earlier, "in-commit timestamps grow", f"{time} after {earlier}")


def check_add(snapshot: Snapshot, add: Action) -> None:
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


def apply_remove(before: Snapshot, after: Snapshot, remove: Action, added: list[Action]) -> None:
    key = key_of(remove)
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


def apply_add(before: Snapshot, after: Snapshot, add: Action, removed: list[Action]) -> None:
    key = key_of(add)
    check_add(after, add)
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


def compare_checkpoint(found: Snapshot, replayed: Snapshot, path: Path) -> None:
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
        return value
    kept = {name: _plain(v) for name, v in value.items() if v is not None and v != {}}
    return {name: sorted(v) if name.endswith("Features") else v for name, v in kept.items()}


def compare_checksum(path: Path, snapshot: Snapshot) -> None:
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
