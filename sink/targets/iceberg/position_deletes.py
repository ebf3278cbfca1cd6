"""Position deletes within one commit: rows that a later change of the same key superseded after they were written.

Format v2: Parquet files of (file_path, pos), sorted, with the reserved field ids (spec, "Position Delete Files").
Format v3: deletion vectors, one per data file. A task writes all its vectors into one Puffin file (spec, "Deletion
Vectors"; Puffin spec, `deletion-vector-v1` blob).
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.io import FileIO
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField, StringType

from deltawriters.collapse import Ints, grouped
from deltawriters.content import ContentFile, DataFiles, FileContent, OldRows, Partition, TaskId
from deltawriters.deletes import FLUSH_THRESHOLD, Deletes
from deltawriters.old_rows import DeleteGroup
from deltawriters.parquet import ParquetFileWriter
from deltawriters.resolve import delete_rows
from deltawriters.scratch import Scratch
from deltawriters.table import FileFactory, TableSpec
from deltawriters.vectors import bitmap, positions_of
from sink.targets.iceberg.column_metrics import metrics_of
from sink.targets.iceberg.content_files import content_file
from sink.targets.iceberg.puffin import POS_ID, write_deletion_vectors

FILE_PATH_ID = 2147483546
_AT_ONCE = 8
"""Files that are written at the same time."""
_FULL_METRICS = {"write.metadata.metrics.default": "full"}
"""Readers compare the bounds of `file_path`: with truncated bounds they would skip deletes that apply
(`MetricsConfig.forPositionDelete`).
"""

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


class PositionDeletes(Deletes):
    """Collects positions in the data files of `files`, and writes them as delete files of the table's format version.

    :param format_version: of the table.
    :param files: the data files whose numbers `delete` takes.
    :param flush_threshold: most positions of a v2 delete file, and those that are held at once.
    """

    def __init__(
        self,
        table: TableSpec,
        format_version: int,
        factory: FileFactory,
        files: DataFiles,
        flush_threshold: int = FLUSH_THRESHOLD,
    ) -> None:
        self._table = table
        self._format_version = format_version
        self._factory = factory
        self._files = files
        self._flush_threshold = flush_threshold
        self._pending: list[tuple[Ints, Ints]] = []
        self._pending_count = 0
        self._done: list[ContentFile] = []

    def delete(self, file: Ints, pos: Ints) -> None:
        while len(file):
            # a data file may have only one deletion vector, so in v3 the task writes nothing until it knows all rows
            room = len(file) if self._format_version >= 3 else self._flush_threshold - self._pending_count
            self._pending.append((file[:room], pos[:room]))
            self._pending_count += len(file[:room])
            file, pos = file[room:], pos[room:]
            if self._format_version < 3 and self._pending_count >= self._flush_threshold:
                self._flush()

    def close(self, data_files: list[ContentFile]) -> list[ContentFile]:
        self._flush()
        return data_files + self._done

    def _flush(self) -> None:
        if not self._pending:
            return
        file = np.concatenate([f for f, _ in self._pending])
        pos = np.concatenate([p for _, p in self._pending])
        self._pending, self._pending_count = [], 0
        if self._format_version >= 3:
            self._done.extend(self._write_vectors(file, pos))
        else:
            self._done.extend(self._write_parquet(file, pos))

    def _write_parquet(self, file: Ints, pos: Ints) -> list[ContentFile]:
        """One file a partition. A store takes its time for each, so they are written side by side."""
        by_partition: dict[Partition, list[tuple[str, int]]] = {}
        for number in np.unique(file).tolist():
            by_partition.setdefault(self._files.partition(number), []).append((self._files.path(number), number))
        rank = np.empty(len(self._files), np.int64)
        ends = np.empty(len(by_partition), np.int64)  # behind the ranks of each partition
        paths = list[str]()
        for partition, members in enumerate(by_partition.values()):
            for path, number in sorted(members):
                rank[number] = len(paths)
                paths.append(path)
            ends[partition] = len(paths)
        ranks = rank[file]
        order = np.lexsort((pos, ranks))
        ranks, pos = ranks[order], pos[order]
        names = pa.array(paths)

        def written(partition: Partition, path: str, start: int, stop: int) -> ContentFile:
            codes = ranks[start:stop]
            dictionary = pa.DictionaryArray.from_arrays(pa.array(codes.astype(np.int32)), names)
            rows = pa.table([dictionary.cast(pa.string()), pa.array(pos[start:stop])], schema=_ARROW_SCHEMA)
            writer = ParquetFileWriter(self._table.io, path, _ARROW_SCHEMA, self._table.compression)
            try:
                writer.write(rows)
                facts = writer.close()
            except BaseException:
                writer.abort()
                raise
            return content_file(
                FileContent.POSITION_DELETES,
                path,
                partition,
                facts.rows,
                facts.size_in_bytes,
                metrics_of(facts, _SCHEMA, _FULL_METRICS),
                referenced_data_file=paths[codes[0]] if codes[0] == codes[-1] else None,
            )

        stops = np.searchsorted(ranks, ends).tolist()
        new_paths = [self._factory.new_path(partition) for partition in by_partition]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return list(pool.map(written, by_partition, new_paths, [0, *stops[:-1]], stops))

    def _write_vectors(self, file: Ints, pos: Ints) -> Iterator[ContentFile]:
        order = np.lexsort((pos, file))
        file, pos = file[order], pos[order]
        vectors = [
            (self._files.path(number), self._files.partition(number), bitmap(pos[places]))
            for number, places in grouped(file)
        ]
        path = self._factory.new_path(vectors[0][1], "puffin")
        yield from write_deletion_vectors(self._table.io, path, vectors)


def write_position_deletes(
    name: str, table: TableSpec, group: DeleteGroup[None], scratch: Scratch
) -> list[ContentFile]:
    """Write the position delete files of a group of data files (v2).

    :param name: beginning of the files' names.
    :param scratch: gets the files, also after an error.
    :raises CorruptIndexError: see `DeletedRows.positions`.
    """
    # several tasks write such files for a commit, and Spark may run a task twice
    task = TaskId(0, 0, f"{name}-{uuid4().hex}-deletes")
    old = (OldRows(file, positions_of(deleted)) for file, deleted in group.rows.positions())
    return delete_rows(table, task, old, scratch)


def read_position_deletes(io: FileIO, path: str) -> tuple[list[str], Ints, Ints]:
    """Read a position delete file of n rows (v2).

    :return: paths of the data files, and for each of the n rows the data file's number among them and the position.
    """
    with io.new_input(path).open() as stream:
        rows = pq.read_table(stream, columns=["file_path", "pos"], read_dictionary=["file_path"])
    paths = rows.column("file_path").unify_dictionaries().combine_chunks()
    return paths.dictionary.to_pylist(), paths.indices.to_numpy(), rows.column("pos").to_numpy()
