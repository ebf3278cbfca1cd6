"""What formats give a table in mode append: inserts; everything else is a bad record."""

import json
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from changelog.decoding import ChangelogDecoder
from changelog.formats.avro import Avro
from changelog.formats.row_kind_parquet import FileReader
from changelog.rows import BAD, SNAPSHOT
from tests.changelog import avro_messages
from tests.changelog.messages import Message, decode, messages, raw_records, sample, spec

COLUMNS = {"id": "bigint", "v": "string"}
REFUSED = "a table in mode append takes inserts (+I) only"


def outcome(name: str, *records: Message, **options: str) -> list[str]:
    """Each row's id, or why its record is bad, in the order of records."""
    table = spec(COLUMNS, key=(), inserts_only=True, options=options)
    found = decode(name, raw_records(records), table)
    assert all(row.kind == "+I" for row in found if row.error is None)
    return [str(row.row["id"]) if row.error is None else row.error for row in found]


def event(op: str, before: Any, after: Any) -> dict[str, Any]:
    return {"before": before, "after": after, "op": op}


ROW = {"id": 1, "v": "a"}


def test_debezium() -> None:
    assert outcome("debezium-json", Message(event("r", None, ROW), 0), Message(event("c", None, ROW), 1)) == ["1", "1"]
    for op, before, after in (("u", None, ROW), ("u", {"id": 2}, ROW), ("d", ROW, None), ("d", None, None)):
        (error,) = outcome("debezium-json", Message(event(op, before, after), 0, {"id": 1}))
        assert error == f"not_an_insert: {'+U' if op == 'u' else '-D'}: {REFUSED}"
    # the event before the tombstone said it
    assert outcome("debezium-json", Message(event("c", None, ROW), 0), Message(None, 1, {"id": 1})) == ["1"]


def test_real_debezium_messages() -> None:
    found = outcome("debezium-json", *sample("pgj", "orders"))
    events = [m.value for m in sample("pgj", "orders") if m.value is not None]
    assert sum("not_an_insert" not in row for row in found) == sum(value["op"] in "rc" for value in events)
    assert len(found) == len(events)


def test_flattened_rows_need_their_operation() -> None:
    rows = [Message(ROW | {"__op": op}, n) for n, op in enumerate(("c", "r"))]
    assert outcome("debezium-json", *rows, flattened="true") == ["1", "1"]
    (error,) = outcome("debezium-json", Message(ROW, 0), flattened="true")
    assert error.startswith("not_an_insert: +U")
    (error,) = outcome("debezium-json", Message(None, 0, {"id": 1}), flattened="true")
    assert error.startswith(("not_an_insert: -D", "null_key"))


def test_avro() -> None:
    schema = {"type": "record", "name": "Row", "fields": [{"name": "id", "type": "long"}]}
    key = {"type": "record", "name": "Key", "fields": [{"name": "id", "type": "long"}]}
    schemas = avro_messages.given({1: json.dumps(schema), 2: json.dumps(key)})
    pairs: list[avro_messages.Pair] = [
        (avro_messages.message(2, key, {"id": 1}), avro_messages.message(1, schema, {"id": 1})),
        (None, avro_messages.message(1, schema, {"id": 1})),
        (avro_messages.message(2, key, {"id": 1}), None),
    ]
    found = avro_messages.outcome(Avro(avro_messages.spec(["id"], key=(), inserts_only=True), schemas), pairs)
    assert [(change.record, change.kind) for change in found.changes] == [(0, "+I"), (1, "+I"), (2, "-D")]


@pytest.mark.parametrize(
    ("name", "insert", "update", "delete"),
    [
        (
            "canal-json",
            {"type": "INSERT", "data": [{"id": "1"}, {"id": "1"}]},
            {"type": "UPDATE", "data": [{"id": "1"}], "old": [{"id": "2"}]},
            {"type": "DELETE", "data": [{"id": "1"}]},
        ),
        (
            "maxwell-json",
            {"type": "insert", "data": {"id": 1}},
            {"type": "update", "data": {"id": 1}, "old": {"id": 2}},
            {"type": "delete", "data": {"id": 1}},
        ),
        (
            "ogg-json",
            {"op_type": "I", "after": {"id": 1, "v": "a"}},
            {"op_type": "U", "before": {"id": 2, "v": "a"}, "after": {"id": 1, "v": "a"}},
            {"op_type": "D", "before": {"id": 1}},
        ),
        ("row-kind", {"row_kind": "+I", "id": 1}, {"row_kind": "+U", "id": 1}, {"row_kind": "-D", "id": 1}),
    ],
)
def test_other_formats(name: str, insert: Any, update: Any, delete: Any) -> None:
    assert set(outcome(name, *messages(insert))) == {"1"}
    assert outcome(name, *messages(update, delete)) == [f"not_an_insert: {kind}: {REFUSED}" for kind in ("+U", "-D")]


def test_rows_tell_whether_they_are_from_a_snapshot() -> None:
    table = spec(COLUMNS, key=(), inserts_only=True)
    batch = raw_records(messages(event("r", None, ROW), event("c", None, ROW)))
    (rows,) = ChangelogDecoder("debezium-json", table)([batch])
    assert rows.column(SNAPSHOT).to_pylist() == [True, False]


def test_parquet_files() -> None:
    table = spec(COLUMNS, key=(), inserts_only=True, source_order=False)
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"row_kind": ["+I", "+U"], "id": [1, 2], "v": ["a", "b"]}), sink)
    decoder = ChangelogDecoder("row-kind", table)
    (rows,) = decoder(FileReader(table, 100)(bytes(sink.getvalue()), "1.parquet"))
    assert rows.column("id").to_pylist() == [1, None]
    assert rows.column(BAD).to_pylist()[1]["reason"] == f"+U: {REFUSED}"
