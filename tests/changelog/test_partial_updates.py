"""Updates that lack the values of unchanged columns: which rows become partial, and which records are still bad."""

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from changelog.changes import Changes
from changelog.decoding import ChangelogDecoder
from changelog.formats.debezium_avro import DebeziumAvro
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
                "missing_column: key column ID is missing",
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


def maxwell(data: Any, old: Any = None, kind: str = "update") -> dict[str, Any]:
    parts = {"database": "shop", "table": "things", "type": kind, "ts": 1767323045, "data": data}
    return parts | ({"old": old} if old else {})


def canal(data: Any, old: Any = None, kind: str = "UPDATE", **more: Any) -> dict[str, Any]:
    parts = {"data": data, "es": 1767323045000, "isDdl": False, "mysqlType": dict.fromkeys(DMS, "int"), "old": old}
    return parts | {"pkNames": ["id"], "sql": "", "table": "things", "type": kind} | more


@pytest.mark.parametrize("name", ["canal-json", "maxwell-json"])
def test_row_images_of_mysql_that_lack_columns(name: str) -> None:
    """MySQL logs such images with binlog_row_image=MINIMAL or NOBLOB. Null is null, and absent isn't."""

    def message(data: Any, old: Any = None, kind: str = "update") -> dict[str, Any]:
        if name == "maxwell-json":
            return maxwell(data, old, kind)
        return canal([{k: v and str(v) for k, v in data.items()}], old and [old], kind.upper())

    records = messages(
        message({"id": 1, "title": "lamp"}),
        message({"id": 1, "title": None}, {"title": "lamp"}),
        message({"id": 2, "title": "lamp"}, {"id": 1}),
        message({"title": "lamp"}),
        message({"id": 1, "title": "new"}, kind="insert"),
        message({"id": 1}, kind="delete"),
        message({"id": 1, "title": 'a {"shelf":null}, "shelf":null', "shelf": "x"}),
        message({"id": 1, "title": '{"shelf":null}'}),
        message({"id": 1, "title": None, "shelf": None}),
    )
    moved = "missing_column: column shelf is missing, and the key changed: the value is in the old key's row"
    whole: list[tuple[str, dict[str, Any]]] = [
        ("+I", {"id": 1, "title": "new", "shelf": None}),
        ("-D", {"id": 1, "title": None, "shelf": None}),
        ("+U", {"id": 1, "title": 'a {"shelf":null}, "shelf":null', "shelf": "x"}),
        ("+U", {"id": 1, "title": None, "shelf": None}),
    ]
    partial: list[tuple[str, dict[str, Any]]] = [
        ("+U", {"id": 1, "title": "lamp"}),
        ("+U", {"id": 1, "title": None}),
        ("+U", {"id": 1, "title": '{"shelf":null}'}),
    ]
    found = told(decoded(name, records, DMS))
    bad = [moved, "missing_column: key column id is missing"]
    assert sorted(map(repr, found)) == sorted(map(repr, [*whole, *partial, *bad]))
    found = told(decoded(name, records, DMS, options={"missing.columns": "null"}))
    nulled: list[tuple[str, dict[str, Any]]] = [
        ("-U", {"id": 1, "title": None, "shelf": None}),
        ("+U", {"id": 2, "title": "lamp", "shelf": None}),
    ]
    nulled += [(kind, row | {"shelf": None}) for kind, row in partial]
    bad = ["null_key: key column id is null or missing"]
    assert sorted(map(repr, found)) == sorted(map(repr, [*whole, *nulled, *bad]))
    whole_only: list[dict[str, Any]] = [{"options": {"missing.columns": "reject"}}, {"keeps_unavailable": False}]
    for options in whole_only:
        found = told(decoded(name, records, DMS, **options))
        said = "missing_column: column shelf is missing, and no update of this table is completed from the table's row"
        assert sum(str(row).startswith(said) for row in found) == 4
        assert sorted(repr(row) for row in found if isinstance(row, tuple)) == sorted(map(repr, whole))


def test_rows_of_one_message_of_canal_lack_columns_of_their_own() -> None:
    rows = [{"id": "1", "title": "a"}, {"id": "2", "shelf": None}, {"id": "3", "title": None, "shelf": "x"}]
    assert told(decoded("canal-json", messages(canal(rows)), DMS)) == [
        ("+U", {"id": 1, "title": "a"}),
        ("+U", {"id": 2, "shelf": None}),
        ("+U", {"id": 3, "title": None, "shelf": "x"}),
    ]


@pytest.mark.parametrize("more", [{"onlyHandleKey": True}, {"claimCheckLocation": "s3://b/1"}])
def test_a_message_of_ticdc_that_has_only_the_key_changes_no_row_in_silence(more: Any) -> None:
    """The other columns did change, so the table's row doesn't have their values."""
    records = messages(
        canal([{"id": "1"}], [{"id": "1"}], _tidb={"commitTs": 1} | more),
        canal([{"id": "1"}], None, "INSERT", _tidb={"commitTs": 1} | more),
        canal([{"id": "1"}], None, "DELETE", _tidb={"commitTs": 1} | more),
        canal([{"id": "1", "title": "a", "shelf": "b"}], None, "INSERT", _tidb={"commitTs": 1}),
    )
    for options in ({}, {"missing.columns": "null"}):
        found = told(decoded("canal-json", records, DMS, options=options))
        assert [row for row in found if isinstance(row, tuple)] == [
            ("+I", {"id": 1, "title": "a", "shelf": "b"}),
            ("-D", {"id": 1, "title": None, "shelf": None}),
        ]
        bad = [row for row in found if isinstance(row, str)]
        assert [row.partition(",")[0] for row in bad] == ["missing_column: TiCDC sent only the row's key"] * 2


def test_a_field_that_maxwell_left_out_since_it_became_null() -> None:
    """With output_nulls=false. `old` has the fields that changed, so such a field can't be unchanged."""
    records = messages(
        maxwell({"id": 1, "title": "a"}, {"shelf": "b"}),
        maxwell({"id": 1, "title": "a"}, {"title": "b"}),
        maxwell({"id": 1, "title": 'say "shelf":'}, {"title": '"shelf": 1'}),
        '{"type":"update","data":{"id":1,"title":"a"},"old":{"sh\\u0065lf":"b"}}',
    )
    assert told(decoded("maxwell-json", records, DMS)) == [
        ("+U", {"id": 1, "title": "a", "shelf": None}),
        ("+U", {"id": 1, "title": "a"}),
        ("+U", {"id": 1, "title": 'say "shelf":'}),
        ("+U", {"id": 1, "title": "a", "shelf": None}),
    ]


@pytest.mark.parametrize("missing", ["unavailable", "null"])
def test_where_nulls_are_left_out_an_old_partition_may_have_been_null(missing: str) -> None:
    """Then `old` says nothing of a partition column, and the row may have been in any partition."""
    records = messages(maxwell({"id": 1, "title": "a", "shelf": "b"}, {"title": "x"}))
    _, old = told(
        decoded(
            "maxwell-json", records, DMS, trust_before=True, partition_sources=("shelf",), keeps_unavailable=False,
            options={"missing.columns": missing},
        )
    )  # fmt: skip
    assert old == ("-U", {"id": 1, "title": None, "shelf": "b" if missing == "unavailable" else None})


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


def test_what_a_message_lacks_is_told_by_itself() -> None:
    """Also beside a message that spells the image's field with escapes, and so has its name one time less."""
    records = messages(
        '{"type":"update","d\\u0061ta":{"id":1,"title":"a","shelf":"b"}}',
        '{"type":"update","x":{"data":{"title":null,"shelf":null}},"data":{"id":2}}',
    )
    whole, partial = told(decoded("maxwell-json", records, DMS))
    assert whole == ("+U", {"id": 1, "title": "a", "shelf": "b"})
    assert partial == ("+U", {"id": 2})


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


NASTY = ["", "a", "{", "}", "}]", '"shelf":null', '{"shelf":null}', "\\", '\\"', "data", "é"]
VALUES = st.none() | st.sampled_from(NASTY)
NESTED = st.sampled_from([{"shelf": None}, {"data": {"shelf": None}}, [{"shelf": None}], {"data": [{"shelf": None}]}])
IMAGES = st.fixed_dictionaries(
    {"id": st.integers(1, 3)},
    optional={"title": VALUES | NESTED, "shelf": VALUES, "data": NESTED, "x": NESTED | VALUES, "old": NESTED},
)
SPELLINGS: list[dict[str, Any]] = [
    {"separators": (",", ":")},
    {},
    {"separators": (" , ", " : "), "ensure_ascii": False},
]


@settings(deadline=None, max_examples=80)
@given(
    st.lists(st.tuples(st.lists(IMAGES, min_size=1, max_size=3), NESTED | st.none(), st.booleans()), max_size=5),
    st.sampled_from(SPELLINGS),
    st.sampled_from(["ignore", "evolve"]),
)
def test_what_images_lack_is_what_json_says(given_: list[Any], spelling: dict[str, Any], schema_changes: str) -> None:
    """Whatever texts, nested objects and neighbours there are."""
    for name in ("maxwell-json", "canal-json", "ogg-json", "dms-json"):
        texts, expected = [], []
        for images, more, first in given_:
            if name == "canal-json":
                parts: dict[str, Any] = {"type": "UPDATE", "data": images}
            elif name == "maxwell-json":
                images, parts = images[:1], {"type": "update", "data": images[0]}
            elif name == "ogg-json":
                images, parts = images[:1], {"op_type": "U", "after": images[0]}
            else:
                images = images[:1]
                parts = {"data": images[0], "metadata": {"record-type": "data", "operation": "update"}}
            parts = {"x": more, **parts} if first else {**parts, "x": more}
            texts.append(json.dumps(parts, **spelling))
            expected += [sorted({"title", "shelf"} - image.keys()) for image in images]
        if not texts:
            return
        options = {"missing.columns": "unavailable"}
        table = spec(DMS, keeps_unavailable=True, options=options, schema_changes=schema_changes)
        (rows,) = ChangelogDecoder(name, table)([raw_records(messages(*texts))])
        assert is_bad(rows) is None
        lacking = [
            [] if bits is None else [
                column for column, lacks in zip(DMS, unavailable_columns(pa.array([bits]), 3)[0], strict=True) if lacks
            ]
            for bits in rows.column(UNAVAILABLE).to_pylist()
        ]  # fmt: skip
        places = [name_ for name_ in rows.schema.names if name_.startswith("_rowdelta_order")]
        order = np.argsort(rows.column(places[-1]).to_numpy())
        assert [sorted(lacking[number]) for number in order] == expected, (name, texts)


@settings(deadline=None)
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
