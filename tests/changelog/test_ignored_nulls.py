"""NULLs that say nothing make rows partial (`changelog.ignored_nulls`)."""

from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from changelog.decoding import decoded_schema
from changelog.ignored_nulls import ignore_nulls
from changelog.rows import BAD, KIND, UNAVAILABLE, RowKind, unavailable_bits, unavailable_columns
from changelog.spec import ChangelogSpec

BAD_TYPE = decoded_schema(ChangelogSpec((), ())).field(BAD).type
LETTER = dict.fromkeys(field.name for field in BAD_TYPE) | {"error_class": "unparseable"}
COLUMNS = ["id", *(f"c{number}" for number in range(8))]
IGNORED = {"c0", "c7"}


@settings(deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "kind": st.sampled_from(list(RowKind)),
                "nulls": st.sets(st.sampled_from(COLUMNS[1:])),
                "lacks": st.sets(st.sampled_from(COLUMNS[1:])),
                "is_bad": st.booleans(),
                "has_record": st.booleans(),
            }
        ),
        max_size=12,
    )
)
def test_a_row_lacks_the_columns_whose_nulls_say_nothing(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        if row["kind"] is not RowKind.UPDATE_AFTER or row["is_bad"]:
            row["lacks"] = set()
    lacking = [np.array([name in row["lacks"] for row in rows], np.bool_) for name in COLUMNS]
    bits = unavailable_bits(lacking, np.array([bool(row["lacks"]) for row in rows], np.bool_)).to_pylist()
    for number, row in enumerate(rows):  # the record of a whole row is kept
        bits[number] = b"" if row["has_record"] and not row["lacks"] and not row["is_bad"] else bits[number]
    has_records = [row["is_bad"] or value is not None for row, value in zip(rows, bits, strict=True)]
    nulls = [row["nulls"] | row["lacks"] for row in rows]
    batch = pa.record_batch(
        {
            KIND: pa.array([int(row["kind"]) for row in rows], pa.int8()),
            BAD: pa.array([LETTER if has_record else None for has_record in has_records], BAD_TYPE),
            UNAVAILABLE: pa.array(bits, pa.binary()),
            **{name: pa.array([None if name in null else 1 for null in nulls], pa.int64()) for name in COLUMNS},
            "_op": pa.array(["u"] * len(rows), pa.string()),
        }
    )
    found = ignore_nulls(batch, IGNORED, ["_op"])
    assert found.drop_columns([KIND, UNAVAILABLE]) == batch.drop_columns([KIND, UNAVAILABLE])
    for row, null, before, kind, after in zip(
        rows, nulls, bits, found.column(KIND).to_pylist(), found.column(UNAVAILABLE), strict=True
    ):
        sets = row["kind"] in (RowKind.INSERT, RowKind.UPDATE_AFTER) and not row["is_bad"]
        ignored = null & IGNORED if sets else set()
        assert kind == (RowKind.INSERT if ignored and not row["lacks"] else row["kind"])
        if not ignored:
            assert after.as_py() == before
            continue
        flags = unavailable_columns(pa.array([after.as_py()]), len(COLUMNS))[0]
        assert {name for name, flag in zip(COLUMNS, flags, strict=True) if flag} == ignored | row["lacks"]
