"""How a delete says that its row is deleted, and since when, in formats with and without a row before it."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

from changelog.decoding import ChangelogDecoder, decoded_schema
from changelog.rows import KIND, RowKind, SoftDelete, order_column
from tests.changelog.messages import Message, raw_records, spec, sql

SOFT = SoftDelete("deleted", "deleted_at")
COLUMNS = {"id": "bigint", "v": "string", "at": "bigint"}
STATED, OF_RECORD = datetime(2026, 1, 2, tzinfo=UTC), datetime(2026, 1, 3, tzinfo=UTC)
MILLIS = int(STATED.timestamp() * 1000)


def rows(name: str, messages: list[Message], soft: SoftDelete = SOFT, **table: Any) -> list[dict[str, Any]]:
    made = replace(spec(COLUMNS, **table), soft_delete=soft)
    raw = raw_records(messages)
    place = raw.schema.get_field_index("timestamp")
    raw = raw.set_column(place, raw.schema.field(place), pa.array([OF_RECORD] * len(raw), raw.schema.field(place).type))
    (found,) = ChangelogDecoder(name, made)([raw])
    assert found.schema == decoded_schema(made)
    decoded: list[dict[str, Any]] = found.to_pylist()
    return decoded


def event(op: str, **more: Any) -> dict[str, Any]:
    return {"op": op, "before": None, "after": None, "source": {"ts_ms": MILLIS}, **more}


@pytest.mark.parametrize(
    ("name", "messages", "since"),
    [
        ("debezium-json", [Message(event("d", before={"id": 1, "v": "x", "at": 3}), 0)], STATED),
        ("debezium-json", [Message(event("d"), 0, key={"id": 1})], STATED),
        ("debezium-json", [Message(None, 0, key={"id": 1})], OF_RECORD),
        ("maxwell-json", [Message({"type": "delete", "ts": MILLIS // 1000, "data": {"id": 1, "v": "x"}}, 0)], STATED),
        ("row-kind", [Message({"row_kind": "-D", "id": 1}, 0)], OF_RECORD),
    ],
)
def test_a_delete_says_so(name: str, messages: list[Message], since: datetime) -> None:
    (row,) = rows(name, messages)
    assert (row["id"], row["deleted"], row["deleted_at"]) == (1, True, since)
    assert row["v"] is None


def test_what_sets_a_row_says_that_it_is_not_deleted() -> None:
    (row,) = rows("debezium-json", [Message(event("c", after={"id": 1, "v": "x", "at": 3}), 0)])
    assert (row["v"], row["deleted"], row["deleted_at"]) == ("x", False, None)


def test_a_row_that_goes_to_another_key() -> None:
    before, after = {"id": 1, "v": "x", "at": 3}, {"id": 2, "v": "x", "at": 3}
    found = rows("debezium-json", [Message(event("u", before=before, after=after), 0)])
    said = {(row["id"], RowKind(row[KIND]).short, row["deleted"], row["deleted_at"]) for row in found}
    assert said == {(1, "-U", True, STATED), (2, "+U", False, None)}


@pytest.mark.parametrize("descending", [False, True])
def test_the_order_of_a_delete_is_in_the_row(descending: bool) -> None:
    """In the row's own column, as its value."""
    table = {"order_by": (("at", sql("bigint")),), "descending": frozenset({"at"} if descending else ())}
    soft = replace(SOFT, order={0: "at"})
    (row,) = rows("debezium-json", [Message(event("d", before={"id": 1, "v": "x", "at": 3}), 0)], soft, **table)
    assert row["at"] == 3
    assert isinstance(row[order_column(0)], bytes) == descending
