"""Oracle GoldenGate's JSON formatter (operation model).

    {"table": "SHOP.ORDERS", "op_type": "U", "op_ts": "2026-01-02 03:04:05.000000", "pos": "00000000000000004338",
     "primary_keys": ["ID"], "before": {"ID": 7, "CITY": null}, "after": {"ID": 7, "CITY": "Oslo"}}

| op_type | changelog rows |
|---------|---|
| I       | +I of `after` |
| U       | +U of `after`; before it -U of `before`, if it exists and is needed (changelog mode, another key) |
| D       | -D of `before`; only its key is used |
| T       | empties the table (`changelog.rows.TRUNCATE`) |

By default GoldenGate sends only the key and the changed fields of an updated row. The other values are then those of
the table's row (`Changes.unavailable`), or such a message is a bad record, if the table doesn't keep them: use
NOCOMPRESSUPDATES or a similar setting in the extract. With `missing.columns: null`, a missing field is null. Set this
for `omitNullColumnValues`. Bytes are base64. `op_ts` is read as UTC. See "Using the JSON Formatter" in Oracle
GoldenGate for Big Data.
"""

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from changelog.formats.row_images import (
    NAMES,
    TEXT,
    Fields,
    ImageFormat,
    ImageReader,
    Lacks,
    Operations,
    Rows,
    at_field,
    bytes_type,
    spell_plain,
    stated_keys,
    text,
    timestamps,
)
from changelog.parse.json_records import Leaf, Parsed
from changelog.rows import RowKind
from changelog.source_tables import Found, table_names
from changelog.spec import ChangelogSpec

OPERATIONS = Operations(
    "op_type",
    {"I": RowKind.INSERT, "U": RowKind.UPDATE_AFTER, "D": RowKind.DELETE},
    truncates=frozenset(["T"]),
)
_IS_MISSING = "_isMissing"
"""What `includeIsMissingFields` appends to a column's name, for whether the trail has no value of it."""


class OggJson(ImageFormat):
    """Decodes GoldenGate's records."""

    def __init__(self, spec: ChangelogSpec) -> None:
        images = ImageReader(
            spec, spell_plain, bytes_type, log_whole_rows="Set NOCOMPRESSUPDATES in GoldenGate's extract"
        )
        marks = {column.field + _IS_MISSING: Leaf((pa.bool_(),)) for column in spec.columns}
        flags = marks if images.may_be_partial else {}
        fields: Fields = {
            "table": TEXT,
            "op_type": TEXT,
            "op_ts": TEXT,
            "primary_keys": NAMES,
            "before": images.before(),
            "after": images.whole(flags),
        }
        super().__init__(spec, images, fields)

    def _changes(self, records: pa.RecordBatch, found: Parsed) -> Iterator[Found]:
        message = found.values
        yield table_names(found.record, at_field(message, "table"))
        op = text(at_field(message, "op_type"))
        yield from OPERATIONS.rejected(found.record, op, self._spec)
        yield from self._images.truncates(found.record, message, OPERATIONS.truncating(op))
        kind = OPERATIONS.kind(op)
        mask = kind.is_valid()
        message, record, kind = message.filter(mask), found.record.filter(mask), kind.filter(mask)
        yield from stated_keys(record, at_field(message, "primary_keys"))
        before, after = at_field(message, "before"), at_field(message, "after")
        rows = Rows(
            record=record,
            op=op.filter(mask),
            kind=kind,
            after=after,
            before=before,
            removed=before,
            order=self._images.order(message, after, before),
            time=timestamps(at_field(message, "op_ts")),
            unknown={name: t for name, t in found.unknown.items() if not name.endswith(_IS_MISSING)},
        )
        values = records.column("value").take(record)
        yield from self._images.changes(
            rows, Lacks(values, "after", after, marked=lambda name: _is_true(at_field(after, name + _IS_MISSING)))
        )


def _is_true(flags: pa.Array) -> pa.Array:
    return pc.is_in(text(flags), value_set=pa.array(["true"]))
