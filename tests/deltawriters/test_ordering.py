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
from deltawriters.ordering import RowOrder
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
def test_types_have_their_order(dtype: pa.DataType, ascending: list[Any]) -> None:
    values, order = shuffled(ascending)
    rows = pa.table({"x": pa.array(values, dtype), "y": pa.array([7] * len(values))})
    found = RowOrder(("x", "y")).permutation(rows)
    assert [order[n] for n in found] == list(range(len(values)))


def test_one_column_after_the_other() -> None:
    rows = pa.table({"day": [2, 1, 2, None, 1], "name": ["b", "b", "a", "z", "b"], "id": [0, 1, 2, 3, 4]})
    assert RowOrder(("day", "name")).permutation(rows).tolist() == [3, 1, 4, 2, 0], "equal rows stay as they are"
    assert RowOrder(("name",)).permutation(rows).tolist() == [2, 0, 1, 4, 3]


def test_the_largest_first_and_null_last() -> None:
    rows = pa.table({"day": [2, None, 1, 2, 3], "value": [np.nan, 1.0, 1.0, None, 1.0]})
    assert RowOrder(("day",), descending=frozenset(["day"])).permutation(rows).tolist() == [1, 4, 0, 3, 2]
    assert RowOrder(("day",), nulls_last=frozenset(["day"])).permutation(rows).tolist() == [2, 0, 3, 4, 1]
    both = frozenset(["day", "value"])
    assert RowOrder(("day", "value"), both, both).permutation(rows).tolist() == [4, 0, 3, 2, 1]


def test_no_rows() -> None:
    rows = pa.table({"x": pa.array([], pa.string()), "y": pa.array([], pa.int64())})
    assert RowOrder(("x", "y")).permutation(rows).tolist() == []


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


@pytest.mark.parametrize("order", [RowOrder(("region",)), RowOrder(("amount", "id")), RowOrder(("id", "amount"))])
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
