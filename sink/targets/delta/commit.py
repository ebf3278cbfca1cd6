"""Commits to a Delta table: one version for each micro-batch, with the source position in the same actions.

Each commit declares the whole table read, and continues the version that the sink has seen. So Delta refuses it if
anybody changed data since, and if another run of the sink committed. A refusal changes nothing; then the sink looks.
"""

import json
import time
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from deltawriters.keyindex.versions import IndexLostError
from sink.errors import RowdeltaError
from sink.targets.delta.actions import Commit, Proposal, decoded
from sink.targets.delta.live_files import Add
from sink.targets.delta.log import CommitRefusedError
from sink.targets.delta.new_vectors import remove_of
from sink.targets.delta.state import DeltaState
from sink.targets.delta.tags import DELETED_AT, POSITION, SCHEMA, VECTOR, WRITER, schema_tag
from sink.targets.notes import MINOR, SINK_ID
from sink.targets.own_position import check_idle
from sink.targets.retries import Retries
from sink.targets.values import ChangeSet, CommitUnknownError, Done, Outcome, Refused, Rewrite, Unknown, refusal

_RETRIES, _SHORTEST, _LONGEST = 20, 0.05, 10.0
"""Delta has no settings for this. A commit takes a tenth of a second, so a writer each second is met now and then."""


class DeltaCommitter:
    """Commits changes and rewrites to one table."""

    def __init__(self, table: DeltaState) -> None:
        self._table = table

    def retries(self) -> Retries:
        return Retries(self._table.name, _RETRIES, _SHORTEST, _LONGEST)

    def commit(self, request: ChangeSet) -> Outcome:
        """See `Table.commit`."""
        base = request.base_snapshot
        if request.written_for is not None and request.written_for != self._table.layout:
            return Refused("the table was altered")
        assert base is not None
        stored: dict[str, Any] = {
            "position": request.position,
            "operation": request.operation,
            "after": base,
            "table": self._table.layout.table_id,
        }
        tags = self._tags(request.prefix, request.operation)
        actions = [_dated(tagged(json.loads(file), tags), base) for file in request.files]
        if request.truncates:
            actions += [remove_of(add) for add in self._table.live.values()]
        if request.amends:
            stored["amends"] = request.amends
        if request.index is not None:
            stored["index"] = request.index.stored
            actions += map(json.loads, request.index.removed)
            actions += request.index.replaced
            of_file = tags if request.index.replaced else {VECTOR: request.operation}
            actions += [_dated(tagged(json.loads(file), of_file), base) for file in request.index.files]
        prefix = request.prefix
        own = {name.removeprefix(f"{prefix}."): value for name, value in request.properties.items()}
        state = self._table.own_state(prefix) | own | {"position": json.dumps(stored)}
        actions.append(domain(prefix, state))
        return self._send(prefix, request.operation, base, actions, request.summary, request.metrics)

    def rewrite(self, request: Rewrite) -> Outcome:
        """See `Table.commit`."""
        if request.written_for != self._table.layout:
            return Refused("the table was altered")
        base = request.index.base
        assert base is not None
        operation = str(request.index.stored["version"])
        newer = {
            "operation": request.position_operation,
            "index": request.index.stored,
            "commit": operation,
            "after": base,
        }
        own = {name.removeprefix(f"{request.prefix}."): value for name, value in request.properties.items()}
        state = self._table.own_state(request.prefix) | own | {"index": json.dumps(newer)}
        files = [json.loads(file) for file in request.files]
        if MINOR in request.summary:  # the other rewrites' files are none that minor compactions take
            number = request.summary[MINOR]
            state["merges"] = number
            tags = self._tags(request.prefix, operation) | {MINOR: number}
            files = [tagged(file, tags) for file in files]
        files = [_dated(tagged(file, {POSITION: request.position_operation}), base) for file in files]
        actions = [*request.replaced, *files, domain(request.prefix, state)]
        return self._send(request.prefix, operation, base, actions, request.summary)

    def reset(self, prefix: str, state: Mapping[str, str], kept: Collection[str], *, empty: bool) -> Outcome:
        """See `Table.reset`."""
        check_idle(self._table, prefix, state)
        actions: list[Mapping[str, Any]] = [domain(prefix, {part: state[part] for part in kept if part in state})]
        if empty:
            actions += [remove_of(add) for add in self._table.live.values()]
        return self._send(prefix, f"reset-{time.time_ns():x}", self._table.snapshot_id(), actions, {})

    def store(self, prefix: str, key: str, value: str | None) -> None:
        """Change one entry of the sink's state, or (None) remove it, in a commit of its own.

        :raises TemporaryError: others committed meanwhile, again and again.
        """
        retries = self.retries()
        while True:
            operation = f"state-{time.time_ns():x}"
            state = {name: text for name, text in self._table.own_state(prefix).items() if name != key}
            state |= {} if value is None else {key: value}
            outcome = self._send(prefix, operation, self._table.snapshot_id(), [domain(prefix, state)], {})
            refused = refusal(outcome)
            if refused is None:
                return
            retries.wait(refused)
            self._table.refresh()

    def _tags(self, prefix: str, operation: str) -> dict[str, str]:
        """The tags of a commit's data files, by which minor compactions find them."""
        schema = schema_tag(self._table.layout.schema)
        return {SINK_ID: prefix.removeprefix("rowdelta."), WRITER: operation, SCHEMA: schema}

    def _send(
        self,
        prefix: str,
        operation: str,
        base: int,
        actions: Sequence[Mapping[str, Any]],
        notes: Mapping[str, str],
        measured: Mapping[str, int] = MappingProxyType({}),
    ) -> Outcome:
        """:raises IndexLostError: the actions are for files that aren't live. Nothing was committed.
        :raises TableError: Delta can't write to the table.
        """
        live: Mapping[str, Add] = (
            self._table.live if any("remove" in action or "add" in action for action in actions) else {}
        )
        number = self._table.next_txn(prefix)
        txn = {"appId": prefix, "version": number, "lastUpdated": int(time.time() * 1000)}
        proposal = Proposal(
            actions=[*actions, {"txn": txn}],
            base_version=base,
            live=live,
            app_id=prefix,
            operation=operation,
            epoch=number,
            metrics=dict(measured) | metrics(actions, live),
            notes=notes,
        )
        try:
            version = self._table.log.commit(proposal)
        except CommitRefusedError as error:
            return Refused(str(error), again="send")
        except CommitUnknownError as error:
            return Unknown(str(error))
        except ValueError as error:  # the index and the log differ in the files that are live
            raise IndexLostError(str(error)) from error
        try:
            self._table.took(Commit(version, proposal.actions, {"userMetadata": proposal.user_metadata}))
        except RowdeltaError as error:
            return Unknown(
                f"{self._table.name}: version {version} was committed, but the table could not be read after it "
                f"({error}). Run again: the table's position decides."
            )
        return Done()


def tagged(action: dict[str, Any], tags: Mapping[str, str]) -> dict[str, Any]:
    """An `add` with further tags, by which the sink knows its own files."""
    return {"add": {**action["add"], "tags": {**(action["add"].get("tags") or {}), **tags}}}


def _dated(action: dict[str, Any], base: int) -> dict[str, Any]:
    """An `add` with the version from which its deletion vector is, if it has one.

    :param base: the version before.
    """
    vector = action["add"].get("deletionVector")
    return action if vector is None else tagged(action, {DELETED_AT: f"{base + 1} {vector['pathOrInlineDv']}"})


def domain(name: str, state: Mapping[str, str]) -> dict[str, Any]:
    """The action that replaces a metadata domain."""
    return {"domainMetadata": {"domain": name, "configuration": json.dumps(state), "removed": False}}


def metrics(actions: Sequence[Mapping[str, Any]], live: Mapping[str, Add]) -> dict[str, int]:
    """What `DESCRIBE HISTORY` tells of a commit."""
    added = [action["add"] for action in actions if "add" in action]
    removed = {decoded(action["remove"]["path"]): action["remove"] for action in actions if "remove" in action}
    again = {decoded(add["path"]) for add in added} & removed.keys()
    return {
        "numFilesTotal": len(live),
        "numTouchedFiles": len(removed),
        "numRewrittenFiles": len(removed.keys() - again),
        "numRemovedBytes": sum(remove.get("size") or 0 for path, remove in removed.items() if path not in again),
        "numAddedFiles": len(added) - len(again),
        "numAddedBytes": sum(add["size"] for add in added if decoded(add["path"]) not in again),
        "numDeletionVectorsUpdated": len(again),
    }
