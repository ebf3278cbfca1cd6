"""Messages in, changelog rows out: what the tests of the wire formats have in common.

`samples/` holds real Debezium messages of a Postgres database (a selection; `../shared/samples` says how they were
made): `pgj` plain JSON, `pgenv` with the schema envelope, `pgnull` with `replace.null.with.default=false`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import types as T

from changelog.changes import RAW_SCHEMA
from changelog.decoding import CHANGES_PER_RECORD, ChangelogDecoder
from changelog.moves import bared
from changelog.rows import BAD, KIND, MOVED, RowKind, order_column
from changelog.spec import ChangelogSpec, ColumnSpec

SAMPLES = Path(__file__).parent / "samples"


@dataclass(frozen=True)
class Message:
    """A Kafka message. `value` is None for a tombstone, text as it is, anything else as JSON."""

    value: Any
    offset: int
    key: Any = None
    partition: int = 0
    topic: str = "topic"

    def raw(self) -> tuple[str, int, int, bytes | None, str | None]:
        key = None if self.key is None else _json(self.key).encode()
        value = self.value if self.value is None or isinstance(self.value, str) else _json(self.value)
        return self.topic, self.partition, self.offset, key, value


def sample(server: str, table: str) -> list[Message]:
    """The real messages of one table (or of `transaction`, `message`), in order."""
    lines = (SAMPLES / f"{server}.jsonl").read_text(encoding="utf-8").splitlines()
    found = [Message(**json.loads(line)) for line in lines]
    return [m for m in found if m.topic.rsplit(".", 1)[1] == table]


def messages(*values: Any) -> list[Message]:
    """Messages of one partition with offsets from 0."""
    return [Message(value, offset) for offset, value in enumerate(values)]


def raw_records(records: Sequence[Message]) -> pa.RecordBatch:
    """Messages as `changelog.changes.RAW_SCHEMA`."""
    columns: dict[str, list[Any]] = {name: [] for name in RAW_SCHEMA.names}
    for message in records:
        topic, partition, offset, key, value = message.raw()
        parts = {
            "source": topic,
            "partition": partition,
            "offset": offset,
            "key": key,
            "value": value,
            "timestamp": None,
        }
        for name, values in columns.items():
            values.append(parts[name])
    return pa.RecordBatch.from_pydict(columns, schema=RAW_SCHEMA)


def sql(text: str) -> T.DataType:
    """A Spark SQL type; Spark's own parser needs a JVM."""
    if match := re.fullmatch(r"decimal\((\d+),(\d+)\)", text):
        return T.DecimalType(int(match[1]), int(match[2]))
    if match := re.fullmatch(r"array<(.*)>", text):
        return T.ArrayType(sql(match[1]))
    if match := re.fullmatch(r"map<string,(.*)>", text):
        return T.MapType(T.StringType(), sql(match[1]))
    if match := re.fullmatch(r"struct<(.*)>", text):
        fields = (part.split(":", 1) for part in re.split(r",(?![^(<]*[)>])", match[1]))
        return T.StructType([T.StructField(name, sql(dtype)) for name, dtype in fields])
    names: dict[str, T.DataType] = {
        "bigint": T.LongType(),
        "int": T.IntegerType(),
        "smallint": T.ShortType(),
        "tinyint": T.ByteType(),
    }
    names |= {"float": T.FloatType(), "double": T.DoubleType(), "boolean": T.BooleanType(), "date": T.DateType()}
    names |= {"timestamp": T.TimestampType(), "timestamp_ntz": T.TimestampNTZType()}
    return (names | {"string": T.StringType(), "binary": T.BinaryType()})[text]


def spec(columns: Mapping[str, str], key: Sequence[str] = ("id",), **options: Any) -> ChangelogSpec:
    """What a format knows of a table with `columns` (name -> Spark SQL type, or `uuid`)."""
    specs = [
        ColumnSpec(name, sql("string" if sql_type == "uuid" else sql_type), is_uuid=sql_type == "uuid")
        for name, sql_type in columns.items()
    ]
    return ChangelogSpec(tuple(specs), tuple(key), **options)


@dataclass(frozen=True)
class Decoded:
    """One changelog row. `offset` and `half` are what orders it: -U before +U of one message; bad records need no
    order.

    :param row: the table's columns.
    :param bad: fields of `_rowdelta_bad`, or None.
    """

    kind: str
    offset: int | None
    half: int | None
    row: dict[str, Any]
    bad: dict[str, Any] | None

    @property
    def error(self) -> str | None:
        """Error class and reason, or None for a good row."""
        return None if self.bad is None else f"{self.bad['error_class']}: {self.bad['reason']}"


def decode(
    name: str, records: pa.RecordBatch, table: ChangelogSpec, read: Mapping[str, pa.DataType] | None = None
) -> list[Decoded]:
    """Changelog rows in order, as the format `name` decodes them.

    :param read: types to see columns as, whose values Python can't represent.
    """
    (rows,) = ChangelogDecoder(name, table)([records])
    rows.validate(full=True)
    return in_order(rows, table, read or {})


def in_order(rows: pa.RecordBatch, table: ChangelogSpec, read: Mapping[str, pa.DataType]) -> list[Decoded]:
    """Decoded rows by their place in the source. Removals are as the writers take them if they aren't about a row that
    went to another key (`tests.changelog.test_moves`).
    """
    if MOVED in rows.schema.names:
        unmarked = rows.set_column(rows.schema.get_field_index(MOVED), MOVED, pa.nulls(len(rows), pa.string()))
        rows = bared(pa.Table.from_batches([unmarked]), table).combine_chunks().to_batches()[0] if len(rows) else rows
    names = [column.name for column in table.columns]
    order = order_column(len(table.order_by) + 1)
    values = {name: rows.column(name) for name in names}
    values |= {name: values[name].cast(dtype) for name, dtype in read.items()}
    places = rows.column(order).to_pylist() if table.source_order else [None] * rows.num_rows
    images = pa.RecordBatch.from_pydict(values).to_pylist()
    found = [
        Decoded(
            kind=RowKind(kind).short,
            offset=bad["offset"] if bad else None if place is None else place // CHANGES_PER_RECORD,
            half=None if place is None else place % CHANGES_PER_RECORD,
            row=image,
            bad=bad,
        )
        for kind, bad, place, image in zip(
            rows.column(KIND).to_pylist(), rows.column(BAD).to_pylist(), places, images, strict=True
        )
    ]
    return sorted(found, key=lambda r: (-1 if r.offset is None else r.offset, -1 if r.half is None else r.half))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
