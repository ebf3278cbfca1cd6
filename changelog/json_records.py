"""JSON records to Arrow arrays: whole batches at once where they are alike, one by one where they aren't.

Arrow's JSON reader wants one type for each field and gives up at the first record that has another. So a batch is read
with the likeliest types; where the reader stops, the records before are read, the odd one is taken apart in Python, and
reading goes on behind it. A batch without odd records costs one pass: about 2 us for 700 bytes.

Which record and which field it is about, Arrow says in English only. If the text has another form, the batch is halved
until few records are left, and these are taken apart in Python: slower, with the same result.
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


@dataclass(frozen=True)
class Leaf:
    """A field that isn't looked into.

    :param candidates: Arrow types that its JSON may be read as, the likeliest first: `values.json_candidates`.
    """

    candidates: tuple[pa.DataType, ...]


@dataclass(frozen=True)
class Object:
    """An object of which the named fields are wanted.

    :param watched: other fields of it are reported.
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

    :param record: int64; rows of the input.
    :param values: the wanted fields, a struct array as long as `record`. Missing fields are null. A leaf has one of its
        candidates' types, or, from records that none of them fits: string, int64, bool, `NUMERAL` (a number's text),
        string with JSON text for an object or array, or null if no record has it.
    :param unknown: fields of watched objects that aren't in the shape and have a value, with a guess at their type.
    """

    record: pa.Array
    values: pa.StructArray
    unknown: Mapping[str, WireType] = field(default_factory=dict)


NOT_AN_OBJECT = "the value is not a JSON object"

_CHANGED = re.compile(r"Column\(/?(.*?)\) changed from \w+ to \w+ in row (\d+)")
_ROW = re.compile(r"in row (\d+)")
_PROBE = 16
"""Records looked at to tell a field that is spelled otherwise from now on from a single odd record."""
_FEW = 16
"""Of so few records the odd ones aren't looked for: all are taken apart."""
_SLICE = 1024
"""Records read at a time once a batch turned out to have odd ones: each odd one costs another look at those behind it.
"""
_MOST_ODD = 64
"""With more odd records than this a slice is taken apart."""
_MOST_EXTRA = 2000
"""Fields beyond the shape, all objects together; more are names made of data."""
_DEEP = 100
"""Brackets of a record from which on its depth is looked at: Arrow's inference recurses without a limit."""
_PARSER_DEPTH = 500
_SAMPLE = 100


class JsonReader:
    """Reads records of one shape. Remembers how fields were spelled last.

    :param around: texts to put before and after each record: what is missing of an object.
    """

    def __init__(self, shape: Object, around: tuple[str, str] = ("", "")) -> None:
        self._shape = shape
        self._around = around
        self._watches = _watches(shape)
        self._chosen: dict[str, int] = {}  # path of a leaf -> which candidate; 0 if absent
        self._extra = pa.struct([])  # fields beyond the shape, so that the reader can tell new ones
        self._samples = False  # too many of those: new ones are looked for in some records only

    def read(self, values: pa.Array) -> Iterator[Parsed | Rejected]:
        """The records in `values` (binary or string, no nulls). Whatever isn't a JSON object is rejected."""
        rows = np.arange(len(values))
        try:
            texts = values.cast(pa.string())
        except pa.ArrowInvalid:
            rows = np.flatnonzero([_is_utf8(value) for value in values.to_pylist()])
            texts = values.take(pa.array(rows)).cast(pa.string())
        # so no record can be the rest of the one before
        whole = _is_braced(texts, *self._around)
        if not pc.all(whole).as_py():
            whole = _is_braced(pc.ascii_trim_whitespace(texts), *self._around)
        if not pc.all(whole).as_py():
            texts, rows = texts.filter(whole), rows[whole.to_numpy(zero_copy_only=False)]
        alone: list[int] = np.setdiff1d(np.arange(len(values)), rows).tolist() if len(rows) < len(values) else []
        if len(rows):
            yield from self._segment(texts, rows, alone)
        if alone:
            yield from self._one_by_one(values, alone)

    def _segment(self, texts: pa.Array, rows: Rows, alone: list[int], *, alike: bool = False) -> Iterator[Parsed]:
        """Read what can be read at once. The other rows are appended to `alone`.

        :param alike: an error's text said that these rows can be read at once. If they can't, its row number means
            something else (another release of Arrow, a record of several documents), and isn't believed again.
        """
        learned = False
        respelled: set[tuple[int, str]] = set()
        most = len(alone) + _MOST_ODD
        while len(rows) and len(alone) < most:
            try:
                struct = self._parse(texts)
            except pa.ArrowInvalid as error:
                message = str(error)
            else:
                yield self._parsed(rows, struct, texts)
                return
            if self._watches and not learned:
                # perhaps only a field that the reader hasn't seen before, or saw as null
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
        """Read a field by its next candidate from here on, if that helps the next few records."""
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
        """:raises pa.ArrowInvalid: some record doesn't fit the types, or has a new field and such are watched."""
        schema = pa.schema(list(_with_extra(self._type(self._shape, ""), self._extra)))
        table = self._table(texts, schema, "error" if self._watches and not self._samples else "ignore")
        if table.num_rows != len(texts):
            raise pa.ArrowInvalid("some record has several documents")
        if not table.num_rows:
            return pa.array([], pa.struct(schema))
        try:
            return table.to_struct_array().combine_chunks()
        except IndexError as error:  # Arrow's reader makes [null, null] a list with an element too few
            raise pa.ArrowInvalid(str(error)) from None

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
        """Take note of fields beyond the shape. Whether there is something new to try."""
        if self._samples:
            return False
        known = self._extra
        shallow = texts.filter(_is_shallow(texts))
        if not len(shallow):
            return False
        try:
            table = self._table(shallow, pa.schema(list(self._type(self._shape, ""))), "infer")
            self._extra = _merged(known, _without_timestamps(pa.struct(list(table.schema))))
        except (pa.ArrowInvalid, RecursionError):
            return False
        if _size(self._extra) > _MOST_EXTRA:
            self._extra, self._samples = pa.struct([]), True
            return True
        return bool(self._extra != known)

    def _parsed(self, rows: Rows, struct: pa.StructArray, texts: pa.Array) -> Parsed:
        unknown: dict[str, WireType] = {}
        if self._samples:
            for text in texts[:_SAMPLE].to_pylist():
                unknown = _both(unknown, _unknown_of(self._shape, parse(self._wrapped(text))))
        elif self._watches:
            unknown = _unknown(self._shape, struct)
        if self._watches:
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
            unknown = _both(unknown, seen)
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
    """A JSON document as Python values; numbers other than 64-bit integers as `Numeral`.

    :raises ValueError: it is none, or it isn't valid Unicode.
    :raises RecursionError: it is nested too deeply.
    """
    if isinstance(text, bytes):
        text = text.decode()
    document = json.loads(text, parse_float=Numeral, parse_int=_integer, parse_constant=Numeral)
    if "\\u" in text:
        compact(document).encode()  # the escape of a lone surrogate is no text
    return document


def compact(value: Any) -> str:
    """What `parse` gave, as JSON without spaces; numbers are spelled as they were."""
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


def _is_utf8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _is_shallow(texts: pa.Array) -> pa.Array:
    """Which texts are nested no deeper than Python's parser goes, about a thousand levels."""
    brackets = pc.add(pc.count_substring(texts, "["), pc.count_substring(texts, "{"))
    shallow = pc.less(brackets, _DEEP).to_numpy(zero_copy_only=False).copy()
    for row in np.flatnonzero(~shallow):
        try:
            json.loads(texts[int(row)].as_py())
            shallow[row] = True
        except RecursionError:
            pass
        except ValueError:
            # cut out of an event: what is missing around it doesn't matter, its depth does
            shallow[row] = brackets[int(row)].as_py() < _PARSER_DEPTH
    return pa.array(shallow)


def _size(dtype: pa.DataType) -> int:
    """Leaves of a type."""
    if pa.types.is_struct(dtype):
        return sum(_size(part.type) for part in dtype)
    return _size(dtype.value_type) if pa.types.is_list(dtype) else 1


def _is_braced(texts: pa.Array, before: str, after: str) -> pa.Array:
    starts = pc.starts_with(texts, "{") if not before else True
    ends = pc.ends_with(texts, "}") if not after else True
    return pc.and_(pc.and_(starts, ends), pa.repeat(True, len(texts)))


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
    """`wanted`, and the fields that only `extra` has."""
    if pa.types.is_list(wanted) and pa.types.is_list(extra):
        return pa.list_(_with_extra(wanted.value_type, extra.value_type))
    if not (pa.types.is_struct(wanted) and pa.types.is_struct(extra)):
        return wanted
    fields = {f.name: _with_extra(f.type, extra.field(f.name).type) if _has(extra, f.name) else f.type for f in wanted}
    fields |= {f.name: f.type for f in extra if f.name not in fields}
    return pa.struct(list(fields.items()))


def _merged(old: pa.DataType, new: pa.DataType) -> pa.DataType:
    """All fields of both. Where the types differ the new one holds, unless it knows of nulls only."""
    if pa.types.is_null(new):
        return old
    if pa.types.is_list(old) and pa.types.is_list(new):
        return pa.list_(_merged(old.value_type, new.value_type))
    if not (pa.types.is_struct(old) and pa.types.is_struct(new)):
        return new
    fields = {f.name: f.type for f in old}
    fields |= {f.name: _merged(fields[f.name], f.type) if f.name in fields else f.type for f in new}
    return pa.struct(list(fields.items()))


def _without_timestamps(dtype: pa.DataType) -> pa.DataType:
    """Arrow guesses timestamps in texts; the next text may be none."""
    if pa.types.is_struct(dtype):
        return pa.struct([(f.name, _without_timestamps(f.type)) for f in dtype])
    if pa.types.is_list(dtype):
        return pa.list_(_without_timestamps(dtype.value_type))
    return pa.string() if pa.types.is_timestamp(dtype) else dtype


def _has(struct: pa.DataType, name: str) -> bool:
    return bool(struct.get_field_index(name) >= 0)


def _only(shape: Shape, array: pa.Array) -> pa.Array:
    """Without the fields beyond the shape."""
    if isinstance(shape, Leaf):
        return array
    if isinstance(shape, ListOf):
        return pa.ListArray.from_arrays(array.offsets, _only(shape.element, array.values), mask=_nulls(array))
    parts = {name: _only(part, array.field(name)) for name, part in shape.fields.items()}
    return _struct(parts, array.is_null())


def _struct(parts: Mapping[str, pa.Array], nulls: pa.Array) -> pa.StructArray:
    if not parts:  # of which Arrow makes an array of length 0
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
            found = _both(found, _unknown(shape.fields[part.name], array.field(part.name)))
        elif shape.watched and array.field(part.name).null_count < len(array):
            found[part.name] = _text_if_large(array.field(part.name)) or _guess(part.type)
    return found


def _unknown_of(shape: Shape, document: Any) -> dict[str, WireType]:
    if isinstance(shape, ListOf):
        found: dict[str, WireType] = {}
        for element in document if isinstance(document, list) else ():
            found = _both(found, _unknown_of(shape.element, element))
        return found
    if isinstance(shape, Leaf) or not isinstance(document, dict):
        return {}
    found = {}
    for name, value in document.items():
        if name in shape.fields:
            found = _both(found, _unknown_of(shape.fields[name], value))
        elif shape.watched and value is not None:
            is_float = isinstance(value, Numeral) and not value.lstrip("-").isdigit()
            found[name] = _guess(pa.float64() if is_float else _arrow_type(_tag(value)))
    return found


def _both(first: dict[str, WireType], second: dict[str, WireType]) -> dict[str, WireType]:
    """The fields of both; what has several types is a number if all are, else text."""
    result = dict(first)
    for name, guess in second.items():
        known = result.setdefault(name, guess)
        if known != guess:
            numbers = {known.kind, guess.kind} <= {"int64", "double"}
            result[name] = WireType("double" if numbers else "string")
    return result


def _text_if_large(values: pa.Array) -> WireType | None:
    """Arrow reads integers of more than 64 bits as floats, and rounds them. As text they stay what they are."""
    if not pa.types.is_float64(values.type) or not pc.any(pc.greater_equal(pc.abs(values), 2.0**63)).as_py():
        return None
    return WireType("string")


def _guess(dtype: pa.DataType) -> WireType:
    kinds = {pa.int64(): "int64", pa.float64(): "double", pa.bool_(): "boolean", pa.string(): "string"}
    return WireType(kinds.get(dtype, ""))


# Records one by one: picked values, then their types, then arrays of the records that have the same types.


class _MisplacedError(Exception):
    """Something else stands where an object or an array of objects is wanted."""


def _pick(shape: Shape, value: Any, complaint: str) -> Any:
    """The wanted part of a document; objects and arrays at leaves as JSON text.

    :raises _MisplacedError: with `complaint`.
    """
    if isinstance(shape, Leaf):
        return _Json(compact(value)) if isinstance(value, dict | list) else value
    if isinstance(shape, ListOf):
        if not isinstance(value, list):
            raise _MisplacedError(complaint)
        return [_pick(shape.element, element, complaint) for element in value]
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
    """The types of a picked value's leaves. Of a list, those that hold all its elements."""
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
    """Picked values of one signature."""
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
