"""Deletion vectors where Delta keeps them: in files of their own, or inline in an action, which are only read here
(PROTOCOL.md, "Deletion Vectors", "Deletion Vector Format").

A descriptor is the JSON object `deletionVector` of an `add` or `remove` action.
"""

from base64 import b85decode, b85encode
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote
from uuid import UUID, uuid4

import numpy as np
from pyiceberg.io import FileIO
from pyroaring import BitMap64

from deltawriters.old_rows import read_spans
from deltawriters.vectors import decode_blob, decode_vector, encode_blob

Descriptor = Mapping[str, Any]

_VERSION = b"\x01"
_FRAMING = 8
"""Bytes of length and checksum, which a descriptor's `sizeInBytes` doesn't count."""
_Z85 = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_B85 = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
"""The alphabet of Python's `base64.b85encode`, which is Z85 but for this."""
_TO_Z85 = bytes.maketrans(_B85, _Z85)
_FROM_Z85 = bytes.maketrans(b";_`|~" + _Z85, b"     " + _B85)
"""What only the other alphabet has becomes a space, which neither has."""
_UUID_LENGTH = 20


class NewVectorFile:
    """A vector file that doesn't exist yet. Its name is unique.

    :param location: the table's.
    :param prefix: the folder in which the file is, below the location, or empty.
    """

    def __init__(self, location: str, prefix: str = "") -> None:
        self._uuid, self._prefix = uuid4(), prefix
        self.path = _file(location, self._prefix, self._uuid)

    def write(self, io: FileIO, vectors: Sequence[BitMap64]) -> list[dict[str, Any]]:
        """Write the vectors, and return their descriptors in the same order."""
        blobs = [encode_blob(positions) for positions in vectors]
        with io.new_output(self.path).create(overwrite=True) as stream:
            stream.write(b"".join((_VERSION, *blobs)))
        offsets = np.cumsum([len(_VERSION), *map(len, blobs)])[:-1]
        return [
            {
                "storageType": "u",
                "pathOrInlineDv": self._prefix + encode_z85(self._uuid.bytes),
                "offset": offset,
                "sizeInBytes": len(blob) - _FRAMING,
                "cardinality": len(positions),
            }
            for positions, blob, offset in zip(vectors, blobs, offsets.tolist(), strict=True)
        ]


def vector_file(location: str, descriptor: Descriptor) -> str | None:
    """Path of the file that has a vector. None if the descriptor itself has the vector.

    :param location: the table's.
    :raises ValueError: the descriptor is of a kind that isn't known.
    """
    kind, place = descriptor["storageType"], descriptor["pathOrInlineDv"]
    if kind == "i":
        return None
    if kind == "p":
        return unquote(place)
    if kind != "u":
        raise ValueError(
            f"the table at {location} has a deletion vector of storage type {kind!r}, and known are i, p and u. Have a "
            "writer that knows it write these files anew (REORG TABLE … APPLY (PURGE))"
        )
    prefix, encoded = place[:-_UUID_LENGTH], place[-_UUID_LENGTH:]
    return _file(location, prefix, UUID(bytes=decode_z85(encoded, 16)))


def read_vectors(io: FileIO, location: str, descriptors: Sequence[Descriptor]) -> list[BitMap64]:
    """Read vectors, in the order of their descriptors. Each file is read once, since a commit writes all its vectors
    side by side.

    :param location: the table's.
    :raises ValueError: a vector isn't as its descriptor says, or is damaged.
    """
    by_file: dict[str | None, list[int]] = {}
    for number, descriptor in enumerate(descriptors):
        by_file.setdefault(vector_file(location, descriptor), []).append(number)
    found: dict[int, BitMap64] = {}
    for path, numbers in by_file.items():
        blobs = [None] * len(numbers) if path is None else _blobs(io, path, [descriptors[n] for n in numbers])
        for number, blob in zip(numbers, blobs, strict=True):
            found[number] = _checked(descriptors[number], blob, path or f"an action of the table at {location}")
    return [found[number] for number in range(len(descriptors))]


def _blobs(io: FileIO, path: str, descriptors: Sequence[Descriptor]) -> list[bytes]:
    return read_spans(
        io, path, [(int(each.get("offset", 0)), int(each["sizeInBytes"]) + _FRAMING) for each in descriptors]
    )


def _checked(descriptor: Descriptor, blob: bytes | None, place: str) -> BitMap64:
    """:param blob: None if the vector is inline."""
    at = f"{place} at byte {descriptor['offset']}" if "offset" in descriptor else place
    try:
        if blob is None:
            positions = decode_vector(decode_z85(descriptor["pathOrInlineDv"], int(descriptor["sizeInBytes"])))
        else:
            positions = decode_blob(blob)
    except ValueError as error:
        raise ValueError(f"{at} has no intact deletion vector: {error}") from None
    if len(positions) != descriptor["cardinality"]:
        raise ValueError(
            f"{at} has a deletion vector of {len(positions):,} rows, but the table's log says "
            f"{descriptor['cardinality']:,}"
        )
    return positions


def encode_z85(content: bytes) -> str:
    """Z85 (https://rfc.zeromq.org/spec/32/), with zeros behind the content to make its length a multiple of 4."""
    return b85encode(content, pad=True).translate(_TO_Z85).decode()


def decode_z85(text: str, length: int) -> bytes:
    """The first `length` bytes of the content.

    :raises ValueError: the text is no Z85, or too short.
    """
    try:
        content = b85decode(text.encode("ascii").translate(_FROM_Z85))
    except ValueError:
        raise ValueError("no Z85 text") from None
    if len(text) % 5 or len(content) < length:
        raise ValueError("no Z85 text")
    return content[:length]


def _file(location: str, prefix: str, uuid: UUID) -> str:
    folder = f"{location.rstrip('/')}/{prefix}" if prefix else location.rstrip("/")
    return f"{folder}/deletion_vector_{uuid}.bin"
