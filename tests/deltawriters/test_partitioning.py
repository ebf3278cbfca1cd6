"""Partition values of what Spark sends."""

from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import BucketTransform, TruncateTransform
from pyiceberg.types import DecimalType, NestedField

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
