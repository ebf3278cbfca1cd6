"""Decides which task gets which row, so that one task gets all changes of a key."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from changelog.rows import BAD, HASH, TRUNCATE, is_bad
from deltawriters.keyindex import BASE, high_hash
from deltawriters.table import Bucket

RANGES = 1024
"""The top 10 bits of a hash choose the task. So if there were more tasks than this, some would get no rows."""

_RANGE_BITS = 10
_BELOW = np.uint64(64 - _RANGE_BITS)

Hashes = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class KeyHash:
    """The first half of a key's hash. Its top bits name the task that owns the key.

    :param key: names of the key columns.
    :param bucket: if given, the bucket's number forms the top bits. Then only one task writes each bucket, and so
        there are fewer files.
    :param base: base of the polynomial (`high_hash`); an index has its own.
    """

    key: tuple[str, ...]
    bucket: Bucket | None = None
    base: int = BASE

    def __call__(self, keys: pa.RecordBatch) -> Hashes:
        """Compute the hashes.

        :param keys: the key columns in the types that Spark gives, without nulls.
        :return: a hash for each row.
        """
        by_key = high_hash([keys.column(name) for name in self.key], self.base)
        if self.bucket is None:
            return by_key
        numbers = self.bucket.numbers(keys.column(self.bucket.column)).astype(np.uint64) % np.uint64(RANGES)
        share = np.uint64(max(1, RANGES // self.bucket.count))
        hashes: Hashes = (numbers * share << _BELOW) | (by_key >> np.uint64(_RANGE_BITS))
        return hashes

    def added(self, changes: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Add `_rowdelta_hash` to changelog rows. The value for a bad record doesn't matter."""
        for batch in changes:
            keys = batch.select(list(self.key))
            bad = is_bad(batch)
            if bad is None:
                hashes = self(keys)
            else:
                good = pc.invert(bad)
                hashes = np.zeros(len(keys), np.uint64)
                hashes[good.to_numpy(zero_copy_only=False)] = self(keys.filter(good))
            yield batch.append_column(HASH, pa.array(hashes.view(np.int64)))


def to_all(changes: Iterable[pa.RecordBatch], tasks: int) -> Iterator[pa.RecordBatch]:
    """Repeat each TRUNCATE (`changelog.rows.TRUNCATE`) for each task, as if the task owned its key.

    :param changes: rows with `_rowdelta_hash`.
    """
    for batch in changes:
        bad = batch.column(BAD)
        if bad.null_count == len(bad) or not pc.any(truncates := is_truncate(bad)).as_py():
            yield batch
            continue
        barriers = batch.filter(truncates)
        place = barriers.schema.get_field_index(HASH)
        for number in range(tasks):
            first = np.full(len(barriers), range_of(number, tasks)[0], np.uint64)
            yield barriers.set_column(place, barriers.schema.field(place), pa.array(first.view(np.int64)))
        yield batch.filter(pc.invert(truncates))  # after them, so that fewer rows are written in vain


def is_truncate(bad: pa.StructArray) -> pa.Array:
    """Whether each `_rowdelta_bad` stands for a TRUNCATE (bool)."""
    return pc.is_in(pc.struct_field(bad, ["error_class"]), value_set=pa.array([TRUNCATE]))


def owner(hashes: Hashes, tasks: int) -> npt.NDArray[np.int64]:
    """The number of the task that owns each hash. `range_of` is the reverse."""
    return (hashes >> _BELOW).astype(np.int64) * tasks >> _RANGE_BITS


def range_of(number: int, tasks: int) -> tuple[int, int]:
    """The half-open range of hashes that task `number` of `tasks` owns."""
    return -(-number * RANGES // tasks) << int(_BELOW), -(-(number + 1) * RANGES // tasks) << int(_BELOW)
