"""Recognizes the format of messages, only by their content.

    {"before": null, "after": {"id": 7}, "op": "c", …}                     debezium-json
    {"id": 7, "customer": "Ada", "__deleted": "false"}                     debezium-json, flattened
    00 00000009 …, and schema 9 of the registry has op, before and after   debezium-avro

Callers pass a sample of some hundred messages, since this module looks at messages one by one.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from changelog.foreign_messages import (
    CELLS,
    DOCUMENTS,
    Unrecognized,
    foreign,
    foreign_schema,
    framed,
    internal,
    internal_key,
)
from changelog.formats import debezium_rows
from changelog.parse.avro_schema import SchemaError
from changelog.parse.json_records import parse
from changelog.parse.schema_registry import HEADER_BYTES, Schemas

Options = tuple[tuple[str, str | tuple[str, ...]], ...]
"""`format_options`, sorted by name."""
Record = tuple[bytes | None, bytes | None]
"""Key and value of a message, or None and a line of a file."""

FLATTENED: Options = (("flattened", "true"),)

_CANAL = {"INSERT", "UPDATE", "DELETE", "CREATE", "ALTER", "ERASE", "TRUNCATE", "RENAME", "CINDEX", "DINDEX", "QUERY"}
_KIND_COLUMNS = (
    "row_kind", "op", "_op", "__op", "operation", "_operation", "kind", "_kind", "rowkind", "change_type",
    "_change_type", "cdc_operation", "dml_type",
)  # fmt: skip
"""Usual names of the field that has a row's kind, in lower case."""
_OWN_KINDS = {"+I", "-U", "+U", "-D", "INSERT", "UPDATE_BEFORE", "UPDATE_AFTER", "DELETE"}
_KINDS: Sequence[Mapping[str, tuple[str, ...]]] = (
    {"insert": ("I",), "update": ("U",), "delete": ("D",)},
    {"insert": ("i",), "update": ("u",), "delete": ("d",)},
    {"insert": ("c", "r"), "update": ("u",), "delete": ("d",)},
    {"insert": ("insert",), "update": ("update",), "delete": ("delete",)},
    {"insert": ("INSERT",), "update": ("UPDATE",), "delete": ("DELETE",)},
    {"insert": ("create", "read"), "update": ("update",), "delete": ("delete",)},
    {
        "insert": ("insert",),
        "update": ("update_postimage",),
        "update_before": ("update_preimage",),
        "delete": ("delete",),
    },
)
"""Other spellings of kinds, each as `format_options` of `row-kind`. The last is the spelling of Delta's change data
feed.
"""


@dataclass(frozen=True)
class Recognized:
    """The format of messages.

    :param format: a name of `changelog.formats`.
    :param options: the format's `format_options`, without those of the registry.
    :param has_schema: the messages' schema has the columns and their types.
    :param key: names of the key's fields; empty if the messages don't state the key.
    :param note: a remark for people.
    """

    format: str
    options: Options = ()
    has_schema: bool = False
    key: tuple[str, ...] = ()
    note: str = ""


NO_ROWS = Unrecognized("no message is about a row")
"""The result for messages that don't tell the format of other messages."""


def recognize(records: Iterable[Record], schemas: Schemas | None = None) -> Recognized | Unrecognized:
    """The format that most of the messages have.

    :param records: keys and values of messages.
    :param schemas: the source of Avro schemas; None if there is no registry.
    :raises RegistryError: the registry doesn't answer.
    """
    found: Counter[Recognized | Unrecognized] = Counter()
    keys: Counter[tuple[str, ...]] = Counter()
    for key, value in records:
        if value is None:
            continue
        what = _one(key, value, schemas)
        if isinstance(what, Recognized):
            keys[what.key or _fields(key, schemas)] += 1
            what = replace(what, key=())
        found[what] += 1
    del found[NO_ROWS]
    if not found:
        return NO_ROWS
    (most, count), total = found.most_common(1)[0], sum(found.values())
    if isinstance(most, Unrecognized):
        return most
    notes = [most.note] if most.note else []
    if count < total:
        notes.append(f"{total - count} of the {total} messages that were read have another format")
    ((names, _),) = keys.most_common(1)
    if len(keys) > 1:
        notes.append("the messages have several keys: " + " and ".join(", ".join(each) or "none" for each in keys))
    return replace(most, key=names, note="; ".join(notes))


def mistaken(format_name: str, options: Mapping[str, Any], record: Record) -> str:
    """What a message is that a format refuses, and what to set, as a phrase for "such messages are …". Empty if it is
    unknown, or the message has the right format.

    :param format_name: one of `changelog.formats.OURS`.
    :param options: its `format_options`.
    """
    key, value = record
    what = NO_ROWS if value is None else _one(key, value, None)
    if isinstance(what, Recognized):
        return other_format(what, format_name, options)
    return what.reason if is_foreign(what, format_name, options) else ""


def is_foreign(what: Unrecognized, format_name: str, options: Mapping[str, Any]) -> bool:
    """Whether messages are known to be something that a format doesn't read."""
    rows = {DOCUMENTS: debezium_rows.DOCUMENTS, CELLS: debezium_rows.CELLS}.get(what)
    if rows is not None:
        return options.get(debezium_rows.ROWS) != rows
    return what.known and not (what.needs_registry and "avro" in format_name)


def other_format(what: Recognized, format_name: str, options: Mapping[str, Any]) -> str:
    """The format of messages, and what to set, if it isn't the configured one. Else empty."""
    flattened = what.options == FLATTENED
    if what.format == format_name and flattened == (options.get("flattened") == "true"):
        return ""
    if what.format == format_name and not flattened:
        return f"{what.format} with before and after: set format_options: {{flattened: false}}"
    return f"{what.format}: set source.format: {what.format}" + (
        f" and format_options: {{{', '.join(f'{name}: {value}' for name, value in what.options)}}}"
        if what.options
        else ""
    )


def kind_options(columns: Mapping[str, Iterable[object]]) -> Options | None:
    """The `format_options` of `row-kind` for rows with these columns; None if no column has the row's kind.

    :param columns: name of a column -> values that occur in it.
    """
    for name in sorted(columns, key=lambda name: (name != "row_kind", name)):
        values = set(columns[name]) - {None}
        if name.lower() not in _KIND_COLUMNS or not values:
            continue
        column: Options = () if name == "row_kind" else (("column", name),)
        if values <= _OWN_KINDS:
            return column
        if name == "row_kind" and values <= {1, 2, 3}:
            return (("column_type", "integer"),)
        for spelled in _KINDS:
            if values <= {value for meant in spelled.values() for value in meant}:
                mapped = {kind: meant[0] if len(meant) == 1 else meant for kind, meant in spelled.items()}
                return tuple(sorted({"column": name, **mapped}.items()))
    return None


def _one(key: bytes | None, value: bytes, schemas: Schemas | None) -> Recognized | Unrecognized:
    return _avro(value, schemas) if value[:1] == b"\0" else _json(key, value, schemas)


def _avro(value: bytes, schemas: Schemas | None) -> Recognized | Unrecognized:
    """Recognize a value in Confluent's wire format."""
    if len(value) < HEADER_BYTES:
        return Unrecognized("the messages are not JSON and have no other known format")
    other = framed(value)
    if other is not None:
        return other
    if schemas is None:
        return Unrecognized("binary, with schemas of a registry, as Avro is", needs_registry=True, known=True)
    number = int.from_bytes(value[1:HEADER_BYTES], "big")
    try:
        schema = schemas.get(number).value
    except SchemaError as error:
        return Unrecognized(str(error), needs_registry=True)
    if schema.kind != "record":
        return Unrecognized(f"the messages are Avro of type {schema.kind}, not records")
    if "op" in schema.fields and {"before", "after"} & schema.fields.keys():
        return foreign_schema(schema) or Recognized("debezium-avro", has_schema=True)
    if {"__op", "__deleted"} & schema.fields.keys():
        return Recognized("debezium-avro", FLATTENED, has_schema=True)
    own = internal(schema.fields)
    if own is not None:
        return own
    note = "rows without a kind: each message is the new row of its key, and a tombstone deletes the row"
    return Recognized("avro", has_schema=True, note=note)


def _json(key: bytes | None, value: bytes, schemas: Schemas | None) -> Recognized | Unrecognized:
    own = internal_key(key)
    if own is not None:
        return own
    try:
        document = parse(value)
    except (ValueError, RecursionError):
        return Unrecognized("the messages are not JSON and have no other known format")
    if not isinstance(document, dict):
        return Unrecognized("the messages are JSON, but not objects")
    enveloped = set(document) == {"schema", "payload"}
    has_schema = enveloped and isinstance(document["schema"], dict)
    row = document["payload"] if enveloped else document
    if not isinstance(row, dict):
        return NO_ROWS if row is None else Unrecognized("the messages are JSON, but not objects")
    if {"__op", "__deleted"} & row.keys():
        return Recognized("debezium-json", FLATTENED, has_schema)
    known = foreign(row) or _message(row, has_schema) or internal(row)
    if known is not None:
        return known
    kinds = None if enveloped else kind_options({name: [v] for name, v in row.items() if isinstance(v, str | int)})
    if kinds is not None:
        return Recognized("row-kind", kinds)
    names = _fields(key, schemas)
    if names and set(names) <= row.keys():
        note = "rows without a kind: each message is the new row of its key, and a tombstone deletes the row"
        return Recognized("debezium-json", FLATTENED, has_schema, note=note)
    return Unrecognized(f"JSON objects that are not changes of rows, with the fields {', '.join([*row][:8])}")


def _message(row: Mapping[str, Any], has_schema: bool) -> Recognized | Unrecognized | None:
    """Recognize messages that state the kind of each change. None if the message isn't one of them."""
    kind = row.get("type")
    if "op" in row and ({"before", "after"} & row.keys() or row["op"] == "t"):
        return Recognized("debezium-json", has_schema=has_schema)
    if "isDdl" in row and isinstance(kind, str) and kind in _CANAL:
        return Recognized("canal-json", key=_names(row.get("pkNames"))) if row.get("data") else NO_ROWS
    if "database" in row and isinstance(kind, str) and ("ts" in row or "data" in row):
        return Recognized("maxwell-json", key=_names(row.get("primary_key_columns"))) if row.get("data") else NO_ROWS
    if "op_type" in row and "table" in row:
        return Recognized("ogg-json", key=_names(row.get("primary_keys"))) if row["op_type"] != "T" else NO_ROWS
    metadata = row.get("metadata")
    if isinstance(metadata, dict) and {"operation", "record-type"} <= metadata.keys():
        return Recognized("dms-json") if metadata["record-type"] == "data" else NO_ROWS
    return None


def _fields(key: bytes | None, schemas: Schemas | None) -> tuple[str, ...]:
    """The fields of a message's key; empty if the key has no fields."""
    if key is None:
        return ()
    if key[:1] == b"\0" and schemas is not None and len(key) >= HEADER_BYTES:
        try:
            return tuple(schemas.get(int.from_bytes(key[1:HEADER_BYTES], "big")).value.fields)
        except SchemaError:
            return ()
    try:
        document = parse(key)
    except (ValueError, RecursionError):
        return ()
    if isinstance(document, dict) and set(document) == {"schema", "payload"}:
        document = document["payload"]
    if not isinstance(document, dict):
        return ()
    # Maxwell's: {"database": "shop", "table": "orders", "pk.id": 7}
    pk = [name.removeprefix("pk.") for name in document if name.startswith("pk.")]
    return tuple(pk if pk and {"database", "table"} <= document.keys() else document)


def _names(value: object) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else ()
