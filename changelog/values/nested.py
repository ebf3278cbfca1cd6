"""Converts lists, maps and structs, part by part. If a part doesn't fit, the whole value doesn't fit: the part alone
never becomes null.
"""

import base64
import datetime as dt
import json
import math
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from changelog.changes import NUMERAL, WireType
from changelog.values.arrays import Flags, Longs, merged, present

Convert = Callable[[pa.Array, WireType, pa.DataType], pa.Array]
"""Converts an array of any type. The result is null where the input is null or doesn't fit."""


class NumberText(NamedTuple):
    """The text of a JSON number."""

    text: str


def is_nested(dtype: pa.DataType) -> bool:
    return bool(is_list(dtype) or pa.types.is_map(dtype) or pa.types.is_struct(dtype))


def is_list(dtype: pa.DataType) -> bool:
    return bool(pa.types.is_list(dtype) or pa.types.is_large_list(dtype))


def has_times(dtype: pa.DataType) -> bool:
    """Whether values of the type are dates or times, or have some in them."""
    parts = range(dtype.num_fields) if is_nested(dtype) else ()
    return bool(pa.types.is_temporal(dtype) or any(has_times(dtype.field(part).type) for part in parts))


def python_values(values: pa.Array) -> list[Any]:
    """The values as Python has them. Arrow has dates and times that Python hasn't: then they are numbers."""
    try:
        found: list[Any] = values.to_pylist()
    except (OverflowError, ValueError):
        found = values.view(_timeless(values.type)).to_pylist()
    return found


def _timeless(dtype: pa.DataType) -> pa.DataType:
    """The type of the same layout with integers in the place of dates and times."""
    if pa.types.is_temporal(dtype):
        return pa.int32() if dtype.bit_width == 32 else pa.int64()
    if pa.types.is_struct(dtype):
        return pa.struct([field.with_type(_timeless(field.type)) for field in dtype])
    if pa.types.is_map(dtype):
        key, item = (field.with_type(_timeless(field.type)) for field in (dtype.key_field, dtype.item_field))
        return pa.map_(key, item)
    if is_list(dtype):
        element = dtype.value_field.with_type(_timeless(dtype.value_type))
        return pa.large_list(element) if pa.types.is_large_list(dtype) else pa.list_(element)
    return dtype


def from_arrow(values: pa.Array, wire: WireType, target: pa.DataType, convert: Convert) -> pa.Array:
    """Convert lists to lists, maps to maps, and structs to structs by field name. A field that the values lack is
    null.
    """
    source = values.type
    valid = present(values)
    if is_list(target) and is_list(source):
        begins = values.offsets.to_numpy().astype(np.int64)
        items = values.values.slice(begins[0], begins[-1] - begins[0])
        elements = convert(items, wire.children.get("element", WireType()), target.value_type)
        valid &= ~_any_between(_unfit(items, elements, target.value_field), begins)
        return _lists(elements, begins - begins[0], valid, target)
    if pa.types.is_map(target) and pa.types.is_map(source):
        begins = values.offsets.to_numpy().astype(np.int64)
        where = slice(begins[0], begins[-1])
        keys, items = values.keys[where], values.items[where]
        new_keys = convert(keys, wire.children.get("key", WireType()), target.key_type)
        new_items = convert(items, wire.children.get("value", WireType()), target.item_type)
        unfit = ~present(new_keys) | _unfit(items, new_items, target.item_field)
        valid &= ~_any_between(unfit, begins)
        return _maps(new_keys, new_items, begins - begins[0], valid, target)
    if pa.types.is_struct(target) and pa.types.is_struct(source):
        parts = dict(zip(source.names, values.flatten(), strict=True))
        fields = []
        for field in target:
            part = parts.get(field.name, pa.nulls(len(values)))
            new = convert(part, wire.children.get(field.name, WireType()), field.type)
            fields.append(new)
            valid &= ~_unfit(part, new, field)
        return _structs(fields, valid, target)
    return pa.nulls(len(values), target)


def has_more(values: pa.Array, target: pa.DataType) -> Flags:
    """Flags the values that have, in some struct, a field that isn't null and that `target` lacks."""
    source = values.type
    more = np.zeros(len(values), np.bool_)
    if not _has_struct(target):
        return more
    if pa.types.is_string(source) or pa.types.is_large_string(source):
        found = (text is not None and bool(_more(_parse(text), target)) for text in values.to_pylist())
        return np.fromiter(found, np.bool_, len(values))
    if is_list(target) and is_list(source):
        begins = values.offsets.to_numpy().astype(np.int64)
        items = values.values.slice(begins[0], begins[-1] - begins[0])
        return _any_between(has_more(items, target.value_type), begins)
    if pa.types.is_map(target) and pa.types.is_map(source):
        begins = values.offsets.to_numpy().astype(np.int64)
        return _any_between(has_more(values.items[begins[0] : begins[-1]], target.item_type), begins)
    if pa.types.is_struct(target) and pa.types.is_struct(source):
        for name, part in zip(source.names, values.flatten(), strict=True):
            index = target.get_field_index(name)
            more |= present(part) if index < 0 else has_more(part, target.field(index).type)
    return more


def _has_struct(target: pa.DataType) -> bool:
    if pa.types.is_map(target):
        return _has_struct(target.item_type)
    return bool(pa.types.is_struct(target)) or (is_list(target) and _has_struct(target.value_type))


def more(value: Any, target: pa.DataType) -> str:
    """The first field of a value of `has_more` that `target` lacks, with the fields around it: `geo.zip`.

    :param value: the value as Python has it.
    """
    return _more(_parse(value) if isinstance(value, str) else value, target)


def _more(value: Any, target: pa.DataType) -> str:
    if is_list(target) and isinstance(value, list):
        return next(filter(None, (_more(item, target.value_type) for item in value)), "")
    if pa.types.is_map(target) and isinstance(value, dict | list):
        items = value.values() if isinstance(value, dict) else (item for _, item in _entries(value) or ())
        return next(filter(None, (_more(item, target.item_type) for item in items)), "")
    if pa.types.is_struct(target) and isinstance(value, dict):
        known = {field.name: field.type for field in target}
        for name, part in value.items():
            if part is not None and name not in known:
                return str(name)
            inner = "" if part is None else _more(part, known[name])
            if inner:
                return f"{name}.{inner}"
    return ""


def from_json(texts: pa.Array, wire: WireType, target: pa.DataType, convert: Convert) -> pa.Array:
    """Convert JSON texts one by one. This is rarely needed."""
    objects = [None if text is None else _parse(text) for text in texts.to_pylist()]
    return _from_objects(objects, wire, target, convert)


_UNFIT = object()
"""The result for a text that isn't a JSON object or array."""


def _parse(text: str) -> Any:
    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(found)
        if len(members) < len(found):
            raise ValueError("a name twice")
        return members

    try:
        parsed = json.loads(
            text, parse_int=NumberText, parse_float=NumberText, parse_constant=str, object_pairs_hook=pairs
        )
        if "\\u" in text:
            json.dumps(parsed, ensure_ascii=False).encode()  # raises a ValueError for the escape of a lone surrogate
    except (ValueError, RecursionError):
        return _UNFIT
    return parsed if isinstance(parsed, dict | list) else _UNFIT


def _from_objects(objects: Sequence[Any], wire: WireType, target: pa.DataType, convert: Convert) -> pa.Array:
    wanted = np.fromiter((o is not None for o in objects), np.bool_, len(objects))
    valid = wanted.copy()
    child = wire.children.get
    if is_list(target):
        lists = [o if isinstance(o, list) else [] for o in objects]
        valid &= np.fromiter((isinstance(o, list) for o in objects), np.bool_, len(objects))
        begins = _begins(lists)
        items = [item for some in lists for item in some]
        elements = _from_objects(items, child("element", WireType()), target.value_type, convert)
        valid &= ~_any_between(_unfit_objects(items, elements, target.value_field), begins)
        return _lists(elements, begins, valid, target)
    if pa.types.is_map(target):
        maps = [_entries(o) for o in objects]
        valid &= np.fromiter((entries is not None for entries in maps), np.bool_, len(objects))
        begins = _begins([entries or [] for entries in maps])
        entries = [entry for some in maps for entry in some or []]
        keys = _from_objects([key for key, _ in entries], child("key", WireType()), target.key_type, convert)
        values = [value for _, value in entries]
        items = _from_objects(values, child("value", WireType()), target.item_type, convert)
        unfit = ~present(keys) | _unfit_objects(values, items, target.item_field)
        valid &= ~_any_between(unfit, begins)
        return _maps(keys, items, begins, valid, target)
    if pa.types.is_struct(target):
        valid &= np.fromiter((isinstance(o, dict) for o in objects), np.bool_, len(objects))
        fields = []
        for field in target:
            parts = [o.get(field.name) if isinstance(o, dict) else None for o in objects]
            new = _from_objects(parts, child(field.name, WireType()), field.type, convert)
            fields.append(new)
            valid &= ~_unfit_objects(parts, new, field)
        return _structs(fields, valid, target)
    spellings: list[tuple[Any, pa.DataType, Callable[[Any], Any]]] = [
        (str, pa.string(), lambda o: o),
        (bool, pa.bool_(), lambda o: o),
        (NumberText, NUMERAL, lambda o: o.text),
        (dict, pa.string(), _json_again),
        (list, pa.string(), _json_again),
    ]
    kinds = {type(o) for o in objects}
    parts = [
        convert(pa.array([spell(o) if type(o) is kind else None for o in objects], dtype), wire, target)
        for kind, dtype, spell in spellings
        if kind in kinds
    ]
    return merged(parts, target, len(objects))


def _json_again(parsed: Any) -> str | None:
    """A result of `_parse` as JSON text. Numbers keep their spelling. None if it is nested too deeply."""

    def text(part: Any) -> str:
        if isinstance(part, NumberText):
            return part.text
        if isinstance(part, dict):
            return "{" + ",".join([f"{_quoted(name)}:{text(value)}" for name, value in part.items()]) + "}"
        if isinstance(part, list):
            return "[" + ",".join([text(value) for value in part]) + "]"
        return json.dumps(part, ensure_ascii=False)

    try:
        return text(parsed)
    except RecursionError:
        return None


def json_text(value: Any, dtype: pa.DataType) -> str:
    """A value of an Arrow array as JSON text, in the spelling of Kafka Connect's JsonConverter: bytes are base64, and
    maps with string keys are objects.
    """
    if value is None:
        return "null"
    if is_list(dtype):
        return "[" + ",".join([json_text(part, dtype.value_type) for part in value]) + "]"
    if pa.types.is_struct(dtype):
        return "{" + ",".join([f"{_quoted(f.name)}:{json_text(value[f.name], f.type)}" for f in dtype]) + "}"
    if pa.types.is_map(dtype):
        entries = [(json_text(key, dtype.key_type), json_text(part, dtype.item_type)) for key, part in value]
        if pa.types.is_string(dtype.key_type):
            return "{" + ",".join([f"{key}:{part}" for key, part in entries]) + "}"
        return "[" + ",".join([f"[{key},{part}]" for key, part in entries]) + "]"
    if isinstance(value, bytes):
        return _quoted(base64.b64encode(value).decode("ascii"))
    if isinstance(value, Decimal):
        return f"{value:f}"
    if isinstance(value, float) and not math.isfinite(value):
        return '"NaN"' if math.isnan(value) else '"Infinity"' if value > 0 else '"-Infinity"'
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    return _quoted(value.isoformat() if isinstance(value, dt.date | dt.time) else str(value))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _entries(parsed: Any) -> list[tuple[Any, Any]] | None:
    """A map's entries; None if `parsed` isn't a map. Kafka Connect writes a map with string keys as an object, and
    other maps as an array of pairs.
    """
    if isinstance(parsed, dict):
        return list(parsed.items())
    if isinstance(parsed, list) and all(type(pair) is list and len(pair) == 2 for pair in parsed):
        return [(key, value) for key, value in parsed]
    return None


def _begins(lists: Sequence[Sequence[Any]]) -> Longs:
    begins = np.zeros(len(lists) + 1, np.int64)
    np.cumsum([len(some) for some in lists], out=begins[1:])
    return begins


def _unfit(before: pa.Array, after: pa.Array, field: pa.Field) -> Flags:
    if after.null_count == 0:
        return np.zeros(len(after), np.bool_)
    missing = ~present(after)
    return missing & present(before) if field.nullable else missing


def _unfit_objects(before: Sequence[Any], after: pa.Array, field: pa.Field) -> Flags:
    missing = ~present(after)
    if not field.nullable:
        return missing
    return missing & np.fromiter((o is not None for o in before), np.bool_, len(before))


def _any_between(marks: Flags, begins: Longs) -> Flags:
    """For each i, whether any mark is set in [begins[i], begins[i + 1])."""
    if not marks.any():
        return np.zeros(len(begins) - 1, np.bool_)
    counted = np.concatenate([[0], np.cumsum(marks)])
    places = begins - begins[0]
    return np.asarray(counted[places[1:]] > counted[places[:-1]])


def _lists(elements: pa.Array, begins: Longs, valid: Flags, target: pa.DataType) -> pa.Array:
    offsets, (elements,) = _of_valid([elements], begins, valid)
    return pa.ListArray.from_arrays(offsets, elements, type=target, mask=_mask(valid))


def _maps(keys: pa.Array, items: pa.Array, begins: Longs, valid: Flags, target: pa.DataType) -> pa.Array:
    offsets, (keys, items) = _of_valid([keys, items], begins, valid)
    return pa.MapArray.from_arrays(offsets, keys, items, type=target, mask=_mask(valid))


def _of_valid(parts: list[pa.Array], begins: Longs, valid: Flags) -> tuple[pa.Array, list[pa.Array]]:
    """Offsets and parts without the elements of rows that aren't valid. Arrow refuses null keys, also in rows that are
    null themselves.
    """
    if not valid.all():
        lengths = np.diff(begins)
        kept = pa.array(np.repeat(valid, lengths))
        parts = [part.filter(kept) for part in parts]
        begins = np.concatenate([[0], np.cumsum(np.where(valid, lengths, 0))])
    return pa.array(begins.astype(np.int32)), parts


def _structs(fields: list[pa.Array], valid: Flags, target: pa.DataType) -> pa.Array:
    return pa.StructArray.from_arrays(fields, fields=list(target), mask=_mask(valid))


def _mask(valid: Flags) -> pa.Array | None:
    return None if valid.all() else pa.array(~valid)
