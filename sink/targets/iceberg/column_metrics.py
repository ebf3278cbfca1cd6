"""Iceberg's column metrics of Parquet files."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import pyarrow.parquet as pq
from pyiceberg.conversions import to_bytes
from pyiceberg.io.pyarrow import (
    MetricModeTypes,
    MetricsMode,
    StatisticsCollector,
    StatsAggregator,
    compute_statistics_plan,
    data_file_statistics_from_parquet_metadata,
    parquet_path_to_id_mapping,
)
from pyiceberg.schema import Schema
from pyiceberg.types import DateType, DoubleType, FloatType, TimestampType, TimestamptzType, TimeType, UUIDType

from deltawriters.parquet import ParquetFacts

_TIMES = (DateType, TimeType, TimestampType, TimestamptzType)
_MAX_INFERRED_METRICS = "write.metadata.metrics.max-inferred-column-defaults"
_MAX_INFERRED_METRICS_DEFAULT = 100


@dataclass(frozen=True)
class Metrics:
    """Column metrics of one file by field id, as Iceberg stores them in manifests (spec, "Data File Fields").

    Bounds are single-value serialized (Appendix D), already truncated as the table's metrics mode asks.
    """

    column_sizes: Mapping[int, int]
    value_counts: Mapping[int, int]
    null_value_counts: Mapping[int, int]
    nan_value_counts: Mapping[int, int]
    lower_bounds: Mapping[int, bytes]
    upper_bounds: Mapping[int, bytes]
    split_offsets: tuple[int, ...] = ()


NO_METRICS = Metrics({}, {}, {}, {}, {}, {})


def metrics_of(facts: ParquetFacts, schema: Schema, properties: Mapping[str, str]) -> Metrics:
    """The metrics of a file's columns.

    :param schema: of the file.
    :param properties: of the table.
    """
    footer = facts.footer
    plan = _metrics_plan(schema, properties)
    ids = parquet_path_to_id_mapping(schema)
    times = {i: column for i, column in plan.items() if isinstance(column.iceberg_type, _TIMES) and _has_bounds(column)}
    counted = {i: replace(column, mode=MetricsMode(MetricModeTypes.COUNTS)) for i, column in times.items()}
    kept = {i for i, column in plan.items() if column.mode.type is not MetricModeTypes.NONE}
    # UUIDs have no bounds, and the footer doesn't know them (`deltawriters.parquet`)
    uuids = {f.field_id: f.name for f in schema.fields if isinstance(f.field_type, UUIDType) and f.field_id in kept}
    unknown = {i: replace(plan[i], mode=MetricsMode(MetricModeTypes.NONE)) for i in uuids}
    stats = data_file_statistics_from_parquet_metadata(footer, plan | counted | unknown, ids)
    without = _without_bounds(footer, ids, plan)
    bounded = {i: agg for i, agg in stats.column_aggregates.items() if i not in without}
    lower = {i: bound for i, agg in bounded.items() if (bound := agg.min_as_bytes()) is not None}
    upper = {i: bound for i, agg in bounded.items() if (bound := _upper(agg)) is not None}
    for i, (least, greatest) in _raw_bounds(footer, ids, times).items():
        lower[i], upper[i] = (to_bytes(times[i].iceberg_type, bound) for bound in (least, greatest))
    nans = ((field.field_id, facts.nan_counts.get((field.name,))) for field in schema.fields)
    return Metrics(
        column_sizes=stats.column_sizes,
        value_counts=stats.value_counts | dict.fromkeys(uuids, facts.rows),
        null_value_counts=stats.null_value_counts | {i: facts.null_counts[name,] for i, name in uuids.items()},
        nan_value_counts={i: n for i, n in nans if n is not None and i in kept},
        lower_bounds=lower,
        upper_bounds=upper,
        split_offsets=tuple(stats.split_offsets),
    )


def _has_bounds(column: StatisticsCollector) -> bool:
    return column.mode.type not in (MetricModeTypes.NONE, MetricModeTypes.COUNTS)


def _without_bounds(
    footer: pq.FileMetaData, ids: Mapping[str, int], columns: Mapping[int, StatisticsCollector]
) -> set[int]:
    """Field ids of columns with a row group that has values and no bounds. Arrow leaves these out if one of them is
    longer than 4096 bytes. PyIceberg would take those of the other row groups for the file's, and readers would skip
    rows. A row group of NaNs has no bounds either, but Iceberg's don't count NaN.

    :param ids: field id by Parquet path.
    """
    found = set[int]()
    for position in range(footer.num_columns):
        i = ids[footer.schema.column(position).path]
        if isinstance(columns[i].iceberg_type, FloatType | DoubleType):
            continue
        groups = (footer.row_group(group).column(position).statistics for group in range(footer.num_row_groups))
        if any(group is None or (group.num_values and not group.has_min_max) for group in groups):
            found.add(i)
    return found


def _upper(column: StatsAggregator) -> bytes | None:
    try:
        bound: bytes | None = column.max_as_bytes()
    except UnicodeEncodeError:  # PyIceberg makes a surrogate of the last character before those
        return None
    return bound


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
