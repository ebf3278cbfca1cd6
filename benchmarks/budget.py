"""`python -m benchmarks.budget`: what the budget of maintenance costs micro-batches, and what it saves readers.

For each format and budget a table is loaded, and a stream applies the same micro-batches to it, one right after the
other: nothing is left over for maintenance but what it takes from them. With `--every` there is a pause between them,
as in a stream that a machine can follow for long. Later the table is read as it was after some of its micro-batches, by
Spark and DuckDB, in turns with its state after the load and its last one compacted, so that neither the stream nor
maintenance disturbs the readers. What is between the two in rows is compared with what is between them in time.
"""

import argparse
import json
import math
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from time import clock_gettime, process_time
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow.parquet as pq
from pyiceberg.table import StaticTable
from pyspark.sql import SparkSession

from benchmarks.bench import FILES_PER_BATCH, RowdeltaCase
from benchmarks.peers.readers import connect_duckdb, newest_metadata
from benchmarks.processes import commit, cpu_clock
from benchmarks.streams import CATALOG, TimedPipeline, build_session
from benchmarks.workload import TABLE_SCHEMA, Dataset, Keys, Totals, Workload, publish, write_dataset
from sink.config import Config
from sink.spark import session
from sink.table.observer import Committed, Event, RewriteDone

FORMATS = ("v2", "v3", "delta")
BUDGETS = (0.0, 0.25, 0.5, 1.0, 2.0)
LOOKS = 20
"""States of each table that are read. One of them may be slow: the worst of the others counts."""
TURNS = 3
"""Of each, the fastest counts, in CPU time: what else the machine does matters less then."""
WAIT = 0.01
"""Seconds in which Iceberg's Java reader waits for each data file with deletes of version 2, and takes no such time."""
KEY = "id = 1234"
QUERIES = {
    "all": f"SELECT count(*), sum(balance), {', '.join(f'max({n})' for n in reversed(TABLE_SCHEMA.names))} FROM {{}}",
    "one column": "SELECT sum(balance) FROM {}",
    "a key": f"SELECT * FROM {{}} WHERE {KEY}",
}
"""A whole scan begins with the columns of `Totals`."""
RESULTS = Path("benchmarks/results/budget.jsonl")
"""A line for each call."""


@dataclass
class Measured:
    """:param batch_seconds: whole triggers, in order.
    :param written_bytes: by the micro-batches; `rewritten_bytes` by rewrites.
    :param files: micro-batches applied -> data files of that state, and how many have deletes (Iceberg).
    :param dead: likewise, rows in them that are deleted, for each row that isn't.
    :param reads: reader and query -> micro-batches applied -> time, as a multiple of a compacted table's.
    """

    format: str
    budget: float
    batch_seconds: list[float] = field(default_factory=list)
    written_bytes: int = 0
    rewritten_bytes: int = 0
    rewrites: int = 0
    files: dict[int, tuple[int, int]] = field(default_factory=dict)
    dead: dict[int, float] = field(default_factory=dict)
    reads: dict[str, dict[int, float]] = field(default_factory=dict)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.batch_seconds)

    def slow(self, read: str) -> float:
        """That all looks but one are below."""
        return sorted(self.reads[read].values())[-2]


class _Streamed(RowdeltaCase):
    """A table whose maintenance has a budget, and whose stream goes on until all its files are applied."""

    def __init__(
        self, spark: SparkSession, folder: Path, warehouse: Path, kind: str, budget: float, every: float = 0.01
    ) -> None:
        """:param every: seconds from the beginning of a micro-batch to that of the next."""
        version = 2 if kind == "delta" else int(kind[1:])
        super().__init__(spark, folder, warehouse, None, "position", version, delta=kind == "delta")
        self.measured = Measured(kind, budget)
        self._budget = budget
        self._every = every

    def stream(self, dataset: Dataset) -> list[int]:
        """Apply all micro-batches. Returns the snapshot or version of each."""
        for files in dataset.changes[1:]:
            publish(files, self._folder / "source")
        settings = self._settings(FILES_PER_BATCH)
        settings["sink"]["trigger"] = f"{round(1000 * self._every)} milliseconds"
        config = Config.model_validate(settings)
        session.start(config)
        snapshots, measured = list[int](), self.measured

        def hear(event: Event) -> None:
            if isinstance(event, Committed) and event.snapshot is not None:
                snapshots.append(event.snapshot)
                measured.written_bytes += sum(files.bytes for files in event.files.values())
                if len(snapshots) == dataset.batches:
                    pipeline.stop()
            elif isinstance(event, RewriteDone) and event.kind == "rewrite" and event.touched:
                measured.rewrites += 1
                measured.rewritten_bytes += event.bytes

        pipeline = TimedPipeline(self._spark, config, hear)
        pipeline.run()
        measured.batch_seconds = pipeline.batch_seconds
        return snapshots

    def snapshot(self) -> int:
        """The newest one, or version."""
        if self.delta_folder is None:
            rows = self._spark.sql(f"SELECT snapshot_id FROM {self.case.table}.refs WHERE name = 'main'")
        else:
            rows = self._spark.sql(f"DESCRIBE HISTORY delta.`{self.delta_folder}` LIMIT 1").select("version")
        return int(rows.collect()[0][0])

    def state(self, snapshot: int) -> dict[str, str]:
        """The table as it was: what each reader's SQL calls it."""
        if self.delta_folder is None:
            return {
                "Spark": f"{self.case.table} VERSION AS OF {snapshot}",
                "DuckDB": f"iceberg_scan('{self._metadata()}', snapshot_from_id => {snapshot})",
            }
        # A version of the past is scanned with its log replayed each time, so this is a table with a shorter log.
        earlier = self.delta_folder.with_name(f"{self.delta_folder.name}_{snapshot}")
        shutil.copytree(self.delta_folder, earlier, copy_function=os.link)
        for path in (earlier / "_delta_log").iterdir():
            version = path.name.split(".")[0]
            if path.name == "_last_checkpoint" or (version.isdigit() and int(version) > snapshot):
                path.unlink()
        return {"Spark": f"delta.`{earlier}`", "DuckDB": f"delta_scan('{earlier}')"}

    def data_files(self, snapshot: int, state: Mapping[str, str], where: str = "true") -> dict[str, bool]:
        """Paths of those that a scan opens, with whether rows of them are deleted (Iceberg)."""
        if self.delta_folder is None:
            scan = StaticTable.from_metadata(str(self._metadata())).scan(where, snapshot_id=snapshot)
            return {urlsplit(task.file.file_path).path: bool(task.delete_files) for task in scan.plan_files()}
        found = self._spark.sql(f"SELECT * FROM {state['Spark']}").inputFiles()
        return {unquote(urlsplit(file).path): False for file in found}

    def _metadata(self) -> Path:
        return newest_metadata(self._warehouse.joinpath(*self.case.table.split(".")[1:]))

    def compact(self) -> None:
        if self.delta_folder is None:
            name = self.case.table.removeprefix(f"{CATALOG}.")
            options = "map('rewrite-all', 'true')"
            self._spark.sql(
                f"CALL {CATALOG}.system.rewrite_data_files(table => '{name}', options => {options})"
            ).collect()
        else:
            self._spark.sql(f"REORG TABLE delta.`{self.delta_folder}` APPLY (PURGE)").collect()
            self._spark.sql(f"OPTIMIZE delta.`{self.delta_folder}`").collect()

    def _settings(self, files_per_batch: int) -> dict[str, Any]:
        return super()._settings(files_per_batch) | {"maintenance": {"budget": self._budget}}


def run(
    folder: Path,
    formats: Sequence[str],
    budgets: Sequence[float],
    rows: int,
    batches: int,
    events: int,
    keys: Keys,
    every: float,
    inserts_from: int | None = None,
) -> list[Measured]:
    """Prints as it goes."""
    warehouse = folder / "warehouse"
    spark = build_session(warehouse, with_delta="delta" in formats)
    spark.sparkContext.setLogLevel("ERROR")
    spark.conf.set("spark.sql.streaming.numRecentProgressUpdates", max(100, batches))
    warm = write_dataset(Workload(100_000, 1), folder / "warm", 4, 50_000, FILES_PER_BATCH)
    workload = Workload(rows, 1, inserts_from, keys)
    data = write_dataset(workload, folder / "data", batches, events, FILES_PER_BATCH)
    for kind in formats:
        case = _Streamed(spark, folder / f"warm_{kind}", warehouse, kind, 1.0)
        case.load(warm)
        case.stream(warm)
    found = []
    for kind in formats:
        for number, budget in enumerate(budgets):
            case = _Streamed(spark, folder / f"measured_{number}", warehouse, kind, budget, every)
            found.append(_measure(spark, case, data))
    return found


def _measure(spark: SparkSession, case: _Streamed, data: Dataset) -> Measured:
    measured = case.measured
    case.load(data)
    snapshots = [case.snapshot(), *case.stream(data)]
    marks = [data.batches * look // LOOKS for look in range(LOOKS + 1)]
    states = {mark: case.state(snapshots[mark]) for mark in marks}
    for mark in marks:
        files = case.data_files(snapshots[mark], states[mark])
        rows = sum(pq.read_metadata(path).num_rows for path in files)
        measured.files[mark], measured.dead[mark] = (
            (len(files), sum(files.values())),
            rows / data.totals[mark].count - 1,
        )
    of_key = {mark: sum(case.data_files(snapshots[mark], states[mark], KEY).values()) for mark in marks}
    case.compact()
    compacted = data.batches + 1
    states[compacted] = case.state(case.snapshot())
    taken: dict[str, dict[int, float]] = {}
    clock = cpu_clock(spark)
    with connect_duckdb(measured.format) as connection:
        readers: dict[str, tuple[Callable[[str], Sequence[Any]], Callable[[], float]]] = {
            "Spark": (lambda text: spark.sql(text).collect(), lambda: clock_gettime(clock)),
            "DuckDB": (lambda text: connection.sql(text).fetchall(), process_time),
        }
        for turn, (mark, state) in product(range(TURNS), states.items()):
            for (reader, (read, cpu_seconds)), (query, text) in product(readers.items(), QUERIES.items()):
                started = cpu_seconds()
                found = read(text.format(state[reader]))
                seconds = cpu_seconds() - started
                if measured.format == "v2" and reader == "Spark" and mark in of_key:
                    seconds += WAIT * (of_key[mark] if query == "a key" else measured.files[mark][1])
                fastest = taken.setdefault(f"{reader}, {query}", {})
                fastest[mark] = min(fastest.get(mark, math.inf), seconds)
                if query == "all" and not turn:
                    expected = data.totals[min(mark, data.batches)]
                    assert Totals(*found[0][:3]) == expected, f"{reader}, {measured} after {mark}: {found}"
    first, last = data.totals[0].count, data.totals[-1].count
    for name, fastest in taken.items():
        grown = {mark: (data.totals[mark].count - first) / ((last - first) or 1) for mark in marks[1:]}
        measured.reads[name] = {
            mark: fastest[mark] / (fastest[0] + share * (fastest[compacted] - fastest[0]))
            for mark, share in grown.items()
        }
        print(f"    {name}: {fastest[0]:.3f} s loaded, {fastest[compacted]:.3f} s compacted", flush=True)
    print(table([measured]), measured.files, {mark: round(dead, 2) for mark, dead in measured.dead.items()}, flush=True)
    return measured


def table(found: Sequence[Measured]) -> str:
    """The figures as rows of Markdown. A micro-batch is compared with that of the first budget, which should be 0."""
    reads = list(found[0].reads)
    lines = [
        f"| format | budget | micro-batch | rewritten | most deleted rows | {' | '.join(reads)} |",
        f"|---|---:|---:|---:|---:|{len(reads) * '---|'}",
    ]
    for each in found:
        base = next(other for other in found if other.format == each.format)
        told = (f"{statistics.median(each.reads[name].values()):.2f}, {each.slow(name):.2f}" for name in reads)
        lines.append(
            f"| {each.format} | {each.budget:g} | {each.mean:.2f} s, {each.mean / base.mean:.2f}x | "
            f"{each.rewritten_bytes / 1e6:,.0f} of {each.written_bytes / 1e6:,.0f} MB | "
            f"{max(each.dead.values()):.2f} | {' | '.join(told)} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--budgets", nargs="+", type=float, default=BUDGETS)
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--batches", type=int, default=60)
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--keys", choices=("zipf", "uniform", "newest"), default="uniform")
    parser.add_argument("--every", type=float, default=0.01, help="seconds between the beginnings of micro-batches")
    parser.add_argument("--inserts-from", type=int, metavar="N", help="from this micro-batch on, nothing is deleted")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="rowdelta-budget-"))
    try:
        found = run(
            folder,
            args.formats,
            args.budgets,
            args.rows,
            args.batches,
            args.events,
            args.keys,
            args.every,
            args.inserts_from,
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(table(found))
    figures = {"commit": commit(), "rows": args.rows, "events": args.events, "keys": args.keys, "every": args.every}
    figures["inserts_from"] = args.inserts_from
    with RESULTS.open("a") as results:
        results.write(json.dumps(figures | {"cases": [asdict(each) for each in found]}) + "\n")


if __name__ == "__main__":
    main()
