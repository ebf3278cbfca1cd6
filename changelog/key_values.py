"""Reads the values of key columns from messages' keys, for changes that have no row. All formats read keys by this.

{"id": 7}                       JSON, with or without Kafka Connect's envelope
00 00000008 0e                  Avro in Confluent's wire format, if the format has a registry
7, "k7", k7                     the value of the only key column (`ExtractField$Key`, `StringConverter`)
Struct{id=7,region=eu}          what `StringConverter` makes of a struct, and {id=7,region=eu} of a map
"""

import json
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_type

from changelog.changes import Rejected, Wire, WireType
from changelog.message_keys import quoted
from changelog.parse import connect_json
from changelog.parse.avro_body import Want
from changelog.parse.avro_records import AvroReader, RefusedError, check, prefixed, wanted
from changelog.parse.avro_schema import Node
from changelog.parse.json_records import JsonReader, Leaf, Object, Rows, parse
from changelog.parse.schema_registry import HEADER_BYTES, Schemas
from changelog.rows import BadRecord
from changelog.spec import ChangelogSpec
from changelog.values import json_candidates
from changelog.values.encoded import is_utf8

Keyed = tuple[pa.Array, Mapping[str, Wire]]
"""Row numbers (int64) of keys, and the values of the key columns by field."""

_SCALAR = r'^\s*(?:-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|"(?:[^"\\]|\\.)*")\s*$'
"""A JSON value that is no object, array or null."""
_READERS = 64
"""So many schemas are remembered. A topic has one for each key that its table has had."""


class KeyReader:
    """Reads key columns from messages' keys.

    :param implied: types of the fields of keys without a schema.
    :param schemas: returns the source of Avro schemas; None if there is no registry.
    """

    def __init__(
        self,
        spec: ChangelogSpec,
        implied: Mapping[str, WireType] | None = None,
        schemas: Callable[[], Schemas] | None = None,
    ) -> None:
        self._columns = {column.field: column for column in spec.columns if column.name in spec.key}
        self._implied = implied or {}
        self._avro = None if schemas is None else AvroReader(schemas, self._plan)
        self._readers: dict[bytes, tuple[Mapping[str, WireType], JsonReader]] = {}

    def read(self, keys: pa.BinaryArray) -> Iterator[Keyed | Rejected]:
        """Read `keys`, which may have nulls. Each key is in one result. A column that a key's object lacks is null."""
        if not self._columns:  # nobody knows the table's key yet
            yield pa.array(np.arange(len(keys))), {}
            return
        missing = keys.is_null()
        if pc.any(missing).as_py():
            rows = pa.array(np.flatnonzero(missing))
            yield Rejected(rows, BadRecord.NULL_KEY, "the message has no key")
        binary = pc.and_(pc.starts_with(keys, b"\0"), pc.greater_equal(pc.binary_length(keys), HEADER_BYTES))
        binary = pc.fill_null(binary, False)
        if pc.any(binary).as_py():
            yield from self._of_avro(keys, binary)
        rows = np.flatnonzero(pc.and_not(keys.is_valid(), binary))
        for found in self._of_texts(keys.take(pa.array(rows))) if len(rows) else ():
            if isinstance(found, Rejected):
                reason = prefixed("the message's key: ", found.reason)
                yield Rejected(pa.array(rows[found.record.to_numpy()]), BadRecord.NULL_KEY, reason)
            else:
                yield pa.array(rows[found[0].to_numpy()]), found[1]

    def _of_avro(self, keys: pa.BinaryArray, binary: pa.Array) -> Iterator[Keyed | Rejected]:
        if self._avro is None:
            reason = "the message's key: it is in the wire format of a schema registry, which this format doesn't read"
            yield Rejected(pa.array(np.flatnonzero(binary)), BadRecord.NULL_KEY, reason)
            return
        for found in self._avro.read(pc.if_else(binary, keys, pa.scalar(None, keys.type))):
            if isinstance(found, Rejected):
                yield Rejected(found.record, found.error_class, prefixed("the message's key: ", found.reason))
            elif found.schema.value.kind == "record":
                wires = {field: found.wire((field,)) or Wire(pa.nulls(len(found.record))) for field in self._columns}
                yield found.record, wires
            else:
                yield found.record, {next(iter(self._columns)): Wire(found.values, found.schema.wire_type())}

    def _plan(self, schema: Node) -> Want:
        if schema.value.kind == "record":
            return wanted(schema, ((field,) for field in self._columns))
        if len(self._columns) != 1:
            raise RefusedError(BadRecord.NULL_KEY, self._not_one(schema.value.kind))
        return check(schema, True, f"column {next(iter(self._columns))}")

    def _of_texts(self, keys: pa.BinaryArray) -> Iterator[Keyed | Rejected]:
        for group in connect_json.by_schema(keys):
            if isinstance(group, Rejected):
                yield group
                continue
            schema, members, texts = group
            rows = np.arange(len(keys)) if members is None else members
            try:
                declared = connect_json.wire_type(parse(schema)) if schema else None
            except connect_json.MalformedSchemaError as error:
                yield Rejected(pa.array(rows), BadRecord.NULL_KEY, str(error))
                continue
            if declared is not None and declared.kind != "struct":
                yield from self._of_values(texts, rows, declared)
                continue
            is_object = pc.match_substring_regex(texts, r'^\s*\{\s*["}]').to_numpy(zero_copy_only=False)
            if is_object.any():
                reader = self._reader(schema, self._implied if declared is None else declared.children)
                yield from _read(reader, texts.filter(pa.array(is_object)), rows[is_object])
            if not is_object.all():
                yield from self._of_values(texts.filter(pa.array(~is_object)), rows[~is_object], None)

    def _of_values(self, texts: pa.Array, rows: Rows, declared: WireType | None) -> Iterator[Keyed | Rejected]:
        """Keys that are no JSON objects.

        :param declared: their type; None if they have no schema.
        """
        try:
            texts = texts.cast(pa.string())
        except pa.ArrowInvalid:
            utf8 = np.array([is_utf8(text) for text in texts.to_pylist()], np.bool_)
            yield Rejected(pa.array(rows[~utf8]), BadRecord.NULL_KEY, "it is neither JSON nor text")
            texts, rows = texts.filter(pa.array(utf8)).cast(pa.string()), rows[utf8]
        parts = pc.extract_regex(texts, self._struct_text)
        is_struct = parts.is_valid().to_numpy(zero_copy_only=False)
        if is_struct.any():
            chosen = parts.filter(pa.array(is_struct))
            wires = {field: Wire(chosen.field(number)) for number, field in enumerate(self._columns)}
            yield pa.array(rows[is_struct]), wires
            texts, rows = texts.filter(pa.array(~is_struct)), rows[~is_struct]
        if len(self._columns) != 1:
            if len(rows):
                yield Rejected(pa.array(rows), BadRecord.NULL_KEY, self._not_one("value"))
            return
        others = pc.starts_with(texts, "Struct{").to_numpy(zero_copy_only=False)
        if others.any():
            reason = f"its fields are others than {', '.join(self._columns)}"
            yield Rejected(pa.array(rows[others]), BadRecord.NULL_KEY, reason)
            texts, rows = texts.filter(pa.array(~others)), rows[~others]
        if not len(rows):
            return
        ((field, column),) = self._columns.items()
        is_json = pc.match_substring_regex(texts, _SCALAR)
        if declared is None and isinstance(column.type, T.StringType):
            is_json = pc.and_(is_json, pc.starts_with(texts, '"'))  # the text 007 or 1.50 stays as it is
        chosen = is_json.to_numpy(zero_copy_only=False)
        if chosen.any():
            wrapped = pc.binary_join_element_wise(f"{{{json.dumps(field)}:", texts.filter(is_json), "}", "")
            types = self._implied if declared is None else {field: declared}
            yield from _read(self._reader(b"", types), wrapped.cast(pa.binary()), rows[chosen])
        if not chosen.all():
            yield pa.array(rows[~chosen]), {field: Wire(texts.filter(pa.array(~chosen)))}

    @property
    def _struct_text(self) -> str:
        """A regex of a struct's or a map's text. A text in it may have any character if it is the only value."""
        any_text = "[^,{}]*" if len(self._columns) > 1 else ".*"
        names = map(quoted, self._columns)
        parts = ", ?".join(rf"{name}=(?P<v{number}>{any_text})" for number, name in enumerate(names))
        return rf"(?s)^(?:Struct)?\{{{parts}\}}$"

    def _reader(self, schema: bytes, types: Mapping[str, WireType]) -> tuple[Mapping[str, WireType], JsonReader]:
        if schema not in self._readers or self._readers[schema][0] != types:
            if len(self._readers) >= _READERS:
                self._readers.clear()
            shape = {
                field: Leaf(json_candidates(types.get(field, WireType()), to_arrow_type(c.type), c.is_uuid))
                for field, c in self._columns.items()
            }
            self._readers[schema] = types, JsonReader(Object(shape))
        return self._readers[schema]

    def _not_one(self, what: str) -> str:
        return f"it is one {what}, and the table's key is {', '.join(self._columns)}"


def _read(reader: tuple[Mapping[str, WireType], JsonReader], texts: pa.Array, rows: Rows) -> Iterator[Keyed | Rejected]:
    types, objects = reader
    for found in objects.read(texts):
        record = pa.array(rows[found.record.to_numpy()])
        if isinstance(found, Rejected):
            yield Rejected(record, found.error_class, found.reason)
            continue
        values = zip(found.values.type.names, found.values.flatten(), strict=True)
        yield record, {name: Wire(array, types.get(name, WireType())) for name, array in values}
