"""Compares keys that a micro-batch's messages state with the known key, without a JVM. `test_keys` has the rest."""

import json
import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from changelog.decoding import StatedKeys
from sink.config import TableSection
from sink.errors import TableError
from sink.table import keys
from sink.table.keys import TableKey, compared, may_spread

PROPERTY = "rowdelta.shop.accepted-keys"


def section(**entries: Any) -> TableSection:
    return TableSection.model_validate({"source": "shop.orders", "target": "lake.shop.orders", **entries})


def learned(key: TableKey, stated: Mapping[tuple[str, ...], int]) -> TableKey:
    """:param stated: fields -> offset in partition 0."""
    return compared(key, {fields: (0, offset) for fields, offset in stated.items()}, section(), PROPERTY)


COMPOSITE = TableKey(("tenant", "id"), False, (("tenant", "id"),))


def test_the_order_of_fields_is_no_difference() -> None:
    assert learned(COMPOSITE, {("id", "tenant"): 3}) == COMPOSITE


@pytest.mark.parametrize("fields", [("id",), ("tenant",), ("tenant", "id", "line"), ("TENANT", "ID"), ()])
def test_any_other_key_stops(fields: tuple[str, ...]) -> None:
    with pytest.raises(TableError, match=r"was tenant, id, and from partition 0 offset 7 on "):
        learned(COMPOSITE, {("tenant", "id"): 1, fields: 7})


def test_of_several_other_keys_the_first_is_named() -> None:
    stated: StatedKeys = {("b",): (1, 3), ("a",): (0, 9)}
    with pytest.raises(TableError, match=r"from partition 0 offset 9 on it is a\. "):
        compared(COMPOSITE, stated, section(), PROPERTY)


def test_a_configured_key_learns_what_comes_first() -> None:
    key = TableKey(("id",), configured=True)
    assert learned(key, {(): 0}) == key
    known = learned(key, {("tenant", "id"): 4, ("id",): 2, (): 0})
    assert known.messages == (("id",), ("tenant", "id"))
    assert learned(known, {("id", "tenant"): 9, (): 8}) == known
    with pytest.raises(TableError, match="from partition 0 offset 8 on it is id, part") as stopped:
        learned(known, {("id", "line"): 9, ("line",): 10, ("id", "part"): 8})
    (value,) = re.findall(r"SET TBLPROPERTIES \('rowdelta\.shop\.accepted-keys' = '(.*)'\); else", str(stopped.value))
    accepted = [["id"], ["tenant", "id"], ["id", "part"], ["id", "line"], ["line"]]
    assert json.loads(value) == accepted, "one statement is enough for all keys of the micro-batch"


@pytest.mark.parametrize("value", ["id", "[]]", '["id"]', "[[]]", "[[1]]", '{"id": 1}'])
def test_what_is_accepted_is_a_list_of_keys(value: str) -> None:
    table: Any = SimpleNamespace(name="lake.shop.orders", property=lambda _: value)
    with pytest.raises(TableError, match=r"lake\.shop\.orders: the table property the-name is .*expected keys such as"):
        list(keys._accepted(table, "the-name"))


def test_it_is_remembered_as_it_is() -> None:
    for key in (COMPOSITE, TableKey(("id",), configured=True), TableKey(("a'b",), True, (("a'b",), ("c\\",)))):
        assert TableKey.from_json(key.to_json()) == key


def test_messages_of_one_row_may_be_in_several_partitions() -> None:
    key = TableKey(("id",), configured=True)
    assert not may_spread(key, [("id",)], section())
    assert may_spread(key, [("id",), ()], section())
    assert may_spread(key, [("tenant", "id")], section())
    assert not may_spread(COMPOSITE, [("id",)], section())
    assert not may_spread(key, [()], section(order_by=["seq bigint"]))


def test_a_warning_names_both() -> None:
    renamed = section(key=["number"], columns={"number": {"type": "int", "from": "id"}})
    assert TableKey(("number",), True, (("id",),)).warning(renamed) is None
    warning = TableKey(("number",), True, (("id",), ("tenant", "id"))).warning(renamed)
    assert warning is not None
    assert "key is number, but the key of the messages of shop.orders is tenant, id" in warning
    assert TableKey(("id",), False, (("id",),)).warning(section()) is None
    larger = TableKey(("id", "region"), True, (("id",),)).warning(section())
    assert larger is not None
    assert "A change of region leaves the old row in the table" in larger
