"""Rows that carry their kind, as JSON objects with a field `row_kind`, or as typed columns of Parquet files
(`changelog.formats.row_kind_parquet`).

    {"row_kind": "+U", "seq": 7, "id": 1, "customer": "Ada", "amount": 12.50, "created_at": "2026-01-02T03:04:05Z"}

| kind | spellings                                                              |
|------|------------------------------------------------------------------------|
| +I   | `+I`, `INSERT`, 3                                                      |
| -U   | `-U`, `UPDATE_BEFORE`                                                  |
| +U   | `+U`, `UPDATE_AFTER`, 2 (Spark's row operation UPDATE, here an upsert) |
| -D   | `-D`, `DELETE`, 1                                                      |

`format_options` may name another field and all its values: `{column: op, insert: [I, c], update: [U],
update_before: [], delete: [D]}`. A -U and a -D carry the whole old row.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import to_arrow_type

from changelog.changes import COLUMNS, Changes, Format, Rejected, Wire, WireType
from changelog.formats.row_images import TEXT, at_field, bytes_type, each, rejected, text
from changelog.message_keys import MessageKeys
from changelog.parse.json_records import JsonReader, Leaf, Object, Parsed
from changelog.paths import at_path, with_path
from changelog.rows import BadRecord, RowKind
from changelog.shown_values import shown_texts
from changelog.source_tables import Found
from changelog.spec import ChangelogSpec, ColumnSpec
from changelog.values import json_candidates

_ROW_OPERATIONS = {"1": RowKind.DELETE, "2": RowKind.UPDATE_AFTER, "3": RowKind.INSERT}
_MAPPED = {
    "insert": RowKind.INSERT,
    "update": RowKind.UPDATE_AFTER,
    "update_before": RowKind.UPDATE_BEFORE,
    "delete": RowKind.DELETE,
}


@dataclass(frozen=True)
class Kinds:
    """How rows carry their kind.

    :param column: name of the field that has the kind.
    :param meanings: value of that field -> kind.
    :param expected: the values to name in messages for people.
    """

    column: str
    meanings: Mapping[str, RowKind]
    expected: str

    @classmethod
    def of(cls, options: Mapping[str, str | tuple[str, ...]]) -> "Kinds":
        """The kinds that `format_options` define; the usual spellings if the options map no value."""
        column = str(options.get("column", "row_kind"))
        mapped: dict[str, RowKind] = {}
        for name, kind in _MAPPED.items():
            values = options.get(name, ())
            mapped |= dict.fromkeys((values,) if isinstance(values, str) else values, kind)
        if mapped:
            return cls(column, mapped, ", ".join(mapped))
        ours = {spelling: kind for kind in RowKind for spelling in (kind.short, kind.name)}
        return cls(column, ours | _ROW_OPERATIONS, "+I, -U, +U, -D")

    def meant(self, op: pa.Array) -> pa.Array:
        """The `RowKind` that each text means (int8). It is null where the text has no meaning."""
        places = pc.index_in(op, value_set=pa.array(list(self.meanings), pa.string()))
        return pa.array([int(kind) for kind in self.meanings.values()], pa.int8()).take(places)


class RowKindRows(Format):
    """Decodes rows."""

    OPTIONS: Mapping[str, tuple[str, ...]] = {
        "column": (),
        "column_type": ("string", "integer"),  # for Parquet files: Spark reads the column as this type
        **dict.fromkeys(_MAPPED, ()),
    }
    DELETES_CARRY_ROW = True
    STATES_KEY = True

    def __init__(self, spec: ChangelogSpec) -> None:
        super().__init__(spec)
        self._kinds = Kinds.of(spec.options)
        self._message_keys = MessageKeys()
        fields: dict[str, Leaf | Object] = {}
        for column in spec.columns:
            candidates = json_candidates(WireType(), to_arrow_type(column.type), column.is_uuid)
            fields[column.field] = Leaf(candidates)
        shape = with_path(fields, self._kinds.column, TEXT)
        for name, dtype in spec.order_fields:
            shape = with_path(shape, name, Leaf(json_candidates(WireType(), to_arrow_type(dtype))))
        self._reader = JsonReader(Object(shape, watched=spec.schema_changes != "ignore"))

    def changes(self, records: pa.RecordBatch) -> Iterator[Found]:
        if COLUMNS in records.schema.names:
            numbers = pa.array(np.arange(len(records)))
            yield from self._changes(Parsed(numbers, records.column(COLUMNS)), _field, lambda _: WireType())
            return
        if not self._spec.inserts_only:
            yield from self._message_keys.stated(records)
        yield from each(self._reader, records, lambda _, found: self._changes(found, _leaf, bytes_type))

    def _changes(
        self,
        found: Parsed,
        leaf: Callable[[pa.StructArray, str], pa.Array],
        wire_type: Callable[[ColumnSpec], WireType],
    ) -> Iterator[Changes | Rejected]:
        """:param leaf: the values of the field that has the kind, or of one in `order_by`.
        :param wire_type: what is known of a column's values.
        """
        record, rows = found.record, found.values
        op = text(leaf(rows, self._kinds.column))
        kind = self._kinds.meant(op)
        if kind.null_count:
            shown = pc.fill_null(shown_texts(op, visible=self._spec.show_values), "missing")
            expected = f"; expected one of {self._kinds.expected}"
            reasons = pc.binary_join_element_wise(f"{self._kinds.column} is ", shown, expected, "")
            yield from rejected(record, kind.is_null(), BadRecord.UNKNOWN_OPERATION, reasons)
            known = kind.is_valid()
            record, rows, kind, op = record.filter(known), rows.filter(known), kind.filter(known), op.filter(known)
        yield Changes(
            record=record,
            kind=kind,
            fields={c.field: Wire(_field(rows, c.field), wire_type(c)) for c in self._spec.columns},
            order=[Wire(leaf(rows, name)) for name, _ in self._spec.order_fields],
            unknown=found.unknown,
            metadata={"_op": op},
        )


def _field(rows: pa.StructArray, name: str) -> pa.Array:
    return at_field(rows, name) if rows.type.get_field_index(name) >= 0 else pa.nulls(len(rows))


def _leaf(rows: pa.StructArray, path: str) -> pa.Array:
    found = at_path(rows, path)
    return pa.nulls(len(rows)) if found is None else found
