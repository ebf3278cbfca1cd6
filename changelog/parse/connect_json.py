"""JSON as Kafka Connect's `JsonConverter` writes it with `schemas.enable`: an envelope with the schema and the payload.

{"schema": {"type": "struct", "fields": [{"type": "int64", "optional": false, "field": "id"}, …]}, "payload": {"id": 1,
…}}
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from changelog.changes import Rejected, WireType
from changelog.parse.json_records import compact, parse
from changelog.rows import BadRecord

PAYLOAD = b',"payload":'
"""The bytes that the converter writes between schema and payload."""

Rows = npt.NDArray[np.int64]

_MOST_LEVELS = 128
"""A schema may have so many levels of JSON, two for each struct in a struct. Schemas of tables have a few."""
_DEEP_SCHEMA = "the schema is nested too deeply"


def by_schema(values: pa.Array) -> Iterator[tuple[bytes, Rows | None, pa.Array] | Rejected]:
    """Group values by the text of their schema, and remove the envelope.

    Kafka Connect always spells a schema in the same way and writes it first. So only distinct beginnings are parsed.

    :param values: binary, without nulls.
    :return: for each group the schema as JSON (empty if the values have no schema), the row numbers (None means all
        rows), and the payloads. Messages whose schema or payload is nested too deeply are `Rejected`.
    """
    if _have_no_envelope(values):
        yield b"", None, values
        return
    enveloped = pc.match_substring_regex(values, r'^\s*\{\s*"(?:schema|payload)"\s*:').to_numpy(zero_copy_only=False)
    if not enveloped.any():
        yield b"", None, values
        return
    plain = np.flatnonzero(~enveloped)
    odd: list[int] = []
    rows = np.flatnonzero(enveloped)
    starts = pc.find_substring(values.take(pa.array(rows)), PAYLOAD).to_numpy()
    for start in np.unique(starts):
        members = rows[starts == start]
        if start < 0:
            odd += members.tolist()
            continue
        texts = values.take(pa.array(members))
        beginnings = pc.binary_slice(texts, 0, int(start)).dictionary_encode()
        bodies = pc.binary_slice(texts, int(start) + len(PAYLOAD), -1)
        ends = pc.equal(pc.binary_slice(texts, -1, 2**31 - 1), b"}").to_numpy(zero_copy_only=False)
        numbers = beginnings.indices.to_numpy()
        for number, beginning in enumerate(beginnings.dictionary.to_pylist()):
            chosen = np.flatnonzero((numbers == number) & ends)
            try:
                schema = _schema(beginning + b"}")
            except _TooDeepError as error:
                yield Rejected(pa.array(members[chosen]), BadRecord.UNPARSEABLE, str(error))
                continue
            if schema:
                yield schema, members[chosen], bodies.take(pa.array(chosen))
            else:
                odd += members[chosen].tolist()
        odd += members[~ends].tolist()
    again: dict[bytes, list[tuple[int, bytes]]] = {}
    for row in odd:
        try:
            schema, payload = _opened(values[row].as_py())
        except _TooDeepError as error:
            yield Rejected(pa.array([row], pa.int64()), BadRecord.UNPARSEABLE, str(error))
            continue
        again.setdefault(schema, []).append((row, payload))
    for schema, pairs in again.items():
        yield schema, np.array([row for row, _ in pairs]), pa.array([text for _, text in pairs], pa.binary())
    if len(plain):
        yield b"", plain, values.take(pa.array(plain))


def without_null_payloads(values: pa.BinaryArray) -> pa.BinaryArray:
    """`values` with null in place of `{"schema":null,"payload":null}`, and of a null with another schema. The converter
    writes this for null unless it is told not to (KAFKA-3832).
    """
    # nearly all values fail one of these two checks, which look at a few bytes of each
    maybe = pc.fill_null(pc.and_(pc.ends_with(values, "null}"), pc.starts_with(values, '{"schema"')), False)
    rows = np.flatnonzero(maybe)
    if not len(rows):
        return values
    found = maybe.to_numpy(zero_copy_only=False).copy()
    pattern = r'(?s)^\{"schema"\s*:\s*(?:null|\{.*\})\s*,\s*"payload"\s*:\s*null\}$'
    found[rows] = pc.match_substring_regex(values.take(pa.array(rows)), pattern).to_numpy(zero_copy_only=False)
    return pc.if_else(pa.array(found), pa.scalar(None, values.type), values)


def _have_no_envelope(values: pa.Array) -> bool:
    """A quick check: no value begins with a field that may belong to an envelope."""
    objects = pc.all(pc.starts_with(values, '{"')).as_py()
    return objects and not any(pc.any(pc.starts_with(values, f'{{"{letter}')).as_py() for letter in "sp")


class _TooDeepError(Exception):
    """The message is nested too deeply. The text says what of it is."""


class MalformedSchemaError(ValueError):
    """An envelope's schema is not a schema of Kafka Connect."""


def wire_type(schema: Any) -> WireType:
    """The type that a schema describes.

    :param schema: the parsed JSON of the schema, as the converter writes it.
    :raises MalformedSchemaError: this is not a schema.
    """
    if not isinstance(schema, dict) or not isinstance(schema.get("type"), str):
        raise MalformedSchemaError("the schema in the envelope has a part without a type")
    kind = schema["type"]
    children = {}
    if kind == "array":
        children = {"element": wire_type(schema.get("items"))}
    elif kind == "map":
        children = {"key": wire_type(schema.get("keys")), "value": wire_type(schema.get("values"))}
    elif kind == "struct":
        children = {name: wire_type(part) for name, part in fields(schema).items()}
    name, parameters = schema.get("name"), schema.get("parameters") or {}
    if not isinstance(name, str | None) or not isinstance(parameters, dict):
        raise MalformedSchemaError("the schema in the envelope has a malformed name or malformed parameters")
    texts = {name: str(value) for name, value in parameters.items()}
    return WireType(kind, name, texts, children, default=schema.get("default"))


def fields(schema: Any) -> dict[str, Any]:
    """The fields of a struct's schema, by name.

    :raises MalformedSchemaError: the schema has no list of fields, or a field has no name.
    """
    parts = schema.get("fields") if isinstance(schema, dict) else None
    if not isinstance(parts, list):
        raise MalformedSchemaError("the schema in the envelope has a struct without fields")
    found = {part["field"]: part for part in parts if isinstance(part, dict) and isinstance(part.get("field"), str)}
    if len(found) < len(parts):
        raise MalformedSchemaError("the schema in the envelope has a field without a name")
    return found


def _schema(text: bytes) -> bytes:
    """The schema in `{"schema": …}` as compact JSON. Empty if there is no schema with fields."""
    try:
        document = parse(text)
    except (ValueError, RecursionError):
        return b""
    schema = document.get("schema") if isinstance(document, dict) and len(document) == 1 else None
    return _spelled(schema) if isinstance(schema, dict) and "fields" in schema else b""


def _spelled(schema: Any) -> bytes:
    """The schema as compact JSON."""
    level = [schema]
    for _ in range(_MOST_LEVELS):
        nested = (one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list))
        level = [part for parts in nested for part in parts]
        if not level:
            return compact(schema).encode()
    raise _TooDeepError(_DEEP_SCHEMA)


def _payload(payload: Any) -> bytes:
    try:
        return compact(payload).encode()
    except RecursionError:
        raise _TooDeepError("the value is nested too deeply") from None


def _opened(text: bytes) -> tuple[bytes, bytes]:
    """Schema and payload of a message with an unusual spelling. The schema is empty if the message has no envelope."""
    try:
        document = parse(text)
    except (ValueError, RecursionError):
        return b"", text
    if not isinstance(document, dict) or not isinstance(document.get("schema"), dict) or "payload" not in document:
        if isinstance(document, dict) and set(document) == {"schema", "payload"}:
            return b"", _payload(document["payload"])  # "schema": null
        return b"", text
    return _spelled(document["schema"]), _payload(document["payload"])
