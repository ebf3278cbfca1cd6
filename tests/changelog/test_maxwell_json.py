"""Maxwell's messages, as the tool sends them and as it doesn't."""

import base64
import datetime as dt
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import types as T

from changelog.decoding import ChangelogDecoder
from changelog.rows import SNAPSHOT
from tests.changelog import fuzz
from tests.changelog.messages import Decoded, decode, messages, raw_records, spec
from tests.changelog.things import COLUMNS, brief, removal, row


def message(kind: str, data: Any, old: Any = None, **more: Any) -> dict[str, Any]:
    """In the order in which Maxwell writes fields."""
    parts: dict[str, Any] = {"database": "depot", "table": "things", "type": kind, "ts": 1767323045, "xid": 7125}
    parts |= {"commit": True, "position": "master.000006:800911", "primary_key_columns": ["id"], "data": data}
    return parts | ({"old": old} if old else {}) | more


def thing(number: int, **values: Any) -> dict[str, Any]:
    return {"id": number, "title": "lamp", "weight": 0.75, "shelf": "a1"} | values


def ddl(kind: str, sql: str) -> dict[str, Any]:
    definition = {
        "database": "depot",
        "charset": "utf8mb4",
        "table": "things",
        "columns": [{"type": "int", "name": "id"}],
    }
    return {"type": kind, "database": "depot", "table": "things", "def": definition, "ts": 1767323045000, "sql": sql}


def decoded(values: list[Any], **table: Any) -> list[Decoded]:
    columns = table.pop("columns", COLUMNS)
    return decode("maxwell-json", raw_records(messages(*values)), spec(columns, **table))


def test_a_row_s_life() -> None:
    found = decoded(
        [
            message("insert", thing(1)),
            message("update", thing(1, weight=5.125), {"weight": 0.75}),
            message("update", thing(2, weight=5.125), {"id": 1}),
            message("delete", thing(2)),
            None,
        ]
    )
    assert brief(found) == [
        (0, 1, "+I", row(1)),
        (1, 1, "+U", row(1, weight=Decimal("5.125"))),
        (2, 0, "-U", removal(1)),
        (2, 1, "+U", row(2, weight=Decimal("5.125"))),
        (3, 1, "-D", removal(2)),
    ]


@pytest.mark.parametrize(
    ("old", "shelf"),
    [({"shelf": "b2"}, "b2"), ({"title": "chair"}, "a1"), ({"shelf": None}, None), ({"title": None}, "a1")],
)
def test_in_changelog_mode_the_old_row_is_data_with_the_fields_of_old(old: Any, shelf: str | None) -> None:
    """A field that old lacks is unchanged; one that is null there was null."""
    found = decoded([message("update", thing(1), old)], partition_sources=("shelf",), trust_before=True)
    assert brief(found) == [(0, 0, "-U", removal(1, shelf=shelf)), (0, 1, "+U", row(1))]


def test_an_escaped_name_is_the_same_field() -> None:
    data = '{"id":1,"title":"lamp","weight":0.75,"shelf":"a1"}'
    text = f'{{"type":"update","ts":1,"data":{data},"old":{{"\\u0073helf":null}}}}'
    found = decoded([text], partition_sources=("shelf",), trust_before=True)
    assert [d.row["shelf"] for d in found] == [None, "a1"]


def test_bootstrap() -> None:
    values = [
        message("bootstrap-start", {}),
        message("bootstrap-insert", thing(1)),
        message("insert", thing(2)),
        message("bootstrap-complete", {}),
    ]
    (batch,) = ChangelogDecoder("maxwell-json", spec(COLUMNS, trust_before=True))([raw_records(messages(*values))])
    assert batch.column("id").to_pylist() == [1, 2]
    assert batch.column(SNAPSHOT).to_pylist() == [True, False]


def test_statements_about_the_table() -> None:
    values = [ddl(f"{what}-{done}", "…") for what in ("table", "database") for done in ("create", "alter", "drop")]
    assert decoded(values) == []
    bad = decoded(
        [ddl("table-alter", "ALTER TABLE things DROP PARTITION p1"), ddl("table-truncate", "truncate things")]
    )
    assert [(d.error or "").split(":")[0] for d in bad] == ["unsupported_event", "truncate"]


def test_bad_records_say_why() -> None:
    known = "; expected one of insert, update, delete, bootstrap-insert"
    cases: list[tuple[Any, str]] = [
        ("no JSON", "unparseable: the value is not a JSON object"),
        ({"id": 1}, "unknown_operation: type is missing"),
        (message("upsert", thing(1)), "unknown_operation: type is 'upsert'" + known),
        (message("insert", None), "missing_column: operation 'insert' has no row"),
        (message("delete", None), "missing_column: operation 'delete' has no row"),
        (message("insert", "c2VjcmV0"), "unparseable: field data is not an object"),  # encrypted
        (
            message("insert", thing(1, weight=0.7501)),
            "type_mismatch: column weight: '0.7501' does not fit decimal(8,3)",
        ),
        (message("insert", {"title": "lamp"}), "null_key: key column id is null or missing"),
        (message("update", thing(1), {"id": "x"}), "type_mismatch: column id: 'x' does not fit int"),
    ]
    found = decoded([value for value, _ in cases])
    assert [(d.offset, d.error) for d in found] == [(i, reason) for i, (_, reason) in enumerate(cases)]


def test_mysql_spellings() -> None:
    columns = {
        "id": "bigint",
        "dec": "decimal(38,10)",
        "at": "timestamp_ntz",
        "day": "date",
        "flag": "boolean",
        "blob": "binary",
        "tags": "array<string>",
        "doc": "string",
    }
    good = {
        "id": 9007199254740993,
        "dec": Decimal("1234567890123456789012345678.9012345678"),
        "at": "2026-01-02 03:04:05.123456",
        "day": "2026-01-02",
        "flag": 1,
        "blob": "3q0=",
        "tags": ["a", "b,c"],
        "doc": {"a": None},
    }
    misfits = [
        ("at", "0000-00-00 00:00:00"),
        ("day", "0000-00-00"),
        ("flag", 2),
        ("blob", "***"),
        ("tags", "a"),
    ]
    values = [fuzz.text(message("insert", good | dict([misfit]))).decode() for misfit in misfits]
    found = decoded([fuzz.text(message("insert", good)).decode(), *values], columns=columns)
    assert found[0].error is None
    assert found[0].row == good | {
        "at": dt.datetime(2026, 1, 2, 3, 4, 5, 123456),
        "day": dt.date(2026, 1, 2),
        "flag": True,
        "blob": b"\xde\xad",
        "doc": '{"a":null}',
    }
    for (name, _), d in zip(misfits, found[1:], strict=True):
        assert (d.error or "").startswith(f"type_mismatch: column {name}: "), (name, d.error)


def test_order_and_metadata() -> None:
    order = (("xid", T.LongType()), ("commit", T.BooleanType()))
    table = spec(COLUMNS, order_by=order, metadata=("_op", "_ts"))
    values = [message("insert", thing(1)), message("delete", thing(1), ts=2**62)]
    (batch,) = ChangelogDecoder("maxwell-json", table)([raw_records(messages(*values))])
    columns = batch.to_pydict()
    assert columns["_rowdelta_order_0"] == [7125] * 2
    assert columns["_rowdelta_order_1"] == [True] * 2
    assert columns["_op"] == ["insert", "delete"]
    assert columns["_ts"] == [dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC), None]


def test_unknown_fields_are_noticed() -> None:
    seen: dict[str, str] = {}
    decoder = ChangelogDecoder("maxwell-json", spec(COLUMNS, schema_changes="evolve"), seen.update)
    list(decoder([raw_records(messages(message("insert", thing(1, count=5))))]))
    assert seen == {"count": "bigint"}


def test_a_list_of_nulls_that_nobody_reads() -> None:
    """Arrow's JSON reader (25.0.1) stumbles over it where other fields are watched."""
    found = decoded([message("insert", thing(1), table=[None, None])], schema_changes="evolve")
    assert brief(found) == [(0, 1, "+I", row(1))]


def test_columns_are_inferred() -> None:
    values = [message("insert", thing(1)), message("update", thing(1), {"id": 2}), message("delete", thing(1))]
    assert fuzz.inferred("maxwell-json", values) == {
        "id": "int64",
        "title": "string",
        "weight": "double",
        "shelf": "string",
    }


# Random.


def spelled(row: fuzz.Row) -> dict[str, Any]:
    values = dict(row)
    values["ok"] = None if row["ok"] is None else int(row["ok"])
    values["at"] = None if row["at"] is None else row["at"].isoformat(" ", "microseconds")
    values["day"] = None if row["day"] is None else row["day"].isoformat()
    values["data"] = None if row["data"] is None else base64.b64encode(row["data"]).decode()
    return values


def encoded(change: fuzz.Change) -> dict[str, Any]:
    data = spelled(change.new or change.old or {})
    if change.operation != "update":
        return message(change.operation, data)
    assert change.old is not None
    return message("update", data, {n: v for n, v in spelled(change.old).items() if v != data[n]})


@settings(deadline=None, max_examples=100)
@given(fuzz.histories, st.booleans())
def test_random_changes_come_back(history: list[fuzz.Change], trust_before: bool) -> None:
    values = [encoded(change) for change in history]
    parts = [[change] for change in history]
    fuzz.assert_decoded("maxwell-json", values, parts, fuzz.table(trust_before=trust_before))


DAMAGED = [
    message("insert", {"id": 1, "region": "eu", "amount": 1.5, "ok": 1, "data": "AP8="}),
    message("update", {"id": 1, "region": "eu"}, {"id": 3, "region": None}),
    message("delete", {"id": 1}),
    ddl("table-alter", "alter table a"),
]


def is_ignored(value: Any) -> bool:
    return value["type"] in {"bootstrap-start", "bootstrap-complete"} | {
        f"{what}-{done}" for what in ("table", "database") for done in ("create", "alter", "drop")
    }


@fuzz.much(100)
@given(fuzz.damaged(DAMAGED), st.sampled_from(["ignore", "evolve"]), st.sampled_from([(), ("depot.things",)]))
def test_nothing_is_lost(messages: list[fuzz.Message], schema_changes: str, source_tables: tuple[str, ...]) -> None:
    table = fuzz.table(trust_before=True, schema_changes=schema_changes, source_tables=source_tables)
    fuzz.assert_accounted(
        "maxwell-json", messages, table, is_ignored, table_of=lambda value: fuzz.table_of(value, "database", "table")
    )


@pytest.mark.parametrize("count", [50, 300])
def test_a_new_column_beside_an_object_of_very_many_names(count: int) -> None:
    """Its names are data. New columns are found nevertheless, wherever they begin."""
    values = [
        message(
            "insert",
            thing(n) | {"attributes": {f"u{n}_{m}": 1 for m in range(9)}} | ({"vip": True} if n >= count // 2 else {}),
        )
        for n in range(count)
    ]
    observed = list[Mapping[str, str]]()
    table = spec(COLUMNS, schema_changes="evolve", excluded=frozenset(["attributes"]))
    decoder = ChangelogDecoder("maxwell-json", table, observe=observed.append)
    (rows,) = decoder([raw_records(messages(*values))])
    assert rows.num_rows == count
    assert [dict(each) for each in observed] == [{"vip": "boolean"}]
