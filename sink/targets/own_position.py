"""Whether a table's position is still the one that a sink continues."""

import json
from collections.abc import Mapping

from sink.errors import AmendedError, FencedError, RolledBackError, TableError
from sink.targets.seam import Table, TableView
from sink.targets.values import StoredPosition


def own_position(
    table: Table, prefix: str, operation: str | None, *, newest_if_in_doubt: bool = False
) -> StoredPosition | None:
    """The table's position, after a check that `operation` stored it. None if there is none and `operation` is None.

    :param newest_if_in_doubt: see `TableView.position`.
    :raises RolledBackError: the table was taken back since, so it has an earlier operation's position.
    :raises AmendedError: rows were corrected since, and the position is the same.
    :raises FencedError: another operation has stored a position, so somebody else commits with this sink's id.
    :raises TableError: the position was removed, or it is unknown whether the table was taken back.
    """
    stored = table.position(prefix, newest_if_in_doubt=newest_if_in_doubt)
    known = json.loads(table.property(f"{prefix}.position") or "{}")
    newest: str | None = known.get("operation")
    if (stored.operation if stored else None) == operation:
        table.newest_seen[prefix] = newest  # taken back or not
        return stored
    if stored is None:
        raise TableError(f"{table.name}: the sink's position was removed while it ran. Start it again.")
    # if nobody has committed since, it was taken back, perhaps not for the first time
    if newest in (operation, table.newest_seen.get(prefix)):
        raise RolledBackError(
            f"{table.name} was rolled back to an earlier snapshot while the sink ran. What followed is read again from "
            "that snapshot's position."
        )
    if stored.operation == newest and operation in known.get("amends", ()):
        raise AmendedError(f"{table.name}: rows were corrected by rowdelta reconcile.")
    raise FencedError(
        f"{table.name}: another run with the same sink id ({prefix.removeprefix('rowdelta.')}) committed while this "
        "one was working. This one stops; nothing was applied twice. If both are meant to run, give one its own "
        "sink.id."
    )


def amended(table: TableView, prefix: str, operation: str) -> tuple[str, ...]:
    """What a correction amends: `operation`, the newest one (the table may have been taken back), and what this has
    amended itself. A run may have gone on from any.
    """
    known = json.loads(table.property(f"{prefix}.position") or "{}")
    return tuple(dict.fromkeys([*known.get("amends", ()), known.get("operation", operation), operation]))


def others_positions(table: TableView, prefix: str) -> dict[str, str]:
    """The positions of other sinks, by prefix, as the table stores them."""
    return {owner: text for owner, text in table.stored("position").items() if owner != prefix}


def check_idle(table: Table, prefix: str, state: Mapping[str, str]) -> None:
    """:raises TableError: the sink has committed since it had this state."""
    if table.own_state(prefix).get("position") != state.get("position"):
        sink = prefix.removeprefix("rowdelta.")
        raise TableError(f"{table.name}: sink {sink!r} runs, and has just committed. Nothing was reset. Stop it first.")
