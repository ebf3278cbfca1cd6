"""Plain Avro rows with schemas in a registry (Confluent's wire format). Each message is the new row of its key.

    key    00 00000008 02                                        schema 8: {"id": 1}
    value  00 00000009 02 06 616e6e 02 04 041a                   schema 9: {"id": 1, "customer": "ann", "amount": 10.50}

with schema 9

    {"type": "record", "name": "Order", "fields": [
      {"name": "id", "type": "long"}, {"name": "customer", "type": "string"},
      {"name": "amount", "type": ["null", {"type": "bytes", "logicalType": "decimal", "precision": 12, "scale": 2}]}]}

A record is a +U (in mode append a +I). Key columns that it lacks are read from the message's key, as with ksqlDB.

| message            | change |
|--------------------|---|
| a record           | +U of the record, or +I |
| a null (tombstone) | -D of the message's key: a record's fields, or the value of the only key column |

For rows that Debezium's `ExtractNewRecordState` made, with fields such as `__deleted`, use `debezium-avro` with
`flattened: true`. `changelog.parse.schema_registry` describes the `format_options`, and `changelog.parse.avro_schema`
the types.
`order_by` names fields of the row. A tombstone has no row, so only key columns can order it.
"""

from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa

from changelog.changes import Changes, Format, MessageKey, Rejected, Wire
from changelog.key_values import KeyReader
from changelog.message_keys import MessageKeys
from changelog.parse import avro_records, schema_registry
from changelog.parse.avro_body import Want
from changelog.parse.avro_records import AvroReader, Read, RefusedError
from changelog.parse.avro_schema import Node
from changelog.parse.schema_registry import Schemas
from changelog.rows import BadRecord, RowKind
from changelog.spec import ChangelogSpec


class Avro(Format):
    """Decodes plain Avro rows.

    :param spec: the table.
    :param schemas: returns the source of schemas; None means the registry in the spec's options.
    """

    REQUIRED = schema_registry.REQUIRED
    STATES_KEY = True
    OPTIONS = schema_registry.OPTIONS

    def __init__(self, spec: ChangelogSpec, schemas: Callable[[], Schemas] | None = None) -> None:
        super().__init__(spec)
        schemas = schemas or avro_records.registry(spec)
        self._columns = [column.field for column in spec.columns]
        self._key = [column.field for column in spec.columns if column.name in spec.key]
        self._order = avro_records.order_paths(spec)
        # a record says what a row is from now on, and not whether there was one before
        self._kind = RowKind.INSERT if spec.inserts_only else RowKind.UPDATE_AFTER
        self._rows = AvroReader(schemas, self._plan)
        self._keys = KeyReader(spec, schemas=schemas)
        self._message_keys = MessageKeys(schemas)

    def changes(self, records: pa.RecordBatch) -> Iterator[Changes | Rejected | MessageKey]:
        if not self._spec.inserts_only:
            yield from self._message_keys.stated(records)
        values, keys = records.column("value"), records.column("key")
        tombstones = pa.array(np.flatnonzero(values.is_null()))
        if len(tombstones):
            yield from self._removals(tombstones, keys)
        for found in self._rows.read(values):
            if isinstance(found, Rejected):
                yield found
            else:
                yield from self._upserts(found, keys)

    def _plan(self, schema: Node) -> Want:
        if schema.value.kind != "record":
            raise RefusedError(
                BadRecord.UNPARSEABLE, f"the value is Avro of type {schema.value.kind}, expected a record"
            )
        return avro_records.wanted(schema, [*((field,) for field in self._columns), *self._order])

    def _upserts(self, found: Read, keys: pa.Array) -> Iterator[Changes | Rejected]:
        wires = {field: found.wire((field,)) for field in self._columns}
        fields = {field: wire for field, wire in wires.items() if wire is not None}
        order = [found.wire(path) or Wire(pa.nulls(len(found.record))) for path in self._order]
        unknown = avro_records.unknown(found.schema, self._columns)
        missing = [n for n in avro_records.missing(found.schema, self._columns) if n not in self._key]
        if all(field in fields for field in self._key):
            kind = pa.repeat(pa.scalar(int(self._kind), pa.int8()), len(found.record))
            yield Changes(found.record, kind, fields, order, unknown=unknown, missing=missing)
            return
        for keyed in self._keys.read(keys.take(found.record)):
            if isinstance(keyed, Rejected):
                yield Rejected(found.record.take(keyed.record), keyed.error_class, keyed.reason)
                continue
            rows, key = keyed
            kind = pa.repeat(pa.scalar(int(self._kind), pa.int8()), len(rows))
            chosen = {field: Wire(wire.values.take(rows), wire.type) for field, wire in fields.items()}
            places = [Wire(wire.values.take(rows), wire.type) for wire in order]
            yield Changes(found.record.take(rows), kind, {**key, **chosen}, places, unknown=unknown, missing=missing)

    def _removals(self, tombstones: pa.Array, keys: pa.Array) -> Iterator[Changes | Rejected]:
        for keyed in self._keys.read(keys.take(tombstones)):
            if isinstance(keyed, Rejected):
                yield Rejected(tombstones.take(keyed.record), keyed.error_class, keyed.reason)
                continue
            rows, key = keyed
            kind = pa.repeat(pa.scalar(int(RowKind.DELETE), pa.int8()), len(rows))
            order = [key.get(".".join(path)) or Wire(pa.nulls(len(rows))) for path in self._order]
            yield Changes(tombstones.take(rows), kind, key, order)
