"""Rows of Debezium's connectors for other databases, rewritten as those of all others. The option `rows` names them:

| `rows`      | a row, and the message's key |
|-------------|---|
| `plain`     | `{"id": 7, "name": "pen"}` |
| `documents` | the text of `{"_id": {"$oid": "64…"}, "name": "pen"}`; key `{"id": "{\\"$oid\\": …}"}` (MongoDB) |
| `cells`     | `{"id": {"value": 7, "set": true}, "name": null}` (YugabyteDB, Cassandra) |

In a document, numbers, dates, bytes and ids are objects by MongoDB's extended JSON; they become numbers, ISO 8601
texts, base64 and texts. A cell that an update leaves out or has as null, or that isn't `set`, is unchanged, so it gets
the placeholder for unavailable values. Messages that don't look like this stay as they are.
"""

import datetime as dt
import re
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa

from changelog.formats.debezium import placeholder
from changelog.parse.json_records import Numeral, compact, parse
from changelog.spec import ChangelogSpec
from changelog.values import readings

ROWS = "rows"
"""Name of the option."""
DOCUMENTS = "documents"
CELLS = "cells"

_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_EPOCH = dt.datetime(1970, 1, 1)
_SIDES = ("before", "after")


def implied_options(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The connector's settings by which the values of rewritten rows are spelled."""
    if options.get(ROWS) != DOCUMENTS:
        return options
    return {**options, readings.DECIMALS: "string", readings.TIME_UNITS: "isostring", readings.BINARIES: "base64"}


def rewritten(spec: ChangelogSpec, records: pa.RecordBatch) -> pa.RecordBatch:
    """Raw records (`RAW_SCHEMA`) with plain rows in keys and values."""
    spelling = spec.options.get(ROWS)
    if spelling not in (DOCUMENTS, CELLS):
        return records
    fields = [column.field for column in spec.columns]
    if spelling == DOCUMENTS:
        parts: dict[str, Callable[[Any], Any]] = {"key": _of_document_key, "value": _of_document_event}
    else:
        unavailable = placeholder(spec).text
        parts = {"key": _of_cells_key, "value": lambda event: _of_cells_event(event, fields, unavailable)}
    for name, rewrite in parts.items():
        texts = [_rewritten(text, rewrite) for text in records.column(name).to_pylist()]
        place = records.schema.get_field_index(name)
        records = records.set_column(place, records.schema.field(place), pa.array(texts, pa.binary()))
    return records


def _rewritten(text: bytes | None, rewrite: Callable[[Any], Any]) -> bytes | None:
    try:
        document = parse(text or b"null")
        return compact(rewrite(document)).encode() if isinstance(document, dict) else text
    except (ValueError, RecursionError):
        return text


def _of_document_key(key: dict[str, Any]) -> Any:
    key = key["payload"] if set(key) == {"schema", "payload"} else key
    if not isinstance(key, dict) or set(key) != {"id"} or not isinstance(key["id"], str):
        return key
    return {"_id": _value(parse(key["id"]))}


def _of_document_event(event: dict[str, Any]) -> Any:
    event = event["payload"] if set(event) == {"schema", "payload"} else event
    if not isinstance(event, dict):
        return event
    return event | {side: _value(parse(event[side])) for side in _SIDES if isinstance(event.get(side), str)}


def _value(value: Any) -> Any:
    """A value of MongoDB's extended JSON, both of its spellings. What has no plain spelling stays an object."""
    if isinstance(value, list):
        return [_value(part) for part in value]
    if not isinstance(value, dict):
        return value
    name = next(iter(value), "")
    inner = value.get(name)
    if name in ("$numberDecimal", "$numberDouble", "$numberLong", "$numberInt") and isinstance(inner, str):
        return Numeral(inner) if _NUMBER.fullmatch(inner) else inner
    if name in ("$oid", "$uuid", "$symbol", "$code") and isinstance(inner, str) and len(value) == 1:
        return inner
    if name == "$date":
        return _time(inner) or value
    if name == "$binary":
        return inner.get("base64", value) if isinstance(inner, dict) else inner
    return None if name == "$undefined" else {name: _value(part) for name, part in value.items()}


def _time(value: Any) -> str | None:
    """A time as ISO 8601 text in UTC; None if there is no such text."""
    value = value.get("$numberLong") if isinstance(value, dict) else value
    if isinstance(value, str) and not re.fullmatch("-?[0-9]+", value):
        return value
    try:
        return f"{(_EPOCH + dt.timedelta(milliseconds=int(value))).isoformat(timespec='milliseconds')}Z"
    except (TypeError, ValueError, OverflowError):
        return None


def _of_cells_key(key: dict[str, Any]) -> Any:
    if set(key) == {"schema", "payload"}:
        return {"schema": _row_schema(key["schema"]), "payload": _unwrapped(key["payload"])}
    return _unwrapped(key)


def _of_cells_event(event: dict[str, Any], fields: list[str], unavailable: str) -> Any:
    if set(event) == {"schema", "payload"}:
        payload = event["payload"]
        made = _of_cells_event(payload, fields, unavailable) if isinstance(payload, dict) else payload
        return {"schema": _event_schema(event["schema"]), "payload": made}
    sides = {side: _unwrapped(event[side]) for side in _SIDES if side in event}
    after = event.get("after")
    if event.get("op") == "u" and isinstance(after, dict):
        for name in {**after, **dict.fromkeys(fields)}:
            if not (isinstance(after.get(name), dict) and after[name].get("set") is True):
                sides["after"][name] = unavailable
    return event | sides


def _unwrapped(row: Any) -> Any:
    if not isinstance(row, dict):
        return row
    return {name: cell.get("value") if isinstance(cell, dict) and "set" in cell else cell for name, cell in row.items()}


def _event_schema(schema: Any) -> Any:
    if not isinstance(schema, dict) or not isinstance(schema.get("fields"), list):
        return schema
    return schema | {"fields": [_row_schema(side) if _named(side) in _SIDES else side for side in schema["fields"]]}


def _row_schema(schema: Any) -> Any:
    """A row's schema, with the type of each cell's value in place of the cell's."""

    def of_value(cell: Any) -> Any:
        inner = cell.get("fields") if isinstance(cell, dict) else None
        parts = {_named(part): part for part in inner} if isinstance(inner, list) else {}
        return parts["value"] | {"field": _named(cell), "optional": True} if {"value", "set"} <= {*parts} else cell

    if not isinstance(schema, dict) or not isinstance(schema.get("fields"), list):
        return schema
    return schema | {"fields": [of_value(cell) for cell in schema["fields"]]}


def _named(field: Any) -> Any:
    name = field.get("field") if isinstance(field, dict) else None
    return name if isinstance(name, str) else None
