"""Changes whose rows a table doesn't want become deletes (`changelog.wanted`)."""

import pickle
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from changelog.conditions import Condition, Constant, Field
from changelog.decoding import ChangelogDecoder, decoded_schema
from changelog.rows import BAD, KIND, UNAVAILABLE, RowKind, unavailable_bits
from changelog.spec import ChangelogSpec
from changelog.wanted import Where
from tests.changelog.messages import messages, raw_records, spec

BAD_TYPE = decoded_schema(ChangelogSpec((), ())).field(BAD).type
LETTER = dict.fromkeys(field.name for field in BAD_TYPE) | {"reason": "column x: not sent", "error_class": "late"}
# not region = 'us' and flag
CONDITION = Condition(
    "and", (Condition("not", (Condition("=", (Field("region"), Constant(pa.scalar("us")))),)), Field("flag"))
)
COLUMNS = ["id", "region", "note"]


def where(**values: Any) -> Where:
    columns = frozenset({"region", "note", "flag"})
    return Where(frozenset({"region", "flag"}), CONDITION, frozenset({"flag"}), columns, ("flag",), **values)


Rows = st.lists(
    st.fixed_dictionaries(
        {
            "kind": st.sampled_from(list(RowKind)),
            "region": st.sampled_from([None, "eu", "us"]),
            "flag": st.sampled_from([None, True, False]),
            "lacks": st.sampled_from([None, (), ("region",), ("note",), ("region", "note")]),
            "is_bad": st.booleans(),
        }
    ),
    max_size=20,
)


@pytest.mark.parametrize("keeps_records", [False, True])
@settings(deadline=None)
@given(rows=Rows)
def test_each_row_is_decided_by_its_own_values(keeps_records: bool, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        if row["kind"] is not RowKind.UPDATE_AFTER and row["lacks"]:
            row["lacks"] = None
        if row["is_bad"]:
            row["lacks"] = None
        elif keeps_records:
            row["lacks"] = row["lacks"] or ()
        elif row["lacks"] == ():
            row["lacks"] = None
    lacking = [np.array([bool(row["lacks"]) and name in row["lacks"] for row in rows], np.bool_) for name in COLUMNS]
    bits = unavailable_bits(lacking, np.array([bool(row["lacks"]) for row in rows], np.bool_)).to_pylist()
    bits = [b"" if row["lacks"] == () else value for value, row in zip(bits, rows, strict=True)]
    has_record = [row["is_bad"] or row["lacks"] is not None for row in rows]
    batch = pa.record_batch(
        {
            KIND: pa.array([int(row["kind"]) for row in rows], pa.int8()),
            BAD: pa.array([LETTER if has else None for has in has_record], BAD_TYPE),
            UNAVAILABLE: pa.array(bits, pa.binary()),
            "id": pa.array(range(len(rows)), pa.int64()),
            "region": pa.array([row["region"] for row in rows], pa.string()),
            "note": pa.array(["n"] * len(rows), pa.string()),
            "flag": pa.array([row["flag"] for row in rows], pa.bool_()),
        }
    )
    found = where(keeps_records=keeps_records).applied(batch)
    assert found.schema.names == batch.schema.names[:-1]
    for before, after, row in zip(batch.to_pylist(), found.to_pylist(), rows, strict=True):
        del before["flag"]
        sets = row["kind"] in (RowKind.INSERT, RowKind.UPDATE_AFTER) and not row["is_bad"]
        if sets and row["lacks"] and "region" in row["lacks"]:
            told = before[BAD] | {"reason": "column x: not sent, and where needs it"}
            assert after == before | {UNAVAILABLE: None, BAD: told}
        elif sets and not (row["region"] not in (None, "us") and row["flag"]):
            records = {UNAVAILABLE: b""} if keeps_records else {UNAVAILABLE: None, BAD: None}
            assert after == before | {KIND: int(RowKind.DELETE), "region": None, "note": None} | records
        else:
            assert after == before


def test_a_decoder_reads_what_only_the_condition_needs() -> None:
    """A field that isn't stored, and a metadata column; and it is sent to tasks with its condition."""
    is_insert = Condition("=", (Field("_op"), Constant(pa.scalar("c"))))
    condition = Condition("and", (is_insert, Condition(">", (Field("cents"), Constant(pa.scalar(5))))))
    names = frozenset({"_op", "cents"})
    where = Where(names, condition, names, frozenset({"region", "cents"}), ("_op",))
    table = spec({"id": "bigint", "region": "string", "cents": "bigint"}, where=where)
    values = [("c", 1, 9), ("u", 2, 9), ("c", 3, 5), ("c", 4, None), ("c", 5, 6)]
    said = [{"op": op, "after": {"id": number, "region": "eu", "cents": cents}} for op, number, cents in values]
    decoder = pickle.loads(pickle.dumps(ChangelogDecoder("debezium-json", table)))
    (rows,) = decoder([raw_records(messages(*said, "{"))])
    assert rows.schema == decoded_schema(table)
    assert not names & set(rows.schema.names)
    good = rows.filter(rows.column(BAD).is_null()).to_pylist()
    assert [(row["id"], row["region"]) for row in good if row[KIND] != RowKind.DELETE] == [(1, "eu"), (5, "eu")]
    assert [(row["id"], row["region"]) for row in good if row[KIND] == RowKind.DELETE] == [
        (2, None),
        (3, None),
        (4, None),
    ]
    assert len(rows) == 6


def test_without_a_condition_for_python_only_what_is_undecidable_changes() -> None:
    rows = pa.record_batch({KIND: pa.array([1, 2], pa.int8()), BAD: pa.nulls(2, BAD_TYPE), "region": ["us", "us"]})
    found = Where(frozenset({"region"}), None, frozenset(), frozenset({"region"})).applied(rows)
    assert found == rows
