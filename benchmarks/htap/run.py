"""Changes the tables at an even pace, reads them meanwhile, and takes samples."""

import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from benchmarks.htap.orders import Orders
from benchmarks.peers.readers import connect_duckdb
from benchmarks.processes import FolderGrowth, commit, machine_seconds
from benchmarks.soak.changes import differences
from benchmarks.soak.job import Job, newest_metadata
from benchmarks.streams import CATALOG, build_session

_LOOK_SECONDS = 0.2
_SCAN = "SELECT count(*), sum(amount), max(seq) FROM {}"
_POINT = "SELECT * FROM {} WHERE id = {}"
_TURNS = 3
"""A table and its compacted copy are scanned in turns so often."""


@dataclass(frozen=True)
class Plan:
    """Seconds, and changes a second."""

    seconds: int = 3600
    rate: int = 2000
    stock: int = 1_000_000
    orders: int = 1_000_000
    read_every: int = 10
    compare_every: int = 300
    """So often a table is compared with a compacted copy of it."""
    seed: int = 1


class Feed:
    """Publishes a file of changes each second, and remembers when."""

    def __init__(self, plan: Plan, job: Job) -> None:
        self._plan, self._job = plan, job
        self.source = Orders(plan.stock, plan.orders, plan.seconds * plan.rate, plan.seed)
        self.published: dict[int, float] = {}
        """By the files' numbers."""
        job.publish(1, self.source.first_load())

    @property
    def last(self) -> int:
        return self.source.batches + 1

    def run(self, ended: threading.Event) -> None:
        began = time.monotonic()
        for second in range(self._plan.seconds):
            if ended.wait(max(0.0, began + second - time.monotonic())):
                return
            changes = self.source.batch(self._plan.rate)
            self.published[self.last] = time.monotonic()
            self._job.publish(self.last, changes)


class Ages:
    """How old changes are when a table shows them, by its own metadata: seconds, at most `_LOOK_SECONDS` too many."""

    def __init__(self, job: Job, feed: Feed) -> None:
        self._job, self._feed = job, feed
        self._seen = dict.fromkeys(job.formats, 1)
        self._ages: dict[str, list[float]] = {name: [] for name in job.formats}
        self._lock = threading.Lock()

    def run(self, ended: threading.Event) -> None:
        while not ended.wait(_LOOK_SECONDS):
            for name in self._job.formats:
                position, now = self._job.position(name), time.monotonic()
                with self._lock:
                    files = range(self._seen[name] + 1, position + 1)
                    self._ages[name] += [now - self._feed.published[file] for file in files]
                    self._seen[name] = max(position, self._seen[name])

    def take(self) -> dict[str, list[float]]:
        """Those since the last call."""
        with self._lock:
            found, self._ages = self._ages, {name: [] for name in self._job.formats}
        return found


class Growth(FolderGrowth):
    """A folder of thousands of files, which is looked at less often."""

    seconds = 1.0

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._taken = 0

    def taken(self) -> int:
        """Bytes that have come since the last call."""
        before, self._taken = self._taken, sum(self.files.values())
        return self._taken - before


class Readers:
    """Spark and DuckDB. Each query sees the newest state of a table."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._spark = build_session(job.folder / "warehouse" / "iceberg", 1, "2g", with_delta=True)
        self._spark.sparkContext.setLogLevel("ERROR")

    def times(self, point: int) -> dict[str, float]:
        """Seconds of each query, by engine, query and table."""
        found = {}
        for name in self._job.formats:
            frame = self._frame(name)
            found[f"spark scan {name}"] = _timed(partial(_scanned, frame))
            found[f"spark point {name}"] = _timed(frame.where(f"id = {point}").collect)
            with connect_duckdb("delta" if name == "delta" else "iceberg") as connection:
                place = self._job.location(name)
                source = f"delta_scan('{place}')" if name == "delta" else f"iceberg_scan('{newest_metadata(place)}')"
                for kind, query in {"scan": _SCAN.format(source), "point": _POINT.format(source, point)}.items():
                    found[f"duckdb {kind} {name}"] = _timed(partial(_rows, connection, query))
        return found

    def beside_compacted(self) -> dict[str, float]:
        """By table: how many times as long Spark's scan takes as that of a compacted copy. Both are opened before: who
        finds out which files a table has now pays for it where it is compacted too.
        """
        found = {}
        for name in self._job.formats:
            frame = self._frame(name) if name != "delta" else self._newest(self._job.location(name))
            copy, ours, copys = self._compacted(name, frame), list[float](), list[float]()
            for _ in range(_TURNS):
                ours.append(_timed(partial(_scanned, frame)))
                copys.append(_timed(partial(_scanned, copy)))
            found[name] = statistics.median(ours) / statistics.median(copys)
        return found

    def _frame(self, name: str) -> DataFrame:
        if name == "delta":
            return self._spark.read.format("delta").load(str(self._job.location(name)))
        return self._spark.table(f"{CATALOG}.soak.{name}")

    def _newest(self, place: Path) -> DataFrame:
        """The newest version of a Delta table. Without its number, each query would look for a newer one."""
        newest = max(int(commit.stem) for commit in (place / "_delta_log").glob("*[0-9].json"))
        return self._spark.read.format("delta").option("versionAsOf", newest).load(str(place))

    def _compacted(self, name: str, frame: DataFrame) -> DataFrame:
        if name == "delta":
            place = self._job.folder / "copies" / name
            writer = frame.repartition("region").write.format("delta").partitionBy("region")
            writer.mode("overwrite").save(str(place))
            return self._newest(place)
        copy = f"{CATALOG}.copies.{name}"
        frame.sort("region").writeTo(copy).using("iceberg").partitionedBy(F.col("region")).createOrReplace()
        return self._spark.table(copy)


def run(plan: Plan, job: Job, samples: Path, tell: Callable[[str], None] = print) -> dict[str, list[str]]:
    """Play the plan. Samples are appended to a file of JSON lines as they are taken.

    :return: the differences between each table and the source, in words. Empty lists if there are none.
    """
    feed, readers = Feed(plan, job), Readers(job)
    growth = {name: Growth(job.location(name)) for name in job.formats} | {"index": Growth(job.folder / "index")}
    samples.write_text(
        json.dumps(
            {**asdict(plan), "formats": job.formats, "commit": commit(), "began": f"{datetime.now(UTC):%Y-%m-%d}"}
        )
        + "\n"
    )
    job.start()
    try:
        job.wait_for(1)
        ages, began = Ages(job, feed), time.monotonic()
        now = began
        with ExitStack() as stack:
            for folder in growth.values():
                stack.enter_context(folder)
            for work in (feed.run, ages.run):
                stack.enter_context(_beside(work))
            compare_at = float(plan.compare_every)
            while now - began < plan.seconds:
                # who falls behind reads less often
                time.sleep(max(0.0, now + plan.read_every - time.monotonic()))
                last, now = now, time.monotonic()
                sample = {
                    "second": now - began,
                    "since": now - last,
                    "seconds": readers.times(feed.source.newest()),
                    "ages": ages.take(),
                    "written": {name: folder.taken() for name, folder in growth.items()},
                    "processes": job.processes(),
                    "live": {name: job.told(name) for name in job.formats},
                    "machine_seconds": machine_seconds(),
                }
                if now - began >= compare_at:
                    sample["beside_compacted"] = readers.beside_compacted()
                    tell(f"{now - began:,.0f} s: {sample['beside_compacted']}")
                    compare_at += plan.compare_every
                _append(sample, samples)
                job.forget(below=min(map(job.position, job.formats)) - 5)
        job.wait_for(feed.last)
        expected = feed.source.expected()
        found = {name: differences(job.rows(name), expected) for name in job.formats}
        _append({"compared": found, "rows": expected.num_rows}, samples)
        return found
    finally:
        job.kill()


@contextmanager
def _beside(work: Callable[[threading.Event], None]) -> Iterator[None]:
    ended, errors = threading.Event(), list[BaseException]()

    def run() -> None:
        try:
            work(ended)
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    if errors:
        raise errors[0]


def _scanned(frame: DataFrame) -> Any:
    return frame.selectExpr("count(*)", "sum(amount)", "max(seq)").collect()


def _rows(connection: duckdb.DuckDBPyConnection, query: str) -> Any:
    return connection.execute(query).fetchall()


def _timed(query: Callable[[], Any]) -> float:
    started = time.perf_counter()
    query()
    return time.perf_counter() - started


def _append(sample: dict[str, Any], path: Path) -> None:
    with path.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(sample) + "\n")
