"""Writes one Parquet file: Arrow tables in, the file and its Iceberg column metrics out."""

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyiceberg.conversions import to_bytes
from pyiceberg.io.pyarrow import (
    MetricModeTypes,
    MetricsMode,
    StatisticsCollector,
    compute_statistics_plan,
    data_file_statistics_from_parquet_metadata,
    parquet_path_to_id_mapping,
)
from pyiceberg.schema import Schema
from pyiceberg.types import DateType, DoubleType, FloatType, TimestampType, TimestamptzType, TimeType, UUIDType

from deltawriters.content import Metrics
from deltawriters.table import TableSpec

COMPRESSION = "write.parquet.compression-codec"
COMPRESSION_LEVEL = "write.parquet.compression-level"
_TIMES = (DateType, TimeType, TimestampType, TimestamptzType)
_SAMPLE_ROWS = 4096
_DICTIONARY_PAYS_BELOW = 0.5  # distinct values per row of a row group
_DICTIONARY_BYTES = 2 * 1024 * 1024
"""A column chunk gives up its dictionary at this size. Iceberg's Java writer has the same limit."""
_LASTING_LEVEL, _QUICK_LEVEL = "3", "1"
"""Levels of zstd. Spark's writer uses level 3. On changelog rows, files of level 3 are up to a fifth smaller than files
of level 1, and take up to 1.15x of the time to write.
"""
_MAX_INFERRED_METRICS = "write.metadata.metrics.max-inferred-column-defaults"
_MAX_INFERRED_METRICS_DEFAULT = 100


class ParquetFileWriter:
    """Writes the file `path`. Each `write` makes one row group, so callers buffer rows first.

    :param schema: the Iceberg schema of the file's columns.
    :param arrow_schema: the same schema in Arrow, with field ids.
    :param lasting: the file will probably live for long, so it is packed well. Other files are merged soon, so they are
        packed fast.
    """

    def __init__(
        self, table: TableSpec, path: str, schema: Schema, arrow_schema: pa.Schema, *, lasting: bool = False
    ) -> None:
        self.path = path
        self._lasting = lasting
        self.rows = 0
        self._table = table
        self._schema = schema
        self._arrow_schema = arrow_schema
        self._nans: dict[int, int] = {}
        self._stream = table.io.new_output(path).create(overwrite=True)
        self._writer: pq.ParquetWriter | None = None

    def write(self, rows: pa.Table) -> None:
        """Append `rows` as one row group."""
        if self._writer is None:
            self._writer = self._open(rows)
        self._writer.write_table(rows, row_group_size=max(1, rows.num_rows))
        self.rows += rows.num_rows
        for field in self._schema.fields:
            if isinstance(field.field_type, FloatType | DoubleType):
                nans = pc.sum(pc.is_nan(rows.column(field.name))).as_py() or 0
                self._nans[field.field_id] = self._nans.get(field.field_id, 0) + nans

    def size(self) -> int:
        """Bytes written so far. The file system may still buffer the last column chunk."""
        return int(self._stream.tell())

    def close(self) -> tuple[int, Metrics]:
        """Finish the file. Returns its size in bytes and its column metrics."""
        if self._writer is None:
            self._writer = self._open(self._arrow_schema.empty_table())
        self._writer.close()
        size = self.size()
        self._stream.close()
        return size, self._metrics(self._writer.writer.metadata)

    def abort(self) -> None:
        """Close the file without finishing it. The caller deletes it."""
        if self._writer is not None:
            try:
                self._writer.close()
            except (OSError, pa.ArrowException):
                self._writer.is_open = False  # otherwise the writer's destructor would try to close again
        with contextlib.suppress(OSError, pa.ArrowException):
            self._stream.close()

    def _open(self, first: pa.Table) -> pq.ParquetWriter:
        properties = self._table.properties_by_name
        codec = properties.get(COMPRESSION, "zstd")
        level = properties.get(COMPRESSION_LEVEL)
        if codec == "zstd" and level is None:
            level = _LASTING_LEVEL if self._lasting else _QUICK_LEVEL
        return pq.ParquetWriter(
            self._stream,
            self._arrow_schema,
            compression="none" if codec == "uncompressed" else codec,
            compression_level=None if level is None else int(level),
            # We use no other encodings, because Iceberg's vectorized readers know DELTA_BINARY_PACKED only since 1.10.
            use_dictionary=_columns_with_repeats(first),
            dictionary_pagesize_limit=_DICTIONARY_BYTES,
            store_decimal_as_integer=True,
            store_schema=False,
        )

    def _metrics(self, footer: pq.FileMetaData) -> Metrics:
        plan = _metrics_plan(self._schema, self._table.properties_by_name)
        ids = parquet_path_to_id_mapping(self._schema)
        times = {
            i: column for i, column in plan.items() if isinstance(column.iceberg_type, _TIMES) and _has_bounds(column)
        }
        counted = {i: replace(column, mode=MetricsMode(MetricModeTypes.COUNTS)) for i, column in times.items()}
        stats = data_file_statistics_from_parquet_metadata(footer, plan | counted, ids)
        kept = {i for i, column in plan.items() if column.mode.type is not MetricModeTypes.NONE}
        # Parquet compares UUIDs as unsigned bytes, but Iceberg's Java library up to 1.11 compares them as signed longs.
        # With Parquet's bounds, a Java reader would skip an equality delete that applies.
        unordered = {f.field_id for f in self._schema.fields if isinstance(f.field_type, UUIDType)}
        bounded = {i: agg for i, agg in stats.column_aggregates.items() if i not in unordered}
        lower = {i: bound for i, agg in bounded.items() if (bound := agg.min_as_bytes()) is not None}
        upper = {i: bound for i, agg in bounded.items() if (bound := agg.max_as_bytes()) is not None}
        for i, (least, greatest) in _raw_bounds(footer, ids, times).items():
            lower[i], upper[i] = (to_bytes(times[i].iceberg_type, bound) for bound in (least, greatest))
        return Metrics(
            column_sizes=stats.column_sizes,
            value_counts=stats.value_counts,
            null_value_counts=stats.null_value_counts,
            nan_value_counts={i: n for i, n in self._nans.items() if i in kept},
            lower_bounds=lower,
            upper_bounds=upper,
            split_offsets=tuple(stats.split_offsets),
        )


def _has_bounds(column: StatisticsCollector) -> bool:
    return column.mode.type not in (MetricModeTypes.NONE, MetricModeTypes.COUNTS)


def _raw_bounds(
    footer: pq.FileMetaData, ids: Mapping[str, int], columns: Collection[int]
) -> dict[int, tuple[int, int]]:
    """Least and greatest value of columns that are stored as integers, by field id. A column of nulls has no bounds.

    PyIceberg's own bounds go through Python's dates and times, which know only the years 1 to 9999.

    :param ids: field id by Parquet path.
    :param columns: field ids of the columns to look at.
    """
    bounds: dict[int, tuple[int, int]] = {}
    for position in range(footer.num_columns):
        i = ids[footer.schema.column(position).path]
        if i not in columns:
            continue
        for group in range(footer.num_row_groups):
            found = footer.row_group(group).column(position).statistics
            if found is not None and found.has_min_max:
                least, greatest = bounds.get(i, (found.min_raw, found.max_raw))
                bounds[i] = min(least, found.min_raw), max(greatest, found.max_raw)
    return bounds


def _metrics_plan(schema: Schema, properties: Mapping[str, str]) -> dict[int, StatisticsCollector]:
    """PyIceberg's plan, with the limit that Iceberg's Java library has: columns after the first 100 get no metrics,
    unless a property sets a mode for them.
    """
    plan = compute_statistics_plan(schema, dict(properties))
    limit = int(properties.get(_MAX_INFERRED_METRICS, _MAX_INFERRED_METRICS_DEFAULT))
    if len(plan) <= limit or "write.metadata.metrics.default" in properties:
        return plan
    unlimited = compute_statistics_plan(schema, {"write.metadata.metrics.default": "none"} | dict(properties))
    return {i: plan[i] if position < limit else unlimited[i] for position, i in enumerate(plan)}


def _columns_with_repeats(rows: pa.Table) -> Sequence[str] | bool:
    """Columns for which a dictionary pays in a row group like `rows`.

    If values hardly repeat, a dictionary costs time and bytes and saves nothing. The same is true of a dictionary that
    the writer gives up half-way. But a text that repeats every 20,000 rows takes a fifth of the bytes with one.

    A small sample decides. Let d be the largest number of distinct values with which a dictionary pays. If the row
    group had d values, all equally frequent, the sample would have a certain number of distinct values. A column is
    chosen if its sample has at most that many.
    """
    count = rows.num_rows
    sampled = min(count, _SAMPLE_ROWS)
    if not count:
        return False
    numbers = pa.array(np.linspace(0, count - 1, sampled).astype(np.int64))
    chosen = []
    for name, column in zip(rows.column_names, rows.columns, strict=True):
        if pa.types.is_nested(column.type) or isinstance(column.type, pa.BaseExtensionType):
            continue
        sample = column.take(numbers)
        bytes_per_value = max(1.0, sample.nbytes / sampled)
        paying = min(_DICTIONARY_PAYS_BELOW * count, _DICTIONARY_BYTES / bytes_per_value)
        if pc.count_distinct(sample, mode="all").as_py() <= -paying * np.expm1(-sampled / paying):
            chosen.append(name)
    return chosen or False
