"""Bytes that are spelled as text: base64 (Kafka Connect's JSON), UUIDs, and geometries around them."""

import base64
import json

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from changelog.values.arrays import binary, only, pieces, present

_BAD = 255
_PAD = 64


def _table(alphabet: bytes) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    table = np.full(256, _BAD, np.uint8)
    table[np.frombuffer(alphabet, np.uint8)] = np.arange(len(alphabet), dtype=np.uint8)
    return table


_SEXTETS = _table(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=")
_HEX = _table(b"0123456789abcdef")
_HEX[np.frombuffer(b"ABCDEF", np.uint8)] = np.arange(10, 16, dtype=np.uint8)

_DASHES = [8, 13, 18, 23]
_DIGITS = [i for i in range(36) if i not in _DASHES]


def from_base64(values: pa.Array) -> pa.Array:
    """Strings to binary, null where a string isn't RFC 4648 base64 with padding and without stray bits.

    Whole values of 4 characters follow each other, so the column is decoded as one long text.
    """
    text, offsets = pieces(values)
    if (np.diff(offsets) % 4).any():
        return from_base64(only(values, np.diff(offsets) % 4 == 0))
    valid = present(values)
    sextets = _SEXTETS[text].reshape(-1, 4)
    ends = offsets[1:][np.diff(offsets) > 0] // 4 - 1  # each value's last group of 4
    third, fourth = sextets[ends, 2], sextets[ends, 3]
    padding = np.where(third == _PAD, 2, np.where(fourth == _PAD, 1, 0))
    wrong = (third == _PAD) & (fourth != _PAD)
    wrong |= (padding == 2) & (sextets[ends, 1] & 15 != 0) | (padding == 1) & (third & 3 != 0)
    sextets[ends, 3] = np.where(fourth == _PAD, 0, fourth)
    sextets[ends, 2] = np.where(third == _PAD, 0, third)
    strays = sextets > 63
    if wrong.any() or strays.any():
        fits = valid.copy()
        fits[np.flatnonzero(np.diff(offsets) > 0)[wrong]] = False
        at = np.flatnonzero(strays.any(axis=1)) * 4
        fits[np.searchsorted(offsets, at, side="right") - 1] = False
        return from_base64(only(values, fits))
    groups = np.empty((len(sextets), 3), np.uint8)
    groups[:, 0] = sextets[:, 0] << 2 | sextets[:, 1] >> 4
    groups[:, 1] = sextets[:, 1] << 4 | sextets[:, 2] >> 2
    groups[:, 2] = sextets[:, 2] << 6 | sextets[:, 3]
    lengths = np.diff(offsets) // 4 * 3
    lengths[np.flatnonzero(lengths)] -= padding
    data = groups.reshape(-1)
    if padding.any():
        kept = np.ones(data.shape, np.bool_)
        kept[ends[padding > 0] * 3 + 2] = False
        kept[ends[padding > 1] * 3 + 1] = False
        data = data[kept]
    return binary(data, lengths, valid)


def to_base64(values: pa.Array) -> pa.Array:
    """Binary to strings."""
    texts = [None if v is None else base64.b64encode(v).decode("ascii") for v in values.to_pylist()]
    return pa.array(texts, pa.string())


def uuid(values: pa.Array) -> pa.Array:
    """16 bytes each, from themselves or from text in 8-4-4-4-12 hexadecimal digits."""
    if pa.types.is_fixed_size_binary(values.type):
        values = values.cast(pa.binary())
    if pa.types.is_binary(values.type):
        return _where(values, pc.equal(pc.binary_length(values), 16))
    if not pa.types.is_string(values.type):
        return pa.nulls(len(values), pa.binary())
    text, offsets = pieces(values)
    lengths = np.diff(offsets)
    if (lengths[present(values)] != 36).any():
        return uuid(only(values, lengths == 36))
    characters = text.reshape(-1, 36)
    digits = _HEX[characters[:, _DIGITS]]
    right = (digits != _BAD).all(axis=1) & (characters[:, _DASHES] == ord("-")).all(axis=1)
    valid = present(values)
    valid[np.flatnonzero(valid)[~right]] = False
    data = (digits[:, 0::2] << 4 | digits[:, 1::2])[right]
    return binary(data.reshape(-1), np.where(valid, 16, 0).astype(np.int64), valid)


def geometry(values: pa.Array) -> pa.Array:
    """The well-known binary of geometries: structs with a field `wkb`, or JSON texts of such."""
    if pa.types.is_string(values.type):
        values = pa.array([_wkb(text) for text in values.to_pylist()], pa.string())
        return from_base64(values)
    if not pa.types.is_struct(values.type) or values.type.get_field_index("wkb") < 0:
        return pa.nulls(len(values), pa.binary())
    (wkb,) = (part for name, part in zip(values.type.names, values.flatten(), strict=True) if name == "wkb")
    return from_base64(wkb) if pa.types.is_string(wkb.type) else wkb.cast(pa.binary())


def _wkb(text: str | None) -> str | None:
    if text is None or not text.startswith("{"):
        return None
    try:
        found = json.loads(text).get("wkb")
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, str) else None


def _where(values: pa.Array, fits: pa.Array) -> pa.Array:
    return values if pc.all(fits).as_py() is not False else only(values, fits)
