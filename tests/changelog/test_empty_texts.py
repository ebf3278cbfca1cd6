"""Tables that can't tell an empty text from null in some columns, such as Delta's partition columns."""

import json

import pyarrow as pa
import pytest
from pyspark.sql import types as T

from changelog.changes import RAW_SCHEMA
from changelog.decoding import ChangelogDecoder
from changelog.rows import BAD, BadRecord
from changelog.spec import ChangelogSpec, ColumnSpec


@pytest.mark.parametrize(("key", "error"), [(("id",), BadRecord.TYPE_MISMATCH), (("region", "id"), BadRecord.NULL_KEY)])
def test_an_empty_text_is_no_null(key: tuple[str, ...], error: str) -> None:
    """It would be read as null, and as a key not be found again."""
    columns = (ColumnSpec("id", T.LongType()), ColumnSpec("region", T.StringType()), ColumnSpec("note", T.StringType()))
    spec = ChangelogSpec(columns, key, ("region",), empty_is_null=frozenset({"region"}))
    rows = [{"row_kind": "+I", "id": n, "region": region, "note": ""} for n, region in enumerate(["", "eu"])]
    values = {
        "source": ["t"] * 2,
        "partition": [0] * 2,
        "offset": [0, 1],
        "value": [json.dumps(row).encode() for row in rows],
    }
    arrays = [pa.array(values.get(field.name, [None] * 2), field.type) for field in RAW_SCHEMA]
    (decoded,) = ChangelogDecoder("row-kind", spec)([pa.RecordBatch.from_arrays(arrays, schema=RAW_SCHEMA)])
    found = decoded.to_pylist()
    letters = [row[BAD] for row in found if row[BAD] is not None]
    assert [(letter["error_class"], letter["offset"]) for letter in letters] == [(error, 0)]
    assert all("column region is" in letter["reason"] for letter in letters)
    assert [(row["region"], row["note"]) for row in found if row[BAD] is None] == [("eu", "")]
