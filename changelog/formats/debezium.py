"""What Debezium's events mean. The meaning is the same in JSON and Avro.

| op   | changelog rows |
|------|---|
| r, c | +I of `after` (r is a snapshot read of the source) |
| u    | +U of `after`; before it -U of `before`, if the event has it and it is needed (changelog mode, another key) |
| d    | -D of `before`; only its key is used (with REPLICA IDENTITY DEFAULT, `before` has only the key) |
| t    | empties the table (`changelog.rows.TRUNCATE`) |
| m    | ignored: a logical decoding message changes no row |
"""

import base64
import functools
import hashlib
import json
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from changelog.changes import BadOptionError, Changes, Format, Rejected, SnapshotMarks, TableNames, Wire
from changelog.formats.row_images import differ, epoch, truncated
from changelog.key_values import KeyReader
from changelog.message_keys import MessageKeys
from changelog.moves import moved_away
from changelog.parse.avro_records import prefixed
from changelog.rows import BadRecord, RowKind
from changelog.shown_values import shown_texts
from changelog.source_tables import Found, table_names
from changelog.spec import ChangelogSpec
from changelog.values.nested import is_list

UNAVAILABLE = "unavailable.value.placeholder"
"""Name of an option of the format and of the connector. If an update leaves a value unchanged and the database doesn't
log it (Postgres: TOAST, Oracle: LOB), the connector sends this placeholder instead of the value.
"""

FLATTENED = "flattened"
"""Name of an option of the format: messages are rows that the transform `ExtractNewRecordState` made."""

TOMBSTONES = "tombstones"
"""Name of an option of the format: whether a tombstone without its `d` deletes."""

SOURCE_NAMES = ("db", "schema", "table", "collection")
"""Fields of an event's `source` that name its table. MongoDB has collections."""

_FIRST, _LAST = ("first", "first_in_data_collection"), ("last", "last_in_data_collection")
"""What `source.snapshot` says of the first and the last row of a snapshot (`io.debezium.connector.SnapshotRecord`):
those of all its tables, or of one. The rows of an incremental snapshot have no such marks.
"""

ADDED_TIMES = ("source_ts_us", "source_ts_ms", "ts_ms")
"""Fields with times that `ExtractNewRecordState` can add to a row, without their prefix, the most exact one first."""

_POINT = -99_999_999.0
_GEOMETRIES = (
    struct.pack("<BIIdd", 1, 0x20000001, 4326, _POINT, _POINT),
    struct.pack("<BIIdd", 1, 0x20000001, 4326, 179.999999, 89.999999),
    struct.pack("<BIdd", 1, 1, _POINT, _POINT),
)
"""Well-known binary that the connector sends for unavailable geometries, geographies and points."""
_SHORT = 200
"""The JSON text of a point (`wkb`, `srid`, `x` and `y`) has at most this many bytes."""


class _Placeholder:
    """All forms of the placeholder. `io.debezium.connector.postgresql.UnchangedToastedPlaceholder` derives them from
    the bytes of the setting.

    :param setting: text, or `hex:` and hexadecimal digits.
    """

    def __init__(self, setting: str) -> None:
        data = bytes.fromhex(setting.removeprefix("hex:")) if setting.startswith("hex:") else setting.encode()
        text = data.decode(errors="replace")
        digest = hashlib.md5(data, usedforsecurity=False).digest()
        elements = (text, _base64(data), str(UUID(bytes=digest, version=3)))
        integers = np.frombuffer(data, np.int8)  # Java's bytes have a sign
        arrays = ([_json([element]) for element in elements], [_json(integers.tolist())])
        self.text = text
        self._integers = integers.astype(np.float64)
        self._elements = pa.array(elements)
        self._texts = pa.array([text, _base64(data), *chain(*arrays), _json({text: text})])
        self._bytes = pa.array([data], pa.binary())
        self._wkb = "|".join(re.escape(_base64(wkb)) for wkb in _GEOMETRIES)

    def among(self, values: pa.Array) -> pa.Array | None:
        """Flags the values that are the placeholder. None if the type of the values can't hold it, or if surely no
        value is the placeholder.
        """
        dtype = values.type
        if pa.types.is_string(dtype):
            return self._in_texts(values)
        if pa.types.is_binary(dtype):
            return pc.is_in(values, value_set=self._bytes)
        if is_list(dtype):
            return self._in_lists(values)
        if pa.types.is_map(dtype) and pa.types.is_string(dtype.key_type):
            return pc.map_lookup(values, pa.scalar(self.text), "first").is_valid()
        if pa.types.is_struct(dtype) and dtype.get_field_index("wkb") >= 0:
            wkb = pc.struct_field(values, ["wkb"])
            if pa.types.is_string(wkb.type):
                return pc.fill_null(pc.match_substring_regex(wkb, f"^(?:{self._wkb})$"), False)
            return pc.is_in(wkb, value_set=pa.array(_GEOMETRIES, wkb.type)) if pa.types.is_binary(wkb.type) else None
        return None

    def _in_texts(self, values: pa.Array) -> pa.Array:
        found = pc.is_in(values, value_set=self._texts)
        # a search in all objects is slow, and the object of a point is short: so search only short ones
        objects = pc.and_(pc.starts_with(values, "{"), pc.less(pc.binary_length(values), _SHORT))
        rows = np.flatnonzero(pc.fill_null(objects, False))
        if not len(rows):
            return found
        regex = rf'"wkb":"(?:{self._wkb})"'
        marked = found.to_numpy(zero_copy_only=False).copy()
        marked[rows] |= pc.match_substring_regex(values.take(pa.array(rows)), regex).to_numpy(zero_copy_only=False)
        return pa.array(marked)

    def _in_lists(self, values: pa.Array) -> pa.Array | None:
        element = values.type.value_type
        known = {pa.string(): self._elements, pa.binary(): self._bytes}.get(element)
        is_number = pa.types.is_integer(element) or pa.types.is_floating(element) or pa.types.is_decimal(element)
        if known is None and not (is_number and len(self._integers)):
            return None
        length = len(self._integers) if known is None else 1
        rows = np.flatnonzero(pc.fill_null(pc.equal(pc.list_value_length(values), length), False))
        if not len(rows):
            return None
        items = (values if len(rows) == len(values) else values.take(pa.array(rows))).flatten()
        found = np.zeros(len(values), np.bool_)
        if known is not None:
            found[rows] = pc.is_in(items, value_set=known).to_numpy(zero_copy_only=False)
        else:
            numbers = items.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
            found[rows] = (numbers.reshape(-1, length) == self._integers).all(axis=1)
        return pa.array(found)


def placeholder(spec: ChangelogSpec) -> _Placeholder:
    """The placeholder for unavailable values.

    :raises BadOptionError: the option `UNAVAILABLE` is malformed.
    """
    return _placeholder(str(spec.options.get(UNAVAILABLE, "__debezium_unavailable_value")))


@cache
def _placeholder(setting: str) -> _Placeholder:
    try:
        return _Placeholder(setting)
    except ValueError:
        raise BadOptionError(f"format_options: {UNAVAILABLE}: expected hexadecimal digits after hex:") from None


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


@dataclass(frozen=True)
class Images:
    """One side (before or after) of n events: whether the event has a row (bool), and the fields of the row."""

    present: pa.Array
    fields: Mapping[str, Wire]


@dataclass(frozen=True)
class Events:
    """n events of one spelling.

    :param record: int64; row numbers in the raw batch.
    :param op: string; the operation.
    :param before: the rows before the change.
    :param after: the rows after the change.
    :param order: values of the spec's `order_by` columns.
    :param metadata: as in `Changes`.
    """

    record: pa.Array
    op: pa.Array
    before: Images
    after: Images
    order: Sequence[Wire] = ()
    metadata: Mapping[str, pa.Array] | None = None

    def taken(self, rows: pa.Array) -> "Events":
        """The events with these row numbers (int64)."""

        def images(side: Images) -> Images:
            return Images(side.present.take(rows), {name: taken(wire) for name, wire in side.fields.items()})

        def taken(wire: Wire) -> Wire:
            return Wire(wire.values.take(rows), wire.type)

        return Events(
            record=self.record.take(rows),
            op=self.op.take(rows),
            before=images(self.before),
            after=images(self.after),
            order=[taken(wire) for wire in self.order],
            metadata={name: values.take(rows) for name, values in (self.metadata or {}).items()},
        )


Befores = Callable[[pa.Array], Iterator[tuple[pa.Array, Images]]]
"""Gives the rows before some events with all columns, in several parts.

Takes row numbers of the events (int64). Each part has places in them (int64), and their images. Images that can't be
read are left out.
"""


def own_befores(events: Events) -> Befores:
    """For events that have all columns in their rows before."""

    def befores(rows: pa.Array) -> Iterator[tuple[pa.Array, Images]]:
        yield pa.array(np.arange(len(rows))), events.taken(rows).before

    return befores


def changes(
    spec: ChangelogSpec, events: Events, befores: Befores | None = None, records: pa.RecordBatch | None = None
) -> Iterator[Changes | Rejected]:
    """The changes that `events` make to the table's rows.

    :param befores: reads the images of removed rows that may have gone to another key (`changelog.moves`).
    :param records: the raw records of the events. They must be given with `befores`.
    """
    op = events.op
    inserts = _is(op, "r", "c")
    updates = _is(op, "u")
    deletes = _is(op, "d")
    sets = pc.or_(inserts, updates)
    truncates = _is(op, "t")
    if pc.any(truncates).as_py():
        order = [Wire(wire.values.filter(truncates), wire.type) for wire in events.order]
        yield truncated(events.record.filter(truncates), order)
    yield from _unknown_operations(spec, events, pc.or_(sets, deletes))
    cells = pc.and_(pc.or_(sets, deletes), _has_cells(spec, events))
    if pc.any(cells).as_py():
        reason = f"key {', '.join(spec.key)}: an object {{value, set}}, expected a value"
        yield Rejected(events.record.filter(cells), BadRecord.TYPE_MISMATCH, reason)
        sets, deletes = pc.and_not(sets, cells), pc.and_not(deletes, cells)
    yield from _without_image(events, pc.and_not(sets, events.after.present), "after")
    yield from _without_image(events, pc.and_not(deletes, events.before.present), "before")

    sets = pc.and_(sets, events.after.present)
    kinds = pc.if_else(
        inserts, pa.scalar(int(RowKind.INSERT), pa.int8()), pa.scalar(int(RowKind.UPDATE_AFTER), pa.int8())
    )
    columns = [column.field for column in spec.columns]
    unavailable = placeholder(spec)
    replaced = pc.and_(updates, events.before.present)
    may_lack = None
    key_changed = pc.and_(replaced, _key_changed(spec, events))
    if spec.keeps_unavailable:
        may_lack = _MayLack(pc.and_not(updates, key_changed), inserts, frozenset(spec.key_fields))
    yield from _changes(events, sets, events.after, kinds, columns, 1, unavailable, may_lack)

    if not spec.trust_before:
        replaced = key_changed
    kept = [column.field for column in spec.columns if column.name in spec.kept_by_removals]
    removed = pc.and_(deletes, events.before.present)
    if befores is not None and records is not None:
        moving = np.flatnonzero(key_changed)
        deleted = np.flatnonzero(removed)
        if len(deleted):
            deleted = deleted[_before_another(records, events, events.record.to_numpy()[deleted])]
            moving = np.union1d(moving, deleted)
        done = np.zeros(len(op), np.bool_)
        for places, images in befores(pa.array(moving)) if len(moving) else ():
            rows = moving[places.to_numpy()]
            done[rows] = images.present.to_numpy(zero_copy_only=False)
            yield from _moving(events.taken(pa.array(rows)), images, columns, kept, unavailable)
        if len(moving):
            replaced, removed = (pc.and_not(flags, pa.array(done)) for flags in (replaced, removed))
    yield from _changes(events, replaced, events.before, int(RowKind.UPDATE_BEFORE), kept, 0, unavailable)
    yield from _changes(events, removed, events.before, int(RowKind.DELETE), kept, 1, unavailable)


def _moving(
    events: Events, images: Images, columns: Sequence[str], kept: Sequence[str], sought: _Placeholder
) -> Iterator[Changes | Rejected]:
    """Removals with all columns. Only the columns `kept` must have values.

    :param images: the events' rows before.
    """
    fields = dict(images.fields)
    for name, wire in fields.items():
        unavailable = sought.among(wire.values) if name not in kept else None
        if unavailable is not None:
            fields[name] = Wire(pc.if_else(unavailable, pa.scalar(None, wire.values.type), wire.values), wire.type)
    for operation, kind, place in (("u", RowKind.UPDATE_BEFORE, 0), ("d", RowKind.DELETE, 1)):
        mask = pc.and_(_is(events.op, operation), images.present)
        yield from _changes(events, mask, Images(images.present, fields), int(kind), columns, place, sought)


def _has_cells(spec: ChangelogSpec, events: Events) -> pa.Array:
    """Flags the events that have objects {value, set} as values (`changelog.foreign_messages`), by their key. In a text
    column such an object would be taken for a text, and a cell that an update left unchanged is null.
    """
    found = pa.repeat(False, len(events.op))
    for wire in (images.fields.get(name) for images in (events.before, events.after) for name in spec.key_fields):
        if wire is not None and pa.types.is_string(wire.values.type):
            found = pc.or_(found, pc.fill_null(pc.match_substring_regex(wire.values, r'^\{"value":.*"set":'), False))
        elif (
            wire is not None and pa.types.is_struct(wire.values.type) and {"value", "set"} <= {*wire.values.type.names}
        ):
            found = pc.or_(found, wire.values.is_valid())
    return found


def deleted(changes: Changes) -> npt.NDArray[np.int64]:
    """Row numbers of the events that are deletes."""
    found: npt.NDArray[np.int64] = changes.record.filter(pc.equal(changes.kind, int(RowKind.DELETE))).to_numpy()
    return found


def is_flattened(spec: ChangelogSpec) -> bool:
    """Whether messages are rows that the transform `ExtractNewRecordState` made of events."""
    return spec.options.get(FLATTENED) == "true"


def _before_another(records: pa.RecordBatch, events: Events, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Whether each delete may be half of a move: it says so, or the next record that isn't its tombstone may insert.

    :param records: raw records (`RAW_SCHEMA`).
    :param events: some of them, or all.
    :param rows: row numbers of the deletes.
    """
    count = len(records)
    empty = np.append(records.column("value").is_null().to_numpy(zero_copy_only=False), [False, False])
    after = rows + 1
    after += empty[after]
    inserts = np.append(~empty[:count], [False, False])
    inserts[events.record.filter(_is(events.op, "u", "d")).to_numpy()] = False
    followed: npt.NDArray[np.bool_] = inserts[after] | moved_away(records)[rows]
    return followed


class Tombstones:
    """Finds those tombstones that delete a row, batch by batch: the ones that don't come right after a delete of the
    same key. Usually a `d` comes right before, and has deleted the row, or has left it alone since it was about another
    row that went on from there. But Kafka's compaction, or a filter, may drop the `d` and keep the tombstone. If
    nothing comes before one that says that its row goes on (`MOVED_AWAY`), its `d` was in an earlier micro-batch.

    Among flattened rows a tombstone may be all that says that a row was deleted. Others are ignored without a key, and
    if `order_by` is set: they have no order value; or if the topic has several tables: nothing says of which one a
    tombstone is.
    """

    def __init__(self, spec: ChangelogSpec) -> None:
        self._spec = spec
        self._before: pa.Table | None = None
        self._batch: pa.Table | None = None

    def lone(self, records: pa.RecordBatch, deletes: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
        """Row numbers of a batch's tombstones that delete a row.

        :param records: raw records (`RAW_SCHEMA`), the next ones of the task; or the same ones again, without messages
            of other tables.
        :param deletes: row numbers of those that delete a row.
        """
        spec, nothing = self._spec, np.empty(0, np.int64)
        if not len(records):
            return nothing
        rows, moved = np.flatnonzero(records.column("value").is_null()), moved_away(records)
        deleted = np.zeros(len(records), np.bool_)
        deleted[np.concatenate([rows[moved[rows]], *deletes])] = True  # a producer may send a tombstone twice
        known = pa.table(
            {name: records.column(name) for name in ("key", "source", "partition", "offset")}
            | {"moved": pa.array(moved), "deleted": pa.array(deleted)}
        )
        earlier = self._come_before(known)
        if not is_flattened(spec):
            rows = rows[records.column("key").take(pa.array(rows)).is_valid().to_numpy(zero_copy_only=False)]
            if spec.is_mixed or spec.inserts_only or spec.stated_order:
                return nothing
        if not len(rows) or spec.options.get(TOMBSTONES) == "ignore":
            return nothing
        if earlier is not None:
            known, rows = pa.concat_tables([earlier, known]), rows + 1
        here, before = known.take(pa.array(rows)), known.take(pa.array(np.maximum(rows - 1, 0)))
        same_partition = pc.equal(before.column("partition"), here.column("partition"))
        same_partition = pc.and_(pc.fill_null(same_partition, False), pa.array(rows > 0))
        # between two that say so, there may be the mark of a transaction of the producer
        next_to = pc.or_(
            pc.equal(pc.add(before.column("offset"), 1), here.column("offset")),
            pc.and_(before.column("moved"), here.column("moved")),
        )
        same_key = pc.equal(before.column("key"), here.column("key"))
        follows = functools.reduce(pc.and_, [before.column("deleted"), same_partition, same_key, next_to])
        if not is_flattened(spec):
            begins = pc.invert(same_partition)
            follows = pc.or_(pc.fill_null(follows, False), pc.and_(here.column("moved"), begins))
        lone: npt.NDArray[np.int64] = rows[~pc.fill_null(follows, False).to_numpy()]
        return lone - (0 if earlier is None else 1)

    def _come_before(self, batch: pa.Table) -> pa.Table | None:
        """The record before a batch, and note the batch."""
        if self._batch is None:
            self._batch = batch
        elif not _has(self._batch, batch.slice(0, 1)):
            self._before, self._batch = self._batch.slice(len(self._batch) - 1), batch
        return self._before


def _has(batch: pa.Table, record: pa.Table) -> bool:
    """Whether a record is one of a batch, by its place in a topic."""
    same = (pc.equal(batch.column(name), record.column(name)[0]) for name in ("source", "partition", "offset"))
    return bool(pc.any(functools.reduce(pc.and_, same)).as_py())


def deletes_by_key(
    spec: ChangelogSpec, records: pa.RecordBatch, rows: npt.NDArray[np.int64], keys: KeyReader
) -> Iterator[Changes | Rejected]:
    """Deletes of the rows of tombstones' keys. A key that can't be read is rejected.

    A key of other columns than the table's says nothing of a row, so its tombstone is ignored: it may have come right
    after its `d`, in an earlier batch. Not so among flattened rows.

    :param records: raw records (`RAW_SCHEMA`).
    :param rows: row numbers of the tombstones (`Tombstones.lone`).
    """
    if spec.is_mixed and len(rows):
        reason = (
            "a tombstone doesn't say of which table it is, and the topic has several. Let the transform keep deletes "
            "as rows (delete.tombstone.handling.mode: rewrite, and table among its add.fields)"
        )
        yield Rejected(pa.array(rows), BadRecord.OTHER_TABLE, reason)
        return
    for keyed in keys.read(records.column("key").take(pa.array(rows))) if len(rows) else ():
        if isinstance(keyed, Rejected):
            reason = prefixed("a tombstone deletes the row of its key, and can't here: ", keyed.reason)
            yield Rejected(pa.array(rows[keyed.record.to_numpy()]), BadRecord.NULL_KEY, reason)
            continue
        places, fields = keyed
        if not is_flattened(spec):
            whole = functools.reduce(
                pc.and_, (fields[name].values.is_valid() for name in spec.key_fields), pa.repeat(True, len(places))
            )
            places = places.filter(whole)
            fields = {name: Wire(wire.values.filter(whole), wire.type) for name, wire in fields.items()}
        count = len(places)
        op, images = pa.repeat("d", count), Images(pa.repeat(True, count), fields)
        order = [Wire(pa.nulls(count)) for _ in spec.order_fields]
        metadata = {"_op": op} if "_op" in spec.read_metadata else {}
        yield from changes(spec, Events(pa.array(rows[places.to_numpy()]), op, images, images, order, metadata))


@dataclass(frozen=True)
class _MayLack:
    """The events whose rows may lack values: the updates of a row that keeps its key.

    :param events: flags of these events (bool).
    :param inserts: flags of the events that insert.
    :param key: fields of the key, which no row may lack.
    """

    events: pa.Array
    inserts: pa.Array
    key: frozenset[str]


def _changes(
    events: Events,
    mask: pa.Array,
    images: Images,
    kind: pa.Array | int,
    names: Sequence[str],
    place: int,
    sought: _Placeholder,
    may_lack: _MayLack | None = None,
) -> Iterator[Changes | Rejected]:
    """Changes for the images where `mask` is true. An image with a placeholder in one of the fields `names` is
    rejected, unless it may lack the value.
    """
    fields = {name: wire for name, wire in images.fields.items() if name in names}
    lacking: dict[str, pa.Array] = {}
    for name, wire in fields.items():
        unavailable = sought.among(wire.values)
        if unavailable is None or not pc.any(unavailable := pc.and_(mask, unavailable)).as_py():
            continue
        refused = unavailable
        if may_lack is not None and name not in may_lack.key:
            lacking[name] = pc.and_(unavailable, may_lack.events)
            refused = pc.and_not(unavailable, may_lack.events)
        if pc.any(refused).as_py():
            yield Rejected(events.record.filter(refused), BadRecord.UNAVAILABLE_VALUE, _why(name, refused, may_lack))
            mask = pc.and_not(mask, refused)
    for name, flags in lacking.items():
        values = fields[name].values
        fields[name] = Wire(pc.if_else(flags, pa.scalar(None, values.type), values), fields[name].type)
    count = pc.sum(mask).as_py() or 0
    if not count:
        return

    def where(values: pa.Array) -> pa.Array:
        return values if count == len(mask) else values.filter(mask)

    yield Changes(
        record=where(events.record),
        kind=where(_repeated(kind, len(mask))),
        fields={name: Wire(where(wire.values), wire.type) for name, wire in fields.items()},
        order=[Wire(where(wire.values), wire.type) for wire in events.order],
        place=place,
        snapshot=where(_is(events.op, "r")),
        metadata={name: where(values) for name, values in (events.metadata or {}).items()},
        unavailable={name: where(flags) for name, flags in lacking.items()},
    )


def _why(name: str, refused: pa.Array, may_lack: _MayLack | None) -> pa.Array | str:
    """Why events with a placeholder are refused."""
    said = f"column {name}: the source didn't send the unchanged value"
    if may_lack is None or name in may_lack.key:
        return said
    inserted = f"{said} with an insert: if the key changed, it is in the old key's row, which is deleted"
    moved = f"{said}, and the key changed: the value is in the old key's row"
    return pc.if_else(may_lack.inserts.filter(refused), inserted, moved)


def _repeated(kind: pa.Array | int, count: int) -> pa.Array:
    return pa.repeat(pa.scalar(kind, pa.int8()), count) if isinstance(kind, int) else kind


def _is(op: pa.Array, *values: str) -> pa.Array:
    return pc.is_in(op, value_set=pa.array(values, pa.string()))


def _unknown_operations(spec: ChangelogSpec, events: Events, known: pa.Array) -> Iterator[Rejected]:
    rest = pc.and_not(pc.invert(known), _is(events.op, "m", "t"))
    if not pc.any(rest).as_py():
        return
    op, record = events.op.filter(rest), events.record.filter(rest)
    missing = op.is_null()
    if pc.any(missing).as_py():
        reason = "the event has no op"
        yield Rejected(record.filter(missing), BadRecord.UNKNOWN_OPERATION, reason)
    others = pc.invert(missing)
    if pc.any(others).as_py():
        named = shown_texts(op.filter(others), visible=spec.show_values)
        reasons = pc.binary_join_element_wise("op is ", named, "; expected one of r, c, u, d, t, m", "")
        yield Rejected(record.filter(others), BadRecord.UNKNOWN_OPERATION, reasons)


def _without_image(events: Events, mask: pa.Array, side: str) -> Iterator[Rejected]:
    if pc.any(mask).as_py():
        reasons = pc.binary_join_element_wise("op '", events.op.filter(mask), f"' has no {side}", "")
        yield Rejected(events.record.filter(mask), BadRecord.MISSING_COLUMN, reasons)


def _key_changed(spec: ChangelogSpec, events: Events) -> pa.Array:
    changed = pa.repeat(False, len(events.op))
    for column in spec.columns:
        before, after = (images.fields.get(column.field) for images in (events.before, events.after))
        if column.name in spec.key and before is not None and after is not None:
            changed = pc.or_(changed, differ(before.values, after.values))
    return changed


def fields_of_source(spec: ChangelogSpec) -> tuple[str, ...]:
    """The fields of an event's `source` that `about_source` needs."""
    return (*SOURCE_NAMES, "snapshot") if spec.finds_snapshots else SOURCE_NAMES


def about_source(
    spec: ChangelogSpec, record: pa.Array, named: Callable[[str], pa.Array | None]
) -> Iterator[TableNames | SnapshotMarks]:
    """What events say of their tables.

    :param named: returns the values of a field of `source`, if the events have it (`fields_of_source`).
    """
    yield _event_tables(record, named)
    snapshot = named("snapshot") if spec.finds_snapshots else None
    if snapshot is not None and pa.types.is_string(snapshot.type):
        marks = SnapshotMarks(*(record.filter(_is(snapshot, *values)) for values in (_FIRST, _LAST)))
        if len(marks.first) or len(marks.last):
            yield marks


def _event_tables(record: pa.Array, named: Callable[[str], pa.Array | None]) -> TableNames:
    absent = pa.nulls(len(record), pa.string())
    *parts, table, collection = (absent if (found := named(name)) is None else found for name in SOURCE_NAMES)
    tables = [each for each in (table, collection) if pa.types.is_string(each.type)]
    return table_names(record, *parts, pc.coalesce(*tables) if tables else absent)


def added_names(spec: ChangelogSpec, prefix: str) -> Mapping[str, tuple[str, str]]:
    """Field of `source` -> names of the fields in which `ExtractNewRecordState` adds it to a row."""
    return {name: (f"{prefix}source_{name}", f"{prefix}{name}") for name in fields_of_source(spec)}


def added_fields(spec: ChangelogSpec, prefix: str) -> Callable[[str], bool]:
    """A function that tells whether the transform `ExtractNewRecordState` added a field to a row. If the prefix is
    empty, only known names count as added.
    """
    known = {
        "op",
        "deleted",
        "ts_ms",
        "source_ts_ms",
        "source_ts_us",
        *(name.split(".")[0] for name, _ in spec.order_fields),
    }
    return lambda name: name.startswith(prefix) if prefix else name in known


def source_time(count: int, places: Iterable[tuple[str, pa.Array | None]]) -> pa.Array:
    """The times when n changes were committed at the source, as timestamp[us, UTC]. For each change, the first of
    `places` that has a value counts. Null if no place has a value.

    :param count: n.
    :param places: names of fields, which end with `_us` or `_ms`, and their values. Values that aren't int64 are
        ignored.
    """
    result = pa.nulls(count, pa.timestamp("us", "UTC"))
    for name, values in places:
        if values is not None:
            result = pc.coalesce(result, epoch(values, 1 if name.endswith("_us") else 1000))
    return result


class DebeziumFormat(Format):
    """What JSON and Avro have in common."""

    OPTIONS: Mapping[str, tuple[str, ...]] = {
        FLATTENED: ("false", "true"),
        "add.fields.prefix": (),
        TOMBSTONES: ("delete", "ignore"),
        UNAVAILABLE: (),
    }
    STATES_KEY = True
    NAMES_TABLE = True
    MARKS_SNAPSHOTS = True
    MAY_LACK_VALUES = True

    def __init__(self, spec: ChangelogSpec, keys: KeyReader, message_keys: MessageKeys) -> None:
        placeholder(spec)  # raises at once if the option is malformed
        super().__init__(spec)
        self._flattened = is_flattened(spec)
        self._keys = keys
        self._message_keys = message_keys
        self._tombstones = Tombstones(spec)

    def changes(self, records: pa.RecordBatch) -> Iterator[Found]:
        if not self._spec.inserts_only:
            yield from self._message_keys.stated(records)
        deletes = list[npt.NDArray[np.int64]]()
        for found in self._changes(records):
            if isinstance(found, Changes):
                deletes.append(deleted(found))
            yield found
        yield from deletes_by_key(self._spec, records, self._tombstones.lone(records, deletes), self._keys)

    def _changes(self, records: pa.RecordBatch) -> Iterator[Found]:
        """The changes that messages with a value say."""
        raise NotImplementedError
