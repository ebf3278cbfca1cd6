"""Defaults that messages' schemas declare: what rows have that the source wrote before it had the column."""

import datetime as dt
import json
import math
from decimal import Decimal
from typing import Any

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_type

from changelog.changes import Wire, WireType
from changelog.values.conversion import convert
from changelog.values.schemas import spark_type

_MARK = " default "
_EPOCH = (dt.date(1970, 1, 1), dt.datetime(1970, 1, 1), dt.datetime(1970, 1, 1, tzinfo=dt.UTC))


def with_default(dtype: str, wire: WireType) -> str:
    """A type, followed by the field's default as JSON, if there is one: `int default 11`.

    Debezium makes up a default where the database has an expression (`now()`): the epoch, or an empty UUID. Nothing
    tells such a time from a real one, so it counts as none, and so do defaults of binary and nested fields.
    """
    if wire.default is None or wire.children:
        return dtype
    try:
        array, _ = convert(Wire(pa.array([wire.default]), wire), to_arrow_type(spark_type(wire)))
    except (pa.ArrowException, OverflowError):
        return dtype
    text = _text(array[0].as_py(), is_uuid="Uuid" in (wire.name or ""))
    return dtype if text is None else f"{dtype}{_MARK}{text}"


def without_default(observed: str) -> str:
    """The type in an observed type (`changelog.observed_types.Observed`)."""
    return observed.partition(_MARK)[0]


def default_of(observed: str) -> Any:
    """The default in an observed type: a number, a boolean or a text, as SQL spells it. None if there is none."""
    text = observed.partition(_MARK)[2]
    return json.loads(text) if text else None


def _text(value: Any, *, is_uuid: bool) -> str | None:
    if value in _EPOCH or (is_uuid and not value) or (isinstance(value, float) and not math.isfinite(value)):
        return None
    if isinstance(value, bool | int | float | str):
        return json.dumps(value)
    if isinstance(value, Decimal):
        return json.dumps(format(value, "f"))
    if isinstance(value, dt.datetime):
        return json.dumps(value.isoformat(timespec="microseconds"))
    return json.dumps(value.isoformat()) if isinstance(value, dt.date) else None
