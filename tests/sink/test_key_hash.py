"""The first half of the key hash is Spark's `xxhash64`, in NumPy."""

from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from random import Random
from typing import Any

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

from changelog.rows import HASH
from deltawriters.keyindex import xxhash64
from sink.spark.routing import RANGES, KeyHash
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


def decimals(random: Random, digits: int) -> Iterator[Decimal]:
    """Also those whose bytes begin where a sign would be mistaken: 127, 128, 255, 256 and their negatives."""
    for power in range(0, 8 * 16, 8):
        for near in (-1, 0, 1):
            for number in (2**power + near, 2 ** (power + 7) + near):
                if number < 10**digits:
                    yield from (Decimal(number).scaleb(-2), Decimal(-number).scaleb(-2))
    while True:
        limit = 10 ** random.randrange(1, digits + 1)
        yield Decimal(random.randrange(-limit + 1, limit)).scaleb(-2)


def moments(random: Random) -> Iterator[datetime]:
    while True:
        yield datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=random.randrange(-(2**50), 2**52))


VALUES: dict[str, Any] = {
    "boolean": lambda random: iter([True, False] * COUNT),
    "tinyint": lambda random: whole(random, 8),
    "smallint": lambda random: whole(random, 16),
    "int": lambda random: whole(random, 32),
    "bigint": lambda random: whole(random, 64),
    "date": lambda random: (date(1970, 1, 1) + timedelta(days=n % 1_000_000) for n in whole(random, 21)),
    "timestamp": moments,
    "timestamp_ntz": lambda random: (moment.replace(tzinfo=None) for moment in moments(random)),
    "decimal(9,2)": lambda random: decimals(random, 9),
    "decimal(18,2)": lambda random: decimals(random, 18),
    "decimal(19,2)": lambda random: decimals(random, 19),
    "decimal(38,2)": lambda random: decimals(random, 38),
    "string": texts,
    "binary": lambda random: (text.encode() for text in texts(random)),
}


def column(name: str, seed: int) -> list[Any]:
    values = VALUES[name](Random(seed))
    return [next(values) for _ in range(COUNT)]


def in_spark(spark: SparkSession, types: list[str], columns: list[list[Any]]) -> tuple[list[int], list[pa.Array]]:
    """Spark's hashes, and the columns as a task gets them."""
    schema = T.StructType([T.StructField(f"c{i}", T.DataType.fromDDL(name)) for i, name in enumerate(types)])
    rows = spark.createDataFrame(list(zip(*columns, strict=True)), schema)
    hashed = to_arrow(rows.withColumn(HASH, F.xxhash64(*schema.names)))
    arrays = [hashed.column(f.name).combine_chunks().cast(to_arrow_type(f.dataType)) for f in schema.fields]
    return hashed.column(HASH).to_pylist(), arrays


@pytest.mark.parametrize("name", VALUES)
def test_a_column_hashes_as_in_spark(spark: SparkSession, name: str) -> None:
    expected, arrays = in_spark(spark, [name], [column(name, 1)])
    assert xxhash64(arrays).view("i8").tolist() == expected
    # a slice, which has an offset into its buffers
    assert xxhash64([array.slice(7, 100) for array in arrays]).view("i8").tolist() == expected[7:107]


def test_several_columns_hash_as_in_spark(spark: SparkSession) -> None:
    names = list(VALUES)
    expected, arrays = in_spark(spark, names, [column(name, seed) for seed, name in enumerate(names)])
    assert xxhash64(arrays).view("i8").tolist() == expected
    expected, arrays = in_spark(spark, ["string", "bigint"], [column("string", 3), column("bigint", 4)])
    assert xxhash64(arrays).view("i8").tolist() == expected


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
    expected = F.shiftleft(top.cast("bigint"), 54).bitwiseOR(F.shiftrightunsigned(F.xxhash64("c0"), 10))
    hashed = to_arrow(rows.withColumn(HASH, expected))
    keys = hashed.column("c0").combine_chunks().cast(to_arrow_type(schema.fields[0].dataType))
    assert hash_keys(pa.record_batch({"c0": keys})).view("i8").tolist() == hashed.column(HASH).to_pylist()


def test_what_is_no_key_is_refused() -> None:
    with pytest.raises(ValueError, match="must have no nulls"):
        xxhash64([pa.array([1, None])])
    with pytest.raises(TypeError, match="can't be of type double"):
        xxhash64([pa.array([1.0])])
    assert xxhash64([pa.array([], pa.string())]).tolist() == []
