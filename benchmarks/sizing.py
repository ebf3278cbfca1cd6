"""The pieces of docs/sizing.md that concern the key index: what one core does, and what grows with what.

    python -m benchmarks.sizing                     # indexes of 1 and 10 million keys
    python -m benchmarks.sizing --keys 100000000    # 2.4 GB of disk, twice while runs are merged

A row for each size, by one process on one core, without Spark:

- build: `write_run`, which sorts and writes, in runs of 4 million entries over the whole range of hashes, as a first
  index has them
- probe: a micro-batch's keys, half of them there, in all runs; the median of several, whose pages are in the system's
  cache
- merge: four groups of runs of the same size into one, which each key goes through about log4(keys of the table / keys
  of a micro-batch) times
- manifest: bytes of a version with the 250 runs of 1 billion keys and `--dead` data files that died since the oldest of
  them, and the milliseconds to make it; each commit writes one
- verify: reading a run once on each machine, with its checksum

What comes of 1 billion keys is computed from the largest size: rates stay, and what visits each run grows with them.
"""

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.keyindex import build, probe
from deltawriters.keyindex import RUN_ENTRIES, IndexSlice, RunInfo, open_run, runs
from deltawriters.keyindex.versions import IndexVersion
from deltawriters.storage import file_io

BILLION = 1_000_000_000


@dataclass(frozen=True)
class Pieces:
    """Of an index with `keys` keys in `runs` runs of a core. Rates are keys a second, times milliseconds."""

    keys: int
    runs: int
    built: float
    probe: float
    merged: float
    manifest_bytes: int
    manifest: float
    verified: float

    def at(self, keys: int) -> "Pieces":
        """Extrapolated: rates stay, and what visits each run grows with their number."""
        factor = keys / self.keys
        return replace(
            self,
            keys=keys,
            runs=round(self.runs * factor),
            probe=self.probe * factor,
        )

    def __str__(self) -> str:
        return (
            f"| {self.keys:,} | {self.keys * 24 / 1e9:.2f} | {self.runs} | {self.built / 1e6:.1f} | {self.probe:.1f} "
            f"| {self.merged / 1e6:.1f} | {self.manifest_bytes / 1e3:.0f} | {self.manifest:.1f} "
            f"| {self.verified / 1e6:.0f} |"
        )


def measure(keys: int, dead: int, seed: int) -> Pieces:
    with tempfile.TemporaryDirectory(prefix="rowdelta-sizing-") as folder:
        built = build(keys, seed, folder)
        started = time.perf_counter()
        for run in built.runs:
            open_run(file_io(()), folder, run)
        verified = keys / (time.perf_counter() - started)
        probed = probe(keys, seed, folder, built.runs)
        merged = _merge(folder, built.runs, keys)
        as_many = (built.runs * (BILLION // RUN_ENTRIES))[: BILLION // RUN_ENTRIES]
        version = IndexVersion(
            "2 0: ", 1, tuple(as_many), {f"s3a://lake/shop/orders/data/{n:036d}.parquet": n for n in range(dead)}
        )
        started = time.perf_counter()
        manifest = version.to_json()
        seconds = time.perf_counter() - started
        return Pieces(
            keys, len(built.runs), keys / built.seconds, 1000 * statistics.median(probed.seconds), merged,
            len(manifest), 1000 * seconds, verified,
        )  # fmt: skip


def _merge(folder: str, infos: list[RunInfo], keys: int) -> float:
    """Keys merged a second. The runs of one sequence become four groups, as four micro-batches would have left them."""
    if len(infos) < 4:  # one run: four copies of it under other ages are merged
        infos = infos * 4
        keys *= 4
    aged = []
    for number, info in enumerate(infos):
        copy = replace(info, name=f"{info.name}-{number}", sequence=1 + number % 4)
        Path(folder, copy.name).hardlink_to(Path(folder, info.name))
        aged.append(copy)
    index = IndexSlice(folder, (), tuple(aged), {}, merge=tuple(run.name for run in aged))
    runs._opened.clear()
    started = time.perf_counter()
    written = index.write_merged("merged", 0, 2**64)
    seconds = time.perf_counter() - started
    assert sum(run.entries for run in written) == keys
    return keys / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--dead", type=int, default=1000, help="dead data files (default: 1,000)")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    print(
        "| keys | GB | runs | build, M keys/s | probe of 10,000, ms | merge, M keys/s | manifest, KB | manifest, ms "
        "| verify, M keys/s |\n|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
    )
    largest = None
    for keys in args.keys:
        largest = measure(keys, args.dead, args.seed)
        print(largest, flush=True)
    if largest is not None and largest.keys < BILLION:
        print(f"{largest.at(BILLION)}\n\nThe last line is extrapolated from the one before it.")


if __name__ == "__main__":
    main()
