"""Partition values of rows as Delta writes them (PROTOCOL.md, "Partition Value Serialization"), and their folders."""

import json
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from deltawriters.arrow_types import date_text, storage, timestamp_text
from deltawriters.collapse import Ints, dense_ids, grouped
from deltawriters.content import Partition
from deltawriters.partitioning import path_part
from sink.targets.delta.schema import Column

Values = Mapping[str, str | None]
"""Physical name of a partition column -> value."""

_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
_ESCAPED = re.compile("[\x00-\x1f\x7f\"#%'*/:=?\\\\{\\[\\]^]")
"""What Spark escapes in the names of partition folders (`ExternalCatalogUtils.escapePathName`), and NUL, which no
file's name can have."""
_ZONE = re.compile(r"(Z|[+-]\d\d:?\d\d)$")
_SAFE_IN_PATHS = "/_-!.~'()*,;:$&+=@"
"""ASCII punctuation that `java.net.URI` leaves as it is in a path."""


def split_by_partition(columns: Sequence[Column], rows: pa.Table) -> Iterator[tuple[Partition, Ints]]:
    """Each partition that occurs in `rows`, with the numbers of its rows in ascending order.

    :param columns: the partition columns.
    :param rows: at least these columns, in the table's Arrow types.
    """
    if not columns:
        yield Partition(0, "{}"), np.arange(rows.num_rows)
        return
    values = [_without_empty(storage(rows.column(column.name))) for column in columns]
    for _, numbers in grouped(dense_ids(values)[0]):
        first = int(numbers[0])
        shown = {c.physical_name: _text(v.slice(first, 1)) for c, v in zip(columns, values, strict=True)}
        yield Partition(0, json.dumps(shown)), numbers


def folder(columns: Sequence[Column], values: Values) -> str:
    """The folder of a partition, relative to the table, in the way of Hive. Not yet encoded as in an action."""
    parts = []
    for column in columns:
        value = values[column.physical_name]
        if value is not None and pa.types.is_timestamp(column.type) and column.type.tz is not None:
            # Spark's folders have the time as it is cast to a text
            value = value.replace("T", " ").removesuffix("Z").rstrip("0").rstrip(".")
        parts.append(path_part(f"{_escaped(column.name)}={_NO_VALUE if value is None else _escaped(value)}"))
    return "/".join(parts)


def encoded_path(path: str) -> str:
    """A relative path as an action has it (PROTOCOL.md, "Add File and Remove File"), encoded as by `java.net.URI`."""
    parts = re.split(r"([^\x00-\x7f])", path)
    return "".join(part if _is_kept(part) else quote(part, safe=_SAFE_IN_PATHS) for part in parts)


def is_clear(columns: Sequence[Column], values: Values) -> bool:
    """Whether all readers take partition values for the same ones: not if there is a time without its zone, as some
    writers have it, which each reader takes for one of its own zone.
    """
    zoned = (column for column in columns if pa.types.is_timestamp(column.type) and column.type.tz is not None)
    return all(_ZONE.search(values.get(column.physical_name) or "Z") for column in zoned)


def repeated(column: Column, value: str | None, count: int) -> pa.Array:
    """A partition column of `count` rows."""
    return pa.repeat(_parsed(column.type, value), count)


def _is_kept(text: str) -> bool:
    """Whether a character isn't ASCII, and a letter, sign or number that a URI may have unencoded in Java."""
    return len(text) == 1 and ord(text) > 0x7F and unicodedata.category(text) not in ("Cc", "Zs", "Zl", "Zp")


def _escaped(text: str) -> str:
    return _ESCAPED.sub(lambda found: f"%{ord(found[0]):02X}", text)


def _without_empty(column: pa.Array) -> pa.Array:
    """An empty text is null as a partition value."""
    dtype = column.type
    if pa.types.is_string(dtype) or pa.types.is_large_string(dtype) or pa.types.is_binary(dtype):
        return pc.if_else(pc.equal(pc.binary_length(column), 0), pa.scalar(None, dtype), column)
    return column


def _text(value: pa.Array) -> str | None:
    """The text of one value, as Spark's cast to a string makes it, but times with a zone in UTC as ISO 8601."""
    dtype = value.type
    if value.null_count:
        return None
    if pa.types.is_date(dtype):
        return date_text(value.cast(pa.int32())[0].as_py())
    if pa.types.is_timestamp(dtype):
        micros = value.cast(pa.int64())[0].as_py()
        if dtype.tz is not None:
            return f"{timestamp_text(micros, 6)}Z"
        seconds, _, fraction = timestamp_text(micros, 6).replace("T", " ").partition(".")
        fraction = fraction.rstrip("0")
        return f"{seconds}.{fraction}" if fraction else seconds
    found = value[0].as_py()
    if isinstance(found, bool):
        return "true" if found else "false"
    if isinstance(found, float):
        return double_text(found, single=pa.types.is_float32(dtype))
    if isinstance(found, bytes):
        return found.decode(errors="replace")
    return f"{found:f}" if isinstance(found, Decimal) else str(found)


def double_text(value: float, *, single: bool) -> str:
    """A float or double as Java writes it."""
    if np.isnan(value):
        return "NaN"
    if np.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    number: Any = np.float32(value) if single else np.float64(value)
    if number == 0 or 1e-3 <= abs(number) < 1e7:
        return np.format_float_positional(number, unique=True, trim="0")
    mantissa, _, exponent = np.format_float_scientific(number, unique=True, trim="0", exp_digits=1).partition("e")
    return f"{mantissa}E{int(exponent)}"


def _parsed(dtype: pa.DataType, value: str | None) -> pa.Scalar:
    if value is None or value == "":
        return pa.scalar(None, dtype)
    if pa.types.is_date(dtype):
        return pa.scalar(int(np.datetime64(value.lstrip("+"), "D").astype(int)), pa.int32()).cast(dtype)
    if pa.types.is_timestamp(dtype):
        moment = np.datetime64(value.lstrip("+").removesuffix("Z").replace(" ", "T"), "us")
        return pa.scalar(int(moment.astype(int)), pa.int64()).cast(dtype)
    parse: Any = str
    if pa.types.is_integer(dtype):
        parse = int
    elif pa.types.is_floating(dtype):
        parse = float
    elif pa.types.is_decimal(dtype):
        parse = Decimal
    elif pa.types.is_boolean(dtype):
        parse = "true".__eq__
    elif pa.types.is_binary(dtype):
        parse = str.encode
    return pa.scalar(parse(value), dtype)
