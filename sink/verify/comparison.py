"""Compares two frames of canonical rows (`sink.verify.canonical`), wherever they come from.

First by counts and checksums of buckets: a key's bucket depends on a hash of it, which Spark computes for both sides.
So it doesn't matter in which order an engine sorts texts, or which of them it calls equal. Only what is in buckets that
differ is then compared key by key. There are more buckets for more rows, so that a difference concerns few of them.

The work is Spark's, in tasks that spill to disk. The driver gets the differences that are shown, and few keys or
numbers of buckets, to send them to all tasks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from changelog import shown_values
from sink.spark.versions import to_arrow
from sink.verify.canonical import key_hash, misfit, row_hash, shown, value

_BUCKET_ROWS, _FEWEST_BUCKETS, _MOST_BUCKETS = 256, 1 << 14, 1 << 20
"""About so many rows are in a bucket. Tasks hold sums of each bucket, and the more there are, the slower it is. So few
cost nothing.
"""
_FEW = 1 << 18
"""So many keys are sent to all tasks at most. For more of them all rows are shuffled."""
HASH = "row_hash"
_BUCKET = "bucket"
_SOURCE, _TABLE = "source", "table"


@dataclass(frozen=True)
class ComparedColumns:
    """What is compared.

    :param names: the compared columns, as the table calls them.
    :param types: their canonical types.
    :param key: numbers of the key's columns. Without a key it is all columns, and rows are counted.
    """

    names: Sequence[str]
    types: Sequence[T.DataType]
    key: Sequence[int]

    @property
    def key_columns(self) -> list[str]:
        """Names of the key's columns in a canonical frame."""
        return [value(number) for number in self.key]


class Kept:
    """Rows that Spark keeps, and their number. Joins send them to all tasks if they are few: nothing else that Spark
    knows of such rows tells it.
    """

    def __init__(self, frame: DataFrame) -> None:
        rows = frame.localCheckpoint(eager=False)  # the count computes them
        self.count = rows.count()
        self.rows = F.broadcast(rows) if self.count <= _FEW else rows


@dataclass(frozen=True)
class Checksums:
    """:param buckets: how many there are.
    :param differing: those whose rows differ.
    :param different: how many these are.
    """

    source_rows: int
    table_rows: int
    buckets: int
    differing: DataFrame
    different: int


@dataclass(frozen=True)
class ColumnDifference:
    """A column whose values differ, as text. None is NULL."""

    column: str
    source: str | None
    table: str | None


@dataclass(frozen=True)
class Difference:
    """A key whose rows differ.

    :param key: column -> value as text.
    :param source_rows: how many rows the source has of it. A table may have two rows of a key, too.
    :param columns: the columns that differ, if both have it.
    """

    key: dict[str, str | None]
    source_rows: int
    table_rows: int
    columns: Sequence[ColumnDifference]

    @property
    def kind(self) -> str:
        if not self.table_rows:
            return "missing in table"
        if not self.source_rows:
            return "missing in source"
        if self.source_rows != self.table_rows:
            return f"{self.source_rows:,} in source, {self.table_rows:,} in table"
        return "differs"

    def without_values(self) -> "Difference":
        """Lengths in place of the values' texts."""
        return replace(
            self,
            key={name: _length(text) for name, text in self.key.items()},
            columns=[ColumnDifference(c.column, _length(c.source), _length(c.table)) for c in self.columns],
        )


def _length(text: str | None) -> str | None:
    return text if text is None else shown_values.shown(text, visible=False)


def hashed(frame: DataFrame, layout: ComparedColumns, *, with_values: bool) -> DataFrame:
    """Each row's key and hash, and its values if they are to be shown."""
    if with_values:
        return frame.withColumn(HASH, row_hash(frame, len(layout.names)))
    return frame.select(*layout.key_columns, row_hash(frame, len(layout.names)).alias(HASH))


def checksums(source: DataFrame, table: DataFrame, layout: ComparedColumns, rows: int) -> Checksums:
    """Count and add up the hashes in each bucket, in one pass over both sides (`hashed`).

    :param rows: about how many each side has.
    """
    buckets = min(max(rows // _BUCKET_ROWS, _FEWEST_BUCKETS), _MOST_BUCKETS)
    both = _both(source, table, [_bucket(layout, buckets), HASH])
    sums = both.groupBy(_BUCKET).agg(*_sums()).localCheckpoint(eager=False)
    totals = sums.agg(F.sum("source_rows"), F.sum("table_rows"), F.count_if(_differs())).first()
    assert totals is not None
    of_source, of_table, different = (found or 0 for found in totals)
    return Checksums(of_source, of_table, buckets, F.broadcast(sums.where(_differs()).select(_BUCKET)), different)


def in_buckets(frame: DataFrame, sums: Checksums, layout: ComparedColumns) -> DataFrame:
    """The rows of the buckets that differ."""
    return frame.select("*", _bucket(layout, sums.buckets)).join(sums.differing, _BUCKET, "left_semi").drop(_BUCKET)


def joined(rows: DataFrame, keys: DataFrame, columns: Sequence[str], how: str) -> DataFrame:
    """Rows whose key is, or isn't, one of `keys`. NULL equals NULL. An inner join adds the keys' other columns.

    :param columns: the key's canonical columns.
    """
    others = keys.select(
        *(F.col(name).alias(f"key_{name}") for name in columns), *(name for name in keys.columns if name not in columns)
    )
    same = [F.col(name).eqNullSafe(F.col(f"key_{name}")) for name in columns]
    found = rows.join(others, reduce(lambda one, other: one & other, same), how)
    return found.drop(*(f"key_{name}" for name in columns))


def differing(source: DataFrame, table: DataFrame, layout: ComparedColumns) -> DataFrame:
    """The keys whose rows differ, with the number of rows on each side.

    If the sides have values, there are also `source` and `table`, structs with one canonical row of each side.
    """
    sides = []
    if all(value(number) in source.columns for number in range(len(layout.names))):
        sides = [
            F.first(F.when(F.col("side") == side, F.struct(*_row(layout))), ignorenulls=True).alias(side)
            for side in (_SOURCE, _TABLE)
        ]
    columns = [*_row(layout), HASH] if sides else [*layout.key_columns, HASH]
    both = _both(_completed(source, columns), _completed(table, columns), columns)
    groups = both.groupBy(*layout.key_columns).agg(*_sums(), *sides)
    return groups.where(_differs()).drop("low", "high")


def shown_differences(found: DataFrame, layout: ComparedColumns, limit: int) -> list[Difference]:
    """Some of the differences for people, in the key's order.

    :param found: the result of `differing`, with values.
    """
    numbers = range(len(layout.names))
    key = [shown(F.col(value(n)), layout.types[n]) for n in layout.key]

    def texts(side: str) -> Column:
        # what doesn't fit is shown as the source has it
        return F.array(
            *(
                F.coalesce(F.col(f"{side}.{misfit(n)}"), shown(F.col(f"{side}.{value(n)}"), layout.types[n]))
                for n in numbers
            )
        )

    equal = [
        F.col(f"{_SOURCE}.{value(n)}").eqNullSafe(F.col(f"{_TABLE}.{value(n)}"))
        & F.col(f"{_SOURCE}.{misfit(n)}").eqNullSafe(F.col(f"{_TABLE}.{misfit(n)}"))
        for n in numbers
    ]
    rows = found.orderBy(*layout.key_columns).limit(limit)
    read = rows.select(
        F.array(*key).alias("key"),
        "source_rows",
        "table_rows",
        F.array(*equal).alias("equal"),
        texts(_SOURCE).alias(_SOURCE),
        texts(_TABLE).alias(_TABLE),
    )
    return [_difference(row, layout) for row in to_arrow(read).to_pylist()]


def _difference(row: dict[str, Any], layout: ComparedColumns) -> Difference:
    counts = row["source_rows"], row["table_rows"]
    compared = zip(layout.names, row["equal"], row[_SOURCE], row[_TABLE], strict=True)
    columns = [
        ColumnDifference(name, source, table) for name, equal, source, table in compared if all(counts) and not equal
    ]
    key = dict(zip((layout.names[n] for n in layout.key), row["key"], strict=True))
    return Difference(key, *counts, columns)


def _sums() -> list[Column]:
    """How many rows there are on each side, and the difference of the sums of their hashes' halves. The sum of whole
    hashes could overflow, and Spark's ANSI mode ends the job then.
    """
    sign = F.when(F.col("side") == _SOURCE, F.lit(1).cast("bigint")).otherwise(F.lit(-1).cast("bigint"))
    low = F.col(HASH).bitwiseAND(F.lit(0xFFFFFFFF).cast("bigint"))
    return [
        F.sum(F.when(F.col("side") == _SOURCE, 1).otherwise(0)).alias("source_rows"),
        F.sum(F.when(F.col("side") == _TABLE, 1).otherwise(0)).alias("table_rows"),
        F.sum(sign * low).alias("low"),
        F.sum(sign * F.shiftrightunsigned(F.col(HASH), 32)).alias("high"),
    ]


def _differs() -> Column:
    """Whether `_sums` say that the sides differ."""
    return (F.col("source_rows") != F.col("table_rows")) | (F.col("low") != 0) | (F.col("high") != 0)


def _both(source: DataFrame, table: DataFrame, columns: Sequence[Column | str]) -> DataFrame:
    one, other = (
        frame.select(F.lit(side).alias("side"), *columns) for frame, side in ((source, _SOURCE), (table, _TABLE))
    )
    return one.unionAll(other)


def _bucket(layout: ComparedColumns, count: int) -> Column:
    return F.pmod(key_hash(layout.key), F.lit(count)).alias(_BUCKET)


def _row(layout: ComparedColumns) -> list[str]:
    return [name for number in range(len(layout.names)) for name in (value(number), misfit(number))]


def _completed(frame: DataFrame, columns: Sequence[str]) -> DataFrame:
    """Columns for what doesn't fit are null where there is nothing that could not fit."""
    for name in columns:
        if name not in frame.columns:
            frame = frame.withColumn(name, F.lit(None).cast("string"))
    return frame
