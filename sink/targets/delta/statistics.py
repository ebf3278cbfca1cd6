"""Statistics of a data file, as Delta's own writer makes them (PROTOCOL.md, "Per-file Statistics"; Delta's
`StatisticsCollection`), from what is known of the Parquet file.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from deltawriters.arrow_types import date_text, timestamp_text
from deltawriters.parquet import ParquetFacts
from sink.targets.delta.schema import Column, leaves

_INDEXED = "delta.dataSkippingNumIndexedCols"
_INDEXED_DEFAULT = 32
_COLUMNS = "delta.dataSkippingStatsColumns"
_PREFIX = "delta.dataSkippingStringPrefixLength"
_PREFIX_DEFAULT = 32
_ASCII_MAX, _UNICODE_MAX = "\x7f", "\U0010ffff"
_SURROGATES = range(0xD800, 0xDC00)

Path = tuple[Column, ...]


def indexed(columns: Sequence[Column], properties: Mapping[str, str]) -> tuple[Path, ...]:
    """Paths to the columns that have statistics: the ones that the table names, else the first 32."""
    paths = list(leaves(columns))
    named = properties.get(_COLUMNS)
    if named is not None:
        wanted = set(_names(named))
        return tuple(path for path in paths if any(_lower(path[:length]) in wanted for length in _lengths(path)))
    count = int(properties.get(_INDEXED, _INDEXED_DEFAULT))
    return tuple(paths if count < 0 else paths[:count])


def statistics(
    facts: ParquetFacts,
    columns: Sequence[Column],
    paths: Sequence[Path],
    properties: Mapping[str, str],
    *,
    has_bounds_flag: bool,
) -> str:
    """The `stats` of an `add` action.

    :param columns: the columns of the data file, in its order.
    :param paths: see `indexed`.
    :param properties: of the table.
    :param has_bounds_flag: say that the bounds are tight, as Delta does in tables that may have deletion vectors.
    """
    prefix = int(properties.get(_PREFIX, _PREFIX_DEFAULT))
    least: dict[str, Any] = {}
    greatest: dict[str, Any] = {}
    nulls: dict[str, Any] = {}
    places = dict(_parquet_leaves(columns))
    for path in paths:
        names = tuple(column.physical_name for column in path)
        count = facts.null_counts.get(names)
        if count is None:
            count = _null_count(facts.footer, places[names])
        if count is not None:
            _put(nulls, names, count)
        if _has_bounds(path[-1].type):
            lower, upper = _bounds(facts, names, path[-1].type, places[names], prefix)
            _put(least, names, lower)
            _put(greatest, names, upper)
    stats: dict[str, Any] = {"numRecords": facts.rows}
    stats |= {
        name: found for name, found in (("minValues", least), ("maxValues", greatest), ("nullCount", nulls)) if found
    }
    if has_bounds_flag:
        stats["tightBounds"] = True
    return _json(stats)


class _Number(str):
    """A number as it is written, since a float may have fewer digits."""


def with_wide_bounds(stats: str, rows: int) -> str:
    """The statistics of a file with a deletion vector: its bounds are those of all its rows, also of the deleted ones
    (PROTOCOL.md, "Per-file Statistics").

    :param stats: of the file without the vector, by any writer.
    :param rows: in the file. Statistics have at least this number then.
    """
    found: dict[str, Any] = json.loads(stats, parse_float=_Number, parse_int=_Number)
    if found.get("numRecords") is None:  # other writers may leave it out
        found["numRecords"] = rows
    return _json(found | {"tightBounds": False})


def longer_maximum(text: str, prefix: int) -> str | None:
    """A text that is not less than any text that begins like `text`, if it is cut to `prefix` UTF-16 units. None if no
    short text is (Delta's `truncateMaxStringAgg`).
    """
    units = text.encode("utf-16-le", "surrogatepass")
    length = len(units) // 2
    if length <= prefix:
        return text
    if prefix <= 0:
        return None

    def unit(position: int) -> int:
        return int.from_bytes(units[2 * position : 2 * position + 2], "little")

    def head(stop: int) -> str:
        return units[: 2 * stop].decode("utf-16-le", "surrogatepass")

    end = prefix + 1 if unit(prefix - 1) in _SURROGATES else prefix
    while end <= 2 * prefix:
        if end >= length:
            return text
        if head(end + 2)[len(head(end)) :] == _UNICODE_MAX:
            end += 2  # it is as large as the character that would be put here
        else:
            return head(end) + (_ASCII_MAX if unit(end) < ord(_ASCII_MAX) else _UNICODE_MAX)
    return None


def _parquet_leaves(columns: Sequence[Column]) -> Iterator[tuple[tuple[str, ...], int]]:
    """For each path of physical names, the number of its (first) column in the Parquet file. A column name may have
    dots, so the footer's own paths don't do.
    """
    number = 0
    for path in leaves(columns):
        yield tuple(column.physical_name for column in path), number
        number += _width(path[-1].physical_type)


def _width(dtype: pa.DataType) -> int:
    """How many Parquet columns a type has."""
    if pa.types.is_nested(dtype):
        return sum(_width(dtype.field(i).type) for i in range(dtype.num_fields))
    return 1


def _null_count(footer: pq.FileMetaData, number: int) -> int | None:
    groups = [footer.row_group(group).column(number).statistics for group in range(footer.num_row_groups)]
    if any(found is None or not found.has_null_count for found in groups):
        return None
    return int(sum(found.null_count for found in groups))


def _has_bounds(dtype: pa.DataType) -> bool:
    """Whether Delta skips files by values of the type (`SkippingEligibleDataType`)."""
    is_number = pa.types.is_integer(dtype) or pa.types.is_floating(dtype) or pa.types.is_decimal(dtype)
    return bool(is_number or pa.types.is_temporal(dtype) or pa.types.is_string(dtype))


def _bounds(
    facts: ParquetFacts, names: tuple[str, ...], dtype: pa.DataType, number: int, prefix: int
) -> tuple[Any, Any]:
    """Least and greatest value as JSON values. None where there is none, or it isn't known.

    :param number: of the column in the Parquet file.
    """
    footer, least, greatest = facts.footer, [], []
    nans = facts.nan_counts.get(names, 0)
    for group in range(footer.num_row_groups):
        chunk = footer.row_group(group).column(number)
        found = chunk.statistics
        if found is None or not found.has_min_max:
            # all values of the row group are null or NaN, or a text is too long for a bound
            if found is None or (found.num_values and not nans):
                return None, None
            continue
        raw = pa.types.is_temporal(dtype)
        least.append(found.min_raw if raw else found.min)
        greatest.append(found.max_raw if raw else found.max)
    if pa.types.is_floating(dtype):
        # Spark takes NaN for greater than all numbers
        lower = min(least) if least else (math.nan if nans else None)
        upper = math.nan if nans else (max(greatest) if greatest else None)
        single = pa.types.is_float32(dtype)
        return _float(lower, single), _float(upper, single)
    if not least:
        return None, None
    lower, upper = min(least), max(greatest)
    if pa.types.is_date(dtype):
        return date_text(lower), date_text(upper)
    if pa.types.is_timestamp(dtype):
        zone = "" if dtype.tz is None else "Z"
        return f"{timestamp_text(lower, 3)}{zone}", f"{timestamp_text(upper, 3)}{zone}"
    if pa.types.is_string(dtype):
        return lower[:prefix], longer_maximum(upper, prefix)
    return lower, upper


def _float(bound: float | None, single: bool) -> float | str | None:
    if bound is None:
        return None
    if math.isnan(bound):
        return "NaN"
    if math.isinf(bound):
        return "Infinity" if bound > 0 else "-Infinity"
    return float(str(np.float32(bound))) if single else bound


def _put(values: dict[str, Any], names: tuple[str, ...], value: Any) -> None:
    """Set a value in nested objects. A null isn't there, but the objects around it are, as in Spark's `to_json`."""
    for name in names[:-1]:
        values = values.setdefault(name, {})
    if value is not None:
        values[names[-1]] = value


def _json(value: Any) -> str:
    """Like `json.dumps`, and decimals as numbers with all their digits."""
    if isinstance(value, _Number):
        return value
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(name)}:{_json(inner)}" for name, inner in value.items()) + "}"
    return f"{value:f}" if isinstance(value, Decimal) else json.dumps(value)


def _names(text: str) -> Iterator[tuple[str, ...]]:
    """The columns of a list such as "a, b.c, `x.y`", in lower case."""
    for column in re.findall(r"(?:`(?:[^`]|``)*`|[^,`])+", text):
        parts = re.findall(r"`((?:[^`]|``)*)`|([^.`\s]+)", column)
        if parts:
            yield tuple((quoted.replace("``", "`") or plain).lower() for quoted, plain in parts)


def _lower(path: Path) -> tuple[str, ...]:
    return tuple(column.name.lower() for column in path)


def _lengths(path: Path) -> range:
    return range(1, len(path) + 1)
