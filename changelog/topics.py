"""Places in several topics: a number for each topic-partition."""

import zlib
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_BITS = 32


def partition_number(topic: str, partition: int) -> int:
    """A number (int64) that tells a topic's partition from those of others, and stays the same whatever topics there
    are: 31 bits of the name's CRC-32, and 32 bits of the partition.
    """
    return _hash(topic) << _BITS | partition


def is_of_many(number: int) -> bool:
    """Whether it is a `partition_number`, and not the partition of the only topic."""
    return number >> _BITS > 0


def partition_named(topics: Sequence[str], number: int) -> str:
    """The partition in its topic, for people.

    :param topics: those that it may be of.
    """
    partition = number & (1 << _BITS) - 1
    topic = next((topic for topic in topics if partition_number(topic, partition) == number), "")
    return f"{topic}-{partition}" if topic else str(partition)


def partition_numbers(topics: pa.Array, partitions: pa.Array) -> pa.Array:
    """`partition_number` of each record.

    :param topics: string.
    :param partitions: int32.
    """
    names = topics.dictionary_encode()
    firsts = np.array([_hash(name) << _BITS for name in names.dictionary.to_pylist()], np.int64)
    return pc.add(pa.array(firsts).take(names.indices), partitions.cast(pa.int64()))


def _hash(topic: str) -> int:
    return zlib.crc32(topic.encode()) & 0x7FFFFFFF
