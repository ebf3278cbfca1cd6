"""Decodes rows that carry their kind from typed columns of Parquet files. `changelog.row_kind` does the same for JSON.

This module handles the files that `changelog.row_kind_parquet` can't decode: Spark reads them, and Spark's expressions
decode and check them. The checks and results are the same as in `changelog.decoding`, but that -U and -D have all their
columns: `changelog.moves.marked` looks at them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from changelog.row_kind import Kinds
from changelog.rows import (
    BAD,
    BAD_FIELDS,
    EMPTY_PARTITION,
    FILE,
    KIND,
    MOVED,
    PREFIX,
    ROW,
    BadRecord,
    RowKind,
    order_column,
)
from changelog.spec import ChangelogSpec, ColumnSpec

SOURCE = f"{PREFIX}source"
"""An additional column with the file's path."""

_ERROR = f"{PREFIX}error"
_OP = f"{PREFIX}op"
_UUID_TEXT = f"{PREFIX}uuid_"
_METADATA = {
    "_op": "string",
    "_ts": "timestamp",
    "_source": "string",
    "_source_partition": "int",
    "_offset": "bigint",
    "_timestamp": "timestamp",
}
"""The metadata columns of `changelog.decoding`, with their Spark SQL types."""


def columns_to_read(spec: ChangelogSpec) -> T.StructType:
    """Columns that change files must have: the kind, the table's columns, the order columns."""
    kind = Kinds.of(spec.options).column
    kind_type = T.LongType() if spec.options.get("column_type") == "integer" else T.StringType()
    fields = {kind: T.StructField(kind, kind_type)}
    for column in spec.columns:
        dtype = T.StringType() if column.is_uuid else column.type
        fields.setdefault(column.field, T.StructField(column.field, dtype))
    for name, order_type in spec.order_by:
        fields.setdefault(name, T.StructField(name, order_type))
    return T.StructType(list(fields.values()))


def completed(records: DataFrame, spec: ChangelogSpec) -> DataFrame:
    """The records with exactly the columns and types of `columns_to_read`: narrower types are widened, and columns that
    the files lack are null.

    :param records: columns whose types fit into the types of `columns_to_read`.
    """
    have = {field.name: field.dataType for field in records.schema}
    other = {f.name: f.dataType for f in columns_to_read(spec) if have.get(f.name) != f.dataType}
    values = {name: F.col(quoted(name)) if name in have else F.lit(None) for name in other}
    return records.withColumns({name: values[name].cast(dtype) for name, dtype in other.items()}) if other else records


def columns_decoder(spec: ChangelogSpec) -> "Decoder":
    """Decodes typed records: the columns of `columns_to_read`, and `SOURCE`. With `source_order` also `FILE`, `ROW`."""
    kinds = Kinds.of(spec.options)
    uuids = [c for c in spec.columns if c.is_uuid]
    op = F.col(quoted(kinds.column)).cast("string")
    images = Select(
        [
            F.col(SOURCE),
            op.alias(_OP),
            _kind(op, kinds).alias(KIND),
            *(F.col(quoted(name)).cast(dtype).alias(_order_value(i)) for i, (name, dtype) in enumerate(spec.order_by)),
            *([F.col(FILE), F.col(ROW)] if spec.source_order else []),
            *(F.col(quoted(c.field)).alias(_UUID_TEXT + c.name) for c in uuids),
            *(_values(c).alias(c.name) for c in spec.columns),
        ]
    )
    misfits = [
        F.when(
            F.col(quoted(_UUID_TEXT + c.name)).isNotNull() & F.col(quoted(c.name)).isNull(),
            _error(BadRecord.TYPE_MISMATCH, f"column {c.name} is not a UUID"),
        )
        for c in uuids
    ]
    misfits += [
        F.when(
            (F.length(quoted(c.name)) != c.width) & (F.lit(c.name in spec.kept_by_removals) | _sets_row(F.col(KIND))),
            _error(BadRecord.TYPE_MISMATCH, f"column {c.name} does not fit binary of {c.width} bytes"),
        )
        for c in spec.columns
        if c.width is not None
    ]
    fields = {kinds.column: F.col(_OP)}
    fields |= {name: F.col(_order_value(i)) for i, (name, _) in enumerate(spec.order_by)}
    fields |= {c.field: F.col(quoted(_UUID_TEXT + c.name if c.is_uuid else c.name)) for c in spec.columns}
    value = F.to_json(F.struct(*(column.alias(name) for name, column in fields.items())))
    return Decoder((images, *_finish(spec, [_unknown_kind(F.col(_OP), kinds, spec), *misfits], value)))


def _values(column: ColumnSpec) -> Column:
    return binary_uuid(column.field) if column.is_uuid else F.col(quoted(column.field))


def _stored(name: str, spec: ChangelogSpec) -> Column:
    """A column's values as the table has them."""
    values = F.col(quoted(name))
    return F.when(F.length(values) > 0, values) if name in spec.empty_is_null else values


def _kind(op: Column, kinds: Kinds) -> Column:
    cases = []
    for kind in RowKind:
        spellings = [text for text, meaning in kinds.meanings.items() if meaning is kind]
        cases.append(F.when(op.isin(spellings), F.lit(int(kind))))
    return F.coalesce(*cases)


def _unknown_kind(op: Column, kinds: Kinds, spec: ChangelogSpec) -> Column:
    around, named = ("'", "'"), op
    if not spec.show_values:
        around, named = ("text of ", " characters"), F.length(op).cast("string")
    shown = F.coalesce(F.concat(F.lit(around[0]), named, F.lit(around[1])), F.lit("missing"))
    return F.when(
        F.col(KIND).isNull(),
        _error(BadRecord.UNKNOWN_OPERATION, f"{kinds.column} is ", shown, f"; expected one of {kinds.expected}"),
    )


def _order_value(index: int) -> str:
    return f"{PREFIX}order_value_{index}"


def _error(error_class: str, *reason: Column | str) -> Column:
    """An error value: its class and a sentence made of `reason`'s parts."""
    parts = [F.lit(part) if isinstance(part, str) else part for part in reason]
    return F.struct(F.concat(*parts).alias("reason"), F.lit(error_class).alias("error_class"))


def _sets_row(kind: Column) -> Column:
    """Whether a kind sets the row: +I or +U."""
    return kind.isin(int(RowKind.INSERT), int(RowKind.UPDATE_AFTER))


@dataclass(frozen=True)
class Select:
    """A projection: a step of a decoder."""

    columns: Sequence[Column]

    def __call__(self, frame: DataFrame) -> DataFrame:
        return frame.select(*self.columns)


@dataclass(frozen=True)
class Decoder:
    """Makes changelog rows of raw records, by Spark expressions that were built once.

    Building the expressions takes hundreds of calls to the JVM. Without this object, every micro-batch would build them
    again.
    """

    steps: tuple[Select, ...]

    def __call__(self, records: DataFrame) -> DataFrame:
        return reduce(lambda frame, step: step(frame), self.steps, records)


def _finish(spec: ChangelogSpec, errors: list[Column], value: Column) -> list[Select]:
    """Check keys, order and required columns, and shape the changelog row.

    :param errors: errors of earlier checks; they count before the errors of the checks here.
    :param value: the record as JSON, for the dead letters.
    """
    kind, source = F.col(KIND), F.col(SOURCE)
    checks = list(errors)
    if spec.inserts_only:
        reason = F.col(_OP), ": a table in mode append takes inserts (+I) only"
        checks.append(F.when(kind != int(RowKind.INSERT), _error(BadRecord.NOT_AN_INSERT, *reason)))
    checks += [
        F.when(_stored(name, spec).isNull(), _error(BadRecord.NULL_KEY, f"key column {name} is null"))
        for name in spec.key
    ]
    checks += [
        F.when(
            _sets_row(kind) & (F.length(quoted(name)) == 0),
            _error(BadRecord.TYPE_MISMATCH, f"column {name} {EMPTY_PARTITION}"),
        )
        for name in spec.empty_is_null.difference(spec.key)
    ]
    checks += [
        F.when(
            F.col(_order_value(i)).isNull(), _error(BadRecord.MISSING_ORDER, f"order column {name} is null or missing")
        )
        for i, (name, _) in enumerate(spec.order_by)
    ]
    checks += [
        F.when(
            _sets_row(kind) & F.col(quoted(column.name)).isNull(),
            _error(BadRecord.TYPE_MISMATCH, f"column {column.name} is null, and the table requires a value"),
        )
        for column in spec.columns
        if column.required and column.name not in spec.key
    ]
    parts = {"source": source, "value": value}
    parts |= {name: F.col(f"{_ERROR}.{name}") for name in ("reason", "error_class")}
    fields = [parts.get(name, F.lit(None)).cast(dtype).alias(name) for name, dtype in BAD_FIELDS.items()]
    metadata = {"_op": F.col(_OP), "_source": source}
    order = [F.col(_order_value(i)) for i in range(len(spec.order_by))]
    order += [F.col(FILE).cast("int"), F.col(ROW).cast("bigint")] if spec.source_order else []
    result = [
        F.coalesce(kind, F.lit(int(RowKind.DELETE))).cast("tinyint").alias(KIND),
        *(value.alias(order_column(i)) for i, value in enumerate(order)),
        F.when(F.col(_ERROR).isNotNull(), F.struct(*fields)).alias(BAD),
        *([F.lit(None).cast("string").alias(MOVED)] if spec.key else []),
        *(_stored(column.name, spec).alias(column.name) for column in spec.columns),
        *(metadata.get(name, F.lit(None)).cast(_METADATA[name]).alias(name) for name in spec.metadata),
    ]
    error = F.coalesce(*checks, F.lit(None).cast("struct<reason:string,error_class:string>"))
    return [Select([F.col("*"), error.alias(_ERROR)]), Select(result)]


def quoted(name: str) -> str:
    """`name` as a quoted identifier of Spark SQL. It may have any characters."""
    return "`" + name.replace("`", "``") + "`"


def any_of(conditions: list[Column]) -> Column:
    """True if any of `conditions` is true; false if the list is empty."""
    return reduce(lambda a, b: a | b, conditions, F.lit(False))


def binary_uuid(name: str) -> Column:
    """The 16 bytes of the UUID in the text column `name`; null if the text isn't a UUID."""
    found = F.expr(f"try_to_binary(replace({quoted(name)}, '-', ''), 'hex')")
    return F.when(F.length(found) == 16, found).alias(name)
