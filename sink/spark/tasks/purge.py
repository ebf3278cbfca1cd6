"""Tasks that make changes of rows that are to be removed: each removes its row.

A removal of a row that was marked as deleted long ago is marked like one of a row that went to another key
(`_rowdelta_moved`): it names the columns of `SoftDelete`. So it leaves a row alone that isn't deleted any more, or was
deleted again.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_type

from changelog.decoding import decoded_schema
from changelog.order_values import encoded
from changelog.rows import KIND, MOVED, MOVED_SEPARATOR, PREFIX, RowKind, order_column
from sink.spark.tasks.worker import forget_archives
from sink.table.table_plan import TablePlan


@dataclass(frozen=True)
class Removals:
    """:param schema: of the changelog rows, after computed columns are computed.
    :param marks: see `SoftDelete.columns`. Empty if the rows are removed whatever they are.
    :param order: number in `order_by` -> the table's column with the order value, if late changes are told by it.
    :param descending: those of these columns whose smaller values are the later ones.
    """

    schema: pa.Schema
    marks: tuple[str, ...]
    order: Mapping[int, str]
    descending: frozenset[str]

    @classmethod
    def of(cls, plan: TablePlan, marks: tuple[str, ...]) -> "Removals":
        spec = plan.changelog
        fields = [field for field in decoded_schema(spec) if field.name.startswith(PREFIX)]
        fields += [pa.field(c.name, pa.binary() if c.is_uuid else to_arrow_type(c.type)) for c in plan.columns]
        names = () if plan.late is None else plan.late.columns.columns
        descending = frozenset() if plan.late is None else plan.late.columns.descending
        return cls(pa.schema(fields), marks, dict(enumerate(names)), descending)

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """:param batches: the key columns of rows, `marks`, the columns of `order`, and what else a removal has."""
        for batch in batches:
            rows = dict(zip(batch.schema.names, batch.columns, strict=True))
            columns = {field.name: pa.nulls(len(batch), field.type) for field in self.schema} | rows
            columns[KIND] = pa.repeat(pa.scalar(int(RowKind.DELETE), pa.int8()), len(batch))
            if self.marks:
                columns[MOVED] = pa.repeat(MOVED_SEPARATOR.join(self.marks), len(batch))
            for number, name in self.order.items():
                values = rows[name]
                columns[order_column(number)] = encoded(values, descending=True) if name in self.descending else values
            arrays = [columns[field.name].cast(field.type) for field in self.schema]
            yield pa.RecordBatch.from_arrays(arrays, schema=self.schema)
        forget_archives()
