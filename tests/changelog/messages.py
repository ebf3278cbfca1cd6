"""Messages in, changelog rows out: what the tests of the wire formats have in common.

`samples/` holds real Debezium messages of a Postgres database (a selection; `../shared/samples` says how they were made):
`pgj` plain JSON, `pgenv` with the schema envelope, `pgnull` with `replace.null.with.default=false`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from changelog.decoding import RAW_COLUMNS, ChangelogSpec, ColumnSpec, Decoder, quoted
from changelog.rows import BAD, KIND, RowKind, order_column

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


def raw_records(spark: SparkSession, records: Sequence[Message]) -> DataFrame:
    schema = T.StructType([T.StructField(name, T.DataType.fromDDL(dtype)) for name, dtype in RAW_COLUMNS.items()])
    rows: list[tuple[Any, ...]] = [m.raw() for m in records]
    return spark.createDataFrame(rows, schema).coalesce(1)


def spec(columns: Mapping[str, str], key: Sequence[str] = ("id",), **options: Any) -> ChangelogSpec:
    """What a format knows of a table with `columns` (name -> Spark SQL type, or `uuid`)."""
    specs = [
        ColumnSpec(name, T.DataType.fromDDL("binary" if sql_type == "uuid" else sql_type), is_uuid=sql_type == "uuid")
        for name, sql_type in columns.items()
    ]
    return ChangelogSpec(tuple(specs), tuple(key), **options)


@dataclass(frozen=True)
class Decoded:
    """One changelog row. `offset` and `half` are what orders it: -U before +U of one message; bad records need no order.

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
    decoder: Callable[[ChangelogSpec], Decoder],
    records: DataFrame,
    table: ChangelogSpec,
    read: Mapping[str, Callable[[Column], Column]] | None = None,
) -> list[Decoded]:
    """Changelog rows in order.

    :param read: how to read columns whose values Python can't represent.
    """
    names = [column.name for column in table.columns]
    order = order_column(len(table.order_by) + 1)
    frame = decoder(table)(records)
    columns = {name: F.col(quoted(name)) for name in names}
    columns |= {name: function(columns[name]) for name, function in (read or {}).items()}
    place = [F.col(order).alias("place")] if table.source_order else [F.lit(None).cast("bigint").alias("place")]
    found = frame.select(KIND, BAD, *place, *(c.alias(name) for name, c in columns.items())).toArrow().to_pylist()
    rows = [
        Decoded(
            kind=RowKind(r[KIND]).short,
            offset=r[BAD]["offset"] if r[BAD] else None if r["place"] is None else r["place"] // 2,
            half=None if r["place"] is None else r["place"] % 2,
            row={name: r[name] for name in names},
            bad=r[BAD],
        )
        for r in found
    ]
    return sorted(rows, key=lambda r: (-1 if r.offset is None else r.offset, -1 if r.half is None else r.half))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
