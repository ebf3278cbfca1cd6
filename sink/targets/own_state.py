"""The sink's own state in a table: the names of its properties, and what maintenance learns from them."""

import json
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from sink.errors import TableError

if TYPE_CHECKING:
    from sink.config import Config, TableSection
    from sink.config.maintenance import ExpireSection, MaintenanceSection
    from sink.sources.source import Position
    from sink.targets.seam import Table, TableView

CREATED_BY = "rowdelta.created-by"
"""Property of a table: the sink that created it. Then everything in its folder is the table's own."""

COUNTED = ("written", "rewritten")
"""Parts of a sink's state: bytes that micro-batches and rewrites have written."""

KEPT_BY_RESET = ("cleaned", *COUNTED)
"""Parts of a sink's state that say nothing of its source: what maintenance did."""

HEALING = "healing"
"""Part of a sink's state: somebody corrects rows (`sink.verify.healing`), and runs let him commit first."""

ORDER = "order"
"""Part of a sink's state: which fields of messages the table's columns hold that only hold order values."""

OF_ROWS = ("key", "accepted-keys", "source-tables", ORDER)
"""Parts that hold as long as the table has rows: by what they are told apart, of which table of the source they are,
and what they hold besides. A topic may begin with another one now."""

CLOCK_SECONDS = 86400
"""Clocks of two machines differ by less, unless one of them is wrong."""


def check_owner(config: "Config", section: "TableSection", table: "TableView") -> None:
    """:raises TableError: another sink created or writes the table, and the configuration doesn't say that it may."""
    creator = table.property(CREATED_BY)
    writers = {prefix.removeprefix("rowdelta.") for prefix in table.stored("position")}
    strangers = sorted((writers | ({creator} if creator else set())) - {config.sink.id, *section.shared_with})
    if not strangers:
        return
    one = strangers[0]
    topic = table.property(f"rowdelta.{one}.source")
    raise TableError(
        f"{section.target}: sink {one} {'writes' if one in writers else 'created'} this table"
        f"{f', from topic {topic}' if topic else ''}. Sink {config.sink.id} would write over its rows. Name another "
        f"target; or, if both are to write this table, or the sink's id was changed, write shared_with: [{one}] in the "
        "table's entry."
    )


def property_prefix(config: "Config") -> str:
    """Prefix of the properties that hold the sink's state."""
    return f"rowdelta.{config.sink.id}"


def cleaned_property(config: "Config") -> str:
    """Property with the time at which orphans were removed last, or the table was created (milliseconds since 1970)."""
    return f"{property_prefix(config)}.cleaned"


def is_cleaning_due(config: "Config", table: "TableView", every: timedelta) -> bool:
    """Whether orphans were removed so long ago, if ever. A time in the future is of a clock that was wrong."""
    since = time.time() - int(table.property(cleaned_property(config)) or 0) / 1000
    return since >= every.total_seconds() or since < -CLOCK_SECONDS


def start_position(table: "TableView", prefix: str) -> "Position | None":
    """The stored start position of a table without commits. None if no run has stored one."""
    text = table.property(f"{prefix}.start")
    start: Position | None = json.loads(text) if text else None
    return start


def orphans_reach(table: "TableView", stored_at: int) -> int:
    """The time from which the ages of orphans count, in milliseconds since 1970: now, or the newest commit if that is
    earlier, by the committer's clock and by the storage's. So files of a micro-batch that takes days stay, and a clock
    that is days ahead does no harm: not this one, and not the one of the machine that commits.

    :param stored_at: when the table's metadata was written last, by the storage's clock, in milliseconds since 1970.
    """
    last = table.last_commit()
    return 0 if last is None else min(int(time.time() * 1000), last.timestamp_ms, stored_at)


def note_cleaning(config: "Config", table: "Table") -> None:
    """Store that orphans were removed now."""
    table.refresh()
    table.set_property(cleaned_property(config), str(int(time.time() * 1000)))
    table.refresh()


def rewrite_credit(table: "TableView", prefix: str, budget: float) -> int:
    """How many bytes rewrites may write now. The table knows what micro-batches and rewrites have written, so jobs that
    end soon save up too.

    :param budget: bytes for each byte that micro-batches write.
    """
    written, rewritten = (int(table.property(f"{prefix}.{name}") or 0) for name in COUNTED)
    return int(budget * written) - rewritten


def expiring(table: "Table", expire: "ExpireSection") -> int:
    """How many snapshots are due to expire, as far as their times tell. 0 if the format looks after them by itself."""
    found = table.upkeep().facts()
    return 0 if found is None else expire.due(found.snapshots, datetime.now(UTC))


def creation_properties(config: "Config") -> dict[str, str]:
    """Properties of a table that the sink creates, by which it knows later what it may do for it."""
    return {CREATED_BY: config.sink.id, cleaned_property(config): str(int(time.time() * 1000))}


def maintenance_of(config: "Config", section: "TableSection | None", table: "TableView | None") -> "MaintenanceSection":
    """What is done for a table beside its micro-batches. A table that the sink has created looks after itself; others'
    snapshots and files stay unless the configuration says otherwise.

    :param section: None for the dead-letter table.
    :param table: None if the sink is to create it.
    """
    settings = config.maintenance if section is None else config.maintenance_of(section)
    is_own = table is None or table.property(CREATED_BY) == config.sink.id
    return settings.of_own_table() if is_own else settings
