"""Debezium's change events as JSON, with and without the Kafka Connect schema envelope.

    {"before": null, "after": {"id": 1, "customer": "Ada", "amount": "BNI=", "created_at": 1767323045000000},
     "source": {"lsn": 24023128, …}, "op": "c", "ts_ms": 1767323045123}

`changelog.formats.debezium` says what the operations mean. A tombstone (null value) right after its `d` is ignored,
since the `d` has already deleted the row. With an envelope (`{"schema": …, "payload": …}`), the schema says how values
are encoded. Without an envelope, `format_options` must repeat the connector's settings. With `flattened: true` the
messages are rows that the transform `ExtractNewRecordState` made. The names of fields that the transform added begin
with `add.fields.prefix` (`__`).
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_type

from changelog.changes import Changes, Rejected, Wire, WireType
from changelog.formats import debezium, debezium_rows
from changelog.formats.row_images import TEXT, first
from changelog.key_values import KeyReader
from changelog.message_keys import MessageKeys
from changelog.parse.connect_json import MalformedSchemaError, Rows, by_schema, fields, wire_type, without_null_payloads
from changelog.parse.json_records import JsonReader, Leaf, Object, Parsed, parse
from changelog.paths import at_path, with_path
from changelog.rows import BadRecord
from changelog.source_tables import Found
from changelog.spec import ChangelogSpec, ColumnSpec
from changelog.values import json_candidates, logical, readings, spark_type

_BEFORE = '{"before":'
_CUTS = (',"after":', ',"source":{"version":')
"""The texts at which an event is cut into three parts: `before`, `after`, and the rest."""
_DECIMAL = "org.apache.kafka.connect.data.Decimal"
_MILLISECONDS = "milliseconds"
"""Name of an option: fields whose integers are timestamps in milliseconds, whatever the unit of the others is."""
_SOURCE_TIME = ("source.ts_us", "source.ts_ms", "ts_ms")
_READERS = 64
"""So many schemas are remembered. A topic has a new schema after each change of its table's columns."""

Fields = Mapping[str, WireType]


class DebeziumJson(debezium.DebeziumFormat):
    """Decodes Debezium records."""

    OPTIONS: Mapping[str, tuple[str, ...]] = {
        readings.DECIMALS: ("precise", "string", "double"),
        readings.TIME_UNITS: ("adaptive", "adaptive_time_microseconds", "microseconds", "connect", "isostring"),
        readings.BINARIES: ("bytes", "base64", "base64-url-safe", "hex"),
        _MILLISECONDS: (),
        debezium_rows.ROWS: ("plain", debezium_rows.DOCUMENTS, debezium_rows.CELLS),
        **debezium.DebeziumFormat.OPTIONS,
    }

    def __init__(self, spec: ChangelogSpec) -> None:
        options = debezium_rows.implied_options(spec.options)
        implied = [(c.field, _implied(c.type, c.is_uuid, options)) for c in spec.columns]
        # of several columns of one field, one that says how it is spelled counts
        self._implied = dict(sorted(implied, key=lambda column: column[1] != WireType()))
        in_millis = spec.options.get(_MILLISECONDS, ())
        for name in (in_millis,) if isinstance(in_millis, str) else in_millis:
            self._implied[name] = WireType("int64", "io.debezium.time.Timestamp", setting=readings.TIME_UNITS)
        super().__init__(spec, KeyReader(spec, self._implied), MessageKeys())
        self._readers: dict[bytes, _EventReader | _RowReader] = {}

    def changes(self, records: pa.RecordBatch) -> Iterator[Found]:
        records = debezium_rows.rewritten(self._spec, records)
        for name in ("key", "value"):
            column = without_null_payloads(records.column(name))
            records = records.set_column(records.schema.get_field_index(name), records.schema.field(name), column)
        return super().changes(records)

    def _changes(self, records: pa.RecordBatch) -> Iterator[Found]:
        values = records.column("value")
        rows = np.flatnonzero(values.is_valid())
        for group in by_schema(values.drop_null()):
            if isinstance(group, Rejected):
                yield replace(group, record=pa.array(rows[group.record.to_numpy()]))
                continue
            schema, members, texts = group
            chosen = rows if members is None else rows[members]
            try:
                reader = self._reader(schema)
            except MalformedSchemaError as error:
                yield Rejected(pa.array(chosen), BadRecord.UNPARSEABLE, str(error))
            else:
                yield from reader.changes(records, chosen, texts)

    def _reader(self, schema: bytes) -> "_EventReader | _RowReader":
        if schema not in self._readers:
            if len(self._readers) >= _READERS:
                self._readers.clear()
            made = _RowReader if self._flattened else _EventReader
            self._readers[schema] = made(self._spec, self._implied, self._keys, parse(schema) if schema else None)
        return self._readers[schema]


class _EventReader:
    """Reads events of one schema, or events without a schema (`schema` is None)."""

    def __init__(self, spec: ChangelogSpec, implied: Fields, keys: KeyReader, schema: Any) -> None:
        self._spec = spec
        declared = None if schema is None else _row_types(schema)
        self._types = implied if declared is None else declared
        named = {column.field for column in spec.columns}
        self._unknown = {} if declared is None else {name: t for name, t in declared.items() if name not in named}
        self._missing = _missing(named, declared)
        watched = declared is None and spec.schema_changes != "ignore"
        kept = spec.kept_by_removals
        after: dict[str, Any] = {c.field: _leaf(c, self._types, spec) for c in spec.columns}
        before: dict[str, Any] = {c.field: _leaf(c, self._types) for c in spec.columns if c.name in kept}
        shape: dict[str, Any] = {"op": Leaf((pa.string(),))}
        for name, dtype in spec.order_fields:
            if name.split(".")[0] not in ("before", "after", "op"):
                shape = with_path(shape, name, Leaf(json_candidates(WireType(), to_arrow_type(dtype))))
            leaf = Leaf(json_candidates(_type_at(self._types, name), to_arrow_type(dtype)))
            after = with_path(after, name, leaf)
            before = with_path(before, name, leaf)
        if "_ts" in spec.read_metadata:
            for path in _SOURCE_TIME:
                shape = with_path(shape, path, Leaf((pa.int64(),)))
        for name in debezium.fields_of_source(spec):
            shape = with_path(shape, f"source.{name}", TEXT)
        images = {"before": Object(before), "after": Object(after, watched)}
        self._reader = JsonReader(Object(shape | images))
        self._befores = JsonReader(Object({"before": Object({c.field: _leaf(c, self._types) for c in spec.columns})}))
        self._parts: tuple[JsonReader, ...] = ()
        if watched:
            # each reader also looks for the fields of the other parts, to notice an event that was cut wrongly
            others = shape | dict.fromkeys(images, Leaf((pa.string(),)))
            self._parts = (
                JsonReader(Object(others | {"before": images["before"]}), around=("", "}")),
                JsonReader(Object(others | {"after": images["after"]}), around=("{" + _CUTS[0][1:], "}")),
                JsonReader(Object(others), around=("{" + _CUTS[1][1:], "")),
            )
        self._keys = keys

    def changes(self, records: pa.RecordBatch, rows: Rows, texts: pa.Array) -> Iterator[Found]:
        whole = self._in_parts(texts) if self._parts else None
        for found in self._reader.read(texts) if whole is None else (whole,):
            record = pa.array(rows[found.record.to_numpy()])
            if isinstance(found, Rejected):
                yield Rejected(record, found.error_class, found.reason)
            else:
                values = found.values
                yield from debezium.about_source(self._spec, record, lambda name: at_path(values, f"source.{name}"))  # noqa: B023
                yield from self._events(records, record, found, texts.take(found.record))

    def _in_parts(self, texts: pa.Array) -> Parsed | None:
        """Read events in three parts, if all events look exactly as Debezium writes them; else return None. The result
        is the same as `self._reader` gives.

        To notice new fields, a reader must read all fields. New fields matter only in `after`, but most fields are
        elsewhere. So only the part `after` is read with all fields. This saves more than half of the time.
        """
        try:
            texts = texts.cast(pa.string())
        except pa.ArrowInvalid:
            return None
        if not pc.all(pc.starts_with(texts, _BEFORE)).as_py():
            return None
        parts = _cut(texts)
        if parts is None:
            return None
        read: dict[str, pa.Array] = {}
        unknown: Fields = {}
        for number, (reader, part) in enumerate(zip(self._parts, parts, strict=True)):
            found = list(reader.read(part))
            if len(found) != 1 or isinstance(found[0], Rejected) or len(found[0].record) < len(texts):
                return None
            values = found[0].values
            for name, array in zip(values.type.names, values.flatten(), strict=True):
                if {"before": 0, "after": 1}.get(name, 2) == number:
                    read[name] = array
                elif array.null_count < len(array):
                    return None
            unknown = found[0].unknown or unknown
        record = pa.array(np.arange(len(texts)))
        return Parsed(record, pa.StructArray.from_arrays(list(read.values()), list(read)), unknown)

    def _events(
        self, records: pa.RecordBatch, record: pa.Array, found: Parsed, texts: pa.Array
    ) -> Iterator[Changes | Rejected]:
        values = found.values
        op = values.field("op")
        op = op.cast(pa.string()) if not pa.types.is_string(op.type) else op
        before, after = (_images(values.field(side), self._types) for side in ("before", "after"))
        order = [_first(values, self._places(name)) for name, _ in self._spec.order_fields]
        metadata = {"_op": op} if "_op" in self._spec.read_metadata else {}
        if "_ts" in self._spec.read_metadata:
            metadata["_ts"] = debezium.source_time(
                len(values), ((path, at_path(values, path)) for path in _SOURCE_TIME)
            )
        headless = np.flatnonzero(pc.fill_null(pc.and_not(pc.equal(op, "d"), before.present), False))
        rest = np.ones(len(record), np.bool_)
        owners = records.column("key").take(record.take(pa.array(headless)))
        for keyed in self._keys.read(owners) if len(headless) else ():
            if isinstance(keyed, Rejected):
                continue  # without a row
            # a delete needs only the key, and these messages have a key
            chosen = headless[keyed[0].to_numpy()]
            keys = debezium.Images(pa.repeat(True, len(chosen)), keyed[1])
            rest[chosen] = False
            removed = pa.array(chosen)
            yield from debezium.changes(
                self._spec,
                debezium.Events(record.take(removed), op.take(removed), keys, keys, *_taken(order, metadata, removed)),
            )
        if not rest.all():
            others = pa.array(rest)
            rest_found = replace(found, values=values.filter(others))
            yield from self._events(records, record.filter(others), rest_found, texts.filter(others))
            return

        def befores(rows: pa.Array) -> Iterator[tuple[pa.Array, debezium.Images]]:
            for read in self._befores.read(texts.take(rows)):
                if isinstance(read, Parsed):
                    yield read.record, _images(read.values.field("before"), self._types)

        events = debezium.Events(record, op, before, after, order, metadata)
        for change in debezium.changes(self._spec, events, befores, records):
            if isinstance(change, Changes):
                yield replace(change, unknown=self._unknown or found.unknown, missing=self._missing)
            else:
                yield change

    def _places(self, name: str) -> list[tuple[str, WireType]]:
        """The paths where the value of an order column may be, each with its type there: first in the event, then in
        the rows `after` and `before`.
        """
        side, _, rest = name.partition(".")
        in_event = _type_at(self._types, rest) if side in ("before", "after") else WireType()
        in_row = _type_at(self._types, name)
        return [(name, in_event), (f"after.{name}", in_row), (f"before.{name}", in_row)]


class _RowReader:
    """Reads rows that `ExtractNewRecordState` made of events, all of one schema. A message has the fields of the row,
    and the operation in fields with a prefix.

        {"id": 1, "customer": "Ada", "__op": "u", "__deleted": "false", "__source_ts_ms": 1767323045123}

    A row is a +U, unless `__op` says otherwise. If `__deleted` is true or `__op` is d, the row is a -D. A tombstone is
    a -D of the message's key.
    """

    def __init__(self, spec: ChangelogSpec, implied: Fields, keys: KeyReader, schema: Any) -> None:
        self._spec = spec
        self._prefix = str(spec.options.get("add.fields.prefix", "__"))
        declared = None if schema is None else {name: wire_type(part) for name, part in fields(schema).items()}
        self._types = implied if declared is None else declared
        named = {column.field for column in spec.columns}
        self._added = debezium.added_fields(spec, self._prefix)
        self._unknown = {n: t for n, t in (declared or {}).items() if n not in named and not self._added(n)}
        self._missing = _missing(named, declared)
        shape: dict[str, Any] = {c.field: _leaf(c, self._types, spec) for c in spec.columns}
        for name, dtype in spec.order_fields:
            shape = with_path(shape, name, Leaf(json_candidates(_type_at(self._types, name), to_arrow_type(dtype))))
        shape = with_path(shape, f"{self._prefix}op", Leaf((pa.string(),)))
        shape = with_path(shape, f"{self._prefix}deleted", Leaf((pa.string(), pa.bool_())))
        # a prefix tells the transform's fields from the row's
        self._names = debezium.added_names(spec, self._prefix) if self._prefix else {}
        for names in self._names.values():
            for name in names:
                shape = with_path(shape, name, TEXT)
        for name in self._times:
            shape = with_path(shape, name, Leaf((pa.int64(),)))
        self._reader = JsonReader(Object(shape, declared is None and spec.schema_changes != "ignore"))
        self._keys = keys

    def _added_name(self, values: pa.StructArray) -> Callable[[str], pa.Array]:
        return lambda name: first(*(values.field(field) for field in self._names[name]))

    @property
    def _times(self) -> tuple[str, ...]:
        if "_ts" not in self._spec.read_metadata:
            return ()
        return tuple(f"{self._prefix}{name}" for name in debezium.ADDED_TIMES)

    def changes(self, records: pa.RecordBatch, rows: Rows, texts: pa.Array) -> Iterator[Found]:
        for found in self._reader.read(texts):
            record = pa.array(rows[found.record.to_numpy()])
            if isinstance(found, Rejected):
                yield Rejected(record, found.error_class, found.reason)
                continue
            values = found.values
            if self._names:
                yield from debezium.about_source(self._spec, record, self._added_name(values))
            deleted = values.field(f"{self._prefix}deleted").cast(pa.string())
            said = values.field(f"{self._prefix}op").cast(pa.string())
            op = pc.if_else(pc.fill_null(pc.equal(deleted, "true"), False), "d", pc.coalesce(said, "u"))
            images = _images(values, self._types)
            order = [_first(values, [(name, _type_at(self._types, name))]) for name, _ in self._spec.order_fields]
            metadata = {"_op": op} if "_op" in self._spec.read_metadata else {}
            if self._times:
                metadata["_ts"] = debezium.source_time(
                    len(values), ((path, at_path(values, path)) for path in self._times)
                )
            unknown = self._unknown or {n: t for n, t in found.unknown.items() if not self._added(n)}
            # there is only one image: `before` for a delete, `after` for all other operations
            before = debezium.Images(pc.and_(images.present, pc.equal(op, "d")), images.fields)
            found_events = debezium.Events(record, op, before, images, order, metadata)
            for change in debezium.changes(self._spec, found_events, debezium.own_befores(found_events), records):
                if isinstance(change, Changes):
                    yield replace(change, unknown=unknown, missing=self._missing)
                else:
                    yield change


def _missing(named: Collection[str], declared: Fields | None) -> Sequence[str]:
    return () if declared is None else sorted(name for name in named if name not in declared)


def _cut(texts: pa.Array) -> list[pa.Array] | None:
    """The three parts of each text, without `_CUTS`; None if one of the texts can't be cut."""
    parts, rest = [], texts
    for cut in _CUTS:
        pieces = pc.split_pattern(rest, cut, max_splits=1).flatten()
        if len(pieces) < 2 * len(texts):
            return None
        part, rest = (pieces.take(pa.array(np.arange(number, len(pieces), 2))) for number in range(2))
        parts.append(part)
    return [*parts, rest]


def _leaf(column: ColumnSpec, types: Fields, followed: ChangelogSpec | None = None) -> Leaf:
    """How to read a column's field.

    :param column: the column.
    :param types: type of each field in the messages.
    :param followed: if this spec doesn't ignore schema changes, also read fields of structs that the messages have and
        the column lacks.
    """
    declared, dtype = types.get(column.field, WireType()), column.type
    if followed is not None and followed.schema_changes != "ignore":
        dtype = _with_declared(dtype, declared)
    return Leaf(json_candidates(declared, to_arrow_type(dtype), column.is_uuid))


def _with_declared(dtype: T.DataType, wire: WireType) -> T.DataType:
    """A column's type, with the fields added that only the messages' schema has in its structs. If such a field has a
    value, the column's value doesn't fit.
    """
    if isinstance(dtype, T.ArrayType):
        return T.ArrayType(_with_declared(dtype.elementType, wire.children.get("element", WireType())))
    if not isinstance(dtype, T.StructType) or wire.kind != "struct":
        return dtype
    fields = {f.name: _with_declared(f.dataType, wire.children.get(f.name, WireType())) for f in dtype}
    fields |= {name: spark_type(child) for name, child in wire.children.items() if name not in fields}
    return T.StructType([T.StructField(name, found) for name, found in fields.items()])


def _images(side: pa.StructArray, types: Fields) -> debezium.Images:
    wires = {n: Wire(v, types.get(n, WireType())) for n, v in zip(side.type.names, side.flatten(), strict=True)}
    return debezium.Images(side.is_valid(), wires)


def _taken(
    order: list[Wire], metadata: Mapping[str, pa.Array], rows: pa.Array
) -> tuple[list[Wire], dict[str, pa.Array]]:
    return (
        [Wire(wire.values.take(rows), wire.type) for wire in order],
        {name: values.take(rows) for name, values in metadata.items()},
    )


def _row_types(schema: Any) -> Fields:
    """Field -> type of the row schema in an event's schema.

    :raises MalformedSchemaError: the schema isn't an event's.
    """
    sides = fields(schema)
    row = sides.get("after") or sides.get("before")
    return {} if row is None else wire_type(row).children


def _implied(dtype: T.DataType, is_uuid: bool, options: Mapping[str, Any]) -> WireType:
    """How messages without a schema spell a column, by the connector's settings."""
    if isinstance(dtype, T.ArrayType):
        return WireType("array", children={"element": _implied(dtype.elementType, False, options)})
    if isinstance(dtype, T.MapType):
        return WireType("map", children={"key": WireType("string"), "value": _implied(dtype.valueType, False, options)})
    if isinstance(dtype, T.StructType):
        return WireType("struct", children={f.name: _implied(f.dataType, False, options) for f in dtype.fields})
    if isinstance(dtype, T.DecimalType):
        mode = options.get(readings.DECIMALS)
        if mode in (None, "precise"):
            return WireType("bytes", _DECIMAL, {"scale": str(dtype.scale)}, {}, readings.DECIMALS, mode is None)
        return WireType(setting=readings.DECIMALS)
    if isinstance(dtype, T.DateType | T.TimestampType | T.TimestampNTZType):
        return _implied_time(dtype, str(options.get(readings.TIME_UNITS, "adaptive")))
    if isinstance(dtype, T.BinaryType) and not is_uuid:
        mode = options.get(readings.BINARIES)
        name = mode if mode in (readings.HEX, readings.BASE64_URL) else None
        return WireType("bytes", name, setting=readings.BINARIES, doubtful=mode is None)
    return WireType()


def _implied_time(dtype: T.DataType, mode: str) -> WireType:
    is_date = isinstance(dtype, T.DateType)
    if mode == "isostring":
        return WireType("string", logical.ISO_DATE if is_date else logical.ISO_TIMESTAMP, setting=readings.TIME_UNITS)
    if is_date:
        return WireType("int32", "io.debezium.time.Date", setting=readings.TIME_UNITS)
    name = "org.apache.kafka.connect.data.Timestamp" if mode == "connect" else "io.debezium.time.MicroTimestamp"
    # in both adaptive modes the unit depends on the column's precision in the source, which nothing says here
    return WireType("int64", name, setting=readings.TIME_UNITS, doubtful=mode.startswith("adaptive"))


def _type_at(types: Fields, path: str) -> WireType:
    """The type of the field that a dotted path names in a row."""
    name, _, rest = path.partition(".")
    found = types.get(name, WireType())
    return _type_at(found.children, rest) if rest else found


def _first(values: pa.StructArray, places: Iterable[tuple[str, WireType]]) -> Wire:
    """For each row, the first value that isn't null. Only values of one type count: the type of the first place that
    has any value.

    :param places: paths of fields, and the types of the fields.
    """
    wires = [Wire(found, type_) for path, type_ in places if (found := at_path(values, path)) is not None]
    wires = [wire for wire in wires if wire.values.null_count < len(values)]
    if not wires:
        return Wire(pa.nulls(len(values)))
    return Wire(first(*(wire.values for wire in wires if wire.type == wires[0].type)), wires[0].type)
