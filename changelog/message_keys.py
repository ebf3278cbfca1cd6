"""Which fields the keys of messages have: as JSON, with or without Kafka Connect's envelope, and as Avro.

    {"tenant": 1, "id": 7}                                                       tenant, id
    {"schema": {"type": "struct", "fields": [{"field": "id", …}]}, "payload": …} id
    00 00000008 02                                                               the fields of schema 8

Only the names count, so keys are looked at by schema, or by the JSON objects' shape: no key is taken apart that is
spelled like one before it.
"""

import json
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from changelog import connect_json
from changelog.avro_schema import SchemaError
from changelog.changes import MessageKey
from changelog.json_records import parse
from changelog.schema_registry import Schemas, by_schema

_TEXT = r'"(?:[^"\\]|\\.)*"'
_VALUE = rf"(?:{_TEXT}|[^\",{{}}\[\]\s]+|\{{[^{{}}]*\}}|\[[^\[\]]*\])"
"""A JSON value; of an object or array one without another one inside."""
_MOST_SHAPES = 64
"""Shapes of JSON objects that are remembered; a topic has one for each key that its table has had."""
_MOST_ODD = 64
"""Keys of a batch that may be unlike all remembered shapes. With more, each of the rest is parsed."""

Rows = npt.NDArray[np.int64]
Names = tuple[str, ...]


class MessageKeys:
    """Looks at messages' keys. What it learned of one batch speeds up the next.

    :param schemas: where to look up the schemas of Avro keys; None if there is no registry.
    """

    def __init__(self, schemas: Callable[[], Schemas] | None = None) -> None:
        self._connect = schemas
        self._by_id: dict[int, Names | None] = {}
        self._by_beginning: dict[bytes, Names | None] = {}
        self._shapes: dict[str, Names] = {}

    @cached_property
    def _schemas(self) -> Schemas:
        assert self._connect is not None
        return self._connect()

    def stated(self, records: pa.RecordBatch) -> Iterator[MessageKey]:
        """Each key that messages of the batch (`RAW_SCHEMA`) have. A message without a key says that there is none, but
        not a tombstone. A key that is a single value, or can't be read, says nothing of fields.

        :raises RegistryError: the schema registry doesn't answer.
        """
        keys, values = records.column("key"), records.column("value")
        absent = pc.and_(keys.is_null(), values.is_valid())
        first: dict[Names, int] = {}
        if pc.any(absent).as_py():
            first[()] = pc.index(absent, True).as_py()
        rows = np.flatnonzero(keys.is_valid())
        if len(rows):
            present = keys if len(rows) == len(keys) else keys.drop_null()
            for names, row in self._found(present, rows):
                if names is not None:
                    first[names] = min(row, first.get(names, row))
        for names, row in first.items():
            yield MessageKey(names, row)

    def _found(self, keys: pa.BinaryArray, rows: Rows) -> Iterator[tuple[Names | None, int]]:
        if self._connect is None:
            yield from self._of_json(keys, rows)
            return
        for schema_id, chosen in by_schema(keys):
            members = chosen.to_numpy()
            if schema_id is None:
                yield from self._of_json(keys.take(chosen), rows[members])
                continue
            if schema_id not in self._by_id:
                self._by_id[schema_id] = self._of_avro(schema_id)
            yield self._by_id[schema_id], int(rows[members].min())

    def _of_avro(self, schema_id: int) -> Names | None:
        try:
            schema = self._schemas.get(schema_id).value
        except SchemaError:
            return None
        return tuple(schema.fields) if schema.kind == "record" else None

    def _of_json(self, keys: pa.BinaryArray, rows: Rows) -> Iterator[tuple[Names | None, int]]:
        for beginning, names in self._by_beginning.items():
            alike = pc.starts_with(keys, beginning).to_numpy(zero_copy_only=False)
            if alike.any():
                yield names, int(rows[alike].min())
                keys, rows = keys.filter(pa.array(~alike)), rows[~alike]
            if not len(rows):
                return
        for _ in range(_MOST_ODD):
            learned = _envelope(keys[0].as_py())
            if learned is None:
                break
            beginning, names = learned
            if len(self._by_beginning) >= _MOST_SHAPES:
                self._by_beginning.clear()
            self._by_beginning[beginning] = names
            yield names, int(rows[0])
            rest = pc.invert(pc.starts_with(keys, beginning))
            keys, rows = keys.filter(rest), rows[rest.to_numpy(zero_copy_only=False)]
            if not len(rows):
                return
        for schema, members, texts in connect_json.by_schema(keys):
            chosen = rows if members is None else rows[members]
            if len(chosen) and schema:
                yield _declared(parse(schema)), int(chosen.min())
            elif len(chosen):
                yield from self._of_objects(texts, chosen)

    def _of_objects(self, texts: pa.Array, rows: Rows) -> Iterator[tuple[Names | None, int]]:
        try:
            texts = texts.cast(pa.string())
        except pa.ArrowInvalid:
            texts = texts.cast(pa.binary())
        for pattern, names in self._shapes.items():
            alike = _matches(texts, pattern)
            if alike.any():
                yield names, int(rows[alike].min())
                texts, rows = texts.filter(pa.array(~alike)), rows[~alike]
            if not len(rows):
                return
        for _ in range(_MOST_ODD):
            if not len(rows):
                return
            found = _names(texts[0].as_py())
            yield found, int(rows[0])
            rest = np.ones(len(rows), np.bool_)
            rest[0] = False
            if found is None:
                rest &= _matches(texts, r"^\s*\{")  # what isn't an object says nothing
            else:
                pattern = _pattern(found)
                alike = _matches(texts, pattern)
                if alike[0]:
                    rest &= ~alike
                    if len(self._shapes) >= _MOST_SHAPES:
                        self._shapes.clear()
                    self._shapes[pattern] = found
            texts, rows = texts.filter(pa.array(rest)), rows[rest]
        for text, row in zip(texts.to_pylist(), rows.tolist(), strict=True):
            yield _names(text), row


def _matches(texts: pa.Array, pattern: str) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = pc.match_substring_regex(texts, pattern).to_numpy(zero_copy_only=False)
    return found


def _pattern(names: Names) -> str:
    """What objects with these fields, in this order, match; in RE2's syntax."""
    fields = [rf"{_quoted(json.dumps(name, ensure_ascii=False))}\s*:\s*{_VALUE}" for name in names]
    return r"^\s*\{\s*" + r"\s*,\s*".join(fields) + r"\s*\}\s*$"


def _quoted(text: str) -> str:
    """As a literal of RE2, which takes escapes of ASCII only."""
    return "".join(c if c.isalnum() or c in '_" ' or not c.isascii() else f"\\{c}" for c in text)


def _names(text: str | bytes) -> Names | None:
    """The fields of a JSON object."""
    try:
        document = parse(text if isinstance(text, bytes) else text.encode())
    except (ValueError, RecursionError):
        return None
    return tuple(document) if isinstance(document, dict) else None


def _envelope(key: bytes) -> tuple[bytes, Names | None] | None:
    """Of a key as Kafka Connect's JSON converter writes it: what comes before the payload, and the schema's fields."""
    beginning, separator, _ = key.partition(connect_json.PAYLOAD)
    if not separator or not beginning.startswith(b'{"schema":'):
        return None
    try:
        document = parse(beginning + b"}")
    except (ValueError, RecursionError):
        return None
    return beginning + separator, _declared(document["schema"])


def _declared(schema: Any) -> Names | None:
    """The fields of a struct's schema."""
    try:
        return tuple(connect_json.fields(schema))
    except connect_json.MalformedSchemaError:
        return None
