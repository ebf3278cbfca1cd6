"""What Postgres' catalog says of a table, and how names and values are written in its SQL."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self


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
