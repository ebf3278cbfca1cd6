"""How files are packed: by how long their bytes will live, and with dictionaries where values repeat."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from deltawriters.content import ContentFile, DataFile, DataFiles, TaskId
from deltawriters.delete_files import RewriteGroup
from deltawriters.keyindex import SUPERSEDES, Entries, IndexedFile, IndexSlice, low_hash, write_run
from deltawriters.move import Mover
from deltawriters.parquet import ParquetFileWriter
from deltawriters.partitioning import LASTING_BYTES, PartitionedWriter
from deltawriters.table import FileFactory
from sink.targets.iceberg.writers import IcebergTableSpec

SCHEMA = """{"type":"struct","schema-id":0,"identifier-field-ids":[1],"fields":[
  {"id":1,"name":"id","required":true,"type":"long"},
  {"id":2,"name":"customer","required":false,"type":"long"},
  {"id":3,"name":"note","required":false,"type":"string"},
  {"id":4,"name":"comment","required":false,"type":"string"}]}"""
UNPARTITIONED = '{"spec-id":0,"fields":[]}'
BY_ID = '{"spec-id":0,"fields":[{"name":"id_bucket","transform":"bucket[8]","source-id":1,"field-id":1000}]}'


def table_at(folder: Path, spec: str = UNPARTITIONED, **properties: str) -> IcebergTableSpec:
    named = {f"write.parquet.{name.replace('_', '-')}": value for name, value in properties.items()}
    return IcebergTableSpec(str(folder), 2, SCHEMA, (spec,), 0, tuple(named.items()))


def texts(count: int, words: int) -> pa.Array:
    """Different texts of common words."""
    random = np.random.default_rng(count)
    known = pa.array([f"{word:x}" * 2 for word in range(300)])
    return pc.binary_join_element_wise(
        *(known.take(pa.array(random.integers(300, size=count))) for _ in range(words)), " "
    )


def rows(table: IcebergTableSpec, count: int) -> pa.Table:
    """Customers and notes repeat, every thousands of rows; a comment is never the same."""
    random = np.random.default_rng(1)
    columns = [
        pa.array(np.arange(count)),
        pa.array(random.integers(count // 10, size=count) * 1_000_003),
        texts(6000, words=10).take(pa.array(random.integers(6000, size=count))),
        texts(count, words=5),
    ]
    return pa.Table.from_arrays(columns, schema=table.arrow_schema)


def write(table: IcebergTableSpec, written: pa.Table, *, lasting: bool = False) -> list[ContentFile]:
    writer = PartitionedWriter(table, FileFactory(table, TaskId(0, 1, "op")), DataFiles(), lasting=lasting)
    writer.write(written, last=True)
    return writer.close()


def bytes_of(table: IcebergTableSpec, written: pa.Table, level: int) -> int:
    """Size of the files at a level of zstd."""
    leveled = IcebergTableSpec(
        table.location, 2, SCHEMA, table.specs, 0, (("write.parquet.compression-level", str(level)),)
    )
    return sum(file.size_in_bytes for file in write(leveled, written))


@pytest.mark.parametrize("spec", [UNPARTITIONED, BY_ID], ids=["unpartitioned", "partitioned"])
def test_large_writes_and_merged_files_are_packed_well(tmp_path: Path, spec: str) -> None:
    """Large files are packed by zstd's level 3, like those of Spark's writer, and small files by level 1. The number of
    the task's rows decides, whatever the number of partitions.
    """
    table = table_at(tmp_path, spec)
    large = rows(table, 200_000)
    assert large.nbytes >= LASTING_BYTES
    small = large.slice(0, 20_000)
    well, fast = bytes_of(table, large, 3), bytes_of(table, large, 1)
    assert well < 0.95 * fast
    assert sum(file.size_in_bytes for file in write(table, large)) == well
    assert sum(file.size_in_bytes for file in write(table, small)) == bytes_of(table, small, 1)
    assert sum(file.size_in_bytes for file in write(table, small, lasting=True)) == bytes_of(table, small, 3)


def test_merged_files_are_packed_well(tmp_path: Path) -> None:
    table = table_at(tmp_path)
    written = rows(table, 20_000)
    (small,) = write(table, written)
    high, file = np.arange(20_000, dtype=np.uint64), np.full(20_000, SUPERSEDES, np.uint32)
    low = low_hash([written.column("id").combine_chunks()])
    entries = Entries(high, low, file, np.arange(20_000, dtype=np.uint32), (IndexedFile(small.path, 0, {}),))
    run = write_run(table.io, str(tmp_path), "run", 1, entries)
    index = IndexSlice(str(tmp_path), (), (run,), dead={})
    mover = Mover(table, ["id"], index, 2, lambda keys: high[: keys.num_rows], TaskId(0, 2, "merge"))
    group = RewriteGroup(0, "{}", (DataFile(IndexedFile(small.path, 0, {}), small.size_in_bytes, None, 1),))
    (merged,) = mover.move([group]).files
    assert pq.read_table(merged.path).equals(written)
    assert merged.size_in_bytes == bytes_of(table, written, 3) < bytes_of(table, written, 1)


def test_the_tables_own_level_and_codec_win(tmp_path: Path) -> None:
    for number, properties in enumerate(({"compression_level": "9"}, {"compression_codec": "gzip"})):
        table = table_at(tmp_path / str(number), **properties)
        written = rows(table, 20_000)
        (soon,), (late,) = write(table, written), write(table, written, lasting=True)
        assert soon.size_in_bytes == late.size_in_bytes
        assert pq.ParquetFile(late.path).metadata.row_group(0).column(0).compression == (
            properties.get("compression_codec", "zstd").upper()
        )


def test_values_that_repeat_after_thousands_of_rows_get_a_dictionary(tmp_path: Path) -> None:
    table = table_at(tmp_path)
    (file,) = write(table, rows(table, 200_000))
    group = pq.ParquetFile(file.path).metadata.row_group(0)
    chunks = [group.column(position) for position in range(group.num_columns)]
    assert {chunk.path_in_schema: chunk.has_dictionary_page for chunk in chunks} == {
        "id": False,
        "customer": True,
        "note": True,
        "comment": False,
    }
    # 6,000 different notes: 13 bits a row, and each of them once
    assert chunks[2].total_compressed_size < 3 * group.num_rows


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_file_of_few_rows(tmp_path: Path, count: int) -> None:
    table = table_at(tmp_path)
    written = rows(table, 20).slice(0, count)
    writer = ParquetFileWriter(table.io, f"{tmp_path}/a.parquet", table.file_schema, table.compression, lasting=True)
    writer.write(written)
    writer.close()
    assert pq.read_table(f"{tmp_path}/a.parquet").to_pylist() == written.to_pylist()
