"""Random changes and damaged messages: what the tests of every wire format do with them.

`histories` are random changes of a table, which a format's test encodes as its tool does; `assert_decoded` says what
must come out. `damaged` messages are ones that no tool sends; `assert_accounted` says that each ends as a change or a
bad record, and none is lost.
"""

import datetime as dt
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import pyarrow as pa
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


def damaged(examples: Sequence[Any]) -> st.SearchStrategy[list[bytes | None]]:
    """Batches of whole, changed, cut and random messages; None is a tombstone."""
    good = st.sampled_from([text(example) for example in examples])
    any_one: st.SearchStrategy[bytes | None] = st.one_of(
        good,
        good,
        _mutated(examples),
        _mutated(examples),
        _mutated(examples),
        _truncated(examples),
        _flipped(examples),
        st.binary(max_size=20),
        st.sampled_from(_SPECIAL),
        st.none(),
    )
    return st.lists(any_one, min_size=1, max_size=24)


_CLASSES = {TRUNCATE} | {value for name, value in vars(BadRecord).items() if name.isupper()}


def assert_accounted(
    name: str,
    values: Sequence[bytes | None],
    table: ChangelogSpec,
    is_ignored: Callable[[Any], bool],
    *,
    ignores_tombstones: bool = True,
    parse: Callable[[bytes], Any] = json.loads,
) -> None:
    """Each value ends as changes or as a bad record with this value, and the same happens if it is alone.

    :param is_ignored: whether a message that can be parsed should leave no trace.
    """
    together = _by_offset(decode(name, records(values), table))
    for offset, value in enumerate(values):
        found = together.get(offset, [])
        bad = [d for d in found if d.bad]
        if value is None:
            assert bool(found) != ignores_tombstones
        elif not found:
            assert is_ignored(parse(value)), value
        elif bad:
            assert len(found) == 1
            assert bad[0].bad is not None
            assert bad[0].bad["value"] == value
            assert bad[0].bad["error_class"] in _CLASSES
            assert bad[0].bad["reason"]
        if value is not None:
            alone = decode(name, records([value]), table)
            assert [_outcome(d) for d in alone] == [_outcome(d) for d in found], value


def _by_offset(found: Sequence[Decoded]) -> dict[int, list[Decoded]]:
    result: dict[int, list[Decoded]] = {}
    for decoded in found:
        assert decoded.offset is not None
        result.setdefault(decoded.offset, []).append(decoded)
    return result


def _outcome(decoded: Decoded) -> tuple[Any, ...]:
    """What must not depend on the records around it. `repr`, since a NaN equals nothing."""
    return decoded.kind, None if decoded.bad else decoded.half, repr(decoded.row), bool(decoded.bad)
