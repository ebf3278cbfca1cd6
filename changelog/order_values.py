"""Order values as bytes that compare like them.

What a table holds for a key may be compared with a change much later, by another process. So the values are encoded
instead of ranked (`deltawriters.collapse` ranks those that are in memory together). Bytes compare as unsigned numbers,
one after the other; a shorter text comes before a longer one that begins with it.

    value   0x00 for NULL, else 0x01 and
            integers, dates, times, booleans   8 bytes, the highest first, its highest bit flipped
            floating point                     likewise, of the number that `ordered_as_numbers` gives it
            decimals                           16 or 32 bytes, likewise
            texts, bytes                       the bytes, 0x00 written as 0x00 0xFF, and 0x00 0x00 after the last one
    tuple   its values, one after the other; a descending one has all bits after its first byte flipped
"""

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Bytes = npt.NDArray[np.uint8]

_INT64 = np.iinfo(np.int64)


def encoded(values: pa.Array, *, descending: bool = False) -> pa.BinaryArray:
    """The n values of a column, as n texts of bytes."""
    dtype = values.type
    if pa.types.is_decimal(dtype):
        return _fixed(_decimal_bytes(values), values, descending=descending)
    if pa.types.is_large_string(dtype) or pa.types.is_string(dtype) or _is_bytes(dtype):
        return _texts(values, descending=descending)
    numbers = ordered_as_numbers(values)
    if pa.types.is_date32(dtype) or pa.types.is_time32(dtype):
        numbers = numbers.cast(pa.int32())
    elif pa.types.is_boolean(dtype):
        numbers = numbers.cast(pa.int8())
    wide = numbers.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
    flipped = wide.view(np.uint64) ^ np.uint64(1 << 63)
    return _fixed(flipped.astype(">u8").view(np.uint8).reshape(len(values), 8), values, descending=descending)


def first_of(encoded: pa.BinaryArray, dtype: pa.DataType) -> pa.Array:
    """The first value of each of n encoded tuples; NULL also of an empty text.

    :param dtype: an integer, date or timestamp.
    """
    heads = pc.binary_slice(encoded, 0, 9)
    is_value = np.asarray(pc.equal(pc.binary_length(heads), 9)) & np.asarray(pc.starts_with(heads, b"\x01"))
    padded = pc.if_else(pa.array(is_value), heads, pa.scalar(bytes(9), heads.type))
    content = np.frombuffer(padded.cast(pa.binary(9)).buffers()[1], np.uint8).reshape(-1, 9)[: len(padded), 1:]
    numbers = (content.copy().view(">u8").reshape(-1).astype(np.uint64) ^ np.uint64(1 << 63)).view(np.int64)
    values = pa.array(numbers, mask=~is_value)
    return (values.cast(pa.int32()) if pa.types.is_date32(dtype) else values).cast(dtype)


def _is_bytes(dtype: pa.DataType) -> bool:
    return bool(pa.types.is_binary(dtype) or pa.types.is_large_binary(dtype) or pa.types.is_fixed_size_binary(dtype))


def _decimal_bytes(values: pa.Array) -> Bytes:
    """n rows of 16 or 32 bytes: the unscaled numbers, the highest byte first, with their highest bits flipped."""
    width = values.type.bit_width // 8
    data = np.frombuffer(values.buffers()[1], np.uint8)[values.offset * width : (values.offset + len(values)) * width]
    highest_first = data.reshape(len(values), width)[:, ::-1].copy()
    highest_first[:, 0] ^= 0x80
    return highest_first


def _fixed(content: Bytes, values: pa.Array, *, descending: bool) -> pa.BinaryArray:
    """Values of the same number of bytes each."""
    rows, width = content.shape
    valid = values.is_valid().to_numpy(zero_copy_only=False)
    encoded = np.empty((rows, width + 1), np.uint8)
    encoded[:, 0] = valid
    encoded[:, 1:] = ~content if descending else content
    encoded[~valid, 1:] = 0
    offsets = np.arange(rows + 1, dtype=np.int32) * np.int32(width + 1)
    return pa.Array.from_buffers(pa.binary(), rows, [None, pa.py_buffer(offsets), pa.py_buffer(encoded)])


def _texts(values: pa.Array, *, descending: bool) -> pa.BinaryArray:
    content = values.cast(pa.binary())
    if pc.any(pc.match_substring(content, b"\x00")).as_py():
        content = pc.replace_substring(content, b"\x00", b"\x00\xff")
    joined = pc.binary_join_element_wise(content.fill_null(b""), pa.scalar(b"", pa.binary()), b"\x00\x00")
    if descending:
        joined = _with_bits_flipped(joined)
    marked = pc.binary_join_element_wise(pa.scalar(b"\x01", pa.binary()), joined, b"")
    return pc.if_else(values.is_valid(), marked, pa.scalar(b"\x00", pa.binary()))


def _with_bits_flipped(texts: pa.BinaryArray) -> pa.BinaryArray:
    _, offsets, data = texts.buffers()
    flipped = ~np.frombuffer(data or b"", np.uint8)
    return pa.Array.from_buffers(pa.binary(), len(texts), [None, offsets, pa.py_buffer(flipped)], offset=texts.offset)


def ordered_as_numbers(column: pa.Array) -> pa.Array:
    """Floating-point numbers as int64 in the same order: 0.0 equals -0.0, and NaN is above all numbers, as in Spark.
    Columns of other types stay as they are.
    """
    if not pa.types.is_floating(column.type):
        return column
    values = column.cast(pa.float64()).to_numpy(zero_copy_only=False) + 0.0  # null becomes NaN; -0.0 becomes 0.0
    values[np.isnan(values)] = np.nan
    bits = values.view(np.int64)
    ordered = np.where(bits < 0, _INT64.min - bits, bits)
    return pa.array(ordered, mask=column.is_null().to_numpy(zero_copy_only=False))
