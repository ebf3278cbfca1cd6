"""The two halves of the 128-bit key hash. They are stored, so they must never change: a change needs a new encoding id.

A key tuple is encoded as a sequence of 32-bit words. Different keys of the same column types have different words. A
fixed-width column is encoded as its bytes, little-endian. A string or binary is encoded as its length in bytes, then
its bytes, padded with zeros. The hash is the polynomial with the coefficients 1, word, word, ..., evaluated at a base
modulo the Mersenne prime p = 2^61 - 1. Two keys of at most n words are two polynomials of degree at most n. Their
difference has at most n roots, so they collide at a random base with a chance of at most n/2^61 (Schwartz-Zippel).
Each half has a base of its own, so a pair of keys collides with a chance of at most n^2/2^122. 10^8 keys and 10^9
probes make 10^17 pairs, so the chance is below 10^-18 for keys of a few words.

Each index draws its two bases at random, so nobody can make keys that collide in it.
"""

import secrets
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Hashes = npt.NDArray[np.uint64]

PRIME = 2**61 - 1
BASE = 0x043F6A8885A308D3
"""The first 64 fractional bits of pi modulo 2^61. These bits are as good as random, and anybody can see that nobody
chose them to collide. The number happens to be a primitive root. It is published, so no index of a table has it:
somebody can make keys that collide at this base.
"""

_PRIME, _LOW_32, _LOW_29 = np.uint64(PRIME), np.uint64(2**32 - 1), np.uint64(2**29 - 1)
_29, _32, _61 = np.uint64(29), np.uint64(32), np.uint64(61)
_LAST_WORD_MASK = np.array([0xFFFFFFFF, 0xFF, 0xFFFF, 0xFFFFFF], np.uint32)
"""By length modulo 4: the bytes of the last word that belong to the value."""
_BLOCK = 16_384
"""This many rows are hashed at a time, so that their intermediate columns stay in the processor's cache."""


class _Base(NamedTuple):
    """A base below 2^61, split at bit 32."""

    high: np.uint64
    low: np.uint64
    eight_high: np.uint64

    @classmethod
    def of(cls, base: int) -> "_Base":
        return cls(np.uint64(base >> 32), np.uint64(base & 0xFFFFFFFF), np.uint64(8 * (base >> 32)))


_CLOSED = np.uint64(0x9E3779B97F4A7C15)


def of_deletes(low: Hashes) -> Hashes:
    """The low hashes under which an index with history remembers deletes beside the keys' rows.

    :param low: low hashes of n keys.
    """
    return low ^ _CLOSED


def of_versions(low: Hashes, orders: pa.BinaryArray, base: int = BASE) -> Hashes:
    """The low hashes under which an index with history has closed versions: each is a key of its own, so that none
    takes another row's place.

    :param low: low hashes of the keys of n versions.
    :param orders: their order values.
    """
    return of_deletes(low) ^ mixed(low_hash([orders], base))


def random_base() -> int:
    """A base for a new index."""
    return secrets.randbelow(PRIME)


def high_hash(columns: Sequence[pa.Array], base: int = BASE) -> Hashes:
    """Hash each row of the key `columns` like `low_hash`, into numbers that are spread evenly over 64 bits: tasks own
    ranges of them.
    """
    return mixed(low_hash(columns, base))


def mixed(hashes: Hashes) -> Hashes:
    """Spread every bit over all others (the finalizer of splitmix64). Different numbers stay different."""
    hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: Hashes = hashes ^ (hashes >> np.uint64(31))
    return result


def low_hash(columns: Sequence[pa.Array], base: int = BASE) -> Hashes:
    """Hash each row of the key `columns`: booleans, integers, dates, times, timestamps, decimals, strings, binaries.

    A single column of up to 64 bits is its own hash, as a sign-extended integer, so two such keys never collide. The
    same value has different hashes in different types (microseconds and nanoseconds, or in a key of several columns
    int32 and int64).

    :param columns: equal length n, no nulls. UUIDs are given as their storage, fixed binary(16).
    :param base: base of the polynomial, below `PRIME`.
    :return: n hashes.
    :raises ValueError: a column has nulls.
    :raises TypeError: a column's type isn't allowed in a key.
    """
    if any(column.null_count for column in columns):
        raise ValueError("key columns must have no nulls")
    columns = [_plain(column) for column in columns]
    rows = len(columns[0])
    if rows and len(columns) == 1 and _is_fixed(columns[0]) and columns[0].type.bit_width <= 64:
        words = _fixed_words(columns[0])
        return words.view(f"<i{words.shape[1] * 4}")[:, 0].astype(np.int64).view(np.uint64)
    result, parts = np.empty(rows, np.uint64), _Base.of(base)
    for start in range(0, rows, _BLOCK):
        state = np.ones(min(_BLOCK, rows - start), np.uint64)
        for column in columns:
            block = column.slice(start, _BLOCK)
            state = _add_fixed(state, block, parts) if _is_fixed(block) else _add_variable(state, block, parts)
        result[start : start + _BLOCK] = np.where(state >= _PRIME, state - _PRIME, state)
    return result


def distinct(high: Hashes, low: Hashes) -> tuple[npt.NDArray[np.int64], Hashes, Hashes]:
    """Keys without their repeats, by `high`, and for each of n keys its number among them. In the rare case that two
    keys have the same `high`, a key may be there more than once.
    """
    by_high = np.argsort(high, kind="stable")
    high, low = high[by_high], low[by_high]
    is_first = np.ones(len(high), np.bool_)
    is_first[1:] = (high[1:] != high[:-1]) | (low[1:] != low[:-1])
    number = np.empty(len(high), np.int64)
    number[by_high] = np.cumsum(is_first) - 1
    return number, high[is_first], low[is_first]


def _plain(column: pa.Array) -> pa.Array:
    """The same values in a type whose buffers this module reads."""
    dtype = column.type
    if pa.types.is_boolean(dtype) or (pa.types.is_integer(dtype) and dtype.bit_width < 32):
        return column.cast(pa.int32())
    if _is_fixed(column) or pa.types.is_string(dtype) or pa.types.is_binary(dtype):
        return column
    if pa.types.is_large_string(dtype) or pa.types.is_large_binary(dtype):
        return column
    raise TypeError(f"a key column can't be of type {dtype}")


def _is_fixed(column: pa.Array) -> bool:
    dtype = column.type
    return bool(
        pa.types.is_integer(dtype)
        or pa.types.is_temporal(dtype)
        or pa.types.is_decimal128(dtype)
        or (pa.types.is_fixed_size_binary(dtype) and dtype.byte_width == 16)
    )


def _fixed_words(column: pa.Array) -> npt.NDArray[np.uint32]:
    """The bytes of each value as 32-bit words, shape (n, words a value)."""
    words = column.type.bit_width // 32
    values = np.frombuffer(column.buffers()[1], "<u4")
    return values[column.offset * words : (column.offset + len(column)) * words].reshape(-1, words)


def _add_fixed(state: Hashes, column: pa.Array, base: _Base) -> Hashes:
    for word in _fixed_words(column).T:
        state = _add(state, word, base)
    return state


def _add_variable(state: Hashes, column: pa.Array, base: _Base) -> Hashes:
    """Add length and bytes of each value, word by word. The longest values come first, so the values that have a next
    word are always the first ones.
    """
    offsets = _value_offsets(column)
    lengths = np.diff(offsets)
    state = _add(state, lengths, base)
    words = (lengths + 3) // 4
    order = np.argsort(-words, kind="stable")
    shorter_later = -words[order]
    # active[j] rows have more than j words
    active = np.searchsorted(shorter_later, -np.arange(-shorter_later[0] + 1)).tolist()
    if not active[0]:
        return state
    begin, end = int(offsets[0]), int(offsets[-1])
    padded = np.zeros(end - begin + 3, np.uint8)
    padded[:-3] = np.frombuffer(column.buffers()[2], np.uint8)[begin:end]
    word_at: npt.NDArray[np.uint32] = np.ndarray((end - begin,), "<u4", padded, strides=(1,))
    starts = (offsets[:-1] - begin)[order].astype(np.int64)
    mask = _LAST_WORD_MASK[lengths[order] & 3]
    ordered = state[order]
    for j, (rows, longer) in enumerate(pairwise(active)):
        word = word_at[starts[:rows] + 4 * j]
        word[longer:] &= mask[longer:rows]
        ordered[:rows] = _add(ordered[:rows], word, base)
    state[order] = ordered
    return state


def _value_offsets(column: pa.Array) -> npt.NDArray[np.integer]:
    """The n + 1 offsets of a string or binary column: where each of the n values begins in the data buffer, and where
    the last value ends. They are int64 for Arrow's large types, else int32.
    """
    is_large = pa.types.is_large_string(column.type) or pa.types.is_large_binary(column.type)
    offsets = np.frombuffer(column.buffers()[1], "<i8" if is_large else "<i4")
    return offsets[column.offset : column.offset + len(column) + 1]


def _add(state: Hashes, word: npt.NDArray[np.integer], base: _Base) -> Hashes:
    """state * base + word modulo 2^61 - 1, for words below 2^32 and states up to 2^61 + 2. The result is also up to
    2^61 + 2.

    Both factors are split at bit 32, so that no product exceeds 64 bits. Modulo the prime, 2^61 = 1 and 2^64 = 8.
    """
    high, low = state >> _32, state & _LOW_32
    middle = high * base.low + low * base.high
    bottom = low * base.low
    total = high * base.eight_high
    total += middle >> _29
    total += (middle & _LOW_29) << _32
    total += bottom >> _61
    total += bottom & _PRIME
    total += word.astype(np.uint64)
    return (total & _PRIME) + (total >> _61)
