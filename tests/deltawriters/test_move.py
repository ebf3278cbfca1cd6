"""The mover of rows, at files of many row groups."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from deltawriters import TaskId, move, parquet
from deltawriters import move as mover
from deltawriters.content import DataFile, DataFiles, DeleteFile, Locations, OldRows, Partition
from deltawriters.delete_files import RewriteGroup
from deltawriters.keyindex import CorruptIndexError, Entries, IndexedFile, IndexSlice, Located, low_hash, write_run
from deltawriters.move import CopyGroup, MovedFiles, Mover
from deltawriters.old_rows import DeletedRows
from deltawriters.partitioning import PartitionedWriter
from deltawriters.superseded import SupersededRows
from deltawriters.table import FileFactory
from sink.targets.iceberg.writers import IcebergTableSpec
from tests.deltawriters.test_parquet import rows, table_at

ROWS, GROUP = 100_000, 10_000


def data_file(path: str, sequence_number: int) -> DataFile:
    return DataFile(IndexedFile(path, 0, {}), Path(path).stat().st_size, None, sequence_number)


class Moving:
    """A data file of ten row groups, a third of whose rows are deleted by a position delete file.

    :param unknown: a live row that the key index doesn't know.
    """

    def __init__(self, folder: Path, unknown: int | None = None, group: int = GROUP) -> None:
        self.table: IcebergTableSpec = table_at(folder)
        written = rows(self.table, ROWS)
        path = f"{self.table.location}/data/old.parquet"
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(written, path, row_group_size=group)
        dead = np.arange(0, ROWS, 3)
        self.live = np.setdiff1d(np.arange(ROWS), dead)
        self.expected = written.take(pa.array(self.live))
        files = DataFiles()
        deletes = self.table.deletes(FileFactory(self.table, TaskId(0, 1, "deletes")), files)
        number = files.add(path, Partition(0, "{}"))
        deletes.delete(np.full(len(dead), number), dead)
        (deleted,) = deletes.close([])
        known = self.live if unknown is None else self.live[self.live != unknown]
        high = pc.cast(written.column("id"), pa.uint64()).to_numpy()[known]
        low = low_hash([written.column("id").combine_chunks()])[known]
        by_hash = np.lexsort((low, high))
        entries = Entries(
            high[by_hash],
            low[by_hash],
            np.zeros(len(known), np.uint32),
            known[by_hash].astype(np.uint32),
            (IndexedFile(path, 0, {}),),
        )
        self.index = IndexSlice(str(folder), (), (write_run(self.table.io, str(folder), "run", 1, entries),), dead={})
        applying = DeleteFile(deleted.path, deleted.size_in_bytes)
        self.group = RewriteGroup(0, "{}", (data_file(path, 1),), applying=(applying,))
        self.seen: list[tuple[int, int]] = []
        """Rows whose keys are hashed at once, and bytes that Arrow holds then."""

    def mover(self) -> Mover:
        return Mover(self.table, ["id"], self.index, 2, self._hashed, TaskId(0, 2, "move"))

    def copied(self, gone: npt.NDArray[np.int64]) -> MovedFiles:
        """With `deletes: copy-on-write`. The file has deletes already, and a commit deletes further rows."""
        (old,), (deletes,) = self.group.files, self.group.applying
        file = IndexedFile(old.path, 0, {})
        touched = DataFile(file, old.size_in_bytes, None, 1, deletes=(deletes.path,))
        moved = self.mover().move([CopyGroup((touched,), DeletedRows().with_rows([OldRows(file, gone)]))])
        assert moved.rows == len(self.live) - len(gone)
        stay = pa.array(~np.isin(self.live, gone))
        copied = pa.concat_tables(pq.read_table(written.path) for written in moved.files)
        assert copied.equals(self.expected.filter(stay))
        return moved

    def _hashed(self, keys: pa.RecordBatch) -> npt.NDArray[np.uint64]:
        self.seen.append((keys.num_rows, pa.total_allocated_bytes()))
        return _hashed(keys)


def test_a_file_is_moved_a_row_group_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(move, "ROW_GROUP_BYTES", 1)
    moving = Moving(tmp_path)
    moved = moving.mover().move([moving.group])
    assert moved.rows == len(moving.live)
    data = [file for file in moved.files if file.path.endswith(".parquet")]
    assert pa.concat_tables(pq.read_table(file.path) for file in data).equals(moving.expected)
    assert [count for count, _ in moving.seen] == [GROUP] * (ROWS // GROUP)
    first, last = moving.seen[0][1], moving.seen[-1][1]
    assert last - first < moving.expected.nbytes / 2, moving.seen


def test_a_file_is_copied_a_row_group_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(move, "ROW_GROUP_BYTES", 1)
    moving = Moving(tmp_path)
    moving.copied(moving.live[::100])
    assert len(moving.seen) == ROWS // GROUP
    first, last = moving.seen[0][1], moving.seen[-1][1]
    assert last - first < moving.expected.nbytes / 2, moving.seen


@pytest.mark.parametrize("per_slice", [1_000, GROUP - 1, GROUP, 999_999])
def test_a_row_group_is_copied_in_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, per_slice: int) -> None:
    """It was decoded whole, and then its rows that stay were a second copy."""
    monkeypatch.setattr(parquet, "_SLICE_ROWS", per_slice)
    moving = Moving(tmp_path, group=ROWS // 2)
    before = pa.total_allocated_bytes()
    moving.copied(moving.live[::100])
    slices = -(-ROWS // 2 // min(per_slice, ROWS // 2)) * 2
    assert len(moving.seen) == slices
    first, last = moving.seen[0][1] - before, moving.seen[-1][1] - before
    if per_slice == 1_000:
        assert first < moving.expected.nbytes, (first, moving.expected.nbytes)
        assert last - first < 1.2 * moving.expected.nbytes, (first, last, moving.expected.nbytes)


def test_a_slice_without_a_row_that_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "_SLICE_ROWS", 1_000)
    moving = Moving(tmp_path)
    moving.copied(moving.live[(moving.live < 2_500) | (moving.live >= ROWS - 1_000)])
    assert len(moving.seen) == (ROWS - 3_000) // 1_000


def test_row_groups_are_as_large_as_they_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices come together, and no small row group is left between two large ones."""
    monkeypatch.setattr(parquet, "_SLICE_ROWS", 1_000)
    moving = Moving(tmp_path)
    monkeypatch.setattr(move, "ROW_GROUP_BYTES", moving.expected.nbytes * 2 // 5)
    (written,) = moving.copied(moving.live[::100]).files
    footer = pq.read_metadata(written.path)
    sizes = [footer.row_group(number).num_rows for number in range(footer.num_row_groups)]
    assert len(sizes) == 3
    assert min(sizes[:-1]) > 0.95 * max(sizes), sizes


def test_rows_wait_for_others_up_to_a_size() -> None:
    """Rows without a key, too: each kind once had a size of its own."""
    held = most = 0
    counts = [(3, True), (3, False), (3, True), (20, True), (1, True), (0, True), *[(4, True), (4, False)] * 4]

    def parts() -> Iterator[mover.Moved]:
        nonlocal held, most
        for count, has_key in counts:
            held += count
            most = max(most, held - count)
            hashes = np.zeros(count if has_key else 0, np.uint64)
            yield pa.table({"id": np.arange(count)}), hashes, hashes, hashes.astype(np.bool_)

    found = []
    for rows_, high, _, _ in mover._together(parts(), 10 * 8):
        held -= len(rows_)
        found.append((len(rows_), len(high)))
    assert sum(count for count, _ in found) == sum(count for count, _ in counts)
    assert all(hashes in (0, count) for count, hashes in found)
    assert most <= 10


def test_what_a_task_supersedes_leaves_row_groups_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "_SLICE_ROWS", 100)
    table: IcebergTableSpec = table_at(tmp_path)
    factory, files = FileFactory(table, TaskId(0, 0, "batch")), DataFiles()
    writer = PartitionedWriter(table, factory, files)
    written = rows(table, 1_000)
    located = writer.write(written)
    superseded = SupersededRows(table, factory, files, lasting=False)
    superseded.delete(located.file[500:501], located.pos[500:501])
    left = np.delete(np.arange(1_000), 500)
    places = Locations(located.file[left], located.pos[left])
    (new,) = superseded.removed(writer.close(), places)
    assert pq.read_metadata(new.path).num_row_groups == 1
    assert pq.read_table(new.path).equals(written.take(pa.array(left)))
    assert places.pos.tolist() == list(range(999))


@pytest.mark.parametrize("unknown", [1, ROWS // 2, ROWS - 2])
def test_a_row_that_the_index_lacks_is_found_in_any_row_group(tmp_path: Path, unknown: int) -> None:
    moving = Moving(tmp_path, unknown)
    assert unknown in moving.live
    before = set(tmp_path.rglob("*.parquet"))
    with pytest.raises(CorruptIndexError, match="the index knows 66,665, the table has 66,666"):
        moving.mover().move([moving.group])
    assert set(tmp_path.rglob("*.parquet")) == before


def test_a_store_that_deletes_nothing_does_not_hide_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("nothing may be deleted here")

    mover = (moving := Moving(tmp_path, ROWS - 2)).mover()
    monkeypatch.setattr(move, "RUN_ENTRIES", GROUP // 2)
    monkeypatch.setattr(move, "ROW_GROUP_BYTES", 1)
    monkeypatch.setattr(type(mover._index.io), "delete", refuse)
    with pytest.raises(CorruptIndexError):
        mover.move([moving.group])
    assert mover._runs


class Overlapping:
    """Three small files of 100 rows. Each has the newer rows of half of the keys of the one before it.

    :param unknown: a key that the key index doesn't know.
    """

    def __init__(self, folder: Path, unknown: int | None = None) -> None:
        self.table: IcebergTableSpec = table_at(folder)
        versions = rows(self.table, 300)  # three different rows, of which each key has one or two
        self.paths = [f"{self.table.location}/data/{number}.parquet" for number in range(3)]
        Path(self.paths[0]).parent.mkdir(parents=True, exist_ok=True)
        files, smalls, parts = DataFiles(), list[DataFile](), list[pa.Table]()
        deletes = self.table.deletes(FileFactory(self.table, TaskId(0, 1, "deletes")), files)
        for number, path in enumerate(self.paths):
            part = versions.slice(100 * number, 100)
            parts.append(part.set_column(0, part.schema.field(0), pa.array(np.arange(100) + 50 * number)))
            pq.write_table(parts[-1], path)
            smalls.append(data_file(path, number))
            if number < 2:
                deletes.delete(np.full(50, files.add(path, Partition(0, "{}"))), np.arange(50, 100))
        (deleted,) = deletes.close([])
        self.expected = pa.concat_tables([parts[0].slice(0, 50), parts[1].slice(0, 50), parts[2]])
        ids = np.arange(200)
        file = np.minimum(ids // 50, 2)
        known = ids != unknown
        high, low = ids.astype(np.uint64), low_hash([pa.array(ids)])
        by_hash = np.lexsort((low, high))[known]
        places = tuple(IndexedFile(path, 0, {}) for path in self.paths)
        entries = Entries(
            high[by_hash],
            low[by_hash],
            file[by_hash].astype(np.uint32),
            (ids - 50 * file)[by_hash].astype(np.uint32),
            places,
        )
        self.index = IndexSlice(str(folder), (), (write_run(self.table.io, str(folder), "run", 1, entries),), dead={})
        applying = DeleteFile(deleted.path, deleted.size_in_bytes)
        self.group = RewriteGroup(0, "{}", tuple(smalls), applying=(applying,))

    def moved(self) -> pa.Table:
        mover = Mover(self.table, ["id"], self.index, 2, _hashed, TaskId(0, 2, "move"))
        return pa.concat_tables(pq.read_table(file.path) for file in mover.move([self.group]).files)


def _hashed(keys: pa.RecordBatch) -> npt.NDArray[np.uint64]:
    hashed: npt.NDArray[np.uint64] = pc.cast(keys.column(0), pa.uint64()).to_numpy()
    return hashed


@pytest.mark.parametrize("flush", [1, 1 << 30], ids=["file by file", "at once"])
def test_the_index_is_asked_once_for_many_small_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flush: int
) -> None:
    asked: list[int] = []
    probe = IndexSlice.probe

    def counted(self: IndexSlice, high: npt.NDArray[np.uint64], *arguments: Any) -> Located:
        asked.append(len(high))
        return probe(self, high, *arguments)

    monkeypatch.setattr(IndexSlice, "probe", counted)
    monkeypatch.setattr(move, "ROW_GROUP_BYTES", flush)
    files = Overlapping(tmp_path)
    assert files.moved().sort_by("id").equals(files.expected.sort_by("id"))
    assert asked == ([100, 100, 100] if flush == 1 else [300])


@pytest.mark.parametrize(("unknown", "file"), [(7, 0), (60, 1), (199, 2)])
def test_the_file_of_a_row_that_the_index_lacks_is_named(tmp_path: Path, unknown: int, file: int) -> None:
    files = Overlapping(tmp_path, unknown)
    with pytest.raises(CorruptIndexError, match=f"different live rows for {files.paths[file]}: "):
        files.moved()


@pytest.mark.parametrize("apart", [False, True])
def test_merged_delete_files_are_one_however_many_positions_they_have(tmp_path: Path, apart: bool) -> None:
    """A merge that left several of them would be due again at once, and never end."""
    table = table_at(tmp_path)
    paths = [f"{table.location}/data/{number}.parquet" for number in range(3)]
    smalls = []
    for part in range(2):  # both delete rows of all data files
        files = DataFiles()
        deletes = table.deletes(FileFactory(table, TaskId(0, part, "deletes")), files)
        for path in paths:
            number = files.add(path, Partition(0, "{}"))
            deletes.delete(np.full(250_000, number), np.arange(200_000 * part, 200_000 * part + 250_000))
        (written,) = deletes.close([])
        smalls.append(DeleteFile(written.path, written.size_in_bytes))
    group = RewriteGroup(0, "{}", (), tuple(smalls), live=frozenset(paths[:2] if apart else paths), apart=apart)
    mover = Mover(table, ["id"], IndexSlice(str(tmp_path), (), (), dead={}), 2, _hashed, TaskId(0, 3, "merge"))
    merged = [pq.read_table(file.path) for file in mover.move([group]).files]
    expected = [[path] for path in paths[:2]] if apart else [paths]
    assert [part.column("file_path").unique().to_pylist() for part in merged] == expected
    assert [part.num_rows for part in merged] == [450_000 * len(names) for names in expected]
