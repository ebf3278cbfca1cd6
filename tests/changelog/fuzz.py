"""Random changes and damaged messages: what the tests of every wire format do with them.

`histories` are random changes of a table, which a format's test encodes as its tool does; `assert_decoded` says what
must come out. `damaged` messages are ones that no tool sends; `assert_accounted` says that each ends as a change or a
bad record, and none is lost. `ROWDELTA_FUZZ=100` makes the tests of damage a hundred times longer.
"""

import datetime as dt
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

import pyarrow as pa
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from changelog import formats
from changelog.changes import RAW_SCHEMA, Changes
from changelog.rows import TRUNCATE, BadRecord
from changelog.spec import ChangelogSpec
from tests.changelog.messages import Decoded, decode, spec

COLUMNS = {
    "id": "bigint",
    "region": "string",
    "name": "string",
    "amount": "decimal(12,2)",
    "ok": "boolean",
    "at": "timestamp_ntz",
    "day": "date",
    "ratio": "double",
    "data": "binary",
}
KEPT = ("id", "region")
"""Columns of `table()` that a delete keeps: the key, and the source of the partition."""

Row = Mapping[str, Any]
Encoder = Callable[[str, Row | None, Row | None], Any]
"""(operation: insert, update or delete; old row; new row) -> the tool's message."""


def table(**options: Any) -> ChangelogSpec:
    return spec(COLUMNS, partition_sources=("region",), **options)


_TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=8)

rows: st.SearchStrategy[Row] = st.fixed_dictionaries(
    {
        "id": st.integers(-(2**63), 2**63 - 1) | st.integers(0, 5),
        "region": st.none() | st.sampled_from(["eu", "us", "null", '"region":null', "\\u0000"]),
        "name": st.none() | _TEXT,
        "amount": st.none() | st.decimals("-9999999999.99", "9999999999.99", places=2),
        "ok": st.none() | st.booleans(),
        "at": st.none() | st.datetimes(dt.datetime(1, 1, 1), dt.datetime(9999, 12, 31)),
        "day": st.none() | st.dates(),
        "ratio": st.none() | st.floats(allow_nan=False, allow_infinity=False),
        "data": st.none() | st.binary(max_size=6),
    }
)


@dataclass(frozen=True)
class Change:
    """One change of a row: `old` and `new` are None where there is none."""

    old: Row | None
    new: Row | None

    @property
    def operation(self) -> str:
        return "insert" if self.old is None else "delete" if self.new is None else "update"


def _updates() -> st.SearchStrategy[Change]:
    def changed(old: Row, new: Row, fields: set[str]) -> Change:
        return Change(old, {name: new[name] if name in fields else old[name] for name in COLUMNS})

    updates = st.builds(changed, rows, rows, st.sets(st.sampled_from(sorted(COLUMNS)), min_size=1))
    return updates.filter(lambda change: change.old != change.new)


changes = st.builds(Change, st.none(), rows) | st.builds(Change, rows, st.none()) | _updates()
histories: st.SearchStrategy[list[Change]] = st.lists(changes, min_size=1, max_size=12)


def inferred(name: str, values: Sequence[Any]) -> dict[str, str]:
    """Fields of rows in messages, which the table doesn't know before: name -> kind."""
    made = formats.find(name)(ChangelogSpec((), (), schema_changes="evolve"))
    found: dict[str, str] = {}
    for part in made.changes(records([text(value) for value in values])):
        if isinstance(part, Changes):
            found |= {field: wire.kind for field, wire in part.unknown.items()}
    return found


def assert_decoded(name: str, values: Sequence[Any], history: Sequence[Sequence[Change]], table: ChangelogSpec) -> None:
    """Messages (one for each part of the history) decode to exactly what happened.

    The partition of a replaced row may be unknown, but it is never wrong. In changelog mode each update must say which
    row it replaced; in other modes, only an update that changed the key must.
    """
    found = decode(name, records([text(value) for value in values]), table)
    assert [d.error for d in found if d.error] == []
    expected: list[tuple[int, str, Row]] = []
    for offset, part in enumerate(history):
        for change in part:
            old, new = change.old, change.new
            if new is None:
                assert old is not None
                expected.append((offset, "-D", old))
            elif old is None:
                expected.append((offset, "+I", new))
            else:
                if table.trust_before or old["id"] != new["id"]:
                    expected.append((offset, "-U", old))
                expected.append((offset, "+U", new))
    assert [(d.offset, d.kind) for d in found] == [(offset, kind) for offset, kind, _ in expected]
    for decoded, (_, kind, row) in zip(found, expected, strict=True):
        if kind in ("+I", "+U"):
            assert decoded.row == row
        else:
            assert decoded.row["id"] == row["id"]
            assert decoded.row["region"] in (row["region"], None)
            assert {decoded.row[name] for name in COLUMNS if name not in KEPT} == {None}
    halves = [(d.offset, d.half) for d in found]
    assert len(set(halves)) == len(halves)


def records(values: Sequence[bytes | None]) -> pa.RecordBatch:
    """Values as the records of one partition, with offsets from 0."""
    count = len(values)
    columns = {
        "source": ["topic"] * count,
        "partition": [0] * count,
        "offset": list(range(count)),
        "timestamp": [None] * count,
        "key": [None] * count,
        "value": list(values),
    }
    return pa.RecordBatch.from_pydict(columns, schema=RAW_SCHEMA)


def text(value: Any) -> bytes:
    """A message as JSON; `Decimal`s as numbers with all their digits."""
    numbers: dict[str, str] = {}

    def number(value: Any) -> str:
        assert isinstance(value, Decimal)
        return numbers.setdefault(f"\ue000{len(numbers)}\ue001", str(value)) and list(numbers)[-1]

    result = json.dumps(value, default=number, ensure_ascii=False)
    for mark, digits in numbers.items():
        result = result.replace(f'"{mark}"', digits)
    return result.encode()


# Damage.


def much(examples: int) -> settings:
    """Settings of a test of damaged messages."""
    times = int(os.environ.get("ROWDELTA_FUZZ", "1"))
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(deadline=None, max_examples=examples * times, suppress_health_check=slow)


Message = tuple[bytes | None, bytes | None]
"""A record's key and value."""

_TABLE_FIELDS = {"database", "db", "schema", "schema-name", "table", "table-name"}
_NAMES: st.SearchStrategy[Any] = st.sampled_from(
    [None, "other", "things", "THINGS", "shop.orders", "*", "", ".", "\u00e4", 7, {}, [], False]
)
_NUMBERS = st.sampled_from([0, -1, 2**31, 2**63, 2**64, 10**400, 1e300, -0.0, 1.5, float("nan"), float("inf")])
_SCALARS = (
    st.none() | st.booleans() | _NUMBERS | _TEXT | st.sampled_from(["1", "", "\ud800", "2026-01-02", "0000-00-00"])
)
_WEIRD = st.recursive(
    _SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3), max_leaves=4
)


def _places(document: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield place
    if isinstance(document, dict | list):
        for name in document if isinstance(document, dict) else range(len(document)):
            yield from _places(document[name], (*place, name))


def _replaced(document: Any, place: tuple[Any, ...], value: Any) -> Any:
    if not place:
        return value
    copy = document.copy()
    copy[place[0]] = _replaced(document[place[0]], place[1:], value)
    return copy


def _removed(document: Any, place: tuple[Any, ...]) -> Any:
    copy = document.copy()
    if len(place) > 1:
        copy[place[0]] = _removed(document[place[0]], place[1:])
    else:
        del copy[place[0]]
    return copy


@st.composite
def _of_another_table(draw: st.DrawFn, examples: Sequence[Any]) -> bytes:
    document = draw(st.sampled_from(examples))
    places = [place for place in _places(document) if place and place[-1] in _TABLE_FIELDS]
    for place in places:
        if draw(st.booleans()):
            document = _replaced(document, place, draw(_NAMES))
    return text(document)


def _dumped(value: Any) -> bytes:
    return json.dumps(value, default=str).encode()  # lone surrogates stay escapes


@st.composite
def _mutated(draw: st.DrawFn, examples: Sequence[Any]) -> bytes:
    document = draw(st.sampled_from(examples))
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.sampled_from(list(_places(document))))
        if place and draw(st.booleans()):
            document = _removed(document, place)
        else:
            document = _replaced(document, place, draw(_WEIRD))
    return _dumped(document)


@st.composite
def _truncated(draw: st.DrawFn, examples: Sequence[Any]) -> bytes:
    whole = text(draw(st.sampled_from(examples)))
    return whole[: draw(st.integers(0, len(whole) - 1))]


@st.composite
def _flipped(draw: st.DrawFn, examples: Sequence[Any]) -> bytes:
    whole = bytearray(text(draw(st.sampled_from(examples))))
    for _ in range(draw(st.integers(1, 3))):
        whole[draw(st.integers(0, len(whole) - 1))] = draw(st.integers(0, 255))
    return bytes(whole)


NOTHING = b'{"schema":null,"payload":null}'
"""A null as Kafka's JsonConverter with schemas.enable wrote it: a key or value of Debezium."""

_SPECIAL = [
    NOTHING,
    b'{"ts_ms":1}',
    b"",
    b"null",
    b"[]",
    b"{}",
    b"{}{}",
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b'{"a":' * 500 + b"1" + b"}" * 500,
    b"\xff\xfe{}",
    b'{"a":1}\n{"a":1}',
    b"\xef\xbb\xbf{}",
]


KEYS_OF_NO_ROW = (None, NOTHING, b'{"id":null}', b'{"name":"a"}')
"""They have no value of the table's key column, so a tombstone of an event stream says nothing of a row."""

_KEYS = st.sampled_from(
    [
        *KEYS_OF_NO_ROW,
        b'{"id":1}',
        b'{"id":"x"}',
        b'{"schema":{"type":"struct","fields":[{"type":"int64","field":"id"}]},"payload":{"id":1}}',
        b'{"schema":{"type":"int64"},"payload":1}',
        b"1",
        b'"1"',
        b"x",
        b"",
        b"null",
        b"[1]",
        b"Struct{id=1}",
        b"Struct{id=1,region=eu}",
        b"Struct{",
        b"\xff\x00",
        b"\0\0\0\0\1\2",
        b"99999999999999999999",
    ]
)


def damaged(examples: Sequence[Any]) -> st.SearchStrategy[list[Message]]:
    """Batches of whole, changed, cut and random messages, of other tables too; a value of None is a tombstone."""
    good = st.sampled_from([text(example) for example in examples])
    any_one: st.SearchStrategy[bytes | None] = st.one_of(
        good,
        good,
        _mutated(examples),
        _mutated(examples),
        _of_another_table(examples),
        _truncated(examples),
        _flipped(examples),
        st.binary(max_size=20),
        st.sampled_from(_SPECIAL),
        st.none(),
    )
    return st.lists(st.tuples(_KEYS, any_one), min_size=1, max_size=24)


_CLASSES = {TRUNCATE} | {value for name, value in vars(BadRecord).items() if name.isupper()}


def assert_accounted(
    name: str,
    messages: Sequence[Message],
    table: ChangelogSpec,
    is_ignored: Callable[[Any], bool],
    *,
    tombstones: Literal["ignored", "keyed", "all"] = "ignored",
    parse: Callable[[bytes], Any] = json.loads,
    table_of: Callable[[Any], str | None] = lambda value: None,
) -> None:
    """Each message ends as changes or as a bad record with its value, and the same happens if it is alone.

    :param is_ignored: whether a message that can be parsed should leave no trace.
    :param tombstones: which of them delete the rows of their keys, unless they come right after another delete, be it
        a bad record.
    :param table_of: the table that a message names.
    """
    together = _by_offset(decode(name, _keyed(messages), table))
    for offset, message in enumerate(messages):
        found, value = together.get(offset, []), message[1]
        bad = [d for d in found if d.bad]
        is_tombstone = value is None or (value == NOTHING and tombstones != "ignored")
        says_nothing = message[0] in KEYS_OF_NO_ROW or bool(table.source_tables)  # a topic of several tables
        if is_tombstone and tombstones == "ignored":
            assert not found
        elif is_tombstone and tombstones == "keyed" and says_nothing:
            assert not [d.kind for d in found if d.kind != "-D"]
        elif is_tombstone:
            before = together.get(offset - 1, [])
            follows = [d.kind for d in before] == ["-D"] and messages[offset - 1][0] == message[0]
            assert found or follows, message
        elif not found:
            assert is_ignored(parse(value)), value  # type: ignore[arg-type]
        if bad:
            assert len(found) == 1
            assert bad[0].bad is not None
            assert bad[0].bad["value"] == value
            assert bad[0].bad["error_class"] in _CLASSES
            assert bad[0].bad["reason"]
        elif found and value is not None and not is_tombstone and table.source_tables:
            assert table_of(parse(value)) in (None, *table.source_tables), value
        if not is_tombstone:
            alone = decode(name, _keyed([message]), table)
            assert [_outcome(d) for d in alone] == [_outcome(d) for d in found], value


def table_of(parent: Any, *fields: str) -> str | None:
    """The name that a part of a message gives its table: its fields, the table's own last, joined by dots."""
    parts = [parent.get(field) for field in fields] if isinstance(parent, dict) else [None]
    texts = [part if isinstance(part, str) else "" for part in parts]
    return ".".join(filter(None, texts)) if texts[-1] else None


def _keyed(messages: Sequence[Message]) -> pa.RecordBatch:
    keys = pa.array([key for key, _ in messages], RAW_SCHEMA.field("key").type)
    without = records([value for _, value in messages])
    return without.set_column(RAW_SCHEMA.get_field_index("key"), RAW_SCHEMA.field("key"), keys)


def _by_offset(found: Sequence[Decoded]) -> dict[int, list[Decoded]]:
    result: dict[int, list[Decoded]] = {}
    for decoded in found:
        assert decoded.offset is not None
        result.setdefault(decoded.offset, []).append(decoded)
    return result


def _outcome(decoded: Decoded) -> tuple[Any, ...]:
    """What must not depend on the records around it. `repr`, since a NaN equals nothing."""
    return decoded.kind, None if decoded.bad else decoded.half, repr(decoded.row), bool(decoded.bad)
