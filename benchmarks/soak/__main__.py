"""`python -m benchmarks.soak`: play the soak, and make its page from the samples. Ends with 1 if a table differs."""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from benchmarks.soak import report
from benchmarks.soak.job import FORMATS, Job
from benchmarks.soak.run import Plan, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--batches", type=int, default=Plan.batches)
    parser.add_argument("--keys", type=int, default=Plan.keys)
    parser.add_argument("--events", type=int, default=Plan.events, help="changes in a micro-batch")
    parser.add_argument("--kill-every", type=int, help="default: a fiftieth of the micro-batches")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--seed", type=int, default=Plan.seed)
    parser.add_argument(
        "--results", type=Path, default=report.RESULTS, help="where the samples go, beside those of other formats"
    )
    parser.add_argument("--page", type=Path, default=report.PAGE, help="the page that is made of them")
    parser.add_argument("--work", type=Path, help="a folder for tables and files; it is kept")
    options = parser.parse_args()
    plan = Plan(
        options.batches,
        options.keys,
        options.events,
        kill_every=options.kill_every or max(1, options.batches // 50),
        column_every=max(1, options.batches // 10),
        sample_every=max(5, options.batches // 100),
        seed=options.seed,
    )
    work = options.work or Path(tempfile.mkdtemp(prefix="rowdelta-soak-"))
    report.keep_others(options.results, options.formats)
    try:
        wrong = run(plan, Job(work, tuple(options.formats)), options.results)
    finally:
        if options.work is None:
            shutil.rmtree(work, ignore_errors=True)
    report.write(options.results, options.page)
    for each in wrong:
        print(each, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
