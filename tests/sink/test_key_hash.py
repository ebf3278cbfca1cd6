"""The first half of the key hash: which task owns a key. And what tells data files apart that Spark reads."""

from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyiceberg.types import (
    BinaryType,
    DateType,
    DecimalType,
    IcebergType,
    IntegerType,
    LongType,
    StringType,
    TimestamptzType,
)
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_type

from deltawriters.keyindex import high_hash
from sink.errors import TableError
from sink.routing import RANGES, KeyHash, owner
from sink.spark.keyreading import _path_hash, _path_hashes
from sink.spark.versions import to_arrow
from sink.targets.iceberg.partitions import IcebergBucket

COUNT = 2000


def texts(random: Random) -> Iterator[str]:
    yield from ("", "a", "é", "日本語テキスト", "\0", "x" * 31, "x" * 32, "x" * 33, "x" * 64, "x" * 1000)
    while True:
        yield "".join(
            chr(random.choice([random.randrange(128), random.randrange(0xD000)])) for _ in range(random.randrange(70))
        )


def whole(random: Random, bits: int) -> Iterator[int]:
    yield from (0, 1, -1, 2 ** (bits - 1) - 1, -(2 ** (bits - 1)))
    while True:
        yield random.randrange(-(2 ** (bits - 1)), 2 ** (bits - 1)) >> random.randrange(bits)


def moments(random: Random) -> Iterator[datetime]:
    while True:
        yield datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=random.randrange(-(2**50), 2**52))


VALUES: dict[str, Any] = {
    "int": lambda random: whole(random, 32),
    "bigint": lambda random: whole(random, 64),
    "date": lambda random: (date(1970, 1, 1) + timedelta(days=n % 1_000_000) for n in whole(random, 21)),
    "timestamp": moments,
    "decimal(19,2)": lambda random: (Decimal(n).scaleb(-2) for n in whole(random, 60)),
    "string": texts,
    "binary": lambda random: (text.encode() for text in texts(random)),
}


def column(name: str, seed: int) -> list[Any]:
    values = VALUES[name](Random(seed))
    return [next(values) for _ in range(COUNT)]


@pytest.mark.parametrize("keys", [[range(100_000)], [map(str, range(100_000))], [range(100_000), [7] * 100_000]])
def test_keys_in_a_row_are_spread_evenly(keys: list[Any]) -> None:
    columns = [pa.array(list(key)) for key in keys]
    counts = np.bincount(owner(high_hash(columns), RANGES), minlength=RANGES)
    expected = 100_000 / RANGES
    assert abs(((counts - expected) ** 2 / expected).sum() - RANGES) < 6 * (2 * RANGES) ** 0.5, "chi squared"


@pytest.mark.parametrize("count", [8, 10, 1024, 3000])
@pytest.mark.parametrize(
    ("name", "iceberg"),
    [
        ("int", IntegerType()),
        ("bigint", LongType()),
        ("string", StringType()),
        ("binary", BinaryType()),
        ("date", DateType()),
        ("timestamp", TimestamptzType()),
        ("decimal(19,2)", DecimalType(19, 2)),
    ],
)
def test_hashes_that_begin_with_a_bucket_are_the_same(
    spark: SparkSession, name: str, iceberg: IcebergType, count: int
) -> None:
    """By PyIceberg as by Iceberg's own function in Spark: each bucket is one task's."""
    hash_keys = KeyHash(("c0",), IcebergBucket("c0", count, iceberg))
    schema = T.StructType([T.StructField("c0", T.DataType.fromDDL(name))])
    rows = spark.createDataFrame([(value,) for value in column(name, 5)], schema)
    top = F.expr(f"lake.system.bucket({count}, c0)") % RANGES * max(1, RANGES // count)
    found = to_arrow(rows.withColumn("bucket", top))
    keys = found.column("c0").combine_chunks().cast(to_arrow_type(schema.fields[0].dataType))
    hashes = hash_keys(pa.record_batch({"c0": keys}))
    assert (hashes >> np.uint64(54)).tolist() == found.column("bucket").to_pylist()
    below = np.uint64(2**54 - 1)
    assert ((hashes & below) == high_hash([keys]) >> np.uint64(10)).all()


def test_files_are_told_apart_by_the_same_hashes_in_spark_and_here(spark: SparkSession) -> None:
    paths = [f"s3://lake/data/{text}.parquet" for text in column("string", 6)]
    paths = list(dict.fromkeys(paths))
    hashed = spark.createDataFrame([(path,) for path in paths], "path string").select(_path_hash(F.col("path")))
    hashes = _path_hashes(paths)
    assert [row[0] for row in hashed.collect()] == hashes.view("i8").tolist()
    assert len(set(hashes.tolist())) == len(paths)


def test_files_with_the_same_hash_are_refused() -> None:
    """A checksum is linear: what doesn't change it can be added to any text of the same length."""
    paths = ["a" * 40, "ceacgccegcecgegegegcecgeccgcaecaaaaaaaaa"]
    with pytest.raises(TableError, match=rf"can't tell {paths[0]} from another data file"):
        _path_hashes([*paths, "another"])
