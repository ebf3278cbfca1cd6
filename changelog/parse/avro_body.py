"""Reads Avro bodies of one schema into Arrow arrays, all bodies at once.

Avro has no offsets: a field begins where the field before it ends. So each body has a cursor that walks through the
schema, and each step is a NumPy operation on all cursors: read a number, move on. If a body is broken, it is marked,
and its cursor stays within the body, so that the other bodies are read correctly. A reader of container files can't do
this: in a container, a body that is too short would shift all bodies behind it.

Fields that aren't wanted are skipped.
"""

from array import array as Packed
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from changelog.parse.avro_schema import Node
from changelog.values.encoded import is_utf8

Want: TypeAlias = "bool | Mapping[str, Want]"
"""What to read of a value: True is all, False is nothing, and a mapping names the fields of a record to read."""

_Ints: TypeAlias = npt.NDArray[np.int64]
_Bools: TypeAlias = npt.NDArray[np.bool_]

_PADDING = 16  # bytes after the last body, so that a look-ahead needs no check
_MAX_VARINT = 10
_HIGH_BITS = np.uint64(0x8080808080808080)
_MOST_PIECES = 4096
_WIDTHS = {"boolean": 1, "float": 4, "double": 8}
_SCANNED = ("int", "long", "enum", "fixed", *_WIDTHS)
"""Kinds whose values are found without reading those before them: by their width, or by the last byte of each."""
_FEW = 32
"""Fewer bodies walk alone: by then a step of NumPy takes as long as as many steps of Python."""
_MANY = 1024
"""Arrays of so many scanned items are read alone, however many bodies there are."""
_LONG = 64
_WINDOW = 1024
_MAX_DEPTH = 64  # of skipped values, since their schema may be recursive; other schemas are less deep


def read_bodies(schema: Node, values: pa.BinaryArray, skip: int, want: Want) -> tuple[pa.Array, _Bools]:
    """Read the wanted part of each body.

    :param values: binary without nulls. Each body begins at byte `skip` of its value and ends with the value.
    :return: an array of type `arrow_type(schema, want)`, and a mask of the bodies that could be read. Both are as long
        as `values`. The array's values for the other bodies have no meaning.
    """
    reader = _Bodies(values, skip)
    rows = np.arange(len(values), dtype=np.int64)
    array, at = reader.read(schema, rows, reader.begin, want, 0)
    reader.reject(rows, at != reader.end)
    assert array is not None
    return array, ~reader.bad


def arrow_type(schema: Node, want: Want) -> pa.DataType:
    """The Arrow type of the wanted part.

    :raises UnsupportedSchemaError: no Arrow type fits a wanted field.
    """
    node = schema.value
    if isinstance(want, Mapping) and node.kind == "record":
        return pa.struct([(name, arrow_type(node.fields[name], part)) for name, part in want.items()])
    return node.arrow()


class _Bodies:
    """The bytes of all bodies, the bounds of the cursors, and a mask of the broken bodies."""

    def __init__(self, values: pa.BinaryArray, skip: int) -> None:
        offsets = np.frombuffer(values.buffers()[1], np.int32, len(values) + 1, values.offset * 4).astype(np.int64)
        used = values.buffers()[2]
        self.data = np.zeros(int(offsets[-1] - offsets[0]) + _PADDING, np.uint8)
        if used is not None:
            self.data[:-_PADDING] = np.frombuffer(used, np.uint8)[offsets[0] : offsets[-1]]
        # entry i is the 64-bit word that begins at byte i
        self._words = np.ndarray(len(self.data) - 7, "<u8", self.data, strides=(1,))
        self._buffer = pa.py_buffer(self.data)
        self.bytes = self.data.data
        self.end = offsets[1:] - offsets[0]
        self.begin = np.minimum(offsets[:-1] - offsets[0] + skip, self.end)
        self.bad = np.zeros(len(values), np.bool_)

    def reject(self, rows: _Ints, broken: _Bools) -> None:
        self.bad[rows[broken]] = True

    def read(self, node: Node, rows: _Ints, at: _Ints, want: Want, depth: int) -> tuple[pa.Array | None, _Ints]:
        """Read one value for each of `rows`.

        :param rows: numbers of bodies, ascending.
        :param at: the cursors of these bodies.
        :return: the values (None if they aren't wanted), and the new cursors.
        """
        if depth > _MAX_DEPTH and want is False:
            self.bad[rows] = True
            return None, at
        match node.kind:
            case "record":
                return self._record(node, rows, at, want, depth)
            case "union":
                return self._union(node, rows, at, want, depth)
            case "array" | "map":
                return self._items(node, rows, at, want, depth)
            case "string" | "bytes":
                size, at = self._long(rows, at)
                return self._bytes(rows, at, size, want, is_text=node.kind == "string")
            case "fixed":
                return self._bytes(rows, at, np.full(len(rows), node.size, np.int64), want)
            case "null":
                return (pa.nulls(len(rows)) if want else None), at
            case "enum":
                index, at = self._long(rows, at)
                self.reject(rows, (index < 0) | (index >= len(node.symbols)))
                index[self.bad[rows]] = 0
                return (pa.array(node.symbols, pa.string()).take(pa.array(index)) if want else None), at
            case "long":
                number, at = self._long(rows, at)
                return (pa.array(number) if want else None), at
            case "int":
                number, at = self._long(rows, at)
                self.reject(rows, (number < -(2**31)) | (number >= 2**31))
                return (pa.array(number.astype(np.int32)) if want else None), at
            case "boolean":
                byte, at = self._fixed_width(rows, at, np.dtype("u1"))
                self.reject(rows, byte > 1)
                return (pa.array(byte == 1) if want else None), at
            case "float":
                single, at = self._fixed_width(rows, at, np.dtype("<f4"))
                return (pa.array(single) if want else None), at
            case "double":
                double, at = self._fixed_width(rows, at, np.dtype("<f8"))
                return (pa.array(double) if want else None), at
        raise AssertionError(node.kind)

    def _record(self, node: Node, rows: _Ints, at: _Ints, want: Want, depth: int) -> tuple[pa.Array | None, _Ints]:
        found: dict[str, pa.Array] = {}
        for name, child in node.fields.items():
            part = want.get(name, False) if isinstance(want, Mapping) else want
            array, at = self.read(child, rows, at, part, depth + 1)
            if array is not None:
                found[name] = array
        if want is False:
            return None, at
        names = list(want) if isinstance(want, Mapping) else list(node.fields)
        if not names:
            return pa.array([{}] * len(rows), pa.struct([])), at
        return pa.StructArray.from_arrays([found[name] for name in names], names), at

    def _union(self, node: Node, rows: _Ints, at: _Ints, want: Want, depth: int) -> tuple[pa.Array | None, _Ints]:
        branch, at = self._long(rows, at)
        self.reject(rows, (branch < 0) | (branch >= len(node.branches)))
        at = at.copy()
        value: tuple[pa.Array, _Ints] | None = None
        for number, child in enumerate(node.branches):
            # a broken body's cursor stays where it is: it would choose the same branch of a recursive schema for ever
            chosen = np.flatnonzero((branch == number) & ~self.bad[rows])
            is_wanted = child is node.value
            if len(chosen) or (want is not False and is_wanted):
                array, at[chosen] = self.read(child, rows[chosen], at[chosen], want if is_wanted else False, depth)
                if is_wanted and array is not None:
                    value = array, chosen
        if value is None:
            return None, at
        array, chosen = value
        if len(chosen) == len(rows):
            return array, at
        index = np.zeros(len(rows), np.int64)
        index[chosen] = np.arange(len(chosen))
        missing = np.ones(len(rows), np.bool_)
        missing[chosen] = False
        return array.take(pa.array(index, mask=missing)), at

    def _items(self, node: Node, rows: _Ints, at: _Ints, want: Want, depth: int) -> tuple[pa.Array | None, _Ints]:
        """Read arrays or maps. They are blocks of items, and the last block is empty.

        The k-th items of all bodies are read together. Such a step takes nearly as long for one body as for a hundred.
        So where few bodies are left, each walks alone to the end of its array, and what they find is read together.
        """
        at = at.copy()
        found = _Items()
        is_scanned = node.kind == "array" and node.item.kind in _SCANNED
        active = np.arange(len(rows))
        while len(active) >= _FEW:
            left, at[active] = self._long(rows[active], at[active])
            sized = np.flatnonzero(left < 0)
            size, at[active[sized]] = self._long(rows[active[sized]], at[active[sized]])
            # the absolute value of the smallest int64 is negative: it is the number itself
            left = np.abs(left)
            self.reject(rows[active], (left < 0) | (left > self.end[rows[active]] - at[active]))
            going = left > 0
            if want is False:
                _, at[active[sized]] = self._bytes(rows[active[sized]], at[active[sized]], size, False)
                left[sized] = 0
            going &= ~self.bad[rows[active]]
            active, left = active[going], left[going]
            many = is_scanned & (left >= _MANY)
            beside = (left > 0) & ~many
            now, remaining = active[beside], left[beside]
            while len(now) >= _FEW:
                at[now] = self._entries(node, rows, now, at[now], want, depth, found)
                going = (remaining > 1) & ~self.bad[rows[now]]
                now, remaining = now[going], remaining[going] - 1
            alone, left = np.concatenate([active[many], now]), np.concatenate([left[many], remaining])
            if len(alone):
                order = np.argsort(alone)
                alone, left = alone[order], left[order]
                at[alone] = self._rest(node, rows, alone, at[alone], left, want, depth, found)
                active = np.setdiff1d(active, alone)
            active = active[~self.bad[rows[active]]]
        at[active] = self._rest(node, rows, active, at[active], np.zeros_like(active), want, depth, found)
        if want is False:
            return None, at
        return self._lists(node, len(rows), found), at

    def _rest(
        self, node: Node, rows: _Ints, lists: _Ints, at: _Ints, left: _Ints, want: Want, depth: int, found: "_Items"
    ) -> _Ints:
        """Read some arrays or maps to their ends, one after the other.

        :param lists: their numbers, ascending: list i is of the body `rows[i]`.
        :param at: the cursors.
        :param left: how many items are left of the block in which each cursor is. Where 0, a block begins.
        :return: the new cursors.
        """
        begins: Packed[int] | None = None if want is False else Packed("q")
        counts = np.zeros(len(lists), np.int64)
        after = at.copy()
        for number, (row, cursor, count) in enumerate(zip(rows[lists], at.tolist(), left.tolist(), strict=True)):
            if self.bad[row]:  # its cursor may be anywhere
                continue
            before = len(begins or ())
            try:
                after[number] = _Walk(self, int(row)).items(node, cursor, count, depth, begins)
            except _BrokenError:
                self.bad[row] = True
                if begins is not None:
                    del begins[before:]
            counts[number] = len(begins or ()) - before
        if begins:
            owners = np.repeat(lists, counts)
            self._entries(node, rows, owners, np.frombuffer(begins, np.int64), want, depth, found)
        return after

    def _entries(
        self, node: Node, rows: _Ints, lists: _Ints, at: _Ints, want: Want, depth: int, found: "_Items"
    ) -> _Ints:
        """Read one item for each of `lists`, which may have a list several times."""
        key = None
        if node.kind == "map":
            key, at = self.read(_STRING, rows[lists], at, want is not False, depth + 1)
        item, at = self.read(node.item, rows[lists], at, want is not False, depth + 1)
        if item is not None:
            found.add(key, item, lists)
        return at

    def _lists(self, node: Node, count: int, found: "_Items") -> pa.Array:
        """`count` lists or maps, made of items."""
        owner = np.concatenate([np.zeros(0, np.int64), *found.lists])
        order = pa.array(np.argsort(owner, kind="stable"))
        offsets = np.zeros(count + 1, np.int32)
        offsets[1:] = np.cumsum(np.bincount(owner, minlength=count))
        child = pa.chunked_array(found.items, node.item.arrow()).combine_chunks().take(order)
        if node.kind == "map":
            names = pa.chunked_array(found.keys, pa.string()).combine_chunks().take(order)
            return pa.MapArray.from_arrays(pa.array(offsets), names, child)
        if node.is_entries:
            return pa.MapArray.from_arrays(pa.array(offsets), child.field("key"), child.field("value"))
        return pa.ListArray.from_arrays(pa.array(offsets), child)

    def _bytes(
        self, rows: _Ints, at: _Ints, size: _Ints, want: Want, is_text: bool = False
    ) -> tuple[pa.Array | None, _Ints]:
        size = np.where((size < 0) | (size > self.end[rows] - at), -1, size)
        self.reject(rows, size < 0)
        end = at + np.maximum(size, 0)
        if want is False:
            return None, end
        # pieces are, in turn, a value and the bytes between two values; the bounds of all pieces ascend
        bounds = np.stack([at, end], axis=1).ravel().astype(np.int32)
        buffers = [None, pa.py_buffer(bounds), self._buffer]
        pieces = pa.BinaryArray.from_buffers(pa.binary(), max(len(bounds) - 1, 0), buffers)
        array = pieces.take(pa.array(np.arange(0, len(bounds), 2)))
        return (self._text(rows, array) if is_text else array), end

    def _text(self, rows: _Ints, array: pa.Array) -> pa.Array:
        try:
            return array.cast(pa.string())
        except pa.ArrowInvalid:
            broken = np.array([not is_utf8(value.as_py()) for value in array], np.bool_)
            self.reject(rows, broken)
            return pc.if_else(pa.array(broken), b"", array).cast(pa.string())

    def _fixed_width(self, rows: _Ints, at: _Ints, dtype: np.dtype[Any]) -> tuple[npt.NDArray[Any], _Ints]:
        """Read a little-endian number for each of `rows`."""
        found = self.data[at[:, None] + np.arange(dtype.itemsize)].view(dtype).reshape(len(rows))
        return found, self._move(rows, at + dtype.itemsize)

    def _long(self, rows: _Ints, at: _Ints) -> tuple[_Ints, _Ints]:
        """Read a zigzag-coded number for each of `rows`. Each byte has seven bits of the number, the lowest bits first.
        The eighth bit says that another byte follows.
        """
        byte = self.data[at]
        value = byte.astype(np.uint64)
        after = at + 1
        more = np.flatnonzero(byte & 0x80)
        if len(more):
            value[more], size = self._groups(rows[more], at[more])
            after[more] = at[more] + size
        number = (value >> np.uint64(1)).astype(np.int64) ^ -(value & np.uint64(1)).astype(np.int64)
        return number, self._move(rows, after)

    def _groups(self, rows: _Ints, at: _Ints) -> tuple[npt.NDArray[np.uint64], _Ints]:
        """The groups of seven bits put together, and the number of groups. The first eight bytes are one word, and are
        handled in one step.
        """
        word = self._words[at]
        stop = ~word & _HIGH_BITS
        stop &= ~stop + np.uint64(1)  # keep the lowest bit: it is in the last byte; 0 if there are more than 8 bytes
        below = stop - np.uint64(1)
        size = np.bitwise_count(below).astype(np.int64) // 8 + 1
        value = word & below & ~_HIGH_BITS
        for width, low in ((1, 0x007F007F007F007F), (2, 0x00003FFF00003FFF), (4, 0x000000000FFFFFFF)):
            # each pair of neighbouring groups becomes one group of twice the width
            value = (value & np.uint64(low)) | ((value >> np.uint64(width)) & np.uint64(low << (7 * width)))
        longer = np.flatnonzero(stop == 0)
        for place in range(8, _MAX_VARINT):
            if not len(longer):
                break
            byte = self.data[at[longer] + place]
            value[longer] |= (byte & 0x7F).astype(np.uint64) << np.uint64(7 * place)
            size[longer] = place + 1
            if place == _MAX_VARINT - 1:  # the tenth byte has one bit of the number, and no byte may follow
                self.reject(rows[longer], byte > 1)
            longer = longer[(byte & 0x80) != 0]
        return value, size

    def _move(self, rows: _Ints, at: _Ints) -> _Ints:
        """The new cursors. A cursor that would pass the end of its body stays at the end, and the body is marked."""
        end = self.end[rows]
        self.reject(rows, at > end)
        moved: _Ints = np.minimum(at, end)
        return moved


_STRING = Node("string")


class _Items:
    """Items of lists or maps, in pieces. Each list's items are in order. `lists` has the number of the list that each
    item belongs to.
    """

    def __init__(self) -> None:
        self.keys: list[pa.Array] = []
        self.items: list[pa.Array] = []
        self.lists: list[_Ints] = []
        self._loose = 0

    def add(self, key: pa.Array | None, item: pa.Array, lists: _Ints) -> None:
        if key is not None:
            self.keys.append(key)
        self.items.append(item)
        self.lists.append(lists)
        self._loose += 1
        if self._loose == _MOST_PIECES:
            # a message may have a million items, and an array for each would take 1 GB
            for parts in (self.keys, self.items):
                parts[-_MOST_PIECES:] = [pa.concat_arrays(parts[-_MOST_PIECES:])] if parts else []
            self.lists[-_MOST_PIECES:] = [np.concatenate(self.lists[-_MOST_PIECES:])]
            self._loose = 0


class _BrokenError(Exception):
    """The body doesn't fit the schema."""


class _Walk:
    """A cursor that walks alone, without NumPy where it would take a step for each item. What it accepts and what it
    refuses is as `_Bodies.read` does it for values that aren't wanted.

    :raises _BrokenError: from all methods: the body doesn't fit the schema.
    """

    def __init__(self, bodies: _Bodies, row: int) -> None:
        self._bodies = bodies
        self._row = row
        self._bytes = bodies.bytes
        self._end = int(bodies.end[row])

    def items(self, node: Node, at: int, left: int, depth: int, begins: "Packed[int] | None") -> int:
        """Walk to the end of an array or a map.

        :param left: items that are left of the block; 0 if a block begins.
        :param begins: gets the places where the items begin. None if they aren't wanted.
        :return: the new cursor, as in all methods.
        """
        item = node.item
        while True:
            if node.kind == "array" and item.kind in _SCANNED and left >= _LONG:
                places, at = self._scanned(item, at, left, depth + 1)
                if begins is not None:
                    begins.frombytes(places.tobytes())
            else:
                for _ in range(left):
                    if begins is not None:
                        begins.append(at)
                    if node.kind == "map":
                        at = self._value(_STRING, at, depth + 1)
                    at = self._value(item, at, depth + 1)
            left, at = self._long(at)
            if left < 0:
                size, at = self._long(at)
                left = self._fitting(-left, at)
                if begins is None:
                    at += self._fitting(size, at)
                    left = 0
            elif left == 0:
                return at
            self._fitting(left, at)

    def _value(self, node: Node, at: int, depth: int) -> int:
        if depth > _MAX_DEPTH:
            raise _BrokenError
        kind = node.kind
        if kind == "record":
            for child in node.fields.values():
                at = self._value(child, at, depth + 1)
            return at
        if kind in ("array", "map"):
            return self.items(node, at, 0, depth, None)
        if kind == "null":
            return at
        if kind in _WIDTHS or kind == "fixed":
            width = _WIDTHS.get(kind, node.size)
            self._fitting(width, at)
            if kind == "boolean" and self._bytes[at] > 1:
                raise _BrokenError
            return at + width
        number, at = self._long(at)
        if kind == "union":
            if not 0 <= number < len(node.branches):
                raise _BrokenError
            return self._value(node.branches[number], at, depth)
        if kind in ("string", "bytes"):
            return at + self._fitting(number, at)
        if (kind == "int" and not -(2**31) <= number < 2**31) or (
            kind == "enum" and not 0 <= number < len(node.symbols)
        ):
            raise _BrokenError
        return at

    def _scanned(self, node: Node, at: int, count: int, depth: int) -> tuple[_Ints, int]:
        """Where each of `count` numbers begins. They are found by looking at all bytes at once."""
        if node.kind in _WIDTHS or node.kind == "fixed":
            width = _WIDTHS.get(node.kind, node.size)
            after = at + self._fitting(count * width, at)
            begins = np.arange(at, after, width)
        else:
            ends = self._ends(at, count)
            begins, after = np.concatenate([[at], ends[:-1]]), int(ends[-1])
        self._bodies.read(node, np.full(count, self._row), begins, False, depth)
        if self._bodies.bad[self._row]:
            raise _BrokenError
        return begins, after

    def _ends(self, at: int, count: int) -> _Ints:
        """Where each of `count` varints ends: behind a byte without the eighth bit."""
        found: list[_Ints] = []
        while count:
            window = self._bodies.data[at : min(at + max(count, _WINDOW), self._end)]
            if not len(window):
                raise _BrokenError
            found.append(at + 1 + np.flatnonzero(window < 0x80)[:count])
            at += len(window)
            count -= len(found[-1])
        return np.concatenate(found)

    def _long(self, at: int) -> tuple[int, int]:
        value = 0
        for place in range(_MAX_VARINT):
            if at >= self._end:
                raise _BrokenError
            byte = self._bytes[at]
            at += 1
            value |= (byte & 0x7F) << (7 * place)
            if byte < 0x80:
                if value >= 2**64:
                    raise _BrokenError
                return (value >> 1) ^ -(value & 1), at
        raise _BrokenError

    def _fitting(self, size: int, at: int) -> int:
        """`size`, if so many bytes are left."""
        if not 0 <= size <= self._end - at:
            raise _BrokenError
        return size
