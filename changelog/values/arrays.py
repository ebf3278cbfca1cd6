"""Converts Arrow arrays to numpy and back, without needless copies."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Flags = npt.NDArray[np.bool_]
Bytes = npt.NDArray[np.uint8]
Longs = npt.NDArray[np.int64]


def flags(values: pa.Array) -> Flags:
    """A bool array as numpy; null is False."""
    if values.null_count:
        values = pc.fill_null(values, False)
    return values.to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


def present(values: pa.Array) -> Flags:
    """True where a value isn't null."""
    return np.ones(len(values), np.bool_) if values.null_count == 0 else flags(values.is_valid())


def bitmap(valid: Flags) -> pa.Buffer | None:
    """A validity bitmap; None if all are valid."""
    return None if valid.all() else pa.array(valid).buffers()[1]


def only(values: pa.Array, fits: pa.Array | Flags) -> pa.Array:
    """`values`, with null where `fits` isn't true."""
    return pc.if_else(fits if isinstance(fits, pa.Array) else pa.array(fits), values, pa.scalar(None, values.type))


def pieces(values: pa.Array) -> tuple[Bytes, Longs]:
    """The bytes of n string or binary values, and the n + 1 offsets at which they begin and end. A null has no
    bytes.
    """
    large = pa.types.is_large_string(values.type) or pa.types.is_large_binary(values.type)
    if values.null_count:
        values = pc.fill_null(values, b"" if pa.types.is_binary(values.type) else "")
    _, offsets, data = values.buffers()
    dtype: Any = np.int64 if large else np.int32
    if len(values) == 0:
        return np.empty(0, np.uint8), np.zeros(1, np.int64)
    begins = np.frombuffer(offsets, dtype)[values.offset : values.offset + len(values) + 1].astype(np.int64)
    content = np.empty(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
    return content[begins[0] : begins[-1]], begins - begins[0]


def binary(data: Bytes, lengths: Longs, valid: Flags) -> pa.Array:
    """A binary array of consecutive pieces of `data`. The caller should give pieces that aren't valid the length 0.

    :raises OverflowError: the pieces have 2 GiB or more.
    """
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    if offsets[-1] >= 2**31:
        raise OverflowError("more than 2 GiB of bytes in one column of a batch")
    buffers = [bitmap(valid), pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(np.ascontiguousarray(data))]
    return pa.Array.from_buffers(pa.binary(), len(lengths), buffers)


def merged(parts: list[pa.Array], target: pa.DataType, length: int) -> pa.Array:
    """For each row, the first value of `parts` that isn't null."""
    parts = [part for part in parts if part.null_count < len(part)]
    if not parts:
        return pa.nulls(length, target)
    whole = parts[0]
    for part in parts[1:]:
        whole = pc.if_else(whole.is_valid(), whole, part)
    return whole
