"""Small data files into large ones, without the rows that are deleted: the writing half of a minor compaction.

Which rows live is asked of the key index, so no delete is read. The rows go through the writers that a micro-batch's
rows go through, and the index learns where they are now: nothing has to be read again.
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
"""Index entries held before a run is written (24 bytes each)."""

HashKeys = Callable[[pa.RecordBatch], npt.NDArray[np.uint64]]
"""High hashes of keys, given in the types that Spark has for them."""


class OtherColumnsError(ValueError):
    """A data file was written before the table's columns changed, and committed after."""


@dataclass(frozen=True)
class SmallFile:
    """A file that the sink wrote under the table's current schema and spec: data, or (v2) position deletes.

    :param first_row_id: of the rows that have no `_row_id` of their own; None before format version 3, and of deletes.
    :param live_rows: how many there are by the table's metadata; None in v2, where the delete files tell.
    """

    path: str
    size_in_bytes: int
    first_row_id: int | None
    sequence_number: int
    live_rows: int | None = None


@dataclass(frozen=True)
class RewriteGroup:
    """Files of one partition that are to become one: data files, or position delete files (v2).

    :param partition: as in `ContentFile.to_json`.
    :param gone: data files that are merged too, so that none of their rows has to be deleted.
    :param applying: in v2 all position delete files that may delete rows of `files`.
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
    """What a task wrote instead of its groups' files: new ones, and runs that say where the rows are now."""

    files: list[ContentFile]
    runs: list[RunInfo]
    paths: list[str]


class Rewriter:
    """Rewrites groups of small files.

    :param index: the table's key index as of the snapshot that has the files.
    :param sequence: of the runs to write.
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
        """:raises CorruptIndexError: a run is not as it was written.
        :raises OtherColumnsError: a file isn't of the table's schema. Whatever is raised, no file that was written is
            left.
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
        """The table, with the columns that keep rows' identities (spec, "Row Lineage"): a row that is only moved keeps
        its own.
        """
        if self._table.format_version < 3:
            return self._table
        schema = json.loads(self._table.schema)
        schema["fields"] += _LINEAGE_FIELDS
        # no bounds: what is null there is inherited, and says nothing
        no_metrics = tuple((f"write.metadata.metrics.column.{name}", "none") for name in (ROW_ID, LAST_UPDATED))
        return replace(self._table, schema=json.dumps(schema), properties=(*self._table.properties, *no_metrics))

    def _live_rows(
        self, files: Sequence[SmallFile], deleted: Mapping[str, Ints]
    ) -> Iterator[tuple[pa.Table, npt.NDArray[np.uint64], npt.NDArray[np.uint64], npt.NDArray[np.bool_]]]:
        """Rows to keep, the two halves of their keys' hashes, and whether no other row of the key lives; about a row
        group at a time.

        :param deleted: positions that delete files delete, by data file (v2).
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
        """That the index knows the rows which the table has: what it misses would be lost.

        :raises CorruptIndexError: it doesn't.
        """
        if small.live_rows is not None:
            is_right, expected = len(live) == small.live_rows, small.live_rows
        else:
            kept = np.ones(rows, np.bool_)
            if small.path in deleted:
                kept[deleted[small.path]] = False
            is_right, expected = np.array_equal(live, np.flatnonzero(kept)), int(np.count_nonzero(kept))
        if not is_right:
            raise CorruptIndexError(f"it knows {len(live):,} rows of {small.path}, which has {expected:,}, or others")

    def _deleted(self, group: RewriteGroup) -> dict[str, Ints]:
        """Positions that delete files delete from the group's data files."""
        found: dict[str, list[Ints]] = {small.path: [] for small in group.files}
        for small in group.applying:
            names, file, pos = self._read_deletes(small)
            for number in np.flatnonzero([name in found for name in names]).tolist():
                found[names[number]].append(pos[file == number])
        return {path: np.concatenate(parts) for path, parts in found.items() if parts}

    def _read_deletes(self, small: SmallFile) -> tuple[list[str], Ints, Ints]:
        """Of a position delete file: data files, and of each row the data file's number and the position."""
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
        """The columns are found by name. So they have to be the table's, by their field ids, which its schema at the
        commit doesn't say.
        """
        stored = {field.name: _field_id(field) for field in found if field.name not in (ROW_ID, LAST_UPDATED)}
        wanted = {field.name: _field_id(field) for field in self._table.arrow_schema}
        if stored != wanted:
            raise OtherColumnsError(f"{small.path} has other columns than the table")

    def _delete_again(self, group: RewriteGroup, deletes: PositionDeletes) -> None:
        """What the group's delete files delete from other data files."""
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
    """Spark's binary where Iceberg has uuids."""
    columns = []
    for column in keys.columns:
        values = storage(column)
        columns.append(values.cast(pa.binary()) if pa.types.is_fixed_size_binary(values.type) else values)
    return pa.RecordBatch.from_arrays(columns, keys.column_names)


def _field_id(field: pa.Field) -> bytes | None:
    """The Parquet field id, which is the column's in the table's schema."""
    return (field.metadata or {}).get(b"PARQUET:field_id")
