"""Defaults that messages' schemas declare: which earlier rows have in a new column."""

import json
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import types as T

from changelog.changes import RAW_SCHEMA
from changelog.decoding import ChangelogDecoder
from changelog.observed_types import merged_types, observed_type
from changelog.parse.avro_records import unknown
from changelog.parse.avro_schema import parse
from changelog.parse.connect_json import wire_type
from changelog.spec import ChangelogSpec, ColumnSpec

DECIMAL = {
    "type": "bytes",
    "name": "org.apache.kafka.connect.data.Decimal",
    "parameters": {"scale": "2", "connect.decimal.precision": "12"},
}


@pytest.mark.parametrize(
    ("schema", "default", "observed"),
    [
        ({"type": "int32"}, 11, "int default 11"),
        ({"type": "int64"}, 0, "bigint default 0"),
        ({"type": "boolean"}, False, "boolean default false"),
        ({"type": "double"}, 0.5, "double default 0.5"),
        ({"type": "string"}, "new", 'string default "new"'),
        ({"type": "string"}, "", 'string default ""'),
        ({"type": "string"}, " default 'é'", "string default \" default '\\u00e9'\""),
        (DECIMAL, "fQ==", 'decimal(12,2) default "1.25"'),
        ({"type": "int32", "name": "io.debezium.time.Date"}, 18262, 'date default "2020-01-01"'),
        (
            {"type": "int64", "name": "io.debezium.time.MicroTimestamp"},
            -1,
            'timestamp_ntz default "1969-12-31T23:59:59.999999"',
        ),
        (
            {"type": "string", "name": "io.debezium.time.ZonedTimestamp"},
            "2020-01-01T00:00:00Z",
            'timestamp default "2020-01-01T00:00:00.000000+00:00"',
        ),
        # what Debezium makes up for expressions
        ({"type": "int64", "name": "io.debezium.time.MicroTimestamp"}, 0, "timestamp_ntz"),
        ({"type": "string", "name": "io.debezium.time.ZonedTimestamp"}, "1970-01-01T00:00:00.000000Z", "timestamp"),
        ({"type": "int32", "name": "io.debezium.time.Date"}, 0, "date"),
        ({"type": "string", "name": "io.debezium.data.Uuid"}, "", "string"),
        ({"type": "array", "items": {"type": "int32"}}, [1], "array<int>"),
        ({"type": "bytes"}, "fQ==", "binary"),
        ({"type": "int32"}, "no number", "int"),
        ({"type": "int32"}, None, "int"),
        ({"type": "int32"}, {"a": 1}, "int"),
        ({"type": "int32"}, 2**70, "int"),
    ],
)
def test_schemas_of_connect(schema: dict[str, Any], default: Any, observed: str) -> None:
    assert observed_type(wire_type(schema | {"default": default})) == observed


def test_schemas_of_avro() -> None:
    decimal = {"type": "bytes", "logicalType": "decimal", "precision": 12, "scale": 2}
    fields = [
        {"name": "id", "type": "long"},
        {"name": "c1", "type": {"type": "int", "connect.default": 11}, "default": 11},
        {"name": "state", "type": ["string", "null"], "default": "new"},
        {"name": "price", "type": decimal, "default": "}"},
        {"name": "note", "type": ["null", "string"], "default": None},
    ]
    row = parse(json.dumps({"type": "record", "name": "Value", "fields": fields}))
    found = {name: observed_type(wire) for name, wire in unknown(row, ["id"]).items()}
    assert found == {
        "c1": "int default 11",
        "state": 'string default "new"',
        "price": 'decimal(12,2) default "1.25"',
        "note": "string",
    }


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        ("int default 11", "int default 11", "int default 11"),
        ("int default 11", "int default 12", "int"),
        ("int default 11", "int", "int"),
        ("int default 11", "bigint default 11", "bigint"),
        ("", "int default 11", "int default 11"),
    ],
)
def test_of_two_defaults_none_is_believed(one: str, other: str, both: str) -> None:
    assert merged_types({"c": one}, {"c": other}) == merged_types({"c": other}, {"c": one}) == {"c": both}


@pytest.mark.parametrize("flattened", [False, True])
def test_a_message_whose_schema_lacks_the_column_has_its_default(flattened: bool) -> None:
    columns = (ColumnSpec("id", T.LongType()), ColumnSpec("c1", T.IntegerType(), default=11))
    options = {"flattened": "true"} if flattened else {}
    spec = ChangelogSpec(columns, ("id",), options=options, schema_changes="evolve")
    old = {"type": "struct", "fields": [{"type": "int64", "field": "id"}]}
    new = {"type": "struct", "fields": [*old["fields"], {"type": "int32", "field": "c1", "optional": True}]}

    def message(schema: dict[str, Any], row: dict[str, Any]) -> bytes:
        if flattened:
            return json.dumps({"schema": schema, "payload": row}).encode()
        sides = [schema | {"field": side, "optional": True} for side in ("before", "after")]
        envelope = {"type": "struct", "fields": [*sides, {"type": "string", "field": "op"}]}
        return json.dumps({"schema": envelope, "payload": {"before": None, "after": row, "op": "c"}}).encode()

    texts = [message(old, {"id": 1}), message(new, {"id": 2, "c1": None}), message(new, {"id": 3, "c1": 22})]
    values: dict[str, list[Any]] = {
        "source": ["t"] * 3,
        "partition": [0] * 3,
        "offset": [0, 1, 2],
        "value": texts,
    }
    arrays = [pa.array(values.get(field.name, [None] * 3), field.type) for field in RAW_SCHEMA]
    raw = pa.RecordBatch.from_arrays(arrays, schema=RAW_SCHEMA)
    (decoded,) = ChangelogDecoder("debezium-json", spec)([raw])
    found = {row["id"]: row["c1"] for row in decoded.to_pylist()}
    assert found == {1: 11, 2: None, 3: 22}
    without = replace(spec, columns=(columns[0], replace(columns[1], default=None)))
    (decoded,) = ChangelogDecoder("debezium-json", without)([raw])
    assert {row["id"]: row["c1"] for row in decoded.to_pylist()} == {1: None, 2: None, 3: 22}
