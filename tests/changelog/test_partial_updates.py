"""Updates that lack the values of unchanged columns: which rows become partial, and which records are still bad."""

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from changelog.changes import Changes
from changelog.debezium_avro import DebeziumAvro
from changelog.decoding import ChangelogDecoder
from changelog.rows import BAD, KIND, UNAVAILABLE, RowKind, is_bad, unavailable_bits, unavailable_columns
from tests.changelog import avro_messages
from tests.changelog.messages import Message, messages, raw_records, sample, spec

TOAST = {"id": "int", "note": "string", "big": "string", "bb": "binary", "arr": "array<string>"}
PLACEHOLDER = "__debezium_unavailable_value"


def decoded(name: str, records: list[Message], columns: dict[str, str], **options: Any) -> pa.RecordBatch:
    table = spec(columns, (next(iter(columns)),), **{"keeps_unavailable": True, **options})
    (rows,) = ChangelogDecoder(name, table)([raw_records(records)])
    rows.validate(full=True)
    return rows


def told(rows: pa.RecordBatch) -> list[Any]:
    """Each row: its kind and the values that it has; for a bad record the reason."""
    names = [name for name in rows.schema.names if not name.startswith("_")]
    found: list[Any] = []
    for row in rows.to_pylist():
        bits = row.get(UNAVAILABLE)
        if row[BAD] is not None and bits is None:
            found.append(f"{row[BAD]['error_class']}: {row[BAD]['reason']}")
            continue
        assert (row[BAD] is None) == (bits is None)
        lacking = unavailable_columns(pa.array([bits], pa.binary()), len(names))[0] if bits else [False] * len(names)
        assert all(row[name] is None for name, lacks in zip(names, lacking, strict=True) if lacks)
        values = {name: row[name] for name, lacks in zip(names, lacking, strict=True) if not lacks}
        found.append((RowKind(row[KIND]).short, values))
    return found


@pytest.mark.parametrize("server", ["pgj", "pgenv", "pgnull"])
def test_an_unchanged_toast_value_makes_a_row_partial(server: str) -> None:
    """Text, bytes and an array, as Debezium really sends them. The row keeps its record, for a dead letter."""
    records = sample(server, "toast_def")
    rows = decoded("debezium-json", records, TOAST)
    update, delete = told(rows)
    assert update == ("+U", {"id": 1, "note": "b"})
    assert delete[0] == "-D"
    assert is_bad(rows) is None
    bad = rows.column(BAD)[0].as_py()
    assert (bad["source"], bad["offset"]) == (f"{server}.public.toast_def", records[0].offset)
    assert bad["value"].decode() == records[0].raw()[4]
    assert bad["error_class"] == "unavailable_value"
    assert bad["reason"] == "column big: the source didn't send the unchanged value"


def event(op: str, after: Any, before: Any = None) -> dict[str, Any]:
    return {"before": before, "after": after, "op": op}


def test_only_an_update_that_keeps_its_key_may_lack_values() -> None:
    lamp = {"id": 1, "note": "a", "big": PLACEHOLDER}
    records = messages(
        event("c", lamp),
        event("u", lamp, {"id": 2, "note": "a", "big": "x"}),
        event("u", lamp, {"id": 1, "note": "b", "big": None}),
        event("u", {"id": PLACEHOLDER, "note": "a", "big": "x"}),
        event("u", {"id": 1, "note": "whole", "big": "x"}),
        event("d", None, {"id": 1, "note": None, "big": PLACEHOLDER}),
    )
    said = "unavailable_value: column big: the source didn't send the unchanged value"
    found = told(decoded("debezium-json", records, {"id": "string", "note": "string", "big": "string"}))
    assert sorted(map(repr, found)) == sorted(
        map(
            repr,
            [
                ("+U", {"id": "1", "note": "a"}),
                ("+U", {"id": "1", "note": "whole", "big": "x"}),
                ("-D", {"id": "1", "note": None, "big": None}),
                f"{said} with an insert: if the key changed, it is in the old key's row, which is deleted",
                f"{said}, and the key changed: the value is in the old key's row",
                "unavailable_value: column id: the source didn't send the unchanged value",
            ],
        )
    )


def test_a_record_with_another_fault_is_bad() -> None:
    records = messages(event("u", {"id": 1, "n": "x", "big": PLACEHOLDER}))
    (found,) = told(decoded("debezium-json", records, {"id": "int", "n": "int", "big": "string"}))
    assert found == "type_mismatch: column n: 'x' does not fit int"


def test_a_required_column_may_be_unavailable_but_not_null() -> None:
    table = spec({"id": "int", "big": "string"}, keeps_unavailable=True)
    table = type(table)(**{**vars(table), "columns": (table.columns[0], type(table.columns[0])(
        "big", table.columns[1].type, required=True))})  # fmt: skip
    records = messages(event("u", {"id": 1, "big": PLACEHOLDER}), event("u", {"id": 1, "big": None}))
    (rows,) = ChangelogDecoder("debezium-json", table)([raw_records(records)])
    assert told(rows) == [
        ("+U", {"id": 1}),
        "type_mismatch: column big is null or missing, and the table requires a value",
    ]


def test_a_placeholder_of_ones_own() -> None:
    options = {"unavailable.value.placeholder": "?"}
    records = messages(event("u", {"id": 1, "big": "?"}), event("u", {"id": 1, "big": PLACEHOLDER}))
    found = told(decoded("debezium-json", records, {"id": "int", "big": "string"}, options=options))
    assert found == [("+U", {"id": 1}), ("+U", {"id": 1, "big": PLACEHOLDER})]


def test_rows_that_a_transform_made_may_lack_values_too() -> None:
    records = messages({"id": 1, "big": PLACEHOLDER, "__op": "u"}, {"id": 1, "big": PLACEHOLDER, "__op": "c"})
    update, insert = told(
        decoded("debezium-json", records, {"id": "int", "big": "string"}, options={"flattened": "true"})
    )
    assert update == ("+U", {"id": 1})
    assert "with an insert" in insert


def test_avro() -> None:
    schema = {
        "type": "record", "name": "Envelope", "fields": [
            {"name": "before", "type": ["null", {"type": "record", "name": "Value", "fields": [
                {"name": "id", "type": "int"}, {"name": "v", "type": ["null", "string"]},
                {"name": "l", "type": ["null", {"type": "array", "items": "string"}]}]}]},
            {"name": "after", "type": ["null", "Value"]}, {"name": "op", "type": "string"}],
    }  # fmt: skip

    def update(**values: Any) -> tuple[None, bytes]:
        return None, avro_messages.message(1, schema, {"op": "u", "before": None, "after": {"id": 1, **values}})

    table = avro_messages.spec(["id", "v", "l"], keeps_unavailable=True)
    decoder = DebeziumAvro(table, avro_messages.given({1: json.dumps(schema)}))
    found = avro_messages.outcome(decoder, [update(v=PLACEHOLDER, l=["x"]), update(v="y", l=[PLACEHOLDER])])
    assert found.rows == [(0, "+U", {"id": 1, "v": None, "l": ["x"]}), (1, "+U", {"id": 1, "v": "y", "l": None})]
    (changes,) = found.raw
    assert isinstance(changes, Changes)
    assert {n: f.to_pylist() for n, f in changes.unavailable.items()} == {"v": [True, False], "l": [False, True]}


OGG = {"ID": "int", "TITLE": "string", "SHELF": "string"}
DMS = {"id": "int", "title": "string", "shelf": "string"}


def ogg(after: Any, before: Any = None, op: str = "U") -> dict[str, Any]:
    return {"op_type": op, "op_ts": "2026-01-02 03:04:05", "pos": "1", "before": before, "after": after}


def dms(data: Any, before: Any = None, op: str = "update") -> dict[str, Any]:
    return {"data": data, "before-image": before, "metadata": {"record-type": "data", "operation": op}}


def test_compressed_updates_of_goldengate() -> None:
    records = messages(
        ogg({"ID": 1, "TITLE": "lamp"}),
        ogg({"ID": 1, "TITLE": None}, {"ID": 1, "TITLE": "lamp"}),
        ogg({"ID": 1, "TITLE": "x", "SHELF": "", "SHELF_isMissing": True}),
        ogg({"ID": 2, "TITLE": "lamp"}, {"ID": 1}),
        ogg({"TITLE": "lamp"}),
        ogg({"ID": 1, "TITLE": "new"}, op="I"),
    )
    found = told(decoded("ogg-json", records, OGG))
    moved = "missing_column: column SHELF is missing, and the key changed: the value is in the old key's row"
    assert sorted(map(repr, found)) == sorted(
        map(
            repr,
            [
                ("+U", {"ID": 1, "TITLE": "lamp"}),
                ("+U", {"ID": 1, "TITLE": None}),
                ("+U", {"ID": 1, "TITLE": "x"}),
                moved,
                "missing_column: column ID is missing: is the update compressed?",
                ("+I", {"ID": 1, "TITLE": "new", "SHELF": None}),
            ],
        )
    )


def test_updates_of_dms_with_unknown_values() -> None:
    records = messages(dms({"id": 1, "title": "lamp"}), dms({"id": 2, "title": "x"}, {"id": 1}))
    options = {"missing.columns": "unavailable"}
    update, moved = told(decoded("dms-json", records, DMS, options=options))
    assert update == ("+U", {"id": 1, "title": "lamp"})
    assert moved == "missing_column: column shelf is missing, and the key changed: the value is in the old key's row"
    (null,) = told(decoded("dms-json", records[:1], DMS))
    assert null == ("+U", {"id": 1, "title": "lamp", "shelf": None})


def test_what_a_message_lacks_is_found_in_any_spelling() -> None:
    """Names in other places, in texts, in nested objects, with escapes, and with white space."""
    shelf = '{"ID": 1, %s}'
    cases = {
        '"SHELF" : null': False,
        '"TITLE": "SHELF"': True,
        '"TITLE": "\\"SHELF\\":null"': True,
        '"TITLE": "{\\"SHELF\\":null}"': True,
        '"X": {"SHELF": 1}': True,
        '"X": {"SHELF": 1}, "SHELF": null': False,
        '"SH\\u0045LF": null': False,
        '"TITLE": "}"': True,
        '"TITLE": "}", "SHELF": null': False,
    }
    for image, is_lacking in cases.items():
        for frame in ('{"op_type":"U","after":%s}', '{"op_type":"U","x":{"after":{"SHELF":null}},"after":%s}'):
            (found,) = told(decoded("ogg-json", messages(frame % (shelf % image)), OGG))
            assert ("SHELF" not in found[1]) == is_lacking, (image, found)


@pytest.mark.parametrize(
    ("name", "value", "columns"),
    [("ogg-json", ogg({"ID": 1}), OGG), ("dms-json", dms({"id": 1}), DMS)],
)
def test_missing_columns_can_still_be_refused(name: str, value: Any, columns: dict[str, str]) -> None:
    given: list[dict[str, Any]] = [{"options": {"missing.columns": "reject"}}, {"keeps_unavailable": False}]
    for options in given:
        if name == "dms-json":
            options = {"options": {"missing.columns": "unavailable"}, **options}
        (found,) = told(decoded(name, messages(value), columns, **options))
        assert found.startswith("missing_column: column ")


def test_a_column_that_an_update_leaves_out_is_not_missing_from_the_source() -> None:
    seen: dict[str, str] = {}
    table = spec(OGG, ("ID",), keeps_unavailable=True, schema_changes="fail")
    list(ChangelogDecoder("ogg-json", table, seen.update)([raw_records(messages(ogg({"ID": 1, "TITLE": "a"})))]))
    assert not seen
    list(ChangelogDecoder("ogg-json", table, seen.update)([raw_records(messages(ogg({"ID": 1}, op="I")))]))
    assert seen == {"TITLE": "missing", "SHELF": "missing"}


@given(st.lists(st.lists(st.booleans(), min_size=11, max_size=11), min_size=1, max_size=20), st.integers(1, 11))
def test_bits_tell_which_columns_are_lacking(flags: list[list[bool]], columns: int) -> None:
    lacking = np.array(flags)[:, :columns]
    partial = np.any(lacking, axis=1)
    bits = unavailable_bits([lacking[:, n] if lacking[:, n].any() else None for n in range(columns)], partial)
    bits.validate(full=True)
    assert bits.is_valid().to_pylist() == partial.tolist()
    found = unavailable_columns(bits.drop_null(), columns)
    assert np.array_equal(found, lacking[partial])
    tail = pa.concat_arrays([pa.nulls(3, pa.binary()), bits]).slice(3).drop_null()
    assert np.array_equal(unavailable_columns(tail.slice(1), columns), lacking[partial][1:])
