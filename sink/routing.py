"""Which task gets which row: all changes of a key meet in one task.

The hash is Spark's `xxhash64`, in NumPy.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyiceberg.transforms import BucketTransform
from pyiceberg.types import IcebergType

from changelog.rows import BAD, HASH
from deltawriters import TableSpec
from deltawriters.keyindex import xxhash64
from deltawriters.partitioning import aligned

RANGES = 1024
"""The hash space is dealt out to tasks by its top 10 bits, so more tasks than this would have nothing to do."""

_RANGE_BITS = 10
_BELOW = np.uint64(64 - _RANGE_BITS)

Hashes = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Bucket:
    """A key column by which the table is partitioned in `count` buckets."""

    column: str
    type: IcebergType
    count: int


@dataclass(frozen=True)
class KeyHash:
    """The first half of a key's hash. Its top bits name the task that owns the key.

    :param bucket: its number comes first, so that each bucket is written by one task only, in so many fewer files.
    """

    key: tuple[str, ...]
    bucket: Bucket | None = None

    def __call__(self, keys: pa.RecordBatch) -> Hashes:
        """:param keys: the key columns in the types that Spark gives, without nulls.

        :return: n hashes.
        """
        by_key = xxhash64([keys.column(name) for name in self.key])
        if self.bucket is None:
            return by_key
        transform = BucketTransform(self.bucket.count).pyarrow_transform(self.bucket.type)
        numbers = transform(aligned(keys.column(self.bucket.column))).to_numpy().astype(np.uint64) % np.uint64(RANGES)
        share = np.uint64(max(1, RANGES // self.bucket.count))
        hashes: Hashes = (numbers * share << _BELOW) | (by_key >> np.uint64(_RANGE_BITS))
        return hashes

    def added(self, changes: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Changelog rows with `_rowdelta_hash`; of bad records any number."""
        for batch in changes:
            keys = batch.select(list(self.key))
            if batch.column(BAD).null_count == len(keys):
                hashes = self(keys)
            else:
                good = batch.column(BAD).is_null()
                hashes = np.zeros(len(keys), np.uint64)
                hashes[good.to_numpy(zero_copy_only=False)] = self(keys.filter(good))
            yield batch.append_column(HASH, pa.array(hashes.view(np.int64)))


def bucket_of_key(key: Sequence[str], table: TableSpec) -> Bucket | None:
    """A key column that the table is partitioned by in buckets, if there is one."""
    schema = table.iceberg_schema
    for field in table.current_spec.fields:
        source = schema.find_column_name(field.source_id)
        if isinstance(field.transform, BucketTransform) and source is not None and source in key:
            return Bucket(source, schema.find_type(field.source_id), field.transform.num_buckets)
    return None


def owner(hashes: Hashes, tasks: int) -> npt.NDArray[np.int64]:
    """The numbers of the tasks that own the hashes: the counterpart of `range_of`."""
    return (hashes >> _BELOW).astype(np.int64) * tasks >> _RANGE_BITS


def range_of(number: int, tasks: int) -> tuple[int, int]:
    """The hashes, half-open, that task `number` of `tasks` owns."""
    return -(-number * RANGES // tasks) << int(_BELOW), -(-(number + 1) * RANGES // tasks) << int(_BELOW)
