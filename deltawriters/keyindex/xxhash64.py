"""The first half of the 128-bit key hash: Spark's function `xxhash64`, for tasks that don't get their rows from Spark.

The result equals, bit for bit, that of Spark's expression `XxHash64` (seed 42) over columns of the corresponding Spark
types. The hash of a column is the seed of the next column. An integer of up to 32 bits, a boolean or a date is hashed
as four bytes. A bigint, a timestamp or a decimal of up to 18 digits is hashed as eight bytes. A longer decimal is
hashed as the bytes of its `BigInteger`, and text and binary as their bytes. The hashes in an index come from Spark or
from this module.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from deltawriters.keyindex.hashing import value_offsets

Hashes = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]

_SEED = 42
_1, _2, _3, _4, _5 = (
    np.uint64(prime)
    for prime in (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
)
_MOST_LONG_DIGITS = 18


def xxhash64(columns: Sequence[pa.Array]) -> Hashes:
    """Hash each row of the key `columns`.

    :param columns: equal length n, no nulls, in the types that Spark gives: UUIDs are binary.
    :return: n hashes. Spark's bigint has the same 64 bits, signed.
    :raises ValueError: a column has nulls.
    :raises TypeError: a column's type isn't allowed in a key.
    """
    if any(column.null_count for column in columns):
        raise ValueError("key columns must have no nulls")
    state = np.full(len(columns[0]), _SEED, np.uint64)
    for column in columns:
        state = _hashed(column, state)
    return state


def _hashed(column: pa.Array, seed: Hashes) -> Hashes:
    dtype = column.type
    if (
        pa.types.is_boolean(dtype)
        or pa.types.is_date32(dtype)
        or (pa.types.is_integer(dtype) and dtype.bit_width <= 32)
    ):
        return _int(column.cast(pa.int32()).to_numpy(), seed)
    if pa.types.is_int64(dtype) or pa.types.is_timestamp(dtype):
        return _long(column.view(pa.int64()).to_numpy().view(np.uint64), seed)
    if pa.types.is_decimal128(dtype):
        words = np.frombuffer(column.buffers()[1], "<u8")[2 * column.offset : 2 * (column.offset + len(column))]
        if dtype.precision <= _MOST_LONG_DIGITS:
            return _long(words[::2], seed)
        return _decimal(words.view(np.uint8).reshape(-1, 16)[:, ::-1], seed)
    if _is_variable(dtype):
        offsets = value_offsets(column)
        return _of_lengths(column.buffers()[2], offsets[:-1], np.diff(offsets), seed)
    raise TypeError(f"a key column can't be of type {dtype}")


def _is_variable(dtype: pa.DataType) -> bool:
    is_small = pa.types.is_string(dtype) or pa.types.is_binary(dtype)
    return bool(is_small or pa.types.is_large_string(dtype) or pa.types.is_large_binary(dtype))


def _int(values: npt.NDArray[np.int32], seed: Hashes) -> Hashes:
    word = values.view(np.uint32).astype(np.uint64)
    return _avalanched(_rotated((seed + _5 + np.uint64(4)) ^ (word * _1), 23) * _2 + _3)


def _long(values: Hashes, seed: Hashes) -> Hashes:
    return _avalanched(_with_word(seed + _5 + np.uint64(8), values))


def _decimal(big_endian: Bytes, seed: Hashes) -> Hashes:
    """Hash decimals as the bytes of `BigInteger.toByteArray`: two's complement without needless leading bytes.

    :param big_endian: 16 bytes a value, shape (n, 16).
    """
    fill = np.where(big_endian[:, :1] >= 128, 255, 0).astype(np.uint8)
    significant = big_endian != fill
    first = np.where(significant.any(axis=1), significant.argmax(axis=1), 15)
    # the sign must be in the first byte
    lead = np.take_along_axis(big_endian, first[:, None], axis=1)
    first -= ((lead ^ fill) >= 128)[:, 0]
    starts = np.arange(len(first)) * 16 + first
    return _of_lengths(np.ascontiguousarray(big_endian), starts, 16 - first, seed)


def _of_lengths(
    data: pa.Buffer | Bytes, starts: npt.NDArray[np.integer], lengths: npt.NDArray[np.integer], seed: Hashes
) -> Hashes:
    """Hash n byte strings. All strings of one length are hashed together, so that each step works on whole columns.

    :param data: the bytes of all strings.
    :param starts: where each string begins in `data`.
    :param lengths: number of bytes of each string.
    """
    result = np.empty(len(starts), np.uint64)
    content = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    for length in np.unique(lengths).tolist():
        rows = np.flatnonzero(lengths == length)
        values = content[starts[rows, None] + np.arange(length)] if length else np.empty((len(rows), 0), np.uint8)
        result[rows] = _bytes(values, seed[rows])
    return result


def _bytes(values: Bytes, seed: Hashes) -> Hashes:
    """XXH64 of n byte strings of one length, shape (n, length)."""
    length = values.shape[1]
    words = np.ascontiguousarray(values[:, : length & -8]).view("<u8")
    done = 0
    if length >= 32:
        lanes = [seed + _1 + _2, seed + _2, seed.copy(), seed - _1]
        for done in range(0, words.shape[1] - 3, 4):
            lanes = [_round(lane, words[:, done + i]) for i, lane in enumerate(lanes)]
        done += 4
        state = np.zeros(len(values), np.uint64)
        for lane, by in zip(lanes, (1, 7, 12, 18), strict=True):
            state += _rotated(lane, by)
        for lane in lanes:
            state = (state ^ _round(np.uint64(0), lane)) * _1 + _4
    else:
        state = seed + _5
    state = state + np.uint64(length)
    for i in range(done, words.shape[1]):
        state = _with_word(state, words[:, i])
    at = length & -8
    if length - at >= 4:
        half = np.ascontiguousarray(values[:, at : at + 4]).view("<u4")[:, 0].astype(np.uint64)
        state = _rotated(state ^ (half * _1), 23) * _2 + _3
        at += 4
    for i in range(at, length):
        state = _rotated(state ^ (values[:, i].astype(np.uint64) * _5), 11) * _1
    return _avalanched(state)


def _with_word(state: Hashes, word: Hashes) -> Hashes:
    return _rotated(state ^ _round(np.uint64(0), word), 27) * _1 + _4


def _round(state: Hashes | np.uint64, word: Hashes) -> Hashes:
    return _rotated(state + word * _2, 31) * _1


def _rotated(values: Hashes, by: int) -> Hashes:
    return (values << np.uint64(by)) | (values >> np.uint64(64 - by))


def _avalanched(state: Hashes) -> Hashes:
    state = (state ^ (state >> np.uint64(33))) * _2
    state = (state ^ (state >> np.uint64(29))) * _3
    return state ^ (state >> np.uint64(32))
