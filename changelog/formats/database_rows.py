"""Rows that were read from the source's database, as typed columns (`COLUMNS`). They are decoded by the same code as
messages, so that a row in the table is the one that the database's connector would have made of it.

Nobody can choose this format in a configuration: who reads a database takes the table's `ChangelogSpec` and puts in its
`options` what the columns mean (`described`).
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Any

import numpy as np
import pyarrow as pa

from changelog.changes import COLUMNS, RAW_SCHEMA, Changes, Format, Wire, WireType
from changelog.rows import RowKind
from changelog.source_tables import Found
from changelog.spec import ChangelogSpec

NAME = "database-rows"
OPERATION = "r"
"""What `_op` has: Debezium's letter for what a snapshot has read."""
_TYPES, _ORDER = "types", "order"
_SIDES = ("after.", "before.")


def described(types: Mapping[str, WireType], order: Mapping[str, Any]) -> dict[str, str]:
    """Options of the format.

    :param types: name of each column of the database's table -> what messages say about it. Those that aren't read are
        there too.
    :param order: name in `order_by` that is no column -> its value in all rows: a number or a text.
    """
    return {
        _TYPES: json.dumps({name: asdict(wire) for name, wire in types.items()}),
        _ORDER: json.dumps(dict(order)),
    }


def column_of(name: str) -> str:
    """The column of which a name in `order_by` may be: a message has its row in `after`."""
    return next((name.removeprefix(side) for side in _SIDES if name.startswith(side)), name)


def read_records(columns: pa.StructArray, source: str, time: datetime) -> pa.RecordBatch:
    """Raw records (`RAW_SCHEMA`) whose rows are in `COLUMNS`. They have no place in the source: in an order by places
    they come first.

    :param source: the topic that has the table's changes.
    :param time: of the rows.
    """
    count = len(columns)
    known = {"source": pa.repeat(source, count), "timestamp": pa.repeat(pa.scalar(time, _TIME), count)}
    raw = [known.get(field.name, pa.nulls(count, field.type)) for field in RAW_SCHEMA]
    return pa.RecordBatch.from_arrays([*raw, columns], [*RAW_SCHEMA.names, COLUMNS])


_TIME = RAW_SCHEMA.field("timestamp").type


class DatabaseRows(Format):
    """Makes a +I of each row."""

    OPTIONS: Mapping[str, tuple[str, ...]] = {_TYPES: (), _ORDER: ()}
    REQUIRED = (_TYPES, _ORDER)

    def __init__(self, spec: ChangelogSpec) -> None:
        super().__init__(spec)
        types = json.loads(str(spec.options[_TYPES]))
        self._types = {name: _wire_type(described) for name, described in types.items()}
        self._order = json.loads(str(spec.options[_ORDER]))
        fields = {column.field for column in spec.columns}
        self._unknown = {name: wire for name, wire in self._types.items() if name not in fields}
        self._missing = sorted(fields.difference(self._types))

    def changes(self, records: pa.RecordBatch) -> Iterator[Found]:
        rows = records.column(COLUMNS)
        names = [field.name for field in rows.type]
        fields = {name: Wire(v, self._types[name]) for name, v in zip(names, rows.flatten(), strict=True)}
        count = len(records)
        metadata = {"_op": pa.repeat(OPERATION, count), "_ts": records.column("timestamp")}
        yield Changes(
            record=pa.array(np.arange(count)),
            kind=pa.repeat(pa.scalar(int(RowKind.INSERT), pa.int8()), count),
            fields=fields,
            order=[self._order_value(name, fields, count) for name, _ in self._spec.order_fields],
            snapshot=pa.repeat(True, count),
            unknown=self._unknown,
            metadata={name: values for name, values in metadata.items() if name in self._spec.read_metadata},
            missing=self._missing,
        )

    def _order_value(self, name: str, fields: Mapping[str, Wire], count: int) -> Wire:
        if name in self._order:
            return Wire(pa.repeat(pa.scalar(self._order[name]), count))
        return fields.get(column_of(name), Wire(pa.nulls(count)))


def _wire_type(described: Mapping[str, Any]) -> WireType:
    children = {name: _wire_type(child) for name, child in described["children"].items()}
    return WireType(**{**described, "children": children})
