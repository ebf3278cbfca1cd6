"""A table of Postgres: an exported snapshot, its LSN, and how far Debezium's replication slot is."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce

from sink.databases.conversion import Kind, Selected
from sink.databases.database import INTEGER, Database
from sink.databases.postgres_catalog import (
    ASYNCHRONOUS_IS_WRITTEN,
    PostgresColumn,
    columns_query,
    literal,
    own_rows_query,
    published_query,
    quoted,
)
from sink.databases.reading import Delivered, Keys, Newest, SourceRows
from sink.errors import ConfigError
from sink.spark.jdbc import POSTGRES

_PAGES_A_TASK = 2_000
"""Of 8 KB. A smaller table is read by one task."""
_RANGES_SINCE = 140_000
"""Version of the server that reads a range of pages without reading the others."""
_REPEATABLE = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY"

_SLOTS = """
SELECT s.slot_name, s.active, s.confirmed_flush_lsn >= ?::pg_lsn, w.sent_lsn >= ?::pg_lsn,
       pg_size_pretty(greatest(0, pg_wal_lsn_diff(?::pg_lsn, coalesce(w.sent_lsn, s.confirmed_flush_lsn))))
FROM pg_replication_slots s LEFT JOIN pg_stat_get_wal_senders() w ON w.pid = s.active_pid
WHERE s.slot_type = 'logical' AND s.database = current_database() AND s.confirmed_flush_lsn IS NOT NULL
ORDER BY s.slot_name
"""
"""A slot without a place in the log waits for transactions to end. What is committed meanwhile isn't in it."""
_READER = """
SELECT s.plugin, a.query FROM pg_replication_slots s LEFT JOIN pg_stat_activity a ON a.pid = s.active_pid
WHERE s.slot_name = ?
"""
_IS_PARTED = "SELECT count(*) > 0 FROM pg_class WHERE oid = to_regclass(?) AND relkind = 'p'"
_ALTERED = """
SELECT bool_or(age(c.xmin) <= age(s.catalog_xmin)) FROM pg_class c, pg_replication_slots s
WHERE c.oid IN (SELECT relid FROM pg_partition_tree(to_regclass(?)) UNION SELECT to_regclass(?)) AND s.slot_name = ?
"""
"""TRUNCATE and ALTER TABLE write the table's row anew. What comes before `catalog_xmin` had ended before a place in the
log that the connector has confirmed: then so had all changes of the table before it."""
_PUBLICATIONS = re.compile(r"publication_names\W+'((?:[^']|'')+)'")
"""Fits the names in the command by which somebody reads a slot."""
_IDENTIFIER = re.compile(r'"((?:[^"]|"")+)"|([^\s,"]+)')
_AS_TEXT = {"text", "varchar", "name", "citext", "xml", "ltree", "tsvector", "tsquery", "macaddr", "macaddr8", "char"}
"""Types whose cast to text is what the server sends to a connector."""
_ANY_TEXT = r"[^\x00]*"
_BY_OUTPUT = frozenset(["bpchar", "inet", "cidr"])
"""Types whose cast to text is something else: it takes blanks away, or adds a mask."""


class Postgres(Database):
    driver, package = POSTGRES
    _lsn = "0/0"

    @contextmanager
    def reading(self, columns: Sequence[str], keys: Keys | None) -> Iterator[SourceRows]:
        connection = self._connection
        # the transaction is idle while tasks read
        connection.run("SET idle_in_transaction_session_timeout = 0")
        with connection.transaction(_REPEATABLE):
            # The snapshot is older than the LSN: all that it sees is before it, but for what was committed with
            # synchronous_commit = off and isn't written yet. The place where the server inserts has that too, but it
            # may be behind the header of a page that an idle slot never passes. A second round finds what is late.
            ((snapshot,),) = connection.rows("SELECT pg_export_snapshot()")
            ((lsn, version, pages),) = connection.rows(
                "SELECT CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END, "
                "current_setting('server_version_num'), "
                "coalesce((SELECT relpages FROM pg_class WHERE oid = to_regclass(?) AND relkind IN ('r', 'm')), 0)",
                self._quoted_table,
            )
            self._lsn = str(lsn)
            conditions = [self.with_keys(keys)]
            if not conditions[0] and int(str(version)) >= _RANGES_SINCE:
                conditions = _page_ranges(int(str(pages)), self._spark.sparkContext.defaultParallelism)
            first = f"{_REPEATABLE}; SET TRANSACTION SNAPSHOT '{snapshot}'"
            frames = [self._frame(self._query(columns, part), columns, first) for part in conditions]
            yield SourceRows(reduce(lambda one, other: one.unionAll(other), frames), f"LSN {lsn}")

    def check_server(self) -> None:
        self.note_log_position()

    def note_log_position(self) -> None:
        """:raises ConfigError: the server is a replica."""
        self._connection.rows(ASYNCHRONOUS_IS_WRITTEN)
        ((replica, lsn),) = self._connection.rows(
            "SELECT pg_is_in_recovery(), CASE WHEN NOT pg_is_in_recovery() THEN pg_current_wal_lsn() END"
        )
        if replica == "t":
            raise ConfigError(
                f"{self._path}.url: {self.name} is on a replica, which may lack what the topic has already. Name the "
                "primary."
            )
        self._lsn = str(lsn)

    def check_reader(self, *, is_named: bool) -> None:
        slots = [str(slot[0]) for slot in self._slots()]
        if not slots:
            raise ConfigError(
                f"nobody reads the log of {self.name}, so what changes during the load would be lost. Start the "
                f"connector first, with snapshot.mode: no_data, and name its slot in {self._path}.slot."
            )
        if self._section.slot is None:
            raise ConfigError(
                f"{self._path}.slot: a load of {self.name} needs the name of the connector's replication slot. Those "
                f"that are read now: {', '.join(slots)}. If another one's reader passed for the connector, changes "
                "would be lost."
            )
        if self._publishes(slots[0]) == "partitions" and not is_named:
            raise ConfigError(
                f"changes of {self.name} come under the names of its partitions, in topics of their own, so this topic "
                "would get none. Set publish.via.partition.root: true in the connector, with a publication that has "
                "publish_via_partition_root. If its transforms bring them here, say so with verify.table."
            )

    def is_altered(self) -> bool:
        return self._connection.rows(_ALTERED, *[self._quoted_table] * 2, str(self._section.slot)) != [("f",)]

    def _publishes(self, slot: str) -> str:
        """What the connector gets of the table: `itself`, or its `partitions`.

        :raises ConfigError: its publication doesn't have the table. If the user may not see which one it is, or nobody
            reads the slot: no publication has it.
        """
        ((plugin, command),) = self._connection.rows(_READER, slot)
        if plugin != "pgoutput":  # others have no publications
            ((is_parted,),) = self._connection.rows(_IS_PARTED, self._quoted_table)
            return "partitions" if is_parted == "t" else "itself"
        found = _PUBLICATIONS.search(command or "")
        identifiers = None if found is None else _IDENTIFIER.findall(found[1])
        names = identifiers and [exact.replace('""', '"') or name.lower() for exact, name in identifiers]
        ((published,),) = self._connection.rows(published_query(self._quoted_table, names))
        if published == "nothing":
            who = "no publication has" if names is None else f"the publication {', '.join(names)} does not have"
            raise ConfigError(
                f"{who} {self.name} with all its rows, columns and operations, so that changes would be lost. Add it "
                "(ALTER PUBLICATION … ADD TABLE), or let the connector do it, when it starts again: "
                "publication.autocreate.mode: filtered."
            )
        return str(published)

    def _slots(self) -> list[tuple[str | None, ...]]:
        """The replication slots of connectors: the configured one, or all from which somebody reads.

        :raises ConfigError: there is no such slot.
        """
        wanted = self._section.slot
        slots = [
            slot
            for slot in self._connection.rows(_SLOTS, self._lsn, self._lsn, self._lsn)
            if (slot[0] == wanted if wanted is not None else slot[1] == "t")
        ]
        if wanted is not None and not slots:
            raise ConfigError(
                f"{self._path}.slot: {self.name} has no logical replication slot {wanted!r}. Correct it, or leave it "
                "out."
            )
        return slots

    def delivered(self, newest: Newest) -> tuple[Delivered, str]:
        slots = self._slots()
        if not slots:
            return Delivered.UNKNOWN, "no connector reads from the database"
        if all(confirmed == "t" for _, _, confirmed, _, _ in slots):
            return Delivered.YES, ""
        behind = ", ".join(f"slot {name} is {size} behind" for name, _, _, sent, size in slots if sent != "t")
        if not behind:
            return Delivered.TO_CONNECTOR, "the connector has the changes"
        idle = [str(name) for name, active, *_ in slots if active != "t"]
        return Delivered.NOT_YET, behind + (f", and no connector reads slot {', '.join(idle)}" if idle else "")

    def _find_columns(self) -> tuple[dict[str, Selected], dict[str, str]]:
        known, unknown = {}, {}
        found = self._connection.rows(columns_query(self._quoted_table))
        ((only,),) = self._connection.rows(own_rows_query(self._quoted_table))
        self._rows = f"{only}{self._quoted_table}"
        if not found:
            raise ConfigError(f"{self._path}: there is no table {self.name}. Correct verify.table or {self._path}.url.")
        for column in map(PostgresColumn.of, found):
            selected = _selected_column(column)
            if selected is None:
                unknown[column.name] = column.type
            else:
                known[column.name] = selected
        return known, unknown

    def _quoted(self, name: str) -> str:
        return quoted(name)

    def _literal(self, text: str) -> str:
        return literal(text)


def _page_ranges(pages: int, most: int) -> list[str]:
    """Conditions for parts of a table. The last one has no end, since the table may have grown."""
    count = max(1, min(most, pages // _PAGES_A_TASK))
    bounds = [f"'({pages * n // count},0)'::tid" for n in range(count)]
    ends = [f" AND ctid < {bound}" for bound in bounds[1:]] + [""]
    return [f"ctid >= {bound}{end}" for bound, end in zip(bounds, ends, strict=True)] if count > 1 else [""]


def _selected_column(column: PostgresColumn) -> Selected | None:
    name = quoted(column.name)
    if column.element is None:
        return _selected(name, column.type, column.kind, column.modifier)
    return _array(name, _selected("x", column.element.type, column.element.kind, column.modifier))


def _selected(column: str, type_name: str, type_kind: str, modifier: int) -> Selected | None:
    """How a column is selected; None if its type is unknown.

    :param type_kind: `pg_type.typtype`.
    :param modifier: `pg_attribute.atttypmod`.
    """
    if type_kind in ("e", "r", "m") or type_name in _AS_TEXT:
        return Selected(f"{column}::text", Kind.TEXT, key_text=_ANY_TEXT if type_name in ("text", "varchar") else None)
    if type_name in _BY_OUTPUT:
        text = f"CASE WHEN {column} IS NOT NULL THEN format('%s', {column}) END"
        return Selected(text, Kind.TEXT, key_text=_ANY_TEXT if type_name == "bpchar" else None)
    micros = f"extract(microseconds FROM {column})::int8"
    epoch = f"extract(epoch FROM date_trunc('second', {column}))::int8 * 1000000 + {micros} % 1000000"
    digits = modifier if modifier >= 0 else 6
    of_day = "(extract(hour FROM {0})::int8 * 60 + extract(minute FROM {0})::int8) * 60000000 + " + (
        "extract(microseconds FROM {0})::int8"
    )
    found = {
        **dict.fromkeys(("int2", "int4", "int8", "oid"), Selected(f"{column}::int8", Kind.INTEGER, key_text=INTEGER)),
        "uuid": Selected(f"{column}::text", Kind.TEXT, key_text=r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"),
        "float4": Selected(column, Kind.FLOAT),
        "float8": Selected(column, Kind.DOUBLE),
        "numeric": Selected(f"{column}::text", Kind.DECIMAL, (modifier - 4) & 0x7FF if modifier >= 4 else None),
        "money": Selected(f"{column}::numeric::text", Kind.DECIMAL, 2),
        "bool": Selected(column, Kind.BOOLEAN),
        "bytea": Selected(column, Kind.BYTES),
        "json": Selected(f"{column}::text", Kind.JSON),
        "jsonb": Selected(f"{column}::text", Kind.JSON),
        "hstore": Selected(f"hstore_to_json({column})::text", Kind.PAIRS),
        # an infinite date or time fits into no column, so the row is a dead letter
        "date": Selected(f"CASE WHEN isfinite({column}) THEN ({column} - DATE '1970-01-01')::int8 END", Kind.DATE),
        "timestamp": Selected(f"CASE WHEN isfinite({column}) THEN {epoch} END", Kind.TIMESTAMP, digits),
        "timestamptz": Selected(f"CASE WHEN isfinite({column}) THEN {epoch} END", Kind.INSTANT, digits),
        "time": Selected(of_day.format(column), Kind.TIME, digits),
        "timetz": Selected(of_day.format(f"({column} AT TIME ZONE 'UTC')"), Kind.TIME, digits),
        "interval": Selected(_interval(column), Kind.INTERVAL),
        "bit": Selected(f"{column}::text", Kind.SHORT_BITS),
        "varbit": Selected(f"{column}::text", Kind.SHORT_BITS),
    }.get(type_name)
    if type_name == "bit" and modifier == 1:
        return Selected(f"({column}::text = '1')", Kind.BOOLEAN)
    return found


def _interval(column: str) -> str:
    parts = ", ".join(f"extract({part} FROM {column})::int8" for part in ("year", "month", "day", "hour", "minute"))
    seconds = f"(extract(microseconds FROM {column})::int8 / 1000000.0)::numeric(18,6)"
    return f"CASE WHEN {column} IS NOT NULL THEN format('P%sY%sM%sDT%sH%sM%sS', {parts}, {seconds}) END"


def _array(column: str, element: Selected | None) -> Selected | None:
    if element is None:
        return None
    text = f"encode({element.sql}, 'hex')" if element.kind is Kind.BYTES else f"({element.sql})::text"
    elements = f"ARRAY(SELECT {text} FROM unnest({column}) WITH ORDINALITY AS each(x, n) ORDER BY n)"
    return Selected(
        f"CASE WHEN {column} IS NOT NULL THEN array_to_json({elements})::text END", Kind.ARRAY, element=element
    )
