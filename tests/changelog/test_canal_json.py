"""Canal's messages, as the tool sends them and as it doesn't."""

import datetime as dt
import json
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import types as T

from changelog.decoding import ChangelogDecoder
from tests.changelog import fuzz
from tests.changelog.messages import Decoded, decode, messages, raw_records, spec
from tests.changelog.things import COLUMNS, brief, removal, row


def message(kind: str, data: Any, old: Any = None, **more: Any) -> dict[str, Any]:
    """In the order in which Canal writes fields."""
    parts = {
        "data": data,
        "database": "depot",
        "es": 1767323045000,
        "id": 3,
        "isDdl": False,
        "mysqlType": {"id": "INTEGER", "title": "VARCHAR(255)", "weight": "DECIMAL(8,3)", "shelf": "CHAR(2)"},
        "old": old,
        "pkNames": ["id"],
        "sql": "",
        "sqlType": {"id": 4, "title": 12, "weight": 3, "shelf": 1},
        "table": "things",
        "ts": 1767323045477,
        "type": kind,
    }
    return parts | more


def thing(number: int, title: str | None = "lamp", weight: str | None = "0.750", shelf: str | None = "a1") -> Any:
    return {"id": str(number), "title": title, "weight": weight, "shelf": shelf}


def ddl(kind: str, sql: str) -> dict[str, Any]:
    nothing = dict.fromkeys(("data", "old", "mysqlType", "pkNames", "sqlType"))
    return message(kind, None, isDdl=True, sql=sql) | nothing


def decoded(values: list[Any], **table: Any) -> list[Decoded]:
    columns = table.pop("columns", COLUMNS)
    return decode("canal-json", raw_records(messages(*values)), spec(columns, **table))


def test_rows_of_one_message_keep_their_order() -> None:
    found = decoded(
        [
            message("INSERT", [thing(1), thing(2, None, None, None)]),
            message("UPDATE", [thing(1, weight="5.1"), thing(2)], [{"weight": "0.750"}, {"title": None}]),
            message("DELETE", [thing(1), thing(2)]),
        ]
    )
    assert brief(found) == [
        (0, 1, "+I", row(1)),
        (0, 3, "+I", row(2, title=None, weight=None, shelf=None)),
        (1, 1, "+U", row(1, weight=Decimal("5.100"))),
        (1, 3, "+U", row(2)),
        (2, 1, "-D", removal(1)),
        (2, 3, "-D", removal(2)),
    ]


def test_a_changed_key_removes_the_old_one() -> None:
    """UPDATE … SET id = id + 1 ORDER BY id DESC: the order within the message matters."""
    found = decoded([message("UPDATE", [thing(3), thing(2)], [{"id": "2"}, {"id": "1"}])], partition_sources=("shelf",))
    assert brief(found) == [
        (0, 0, "-U", removal(2, shelf="a1")),
        (0, 1, "+U", row(3)),
        (0, 2, "-U", removal(1, shelf="a1")),
        (0, 3, "+U", row(2)),
    ]


@pytest.mark.parametrize(
    ("old", "shelf"), [({"shelf": "b2"}, "b2"), ({"title": "chair"}, "a1"), ({"shelf": None}, None)]
)
def test_in_changelog_mode_the_old_row_is_data_with_the_fields_of_old(old: Any, shelf: str | None) -> None:
    """A field that old lacks is unchanged; one that is null there was null."""
    found = decoded([message("UPDATE", [thing(1)], [old])], partition_sources=("shelf",), trust_before=True)
    assert brief(found) == [(0, 0, "-U", removal(1, shelf=shelf)), (0, 1, "+U", row(1))]


def test_old_images_that_are_fewer_than_rows() -> None:
    """Canal leaves out old rows without a changed field. This is harmless as long as the keys and partitions are the
    same.
    """
    update = message("UPDATE", [thing(1), thing(2)], [{"weight": "1.000"}])
    doubtful = message("UPDATE", [thing(1), thing(2)], [{"id": "3"}])
    null = message("UPDATE", [thing(1), thing(2)], [{"shelf": None}])
    without = message("UPDATE", [thing(1)])
    found = decoded([update, doubtful, null, without], partition_sources=("shelf",), trust_before=True)
    assert [(d.offset, d.kind, d.error) for d in found if not d.error] == [(0, "+U", None)] * 2 + [(3, "+U", None)]
    reason = "unsupported_event: UPDATE: data and old have different lengths, and old has a key or partition column"
    assert [(d.offset, d.error) for d in found if d.error] == [(1, reason), (2, reason)]


def test_statements_about_the_table() -> None:
    values = [
        ddl("CREATE", "CREATE TABLE things (id int primary key)"),
        ddl("ALTER", "alter table things add column shelf char(2)"),
        ddl("ERASE", "DROP TABLE things"),
        ddl("QUERY", "CREATE DATABASE depot"),
        ddl("TRUNCATE", "TRUNCATE TABLE things"),
        ddl("ALTER", "ALTER TABLE things TRUNCATE PARTITION p1"),
        message("QUERY", None, sql="delete from things"),
        None,
    ]
    assert [(d.offset, d.error) for d in decoded(values)] == [
        (4, "truncate: the source emptied its table"),
        (
            5,
            "unsupported_event: a partition was dropped or truncated: no key says which rows that removed; "
            "remove them by hand",
        ),
        (6, "unknown_operation: type is 'QUERY'; expected one of INSERT, UPDATE, DELETE"),
    ]


def test_bad_records_say_why() -> None:
    no_data = "' has no data, or a row of it is null"
    cases: list[tuple[Any, str]] = [
        ("no JSON", "unparseable: the value is not a JSON object"),
        ({"id": 1}, "unknown_operation: type is missing"),
        (message("UPSERT", [thing(1)]), "unknown_operation: type is 'UPSERT'; expected one of INSERT, UPDATE, DELETE"),
        (message("INSERT", None), "missing_column: type 'INSERT" + no_data),
        (message("INSERT", []), "missing_column: type 'INSERT" + no_data),
        (message("DELETE", [thing(1), None]), "missing_column: type 'DELETE" + no_data),
        (message("INSERT", thing(1)), "unparseable: field data is not an array of objects"),
        (message("INSERT", [thing(1), thing(2, weight="0.7501")]), "type_mismatch: column weight: '0.7501' does not"),
        (message("INSERT", [{"title": "lamp"}]), "null_key: key column id is null or missing"),
    ]
    found = decoded([value for value, _ in cases])
    assert [d.offset for d in found] == list(range(len(cases)))
    for d, (_, reason) in zip(found, cases, strict=True):
        assert (d.error or "").startswith(reason), (d.error, reason)


def test_a_message_has_a_bounded_number_of_rows() -> None:
    """Each row takes two places of its record."""
    small = {"id": "bigint"}
    most = [{"id": str(n)} for n in range(1 << 15)]
    found = decoded([message("DELETE", most), message("DELETE", [*most, {"id": "-1"}])], columns=small)
    assert [d.half for d in found if not d.error] == [2 * n + 1 for n in range(1 << 15)]
    assert [(d.offset, d.error) for d in found if d.error] == [(1, "unsupported_event: data has more than 32,768 rows")]


def test_mysql_spellings() -> None:
    columns = {
        "id": "bigint",
        "dec": "decimal(12,2)",
        "at": "timestamp_ntz",
        "day": "date",
        "bit": "boolean",
        "blob": "binary",
        "ratio": "double",
        "doc": "string",
    }
    good = {
        "id": "9007199254740993",
        "dec": "12.50",
        "at": "2026-01-02 03:04:05.123456",
        "day": "2026-01-02",
        "bit": "1",
        "blob": "\u00de\u00ad\u0000a",
        "ratio": "0.1",
        "doc": '{"a": null}',
    }
    misfits = [
        ("dec", "12.505"),
        ("at", "0000-00-00 00:00:00"),
        ("at", "2026-02-30 00:00:00"),
        ("day", "0000-00-00"),
        ("bit", "2"),
        ("blob", "\u0100"),
        ("ratio", "x"),
    ]
    values = [message("INSERT", [good | dict([misfit])]) for misfit in misfits]
    found = decoded([message("INSERT", [good]), *values], columns=columns)
    assert found[0].error is None
    assert found[0].row == {
        "id": 9007199254740993,
        "dec": Decimal("12.50"),
        "at": dt.datetime(2026, 1, 2, 3, 4, 5, 123456),
        "day": dt.date(2026, 1, 2),
        "bit": True,
        "blob": b"\xde\xad\x00a",
        "ratio": 0.1,
        "doc": '{"a": null}',
    }
    for (name, _), d in zip(misfits, found[1:], strict=True):
        assert (d.error or "").startswith(f"type_mismatch: column {name}: "), (name, d.error)


def test_order_and_metadata() -> None:
    """Order columns come from anywhere in the message, or from the row. If there are two rows, the new one counts."""
    order = (("ts", T.LongType()), ("weight", T.DecimalType(8, 3)), ("missing", T.LongType()))
    table = spec(COLUMNS, order_by=order[:2], metadata=("_op", "_ts", "_offset"), trust_before=True)
    update = message("UPDATE", [thing(1, weight="5.1")], [{"weight": "0.750"}])
    (batch,) = ChangelogDecoder("canal-json", table)([raw_records(messages(update))])
    by_name = batch.to_pydict()
    assert by_name["_rowdelta_order_0"] == [1767323045477] * 2
    assert by_name["_rowdelta_order_1"] == [Decimal("5.100")] * 2
    assert by_name["_op"] == ["UPDATE"] * 2
    assert by_name["_ts"] == [dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC)] * 2
    (bad,) = decoded([update], order_by=order[2:])
    assert bad.error == "missing_order: order column missing is null or missing"


def test_unknown_fields_are_noticed() -> None:
    seen: dict[str, str] = {}
    decoder = ChangelogDecoder("canal-json", spec(COLUMNS, schema_changes="evolve"), seen.update)
    list(decoder([raw_records(messages(message("INSERT", [thing(1) | {"colour": "red"}])))]))
    assert seen == {"colour": "string"}


def test_columns_are_inferred() -> None:
    values = [
        message("INSERT", [thing(1)]),
        message("UPDATE", [thing(1)], [{"id": "2"}]),
        message("DELETE", [thing(1)]),
    ]
    assert fuzz.inferred("canal-json", values) == {
        "id": "string",
        "title": "string",
        "weight": "string",
        "shelf": "string",
    }


# Random.


def spelled(row: fuzz.Row) -> dict[str, str | None]:
    at = row["at"]
    values = {
        "id": row["id"],
        "region": row["region"],
        "name": row["name"],
        "amount": row["amount"],
        "ok": None if row["ok"] is None else int(row["ok"]),
        "at": None if at is None else at.isoformat(" ", "microseconds"),
        "day": row["day"],
        "ratio": row["ratio"],
        "data": None if row["data"] is None else row["data"].decode("latin-1"),
    }
    return {name: None if value is None else str(value) for name, value in values.items()}


def encoded(part: list[fuzz.Change]) -> dict[str, Any]:
    """Changes of one kind as one message."""
    data = [spelled(change.new or change.old or {}) for change in part]
    if part[0].operation != "update":
        return message(part[0].operation.upper(), data)
    old = []
    for change, new in zip(part, data, strict=True):
        assert change.old is not None
        before = spelled(change.old)
        old.append({name: value for name, value in before.items() if value != new[name]})
    return message("UPDATE", data, old)


@settings(deadline=None, max_examples=100)
@given(st.lists(fuzz.histories, min_size=1, max_size=5), st.booleans())
def test_random_changes_come_back(parts: list[list[fuzz.Change]], trust_before: bool) -> None:
    # a message has changes of one kind
    parts = [[c for c in part if c.operation == part[0].operation] for part in parts]
    values = [encoded(part) for part in parts]
    fuzz.assert_decoded("canal-json", values, parts, fuzz.table(trust_before=trust_before))


DAMAGED = [
    message("INSERT", [{"id": "1", "region": "eu", "amount": "1.50", "ok": "1", "data": "\u00ff"}]),
    message("UPDATE", [{"id": "1", "region": "eu"}, {"id": "2"}], [{"id": "3"}, {"region": None}]),
    message("DELETE", [{"id": "1"}]),
    ddl("ALTER", "alter table a"),
]


def is_ignored(value: Any) -> bool:
    """DDL other than TRUNCATE, and watermarks."""
    kinds = ("CREATE", "ALTER", "ERASE", "RENAME", "CINDEX", "DINDEX", "TIDB_WATERMARK")
    return value.get("type") in kinds or value.get("isDdl") is True


def test_watermarks_of_ticdc_are_ignored() -> None:
    mark = {"id": 0, "database": "", "table": "", "pkNames": None, "isDdl": False, "type": "TIDB_WATERMARK", "es": 1}
    mark |= {"sql": "", "data": None, "old": None, "_tidb": {"watermarkTs": 1}}
    assert decode("canal-json", fuzz.records([json.dumps(mark).encode()]), fuzz.table()) == []


def test_an_update_of_rows_of_which_one_did_not_change() -> None:
    """Also if Arrow's reader can't read it together with the others, here because of `database`."""
    update = message("UPDATE", [{"id": "1"}, {"id": "2"}], [None, {"region": None}])
    fuzz.assert_accounted(
        "canal-json",
        [(None, json.dumps(each).encode()) for each in (message("DELETE", [{"id": "1"}]) | {"database": []}, update)],
        fuzz.table(trust_before=True, schema_changes="evolve"),
        is_ignored,
    )


@fuzz.much(100)
@given(fuzz.damaged(DAMAGED), st.sampled_from(["ignore", "evolve"]), st.sampled_from([(), ("depot.things",)]))
def test_nothing_is_lost(messages: list[fuzz.Message], schema_changes: str, source_tables: tuple[str, ...]) -> None:
    table = fuzz.table(trust_before=True, schema_changes=schema_changes, source_tables=source_tables)
    fuzz.assert_accounted(
        "canal-json", messages, table, is_ignored, table_of=lambda value: fuzz.table_of(value, "database", "table")
    )


def test_the_check_for_losses_can_fail() -> None:
    with pytest.raises(AssertionError):
        fuzz.assert_accounted(
            "canal-json", [(None, json.dumps(DAMAGED[3]).encode())], fuzz.table(), lambda value: False
        )
