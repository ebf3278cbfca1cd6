"""Parts of a Postgres table, as conditions of SQL: each row fulfils one of them.

Ranges of the leading column of the primary key are read by its index, and each is in the key's order. That is fast if
the rows lie in about this order on disk. If they don't (random UUIDs), each range would read pages from all over the
table: such tables, and those without a usable key, are parted by places (`ctid`), in which rows lie in no order. A row
that is updated may then leave a part before it is read, and enter another one; the log has its update. It lacks large
values that are as they were (TOAST), unless the table has REPLICA IDENTITY FULL: who has such values isn't parted so.
"""

import json
import math
from itertools import pairwise

from sink.databases.postgres_catalog import literal, own_rows_query, quoted
from sink.databases.postgres_connection import PostgresConnection
from sink.errors import ConfigError

_KEY_TYPES = frozenset(
    ["int2", "int4", "int8", "oid", "numeric", "uuid", "text", "varchar", "bpchar", "date", "timestamp", "timestamptz"]
)
"""Types whose values have a text that means them, whatever the session's settings are."""
_IN_ORDER = 0.8
"""Of `pg_stats.correlation`: from here on rows count as lying in the key's order."""
_SAMPLED_ROWS = 10_000
"""So many rows a range say where it ends."""
_PAGE = 8_192
_RANGES_SINCE = 140_000
"""Version of the server that reads a range of pages without reading the others."""

_TABLE = """
SELECT c.relkind, current_setting('server_version_num')::int8,
       (SELECT max(pg_relation_size(p.relid)) FROM (
            SELECT relid FROM pg_partition_tree(c.oid) WHERE isleaf UNION SELECT c.oid AS relid) p)::int8,
       EXISTS (SELECT FROM pg_class p WHERE p.relreplident <> 'f' AND pg_relation_size(p.reltoastrelid) > 0
               AND p.oid IN (SELECT relid FROM pg_partition_tree(c.oid) UNION SELECT c.oid))
FROM pg_class c WHERE c.oid = to_regclass({table})
"""
"""The size is that of the largest partition if there are several. At last, whether updates lack values."""
_KEY = """
SELECT a.attname, t.typname, (
    SELECT max(abs(s.correlation)) FROM pg_stats s JOIN pg_class c ON c.oid = i.indrelid
    WHERE s.schemaname = c.relnamespace::regnamespace::text AND s.tablename = c.relname AND s.attname = a.attname
      AND s.inherited = (c.relkind = 'p'))::float8
FROM pg_index i
JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
JOIN pg_type t ON t.oid = a.atttypid
WHERE i.indrelid = to_regclass({table}) AND i.indisprimary
"""


_NOT_LOGGED = """
SELECT oid::regclass::text, CASE relkind WHEN 'f' THEN 'a foreign table' WHEN 'r' THEN 'unlogged' ELSE 'a view' END
FROM pg_class WHERE oid IN ({parts}) AND relkind <> 'p' AND (relkind <> 'r' OR relpersistence <> 'p')
"""


def own_rows(connection: PostgresConnection, table: str) -> str:
    """What a query reads for the rows whose changes come under the table's name.

    :param table: in quotes.
    """
    ((only,),) = connection.rows(own_rows_query(table))
    return f"{only}{table}"


def estimated_rows(connection: PostgresConnection, table: str) -> int:
    """How many rows the planner expects.

    :param table: in quotes.
    """
    rows = own_rows(connection, table)
    ((plan,),) = connection.rows(f"EXPLAIN (FORMAT JSON) SELECT 1 FROM {rows}", is_copied=False)
    return int(json.loads(plan)[0]["Plan"]["Plan Rows"])


def ranges(connection: PostgresConnection, table: str, rows: int) -> list[str]:
    """Conditions for about `rows` rows each. The first has no lower bound, and the last no upper one.

    :param table: in quotes.
    """
    count = math.ceil(estimated_rows(connection, table) / rows)
    ((kind, version, size, lacks_values),) = connection.rows(_TABLE.format(table=literal(table)))
    if count <= 1:
        return ["true"]
    has_places = kind in ("r", "m", "p") and version >= _RANGES_SINCE and not lacks_values
    for name, type_name, correlation in connection.rows(_KEY.format(table=literal(table))):
        in_order = type_name != "uuid" if correlation is None else correlation >= _IN_ORDER
        if type_name in _KEY_TYPES and (in_order or not has_places):
            bounds = _bounds(connection, table, quoted(name), count, rows)
            # with few values, as a tenant's number in front of the key has, parts would be too large
            if 2 * len(bounds) >= count - 1 or not has_places:
                return _between(quoted(name), list(map(literal, bounds)))
    if not has_places:
        return ["true"]
    first_pages = dict.fromkeys(size // _PAGE * n // count for n in range(1, count))
    return _between("ctid", [f"'({page},0)'::tid" for page in first_pages if page])


def _bounds(connection: PostgresConnection, table: str, column: str, count: int, rows: int) -> list[str]:
    """Values of the column, in its order, that part a sample of the table into equal parts."""
    percent = min(100.0, 100.0 * _SAMPLED_ROWS / rows)
    fractions = ",".join(f"{n / count}" for n in range(1, count))
    ((found,),) = connection.rows(
        f"SELECT array_to_json((percentile_disc('{{{fractions}}}'::float8[]) WITHIN GROUP (ORDER BY {column}))::text[])"
        f"::text FROM {own_rows(connection, table)} TABLESAMPLE SYSTEM ({percent}) REPEATABLE (0)"
    )
    return list(dict.fromkeys(json.loads(found))) if found is not None else []


def _between(column: str, bounds: list[str]) -> list[str]:
    if not bounds:
        return ["true"]
    inner = [f"{column} >= {first} AND {column} < {end}" for first, end in pairwise(bounds)]
    return [f"{column} < {bounds[0]}", *inner, f"{column} >= {bounds[-1]}"]


def files(connection: PostgresConnection, table: str) -> str:
    """Names what changes when rows do of which the log says nothing: its timeline, since after a failover rows may be
    gone that were read; the files in which they have their places, which are others when all rows are written anew
    (VACUUM FULL, CLUSTER, TRUNCATE); the replica identity, which decides what an update lacks; columns that have got a
    default; the primary key; and all columns. A column that is new and has no default comes at the end.

    :param table: in quotes.
    :raises ConfigError: it, or a partition, isn't in the log.
    """
    whole = f"to_regclass({literal(table)})"
    parts = f"SELECT relid FROM pg_partition_tree({whole}) UNION SELECT {whole}"
    for name, kind in connection.rows(_NOT_LOGGED.format(parts=parts)):
        raise ConfigError(
            f"source.database: {name} is {kind}: the log has no changes of it, so it can't be loaded. Leave it out of "
            "the tables; or name a table in verify.table whose changes the topic has."
        )
    (found,) = connection.rows(
        "SELECT left(pg_walfile_name(pg_current_wal_lsn()), 8), "
        f"(SELECT string_agg(pg_relation_filenode(relid)::text, ',' ORDER BY relid) FROM ({parts}) p), "
        f"(SELECT string_agg(DISTINCT relreplident::text, ',') FROM pg_class WHERE oid IN ({parts})), "
        "(SELECT string_agg(attrelid || '.' || attnum, ',' ORDER BY attrelid, attnum) FROM pg_attribute WHERE "
        f"atthasmissing AND NOT attisdropped AND attrelid IN ({parts})), "
        f"(SELECT indkey::text FROM pg_index WHERE indisprimary AND indrelid = {whole}), "
        "(SELECT json_agg(ARRAY[attnum::text, attname] ORDER BY attnum)::text FROM pg_attribute WHERE attnum > 0 AND "
        f"NOT attisdropped AND attrelid = {whole})"
    )
    return ";".join(str(part) for part in found).removesuffix("]")
