"""`python -m benchmarks.htap`: change tables at an even pace while others read them, and make the page from the
samples. Ends with 1 if a table differs.
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from benchmarks.htap import report
from benchmarks.htap.run import Plan, run
from benchmarks.soak.job import FORMATS, Job


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.htap", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--seconds", type=int, default=Plan.seconds)
    parser.add_argument("--rate", type=int, default=Plan.rate, help="changes a second")
    parser.add_argument("--stock", type=int, default=Plan.stock, help="articles")
    parser.add_argument("--orders", type=int, default=Plan.orders, help="orders at any time")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=("v3", "delta"))
    parser.add_argument("--seed", type=int, default=Plan.seed)
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    parser.add_argument("--page", type=Path, default=report.PAGE)
    parser.add_argument("--work", type=Path, help="a folder for tables and files; it is kept")
    options = parser.parse_args()
    # at most 300 samples of readers, and twelve comparisons, however long it is
    every = max(10, options.seconds // 360)
    plan = Plan(
        options.seconds,
        options.rate,
        options.stock,
        options.orders,
        every,
        max(30, options.seconds // 12),
        options.seed,
    )
    work = options.work or Path(tempfile.mkdtemp(prefix="rowdelta-htap-"))
    job = Job(work, tuple(options.formats), "1g", "5 seconds", 1000)
    try:
        wrong = run(plan, job, options.results)
    finally:
        if options.work is None:
            shutil.rmtree(work, ignore_errors=True)
    report.write(options.results, options.page)
    for name, found in wrong.items():
        for each in found:
            print(f"{name}: {each}", file=sys.stderr)
    return 1 if any(wrong.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
