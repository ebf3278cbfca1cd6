"""Bytes that are spelled as text: base64 (Kafka Connect's JSON), UUIDs, and geometries with base64 inside."""

import base64
import json

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from changelog.values.arrays import binary, only, pieces, present

MAYBE_BASE64 = "maybe base64"
"""In place of a logical type, for texts without a schema that look like base64 of a few bytes (`looks_like_base64`)."""

_BAD = 255
_LONGEST_SHORT = 24
"""Base64 of a decimal with 38 digits has so many characters."""
_WORD = "^(?:[A-Z]?[a-z0-9]*|[A-Z0-9]*)$"
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
    """Base64 strings as binary. Null where a string isn't RFC 4648 base64 with padding and without stray bits.

    The length of each value is a multiple of 4 characters, so the column is decoded as one long text.
    """
    text, offsets = pieces(values)
    lengths = np.diff(offsets)
    if (lengths % 4).any():
        return from_base64(only(values, lengths % 4 == 0))
    valid = present(values)
    sextets = np.take(_SEXTETS, text).reshape(-1, 4)
    filled = lengths > 0
    ends = offsets[1:] // 4 - 1 if filled.all() else offsets[1:][filled] // 4 - 1  # each value's last group of 4
    one, two = sextets[ends, 3] == _PAD, sextets[ends, 2] == _PAD
    wrong = two & ~one | two & (sextets[ends, 1] & 15 != 0) | one & ~two & (sextets[ends, 2] & 3 != 0)
    sextets[ends[one], 3] = 0
    sextets[ends[two], 2] = 0
    if wrong.any() or sextets.max(initial=0) > 63:
        valid = valid.copy()
        valid[np.flatnonzero(filled)[wrong]] = False
        at = np.flatnonzero((sextets > 63).any(axis=1)) * 4
        valid[np.searchsorted(offsets, at, side="right") - 1] = False
        return from_base64(only(values, valid))
    groups = np.empty((len(sextets), 3), np.uint8)
    groups[:, 0] = sextets[:, 0] << 2 | sextets[:, 1] >> 4
    groups[:, 1] = sextets[:, 1] << 4 | sextets[:, 2] >> 2
    groups[:, 2] = sextets[:, 2] << 6 | sextets[:, 3]
    data = groups.reshape(-1)
    lengths = lengths // 4 * 3
    if one.any():
        lengths[filled] -= one.astype(np.int64) + two
        kept = np.ones(data.shape, np.bool_)
        kept[ends[one] * 3 + 2] = False
        kept[ends[two] * 3 + 1] = False
        data = data[kept]
    return binary(data, lengths, valid)


def looks_like_base64(texts: pa.Array) -> bool:
    """Whether all texts (string) are base64 of a few bytes, as Kafka Connect's JSON has decimals and short bytes, and
    not only words or codes of four or eight letters.
    """
    texts = texts.drop_null()
    if not len(texts) or pc.max(pc.binary_length(texts)).as_py() > _LONGEST_SHORT:
        return False
    if not pc.any(pc.invert(pc.match_substring_regex(texts, _WORD))).as_py():
        return False
    return bool(from_base64(texts).null_count == 0)


def from_hex(values: pa.Array) -> pa.Array:
    """Hexadecimal strings as binary. Null where a string isn't hexadecimal."""
    text, offsets = pieces(values)
    lengths = np.diff(offsets)
    if (lengths % 2).any():
        return from_hex(only(values, lengths % 2 == 0))
    digits = _HEX[text].reshape(-1, 2)
    wrong = (digits == _BAD).any(axis=1)
    if wrong.any():
        valid = present(values).copy()
        valid[np.searchsorted(offsets, np.flatnonzero(wrong) * 2, side="right") - 1] = False
        return from_hex(only(values, valid))
    octets = (digits[:, 0] << 4 | digits[:, 1]).astype(np.uint8)
    return binary(octets, lengths // 2, present(values))


def to_base64(values: pa.Array) -> pa.Array:
    """Binary values as base64 strings."""
    texts = [None if v is None else base64.b64encode(v).decode("ascii") for v in values.to_pylist()]
    return pa.array(texts, pa.string())


def uuid(values: pa.Array) -> pa.Array:
    """The 16 bytes of each UUID (binary). `values` are such bytes, or text of 8-4-4-4-12 hexadecimal digits."""
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
    """The well-known binary of geometries. `values` are structs with a field `wkb`, or JSON texts of such structs."""
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


def is_utf8(value: bytes) -> bool:
    """Whether the bytes are text."""
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True
