"""Damaged Debezium JSON, in all forms of the format: each message ends as a change or a bad record, whatever its
neighbours are.
"""

import json
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from changelog.changes import Changes, Rejected
from changelog.formats import debezium_json
from changelog.parse.json_records import Parsed
from changelog.spec import ChangelogSpec
from tests.changelog import fuzz
from tests.changelog.messages import decode, spec

ROW = {
    "id": 1,
    "region": "eu",
    "name": "Ada",
    "amount": "BNI=",
    "ok": True,
    "at": 1767323045000000,
    "day": 20455,
    "ratio": 0.5,
    "data": "AQI=",
}
SOURCE = {"version": "3.4.0", "name": "shop", "ts_ms": 1767323045000, "lsn": 24023128}
SOURCE |= {"db": "shop", "schema": "public", "table": "orders"}

_CONNECT: dict[str, dict[str, Any]] = {
    "id": {"type": "int64"},
    "region": {"type": "string"},
    "name": {"type": "string"},
    "amount": {"type": "bytes", "name": "org.apache.kafka.connect.data.Decimal", "parameters": {"scale": "2"}},
    "ok": {"type": "boolean"},
    "at": {"type": "int64", "name": "io.debezium.time.MicroTimestamp"},
    "day": {"type": "int32", "name": "io.debezium.time.Date"},
    "ratio": {"type": "double"},
    "data": {"type": "bytes"},
}


def event(op: str, before: Any, after: Any) -> dict[str, Any]:
    """As Debezium orders the fields."""
    more = {"transaction": None, "op": op, "ts_ms": 1767323045123}
    return {"before": before, "after": after, "source": SOURCE, **more}


def enveloped(payload: Any) -> dict[str, Any]:
    row = [{"field": name, "optional": True, **dtype} for name, dtype in _CONNECT.items()]
    sides = [{"type": "struct", "fields": row, "optional": True, "field": side} for side in ("before", "after")]
    return {"schema": {"type": "struct", "fields": sides}, "payload": payload}


EVENTS = [
    event("c", None, ROW),
    event("u", {**ROW, "id": 2}, ROW),
    event("d", ROW, None),
    event("m", None, None),
    event("c", None, {**ROW, "source": {"version": "mine", "lsn": 7}, "more": [None, 1]}),
]
FLATTENED = [ROW, {**ROW, "__op": "u", "__deleted": "false"}, {**ROW, "__op": "d", "__deleted": "true"}]
SPELLINGS: Mapping[str, list[Any]] = {
    "plain": EVENTS,
    "envelope": [*map(enveloped, EVENTS[:3]), EVENTS[0]],
    "flattened": FLATTENED,
    "flattened in an envelope": [enveloped(ROW), *FLATTENED],
}


def is_ignored(value: Any) -> bool:
    payload = value.get("payload", value)
    return payload is None or (isinstance(payload, dict) and payload.get("op") == "m")


def table_of(value: Any) -> str | None:
    """Of flattened rows too, which may say where they come from."""
    payload = value.get("payload", value)
    source = payload.get("source") or {name: payload.get(f"__source_{name}") for name in ("db", "schema", "table")}
    return fuzz.table_of(source, "db", "schema", "table")


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("schema_changes", ["ignore", "evolve"])
def test_nothing_is_lost(spelling: str, schema_changes: str) -> None:
    flattened = spelling.startswith("flattened")
    options = {"flattened": "true"} if flattened else {}
    asked: Any = {"schema_changes": schema_changes, "options": options, "metadata": ("_op", "_ts")}
    tombstones: Literal["all", "keyed"] = "all" if flattened else "keyed"
    tables = st.sampled_from([(), ("shop.public.orders",)])

    @fuzz.much(60)
    @given(fuzz.damaged(SPELLINGS[spelling]), tables)
    def run(messages: list[fuzz.Message], source_tables: tuple[str, ...]) -> None:
        table = fuzz.table(trust_before=True, source_tables=source_tables, **asked)
        fuzz.assert_accounted("debezium-json", messages, table, is_ignored, tombstones=tombstones, table_of=table_of)

    run()


def test_messages_that_would_complete_each_other() -> None:
    """Each message is broken, but their texts joined together would be whole events."""
    good = fuzz.text(event("c", None, {"id": 5, "v": "good"}))
    values = [
        good,
        b'{"before":null,"after":{"id":1,"v":"a"}',
        b',"source":{"version":"1"},"op":"c"}',
        b'{"before":null,"after":{"id":1,"v":"a","source":{"version":"1"},"op":"c"}',
        b'{"before":null,"after":{"id":1,"v":"a"}},"source":{"version":"1"},"op":"c"}',
        b'{"before":null,"after":{"id":1,"v":"a"},"source":{"version":[{}',
        b'{}]},"op":"c"}',
        good + good,
        good + b"\n" + good,
        b'{,"source":{"version":"1"},"op":"m"}',
        b'{"before":{"id":9,"v":"},"source":{"version":"1"},"op":"d"}',
        b'{"},"source":{"version":"1"},"op":"d"}',
        good,
    ]
    for schema_changes in ("ignore", "evolve"):
        table = spec({"id": "bigint", "v": "string"}, schema_changes=schema_changes)
        for tried in (values, *([good, value] for value in values)):
            found = decode("debezium-json", fuzz.records(tried), table)
            assert [d.offset for d in found] == list(range(len(tried)))
            bad = [d.offset for d in found if d.bad]
            assert bad == [offset for offset, value in enumerate(tried) if value != good]
            assert {tuple(d.row.values()) for d in found if not d.bad} == {(5, "good")}


def test_a_column_that_looks_like_the_events_source() -> None:
    """`"source":{"version":` is where events of Debezium are split."""
    columns = {"id": "bigint", "source": "struct<version:string,lsn:bigint>", "v": "string"}
    rows = [{"id": n, "source": {"version": f"v{n}", "lsn": n}, "v": f"x{n}"} for n in range(40)]
    values = [fuzz.text(event("c", None, row)).replace(b": ", b":").replace(b", ", b",") for row in rows]
    values += [fuzz.text({"after": row, "op": "c"}).replace(b": ", b":").replace(b", ", b",") for row in rows]
    table = spec(columns, schema_changes="evolve")
    found = decode("debezium-json", fuzz.records(values), table)
    assert [(d.error, d.row) for d in found] == [(None, row) for row in [*rows, *rows]]


_KEYS = st.one_of(
    st.none(),
    st.integers(0, 9).map(lambda number: json.dumps({"id": number}).encode()),
    st.integers(0, 9).map(lambda number: json.dumps({"schema": None, "payload": {"id": number}}).encode()),
    st.integers(0, 9).map(lambda number: f"{number}".encode()),
    st.integers(0, 9).map(lambda number: f"Struct{{id={number}}}".encode()),
    st.sampled_from([b"", b"null", b"7", b'{"id":1', b'{"id":1}{"id":2}', b'{"id":"\\ud800"}', b"\xff", b"[" * 50_000]),
    st.sampled_from([fuzz.NOTHING, b"k7", b'"k7"', b"Struct{no=1}", b"Struct{id=", b'{"no":1}', b"\0\0\0\0\1\2"]),
    st.binary(max_size=6),
)
_REMOVALS = st.sampled_from(
    [
        fuzz.text(value)
        for value in ({"op": "d"}, {"op": None}, {"op": "d", "before": {"id": 3}}, event("c", None, {"id": 4}), {})
    ]
)


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.tuples(_KEYS, st.none() | st.just(fuzz.NOTHING) | _REMOVALS), min_size=1, max_size=12), st.booleans()
)
@example([(b'{"id":1}', b'{"op":"d"}'), (None, b'{"op":null}')], False)
@example([(b'{"id":1}', b'{"op":"d"}'), (None, b'{"op":"d"}')], False)
@example([(b'{"id":1}', None), (None, None)], True)
@example([(b"", b'{"op": "d"}'), (b"", None)], False)
@example([(b"\0\0\0\0\0", b'{"op": "d"}'), (b"\0\0\0\0\0", None)], False)
def test_deletes_by_key_are_those_of_their_own_message(
    pairs: list[tuple[bytes | None, bytes | None]], flattened: bool
) -> None:
    """A delete without a row, or a tombstone, has its message's key, whatever keys its neighbours have, or is a bad
    record. Only a tombstone without a key, or with one of other columns, says nothing.
    """
    table = spec({"id": "bigint"}, options={"flattened": str(flattened).lower()}, metadata=("_op",))

    def outcomes(chosen: list[tuple[bytes | None, bytes | None]]) -> list[list[tuple[Any, ...]]]:
        batch = fuzz.records([value for _, value in chosen])
        place = batch.schema.get_field_index("key")
        batch = batch.set_column(place, batch.schema.field(place), pa.array([key for key, _ in chosen], pa.binary()))
        found: list[list[tuple[Any, ...]]] = [[] for _ in chosen]
        for d in decode("debezium-json", batch, table):
            assert d.offset is not None
            found[d.offset].append((d.kind, d.row, d.bad and d.bad["error_class"]))
        return found

    together = outcomes(pairs)
    for number, ((key, value), found) in enumerate(zip(pairs, together, strict=True)):
        is_tombstone = value in (None, fuzz.NOTHING)
        if (
            is_tombstone
            and not flattened
            and number
            and pairs[number - 1][0] == key
            and json.loads(pairs[number - 1][1] or b"{}").get("op") == "d"
        ):
            is_applied = any(kind == "-D" and bad is None for kind, _, bad in together[number - 1])
            # a bad record before it tells of the row too; a key that can't be read may be told twice
            assert found == [] or (not is_applied and found == outcomes([(key, value)])[0])
            continue
        assert found == outcomes([(key, value)])[0]
        if is_tombstone and not flattened and not found:
            assert key in (None, fuzz.NOTHING, b"null", b'{"no":1}', b'{"schema": null, "payload": null}'), key
        else:
            assert len(found) == 1


# The two readers of plain events.

COLUMNS = {"id": "bigint", "v": "string", "n": "double"}
TABLE = spec(
    COLUMNS,
    schema_changes="evolve",
    trust_before=True,
    metadata=("_op", "_ts"),
    order_by=tuple((path, spec({"x": "bigint"}).columns[0].type) for path in ("source.lsn", "ts_ms")),
)

_VALUES = st.none() | st.integers(0, 3) | st.sampled_from(["a", "1", ',"source":{"version":', "\\", 'x","'])
_NESTED = _VALUES | st.fixed_dictionaries({"version": _VALUES}) | st.lists(_VALUES, max_size=2)
_ROWS = st.none() | st.dictionaries(
    st.sampled_from(["id", "v", "n", "new", "before", "after", "source", "op", "ts_ms"]), _NESTED
)
_ANY_ROW = st.fixed_dictionaries({"id": st.integers(0, 9), "v": st.none() | st.text(max_size=3)})
_OPS = st.sampled_from(["r", "c", "u", "d", "m", "t", None, 3])
_SOURCES = st.fixed_dictionaries({"version": st.just("1"), "lsn": st.none() | st.integers(0, 9)})


@st.composite
def _event(draw: st.DrawFn) -> bytes:
    """Mostly an event as Debezium writes it. Else its fields have another order, and some have other types or are
    missing.
    """
    rows = draw(st.sampled_from([_ANY_ROW, _ROWS]))
    fields: dict[str, Any] = {
        "before": draw(st.none() | rows),
        "after": draw(rows),
        "source": draw(_SOURCES),
        "op": draw(st.sampled_from("cud")),
        "ts_ms": draw(st.integers(0, 9)),
    }
    if draw(st.integers(0, 3)) == 0:
        fields["op"] = draw(_OPS)
        names = draw(st.permutations(sorted(fields)))
        fields = {name: fields[name] for name in names[: draw(st.integers(3, 5))]}
        if draw(st.booleans()):
            fields[draw(st.sampled_from(["source", "after", "ts_ms", "extra"]))] = draw(_NESTED)
    return json.dumps(fields, separators=(",", ":")).encode()


Outcome = tuple[list[tuple[Any, ...]], dict[int, str], set[str]]


def outcome(table: ChangelogSpec, values: list[bytes]) -> Outcome:
    """Changes with their values by record and half, error classes of rejected records, and names of new fields."""
    changes: list[tuple[Any, ...]] = []
    rejected: dict[int, str] = {}
    unknown: set[str] = set()
    for found in debezium_json.DebeziumJson(table).changes(fuzz.records(values)):
        if isinstance(found, Rejected):
            rejected |= dict.fromkeys(found.record.to_pylist(), found.error_class)
            continue
        if not isinstance(found, Changes):
            continue
        unknown |= set(found.unknown)
        parts = [found.record, found.kind, *(wire.values for wire in found.order), *found.metadata.values()]
        parts += [
            found.fields[name].values if name in found.fields else pa.nulls(len(found.record)) for name in COLUMNS
        ]
        # numbers that an odd record has come as text
        rows = zip(*([None if v is None else str(v) for v in part.to_pylist()] for part in parts), strict=True)
        changes += [(found.place, *row) for row in rows]
    return sorted(changes, key=repr), rejected, unknown


@settings(deadline=None, max_examples=300)
@given(st.lists(_event(), min_size=1, max_size=24))
@example([b'{"op":"c","before":null,"after":{"id":1},"source":{"version":"1","lsn":1},"ts_ms":1}'])
@example([b'{"before":null,"source":{"version":"1","lsn":1},"op":"c","ts_ms":1,"after":{"id":1}}'])
@example([b'{"before":null,"after":{"id":1},"ts_ms":4,"source":{"version":"1","lsn":1},"op":"c"}'])
def test_events_read_in_parts_are_those_read_whole(values: list[bytes]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(debezium_json._EventReader, "_in_parts", lambda self, texts: None)
        whole = outcome(TABLE, values)
    assert outcome(TABLE, values) == whole


def test_events_of_debezium_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this, the test before would compare the general reader with itself."""
    read: list[Parsed | None] = []
    in_parts = debezium_json._EventReader._in_parts

    def watched(self: Any, texts: pa.Array) -> Parsed | None:
        read.append(in_parts(self, texts))
        return read[-1]

    monkeypatch.setattr(debezium_json._EventReader, "_in_parts", watched)
    values = [json.dumps(event("c", None, {"id": n, "new": n}), separators=(",", ":")).encode() for n in range(50)]
    changes, rejected, unknown = outcome(TABLE, values)
    assert len(changes) == 50
    assert (rejected, unknown) == ({}, {"new"})
    assert len(read) == 1
    assert read[0] is not None
    np.testing.assert_array_equal(read[0].record, np.arange(50))
