"""GoldenGate's messages, as the tool sends them and as it doesn't."""

import base64
import datetime as dt
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import types as T

from changelog.decoding import ChangelogDecoder
from tests.changelog import fuzz
from tests.changelog.messages import Decoded, decode, messages, raw_records, spec
from tests.changelog.things import brief

COLUMNS = {"ID": "int", "TITLE": "string", "WEIGHT": "decimal(8,3)", "SHELF": "string"}


def message(kind: str, before: Any = None, after: Any = None, **more: Any) -> dict[str, Any]:
    """A message with its fields in GoldenGate's order. Like GoldenGate, it leaves out an image that doesn't exist."""
    parts: dict[str, Any] = {
        "table": "DEPOT.THINGS",
        "op_type": kind,
        "op_ts": "2026-01-02 03:04:05.123456",
        "current_ts": "2026-01-02T03:04:06.000000",
        "pos": "00000000000000004338",
        "primary_keys": ["ID"],
        "tokens": {"R": "AADPkvAAEAAEqLzAAC"},
    }
    parts |= {"before": before} if before is not None else {}
    return parts | ({"after": after} if after is not None else {}) | more


def thing(number: int, **values: Any) -> dict[str, Any]:
    return {"ID": number, "TITLE": "lamp", "WEIGHT": 0.75, "SHELF": "a1"} | values


def decoded(values: list[Any], **table: Any) -> list[Decoded]:
    columns = table.pop("columns", COLUMNS)
    return decode("ogg-json", raw_records(messages(*values)), spec(columns, ["ID"], **table))


def row(number: int, **values: Any) -> dict[str, Any]:
    return {"ID": number, "TITLE": "lamp", "WEIGHT": Decimal("0.750"), "SHELF": "a1"} | values


def removal(number: int, **values: Any) -> dict[str, Any]:
    return dict.fromkeys(COLUMNS) | {"ID": number} | values


def test_a_row_s_life() -> None:
    found = decoded(
        [
            message("I", after=thing(1)),
            message("U", thing(1), thing(1, WEIGHT=5.125)),
            message("U", {"ID": 1}, thing(2)),
            message("U", None, thing(2, TITLE=None)),
            message("D", {"ID": 2}),
            None,
        ]
    )
    assert brief(found) == [
        (0, 1, "+I", row(1)),
        (1, 1, "+U", row(1, WEIGHT=Decimal("5.125"))),
        (2, 0, "-U", removal(1)),
        (2, 1, "+U", row(2)),
        (3, 1, "+U", row(2, TITLE=None)),
        (4, 1, "-D", removal(2)),
    ]


def test_in_changelog_mode_updates_say_what_they_replaced() -> None:
    """A partition column that the old image lacks is unknown, not unchanged."""
    values = [
        message("U", thing(1, SHELF="b2"), thing(1)),
        message("U", {"ID": 1}, thing(1)),
        message("U", None, thing(1)),
    ]
    found = decoded(values, partition_sources=("SHELF",), trust_before=True)
    assert brief(found) == [
        (0, 0, "-U", removal(1, SHELF="b2")),
        (0, 1, "+U", row(1)),
        (1, 0, "-U", removal(1)),
        (1, 1, "+U", row(1)),
        (2, 1, "+U", row(1)),
    ]


FLAGS = {f"{name}_isMissing": False for name in COLUMNS}


@pytest.mark.parametrize(
    ("update", "missing"),
    [
        (message("U", thing(1), thing(1, TITLE=None)), None),
        (message("U", thing(1, TITLE=None), thing(1, TITLE=None)), None),
        (message("U", None, thing(1, TITLE=None)), None),
        (message("U", None, thing(1, TITLE=None, SHELF="{}")), None),
        (message("U", None, {"ID": 1, "WEIGHT": 1, "SHELF": '"TITLE":null'}), "TITLE"),
        (message("U", None, {"ID": 1, "WEIGHT": 1, "SHELF": "b2"}, x={"TITLE": None}), "TITLE"),
        (message("U", thing(1), thing(1, TITLE=None) | FLAGS), None),
        (message("U", thing(1), {"ID": 1, "TITLE": "x", "SHELF": None}), "WEIGHT"),
        (message("U", thing(1, TITLE=None), {"ID": 1, "WEIGHT": 1, "SHELF": "b2"}), "TITLE"),
        (message("U", None, {"ID": 1, "WEIGHT": 1, "SHELF": "b2"}), "TITLE"),
        (message("U", thing(1), thing(1, TITLE=None) | FLAGS | {"TITLE_isMissing": True}), "TITLE"),
    ],
)
def test_an_update_without_unchanged_columns_is_refused(update: Any, missing: str | None) -> None:
    """A null would replace a value that didn't change."""
    (found,) = decoded([update])
    if missing is None:
        assert found.error is None
    else:
        assert (found.error or "").startswith(f"missing_column: column {missing} is missing, and no update")
        assert "NOCOMPRESSUPDATES" in (found.error or "")
    (found,) = decoded([update], options={"missing.columns": "null"})
    assert (found.kind, found.error) == ("+U", None)


def test_flags_are_no_new_columns() -> None:
    seen: dict[str, str] = {}
    for options in ({}, {"missing.columns": "null"}):
        decoder = ChangelogDecoder(
            "ogg-json", spec(COLUMNS, ["ID"], schema_changes="evolve", options=options), seen.update
        )
        list(decoder([raw_records(messages(message("I", after=thing(1, COLOUR="red") | FLAGS)))]))
        assert seen == {"COLOUR": "string"}


def test_bad_records_say_why() -> None:
    cases: list[tuple[Any, str]] = [
        ("no JSON", "unparseable: the value is not a JSON object"),
        ({"id": 1}, "unknown_operation: op_type is missing"),
        (message("T"), "truncate: the source emptied its table"),
        (message("X", after=thing(1)), "unknown_operation: op_type is 'X'; expected one of I, U, D"),
        (message("I"), "missing_column: operation 'I' has no row"),
        (message("U", before=thing(1)), "missing_column: operation 'U' has no row"),
        (message("D", after=thing(1)), "missing_column: operation 'D' has no row"),
        (message("I", after=[1]), "unparseable: field after is not an object"),
        (
            message("I", after=thing(1, WEIGHT=0.7501)),
            "type_mismatch: column WEIGHT: '0.7501' does not fit decimal(8,3)",
        ),
        (message("I", after={"TITLE": "lamp"}), "null_key: key column ID is null or missing"),
    ]
    found = decoded([value for value, _ in cases])
    assert [(d.offset, d.error) for d in found] == [(i, reason) for i, (_, reason) in enumerate(cases)]


def test_order_and_metadata() -> None:
    table = spec(
        COLUMNS, ["ID"], order_by=(("pos", T.StringType()), ("WEIGHT", T.DoubleType())), metadata=("_op", "_ts")
    )
    values = [message("I", after=thing(1)), message("D", thing(1)), message("D", thing(2), op_ts="2026-02-30 00:00:00")]
    values += [message("D", thing(3), op_ts="2026-01-02T03:04:05Z"), message("D", thing(3), op_ts=5)]
    (batch,) = ChangelogDecoder("ogg-json", table)([raw_records(messages(*values))])
    columns = batch.to_pydict()
    assert columns["_rowdelta_bad"] == [None] * 5
    assert columns["_rowdelta_order_0"] == ["00000000000000004338"] * 5
    assert columns["_rowdelta_order_1"] == [0.75] * 5
    assert columns["_op"] == ["I", "D", "D", "D", "D"]
    second = dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC)
    assert columns["_ts"] == [second.replace(microsecond=123456)] * 2 + [None, second, None]


def test_columns_are_inferred() -> None:
    values = [message("I", after=thing(1)), message("U", thing(2), thing(1)), message("D", thing(1))]
    assert fuzz.inferred("ogg-json", values) == {
        "ID": "int64",
        "TITLE": "string",
        "WEIGHT": "double",
        "SHELF": "string",
    }


# Random.


def spelled(row: fuzz.Row | None) -> dict[str, Any] | None:
    if row is None:
        return None
    values = dict(row)
    values["at"] = None if row["at"] is None else row["at"].isoformat(" ", "microseconds")
    values["day"] = None if row["day"] is None else row["day"].isoformat()
    values["data"] = None if row["data"] is None else base64.b64encode(row["data"]).decode()
    return values


def encoded(change: fuzz.Change) -> dict[str, Any]:
    return message(change.operation[0].upper(), spelled(change.old), spelled(change.new))


@settings(deadline=None, max_examples=100)
@given(fuzz.histories, st.booleans())
def test_random_changes_come_back(history: list[fuzz.Change], trust_before: bool) -> None:
    values = [encoded(change) for change in history]
    parts = [[change] for change in history]
    fuzz.assert_decoded("ogg-json", values, parts, fuzz.table(trust_before=trust_before))


DAMAGED = [
    message("I", after={"id": 1, "region": "eu", "amount": 1.5, "ok": True, "data": "AP8="}),
    message("U", dict.fromkeys(fuzz.COLUMNS) | {"id": 3}, dict.fromkeys(fuzz.COLUMNS) | {"id": 1}),
    message("D", {"id": 1}),
    message("T"),
]


@fuzz.much(100)
@given(fuzz.damaged(DAMAGED), st.sampled_from(["ignore", "evolve"]), st.sampled_from([(), ("DEPOT.THINGS",)]))
def test_nothing_is_lost(messages: list[fuzz.Message], schema_changes: str, source_tables: tuple[str, ...]) -> None:
    table = fuzz.table(trust_before=True, schema_changes=schema_changes, source_tables=source_tables)
    fuzz.assert_accounted(
        "ogg-json", messages, table, lambda value: False, table_of=lambda value: fuzz.table_of(value, "table")
    )
