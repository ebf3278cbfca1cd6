"""Reads JSON records into Arrow arrays: many records at once if their types are alike, odd records one by one.

Arrow's JSON reader needs one type for each field, and stops at the first record that has another type. So this module
reads a batch with the likeliest types. If the reader stops at an odd record, this module reads the records before it,
parses the odd record in Python, and goes on with the records after it. A batch without odd records costs one pass:
about 2 us for 700 bytes.

Arrow names the record and the field only in the English text of its error. If the text has an unknown form, this module
halves the batch until few records are left, and parses these in Python. That is slower, but the result is the same.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from changelog.changes import NUMERAL, Rejected, WireType
from changelog.rows import BadRecord
from changelog.values.encoded import MAYBE_BASE64, is_utf8, looks_like_base64


@dataclass(frozen=True)
class Leaf:
    """A field that is read as one value.

    :param candidates: Arrow types that the field may have, the likeliest first (`values.json_candidates`).
    """

    candidates: tuple[pa.DataType, ...]


@dataclass(frozen=True)
class Object:
    """An object whose named fields are read.

    :param fields: the fields to read, by name.
    :param watched: report the other fields of the object.
    """

    fields: Mapping[str, "Leaf | Object | ListOf"]
    watched: bool = False


@dataclass(frozen=True)
class ListOf:
    """An array of objects."""

    element: Object


Shape = Leaf | Object | ListOf
Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Parsed:
    """Records that were read with one Arrow type for each field.

    :param record: int64; row numbers in the input.
    :param values: the fields of the shape, a struct array as long as `record`. Missing fields are null. A leaf has the
        type of one of its candidates. If no candidate fits the records, it is string, int64, bool, `NUMERAL` (a
        number's text), string with JSON text for an object or array, or null if no record has a value.
    :param unknown: fields of watched objects that aren't in the shape and have a value, with a guess of their type.
    """

    record: pa.Array
    values: pa.StructArray
    unknown: Mapping[str, WireType] = field(default_factory=dict)


NOT_AN_OBJECT = "the value is not a JSON object"

_CHANGED = re.compile(r"Column\(/?(.*?)\) changed from \w+ to \w+ in row (\d+)")
_ROW = re.compile(r"in row (\d+)")
_PROBE = 16
"""The reader looks at this many records to decide whether a field has a new type from now on, or one record is odd."""
_FEW = 16
"""The reader doesn't search so few records for the odd ones: it parses all of them in Python."""
_SLICE = 1024
"""If a batch has odd records, the reader reads so many records at a time: after each odd record it must read the
records behind it again.
"""
_MOST_ODD = 64
"""If a slice has more odd records than this, the reader parses the whole slice in Python."""
_MOST_EXTRA = 2000
"""The most fields beyond the shape, over all objects. If there are more, the field names probably contain data."""
_DEEP = 100
"""If a record has this many brackets, its depth is checked, since Arrow's type inference recurses without a limit."""
_PARSER_DEPTH = 500
_TINY = (
    r"\.[0-9]{40}",
    r"e-0*(?:[0-9]{3,}|3[7-9]|[4-9][0-9])[\"\s,}\]]",
    r"E-0*(?:[0-9]{3,}|3[7-9]|[4-9][0-9])[\"\s,}\]]",
    r"\\u00(?:3[0-9]|45|65|2[dDeE])",
)
"""Fit numbers with more than 76 digits after the point, also as a text with escapes. From such a number Arrow makes a
decimal by a factor that it reads behind the end of its table, which may end the process. They are several expressions
because each begins with a text that is quickly found."""


class JsonReader:
    """Reads records of one shape. The reader remembers the last type of each field.

    :param shape: what to read of each record.
    :param around: texts to put before and after each record, so that each record is a whole JSON object.
    """

    def __init__(self, shape: Object, around: tuple[str, str] = ("", "")) -> None:
        self._shape = shape
        self._around = around
        self._watches = _watches(shape)
        self._has_decimals = _has_decimals(shape)
        self._chosen: dict[str, int] = {}  # path of a leaf -> which candidate; 0 if absent
        self._extra = pa.struct([])  # known fields beyond the shape, so that the reader notices new fields
        self._one_by_one_only = False  # there are too many such fields, so each record is parsed in Python

    def read(self, values: pa.Array) -> Iterator[Parsed | Rejected]:
        """Read the records in `values` (binary or string, no nulls). A record that isn't a JSON object is rejected."""
        rows = np.arange(len(values))
        try:
            texts = values.cast(pa.string())
        except pa.ArrowInvalid:
            rows = np.flatnonzero([is_utf8(value) for value in values.to_pylist()])
            texts = values.take(pa.array(rows)).cast(pa.string())
        # each text must begin and end like an object, so that no record can complete the record before it
        whole = _is_braced(texts, *self._around)
        if not pc.all(whole).as_py():
            whole = _is_braced(pc.ascii_trim_whitespace(texts), *self._around)
        if not pc.all(whole).as_py():
            texts, rows = texts.filter(whole), rows[whole.to_numpy(zero_copy_only=False)]
        if self._has_decimals:
            for pattern in _TINY:
                safe = pc.invert(pc.match_substring_regex(texts, pattern))
                if not pc.all(safe).as_py():
                    texts, rows = texts.filter(safe), rows[safe.to_numpy(zero_copy_only=False)]
        alone: list[int] = np.setdiff1d(np.arange(len(values)), rows).tolist() if len(rows) < len(values) else []
        if len(rows):
            yield from self._segment(texts, rows, alone)
        if alone:
            yield from self._one_by_one(values, alone)

    def _segment(self, texts: pa.Array, rows: Rows, alone: list[int], *, alike: bool = False) -> Iterator[Parsed]:
        """Read the rows that can be read together. The numbers of all other rows are appended to `alone`.

        :param alike: the text of an error said that these rows can be read together. If that fails, the row number in
            the text has another meaning (another release of Arrow, a record of several documents), and the reader
            doesn't use it again.
        """
        learned = False
        respelled: set[tuple[int, str]] = set()
        most = len(alone) + _MOST_ODD
        while len(rows) and len(alone) < most and not self._one_by_one_only:
            try:
                struct = self._parse(texts)
            except pa.ArrowInvalid as error:
                message = str(error)
            else:
                yield self._parsed(rows, struct)
                return
            if self._watches and not learned:
                # the cause may only be a field that is new, or that was always null before
                learned = True
                if self._learn(texts):
                    continue
            if len(rows) > _SLICE:
                for start in range(0, len(rows), _SLICE):
                    stop_at = start + _SLICE
                    yield from self._segment(texts[start:stop_at], rows[start:stop_at], alone, alike=alike)
                return
            stop = None if alike else _ROW.search(message)
            at = len(rows) if stop is None else int(stop.group(1))
            if at >= len(rows) and len(rows) > _FEW:
                half = len(rows) // 2
                yield from self._segment(texts[:half], rows[:half], alone, alike=alike)
                texts, rows, learned = texts[half:], rows[half:], False
                continue
            if at >= len(rows):
                break
            yield from self._segment(texts[:at], rows[:at], alone, alike=True)
            texts, rows = texts[at:], rows[at:]
            changed = _CHANGED.search(message)
            attempt = (int(rows[0]), changed.group(1) if changed else "")
            if attempt in respelled or not self._respell(message, texts):
                alone.append(int(rows[0]))
                texts, rows = texts[1:], rows[1:]
            respelled.add(attempt)
            learned = False
        alone += rows.tolist()

    def _respell(self, message: str, texts: pa.Array) -> bool:
        """Read the field of the error by its next candidate from now on, if the next few records can then be read.
        Returns whether this is so.
        """
        changed = _CHANGED.search(message)
        leaf = None if changed is None else _leaf(self._shape, changed.group(1))
        if changed is None or leaf is None or len(leaf.candidates) == 1:
            return False
        path = changed.group(1).replace("/[]", "")
        before = self._chosen.get(path, 0)
        for step in range(1, len(leaf.candidates)):
            self._chosen[path] = (before + step) % len(leaf.candidates)
            try:
                self._parse(texts[:_PROBE])
            except pa.ArrowInvalid as error:
                again = _CHANGED.search(str(error))
                if again and again.group(1) != changed.group(1) and int(again.group(2)) == 0:
                    return True  # another field is next
            else:
                return True
        self._chosen[path] = before
        return False

    def _parse(self, texts: pa.Array) -> pa.StructArray:
        """:raises pa.ArrowInvalid: a record doesn't fit the types, or has a new field in a watched object."""
        schema = pa.schema(list(_with_extra(self._type(self._shape, ""), self._extra)))
        table = self._table(texts, schema, "error" if self._watches else "ignore")
        if table.num_rows != len(texts):
            raise pa.ArrowInvalid("a record has several documents")
        if not table.num_rows:
            return pa.array([], pa.struct(schema))
        try:
            struct = table.to_struct_array().combine_chunks()
        except IndexError as error:  # Arrow's reader reads [null, null] as a list that lacks an element
            raise pa.ArrowInvalid(str(error)) from None
        endless = _endless(struct)
        if endless >= 0:  # Arrow's reader makes infinity of an integer of 310 digits
            raise pa.ArrowInvalid(f"an infinite number in row {endless}")
        return struct

    def _table(self, texts: pa.Array, schema: pa.Schema, unexpected: str) -> pa.Table:
        before, after = self._around
        whole = pa.ListArray.from_arrays(pa.array([0, len(texts)], pa.int32()), texts)
        lines = pc.binary_join(whole, f"{after}\n{before}")[0].as_buffer()
        if before or after:
            lines = pa.py_buffer(b"".join((before.encode(), memoryview(lines), after.encode())))
        return pj.read_json(
            pa.BufferReader(lines),
            read_options=pj.ReadOptions(use_threads=False, block_size=lines.size + 1),
            parse_options=pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior=unexpected),
        )

    def _learn(self, texts: pa.Array) -> bool:
        """Learn the fields beyond the shape. Returns whether there is a new field, so that reading again may work."""
        known = self._extra
        shallow = texts.filter(_is_shallow(texts))
        if not len(shallow):
            return False
        try:
            table = self._table(shallow, pa.schema(list(self._type(self._shape, ""))), "infer")
            self._extra = _merged(known, _without_timestamps(pa.struct(list(table.schema))))
        except (pa.ArrowInvalid, RecursionError):
            return False
        if _size(self._extra) - _size(self._type(self._shape, "")) > _MOST_EXTRA:
            self._extra, self._one_by_one_only = pa.struct([]), True
            return True
        return bool(self._extra != known)

    def _parsed(self, rows: Rows, struct: pa.StructArray) -> Parsed:
        unknown: dict[str, WireType] = {}
        if self._watches:
            unknown = _unknown(self._shape, struct)
            struct = _only(self._shape, struct)
        return Parsed(pa.array(rows), struct, unknown)

    def _type(self, shape: Shape, path: str) -> pa.DataType:
        if isinstance(shape, Leaf):
            return shape.candidates[self._chosen.get(path, 0)]
        if isinstance(shape, ListOf):
            return pa.list_(self._type(shape.element, path))
        fields = shape.fields.items()
        return pa.struct([(name, self._type(part, f"{path}/{name}" if path else name)) for name, part in fields])

    def _wrapped(self, text: str | bytes) -> str | bytes:
        before, after = self._around
        return f"{before}{text}{after}" if isinstance(text, str) else before.encode() + text + after.encode()

    def _one_by_one(self, values: pa.Array, rows: list[int]) -> Iterator[Parsed | Rejected]:
        groups: dict[tuple[Any, ...], list[tuple[int, Any]]] = {}
        unknown: dict[str, WireType] = {}
        rejected: dict[str, list[int]] = {}
        for row in sorted(rows):
            try:
                document = parse(self._wrapped(values[row].as_py()))
                picked = _pick(self._shape, document, NOT_AN_OBJECT)
                seen = _unknown_of(self._shape, document) if self._watches else {}
            except _MisplacedError as error:
                rejected.setdefault(str(error), []).append(row)
                continue
            except RecursionError:
                rejected.setdefault("the value is nested too deeply", []).append(row)
                continue
            except ValueError:
                rejected.setdefault(NOT_AN_OBJECT, []).append(row)
                continue
            _merge(unknown, seen)
            groups.setdefault(_signature(self._shape, picked), []).append((row, picked))
        for reason, found in rejected.items():
            yield Rejected(pa.array(found, pa.int64()), BadRecord.UNPARSEABLE, reason)
        for members in groups.values():
            struct = _array(self._shape, [picked for _, picked in members])
            yield Parsed(pa.array([row for row, _ in members], pa.int64()), struct, unknown)


class Numeral(str):
    """The text of a JSON number that isn't a 64-bit integer."""

    __slots__ = ()


def parse(text: str | bytes) -> Any:
    """A JSON document as Python values. A number that isn't a 64-bit integer becomes a `Numeral`.

    :raises ValueError: the text isn't JSON, or isn't valid Unicode.
    :raises RecursionError: the document is nested too deeply.
    """
    if isinstance(text, bytes):
        text = text.decode()
    document = json.loads(text, parse_float=Numeral, parse_int=_integer, parse_constant=Numeral)
    if "\\u" in text:
        compact(document).encode()  # raises UnicodeEncodeError, a ValueError, for the escape of a lone surrogate
    return document


def compact(value: Any) -> str:
    """A result of `parse` as JSON without spaces. Numbers keep their spelling."""
    if isinstance(value, Numeral):
        return value
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(k, ensure_ascii=False)}:{compact(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(compact, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def _integer(text: str) -> int | Numeral:
    if len(text) <= 20 and -(2**63) <= int(text) < 2**63:
        return int(text)
    return Numeral(text)


def _is_shallow(texts: pa.Array) -> pa.Array:
    """Flags the texts that Python's parser can parse: it goes about a thousand levels deep."""
    brackets = pc.add(pc.count_substring(texts, "["), pc.count_substring(texts, "{"))
    shallow = pc.less(brackets, _DEEP).to_numpy(zero_copy_only=False).copy()
    for row in np.flatnonzero(~shallow):
        try:
            json.loads(texts[int(row)].as_py())
            shallow[row] = True
        except RecursionError:
            pass
        except ValueError:
            # the text may be a part cut out of an event, so a syntax error is no problem; only the depth counts
            shallow[row] = brackets[int(row)].as_py() < _PARSER_DEPTH
    return pa.array(shallow)


def _size(dtype: pa.DataType) -> int:
    """Number of leaves of a type."""
    if pa.types.is_struct(dtype):
        return sum(_size(part.type) for part in dtype)
    return _size(dtype.value_type) if pa.types.is_list(dtype) else 1


def _is_braced(texts: pa.Array, before: str, after: str) -> pa.Array:
    starts = pc.starts_with(texts, "{") if not before else True
    ends = pc.ends_with(texts, "}") if not after else True
    return pc.and_(pc.and_(starts, ends), pa.repeat(True, len(texts)))


def _has_decimals(shape: Shape) -> bool:
    """Whether Arrow may have to make decimals from texts."""
    if isinstance(shape, Leaf):
        return any(map(_is_decimal, shape.candidates))
    return any(map(_has_decimals, shape.fields.values() if isinstance(shape, Object) else [shape.element]))


def _is_decimal(dtype: pa.DataType) -> bool:
    inner = [dtype.field(i).type for i in range(dtype.num_fields)]
    return bool(pa.types.is_decimal(dtype)) or any(map(_is_decimal, inner))


def _watches(shape: Shape) -> bool:
    if isinstance(shape, Leaf):
        return False
    if isinstance(shape, ListOf):
        return _watches(shape.element)
    return shape.watched or any(map(_watches, shape.fields.values()))


def _leaf(shape: Shape, path: str) -> Leaf | None:
    for name in path.split("/"):
        if name == "[]":
            continue
        if isinstance(shape, ListOf):
            shape = shape.element
        if not isinstance(shape, Object) or name not in shape.fields:
            return shape if isinstance(shape, Leaf) else None
        shape = shape.fields[name]
    return shape if isinstance(shape, Leaf) else None


def _with_extra(wanted: pa.DataType, extra: pa.DataType) -> pa.DataType:
    """`wanted`, with the fields added that only `extra` has."""
    if pa.types.is_list(wanted) and pa.types.is_list(extra):
        return pa.list_(_with_extra(wanted.value_type, extra.value_type))
    if not (pa.types.is_struct(wanted) and pa.types.is_struct(extra)):
        return wanted
    fields = {f.name: _with_extra(f.type, extra.field(f.name).type) if _has(extra, f.name) else f.type for f in wanted}
    fields |= {f.name: f.type for f in extra if f.name not in fields}
    return pa.struct(list(fields.items()))


def _merged(old: pa.DataType, new: pa.DataType) -> pa.DataType:
    """All fields of both types. If the types of a field differ, the new type counts, unless it is null."""
    if pa.types.is_null(new):
        return old
    if pa.types.is_list(old) and pa.types.is_list(new):
        return pa.list_(_merged(old.value_type, new.value_type))
    if not (pa.types.is_struct(old) and pa.types.is_struct(new)):
        return new
    fields = {f.name: f.type for f in old}
    fields |= {f.name: _merged(fields[f.name], f.type) if f.name in fields else f.type for f in new}
    return pa.struct(list(fields.items()))


def _endless(array: pa.Array) -> int:
    """The first row with an infinite number, outside of lists; -1 if there is none."""
    if pa.types.is_struct(array.type):
        return next((row for part in array.flatten() if (row := _endless(part)) >= 0), -1)
    return int(pc.index(pc.is_inf(array), True).as_py()) if pa.types.is_floating(array.type) else -1


def _without_timestamps(dtype: pa.DataType) -> pa.DataType:
    """The type with strings instead of timestamps. Arrow reads some texts as timestamps, but the next text of the same
    field may be no timestamp.
    """
    if pa.types.is_struct(dtype):
        return pa.struct([(f.name, _without_timestamps(f.type)) for f in dtype])
    if pa.types.is_list(dtype):
        return pa.list_(_without_timestamps(dtype.value_type))
    return pa.string() if pa.types.is_timestamp(dtype) else dtype


def _has(struct: pa.DataType, name: str) -> bool:
    return bool(struct.get_field_index(name) >= 0)


def _only(shape: Shape, array: pa.Array) -> pa.Array:
    """The array without the fields beyond the shape."""
    if isinstance(shape, Leaf):
        return array
    if isinstance(shape, ListOf):
        return pa.ListArray.from_arrays(array.offsets, _only(shape.element, array.values), mask=_nulls(array))
    parts = {name: _only(part, array.field(name)) for name, part in shape.fields.items()}
    return _struct(parts, array.is_null())


def _struct(parts: Mapping[str, pa.Array], nulls: pa.Array) -> pa.StructArray:
    if not parts:  # without parts, `from_arrays` would make an array of length 0
        return pa.array([None if null else {} for null in nulls.to_pylist()], pa.struct([]))
    fields = [pa.field(name, part.type) for name, part in parts.items()]
    return pa.StructArray.from_arrays(list(parts.values()), fields=fields, mask=nulls)


def _nulls(array: pa.Array) -> pa.Array | None:
    return array.is_null() if array.null_count else None


def _unknown(shape: Shape, array: pa.Array) -> dict[str, WireType]:
    if isinstance(shape, Leaf):
        return {}
    if isinstance(shape, ListOf):
        return _unknown(shape.element, array.values)
    found: dict[str, WireType] = {}
    for part in array.type:
        if part.name in shape.fields:
            _merge(found, _unknown(shape.fields[part.name], array.field(part.name)))
        elif shape.watched and array.field(part.name).null_count < len(array):
            found[part.name] = _guess_of(array.field(part.name))
    return found


def _unknown_of(shape: Shape, document: Any) -> dict[str, WireType]:
    if isinstance(shape, ListOf):
        found: dict[str, WireType] = {}
        for element in document if isinstance(document, list) else ():
            _merge(found, _unknown_of(shape.element, element))
        return found
    if isinstance(shape, Leaf) or not isinstance(document, dict):
        return {}
    found = {}
    for name, value in document.items():
        if name in shape.fields:
            _merge(found, _unknown_of(shape.fields[name], value))
        elif shape.watched and value is not None:
            is_float = isinstance(value, Numeral) and not value.lstrip("-").isdigit()
            dtype = pa.float64() if is_float else _arrow_type(_tag(value))
            found[name] = _guess_of(pa.array([value])) if type(value) is str else _guess(dtype)
    return found


def _merge(fields: dict[str, WireType], more: Mapping[str, WireType]) -> None:
    """Add fields to others. A field with two types becomes a number if both are numbers, or else text."""
    for name, guess in more.items():
        known = fields.setdefault(name, guess)
        if known != guess:
            numbers = {known.kind, guess.kind} <= {"int64", "double"}
            fields[name] = WireType("double" if numbers else "string")


def _guess_of(values: pa.Array) -> WireType:
    """A guess by the values too. Arrow reads integers of more than 64 bits as rounded floats; text has all digits."""
    if pa.types.is_float64(values.type) and pc.any(pc.greater_equal(pc.abs(values), 2.0**63)).as_py():
        return WireType("string")
    if pa.types.is_string(values.type) and looks_like_base64(values):
        return WireType("string", MAYBE_BASE64)
    return _guess(values.type)


def _guess(dtype: pa.DataType) -> WireType:
    kinds = {pa.int64(): "int64", pa.float64(): "double", pa.bool_(): "boolean", pa.string(): "string"}
    return WireType(kinds.get(dtype, ""))


# The rest reads records one by one: it picks values, finds their types, and makes arrays of records with equal types.


class _MisplacedError(Exception):
    """The shape has an object or an array of objects where the document has another value."""


def _pick(shape: Shape, value: Any, complaint: str) -> Any:
    """The part of a document that the shape names. Objects and arrays at leaves become JSON text.

    :raises _MisplacedError: the document doesn't have the shape; the message is `complaint`.
    """
    if isinstance(shape, Leaf):
        return _Json(compact(value)) if isinstance(value, dict | list) else value
    if isinstance(shape, ListOf):
        if not isinstance(value, list):
            raise _MisplacedError(complaint)
        return [None if element is None else _pick(shape.element, element, complaint) for element in value]
    if not isinstance(value, dict):
        raise _MisplacedError(complaint)
    return {
        name: None if value.get(name) is None else _pick(part, value[name], f"field {name} is not {_wanted(part)}")
        for name, part in shape.fields.items()
    }


def _wanted(shape: Shape) -> str:
    return "an array of objects" if isinstance(shape, ListOf) else "an object"


class _Json(str):
    """JSON text of an object or array."""

    __slots__ = ()


def _tag(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "int64"
    return "numeral" if isinstance(value, Numeral) else "string"


def _arrow_type(tag: str) -> pa.DataType:
    types = {"null": pa.null(), "bool": pa.bool_(), "int64": pa.int64(), "numeral": NUMERAL, "string": pa.string()}
    return types[tag]


def _signature(shape: Shape, value: Any) -> tuple[Any, ...]:
    """The types of a picked value's leaves. The type of a leaf in a list is one that holds all elements of the list."""
    if isinstance(shape, Leaf):
        return (_tag(value),)
    if isinstance(shape, ListOf):
        parts = [_signature(shape.element, element) for element in value or ()]
        return tuple(_common(tags) for tags in zip(*parts, strict=True)) if parts else ()
    if value is None:
        value = {}
    return tuple(tag for name, part in shape.fields.items() for tag in _signature(part, value.get(name)))


def _common(tags: tuple[str, ...]) -> str:
    kinds = set(tags) - {"null"}
    if kinds == {"int64", "numeral"}:
        return "numeral"
    return kinds.pop() if len(kinds) == 1 else "string" if kinds else "null"


def _array(shape: Shape, values: list[Any]) -> pa.Array:
    """An array of picked values that have one signature."""
    if isinstance(shape, Leaf):
        tag = _common(tuple(map(_tag, values)))
        if tag in ("string", "numeral"):
            values = [None if v is None else v if isinstance(v, str) else json.dumps(v) for v in values]
        return pa.array(values, _arrow_type(tag))
    if isinstance(shape, ListOf):
        lengths = [len(value or ()) for value in values]
        flat = _array(shape.element, [element for value in values for element in value or ()])
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
        return pa.ListArray.from_arrays(offsets, flat, mask=pa.array([value is None for value in values]))
    get = partial(_field, values)
    parts = {name: _array(part, get(name)) for name, part in shape.fields.items()}
    return _struct(parts, pa.array([value is None for value in values], pa.bool_()))


def _field(values: list[Any], name: str) -> list[Any]:
    return [None if value is None else value[name] for value in values]
