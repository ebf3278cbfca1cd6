"""Messages of every format are recognized, and internal topics of programs are not."""

import json
from typing import Any

import pytest

from changelog.foreign_messages import CELLS, DOCUMENTS, Unrecognized
from changelog.recognition import FLATTENED, Recognized, kind_options, mistaken, recognize
from tests.changelog import avro_messages
from tests.changelog.messages import sample

ROW = {"id": 7, "customer": "Ada", "amount": 10.5}


def record(value: Any, key: Any = None) -> tuple[bytes | None, bytes | None]:
    return None if key is None else json.dumps(key).encode(), None if value is None else json.dumps(value).encode()


def samples(server: str, table: str) -> list[tuple[bytes | None, bytes | None]]:
    return [record(message.value, message.key) for message in sample(server, table)]


@pytest.mark.parametrize(
    ("server", "table", "key"),
    [("pgj", "orders", ("id",)), ("pgj", "comp", ("tenant", "id")), ("pgj", "nokey", ()), ("pgenv", "orders", ("id",))],
)
def test_real_debezium_messages(server: str, table: str, key: tuple[str, ...]) -> None:
    found = recognize(samples(server, table))
    assert isinstance(found, Recognized)
    assert (found.format, found.options, found.key) == ("debezium-json", (), key)
    assert found.has_schema == (server == "pgenv")


def test_real_avro_messages() -> None:
    schemas = avro_messages.Known(avro_messages.sample_schemas())
    found = recognize(avro_messages.sample("comp"), schemas)
    assert found == Recognized("debezium-avro", has_schema=True, key=("tenant", "id"))
    without = recognize(avro_messages.sample("comp"))
    assert isinstance(without, Unrecognized)
    assert without.needs_registry
    wrong = recognize(avro_messages.sample("comp"), avro_messages.Known({}))
    assert isinstance(wrong, Unrecognized)
    assert wrong.needs_registry
    assert "is unknown" in wrong.reason


@pytest.mark.parametrize(
    ("fields", "format_", "options"),
    [((), "avro", ()), (("__deleted",), "debezium-avro", FLATTENED), (("__op",), "debezium-avro", FLATTENED)],
)
def test_rows_as_avro(fields: tuple[str, ...], format_: str, options: Any) -> None:
    """Only the fields that Debezium adds tell its flattened rows from others'."""
    described = [{"name": "id", "type": "long"}, *({"name": name, "type": "string"} for name in fields)]
    schemas = {n: {"type": "record", "name": f"R{n}", "fields": described[: 1 if n == 1 else None]} for n in (1, 2)}
    row = {"id": 7, **dict.fromkeys(fields, "false")}
    record = (avro_messages.message(1, schemas[1], {"id": 7}), avro_messages.message(2, schemas[2], row))
    known = avro_messages.Known({number: json.dumps(schema) for number, schema in schemas.items()})
    found = recognize([record], known)
    assert isinstance(found, Recognized)
    assert (found.format, found.options, found.key, found.has_schema) == (format_, options, ("id",), True)
    assert found.note.startswith("rows without a kind") == (format_ == "avro")


@pytest.mark.parametrize(("server", "table"), [("pgj", "transaction"), ("pgj", "message")])
def test_what_debezium_has_besides_tables(server: str, table: str) -> None:
    found = recognize(samples(server, table))
    assert isinstance(found, Unrecognized)
    assert found.internal


ENVELOPE = {"schema": {"type": "struct", "fields": [{"type": "int64", "field": "id"}]}, "payload": {"id": 7}}
CANAL = {"data": [{"id": "7"}], "type": "INSERT", "isDdl": False, "pkNames": ["id"], "es": 1}
MAXWELL = {"database": "shop", "table": "orders", "type": "insert", "ts": 1, "data": ROW}
OGG = {"table": "SHOP.ORDERS", "op_type": "U", "primary_keys": ["id"], "before": ROW, "after": ROW}
DMS = {"data": ROW, "metadata": {"record-type": "data", "operation": "load"}}
KINDS = (("column", "op"), ("delete", "D"), ("insert", "I"), ("update", "U"))


@pytest.mark.parametrize(
    ("message", "format_", "options", "key"),
    [
        ((ROW | {"__deleted": "false"}, {"id": 7}), "debezium-json", FLATTENED, ("id",)),
        ((ROW, {"id": 7}), "debezium-json", FLATTENED, ("id",)),
        ((ENVELOPE, ENVELOPE), "debezium-json", FLATTENED, ("id",)),
        ((CANAL,), "canal-json", (), ("id",)),
        ((MAXWELL | {"primary_key_columns": ["id"]},), "maxwell-json", (), ("id",)),
        ((MAXWELL, {"database": "shop", "table": "orders", "pk.id": 7}), "maxwell-json", (), ("id",)),
        ((OGG,), "ogg-json", (), ("id",)),
        ((DMS,), "dms-json", (), ()),
        ((ROW | {"row_kind": "+U"}, {"id": 7}), "row-kind", (), ("id",)),
        ((ROW | {"op": "I"}, {"id": 7}), "row-kind", KINDS, ("id",)),
    ],
)
def test_each_format(message: tuple[Any, ...], format_: str, options: Any, key: tuple[str, ...]) -> None:
    found = recognize([record(None, {"id": 1}), record(*message)])
    assert isinstance(found, Recognized)
    assert (found.format, found.options, found.key) == (format_, options, key)
    assert found.has_schema == (message[0] is ENVELOPE)


@pytest.mark.parametrize(
    ("records", "text"),
    [
        ([record({"properties": {}}, None)], "not changes of rows, with the fields properties"),
        ([(b"connector-orders", b'{"properties": {}}')], "Kafka Connect"),
        ([(b'["orders",{"server":"pg"}]', b'{"lsn": 1}')], "Kafka Connect"),
        ([(b'{"keytype":"SCHEMA","subject":"x","magic":1}', b"{}")], "registry"),
        ([record({"source": {}, "databaseName": "shop", "ddl": "CREATE TABLE x"})], "schema history"),
        ([record({"ts_ms": 1}, {"serverName": "pg"})], "heartbeats"),
        ([(None, b"\xff\x00")], "not JSON"),
        ([record([1])], "not objects"),
        ([(b"1", None)], "no message is about a row"),
        ([record(MAXWELL | {"type": "bootstrap-start", "data": {}})], "no message is about a row"),
    ],
)
def test_what_is_no_changelog(records: Any, text: str) -> None:
    found = recognize(records)
    assert isinstance(found, Unrecognized)
    assert text in found.reason


SOURCE = {"version": "3.4.0", "connector": "mongodb", "db": "shop"}
CELL = {"value": 1, "set": True}
EVENT = {"specversion": "1.0", "id": "x", "source": "/debezium/postgresql/pg", "type": "io.debezium.…", "data": ROW}
SIGNAL = {"type": "execute-snapshot", "data": {"data-collections": ["public.orders"]}}
NOTICE = {"id": "1", "aggregate_type": "Initial Snapshot", "type": "STARTED", "additional_data": {}, "timestamp": 1}
CHANGE = {"_id": {"_data": "8264"}, "operationType": "insert", "ns": {"db": "shop"}, "fullDocument": ROW}
FOREIGN = [
    (record({"op": "c", "before": None, "after": json.dumps(ROW)}), "MongoDB", "ExtractNewDocumentState"),
    (record({"op": "d", "before": None, "after": None, "source": SOURCE}), "MongoDB", "rows: documents"),
    (record({"op": "u", "patch": "{}", "filter": "{}", "source": SOURCE}), "MongoDB", "ExtractNewDocumentState"),
    (record({"op": "u", "before": None, "after": {"id": CELL, "name": None}}), "{value, set}", "rows: cells"),
    (record({"op": "d", "before": {"id": CELL | {"deletion_ts": None}}, "after": None}), "{value, set}", "rows: cells"),
    (record(EVENT), "CloudEvents", "JsonConverter"),
    (record({"schemaId": 12, "payload": ROW}), "Apicurio", "JsonConverter"),
    ((None, bytes(8) + b"\7\2\4"), "Apicurio", "as-confluent"),
    ((None, b"\0\0\0\0\7" + json.dumps(ROW).encode()), "its schema in a registry", "JsonConverter"),
    (record({"after": ROW, "updated": "17.0"}), "CockroachDB", "envelope = 'enriched'"),
    (record({"after": None, "key": [7]}), "CockroachDB", "envelope = 'enriched'"),
    (record({"resolved": "1767323045.0000000000"}), "CockroachDB", "resolved"),
    (record({"table": "S.ORDERS", "op_type": "I", "op_ts": "…", "pos": "1", **ROW}), "json_row", "format=json"),
    (record(CHANGE), "MongoDB", "Debezium"),
    (record(SIGNAL), "signals", ""),
    (record(NOTICE), "notifications", ""),
    (record({"ts_ms": 1}, {"serverName": "pg"}), "heartbeats", ""),
]


@pytest.mark.parametrize(("message", "what", "advice"), FOREIGN)
def test_messages_that_no_format_reads_are_named(message: Any, what: str, advice: str) -> None:
    found = recognize([message])
    assert isinstance(found, Unrecognized)
    assert found.known
    assert what in found.reason
    assert advice in found.reason


def test_events_of_mongodb_and_cells_as_avro() -> None:
    cell = {"type": "record", "name": "cell", "fields": [{"name": n, "type": "long"} for n in ("value", "set")]}
    cells = {"type": "record", "name": "row", "fields": [{"name": "id", "type": ["null", cell]}]}
    found = []
    for number, after in enumerate(("string", cells), 1):
        fields = [{"name": "op", "type": "string"}, {"name": "after", "type": ["null", after]}]
        schema = {"type": "record", "name": "event", "fields": fields}
        message = avro_messages.message(number, schema, {"op": "d", "after": None})
        found.append(recognize([(None, message)], avro_messages.Known({number: json.dumps(schema)})))
    assert found == [DOCUMENTS, CELLS]


@pytest.mark.parametrize(
    ("format_", "options", "message", "text"),
    [
        ("debezium-json", {}, record(CANAL), "canal-json: set source.format: canal-json"),
        ("debezium-json", {}, record(ROW | {"__op": "c"}), "debezium-json: set source.format: debezium-json and "
         "format_options: {flattened: true}"),
        ("debezium-json", {"flattened": "true"}, record({"op": "c", "after": ROW}), "before and after"),
        ("maxwell-json", {}, record({"op": "c", "after": ROW}), "debezium-json: set source.format: debezium-json"),
        ("debezium-json", {}, (None, b"\0\0\0\0\7\2"), "registry"),
        ("debezium-avro", {}, (None, b"\0\0\0\0\7\2"), None),
        ("debezium-avro", {}, (None, bytes(9) + b"\7"), "Apicurio"),
        ("debezium-json", {}, record({"op": "c", "after": ROW}), None),
        ("debezium-json", {"flattened": "true"}, record(ROW, {"id": 7}), None),
        ("debezium-json", {}, (b"7", None), None),
        ("debezium-json", {}, (None, b"{"), None),
        ("debezium-json", {}, record({"nonsense": 1}), None),
        ("canal-json", {}, record(CANAL), None),
        ("debezium-json", {"rows": "documents"}, FOREIGN[0][0], None),
        ("debezium-json", {"rows": "cells"}, FOREIGN[0][0], "MongoDB"),
        ("debezium-json", {"rows": "cells"}, FOREIGN[3][0], None),
    ],
)  # fmt: skip
def test_what_a_refused_message_is(format_: str, options: Any, message: Any, text: str | None) -> None:
    found = mistaken(format_, options, message)
    assert text in found if text else not found


def test_what_most_messages_are_counts() -> None:
    found = recognize([record(ROW | {"row_kind": "+I"}, {"id": n}) for n in range(3)] + [record([1])])
    assert isinstance(found, Recognized)
    assert (found.format, found.note) == ("row-kind", "1 of the 4 messages that were read have another format")


def test_kinds_of_rows_by_their_column() -> None:
    assert kind_options({"id": [1], "row_kind": ["+I", "-D", None]}) == ()
    assert kind_options({"_change_type": ["insert", "update_preimage", "update_postimage"]}) == (
        ("column", "_change_type"),
        ("delete", "delete"),
        ("insert", "insert"),
        ("update", "update_postimage"),
        ("update_before", "update_preimage"),
    )
    assert kind_options({"row_kind": [1, 3]}) == (("column_type", "integer"),)
    assert kind_options({"op": ["north", "south"], "kind": ["I"]}) is not None
    assert kind_options({"id": [1], "customer": ["I"]}) is None
