"""Names messages that no format reads, by their content: what they are, and what to set where they are made.

A topic of Debezium's heartbeats, or rows in the spelling of another converter, would else fail message by message with
reasons that say only what they lack.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from changelog.parse.avro_schema import Node
from changelog.parse.json_records import parse
from changelog.parse.schema_registry import HEADER_BYTES

_CONNECT_KEYS = (
    '["', "connector-", "task-", "tasks-fencing-", "commit-", "target-state-", "session-key", "status-connector-",
    "status-task-", "status-topic-", "restart-connector-", "logger-cluster-",
)  # fmt: skip
"""Keys begin with these texts in the topics where Kafka Connect stores its configuration, offsets and status."""

_OF_GOLDENGATE = {
    "table", "op_type", "op_ts", "current_ts", "pos", "primary_keys", "tokens", "xid", "csn",
}  # fmt: skip
"""Fields of GoldenGate's messages that aren't columns."""


@dataclass(frozen=True)
class Unrecognized:
    """The messages have no format that can be read.

    :param reason: why the format is unknown, for people. If the messages are `known`, a phrase for "they are …".
    :param internal: the messages are internal messages of a program, not changes of tables.
    :param needs_registry: a schema registry, or another schema registry, is needed to recognize the format.
    :param known: it is certain what the messages are.
    """

    reason: str
    internal: bool = False
    needs_registry: bool = False
    known: bool = False


def _internal(what: str) -> Unrecognized:
    return Unrecognized(what, internal=True, known=True)


def _known(what: str) -> Unrecognized:
    return Unrecognized(what, known=True)


DOCUMENTS = _known(
    "events of MongoDB, whose rows are JSON text: set format_options: {rows: documents} (debezium-json), or give the "
    "connector the transform ExtractNewDocumentState and set format_options: {flattened: true}"
)
CELLS = _known(
    "rows whose columns are objects {value, set}, as YugabyteDB and Cassandra send them: set format_options: {rows: "
    "cells} (debezium-json)"
)


def internal_key(key: bytes | None) -> Unrecognized | None:
    """Recognize a program's internal messages by their key. None if the message isn't one of them."""
    text = (key or b"").decode(errors="replace")
    if text.startswith(_CONNECT_KEYS):
        return _internal("internal messages of Kafka Connect")
    if text.startswith("{") and '"keytype"' in text and '"magic"' in text:
        return _internal("internal messages of the schema registry")
    return None


def internal(row: Mapping[str, Any]) -> Unrecognized | None:
    """Recognize messages that aren't changes of tables. None if the message isn't one of them.

    :param row: the fields of a message, or of its schema.
    """
    if {"status", "id", "event_count"} <= row.keys() or ("status" in row and "data_collections" in row):
        return _internal("the beginnings and ends of transactions, from Debezium")
    if {"ddl", "databaseName"} <= row.keys() or {"ddl", "tableChanges"} <= row.keys():
        return _internal("the schema history or schema changes of Debezium")
    if set(row) == {"ts_ms"}:
        return _internal("heartbeats of Debezium")
    if {"aggregate_type", "additional_data"} <= row.keys() or {"aggregateType", "additionalData"} <= row.keys():
        return _internal("notifications of Debezium")
    if row.get("op") == "m" and "message" in row:
        return _internal("logical decoding messages of Debezium")
    if set(row) == {"type", "data"} and isinstance(row["data"], dict) and "data-collections" in row["data"]:
        return _internal("signals for Debezium")
    if set(row) == {"resolved"}:
        return _internal("the resolved timestamps of CockroachDB: create the changefeed without the option resolved")
    return None


def foreign(row: Mapping[str, Any]) -> Unrecognized | None:
    """Recognize changes of tables in a spelling that no format reads. None if the message isn't one of them.

    :param row: a message, without Kafka Connect's envelope.
    """
    if "op" in row:
        sides = [row.get(side) for side in ("before", "after")]
        source = row.get("source")
        is_mongo = isinstance(source, dict) and source.get("connector") == "mongodb"
        if is_mongo or any(isinstance(side, str) for side in sides) or {"patch", "filter"} & row.keys():
            return DOCUMENTS
        return CELLS if any(map(_has_cells, sides)) else None
    if "specversion" in row and {"type", "source", "id"} <= row.keys():
        return _known(f"CloudEvents: {_converter('JsonConverter')}")
    if set(row) == {"schemaId", "payload"}:
        return _known(f"JSON in the wrapper of Apicurio's ExtJsonConverter: {_converter('JsonConverter')}")
    if {"op_type", "table"} <= row.keys() and not {"before", "after"} & row.keys() and row.keys() - _OF_GOLDENGATE:
        return _known(
            "GoldenGate's json_row, which doesn't tell a row's columns from other fields: set gg.handler.….format=json"
        )
    if "after" in row and {"updated", "key", "mvcc_timestamp"} & row.keys() and "source" not in row:
        return _known(
            "changes of CockroachDB without their operation: create the changefeed with envelope = 'enriched', and set "
            "source.format: debezium-json"
        )
    if {"operationType", "ns"} <= row.keys():
        return _known("change stream events of MongoDB, from another connector than Debezium's: take Debezium's")
    return None


def _converter(name: str) -> str:
    return f"set the connector's key.converter and value.converter to org.apache.kafka.connect.json.{name}"


def _has_cells(row: object) -> bool:
    cells = [cell for cell in row.values() if cell is not None] if isinstance(row, dict) else []
    return bool(cells) and all(isinstance(cell, dict) and {"value", "set"} <= cell.keys() for cell in cells)


def foreign_schema(schema: Node) -> Unrecognized | None:
    """`foreign`, for Debezium's events of an Avro schema."""
    sides = [schema.value.fields[side].value for side in ("before", "after") if side in schema.value.fields]
    if any(side.kind == "string" for side in sides):
        return DOCUMENTS
    rows = [field.value for side in sides if side.kind == "record" for field in side.fields.values()]
    cells = [row.kind == "record" and {"value", "set"} <= row.fields.keys() for row in rows]
    return CELLS if cells and all(cells) else None


def framed(value: bytes) -> Unrecognized | None:
    """Recognize a value that begins like Confluent's wire format, and isn't Avro in it."""
    if value[:HEADER_BYTES] == bytes(HEADER_BYTES) and len(value) > HEADER_BYTES + 4:
        # Confluent's ids begin at 1, and 8 bytes of an id begin with zeros
        what = "Avro with ids of 8 bytes, as Apicurio's converter writes"
        return _known(f"{what}: set its apicurio.registry.as-confluent to true")
    if value[HEADER_BYTES : HEADER_BYTES + 1] == b"{":
        try:
            parse(value[HEADER_BYTES:])
        except (ValueError, RecursionError):
            return None
        return _known(f"JSON with its schema in a registry: {_converter('JsonConverter')}")
    return None
