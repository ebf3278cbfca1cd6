"""AWS Database Migration Service's messages for Kafka and Kinesis.

    {"data": {"id": 7, "city": "Oslo", "amount": 12.50, "created": "2026-01-02T03:04:05Z"}, "before-image": {"id": 6},
     "metadata": {"timestamp": "2026-01-02T03:04:05.123456Z", "record-type": "data", "operation": "update",
                  "partition-key-type": "primary-key", "schema-name": "shop", "table-name": "orders",
                  "transaction-id": 17179869192}}

| record-type, operation  | changelog rows |
|-------------------------|---|
| data: load, insert      | +I of `data` (load is a snapshot read of the source) |
| data: update            | +U of `data`; before it -U of the before-image, if needed (changelog mode, new key) |
| data: delete            | -D of `data`; only its key is used |
| control: truncate-table | empties the table (`changelog.rows.TRUNCATE`) |
| control: others         | ignored: rows show new columns, and drop-table leaves the rows |

DMS leaves out nulls, so a missing field is null. With the endpoint's setting `IncludeNullAndEmpty`, a missing field
means that DMS doesn't know its value. Then set `missing.columns: unavailable`: an update keeps the value that the
table's row has (`Changes.unavailable`), or becomes a bad record, if the table doesn't keep values. Without
before-images (`BeforeImageSettings`), an update that changes the key leaves the row of the old key in the table. Set
`before.image` to the `FieldName` of the before-images. Bytes are hexadecimal, with or without 0x. DMS appends a Z to
timestamps without a zone; the decoder ignores this Z. See "Using Apache Kafka as a target" in the DMS user guide.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as T

from changelog.changes import Wire, WireType
from changelog.formats.row_images import (
    MISSING_ARE_NULL,
    MISSING_COLUMNS,
    TEXT,
    ImageFormat,
    ImageReader,
    Lacks,
    Operations,
    Rows,
    Spelled,
    at_field,
    is_binary,
    text,
    timestamps,
)
from changelog.parse.json_records import Object, Parsed
from changelog.rows import RowKind
from changelog.source_tables import Found, table_names
from changelog.spec import ChangelogSpec, ColumnSpec
from changelog.values.encoded import from_hex

OPERATIONS = Operations(
    "metadata.operation",
    {
        "load": RowKind.INSERT,
        "insert": RowKind.INSERT,
        "update": RowKind.UPDATE_AFTER,
        "delete": RowKind.DELETE,
    },
    snapshot=frozenset(["load"]),
)
RECORD_TYPES = Operations("metadata.record-type", {"data": RowKind.INSERT}, ignored=frozenset(["control"]))
_TRUNCATES = ("truncate", "truncate-table")


class DmsJson(ImageFormat):
    """Decodes records of DMS."""

    OPTIONS: Mapping[str, tuple[str, ...]] = {MISSING_COLUMNS: MISSING_ARE_NULL, "before.image": ()}
    DELETES_CARRY_ROW = False
    STATES_KEY = False

    def __init__(self, spec: ChangelogSpec) -> None:
        images = ImageReader(
            spec, _spell, missing=MISSING_ARE_NULL, log_whole_rows="Have the source database log whole rows"
        )
        self._before = str(spec.options.get("before.image", "before-image"))
        names = dict.fromkeys(("operation", "record-type", "timestamp", "schema-name", "table-name"), TEXT)
        metadata = Object(names)
        fields = {"metadata": metadata, "data": images.whole(), self._before: images.before()}
        super().__init__(spec, images, fields)

    def _changes(self, records: pa.RecordBatch, found: Parsed) -> Iterator[Found]:
        metadata = at_field(found.values, "metadata")
        yield table_names(found.record, *(at_field(metadata, name) for name in ("schema-name", "table-name")))
        record_type, op = (text(at_field(metadata, name)) for name in ("record-type", "operation"))
        yield from RECORD_TYPES.rejected(found.record, record_type, self._spec)
        truncates = pc.and_(pc.equal(record_type, "control"), pc.is_in(op, value_set=pa.array(_TRUNCATES)))
        yield from self._images.truncates(found.record, found.values, pc.fill_null(truncates, False))
        is_data = pc.is_in(record_type, value_set=pa.array(["data"]))
        found = replace(found, record=found.record.filter(is_data), values=found.values.filter(is_data))
        op = op.filter(is_data)
        yield from OPERATIONS.rejected(found.record, op, self._spec)
        kind = OPERATIONS.kind(op)
        mask = kind.is_valid()
        message, op = found.values.filter(mask), op.filter(mask)
        data, before = at_field(message, "data"), at_field(message, self._before)
        rows = Rows(
            record=found.record.filter(mask),
            op=op,
            kind=kind.filter(mask),
            after=data,
            before=before,
            removed=data,
            order=self._images.order(message, data, before),
            time=timestamps(at_field(at_field(message, "metadata"), "timestamp")),
            snapshot=pc.is_in(op, value_set=pa.array(list(OPERATIONS.snapshot))),
            unknown=found.unknown,
        )
        yield from self._images.changes(rows, Lacks(records.column("value").take(rows.record), "data", data))


def _spell(column: ColumnSpec, values: pa.Array) -> Spelled:
    if not pa.types.is_string(values.type):
        return Wire(values), None, ""
    if isinstance(column.type, T.TimestampNTZType):
        return Wire(pc.replace_substring_regex(values, "Z$", "")), None, ""
    if is_binary(column):
        decoded = from_hex(pc.replace_substring_regex(values, "^0[xX]", ""))
        return Wire(decoded, WireType("bytes")), pc.and_not(values.is_valid(), decoded.is_valid()), "is not hexadecimal"
    return Wire(values), None, ""
