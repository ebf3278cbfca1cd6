"""With `show_values` false, no reason of a bad record has a value of its row, whatever is wrong with it."""

import datetime as dt
import json
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from changelog import formats
from changelog.changes import FormatError
from changelog.decoding import ChangelogDecoder, failed_with
from changelog.formats.avro import Avro
from changelog.formats.debezium_avro import DebeziumAvro
from changelog.formats.row_kind import RowKindRows
from changelog.rows import BadRecord
from changelog.shown_values import shown
from changelog.source_tables import Found
from tests.changelog import test_canal_json, test_dms_json, test_maxwell_json, test_ogg_json
from tests.changelog.avro_messages import batch, given
from tests.changelog.avro_messages import message as avro
from tests.changelog.messages import Decoded, Message, decode, in_order, raw_records, spec

SECRET = "S3cr3t-value"
SECRETS: list[Any] = [
    SECRET, "73519", "73519.4862", "BNI73519", "73519abc4862", "73519-_4", 73519_486_2735, 1767373519123, 73519.4862,
    10**30 + 73519, {"a": SECRET}, {"b": 73519}, [SECRET], [73519], SECRET * 20, f"{SECRET}\n'", "73519-13-45",
]  # fmt: skip
TRACES = ("S3cr3t", "73519", "2026-01-02")
"""Parts of the values. The date is `1767373519123` as a time."""

TYPES = (
    "bigint", "int", "tinyint", "float", "double", "decimal(3,2)", "decimal(12,2)", "boolean", "date", "timestamp",
    "timestamp_ntz", "binary", "uuid", "array<int>", "map<string,int>", "struct<a:int>", "struct<a:decimal(3,2)>",
)  # fmt: skip

EVENT = {"before": None, "source": {"ts_ms": 1, "table": "things"}, "ts_ms": 1}
ODD = ["", "[", SECRET, f'"{SECRET}"', f"[{SECRET}]", f'{{"{SECRET}', f'{{"op":"{SECRET}"}}', f'{{"after":"{SECRET}"}}']
"""Texts that no format reads."""


def inserted(name: str, row: dict[str, Any]) -> Any:
    match name:
        case "debezium-json":
            return EVENT | {"after": row, "op": "c"}
        case "maxwell-json":
            return test_maxwell_json.message("insert", row)
        case "canal-json":
            return test_canal_json.message("INSERT", [row])
        case "ogg-json":
            return test_ogg_json.message("I", after=row)
        case "dms-json":
            return test_dms_json.message("insert", row)
    return {"row_kind": "+I", **row}


def of_operation(name: str, op: Any) -> Any:
    row = {"id": 1, "v": SECRET}
    match name:
        case "debezium-json":
            return EVENT | {"after": row, "op": op}
        case "maxwell-json":
            return test_maxwell_json.message(op, row)
        case "canal-json":
            return test_canal_json.message(op, [row])
        case "ogg-json":
            return test_ogg_json.message(op, after=row)
        case "dms-json":
            return test_dms_json.message(op, row)
    return {"row_kind": op, **row}


JSON_FORMATS = [name for name in formats.OURS if "avro" not in name]


def check(found: list[Decoded]) -> set[str]:
    """No reason has a trace of a value. Returns the error classes."""
    bad = [one.bad for one in found if one.bad is not None]
    for one in bad:
        assert not [trace for trace in TRACES if trace in one["reason"]], one["reason"]
    return {one["error_class"] for one in bad}


def hidden(name: str, values: list[Any], columns: dict[str, str], **options: Any) -> set[str]:
    """Decode messages. Returns the classes of the bad ones."""
    table = spec(columns, show_values=False, **options)
    records = [value if isinstance(value, Message) else Message(value, n) for n, value in enumerate(values)]
    return check(decode(name, raw_records(records), table))


@pytest.mark.parametrize("schema_changes", ["ignore", "evolve"])
@pytest.mark.parametrize("name", JSON_FORMATS)
def test_values_that_do_not_fit(name: str, schema_changes: Any) -> None:
    for dtype in TYPES:
        records = [inserted(name, {"id": 1, "v": value}) for value in SECRETS]
        classes = hidden(name, records, {"id": "bigint", "v": dtype}, schema_changes=schema_changes)
        assert BadRecord.TYPE_MISMATCH in classes or (dtype, name) == ("binary", "canal-json"), dtype
    keys = [inserted(name, {"id": value, "v": "a"}) for value in SECRETS]
    assert BadRecord.TYPE_MISMATCH in hidden(name, keys, {"id": "int", "v": "string"})


@pytest.mark.parametrize("name", JSON_FORMATS)
def test_operations_and_other_contents(name: str) -> None:
    columns = {"id": "bigint", "v": "string"}
    operations = [of_operation(name, op) for op in (SECRET, 73519, None, [SECRET], {SECRET: SECRET})]
    assert BadRecord.UNKNOWN_OPERATION in hidden(name, operations, columns)
    key = Message(None, 0, key={"id": SECRET})
    odd = [*ODD, key, Message(None, 0, key=SECRET), Message(None, 0, key=f"Struct{{id={SECRET}}}")]
    assert BadRecord.UNPARSEABLE in hidden(name, odd, columns)
    only = [inserted(name, {"id": None, "v": SECRET}), inserted(name, {"v": SECRET}), of_operation(name, SECRET)]
    assert BadRecord.NULL_KEY in hidden(name, only, columns)
    order = (("v", spec({"v": "bigint"}).columns[0].type),)
    assert hidden(name, [inserted(name, {"id": 1, "v": SECRET})], columns, order_by=order)
    hidden(name, [*operations, *only], columns, key=(), inserts_only=True)


@pytest.mark.parametrize("setting", ["precise", "string", ""])
def test_what_another_setting_would_make_of_a_value(setting: str) -> None:
    options = {"decimal.handling.mode": setting} if setting else {}
    records = [inserted("debezium-json", {"id": 1, "v": value}) for value in SECRETS]
    for dtype in ("decimal(12,2)", "decimal(12,0)"):
        hidden("debezium-json", records, {"id": "bigint", "v": dtype}, options=options)
    for mode in ("hex", "base64", "base64-url-safe"):
        hidden("debezium-json", records, {"id": "bigint", "v": "binary"}, options={"binary.handling.mode": mode})
    for mode in ("connect", "microseconds"):
        hidden("debezium-json", records, {"id": "bigint", "v": "timestamp_ntz"}, options={"time.precision.mode": mode})
    (one,) = decode(
        "debezium-json",
        raw_records([Message(inserted("debezium-json", {"id": 1, "v": "10.50"}), 0)]),
        spec({"id": "bigint", "v": "decimal(12,2)"}, show_values=False),
    )
    assert one.error == (
        "type_mismatch: column v: text of 5 characters is a number, not base64: the connector's decimal.handling.mode "
        "seems to be string. Set decimal.handling.mode: string in format_options"
    )


@pytest.mark.parametrize("name", ["avro", "debezium-avro"])
def test_avro(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"type": "record", "name": "Row", "fields": [{"name": "id", "type": "long"}, {"name": "v", "type": "string"}]}
    fields = [{"name": side, "type": ["null", row if side == "before" else "Row"]} for side in ("before", "after")]
    event = {"type": "record", "name": "Envelope", "fields": [*fields, {"name": "op", "type": "string"}]}
    own = {"type": "record", "name": "Row", "fields": [*row["fields"], {"name": "row_kind", "type": "string"}]}
    after = {"id": 1, "v": SECRET}
    rows: list[dict[str, Any]] = [{"before": None, "after": after, "op": op} for op in ("c", SECRET, "d")]
    if name == "avro":
        rows = [after | {"row_kind": kind} for kind in ("+I", SECRET)]
    values = [avro(1, event if name != "avro" else own, one) for one in rows]
    values += [values[0][:-3], SECRET.encode(), avro(2, "string", SECRET)]
    text: dict[int, str] = {1: json.dumps(event if name != "avro" else own), 2: '"string"'}
    made = DebeziumAvro if name != "avro" else Avro
    monkeypatch.setattr(formats, "find", lambda _: lambda table: made(table, given(text)))
    table = spec({"id": "bigint", "v": "int"}, show_values=False)
    pairs: list[tuple[bytes | None, bytes | None]] = [(None, value) for value in values]
    (found,) = ChangelogDecoder(name, table)([batch(pairs)])
    classes = check(in_order(found, table, {}))
    assert {BadRecord.TYPE_MISMATCH, BadRecord.UNPARSEABLE} <= classes


class Fragile(RowKindRows):
    """Puts a value into its exception, as Arrow and Python do."""

    kind: type[Exception] = ValueError

    def changes(self, records: pa.RecordBatch) -> Iterator[Found]:
        raise self.kind(f"can't read {records.column('value').to_pylist()}")


def test_exceptions_of_a_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "find", lambda _: Fragile)
    record = raw_records([Message({"row_kind": "+I", "id": 1, "v": SECRET}, 0)])
    table = spec({"id": "bigint", "v": "string"}, show_values=False)
    found = decode("fragile", record, table)
    assert check(found) == {BadRecord.DECODER_FAILED}
    assert found[0].bad is not None
    assert failed_with(found[0].bad["reason"]) == "ValueError"
    monkeypatch.setattr(Fragile, "kind", NotImplementedError)
    with pytest.raises(FormatError, match=r"fails in its own code: NotImplementedError$") as error:
        decode("fragile", record, table)
    assert error.value.__cause__ is None
    assert error.value.__suppress_context__


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("S3cr3t-value", "text of 12 characters"),
        ("x", "text of 1 character"),
        (b"abc", "binary of 3 bytes"),
        (-12345, "integer of 5 digits"),
        (True, "bool"),
        (1.5, "float"),
        (Decimal("1.50"), "Decimal"),
        (dt.date(2026, 1, 2), "date"),
        (None, "NULL"),
        ([1, 2], "list of 2 elements"),
        ({"a": 1}, "dict of 1 element"),
    ],
)
def test_types_and_lengths(value: Any, expected: str) -> None:
    assert shown(value, visible=False) == expected


def test_values_are_shown_otherwise() -> None:
    assert shown("v", visible=True) == "'v'"
    assert shown("v" * 100, visible=True) == f"'{'v' * 80}…'"
