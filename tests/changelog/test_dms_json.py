"""Messages of AWS DMS, as it sends them and as it doesn't."""

import datetime as dt
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


def message(operation: str, data: Any, before: Any = None, kind: str = "data", **metadata: Any) -> dict[str, Any]:
    about = {
        "timestamp": "2026-01-02T03:04:05.123456Z",
        "record-type": kind,
        "operation": operation,
        "partition-key-type": "schema-table",
        "schema-name": "depot",
        "table-name": "things",
        "transaction-id": 87978110091475,
    }
    image = {} if before is None else {"before-image": before}
    return ({} if data is None else {"data": data}) | image | {"metadata": about | metadata}


def control(operation: str) -> dict[str, Any]:
    return message(operation, None, kind="control")


def thing(number: int, **values: Any) -> dict[str, Any]:
    return {"id": number, "title": "lamp", "weight": 0.75, "shelf": "a1"} | values


def decoded(values: list[Any], **table: Any) -> list[Decoded]:
    columns = table.pop("columns", COLUMNS)
    return decode("dms-json", raw_records(messages(*values)), spec(columns, **table))


def test_a_row_s_life() -> None:
    found = decoded(
        [
            message("load", thing(1)),
            message("insert", {"id": 2}),
            message("update", thing(1, weight=5.125)),
            message("update", thing(3), {"id": 1}),
            message("delete", {"id": 3}),
            None,
        ]
    )
    assert brief(found) == [
        (0, 1, "+I", row(1)),
        (1, 1, "+I", removal(2)),  # nulls are left out
        (2, 1, "+U", row(1, weight=Decimal("5.125"))),
        (3, 0, "-U", removal(1)),
        (3, 1, "+U", row(3)),
        (4, 1, "-D", removal(3)),
    ]


def test_a_before_image_of_the_key_says_nothing_of_the_partition() -> None:
    values = [message("update", thing(1), {"id": 1}), message("update", thing(1), {"id": 1, "shelf": "b2"})]
    found = decoded(values, partition_sources=("shelf",), trust_before=True)
    assert brief(found) == [
        (0, 0, "-U", removal(1)),
        (0, 1, "+U", row(1)),
        (1, 0, "-U", removal(1, shelf="b2")),
        (1, 1, "+U", row(1)),
    ]


def test_the_before_image_s_name_is_configured() -> None:
    update = message("update", thing(2)) | {"old": {"id": 1}}
    assert [d.kind for d in decoded([update])] == ["+U"]
    assert [(d.kind, d.row["id"]) for d in decoded([update], options={"before.image": "old"})] == [("-U", 1), ("+U", 2)]


def test_a_load_is_a_snapshot() -> None:
    values = raw_records(messages(message("load", thing(1)), message("insert", thing(2))))
    (batch,) = ChangelogDecoder("dms-json", spec(COLUMNS, trust_before=True))([values])
    assert batch.column(SNAPSHOT).to_pylist() == [True, False]


def test_control_records() -> None:
    names = ["create-table", "drop-table", "rename-table", "add-column", "drop-column", "rename-column", "other"]
    assert decoded([control(name) for name in names]) == []
    (bad,) = decoded([control("truncate-table")])
    assert bad.error == "truncate: the source emptied its table"


@pytest.mark.parametrize(
    ("data", "before", "missing"),
    [
        (thing(1, title=None), None, None),
        (thing(1, title=None), {"id": 1, "title": None}, None),
        (thing(1, title=None), {"id": 1}, None),
        ({"id": 1, "weight": 1, "shelf": "a1"}, None, "title"),
        ({"id": 1, "weight": 1, "shelf": "a1"}, {"id": 1, "title": None}, "title"),
    ],
)
def test_missing_columns_of_updates_can_be_refused(data: Any, before: Any, missing: str | None) -> None:
    """With IncludeNullAndEmpty, what is missing isn't null."""
    update = message("update", data, before)
    (found,) = decoded([update], options={"missing.columns": "reject"})
    if missing is None:
        assert found.error is None
    else:
        assert (found.error or "").startswith(f"missing_column: column {missing} is missing, and no update")
    (found,) = decoded([update])
    assert (found.error, found.row["title"]) == (None, None)


def test_bad_records_say_why() -> None:
    known = "; expected one of load, insert, update, delete"
    cases: list[tuple[Any, str]] = [
        ("no JSON", "unparseable: the value is not a JSON object"),
        ({"data": thing(1)}, "unknown_operation: metadata.record-type is missing"),
        (message("insert", thing(1), kind="x"), "unknown_operation: metadata.record-type is 'x'; expected one of data"),
        (message("upsert", thing(1)), "unknown_operation: metadata.operation is 'upsert'" + known),
        (message("insert", None), "missing_column: operation 'insert' has no row"),
        (message("delete", None), "missing_column: operation 'delete' has no row"),
        (message("insert", 5), "unparseable: field data is not an object"),
        (
            message("insert", thing(1, weight=0.7501)),
            "type_mismatch: column weight: '0.7501' does not fit decimal(8,3)",
        ),
        (message("insert", {"title": "lamp"}), "null_key: key column id is null or missing"),
    ]
    found = decoded([value for value, _ in cases])
    assert [(d.offset, d.error) for d in found] == [(i, reason) for i, (_, reason) in enumerate(cases)]


def test_spellings() -> None:
    """Timestamps without a zone come with a Z; bytes are hexadecimal."""
    columns = {"id": "bigint", "at": "timestamp_ntz", "utc": "timestamp", "a": "binary", "b": "binary"}
    good = {"id": 1, "at": "2026-01-02T03:04:05.5Z", "utc": "2026-01-02T03:04:05Z", "a": "0xDEad", "b": "00ff"}
    misfits = [("at", "2026-01-02T03:04:05+01"), ("a", "0xabc"), ("b", "AP8="), ("b", 5)]
    found = decoded(
        [message("insert", good)] + [message("insert", good | dict([misfit])) for misfit in misfits], columns=columns
    )
    second = dt.datetime(2026, 1, 2, 3, 4, 5)
    assert found[0].error is None
    assert found[0].row == {
        "id": 1,
        "at": second.replace(microsecond=500000),
        "utc": second.replace(tzinfo=dt.UTC),
        "a": b"\xde\xad",
        "b": b"\x00\xff",
    }
    for (name, _), d in zip(misfits, found[1:], strict=True):
        assert (d.error or "").startswith(f"type_mismatch: column {name}: "), (name, d.error)


def test_order_and_metadata() -> None:
    order = (("metadata.timestamp", T.TimestampType()), ("metadata.transaction-id", T.LongType()))
    table = spec(COLUMNS, order_by=order, metadata=("_op", "_ts"))
    (batch,) = ChangelogDecoder("dms-json", table)([raw_records(messages(message("load", thing(1))))])
    columns = batch.to_pydict()
    time = dt.datetime(2026, 1, 2, 3, 4, 5, 123456, dt.UTC)
    assert columns["_rowdelta_order_0"] == [time]
    assert columns["_rowdelta_order_1"] == [87978110091475]
    assert (columns["_op"], columns["_ts"]) == (["load"], [time])


def test_columns_are_inferred() -> None:
    values = [message("load", thing(1)), message("update", thing(1), {"id": 2}), message("delete", thing(1))]
    assert fuzz.inferred("dms-json", values) == {
        "id": "int64",
        "title": "string",
        "weight": "double",
        "shelf": "string",
    }


# Random.


def spelled(row: fuzz.Row) -> dict[str, Any]:
    """Without nulls."""
    values = dict(row)
    values["at"] = None if row["at"] is None else row["at"].isoformat("T", "microseconds") + "Z"
    values["day"] = None if row["day"] is None else row["day"].isoformat()
    values["data"] = None if row["data"] is None else "0x" + row["data"].hex()
    return {name: value for name, value in values.items() if value is not None}


def encoded(change: fuzz.Change) -> dict[str, Any]:
    before = spelled(change.old) if change.old is not None and change.new is not None else None
    return message(change.operation, spelled(change.new or change.old or {}), before)


@settings(deadline=None, max_examples=100)
@given(fuzz.histories, st.booleans())
def test_random_changes_come_back(history: list[fuzz.Change], trust_before: bool) -> None:
    values = [encoded(change) for change in history]
    parts = [[change] for change in history]
    fuzz.assert_decoded("dms-json", values, parts, fuzz.table(trust_before=trust_before))


DAMAGED = [
    message("load", {"id": 1, "region": "eu", "amount": 1.5, "ok": True, "data": "00ff"}),
    message("update", {"id": 1, "region": "eu"}, {"id": 3, "region": None}),
    message("delete", {"id": 1}),
    control("drop-table"),
]


@fuzz.much(100)
@given(fuzz.damaged(DAMAGED), st.sampled_from(["ignore", "evolve"]), st.sampled_from([(), ("depot.things",)]))
def test_nothing_is_lost(messages: list[fuzz.Message], schema_changes: str, source_tables: tuple[str, ...]) -> None:
    fuzz.assert_accounted(
        "dms-json",
        messages,
        fuzz.table(trust_before=True, schema_changes=schema_changes, source_tables=source_tables),
        lambda value: value["metadata"]["record-type"] == "control",
        table_of=lambda value: fuzz.table_of(value.get("metadata"), "schema-name", "table-name"),
    )
