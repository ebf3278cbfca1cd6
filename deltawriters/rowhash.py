"""Hash of a row's content, for all column types. It decides between changes that have equal key, order and kind, and
decides the same way in every replay.
"""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from deltawriters.keyindex import low_hash

Hashes = npt.NDArray[np.uint64]

_FACTOR = np.uint64(0x9E3779B97F4A7C15)
"""2^64 divided by the golden ratio, as an odd number. Different columns and list elements are multiplied by different
powers of it, so their order counts.
"""

_FIRST_BYTES = np.array([(1 << 8 * count) - 1 for count in range(8)], np.uint64)
_3, _7, _64 = np.uint64(3), np.uint64(7), np.uint64(64)
_LONG = 1024
"""Bytes of the longest value that is hashed together with others."""
_BLOCK = 16_384
"""This many rows are hashed at a time, so that their intermediate columns stay in the processor's cache."""


def row_hash(columns: Sequence[pa.Array]) -> npt.NDArray[np.int64]:
    """Hash n rows, vectorised. The hash is stored nowhere, so a release may change it.

    :param columns: at least one column, equal length n; nulls and nested types are allowed.
    :return: n hashes.
    """
    return _rows(columns).view(np.int64)


def _rows(columns: Sequence[pa.Array]) -> Hashes:
    result = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        result = _mixed(result * _FACTOR + _column(column))
    return result


def _column(column: pa.Array) -> Hashes:
    """The hash of each value; 0 for null."""
    column = column.storage if isinstance(column, pa.ExtensionArray) else column
    if not column.null_count:
        return _mixed(_values(column) + _FACTOR)
    result = np.zeros(len(column), np.uint64)
    valid = column.is_valid().to_numpy(zero_copy_only=False)
    if valid.any():
        result[valid] = _mixed(_values(column.drop_null()) + _FACTOR)
    return result


def _values(column: pa.Array) -> Hashes:
    dtype = column.type
    if pa.types.is_struct(dtype):
        return _rows(column.flatten()) if dtype.num_fields else np.zeros(len(column), np.uint64)
    if pa.types.is_map(dtype):
        column = column.cast(pa.list_(pa.struct([("key", dtype.key_type), ("value", dtype.item_type)])))
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        lengths = pc.list_value_length(column).to_numpy().astype(np.int64)
        starts = np.cumsum(lengths) - lengths
        parents = np.repeat(np.arange(len(lengths)), lengths)
        places = (np.arange(len(parents)) - starts[parents]).astype(np.uint64)
        result: Hashes = lengths.astype(np.uint64)
        np.add.at(result, parents, _column(column.flatten()) * np.power(_FACTOR, places))
        return result
    if pa.types.is_floating(dtype):
        column = column.view(pa.int32() if dtype.bit_width == 32 else pa.int64())
    elif pa.types.is_decimal128(dtype):
        words = np.frombuffer(column.buffers()[1], "<u8")[2 * column.offset : 2 * (column.offset + len(column))]
        return words[::2] ^ _mixed(words[1::2])
    elif pa.types.is_fixed_size_binary(dtype):
        column = column.cast(pa.binary())
    if pa.types.is_string(column.type) or pa.types.is_binary(column.type):
        result = np.empty(len(column), np.uint64)
        for start in range(0, len(column), _BLOCK):
            result[start : start + _BLOCK] = _texts(column.slice(start, _BLOCK))
        return result
    return low_hash([column])


def _texts(column: pa.Array) -> Hashes:
    """Hash strings or binaries. A long one is hashed by itself: `_bytes` takes a step for each word of the longest."""
    is_long = pc.greater(pc.binary_length(column), _LONG)
    if not pc.any(is_long).as_py():
        return _bytes(column)
    result, long = np.empty(len(column), np.uint64), is_long.to_numpy(zero_copy_only=False)
    result[long] = [_digest(value) for value in column.filter(is_long)]
    if not long.all():
        result[~long] = _bytes(column.filter(pc.invert(is_long)))
    return result


def _digest(value: pa.Scalar) -> int:
    return int.from_bytes(blake2b(value.as_buffer(), digest_size=8).digest(), "little")


def _bytes(column: pa.Array) -> Hashes:
    """Hash strings or binaries, eight bytes at a time. The longest values come first, so the values that have a next
    word are always the first ones.
    """
    offsets = np.frombuffer(column.buffers()[1], "<i4")[column.offset : column.offset + len(column) + 1]
    begin, end = int(offsets[0]), int(offsets[-1])
    lengths = np.diff(offsets)
    longest = int(lengths.max())
    # numpy sorts 16 bits by radix
    order = np.argsort((longest - lengths).astype(np.uint16 if longest < 1 << 16 else np.int64), kind="stable")
    ordered = lengths[order]
    starts = (offsets[:-1] - begin)[order].astype(np.int64)
    padded = np.zeros(8 * ((end - begin) // 8 + 2), np.uint8)
    padded[: end - begin] = np.frombuffer(column.buffers()[2] or b"", np.uint8)[begin:end]
    # A value may begin anywhere in a word, and numpy reads unaligned words slowly. So each word of a value is put
    # together from two aligned words.
    aligned = padded.view("<u8")
    at_word, low_bits = starts >> 3, (starts.astype(np.uint64) & _7) << _3
    high_bits = _64 - low_bits
    current = aligned[at_word]
    state = ordered.astype(np.uint64)
    for number, at in enumerate(range(0, int(ordered[0]), 8), start=1):
        rows = len(ordered) - int(np.searchsorted(ordered[::-1], at, side="right"))
        following = aligned[at_word[:rows] + number]
        # a shift by 64 bits gives 0 in numpy (in C it is undefined)
        word = (current[:rows] >> low_bits[:rows]) | (following << high_bits[:rows])
        current = following
        whole = len(ordered) - int(np.searchsorted(ordered[::-1], at + 8))
        word[whole:] &= _FIRST_BYTES[ordered[whole:rows] - at]
        mixed = (state[:rows] ^ word) * _FACTOR
        state[:rows] = mixed ^ (mixed >> np.uint64(29))
    result = np.empty_like(state)
    result[order] = state
    return result


def _mixed(hashes: Hashes) -> Hashes:
    """Spread every bit over all others (the finalizer of splitmix64)."""
    hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Hashes = hashes ^ (hashes >> np.uint64(31))
    return mixed
