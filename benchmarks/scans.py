"""`python -m benchmarks.scans`: what Spark's scans pay for, fitted. `sink.targets.scan_costs` has what follows from it.

Tables are written by Spark that differ in one thing each: bytes, data files, data files with deletes, delete files,
deleted rows. They are read in turns, and least squares tell what each thing costs in CPU time: what else the machine
does matters less then. To wait, as Iceberg's reader does for deletes of version 2, takes no such time: the seconds of
each scan are shown beside it.
"""

import argparse
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from time import clock_gettime, perf_counter

import numpy as np
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from benchmarks.processes import cpu_clock
from benchmarks.streams import CATALOG, build_session
from benchmarks.workload import SPARK_CHANGE_SCHEMA, TABLE_SCHEMA, Workload

FORMATS = ("v2", "v3", "delta")
QUERIES: Mapping[str, str] = {
    "all columns": f"SELECT sum(xxhash64({', '.join(TABLE_SCHEMA.names)}) % 1000) FROM {{}}",
    "one column": "SELECT sum(balance) FROM {}",
}
COSTS = ("once", "MB", "data file", "one with deletes", "MB of these", "deleted MB", "delete file")
WARM = 2
_WRITTEN_LIKE_THE_SINK = {
    "write.distribution-mode": "none",
    "write.delete.mode": "merge-on-read",
    "write.delete.granularity": "partition",
    "write.delete.distribution-mode": "none",
}


@dataclass
class Case:
    """:param rows: at first, in so many `files`.
    :param touched: so many of these have deletes.
    :param commits: that delete from each of these.
    :param share: of their rows that is deleted.
    :param counts: how much of each of COSTS there is.
    """

    rows: int
    files: int
    touched: int = 0
    commits: int = 1
    share: float = 0.001
    name: str = ""
    counts: tuple[float, ...] = ()
    cpu: dict[str, list[float]] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)


def cases(rows: int) -> list[Case]:
    return [
        Case(rows // 2, 8),
        *(Case(rows, files) for files in (4, 24, 72)),
        *(Case(rows, files, files) for files in (4, 24, 72)),
        Case(rows, 24, 12),
        Case(rows, 8, 8, 8, 0.005),
        Case(rows, 24, 24, 6, 0.005),
        *(Case(rows, 8, 8, 1, share) for share in (0.1, 0.4)),
    ]


def write(spark: SparkSession, kind: str, case: Case, source: Path, folder: Path, number: int) -> None:
    changes = spark.read.schema(SPARK_CHANGE_SCHEMA).parquet(str(source)).where(f"id < {case.rows}")
    rows = changes.select(*TABLE_SCHEMA.names).repartitionByRange(case.files, "id").sortWithinPartitions("id")
    if kind == "delta":
        data = folder / f"t{number}"
        rows.write.format("delta").option("delta.enableDeletionVectors", "true").save(str(data))
        case.name = f"delta.`{data}`"
    else:
        case.name, data = f"{CATALOG}.{kind}.t{number}", folder / "warehouse" / kind / f"t{number}" / "data"
        writer = rows.writeTo(case.name).tableProperty("format-version", kind[1:])
        for name, value in _WRITTEN_LIKE_THE_SINK.items():
            writer = writer.tableProperty(name, value)
        writer.create()

    def first_id(file: Path) -> int:
        return int(pq.read_metadata(file).row_group(0).column(0).statistics.min)

    sizes = [file.stat().st_size / 1e6 for file in sorted(data.glob("*.parquet"), key=first_id)]
    assert len(sizes) == case.files, (case, len(sizes))
    below, part = case.rows * case.touched // case.files, 1_000_000 * case.share / case.commits
    for commit in range(case.commits if case.touched else 0):
        chosen = f"pmod(xxhash64(id), 1000000) BETWEEN {round(commit * part)} AND {round((commit + 1) * part) - 1}"
        spark.sql(f"DELETE FROM {case.name} WHERE id < {below} AND {chosen}").collect()
    delete_files = spark.sql(f"SELECT * FROM {case.name}.delete_files").count() if kind == "v2" else 0
    touched = sum(sizes[: case.touched])
    case.counts = 1, sum(sizes), case.files, case.touched, touched, case.share * touched, delete_files


def measure(spark: SparkSession, found: Sequence[Case], turns: int) -> None:
    clock = cpu_clock(spark)
    order = Random(1)
    for turn in range(WARM + turns):
        for case in order.sample(found, len(found)):
            for query, text in QUERIES.items():
                started, cpu = perf_counter(), clock_gettime(clock)
                spark.sql(text.format(case.name)).collect()
                if turn >= WARM:
                    case.cpu.setdefault(query, []).append(clock_gettime(clock) - cpu)
                    case.seconds.setdefault(query, []).append(perf_counter() - started)


def fit(found: Sequence[Case], query: str) -> tuple[dict[str, float], float]:
    """Milliseconds of each of COSTS, and the mean error of what they foretell, as a share."""
    cpu = np.array([min(case.cpu[query]) for case in found])
    counts = np.array([case.counts for case in found])
    known = np.flatnonzero(counts.any(axis=0)).tolist()
    costs, *_ = np.linalg.lstsq(counts[:, known] / cpu[:, None], np.ones(len(cpu)), rcond=None)
    error = np.abs(counts[:, known] @ costs / cpu - 1).mean()
    return {COSTS[number]: 1000 * float(cost) for number, cost in zip(known, costs, strict=True)}, float(error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="rowdelta-scans-"))
    try:
        source = folder / "source"
        source.mkdir()
        for number, rows in enumerate(Workload(args.rows, args.seed).initial()):
            pq.write_table(rows, source / f"{number}.parquet", compression="zstd")
        spark = build_session(folder / "warehouse", with_delta="delta" in args.formats, driver_memory="4g")
        spark.sparkContext.setLogLevel("ERROR")
        spark.conf.set("spark.sql.adaptive.enabled", value=False)  # it would write fewer files
        lines = ["", f"| | query | {' | '.join(COSTS)} | error |", f"|---|---|{'---:|' * (len(COSTS) + 1)}"]
        for kind in args.formats:
            found = cases(args.rows)
            for number, case in enumerate(found):
                write(spark, kind, case, source, folder, number)
            measure(spark, found, args.turns)
            for case in found:
                taken = ", ".join(f"{1000 * min(case.cpu[q]):.0f} ({1000 * min(case.seconds[q]):.0f})" for q in QUERIES)
                print(f"{kind} {', '.join(f'{count:g}' for count in case.counts)}: {taken} ms", flush=True)
            for query in QUERIES:
                costs, error = fit(found, query)
                told = " | ".join(f"{costs[name]:.1f}" if name in costs else "" for name in COSTS)
                lines.append(f"| {kind} | {query} | {told} | {error:.0%} |")
        print("\n".join(lines))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
