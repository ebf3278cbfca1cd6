"""Rows of MongoDB's, YugabyteDB's and Cassandra's connectors, with the option that names their spelling."""

import datetime as dt
import json
from decimal import Decimal
from typing import Any

import pytest

from changelog.changes import Changes, MessageKey
from changelog.decoding import ChangelogDecoder
from changelog.formats.debezium_json import DebeziumJson
from changelog.rows import UNAVAILABLE, unavailable_columns
from changelog.spec import ChangelogSpec
from tests.changelog.avro_messages import batch
from tests.changelog.messages import decode, spec
from tests.changelog.test_recognition import record

OID = {"$oid": "64001c996f4de7ff3189d374"}
DOCUMENT = {
    "_id": OID,
    "name": "pen",
    "price": {"$numberDecimal": "10.50"},
    "big": {"$numberLong": "9007199254740993"},
    "small": 7,
    "ratio": {"$numberDouble": "0.5"},
    "at": {"$date": 1767323045123},
    "when": {"$date": {"$numberLong": "-1"}},
    "text_at": {"$date": "2026-01-02T03:04:05.123Z"},
    "data": {"$binary": "AQI=", "$type": "00"},
    "data2": {"$binary": {"base64": "AQI=", "subType": "00"}},
    "tags": ["a", {"$numberLong": "1"}],
    "inner": {"n": {"$numberLong": "1"}},
    "gone": None,
}
COLUMNS = {
    "_id": "string",
    "name": "string",
    "price": "decimal(12,2)",
    "big": "bigint",
    "small": "int",
    "ratio": "double",
    "at": "timestamp",
    "when": "timestamp_ntz",
    "text_at": "timestamp",
    "data": "binary",
    "data2": "binary",
    "tags": "string",
    "inner": "struct<n:bigint>",
    "gone": "string",
}
KEY = {"id": json.dumps(OID)}


def change(op: str, after: Any, before: Any = None) -> dict[str, Any]:
    return {"before": before, "after": after, "source": {"connector": "mongodb", "ts_ms": 1}, "op": op}


@pytest.mark.parametrize("is_enveloped", [False, True])
def test_documents(is_enveloped: bool) -> None:
    table = spec(COLUMNS, ("_id",), options={"rows": "documents"}, schema_changes="evolve")
    schema = {"type": "struct", "fields": [{"type": "string", "name": "io.debezium.data.Json", "field": "after"}]}

    def wrapped(value: Any, of: Any) -> Any:
        return {"schema": of, "payload": value} if is_enveloped else value

    key = wrapped(KEY, {"type": "struct", "fields": [{"type": "string", "field": "id"}]})
    events = [change("c", json.dumps(DOCUMENT)), change("u", json.dumps(DOCUMENT | {"name": "ink"})), change("d", None)]
    messages = [*(record(wrapped(event, schema), key) for event in events), record(None, key)]
    inserted, updated, deleted = decode("debezium-json", batch(messages), table)
    at = dt.datetime(2026, 1, 2, 3, 4, 5, 123000, dt.UTC)
    assert (inserted.kind, inserted.error) == ("+I", None)
    assert inserted.row == {
        "_id": OID["$oid"],
        "name": "pen",
        "price": Decimal("10.50"),
        "big": 9007199254740993,
        "small": 7,
        "ratio": 0.5,
        "at": at,
        "when": dt.datetime(1969, 12, 31, 23, 59, 59, 999000),
        "text_at": at,
        "data": b"\1\2",
        "data2": b"\1\2",
        "tags": '["a",1]',
        "inner": {"n": 1},
        "gone": None,
    }
    assert (updated.kind, updated.row) == ("+U", inserted.row | {"name": "ink"})
    assert (deleted.kind, deleted.row["_id"], deleted.error) == ("-D", OID["$oid"], None)


def test_a_table_of_documents_is_inferred() -> None:
    decoder = DebeziumJson(ChangelogSpec((), (), options={"rows": "documents"}, schema_changes="evolve"))
    found = list(decoder.changes(batch([record(change("c", json.dumps({"_id": 7, "name": "pen"})), {"id": "7"})])))
    assert [part.fields for part in found if isinstance(part, MessageKey)] == [("_id",)]
    assert [[*part.unknown] for part in found if isinstance(part, Changes)] == [["_id", "name"]]


def test_cells() -> None:
    """A cell that an update doesn't set is unchanged, and one that it sets to null is null."""

    def cells(**values: Any) -> dict[str, Any]:
        return {name: {"value": value, "set": True} for name, value in values.items()}

    columns = {"id": "bigint", "name": "string", "amount": "double", "at": "timestamp_ntz"}
    table = spec(columns, options={"rows": "cells"}, schema_changes="evolve", keeps_unavailable=True)
    kinds = {"id": "int64", "name": "string", "amount": "double", "at": "int64"}
    parts = [
        {"type": "struct", "field": n, "fields": [{"type": t, "field": "value"}, {"type": "boolean", "field": "set"}]}
        for n, t in kinds.items()
    ]
    row = {"type": "struct", "fields": parts}
    schema = {"type": "struct", "fields": [row | {"field": "before"}, row | {"field": "after"}]}
    unset = {"value": None, "set": False}
    events: list[dict[str, Any]] = [
        {"op": "c", "before": None, "after": cells(id=1, name="pen", amount=10.5) | {"at": None}},
        {"op": "u", "before": None, "after": cells(id=1, amount=11.5, at=None) | {"name": None}},
        {"op": "u", "before": None, "after": cells(id=1, name="ink") | {"amount": unset}},
        {"op": "d", "before": cells(id=1) | {"name": None}, "after": None},
        {"op": "d", "before": None, "after": None},
    ]
    for is_enveloped in (False, True):
        messages = [
            record({"schema": schema, "payload": event} if is_enveloped else event, cells(id=1)) for event in events
        ]
        found = decode("debezium-json", batch(messages), table)
        assert [(d.kind, d.row["id"]) for d in found] == [("+I", 1), ("+U", 1), ("+U", 1), ("-D", 1), ("-D", 1)]
        assert found[0].row == {"id": 1, "name": "pen", "amount": 10.5, "at": None}
        rows = next(iter(ChangelogDecoder("debezium-json", table)([batch(messages)])))
        partial = rows.filter(rows.column(UNAVAILABLE).is_valid())
        assert unavailable_columns(partial.column(UNAVAILABLE), 4).tolist() == [
            [False, True, False, False],
            [False, False, True, True],
        ]
        assert partial.column("amount").to_pylist() == [11.5, None]
        assert partial.column("name").to_pylist() == [None, "ink"]


@pytest.mark.parametrize("rows", ["documents", "cells"])
@pytest.mark.parametrize(
    "event",
    [
        {"schema": 5, "payload": {"op": "c", "after": "{}"}},
        {"schema": {"fields": [5, {"field": [1]}, {"field": "after", "fields": [5, {"fields": [5]}]}]}, "payload": 5},
        {"op": "c", "after": "{"},
        {"op": "c", "after": '{"_id": {"$date": {"$numberLong": "x"}}, "id": {"$date": 1e400}}'},
        {"op": "c", "after": '{"id": {"$binary": {}}, "a": {"$date": {}}, "b": {"$numberLong": 5}}'},
        {"op": "u", "after": {"id": {"set": True}, "name": {"set": 5}}},
        {"op": "u", "after": {"id": [], "name": 5}},
        {"op": [], "after": [[]], "before": 7},
        [],
        None,
        "x",
    ],
)
def test_what_looks_otherwise_is_a_bad_record(rows: str, event: Any) -> None:
    table = spec({"id": "bigint", "name": "string"}, options={"rows": rows}, schema_changes="evolve")
    keys: list[Any] = [{"id": "{"}, {"id": []}, 7, [], {"schema": 5, "payload": 5}]
    messages = [record(event, key) for key in keys]
    found = decode("debezium-json", batch(messages), table)
    assert {(d.bad or {}).get("error_class") for d in found} & {"decoder_failed"} == set()
    assert len(found) == (len(messages) if event is not None else len(found))
