"""A message of another table of the source changes nothing: no row, no key, no column, whatever the format."""

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from changelog.decoding import ChangelogDecoder, Stated, decoded_together
from changelog.rows import BAD, FILE, ROW, BadRecord
from changelog.source_tables import takes
from tests.changelog import avro_messages
from tests.changelog.messages import Decoded, Message, decode, raw_records, spec

COLUMNS = {"id": "bigint", "name": "string"}
Made = Callable[[str, str, dict[str, Any] | None], Any]
"""A message: of a table, with an operation (insert, update, delete, truncate, none), with a row."""


def canal(table: str, op: str, row: dict[str, Any] | None) -> Any:
    data = None if row is None else [{name: str(value) for name, value in row.items()}]
    kind = {"none": "CREATE"}.get(op, op.upper())
    ddl = op in ("truncate", "none")
    return {
        "database": "shop",
        "table": table,
        "type": kind,
        "isDdl": ddl,
        "data": data,
        "old": None,
        "pkNames": ["id"],
    }


def maxwell(table: str, op: str, row: dict[str, Any] | None) -> Any:
    kind = {"none": "table-create", "truncate": "table-truncate"}.get(op, op)
    return {"database": "shop", "table": table, "type": kind, "ts": 1, "data": row}


def ogg(table: str, op: str, row: dict[str, Any] | None) -> Any:
    kind = "I" if op == "none" else op[0].upper()
    return {"table": f"shop.{table}", "op_type": kind, "before": row, "after": row, "primary_keys": ["id"]}


def dms(table: str, op: str, row: dict[str, Any] | None) -> Any:
    control = {"truncate": "truncate-table", "none": "create-table"}.get(op)
    metadata = {"record-type": "control" if control else "data", "operation": control or op}
    return {"data": row, "metadata": metadata | {"schema-name": "shop", "table-name": table}}


def debezium(table: str, op: str, row: dict[str, Any] | None) -> Any:
    kind = {"insert": "c", "update": "u", "delete": "d", "truncate": "t", "none": "m"}[op]
    source = {"connector": "mysql", "db": "shop", "table": table, "ts_ms": 1}
    return {"before": row if kind == "d" else None, "after": None if kind == "d" else row, "source": source, "op": kind}


def enveloped(table: str, op: str, row: dict[str, Any] | None) -> Any:
    fields = [{"type": "int64", "field": "id"}, {"type": "string", "optional": True, "field": "name"}]
    rows = [{"type": "struct", "optional": True, "fields": fields, "field": side} for side in ("before", "after")]
    schema = {"type": "struct", "fields": [*rows, {"type": "string", "field": "op"}]}
    return {"schema": schema, "payload": debezium(table, op, row)}


def flattened(table: str, op: str, row: dict[str, Any] | None) -> Any:
    kind = {"insert": "c", "update": "u", "delete": "d", "truncate": "t", "none": "m"}[op]
    return {**(row or {}), "__op": kind, "__db": "shop", "__table": table, "__deleted": str(op == "delete").lower()}


FORMATS: list[tuple[str, Made, dict[str, str]]] = [
    ("canal-json", canal, {}),
    ("maxwell-json", maxwell, {}),
    ("ogg-json", ogg, {}),
    ("dms-json", dms, {}),
    ("debezium-json", debezium, {}),
    ("debezium-json", enveloped, {}),
    ("debezium-json", flattened, {"flattened": "true"}),
]
each_format = pytest.mark.parametrize(
    ("name", "made", "options"), FORMATS, ids=[made.__name__ for _, made, _ in FORMATS]
)


def batch(made: Made, *changes: tuple[str, str, dict[str, Any] | None]) -> list[Message]:
    return [Message(made(*change), n, change[2] and {"id": change[2]["id"]}) for n, change in enumerate(changes)]


def told(found: list[Decoded]) -> list[tuple[int | None, str, Any]]:
    return [(d.offset, d.kind, d.row["id"]) for d in found if d.error is None]


@each_format
def test_other_tables_change_nothing(name: str, made: Made, options: dict[str, str]) -> None:
    changes = [
        ("orders", "insert", {"id": 1, "name": "pen"}),
        ("customers", "insert", {"id": 1, "name": "Ada", "city": "Oslo"}),
        ("customers", "update", {"id": 1, "name": "Bob"}),
        ("customers", "delete", {"id": 1, "name": "Bob"}),
        ("customers", "truncate", None),
        ("orders", "insert", {"id": 2, "name": "ink"}),
    ]
    if made in (flattened, dms, maxwell):
        del changes[4]  # in flattened rows there is none
    records = raw_records(batch(made, *changes))
    for others, is_mixed in itertools.product((False, True), repeat=2):
        table = spec(
            COLUMNS,
            options=options,
            source_tables=("shop.orders",),
            is_mixed=is_mixed,
            ignores_other_tables=others,
            schema_changes="evolve",
        )
        found = decode(name, records, table)
        assert [(kind, key) for _, kind, key in told(found)] == [("+I", 1), ("+I", 2)]
        errors = [d.bad for d in found if d.bad is not None]
        assert len(errors) == (0 if others else len(changes) - 2)
        for bad in errors:
            assert bad["error_class"] == BadRecord.OTHER_TABLE
            assert "of table shop.customers, and this entry takes those of shop.orders" in bad["reason"]
        observed: dict[str, str] = {}
        list(ChangelogDecoder(name, table, observe=observed.update)([records]))
        assert observed == {}, "their columns become none of the table"


@each_format
def test_what_no_row_depends_on_is_no_bad_record(name: str, made: Made, options: dict[str, str]) -> None:
    """Such as DDL of other tables, which Canal and DMS send to all topics."""
    if made in (ogg, flattened):
        return  # they have no such messages
    records = raw_records(batch(made, ("customers", "none", None), ("orders", "insert", {"id": 1, "name": "pen"})))
    for is_mixed in (False, True):
        table = spec(COLUMNS, options=options, source_tables=("shop.orders",), is_mixed=is_mixed)
        assert [(d.kind, d.error) for d in decode(name, records, table)] == [("+I", None)]


@each_format
def test_the_names_are_stated(name: str, made: Made, options: dict[str, str]) -> None:
    """Until an entry knows its table, all messages are taken, and the driver learns all names with their places."""
    rows = [("customers", "insert", {"id": 5, "name": "a"}), ("orders", "insert", {"id": 6, "name": "b"})]
    stated: list[Stated] = []
    decoder = ChangelogDecoder(name, spec(COLUMNS, options=options), observe_stated=stated.append)
    list(decoder([raw_records(batch(made, *rows, *rows))]))
    names = {fact: place for fact, place in stated[0].items() if isinstance(fact, str)}
    assert names == {"shop.customers": (0, 0), "shop.orders": (0, 1)}


@each_format
def test_what_no_row_depends_on_is_not_the_first_table(name: str, made: Made, options: dict[str, str]) -> None:
    """A topic that begins with DDL of another table, or with records of DMS's own tables, isn't theirs."""
    if made in (ogg, flattened):
        return  # they have no such messages
    rows = [("awsdms_status", "none", None), ("orders", "insert", {"id": 1, "name": "pen"})]
    stated: list[Stated] = []
    decoder = ChangelogDecoder(name, spec(COLUMNS, options=options), observe_stated=stated.append)
    list(decoder([raw_records(batch(made, *rows))]))
    assert [fact for fact in stated[0] if isinstance(fact, str)] == ["shop.orders"]


def test_the_first_place_is_in_the_lowest_partition() -> None:
    """Whatever the order in which a batch has several partitions, so that a replay finds the same table."""
    rows = [("orders", 1, 0), ("customers", 0, 5), ("orders", 0, 4)]
    records = [Message(debezium(t, "insert", {"id": 1}), offset, {"id": 1}, part) for t, part, offset in rows]
    stated: list[Stated] = []
    list(ChangelogDecoder("debezium-json", spec(COLUMNS), observe_stated=stated.append)([raw_records(records)]))
    names = {fact: place for fact, place in stated[0].items() if isinstance(fact, str)}
    assert names == {"shop.orders": (0, 4), "shop.customers": (0, 5)}


def test_the_first_place_in_files_whatever_task_ends_first() -> None:
    stated: list[Stated] = []
    decoder = ChangelogDecoder("canal-json", spec(COLUMNS), observe_stated=stated.append)
    for file, row, table in ((1, 0, "b"), (0, 700, "c"), (0, 40, "a"), (2, 0, "d")):
        records = raw_records([Message(canal(table, "insert", {"id": 1, "name": "x"}), -1)])
        list(decoder([records.append_column(FILE, pa.array([file])).append_column(ROW, pa.array([row]))]))
    places = {name: place for each in stated for name, place in each.items() if isinstance(name, str)}
    assert sorted(places, key=lambda name: places[name]) == ["shop.a", "shop.c", "shop.b", "shop.d"]


def test_tombstones_of_other_tables_remove_nothing() -> None:
    """The key of a tombstone may be that of a row of this table."""
    row = {"id": 1, "name": "pen"}
    changes = batch(debezium, ("orders", "insert", row), ("customers", "delete", row))
    messages = [*changes, Message(None, 2, {"id": 1}), *(Message(debezium("orders", "delete", row), 3, {"id": 1}),)]
    table = spec(COLUMNS, source_tables=("shop.orders",))
    found = decode("debezium-json", raw_records([*messages, Message(None, 4, {"id": 1})]), table)
    assert told(found) == [(0, "+I", 1), (3, "-D", 1)]
    # in a later batch nothing tells of which table it is
    lone = raw_records([Message(None, 9, {"id": 1})])
    assert told(decode("debezium-json", lone, table)) == [(9, "-D", 1)]
    assert decode("debezium-json", lone, spec(COLUMNS, source_tables=("shop.orders",), is_mixed=True)) == []
    mixed = spec(COLUMNS, options={"flattened": "true"}, source_tables=("shop.orders",), is_mixed=True)
    deleted = Message(flattened("orders", "delete", row), 8, {"id": 1})
    after = raw_records([deleted, Message(None, 9, {"id": 1})])
    assert told(decode("debezium-json", after, mixed)) == [(8, "-D", 1)], "the transform may leave both"
    (bad,) = decode("debezium-json", lone, mixed)
    assert bad.error is not None
    assert bad.error.startswith("other_table: a tombstone doesn't say of which table it is")


def test_avro() -> None:
    source = {
        "type": "record",
        "name": "S",
        "fields": [{"name": n, "type": "string"} for n in ("db", "schema", "table")],
    }
    row = {"type": "record", "name": "Row", "fields": [{"name": "id", "type": "long"}]}
    fields = [{"name": "before", "type": ["null", row]}, {"name": "after", "type": ["null", "Row"]}]
    schema = {
        "type": "record",
        "name": "E",
        "fields": [*fields, {"name": "source", "type": source}, {"name": "op", "type": "string"}],
    }
    values = [
        {"before": None, "after": {"id": n}, "source": {"db": "shop", "schema": "public", "table": table}, "op": "c"}
        for n, table in enumerate(["orders", "customers", "orders"])
    ]
    known = avro_messages.Known({1: json.dumps(schema)})
    from changelog.changes import TableNames
    from changelog.formats.debezium_avro import DebeziumAvro

    raw = avro_messages.batch([(None, avro_messages.message(1, schema, value)) for value in values])
    found = DebeziumAvro(spec({"id": "bigint"}), lambda: known).changes(raw)
    (names,) = (part for part in found if isinstance(part, TableNames))
    assert names.name.to_pylist() == ["shop.public.orders", "shop.public.customers", "shop.public.orders"]


@pytest.mark.parametrize(
    ("pattern", "name", "fits"),
    [
        ("shop.orders", "shop.orders", True),
        ("shop.orders", "shop.Orders", False),
        ("orders", "shop.orders", False),
        ("*.orders", "shop.orders", True),
        ("*.orders", "shop.orders_old", False),
        ("shop.orders_?", "shop.orders_7", True),
        ("public.orders", "shop.public.orders", True),
        ("shop.public.orders", "shop.public.orders", True),
        ("*.orders", "shop.public.orders", True),
        ("public.orders", "public.orders", True),
        ("SHOP.ORDERS", "SHOP.ORDERS", True),
        ("dbo.a[1]", "dbo.a[1]", True),
        ("dbo.a[1]", "dbo.a1", False),
    ],
)
def test_patterns(pattern: str, name: str, fits: bool) -> None:
    assert takes([pattern], name) == fits


def test_a_tombstone_after_its_delete_in_another_arrow_batch_of_a_mixed_topic() -> None:
    """Its batch is read again without messages of other tables, for each table. A batch may have several partitions."""

    def row(table: str, key: int, offset: int, *, deleted: str = "false", partition: int = 0) -> Message:
        more = {"__deleted": deleted, "__op": "d" if deleted == "true" else "u", "__schema": "s", "__table": table}
        return Message({"id": key, "name": "a", **more}, offset, {"id": key}, partition)

    said = [row("other", 8, 0, partition=1), row("t", 1, 0), row("t", 2, 1, deleted="true")]
    records = raw_records([*said, Message(None, 2, {"id": 2}), row("other", 9, 3), row("t", 3, 4)])
    mixed = spec(COLUMNS, options={"flattened": "true"}, is_mixed=True)
    tables = [replace(mixed, source_tables=(name,)) for name in ("s.t", "s.other", "s.none")]
    decoders = [ChangelogDecoder("debezium-json", table) for table in tables]
    cuts = ([6], [3, 3], [3, 1, 2])
    for cut in cuts:
        ends = list(itertools.accumulate(cut))
        batches = [records.slice(end - size, size) for end, size in zip(ends, cut, strict=True)]
        found: list[list[str]] = [[], [], []]
        for made in decoded_together(decoders, batches):
            for rows, of_table in zip(found, made, strict=True):
                for batch in of_table:
                    rows += [str(row["id"] or row[BAD]["error_class"]) for row in batch.to_pylist()]
        assert list(map(sorted, found)) == [
            ["1", "2", "3", "other_table", "other_table"],
            ["8", "9", "other_table", "other_table", "other_table"],
            ["other_table"] * 5,
        ]
