"""Maxwell's messages of MySQL changes.

    {"database": "shop", "table": "orders", "type": "update", "ts": 1767323045, "xid": 7152, "xoffset": 1,
     "commit": true,
     "data": {"id": 7, "city": "Oslo", "amount": 12.50}, "old": {"city": null}}

| type                                | changelog rows |
|-------------------------------------|---|
| insert, bootstrap-insert            | +I of `data` (bootstrap-insert is a snapshot read of the source) |
| update                              | +U of `data`; before it, if needed, -U of `data` with the old values of `old` |
| delete                              | -D of `data` |
| bootstrap-start, bootstrap-complete | ignored |
| table-create, table-alter, …        | ignored; a bad record if it empties or drops partitions |
| table-drop, database-drop           | ignored: the rows stay |

`old` has only the changed fields. Bytes are base64, booleans are 1 and 0, dates and times are text as MySQL prints
them. A field that an update lacks has the value that the table's row has (MySQL logs only changed columns with
`binlog_row_image=MINIMAL`), unless `old` has it: then it has become null (`output_nulls=false`). With `missing.columns:
null`, a missing field is null. Maxwell never sends TRUNCATE. See maxwells-daemon.io/dataformat.
"""

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from changelog.formats.row_images import (
    INTEGER,
    NAMES,
    PARTITION_REMOVED,
    TEXT,
    Fields,
    ImageFormat,
    ImageReader,
    Lacks,
    Operations,
    Rows,
    at_field,
    bytes_type,
    epoch,
    rejected,
    removes_partition,
    says_null,
    spell_plain,
    stated_keys,
    text,
)
from changelog.parse.json_records import Parsed
from changelog.rows import BadRecord, RowKind
from changelog.source_tables import Found, table_names
from changelog.spec import ChangelogSpec

OPERATIONS = Operations(
    "type",
    {
        "insert": RowKind.INSERT,
        "update": RowKind.UPDATE_AFTER,
        "delete": RowKind.DELETE,
        "bootstrap-insert": RowKind.INSERT,
    },
    ignored=frozenset(
        ["bootstrap-start", "bootstrap-complete"]
        + [f"{what}-{done}" for what in ("table", "database") for done in ("create", "alter", "drop")]
    ),
    truncates=frozenset(["table-truncate"]),
    snapshot=frozenset(["bootstrap-insert"]),
)


class MaxwellJson(ImageFormat):
    """Decodes Maxwell's records."""

    def __init__(self, spec: ChangelogSpec) -> None:
        images = ImageReader(spec, spell_plain, bytes_type, log_whole_rows="Set binlog_row_image=FULL in MySQL")
        fields: Fields = {
            "database": TEXT,
            "table": TEXT,
            "type": TEXT,
            "ts": INTEGER,
            "sql": TEXT,
            "primary_key_columns": NAMES,
            "data": images.whole(),
            "old": images.before(),
        }
        super().__init__(spec, images, fields)

    def _changes(self, records: pa.RecordBatch, found: Parsed) -> Iterator[Found]:
        message = found.values
        yield table_names(found.record, at_field(message, "database"), at_field(message, "table"))
        op = text(at_field(message, "type"))
        yield from OPERATIONS.rejected(found.record, op, self._spec)
        yield from self._images.truncates(found.record, message, OPERATIONS.truncating(op))
        altered = pc.and_(
            pc.is_in(op, value_set=pa.array(["table-alter"])), removes_partition(at_field(message, "sql"))
        )
        yield from rejected(found.record, altered, BadRecord.UNSUPPORTED_EVENT, PARTITION_REMOVED)
        kind = OPERATIONS.kind(op)
        mask = kind.is_valid()
        op, kind, record, message = op.filter(mask), kind.filter(mask), found.record.filter(mask), message.filter(mask)
        yield from stated_keys(record, at_field(message, "primary_key_columns"))
        data, old = at_field(message, "data"), at_field(message, "old")
        values = records.column("value").take(record)
        rows = Rows(
            record=record,
            op=op,
            kind=kind,
            after=data,
            before=old,
            removed=data,
            order=self._images.order(message, data, old),
            states_null=lambda name: says_null(values, name),
            time=epoch(at_field(message, "ts"), 1_000_000),
            snapshot=pc.is_in(op, value_set=pa.array(list(OPERATIONS.snapshot))),
            unknown=found.unknown,
        )
        # with `output_nulls=false`, a field that `old` has and `data` lacks has become null
        yield from self._images.changes(rows, Lacks(values, "data", data, changed=old))
