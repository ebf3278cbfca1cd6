"""A tombstone deletes the row of its key, however the key is spelled, or it is a bad record. Each format reads keys in
the same way, and none of them needs to know the table's key.
"""

import json
from typing import Any

import pyarrow as pa
import pytest

from changelog import formats
from changelog.changes import RAW_SCHEMA, Changes
from changelog.formats.avro import Avro
from changelog.formats.debezium_avro import DebeziumAvro
from changelog.spec import ChangelogSpec
from tests.changelog.avro_messages import Known
from tests.changelog.messages import Decoded, decode, spec

ONE = {"id": "bigint", "name": "string"}
TEXT = {"id": "string", "name": "string"}
TWO = {"id": "bigint", "region": "string", "name": "string"}
ID = {"type": "int64", "optional": False, "field": "id"}
STRUCT = {"type": "struct", "fields": [ID], "optional": False, "name": "srv.Key"}
CREATED = {"before": None, "after": {"id": 1, "name": "pen"}, "source": {"ts_ms": 1}, "op": "c", "ts_ms": 1}
DELETED = {"before": {"id": 1, "name": "pen"}, "after": None, "source": {"ts_ms": 1}, "op": "d", "ts_ms": 1}
NOTHING = b'{"schema":null,"payload":null}'


def raw(*pairs: tuple[bytes | None, bytes | None]) -> pa.RecordBatch:
    columns: dict[str, list[Any]] = {name: [None] * len(pairs) for name in RAW_SCHEMA.names}
    columns |= {"source": ["t"] * len(pairs), "partition": [0] * len(pairs), "offset": list(range(len(pairs)))}
    columns |= {"key": [key for key, _ in pairs], "value": [value for _, value in pairs]}
    return pa.RecordBatch.from_pydict(columns, schema=RAW_SCHEMA)


def spelled(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


KEYS: list[tuple[dict[str, str], tuple[str, ...], bytes, dict[str, Any]]] = [
    (ONE, ("id",), b'{"id":7}', {"id": 7}),
    (ONE, ("id",), b' { "id" : 7 } ', {"id": 7}),
    (ONE, ("id",), b"7", {"id": 7}),
    (ONE, ("id",), b"-7", {"id": -7}),
    (ONE, ("id",), spelled({"schema": STRUCT, "payload": {"id": 7}}), {"id": 7}),
    (ONE, ("id",), spelled({"schema": {"type": "int64", "optional": False}, "payload": 7}), {"id": 7}),
    (ONE, ("id",), spelled({"schema": None, "payload": {"id": 7}}), {"id": 7}),
    (ONE, ("id",), spelled({"schema": None, "payload": 7}), {"id": 7}),
    (ONE, ("id",), b"Struct{id=7}", {"id": 7}),
    (ONE, ("id",), b"{id=7}", {"id": 7}),
    (TEXT, ("id",), b"k7", {"id": "k7"}),
    (TEXT, ("id",), b'"k7"', {"id": "k7"}),
    (TEXT, ("id",), b'"a \\"b\\""', {"id": 'a "b"'}),
    (TEXT, ("id",), b"007", {"id": "007"}),
    (TEXT, ("id",), b"1.50", {"id": "1.50"}),
    (TEXT, ("id",), b"true", {"id": "true"}),
    (TEXT, ("id",), "Müller, 1=2".encode(), {"id": "Müller, 1=2"}),
    (TEXT, ("id",), "Struct{id=Müller, 1=2}".encode(), {"id": "Müller, 1=2"}),
    (TWO, ("id", "region"), b'{"id":7,"region":"eu"}', {"id": 7, "region": "eu"}),
    (TWO, ("id", "region"), b"Struct{id=7,region=eu}", {"id": 7, "region": "eu"}),
    (TWO, ("id", "region"), b"{id=7, region=eu}", {"id": 7, "region": "eu"}),
]


@pytest.mark.parametrize("flattened", ["false", "true"])
@pytest.mark.parametrize(("columns", "key", "text", "wanted"), KEYS)
def test_a_tombstone_deletes_the_row_of_its_key(
    columns: dict[str, str], key: tuple[str, ...], text: bytes, wanted: dict[str, Any], flattened: str
) -> None:
    (found,) = decode("debezium-json", raw((text, None)), spec(columns, key, options={"flattened": flattened}))
    assert (found.kind, {name: found.row[name] for name in key}, found.error) == ("-D", wanted, None)


@pytest.mark.parametrize("flattened", ["false", "true"])
@pytest.mark.parametrize(
    ("columns", "key", "text", "error"),
    [
        (ONE, ("id",), b"k7", "type_mismatch"),
        (ONE, ("id",), b"[7]", "type_mismatch"),
        (TEXT, ("id",), b"Struct{no=7}", "null_key"),
        (ONE, ("id",), b'{"id":7', "null_key"),
        (ONE, ("id",), b"\0\0\0\0\x08\x0e", "null_key"),
        (ONE, ("id",), b"\xff\xfe", "null_key"),
        (TWO, ("id", "region"), b"7", "null_key"),
        (TWO, ("id", "region"), b"Struct{id=7,region=eu,x}", "null_key"),
    ],
)
def test_a_key_that_cannot_be_read_is_a_bad_record(
    columns: dict[str, str], key: tuple[str, ...], text: bytes, error: str, flattened: str
) -> None:
    (found,) = decode("debezium-json", raw((text, None)), spec(columns, key, options={"flattened": flattened}))
    assert (found.error or "").partition(":")[0] == error


@pytest.mark.parametrize("text", [b"7", b'{"id":7}', b"Struct{id=7}"])
@pytest.mark.parametrize("format_type", [Avro, DebeziumAvro])
def test_keys_of_another_converter_beside_avro(format_type: type[Avro | DebeziumAvro], text: bytes) -> None:
    format_ = format_type(spec(ONE), lambda: Known({}))
    (found,) = (part for part in format_.changes(raw((text, None))) if isinstance(part, Changes))
    assert [str(v) for v in found.fields["id"].values.to_pylist()] == ["7"]


@pytest.mark.parametrize(
    "nothing", [None, NOTHING, b'{"schema": null, "payload": null}', spelled({"schema": STRUCT, "payload": None})]
)
def test_a_null_in_an_envelope_is_a_null(nothing: bytes | None) -> None:
    """Kafka's JsonConverter with schemas.enable wrote tombstones so (KAFKA-3832)."""

    def kinds(*pairs: tuple[bytes | None, bytes | None]) -> list[tuple[int | None, str, str | None]]:
        found: list[Decoded] = decode("debezium-json", raw(*pairs), spec(ONE))
        return [(d.offset, d.kind, d.error) for d in found]

    key = spelled({"id": 1})
    assert kinds((key, spelled(CREATED)), (key, nothing)) == [(0, "+I", None), (1, "-D", None)]
    assert kinds((key, spelled(DELETED)), (key, nothing)) == [(0, "-D", None)]
    assert kinds((nothing, spelled(CREATED)), (nothing, spelled(DELETED)), (nothing, nothing)) == [
        (0, "+I", None),
        (1, "-D", None),
    ]


MESSAGES = [
    spelled(CREATED),
    spelled(CREATED | {"op": "u", "before": {"id": 1, "name": "x"}}),
    spelled(CREATED | {"op": "u", "before": {"id": 9, "name": "x"}}),
    spelled(DELETED),
    spelled(DELETED | {"before": None}),
    spelled({"op": "t", "before": None, "after": None}),
    spelled({"op": "m", "message": {"prefix": "p"}}),
    spelled({"schema": STRUCT, "payload": {"id": 1}}),
    spelled({"id": 1, "name": "pen", "__op": "c", "__deleted": "false"}),
    spelled({"id": 1, "name": None, "__deleted": "true"}),
    spelled({"row_kind": "-D", "id": 1}),
    spelled({"status": "BEGIN", "id": "1:2", "event_count": None, "data_collections": None}),
    spelled({"ts_ms": 1}),
    spelled({"ddl": "ALTER TABLE t", "databaseName": "d", "tableChanges": []}),
    *(
        spelled({"database": "d", "table": "t", "type": kind, "ts": 1, "data": data, "old": None, "isDdl": False})
        for kind in ("insert", "update", "delete", "INSERT", "UPDATE", "DELETE", "TRUNCATE", "table-create")
        for data in ({"id": 1}, [{"id": "1"}], None)
    ),
    *(
        spelled({"table": "d.t", "op_type": kind, "before": {"ID": 1}, "after": {"ID": 2}, "primary_keys": ["ID"]})
        for kind in "IUDT"
    ),
    *(
        spelled({"data": {"id": 1}, "metadata": {"operation": operation, "record-type": kind, "table-name": "t"}})
        for kind, operation in (("data", "load"), ("data", "update"), ("data", "delete"), ("control", "truncate-table"))
    ),
    NOTHING,
    b"null",
    b"7",
    b"[]",
    b"{}",
    b"garbage",
    b"\0\0\0\0\x09\x02",
    None,
]


@pytest.mark.parametrize("options", [{}, {"flattened": "true"}])
@pytest.mark.parametrize("name", formats.names())
def test_no_message_needs_the_tables_key_and_columns(name: str, options: dict[str, str]) -> None:
    """A table's first start infers both from a sample, which may begin and end anywhere."""
    table = ChangelogSpec((), (), options=options, schema_changes="evolve")
    keys = [None, b'{"id":1}', b"1", b"k", NOTHING, b"Struct{id=1}", b"\0\0\0\0\x08\x02", b"\xff"]
    own = formats.find(name)
    format_ = own(table, lambda: Known({})) if name in ("avro", "debezium-avro") else own(table)  # type: ignore[call-arg]
    for key in keys:
        for value in MESSAGES:
            list(format_.changes(raw((key, value))))
        list(format_.changes(raw(*((key, value) for value in MESSAGES))))
