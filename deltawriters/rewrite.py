"""Merges small data files into large ones and leaves deleted rows out. A task of a minor compaction does this.

The key index knows which rows are live. The same writers write the rows as in a micro-batch. The task writes the new
places of the rows into the index, so the index doesn't have to read the new files.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from deltawriters.collapse import Ints
from deltawriters.content import ContentFile, StoredPartition
from deltawriters.files import DataFiles, FileFactory
from deltawriters.keyindex import (
    SUPERSEDES,
    CorruptIndexError,
    Entries,
    IndexedFile,
    IndexSlice,
    RunInfo,
    low_hash,
    write_run,
)
from deltawriters.partitioning import PartitionedWriter, as_table_types, storage
from deltawriters.positions import PositionDeletes
from deltawriters.resolve import key_columns
from deltawriters.table import TableSpec, TaskId

ROW_ID = "_row_id"
LAST_UPDATED = "_last_updated_sequence_number"
_LINEAGE_FIELDS = (
    {"id": 2147483540, "name": ROW_ID, "type": "long", "required": False},
    {"id": 2147483539, "name": LAST_UPDATED, "type": "long", "required": False},
)
_FLUSH_BYTES = 128 * 1024 * 1024
_RUN_ENTRIES = 4_000_000
"""A task holds this many index entries (24 bytes each) before it writes a run."""

HashKeys = Callable[[pa.RecordBatch], npt.NDArray[np.uint64]]
"""A function from key columns, in the types that Spark has for them, to the high hashes of the keys."""


class OtherColumnsError(ValueError):
    """A data file has other columns than the table: it was written before the table's columns changed, and committed
    after that.
    """


@dataclass(frozen=True)
class SmallFile:
    """A data file or (v2) position delete file that the sink wrote under the table's current schema and spec.

    :param first_row_id: row id of the first row, for rows that have no stored `_row_id`. None in format version 2 and
        for delete files.
    :param live_rows: number of live rows, from the table's metadata. None in v2, where only the delete files tell.
    """

    path: str
    size_in_bytes: int
    first_row_id: int | None
    sequence_number: int
    live_rows: int | None = None


@dataclass(frozen=True)
class RewriteGroup:
    """Files of one partition that a task merges: data files, or position delete files (v2).

    :param partition: JSON text of the partition value, as in `ContentFile.to_json`.
    :param files: data files to merge.
    :param deletes: position delete files to merge (v2).
    :param gone: paths of data files that this compaction merges too. Merged delete files need no positions in them.
    :param applying: all position delete files that may delete rows of `files` (v2).
    """

    spec_id: int
    partition: str
    files: tuple[SmallFile, ...]
    deletes: tuple[SmallFile, ...] = ()
    gone: frozenset[str] = frozenset()
    applying: tuple[SmallFile, ...] = ()

    @property
    def size_in_bytes(self) -> int:
        return sum(file.size_in_bytes for file in (*self.files, *self.deletes))


@dataclass(frozen=True)
class Rewritten:
    """What a task wrote: the new files, and the index runs that say where the rows are now. `paths` has the paths of
    both.
    """

    files: list[ContentFile]
    runs: list[RunInfo]
    paths: list[str]


class Rewriter:
    """Rewrites groups of small files.

    :param key: names of the key columns.
    :param index: the table's key index of the snapshot that has the files.
    :param sequence: sequence of the runs that the rewriter writes.
    :param hash_keys: computes the high hashes of keys.
    """

    def __init__(
        self, table: TableSpec, key: Sequence[str], index: IndexSlice, sequence: int, hash_keys: HashKeys, task: TaskId
    ) -> None:
        self._table = table
        self._key = list(key)
        self._index = index
        self._sequence = sequence
        self._hash_keys = hash_keys
        self._task = task
        self._factory = FileFactory(table, task)
        self._files = DataFiles()
        self._entries: list[Entries] = []
        self._runs: list[RunInfo] = []

    def rewrite(self, groups: Iterable[RewriteGroup]) -> Rewritten:
        """Write the new files and index runs of all groups. After any exception, all files written here are deleted.

        :raises CorruptIndexError: a run is damaged or missing, or the index and the table differ in a file's live rows.
        :raises OtherColumnsError: a file has other columns than the table.
        """
        data = PartitionedWriter(self._written_table, self._factory, self._files, lasting=True)
        deletes = PositionDeletes(self._table, self._factory, self._files)
        try:
            for group in groups:
                for rows, high, low, superseding in self._live_rows(group.files, self._deleted(group)):
                    located = data.write(rows)
                    file = located.file.astype(np.uint32) | np.where(superseding, SUPERSEDES, np.uint32(0))
                    self._entries.append(Entries(high, low, file, located.pos.astype(np.uint32), ()))
                    if sum(len(part.high) for part in self._entries) >= _RUN_ENTRIES:
                        self._write_run()
                self._delete_again(group, deletes)
            files = data.close() + deletes.close()
            self._write_run()
        except BaseException:
            data.abort()
            self._factory.delete_all()
            for run in self._runs:
                self._index.io.delete(f"{self._index.location}/{run.name}")
            raise
        paths = [*self._factory.created, *(f"{self._index.location}/{run.name}" for run in self._runs)]
        return Rewritten(files, self._runs, paths)

    @cached_property
    def _written_table(self) -> TableSpec:
        """In v3 the table with the columns of the row lineage (spec, "Row Lineage"): a moved row keeps its row id."""
        if self._table.format_version < 3:
            return self._table
        schema = json.loads(self._table.schema)
        schema["fields"] += _LINEAGE_FIELDS
        # These columns get no bounds: a null in them means that the value is inherited, so bounds would mislead.
        no_metrics = tuple((f"write.metadata.metrics.column.{name}", "none") for name in (ROW_ID, LAST_UPDATED))
        return replace(self._table, schema=json.dumps(schema), properties=(*self._table.properties, *no_metrics))

    def _live_rows(
        self, files: Sequence[SmallFile], deleted: Mapping[str, Ints]
    ) -> Iterator[tuple[pa.Table, npt.NDArray[np.uint64], npt.NDArray[np.uint64], npt.NDArray[np.bool_]]]:
        """The rows to keep, about a row group at a time.

        :param deleted: positions that delete files delete, by path of the data file (v2).
        :return: tuples of n rows, the n high and n low hashes of their keys, and n flags. A flag is true if the key has
            no other live row.
        """
        waiting, size = list[tuple[pa.Table, Ints, Ints, npt.NDArray[np.bool_]]](), 0
        for small in files:
            rows = self._read(small)
            keys = rows.select(self._key)
            high = self._hash_keys(_as_spark_types(keys))
            low = low_hash(key_columns(self._table, keys), self._index.base)
            located = self._index.probe(high, low, 0, 2**64)
            own = next((n for n, file in enumerate(located.files) if file.path == small.path), -1)
            query = located.query[(located.file == own) & (located.pos == located.query)]
            alone = np.bincount(located.query, minlength=len(high)) == 1
            live = np.sort(query)
            self._check_live(small, live, len(rows), deleted)
            waiting.append((rows.take(pa.array(live)), high[live], low[live], alone[live]))
            size += waiting[-1][0].nbytes
            if size >= _FLUSH_BYTES:
                yield _joined(waiting)
                waiting, size = [], 0
        if any(len(high) for _, high, _, _ in waiting):
            yield _joined(waiting)

    def _check_live(self, small: SmallFile, live: Ints, rows: int, deleted: Mapping[str, Ints]) -> None:
        """Check that the index knows the same live rows as the table. The rewrite would lose a row that the index
        doesn't know.

        :param live: positions of the live rows by the index, ascending.
        :param rows: number of rows in the file.
        :param deleted: positions that delete files delete, by path of the data file (v2).
        :raises CorruptIndexError: the index knows other rows.
        """
        if small.live_rows is not None:
            is_right, expected = len(live) == small.live_rows, small.live_rows
        else:
            kept = np.ones(rows, np.bool_)
            if small.path in deleted:
                kept[deleted[small.path]] = False
            is_right, expected = np.array_equal(live, np.flatnonzero(kept)), int(np.count_nonzero(kept))
        if not is_right:
            raise CorruptIndexError(
                f"the index and the table have different live rows for {small.path}: "
                f"the index knows {len(live):,}, the table has {expected:,}"
            )

    def _deleted(self, group: RewriteGroup) -> dict[str, Ints]:
        """The positions that delete files delete in the group's data files, by path of the data file (v2)."""
        found: dict[str, list[Ints]] = {small.path: [] for small in group.files}
        for small in group.applying:
            names, file, pos = self._read_deletes(small)
            for number in np.flatnonzero([name in found for name in names]).tolist():
                found[names[number]].append(pos[file == number])
        return {path: np.concatenate(parts) for path, parts in found.items() if parts}

    def _read_deletes(self, small: SmallFile) -> tuple[list[str], Ints, Ints]:
        """Read a position delete file of n rows.

        :return: paths of the data files, and for each of the n rows the data file's number among them and the position.
        """
        with self._table.io.new_input(small.path).open() as stream:
            rows = pq.read_table(stream, columns=["file_path", "pos"], read_dictionary=["file_path"])
        paths = rows.column("file_path").unify_dictionaries().combine_chunks()
        return paths.dictionary.to_pylist(), paths.indices.to_numpy(), rows.column("pos").to_numpy()

    def _read(self, small: SmallFile) -> pa.Table:
        with self._table.io.new_input(small.path).open() as stream:
            rows = pq.read_table(stream)
        self._check_columns(small, rows.schema)
        if self._table.format_version >= 3:
            inherited = {
                ROW_ID: pa.nulls(len(rows), pa.int64())
                if small.first_row_id is None
                else pa.array(np.arange(small.first_row_id, small.first_row_id + len(rows))),
                LAST_UPDATED: pa.repeat(pa.scalar(small.sequence_number, pa.int64()), len(rows)),
            }
            for name, values in inherited.items():
                if name in rows.column_names:
                    stored = rows.column(name)
                    rows = rows.set_column(
                        rows.column_names.index(name), name, pc.coalesce(stored, pa.chunked_array([values]))
                    )
                else:
                    rows = rows.append_column(name, values)
        return as_table_types(rows, self._written_table.arrow_schema)

    def _check_columns(self, small: SmallFile, found: pa.Schema) -> None:
        """Check that the file's columns have the names and field ids of the table's columns. The rewriter finds columns
        by name, and the schema id of the file's commit doesn't tell which schema the file was written with.

        :raises OtherColumnsError: names or field ids differ.
        """
        stored = {field.name: _field_id(field) for field in found if field.name not in (ROW_ID, LAST_UPDATED)}
        wanted = {field.name: _field_id(field) for field in self._table.arrow_schema}
        if stored != wanted:
            raise OtherColumnsError(f"{small.path} has other columns than the table")

    def _delete_again(self, group: RewriteGroup, deletes: PositionDeletes) -> None:
        """Add to `deletes` all positions of the group's delete files, except those in the data files `group.gone`."""
        numbers: dict[str, int] = {}
        for small in group.deletes:
            names, codes, pos = self._read_deletes(small)
            for data_file in names:
                if data_file not in numbers and data_file not in group.gone:
                    numbers[data_file] = self._files.add(data_file, StoredPartition(group.spec_id, group.partition))
            file = np.array([numbers.get(data_file, -1) for data_file in names], np.int64)[codes]
            deletes.delete(file[file >= 0], pos[file >= 0])

    def _write_run(self) -> None:
        if not self._entries:
            return
        name = f"{self._task.operation}-{self._task.partition:05d}-{self._task.attempt}-{len(self._runs)}"
        files, schema = self._files, self._table.iceberg_schema
        entries = Entries(
            high=np.concatenate([part.high for part in self._entries]),
            low=np.concatenate([part.low for part in self._entries]),
            file=np.concatenate([part.file for part in self._entries]),
            pos=np.concatenate([part.pos for part in self._entries]),
            files=tuple(
                IndexedFile(files.path(n), files.partition(n).spec_id, files.partition(n).json(schema))
                for n in range(len(files))
            ),
        )
        self._runs.append(write_run(self._index.io, self._index.location, name, self._sequence, entries))
        self._entries = []


def _joined(
    parts: Sequence[tuple[pa.Table, Ints, Ints, npt.NDArray[np.bool_]]],
) -> tuple[pa.Table, npt.NDArray[np.uint64], npt.NDArray[np.uint64], npt.NDArray[np.bool_]]:
    tables, high, low, alone = zip(*parts, strict=True)
    return pa.concat_tables(tables), np.concatenate(high), np.concatenate(low), np.concatenate(alone)


def _as_spark_types(keys: pa.Table) -> pa.RecordBatch:
    """The key columns in Spark's types: binary for Iceberg's uuid, other types as they are."""
    columns = []
    for column in keys.columns:
        values = storage(column)
        columns.append(values.cast(pa.binary()) if pa.types.is_fixed_size_binary(values.type) else values)
    return pa.RecordBatch.from_arrays(columns, keys.column_names)


def _field_id(field: pa.Field) -> bytes | None:
    """The Parquet field id. It is the id of the column in the table's schema."""
    return (field.metadata or {}).get(b"PARQUET:field_id")
