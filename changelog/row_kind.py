"""Rows that carry their kind: `row_kind` is +I, -U, +U or -D (or INSERT, UPDATE_BEFORE, UPDATE_AFTER, DELETE).

    {"row_kind": "+U", "seq": 7, "id": 1, "customer": "Ada", "amount": 12.50, "created_at": "2026-01-02T03:04:05Z"}

As JSON, one object a record (`json_decoder`), or as typed columns of Parquet files (`columns_decoder`). A -U and a -D carry the
old row, whole.
"""

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql import types as T

from changelog.json_text import IMAGE, Encoding, column_errors, field, path, text_columns, typed_columns
from changelog.row_kind_columns import (
    Decoder,
    Select,
    Where,
    binary_uuid,
    error,
    extend,
    finish,
    order_value,
    quoted,
)
from changelog.rows import KIND, PREFIX, BadRecord, RowKind
from changelog.spec import ChangelogSpec

COLUMN = "row_kind"
DELETES_CARRY_ROW = True
"""A -D has the old row's values, also of columns that aren't in the key."""

_OP = f"{PREFIX}op"
_UUID_TEXT = f"{PREFIX}uuid_"


def columns_to_read(spec: ChangelogSpec) -> T.StructType:
    """Columns that Parquet change files must have: the kind, the order columns, the table's columns."""
    fields = {COLUMN: T.StructField(COLUMN, T.StringType())}
    for column in spec.columns:
        dtype = T.StringType() if column.is_uuid else column.type
        fields[column.name] = T.StructField(column.name, dtype)
    for name, order_type in spec.order_by:
        fields.setdefault(name, T.StructField(name, order_type))
    return T.StructType(list(fields.values()))


def columns_decoder(spec: ChangelogSpec) -> Decoder:
    """Decodes typed records: the columns of `columns_to_read`, and `source` with the file's path."""
    uuids = [c for c in spec.columns if c.is_uuid]
    images = Select(
        [
            F.col("source"),
            F.col(COLUMN).alias(_OP),
            _kind(F.col(COLUMN)).alias(KIND),
            *(F.col(quoted(name)).cast(dtype).alias(order_value(i)) for i, (name, dtype) in enumerate(spec.order_by)),
            *(F.col(quoted(c.name)).alias(_UUID_TEXT + c.name) for c in uuids),
            *(binary_uuid(c.name) if c.is_uuid else F.col(quoted(c.name)) for c in spec.columns),
        ]
    )
    misfits = [
        F.when(
            F.col(quoted(_UUID_TEXT + c.name)).isNotNull() & F.col(quoted(c.name)).isNull(),
            error(BadRecord.TYPE_MISMATCH, f"column {c.name} is not a UUID"),
        )
        for c in uuids
    ]
    fields = {COLUMN: F.col(_OP)}
    fields |= {name: F.col(order_value(i)) for i, (name, _) in enumerate(spec.order_by)}
    fields |= {c.name: F.col(quoted(_UUID_TEXT + c.name if c.is_uuid else c.name)) for c in spec.columns}
    value = F.to_json(F.struct(*(column.alias(name) for name, column in fields.items())))
    record = {"source": F.col("source"), "value": value}
    return Decoder((images, *finish(spec, [_unknown_kind(F.col(_OP)), *misfits], record=record)))


def json_decoder(spec: ChangelogSpec) -> Decoder:
    """Decodes JSON records (`RAW_COLUMNS`). Records without a value are ignored."""
    parsed = Select(
        [
            F.struct("source", "partition", "offset", "key", "value").alias(f"{PREFIX}raw"),
            F.try_parse_json("value").alias(IMAGE),
        ]
    )
    texts = extend(
        field(IMAGE, COLUMN).alias(_OP),
        _kind(field(IMAGE, COLUMN)).alias(KIND),
        *(field(IMAGE, name).try_cast(dtype).alias(order_value(i)) for i, (name, dtype) in enumerate(spec.order_by)),
        *text_columns(spec.columns),
    )
    not_an_object = F.try_variant_get(F.col(IMAGE), path(), "map<string,variant>").isNull()
    errors = [
        F.when(
            F.col(_OP).isNull() & (F.col(IMAGE).isNull() | not_an_object),
            error(BadRecord.UNPARSEABLE, "the value is not a JSON object"),
        ),
        _unknown_kind(F.col(_OP)),
        *column_errors(spec.columns, spec.key, spec.kept_by_removals, ()),
    ]
    steps: list[Select | Where] = [
        Where(F.col("value").isNotNull()),
        parsed,
        texts,
        *typed_columns(spec.columns, Encoding()),
    ]
    return Decoder((*steps, *finish(spec, errors)))


def _kind(text: Column) -> Column:
    cases = [F.when(text.isin(kind.short, kind.name), F.lit(int(kind))) for kind in RowKind]
    return F.coalesce(*cases)


def _unknown_kind(text: Column) -> Column:
    shown = F.coalesce(F.concat(F.lit("'"), text, F.lit("'")), F.lit("missing"))
    return F.when(
        _kind(text).isNull(),
        error(BadRecord.UNKNOWN_OPERATION, f"{COLUMN} is ", shown, "; expected one of +I, -U, +U, -D"),
    )


class RowKindJson:
    OPTIONS: dict[str, tuple[str, ...]] = {}
    DELETES_CARRY_ROW = True
