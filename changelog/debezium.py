"""What Debezium's events mean, however they are spelled (JSON, Avro).

| op   | changelog rows                                                                                                     |
|------|--------------------------------------------------------------------------------------------------------------------|
| r, c | +I of `after` (r is a snapshot read of the source)                                                                 |
| u    | +U of `after`; before it -U of `before`, if the event has one and it matters (changelog mode, or the key changed)  |
| d    | -D of `before`, of which only the key is relied upon (REPLICA IDENTITY DEFAULT sends no more)                      |
| t    | a bad record: a TRUNCATE removes rows that no key names                                                            |
| m    | ignored: a logical decoding message changes no row                                                                 |
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from changelog.changes import Changes, Rejected, Wire
from changelog.row_images import differ, epoch
from changelog.rows import BadRecord, RowKind
from changelog.spec import ChangelogSpec

PLACEHOLDER = "__debezium_unavailable_value"
"""What Debezium sends for a value that an update left as it was and the database didn't log (Postgres: TOAST)."""

_IN_BYTES = "X19kZWJleml1bV91bmF2YWlsYWJsZV92YWx1ZQ=="
_TEXTS = (PLACEHOLDER, _IN_BYTES, json.dumps([PLACEHOLDER]), f'{{"{PLACEHOLDER}":"{PLACEHOLDER}"}}')


@dataclass(frozen=True)
class Images:
    """One side of n events: whether there is a row (bool), and its fields."""

    present: pa.Array
    fields: Mapping[str, Wire]


@dataclass(frozen=True)
class Events:
    """n events of one spelling.

    :param record: int64; rows of the raw batch. :param op: string.
    :param order: values of the spec's `order_by`. :param metadata: as in `Changes`.
    """

    record: pa.Array
    op: pa.Array
    before: Images
    after: Images
    order: Sequence[Wire] = ()
    metadata: Mapping[str, pa.Array] | None = None


def changes(spec: ChangelogSpec, events: Events) -> Iterator[Changes | Rejected]:
    """What `events` do to the table's rows."""
    op = events.op
    inserts = _is(op, "r", "c")
    updates = _is(op, "u")
    deletes = _is(op, "d")
    sets = pc.or_(inserts, updates)
    yield from _unknown_operations(events, pc.or_(sets, deletes))
    yield from _without_image(events, pc.and_not(sets, events.after.present), "after")
    yield from _without_image(events, pc.and_not(deletes, events.before.present), "before")

    sets = pc.and_(sets, events.after.present)
    kinds = pc.if_else(
        inserts, pa.scalar(int(RowKind.INSERT), pa.int8()), pa.scalar(int(RowKind.UPDATE_AFTER), pa.int8())
    )
    columns = [column.field for column in spec.columns]
    yield from _changes(events, sets, events.after, kinds, columns, 1)

    replaced = pc.and_(updates, events.before.present)
    if not spec.trust_before:
        replaced = pc.and_(replaced, _key_changed(spec, events))
    kept = [column.field for column in spec.columns if column.name in spec.kept_by_removals]
    yield from _changes(events, replaced, events.before, int(RowKind.UPDATE_BEFORE), kept, 0)
    removed = pc.and_(deletes, events.before.present)
    yield from _changes(events, removed, events.before, int(RowKind.DELETE), kept, 1)


def _changes(
    events: Events, mask: pa.Array, images: Images, kind: pa.Array | int, names: Sequence[str], after: int
) -> Iterator[Changes | Rejected]:
    """The images where `mask`; those with a placeholder among the fields `names` are rejected."""
    fields = {name: wire for name, wire in images.fields.items() if name in names}
    for name, wire in fields.items():
        unavailable = _is_unavailable(wire.values)
        if unavailable is not None and pc.any(unavailable := pc.and_(mask, unavailable)).as_py():
            reason = f"column {name}: the source didn't send the unchanged value"
            yield Rejected(events.record.filter(unavailable), BadRecord.UNAVAILABLE_VALUE, reason)
            mask = pc.and_not(mask, unavailable)
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
        after=after,
        snapshot=where(_is(events.op, "r")),
        metadata={name: where(values) for name, values in (events.metadata or {}).items()},
    )


def _repeated(kind: pa.Array | int, count: int) -> pa.Array:
    return pa.repeat(pa.scalar(kind, pa.int8()), count) if isinstance(kind, int) else kind


def _is(op: pa.Array, *values: str) -> pa.Array:
    return pc.is_in(op, value_set=pa.array(values, pa.string()))


def _unknown_operations(events: Events, known: pa.Array) -> Iterator[Rejected]:
    rest = pc.and_not(pc.invert(known), _is(events.op, "m"))
    if not pc.any(rest).as_py():
        return
    op, record = events.op.filter(rest), events.record.filter(rest)
    missing, truncated = op.is_null(), _is(op, "t")
    if pc.any(missing).as_py():
        reason = "the event has no op; is this a Debezium change event?"
        yield Rejected(record.filter(missing), BadRecord.UNKNOWN_OPERATION, reason)
    if pc.any(truncated).as_py():
        reason = "TRUNCATE: no key says which rows it removed; empty the table by hand"
        yield Rejected(record.filter(truncated), BadRecord.UNSUPPORTED_EVENT, reason)
    others = pc.invert(pc.or_(missing, truncated))
    if pc.any(others).as_py():
        reasons = pc.binary_join_element_wise("op is '", op.filter(others), "'; expected one of r, c, u, d, t, m", "")
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


def _is_unavailable(values: pa.Array) -> pa.Array | None:
    """Which values are the placeholder; None if their type can't hold it."""
    if pa.types.is_string(values.type):
        return pc.is_in(values, value_set=pa.array(_TEXTS))
    if pa.types.is_binary(values.type):
        return pc.is_in(values, value_set=pa.array([PLACEHOLDER.encode()]))
    if pa.types.is_list(values.type) and pa.types.is_string(values.type.value_type):
        return pc.fill_null(pc.equal(pc.binary_join(values, "\n"), PLACEHOLDER), False)
    if pa.types.is_map(values.type) and pa.types.is_string(values.type.key_type):
        return pc.map_lookup(values, pa.scalar(PLACEHOLDER), "first").is_valid()
    return None


def source_time(count: int, places: Iterable[tuple[str, pa.Array | None]]) -> pa.Array:
    """When n changes were committed at the source, as timestamp[us, UTC], where any of the places says it; the first one counts.

    :param places: names of fields, which end with `_us` or `_ms`, and their values. Others than int64 are left out.
    """
    result = pa.nulls(count, pa.timestamp("us", "UTC"))
    for name, values in places:
        if values is not None:
            result = pc.coalesce(result, epoch(values, 1 if name.endswith("_us") else 1000))
    return result
