"""Bad records say what they are, if they are messages of another kind: their topic, converter or format is wrong."""

from typing import Any

import pytest

from tests.changelog.avro_messages import batch
from tests.changelog.messages import decode, spec
from tests.changelog.test_recognition import CANAL, DMS, FOREIGN, MAXWELL, OGG, record

COLUMNS = {"id": "bigint", "name": "string", "amount": "double"}
MESSAGES = {
    "debezium-json": record({"op": "c", "after": {"id": 1}}),
    "canal-json": record(CANAL),
    "maxwell-json": record(MAXWELL),
    "ogg-json": record(OGG),
    "dms-json": record(DMS),
    "row-kind": record({"id": 1, "row_kind": "+I"}),
}


def letters(format_: str, messages: list[Any], columns: dict[str, str] = COLUMNS, **options: Any) -> list[str | None]:
    found = decode(format_, batch(messages), spec(columns, **options))
    return [one.error for one in found]


@pytest.mark.parametrize("format_", MESSAGES)
@pytest.mark.parametrize(("message", "what", "advice"), FOREIGN)
def test_each_format_says_what_a_message_is(format_: str, message: Any, what: str, advice: str) -> None:
    (found,) = letters(format_, [message])
    assert found is not None
    assert "; such messages are " in found
    assert what in found
    assert advice in found


@pytest.mark.parametrize("format_", MESSAGES)
@pytest.mark.parametrize("other", MESSAGES)
def test_messages_of_another_format_are_named(format_: str, other: str) -> None:
    if format_ != other:
        (found,) = letters(format_, [MESSAGES[other]])
        assert f"; such messages are {other}: set source.format: {other}" in (found or "")


def test_a_broken_message_of_the_right_format_is_nothing_else() -> None:
    broken = [(None, b"{"), (None, b"[1]"), record({"op": "x", "after": {"id": 1}}), record({"nonsense": 1})]
    assert not any("such messages" in str(found) for found in letters("debezium-json", broken))
    assert len(letters("debezium-json", broken)) == len(broken)


@pytest.mark.parametrize("key_type", ["string", "bigint"])
@pytest.mark.parametrize("is_enveloped", [False, True])
def test_cells_are_never_taken_for_texts(key_type: str, is_enveloped: bool) -> None:
    """An update of YugabyteDB has null for the cells that it left unchanged: nothing may become null by that."""
    cell = {"type": "struct", "fields": [{"type": t, "field": n} for n, t in (("value", "string"), ("set", "boolean"))]}
    row = {"type": "struct", "fields": [cell | {"field": "id"}, cell | {"field": "name"}], "field": "after"}
    schema = {"type": "struct", "fields": [row, row | {"field": "before"}, {"type": "string", "field": "op"}]}
    one, pen = ({"value": value, "set": True} for value in ("1", "pen"))
    events = [
        {"op": "c", "before": None, "after": {"id": one, "name": pen}},
        {"op": "u", "before": None, "after": {"id": one, "name": None}},
        {"op": "d", "before": {"id": one, "name": None}, "after": None},
    ]
    messages = [record({"schema": schema, "payload": event} if is_enveloped else event) for event in events]
    found = letters("debezium-json", messages, {"id": key_type, "name": "string"})
    assert len(found) == 3
    assert all("; such messages are rows whose columns are objects {value, set}" in str(reason) for reason in found)


@pytest.mark.parametrize("is_nested", [False, True])
def test_a_new_field_within_a_column_is_named(is_nested: bool) -> None:
    dtype = "struct<geo:struct<city:string>>" if is_nested else "struct<city:string>"
    value: Any = {"city": "Oslo", "zip": "0150"}
    value = {"geo": value} if is_nested else value
    name = "geo.zip" if is_nested else "zip"
    columns = {"id": "bigint", "address": dtype, "places": f"array<{dtype}>", "by": f"map<string,{dtype}>"}
    rows = [{"address": value}, {"places": [value]}, {"by": {"home": value}}]
    messages = [record({"op": "c", "after": {"id": number, **row}}) for number, row in enumerate(rows)]
    assert letters("debezium-json", messages, columns, schema_changes="evolve") == [
        f"type_mismatch: column {column}: has a field '{name}' which the table's column lacks"
        for column in ("address", "places", "by")
    ]
