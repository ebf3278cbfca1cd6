"""`python -m benchmarks.skipping`: how many files a filtered scan opens, by the order of rows in files.

For each format and order a table is loaded, and a quarter of its rows is changed, in no order. Then `rowdelta maintain
--rewrite-all` rewrites each file once. What the format's own planner takes for filters is counted, which says the same
on any machine. Files of 128 KB stand for files of 32 MB.
"""

import argparse
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from benchmarks.streams import CATALOG, build_session
from sink.commands.maintain import maintain
from sink.config import Config
from sink.run.pipeline import Pipeline
from sink.spark import session
from sink.targets.catalogs import Catalogs

FORMATS = ("v2", "v3", "delta")
ORDERS: dict[str, dict[str, list[str]]] = {
    "none": {},
    "sort: [day]": {"sort": ["day"]},
    "sort: [day, customer]": {"sort": ["day", "customer"]},
    "zorder: [day, customer]": {"zorder": ["day", "customer"]},
}
FILE_BYTES = 128 * 1024
GROUPS = (8, 64)
"""Files that are sorted together, about."""
CUSTOMERS, DAYS = 100_000, 365
LOADS, UPDATES = 10, 10
FILTERS = 20
"""Of each kind; the mean is shown."""


@dataclass(frozen=True)
class Filter:
    """:param condition: of a random customer and a random day, in SQL."""

    name: str
    condition: Callable[[int, int], str]


def _day(number: int) -> str:
    return f"DATE '{np.datetime64('2026-01-01') + number}'"


def _between(column: str, low: str, high: str) -> str:
    return f"{column} >= {low} AND {column} < {high}"


WANTED = (
    Filter("a day", lambda _, day: f"day = {_day(day)}"),
    Filter("a customer", lambda customer, _: f"customer = {customer}"),
    Filter(
        "a tenth of the days and of the customers",
        lambda customer, day: (
            _between("day", _day(day), _day(day + DAYS // 10))
            + " AND "
            + _between("customer", str(customer), str(customer + CUSTOMERS // 10))
        ),
    ),
)


def write_changes(folder: Path, rows: int, seed: int) -> None:
    """Change files, each for a micro-batch."""
    random = np.random.default_rng(seed)
    folder.mkdir()
    ids = np.arange(rows)
    customer, day = random.integers(0, CUSTOMERS, rows), random.integers(0, DAYS, rows).astype(np.int32)
    numbers = iter(range(1 << 30))

    def write(chosen: Any, kind: str) -> None:
        count, number = len(chosen), next(numbers)
        columns = {
            "row_kind": pa.repeat(kind, count),
            "seq": pa.repeat(pa.scalar(number, pa.int64()), count),
            "id": chosen,
            "customer": customer[chosen],
            "day": pa.array(day[chosen] + np.int32(20454), pa.int32()).cast(pa.date32()),  # from 2026-01-01 on
            "amount": random.integers(0, 1 << 40, count),
        }
        pq.write_table(pa.table(columns), folder / f"{number:05}.parquet")

    for part in np.array_split(ids, LOADS):
        write(part, "+I")
    for part in np.array_split(random.permutation(ids)[: rows // 4], UPDATES):
        write(part, "+U")


def measure(
    spark: SparkSession, folder: Path, changes: Path, kind: str, order: dict[str, list[str]], together: int, seed: int
) -> tuple[int, list[float]]:
    """The number of files of the table, and for each filter how many of them are opened."""
    rewrite = {"max-file-group-size-bytes": together * FILE_BYTES, **order}
    size = {"delta.targetFileSize" if kind == "delta" else "write.target-file-size-bytes": str(FILE_BYTES)}
    warehouse = folder / "warehouse"
    catalog = CATALOG if kind != "delta" else "deltas"
    target = f"{catalog}.n{folder.name}.t"
    config = Config.model_validate(
        {
            "sink": {"id": "skipping", "checkpoint": str(folder / "state"), "on_bad_record": "fail"},
            "source": {"type": "files", "format": "row-kind", "options": {"maxFilesPerTrigger": 1}},
            "catalogs": {
                catalog: {
                    "type": "delta" if kind == "delta" else "hadoop",
                    "warehouse": str(warehouse if kind == "delta" else folder.parent / "warehouse"),
                }
            },
            "tables": [
                {
                    "source": str(changes),
                    "target": target,
                    "key": ["id"],
                    "columns": {"id": "bigint", "customer": "bigint", "day": "date", "amount": "bigint"},
                    "order_by": ["seq bigint"],
                    "properties": size | ({} if kind == "delta" else {"format-version": kind[1:]}),
                    "maintenance": {"budget": 0, "expire": None, "orphans": None, "rewrite": rewrite},
                }
            ],
        }
    )
    session.start(config)
    Pipeline(spark, config).run()
    (done,) = maintain(spark, config, [], dry_run=False, rewrite_all=True)
    assert done.error is None, done.error
    table = Catalogs(spark, config).load(target)
    random = np.random.default_rng(seed)
    found = []
    for wanted in WANTED:
        places = [
            (int(random.integers(CUSTOMERS * 9 // 10)), int(random.integers(DAYS * 9 // 10))) for _ in range(FILTERS)
        ]
        opened = [len(table.files_where(wanted.condition(*place))) for place in places]  # type: ignore[union-attr]
        found.append(sum(opened) / len(opened))
    return len(table.files_where("id >= 0")), found  # type: ignore[union-attr]


def run(folder: Path, formats: Sequence[str], rows: int, seed: int) -> Iterator[str]:
    """The figures as rows of Markdown."""
    yield "| format | order | files sorted together | files | " + " | ".join(each.name for each in WANTED) + " |"
    yield "|---|---|---:|---:|" + "---:|" * len(WANTED)
    changes = folder / "changes"
    write_changes(changes, rows, seed)
    spark = build_session(folder / "warehouse", with_delta="delta" in formats)
    spark.sparkContext.setLogLevel("ERROR")
    number = 0
    for kind in formats:
        for name, order in ORDERS.items():
            for together in GROUPS if order else GROUPS[:1]:
                number += 1
                files, opened = measure(spark, folder / f"case{number}", changes, kind, order, together, seed)
                shown = " | ".join(f"{count:.1f} ({count / files:.0%})" for count in opened)
                yield f"| {kind} | `{name}` | {together if order else ''} | {files} | {shown} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="rowdelta-skipping-"))
    try:
        for line in run(folder, args.formats, args.rows, args.seed):
            print(line, flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
