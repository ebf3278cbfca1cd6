"""`python -m benchmarks.peers`: measure, append the figures to a file of JSON lines, and make the page from it."""

import argparse
import re
import shutil
import statistics
import tempfile
from pathlib import Path

from benchmarks.peers import measure, report
from benchmarks.peers.cases import CHANGELOGS, PEERS, SCALES


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--scale", choices=SCALES, default="small")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="a regular expression for `PEER: CHANGELOG`, as --list shows them")
    parser.add_argument("--list", action="store_true", help="show the cases, and measure nothing")
    parser.add_argument("--results", type=Path, default=report.RESULTS, help="where the figures go, one line a case")
    parser.add_argument("--page", type=Path, default=report.PAGE, help="the page that is made of all figures there")
    parser.add_argument("--work", type=Path, help="a folder for tables and files; it is kept")
    options = parser.parse_args()
    cases = [
        (peer, changelog)
        # what stands in one table is measured in one stretch: the machine's speed changes from hour to hour
        for changelog in CHANGELOGS
        for peer in PEERS
        if re.search(options.only, f"{peer.name}: {changelog.name}")
    ]
    if options.list:
        for peer, changelog in cases:
            print(f"{peer.name}: {changelog.name}")
        return
    work = options.work or Path(tempfile.mkdtemp(prefix="rowdelta-peers-"))
    try:
        for figures in measure.measure(cases, options.scale, options.seed, work):
            measure.append(figures, options.results)
            print(f"{figures['peer']}: {figures['changelog']}: {_shown(figures)}", flush=True)
    finally:
        if options.work is None:
            shutil.rmtree(work, ignore_errors=True)
    report.write(options.results, options.page)


def _shown(figures: measure.Figures) -> str:
    for reason in ("skipped", "failed"):
        if reason in figures:
            return f"{reason}: {figures[reason]}"
    scans = " ".join(f"{mark['spark'].get('scan', float('nan')):.2f}" for mark in figures["marks"])
    equal = "equal" if figures["equal"] else "NOT EQUAL"
    seconds, kinds = statistics.median(figures["seconds"]), report.bytes_by_kind(figures)
    return f"{seconds:.2f} s a micro-batch, scans {scans} s, {equal}; bytes a change: {kinds}"


if __name__ == "__main__":
    main()
