"""The order in which rows are written: what it is, and that each row is found at the place that the writer returns."""

from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from deltawriters import TaskId
from deltawriters.content import DataFiles
from deltawriters.files import _taken
from deltawriters.ordering import RowOrder, z_values
from deltawriters.partitioning import PartitionedWriter
from deltawriters.table import FileFactory
from tests.deltawriters.test_delta import BY_REGION, UNPARTITIONED, table_at

ASCENDING = [
    pytest.param(pa.int32(), [None, -(2**31), -1, 0, 1, 2**31 - 1], id="int"),
    pytest.param(pa.int64(), [None, -(2**63), -1, 0, 2**63 - 1], id="long"),
    pytest.param(pa.float64(), [None, -np.inf, -1.5, 0.0, 1e-9, 2.0, np.inf, np.nan], id="double"),
    pytest.param(pa.float32(), [None, -2.0, 0.5, np.nan], id="float"),
    pytest.param(pa.string(), [None, "", "Z", "a", "a\x00", "ab", "same start 1", "same start 2", "é"], id="string"),
    pytest.param(pa.binary(), [None, b"", b"\x00", b"\x7f", b"\x80", b"\xff"], id="binary"),
    pytest.param(pa.binary(2), [None, b"\x00\x01", b"\x7f\xff", b"\x80\x00"], id="fixed"),
    pytest.param(pa.bool_(), [None, False, True], id="boolean"),
    pytest.param(pa.date32(), [None, date(1, 1, 1), date(1969, 12, 31), date(1970, 1, 1), date(9999, 1, 1)], id="date"),
    pytest.param(
        pa.timestamp("us", "UTC"),
        [None, datetime(1, 1, 1, tzinfo=UTC), datetime(1969, 12, 31, 23, tzinfo=UTC), datetime(2026, 1, 1, tzinfo=UTC)],
        id="timestamp",
    ),
    pytest.param(pa.timestamp("us"), [None, datetime(1969, 1, 1), datetime(2026, 1, 1)], id="timestamp_ntz"),
    pytest.param(
        pa.decimal128(20, 2), [None, Decimal("-9.50"), Decimal("-0.01"), Decimal("0.00"), Decimal("1e9")], id="decimal"
    ),
]  # fmt: skip


def shuffled(values: list[Any], seed: int = 1) -> tuple[list[Any], list[int]]:
    """The values in another order, and the number of each in the old one."""
    order = np.random.default_rng(seed).permutation(len(values)).tolist()
    return [values[n] for n in order], order


@pytest.mark.parametrize(("dtype", "ascending"), ASCENDING)
@pytest.mark.parametrize("curved", [False, True])
def test_types_have_their_order(dtype: pa.DataType, ascending: list[Any], curved: bool) -> None:
    """Also along a curve, where the other column always has the same value."""
    values, order = shuffled(ascending)
    rows = pa.table({"x": pa.array(values, dtype), "y": pa.array([7] * len(values))})
    found = RowOrder(("x", "y"), curved).permutation(rows)
    assert [order[n] for n in found] == list(range(len(values)))


def test_one_column_after_the_other() -> None:
    rows = pa.table({"day": [2, 1, 2, None, 1], "name": ["b", "b", "a", "z", "b"], "id": [0, 1, 2, 3, 4]})
    assert RowOrder(("day", "name")).permutation(rows).tolist() == [3, 1, 4, 2, 0], "equal rows stay as they are"
    assert RowOrder(("name",)).permutation(rows).tolist() == [2, 0, 1, 4, 3]


@pytest.mark.parametrize("curved", [False, True])
def test_no_rows(curved: bool) -> None:
    rows = pa.table({"x": pa.array([], pa.string()), "y": pa.array([], pa.int64())})
    assert RowOrder(("x", "y"), curved).permutation(rows).tolist() == []


def test_the_curve_is_that_of_morton() -> None:
    x, y = np.divmod(np.arange(16), 4)
    values = z_values([pa.array(x), pa.array(y)])
    # 16 rows, four of each value: ranks 0, 4, 8, 12, so the lowest two bits are always 0
    assert np.argsort(values).tolist() == [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]


@pytest.mark.parametrize("columns", [2, 3, 4])
def test_bits_are_taken_by_turns(columns: int) -> None:
    """Compared with the slow and plain way."""
    random = np.random.default_rng(columns)
    count = 1 << 17  # ranks of 18 bits, more than the 16 for each of four columns
    given = [random.permutation(count) for _ in range(columns)]
    found = z_values([pa.array(column) for column in given])
    bits = 64 // columns
    for row in range(0, count, 9973):
        expected = 0
        for bit in reversed(range(bits)):
            for column in given:
                rank = int(column[row]) >> max(0, 18 - bits)
                expected = expected << 1 | rank >> bit & 1
        assert found[row] == expected


@pytest.mark.parametrize("skewed", [False, True])
def test_a_window_is_in_few_pieces_of_the_curve(skewed: bool) -> None:
    """A square of 1/8 times 1/8 of the rows of a plane, in 64 files: sorted by one column it would be in 8 or 9 of
    them, and in no order in all. The distribution of the values doesn't matter.
    """
    random = np.random.default_rng(1)
    count = 1 << 16
    x, y = random.random(count), random.random(count)
    given = (
        [pa.array(np.exp(20 * x)), pa.array((1e12 * y**9).astype(np.int64))] if skewed else [pa.array(x), pa.array(y)]
    )
    file = np.empty(count, np.int64)
    file[np.argsort(z_values(given), kind="stable")] = np.arange(count) // (count // 64)
    touched = []
    for _ in range(200):
        left, low = random.random(2) * 7 / 8
        inside = (x >= left) & (x < left + 1 / 8) & (y >= low) & (y < low + 1 / 8)
        touched.append(len(np.unique(file[inside])))
    assert np.mean(touched) < 5
    assert max(touched) <= 9


def test_equal_values_are_no_loss_for_the_other_column() -> None:
    """One column with two values, and one with many: a filter on either finds half of the files, or less."""
    random = np.random.default_rng(1)
    count = 1 << 14
    few, many = random.integers(0, 2, count), random.permutation(count)
    file = np.empty(count, np.int64)
    file[np.argsort(z_values([pa.array(few), pa.array(many)]), kind="stable")] = np.arange(count) // (count // 32)
    assert len(np.unique(file[few == 0])) <= 17
    assert len(np.unique(file[many < count // 16])) <= 5


def test_rows_are_taken_from_several_batches() -> None:
    nested = pa.struct({"list": pa.list_(pa.string()), "map": pa.map_(pa.string(), pa.int64())})

    def batch(numbers: range) -> pa.RecordBatch:
        ids = pa.ExtensionArray.from_storage(pa.uuid(), pa.array([bytes([n] * 16) for n in numbers], pa.binary(16)))
        values = [{"list": ["x"] * n, "map": [("k", n)]} if n % 3 else None for n in numbers]
        return pa.RecordBatch.from_arrays([pa.array(numbers), ids, pa.array(values, nested)], ["n", "id", "nested"])

    parts = [batch(range(3)), batch(range(3, 4)), batch(range(4, 10))]
    numbers = np.array([9, 0, 3, 3, 2, 7])
    whole = pa.Table.from_batches(parts).to_pylist()
    assert _taken(parts, numbers).to_pylist() == [whole[n] for n in numbers]
    assert _taken(parts[:1], np.array([2, 0])).to_pylist() == [whole[2], whole[0]]


@pytest.mark.parametrize(
    "order", [RowOrder(("region",)), RowOrder(("amount", "id")), RowOrder(("id", "amount"), curved=True)]
)
@pytest.mark.parametrize("spec", [UNPARTITIONED, BY_REGION])
def test_each_row_is_where_the_writer_says(tmp_path: Path, spec: str, order: RowOrder) -> None:
    """In several files of several row groups, of several partitions and writes."""
    table = table_at(tmp_path, spec, properties={"write.target-file-size-bytes": "1500"})
    numbered = DataFiles()
    writer = PartitionedWriter(table, FileFactory(table, TaskId(0, 0, "op")), numbered, order)
    places: dict[tuple[str, int], dict[str, Any]] = {}
    random = np.random.default_rng(1)
    for start in range(0, 600, 200):
        rows = pa.table(
            [
                random.permutation(np.arange(start, start + 200)),
                pa.array([f"shop {n % 7}" for n in range(200)]),
                pa.array([None if n % 3 == 0 else f"r{n % 2}" for n in range(200)]),
                pa.array([Decimal(int(n)) for n in random.integers(-50, 50, 200)], pa.decimal128(12, 2)),
            ],
            schema=table.arrow_schema,
        )
        chunked = pa.concat_tables([rows.slice(0, 70), rows.slice(70)])
        located = writer.write(chunked)
        for row, file, pos in zip(rows.to_pylist(), located.file.tolist(), located.pos.tolist(), strict=True):
            places[numbered.path(file), pos] = row
    files = writer.close()
    assert len(places) == sum(file.record_count for file in files) == 600
    assert len(files) > 3
    for file in files:
        found = pq.read_table(file.path).to_pylist()
        assert found == [places[file.path, pos] for pos in range(len(found))]


def test_files_of_one_write_have_ranges_of_their_own(tmp_path: Path) -> None:
    table = table_at(tmp_path, properties={"write.target-file-size-bytes": "1500"})
    writer = PartitionedWriter(table, FileFactory(table, TaskId(0, 0, "op")), DataFiles(), RowOrder(("id",)))
    ids = np.random.default_rng(1).permutation(2000)
    columns = [ids, pa.repeat("s", 2000), pa.nulls(2000, pa.string()), pa.nulls(2000, pa.decimal128(12, 2))]
    writer.write(pa.table(columns, schema=table.arrow_schema))
    found = [pq.read_table(file.path)["id"].to_pylist() for file in writer.close()]
    assert len(found) > 3
    assert [n for ids in found for n in ids] == list(range(2000))
