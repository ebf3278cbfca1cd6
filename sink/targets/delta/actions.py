"""What is in a Delta table's log, as plain values: actions as Delta's protocol writes them (PROTOCOL.md, "Actions"),
the commits that have them, and what a commit may have.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

ACTIONS = {
    "add": "AddFile",
    "remove": "RemoveFile",
    "cdc": "AddCDCFile",
    "txn": "SetTransaction",
    "domainMetadata": "DomainMetadata",
}
"""Actions that a commit may have, and Delta's classes of them. They are in the order in which Delta writes them."""
_OPERATION = "rowdelta-operation"
RESTORE = "RESTORE"
CLONE = "CLONE"


@dataclass(frozen=True)
class Metadata:
    """The table's `metaData` action.

    :param table_id: it changes when the table is replaced, or dropped and created again.
    :param schema: Spark's JSON of a `StructType`.
    :param partition_columns: names in their order.
    :param configuration: the table's properties.
    """

    table_id: str
    schema: str
    partition_columns: tuple[str, ...]
    configuration: Mapping[str, str]


@dataclass(frozen=True)
class Protocol:
    """The table's `protocol` action. The features are empty below versions 3 (reader) and 7 (writer)."""

    reader_version: int
    writer_version: int
    reader_features: frozenset[str]
    writer_features: frozenset[str]


@dataclass(frozen=True)
class Commit:
    """One version of the log.

    :param actions: all its actions but `commitInfo`, each an object with one entry.
    :param info: the content of `commitInfo`, with `operation`, `operationParameters`, `operationMetrics`, `timestamp`
        (milliseconds). It is empty if a writer left it out.
    """

    version: int
    actions: Sequence[Mapping[str, Any]]
    info: Mapping[str, Any]

    @property
    def operation_id(self) -> str | None:
        """`Proposal.operation`, if one of our commits made this version."""
        return self.notes.get(_OPERATION)

    @property
    def notes(self) -> Mapping[str, str]:
        """`Proposal.notes` and the operation, if one of our commits made this version."""
        try:
            found = json.loads(self.info.get("userMetadata") or "{}")
        except ValueError:
            return {}
        return found if isinstance(found, dict) and _OPERATION in found else {}


@dataclass(frozen=True)
class Proposal:
    """What one commit shall change. Plain values only.

    :param actions: `add`, `remove`, `cdc`, `txn` and `domainMetadata` actions.
    :param base_version: the version that the actions were made for. The commit is refused on another one.
    :param live: the files that were live there, by decoded path (`decoded`), each the content of its `add`. At least
        those that the actions name have to be in it.
    :param app_id: the `txn` that the commit continues. It is refused if another commit has written it since.
    :param operation: id of this attempt, which the commit has (`Commit.operation_id`).
    :param epoch: number of the micro-batch, for people (`DESCRIBE HISTORY`).
    :param metrics: numbers that `DESCRIBE HISTORY` shows as `operationMetrics`.
    :param notes: what the table's history says of the commit, in its `userMetadata`.
    """

    actions: Sequence[Mapping[str, Any]]
    base_version: int
    live: Mapping[str, Mapping[str, Any]]
    app_id: str
    operation: str
    epoch: int = 0
    metrics: Mapping[str, int] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)

    @property
    def user_metadata(self) -> str:
        """What the commit's `userMetadata` says, by which it is found again."""
        return json.dumps({_OPERATION: self.operation, **self.notes})


def decoded(path: str) -> str:
    """A path as in `add.path`, whose percent-encoding differs between writers, in the form that can be compared."""
    return unquote(path)


def check_removes(actions: Sequence[Mapping[str, Any]], live: Mapping[str, Mapping[str, Any]]) -> None:
    """Check what Delta doesn't: a `remove` that doesn't name the live deletion vector is accepted, and then both files
    are live, and their rows are doubled (PROTOCOL.md, "Action Reconciliation": a file is its path and its vector).

    :param actions: of a commit.
    :param live: content of the `add` of each live file, by decoded path.
    :raises ValueError: an action isn't possible on these files.
    """
    removed: set[str] = set()
    for action in actions:
        if len(action) != 1 or not ACTIONS.keys() & action.keys():
            raise ValueError(f"not an action that a commit may have: {sorted(action)}")
        if "remove" not in action:
            continue
        path = decoded(action["remove"]["path"])
        if path not in live:
            raise ValueError(f"remove of {path}, which isn't live")
        if path in removed:
            raise ValueError(f"two removes of {path}")
        named, vector = _vector(action["remove"]), _vector(live[path])
        if named != vector:
            raise ValueError(f"remove of {path} with the deletion vector {named}, but the live one is {vector}")
        removed.add(path)
    added: set[str] = set()
    for action in actions:
        if "add" not in action:
            continue
        path = decoded(action["add"]["path"])
        if path in live and path not in removed:
            raise ValueError(f"add of {path}, which is live, without its remove")
        if path in live and _vector(action["add"]) == _vector(live[path]):
            raise ValueError(f"add and remove of {path} with the same deletion vector {_vector(live[path])}")
        if path in added:
            raise ValueError(f"two adds of {path}")
        added.add(path)


def _vector(file: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """What tells a file's deletion vectors apart (PROTOCOL.md, "Deletion Vector Descriptor Schema", `uniqueId`)."""
    vector = file.get("deletionVector")
    return None if not vector else (vector["storageType"], vector["pathOrInlineDv"], vector.get("offset"))


def made_and_taken_back(commits: Iterable[Commit], operation: str) -> tuple[int | None, Commit | None]:
    """The version that an operation made, and the last RESTORE or CLONE that followed it. A RESTORE takes neither
    domains nor `txn` back, and a CLONE keeps the table's.

    :param commits: the oldest first.
    """
    made, restored = None, None
    for commit in commits:
        if commit.operation_id == operation:
            made, restored = commit.version, None
        elif commit.info.get("operation") in (RESTORE, CLONE):
            restored = commit
    return made, restored
