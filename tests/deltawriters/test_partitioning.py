"""Partition values of what Spark sends."""

import json
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import BucketTransform, MonthTransform, TruncateTransform, YearTransform
from pyiceberg.types import DateType, DecimalType, NestedField, TimestampType

from sink.targets.iceberg.partitions import split_by_partition


@pytest.mark.parametrize("transform", [BucketTransform(4), TruncateTransform(100)])
def test_decimals_where_spark_left_them(transform: BucketTransform | TruncateTransform) -> None:  # type: ignore[type-arg]
    """Spark's Arrow streams align to 8 bytes, and PyIceberg's transforms, in Rust, panic at decimals that aren't
    aligned to 16.
    """
    amounts = pa.array([Decimal("1.10"), Decimal("2.20"), Decimal("1.10")], pa.decimal128(12, 2))
    memory = np.zeros(80, np.uint8)
    start = (8 - memory.ctypes.data) % 16
    memory[start : start + 48] = np.frombuffer(amounts.buffers()[1], np.uint8)[:48]
    unaligned = pa.Array.from_buffers(amounts.type, 3, [None, pa.py_buffer(memory).slice(start, 48)])
    assert unaligned == amounts
    schema = Schema(NestedField(1, "amount", DecimalType(12, 2), required=True))
    spec = PartitionSpec(PartitionField(1, 1000, transform, "amount_part"))
    found, expected = (
        [
            (partition, rows.tolist())
            for partition, rows in split_by_partition(spec, schema, pa.table([column], ["amount"]))
        ]
        for column in (unaligned, amounts)
    )
    assert found == expected


def test_years_that_the_transforms_do_not_know() -> None:
    """Postgres has dates up to the year 5874897. A row must not get the partition of NULL."""
    schema = Schema(NestedField(1, "day", DateType()), NestedField(2, "at", TimestampType()))
    days = pa.array([95_026_237, -719_528, None, 10_957], pa.int32()).cast(pa.date32())
    moments = pa.array([8_210_266_876_800_000_000, -1, None, 0], pa.int64()).cast(pa.timestamp("us"))
    rows = pa.table({"day": days, "at": moments})
    expected: dict[Any, list[tuple[str | None, str | None]]] = {
        YearTransform(): [("260173", "260173"), ("-1970", "-1"), (None, None), ("30", "0")],
        MonthTransform(): [("3122076", "3122076"), ("-23640", "-1"), (None, None), ("360", "0")],
    }
    for transform, values in expected.items():
        fields = (PartitionField(n, 1000 + n, transform, f"part_{n}") for n in (1, 2))
        found = {
            int(number): tuple(None if value is None else str(value) for value in json.loads(partition.text).values())
            for partition, numbers in split_by_partition(PartitionSpec(*fields), schema, rows)
            for number in numbers
        }
        assert [found[number] for number in range(4)] == values
