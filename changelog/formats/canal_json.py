"""Canal's flat messages of MySQL changes. Each message has several rows of one table.

    {"data": [{"id": "7", "city": "Oslo", "amount": "12.50"}], "old": [{"city": null}], "type": "UPDATE",
     "isDdl": false, "database": "shop", "table": "orders", "es": 1767323045000,
     "ts": 1767323045123, "pkNames": ["id"], "sql": ""}

| type                          | changelog rows, for each element of `data` |
|-------------------------------|---|
| INSERT                        | +I |
| UPDATE                        | +U; before it, if needed, -U of the same row with the old values in `old` |
| DELETE                        | -D |
| TRUNCATE                      | empties the table (`changelog.rows.TRUNCATE`) |
| other DDL (`isDdl`, CREATE …) | ignored: rows show new columns, and ERASE (DROP TABLE) leaves the rows |
| TIDB_WATERMARK, of TiCDC      | ignored: it says how far the changes go |
| ALTER of partitions           | a bad record if it empties or drops partitions |

Values are text as MySQL prints them: `12.50`, `2026-01-02 03:04:05.123456` without a zone, 1 and 0 for booleans and
bit(1). Bytes are text of ISO 8859-1: each character stands for one byte. A field that an update lacks has the value
that the table's row has (MySQL logs only changed columns with `binlog_row_image=MINIMAL`), or is null with
`missing.columns: null`. An insert or update of which TiCDC sends only the key is a bad record. An element of `old` has
only the changed fields, and a row without changed fields has no element. So if `data` and `old` have different lengths,
nobody can tell which element belongs to which row. If an element then has a key or partition column, the message is a
bad record. See `MQMessageUtils.messageConverter` in alibaba/canal.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from changelog.changes import Changes, Rejected, Wire, WireType
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
    Spelled,
    at_field,
    epoch,
    is_binary,
    rejected,
    removes_partition,
    says_null,
    stated_keys,
    text,
)
from changelog.parse.json_records import Leaf, ListOf, Object, Parsed
from changelog.rows import BadRecord, RowKind
from changelog.source_tables import Found, table_names
from changelog.spec import ChangelogSpec, ColumnSpec

OPERATIONS = Operations(
    "type",
    {"INSERT": RowKind.INSERT, "UPDATE": RowKind.UPDATE_AFTER, "DELETE": RowKind.DELETE},
    ignored=frozenset(["CREATE", "ALTER", "ERASE", "RENAME", "CINDEX", "DINDEX", "TIDB_WATERMARK"]),
    truncates=frozenset(["TRUNCATE"]),
)

_KEY_ONLY = (
    "TiCDC sent only the row's key, since the message was larger than max-message-bytes. Raise this limit of the "
    "changefeed, or set large-message-handle-compression, and have TiCDC send the row again"
)

MOST_ROWS = 1 << 15
"""A message may have so many rows. Each row may give a -U and a +U (`changelog.decoding.CHANGES_PER_RECORD`)."""


class CanalJson(ImageFormat):
    """Decodes Canal's records."""

    def __init__(self, spec: ChangelogSpec) -> None:
        images = ImageReader(spec, _spell, likely=(pa.string(),), log_whole_rows="Set binlog_row_image=FULL in MySQL")
        self._kept = [column.field for column in spec.columns if column.name in spec.kept_by_removals]
        fields: Fields = {
            "database": TEXT,
            "table": TEXT,
            "type": TEXT,
            "isDdl": Leaf((pa.bool_(),)),
            "es": INTEGER,
            "sql": TEXT,
            "pkNames": NAMES,
            "data": ListOf(images.whole()),
            "old": ListOf(images.before()),
            "_tidb": Object({"onlyHandleKey": Leaf((pa.bool_(),)), "claimCheckLocation": TEXT}),
        }
        super().__init__(spec, images, fields)

    def _changes(self, records: pa.RecordBatch, found: Parsed) -> Iterator[Found]:
        message = found.values
        yield table_names(found.record, at_field(message, "database"), at_field(message, "table"))
        op = text(at_field(message, "type"))
        is_ddl = pc.is_in(text(at_field(message, "isDdl")), value_set=pa.array(["true"]))
        # DDL of other types: statements that Canal sends to every topic, such as GRANT
        other_ddl = pc.and_(
            is_ddl, pc.invert(pc.is_in(op, value_set=pa.array([*OPERATIONS.kinds, *OPERATIONS.truncates])))
        )
        looked_at = pc.invert(other_ddl)
        yield from OPERATIONS.rejected(found.record.filter(looked_at), op.filter(looked_at), self._spec)
        yield from self._images.truncates(found.record, message, OPERATIONS.truncating(op))
        altered = pc.and_(other_ddl, removes_partition(at_field(message, "sql")))
        yield from rejected(found.record, altered, BadRecord.UNSUPPORTED_EVENT, PARTITION_REMOVED)
        changing = OPERATIONS.kind(op).is_valid()
        message, record, op = message.filter(changing), found.record.filter(changing), op.filter(changing)
        yield from stated_keys(record, at_field(message, "pkNames"))
        many = pc.greater(pc.list_value_length(at_field(message, "data")), MOST_ROWS)
        yield from rejected(record, many, BadRecord.UNSUPPORTED_EVENT, f"data has more than {MOST_ROWS:,} rows")
        few = pc.invert(pc.fill_null(many, False))
        message, record, op = message.filter(few), record.filter(few), op.filter(few)
        without = _without_rows(at_field(message, "data"))
        reasons = pc.binary_join_element_wise("type '", op, "' has no data, or a row of it is null", "")
        yield from rejected(record, without, BadRecord.MISSING_COLUMN, reasons)
        keys_only = pc.and_(pc.not_equal(op, "DELETE"), _has_only_key(at_field(message, "_tidb")))
        yield from rejected(record, keys_only, BadRecord.MISSING_COLUMN, _KEY_ONLY)
        good = pc.invert(pc.or_(without, keys_only))
        yield from self._rows(records, replace(found, record=record.filter(good), values=message.filter(good)))

    def _rows(self, records: pa.RecordBatch, found: Parsed) -> Iterator[Changes | Rejected]:
        """The changes of messages that have rows."""
        op = text(at_field(found.values, "type"))
        data, old = at_field(found.values, "data"), at_field(found.values, "old")
        count = pc.list_value_length(data).to_numpy()
        olds = pc.fill_null(pc.list_value_length(old), 0).to_numpy()
        updates = pc.equal(op, "UPDATE").to_numpy(zero_copy_only=False)
        # some rows of these messages have no old image, so we can't tell which image belongs to which row
        uneven = updates & (olds != count) & (olds > 0)
        if uneven.any():
            values = records.column("value").take(found.record)
            doubtful = uneven & self._matters(old, values)
            reason = "UPDATE: data and old have different lengths, and old has a key or partition column"
            yield from rejected(found.record, pa.array(doubtful), BadRecord.UNSUPPORTED_EVENT, reason)
        else:
            doubtful = uneven
        has_old = updates & (olds == count)
        keep = pa.array(~doubtful)
        found = replace(found, record=found.record.filter(keep), values=found.values.filter(keep))
        count, olds, has_old = count[~doubtful], olds[~doubtful], has_old[~doubtful]
        message = np.repeat(np.arange(len(count)), count)
        place = np.arange(len(message)) - np.repeat(np.cumsum(count) - count, count)
        starts = np.cumsum(olds) - olds
        partner = pa.array(starts[message] + place, mask=~has_old[message], type=pa.int64())
        whole = _without(found.values, "data", "old").take(pa.array(message))
        op = text(at_field(whole, "type"))
        after = at_field(found.values, "data").flatten()
        before = at_field(found.values, "old").flatten().take(partner)
        texts = records.column("value").take(found.record)
        rows = Rows(
            record=found.record.take(pa.array(message)),
            op=op,
            kind=OPERATIONS.kind(op),
            after=after,
            before=before,
            removed=after,
            order=self._images.order(whole, after, before),
            place=pa.array(place, pa.int64()),
            states_null=lambda name: says_null(texts, name).take(pa.array(message)),
            time=epoch(at_field(whole, "es"), 1000),
            unknown=found.unknown,
        )
        yield from self._images.changes(rows, Lacks(texts, "data", after, message, place))

    def _matters(self, old: pa.Array, values: pa.Array) -> npt.NDArray[np.bool_]:
        """Flags the messages whose old images have a column that a -U needs."""
        images, parents = old.flatten(), pc.list_parent_indices(old).to_numpy()
        found = np.zeros(len(old), np.bool_)
        for name in self._kept:
            there = at_field(images, name).is_valid().to_numpy(zero_copy_only=False)
            found[parents[there]] = True
            found |= says_null(values, name).to_numpy(zero_copy_only=False)
        return found


def _has_only_key(tidb: pa.StructArray) -> pa.Array:
    """Flags the messages of TiCDC whose rows have only their key: the rest was too large for Kafka."""
    only_key = pc.is_in(text(at_field(tidb, "onlyHandleKey")), value_set=pa.array(["true"]))
    return pc.or_(only_key, at_field(tidb, "claimCheckLocation").is_valid())


def _without(message: pa.StructArray, *names: str) -> pa.StructArray:
    """The messages without the fields `names`. The caller repeats each message for each of its rows; with the rows in
    it, the result would grow with the square of their number.
    """
    fields = [part for part in message.type if part.name not in names]
    return pa.StructArray.from_arrays([at_field(message, part.name) for part in fields], fields=fields)


def _without_rows(data: pa.Array) -> pa.Array:
    """Flags the messages that have no rows, or null instead of a row."""
    empty = pc.fill_null(pc.equal(pc.list_value_length(data), 0), True).to_numpy(zero_copy_only=False).copy()
    rows = data.flatten()
    if rows.null_count:
        empty[pc.list_parent_indices(data).to_numpy()[rows.is_null().to_numpy(zero_copy_only=False)]] = True
    return pa.array(empty)


def _spell(column: ColumnSpec, values: pa.Array) -> Spelled:
    if is_binary(column) and not pa.types.is_null(values.type):
        decoded, misfits = latin1(text(values))
        return Wire(decoded, WireType("bytes")), misfits, "has characters that are not bytes"
    return Wire(values), None, ""


def latin1(texts: pa.Array) -> tuple[pa.Array, pa.Array]:
    """The bytes that ISO 8859-1 characters stand for, and a mask of the texts with other characters. These are null in
    the result.
    """
    binary = texts.cast(pa.binary())
    _, offsets, data = binary.buffers()
    bounds = np.frombuffer(offsets, np.int32)[binary.offset : binary.offset + len(binary) + 1]
    octets = np.frombuffer(data or b"", np.uint8)[bounds[0] : bounds[-1]]
    bounds = bounds - bounds[0]
    follows = (octets & 0xC0) == 0x80
    # a character of two octets: the first octet has the two high bits
    second = octets[follows] & 0x3F | (np.roll(octets, 1)[follows] & 0x03) << 6
    kept = octets.copy()
    kept[follows] = second
    wide = np.concatenate([[0], np.cumsum(octets > 0xC3)])  # begins a character beyond U+00FF
    kept_before = np.concatenate([[0], np.cumsum(octets < 0xC0)])
    misfits = (wide[bounds[1:]] > wide[bounds[:-1]]) & binary.is_valid().to_numpy(zero_copy_only=False)
    result = pa.Array.from_buffers(
        pa.binary(),
        len(binary),
        [None, pa.py_buffer(kept_before[bounds].astype(np.int32)), pa.py_buffer(kept[octets < 0xC0])],
    )
    unknown = pa.array(misfits | binary.is_null().to_numpy(zero_copy_only=False))
    return pc.if_else(unknown, pa.scalar(None, pa.binary()), result), pa.array(misfits)
