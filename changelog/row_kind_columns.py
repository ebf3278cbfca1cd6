"""What all wire formats share: raw records in, changelog rows out, and nothing lost on the way.

A *raw record* has the columns of `RAW_COLUMNS`. A format module turns it into an *image* for each change: the kind, the
row's fields as text or as typed columns, and an error if it can't. `finish` here checks keys and required columns, computes the order
columns, and packs whatever can't be applied into `_rowdelta_bad`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from changelog.rows import BAD, BAD_FIELDS, KIND, PREFIX, SNAPSHOT, TIE, BadRecord, RowKind, order_column
from changelog.spec import ChangelogSpec

RAW_COLUMNS = {"source": "string", "partition": "int", "offset": "bigint", "key": "binary", "value": "string"}
"""A record as its source gave it. For files `source` is the file's path, `partition` and `key` are null."""

ERROR = f"{PREFIX}error"
_ORDER_VALUE = f"{PREFIX}order_value_"


def order_value(index: int) -> str:
    """Name under which a format hands `finish` the value of the index-th `order_by` entry."""
    return f"{_ORDER_VALUE}{index}"


def error(error_class: str, *reason: Column | str) -> Column:
    """An error value: its class and a sentence made of `reason`'s parts."""
    parts = [F.lit(part) if isinstance(part, str) else part for part in reason]
    return F.struct(F.concat(*parts).alias("reason"), F.lit(error_class).alias("error_class"))


def first_error(errors: list[Column]) -> Column:
    """The first error that is not null."""
    return F.coalesce(*errors, F.lit(None).cast("struct<reason:string,error_class:string>"))


def sets_row(kind: Column) -> Column:
    """Whether a kind sets the row: +I or +U."""
    return kind.isin(int(RowKind.INSERT), int(RowKind.UPDATE_AFTER))


@dataclass(frozen=True)
class Select:
    """A projection: a step of a decoder."""

    columns: Sequence[Column]

    def __call__(self, frame: DataFrame) -> DataFrame:
        return frame.select(*self.columns)


@dataclass(frozen=True)
class Where:
    """A filter: a step of a decoder."""

    condition: Column

    def __call__(self, frame: DataFrame) -> DataFrame:
        return frame.where(self.condition)


@dataclass(frozen=True)
class Decoder:
    """Raw records to changelog rows, as projections and filters whose expressions were built once.

    Building them costs hundreds of calls to the JVM, which every micro-batch would pay again.
    """

    steps: tuple[Select | Where, ...]

    def __call__(self, records: DataFrame) -> DataFrame:
        return reduce(lambda frame, step: step(frame), self.steps, records)


def extend(*columns: Column) -> Select:
    """Keep all columns and add some."""
    return Select([F.col("*"), *columns])


def finish(
    spec: ChangelogSpec, errors: list[Column], has_snapshot: bool = False, record: dict[str, Column] | None = None
) -> list[Select | Where]:
    """The last steps of every format: check keys, order and required columns, and shape the changelog row.

    They expect `_rowdelta_raw` (`RAW_COLUMNS` as a struct), `_rowdelta_kind` (null if unknown), the order values, the table's columns typed,
    and `_rowdelta_snapshot` if the format has it.

    :param errors: what the format itself found wrong; comes before the common checks.
    :param record: the record's parts by name, for a format without `_rowdelta_raw`; parts not named are null.
    """
    kind = F.col(KIND)
    checks = list(errors)
    checks += [
        F.when(F.col(quoted(name)).isNull(), error(BadRecord.NULL_KEY, f"key column {name} is null"))
        for name in spec.key
    ]
    checks += [
        F.when(
            F.col(order_value(i)).isNull(), error(BadRecord.MISSING_ORDER, f"order column {name} is null or missing")
        )
        for i, (name, _) in enumerate(spec.order_by)
    ]
    checks += [
        F.when(
            sets_row(kind) & F.col(quoted(column.name)).isNull(),
            error(BadRecord.TYPE_MISMATCH, f"column {column.name} is null, and the table requires a value"),
        )
        for column in spec.columns
        if column.required and column.name not in spec.key
    ]
    if record is None:
        record = {name: F.col(f"{PREFIX}raw.{name}") for name in RAW_COLUMNS}
    record |= {name: F.col(f"{ERROR}.{name}") for name in ("reason", "error_class")}
    fields = [record.get(name, F.lit(None)).cast(dtype).alias(name) for name, dtype in BAD_FIELDS.items()]
    bad = F.when(F.col(ERROR).isNotNull(), F.struct(*fields))
    rows = [
        F.col(quoted(column.name))
        if column.name in spec.kept_by_removals
        else F.when(sets_row(kind), F.col(quoted(column.name))).alias(column.name)
        for column in spec.columns
    ]
    result = [
        F.coalesce(kind, F.lit(int(RowKind.DELETE))).cast("tinyint").alias(KIND),
        *_order_columns(spec, kind),
        *([F.col(SNAPSHOT)] if has_snapshot else []),
        bad.alias(BAD),
        *rows,
    ]
    return [extend(first_error(checks).alias(ERROR)), Select(result)]


def _order_columns(spec: ChangelogSpec, kind: Column) -> list[Column]:
    columns = [F.col(order_value(i)) for i in range(len(spec.order_by))]
    if spec.source_order:
        # one message may give -U and +U: two places for each offset make the order total
        columns.append(F.col(f"{PREFIX}raw.partition"))
        columns.append(F.col(f"{PREFIX}raw.offset") * 2 + sets_row(kind).cast("int"))
        return [column.alias(order_column(i)) for i, column in enumerate(columns)]
    named = [column.alias(order_column(i)) for i, column in enumerate(columns)]
    return [*named, tie(spec).alias(TIE)]


def tie(spec: ChangelogSpec) -> Column:
    """Hash of a row's content: what decides between changes whose order is the same."""
    # of removals only the columns that they keep: the rest is null by then, and hashing it costs as much as writing it
    whole, kept = (
        F.xxhash64(*(F.to_json(F.col(quoted(c.name))) if _has_map(c.type) else F.col(quoted(c.name)) for c in some))
        for some in (spec.columns, [c for c in spec.columns if c.name in spec.kept_by_removals])
    )
    return F.when(sets_row(F.col(KIND)), whole).otherwise(kept)


def _has_map(dtype: T.DataType) -> bool:
    """Spark refuses to hash maps, since equal maps may differ in the order of their entries."""
    return "map<" in dtype.simpleString()


def quoted(name: str) -> str:
    """`name` as an identifier, whatever characters it has."""
    return "`" + name.replace("`", "``") + "`"


def any_of(conditions: list[Column]) -> Column:
    """Disjunction; false for none."""
    return reduce(lambda a, b: a | b, conditions, F.lit(False))


def binary_uuid(name: str) -> Column:
    """The 16 bytes of the UUID in the text column `name`; null if it is none."""
    return F.expr(f"try_to_binary(replace({quoted(name)}, '-', ''), 'hex')").alias(name)
