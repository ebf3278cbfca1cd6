"""Position deletes within one commit: rows that a later change of the same key superseded after they were written.

Format v2: Parquet files of (file_path, pos), sorted, with the reserved field ids (spec, "Position Delete Files").
Format v3: deletion vectors, one per data file. A task writes all its vectors into one Puffin file (spec, "Deletion
Vectors"; Puffin spec, `deletion-vector-v1` blob).
"""

import json
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
from pyiceberg.io import FileIO
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField, StringType
from pyroaring import BitMap64

from deltawriters.collapse import Ints
from deltawriters.content import ContentFile, FileContent, Partition, StoredPartition
from deltawriters.files import DataFiles, FileFactory
from deltawriters.parquet import ParquetFileWriter
from deltawriters.table import TableSpec

FILE_PATH_ID = 2147483546
POS_ID = 2147483545
FLUSH_THRESHOLD = 1_000_000
"""A task holds this many positions (16 bytes each) before it writes a v2 position delete file."""
_METRICS = "write.metadata.metrics."

_SCHEMA = Schema(
    NestedField(FILE_PATH_ID, "file_path", StringType(), required=True),
    NestedField(POS_ID, "pos", LongType(), required=True),
)
_ARROW_SCHEMA = pa.schema(
    [
        pa.field("file_path", pa.string(), nullable=False, metadata={"PARQUET:field_id": str(FILE_PATH_ID)}),
        pa.field("pos", pa.int64(), nullable=False, metadata={"PARQUET:field_id": str(POS_ID)}),
    ]
)


class PositionDeletes:
    """Collects positions in the data files of `files`, and writes them as delete files of the table's format version.

    :param files: the data files whose numbers `delete` takes.
    :param flush_threshold: positions held before a v2 delete file is written.
    """

    def __init__(
        self, table: TableSpec, factory: FileFactory, files: DataFiles, flush_threshold: int = FLUSH_THRESHOLD
    ) -> None:
        self._table = table
        self._factory = factory
        self._files = files
        self._flush_threshold = flush_threshold
        self._pending: list[tuple[Ints, Ints]] = []
        self._pending_count = 0
        self._done: list[ContentFile] = []

    def delete(self, file: Ints, pos: Ints) -> None:
        """Delete row `pos[i]` of data file `file[i]`, for all i."""
        if not len(file):
            return
        self._pending.append((file, pos))
        self._pending_count += len(file)
        # A data file may have only one deletion vector, so in v3 the task writes nothing until it knows all positions.
        if self._table.format_version < 3 and self._pending_count >= self._flush_threshold:
            self._flush()

    def close(self) -> list[ContentFile]:
        """Write the positions that are still held, and return all delete files."""
        self._flush()
        return self._done

    def _flush(self) -> None:
        if not self._pending:
            return
        file = np.concatenate([f for f, _ in self._pending])
        pos = np.concatenate([p for _, p in self._pending])
        self._pending, self._pending_count = [], 0
        if self._table.format_version >= 3:
            self._done.extend(self._write_vectors(file, pos))
        else:
            self._done.extend(self._write_parquet(file, pos))

    def _write_parquet(self, file: Ints, pos: Ints) -> Iterator[ContentFile]:
        numbers = np.unique(file)
        paths = [self._files.path(int(number)) for number in numbers]
        by_path = np.argsort(np.array(paths))
        path_rank = np.empty(len(paths), np.int64)
        path_rank[by_path] = np.arange(len(paths))
        row_rank = path_rank[np.searchsorted(numbers, file)]
        order = np.lexsort((pos, row_rank))
        file, pos = file[order], pos[order]
        by_partition: dict[Partition | StoredPartition, list[int]] = {}
        for number in numbers:
            by_partition.setdefault(self._files.partition(int(number)), []).append(int(number))
        for partition, members in by_partition.items():
            mine = np.isin(file, members)
            codes = np.searchsorted(numbers, file[mine])
            dictionary = pa.DictionaryArray.from_arrays(pa.array(codes.astype(np.int32)), pa.array(paths))
            rows = pa.table([dictionary.cast(pa.string()), pa.array(pos[mine])], schema=_ARROW_SCHEMA)
            writer = ParquetFileWriter(
                self._with_full_metrics(), self._factory.new_path(partition), _SCHEMA, _ARROW_SCHEMA
            )
            writer.write(rows)
            size, metrics = writer.close()
            yield ContentFile(
                FileContent.POSITION_DELETES,
                writer.path,
                partition,
                rows.num_rows,
                size,
                metrics=metrics,
                referenced_data_file=paths[int(codes[0])] if len(members) == 1 else None,
            )

    def _with_full_metrics(self) -> TableSpec:
        """The table with full metrics. Readers compare the bounds of `file_path`: with truncated bounds they would skip
        deletes that apply (`MetricsConfig.forPositionDelete`).
        """
        others = [(name, value) for name, value in self._table.properties if not name.startswith(_METRICS)]
        return replace(self._table, properties=(*others, (f"{_METRICS}default", "full")))

    def _write_vectors(self, file: Ints, pos: Ints) -> Iterator[ContentFile]:
        order = np.lexsort((pos, file))
        file, pos = file[order], pos[order]
        numbers, starts = np.unique(file, return_index=True)
        vectors = [
            (self._files.path(int(number)), self._files.partition(int(number)), bitmap(pos[start:stop]))
            for number, start, stop in zip(numbers, starts, [*starts[1:], len(pos)], strict=True)
        ]
        path = self._factory.new_path(self._files.partition(int(numbers[0])), "puffin")
        yield from write_deletion_vectors(self._table, path, vectors)


def bitmap(positions: Ints) -> BitMap64:
    """The set of `positions`."""
    return BitMap64(array("Q", positions.astype(np.uint64).tobytes()))


def positions_of(positions: BitMap64) -> Ints:
    """The members of the set, ascending, as int64."""
    return np.frombuffer(positions.to_array(), np.uint64).astype(np.int64)


def write_deletion_vectors(
    table: TableSpec, path: str, vectors: Sequence[tuple[str, Partition | StoredPartition, BitMap64]]
) -> list[ContentFile]:
    """Write one Puffin file at `path`, and return a descriptor of each vector.

    :param vectors: (path of the data file, its partition, deleted positions); each data file occurs once.
    """
    puffin = PuffinWriter(table, path)
    places = [puffin.add_deletion_vector(data_file, positions) for data_file, _, positions in vectors]
    size = puffin.close()
    return [
        ContentFile(
            FileContent.POSITION_DELETES,
            path,
            partition,
            len(positions),
            size,
            file_format="PUFFIN",
            referenced_data_file=data_file,
            content_offset=offset,
            content_size_in_bytes=length,
        )
        for (data_file, partition, positions), (offset, length) in zip(vectors, places, strict=True)
    ]


def read_deletion_vectors(io: FileIO, path: str, places: Sequence[tuple[int, int]]) -> list[BitMap64]:
    """Read several deletion vectors of one Puffin file in one read. That pays, since a commit writes all its vectors
    side by side.

    :param places: (`content_offset`, `content_size_in_bytes`) of each vector, from its manifest entry.
    :raises ValueError: the file has no intact vector at one of the places.
    """
    start = min(offset for offset, _ in places)
    stop = max(offset + length for offset, length in places)
    with io.new_input(path).open() as stream:
        stream.seek(start)
        content = stream.read(stop - start)
    vectors = []
    for offset, length in places:
        blob = content[offset - start : offset - start + length]
        vector, checksum = blob[4:-4], blob[-4:]
        if vector[:4] != PuffinWriter.DV_MAGIC or zlib.crc32(vector).to_bytes(4, "big") != checksum:
            raise ValueError(f"{path} has no intact deletion vector at byte {offset}")
        vectors.append(BitMap64.deserialize(vector[4:]))
    return vectors


class PuffinWriter:
    """A Puffin file of deletion vectors (Puffin spec: magic, blobs, footer of JSON blob metadata)."""

    _MAGIC = b"PFA1"
    DV_MAGIC = b"\xd1\xd3\x39\x64"

    def __init__(self, table: TableSpec, path: str) -> None:
        self.path = path
        self._table = table
        self._content = bytearray(self._MAGIC)
        self._blobs: list[dict[str, object]] = []

    def add_deletion_vector(self, data_file: str, positions: BitMap64) -> tuple[int, int]:
        """Add the vector of `data_file`. Returns the blob's offset and length."""
        positions.run_optimize()
        vector = self.DV_MAGIC + positions.serialize()  # the portable 64-bit Roaring format, which Iceberg uses
        blob = len(vector).to_bytes(4, "big") + vector + zlib.crc32(vector).to_bytes(4, "big")
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
                "properties": {"referenced-data-file": data_file, "cardinality": str(len(positions))},
            }
        )
        return offset, len(blob)

    def close(self) -> int:
        """Write the file. Returns its size in bytes."""
        footer = json.dumps({"blobs": self._blobs, "properties": {"created-by": "rowdelta"}}).encode()
        self._content += self._MAGIC + footer + len(footer).to_bytes(4, "little") + b"\0\0\0\0" + self._MAGIC
        with self._table.io.new_output(self.path).create(overwrite=True) as stream:
            stream.write(bytes(self._content))
        return len(self._content)
