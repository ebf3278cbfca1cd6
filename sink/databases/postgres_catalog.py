"""What Postgres' catalog says of a table, and how names and values are written in its SQL."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

ASYNCHRONOUS_IS_WRITTEN = (
    "SELECT pg_sleep(3 * setting::float8 / 1000)::text FROM pg_settings WHERE name = 'wal_writer_delay'"
)
"""A query that waits until the log has all that others see when it begins: this is how long the server may take."""


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def quoted_table(name: str) -> str:
    """:param name: `schema.table`."""
    return ".".join(map(quoted, name.split(".")))


def literal(text: str) -> str:
    """A literal of no type, so that it is read as the column's that it is compared with."""
    escaped = text.replace("'", "''")
    return "E'" + escaped.replace("\\", "\\\\") + "'" if "\\" in text else f"'{escaped}'"


def columns_query(table: str) -> str:
    """A query for `PostgresColumn.of`, in the table's order.

    :param table: in quotes (`quoted_table`).
    """
    return f"""
        SELECT a.attname, t.typname, t.typtype, CASE c.typtype WHEN 'd' THEN c.typtypmod ELSE a.atttypmod END,
               e.typname, e.typtype, a.attgenerated <> '', a.attnotnull
        FROM pg_attribute a
        JOIN pg_type c ON c.oid = a.atttypid
        JOIN pg_type t ON t.oid = CASE c.typtype WHEN 'd' THEN c.typbasetype ELSE c.oid END
        LEFT JOIN pg_type e ON e.oid = t.typelem AND t.typcategory = 'A'
        WHERE a.attrelid = to_regclass({literal(table)}) AND a.attnum > 0 AND NOT a.attisdropped
        ORDER BY a.attnum
    """


def key_query(table: str) -> str:
    """A query for the names of the primary key's columns, in its order.

    :param table: in quotes (`quoted_table`).
    """
    return f"""
        SELECT a.attname
        FROM pg_index i
        CROSS JOIN LATERAL unnest(i.indkey) WITH ORDINALITY AS k(attnum, place)
        JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
        WHERE i.indrelid = to_regclass({literal(table)}) AND i.indisprimary
        ORDER BY k.place
    """


def own_rows_query(table: str) -> str:
    """A query for what stands before the table's name if its own rows are wanted. Of tables that inherit from it
    Debezium sends the changes under their own names, those of partitions aren't told apart.

    :param table: in quotes (`quoted_table`).
    """
    kind = f"SELECT relkind FROM pg_class WHERE oid = to_regclass({literal(table)})"
    return f"SELECT CASE ({kind}) WHEN 'p' THEN '' ELSE 'ONLY ' END"


def published_query(table: str, publications: Sequence[str] | None) -> str:
    """A query for what publications have of a table: `itself`, all of its `partitions`, or nothing. One that leaves out
    rows, columns or operations has nothing: a part of the changes is none.

    :param table: in quotes (`quoted_table`).
    :param publications: their names. None means any.
    """
    whole = f"to_regclass({literal(table)})"
    named = "" if publications is None else f"AND p.pubname IN ({', '.join(map(literal, publications))})"
    return f"""
        SELECT CASE WHEN bool_or(c.oid = {whole} AND p.pubname IS NOT NULL) THEN 'itself'
                    WHEN bool_and(p.pubname IS NOT NULL) FILTER (WHERE c.oid <> {whole}) THEN 'partitions'
                    ELSE 'nothing' END
        FROM pg_class c
        JOIN pg_namespace n ON n.oid = c.relnamespace
        LEFT JOIN (
            SELECT p.* FROM pg_publication_tables p JOIN pg_publication b ON b.pubname = p.pubname
            WHERE b.pubinsert AND b.pubupdate AND b.pubdelete
        ) p ON p.schemaname = n.nspname AND p.tablename = c.relname {named}
            AND to_jsonb(p)->>'rowfilter' IS NULL  -- Postgres 14 has no such columns
            AND coalesce(jsonb_array_length(to_jsonb(p)->'attnames') >= (
                SELECT count(*) FROM pg_attribute a
                WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = ''), true)
        WHERE c.oid = {whole} OR c.oid IN (SELECT relid FROM pg_partition_tree({whole}) WHERE isleaf)
    """


@dataclass(frozen=True)
class ElementType:
    """The type of an array's elements: its name, and `pg_type.typtype`."""

    type: str
    kind: str


@dataclass(frozen=True)
class PostgresColumn:
    """A column, with the type on which its domain stands.

    :param type: the type's name.
    :param kind: `pg_type.typtype`.
    :param modifier: `pg_attribute.atttypmod`; of an array, that of its elements.
    :param element: None if it is no array.
    :param is_generated: its values are computed from other columns.
    :param is_required: it is NOT NULL.
    """

    name: str
    type: str
    kind: str
    modifier: int
    element: ElementType | None = None
    is_generated: bool = False
    is_required: bool = False

    @classmethod
    def of(cls, row: Sequence[object]) -> Self:
        """:param row: of `columns_query`."""
        name, type_name, kind, modifier, element, element_kind, generated, required = row
        inner = None if element is None else ElementType(str(element), _letter(element_kind))
        flags = [flag in (True, "t") for flag in (generated, required)]
        return cls(str(name), str(type_name), _letter(kind), int(str(modifier)), inner, *flags)


def _letter(value: object) -> str:
    """A value of the type "char", which one driver has as text, and another as a number."""
    return chr(value) if isinstance(value, int) else str(value)
