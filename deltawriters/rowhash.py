"""Hash of a row's content, for all column types. It decides between changes that have equal key, order and kind, and
decides the same way in every replay.
"""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from deltawriters.keyindex.hashing import low_hash, mixed

Hashes = npt.NDArray[np.uint64]

_FACTOR = np.uint64(0x9E3779B97F4A7C15)
"""2^64 divided by the golden ratio, as an odd number. Different columns and list elements are multiplied by different
powers of it, so their order counts.
"""

_LONG = 1024
"""Bytes of the longest value that is hashed together with others."""


def row_hash(columns: Sequence[pa.Array]) -> npt.NDArray[np.int64]:
    """Hash n rows, vectorised. The hash is stored nowhere, so a release may change it.

    :param columns: at least one column, equal length n; nulls and nested types are allowed.
    :return: n hashes.
    """
    return _rows(columns).view(np.int64)


def _rows(columns: Sequence[pa.Array]) -> Hashes:
    result = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        result = mixed(result * _FACTOR + _column(column))
    return result


def _column(column: pa.Array) -> Hashes:
    """The hash of each value; 0 for null."""
    column = column.storage if isinstance(column, pa.ExtensionArray) else column
    if not column.null_count:
        return mixed(_values(column) + _FACTOR)
    result = np.zeros(len(column), np.uint64)
    valid = column.is_valid().to_numpy(zero_copy_only=False)
    if valid.any():
        result[valid] = mixed(_values(column.drop_null()) + _FACTOR)
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
    elif pa.types.is_fixed_size_binary(dtype):
        column = column.cast(pa.binary())
    if pa.types.is_string(column.type) or pa.types.is_binary(column.type):
        return _texts(column)
    return low_hash([column])


def _texts(column: pa.Array) -> Hashes:
    """Hash strings or binaries. A long one by itself, since `low_hash` takes a step for each word of the longest."""
    is_long = pc.greater(pc.binary_length(column), _LONG)
    if not pc.any(is_long).as_py():
        return low_hash([column])
    result, long = np.empty(len(column), np.uint64), is_long.to_numpy(zero_copy_only=False)
    result[long] = [_digest(value) for value in column.filter(is_long)]
    if not long.all():
        result[~long] = low_hash([column.filter(pc.invert(is_long))])
    return result


def _digest(value: pa.Scalar) -> int:
    return int.from_bytes(blake2b(value.as_buffer(), digest_size=8).digest(), "little")
