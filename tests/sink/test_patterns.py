"""Patterns: which topics and directories get which tables."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from pydantic import ValidationError

from sink.config import Config
from sink.table.patterns import resolve_tables

Entry = Mapping[str, Any]


def config(entries: Sequence[Entry], source: Mapping[str, Any] | None = None, **sink: Any) -> Config:
    kafka = {"type": "kafka", "format": "row-kind", "options": {"kafka.bootstrap.servers": "broker:9092"}}
    return Config.model_validate(
        {
            "sink": {"id": "shop", "checkpoint": "/state", "dead_letter_table": "lake.shop.dead_letters", **sink},
            "source": source or kafka,
            "catalogs": {"lake": {"type": "rest"}},
            "tables": [{"key": ["id"], **entry} for entry in entries],
        }
    )


def targets(entries: Sequence[Entry], names: Sequence[str]) -> dict[str, str]:
    return {
        table.section.source: str(table.error or table.section.target)
        for table in resolve_tables(config(entries), names)
    }


SHOP = {"source": r"shop\.public\.(.*)", "target": "lake.shop.$1"}


def test_each_matching_topic_has_a_table() -> None:
    names = [
        "shop.public.orders",
        "shop.public.items",
        "shop_public_x",
        "other",
        "shop.public.a-b.c",
        "x.shop.public.no",
    ]
    assert targets([SHOP], names) == {
        "shop.public.items": "lake.shop.items",
        "shop.public.orders": "lake.shop.orders",
        # what isn't part of a plain SQL name becomes _
        "shop.public.a-b.c": "lake.shop.a_b_c",
    }


def test_groups_go_anywhere_in_the_target() -> None:
    entry = {"source": r"(\w+)\.(\w+)\.(\w+)", "target": "lake.$1.${3}2_of_$2"}
    (table,) = resolve_tables(config([entry]), ["db.public.orders"])
    assert table.section.target == "lake.db.orders2_of_public"
    assert table.path == "tables[0]"


def test_a_plain_name_wins_then_the_first_pattern() -> None:
    entries = [
        SHOP,
        {"source": r"shop\.(\w+)\.orders", "target": "lake.late.$1"},
        {"source": "shop.public.orders", "target": "lake.special.orders", "mode": "changelog"},
    ]
    resolved = resolve_tables(config(entries), ["shop.public.orders", "shop.other.orders", "shop.public.items"])
    assert [(t.section.source, t.section.target, t.section.mode) for t in resolved] == [
        ("shop.public.items", "lake.shop.items", "upsert"),
        ("shop.other.orders", "lake.late.other", "upsert"),
        ("shop.public.orders", "lake.special.orders", "changelog"),
    ]


def test_a_name_with_dots_and_parentheses_is_no_pattern_without_a_reference() -> None:
    assert targets([{"source": "shop.(x)", "target": "lake.shop.x"}], ["shop.x"]) == {"shop.(x)": "lake.shop.x"}


def test_sources_that_would_share_a_table_are_refused_all_of_them() -> None:
    found = targets([SHOP], ["shop.public.a-b", "shop.public.a_b", "shop.public.c", "shop.public.dead_letters"])
    assert found["shop.public.c"] == "lake.shop.c"
    shared = (
        "tables[0]: shop.public.a-b and shop.public.a_b would share the table lake.shop.a_b. Correct source or target."
    )
    assert found["shop.public.a-b"] == found["shop.public.a_b"] == shared
    assert "lake.shop.dead_letters is the dead-letter table" in found["shop.public.dead_letters"]


@pytest.mark.parametrize("source_type", ["kafka", "files"])
def test_targets_that_differ_in_upper_and_lower_case_only_are_one_table(source_type: str) -> None:
    """To Hive, Glue and others."""
    folder, source = ("/cdc/", {"type": "files", "format": "row-kind"}) if source_type == "files" else ("", None)
    entries = [
        {"source": f"{folder}(.*)", "target": "lake.shop.$1", "order_by": ["n"]},
        {"source": f"{folder}plain", "target": "lake.Shop.items", "order_by": ["n"]},
    ]
    names = [f"{folder}{name}" for name in ("Orders", "orders", "ITEMS", "Dead_Letters", "other")]
    found = {table.section.source: table.error for table in resolve_tables(config(entries, source), names)}
    assert [name for name, error in found.items() if error is None] == [f"{folder}other"]
    assert f"{folder}Orders and {folder}orders would share the table lake.shop." in str(found[f"{folder}orders"])
    assert f"{folder}ITEMS and {folder}plain would share" in str(found[f"{folder}plain"])
    assert "is the dead-letter table" in str(found[f"{folder}Dead_Letters"])


def test_an_empty_group_is_refused() -> None:
    found = targets([{"source": r"shop\.(\w*)(\.x)?", "target": "lake.shop.$1"}], ["shop.", "shop.a"])
    assert found["shop.a"] == "lake.shop.a"
    assert (
        found["shop."]
        == "tables[0]: $1 in 'lake.shop.$1' is empty for 'shop.'. Correct the pattern, or name the table."
    )


NAMED = {"type": "kafka", "format": "maxwell-json", "options": {"kafka.bootstrap.servers": "broker:9092"}}
OF_SHOP = {"source": {"topic": "shop", "table": r"shop\.(.*)"}, "target": "lake.shop.$1"}


def named(entries: Sequence[Entry], tables: Mapping[str, Sequence[str]]) -> dict[str, str]:
    resolved = resolve_tables(config(entries, NAMED), (), tables)
    return {table.section.origin: str(table.error or table.section.target) for table in resolved}


def test_each_table_that_messages_name_has_a_table() -> None:
    others = {"audit": ["shop.no"], "shop": ["shop.orders", "shop.order-items", "crm.users", "db.shop.log"]}
    assert named([OF_SHOP], others) == {
        "shop.orders in shop": "lake.shop.orders",
        "shop.order-items in shop": "lake.shop.order_items",
        "db.shop.log in shop": "lake.shop.log",  # of three parts the first may be left out, as in `source_tables`
    }
    (table,) = resolve_tables(config([{**OF_SHOP, "keys": {"shop.a": ["x", "y"]}}], NAMED), (), {"shop": ["shop.a"]})
    section = table.section
    assert (section.topics, section.source_tables, section.key) == (("shop",), ["shop.a"], ["x", "y"])
    assert (section.other_tables, section.many_topics) == ("ignore", False)
    assert table.from_pattern


def test_a_table_that_an_entry_names_belongs_to_it_then_to_the_first_pattern() -> None:
    entries = [
        OF_SHOP,
        {"source": {"topic": "shop", "table": "shop.o*"}, "target": "lake.plain.o"},
        {"source": {"topic": "shop", "table": "(.*)"}, "target": "lake.rest.$1"},
        {"source": {"topic": "other", "table": r"(\w)"}, "target": "lake.other.$1"},
        {"source": {"topic": ["other", "third"], "table": "(.*)[.](.*)"}, "target": "lake.$1.$2", "shard": "id"},
    ]
    tables = {"shop": ["shop.orders", "shop.users", "crm.users"], "other": ["a"], "third": ["x.b", "x.c"]}
    assert named(entries, tables) == {
        "shop": "lake.plain.o",
        "shop.users in shop": "lake.shop.users",
        "crm.users in shop": "lake.rest.crm_users",
        "a in other": "lake.other.a",
        "x.b in other, third": "lake.x.b",
        "x.c in other, third": "lake.x.c",
    }


def test_tables_in_messages_that_would_share_a_table_are_refused() -> None:
    found = named([OF_SHOP], {"shop": ["shop.a-b", "shop.a_b", "shop.", "shop.c"]})
    shared = "tables[0]: shop.a-b in shop and shop.a_b in shop would share the table lake.shop.a_b. Correct source or"
    assert found["shop.a-b in shop"].startswith(shared)
    assert found["shop.a_b in shop"].startswith(shared)
    assert "$1 in 'lake.shop.$1' is empty" in found["shop. in shop"]
    assert found["shop.c in shop"] == "lake.shop.c"


@pytest.mark.parametrize(
    ("change", "source", "error"),
    [
        ({"source": {"topic": "shop", "table": "shop.("}}, {}, r"'shop\.\(' is not valid"),
        ({"source": {"topic": "shop", "table": "shop.*"}}, {}, r"\$1 names a group that source 'shop\.\*' does"),
        ({"source": {"topic": "shop", "table": ["shop.(.*)"]}}, {}, "table"),
        ({"other_tables": "reject"}, {}, "would keep the messages of the others as bad records"),
        ({"keys": {"crm.users": ["id"]}}, {}, "keys names 'crm.users', which the source"),
        ({}, {"format": "row-kind"}, "don't say of which table they are. Leave table out of source"),
        ({"order_by": ["n"]}, {"type": "files", "options": {"path_format": "json"}}, "in files must be named"),
        ({"source": {"topic": ["shop", "crm"], "table": "(.*)"}, "key": ["id"]}, {}, "takes several topics, and"),
    ],
)  # fmt: skip
def test_a_pattern_over_tables_that_cannot_be(change: Entry, source: Mapping[str, Any], error: str) -> None:
    with pytest.raises(ValidationError, match=error):
        config([{**OF_SHOP, **change}], {**NAMED, **source})


def test_of_a_path_only_the_last_part_is_a_pattern() -> None:
    files = {"type": "files", "format": "row-kind"}
    made = config([{"source": "/data/(x).d/shop_(.*)", "target": "lake.shop.$1", "order_by": ["seq"]}], files)
    names = ["/data/(x).d/shop_orders", "/data/(x).d/other", "/data/x.d/shop_no"]
    assert [table.section.target for table in resolve_tables(made, names)] == ["lake.shop.orders"]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"source": "shop", "target": "lake.shop.$1"}, r"\$1 names a group that source 'shop' does not have; it has 0"),
        (
            {"source": "s(.*)", "target": "lake.a.${2}"},
            r"\$\{2\} names a group that source 's\(\.\*\)' does not have; it has 1",
        ),
        (
            {"source": "s(.*", "target": "lake.a.$1"},
            r"source must be a regular expression, but 's\(\.\*' is not valid: missing \)",
        ),
        ({"source": "s(.*)", "target": "lake.$1"}, r"write catalog\.namespace\.table"),
    ],
)
def test_wrong_patterns(entry: Entry, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        config([entry])


def test_dead_letters_need_a_place() -> None:
    with pytest.raises(ValidationError, match=r"comes from a pattern, .* Name one: dead_letter_table"):
        config([{"source": r"(\w+)\.(.*)", "target": "lake.$1.$2"}], dead_letter_table=None)


def test_subscribe_does_not_go_with_patterns() -> None:
    options = {"kafka.bootstrap.servers": "broker:9092", "subscribe": "a"}
    with pytest.raises(ValidationError, match=r"leave out source\.options\.subscribe"):
        config([SHOP], {"type": "kafka", "format": "row-kind", "options": options})


def test_keys_are_the_exceptions_of_a_pattern() -> None:
    entry = SHOP | {"keys": {"shop.public.items": ["order_id", "line"]}}
    names = ["shop.public.items", "shop.public.orders"]
    assert [t.section.key for t in resolve_tables(config([entry]), names)] == [["order_id", "line"], ["id"]]
    debezium = {"type": "kafka", "format": "debezium-json", "options": {"kafka.bootstrap.servers": "broker:9092"}}
    without = Config.model_validate(config([entry], debezium).model_dump(exclude_unset=True) | {"tables": [entry]})
    assert [t.section.key for t in resolve_tables(without, names)] == [["order_id", "line"], []]
    files = {"type": "files", "format": "row-kind"}
    made = config([{"source": "/data/(.*)", "target": "lake.shop.$1", "order_by": ["n"], "keys": {"a": ["x"]}}], files)
    assert [t.section.key for t in resolve_tables(made, ["/data/a", "/data/b"])] == [["x"], ["id"]]


@pytest.mark.parametrize(
    ("entry", "source", "message"),
    [
        (
            {"source": "a", "order_by": ["n"]},
            {"type": "files", "format": "row-kind"},
            "files have no message keys. Add it",
        ),
        ({"source": "a"}, {"format": "dms-json"}, "of the format dms-json don't say which columns are the key"),
        ({"source": "a", "keys": {"a": ["id"]}}, {}, "keys is for a pattern's exceptions; write key"),
        ({"source": "a(.*)", "keys": {"b": ["id"]}}, {}, r"keys names 'b', which the source 'a\(\.\*\)' doesn't match"),
        ({"source": "a(.*)", "keys": {"ab": []}}, {}, "at least 1 item"),
        ({"source": "a(.*)", "keys": {"ab": ["x", "x"]}}, {}, "names a column twice"),
        (
            {"source": "a(.*)", "keys": {"ab": ["x"]}, "columns": {"id": "int"}},
            {},
            "key names 'x', which is not in columns",
        ),
        ({"source": "a(.*)", "keys": {"ab": ["x"]}, "exclude": ["x"]}, {}, "exclude names 'x', which is in key"),
    ],
)
def test_wrong_keys(entry: Entry, source: Mapping[str, Any], message: str) -> None:
    options = {} if source.get("type") == "files" else {"kafka.bootstrap.servers": "b:9092"}
    kafka = {"type": "kafka", "format": "row-kind", "options": options, **source}
    made = config([SHOP]).model_dump(exclude_unset=True)
    target = "lake.shop.$1" if "(" in entry["source"] else "lake.shop.a"
    with pytest.raises(ValidationError, match=message):
        Config.model_validate(made | {"source": kafka, "tables": [{**entry, "target": target}]})
