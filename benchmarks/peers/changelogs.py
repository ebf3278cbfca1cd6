"""The files of a changelog, and what the table must hold at each mark.

A micro-batch has two files, cut by key, as a topic's partitions are: all changes of a key are in one file, in order. So
two tasks may read them at the same time, and a sink that takes rows as they come, as Flink's does, sees each key's
changes in order.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.peers.cases import Changelog, Scale, shape_of
from benchmarks.workload import CHANGE_SCHEMA, SPARK_TABLE_SCHEMA, TABLE_SCHEMA, Totals, Workload

FILES = 2
COLUMNS = [*TABLE_SCHEMA.names, "day"]
"""`day` is the day of `updated_at`. It is a column of its own, because Delta Lake partitions by columns only."""
SPARK_SCHEMA = f"{SPARK_TABLE_SCHEMA}, day DATE"
SPARK_CHANGES = f"row_kind STRING, seq BIGINT, {SPARK_SCHEMA}"
_POINTS = 5
_FIRST_TIME = 1_735_689_600


@dataclass(frozen=True)
class Mark:
    """What the table must hold after so many micro-batches, and some keys that it has."""

    batch: int
    totals: Totals
    ids: list[int]


@dataclass(frozen=True)
class Files:
    """A changelog on disk."""

    initial: list[Path]
    batches: list[list[Path]]
    """Number 0 is the first micro-batch after the first load."""
    rows: list[int]
    """Change rows of each micro-batch."""
    marks: list[Mark]
    expected: Path
    """The whole table after the last micro-batch."""


def write(changelog: Changelog, scale: Scale, seed: int, folder: Path) -> Files:
    """Write a changelog below `folder`, which must not exist."""
    folder.mkdir(parents=True)
    workload = Workload(scale.rows, seed, shape=shape_of(changelog, scale))
    random = np.random.default_rng(seed)
    initial = [
        _written(with_day(table), folder / f"initial-{number:02d}.parquet")
        for number, table in enumerate(workload.initial())
    ]
    batches, rows, marks = [], [], []
    for batch in range(1, max(scale.marks) + 1):
        changes = with_day(workload.batch(scale.events))
        parity = pc.bit_wise_and(changes["id"], 1)
        batches.append(
            [
                _written(changes.filter(pc.equal(parity, part)), folder / f"batch-{batch:05d}-{part}.parquet")
                for part in range(FILES)
            ]
        )
        rows.append(changes.num_rows)
        if batch in scale.marks:
            ids = random.choice(workload.live_ids(), _POINTS, replace=False)
            marks.append(Mark(batch, workload.totals(), [int(each) for each in ids]))
    expected = _written(with_day(workload.expected_table()), folder / "expected.parquet")
    _in_order([*initial, *(file for files in batches for file in files)])
    return Files(initial, batches, rows, marks, expected)


def with_day(table: pa.Table) -> pa.Table:
    return table.append_column("day", table["updated_at"].cast(pa.timestamp("us")).cast(pa.date32()))


def _written(table: pa.Table, path: Path) -> Path:
    pq.write_table(table, path, compression="zstd", compression_level=1, store_decimal_as_integer=True)
    return path


def _in_order(files: Iterable[Path]) -> None:
    """Spark's file stream takes files by modification time."""
    import os

    for number, file in enumerate(files):
        os.utime(file, (_FIRST_TIME + number, _FIRST_TIME + number))


assert CHANGE_SCHEMA.names[:2] == ["row_kind", "seq"]
