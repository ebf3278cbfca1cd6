"""Oracle GoldenGate's JSON formatter (operation model).

    {"table": "SHOP.ORDERS", "op_type": "U", "op_ts": "2026-01-02 03:04:05.000000", "pos": "00000000000000004338",
     "primary_keys": ["ID"], "before": {"ID": 7, "CITY": null}, "after": {"ID": 7, "CITY": "Oslo"}}

| op_type | changelog rows |
|---------|---|
| I       | +I of `after` |
| U       | +U of `after`; before it -U of `before`, if it exists and is needed (changelog mode, another key) |
| D       | -D of `before`; only its key is used |
| T       | empties the table (`changelog.rows.TRUNCATE`) |

By default GoldenGate sends only the key and the changed fields of an updated row. Such a message is a bad record: use
NOCOMPRESSUPDATES or a similar setting in the extract. With `missing.columns: null`, a missing field is null. Set this
for `omitNullColumnValues`, or after a column was dropped at the source. Bytes are base64. `op_ts` is read as UTC. See
"Using the JSON Formatter" in Oracle GoldenGate for Big Data.
"""

from collections.abc import Generator, Iterator, Mapping

import pyarrow as pa
import pyarrow.compute as pc

from changelog.changes import Changes, MessageKey, Rejected
from changelog.json_records import JsonReader, Leaf, Parsed
from changelog.row_images import (
    NAMES,
    TEXT,
    Fields,
    Images,
    Operations,
    Rows,
    at_field,
    bytes_type,
    each,
    lacks,
    rejected,
    spell_plain,
    stated_keys,
    text,
    timestamps,
)
from changelog.rows import BadRecord, RowKind
from changelog.spec import ChangelogSpec

OPERATIONS = Operations(
    "op_type",
    {"I": RowKind.INSERT, "U": RowKind.UPDATE_AFTER, "D": RowKind.DELETE},
    truncates=frozenset(["T"]),
)
_IS_MISSING = "_isMissing"
"""What `includeIsMissingFields` appends to a column's name, for whether the trail has no value of it."""


class OggJson:
    """Decodes GoldenGate's records."""

    OPTIONS: Mapping[str, tuple[str, ...]] = {"missing.columns": ("reject", "null")}
    REQUIRED: tuple[str, ...] = ()
    DELETES_CARRY_ROW = True
    STATES_KEY = True

    def __init__(self, spec: ChangelogSpec) -> None:
        self._spec = spec
        self._images = Images(spec, spell_plain, bytes_type)
        self._rejects = spec.options.get("missing.columns", "reject") == "reject"
        flags = {column.field + _IS_MISSING: Leaf((pa.bool_(),)) for column in spec.columns} if self._rejects else {}
        fields: Fields = {
            "op_type": TEXT,
            "op_ts": TEXT,
            "primary_keys": NAMES,
            "before": self._images.kept(),
            "after": self._images.whole(flags),
        }
        self._reader = JsonReader(self._images.message(fields))

    def changes(self, records: pa.RecordBatch) -> Iterator[Changes | Rejected | MessageKey]:
        return each(self._reader, records, self._changes)

    def _changes(self, records: pa.RecordBatch, found: Parsed) -> Iterator[Changes | Rejected | MessageKey]:
        message = found.values
        op = text(at_field(message, "op_type"))
        yield from OPERATIONS.rejected(found.record, op)
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
        if self._rejects:
            rows = yield from self._without_compressed(records, rows)
        yield from self._images.changes(rows)

    def _without_compressed(self, records: pa.RecordBatch, rows: Rows) -> Generator[Rejected, None, Rows]:
        """Reject the updates that don't have all columns, and return the other rows."""
        updates = pc.equal(rows.kind, int(RowKind.UPDATE_AFTER))
        values = records.column("value").take(rows.record)
        rest = pa.repeat(True, len(rows.op))
        for column in self._spec.columns:
            flag = at_field(rows.after, column.field + _IS_MISSING)
            missing = pc.or_(lacks(values, "after", rows.after, column.field), _is_true(flag))
            missing = pc.and_(pc.and_(updates, missing), rest)
            reason = f"column {column.name} is missing: is the update compressed?"
            yield from rejected(rows.record, missing, BadRecord.MISSING_COLUMN, reason)
            rest = pc.and_not(rest, missing)
        return rows.filter(rest)


def _is_true(flags: pa.Array) -> pa.Array:
    return pc.is_in(text(flags), value_set=pa.array(["true"]))
