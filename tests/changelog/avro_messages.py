"""Avro messages in, changes out: what the tests of the Avro formats have in common.

`samples/pga.jsonl` holds real messages of Debezium (base64), `samples/pga-schemas.json` their schemas by id. No
registry is needed for them: the formats take schemas from whoever has some. `test_schema_registry` has a real one.
"""

import base64
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
from pyspark.sql import types as T

from changelog.changes import RAW_SCHEMA, Changes, Format, Rejected
from changelog.formats.debezium_avro import DebeziumAvro
from changelog.parse.avro_schema import Node, SchemaError, parse
from changelog.rows import RowKind
from changelog.spec import ChangelogSpec, ColumnSpec

SAMPLES = Path(__file__).parent / "samples"

Pair = tuple[bytes | None, bytes | None]
"""Key and value of a message."""


class Known:
    """Schemas by id."""

    def __init__(self, texts: Mapping[int, str]) -> None:
        self._nodes = {schema_id: parse(text) for schema_id, text in texts.items()}

    def get(self, schema_id: int) -> Node:
        if schema_id not in self._nodes:
            raise SchemaError(f"schema id {schema_id} is unknown")
        return self._nodes[schema_id]


@cache
def sample_schemas() -> dict[int, str]:
    found = json.loads((SAMPLES / "pga-schemas.json").read_text(encoding="utf-8"))
    return {int(schema_id): json.dumps(schema) for schema_id, schema in found.items()}


def sample(table: str) -> list[Pair]:
    """The real messages of one table (or of `transaction`, `message`), in order."""
    lines = (SAMPLES / "pga.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    return [
        (_bytes(message["key"]), _bytes(message["value"]))
        for message in found
        if message["topic"].rsplit(".", 1)[1] == table
    ]


def message(schema_id: int, schema: Any, value: Any) -> bytes:
    """A value in Confluent's wire format, written by fastavro."""
    buffer = io.BytesIO()
    fastavro.schemaless_writer(buffer, fastavro.parse_schema(schema), value)
    return b"\0" + schema_id.to_bytes(4, "big") + buffer.getvalue()


def spec(columns: Iterable[str], key: Sequence[str] = ("id",), **options: Any) -> ChangelogSpec:
    """A table with these columns. Their types don't matter here: formats leave values as they are."""
    return ChangelogSpec(tuple(ColumnSpec(name, T.StringType()) for name in columns), tuple(key), **options)


def batch(messages: Iterable[Pair]) -> pa.RecordBatch:
    pairs = list(messages)
    columns: dict[str, list[Any]] = {
        "source": ["topic"] * len(pairs),
        "partition": [0] * len(pairs),
        "offset": list(range(len(pairs))),
        "timestamp": [None] * len(pairs),
        "key": [key for key, _ in pairs],
        "value": [value for _, value in pairs],
    }
    return pa.RecordBatch.from_pydict(columns, schema=RAW_SCHEMA)


@dataclass(frozen=True)
class Change:
    """One change, with values as the message had them."""

    record: int
    kind: str
    row: dict[str, Any]
    order: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """The result for a batch. `changes` are in the order of records, -U before +U."""

    changes: list[Change]
    rejected: dict[int, str]
    raw: list[Changes | Rejected]

    @property
    def rows(self) -> list[tuple[int, str, dict[str, Any]]]:
        """The changes' records, kinds and rows, after making sure that nothing was rejected."""
        assert self.rejected == {}
        return [(change.record, change.kind, change.row) for change in self.changes]


def outcome(decoder: Format, messages: Sequence[Pair]) -> Outcome:
    """Each record's changes, or why it was rejected: both are checked to be whole. Debezium's removals are given with
    the columns that the writers always read; `tests.changelog.test_moves` is about the others.
    """
    table = decoder._spec if isinstance(decoder, DebeziumAvro) else None
    changes: list[tuple[int, Change]] = []
    rejected: dict[int, str] = {}
    raw = [found for found in decoder.changes(batch(messages)) if isinstance(found, Changes | Rejected)]
    for found in raw:
        if isinstance(found, Rejected):
            reasons = found.reason
            for i, record in enumerate(found.record.to_pylist()):
                reason = reasons if isinstance(reasons, str) else reasons[i].as_py()
                assert reason
                rejected.setdefault(record, f"{found.error_class}: {reason}")
            continue
        count = len(found.record)
        assert len(found.kind) == count
        for wire in (*found.fields.values(), *found.order):
            wire.values.validate(full=True)
            assert len(wire.values) == count
        after = [found.place] * count if isinstance(found.place, int) else found.place.to_pylist()
        columns = {name: wire.values.to_pylist() for name, wire in found.fields.items()}
        order = [wire.values.to_pylist() for wire in found.order]
        for i, record in enumerate(found.record.to_pylist()):
            row = {name: values[i] for name, values in columns.items()}
            kind = RowKind(found.kind[i].as_py()).short
            if table is not None and kind in ("-U", "-D"):
                row = {
                    c.field: row[c.field] for c in table.columns if c.field in row and c.name in table.kept_by_removals
                }
            changes.append((after[i], Change(record, kind, row, tuple(values[i] for values in order))))
    changes.sort(key=lambda pair: (pair[1].record, pair[0]))
    return Outcome([change for _, change in changes], rejected, raw)


def given(texts: Mapping[int, str]) -> Callable[[], Known]:
    known = Known(texts)
    return lambda: known


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else base64.b64decode(text)
