"""Puffin files of deletion vectors (Puffin spec: magic, blobs, footer of JSON blob metadata; blob type
`deletion-vector-v1`).
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pyiceberg.io import FileIO
from pyroaring import BitMap64

from deltawriters.content import ContentFile, FileContent, Partition
from deltawriters.old_rows import read_spans
from deltawriters.vectors import decode_blob, encode_blob
from sink.targets.iceberg.content_files import content_file

POS_ID = 2147483545
"""Reserved field id of a row's position (spec, "Reserved Field IDs")."""
_MAGIC = b"PFA1"


def write_deletion_vectors(
    io: FileIO, path: str, vectors: Sequence[tuple[str, Partition, BitMap64]]
) -> list[ContentFile]:
    """Write one Puffin file at `path`, and return a descriptor of each vector, in the order of their places.

    The smallest vectors come first. DuckDB (1.5.5) reads more than it wants where the rest of the file isn't longer
    than that, and then takes the positions of this vector for those of all that follow it.

    :param vectors: (path of the data file, its partition, deleted positions); each data file occurs once.
    """
    puffin = _Puffin()
    encoded = [
        (encode_blob(positions), data_file, partition, len(positions)) for data_file, partition, positions in vectors
    ]
    encoded.sort(key=lambda vector: len(vector[0]))
    places = [puffin.add_deletion_vector(data_file, blob, rows) for blob, data_file, _, rows in encoded]
    content = puffin.content()
    with io.new_output(path).create(overwrite=True) as stream:
        stream.write(content)
    return [
        content_file(
            FileContent.POSITION_DELETES,
            path,
            partition,
            rows,
            len(content),
            file_format="PUFFIN",
            referenced_data_file=data_file,
            content_offset=offset,
            content_size_in_bytes=length,
        )
        for (_, data_file, partition, rows), (offset, length) in zip(encoded, places, strict=True)
    ]


def read_deletion_vectors(io: FileIO, vectors: Sequence[Mapping[str, Any]]) -> list[BitMap64]:
    """See `TableSpec.read_vectors`.

    :param vectors: as `ContentFileParser` JSON.
    """
    by_file: dict[str, list[int]] = {}
    for number, vector in enumerate(vectors):
        by_file.setdefault(vector["file-path"], []).append(number)
    found: dict[int, BitMap64] = {}
    for path, numbers in by_file.items():
        places = [(vectors[n]["content-offset"], vectors[n]["content-size-in-bytes"]) for n in numbers]
        for number, (offset, _), blob in zip(numbers, places, read_spans(io, path, places), strict=True):
            try:
                found[number] = decode_blob(blob)
            except ValueError as error:
                raise ValueError(f"{path} has no intact deletion vector at byte {offset}: {error}") from None
    return [found[number] for number in range(len(vectors))]


class _Puffin:
    """The bytes of a Puffin file."""

    def __init__(self) -> None:
        self._content = bytearray(_MAGIC)
        self._blobs: list[dict[str, object]] = []

    def add_deletion_vector(self, data_file: str, blob: bytes, rows: int) -> tuple[int, int]:
        """Add the vector of `data_file`, which deletes so many rows. Returns the blob's offset and length."""
        offset = len(self._content)
        self._content += blob
        self._blobs.append(
            {
                "type": "deletion-vector-v1",
                "fields": [POS_ID],
                "snapshot-id": -1,  # both numbers are inherited from the commit
                "sequence-number": -1,
                "offset": offset,
                "length": len(blob),
                "properties": {"referenced-data-file": data_file, "cardinality": str(rows)},
            }
        )
        return offset, len(blob)

    def content(self) -> bytes:
        """The whole file, with its footer."""
        footer = json.dumps({"blobs": self._blobs, "properties": {"created-by": "rowdelta"}}).encode()
        return bytes(self._content + _MAGIC + footer + len(footer).to_bytes(4, "little") + b"\0\0\0\0" + _MAGIC)
