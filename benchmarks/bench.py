"""`make bench`: rowdelta beside `foreachBatch` + `MERGE INTO`, on one workload, in one run and one Spark session.

The sinks take turns after every few micro-batches, so that slow phases of the machine affect all of them. A
micro-batch's seconds are all of it: listing files, planning, writing, committing, and Spark's own logs, which several
micro-batches of rowdelta share where files wait. After each turn the table is scanned, and its totals are compared with
the workload's totals. At the end, its content is compared by checksum. Then the table is compacted, and scans of both
states take turns. In the end, it measures how the first load is packed: its bytes a row beside those of Spark's own
writer, and what the better packing costs (`--only packing` does nothing else).
"""

import argparse
import json
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, get_args

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from benchmarks import merge_baseline
from benchmarks.effort import Effort
from benchmarks.streams import CATALOG, TimedPipeline, build_session
from benchmarks.workload import (
    SPARK_TABLE_SCHEMA,
    Dataset,
    Keys,
    Totals,
    Workload,
    checksum,
    publish,
    totals,
    write_dataset,
)
from sink.config import Config
from sink.spark import session
from sink.targets.iceberg.writers import COMPRESSION_LEVEL

FILES_PER_BATCH = 2
SCANS = 7
ENOUGH_SECONDS = 4
PACKING = "packing"
DELTA = "Delta"
"""Cases with this in their name need a session with Delta Lake, so `--only` must name it."""
COPY_ON_WRITE = "copy-on-write"
"""Likewise, `--only` must name these cases: they take several times as long. Use `--keys` with them."""
TIME_PARTS = 40
"""Partitions by ranges of ids, which are given in the order of time, of the cases with `--keys newest`."""
PACKING_TURNS = 5
IDLE_WORKERS_END = 75
"""Seconds after which Spark has ended idle Python workers (`PythonWorkerFactory`)."""


@dataclass(frozen=True)
class Variant:
    """What a table of rowdelta has beyond the others.

    :param name: in the case's name; empty for the plain table.
    :param settings: of its entry of `tables`.
    :param rows: SQL condition of the table's rows that the source has too. None: all.
    """

    name: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    rows: str | None = None


PLAIN = Variant()
LATE = Variant("late: drop", {"late": "drop"})
# true of all rows, so that the table has the contents of the others
WHERE = Variant("where", {"where": "region <> 'us-east' AND balance > -1000000000"})
SOFT_DELETES = Variant(
    "soft deletes", {"soft_delete": {"column": "deleted", "at": "deleted_at"}}, "deleted IS NOT TRUE"
)


@dataclass
class Case:
    """One table under test and what was measured."""

    name: str
    table: str
    buckets: int | None
    load_seconds: float = 0.0
    last_scan: float | None = None
    compacted_scan: float | None = None
    batch_seconds: list[float] = field(default_factory=list)
    scans: dict[int, float] = field(default_factory=dict)
    efforts: list[Effort] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.batch_seconds)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.batch_seconds)

    @property
    def p95(self) -> float:
        seconds = sorted(self.batch_seconds)
        return seconds[min(len(seconds) - 1, round(0.95 * (len(seconds) - 1)))]


class RowdeltaCase:
    """Our sink, configured as a user would do it. The table exists already, so that both sinks start in the same way.

    :param deletes: or `append`, for the mode of this name, which has none.
    :param level: of zstd, for all files.
    """

    def __init__(
        self,
        spark: SparkSession,
        folder: Path,
        warehouse: Path,
        buckets: int | None,
        deletes: str,
        version: int = 2,
        level: int | None = None,
        *,
        delta: bool = False,
        partition: str | None = None,
        variant: Variant = PLAIN,
    ) -> None:
        """:param partition: instead of buckets; an item of `partition_by`."""
        leveled = f"_level{level}" if level else ""
        layout = f"bucket{buckets}" if buckets else "by_time" if partition else "plain"
        suffix = f"{deletes.replace('-', '_')}_v{version}_{layout}{leveled}"
        suffix = f"{suffix}{'_delta' if delta else ''}"
        if variant.name:
            suffix = re.sub(r"\W+", "_", f"{suffix}_{variant.name}")
        self._catalog = "delta" if delta else CATALOG
        table = f"{self._catalog}.{folder.name}.rowdelta_{suffix}"
        kind = "Delta" if delta else f"v{version}"
        layout = "by time" if partition else _partitioning(buckets)
        name = f"rowdelta {deletes} {kind}, {layout}{variant.name and f', {variant.name}'}"
        self.case = Case(name, table, buckets)
        self.rows = variant.rows
        self._deletes = deletes
        self._variant = variant
        self._partition_by = [f"bucket({buckets}, id)"] if buckets else [partition] if partition else []
        self.delta_folder = warehouse / folder.name / f"rowdelta_{suffix}" if delta else None
        self._properties = (
            {} if delta else {"format-version": str(version), **({COMPRESSION_LEVEL: str(level)} if level else {})}
        )
        self._spark = spark
        self._folder = folder / f"rowdelta_{suffix}"
        self._warehouse = warehouse

    def load(self, dataset: Dataset) -> float:
        publish(dataset.initial, self._folder / "source")
        (seconds,) = self._run(files_per_batch=1000)
        return seconds

    def apply(self, dataset: Dataset, first: int, last: int) -> list[float]:
        for batch in range(first, last + 1):
            publish(dataset.changes[batch], self._folder / "source")
        return self._run(FILES_PER_BATCH)

    def _run(self, files_per_batch: int) -> list[float]:
        config = Config.model_validate(self._settings(files_per_batch))
        session.start(config)
        pipeline = TimedPipeline(self._spark, config)
        pipeline.run()
        return pipeline.batch_seconds

    def _settings(self, files_per_batch: int) -> dict[str, Any]:
        return {
            "sink": {"id": "bench", "checkpoint": str(self._folder / "state"), "on_bad_record": "fail"},
            "source": {"type": "files", "format": "row-kind", "options": {"maxFilesPerTrigger": files_per_batch}},
            "catalogs": {
                self._catalog: {
                    "type": "hadoop" if self.delta_folder is None else "delta",
                    "warehouse": str(self._warehouse),
                }
            },
            "tables": [
                {
                    "source": str(self._folder / "source"),
                    "target": self.case.table,
                    **({"mode": "append"} if self._deletes == "append" else {"key": ["id"], "deletes": self._deletes}),
                    "columns": table_columns(),
                    "order_by": ["seq"],
                    "partition_by": self._partition_by,
                    "properties": self._properties,
                    **self._variant.settings,
                }
            ],
            "spark": {"spark.sql.shuffle.partitions": self._spark.conf.get("spark.sql.shuffle.partitions")},
        }


class MergeCase:
    """The usual alternative, see `benchmarks.merge_baseline`."""

    def __init__(
        self,
        spark: SparkSession,
        folder: Path,
        buckets: int | None,
        warehouse: Path | None = None,
        *,
        copy_on_write: bool = False,
        partition: str | None = None,
        version: int = 2,
        history: bool = False,
    ) -> None:
        """:param warehouse: of a Delta table; None for an Iceberg table of CATALOG.
        :param partition: instead of buckets, in SQL.
        :param history: the table keeps the versions of its rows, and is partitioned by `is_current`.
        """
        self._properties = {"format-version": str(version)} | (merge_baseline.COPY_ON_WRITE if copy_on_write else {})
        self._history = history
        self.rows = "is_current" if history else None
        self._partition = partition
        suffix = "delta" if warehouse else f"bucket{buckets}" if buckets else "plain"
        name, table = "MERGE INTO", f"{CATALOG}.{folder.name}.merge_{suffix}"
        self.delta_folder = None
        if warehouse is not None:
            self.delta_folder = warehouse / folder.name / f"merge_{suffix}"
            name, table = "MERGE INTO Delta", f"delta.`{self.delta_folder}`"
        if copy_on_write:
            name, suffix = f"{name} {COPY_ON_WRITE}", f"{suffix}_copied"
            table = f"{CATALOG}.{folder.name}.merge_{suffix}"
        if history:
            name, suffix = f"{name} SCD 2", f"{suffix}_history_v{version}"
            table = f"{CATALOG}.{folder.name}.merge_{suffix}"
        self.case = Case(f"{name}, {'by time' if partition else _partitioning(buckets)}", table, buckets)
        self._spark = spark
        self._folder = folder / f"merge_{suffix}"

    def load(self, dataset: Dataset) -> float:
        if self._history:
            merge_baseline.create_history_table(self._spark, self.case.table, self._properties)
            return merge_baseline.load_history(self._spark, self.case.table, dataset.initial)
        if self.delta_folder is None:
            merge_baseline.create_table(
                self._spark, self.case.table, self.case.buckets, self._properties, self._partition
            )
        else:
            merge_baseline.create_delta_table(self._spark, self.delta_folder)
        return merge_baseline.load(self._spark, self.case.table, dataset.initial)

    def apply(self, dataset: Dataset, first: int, last: int) -> list[float]:
        for batch in range(first, last + 1):
            publish(dataset.changes[batch], self._folder / "source")
        return merge_baseline.merge_available(
            self._spark,
            self.case.table,
            self._folder / "source",
            self._folder / "state",
            FILES_PER_BATCH,
            merge_baseline.merge_versions if self._history else merge_baseline.merge_changes,
        )


def run(
    rows: int,
    batches: int,
    events: int,
    turn: int,
    seed: int,
    folder: Path,
    only: str,
    inserts_only: bool,
    keys: Keys = "zipf",
    measures_memory: bool = False,
) -> list[Case]:
    """Generate, load, apply in turns of `turn` micro-batches, scan and check after each turn. Prints as it goes.

    :param measures_memory: and CPU time. Each turn begins when Spark has ended the Python workers of the one before.
    """
    what = "inserts" if inserts_only else "events"
    print(f"generating {rows:,} rows and {batches} micro-batches of {events:,} {what} (seed {seed})", flush=True)
    turns = [*range(turn, batches, turn), batches]
    dataset = write_dataset(
        Workload(rows, seed, 1 if inserts_only else None, keys),
        folder / "data",
        batches,
        events,
        FILES_PER_BATCH,
        expected_after=[batches],
    )
    warehouse = folder / "warehouse"
    spark = build_session(warehouse, with_delta=DELTA in only)
    spark.sparkContext.setLogLevel("ERROR")
    if only == PACKING:
        _compare_packing(spark, folder, warehouse, dataset)
        return []
    part = rows // TIME_PARTS if keys == "newest" else None
    _warm_up(spark, folder / "warm_up", warehouse, seed, only, inserts_only, part)
    sinks = _sinks(spark, folder / "measured", warehouse, only, inserts_only, part)
    for sink in sinks:
        sink.case.load_seconds = sink.load(dataset)
        _check(sink.case, dataset, 0, totals(frame(spark, sink)))
        print(
            f"  load  {sink.case.name:45} {sink.case.load_seconds:6.2f} s  {rows / sink.case.load_seconds:>11,.0f} "
            "rows/s",
            flush=True,
        )
    first = 1
    for last in turns:
        for sink in sinks:
            if measures_memory:
                time.sleep(IDLE_WORKERS_END)
                with Effort(spark) as effort:
                    seconds = sink.apply(dataset, first, last)
                sink.case.efforts.append(effort)
            else:
                seconds = sink.apply(dataset, first, last)
            assert len(seconds) == last - first + 1, f"{sink.case.name}: {len(seconds)} micro-batches"
            sink.case.batch_seconds += seconds
            sink.case.scans[last] = _scan(spark, sink, dataset, last)
            median = statistics.median(seconds)
            print(
                f"  {first:2}-{last:2} {sink.case.name:45} {median:6.2f} s a batch, scan {sink.case.scans[last]:6.2f} "
                "s",
                flush=True,
            )
        first = last + 1
    expected = checksum(spark.read.parquet(str(dataset.expected[batches])))
    for sink in sinks:
        found = checksum(frame(spark, sink))
        assert found == expected, f"{sink.case.name}: content differs from the source"
    print("content of every table equals the source's", flush=True)
    for sink in sinks:
        _scan_compacted(spark, sink, dataset, batches)
    _report(spark, sinks, rows)
    if not only:
        _compare_packing(spark, folder, warehouse, dataset)
    return [sink.case for sink in sinks]


def _compare_packing(spark: SparkSession, folder: Path, warehouse: Path, dataset: Dataset) -> None:
    """Load the same rows as a first load is packed, with zstd's level 1, and by Spark's own writer, in turns. Print the
    bytes of a row and the seconds.
    """
    names = ("rowdelta", "rowdelta, level 1", "Spark's writer")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    size: dict[str, float] = {}
    for turn in range(PACKING_TURNS + 1):
        place = folder / f"packing{turn}"
        sinks: list[tuple[str, RowdeltaCase | MergeCase]] = [
            (names[0], RowdeltaCase(spark, place, warehouse, None, "position")),
            (names[1], RowdeltaCase(spark, place, warehouse, None, "position", level=1)),
            (names[2], MergeCase(spark, place, None)),
        ]
        for name, sink in sinks if turn % 2 else reversed(sinks):
            taken = sink.load(dataset)
            if turn:  # the first one is for the JVM's compiler
                seconds[name].append(taken)
            size[name] = _bytes_a_row(spark, sink.case.table)
    print("\npacking of the load")
    for name in names:
        print(f"  {name:18} {size[name]:6.1f} bytes a row, {statistics.median(seconds[name]):6.2f} s")
    ratios = [ours / quick for ours, quick in zip(seconds[names[0]], seconds[names[1]], strict=True)]
    print(f"  bytes a row {size[names[0]] / size[names[2]]:.2f}x those of Spark's writer (target: at most 1.00x)")
    print(f"  load {statistics.median(ratios):.2f}x as long as with level 1 (target: at most 1.15x)", flush=True)


def _bytes_a_row(spark: SparkSession, table: str) -> float:
    row = spark.sql(f"SELECT sum(file_size_in_bytes) / sum(record_count) FROM {table}.files").first()
    assert row is not None, "an aggregate without keys has one row"
    return float(row[0])


def table_columns() -> dict[str, str]:
    """The workload's columns as `columns:` in a configuration has them."""
    return dict(re.findall(r"(\w+) (\w+(?:\([^)]*\))?)", SPARK_TABLE_SCHEMA))


def _sinks(
    spark: SparkSession, folder: Path, warehouse: Path, only: str, inserts_only: bool, part: int | None
) -> list[RowdeltaCase | MergeCase]:
    """All sinks whose name matches the regular expression `only`.

    :param part: ids in a partition of those that are partitioned by time.
    """
    sinks: list[RowdeltaCase | MergeCase] = []
    for buckets in (None, 8):
        if inserts_only:
            sinks.append(RowdeltaCase(spark, folder, warehouse, buckets, "append"))
        sinks += [
            RowdeltaCase(spark, folder, warehouse, buckets, "position"),
            RowdeltaCase(spark, folder, warehouse, buckets, "position", 3),
            RowdeltaCase(spark, folder, warehouse, buckets, "position", 3, variant=LATE),
            RowdeltaCase(spark, folder, warehouse, buckets, "position", 3, variant=WHERE),
            RowdeltaCase(spark, folder, warehouse, buckets, "position", 3, variant=SOFT_DELETES),
            RowdeltaCase(spark, folder, warehouse, buckets, "equality"),
            MergeCase(spark, folder, buckets),
        ]
    if DELTA in only:
        deletes = "append" if inserts_only else "position"
        sinks += [
            RowdeltaCase(spark, folder, warehouse, None, deletes, delta=True),
            MergeCase(spark, folder, None, warehouse),
        ]
    if COPY_ON_WRITE in only:
        partition = f"truncate({part}, id)" if part else None
        sinks += [
            RowdeltaCase(spark, folder, warehouse, None, COPY_ON_WRITE, version, partition=partition)
            for version in (2, 3)
        ]
        sinks.append(MergeCase(spark, folder, None, copy_on_write=True, partition=partition))
    chosen = [sink for sink in sinks if re.search(only, sink.case.name)]
    if not chosen:
        raise SystemExit(f"--only {only!r} matches none of: {', '.join(sink.case.name for sink in sinks)}")
    return chosen


def _warm_up(
    spark: SparkSession, folder: Path, warehouse: Path, seed: int, only: str, inserts_only: bool, part: int | None
) -> None:
    """Run every sink for a short time, so that no sink is slowed down by the JVM's first compilations and the workers'
    first imports.
    """
    workload = Workload(100_000, seed, 1 if inserts_only else None)
    dataset = write_dataset(workload, folder / "data", 4, 50_000, FILES_PER_BATCH)
    for sink in _sinks(spark, folder, warehouse, only, inserts_only, part):
        sink.load(dataset)
        sink.apply(dataset, 1, dataset.batches)


def _check(case: Case, dataset: Dataset, batch: int, found: Totals) -> None:
    assert found == dataset.totals[batch], f"{case.name} after batch {batch}: {found}, expected {dataset.totals[batch]}"


def frame(spark: SparkSession, sink: RowdeltaCase | MergeCase) -> DataFrame:
    """The sink's rows that the source has too."""
    if sink.delta_folder is None:
        return _wanted(sink, spark.table(sink.case.table))
    return _wanted(sink, spark.read.format("delta").load(str(sink.delta_folder)))


def _wanted(sink: RowdeltaCase | MergeCase, rows: DataFrame) -> DataFrame:
    return rows if sink.rows is None else rows.where(sink.rows)


def _scan(spark: SparkSession, sink: RowdeltaCase | MergeCase, dataset: Dataset, batch: int) -> float:
    """Seconds for reading the table's totals. Also checks the totals."""
    (seconds,) = _scans_in_turns(sink.case, dataset, batch, frame(spark, sink))
    return seconds


def _scan_compacted(spark: SparkSession, sink: RowdeltaCase | MergeCase, dataset: Dataset, batch: int) -> None:
    """Rewrite the table without deletes, as maintenance would: the best that a reader can get, beside what it was
    before.
    """
    case = sink.case
    if sink.delta_folder is not None:
        # a version of the past would be scanned with its log replayed each time, so a copy of the table is scanned
        before_folder = sink.delta_folder.with_name(f"{sink.delta_folder.name}_before")
        shutil.copytree(sink.delta_folder, before_folder)
        earlier = spark.read.format("delta").load(str(before_folder))
        spark.sql(f"REORG TABLE delta.`{sink.delta_folder}` APPLY (PURGE)").collect()
        spark.sql(f"OPTIMIZE delta.`{sink.delta_folder}`").collect()
    else:
        before = spark.table(f"{case.table}.refs").where("name = 'main'").first()
        assert before is not None, "it was scanned"
        name = case.table.removeprefix(f"{CATALOG}.")
        spark.sql(
            f"CALL {CATALOG}.system.rewrite_data_files(table => '{name}', options => map('rewrite-all', 'true'))"
        ).collect()
        earlier = _wanted(sink, spark.sql(f"SELECT * FROM {case.table} VERSION AS OF {before.snapshot_id}"))
    case.last_scan, case.compacted_scan = _scans_in_turns(case, dataset, batch, earlier, frame(spark, sink))
    for name, state in (("last", earlier), ("compacted", frame(spark, sink))):
        taken = []
        for _ in range(SCANS):
            started = perf_counter()
            state.select(F.sum(F.xxhash64(*state.columns).cast("double"))).collect()
            taken.append(perf_counter() - started)
        print(f"        all columns {case.name:39} {name}: {statistics.median(taken):.2f} s", flush=True)


def _scans_in_turns(case: Case, dataset: Dataset, batch: int, *states: DataFrame) -> list[float]:
    """Median seconds of `SCANS` scans of each state, or of fewer if they take long: a single one says more of the
    machine's mood.

    All but the first may find delete files in Iceberg's executor cache, so all are printed.
    """
    seconds: list[list[float]] = [[] for _ in states]
    while len(seconds[0]) < SCANS and sum(seconds[0]) < ENOUGH_SECONDS:
        for state, taken in zip(states, seconds, strict=True):
            started = perf_counter()
            found = totals(state)
            taken.append(perf_counter() - started)
            _check(case, dataset, batch, found)
    for taken in seconds:
        print(f"        scans {case.name:45} {' '.join(f'{each:.2f}' for each in taken)} s", flush=True)
    return [statistics.median(taken) for taken in seconds]


def _report(spark: SparkSession, sinks: Sequence[RowdeltaCase | MergeCase], rows: int) -> None:
    cases = [sink.case for sink in sinks]
    print(
        f"\n{'':46}{'load':>12}{'batch s':>9}{'batch s':>9}{'batch s':>9}{'files a':>9}{'MB a':>8}   scan s after "
        "batch, then in turns: last, compacted"
    )
    marks = " ".join(f"{n:>6}" for n in cases[0].scans)
    print(
        f"{'':46}{'rows/s':>12}{'median':>9}{'mean':>9}{'p95':>9}{'commit':>9}{'commit':>8}   {marks} {'last':>6} "
        f"{'comp.':>6}"
    )
    for sink in sinks:
        case = sink.case
        files, size = _files_per_commit(spark, sink)
        scans = " ".join(f"{seconds:>6.2f}" for seconds in case.scans.values())
        load = rows / case.load_seconds
        print(
            f"{case.name:46}{load:>12,.0f}{case.median:>9.2f}{case.mean:>9.2f}{case.p95:>9.2f}"
            f"{files:>9.1f}{size / 1e6:>8.1f}   {scans} {case.last_scan:>6.2f} {case.compacted_scan:>6.2f}"
        )
    for case in cases:
        if case.efforts:
            seconds = sum(effort.cpu_seconds for effort in case.efforts) / len(case.batch_seconds)
            python, execution, heap = (
                max(getattr(effort, name) for effort in case.efforts) / 1e6 for name in ("python", "execution", "heap")
            )
            print(
                f"{case.name:46}{seconds:6.2f} CPU s a batch; peak MB of Python {python:.0f}, of the JVM's tasks "
                f"{execution:.0f}, of its heap with garbage {heap:.0f}"
            )
    print()
    for ours in cases:
        for other in cases:
            if (
                ours.name.startswith(("rowdelta position", f"rowdelta {COPY_ON_WRITE}"))
                and other.buckets == ours.buckets
                and other is not ours
            ):
                print(f"{other.name} takes {other.median / ours.median:.2f}x as long a micro-batch as {ours.name}")


def _files_per_commit(spark: SparkSession, sink: RowdeltaCase | MergeCase) -> tuple[float, float]:
    """Mean number and bytes of files added by the commits of the micro-batches."""
    table, commits = sink.case.table, len(sink.case.batch_seconds)
    if sink.delta_folder is not None:
        versions = sorted((sink.delta_folder / "_delta_log").glob("*.json"))[-commits:]
        actions = [json.loads(line) for version in versions for line in version.read_text().splitlines()]
        sizes = [action["add"]["size"] for action in actions if "add" in action]
        removed = sum("remove" in action for action in actions)
        return (len(sizes) - removed) / len(versions), sum(sizes) / len(versions)
    snapshots = spark.table(f"{table}.snapshots").where("operation <> 'replace'")
    summaries = snapshots.orderBy("committed_at", ascending=False).limit(commits).collect()
    files = [int(row.summary.get(name, 0)) for row in summaries for name in ("added-data-files", "added-delete-files")]
    size = [int(row.summary.get("added-files-size", 0)) for row in summaries]
    return sum(files) / len(summaries), sum(size) / len(summaries)


def _partitioning(buckets: int | None) -> str:
    return f"bucket({buckets}, id)" if buckets else "unpartitioned"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2_000_000, help="rows of the initial load")
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--events", type=int, default=100_000, help="events in a micro-batch")
    parser.add_argument("--turn", type=int, default=5, help="micro-batches between scans")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--only", default="", help=f"a regular expression for the names of the sinks to run; or {PACKING}"
    )
    parser.add_argument("--keys", choices=get_args(Keys), default="zipf", help="which accounts are changed")
    parser.add_argument("--inserts-only", action="store_true", help="no updates and deletes; with mode append")
    parser.add_argument("--memory", action="store_true", help="also measure CPU time and memory; takes long")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="rowdelta-bench-"))
    try:
        cases = run(
            args.rows,
            args.batches,
            args.events,
            args.turn,
            args.seed,
            folder,
            args.only,
            args.inserts_only,
            args.keys,
            args.memory,
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if args.json:
        figures = [
            {
                "name": case.name,
                "load_rows_per_second": args.rows / case.load_seconds,
                "batch_seconds": case.batch_seconds,
                "scan_seconds": case.scans,
                "last_scan_seconds": case.last_scan,
                "compacted_scan_seconds": case.compacted_scan,
            }
            for case in cases
        ]
        args.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
