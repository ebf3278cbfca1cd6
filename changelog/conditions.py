"""Conditions on rows, evaluated on Arrow arrays as Spark SQL means them: true, false or NULL for each row."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

Operator = Literal[
    "and",
    "or",
    "not",
    "=",
    "<=>",
    "<",
    "<=",
    ">",
    ">=",
    "is null",
    "coalesce",
    "in",
    "starts with",
    "ends with",
    "contains",
]
Values: TypeAlias = "pa.Array | pa.Scalar"

COMPARISONS: Mapping[str, Callable[[Values, Values], pa.Array]] = {
    "=": pc.equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
SEARCHES: Mapping[str, Callable[..., pa.Array]] = {
    "starts with": pc.starts_with,
    "ends with": pc.ends_with,
    "contains": pc.match_substring,
}

CONSTANTS_FOLLOW = {"in", *SEARCHES}
"""The operators whose operands are constants, except for the first."""


@dataclass(frozen=True)
class Field:
    """A column's value."""

    name: str


@dataclass(frozen=True)
class Constant:
    """:param value: of a type of which Arrow and Spark compare all values alike; not null."""

    value: pa.Scalar


@dataclass(frozen=True)
class Condition:
    """:param operands: one, two, or (of `in`) more. See `CONSTANTS_FOLLOW`."""

    operator: Operator
    operands: tuple["Condition | Field | Constant", ...]


def evaluated(term: Condition | Field | Constant, rows: pa.RecordBatch) -> Values:
    """The values of a term for n rows: n values, or one for all. Those of a condition are bool."""
    if isinstance(term, Field):
        return rows.column(term.name)
    if isinstance(term, Constant):
        return term.value
    first, *others = term.operands
    found = evaluated(first, rows)
    if term.operator in SEARCHES:
        return SEARCHES[term.operator](found, _python(others[0]))
    if term.operator == "in":
        among = pc.is_in(found, pa.array(list(map(_python, others)), found.type))
        return pc.if_else(found.is_valid(), among, pa.scalar(None, pa.bool_()))
    if term.operator == "is null":
        return pc.is_null(found)
    if term.operator == "not":
        return pc.invert(found)
    rest = [evaluated(other, rows) for other in others]
    if term.operator in ("and", "or"):
        return reduce(pc.and_kleene if term.operator == "and" else pc.or_kleene, rest, found)
    if term.operator == "coalesce":
        return pc.coalesce(found, *rest)
    if term.operator == "<=>":
        same = pc.fill_null(pc.equal(found, rest[0]), False)
        return pc.or_(same, pc.and_(pc.is_null(found), pc.is_null(rest[0])))
    return COMPARISONS[term.operator](found, rest[0])


def _python(term: Condition | Field | Constant) -> Any:
    assert isinstance(term, Constant)
    return term.value.as_py()
