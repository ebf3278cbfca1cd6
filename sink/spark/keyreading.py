"""Reads the keys of data files into a key index by a Spark job, and shows its progress."""

import functools
import json
import zlib
from collections.abc import Sequence
from uuid import uuid4

import numpy as np
import numpy.typing as npt
from pyspark.sql import Column
from pyspark.sql import functions as F

from deltawriters.keyindex import RunInfo
from sink.errors import TableError
from sink.routing import RANGES
from sink.spark.exchange import PACKED_SCHEMA, Results, exchanged, in_arrow
from sink.spark.expressions import binary_uuid, quoted
from sink.spark.progress import progress
from sink.spark.tasks import index
from sink.spark.tasks.worker import RESULT_SCHEMA
from sink.table.engine import KeyReading
from sink.targets.seam import Table
from sink.targets.values import LiveFile


def read_keys(target: Table, files: Sequence[LiveFile], reading: KeyReading) -> list[RunInfo]:
    """See `sink.table.engine.Engine`. It is one Spark job over the key columns."""
    spark, key, order = target.spark, reading.hash.key, reading.index.order
    names = dict.fromkeys((*key, *(order.columns if order is not None else ())))
    names |= dict.fromkeys(reading.index.columns_of_versions)
    with target.reader().rows_of(files, list(names)) as (frame, path, position, paths):
        path_hashes = _path_hashes(paths)
        rows = frame.select(
            *(binary_uuid(n).alias(n) if n in reading.uuids else F.col(quoted(n)) for n in names),
            _path_hash(path).alias(index.INDEX_FILE),
            position.alias(index.INDEX_POS),
        ).dropna(subset=list(key))
        tasks = min(RANGES, int(spark.conf.get("spark.sql.shuffle.partitions") or 1))
        entries = functools.partial(index.index_entries, reading.table, path_hashes, reading.hash, reading.index)
        indexed = tuple(file.file for file in files)
        build = functools.partial(index.build_index, reading.index, indexed, reading.sequence, uuid4().hex)
        if tasks > 1:
            route = functools.partial(index.route_entries, entries, tasks)
            routed = in_arrow(rows, route, PACKED_SCHEMA)
            built: Results = exchanged(routed, tasks, build)
        else:
            built = in_arrow(rows.coalesce(1), lambda batches: build(entries(batches)), RESULT_SCHEMA)
        with progress(spark, f"{target.name}: reading the keys of {len(files):,} files"):
            results = built.collect()
    return [RunInfo.from_json(run) for row in results for run in json.loads(row[0])]


def _path_hash(path: Column) -> Column:
    """Spark sends this with each row to Python, since it may take only a tenth of the path's bytes."""
    return F.shiftleft(F.crc32(path), 32).bitwiseXOR(F.crc32(F.reverse(path)))


def _path_hashes(paths: Sequence[str]) -> npt.NDArray[np.uint64]:
    """`_path_hash` of each path.

    :raises TableError: two paths have the same hash.
    """
    hashes = [zlib.crc32(path.encode()) << 32 ^ zlib.crc32(path[::-1].encode()) for path in paths]
    by_hash = dict(zip(hashes, paths, strict=True))
    if len(by_hash) < len(set(paths)):
        raise TableError(
            f"the key index can't tell {min(set(paths) - set(by_hash.values()))} from another data file, since both "
            "paths have the same checksums. Rewrite this file, for example with Spark"
        )
    return np.array(hashes, np.uint64)
