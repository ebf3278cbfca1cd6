"""The message of a TRUNCATE, in every format that has one: its place among the changes, or why it has none."""

from typing import Any

import pytest

from changelog.decoding import CHANGES_PER_RECORD, ChangelogDecoder, StatedKeys, decoded_schema
from changelog.rows import BAD, TRUNCATE, order_column
from tests.changelog import test_canal_json, test_dms_json, test_maxwell_json, test_ogg_json
from tests.changelog.messages import Message, decode, messages, raw_records, sample, spec, sql

COLUMNS = {"id": "bigint", "v": "string"}


@pytest.mark.parametrize(
    ("name", "message", "order_by", "dtype", "expected"),
    [
        ("debezium-json", sample("pgj", "nokey")[-1].value, "source.lsn", "bigint", 27768904),
        ("canal-json", test_canal_json.ddl("TRUNCATE", "TRUNCATE TABLE things") | {"es": 7}, "es", "bigint", 7),
        ("maxwell-json", test_maxwell_json.ddl("table-truncate", "truncate things") | {"ts": 7}, "ts", "bigint", 7),
        ("ogg-json", test_ogg_json.message("T"), "pos", "string", "00000000000000004338"),
        ("dms-json", test_dms_json.control("truncate-table"), "metadata.transaction-id", "bigint", 87978110091475),
    ],
)
def test_it_has_a_place_among_the_changes(name: str, message: Any, order_by: str, dtype: str, expected: Any) -> None:
    table = spec(COLUMNS, order_by=((order_by, sql(dtype)),))
    raw = raw_records([Message(message, 8, partition=2)])
    (rows,) = ChangelogDecoder(name, table)([raw])
    assert rows.schema == decoded_schema(table)
    (row,) = rows.to_pylist()
    assert row[BAD]["error_class"] == TRUNCATE
    assert [row[order_column(i)] for i in range(3)] == [expected, 2, 8 * CHANGES_PER_RECORD + 1]
    assert {column: row[column] for column in COLUMNS} == dict.fromkeys(COLUMNS)

    # a table that can't be emptied
    refused = spec(COLUMNS, order_by=table.order_by, truncate_refused="TRUNCATE: by hand, please")
    (bad,) = decode(name, raw, refused)
    assert bad.error == "unsupported_event: TRUNCATE: by hand, please"
    assert bad.bad is not None
    assert bad.bad["value"] == raw.column("value")[0].as_py()


def test_without_a_value_to_order_by_it_has_no_place() -> None:
    table = spec(COLUMNS, order_by=(("updated_at", sql("bigint")),))
    (bad,) = decode("debezium-json", raw_records(sample("pgj", "nokey")[-1:]), table)
    assert bad.error is not None
    assert bad.error.startswith("missing_order: TRUNCATE: order column updated_at is null or missing, so nothing says")


def test_it_says_nothing_of_the_key() -> None:
    """Its message has none, in tables with a key too. A change without a key says that the table has no key now."""

    def stated(*found: Message) -> StatedKeys:
        keys: dict[Any, Any] = {}
        list(ChangelogDecoder("debezium-json", spec(COLUMNS), observe_stated=keys.update)([raw_records(found)]))
        return keys

    truncate = {"op": "t", "before": None, "after": None}
    insert = {"op": "c", "before": None, "after": {"id": 1, "v": "a"}}
    keyed, emptied, keyless = Message(insert, 0, {"id": 1}), Message(truncate, 1), Message(insert, 2)
    assert stated(keyed, emptied) == {("id",): (0, 0)}
    assert stated(emptied) == {}
    assert stated(keyed, emptied, keyless) == {("id",): (0, 0), (): (0, 2)}


def test_its_batch_keeps_the_other_records() -> None:
    values = [{"op": "c", "after": {"id": 1, "v": "a"}}, {"op": "t"}, "no JSON", {"op": "d", "before": {"id": 2}}]
    found = decode("debezium-json", raw_records(messages(*values)), spec(COLUMNS))
    assert [(row.offset, row.kind, (row.error or "").partition(":")[0]) for row in found] == [
        (0, "+I", ""),
        (1, "-D", TRUNCATE),
        (2, "-D", "unparseable"),
        (3, "-D", ""),
    ]
