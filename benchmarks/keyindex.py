"""The key index alone, without Spark: what a key costs on disk, to build, to open and to probe, and that memory doesn't
grow with keys.

Runs are written as the bootstrap writes them (`sink.spark.tasks.index.build_index`): 4M additive entries each, all of
one sequence, each over the whole range of hashes. So every probe visits every run, as in a table just indexed by one
task. Key number i is an int64: its low hash is itself, and its high hash a mix of it, so no key needs to be kept to be
found again.

Building and probing are processes of their own. `cold` is the first probe after the runs were opened and dropped from
the system's cache, so that it reads them from disk. `warm` is the median of later ones, each of other keys, after as
many that aren't counted. Anonymous memory is what the process holds; file memory is pages of the runs, which the system
drops when it needs room.

With `--results` a table in Markdown is written too: `benchmarks/results/keyindex.md` is a part of `docs/benchmarks.md`.
"""

import argparse
import os
import resource
import shutil
import statistics
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import TypeVar

import numpy as np
from pyiceberg.io.pyarrow import PyArrowFileIO

from benchmarks.pages import folded
from deltawriters.collapse import Ints
from deltawriters.keyindex import RUN_ENTRIES, Entries, IndexedFile, IndexSlice, RunInfo, open_run, write_run
from deltawriters.keyindex.hashing import Hashes, mixed

PROBED = 10_000
"""Keys looked up at a time; half of them are in the index."""
WARM_PROBES = 20
"""So many are counted, and as many before them aren't."""
ROWS_PER_FILE = 1_000_000

Result = TypeVar("Result")


@dataclass(frozen=True)
class Memory:
    """Resident memory of a process in bytes, from `/proc/self/status`."""

    total: int
    anonymous: int
    file: int

    @classmethod
    def now(cls) -> "Memory":
        lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return cls(*(int(lines[name].split()[0]) * 1024 for name in ("VmRSS", "RssAnon", "RssFile")))


@dataclass(frozen=True)
class Built:
    """`seconds` are those of `write_run`, which sorts and writes; `peak_memory` is the process's largest resident size
    in bytes.
    """

    runs: list[RunInfo]
    seconds: float
    peak_memory: int


@dataclass(frozen=True)
class Probed:
    """Seconds to open all runs, of the first probe and of each later one that counts; memory before the runs were
    opened and after the last probe.
    """

    open_seconds: float
    cold_seconds: float
    seconds: list[float]
    before: Memory
    after: Memory


def build(keys: int, seed: int, location: str) -> Built:
    """Write the index of keys 0..keys-1. One run's entries are in memory at a time."""
    files = tuple(
        IndexedFile(f"{location}/data/{number:05d}.parquet", 0, {}) for number in range(-(-keys // ROWS_PER_FILE))
    )
    runs: list[RunInfo] = []
    seconds = 0.0
    for first in range(0, keys, RUN_ENTRIES):
        numbers = np.arange(first, min(first + RUN_ENTRIES, keys))
        entries = Entries(
            high=_high(numbers, seed),
            low=numbers.view(np.uint64),
            file=(numbers // ROWS_PER_FILE).astype(np.uint32),
            pos=(numbers % ROWS_PER_FILE).astype(np.uint32),
            files=files,
        )
        started = perf_counter()
        runs.append(write_run(PyArrowFileIO(), location, f"run-{len(runs)}", 1, entries))
        seconds += perf_counter() - started
    return Built(runs, seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def probe(keys: int, seed: int, location: str, runs: list[RunInfo]) -> Probed:
    """Open the runs and look keys up, other ones each time; what is found is compared with what was written."""
    random = np.random.default_rng(seed)
    index = IndexSlice(location, (), tuple(runs), dead={})
    before = Memory.now()
    started = perf_counter()
    for run in runs:
        open_run(index.io, location, run)
    open_seconds = perf_counter() - started
    for run in runs:
        _drop_from_cache(f"{location}/{run.name}")
    seconds = []
    for _ in range(1 + 2 * WARM_PROBES):
        present = random.integers(0, keys, PROBED // 2)
        numbers = random.permutation(np.concatenate([present, random.integers(keys, 2 * keys, PROBED - len(present))]))
        high, low = _high(numbers, seed), numbers.view(np.uint64)
        started = perf_counter()
        located = index.probe(high, low, 0, 2**64)
        seconds.append(perf_counter() - started)
        assert len(located.query) == len(present), f"{len(located.query)} keys found, {len(present)} are there"
        names = np.array([file.path for file in located.files])[located.file]
        wanted = [
            f"{location}/data/{number:05d}.parquet" for number in (numbers[located.query] // ROWS_PER_FILE).tolist()
        ]
        assert np.array_equal(names, wanted), "a key was found in another data file"
        assert np.array_equal(located.pos, numbers[located.query] % ROWS_PER_FILE), (
            "a key was found at another position"
        )
    return Probed(open_seconds, seconds[0], seconds[1 + WARM_PROBES :], before, Memory.now())


def _drop_from_cache(path: str) -> None:
    """Pages that wait to be written can't be dropped, so they are written first."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def run(sizes: list[int], seed: int, folder: Path) -> list[str]:
    """Build and probe an index of each size, one at a time on disk. Prints as it goes.

    :return: the same figures as rows of a table in Markdown.
    """
    rows = []
    print(f"probes of {PROBED:,} keys, half of them there (seed {seed}); resident memory in MB, anonymous + file\n")
    print(f"{'':>13}{'bytes':>7}{'build':>8}{'build':>12}{'build':>9}{'open':>8}{'cold':>8}{'warm':>8}", end="")
    print(f"{'before':>16}{'after probing':>16}")
    print(
        f"{'keys':>13}{'a key':>7}{'s':>8}{'keys/s':>12}{'peak MB':>9}{'ms':>8}{'ms':>8}{'ms':>8}{'MB':>16}{'MB':>16}"
    )
    for keys in sizes:
        location = folder / str(keys)
        location.mkdir()
        built = _in_new_process(partial(build, keys, seed, str(location)))
        probed = _in_new_process(partial(probe, keys, seed, str(location), built.runs))
        shutil.rmtree(location)
        size = sum(run.size_in_bytes for run in built.runs)
        print(
            f"{keys:>13,}{size / keys:>7.1f}{built.seconds:>8.2f}{keys / built.seconds:>12,.0f}"
            f"{built.peak_memory / 1e6:>9,.0f}"
            f"{probed.open_seconds * 1000:>8,.0f}{probed.cold_seconds * 1000:>8.1f}"
            f"{statistics.median(probed.seconds) * 1000:>8.1f}{_shown(probed.before):>16}{_shown(probed.after):>16}",
            flush=True,
        )
        rows.append(
            f"| {keys:,} | {size / keys:.1f} | {built.seconds:,.1f} | {probed.open_seconds:,.2f} "
            f"| {_seconds(probed.cold_seconds)} | {_seconds(statistics.median(probed.seconds))} "
            f"| {probed.after.anonymous / 1e6:,.0f} |"
        )
    return rows


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 1 else f"{value * 1000:,.0f} ms"


def table(sizes: list[int], rows: list[str]) -> str:
    """The part of `docs/benchmarks.md`."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    command = f"`python -m benchmarks.keyindex --keys {' '.join(map(str, sizes))}`"
    return folded(
        "\n".join(
            [
                f"{command}, one process on one core, {memory:.0f} GB of memory. Cold: nothing of the index is in the "
                "system's cache. Warm: after 200,000 probed keys.",
                "",
                "| keys | bytes a key | build, s | open with checksums (a restart), s | 10,000 probes: cold | warm "
                "| memory of the process, MB |",
                "|---:|---:|---:|---:|---:|---:|---:|",
                *rows,
                "",
                "An index that is larger than the memory is read from disk by warm probes too. The runs of a first "
                "build cover the whole range of hashes, so that each of them (one for 4 million keys) is looked into; "
                "merges make fewer of them.",
                "",
            ]
        )
    )


def _high(numbers: Ints, seed: int) -> Hashes:
    """A uniform hash of each number, which is a bijection."""
    return mixed(numbers.astype(np.uint64) + np.uint64(seed) * np.uint64(0x9E3779B97F4A7C15))


def _in_new_process(task: Callable[[], Result]) -> Result:
    """A fresh interpreter, whose memory is that of `task` alone."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(task).result()


def _shown(memory: Memory) -> str:
    return f"{memory.total / 1e6:,.0f}: {memory.anonymous / 1e6:,.0f} + {memory.file / 1e6:,.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, nargs="+", default=[1_000_000, 10_000_000, 100_000_000])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--results", type=Path, help="a file for the figures as a table in Markdown")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="rowdelta-keyindex-"))
    try:
        rows = run(args.keys, args.seed, folder)
        if args.results is not None:
            args.results.write_text(table(args.keys, rows), encoding="utf-8")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
