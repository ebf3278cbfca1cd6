"""Debezium's change events as Avro with schemas in a registry (Confluent's wire format).

    key    00 00000008 02                                                  schema 8: {"id": 1}
    value  00 00000009 00 02 02 06616e6e 02 04041a 02 02 02 066e6577 …      schema 9:
           {"before": null, "after": {"id": 1, "customer": "ann", "amount": 10.50, "qty": 1, "status": "new",
            "created_at": "2026-01-02T03:04:05.123456Z", "updated_at": 1767323045123456},
            "source": {"lsn": 27657456, …}, "transaction": null, "op": "r", "ts_ms": 1795245173708}

`changelog.formats.debezium` says what the operations mean. A tombstone (null value) right after its `d` is ignored,
since the `d` has already deleted the row; one without a `d` deletes by the message's key, as a `d` without a row does.
The schemas say how values are encoded, so only the registry's options are needed (`changelog.parse.schema_registry`).

With `flattened: true` the messages are rows that the transform `ExtractNewRecordState` made. A row is a +U, unless
`__op` says otherwise. If `__deleted` is true or `__op` is d, the row is a -D. A tombstone is a -D of the message's key.
The names of such added fields begin with `add.fields.prefix` (`__`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from changelog.changes import Changes, Rejected, Wire
from changelog.formats import debezium
from changelog.formats.debezium import Befores, Events, Images
from changelog.formats.row_images import first
from changelog.key_values import KeyReader
from changelog.message_keys import MessageKeys
from changelog.parse import avro_records, schema_registry
from changelog.parse.avro_body import Want
from changelog.parse.avro_records import AvroReader, Path, Read, RefusedError
from changelog.parse.avro_schema import Node
from changelog.parse.schema_registry import Schemas
from changelog.rows import BadRecord
from changelog.source_tables import Found
from changelog.spec import ChangelogSpec

_SOURCE_TIME: tuple[Path, ...] = (("source", "ts_us"), ("source", "ts_ms"), ("ts_ms",))


class DebeziumAvro(debezium.DebeziumFormat):
    """Decodes Debezium records.

    :param spec: the table.
    :param schemas: returns the source of schemas; None means the registry in the spec's options.
    """

    REQUIRED = schema_registry.REQUIRED
    OPTIONS: Mapping[str, tuple[str, ...]] = {**schema_registry.OPTIONS, **debezium.DebeziumFormat.OPTIONS}

    def __init__(self, spec: ChangelogSpec, schemas: Callable[[], Schemas] | None = None) -> None:
        schemas = schemas or avro_records.registry(spec)
        super().__init__(spec, KeyReader(spec, schemas=schemas), MessageKeys(schemas))
        self._columns = [column.field for column in spec.columns]
        self._order = avro_records.order_paths(spec)
        self._prefix = str(spec.options.get("add.fields.prefix", "__"))
        self._added = debezium.added_fields(spec, self._prefix)
        # a prefix tells the transform's fields from the row's
        self._names = debezium.added_names(spec, self._prefix) if self._prefix else {}
        self._messages = AvroReader(schemas, self._row_plan if self._flattened else self._plan)
        self._befores = AvroReader(schemas, self._before_plan)

    def _changes(self, records: pa.RecordBatch) -> Iterator[Found]:
        for found in self._messages.read(records.column("value")):
            if isinstance(found, Rejected):
                yield found
            else:
                yield from self._rows(found, records) if self._flattened else self._events(found, records)

    def _plan(self, schema: Node) -> Want:
        op = schema.value.fields.get("op")
        if op is None or op.value.kind not in ("string", "enum"):
            raise RefusedError(BadRecord.UNKNOWN_OPERATION, "the event has no op")
        kept = [c.field for c in self._spec.columns if c.name in self._spec.kept_by_removals]
        paths: list[Path] = [("op",), *(("after", field) for field in self._columns), *(("before", f) for f in kept)]
        paths += [place for path in self._order for place in _places(path)]
        paths += [("source", name) for name in debezium.fields_of_source(self._spec)]
        if "_ts" in self._spec.read_metadata:
            paths += _SOURCE_TIME
        want = avro_records.wanted(schema, paths)
        # read an empty struct at least: it tells whether the event has a row, even if no field of the row is a column
        sides = (side for side in ("before", "after") if side in schema.value.fields)
        return {side: {} for side in sides if schema.value.fields[side].value.kind == "record"} | want

    def _before_plan(self, schema: Node) -> Want:
        return avro_records.wanted(schema, [("before", field) for field in self._columns])

    def _events(self, found: Read, records: pa.RecordBatch) -> Iterator[Found]:
        yield from debezium.about_source(self._spec, found.record, lambda name: found.array(("source", name)))
        op = found.wire(("op",))
        assert op is not None
        metadata = {"_op": op.values} if "_op" in self._spec.read_metadata else {}
        if "_ts" in self._spec.read_metadata:
            metadata["_ts"] = _source_time(found, _SOURCE_TIME)
        order = [_first(found, path) for path in self._order]
        events = Events(found.record, op.values, _images(found, "before"), _images(found, "after"), order, metadata)
        row = found.schema.value.fields.get("after")
        unknown = avro_records.unknown(row, self._columns) if row is not None else {}
        missing = avro_records.missing(row, self._columns) if row is not None else ()
        for part in self._with_keys(events, records.column("key")):
            for change in debezium.changes(self._spec, part, self._whole_before(records, part), records):
                yield replace(change, unknown=unknown, missing=missing) if isinstance(change, Changes) else change

    def _whole_before(self, records: pa.RecordBatch, events: Events) -> Befores:
        def befores(rows: pa.Array) -> Iterator[tuple[pa.Array, Images]]:
            for found in self._befores.read(records.column("value").take(events.record.take(rows))):
                if isinstance(found, Read):
                    yield found.record, _images(found, "before")

        return befores

    def _row_plan(self, schema: Node) -> Want:
        if schema.value.kind != "record":
            raise RefusedError(
                BadRecord.UNPARSEABLE, f"the value is Avro of type {schema.value.kind}, expected a record"
            )
        added = [(self._prefix + "op",), (self._prefix + "deleted",), *self._row_times]
        added += [(name,) for names in self._names.values() for name in names]
        return avro_records.wanted(schema, [*((field,) for field in self._columns), *self._order, *added])

    def _added_name(self, found: Read, name: str) -> pa.Array | None:
        arrays = [array for field in self._names[name] if (array := found.array((field,))) is not None]
        return first(*arrays) if arrays else None

    @property
    def _row_times(self) -> list[Path]:
        return [(self._prefix + name,) for name in debezium.ADDED_TIMES] if "_ts" in self._spec.read_metadata else []

    def _rows(self, found: Read, records: pa.RecordBatch) -> Iterator[Found]:
        count = len(found.record)
        if self._names:
            yield from debezium.about_source(self._spec, found.record, lambda name: self._added_name(found, name))
        deleted = pc.equal(_text(found.array((self._prefix + "deleted",)), count), "true")
        said = pc.coalesce(_text(found.array((self._prefix + "op",)), count), "u")
        op = pc.if_else(pc.fill_null(deleted, False), "d", said)
        metadata = {"_op": op} if "_op" in self._spec.read_metadata else {}
        if self._row_times:
            metadata["_ts"] = _source_time(found, self._row_times)
        wires = {field: found.wire((field,)) for field in self._columns}
        fields = {field: wire for field, wire in wires.items() if wire is not None}
        order = [found.wire(path) or Wire(pa.nulls(count)) for path in self._order]
        # there is only one image: `before` for a delete, `after` for all other operations
        before, after = Images(pc.equal(op, "d"), fields), Images(pa.repeat(True, count), fields)
        new = avro_records.unknown(found.schema, self._columns)
        new = {name: wire_type for name, wire_type in new.items() if not self._added(name)}
        missing = avro_records.missing(found.schema, self._columns)
        events = Events(found.record, op, before, after, order, metadata)
        for change in debezium.changes(self._spec, events, debezium.own_befores(events), records):
            yield replace(change, unknown=new, missing=missing) if isinstance(change, Changes) else change

    def _with_keys(self, events: Events, keys: pa.Array) -> Iterator[Events]:
        """The events, in several parts. A delete without a row gets the message's key as its row, if there is a key."""
        headless = pc.and_not(pc.equal(events.op, "d"), events.before.present)
        if not pc.any(headless).as_py():
            yield events
            return
        yield events.taken(pa.array(np.flatnonzero(pc.fill_null(pc.invert(headless), True))))
        removed = events.taken(pa.array(np.flatnonzero(pc.fill_null(headless, False))))
        for keyed in self._keys.read(keys.take(removed.record)):
            if isinstance(keyed, Rejected):
                yield removed.taken(keyed.record)  # without a row
            else:
                rows, key = keyed
                yield replace(removed.taken(rows), before=Images(pa.repeat(True, len(rows)), key))


def _images(found: Read, side: str) -> Images:
    image = found.array((side,))
    if image is None:
        return Images(pa.repeat(False, len(found.record)), {})
    wires = {name: found.wire((side, name)) for name in image.type.names}
    return Images(image.is_valid(), {name: wire for name, wire in wires.items() if wire is not None})


def _places(path: Path) -> list[Path]:
    """The paths where the value of an order column may be: first in the event, then in the rows `after` and
    `before`.
    """
    in_event = [] if path[0] in ("before", "after", "op") else [path]
    return [*in_event, ("after", *path), ("before", *path)]


def _first(found: Read, path: Path) -> Wire:
    """For each row, the first value that isn't null. Only values of one type count: the type of the first place that
    the schema has.
    """
    wires = [wire for wire in map(found.wire, _places(path)) if wire is not None]
    alike = [wire.values for wire in wires if wire.values.type == wires[0].values.type]
    if not alike:
        return Wire(pa.nulls(len(found.record)))
    return Wire(pc.coalesce(*alike) if len(alike) > 1 else alike[0], wires[0].type)


def _text(values: pa.Array | None, count: int) -> pa.Array:
    """Strings, and booleans as text. Values of other types become null."""
    if values is not None and (pa.types.is_string(values.type) or pa.types.is_boolean(values.type)):
        return values.cast(pa.string())
    return pa.nulls(count, pa.string())


def _source_time(found: Read, paths: Sequence[Path]) -> pa.Array:
    return debezium.source_time(len(found.record), ((path[-1], found.array(path)) for path in paths))
