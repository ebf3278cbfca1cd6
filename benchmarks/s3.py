"""What a micro-batch costs in an object store, beside local folders: time, requests by operation, bytes.

    python -m benchmarks.s3                    # all cases, 12 micro-batches of 1,000 changes over 100,000 keys
    python -m benchmarks.s3 --delay 30         # as if the store and the catalog answered 30 ms later
    python -m benchmarks.s3 --cases s3 --batches 6 --rows 200 --keys 2000 --json    # what tests look at

| case | table | key index | Spark's checkpoint |
|---|---|---|---|
| local | local | local | local |
| rest | local, REST catalog | local | local |
| s3-index | local | bucket | local |
| s3 | bucket, JDBC catalog, Iceberg's S3FileIO | bucket | local |
| s3-hadoop | bucket, JDBC catalog, Hadoop's S3A | bucket | local |
| s3-checkpoint | as s3 | bucket | bucket |
| s3-delta | bucket, Delta | bucket | local |

The store is S3Proxy's, or the one at `--endpoint`. A proxy in front of it counts what the driver, Spark and the tasks
ask for. Change files are local, so reading them is no request. A micro-batch is what happens between two of the sink's
log lines: its writing and commit, and Spark's own logs around it. The first one loads the keys, and isn't counted; of
the others, the table shows the median, and the mean, which has the merges of small files too.

`cold` is the first micro-batch of a run after all copies of the index on this machine were deleted, and all Python
workers have ended. With a delay, times are those of a real store as far as requests follow each other; the server's own
time is in them too.
"""

import argparse
import json
import logging
import os
import shutil
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.streams import TimedPipeline
from sink.config import Config
from sink.spark import session
from tests.stack.counting import CountingProxy, Request, catalog_operation, counting, s3_operation
from tests.stack.jars import HERE, delta_jars, ivy_to_itself, jars, sqlite_jdbc_jar
from tests.stack.rest_catalog import running_rest_catalog
from tests.stack.s3 import S3, running_s3

CASES = ("local", "rest", "s3-index", "s3", "s3-hadoop", "s3-checkpoint", "s3-delta")
BUCKET = f"s3a://{S3.BUCKET}"


@dataclass
class Cost:
    """Of one micro-batch. Bytes are those of the bodies."""

    s3: dict[str, int] = field(default_factory=dict)
    catalog: dict[str, int] = field(default_factory=dict)
    sent: int = 0
    received: int = 0


@dataclass
class Measured:
    """Seconds are those of whole micro-batches. `warm` has a cost for each micro-batch."""

    case: str
    seconds: float
    mean_seconds: float
    cold_seconds: float
    warm: list[Cost]
    cold: Cost


class Marks(logging.Handler):
    """Notes at each of the sink's lines about a micro-batch what was asked for since the last one."""

    def __init__(self, proxies: Mapping[str, CountingProxy]) -> None:
        super().__init__(logging.INFO)
        self.costs: list[Cost] = []
        self.requests: list[list[Request]] = []
        self.last_warm: list[Request] = []
        self._proxies = proxies

    def emit(self, record: logging.LogRecord) -> None:
        if " batch " in record.getMessage():
            self.costs.append(self._cost())

    def clear(self) -> None:
        for proxy in self._proxies.values():
            proxy.take()
        self.costs, self.requests = [], []

    def _cost(self) -> Cost:
        s3, catalog = (self._proxies[name].take() for name in ("s3", "catalog"))
        self.requests.append(s3)
        return Cost(
            _counts(s3, s3_operation),
            _counts(catalog, catalog_operation),
            sum(request.sent for request in s3),
            sum(request.received for request in s3),
        )


class Changes:
    """Change files, one for each micro-batch. What is in them depends on the seed only."""

    def __init__(self, folder: Path, keys: int, seed: int) -> None:
        folder.mkdir()
        self.folder = folder
        self._random = Random(seed)
        self._keys = keys
        self._sequence = 0
        self._files = 0
        self.add(range(keys))

    def update(self, rows: int) -> None:
        self.add([self._random.randrange(self._keys) for _ in range(rows)])

    def add(self, keys: Sequence[int]) -> None:
        lines = []
        for key in keys:
            self._sequence += 1
            values = {"id": key, "value": self._sequence, "note": f"a note on row {key}"}
            lines.append(json.dumps({"row_kind": "+U", "seq": self._sequence, **values}))
        path = self.folder / f"{self._files:05d}.json"
        path.write_text("\n".join(lines))
        os.utime(path, (1_700_000_000 + self._files, 1_700_000_000 + self._files))
        self._files += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--keys", type=int, default=100_000, help="rows of the table (default: 100,000)")
    parser.add_argument("--rows", type=int, default=1000, help="changes in a micro-batch (default: 1,000)")
    parser.add_argument("--batches", type=int, default=12, help="measured micro-batches (default: 12)")
    parser.add_argument("--format-version", default="2", choices=("2", "3"), help="of Iceberg's tables (default: 2)")
    parser.add_argument("--delay", type=float, default=0, help="milliseconds added to each request (default: 0)")
    parser.add_argument("--endpoint", metavar="URL", help="a store with the bucket `lake` (default: S3Proxy's)")
    parser.add_argument("--key", default=S3.KEY, help="the store's access key")
    parser.add_argument("--secret", default=S3.SECRET, help="the store's secret key")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one JSON object a case")
    parser.add_argument("--paths", action="store_true", help="list the requests of the last warm micro-batch")
    args = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rowdelta-s3-bench-")))
        endpoint = args.endpoint or stack.enter_context(running_s3()).endpoint
        catalog = stack.enter_context(running_rest_catalog())
        proxies = {
            "s3": stack.enter_context(counting(endpoint)),
            "catalog": stack.enter_context(counting(catalog.uri)),
        }
        if args.delay:
            for proxy in proxies.values():
                proxy.before = lambda request: time.sleep(args.delay / 1000)
        marks = stack.enter_context(_marking(proxies))
        if not args.json:
            print(
                "| case | s a micro-batch: median, mean, cold | S3 requests: median, mean, cold "
                "| by operation (mean) | catalog | KB sent, received |\n|---|---|---|---|---|---|",
                flush=True,
            )
        for case in args.cases:
            measured = _measure(case, folder, proxies, marks, args)
            print(json.dumps(asdict(measured)) if args.json else _row(measured), flush=True)
            if args.paths:
                for request in marks.last_warm:
                    print(f"  {s3_operation(request)} {request.path} {request.query or ''} {request.status}")


def _measure(
    case: str, folder: Path, proxies: Mapping[str, CountingProxy], marks: Marks, args: argparse.Namespace
) -> Measured:
    changes = Changes(folder / case, args.keys, args.seed)
    config = _config(case, folder, changes.folder, proxies, args)
    with ivy_to_itself():
        spark = session.start(config)
    for _ in range(args.batches):
        changes.update(args.rows)
    marks.clear()
    pipeline = TimedPipeline(spark, config)
    pipeline.run()
    seconds = pipeline.batch_seconds[1:]
    warm = marks.costs[1:]
    marks.last_warm = marks.requests[-1]
    assert len(seconds) == len(warm) == args.batches, f"{len(seconds)} micro-batches, {len(warm)} commits"
    changes.update(args.rows)
    _forget_index()
    marks.clear()
    pipeline = TimedPipeline(spark, config)
    marks.clear()  # what it takes to open the table is paid once in a run
    pipeline.run()
    cold_seconds = pipeline.batch_seconds[0]
    return Measured(case, statistics.median(seconds), statistics.mean(seconds), cold_seconds, warm, marks.costs[0])


def _config(
    case: str, folder: Path, source: Path, proxies: Mapping[str, CountingProxy], args: argparse.Namespace
) -> Config:
    of_s3 = {
        "s3.endpoint": proxies["s3"].uri,
        "s3.access-key-id": args.key,
        "s3.secret-access-key": args.secret,
        "s3.region": "us-east-1",
    }
    state = f"{BUCKET}/state" if case == "s3-checkpoint" else f"{folder}/state"
    index = f"{BUCKET}/index" if case.startswith("s3") else f"{folder}/index"
    table: dict[str, Any] = {
        "source": str(source),
        "key": ["id"],
        "columns": {"id": "bigint", "value": "bigint", "note": "string"},
        "order_by": ["seq bigint"],
        "target": {
            "local": "local",
            "s3-index": "local",
            "rest": "rest",
            "s3-delta": "delta",
            "s3-hadoop": "hadoop",
        }.get(case, "bucket")
        + f".bench.{case.replace('-', '_')}",
    }
    if case != "s3-delta":
        table["properties"] = {"format-version": args.format_version}
    sqlite = f"jdbc:sqlite:{folder}"
    return Config.model_validate(
        {
            "sink": {"id": "bench", "checkpoint": f"{state}/{case}", "on_bad_record": "fail"},
            "index": {"location": f"{index}/{case}", **({"properties": of_s3} if case == "s3-index" else {})},
            "source": {
                "type": "files",
                "format": "row-kind",
                "options": {"path_format": "json", "maxFilesPerTrigger": 1},
            },
            "catalogs": {
                "local": {"type": "jdbc", "uri": f"{sqlite}/local.db", "warehouse": f"{folder}/local"},
                "rest": {"type": "rest", "uri": proxies["catalog"].uri},
                "bucket": {
                    "type": "jdbc",
                    "uri": f"{sqlite}/bucket.db",
                    "warehouse": f"{BUCKET}/tables",
                    "io-impl": "org.apache.iceberg.aws.s3.S3FileIO",
                    "http-client.type": "urlconnection",
                    "client.region": "us-east-1",
                    "s3.path-style-access": "true",
                    **of_s3,
                },
                "hadoop": {"type": "jdbc", "uri": f"{sqlite}/hadoop.db", "warehouse": f"{BUCKET}/hadoop", **of_s3},
                "delta": {"type": "delta", "warehouse": f"{BUCKET}/delta"},
            },
            "tables": [table],
            "spark": {
                "spark.master": "local[2,4]",  # workers are ended meanwhile, and what fails then is done again
                "spark.driver.memory": "2g",
                "spark.driver.bindAddress": "127.0.0.1",
                "spark.driver.host": "127.0.0.1",
                "spark.ui.enabled": "false",
                "spark.sql.shuffle.partitions": "2",
                "spark.driver.extraClassPath": ":".join(
                    map(str, [*jars(HERE / "ivy-s3.xml"), sqlite_jdbc_jar(), *delta_jars()])
                ),
                "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
                "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
                "spark.hadoop.fs.s3a.endpoint": proxies["s3"].uri,
                "spark.hadoop.fs.s3a.endpoint.region": "us-east-1",
                "spark.hadoop.fs.s3a.path.style.access": "true",
                "spark.hadoop.fs.s3a.access.key": args.key,
                "spark.hadoop.fs.s3a.secret.key": args.secret,
            },
        }
    )


@contextmanager
def _marking(proxies: Mapping[str, CountingProxy]) -> Iterator[Marks]:
    log, marks = logging.getLogger("rowdelta"), Marks(proxies)
    log.addHandler(marks)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield marks
    finally:
        log.removeHandler(marks)


def _forget_index() -> None:
    """As on a machine that has never seen the index: no copy of a run, and no process that has one mapped."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if b"\0sink.spark.daemon\0" in (process / "cmdline").read_bytes() and _is_ours(int(process.name)):
                os.kill(int(process.name), signal.SIGTERM)
    time.sleep(1)
    shutil.rmtree(Path(tempfile.gettempdir()) / f"rowdelta-index-{os.getuid()}", ignore_errors=True)


def _is_ours(pid: int) -> bool:
    """Whether a process descends from this one."""
    while pid > 1:
        if pid == os.getpid():
            return True
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return False


def _counts(requests: list[Request], operation: Callable[[Request], str]) -> dict[str, int]:
    return dict(Counter(map(operation, requests)).most_common())


def _row(measured: Measured) -> str:
    totals = [sum(cost.s3.values()) for cost in measured.warm]
    by_operation = sum((Counter(cost.s3) for cost in measured.warm), Counter[str]())
    of_catalog = sum((Counter(cost.catalog) for cost in measured.warm), Counter[str]())
    count = len(measured.warm)

    def shown(counts: Counter[str]) -> str:
        return ", ".join(f"{name} {number / count:.1f}" for name, number in counts.most_common())

    sent, received = (sum(getattr(cost, name) for cost in measured.warm) / count for name in ("sent", "received"))
    return (
        f"| {measured.case} | {measured.seconds:.2f}, {measured.mean_seconds:.2f}, {measured.cold_seconds:.2f} "
        f"| {statistics.median(totals):.0f}, {statistics.mean(totals):.1f}, {sum(measured.cold.s3.values())} "
        f"| {shown(by_operation)} | {shown(of_catalog)} | {sent / 1e3:.0f}, {received / 1e3:.0f} |"
    )


if __name__ == "__main__":
    main()
