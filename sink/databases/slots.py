"""The replication slots of a source's Postgres: how much of its log the database keeps for them. Replicas' slots are
among them if nobody reads them.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing

from changelog.amounts import sized
from sink.config import Config
from sink.databases.postgres_connection import PostgresConnection
from sink.sources.source import Slot
from sink.spark.jdbc import POSTGRES, driver_of

_SLOTS = """
SELECT s.slot_name, s.active, pg_wal_lsn_diff(w.now, s.restart_lsn)::int8,
       pg_wal_lsn_diff(w.now, s.confirmed_flush_lsn)::int8, to_jsonb(s) ->> 'wal_status',
       left(to_jsonb(s) ->> 'inactive_since', 19)
FROM pg_replication_slots s,
     (SELECT CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END AS now) w
WHERE s.slot_type = 'logical' AND s.database = current_database()
   OR s.slot_type = 'physical' AND NOT s.active AND s.restart_lsn IS NOT NULL
ORDER BY s.slot_name
"""
"""Older servers lack the columns that are asked for by their names as text."""


def has_slots(config: Config) -> bool:
    """Whether the source's database is known, and has replication slots."""
    database = config.source.database
    return database is not None and driver_of(database.url) is POSTGRES


def slots_of(config: Config) -> list[Slot]:
    """The connector's slot, unless the configuration doesn't name one, and those that nobody reads.

    :raises ConfigError: there is no driver, or the database refuses the user.
    :raises TemporaryError: it doesn't answer.
    """
    database = config.source.database
    assert database is not None
    with closing(PostgresConnection(database, patience=3)) as connection:
        found = [Slot(*row) for row in connection.rows(_SLOTS)]
    return [slot for slot in found if database.slot in (None, slot.name) or not slot.is_active]


def shown_slots(config: Config, slots: Sequence[Slot]) -> Iterator[str]:
    """Lines for people."""
    for slot in slots:
        kept = "nothing" if slot.retained is None else sized(slot.retained)
        if slot.state == "lost":
            text = f"the database has removed the log that it needs. Drop it ({_drop(slot)}), and take a new snapshot"
        elif slot.is_active:
            text = f"is read; {sized(slot.unread or 0)} to read, the database keeps {kept} of its log for it"
        else:
            since = "" if slot.idle_since is None else f" since {slot.idle_since.replace('T', ' ')} UTC"
            text = f"nobody reads it{since}, and the database keeps {kept} of its log for it. "
            text += f"If it is no longer used, drop it: {_drop(slot)}"
        if slot.state == "unreserved":
            text += ". The database is about to remove this log (max_slot_wal_keep_size)"
        yield f"slot {slot.name}: {text}"
    database = config.source.database
    wanted = None if database is None else database.slot
    if wanted is not None and wanted not in {slot.name for slot in slots}:
        yield f"slot {wanted}: there is none; the connector makes it when it starts"


def _drop(slot: Slot) -> str:
    return f"SELECT pg_drop_replication_slot('{slot.name}')"
