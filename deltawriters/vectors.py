"""Deletion vectors: sets of positions in one data file, and their bytes.

Iceberg (Puffin spec, blob type `deletion-vector-v1`) and Delta Lake (PROTOCOL.md, "Deletion Vector Format") write the
same bytes, each in a container of its own:

    length (4 bytes, big-endian), vector, CRC-32 of the vector (4 bytes, big-endian)

and the vector is four magic bytes and a 64-bit Roaring bitmap in the portable format. Delta stores it inline without
length and checksum.
"""

import zlib
from array import array

import numpy as np
from pyroaring import BitMap64

from deltawriters.collapse import Ints

_MAGIC = b"\xd1\xd3\x39\x64"


class LostVectorError(Exception):
    """A deletion vector of the table is missing or damaged, so nothing tells which rows of its data file are live."""


def bitmap(positions: Ints) -> BitMap64:
    """The set of `positions`."""
    return BitMap64(array("Q", positions.astype(np.uint64).tobytes()))


def positions_of(positions: BitMap64) -> Ints:
    """The members of the set, ascending, as int64."""
    return np.frombuffer(positions.to_array(), np.uint64).astype(np.int64)


def encode_vector(positions: BitMap64) -> bytes:
    """The vector: magic bytes and bitmap."""
    positions.run_optimize()
    encoded: bytes = _MAGIC + positions.serialize()
    return encoded


def decode_vector(vector: bytes) -> BitMap64:
    """The reverse of `encode_vector`.

    :raises ValueError: these bytes are no vector.
    """
    if vector[:4] != _MAGIC:
        raise ValueError("no deletion vector: it begins with other bytes")
    return BitMap64.deserialize(vector[4:])


def encode_blob(positions: BitMap64) -> bytes:
    """The vector with its length and checksum."""
    vector = encode_vector(positions)
    return len(vector).to_bytes(4, "big") + vector + zlib.crc32(vector).to_bytes(4, "big")


def decode_blob(blob: bytes) -> BitMap64:
    """The reverse of `encode_blob`.

    :raises ValueError: length, checksum or magic bytes are wrong.
    """
    vector, checksum = blob[4:-4], blob[-4:]
    if len(vector) != int.from_bytes(blob[:4], "big") or zlib.crc32(vector).to_bytes(4, "big") != checksum:
        raise ValueError("no intact deletion vector: its length or its checksum is wrong")
    return decode_vector(vector)
