"""What order, soft deletes, conditions and history cost beside the plain upsert, and history beside `MERGE INTO`.

    python -m benchmarks.versions                              # 2,000,000 rows
    python -m benchmarks.versions --rows 2000000 10000000      # both in one run, so that their growth means something
    python -m benchmarks.versions --only '^(plain|history|MERGE)'

All tables are Iceberg v3 with `deletes: position`. Some changes come one micro-batch late (`--late`, in percent of the
events). They are drawn from all updates alike, so hot accounts have most of them; `--keys uniform` has no hot ones.

The sinks take turns after each micro-batch, in one session, and every other time in the reverse order. The ratio of two
sinks is the median of their ratios in each micro-batch. The first `WARM_UP` micro-batches don't count. At the end the
tables' current rows are scanned in turns, and contents are compared with what the changes must leave. `MERGE INTO` has
no late changes: it applies each as if it were the newest, as the plain table does. So its current rows are compared
with those, and its closed ones with nothing. Of the changes of a key in a micro-batch it keeps the last; rowdelta keeps
a version of each.

The pair of tables from one source reads Kafka, since files are read once. Beside it is a plain table from the same
topic.
"""

import argparse
import functools
import re
import shutil
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any, get_args

from pyspark.sql import SparkSession, Window
from pyspark.sql import functions as F

from benchmarks.bench import (
    FILES_PER_BATCH,
    LATE,
    PLAIN,
    SCANS,
    SOFT_DELETES,
    WHERE,
    MergeCase,
    RowdeltaCase,
    Variant,
    frame,
)
from benchmarks.streams import build_session
from benchmarks.workload import TABLE_SCHEMA, Dataset, Keys, Workload, checksum, totals, write_dataset
from tests.stack.kafka import Kafka, running_kafka

WARM_UP = 2
HISTORY = Variant("history", {"history": {}}, "is_current")
KAFKA = "Kafka"
PLAIN_NAME = "plain"
PLAIN_KAFKA = f"{PLAIN_NAME}, {KAFKA}"
PAIR = f"{PLAIN_NAME} + history, {KAFKA}"
VERSION_COLUMNS = [*TABLE_SCHEMA.names, "valid_from", "valid_to", "is_current"]
TARGETS = {
    "late: drop": {PLAIN_NAME: 1.15},
    "soft deletes": {PLAIN_NAME: 1.3},
    "where": {PLAIN_NAME: 1.05},
    "history": {PLAIN_NAME: 1.5, "MERGE SCD 2": 0.2, "MERGE SCD 2, v2": 0.2},
    PAIR: {PLAIN_KAFKA: 1.7},
}
"""By case: the case that it is compared with, and at most how many times its seconds it may take. That of `MERGE` is
for 10,000,000 rows.
"""
GROWTH = 1.1
"""At most, from the least rows to the most."""
SCAN = 1.1
"""At most, of the current rows of history beside the plain table."""
_MESSAGES_AT_ONCE = 1_000_000
_WITH_MICROSECONDS = "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX"


class Topic:
    """The dataset's changes as JSON messages, by key."""

    def __init__(self, spark: SparkSession, kafka: Kafka, dataset: Dataset, name: str) -> None:
        kafka.create_topic(name, 2)
        self.name = name
        self.servers = kafka.bootstrap_servers
        self._spark = spark
        self._dataset = dataset
        self._sent = -1

    def send_until(self, batch: int) -> None:
        """Send the micro-batches up to this one that weren't sent yet."""
        for number in range(self._sent + 1, batch + 1):
            changes = self._spark.read.parquet(*map(str, self._dataset.changes[number]))
            message = F.to_json(F.struct(*changes.columns), {"timestampFormat": _WITH_MICROSECONDS})
            messages = changes.select(F.col("id").cast("string").alias("key"), message.alias("value"))
            options = {"kafka.bootstrap.servers": self.servers, "topic": self.name}
            messages.write.format("kafka").options(**options).save()
        self._sent = max(self._sent, batch)


class KafkaCase(RowdeltaCase):
    """One or several tables from one topic in one job."""

    def __init__(
        self, spark: SparkSession, folder: Path, warehouse: Path, topic: Topic, variants: Sequence[Variant]
    ) -> None:
        """:param variants: one for each table."""
        name = f"{KAFKA} {len(variants)}"
        super().__init__(spark, folder, warehouse, None, "position", 3, variant=replace(variants[0], name=name))
        self.tables = [self.case.table, *(f"{self.case.table}_{variant.name}" for variant in variants[1:])]
        self._topic = topic
        self._variants = variants

    def load(self, dataset: Dataset) -> float:
        self._topic.send_until(0)
        return sum(self._run(0))

    def apply(self, dataset: Dataset, first: int, last: int) -> list[float]:
        self._topic.send_until(last)
        return self._run(0)

    def _settings(self, files_per_batch: int) -> dict[str, Any]:
        settings = super()._settings(files_per_batch)
        (plain,) = settings["tables"]
        options = {"kafka.bootstrap.servers": self._topic.servers, "maxOffsetsPerTrigger": _MESSAGES_AT_ONCE}
        tables = [
            plain | {"source": self._topic.name, "target": table} | variant.settings
            for table, variant in zip(self.tables, self._variants, strict=True)
        ]
        return settings | {"source": {"type": "kafka", "format": "row-kind", "options": options}, "tables": tables}


@dataclass
class Contender:
    """A sink with its table of some rows, and what was measured.

    :param is_ordered: whether the table's current rows are those of the newest changes; else of those that came last.
    :param versions: name of the table with all versions. None: there is none that must be right.
    :param batch_seconds: of each micro-batch, those of the warm-up too.
    """

    name: str
    sink: RowdeltaCase | MergeCase
    is_ordered: bool = False
    versions: str | None = None
    load_seconds: float = 0.0
    batch_seconds: list[float] = field(default_factory=list)

    @property
    def measured(self) -> list[float]:
        return self.batch_seconds[WARM_UP:]


def _contenders(
    spark: SparkSession, folder: Path, warehouse: Path, dataset: Dataset, kafka: Kafka | None, only: str
) -> list[Contender]:
    """Those whose name matches the regular expression `only`.

    :param kafka: None if none of them reads a topic.
    """

    def ours(variant: Variant) -> RowdeltaCase:
        return RowdeltaCase(spark, folder, warehouse, None, "position", 3, variant=variant)

    def merge(version: int, *, history: bool) -> MergeCase:
        return MergeCase(spark, folder, None, version=version, history=history)

    @functools.cache
    def topic() -> Topic:
        assert kafka is not None, "a name asks for it"
        return Topic(spark, kafka, dataset, folder.name)

    def pair() -> Contender:
        sink = KafkaCase(spark, folder, warehouse, topic(), [PLAIN, HISTORY])
        return Contender(PAIR, sink, versions=sink.tables[1])

    def history() -> Contender:
        sink = ours(HISTORY)
        return Contender(HISTORY.name, sink, is_ordered=True, versions=sink.case.table)

    makers: dict[str, Callable[[], Contender]] = {
        PLAIN_NAME: lambda: Contender(PLAIN_NAME, ours(PLAIN)),
        LATE.name: lambda: Contender(LATE.name, ours(LATE), is_ordered=True),
        WHERE.name: lambda: Contender(WHERE.name, ours(WHERE)),
        SOFT_DELETES.name: lambda: Contender(SOFT_DELETES.name, ours(SOFT_DELETES)),
        HISTORY.name: history,
        PLAIN_KAFKA: lambda: Contender(PLAIN_KAFKA, KafkaCase(spark, folder, warehouse, topic(), [PLAIN])),
        PAIR: pair,
        "MERGE SCD 1": lambda: Contender("MERGE SCD 1", merge(3, history=False)),
        "MERGE SCD 2": lambda: Contender("MERGE SCD 2", merge(3, history=True)),
        "MERGE SCD 2, v2": lambda: Contender("MERGE SCD 2, v2", merge(2, history=True)),
    }
    chosen = [make() for name, make in makers.items() if re.search(only, name)]
    if not chosen:
        raise SystemExit(f"--only {only!r} matches none of: {'; '.join(makers)}")
    return chosen


def run(
    sizes: Sequence[int], batches: int, events: int, late: float, keys: Keys, seed: int, folder: Path, only: str
) -> None:
    """Generate, load, apply in turns, scan and check. Prints as it goes."""
    warehouse = folder / "warehouse"
    with ExitStack() as stack:
        needs_kafka = any(re.search(only, name) for name in (PLAIN_KAFKA, PAIR))
        kafka = stack.enter_context(running_kafka()) if needs_kafka else None
        spark = build_session(warehouse, with_kafka=needs_kafka)
        spark.sparkContext.setLogLevel("ERROR")
        datasets, contenders = list[Dataset](), list[list[Contender]]()
        for rows in sizes:
            print(f"generating {rows:,} rows and {batches} micro-batches of {events:,} events", flush=True)
            workload = Workload(rows, seed, keys=keys, late=late)
            place = folder / f"of_{rows}"
            datasets.append(
                write_dataset(workload, place / "data", batches, events, FILES_PER_BATCH, expected_after=[batches])
            )
            contenders.append(_contenders(spark, place, warehouse, datasets[-1], kafka, only))
        working = [(dataset, each) for dataset, those in zip(datasets, contenders, strict=True) for each in those]
        for dataset, contender in working:
            contender.load_seconds = contender.sink.load(dataset)
            print(f"  load {_label(contender, dataset)} {contender.load_seconds:6.2f} s", flush=True)
        for batch in range(1, batches + 1):
            for dataset, contender in working if batch % 2 else reversed(working):
                (seconds,) = contender.sink.apply(dataset, batch, batch)
                contender.batch_seconds.append(seconds)
                print(f"  {batch:4} {_label(contender, dataset)} {seconds:6.2f} s", flush=True)
        for dataset, those in zip(datasets, contenders, strict=True):
            _check(spark, dataset, those)
            _report(dataset, those)
            _compare_scans(spark, those)
        _report_growth(contenders)


def _label(contender: Contender, dataset: Dataset) -> str:
    return f"{contender.name:26} {dataset.totals[0].count:>12,} rows"


def _check(spark: SparkSession, dataset: Dataset, contenders: Sequence[Contender]) -> None:
    """Compare contents with what the changes must leave."""
    files = [str(file) for files in dataset.changes for file in files]
    changes = spark.read.parquet(*files).where("row_kind <> '-U'")
    batch = F.regexp_extract("_metadata.file_name", r"batch-(\d+)", 1)  # empty of the load
    came_last = (
        changes.groupBy("id")
        .agg(F.max_by(F.struct("row_kind", *TABLE_SCHEMA.names[1:]), F.struct(batch, "seq")).alias("last"))
        .select("id", "last.*")
        .where("row_kind <> '-D'")
    )
    until = F.lead("seq").over(Window.partitionBy("id").orderBy("seq"))
    versions = changes.select("*", F.col("seq").alias("valid_from"), until.alias("valid_to")).where("row_kind <> '-D'")
    versions = versions.withColumn("is_current", F.col("valid_to").isNull())
    expected = {
        False: checksum(came_last),
        True: checksum(spark.read.parquet(str(dataset.expected[dataset.batches]))),
    }
    expected_versions = checksum(versions, VERSION_COLUMNS)
    for contender in contenders:
        if checksum(frame(spark, contender.sink)) != expected[contender.is_ordered]:
            raise SystemExit(f"{contender.name}: content differs from what the changes leave")
        if contender.versions is not None:
            table = spark.table(contender.versions)
            if checksum(table, VERSION_COLUMNS) != expected_versions:
                raise SystemExit(f"{contender.name}: versions differ from what the changes make")
            print(f"  {contender.name}: {table.count():,} versions", flush=True)
    print("contents are what the changes leave", flush=True)


def _ratio(ours: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(our / other for our, other in zip(ours, others, strict=True))


def _report(dataset: Dataset, contenders: Sequence[Contender]) -> None:
    print(f"\n{dataset.totals[0].count:,} rows\n{'':26}{'load s':>8}{'median s':>10}{'of plain':>10}   targets")
    by_name = {contender.name: contender for contender in contenders}
    for contender in contenders:
        plain = by_name.get(PLAIN_NAME)
        of_plain = f"{_ratio(contender.measured, plain.measured):.2f}x" if plain else ""
        targets = [
            f"{_ratio(contender.measured, by_name[base].measured):.2f}x of {base} (at most {most:.2f}x)"
            for base, most in TARGETS.get(contender.name, {}).items()
            if base in by_name
        ]
        median = statistics.median(contender.measured)
        print(
            f"{contender.name:26}{contender.load_seconds:>8.2f}{median:>10.2f}{of_plain:>10}   {'; '.join(targets)}",
            flush=True,
        )


def _compare_scans(spark: SparkSession, contenders: Sequence[Contender]) -> None:
    """Read the current rows' totals in turns."""
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for _ in range(SCANS + 1):
        for contender in contenders:
            started = perf_counter()
            totals(frame(spark, contender.sink))
            seconds[contender.name].append(perf_counter() - started)
    print("\nscan of the current rows")
    for name, taken in seconds.items():
        ratio = f"{_ratio(taken[1:], seconds[PLAIN_NAME][1:]):.2f}x of plain" if PLAIN_NAME in seconds else ""
        target = f" (at most {SCAN:.2f}x)" if name == HISTORY.name else ""
        print(f"{name:26}{statistics.median(taken[1:]):>8.2f} s   {ratio}{target}", flush=True)


def _report_growth(contenders: Sequence[Sequence[Contender]]) -> None:
    if len(contenders) > 1:
        print(f"\nfrom the least rows to the most (at most {GROWTH:.2f}x)")
        for least, most in zip(contenders[0], contenders[-1], strict=True):
            print(f"{least.name:26}{_ratio(most.measured, least.measured):>8.2f}x", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[2_000_000], help="rows of the initial load")
    parser.add_argument("--batches", type=int, default=6, help=f"of which {WARM_UP} are for warming up")
    parser.add_argument("--events", type=int, default=100_000, help="events in a micro-batch")
    parser.add_argument("--late", type=float, default=5, help="percent of the events that come a micro-batch late")
    parser.add_argument("--keys", choices=get_args(Keys), default="zipf", help="which accounts are changed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="a regular expression for the names of the cases to run")
    args = parser.parse_args()
    if args.batches <= WARM_UP:
        parser.error(f"--batches: got {args.batches}, expected more than {WARM_UP}, which are for warming up")
    folder = Path(tempfile.mkdtemp(prefix="rowdelta-versions-"))
    try:
        run(sorted(args.rows), args.batches, args.events, args.late / 100, args.keys, args.seed, folder, args.only)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
