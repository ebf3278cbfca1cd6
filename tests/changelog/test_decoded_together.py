"""Several tables with the same messages: what each gets is what it would get alone, and messages are read once for all
that a format can't tell apart.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import pyarrow as pa
import pytest

from changelog import formats
from changelog.conditions import Condition, Constant, Field
from changelog.decoding import ChangelogDecoder, decoded_together
from changelog.formats.debezium_json import DebeziumJson
from changelog.rows import SoftDelete
from changelog.source_tables import Found
from changelog.spec import ChangelogSpec
from changelog.versions import VersionColumns
from changelog.wanted import Where
from tests.changelog.messages import Message, raw_records, spec, sql

COLUMNS = {"id": "bigint", "region": "string", "note": "string"}
FIRST = spec(COLUMNS, order_by=(("seq", sql("bigint")),), schema_changes="evolve", partition_sources=("region",))
IN_US = Condition("=", (Field("region"), Constant(pa.scalar("us"))))
WHERE = Where(frozenset({"region"}), IN_US, frozenset(), frozenset({"note"}))


class Counted(DebeziumJson):
    """Counts the records that it reads, and fails as a whole where one of them is poison."""

    read: ClassVar[list[int]] = []

    def changes(self, records: pa.RecordBatch) -> Iterator[Found]:
        self.read.append(len(records))
        for number, value in enumerate(records.column("value").to_pylist()):
            if b"poison" in (value or b""):
                raise ArithmeticError(f"record {number} is poison")
        yield from super().changes(records)


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    monkeypatch.setitem(formats.OURS, "debezium-json", f"{__name__}:Counted")
    Counted.read.clear()
    return Counted.read


def message(number: int, op: str, source: dict[str, str] | None = None, **row: Any) -> Message:
    image = {"id": number % 3, "region": "eu", "note": None, "seq": number, **row}
    sides = {"before": image if op != "c" else None, "after": image | {"note": "n"} if op != "d" else None}
    return Message({**sides, "op": op, "source": {"ts_ms": number, **(source or {})}}, number, {"id": image["id"]})


BATCHES = [
    [message(0, "c"), message(1, "c", region="us"), message(2, "u", id="no number")],
    [],
    [message(3, "d"), Message({"op": "t", "seq": 4}, 4), message(5, "u", more=1), message(6, "x")],
    [Message(None, 7, {"id": 0}), Message("no JSON", 8), message(9, "u", seq=None)],
]


def outcome(decoder: ChangelogDecoder) -> tuple[ChangelogDecoder, list[Any]]:
    """The decoder, and what it will tell of the messages."""
    told: list[Any] = []
    return replace(decoder, observe=told.append, observe_stated=told.append), told


@pytest.mark.parametrize("poison", [False, True])
@pytest.mark.parametrize(
    ("others", "times"),
    [
        ([replace(FIRST, history=VersionColumns("valid_from", "valid_to", "is_current"))], 1),
        ([replace(FIRST, where=WHERE), replace(FIRST, soft_delete=SoftDelete("gone"))], 1),
        ([replace(FIRST, truncate_refused="not here"), replace(FIRST, descending=frozenset({"seq"}))], 1),
        ([replace(FIRST, ignored_nulls=frozenset({"note"})), replace(FIRST, excluded=frozenset({"more"}))], 1),
        ([replace(FIRST, columns=tuple(replace(column, required=True) for column in FIRST.columns))], 1),
        ([replace(FIRST, columns=FIRST.columns[:2])], 2),
        ([replace(FIRST, key=("region",))], 2),
        ([replace(FIRST, order_by=())], 2),
        ([replace(FIRST, metadata=("_ts",))], 2),
        ([replace(FIRST, trust_before=True), FIRST], 2),
    ],
)
def test_each_table_gets_what_it_gets_alone(
    others: list[ChangelogSpec], times: int, poison: bool, counted: list[int]
) -> None:
    batches = list(map(raw_records, BATCHES))
    if poison:
        batches[2] = raw_records([*BATCHES[2], message(10, "u", note="poison"), message(11, "u")])
    decoders = [ChangelogDecoder("debezium-json", table) for table in (FIRST, *others)]
    apart = []
    for decoder in decoders:
        counting, told = outcome(decoder)
        apart.append(([batch for batch in counting(batches) if len(batch)], told))
    counted.clear()
    pairs = [outcome(decoder) for decoder in decoders]
    made = list(decoded_together([decoder for decoder, _ in pairs], batches))
    for number, (_, told) in enumerate(pairs):
        found = [batch for of_tables in made for batch in of_tables[number] if len(batch)]
        assert (found, told) == apart[number]
        assert found
    if not poison:
        assert sorted(counted) == sorted([3, 4, 3] * times)


def test_of_a_topic_with_several_tables_names_are_read_once_and_each_message_once(counted: list[int]) -> None:
    tables = ["orders", "items", "orders", "users", "orders", "items"]
    sources = [{"db": "shop", "table": table} for table in tables]
    batch = raw_records([message(n, "c", source=source) for n, source in enumerate(sources)])
    entries = {
        "orders": replace(FIRST, source_tables=("shop.orders",), is_mixed=True, ignores_other_tables=True),
        "items": replace(FIRST, columns=FIRST.columns[:2], source_tables=("shop.items",), is_mixed=True),
    }
    made = list(decoded_together([ChangelogDecoder("debezium-json", table) for table in entries.values()], [batch]))
    assert [sum(map(len, rows)) for rows in made[0]] == [3, 6], "of items, what no entry takes is a bad record"
    assert sorted(counted) == [2, 3, 6]
