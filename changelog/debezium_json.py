"""Debezium's change events as JSON, with and without the Kafka Connect schema envelope.

    {"before": null, "after": {"id": 1, "customer": "Ada", "amount": "BNI=", "created_at": 1767323045000000},
     "source": {"lsn": 24023128, …}, "op": "c", "ts_ms": 1767323045123}

| op   | changelog rows                                                                                                     |
|------|--------------------------------------------------------------------------------------------------------------------|
| r, c | +I of `after` (r is a snapshot read of the source)                                                                 |
| u    | +U of `after`; before it -U of `before`, if the event has one and it matters (changelog mode, or the key changed)  |
| d    | -D of `before`, of which only the key is relied upon (REPLICA IDENTITY DEFAULT sends no more)                      |
| t    | a bad record: a TRUNCATE removes rows that no key names                                                            |
| m    | ignored: a logical decoding message changes no row                                                                 |

A tombstone (null value) is ignored; the `d` before it did the work. With an envelope, the schema's semantic names say how a
value is encoded. Without one, `format_options` repeat the connector's settings: `decimal.handling.mode` (precise, string,
double) and `time.precision.mode` (adaptive, adaptive_time_microseconds, microseconds, connect, isostring).
"""

from pyspark.sql import Column
from pyspark.sql import functions as F

from changelog.decoding import ChangelogSpec, Decoder, Select, Where, any_of, error, extend, finish, order_value
from changelog.json_text import IMAGE, Encoding, column_errors, field, path, text_columns, typed_columns
from changelog.rows import KIND, PREFIX, SNAPSHOT, BadRecord, RowKind

DELETES_CARRY_ROW = False
"""A `d` may carry the key only, and null or a default for every other column."""

UNAVAILABLE = (
    "__debezium_unavailable_value",
    "X19kZWJleml1bV91bmF2YWlsYWJsZV92YWx1ZQ==",
    '["__debezium_unavailable_value"]',
)
"""Debezium's placeholder for an unchanged TOAST value, as text, in base64 and as an array."""

OPTIONS = {
    "decimal.handling.mode": ("precise", "string", "double"),
    "time.precision.mode": ("adaptive", "adaptive_time_microseconds", "microseconds", "connect", "isostring"),
}
"""`format_options` and their values; the first is the default, as in Debezium."""

_EVENT = f"{PREFIX}event"
_OP = f"{PREFIX}op"
_SEMANTIC = f"{PREFIX}semantic"
_FIELDS = "array<struct<field:string,fields:array<struct<field:string,name:string,type:string>>>>"


def decoder(spec: ChangelogSpec) -> Decoder:
    """Decodes Debezium records (`changelog.decoding.RAW_COLUMNS`)."""
    message = F.col(f"{PREFIX}message")
    parsed = Select(
        [
            F.struct("source", "partition", "offset", "key", "value").alias(f"{PREFIX}raw"),
            F.try_parse_json("value").alias(f"{PREFIX}message"),
        ]
    )
    event = Select(
        [
            F.col(f"{PREFIX}raw"),
            F.coalesce(F.try_variant_get(message, path("payload"), "variant"), message).alias(_EVENT),
            _semantic_names(F.try_variant_get(message, path("schema", "fields"), _FIELDS)).alias(_SEMANTIC),
        ]
    )
    before = F.col(KIND).isin(int(RowKind.UPDATE_BEFORE), int(RowKind.DELETE))
    image = extend(
        F.when(before, _image("before")).otherwise(_image("after")).alias(IMAGE),
        (F.col(_OP) == "r").alias(SNAPSHOT),
        *(_order_value(name).try_cast(dtype).alias(order_value(i)) for i, (name, dtype) in enumerate(spec.order_by)),
    )
    return Decoder(
        (
            Where(F.col("value").isNotNull()),
            parsed,
            event,
            extend(field(_EVENT, "op").alias(_OP)),
            Where(F.coalesce(F.col(_OP), F.lit("")) != "m"),
            extend(F.explode(_kinds(spec)).alias(KIND)),
            image,
            extend(*text_columns(spec.columns)),
            *typed_columns(spec.columns, _encoding(spec.options)),
            *finish(spec, _errors(spec), has_snapshot=True),
        )
    )


def _kinds(spec: ChangelogSpec) -> Column:
    """The kinds of the changes that an event stands for. An event that stands for none keeps one row, to become a bad record."""

    def kinds(*values: RowKind) -> Column:
        return F.array(*(F.lit(int(value)) for value in values))

    op = F.col(_OP)
    has_before = F.try_variant_get(F.col(_EVENT), path("before"), "map<string,variant>").isNotNull()
    if not spec.trust_before:
        has_before = any_of([_before(name).isNotNull() & (_before(name) != _after(name)) for name in spec.key])
    return (
        F.when(op.isin("r", "c"), kinds(RowKind.INSERT))
        .when((op == "u") & has_before, kinds(RowKind.UPDATE_BEFORE, RowKind.UPDATE_AFTER))
        .when(op == "u", kinds(RowKind.UPDATE_AFTER))
        .when(op == "d", kinds(RowKind.DELETE))
        .otherwise(F.array(F.lit(None).cast("int")))
    )


def _errors(spec: ChangelogSpec) -> list[Column]:
    op, event, image = F.col(_OP), F.col(_EVENT), F.col(IMAGE)
    side = F.when(op == "d", F.lit("before")).otherwise(F.lit("after"))
    has_fields = any_of([F.try_variant_get(image, path(name), "variant").isNotNull() for name in spec.key])
    return [
        F.when(event.isNull(), error(BadRecord.UNPARSEABLE, "the value is not JSON")),
        F.when(
            op.isNull(), error(BadRecord.UNKNOWN_OPERATION, "the event has no op; is this a Debezium change event?")
        ),
        F.when(
            op == "t",
            error(BadRecord.UNSUPPORTED_EVENT, "TRUNCATE: no key says which rows it removed; empty the table by hand"),
        ),
        F.when(
            F.col(KIND).isNull(),
            error(BadRecord.UNKNOWN_OPERATION, "op is '", op, "'; expected one of r, c, u, d, t, m"),
        ),
        F.when(
            ~has_fields & F.try_variant_get(image, "$", "map<string,variant>").isNull(),
            error(BadRecord.MISSING_COLUMN, "op '", op, "' has no ", side),
        ),
        *column_errors(spec.columns, spec.key, spec.kept_by_removals, UNAVAILABLE),
    ]


def _semantic_names(fields: Column) -> Column:
    """Field name -> semantic name (or plain type) of the row schema in the envelope; null without an envelope."""
    row = F.filter(fields, lambda f: f["field"] == "after")[0]["fields"]
    entries = F.transform(row, lambda f: F.struct(f["field"], F.coalesce(f["name"], f["type"])))
    return F.when(fields.isNotNull(), F.map_from_entries(entries))


def _encoding(options: dict[str, str]) -> Encoding:
    chosen = {name: options.get(name, values[0]) for name, values in OPTIONS.items()}
    return Encoding(
        epoch=chosen["time.precision.mode"] != "isostring",
        epoch_unit="millis" if chosen["time.precision.mode"] == "connect" else "micros",
        base64_decimals=chosen["decimal.handling.mode"] == "precise",
        semantic=_SEMANTIC,
    )


def _order_value(name: str) -> Column:
    """An order column is a path into the event (`ts_ms`, `source.lsn`), or else a column of the row, after the change if it has one."""
    in_event = F.try_variant_get(F.col(_EVENT), path(*name.split(".")), "string")
    return F.coalesce(in_event, _after(name), _before(name))


def _image(side: str) -> Column:
    return F.try_variant_get(F.col(_EVENT), path(side), "variant")


def _before(name: str) -> Column:
    return F.try_variant_get(F.col(_EVENT), path("before", name), "string")


def _after(name: str) -> Column:
    return F.try_variant_get(F.col(_EVENT), path("after", name), "string")
