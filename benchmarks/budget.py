"""`python -m benchmarks.budget`: what the budget of maintenance costs micro-batches, and what it saves readers.

For each format and budget a table is loaded, and a stream applies the same micro-batches to it, one right after the
other: nothing is left over for maintenance but what it takes from them. With `--every` there is a pause between them,
as in a stream that a machine can follow for long. Later the table is scanned as it was after some of its micro-batches,
in turns with its compacted state, so that neither the stream nor maintenance disturbs the scans.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

from benchmarks.bench import FILES_PER_BATCH, RowdeltaCase
from benchmarks.pages import OTHERS, OURS, drawn
from benchmarks.processes import commit
from benchmarks.streams import CATALOG, TimedPipeline, build_session
from benchmarks.workload import Dataset, Keys, Workload, publish, totals, write_dataset
from sink.config import Config
from sink.spark import session
from sink.table.observer import Committed, Event, RewriteDone

FORMATS = ("v2", "v3", "delta")
BUDGETS = (0.0, 0.25, 0.5, 1.0, 2.0)
MARKS = 5
"""States of each table that are scanned."""
SCANS = 5
PICTURE = Path("docs/images/budget.png")
RESULTS = Path("benchmarks/results/budget.json")


@dataclass
class Measured:
    """:param batch_seconds: whole triggers, in order.
    :param written_bytes: by the micro-batches; `rewritten_bytes` by rewrites (read; they write a little less).
    :param scans: micro-batches applied -> seconds of a scan of that state.
    :param files: likewise, its data files.
    :param dead: likewise, rows in them that are deleted, for each row that isn't.
    :param compacted_scan: likewise, after a compaction of the last state.
    """

    format: str
    budget: float
    batch_seconds: list[float] = field(default_factory=list)
    written_bytes: int = 0
    rewritten_bytes: int = 0
    rewrites: int = 0
    scans: dict[int, float] = field(default_factory=dict)
    files: dict[int, int] = field(default_factory=dict)
    dead: dict[int, float] = field(default_factory=dict)
    compacted_scan: float = 0.0

    @property
    def mean(self) -> float:
        return statistics.fmean(self.batch_seconds)

    @property
    def worst_scan(self) -> float:
        """As a share of the compacted table's."""
        return max(self.scans.values()) / self.compacted_scan


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

    def state(self, snapshot: int) -> DataFrame:
        """The table as it was."""
        if self.delta_folder is None:
            return self._spark.sql(f"SELECT * FROM {self.case.table} VERSION AS OF {snapshot}")
        # A version of the past is scanned with its log replayed each time, so this is a table with a shorter log.
        earlier = self.delta_folder.with_name(f"{self.delta_folder.name}_{snapshot}")
        shutil.copytree(self.delta_folder, earlier, copy_function=os.link)
        for path in (earlier / "_delta_log").iterdir():
            version = path.name.split(".")[0]
            if path.name == "_last_checkpoint" or (version.isdigit() and int(version) > snapshot):
                path.unlink()
        return self._spark.read.format("delta").load(str(earlier))

    def data_files(self, state: DataFrame) -> list[str]:
        """Paths of those that have live rows."""
        if self.delta_folder is None:
            found = [row[0] for row in state.select("_file").distinct().collect()]
        else:
            found = state.inputFiles()
        return [unquote(urlsplit(file).path) for file in found]

    def compacted(self) -> DataFrame:
        if self.delta_folder is None:
            name = self.case.table.removeprefix(f"{CATALOG}.")
            options = "map('rewrite-all', 'true')"
            self._spark.sql(
                f"CALL {CATALOG}.system.rewrite_data_files(table => '{name}', options => {options})"
            ).collect()
            return self._spark.table(self.case.table)
        self._spark.sql(f"REORG TABLE delta.`{self.delta_folder}` APPLY (PURGE)").collect()
        self._spark.sql(f"OPTIMIZE delta.`{self.delta_folder}`").collect()
        return self._spark.read.format("delta").load(str(self.delta_folder))

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
            found.append(_measure(case, data))
    return found


def _measure(case: _Streamed, data: Dataset) -> Measured:
    measured = case.measured
    case.load(data)
    snapshots = case.stream(data)
    marks = [data.batches * mark // MARKS for mark in range(1, MARKS + 1)]
    states = {mark: case.state(snapshots[mark - 1]) for mark in marks}
    for mark, state in states.items():
        paths = case.data_files(state)
        rows = sum(pq.read_metadata(path).num_rows for path in paths)
        measured.files[mark], measured.dead[mark] = len(paths), rows / data.totals[mark].count - 1
    compacted = case.compacted()
    seconds: dict[int, list[float]] = {mark: [] for mark in [*marks, 0]}
    for _ in range(SCANS):
        for mark, state in [*states.items(), (0, compacted)]:
            started = perf_counter()
            found = totals(state)
            seconds[mark].append(perf_counter() - started)
            assert found == data.totals[mark or data.batches], f"{measured} after {mark}: {found}"
    measured.compacted_scan = statistics.median(seconds.pop(0))
    measured.scans = {mark: statistics.median(taken) for mark, taken in seconds.items()}
    scans = " ".join(
        f"{each / measured.compacted_scan:.2f} ({measured.files[mark]}, {measured.dead[mark]:.2f})"
        for mark, each in measured.scans.items()
    )
    print(
        f"  {measured.format:6} budget {measured.budget:<5} {measured.mean:.2f} s a micro-batch, {measured.rewrites} "
        f"rewrites of {measured.rewritten_bytes / 1e6:,.0f} MB, written {measured.written_bytes / 1e6:,.0f} MB, scans "
        f"(data files, dead rows) {scans} of {measured.compacted_scan:.2f} s compacted",
        flush=True,
    )
    return measured


def table(found: Sequence[Measured]) -> str:
    """The figures as rows of Markdown. A micro-batch is compared with that of the first budget, which should be 0."""
    lines = [
        "| format | budget | mean micro-batch | beside budget 0 | rewritten | most deleted rows | scans |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for each in found:
        base = next(other for other in found if other.format == each.format)
        scans = ", ".join(f"{scan / each.compacted_scan:.2f}" for scan in each.scans.values())
        lines.append(
            f"| {each.format} | {each.budget:g} | {each.mean:.2f} s | {each.mean / base.mean:.2f}x | "
            f"{each.rewritten_bytes / 1e6:,.0f} MB | {max(each.dead.values()):.2f} | {scans} |"
        )
    return "\n".join(lines)


def draw(found: Sequence[Measured], picture: Path) -> None:
    formats = list(dict.fromkeys(each.format for each in found))
    with drawn(picture, 1, len(formats), 3.0 * len(formats), 2.6) as axes:
        for axis, kind in zip(axes[0], formats, strict=True):
            of_kind = sorted((each for each in found if each.format == kind), key=lambda each: each.budget)
            budgets, base = [each.budget for each in of_kind], of_kind[0].mean
            axis.plot(budgets, [each.worst_scan for each in of_kind], "o-", color=OURS, label="worst scan")
            axis.plot(budgets, [each.mean / base for each in of_kind], "o-", color=OTHERS, label="micro-batch")
            axis.set(title=kind, xlabel="budget", ylim=(0, None))
            axis.legend()


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
    RESULTS.write_text(json.dumps(figures | {"cases": [asdict(each) for each in found]}, indent=2) + "\n")
    draw(found, PICTURE)


if __name__ == "__main__":
    main()
