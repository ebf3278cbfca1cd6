"""How long a start takes, beside that of a bare Spark session.

    python -m benchmarks.start                 # 3 rounds
    python -m benchmarks.start --rounds 1

Each round measures in turns, from the start of the process to its end:

- bare: a `SparkSession` with Iceberg's jar, one empty job; no archive of classes, no Ivy
- first commit: `rowdelta run` of 10 changes into a table that doesn't exist yet
- nothing to do: the same run again
- without archive: the same, with a cache that has only the record of resolved jars
- check and status: of that table

The archive is made first, in a cache folder of the benchmark's own (`rowdelta warm`). Prints the median of the rounds,
its ratio to that of the bare session, and whether that meets the target.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from sink import config
from sink.spark import jars, session

_LOCAL = {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1", "spark.ui.enabled": "false"}
_BARE = """
import sys
from pyspark.sql import SparkSession
builder = SparkSession.builder.master("local[*]")
for setting in sys.argv[1:]:
    builder = builder.config(*setting.split("=", 1))
spark = builder.getOrCreate()
spark.range(0).count()
spark.stop()
"""
_CHANGES = 10
_MOST_TIMES_BARE = {"first commit": 1.3, "nothing to do": 0.8, "check": 0.8, "status": 0.8}
"""Targets."""


def main() -> None:
    parser = argparse.ArgumentParser(description="How long a start takes, beside that of a bare Spark session.")
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory(prefix="rowdelta-start-") as folder:
        seconds = measured(Path(folder), rounds)
    bare = statistics.median(seconds["bare"])
    print(f"\n{'':<18}{'seconds':>8}{'x bare':>8}  {'target':<10}")
    for name, each in seconds.items():
        median = statistics.median(each)
        print(f"{name:<18}{median:>8.2f}{median / bare:>8.2f}  {_verdict(name, median, bare)}".rstrip())


def _verdict(name: str, seconds: float, bare: float) -> str:
    """The target of a case, and whether it is met; empty for a case without one."""
    if name not in _MOST_TIMES_BARE:
        return ""
    most = _MOST_TIMES_BARE[name]
    return f"{f'<= {most} x':<10}{'met' if seconds <= most * bare else 'missed'}"


def measured(folder: Path, rounds: int) -> Mapping[str, Sequence[float]]:
    """Seconds of each case, one number for each round."""
    seconds: dict[str, list[float]] = {}

    def timed(name: str, *arguments: str, cache: str = "cache") -> None:
        environment = os.environ | {"XDG_CACHE_HOME": str(folder / cache)}
        started = time.perf_counter()
        done = subprocess.run(
            [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False
        )
        taken = time.perf_counter() - started
        if done.returncode != 0:
            raise RuntimeError(f"{name} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        print(f"  {name}: {taken:.2f} s", file=sys.stderr, flush=True)
        seconds.setdefault(name, []).append(taken)

    first = _job(folder / "warm")
    timed("warm", "-m", "sink", "warm", str(first))
    del seconds["warm"]
    (iceberg,) = (jar for jar in _jars(folder / "cache", first) if "iceberg-spark-runtime" in jar)
    bare = [f"{name}={value}" for name, value in {**_LOCAL, "spark.jars": iceberg}.items()]
    for number in range(rounds):
        path = str(_job(folder / str(number)))
        timed("bare", "-c", _BARE, *bare)
        timed("first commit", "-m", "sink", "run", path)
        timed("nothing to do", "-m", "sink", "run", path)
        shutil.copytree(folder / "cache/rowdelta/jars", folder / f"jars-{number}/rowdelta/jars")
        timed("without archive", "-m", "sink", "run", path, cache=f"jars-{number}")
        timed("check", "-m", "sink", "check", path)
        timed("status", "-m", "sink", "status", path)
    return seconds


def _jars(cache: Path, path: Path) -> Sequence[str]:
    os.environ["XDG_CACHE_HOME"] = str(cache)
    found = jars.recorded(session.settings(config.load(path)))
    assert found is not None
    return [jar.path for jar in found]


def _job(folder: Path) -> Path:
    """A configuration, and a file of changes for it."""
    (folder / "changes").mkdir(parents=True)
    records = [{"row_kind": "+U", "id": key, "v": "text", "seq": key} for key in range(_CHANGES)]
    (folder / "changes" / "0.json").write_text("".join(json.dumps(record) + "\n" for record in records))
    sections = {
        "sink": {"id": "start", "checkpoint": "./state", "trigger": "available-now"},
        "source": {"type": "files", "format": "row-kind", "options": {"path_format": "json"}},
        "catalogs": {"lake": {"type": "hadoop", "warehouse": "./warehouse"}},
        "tables": [
            {
                "source": "./changes",
                "target": "lake.shop.orders",
                "key": ["id"],
                "columns": {"id": "bigint", "v": "string"},
                "order_by": ["seq bigint"],
            }
        ],
        "spark": _LOCAL,
    }
    path = folder / "sink.yaml"
    path.write_text(yaml.safe_dump(sections))
    return path


if __name__ == "__main__":
    main()
