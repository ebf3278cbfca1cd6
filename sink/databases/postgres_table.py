"""A table of Postgres, as a load reads it: by binary COPY, from connections that Spark's tasks open."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from sink.config import DatabaseSection
from sink.databases import postgres_ranges
from sink.databases.catalog_table import Batches, CatalogColumn, CatalogTable
from sink.databases.postgres_catalog import (
    ASYNCHRONOUS_IS_WRITTEN,
    PostgresColumn,
    columns_query,
    key_query,
    literal,
    quoted_table,
)
from sink.databases.postgres_connection import PostgresConnection
from sink.databases.postgres_values import read_column
from sink.errors import ConfigError, TemporaryError
from sink.table.load_state import times_before

REPLICA = "load.replica"
"""The entry's place in the configuration, for messages."""
_RESTART = """
SELECT (restart_lsn - '0/0'::pg_lsn)::int8 FROM pg_replication_slots
WHERE slot_type = 'logical' AND database = current_database() AND restart_lsn IS NOT NULL
ORDER BY restart_lsn LIMIT 1
"""
_WRITERS = """
SELECT l.virtualtransaction, CASE
    WHEN l.pid IS NULL THEN format('the prepared transaction %s since %s', quote_literal(p.gid),
        date_trunc('second', p.prepared))
    ELSE concat_ws(', ', 'pid ' || l.pid, a.usename, nullif(a.application_name, ''), a.state,
        'since ' || date_trunc('second', a.xact_start)) END
FROM pg_locks l
LEFT JOIN pg_stat_activity a ON a.pid = l.pid
LEFT JOIN pg_locks x ON l.pid IS NULL AND x.locktype = 'transactionid' AND x.virtualtransaction = l.virtualtransaction
LEFT JOIN pg_prepared_xacts p ON p.transaction = x.transactionid
WHERE l.granted AND l.locktype = 'relation' AND l.relation IN (
    SELECT relid FROM pg_partition_tree(to_regclass({table})) UNION SELECT to_regclass({table}))
AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
AND l.mode IN ('RowExclusiveLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
"""
"""Locks are released after others see the transaction's changes."""


_STANDBY = """
SELECT pg_is_in_recovery(), pg_last_wal_replay_lsn() >= '{lsn}'::pg_lsn,
       (SELECT system_identifier FROM pg_control_system())::text = '{system}'
"""
_LOOK_SECONDS = 0.5
_PATIENCE = 600.0
"""Seconds that a replica has to catch up."""


class PostgresTable(CatalogTable):
    """:param name: as `schema.table`.
    :param replica: the replica from which rows are read. All else is asked of the primary.
    """

    order_names = "source.lsn, source.ts_ms or ts_ms"

    def __init__(
        self,
        spark: SparkSession,
        section: DatabaseSection,
        name: str,
        path: str,
        replica: DatabaseSection | None = None,
    ) -> None:
        self._spark, self._section, self._path, self._replica = spark, section, path, replica
        self._table = quoted_table(name)
        self._begun: Begun | None = None
        self._connection = PostgresConnection(section, path)

    def columns(self) -> list[CatalogColumn]:
        found = [PostgresColumn.of(row) for row in self._connection.rows(columns_query(self._table))]
        # the log has no generated columns
        return [
            CatalogColumn(c.name, c.type, not c.is_generated, c.is_required, partial(read_column, c)) for c in found
        ]

    def key(self) -> tuple[str, ...]:
        return tuple(str(name) for (name,) in self._connection.rows(key_query(self._table)))

    def estimated_rows(self) -> int:
        return postgres_ranges.estimated_rows(self._connection, self._table)

    def ranges(self, rows: int) -> list[str]:
        return postgres_ranges.ranges(self._connection, self._table, rows)

    def files(self) -> str:
        return postgres_ranges.files(self._connection, self._table)

    def writers(self) -> Mapping[str, str]:
        found = self._connection.rows(_WRITERS.format(table=literal(self._table)))
        return {str(transaction): str(who) for transaction, who in found}

    def order(self) -> Mapping[str, Any]:
        # a transaction that has begun long ago has its changes far before the log's end
        found = self._connection.rows(_RESTART)
        return times_before() | {"source.lsn": found[0][0] if found else 0}

    def read(self, columns: Sequence[str], conditions: Sequence[str], tasks: int) -> tuple[DataFrame, Batches]:
        selected = ", ".join(f"{sql} AS c{n}" for n, sql in enumerate(columns))
        rows = postgres_ranges.own_rows(self._connection, self._table)
        queries = tuple(f"SELECT {selected} FROM {rows} WHERE {condition}" for condition in conditions)
        # a frame of conditions would show values of keys in Spark's plans
        numbers = self._spark.range(0, len(queries), 1, tasks)
        if self._replica is None:
            return numbers, Queries(self._section, self._path, queries)
        if self._begun is None:
            self._begun = begun_now(self._connection)
        return numbers, Queries(self._replica, REPLICA, queries, self._begun)

    def close(self) -> None:
        self._connection.close()


@dataclass(frozen=True)
class Begun:
    """What a replica must have before rows are read from it.

    :param lsn: the primary had written its log up to there.
    :param system: the primary's `system_identifier`.
    """

    lsn: str
    system: str

    def wait(self, connection: PostgresConnection) -> None:
        """:raises ConfigError: the server is no replica of the primary.
        :raises TemporaryError: it doesn't catch up.
        """
        until = time.monotonic() + _PATIENCE
        while True:
            ((is_replica, is_there, is_same),) = connection.rows(_STANDBY.format(**vars(self)))
            if not (is_replica and is_same):
                raise ConfigError(
                    f"{REPLICA}: the server is no replica of that of source.database. Name one, or leave it out."
                )
            if is_there:
                return
            if time.monotonic() > until:
                raise TemporaryError(f"{REPLICA}: the replica hasn't got on to {self.lsn}. Run again when it has.")
            time.sleep(_LOOK_SECONDS)


def begun_now(primary: PostgresConnection) -> Begun:
    """What others see on the primary by now. What was committed with synchronous_commit = off is written after that."""
    primary.rows(ASYNCHRONOUS_IS_WRITTEN)
    ((lsn, system),) = primary.rows(
        "SELECT pg_current_wal_lsn()::text, system_identifier::text FROM pg_control_system()"
    )
    return Begun(lsn, system)


@dataclass(frozen=True)
class Queries:
    """What a task runs. Spark shows nothing of it, so the password is in no plan and in no log."""

    section: DatabaseSection
    path: str
    queries: Sequence[str]
    begun: Begun | None = None

    def __call__(self, numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """:param numbers: of the queries."""
        for number in (number for batch in numbers for number in batch.column(0).to_pylist()):
            connection = PostgresConnection(self.section, self.path)
            try:
                if self.begun is not None:  # each connection may lead to another replica
                    self.begun.wait(connection)
                yield from connection.batches(self.queries[number])
            finally:
                connection.close()
