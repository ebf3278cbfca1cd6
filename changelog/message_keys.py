"""Finds the fields of messages' keys. A key may be JSON, with or without Kafka Connect's envelope, or Avro.

    {"tenant": 1, "id": 7}                                                       tenant, id
    {"schema": {"type": "struct", "fields": [{"field": "id", …}]}, "payload": …} id
    00 00000008 02                                                               the fields of schema 8

Only the names of the fields count. So this module groups keys by schema, or by the shape of the JSON object, and parses
a key only if no earlier key had the same shape.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from changelog.changes import MessageKey, Rejected
from changelog.parse import connect_json
from changelog.parse.avro_schema import SchemaError
from changelog.parse.json_records import parse
from changelog.parse.schema_registry import Schemas, by_schema

_TEXT = r'"(?:[^"\\]|\\.)*"'
_VALUE = rf"(?:{_TEXT}|[^\",{{}}\[\]\s]+|\{{[^{{}}]*\}}|\[[^\[\]]*\])"
"""A JSON value. An object or array matches only if it has no object or array inside."""
_MOST_SHAPES = 64
"""So many shapes of JSON objects are remembered. A topic has one shape for each key that its table has had."""
_MOST_ODD = 64
"""A batch may have so many keys with new shapes. If it has more, each of the remaining keys is parsed."""

Rows = npt.NDArray[np.int64]
Names = tuple[str, ...]


class MessageKeys:
    """Finds the fields of messages' keys. What the object learns from one batch makes the next batch faster.

    :param schemas: returns the source of Avro schemas; None if there is no registry.
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
        """Each key that messages of the batch (`RAW_SCHEMA`) state. A message without a key states that the table has
        no key, unless the message is a tombstone. A key that is a single value or can't be read states nothing.

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
            yield self._of_avro(schema_id), int(rows[members].min())

    def _of_avro(self, schema_id: int) -> Names | None:
        if schema_id not in self._by_id:
            try:
                schema = self._schemas.get(schema_id).value
            except SchemaError:  # the registry may know it later
                return None
            self._by_id[schema_id] = tuple(schema.fields) if schema.kind == "record" else None
        return self._by_id[schema_id]

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
        for group in connect_json.by_schema(keys):
            if isinstance(group, Rejected):
                yield None, int(rows[group.record.to_numpy()].min())
                continue
            schema, members, texts = group
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
                rest &= _matches(texts, r"^\s*\{")  # a key that isn't an object states nothing
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


def of_changes(
    records: pa.RecordBatch, found: Iterable[MessageKey], others: Sequence[Rejected]
) -> Iterator[MessageKey]:
    """The keys that messages of changes state. A TRUNCATE has no key, and doesn't say that its table has none. Nor does
    a message that can't be understood.

    :param records: a batch of `RAW_SCHEMA`.
    :param found: what its messages state.
    :param others: those of its messages that empty the table, or can't be understood.
    """
    no_changes = np.concatenate([np.empty(0, np.int64), *(part.record.to_numpy() for part in others)])
    for key in found:
        if key.record not in no_changes:
            yield key
        elif (row := _another(records, key, no_changes)) is not None:
            yield MessageKey(key.fields, row)


def _another(records: pa.RecordBatch, key: MessageKey, but: Rows) -> int | None:
    """The first record that states the same key, and isn't one of some others. None if there is none."""
    rows = np.setdiff1d(np.arange(records.num_rows), but)
    rest = records.take(pa.array(rows))
    first = records.column("key")[key.record].as_py()
    if first is not None and first[:1] == b"\0":  # Confluent's wire format has the number of the schema
        found = pc.index(pc.fill_null(pc.starts_with(rest.column("key"), first[:5]), False), True).as_py()
    else:
        found = next((other.record for other in MessageKeys().stated(rest) if other.fields == key.fields), -1)
    return None if found < 0 else int(rows[found])


def _matches(texts: pa.Array, pattern: str) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = pc.match_substring_regex(texts, pattern).to_numpy(zero_copy_only=False)
    return found


def _pattern(names: Names) -> str:
    """A pattern, in RE2's syntax, that matches objects with exactly these fields in this order."""
    fields = [rf"{quoted(json.dumps(name, ensure_ascii=False))}\s*:\s*{_VALUE}" for name in names]
    return r"^\s*\{\s*" + r"\s*,\s*".join(fields) + r"\s*\}\s*$"


def quoted(text: str) -> str:
    """`text` as a literal in RE2's syntax. RE2 accepts escapes only for ASCII characters."""
    return "".join(c if c.isalnum() or c in '_" ' or not c.isascii() else f"\\{c}" for c in text)


def _names(text: str | bytes) -> Names | None:
    """The fields of a JSON object; None if the text isn't a JSON object."""
    try:
        document = parse(text if isinstance(text, bytes) else text.encode())
    except (ValueError, RecursionError):
        return None
    return tuple(document) if isinstance(document, dict) else None


def _envelope(key: bytes) -> tuple[bytes, Names | None] | None:
    """For a key as Kafka Connect's JSON converter writes it: the bytes before the payload, and the schema's fields.
    None for other keys.
    """
    beginning, separator, _ = key.partition(connect_json.PAYLOAD)
    if not separator or not beginning.startswith(b'{"schema":'):
        return None
    try:
        document = parse(beginning + b"}")
    except (ValueError, RecursionError):
        return None
    return beginning + separator, _declared(document["schema"])


def _declared(schema: Any) -> Names | None:
    """The fields of a struct's schema; None if the schema isn't a struct's."""
    try:
        return tuple(connect_json.fields(schema))
    except connect_json.MalformedSchemaError:
        return None
